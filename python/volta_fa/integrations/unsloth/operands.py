"""Which tensors volta_fa takes from unsloth, and in which dtype."""

from __future__ import annotations

import torch
from torch import Tensor

from ..devices import max_headdim

_HALF = (torch.float16, torch.bfloat16)


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
