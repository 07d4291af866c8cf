// Fast, approximate forward kernel of the turing family (`volta_fa::fwd_fast`): int8 scores, and P V with fp16 sums.
// src/ops/fast.rs launches it after the prepare kernel (prepare.cuh). GeForce runs products with fp32 sums at half rate. So Q K^T
// multiplies int8 codes, and P V of a span, the 16 to 64 keys of a step, is summed in fp16 and then added to the fp32 output. In a
// step a warp computes scores of a few tiles (8 keys) at a time, packs the probabilities to fp16, and then computes P V.
//
// K's int8 codes (codes.cuh) are those of K less its mean (option smooth_k), and after a Hadamard transform of K's columns
// (rotate), which load_queries() applies to Q too. With smooth_k all scores of a row lack q times the mean. load_queries() leaves
// it in softmax_lse, and write_output() adds it to the row's lse (fp32, natural log). q, k, v and out are fp16 or bf16.
//
// Range: |V| < 1 after its scaling, and the packed probabilities of a row in a span sum to at most 2^15. So fp16 sums, rounded
// every 8 keys, stay below 2^15 (1 + 2^-11)^(kSpan / 8). A row's reference is subtracted from its scores before exp2. If the sum of
// a span's probabilities is too large, the reference moves, and the span's scores are computed again from K in shared memory.
//
// Coarse thread blocks: a unit is what 1 in an integer product is worth as a score, log2 units: q's scale times k's. Scores err by
// up to a unit, because integer sums begin at kSumZero, 1.5 * 2^23 of them, and what subtracts these is rounded. If a unit exceeds
// 1, a span's sum may stay too large after each move of the reference, without end. So blocks where one may are coarse: they run
// all spans as masked ones, whose code then computes scores without this error (barrier_and_is_coarse(), set_coarse()).
//
// Instruction caches: masked and unmasked spans, which warps compute at the same time, share the code of P V, 15.6 KB (L0: 16 KB).
// A block's code stays below 46 KB (L1.5): so queries and output have rolled loops, rare code is behind branches.
//
// K and V move through a ring of four slots of a span: step j stores the span of step j + 2. The second half of the warps, the late
// half, is half a step behind the first: it meets a barrier after its scores and before its P V, the first half after its P V. So a
// scheduler, which has a warp of each half, overlaps P V of one with exponentials of the other. At barrier j the first half has
// finished step j, the late half step j - 1 and the scores of step j. So the span of step j + 1 is stored, slot j - 1 is free.
//
//   scale block       64 keys (kScaleKeys) with kScales (four) scales: the keys of lanes with the same lane % 4 share one
//   piece             16 bytes that a thread moves to the ring: a chunk (8 columns, kChunk) of V or 16 codes
//   k_fragment, v_fragment  the lane's ldmatrix addresses of the first tile of K or V in a slot
//   r, mt, t, c       one of a lane's rows, 8 apart; a tile of 16 rows; a tile of 8 keys; 64 columns of Q and K, or 16 of V
//   State, Sources    rows' scales (of q's codes, times |softmax_scale| * log2(e)) and references; addresses of K and V: in
//                     registers or in shared memory (state.cuh)
//   load_piece(), store_piece()  move a piece: from global memory to registers; from there to a slot, where Offsets says
//   OperandP          probabilities of a tile, packed: the lane's two keys in each of two rows
//   remat_*()         compute a value again, so that it holds no register in between; keep_in_register() stops that (ptx.cuh)
//   kVarlen, kHasMask what this kernel is compiled for: lengths from memory, a boolean mask
//   BLOCK_ROWS, SHARED_BYTES  query rows and shared memory of a block: the kernel's row in src/kernels
#pragma once

#include "conditional.cuh"  // Conditional<B, X, Y>::Type: X if B, else Y
#include "features.cuh"
#include "forward/block.cuh"  // ForwardBlock: a block's rows, head and batch entry; remat_head()
#include "softmax.cuh"  // exp2_approx(); pack_shifted(): packs x * 2^-112 as fp16 x
#include "tile.cuh"
#include "turing/fast/mma.cuh"  // multiply_int8(), multiply_add_int8(), multiply_add_fp16(): products; kSumZero
#include "turing/fast/queries.cuh"  // load_queries(); codes.cuh: KeyCodes, v_exponent()
#include "turing/fast/span_mask.cuh"  // SpanMask; kHasMask
#include "turing/fast/state.cuh"

namespace turing {

// The kernel. A thread block has Warps warps, a warp 16 * RowTiles query rows. Span: keys of a span. TilesAtOnce: tiles of 8 keys
// whose scores are in registers together. PreparedKeys: keys of a thread block of the prepare kernel.
template <int Headdim, int Warps, int RowTiles, int Span, int TilesAtOnce, int PreparedKeys>
struct FastForward {
    static constexpr int kThreads = 32 * Warps;
    static constexpr int kWarpRows = 16 * RowTiles, kBlockRows = Warps * kWarpRows;
    static constexpr int kSpan = Span, kTiles = Span / 8;
    static constexpr int kRows = 2 * RowTiles;  // of a lane: 8 apart
    // Of a row of K's codes, and of V: 16-byte chunks, and bytes in a slot. A slot has a span's codes, then from kOffsetV on its V.
    static constexpr int kCodeChunks = Headdim / 16, kChunks = Headdim / kChunk;
    static constexpr int kCodePitch = kCodeChunks * kChunkBytes, kPitch = kChunks * kChunkBytes;
    static constexpr u32 kOffsetV = kSpan * kCodePitch, kSlotBytes = kSpan * (kCodePitch + kPitch);
    static constexpr int kSlots = 4, kAhead = 2;  // slots of the ring; a step stores the span of the step kAhead later
    static constexpr u32 kRingBytes = kSlots * kSlotBytes;
    // After the ring: rows' state (kQuadBytes a quad, four lanes of the same rows) and Sources (state.cuh), unused without
    // kSharedState; then V's exponent.
    static constexpr u32 kOffsetExponent = kRingBytes + kThreads / 4 * kQuadBytes + 2 * kChunkBytes;
    // Then whether the thread block is coarse: the same for all warps, but a byte for each, so that it needs no barrier.
    static constexpr u32 kOffsetCoarse = kOffsetExponent + 4;
    static_assert(4 + Warps <= kChunkBytes, "flags and exponent share a chunk");
    static constexpr u32 kSharedBytes = kOffsetExponent + kChunkBytes;
    static_assert(kBlockRows == BLOCK_ROWS && kSharedBytes == SHARED_BYTES, "the row in src/kernels and the kernel disagree");
    // Pieces that a thread moves in each span: of K's codes, and of these and V (twice the bytes). kRowsV: rows between two of V.
    static constexpr int kCodePieces = kSpan * kCodeChunks / kThreads, kPieces = 3 * kCodePieces, kRowsV = kThreads / kChunks;
    static_assert(kCodePieces * kThreads == kSpan * kCodeChunks, "all threads move as many chunks");
    static_assert(kRowsV % 8 == 0 && kThreads / kCodeChunks % 8 == 0, "the rows of a thread have one swizzle");
    static_assert(kScaleKeys % kSpan == 0, "a span has one block of scales");

    __device__ static constexpr int log2_of(int x) { return x == 1 ? 0 : 1 + log2_of(x / 2); }
    // Log2 of what a probability of 1 is packed as when a reference is set: kSpan of them sum to 2^11, and may grow by 2^4 to 2^15
    // before the reference moves again. kSpan is 64 * 64 / Headdim in all rows of src/kernels.
    static constexpr int kOneLog2 = 15 - log2_of(64 * 64 / Headdim) - 4;
    static constexpr float kPackingLog2 = 112.f;  // softmax.cuh: packed fp16 is 2^112 times the float
    // In coarse blocks, rows whose largest |score|, log2 units, exceeds 2^23 get a higher temperature, which brings it to 2^23:
    // below, floats are at most 1/2 apart.
    static constexpr float kTemperedFrom = 8388608.f;
    // What is added to a row's largest score when it becomes the reference. So that score's probability is packed as 2^kOneLog2.
    static constexpr float kReferenceLog2 = kPackingLog2 - kOneLog2;

    using Block = ForwardBlock<kBlockRows, true>;  // true, as in remat_head: grids may have heads on their first axis
    using Codes = u32[kRows][kCodeChunks];  // a lane's codes of Q: four in a word, of each 16 columns
    using Output = Accumulator[RowTiles][kChunks];  // a lane's output, not yet divided by the rows' sums
    // What TilesAtOnce is to unmasked spans, for masked ones. Two tiles would spill at headdims 128 and 256, and kernels without a
    // boolean mask, which mask few spans, use one for less code.
    static constexpr int kMaskedTiles = kHasMask && Headdim == 64 ? 4 : 1;
    // At headdim 64 registers suffice for rows' state and the sources too. At headdim 128 with 32 rows shared memory has them.
    static constexpr bool kFewRegisters = Headdim > 64, kSharedState = Headdim == 128 && RowTiles == 2;
    using State = typename Conditional<kSharedState, SharedState<kRows, kThreads>, RegisterState<kRows>>::Type;

    __device__ __forceinline__ static int remat_warp_row(const FastParams& p) {
        return Block::remat_row(p.problem) + remat_thread_index() / 32 * kWarpRows;
    }
    __device__ __forceinline__ static float as_float(u32 bits) { return __uint_as_float(bits); }

    // Computes the integer scores S of Tiles tiles from key row `key` of the slot on. Sums start at `zero`, a register that holds
    // the bits of the float kSumZero (1.5 * 2^23). So their bits, read as a float, are kSumZero + S, without a conversion. s: such
    // bits, in all functions: [r][tile][keys 2 * (lane % 4) and the next].
    template <int Tiles>
    __device__ __forceinline__ static void compute_scores(u32 (&s)[kRows][Tiles][2], const Codes& q, u32 k_fragment, int key,
                                                          u32 zero) {
        unrolled<kCodeChunks / 4, Tiles>([&](int c, int t) {
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
        });
    }

    // s -= x; then s = s * factor + addend, on the floats whose bits s has.
    template <int Tiles>
    __device__ __forceinline__ static void subtract(u32 (&s)[kRows][Tiles][2], float x) {
        unrolled<kRows, 2 * Tiles>([&](int r, int i) { s[r][i / 2][i % 2] = __float_as_uint(as_float(s[r][i / 2][i % 2]) - x); });
    }
    template <int Tiles>
    __device__ __forceinline__ static void scale_scores(u32 (&s)[kRows][Tiles][2], const float (&factor)[kRows],
                                                        const float (&addend)[kRows]) {
        unrolled<kRows, 2 * Tiles>([&](int r, int i) {
            u32& x = s[r][i / 2][i % 2];
            x = __float_as_uint(fmaf(as_float(x), factor[r], addend[r]));
        });
    }
    // The warp's byte that says whether the thread block is coarse.
    __device__ __forceinline__ static volatile unsigned char* coarse_flag() {
        extern __shared__ __align__(1024) unsigned char shared[];
        return shared + kOffsetCoarse + remat_thread_index() / 32;
    }
    __device__ __forceinline__ static float largest_of(const float (&x)[kRows]) {
        float largest = x[0];
#pragma unroll
        for (int r = 1; r < kRows; r++) largest = fmaxf(largest, x[r]);
        return largest;
    }
    // A barrier of the thread block. Returns whether it is coarse: whether a unit, q's scale times k's, may exceed 1 for one of its
    // rows and keys. It may if k's scale exceeds 4 or q's 1/4. k's is the largest |k - mean| of 16 keys / 127, above 508 then. q's
    // has the factor softmax_scale * log2(e), usually 2^-3 log2(e) at headdim 64: |q| exceeds 127 / 4 / (2^-3 log2(e)) = 176 then.
    // With `rotate`, k's numbers grow by sqrt(Headdim), 8 at headdim 64: a standard deviation of 20 becomes 160, and the largest of
    // 16 keys, 1024 numbers, is at about 3.3 deviations, 528. Each thread tests some of the keys' scales. `largest`: its first
    // scale. `scale`: index of its second.
    template <class Rows>
    __device__ __forceinline__ static bool barrier_and_is_coarse(const Rows& state, float largest, const float* scales, int scale,
                                                                 int end_scale) {
        constexpr float kLargestKeyScale = 4.f;
        float of_row[kRows];
#pragma unroll 1
        for (; scale < end_scale; scale += kThreads) largest = fmaxf(largest, __ldg(scales + scale));
        __syncwarp();  // the quad has stored the rows' scales
        state.load_scales(of_row);
        return __syncthreads_or(largest > kLargestKeyScale || largest_of(of_row) * kLargestKeyScale > 1.f);
    }
    // In coarse blocks, sets factors and addends of scores for sums from which kSumZero was subtracted. (While it is in them,
    // scores have an error of up to a unit.) A row whose largest score so far is above kTemperedFrom in magnitude gets a
    // temperature that brings it there: floats are too coarse above. Other keys then weigh more than they should. But a unit is
    // still worth 2 or more, and rounding to codes moves scores by many units.
    template <class Rows>
    __device__ __forceinline__ static void set_coarse(float (&factor)[kRows], float (&addend)[kRows], const Rows& state) {
        float reference[kRows];
        state.load_references(reference);
#pragma unroll
        for (int r = 0; r < kRows; r++) {
            const float largest = reference[r] - kReferenceLog2;
            const float inverse_temperature = fminf(1.f, __fdividef(1.f, fabsf(largest) * (1.f / kTemperedFrom)));
            factor[r] *= inverse_temperature;
            addend[r] = -largest * inverse_temperature - kReferenceLog2;
        }
    }
    // Turns exponents s (log2 units) into packed probabilities, and adds these to the lane's sums of its rows.
    template <int Tiles>
    __device__ __forceinline__ static void exponentiate(u32 (&packed)[kRows][Tiles], float (&sum)[kRows],
                                                        const u32 (&s)[kRows][Tiles][2]) {
        unrolled<kRows, Tiles>([&](int r, int t) {
            const float a = exp2_approx(as_float(s[r][t][0])), b = exp2_approx(as_float(s[r][t][1]));
            sum[r] += a + b;
            packed[r][t] = pack_shifted(a, b);
        });
    }

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
        const int last_key = (key_end - 1) / kSpan * kSpan;  // of the last span
        float* lse = p.softmax_lse + sequence.lse_row(block.batch, block.head);

        float sum[kRows];
        int exponent = 0;
        State state(ring + kRingBytes);
        Output o;
        if (key_first < key_end) {
            const KeyCodes<Headdim> codes(p, sequence, block.head_k);
            RegisterSources from(0);  // 0: it has no shared memory
            // 0: v_factor, set below
            from.of_block = {codes.codes, codes.scales, rows_of(p.v, block.batch, block.head_k, sequence.k_offset()),
                             sequence.seqlen_k() - 1, 0};
            uint4 first_spans[kAhead][kPieces];
            unrolled<kAhead, kPieces>(
                [&](int j, int piece) { load_piece(first_spans[j][piece], p, from, piece, min(key_first + j * kSpan, last_key)); });
            float k_scale = load_k_scale(from, key_first);  // of the lane's keys in the span at `key`, loaded a step ahead

            // the first scale that the thread tests (barrier_and_is_coarse), loaded early: the queries come before its use
            const int scale = key_first / kScaleKeys * kScales + threadIdx.x, end_scale = (last_key / kScaleKeys + 1) * kScales;
            const float first_scale = __ldg(codes.scales + min(scale, end_scale - 1));
            Codes q;
            load_queries<Headdim>(q, state, p, rows_of(p.q, block.batch, block.head, sequence.q_offset()), warp_row,
                                  sequence.seqlen_q(), codes.mean, lse);
            // Products take V * 2^-exponent, below 1: prepare.cuh has scaled bf16 V, store_piece() multiplies fp16 V.
            exponent = v_exponent(codes.v_max, sequence.seqlen_k(), PreparedKeys, p.element);
            if (threadIdx.x == 0) store_shared1(ring + kOffsetExponent, exponent);  // for write_output(): no register is free
            const float power = p.element == ElementType::Bf16 ? 1.f : times_power(1.f, -exponent);
            const Offsets offsets(threadIdx.x);
            from.of_block.v_factor = to_half2(power, power);
            state.store_sources(from.of_block);
            unrolled<kAhead, kPieces>(
                [&](int j, int piece) { store_piece(first_spans[j][piece], from, offsets, piece, ring + j * kSlotBytes); });
            clear(sum, o);
            // kept in shared memory: its register in the loop made the kernels of headdims 128 and 256 slower
            const bool is_coarse = barrier_and_is_coarse(state, first_scale, codes.scales, scale + kThreads, end_scale);
            if (lane.lane == 0) *coarse_flag() = is_coarse;
            __syncwarp();

            u32 slot = ring, zero = keep_in_register(kSumZeroBits);
            int key = key_first;
            const bool is_late = threadIdx.x >= kThreads / 2;  // the half of the warps that runs half a step behind

            // Computes spans from `key` to before `end`. Returns true if references have to move before the span at `key`, which
            // is in no sum yet. run_spans() calls it.
            const auto steps = [&](bool may_mask, int end) {
#pragma unroll 1
                for (; key < end; key += kSpan) {
                    OperandP probabilities[RowTiles][kTiles];
                    float span_sum[kRows], factor[kRows], addend[kRows];
                    const u32 k_fragment = slot + offsets.k_fragment();
                    state.load_scales(factor);
                    state.load_references(addend);
#pragma unroll
                    for (int r = 0; r < kRows; r++) {
                        span_sum[r] = 0.f;
                        factor[r] *= k_scale;
                        addend[r] = fmaf(-kSumZero, factor[r], -addend[r]);
                    }
                    if (may_mask) {
                        const bool is_coarse = *coarse_flag();
                        const float zero_of_sums = is_coarse ? kSumZero : 0.f;
                        if (is_coarse) set_coarse(factor, addend, state);
                        SpanMask<FastForward> seen(p, key);
                        // rolled: its registers must not exceed those of unmasked spans
#pragma unroll 1
                        for (int tile = 0; tile < kTiles; tile += kMaskedTiles) {
                            u32 s[kRows][kMaskedTiles][2], packed[kRows][kMaskedTiles];
                            compute_scores(s, q, k_fragment, 8 * tile, zero);
                            // kernels without a boolean mask mask few spans, and are faster without this branch
                            if (!kHasMask || is_coarse) subtract(s, zero_of_sums);
                            scale_scores(s, factor, addend);
                            // after scale_scores: the scale of a key that is not finite is NaN, also where the key is hidden
                            seen.apply(s);
                            exponentiate(packed, span_sum, s);
                            // moves earlier tiles to the front and appends these: rolled loops cannot index registers
#pragma unroll
                            for (int r = 0; r < kRows; r++) {
#pragma unroll
                                for (int i = 0; i + kMaskedTiles < kTiles; i++)
                                    probabilities[r / 2][i][r % 2] = probabilities[r / 2][i + kMaskedTiles][r % 2];
#pragma unroll
                                for (int t = 0; t < kMaskedTiles; t++)
                                    probabilities[r / 2][kTiles - kMaskedTiles + t][r % 2] = packed[r][t];
                            }
                        }
                    } else {
#pragma unroll
                        for (int tile = 0; tile < kTiles; tile += TilesAtOnce) {
                            u32 s[kRows][TilesAtOnce][2], packed[kRows][TilesAtOnce];
                            compute_scores(s, q, k_fragment, 8 * tile, zero);
                            scale_scores(s, factor, addend);
                            exponentiate(packed, span_sum, s);
                            unrolled<kRows, TilesAtOnce>(
                                [&](int r, int t) { probabilities[r / 2][tile + t][r % 2] = packed[r][t]; });
                        }
                    }
                    if (__any_sync(~0u, largest_of(span_sum) > kLargestSum)) return true;
#pragma unroll
                    for (int r = 0; r < kRows; r++) sum[r] += span_sum[r];
                    if (is_late) block_barrier();
                    const int ahead = min(key + kAhead * kSpan, last_key);  // past the last span: that one again, unused
                    const u32 to = slot_after(slot, ring);
                    const u32 v_fragment = slot + offsets.v_fragment();
                    uint4 data;
                    k_scale = load_k_scale(state, min(key + kSpan, last_key));
                    constexpr int kParts = kChunks / 2;  // of 16 columns
#pragma unroll
                    for (int c = 0; c < kParts; c++) {
                        // 64 columns at a time: ptxas would load more of V early than there are registers for
                        if (kFewRegisters && c && c % 4 == 0) __syncwarp();
                        // moves pieces of the span kAhead further, spread over the products
#pragma unroll
                        for (int piece = 0; piece < kPieces; piece++)
                            if (c == piece * kParts / kPieces) {
                                if (piece) store_piece(data, state, offsets, piece - 1, to);
                                load_piece(data, p, state, piece, ahead);
                            }
                        u32 sums[2][RowTiles][2];  // of P V over the span: [h: 8 of 16 columns][row tile][row], pairs of fp16
                        unrolled<2, RowTiles>([&](int h, int mt) { sums[h][mt][0] = sums[h][mt][1] = 0; });
#pragma unroll
                        for (int t = 0; t < kTiles; t += 2) {
                            u32 b[4];  // two tiles of keys for 8 columns, then for the next 8
                            load_matrices_transposed(b, chunk_after<kChunks>(v_fragment, 2 * c) + 8 * t * kPitch);
                            unrolled<2, 2, RowTiles>([&](int h, int half, int mt) {
                                multiply_add_fp16(sums[h][mt], probabilities[mt][t + half], b[2 * h + half]);
                            });
                        }
                        unrolled<2, RowTiles, 2>([&](int h, int mt, int r) {
                            const float2 x = to_float2(sums[h][mt][r]);
                            o[mt][2 * c + h][2 * r] += x.x;
                            o[mt][2 * c + h][2 * r + 1] += x.y;
                        });
                    }
                    store_piece(data, state, offsets, kPieces - 1, to);
                    slot = slot + kSlotBytes < ring + kRingBytes ? slot + kSlotBytes : ring;
                    if (!is_late) block_barrier();
                }
                return false;
            };
            // Passes spans to `end` that the warp's rows do not see: it only copies its part of later ones for the other warps.
            const auto skip = [&](int end) {
#pragma unroll 1
                for (; key < end; key += kSpan) {
                    if (is_late) block_barrier();
                    uint4 data[kPieces];
#pragma unroll
                    for (int piece = 0; piece < kPieces; piece++)
                        load_piece(data[piece], p, state, piece, min(key + kAhead * kSpan, last_key));
                    k_scale = load_k_scale(state, min(key + kSpan, last_key));
#pragma unroll
                    for (int piece = 0; piece < kPieces; piece++)
                        store_piece(data[piece], state, offsets, piece, slot_after(slot, ring));
                    slot = slot + kSlotBytes < ring + kRingBytes ? slot + kSlotBytes : ring;
                    if (!is_late) block_barrier();
                }
            };
            // The references move before the first span too.
            do {
                move_references(p, q, slot + offsets.k_fragment(), key, zero, k_scale, state, sum, o);
            } while (run_spans(p, key, last_key, steps, skip));
            exponent = load_shared1(shared_address(shared) + kOffsetExponent);
        } else {
            clear(sum, o);
        }
        write_output(p, state, exponent, sum, o);
    }

    using OperandP = u32[2];  // P of a tile of 8 keys, packed: the lane's two keys in each of two rows
    // Largest sum of a lane's probabilities of a row in a span: 2^13 when packed. Then that of the row's four lanes is at most
    // 2^15, and so is each probability. 1.92592994e-34 is 2^-112 (kPackingLog2).
    static constexpr float kLargestSum = 1.92592994e-34f * 8192.f;

    // Byte offsets in a slot: of the first pieces that a thread stores, and of the first matrix rows that a lane loads, of K and of
    // V. With kFewRegisters the two of K and V share a register.
    struct Offsets {
        u32 store[2], fragment[2];

        __device__ __forceinline__ explicit Offsets(int thread) {
            set(store, swizzled<kCodeChunks>(thread / kCodeChunks, thread % kCodeChunks),
                kOffsetV + swizzled<kChunks>(thread / kChunks, thread % kChunks));
            set(fragment, swizzled<kCodeChunks>(thread & 7, thread >> 3 & 3),
                kOffsetV + swizzled<kChunks>(thread & 15, thread >> 4 & 1));
        }
        __device__ __forceinline__ u32 k_store() const { return first(store); }
        __device__ __forceinline__ u32 v_store() const { return second(store); }
        __device__ __forceinline__ u32 k_fragment() const { return first(fragment); }
        __device__ __forceinline__ u32 v_fragment() const { return second(fragment); }

    private:
        __device__ __forceinline__ static void set(u32 (&x)[2], u32 of_k, u32 of_v) {
            x[0] = kFewRegisters ? of_k | of_v << 16 : of_k;
            x[1] = of_v;
        }
        __device__ __forceinline__ static u32 first(const u32 (&x)[2]) {
            return kFewRegisters ? keep_in_register(x[0]) & 0xffff : x[0];
        }
        __device__ __forceinline__ static u32 second(const u32 (&x)[2]) {
            return kFewRegisters ? static_cast<u32>(keep_in_register(x[0])) >> 16 : x[1];
        }
    };
    __device__ __forceinline__ static int thread_index() { return kFewRegisters ? remat_thread_index() : threadIdx.x; }

    // Load and store one of the pieces that a thread moves in the span from `key` on: first those of K's codes, then of V.
    template <class From>
    __device__ __forceinline__ static void load_piece(uint4& data, const FastParams& p, const From& from, int piece, int key) {
        const int thread = thread_index();
        if (piece < kCodePieces) {
            const signed char* codes = from.codes() + static_cast<unsigned>(key) * Headdim;
            data = __ldg(reinterpret_cast<const uint4*>(codes + (piece * kThreads + thread) * kChunkBytes));
        } else {
            const int row = min(key + (piece - kCodePieces) * kRowsV + thread / kChunks, from.v_last());
            const int chunk = min(thread % kChunks, p.problem.headdim_v / kChunk - 1);
            data = load_global(rows_after(from.v() + chunk * kChunk, row, p.v.row_stride));
        }
    }
    template <class From>
    __device__ __forceinline__ static void store_piece(uint4& data, const From& from, const Offsets& offsets, int piece, u32 slot) {
        if (piece < kCodePieces) return store_shared(slot + offsets.k_store() + piece * (kThreads * kChunkBytes), data);
        const u32 factor = from.v_factor();
        data.x = half2_mul(data.x, factor), data.y = half2_mul(data.y, factor);
        data.z = half2_mul(data.z, factor), data.w = half2_mul(data.w, factor);
        store_shared(slot + offsets.v_store() + (piece - kCodePieces) * (kRowsV * kPitch), data);
    }
    // Loads the scale of the lane's keys in the scale block that has `key`.
    template <class From>
    __device__ __forceinline__ static float load_k_scale(const From& from, int key) {
        return __ldg(from.scales() + key / kScaleKeys * kScales + (thread_index() & 3));
    }

    // Clamps an output to fp16's largest number, 65504. A mean of V is no larger than V, but rounding may raise it, and to_half2
    // then returns infinity. Rounding does not reach 66000: such numbers come from infinite V, and stay.
    __device__ __forceinline__ static float below_overflow(float x) {
        return fabsf(x) < 66000.f ? fminf(fmaxf(x, -65504.f), 65504.f) : x;
    }
    __device__ __forceinline__ static void clear(float (&sum)[kRows], Output& o) {
#pragma unroll
        for (int r = 0; r < kRows; r++) sum[r] = 0.f;
        clear_tiles(o);
    }
    // Returns the slot that a step fills while it reads `slot`.
    __device__ __forceinline__ static u32 slot_after(u32 slot, u32 ring) {
        const u32 to = slot + kAhead * kSlotBytes;
        return to < ring + kRingBytes ? to : to - kRingBytes;
    }

    // Computes masked and unmasked spans from `key` on, a range of one kind at a time, and skips those that the warp's rows do not
    // see. Returns true if references have to move before the span at `key`. No register keeps the ranges: each is computed again.
    template <class Steps, class Skip>
    __device__ __forceinline__ static bool run_spans(const FastParams& p, int& key, int last_key, const Steps& steps,
                                                     const Skip& skip) {
        do {
            const BlockSeqlenInfo sequence(p.problem, p.lengths, remat_block_batch());
            const Mask mask = mask_of(p.problem, sequence);
            // the shuffle tells ptxas that the row, the warp's first, is uniform in a warp
            const int row = __shfl_sync(~0u, remat_warp_row(p), 0), end = last_key + kSpan;
            const int first = mask.key_first(row) / kSpan * kSpan;
            const int seen_end = row < sequence.seqlen_q() ? mask.key_end(row, kWarpRows) : 0;
            const UnmaskedKeys<kSpan> keys(mask, row, kWarpRows);
            // -1: coarse blocks, and all under a boolean mask, have no unmasked spans
            const int last_unmasked = *coarse_flag() || (kHasMask && p.mask_bits) ? -1 : keys.first + static_cast<int>(keys.span);
            if (key >= seen_end || key < first) {
                skip(key >= seen_end ? end : min(first, end));
            } else {
                const bool is_masked = key < keys.first || key > last_unmasked;
                const int to = !is_masked            ? min(last_unmasked, last_key) + 1
                               : key > last_unmasked ? seen_end
                                                     : min(keys.first, seen_end);
                if (steps(is_masked, to)) return true;
            }
        } while (key <= last_key);
        return false;
    }

    // Moves all rows' references to the largest score up to the span at `key`, and rescales what was summed. Rare, so tile by tile.
    __device__ __forceinline__ static void move_references(const FastParams& p, const Codes& q, u32 k_fragment, int key, u32 zero,
                                                           float k_scale, State& state, float (&sum)[kRows], Output& o) {
        float largest[kRows], factor[kRows], reference[kRows], old_factor[kRows], summed = 0.f;
#pragma unroll
        for (int r = 0; r < kRows; r++) largest[r] = negative_infinity();
        SpanMask<FastForward> seen(p, key);
#pragma unroll 1
        for (int t = 0; t < kTiles; t++) {
            u32 s[kRows][1][2];
            compute_scores(s, q, k_fragment, 8 * t, zero);
            seen.apply(s);
#pragma unroll
            for (int r = 0; r < kRows; r++) largest[r] = fmaxf(largest[r], fmaxf(as_float(s[r][0][0]), as_float(s[r][0][1])));
        }
        state.load_scales(factor);
        state.load_references(reference);
#pragma unroll
        for (int r = 0; r < kRows; r++) {
            float score = (largest[r] - kSumZero) * (factor[r] * k_scale);
            score = fmaxf(score, __shfl_xor_sync(~0u, score, 1));
            score = fmaxf(score, __shfl_xor_sync(~0u, score, 2));
            const float moved = fmaxf(reference[r], score + kReferenceLog2);
            old_factor[r] = exp2_approx(reference[r] - moved);
            reference[r] = moved;
            summed += sum[r];
        }
        state.store_references(reference);
        // before the first span nothing is summed: this code stays out of the instruction cache then
        if (__all_sync(~0u, summed == 0.f)) return;
#pragma unroll
        for (int r = 0; r < kRows; r++) {
            sum[r] *= old_factor[r];
            unrolled<kChunks, 2>([&](int j, int v) { o[r / 2][j][2 * (r % 2) + v] *= old_factor[r]; });
        }
    }

    // Writes the lane's row 0, times factor (bf16: and factor2; their product may leave fp32's range). MayOverflow: fp16's range.
    template <bool IsBf16, bool MayOverflow>
    __device__ __forceinline__ static void write_row(unsigned short* to, const FastParams& p, const Output& o, float factor,
                                                     float factor2) {
#pragma unroll
        for (int j = 0; j < kChunks; j++)
            if (j * kChunk < p.problem.headdim_v) {
                float x[2];
#pragma unroll
                for (int v = 0; v < 2; v++) {
                    x[v] = IsBf16 ? o[0][j][v] * factor * factor2 : o[0][j][v] * factor;
                    if (MayOverflow) x[v] = below_overflow(x[v]);
                }
                *reinterpret_cast<u32*>(to + j * kChunk) = pack2(x[0], x[1], IsBf16);
            }
    }

    // Writes zeros to a row that sees no key: its products with a V that is not finite were NaN.
    __device__ __forceinline__ static void write_empty_row(unsigned short* to, const FastParams& p) {
#pragma unroll 1
        for (int column = 0; column < p.problem.headdim_v; column += kChunk) *reinterpret_cast<u32*>(to + column) = 0;
    }

    // Writes out and lse of the warp's rows. The rolled loop takes the lane's row 0, then moves the others up. `exponent`: V's.
    __device__ __forceinline__ static void write_output(const FastParams& p, const State& state, int exponent, float (&sum)[kRows],
                                                        Output& o) {
        const int batch = remat_block_batch(), head = remat_head<true>(p.problem);
        const BlockSeqlenInfo sequence(p.problem, p.lengths, batch);
        const Lane lane(remat_thread_index() & 31);
        const int half = exponent / 2;  // 2^exponent, which V lacks, as two factors: bf16's may leave fp32's range
        const float first_power = times_power(1.f, half), second_power = times_power(1.f, exponent - half);
        unsigned short* out = rows_of(p.out, batch, head, sequence.q_offset()) + 2 * lane.quad;
        float* lse = p.softmax_lse + sequence.lse_row(batch, head);
        int row = remat_warp_row(p) + lane.group;
        float reference[kRows];
        state.load_references(reference);
#pragma unroll 1
        for (int r = 0; r < kRows; r++) {
            float total = sum[0];
            total += __shfl_xor_sync(~0u, total, 1);
            total += __shfl_xor_sync(~0u, total, 2);
            const bool is_empty = total == 0.f;
            if (row < sequence.seqlen_q()) {
                if (lane.quad == 0)  // lse[row] holds q times the mean of the keys (log2 units), which load_queries() left there
                    lse[row] = is_empty ? positive_infinity() : kLn2 * (log2_approx(total) + reference[0] + lse[row]);
                // packed probabilities, which multiplied V, are 2^112 times those that were summed
                const float factor = __fdividef(kPackingShift, total) * first_power;
                unsigned short* to = out + row * p.out.row_stride;
                if (is_empty)
                    write_empty_row(to, p);
                else if (p.element == ElementType::Bf16)
                    write_row<true, false>(to, p, o, factor, second_power);
                else if (exponent > 15)  // some |V| may be near fp16's largest number
                    write_row<false, true>(to, p, o, factor * second_power, 1.f);
                else
                    write_row<false, false>(to, p, o, factor * second_power, 1.f);
            }
            row += 8;
#pragma unroll
            for (int i = 0; i + 1 < kRows; i++) {
                sum[i] = sum[i + 1], reference[i] = reference[i + 1];
#pragma unroll
                for (int j = 0; j < kChunks; j++)
#pragma unroll
                    for (int v = 0; v < 2; v++) o[i / 2][j][2 * (i % 2) + v] = o[(i + 1) / 2][j][2 * ((i + 1) % 2) + v];
            }
        }
    }
};

}  // namespace turing
