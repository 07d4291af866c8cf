//! The forward pass of fp32 tensors in their own precision: numbers are sums of two fp16 numbers (csrc/forward/split.cuh).

use super::block_mask::block_lists;
use super::blocks::{self, lse_at, Blocks};
use super::cast::{Cast, Operands, Values};
use super::device::fill_varlen;
use super::inputs::Inputs;
use super::launches::Launches;
use super::scaled;
use crate::error::Result;
use crate::launch::{bytes_of, Launcher};
use crate::log;
use crate::params::{FwdBlockParams, FwdParams};
use crate::plan;
use crate::problem::Attention;
use crate::tensor::{self, output};
use tch::{Kind, Tensor};

/// Computes (out, softmax_lse).
pub fn forward(inputs: &Inputs, given: &Attention, launcher: &dyn Launcher) -> Result<(Tensor, Tensor)> {
    let planned = &plan::forward_split(&given.padded(), &launcher.limits()?)?;
    log::forward(&given.padded(), planned)?;
    let columns = i64::from(planned.variant.headdim);
    let of_v = Values { largest_exponent: scaled::LARGEST_OF_PARTS, is_shared: false, keeps_ordinary: false, low_column: columns };
    let cast = Cast::new(inputs, given, Operands { v: Some(of_v), low_column: columns }, None, launcher)?;
    let a = &cast.problem.padded();
    let converted = blocks::readable(&cast.inputs, a)?;
    let inputs = converted.as_ref().unwrap_or(&cast.inputs);
    let out = tensor::empty(&a.query_shape(columns), Kind::Float, launcher)?;
    let softmax_lse = tensor::empty(&a.lse_shape(), Kind::Float, launcher)?;
    let launches = Launches::begin(inputs, a, launcher, [("out", Some(&out)), ("softmax_lse", Some(&softmax_lse))]);
    fill_varlen(a, [&out, &softmax_lse])?;
    let o = &inputs.options;
    let blocks = o.block_lists.as_ref().map(|lists| block_lists(lists, o.block_bits.as_ref()));
    for (first, batches) in plan::batch_chunks(a.batch) {
        let Blocks { q, k, v, problem, lengths, score_options, cache, .. } = Blocks::new(inputs, a, (first, batches));
        let (out, softmax_lse) = (output(&out, first), lse_at(&softmax_lse, a, first));
        let forward = FwdParams { q, k, v, out, softmax_lse, problem, lengths, score_options, cache, min_rows: 0 };
        match blocks {
            None => launches.run(planned, batches, bytes_of(&forward))?,
            Some(blocks) => launches.run(planned, batches, bytes_of(&FwdBlockParams { forward, blocks }))?,
        }
    }
    cast.restore_lse(&softmax_lse)?;
    Ok((scaled::unscaled(&out.f_narrow(-1, 0, given.headdim_v)?, cast.of_v()?, Kind::Float, given)?, softmax_lse))
}
