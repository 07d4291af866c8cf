// Tile sizes and shared-memory layout (Shape) of the turing backward kernels: main kernels and dq kernels. Also what main kernels
// set up before their steps: K in shared memory, the queries to visit, where a head's rows lie. A block of a main kernel owns keys
// and visits the queries that see them, a step at a time (FlashAttention-2's backward, transposed). A block of a dq kernel owns
// queries and visits keys. A main kernel computes:
//
//   S^T  = K Q^T          P = exp(scale * S - lse)      dV += P^T dO
//   dP^T = V dO^T         dS = P * (dP - delta)         dK += dS^T Q        dQ += dS K  (not if a dq kernel follows)
//
// scale is |softmax_scale|, lse softmax_lse, delta rowsum(dO * O). Registers hold dK, dV, the operands P^T and dS^T, and operands
// of V or of K. Shared memory holds K (for dQ, and for warps that have no registers for its operands), tiles of Q and dO, and dS^T
// (for dQ). In warp_specialized.cuh it also holds P^T in flight between warps, and the chunks of V that do not fit registers.
#pragma once

#include "backward/probabilities.cuh"
#include "backward/scratch.cuh"  // rounded_row(); BlockSeqlenInfo: lengths of a sequence, and its first rows in the tensors
#include "backward/iteration_range.cuh"  // QueryRange: `end` and `unmasked`; first(), rows(), next_step() of steps of queries
#include "backward/gradient_output.cuh"
#include "backward/row_statistics.cuh"  // write_row_statistics()
#include "turing/backward/dq_product.cuh"  // for the main kernels, which include this file: dQ += dS K
#include "turing/backward/fragments.cuh"

namespace turing {

// Headdim, Step and Threads come from the kernel's row in src/kernels. Rows: rows that a block owns, in main kernels (dq kernels:
// 0, since registers hold theirs). Step: rows that it visits in a step. A slot is the room for both tiles of a step, Q and dO (dq
// kernels: K and V); with two Slots, a step needs one barrier of the block. ScoreSlots: tiles of dS^T. With two, a warp may still
// read the previous step's dS while others store this step's. PartnerTiles: tiles of P^T, which go from warp to warp.
template <int Headdim, int Rows, int Step, int Threads, int Slots, int PartnerTiles, int ScoreSlots = Slots>
struct Shape {
    static constexpr int kHeaddim = Headdim, kRows = Rows, kStep = Step, kThreads = Threads, kSlots = Slots;
    static constexpr int kScoreSlots = ScoreSlots;
    static_assert(Slots <= ScoreSlots, "dS has at least as many slots as the tiles that it is computed from");
    static constexpr int kWarps = kThreads / 32;
    static constexpr int kChunks = kHeaddim / kChunk, kRowBytes = kChunks * kChunkBytes;  // of Q, K, V, dO; a chunk is 8 fp16
    static constexpr int kScoreChunks = kStep / kChunk, kScoreRowBytes = kScoreChunks * kChunkBytes;  // of a row of dS^T or P^T

    // Bytes of a tile of own rows (K), of a step's rows, of dS^T or P^T (rows are own keys).
    static constexpr int kOwnTile = kRows * kRowBytes, kStepTile = kStep * kRowBytes, kScoreTile = kRows * kScoreRowBytes;
    static constexpr int kSlotBytes = 2 * kStepTile;  // Q, then dO; in dq kernels K, then V
    // Offsets in shared memory, bytes: K, slots of step tiles, dS^T, P^T; then the size of all.
    static constexpr int kOwn = 0, kStepTiles = kOwnTile, kScores = kStepTiles + kSlots * kSlotBytes;
    static constexpr int kPartner = kScores + kScoreSlots * kScoreTile;
    static constexpr int kSharedBytes = kPartner + PartnerTiles * kScoreTile;

    // Slot (0 or 1) of the tiles, and of dS, of the step that has this row. dq_warp_specialized.cuh, with three, calls neither.
    static __device__ __forceinline__ u32 slot(int row) { return kSlots == 2 ? row / kStep % 2 : 0; }
    static __device__ __forceinline__ u32 score_slot(int row) { return kScoreSlots == 2 ? row / kStep % 2 : 0; }
};

// Loads the block's K to shared memory, once in a main kernel, in the order of Layout::row_of_key() (fragments.cuh), padded with
// zeros in rows and columns. `origin`: the sequence's first key in the tensor. first_key: the block's, in the sequence. `keys`: of
// the sequence. No barrier: the caller's next one shows K to other warps.
template <class S, class Layout>
__device__ __forceinline__ void load_own_keys(const BwdParams& p, u32 shared, int origin, int first_key, int keys) {
    constexpr int kRowsAtOnce = S::kThreads / threads_per_row(S::kChunks);
    using Loader = TileLoader<S::kChunks, kRowsAtOnce, S::kThreads>;  // load(n): a tile's first n rows, and 0 for the rest
    // z: batch entry, y: KV head
    Loader k(threadIdx.x, head_base(p.k, blockIdx.z, blockIdx.y) + (origin + first_key) * p.k.row_stride, p.k.row_stride,
             p.problem.headdim);
#pragma unroll 1
    for (int r = 0; r < S::kRows; r += kRowsAtOnce) {
        k.load(keys - first_key - r);
        k.flip_signs(p.problem.sign_flip);  // of a negative softmax_scale
        // 0, bytes from row to row of a thread: it has one row a call
        k.store(shared + S::kOwn + swizzled<S::kChunks>(Layout::row_of_key(r + k.row), k.chunk), 0);
    }
}

// The query rows that a block of keys visits, and the steps that need no mask (backward/iteration_range.cuh). If some of the
// block's keys do not exist, all of its steps need the mask: P of these keys must be 0. all_rows: the block visits all query rows,
// as in the fused kernels (DqMode::kStore), whose block has all keys and stores dq of all rows.
template <class S>
struct VisitedQueries : QueryRange<S::kRows, S::kStep> {
    __device__ __forceinline__ VisitedQueries(const Mask& mask, int first_key, bool all_rows = false)
        : QueryRange<S::kRows, S::kStep>(mask, first_key, all_rows) {
        // unmasked steps begin at rows `first` to first + span: here at none, since no row is as large as 0x7fffffff
        if (first_key + S::kRows > mask.seqlen_k) this->unmasked.first = 0x7fffffff, this->unmasked.span = 0;
    }
};

// Where the rows of one query head lie, in the tensors and in scratch memory (row statistics, dq's accumulator:
// backward/scratch.cuh). kVarlen: the kernel reads lengths from memory, so packed sequences are possible; kHasScoreFeatures: it has
// code for softcap, ALiBi, bias or dropout (features.cuh). Each step computes its addresses from these numbers again, because
// pointers would take more registers than there are. keep_in_register() and remat_*(), which reads a special register again, are
// volatile: otherwise the compiler would move what does not change out of the loop, and then spill it.
struct HeadRows {
    int head;
    int origin_;  // the sequence's first row in the tensors, 0 if not packed; unused where origin() computes it again
    unsigned scratch;  // the sequence's first row in the scratch memory, over all heads

    __device__ __forceinline__ HeadRows(const BwdParams& p, const BlockSeqlenInfo& sequence, int head_)
        : head(head_), origin_(kVarlen && !kHasScoreFeatures ? keep_in_register(sequence.q_offset()) : 0),
          scratch(keep_in_register(static_cast<int>(rounded_row(p, sequence, remat_block_batch(), head_)))) {}
    __device__ __forceinline__ int origin(const BwdParams& p) const {
        return kHasScoreFeatures ? BlockSeqlenInfo(p.problem, p.lengths, remat_block_batch()).q_offset() : origin_;
    }
    // Offset, in floats, of a row of the sequence in the scratch memory, which has `floats` floats per row.
    __device__ __forceinline__ unsigned long long scratch_offset(int row, unsigned floats) const {
        return static_cast<unsigned long long>(scratch + row) * floats;
    }
};

// Writes the statistics (-lse / scale and -delta = -rowsum(dO * O)) of all rows of the block's query heads, for fused kernels,
// which no preprocess kernel precedes. They call it at the start, because no registers are free between heads, and then a barrier.
template <class S>
__device__ __forceinline__ void write_all_statistics(const BwdParams& p, const BlockSeqlenInfo& sequence) {
    const int group = p.problem.nheads / p.problem.nheads_k;  // query heads that share the block's KV head
#pragma unroll 1
    for (int head = blockIdx.y * group; head < (blockIdx.y + 1) * group; head++)
        write_row_statistics<S::kHeaddim, S::kThreads>(p, sequence, head);
}

}  // namespace turing
