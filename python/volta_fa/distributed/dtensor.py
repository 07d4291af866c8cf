"""DTensor's rules for `volta_fa::fwd` and `volta_fa::bwd`: how the operators run on tensors that are sharded over a device mesh.

Each dimension of the mesh shards the batch, the heads or nothing. The placements of the first sharded tensor decide, and the other
tensors are redistributed. A single KV head is replicated where query heads are sharded. Options with a batch or heads are sharded alike;
plain tensors count as replicated. q, k and v are DTensors, unless PyTorch's `implicit_replication` is on. Inside PyTorch's
`context_parallel` the sequence is sharded, and the operators run as a ring.

The rules are handlers of DTensor's dispatcher, as those of PyTorch's context parallelism, because strategies of its sharding propagator
do not see tensors among keyword arguments. `integrations.dtensor` calls `register` when an operator first receives a DTensor."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._redistribute import redistribute_local_tensor
from torch.distributed.tensor.placement_types import Placement

from ..errors import bad_argument
from . import ring  # attention over a sharded sequence, which a Problem describes
from .argument_check import check_same_arguments  # raises the same error on all ranks if their arguments differ
from .attention import generator_for  # a generator of dropout for one rank's part
from .plan import Mask, shard_ranges  # a mask by positions; the positions that a rank holds

#: What a dimension of the mesh shards.
_BATCH, _HEADS, _NOTHING = "batch", "heads", "nothing"
#: The dimensions of batch and heads: (in dense tensors, in packed ones). None: packed tensors have no batch.
_DIMENSIONS = {
    "operand": ({_BATCH: 0, _HEADS: 2}, {_BATCH: None, _HEADS: 1}),
    "softmax_lse": ({_BATCH: 0, _HEADS: 1}, {_BATCH: None, _HEADS: 0}),
}


def register() -> None:
    """Adds the handlers. Call it again inside `context_parallel`, which has a table of its own."""
    table: Any = DTensor._op_dispatcher._custom_op_handlers
    table.setdefault(torch.ops.volta_fa.fwd.default, _fwd)
    table.setdefault(torch.ops.volta_fa.bwd.default, _bwd)


def _fwd(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Computes `volta_fa::fwd` of DTensors: the handler for its dispatcher."""
    with torch.no_grad():
        if _is_context_parallel(args[0]):
            return _ring_fwd(*args, **kwargs)
        q, k, v = args
        _require_dtensors(q=q, k=k, v=v)
        call = _Sharding(q, (k, v))
        generator = call.generator(q, kwargs.get("dropout_p", 0.0), kwargs.get("generator"))
        local = call.operands(q, k, v)
        out, lse, rng_state = torch.ops.volta_fa.fwd(*local, **call.options(kwargs) | {"generator": generator})
        shape = (*q.shape[:-1], v.shape[-1])
        return (
            _wrap(call.mesh, out, shape, call.operand),
            _wrap(call.mesh, lse, _lse_shape(q), call.softmax_lse),
            _wrap(call.mesh, rng_state, rng_state.shape, call.replicated),
        )


def _bwd(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Computes `volta_fa::bwd` of DTensors. Gradients of replicated tensors are partial sums."""
    with torch.no_grad():
        if _is_context_parallel(args[1]):
            return _ring_bwd(*args, **kwargs)
        dout, q, k, v, out, lse = args
        call = _Sharding(q, (k, v, dout))
        local = call.operands(q, k, v)
        bias, sinks = (kwargs.get(name) for name in ("attn_bias", "sinks"))
        results = (call.local(out, call.operand), call.local(lse, call.softmax_lse))
        dq, dk, dv, dbias, dsinks = torch.ops.volta_fa.bwd(call.local(dout, call.operand), *local, *results, **call.options(kwargs))
        wanted = bias if kwargs.get("attn_bias_requires_grad", False) else None
        return (
            _wrap(call.mesh, dq, q.shape, call.operand),
            _wrap(call.mesh, dk, k.shape, call.summed(call.keys)),
            _wrap(call.mesh, dv, v.shape, call.summed(call.keys)),
            _wrap(call.mesh, dbias, (0,), call.replicated)
            if wanted is None
            else _wrap(call.mesh, dbias, wanted.shape, call.summed(call.bias(wanted))),
            _wrap(call.mesh, dsinks, (0,), call.replicated)
            if sinks is None
            else _wrap(call.mesh, dsinks, sinks.shape, call.summed(call.sinks)),
        )


def _require_dtensors(**operands: Tensor) -> None:
    """Raises ValueError for a plain tensor beside DTensors, as DTensor does for PyTorch's operators. It may be a rank's own shard: each
    rank would take a part of that again. And its gradient would be a DTensor."""
    if getattr(DTensor._op_dispatcher, "_allow_implicit_replication", False):
        return
    for name, t in operands.items():
        if not isinstance(t, DTensor):
            expected = "a DTensor: DTensor.from_local or distribute_tensor makes one"
            raise bad_argument(name, "a plain tensor beside DTensors", expected)


def _lse_shape(q: Tensor) -> tuple[int, ...]:  # of softmax_lse, for a packed or a dense q
    return (q.shape[1], q.shape[0]) if q.dim() == 3 else (q.shape[0], q.shape[2], q.shape[1])


class _Sharding:
    """What one call shards on each dimension of its mesh (batch, heads or nothing), and the placements of its tensors: `operand` (q, out,
    dout), `keys` (k, v), `softmax_lse`, `sinks`, `replicated` (all others). `others`: k, v and further tensors with the same dimensions, k
    first. Heads are sharded only if the ranks divide them evenly."""

    def __init__(self, q: Any, others: Sequence[Any]):
        self.mesh: DeviceMesh = next(t.device_mesh for t in (q, *others) if isinstance(t, DTensor))
        self._packed = q.dim() == 3
        self._full = q.shape[0], q.shape[-2]  # sizes of batch and heads over all ranks
        k = others[0] if others else q
        one_head = k.shape[-2] == 1
        operand = _DIMENSIONS["operand"][self._packed]
        self._sharded = [_NOTHING] * self.mesh.ndim  # what each dimension of the mesh shards
        ranks = 1  # among which the heads are divided so far
        for i in range(self.mesh.ndim):
            for t in (q, *others):
                placement = t.placements[i] if isinstance(t, DTensor) else Replicate()
                if not isinstance(placement, Shard) or self._sharded[i] != _NOTHING:
                    continue
                dim = placement.dim % t.dim()
                if dim == operand[_BATCH]:
                    self._sharded[i] = _BATCH
                elif dim == operand[_HEADS]:
                    size = ranks * self.mesh.size(i)
                    if q.shape[-2] % size == 0 and (one_head or k.shape[-2] % size == 0):
                        self._sharded[i], ranks = _HEADS, size
        batch, heads = operand[_BATCH], operand[_HEADS]
        self.operand = self._placements(batch, heads)  # of q, out and dout
        self.keys = self._placements(batch, None if one_head else heads)  # of k and v: a single KV head is replicated
        lse = _DIMENSIONS["softmax_lse"][self._packed]
        self.softmax_lse = self._placements(lse[_BATCH], lse[_HEADS])
        self.sinks = self._placements(batch=None, heads=0)
        self.replicated: list[Placement] = [Replicate()] * self.mesh.ndim

    def _placements(self, batch: int | None, heads: int | None) -> list[Placement]:
        """Returns the placements of a tensor whose batch and heads are these dimensions; None: it has no such dimension."""
        where = {_BATCH: batch, _HEADS: heads, _NOTHING: None}
        dims = [where[what] for what in self._sharded]
        return [Replicate() if dim is None else Shard(dim) for dim in dims]

    def bias(self, t: Tensor) -> list[Placement]:
        """Returns the placements of attn_bias. Broadcast dimensions are not sharded."""
        return self._placements(0 if t.shape[0] > 1 else None, 1 if t.shape[1] > 1 else None)

    def lists(self, t: Tensor) -> list[Placement]:
        """Returns the placements of block lists. Their tiles of bits (block_bits) have numbers of the whole mask, and are replicated."""
        for what, size, full in zip((_BATCH, _HEADS), t.shape, self._full):
            if what in self._sharded and size not in (1, full):
                raise bad_argument("block_lists", f"{size} {what} of a sharded dimension", f"1 or {full}", error=NotImplementedError)
        return self.bias(t)

    def slopes(self, t: Tensor) -> list[Placement]:
        """Returns the placements of alibi_slopes, (heads) or (batch, heads)."""
        return self._placements(0 if t.dim() == 2 and not self._packed else None, t.dim() - 1)

    def summed(self, placements: list[Placement]) -> list[Placement]:
        """Returns the placements of a gradient: partial sums where the call is sharded and the tensor is not."""
        return [
            Partial() if what != _NOTHING and isinstance(placement, Replicate) else placement
            for what, placement in zip(self._sharded, placements)
        ]

    def local(self, t: Any, placements: list[Placement]) -> Tensor:
        """Returns this rank's part of a tensor with these placements, after redistribution if it has others."""
        if isinstance(t, DTensor):
            mine, spec = t._local_tensor, t._spec
        else:
            mine, spec = t, _spec(self.mesh, self.replicated, t, t.shape)
        if list(spec.placements) == placements:
            return mine
        return redistribute_local_tensor(mine, spec, _spec(self.mesh, placements, t, t.shape)).contiguous()

    def operands(self, q: Any, k: Any, v: Any) -> list[Tensor]:
        """Returns this rank's parts of q, k and v, redistributed as the call shards them."""
        return [self.local(q, self.operand), self.local(k, self.keys), self.local(v, self.keys)]

    def options(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Returns the options with the local part of each tensor."""
        placements: dict[str, Callable[[Tensor], list[Placement]]] = {
            "alibi_slopes": self.slopes,
            "attn_bias": self.bias,
            "block_lists": self.lists,
            "block_lists_t": self.lists,
            "dlse": lambda t: self.softmax_lse,
            "sinks": lambda t: self.sinks,
            "seqused_k": lambda t: self._placements(batch=None if self._packed else 0, heads=None),
        }
        return {
            name: self.local(value, placements[name](value) if name in placements else self.replicated)
            if isinstance(value, Tensor)
            else value
            for name, value in kwargs.items()
        }

    def generator(self, q: Tensor, dropout_p: float, given: torch.Generator | None) -> torch.Generator | None:
        """Returns the generator for dropout: ranks with different shards draw different numbers, replicas the same."""
        if not dropout_p:
            return given
        coordinate = self.mesh.get_coordinate()
        assert coordinate is not None
        part = tuple(i for i, what in zip(coordinate, self._sharded) if what != _NOTHING)
        return generator_for(given, q.device, part)


def _spec(mesh: DeviceMesh, placements: Sequence[Placement], like: Tensor, shape: Sequence[int]) -> DTensorSpec:
    """Returns the spec of a whole, contiguous tensor of this shape."""
    strides = torch.empty(tuple(shape), device="meta").stride()
    return DTensorSpec(mesh, tuple(placements), tensor_meta=TensorMeta(torch.Size(shape), strides, like.dtype))


def _wrap(mesh: DeviceMesh, t: Tensor, shape: Sequence[int], placements: Sequence[Placement]) -> Tensor:
    """Returns a DTensor of shape `shape` from local parts. DTensor.from_local would be recorded by autograd."""
    wrap: Any = DTensor._op_dispatcher.wrap
    return wrap(t, _spec(mesh, placements, t, shape))


# ---- inside context_parallel ------------------------------------------------------------------------------------------


def _is_context_parallel(q: Any) -> bool:
    """Returns whether `context_parallel` is open and q is sharded by it: (batch, seqlen, nheads, headdim) along seqlen."""
    table = DTensor._op_dispatcher._custom_op_handlers
    return (
        isinstance(q, DTensor)
        and torch.ops.aten._scaled_dot_product_efficient_attention.default in table  # its handler, which context_parallel adds
        and q.device_mesh.ndim == 1
        and q.dim() == 4
        and q.placements[0] == Shard(1)
    )


#: Options of `fwd` that the ring sets itself, for each of its calls.
_OF_RINGS = {"is_causal", "window_left", "window_right", "dropout_p", "deterministic", "check_lengths", "max_seqlen_q", "max_seqlen_k"}


def _ring_problem(op: str, q: Any, k: Any, v: Any, options: dict[str, Any]) -> ring.Problem:
    """Returns the ring's description of a call inside `context_parallel`, after all ranks have compared their arguments."""
    from torch.distributed.tensor.experimental._attention import _cp_options

    for name, t in (("k", k), ("v", v)):
        placements = getattr(t, "placements", (Replicate(),))
        if placements != q.placements:
            # with is_causal, SDPA cuts k and v to q's seqlen, and DTensor replicates what is cut
            expected = f"{q.placements[0]!r}, as q: if is_causal hides keys after q's seqlen, cut k and v to q's seqlen before sharding"
            raise bad_argument(f"context_parallel: {name}", repr(placements[0]), expected, error=NotImplementedError)
    # options that nothing here shards over the ring
    of_ranks = {"attn_bias", "alibi_slopes", "block_lists", "seqused_k", "cu_seqlens_q", "sinks", "dlse"}
    unsupported = of_ranks & {name for name, t in options.items() if t is not None}
    if unsupported or options.get("dropout_p"):
        raise bad_argument("context_parallel", ", ".join(sorted(unsupported)) or "dropout_p", "none", error=NotImplementedError)
    group = q.device_mesh.get_group()
    size, rank = group.size(), dist.get_rank(group)
    layout = "zigzag" if _cp_options.enable_load_balance else "contiguous"
    chunks = 2 * size if layout == "zigzag" else size
    for name, t in (("q", q), ("k", k)):
        if t.shape[1] % chunks:
            raise bad_argument(f"context_parallel: {name}", f"seqlen {t.shape[1]}", f"a multiple of {chunks}", error=NotImplementedError)
    local = q._local_tensor
    check_same_arguments(
        [group], f"context_parallel, {op}", lambda: ({"q": str(local.dtype), "shapes": str((q.shape, k.shape))}, None), local.device
    )
    ring.prepare(group, local.device)
    window = options.get("window_left", -1), 0 if options.get("is_causal") else options.get("window_right", -1)
    left, right = (n if n >= 0 else None for n in window)
    return ring.Problem(
        op="context_parallel",
        group=group,
        rank=rank,
        q_ranges=[shard_ranges(q.shape[1], size, r, layout) for r in range(size)],
        k_ranges=[shard_ranges(k.shape[1], size, r, layout) for r in range(size)],
        mask=Mask(((0, q.shape[1]),), ((0, k.shape[1]),), left, right),
        scores={name: value for name, value in options.items() if name not in _OF_RINGS and value is not None},
        deterministic=bool(options.get("deterministic")),
    )


def _ring_fwd(q: Any, k: Any, v: Any, generator: torch.Generator | None = None, **options: Any) -> Any:
    """Computes `volta_fa::fwd` of q, k and v that are sharded along the sequence, as a ring."""
    problem = _ring_problem("forward", q, k, v, options)
    out, lse, _ = ring.forward(problem, q._local_tensor, k._local_tensor, v._local_tensor, None)  # None: no sinks
    mesh, rng_state = q.device_mesh, out.new_empty(0, dtype=torch.int64)
    return (
        _wrap(mesh, out, (*q.shape[:-1], v.shape[-1]), [Shard(1)]),
        _wrap(mesh, lse, _lse_shape(q), [Shard(2)]),
        _wrap(mesh, rng_state, (0,), [Replicate()]),
    )


def _ring_bwd(
    dout: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, rng_state: Any = None, attn_bias_requires_grad: bool = False, **options: Any
) -> Any:
    """Computes `volta_fa::bwd` of tensors that are sharded along the sequence, as a ring."""
    problem = _ring_problem("backward", q, k, v, options)
    mesh = q.device_mesh
    call = _Sharding(q, ())
    dout, out, lse = (call.local(t, [Shard(dim)]) for t, dim in ((dout, 1), (out, 1), (lse, 2)))
    # None, (): no sinks, no random states
    found: Any = ring.backward(problem, dout, q._local_tensor, k._local_tensor, v._local_tensor, out, lse, None, ())
    nothing = _wrap(mesh, dout.new_empty(0), (0,), [Replicate()])
    return *(_wrap(mesh, gradient, t.shape, [Shard(1)]) for t, gradient in zip((q, k, v), found)), nothing, nothing
