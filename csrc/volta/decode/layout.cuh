// Decode layout of the volta family: which lane has which rows ((query, head) pairs of a KV head), tokens and columns of m8n8k4
// products. Template argument of DecodeMainloop (decode/mainloop.cuh): it computes scores of eight tokens, and adds their values.
//
// One m8n8k4 is four independent 8x8x4 products, one per quad-pair of a warp (lanes 4q to 4q + 3 and 16 + 4q to 16 + 4q + 3).
// Scores: each quad-pair multiplies a quarter of the columns (k), for eight rows (m) and eight tokens (n). Shuffles add the four
// partial sums, and leave each lane two neighboring scores of one row, so that the softmax is computed once. Output: each quad-pair
// has its own columns of V (n); tokens are k. Each lane fetches by shuffles the packed probabilities of its row.
//
// A lane is number t (0 to 7) of its quad-pair: t % 4 is quad, t / 4 is half (Lane, volta/mma.cuh). Element e (0 to 7) of its
// accumulator is row m = (t & 1) + (e & 2) + 4 * half and column n = (t & 2) + (e & 4) + (e & 1) of the quad-pair's product. mt
// counts tiles of eight rows; j counts 32 columns of Q and K (a lane has eight: a chunk, 16 bytes of fp16), or 64 columns of V.
//
// The main loop passes operands as objects: q.chunk(mt, j) and keys.chunk(j) return the lane's chunk of Q or K, values.chunk(j, h)
// that of V for its token h (0 or 1). Queries::kChunks is the number of j in a row of Q.
#pragma once

#include "decode/mainloop.cuh"
#include "volta/mma.cuh"

namespace volta {

// RowTiles: tiles of eight rows that a warp has.
template <int RowTiles>
struct DecodeLayout {
    using Lane = volta::Lane;
    // Loads: how many j the warp's columns of V are (64 columns each), as many as a lane's 16-byte loads of a token of V.
    template <int Loads>
    struct Output {
        Accumulator tile[RowTiles][Loads][2];  // [mt][j][i]; i: first or last four of the eight columns of V that the lane loads
    };

    // The lane's quad-pair, 0 to 3.
    __device__ __forceinline__ static int quad_pair(const Lane& l) { return (l.lane >> 2) & 3; }

    // What a lane loads: eight columns from *_column on, of row query_row of Q, token key_token of K, or tokens value_token and
    // value_token + kValueTokens of V. The XORs give quad-pairs different orders, so that the four partial sums which the shuffles
    // of scores() add are of the same row and token.
    __device__ __forceinline__ static int query_row(const Lane& l) { return l.t ^ ((l.lane & 4) >> 1); }
    __device__ __forceinline__ static int key_token(const Lane& l) { return l.t ^ ((l.lane & 8) >> 1); }
    __device__ __forceinline__ static int key_column(const Lane& l) { return 8 * quad_pair(l); }
    __device__ __forceinline__ static int value_token(const Lane& l) { return l.quad; }
    static constexpr int kValueTokens = 4;  // from a lane's first token of V to its second
    __device__ __forceinline__ static int value_column(const Lane& l) { return 16 * quad_pair(l) + 8 * l.half; }

    // CooperativeLoader (decode/cooperative_loader.cuh) can use this layout: each of four warps loads a part of K and V, and shares
    // it through slots, 16 bytes of shared memory that hold a chunk. *_slot(l) is where a lane reads its operand, *_slot(token,
    // chunk) where the loader stores a token's chunk. Eight slots fill the 32 banks. So higher bits of a slot's number are XORed
    // into the lower three: no two of eight lanes then share a bank, neither storing one token's chunks nor reading operands.
    static constexpr bool kCooperative = true;
    // 64 slots hold 8 tokens by 8 chunks (64 columns). kKeySlotXor is no count but an XOR, from the slot of one of a key's chunks 0
    // to 3 to that of the chunk 4 (32 columns) further. For values, tokens 4 to 7 are in the second half.
    static constexpr int kKeySlotXor = 32 ^ 2;  // 32: to the second half of the 64 slots; 2: to other banks
    __device__ __forceinline__ static int key_slot(const Lane& l) { return l.lane ^ ((l.lane >> 3) & 1); }
    __device__ __forceinline__ static int key_slot(int token, int chunk) {
        const int quad_pair = chunk & 3, t = token ^ ((quad_pair & 2) << 1);
        return key_slot(Lane((t & 3) + 4 * quad_pair + ((t & 4) << 2))) ^ (chunk & 4 ? kKeySlotXor : 0);
    }
    __device__ __forceinline__ static int value_slot(const Lane& l) { return l.lane ^ ((l.lane >> 3) & 1) ^ (2 * l.half); }
    __device__ __forceinline__ static int value_slot(int token, int chunk) {
        return value_slot(Lane((token & 3) + 4 * (chunk >> 1) + 16 * (chunk & 1))) + 32 * (token >> 2);
    }

    // Row and first token of the two neighboring scores that scores() leaves a lane: m and n, where bits of its number stand for
    // bits of e (lane & 4 for e & 2, lane & 8 for e & 4).
    __device__ __forceinline__ static int score_row(const Lane& l) { return (l.t & 1) + ((l.lane & 4) >> 1) + 4 * l.half; }
    __device__ __forceinline__ static int score_token(const Lane& l) { return (l.t & 2) + ((l.lane & 8) >> 1); }
    static constexpr int kRowLaneMasks[2] = {2, 8};  // shfl_xor masks that reach the other lanes of a row

    // Sets x to the lane's two scores of each row tile, Q K^T of eight tokens, not scaled. Keys with kTwoScales (int4) have the
    // last four fp16 numbers of a chunk times 16: unpack8 leaves high nibbles in place (quantized.cuh). `split` sums these.
    template <class Queries, class Keys>
    __device__ __forceinline__ static void scores(const Queries& q, const Keys& keys, float2 (&x)[RowTiles]) {
        Accumulator c[RowTiles] = {}, split[RowTiles] = {};
#pragma unroll
        for (int j = 0; j < Queries::kChunks; j++) {
            const uint4 k = keys.chunk(j);
#pragma unroll
            for (int mt = 0; mt < RowTiles; mt++) {
                const uint4 a = q.chunk(mt, j);
                mma_row_col(c[mt], a.x, a.y, k.x, k.y);
                mma_row_col(Keys::kTwoScales ? split[mt] : c[mt], a.z, a.w, k.z, k.w);
            }
        }
        if constexpr (Keys::kTwoScales) {
#pragma unroll
            for (int mt = 0; mt < RowTiles; mt++)
#pragma unroll
                for (int i = 0; i < 8; i++) c[mt][i] = fmaf(split[mt][i], 1.f / 16.f, c[mt][i]);
        }
#pragma unroll
        for (int mt = 0; mt < RowTiles; mt++) {
            // The XORs of key_token and query_row: lane ^ 8 has this lane's tokens in elements e ^ 4, lane ^ 4 its rows in e ^ 2.
            const Accumulator& partial = c[mt];
            float sum[4];  // of two quad-pairs
#pragma unroll
            for (int i = 0; i < 4; i++) sum[i] = partial[i] + __shfl_xor_sync(~0u, partial[4 + i], 8);
            x[mt] = make_float2(sum[0] + __shfl_xor_sync(~0u, sum[2], 4), sum[1] + __shfl_xor_sync(~0u, sum[3], 4));
        }
    }

    // Replaces each output x by f(x, its row's value, whether x is in the last four of a lane's eight columns). row_values[mt] is
    // that of the lane's score_row() in row tile mt: a factor or an addend. In the last four columns int4 values are 16 times too
    // large, and the caller's f divides. A lane has outputs of two rows: its score_row and that of lane ^ 4. e & 2 tells which.
    template <int Loads, class F>
    __device__ __forceinline__ static void each_output(const Lane& l, Output<Loads>& o, const float (&row_values)[RowTiles], F f) {
#pragma unroll
        for (int mt = 0; mt < RowTiles; mt++) {
            const float other = __shfl_xor_sync(~0u, row_values[mt], 4);
            const float of_row[2] = {l.lane & 4 ? other : row_values[mt], l.lane & 4 ? row_values[mt] : other};
#pragma unroll
            for (int j = 0; j < Loads; j++)
#pragma unroll
                for (int i = 0; i < 2; i++)
#pragma unroll
                    for (int e = 0; e < 8; e++) o.tile[mt][j][i][e] = f(o.tile[mt][j][i][e], of_row[(e >> 1) & 1], i == 1);
        }
    }

    // Adds P V of eight tokens to the output. packed[mt]: the probabilities of the two scores that scores() left the lane,
    // a pair of fp16, times 2^8 (kPackedOne, softmax.cuh: to use the upper end of fp16's range).
    template <int Loads, class Values>
    __device__ __forceinline__ static void add_values(const Lane& l, Output<Loads>& o, const u32 (&packed)[RowTiles],
                                                      const Values& values) {
        u32 a[RowTiles][4];
        // Four lanes hold the probabilities of row t, which the lane needs for operand A; `source` is the first of them. By
        // score_row, bit 1 of a row is bit 2 of the lane. a[mt][i] becomes tokens 2 * i and 2 * i + 1 (score_token).
        const int source = (l.lane & 17) | ((l.lane & 2) << 1);
#pragma unroll
        for (int mt = 0; mt < RowTiles; mt++)
#pragma unroll
            for (int i = 0; i < 4; i++) a[mt][i] = __shfl_sync(~0u, packed[mt], source + 2 * (i & 1) + 8 * (i >> 1));
#pragma unroll
        for (int j = 0; j < Loads; j++) {
            const uint4 v[2] = {values.chunk(j, 0), values.chunk(j, 1)};
#pragma unroll
            for (int mt = 0; mt < RowTiles; mt++)
#pragma unroll
                for (int h = 0; h < 2; h++) {
                    mma_row_row(o.tile[mt][j][0], a[mt][2 * h], a[mt][2 * h + 1], v[h].x, v[h].y);
                    mma_row_row(o.tile[mt][j][1], a[mt][2 * h], a[mt][2 * h + 1], v[h].z, v[h].w);
                }
        }
    }

    // Calls f(row, column, x, y) for outputs x and y of two neighboring columns: `column` and the next.
    template <int Loads, class F>
    __device__ __forceinline__ static void each_pair(const Lane& l, const Output<Loads>& o, F f) {
#pragma unroll
        for (int mt = 0; mt < RowTiles; mt++)
#pragma unroll
            for (int j = 0; j < Loads; j++)
#pragma unroll
                for (int i = 0; i < 2; i++)
#pragma unroll
                    for (int e = 0; e < 8; e += 2) {
                        const int n = (l.t & 2) + (e & 4);  // 4 to 7 belong to columns 8 to 15 of the quad-pair
                        f(8 * mt + (l.t & 1) + (e & 2) + 4 * l.half, 64 * j + 16 * quad_pair(l) + 2 * (n & 4) + 4 * i + (n & 3),
                          o.tile[mt][j][i][e], o.tile[mt][j][i][e + 1]);
                    }
    }
};

}  // namespace volta
