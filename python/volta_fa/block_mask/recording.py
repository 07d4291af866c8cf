"""Records which torch operations a mask function (`mask_mod`) applies to its four index arguments.

A `Recording` serves two purposes. `elements` repeats its operations on tensors that broadcast, which is faster than torch.vmap. And
`kept` finds a packed mask again: two functions with equal recordings and equal tensors give equal masks. Python state that the function
reads (attributes, containers, clocks) is a constant in the recording; tensors that it indexes are listed.

To record, the function runs once with meta tensors, which have no memory, as arguments. It cannot read their values, so it cannot
branch on them. A function that does anything unknown to this module has no recording and is called by torch.vmap instead."""

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

#: Functions and methods of torch that compute each element from the same element of their operands.
_POINTWISE_NAMES = """
eq ne lt le gt ge less less_equal greater greater_equal not_equal minimum maximum clamp clip where
bitwise_and bitwise_or bitwise_xor bitwise_not logical_and logical_or logical_xor logical_not
add sub rsub mul multiply true_divide div divide floor_divide remainder fmod neg negative abs absolute
bitwise_left_shift bitwise_right_shift bool int long float
"""
#: Python's operators, without underscores. `rand` means `__rand__` and must not be in _POINTWISE_NAMES: torch.rand draws numbers.
_OPERATORS = """
eq ne lt le gt ge and rand or ror xor rxor invert add radd sub rsub mul rmul truediv rtruediv div rdiv floordiv rfloordiv mod rmod
neg abs lshift rlshift rshift rrshift
"""
#: Methods that make a constant tensor of an argument's dtype. torch's `and_masks` and `or_masks` begin with `new_ones` or `new_zeros`.
_CONSTANT_NAMES = "new_full new_ones new_zeros"


def _functions(names: str, *owners: Any) -> frozenset[Any]:
    """Returns the functions of these names in torch or its classes (`owners`); releases lack some."""
    found = (getattr(owner, name, None) for owner in owners for name in names.split())
    return frozenset(function for function in found if callable(function))


_POINTWISE = _functions(_POINTWISE_NAMES, torch, Tensor) | _functions(" ".join(f"__{name}__" for name in _OPERATORS.split()), Tensor)
_CONSTANT = _functions(_CONSTANT_NAMES, Tensor)
#: Names of the same operations, and of indexing, as ATen operators: these are in the graphs of compiled programs.
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
    """A mask function as a list of pointwise operations. Called with tensors that broadcast, it returns the values of all elements."""

    #: functions and their operands: ("value", n) for argument n (0 to 3) or the result of step n - 4, ("tensor", n) for tensors[n],
    #: ("constant", a Python number)
    steps: tuple[tuple[Any, tuple[tuple[str, Any], ...]], ...]
    result: tuple[str, Any]  # the operand that the function returns
    tensors: tuple[Tensor, ...]  # tensors besides the arguments that the function reads
    key: tuple[Any, ...]  # hashable; equal for two recordings with the same steps, result and dtypes, whatever the values of `tensors`

    def __call__(self, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        """Returns the function's values by the recorded steps; the function itself does not run."""
        # Scalar tensors get three dimensions, as the arguments have: torch's type promotion ranks tensors with dimensions higher.
        found = {"tensor": [t.view(1, 1, 1) if t.dim() == 0 else t for t in self.tensors], "value": [batch, head, query, key]}

        def read(operand: tuple[str, Any]) -> Any:
            kind, value = operand
            return value if kind == "constant" else found[kind][value]

        for function, operands in self.steps:
            found["value"].append(function(*map(read, operands)))
        return read(self.result)

    def uses(self, argument: int) -> bool:
        """Returns whether the mask may depend on an argument: 0 to 3 for batch entry, head, query and key."""
        return any(("value", argument) in operands for operands in (*(operands for _, operands in self.steps), (self.result,)))


def recorded(mask_mod: MaskMod, device: torch.device) -> MaskMod:
    """Returns a mask function's Recording, or the function itself if it does anything that a Recording cannot represent.
    `device`: the device that the mask is evaluated on."""
    recorder = _Recorder(device)
    try:
        with recorder:
            result = mask_mod(*recorder.values)
        return recorder.recording(result)
    except Exception:  # if the function itself is wrong, its evaluation by vmap raises the error for users
        return mask_mod


def has_plain_values(tensor: Any, device: torch.device) -> bool:
    """Returns whether a tensor's values are its bytes on this device: no subclass, no lazy negation or other layout."""
    return (
        type(tensor) in (Tensor, torch.nn.Parameter)
        and tensor.device == device
        and tensor.layout == torch.strided
        and not (tensor.is_quantized or tensor.is_complex() or tensor.is_neg())
    )


class _NoRecording(Exception):
    """The function has no recording: an operation may depend on more than its operands, or differ for tensors that broadcast."""


def _select(tensor: Tensor, *indices: Any) -> Tensor:
    """Returns tensor[indices]: the step of a Recording that reads a captured tensor."""
    return tensor[indices]


class _Recorder(TorchFunctionMode):
    """Records operations on the function's arguments and on their results. Operations on other (captured) tensors alone just run."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device
        self.values: list[Tensor] = []  # stand-ins without memory: the four arguments, then the result of each step
        self.numbers: dict[int, int] = {}  # index in `values` by id(): values stay alive, so ids are not reused
        for _ in range(4):
            self._add(torch.int64)  # as `elements` passes indices
        # by id(): a stand-in for a captured tensor with fewer indices than dimensions, that tensor, and the indices so far
        self.rows: dict[int, tuple[Tensor, Tensor, tuple[Any, ...]]] = {}
        self.steps: list[tuple[Any, tuple[tuple[str, Any], ...]]] = []
        self.tensors: list[Tensor] = []
        self.gave_up = False

    def recording(self, result: Any) -> Recording:
        """Returns the Recording, given what the function returned."""
        of_result = self._operand(result)
        if self.gave_up or of_result[0] == "constant":  # gave_up: the function may have caught a _NoRecording
            raise _NoRecording
        dtypes = tuple(v.dtype for v in self.values)  # part of the key, because some depend on torch's default dtype
        steps = tuple((function, tuple(map(_exact, operands))) for function, operands in self.steps)
        return Recording(tuple(self.steps), of_result, tuple(self.tensors), (steps, of_result, dtypes))

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        try:
            kwargs = kwargs or {}
            if not self._reads_a_value((args, kwargs)):
                with _Repeatable():  # type: ignore[no-untyped-call]  # torch's class has no types
                    return func(*args, **kwargs)
            kind = _kind(func)
            if kind == "device":  # the stand-ins are on "meta"; the function must see the real device
                return self.device
            if kind == "constant":  # not recorded: the same method of a real tensor makes the constant
                return func(torch.empty((), dtype=args[0].dtype, device=self.device), *args[1:], **kwargs)
            if kwargs or not kind:
                raise _NoRecording
            return self._index(*args) if kind == "index" else self._pointwise(func, args)
        except BaseException:
            self.gave_up = True
            raise

    def _reads_a_value(self, argument: Any) -> bool:
        """Returns whether an argument, or anything in a container of arguments, is a stand-in."""
        if isinstance(argument, Tensor):
            return id(argument) in self.numbers or id(argument) in self.rows
        if isinstance(argument, slice):
            argument = (argument.start, argument.stop, argument.step)
        elif isinstance(argument, dict):
            argument = tuple(argument.values())
        return isinstance(argument, (tuple, list)) and any(map(self._reads_a_value, argument))

    def _operand(self, value: Any) -> tuple[str, Any]:
        """Returns the operand for a scalar, as `Recording.steps` has it."""
        if type(value).__module__ == "numpy" and not hasattr(value, "__setitem__"):
            value = value.item()  # a numpy scalar (not an array), which torch treats as a Python number
        if type(value) in (bool, int, float):
            return "constant", value
        if not isinstance(value, Tensor) or value.dim() != 0:
            raise _NoRecording
        number = self.numbers.get(id(value))
        return self._captured(value) if number is None else ("value", number)

    def _captured(self, tensor: Tensor) -> tuple[str, int]:
        """Returns the operand for a tensor that is no stand-in, and lists it in `tensors`."""
        if tensor.dim() == 0 and tensor.device.type == "cpu":
            tensor = tensor.to(self.device)
        if not has_plain_values(tensor, self.device):
            raise _NoRecording
        known = next((number for number, other in enumerate(self.tensors) if other is tensor), None)
        if known is None:
            self.tensors.append(tensor)
        return "tensor", len(self.tensors) - 1 if known is None else known

    def _pointwise(self, func: Any, args: tuple[Any, ...]) -> Tensor:
        """Records a pointwise operation. Returns a stand-in for its result."""
        operands = tuple(map(self._operand, args))
        types = tuple(a.dtype if isinstance(a, Tensor) else type(a) for a in args)
        return self._step(func, operands, _dtype(func, types, torch.get_default_dtype()))

    def _index(self, tensor: Any, indices: Any) -> Tensor:
        """Records the reading of a captured tensor once all of its dimensions have an index; t[i][j] gives them one by one."""
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
        """Adds a step. Returns the stand-in for its result."""
        self.steps.append((function, operands))
        return self._add(dtype)

    def _add(self, dtype: torch.dtype) -> Tensor:
        """Makes the stand-in for the next value, an argument or a result."""
        value = torch.empty((), dtype=dtype, device="meta")
        self.numbers[id(value)] = len(self.values)
        self.values.append(value)
        return value


@functools.lru_cache(maxsize=1024)
def _dtype(func: Any, types: tuple[Any, ...], default_dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype of a function's result for operands of these types: scalar tensors by dtype, Python numbers by type. torch's
    result also depends on the default dtype, which is therefore part of the cache's key."""
    return func(*(torch.ones((), dtype=t, device="cpu") if isinstance(t, torch.dtype) else t(1) for t in types)).dtype


def _exact(operand: tuple[str, Any]) -> tuple[str, Any]:
    """Returns an operand for a key. By their text, constants True, 1 and 1.0 differ, as do 0.0 and -0.0, and nan equals itself."""
    return (operand[0], repr(operand[1])) if operand[0] == "constant" else operand


class _Repeatable(TorchDispatchMode):
    """Raises _NoRecording for operations that draw random numbers or write a tensor: a second run would not give the same."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags or func._schema.is_mutable:
            raise _NoRecording
        return func(*args, **(kwargs or {}))
