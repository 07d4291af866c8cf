// Schedules the decode tiles of batch-invariant calls. TileScheduler divides all tokens evenly, so where a row tile is cut depends
// on the batch and the GPU. Here splits begin at multiples of kSplitTokens, and each split of a row tile is one work tile with a
// partial result of its own. Partials join in the order of their tokens (split_partials.cuh), whichever blocks computed them.
//
// Two grids give the same bits, and the host chooses between them (src/plan/decode.rs):
//
//   num_splits 0  blocks take equal ranges of the line of all splits, and the last block of a row tile joins its partials
//   num_splits 1  block b takes row tiles b, b + gridDim.x, ... whole, and joins each partial as it is done: for many row tiles,
//                 whose partials would take much memory
#pragma once

#include "decode/tile_scheduler.cuh"

namespace decode {

constexpr int kSplitTokens = SPLIT_TOKENS;  // of a split; src/kernels/variants.rs has the number, by which the host plans memory
static_assert(kSplitTokens % kStepTokens == 0, "splits are whole steps");

// A split of a row tile (tile_scheduler.cuh explains rows, tiles and steps). Of WorkTile's members, blocks is the number of the row
// tile's splits here, and first_block that of this one among them.
struct SplitTile : WorkTile {
    long long slot;  // of this split's partial result
    bool whole;  // this block computes all splits of the row tile
    bool is_empty;  // no row of the tile sees the split: nothing to do
};

// Splits from the one with token `first` to the one before token `end`, at least one.
__device__ __forceinline__ int splits_between(int first, int end) {
    return max((end + kSplitTokens - 1) / kSplitTokens - first / kSplitTokens, 1);
}

// The line of splits, or of whole row tiles. A row tile may see fewer splits than its sequence has on the line.
struct SplitLine {
    __device__ __forceinline__ static bool is_strided(const DecodeParams& p) { return p.num_splits == 1; }
    __device__ __forceinline__ static int units(const DecodeParams& p, const SequenceWork& work) {
        return is_strided(p) ? 1 : splits_between(work.first, work.end);
    }
    __device__ __forceinline__ static int blocks(long long total) {
        return static_cast<int>(min(static_cast<long long>(gridDim.x), total));
    }
};

// Hands out the block's splits. unit_ is a split of the sequence, counted from the first that any row sees; with whole row tiles,
// where a row tile is one unit of the line, it is a split of the row tile, counted from the first that the tile sees.
class SplitScheduler : public LineScheduler<SplitLine> {
public:
    // Writes the next work tile to `tile`, which is in shared memory, and moves past it. Only the block's first warp calls it.
    __device__ __forceinline__ void next(const DecodeParams& p, SplitTile& tile) {
        SplitTile s;
        s.exists = position_ < end_;
        if (s.exists) {
            const CacheSeqlenInfo sequence(p.problem, p.lengths, p.cache, batch_);
            const SequenceWork work(p, batch_, sequence);
            const int group = p.problem.nheads / p.problem.nheads_k, rows = sequence.seqlen_q() * group;
            const int tiles = (rows + BLOCK_ROWS - 1) / BLOCK_ROWS;
            s.whole = SplitLine::is_strided(p);
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
            const int split = s.whole ? first_split + unit_ : of_sequence + unit_;
            s.blocks = splits_between(first, end);
            s.first_block = split - first_split;
            s.is_empty = s.first_block < 0 || s.first_block >= s.blocks;
            s.slot = s.whole ? blockIdx.x : position_;
            s.first = max(split * kSplitTokens, first);
            s.end = min((split + 1) * kSplitTokens, end);
            // What comes next. position_ counts units of the line, so with whole row tiles it moves after the last split of one.
            int batch = batch_, row_tile = row_tile_, next_split = unit_ + 1, moves = 1;
            if (next_split == (s.whole ? s.blocks : SplitLine::units(p, work))) {
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
                unit_ = next_split;
            }
        } else if ((threadIdx.x & 31) == 0) {
            tile.exists = false;
        }
    }
};

}  // namespace decode
