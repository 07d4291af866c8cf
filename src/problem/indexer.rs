//! Validation of `indexer_logits`, the scores by which queries of sparse attention choose tokens: queries, weights of their heads, and keys
//! as fp8 codes with a scale each. Keys are one tensor, or pages that a block table assigns to batch entries. src/ops/indexer.rs calls it.

use super::checks::*; // check_... and reject_if!: errors for the user; unknown sizes pass
use super::tensor::{Backend, DType, TensorDesc};
use crate::error::{Error, Result};
use crate::limits::{MAX_INDEXER_HEADS, MAX_SEQLEN}; // 64 and 2^29 - 1
use crate::options::UNKNOWN; // a symbolic size or number (torch.compile)

/// Columns of queries and keys.
pub const INDEXER_HEADDIM: i64 = 128;
/// Bytes of a token in a cache: its codes and its scale.
const TOKEN_BYTES: i64 = INDEXER_HEADDIM + 4;
/// The fewest rows (tokens) of a page: the four bytes of their scales fill 16, so the next page begins on a boundary of 16 bytes.
const MIN_PAGE_SIZE: i64 = 4;

/// Arguments of a call: tensors, or their descriptions.
pub struct IndexerArgs<T> {
    /// (batch, seqlen_q, nheads, 128)
    pub q: T,
    /// (total_k, 128), or pages (pages, page_size, 1, 132)
    pub k: T,
    /// float32 (batch, seqlen_q, nheads)
    pub weights: T,
    /// Number of the key after the last that a query sees: int32 (batch, seqlen_q). Or int32 (batch): that of the last query, and each
    /// query before sees one key less.
    pub k_end: T,
    /// The first key that a query sees: int32 (batch, seqlen_q).
    pub k_start: Option<T>,
    /// float32 (total_k), beside k of rank 2
    pub k_scales: Option<T>,
    /// int32 (batch, max_pages), beside pages
    pub block_table: Option<T>,
    /// Columns of the output, beside pages.
    pub max_seqlen_k: Option<i64>,
}

/// A validated `volta_fa::indexer_logits`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Indexer {
    pub batch: i64,
    pub seqlen_q: i64,
    pub nheads: i64,
    /// Columns of the output, one for each key; not those of a head.
    pub columns: i64,
    /// Keys of a sequence that can exist: at most `columns`, and no more than the block table has room for.
    pub keys: i64,
    /// Rows of a page; None: k is one tensor of all keys.
    pub page_size: Option<i64>,
    /// True if k_end has one number for each sequence: then each query before the last sees one key less than the next.
    pub is_causal: bool,
}

impl Indexer {
    pub fn is_empty(&self) -> bool {
        [self.batch, self.seqlen_q, self.columns].contains(&0)
    }
}

/// Checks a call, and returns it as sizes.
pub fn validate_indexer(args: &IndexerArgs<TensorDesc>, backend: Backend) -> Result<Indexer> {
    let IndexerArgs { q, k, weights, k_end, k_start, .. } = args;
    check_query_dtype(q, backend)?;
    let &[batch, seqlen_q, nheads, headdim] = &q.sizes[..] else {
        return Err(Error::value("q", rank(q), "rank 4, (batch, seqlen_q, nheads, 128)"));
    };
    check_contiguous_last("q", q)?;
    reject_if!(!same_size(headdim, INDEXER_HEADDIM), "q", format!("headdim {headdim}"), INDEXER_HEADDIM);
    reject_if!(nheads == 0 || nheads > MAX_INDEXER_HEADS, "q", format!("nheads {nheads}"), format!("1 to {MAX_INDEXER_HEADS}"));
    // UNKNOWN: a symbolic size of torch.compile
    if batch != UNKNOWN && seqlen_q != UNKNOWN {
        check_at_most("q", "rows", batch.saturating_mul(seqlen_q), MAX_SEQLEN)?;
    }
    check_tensor("weights", weights, DType::Float, q, &[batch, seqlen_q, nheads], "(batch, seqlen_q, nheads)")?;
    check_contiguous_last("weights", weights)?;
    let is_causal = check_ends(k_end, q, [batch, seqlen_q])?;
    if let Some(d) = k_start {
        check_tensor("k_start", d, DType::Int32, q, &[batch, seqlen_q], "(batch, seqlen_q)")?;
    }
    check_device("k", k, q)?;
    check_contiguous_last("k", k)?;
    let found = Indexer { batch, seqlen_q, nheads, columns: 0, keys: 0, page_size: None, is_causal };
    match k.sizes.len() {
        2 => check_rows(args).map(|columns| Indexer { columns, keys: columns, ..found }),
        4 => check_pages(args, found),
        _ => Err(Error::value("k", rank(k), "(total_k, 128), or pages (pages, page_size, 1, 132)")),
    }
}

fn check_query_dtype(q: &TensorDesc, backend: Backend) -> Result<()> {
    let of_kernels = matches!(q.dtype, DType::Half | DType::BFloat16 | DType::Float8E4m3);
    if of_kernels || backend != Backend::Kernels && matches!(q.dtype, DType::Float | DType::Double) {
        return Ok(());
    }
    Err(Error::value("q", format!("dtype {}", q.dtype), "torch.float8_e4m3fn, torch.float16 or torch.bfloat16"))
}

/// Checks k_end. Returns true if it has one number for each sequence.
fn check_ends(d: &TensorDesc, q: &TensorDesc, sizes: [i64; 2]) -> Result<bool> {
    match d.sizes.len() {
        1 => check_tensor("k_end", d, DType::Int32, q, &sizes[..1], "(batch,) or (batch, seqlen_q)")?,
        _ => check_tensor("k_end", d, DType::Int32, q, &sizes, "(batch, seqlen_q) or (batch,)")?,
    }
    Ok(d.sizes.len() == 1)
}

/// Checks that k has one byte an element: fp8 codes, or the same as integers.
fn check_bytes(name: &str, d: &TensorDesc) -> Result<()> {
    if !matches!(d.dtype, DType::Float8E4m3 | DType::Uint8 | DType::Int8) {
        return Err(Error::value(name, format!("dtype {}", d.dtype), "torch.float8_e4m3fn, or torch.uint8 for its bytes"));
    }
    Ok(())
}

/// Checks k as one tensor of all keys. Returns their number.
fn check_rows(IndexerArgs { q, k, k_scales, block_table, max_seqlen_k, .. }: &IndexerArgs<TensorDesc>) -> Result<i64> {
    check_bytes("k", k)?;
    let [total_k, columns] = [k.sizes[0], k.sizes[1]];
    reject_if!(!same_size(columns, INDEXER_HEADDIM), "k", shape(k), format!("shape (total_k, {INDEXER_HEADDIM})"));
    for (name, is_given) in [("block_table", block_table.is_some()), ("max_seqlen_k", max_seqlen_k.is_some())] {
        reject_if!(is_given, name, "a value", "None beside k of rank 2, which has all keys in order");
    }
    let d = k_scales.as_ref().ok_or_else(|| Error::value("k_scales", "None", "float32 (total_k,) beside k of rank 2"))?;
    check_dtype("k_scales", d, DType::Float)?;
    check_device("k_scales", d, q)?;
    check_length("k_scales", d, total_k, "total_k")?;
    check_at_most("k", "total_k", total_k, MAX_SEQLEN)?;
    Ok(total_k)
}

/// Checks k as pages. Returns the problem with its columns, keys and page size; `found` has the rest.
fn check_pages(args: &IndexerArgs<TensorDesc>, found: Indexer) -> Result<Indexer> {
    let IndexerArgs { q, k, k_scales, block_table, max_seqlen_k, .. } = args;
    let [pages, page_size, heads, bytes] = [k.sizes[0], k.sizes[1], k.sizes[2], k.sizes[3]];
    check_bytes("k", k)?;
    if !same_size(heads, 1) || !same_size(bytes, TOKEN_BYTES) {
        let allowed = format!("shape (pages, page_size, 1, {TOKEN_BYTES}): codes of {INDEXER_HEADDIM} columns and a float32 scale a token");
        return Err(Error::value("k", shape(k), allowed));
    }
    if page_size != UNKNOWN && (page_size < MIN_PAGE_SIZE || !(page_size as u64).is_power_of_two()) {
        return Err(Error::value("k", format!("page_size {page_size}"), format!("a power of two, at least {MIN_PAGE_SIZE}")));
    }
    if !same_size(k.strides[1], TOKEN_BYTES) {
        let given = format!("stride {} between tokens", number(k.strides[1]));
        return Err(Error::value("k", given, format!("{TOKEN_BYTES}: the bytes of a page lie together")));
    }
    if pages > 1 && k.strides[0] != UNKNOWN && k.strides[0] % 16 != 0 {
        return Err(Error::value("k", format!("stride {} between pages", k.strides[0]), "a multiple of 16 bytes"));
    }
    check_at_most("k", "pages", pages, i64::from(i32::MAX))?;
    reject_if!(k_scales.is_some(), "k_scales", "a tensor", "None beside pages, which have their scales");
    let table = block_table.as_ref().ok_or_else(|| Error::value("block_table", "None", "int32 (batch, max_pages) beside pages"))?;
    let max_pages = table.sizes.get(1).copied().unwrap_or(UNKNOWN);
    check_int32("block_table", table, q, &[q.sizes[0], max_pages], "(batch, max_pages)")?;
    let columns = max_seqlen_k.ok_or_else(|| Error::value("max_seqlen_k", "None", "the columns of the output, beside pages"))?;
    reject_if!(columns != UNKNOWN && !(0..=MAX_SEQLEN).contains(&columns), "max_seqlen_k", columns, format!("0 to {MAX_SEQLEN}"));
    let room = if max_pages == UNKNOWN || page_size == UNKNOWN { columns } else { max_pages.saturating_mul(page_size) };
    Ok(Indexer { columns, keys: columns.min(room), page_size: Some(page_size), ..found })
}
