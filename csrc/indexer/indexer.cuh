// The kernel of volta_fa::indexer_logits (src/ops/indexer.rs launches it): the lightning indexer of DeepSeek V3.2 and GLM-5,
//
//   logits[query, key] = scale[key] * sum over heads of weight[query, head] * relu(q[query, head] . k[key])
//
// with q (batch, seqlen_q, nheads, 128) in fp16, bf16 or e4m3, and keys of 128 e4m3 codes with an fp32 scale each, dense or in
// pages. logits are fp32 (batch, seqlen_q, columns), a column for each key; the caller takes each query's top k. Keys outside the
// query's range (keys_of) get -inf if p.clean, else nothing.
//
// A row is one head of one query: 32 or 64 rows a query (2^head_shift), from nheads on padding. A block of eight warps computes a
// tile of 256 or 64 rows (Rows). Each warp keeps 32 rows in registers, so products read only K from shared memory. A step is 64
// keys, double-buffered, with one barrier. With 256 rows each warp has all 64 keys, as four key tiles of 16. With 64 rows, four
// warps divide the keys of the same 32 rows, one key tile each.
//
// Each of an SM's four schedulers has two of the warps. They leave the barrier together, and would leave the tensor cores idle
// together. So the sum over heads of a key tile, and the conversion of the next step's keys, run between the products of the next
// key tile. write() follows one step later, after the barrier. With 64 rows a query, two warps have its heads: write() adds their
// sums, always in this order. So a logit depends on its query and key alone, not on the tile.
//
// Products is the family's tensor-core code (volta/indexer.cuh, turing/indexer.cuh):
//
//   Queries, load(q, mt, address)  registers of the warp's row tile mt (rows 16 * mt to 16 * mt + 15), from rows of kPitch bytes
//   Scores, multiply(c, q, address, beside)  c = q . k for 32 rows and 16 keys; c.at(mt, v): the lane's element v (0 to 7) of row
//                                  tile mt. Calls beside(i), the other work above, among the products of chunk i (8 columns of 128)
//   row(), kRowStep                element v is in row row() + kRowStep * ((v >> 1) & 1) of its row tile
//   key(i)                         its key in the key tile, with i = (v & 1) + 2 * (v >> 2)
//   key_offset()                   byte offset of the lane's first load in a key tile
//   kLaneMasks                     shfl_xor masks between lanes that have other rows of the same keys
//
// Codes become fp16 times 144 (KeyCodes::kScale): the largest, 448, then fits fp16, and NaN, as 480, becomes infinity. The padding
// after a staged query row holds the factor that undoes this, and the power of two that brings a bf16 row into fp16's range.
// The kernel's row in src/kernels gives THREADS, STEP (keys) and SHARED_BYTES.
#pragma once

#include "indexer/keys.cuh"  // KeyLoader: a step's pages, codes, scales; of queries.cuh: QueryRows, kPitch, kChunks
#include "indexer/schedule.cuh"  // Range, Tile, BlockTime: see run(); keys_of(): a query's Range; IndexerParams (src/params)

namespace indexer {

constexpr int kRowTiles = 2, kWarpRows = 16 * kRowTiles;
constexpr int kKeyTile = 16;  // keys of a tile of scores
constexpr int kSlots = 4;  // buffers of sums and scales: write() reads one while faster warps fill the next three
constexpr int kMaxQueries = 8;  // of a tile: 256 rows, at least 32 for each query

template <class Products, int Rows>
struct Kernel {
    static constexpr int kStep = STEP, kWarps = THREADS / 32;
    static constexpr int kRowGroups = Rows / kWarpRows, kWarpKeys = kStep * kRowGroups / kWarps;
    // Shared memory, bytes: two buffers of keys (rows of kPitch bytes), then from kSums, kScales, kRanges and kScratch on: fp32
    // sums of each row group and key, scales of keys, a Range for each query, and BlockTime's scratch, rounded to 16 bytes.
    static constexpr int kBufferBytes = kStep * kPitch, kSumBytes = kRowGroups * kStep * 4, kScaleBytes = kStep * 4;
    static constexpr int kSums = 2 * kBufferBytes, kScales = kSums + kSlots * kSumBytes, kRanges = kScales + kSlots * kScaleBytes;
    static constexpr int kScratch = kRanges + kMaxQueries * 8, kScratchInts = kWarps + 4;
    static_assert(BlockTime<Rows, kStep>::kScratchInts <= kScratchInts, "BlockTime has room");
    static_assert(kScratch + kScratchInts * 4 == SHARED_BYTES, "the row in src/kernels and the kernel disagree");
    static_assert(kWarps * kStagedRows * kPitch <= 2 * kBufferBytes, "queries are staged in the buffers of the keys");
    static constexpr int kTiles = kWarpKeys / kKeyTile;  // key tiles of a warp and step: 4 or 1
    using Loader = KeyLoader<kStep>;
    // Pieces (8 codes of a key) that a thread loads for a step: 4; and that it converts during one of its key tiles.
    static constexpr int kPieces = 2 * Loader::kPasses, kPiecesOfTile = kPieces / kTiles;
    // Other work between the products of a key tile: the sum of the key tile before, at chunk kFinishChunk; the conversion of a
    // piece of the next step's keys, every kChunksPerPiece chunks.
    static constexpr int kFinishChunk = 1, kChunksPerPiece = 3;
    static_assert(kTiles * kPiecesOfTile == kPieces && kChunksPerPiece * kPiecesOfTile < kChunks,
                  "each tile has room for its part of the next keys");

    // s: the lane's sums over its rows, for its four keys. Returns the sum of s[index] over all lanes with these keys (kLaneMasks).
    // The lane's bits of the first two masks are `index`; lanes that differ in the third return the same.
    __device__ __forceinline__ static float sum_over_rows(const float (&s)[4], int lane, int& index) {
        const bool upper = lane & Products::kLaneMasks[0], odd = lane & Products::kLaneMasks[1];
        float part[2];
#pragma unroll
        for (int i = 0; i < 2; i++)
            part[i] = (upper ? s[2 + i] : s[i]) + __shfl_xor_sync(~0u, upper ? s[i] : s[2 + i], Products::kLaneMasks[0]);
        const float sum = (odd ? part[1] : part[0]) + __shfl_xor_sync(~0u, odd ? part[0] : part[1], Products::kLaneMasks[1]);
        index = 2 * upper + odd;
        return sum + __shfl_xor_sync(~0u, sum, Products::kLaneMasks[2]);
    }

    // Writes -inf (0xff800000) to logits of keys that a query does not see. The grid's warps take parts of rows of logits in turn.
    __device__ __forceinline__ static void clean(const IndexerParams& p) {
        constexpr int kPart = 1024;  // columns that a warp has at a time
        const int parts = (p.columns + kPart - 1) / kPart, items = p.batch * p.seqlen_q * parts, lane = threadIdx.x % 32;
#pragma unroll 1
        for (int item = blockIdx.x * kWarps + threadIdx.x / 32; item < items; item += gridDim.x * kWarps) {
            const int row = item / parts, first = item % parts * kPart, end = min(first + kPart, p.columns);
            const Range keys = keys_of(p, row / p.seqlen_q, row % p.seqlen_q);
            float* logits = p.logits + static_cast<long long>(row) * p.columns;
#pragma unroll 4
            for (int key = first + lane; key < end; key += 32)
                if (key < keys.first || key >= keys.end) logits[key] = __int_as_float(0xff800000);
        }
    }

    // Writes the logits of the step that begins at key `key`, from buffer `slot`: a query's sums over its row groups, times the
    // keys' scales. `first_query`: the tile's, counted over all batch entries. `base`: address of the block's shared memory.
    __device__ __forceinline__ static void write(const IndexerParams& p, int first_query, unsigned base, int key, int slot) {
        const int groups = (1 << p.head_shift) / kWarpRows;  // 1 or 2: a query has 2^head_shift rows
        const unsigned sums = base + kSums + slot * kSumBytes, scales = base + kScales + slot * kScaleBytes;
#pragma unroll 1
        for (int i = threadIdx.x; i < queries_of_tile<Rows>(p) * kStep; i += THREADS) {
            const int query = i / kStep, column = i % kStep;
            const uint2 range = load_shared2(base + kRanges + query * 8);
            if (key + column < static_cast<int>(range.x) || key + column >= static_cast<int>(range.y)) continue;
            const unsigned address = sums + (query * groups * kStep + column) * 4;
            float sum = __uint_as_float(load_shared1(address));
            if (groups > 1) sum += __uint_as_float(load_shared1(address + kStep * 4));
            const float scale = __uint_as_float(load_shared1(scales + column * 4));
            // A key without a page has the scale -inf, which becomes its logit. A NaN code made the sum infinite: adding 0 * sum
            // gives NaN.
            const float logit = scale == __int_as_float(0xff800000) ? scale : sum * scale + 0.f * sum;
            p.logits[static_cast<long long>(first_query + query) * p.columns + key + column] = logit;
        }
    }

    // Computes `steps` steps of a tile, from key `key` on. Loads run two steps ahead of products, page numbers three.
    __device__ __forceinline__ static void run_tile(const IndexerParams& p, const Tile<Rows, kStep>& tile, int key, int steps,
                                                    unsigned base) {
        const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
        const int row = warp % kRowGroups * kWarpRows, own_key = warp / kRowGroups * kWarpKeys;
        const Products products(lane);
        const QueryRows rows(p, tile.batch, tile.query, row);
        Loader loader(p, tile.batch, min(tile.key_end, key + steps * kStep));
        loader.find_pages(key);
        if (thread < queries_of_tile<Rows>(p)) {
            const Range keys = keys_of(p, tile.batch, tile.query + thread);
            store_shared2(base + kRanges + thread * 8, keys.first, keys.end);
        }
        typename Products::Queries q;
        float w[kRowTiles][2];
        const unsigned staged = base + warp * kStagedRows * kPitch;
#pragma unroll
        for (int mt = 0; mt < kRowTiles; mt++) {
            stage_queries(rows, 16 * mt, staged);
            __syncwarp();
            products.load(q, mt, staged);
#pragma unroll
            for (int r = 0; r < 2; r++) {
                const int tile_row = products.row() + Products::kRowStep * r;
                // stage_queries() (queries.cuh) stores it after the row's fp16 columns
                const float factor = __uint_as_float(load_shared1(staged + tile_row * kPitch + kColumns * 2));
                w[mt][r] = 0.5f * factor * rows.weight(16 * mt + tile_row);  // 0.5: relu(x) is half of x + |x|, which keeps NaN
            }
            __syncwarp();
        }
        loader.load(key);
        loader.find_pages(key + kStep);
        __syncthreads();
#pragma unroll
        for (int i = 0; i < kPieces; i++) loader.store(base, loader.arriving.codes[i], i);
        loader.store_scales(base + kScales, loader.arriving);
        loader.load(key + kStep);
        loader.find_pages(key + 2 * kStep);
        __syncthreads();
        const unsigned sums = base + kSums + (warp % kRowGroups * kStep + own_key) * 4;
        const unsigned keys = base + products.key_offset() + own_key * kPitch;
        const int first_query = tile.batch * p.seqlen_q + tile.query;
        // Scores of the key tile before, and where their sums over heads go. Before the first tile they are zeros, whose sums go to
        // a slot that is written again before write() reads it.
        typename Products::Scores before;
        before.clear();
        unsigned sums_before = sums + (kSlots - 1) * kSumBytes;
        const auto finish_tile = [&] {
            float s[4] = {};
            unrolled<kRowTiles, 8>([&](int mt, int v) {
                const float x = before.at(mt, v);
                s[(v & 1) + 2 * (v >> 2)] += w[mt][(v >> 1) & 1] * (x + fabsf(x));
            });
            int index;
            const float sum = sum_over_rows(s, lane, index);
            if (!(lane & Products::kLaneMasks[2])) store_shared1(sums_before + products.key(index) * 4, __float_as_uint(sum));
        };
#pragma unroll 1
        for (int step = 0; step < steps; step++, key += kStep) {
            typename Loader::Pieces next = loader.arriving;  // of the next step: what the last load() has brought
            loader.load(key + 2 * kStep);
            loader.find_pages(key + 3 * kStep);
            const unsigned next_keys = base + ((step + 1) & 1) * kBufferBytes;
            loader.store_scales(base + kScales + (step + 1) % kSlots * kScaleBytes, next);
#pragma unroll 1
            for (int n = 0; n < kTiles; n++) {
                typename Products::Scores c;
                products.multiply(c, q, keys + (step & 1) * kBufferBytes + n * (kKeyTile * kPitch), [&](int chunk) {
                    if (chunk == kFinishChunk) finish_tile();
#pragma unroll
                    for (int i = 0; i < kPiecesOfTile; i++)
                        if (chunk == kChunksPerPiece * (i + 1)) loader.store(next_keys, next.codes[i], n * kPiecesOfTile + i);
                });
                // moves the pieces of the next key tile to the front: registers have no run-time index
#pragma unroll
                for (int i = 0; i + kPiecesOfTile < kPieces; i++) next.codes[i] = next.codes[i + kPiecesOfTile];
                before = c;
                sums_before = sums + step % kSlots * kSumBytes + n * (kKeyTile * 4);
            }
            __syncthreads();
            if (step > 0) write(p, first_query, base, key - kStep, (step - 1) % kSlots);
        }
        finish_tile();
        __syncthreads();
        write(p, first_query, base, key - kStep, (steps - 1) % kSlots);
    }

    // Computes the block's equal share of the grid's work (BlockTime): `left` steps of time from time `begin` of tile `tile` on. A
    // tile's time also counts kLoadSteps for loading its queries; step_at(time) leaves these out.
    __device__ __forceinline__ static void run(const IndexerParams& p) {
        extern __shared__ __align__(1024) unsigned char shared[];
        const unsigned base = shared_address(shared);
        BlockTime<Rows, kStep> share(p, reinterpret_cast<int*>(shared + kScratch));
#pragma unroll 1
        for (; share.left > 0 && share.tile < p.tiles; share.tile++, share.begin = 0) {
            const Tile<Rows, kStep> tile(p, share.tile);
            const int end = min(tile.time(), share.begin + share.left);
            const int first_step = tile.step_at(share.begin), steps = tile.step_at(end) - first_step;
            share.left -= max(end - share.begin, 0);
            if (steps <= 0) continue;
            run_tile(p, tile, (tile.first_step + first_step) * kStep, steps, base);
            __syncthreads();  // before the next tile's queries take the place of keys
        }
        if (p.clean) clean(p);
    }
};

}  // namespace indexer
