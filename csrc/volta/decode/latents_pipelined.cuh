// The main loop of a decode block over latents for more rows, whose time goes into arithmetic and not into memory: a pipeline.
//
// A step is eight tokens. Between two barriers a block multiplies the probabilities of one step with its values, makes
// probabilities of the next step's scores, and computes the scores of the one behind that: three things that do not wait for each
// other. The warps' parts of scores, and probabilities, go by way of shared memory, so that each thread has one score and no warp
// does what another has done.
#pragma once

#include "volta/decode/latents.cuh"

namespace volta {

template <int RowTiles, int Warps>
struct PipelinedLatents : LatentShare<RowTiles, Warps, 1> {
    using Share = LatentShare<RowTiles, Warps, 1>;
    using Share::kLoads, Share::kParts, Share::kPairs, Share::kUnits, Share::kTokens;
    static_assert(Warps == 2 * RowTiles, "a thread has one score of a step");

    // The warps' parts of a step's scores. Of two row tiles and four tokens eight rows of these; 8 floats more than that, so that
    // neither what a warp writes nor what it reads at once lies in the same banks.
    static constexpr int kHalf = 40, kPair = 4 * kHalf, kPart = kPair * kPairs * kUnits;

    __device__ __forceinline__ static float load_shared(unsigned at) {
        float x;
        asm volatile("ld.shared.f32 %0, [%1];" : "=f"(x) : "r"(at));
        return x;
    }
    __device__ __forceinline__ static uint2 load_shared2(unsigned at) {
        uint2 x;
        asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(x.x), "=r"(x.y) : "r"(at));
        return x;
    }
    __device__ __forceinline__ static void store_shared(unsigned at, unsigned x) {
        asm volatile("st.shared.u16 [%0], %1;" ::"r"(at), "h"(static_cast<unsigned short>(x)));
    }
    __device__ __forceinline__ static void store_shared2(unsigned at, float2 x) {
        asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(at), "f"(x.x), "f"(x.y));
    }
    __device__ __forceinline__ static void load_next(const typename Share::Cursor& cursor, bool exists,
                                                     typename Share::Latents& x) {
#pragma unroll
        for (int j = 0; j < kLoads; j++) decode::load_columns<0>(exists, x.latent[j], cursor.keys() + 32 * j);
        load_rotary(exists && Share::has_rotary(), x.rotary, cursor.values());
    }

    struct Shared {
        float scores[2][Warps * kPart];
        unsigned short probabilities[2][BLOCK_ROWS][kTokens];
        float factors[2][BLOCK_ROWS];
    };
    static_assert(sizeof(Shared) <= BLOCK_ROWS * decode::kPartStride * sizeof(float), "all of it lies where outputs will");

    __device__ __forceinline__ static void attend(const DecodeParams& p, const decode::Segment& s, const decode::RowInfo* row_info,
                                                  const decode::BlockParts<kParts>& parts) {
        const Lane lane;
        const int warp = threadIdx.x >> 5, quad_pair = Share::Layout::quad_pair(lane);
        Shared& shared = *reinterpret_cast<Shared*>(parts.output);
        // of the accumulator's rows the first; the other is two further
        const int first_row = (lane.t & 1) + 4 * lane.half;
        const float scale_log2 = p.problem.scale_log2, inverse_scale_log2 = 1.f / scale_log2;

        // The thread's score of a step: token own_token of row own_row, of which a warp has four.
        const int pair = warp >> 2, second = (warp >> 1) & 1, row_of_tile = 4 * (warp & 1) + ((lane.lane >> 2) & 3);
        const int later = lane.lane >> 4, own_token = 4 * later + (lane.lane & 3);
        const int own_row = 16 * pair + 8 * second + row_of_tile;
        const int own_score = kPair * pair + kHalf * (second + 2 * later) + 4 * row_of_tile + (lane.lane & 3);
        constexpr int kRowMates[3] = {1, 2, 16};

        typename Share::Queries q;
        Share::load_queries(p, s, q);
        Accumulator o[RowTiles][kLoads] = {};
        SoftmaxRow softmax;
        bool is_wrong = false;

        const int begin = s.first, end = s.end;
        if (begin < end) {
            // what the row sees, and what all rows see
            const int position = row_info[own_row].position;
            const int low = max(position - p.problem.window_left, begin) - own_token;
            const int high = min(position + p.problem.window_right, end - 1) - own_token;
            const int first_token = begin / kTokens * kTokens, last = (end + kTokens - 1) / kTokens * kTokens;
            typename Share::Cursor cursor(p, s, first_token);
            is_wrong = !cursor.stands();
            typename Share::Latents x;
            int limit = cursor.stands() ? end : 0;  // no token from here on is loaded
            Share::load(p, cursor, lane, 0, limit, x);
            // values of the step that has probabilities, and of the one that has scores
            u32 old_values[kLoads][2][2] = {}, values[kLoads][2][2] = {};
            bool moved = false;  // a reference of the step before, so that there are factors
            // what the first steps multiply, whose values are zero, is no NaN
            if (threadIdx.x < 2 * BLOCK_ROWS)
                *reinterpret_cast<uint4*>(&shared.probabilities[0][0][0] + kTokens * threadIdx.x) = make_uint4(0, 0, 0, 0);
            __syncthreads();
            int parity = 0;
            // Addresses in shared memory. The compiler would rather compute each of them again in every step, but for what a
            // shuffle gave.
            const unsigned base = static_cast<unsigned>(__cvta_generic_to_shared(&shared));
            constexpr unsigned kScores = sizeof(shared.scores[0]), kProbabilities = sizeof(shared.probabilities[0]);
            const auto fixed = [](unsigned x) { return __shfl_sync(~0u, x, threadIdx.x & 31); };
            const unsigned write_scores = fixed(base + 4 * (warp * kPart + quad_pair * kHalf + first_row * 4 + (lane.t & 2)));
            const unsigned read_scores = fixed(base + 4 * own_score);
            const unsigned at_probabilities = base + 2 * kScores;
            const unsigned write_probability = fixed(at_probabilities + 2 * (own_row * kTokens + own_token));
            const unsigned read_probabilities = fixed(at_probabilities + 2 * (lane.t * kTokens + 4 * (quad_pair >> 1)));
            const int key_token = fixed(Share::Layout::key_token(lane));

            // Two steps more than there are tokens for: the first and the last have nothing in some of the stages.
#pragma unroll 1
            for (int token = first_token; token < last + 2 * kTokens; token += kTokens) {
                if (moved) {
#pragma unroll
                    for (int mt = 0; mt < RowTiles; mt++) {
                        const float* of = shared.factors[parity ^ 1] + 8 * mt + first_row;
                        const float factor[2] = {of[0], of[2]};
#pragma unroll
                        for (int j = 0; j < kLoads; j++)
#pragma unroll
                            for (int e = 0; e < 8; e++) o[mt][j][e] *= factor[(e >> 1) & 1];
                    }
                }
                const bool has_next = token + kTokens < end;
                if (has_next) {
                    cursor.template advance<kTokens>(p, s);
                    is_wrong |= !cursor.stands();
                }
                limit = has_next && cursor.stands() ? end : 0;
                // of tokens that do not exist registers hold what was there before
                if (token + kTokens > end) Share::clear_missing(lane, token, end, x);

                // the scores of the step before
                const unsigned scores_from = read_scores + (parity ? 0 : kScores);
                float part[Warps];
#pragma unroll
                for (int w = 0; w < Warps; w++) part[w] = load_shared(scores_from + 4 * w * kPart);
#pragma unroll
                for (int n = Warps / 2; n > 0; n /= 2)
#pragma unroll
                    for (int w = 0; w < n; w++) part[w] += part[w + n];
                float sum = part[0];
                // the probabilities of the one before that
                const unsigned from = read_probabilities + (parity ? 0 : kProbabilities);
#pragma unroll
                for (int mt = 0; mt < RowTiles; mt++)
#pragma unroll
                    for (int h = 0; h < 2; h++) {
                        const uint2 a = load_shared2((from ^ (8 * h)) + 16 * kTokens * mt);
#pragma unroll
                        for (int j = 0; j < kLoads; j++) mma_row_row(o[mt][j], a.x, a.y, old_values[j][h][0], old_values[j][h][1]);
                    }
                if (token - kTokens < low || token - kTokens > high) sum = negative_infinity();
                float factor = 1.f;
                const bool moves = __any_sync(~0u, sum > softmax.limit);
                if (moves) {
                    float m = sum;
#pragma unroll
                    for (int mate : kRowMates) m = fmaxf(m, __shfl_xor_sync(~0u, m, mate));
                    factor = softmax.template move_reference<MovedRows::kAll>(m, scale_log2, inverse_scale_log2);
                }
                if (own_token == 0) shared.factors[parity][own_row] = factor;
                const float probability = softmax.probability(sum, scale_log2);
                store_shared(write_probability + (parity ? kProbabilities : 0), pack_probabilities(probability, probability));

                const unsigned to = write_scores + (parity ? kScores : 0);
                Accumulator c[RowTiles];
                Share::multiply(q, x, c);
                Share::add_quad_pairs(c, [&](int i, float2 first, float2 second) {
                    store_shared2(to + 4 * kPair * i, first);
                    store_shared2(to + 4 * kPair * i + 32, second);
                });
#pragma unroll
                for (int j = 0; j < kLoads; j++) {
#pragma unroll
                    for (int i = 0; i < 4; i++) old_values[j][i >> 1][i & 1] = values[j][i >> 1][i & 1];
                    Share::to_values(lane, x.latent[j], values[j]);
                }
                load_next(cursor, cursor.token() + key_token < limit, x);
                parity ^= 1;
                moved = __syncthreads_or(moves);
            }
        }

        float sum = softmax.sum;
#pragma unroll
        for (int mate : kRowMates) sum += __shfl_xor_sync(~0u, sum, mate);
        if (is_wrong) sum = __int_as_float(0x7fffffff);
        if (own_token == 0) parts.state[own_row] = {softmax.reference, sum};
        Share::write_output(lane, o, parts.output);
    }
};

}  // namespace volta
