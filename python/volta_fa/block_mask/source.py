"""What a mask was made of: tells whether a kept mask still holds."""

from __future__ import annotations

import functools
import types
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Source:
    """The values that a mask depends on. Equal sources make equal masks.

    Writing into a tensor changes its source. Tensors that a function reads from globals are not seen.
    """

    state: tuple[Any, ...]
    objects: tuple[Any, ...]  # which stay alive, so no other object gets their identity

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Source) and self.state == other.state

    @classmethod
    def of(cls, function: Any, *values: Any) -> Source:
        """Returns the source of a function, with what it captures, and of further values."""
        objects = list(values)
        _captured(function, objects, depth=4)
        return cls(tuple(map(_state, objects)), tuple(objects))


def _state(value: Any) -> Any:
    """Returns what identifies a value that a mask is made of, and what it contains."""
    if isinstance(value, Tensor):
        return id(value), value.data_ptr(), None if value.is_inference() else value._version
    return value if isinstance(value, (int, float, str, bool)) else id(value)


def _captured(function: Any, found: list[Any], depth: int) -> None:
    """Appends a function and what it captures, also through other functions."""
    found.append(function)
    cells = getattr(function, "__closure__", None) or ()
    values = [cell.cell_contents for cell in cells if _is_filled(cell)]
    if cells == () and not isinstance(function, types.FunctionType):
        values = list(getattr(function, "__dict__", {}).values())  # an object with __call__, a module
        if isinstance(function, functools.partial):
            values += [function.func, *function.args, *function.keywords.values()]
        if isinstance(function, torch.nn.Module):
            values += [*function.parameters(), *function.buffers()]
    for value in values:
        for item in value if isinstance(value, (tuple, list)) else (value,):
            if callable(item) and not isinstance(item, Tensor):
                if depth > 0:
                    _captured(item, found, depth - 1)
            elif isinstance(item, (Tensor, int, float, str, bool)):
                found.append(item)


def _is_filled(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018  raises for an empty cell
    except ValueError:
        return False
    return True
