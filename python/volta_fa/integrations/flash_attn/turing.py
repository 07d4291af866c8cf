"""The functions of `flash_attn_turing`, a package of other authors, which `install_flash_attn_shim()` makes importable: flash-attn's
forward and backward without dropout, window, softcap or ALiBi. Arguments are positional.

Queries, keys and values have flash-attn's layouts, causal masks are aligned bottom-right, and the scale is 1 / sqrt(headdim). `lse` is the
log-sum-exp of each row of scores, float32 (batch, nheads, seqlen_q): +inf for a query without a visible key, for which that package has 0.
All functions call those of `compiled`, volta_fa's replacement for flash-attn's compiled module."""

from typing import Any

import torch
from torch import Tensor

from ...errors import bad_argument, require_tensors
from . import compiled
from .interface import _lengths  # cu_seqlens and max_seqlen as keyword arguments

__all__ = ["bwd", "fwd", "varlen_bwd", "varlen_fwd"]


def fwd(q: Tensor, k: Tensor, v: Tensor, causal: bool, /) -> list[Tensor]:
    """Returns out, as q, and lse."""
    require_tensors(q=q, k=k, v=v)
    return compiled.fwd(q, k, v, out=None, return_softmax=False, **_options(q, causal))[:2]


def bwd(q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dout: Tensor, causal: bool, /) -> list[Tensor]:
    """Returns dq, dk and dv. out, lse: what `fwd` returned."""
    require_tensors(q=q)
    options = _options(q, causal, dq=None, dk=None, dv=None, deterministic=False, rng_state=None)
    return compiled.bwd(dout, q, k, v, out, lse, **options)[:3]


def varlen_fwd(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int, causal: bool, /
) -> list[Tensor]:
    """Returns out, as q, (total_q, nheads, headdim), and lse, (batch, nheads, max_seqlen_q) with 0 past the end of a sequence."""
    require_tensors(q=q, k=k, v=v, cu_seqlens_q=cu_seqlens_q)
    lengths = _lengths(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    options = _options(q, causal, seqused_k=None, leftpad_k=None, block_table=None, zero_tensors=False, return_softmax=False)
    out, packed = compiled.varlen_fwd(q, k, v, out=None, **lengths, **options)[:2]
    lse = packed.new_zeros(len(cu_seqlens_q) - 1, q.shape[1], max_seqlen_q + 1)  # the last column takes what `_padded_index` drops
    lse[_padded_index(q, cu_seqlens_q, max_seqlen_q)] = packed.mT
    return [out, lse[..., :-1].contiguous()]


def varlen_bwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    causal: bool,
    /,
) -> list[Tensor]:
    """Returns dq, dk and dv. out, lse: what `varlen_fwd` returned."""
    require_tensors(q=q, lse=lse, cu_seqlens_q=cu_seqlens_q)
    if lse.shape != (shape := (len(cu_seqlens_q) - 1, q.shape[1], max_seqlen_q)):
        raise bad_argument("lse", f"shape {tuple(lse.shape)}", f"shape {shape}, what varlen_fwd returned")
    packed = torch.nn.functional.pad(lse, (0, 1))[_padded_index(q, cu_seqlens_q, max_seqlen_q)].mT
    lengths = _lengths(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    options = _options(q, causal, dq=None, dk=None, dv=None, zero_tensors=False, deterministic=False, rng_state=None)
    return compiled.varlen_bwd(dout, q, k, v, out, packed, **lengths, **options)[:3]


def _options(q: Tensor, causal: bool, **more: Any) -> dict[str, Any]:
    """Returns the options of functions in `compiled`: the scale, `causal`, values that disable what flash_attn_turing lacks, and `more`."""
    off = {"alibi_slopes": None, "dropout_p": 0.0, "window_size_left": -1, "window_size_right": -1, "softcap": 0.0, "generator": None}
    return {"softmax_scale": float(q.shape[-1] ** -0.5), "causal": causal, **off, **more}


def _padded_index(q: Tensor, cu_seqlens: Tensor, max_seqlen: int) -> tuple[Tensor, slice, Tensor]:
    """Returns the index of each row of q in a (batch, nheads, max_seqlen + 1) tensor, without a synchronization. Rows after the last
    sequence, and positions outside of 0 to max_seqlen - 1, get the last column."""
    row = torch.arange(q.shape[0], dtype=torch.int32, device=q.device)
    sequence = torch.bucketize(row, cu_seqlens[1:], right=True).clamp_(max=len(cu_seqlens) - 2)
    position = torch.where(row < cu_seqlens[-1], row - cu_seqlens[sequence], max_seqlen)
    return sequence, slice(None), torch.where((position >= 0) & (position < max_seqlen), position, max_seqlen).long()
