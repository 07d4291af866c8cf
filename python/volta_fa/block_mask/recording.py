"""Records what a mask function computes.

A mask function reads tensors and any state of Python: attributes, containers, arrays, clocks. A recording shows both. What comes from
Python is a constant in it, and what comes from memory of tensors is a tensor in it. So masks are equal where recordings are equal.

The function runs once, with tensors without memory in place of its arguments. It reads no element, so it branches on none.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

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
#: Methods that make a constant of an argument's type. torch's `and_masks` and `or_masks` start with one.
_CONSTANT_NAMES = "new_full new_ones new_zeros"


def _functions(names: str, *owners: Any) -> frozenset[Any]:
    found = (getattr(owner, name, None) for owner in owners for name in names.split())
    return frozenset(function for function in found if callable(function))


_POINTWISE = _functions(_POINTWISE_NAMES, torch, Tensor) | _functions(" ".join(f"__{name}__" for name in _OPERATORS.split()), Tensor)
_CONSTANT = _functions(_CONSTANT_NAMES, Tensor)
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


@dataclass(frozen=True)
class Recording:
    """A mask function as operations of each element, which serve tensors that broadcast.

    Attributes:
        steps: functions and their operands: ("value", number) for an argument or an earlier result, ("tensor", number) for one of
            `tensors`, ("constant", number of Python).
        result: such an operand.
        tensors: what the function reads from memory.
        key: equal if all of this is, but for the values of tensors.
    """

    steps: tuple[tuple[Any, tuple[tuple[str, Any], ...]], ...]
    result: tuple[str, Any]
    tensors: tuple[Tensor, ...]
    key: tuple[Any, ...]

    def __call__(self, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        """Returns the function's values, without a call of it."""
        # numbers get three dimensions too, so that the types of results are those of scalar tensors
        found = {"tensor": [t.view(1, 1, 1) if t.dim() == 0 else t for t in self.tensors], "value": [batch, head, query, key]}

        def read(operand: tuple[str, Any]) -> Any:
            kind, value = operand
            return value if kind == "constant" else found[kind][value]

        for function, operands in self.steps:
            found["value"].append(function(*map(read, operands)))
        result: Tensor = read(self.result)
        return result

    def uses(self, argument: int) -> bool:
        """Returns whether the mask may depend on an argument: 0 to 3 for batch entry, head, query and key."""
        return any(("value", argument) in operands for operands in (*(operands for _, operands in self.steps), (self.result,)))


def recorded(mask_mod: MaskMod, device: torch.device) -> MaskMod:
    """Returns a mask function's Recording, or the function itself if it does anything that a Recording has no form for."""
    recorder = _Recorder(device)
    try:
        with recorder:
            result = mask_mod(*recorder.values)
        return recorder.recording(result)
    except Exception:  # vmap raises what is wrong with a function
        return mask_mod


def has_plain_values(tensor: Any, device: torch.device) -> bool:
    """Returns whether a tensor is bytes of memory of this device and nothing else."""
    return (
        type(tensor) in (Tensor, torch.nn.Parameter)
        and tensor.device == device
        and tensor.layout == torch.strided
        and not (tensor.is_quantized or tensor.is_complex() or tensor.is_neg())
    )


class _NoRecording(Exception):
    """An operation that may depend on more than its operands, or give other results for tensors that broadcast."""


def _select(tensor: Tensor, *indices: Any) -> Tensor:
    return tensor[indices]


class _Recorder(TorchFunctionMode):
    """Records what a function does with its arguments, and runs the rest: what a function makes of captured tensors alone."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device
        self.values: list[Tensor] = []  # arguments, then results
        self.numbers: dict[int, int] = {}  # of values, by identity: they stay alive, so no other tensor gets it
        for _ in range(4):
            self._add(torch.int64)
        self.rows: dict[int, tuple[Tensor, Tensor, tuple[Any, ...]]] = {}  # what some indices leave of a tensor, with both
        self.steps: list[tuple[Any, tuple[tuple[str, Any], ...]]] = []
        self.tensors: list[Tensor] = []
        self.gave_up = False

    def recording(self, result: Any) -> Recording:
        """Returns the Recording of a function that returned this."""
        of_result = self._operand(result)
        if self.gave_up or of_result[0] == "constant":  # a function may catch the exception
            raise _NoRecording
        dtypes = tuple(v.dtype for v in self.values)  # the default dtype decides about some
        steps = tuple((function, tuple(map(_exact, operands))) for function, operands in self.steps)
        return Recording(tuple(self.steps), of_result, tuple(self.tensors), (steps, of_result, dtypes))

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        try:
            kwargs = kwargs or {}
            if not self._reads_a_value((args, kwargs)):
                with _Repeatable():  # type: ignore[no-untyped-call]  # torch's class has no types
                    return func(*args, **kwargs)
            kind = _kind(func)
            if kind == "device":
                return self.device
            if kind == "constant":
                return func(torch.empty((), dtype=args[0].dtype, device=self.device), *args[1:], **kwargs)
            if kwargs or not kind:
                raise _NoRecording
            return self._index(*args) if kind == "index" else self._pointwise(func, args)
        except BaseException:
            self.gave_up = True
            raise

    def _reads_a_value(self, of: Any) -> bool:
        if isinstance(of, Tensor):
            return id(of) in self.numbers or id(of) in self.rows
        if isinstance(of, slice):
            of = (of.start, of.stop, of.step)
        elif isinstance(of, dict):
            of = tuple(of.values())
        return isinstance(of, (tuple, list)) and any(map(self._reads_a_value, of))

    def _operand(self, value: Any) -> tuple[str, Any]:
        """Returns the operand that stands for a scalar."""
        if type(value).__module__ == "numpy" and not hasattr(value, "__setitem__"):
            value = value.item()  # torch takes numpy's numbers for Python's
        if type(value) in (bool, int, float):
            return "constant", value
        if not isinstance(value, Tensor) or value.dim() != 0:
            raise _NoRecording
        number = self.numbers.get(id(value))
        return self._captured(value) if number is None else ("value", number)

    def _captured(self, tensor: Tensor) -> tuple[str, int]:
        if tensor.dim() == 0 and tensor.device.type == "cpu":
            tensor = tensor.to(self.device)
        if not has_plain_values(tensor, self.device):
            raise _NoRecording
        known = next((number for number, other in enumerate(self.tensors) if other is tensor), None)
        if known is None:
            self.tensors.append(tensor)
        return "tensor", len(self.tensors) - 1 if known is None else known

    def _pointwise(self, func: Any, args: tuple[Any, ...]) -> Tensor:
        operands = tuple(map(self._operand, args))
        of = tuple(a.dtype if isinstance(a, Tensor) else type(a) for a in args)
        return self._step(func, operands, _dtype(func, of, torch.get_default_dtype()))

    def _index(self, tensor: Any, indices: Any) -> Tensor:
        """Records the reading of a captured tensor, once all of its dimensions have an index."""
        indices = tuple(indices) if isinstance(indices, (tuple, list)) else (indices,)
        for index in indices:
            if isinstance(index, (bool, float)) or (isinstance(index, Tensor) and index.dtype not in (torch.int32, torch.int64)):
                raise _NoRecording
        _, tensor, before = self.rows.get(id(tensor), (None, tensor, ()))
        indices = (*before, *map(self._operand, indices))
        if not isinstance(tensor, Tensor) or id(tensor) in self.numbers or tensor.dim() < len(indices):
            raise _NoRecording
        if tensor.dim() > len(indices):
            row = torch.empty(0, dtype=tensor.dtype, device="meta")
            self.rows[id(row)] = row, tensor, indices
            return row
        return self._step(_select, (self._captured(tensor), *indices), tensor.dtype)

    def _step(self, function: Any, operands: tuple[tuple[str, Any], ...], dtype: torch.dtype) -> Tensor:
        self.steps.append((function, operands))
        return self._add(dtype)

    def _add(self, dtype: torch.dtype) -> Tensor:
        value = torch.empty((), dtype=dtype, device="meta")
        self.numbers[id(value)] = len(self.values)
        self.values.append(value)
        return value


@functools.lru_cache(maxsize=1024)
def _dtype(func: Any, of: tuple[Any, ...], default_dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype of a function's result for scalar tensors of some dtypes and numbers of some types. torch decides by these and
    the default dtype."""
    dtype: torch.dtype = func(*(torch.ones((), dtype=t, device="cpu") if isinstance(t, torch.dtype) else t(1) for t in of)).dtype
    return dtype


def _exact(operand: tuple[str, Any]) -> tuple[str, Any]:
    """Returns an operand of which True, 1 and 1.0, or 0.0 and -0.0, are not equal, and nan is."""
    return (operand[0], repr(operand[1])) if operand[0] == "constant" else operand


class _Repeatable(TorchDispatchMode):
    """Refuses operations that draw numbers or write."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags or func._schema.is_mutable:
            raise _NoRecording
        return func(*args, **(kwargs or {}))
