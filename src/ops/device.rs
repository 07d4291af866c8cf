//! `fwd` and `bwd` on kernels, on a GPU or in the simulator: plan, allocate with ATen, fill parameter blocks, launch. mod.rs calls it for
//! fp16 tensors, scaled.rs with fp16 casts of others. `given` is the call's problem, `a` the same with headdims padded to multiples of 8.
//!
//! A backward plan has a preprocess kernel (statistics of rows), main kernels (dk and dv, and dq into fp32 accumulators) and a postprocess
//! kernel (accumulators to dq). Variants of it do all in one kernel, or keep probabilities in memory between two ([`StoredMemory`]). On a
//! stream-K grid several blocks share the keys of a row tile (the rows of one block), backward: the queries of a block of keys.

use super::block_mask;
// Blocks: parts of parameter blocks, from a call's tensors; at: address of an element of an fp32 tensor
use super::blocks::{self, at, broadcast_strides, lse_at, Blocks};
use super::inputs::{Gradients, Inputs, Saved};
use super::launches::{memory_ranges, Launches};
use super::lse_gradient::add_to_stats;
use super::stream_k;
use crate::error::Result;
use crate::kernels::{ParamBlock, Scratch};
use crate::launch::{bytes_of, Launcher, SCRATCH};
use crate::log;
use crate::params::{BwdBlockParams, BwdParams, BwdStoredBlockParams, BwdStoredParams, FwdBlockParams, FwdParams, Lengths, StoredScores};
use crate::plan::{self, BackwardMode, PlannedKernel, StoredPlan, STORED_ROWS}; // 128: rows and columns of a stored tile
use crate::problem::{Attention, Window};
// readable: the tensor, or a copy that kernels can read; without_padding undoes its padded columns; operand and output: address and strides
// from a batch entry on; ranges are for the simulator
use crate::tensor::{self, operand, output, read_range, readable, without_padding, written_range};
use tch::{Kind, Tensor};

/// Computes (out, softmax_lse).
pub fn forward(inputs: &Inputs, given: &Attention, launcher: &dyn Launcher) -> Result<(Tensor, Tensor)> {
    let a = &given.padded();
    let planned = plan::forward(a, &launcher.limits()?)?;
    log::forward("forward", a, &planned)?;
    let converted = blocks::readable(inputs, a)?;
    let inputs = converted.as_ref().unwrap_or(inputs);
    let kind = if a.features.fp32_output { Kind::Float } else { inputs.q.kind() };
    let out = tensor::empty(&a.query_shape(a.headdim_v), kind, launcher)?;
    let softmax_lse = run_forward(&planned, inputs, a, &out, launcher)?;
    Ok((without_padding(out, given.headdim_v)?, softmax_lse))
}

/// Computes a planned forward pass into `out`. Returns softmax_lse.
pub(super) fn run_forward(kernel: &PlannedKernel, inputs: &Inputs, a: &Attention, out: &Tensor, launcher: &dyn Launcher) -> Result<Tensor> {
    let softmax_lse = tensor::empty(&a.lse_shape(), Kind::Float, launcher)?;
    let stream_k = kernel.stream_k.map(|plan| stream_k::Launch::new(kernel, plan, launcher)).transpose()?;
    let scratch = stream_k.as_ref().map(stream_k::Launch::scratch);
    let written = [("out", Some(out)), ("softmax_lse", Some(&softmax_lse)), (SCRATCH, scratch)];
    let launches = Launches::begin(inputs, a, launcher, written);
    fill_varlen(a, [out, &softmax_lse])?;
    // 0: sequences of any number of rows
    launch_forward((kernel, stream_k.as_ref()), inputs, a, [out, &softmax_lse], 0, &launches)?;
    Ok(softmax_lse)
}

/// Launches a forward kernel, perhaps on a stream-K grid. Kernels over a KV cache leave sequences of fewer than `min_rows` rows to others.
pub(super) fn launch_forward(
    (planned, stream_k): (&PlannedKernel, Option<&stream_k::Launch>),
    inputs: &Inputs,
    a: &Attention,
    [out, softmax_lse]: [&Tensor; 2],
    min_rows: i32,
    launches: &Launches,
) -> Result<()> {
    let out_is_fp32 = i32::from(out.kind() == Kind::Float);
    let blocks = block_mask::of_queries(&inputs.options);
    for (first, batches) in plan::batch_chunks(a.batch) {
        let Blocks { q, k, v, problem, lengths, score_options, cache, .. } = Blocks::new(inputs, a, (first, batches));
        let (out, softmax_lse) = (output(out, first), lse_at(softmax_lse, a, first));
        let forward = FwdParams { q, k, v, out, softmax_lse, problem, lengths, score_options, cache, min_rows, out_is_fp32 };
        match (stream_k, blocks) {
            (None, None) => launches.run(planned, batches, bytes_of(&forward))?,
            (None, Some(blocks)) => launches.run(planned, batches, bytes_of(&FwdBlockParams { forward, blocks }))?,
            // no stream-K kernel reads block lists (src/kernels), so plans never have both
            (Some(stream_k), _) => launches.run(planned, batches, bytes_of(&stream_k.params(forward, launches.launcher)?))?,
        }
    }
    Ok(())
}

/// Computes the gradients. `ds_factors`, with `mode.split` (fp32 numbers as sums of two fp16): q and k again, scaled for the products dS *
/// k and dS * q. Those of `inputs` are scaled for scores. `mode`: what the plan must observe beyond the problem, such as fp32 gradients.
pub fn backward(
    inputs: &Inputs,
    saved: &Saved,
    ds_factors: Option<&[Tensor; 2]>,
    given: &Attention,
    mode: BackwardMode,
    launcher: &dyn Launcher,
) -> Result<Gradients> {
    let a = &given.padded();
    let plan = plan::backward(a, mode, &launcher.limits()?)?;
    log::backward(a, mode, &plan)?;
    let (given_bias, given_sinks) = (&inputs.options.attn_bias, &inputs.options.sinks);
    let converted = blocks::readable(inputs, a)?;
    let inputs = converted.as_ref().unwrap_or(inputs);
    let Inputs { q, k, v, .. } = inputs;
    let (dout, out) = (readable(&saved.dout)?, readable(&saved.out)?);
    let softmax_lse = saved.softmax_lse.f_contiguous()?;
    let empty = |sizes: &[i64], kind| tensor::empty(sizes, kind, launcher);
    // with `mode.split`, operands are two fp16 parts side by side, and have twice the columns of a gradient
    let like = |t: &Tensor, columns: i64| {
        let mut sizes = t.size();
        let last = sizes.len() - 1;
        sizes[last] = columns;
        empty(&sizes, if mode.fp32_gradients { Kind::Float } else { t.kind() })
    };
    let (dq, dk, dv) = (like(q, a.headdim)?, like(k, a.headdim)?, like(v, a.headdim_v)?);
    // scratch memory, O(seqlen): statistics of each row, and accumulators of dq in fp32
    let (rows, columns) = (plan.scratch_rows, plan.headdim_rounded);
    // launches of a stream run in order, so the parts of a batch that is too large for one grid share the scratch memory
    let entries = a.total_q().map_or(plan.launch_entries(a.batch), |_| 1);
    // a group of rows has its statistics together: -lse / scale and -delta of each row (on volta each twice), in group_floats floats
    let (group_rows, group_floats) = (i64::from(plan.scratch.group_rows), i64::from(plan.scratch.group_floats));
    let row_stats = empty(&[entries, a.nheads, rows / group_rows, group_floats], Kind::Float)?;
    let dq_accum = empty(&[i64::from(plan.dq_accum_splits), entries, a.nheads, rows, columns], Kind::Float)?;
    let stream_k = plan.main.backward_stream_k.map(|division| stream_k::BackwardLaunch::new(&plan.main, division, launcher)).transpose()?;
    let stored = plan.stored.map(|tiles| StoredMemory::new(tiles, a, entries, launcher)).transpose()?;
    let bias = given_bias.as_ref().filter(|_| saved.attn_bias_requires_grad);
    let stores_dbias = plan.main.variant.family.stores_dbias && !mode.fp32_gradients && bias.is_some_and(|b| is_full_bias(b, a));
    let dbias = match bias {
        Some(bias) if stores_dbias => Some(empty(&bias.size(), Kind::Half)?),
        bias => bias.map(|bias| bias_accumulator(bias, a, mode.deterministic)).transpose()?,
    };
    let stored_dbias = dbias.as_ref().filter(|_| stores_dbias);
    let gradients = [("dq", Some(&dq)), ("dk", Some(&dk)), ("dv", Some(&dv)), ("dattn_bias", stored_dbias)];
    let mut ranges = memory_ranges(inputs, a, launcher, gradients);
    ranges.extend([("row_stats", &row_stats), ("dq_accum", &dq_accum)].map(|(name, t)| written_range(name, t)));
    ranges.extend([("dout", &dout), ("out", &out), ("softmax_lse", &softmax_lse)].map(|(name, t)| read_range(name, t)));
    ranges.extend(stream_k.iter().map(|launch| written_range(SCRATCH, launch.scratch())));
    let of_stored = stored.iter().flat_map(|memory| [("p", &memory.p), ("ds", &memory.ds), ("dq_sums", &memory.dq_sums)]);
    ranges.extend(of_stored.map(|(name, t)| written_range(name, t)));
    ranges.extend(ds_factors.into_iter().flatten().map(|t| read_range("q or k of gradients", t)));
    let mut launches = Launches::begin_with(launcher, ranges);
    fill_varlen(a, [&dq, &dk, &dv])?;
    // after `begin`: the simulator fills writable memory with NaN there, but a sum starts from zeros. `&[]`: no other range changes
    launches.also_write(&[], dbias.as_ref().filter(|_| !stores_dbias).map(|t| ("dattn_bias", t)));
    // kernels store no gradient of scores that a window hides
    if let Some(dbias) = stored_dbias.filter(|_| a.window != Window::FULL) {
        let _ = dbias.shallow_clone().f_zero_()?;
    }
    let o = &inputs.options;
    let (blocks, blocks_t) = (block_mask::of_queries(o), block_mask::of_keys(o));
    let sinks = o.sinks.as_ref();
    let mut dsinks = sinks.map(Tensor::f_zeros_like).transpose()?;
    let [dbias_batch, dbias_head, dbias_row, dbias_key] = dbias.as_ref().map_or([0; 4], broadcast_strides);
    for (first, batches) in plan.batch_chunks(a.batch) {
        let Blocks { q, k, v, problem, lengths, score_options, .. } = Blocks::new(inputs, a, (first, batches));
        let mut params = BwdParams {
            dout: operand(&dout, first),
            q,
            k,
            v,
            out: operand(&out, first),
            dq: output(&dq, first),
            dk: output(&dk, first),
            dv: output(&dv, first),
            softmax_lse: lse_at(&softmax_lse, a, first),
            row_stats: at(&row_stats, 0),
            dq_accum: at(&dq_accum, 0),
            dq_accum_split_stride: if plan.dq_accum_splits > 1 { entries * a.nheads * rows * columns } else { 0 },
            dq_accum_splits: plan.dq_accum_splits as i32,
            first_key_block: 0,
            seqlen_q_rounded: rows as i32,
            headdim_rounded: columns as i32,
            problem,
            signed_scale: a.softmax_scale as f32,
            gradients_are_fp32: mode.fp32_gradients as i32,
            lengths: Lengths { scratch_rows: rows as i32, ..lengths },
            score_options,
            dbias: dbias.as_ref().map_or(std::ptr::null_mut(), |t| match stores_dbias {
                true => (t.data_ptr() as *mut u16).wrapping_offset((first * dbias_batch) as isize).cast(),
                false => at(t, first * dbias_batch),
            }),
            dbias_is_fp16: stores_dbias as i32,
            dbias_batch_stride: dbias_batch,
            dbias_head_stride: dbias_head,
            dbias_row_stride: dbias_row,
            dbias_key_stride: dbias_key,
        };
        if dsinks.is_some() {
            // rows that this launch does not write, between packed sequences or of earlier launches, get probability 0
            let _ = row_stats.shallow_clone().f_fill_(f64::NEG_INFINITY)?;
        }
        let run = |kernel: &PlannedKernel, backward: BwdParams| match (kernel.variant.params(), blocks, blocks_t) {
            (ParamBlock::BackwardBlocks, Some(blocks), Some(blocks_t)) => {
                launches.run(kernel, batches, bytes_of(&BwdBlockParams { backward, blocks, blocks_t }))
            }
            _ => launches.run(kernel, batches, bytes_of(&backward)),
        };
        if let Some(preprocess) = &plan.preprocess {
            run(preprocess, params)?;
        }
        if let Some(dlse) = &saved.dlse {
            add_to_stats(dlse, &row_stats, &plan.scratch, o.cu_seqlens_q.as_ref(), (first, batches))?;
        }
        if let Some(stored) = &stored {
            // `main` stores P and dS of some heads and keys; `postprocess` is then the gradients kernel, which uses them before the next
            for of_launch in stored.launches(a.nheads_k) {
                let mut gradient_params = params;
                if let Some([q, k]) = ds_factors {
                    (gradient_params.q, gradient_params.k) = (operand(q, first), operand(k, first));
                }
                for (kernel, backward) in [(Some(plan.main), params), (plan.postprocess, gradient_params)] {
                    let (Some(kernel), stored) = (&kernel, of_launch) else { continue };
                    match blocks {
                        None => launches.run(kernel, batches, bytes_of(&BwdStoredParams { backward, stored }))?,
                        Some(blocks) => launches.run(kernel, batches, bytes_of(&BwdStoredBlockParams { backward, stored, blocks }))?,
                    }
                }
            }
        } else if let Some(stream_k) = &stream_k {
            launches.run(&plan.main, batches, bytes_of(&stream_k.params(params, launcher)))?;
        } else {
            // With atomics there is one launch. If deterministic, each key block (keys of one block) of a launch adds to its own dq
            // accumulator. So a launch has as many key blocks as there are accumulators. The tail is a last launch with smaller key blocks.
            for launch_number in 0..plan.main_launches {
                params.first_key_block = (launch_number * plan.dq_accum_splits) as i32;
                run(&plan.main, params)?;
            }
            if let Some(tail) = &plan.tail {
                params.first_key_block = tail.first_block as i32; // in units of its own, smaller blocks
                run(&tail.kernel, params)?;
            }
        }
        if let Some(postprocess) = plan.postprocess.as_ref().filter(|_| stored.is_none()) {
            run(postprocess, params)?;
        }
        if let (Some(sums), Some(sinks)) = (&mut dsinks, sinks) {
            add_sink_gradient(sums, sinks, &row_stats, &plan.scratch, params.problem.scale)?;
        }
    }
    Ok(Gradients {
        dq: without_padding(dq, given.headdim)?,
        dk: without_padding(dk, given.headdim)?,
        dv: without_padding(dv, given.headdim_v)?,
        dattn_bias: bias.zip(dbias).map(|(bias, sums)| sums.f_sum_to_size(bias.size())?.f_to_kind(bias.kind())).transpose()?,
        dsinks: given_sinks.as_ref().zip(dsinks).map(|(sinks, sums)| sums.f_to_kind(sinks.kind())).transpose()?,
    })
}

/// Fills varlen outputs with NaN, because kernels skip rows outside every valid sequence (csrc/seqlen_info.cuh).
pub(super) fn fill_varlen<const N: usize>(a: &Attention, outputs: [&Tensor; N]) -> Result<()> {
    if a.is_varlen() {
        for t in outputs {
            let _ = t.shallow_clone().f_fill_(f64::NAN)?;
        }
    }
    Ok(())
}

/// Returns true if each element of the bias, and of its fp16 gradient, belongs to one score, so kernels can store pairs of neighboring
/// keys. (With lengths in memory, one of a pair may lie past the end.)
fn is_full_bias(bias: &Tensor, a: &Attention) -> bool {
    !a.is_varlen() && bias.kind() == Kind::Half && bias.size() == [a.batch, a.nheads, a.seqlen_q, a.seqlen_k] && a.seqlen_k % 2 == 0
}

/// Returns fp32 zeros to which kernels add dS, the gradient of scores. Scores that share an element of a broadcast bias add to it in any
/// order. So a deterministic pass gives each score its own element, and the caller sums them.
fn bias_accumulator(bias: &Tensor, a: &Attention, deterministic: bool) -> Result<Tensor> {
    let mut sizes = bias.size();
    if deterministic {
        for (size, full) in sizes.iter_mut().zip([a.batch, a.nheads, a.seqlen_q, a.seqlen_k]) {
            *size = full.max(*size);
        }
    }
    Ok(Tensor::f_zeros(sizes, (Kind::Float, bias.device()))?)
}

/// Adds the gradient of the sinks: the sum over rows of exp(sink - lse) * -delta, where delta is the row sum of out * dout. The preprocess
/// kernel leaves -lse / scale and -delta in the row statistics.
fn add_sink_gradient(sums: &mut Tensor, sinks: &Tensor, row_stats: &Tensor, scratch: &Scratch, scale: f32) -> Result<()> {
    let of_rows = |at: &[u32]| -> Result<Tensor> {
        let rows: Vec<_> = at.iter().map(|&i| row_stats.f_select(3, i64::from(i))).collect::<std::result::Result<_, _>>()?;
        Ok(Tensor::f_stack(&rows, 3)?)
    };
    let (minus_lse, minus_delta) = (of_rows(scratch.neg_lse_offsets)?, of_rows(scratch.neg_delta_offsets)?);
    let p = (minus_lse.f_mul_scalar(f64::from(scale))?.f_add(&sinks.f_view([1, -1, 1, 1])?)?).f_exp()?;
    let products = p.f_mul(&minus_delta)?.f_masked_fill(&p.f_eq(0.0)?, 0.0)?;
    let _ = sums.f_add_(&products.f_sum_dim_intlist([0_i64, 2, 3].as_slice(), false, Kind::Float)?)?;
    Ok(())
}

/// Memory of P (probabilities) and dS (gradients of scores) between the two main kernels of a backward pass for large headdims or fp32: the
/// scores kernel stores them, the gradients kernel multiplies them to dq, dk and dv. It has one launch's tiles of 128 keys by 128 queries,
/// as [`StoredPlan`] divides them, and all launches use it, one after the other.
struct StoredMemory {
    plan: StoredPlan,
    p: Tensor,
    ds: Tensor,
    /// dq between launches for the same heads and later keys, fp32; empty if a launch has all keys.
    dq_sums: Tensor,
}

impl StoredMemory {
    /// Allocates memory for launches of `entries` batch entries (1 if packed: query tiles then count over all sequences).
    fn new(plan: StoredPlan, a: &Attention, entries: i64, launcher: &dyn Launcher) -> Result<StoredMemory> {
        let heads = plan.heads * (a.nheads / a.nheads_k);
        // Of a launch: plan.heads counts KV heads; p and ds have a tile for each key tile, dq_sums one for each 128 columns of dq. Of fp32
        // tensors a tile of p or ds has high parts, low parts and a row of units, which scale them (tile_rows).
        let tile = |tiles, rows, kind| {
            let sizes = [entries, heads, plan.query_tiles, tiles, rows, STORED_ROWS];
            tensor::empty(&sizes, kind, launcher)
        };
        let sum_tiles = if plan.key_launches > 1 { plan.columns } else { 0 };
        let scores = || tile(plan.key_tiles, plan.tile_rows(), Kind::Half);
        Ok(StoredMemory { plan, p: scores()?, ds: scores()?, dq_sums: tile(sum_tiles, STORED_ROWS, Kind::Float)? })
    }

    /// Returns the parameters of each launch, in order.
    fn launches(&self, nheads_k: i64) -> impl Iterator<Item = StoredScores> + '_ {
        let plan = self.plan;
        plan.launches(nheads_k).map(move |(first_head, first_key_tile)| StoredScores {
            p: self.p.data_ptr() as *mut u16,
            ds: self.ds.data_ptr() as *mut u16,
            dq_sums: at(&self.dq_sums, 0),
            query_tiles: plan.query_tiles as i32,
            key_tiles: plan.key_tiles as i32,
            first_key_tile: first_key_tile as i32,
            heads: plan.heads as i32,
            first_head: first_head as i32,
            is_first: (first_key_tile == 0) as i32,
            is_last: (first_key_tile == (plan.key_launches - 1) * plan.key_tiles) as i32,
        })
    }
}
