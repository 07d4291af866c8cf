//! Parameter blocks that Rust fills and kernels read. Each has its only definition here.
//!
//! build.rs generates `volta_fa_params.h` from this file with cbindgen. A test compares `size_of` with the parameter size in each embedded
//! cubin. The file may only contain `#[repr(C)]` structs of pointers and numbers, and enums with a `#[repr]`. It imports no other module.
//!
//! Strides count elements. Every pointer is a device address (under the simulator, a host address).

/// A read-only fp16 tensor (batch, seqlen, heads, headdim) with a contiguous last dimension.
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

/// A writable fp16 (gradients, and out of fp32 tensors: or fp32) tensor (batch, seqlen, heads, headdim) with a contiguous last dimension.
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

/// Sizes, window and scale of an attention problem, for all passes.
///
/// Query row `i` sees the keys `j` with `i + o - window_left <= j <= i + o + window_right`, where
/// `o = seqlen_k - seqlen_q` (bottom-right alignment). An unbounded side is `seqlen_q + seqlen_k`, which
/// reaches past either end and cannot overflow. A causal mask has `window_right = 0`.
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
    /// 0 to seqlen_q + seqlen_k, which means unbounded.
    pub window_left: i32,
    /// 0 to seqlen_q + seqlen_k, which means unbounded.
    pub window_right: i32,
    /// `|softmax_scale|`, never 0: the planner replaces 0 by 1e-30, which gives the same softmax.
    pub scale: f32,
    /// `scale * log2(e)`
    pub scale_log2: f32,
    /// XOR mask for pairs of fp16 elements of the rows that a block keeps: 0x80008000 if softmax_scale is negative, else 0. So kernels can
    /// assume a positive scale. Forward and dq kernels keep queries, the other backward kernels keep keys.
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
    /// a tree mask: its int64 words, despite the type, and the stride below counts words.
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
    /// 0 or nheads.
    pub alibi_batch_stride: i64,
    /// (nheads); null: none.
    pub sinks: *const f32,
    /// Seed and offset; null: no dropout.
    pub rng_state: *const u64,
    /// Threshold of 15 bits, in both halves. Random numbers from it up keep a probability.
    pub dropout_threshold: u32,
    /// 0, or all ones to keep probabilities with numbers below the threshold instead.
    pub dropout_inverted: u32,
    /// Factor of kept probabilities.
    pub dropout_scale: f32,
    /// Parameter of the score function; 0: no function.
    pub function_parameter: f32,
    /// 1 / function_parameter; 0: no function.
    pub inverse_function_parameter: f32,
}

/// Positions of a KV cache's tokens (`csrc/cache.cuh`). Null: not given.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Cache {
    /// (entries, rows, nheads_k, headdim); batch_stride is from one page (dense: entry) to the next.
    pub k: Operand,
    /// (entries, rows, nheads_k, headdim_v), likewise.
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

/// Format, scales and zero points of a quantized cache. Strides of its operands count bytes.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct CacheScales {
    /// Format of both caches. Decode and append kernels are compiled for one format.
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
    /// k and v of paged kernels. Other kernels ignore this field and the next.
    pub cache: Cache,
    /// Minimum rows (queries of all heads of a KV head): decode kernels compute sequences with fewer.
    pub min_rows: i32,
}

/// Some iterations of a stream-K tile: a tile of query rows whose keys several blocks share.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StreamKSplit {
    /// Number of the tile among the stream-K tiles; backward: of the key block of a head.
    pub tile: u16,
    /// First iteration; of paged kernels the first of `PAGED_PARTS` parts of the tile's iterations.
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

/// Work of the blocks of a stream-K grid: the first `data_parallel_tiles` compute a tile each, the others a split each. Tiles count over
/// all heads and entries.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct StreamKParams {
    /// Scratch: results of splits, max_splits for each stream-K tile.
    pub partials: *mut f32,
    /// Scratch: a semaphore for each stream-K tile, as [`DecodeParams::semaphores`].
    pub semaphores: *mut u64,
    /// Distinguishes this call's semaphores from other contents of the memory.
    pub launch_id: u64,
    /// Tiles that one block computes. Stream-K tiles have the numbers after them.
    pub data_parallel_tiles: i32,
    /// Maximum splits of a tile.
    pub max_splits: i32,
    /// In the order of the grid.
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
    /// Kernels read cu_seqlens_q and total_q.
    pub lengths: Lengths,
    /// Kernels read the score function, ALiBi and sinks, those with a tree also the bias.
    pub score_options: ScoreOptions,
    /// Maximum rows (queries of all heads of a KV head): prefill computes sequences with more.
    pub max_rows: i32,
    /// Maximum splits of the keys of a sequence and head; 0: no limit but the number of blocks.
    pub num_splits: i32,
    /// Scratch: partial results, two per block (csrc/decode/partials.cuh).
    pub partials: *mut f32,
    /// Scratch: semaphores for each partial result and level of the combine tree. They need no initialization, because of `launch_id`.
    pub semaphores: *mut u64,
    /// 48 bits that no other call has. They distinguish this call's semaphores from other contents of the memory.
    pub launch_id: u64,
    /// Scales of a quantized cache.
    pub scales: CacheScales,
}

/// A cache of latents, and the tokens of it that queries chose. Without one all is null or 0.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct ChosenTokens {
    /// Row 0 of page 0, on a boundary of 16 bytes, as are all rows. Bytes, despite the type.
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
    /// Scratch: (queries, nheads), bf16 over fp16 queries, powers of two.
    pub row_scales: *mut f32,
    /// Scratch: (queries, list_stride): chosen tokens; ~n for token n of the second cache.
    pub lists: *mut i32,
    /// From one query's list to the next.
    pub list_stride: i64,
    /// Scratch: (queries), lengths of the lists.
    pub lengths: *mut i32,
    /// (nheads); null: none.
    pub sinks: *const f32,
    /// Scratch: the sinks, at most 1e30. The attention's sinks.
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

/// Parameter block of the indexer (`volta_fa::indexer_logits`).
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
    /// Logarithm of the rows of a page; 31 without a table.
    pub page_shift: i32,
    /// Pages of the cache. Other numbers in the table are no pages.
    pub pages: i32,
    /// First key of each query; null: 0.
    pub k_start: *const i32,
    /// From one batch entry to the next.
    pub k_start_batch_stride: i64,
    /// From one query to the next.
    pub k_start_row_stride: i64,
    /// End of each query's keys.
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
    /// Logarithm of a query's rows in a tile: 5 or 6, at least nheads rows.
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

/// Parameter block of all backward kernels.
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
    /// Scratch: fp32 statistics of query rows, in the family's layout (`Scratch` in src/kernels/variants.rs).
    pub row_stats: *mut f32,
    /// Scratch: (dq_accum_splits, batch, nheads, seqlen_q_rounded, headdim_rounded) fp32. The preprocess kernel zeroes it, and the
    /// postprocess kernel adds it up. Without elements if a separate kernel computes dq.
    pub dq_accum: *mut f32,
    /// Floats between the accumulators of consecutive key blocks of a launch; 0 if all add to one.
    pub dq_accum_split_stride: i64,
    /// Number of accumulators.
    pub dq_accum_splits: i32,
    /// Number of the main launch's first key block.
    pub first_key_block: i32,
    /// seqlen_q rounded up to the query tile.
    pub seqlen_q_rounded: i32,
    /// headdim rounded up to the variant's; 0 without an accumulator.
    pub headdim_rounded: i32,
    /// Sizes, window and scale.
    pub problem: Problem,
    /// `softmax_scale` with its sign: the factor of dk, and of dq in dq kernels, which flip queries. (Other kernels flip keys, so the
    /// accumulator of dq takes `problem.scale`.)
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
    /// From one entry to the next.
    pub dbias_batch_stride: i64,
    /// From one query head to the next.
    pub dbias_head_stride: i64,
    /// From one query to the next.
    pub dbias_row_stride: i64,
    /// From one key to the next.
    pub dbias_key_stride: i64,
}

/// Work of the blocks of a stream-K backward grid. Its first axis is the KV heads of all entries, its second `splits`: each head is divided
/// alike. Iterations are steps of queries, of one query head of the group after the other.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct BwdSplits {
    /// Scratch: gradients of splits in fp32, max_splits for each of `tiles` key blocks of each head.
    pub partials: *mut f32,
    /// Scratch: a semaphore for each of these key blocks, as [`DecodeParams::semaphores`].
    pub semaphores: *mut u64,
    /// Distinguishes this call's semaphores from other contents of the memory.
    pub launch_id: u64,
    /// First key block with scratch memory.
    pub first_tile: i32,
    /// Key blocks of a head with scratch memory.
    pub tiles: i32,
    /// Maximum splits of a key block.
    pub max_splits: i32,
    /// In the order of the grid. `tile` is the number of a key block of its head.
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

/// Block mask of one direction: for each block of 128 rows the blocks of 64 columns that have scores. Rows are queries and columns keys,
/// transposed the other way. A score exists if its column block is full, or partial with the score's bit set, and if lengths and window
/// of [`Problem`] admit it.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct BlockLists {
    /// (batch, heads, row blocks, 4 + max_entries): counts of partial and of full column blocks, number of the row's first tile of bits, the
    /// row block that the block launched at this place takes, then partial and full column blocks, each ascending. Entry 0 of the mask,
    /// not of the launch. Kernels clamp counts to max_entries and skip column blocks that do not exist.
    pub lists: *const i32,
    /// From one entry of the mask to the next.
    pub batch_stride: i64,
    /// From one query head of the mask to the next.
    pub head_stride: i64,
    /// From one row block to the next.
    pub row_stride: i64,
    /// (tiles, 256): a tile is 128 rows of two words, whose lowest bits are columns 0 and 32 of the block. A row block's partial blocks have
    /// consecutive tiles. Null: no tiles.
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

/// Parameter block of the forward kernels with a block mask.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct FwdBlockParams {
    /// As for other forward kernels.
    pub forward: FwdParams,
    /// Key blocks of query rows.
    pub blocks: BlockLists,
}

/// Parameter block of the backward kernels with a block mask. Preprocess and postprocess kernels see no scores, and take `backward` alone.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct BwdBlockParams {
    /// As for other backward kernels.
    pub backward: BwdParams,
    /// Key blocks of query rows.
    pub blocks: BlockLists,
    /// Query blocks of key rows.
    pub blocks_t: BlockLists,
}

/// P and dS of some KV heads and some keys, between the kernels of a backward pass for large headdims (csrc/backward/stored_scores.cuh).
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct StoredScores {
    /// Scratch: P^T times 2^12, fp16, in tiles of 128 keys by 128 queries: (batch, query heads of the launch, query_tiles, key_tiles).
    pub p: *mut u16,
    /// Scratch: dS^T, likewise.
    pub ds: *mut u16,
    /// Scratch: fp32 sums of dq between launches for the same heads. Without elements if one launch has all keys.
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

/// Parameter block of the backward kernels for large headdims, except preprocess.
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
    /// Key blocks of query rows.
    pub blocks: BlockLists,
}

/// Parameter block of the merge kernel (`volta_fa::merge_attention_states` and its in-place form). out_a and out have type `element`, out_b
/// has type `part`.
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
    /// Sizes only; headdims need not be multiples of 8.
    pub problem: Problem,
    /// Kernels read cu_seqlens_q and total_q.
    pub lengths: Lengths,
    /// (rotary_rows, rotary_dim / 2) of rotary_element, despite the pointer's type.
    pub rotary_cos: *const u16,
    /// Likewise.
    pub rotary_sin: *const u16,
    /// From one position to the next.
    pub rotary_cos_stride: i64,
    /// Likewise for rotary_sin.
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
    /// Output (batch, seqlen_k, nheads_k, headdim_v), likewise.
    pub v: Output,
    /// Output, (batch): tokens of each sequence; -1 for invalid lengths, or a missing page whose tokens a query sees. Null: not requested.
    pub seqlens_k_out: *mut i32,
    /// Sizes and window_left; headdims need not be multiples of 8.
    pub problem: Problem,
    /// Kernels read cu_seqlens_q and total_q.
    pub lengths: Lengths,
    /// Format and scales.
    pub scales: CacheScales,
    /// fp16 or bf16.
    pub element: ElementType,
}

/// Parameter block of the kernel that casts bf16 or fp32 tensors to fp16, scaled by powers of two.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct CastParams {
    /// (batch, seqlen_q, nheads, headdim) of type `element`
    pub q: Operand,
    /// (batch, seqlen_k, nheads_k, headdim) of type `element`
    pub k: Operand,
    /// (batch, seqlen_k, nheads_k, headdim_v) of type `element`; unused in grids without its heads
    pub v: Operand,
    /// q as fp16.
    pub q_fp16: Output,
    /// k as fp16.
    pub k_fp16: Output,
    /// v as fp16.
    pub v_fp16: Output,
    /// (batch, nheads, seqlen_q), packed (nheads, total_q), of all scores; null: none. Phase 1 scales it as it scales scores, phase 2 back.
    pub softmax_lse: *mut f32,
    /// (3, groups) zeros, for q, k and v: bits of the largest finite magnitude as fp32. A group is a KV head of a batch entry; packed
    /// sequences share those of a head.
    pub largest: *mut u32,
    /// Output (3, groups): fp16 numbers are the given ones times 2^exponent. Rows of q may have smaller exponents, which softmax_lse has too.
    pub exponents: *mut i32,
    /// Type of q, k and v: bf16 or fp32.
    pub element: ElementType,
    /// Column of q_fp16, k_fp16 and v_fp16 from which what rounding took from the others is stored, a multiple of 8; 0: nowhere.
    pub low_column: i32,
    /// KV heads of all batch entries of the call, or nheads_k if packed.
    pub groups: i32,
    /// Number of the launch's first batch entry; 0 if packed.
    pub first_entry: i32,
    /// Exponent that every q gets, because problem.scale lacks it.
    pub scale_exponent: i32,
    /// Exponent of problem.scale_log2, rounded up.
    pub scale_log2_exponent: i32,
    /// Exponent of headdim * problem.scale_log2, rounded up.
    pub score_exponent: i32,
    /// Exponent of the largest score, log2 units, that rows of q keep.
    pub max_score_exponent: i32,
    /// To which larger ones are lowered.
    pub lowered_score_exponent: i32,
    /// Not 0: v gets no exponent if fp16 holds it, so that its bits do not depend on other tokens.
    pub keeps_ordinary_v: i32,
    /// 0, 1 or 2: see csrc/shared/cast/cast.cuh.
    pub phase: i32,
    /// Sizes and scale.
    pub problem: Problem,
    /// Of packed sequences, and seqused_k.
    pub lengths: Lengths,
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
    /// For varlen kernels.
    pub lengths: Lengths,
    /// Batch entries of all launches of the call.
    pub batch: i32,
    /// fp16 or bf16.
    pub element: ElementType,
    /// Scratch: (nheads_k, k_rows, the kernel's headdim) int8 codes of K, four in a word.
    pub k_codes: *mut u32,
    /// Rows of a head in k_codes, a multiple of 64.
    pub k_rows: i64,
    /// Scratch: (nheads_k, k_rows / 64, 4) scales of the codes.
    pub k_scales: *mut f32,
    /// Scratch: (nheads_k, batch, the kernel's headdim) means of K over keys; 0 without smooth_k.
    pub k_mean: *mut f32,
    /// Scratch: (nheads_k, batch, v_max_stride) largest finite magnitude of V in each block of the prepare kernel.
    pub v_max: *mut f32,
    /// Blocks of the longest sequence.
    pub v_max_stride: i64,
    /// Scratch: V as fp16 below 1, where `element` is bf16. The forward kernel's v.
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
