"""The functions of `flash_attn_v100` and of its compiled module: two packages for V100s of that name.

`v100_paged` has what a third one, of 1Cat-vLLM, adds.

That of 2026 has flash-attn 2's functions, and a compiled module whose `fwd` and `bwd` take (batch, nheads, seqlen, headdim). That of
2023 has `flash_attn_func(q, k, v, softmax_scale, causal)` alone.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from ...errors import bad_argument, require_tensors
from . import compiled, interface
from .compiled import fwd_kvcache as fwd_kvcache
from .compiled import varlen_bwd as varlen_bwd
from .compiled import varlen_fwd as varlen_fwd
from .interface import flash_attn_with_kvcache

__all__ = [
    "flash_attn_func",
    "flash_attn_gpu",
    "flash_attn_varlen_func",
    "flash_attn_varlen_gpu",
    "flash_attn_with_kvcache",
    "flash_attn_with_kvcache_gpu",
]


@functools.wraps(interface.flash_attn_func, assigned=())  # the signature alone
def flash_attn_func(q: Tensor, k: Tensor, v: Tensor, *args: Any, **options: Any) -> Any:
    """Computes flash-attn's function, with the arguments of either package. The fifth tells them apart: causal or softmax_scale."""
    if args and (args[0] is None or any(isinstance(option, bool) for option in args[1:2])):
        names = ("softmax_scale", "causal")  # of 2023
        if len(args) > len(names):
            raise TypeError(f"flash_attn_func: got {3 + len(args)} arguments by position, expected q, k, v, softmax_scale and causal")
        return interface.flash_attn_func(q, k, v, **dict(zip(names, args)), **options)
    if len(args) == 1 and args[0] != 0 and "softmax_scale" not in options:
        expected = f"its name: pass dropout_p={args[0]}, or softmax_scale={args[0]} as in the package of 2023"
        raise bad_argument("dropout_p", f"{args[0]} as the only argument after v", expected)
    return interface.flash_attn_func(q, k, v, *args, **options)


@functools.wraps(interface.flash_attn_varlen_func, assigned=())
def flash_attn_varlen_func(q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, *args: Any, **options: Any) -> Any:
    """Computes flash-attn's function. Lengths have any integer dtype."""
    require_tensors(cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
    return interface.flash_attn_varlen_func(q, k, v, cu_seqlens_q.to(torch.int32), cu_seqlens_k.to(torch.int32), *args, **options)


flash_attn_gpu = flash_attn_func
flash_attn_varlen_gpu = flash_attn_varlen_func
flash_attn_with_kvcache_gpu = flash_attn_with_kvcache


def _swapped(*tensors: Tensor | None) -> list[Any]:
    """Returns tensors with heads and tokens in the other order, as views."""
    return [None if t is None else t.transpose(1, 2) for t in tensors]


def fwd(q: Tensor, k: Tensor, v: Tensor, out: Tensor | None, *options: Any) -> list[Tensor]:
    """Computes `compiled.fwd` of (batch, nheads, seqlen, headdim)."""
    require_tensors(q=q, k=k, v=v)
    result, *others = compiled.fwd(*_swapped(q, k, v, out), *options)
    return [result.transpose(1, 2).contiguous() if out is None else out, *others]


def bwd(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor | None,
    dk: Tensor | None,
    dv: Tensor | None,
    *options: Any,
) -> list[Tensor]:
    """Computes `compiled.bwd` of (batch, nheads, seqlen, headdim)."""
    require_tensors(dout=dout, q=q, k=k, v=v, out=out)
    arguments = [*_swapped(dout, q, k, v, out), softmax_lse, *_swapped(dq, dk, dv), *options]
    *gradients, softmax_d = compiled.bwd(*arguments)
    return [*(new.transpose(1, 2).contiguous() if t is None else t for new, t in zip(gradients, (dq, dk, dv))), softmax_d]
