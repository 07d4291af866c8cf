//! The attention problem: one type for all attention operators. Validation makes it from a call; the planner, backends and parameter blocks
//! read it. It has numbers only, no tensors.

use super::features::RequestedFeatures;
use super::tensor::DType;
use crate::limits::{HEADDIM_MULTIPLE, MAX_DECODE_ROWS}; // 8 and 64
use crate::params::CacheFormat;

/// Storage of queries.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Queries {
    #[default]
    /// (batch, seqlen_q, nheads, headdim)
    Dense,
    /// (total, nheads, headdim), sequences one after the other.
    Packed {
        /// Rows of q, out and their gradients.
        total: i64,
    },
}

/// Storage of keys and values.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Keys {
    #[default]
    /// (batch, seqlen_k, nheads_k, headdim)
    Dense,
    /// (total, nheads_k, headdim), sequences one after the other.
    Packed {
        /// Rows of k, v and their gradients.
        total: i64,
    },
    /// A KV cache.
    Cache(Cache),
    /// A cache of latents: one vector per token, the key of all heads, whose first columns are the value (multi-head latent attention).
    Latents(Cache),
}

/// Layout of the tokens of a cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CacheLayout {
    /// Each entry holds one sequence.
    Entries,
    /// A block table lists the pages of each sequence.
    Pages { max_pages: i64 },
}

/// A cache of keys and values: (entries, rows, nheads_k, headdim).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cache {
    /// Dense entries or pages.
    pub layout: CacheLayout,
    /// Number of entries, or of pages.
    pub entries: i64,
    /// Tokens of an entry, or of a page.
    pub rows: i64,
    /// Element type. `Unquantized`: that of q.
    pub format: CacheFormat,
}

/// Row `i` sees the keys `j` with `i + offset - left <= j <= i + offset + right`, `offset = seqlen_k - seqlen_q`. `None` is no bound.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Window {
    /// Visible keys before position `i + offset`, 0 or more.
    pub left: Option<i64>,
    /// Visible keys after that position, 0 or more. `Some(0)` hides later keys, as `is_causal` does.
    pub right: Option<i64>,
}

impl Window {
    /// Every key.
    pub const FULL: Window = Window { left: None, right: None };
    /// Keys up to the row's own position.
    pub const CAUSAL: Window = Window { left: None, right: Some(0) };
}

/// Tokens that a call appends to a cache before it attends.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Appended {
    /// Most tokens of a sequence; 0: none.
    pub seqlen: i64,
    /// Rows of packed k and v; None: dense, or nothing to append.
    pub total: Option<i64>,
    /// Rotary embedding of the appended keys and of q.
    pub rotary: Rotary,
}

/// A rotary embedding.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Rotary {
    /// Columns of a head that are rotated; 0: none.
    pub dim: i64,
    /// Positions in the tables.
    pub rows: i64,
}

/// A validated attention problem. Planner and backends need no more. Sizes of tensors without data may be [`crate::options::UNKNOWN`].
/// The default has dense fp16 tensors of size 0, and no mask or other option.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Attention {
    /// Batch entries, or packed sequences.
    pub batch: i64,
    /// Queries of a sequence; packed, of the longest one, at most all rows.
    pub seqlen_q: i64,
    /// Keys of a sequence; packed, of the longest one; in a cache, the most that a sequence can have.
    pub seqlen_k: i64,
    /// Query heads, a multiple of nheads_k.
    pub nheads: i64,
    /// KV heads.
    pub nheads_k: i64,
    /// Columns of q and k.
    pub headdim: i64,
    /// Columns of v and out.
    pub headdim_v: i64,
    /// Element type of q and out, and of keys and values that are not quantized.
    pub dtype: DType,
    /// Where queries are, and where keys and values are.
    pub queries: Queries,
    pub keys: Keys,
    /// Factor of the scores: finite in fp32, may be 0 or negative.
    pub softmax_scale: f64,
    /// Which keys a row sees, `is_causal` included.
    pub window: Window,
    pub features: RequestedFeatures,
    /// Tokens that the call appends to the cache first.
    pub appended: Appended,
    /// Most splits of a sequence's keys in a decode kernel; 0: the scheduler decides.
    pub num_splits: i64,
}

impl Attention {
    /// Returns true if the output has no element.
    pub fn has_no_output(&self) -> bool {
        [self.batch, self.nheads, self.seqlen_q].contains(&0)
    }

    /// Returns true if no kernel is needed: the output has no element, or no row has a key.
    pub fn is_empty(&self) -> bool {
        self.has_no_output() || self.seqlen_k == 0
    }

    /// Returns true if kernels read any sequence lengths from memory.
    pub fn is_varlen(&self) -> bool {
        self.features.seqused_k || self.keys != Keys::Dense || self.queries != Queries::Dense
    }

    /// Returns the rows of packed queries; None: they are not packed.
    pub fn total_q(&self) -> Option<i64> {
        match self.queries {
            Queries::Packed { total } => Some(total),
            Queries::Dense => None,
        }
    }

    /// Returns the rows of packed keys; None: they are not packed.
    pub fn total_k(&self) -> Option<i64> {
        match self.keys {
            Keys::Packed { total } => Some(total),
            Keys::Dense | Keys::Cache(_) | Keys::Latents(_) => None,
        }
    }

    pub fn cache(&self) -> Option<&Cache> {
        match &self.keys {
            Keys::Cache(cache) | Keys::Latents(cache) => Some(cache),
            Keys::Dense | Keys::Packed { .. } => None,
        }
    }

    /// Returns the format of the cache; `Unquantized` without one.
    pub fn cache_format(&self) -> CacheFormat {
        self.cache().map_or(CacheFormat::Unquantized, |cache| cache.format)
    }

    /// Returns true if values are the first columns of keys.
    pub fn has_latents(&self) -> bool {
        matches!(self.keys, Keys::Latents(_))
    }

    /// Returns the arguments' names for keys and values, for errors.
    pub fn key_names(&self) -> [&'static str; 2] {
        match self.keys {
            Keys::Dense | Keys::Packed { .. } => ["k", "v"],
            Keys::Cache(_) => ["k_cache", "v_cache"],
            Keys::Latents(_) => ["latent_cache", "latent_cache"],
        }
    }

    /// Returns the query heads of a KV head.
    pub fn group(&self) -> i64 {
        self.nheads / self.nheads_k.max(1)
    }

    /// Returns the rows of the longest sequence as decode kernels count them: queries times query heads per KV head.
    pub fn rows_per_kv_head(&self) -> i64 {
        self.seqlen_q * self.group()
    }

    /// Returns true if sequences may have more rows than decode kernels take, so that prefill kernels compute them. Calls with latents or a
    /// tree mask (of draft tokens) have decode kernels alone. So do batch-invariant ones, in which a row must not depend on others.
    pub fn has_prefill(&self) -> bool {
        self.rows_per_kv_head() > MAX_DECODE_ROWS && !self.has_latents() && !self.features.tree && !self.features.batch_invariant
    }

    /// Returns true if rotary embeddings rotate each query by its own position. Without a mask all use the first, as in flash-attn.
    pub fn queries_have_positions(&self) -> bool {
        self.window != Window::FULL
    }

    /// Returns the problem with headdims rounded up to multiples of 8, which kernels read.
    pub fn padded(&self) -> Attention {
        Attention { headdim: padded_headdim(self.headdim), headdim_v: padded_headdim(self.headdim_v), ..*self }
    }

    /// Returns the shape of q (with `headdim` columns) or of out (with `headdim_v`).
    pub fn query_shape(&self, headdim: i64) -> Vec<i64> {
        match self.queries {
            Queries::Packed { total } => vec![total, self.nheads, headdim],
            Queries::Dense => vec![self.batch, self.seqlen_q, self.nheads, headdim],
        }
    }

    /// Returns the shape of softmax_lse.
    pub fn lse_shape(&self) -> Vec<i64> {
        match self.queries {
            Queries::Packed { total } => vec![self.nheads, total],
            Queries::Dense => vec![self.batch, self.nheads, self.seqlen_q],
        }
    }
}

/// Rounds a headdim up to a multiple of 8 columns, 16 bytes of fp16, which kernels read together.
pub fn padded_headdim(headdim: i64) -> i64 {
    (headdim + HEADDIM_MULTIPLE - 1) / HEADDIM_MULTIPLE * HEADDIM_MULTIPLE
}
