// The parts of the backward pass, and where everything lies. docs/backward-kernel.md tells the design.
//
// A block of the main kernels (small.cuh, split.cuh) owns some keys and walks over the queries
// that see them, a step at a time:
//
//   S^T  = K Q^T - lse/scale     P = exp(scale * S)      dV += P^T dO
//   dP^T = V dO^T - delta        dS = P * dP             dK += dS^T Q        dQ += dS K  (atomically)
//
// K and V stay in shared memory, dK and dV in registers. The transposed scores come out of the first
// two products in the accumulator layout, go to shared memory as fp16, and are read back as the row-major
// A operand of dV and dK and as the column-major A operand of dQ.
//
// Without atomics, dQ is left to queries.cu, whose blocks own queries and walk over keys. It is made of
// the same parts: what is said here of keys is there true of queries, and the other way round.
//
// Lanes: every product is made of 16x16 tiles, quad-pairs 2x2 (Lane::qm, Lane::qn). Row t of the A
// operand of quad-pair qm is key  key_of(t, qm) = t%4 + 4*qm + 8*(t/4)  of 16: eight consecutive lanes,
// which one shared-memory wavefront serves, then read eight consecutive keys. Column n of quad-pair qn
// is query  8*qn + 4*bit1(n) + 2*bit2(n) + bit0(n)  of 16: the four accumulators of a lane that belong to
// one key are then four consecutive queries, 8 bytes of fp16.
#pragma once

#include "half.cuh"
#include "mask.cuh"
#include "sequence.cuh"
#include "softmax.cuh"
#include "tile.cuh"
#include "volta/backward/gradients.cuh"
#include "volta/mma.cuh"
#include "volta/backward/row_stats.cuh"

namespace volta {

// P is kept in fp16 as P * 2^12: the integer packing flushes what is below 2^-14, so that probabilities
// count down to 2^-26, and the other end leaves room for P up to 15, where rounding in S and lse makes it
// larger than 1 (at |S| of about 2^24 / scale).
constexpr float kProbabilityBits = 12.f;
constexpr float kProbabilityUnit = 4096.f;                  // 2^kProbabilityBits
constexpr float kExponentShift = kProbabilityBits - 112.f;  // 112: see pack_probabilities
constexpr float kExponentUnit = 1.2676506e30f;              // 2^-kExponentShift

__device__ __forceinline__ int key_of(int t, int qm) { return t % 4 + 4 * qm + 8 * (t / 4); }

// ---- geometry -------------------------------------------------------------------------------------

// Rows of CHUNKS 16-byte chunks, swizzled (tile.cuh). The swizzle permutes the chunks of a row in groups
// of kGroup, by the row's last three bits, so a chunk's address follows from that of another chunk of its
// row by XOR inside the group and addition of whole groups.
template <int CHUNKS>
struct Rows {
    static constexpr bool kPowerOf2 = (CHUNKS & (CHUNKS - 1)) == 0;
    static constexpr int kGroup = kPowerOf2 ? CHUNKS : CHUNKS % 8 == 0 ? 8 : 4;
    static constexpr int kRowBytes = CHUNKS * kChunkBytes;

    // Address of chunk `chunk` from that of chunk 0 in the same row.
    static __device__ __forceinline__ u32 at_chunk(u32 chunk0, u32 chunk) {
        if (kPowerOf2) return chunk0 ^ chunk * kChunkBytes;
        return (chunk0 ^ chunk % kGroup * kChunkBytes) + chunk / kGroup * (kGroup * kChunkBytes);
    }
};

// A tile of P^T or dS^T: rows are keys, of four chunks of eight queries (steps of 16 queries use two of them).
using ScoreRows = Rows<4>;

// A block owns kRows rows, keys in the main kernels and queries in queries.cu, and walks over the rows of
// the other kind in steps of kStep.
template <int HEADDIM_, int ROWS_, int STEP_, int THREADS_, int SCORE_TILES_>
struct Shape {
    static constexpr int kHeaddim = HEADDIM_, kRows = ROWS_, kStep = STEP_, kThreads = THREADS_;
    static constexpr int kChunks = kHeaddim / kChunk;
    using HeadRows = Rows<kChunks>;

    // Shared memory, bytes. Tiles are multiples of 512 bytes, so XOR inside a row never leaves it.
    // The block's own rows are K and V, and each step brings Q and dO; or the other way round. The first of
    // each pair makes S, the second dP.
    static constexpr int kOwnTile = kRows * HeadRows::kRowBytes, kStepTile = kStep * HeadRows::kRowBytes;
    static constexpr int kScoreTile = kRows * ScoreRows::kRowBytes;
    static constexpr int kOwnS = 0, kOwnDp = kOwnTile, kStepS = 2 * kOwnTile, kStepDp = kStepS + kStepTile;
    // Without a tile of its own, dS takes the place of the second step tile.
    static constexpr int kScores = SCORE_TILES_ ? kStepDp + kStepTile : kStepDp;
    static constexpr int kSharedBytes = kStepDp + kStepTile + SCORE_TILES_ * kScoreTile;

    // dQ is STEP queries x headdim: each warp takes kDqTiles tiles of 16 queries x kDqUnits units of 16
    // columns.
    static constexpr int kWarps = kThreads / 32;
    static constexpr int kDqUnitsTotal = kHeaddim / 16;
    // Where the units are too few, or half too many, for the warps, a warp takes one half of the queries.
    static constexpr bool kDqHalves = kStep == 32 && (kDqUnitsTotal * 2 <= kWarps || kDqUnitsTotal % kWarps == kWarps / 2);
    static constexpr int kDqTiles = kStep == 32 && !kDqHalves ? 2 : 1;  // of 16 queries
    static constexpr int kDqColumnWarps = kDqHalves ? kWarps / 2 : kWarps;
    static constexpr int kDqUnits = (kDqUnitsTotal + kDqColumnWarps - 1) / kDqColumnWarps;
};

// Two shared addresses in one register, opaque to the compiler: it would otherwise recompute each from
// threadIdx wherever it runs short of registers. Addresses are even and below 2^17.
class AddressPair {
    u32 packed_;

public:
    __device__ __forceinline__ AddressPair(u32 first, u32 second) : packed_(first / 2 | second / 2 << 16) {
        asm volatile("mov.b32 %0, %0;" : "+r"(packed_));
    }
    __device__ __forceinline__ u32 first() const { return (packed_ & 0xffff) * 2; }
    __device__ __forceinline__ u32 second() const { return (packed_ >> 16) * 2; }
};

// Keeps a pointer that the compiler would otherwise compute again and again. (See pinned() of an int.)
using ::pinned;
__device__ __forceinline__ float* pinned(float* x) {
    asm volatile("mov.b64 %0, %0;" : "+l"(x));
    return x;
}

// ---- memory ---------------------------------------------------------------------------------------

__device__ __forceinline__ uint2 load_shared2(u32 address) {
    uint2 r;
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(r.x), "=r"(r.y) : "r"(address));
    return r;
}
__device__ __forceinline__ void store_shared2(u32 address, u32 x, u32 y) {
    asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(address), "r"(x), "r"(y));
}
// These say that the address is global, which the compiler cannot see behind pinned().
__device__ __forceinline__ float4 load_global4(const float* p) {
    float4 r;
    asm volatile("ld.global.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(r.x), "=f"(r.y), "=f"(r.z), "=f"(r.w) : "l"(p));
    return r;
}
__device__ __forceinline__ float4 load_global4_constant(const float* p) {
    float4 r;
    asm volatile("ld.global.nc.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(r.x), "=f"(r.y), "=f"(r.z), "=f"(r.w) : "l"(p));
    return r;
}
__device__ __forceinline__ void add_global(float* p, float x) {
    asm volatile("red.global.add.f32 [%0], %1;" ::"l"(p), "f"(x) : "memory");
}

// The block's own rows of both operands, once, padded with zeros in both directions. Of `rows` rows those
// from first_row are the block's; the sequence begins at row `origin` of the tensors.
template <class S>
__device__ __forceinline__ void load_own(const BwdParams& p, const Operand& s, const Operand& dp, u32 shared, int origin, int first_row,
                                         int rows) {
    constexpr int kRowsAtOnce = S::kThreads / threads_per_row(S::kChunks);
    using Loader = TileLoader<S::kChunks, kRowsAtOnce, S::kThreads>;
    Loader x(threadIdx.x, head_base(s, blockIdx.z, blockIdx.y) + (origin + first_row) * s.row_stride, s.row_stride, p.problem.headdim);
    Loader y(threadIdx.x, head_base(dp, blockIdx.z, blockIdx.y) + (origin + first_row) * dp.row_stride, dp.row_stride, p.problem.headdim_v);
    const u32 to = shared + swizzled<S::kChunks>(x.row, x.chunk);
#pragma unroll 1
    for (int r = 0; r < S::kRows; r += kRowsAtOnce) {
        const int rows_left = rows - first_row - r;
        x.load(rows_left);
        y.load(rows_left);
        x.flip_signs(p.problem.sign_flip);
        x.store(to + S::kOwnS + r * S::HeadRows::kRowBytes, S::HeadRows::kRowBytes);
        y.store(to + S::kOwnDp + r * S::HeadRows::kRowBytes, S::HeadRows::kRowBytes);
    }
}

// Zeros for the tile of P^T, where a block reaches beyond the last key. The rows of keys that do not exist
// are never written: their P is exp(-lse), which may overflow, and masking them would send every step of the
// block through the mask, beyond the instruction cache.
template <class S>
__device__ __forceinline__ void clear_scores(u32 tile) {
#pragma unroll 1
    for (int i = threadIdx.x * kChunkBytes; i < S::kScoreTile; i += S::kThreads * kChunkBytes) store_shared(tile + i, zero_chunk());
}

// The walk over the tiles of one head: Q and dO, or K and V, from global memory, early into registers. A
// thread takes one chunk of every kRowsAtOnce-th row of both.
//
// Other than TileLoader it pads only rows with zeros. Columns beyond headdim meet the zeros of the block's
// own rows in S and dP, and in the gradients are columns that nobody stores, so there a thread reads the last
// column that exists once more; and no thread keeps two chunks of one row, whose existence it would have to
// remember.
template <class S>
class StepTiles {
    static constexpr int kLanes = S::kChunks <= 4 ? 4 : S::kChunks <= 8 ? 8 : S::kChunks <= 16 ? 16 : 32;  // that share a row
    static constexpr int kRowsAtOnce = S::kThreads / kLanes;
    static constexpr int kLoads = S::kStep / kRowsAtOnce;
    static_assert(kRowsAtOnce % 8 == 0 && kLoads > 0, "the rows of a thread share their swizzle");

    const unsigned short *s_, *dp_;  // this thread's first chunk of the next tile
    uint4 tile_s_[kLoads], tile_dp_[kLoads];

    static __device__ __forceinline__ int row() { return threadIdx.x / kLanes; }
    static __device__ __forceinline__ int chunk() { return threadIdx.x % kLanes; }

public:
    // Shared address, relative to the tile, where this thread's first chunk goes.
    static __device__ __forceinline__ u32 offset() { return swizzled<S::kChunks>(row(), chunk()); }

    __device__ __forceinline__ StepTiles(const BwdParams& p, const Operand& s, const Operand& dp, int head, int first_row) {
        const long long thread_row = first_row + row();
        const int column = chunk() * kChunk;
        s_ = head_base(s, blockIdx.z, head) + thread_row * s.row_stride + min(column, p.problem.headdim - kChunk);
        dp_ = head_base(dp, blockIdx.z, head) + thread_row * dp.row_stride + min(column, p.problem.headdim_v - kChunk);
    }
    // Loads the next tile, of which `rows` rows exist (may be negative or more than a step).
    __device__ __forceinline__ void load(const Operand& s, const Operand& dp, int rows) {
        if (rows >= S::kStep) {
#pragma unroll
            for (int i = 0; i < kLoads; i++) {
                tile_s_[i] = load_global(s_ + i * kRowsAtOnce * s.row_stride);
                tile_dp_[i] = load_global(dp_ + i * kRowsAtOnce * dp.row_stride);
            }
        } else {
            __syncwarp();  // keeps the compiler from turning the branch into predicates that every tile pays for
#pragma unroll
            for (int i = 0; i < kLoads; i++) {
                tile_s_[i] = tile_dp_[i] = zero_chunk();
                if (row() + i * kRowsAtOnce < rows) {
                    tile_s_[i] = load_global(s_ + i * kRowsAtOnce * s.row_stride);
                    tile_dp_[i] = load_global(dp_ + i * kRowsAtOnce * dp.row_stride);
                }
            }
        }
        s_ += S::kStep * s.row_stride;
        dp_ += S::kStep * dp.row_stride;
    }
    // `to` is the address of the first tile plus offset().
    __device__ __forceinline__ void store(u32 to) const {
#pragma unroll
        for (int i = 0; i < kLoads; i++)
            if (S::kChunks == kLanes || chunk() < S::kChunks) {
                const u32 row_address = to + i * kRowsAtOnce * S::HeadRows::kRowBytes;
                store_shared(row_address, tile_s_[i]);
                store_shared(row_address + S::kStepTile, tile_dp_[i]);
            }
    }
};

// Initial accumulators of S^T or dP^T from the row statistics: `stats` is those of the lane's group of
// four queries in tile 0. The two tiles of keys begin with the same values. They are loaded twice, by two
// different instructions: else ptxas would load once and spend a move on every element of the second tile.
template <int M, int N>
__device__ __forceinline__ void load_stats(Accumulator (&c)[M][N], const float* stats) {
    static_assert(M <= 2, "there are two instructions");
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int n = 0; n < N; n++)
#pragma unroll
            for (int v = 0; v < 8; v += 4) {
                const float* from = stats + n * 16 * kStatsPerRow + v;
                const float4 x = m ? load_global4_constant(from) : load_global4(from);
                c[m][n][v] = x.x, c[m][n][v + 1] = x.y, c[m][n][v + 2] = x.z, c[m][n][v + 3] = x.w;
            }
}
// Offset of the lane's group in the statistics of a tile of queries.
__device__ __forceinline__ int lane_stats_offset(const Lane& lane) {
    return (8 * lane.qn + 4 * ((lane.t >> 1) & 1)) * kStatsPerRow;
}

// ---- products -------------------------------------------------------------------------------------

// One chunk (eight elements of headdim) of the operands of S^T or dP^T.
template <int M, int N, int ROW_BYTES>
struct Fragments {
    uint4 a[M], b[N];
    __device__ __forceinline__ Fragments(u32 a_address, u32 b_address) {
        a[0] = load_shared(a_address);
#pragma unroll
        for (int n = 0; n < N; n++) b[n] = load_shared(b_address + n * 16 * ROW_BYTES);
#pragma unroll
        for (int m = 1; m < M; m++) a[m] = load_shared(a_address + m * 16 * ROW_BYTES);
    }
    __device__ __forceinline__ void multiply_low(Accumulator (&c)[M][N]) const {
#pragma unroll
        for (int m = 0; m < M; m++)
#pragma unroll
            for (int n = 0; n < N; n++) mma_row_col(c[m][n], a[m].x, a[m].y, b[n].x, b[n].y);
    }
    __device__ __forceinline__ void multiply_high(Accumulator (&c)[M][N]) const {
#pragma unroll
        for (int m = 0; m < M; m++)
#pragma unroll
            for (int n = 0; n < N; n++) mma_row_col(c[m][n], a[m].z, a[m].w, b[n].z, b[n].w);
    }
};

// Address of the lane's row of the A operand of S^T, dP^T (the block's own rows), from the warp's first row.
template <class S>
__device__ __forceinline__ u32 own_operand(u32 tile, const Lane& lane, int row) {
    return tile + swizzled<S::kChunks>(row + key_of(lane.t, lane.qm), 0);
}
// ... and of the B operand (a step's rows), from the warp's first. Column t is the query of the file's head.
template <class S>
__device__ __forceinline__ u32 step_operand(u32 tile, const Lane& lane, int row) {
    const int in_eight = (lane.t & 1) + 2 * (lane.t >> 2) + 4 * ((lane.t >> 1) & 1);
    return tile + swizzled<S::kChunks>(row + 8 * lane.qn + in_eight, 0);
}

// ---- scores ---------------------------------------------------------------------------------------

// Where the lane's element (m, n, v) of S^T lies: own row (a key) from the warp's first, row of the step (a
// query) from the step's.
__device__ __forceinline__ int score_own(const Lane& lane, int m, int v) {
    return 16 * m + 4 * lane.qm + (lane.t & 1) + (v & 2) + 8 * (lane.t >> 2);
}
__device__ __forceinline__ int score_step(const Lane& lane, int n, int v) {
    return 16 * n + 8 * lane.qn + 4 * ((lane.t >> 1) & 1) + (v & 1) + 2 * (v >> 2);
}

// Sets what the mask hides to -inf. Only for tiles at an edge: the caller branches, all lanes alike.
enum class Own { kKeys, kQueries };
template <Own OWN, int M, int N>
__device__ __forceinline__ void apply_mask(Accumulator (&s)[M][N], const BwdParams& p, const Lane& lane, int own, int step) {
    const Mask mask = mask_of(p.problem, BlockSequence(p.problem, p.lengths, blockIdx.z));
    own += score_own(lane, 0, 0);
    step += score_step(lane, 0, 0);
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int n = 0; n < N; n++)
#pragma unroll
            for (int v = 0; v < 8; v++) {
                const int x = own + 16 * m + (v & 2), y = step + 16 * n + (v & 1) + 2 * (v >> 2);
                if (!(OWN == Own::kKeys ? mask.visible(y, x) : mask.visible(x, y))) s[m][n][v] = negative_infinity();
            }
}

// P * 2^shift in place: with kExponentShift, packed by pack_probabilities, it is P * 2^12.
template <int M, int N>
__device__ __forceinline__ void exponentials(Accumulator (&s)[M][N], float scale_log2, float shift) {
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int n = 0; n < N; n++)
#pragma unroll
            for (int v = 0; v < 8; v++) s[m][n][v] = exp2_approx(fmaf(s[m][n][v], scale_log2, shift));
}

// A 16x16 tile of P^T or dS^T as a lane holds it in fp16: queries 0,1 and 2,3 of its first key, then of
// the key two rows below.
struct PackedTile {
    u32 x[4];
};

// Address of the first of these in shared memory, for a warp whose scores begin at this own row and chunk of
// eight rows of the step.
__device__ __forceinline__ u32 packed_address(u32 tile, const Lane& lane, int row, int chunk) {
    return tile + swizzled<4>(row + score_own(lane, 0, 0), chunk + lane.qn) + 8 * ((lane.t >> 1) & 1);
}
// Tile (m, n) lies 16 rows and two chunks on; the second row differs in bit 1, and so in its swizzle.
__device__ __forceinline__ u32 packed_first(u32 address, int m, int n) {
    return (address ^ (2 * n * kChunkBytes)) + 16 * m * ScoreRows::kRowBytes;
}
__device__ __forceinline__ u32 packed_second(u32 address, int m, int n) {
    return (address ^ ((2 * n + 1) * kChunkBytes)) + (16 * m + 2) * ScoreRows::kRowBytes;
}
__device__ __forceinline__ void store_packed(u32 address, int m, int n, const PackedTile& tile) {
    store_shared2(packed_first(address, m, n), tile.x[0], tile.x[1]);
    store_shared2(packed_second(address, m, n), tile.x[2], tile.x[3]);
}
// Only the rows that exist: `rows_left` is their number from the lane's first row on.
__device__ __forceinline__ void store_packed(u32 address, int m, int n, const PackedTile& tile, int rows_left) {
    if (rows_left > 16 * m) store_shared2(packed_first(address, m, n), tile.x[0], tile.x[1]);
    if (rows_left > 16 * m + 2) store_shared2(packed_second(address, m, n), tile.x[2], tile.x[3]);
}
__device__ __forceinline__ PackedTile load_packed(u32 address, int m, int n) {
    const uint2 a = load_shared2(packed_first(address, m, n)), b = load_shared2(packed_second(address, m, n));
    return {{a.x, a.y, b.x, b.y}};
}

__device__ __forceinline__ PackedTile pack_probability_tile(const Accumulator& s) {
    return {{pack_probabilities(s[0], s[1]), pack_probabilities(s[4], s[5]), pack_probabilities(s[2], s[3]),
             pack_probabilities(s[6], s[7])}};
}
// fp32 to the end: dP - delta may be far beyond fp16 where P is small. Only dS itself is rounded to fp16,
// and beyond 65504 becomes infinite, which is what a GradScaler looks for.
__device__ __forceinline__ PackedTile pack_tile(const Accumulator& s) {
    return {{to_half2(s[0], s[1]), to_half2(s[4], s[5]), to_half2(s[2], s[3]), to_half2(s[6], s[7])}};
}

// ---- dV += P^T dO, dK += dS^T Q, or dQ += dS K --------------------------------------------------------------------

// The lane's row of the A operand: P^T or dS^T (dS), row-major, from the warp's first row.
__device__ __forceinline__ u32 score_operand(u32 tile, const Lane& lane, int row) {
    return tile + swizzled<4>(row + key_of(lane.t, lane.qm), 0);
}
// ... and of the B operand: dO or Q (K), row-major; the warp's first block of 32 columns.
template <class S>
__device__ __forceinline__ u32 column_operand(u32 tile, const Lane& lane, int block) {
    return tile + swizzled<S::kChunks>(lane.quad, 4 * block + 2 * lane.qn + lane.half);
}
// Column of accumulator element v of c[..][j][i] relative to the warp's blocks: see column_operand.
__device__ __forceinline__ int column_in_block(const Lane& lane, int i, int v) {
    return 16 * lane.qn + 8 * (v >> 2) + 4 * i + (lane.t & 2) + (v & 1);
}

// c[m][j][i]: 16 own rows m, block j of 32 columns (every BLOCK_STEP-th), half i of a lane's chunks.
template <class S, int BLOCK_STEP, int M, int J>
__device__ __forceinline__ void accumulate(Accumulator (&c)[M][J][2], u32 a_address, u32 b_address) {
    using HeadRows = typename S::HeadRows;
#pragma unroll 1
    for (int chunk = 0; chunk < (S::kStep < 32 ? S::kStep : 32) / 8; chunk++) {
        const u32 a0 = a_address ^ (chunk * kChunkBytes);
        uint4 a[M];
#pragma unroll
        for (int m = 0; m < M; m++) a[m] = load_shared(a0 + m * 16 * ScoreRows::kRowBytes);
        const u32 b_row = b_address + chunk * (8 * HeadRows::kRowBytes);
#pragma unroll (kGeneral && S::kHeaddim > 64 ? 1 : 2)  // general code is past the instruction cache
        for (int h = 0; h < 2; h++) {  // four rows; bit 2 of the row is bit 1 of the swizzle
            uint4 b[J];
#pragma unroll
            for (int j = 0; j < J; j++)
                b[j] = load_shared(HeadRows::at_chunk(b_row ^ (h * 2 * kChunkBytes), 4 * BLOCK_STEP * j) + h * 4 * HeadRows::kRowBytes);
#pragma unroll
            for (int m = 0; m < M; m++)
#pragma unroll
                for (int j = 0; j < J; j++) {
                    const u32 a_low = h ? a[m].z : a[m].x, a_high = h ? a[m].w : a[m].y;
                    mma_row_row(c[m][j][0], a_low, a_high, b[j].x, b[j].y);
                    mma_row_row(c[m][j][1], a_low, a_high, b[j].z, b[j].w);
                }
        }
    }
}

// ---- dQ += dS K, atomically -----------------------------------------------------------------------------------

// A warp computes kDqTiles x 16 queries of kDqUnits units of 16 columns, over all keys of the block.
template <class S>
struct DqProduct {
    static constexpr int kUnitStep = S::kDqColumnWarps;  // a warp's units are that far apart
    static constexpr int kKeysAtOnce = 16;
    // Independent sums: a single block an SM needs two or more to fill the pipe.
    static constexpr int kChains = S::kWarps == 8 && S::kDqTiles * S::kDqUnits < 4 ? 2 : 1;

    // Column-major A operand: four keys (quad) of four queries. A lane reads eight consecutive queries
    // for two tiles, or four for one.
    static __device__ __forceinline__ int query(const Lane& lane, int warp) {
        if (S::kStep == 16) return 8 * lane.half + 4 * lane.qm;
        return 8 * (2 * lane.qm + lane.half) + (S::kDqHalves ? 4 * (warp / S::kDqColumnWarps) : 0);
    }
    static __device__ __forceinline__ int unit(int warp) { return warp % S::kDqColumnWarps; }

    static __device__ __forceinline__ u32 a_operand(u32 tile, const Lane& lane, int warp) {
        const int q = query(lane, warp);
        return tile + swizzled<4>(lane.quad, q / 8) + q % 8 * 2;
    }
    // Row-major B operand: four keys of four columns.
    static __device__ __forceinline__ u32 b_operand(u32 tile, const Lane& lane, int warp) {
        return tile + swizzled<S::kChunks>(lane.quad, 2 * unit(warp) + lane.half) + 8 * lane.qn;
    }
    // Offset into a tile of the accumulator in global memory where a lane's sums go: after the exchange
    // of add_to() it has one column of the rows of both lanes of its pair.
    static __device__ __forceinline__ int output_offset(const Lane& lane, int warp) {
        return query(lane, warp) * S::kHeaddim + 16 * unit(warp) + 4 * lane.qn + (lane.t & 3);
    }

    Accumulator c[kChains][S::kDqTiles][S::kDqUnits];

    __device__ __forceinline__ DqProduct() {
#pragma unroll
        for (int k = 0; k < kChains; k++)
#pragma unroll
            for (int i = 0; i < S::kDqTiles; i++)
#pragma unroll
                for (int u = 0; u < S::kDqUnits; u++) clear(c[k][i][u]);
    }

    __device__ __forceinline__ void multiply(u32 a_address, u32 b_address) {
        using HeadRows = typename S::HeadRows;
#pragma unroll 1
        for (int key = 0; key < S::kRows; key += kKeysAtOnce) {
            const u32 a0 = a_address + key * ScoreRows::kRowBytes, b0 = b_address + key * HeadRows::kRowBytes;
#pragma unroll
            for (int s = 0; s < kKeysAtOnce / 4; s++) {
                const u32 flip = s % 2 * 2 * kChunkBytes;  // bit 2 of the key is bit 1 of the swizzle
                const u32 a = (a0 ^ flip) + s * 4 * ScoreRows::kRowBytes, b = (b0 ^ flip) + s * 4 * HeadRows::kRowBytes;
                uint4 queries;
                if (S::kDqTiles == 2) {
                    queries = load_shared(a);
                } else {
                    const uint2 four = load_shared2(a);
                    queries.x = four.x, queries.y = four.y;
                }
#pragma unroll
                for (int u = 0; u < S::kDqUnits; u++) {
                    const uint2 columns = load_shared2(HeadRows::at_chunk(b, 2 * kUnitStep * u));
                    mma_col_row(c[s % kChains][0][u], queries.x, queries.y, columns.x, columns.y);
                    if (S::kDqTiles == 2)
                        mma_col_row(c[s % kChains][S::kDqTiles - 1][u], queries.z, queries.w, columns.x, columns.y);
                }
            }
        }
    }

    // Lane pairs exchange columns for rows, so that eight lanes of an instruction fill a 32-byte sector.
    __device__ __forceinline__ void add_to(float* accum) {
        const bool odd = threadIdx.x & 1;
#pragma unroll
        for (int i = 0; i < S::kDqTiles; i++)
#pragma unroll
            for (int u = 0; u < S::kDqUnits; u++)
#pragma unroll
                for (int v = 0; v < 8; v += 2) {
                    float x0 = c[0][i][u][v], x1 = c[0][i][u][v + 1];
                    if (kChains == 2) x0 += c[kChains - 1][i][u][v], x1 += c[kChains - 1][i][u][v + 1];
                    const float received = __shfl_xor_sync(~0u, odd ? x0 : x1, 1);
                    float* to = accum + (4 * i + (v & 2)) * S::kHeaddim + 16 * kUnitStep * u + 2 * (v & 4);
                    add_global(to, odd ? received : x0);
                    add_global(to + S::kHeaddim, odd ? x1 : received);
                }
    }
};

// ---- epilogue -------------------------------------------------------------------------------------

// The block's gradients from the warps' accumulators to shared memory ...
template <bool BF16, class S, int BLOCK_STEP, int M, int J>
__device__ __forceinline__ void to_shared_as(const Accumulator (&c)[M][J][2], float factor, u32 tile, int first_row, int block) {
    const Lane lane;
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int j = 0; j < J; j++)
#pragma unroll
            for (int i = 0; i < 2; i++)
#pragma unroll
                for (int v = 0; v < 8; v += 2) {
                    const int row = first_row + score_own(lane, m, v);
                    const int column = 32 * (block + BLOCK_STEP * j) + column_in_block(lane, i, v);
                    asm volatile("st.shared.u32 [%0], %1;" ::"r"(tile + swizzled<S::kChunks>(row, column / kChunk) + column % kChunk * 2),
                                 "r"(to_gradient2<BF16>(c[m][j][i][v] * factor, c[m][j][i][v + 1] * factor)));
                }
}
// One branch around all of it: the code is there twice, and runs once.
template <class S, int BLOCK_STEP, int M, int J>
__device__ __forceinline__ void to_shared(const Accumulator (&c)[M][J][2], const BwdParams& p, float factor, u32 tile, int first_row,
                                          int block) {
    if (gradients_are_bf16(p))
        to_shared_as<true, S, BLOCK_STEP>(c, factor, tile, first_row, block);
    else
        to_shared_as<false, S, BLOCK_STEP>(c, factor, tile, first_row, block);
}

// ... and from there to the output, whole chunks of the rows and columns that exist.
template <class S>
__device__ __forceinline__ void shared_to_output(const Output& out, u32 tile, int origin, int first_row, int all_rows, int headdim) {
    constexpr int kLanes = 8;
    unsigned short* base = head_base(out, blockIdx.z, blockIdx.y);
    const int rows = min(S::kRows, all_rows - first_row);
    for (int row = threadIdx.x / kLanes; row < rows; row += S::kThreads / kLanes)
        for (int chunk = threadIdx.x % kLanes; chunk < headdim / kChunk; chunk += kLanes)
            *reinterpret_cast<uint4*>(base + (origin + first_row + row) * out.row_stride + chunk * kChunk) =
                load_shared(tile + swizzled<S::kChunks>(row, chunk));
}

// ---- the walk -------------------------------------------------------------------------------------

// Which query rows a block of keys meets, and for which of them it needs the mask.
template <class S>
struct QueryRange {
    int end;  // behind the last row that sees one of the keys
    UnmaskedRows<S::kStep> unmasked;

    __device__ __forceinline__ QueryRange(const Mask& mask, int first_key)
        : end(pinned(kRagged && first_key >= mask.seqlen_k ? 0 : mask.row_end(first_key, S::kRows))), unmasked(mask, first_key, min(S::kRows, mask.seqlen_k - first_key)) {
        unmasked.first = pinned(unmasked.first);
        unmasked.span = pinned(unmasked.span);
    }
    // First row of the first step: once a head, so it is not kept.
    static __device__ __forceinline__ int first(const Mask& mask) {
        return mask.row_first(block_index_here() * S::kRows) / S::kStep * S::kStep;
    }
    // Rows of Q and dO, for loads. Ragged kernels have no register for seqlen_q: rows behind `end`, which the mask hides,
    // may as well not exist.
    __device__ __forceinline__ int rows(const BwdParams& p) const { return kRagged ? end : p.problem.seqlen_q; }
    // The next step, or, behind the last, one whose statistics may be loaded.
    __device__ __forceinline__ int next_step(const BwdParams& p, int row) const {
        return min(row + S::kStep, kRagged ? (end - 1) & -S::kStep : p.seqlen_q_rounded - S::kStep);
    }
};

}  // namespace volta
