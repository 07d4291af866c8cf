"""What a mask was made of: tells whether a kept mask still holds."""

from __future__ import annotations

import functools
import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

#: How far values are followed: a function in an attribute of an object that a function captures is at depth 2.
_DEPTH = 6
_PLAIN = (int, float, str, bool)


@dataclass(frozen=True)
class Source:
    """The values that a mask depends on. Equal sources make equal masks.

    Writing into a tensor changes its source, except for tensors of `torch.inference_mode`, which count no writes.
    """

    state: tuple[Any, ...]
    objects: tuple[Any, ...]  # which stay alive, so no other object gets their identity

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Source) and self.state == other.state

    @classmethod
    def of(cls, function: Any, *values: Any, keep_function: bool = True) -> Source:
        """Returns the source of a function, with what it captures, and of further values.

        Args:
            keep_function: False if the source is kept by a weak reference to the function, which would never end otherwise.
        """
        objects = list(values)
        _follow(function, frozenset(), objects, set(), _DEPTH)
        return cls(tuple(map(_state, objects)), tuple(o for o in objects if keep_function or o is not function))


def _state(value: Any) -> Any:
    """Returns what identifies a value that a mask is made of, and what it contains."""
    if isinstance(value, Tensor):
        return id(value), value.data_ptr(), None if value.is_inference() else value._version
    return value if isinstance(value, _PLAIN) else id(value)


def _follow(value: Any, names: frozenset[str], found: list[Any], seen: set[Any], depth: int) -> None:
    """Appends a value and what a function may read through it.

    Args:
        names: of the attributes and globals that the function reads.
    """
    if isinstance(value, (Tensor, *_PLAIN)):
        found.append(value)
        return
    if isinstance(value, (types.FunctionType, types.MethodType)):
        names = _names(value.__code__)
    elif isinstance(call := getattr(type(value), "__call__", None), types.FunctionType):  # noqa: B004  the function counts
        names |= _names(call.__code__)
    if depth == 0 or (id(value), names) in seen:
        return
    seen.add((id(value), names))
    if isinstance(value, (tuple, list, dict)):
        found.append(len(value))
    elif not isinstance(value, types.MethodType):  # a new object at each access
        found.append(value)
    for part in _parts(value, names):
        _follow(part, names, found, seen, depth - 1)


def _parts(value: Any, names: frozenset[str]) -> Iterator[Any]:
    """Returns what a function that reads these names may read from a value directly."""
    if isinstance(value, (tuple, list)):
        yield from value
    elif isinstance(value, dict):
        yield from value.values()
    elif isinstance(value, types.FunctionType):
        yield from (cell.cell_contents for cell in value.__closure__ or () if _is_filled(cell))
        yield from (value.__defaults__ or (), value.__kwdefaults__ or {})
        yield from (value.__globals__[name] for name in sorted(names & value.__globals__.keys()))
    elif isinstance(value, types.MethodType):
        yield from (value.__func__, value.__self__)
    elif isinstance(value, functools.partial):
        yield from (value.func, value.args, value.keywords)
    elif not isinstance(value, (type, types.ModuleType, types.BuiltinFunctionType)):
        if isinstance(value, torch.nn.Module):
            yield from (*value.parameters(), *value.buffers())
        everything = callable(value)
        attributes = {name: getattr(value, name) for name in _slots(type(value)) if hasattr(value, name)} | getattr(value, "__dict__", {})
        yield from (v for name, v in attributes.items() if name in names or (everything and isinstance(v, (Tensor, *_PLAIN, list, tuple))))
        methods = (getattr(type(value), name, None) for name in sorted(names - attributes.keys()))
        methods = (method.fget if isinstance(method, property) else method for method in methods)
        yield from (types.MethodType(method, value) for method in methods if isinstance(method, types.FunctionType))


@functools.cache
def _names(code: types.CodeType) -> frozenset[str]:
    """Returns the names of attributes and globals that a function reads, with those of functions inside it."""
    inner = (_names(constant) for constant in code.co_consts if isinstance(constant, types.CodeType))
    return frozenset(code.co_names).union(*inner)


def _is_filled(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018  raises for an empty cell
    except ValueError:
        return False
    return True


def _slots(of: type) -> Iterator[str]:
    """Returns the names of a type's slots that hold values."""
    for base in of.__mro__:
        slots = base.__dict__.get("__slots__", ())
        yield from (slots,) if isinstance(slots, str) else slots
