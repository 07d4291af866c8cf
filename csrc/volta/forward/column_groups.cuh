// Forward kernel of the volta family for headdims whose output does not fit one warp's registers: 512.
//
// The eight warps of a block are two groups of four, or one group. A group has 32 rows, and its warps divide the columns: of Q and
// K in the first product, of V and the output in the second. Schedule of a step of 32 keys, with a barrier at each bar:
//
//   partial S  |  store partial S in K's place  |  sum, mask, softmax, store P  |  store V  |  O += P V  |  store K  |
//
// Loads of V from global memory are in flight during the softmax, those of the next K during the second product. For the sums, the
// mask and the softmax each warp has eight or four of the group's rows with all keys (ColumnGroupsLayout), so that a row's state is
// one warp's.
#pragma once

#include "forward/block.cuh"
#include "forward/pages.cuh"
#include "volta/forward/features.cuh"
#include "volta/forward/output_product.cuh"

namespace volta {

// Layout of the summed scores (score_layout.cuh): row lane / 8 and, of two, 4 further; keys 4 * (lane % 8) to 3 further.
template <int Rows>
struct ColumnGroupsLayout {
    struct Lane {
        int lane;
        __device__ __forceinline__ constexpr explicit Lane(int lane_) : lane(lane_) {}
    };
    using Tile = float[4 * Rows];
    static constexpr int kTileQueries = 4 * Rows, kTileKeys = 32, kElements = 4 * Rows;
    static constexpr bool kEitherOrder = ForwardLayout::kEitherOrder;
    __device__ __forceinline__ static constexpr int first_query(const Lane& l) { return l.lane >> 3; }
    __device__ __forceinline__ static constexpr int first_key(const Lane& l) { return 4 * (l.lane & 7); }
    __device__ __forceinline__ static constexpr int query_slot(int v) { return row_slot(row_of(v)); }
    __device__ __forceinline__ static constexpr int key_slot(int v) { return v & 3; }

    static constexpr int kRows = Rows, kKeys = 4;
    __device__ __forceinline__ static constexpr int row_of(int v) { return v >> 2; }
    __device__ __forceinline__ static constexpr int row_slot(int r) { return 4 * r; }
    static constexpr int kRowLaneMasks[3] = {1, 2, 4};
    __device__ __forceinline__ static constexpr bool leads_row(const Lane& l) { return (l.lane & 7) == 0; }
};
static_assert(covers_tile<ColumnGroupsLayout<1>>() && has_rows<ColumnGroupsLayout<1>>(), "score_layout.cuh");
static_assert(covers_tile<ColumnGroupsLayout<2>>() && has_rows<ColumnGroupsLayout<2>>(), "score_layout.cuh");

// Four bytes of shared memory (tile.cuh has chunks).
__device__ __forceinline__ u32 load_shared1(u32 address) {
    u32 r;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(r) : "r"(address));
    return r;
}
__device__ __forceinline__ void store_shared1(u32 address, u32 x) {
    asm volatile("st.shared.u32 [%0], %1;" ::"r"(address), "r"(x));
}

template <int Headdim, int BlockRows, class Grid = DataParallelGrid>
struct ForwardColumnGroups {
    static constexpr int kWarps = 8, kThreads = 32 * kWarps;
    static constexpr int kRowTiles = 2, kKeyTiles = 2;  // of 16, of a warp's products
    static constexpr int kStep = 16 * kKeyTiles;
    static constexpr int kGroupRows = 16 * kRowTiles;
    static constexpr int kBlockRows = BlockRows;
    static constexpr int kRowGroups = kBlockRows / kGroupRows, kColumnGroups = kWarps / kRowGroups;
    static_assert(kRowGroups * kGroupRows == kBlockRows && (kColumnGroups == 4 || kColumnGroups == 8), "add_scores()");
    static constexpr int kWarpRows = kBlockRows / kWarps, kLaneRows = kWarpRows / 4;  // of the sums and the softmax
    using Layout = ColumnGroupsLayout<kLaneRows>;
    static_assert(Layout::kTileQueries == kWarpRows && Layout::kTileKeys == kStep, "warps divide the scores");
    static constexpr int kChunks = Headdim / kChunk;
    static constexpr int kWarpChunks = kChunks / kColumnGroups;
    static constexpr int kOutputTiles = kWarpChunks / 2;
    // Chunk number i of a warp in the first product is i * kColumnGroups plus the warp's number in its group. The last ones of Q
    // are in registers: shared memory has no room for them.
    static constexpr int kRegisterChunks = 2, kSharedChunks = kWarpChunks - kRegisterChunks;
    static constexpr int kChunksQ = kColumnGroups * kSharedChunks;
    static constexpr int kPitch = kChunks * kChunkBytes, kPitchQ = kChunksQ * kChunkBytes;
    static_assert(kChunksQ % 8 == 0 && kSharedChunks % 2 == 0 && kRegisterChunks == 2, "swizzled() and add_scores()");
    // Shared memory: Q; K, then partial scores, then V; P; factors of rows. At the end, states of rows in P's place.
    static constexpr int kOffsetK = kBlockRows * kPitchQ;
    static constexpr int kScoreBytes = kBlockRows * kStep * 4;  // of the partial scores of one warp of each group
    static_assert(kColumnGroups * kScoreBytes <= kStep * kPitch, "partial scores take K's place");
    static constexpr int kOffsetP = kOffsetK + kStep * kPitch;
    static constexpr int kPitchP = 2 * kStep;
    static constexpr int kOffsetFactors = kOffsetP + kBlockRows * kPitchP;
    static constexpr int kSharedBytes = kOffsetFactors + kBlockRows * 4;

    using Tile = Scores<ForwardLayout, kRowTiles, kKeyTiles>;
    using RowScores = Scores<Layout, 1, 1>;
    using RowState = SoftmaxRows<Layout, 1>;
    using Accumulators = Accumulator[kRowTiles][kOutputTiles];

    // The thread's coordinates and addresses in shared memory, from `base` on. Each is used once a step, where it is computed again
    // from the thread's number: the loop has no registers for them.
    struct Place {
        u32 base;
        ForwardLane lane;
        int warp, column, group_row;  // column: the warp's number in its group
        int own_row, own_chunk;  // of the summed scores: first row, and keys in fours

        __device__ __forceinline__ Place(u32 base_, int thread)
            : base(base_), lane(thread & 31), warp(thread / 32), column(warp % kColumnGroups),
              group_row(warp / kColumnGroups * kGroupRows), own_row(warp * kWarpRows + (thread >> 3 & 3)), own_chunk(thread & 7) {}

        __device__ __forceinline__ u32 q() const { return base + swizzled<kChunksQ>(group_row + lane.q_row(), column); }
        __device__ __forceinline__ u32 k() const { return base + kOffsetK + swizzled<kChunks>(lane.k_row(), column); }
        __device__ __forceinline__ u32 v() const {
            return base + kOffsetK + swizzled<kChunks>(lane.v_row(), kWarpChunks * column + lane.v_chunk());
        }
        // From the rows of the lane's own keys to the other eight.
        __device__ __forceinline__ int v_other() const { return (lane.qn ? -8 : 8) * kPitch; }
        // Partial scores: rows of eight chunks of four keys. Bits 0 and 1 of the row are XORed into bits 1 and 2 of the chunk:
        // eight lanes that store together have these bits of the row and bit 0 of the chunk different.
        __device__ __forceinline__ static int score(int row, int chunk) {
            return row * (4 * kStep) + (chunk ^ (row & 3) * 2) * kChunkBytes;
        }
        __device__ __forceinline__ u32 score_store() const {
            return base + kOffsetK + column * kScoreBytes +
                   score(group_row + ForwardLayout::first_query(lane), ForwardLayout::first_key(lane) / 4);
        }
        __device__ __forceinline__ u32 score_load() const { return base + kOffsetK + score(own_row, own_chunk); }
        // P: rows of four units of eight keys, the even keys before the odd ones, as the second product takes them. Bits 1 and 2
        // of the row are XORed into the unit.
        __device__ __forceinline__ static int probability(int row, int unit) {
            return kOffsetP + row * kPitchP + (unit ^ (row >> 1 & 3)) * kChunkBytes;
        }
        __device__ __forceinline__ u32 p_store() const { return base + probability(own_row, own_chunk / 2) + own_chunk % 2 * 4; }
        __device__ __forceinline__ u32 p_load() const { return base + probability(group_row + lane.q_row(), lane.qn); }
        // The float of an output row, in an array of the block's rows.
        __device__ __forceinline__ float row_float(int offset, int mt, int r) const {
            return __uint_as_float(load_shared1(
                base + offset + 4 * (group_row + ForwardLayout::first_query(lane) + 16 * mt + ForwardLayout::row_slot(r))));
        }
    };

    template <int Passes, int ChunksPerRow>
    __device__ __forceinline__ static void clear(uint4 (&staging)[Passes][ChunksPerRow]) {
#pragma unroll
        for (int i = 0; i < Passes; i++)
#pragma unroll
            for (int c = 0; c < ChunksPerRow; c++) staging[i][c] = zero_chunk();
    }

    // Operands of one chunk.
    struct Operands {
        uint4 a[kRowTiles], b[kKeyTiles];
        __device__ __forceinline__ void load_q(u32 q) {
#pragma unroll
            for (int mt = 0; mt < kRowTiles; mt++) a[mt] = load_shared(q + mt * 16 * kPitchQ);
        }
        __device__ __forceinline__ void load_k(u32 k) {
#pragma unroll
            for (int nt = 0; nt < kKeyTiles; nt++) b[nt] = load_shared(k + nt * 16 * kPitch);
        }
        __device__ __forceinline__ void multiply(Tile& s, const uint4 (&q)[kRowTiles]) const {
#pragma unroll
            for (int nt = 0; nt < kKeyTiles; nt++)
#pragma unroll
                for (int mt = 0; mt < kRowTiles; mt++) mma_row_col(s.tile[mt][nt], q[mt].x, q[mt].y, b[nt].x, b[nt].y);
#pragma unroll
            for (int nt = 0; nt < kKeyTiles; nt++)
#pragma unroll
                for (int mt = 0; mt < kRowTiles; mt++) mma_row_col(s.tile[mt][nt], q[mt].z, q[mt].w, b[nt].z, b[nt].w);
        }
    };

    // From the address of an even chunk of the warp to that of the next. The swizzle XORs the lower three bits of a chunk's number.
    __device__ __forceinline__ static u32 odd_chunk(u32 even) {
        return kColumnGroups == 4 ? even ^ 4 * kChunkBytes : even + kColumnGroups * kChunkBytes;
    }

    // Partial S = Q K^T over the warp's columns. q and k: the lane's addresses of its chunk 0.
    __device__ __forceinline__ static void add_scores(Tile& s, u32 q, u32 k, const uint4 (&last)[kRegisterChunks][kRowTiles]) {
        constexpr int kPair = 2 * kColumnGroups * kChunkBytes;
        Operands even, odd;
        even.load_q(q), even.load_k(k);
#pragma unroll 1
        for (int i = 0; i < kSharedChunks; i += 2, q += kPair, k += kPair) {
            odd.load_q(odd_chunk(q)), odd.load_k(odd_chunk(k));
            __syncwarp();
            even.multiply(s, even.a);
            even.load_q(q + kPair), even.load_k(k + kPair);  // after the last pair, nothing uses this Q
            __syncwarp();
            odd.multiply(s, odd.a);
        }
        odd.load_k(odd_chunk(k));
        __syncwarp();
        even.multiply(s, last[0]);
        odd.multiply(s, last[1]);
    }

    __device__ __forceinline__ static void run(const FwdParams& p, const Grid& grid = Grid()) {
        extern __shared__ __align__(1024) unsigned char shared[];
        const u32 base = shared_address(shared);
        const Problem& problem = p.problem;
        const typename Grid::template Block<kBlockRows> block(problem, grid);
        const BlockSeqlenInfo sequence(p, block.batch);
        if (kVarlen && block.row >= sequence.seqlen_q()) return;
        const Mask mask = mask_of(problem, sequence);
        const int thread = threadIdx.x, row = keep_in_register(block.row + thread / 32 * kWarpRows);
        const auto place = [&] { return Place(base, remat_thread_index()); };

        uint4 q_last[kRegisterChunks][kRowTiles];
        {
            const Place at = place();
            const unsigned short* q_base = rows_of(p.q, block.batch, block.head, sequence.q_offset()) + block.row * p.q.row_stride;
            constexpr int kRows = kThreads / threads_per_row(kChunksQ);
            TileLoader<kChunksQ, kRows, kThreads> q(thread, q_base, p.q.row_stride, min(problem.headdim, kChunksQ * kChunk));
#pragma unroll 1
            for (int i = 0; i < kBlockRows; i += kRows) {
                q.load(sequence.seqlen_q() - block.row - i);
                q.flip_signs(problem.sign_flip);
                q.store(base + i * kPitchQ + swizzled<kChunksQ>(q.row, q.chunk), kPitchQ);
            }
#pragma unroll
            for (int c = 0; c < kRegisterChunks; c++)
#pragma unroll
                for (int mt = 0; mt < kRowTiles; mt++) {
                    const int i = at.group_row + 16 * mt + at.lane.q_row(), chunk = kColumnGroups * (kSharedChunks + c) + at.column;
                    q_last[c][mt] = zero_chunk();
                    if (block.row + i < sequence.seqlen_q() && chunk * kChunk < problem.headdim)
                        q_last[c][mt] = flipped(load_global(q_base + i * p.q.row_stride + chunk * kChunk), problem.sign_flip);
                }
        }

        int key = block.template key_first<kStep>(mask);
        if (kRoundedKeys) key &= ~15;
        const int key_end = keep_in_register(block.template key_end<kStep>(mask));
        if constexpr (kPaged) {
            if (!has_pages(p.cache, block.batch, sequence, mask)) return;
        }
        typename Grid::template Steps<kStep> keys(grid, block, key, key_end);
        KvTiles<kPaged, kChunks, kChunks, kStep, kThreads, Grid::template Stream> tiles(thread, p, block, sequence.k_offset(), key,
                                                                                        key_end);
        auto& k = tiles.k;
        auto& v = tiles.v;
        using Stream = TileStream<kChunks, kStep, kThreads>;
        // K and V in flight from global to shared memory. Cleared before each load, so that what does not exist is 0, and no
        // register is in use during the first product.
        uint4 staging[Stream::kPasses][Stream::kChunksPerRow];
        // A warp of padding rows counts as one at the last row, so that a tile past the last key is masked in all warps.
        UnmaskedKeys<kStep> unmasked(mask, min(row, sequence.seqlen_q() - 1), kWarpRows);
        const float scale = kHasScoreMod ? 1.f : problem.scale_log2;

        RowState softmax;
        Accumulators o;
#pragma unroll
        for (int mt = 0; mt < kRowTiles; mt++)
#pragma unroll
            for (int j = 0; j < kOutputTiles; j++) volta::clear(o[mt][j]);

        clear(staging);
        tiles.load_k(staging, p, keys.first());
        const auto kv_store = [&] {
            const int thread = remat_thread_index();
            return base + kOffsetK + swizzled<kChunks>(Stream::row_of(thread), Stream::chunk_of(thread));
        };
        k.store(staging, kv_store(), kPitch, false);
        __syncthreads();
#pragma unroll 1
        for (; keys.exists(); keys.advance(grid)) {
            const int key = keys.first();
            {
                Tile s;
                s.clear();
                const Place at = place();
                add_scores(s, at.q(), at.k(), q_last);
                clear(staging);
                tiles.load_v(staging, p, key);
                __syncthreads();
                const u32 to = at.score_store();
#pragma unroll
                for (int nt = 0; nt < kKeyTiles; nt++)
#pragma unroll
                    for (int mt = 0; mt < kRowTiles; mt++)
#pragma unroll
                        for (int r = 0; r < ForwardLayout::kRows; r++) {
                            const float* x = s.tile[mt][nt] + 2 * r;  // keys 0, 2 and, four elements further, 1, 3
                            store_shared((to ^ nt * 64) + (16 * mt + ForwardLayout::row_slot(r)) * (4 * kStep),
                                         make_uint4(__float_as_uint(x[0]), __float_as_uint(x[4]), __float_as_uint(x[1]),
                                                    __float_as_uint(x[5])));
                        }
            }
            __syncthreads();
            RowScores s;
            const Place at = place();
#pragma unroll
            for (int r = 0; r < kLaneRows; r++) {
                float* x = s.tile[0][0] + 4 * r;
#pragma unroll
                for (int from = 0; from < kColumnGroups; from++) {
                    const uint4 part = load_shared(at.score_load() + from * kScoreBytes + 4 * r * (4 * kStep));
                    const float y[4] = {__uint_as_float(part.x), __uint_as_float(part.y), __uint_as_float(part.z),
                                        __uint_as_float(part.w)};
#pragma unroll
                    for (int i = 0; i < 4; i++) x[i] = from == 0 ? y[i] : x[i] + y[i];
                }
            }
            if (kHasScoreMod) {
                s.apply_score_mod(p, mask, row, key);
                if (kHasBias && p.score_options.bias) {
                    ScoreBias<Layout, 1, 1> bias;
                    bias.load(p, row, key);
                    bias.add_to(s, p.score_options);
                }
            }
            if (kGeneric || !unmasked.contains(key)) {  // generic kernels have no registers for the test

                const int batch = grid.remat_batch(problem);
                s.apply_mask(mask_of(problem, BlockSeqlenInfo(p, batch)), row, key);
            }
            const bool moved = s.needs_rescale(softmax);
            float factor[2] = {1.f, 1.f};  // of kLaneRows
            if (moved) {
                const float inverse_scale = 1.f / __int_as_float(keep_in_register(__float_as_int(scale)));
                s.template update_row_max<RescaledRows::kAll>(softmax, scale, inverse_scale,
                                                              [&](int, int r, float f) { factor[r] = f; });
            }
            unsigned kept = ~0u;
            if (kHasScoreMod && kHasDropout && p.score_options.rng_state) {
                const int of_row = row + (at.lane.lane >> 3);  // the call's rows differ by 4
                const uint4 numbers = DropoutBits<ForwardLayout, 1>::numbers_of(p).numbers(of_row & ~4, key + 4 * at.own_chunk);
                kept = DropoutRule(p.score_options).kept_bits(numbers) >> kept_bit(of_row >> 2 & 1, 0);
            }
#pragma unroll
            for (int r = 0; r < kLaneRows; r++) {
                float* x = s.tile[0][0] + 4 * r;
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    x[i] = softmax.row[0][r].probability(x[i], scale);
                    if (kHasScoreMod && kHasDropout && !(kept >> kept_bit(r, i) & 1)) x[i] = 0.f;
                }
                // four rows further, bit 2 of the row is the other one
                const u32 to = (at.p_store() ^ r * 2 * kChunkBytes) + 4 * r * kPitchP;
                store_shared1(to, pack_probabilities(x[0], x[2]));
                store_shared1(to + 8, pack_probabilities(x[1], x[3]));
                if (at.own_chunk == 0) store_shared1(base + kOffsetFactors + (at.own_row + 4 * r) * 4, __float_as_uint(factor[r]));
            }
            const bool any_moved = __syncthreads_or(moved);
            v.store(staging, kv_store(), kPitch, false);
            if (any_moved) {
#pragma unroll
                for (int mt = 0; mt < kRowTiles; mt++)
#pragma unroll
                    for (int r = 0; r < ForwardLayout::kRows; r++) {
                        const float f = at.row_float(kOffsetFactors, mt, r);
#pragma unroll
                        for (int j = 0; j < kOutputTiles; j++)
#pragma unroll
                            for (int x = 0; x < 8; x++)
                                if (ForwardLayout::row_of(x) == r) o[mt][j][x] *= f;
                    }
            }
            __syncthreads();
            clear(staging);
            tiles.load_k(staging, p, keys.after(1));
            const Place product = place();
            u32 v_own = product.v(), v_other = v_own + product.v_other(), p_tile = product.p_load();
#pragma unroll 1
            for (int tile = 0; tile < kKeyTiles; tile++) {
                uint4 probabilities[kRowTiles][2];  // own keys, the other quad-pair column's
#pragma unroll
                for (int w = 0; w < 2; w++)
#pragma unroll
                    for (int mt = 0; mt < kRowTiles; mt++)
                        probabilities[mt][w] = load_shared((p_tile ^ w * kChunkBytes) + 16 * mt * kPitchP);
                accumulate_columns<2, kPitch>(
                    o,
                    [&](int mt, int w, int u) {
                        const uint4& x = probabilities[mt][w];
                        return u ? RowPair{x.z, x.w} : RowPair{x.x, x.y};
                    },
                    [&](int w) { return w ? v_other : v_own; });
                v_own += 16 * kPitch, v_other += 16 * kPitch, p_tile ^= 2 * kChunkBytes;
            }
            __syncthreads();
            k.store(staging, kv_store(), kPitch, false);
            __syncthreads();
        }

        // Each warp gets the states of its rows of the output. One lane of a row has its sum.
        const Place at = place();
#pragma unroll
        for (int r = 0; r < kLaneRows; r++) {
            const float sum = row_sum<Layout>(softmax.row[0][r].sum);
            if (at.own_chunk == 0) {
                store_shared1(base + kOffsetP + (at.own_row + 4 * r) * 4, __float_as_uint(softmax.row[0][r].row_max));
                store_shared1(base + kOffsetP + (kBlockRows + at.own_row + 4 * r) * 4, __float_as_uint(sum));
            }
        }
        __syncthreads();
        SoftmaxState<kRowTiles> state;
#pragma unroll
        for (int mt = 0; mt < kRowTiles; mt++)
#pragma unroll
            for (int r = 0; r < ForwardLayout::kRows; r++) {
                state.row[mt][r].row_max = at.row_float(kOffsetP, mt, r);
                const float sum = at.row_float(kOffsetP + kBlockRows * 4, mt, r);
                state.row[mt][r].sum = ForwardLayout::leads_row(at.lane) ? sum : 0.f;
            }
        if (!grid.template combine_splits<kThreads>(state, o)) return;
        const Place last = place();
        FwdParams columns = p;  // the warp's
        columns.out.ptr += kWarpChunks * kChunk * last.column;
        columns.problem.headdim_v -= kWarpChunks * kChunk * last.column;
        write_output<kRowTiles, kOutputTiles>(columns, last.lane, grid.remat_batch(problem), grid.remat_head(problem),
                                              row - last.warp * kWarpRows + last.group_row, state, o);
    }
};

}  // namespace volta
