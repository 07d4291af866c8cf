// Main kernel of the turing backward pass for headdim above 64, and at 64 for generic kernels (parameters choose score features)
// and block masks: dK and dV of a block of 64 or 128 keys, fp16 or fp32, from fp16 inputs. The grid has blocks of keys (x), KV
// heads (y) and batch entries (z). A thread block visits, for each query head of its KV head, the queries that see its keys, in
// steps of 16 or 32. DqMode says what becomes of dQ: another kernel computes it (kSeparate), atomics add it to an fp32 accumulator,
// or the block, if it has all keys, stores it (kStore, "fused").
//
// 8 warps have two roles (warp specialization). Warps 0 to 3 compute S^T, P = exp(scale * S - lse) and dV, warps 4 to 7 dP^T, dS
// and dK: dV and dK together do not fit one warp's registers. Partners are the two warps of the same keys, one of each role. P goes
// from partner to partner, lane by lane, through shared memory. A warp has its operands of K or of V in registers, except the last
// chunks where headdim is above 192. All warps compute dQ, at different times in staggered kernels (kStaggered).
//
// A step, after the barrier at which its tiles of Q and dO are in shared memory:
//   first role                              second role
//   1. S^T = K Q^T                          1. dQ of the previous step (staggered; else both roles), then dP^T = V dO^T
//   2. exponents(), P^T, drop()
//   3. sends P^T; meets the partner         3. meets the partner; receives P^T; score_gradients(): dS^T = P^T * (dP^T - delta),
//                                              also to shared memory
//   4. dV += P^T dO; dQ of the previous     4. dK += dS^T Q
//      step (staggered)
// With two slots of tiles a step first stores the next step's. With one slot it stores them after a second barrier, at its end;
// kernels that are not staggered compute dQ of the step itself there.
//
//   S:: (Shape)       sizes (shape.cuh), not scores: kRows own rows (keys), kStep step rows (queries), kChunks chunks of eight
//                     columns, kRowBytes of a row; offsets in shared memory: kOwn (K), kStepTiles (slots of Q and dO, kSlotBytes
//                     each, dO kStepTile after Q), kScores (slots of dS^T, kScoreTile each), kPartner (P^T between warps)
//   m, n, h, c        16 keys of the warp; 8 queries, a column tile; one of a lane's two keys in tile m; a pair of chunks
//   v                 a lane's element of a column tile (all m), of its first query (x) if v is even, else of its second (y)
//   Accumulator, OperandA  a lane's part of C, 16 rows by 8 columns, as fp32; and of A, 16 rows by 8, as fp16 (turing/mma.cuh)
//   by_rows(), by_chunks()  give lanes' addresses for ldmatrix; pair_after(x, n): the address 2 * n chunks after x (fragments.cuh)
//   score_offset(), score_chunk()  place dS^T: rows are keys, in chunks of eight queries
//   multiply_pair(), accumulate_pair()  add the products of 16 columns to S or dP; add to 16 columns of dV or dK (products.cuh)
//   DqProduct         dQ += dS K of a step. A warp has 16 queries by Dq::kPairs pairs of column tiles (16 columns each), or
//                     none: has_pair(). add(): to the accumulator, by atomics; store(): as dq (dq_product.cuh)
//   VisitedQueries    first() to `end`: query rows that see the block's keys (fused: all); `unmasked`: steps that need no mask;
//                     rows(): rows that loads may read; next_step(): the next step's row, at the end one that has statistics
//   queries           under a block mask, iterator over listed steps: first() is the step's first query, after(n) that n later,
//                     number_modulo<n>() the step's number modulo n
//   bits              under a block mask: which single scores of the warp exist; load(..., n) loads the bits of the step n later,
//                     combine() adds the other masks, hide() sets hidden scores to -inf (block_mask.cuh)
//   HeadRows          one query head; origin(): the sequence's first row in the tensors; scratch_offset(): an offset, in floats, of
//                     the head's rows in scratch memory (row statistics, accumulator of dQ)
//   StepStats         -lse/scale and -delta (rowsum(dO * O)) of a step's queries; scale(): -lse in log2 units plus a shift, and
//                     -delta / 2^12 (step_loads.cuh)
//   remat_*()         reads special registers again, to hold no register; keep_in_register(x) computes x once (ptx.cuh)
//   kVarlen, kHas..., kRequires...  what this kernel is compiled for (features.cuh); without kRequires..., parameters choose
//   p.problem.scale_log2, p.signed_scale  |softmax_scale| * log2(e); softmax_scale with its sign
//   SHARED_BYTES, HEADDIM_V  shared memory of a block, columns of V and dO: from the kernel's row in src/kernels
#pragma once

#include "backward/dense_blocks.cuh"
#include "backward/modifiers.cuh"  // score features: add_alibi(), add_bias(), draw_kept_tile(); apply_mask(): -inf where masked
#include "backward/residual_signs.cuh"  // signs that say which way P was rounded
#include "backward/scratch.cuh"  // RowStats; BlockSeqlenInfo: lengths of a sequence, and its first rows in the tensors
#include "backward/tiles.cuh"  // clear_shared(): zeros
#include "turing/backward/one_feature.cuh"  // TileDropoutMask: kernels that require dropout
#include "turing/backward/products.cuh"  // products; score_gradient(): dS from P and dP
#include "turing/backward/shape.cuh"  // Shape, HeadRows, load_own_keys(); DqMode: what becomes of dQ
#include "turing/backward/step_loads.cuh"  // StepStats; StepTileLoader: load() of a step's Q and dO, store() to shared memory

namespace turing {

// The kernel; csrc/entry.cu calls run(). BlockRows: keys of a block. Step: queries of a step. Slots: tiles of Q and dO in shared
// memory, 1 or 2. Blocks: DenseBlocks (backward/dense_blocks.cuh), or ListedBlocks (turing/backward/block_mask.cuh) under a
// block-sparse mask. With kListed, lists name the queries that a block of keys visits, and their bits say which scores exist.
template <int Headdim, int BlockRows, int Step, int Threads, int Slots, DqMode Mode, class Blocks = DenseBlocks>
struct BackwardWarpSpecialized {
    static constexpr bool kWithDq = Mode != DqMode::kSeparate, kFused = Mode == DqMode::kStore;
    // Whether the roles compute dQ of the previous step at different times: the second one before dP, the first one after dV. So
    // tensor cores have products while a role computes P or dS, and the second one hardly waits for P. Else both compute dQ
    // together: its code exists once, so that loops with score features fit the instruction cache, and fused kernels do not spill.
    static constexpr bool kStaggered = kWithDq && !kFused && !kHasScoreFeatures;
    // One tile of P^T between the roles. dS has as many slots as Q and dO, in staggered kernels two.
    using S = Shape<Headdim, BlockRows, Step, Threads, Slots, 1, kStaggered ? 2 : Slots>;
    // Pairs of chunks, the last of a row of K or V, whose operands lie in shared memory because registers do not hold all. All of K
    // lies there; of V only these chunks do, from offset kValues on.
    static constexpr int kSharedPairs = Headdim > 192 ? 4 : 0, kSharedChunks = 2 * kSharedPairs;
    static constexpr int kValues = S::kSharedBytes, kSharedBytes = kValues + BlockRows * kSharedChunks * kChunkBytes;
    static_assert(kSharedBytes == SHARED_BYTES && Headdim == HEADDIM_V, "the row in src/kernels and the kernel disagree");
    static_assert(RowStats::kRowRounding % S::kStep == 0, "each step finds statistics of all its queries");
    static constexpr int kPartners = S::kWarps / 2;  // warps of a role
    static constexpr int kKeys = S::kRows / kPartners;  // of a warp
    static constexpr int kKeyTiles = kKeys / 16, kColumnTiles = S::kStep / 8;
    static_assert(kKeys % 16 == 0 && (kKeyTiles == 1 || kKeyTiles == 2), "16 or 32 keys a warp");
    static_assert(!Blocks::kListed || !kFused, "a fused kernel visits all rows, to store their dq");
    static constexpr int kPairs = S::kChunks / 2, kOwnPairs = kPairs - kSharedPairs;  // of chunks: all, and those in registers
    // Pairs of column tiles of dV or dK whose operands are loaded at once. Staggered varlen kernels of headdim 128 spill with 2.
    static constexpr int kPairsAtOnce = kStaggered && kVarlen && Headdim == 128 ? 1 : 2;
    // The shared chunks of K begin at a multiple of eight chunks. So their offset can be added to a swizzled address, and the same
    // steps lead from chunk to chunk as in V (shared_fragments).
    static_assert(kSharedPairs == 0 || (kSharedChunks == 8 && S::kChunks % 8 == 0 && kKeyTiles == 1),
                  "the swizzle of K's rows is that of V's");
    using Dq = DqProduct<S>;
    // Pairs of column tiles of dQ that a warp computes at once: staggered kernels have registers for all of its pairs.
    static constexpr int kDqPairs = kStaggered ? Dq::kPairs : 1;
    // Staggered, with one slot of Q and dO. Registers hold the loads of both tiles at once, but not also the end of the loop over
    // heads, so that is computed again for each head (remat_heads_end).
    static constexpr bool kOneSlotStaggered = kStaggered && Slots == 1;
    using Layout = KeysLayout<kKeyTiles>;  // of a column tile a lane has two queries of 2 * kKeyTiles keys (fragments.cuh)
    using Scores = Accumulator[kColumnTiles][kKeyTiles];  // fp32, [n][m]
    using PackedScores = OperandA[kColumnTiles][kKeyTiles];  // fp16, [n][m][h]: words of the lane's two queries
    using Bits = typename Blocks::template Bits<Layout, kKeys>;
    static_assert(!kRequiresAlibi && !kRequiresBias, "kernels that require one of these have headdim 64: single_role.cuh");
    static __device__ __forceinline__ bool has_bias_gradient(const BwdParams& p) { return kHasBias && p.dbias; }

    // Waits at the named barrier of two partners, 64 threads, until P is stored. (Barrier 0 is __syncthreads().)
    static __device__ __forceinline__ void wait_partner() { named_sync(1 + remat_thread() / 32 % kPartners, 64); }
    // Signals that P is stored. The first role need not wait: the block's barrier keeps P until the partner has read it. Kernels
    // that are not staggered wait nevertheless: not to wait gained them less than 1%.
    static __device__ __forceinline__ void arrive_partner() {
        if (!kStaggered) return wait_partner();
        named_arrive(1 + remat_thread() / 32 % kPartners, 64);
    }
    static __device__ __forceinline__ bool is_first_role() { return remat_thread() < S::kThreads / 2; }
    static __device__ __forceinline__ int remat_warp_row() { return remat_thread() / 32 % kPartners * kKeys; }
    static __device__ __forceinline__ int remat_warp_key() { return remat_block_x() * S::kRows + remat_warp_row(); }
    // Whether the step of this row needs no mask. Kernels with score features, short of registers, compute the range in each step.
    static __device__ __forceinline__ bool needs_no_mask(const VisitedQueries<S>& range, const BwdParams& p, int row) {
        if (!kHasScoreFeatures) return range.unmasked.contains(row);
        const BlockSeqlenInfo sequence(p.problem, p.lengths, remat_block_batch());
        return VisitedQueries<S>(mask_of(p.problem, sequence), remat_block_x() * S::kRows).unmasked.contains(row);
    }
    // The slot of a step's dS. That of its tiles is the same, or 0.
    template <class Steps>
    static __device__ __forceinline__ u32 slot_of(const Steps& steps, int row) {
        if constexpr (Blocks::kListed)
            return steps.template number_modulo<S::kScoreSlots>();
        else
            return S::score_slot(row);
    }
    // Address of the score function's derivatives: where dS of the same keys is stored later. `exchange`: the lane's address of P.
    static __device__ __forceinline__ u32 slopes_of(u32 exchange, u32 slot) {
        return exchange - (S::kPartner - S::kScores) + slot * S::kScoreTile;
    }

    // Exchange of packed scores between a lane and the lane with the same scores in the other role, 16 bytes at a time. kWords: a
    // lane's words of two fp16. kExchangeBytes: what a warp stores at a time.
    static constexpr int kWords = kKeyTiles * kColumnTiles * 2, kExchangeBytes = 32 * 16;
    using Words = u32[kWords];
    static __device__ __forceinline__ void send(u32 address, PackedScores& x) {
        Words& words = reinterpret_cast<Words&>(x);
#pragma unroll
        for (int i = 0; i < kWords; i += 4)
            store_shared(address + i / 4 * kExchangeBytes, make_uint4(words[i], words[i + 1], words[i + 2], words[i + 3]));
    }
    static __device__ __forceinline__ void receive(u32 address, PackedScores& x) {
        Words& words = reinterpret_cast<Words&>(x);
#pragma unroll
        for (int i = 0; i < kWords; i += 4) {
            const uint4 four = load_shared(address + i / 4 * kExchangeBytes);
            words[i] = four.x, words[i + 1] = four.y, words[i + 2] = four.z, words[i + 3] = four.w;
        }
    }

    using Tile = typename Layout::Tile;  // of 8 queries
    static __device__ __forceinline__ Tile& tile_of(Scores& s, int n) { return reinterpret_cast<Tile&>(s[n]); }

    // Turns products into exponents: multiplies by the scale in log2 units, and adds neg_lse_of().
    static __device__ __forceinline__ void scale_and_add_lse(Scores& s, const StepStats<S>& stats, const Lane& lane,
                                                             const BwdParams& p) {
#pragma unroll
        for (int n = 0; n < kColumnTiles; n++) {
            const float2 neg_lse = stats.neg_lse_of(n, lane);
#pragma unroll
            for (int v = 0; v < Layout::kElements; v++)
                tile_of(s, n)[v] = fmaf(tile_of(s, n)[v], p.problem.scale_log2, v & 1 ? neg_lse.y : neg_lse.x);
        }
    }

    // Turns K Q^T into the base-2 exponents of P * 2^kExponentShift, as pack_shifted takes it (softmax.cuh). kExponentShift is 12 -
    // 112: P is kept times 2^12, and packing shifts numbers scaled by 2^-112. Exponents are scores in log2 units plus neg_lse_of(),
    // which is -lse + kExponentShift (StepStats::scale). The score function's derivative goes to the partner at `slopes`, where the
    // partner then stores dS. `key`: the warp's first; `row`: the step's first query. Queries from row_end on see no key.
    static __device__ __forceinline__ void exponents(Scores& s, const StepStats<S>& stats, const BwdParams& p, int head, int key,
                                                     int row, int row_end, bool masked, const Bits& bits, u32 slopes) {
        const ScoreOptions& options = p.score_options;
        const Lane lane = remat_lane();
        // The score function (softcap) maps a product to a state. The score and the derivative follow from the state.
        // score(state, y) is the score, in log2 units, less constant(), plus y.
        if (uses_score_function(options)) {
            const ScoreFunction function(p.problem, options);
            PackedScores derivatives;
#pragma unroll
            for (int n = 0; n < kColumnTiles; n++) {
                const float2 neg_lse = stats.neg_lse_of(n, lane);
                unrolled<kKeyTiles, 2>([&](int m, int h) {
                    float &x = s[n][m][2 * h], &y = s[n][m][2 * h + 1];
                    const float x_state = function.state(x), y_state = function.state(y);
                    derivatives[n][m][h] = to_half2(ScoreFunction::derivative(x_state), ScoreFunction::derivative(y_state));
                    x = function.score(x_state, function.constant() + neg_lse.x);
                    y = function.score(y_state, function.constant() + neg_lse.y);
                });
            }
            send(slopes, derivatives);
        } else if (kHasScoreFeatures) {
            scale_and_add_lse(s, stats, lane, p);  // first: ALiBi and the bias below are in log2 units
        }
        if (uses_alibi(options)) {
            const Alibi alibi = alibi_of(p, remat_block_batch(), head);
            add_alibi<Layout, kColumnTiles>(alibi, ScoreCoord<Layout>(lane, row, key),
                                            [&](int n) -> Tile& { return tile_of(s, n); });
        }
        if (uses_bias(options)) {
#pragma unroll
            for (int n = 0; n < kColumnTiles; n++)
                add_bias(tile_of(s, n), p, remat_block_batch(), head, row_end, ScoreCoord<Layout>(lane, row + 8 * n, key));
        }
        if (masked) {
            if constexpr (Blocks::kListed)
                bits.template hide<kColumnTiles>(0, 0, [&](int n) -> Tile& { return tile_of(s, n); });
            else
                apply_mask<Layout>(reinterpret_cast<Tile(&)[1][kColumnTiles]>(s), p, lane, row, key);
        }
        if (!kHasScoreFeatures) scale_and_add_lse(s, stats, lane, p);
    }

    // Applies dropout to P^T: x, for dV, is 0 where it drops; `sent`, for the partner, has all of P, signs on what it drops.
    static __device__ __forceinline__ void drop(PackedScores& x, PackedScores& sent, const BwdParams& p, int head, int key,
                                                int row) {
        const Lane lane = remat_lane();
        const Philox philox = philox_of(p, head);
        if constexpr (kOneCallPerLane) {  // kernels with dropout alone (fragments.cuh)
#pragma unroll
            for (int n = 0; n < kColumnTiles; n++) {
                TileDropoutMask kept;  // of_key[i]: of the lane's key i, 0xffff for each of two queries that dropout keeps
                kept.draw(Layout(), p, philox, row + 8 * n, key);
                unrolled<kKeyTiles, 2>([&](int m, int h) {
                    const u32 halves = kept.of_key[2 * m + h];
                    sent[n][m][h] = x[n][m][h] | ~halves & 0x80008000;
                    x[n][m][h] &= halves;
                });
            }
            return;
        }
        // Bits 4 * n to 4 * n + 3 of both halves say which scores the lane keeps of column tile n (draw_kept_tile). sign_masks()
        // below widens each sign bit to all 16 bits.
        u32 kept = 0;
#pragma unroll 1
        for (int n = 0; n < kColumnTiles; n++)
            kept |= draw_kept_tile<Layout>(philox, DropoutRule(p.score_options), ScoreCoord<Layout>(lane, row + 8 * n, key))
                    << 4 * n;
        unrolled<kColumnTiles, kKeyTiles, 2>([&](int n, int m, int h) {
            const int v = 4 * m + 2 * h;
            const u32 signs =
                (is_kept<Layout>(kept >> 4 * n, v) ? 0 : 0x8000) | (is_kept<Layout>(kept >> 4 * n, v + 1) ? 0 : 0x80000000);
            sent[n][m][h] = x[n][m][h] | signs;
            x[n][m][h] &= ~sign_masks(signs);
        });
    }

    // Computes dS^T in x, from the partner's P^T in x, and dP^T in dp. `key`, `row`, `slopes`: as in exponents().
    static __device__ __forceinline__ void score_gradients(PackedScores& x, Scores& dp, const StepStats<S>& stats,
                                                           const BwdParams& p, int head, int key, int row, u32 slopes) {
        const ScoreOptions& options = p.score_options;
        const Lane lane = remat_lane();
        // P's sign bit tells the direction of its rounding, which corrects dS (residual_signs.cuh), or, with dropout, what drops.
        const bool has_residuals = !uses_dropout(options);
        if (uses_dropout(p.score_options)) {
            unrolled<kColumnTiles, kKeyTiles, 2>([&](int n, int m, int h) {
                float &first = dp[n][m][2 * h], &second = dp[n][m][2 * h + 1];
                first = x[n][m][h] & 0x8000 ? 0.f : first * options.dropout_scale;
                second = x[n][m][h] & 0x80000000 ? 0.f : second * options.dropout_scale;
            });
        }
#pragma unroll
        for (int n = 0; n < kColumnTiles; n++) {
            const float2 neg_delta = stats.neg_delta_of(n, lane);
            unrolled<kKeyTiles, 2>([&](int m, int h) {
                const float2 probability = to_float2(x[n][m][h]);
                float &first = dp[n][m][2 * h], &second = dp[n][m][2 * h + 1];
                first = score_gradient(from_residual_sign(probability.x, has_residuals), first, neg_delta.x);
                second = score_gradient(from_residual_sign(probability.y, has_residuals), second, neg_delta.y);
            });
        }
        if (has_bias_gradient(p)) {
            // Rolled, for code size: works on the first tile, then moves all down, the first to the end.
#pragma unroll 1
            for (int n = 0; n < kColumnTiles; n++) {
                add_bias_gradient(tile_of(dp, 0), p, head, ScoreCoord<Layout>(lane, row + 8 * n, key));
                Tile first;
#pragma unroll
                for (int v = 0; v < Layout::kElements; v++) first[v] = tile_of(dp, 0)[v];
                next_tile(reinterpret_cast<Tile(&)[1][kColumnTiles]>(dp));
#pragma unroll
                for (int v = 0; v < Layout::kElements; v++) tile_of(dp, kColumnTiles - 1)[v] = first[v];
            }
        }
        if (uses_score_function(options)) {
            receive(slopes, x);
            __syncwarp();  // dS takes the place of the derivatives
            unrolled<kColumnTiles, kKeyTiles, 2>([&](int n, int m, int h) {
                const float2 slope = to_float2(x[n][m][h]);
                dp[n][m][2 * h] *= slope.x, dp[n][m][2 * h + 1] *= slope.y;
            });
        }
        unrolled<kColumnTiles, kKeyTiles, 2>(
            [&](int n, int m, int h) { x[n][m][h] = to_half2(dp[n][m][2 * h], dp[n][m][2 * h + 1]); });
    }

    // Loads V's shared chunks, 8 of each row (kSharedChunks), in KeysLayout's order, padded with zeros. `keys`: of the sequence,
    // from row `origin` of v on.
    static __device__ __forceinline__ void load_values(const BwdParams& p, u32 shared, int origin, int first_key, int keys) {
        const unsigned short* base = rows_of(p.v, blockIdx.z, blockIdx.y, origin + first_key);
        for (int i = threadIdx.x; i < S::kRows * 8; i += S::kThreads) {
            const int key = i / 8, column = (2 * kOwnPairs + i % 8) * kChunk;
            const bool exists = first_key + key < keys && column < p.problem.headdim_v;
            store_shared(shared + kValues + swizzled<8>(Layout::row_of_key(key), i % 8),
                         exists ? load_global(base + key * p.v.row_stride + column) : zero_chunk());
        }
    }
    // Address of a warp's operand A of the chunks in shared memory: of K in the first role, of V in the other.
    static __device__ __forceinline__ u32 shared_fragments(u32 shared) {
        const u32 lane = remat_thread() % 32, row = remat_warp_row() + lane % 8 + lane / 8 % 2 * 8;
        const u32 values = shared + kValues + remat_swizzled<8>(row, lane / 16);
        const u32 keys = shared + S::kOwn + remat_swizzled<S::kChunks>(row, lane / 16) + 2 * kOwnPairs * kChunkBytes;
        return is_first_role() ? keys : values;
    }

    // Row of a listed step; of one past the sequence or the list's end, the last row where a step has statistics and dQ. The scores
    // of a step past the sequence are hidden, so it adds nothing.
    static __device__ __forceinline__ int existing_row(const BwdParams& p, int row) {
        return min(row, p.seqlen_q_rounded - S::kStep);
    }

    static __device__ __forceinline__ void run(const BwdParams& p, const Blocks& blocks = Blocks()) {
        extern __shared__ __align__(1024) unsigned char shared_memory[];
        const u32 shared = shared_address(shared_memory);
        // partners have the same number in their roles, and the same keys
        const int warp = threadIdx.x / 32, role = warp / kPartners, number = warp % kPartners;
        const int first_key = blockIdx.x * S::kRows;
        const BlockSeqlenInfo sequence(p.problem, p.lengths, blockIdx.z);
        // In k and v the sequence has seqlen_k_allocated() rows, from k_offset() on. Those past seqlen_k() get gradients of 0.
        if (kVarlen && !kFused && first_key >= sequence.seqlen_k_allocated()) return;
        const VisitedQueries<S> range(mask_of(p.problem, sequence), first_key, kFused);

        if (kWithDq || kSharedPairs > 0) load_own_keys<S, Layout>(p, shared, sequence.k_offset(), first_key, sequence.seqlen_k());
        if (kSharedPairs > 0) load_values(p, shared, sequence.k_offset(), first_key, sequence.seqlen_k());
        OperandA own[kKeyTiles][2 * kOwnPairs];  // of K or of V
        {
            const Operand& from = role ? p.v : p.k;
            // a negative softmax_scale flips the signs of K
            load_own_fragments(own, from, rows_of(from, blockIdx.z, blockIdx.y, sequence.k_offset()), first_key + kKeys * number,
                               sequence.seqlen_k(), role ? p.problem.headdim_v : p.problem.headdim, role ? 0 : p.problem.sign_flip,
                               Layout::key_of_lane);
        }

        Accumulator gradient[kKeyTiles][S::kChunks] = {};  // dV or dK

        const int group = p.problem.nheads / p.problem.nheads_k;  // query heads that share this block's KV head
        const auto remat_heads_end = [&] {  // one past the last of them
            return (remat_block_y() + 1u) * (keep_in_register(p.problem.nheads) / p.problem.nheads_k);
        };
        if (kFused) write_all_statistics<S>(p, sequence);
        if (kFused) __syncthreads();  // the statistics are written
#pragma unroll 1
        for (int head = blockIdx.y * group; head < (kOneSlotStaggered ? remat_heads_end() : (blockIdx.y + 1) * group); head++) {
            const BlockSeqlenInfo sequence(p.problem, p.lengths, blockIdx.z);  // again: it holds no registers in between
            // of the list that has first_key; without lists unused
            auto queries = blocks.template steps<S::kStep>(p, head, first_key, 0, range.end, p.problem.seqlen_q);
            int first;
            if constexpr (Blocks::kListed) {
                if (!queries.exists()) continue;
                first = queries.first();
            } else {
                first = kFused ? 0 : VisitedQueries<S>::first(mask_of(p.problem, sequence));
                if (first >= range.end) break;
            }
            const HeadRows rows(p, sequence, head);
            // Query rows that loads may read.
            const auto rows_end = [&] { return Blocks::kListed ? p.problem.seqlen_q : range.rows(p); };
            // Computes kDqPairs of the warp's pairs of dQ of the step at `row`, from number `pair` on, from the dS in this slot.
            const auto compute_dq = [&](int row, u32 slot, int pair) {
                const u32 thread = remat_thread(), lane = thread % 32, warp = thread / 32;
                if (!Dq::has_pair(warp)) return;
                Accumulator c[kDqPairs][2];
                Dq::multiply(c, Dq::a_operand(shared + S::kScores + slot * S::kScoreTile, lane, warp),
                             Dq::b_operand(shared + S::kOwn, lane, warp), pair);
                if constexpr (kFused)
                    Dq::store(c, p, rows.head, row, range.end, warp, pair);
                else
                    Dq::add(c, p.dq_accum + rows.scratch_offset(row, S::kHeaddim) + Dq::output_offset(lane, warp), pair);
            };

            StepTileLoader<S> tiles;
            tiles.load(p, p.q, p.dout, rows.head, rows.origin(p) + first, rows_end() - first);
            StepStats<S> stats;
            stats.load(p, rows, Blocks::kListed ? existing_row(p, first) : first);
            Bits bits;
            if constexpr (Blocks::kListed)
                if (is_first_role()) bits.load(blocks, queries, first_key + remat_warp_row(), 0);
            __syncthreads();  // the previous head's tiles are free
            tiles.store(shared + S::kStepTiles + (Blocks::kListed ? 0 : S::slot(first)) * S::kSlotBytes);
            // Begins to load the tiles of the step that comes `steps` after that at `row` (if queries are listed, the iterator's).
            const auto load_step = [&](int row, int steps) {
                if constexpr (Blocks::kListed)
                    tiles.load(p, p.q, p.dout, rows.head, queries.after(steps), rows_end() - queries.after(steps));
                else
                    tiles.load(p, p.q, p.dout, rows.head, rows.origin(p) + row + steps * S::kStep,
                               range.rows(p) - steps * S::kStep - row);
            };
            if (S::kSlots == 2) load_step(first, 1);
            // dS of the step before the first: zeros. They add nothing, and dq that kStore stores of them is overwritten later.
            if (kWithDq && S::kScoreSlots == 2)
                clear_shared<S::kScoreTile, S::kThreads>(shared + S::kScores +
                                                         (Blocks::kListed ? 1 : S::score_slot(first) ^ 1) * S::kScoreTile);
            int previous = Blocks::kListed ? existing_row(p, first) : 0;  // row of the step before

#pragma unroll 1
            for (int next = first; Blocks::kListed ? queries.exists() : next < range.end;
                 next += S::kStep, queries.advance(blocks)) {
                const int row = Blocks::kListed ? queries.first() : next;
                const u32 score_slot = slot_of(queries, row), slot = S::kSlots == 2 ? score_slot : 0;
                __syncthreads();  // this step's tiles and the previous step's dS are stored
                // Here, not at the end of the previous step: ptxas would move the stores up to where the loads are not done.
                if (S::kSlots == 2)
                    tiles.store(shared + S::kStepTiles + (Blocks::kListed ? slot ^ 1 : S::slot(row + S::kStep)) * S::kSlotBytes);
                // Computes dQ of the previous step, and makes this step the previous one.
                const auto compute_previous_dq = [&] {
                    if (!kWithDq || S::kScoreSlots != 2) return;
#pragma unroll
                    for (int j = 0; j < Dq::kPairs; j += kDqPairs)
                        compute_dq(Blocks::kListed ? previous : max(row - S::kStep, first), score_slot ^ 1, j);
                    if (Blocks::kListed) previous = existing_row(p, row);
                };
                if (!kStaggered || __any_sync(~0u, !is_first_role())) compute_previous_dq();
                Scores s;  // S^T, then P^T; or dP^T, then dS^T
                clear_tiles(s);
                {
                    const u32 tile = (is_first_role() ? 0 : S::kStepTile) + slot * S::kSlotBytes;
                    const u32 step = by_chunks<S>(shared + S::kStepTiles + tile, remat_thread() % 32);
#pragma unroll
                    for (int c = 0; c < kOwnPairs; c++) {
                        OperandA a[kKeyTiles][2];
#pragma unroll
                        for (int m = 0; m < kKeyTiles; m++)
#pragma unroll
                            for (int i = 0; i < 4; i++) a[m][i / 2][i % 2] = own[m][2 * c + i / 2][i % 2];
                        multiply_pair<S>(s, a, pair_after<S>(step, c));
                    }
                    const u32 fragments = shared_fragments(shared);
#pragma unroll
                    for (int c = 0; c < kSharedPairs; c++) {
                        u32 x[4];
                        load_matrices(x, chunk_after<8>(fragments, 2 * c));
                        const OperandA a[1][2] = {{{x[0], x[1]}, {x[2], x[3]}}};
                        multiply_pair<S>(reinterpret_cast<Accumulator(&)[kColumnTiles][1]>(s), a,
                                         pair_after<S>(step, kOwnPairs + c));
                    }
                }
                PackedScores packed;
                const u32 exchange = shared + S::kPartner + remat_warp_row() * S::kScoreRowBytes + remat_thread() % 32 * 16;
                // Loads of the tile after the next are in flight from the middle of the step on, between parts that need many
                // registers. With score features computing P and dS is such a part, so the loads follow it. So there are two places
                // for them; `here`: whether this is this kernel's. Past the last row nothing is loaded.
                const auto load_ahead_if = [&](bool here) {
                    if (S::kSlots == 2 && here) load_step(row, 2);
                };
                // A vote, although all lanes agree: it tells the compiler that no warp diverges at the barriers.
                if (__any_sync(~0u, is_first_role())) {
                    bool masked = !needs_no_mask(range, p, row);
                    if constexpr (Blocks::kListed) {
                        masked |= queries.has_bits();
                        const BlockSeqlenInfo sequence(p.problem, p.lengths, remat_block_batch());
                        if (masked) bits.combine(queries, mask_of(p.problem, sequence), remat_warp_key());
                    }
                    stats.scale(p.problem.scale_log2, kExponentShift);
                    exponents(s, stats, p, head, remat_warp_key(), row, range.end, masked, bits, slopes_of(exchange, score_slot));
                    // P with sign bits, which tell the partner what fp16 rounded down, or what drops
                    PackedScores sent;
#pragma unroll
                    for (int n = 0; n < kColumnTiles; n++)
#pragma unroll
                        for (int m = 0; m < kKeyTiles; m++)
#pragma unroll
                            for (int h = 0; h < 2; h++) {
                                const float x = exp2_approx(s[n][m][2 * h]), y = exp2_approx(s[n][m][2 * h + 1]);
                                packed[n][m][h] = pack_shifted_and_signs(x, y, sent[n][m][h]);
                            }
                    if (uses_dropout(p.score_options)) drop(packed, sent, p, head, remat_warp_key(), row);
                    send(exchange, sent);
                    load_ahead_if(!kHasScoreFeatures);
                    arrive_partner();
                } else {
                    load_ahead_if(!kHasScoreFeatures);
                    wait_partner();
                    // divides -delta by 2^12, as score_gradients() does dP: P has that factor, so dS has none
                    stats.scale(p.problem.scale_log2);
                    receive(exchange, packed);
                    score_gradients(packed, s, stats, p, head, remat_warp_key(), row, slopes_of(exchange, score_slot));
                    if (kWithDq) {
                        // the lane's row in dS^T, and its address there: word lane % 4 (of two queries) of a chunk
                        const u32 own_row = remat_warp_row() + remat_thread() % 32 / 4;
                        const u32 to = shared + S::kScores + score_slot * S::kScoreTile +
                                       score_offset<S::kScoreChunks>(own_row, 0) + remat_thread() % 4 * 4;
#pragma unroll
                        for (int n = 0; n < kColumnTiles; n++)
#pragma unroll
                            for (int m = 0; m < kKeyTiles; m++)
#pragma unroll
                                for (int h = 0; h < 2; h++)
                                    store_shared1(score_chunk(to, n) + (16 * m + 8 * h) * S::kScoreRowBytes, packed[n][m][h]);
                    }
                }
                if constexpr (Blocks::kListed) {
                    stats.load(p, rows, existing_row(p, queries.after(1)));
                    if (is_first_role()) bits.load(blocks, queries, remat_warp_key(), 1);
                } else {
                    stats.load(p, rows, range.next_step(p, row));
                }
                load_ahead_if(kHasScoreFeatures);
                if (kOneSlotStaggered) load_step(row, 1);  // while dV and dK are computed
                {
                    const u32 tile = (is_first_role() ? S::kStepTile : 0) + slot * S::kSlotBytes;
                    const u32 step = by_rows<S>(shared + S::kStepTiles + tile, remat_thread() % 32);
#pragma unroll
                    for (int c = 0; c < kPairs; c++) {
                        // ptxas would load operands ahead into all registers, and spill others for them.
                        if (c > 0 && c % kPairsAtOnce == 0) __syncwarp();
                        accumulate_pair<S>(gradient, packed, pair_after<S>(step, c), c);
                    }
                }
                if (kStaggered && __any_sync(~0u, is_first_role())) compute_previous_dq();
                if (S::kSlots == 1) {
                    __syncthreads();  // dS is complete, Q and dO are free
                    if (kOneSlotStaggered) {
                        tiles.store(shared + S::kStepTiles);
                        continue;
                    }
                    // The two tiles are loaded in turn, each during a part of dQ: both at once would take too many registers.
                    static_assert(S::kSlots == 2 || Dq::kPairs == 2, "two parts");
#pragma unroll 1
                    for (int i = 0; i < 2; i++) {
                        typename StepTileLoader<S>::Part part;
                        if constexpr (Blocks::kListed)
                            StepTileLoader<S>::load(part, i ? p.dout : p.q, rows.head, queries.after(1),
                                                    rows_end() - queries.after(1), i ? p.problem.headdim_v : p.problem.headdim);
                        else
                            StepTileLoader<S>::load(part, i ? p.dout : p.q, rows.head, rows.origin(p) + row + S::kStep,
                                                    range.rows(p) - S::kStep - row, i ? p.problem.headdim_v : p.problem.headdim);
                        if (kWithDq) compute_dq(Blocks::kListed ? existing_row(p, row) : row, 0, i);
                        StepTileLoader<S>::store(part, shared + S::kStepTiles + i * S::kStepTile);
                    }
                }
            }
            if (kWithDq && S::kScoreSlots == 2) {
                __syncthreads();
                const int last = Blocks::kListed ? 0 : keep_in_register(range.end) - 1;
                // Listed: the iterator `queries` is one step past the last, so the last step's slot is the other one (^ 1).
#pragma unroll 1
                for (int j = 0; j < Dq::kPairs; j += kDqPairs)
                    compute_dq(Blocks::kListed ? previous : last & -S::kStep,
                               Blocks::kListed ? slot_of(queries, 0) ^ 1 : S::score_slot(last), j);
            }
        }

        // Writes dK or dV. Keys that no query sees get 0.
        const BlockSeqlenInfo end_sequence(p.problem, p.lengths, remat_block_batch());
        const int end_warp = remat_thread() / 32;
        const bool is_dk = end_warp >= kPartners;
        const Output& to = is_dk ? p.dk : p.dv;
        // Q has its own signs (a negative softmax_scale flips those of K), so dK's factor has softmax_scale's. P^T is times 2^12.
        float dv_factor = 1.f / kProbabilityUnit;
        if (uses_dropout(p.score_options)) dv_factor *= p.score_options.dropout_scale;
        write_gradient(gradient, p, to, rows_of(to, remat_block_batch(), remat_block_y(), end_sequence.k_offset()),
                       is_dk ? p.signed_scale : dv_factor, remat_block_x() * S::kRows + end_warp % kPartners * kKeys,
                       end_sequence.seqlen_k_allocated(), is_dk ? p.problem.headdim : p.problem.headdim_v, Layout::key_of_lane);
    }
};

}  // namespace turing
