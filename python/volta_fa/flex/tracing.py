"""Traces score and mask functions into FX graphs, without running them on tensors."""

from __future__ import annotations

import operator
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch.overrides import TorchFunctionMode

#: fx patches torch while it traces, for all threads.
_lock = threading.Lock()


class Trace(NamedTuple):
    """A function as a graph.

    Attributes:
        arguments: its placeholders, without those of `captured`.
        result: the node that it returns.
        captured: the tensors of nodes that stand for one.
    """

    arguments: tuple[fx.Node, ...]
    result: Any
    captured: dict[fx.Node, Tensor]


def trace(function: Callable[..., Any], arguments: int, captured: tuple[Any, ...] = ()) -> Trace | None:
    """Returns the graph of a function of scalar tensors, or None if it does something with them that has no graph.

    Args:
        arguments: the number of its arguments.
        captured: values of further arguments: those that dynamo takes out of a GraphModule's closures.
    """
    tracer = _Tracer()
    names = [f"a{i}" for i in range(arguments + len(captured))]
    try:
        if isinstance(function, fx.GraphModule):
            graph = function.graph
            tracer.root = function
        else:
            with _lock, _IndexByProxy():
                graph = tracer.trace(_with_arguments(function, names))
    except Exception:  # what user functions raise when they get a proxy: TraceError, TypeError, ...
        return None
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    outputs = [node.args[0] for node in graph.nodes if node.op == "output"]
    result = outputs[0]
    if isinstance(result, (tuple, list)) and len(result) == 1:
        result = result[0]
    if len(placeholders) != len(names):
        return None
    values: dict[fx.Node, Tensor] = {}
    for node, value in zip(placeholders[arguments:], captured):
        values[node] = value
    for node in graph.nodes:
        if node.op == "get_attr":
            value = _attribute(tracer.root, str(node.target))
            if not isinstance(value, Tensor):
                return None
            values[node] = value
    return Trace(tuple(placeholders[:arguments]), result, values)


class _Tracer(fx.Tracer):
    """Keeps tensors that a function captures, parameters too, as attributes of an empty module."""

    def create_arg(self, a: Any) -> Any:
        if isinstance(a, Tensor):
            name = f"_captured_{id(a)}"
            self.root.__dict__[name] = a
            return self.create_node("get_attr", name, (), {})
        return super().create_arg(a)


class _IndexByProxy(TorchFunctionMode):
    """Records the indexing of a captured tensor by a traced index."""

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        if func is torch.Tensor.__getitem__:
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            for item in index:
                if isinstance(item, fx.Proxy):
                    return item.tracer.create_proxy("call_function", operator.getitem, args, {})
        return func(*args, **(kwargs or {}))


def _with_arguments(function: Callable[..., Any], names: list[str]) -> Callable[..., Any]:
    """Returns the function with plain positional arguments, which the tracer counts by its code object."""
    scope: dict[str, Any] = {"function": function}
    exec(f"def wrapper({', '.join(names)}):\n    return function({', '.join(names)})", scope)
    wrapper: Callable[..., Any] = scope["wrapper"]
    return wrapper


def _attribute(root: Any, path: str) -> Any:
    for name in path.split("."):
        root = getattr(root, name)
    return root
