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

from ..errors import bad_argument

#: Of scalar tensors: batch entry, query head, query, key. Returns a scalar bool tensor, True where visible.
MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]

#: Functions and methods of torch that are operations of each element.
_POINTWISE_NAMES = """
eq ne lt le gt ge less less_equal greater greater_equal not_equal minimum maximum clamp clip where
bitwise_and bitwise_or bitwise_xor bitwise_not logical_and logical_or logical_xor logical_not
add sub rsub mul multiply true_divide div divide floor_divide remainder fmod neg negative abs absolute
bitwise_left_shift bitwise_right_shift bool int long float
"""
#: Python's operators, without underscores. `rand` is here alone: it is also the name of a function that draws numbers.
_OPERATORS = """
eq ne lt le gt ge and rand or ror xor rxor invert add radd sub rsub mul rmul truediv rtruediv div rdiv floordiv rfloordiv mod rmod
neg abs lshift rlshift rshift rrshift
"""
#: Functions and methods that make a constant where the size is (). torch's `and_masks` and `or_masks` start with one.
_CONSTANT_NAMES = "full ones zeros new_full new_ones new_zeros"


def _functions(names: str, *owners: Any) -> frozenset[Any]:
    found = (getattr(owner, name, None) for owner in owners for name in names.split())
    return frozenset(function for function in found if callable(function))


_POINTWISE = _functions(_POINTWISE_NAMES, torch, Tensor) | _functions(" ".join(f"__{name}__" for name in _OPERATORS.split()), Tensor)
_CONSTANT = _functions(_CONSTANT_NAMES, torch, Tensor)
#: Names of operators in the graphs of compiled programs.
_ATEN = {"pointwise": frozenset(_POINTWISE_NAMES.split()), "constant": frozenset(_CONSTANT_NAMES.split()), "index": frozenset(("index",))}


def _kind(func: Any) -> str:
    """Returns what a function does: "pointwise", "constant", "index", "device", or "" for anything else."""
    if isinstance(func, torch._ops.OpOverload):
        name = func._schema.name
        return next((kind for kind, names in _ATEN.items() if name.startswith("aten::") and name[len("aten::") :] in names), "")
    if func in _POINTWISE:
        return "pointwise"
    if func in _CONSTANT:
        return "constant"
    return "index" if func == Tensor.__getitem__ else "device" if func == Tensor.device.__get__ else ""


class _Unwatched(Exception):
    """An operation that may give other results for tensors that broadcast."""


class OverCells:
    """Values of a mask function for all elements of cells. A call that was watched and read no captured number is the last watched one."""

    def __init__(self, mask_mod: MaskMod) -> None:
        self._mask_mod = mask_mod
        self._is_plain = False

    def __call__(self, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        """Returns bool (cells, queries, keys), for batch and head (cells), query and key (cells, n)."""
        shape = (*query.shape, key.shape[1])
        places = batch[:, None, None], head[:, None, None], query[:, :, None], key[:, None, :]
        seen = self._mask_mod(*places) if self._is_plain else self._watched(places)
        if seen is None:
            with indexable_scalars():
                seen = _mapped(self._mask_mod)(batch, head, query, key)
            if not isinstance(seen, Tensor) or seen.shape != shape:
                got = f"a result of shape {tuple(seen.shape[3:])}" if isinstance(seen, Tensor) else f"a {type(seen).__name__}"
                raise bad_argument("mask_mod", got, "one scalar tensor for scalar tensors", op="BlockMask")
        return seen.bool().expand(shape)

    def _watched(self, places: tuple[Tensor, ...]) -> Tensor | None:
        """Returns the values for tensors that broadcast, or None where only vmap is known to be right."""
        watch = _Watch(places)
        try:
            with watch:
                seen = watch.known(self._mask_mod(*places))
        except Exception:  # vmap raises what is wrong with a function
            return None
        self._is_plain = not watch.saw_numbers
        return seen


class _Watch(TorchFunctionMode):
    """Lets pass what a function of scalar tensors does alike with tensors of three dimensions that broadcast."""

    def __init__(self, places: tuple[Tensor, ...]) -> None:
        super().__init__()
        self.made = {id(t): t for t in places}  # which stay alive, so no other tensor gets their identity
        self.device = places[0].device
        self.gave_up = False
        self.saw_numbers = False  # whose types count only here

    def known(self, value: Any) -> Tensor:
        """Returns a tensor that was made of the places."""
        if self.gave_up or id(value) not in self.made:  # a function may catch the exception
            raise _Unwatched
        return self.made[id(value)]

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        try:
            return self._run(func, args, kwargs or {})
        except _Unwatched:
            self.gave_up = True
            raise

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        kind = _kind(func)
        if kind == "pointwise" and not kwargs:
            result = func(*map(self._operand, args))
        elif kind == "index" and not kwargs:
            result = self._indexed(*args)
        elif kind == "constant":
            result = func(*args, **kwargs)
        elif kind == "device":
            return func(*args)
        else:
            raise _Unwatched
        if not isinstance(result, Tensor):
            raise _Unwatched
        if result.dim() == 0:
            result = self._number(result)
        elif kind == "constant":
            raise _Unwatched
        self.made[id(result)] = result
        return result

    def _number(self, value: Tensor) -> Tensor:
        """Returns a number with three dimensions too, so that the types of results are those of scalar tensors."""
        if type(value) is not Tensor or value.device != self.device:
            raise _Unwatched
        self.saw_numbers = True
        return value.view(1, 1, 1)

    def _operand(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            if isinstance(value, (bool, int, float)):
                return value
            raise _Unwatched
        if id(value) in self.made:
            return value
        if value.dim() == 0:
            return self._number(value)
        raise _Unwatched

    def _indexed(self, tensor: Any, indices: Any) -> Tensor:
        """Returns the elements of a captured tensor, all of whose dimensions have an index."""
        indices = tuple(indices) if isinstance(indices, (tuple, list)) else (indices,)
        if not isinstance(tensor, Tensor) or id(tensor) in self.made or tensor.dim() != len(indices) or not indices:
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
