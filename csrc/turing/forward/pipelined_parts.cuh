// Base class of the turing forward kernel up to headdim 256: sizes, the choices that keep all variants within 255 registers, and
// the softmax of a tile. ForwardPipelined (pipelined.cuh), derived from it, has the schedule: while a warp computes the
// probabilities of a tile of keys, it multiplies Q by K of the next tile, and P by V of the tile before (p_last). Two grid policies
// are here too: they tell a thread block its query rows, heads and steps of keys.
//
//   chunk, tile, step 8 columns of a row (16 bytes); 8 keys (kTileKeys); two tiles, an iteration
//   fragment, group   a lane's operands of one tile from one ldmatrix: four chunks, a group
//   ring, slot        Slots slots of shared memory, used in turn, each with a step's rows of K and V
//   stream            a thread's part of the copies of K or V to the ring (RowStream, row_stream.cuh; not stream-K)
//   mt, r, half       a tile of 16 query rows of the warp; one of a lane's two rows in it (kRows); tile 0 or 1 of a step
//   ...V, ...K        of V and the output, or of K; without a letter of Q and K
//   scale             makes a product a score in log2 units: |softmax_scale| * log2(e), or 1 in generic kernels
//   row_max, limit    a row's maximum so far, log2 units. It lags, until a score exceeds it by more than kRescaleThreshold (7): a
//                     product above `limit`. So P is up to 2^7, and fits fp16 even times kPackedOne (2^8), as it is packed
//   remat_*()         compute or load again what would otherwise hold a register; keep_in_register() stops that (ptx.cuh)
//   kVarlen, kPaged, kHas..., kRequires..., kGeneric  what this kernel is compiled for (features.cuh). kRequires...: all problems
//                     use the feature, so no test. kGeneric: parameters say which score features a problem uses
//   BLOCK_ROWS, STEP, SHARED_BYTES  query rows, keys of a step and shared memory of a block: the kernel's row in src/kernels
#pragma once

#include "batch_invariant.cuh"
#include "forward/block.cuh"  // ForwardBlock, kBlockHeads: a block's rows and heads; only HeadGroupGrid has several heads
#include "dense_steps.cuh"  // DenseSteps: iterator over a range of keys; NoMaskBits: no single scores are hidden
#include "forward/pages.cuh"  // for pipelined.cuh: K and V in a KV cache's pages (kPaged kernels)
#include "turing/forward/layout.cuh"
#include "turing/forward/one_feature.cuh"
#include "turing/forward/row_stream.cuh"

namespace turing {

// The default grid policy: one thread block for each block of query rows, with all of their keys. BlockMaskGrid (block_mask.cuh)
// is that of block-sparse masks. kEitherOrder: heads may be on the grid's first axis.
struct DenseGrid {
    static constexpr bool kListed = false;  // whether keys come from a block mask's lists, of key blocks (64 keys)
    static constexpr bool kBlockLoop = false;  // whether the kernel loops over listed key blocks, and inside over their steps
    template <int Step>
    using Steps = DenseSteps<Step>;
    template <int Rows, int Step>
    using Bits = NoMaskBits;
    template <int BlockRows>
    using Block = DenseBlock<ForwardBlock<BlockRows, ForwardLayout::kEitherOrder>, BlockRows>;
};

// One thread block for a few query rows of Heads heads, a warp for each head (HeadGroupBlock, forward/block.cuh): under a short
// window fewer rows span fewer keys.
template <int Heads>
struct HeadGroupGrid : DenseGrid {
    template <int BlockRows>
    using Block = DenseBlock<HeadGroupBlock<BlockRows, Heads>, BlockRows / Heads>;
};

}  // namespace turing

template <int Heads>
constexpr int kBlockHeads<turing::HeadGroupGrid<Heads>> = Heads;

namespace turing {

// A warp has 16 * RowTiles query rows. Slots: slots of the ring, of one step each. Grid: DenseGrid, HeadGroupGrid or BlockMaskGrid.
template <int Headdim, int HeaddimV, int Warps, int RowTiles, int Slots, class Grid>
struct PipelinedParts {
    // ---- sizes ----
    static constexpr int kThreads = 32 * Warps;
    static constexpr int kWarpRows = 16 * RowTiles;
    static constexpr int kBlockRows = Warps * kWarpRows;
    static constexpr int kHeads = kBlockHeads<Grid>, kHeadRows = kBlockRows / kHeads;  // heads of a block, rows of each
    static_assert(kHeads == 1 || kHeads == Warps, "a warp has rows of one head, which no other has");
    static constexpr int kTileKeys = ForwardLayout::kTileKeys;
    static constexpr int kStep = 2 * kTileKeys;
    static constexpr int kChunks = Headdim / kChunk, kChunksV = HeaddimV / kChunk;
    static constexpr int kGroups = kChunks / 4, kGroupsV = kChunksV / 4;  // of four chunks, which one ldmatrix loads
    static constexpr int kMostGroups = kGroups > kGroupsV ? kGroups : kGroupsV;
    static constexpr int kPitch = kChunks * kChunkBytes, kPitchV = kChunksV * kChunkBytes;  // bytes of a row in shared memory
    static constexpr u32 kTileBytes = kTileKeys * kPitch, kTileBytesV = kTileKeys * kPitchV;
    static constexpr u32 kOffsetV = kStep * kPitch, kSlotBytes = kStep * (kPitch + kPitchV);  // a slot: K, then V
    static constexpr u32 kRingBytes = Slots * kSlotBytes;
    // ---- features ----
    // Kernels that require ALiBi or a bias begin products with its terms (one_feature.cuh).
    static constexpr bool kInitialAlibi = kRequiresAlibi;
    static constexpr bool kInitialBias = kRequiresBias;
    // Whether the kernel's only score feature is a score function (softcap). It is applied late, where probabilities are computed
    // beside the next products. It is increasing, so the largest product has the largest score. The softmax takes its states as
    // products, and its factor as `scale`: score = factor * state(product) + constant (score_function.cuh). Row maxima are
    // corrected by the constant at the end.
    static constexpr bool kOnlyFunction = kRequiresScoreFunction;
    static constexpr bool kCarriedDropout = kRequiresDropout;  // the generator's state stays in registers for the whole loop
    // With ALiBi, scores mostly rise toward a row's own position, and row maxima with them. So that position comes first, then the
    // keys before it, then those after it, both in descending order.
    static constexpr bool kBackwards = kInitialAlibi;
    static constexpr int kNextTile = ForwardLayout::kNextTile;  // from a lane's keys in a step's first tile to those in its second
    // ---- pipeline ----
    static constexpr bool kBarrierEverySecondStep = Slots == 8;  // else every step has a barrier
    static constexpr int kAhead = kBarrierEverySecondStep ? 3 : 2;  // step j stores the rows of step j + kAhead to the ring
    static_assert(Slots == 4 || Slots == 8, "kAhead knows pipelines of four and of eight slots");
    static_assert(kSlotBytes % 128 == 0, "at_group needs slots of whole 128-byte rows");

    using StreamK = RowStream<ForwardLayout, kChunks, kStep, kThreads>;
    using StreamV = RowStream<ForwardLayout, kChunksV, kStep, kThreads>;
    // A step's copies have kPasses passes; a thread moves one chunk of K and one of V in each. With two, the first is in the middle
    // of a step, the second at its end.
    static constexpr int kPasses = StreamK::kPasses > StreamV::kPasses ? StreamK::kPasses : StreamV::kPasses;
    static_assert(kPasses <= 2, "a step has two halves");
    static_assert(!kPaged || (kChunks == kChunksV && StreamV::kAllTakePart && !kBackwards),
                  "paged kernels load K and V alike, in ascending order");
    using Block = typename Grid::template Block<kBlockRows>;
    using Keys = typename Grid::template Steps<kStep>;
    static_assert(!Grid::kListed || !kBackwards, "lists are ascending");
    using Tile = Scores<ForwardLayout, RowTiles, 1>;  // scores of 8 keys: tile[mt][0][v]; lane_maximum(mt, r): of the lane's two
    using Softmax = SoftmaxRows<ForwardLayout, RowTiles>;  // row[mt][r]: row_max, limit, sum of the lane's probabilities
    using Probabilities = OperandA[RowTiles];  // of the 8 keys of a tile
    using Output = Accumulator[RowTiles][kChunksV];

    // ---- registers ----
    // Registers of a lane for Q and the output. Near the limit of 255 registers ptxas needs help: each of the choices below was
    // found by trial, until nothing spilled.
    static constexpr int kOperandRegisters = RowTiles * (2 * kChunks + 4 * kChunksV);
    static constexpr bool kRegistersFull = kOperandRegisters >= 192;
    // Whether fragments of K and V are loaded while the group before them multiplies. Else they are loaded when they are used.
    static constexpr bool kFragmentsAhead = !kRegistersFull || (RowTiles == 1 && !kHasScoreFeatures && !Grid::kListed);
    // Whether registers keep the row and chunk that a thread copies. Else each copy computes them again.
    static constexpr bool kChunkCoordsKept = !(
        // each of these takes registers of its own
        kRegistersFull && (kPaged || kInitialAlibi || (RowTiles == 1 && kVarlen) || Grid::kListed));
    // Whether registers keep the streams: addresses of a thread's chunks in row 0, of page 0. Else each load computes them again.
    static constexpr bool kStreamsKept = !(kRegistersFull && kPaged);
    // Whether the streams' state and ALiBi's constants lie in shared memory, after the ring: 32 bytes of each thread.
    static constexpr bool kStreamsInShared = kRegistersFull && kRequiredFeatures && RowTiles > 1 && !kPaged;
    static constexpr u32 kSharedBytes = kRingBytes + (kStreamsInShared ? 32 * kThreads : 0);
    static_assert(kHeadRows == BLOCK_ROWS && kStep == STEP && kSharedBytes == SHARED_BYTES,
                  "the row in src/kernels and the kernel disagree");
    static constexpr bool kPagesInBranch = kRegistersFull && RowTiles == 1 && !kHasScoreFeatures;  // else page loads are predicated
    static constexpr bool kMaskKept = !(kRegistersFull && (kInitialAlibi || (RowTiles == 1 && kVarlen && !kPaged) ||
                                                           Grid::kListed));  // else each masked tile computes it again
    // Whether row maxima are tested before probabilities are computed, else after. Before takes fewer registers but more time,
    // because nothing else can proceed until the products are done. (At headdim 32 four blocks an SM leave 128 registers.) The test
    // compares a row's largest product with its limit. kOnlyFunction has no limits: row_max follows from states, not from products.
    static constexpr bool kRescaleBeforeExp = kRegistersFull || Headdim <= 32;
    static_assert(!kRescaleBeforeExp || !kOnlyFunction, "update_row_max_before_exp needs a maximum per step");
    // Whether a warp has one row tile of headdim 256, without pages.
    static constexpr bool kFullRow = kRegistersFull && RowTiles == 1 && !kPaged;
    // Whether registers keep rows' limits, (row_max + kRescaleThreshold) / scale. Else they follow from row_max in each test.
    static constexpr bool kLimitsKept =
        !(kStreamsInShared || kFullRow || (kRegistersFull && Grid::kListed) || (Headdim <= 32 && kVarlen));
    static constexpr bool kKeysKept = kOperandRegisters < 144;  // whether registers keep Philox's keys of all rounds
    static constexpr bool kBlockLoop = Grid::kBlockLoop;
    // ---- copies from global memory to the ring ----
    // Where a step stores what was loaded, and loads what comes next. The choice is by simulated times.
    //   kBetweenTiles     after the first tile, with two passes also after the second. ptxas puts both before the products of a
    //                     tile; there the warp waits, because the load writes the registers that the store reads
    //   kLoadFirst        in tiles, after the branch for row maxima: ptxas moves no store across it. One pass: the first tile
    //                     loads, the second stores; kStoreFirst: the first stores, the second loads
    //   kBothPasses       in tiles, two passes: each tile stores one and loads the next
    //   kAtProducts       between the products of a tile, in loops over listed key blocks (copy_positions())
    enum class CopyPlacement { kBetweenTiles, kLoadFirst, kStoreFirst, kBothPasses, kAtProducts };
    // Kernels that copy between tiles. Those with pages and generic block masks were not tried otherwise. With 32 rows per warp
    // most kernels are slower with copies in tiles. Varlen kernels of headdim 256 would spill 8 bytes.
    static constexpr bool kCopiesBetweenTiles = kPaged || Grid::kListed ||
                                                (RowTiles == 2 && (kRescaleBeforeExp || (Headdim == 64 && !kHasScoreFeatures))) ||
                                                (kFullRow && kVarlen && !kHasScoreFeatures);
    static constexpr CopyPlacement kCopyPlacement = kBlockLoop            ? CopyPlacement::kAtProducts
                                                    : kCopiesBetweenTiles ? CopyPlacement::kBetweenTiles
                                                    : kPasses == 2        ? CopyPlacement::kBothPasses
                                                    : kInitialBias        ? CopyPlacement::kStoreFirst
                                                                          : CopyPlacement::kLoadFirst;
    static constexpr bool kCopiesInTiles =
        kCopyPlacement != CopyPlacement::kBetweenTiles && kCopyPlacement != CopyPlacement::kAtProducts;
    // Whether unmasked steps have a loop of their own. Else one loop masks every step, or those of key blocks that need it.
    static constexpr bool kUnmaskedLoop = !(kRegistersFull && (kHasScoreFeatures || Grid::kListed));
    // Bits of partial key blocks, one for each score (1: it exists), are loaded this many steps ahead. With 2 they are combined
    // with the causal mask one step ahead, so no step waits; one more register.
    static constexpr int kBitsAhead = kRegistersFull ? 1 : 2;

    // Where a tile of a loop over listed key blocks stores chunks of K and V to the ring and loads others: before the products of
    // this chunk of the columns, or at kEnd, after all. A load waits until the store before it has read its registers, so most
    // positions keep the two apart. The positions were found by trial.
    struct CopyPositions {
        int store_k, store_v, load_k, load_v;
    };
    static constexpr int kEnd = 4 * kMostGroups, kNever = -1;  // after the last chunk; no position
    // may_mask: the tile may need a mask. `second`: of a step's two tiles. With one pass both tiles share the work.
    __device__ __forceinline__ static constexpr CopyPositions copy_positions(bool may_mask, bool second) {
        if (kPasses == 2) return {kEnd / 4 + 1, kEnd / 2 + 1, kEnd, kEnd};
        if (may_mask) return second ? CopyPositions{kNever, 0, kNever, kEnd / 2} : CopyPositions{0, kNever, 0, kNever};
        return second ? CopyPositions{kNever, kNever, kNever, kEnd / 2} : CopyPositions{1, 3, kEnd, kNever};
    }

    // Returns the address of a chunk's counterpart in group c of four chunks, from its address in group 0 (tile.cuh's swizzle).
    template <int Chunks>
    __device__ __forceinline__ static u32 at_group(u32 address, int c) {
        if (Chunks % 8 != 0) return address + c * 4 * kChunkBytes;
        return (address ^ c % 2 * 4 * kChunkBytes) + c / 2 * 8 * kChunkBytes;
    }
    // Returns the offset, in bytes from slot 0, of the slot `steps` (negative: before) after the one at offset `slot`.
    __device__ __forceinline__ static u32 slot_after(u32 slot, int steps) {
        if ((kRingBytes & (kRingBytes - 1)) == 0) return slot + steps * kSlotBytes & kRingBytes - 1;
        const u32 after = slot + (steps + Slots) % Slots * kSlotBytes;
        return after >= kRingBytes ? after - kRingBytes : after;
    }

    // A lane's operands of a tile's products with K and V: group c of four chunks, from the lane's address in group 0.
    struct Fragments {
        u32 k[4], v[4];
        __device__ __forceinline__ void load_k(u32 address, int c) { load_matrices(k, at_group<kChunks>(address, c)); }
        __device__ __forceinline__ void load_v(u32 address, int c) { load_matrices_transposed(v, at_group<kChunksV>(address, c)); }
    };

    // Return the warp's first query row, its head, and the mask.
    __device__ __forceinline__ static int remat_warp_row(const FwdParams& p) {
        return Block::remat_row(p.problem) + (kHeads == 1 ? remat_thread_index() / 32 * kWarpRows : 0);
    }
    __device__ __forceinline__ static int remat_warp_head(const FwdParams& p) {
        return kHeads == 1 ? remat_head<ForwardLayout::kEitherOrder>(p.problem) : remat_group_head<kHeads>();
    }
    __device__ __forceinline__ static Mask remat_mask(const FwdParams& p) {
        return mask_of(p.problem, BlockSeqlenInfo(p, remat_block_batch()));
    }

    __device__ __forceinline__ static ScoreFunction function_of(const FwdParams& p) {
        return ScoreFunction(p.problem, p.score_options);
    }

    // Packs two probabilities times kPackedOne (2^8, to use the upper end of fp16's range) as pack_probabilities() does, with a
    // clamp and an integer subtraction instead of the multiplication.
    __device__ __forceinline__ static u32 pack_by_integers(float lo, float hi) {
        // fp32's exponent that becomes fp16's 0, that of subnormals: 112 (softmax.cuh) less 8 for the factor kPackedOne, 2^8.
        constexpr u32 kExponent = 104;
        const u32 a = max(__float_as_uint(lo), kExponent << 23) * 8 + (0x8000 - (kExponent << 26));
        const u32 b = max(__float_as_uint(hi), kExponent << 23) * 8 + (0x8000 - (kExponent << 26));
        return upper_halves(a, b);
    }

    // Softmax of one tile. Without kRescaleBeforeExp it takes the row maxima so far. If P is then too large for fp16,
    // update_row_max() repeats it.
    struct TileSoftmax {
        float sum[RowTiles][ForwardLayout::kRows] = {};  // of a lane's two probabilities in a row
        float largest = 0.f;  // of these sums: above kLargestSum, P may exceed 2^kRescaleThreshold

        // Returns packed probabilities of row r of row tile mt, and sums them. MayMask: scores may be -inf.
        template <bool MayMask>
        __device__ __forceinline__ u32 probabilities(const FwdParams& p, const Tile& s, Softmax& softmax, float scale, int mt,
                                                     int r) {
            if (kRescaleBeforeExp) {
                SoftmaxRow& row = softmax.row[mt][r];
                float x[2];
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    const float score = s.tile[mt][0][2 * r + i];
                    // as row.probability(), but without a register for -row_max: block masks at headdim 128 would spill
                    x[i] = kBlockLoop ? exp2_approx(multiply_subtract(score, scale, row.row_max)) : row.probability(score, scale);
                    if (kBlockLoop) row.sum += x[i];
                }
                // Other ways to pack, for kernels whose masked tiles would spill.
                if (MayMask && kStreamsInShared) return to_half2(x[0] * kPackedOne, x[1] * kPackedOne);
                if ((MayMask || kBatchInvariant) && kFullRow) return pack_by_integers(x[0], x[1]);
                return pack_probabilities(x[0], x[1]);
            }
            float x[2];
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const float score = s.tile[mt][0][2 * r + i];
                const float x_score = kOnlyFunction ? function_of(p).state(score) : score;
                const float exponent = fmaf(x_score, scale, -softmax.row[mt][r].row_max);
                // a masked product, -inf, has a finite state
                x[i] = kOnlyFunction && MayMask && score == negative_infinity() ? 0.f : exp2_approx(exponent);
            }
            sum[mt][r] = x[0] + x[1];
            largest = fmaxf(largest, sum[mt][r]);
            return pack_probabilities(x[0], x[1]);
        }
    };
    static constexpr float kLargestSum = 128.f;  // 2^kRescaleThreshold
    static_assert(kRescaleThreshold == 7.f, "kLargestSum is 2^kRescaleThreshold");

    // Without kRescaleBeforeExp: moves row maxima to those of the tile before, s, whose probabilities were too large, and computes
    // these again (<true>: s may be masked). kAll: every row moves, so that the next move comes later. `half`: of s in its step.
    // Passes 0 for 1 / scale, which only sets the unused `limit`.
    __device__ __forceinline__ static void update_row_max(const FwdParams& p, const Tile& s, TileSoftmax& tile_softmax,
                                                          Softmax& softmax, float scale, Output& o, Probabilities& p_last,
                                                          const StepDropoutMask<RowTiles>& dropout, int half) {
        const auto rescale = rescale_output<ForwardLayout>(o);
        tile_softmax.largest = 0.f;
        unrolled<RowTiles, ForwardLayout::kRows>([&](int mt, int r) {
            float m = row_max<ForwardLayout>(s.lane_maximum(mt, r));
            if (kOnlyFunction) m = function_of(p).state(m);
            // batch-invariant: a row moves its maximum only for its own sum, not for a neighbor's
            if (kBatchInvariant && !(row_max<ForwardLayout>(tile_softmax.sum[mt][r]) > kLargestSum)) m = negative_infinity();
            rescale(mt, r, softmax.row[mt][r].template update_row_max<RescaledRows::kAll>(m, scale, 0.f));
            p_last[mt][r] = tile_softmax.template probabilities<true>(p, s, softmax, scale, mt, r);
            if (kHasDropout) p_last[mt][r] = dropout.apply(p, p_last[mt][r], mt, r, half);
        });
    }

    // With kRescaleBeforeExp: whether a product exceeds its row's limit (up to rounding, if not kept), so that row_max must move.
    __device__ __forceinline__ static bool needs_rescale(const Tile& s, const Softmax& softmax, float scale) {
        if (kLimitsKept) return s.needs_rescale(softmax);
        bool exceeds = false;
        unrolled<RowTiles, ForwardLayout::kRows>(
            [&](int mt, int r) { exceeds |= fmaf(s.lane_maximum(mt, r), scale, -softmax.row[mt][r].row_max) > kRescaleThreshold; });
        return __any_sync(~0u, exceeds);
    }
    // Moves row maxima before the probabilities of s are computed. Those of the last tile, p_last, are packed: rescales them, which
    // rounds them again. So only rows above their limit move (kExceeding, softmax.cuh).
    __device__ __forceinline__ static void update_row_max_before_exp(const Tile& s, Softmax& softmax, float scale, Output& o,
                                                                     Probabilities& p_last) {
        // 1 / scale, computed again so that it holds no register in between. Generic kernels have scale = 1.
        const float inverse_scale = kGeneric ? 1.f : __fdividef(1.f, __int_as_float(keep_in_register(__float_as_int(scale))));
        const auto rescale = rescale_output<ForwardLayout>(o);
#pragma unroll
        for (int i = 0; i < (kLimitsKept ? 0 : RowTiles * ForwardLayout::kRows); i++) {
            SoftmaxRow& r = softmax.row[i / ForwardLayout::kRows][i % ForwardLayout::kRows];
            r.limit = (r.row_max + kRescaleThreshold) * inverse_scale;
        }
        s.template update_row_max<RescaledRows::kExceeding>(softmax, scale, inverse_scale, [&](int mt, int r, float factor) {
            rescale(mt, r, factor);
            p_last[mt][r] = half2_mul(p_last[mt][r], to_half2(factor, factor));
        });
    }

    // Returns x * y - z. Where z is kept over many products, the compiler would keep -z in another register.
    __device__ __forceinline__ static float multiply_subtract(float x, float y, float z) {
        float result;
        asm("{.reg .f32 minus_z;\n"
            "neg.f32 minus_z, %3;\n"
            "fma.rn.f32 %0, %1, %2, minus_z;}"
            : "=f"(result)
            : "f"(x), "f"(y), "f"(z));
        return result;
    }
};

}  // namespace turing
