"""Which calls volta_fa takes from unsloth, in which dtype, and how often it ran them and why not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..devices import max_headdim

_HALF = (torch.float16, torch.bfloat16)
_ran: Counter[str] = Counter()
_traced: Counter[str] = Counter()
_fell_back: Counter[str] = Counter()


def unsupported(q: Tensor, k: Tensor, v: Tensor) -> str:
    """Returns the reason why no kernel takes q, k and v of shape (batch, nheads, seqlen, headdim), or ""."""
    if any(t.dim() != 4 for t in (q, k, v)) or k.shape[:3] != v.shape[:3] or q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        return "shape"
    if q.shape[1] % k.shape[1] != 0:
        return "shape"
    if max(q.shape[3], v.shape[3]) > max_headdim(q.device):
        return "headdim"
    if kernel_dtype(q, k, v) is None:
        return "dtype"
    return ""


def kernel_dtype(q: Tensor, k: Tensor, v: Tensor) -> torch.dtype | None:
    """Returns the dtype in which the operators take q, k and v, or None.

    On CUDA, float32 becomes the dtype of autocast, or of another operand in half precision, or float16: DoRA's layers return float32
    for some operands, and unsloth runs Gemma 3 and 4 in float32 where a GPU has no bfloat16.
    """
    dtypes = (q.dtype, k.dtype, v.dtype)
    if any(dtype not in (*_HALF, torch.float32, torch.float64) for dtype in dtypes):
        return None
    if not q.is_cuda:
        return torch.promote_types(torch.promote_types(q.dtype, k.dtype), v.dtype)
    if torch.float64 in dtypes:
        return None
    if torch.float32 not in dtypes:
        return q.dtype if len(set(dtypes)) == 1 else None
    if torch.is_autocast_enabled("cuda"):
        return torch.get_autocast_dtype("cuda")
    return next((dtype for dtype in dtypes if dtype in _HALF), torch.float16)


def unsloth_stats(reset: bool = False) -> dict[str, Any]:
    """Returns the number of calls of unsloth's attention functions since the start or a reset.

    Keys:
        ran: calls that volta_fa ran.
        traced: calls that torch.compile recorded as volta_fa's. Runs of the compiled program are not counted.
        fell_back: calls that unsloth's function ran, by reason; docs/guides/unsloth.md explains the reasons.

    Args:
        reset: set all counts to 0 afterwards.
    """
    result = {"ran": _ran["calls"], "traced": _traced["calls"], "fell_back": dict(sorted(_fell_back.items()))}
    if reset:
        for counter in (_ran, _traced, _fell_back):
            counter.clear()
    return result


def count_run() -> None:
    """Counts a call that volta_fa runs."""
    if torch.compiler.is_compiling():
        _count_trace()
    else:
        _ran["calls"] += 1


def count_fallback(reason: str) -> None:
    """Counts a call that unsloth's function runs."""
    if torch.compiler.is_compiling():
        _count_traced_fallback(reason)
    else:
        _fell_back[reason] += 1


def _add_trace() -> None:
    _traced["calls"] += 1


def _add_traced_fallback(reason: str) -> None:
    _fell_back[reason] += 1


# Dynamo runs these while it traces. If it traced a counter instead, each count would compile the program again.
_count_trace: Callable[[], None] = _add_trace
_count_traced_fallback: Callable[[str], None] = _add_traced_fallback


def prepare_for_tracing() -> None:
    """Lets Dynamo call the counters. This imports Dynamo, which takes long, so it is not done at import."""
    global _count_trace, _count_traced_fallback
    _count_trace = torch.compiler.assume_constant_result(_add_trace)
    _count_traced_fallback = torch.compiler.assume_constant_result(_add_traced_fallback)
