//! Rules of a KV cache: its tensors, its pages or entries, and which of them belong to a sequence. cached.rs calls them. A dense cache has
//! entries of one sequence each. A paged one has pages, which a block table assigns to sequences. A cache of latents has one tensor: a
//! vector per token, which is key and value of all heads. Sizes may be unknown (meta kernels).

use super::attention::{Cache, CacheLayout};
use super::checks::*; // check_... and reject_if!: errors for the user; unknown sizes pass
use super::formats::{cache_format, key_format}; // formats by dtypes: of a cache with keys and values; of keys or latents
use super::operands::check_headdim;
use super::tensor::{Backend, Options, TensorDesc};
use crate::error::{Error, Result};
use crate::limits::{LATENT_HEADDIMS, MAX_SEQLEN, PAGE_SIZE_MULTIPLE}; // 512, then 64 columns; 2^29 - 1; 16
use crate::options::UNKNOWN; // a symbolic size or number (torch.compile)
use crate::params::CacheFormat;

/// The tensors of a cache.
#[derive(Clone, Copy)]
pub struct CacheTensors<'a> {
    /// Keys, or latents.
    pub keys: &'a TensorDesc,
    /// Values; None: the first columns of the keys.
    pub values: Option<&'a TensorDesc>,
}

/// Shape that the tensors of a cache share.
#[derive(Clone, Copy)]
pub struct CacheShape {
    /// Entries, or pages.
    entries: i64,
    /// Tokens of an entry or page.
    rows: i64,
    format: CacheFormat, // a pair, if keys and values differ
    pub nheads_k: i64,
    /// Columns of keys, dequantized.
    pub headdim: i64,
    /// Columns of values, dequantized.
    pub headdim_v: i64,
}

impl CacheShape {
    pub fn cache(&self, layout: CacheLayout) -> Cache {
        Cache { layout, entries: self.entries, rows: self.rows, format: self.format }
    }
}

impl CacheTensors<'_> {
    pub fn name(&self) -> &'static str {
        match self.values {
            Some(_) => "k_cache",
            None => "latent_cache",
        }
    }

    /// Rejects caches, and scales of tokens, that an append cannot write.
    pub fn check_written(&self, o: &Options) -> Result<()> {
        let caches = [(self.name(), Some(self.keys)), ("v_cache", self.values)];
        let scales = o.token_scales().map(|(name, t)| (name, t.as_ref()));
        let given = caches.into_iter().chain(scales).filter_map(|(name, d)| Some((name, d?)));
        given.into_iter().try_for_each(|(name, d)| check_written(name, d))
    }

    /// Checks dtypes and shapes against q; `o` says whether there are pages, and which scales.
    pub fn check(&self, q: &TensorDesc, headdim_q: i64, o: &Options, backend: Backend) -> Result<CacheShape> {
        let paged = o.block_table.is_some();
        let format = key_format(self.name(), self.keys, q, self.values.is_none())?;
        let [entries, rows, nheads_k, elements] = check_cache_tensor(self.name(), self.keys, q, paged, backend)?;
        let headdim = format.columns(elements);
        // headdim_v is that of latents, 512; a cache of values sets its own
        let mut shape = CacheShape { entries, rows, format, nheads_k, headdim, headdim_v: LATENT_HEADDIMS[0] };
        match self.values {
            None => check_latents(&shape, headdim_q)?,
            Some(v_cache) => {
                shape.format = cache_format(format, self.keys, v_cache)?;
                shape.headdim_v = check_values(v_cache, q, &shape, headdim_q, paged, backend)?;
            }
        }
        Ok(shape)
    }
}

/// Checks a cache of values beside the keys' and returns its headdim.
fn check_values(v_cache: &TensorDesc, q: &TensorDesc, keys: &CacheShape, headdim_q: i64, paged: bool, backend: Backend) -> Result<i64> {
    let values @ [.., elements] = check_cache_tensor("v_cache", v_cache, q, paged, backend)?;
    let expected = [keys.entries, keys.rows, keys.nheads_k];
    if !same_sizes(&values[..3], &expected) {
        let [entries, rows, nheads_k] = expected.map(number);
        return Err(Error::value("v_cache", shape(v_cache), format!("shape ({entries}, {rows}, {nheads_k}, headdim_v), as k_cache")));
    }
    check_same_size("k_cache", "headdim", keys.headdim, "q", headdim_q)?;
    if keys.headdim == LATENT_HEADDIMS.iter().sum::<i64>() {
        let given = format!("a cache of values beside keys of headdim {}", keys.headdim);
        return Err(Error::value("v_cache", given, "volta_fa::fwd_mla for latents, whose first columns are the values"));
    }
    let [_, of_values] = keys.format.parts(); // formats of keys and of values
    let headdim_v = of_values.columns(elements);
    check_headdim("q", headdim_q)?;
    check_headdim("v_cache", headdim_v)?;
    Ok(headdim_v)
}

/// Checks a (entries or pages, rows, nheads_k, elements) tensor and returns its sizes.
fn check_cache_tensor(name: &str, d: &TensorDesc, q: &TensorDesc, paged: bool, backend: Backend) -> Result<[i64; 4]> {
    let Ok(sizes) = <[i64; 4]>::try_from(&d.sizes[..]) else {
        let layout = match paged {
            true => "(pages, page_size, nheads_k, headdim), since block_table is given",
            false => "(batch, seqlen, nheads_k, headdim); pages (pages, page_size, nheads_k, headdim) need a block_table",
        };
        return Err(Error::value(name, rank(d), format!("rank 4, {layout}")));
    };
    check_device(name, d, q)?;
    check_layout(name, d, backend)?;
    let rows = sizes[1];
    if paged && rows != UNKNOWN && (rows < 1 || rows % PAGE_SIZE_MULTIPLE != 0) {
        let allowed = format!("a page_size that is a multiple of {PAGE_SIZE_MULTIPLE}");
        return Err(Error::value(name, format!("pages of {rows} tokens"), allowed));
    }
    check_at_most(name, if paged { "pages" } else { "batch" }, sizes[0], MAX_SEQLEN)?;
    check_at_most(name, "rows", rows, MAX_SEQLEN)?;
    Ok(sizes)
}

fn check_latents(shape: &CacheShape, headdim_q: i64) -> Result<()> {
    let [latent, rotary] = LATENT_HEADDIMS;
    if !same_size(shape.nheads_k, 1) {
        let given = format!("nheads_k {}", shape.nheads_k);
        return Err(Error::value("latent_cache", given, "1: all query heads share one head of latents"));
    }
    if !same_size(shape.headdim, latent + rotary) {
        let allowed =
            format!("headdim {}: a latent of {latent} columns, which are the values too, and {rotary} for positions", latent + rotary);
        return Err(Error::value("latent_cache", format!("headdim {}", shape.headdim), allowed));
    }
    check_same_size("q", "headdim", headdim_q, "latent_cache", shape.headdim)
}

/// Checks which entries or pages belong to which sequence. Returns the layout and the most keys of a sequence. `keys`: the cache's name.
pub fn check_sequences(keys: &str, shape: &CacheShape, o: &Options, q: &TensorDesc, batch: i64) -> Result<(CacheLayout, i64)> {
    let found = match &o.block_table {
        Some(table) => check_pages(shape, table, o, q, batch)?,
        None if o.cache_batch_idx.is_none() && !same_size(shape.entries, batch) => {
            let allowed = format!("batch {}, as q, or cache_batch_idx to map sequences to cache entries", number(batch));
            return Err(Error::value(keys, format!("batch {}", shape.entries), allowed));
        }
        None => (CacheLayout::Entries, shape.rows),
    };
    for (name, t) in [("cache_seqlens", &o.cache_seqlens), ("cache_batch_idx", &o.cache_batch_idx), ("leftpad_k", &o.leftpad_k)] {
        if let Some(d) = t {
            check_int32(name, d, q, &[batch], "(batch,)")?;
        }
    }
    Ok(found)
}

fn check_pages(shape: &CacheShape, table: &TensorDesc, o: &Options, q: &TensorDesc, batch: i64) -> Result<(CacheLayout, i64)> {
    let (max_pages, page_size) = (table.sizes.get(1).copied().unwrap_or(UNKNOWN), shape.rows);
    check_int32("block_table", table, q, &[batch, max_pages], "(batch, max_pages)")?;
    for (name, t) in [("cache_batch_idx", &o.cache_batch_idx), ("leftpad_k", &o.leftpad_k)] {
        reject_if!(t.is_some(), name, "a tensor", "None, since block_table is given");
    }
    let is_known = max_pages != UNKNOWN && page_size != UNKNOWN;
    let seqlen_k = if is_known { max_pages.saturating_mul(page_size) } else { UNKNOWN };
    if seqlen_k > MAX_SEQLEN {
        let given = format!("{max_pages} pages of {page_size} tokens");
        return Err(Error::value("block_table", given, format!("room for at most {MAX_SEQLEN} tokens in a sequence")));
    }
    Ok((CacheLayout::Pages { max_pages }, seqlen_k))
}
