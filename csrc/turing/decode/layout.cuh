// Decode layout of the turing family: which lane has which rows ((query, head) pairs of a KV head), tokens (keys) and columns of
// m16n8k8 products, and the products. Template argument LayoutOf of DecodeMainloop (decode/mainloop.cuh), which calls the functions
// for a tile of eight tokens. It passes operands as objects: q.chunk(mt, j), keys.chunk(j) and values.chunk(j, h) return the lane's
// load j of Q, K or V (h: of its token 0 or 1), a chunk of eight fp16 columns. A lane's group is lane / 4, its quad lane % 4.
//
// Scores: Q is operand A (up to 16 rows), K operand B (eight tokens). The columns of a product are free as long as both operands
// agree, so the four words of a lane's chunk are operands of four products. Output: transposed, O^T += V^T P^T. V is operand A (16
// columns), P operand B (eight rows, not padded to 16). A lane's two scores of a row, packed to fp16, are its operand B, without an
// exchange. V needs pairs of tokens: a lane loads the same columns of two, and byte permutations pair them.
#pragma once

#include "decode/mainloop.cuh"
#include "turing/mma.cuh"

namespace turing {

// RowTiles: tiles of eight rows that a warp has. Names: mt is a row tile, j a load, for the warp of 32 columns of Q and K or 64 of
// V, i a word (two columns) of the lane's chunk, which is one product, e an element (0 to 3) of an accumulator.
template <int RowTiles>
struct DecodeLayout {
    static_assert(RowTiles <= 2, "rows of one product");
    struct Lane : turing::Lane {
        __device__ __forceinline__ Lane() : turing::Lane(threadIdx.x & 31) {}
    };
    // A lane's output, transposed. Loads: the j of V.
    template <int Loads>
    struct Output {
        Accumulator tile[RowTiles][Loads][4];  // [i]; element e: column 2 * i + e / 2 of the chunk, row 2 * quad + e % 2
    };

    // What a lane loads: eight columns from *_column on, of row query_row of Q, token key_token of K, or tokens value_token and
    // value_token + kValueTokens of V.
    __device__ __forceinline__ static int query_row(const Lane& l) { return l.group; }
    __device__ __forceinline__ static int key_token(const Lane& l) { return l.group; }
    __device__ __forceinline__ static int key_column(const Lane& l) { return 8 * l.quad; }
    __device__ __forceinline__ static int value_token(const Lane& l) { return 2 * l.quad; }
    static constexpr int kValueTokens = 1;  // from a lane's first token of V to its second
    __device__ __forceinline__ static int value_column(const Lane& l) { return 8 * l.group; }

    // CooperativeLoader (decode/cooperative_loader.cuh) can use this layout: each of four warps loads a part of K and V, and shares
    // it through slots, 16 bytes of shared memory that hold a chunk. 64 slots have 8 tokens by 64 columns. *_slot(l) is where a
    // lane reads its operand, *_slot(token, chunk) where the loader stores a token's chunk. Eight slots fill the 32 banks. By the
    // XORs no two of eight lanes share a bank, neither storing one token's chunks nor reading operands.
    static constexpr bool kCooperative = true;
    // No count but an XOR, from the slot of a key's chunk 0 to 3 to that of the chunk 4 further: other half (32), other banks (4).
    static constexpr int kKeySlotXor = 32 ^ 4;
    __device__ __forceinline__ static int key_slot(const Lane& l) { return key_slot(l.group, l.quad); }
    __device__ __forceinline__ static int key_slot(int token, int chunk) {
        return (4 * token + (chunk & 3)) ^ (chunk & 4 ? kKeySlotXor : 0);
    }
    __device__ __forceinline__ static int value_slot(const Lane& l) { return value_slot(2 * l.quad, l.group); }
    __device__ __forceinline__ static int value_slot(int token, int chunk) {
        return ((4 * chunk + (token >> 1)) ^ (chunk >> 1)) + 32 * (token & 1);
    }

    // A lane's two scores of each row tile: of this row, and of this token and the next.
    __device__ __forceinline__ static int score_row(const Lane& l) { return l.group; }
    __device__ __forceinline__ static int score_token(const Lane& l) { return 2 * l.quad; }
    static constexpr int kRowLaneMasks[2] = {1, 2};  // shfl_xor masks that reach the other lanes of a row

    // Sets x to the lane's two scores of each row tile, Q K^T of eight tokens over all j, not scaled.
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

    // Replaces each output x by f(x, its row's value, whether x is in the last four of a lane's eight columns: in int4, which has
    // no turing kernel, these have another scale). row_values[mt] is that of the lane's score_row(): a factor or an addend.
    template <int Loads, class F>
    __device__ __forceinline__ static void each_output(const Lane& l, Output<Loads>& o, const float (&row_values)[RowTiles], F f) {
#pragma unroll
        for (int mt = 0; mt < RowTiles; mt++) {
            // The lane has outputs of rows 2 * quad and the next. Lanes 4 * row to 4 * row + 3 have a row's scores, and its value.
            const float of_row[2] = {__shfl_sync(~0u, row_values[mt], 8 * l.quad),
                                     __shfl_sync(~0u, row_values[mt], 8 * l.quad + 4)};
#pragma unroll
            for (int j = 0; j < Loads; j++)
#pragma unroll
                for (int i = 0; i < 4; i++)
#pragma unroll
                    for (int e = 0; e < 4; e++) o.tile[mt][j][i][e] = f(o.tile[mt][j][i][e], of_row[e & 1], i >= 2);
        }
    }

    // Adds P V of eight tokens to the output. packed[mt]: P of the lane's two scores, as fp16 times kPackedOne:
    // 2^8, to use the upper end of fp16's range (softmax.cuh).
    template <int Loads, class Values>
    __device__ __forceinline__ static void add_values(const Lane&, Output<Loads>& o, const u32 (&packed)[RowTiles],
                                                      const Values& values) {
#pragma unroll
        for (int j = 0; j < Loads; j++) {
            const uint4 v0 = values.chunk(j, 0), v1 = values.chunk(j, 1);  // the same columns of two tokens
            const u32 x[4] = {v0.x, v0.y, v0.z, v0.w}, y[4] = {v1.x, v1.y, v1.z, v1.w};
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const u32 a[2] = {lower_halves(x[i], y[i]), upper_halves(x[i], y[i])};  // both tokens of column 2 * i; of the next
#pragma unroll
                for (int mt = 0; mt < RowTiles; mt++) mma(o.tile[mt][j][i], a, packed[mt]);
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
                for (int i = 0; i < 4; i++)
#pragma unroll
                    for (int row = 0; row < 2; row++)
                        f(8 * mt + 2 * l.quad + row, 64 * j + 8 * l.group + 2 * i, o.tile[mt][j][i][row],
                          o.tile[mt][j][i][2 + row]);
    }
};

}  // namespace turing
