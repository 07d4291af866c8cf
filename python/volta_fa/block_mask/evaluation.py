"""Calls mask functions, which take scalar tensors, for all elements of cells.

`torch.vmap` calls any of them, but takes milliseconds for one that indexes a tensor. Most functions compare, combine and index: those
give the same results for tensors that broadcast. So a mode watches what a function does with these tensors, and gives up at the first
operation of another kind.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

#: Of scalar tensors: batch entry, query head, query, key. Returns a scalar bool tensor, True where visible.
MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]

#: Operations of each element, by the names of Python's operators without underscores, of torch's functions and of its methods.
_POINTWISE_NAMES = """
eq ne lt le gt ge less less_equal greater greater_equal not_equal minimum maximum clamp clip where
and rand or ror xor rxor invert bitwise_and bitwise_or bitwise_xor bitwise_not logical_and logical_or logical_xor logical_not
add radd sub rsub mul rmul multiply truediv rtruediv true_divide div divide floordiv rfloordiv floor_divide
mod rmod remainder fmod neg negative abs absolute lshift rshift bitwise_left_shift bitwise_right_shift bool int long float
"""
_POINTWISE = frozenset(_POINTWISE_NAMES.split())
_INDEXING = frozenset(("getitem", "index"))


class _Unwatched(Exception):
    """An operation that may give other results for tensors that broadcast."""


def over_cells(mask_mod: MaskMod, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """Returns a mask function's values, bool (cells, queries, keys), for batch and head (cells), query and key (cells, n)."""
    shape = (*query.shape, key.shape[1])
    places = (batch[:, None, None], head[:, None, None], query[:, :, None], key[:, None, :])
    try:
        with _Watch(places) as watch:
            seen = watch.known(mask_mod(*places))
    except Exception:  # vmap raises what is wrong with a function
        with indexable_scalars():
            seen = _mapped(mask_mod)(batch, head, query, key)
    return seen.bool().expand(shape)


class _Watch(TorchFunctionMode):
    """Lets pass what a function of scalar tensors does alike with tensors of three dimensions that broadcast."""

    def __init__(self, places: tuple[Tensor, ...]) -> None:
        super().__init__()
        self.made = {id(t): t for t in places}  # which stay alive, so no other tensor gets their identity

    def known(self, value: Any) -> Tensor:
        """Returns a tensor that was made of the places."""
        if id(value) not in self.made:
            raise _Unwatched
        return self.made[id(value)]

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        name = getattr(func, "__name__", "").split(".")[0]
        if name.startswith("__") and name.endswith("__"):
            name = name[2:-2]
        if name in _POINTWISE and not kwargs:
            result = func(*map(self._operand, args))
        elif name in _INDEXING and not kwargs and len(args) == 2:
            result = self._indexed(*args)
        else:
            raise _Unwatched
        if not isinstance(result, Tensor):
            raise _Unwatched
        self.made[id(result)] = result
        return result

    def _operand(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            if isinstance(value, (bool, int, float)):
                return value
            raise _Unwatched
        if id(value) in self.made:
            return value
        # a captured number: with three dimensions too, so that the types of results are those of scalar tensors
        if value.dim() == 0 and type(value) is Tensor and value.device == next(iter(self.made.values())).device:
            return value.view(1, 1, 1)
        raise _Unwatched

    def _indexed(self, tensor: Any, indices: Any) -> Tensor:
        """Returns the elements of a captured tensor, all of whose dimensions have an index."""
        indices = tuple(indices) if isinstance(indices, (tuple, list)) else (indices,)
        if not isinstance(tensor, Tensor) or id(tensor) in self.made or tensor.dim() != len(indices):
            raise _Unwatched
        for index in indices:
            is_place = isinstance(index, Tensor) and index.dtype in (torch.int32, torch.int64) and id(index) in self.made
            if not is_place and (not isinstance(index, int) or isinstance(index, bool)):
                raise _Unwatched
        return tensor[indices]


def _mapped(function: MaskMod) -> Callable[..., Tensor]:
    over_keys = torch.vmap(function, in_dims=(None, None, None, 0))
    over_queries = torch.vmap(over_keys, in_dims=(None, None, 0, None))
    mapped: Callable[..., Tensor] = torch.vmap(over_queries, in_dims=(0, 0, 0, 0))
    return mapped


def indexable_scalars() -> contextlib.AbstractContextManager[Any]:
    """Returns the mode of torch in which mask functions may index a tensor with a scalar tensor."""
    from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex

    return TransformGetItemToIndex()
