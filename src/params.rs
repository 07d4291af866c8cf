//! The parameter blocks that Rust fills and the kernels read: the one definition of each.
//!
//! build.rs runs cbindgen over this file and hands the result to NVRTC as `volta_fa_params.h`; a test
//! compares `size_of` with the parameter size that every embedded cubin records. Only `#[repr(C)]`
//! structs of pointers, integers and floats belong here, and nothing from other modules.
//!
//! Strides count elements. Every pointer is a device address (under the simulator, a host address).

/// A read-only fp16 tensor (batch, seqlen, heads, headdim) with a contiguous last dimension.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Operand {
    pub ptr: *const u16,
    pub batch_stride: i64,
    pub row_stride: i64,
    pub head_stride: i64,
}

/// A writable fp16 (gradients: or bf16) tensor (batch, seqlen, heads, headdim) with a contiguous last dimension.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Output {
    pub ptr: *mut u16,
    pub batch_stride: i64,
    pub row_stride: i64,
    pub head_stride: i64,
}

/// What both passes need to know of one attention problem.
///
/// Query row `i` sees the keys `j` with `i + o - window_left <= j <= i + o + window_right`, where
/// `o = seqlen_k - seqlen_q` (bottom-right alignment). A side without a bound carries
/// `seqlen_q + seqlen_k`, which reaches past either end and cannot overflow; causal is
/// `window_right = 0`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Problem {
    pub batch: i32,
    pub nheads: i32,
    pub nheads_k: i32,
    pub seqlen_q: i32,
    pub seqlen_k: i32,
    /// of q and k; a multiple of 8
    pub headdim: i32,
    /// of v and out; a multiple of 8
    pub headdim_v: i32,
    pub window_left: i32,
    pub window_right: i32,
    /// `|softmax_scale|`, never 0: the plan replaces 0 by 1e-30, which gives the same softmax
    pub scale: f32,
    /// `scale * log2(e)`
    pub scale_log2: f32,
    /// XORed into each pair of fp16 elements of the rows that a block keeps and multiplies with all others: queries in forward and
    /// where dq has a kernel of its own, keys in the other backward kernels. 0x80008000 where softmax_scale is negative, else 0:
    /// kernels may then assume a positive scale.
    pub sign_flip: u32,
}

/// Where the sequences of a launch lie, for the kernels that read lengths from memory. Null: not given.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Lengths {
    /// (batch + 1): sequence `b` has the rows `cu_seqlens_q[b] .. cu_seqlens_q[b + 1]` of packed tensors, whose
    /// batch_stride is 0
    pub cu_seqlens_q: *const i32,
    pub cu_seqlens_k: *const i32,
    /// (batch): of the keys of an entry, those before this one exist
    pub seqused_k: *const i32,
    /// rows of packed q and k
    pub total_q: i32,
    pub total_k: i32,
    /// rows of a head in the scratch of the backward pass, where packed
    pub scratch_rows: i32,
    /// the number of the launch's first batch entry
    pub first_batch: i32,
}

/// What happens to scores and probabilities on their way through the softmax, for the general kernels.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct ScoreOptions {
    /// added to the scaled scores: fp16 or fp32, rows padded to a multiple of 4 keys and 16-byte aligned; null: none
    pub bias: *const u16,
    pub bias_batch_stride: i64,
    pub bias_head_stride: i64,
    pub bias_row_stride: i64,
    pub bias_is_fp32: i32,
    /// (nheads) or (batch, nheads); null: none
    pub alibi_slopes: *const f32,
    /// 0 or nheads
    pub alibi_batch_stride: i64,
    /// (nheads); null: none
    pub sinks: *const f32,
    /// seed and offset; null: no dropout
    pub rng_state: *const u64,
    /// a probability is kept where its random number is not below this
    pub dropout_threshold: u32,
    /// what kept probabilities are multiplied by
    pub dropout_scale: f32,
    /// 0: off
    pub softcap: f32,
    /// 0 where that is off
    pub inverse_softcap: f32,
}

/// Parameter block of the forward kernels.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct FwdParams {
    pub q: Operand,
    pub k: Operand,
    pub v: Operand,
    pub out: Output,
    /// (batch, nheads, seqlen_q) fp32, natural logarithm; +inf for fully masked rows
    pub softmax_lse: *mut f32,
    pub problem: Problem,
    pub lengths: Lengths,
    pub score_options: ScoreOptions,
}

/// Parameter block of all backward kernels.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct BwdParams {
    pub dout: Operand,
    pub q: Operand,
    pub k: Operand,
    pub v: Operand,
    pub out: Operand,
    pub dq: Output,
    pub dk: Output,
    pub dv: Output,
    /// (batch, nheads, seqlen_q) fp32, from the forward pass
    pub softmax_lse: *const f32,
    /// scratch: statistics of query rows, fp32, laid out as the family says (`Scratch` in src/kernels/variants.rs)
    pub row_stats: *mut f32,
    /// scratch: (batch, nheads, seqlen_q_rounded, headdim_rounded) fp32, zeroed by prepare; not there in the
    /// deterministic mode
    pub dq_accum: *mut f32,
    /// seqlen_q rounded up to the query tile
    pub seqlen_q_rounded: i32,
    /// headdim rounded up to the variant's; 0 without an accumulator
    pub headdim_rounded: i32,
    pub problem: Problem,
    /// `softmax_scale` with its sign: the factor of dk, and of dq where a kernel of its own computes it from flipped queries. (The
    /// accumulator of dq comes from flipped keys and takes `problem.scale`.)
    pub signed_scale: f32,
    /// not 0: dq, dk and dv are written as bf16 (operands are fp16 all the same). Plain kernels do not look at it
    pub gradients_are_bf16: i32,
    pub lengths: Lengths,
    pub score_options: ScoreOptions,
    /// fp32, added to: the gradient of the bias, with a stride of 0 where it is broadcast; null: not asked for
    pub dbias: *mut f32,
    pub dbias_batch_stride: i64,
    pub dbias_head_stride: i64,
    pub dbias_row_stride: i64,
    pub dbias_key_stride: i64,
}

/// Element type of the tensors that the merge kernel reads and writes.
#[repr(i32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MergeElement {
    Half,
    Bfloat,
    Float,
}

/// Parameter block of the merge kernel (`volta_fa::merge_attention_states`). The pointers of the three tensors are of `element`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct MergeParams {
    pub out_a: Operand,
    pub out_b: Operand,
    pub out: Output,
    /// (batch, nheads, seqlen_q) fp32, natural logarithm; +inf where a part saw no key
    pub lse_a: *const f32,
    pub lse_b: *const f32,
    pub lse: *mut f32,
    pub nheads: i32,
    pub seqlen_q: i32,
    /// a multiple of 8
    pub headdim_v: i32,
    pub element: MergeElement,
}
