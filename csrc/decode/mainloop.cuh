// Decode main loop of one work tile: split-KV attention of up to BLOCK_ROWS packed query rows, (query, head) pairs of a sequence
// that read one KV head, over a range of KV tokens. Block (block.cuh) calls run() in the kernels of both families.
//
// Each warp owns 8 * RowTiles rows and walks over its token group's tokens in steps of kStepTokens (kStepTiles tiles of eight
// tokens). A token group is the warps that take the same tokens: RowGroups of them. Above headdim 256 two column groups have as
// many each: half of the columns of Q, K, V and output (column_groups.cuh). A step is: scores = Q K^T, score modifiers and mask,
// online softmax (lazy: a row's maximum moves, and its output is rescaled, only when a score exceeds SoftmaxRow::limit,
// softmax.cuh), output += P V. Q and the output stay in registers; where these are too few, kSharedQueryChunks moves part of Q, or
// all, to shared memory. One of three loaders brings K and V:
//
//   DirectLoader       from global memory straight into operand registers; no shared memory, no barrier. Loads the keys of the next
//                      step once this step's scores are done, and its values once this step's output is
//   CooperativeLoader  four warps with the same tokens share what each loads, through shared memory. Loads the next step's
//                      keys and values at the start of a step
//   StagedLoader       int4 keys with int4 values, where kStaged (tile_scheduler.cuh): through the warp's own shared memory, with
//                      more bytes in flight
//
// Quantized K and V become fp16 only when a product takes them: codes times a constant, kScale of their Element, and of int4
// columns 4 to 7 of eight times 16 more. Layout::scores() and the output's factors undo both (quantized.cuh). An fp8 NaN may become
// infinity there (kNanIsInfinity): x + 0 * x makes it NaN again. Where each token has scales, they multiply scores and
// probabilities (scales.cuh); those of a whole sequence multiply scores and the output. bf16 becomes fp16 by factors, powers of
// two, for queries, keys and values; scores and the output are divided by them (bf16_value.cuh).
//
// Results leave through shared memory (block.cuh): run() stores each row's softmax state, then kRowsAtOnce rows of output at a
// time. After each part it calls finish(first), which combines the token groups' results of these rows.
//
// A Layout is the family's assignment of rows, tokens and columns to lanes, for RowTiles tiles of eight rows. Its functions:
//
//   query_row, key_token, value_token, key_column, value_column
//                         what a lane loads: eight columns from these on. Of each 32 columns of Q and K a lane has eight, of each
//                         64 columns of V eight, for the two tokens value_token and value_token + kValueTokens
//   scores(q, k, x)       Q K^T of one tile. x: the lane's two scores of each row tile, of row score_row(lane) and tokens
//                         score_token(lane) and the next; lanes that differ by a mask of kRowLaneMasks have other scores of
//                         the same row
//   each_output(lane, o, own, f)  replaces each output x by f(x, `own` of its row, whether x is in the last four of eight columns)
//   add_values(lane, o, p, v)     output += P V; p: packed probabilities, in the lanes that have the scores. pack() (scales.cuh)
//                                 makes them fp16 times kPackedOne (2^8), so the output has this factor too, row sums do not.
//                                 Combining the partial results divides by it (partials.cuh)
//   each_pair(lane, o, f)         calls f(row, column, x, y) for outputs x and y of two neighboring columns
//
// Names: mt is a row tile of a warp, tile a tile of tokens of a step, j a chunk of eight columns. q, k, v and o are a lane's parts
// of Q, K, V and the output; x its scores, then its probabilities, where x.x and x.y belong to two neighboring tokens. s is the
// work tile (WorkTile): `rows` packed rows from `row` on, tokens `first` to end - 1. Draft tokens: the last seqlen_q tokens of a
// sequence in kernels with a tree mask (kTree, tree.cuh), which are guesses that form a tree.
//
// The kernel's row in src/kernels gives BLOCK_ROWS (packed query rows of a work tile), THREADS and SHARED_BYTES (of a block).
#pragma once

#include "decode/bf16_value.cuh"  // Bf16Scaler: a factor of bf16 numbers
#include "decode/block.cuh"  // RowInfo: position and ALiBi slope of a row; SharedPartials
#include "decode/column_groups.cuh"
#include "decode/direct_loader.cuh"  // and Queries, Keys, Values: registers of a lane
#include "decode/cooperative_loader.cuh"
#include "decode/staged_loader.cuh"
#include "score_layout.cuh"  // row_max(), row_sum(): over the lanes of a row
#include "score_mod.cuh"  // Alibi; ScoreFunction (softcap), whose parameter() is 0 if the problem has none

namespace decode {

// A block has Warps warps. RowGroups neighboring warps take the same tokens, each for its own RowTiles * 8 rows.
template <template <int> class LayoutOf, int RowTiles, int RowGroups, int Warps>
struct DecodeMainloop {
    using Layout = LayoutOf<RowTiles>;
    static constexpr int kTokenGroups = Warps / RowGroups / kColumnGroups;
    // Two warps with the same tokens find each other's bytes in L1. Four warps exchange what they load (cooperative_loader.cuh).
    static constexpr bool kCooperative = Layout::kCooperative && RowGroups == 4 && !kQuantized;
    static constexpr int kKeyLoads = kGroupHeaddim / 32, kValueLoads = kGroupHeaddimV / 64;
    // 1 / kSharedQueryParts of Q goes to shared memory. 16 rows of 256 columns take 128 registers for the output and 64 for Q, so
    // half of Q. With column groups (column_groups.cuh), 64 KB of shared memory have room for a quarter. With quantized keys and
    // values, whose bytes wait in registers, all of Q.
    static constexpr int kSharedQueryParts = kQuantized ? 1 : kColumnGroups > 1 && SHARED_BYTES <= 65536 ? 4 : 2;
    static constexpr int kSharedQueryChunks =
        (kCooperative || kQuantized) && RowTiles * kKeyLoads > 8 ? kKeyLoads / kSharedQueryParts : 0;
    using OwnQueries = Queries<RowTiles, kKeyLoads, kSharedQueryChunks>;
    // Rows whose outputs, of all token groups, are in shared memory at once: all rows if they fit, else half of them.
    __device__ static constexpr int rows_at_once(int rows) {
        return kTokenGroups * rows * kPartialStride * sizeof(float) <= SHARED_BYTES ? rows : rows_at_once(rows / 2);
    }
    static constexpr int kRowsAtOnce = rows_at_once(BLOCK_ROWS);
    static_assert(RowTiles * RowGroups * 8 == BLOCK_ROWS && RowGroups == kRowGroups, "the warps cover BLOCK_ROWS rows");
    static_assert(Warps * 32 == THREADS && Warps % (RowGroups * kColumnGroups) == 0, "warps of src/kernels");
    static_assert(kGroupHeaddim % 32 == 0 && kGroupHeaddimV % 64 == 0, "whole loads of a warp");

private:
    enum class Loading { Direct, Cooperative, Staged };
    template <Loading, class = void>
    struct LoaderOf {
        using Type = DirectLoader<OperandCoords<Layout>>;
        using Scales = StepScales;
        static constexpr int kWorkBytes = 0;
    };
    template <class Unused>
    struct LoaderOf<Loading::Cooperative, Unused> : LoaderOf<Loading::Direct> {
        using Type = CooperativeLoader<Layout>;
        static constexpr int kWorkBytes = kTokenGroups * kColumnGroups * Type::kBytes;
    };
    template <class Unused>
    struct LoaderOf<Loading::Staged, Unused> {
        using Type = StagedLoader<Layout, RowGroups>;
        using Scales = StagedScales;
        static constexpr int kWorkBytes = Warps * Type::kBytes;
    };
    using Exchange = ScoreExchange<kStepTiles * RowTiles>;  // adds the scores of two column groups; does nothing for one
    using OwnLoader = LoaderOf<kCooperative ? Loading::Cooperative : kStaged ? Loading::Staged : Loading::Direct>;

    // Whether the loads of the first keys and values precede those of Q, so that DRAM starts about a thousand cycles earlier. Only
    // with two column groups: with one this takes 25 more registers, and kernels spill.
    static constexpr bool kKeysFirst = kColumnGroups > 1 && !kCooperative && !kStaged;

public:
    // The loader's shared memory, then each warp's part of Q and of exchanged scores. The partial outputs overwrite it all.
    static constexpr int kExchangeAt = OwnLoader::kWorkBytes + Warps * OwnQueries::kBytes;
    static constexpr int kWorkBytes = kExchangeAt + Warps * Exchange::kBytes;

    // Computes the work tile `s`, into `partials`. row_info: position and ALiBi slope of each packed row. `finish` begins with a
    // barrier, and ends with one if there are two parts.
    template <class Finish>
    __device__ __forceinline__ static void run(const DecodeParams& p, const WorkTile& s, const RowInfo* row_info,
                                               const SharedPartials<kTokenGroups, kRowsAtOnce>& partials, Finish finish) {
        const typename Layout::Lane lane;
        const int warp = __shfl_sync(~0u, threadIdx.x >> 5, 0), token_group = warp / RowGroups / kColumnGroups,
                  first_row = warp % RowGroups * (8 * RowTiles);
        const ScoreOptions& options = p.score_options;

        OwnQueries q;
        if constexpr (kSharedQueryChunks > 0) {
            char* in_shared = reinterpret_cast<char*>(partials.output) + OwnLoader::kWorkBytes + warp * OwnQueries::kBytes;
            q.in_shared = reinterpret_cast<uint4*>(in_shared) + (threadIdx.x & 31);
        }
        Bf16Scaler query_scaler;
        if constexpr (!kKeysFirst) load_queries(p, s, first_row, q, query_scaler);
        typename Layout::template Output<kValueLoads> o = {};
        SoftmaxRow softmax[RowTiles];
        ProbabilityScale probability_scale[RowTiles];
        // factors of this warp's bf16 keys and values; CooperativeLoader has those of all its warps
        Bf16Scaler key_scaler, value_scaler;
        float shared_inverse = 1.f;  // 1 / CooperativeLoader's factor of values

        // Each token group takes a contiguous range of whole steps.
        const int steps = (s.end - s.first + kStepTokens - 1) / kStepTokens,
                  group_steps = (steps + kTokenGroups - 1) / kTokenGroups;
        int steps_left = min(group_steps, steps - token_group * group_steps);
        [[maybe_unused]] int group_first = 0;
        if constexpr (kBatchInvariant) {  // a fixed part of a split (split_scheduler.cuh); its rows may see fewer tokens
            constexpr int kGroupTokens = kSplitTokens / kTokenGroups;
            static_assert(kSplitTokens % kTokenGroups == 0 && kGroupTokens % kStepTokens == 0, "parts are whole steps");
            const int begin = s.first / kSplitTokens * kSplitTokens + token_group * kGroupTokens;
            group_first = max(begin, s.first);
            steps_left = (min(begin + kGroupTokens, s.end) - group_first + kStepTokens - 1) / kStepTokens;
        }
        bool has_invalid_page = false;
        if (steps_left > 0) {
            const int seqlen_k = s.seqlen_k;
            // Tokens full_first to full_end - 1, which all rows of the warp see, need no mask. With a tree mask (tree.cuh) these
            // lie between the window's begin of the deepest possible row and the draft tokens.
            const int full_first = (kTree ? seqlen_k - 1 : row_info[first_row + 8 * RowTiles - 1].position) - p.problem.window_left;
            const int full_end =
                kTree ? seqlen_k - s.seqlen_q : min(row_info[first_row].position + p.problem.window_right + 1, seqlen_k);
            // scale_log2: factor of scores in the exponent; 1 where apply_score_mod() has scaled them to log2 units
            const bool has_score_mod = ScoreFunction::parameter(options) > 0.f || options.alibi_slopes;
            const float scale_log2 = has_score_mod ? 1.f : p.problem.scale_log2, inverse_scale_log2 = 1.f / scale_log2;

            const int first = kBatchInvariant ? group_first : s.first + token_group * group_steps * kStepTokens;
            typename OwnLoader::Type loader(p, s, first, partials.output, warp / RowGroups, warp % RowGroups);
            if constexpr (kBf16 && kCooperative) loader.set_query_inverse(query_scaler.inverse());
            // Named barriers after those of CooperativeLoader.
            Exchange exchange(reinterpret_cast<char*>(partials.output) + kExchangeAt, 1 + kTokenGroups * kColumnGroups);
            Keys<kKeyLoads> k[kStepTiles] = {};
            Values<kValueLoads> v[kStepTiles] = {};
            [[maybe_unused]] StepScales next_scales;  // of the keys and values loaded last
            const float key_scale =
                kQuantized && !kTokenScales ? scale_of_sequence(p.scales.k, s.batch, s.head_k) / KeyElement::kScale : 1.f;
            float query_sum[RowTiles] = {};
            if constexpr (kKeyZeroPoints) {
                // each row's sum over the columns of Q, which zero points of keys are multiplied by
                float2 sum[1][RowTiles];
                Layout::scores(q, Ones(), sum[0]);
                exchange.add(sum);
#pragma unroll
                for (int mt = 0; mt < RowTiles; mt++) query_sum[mt] = sum[0][mt].x * KeyElement::kScale;
            }
            if constexpr (kStaged) {
                loader.begin(p, s, seqlen_k, steps_left);
            } else if constexpr (!kCooperative) {
                if (loader.page_valid()) {
                    loader.load_keys(p, seqlen_k, k);
                    loader.load_values(p, seqlen_k, v);
                    if constexpr (kTokenScales) loader.load_scales(p, seqlen_k, next_scales);
                }
            }
            if constexpr (kKeysFirst) {
                __syncwarp();  // else the compiler moves these loads up
                load_queries(p, s, first_row, q, query_scaler);
            }
            for (int token = first; steps_left > 0 && (kCooperative || kStaged || loader.page_valid()); token += kStepTokens) {
                steps_left--;
                float value_rescale = 1.f;  // new over old factor of bf16 values in CooperativeLoader: rescales the output
                if constexpr (kCooperative) {
                    value_rescale = loader.next_step(p, s, seqlen_k, steps_left > 0);
                } else if constexpr (kStaged) {
                    loader.next_step(p, s, seqlen_k, steps_left);
                    loader.keys(k);
                }
                // S = Q K^T
                float2 x[kStepTiles][RowTiles];
                if constexpr (kBf16 && !kCooperative) {
                    // Past the last token registers hold converted keys of an earlier step, which as bf16 could be large.
                    if (token + kStepTokens > seqlen_k)
#pragma unroll
                        for (int tile = 0; tile < kStepTiles; tile++)
                            if (token + kTileTokens * tile + Layout::key_token(lane) >= seqlen_k) k[tile].clear();
                    key_scaler.convert<Outliers::kSaturate>(k, [](float) {});
                }
#pragma unroll
                for (int tile = 0; tile < kStepTiles; tile++) {
                    if constexpr (kCooperative)
                        Layout::scores(q, loader.keys(tile), x[tile]);
                    else
                        Layout::scores(q, k[tile], x[tile]);
                }
                if constexpr (kBf16) {
                    if constexpr (kCooperative)
                        scale_all(x, loader.score_factor(Layout::score_token(lane)));
                    else
                        scale_all(x, query_scaler.inverse() * key_scaler.inverse());
                }
                // This step's scales and values; loads of the next step's keys
                typename OwnLoader::Scales scales;
                if constexpr (kStaged)
                    scales = loader.scales();
                else
                    scales = next_scales;
                if constexpr (kStaged) {
                    loader.values(v);
                } else if constexpr (!kCooperative) {
                    if (steps_left > 0) {
                        loader.advance(p, s);
                        if (loader.page_valid()) {
                            loader.load_keys(p, seqlen_k, k);
                            if constexpr (kTokenScales) loader.load_scales(p, seqlen_k, next_scales);
                        }
                    }
                }
                exchange.add(x);
                if constexpr (kQuantized) scale_scores(lane, scales, key_scale, query_sum, x);

                // Score modifiers and mask
                const RowInfo* rows = row_info + first_row + Layout::score_row(lane);
                const int first_token = token + Layout::score_token(lane);
                if (has_score_mod) {
#pragma unroll
                    for (int tile = 0; tile < kStepTiles; tile++)
#pragma unroll
                        for (int mt = 0; mt < RowTiles; mt++)
                            apply_score_mod(p, rows[8 * mt], first_token + kTileTokens * tile, x[tile][mt]);
                }
                if (token < full_first || token + kStepTokens > full_end) {
#pragma unroll
                    for (int tile = 0; tile < kStepTiles; tile++) {
#pragma unroll
                        for (int mt = 0; mt < RowTiles; mt++) {
                            const int position = rows[8 * mt].position, first = first_token + kTileTokens * tile;
                            const int low = position - p.problem.window_left - first;
                            const int high = min(position + p.problem.window_right, seqlen_k - 1) - first;
                            if (low > 0 || high < 0) x[tile][mt].x = negative_infinity();
                            if (low > 1 || high < 1) x[tile][mt].y = negative_infinity();
                            if constexpr (kTree) {
                                const int draft = first - (seqlen_k - s.seqlen_q);
                                if (!rows[8 * mt].visible(draft)) x[tile][mt].x = negative_infinity();
                                if (!rows[8 * mt].visible(draft + 1)) x[tile][mt].y = negative_infinity();
                            }
                        }
                        if constexpr (kCooperative || kStaged) continue;
                        // Past the last token registers hold values of an earlier step: clear them, because 0 * NaN is NaN.
#pragma unroll
                        for (int h = 0; h < 2; h++)
                            if (token + kTileTokens * tile + Layout::value_token(lane) + Layout::kValueTokens * h >= seqlen_k)
                                v[tile].token[h].clear();
                    }
                }

                if constexpr (kBf16 && !kCooperative) value_scaler.convert(v, [&](float factor) { rescale_all(lane, o, factor); });

                // Column groups must keep the same row maxima, but each has its own factor of values. So it rescales apart.
                if (kColumnGroups > 1 && value_rescale != 1.f) {
                    rescale_all(lane, o, value_rescale);
                    value_rescale = 1.f;
                }
                // Softmax: moves row maxima if needed, then turns scores into probabilities
                bool exceeds = value_rescale != 1.f;  // whether outputs of this lane's rows have to be rescaled
#pragma unroll
                for (int mt = 0; mt < RowTiles; mt++) exceeds |= largest(x, mt) > softmax[mt].limit;
                const bool moved = __any_sync(~0u, exceeds);
                [[maybe_unused]] bool row_moved[RowTiles] = {};
                if (moved) {
                    float factor[RowTiles];
                    // kMovedRows: all rows, in batch-invariant kernels those above their limit
#pragma unroll
                    for (int mt = 0; mt < RowTiles; mt++) {
                        const float m = row_max<Layout>(largest(x, mt));
                        if constexpr (kBatchInvariant) row_moved[mt] = m > softmax[mt].limit;
                        factor[mt] = softmax[mt].template update_row_max<kMovedRows>(m, scale_log2, inverse_scale_log2);
                        if constexpr (kValueZeroPoints) probability_scale[mt].offset *= factor[mt];
                        factor[mt] *= value_rescale;
                    }
                    rescale(lane, o, factor);
                }
#pragma unroll
                for (int tile = 0; tile < kStepTiles; tile++)
#pragma unroll
                    for (int mt = 0; mt < RowTiles; mt++)
                        x[tile][mt] = make_float2(softmax[mt].probability(x[tile][mt].x, scale_log2),
                                                  softmax[mt].probability(x[tile][mt].y, scale_log2));
                if constexpr (kTokenScales) scale_probabilities(lane, scales, moved, row_moved, x, softmax, probability_scale, o);
                // O += P V
#pragma unroll
                for (int tile = 0; tile < kStepTiles; tile++) {
                    unsigned packed[RowTiles];
#pragma unroll
                    for (int mt = 0; mt < RowTiles; mt++) packed[mt] = pack(x[tile][mt].x, x[tile][mt].y);
                    if constexpr (kValueZeroPoints) {
                        const float2 zero =
                            scales.pair(StepScales::kValueZeroPoint, kTileTokens * tile + Layout::score_token(lane));
#pragma unroll
                        for (int mt = 0; mt < RowTiles; mt++) probability_scale[mt].add_zero_points(packed[mt], zero);
                    }
                    if constexpr (kCooperative)
                        Layout::add_values(lane, o, packed, loader.values(tile));
                    else
                        Layout::add_values(lane, o, packed, v[tile]);
                }
                if constexpr (!kCooperative && !kStaged) {
                    if (steps_left > 0 && loader.page_valid()) loader.load_values(p, seqlen_k, v);
                }
            }
            has_invalid_page = !loader.page_valid();
            if constexpr (kBf16 && kCooperative) shared_inverse = loader.inverse();
        }
        if constexpr (kWorkBytes > 0) __syncthreads();  // partials overwrite what the loop used
        if constexpr (kQuantized) finish_values(p, s, lane, probability_scale, o);
        if constexpr (kBf16) rescale_all(lane, o, kCooperative ? shared_inverse : value_scaler.inverse());

#pragma unroll
        for (int mt = 0; mt < RowTiles; mt++) {
            float sum = softmax[mt].sum;
            int row_lanes = 0;
#pragma unroll
            for (int lane_mask : Layout::kRowLaneMasks) {
                sum += __shfl_xor_sync(~0u, sum, lane_mask);
                row_lanes |= lane_mask;
            }
            if (has_invalid_page) sum = quiet_nan();
            if ((threadIdx.x & row_lanes) == 0 && column_group() == 0)
                partials.state[token_group * BLOCK_ROWS + first_row + 8 * mt + Layout::score_row(lane)] = {softmax[mt].row_max,
                                                                                                           sum};
        }
        // Only the warps that have rows of this part store outputs, kPartialStride floats from row to row. All warps call finish.
#pragma unroll 1
        for (int first = 0; first < BLOCK_ROWS; first += kRowsAtOnce) {
            if (first_row / kRowsAtOnce == first / kRowsAtOnce) {
                float* output =
                    partials.output + (token_group * kRowsAtOnce + first_row - first) * kPartialStride + first_column_v();
                Layout::each_pair(lane, o, [&](int row, int column, float x, float y) {
                    using ColumnOrder = Columns<kValueFormat, kValueLoads, 64>;
                    float* to = output + row * kPartialStride;
                    if constexpr (ValueElement::column(1) == 1) {
                        *reinterpret_cast<float2*>(to + ColumnOrder::of(column)) = make_float2(x, y);
                    } else {
                        to[ColumnOrder::of(column)] = x;
                        to[ColumnOrder::of(column + 1)] = y;
                    }
                });
            }
            finish(first);
        }
    }

private:
    __device__ __forceinline__ static float largest(const float2 (&x)[kStepTiles][RowTiles], int mt) {
        float m = fmaxf(x[0][mt].x, x[0][mt].y);
#pragma unroll
        for (int tile = 1; tile < kStepTiles; tile++) m = fmaxf(m, fmaxf(x[tile][mt].x, x[tile][mt].y));
        return m;
    }

    __device__ __forceinline__ static void scale_all(float2 (&x)[kStepTiles][RowTiles], float factor) {
#pragma unroll
        for (auto& tile : x)
#pragma unroll
            for (float2& pair : tile) pair = make_float2(pair.x * factor, pair.y * factor);
    }

    // Turns products with quantized codes into products with keys.
    __device__ __forceinline__ static void scale_scores(const typename Layout::Lane& lane, const typename OwnLoader::Scales& scales,
                                                        float key_scale, const float (&query_sum)[RowTiles],
                                                        float2 (&x)[kStepTiles][RowTiles]) {
#pragma unroll
        for (int tile = 0; tile < kStepTiles; tile++) {
            const int token = kTileTokens * tile + Layout::score_token(lane);
            float2 scale = make_float2(key_scale, key_scale), zero = {};
            if constexpr (kTokenScales) scale = scales.pair(StepScales::kKeyScale, token);
            if constexpr (kKeyZeroPoints) {
                zero = scales.pair(StepScales::kKeyZeroPoint, token);
                scale = make_float2(scale.x * (1.f / KeyElement::kScale), scale.y * (1.f / KeyElement::kScale));
            }
#pragma unroll
            for (int mt = 0; mt < RowTiles; mt++) {
                float2& y = x[tile][mt];
                if constexpr (KeyElement::kNanIsInfinity) y = make_float2(fmaf(y.x, 0.f, y.x), fmaf(y.y, 0.f, y.y));
                if constexpr (kKeyZeroPoints) y = make_float2(fmaf(-zero.x, query_sum[mt], y.x), fmaf(-zero.y, query_sum[mt], y.y));
                y = make_float2(y.x * scale.x, y.y * scale.y);
            }
        }
    }

    // Makes of probabilities p what is packed: p times the token's value scale, over the row's unit, a power of two with which
    // these products fit fp16 (ProbabilityScale, scales.cuh); a p of 1 counts as kPackedOne, 2^8. `moved`: row maxima have changed
    // in this step; row_moved: which of the lane's, for batch-invariant kernels. No unit fits a product with a negative or
    // non-finite scale: NaN.
    __device__ __forceinline__ static void scale_probabilities(const typename Layout::Lane& lane,
                                                               const typename OwnLoader::Scales& scales, bool moved,
                                                               const bool (&row_moved)[RowTiles], float2 (&p)[kStepTiles][RowTiles],
                                                               SoftmaxRow (&softmax)[RowTiles],
                                                               ProbabilityScale (&probability_scale)[RowTiles],
                                                               typename Layout::template Output<kValueLoads>& o) {
        float2 scale[kStepTiles], product[kStepTiles][RowTiles];
        bool exceeds = moved;
#pragma unroll
        for (int tile = 0; tile < kStepTiles; tile++) {
            scale[tile] = scales.pair(StepScales::kValueScale, kTileTokens * tile + Layout::score_token(lane));
#pragma unroll
            for (int mt = 0; mt < RowTiles; mt++) {
                product[tile][mt] = probability_scale[mt].scaled(p[tile][mt], scale[tile]);
                exceeds |= ProbabilityScale::exceeds(product[tile][mt]);
            }
        }
        if (__any_sync(~0u, exceeds)) {
            float factor[RowTiles];
#pragma unroll
            for (int mt = 0; mt < RowTiles; mt++) {
                [[maybe_unused]] bool own = row_moved[mt];
                if constexpr (kBatchInvariant) {
#pragma unroll
                    for (int tile = 0; tile < kStepTiles; tile++) own |= ProbabilityScale::exceeds(product[tile][mt]);
                    own = row_max<Layout>(own ? 1.f : 0.f) > 0.f;
                }
                float m = 0.f;
#pragma unroll
                for (int tile = 0; tile < kStepTiles; tile++)
                    m = fmaxf(m, fmaxf(p[tile][mt].x * kPackedOne * scale[tile].x, p[tile][mt].y * kPackedOne * scale[tile].y));
                if constexpr (kBatchInvariant) {  // a row's unit must not depend on other rows
                    const float of_row = row_max<Layout>(m);  // before the branch: all lanes shuffle
                    factor[mt] = own ? probability_scale[mt].update(of_row) : 1.f;
                } else {
                    factor[mt] = probability_scale[mt].update(row_max<Layout>(m));
                }
#pragma unroll
                for (int tile = 0; tile < kStepTiles; tile++) {
                    product[tile][mt] = probability_scale[mt].scaled(p[tile][mt], scale[tile]);
                    if (ProbabilityScale::exceeds(product[tile][mt])) softmax[mt].sum = quiet_nan();
                }
            }
            rescale(lane, o, factor);
        }
#pragma unroll
        for (int tile = 0; tile < kStepTiles; tile++)
#pragma unroll
            for (int mt = 0; mt < RowTiles; mt++) p[tile][mt] = product[tile][mt];
    }

    // Turns the accumulated output into that of dequantized values: adds zero points, whose sum has the factor kPackingShift
    // (2^-112, of packing), and multiplies by the row's unit or V's scale.
    __device__ __forceinline__ static void finish_values(const DecodeParams& p, const WorkTile& s,
                                                         const typename Layout::Lane& lane,
                                                         const ProbabilityScale (&probability_scale)[RowTiles],
                                                         typename Layout::template Output<kValueLoads>& o) {
        float factor[RowTiles], offset[RowTiles] = {};
#pragma unroll
        for (int mt = 0; mt < RowTiles; mt++) {
            factor[mt] = kTokenScales ? 1.f / probability_scale[mt].inverse
                                      : scale_of_sequence(p.scales.v, s.batch, s.head_k) / ValueElement::kScale;
            if constexpr (kValueZeroPoints) {
                offset[mt] = row_sum<Layout>(probability_scale[mt].offset * (1.f / kPackingShift));
            }
        }
        if constexpr (ValueElement::kNanIsInfinity)
            Layout::each_output(lane, o, factor, [](float x, float, bool) { return fmaf(x, 0.f, x); });
        if constexpr (kValueZeroPoints)
            // `later`: columns 4 to 7 of eight, which have 16 times the factor
            Layout::each_output(lane, o, offset, [](float x, float own, bool later) {
                return fmaf(x, later ? 1.f / (16.f * ValueElement::kScale) : 1.f / ValueElement::kScale, own);
            });
        rescale(lane, o, factor);
    }

    // Multiplies output rows; `factor`: that of the lane's score_row in each row tile.
    __device__ __forceinline__ static void rescale(const typename Layout::Lane& lane,
                                                   typename Layout::template Output<kValueLoads>& o,
                                                   const float (&factor)[RowTiles]) {
        Layout::each_output(lane, o, factor, [](float x, float own, bool) { return x * own; });
    }
    __device__ __forceinline__ static void rescale_all(const typename Layout::Lane& lane,
                                                       typename Layout::template Output<kValueLoads>& o, float factor) {
        float of_rows[RowTiles];
#pragma unroll
        for (float& x : of_rows) x = factor;
        rescale(lane, o, of_rows);
    }

    // Loads the warp's rows of Q; zeros for rows and columns that do not exist.
    __device__ __forceinline__ static void load_queries(const DecodeParams& p, const WorkTile& s, int first_row, OwnQueries& q,
                                                        Bf16Scaler& scaler) {
        if constexpr (kBf16) {
            // Reads Q twice: for the factor, then, from L1, to convert. With column groups one row tile at once: two spill.
            float largest = 0.f;
            each_query<(kColumnGroups > 1 ? 1 : RowTiles)>(p, s, first_row, [&](int, int, const uint4& x) {
                for (unsigned word : {x.x, x.y, x.z, x.w}) {
                    const float2 pair = bf16x2_to_float2(word);
                    for (float y : {fabsf(pair.x), fabsf(pair.y)})
                        if (y <= Bf16Scaler::kMaxFinite) largest = fmaxf(largest, y);
                }
            });
#pragma unroll
            for (int lane_mask = 1; lane_mask < 32; lane_mask *= 2)
                largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, lane_mask));
            scaler.fit(largest);
        }
        each_query<RowTiles>(p, s, first_row, [&](int mt, int j, uint4 x) {
            // A negative softmax_scale flips the signs of Q.
            x = KeyElement::permute8(flipped(x, p.problem.sign_flip));
            if constexpr (kBf16) x = scaler.converted(x);
            q.set(mt, j, x);
        });
    }
    // Calls f(mt, j, x) with each of the lane's chunks of Q. Unrolled: row tiles whose loads are in flight at once.
    template <int Unrolled, class F>
    __device__ __forceinline__ static void each_query(const DecodeParams& p, const WorkTile& s, int first_row, F f) {
        const typename Layout::Lane lane;
#pragma unroll Unrolled
        for (int mt = 0; mt < RowTiles; mt++) {
            const int row = first_row + 8 * mt + Layout::query_row(lane), packed = s.row + row;
            const int query = quotient(packed, p.group), head = packed - query * p.group.divisor;
            const unsigned short* from = p.q.ptr + s.batch * p.q.batch_stride + (s.q_offset + query) * p.q.row_stride +
                                         (s.head_k * p.group.divisor + head) * p.q.head_stride;
#pragma unroll
            for (int j = 0; j < kKeyLoads; j++) {
                const int column = first_column() + Keys<kKeyLoads>::of(32 * j + Layout::key_column(lane));
                uint4 x = make_uint4(0, 0, 0, 0);
                if (row < s.rows && column < p.problem.headdim) x = load_global(from + column);
                f(mt, j, x);
            }
        }
    }

    // Applies the score function and ALiBi to a lane's two scores of one row: turns products q.k into scores in log2 units.
    __device__ __forceinline__ static void apply_score_mod(const DecodeParams& p, const RowInfo& row, int token, float2& x) {
        if (ScoreFunction::parameter(p.score_options) > 0.f) {
            const ScoreFunction function(p.problem, p.score_options);
            x = make_float2(function(x.x), function(x.y));
        } else {
            x = make_float2(x.x * p.problem.scale_log2, x.y * p.problem.scale_log2);
        }
        const int distance = row.position - token;
        x.x = Alibi::of(row.slope, x.x, static_cast<float>(distance));
        x.y = Alibi::of(row.slope, x.y, static_cast<float>(distance - 1));
    }
};

}  // namespace decode
