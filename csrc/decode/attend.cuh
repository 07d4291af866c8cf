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

#include "decode/block.cuh"
#include "decode/page_walk.cuh"
#include "decode/shared_steps.cuh"

namespace decode {

// Steps through keys and values in their order, page by page.
template <class Layout>
class Cursor {
    PageWalk pages_;
    const unsigned short *k_, *v_;  // of this lane
    bool stands_;
    int token_;  // the step's first

public:
    __device__ __forceinline__ Cursor(const DecodeParams& p, const Segment& s, int token, const void* = nullptr, int = 0, int = 0)
        : pages_(p, s, token), token_(token) {
        enter_page(p, s);
    }
    // By tokens that no page ends between.
    template <int Tokens = kUnit>
    __device__ __forceinline__ void advance(const DecodeParams& p, const Segment& s) {
        token_ += Tokens;
        k_ += Tokens * p.cache.k.row_stride;
        v_ += Tokens * p.cache.v.row_stride;
        if (pages_.template advance<Tokens>(p, s)) enter_page(p, s);
    }
    // False: the table names a page that there is not.
    __device__ __forceinline__ bool stands() const { return stands_; }
    __device__ __forceinline__ int token() const { return token_; }
    // Where the lane's columns of its token are.
    __device__ __forceinline__ const unsigned short* keys() const { return k_; }
    __device__ __forceinline__ const unsigned short* values() const { return v_; }
    // Tokens and columns that do not exist are not touched.
    template <int Loads>
    __device__ __forceinline__ void load_keys(const DecodeParams& p, int seqlen_k, uint4 (&k)[Loads]) const {
        const typename Layout::Lane lane;
        const int columns = token_ + Layout::key_token(lane) < seqlen_k ? p.problem.headdim - Layout::key_column(lane) : 0;
        load_keys<0>(columns, k);
    }
    template <int Loads>
    __device__ __forceinline__ void load_values(const DecodeParams& p, int seqlen_k, uint4 (&v)[Loads][2]) const {
        const typename Layout::Lane lane;
        const int columns = p.problem.headdim_v - Layout::value_column(lane), first = token_ + Layout::value_token(lane);
        load_values<0>(first < seqlen_k ? columns : 0, 0, v_, v);
        load_values<0>(first + Layout::kValueTokens < seqlen_k ? columns : 0, 1, v_ + Layout::kValueTokens * p.cache.v.row_stride,
                       v);
    }

private:
    template <int J, int Loads>
    __device__ __forceinline__ void load_keys(int columns, uint4 (&k)[Loads]) const {
        if constexpr (J < Loads) {
            load_columns<32 * J>(columns, k[J], k_ + 32 * J);
            load_keys<J + 1>(columns, k);
        }
    }
    template <int J, int Loads>
    __device__ __forceinline__ void load_values(int columns, int h, const unsigned short* from, uint4 (&v)[Loads][2]) const {
        if constexpr (J < Loads) {
            load_columns<64 * J>(columns, v[J][h], from + 64 * J);
            load_values<J + 1>(columns, h, from, v);
        }
    }
    __device__ __forceinline__ void enter_page(const DecodeParams& p, const Segment& s) {
        const typename Layout::Lane lane;
        const int page = pages_.number();
        stands_ = has_page(p.cache, page);
        k_ = row_of_page(p.cache.k, page, pages_.row + Layout::key_token(lane)) + s.head_k * p.cache.k.head_stride +
             Layout::key_column(lane);
        v_ = row_of_page(p.cache.v, page, pages_.row + Layout::value_token(lane)) + s.head_k * p.cache.v.head_stride +
             Layout::value_column(lane);
    }
};

// A block of Warps warps, of which RowGroups neighbours take the same tokens, each for RowTiles * 8 rows.
template <template <int> class LayoutOf, int RowTiles, int RowGroups, int Warps>
struct Attend {
    using Layout = LayoutOf<RowTiles>;
    static constexpr int kParts = Warps / RowGroups;
    // Two beside each other find each other's bytes in the first cache; more share what they load.
    static constexpr bool kShares = Layout::kShares && RowGroups > 2;
    static constexpr int kKeyLoads = HEADDIM / 32, kValueLoads = HEADDIM_V / 64;
    static_assert(RowTiles * RowGroups * 8 == BLOCK_ROWS && Warps * 32 == THREADS && Warps % RowGroups == 0, "rows of src/kernels");
    static_assert(HEADDIM % 32 == 0 && HEADDIM_V % 64 == 0, "whole loads of a warp");

    __device__ __forceinline__ static void attend(const DecodeParams& p, const Segment& s, const RowInfo* row_info,
                                                  const BlockParts<kParts>& parts) {
        const typename Layout::Lane lane;
        const int warp = __shfl_sync(~0u, threadIdx.x >> 5, 0), part = warp / RowGroups,
                  first_row = warp % RowGroups * (8 * RowTiles);
        const ScoreOptions& options = p.score_options;

        unsigned q[RowTiles][kKeyLoads][4];
        load_queries(p, s, first_row, q);
        typename Layout::template Output<kValueLoads> o = {};
        SoftmaxRow softmax[RowTiles];

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

            uint4 k[kKeyLoads] = {}, v[kValueLoads][2] = {};
            const int first = s.first + part * each * kUnit;
            typename StepsOf<kShares>::Steps steps(p, s, first, parts.output, part, warp % RowGroups);
            if constexpr (!kShares) {
                if (steps.stands()) {
                    steps.load_keys(p, seqlen_k, k);
                    steps.load_values(p, seqlen_k, v);
                }
            }
            for (int token = first; left > 0 && (kShares || steps.stands()); token += kUnit) {
                left--;
                if constexpr (kShares) {
                    steps.share(p, s, seqlen_k, left > 0);
                    steps.keys(k);
                }
                float2 x[RowTiles];
                Layout::scores(q, k, x);
                if constexpr (kShares) {
                    steps.values(v);
                } else if (left > 0) {
                    steps.advance(p, s);
                    if (steps.stands()) steps.load_keys(p, seqlen_k, k);
                }

                const RowInfo* rows = row_info + first_row + Layout::score_row(lane);
                const int first_token = token + Layout::score_token(lane);
                if (is_modified) {
#pragma unroll
                    for (int mt = 0; mt < RowTiles; mt++) modify(p, rows[8 * mt], first_token, x[mt]);
                }
                if (token < full_first || token + kUnit > full_end) {
#pragma unroll
                    for (int mt = 0; mt < RowTiles; mt++) {
                        const int position = rows[8 * mt].position;
                        const int low = position - p.problem.window_left - first_token;
                        const int high = min(position + p.problem.window_right, seqlen_k - 1) - first_token;
                        if (low > 0 || high < 0) x[mt].x = negative_infinity();
                        if (low > 1 || high < 1) x[mt].y = negative_infinity();
                    }
                    // of tokens that do not exist registers hold what was there before
                    if constexpr (!kShares) {
#pragma unroll
                        for (int h = 0; h < 2; h++)
                            if (token + Layout::value_token(lane) + Layout::kValueTokens * h >= seqlen_k) {
#pragma unroll
                                for (int j = 0; j < kValueLoads; j++) v[j][h] = make_uint4(0, 0, 0, 0);
                            }
                    }
                }

                bool exceeds = false;
#pragma unroll
                for (int mt = 0; mt < RowTiles; mt++) exceeds |= fmaxf(x[mt].x, x[mt].y) > softmax[mt].limit;
                if (__any_sync(~0u, exceeds)) {
                    float factor[RowTiles];
#pragma unroll
                    for (int mt = 0; mt < RowTiles; mt++) {
                        float m = fmaxf(x[mt].x, x[mt].y);
#pragma unroll
                        for (int mate : Layout::kRowMates) m = fmaxf(m, __shfl_xor_sync(~0u, m, mate));
                        factor[mt] = softmax[mt].template move_reference<MovedRows::kAll>(m, scale_log2, inverse_scale_log2);
                    }
                    Layout::rescale(lane, o, factor);
                }
                unsigned packed[RowTiles];
#pragma unroll
                for (int mt = 0; mt < RowTiles; mt++)
                    packed[mt] = pack_probabilities(softmax[mt].probability(x[mt].x, scale_log2),
                                                    softmax[mt].probability(x[mt].y, scale_log2));
                Layout::add_values(lane, o, packed, v);
                if constexpr (!kShares) {
                    if (left > 0 && steps.stands()) steps.load_values(p, seqlen_k, v);
                }
            }
            is_wrong = !steps.stands();
        }
        if constexpr (kShares) __syncthreads();  // parts are written where steps were

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
        float* output = parts.output + (part * BLOCK_ROWS + first_row) * kPartStride;
        Layout::each_pair(lane, o, [&](int row, int column, float x, float y) {
            *reinterpret_cast<float2*>(output + row * kPartStride + column) = make_float2(x, y);
        });
    }

private:
    template <bool Shares, class = void>
    struct StepsOf {
        using Steps = Cursor<Layout>;
    };
    template <class Unused>
    struct StepsOf<true, Unused> {
        using Steps = SharedSteps<Layout, RowGroups>;
        static_assert(kParts * Steps::kBytes <= kParts * BLOCK_ROWS * kPartStride * sizeof(float),
                      "a set's buffers lie where its part will");
    };

    // What does not exist is zero.
    __device__ __forceinline__ static void load_queries(const DecodeParams& p, const Segment& s, int first_row,
                                                        unsigned (&q)[RowTiles][kKeyLoads][4]) {
        const typename Layout::Lane lane;
        const int group = p.problem.nheads / p.problem.nheads_k;
#pragma unroll
        for (int mt = 0; mt < RowTiles; mt++) {
            const int row = first_row + 8 * mt + Layout::query_row(lane), packed = s.row + row;
            const unsigned short* from = p.q.ptr + s.batch * p.q.batch_stride + (s.first_q + packed / group) * p.q.row_stride +
                                         (s.head_k * group + packed % group) * p.q.head_stride + Layout::key_column(lane);
#pragma unroll
            for (int j = 0; j < kKeyLoads; j++) {
                uint4 x = make_uint4(0, 0, 0, 0);
                if (row < s.rows && 32 * j + Layout::key_column(lane) < p.problem.headdim) x = load_global(from + 32 * j);
                x = flipped(x, p.problem.sign_flip);
                q[mt][j][0] = x.x, q[mt][j][1] = x.y, q[mt][j][2] = x.z, q[mt][j][3] = x.w;
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
