// Outer loop of every decode kernel (volta, turing, MLA): fetch a work tile, run the family's main loop on it, combine the
// partials. The kernel tables in src/kernels name Block<main loop> as the kernel.
//
// A row tile is up to BLOCK_ROWS packed query rows, (query, head) pairs of a sequence that read one KV head. A work tile is a range
// of the KV tokens of one row tile. The grid is persistent: TileScheduler deals each block about as many of all tokens, as a list
// of work tiles. The warps of a block split the tokens of a tile (FlashDecoding inside a block), so each group of warps leaves one
// partial result. The block combines these in shared memory. If it is the row tile's only block (tile.blocks is 1), it writes the
// output. Else it writes one partial to global memory. The blocks of a row tile combine these in a tree of at most kRadix (8 or 4)
// partials a node: the last block to arrive at a node combines it (combine_blocks, partials.cuh).
//
// The kernel's row in src/kernels gives BLOCK_ROWS and SHARED_BYTES (of a block).
#pragma once

#include "batch_invariant.cuh"  // kBatchInvariant: a row's output bits do not depend on the batch
#include "conditional.cuh"
#include "decode/partials.cuh"  // RowState: a row's softmax state; SharedPartials, combine_...(), Write...; quotient(): a division
#include "decode/split_partials.cuh"  // WriteSplit, join_splits(): of batch-invariant kernels
#include "decode/tree.cuh"  // DraftTokens, load_draft_tokens(); kTree (features.cuh): the kernel has a tree mask

namespace decode {

// What masks and ALiBi need of one query row. DraftTokens: with a tree mask (tree.cuh), the draft tokens that the row sees.
struct RowInfo : DraftTokens<kTree> {
    float slope;  // ALiBi slope, in log2 units; 0 without ALiBi
    int position;  // index of the key at the row's own position: query index (with a tree: depth) + seqlen_k - seqlen_q

    RowInfo() = default;
    __device__ __forceinline__ RowInfo(float slope, int position) : slope(slope), position(position) {}
};

// Runs a decode kernel. All threads of the block call run().
//
// Mainloop is DecodeMainloop (decode/mainloop.cuh) or MlaMainloop (volta/decode/mla.cuh). It has
//
//   kTokenGroups  groups of warps that split the tokens of a work tile; each has a partial result
//   kRowsAtOnce   rows whose partial outputs fit shared memory at once
//   kWorkBytes    shared memory for the main loop itself; partial outputs take its place afterwards
//   run(p, tile, row_info, partials, finish)
//
// run() stores the partials of all groups: the state of every row, but the outputs of kRowsAtOnce rows at a time. After each
// such part it calls finish(first), where `first` is the first of these rows. All threads call finish together.
//
// Write writes finished rows: WriteOutput or another WriteOutputAs (partials.cuh).
template <class Mainloop, class Write = WriteOutput>
struct Block {
    static constexpr int kTokenGroups = Mainloop::kTokenGroups;

    static constexpr int kRowsAtOnce = Mainloop::kRowsAtOnce;
    static_assert(BLOCK_ROWS % kRowsAtOnce == 0, "all parts of the outputs have kRowsAtOnce rows");
    // kPartialStride: floats of a row of a partial output (partials.cuh).
    static constexpr int kOutputFloats = kTokenGroups * kRowsAtOnce * kPartialStride,
                         kWorkFloats = Mainloop::kWorkBytes / sizeof(float);

    // Batch-invariant kernels cut a row tile's tokens into splits at fixed numbers (split_scheduler.cuh); their work tiles are
    // SplitTiles. Of these `blocks` is the number of the row tile's splits; whole: this block has all of them; is_empty: no row
    // sees this split. kTokenGroups > 0, always true, makes this depend on Mainloop, so that `if constexpr` drops what the other
    // kind of tile lacks.
    static constexpr bool kFixedSplits = kBatchInvariant && kTokenGroups > 0;
    using Scheduler = typename Conditional<kFixedSplits, SplitScheduler, TileScheduler>::Type;
    using Tile = typename Conditional<kFixedSplits, SplitTile, WorkTile>::Type;

    struct Shared {  // dynamic shared memory
        float output[kOutputFloats > kWorkFloats ? kOutputFloats : kWorkFloats];  // first the main loop's memory
        RowState state[kTokenGroups * BLOCK_ROWS];
        RowInfo row_info[BLOCK_ROWS];
        Scheduler scheduler;
        Tile tile;
        bool cu_seqlens_q_valid;
    };
    static_assert(sizeof(Shared) <= SHARED_BYTES, "the kernel's row in src/kernels has enough shared memory");
    static_assert(kRadix * BLOCK_ROWS * sizeof(RowState) <= sizeof(Shared::output), "combine_blocks has room for its states");

    __device__ __forceinline__ static void run(const DecodeParams& p) {
        extern __shared__ uint4 shared_memory[];
        Shared& shared = *reinterpret_cast<Shared*>(shared_memory);
        Scheduler& scheduler = shared.scheduler;
        const Tile& tile = shared.tile;
        const RowInfo* row_info = shared.row_info;
        const SharedPartials<kTokenGroups, kRowsAtOnce> partials = {shared.output, shared.state};

        // Finds the block's first work tile, and whether all sequences' rows of q are known (cu_seqlens_q is valid): kept in shared
        // memory, because the main loop has no register for it. remat_*: with threadIdx.x in a register, 64 rows of latents spill.
        if constexpr (kFixedSplits) {
            const bool has_queries = scheduler.begin(p);
            const bool cu_seqlens_q_valid = __syncthreads_and(has_queries);
            if (threadIdx.x == 0) shared.cu_seqlens_q_valid = cu_seqlens_q_valid;
        } else if (remat_thread_index() < 32) {
            const bool cu_seqlens_q_valid = scheduler.begin(p);
            if (remat_thread_index() == 0) shared.cu_seqlens_q_valid = cu_seqlens_q_valid;
        }
        while (true) {
            if (remat_thread_index() < 32) scheduler.next(p, shared.tile);
            __syncthreads();
            if (!tile.exists) break;
            if constexpr (kFixedSplits) {
                if (tile.is_empty) {
                    __syncthreads();  // the first warp overwrites the tile
                    continue;
                }
            }
            if (threadIdx.x < BLOCK_ROWS) shared.row_info[threadIdx.x] = row_info_of(p, tile, threadIdx.x);
            __syncthreads();
            Mainloop::run(p, tile, row_info, partials, [&](int first) {
                const int rows = min(tile.rows - first, kRowsAtOnce);
                __syncthreads();
                if constexpr (kFixedSplits) {
                    combine_partials(p, partials.from(first), kTokenGroups, rows, WriteSplit{p, tile, first});
                } else if (tile.blocks == 1) {
                    combine_partials(p, partials.from(first), kTokenGroups, rows, Write{p, tile, first});
                } else {
                    // A block has two slots, as it shares at most two row tiles with others: the one that an earlier block
                    // (tile.first_block) begins, and the one that it begins. 0: the leaves of combine_blocks' tree.
                    const int slot = GlobalPartials::slot(blockIdx.x, tile.first_block);
                    combine_partials(p, partials.from(first), kTokenGroups, rows, WritePartial(p.partials, 0, slot, first));
                }
                if (kRowsAtOnce < BLOCK_ROWS) __syncthreads();
            });
            if constexpr (kFixedSplits) {
                if (tile.blocks > 1 && !tile.whole) join_splits(p, tile);
            } else {
                if (tile.blocks > 1) combine_blocks<Write>(p, tile, reinterpret_cast<RowState*>(shared.output));
            }
            __syncthreads();
        }
        // Rows of packed q that belong to no sequence become NaN.
        if (p.lengths.cu_seqlens_q) fill_unowned_rows(p, shared.cu_seqlens_q_valid);
    }

private:
    // Returns the RowInfo of a row of a tile (SplitTile is a WorkTile). Rows past the last one get that of the last, which keeps
    // indices in bounds. p.group.divisor: query heads of a KV head.
    __device__ __forceinline__ static RowInfo row_info_of(const DecodeParams& p, const WorkTile& s, int row) {
        row = s.row + min(row, s.rows - 1);
        const int query = quotient(row, p.group), head = s.head_k * p.group.divisor + row - query * p.group.divisor;
        const ScoreOptions& o = p.score_options;
        float slope = 0.f;
        if (o.alibi_slopes) slope = __ldg(o.alibi_slopes + s.batch * o.alibi_batch_stride + head) * kLog2e;
        RowInfo info(slope, query + s.seqlen_k - s.seqlen_q);
        if constexpr (kTree) info.position = load_draft_tokens(p, s, query, info) + s.seqlen_k - s.seqlen_q;
        return info;
    }
};

}  // namespace decode
