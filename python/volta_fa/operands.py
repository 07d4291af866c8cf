"""The operands that operators take: limits that Python code checks, as the native library publishes them, and dtypes and strides."""

from __future__ import annotations

from typing import overload

import torch
from torch import Tensor

from .inspection import limits

_LIMITS = limits()

#: Largest headdim of `volta_fa::fwd`, `bwd` and `fwd_kvcache`.
MAX_HEADDIM: int = _LIMITS["max_headdim"]
#: Columns of a latent of `volta_fa::fwd_mla`: values and rotary.
LATENT_HEADDIMS: tuple[int, int] = tuple(_LIMITS["latent_headdims"])
#: Tokens that the page size of a paged KV cache is a multiple of.
PAGE_SIZE_MULTIPLE: int = _LIMITS["page_size_multiple"]
#: Most query rows per KV head (seqlen_q * nheads / nheads_k) that decode kernels take; more rows run on forward tiles.
MAX_DECODE_ROWS: int = _LIMITS["max_decode_rows"]


def takes_dtype(q: Tensor) -> bool:
    """Returns whether `volta_fa::fwd` takes tensors of q's dtype on q's device."""
    return q.dtype in (torch.float16, torch.bfloat16, torch.float32) or (q.dtype == torch.float64 and q.device.type == "cpu")


@overload
def readable(t: Tensor) -> Tensor: ...
@overload
def readable(t: Tensor | None) -> Tensor | None: ...
def readable(t: Tensor | None) -> Tensor | None:
    """Returns a tensor with a contiguous last dimension, which the operators require: a copy where t has none. flash-attn copies too."""
    return t if t is None or t.dim() == 0 or t.stride(-1) == 1 else t.contiguous()
