"""Calls mask functions, which take scalar tensors, for all elements of cells.

`torch.vmap` calls any of them, but takes milliseconds for one that indexes a tensor. Most functions compare, combine and index: a
`Recording` of one gives the same results for tensors that broadcast.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..errors import bad_argument
from .recording import MaskMod, Recording


def over_cells(mask_mod: MaskMod, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """Returns the values of a mask function for all elements of cells, bool (cells, queries, keys).

    Args:
        batch, head: int64 (cells).
        query, key: int64 (cells, n).
    """
    shape = (*query.shape, key.shape[1])
    if isinstance(mask_mod, Recording):
        seen = mask_mod(batch[:, None, None], head[:, None, None], query[:, :, None], key[:, None, :])
    else:
        with indexable_scalars():
            seen = _mapped(mask_mod)(batch, head, query, key)
        if not isinstance(seen, Tensor) or seen.shape != shape:
            got = f"a result of shape {tuple(seen.shape[3:])}" if isinstance(seen, Tensor) else f"a {type(seen).__name__}"
            raise bad_argument("mask_mod", got, "one scalar tensor for scalar tensors", op="BlockMask")
    return seen.bool().expand(shape)


def _mapped(function: MaskMod) -> Callable[..., Tensor]:
    over_keys = torch.vmap(function, in_dims=(None, None, None, 0))
    over_queries = torch.vmap(over_keys, in_dims=(None, None, 0, None))
    mapped: Callable[..., Tensor] = torch.vmap(over_queries, in_dims=(0, 0, 0, 0))
    return mapped


def indexable_scalars() -> contextlib.AbstractContextManager[Any]:
    """Returns the mode of torch in which mask functions may index a tensor with a scalar tensor."""
    from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex

    return TransformGetItemToIndex()
