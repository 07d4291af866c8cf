//! Parameter blocks (kernels' arguments) of decoding, sparse attention to latents, and the indexer. src/ops/kvcache/kernels.rs, sparse.rs
//! and indexer.rs fill them. A latent is one vector per token: key and value of all heads (multi-head latent attention, MLA). Strides
//! count elements unless they say bytes.

use super::cache::{Cache, CacheScales};
use super::shared::{Divisor, Lengths, Operand, Output, Problem, ScoreOptions};

/// Parameter block of the decode kernels: attention of few queries per sequence over a KV cache.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct DecodeParams {
    /// (batch, seqlen_q, nheads, headdim), or packed
    pub q: Operand,
    /// (batch, seqlen_q, nheads, headdim_v), or packed
    pub out: Output,
    /// (batch, nheads, seqlen_q), packed (nheads, total_q); fp32, natural logarithm; +inf for fully masked rows
    pub softmax_lse: *mut f32,
    /// k and v
    pub cache: Cache,
    /// Sizes, window and scale; seqlen_k is the maximum for a sequence of the cache.
    pub problem: Problem,
    /// Query heads of a KV head.
    pub group: Divisor,
    /// Kernels read cu_seqlens_q and total_q.
    pub lengths: Lengths,
    /// Kernels read the score function, ALiBi and sinks, those with a tree (a mask of draft tokens) also the bias.
    pub score_options: ScoreOptions,
    /// Maximum rows (queries of all heads of a KV head) of a sequence: prefill, forward kernels over the cache, computes those with more.
    pub max_rows: i32,
    /// Maximum splits, among blocks, of the keys of a sequence and KV head; 0: no limit but the number of blocks.
    pub num_splits: i32,
    /// Scratch: partial results (fp32 output and softmax state of each row), two per block (csrc/decode/partials.cuh).
    pub partials: *mut f32,
    /// Scratch: semaphores for each partial result and each level of the tree in which blocks combine them. They count finished blocks.
    pub semaphores: *mut u64,
    /// 48 bits that no other call has. They distinguish this call's semaphores from other contents of the memory, which is not zeroed.
    pub launch_id: u64,
    /// Scales of a quantized cache.
    pub scales: CacheScales,
}

/// A cache of latents, and the tokens of it that queries chose. If the call has no such cache, all but `page_size` is null or 0.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct ChosenTokens {
    /// Row 0 of page 0, on a boundary of 16 bytes, as are all rows. Bytes of the cache's format, despite the type.
    pub rows: *const u16,
    /// From one page to the next, bytes.
    pub page_stride: i64,
    /// From one row to the next, bytes.
    pub row_stride: i64,
    /// Rows of a page; not 0.
    pub page_size: i32,
    /// Tokens of all pages. Other indices are no tokens.
    pub count: i32,
    /// (queries, topk): numbers of tokens, counted over all pages.
    pub indices: *const i32,
    /// From one query to the next.
    pub indices_stride: i64,
    /// Indices of a query.
    pub topk: i32,
    /// (queries): indices that count, from the first on; null: all.
    pub lengths: *const i32,
}

/// Parameter block of the kernels of sparse MLA: the one that selects tokens, and attention.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct SparseMlaParams {
    /// The attention. Each query is a sequence with one row of q, whose tokens are those of its list; the cache has no addresses.
    pub decode: DecodeParams,
    /// The call's cache.
    pub own: ChosenTokens,
    /// A second cache of the same format.
    pub extra: ChosenTokens,
    /// (queries, 1, nheads, headdim): the given queries. The selecting kernel reads bf16 ones.
    pub q: Operand,
    /// Scratch: bf16 queries as fp16, contiguous; null: q is fp16.
    pub q_fp16: *mut u16,
    /// Scratch: (queries, nheads), powers of two: a bf16 query is its fp16 copy times this.
    pub row_scales: *mut f32,
    /// Scratch: (queries, list_stride): chosen tokens; ~n for token n of the second cache.
    pub lists: *mut i32,
    /// From one query's list to the next.
    pub list_stride: i64,
    /// Scratch: (queries), lengths of the lists.
    pub lengths: *mut i32,
    /// (nheads): one more logit for each row of a head, without a value; null: none.
    pub sinks: *const f32,
    /// Scratch: the sinks, at most 1e30, for the attention kernel: a sink of infinity would make the sum of a row NaN.
    pub finite_sinks: *mut f32,
    /// (queries, nheads): the largest scaled score of each row; -inf without tokens.
    pub max_logits: *mut f32,
    /// Not 0: the last 64 columns of an fp8 row are bf16. 0: fp16.
    pub tail_is_bf16: i32,
}

/// Type of the indexer's queries.
#[repr(i32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QueryFormat {
    /// fp16
    Half,
    /// bf16
    Bf16,
    /// fp8
    E4m3,
}

/// Parameter block of the indexer (`volta_fa::indexer_logits`): the scores by which queries choose tokens.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct IndexerParams {
    /// (batch, seqlen_q, nheads, 128) of q_format, despite the pointer's type.
    pub q: Operand,
    /// Type of q.
    pub q_format: QueryFormat,
    /// (batch, seqlen_q, nheads), heads contiguous.
    pub weights: *const f32,
    /// From one batch entry to the next.
    pub weights_batch_stride: i64,
    /// From one query to the next.
    pub weights_row_stride: i64,
    /// e4m3 codes: rows of 128 bytes that lie together in a page. On a boundary of 16 bytes, as are all pages. Bytes, despite the type.
    pub k: *const u16,
    /// From one page to the next, bytes.
    pub page_stride: i64,
    /// Scales of a page's rows, which lie together.
    pub k_scales: *const f32,
    /// From one page to the next, in scales.
    pub scales_page_stride: i64,
    /// (batch, max_pages); null: all keys are in page 0.
    pub block_table: *const i32,
    /// From one batch entry to the next.
    pub block_table_stride: i64,
    /// Base-2 logarithm of the rows (keys) of a page; 31 without a table.
    pub page_shift: i32,
    /// Pages of the cache. Other numbers in the table are no pages.
    pub pages: i32,
    /// First key of each query; null: 0.
    pub k_start: *const i32,
    /// From one batch entry to the next.
    pub k_start_batch_stride: i64,
    /// From one query to the next.
    pub k_start_row_stride: i64,
    /// Number of the key after each query's last.
    pub k_end: *const i32,
    /// From one batch entry to the next.
    pub k_end_batch_stride: i64,
    /// From one query to the next; 0: k_end has one number for a batch entry.
    pub k_end_row_stride: i64,
    /// Not 0: k_end is that of the last query, and each query before sees one key less than the next.
    pub is_causal: i32,
    /// Batch entries.
    pub batch: i32,
    /// Queries of an entry.
    pub seqlen_q: i32,
    /// Heads of a query.
    pub nheads: i32,
    /// Base-2 logarithm of a query's rows in a tile, a row per head: 5 or 6, so that nheads rows fit.
    pub head_shift: i32,
    /// Keys that can exist: at most `columns`, and those that block_table or k has room for.
    pub keys: i32,
    /// Tiles of queries of all entries.
    pub tiles: i32,
    /// Output (batch, seqlen_q, columns), contiguous.
    pub logits: *mut f32,
    /// Columns of the output.
    pub columns: i32,
    /// Not 0: keys that a query does not see get -inf. 0: their logits are not written.
    pub clean: i32,
}
