// The turing Family of the backward kernels that pass P and dS through memory, for headdims above 256 and for fp32 tensors (an fp32
// number is two fp16): a warp's products, 64 by 64 elements, and the lane layout. Template argument of backward/store_scores.cuh,
// which computes P and dS, and of backward/stored_gradients.cuh, which computes dV, dK and dQ from them.
//
//   terms             values of k, the index that a product sums: columns of the headdim in scores, queries or keys in gradients.
//                     A step has kStagedTerms (32), a pair of chunks 16
//   TermColumns       shared tiles whose columns are terms: 128 rows by 32; kChunks, kRowBytes: 16-byte chunks and bytes of a row
//   TermRows, OtherTermRows  shared tiles whose rows are terms: 32 by 128 (A of dQ), 32 by the block's columns (B of gradients)
//   c, a_address, b_address  the warp's accumulators; shared addresses of the lane's operands, a tile's plus the offset that
//                     *_operand(), *_a() or *_b() returns for `row` or `column`, the warp's first there
//   by_rows(), by_chunks()  give lanes' addresses for ldmatrix; pair_after(x, n): the address 2 * n chunks after x (fragments.cuh)
//   group, quad       of a lane: lane / 4, lane % 4 (turing/mma.cuh)
#pragma once

#include "backward/staged_tiles.cuh"
#include "turing/backward/fragments.cuh"

namespace turing {

// multiply_* add a step's products to c. add_* sum them apart first: tensor cores truncate long sums, whose bits fp32 tensors need.
// The kernels load the parts of fp32 numbers, and call add_* once for each of their three products.
struct StoredFamily {
    // ---- scores -----------------------------------------------------------------------------------
    // A tile, 16 keys by 16 queries, is two accumulators j. Rows are keys and columns are queries, both in the order of
    // KeysLayout<1>: column 2 * quad + i of accumulator j is query 4 * quad + 2 * j + i. tile_row() gives shared rows that order.
    struct Layout {
        using Lane = turing::Lane;
        using Tile = float[8];
        static constexpr int kTileQueries = 16, kTileKeys = 16, kElements = 8;
        __device__ __forceinline__ static constexpr int first_query(const Lane& l) { return 4 * l.quad; }
        __device__ __forceinline__ static constexpr int first_key(const Lane& l) { return l.group / 2 * 4 + l.group % 2; }
        __device__ __forceinline__ static constexpr int query_slot(int v) { return (v & 1) + 2 * (v >> 2); }
        __device__ __forceinline__ static constexpr int key_slot(int v) { return v & 2; }
        __device__ __forceinline__ static constexpr int query(int first, int v) { return first + query_slot(v); }
        __device__ __forceinline__ static constexpr int key(int first, int v) { return first + key_slot(v); }

        // A lane has kRows queries ("rows" here), each with kKeys keys, kKeyStride apart. row_of(v): query of element v.
        // element(r, j): that of query r and key j. kKeyRows: rows of the product are keys. k...PartnerMask: XOR to the lane that
        // shares a Philox call, for keys or for queries (score_coord.cuh).
        static constexpr bool kKeyRows = true;
        static constexpr int kRows = 4, kKeys = 2, kKeyStride = 2, kKeyPartnerMask = 4, kQueryPartnerMask = 1;
        __device__ __forceinline__ static constexpr int row_of(int v) { return query_slot(v); }
        __device__ __forceinline__ static constexpr int row_slot(int r) { return r; }
        __device__ __forceinline__ static constexpr int element(int r, int j) { return r % 2 + 4 * (r / 2) + 2 * j; }
    };
    // Floats of a query in a row statistic (-lse / scale, or -delta). The lane's four queries begin first_query() * kLaneStatistics
    // floats after the tile's. load_rows() loads their numbers from there. x[0][r]: of the lane's query r.
    static constexpr int kLaneStatistics = 1;
    static __device__ __forceinline__ void load_rows(float (&x)[1][Layout::kRows], const float* stats) {
        const float4 four = load_global4(stats);
        x[0][0] = four.x, x[0][1] = four.y, x[0][2] = four.z, x[0][3] = four.w;
    }
    // Row of shared memory where row `row` of K, Q, V or dO goes.
    static __device__ __forceinline__ int tile_row(int row) { return KeysLayout<1>::row_of_key(row); }
    // Offsets of the lane's operands: A, keys (K or V), and B, queries (Q or dO), from `row` on. An ldmatrix loads 16 rows
    // by 16 columns as four 8x8 matrices. by_rows orders these down the rows first, by_chunks along the columns.
    static __device__ __forceinline__ u32 own_operand(const Lane& lane, int row) {
        return by_rows<TermColumns>(0, lane.lane) + row * TermColumns::kRowBytes;
    }
    static __device__ __forceinline__ u32 other_operand(const Lane& lane, int row) {
        return by_chunks<TermColumns>(0, lane.lane) + row * TermColumns::kRowBytes;
    }
    // c[m][n]: tile m of 16 keys, n of 16 queries. Accumulator j has eight of a tile's queries; k: first or last 8 of 16 terms.
    static __device__ __forceinline__ void multiply_scores(float (&c)[4][4][8], u32 a_address, u32 b_address) {
#pragma unroll
        for (int pair = 0; pair < TermColumns::kChunks / 2; pair++) {
            u32 a[4][4], b[4][4];
#pragma unroll
            for (int i = 0; i < 4; i++) {
                load_matrices(a[i], pair_after<TermColumns>(a_address, pair) + i * 16 * TermColumns::kRowBytes);
                load_matrices(b[i], pair_after<TermColumns>(b_address, pair) + i * 16 * TermColumns::kRowBytes);
            }
            unrolled<2, 4, 2, 4>([&](int k, int n, int j, int m) {
                const OperandA keys = {a[m][2 * k], a[m][2 * k + 1]};
                mma(reinterpret_cast<Accumulator(&)[2]>(c[m][n])[j], keys, b[n][2 * j + k]);
            });
        }
    }
    static __device__ __forceinline__ void add_scores(float (&c)[4][4][8], u32 a_address, u32 b_address) {
#pragma unroll
        for (int m = 0; m < 4; m += 2)
#pragma unroll
            for (int n = 0; n < 4; n += 2) {
                __syncwarp();  // no operand is loaded before: registers hold those of one quarter
                Accumulator sums[2][2][2] = {};  // [m][n][j]
#pragma unroll
                for (int pair = 0; pair < TermColumns::kChunks / 2; pair++) {
                    u32 a[2][4], b[2][4];
#pragma unroll
                    for (int i = 0; i < 2; i++) {
                        load_matrices(a[i], pair_after<TermColumns>(a_address, pair) + (m + i) * 16 * TermColumns::kRowBytes);
                        load_matrices(b[i], pair_after<TermColumns>(b_address, pair) + (n + i) * 16 * TermColumns::kRowBytes);
                    }
                    unrolled<2, 8>([&](int k, int i) {  // i % 2: m; i / 4: n; i / 2 % 2: j
                        const OperandA keys = {a[i % 2][2 * k], a[i % 2][2 * k + 1]};
                        mma(sums[i % 2][i / 4][i / 2 % 2], keys, b[i / 4][2 * (i / 2 % 2) + k]);
                    });
                }
                unrolled<4, 8>([&](int i, int v) { c[m + i / 2][n + i % 2][v] += sums[i / 2][i % 2][v / 4][v % 4]; });
            }
    }
    // Returns false: blocks add the gradient of a bias by atomics (Family::stores_dbias in src/kernels/turing/family.rs). Unnamed:
    // dS of a tile, its head, first query and first key.
    static __device__ __forceinline__ bool store_bias_gradient(const float (&)[8], const BwdParams&, int, int, int) {
        return false;
    }

    // ---- gradients --------------------------------------------------------------------------------
    static constexpr int kLoadParts = 1;  // a step's loads come in one part: add_keys and add_queries compute all sums for part 0
    using KeySums = Accumulator[4][8];  // the lane's part of the warp's dK or dV: [m, tile of 16 rows][n, tile of 8 columns]
    using QuerySums = KeySums;  // of dQ
    // c += A B for 16 terms. a: operand A of each tile of 16 rows. b_address: of the 16 rows of B. k: first or last 8 terms.
    template <int M>
    static __device__ __forceinline__ void multiply(Accumulator (&c)[M][8], const u32 (&a)[M][4], u32 b_address) {
#pragma unroll
        for (int pair = 0; pair < 4; pair++) {  // of column tiles
            u32 b[4];
            load_matrices_transposed(b, pair_after<OtherTermRows>(b_address, pair));
            unrolled<2, 2, M>([&](int k, int i, int m) {
                const OperandA rows = {a[m][2 * k], a[m][2 * k + 1]};
                mma(c[m][2 * pair + i], rows, b[2 * i + k]);
            });
        }
    }
    // dV and dK: offsets of the lane's operands A, P^T or dS^T from a row on, and B, dO or Q from a column on.
    static __device__ __forceinline__ u32 key_a(const Lane& lane, int row) { return own_operand(lane, row); }
    static __device__ __forceinline__ u32 key_b(const Lane& lane, int column) {
        return by_rows<OtherTermRows>(0, lane.lane, column / kChunk);
    }
    static __device__ __forceinline__ void multiply_keys(KeySums& c, u32 a_address, u32 b_address) {
#pragma unroll
        for (int pair = 0; pair < TermColumns::kChunks / 2; pair++) {
            u32 a[4][4];
#pragma unroll
            for (int m = 0; m < 4; m++)
                load_matrices(a[m], pair_after<TermColumns>(a_address, pair) + m * 16 * TermColumns::kRowBytes);
            multiply(c, a, b_address + pair * 16 * OtherTermRows::kRowBytes);
        }
    }
    // Adds the products of a step's 32 terms. load(a, m, terms): loads operand A of tile m of 16 rows, for the 16 terms from number
    // `terms` (0 or 16) of the step on.
    template <class Load>
    static __device__ __forceinline__ void add(KeySums& c, u32 b_address, float factor, Load load) {
#pragma unroll
        for (int m = 0; m < 4; m++) {
            __syncwarp();  // no operand is loaded before: registers hold those of one tile
            Accumulator sums[1][8] = {};
#pragma unroll
            for (int terms = 0; terms < kStagedTerms; terms += 16) {
                u32 a[1][4];
                load(a[0], m, terms);
                multiply(sums, a, b_address + terms * OtherTermRows::kRowBytes);
            }
            unrolled<8, 4>([&](int n, int v) { c[m][n][v] = fmaf(sums[0][n][v], factor, c[m][n][v]); });
        }
    }
    // Adds the products times `factor`: the power of two by which the tile of dS was divided (stored_scores.cuh), for dV 1.
    static __device__ __forceinline__ void add_keys(KeySums& c, u32 a_address, u32 b_address, float factor, int /*part: 0*/) {
        add(c, b_address, factor, [&](u32(&a)[4], int m, int terms) {
            load_matrices(a, pair_after<TermColumns>(a_address, terms / 16) + m * 16 * TermColumns::kRowBytes);
        });
    }
    // dQ: offsets of the lane's operands A, dS from a row on, and B, K from a column on. A's rows in memory are keys, and
    // the load transposes them: matrices 0 and 1 have the first eight keys, 2 and 3 the next. remat_swizzled(): offset of a chunk.
    static __device__ __forceinline__ u32 query_a(const Lane& lane, int row) {
        return remat_swizzled<TermRows::kChunks>(lane.lane % 8 + lane.lane / 16 * 8, row / kChunk + lane.lane / 8 % 2);
    }
    static __device__ __forceinline__ u32 query_b(const Lane& lane, int column) { return key_b(lane, column); }
    static __device__ __forceinline__ void multiply_queries(QuerySums& c, u32 a_address, u32 b_address) {
#pragma unroll
        for (int key = 0; key < kStagedTerms; key += 16) {
            u32 a[4][4];
#pragma unroll
            for (int m = 0; m < 4; m++)
                load_matrices_transposed(a[m], pair_after<TermRows>(a_address, m) + key * TermRows::kRowBytes);
            multiply(c, a, b_address + key * OtherTermRows::kRowBytes);
        }
    }
    static __device__ __forceinline__ void add_queries(QuerySums& c, u32 a_address, u32 b_address, float factor, int /*part: 0*/) {
        add(c, b_address, factor, [&](u32(&a)[4], int m, int terms) {
            load_matrices_transposed(a, pair_after<TermRows>(a_address, m) + terms * TermRows::kRowBytes);
        });
    }
    // Calls f(row, column, x, y) for the sums x and y of each two neighboring columns. Row and column count from the warp's first.
    template <class F>
    static __device__ __forceinline__ void for_each_pair(const KeySums& c, F f) {
        const Lane lane(threadIdx.x % 32);
        unrolled<4, 2, 8>([&](int m, int h, int n) {
            f(16 * m + 8 * h + lane.group, 8 * n + 2 * lane.quad, c[m][n][2 * h], c[m][n][2 * h + 1]);
        });
    }
};
static_assert(covers_tile<StoredFamily::Layout>(), "score_layout.cuh");
static_assert(has_rows_and_keys<StoredFamily::Layout>(), "backward/score_coord.cuh");

}  // namespace turing
