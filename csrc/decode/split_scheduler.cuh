// Schedules the decode tiles of batch-invariant calls. TileScheduler divides all tokens evenly, so where a row tile is cut depends
// on the batch and the GPU. Here splits begin at multiples of kSplitTokens, and each split of a row tile is one work tile with a
// partial result of its own. Partials join in the order of their tokens (split_partials.cuh), whichever blocks computed
// them.
//
// Two grids give the same bits, and the host chooses between them (src/plan/decode.rs):
//
//   num_splits 0  blocks take equal ranges of the line of all splits, and the last block of a row tile joins its partials
//   num_splits 1  block b takes row tiles b, b + gridDim.x, ... whole, and joins each partial as it is done: for many row tiles,
//                 whose partials would take much memory
//
// The kernel's row in src/kernels gives BLOCK_ROWS (packed query rows of a work tile) and THREADS (of a block).
#pragma once

#include "decode/tile_scheduler.cuh"

namespace decode {

constexpr int kSplitTokens = SPLIT_TOKENS;  // of a split; src/kernels/passes.rs has the number, by which the host plans memory
static_assert(kSplitTokens % kStepTokens == 0, "splits are whole steps");

// A split of a row tile. blocks: the row tile's splits; first_block: number of this one among them.
struct SplitTile : WorkTile {
    long long slot;  // of this split's partial result
    bool whole;  // this block computes all splits of the row tile
    bool is_empty;  // no row of the tile sees the split: nothing to do
};

// Has the interface of TileScheduler, whose begin() it repeats: as one template the kernels of fp8 latents spilled 20 bytes. It
// lives in shared memory. begin() returns false if this thread met a sequence whose rows of q are unknown (invalid cu_seqlens_q).
class SplitScheduler {
    long long position_, end_;  // in splits of the line; with whole row tiles, in row tiles
    int batch_, row_tile_, split_;  // what position_ is in; split_ counts from the sequence's (whole: the row tile's) first
    long long warp_totals_[THREADS / 32];

    __device__ __forceinline__ static bool takes_whole_tiles(const DecodeParams& p) { return p.num_splits == 1; }
    // Splits from the one with token `first` to the one before token `end`, at least one.
    __device__ __forceinline__ static int splits(int first, int end) {
        return max((end + kSplitTokens - 1) / kSplitTokens - first / kSplitTokens, 1);
    }
    // Splits of each row tile of a sequence on the line. A row tile may see fewer.
    __device__ __forceinline__ static int splits_of_tile(const DecodeParams& p, const SequenceWork& work) {
        return takes_whole_tiles(p) ? 1 : splits(work.first, work.end);
    }

public:
    __device__ __forceinline__ bool begin(const DecodeParams& p) {
        const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
        const int each = (p.problem.batch + THREADS - 1) / THREADS;
        const int first = min(threadIdx.x * each, p.problem.batch), last = min(first + each, p.problem.batch);
        bool has_queries = true;
        long long own = 0;  // of this thread's sequences
        for (int batch = first; batch < last; batch++) {
            const CacheSeqlenInfo sequence(p.problem, p.lengths, p.cache, batch);
            const SequenceWork work(p, batch, sequence);
            own += static_cast<long long>(work.row_tiles) * splits_of_tile(p, work);
            has_queries &= sequence.has_queries();
        }
        long long until = own;  // inclusive prefix sum
#pragma unroll
        for (int distance = 1; distance < 32; distance *= 2) {
            const long long before = __shfl_up_sync(~0u, until, distance);
            if (lane >= distance) until += before;
        }
        if (lane == 31) warp_totals_[warp] = until;
        if (threadIdx.x == 0) position_ = end_ = 0;
        __syncthreads();
        long long total = 0;
#pragma unroll
        for (int w = 0; w < THREADS / 32; w++) {
            if (w < warp) until += warp_totals_[w];
            total += warp_totals_[w];
        }
        const bool whole = takes_whole_tiles(p);
        const long long blocks = min(static_cast<long long>(gridDim.x), total);
        if (blockIdx.x >= blocks) return has_queries;
        const long long start = whole ? blockIdx.x : blockIdx.x * total / blocks;
        // Exactly one thread has the sequence in which this block starts.
        if (until - own <= start && start < until) {
            long long left = start - (until - own);
            int batch = first;
            while (true) {
                const SequenceWork work(p, batch, CacheSeqlenInfo(p.problem, p.lengths, p.cache, batch));
                const int of_tile = splits_of_tile(p, work);
                const long long of_sequence = static_cast<long long>(work.row_tiles) * of_tile;
                if (left < of_sequence) {
                    row_tile_ = static_cast<int>(left / of_tile);
                    split_ = static_cast<int>(left % of_tile);
                    break;
                }
                left -= of_sequence;
                batch++;
            }
            batch_ = batch;
            position_ = start;
            end_ = whole ? total : (blockIdx.x + 1ll) * total / blocks;
        }
        return has_queries;
    }

    // Writes the next work tile to `tile`, which is in shared memory, and moves past it. Only the block's first warp calls it.
    __device__ __forceinline__ void next(const DecodeParams& p, SplitTile& tile) {
        SplitTile s;
        s.exists = position_ < end_;
        if (s.exists) {
            const CacheSeqlenInfo sequence(p.problem, p.lengths, p.cache, batch_);
            const SequenceWork work(p, batch_, sequence);
            const int group = p.problem.nheads / p.problem.nheads_k, rows = sequence.seqlen_q() * group;
            const int tiles = (rows + BLOCK_ROWS - 1) / BLOCK_ROWS;
            s.whole = takes_whole_tiles(p);
            s.batch = batch_;
            s.head_k = row_tile_ / tiles;
            s.row = row_tile_ % tiles * BLOCK_ROWS;
            s.rows = min(rows - s.row, BLOCK_ROWS);
            s.seqlen_q = sequence.seqlen_q();
            s.seqlen_k = sequence.seqlen_k();
            s.q_offset = sequence.q_offset();
            s.k_offset = sequence.k_offset();
            s.valid = work.valid;
            // what the rows of the tile see
            const Mask mask(p.problem, s.seqlen_q, s.seqlen_k);
            const int query = s.row / group, queries = (s.row + s.rows - 1) / group - query + 1;
            const int first = mask.key_first(query) / kStepTokens * kStepTokens, end = max(mask.key_end(query, queries), first);
            const int first_split = first / kSplitTokens, of_sequence = work.first / kSplitTokens;
            const int split = s.whole ? first_split + split_ : of_sequence + split_;
            s.blocks = splits(first, end);
            s.first_block = split - first_split;
            s.is_empty = s.first_block < 0 || s.first_block >= s.blocks;
            s.slot = s.whole ? blockIdx.x : position_;
            s.first = max(split * kSplitTokens, first);
            s.end = min((split + 1) * kSplitTokens, end);
            int batch = batch_, row_tile = row_tile_, next_split = split_ + 1, moves = 1;
            if (next_split == (s.whole ? s.blocks : splits_of_tile(p, work))) {
                next_split = 0;
                row_tile += s.whole ? gridDim.x : 1;
                moves = s.whole ? gridDim.x : 1;
                int of_batch = work.row_tiles;
                while (row_tile >= of_batch && position_ + moves < end_) {
                    row_tile -= of_batch;
                    batch = next_sequence(p, batch + 1);
                    const CacheSeqlenInfo following(p.problem, p.lengths, p.cache, batch);
                    of_batch = SequenceWork(p, batch, following).row_tiles;
                }
            } else if (s.whole) {
                moves = 0;
            }
            __syncwarp();
            if ((threadIdx.x & 31) == 0) {
                tile = s;
                position_ += moves;
                batch_ = batch;
                row_tile_ = row_tile;
                split_ = next_split;
            }
        } else if ((threadIdx.x & 31) == 0) {
            tile.exists = false;
        }
    }
};

}  // namespace decode
