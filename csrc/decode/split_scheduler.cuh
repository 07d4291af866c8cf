// Schedules the decode tiles of batch-invariant calls (a row's bits depend on no other row or sequence), on the device; block.cuh
// calls it. A row tile is up to BLOCK_ROWS query rows, (query, head) pairs of a sequence that read one KV head. TileScheduler
// divides all tokens evenly, so where a row tile is cut depends on the batch and the GPU. Here splits begin at multiples of
// kSplitTokens, and each is one work tile with a partial result, which split_partials.cuh joins in the order of their tokens.
//
// All splits of all row tiles, in the order of sequences, KV heads, rows and tokens, form a line. Two grids give the same bits, and
// the host chooses between them (src/plan/decode.rs):
//
//   num_splits 0  blocks take equal ranges of the line of all splits, and the last block of a row tile joins its partials
//   num_splits 1  block b takes row tiles b, b + gridDim.x, ... whole, and joins each partial as it is done: for many row tiles,
//                 whose partials would take much memory
//
// SequenceWork (tile_scheduler.cuh) has a sequence's number of row tiles, over all KV heads, and the range of tokens [first, end)
// that any row sees. THREADS: of a block. BLOCKS_PER_SM: blocks that an SM runs at once. IS_LATENTS: K and V are one latent (MLA).
#pragma once

#include "decode/tile_scheduler.cuh"  // SequenceWork, WorkTile; next_sequence(): skips those without row tiles

namespace decode {

constexpr int kSplitTokens = SPLIT_TOKENS;  // of a split; src/kernels/passes.rs has the number, by which the host plans memory
static_assert(kSplitTokens % kStepTokens == 0, "splits are whole steps of the main loop");

// A split of a row tile. Of WorkTile's members `blocks` is the number of the row tile's splits, `first_block` this one's number.
struct SplitTile : WorkTile {
    long long slot;  // number of the place in memory of this split's partial result
    bool whole;  // this block computes all splits of the row tile
    bool is_empty;  // no row of the tile sees the split, which has a place on the line because another tile's rows do
};

// Hands out a block's splits. Has the interface of TileScheduler, whose begin() it repeats: as one template the kernels of fp8
// latents spilled 20 bytes. Lives in shared memory.
class SplitScheduler {
    long long position_, end_;  // next split of the block on the line, and its end; with whole row tiles, in row tiles
    int batch_, row_tile_, split_;  // what position_ is in; split_ counts from the sequence's (whole: the row tile's) first
    long long warp_totals_[THREADS / 32];  // splits of the sequences of each warp's threads

    __device__ __forceinline__ static bool takes_whole_tiles(const DecodeParams& p) { return p.num_splits == 1; }
    // Returns the number of splits with tokens from `first` up to `end`, at least one.
    __device__ __forceinline__ static int splits(int first, int end) {
        return max((end + kSplitTokens - 1) / kSplitTokens - first / kSplitTokens, 1);
    }
    // Returns the places on the line of each row tile of a sequence: splits that any row sees, or 1 if blocks take whole ones.
    __device__ __forceinline__ static int splits_of_tile(const DecodeParams& p, const SequenceWork& work) {
        return takes_whole_tiles(p) ? 1 : splits(work.first, work.end);
    }

public:
    // Finds the block's first split by a prefix sum over the sequences. All threads call it together. Returns false if this thread
    // met a sequence whose rows of q are unknown (invalid cu_seqlens_q).
    __device__ __forceinline__ bool begin(const DecodeParams& p) {
        const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
        const int each = (p.problem.batch + THREADS - 1) / THREADS;  // sequences of a thread
        const int first = min(threadIdx.x * each, p.problem.batch), last = min(first + each, p.problem.batch);
        bool has_queries = true;
        long long own_splits = 0;  // places on the line of this thread's sequences
        for (int batch = first; batch < last; batch++) {
            const CacheSeqlenInfo sequence(p.problem, p.lengths, p.cache, batch);
            const SequenceWork work(p, sequence);
            own_splits += static_cast<long long>(work.row_tiles) * splits_of_tile(p, work);
            has_queries &= sequence.has_queries();
        }
        long long until = inclusive_sum(own_splits);  // over the lanes of the warp; below over all threads before, too
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
        // The range of the line that this block takes. Ranges differ by at most one split. An SM's blocks, b, b + sms, ..., take
        // neighboring ones, so the sums of SMs differ by at most one too. Not over latents: kernels of fp8 would spill.
        int range = blockIdx.x;
        if constexpr (!IS_LATENTS) {
            const int sms = gridDim.x / BLOCKS_PER_SM;
            if (blocks == gridDim.x) range = range % sms * BLOCKS_PER_SM + range / sms;
        }
        const long long start = whole ? blockIdx.x : range * total / blocks;
        // Exactly one thread has the sequence in which this block starts.
        if (until - own_splits <= start && start < until) {
            long long left = start - (until - own_splits);
            int batch = first;
            while (true) {
                const SequenceWork work(p, CacheSeqlenInfo(p.problem, p.lengths, p.cache, batch));
                const int tile_splits = splits_of_tile(p, work);
                const long long sequence_splits = static_cast<long long>(work.row_tiles) * tile_splits;
                if (left < sequence_splits) {
                    row_tile_ = static_cast<int>(left / tile_splits);
                    split_ = static_cast<int>(left % tile_splits);
                    break;
                }
                left -= sequence_splits;
                batch++;
            }
            batch_ = batch;
            position_ = start;
            end_ = whole ? total : (range + 1ll) * total / blocks;
        }
        return has_queries;
    }

    // Writes the next work tile to `tile`, which is in shared memory, and moves past it. Only the block's first warp calls it.
    __device__ __forceinline__ void next(const DecodeParams& p, SplitTile& tile) {
        SplitTile s;
        s.exists = position_ < end_;
        if (s.exists) {
            const CacheSeqlenInfo sequence(p.problem, p.lengths, p.cache, batch_);
            const SequenceWork work(p, sequence);
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
            s.valid = work.valid;  // false: lengths are invalid, and the rows are written as NaN
            // tokens that the rows of the tile see, from a whole step on
            const Mask mask(p.problem, s.seqlen_q, s.seqlen_k);
            const int query = s.row / group, queries = (s.row + s.rows - 1) / group - query + 1;
            const int first = mask.key_first(query) / kStepTokens * kStepTokens, end = max(mask.key_end(query, queries), first);
            const int first_split = first / kSplitTokens, sequence_first_split = work.first / kSplitTokens;
            const int split = s.whole ? first_split + split_ : sequence_first_split + split_;
            s.blocks = splits(first, end);
            s.first_block = split - first_split;
            s.is_empty = s.first_block < 0 || s.first_block >= s.blocks;
            s.slot = s.whole ? blockIdx.x : position_;
            s.first = max(split * kSplitTokens, first);
            s.end = min((split + 1) * kSplitTokens, end);
            // moves: by how much position_ advances. With whole row tiles it counts these, and the next one is gridDim.x further.
            // next_sequence() skips sequences without row tiles, which have no place on the line.
            int batch = batch_, row_tile = row_tile_, next_split = split_ + 1, moves = 1;
            if (next_split == (s.whole ? s.blocks : splits_of_tile(p, work))) {
                next_split = 0;
                row_tile += s.whole ? gridDim.x : 1;
                moves = s.whole ? gridDim.x : 1;
                int batch_tiles = work.row_tiles;
                while (row_tile >= batch_tiles && position_ + moves < end_) {
                    row_tile -= batch_tiles;
                    batch = next_sequence(p, batch + 1);
                    const CacheSeqlenInfo following(p.problem, p.lengths, p.cache, batch);
                    batch_tiles = SequenceWork(p, following).row_tiles;
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
