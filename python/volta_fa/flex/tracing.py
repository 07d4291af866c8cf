"""Traces score functions into FX graphs, without running them on values.

A function gets tensors without memory, so that it takes the branches that it takes for torch: `isinstance(score, Tensor)` is true, and
dtypes and devices are those of the call. A proxy has neither type nor dtype.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_aggregate, map_arg
from torch.overrides import TorchFunctionMode

#: What a function may ask a tensor for without reading its value.
_FACTS = {"dtype", "shape", "ndim", "layout", "dim", "size", "numel", "is_floating_point", "is_complex"}
#: Operators with their operands in the other order, under names of `Tensor`.
_REFLECTED = {"__rsub__": operator.sub, "__rdiv__": operator.truediv}


@dataclass(frozen=True)
class Trace:
    """A function as a graph.

    Attributes:
        arguments: its placeholders, without those of `captured`.
        result: the node that it returns.
        captured: the tensors of nodes that stand for one.
        graph: of the nodes.
    """

    arguments: tuple[fx.Node, ...]
    result: Any
    captured: dict[fx.Node, Tensor]
    graph: fx.Graph

    def __call__(self, *arguments: Tensor) -> Any:
        """Returns the function's value."""
        found: dict[fx.Node, Any] = self.captured | dict(zip(self.arguments, arguments))
        for node in self.graph.nodes:
            if node not in found:
                args, kwargs = map_arg((node.args, node.kwargs), found.__getitem__)
                found[node] = node.target(*args, **kwargs)
        return map_arg(self.result, found.__getitem__)


def trace(function: Callable[..., Any], captured: tuple[Any, ...], dtype: torch.dtype, device: torch.device) -> Trace | None:
    """Returns the graph of a score function, or None if it does something that has no graph here.

    Args:
        captured: values of arguments after the first five: those that dynamo takes out of a GraphModule's closures.
        dtype, device: of the score.
    """
    try:
        if isinstance(function, fx.GraphModule):
            return _of_module(function, captured)
        recorder = _Recorder(dtype, device)
        arguments = tuple(recorder.nodes.values())
        with recorder:
            result = function(*recorder.values, *captured)
        result = map_aggregate(result, recorder.operand)
        return None if recorder.gave_up else Trace(arguments, result, recorder.captured, recorder.graph)
    except Exception:  # what user functions raise when a tensor has no value, and _NoGraph
        return None


class _NoGraph(Exception):
    """An operation that reads values, or writes what others read."""


def _of_module(module: fx.GraphModule, captured: tuple[Any, ...]) -> Trace:
    nodes = module.graph.nodes
    placeholders = [node for node in nodes if node.op == "placeholder"]
    values: dict[fx.Node, Tensor] = dict(zip(placeholders[5:], captured, strict=True))
    for node in nodes:
        if node.op == "get_attr":
            values[node] = operator.attrgetter(str(node.target))(module)
            if not isinstance(values[node], Tensor):
                raise _NoGraph
        elif node.op == "call_method" and _writes(str(node.target)) and any(user is not node for user in node.args[0].users):
            raise _NoGraph  # another node reads what this one writes
    (result,) = (node.args[0] for node in nodes if node.op == "output")
    if isinstance(result, (tuple, list)) and len(result) == 1:
        result = result[0]
    return Trace(tuple(placeholders[:5]), result, values, module.graph)


def _writes(name: str) -> bool:
    return name.endswith("_") and not name.endswith("__")


class _Recorder(TorchFunctionMode):
    """Records what a function does with its arguments, and runs the rest: what it makes of captured tensors alone."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.device = device
        self.graph = fx.Graph()
        self.values: list[Tensor] = []  # arguments, then results
        self.nodes: dict[int, fx.Node] = {}  # of values, by identity: they stay alive, so no other tensor gets it
        self.captured: dict[fx.Node, Tensor] = {}
        self.gave_up = False  # a function may catch the exception
        for name, kind in zip(("score", "b", "h", "q", "kv"), (dtype, *(torch.int32,) * 4)):
            self._add(torch.empty((), dtype=kind, device="meta"), self.graph.placeholder(name))

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        try:
            kwargs = kwargs or {}
            if not self._reads_a_value((args, kwargs)):
                return func(*args, **kwargs)
            return self._record(func, args, kwargs)
        except BaseException:
            self.gave_up = True
            raise

    def operand(self, value: Any) -> Any:
        """Returns the node that stands for a tensor, and any other value itself."""
        if not isinstance(value, Tensor):
            return value
        if id(value) in self.nodes:
            return self.nodes[id(value)]
        if value.device.type == "meta" or type(value) not in (Tensor, torch.nn.Parameter):
            raise _NoGraph
        node = next((node for node, tensor in self.captured.items() if tensor is value), None)
        if node is None:
            node = self.graph.create_node("get_attr", f"captured_{len(self.captured)}")
            self.captured[node] = value
        return node

    def _record(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name = func.__self__.__name__ if func.__name__ == "__get__" else func.__name__
        if name == "device":
            return self.device
        versions = [value._version for value in self.values]
        if func is Tensor.__getitem__:
            result = self._shape(args[0])[map_aggregate(args[1], _first)]
        else:
            result = func(*map_aggregate(args, self._shape), **map_aggregate(kwargs, self._shape))
        written = [value for value, version in zip(self.values, versions) if value._version != version]
        if not isinstance(result, Tensor):
            if name not in _FACTS or written:
                raise _NoGraph
            return result
        if written:
            # as an operation that does not write, unless a view shows the old value or the new one
            shared = [value for value in self.values if value.untyped_storage()._cdata == result.untyped_storage()._cdata]
            if not _writes(name) or written[0] is not result or len(written) > 1 or len(shared) > 1:
                raise _NoGraph
            func = getattr(Tensor, name[:-1])
        elif _writes(name):  # into a captured tensor
            raise _NoGraph
        elif id(result) in self.nodes:  # a conversion that changes nothing
            return result
        operands = map_aggregate((args, kwargs), self.operand)
        if name in _REFLECTED:
            func, operands = _REFLECTED[name], (operands[0][::-1], {})
        return self._add(result, self.graph.create_node("call_function", func, *operands))

    def _reads_a_value(self, of: Any) -> bool:
        found = []
        map_aggregate(of, lambda value: found.append(value) if id(value) in self.nodes else None)
        return bool(found)

    def _shape(self, value: Any) -> Any:
        """Returns a tensor without memory in place of a tensor."""
        if not isinstance(value, Tensor) or id(value) in self.nodes:
            return value
        return torch.empty(value.shape, dtype=value.dtype, device="meta")

    def _add(self, value: Tensor, node: fx.Node) -> Tensor:
        self.nodes[id(value)] = node
        if all(value is not other for other in self.values):
            self.values.append(value)
        return value


def _first(index: Any) -> Any:
    """Returns an index with the same result's shape as a scalar tensor's, whose value is not known."""
    if not isinstance(index, Tensor):
        return index
    if index.dim() or index.is_floating_point() or index.dtype == torch.bool:
        raise _NoGraph
    return 0
