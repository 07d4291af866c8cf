//! The kernel path, on a GPU or in the simulator: allocate with ATen, fill parameter blocks, launch.

use crate::error::Result;
use crate::launch::{bytes_of, Extent, Launch, Launcher};
use crate::params::{BwdParams, FwdParams};
use crate::plan::{self, Step};
use crate::problem::Attention;
use crate::tensor::{self, extent, operand, output, with_aligned_strides};
use tch::{Kind, Tensor};

pub fn forward(q: &Tensor, k: &Tensor, v: &Tensor, a: &Attention, launcher: &dyn Launcher) -> Result<(Tensor, Tensor)> {
    let step = plan::forward(a, &launcher.limits()?)?;
    let (q, k, v) = (with_aligned_strides(q)?, with_aligned_strides(k)?, with_aligned_strides(v)?);
    let empty = |sizes: &[i64], kind| tensor::empty(sizes, kind, q.device(), launcher.output_alignment());
    let out = empty(&[a.batch, a.seqlen_q, a.nheads, a.headdim_v], q.kind())?;
    let softmax_lse = empty(&[a.batch, a.nheads, a.seqlen_q], Kind::Float)?;
    let extents = [
        extent("q", &q, false),
        extent("k", &k, false),
        extent("v", &v, false),
        extent("out", &out, true),
        extent("softmax_lse", &softmax_lse, true),
    ];
    launcher.begin(&extents);
    for (first, batches) in plan::batch_chunks(a.batch) {
        let params = FwdParams {
            q: operand(&q, first),
            k: operand(&k, first),
            v: operand(&v, first),
            out: output(&out, first),
            softmax_lse: at(&softmax_lse, first * a.nheads * a.seqlen_q),
            problem: plan::problem_block(a, batches),
        };
        run(launcher, &step, batches, bytes_of(&params), &extents)?;
    }
    Ok((out, softmax_lse))
}

#[allow(clippy::too_many_arguments)] // the op's own arguments
pub fn backward(
    dout: &Tensor,
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    out: &Tensor,
    softmax_lse: &Tensor,
    a: &Attention,
    deterministic: bool,
    launcher: &dyn Launcher,
) -> Result<(Tensor, Tensor, Tensor)> {
    let plan = plan::backward(a, deterministic, &launcher.limits()?)?;
    let (q, k, v) = (with_aligned_strides(q)?, with_aligned_strides(k)?, with_aligned_strides(v)?);
    let (dout, out) = (with_aligned_strides(dout)?, with_aligned_strides(out)?);
    let softmax_lse = softmax_lse.f_contiguous()?;
    let empty = |sizes: &[i64], kind| tensor::empty(sizes, kind, q.device(), launcher.output_alignment());
    let like = |t: &Tensor| empty(&t.size(), t.kind());
    let (dq, dk, dv) = (like(&q)?, like(&k)?, like(&v)?);
    // The scratch memory, O(seqlen): statistics of each row, and, if not deterministic, dq in fp32.
    let (rows, columns) = (plan.seqlen_q_rounded, plan.headdim_rounded);
    // Launches of one stream run in order, so the chunks of a huge batch share it.
    let batches = plan::batch_chunks(a.batch).map(|(_, n)| n).max().unwrap_or(0);
    let row_stats = empty(&[batches, a.nheads, rows / 4, 2, 8], Kind::Float)?;
    let dq_accum = empty(&[batches, a.nheads, rows, columns], Kind::Float)?;
    let extents = [
        extent("dout", &dout, false),
        extent("q", &q, false),
        extent("k", &k, false),
        extent("v", &v, false),
        extent("out", &out, false),
        extent("softmax_lse", &softmax_lse, false),
        extent("dq", &dq, true),
        extent("dk", &dk, true),
        extent("dv", &dv, true),
        extent("row_stats", &row_stats, true),
        extent("dq_accum", &dq_accum, true),
    ];
    launcher.begin(&extents);
    for (first, batches) in plan::batch_chunks(a.batch) {
        let params = BwdParams {
            dout: operand(&dout, first),
            q: operand(&q, first),
            k: operand(&k, first),
            v: operand(&v, first),
            out: operand(&out, first),
            dq: output(&dq, first),
            dk: output(&dk, first),
            dv: output(&dv, first),
            softmax_lse: at(&softmax_lse, first * a.nheads * a.seqlen_q),
            row_stats: at(&row_stats, 0),
            dq_accum: at(&dq_accum, 0),
            seqlen_q_rounded: rows as i32,
            headdim_rounded: columns as i32,
            problem: plan::problem_block(a, batches),
            signed_scale: a.softmax_scale as f32,
        };
        for step in [&plan.prepare, &plan.main, &plan.finish] {
            run(launcher, step, batches, bytes_of(&params), &extents)?;
        }
    }
    Ok((dq, dk, dv))
}

fn run(launcher: &dyn Launcher, step: &Step, batches: i64, params: &[u8], extents: &[Extent]) -> Result<()> {
    let [x, y] = step.blocks;
    launcher.launch(&Launch { variant: step.variant, grid: [x, y, batches as u32], params, extents })
}

/// Pointer to an element of an fp32 tensor.
fn at(t: &Tensor, element: i64) -> *mut f32 {
    // SAFETY: `element` is one of the tensor's.
    unsafe { (t.data_ptr() as *mut f32).offset(element as isize) }
}
