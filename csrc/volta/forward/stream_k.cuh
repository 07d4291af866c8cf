// Grids of equal shares. Where the last round of a grid's blocks would leave most of the GPU idle, the blocks of rows that are left
// over after the full rounds are cut along the keys, and every place of the GPU gets as much of them: src/plan/stream_k.rs decides
// which block has what, in the order in which they start.
//
// A piece's result goes to scratch memory, and the block that finds all of its block of rows there joins them in the order of the
// keys. So nobody waits for another, and the output does not depend on who that is.
#pragma once

#include "semaphore.cuh"
#include "volta/forward/features.cuh"

namespace volta {

// A block's keys: all of a block of rows, or a piece.
struct Share {
    int row_block;  // of all heads and batch entries
    int cut = 0;  // its number among those that are cut
    int first = 0, end;  // in steps
    int number = 0, pieces = 1;

    __device__ __forceinline__ Share(const StreamKParams& s, int block) : row_block(block), end(0x7fffffff) {
        if (block >= s.data_parallel_tiles) {
            const StreamKSplit x = s.pieces[block - s.data_parallel_tiles];
            cut = x.row_block;
            row_block = s.data_parallel_tiles + cut;
            first = x.first;
            end = x.end;
            number = x.part >> 8;
            pieces = x.part & 0xff;
        }
    }
};

template <int BlockRows>
class StreamKPlan {
    const StreamKParams& shares_;

    // Where a block of rows lies.
    struct Place {
        int row, head, batch;
        __device__ __forceinline__ Place(const Problem& p, int row_block) {
            const int of_head = (p.seqlen_q + BlockRows - 1) / BlockRows;
            const int heads = row_block / of_head;
            row = (row_block - heads * of_head) * BlockRows;
            batch = heads / p.nheads;
            head = heads - batch * p.nheads;
        }
    };
    // For a branch that is rarely taken: remat_thread_index().
    __device__ __forceinline__ Place remat_place(const Problem& p) const {
        return Place(p, Share(shares_, remat_block_index()).row_block);
    }

public:
    static constexpr bool kIndexed = false;
    static_assert(!kVarlen && !kHasScoreMod, "what reads the place of a block from the grid");
    __device__ __forceinline__ explicit StreamKPlan(const StreamKParams& shares) : shares_(shares) {}

    template <int Rows>
    struct Block : Place {
        Share share;
        int head_k;
        __device__ __forceinline__ Block(const Problem& p, const StreamKPlan& grid) : Block(p, Share(grid.shares_, blockIdx.x)) {}
        __device__ __forceinline__ Block(const Problem& p, const Share& share_)
            : Place(p, share_.row_block), share(share_), head_k(Place::head / (p.nheads / p.nheads_k)) {
            static_assert(Rows == BlockRows, "the plan's");
        }
        template <int Step>
        __device__ __forceinline__ int key_first(const Mask& mask) const {
            // where all pieces begin steps, whatever the window: what it hides is masked
            return max(mask.key_first(Place::row) / Step * Step, share.first * Step);
        }
        template <int Step>
        __device__ __forceinline__ int key_end(const Mask& mask) const {
            return min(mask.key_end(Place::row, BlockRows), min(share.end, 0x7fffffff / Step) * Step);
        }
    };

    template <int Threads, int RowTiles, int OutputTiles>
    __device__ __forceinline__ bool join(SoftmaxState<RowTiles>& softmax, Accumulator (&o)[RowTiles][OutputTiles]) const {
        const Share share(shares_, remat_block_index());
        if (share.pieces == 1) return true;
        // those of all threads side by side
        constexpr int kChunksOfPiece = kResultChunks<RowTiles, OutputTiles> * Threads;
        const int place = share.cut * shares_.most_pieces;
        uint4* first = reinterpret_cast<uint4*>(shares_.partials) + static_cast<long long>(place) * kChunksOfPiece + threadIdx.x;
        uint4* own = first + share.number * kChunksOfPiece;
        put_result(softmax, o, [&](int chunk, uint4 x) { __stcg(own + chunk * Threads, x); });
        __threadfence();  // what this thread has written comes before the arrival
        __syncthreads();
        const bool last = threadIdx.x == 0 && arrive_is_last(shares_.semaphores + share.cut, shares_.launch_id, share.pieces);
        if (!__syncthreads_or(last)) return false;
        __threadfence();  // ... and that before what others have written is read
        softmax = SoftmaxState<RowTiles>();
#pragma unroll
        for (int mt = 0; mt < RowTiles; mt++)
#pragma unroll
            for (int j = 0; j < OutputTiles; j++) clear(o[mt][j]);
#pragma unroll 1
        for (int i = 0; i < share.pieces; i++, first += kChunksOfPiece)
            join_result(softmax, o, [&](int chunk) { return __ldcg(first + chunk * Threads); });
        return true;
    }

    __device__ __forceinline__ int remat_batch(const Problem& p) const { return remat_place(p).batch; }
    __device__ __forceinline__ int remat_head(const Problem& p) const { return remat_place(p).head; }
};

}  // namespace volta
