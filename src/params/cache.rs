//! Parts of parameter blocks (kernels' arguments) that describe a KV cache, and the blocks of appending and dequantizing. src/ops/blocks.rs
//! and kvcache/kernels.rs fill them. A dense cache has an entry for each sequence, a paged one pages that a block table assigns. Strides
//! count elements.

use super::shared::{ElementType, Lengths, Operand, Output, Problem};

/// Where a KV cache has the tokens of each sequence (`csrc/cache.cuh`). Null: not given.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Cache {
    /// (entries, rows, nheads_k, headdim); batch_stride is from one page (dense: entry) to the next.
    pub k: Operand,
    /// (entries, rows, nheads_k, headdim_v); the same of batch_stride.
    pub v: Operand,
    /// Number of pages (dense: entries). Kernels reject page numbers outside.
    pub entries: i32,
    /// Tokens of a page, a multiple of 16 (dense: of an entry).
    pub rows: i32,
    /// (batch, max_pages): pages of a sequence; null: dense. Kernels ignore pages past the length.
    pub block_table: *const i32,
    /// From one sequence to the next.
    pub block_table_stride: i64,
    /// Maximum pages of a sequence; 0 if dense.
    pub max_pages: i32,
    /// (batch): entry of a sequence; dense only. Null: the sequence's own number.
    pub cache_batch_idx: *const i32,
    /// (batch): tokens to skip at the start of an entry; dense only.
    pub leftpad_k: *const i32,
    /// (batch): end of a sequence before the append, leftpad included. Null: the whole cache.
    pub cache_seqlens: *const i32,
    /// (batch + 1): offsets of packed new tokens. Null: seqlen_new per sequence.
    pub cu_seqlens_k_new: *const i32,
    /// New tokens per sequence; if packed, their maximum; 0: none.
    pub seqlen_new: i32,
    /// Number of packed new tokens; 0 if not packed.
    pub total_new: i32,
}

/// Element format of a KV cache. `FORMATS` in src/kernels/formats.rs has a row for each.
#[repr(i32)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum CacheFormat {
    /// Not quantized: q's type.
    #[default]
    Unquantized,
    /// One byte, with a scale per token and head.
    Int8,
    /// Two elements per byte, with a scale and a zero point per token and head.
    Int4,
    /// One byte, with a scale per head.
    E5m2,
    /// One byte, with a scale per head.
    E4m3,
    /// Keys are `Int8`, values `Int4`. Only the host knows the pair: kernels have a format of keys and one of values.
    Int8Int4,
}

/// fp32 scales or zero points of a cache, one per token and head, or (fp8) per sequence and head.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct CacheScale {
    /// Null: a scale of 1.
    pub ptr: *mut f32,
    /// From one page (dense: entry) to the next; fp8: from one sequence to the next.
    pub batch_stride: i64,
    /// From one token to the next; fp8: 0.
    pub row_stride: i64,
    /// From one head to the next.
    pub head_stride: i64,
}

/// Format, scales and zero points of a quantized cache. Strides of a quantized [`Cache`]'s k and v count bytes.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct CacheScales {
    /// Format of both caches, which dequantize kernels read. Others are compiled for theirs. `Int8Int4` takes two dequantize launches.
    pub format: CacheFormat,
    /// Scales of k.
    pub k: CacheScale,
    /// Scales of v.
    pub v: CacheScale,
    /// Zero points of k; int4 only.
    pub k_zero_point: CacheScale,
    /// Zero points of v; int4 only.
    pub v_zero_point: CacheScale,
}

/// Parameter block of the append kernel, which writes new keys and values into a KV cache and rotates keys and queries. Tensors other than
/// the rotary tables have type `element`, and need no alignment.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct AppendParams {
    /// Cache whose k and v the kernel writes, after cache_seqlens.
    pub cache: Cache,
    /// (batch, seqlen_new, nheads_k, headdim), or packed
    pub k: Operand,
    /// (batch, seqlen_new, nheads_k, headdim_v), or packed
    pub v: Operand,
    /// (batch, seqlen_q, nheads, headdim), or packed; read if there is a rotation.
    pub q: Operand,
    /// Rotated queries, with the shape of q.
    pub rotated_q: Output,
    /// Kernels read the sizes only; headdims need not be multiples of 8.
    pub problem: Problem,
    /// Kernels read cu_seqlens_q and total_q.
    pub lengths: Lengths,
    /// (rotary_rows, rotary_dim / 2) of rotary_element, despite the pointer's type.
    pub rotary_cos: *const u16,
    /// The same of sines.
    pub rotary_sin: *const u16,
    /// From one position to the next.
    pub rotary_cos_stride: i64,
    /// The same of rotary_sin.
    pub rotary_sin_stride: i64,
    /// Rotated columns of q and k; 0: none.
    pub rotary_dim: i32,
    /// Number of positions.
    pub rotary_rows: i32,
    /// Not 0: rotates pairs of neighbors (GPT-J). 0: rotates a column with the one rotary_dim / 2 further (GPT-NeoX).
    pub rotary_interleaved: i32,
    /// Not 0: query i has the position of new token i. 0: all have that of the first.
    pub queries_have_positions: i32,
    /// fp16 or bf16.
    pub element: ElementType,
    /// Type of cos and sin.
    pub rotary_element: ElementType,
    /// Scales of a quantized cache. The kernel writes those of int8 and int4.
    pub scales: CacheScales,
}

/// Parameter block of the kernel that dequantizes a KV cache.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct DequantizeParams {
    /// Cache that the kernel reads.
    pub cache: Cache,
    /// Output of type `element`: (batch, seqlen_k, nheads_k, headdim), from the first token of each sequence on.
    pub k: Output,
    /// Output (batch, seqlen_k, nheads_k, headdim_v), of the same tokens and type.
    pub v: Output,
    /// Output, (batch): tokens of each sequence; -1 for invalid lengths, or a missing page whose tokens a query sees. Null: not requested.
    pub seqlens_k_out: *mut i32,
    /// Sizes and window_left: tokens before all windows are not read. Headdims need not be multiples of 8; 0: no k, or no v.
    pub problem: Problem,
    /// Kernels read cu_seqlens_q and total_q.
    pub lengths: Lengths,
    /// Format and scales.
    pub scales: CacheScales,
    /// fp16 or bf16.
    pub element: ElementType,
}
