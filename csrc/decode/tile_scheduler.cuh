// Schedules decode tiles on the device. A persistent grid splits all KV tokens evenly across its blocks, so the host needs no
// sequence lengths and one CUDA graph serves all lengths. This is stream-K over (sequence, KV head, row tile). Also has the
// constants of a decode kernel that follow from its row in src/kernels. Included by all decode headers.
//
// The query rows of a sequence that read one KV head are packed: row r is query r / group of head r % group, where group =
// p.group.divisor, the query heads of a KV head. Up to BLOCK_ROWS of them are a row tile. The tokens that a row tile sees are a
// number of steps (kStepTokens tokens each). All row tiles in the order of sequences, heads and rows form one line of steps. Each
// block takes an equal contiguous range of it. So a block shares at most two row tiles with other blocks: its first and its last.
//
// The build defines macros from the kernel's row in src/kernels: HEADDIM, HEADDIM_V, the cache's formats, IS_LATENTS (keys and
// values are one latent: MLA), BLOCK_ROWS (packed query rows of a row tile), THREADS (of a block), BLOCKS_PER_SM (resident) and
// STEP, not the step above: rows of a warp, or of MLA the rows of output that shared memory holds at a time (volta/decode/mla.cuh).
#pragma once

#include "batch_invariant.cuh"  // kBatchInvariant
#include "cache.cuh"  // CacheSeqlenInfo: lengths of a sequence; DecodeParams (src/params)
#include "mask.cuh"  // Mask: key_first(), key_end(): tokens that queries see

// Returns n / d.divisor, for 0 <= n < 2^31, by a multiplication and a shift, because a division is some twenty instructions.
// d.factor is 2^d.shift / d.divisor, rounded up.
__device__ __forceinline__ int quotient(int n, const Divisor& d) {
    return static_cast<int>(static_cast<unsigned long long>(static_cast<unsigned>(n)) * d.factor >> d.shift);
}

namespace decode {

// Formats of keys (or latents) and of values. They differ in int8k_int4v caches: values need fewer bits than keys.
constexpr CacheFormat kKeyFormat = CacheFormat::KEY_FORMAT, kValueFormat = CacheFormat::VALUE_FORMAT;
using KeyInfo = CacheFormatInfo<kKeyFormat>;
using ValueInfo = CacheFormatInfo<kValueFormat>;
constexpr bool kBf16 = IS_BF16;  // queries, an unquantized cache and outputs are bf16, else fp16
constexpr bool kQuantized = kKeyFormat != CacheFormat::Unquantized;
// A scale per token and head: that of K multiplies a column of scores, that of V a column of probabilities.
constexpr bool kTokenScales = KeyInfo::kTokenScales;
// Zero points of keys: the cache is int4. Of values alone: int8k_int4v.
constexpr bool kKeyZeroPoints = KeyInfo::kZeroPoints, kValueZeroPoints = ValueInfo::kZeroPoints;
static_assert(kTokenScales == ValueInfo::kTokenScales && kKeyZeroPoints <= kValueZeroPoints,
              "values have scales or zero points if keys have them");

// Tokens of a tile: the n (scores) or k (output) of one product.
constexpr int kTileTokens = 8;
// kStepTokens: tokens that a warp computes at once, one or two tiles; divides every page size. With a memory latency of 3000 cycles
// (under load) a V100's SM needs 22 KB in flight for the nominal 900 GB/s (7.4 bytes a cycle). Its 12 to 16 warps have 24 KB if
// each has 1.5 to 2 KB. So a step of a quantized cache has two tiles where K and V of one tile (kTileBytes) have at most 2 KB. int4
// at headdim 256 has one, because it is staged (staged_loader.cuh).
constexpr int kTileBytes = kTileTokens * (HEADDIM * KeyInfo::kBits + HEADDIM_V * ValueInfo::kBits) / 8;
constexpr bool kFewBytes = kTileBytes <= 2048 && (HEADDIM <= 128 || !kKeyZeroPoints);
// Latents have two tiles (volta/decode/mla.cuh). Two also pay where four warps (BLOCK_ROWS of 64) share bf16 steps of few columns:
// instructions are the limit there, and the two share those that a step needs once. Not in batch-invariant kernels: after a step
// row maxima may move, so tiles of 32 and of 64 rows have the same steps.
constexpr bool kFewColumns = HEADDIM <= 64 && BLOCK_ROWS == 64 && !kBatchInvariant;
constexpr int kStepTiles = IS_LATENTS || (kQuantized && kFewBytes) || (kBf16 && kFewColumns) ? 2 : 1;
constexpr int kStepTokens = kTileTokens * kStepTiles;
static_assert(!kBatchInvariant || IS_LATENTS || kQuantized || kStepTiles == 1, "all tiles of a headdim have the same steps");
// int4 steps have still fewer bytes, so a warp loads further steps while it computes one (staged_loader.cuh). Kernels with 16
// rows per warp (STEP; else 8, as many as a tile has tokens) at headdim 64 do not: their loop fills most of the instruction cache.
constexpr bool kStaged = kKeyZeroPoints && (HEADDIM > 64 || STEP == kTileTokens);
// Minimum steps of a working block, on average: with fewer, combining partial results costs more than another block saves
// (docs/design/trials.md). kMinSteps: with one working block an SM, 64 tokens, of latents 32. kMinStepsOfSeveral: with several, 128
// tokens, or 192 in steps of two tiles.
constexpr int kMinSteps = (IS_LATENTS ? 32 : 64) / kStepTokens, kMinStepsOfSeveral = kStepTiles == 1 ? 16 : 12;

// Returns about a / b, for a >= 0 and b > 0: exact below 2^20 or so, in fewer instructions than a division. For choices that need
// not be exact.
__device__ __forceinline__ int about_quotient(int a, int b) { return static_cast<int>(__fdividef(a + 0.5f, b)); }

// Returns the number of blocks that get work, at most gridDim.x. The grid has BLOCKS_PER_SM blocks for each SM. `steps` (not 0): of
// all `tiles` row tiles. `steps_each`: of a row tile of one sequence. Usually each SM gets as many blocks as the minimum steps
// allow. But a block with parts of two row tiles begins and ends twice. So if all row tiles have steps_each steps, each gets whole
// blocks of `longest` steps or fewer, and no more blocks than that takes. Not where `longest` exceeds kFewSteps, or the busiest SM
// would have more than kMoreSteps above the average.
__device__ __forceinline__ int working_blocks(long long steps, int tiles, int steps_each) {
    constexpr int kMoreSteps = 8, kFewSteps = 64;
    const int sms = gridDim.x / BLOCKS_PER_SM;
    int blocks = static_cast<int>(min(static_cast<long long>(sms), (steps + kMinSteps - 1) / kMinSteps));
#pragma unroll
    for (int n = 2; n <= BLOCKS_PER_SM; n++)
        if (steps >= static_cast<long long>(n) * kMinStepsOfSeveral * sms) blocks = n * sms;
    if (tiles > gridDim.x || static_cast<long long>(tiles) * steps_each != steps) return blocks;
    const int longest = about_quotient(steps_each - 1, max(about_quotient(blocks, tiles), 1)) + 1;
    const int whole = tiles * (about_quotient(steps_each - 1, longest) + 1);
    const long long busiest = (about_quotient(whole - 1, sms) + 1ll) * longest;  // steps of the SM with most blocks
    return longest <= kFewSteps && whole <= gridDim.x && busiest * sms - steps <= kMoreSteps * sms ? whole : blocks;
}

// Row tiles of one sequence.
struct SequenceWork {
    int row_tiles;  // over all KV heads; 0: no queries, or more than max_rows query rows, which a prefill kernel computes
    int steps;  // of each row tile; at least 1, because a row tile without tokens still has to be written
    int first, end;  // range of tokens that any row sees
    bool valid;  // false: its lengths, from GPU memory, are impossible

    __device__ __forceinline__ SequenceWork(const DecodeParams& p, const CacheSeqlenInfo& sequence) {
        const int rows = sequence.seqlen_q() * p.group.divisor;
        const Mask mask(p.problem, sequence.seqlen_q(), sequence.seqlen_k());
        valid = sequence.valid();
        first = mask.key_first(0) / kStepTokens * kStepTokens;
        end = max(mask.key_end(0, sequence.seqlen_q()), first);
        steps = max((end - first + kStepTokens - 1) / kStepTokens, 1);
        row_tiles = valid && rows > p.max_rows ? 0 : (rows + BLOCK_ROWS - 1) / BLOCK_ROWS * p.problem.nheads_k;
    }
};

// One piece of a block's work: the tokens [first, end) of one row tile. It may have none: of a row tile without tokens, or of a
// block whose steps num_splits gives to others (TileScheduler::next). The block still counts, with a partial result of sum 0.
struct WorkTile {
    int batch, head_k;
    int row, rows;  // the tile's first packed row in the sequence and KV head, and number of rows
    int seqlen_q, seqlen_k;  // lengths of the sequence
    int q_offset;  // first row of q, from the batch entry's first
    int k_offset;  // cache row of token 0, from the first row of the entry or of the pages
    int first, end;
    int first_block, blocks;  // blocks that share the row tile: first, and number
    bool valid;  // as in SequenceWork; false: the rows are written as NaN
    bool exists;  // false: the block is done
};

// Returns the sum of x over this lane and the lanes before it.
template <class Number>
__device__ __forceinline__ Number inclusive_sum(Number x) {
    const int lane = threadIdx.x & 31;
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
        const Number before = __shfl_up_sync(~0u, x, distance);
        if (lane >= distance) x += before;
    }
    return x;
}

// Returns the first sequence from `batch` on that has row tiles. All lanes of a warp call it together.
__device__ __forceinline__ int next_sequence(const DecodeParams& p, int batch) {
    const int lane = threadIdx.x & 31;
    for (; batch < p.problem.batch; batch += 32) {
        bool has_work = false;
        if (batch + lane < p.problem.batch) {
            const CacheSeqlenInfo sequence(p.problem, p.lengths, p.cache, batch + lane);
            has_work = SequenceWork(p, sequence).row_tiles > 0;
        }
        const unsigned found = __ballot_sync(~0u, has_work);
        if (found) return batch + __ffs(found) - 1;
    }
    return batch;
}

// Hands out the block's work tiles. Lives in shared memory, so that the main loop holds no registers for it.
class TileScheduler {
    long long position_, end_, total_;  // in steps of the line: the block's position, its end; all steps
    int blocks_;  // blocks that have work
    int batch_, row_tile_, step_;  // what position_ is in

    // Returns the block that computes this step: the last whose range, from block * total_ / blocks_ on, begins at or before it.
    __device__ __forceinline__ int block_of(long long step) const { return static_cast<int>(((step + 1) * blocks_ - 1) / total_); }

public:
    // Finds the block's first work tile by a prefix sum over the sequences. Only the block's first warp calls it: code that runs
    // once is not in its instruction cache yet, and several warps would fetch it several times. Returns false if the rows of q of a
    // sequence are unknown (invalid cu_seqlens_q): then block.cuh has to search those that belong to no sequence, which become NaN.
    __device__ __forceinline__ bool begin(const DecodeParams& p) {
        const int lane = remat_thread_index();
        const int each = (p.problem.batch + 31) / 32;
        const int first = min(lane * each, p.problem.batch), last = min(first + each, p.problem.batch);
        bool has_queries = true;
        long long lane_steps = 0;
        int lane_tiles = 0, tile_steps = 1;  // row tiles; steps of each row tile of the lane's last sequence
#pragma unroll 1
        for (int batch = first; batch < last; batch++) {
            const CacheSeqlenInfo sequence(p.problem, p.lengths, p.cache, batch);
            const SequenceWork work(p, sequence);
            lane_tiles += work.row_tiles;
            tile_steps = work.steps;
            lane_steps += static_cast<long long>(work.row_tiles) * work.steps;
            has_queries &= sequence.has_queries();
        }
        has_queries = __all_sync(~0u, has_queries);
        const long long until = inclusive_sum(lane_steps), total = __shfl_sync(~0u, until, 31);
        if (lane == 0) position_ = end_ = 0;
        __syncwarp();
        if (total == 0) return has_queries;
        const int tiles = __shfl_sync(~0u, inclusive_sum(lane_tiles), 31);
        const int blocks = working_blocks(total, tiles, __shfl_sync(~0u, tile_steps, 0));
        const long long start = blockIdx.x * total / blocks;
        // Exactly one lane has the sequence in which this block starts.
        if (blockIdx.x < blocks && until - lane_steps <= start && start < until) {
            long long left = start - (until - lane_steps);
            int batch = first;
            while (each > 1) {  // with one sequence a lane, tile_steps is its own already
                const SequenceWork work(p, CacheSeqlenInfo(p.problem, p.lengths, p.cache, batch));
                const long long sequence_steps = static_cast<long long>(work.row_tiles) * work.steps;
                tile_steps = work.steps;
                if (left < sequence_steps) break;
                left -= sequence_steps;
                batch++;
            }
            row_tile_ = static_cast<int>(left / tile_steps);
            step_ = static_cast<int>(left % tile_steps);
            batch_ = batch;
            total_ = total;
            blocks_ = blocks;
            position_ = start;
            end_ = (blockIdx.x + 1ll) * total / blocks;
        }
        return has_queries;
    }

    // Writes the next work tile to `tile`, which is in shared memory, and moves past it. Only the block's first warp calls it: all
    // lanes compute the same, and lane 0 stores it. Other lanes may read it after a __syncwarp().
    __device__ __forceinline__ void next(const DecodeParams& p, WorkTile& tile) {
        __syncwarp();  // begin() or the last call has written
        WorkTile s;
        s.exists = position_ < end_;
        if (s.exists) {
            const CacheSeqlenInfo sequence(p.problem, p.lengths, p.cache, batch_);
            const SequenceWork work(p, sequence);
            const int rows = sequence.seqlen_q() * p.group.divisor;
            const int tiles = (rows + BLOCK_ROWS - 1) / BLOCK_ROWS;
            const int row_tile = row_tile_, step = step_;
            const long long begin = position_ - step;  // where the row tile begins on the line
            const int until = static_cast<int>(min(step + (end_ - position_), static_cast<long long>(work.steps)));
            s.batch = batch_;
            s.head_k = tiles > 1 ? row_tile / tiles : row_tile;  // a branch, because a division takes many instructions
            s.row = (row_tile - s.head_k * tiles) * BLOCK_ROWS;
            s.rows = min(rows - s.row, BLOCK_ROWS);
            s.seqlen_q = sequence.seqlen_q();
            s.seqlen_k = sequence.seqlen_k();
            s.q_offset = sequence.q_offset();
            s.k_offset = sequence.k_offset();
            s.valid = work.valid;
            s.first_block = step == 0 ? blockIdx.x : block_of(begin);
            s.blocks = (until == work.steps ? blockIdx.x : block_of(begin + work.steps - 1)) - s.first_block + 1;
            int first_step = step, end_step = until;
            if (p.num_splits > 0) {
                // The caller limits the splits of a row tile: its steps form groups of `chunk`, and a group goes whole to the
                // block whose range has its last step.
                const int chunk = (work.steps + p.num_splits - 1) / p.num_splits;
                first_step = step / chunk * chunk;
                end_step = until / chunk * chunk;
            }
            s.first = min(work.first + first_step * kStepTokens, work.end);
            s.end = until == work.steps ? work.end : min(work.first + end_step * kStepTokens, work.end);
            if (remat_thread_index() == 0) tile = s;  // early, because kernels that use all registers have none to hold it
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
            if (remat_thread_index() == 0) {
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
