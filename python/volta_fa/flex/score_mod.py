"""Recognizes score functions (`score_mod`) of FlexAttention that the operators compute, and reads their parameters. `attention` and
`compiled` call `recognize`. A score function is traced into a graph of operations (`tracing`); `_Reader` follows the graph from the result
back to the score. Anything but positive factors, one tanh cap, added terms and hiding (a score becomes -inf) raises Unrecognized."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from ..block_mask.elements import indexable_scalars  # lets functions index tensors with scalar tensors

# Trace: a function as a graph of operations: `arguments` are the nodes of score and indices, `result` the node that it returns, `captured`
# the tensors that other nodes stand for. trace: makes one
from .tracing import Trace, trace

#: Of scalar tensors: score, batch entry, query head, query, key. Returns the new score.
ScoreMod = Callable[..., Tensor]

_CPU = torch.device("cpu")


class Unrecognized(Exception):
    """The operators do not compute this. The message names the operation."""


@dataclass(frozen=True)
class Scores:
    """What a score function does to a score x: `cap(factor * x) + bias`, and hides elements."""

    factor: float = 1.0  # of the score, before the cap
    softcap: float = 0.0  # 0, or the c of c * tanh(factor * x)
    #: whether the added term depends on batch entry, head, query and key; None: nothing is added
    bias: tuple[bool, bool, bool, bool] | None = None
    #: "relative" or "absolute" if the added term is a slope of batch entry and head times key - query, or times |key - query|
    alibi: str | None = None
    #: whether batch entry, head, query and key decide which elements become -inf; None: none does
    hides: tuple[bool, bool, bool, bool] | None = None
    needs_gradient: bool = False  # whether a tensor that the function captures requires a gradient

    def options(self, scale: float) -> dict[str, float]:
        """Returns softmax_scale and softcap of the operators. `scale`: the caller's factor of the products q.k."""
        if self.softcap == 0.0:
            return {"softmax_scale": scale * self.factor}
        # the operators compute softcap * tanh(softmax_scale * q.k / softcap)
        return {"softmax_scale": scale * self.factor * self.softcap, "softcap": self.softcap}


def recognize(
    score_mod: ScoreMod | None, captured: tuple[Any, ...] = (), dtype: torch.dtype = torch.float32, device: torch.device = _CPU
) -> tuple[Scores, ScoreMod | None]:
    """Returns what a score function does, and a function of score, batch entry, head, query and key that computes it. Raises Unrecognized
    for anything but the forms of `Scores`.

    The returned function is score_mod itself if it is a graph, else its trace: a second call of score_mod may take other branches.

    Args:
        captured: values of arguments after the first five.
        dtype, device: of the score: torch passes query's.
    """
    if score_mod is None:
        return Scores(), None
    traced = trace(score_mod, captured, dtype, device)
    if traced is None:
        raise Unrecognized("a score_mod that cannot be traced")
    found = _Reader(traced).read()
    if found.factor <= 0:
        raise Unrecognized("a negative factor")
    if found.factor > 1e30:  # the operators take it in fp32, times a scale and a cap
        raise Unrecognized(f"a factor of {found.factor:g}")
    if found.softcap and not 1e-4 <= found.softcap <= 1e4:  # the operators' range (`inspection.limits()["softcap"]`)
        raise Unrecognized(f"a softcap of {found.softcap:g}")
    function: ScoreMod = score_mod if isinstance(score_mod, fx.GraphModule) else traced
    if found.needs_gradient:
        function, captured = _in_float32(function, captured)
    return found, lambda *arguments: function(*arguments, *captured)


def values(score_mod: ScoreMod, places: tuple[Tensor | int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Returns the function's values for a score of 0, (batch, heads, queries, keys): what it adds, and -inf where it hides. `attend` calls
    it for a bias or slopes. `places`: int64 vectors of batch entries, heads, queries and keys, or one number for a dimension of size 1."""
    function: Callable[..., Any] = score_mod
    for dimension in (3, 2, 1, 0):
        if isinstance(places[dimension], Tensor):
            in_dims = tuple(0 if i == dimension else None for i in range(4))
            function = torch.vmap(function, in_dims=(None, *in_dims))
    vectors = [p if isinstance(p, Tensor) else torch.full((), p, dtype=torch.int64, device=device) for p in places]
    with indexable_scalars():  # a function may index its tensors with the scalars
        result = function(torch.zeros((), dtype=dtype, device=device), *vectors)
    if isinstance(result, (tuple, list)):  # graphs return a tuple
        (result,) = result
    return result.reshape([p.shape[0] if isinstance(p, Tensor) else 1 for p in places])  # len() would fix a symbolic size


def _in_float32(score_mod: ScoreMod, captured: tuple[Any, ...]) -> tuple[ScoreMod, tuple[Any, ...]]:
    """Returns a score function and its captured arguments with 16-bit tensors in float32. Many scores may read one element, as in a
    relative bias. The sum of their gradients is then in float32, and rounded once."""

    def wide(value: Any) -> Any:
        return value.float() if isinstance(value, Tensor) and value.dtype in (torch.float16, torch.bfloat16) else value

    if isinstance(score_mod, Trace):
        score_mod = replace(score_mod, captured={node: wide(tensor) for node, tensor in score_mod.captured.items()})
    return score_mod, tuple(map(wide, captured))


# Names of operations, as `_name` returns them: one name for torch's function, the method, Python's operator and ATen's overload.
_MULTIPLY, _DIVIDE, _ADD, _SUBTRACT = {"mul", "multiply"}, {"div", "truediv", "true_divide", "divide"}, {"add"}, {"sub", "subtract"}
#: Operations that change no value but for its dtype.
_CONVERSIONS = {"to", "float", "double", "type", "type_as", "_to_copy", "clone", "contiguous", "alias", "convert_element_type"}
#: Operations that make a tensor filled with one value, and the position of that argument.
_CONSTANTS = {"full_like": 1, "full": 1, "new_full": 2, "tensor": 0, "new_tensor": 1, "scalar_tensor": 0, "as_tensor": 0}


#: What `_Reader._needs` returns for the score itself, beside 0 to 3 for the indices.
_SCORE = -1


class _Reader:
    """Reads what a traced score function does to its score."""

    def __init__(self, traced: Trace):
        self.traced = traced
        self.score, *self.indices = traced.arguments
        self._depends: dict[fx.Node, frozenset[int]] = {}  # results of `_needs`

    def read(self) -> Scores:
        """Returns what the function does. Raises Unrecognized if `Scores` cannot express it."""
        self.biases: list[Any] = []  # added or subtracted values: nodes or numbers
        self.conditions: list[Any] = []  # nodes that decide which elements are hidden
        found = self._chain(self.traced.result)
        alibi = self._alibi(self.biases[0]) if len(self.biases) == 1 and not self.conditions else None
        learned = any(t.requires_grad for t in self.traced.captured.values() if isinstance(t, Tensor))
        bias, hides = self._indices_of(self.biases), self._indices_of(self.conditions)
        return replace(found, bias=bias, alibi=alibi, hides=hides, needs_gradient=learned)

    def _indices_of(self, terms: list[Any]) -> tuple[bool, bool, bool, bool] | None:
        """Returns whether any term depends on batch entry, head, query and key; None without terms."""
        if not terms:
            return None
        used = frozenset().union(*map(self._needs, terms))
        return 0 in used, 1 in used, 2 in used, 3 in used

    def _needs(self, value: Any) -> frozenset[int]:
        """Returns what a value depends on: 0 to 3 for batch entry, head, query and key, and _SCORE."""
        if not isinstance(value, fx.Node):
            return frozenset()
        if value not in self._depends:
            if value is self.score:
                self._depends[value] = frozenset((_SCORE,))
            elif value in self.indices:
                self._depends[value] = frozenset((self.indices.index(value),))
            elif _name(value) in _CONSTANTS:
                self._depends[value] = self._needs(_content(value))
            else:
                self._depends[value] = frozenset().union(*(self._needs(node) for node in value.all_input_nodes))
        return self._depends[value]

    def _constant(self, value: Any) -> float | None:
        """Returns a value that is known without running the graph, or None."""
        if isinstance(value, (int, float)):
            return float(value)
        if isinstance(value, fx.Node) and _name(value) in _CONSTANTS:
            return self._constant(_content(value))
        tensor = self.traced.captured.get(value) if isinstance(value, fx.Node) else None
        if type(tensor) is Tensor and tensor.device.type == "cpu" and tensor.numel() == 1 and not tensor.requires_grad:
            return float(tensor)
        return None

    def _chain(self, node: Any) -> Scores:
        """Reads the operations from the score to `node`, and returns factor and cap so far. Adds to `biases` and `conditions`."""
        if node is self.score:
            return Scores()
        if not isinstance(node, fx.Node) or _SCORE not in self._needs(node):
            raise Unrecognized("a result that is not made of the score")
        name, args = _name(node), node.args
        if not args:
            raise Unrecognized(f"{name} of keyword arguments")
        if name in _CONVERSIONS and _keeps_fractions(node):
            return self._chain(args[0])
        if name in ("where", "masked_fill"):
            if len(args) != 3:
                raise Unrecognized(f"{name} of keyword arguments")
            return self._hidden(name, args)
        if name == "tanh":
            found = self._chain(args[0])
            if found.softcap or self.biases or self.conditions:
                raise Unrecognized("tanh of more than a scaled score")
            return replace(found, softcap=1.0)
        if name not in _MULTIPLY | _DIVIDE | _ADD | _SUBTRACT or len(args) != 2 or node.kwargs:
            raise Unrecognized(name)
        left, right = args
        if _SCORE in self._needs(right):
            if name in _DIVIDE | _SUBTRACT or _SCORE in self._needs(left):
                raise Unrecognized(f"{name} of two scores" if _SCORE in self._needs(left) else f"{name} by the score")
            left, right = right, left
        found = self._chain(left)
        if name in _ADD | _SUBTRACT:
            self.biases.append(right)
            return found
        constant = self._constant(right)
        if constant is None or constant <= 0 or not math.isfinite(constant):
            raise Unrecognized(f"{name} by a value that is not a positive constant")
        factor = constant if name in _MULTIPLY else 1 / constant
        if found.softcap:
            return replace(found, softcap=found.softcap * factor)
        return replace(found, factor=found.factor * factor)

    def _hidden(self, name: str, args: tuple[Any, ...]) -> Scores:
        """Reads where(condition, score, -inf), or with its branches exchanged, or masked_fill(score, condition, -inf)."""
        chosen, other, condition = (args[1], args[2], args[0]) if name == "where" else (args[0], args[2], args[1])
        if _SCORE in self._needs(other):
            chosen, other = other, chosen
        if _SCORE in self._needs(condition) or _SCORE in self._needs(other) or self._constant(other) != -math.inf:
            raise Unrecognized(f"{name} with anything but the score and -inf")
        found = self._chain(chosen)
        self.conditions.append(condition)  # `_chain` rejects a tanh of it: tanh(-inf) hides nothing
        return found

    def _alibi(self, bias: Any) -> str | None:
        """Returns `Scores.alibi` for the only added value."""
        linear = self._linear(bias)
        if linear is None:
            return None
        if linear.kind == "absolute":
            return "absolute"
        return "relative" if linear.key == -linear.query != 0 and linear.constant == 0 else None

    def _linear(self, value: Any) -> _Linear | None:
        """Returns a value as a linear function of key and query; None if it is none, or has another form than those read here."""
        constant = self._constant(value)
        if constant is not None:
            return _Linear(constant=constant)
        if value is self.indices[3]:
            return _Linear(key=1.0)
        if value is self.indices[2]:
            return _Linear(query=1.0)
        if not isinstance(value, fx.Node):
            return None
        if not self._needs(value) & {2, 3}:
            return _Linear(constant=1.0, kind="term")
        name, args = _name(value), value.args
        if args and name in _CONVERSIONS and _keeps_fractions(value):
            return self._linear(args[0])
        parts = [self._linear(a) for a in args if isinstance(a, (fx.Node, int, float))]
        operands = [part for part in parts if part is not None]
        if len(operands) < len(parts) or value.kwargs:
            return None
        if len(operands) == 1:
            return _of_one(name, operands[0])
        return _of_two(name, *operands) if len(operands) == 2 else None


class _Linear(NamedTuple):
    """The function t * (key * KEY + query * QUERY + constant) of the positions KEY and QUERY."""

    key: float = 0.0
    query: float = 0.0
    constant: float = 0.0
    #: what t is. "number": 1. "term": any function of batch entry and head. "absolute": such a t, and the function is t * |KEY - QUERY|
    kind: str = "number"

    @property
    def has_positions(self) -> bool:
        """Whether it depends on key or query."""
        return self.key != 0 or self.query != 0 or self.kind == "absolute"


def _of_one(name: str, a: _Linear) -> _Linear | None:
    """Returns the result of an operation with one operand."""
    if name == "neg":
        return a._replace(key=-a.key, query=-a.query, constant=-a.constant)
    if name == "abs" and a.kind == "number" and a.key == -a.query != 0 and a.constant == 0:
        return _Linear(key=1.0, query=-1.0, kind="absolute")
    return None


def _of_two(name: str, a: _Linear, b: _Linear) -> _Linear | None:
    """Returns the result of an operation with two operands."""
    if name in _ADD | _SUBTRACT:
        if (a.kind, b.kind) != ("number", "number"):
            return None
        sign = 1 if name in _ADD else -1
        return _Linear(a.key + sign * b.key, a.query + sign * b.query, a.constant + sign * b.constant)
    if name not in _MULTIPLY | _DIVIDE:
        return None
    if name in _MULTIPLY and not a.has_positions:
        a, b = b, a
    if b.has_positions or (a.kind, b.kind) == ("term", "term") or b.constant == 0:
        return None
    if a.kind == "absolute":  # the product is t * |KEY - QUERY| too; only its t differs, and `_Linear` holds no t
        return a
    if b.kind == "term":
        return a._replace(kind="term")
    factor = b.constant if name in _MULTIPLY else 1 / b.constant
    return _Linear(a.key * factor, a.query * factor, a.constant * factor, a.kind)


def _content(node: fx.Node) -> Any:
    """Returns the value that an operation of _CONSTANTS fills its tensor with."""
    position = _CONSTANTS[_name(node)]
    if position < len(node.args):
        return node.args[position]
    if "fill_value" not in node.kwargs:
        raise Unrecognized(f"{_name(node)} of keyword arguments")
    return node.kwargs["fill_value"]


def _keeps_fractions(node: fx.Node) -> bool:
    """Returns whether a conversion of `_CONVERSIONS` surely rounds no fraction away: its arguments name no integer type. A tensor
    (`type_as`, `to`) or a text (`type`) as an argument may name one, so the answer is then no."""
    arguments = (*node.args[1:], *node.kwargs.values())
    return not any(isinstance(a, (fx.Node, str)) or (isinstance(a, torch.dtype) and not a.is_floating_point) for a in arguments)


def _name(node: fx.Node) -> str:
    """Returns the name of a node's operation, without the underscores of `__add__` and `add_`: "add"."""
    if node.op == "call_method":
        name = str(node.target)
    else:
        target: Any = getattr(node.target, "overloadpacket", node.target)
        name = str(getattr(target, "__name__", target))
    return name.strip("_") if name.startswith("__") else name.removesuffix("_") if node.op == "call_method" else name
