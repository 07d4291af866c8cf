// The way of a decode block from one segment to the next, for any family.
#pragma once

#include "decode/partials.cuh"

namespace decode {

// What score modifiers and masks need to know of a row.
struct RowInfo {
    float slope;   // ALiBi's, in units of log2
    int position;  // i + o: the key that the row's query stands at
};

// Family has
//   kParts        groups of warps that share a segment's tokens
//   kRowsAtOnce   rows whose output shared memory has room for
//   kWorkBytes    it needs there before
//   attend(p, segment, row_info, parts, finish)
// which leaves the part of each group in shared memory, states of all rows and the output of so many, and calls finish(first),
// where first is the first of these, until all are finished. All threads call both.
template <class Mainloop>
struct Block {
    static constexpr int kTokenGroups = Mainloop::kTokenGroups;

    static constexpr int kRowsAtOnce = Mainloop::kRowsAtOnce;
    static_assert(BLOCK_ROWS % kRowsAtOnce == 0, "a part's rows");
    static constexpr int kOutputFloats = kTokenGroups * kRowsAtOnce * kPartialStride,
                         kWorkFloats = Mainloop::kWorkBytes / sizeof(float);

    // What is in shared memory.
    struct Shared {
        float output[kOutputFloats > kWorkFloats ? kOutputFloats : kWorkFloats];
        RowState state[kTokenGroups * BLOCK_ROWS];
        RowInfo row_info[BLOCK_ROWS];
        TileScheduler scheduler;
        WorkTile tile;
        bool is_last;
        bool all_have_queries;
    };
    static_assert(sizeof(Shared) <= SHARED_BYTES, "src/kernels");

    __device__ __forceinline__ static void run(const DecodeParams& p) {
        extern __shared__ uint4 shared_memory[];
        Shared& shared = *reinterpret_cast<Shared*>(shared_memory);
        TileScheduler& scheduler = shared.scheduler;
        const WorkTile& tile = shared.tile;
        const RowInfo* row_info = shared.row_info;
        const SharedPartials<kTokenGroups, kRowsAtOnce> partials = {shared.output, shared.state};

        const bool has_queries = scheduler.begin(p);
        const bool all_have_queries = __syncthreads_and(has_queries);
        if (threadIdx.x == 0) shared.all_have_queries = all_have_queries;  // in the loop registers are few
        while (true) {
            if (threadIdx.x < 32) scheduler.next(p, shared.tile);
            __syncthreads();
            if (!tile.exists) break;
            if (threadIdx.x < BLOCK_ROWS) shared.row_info[threadIdx.x] = row_info_of(p, tile, threadIdx.x);
            __syncthreads();
            Mainloop::run(p, tile, row_info, partials, [&](int first) {
                const int rows = min(tile.rows - first, kRowsAtOnce);
                __syncthreads();
                if (tile.blocks == 1) {
                    combine_partials(p, partials.from(first), kTokenGroups, rows, WriteOutput{p, tile, first});
                } else {
                    const long long slot = GlobalPartials::slot(blockIdx.x, tile.first_block);
                    combine_partials(p, partials.from(first), kTokenGroups, rows, WritePartial(p.partials, 0, slot, first));
                }
                if (kRowsAtOnce < BLOCK_ROWS) __syncthreads();
            });
            if (tile.blocks > 1) combine_blocks(p, tile, shared.is_last);
            __syncthreads();
        }
        if (p.lengths.cu_seqlens_q) fill_unowned_rows(p, shared.all_have_queries);
    }

private:
    // Of rows that do not exist: whatever of those that do keeps indices in bounds.
    __device__ __forceinline__ static RowInfo row_info_of(const DecodeParams& p, const WorkTile& s, int row) {
        const int group = p.problem.nheads / p.problem.nheads_k;
        row = s.row + min(row, s.rows - 1);
        const ScoreOptions& o = p.score_options;
        float slope = 0.f;
        if (o.alibi_slopes)
            slope = __ldg(o.alibi_slopes + s.batch * o.alibi_batch_stride + s.head_k * group + row % group) * kLog2e;
        return {slope, row / group + s.seqlen_k - s.seqlen_q};
    }
};

}  // namespace decode
