// Decode on m8n8k4: keys and values go from global memory straight into operand registers.
//
// A step is eight tokens. Of the four independent products of an m8n8k4 (volta/mma.cuh) each has a quarter of K's columns: keys are
// n, and a lane reads 16 bytes of its key a load, so that a load of the warp is eight tokens of 64 contiguous bytes. The four partial sums of
// a score are added by exchanges that leave every lane two neighbouring scores of one row, so the softmax is done once; then each
// lane fetches the packed probabilities of its row of operand A. Values are k: a load of the warp is four tokens of 128 contiguous
// bytes, of which each product of the four has its own columns of the output. So a byte of the cache is loaded once, by one lane of one warp, and
// there is no shared memory and no barrier in the loop.
//
// Registers are loaded again as soon as they are used: keys after the scores, values after the output. So a warp has up to
// a whole step in flight, and nothing twice.
#pragma once

#include "decode/block.cuh"
#include "volta/mma.cuh"

namespace volta {

// Loads where asked to; else x stays as it is. Volatile: it is early on purpose.
__device__ __forceinline__ void load_if(bool wanted, uint4& x, const unsigned short* from) {
    asm volatile("{.reg .pred p; setp.ne.s32 p, %5, 0; @p ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];}"
                 : "+r"(x.x), "+r"(x.y), "+r"(x.z), "+r"(x.w)
                 : "l"(from), "r"(static_cast<int>(wanted)));
}

// A block of Warps warps, of which RowGroups neighbours share the same tokens, each with RowTiles * 8 rows.
template <int RowTiles, int RowGroups, int Warps>
struct Decode {
    static constexpr int kParts = Warps / RowGroups;
    static constexpr int kKeyLoads = HEADDIM / 32, kValueLoads = HEADDIM_V / 64;
    static_assert(RowTiles * RowGroups * 8 == BLOCK_ROWS && Warps * 32 == THREADS && Warps % RowGroups == 0, "rows of src/kernels");
    static_assert(HEADDIM % 32 == 0 && HEADDIM_V % 64 == 0, "whole loads of a warp");

    // Where a lane's next keys and values are.
    class Cursor {
        int row_;        // of the page, of the step's first token
        int page_;       // number of the page in the sequence
        int first_page_;  // that the lanes' page numbers begin with
        int pages_;      // of the table: number first_page_ + lane
        const unsigned short *k_, *v_;  // of this lane

    public:
        int token;  // the step's first
        bool stands;  // false: the table names a page that there is not

        __device__ __forceinline__ Cursor(const DecodeParams& p, const decode::Segment& s, int token_) : token(token_) {
            const int at = s.first_k + token;
            page_ = p.cache.block_table ? at / p.cache.rows : 0;
            row_ = at - page_ * p.cache.rows;
            fetch_pages(p, s);
            enter_page(p, s);
        }
        __device__ __forceinline__ void advance(const DecodeParams& p, const decode::Segment& s) {
            token += decode::kUnit;
            row_ += decode::kUnit;
            k_ += decode::kUnit * p.cache.k.row_stride;
            v_ += decode::kUnit * p.cache.v.row_stride;
            if (row_ >= p.cache.rows) {
                row_ = 0;
                page_++;
                if (page_ - first_page_ == 32) fetch_pages(p, s);
                enter_page(p, s);
            }
        }
        __device__ __forceinline__ void load_keys(const DecodeParams& p, int seqlen_k, uint4 (&k)[kKeyLoads]) const {
            const Lane lane;
            const bool exists = token + lane.t < seqlen_k;
#pragma unroll
            for (int j = 0; j < kKeyLoads; j++) load_if(exists && 32 * j + 8 * quad_pair(lane) < p.problem.headdim, k[j], k_ + 32 * j);
        }
        __device__ __forceinline__ void load_values(const DecodeParams& p, int seqlen_k, uint4 (&v)[kValueLoads][2], int of_token) const {
            const Lane lane;
#pragma unroll
            for (int j = 0; j < kValueLoads; j++)
#pragma unroll
                for (int h = 0; h < 2; h++)
                    load_if(of_token + lane.quad + 4 * h < seqlen_k && 64 * j + value_column(lane) < p.problem.headdim_v, v[j][h],
                            v_ + 4 * h * p.cache.v.row_stride + 64 * j);
        }

    private:
        // Of tokens that exist alone: behind them the table may hold anything.
        __device__ __forceinline__ void fetch_pages(const DecodeParams& p, const decode::Segment& s) {
            first_page_ = page_;
            const int mine = page_ + (threadIdx.x & 31);
            pages_ = p.cache.block_table && mine * static_cast<long long>(p.cache.rows) < s.seqlen_k ? page_of(p.cache, s.batch, mine) : -1;
        }
        __device__ __forceinline__ void enter_page(const DecodeParams& p, const decode::Segment& s) {
            const Lane lane;
            int page = __shfl_sync(~0u, pages_, page_ - first_page_);
            if (!p.cache.block_table) page = CachedSequence::entry(p.cache, s.batch);
            stands = has_page(p.cache, page);
            k_ = row_of_page(p.cache.k, page, row_ + lane.t) + s.head_k * p.cache.k.head_stride + 8 * quad_pair(lane);
            v_ = row_of_page(p.cache.v, page, row_ + lane.quad) + s.head_k * p.cache.v.head_stride + value_column(lane);
        }
    };

    __device__ __forceinline__ static int quad_pair(const Lane& lane) { return (lane.lane >> 2) & 3; }
    // Of each 64 columns of V, where a lane's eight are.
    __device__ __forceinline__ static int value_column(const Lane& lane) { return 16 * quad_pair(lane) + 8 * lane.half; }
    // The row of a tile and the tokens of a step whose scores a lane has after the exchange: two, from this one on.
    __device__ __forceinline__ static int score_row(const Lane& lane) { return (lane.t & 1) + ((lane.lane >> 3) & 1) * 2 + 4 * lane.half; }
    __device__ __forceinline__ static int score_token(const Lane& lane) { return (lane.t & 2) + (lane.lane & 4); }

    // Sums of the four quad-pairs' partial products; of each lane the two scores that score_row and score_token name.
    __device__ __forceinline__ static float2 sum_scores(const Lane& lane, const Accumulator& c) {
        const bool later = lane.lane & 4, lower = lane.lane & 8;
        float x[4];
#pragma unroll
        for (int i = 0; i < 4; i++) x[i] = (later ? c[4 + i] : c[i]) + __shfl_xor_sync(~0u, later ? c[i] : c[4 + i], 4);
        return make_float2((lower ? x[2] : x[0]) + __shfl_xor_sync(~0u, lower ? x[0] : x[2], 8),
                           (lower ? x[3] : x[1]) + __shfl_xor_sync(~0u, lower ? x[1] : x[3], 8));
    }

    __device__ __forceinline__ static void attend(const DecodeParams& p, const decode::Segment& s, const decode::RowInfo* row_info,
                                                  const decode::BlockParts<kParts>& parts) {
        const Lane lane;
        const int warp = threadIdx.x >> 5, part = warp / RowGroups, first_row = warp % RowGroups * (8 * RowTiles);
        const ScoreOptions& options = p.score_options;

        u32 q[RowTiles][kKeyLoads][4];
        load_queries(p, s, lane, first_row, q);
        Accumulator o[RowTiles][kValueLoads][2];
        SoftmaxRow softmax[RowTiles];
#pragma unroll
        for (int mt = 0; mt < RowTiles; mt++)
#pragma unroll
            for (int j = 0; j < kValueLoads; j++)
#pragma unroll
                for (int i = 0; i < 2; i++) clear(o[mt][j][i]);

        // the warps' pieces are contiguous too, and whole steps
        const int steps = (s.end - s.first + decode::kUnit - 1) / decode::kUnit, each = (steps + kParts - 1) / kParts;
        int left = min(each, steps - part * each);
        bool is_wrong = false;
        if (left > 0) {
            const int seqlen_k = s.seqlen_k;
            // tokens that all of the warp's rows see
            const int full_first = row_info[first_row + 8 * RowTiles - 1].position - p.problem.window_left;
            const int full_end = min(row_info[first_row].position + p.problem.window_right + 1, seqlen_k);
            const bool is_modified = options.softcap > 0.f || options.alibi_slopes;
            const float scale_log2 = is_modified ? 1.f : p.problem.scale_log2, inverse_scale_log2 = 1.f / scale_log2;

            Cursor cursor(p, s, s.first + part * each * decode::kUnit);
            uint4 k[kKeyLoads] = {}, v[kValueLoads][2] = {};
            is_wrong = !cursor.stands;
            if (!is_wrong) {
                cursor.load_keys(p, seqlen_k, k);
                cursor.load_values(p, seqlen_k, v, cursor.token);
            }
            while (left > 0 && !is_wrong) {
                Accumulator c[RowTiles];
#pragma unroll
                for (int mt = 0; mt < RowTiles; mt++) clear(c[mt]);
#pragma unroll
                for (int j = 0; j < kKeyLoads; j++)
#pragma unroll
                    for (int mt = 0; mt < RowTiles; mt++) {
                        mma_row_col(c[mt], q[mt][j][0], q[mt][j][1], k[j].x, k[j].y);
                        mma_row_col(c[mt], q[mt][j][2], q[mt][j][3], k[j].z, k[j].w);
                    }
                const int token = cursor.token;
                left--;
                if (left > 0) {
                    cursor.advance(p, s);
                    is_wrong = !cursor.stands;
                    if (!is_wrong) cursor.load_keys(p, seqlen_k, k);
                }

                float2 x[RowTiles];
#pragma unroll
                for (int mt = 0; mt < RowTiles; mt++) x[mt] = sum_scores(lane, c[mt]);
                if (is_modified) {
#pragma unroll
                    for (int mt = 0; mt < RowTiles; mt++) modify(p, row_info[first_row + 8 * mt + score_row(lane)], token + score_token(lane), x[mt]);
                }
                if (token < full_first || token + decode::kUnit > full_end) {
#pragma unroll
                    for (int mt = 0; mt < RowTiles; mt++) {
                        const int position = row_info[first_row + 8 * mt + score_row(lane)].position;
                        const int low = position - p.problem.window_left - token - score_token(lane);
                        const int high = min(position + p.problem.window_right, seqlen_k - 1) - token - score_token(lane);
                        if (low > 0 || high < 0) x[mt].x = negative_infinity();
                        if (low > 1 || high < 1) x[mt].y = negative_infinity();
                    }
                    // of tokens that do not exist registers hold what was there before
#pragma unroll
                    for (int h = 0; h < 2; h++)
                        if (token + lane.quad + 4 * h >= seqlen_k) {
#pragma unroll
                            for (int j = 0; j < kValueLoads; j++) v[j][h] = make_uint4(0, 0, 0, 0);
                        }
                }

                bool exceeds = false;
#pragma unroll
                for (int mt = 0; mt < RowTiles; mt++) exceeds |= fmaxf(x[mt].x, x[mt].y) > softmax[mt].limit;
                if (__any_sync(~0u, exceeds)) {
#pragma unroll
                    for (int mt = 0; mt < RowTiles; mt++) {
                        float m = fmaxf(x[mt].x, x[mt].y);
                        m = fmaxf(m, __shfl_xor_sync(~0u, m, 2));
                        m = fmaxf(m, __shfl_xor_sync(~0u, m, 4));
                        const float own = softmax[mt].template move_reference<MovedRows::kAll>(m, scale_log2, inverse_scale_log2);
                        const float other = __shfl_xor_sync(~0u, own, 8);
                        const float factor[2] = {lane.lane & 8 ? other : own, lane.lane & 8 ? own : other};
#pragma unroll
                        for (int j = 0; j < kValueLoads; j++)
#pragma unroll
                            for (int i = 0; i < 2; i++)
#pragma unroll
                                for (int e = 0; e < 8; e++) o[mt][j][i][e] *= factor[(e >> 1) & 1];
                    }
                }
                u32 a[RowTiles][4];
                // the lanes that have a row of operand A, in the order of tokens, are two apart
                const int source = (lane.lane & 17) | ((lane.lane & 2) << 2);
#pragma unroll
                for (int mt = 0; mt < RowTiles; mt++) {
                    const u32 packed = pack_probabilities(softmax[mt].probability(x[mt].x, scale_log2), softmax[mt].probability(x[mt].y, scale_log2));
#pragma unroll
                    for (int i = 0; i < 4; i++) a[mt][i] = __shfl_sync(~0u, packed, source + 2 * i);
                }
#pragma unroll
                for (int j = 0; j < kValueLoads; j++)
#pragma unroll
                    for (int mt = 0; mt < RowTiles; mt++) {
                        mma_row_row(o[mt][j][0], a[mt][0], a[mt][1], v[j][0].x, v[j][0].y);
                        mma_row_row(o[mt][j][1], a[mt][0], a[mt][1], v[j][0].z, v[j][0].w);
                        mma_row_row(o[mt][j][0], a[mt][2], a[mt][3], v[j][1].x, v[j][1].y);
                        mma_row_row(o[mt][j][1], a[mt][2], a[mt][3], v[j][1].z, v[j][1].w);
                    }
                if (left > 0 && !is_wrong) cursor.load_values(p, seqlen_k, v, cursor.token);
            }
        }

#pragma unroll
        for (int mt = 0; mt < RowTiles; mt++) {
            float sum = softmax[mt].sum;
            sum += __shfl_xor_sync(~0u, sum, 2);
            sum += __shfl_xor_sync(~0u, sum, 4);
            if (is_wrong) sum = __int_as_float(0x7fffffff);
            const int row = first_row + 8 * mt;
            if ((lane.lane & 6) == 0) parts.state[part][row + score_row(lane)] = {softmax[mt].reference, sum};
#pragma unroll
            for (int j = 0; j < kValueLoads; j++)
#pragma unroll
                for (int i = 0; i < 2; i++)
#pragma unroll
                    for (int e = 0; e < 8; e += 2) {
                        const int m = row + (lane.t & 1) + (e & 2) + 4 * lane.half, n = (lane.t & 2) + (e & 4);
                        const int column = 64 * j + 16 * quad_pair(lane) + 2 * (n & 4) + 4 * i + (n & 3);
                        *reinterpret_cast<float2*>(parts.output + (part * BLOCK_ROWS + m) * decode::kPartStride + column) =
                            make_float2(o[mt][j][i][e], o[mt][j][i][e + 1]);
                    }
        }
    }

    // Operand A: the row is m, and columns are those of the lane's keys. What does not exist is zero.
    __device__ __forceinline__ static void load_queries(const DecodeParams& p, const decode::Segment& s, const Lane& lane, int first_row,
                                                        u32 (&q)[RowTiles][kKeyLoads][4]) {
        const int group = p.problem.nheads / p.problem.nheads_k;
#pragma unroll
        for (int mt = 0; mt < RowTiles; mt++) {
            const int row = first_row + 8 * mt + lane.t, packed = s.row + row;
            const unsigned short* from = p.q.ptr + s.batch * p.q.batch_stride + (s.first_q + packed / group) * p.q.row_stride +
                                         (s.head_k * group + packed % group) * p.q.head_stride + 8 * quad_pair(lane);
#pragma unroll
            for (int j = 0; j < kKeyLoads; j++) {
                uint4 x = make_uint4(0, 0, 0, 0);
                if (row < s.rows && 32 * j + 8 * quad_pair(lane) < p.problem.headdim) x = load_global(from + 32 * j);
                x = flipped(x, p.problem.sign_flip);
                q[mt][j][0] = x.x, q[mt][j][1] = x.y, q[mt][j][2] = x.z, q[mt][j][3] = x.w;
            }
        }
    }

    // From products to units of log2.
    __device__ __forceinline__ static void modify(const DecodeParams& p, const decode::RowInfo& row, int token, float2& x) {
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

}  // namespace volta
