//! The rules of `volta_fa::fwd_kvcache`, and of `volta_fa::fwd_mla`, whose cache has latents for keys and values.

use super::quantized::{cache_format, check_scales};
use super::*;
use crate::options::KvCacheOptions;
use crate::params::CacheFormat;

/// The options of a call, with its tensors described.
pub type CacheOptions = KvCacheOptions<TensorDesc>;

/// Pages have whole groups of so many tokens: rows that the kernels load at once, and what every server's page sizes are multiples of.
const PAGE_GROUP: i64 = 16;

/// A checked call: attention of new queries over keys and values in a cache. Of tensors without data, sizes may be [`UNKNOWN`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CachedAttention {
    /// sequences
    pub batch: i64,
    /// queries of every sequence; packed, of the longest that there can be
    pub seqlen_q: i64,
    /// rows of packed q; None: dense, with a batch dimension
    pub total_q: Option<i64>,
    /// query heads; a multiple of nheads_k
    pub nheads: i64,
    /// heads of the caches
    pub nheads_k: i64,
    /// what the caches' elements are
    pub format: CacheFormat,
    /// of q and the cached keys, 1 to [`MAX_HEADDIM`], or that of latents
    pub headdim: i64,
    /// of the cached values and out, 1 to [`MAX_HEADDIM`], or that of latents
    pub headdim_v: i64,
    /// pages of the caches; where dense, entries
    pub entries: i64,
    /// tokens of a page; where dense, of an entry
    pub rows: i64,
    /// pages that the table has room for in each sequence; None: dense
    pub max_pages: Option<i64>,
    /// the most keys that a sequence can have
    pub seqlen_k: i64,
    /// the most that this call appends to a sequence; 0: nothing
    pub seqlen_new: i64,
    /// rows of packed k and v to append; None: dense, or nothing to append
    pub total_new: Option<i64>,
    /// dimensions of a head that are rotated; 0: none
    pub rotary_dim: i64,
    /// positions that the rotary tables have
    pub rotary_rows: i64,
    /// finite as fp32; may be 0 or negative
    pub softmax_scale: f64,
    /// which keys a row sees, is_causal included; aligned to the lengths after appending
    pub window: Window,
    /// 0: off
    pub softcap: f64,
    /// `alibi_slopes` is given
    pub alibi: bool,
    /// `sinks` is given
    pub sinks: bool,
    /// ranges of keys that a sequence's are split into; 0: as the schedule finds best
    pub num_splits: i64,
}

impl CachedAttention {
    /// No output element.
    pub fn is_empty(&self) -> bool {
        [self.batch, self.nheads, self.total_q.unwrap_or(self.seqlen_q)].contains(&0)
    }

    /// The argument that has the keys.
    fn keys(&self) -> &'static str {
        match self.has_latents() {
            true => "latent_cache",
            false => "k_cache",
        }
    }

    /// Whether values are the first columns of keys: no other headdim is so large.
    pub fn has_latents(&self) -> bool {
        self.headdim > MAX_HEADDIM
    }

    /// Whether each query of a sequence is rotated by a position of its own: where a mask orders them. Else all are by that of the
    /// first, as in flash-attn.
    pub fn queries_have_positions(&self) -> bool {
        self.window.left.is_some() || self.window.right.is_some()
    }

    /// Shape of out.
    pub fn out_shape(&self) -> Vec<i64> {
        match self.total_q {
            Some(total) => vec![total, self.nheads, self.headdim_v],
            None => vec![self.batch, self.seqlen_q, self.nheads, self.headdim_v],
        }
    }

    /// Shape of softmax_lse.
    pub fn lse_shape(&self) -> Vec<i64> {
        match self.total_q {
            Some(total) => vec![self.nheads, total],
            None => vec![self.batch, self.nheads, self.seqlen_q],
        }
    }
}

/// A vector or table of int32 on q's device, whose last dimension is contiguous.
fn check_ints(name: &str, d: &TensorDesc, q: &TensorDesc, expected: &[i64], what: &str) -> Result<()> {
    if d.dtype != DType::Int32 {
        return Err(Error::value(name, format!("dtype {}", d.dtype), "torch.int32"));
    }
    if !same_sizes(&d.sizes, expected) {
        return Err(Error::value(name, shape(d), format!("shape {what}, here {}", listed(expected))));
    }
    let last = d.sizes.len() - 1;
    if d.sizes[last] > 1 && !same_size(d.strides[last], 1) {
        return Err(Error::value(
            name,
            format!("stride {} in the last dimension", d.strides[last]),
            "a contiguous last dimension (stride 1)",
        ));
    }
    check_same(name, "device", d.device, "q", q.device)
}

/// What the tensors of q, and of k and v to append, have in common: sizes, packed or not.
fn check_new(name: &str, d: &TensorDesc, q: &TensorDesc, cu_seqlens: Option<&str>, backend: Backend) -> Result<Sizes> {
    let wrong = |allowed: String| Err(Error::value(name, format!("a tensor of rank {} with {}", d.sizes.len(), shape(d)), allowed));
    let sizes = match (cu_seqlens, &d.sizes[..]) {
        (None, &[batch, rows, nheads, headdim]) => Sizes { batch, rows, nheads, headdim },
        (Some(_), &[rows, nheads, headdim]) => Sizes { batch: 0, rows, nheads, headdim },
        (None, _) => return wrong("rank 4, (batch, seqlen, nheads, headdim); packed (total, nheads, headdim) needs cu_seqlens_q".into()),
        (Some(cu), _) => return wrong(format!("rank 3, (total, nheads, headdim), since {cu} is given")),
    };
    check_dtype(name, d, backend)?;
    check_same(name, "dtype", d.dtype, "q", q.dtype)?;
    check_same(name, "device", d.device, "q", q.device)?;
    check_layout(name, d, backend)?;
    if sizes.rows > MAX_SEQLEN {
        let rows = if cu_seqlens.is_some() { "total" } else { "seqlen" };
        return Err(Error::value(name, format!("{rows} {}", sizes.rows), format!("at most {MAX_SEQLEN}")));
    }
    Ok(sizes)
}

/// A cache: (entries or pages, rows, nheads_k, headdim).
fn check_cache(name: &str, d: &TensorDesc, q: &TensorDesc, paged: bool, backend: Backend) -> Result<[i64; 4]> {
    let Ok(sizes) = <[i64; 4]>::try_from(&d.sizes[..]) else {
        let layout = match paged {
            true => "(pages, page_size, nheads_k, headdim), since block_table is given",
            false => "(batch, seqlen, nheads_k, headdim); pages (pages, page_size, nheads_k, headdim) need a block_table",
        };
        return Err(Error::value(name, format!("a tensor of rank {} with {}", d.sizes.len(), shape(d)), format!("rank 4, {layout}")));
    };
    check_same(name, "device", d.device, "q", q.device)?;
    check_layout(name, d, backend)?;
    let rows = sizes[1];
    if paged && rows != UNKNOWN && (rows < 1 || rows % PAGE_GROUP != 0) {
        return Err(Error::value(name, format!("pages of {rows} tokens"), format!("a page_size that is a multiple of {PAGE_GROUP}")));
    }
    for (what, n) in [(if paged { "pages" } else { "batch" }, sizes[0]), ("rows", rows)] {
        if n > MAX_SEQLEN {
            return Err(Error::value(name, format!("{what} {n}"), format!("at most {MAX_SEQLEN}")));
        }
    }
    Ok(sizes)
}

/// Which positions the rotary tables have, and how many dimensions they rotate.
fn check_rotary(o: &CacheOptions, q: &TensorDesc, headdim: i64, appends: bool) -> Result<(i64, i64)> {
    let (cos, sin) = match (&o.rotary_cos, &o.rotary_sin) {
        (None, None) => return Ok((0, 0)),
        (Some(cos), Some(sin)) => (cos, sin),
        (Some(_), None) => return Err(Error::value("rotary_sin", "None", "a tensor, since rotary_cos is given")),
        (None, Some(_)) => return Err(Error::value("rotary_cos", "None", "a tensor, since rotary_sin is given")),
    };
    if !appends {
        return Err(Error::value("rotary_cos", "a tensor", "None: there are no k and v to append, by whose positions q is rotated"));
    }
    for (name, d) in [("rotary_cos", cos), ("rotary_sin", sin)] {
        if d.dtype != q.dtype && d.dtype != DType::Float {
            return Err(Error::value(name, format!("dtype {}", d.dtype), format!("{} (q's) or torch.float32", q.dtype)));
        }
        check_same(name, "device", d.device, "q", q.device)?;
    }
    let too_wide = |n: i64| n != UNKNOWN && headdim != UNKNOWN && (n < 1 || 2 * n > headdim);
    match cos.sizes[..] {
        [_, half] if !too_wide(half) => {}
        _ => {
            let allowed = format!("shape (seqlen_rotary, rotary_dim / 2) with rotary_dim at most headdim {}", number(headdim));
            return Err(Error::value("rotary_cos", shape(cos), allowed));
        }
    }
    if sin.dtype != cos.dtype {
        return Err(Error::value("rotary_sin", format!("dtype {}", sin.dtype), format!("{}, that of rotary_cos", cos.dtype)));
    }
    if !same_sizes(&sin.sizes, &cos.sizes) {
        return Err(Error::value("rotary_sin", shape(sin), format!("{}, that of rotary_cos", shape(cos))));
    }
    for (name, d) in [("rotary_cos", cos), ("rotary_sin", sin)] {
        if d.sizes[1] > 1 && !same_size(d.strides[1], 1) {
            return Err(Error::value(
                name,
                format!("stride {} in the last dimension", d.strides[1]),
                "a contiguous last dimension (stride 1)",
            ));
        }
    }
    let half = cos.sizes[1];
    Ok((if half == UNKNOWN { UNKNOWN } else { 2 * half }, cos.sizes[0]))
}

/// Check everything about q, the caches, what is appended (k and v) and the options.
///
/// # Errors
/// `Value` for a wrong argument.
pub fn validate_kvcache(
    q: &TensorDesc,
    k_cache: &TensorDesc,
    v_cache: &TensorDesc,
    appended: Option<[&TensorDesc; 2]>,
    o: &CacheOptions,
    backend: Backend,
) -> Result<CachedAttention> {
    validate_cached(q, k_cache, Some(v_cache), appended, o, backend)
}

/// Check everything about q, a cache of latents and the options.
///
/// # Errors
/// `Value` for a wrong argument.
pub fn validate_mla(q: &TensorDesc, latent_cache: &TensorDesc, o: &CacheOptions, backend: Backend) -> Result<CachedAttention> {
    validate_cached(q, latent_cache, None, None, o, backend)
}

/// What latents have to be.
fn check_latents(nheads_k: i64, headdim: i64) -> Result<()> {
    let [latent, rotary] = LATENT_HEADDIMS;
    if !same_size(nheads_k, 1) {
        let allowed = "1: all query heads share one head of latents";
        return Err(Error::value("latent_cache", format!("nheads_k {nheads_k}"), allowed));
    }
    if !same_size(headdim, latent + rotary) {
        let allowed =
            format!("headdim {}: a latent of {latent} columns, which are the values too, and {rotary} for positions", latent + rotary);
        return Err(Error::value("latent_cache", format!("headdim {headdim}"), allowed));
    }
    Ok(())
}

/// `v_cache`: None where the values are the first columns of the keys.
fn validate_cached(
    q: &TensorDesc,
    k_cache: &TensorDesc,
    v_cache: Option<&TensorDesc>,
    appended: Option<[&TensorDesc; 2]>,
    o: &CacheOptions,
    backend: Backend,
) -> Result<CachedAttention> {
    let keys = if v_cache.is_some() { "k_cache" } else { "latent_cache" };
    let CacheOptions { softmax_scale, softcap, is_causal, window_left, window_right, .. } = *o;
    let scores = Scores { softmax_scale, softcap, is_causal, window_left, window_right };
    scores.check(backend)?;
    if o.num_splits < 0 && !(o.num_splits == UNKNOWN && backend == Backend::Meta) {
        return Err(Error::value("num_splits", o.num_splits, "0 (as the schedule finds best) or a number of splits from 1"));
    }
    let packed_q = o.cu_seqlens_q.as_ref().map(|_| "cu_seqlens_q");
    check_dtype("q", q, backend)?;
    let qs = check_new("q", q, q, packed_q, backend)?;
    let paged = o.block_table.is_some();
    let format = cache_format(keys, k_cache, q, v_cache.is_none())?;
    if let Some(v_cache) = v_cache {
        check_same("v_cache", "dtype", v_cache.dtype, "k_cache", k_cache.dtype)?;
    }
    let [entries, rows, nheads_k, elements] = check_cache(keys, k_cache, q, paged, backend)?;
    let headdim = format.columns(elements);
    let headdim_v = match v_cache {
        None => {
            check_latents(nheads_k, headdim)?;
            check_same_size("q", "headdim", qs.headdim, keys, headdim)?;
            LATENT_HEADDIMS[0]
        }
        Some(v_cache) => {
            let vs = check_cache("v_cache", v_cache, q, paged, backend)?;
            if !same_sizes(&vs[..3], &[entries, rows, nheads_k]) {
                let expected = format!("({}, {}, {}, headdim_v), as k_cache", number(entries), number(rows), number(nheads_k));
                return Err(Error::value("v_cache", shape(v_cache), format!("shape {expected}")));
            }
            let headdim_v = format.columns(vs[3]);
            check_same_size("k_cache", "headdim", headdim, "q", qs.headdim)?;
            if headdim == LATENT_HEADDIMS.iter().sum::<i64>() {
                let given = format!("a cache of values beside keys of headdim {headdim}");
                return Err(Error::value("v_cache", given, "volta_fa::fwd_mla for latents, whose first columns are the values"));
            }
            check_headdim("q", "headdim", qs.headdim)?;
            check_headdim("v_cache", "headdim", headdim_v)?;
            headdim_v
        }
    };
    check_heads(qs.nheads, nheads_k, "k_cache and v_cache")?;

    let (batch, seqlen_q) = match &o.cu_seqlens_q {
        None => match o.max_seqlen_q {
            None => (qs.batch, qs.rows),
            Some(n) => return Err(Error::value("max_seqlen_q", number(n), "None, since cu_seqlens_q is not given")),
        },
        Some(cu) => {
            check_lengths("cu_seqlens_q", cu, q, None, "(batch + 1,)")?;
            let batch = if cu.sizes[0] == UNKNOWN { UNKNOWN } else { cu.sizes[0] - 1 };
            if batch == 0 && qs.rows > 0 {
                let allowed = format!("shape (batch + 1,) of one sequence or more, to which the {} rows belong", qs.rows);
                return Err(Error::value("cu_seqlens_q", shape(cu), allowed));
            }
            let longest = match o.max_seqlen_q {
                None => {
                    return Err(Error::value("max_seqlen_q", "None", "the length of the longest sequence, since cu_seqlens_q is given"))
                }
                Some(UNKNOWN) if backend == Backend::Meta => UNKNOWN,
                Some(n) if !(0..=MAX_GIVEN_SEQLEN).contains(&n) => {
                    return Err(Error::value("max_seqlen_q", n, format!("a length from 0 to {MAX_GIVEN_SEQLEN}")));
                }
                Some(0) if qs.rows > 0 => {
                    let allowed = format!("the length of the longest sequence, at least 1: there are {} rows", qs.rows);
                    return Err(Error::value("max_seqlen_q", 0, allowed));
                }
                Some(n) => n.min(qs.rows),
            };
            (batch, longest)
        }
    };
    if batch > MAX_SEQUENCES {
        return Err(Error::value("q", format!("{batch} sequences"), format!("at most {MAX_SEQUENCES}")));
    }

    let (max_pages, seqlen_k) = match &o.block_table {
        Some(table) => {
            let max_pages = table.sizes.get(1).copied().unwrap_or(UNKNOWN);
            check_ints("block_table", table, q, &[batch, max_pages], "(batch, max_pages)")?;
            for (name, t) in [("cache_batch_idx", &o.cache_batch_idx), ("leftpad_k", &o.leftpad_k)] {
                if t.is_some() {
                    return Err(Error::value(name, "a tensor", "None, since block_table is given"));
                }
            }
            let known = max_pages != UNKNOWN && rows != UNKNOWN;
            let seqlen_k = if known { max_pages.saturating_mul(rows) } else { UNKNOWN };
            if seqlen_k > MAX_SEQLEN {
                let given = format!("{} pages of {rows} tokens", max_pages);
                return Err(Error::value("block_table", given, format!("room for at most {MAX_SEQLEN} tokens in a sequence")));
            }
            (Some(max_pages), seqlen_k)
        }
        None => {
            if o.cache_batch_idx.is_none() && !same_size(entries, batch) {
                let allowed = format!("batch {}, that of q, or cache_batch_idx, which says whose is whose", number(batch));
                return Err(Error::value(keys, format!("batch {entries}"), allowed));
            }
            (None, rows)
        }
    };
    for (name, t) in [("cache_seqlens", &o.cache_seqlens), ("cache_batch_idx", &o.cache_batch_idx), ("leftpad_k", &o.leftpad_k)] {
        if let Some(d) = t {
            check_ints(name, d, q, &[batch], "(batch,)")?;
        }
    }

    let (seqlen_new, total_new) = match appended {
        None => match &o.cu_seqlens_k_new {
            Some(_) => return Err(Error::value("cu_seqlens_k_new", "a tensor", "None: there are no k and v to append")),
            None => (0, None),
        },
        Some([k, v]) => {
            let packed = o.cu_seqlens_k_new.as_ref().map(|_| "cu_seqlens_k_new").or(packed_q);
            let ks = check_new("k", k, q, packed, backend)?;
            let vs = check_new("v", v, q, packed, backend)?;
            if !same_sizes(&v.sizes[..v.sizes.len() - 1], &k.sizes[..k.sizes.len() - 1]) {
                return Err(Error::value("v", shape(v), format!("{}, that of k, but for the headdim", shape(k))));
            }
            for (name, sizes, headdim, cache) in [("k", ks, headdim, "k_cache"), ("v", vs, headdim_v, "v_cache")] {
                check_same_size(name, "nheads", sizes.nheads, cache, nheads_k)?;
                check_same_size(name, "headdim", sizes.headdim, cache, headdim)?;
            }
            if o.cache_seqlens.is_none() {
                return Err(Error::value("cache_seqlens", "None", "a tensor: k and v are appended behind these lengths"));
            }
            match (&o.cu_seqlens_k_new, packed) {
                (Some(cu), _) => {
                    check_lengths("cu_seqlens_k_new", cu, q, Some(if batch == UNKNOWN { UNKNOWN } else { batch + 1 }), "(batch + 1,)")?;
                    (ks.rows, Some(ks.rows))
                }
                (None, Some(_)) => {
                    check_same_size("k", "total", ks.rows, "q, since cu_seqlens_k_new is not given", qs.rows)?;
                    (seqlen_q, Some(ks.rows))
                }
                (None, None) => {
                    check_same_size("k", "batch", ks.batch, "q", batch)?;
                    if ks.rows != UNKNOWN && seqlen_k != UNKNOWN && ks.rows > seqlen_k {
                        let allowed = format!("at most {seqlen_k}, which is what a sequence has room for");
                        return Err(Error::value("k", format!("seqlen {}", ks.rows), allowed));
                    }
                    (ks.rows, None)
                }
            }
        }
    };
    check_scales(o, format, [entries, rows, nheads_k], batch, q, v_cache.is_none())?;
    let (rotary_dim, rotary_rows) = check_rotary(o, q, headdim, appended.is_some())?;
    if let Some(d) = &o.alibi_slopes {
        check_alibi(d, q, batch, qs.nheads)?;
    }
    if let Some(d) = &o.sinks {
        check_sinks(d, q, qs.nheads)?;
    }
    Ok(CachedAttention {
        batch,
        seqlen_q,
        total_q: packed_q.map(|_| qs.rows),
        nheads: qs.nheads,
        nheads_k,
        format,
        headdim,
        headdim_v,
        entries,
        rows,
        max_pages,
        seqlen_k,
        seqlen_new,
        total_new,
        rotary_dim,
        rotary_rows,
        softmax_scale: scores.scale(headdim),
        window: scores.window(),
        softcap,
        alibi: o.alibi_slopes.is_some(),
        sinks: o.sinks.is_some(),
        num_splits: o.num_splits,
    })
}

/// The values of a call's int32 tensors, where somebody has read them.
#[derive(Clone, Debug, Default)]
#[allow(missing_docs)] // the options' names
pub struct CacheValues {
    pub cache_seqlens: Option<Vec<i32>>,
    pub cu_seqlens_q: Option<Vec<i32>>,
    pub cu_seqlens_k_new: Option<Vec<i32>>,
    /// row by row
    pub block_table: Option<Vec<i32>>,
    pub cache_batch_idx: Option<Vec<i32>>,
    pub leftpad_k: Option<Vec<i32>>,
}

/// The lengths of one sequence, once they are known and right.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CachedSequence {
    /// its queries
    pub seqlen_q: i64,
    /// what is appended to it
    pub seqlen_new: i64,
    /// tokens in the cache before that, those of leftpad included
    pub cached: i64,
    /// of these so many, the first, do not exist
    pub leftpad: i64,
}

impl CachedSequence {
    /// Keys that the queries see after appending, leftpad not included.
    pub fn seqlen_k(&self) -> i64 {
        self.cached + self.seqlen_new - self.leftpad
    }

    /// The first and the end of the positions that some query sees, appended tokens included. Pages outside need not exist: servers
    /// give back what a sliding window has left behind.
    pub fn visible(&self, window: Window) -> (i64, i64) {
        let end = self.cached + self.seqlen_new;
        if self.seqlen_q == 0 {
            return (end, end);
        }
        let first = window.left.map_or(0, |left| (end - self.seqlen_q).saturating_sub(left));
        (first.max(self.leftpad).min(end), end)
    }
}

/// Check the values in a call's int32 tensors, and say how long each sequence is.
///
/// # Errors
/// `Value`, naming the argument.
pub fn validate_kvcache_values(a: &CachedAttention, values: &CacheValues) -> Result<Vec<CachedSequence>> {
    if let (Some(cu), Some(total)) = (&values.cu_seqlens_q, a.total_q) {
        check_cu_seqlens("cu_seqlens_q", cu, total, "max_seqlen_q", a.seqlen_q)?;
    }
    if let (Some(cu), Some(total)) = (&values.cu_seqlens_k_new, a.total_new) {
        check_cu_seqlens("cu_seqlens_k_new", cu, total, "k", total)?;
    }
    let length = |cu: &Option<Vec<i32>>, b: usize, dense: i64| cu.as_ref().map_or(dense, |cu| i64::from(cu[b + 1] - cu[b]));
    let at = |t: &Option<Vec<i32>>, b: usize, default: i64| t.as_ref().map_or(default, |t| i64::from(t[b]));
    let cu_new = if a.total_new.is_some() && values.cu_seqlens_k_new.is_none() { &values.cu_seqlens_q } else { &values.cu_seqlens_k_new };
    (0..a.batch as usize)
        .map(|b| {
            let seqlen_q = length(&values.cu_seqlens_q, b, a.seqlen_q);
            let seqlen_new = length(cu_new, b, a.seqlen_new);
            let cached = at(&values.cache_seqlens, b, a.seqlen_k);
            let room = a.seqlen_k - seqlen_new;
            if !(0..=room).contains(&cached) {
                let why = match seqlen_new {
                    0 => format!("a length from 0 to {room}"),
                    _ => format!("a length from 0 to {room}, behind which {seqlen_new} more fit into {}", a.seqlen_k),
                };
                return Err(Error::value("cache_seqlens", format!("{cached} (entry {b})"), why));
            }
            if a.rotary_dim > 0 {
                let positions = cached + seqlen_new.max(if a.queries_have_positions() { seqlen_q } else { seqlen_q.min(1) });
                if positions > a.rotary_rows {
                    let given = format!("{} positions", a.rotary_rows);
                    return Err(Error::value("rotary_cos", given, format!("at least {positions}, which sequence {b} reaches")));
                }
            }
            let leftpad = at(&values.leftpad_k, b, 0);
            if !(0..=cached).contains(&leftpad) {
                let allowed = format!("a number from 0 to {cached}, the cached tokens of the sequence");
                return Err(Error::value("leftpad_k", format!("{leftpad} (entry {b})"), allowed));
            }
            let entry = at(&values.cache_batch_idx, b, b as i64);
            if !(0..a.entries).contains(&entry) && a.max_pages.is_none() {
                let allowed = format!("a number below {}, the entries of {}", a.entries, a.keys());
                return Err(Error::value("cache_batch_idx", format!("{entry} (entry {b})"), allowed));
            }
            let sequence = CachedSequence { seqlen_q, seqlen_new, cached, leftpad };
            if let (Some(table), Some(max_pages)) = (&values.block_table, a.max_pages) {
                // what is read, and what is written
                for (first, end) in [sequence.visible(a.window), (cached, cached + seqlen_new)] {
                    let pages = first / a.rows..(end + a.rows - 1) / a.rows;
                    for i in pages.filter(|_| first < end) {
                        let page = table[b * max_pages as usize + i as usize];
                        if !(0..a.entries).contains(&i64::from(page)) {
                            let allowed = format!("a number below {}, the pages of {}", a.entries, a.keys());
                            return Err(Error::value("block_table", format!("{page} (page {i} of sequence {b})"), allowed));
                        }
                    }
                }
            }
            Ok(sequence)
        })
        .collect()
}
