//! Parts that the parameter blocks (kernels' arguments) of several passes contain. src/ops/blocks.rs fills them. Strides count elements,
//! pointers are device addresses, and an entry is an element of the batch. Packed tensors have no batch: rows of all sequences follow each
//! other. Plain kernels have code for no option, varlen kernels for lengths from memory, generic ones for all options of scores.

/// A read-only tensor (batch, seqlen, heads, headdim) with a contiguous last dimension: fp16, or the block's [`ElementType`] if it has one.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Operand {
    /// Row 0 of head 0 of the launch's first batch entry; if packed, of the whole tensor.
    pub ptr: *const u16,
    /// From one batch entry to the next; 0 if packed, because rows count over all sequences.
    pub batch_stride: i64,
    /// From one position of the sequence to the next.
    pub row_stride: i64,
    /// From one head to the next.
    pub head_stride: i64,
}

/// A writable fp16 tensor like [`Operand`]. Gradients, and out of fp32 tensors, may be fp32, despite the pointer's type.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Output {
    /// Row 0 of head 0 of the launch's first batch entry; if packed, of the whole tensor.
    pub ptr: *mut u16,
    /// From one batch entry to the next; 0 if packed, because rows count over all sequences.
    pub batch_stride: i64,
    /// From one position of the sequence to the next.
    pub row_stride: i64,
    /// From one head to the next.
    pub head_stride: i64,
}

/// Divides by multiplication: `n / divisor` is `n * factor >> shift` for `0 <= n < 2^31` (Granlund and Montgomery 1994). Kernels divide by
/// it (`quotient` in csrc/decode/tile_scheduler.cuh), because a division by a number that the compiler does not know is some twenty
/// instructions.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Divisor {
    /// Greater than 0.
    pub divisor: i32,
    /// 2^shift / divisor, rounded up.
    pub factor: u32,
    /// 31 more than log2(divisor), rounded up.
    pub shift: u32,
}

impl Divisor {
    /// `divisor` is greater than 0.
    pub fn new(divisor: i32) -> Self {
        let shift = 31 + (divisor as u32).next_power_of_two().trailing_zeros();
        Divisor { divisor, factor: (1u64 << shift).div_ceil(divisor as u64) as u32, shift }
    }
}

/// Sizes, window and scale of an attention problem, for all passes.
///
/// Query row `i` sees the keys `j` with `i + o - window_left <= j <= i + o + window_right`, where `o = seqlen_k - seqlen_q` (bottom-right
/// alignment). An unbounded side is `seqlen_q + seqlen_k`, which reaches past either end. A causal mask has `window_right = 0`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Problem {
    /// Batch entries of this launch: all, or a chunk of the call's (`plan::batch_chunks`).
    pub batch: i32,
    /// Query heads, a multiple of nheads_k.
    pub nheads: i32,
    /// KV heads.
    pub nheads_k: i32,
    /// Queries of an entry; if lengths are in memory, their maximum.
    pub seqlen_q: i32,
    /// Keys of an entry; if lengths are in memory, their maximum.
    pub seqlen_k: i32,
    /// Columns of q and k, a multiple of 8.
    pub headdim: i32,
    /// Columns of v and out, a multiple of 8.
    pub headdim_v: i32,
    /// Keys on the left: 0 to seqlen_q + seqlen_k; that sum means unbounded.
    pub window_left: i32,
    /// Keys on the right: 0 to seqlen_q + seqlen_k; that sum means unbounded.
    pub window_right: i32,
    /// `|softmax_scale|`, never 0: the planner replaces 0 by 1e-30, which gives the same softmax.
    pub scale: f32,
    /// `scale * log2(e)`
    pub scale_log2: f32,
    /// XOR mask for pairs of fp16 elements of the rows that a block keeps throughout: 0x80008000 if softmax_scale is negative, else 0. So
    /// kernels can assume a positive scale. Forward and dq kernels keep queries, the other backward kernels keep keys.
    pub sign_flip: u32,
}

/// Positions of a launch's sequences, for kernels that read lengths from memory. Null: not given.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Lengths {
    /// (batch + 1): sequence `b` has the rows `cu_seqlens_q[b] .. cu_seqlens_q[b + 1]` of packed tensors. Their batch_stride is 0.
    pub cu_seqlens_q: *const i32,
    /// (batch + 1): the same for rows of k and v; given if and only if cu_seqlens_q is.
    pub cu_seqlens_k: *const i32,
    /// (batch): number of keys of an entry that exist.
    pub seqused_k: *const i32,
    /// Rows of packed q; 0 if dense.
    pub total_q: i32,
    /// Rows of packed k and v; 0 if dense.
    pub total_k: i32,
    /// Rows of a head in the scratch memory of a packed backward pass.
    pub scratch_rows: i32,
    /// Number of the launch's first batch entry.
    pub first_batch: i32,
}

/// Modifiers of scores and probabilities, for generic kernels.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct ScoreOptions {
    /// Bias for the scaled scores: fp16 or fp32, rows padded to a multiple of 4 keys and 16-byte aligned; null: none. Decode kernels with
    /// a tree mask (bits for the draft tokens that a query sees): its int64 words, despite the type. The stride below counts words.
    pub bias: *const u16,
    /// Elements from one entry to the next; 0 if broadcast, as the next two.
    pub bias_batch_stride: i64,
    /// From one query head to the next.
    pub bias_head_stride: i64,
    /// From one query to the next.
    pub bias_row_stride: i64,
    /// Not 0: the bias is fp32, despite the pointer's type. 0: fp16.
    pub bias_is_fp32: i32,
    /// (nheads) or (batch, nheads); null: none.
    pub alibi_slopes: *const f32,
    /// From one entry's slopes to the next: 0 or nheads.
    pub alibi_batch_stride: i64,
    /// (nheads): one more logit in the sum of each row, without a value; null: none.
    pub sinks: *const f32,
    /// Seed and offset; null: no dropout.
    pub rng_state: *const u64,
    /// Threshold of 15 bits, in both 16-bit halves. Random numbers from it up keep a probability.
    pub dropout_threshold: u32,
    /// 0 for dropout_p up to 0.5. All ones above: numbers below the threshold keep, so that it is at most 2^14 (kernels compare as fp16).
    pub dropout_inverted: u32,
    /// Factor of kept probabilities.
    pub dropout_scale: f32,
    /// Parameter of the score function (softcap's cap); 0: no function.
    pub function_parameter: f32,
    /// 1 / function_parameter; 0: no function.
    pub inverse_function_parameter: f32,
}

/// Element type of tensors, for kernels that read and write several.
#[repr(i32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ElementType {
    /// fp16
    Half,
    /// bf16
    Bf16,
    /// fp32
    Float,
}

/// Block mask of one direction: for each block of 128 rows the blocks of 64 columns that have scores. Rows are queries and columns keys; in
/// the transposed direction, of kernels whose blocks each have some keys, the reverse. A score exists if its column block is full, or
/// partial with the score's bit set, and if lengths and window of [`Problem`] admit it.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct BlockLists {
    /// (batch, heads, row blocks, 4 + max_entries): counts of partial and of full column blocks; number of the row block's first tile of
    /// bits; the row block that the thread block launched at this place takes; then partial and full column blocks, each ascending. From
    /// entry 0 of the mask on, not of the launch. Kernels clamp counts to max_entries and skip column blocks that do not exist.
    pub lists: *const i32,
    /// From one entry of the mask to the next.
    pub batch_stride: i64,
    /// From one query head of the mask to the next.
    pub head_stride: i64,
    /// From one row block to the next.
    pub row_stride: i64,
    /// (tiles, 256): a tile is 128 rows of two words, whose lowest bits are columns 0 and 32 of the block. A row block's partial blocks
    /// have consecutive tiles. Null: no tiles.
    pub bits: *const u32,
    /// Number of tiles; kernels read zeros from tiles outside.
    pub tiles: i32,
    /// Entries of the mask: batch entry `b` of the call (`Lengths::first_batch` counts) has the lists of `b` modulo this.
    pub batch: i32,
    /// Heads of the mask: query head `h` has the lists of `h` modulo this.
    pub heads: i32,
    /// Maximum column blocks of a row block.
    pub max_entries: i32,
}
