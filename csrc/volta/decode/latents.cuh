// The main loop of a decode block over latents: keys whose first HEADDIM_V columns are the values too.
//
// A latent is too long for a warp's registers, so the warps of a block take the same tokens and share columns: of keys, and of the
// output, the same ones. So a latent is loaded once, as operand of the scores. For the output a lane needs half of the columns of
// two tokens instead of all those of one, and exchanges halves with the lane that has the other token.
//
// A step is eight tokens. Each warp has the part of a score that its columns give: its four quad-pairs' parts (volta/mma.cuh) are
// added by a reduce-scatter, the warps' by way of shared memory, behind the step's one barrier. Then every warp has all scores,
// four neighbours of one row in a lane, and does the softmax for itself.
//
// Registers for two steps: those of the next are on their way while one is computed, and are loaded again once both products have
// read them.
#pragma once

#include "decode/attend.cuh"
#include "volta/mma.cuh"

namespace volta {

// As load_columns, of four columns.
__device__ __forceinline__ void load_rotary(bool exists, uint2& x, const unsigned short* from) {
    asm volatile("{.reg .pred p; setp.ne.s32 p, %3, 0; @p ld.global.nc.v2.u32 {%0, %1}, [%2];}"
                 : "+r"(x.x), "+r"(x.y)
                 : "l"(from), "r"(static_cast<int>(exists)));
}

// What a warp has of latents, queries and output, and its way through the products.
template <int RowTiles, int Warps, int Units>
struct LatentShare {
    static constexpr int kParts = 1;
    static constexpr int kWarpColumns = HEADDIM_V / Warps, kLoads = kWarpColumns / 32;
    // Of the columns behind the latent so many warps have 16 each. Warps four apart have one scheduler, so these are spread evenly.
    static constexpr int kRotaryWarps = (HEADDIM - HEADDIM_V) / 16;
    // Rows are dealt out in pairs of tiles.
    static constexpr int kPairs = RowTiles / 2;
    static_assert(RowTiles * 8 == BLOCK_ROWS && RowTiles % 2 == 0 && Warps * 32 == THREADS, "rows of src/kernels");
    static_assert(kLoads >= 1 && kRotaryWarps <= Warps && HEADDIM % 16 == 0 && HEADDIM_V % 32 == 0, "whole loads of a warp");

    // For the cursor: the lane's columns of the latent, and of what is behind it.
    struct Layout {
        using Lane = volta::Lane;
        __device__ __forceinline__ static int quad_pair(const Lane& l) { return (l.lane >> 2) & 3; }
        __device__ __forceinline__ static int warp() { return threadIdx.x >> 5; }
        // of the quad-pairs that keep the later tokens' scores these are an accumulator's first
        __device__ __forceinline__ static int key_token(const Lane& l) { return l.t ^ (quad_pair(l) & 2 ? 4 : 0); }
        __device__ __forceinline__ static int key_column(const Lane& l) { return kWarpColumns * warp() + 8 * quad_pair(l); }
        __device__ __forceinline__ static int value_token(const Lane& l) { return key_token(l); }
        __device__ __forceinline__ static int value_column(const Lane& l) { return HEADDIM_V + 16 * warp() + 4 * quad_pair(l); }
    };
    using Cursor = decode::Cursor<Layout>;

    // Tokens of a step, as operand B of the scores.
    struct Latents {
        uint4 latent[kLoads] = {};
        uint2 rotary = {};
    };
    struct Queries {
        u32 latent[RowTiles][kLoads][4];
        u32 rotary[RowTiles][2];
    };

    // Steps begin at multiples of their tokens, so no page ends in one.
    static constexpr int kUnits = Units, kTokens = decode::kUnit * kUnits;

    __device__ __forceinline__ static bool has_rotary() { return kRotaryWarps == Warps || threadIdx.x < 32 * kRotaryWarps; }

    __device__ __forceinline__ static void load(const DecodeParams& p, const Cursor& cursor, const Lane& lane, int unit, int end,
                                                Latents& x) {
        const bool exists = cursor.token() + decode::kUnit * unit + Layout::key_token(lane) < end;
        const long long offset = unit * decode::kUnit * p.cache.k.row_stride;
#pragma unroll
        for (int j = 0; j < kLoads; j++) decode::load_columns<0>(exists, x.latent[j], cursor.keys() + offset + 32 * j);
        load_rotary(exists && has_rotary(), x.rotary, cursor.values() + offset);
    }

    // This warp's part of the scores of eight tokens, in each quad-pair that of its columns.
    __device__ __forceinline__ static void multiply(const Queries& q, const Latents& x, Accumulator (&c)[RowTiles]) {
#pragma unroll
        for (int mt = 0; mt < RowTiles; mt++) clear(c[mt]);
#pragma unroll
        for (int j = 0; j < kLoads; j++) {
            const uint4& y = x.latent[j];
#pragma unroll
            for (int mt = 0; mt < RowTiles; mt++) mma_row_col(c[mt], q.latent[mt][j][0], q.latent[mt][j][1], y.x, y.y);
#pragma unroll
            for (int mt = 0; mt < RowTiles; mt++) mma_row_col(c[mt], q.latent[mt][j][2], q.latent[mt][j][3], y.z, y.w);
        }
        if (has_rotary()) {
#pragma unroll
            for (int mt = 0; mt < RowTiles; mt++) mma_row_col(c[mt], q.rotary[mt][0], q.rotary[mt][1], x.rotary.x, x.rotary.y);
        }
    }
    // A reduce-scatter over quad-pairs: of each pair of tiles a lane keeps, of the tile that it has first, the first four of its
    // tokens, two rows of two: put(pair, first row, second row).
    template <class Put>
    __device__ __forceinline__ static void add_quad_pairs(const Accumulator (&c)[RowTiles], Put put) {
#pragma unroll
        for (int i = 0; i < kPairs; i++) {
            float half[8], sum[4];
#pragma unroll
            for (int e = 0; e < 8; e++) half[e] = c[2 * i][e] + __shfl_xor_sync(~0u, c[2 * i + 1][e], 4);
#pragma unroll
            for (int e = 0; e < 4; e++) sum[e] = half[e] + __shfl_xor_sync(~0u, half[4 + e], 8);
            put(i, make_float2(sum[0], sum[1]), make_float2(sum[2], sum[3]));
        }
    }

    // Operand B of four tokens has each token twice, with different columns: this lane's, and those of the lane 16 further.
    __device__ __forceinline__ static void to_values(const Lane& lane, const uint4& y, u32 (&b)[2][2]) {
        const u32 z0 = __shfl_xor_sync(~0u, lane.half ? y.x : y.z, 16);
        const u32 z1 = __shfl_xor_sync(~0u, lane.half ? y.y : y.w, 16);
        b[0][0] = lane.half ? z0 : y.x, b[0][1] = lane.half ? z1 : y.y;
        b[1][0] = lane.half ? y.z : z0, b[1][1] = lane.half ? y.w : z1;
    }

    // Of tokens that do not exist registers hold what was there before.
    __device__ __forceinline__ static void clear_missing(const Lane& lane, int token, int end, Latents& x) {
        if (token + Layout::key_token(lane) >= end) {
#pragma unroll
            for (int j = 0; j < kLoads; j++) x.latent[j] = make_uint4(0, 0, 0, 0);
        }
    }

    __device__ __forceinline__ static void write_output(const Lane& lane, const Accumulator (&o)[RowTiles][kLoads], float* to) {
        const int first_row = (lane.t & 1) + 4 * lane.half;
#pragma unroll
        for (int mt = 0; mt < RowTiles; mt++)
#pragma unroll
            for (int j = 0; j < kLoads; j++)
#pragma unroll
                for (int e = 0; e < 8; e += 2) {
                    const int row = 8 * mt + first_row + (e & 2);
                    const int column =
                        kWarpColumns * Layout::warp() + 32 * j + 8 * Layout::quad_pair(lane) + (lane.t & 2) + (e & 4);
                    *reinterpret_cast<float2*>(to + row * decode::kPartStride + column) = make_float2(o[mt][j][e], o[mt][j][e + 1]);
                }
    }

    // What does not exist is zero.
    __device__ __forceinline__ static void load_queries(const DecodeParams& p, const decode::Segment& s, Queries& q) {
        const Lane lane;
        const int group = p.problem.nheads;
#pragma unroll
        for (int mt = 0; mt < RowTiles; mt++) {
            // whoever keeps the scores of a pair's second tile has that first
            const int row = 8 * (mt ^ (Layout::quad_pair(lane) & 1)) + lane.t, packed = s.row + row;
            const bool exists = row < s.rows;
            const unsigned short* from = p.q.ptr + s.batch * p.q.batch_stride + (s.first_q + packed / group) * p.q.row_stride +
                                         packed % group * p.q.head_stride;
#pragma unroll
            for (int j = 0; j < kLoads; j++) {
                uint4 x = make_uint4(0, 0, 0, 0);
                if (exists) x = load_global(from + Layout::key_column(lane) + 32 * j);
                x = flipped(x, p.problem.sign_flip);
                q.latent[mt][j][0] = x.x, q.latent[mt][j][1] = x.y, q.latent[mt][j][2] = x.z, q.latent[mt][j][3] = x.w;
            }
            uint2 x = make_uint2(0, 0);
            if (exists && has_rotary()) x = __ldg(reinterpret_cast<const uint2*>(from + Layout::value_column(lane)));
            q.rotary[mt][0] = x.x ^ p.problem.sign_flip, q.rotary[mt][1] = x.y ^ p.problem.sign_flip;
        }
    }
};

// Every warp has all scores behind the barrier, four neighbours of one row in a lane, and does the softmax for itself.
template <int RowTiles, int Warps>
struct AttendToLatents : LatentShare<RowTiles, Warps, 2> {
    using Share = LatentShare<RowTiles, Warps, 2>;
    using Share::kLoads, Share::kParts, Share::kPairs, Share::kUnits, Share::kTokens;

    // The warps' parts of a step's scores, twice: a warp may write those of the next step while another reads. Of two row tiles and
    // four tokens eight rows of these; 16 floats more than that, so that four such lie in different banks.
    static constexpr int kHalf = 48, kPair = 4 * kHalf, kPart = kPair * kPairs * kUnits;
    static_assert(2 * Warps * kPart <= BLOCK_ROWS * decode::kPartStride, "scores lie where outputs will");

    __device__ __forceinline__ static void attend(const DecodeParams& p, const decode::Segment& s, const decode::RowInfo* row_info,
                                                  const decode::BlockParts<kParts>& parts) {
        const Lane lane;
        const int warp = threadIdx.x >> 5, quad_pair = Share::Layout::quad_pair(lane);
        // after the reduce-scatter: of a pair of tiles the second, and the later half of the tokens
        const bool second = quad_pair & 1, later = quad_pair >> 1;
        // of the accumulator's rows the first; the other is two further
        const int first_row = (lane.t & 1) + 4 * lane.half;
        const float scale_log2 = p.problem.scale_log2, inverse_scale_log2 = 1.f / scale_log2;

        typename Share::Queries q;
        Share::load_queries(p, s, q);
        Accumulator o[RowTiles][kLoads] = {};
        SoftmaxRow softmax[kPairs];
        bool is_wrong = false;

        const int begin = s.first, end = s.end;
        if (begin < end) {
            // tokens that all rows see
            const int full_first = max(row_info[BLOCK_ROWS - 1].position - p.problem.window_left, begin);
            const int full_end = min(row_info[0].position + p.problem.window_right + 1, end);
            int buffer = 0, token = begin / kTokens * kTokens;

            typename Share::Cursor cursor(p, s, token);
            is_wrong = !cursor.stands();
            typename Share::Latents x[kUnits];
            int limit = cursor.stands() ? end : 0;  // no token from here on is loaded
#pragma unroll
            for (int u = 0; u < kUnits; u++) Share::load(p, cursor, lane, u, limit, x[u]);
#pragma unroll 1
            for (; token < end; token += kTokens) {
                float* to = parts.output + buffer + warp * kPart + quad_pair * kHalf + first_row * 4 + (lane.t & 2);
#pragma unroll
                for (int u = 0; u < kUnits; u++) {
                    Accumulator c[RowTiles];
                    Share::multiply(q, x[u], c);
                    Share::add_quad_pairs(c, [&](int i, float2 first, float2 second) {
                        float* pair = to + kPair * (kPairs * u + i);
                        *reinterpret_cast<float2*>(pair) = first;
                        *reinterpret_cast<float2*>(pair + 8) = second;
                    });
                }
                __syncthreads();
                const float* from = parts.output + buffer + quad_pair * kHalf + lane.t * 4;
                float4 scores[kPairs][kUnits];
#pragma unroll
                for (int u = 0; u < kUnits; u++)
#pragma unroll
                    for (int i = 0; i < kPairs; i++) {
                        float4& x = scores[i][u];
                        x = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
                        for (int w = 0; w < Warps; w++) {
                            const float4 y = *reinterpret_cast<const float4*>(from + kPair * (kPairs * u + i) + w * kPart);
                            x.x += y.x, x.y += y.y, x.z += y.z, x.w += y.w;
                        }
                    }
                buffer = Warps * kPart - buffer;

                if (token < full_first || token + kTokens > full_end) {
#pragma unroll
                    for (int i = 0; i < kPairs; i++) {
                        const int position = row_info[16 * i + 8 * second + lane.t].position;
#pragma unroll
                        for (int u = 0; u < kUnits; u++) {
                            const int first = token + decode::kUnit * u + 4 * later;
                            const int low = max(position - p.problem.window_left, begin) - first;
                            const int high = min(position + p.problem.window_right, end - 1) - first;
                            float4& x = scores[i][u];
                            if (low > 0 || high < 0) x.x = negative_infinity();
                            if (low > 1 || high < 1) x.y = negative_infinity();
                            if (low > 2 || high < 2) x.z = negative_infinity();
                            if (low > 3 || high < 3) x.w = negative_infinity();
                        }
                    }
#pragma unroll
                    for (int u = 0; u < kUnits; u++) Share::clear_missing(lane, token + decode::kUnit * u, end, x[u]);
                }

                float largest[kPairs];
                bool exceeds = false;
#pragma unroll
                for (int i = 0; i < kPairs; i++) {
                    largest[i] = negative_infinity();
#pragma unroll
                    for (const float4& x : scores[i]) largest[i] = fmaxf(largest[i], fmaxf(fmaxf(x.x, x.y), fmaxf(x.z, x.w)));
                    exceeds |= largest[i] > softmax[i].limit;
                }
                if (__any_sync(~0u, exceeds)) {
#pragma unroll
                    for (int i = 0; i < kPairs; i++) {
                        const float m = fmaxf(largest[i], __shfl_xor_sync(~0u, largest[i], 8));
                        const float factor = softmax[i].template move_reference<MovedRows::kAll>(m, scale_log2, inverse_scale_log2);
#pragma unroll
                        for (int mt = 0; mt < 2; mt++) {
                            // from the lanes that have the accumulator's rows
                            const int source = (first_row & 3) + 16 * lane.half + 4 * mt;
                            const float of[2] = {__shfl_sync(~0u, factor, source), __shfl_sync(~0u, factor, source + 2)};
#pragma unroll
                            for (int j = 0; j < kLoads; j++)
#pragma unroll
                                for (int e = 0; e < 8; e++) o[2 * i + mt][j][e] *= of[(e >> 1) & 1];
                        }
                    }
                }
                if (token + kTokens < end) {
                    cursor.template advance<kTokens>(p, s);
                    is_wrong |= !cursor.stands();
                }
                if (!cursor.stands() || token + kTokens >= end) limit = 0;
#pragma unroll
                for (int u = 0; u < kUnits; u++) {
                    // operand A of both halves of the tokens
                    u32 a[RowTiles][2][2];
#pragma unroll
                    for (int i = 0; i < kPairs; i++) {
                        SoftmaxRow& row = softmax[i];
                        const float4& y = scores[i][u];
                        const u32 p0 = pack_probabilities(row.probability(y.x, scale_log2), row.probability(y.y, scale_log2));
                        const u32 p1 = pack_probabilities(row.probability(y.z, scale_log2), row.probability(y.w, scale_log2));
#pragma unroll
                        for (int mt = 0; mt < 2; mt++)
#pragma unroll
                            for (int h = 0; h < 2; h++) {
                                const int source = (lane.lane & 19) | (4 * mt + 8 * (h ^ later));
                                a[2 * i + mt][h][0] = __shfl_sync(~0u, p0, source);
                                a[2 * i + mt][h][1] = __shfl_sync(~0u, p1, source);
                            }
                    }
#pragma unroll
                    for (int j = 0; j < kLoads; j++) {
                        u32 b[2][2];
                        Share::to_values(lane, x[u].latent[j], b);
#pragma unroll
                        for (int mt = 0; mt < RowTiles; mt++)
#pragma unroll
                            for (int h = 0; h < 2; h++) mma_row_row(o[mt][j], a[mt][h][0], a[mt][h][1], b[h][0], b[h][1]);
                    }
                    Share::load(p, cursor, lane, u, limit, x[u]);
                }
            }
        }

        // scores were read by all
        __syncthreads();
#pragma unroll
        for (int i = 0; i < kPairs; i++) {
            float sum = softmax[i].sum;
            sum += __shfl_xor_sync(~0u, sum, 8);
            if (is_wrong) sum = __int_as_float(0x7fffffff);
            if (warp == 0 && !later) parts.state[16 * i + 8 * second + lane.t] = {softmax[i].reference, sum};
        }
        Share::write_output(lane, o, parts.output);
    }
};

}  // namespace volta
