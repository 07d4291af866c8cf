//! Attention to copies of latents (`volta_fa::fwd_mla`). A latent is one vector per token: the key of all heads, and in its first columns
//! the value. The copies are a dense fp16 cache, one entry per sequence, which the decode kernels for latents read.

use super::gather;
use super::kernels;
use crate::error::Result;
use crate::launch::Launcher;
use crate::ops::cast::{Cast, Operands}; // Cast: q, k and v as fp16, and the exponents of their factors; Operands: what it casts
use crate::ops::inputs::Inputs;
use crate::ops::scaled; // unscaled(): divides by the factors of v
use crate::options::Options;
use crate::params::CacheFormat;
use crate::problem::{Attention, Cache, CacheLayout, DType, Keys, Queries, Window};
use crate::tensor::{readable, share};
use tch::{Kind, Tensor};

/// Attends to fp16 copies of latents, because decode kernels cannot read bf16 latents, any latents beside bf16 queries, and rows off
/// 16-byte boundaries. `seqlen_k`: keys of the longest sequence, or the most that the cache can hold.
pub(super) fn attend_to_copies(inputs: &Inputs, a: &Attention, seqlen_k: i64, launcher: &dyn Launcher) -> Result<(Tensor, Tensor)> {
    // (batch, seqlen_k, 1, headdim), and the number of tokens of each sequence, (batch) int32; -1: it has invalid lengths or pages
    let (tokens, used) = gather::collect_keys(inputs, a, seqlen_k)?;
    let kind = inputs.q.kind();
    let tokens = match seqlen_k {
        // a tensor without elements may have no address, and kernels take null for "not given"
        0 => Tensor::f_zeros([a.batch, 1, 1, a.headdim], (kind, inputs.q.device()))?,
        _ => readable(&tokens.f_to_kind(kind)?)?,
    };
    let rows = tokens.size()[1];
    let cache = Cache { layout: CacheLayout::Entries, entries: a.batch, rows, format: CacheFormat::Unquantized };
    let dense = Attention { dtype: DType::Half, keys: Keys::Latents(cache), seqlen_k: rows, ..*a };
    let options = Options { cache_seqlens: Some(used), cu_seqlens_q: share(&inputs.options.cu_seqlens_q), ..Options::default() };
    let copied = Inputs { q: readable(&inputs.q)?, k: tokens, options, ..inputs.share() };
    match kind {
        Kind::Half => attend(copied, &dense, launcher),
        _ => attend_in_bf16(&copied, &dense, launcher),
    }
}

/// Attends to fp16 latents in the place of keys. Their first columns are the values.
fn attend(inputs: Inputs, a: &Attention, launcher: &dyn Launcher) -> Result<(Tensor, Tensor)> {
    let v = inputs.k.f_narrow(-1, 0, a.headdim_v)?;
    kernels::attend(&Inputs { v, ..inputs }, a, launcher)
}

/// Casts bf16 queries and latents to fp16, scaled by powers of two, attends, and scales the results back. Each batch entry has its own
/// exponents; packed sequences share them.
fn attend_in_bf16(inputs: &Inputs, a: &Attention, launcher: &dyn Launcher) -> Result<(Tensor, Tensor)> {
    let (q, k, kind) = (&inputs.q, &inputs.k, inputs.q.kind());
    let is_packed = a.total_q().is_some();
    let all = |t: &Tensor| t.f_reshape([if is_packed { 1 } else { a.batch }, -1, t.size()[t.dim() - 2], a.headdim].as_slice());
    let rows = Inputs { q: all(q)?, k: all(k)?, options: Options::default(), ..inputs.share() };
    let of_rows = Attention {
        batch: rows.q.size()[0],
        seqlen_q: rows.q.size()[1],
        seqlen_k: rows.k.size()[1],
        queries: Queries::Dense,
        keys: Keys::Dense,
        window: Window::FULL,
        ..*a
    };
    // v is not cast, numbers of q and k become one fp16 number each, and there is no softmax_lse yet
    let cast = Cast::new(&rows, &of_rows, Operands { v: None, low_column: 0 }, None, launcher)?;
    let [q, k] = [(&cast.inputs.q, q), (&cast.inputs.k, k)].map(|(cast, given)| cast.f_view(given.size().as_slice()));
    let scaled = Attention { softmax_scale: cast.problem.softmax_scale, ..*a };
    let (out, softmax_lse) = attend(Inputs { q: q?, k: k?, ..inputs.share() }, &scaled, launcher)?;
    cast.restore_lse(&softmax_lse)?;
    // values are columns of the keys, and have their exponents
    let exponents = if is_packed { cast.k_exponents()?.f_view([1_i64, 1, 1, 1].as_slice())? } else { cast.k_exponents()? };
    Ok((scaled::unscaled(&out, exponents, kind, a)?, softmax_lse))
}
