"""What the operators require of tensors, for Python code that checks arguments before it calls them: size limits, which the native library
publishes, dtypes and strides."""

from __future__ import annotations

from typing import overload

import torch
from torch import Tensor

from .inspection import limits

_LIMITS = limits()

#: Largest headdim of `volta_fa::fwd`, `bwd` and `fwd_kvcache`.
MAX_HEADDIM: int = _LIMITS["max_headdim"]
#: Columns of a latent of `volta_fa::fwd_mla`: (value columns, rotary columns), 512 and 64.
LATENT_HEADDIMS: tuple[int, int] = tuple(_LIMITS["latent_headdims"])
#: The page size of a paged KV cache, in tokens, must be a multiple of this.
PAGE_SIZE_MULTIPLE: int = _LIMITS["page_size_multiple"]
#: Maximum query rows per KV head (seqlen_q * nheads / nheads_k) that decode kernels take, 64; more rows run on prefill kernels.
MAX_DECODE_ROWS: int = _LIMITS["max_decode_rows"]


def takes_dtype(q: Tensor) -> bool:
    """Returns whether `volta_fa::fwd` takes tensors of q's dtype on q's device."""
    return q.dtype in (torch.float16, torch.bfloat16, torch.float32) or (q.dtype == torch.float64 and q.device.type == "cpu")


@overload
def with_unit_stride(t: Tensor) -> Tensor: ...
@overload
def with_unit_stride(t: Tensor | None) -> Tensor | None: ...
def with_unit_stride(t: Tensor | None) -> Tensor | None:
    """Returns t if its last dimension has stride 1, as the operators require, else a contiguous copy. flash-attn copies too."""
    return t if t is None or t.dim() == 0 or t.stride(-1) == 1 else t.contiguous()
