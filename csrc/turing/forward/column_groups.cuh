// Forward kernel of the turing family for headdim 512, whose output does not fit one warp's registers: from fp16 q, k and v to out
// (fp16 or fp32) and softmax_lse. csrc/entry.cu calls run(), for rows of src/kernels/turing: 64 or 32 query rows a block, plain,
// varlen, paged and generic (score features chosen by parameters).
//
// The eight warps of a block are two groups of four, or one group. A group has 32 rows, and its warps divide the columns: of Q and
// K in the first product, of V and the output in the second. A step is 16 keys. Step i has two phases, each between two barriers of
// the block. Products have the left column; copies of K and V, from global memory to registers to shared memory, the right one:
//
//   S = Q K^T of step i over the warp's columns; stores partial S     stores V of step i - 1, loads K of step i + 1
//   O += P V of step i - 1, beside sums, mask and softmax of step i   stores K of step i + 1, loads V of step i
//
// So products hide the latency of the exchange and of global memory. Shared memory has one tile of K and one of V: each phase reads
// one and replaces the other.
//
// For sums, mask and softmax, each of a group's first four warps has a quarter of its rows: eight (ColumnGroupsLayout). A lane has
// four of the group's rows in its accumulators, one in each quarter. So partial scores and probabilities move between equal lanes
// of different warps, and a row's state is one warp's. lane.group is something else: lane / 4; quad is lane % 4 (turing/mma.cuh).
//
// A chunk is eight columns (16 bytes) of a row. In shared memory chunks are swizzled: permuted eight by eight, so that ldmatrix has
// no bank conflicts (tile.cuh).
//
//   mt, r, nt         one of the warp's two tiles of 16 rows; one of a lane's two rows in it; one of a step's two tiles of 8 keys
//   at, Coord         the thread's coordinates and shared addresses, computed again at each use
//   own, own_row      of the quarter that the warp sums: the warp's own part of a lane's four scores; the first row
//   remat_*()         read a special register again, so that it holds no register; keep_in_register() stops that (ptx.cuh)
//   kVarlen, kPaged, kGeneric, kHas..., kBatchInvariant  what this kernel is compiled for (features.cuh, batch_invariant.cuh)
//   problem.scale_log2, sign_flip  |softmax_scale| * log2(e); 0x80008000 (signs of two fp16) if softmax_scale is negative, else 0
//   HEADDIM_V, STEP, THREADS, SHARED_BYTES  the kernel's row in src/kernels: columns of V, keys of a step; threads and shared
//                     memory of a block
#pragma once

#include "batch_invariant.cuh"
#include "forward/block.cuh"  // ForwardBlock: a block's rows, head and batch entry
#include "forward/pages.cuh"  // has_pages(): whether the KV cache has all pages of the sequence; its PageIterator
#include "turing/forward/layout.cuh"

namespace turing {

// Layout of the summed scores, as shared code expects it (score_layout.cuh): of a 16-row tile of ForwardLayout, where a lane has
// two rows, eight rows: each lane's first, or each lane's second. The warp's first row selects which. A lane has keys 4 * quad to
// 4 * quad + 3 of a step's 16.
struct ColumnGroupsLayout {
    using Lane = turing::Lane;
    using Tile = float[4];
    static constexpr int kTileQueries = 8, kTileKeys = 16, kElements = 4;
    static constexpr bool kEitherOrder = ForwardLayout::kEitherOrder;  // grids may have heads on their first axis
    __device__ __forceinline__ static constexpr int first_query(const Lane& l) { return ForwardLayout::first_query(l); }
    __device__ __forceinline__ static constexpr int first_key(const Lane& l) { return 4 * l.quad; }
    __device__ __forceinline__ static constexpr int query_slot(int) { return 0; }
    __device__ __forceinline__ static constexpr int key_slot(int v) { return v; }
    // The key, of a step's 16, in row `row` of K and V in shared memory.
    __device__ __forceinline__ static constexpr int key_of_row(int row) { return row % 8 / 2 * 4 + row % 2 + row / 8 * 2; }

    static constexpr int kRows = 1, kKeys = 4;
    __device__ __forceinline__ static constexpr int row_of(int) { return 0; }
    __device__ __forceinline__ static constexpr int row_slot(int) { return 0; }
    static constexpr int kRowLaneMasks[2] = {1, 2};  // shfl_xor masks that reach the other lanes of a row
    __device__ __forceinline__ static constexpr bool leads_row(const Lane& l) { return ForwardLayout::leads_row(l); }
};
// With dropout a lane's two rows are four apart (ForwardLayout), so the eight rows of a quarter are 0 to 3 and 8 to 11, or four
// further: not the eight neighbors that covers_tile() requires.
static_assert((kHasDropout || covers_tile<ColumnGroupsLayout>()) && has_rows<ColumnGroupsLayout>(), "score_layout.cuh");

// The kernel; run() computes a block. BlockRows: 64 or 32 query rows: kRowGroups (two or one) groups of kGroupWarps warps.
template <int Headdim, int BlockRows>
struct ForwardColumnGroups {
    static constexpr int kWarps = 8, kThreads = 32 * kWarps;
    static constexpr int kRowTiles = 2, kKeyTiles = 2;  // tiles of 16 rows, and of a step's 8 keys, of a warp's products
    static constexpr int kStep = ForwardLayout::kTileKeys * kKeyTiles;
    static constexpr int kGroupRows = ForwardLayout::kTileQueries * kRowTiles;
    static constexpr int kBlockRows = BlockRows;
    static constexpr int kRowGroups = kBlockRows / kGroupRows, kGroupWarps = kWarps / kRowGroups;
    // Quarters of a group's scores. Number 2 * mt + r has a lane's row r of row tile mt; the group's warp of that number sums it.
    static constexpr int kQuarters = ForwardLayout::kRows * kRowTiles;
    static_assert(kRowGroups * kGroupRows == kBlockRows && kGroupWarps * kRowGroups == kWarps && kGroupWarps >= kQuarters,
                  "each quarter has a warp");
    static constexpr int kChunks = Headdim / kChunk;
    static constexpr int kWarpChunks = kChunks / kGroupWarps, kWarpColumns = kWarpChunks * kChunk;
    static_assert(kWarpChunks % 8 == 0, "a warp's columns have the swizzle of whole rows");
    static constexpr int kPitch = kChunks * kChunkBytes;  // bytes of a row

    // Shared memory, offsets in bytes: K; V; partial scores of each warp and quarter, a chunk (four fp32) of each lane; P of each
    // group, as operand A; each row's factor of the output (fp32); addresses of row 0 of K and of V; the sequence's lengths;
    // kSharedChunks of Q. At the end, row maxima and sums in the scores' place.
    static constexpr int kQuarterBytes = 32 * kChunkBytes, kScoreBytes = kQuarters * kQuarterBytes;
    static constexpr int kOperandBytes = sizeof(OperandA), kTileBytesP = 32 * kOperandBytes;
    static constexpr int kGroupBytesP = kRowTiles * kKeyTiles * kTileBytesP;
    static constexpr int kOffsetV = kStep * kPitch;
    static constexpr int kOffsetScores = kOffsetV + kStep * kPitch;
    static constexpr int kOffsetP = kOffsetScores + kWarps * kScoreBytes;
    static constexpr int kOffsetFactors = kOffsetP + kRowGroups * kGroupBytesP;
    static constexpr int kOffsetMatrices = kOffsetFactors + kBlockRows * 4;
    static constexpr int kOffsetLengths = kOffsetMatrices + 16;
    // Chunks of Q in shared memory, 16 bytes of each lane (32 rows): generic kernels of 64 rows have no registers for them.
    static constexpr int kSharedChunks = kWarpChunks == 16 && kHasScoreFeatures ? 2 : 0,
                         kRegisterChunks = kWarpChunks - kSharedChunks;
    static constexpr int kOffsetQ = kOffsetLengths + 16;
    static constexpr int kSharedBytes = kOffsetQ + kSharedChunks * kThreads * kChunkBytes;
    static_assert(Headdim == HEADDIM_V && kThreads == THREADS && kStep == STEP && kSharedBytes == SHARED_BYTES,
                  "the row in src/kernels and the kernel disagree");

    using Layout = ColumnGroupsLayout;
    using Block = ForwardBlock<kBlockRows, ForwardLayout::kEitherOrder>;
    using Tile = Scores<ForwardLayout, kRowTiles, kKeyTiles>;
    using RowScores = Scores<Layout, 1, 1>;
    using Output = Accumulator[kRowTiles][kWarpChunks];

    // A thread's chunks of a step of K or V: all in one row. Staging: registers for them.
    static constexpr int kThreadsPerRow = kThreads / kStep, kThreadChunks = kChunks / kThreadsPerRow;
    using Staging = uint4[kThreadChunks];
    static_assert(kThreadsPerRow % 8 == 0, "a thread's chunks have one swizzle");

    // The thread's coordinates, and its addresses in shared memory, which begins at `base`.
    struct Coord {
        u32 base;
        Lane lane;
        u32 thread, warp, group_warp, group;  // group_warp: the warp's number in its group; group: of warps

        __device__ __forceinline__ Coord(u32 base_, u32 thread_)
            : base(base_), lane(thread_ & 31), thread(thread_), warp(thread_ / 32), group_warp(warp % kGroupWarps),
              group(warp / kGroupWarps) {}

        // Address that the lane gives to ldmatrix for the warp's fragment 0 of K or, kOffsetV further, V (fragment_at()).
        __device__ __forceinline__ u32 fragment_address() const {
            return base + swizzled<kChunks>(lane.lane % 8, kWarpChunks * group_warp + lane.lane / 8);
        }
        // Where the thread's first chunk of K or, kOffsetV further, V goes.
        __device__ __forceinline__ u32 tile_store() const {
            return base + swizzled<kChunks>(thread / kThreadsPerRow, thread % kThreadsPerRow);
        }
        // The lane's operands of a chunk of Q in shared memory.
        __device__ __forceinline__ u32 q(int chunk) const { return base + kOffsetQ + (chunk * kThreads + thread) * kChunkBytes; }
        // Where the lane's partial scores of quarter 0 go; the next quarter is kQuarterBytes further.
        __device__ __forceinline__ u32 score_store() const {
            return base + kOffsetScores + warp * kScoreBytes + lane.lane * kChunkBytes;
        }
        // The warp's own quarter in the partial scores of the warp that is `further` numbers after it, cyclically, in its group.
        __device__ __forceinline__ u32 score_load(u32 further) const {
            const u32 from = group * kGroupWarps + (group_warp + further) % kGroupWarps;
            return base + kOffsetScores + from * kScoreBytes + group_warp * kQuarterBytes + lane.lane * kChunkBytes;
        }
        // The lane's probabilities as operand A: [mt][nt], kTileBytesP apart. A warp stores those of its quarter: word r of row
        // tile mt, where 2 * mt + r is group_warp.
        __device__ __forceinline__ u32 p_load() const { return base + kOffsetP + group * kGroupBytesP + lane.lane * kOperandBytes; }
        __device__ __forceinline__ u32 p_store() const {
            return p_load() + group_warp / 2 * kKeyTiles * kTileBytesP + group_warp % 2 * sizeof(u32);
        }
        // Offset in bytes, in an array of a float for each row, of a lane's two rows of row tile mt, which are neighbors there.
        __device__ __forceinline__ u32 row_floats(int mt) const { return (group * kGroupRows + 16 * mt + 2 * lane.group) * 4; }
        __device__ __forceinline__ u32 own_row_float() const { return row_floats(group_warp / 2) + group_warp % 2 * 4; }

        // Whether the warp has a quarter of the summed scores; its first row, counted from the block's.
        __device__ __forceinline__ bool has_quarter() const { return kGroupWarps == kQuarters || group_warp < kQuarters; }
        __device__ __forceinline__ int own_row() const {
            return group * kGroupRows + ForwardLayout::kTileQueries * (group_warp / 2) + ForwardLayout::row_slot(group_warp % 2);
        }
    };

    // Stores a lane's packed probabilities of the first and the second tile of keys.
    __device__ __forceinline__ static void store_probabilities(const Coord& at, u32 first, u32 second) {
        store_shared1(at.p_store(), first);
        store_shared1(at.p_store() + kTileBytesP, second);
    }

    // Returns the address 4 * c chunks further in a swizzled row: an XOR among the eight chunks that the swizzle permutes.
    __device__ __forceinline__ static u32 after_fours(u32 address, int c) {
        return (address ^ c % 2 * 4 * kChunkBytes) + c / 2 * 8 * kChunkBytes;
    }

    // Fragments (loads of ldmatrix) of a warp's columns: number n has four chunks, from 4 * (n / kKeyTiles) on, of key tile
    // n % kKeyTiles. kHalf: half of the fragments. fragment_at() returns the address of one, from that of fragment 0.
    static constexpr int kFragments = kKeyTiles * kWarpChunks / 4, kHalf = kFragments / 2;
    __device__ __forceinline__ static u32 fragment_at(u32 address, int n) {
        return after_fours(address, n / kKeyTiles) + n % kKeyTiles * ForwardLayout::kTileKeys * kPitch;
    }
    // O += P V. `address`: fragment_address() + kOffsetV. Calls between(n), other work of the step, before products of fragment n.
    template <class Between>
    __device__ __forceinline__ static void add_output(Output& o, const OperandA (&probabilities)[kRowTiles][kKeyTiles], u32 address,
                                                      Between between) {
        u32 v[2][4];
        load_matrices_transposed(v[0], fragment_at(address, 0));
#pragma unroll
        for (int n = 0; n < kFragments; n++) {
            if (n + 1 < kFragments) load_matrices_transposed(v[(n + 1) % 2], fragment_at(address, n + 1));
            between(n);
            unrolled<4, kRowTiles>(
                [&](int i, int mt) { mma(o[mt][n / kKeyTiles * 4 + i], probabilities[mt][n % kKeyTiles], v[n % 2][i]); });
        }
    }

    // Loads and stores of K or V: a thread's chunks of its row of a step. (The stream is one of loads, not stream-K.)
    struct Stream {
        // The thread's key, counted from the step's first.
        __device__ __forceinline__ static int key_of(u32 thread) { return Layout::key_of_row(thread / kThreadsPerRow); }
        const unsigned short* row;  // address of the thread's first chunk
        int chunks_left;  // of the row, from the thread's first chunk on; 0 if the row does not exist

        __device__ __forceinline__ Stream(const unsigned short* row_, bool exists, int columns) {
            const int first = static_cast<u32>(remat_thread_index()) % kThreadsPerRow;
            row = row_ + first * kChunk;
            chunks_left = exists ? columns / kChunk - first : 0;
        }
        // What does not exist is 0. (ptxas would move loads of the read-only path past the barrier, next to the stores.)
        __device__ __forceinline__ void load_all(Staging& data) const {
#pragma unroll
            for (int c = 0; c < kThreadChunks; c++) {
                data[c] = zero_chunk();
                load_before_barrier_if(c * kThreadsPerRow < chunks_left, data[c], row + c * kThreadsPerRow * kChunk);
            }
        }
        __device__ __forceinline__ static void store(const Staging& data, int c, u32 address) {
            store_shared(address + c * kThreadsPerRow * kChunkBytes, data[c]);
        }
        __device__ __forceinline__ static void store_all(const Staging& data, u32 address) {
#pragma unroll
            for (int c = 0; c < kThreadChunks; c++) store(data, c, address);
        }
    };

    __device__ __forceinline__ static void run(const FwdParams& p) {
        extern __shared__ __align__(1024) unsigned char shared[];
        const u32 base = shared_address(shared);
        const Problem& problem = p.problem;
        const Block block(problem);
        const BlockSeqlenInfo sequence(p, block.batch);
        if (kVarlen && block.row >= sequence.seqlen_q()) return;  // past the last query
        const Mask mask = mask_of(problem, sequence);
        const auto coord = [&] { return Coord(base, remat_thread_index()); };

        int key = first_step<kStep>(mask.key_first(block.row));  // rounded down to a multiple of kStep in batch-invariant kernels
        if (kHasScoreFeatures) key &= ~3;  // bias and random numbers come in groups of 4 keys
        if (kPaged) key &= ~(kPageGroup - 1);  // a group of kPageGroup (16) tokens lies in one page
        const int key_end = keep_in_register(mask.key_end(block.row, kBlockRows));
        if constexpr (kPaged) {
            if (!has_pages(p.cache, block.batch, sequence, mask)) return;  // out stays NaN, as the library filled it
        }

        OperandA q[kRowTiles][kRegisterChunks];
        {
            const Coord at(base, threadIdx.x);
            const int column = kWarpColumns * at.group_warp;
            const unsigned short* rows = rows_of(p.q, block.batch, block.head, sequence.q_offset()) + column;
            const int first_row = block.row + at.group * kGroupRows, columns = problem.headdim - column;
            if constexpr (kSharedChunks > 0) {
                OperandA first[kRowTiles][kSharedChunks];
                load_queries(first, p.q, rows, first_row, sequence.seqlen_q(), columns, problem.sign_flip);
#pragma unroll
                for (int c = 0; c < kSharedChunks; c++)
                    store_shared(at.q(c), make_uint4(first[0][c][0], first[0][c][1], first[1][c][0], first[1][c][1]));
            }
            load_queries(q, p.q, rows + kSharedChunks * kChunk, first_row, sequence.seqlen_q(), columns - kSharedChunks * kChunk,
                         problem.sign_flip);
            // The first step multiplies probabilities of 0 by a V of 0.
            if (at.has_quarter()) store_probabilities(at, 0, 0);
        }

        const unsigned k_stride = p.k.row_stride, v_stride = p.v.row_stride;
        if (threadIdx.x == 0) {
            const auto matrix = [&](const Operand& x, const Operand& paged) {
                return reinterpret_cast<unsigned long long>(kPaged ? head_base(paged, 0, block.head_k)
                                                                   : rows_of(x, block.batch, block.head_k, sequence.k_offset()));
            };
            const unsigned long long k = matrix(p.k, p.cache.k), v = matrix(p.v, p.cache.v);
            store_shared(base + kOffsetMatrices, make_uint4(k, k >> 32, v, v >> 32));
            if (kVarlen) store_shared2(base + kOffsetLengths, sequence.seqlen_q(), sequence.seqlen_k());
        }
        __syncthreads();
        // Returns the mask, computed again from lengths in shared memory.
        const auto mask_again = [&] {
            if (!kVarlen) return Mask(problem);
            const uint2 lengths = load_shared2(base + kOffsetLengths);
            return Mask(problem, lengths.x, lengths.y);
        };
        // Pages of the next step's K and V to be loaded: K is a step ahead of V. A step is 1 page group, 16 tokens; false: page
        // numbers are loaded by predicate, not in a branch.
        using Pages = PageIteratorIfPaged<kStep, 1, false>;
        Pages pages(p.cache, block.batch, sequence.k_offset(), key, key_end), pages_v = pages;
        // Returns the stream of K or V of the step from `key` on. offset: where its address lies at kOffsetMatrices, 0 or 8 bytes.
        const auto stream = [&](u32 offset, const Operand& paged, const Pages& at, unsigned stride, int columns, int key) {
            const uint2 matrix = load_shared2(base + kOffsetMatrices + offset);
            const auto* from = reinterpret_cast<const unsigned short*>(matrix.x | static_cast<unsigned long long>(matrix.y) << 32);
            const int row = Stream::key_of(remat_thread_index());
            from = kPaged ? at.address(p.cache, paged, from, 0, row) : rows_after(from, key + row, stride);
            return Stream(from, key + row < key_end, columns);
        };
        const auto stream_k = [&](int key) { return stream(0, p.cache.k, pages, k_stride, problem.headdim, key); };
        const auto load_v = [&](Staging& data, int key) {
            stream(8, p.cache.v, pages_v, v_stride, problem.headdim_v, key).load_all(data);
            pages_v = pages;
            pages.advance(p.cache, key + 2 * kStep, key_end);
        };

        SoftmaxRows<Layout, 1> softmax;
        Output o = {};
        // Factor of scores in the exponent. Those of generic kernels are in log2 units already.
        const float scale = kGeneric ? 1.f : problem.scale_log2;

        // K or V in flight from global to shared memory.
        Staging staging;
        stream_k(key).load_all(staging);
        Stream::store_all(staging, coord().tile_store());
#pragma unroll
        for (int c = 0; c < kThreadChunks; c++) staging[c] = zero_chunk();
        pages.advance(p.cache, key + kStep, key_end);
        __syncthreads();

        // Multiplies rows of the output by the factors that the warps of their quarters stored in the step before.
        const auto rescale_rows = [&] {
            const Coord at = coord();
            const auto rescale = rescale_output<ForwardLayout>(o);
#pragma unroll
            for (int mt = 0; mt < kRowTiles; mt++) {
                const uint2 factors = load_shared2(base + kOffsetFactors + at.row_floats(mt));
                rescale(mt, 0, __uint_as_float(factors.x));
                rescale(mt, 1, __uint_as_float(factors.y));
            }
        };
        OperandA probabilities[kRowTiles][kKeyTiles];
        const auto load_probabilities = [&] {
            const u32 from = coord().p_load();
            unrolled<kRowTiles, kKeyTiles>([&](int mt, int nt) {
                const uint2 x = load_shared2(from + (mt * kKeyTiles + nt) * kTileBytesP);
                probabilities[mt][nt][0] = x.x, probabilities[mt][nt][1] = x.y;
            });
        };
        bool any_moved = false;  // whether any row_max of the block moved in the step before, so that factors are not all 1
#pragma unroll 1
        for (; key < key_end; key += kStep) {
            float own[4];  // partial scores, over the warp's columns, of the rows that the warp sums
            {
                Tile s;
                s.clear();
                const u32 address = coord().fragment_address();
                u32 k[2][4];
                load_matrices(k[0], fragment_at(address, 0));
                OperandA first[kRowTiles][kSharedChunks + 1];
#pragma unroll
                for (int c = 0; c < kSharedChunks; c++) {
                    const uint4 x = load_shared(coord().q(c));
                    first[0][c][0] = x.x, first[0][c][1] = x.y, first[1][c][0] = x.z, first[1][c][1] = x.w;
                }
#pragma unroll
                for (int n = 0; n < kFragments; n++) {
                    if (n + 1 < kFragments) load_matrices(k[(n + 1) % 2], fragment_at(address, n + 1));
                    if (n == kHalf) {
                        // The branch waits for loads in flight: here those of V, which are stored next anyway.
                        if (any_moved) rescale_rows();
                        Stream::store_all(staging, coord().tile_store() + kOffsetV);
                        stream_k(key + kStep).load_all(staging);
                    }
                    unrolled<4, kRowTiles>([&](int i, int mt) {
                        const int chunk = n / kKeyTiles * 4 + i;
                        mma(s.tile[mt][n % kKeyTiles], chunk < kSharedChunks ? first[mt][chunk] : q[mt][chunk - kSharedChunks],
                            k[n % 2][i]);
                    });
                }
                const Coord at = coord();
#pragma unroll
                for (int quarter = 0; quarter < kQuarters; quarter++) {
                    const int mt = quarter / 2, r = quarter % 2;
                    const float x[4] = {s.tile[mt][0][2 * r], s.tile[mt][0][2 * r + 1], s.tile[mt][1][2 * r],
                                        s.tile[mt][1][2 * r + 1]};
                    if (at.group_warp != quarter)
                        store_shared(
                            at.score_store() + quarter * kQuarterBytes,
                            make_uint4(__float_as_uint(x[0]), __float_as_uint(x[1]), __float_as_uint(x[2]), __float_as_uint(x[3])));
#pragma unroll
                    for (int i = 0; i < 4; i++) own[i] = quarter == 0 || at.group_warp == quarter ? x[i] : own[i];
                }
            }
            load_probabilities();
            __syncthreads();
            bool moved = false;
            const auto compute_probabilities = [&] {
                const Coord at = coord();
                if (!at.has_quarter()) return;
                RowScores s;
                float (&x)[4] = s.tile[0][0];
#pragma unroll
                for (int i = 0; i < 4; i++) x[i] = own[i];
                const auto add = [](float (&x)[4], const uint4& part) {
                    x[0] += __uint_as_float(part.x), x[1] += __uint_as_float(part.y);
                    x[2] += __uint_as_float(part.z), x[3] += __uint_as_float(part.w);
                };
                if constexpr (kBatchInvariant && kGroupWarps == 4) {
                    // A row's bits must not depend on its place in the tile, which says which warp sums it; each begins with its
                    // own part. So that all four add in one order, each adds parts of opposite warps first: (0 + 2) + (1 + 3).
                    add(x, load_shared(at.score_load(2)));
                    const uint4 part = load_shared(at.score_load(1));
                    float other[4] = {__uint_as_float(part.x), __uint_as_float(part.y), __uint_as_float(part.z),
                                      __uint_as_float(part.w)};
                    add(other, load_shared(at.score_load(3)));
#pragma unroll
                    for (int i = 0; i < 4; i++) x[i] += other[i];
                } else {
                    static_assert(!kBatchInvariant || kGroupWarps == 4, "an order of the parts for each number of groups");
#pragma unroll
                    for (int further = 1; further < kGroupWarps; further++) add(x, load_shared(at.score_load(further)));
                }
                const Mask mask_here = mask_again();
                const int row = Block::remat_row(problem) + at.own_row();
                if (kGeneric) {
                    s.apply_score_mod(p, mask_here, row, key);
                    if (kHasBias && p.score_options.bias) {
                        ScoreBias<Layout, 1, 1> bias;
                        bias.load(p, row, key);
                        bias.add_to(s, p.score_options);
                    }
                }
                s.apply_mask(mask_here, row, key);
                // Moves row_max only by more than kRescaleThreshold (7, log2 units), without a branch. Passes 0 for 1 / scale,
                // which only sets SoftmaxRow::limit, unused here.
                SoftmaxRow& state = softmax.row[0][0];
                const float m = row_max<Layout>(s.lane_maximum(0, 0));
                moved = fmaf(m, scale, -state.row_max) > kRescaleThreshold;
                const float factor = state.template update_row_max<RescaledRows::kAll>(moved ? m : negative_infinity(), scale, 0.f);
#pragma unroll
                for (int i = 0; i < 4; i++) x[i] = state.probability(x[i], scale);
                if (kHasDropout && p.score_options.rng_state) {
                    const int of_row = row + Layout::first_query(at.lane);
                    // one call of the generator (Philox) has the numbers of two rows: this one, and the one with bit 2 flipped
                    const uint4 numbers =
                        DropoutBits<ForwardLayout, 1>::numbers_of(p).numbers(of_row & ~4, key + Layout::first_key(at.lane));
                    const unsigned kept = DropoutRule(p.score_options).kept_bits(numbers) >> kept_bit(of_row >> 2 & 1, 0);
#pragma unroll
                    for (int i = 0; i < 4; i++)
                        if (!(kept >> kept_bit(0, i) & 1)) x[i] = 0.f;
                }
                store_probabilities(at, pack_probabilities(x[0], x[1]), pack_probabilities(x[2], x[3]));
                if (Layout::leads_row(at.lane)) store_shared1(base + kOffsetFactors + at.own_row_float(), __float_as_uint(factor));
            };
            add_output(o, probabilities, coord().fragment_address() + kOffsetV, [&](int n) {
                if (n == 1) compute_probabilities();
                if (n == 2) {
                    Stream::store_all(staging, coord().tile_store());
                    load_v(staging, key);
                }
            });
            any_moved = __syncthreads_or(moved);
        }
        // O += P V of the last step.
        if (any_moved) rescale_rows();
        Stream::store_all(staging, coord().tile_store() + kOffsetV);
        load_probabilities();

        // Each warp gets row_max and sum of all rows of its group. write_output() adds up the sums of a row's lanes, so one of them
        // keeps the sum, the others 0.
        const Coord at = coord();
        if (at.has_quarter()) {
            const float sum = row_sum<Layout>(softmax.row[0][0].sum);
            if (Layout::leads_row(at.lane)) {
                store_shared1(base + kOffsetScores + at.own_row_float(), __float_as_uint(softmax.row[0][0].row_max));
                store_shared1(base + kOffsetScores + kBlockRows * 4 + at.own_row_float(), __float_as_uint(sum));
            }
        }
        __syncthreads();
        add_output(o, probabilities, coord().fragment_address() + kOffsetV, [](int) {});
        SoftmaxRows<ForwardLayout, kRowTiles> state;
#pragma unroll
        for (int mt = 0; mt < kRowTiles; mt++) {
            const uint2 row_max = load_shared2(base + kOffsetScores + at.row_floats(mt));
            const uint2 sum = load_shared2(base + kOffsetScores + kBlockRows * 4 + at.row_floats(mt));
            const bool leads = ForwardLayout::leads_row(at.lane);
            state.row[mt][0].row_max = __uint_as_float(row_max.x), state.row[mt][1].row_max = __uint_as_float(row_max.y);
            state.row[mt][0].sum = leads ? __uint_as_float(sum.x) : 0.f,
            state.row[mt][1].sum = leads ? __uint_as_float(sum.y) : 0.f;
        }
        const Coord last = coord();
        FwdParams columns = p;  // as if out had the warp's columns only
        columns.out.ptr += kWarpColumns * last.group_warp * (out_is_fp32(p) ? 2 : 1);
        columns.problem.headdim_v -= kWarpColumns * last.group_warp;
        write_output(columns, remat_block_batch(), remat_head<ForwardLayout::kEitherOrder>(problem),
                     Block::remat_row(problem) + last.group * kGroupRows, state, o);
    }
};

}  // namespace turing
