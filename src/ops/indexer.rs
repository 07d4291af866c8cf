//! `volta_fa::indexer_logits`: the scores by which queries of sparse attention choose their tokens (DeepSeek V3.2, GLM-5):
//! `logits[query, key] = scale[key] * sum over heads of weights[query, head] * relu(q . codes of the key)`.
//!
//! q is (batch, seqlen_q, nheads, 128) in fp16, bf16 or e4m3, weights fp32 (batch, seqlen_q, nheads). Codes are fp8 numbers (e4m3) with an
//! fp32 scale for each key: k (total_k, 128) and k_scales, or pages that have both, bytes (pages, page_size, 1, 132). A query sees the keys
//! from `k_start` (default 0) up to `k_end`, exclusive; k_end of shape (batch,) is the last query's, and each query before sees one key
//! less. These and block tables stay on the device. What they name outside of memory is no key. src/operators.rs calls this module.

use super::inputs::Target; // ATen on the CPU, or kernels
use super::launches::Launches;
use crate::error::Result;
use crate::launch::{bytes_of, Launcher};
use crate::log;
use crate::params::{IndexerParams, QueryFormat};
use crate::plan;
// Indexer: sizes of a validated call; `keys`: of a sequence, at most `columns`. INDEXER_HEADDIM: 128
use crate::problem::{self, Backend, DType, Indexer, IndexerArgs, TensorDesc, INDEXER_HEADDIM};
use crate::tensor::{self, compute_kind, copied, describe, operand, read_range, readable, written_range};
use std::ffi::c_void;
use std::ptr::null;
use tch::{Kind, Tensor};

/// Most bytes of scores (of all heads, fp64) that the CPU backend holds at a time.
const SCORE_BYTES: i64 = 64 << 20;

/// Arguments of the operator.
pub struct Call {
    pub args: IndexerArgs<Tensor>,
    /// False: logits of keys that a query does not see are undefined.
    pub clean_logits: bool,
    pub stream: *mut c_void, // current cudaStream_t
}

/// Computes logits, fp32 (batch, seqlen_q, columns). Columns are total_k, or for pages max_seqlen_k: one for each key, -inf where a
/// query does not see it, or the block table has no room for it.
pub fn logits(call: &Call) -> Result<Tensor> {
    let q = describe(&call.args.q)?;
    // a CPU tensor in fp8 may select the simulator, as fp16 does
    let of_kernels = if q.dtype == DType::Float8E4m3 { TensorDesc { dtype: DType::Half, ..q } } else { q };
    let target = Target::of(&of_kernels, call.stream)?;
    let x = validate(call, target.backend())?;
    match target {
        Target::Kernels(launcher) if !x.is_empty() => on_device(call, &x, &*launcher),
        _ => on_cpu(call, &x),
    }
}

/// Rejects what [`logits`] would reject, as far as sizes of meta tensors are known.
pub fn check(call: &Call) -> Result<()> {
    validate(call, Backend::Meta).map(|_| ())
}

fn validate(call: &Call, backend: Backend) -> Result<Indexer> {
    let IndexerArgs { q, k, weights, k_end, k_start, k_scales, block_table, max_seqlen_k } = &call.args;
    let optional = |t: &Option<Tensor>| t.as_ref().map(describe).transpose();
    let descs = IndexerArgs {
        q: describe(q)?,
        k: describe(k)?,
        weights: describe(weights)?,
        k_end: describe(k_end)?,
        k_start: optional(k_start)?,
        k_scales: optional(k_scales)?,
        block_table: optional(block_table)?,
        max_seqlen_k: *max_seqlen_k,
    };
    problem::validate_indexer(&descs, backend)
}

/// Returns k on a boundary of 16 bytes, of rank 2 with contiguous rows; copies it if necessary.
fn keys(call: &Call, x: &Indexer) -> Result<Tensor> {
    let is_aligned = call.args.k.data_ptr() as usize % 16 == 0;
    let is_together = x.page_size.is_some() || call.args.k.size()[0] <= 1 || call.args.k.stride()[0] == INDEXER_HEADDIM;
    if is_aligned && is_together {
        return Ok(call.args.k.shallow_clone());
    }
    copied(&call.args.k, call.args.k.kind())
}

/// Computes logits with the indexer kernel.
fn on_device(call: &Call, x: &Indexer, launcher: &dyn Launcher) -> Result<Tensor> {
    let planned = plan::indexer(x, &launcher.limits()?)?;
    log::indexer(x, &planned)?;
    let (q, k) = (readable(&call.args.q)?, keys(call, x)?);
    let k_scales = call.args.k_scales.as_ref().map(Tensor::f_contiguous).transpose()?;
    let logits = tensor::empty(&[x.batch, x.seqlen_q, x.columns], Kind::Float, launcher)?;

    let mut ranges = Vec::new();
    if launcher.looks_at_memory() {
        let given = [&q, &k, &call.args.weights, &call.args.k_end]
            .into_iter()
            .chain(&k_scales)
            .chain(&call.args.k_start)
            .chain(&call.args.block_table);
        ranges.extend(given.map(|t| read_range("an argument", t)));
        ranges.push(written_range("logits", &logits));
    }
    let of_rows = |t: &Tensor| t.data_ptr() as *const i32;
    let strides = |t: &Tensor| [t.stride()[0], t.stride().get(1).copied().unwrap_or(0)];
    let (page_shift, pages, page_stride, codes_of_page) = match x.page_size {
        // rows: tokens of a page
        Some(rows) => (rows.trailing_zeros() as i32, k.size()[0], k.stride()[0], rows * INDEXER_HEADDIM),
        None => (31, 1, 0, 0), // one page of 2^31 keys, more than there are, whose scales are a tensor of their own
    };
    let scales = match &k_scales {
        Some(t) => t.data_ptr() as *const f32,
        None => (k.data_ptr() as *const u8).wrapping_offset(codes_of_page as isize).cast(),
    };
    let [weights_batch_stride, weights_row_stride] = strides(&call.args.weights);
    let [k_end_batch_stride, k_end_row_stride] = strides(&call.args.k_end);
    let [k_start_batch_stride, k_start_row_stride] = call.args.k_start.as_ref().map_or([0; 2], strides);
    // log2 of the rows of a query in a tile, one for each head: 5 or 6
    let head_shift = plan::indexer_head_shift(x.nheads);
    let queries_of_tile = i64::from(planned.variant.block_rows) >> head_shift;
    let params = IndexerParams {
        q: operand(&q, 0),
        q_format: match q.kind() {
            Kind::Half => QueryFormat::Half,
            Kind::BFloat16 => QueryFormat::Bf16,
            _ => QueryFormat::E4m3,
        },
        weights: call.args.weights.data_ptr() as *const f32,
        weights_batch_stride,
        weights_row_stride,
        k: k.data_ptr() as *const u16,
        page_stride,
        k_scales: scales,
        scales_page_stride: page_stride / 4, // from bytes to floats
        block_table: call.args.block_table.as_ref().map_or(null(), of_rows),
        block_table_stride: call.args.block_table.as_ref().map_or(0, |t| t.stride()[0]),
        page_shift,
        pages: pages as i32,
        k_start: call.args.k_start.as_ref().map_or(null(), of_rows),
        k_start_batch_stride,
        k_start_row_stride,
        k_end: of_rows(&call.args.k_end),
        k_end_batch_stride,
        k_end_row_stride,
        is_causal: i32::from(x.is_causal), // k_end is that of the last query alone
        batch: x.batch as i32,
        seqlen_q: x.seqlen_q as i32,
        nheads: x.nheads as i32,
        head_shift,
        keys: x.keys as i32,
        tiles: (x.batch * (x.seqlen_q as u64).div_ceil(queries_of_tile as u64) as i64) as i32,
        logits: logits.data_ptr() as *mut f32,
        columns: x.columns as i32,
        clean: i32::from(call.clean_logits),
    };
    // 1: the grid is as large as the GPU, and divides all batch entries itself
    Launches::begin_with(launcher, ranges).run(&planned, 1, bytes_of(&params))?;
    Ok(logits)
}

/// Computes logits with ATen, in fp32 or fp64.
fn on_cpu(call: &Call, x: &Indexer) -> Result<Tensor> {
    let kind = compute_kind(call.args.q.kind());
    let device = call.args.q.device();
    let logits = Tensor::f_full([x.batch, x.seqlen_q, x.columns], f64::NEG_INFINITY, (Kind::Float, device))?;
    let position = Tensor::f_arange(x.keys, (Kind::Int64, device))?;
    let at_once = (SCORE_BYTES / (8 * x.nheads * x.keys.max(1))).clamp(1, x.seqlen_q.max(1));
    for entry in 0..if x.keys == 0 { 0 } else { x.batch } {
        let (codes, scales, missing) = keys_of_entry(call, x, entry, &position)?;
        let codes_t = codes.f_to_kind(Kind::Float)?.f_to_kind(kind)?.f_transpose(0, 1)?;
        let scales = scales.f_to_kind(kind)?;
        for first in (0..x.seqlen_q).step_by(at_once as usize) {
            let rows = at_once.min(x.seqlen_q - first);
            let part = |t: &Tensor| t.f_select(0, entry)?.f_narrow(0, first, rows);
            // fp8 converts to fp32 alone
            let q = part(&call.args.q)?;
            let q = if q.kind() == Kind::Float8e4m3fn { q.f_to_kind(Kind::Float)? } else { q.f_to_kind(kind)? };
            let q = q.f_contiguous()?.f_view([1, rows * x.nheads, INDEXER_HEADDIM])?;
            let scores = q.f_bmm(&codes_t.f_unsqueeze(0)?)?;
            let weights = part(&call.args.weights)?.f_to_kind(kind)?.f_unsqueeze(-1)?;
            let weighted = scores.f_view([rows, x.nheads, x.keys])?.f_clamp_min(0.0)?.f_mul(&weights)?;
            let sums = weighted.f_sum_dim_intlist([1_i64].as_slice(), false, kind)?.f_mul(&scales)?.f_to_kind(Kind::Float)?;
            let hidden = unseen(call, x, entry, (first, rows), &position)?.f_logical_or(&missing)?;
            let own = logits.f_select(0, entry)?.f_narrow(0, first, rows)?.f_narrow(1, 0, x.keys)?;
            own.shallow_clone().f_copy_(&sums.f_masked_fill(&hidden, f64::NEG_INFINITY)?)?;
        }
    }
    Ok(logits)
}

/// Returns codes (keys, 128) and scales (keys) of a batch entry, and which are in no page (keys). A page has all codes, then fp32 scales.
fn keys_of_entry(call: &Call, x: &Indexer, entry: i64, position: &Tensor) -> Result<(Tensor, Tensor, Tensor)> {
    let (Some(page_size), Some(table)) = (x.page_size, &call.args.block_table) else {
        let scales = call.args.k_scales.as_ref().expect("validation checked it");
        return Ok((call.args.k.f_view_dtype(Kind::Float8e4m3fn)?, scales.shallow_clone(), position.f_lt(0)?));
    };
    let [pages, stride] = [call.args.k.size()[0], call.args.k.stride()[0]];
    let page = table.f_select(0, entry)?.f_to_kind(Kind::Int64)?.f_index_select(0, &position.f_floor_divide_scalar(page_size)?)?;
    let missing = page.f_lt(0)?.f_logical_or(&page.f_ge(pages)?)?;
    if pages == 0 {
        let zeros = |sizes: &[i64], kind| Tensor::f_zeros(sizes, (kind, call.args.q.device()));
        return Ok((zeros(&[x.keys, INDEXER_HEADDIM], Kind::Float)?, zeros(&[x.keys], Kind::Float)?, missing));
    }
    let place = [page.f_masked_fill(&missing, 0)?, position.f_remainder(page_size)?];
    let (codes, bytes) = (page_size * INDEXER_HEADDIM, page_size * (INDEXER_HEADDIM + 4));
    let flat = call.args.k.f_view_dtype(Kind::Uint8)?.f_as_strided([pages, bytes].as_slice(), [stride, 1].as_slice(), None)?;
    let rows = |from, bytes| -> Result<Tensor> {
        let rows = flat.f_narrow(1, from, bytes)?.f_unflatten(1, [page_size, -1].as_slice())?;
        Ok(rows.f_index(&[Some(&place[0]), Some(&place[1])])?.f_contiguous()?)
    };
    let scales = rows(codes, bytes - codes)?.f_view_dtype(Kind::Float)?.f_squeeze_dim(-1)?;
    Ok((rows(0, codes)?.f_view_dtype(Kind::Float8e4m3fn)?, scales, missing))
}

/// Returns which keys `rows` queries from query `first` on do not see: (rows, keys).
fn unseen(call: &Call, x: &Indexer, entry: i64, (first, rows): (i64, i64), position: &Tensor) -> Result<Tensor> {
    let of_entry = |t: &Tensor| -> Result<Tensor> { Ok(t.f_select(0, entry)?.f_to_kind(Kind::Int64)?) };
    let end = match x.is_causal {
        true => {
            let query = Tensor::f_arange(x.seqlen_q, (Kind::Int64, call.args.q.device()))?.f_narrow(0, first, rows)?;
            of_entry(&call.args.k_end)?.f_clamp_min(0)?.f_add(&query)?.f_add_scalar(1 - x.seqlen_q)?
        }
        false => of_entry(&call.args.k_end)?.f_narrow(0, first, rows)?,
    };
    let mut hidden = position.f_ge_tensor(&end.f_unsqueeze(1)?)?;
    if let Some(k_start) = &call.args.k_start {
        let start = of_entry(k_start)?.f_narrow(0, first, rows)?.f_unsqueeze(1)?;
        hidden = hidden.f_logical_or(&position.f_unsqueeze(0)?.f_lt_tensor(&start)?)?;
    }
    Ok(hidden)
}
