//! Sequences with many query rows, on the forward kernels' tiles.

use super::{parameters, Call};
use crate::error::Result;
use crate::launch::{bytes_of, memory, Launcher};
use crate::log;
use crate::ops::device;
use crate::params::FwdParams;
use crate::plan;
use crate::problem::CachedAttention;
use crate::tensor::{memory_range, operand, output};
use tch::Tensor;

/// Attends for the sequences that have at least `min_rows` rows: queries of all heads of a key head. Of the others nothing is written.
///
/// q and the caches are those of the call, rotated or copied where the kernels could not read them as they are; out and softmax_lse
/// are to be written, out with headdim_v in whole groups of 8, and what belongs to sequences that are not right stays as it is.
pub fn run(
    q: &Tensor,
    [k_cache, v_cache]: [&Tensor; 2],
    [out, softmax_lse]: [&Tensor; 2],
    call: &Call,
    given: &CachedAttention,
    min_rows: i64,
    launcher: &dyn Launcher,
) -> Result<()> {
    let a = &parameters::attention(given);
    let planned = plan::prefill(a, &launcher.limits()?)?;
    log::prefill(a, &planned)?;
    let options = parameters::readable_scores(&call.options)?;
    let ranges = memory(launcher, || {
        let own = [
            memory_range("q", q, false),
            memory_range("k_cache", k_cache, false),
            memory_range("v_cache", v_cache, false),
            memory_range("out", out, true),
            memory_range("softmax_lse", softmax_lse, true),
        ];
        own.into_iter().chain(parameters::ranges(&options)).collect()
    });
    for (first, batches) in plan::batch_chunks(a.batch) {
        let cache = parameters::cache([k_cache, v_cache], call, given, first);
        let lse_rows = if a.packed.is_some() { 0 } else { first * a.nheads * a.seqlen_q };
        let params = FwdParams {
            q: operand(q, first),
            k: cache.k,
            v: cache.v,
            out: output(out, first),
            softmax_lse: device::at(softmax_lse, lse_rows),
            problem: plan::problem_block(a, batches),
            lengths: parameters::lengths(call, given, first),
            score_options: parameters::score_options(&options, given, first),
            cache,
            min_rows: min_rows as i32,
        };
        device::run(launcher, &planned, batches, bytes_of(&params), &ranges)?;
    }
    Ok(())
}
