// The main loop of a decode block, for any layout: keys and values go from global memory straight into operand registers.
//
// A step of a warp is eight tokens. A load of keys is all eight tokens, of each 64 contiguous bytes, one of values four tokens, of
// each 128, so a byte of the cache is loaded once, by one lane, and there is no shared memory and no barrier in the loop.
// Registers are loaded again as soon as they are used: keys after the scores, values after the output. So a warp has up to a whole
// step in flight, and nothing twice.
//
// A Layout is a family's way to deal out the two products. Of RowTiles tiles of eight rows it has
//   query_row, key_token, value_token, key_column, value_column   what a lane loads: eight columns from these on. A lane's keys and
//   queries
//                         have the same columns, of each 32; its values, of each 64, are of two tokens, value_token and value_token
//                         + kValueTokens
//   scores(q, k, x)       x is two scores of each row tile: row score_row, tokens score_token and the next. kRowMates are the
//                         distances of lanes that have others of the row
//   rescale(o, factor)    factor is that of the lane's score_row
//   add_values(o, p, v)   p are packed probabilities, of the scores' lanes
//   each_pair(o, f)       f(row, column, x, y): outputs of two columns side by side
#pragma once

#include "decode/bfloat.cuh"
#include "decode/cache_registers.cuh"
#include "decode/page_walk.cuh"
#include "decode/shared_steps.cuh"

namespace decode {

// Steps through keys and values in their order, page by page.
template <class Layout>
class Cursor {
    PageWalk pages_;
    const Stored *k_, *v_;  // of this lane
    const float* scale_[StepScales::kRegisters];  // of this lane
    // the same of the first row of page 0: steps of quantised caches often enter a page
    const Stored *k_base_, *v_base_;
    bool stands_;
    int token_;  // the step's first

public:
    __device__ __forceinline__ Cursor(const DecodeParams& p, const Segment& s, int token, const void* = nullptr, int = 0, int = 0)
        : pages_(p, s, token), token_(token) {
        if constexpr (kQuantised) {
            const typename Layout::Lane lane;
            k_base_ = bytes_of_page(p.cache.k, 0, Layout::key_token(lane), s.head_k) + stored(key_column());
            v_base_ = bytes_of_page(p.cache.v, 0, Layout::value_token(lane), s.head_k) + stored(value_column());
        }
        enter_page(p, s);
    }
    // By tokens that no page ends between.
    template <int Tokens = kUnit>
    __device__ __forceinline__ void advance(const DecodeParams& p, const Segment& s) {
        token_ += Tokens;
        k_ += Tokens * p.cache.k.row_stride;
        v_ += Tokens * p.cache.v.row_stride;
        if constexpr (kTokenScales) {
#pragma unroll
            for (int i = 0; i < StepScales::kRegisters; i++) scale_[i] += Tokens * StepScales::of_lane(p.scales, i).row_stride;
        }
        if (pages_.template advance<Tokens>(p, s)) enter_page(p, s);
    }
    // False: the table names a page that there is not.
    __device__ __forceinline__ bool stands() const { return stands_; }
    __device__ __forceinline__ int token() const { return token_; }
    // Where the lane's columns of its token are.
    __device__ __forceinline__ const Stored* keys() const { return k_; }
    __device__ __forceinline__ const Stored* values() const { return v_; }
    // Tokens and columns that do not exist are not touched.
    template <int Loads>
    __device__ __forceinline__ void load_keys(const DecodeParams& p, int seqlen_k, Keys<Loads> (&k)[kTiles]) const {
        const typename Layout::Lane lane;
        const int columns = p.problem.headdim - key_column();
#pragma unroll
        for (int tile = 0; tile < kTiles; tile++)
            k[tile].load(token_ + kTile * tile + Layout::key_token(lane) < seqlen_k ? columns : 0,
                         k_ + kTile * tile * p.cache.k.row_stride);
    }
    template <int Loads>
    __device__ __forceinline__ void load_values(const DecodeParams& p, int seqlen_k, Values<Loads> (&v)[kTiles]) const {
        const typename Layout::Lane lane;
        const int columns = p.problem.headdim_v - value_column();
#pragma unroll
        for (int tile = 0; tile < kTiles; tile++)
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const int row = kTile * tile + Layout::kValueTokens * h;
                v[tile].token[h].load(token_ + row + Layout::value_token(lane) < seqlen_k ? columns : 0,
                                      v_ + row * p.cache.v.row_stride);
            }
    }
    // Of tokens that do not exist 0.
    __device__ __forceinline__ void load_scales(const DecodeParams& p, int seqlen_k, StepScales& scales) const {
        const int lane = threadIdx.x & 31;
        const bool exists = lane < StepScales::kLanes && token_ + lane % kUnit < seqlen_k;
#pragma unroll
        for (int i = 0; i < StepScales::kRegisters; i++)
            asm volatile("{.reg .pred p; setp.ne.s32 p, %2, 0; mov.f32 %0, 0f00000000; @p ld.global.nc.f32 %0, [%1];}"
                         : "=&f"(scales.own[i])
                         : "l"(scale_[i]), "r"(static_cast<int>(exists)));
    }

private:
    __device__ __forceinline__ static int key_column() {
        return Keys<HEADDIM / 32>::of(Layout::key_column(typename Layout::Lane()));
    }
    __device__ __forceinline__ static int value_column() {
        return Columns<HEADDIM_V / 64, 64>::of(Layout::value_column(typename Layout::Lane()));
    }
    __device__ __forceinline__ void enter_page(const DecodeParams& p, const Segment& s) {
        const typename Layout::Lane lane;
        const int page = pages_.number(), row = pages_.row;
        stands_ = has_page(p.cache, page);
        if constexpr (kQuantised) {
            k_ = k_base_ + page * p.cache.k.batch_stride;
            v_ = v_base_ + page * p.cache.v.batch_stride;
            if (row > 0) k_ += row * p.cache.k.row_stride, v_ += row * p.cache.v.row_stride;
        } else {
            k_ = row_of_page(p.cache.k, page, row + Layout::key_token(lane)) + s.head_k * p.cache.k.head_stride + key_column();
            v_ = row_of_page(p.cache.v, page, row + Layout::value_token(lane)) + s.head_k * p.cache.v.head_stride + value_column();
        }
        if constexpr (kTokenScales) {
#pragma unroll
            for (int i = 0; i < StepScales::kRegisters; i++)
                scale_[i] = scale_of_page(StepScales::of_lane(p.scales, i), page, row + threadIdx.x % kUnit, s.head_k);
        }
    }
};

// A block of Warps warps, of which RowGroups neighbours take the same tokens, each for RowTiles * 8 rows.
template <template <int> class LayoutOf, int RowTiles, int RowGroups, int Warps>
struct Attend {
    using Layout = LayoutOf<RowTiles>;
    static constexpr int kParts = Warps / RowGroups;
    // Two beside each other find each other's bytes in the first cache; four share what they load.
    static constexpr bool kShares = Layout::kShares && RowGroups == 4 && !kQuantised;
    static constexpr int kKeyLoads = HEADDIM / 32, kValueLoads = HEADDIM_V / 64;
    // 16 rows of 256 columns are 128 registers of output and 64 of queries: half of these lie in shared memory.
    static constexpr int kStored = kShares && RowTiles * kKeyLoads > 8 ? kKeyLoads / 2 : 0;
    using OwnQueries = Queries<RowTiles, kKeyLoads, kStored>;
    static constexpr int kRowsAtOnce =
        kParts * BLOCK_ROWS * kPartStride * sizeof(float) <= SHARED_BYTES ? BLOCK_ROWS : BLOCK_ROWS / 2;
    template <bool Shares, class = void>
    struct StepsOf {
        using Steps = Cursor<Layout>;
        static constexpr int kBytes = 0;
    };
    template <class Unused>
    struct StepsOf<true, Unused> {
        using Steps = SharedSteps<Layout>;
        static constexpr int kBytes = kParts * Steps::kBytes;
    };
    using Steps = typename StepsOf<kShares>::Steps;
    // Steps, then each warp's queries. Both lie where the warps' parts will.
    static constexpr int kStepBytes = StepsOf<kShares>::kBytes, kWorkBytes = kStepBytes + Warps * OwnQueries::kBytes;
    static_assert(RowTiles * RowGroups * 8 == BLOCK_ROWS && Warps * 32 == THREADS && Warps % RowGroups == 0, "rows of src/kernels");
    static_assert(HEADDIM % 32 == 0 && HEADDIM_V % 64 == 0, "whole loads of a warp");

    template <class Finish>
    __device__ __forceinline__ static void attend(const DecodeParams& p, const Segment& s, const RowInfo* row_info,
                                                  const BlockParts<kParts, kRowsAtOnce>& parts, Finish finish) {
        const typename Layout::Lane lane;
        const int warp = __shfl_sync(~0u, threadIdx.x >> 5, 0), part = warp / RowGroups,
                  first_row = warp % RowGroups * (8 * RowTiles);
        const ScoreOptions& options = p.score_options;

        OwnQueries q;
        if constexpr (kStored > 0) {
            char* stored = reinterpret_cast<char*>(parts.output) + kStepBytes + warp * OwnQueries::kBytes;
            q.stored = reinterpret_cast<uint4*>(stored) + (threadIdx.x & 31);
        }
        load_queries(p, s, first_row, q);
        typename Layout::template Output<kValueLoads> o = {};
        SoftmaxRow softmax[RowTiles];
        ValueUnit unit[RowTiles];
        BfloatValues bfloat_values;
        float shared_inverse = 1.f;  // of values that warps share

        // the warps' pieces are contiguous too, and whole steps
        const int steps = (s.end - s.first + kUnit - 1) / kUnit, each = (steps + kParts - 1) / kParts;
        int left = min(each, steps - part * each);
        bool is_wrong = false;
        if (left > 0) {
            const int seqlen_k = s.seqlen_k;
            // tokens that all of the warp's rows see
            const int full_first = row_info[first_row + 8 * RowTiles - 1].position - p.problem.window_left;
            const int full_end = min(row_info[first_row].position + p.problem.window_right + 1, seqlen_k);
            const bool is_modified = options.softcap > 0.f || options.alibi_slopes;
            const float scale_log2 = is_modified ? 1.f : p.problem.scale_log2, inverse_scale_log2 = 1.f / scale_log2;

            const int first = s.first + part * each * kUnit;
            Steps steps(p, s, first, parts.output, part, warp % RowGroups);
            Keys<kKeyLoads> k[kTiles] = {};
            Values<kValueLoads> v[kTiles] = {};
            StepScales next_scales;
            const float key_scale =
                kQuantised && !kTokenScales ? scale_of_sequence(p.scales.k, s.batch, s.head_k) / CacheElement::kScale : 1.f;
            float query_sum[RowTiles] = {};
            if constexpr (kZeroPoints) sum_queries(q, query_sum);
            if constexpr (!kShares) {
                if (steps.stands()) {
                    steps.load_keys(p, seqlen_k, k);
                    steps.load_values(p, seqlen_k, v);
                    if constexpr (kTokenScales) steps.load_scales(p, seqlen_k, next_scales);
                }
            }
            for (int token = first; left > 0 && (kShares || steps.stands()); token += kUnit) {
                left--;
                float change = 1.f;  // of the factor that values have
                if constexpr (kShares) change = steps.share(p, s, seqlen_k, left > 0);
                float2 x[kTiles][RowTiles];
                if constexpr (kBfloat && !kShares) {
#pragma unroll
                    for (int tile = 0; tile < kTiles; tile++) keys_of_bfloat(k[tile]);
                }
#pragma unroll
                for (int tile = 0; tile < kTiles; tile++) {
                    if constexpr (kShares)
                        Layout::scores(q, steps.keys(tile), x[tile]);
                    else
                        Layout::scores(q, k[tile], x[tile]);
                }
                const StepScales scales = next_scales;
                if constexpr (!kShares) {
                    if (left > 0) {
                        steps.advance(p, s);
                        if (steps.stands()) {
                            steps.load_keys(p, seqlen_k, k);
                            if constexpr (kTokenScales) steps.load_scales(p, seqlen_k, next_scales);
                        }
                    }
                }
                if constexpr (kQuantised) scale_scores(lane, scales, key_scale, query_sum, x);

                const RowInfo* rows = row_info + first_row + Layout::score_row(lane);
                const int first_token = token + Layout::score_token(lane);
                if (is_modified) {
#pragma unroll
                    for (int tile = 0; tile < kTiles; tile++)
#pragma unroll
                        for (int mt = 0; mt < RowTiles; mt++) modify(p, rows[8 * mt], first_token + kTile * tile, x[tile][mt]);
                }
                if (token < full_first || token + kUnit > full_end) {
#pragma unroll
                    for (int tile = 0; tile < kTiles; tile++) {
#pragma unroll
                        for (int mt = 0; mt < RowTiles; mt++) {
                            const int position = rows[8 * mt].position, first = first_token + kTile * tile;
                            const int low = position - p.problem.window_left - first;
                            const int high = min(position + p.problem.window_right, seqlen_k - 1) - first;
                            if (low > 0 || high < 0) x[tile][mt].x = negative_infinity();
                            if (low > 1 || high < 1) x[tile][mt].y = negative_infinity();
                        }
                        if constexpr (kShares) continue;
                        // of tokens that do not exist registers hold what was there before
#pragma unroll
                        for (int h = 0; h < 2; h++)
                            if (token + kTile * tile + Layout::value_token(lane) + Layout::kValueTokens * h >= seqlen_k)
                                v[tile].token[h].clear();
                    }
                }

                if constexpr (kBfloat && !kShares) bfloat_values.convert(v, [&](float factor) { rescale_all(lane, o, factor); });

                bool exceeds = change != 1.f;
#pragma unroll
                for (int mt = 0; mt < RowTiles; mt++) exceeds |= largest(x, mt) > softmax[mt].limit;
                const bool moved = __any_sync(~0u, exceeds);
                if (moved) {
                    float factor[RowTiles];
#pragma unroll
                    for (int mt = 0; mt < RowTiles; mt++) {
                        float m = largest(x, mt);
#pragma unroll
                        for (int mate : Layout::kRowMates) m = fmaxf(m, __shfl_xor_sync(~0u, m, mate));
                        factor[mt] = softmax[mt].template move_reference<MovedRows::kAll>(m, scale_log2, inverse_scale_log2);
                        if constexpr (kZeroPoints) unit[mt].offset *= factor[mt];
                        factor[mt] *= change;
                    }
                    Layout::rescale(lane, o, factor);
                }
#pragma unroll
                for (int tile = 0; tile < kTiles; tile++)
#pragma unroll
                    for (int mt = 0; mt < RowTiles; mt++)
                        x[tile][mt] = make_float2(softmax[mt].probability(x[tile][mt].x, scale_log2),
                                                  softmax[mt].probability(x[tile][mt].y, scale_log2));
                if constexpr (kTokenScales) scale_probabilities(lane, scales, moved, x, softmax, unit, o);
#pragma unroll
                for (int tile = 0; tile < kTiles; tile++) {
                    unsigned packed[RowTiles];
#pragma unroll
                    for (int mt = 0; mt < RowTiles; mt++) packed[mt] = pack_probabilities(x[tile][mt].x, x[tile][mt].y);
                    if constexpr (kZeroPoints) {
                        const float2 zero = scales.pair(StepScales::kValueZeroPoint, kTile * tile + Layout::score_token(lane));
#pragma unroll
                        for (int mt = 0; mt < RowTiles; mt++) unit[mt].add_zero_points(packed[mt], zero);
                    }
                    if constexpr (kShares)
                        Layout::add_values(lane, o, packed, steps.values(tile));
                    else
                        Layout::add_values(lane, o, packed, v[tile]);
                }
                if constexpr (!kShares) {
                    if (left > 0 && steps.stands()) steps.load_values(p, seqlen_k, v);
                }
            }
            is_wrong = !steps.stands();
            if constexpr (kBfloat && kShares) shared_inverse = steps.inverse();
        }
        if constexpr (kShares) __syncthreads();  // parts are written where steps were
        if constexpr (kQuantised) finish_values(p, s, lane, unit, o);
        if constexpr (kBfloat) rescale_all(lane, o, kShares ? shared_inverse : bfloat_values.inverse());

#pragma unroll
        for (int mt = 0; mt < RowTiles; mt++) {
            float sum = softmax[mt].sum;
            int mates = 0;
#pragma unroll
            for (int mate : Layout::kRowMates) {
                sum += __shfl_xor_sync(~0u, sum, mate);
                mates |= mate;
            }
            if (is_wrong) sum = __int_as_float(0x7fffffff);
            if ((threadIdx.x & mates) == 0)
                parts.state[part * BLOCK_ROWS + first_row + 8 * mt + Layout::score_row(lane)] = {softmax[mt].reference, sum};
        }
#pragma unroll 1
        for (int first = 0; first < BLOCK_ROWS; first += kRowsAtOnce) {
            if (first_row / kRowsAtOnce == first / kRowsAtOnce) {
                float* output = parts.output + (part * kRowsAtOnce + first_row - first) * kPartStride;
                Layout::each_pair(lane, o, [&](int row, int column, float x, float y) {
                    using Order = Columns<kValueLoads, 64>;
                    float* to = output + row * kPartStride;
                    if constexpr (CacheElement::column(1) == 1) {
                        *reinterpret_cast<float2*>(to + Order::of(column)) = make_float2(x, y);
                    } else {
                        to[Order::of(column)] = x;
                        to[Order::of(column + 1)] = y;
                    }
                });
            }
            finish(first);
        }
    }

private:
    // Of each row, for zero points: its product with keys of ones.
    __device__ __forceinline__ static void sum_queries(const OwnQueries& q, float (&sum)[RowTiles]) {
        float2 x[RowTiles];
        Layout::scores(q, Ones(), x);
#pragma unroll
        for (int mt = 0; mt < RowTiles; mt++) sum[mt] = x[mt].x * CacheElement::kScale;
    }

    __device__ __forceinline__ static float largest(const float2 (&x)[kTiles][RowTiles], int mt) {
        float m = fmaxf(x[0][mt].x, x[0][mt].y);
#pragma unroll
        for (int tile = 1; tile < kTiles; tile++) m = fmaxf(m, fmaxf(x[tile][mt].x, x[tile][mt].y));
        return m;
    }

    // From products with codes to products with keys.
    __device__ __forceinline__ static void scale_scores(const typename Layout::Lane& lane, const StepScales& scales,
                                                        float key_scale, const float (&query_sum)[RowTiles],
                                                        float2 (&x)[kTiles][RowTiles]) {
#pragma unroll
        for (int tile = 0; tile < kTiles; tile++) {
            const int token = kTile * tile + Layout::score_token(lane);
            float2 scale = make_float2(key_scale, key_scale), zero = {};
            if constexpr (kTokenScales) scale = scales.pair(StepScales::kKeyScale, token);
            if constexpr (kZeroPoints) {
                zero = scales.pair(StepScales::kKeyZeroPoint, token);
                scale = make_float2(scale.x * (1.f / CacheElement::kScale), scale.y * (1.f / CacheElement::kScale));
            }
#pragma unroll
            for (int mt = 0; mt < RowTiles; mt++) {
                float2& y = x[tile][mt];
                // e4m3's NaN came as an infinity
                if constexpr (kFormat == CacheFormat::E4m3) y = make_float2(fmaf(y.x, 0.f, y.x), fmaf(y.y, 0.f, y.y));
                if constexpr (kZeroPoints) y = make_float2(fmaf(-zero.x, query_sum[mt], y.x), fmaf(-zero.y, query_sum[mt], y.y));
                y = make_float2(y.x * scale.x, y.y * scale.y);
            }
        }
    }

    // From probabilities to what is packed; `moved`: whether references have.
    __device__ __forceinline__ static void scale_probabilities(const typename Layout::Lane& lane, const StepScales& scales,
                                                               bool moved, float2 (&p)[kTiles][RowTiles],
                                                               SoftmaxRow (&softmax)[RowTiles], ValueUnit (&unit)[RowTiles],
                                                               typename Layout::template Output<kValueLoads>& o) {
        float2 scale[kTiles], product[kTiles][RowTiles];
        bool exceeds = moved;
#pragma unroll
        for (int tile = 0; tile < kTiles; tile++) {
            scale[tile] = scales.pair(StepScales::kValueScale, kTile * tile + Layout::score_token(lane));
#pragma unroll
            for (int mt = 0; mt < RowTiles; mt++) {
                product[tile][mt] = unit[mt].scaled(p[tile][mt], scale[tile]);
                exceeds |= ValueUnit::exceeds(product[tile][mt]);
            }
        }
        if (__any_sync(~0u, exceeds)) {
            float factor[RowTiles];
#pragma unroll
            for (int mt = 0; mt < RowTiles; mt++) {
                float m = 0.f;
#pragma unroll
                for (int tile = 0; tile < kTiles; tile++)
                    m = fmaxf(m, fmaxf(p[tile][mt].x * kTwo112 * scale[tile].x, p[tile][mt].y * kTwo112 * scale[tile].y));
#pragma unroll
                for (int mate : Layout::kRowMates) m = fmaxf(m, __shfl_xor_sync(~0u, m, mate));
                factor[mt] = unit[mt].move(m);
#pragma unroll
                for (int tile = 0; tile < kTiles; tile++) {
                    product[tile][mt] = unit[mt].scaled(p[tile][mt], scale[tile]);
                    if (ValueUnit::exceeds(product[tile][mt])) softmax[mt].sum = __int_as_float(0x7fffffff);
                }
            }
            Layout::rescale(lane, o, factor);
        }
#pragma unroll
        for (int tile = 0; tile < kTiles; tile++)
#pragma unroll
            for (int mt = 0; mt < RowTiles; mt++) p[tile][mt] = product[tile][mt];
    }

    // From units to what the other kernels have.
    __device__ __forceinline__ static void finish_values(const DecodeParams& p, const Segment& s, const typename Layout::Lane& lane,
                                                         const ValueUnit (&unit)[RowTiles],
                                                         typename Layout::template Output<kValueLoads>& o) {
        float factor[RowTiles], offset[RowTiles] = {};
#pragma unroll
        for (int mt = 0; mt < RowTiles; mt++) {
            factor[mt] =
                kTokenScales ? 1.f / unit[mt].inverse : scale_of_sequence(p.scales.v, s.batch, s.head_k) / CacheElement::kScale;
            if constexpr (kZeroPoints) {
                offset[mt] = unit[mt].offset * kTwo112;
#pragma unroll
                for (int mate : Layout::kRowMates) offset[mt] += __shfl_xor_sync(~0u, offset[mt], mate);
            }
        }
        // e4m3's NaN came as an infinity
        if constexpr (kFormat == CacheFormat::E4m3)
            Layout::each_output(lane, o, factor, [](float x, float, bool) { return fmaf(x, 0.f, x); });
        if constexpr (kZeroPoints)
            Layout::each_output(lane, o, offset, [](float x, float own, bool later) {
                return fmaf(x, later ? 1.f / (16.f * CacheElement::kScale) : 1.f / CacheElement::kScale, own);
            });
        Layout::rescale(lane, o, factor);
    }

    __device__ __forceinline__ static void rescale_all(const typename Layout::Lane& lane,
                                                       typename Layout::template Output<kValueLoads>& o, float factor) {
        float of_rows[RowTiles];
#pragma unroll
        for (float& x : of_rows) x = factor;
        Layout::rescale(lane, o, of_rows);
    }

    // What does not exist is zero.
    __device__ __forceinline__ static void load_queries(const DecodeParams& p, const Segment& s, int first_row, OwnQueries& q) {
        const typename Layout::Lane lane;
        const int group = p.problem.nheads / p.problem.nheads_k;
#pragma unroll
        for (int mt = 0; mt < RowTiles; mt++) {
            const int row = first_row + 8 * mt + Layout::query_row(lane), packed = s.row + row;
            const unsigned short* from = p.q.ptr + s.batch * p.q.batch_stride + (s.first_q + packed / group) * p.q.row_stride +
                                         (s.head_k * group + packed % group) * p.q.head_stride;
#pragma unroll
            for (int j = 0; j < kKeyLoads; j++) {
                const int column = Keys<kKeyLoads>::of(32 * j + Layout::key_column(lane));
                uint4 x = make_uint4(0, 0, 0, 0);
                if (row < s.rows && column < p.problem.headdim) x = load_global(from + column);
                x = CacheElement::arrange(flipped(x, p.problem.sign_flip));
                if constexpr (kBfloat) x = halves_of_bfloat(x);
                q.set(mt, j, x);
            }
        }
    }

    // From products to units of log2.
    __device__ __forceinline__ static void modify(const DecodeParams& p, const RowInfo& row, int token, float2& x) {
        if (p.score_options.softcap > 0.f) {
            const Softcap softcap(p.problem, p.score_options);
            x = make_float2(softcap(x.x), softcap(x.y));
        } else {
            x = make_float2(x.x * p.problem.scale_log2, x.y * p.problem.scale_log2);
        }
        const int distance = row.position - token;
        x.x = fmaf(-row.slope, fabsf(static_cast<float>(distance)), x.x);
        x.y = fmaf(-row.slope, fabsf(static_cast<float>(distance - 1)), x.y);
    }
};

}  // namespace decode
