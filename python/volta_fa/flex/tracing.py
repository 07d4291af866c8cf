"""Traces score functions into FX graphs, without running them on values. `score_mod` reads the graphs. A function gets meta tensors, which
have no memory, so that it takes the same branches as for torch: `isinstance(score, Tensor)` is true, and dtypes and devices are those of
the call. FX's own proxies have neither a tensor's type nor a dtype."""

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_aggregate, map_arg
from torch.overrides import TorchFunctionMode

#: Attributes and methods of tensors that do not depend on values.
_FACTS = {"dtype", "shape", "ndim", "layout", "dim", "size", "numel", "is_floating_point", "is_complex"}
#: Names under which 1 - x and 1 / x arrive, with x first, and their operators. 1 + x and 2 * x arrive as add and mul, and `score_mod` reads
#: no other operator of two operands.
_REFLECTED = {"__rsub__": operator.sub, "__rdiv__": operator.truediv}


@dataclass(frozen=True)
class Trace:
    """A function as a graph."""

    arguments: tuple[fx.Node, ...]  # the nodes of score, batch entry, head, query and key
    result: Any  # the node that it returns
    captured: dict[fx.Node, Tensor]  # nodes that stand for tensors that the function reads besides, with these tensors
    graph: fx.Graph  # the graph with all nodes

    def __call__(self, *arguments: Tensor) -> Any:
        """Returns the function's value."""
        found: dict[fx.Node, Any] = self.captured | dict(zip(self.arguments, arguments))
        for node in self.graph.nodes:
            if node not in found:
                args, kwargs = map_arg((node.args, node.kwargs), found.__getitem__)
                found[node] = node.target(*args, **kwargs)
        return map_arg(self.result, found.__getitem__)


def trace(function: Callable[..., Any], captured: tuple[Any, ...], dtype: torch.dtype, device: torch.device) -> Trace | None:
    """Returns the trace of a score function, or None if it does something that a Trace cannot represent.

    Args:
        captured: values of arguments after the first five. Dynamo turns tensors that a function captures into such arguments.
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
    except Exception:  # _NoGraph, or what a user's function raises when a tensor has no value
        return None


class _NoGraph(Exception):
    """An operation that reads values, or writes what others read."""


def _of_module(module: fx.GraphModule, captured: tuple[Any, ...]) -> Trace:
    """Returns the trace of dynamo's graph of a score function."""
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
    """Returns whether a tensor method works in place, as add_ does."""
    return name.endswith("_") and not name.endswith("__")


class _Recorder(TorchFunctionMode):
    """Records operations on the function's arguments and on their results. Operations on other (captured) tensors alone just run."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.device = device
        self.graph = fx.Graph()
        self.values: list[Tensor] = []  # meta tensors: the arguments, then results
        self.nodes: dict[int, fx.Node] = {}  # of values by id(): values stay alive, so ids are not reused
        self.captured: dict[fx.Node, Tensor] = {}
        self.gave_up = False  # whether an exception was raised, which the function may have caught
        for name, kind in zip(("score", "b", "h", "q", "kv"), (dtype, *(torch.int32,) * 4)):  # int32, as torch passes indices
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
        """Runs a function on meta tensors and adds it to the graph. Raises _NoGraph if it reads a value, or writes one that others read."""
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
            # Recorded as the operation that does not write (add for add_). That is wrong if another value shares the memory: a view.
            shared = [value for value in self.values if value.untyped_storage()._cdata == result.untyped_storage()._cdata]
            if not _writes(name) or written[0] is not result or len(written) > 1 or len(shared) > 1:
                raise _NoGraph
            func = getattr(Tensor, name[:-1])
        elif _writes(name):  # into a captured tensor
            raise _NoGraph
        elif id(result) in self.nodes:  # a conversion that returned its argument
            return result
        operands = map_aggregate((args, kwargs), self.operand)
        if name in _REFLECTED:
            func, operands = _REFLECTED[name], (operands[0][::-1], {})
        return self._add(result, self.graph.create_node("call_function", func, *operands))

    def _reads_a_value(self, arguments: Any) -> bool:
        """Returns whether arguments contain a recorded value."""
        found = []
        map_aggregate(arguments, lambda value: found.append(value) if id(value) in self.nodes else None)
        return bool(found)

    def _shape(self, value: Any) -> Any:
        """Returns a meta tensor like a captured tensor, and anything else itself: recorded operations run on meta tensors alone."""
        if not isinstance(value, Tensor) or id(value) in self.nodes:
            return value
        return torch.empty(value.shape, dtype=value.dtype, device="meta")

    def _add(self, value: Tensor, node: fx.Node) -> Tensor:
        """Lists a meta tensor, which `node` makes, as a value, and returns it."""
        self.nodes[id(value)] = node
        if all(value is not other for other in self.values):
            self.values.append(value)
        return value


def _first(index: Any) -> Any:
    """Returns 0 in place of a scalar index tensor, whose value is unknown: the result has the same shape."""
    if not isinstance(index, Tensor):
        return index
    if index.dim() or index.is_floating_point() or index.dtype == torch.bool:
        raise _NoGraph
    return 0
