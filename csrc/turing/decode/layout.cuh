// Decode layout of the turing family: which lane has which rows ((query, head) pairs of a KV head), tokens (keys) and columns of
// m16n8k8 products, and the products. The template argument LayoutOf of DecodeMainloop (decode/mainloop.cuh), which calls each
// function. keys.chunk(j), values.chunk(j, h) and q.chunk(mt, j) are a lane's 16 bytes of load j, as fp16; h: which of two tokens.
//
// Scores: Q is operand A (up to 16 rows), K operand B (eight tokens). The columns of a product are free as long as both operands
// agree, so the 16 bytes that a lane loads are operands of four products. Output: transposed. V is operand A (16 columns), P is
// operand B (eight rows). Packed scores are B as they lie, and eight rows are not padded to 16. V needs pairs of tokens: a lane
// loads the same columns of two, and byte permutations pair them. A lane's group is lane / 4, its quad lane % 4.
#pragma once

#include "decode/mainloop.cuh"
#include "turing/mma.cuh"

namespace turing {

// RowTiles: tiles of eight rows that a warp has. Names: mt is a row tile, j a 16-byte load (eight columns a lane), i a word (two
// columns) of it, which is one product.
template <int RowTiles>
struct DecodeLayout {
    static_assert(RowTiles <= 2, "rows of one product");
    struct Lane : turing::Lane {
        __device__ __forceinline__ Lane() : turing::Lane(threadIdx.x & 31) {}
    };
    // A lane's output, transposed. Loads: loads of values, of 64 columns each.
    template <int Loads>
    struct Output {
        Accumulator tile[RowTiles][Loads][4];  // of a lane's eight columns, two each
    };

    // What a lane loads: of a row of Q, of a token's K, and of the V of two tokens (the second is kValueTokens further), eight
    // columns from these on, of each 32 columns of Q and K and of each 64 columns of V.
    __device__ __forceinline__ static int query_row(const Lane& l) { return l.group; }
    __device__ __forceinline__ static int key_token(const Lane& l) { return l.group; }
    __device__ __forceinline__ static int key_column(const Lane& l) { return 8 * l.quad; }
    __device__ __forceinline__ static int value_token(const Lane& l) { return 2 * l.quad; }
    static constexpr int kValueTokens = 1;
    __device__ __forceinline__ static int value_column(const Lane& l) { return 8 * l.group; }

    // Where CooperativeLoader (warps share loads through shared memory) keeps a lane's 16 bytes: slots of a block of 64, for a
    // token and a chunk of 8 columns. Bits of value slots are exchanged so that eight lanes never share a bank, neither those that
    // store the chunks of one token nor neighbors that read operands.
    static constexpr bool kCooperative = true;
    static constexpr int kKeySlots = 32 ^ 4;  // XOR to the slot of the lane's other 32 columns: other half (32), other banks (4)
    __device__ __forceinline__ static int key_slot(const Lane& l) { return key_slot(l.group, l.quad); }
    __device__ __forceinline__ static int key_slot(int token, int chunk) {
        return (4 * token + (chunk & 3)) ^ (chunk & 4 ? kKeySlots : 0);
    }
    __device__ __forceinline__ static int value_slot(const Lane& l) { return value_slot(2 * l.quad, l.group); }
    __device__ __forceinline__ static int value_slot(int token, int chunk) {
        return ((4 * chunk + (token >> 1)) ^ (chunk >> 1)) + 32 * (token & 1);
    }

    // A lane's scores of a tile: of this row, and of this token and the next.
    __device__ __forceinline__ static int score_row(const Lane& l) { return l.group; }
    __device__ __forceinline__ static int score_token(const Lane& l) { return 2 * l.quad; }
    static constexpr int kRowLaneMasks[2] = {1, 2};  // shfl_xor masks that reach the other lanes of a row

    // x = Q K^T of a tile of eight tokens, not scaled, all of the queries' columns.
    template <class Queries, class Keys>
    __device__ __forceinline__ static void scores(const Queries& q, const Keys& keys, float2 (&x)[RowTiles]) {
        Accumulator c = {};
#pragma unroll
        for (int j = 0; j < Queries::kChunks; j++) {
            const uint4 k = keys.chunk(j), first = q.chunk(0, j), second = q.chunk(RowTiles - 1, j);
            const u32 words[4] = {k.x, k.y, k.z, k.w};
            const u32 rows[2][4] = {{first.x, first.y, first.z, first.w}, {second.x, second.y, second.z, second.w}};
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const u32 a[2] = {rows[0][i], RowTiles == 2 ? rows[1][i] : 0};
                // turing has kernels of 16-bit caches alone: only chunks of int4 have two scales (volta/decode/layout.cuh)
                static_assert(!Keys::kTwoScales, "products of one scale");
                mma(c, a, words[i]);
            }
        }
#pragma unroll
        for (int mt = 0; mt < RowTiles; mt++) x[mt] = make_float2(c[2 * mt], c[2 * mt + 1]);
    }

    // Replaces each output x by f(x, `own` of its row, whether x is among the last four of a lane's eight columns: in int4, which
    // has no turing kernel, these have another scale).
    template <int Loads, class F>
    __device__ __forceinline__ static void each_output(const Lane& l, Output<Loads>& o, const float (&own)[RowTiles], F f) {
#pragma unroll
        for (int mt = 0; mt < RowTiles; mt++) {
            // Rows are n of the output: 2 * quad and the next. The lanes of these groups have their scores.
            const float of_row[2] = {__shfl_sync(~0u, own[mt], 8 * l.quad), __shfl_sync(~0u, own[mt], 8 * l.quad + 4)};
#pragma unroll
            for (int j = 0; j < Loads; j++)
#pragma unroll
                for (int i = 0; i < 4; i++)
#pragma unroll
                    for (int e = 0; e < 4; e++) o.tile[mt][j][i][e] = f(o.tile[mt][j][i][e], of_row[e & 1], i >= 2);
        }
    }

    // O += P V of a tile. packed: the lane's two probabilities of each row tile, fp16 times 2^8 (kPackedOne).
    template <int Loads, class Values>
    __device__ __forceinline__ static void add_values(const Lane&, Output<Loads>& o, const u32 (&packed)[RowTiles],
                                                      const Values& values) {
#pragma unroll
        for (int j = 0; j < Loads; j++) {
            const uint4 v = values.chunk(j, 0), w = values.chunk(j, 1);
            const u32 x[4] = {v.x, v.y, v.z, v.w}, y[4] = {w.x, w.y, w.z, w.w};
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const u32 a[2] = {lower_halves(x[i], y[i]), upper_halves(x[i], y[i])};
#pragma unroll
                for (int mt = 0; mt < RowTiles; mt++) mma(o.tile[mt][j][i], a, packed[mt]);
            }
        }
    }

    // Calls f(row, column, x, y) for outputs x and y of each two neighboring columns.
    template <int Loads, class F>
    __device__ __forceinline__ static void each_pair(const Lane& l, const Output<Loads>& o, F f) {
#pragma unroll
        for (int mt = 0; mt < RowTiles; mt++)
#pragma unroll
            for (int j = 0; j < Loads; j++)
#pragma unroll
                for (int i = 0; i < 4; i++)
#pragma unroll
                    for (int row = 0; row < 2; row++)
                        f(8 * mt + 2 * l.quad + row, 64 * j + 8 * l.group + 2 * i, o.tile[mt][j][i][row],
                          o.tile[mt][j][i][2 + row]);
    }
};

}  // namespace turing
