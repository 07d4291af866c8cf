"""What the replaced functions of unsloth (`dispatch`, `gqa_sdpa`, `sinks`) share: which calls volta_fa supports, in which dtype, and the
counts of `unsloth_stats`."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..devices import Devices, max_headdim  # max_headdim: the largest headdim that a device's kernels take

#: Returns the enabled devices; None: off. Replacements ask at each call, because loaded models and other programs' wrappers keep them.
Enabled = Callable[[], Devices | None]

_HALF = (torch.float16, torch.bfloat16)
_counts: Counter[tuple[str, str]] = Counter()  # of calls, by what became of them (a key of `unsloth_stats`) and the reason


def unsupported(q: Tensor, k: Tensor, v: Tensor) -> str:
    """Returns the reason (a key of `unsloth_stats`) why no kernel takes q, k and v, (batch, nheads, seqlen, headdim); "" if one does."""
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
    """Returns the dtype to which q, k and v are cast for the operators; None if there is none. On CUDA, float32 becomes the dtype of
    autocast, or of another operand in half precision, or float16: DoRA's layers return float32 for some operands, and unsloth runs Gemma 3
    and 4 in float32 where a GPU has no bfloat16."""
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
    `reset`: set all counts to 0 afterwards.

    Keys:
        ran: calls that volta_fa ran.
        traced: calls that torch.compile recorded as volta_fa's. Runs of the compiled program are not counted.
        fell_back: calls that unsloth's function ran, by reason; docs/guides/unsloth.md explains the reasons.
    """
    fell_back = {reason: n for (kind, reason), n in sorted(_counts.items()) if kind == "fell_back"}
    result = {"ran": _counts["ran", ""], "traced": _counts["traced", ""], "fell_back": fell_back}
    if reset:
        _counts.clear()
    return result


def count(kind: str, reason: str = "") -> None:
    """Counts a call: "ran" if volta_fa runs it, "fell_back" with the reason if unsloth's function does."""
    if torch.compiler.is_compiling():
        _count_while_tracing("traced" if kind == "ran" else kind, reason)
    else:
        _count(kind, reason)


def _count(kind: str, reason: str) -> None:
    _counts[kind, reason] += 1


# Dynamo runs it while it traces. If it traced a counter instead, each count would compile the program again.
_count_while_tracing: Callable[[str, str], None] = _count


def prepare_for_tracing() -> None:
    """Makes Dynamo run the counters while it traces. `enable_unsloth` calls it, not an import: importing Dynamo takes long."""
    global _count_while_tracing
    _count_while_tracing = torch.compiler.assume_constant_result(_count)
