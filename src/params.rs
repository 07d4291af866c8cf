//! The parameter blocks that Rust fills and the kernels read: the one definition of each.
//!
//! build.rs runs cbindgen over this file and hands the result to NVRTC as `volta_fa_params.h`; a test
//! compares `size_of` with the parameter size that every embedded cubin records. Only `#[repr(C)]`
//! structs of pointers and numbers, and enums with a `#[repr]` of their own, belong here, and nothing from other modules.
//!
//! Strides count elements. Every pointer is a device address (under the simulator, a host address).

/// A read-only fp16 tensor (batch, seqlen, heads, headdim) with a contiguous last dimension.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Operand {
    /// row 0 of head 0 of the launch's first batch entry; packed, of all rows
    pub ptr: *const u16,
    /// 0 where packed: rows are counted over all sequences
    pub batch_stride: i64,
    /// from one position of the sequence to the next
    pub row_stride: i64,
    /// from one head to the next
    pub head_stride: i64,
}

/// A writable fp16 (gradients: or bf16) tensor (batch, seqlen, heads, headdim) with a contiguous last dimension.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Output {
    /// row 0 of head 0 of the launch's first batch entry; packed, of all rows
    pub ptr: *mut u16,
    /// 0 where packed: rows are counted over all sequences
    pub batch_stride: i64,
    /// from one position of the sequence to the next
    pub row_stride: i64,
    /// from one head to the next
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
    /// entries of this launch, which may be a chunk of the call's (`plan::batch_chunks`)
    pub batch: i32,
    /// query heads; a multiple of nheads_k
    pub nheads: i32,
    /// key heads
    pub nheads_k: i32,
    /// of every entry; where lengths are in memory, the most that one can have
    pub seqlen_q: i32,
    /// the same for keys
    pub seqlen_k: i32,
    /// of q and k; a multiple of 8
    pub headdim: i32,
    /// of v and out; a multiple of 8
    pub headdim_v: i32,
    /// 0 to seqlen_q + seqlen_k, which is no bound
    pub window_left: i32,
    /// 0 to seqlen_q + seqlen_k, which is no bound
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
    /// (batch + 1): the same for the rows of k and v; there if and only if cu_seqlens_q is
    pub cu_seqlens_k: *const i32,
    /// (batch): of the keys of an entry, those before this one exist
    pub seqused_k: *const i32,
    /// rows of packed q; 0 where dense
    pub total_q: i32,
    /// rows of packed k and v; 0 where dense
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
    /// in elements of the bias; 0 where it is broadcast, as the next two
    pub bias_batch_stride: i64,
    /// from one query head to the next
    pub bias_head_stride: i64,
    /// from one query to the next
    pub bias_row_stride: i64,
    /// not 0: fp32, whatever the pointer's type says; 0: fp16
    pub bias_is_fp32: i32,
    /// (nheads) or (batch, nheads); null: none
    pub alibi_slopes: *const f32,
    /// 0 or nheads
    pub alibi_batch_stride: i64,
    /// (nheads); null: none
    pub sinks: *const f32,
    /// seed and offset; null: no dropout
    pub rng_state: *const u64,
    /// 15 bits, in both halves: a probability is kept where its random number is not below this ...
    pub dropout_threshold: u32,
    /// ... or, where this is not 0 but all ones, where it is
    pub dropout_inverted: u32,
    /// what kept probabilities are multiplied by
    pub dropout_scale: f32,
    /// 0: off
    pub softcap: f32,
    /// 0 where that is off
    pub inverse_softcap: f32,
}

/// Where the tokens of a KV cache lie (`csrc/cache.cuh`). Null: not given.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Cache {
    /// (entries, rows, nheads_k, headdim); batch_stride goes from one page (dense: entry) to the next
    pub k: Operand,
    /// (entries, rows, nheads_k, headdim_v), the same
    pub v: Operand,
    /// pages (dense: entries) of the two; a number of one outside is refused on the device
    pub entries: i32,
    /// tokens of a page, a multiple of 16 (dense: of an entry)
    pub rows: i32,
    /// (batch, max_pages): the pages of a sequence, of which those past its length are not looked at; null: dense
    pub block_table: *const i32,
    /// from one sequence to the next
    pub block_table_stride: i64,
    /// 0 where dense
    pub max_pages: i32,
    /// (batch): the entry of a sequence; dense only. Null: its number
    pub cache_batch_idx: *const i32,
    /// (batch): tokens at the begin of an entry that are not there; dense only
    pub leftpad_k: *const i32,
    /// (batch): where a sequence ends, leftpad included, before this call appends. Null: all that the cache holds
    pub cache_seqlens: *const i32,
    /// (batch + 1): of packed appended tokens. Null: seqlen_new of every sequence
    pub cu_seqlens_k_new: *const i32,
    /// tokens that this call appends to every sequence; where packed, the most to one; 0: nothing
    pub seqlen_new: i32,
    /// tokens of the packed appended ones; 0 where not packed
    pub total_new: i32,
}

/// What the elements of a KV cache are. `FORMATS` in src/kernels/formats.rs has a row for each.
#[repr(i32)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum CacheFormat {
    /// not quantized: of q's type; of a decode kernel: fp16
    #[default]
    Unquantized,
    /// of a decode kernel: bf16, and so are q and out
    Bf16,
    /// a byte, with a scale for each token and head
    Int8,
    /// two in a byte, with a scale and a zero point for each token and head
    Int4,
    /// a byte, with a scale for each head
    E5m2,
    /// the same
    E4m3,
}

/// A number in fp32 for each token and head of a cache, or (fp8) for each sequence and head.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct CacheScale {
    /// null: not given, which is a scale of 1
    pub ptr: *mut f32,
    /// from one page (dense: entry) to the next; fp8: from one sequence
    pub batch_stride: i64,
    /// from one token to the next; fp8: 0
    pub row_stride: i64,
    /// from one head to the next
    pub head_stride: i64,
}

/// What belongs to the data of a quantized cache. An operand's strides count its bytes then.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct CacheScales {
    /// of both caches; a kernel that reads or appends to one is made for it
    pub format: CacheFormat,
    /// of k
    pub k: CacheScale,
    /// of v
    pub v: CacheScale,
    /// int4 alone
    pub k_zero_point: CacheScale,
    /// int4 alone
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
    /// sizes, window and scale
    pub problem: Problem,
    /// for ragged and general kernels; plain ones do not look at it
    pub lengths: Lengths,
    /// sinks for ragged kernels, all for general ones; plain ones do not look at it
    pub score_options: ScoreOptions,
    /// k and v of kernels with pages, which alone look at this and the next
    pub cache: Cache,
    /// sequences with fewer rows (queries of all heads of a key head) are another kernel's
    pub min_rows: i32,
}

/// Some iterations of a stream-K tile: a tile of query rows whose keys several blocks share.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StreamKSplit {
    /// Number of the tile among the stream-K tiles.
    pub tile: u16,
    /// First iteration.
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

/// Work of the blocks of a stream-K grid: the first `data_parallel_tiles` compute a tile each, the others a split each. Tiles count over all
/// heads and entries.
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
    /// Most splits of a tile.
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

/// Parameter block of the decode kernels: attention of few queries a sequence over a KV cache.
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
    /// sizes, window and scale; seqlen_k is the most that a sequence of the cache can have
    pub problem: Problem,
    /// of these cu_seqlens_q and total_q
    pub lengths: Lengths,
    /// of these softcap, ALiBi and sinks
    pub score_options: ScoreOptions,
    /// sequences with more rows (queries of all heads of a key head) are another kernel's
    pub max_rows: i32,
    /// parts that the keys of a sequence and head may be cut into; 0: as many as there are blocks
    pub num_splits: i32,
    /// scratch: what blocks found out about parts, two of each block (csrc/decode/partials.cuh)
    pub partials: *mut f32,
    /// scratch: who has arrived, for each part and level of the merge, which need no first value: see `launch_id`
    pub semaphores: *mut u64,
    /// tells this call's semaphores from whatever else the memory may hold: 48 bits that no other call has
    pub launch_id: u64,
    /// of a quantized cache
    pub scales: CacheScales,
}

/// Parameter block of all backward kernels.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct BwdParams {
    /// gradient of out, of its shape
    pub dout: Operand,
    /// (batch, seqlen_q, nheads, headdim)
    pub q: Operand,
    /// (batch, seqlen_k, nheads_k, headdim)
    pub k: Operand,
    /// (batch, seqlen_k, nheads_k, headdim_v)
    pub v: Operand,
    /// from the forward pass; delta is the sum of each row of out * dout
    pub out: Operand,
    /// shape of q
    pub dq: Output,
    /// shape of k: the sum over the query heads that read a key head
    pub dk: Output,
    /// shape of v: the same sum
    pub dv: Output,
    /// (batch, nheads, seqlen_q), packed (nheads, total_q); fp32, from the forward pass
    pub softmax_lse: *const f32,
    /// scratch: statistics of query rows, fp32, laid out as the family says (`Scratch` in src/kernels/variants.rs)
    pub row_stats: *mut f32,
    /// scratch: (dq_accum_splits, batch, nheads, seqlen_q_rounded, headdim_rounded) fp32, zeroed by prepare and added up by finish; not
    /// there where dq has a kernel of its own
    pub dq_accum: *mut f32,
    /// from what one of a launch's blocks of keys adds to to what the next does: 0 where all add to one accumulator
    pub dq_accum_split_stride: i64,
    /// accumulators
    pub dq_accum_splits: i32,
    /// the main kernel's: which block of keys this launch's first is
    pub first_key_block: i32,
    /// seqlen_q rounded up to the query tile
    pub seqlen_q_rounded: i32,
    /// headdim rounded up to the variant's; 0 without an accumulator
    pub headdim_rounded: i32,
    /// sizes, window and scale
    pub problem: Problem,
    /// `softmax_scale` with its sign: the factor of dk, and of dq where a kernel of its own computes it from flipped queries. (The
    /// accumulator of dq comes from flipped keys and takes `problem.scale`.)
    pub signed_scale: f32,
    /// not 0: dq, dk and dv are written as bf16 (operands are fp16 all the same). Plain kernels do not look at it
    pub gradients_are_bf16: i32,
    /// for ragged and general kernels; plain ones do not look at it
    pub lengths: Lengths,
    /// for general kernels; the others do not look at it
    pub score_options: ScoreOptions,
    /// fp32, added to: the gradient of the bias, with a stride of 0 where it is broadcast; null: not asked for
    pub dbias: *mut f32,
    /// not 0: it is fp16, whatever the pointer's type says, and each element is stored once; rows lie contiguous then, and seqlen_k is
    /// even. 0 for families that do not say otherwise (`Family::stores_dbias`)
    pub dbias_is_fp16: i32,
    /// from one entry to the next
    pub dbias_batch_stride: i64,
    /// from one query head to the next
    pub dbias_head_stride: i64,
    /// from one query to the next
    pub dbias_row_stride: i64,
    /// from one key to the next
    pub dbias_key_stride: i64,
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

/// Parameter block of the merge kernel (`volta_fa::merge_attention_states` and the same in place). The pointers of out_a and out are
/// of `element`, that of out_b is of `part`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct MergeParams {
    /// attention over the one set of keys, (batch, seqlen_q, nheads, headdim_v)
    pub out_a: Operand,
    /// over the other set
    pub out_b: Operand,
    /// over both
    pub out: Output,
    /// (batch, nheads, seqlen_q) fp32, natural logarithm; +inf where a part saw no key
    pub lse_a: *const f32,
    /// the same of out_b, contiguous
    pub lse_b: *const f32,
    /// the same over both; +inf where neither part saw a key. In place it is lse_a
    pub lse: *mut f32,
    /// from one head to the next of lse_a and lse: seqlen_q, or of the longer rows that they are a part of
    pub lse_stride: i64,
    /// heads of out, each merged on its own
    pub nheads: i32,
    /// of every entry; all rows where packed, which is one entry
    pub seqlen_q: i32,
    /// a multiple of 8
    pub headdim_v: i32,
    /// of out_a and out
    pub element: ElementType,
    /// of out_b: `element`, or fp16 or bf16 beside fp32
    pub part: ElementType,
}

/// Parameter block of the append kernel: new keys and values into a KV cache, rotary embeddings of these and of queries. Of `cache` it
/// writes k and v. The tensors, but for the rotary ones, are of `element`, and need not be aligned.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct AppendParams {
    /// what is written to, behind cache_seqlens
    pub cache: Cache,
    /// (batch, seqlen_new, nheads_k, headdim), or packed
    pub k: Operand,
    /// (batch, seqlen_new, nheads_k, headdim_v), or packed
    pub v: Operand,
    /// (batch, seqlen_q, nheads, headdim), or packed; looked at where there is a rotation
    pub q: Operand,
    /// the same, rotated
    pub rotated_q: Output,
    /// the sizes alone; headdims need not be multiples of 8
    pub problem: Problem,
    /// of these cu_seqlens_q and total_q
    pub lengths: Lengths,
    /// (rotary_rows, rotary_dim / 2) of rotary_element, whatever the pointer's type says
    pub rotary_cos: *const u16,
    /// the same
    pub rotary_sin: *const u16,
    /// from one position to the next
    pub rotary_cos_stride: i64,
    /// the same of rotary_sin
    pub rotary_sin_stride: i64,
    /// columns of q and k that are rotated; 0: none
    pub rotary_dim: i32,
    /// positions
    pub rotary_rows: i32,
    /// not 0: with its neighbour (GPT-J); 0: with the column rotary_dim / 2 further (GPT-NeoX)
    pub rotary_interleaved: i32,
    /// not 0: query i is at the position of new token i; 0: all are at that of the first
    pub queries_have_positions: i32,
    /// fp16 or bf16
    pub element: ElementType,
    /// of cos and sin
    pub rotary_element: ElementType,
    /// of a quantized cache: int8's and int4's are written
    pub scales: CacheScales,
}

/// Parameter block of the kernel that makes numbers of a quantized KV cache.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct DequantizeParams {
    /// what is read
    pub cache: Cache,
    /// what is written, of `element`: (batch, seqlen_k, nheads_k, headdim), from the first token of each sequence on
    pub k: Output,
    /// (batch, seqlen_k, nheads_k, headdim_v), the same
    pub v: Output,
    /// Output, (batch): tokens of each sequence; -1 for invalid lengths, or a missing page whose tokens a query sees. Null: not requested.
    pub seqlens_k_out: *mut i32,
    /// the sizes, and window_left; headdims need not be multiples of 8
    pub problem: Problem,
    /// of these cu_seqlens_q and total_q
    pub lengths: Lengths,
    /// with the format
    pub scales: CacheScales,
    /// fp16 or bf16
    pub element: ElementType,
}
