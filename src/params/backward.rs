//! Parameter blocks (kernels' arguments) of backward passes, which src/ops/device.rs fills. A pass is a preprocess kernel, main kernels,
//! and a postprocess or dq kernel (src/kernels/passes.rs). P are probabilities, dS gradients of scores, delta is the row sum of out * dout.
//! Plain kernels have code for no option, varlen kernels for lengths from memory, generic ones for all options.

use super::forward::StreamKSplit;
use super::shared::{BlockLists, Lengths, Operand, Output, Problem, ScoreOptions};

/// Parameter block of the backward kernels, and the first part of the larger blocks below.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct BwdParams {
    /// Gradient of out, with its shape.
    pub dout: Operand,
    /// (batch, seqlen_q, nheads, headdim)
    pub q: Operand,
    /// (batch, seqlen_k, nheads_k, headdim)
    pub k: Operand,
    /// (batch, seqlen_k, nheads_k, headdim_v)
    pub v: Operand,
    /// Result of the forward pass. delta is the row sum of out * dout.
    pub out: Operand,
    /// Shape of q.
    pub dq: Output,
    /// Shape of k: sums over the query heads of a KV head.
    pub dk: Output,
    /// Shape of v: the same sums.
    pub dv: Output,
    /// (batch, nheads, seqlen_q), packed (nheads, total_q); fp32, from the forward pass
    pub softmax_lse: *const f32,
    /// Scratch: fp32 statistics of query rows, in the layout of the family, volta or turing (`Scratch` in src/kernels/variants.rs).
    pub row_stats: *mut f32,
    /// Scratch: (dq_accum_splits, batch, nheads, seqlen_q_rounded, headdim_rounded) fp32; inside 16 or 32 rows in the order of atomics (the
    /// family's dq_accumulator.cuh). Preprocess zeroes it, postprocess adds it up. Without elements if a separate kernel computes dq.
    pub dq_accum: *mut f32,
    /// Floats between the accumulators of consecutive key blocks of a launch; 0 if all add to one.
    pub dq_accum_split_stride: i64,
    /// Number of accumulators.
    pub dq_accum_splits: i32,
    /// Index of the main launch's first key block (the keys of one block): a deterministic pass may launch one part after the other.
    pub first_key_block: i32,
    /// seqlen_q rounded up to the query tile.
    pub seqlen_q_rounded: i32,
    /// Columns of dq_accum: headdim rounded up to that of the kernel; 0 without an accumulator.
    pub headdim_rounded: i32,
    /// Sizes, window and scale.
    pub problem: Problem,
    /// `softmax_scale` with its sign: the factor of dk, and of dq in dq kernels, which flip the signs of queries if it is negative
    /// (`Problem::sign_flip`). Other kernels flip those of keys, so the accumulator of dq takes the positive `problem.scale`.
    pub signed_scale: f32,
    /// Not 0: kernels write dq, dk and dv as fp32; operands are fp16. Plain kernels ignore it.
    pub gradients_are_fp32: i32,
    /// For varlen and generic kernels; plain kernels ignore it.
    pub lengths: Lengths,
    /// For generic kernels; the others ignore it.
    pub score_options: ScoreOptions,
    /// Gradient of the bias, fp32, to which kernels add; stride 0 if broadcast; null: not requested.
    pub dbias: *mut f32,
    /// Not 0: dbias is fp16, despite the pointer's type, and kernels store each element once. Rows are contiguous then, and seqlen_k is
    /// even. Always 0 for families without `Family::stores_dbias`.
    pub dbias_is_fp16: i32,
    /// Elements from one entry to the next, as the next three.
    pub dbias_batch_stride: i64,
    /// From one query head to the next.
    pub dbias_head_stride: i64,
    /// From one query to the next.
    pub dbias_row_stride: i64,
    /// From one key to the next.
    pub dbias_key_stride: i64,
}

/// Work of the blocks of a stream-K backward grid, in which several blocks share the queries of a key block. Its first axis is the KV heads
/// of all entries, its second `splits`: each head is divided alike. Iterations are steps of queries, query head by query head.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct BwdSplits {
    /// Scratch: (KV heads of all entries, tiles, max_splits) fp32 dk and dv of a split, 16 bytes of each thread, then its next 16.
    pub partials: *mut f32,
    /// Scratch: a semaphore for each of these key blocks, which counts the splits that are done.
    pub semaphores: *mut u64,
    /// 48 bits that no other call has. They distinguish this call's semaphores from other contents of the memory, which is not zeroed.
    pub launch_id: u64,
    /// First key block with scratch memory.
    pub first_tile: i32,
    /// Number of key blocks of a head with scratch memory.
    pub tiles: i32,
    /// Maximum splits of a key block.
    pub max_splits: i32,
    /// In the order of the grid. `tile`: key block of its head. `MAX_BACKWARD_SPLITS`: a launch takes at most 4096 bytes of parameters.
    pub splits: [StreamKSplit; 384],
}

/// Parameter block of the stream-K backward kernels.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct BwdStreamKParams {
    /// As for other backward kernels; one launch has all batch entries.
    pub backward: BwdParams,
    /// The schedule.
    pub stream_k: BwdSplits,
}

/// Parameter block of the backward kernels with a block mask. Preprocess and postprocess kernels see no scores, and take `backward` alone.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct BwdBlockParams {
    /// As for other backward kernels.
    pub backward: BwdParams,
    /// Of each block of query rows, its key blocks.
    pub blocks: BlockLists,
    /// Of each block of key rows, its query blocks.
    pub blocks_t: BlockLists,
}

/// P and dS of some KV heads and some keys, in memory between the two main kernels of a backward pass for large headdims or fp32
/// (csrc/backward/stored_scores.cuh).
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct StoredScores {
    /// Scratch: P^T times 2^12 (so that small P keep digits), fp16, in tiles of 128 keys by 128 queries: (batch, query heads of the launch,
    /// query_tiles, key_tiles). Of fp32 tensors a tile has 257 rows: 128 of high parts, 128 of low parts, one for the scales of dS.
    pub p: *mut u16,
    /// Scratch: dS^T in the same tiles, without that factor.
    pub ds: *mut u16,
    /// Scratch: fp32 sums of dq between launches for the same heads: (batch, query heads of the launch, query_tiles, headdim / 128 rounded
    /// up) tiles of 128 queries by 128 columns. Without elements if one launch has all keys.
    pub dq_sums: *mut f32,
    /// Query tiles of a head in an entry, or of all sequences if packed.
    pub query_tiles: i32,
    /// Key tiles of the launch; the last of a head may not exist.
    pub key_tiles: i32,
    /// Number of the launch's first key tile.
    pub first_key_tile: i32,
    /// KV heads of the launch; the last may not exist.
    pub heads: i32,
    /// Number of the launch's first KV head.
    pub first_head: i32,
    /// Not 0: sums of dq begin with 0.
    pub is_first: i32,
    /// Not 0: sums of dq are complete.
    pub is_last: i32,
}

/// Parameter block of the backward kernels for large headdims or fp32, except preprocess.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct BwdStoredParams {
    /// As for other backward kernels.
    pub backward: BwdParams,
    /// P and dS.
    pub stored: StoredScores,
}

/// Parameter block of the same kernels with a block mask.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct BwdStoredBlockParams {
    /// As for other backward kernels.
    pub backward: BwdParams,
    /// P and dS.
    pub stored: StoredScores,
    /// Of each block of query rows, its key blocks.
    pub blocks: BlockLists,
}
