// The lightning indexer of DeepSeek V3.2 and GLM-5:
//
//   logits[query, key] = scale[key] * sum over heads of weight[query, head] * relu(q[query, head] . k[key])
//
// A tile is 256 rows (queries times heads) or 64. Each warp holds 32 rows in registers for all of the tile's keys, so the only
// operand that products read from shared memory is K. A step is 64 keys, in two buffers, with one barrier. With 256 rows a warp has
// four tiles of 16 keys a step, with 64 one.
//
// The two warps of a scheduler leave the barrier together, and would reach their sums together. So the sum over rows of a tile, and
// the conversion of the next step's keys, run between the products of the next tile. The logits of a step follow after the next
// barrier.
//
// A sum over heads may be over two warps' rows: these meet in shared memory, in the same order for both tiles of rows. So a logit
// depends on its query and key alone.
//
// Products of a family:
//
//   Queries, load(q, mt, address)  rows 16 * mt to 16 * mt + 15 of the warp's operand, from rows of kPitch bytes
//   Scores, multiply(c, q, address, beside)  scores of 32 rows and 16 keys; c.at(mt, v): element v of row tile mt. Calls beside(i)
//                                  between the products, for each chunk i of columns
//   row(), kRowStep                element v is row row() + kRowStep * ((v >> 1) & 1) of its row tile
//   key(i)                         its key, with i = (v & 1) + 2 * (v >> 2)
//   kLaneMasks                     shfl_xor masks that reach the lanes with other rows of the same keys
//
// Keys are e4m3 codes, which become fp16; a NaN code becomes infinity (quantized.cuh). The padding of a staged query row has the
// row's factor: it turns products of codes into products of numbers.
//
// Time (BlockTime, schedule.cuh) counts in steps: a tile's steps of keys, and one or three for loading its queries. Each block gets
// an equal share of all tiles' time.
//
// The kernel's row in src/kernels gives THREADS, STEP (keys) and SHARED_BYTES. indexer/queries.cuh has kPitch, the bytes between
// rows.
#pragma once

#include "indexer/keys.cuh"
#include "indexer/schedule.cuh"

namespace indexer {

constexpr int kRowTiles = 2, kWarpRows = 16 * kRowTiles;
constexpr int kKeyTile = 16;  // keys of a tile of scores
constexpr int kSlots = 4;  // of sums and scales: those of a step are read while others of the next three are written
constexpr int kMaxQueries = 8;  // of a tile: 256 rows, at least 32 for each query

template <class Products, int Rows>
struct Kernel {
    static constexpr int kStep = STEP, kWarps = THREADS / 32;
    static constexpr int kRowGroups = Rows / kWarpRows, kWarpKeys = kStep * kRowGroups / kWarps;
    static constexpr int kBufferBytes = kStep * kPitch;
    static constexpr int kSumBytes = kRowGroups * kStep * 4;
    static constexpr int kScaleBytes = kStep * 4;
    static constexpr int kSums = 2 * kBufferBytes, kScales = kSums + kSlots * kSumBytes, kRanges = kScales + kSlots * kScaleBytes;
    static constexpr int kScratch = kRanges + kMaxQueries * 8;
    static_assert(kScratch + (kWarps + 4) * 4 == SHARED_BYTES, "the row in src/kernels and the kernel disagree");
    static_assert(kWarps * kStagedRows * kPitch <= 2 * kBufferBytes, "queries are staged in the buffers of the keys");
    static constexpr int kTiles = kWarpKeys / kKeyTile;  // of a warp and step
    using Loader = KeyLoader<kStep>;
    static constexpr int kPieces = 2 * Loader::kPasses, kPiecesOfTile = kPieces / kTiles;
    static_assert(kTiles * kPiecesOfTile == kPieces && 3 * kPiecesOfTile < kChunks,
                  "each tile has room for its part of the next keys");

    // Returns the sum of s[index] over the lanes of kLaneMasks. The lane's bits decide which index it gets.
    __device__ __forceinline__ static float sum_over_rows(const float (&s)[4], int lane, int& index) {
        const bool upper = lane & Products::kLaneMasks[0], odd = lane & Products::kLaneMasks[1];
        float own[2];
#pragma unroll
        for (int i = 0; i < 2; i++)
            own[i] = (upper ? s[2 + i] : s[i]) + __shfl_xor_sync(~0u, upper ? s[i] : s[2 + i], Products::kLaneMasks[0]);
        const float sum = (odd ? own[1] : own[0]) + __shfl_xor_sync(~0u, odd ? own[0] : own[1], Products::kLaneMasks[1]);
        index = 2 * upper + odd;
        return sum + __shfl_xor_sync(~0u, sum, Products::kLaneMasks[2]);
    }

    // Writes -inf to the keys that queries do not see. Each warp of the grid has some columns of some queries at a time.
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

    // Writes the logits of a step: those of a query are the sums of its row groups. `first_query`: the tile's, of all entries.
    __device__ __forceinline__ static void write(const IndexerParams& p, int first_query, unsigned base, int key, int slot) {
        const int groups = (1 << p.head_shift) / kWarpRows;  // 1 or 2
        const unsigned sums = base + kSums + slot * kSumBytes, scales = base + kScales + slot * kScaleBytes;
#pragma unroll 1
        for (int i = threadIdx.x; i < queries_of_tile<Rows>(p) * kStep; i += THREADS) {
            const int query = i / kStep, column = i % kStep;
            const uint2 range = load_shared2(base + kRanges + query * 8);
            if (key + column < static_cast<int>(range.x) || key + column >= static_cast<int>(range.y)) continue;
            const unsigned own = sums + (query * groups * kStep + column) * 4;
            float sum = __uint_as_float(load_shared1(own));
            if (groups > 1) sum += __uint_as_float(load_shared1(own + kStep * 4));
            const float scale = __uint_as_float(load_shared1(scales + column * 4));
            // A key of no page has the scale -inf, which becomes its logit. An infinite sum comes from a NaN code: adding 0 * sum
            // gives NaN.
            const float logit = scale == __int_as_float(0xff800000) ? scale : sum * scale + 0.f * sum;
            p.logits[static_cast<long long>(first_query + query) * p.columns + key + column] = logit;
        }
    }

    // Computes steps of a tile, from key `key` on.
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
                const int of_tile = products.row() + Products::kRowStep * r;
                const float factor = __uint_as_float(load_shared1(staged + of_tile * kPitch + kColumns * 2));
                // relu(x) is half of x + |x|, which keeps NaN
                w[mt][r] = 0.5f * factor * rows.weight(16 * mt + of_tile);
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
        // The tile before, and where its sums go. Before the first there is one whose sums are not read.
        typename Products::Scores before;
        before.clear();
        unsigned sums_before = sums + (kSlots - 1) * kSumBytes;
        const auto finish_tile = [&] {
            float s[4] = {};
#pragma unroll
            for (int mt = 0; mt < kRowTiles; mt++)
#pragma unroll
                for (int v = 0; v < 8; v++) {
                    const float x = before.at(mt, v);
                    s[(v & 1) + 2 * (v >> 2)] += w[mt][(v >> 1) & 1] * (x + fabsf(x));
                }
            int index;
            const float sum = sum_over_rows(s, lane, index);
            if (!(lane & Products::kLaneMasks[2])) store_shared1(sums_before + products.key(index) * 4, __float_as_uint(sum));
        };
#pragma unroll 1
        for (int step = 0; step < steps; step++, key += kStep) {
            typename Loader::Pieces next = loader.arriving;
            loader.load(key + 2 * kStep);
            loader.find_pages(key + 3 * kStep);
            const unsigned next_keys = base + ((step + 1) & 1) * kBufferBytes;
            loader.store_scales(base + kScales + (step + 1) % kSlots * kScaleBytes, next);
#pragma unroll 1
            for (int n = 0; n < kTiles; n++) {
                typename Products::Scores c;
                products.multiply(c, q, keys + (step & 1) * kBufferBytes + n * (kKeyTile * kPitch), [&](int chunk) {
                    if (chunk == 1) finish_tile();
#pragma unroll
                    for (int i = 0; i < kPiecesOfTile; i++)
                        if (chunk == 3 + 3 * i) loader.store(next_keys, next.codes[i], n * kPiecesOfTile + i);
                });
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

    __device__ __forceinline__ static void run(const IndexerParams& p) {
        extern __shared__ __align__(1024) unsigned char shared[];
        const unsigned base = shared_address(shared);
        BlockTime<Rows, kStep> own(p, reinterpret_cast<int*>(shared + kScratch));
#pragma unroll 1
        for (; own.left > 0 && own.tile < p.tiles; own.tile++, own.begin = 0) {
            const Tile<Rows, kStep> tile(p, own.tile);
            const int end = min(tile.time(), own.begin + own.left);
            const int first_step = tile.step_at(own.begin), steps = tile.step_at(end) - first_step;
            own.left -= max(end - own.begin, 0);
            if (steps <= 0) continue;
            run_tile(p, tile, (tile.first_step + first_step) * kStep, steps, base);
            __syncthreads();  // before the next tile's queries take the place of keys
        }
        if (p.clean) clean(p);
    }
};

}  // namespace indexer
