// Forward kernels of fp32 tensors, at fp32's precision on fp16 tensor cores. Every operand is the sum of two fp16 numbers, a high
// and a low part (Markidis and others, "NVIDIA Tensor Core Programmability, Performance & Precision", 2018). Every product is three
// on the tensor cores: high * high + high * low + low * high. A low part is at most 2^-11 of its number (of P 2^-10: its high part
// is truncated). So low * low, which is left out, is at most 2^-21 of the product. The cast kernel (shared/cast/cast.cuh) has split
// q, k and v: a row has the high parts of HEADDIM columns, then the low ones. P is split here, and the output is fp32.
//
// Tensor cores truncate their sums, always toward 0. Over a long loop these errors add up to far more than fp32's rounding (Ootomo
// and Yokota, "Recovering single precision accuracy from Tensor Cores while surpassing the FP32 theoretical peak performance",
// 2022, who also leave out low * low). So no accumulator of a product lives longer than a step: its sum is added to the output by
// ordinary additions. And products with a low part have accumulators of their own, or come first.
//
// Forward: K and V of a step of 16 keys lie in one of two slots of shared memory, one barrier a step. While a step computes, the
// next one is stored to the other slot, and the one after it is in flight. WideForward: for wider heads, see there.
// A Family, {volta,turing}/forward/split.cuh, has the tensor-core code. Where it has a high and a low version, one multiplies by
// the high parts of K or V, the other by the low ones:
//
//   Layout                         which of a tile's scores a lane has (score_layout.cuh). A step has kTiles tiles.
//                                  A lane's keys in a tile are kNextTile after those in the tile before
//   Queries                        a warp's rows of Q, in registers and, with kSharedBytes a row, in shared memory: the last
//                                  arguments of load() are its address and the warp's first row in it
//   Queries::multiply(), multiply_high(), multiply_low()  S = Q K^T
//   Probabilities                  P, split
//   add_output(), add_high(), add_low()  O += P V
//   Output<Columns>                a lane's sums o[0][j][v]: element v of tile j of kOutputTiles<Columns>, in column(lane, j, v)
//   key_of_row()                   the key in a row of the shared tile
//
// The kernel's row in src/kernels/shared.rs names Forward or WideForward. It gives HEADDIM and HEADDIM_V (of v; equal here),
// BLOCK_ROWS (query rows of a block), STEP (keys of a step: kStep), THREADS and SHARED_BYTES (of a block). It also says for which
// features the kernel is compiled (kVarlen, kPaged, kGeneric, kHas...; features.cuh). BlockSeqlenInfo has a sequence's lengths, and
// its first rows in the tensors (q_offset(), k_offset()).
#pragma once

#include "dense_steps.cuh"  // DenseSteps, NoMaskBits: without a block-sparse mask
#include "forward/block.cuh"  // ForwardBlock: first row, heads and batch entry from blockIdx
#include "forward/output.cuh"  // finish_row(), rescale_output(); of scores.cuh: Scores, SoftmaxRows, ScoreBias, DropoutBits
#include "precise_score_function.cuh"  // softcap, without cancellation in small scores

namespace split {

using u32 = unsigned;

// Two words of two fp16 each: the high parts of two numbers, and their low parts.
struct Pair {
    u32 high, low;
};
// Splits two probabilities times kPackedOne, 2^8, which uses the upper end of fp16's range. High parts are truncated (the mask
// clears 13 of fp32's 23 mantissa bits), so that low ones are positive, as pack_shifted needs them. shifted() scales by 2^8 *
// 2^-112: then fp32 bits times 8 have fp16's in their upper half, because the exponent biases differ by 112 (softmax.cuh).
__device__ __forceinline__ Pair split_probabilities(float a, float b) {
    const float x = shifted(a), y = shifted(b);
    const float x_high = __uint_as_float(__float_as_uint(x) & ~0x1fffu), y_high = __uint_as_float(__float_as_uint(y) & ~0x1fffu);
    return {upper_halves(__float_as_uint(x) * 8u, __float_as_uint(y) * 8u), pack_shifted(x - x_high, y - y_high)};
}

constexpr int kStep = 16;  // keys of a step
constexpr int kWarpRows = 16;  // query rows of a warp

// Grid policy of SeenKeys and ListedKeys: a block for each row tile (the Rows query rows of a block) and head. EitherOrder: the
// grid may have heads on its first axis (forward/block.cuh). StreamKKeys (split_stream_k.cuh) has the same functions for its own
// grid. remat_*() compute values of block() again, to hold no registers.
struct RowTileGrid {
    template <int Rows, bool EitherOrder>
    __device__ __forceinline__ static ForwardBlock<Rows, EitherOrder> block(const Problem& p) {
        return ForwardBlock<Rows, EitherOrder>(p);
    }
    // Adds results of the same rows over other keys. Returns whether this block writes the output.
    template <class Softmax, class Output>
    __device__ __forceinline__ static bool combine_splits(Softmax&, Output&) {
        return true;
    }
    template <int Rows, bool EitherOrder>
    __device__ __forceinline__ static int remat_row(const Problem& p) {
        return ForwardBlock<Rows, EitherOrder>::remat_row(p);
    }
    template <bool EitherOrder>
    __device__ __forceinline__ static int remat_head(const Problem& p) {
        return ::remat_head<EitherOrder>(p);
    }
    __device__ __forceinline__ static int remat_batch(const Problem&) { return remat_block_batch(); }
};

// The keys that a block visits without a block-sparse mask: those that one of its rows sees (ListedKeys: split_block_mask.cuh).
struct SeenKeys : RowTileGrid {
    template <int Ahead>
    using Steps = DenseSteps<kStep>;
    using Bits = NoMaskBits;
    // Returns the end of the keys that may be loaded, for the Rows rows of a block.
    template <int Rows, class Block>
    __device__ __forceinline__ static int end(const Mask& mask, const Block& block) {
        return mask.key_end(block.row, Rows);
    }
    // Returns an iterator over the steps, which also tells the keys of those up to Ahead steps later.
    template <int Ahead, int Rows, class Block>
    __device__ __forceinline__ Steps<Ahead> steps(const FwdParams&, const Block& block, const Mask& mask) const {
        // Steps begin at multiples of kStep, because a bias comes in aligned groups of 4 keys.
        return Steps<Ahead>(*this, block, mask.key_first(block.row) & ~(kStep - 1), end<Rows>(mask, block));
    }
};

// Applies the score function (softcap), if the problem has one, to one of several tiles of products. With several tiles few
// registers are free, so the loop is rolled: it computes element 0, and moves the others down by one.
template <class Layout>
__device__ __forceinline__ void apply_function(Scores<Layout, 1, 1>& s, const FwdParams& p) {
    if (!kHasScoreFunction || ScoreFunction::parameter(p.score_options) <= 0.f) return;
    const PreciseScoreFunction function(p.problem, p.score_options);
    float (&x)[Layout::kElements] = s.tile[0][0];
#pragma unroll 1
    for (int i = 0; i < Layout::kElements; i++) {
        const float score = function(x[0]);
#pragma unroll
        for (int v = 1; v < Layout::kElements; v++) x[v - 1] = x[v];
        x[Layout::kElements - 1] = score;
    }
}
// Score function of scores to which apply_function has applied it: none.
struct AppliedFunction {
    __device__ __forceinline__ AppliedFunction(const Problem&, const ScoreOptions&) {}
    __device__ __forceinline__ float operator()(float score) const { return score; }
};

// Softmax state of a lane's rows, with Kahan's summation. Most of thousands of probabilities may be below half a unit in the last
// place of a sum that already has the largest: they would round away as they are added, with 8,192 keys up to 1e-5 of the sum.
// Kernels of many columns that also have score features have no registers for it.
constexpr bool kCompensates = HEADDIM <= 128 || !kGeneric;
template <class Layout>
struct CompensatedRows : SoftmaxRows<Layout, 1> {
    float lost[Layout::kRows] = {};  // what rounding took from each row's sum

    // Adds x to the sum of row r.
    __device__ __forceinline__ void add(int r, float x) {
        float& sum = this->row[0][r].sum;
        if constexpr (!kCompensates) {
            sum += x;
            return;
        }
        const float addend = x + lost[r], next = sum + addend;
        lost[r] = addend - (next - sum);
        sum = next;
    }
};

// Turns the products s of a step into probabilities: score features, mask, row maxima, exponents and sums, dropout. Rescales the
// output `o` where row maxima move. `row`: the warp's first. unmasked (mask.cuh): if it contains(key), all of the warp's rows see
// the step from `key` on, so it needs no mask. `bits`: of a block-sparse mask, loaded for the step. Bits::kHidesAll: there is one,
// whose bits then also hide what lengths, causal masks and windows hide. `scale`: factor of scores in the exponent; 1 in generic
// kernels (kGeneric: parameters choose the score features), whose scores apply_score_mod() has scaled to log2 units.
template <class Family, class Steps, class Bits, class Output>
__device__ __forceinline__ void to_probabilities(Scores<typename Family::Layout, 1, 1> (&s)[Family::kTiles], const FwdParams& p,
                                                 const Problem& problem, const UnmaskedKeys<kStep>& unmasked, const Steps& keys,
                                                 Bits& bits, const int& row, const float& scale,
                                                 CompensatedRows<typename Family::Layout>& softmax, Output& o) {
    using Layout = typename Family::Layout;
    const int key = keys.first();
    // Computed again at each use, to hold no registers. Only varlen kernels, none with a stream-K grid, use the batch entry.
    const auto mask = [&] { return mask_of(problem, BlockSeqlenInfo(p, remat_block_batch())); };
    if (kGeneric)
#pragma unroll
        for (int i = 0; i < Family::kTiles; i++) {
            const int first_key = key + i * Family::kNextTile;
            if constexpr (Family::kTiles == 1) {
                s[i].template apply_score_mod<PreciseScoreFunction>(p, mask(), row, first_key);
            } else {
                apply_function(s[i], p);
                s[i].template apply_score_mod<AppliedFunction>(p, mask(), row, first_key);
            }
            if (kHasBias && p.score_options.bias) {
                ScoreBias<Layout, 1, 1> bias;
                bias.load(p, row, first_key);
                bias.add_to(s[i], p.score_options);
            }
        }
    // A vote, although all lanes agree: it tells the compiler that no warp diverges.
    if (__any_sync(~0u, keys.has_bits() || !unmasked.contains(key))) {
        if constexpr (Bits::kHidesAll) bits.combine(keys, mask(), row, !unmasked.contains(key));
#pragma unroll
        for (int i = 0; i < Family::kTiles; i++) {
            if constexpr (Bits::kHidesAll)
                bits.apply_to(s[i], i * Family::kNextTile);
            else
                s[i].apply_mask(mask(), row, key + i * Family::kNextTile);
        }
    }
    bool exceeds = false;
#pragma unroll
    for (int i = 0; i < Family::kTiles; i++) exceeds = s[i].needs_rescale(softmax, exceeds);
    if (exceeds) {
        const float inverse_scale = kGeneric ? 1.f : __fdividef(1.f, scale);
        const auto rescale_row = rescale_output<Layout>(o);
        const auto rescale = [&](int mt, int r, float factor) {
            rescale_row(mt, r, factor);
            softmax.lost[r] *= factor;
        };
        // One tile after the other: the maxima only rise. kAll: of all rows, not only of those above their limit.
#pragma unroll
        for (int i = 0; i < Family::kTiles; i++)
            s[i].template update_row_max<RescaledRows::kAll>(softmax, scale, inverse_scale, rescale);
    }
    float sums[Layout::kRows] = {};  // of the step
    unrolled<Family::kTiles, Layout::kElements>([&](int i, int v) {
        float& x = s[i].tile[0][0][v];
        x = exp2_approx(fmaf(x, scale, -softmax.row[0][Layout::row_of(v)].row_max));
        sums[Layout::row_of(v)] += x;
    });
#pragma unroll
    for (int r = 0; r < Layout::kRows; r++) softmax.add(r, sums[r]);
    if (kHasDropout && p.score_options.rng_state) {
        // one Philox call decides all of a lane's scores: two rows, four apart, by four keys
        const typename Layout::Lane lane(remat_lane());
        const auto numbers =
            DropoutBits<Layout, 1>::numbers_of(p).numbers(row + Layout::first_query(lane), key + Layout::first_key(lane));
        const unsigned kept = DropoutRule(p.score_options).kept_bits(numbers);
        unrolled<Family::kTiles, Layout::kElements>([&](int i, int v) {
            if (!(kept >> kept_bit(Layout::row_of(v), i * Family::kNextTile + Layout::key_slot(v)) & 1)) s[i].tile[0][0][v] = 0.f;
        });
    }
}

// Writes the warp's rows of out, in fp32, and their lse. The warp has Columns columns of out, from first_column on.
template <class Family, int Columns>
__device__ __forceinline__ void write(const FwdParams& p, int batch, int head, int row, int first_column,
                                      const SoftmaxRows<typename Family::Layout, 1>& softmax,
                                      const typename Family::template Output<Columns>& o) {
    using Layout = typename Family::Layout;
    const BlockSeqlenInfo sequence(p, batch);
    const typename Layout::Lane lane(remat_lane());
    float* out = reinterpret_cast<float*>(p.out.ptr) + batch * p.out.batch_stride + head * p.out.head_stride +
                 sequence.q_offset() * p.out.row_stride + first_column;
    float* lse = p.softmax_lse + sequence.lse_row(batch, head);
#pragma unroll
    for (int r = 0; r < Layout::kRows; r++) {
        // false: P is split, not rounded to fp16; 0: the one row tile. Divides by the row's sum and by kPackedOne.
        const float scale = finish_row<false>(p, sequence, lane, head, row, softmax, 0, r, lse);
        const int i = row + Layout::first_query(lane) + Layout::row_slot(r);
        if (i >= sequence.seqlen_q()) continue;
#pragma unroll
        for (int j = 0; j < Family::template kOutputTiles<Columns>; j++)
#pragma unroll
            for (int v = 0; v < Layout::kElements; v += 2)
                if (Layout::row_of(v) == r) {
                    float2* to = reinterpret_cast<float2*>(out + i * p.out.row_stride + Family::column(lane, j, v));
                    *to = make_float2(o[0][j][v] * scale, o[0][j][v + 1] * scale);
                }
    }
}

// The kernel where a warp's registers hold the output of its 16 rows. Keys: SeenKeys, or ListedKeys under a block-sparse mask.
template <class Family, class Keys = SeenKeys>
struct Forward {
    using Layout = typename Family::Layout;
    static constexpr int kWarps = THREADS / 32;
    static constexpr int kBlockRows = kWarps * kWarpRows;
    static constexpr int kChunks = 2 * HEADDIM / kChunk;  // 16-byte chunks of a row, both parts
    // Bytes between shared rows. One chunk of padding, so that the rows of a column fall into different banks. A slot has a tile of
    // K, then one of V.
    static constexpr int kPitch = (kChunks + 1) * kChunkBytes;
    static constexpr int kTileBytes = kStep * kPitch, kSlotBytes = 2 * kTileBytes, kRingBytes = 2 * kSlotBytes;
    using Block = ForwardBlock<kBlockRows, Layout::kEitherOrder>;
    using Queries = typename Family::template Queries<HEADDIM>;
    static_assert(kBlockRows == BLOCK_ROWS && kStep == STEP && HEADDIM == HEADDIM_V &&
                      kRingBytes + Queries::kSharedBytes * kBlockRows == SHARED_BYTES,
                  "the row in src/kernels and the kernel disagree");
    static_assert(!kPaged, "no cache");

    // A thread's chunks of K and V of a step: one of a row in each pass.
    static constexpr int kRowsPerPass = THREADS / kChunks, kPasses = kStep / kRowsPerPass;
    static_assert(kPasses * kRowsPerPass == kStep, "threads take whole rows");
    struct Loader {
        const unsigned short *k, *v;  // the thread's chunk of row 0
        unsigned k_stride, v_stride;
        int key_end;
        uint4 k_data[kPasses], v_data[kPasses];

        __device__ __forceinline__ Loader(const FwdParams& p, const unsigned short* k_rows, const unsigned short* v_rows, int end)
            : k(k_rows + threadIdx.x % kChunks * kChunk), v(v_rows + threadIdx.x % kChunks * kChunk), k_stride(p.k.row_stride),
              v_stride(p.v.row_stride), key_end(end) {}
        // Loads the step that begins with key `first`; keys that do not exist become 0. store() moves it to a shared slot.
        __device__ __forceinline__ void load(int first) {
            const int row = threadIdx.x / kChunks;
#pragma unroll
            for (int i = 0; i < kPasses; i++) {
                const int key = first + Family::key_of_row(row + i * kRowsPerPass);
                k_data[i] = v_data[i] = zero_chunk();
                load_global_if(key < key_end, k_data[i], rows_after(k, key, k_stride));
                load_global_if(key < key_end, v_data[i], rows_after(v, key, v_stride));
            }
        }
        __device__ __forceinline__ void store(u32 slot) const {
            const u32 to = slot + threadIdx.x / kChunks * kPitch + threadIdx.x % kChunks * kChunkBytes;
#pragma unroll
            for (int i = 0; i < kPasses; i++) {
                store_shared(to + i * kRowsPerPass * kPitch, k_data[i]);
                store_shared(to + kTileBytes + i * kRowsPerPass * kPitch, v_data[i]);
            }
        }
    };

    __device__ __forceinline__ static void run(const FwdParams& p, const Keys& visited = Keys()) {
        extern __shared__ __align__(1024) unsigned char shared[];
        const u32 ring = shared_address(shared);
        const Problem& problem = p.problem;
        const Block block(problem);
        const BlockSeqlenInfo sequence(p, block.batch);
        if (kVarlen && block.row >= sequence.seqlen_q()) return;
        const Mask mask = mask_of(problem, sequence);
        const int warp_row = threadIdx.x / 32 * kWarpRows, row = block.row + warp_row;
        Queries q;
        // sign_flip flips Q's signs under a negative softmax_scale: the factor of scores is |softmax_scale|
        q.load(p.q, rows_of(p.q, block.batch, block.head, sequence.q_offset()), row, sequence.seqlen_q(), problem.sign_flip,
               ring + kRingBytes, warp_row);
        auto keys = visited.template steps<2, kBlockRows>(p, block, mask);  // loads run two steps ahead
        const int key_end = visited.template end<kBlockRows>(mask, block);
        Loader tiles(p, rows_of(p.k, block.batch, block.head_k, sequence.k_offset()),
                     rows_of(p.v, block.batch, block.head_k, sequence.k_offset()), key_end);
        // A warp of padding rows counts as one at the last row, so that a tile past the last key is masked in all warps.
        const UnmaskedKeys<kStep> unmasked(mask, min(row, sequence.seqlen_q() - 1), kWarpRows);
        const float scale = kGeneric ? 1.f : problem.scale_log2;
        CompensatedRows<Layout> softmax;
        typename Family::template Output<HEADDIM> o = {};

        tiles.load(keys.first());
        tiles.store(ring);
        tiles.load(keys.after(1));
        __syncthreads();
        u32 slot = 0;
#pragma unroll 1
        for (; keys.exists(); keys.advance(visited), slot ^= kSlotBytes) {
            tiles.store(ring + (slot ^ kSlotBytes));
            tiles.load(keys.after(2));
            typename Keys::Bits bits;
            bits.load(visited, keys, row);
            typename Family::Probabilities probabilities;
            Scores<Layout, 1, 1> s[Family::kTiles];
            q.multiply(s, ring + slot, kPitch);
            to_probabilities<Family>(s, p, problem, unmasked, keys, bits, row, scale, softmax, o);
            probabilities.split(s);
            Family::template add_output<HEADDIM>(o, probabilities, ring + slot + kTileBytes, kPitch);
            __syncthreads();
        }
        const int last_row = Block::remat_row(problem) + remat_thread_index() / 32 * kWarpRows;
        write<Family, HEADDIM>(p, remat_block_batch(), remat_head<Layout::kEitherOrder>(problem), last_row, 0, softmax, o);
    }
};

// The kernel for headdims above 128, whose output does not fit one warp's registers. Each of kColumnGroups warps has kColumns
// columns: of Q and K in the first product, of V and the output in the second. They add their sums of scores in shared memory, and
// then compute the same softmax. Shared memory has no room for a step: it takes four phases, with parts of K or V in two slots:
//
//   high parts of K  |  low parts of K, store the sums  |  add the sums, softmax, high parts of V  |  low parts of V
template <class Family, class Keys = SeenKeys, int Headdim = HEADDIM>
struct WideForward {
    using Layout = typename Family::Layout;
    static constexpr int kColumns = 128, kColumnGroups = Headdim / kColumns;
    static constexpr int kWarps = THREADS / 32, kBlockRows = kWarps / kColumnGroups * kWarpRows;
    static constexpr int kChunks = Headdim / kChunk;  // of a row of one part
    static constexpr int kPitch = (kChunks + 1) * kChunkBytes;  // as Forward::kPitch
    static constexpr int kSlotBytes = kStep * kPitch;
    // A warp's sums are two chunks of each lane, kLaneChunks bytes each. kSums, kQueries: where sums and Q's part begin.
    static constexpr int kLaneChunks = 32 * kChunkBytes, kSums = 2 * kSlotBytes, kWarpSums = 2 * kLaneChunks;
    static constexpr int kQueries = kSums + kWarps * kWarpSums;
    using Queries = typename Family::template Queries<kColumns, Headdim>;
    using Products = Scores<Layout, 1, 1>[Family::kTiles];
    static_assert(kBlockRows == BLOCK_ROWS && kStep == STEP && Headdim == HEADDIM_V && Headdim % kColumns == 0 &&
                      kQueries + Queries::kSharedBytes * kWarpRows * kWarps == SHARED_BYTES,
                  "the row in src/kernels and the kernel disagree");
    static_assert(!kPaged, "no cache");

    // A thread's chunks of a part of K or V of a step.
    static constexpr int kRowsPerPass = THREADS / kChunks, kPasses = kStep / kRowsPerPass;
    static_assert(kPasses * kRowsPerPass == kStep, "threads take whole rows");
    struct Loader {
        const unsigned short *k, *v;  // the thread's chunk of row 0
        unsigned k_stride, v_stride;
        int key_end;
        uint4 data[kPasses];

        __device__ __forceinline__ void load(const unsigned short* part, unsigned stride, int first) {
#pragma unroll
            for (int i = 0; i < kPasses; i++) {
                const int key = first + Family::key_of_row(threadIdx.x / kChunks + i * kRowsPerPass);
                data[i] = zero_chunk();  // of keys that do not exist
                load_global_if(key < key_end, data[i], rows_after(part, key, stride));
            }
        }
        // `part`: 0 for the high parts, 1 for the low ones.
        __device__ __forceinline__ void load_k(int part, int first) { load(k + part * Headdim, k_stride, first); }
        __device__ __forceinline__ void load_v(int part, int first) { load(v + part * Headdim, v_stride, first); }
        __device__ __forceinline__ void store(u32 slot) const {
            const u32 to = slot + threadIdx.x / kChunks * kPitch + threadIdx.x % kChunks * kChunkBytes;
#pragma unroll
            for (int i = 0; i < kPasses; i++) store_shared(to + i * kRowsPerPass * kPitch, data[i]);
        }
    };

    __device__ __forceinline__ static int warp_row() { return remat_thread_index() / 32 / kColumnGroups * kWarpRows; }
    __device__ __forceinline__ static int first_column() { return remat_thread_index() / 32 % kColumnGroups * kColumns; }

    // Stores the warp's sums of scores, small (with a low part) + large. A lane has eight: one tile of eight, or two of four.
    __device__ __forceinline__ static void store_sums(u32 sums, const Products& small, const Products& large) {
        const u32 to = sums + remat_thread_index() / 32 * kWarpSums + remat_lane() * kChunkBytes;
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const auto sum = [&](int v) {
                v += 4 * i;
                constexpr int n = Layout::kElements;
                return __float_as_uint(large[v / n].tile[0][0][v % n] + small[v / n].tile[0][0][v % n]);
            };
            store_shared(to + i * kLaneChunks, make_uint4(sum(0), sum(1), sum(2), sum(3)));
        }
    }
    // Adds the sums of all column groups, in the same order in all warps, so that their softmax is the same.
    __device__ __forceinline__ static void add_sums(u32 sums, Products& s) {
        const u32 from =
            sums + remat_thread_index() / 32 / kColumnGroups * (kColumnGroups * kWarpSums) + remat_lane() * kChunkBytes;
        unrolled<2, kColumnGroups>([&](int i, int g) {
            const uint4 sum = load_shared(from + g * kWarpSums + i * kLaneChunks);
            const u32 of[4] = {sum.x, sum.y, sum.z, sum.w};
#pragma unroll
            for (int v = 0; v < 4; v++) {
                float& x = s[(4 * i + v) / Layout::kElements].tile[0][0][(4 * i + v) % Layout::kElements];
                x = g ? x + __uint_as_float(of[v]) : __uint_as_float(of[v]);
            }
        });
    }

    __device__ __forceinline__ static void run(const FwdParams& p, const Keys& visited = Keys()) {
        extern __shared__ __align__(1024) unsigned char shared[];
        const u32 slot = shared_address(shared);
        const Problem& problem = p.problem;
        const auto block = visited.template block<kBlockRows, Layout::kEitherOrder>(problem);
        const BlockSeqlenInfo sequence(p, block.batch);
        if (kVarlen && block.row >= sequence.seqlen_q()) return;
        const Mask mask = mask_of(problem, sequence);
        const int row = block.row + warp_row();
        Queries q;
        q.load(p.q, rows_of(p.q, block.batch, block.head, sequence.q_offset()) + first_column(), row, sequence.seqlen_q(),
               problem.sign_flip, slot + kQueries, threadIdx.x / 32 * kWarpRows);
        auto keys = visited.template steps<1, kBlockRows>(p, block, mask);  // loads run one step ahead
        const int key_end = visited.template end<kBlockRows>(mask, block), chunk = threadIdx.x % kChunks * kChunk;
        Loader tiles = {rows_of(p.k, block.batch, block.head_k, sequence.k_offset()) + chunk,
                        rows_of(p.v, block.batch, block.head_k, sequence.k_offset()) + chunk, static_cast<unsigned>(p.k.row_stride),
                        static_cast<unsigned>(p.v.row_stride), key_end};
        const UnmaskedKeys<kStep> unmasked(mask, min(row, sequence.seqlen_q() - 1), kWarpRows);  // as in Forward
        const float scale = kGeneric ? 1.f : problem.scale_log2;
        CompensatedRows<Layout> softmax;
        typename Family::template Output<kColumns> o = {};

        tiles.load_k(0, keys.first());
        tiles.store(slot);
        tiles.load_k(1, keys.first());
        __syncthreads();
#pragma unroll 1
        for (; keys.exists(); keys.advance(visited)) {
            const u32 columns = first_column() * 2;  // bytes from a row's first column to the warp's
            tiles.store(slot + kSlotBytes);
            tiles.load_v(0, keys.first());
            Products s, large;  // sums of products with a low part, and of the others
#pragma unroll
            for (int i = 0; i < Family::kTiles; i++) s[i].clear(), large[i].clear();
            q.multiply_high(s, large, slot + columns, kPitch);
            __syncthreads();

            tiles.store(slot);
            tiles.load_v(1, keys.first());
            q.multiply_low(s, slot + kSlotBytes + columns, kPitch);
            store_sums(slot + kSums, s, large);
            __syncthreads();

            tiles.store(slot + kSlotBytes);
            tiles.load_k(0, keys.after(1));
            typename Keys::Bits bits;
            bits.load(visited, keys, row);
            add_sums(slot + kSums, s);
            to_probabilities<Family>(s, p, problem, unmasked, keys, bits, row, scale, softmax, o);
            typename Family::Probabilities probabilities;
            probabilities.split(s);
            Family::template add_high<kColumns>(o, probabilities, slot + columns, kPitch);
            __syncthreads();

            tiles.store(slot);
            tiles.load_k(1, keys.after(1));
            Family::template add_low<kColumns>(o, probabilities, slot + kSlotBytes + columns, kPitch);
            __syncthreads();
        }
        if (!visited.combine_splits(softmax, o)) return;
        write<Family, kColumns>(p, visited.remat_batch(problem), visited.template remat_head<Layout::kEitherOrder>(problem),
                                visited.template remat_row<kBlockRows, Layout::kEitherOrder>(problem) + warp_row(), first_column(),
                                softmax, o);
    }
};

}  // namespace split
