// Fast forward kernel of the turing family: int8 scores, and P V in spans with fp16 sums.
//
// GeForce runs products with fp32 sums at half rate. Here Q K^T multiplies int8 codes (codes.cuh), and a span of keys sums P V in
// fp16 before it is added to the fp32 output. A warp has all its scores in registers, two tiles of rows at once.
//
// Range: |V| < 1 after its scaling, a packed probability is at most 2^kLargestLog2, and a span has kSpan keys, so sums stay below
// 2^15 (1 + 2^-11)^(kSpan / 8). The reference of a row, which is subtracted from scores, is tested after a span's probabilities
// exist. If one was too large, it moves and the span's scores are computed again: K is still in shared memory.
//
// K and V move through a ring of four slots of a span. Step j stores the span of step j + 2, so one barrier a step suffices.
#pragma once

#include "forward/block.cuh"
#include "softmax.cuh"
#include "tile.cuh"
#include "turing/fast/mma.cuh"
#include "turing/fast/queries.cuh"

namespace turing {

// Whether the kernel has code for a boolean mask.
constexpr bool kHasMask = FEATURES & kFeatureBias;

// The kernel. A warp has 16 * RowTiles rows. TilesAtOnce: tiles of 8 keys whose scores are in registers together.
template <int Headdim, int Warps, int RowTiles, int Span, int TilesAtOnce, int PreparedKeys>
struct FastForward {
    static constexpr int kThreads = 32 * Warps;
    static constexpr int kWarpRows = 16 * RowTiles, kBlockRows = Warps * kWarpRows;
    static constexpr int kSpan = Span, kTiles = Span / 8;
    static constexpr int kRows = 2 * RowTiles;  // of a lane: 8 apart
    static constexpr int kCodeChunks = Headdim / 16, kChunks = Headdim / kChunk;
    static constexpr int kCodePitch = kCodeChunks * kChunkBytes, kPitch = kChunks * kChunkBytes;
    static constexpr u32 kOffsetV = kSpan * kCodePitch, kSlotBytes = kSpan * (kCodePitch + kPitch);
    static constexpr int kSlots = 4, kAhead = 2;
    static constexpr u32 kRingBytes = kSlots * kSlotBytes;
    // After the ring: what a thread reads once a span, for which there are no registers.
    static constexpr u32 kRecordBytes = 3 * kChunkBytes, kRowBytes = 2 * kChunkBytes;  // of a thread, and of the rows of a quad
    static constexpr u32 kRowOffset = kRingBytes + kThreads * kRecordBytes, kSharedBytes = kRowOffset + kThreads / 4 * kRowBytes;
    static constexpr int kRowsV = kThreads / kChunks, kPassesV = kSpan / kRowsV;  // rows of V that the block loads at once
    static_assert(kThreads == kSpan * kCodeChunks, "a thread moves one chunk of K's codes a span");
    static_assert(kPassesV == 2 && kRowsV % 8 == 0, "V takes two passes with one swizzle");
    static_assert(kScaleKeys % kSpan == 0, "a span has one block of scales");

    __device__ static constexpr int log2_of(int x) { return x == 1 ? 0 : 1 + log2_of(x / 2); }
    // Log2 of the largest packed probability, and of what 1 becomes when a reference is set.
    static constexpr int kLargestLog2 = 15 - log2_of(kSpan), kSlackLog2 = 4, kOneLog2 = kLargestLog2 - kSlackLog2;
    static constexpr float kPackingLog2 = 112.f;  // softmax.cuh: packed fp16 is 2^112 times the float
    static constexpr float kNoReference = -1e30f;

    using Block = ForwardBlock<kBlockRows, true>;
    using Codes = u32[kRows][kCodeChunks];
    using Output = Accumulator[RowTiles][kChunks];

    __device__ __forceinline__ static int remat_warp_row(const FastParams& p) {
        return Block::remat_row(p.problem) + remat_thread_index() / 32 * kWarpRows;
    }
    __device__ __forceinline__ static float as_float(u32 bits) { return __uint_as_float(bits); }

    // Scores of Tiles tiles from key row `key` of the slot on, as floats from kSumZero on.
    template <int Tiles>
    __device__ __forceinline__ static void compute_scores(u32 (&s)[kRows][Tiles][2], const Codes& q, u32 k_fragment, int key,
                                                          u32 zero) {
#pragma unroll
        for (int c = 0; c < kCodeChunks / 4; c++)
#pragma unroll
            for (int t = 0; t < Tiles; t++) {
                u32 b[4];
                load_matrices(b, chunk_after<kCodeChunks>(k_fragment, 4 * c) + (key + 8 * t) * kCodePitch);
#pragma unroll
                for (int i = 0; i < 4; i++)
#pragma unroll
                    for (int r = 0; r < kRows; r++) {
                        if (c == 0 && i == 0)
                            multiply_int8(s[r][t], q[r][0], b[0], zero);
                        else
                            multiply_add_int8(s[r][t], q[r][4 * c + i], b[i]);
                    }
            }
    }

    // Which keys the lane's rows see, for masked spans.
    struct RowMask {
        const FastParams& p;
        int row, seqlen_k, low, high;
        const unsigned char* mask;

        __device__ __forceinline__ explicit RowMask(const FastParams& p_) : p(p_) {
            const BlockSeqlenInfo sequence(p.problem, p.lengths, remat_block_batch());
            const Mask window = mask_of(p.problem, sequence);
            row = remat_warp_row(p) + (remat_thread_index() & 31) / 4;
            low = window.low, high = window.high, seqlen_k = window.seqlen_k;
            mask = nullptr;
            if (kHasMask && p.mask)
                mask = reinterpret_cast<const unsigned char*>(p.mask) + remat_block_batch() * p.mask_batch_stride +
                       remat_head<true>(p.problem) * p.mask_head_stride;
        }
        // Replaces what belongs to hidden keys by -inf. `key`: the first tile's first key.
        template <int Tiles>
        __device__ __forceinline__ void apply(u32 (&s)[kRows][Tiles][2], int key) const {
            key += 2 * (remat_thread_index() & 3);
#pragma unroll
            for (int r = 0; r < kRows; r++) {
                const int i = row + 8 * r, first = max(i + low, 0);
                const unsigned count = max(min(i + high, seqlen_k - 1) - first + 1, 0);
                const unsigned char* of_row = nullptr;
                if (kHasMask && mask) of_row = mask + min(i, p.problem.seqlen_q - 1) * p.mask_row_stride + key;
#pragma unroll
                for (int t = 0; t < Tiles; t++) {
                    unsigned kept = 0xffff;
                    if (kHasMask && mask) kept = __ldg(reinterpret_cast<const unsigned short*>(of_row + 8 * t));
#pragma unroll
                    for (int j = 0; j < 2; j++) {
                        bool is_hidden = static_cast<unsigned>(key + 8 * t + j - first) >= count;
                        if (kHasMask) is_hidden |= (kept >> 8 * j & 0xff) == 0;
                        if (is_hidden) s[r][t][j] = 0xff800000u;
                    }
                }
            }
        }
    };

    __device__ __forceinline__ static void run(const FastParams& p) {
        extern __shared__ __align__(1024) unsigned char shared[];
        const u32 ring = shared_address(shared);
        const Block block(p.problem);
        const BlockSeqlenInfo sequence(p.problem, p.lengths, block.batch);
        if (kVarlen && block.row >= sequence.seqlen_q()) return;
        const Lane lane(threadIdx.x & 31);
        const int warp_row = block.row + threadIdx.x / 32 * kWarpRows;
        const Mask mask = mask_of(p.problem, sequence);
        const int key_first = mask.key_first(block.row) / kSpan * kSpan, key_end = mask.key_end(block.row, kBlockRows);
        float* lse = p.softmax_lse + sequence.lse_row(block.batch, block.head);

        float sum[kRows];
        const u32 quad_rows = ring + kRowOffset + threadIdx.x / 4 * kRowBytes;
        float references[kRows];
        Output o;
#pragma unroll
        for (int r = 0; r < kRows; r++) references[r] = kNoReference, sum[r] = 0.f;
        store_rows(quad_rows + kChunkBytes, references);
#pragma unroll
        for (int mt = 0; mt < RowTiles; mt++)
#pragma unroll
            for (int j = 0; j < kChunks; j++)
#pragma unroll
                for (int v = 0; v < 4; v++) o[mt][j][v] = 0.f;

        if (key_first < key_end) {
            const KeyCodes<Headdim> codes(p, sequence, block.head_k);
            Codes q;
            float q_scale[kRows];
            const unsigned short* rows = rows_of(p.q, block.batch, block.head, sequence.q_offset());
#pragma unroll
            for (int r = 0; r < kRows; r++) {
                const int i = warp_row + 8 * r + lane.group;
                float mean_score;
                q_scale[r] =
                    load_query_codes<Headdim>(q[r], mean_score, p, rows + i * p.q.row_stride, i < sequence.seqlen_q(), codes.mean);
                // until the row's end, which has no register for it
                if (lane.quad == 0 && i < sequence.seqlen_q()) lse[i] = mean_score;
            }
            // What the thread moves, in words of its record: pointers to its chunks of K's codes and of V; the pointer to scales,
            // the end of a run of spans, the last span; V's factor, the warp's fragments of V and of K, the places of K and V in a
            // slot, the last row of V.
            const int thread = threadIdx.x;
            const int chunk = min(thread % kChunks, p.problem.headdim_v / kChunk - 1);
            const u32 record = ring + kRingBytes + thread * kRecordBytes;
            store_pointers(record, codes.codes + thread * kChunkBytes,
                           rows_of(p.v, block.batch, block.head_k, sequence.k_offset()) + chunk * kChunk);
            {
                const float power = p.element == ElementType::Bf16
                                        ? 1.f
                                        : times_power(1.f, -v_exponent(codes.v_max, sequence.seqlen_k(), PreparedKeys, p.element));
                const unsigned long long k_scales = reinterpret_cast<unsigned long long>(codes.scales + lane.quad);
                store_shared(record + kChunkBytes, make_uint4(k_scales, k_scales >> 32, 0, (key_end - 1) / kSpan * kSpan));
                const u32 k_store = swizzled<kCodeChunks>(thread / kCodeChunks, thread % kCodeChunks);
                const u32 v_store = kOffsetV + swizzled<kChunks>(thread / kChunks, thread % kChunks);
                const u32 v_fragment = swizzled<kChunks>(lane.lane & 15, lane.lane >> 4);
                const u32 k_fragment = swizzled<kCodeChunks>(lane.lane & 7, lane.lane >> 3);
                store_shared(record + 2 * kChunkBytes, make_uint4(to_half2(power, power), v_fragment | k_fragment << 16,
                                                                  k_store | v_store << 16, sequence.seqlen_k() - 1));
            }
            store_rows(quad_rows, q_scale);
            const unsigned v_stride = p.v.row_stride;
            uint4 data;
            // Piece 0 is K's codes, 1 and 2 are V.
            const auto load = [&](int piece, int key) {
                const uint4 pointers = load_shared(record);
                if (piece == 0) {
                    const signed char* codes = pointer<signed char>(pointers.x, pointers.y);
                    data = __ldg(reinterpret_cast<const uint4*>(codes + static_cast<unsigned>(key) * Headdim));
                } else {
                    const uint4 at = load_shared(record + 2 * kChunkBytes);
                    const int row = min(key + (piece - 1) * kRowsV + remat_thread_index() / kChunks, static_cast<int>(at.w));
                    data = load_global(rows_after(pointer<unsigned short>(pointers.z, pointers.w), row, v_stride));
                }
            };
            const auto store = [&](int piece, u32 slot) {
                const uint4 at = load_shared(record + 2 * kChunkBytes);
                if (piece == 0) return store_shared(slot + (at.z & 0xffff), data);
                scale(data.x, at.x), scale(data.y, at.x), scale(data.z, at.x), scale(data.w, at.x);
                store_shared(slot + (at.z >> 16) + (piece - 1) * kRowsV * kPitch, data);
            };
            // The last span's first key, and the end of a run of spans.
            const auto last_key = [&] { return static_cast<int>(load_shared2(record + kChunkBytes + 8).y); };
            const auto until = [&] { return static_cast<int>(load_shared2(record + kChunkBytes + 8).x); };
#pragma unroll
            for (int j = 0; j < kAhead; j++)
#pragma unroll
                for (int piece = 0; piece < 3; piece++) {
                    load(piece, min(key_first + j * kSpan, last_key()));
                    store(piece, ring + j * kSlotBytes);
                }
            const auto load_k_scale = [&](int key) {
                const uint2 k_scales = load_shared2(record + kChunkBytes);
                return __ldg(pointer<float>(k_scales.x, k_scales.y) + key / kScaleKeys * kScales);
            };
            u32 slot = ring, zero = keep_in_register(kSumZeroBits);
            int key = key_first;

            const auto steps = [&](bool may_mask, int end) {
                store_shared2(record + kChunkBytes + 8, end, last_key());
#pragma unroll 1
                for (; key < until(); key += kSpan) {
                    barrier();
                    const auto ahead = [&] { return min(key + kAhead * kSpan, last_key()); };
                    const auto to = [&] { return slot_after(slot, ring); };
                    const float k_scale = load_k_scale(key);
                    const u32 k_fragment = slot + (load_shared2(record + 2 * kChunkBytes).y >> 16);
                    OperandP probabilities[RowTiles][kTiles];
                    float span_sum[kRows];
                    for (;;) {
                        float q_scale[kRows], reference[kRows];
                        load_rows(q_scale, quad_rows);
                        load_rows(reference, quad_rows + kChunkBytes);
                        float largest = 0.f, factor[kRows], addend[kRows];
#pragma unroll
                        for (int r = 0; r < kRows; r++) {
                            span_sum[r] = 0.f;
                            factor[r] = q_scale[r] * k_scale;
                            addend[r] = fmaf(-kSumZero, factor[r], -reference[r]);
                        }
#pragma unroll
                        for (int first = 0; first < kTiles; first += TilesAtOnce) {
                            u32 s[kRows][TilesAtOnce][2];
                            compute_scores(s, q, k_fragment, 8 * first, zero);
#pragma unroll
                            for (int r = 0; r < kRows; r++)
#pragma unroll
                                for (int i = 0; i < 2 * TilesAtOnce; i++) {
                                    u32& x = s[r][i / 2][i % 2];
                                    x = __float_as_uint(fmaf(as_float(x), factor[r], addend[r]));
                                }
                            // after the scales: one may be NaN for keys that the row does not see
                            if (may_mask) RowMask(p).apply(s, key + 8 * first);
#pragma unroll
                            for (int r = 0; r < kRows; r++)
#pragma unroll
                                for (int t = 0; t < TilesAtOnce; t++) {
                                    const float a = exp2_approx(as_float(s[r][t][0])), b = exp2_approx(as_float(s[r][t][1]));
                                    span_sum[r] += a + b;
                                    largest = fmaxf(largest, a + b);
                                    probabilities[r / 2][first + t][r % 2] = pack_shifted(a, b);
                                }
                        }
                        // packed before the branch: else ptxas packs after it, and keeps twice as many registers till then
#pragma unroll
                        for (int i = 0; i < RowTiles * kTiles * 2; i++) {
                            u32& x = probabilities[i / 2 / kTiles][i / 2 % kTiles][i % 2];
                            x = keep_in_register(x);
                        }
                        if (!__any_sync(~0u, largest > kLargestSum)) break;
                        move_references(p, may_mask, q, k_fragment, key, zero, factor, quad_rows + kChunkBytes, sum, o);
                    }
#pragma unroll
                    for (int r = 0; r < kRows; r++) sum[r] += span_sum[r];
                    const u32 v_fragment = slot + (load_shared2(record + 2 * kChunkBytes).y & 0xffff);
#pragma unroll
                    for (int c = 0; c < kChunks / 2; c++) {
                        u32 sums[2][RowTiles][2];
#pragma unroll
                        for (int h = 0; h < 2; h++)
#pragma unroll
                            for (int mt = 0; mt < RowTiles; mt++) sums[h][mt][0] = sums[h][mt][1] = 0;
#pragma unroll
                        for (int t = 0; t < kTiles; t += 2) {
                            u32 b[4];  // two tiles of keys for 8 columns, then for the next 8
                            load_matrices_transposed(b, chunk_after<kChunks>(v_fragment, 2 * c) + kOffsetV + 8 * t * kPitch);
#pragma unroll
                            for (int h = 0; h < 2; h++)
#pragma unroll
                                for (int half = 0; half < 2; half++)
#pragma unroll
                                    for (int mt = 0; mt < RowTiles; mt++)
                                        multiply_add_fp16(sums[h][mt], probabilities[mt][t + half], b[2 * h + half]);
                        }
#pragma unroll
                        for (int h = 0; h < 2; h++)
#pragma unroll
                            for (int mt = 0; mt < RowTiles; mt++)
#pragma unroll
                                for (int r = 0; r < 2; r++) {
                                    const float2 x = to_float2(sums[h][mt][r]);
                                    o[mt][2 * c + h][2 * r] += x.x;
                                    o[mt][2 * c + h][2 * r + 1] += x.y;
                                }
                        // pieces of the span after the next, spread over the products
                        constexpr int kParts = kChunks / 2, kFirst = kParts / 8, kGap = (kParts - kFirst) / 3;
                        if (c == kFirst) load(0, ahead());
#pragma unroll
                        for (int piece = 0; piece < 2; piece++)
                            if (c == kFirst + (piece + 1) * kGap) {
                                store(piece, to());
                                load(piece + 1, ahead());
                            }
                    }
                    store(2, to());
                    slot = slot + kSlotBytes < ring + kRingBytes ? slot + kSlotBytes : ring;
                }
            };
            // Masked spans, unmasked ones, masked ones. Their ranges are computed again each time: no register keeps them.
            const auto unmasked = [&] {
                const BlockSeqlenInfo sequence(p.problem, p.lengths, remat_block_batch());
                // the shuffle tells ptxas that the row is uniform in a warp
                return UnmaskedKeys<kSpan>(mask_of(p.problem, sequence), __shfl_sync(~0u, remat_warp_row(p), 0), kWarpRows);
            };
            const auto last_unmasked = [&](const UnmaskedKeys<kSpan>& keys) {
                return kHasMask && p.mask ? -1 : keys.first + static_cast<int>(keys.span);
            };
            for (;;) {
                {
                    const UnmaskedKeys<kSpan> keys = unmasked();
                    const int end = last_key() + kSpan;
                    steps(true, key > last_unmasked(keys) ? end : min(keys.first, end));
                }
                if (key > last_key()) break;
                steps(false, min(last_unmasked(unmasked()), last_key()) + 1);
                if (key > last_key()) break;
            }
        }
        write_output(p, quad_rows + kChunkBytes, sum, o);
    }

private:
    using OperandP = u32[2];
    // Above this sum of two, a probability may exceed 2^kLargestLog2 when packed.
    static constexpr float kLargestSum = 1.92592994e-34f * static_cast<float>(1 << kLargestLog2);

    __device__ __forceinline__ static void store_pointers(u32 address, const void* a, const void* b) {
        const unsigned long long x = reinterpret_cast<unsigned long long>(a), y = reinterpret_cast<unsigned long long>(b);
        store_shared(address, make_uint4(x, x >> 32, y, y >> 32));
    }
    template <class T>
    __device__ __forceinline__ static const T* pointer(u32 low, u32 high) {
        return reinterpret_cast<const T*>(static_cast<unsigned long long>(high) << 32 | low);
    }
    // A mean of V is no larger than V, but its rounding may be: fp16's largest number would become infinite.
    __device__ __forceinline__ static float below_overflow(float x) {
        return fabsf(x) < 66000.f ? fminf(fmaxf(x, -65504.f), 65504.f) : x;
    }
    // One float for each of the lane's rows. Lanes of a quad share them.
    __device__ __forceinline__ static void store_rows(u32 address, const float (&x)[kRows]) {
#pragma unroll
        for (int r = 0; r < kRows; r += 2) store_shared2(address + 4 * r, __float_as_uint(x[r]), __float_as_uint(x[r + 1]));
    }
    __device__ __forceinline__ static void load_rows(float (&x)[kRows], u32 address) {
#pragma unroll
        for (int r = 0; r < kRows; r += 2) {
            const uint2 pair = load_shared2(address + 4 * r);
            x[r] = as_float(pair.x), x[r + 1] = as_float(pair.y);
        }
    }
    // The slot that step j fills when it reads `slot`.
    __device__ __forceinline__ static u32 slot_after(u32 slot, u32 ring) {
        const u32 to = slot + kAhead * kSlotBytes;
        return to < ring + kRingBytes ? to : to - kRingBytes;
    }
    // One barrier for the warps of a block, which may be in the code of different steps: so not __syncthreads().
    __device__ __forceinline__ static void barrier() { asm volatile("bar.sync 0;" ::: "memory"); }
    __device__ __forceinline__ static void scale(u32& x, u32 factor) { asm("mul.rn.f16x2 %0, %0, %1;" : "+r"(x) : "r"(factor)); }

    // Moves the references of all rows to the largest score so far, and rescales what was summed. Rare: one tile at a time.
    __device__ __forceinline__ static void move_references(const FastParams& p, bool may_mask, const Codes& q, u32 k_fragment,
                                                           int key, u32 zero, const float (&factor)[kRows], u32 references,
                                                           float (&sum)[kRows], Output& o) {
        float largest[kRows];
#pragma unroll
        for (int r = 0; r < kRows; r++) largest[r] = negative_infinity();
#pragma unroll 1
        for (int t = 0; t < kTiles; t++) {
            u32 s[kRows][1][2];
            compute_scores(s, q, k_fragment, 8 * t, zero);
            if (may_mask) RowMask(p).apply(s, key + 8 * t);
#pragma unroll
            for (int r = 0; r < kRows; r++) largest[r] = fmaxf(largest[r], fmaxf(as_float(s[r][0][0]), as_float(s[r][0][1])));
        }
        float reference[kRows];
        load_rows(reference, references);
#pragma unroll
        for (int r = 0; r < kRows; r++) {
            float score = (largest[r] - kSumZero) * factor[r];
            score = fmaxf(score, __shfl_xor_sync(~0u, score, 1));
            score = fmaxf(score, __shfl_xor_sync(~0u, score, 2));
            const float moved = fmaxf(reference[r], score + (kPackingLog2 - kOneLog2));
            const float of_old = exp2_approx(reference[r] - moved);
            reference[r] = moved;
            sum[r] *= of_old;
#pragma unroll
            for (int j = 0; j < kChunks; j++)
#pragma unroll
                for (int v = 0; v < 2; v++) o[r / 2][j][2 * (r % 2) + v] *= of_old;
        }
        store_rows(references, reference);
    }

    __device__ __forceinline__ static void write_output(const FastParams& p, u32 references, const float (&sum)[kRows],
                                                        const Output& o) {
        const int batch = remat_block_batch(), head = remat_head<true>(p.problem);
        const BlockSeqlenInfo sequence(p.problem, p.lengths, batch);
        const Lane lane(remat_thread_index() & 31);
        const KeyCodes<Headdim> codes(p, sequence, head / (p.problem.nheads / p.problem.nheads_k));
        const int exponent = v_exponent(codes.v_max, sequence.seqlen_k(), PreparedKeys, p.element), row = remat_warp_row(p);
        const bool is_bf16 = p.element == ElementType::Bf16;
        unsigned short* out = rows_of(p.out, batch, head, sequence.q_offset());
        float* lse = p.softmax_lse + sequence.lse_row(batch, head);
        float reference[kRows];
        load_rows(reference, references);
#pragma unroll
        for (int r = 0; r < kRows; r++) {
            float total = sum[r];
            total += __shfl_xor_sync(~0u, total, 1);
            total += __shfl_xor_sync(~0u, total, 2);
            const bool is_empty = total == 0.f;
            const int i = row + 8 * r + lane.group;
            if (i >= sequence.seqlen_q()) continue;
            if (lane.quad == 0) lse[i] = is_empty ? positive_infinity() : kLn2 * (log2_approx(total) + reference[r] + lse[i]);
            // probabilities were packed as 2^112 of what was summed
            const float scale = is_empty ? 0.f : kPackingShift / total;
            unsigned short* to = out + i * p.out.row_stride + 2 * lane.quad;
#pragma unroll
            for (int j = 0; j < kChunks; j++)
                if (j * kChunk < p.problem.headdim_v) {
                    const float low = times_power(o[r / 2][j][2 * (r % 2)] * scale, exponent);
                    const float high = times_power(o[r / 2][j][2 * (r % 2) + 1] * scale, exponent);
                    *reinterpret_cast<u32*>(to + j * kChunk) =
                        is_bf16 ? to_bf16x2(low, high) : to_half2(below_overflow(low), below_overflow(high));
                }
        }
    }
};

}  // namespace turing
