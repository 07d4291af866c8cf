"""What functions with another library's interface do to tensors before an operator takes them."""

from __future__ import annotations

from typing import overload

from torch import Tensor


@overload
def readable(t: Tensor) -> Tensor: ...
@overload
def readable(t: Tensor | None) -> Tensor | None: ...
def readable(t: Tensor | None) -> Tensor | None:
    """Returns a tensor with a contiguous last dimension, which the operators require: a copy where t has none. flash-attn copies too."""
    return t if t is None or t.dim() == 0 or t.stride(-1) == 1 else t.contiguous()
