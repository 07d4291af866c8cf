//! Parameter blocks (kernels' arguments) of forward passes: `fwd`, prefill over a KV cache, and `fwd_fast`. In src/ops, device.rs,
//! kvcache/kernels.rs, stream_k.rs and fast.rs fill them. Plain kernels have code for no option, varlen ones for lengths from memory and
//! sinks, generic ones for all. Strides count elements.

use super::cache::Cache;
use super::shared::{BlockLists, ElementType, Lengths, Operand, Output, Problem, ScoreOptions};

/// Parameter block of the forward kernels.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct FwdParams {
    /// (batch, seqlen_q, nheads, headdim)
    pub q: Operand,
    /// (batch, seqlen_k, nheads_k, headdim)
    pub k: Operand,
    /// (batch, seqlen_k, nheads_k, headdim_v)
    pub v: Operand,
    /// (batch, seqlen_q, nheads, headdim_v)
    pub out: Output,
    /// (batch, nheads, seqlen_q), packed (nheads, total_q); fp32, natural logarithm; +inf for fully masked rows
    pub softmax_lse: *mut f32,
    /// Sizes, window and scale.
    pub problem: Problem,
    /// For varlen and generic kernels; plain kernels ignore it.
    pub lengths: Lengths,
    /// Varlen kernels read the sinks, generic kernels all of it, plain kernels nothing.
    pub score_options: ScoreOptions,
    /// k and v of prefill kernels (forward kernels over a KV cache). Other kernels ignore this field and the next.
    pub cache: Cache,
    /// Minimum rows (queries of all heads of a KV head) of a sequence: decode kernels compute those with fewer.
    pub min_rows: i32,
    /// Not 0: out is fp32. Kernels without the feature fp32_output ignore it.
    pub out_is_fp32: i32,
}

/// A split: some iterations (steps of keys) of a stream-K tile, a tile of query rows whose keys several blocks share.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StreamKSplit {
    /// Number of the tile among the stream-K tiles; backward: number of a head's key block, the keys of one block.
    pub tile: u16,
    /// First iteration; of prefill kernels the first of 2^15 equal parts of the tile's iterations (`PAGED_PARTS`), which the host cannot
    /// count.
    pub first: u16,
    /// Iteration after the last.
    pub end: u16,
    /// 256 times the number of the split in its tile, plus the number of the tile's splits.
    pub part: u16,
}

impl StreamKSplit {
    /// Returns `part` as kernels read it.
    pub const fn part(number: u16, splits: u16) -> u16 {
        number << 8 | splits
    }

    /// Returns the number of the tile's splits.
    pub const fn splits(&self) -> u16 {
        self.part & 0xff
    }
}

/// Work of the blocks of a stream-K grid: the first `data_parallel_tiles` compute a tile each, the others a split.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct StreamKParams {
    /// Scratch: (stream-K tiles, max_splits) results: softmax states and unscaled outputs in fp32, 16 bytes of each thread, then its next.
    pub partials: *mut f32,
    /// Scratch: a semaphore for each stream-K tile, which counts the splits that are done.
    pub semaphores: *mut u64,
    /// 48 bits that no other call has. They distinguish this call's semaphores from other contents of the memory, which is not zeroed.
    pub launch_id: u64,
    /// Tiles that one block computes. Stream-K tiles have the numbers after them.
    pub data_parallel_tiles: i32,
    /// Maximum splits of a tile.
    pub max_splits: i32,
    /// In the order of the grid. Their number is `MAX_STREAM_K_SPLITS`: a launch takes at most 4096 bytes of parameters.
    pub splits: [StreamKSplit; 440],
}

/// Parameter block of the stream-K forward kernels.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct FwdStreamKParams {
    /// As for other forward kernels; one launch has all batch entries.
    pub forward: FwdParams,
    /// The schedule.
    pub stream_k: StreamKParams,
}

/// Parameter block of the forward kernels with a block mask.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct FwdBlockParams {
    /// As for other forward kernels.
    pub forward: FwdParams,
    /// Of each block of query rows, its key blocks.
    pub blocks: BlockLists,
}

/// Parameter block of the fast forward kernels (`volta_fa::fwd_fast`): one that prepares K and V, and the forward kernel.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct FastParams {
    /// (batch, seqlen_q, nheads, headdim) of type `element`
    pub q: Operand,
    /// (batch, seqlen_k, nheads_k, headdim) of type `element`; the prepare kernel reads it.
    pub k: Operand,
    /// (batch, seqlen_k, nheads_k, headdim_v). The prepare kernel reads it as `element`, the forward kernel as fp16.
    pub v: Operand,
    /// (batch, seqlen_q, nheads, headdim_v) of type `element`
    pub out: Output,
    /// (batch, nheads, seqlen_q), packed (nheads, total_q); fp32, natural logarithm; +inf for fully masked rows
    pub softmax_lse: *mut f32,
    /// Sizes, window and scale.
    pub problem: Problem,
    /// For kernels with lengths from memory.
    pub lengths: Lengths,
    /// Batch entries of all launches of the call.
    pub batch: i32,
    /// fp16 or bf16.
    pub element: ElementType,
    /// Scratch: (nheads_k, k_rows, the kernel's headdim) int8 codes of K, four in a word. The sequences of all entries follow each other.
    pub k_codes: *mut u32,
    /// Rows of a head in k_codes: each sequence begins at a multiple of 64.
    pub k_rows: i64,
    /// Scratch: (nheads_k, k_rows / 64, 4): of a block of 64, keys 8i + 2t and 8i + 2t + 1, those of lanes with lane % 4 = t, have scale t.
    pub k_scales: *mut f32,
    /// Scratch: (nheads_k, batch, the kernel's headdim) means of K over up to 128 keys of each sequence; 0 without smooth_k.
    pub k_mean: *mut f32,
    /// Scratch: (nheads_k, batch, v_max_stride) largest finite magnitude of V in each block of the prepare kernel.
    pub v_max: *mut f32,
    /// Row length of v_max: blocks of the longest sequence.
    pub v_max_stride: i64,
    /// Scratch of bf16 calls: V times a power of two as fp16, finite magnitudes below 1. The forward kernel reads it as v.
    pub v_scaled: Output,
    /// Bool mask, which the prepare kernel packs. The strides are 0 where it is broadcast.
    pub mask: *const bool,
    /// From one batch entry to the next.
    pub mask_batch_stride: i64,
    /// From one query head to the next.
    pub mask_head_stride: i64,
    /// From one query to the next.
    pub mask_row_stride: i64,
    /// From one key to the next.
    pub mask_key_stride: i64,
    /// Scratch: the mask with a bit for each key, (batch or 1, heads or 1, words of 32 keys, mask_rows); null: no mask.
    pub mask_bits: *mut u32,
    /// Words from one batch entry to the next; 0 if broadcast.
    pub mask_bits_batch_stride: i64,
    /// From one query head to the next; 0 if broadcast.
    pub mask_bits_head_stride: i64,
    /// Rows of `mask_bits`, a multiple of 32: queries, or 32 rows if they are broadcast. Later queries have the last row's bits.
    pub mask_rows: i32,
    /// Words of 32 keys for each row. Even, because a span of 64 keys reads two.
    pub mask_words: i32,
    /// Not 0: K is taken less its mean.
    pub smooth_k: i32,
    /// Not 0: Q and K are rotated by a Hadamard transform.
    pub rotate: i32,
    /// 0: the prepare kernel quantizes K, takes v_max and packs the mask. 1: it writes v_scaled. 2: it packs the mask alone.
    pub phase: i32,
}
