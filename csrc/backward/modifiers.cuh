// What general kernels do to scores, probabilities and their gradients (score_modifier.cuh), for any layout (score_place.cuh).
//
// They take a warp's tiles of scores in a rolled loop, for the instruction cache. Registers cannot be indexed: the
// loop works on the first tile, and the others move down by one (next_tile). What only some problems ask for is derived
// again at every step, so that it holds no registers in between.
#pragma once

#include "backward/memory.cuh"
#include "backward/score_coord.cuh"
#include "score_mod.cuh"

template <int M, int N, int E>
__device__ __forceinline__ void next_tile(float (&s)[M][N][E]) {
#pragma unroll
    for (int tile = 1; tile < M * N; tile++)
#pragma unroll
        for (int v = 0; v < E; v++) s[(tile - 1) / N][(tile - 1) % N][v] = s[tile / N][tile % N][v];
}

// ---- scores ---------------------------------------------------------------------------------------

// From q.k - lse / scale to the capped score minus lse, in units of log2. `statistic` is the -lse / scale that an element
// began with, slope softcap's derivative there.
__device__ __forceinline__ float capped_score(float s, float statistic, const BwdParams& p, const Softcap& softcap, float& slope) {
    // Rows without probabilities have -inf, and s is that too.
    const float logistic = softcap.logistic(s - fmaxf(statistic, kLowest));
    slope = Softcap::derivative(logistic);
    return fmaf(-2.f * softcap.cap, logistic, fmaf(statistic, p.problem.scale_log2, softcap.cap));
}

// ALiBi and bias, to scores in units of log2. Queries from query_end on do not exist, or see none of the keys.
template <class Layout>
__device__ __forceinline__ void add_bias(typename Layout::Tile& s, const BwdParams& p, int batch, int head, int query_end,
                                         const ScoreCoord<Layout>& coord) {
    const ScoreOptions& options = p.score_options;
    const Bias bias(p.problem, options, batch, head);
    if constexpr (Layout::kKeys == 2) {
        uint4 loaded[Layout::kRows];
#pragma unroll
        for (int r = 0; r < Layout::kRows; r++)
            loaded[r] = bias.load4(options, min(coord.query(Layout::element(r, 0)), query_end - 1), coord.key(0) & ~3);
        float2 of_keys[Layout::kRows];
        Bias::every_second(options, loaded, coord.key(0) & 1, of_keys);
#pragma unroll
        for (int r = 0; r < Layout::kRows; r++) {
            float &first_key = s[Layout::element(r, 0)], &second_key = s[Layout::element(r, 1)];
            first_key = fmaf(of_keys[r].x, kLog2e, first_key);
            second_key = fmaf(of_keys[r].y, kLog2e, second_key);
        }
    } else {
#pragma unroll
        for (int r = 0; r < Layout::kRows; r++) {
            float of_keys[4];
            Bias::to_float(options, bias.load4(options, min(coord.query(Layout::element(r, 0)), query_end - 1), coord.key(0)),
                           of_keys);
#pragma unroll
            for (int j = 0; j < 4; j++) s[Layout::element(r, j)] = fmaf(of_keys[j], kLog2e, s[Layout::element(r, j)]);
        }
    }
}
template <class Layout>
__device__ __forceinline__ void add_position_terms(typename Layout::Tile& s, const BwdParams& p, int head, int query_end,
                                                   const ScoreCoord<Layout>& coord) {
    const ScoreOptions& options = p.score_options;
    const int batch = remat_block_batch();
    if (uses_alibi(options)) {
        const BlockSeqlenInfo sequence(p.problem, p.lengths, batch);
        const Alibi alibi(options, batch, head, sequence.seqlen_q(), sequence.seqlen_k());
        // one conversion, by the XU pipe, for all elements
        const float first = alibi.distance(coord.query(0), coord.key(0));
#pragma unroll
        for (int v = 0; v < Layout::kElements; v++)
            s[v] = alibi(s[v], first + static_cast<float>(ScoreCoord<Layout>::query_minus_key(v)));
    }
    if (uses_bias(options)) add_bias(s, p, batch, head, query_end, coord);
}

// Adds the gradient of a tile's scores to that of the bias.
template <class Layout>
__device__ __forceinline__ void add_bias_gradient(const typename Layout::Tile& ds, const BwdParams& p, int head,
                                                  const ScoreCoord<Layout>& coord) {
    const int batch = remat_block_batch();
    const BlockSeqlenInfo sequence(p.problem, p.lengths, batch);
    float* base = p.dbias + batch * p.dbias_batch_stride + head * p.dbias_head_stride;
#pragma unroll
    for (int v = 0; v < Layout::kElements; v++) {
        const int query = coord.query(v), key = coord.key(v);
        if (query < sequence.seqlen_q() && key < sequence.seqlen_k())
            add_global(base + query * p.dbias_row_stride + key * p.dbias_key_stride, ds[v]);
    }
}

// ---- dropout --------------------------------------------------------------------------------------

// The gradient of a probability behind dropout, from dP - delta: it is delta's part alone where the probability was dropped.
__device__ __forceinline__ float dropped_gradient(float dp, float neg_delta, bool is_dropped, float dropout_scale) {
    return is_dropped ? neg_delta : fmaf(dp - neg_delta, dropout_scale, neg_delta);
}

// 0xffff where `signs` has the sign bit of a half. (prmt copies signs where the selector says 8 and more; __byte_perm does not.)
__device__ __forceinline__ unsigned sign_masks(unsigned signs) {
    unsigned halves;
    asm("prmt.b32 %0, %1, 0, 0xbb99;" : "=r"(halves) : "r"(signs));
    return halves;
}

__device__ __forceinline__ Philox philox_of(const BwdParams& p, int head) {
    return Philox(p.score_options.rng_state, (p.lengths.first_batch + remat_block_batch()) * p.problem.nheads + head);
}

// Of two calls, one of this lane's and one of another's, that have rows 4 apart, what is of the lane's own rows: those with or
// without the bit of 4. The lane's call was for its row number `mine_is`, 0 or 1; the result is as kept_bits of these two rows.
__device__ __forceinline__ unsigned merge_calls(unsigned mine, unsigned others, int has_bit_of_4, int mine_is) {
    mine = mine >> kept_bit(has_bit_of_4, 0) & kBitsOfRow;
    others = others >> kept_bit(has_bit_of_4, 0) & kBitsOfRow;
    return mine_is ? others | mine << kept_bit(1, 0) : mine | others << kept_bit(1, 0);
}

// Which of a tile's probabilities dropout keeps, where a lane has all of its four keys of two queries: bit
// kept_bit(row_of(v), key_slot(v)) of element v. The lane kQueryMate beside it has the queries with which these share their calls,
// and each draws for one of two. All lanes of the warp together. (Where a lane has two keys of four, sharing is the family's.)
template <class Layout>
__device__ __forceinline__ unsigned draw_kept_rows(const Philox& philox, const DropoutRule& rule, const ScoreCoord<Layout>& coord) {
    static_assert(Layout::kKeys == 4 && Layout::kRows == 2, "see above");
    const int has_bit_of_4 = coord.query(0) >> 2 & 1;
    const int row = (coord.query(0) & ~4) + has_bit_of_4 * Layout::row_slot(1);
    const unsigned mine = rule.kept_bits(philox.numbers(row, coord.key(0)));
    return merge_calls(mine, __shfl_xor_sync(~0u, mine, Layout::kQueryPartnerMask), has_bit_of_4, has_bit_of_4);
}
template <class Layout>
__device__ __forceinline__ bool is_kept(unsigned bits, int v) {
    return bits >> kept_bit(Layout::row_of(v), Layout::key_slot(v)) & 1;
}
