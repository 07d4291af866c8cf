// Who computes what: a grid that is as large as the GPU shares any lengths equally, without the host knowing them.
//
// The rows of a sequence that read one KV head, seqlen_q of each of its query heads, are packed: row r is query r / group of head
// r % group. Up to BLOCK_ROWS of them are a row set, and its keys are so many units. All row sets in the order of sequences,
// heads and rows, one after the other, are a line of units, of which every block takes an equal contiguous piece. So it has,
// between row sets of its own, at most two that it shares: one that began in a block before, and one that goes on in the next.
#pragma once

#include "cache.cuh"
#include "mask.cuh"

namespace decode {

// What the cache's elements are.
constexpr CacheFormat kFormat = CacheFormat::CACHE_FORMAT;
constexpr bool kBf16 = kFormat == CacheFormat::Bf16;  // and queries and outputs too
constexpr bool kQuantized = kFormat != CacheFormat::Unquantized && !kBf16;
// A scale for each token and head, which multiplies a column of scores, and a column of probabilities.
constexpr bool kTokenScales = kFormat == CacheFormat::Int8 || kFormat == CacheFormat::Int4;
constexpr bool kZeroPoints = kFormat == CacheFormat::Int4;

// Tokens of a tile: those of a product.
constexpr int kTileTokens = 8;
// Tokens of a unit: those of one step of a warp. It divides every page. An SM needs some 24 KB in flight where memory takes 3000
// clocks to answer, which is 1.5 to 2 KB of each of its 12 to 16 warps: where a tile has no more, a unit is two.
constexpr int kTileBytes = kTileTokens * (HEADDIM + HEADDIM_V) * (kZeroPoints ? 4 : 8) / 8;
constexpr bool kFewBytes = kTileBytes <= 2048 && (HEADDIM <= 128 || !kZeroPoints);
// And where warps share steps of few columns, which have to become fp16 first: then instructions are what counts, of which two
// tiles have in common what is not done for each score.
constexpr bool kFewColumns = HEADDIM <= 64 && BLOCK_ROWS == 64;
constexpr int kStepTiles = (kQuantized && kFewBytes) || (kBf16 && kFewColumns) ? 2 : 1;
constexpr int kStepTokens = kTileTokens * kStepTiles;
// Units of int4 are still less: a warp has more of them on its way than it computes with (staged_steps.cuh). Not 16 rows at headdim
// 64, of whose loop the instruction cache has the larger part as it is.
constexpr bool kStaged = kZeroPoints && (HEADDIM > 64 || STEP == kTileTokens);
// A block that had less would cost more than it saves: it takes a merge of partial results longer.
constexpr int kMinSteps = 16;

// What a sequence's row sets are.
struct SequenceWork {
    int row_tiles;    // 0: this kernel has nothing to do with it
    int steps;       // of each; one where there are no tokens: somebody has to write the rows
    int first, end;  // tokens that any row sees
    bool valid;

    __device__ __forceinline__ SequenceWork(const DecodeParams& p, int batch, const CacheSeqlenInfo& sequence) {
        const int rows = sequence.seqlen_q() * (p.problem.nheads / p.problem.nheads_k);
        const Mask mask(p.problem, sequence.seqlen_q(), sequence.seqlen_k());
        valid = sequence.valid();
        first = mask.key_first(0) / kStepTokens * kStepTokens;
        end = max(mask.key_end(0, sequence.seqlen_q()), first);
        steps = max((end - first + kStepTokens - 1) / kStepTokens, 1);
        row_tiles = valid && rows > p.max_rows ? 0 : (rows + BLOCK_ROWS - 1) / BLOCK_ROWS * p.problem.nheads_k;
    }
};

// A block's next piece of work: tokens [first, end) of a row set.
struct WorkTile {
    int batch, head_k;
    int row, rows;           // of the sequence's packed rows: the first, and how many
    int seqlen_q, seqlen_k;  // of the sequence
    int q_offset;             // its first row of q
    int k_offset;             // its first row of the cache
    int first, end;
    int first_block, blocks;  // that share the row set
    bool valid;               // false: its rows are to be NaN
    bool exists;              // false: the block is done
};

// In shared memory, so that a block's main loop holds no registers for it.
class TileScheduler {
    long long position_, end_, total_;  // in units of the line
    int blocks_;                        // that have a piece
    int batch_, row_tile_, step_;        // where position_ is
    long long warp_totals_[THREADS / 32];

    // The block that has this unit.
    __device__ __forceinline__ int block_of(long long step) const { return static_cast<int>(((step + 1) * blocks_ - 1) / total_); }
    __device__ __forceinline__ long long first_step(int block) const { return block * total_ / blocks_; }

    // The first sequence from `batch` on that has row sets. All lanes of a warp together.
    __device__ __forceinline__ static int next_sequence(const DecodeParams& p, int batch) {
        const int lane = threadIdx.x & 31;
        for (; batch < p.problem.batch; batch += 32) {
            bool has_work = false;
            if (batch + lane < p.problem.batch) {
                const CacheSeqlenInfo sequence(p.problem, p.lengths, p.cache, batch + lane);
                has_work = SequenceWork(p, batch + lane, sequence).row_tiles > 0;
            }
            const unsigned found = __ballot_sync(~0u, has_work);
            if (found) return batch + __ffs(found) - 1;
        }
        return batch;
    }

public:
    // Finds where this block begins. All threads together. Returns whether this thread met no sequence without queries.
    __device__ __forceinline__ bool begin(const DecodeParams& p) {
        const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
        const int each = (p.problem.batch + THREADS - 1) / THREADS;
        const int first = min(threadIdx.x * each, p.problem.batch), last = min(first + each, p.problem.batch);
        bool has_queries = true;
        long long thread_steps = 0;
        for (int batch = first; batch < last; batch++) {
            const CacheSeqlenInfo sequence(p.problem, p.lengths, p.cache, batch);
            const SequenceWork work(p, batch, sequence);
            thread_steps += static_cast<long long>(work.row_tiles) * work.steps;
            has_queries &= sequence.has_queries();
        }
        long long until = thread_steps;  // with this thread's
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
        if (total == 0) return has_queries;
        const int blocks = static_cast<int>(min(static_cast<long long>(gridDim.x), (total + kMinSteps - 1) / kMinSteps));
        const long long start = blockIdx.x * total / blocks;
        // of the threads whose sequences have units one is right
        if (blockIdx.x < blocks && until - thread_steps <= start && start < until) {
            long long left = start - (until - thread_steps);
            int batch = first;
            while (true) {
                const SequenceWork work(p, batch, CacheSeqlenInfo(p.problem, p.lengths, p.cache, batch));
                const long long sequence_steps = static_cast<long long>(work.row_tiles) * work.steps;
                if (left < sequence_steps) {
                    row_tile_ = static_cast<int>(left / work.steps);
                    step_ = static_cast<int>(left % work.steps);
                    break;
                }
                left -= sequence_steps;
                batch++;
            }
            batch_ = batch;
            total_ = total;
            blocks_ = blocks;
            position_ = start;
            end_ = (blockIdx.x + 1ll) * total / blocks;
        }
        return has_queries;
    }

    // The next segment, and behind it. The block's first warp alone; `segment` is in shared memory.
    __device__ __forceinline__ void next(const DecodeParams& p, WorkTile& tile) {
        WorkTile s;
        s.exists = position_ < end_;
        if (s.exists) {
            const CacheSeqlenInfo sequence(p.problem, p.lengths, p.cache, batch_);
            const SequenceWork work(p, batch_, sequence);
            const int group = p.problem.nheads / p.problem.nheads_k, rows = sequence.seqlen_q() * group;
            const int tiles = (rows + BLOCK_ROWS - 1) / BLOCK_ROWS;
            const int row_tile = row_tile_, step = step_;
            const long long begin = position_ - step;  // of the row set
            const int until = static_cast<int>(min(step + (end_ - position_), static_cast<long long>(work.steps)));
            s.batch = batch_;
            s.head_k = row_tile / tiles;
            s.row = row_tile % tiles * BLOCK_ROWS;
            s.rows = min(rows - s.row, BLOCK_ROWS);
            s.seqlen_q = sequence.seqlen_q();
            s.seqlen_k = sequence.seqlen_k();
            s.q_offset = sequence.q_offset();
            s.k_offset = sequence.k_offset();
            s.valid = work.valid;
            s.first_block = block_of(begin);
            s.blocks = block_of(begin + work.steps - 1) - s.first_block + 1;
            // Of no more parts than are allowed, each is computed by the block that has its end: then others have none of it.
            const int chunk = p.num_splits > 0 ? (work.steps + p.num_splits - 1) / p.num_splits : 1;
            s.first = min(work.first + step / chunk * chunk * kStepTokens, work.end);
            s.end = until == work.steps ? work.end : min(work.first + until / chunk * chunk * kStepTokens, work.end);
            if ((threadIdx.x & 31) == 0) tile = s;  // at once: registers are few where a kernel has all of them
            __syncwarp();
            int batch = s.batch, next_row_tile = row_tile, next_step = until;
            if (until == work.steps) {
                next_row_tile = row_tile + 1;
                next_step = 0;
                if (next_row_tile == work.row_tiles) {
                    next_row_tile = 0;
                    if (position_ + (until - step) < end_) batch = next_sequence(p, batch + 1);
                }
            }
            __syncwarp();
            if ((threadIdx.x & 31) == 0) {
                position_ += until - step;
                batch_ = batch;
                row_tile_ = next_row_tile;
                step_ = next_step;
            }
        } else if ((threadIdx.x & 31) == 0) {
            tile.exists = false;
        }
    }
};

}  // namespace decode
