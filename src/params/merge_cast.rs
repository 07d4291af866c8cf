//! Parameter blocks (kernels' arguments) of merging two attention results and of casting to fp16. src/ops/merge.rs and cast.rs fill them.

use super::shared::{BlockLists, ElementType, Lengths, Operand, Output, Problem, ScoreOptions};

/// Parameter block of the merge kernel (`volta_fa::merge_attention_states`). out_a and out have type `element`, out_b `part`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct MergeParams {
    /// Attention over the first set of keys: (batch, seqlen_q, nheads, headdim_v).
    pub out_a: Operand,
    /// Attention over the second set.
    pub out_b: Operand,
    /// Attention over both.
    pub out: Output,
    /// (batch, nheads, seqlen_q) fp32, natural logarithm; +inf for rows without a visible key.
    pub lse_a: *const f32,
    /// The same of out_b, contiguous.
    pub lse_b: *const f32,
    /// The same over both. In place it is lse_a.
    pub lse: *mut f32,
    /// From one head to the next in lse_a and lse: at least seqlen_q.
    pub lse_stride: i64,
    /// Heads of out.
    pub nheads: i32,
    /// Rows of an entry; all rows if packed, as one entry.
    pub seqlen_q: i32,
    /// A multiple of 8.
    pub headdim_v: i32,
    /// Type of out_a and out.
    pub element: ElementType,
    /// Type of out_b: `element`, or fp16 or bf16 if `element` is fp32.
    pub part: ElementType,
}

/// Parameter block of the kernel that casts bf16 or fp32 tensors to fp16, scaled by powers of two (csrc/shared/cast/cast.cuh). It runs in
/// phases, a launch each. A group shares an exponent: a KV head and its query heads, in a batch entry or packed sequences.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct CastParams {
    /// (batch, seqlen_q, nheads, headdim) of type `element`
    pub q: Operand,
    /// (batch, seqlen_k, nheads_k, headdim) of type `element`
    pub k: Operand,
    /// (batch, seqlen_k, nheads_k, headdim_v) of type `element`; not read if the grid's second axis has the heads of q and k alone
    pub v: Operand,
    /// q as fp16: phase 0 writes it, and phase 2 for groups with a scale; with low parts phase 2 alone. In phase 3 other memory.
    pub q_fp16: Output,
    /// The same of k.
    pub k_fp16: Output,
    /// v as fp16, of phase 2.
    pub v_fp16: Output,
    /// (batch, nheads, seqlen_q), packed (nheads, total_q), fp32; null: none. A row of q whose exponent is smaller by n has scores
    /// times 2^-n. Kernels use the lse of these: phase 2 multiplies by 2^-n before a backward pass, phase 4 by 2^n after a forward pass.
    pub softmax_lse: *mut f32,
    /// Scratch: (7, groups), zeros before the first phase: fp32 bits of magnitudes (`cast::Magnitude`). Rows: largest of q, k and v;
    /// smallest of k and v, inverted for atomicMax; largest of k and v without outlying ones (over 2^6 times the smallest) of hidden keys.
    pub largest: *mut u32,
    /// Output (3, groups), of q, k and v: fp16 numbers are those given times 2^exponent. Rows of q and softmax_lse may have smaller ones.
    pub exponents: *mut i32,
    /// Type of q, k and v: bf16 or fp32.
    pub element: ElementType,
    /// Not 0: numbers are split, and low parts, what rounding took from them, begin at this column of q_fp16 and k_fp16, a multiple of 8.
    pub low_column: i32,
    /// The same of v_fp16.
    pub low_column_v: i32,
    /// KV heads of all batch entries of the call, or nheads_k if packed.
    pub groups: i32,
    /// Number of the launch's first batch entry; 0 if packed.
    pub first_entry: i32,
    /// Exponent that every q gets: problem.scale is softmax_scale without this power of two.
    pub scale_exponent: i32,
    /// Exponent e of problem.scale_log2, rounded up: 2^(e - 1) <= scale_log2 < 2^e.
    pub scale_log2_exponent: i32,
    /// The same of headdim * problem.scale_log2, by which scores exceed the product of the largest |q| and |k| at most.
    pub score_exponent: i32,
    /// Rows of q whose scores may exceed 2^this (log2 units) get a smaller exponent, because fp32 resolves such scores too coarsely.
    pub max_score_exponent: i32,
    /// Their largest score is lowered to 2^this. Scores so large leave one key in the softmax, but for near ties, also when lowered.
    pub lowered_score_exponent: i32,
    /// Exponent of the largest |v| after scaling.
    pub largest_v_exponent: i32,
    /// Not 0: v gets no exponent if fp16 holds it, so that its bits do not depend on other tokens.
    pub keeps_ordinary_v: i32,
    /// Phase 1 reads the bias, which may hide keys; the rest is not read.
    pub score_options: ScoreOptions,
    /// Of each block of query rows, its key blocks; without lists every block is full.
    pub blocks: BlockLists,
    /// The launch's phase, `cast::Phase`: 0 takes magnitudes, 1 leaves out hidden keys, 2 casts, 3 casts for gradients, 4 restores lse.
    pub phase: i32,
    /// Sizes, scale and window.
    pub problem: Problem,
    /// Of packed sequences, and seqused_k.
    pub lengths: Lengths,
}
