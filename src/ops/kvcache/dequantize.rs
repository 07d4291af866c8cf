//! A quantized cache as numbers of q's type, in one launch: each token that some query sees once, for the forward kernels, whose blocks
//! of queries would each convert it for themselves.

use super::{parameters, Call};
use crate::error::Result;
use crate::launch::{bytes_of, memory, Launcher};
use crate::log;
use crate::ops::device;
use crate::params::{DequantizeParams, Problem};
use crate::plan;
use crate::problem::{Attention, CachedAttention, CachedSequence};
use crate::tensor::{self, memory_range, output};
use std::ptr::null_mut;
use tch::{Kind, Tensor};

/// Keys and values of each sequence, (batch, seqlen_k, nheads_k, headdim), from the first token that exists on, unwritten where no query
/// sees them; and (batch), int32: how many of them each has, -1 where lengths or pages cannot be, which the kernel finds out
/// where they are not `known`. There is a token, and room for one.
pub fn run(
    call: &Call,
    a: &CachedAttention,
    seqlen_k: i64,
    known: Option<&[CachedSequence]>,
    launcher: &dyn Launcher,
) -> Result<(Tensor, Tensor, Tensor)> {
    let planned = plan::convert(seqlen_k, a.nheads_k, &launcher.limits()?)?;
    log::convert(a, &planned)?;
    let empty = |sizes: &[i64], kind| tensor::empty(sizes, kind, call.q.device(), launcher.output_alignment());
    let numbers = |headdim| empty(&[a.batch, seqlen_k, a.nheads_k, headdim], call.q.kind());
    let (k, v) = (numbers(a.headdim)?, numbers(a.headdim_v)?);
    let used = match known {
        Some(all) => {
            let lengths: Vec<_> = all.iter().map(|sequence| sequence.seqlen_k() as i32).collect();
            Tensor::f_from_slice(&lengths)?.f_to_device(call.q.device())?
        }
        None => empty(&[a.batch], Kind::Int)?,
    };
    let ranges = memory(launcher, || {
        let own = [
            memory_range("k_cache", &call.k_cache, false),
            memory_range("v_cache", &call.v_cache, false),
            memory_range("k_cache, converted", &k, true),
            memory_range("v_cache, converted", &v, true),
        ];
        let found = known.is_none().then(|| memory_range("seqused_k", &used, true));
        own.into_iter().chain(found).chain(parameters::ranges(&call.options)).collect()
    });
    launcher.begin(&ranges);
    let problem = plan::problem_block(&Attention { seqlen_k, ..parameters::attention(a) }, 0);
    for (first, batches) in plan::batch_chunks(a.batch) {
        let params = DequantizeParams {
            cache: parameters::cache([&call.k_cache, &call.v_cache], call, a, first),
            k: output(&k, first),
            v: output(&v, first),
            seqused_k: if known.is_some() { null_mut() } else { device::at(&used, first).cast() }, // as wide
            problem: Problem { batch: batches as i32, headdim: a.headdim as i32, headdim_v: a.headdim_v as i32, ..problem },
            lengths: parameters::lengths(call, a, first),
            scales: parameters::scales(call, a, first),
            element: tensor::element_type(&call.q),
        };
        device::run(launcher, &planned, batches, bytes_of(&params), &ranges)?;
    }
    Ok((k, v, used))
}
