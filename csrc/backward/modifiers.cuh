// The score function (softcap), ALiBi, bias and dropout in the backward pass, for any Layout, which says what scores a lane has
// (score_coord.cuh). Formulas: score_mod.cuh. Used by both families' kernels between S = Q K^T and P = 2^(S - lse), and between dP
// and dS. Kernels compiled for one feature have parts in other forms:
// {turing/backward/one_feature,volta/backward/joint_scores}.cuh.
//
// Kernels call these functions in a rolled loop over a warp's tiles, to fit the instruction cache. Registers cannot be indexed
// dynamically, so the loop works on the first tile, and next_tile moves the others down by one. Every step reloads the
// parameters of features and blockIdx.z (remat_block_batch()), so that they hold no registers in between.
//
//   s, ds, dp                 a tile's scores (or products), the gradients of S and of P
//   element(r, j)             a lane's element v of query r < kRows and key j < kKeys (2 or 4)
//   row_slot(r), key_slot(v)  its query and key, counted from the lane's first
#pragma once

#include "backward/score_coord.cuh"  // ScoreCoord: query and key of a lane's elements; BwdParams (src/params)
#include "ptx.cuh"  // remat_block_batch(); add_global(): an atomic addition
#include "score_mod.cuh"  // Alibi, Bias; Philox: random numbers; DropoutRule: what they keep; uses_...(): a problem's features

// Moves all tiles but the first down by one: the rolled loop's next tile becomes the first.
template <int M, int N, int E>
__device__ __forceinline__ void next_tile(float (&s)[M][N][E]) {
#pragma unroll
    for (int tile = 1; tile < M * N; tile++)
#pragma unroll
        for (int v = 0; v < E; v++) s[(tile - 1) / N][(tile - 1) % N][v] = s[tile / N][tile % N][v];
}

// ---- scores ---------------------------------------------------------------------------------------

// Returns f(softmax_scale * product) + addend in log2 units, where f is the score function and `addend` the -lse of the exponent.
// Sets `slope` to f', by which the caller multiplies dS. Both follow from one state (score_function.cuh): f is
// factor * state + constant, f' derivative(state).
__device__ __forceinline__ float function_score(float product, float addend, const ScoreFunction& function, float& slope) {
    const float state = function.state(product);
    slope = ScoreFunction::derivative(state);
    return function.score(state, function.constant() + addend);
}

// Adds the bias to scores in log2 units. Queries from query_end on do not exist, or see none of the keys: they read the bias of
// query_end - 1, which exists, and their P is 0.
template <class Layout>
__device__ __forceinline__ void add_bias(typename Layout::Tile& s, const BwdParams& p, int batch, int head, int query_end,
                                         const ScoreCoord<Layout>& coord) {
    const ScoreOptions& options = p.score_options;
    const Bias bias(p.problem, options, batch, head);
    if constexpr (Layout::kKeys == 2) {
        // A load brings an aligned group of four keys. The lane has two of them, (0, 2) or (1, 3), which every_second() picks.
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
// Returns ALiBi of a query head: alibi(score, distance) is the score with its term.
__device__ __forceinline__ Alibi alibi_of(const BwdParams& p, int batch, int head) {
    const BlockSeqlenInfo sequence(p.problem, p.lengths, batch);
    return Alibi(p.score_options, batch, head, sequence.seqlen_q(), sequence.seqlen_k());
}
// Adds ALiBi's term to scores, in log2 units, of Tiles tiles. tile(n): kTileQueries queries after tile n - 1. `coord`: of tile 0.
template <class Layout, int Tiles, class TileOf>
__device__ __forceinline__ void add_alibi(const Alibi& alibi, const ScoreCoord<Layout>& coord, TileOf tile) {
    // The distance query + offset - key of element 0: one int-to-float conversion, on the slow XU pipe, serves all elements.
    const float first = alibi.distance(coord.query(0), coord.key(0));
    unrolled<Tiles, Layout::kElements>([&](int n, int v) {
        const int query_minus_key = Layout::kTileQueries * n + ScoreCoord<Layout>::query_minus_key(v);
        tile(n)[v] = alibi(tile(n)[v], first + static_cast<float>(query_minus_key));
    });
}
// Adds ALiBi and bias, each only if the problem has it.
template <class Layout>
__device__ __forceinline__ void add_position_terms(typename Layout::Tile& s, const BwdParams& p, int head, int query_end,
                                                   const ScoreCoord<Layout>& coord) {
    const ScoreOptions& options = p.score_options;
    const int batch = remat_block_batch();
    if (uses_alibi(options))
        add_alibi<Layout, 1>(alibi_of(p, batch, head), coord, [&](int) -> typename Layout::Tile& { return s; });
    if (uses_bias(options)) add_bias(s, p, batch, head, query_end, coord);
}

// Adds ds, a tile's gradients of scores, to the fp32 gradient of the bias by atomics: a broadcast bias sums those of many scores.
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

// Returns dropout_scale * dP - delta, or -delta for a dropped probability, from `dp` = dP - delta. dropout_scale is 1 / (1 - p).
__device__ __forceinline__ float dropped_gradient(float dp, float neg_delta, bool is_dropped, float dropout_scale) {
    return is_dropped ? neg_delta : fmaf(dp - neg_delta, dropout_scale, neg_delta);
}

// Returns 0xffff in each half whose sign bit is set in `signs` (dropped probabilities). PTX prmt's selector digit 8 + n replicates
// the sign of byte n (9: byte 1, b: byte 3), which __byte_perm cannot.
__device__ __forceinline__ unsigned sign_masks(unsigned signs) {
    unsigned halves;
    asm("prmt.b32 %0, %1, 0, 0xbb99;" : "=r"(halves) : "r"(signs));
    return halves;
}

// Returns the random number generator of one query head; heads are numbered over the whole call's batch.
__device__ __forceinline__ Philox philox_of(const BwdParams& p, int head) {
    return Philox(p.score_options.rng_state, (p.lengths.first_batch + remat_block_batch()) * p.problem.nheads + head);
}

// Returns which probabilities of the lane's two queries, numbers r = 0 and 1, dropout keeps: 1 in bit kept_bit(r, c), which is 2 *
// r + c % 2 + 16 * (c / 2), for key c of four. `mine` and `others` are kept_bits() of two Philox calls (philox.cuh): the lane's,
// for its query number `mine_is`, and its partner's, for the lane's other query. A call decides two queries: bits kept_bit(0, c)
// are of one whose number has bit 2 clear (kBitsOfRow masks all four), kept_bit(1, c) of the one 4 later. has_bit_of_4: 1 if the
// lane's queries are the later ones of their calls, else 0.
__device__ __forceinline__ unsigned merge_calls(unsigned mine, unsigned others, int has_bit_of_4, int mine_is) {
    mine = mine >> kept_bit(has_bit_of_4, 0) & kBitsOfRow;
    others = others >> kept_bit(has_bit_of_4, 0) & kBitsOfRow;
    return mine_is ? others | mine << kept_bit(1, 0) : mine | others << kept_bit(1, 0);
}

// The next functions return which probabilities of a tile dropout keeps, for a lane's two queries: bit
// kept_bit(row_of(v), key_slot(v)) for element v, which is_kept() reads. All lanes of the warp call them together. A lane with four
// queries of two keys has DroppedKeys (packed_tile.cuh).

// For layouts where a lane has four keys of two queries. The partner lane (XOR kQueryPartnerMask) has the queries that share Philox
// calls with these, so each lane draws for one of its two.
template <class Layout>
__device__ __forceinline__ unsigned draw_kept_rows(const Philox& philox, const DropoutRule& rule, const ScoreCoord<Layout>& coord) {
    static_assert(Layout::kKeys == 4 && Layout::kRows == 2, "a lane has four keys of two queries");
    // Queries r and r + 4 share the call of r, whose bit 2 is clear (philox.cuh): hence `& ~4`.
    const int has_bit_of_4 = coord.query(0) >> 2 & 1;
    const int row = (coord.query(0) & ~4) + has_bit_of_4 * Layout::row_slot(1);
    const unsigned mine = rule.kept_bits(philox.numbers(row, coord.key(0)));
    return merge_calls(mine, __shfl_xor_sync(~0u, mine, Layout::kQueryPartnerMask), has_bit_of_4, has_bit_of_4);
}
// For layouts where a lane has two keys of an aligned group of four, for two queries. The partner lane (XOR kKeyPartnerMask) has
// the other two keys of the same queries, so each draws for one query, and they exchange. Other bits belong to the partner's keys.
template <class Layout>
__device__ __forceinline__ unsigned draw_kept_pairs(const Philox& philox, const DropoutRule& rule,
                                                    const ScoreCoord<Layout>& coord) {
    static_assert(Layout::kRows == 2 && Layout::kKeys == 2, "a lane has two keys of two queries");
    const int odd = coord.key(0) & 1, row = coord.query(0) + (odd ? Layout::row_slot(1) : 0);
    // The call of the row whose bit 2 is clear, and of an aligned group of four keys (philox.cuh).
    const unsigned mine = rule.kept_bits(philox.numbers(row & ~4, coord.key(0) & ~3));
    return merge_calls(mine, __shfl_xor_sync(~0u, mine, Layout::kKeyPartnerMask), row >> 2 & 1, odd) >> odd;
}
template <class Layout>
__device__ __forceinline__ unsigned draw_kept_tile(const Philox& philox, const DropoutRule& rule, const ScoreCoord<Layout>& coord) {
    if constexpr (Layout::kKeys == 4)
        return draw_kept_rows(philox, rule, coord);
    else
        return draw_kept_pairs(philox, rule, coord);
}
// Returns whether dropout keeps element v, from the bits of draw_kept_*.
template <class Layout>
__device__ __forceinline__ bool is_kept(unsigned bits, int v) {
    return bits >> kept_bit(Layout::row_of(v), Layout::key_slot(v)) & 1;
}
