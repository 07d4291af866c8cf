"""What functions with another library's interface do to tensors before an operator takes them."""

from __future__ import annotations

import warnings
from typing import overload

import torch
from torch import Tensor

#: Most models have at most this many heads, so more of them than tokens are probably tokens.
_USUAL_HEADS = 64
#: Calls whose layout is still to be looked at. A mistake shows in the first ones, and later ones must not pay for the look.
_calls_left = 100


@overload
def readable(t: Tensor) -> Tensor: ...
@overload
def readable(t: Tensor | None) -> Tensor | None: ...
def readable(t: Tensor | None) -> Tensor | None:
    """Returns a tensor with a contiguous last dimension, which the operators require: a copy where t has none. flash-attn copies too."""
    return t if t is None or t.dim() == 0 or t.stride(-1) == 1 else t.contiguous()


def warn_if_heads_first(q: Tensor, k: Tensor, *, stacklevel: int) -> None:
    """Warns once in a process if q and k are probably (batch, nheads, seqlen, headdim): a valid call, with a result that is not meant.

    Grouped heads do not count: models with these have few KV heads, and short prompts.
    """
    global _calls_left
    # torch.compile and torch.jit.trace would take the sizes for conditions of their graphs
    if torch.compiler.is_compiling() or not _calls_left or torch._C._get_tracing_state() is not None:
        return
    _calls_left -= 1
    if q.dim() != 4 or k.dim() != 4:
        return
    heads = q.size(2)
    if heads <= _USUAL_HEADS or heads <= q.size(1) or k.size(2) <= max(_USUAL_HEADS, k.size(1)):
        return
    if k.size(1) == 0 or q.size(1) % k.size(1) != 0:  # not the numbers of heads
        return
    _calls_left = 0
    warnings.warn(
        f"volta_fa: q: got shape {tuple(q.shape)}: {heads} heads and {q.size(1)} tokens, expected (batch, seqlen, nheads, headdim): "
        "if heads come first, pass q.transpose(1, 2), and k and v likewise. To silence this, run "
        'warnings.filterwarnings("ignore", "volta_fa: q: got shape")',
        stacklevel=stacklevel,
    )
