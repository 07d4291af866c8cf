"""DTensor's rules for `volta_fa::fwd` and `volta_fa::bwd`.

Each dimension of the mesh shards the batch, the heads or nothing. The placements of the first sharded tensor decide, and the other
tensors are redistributed. A single KV head is replicated where query heads are sharded. Options with a batch or heads are sharded alike;
plain tensors count as replicated.

Inside PyTorch's `context_parallel` the sequence is sharded, and the ops run as a ring.

The rules are handlers, as those of PyTorch's context parallelism, because strategies of the sharding propagator do not see tensors among
keyword arguments.
"""

from __future__ import annotations

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
from . import ring
from .argument_check import check_same_arguments
from .attention import generator_for
from .communication import prepare
from .plan import Mask, shard_ranges

_BATCH, _HEADS, _NOTHING = "batch", "heads", "nothing"
#: The dimensions of batch and heads in dense and in packed tensors; None: packed tensors have no batch.
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
    with torch.no_grad():
        if _is_context_parallel(args[0]):
            return _ring_fwd(*args, **kwargs)
        q, k, v = args
        call = _Sharding(q, (k, v))
        generator = call.generator(q, kwargs.get("dropout_p", 0.0), kwargs.get("generator"))
        local = call.operands(q, k, v)
        out, lse, rng_state = torch.ops.volta_fa.fwd(*local, **call.options(kwargs) | {"generator": generator})
        shape = (*q.shape[:-1], v.shape[-1])
        return (
            call.wrap(out, shape, call.operand),
            call.wrap(lse, _lse_shape(q), call.softmax_lse),
            call.wrap(rng_state, rng_state.shape, call.replicated),
        )


def _bwd(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
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
            call.wrap(dq, q.shape, call.operand),
            call.wrap(dk, k.shape, call.summed(call.keys)),
            call.wrap(dv, v.shape, call.summed(call.keys)),
            call.wrap(dbias, (0,), call.replicated) if wanted is None else call.wrap(dbias, wanted.shape, call.summed(call.bias(wanted))),
            call.wrap(dsinks, (0,), call.replicated) if sinks is None else call.wrap(dsinks, sinks.shape, call.summed(call.sinks)),
        )


def _lse_shape(q: Tensor) -> tuple[int, ...]:
    return (q.shape[1], q.shape[0]) if q.dim() == 3 else (q.shape[0], q.shape[2], q.shape[1])


class _Sharding:
    """What one call shards on each dimension of its mesh, and the placements of its tensors."""

    def __init__(self, q: Any, others: Sequence[Any]):
        self.mesh: DeviceMesh = next(t.device_mesh for t in (q, *others) if isinstance(t, DTensor))
        self._packed = q.dim() == 3
        self._full = q.shape[0], q.shape[-2]
        k = others[0] if others else q
        self._one_head = k.shape[-2] == 1
        operand = _DIMENSIONS["operand"][self._packed]
        self._sharded = [_NOTHING] * self.mesh.ndim
        ranks = 1
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
                    if q.shape[-2] % size == 0 and (self._one_head or k.shape[-2] % size == 0):
                        self._sharded[i], ranks = _HEADS, size

    def _placements(self, batch: int | None, heads: int | None) -> list[Placement]:
        where = {_BATCH: batch, _HEADS: heads, _NOTHING: None}
        dims = [where[what] for what in self._sharded]
        return [Replicate() if dim is None else Shard(dim) for dim in dims]

    @property
    def operand(self) -> list[Placement]:
        dims = _DIMENSIONS["operand"][self._packed]
        return self._placements(dims[_BATCH], dims[_HEADS])

    @property
    def keys(self) -> list[Placement]:
        """The placements of k and v. A single KV head is replicated."""
        dims = _DIMENSIONS["operand"][self._packed]
        return self._placements(dims[_BATCH], None if self._one_head else dims[_HEADS])

    @property
    def softmax_lse(self) -> list[Placement]:
        dims = _DIMENSIONS["softmax_lse"][self._packed]
        return self._placements(dims[_BATCH], dims[_HEADS])

    @property
    def replicated(self) -> list[Placement]:
        return [Replicate()] * self.mesh.ndim

    @property
    def sinks(self) -> list[Placement]:
        return self._placements(None, 0)

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
        return self._placements(0 if t.dim() == 2 and not self._packed else None, t.dim() - 1)

    def summed(self, placements: list[Placement]) -> list[Placement]:
        """Returns the placements of a gradient: partial sums where the call is sharded and the tensor is not."""
        parts: list[Placement] = [
            Partial() if what != _NOTHING and isinstance(placement, Replicate) else placement
            for what, placement in zip(self._sharded, placements)
        ]
        return parts

    def local(self, t: Any, placements: list[Placement]) -> Tensor:
        if isinstance(t, DTensor):
            mine, spec = t._local_tensor, t._spec
        else:
            mine, spec = t, _spec(self.mesh, self.replicated, t, t.shape)
        if list(spec.placements) == placements:
            return mine
        return redistribute_local_tensor(mine, spec, _spec(self.mesh, placements, t, t.shape)).contiguous()

    def operands(self, q: Any, k: Any, v: Any) -> list[Tensor]:
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
            "seqused_k": lambda t: self._placements(None if self._packed else 0, None),
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

    def wrap(self, t: Tensor, shape: Sequence[int], placements: list[Placement]) -> Tensor:
        return _wrap(t, self.mesh, shape, placements)


def _spec(mesh: DeviceMesh, placements: Sequence[Placement], like: Tensor, shape: Sequence[int]) -> DTensorSpec:
    """Returns the spec of a whole, contiguous tensor of this shape."""
    strides = torch.empty(tuple(shape), device="meta").stride()
    return DTensorSpec(mesh, tuple(placements), tensor_meta=TensorMeta(torch.Size(shape), strides, like.dtype))


def _wrap(t: Tensor, mesh: DeviceMesh, shape: Sequence[int], placements: Sequence[Placement]) -> Tensor:
    """Returns a DTensor of local parts. The public functions would record themselves in autograd."""
    wrap: Any = DTensor._op_dispatcher.wrap
    return wrap(t, _spec(mesh, placements, t, shape))


# ---- inside context_parallel ------------------------------------------------------------------------------------------


def _is_context_parallel(q: Any) -> bool:
    """Returns whether `context_parallel` is open and q is sharded by it: (batch, seqlen, nheads, headdim) along seqlen."""
    table = DTensor._op_dispatcher._custom_op_handlers
    return (
        isinstance(q, DTensor)
        and torch.ops.aten._scaled_dot_product_efficient_attention.default in table
        and q.device_mesh.ndim == 1
        and q.dim() == 4
        and q.placements[0] == Shard(1)
    )


#: Options that a ring replaces by its own for each launch.
_OF_RINGS = {"is_causal", "window_left", "window_right", "dropout_p", "deterministic", "check_lengths", "max_seqlen_q", "max_seqlen_k"}


def _ring_problem(op: str, q: Any, k: Any, options: dict[str, Any]) -> ring.Problem:
    from torch.distributed.tensor.experimental._attention import _cp_options

    of_rows = {"attn_bias", "alibi_slopes", "block_lists", "seqused_k", "cu_seqlens_q", "sinks", "dlse"}
    lacking = of_rows & {name for name, t in options.items() if t is not None}
    if lacking or options.get("dropout_p"):
        raise bad_argument("context_parallel", ", ".join(sorted(lacking)) or "dropout_p", "none", error=NotImplementedError)
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
    prepare(group, local.device)
    left, right = options.get("window_left", -1), options.get("window_right", -1)
    return ring.Problem(
        op="context_parallel",
        group=group,
        rank=rank,
        q_ranges=[shard_ranges(q.shape[1], size, r, layout) for r in range(size)],
        k_ranges=[shard_ranges(k.shape[1], size, r, layout) for r in range(size)],
        mask=Mask(
            ((0, q.shape[1]),),
            ((0, k.shape[1]),),
            left if left >= 0 else None,
            0 if options.get("is_causal") else right if right >= 0 else None,
        ),
        scores={name: value for name, value in options.items() if name not in _OF_RINGS and value is not None},
        dropout_p=0.0,
        seed=(),
        deterministic=bool(options.get("deterministic")),
        alibi_slopes=None,
    )


def _ring_fwd(q: Any, k: Any, v: Any, generator: torch.Generator | None = None, **options: Any) -> Any:
    problem = _ring_problem("forward", q, k, options)
    out, lse, _ = ring.forward(problem, q._local_tensor, k._local_tensor, v._local_tensor, None)
    mesh, rng_state = q.device_mesh, out.new_empty(0, dtype=torch.int64)
    return (
        _wrap(out, mesh, (*q.shape[:-1], v.shape[-1]), [Shard(1)]),
        _wrap(lse, mesh, _lse_shape(q), [Shard(2)]),
        _wrap(rng_state, mesh, (0,), [Replicate()]),
    )


def _ring_bwd(
    dout: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, rng_state: Any = None, attn_bias_requires_grad: bool = False, **options: Any
) -> Any:
    problem = _ring_problem("backward", q, k, options)
    mesh = q.device_mesh
    call = _Sharding(q, ())
    dout, out, lse = (call.local(t, [Shard(dim)]) for t, dim in ((dout, 1), (out, 1), (lse, 2)))
    found: Any = ring.backward(problem, dout, q._local_tensor, k._local_tensor, v._local_tensor, out, lse, None, ())
    nothing = _wrap(dout.new_empty(0), mesh, (0,), [Replicate()])
    return *(_wrap(gradient, mesh, t.shape, [Shard(1)]) for t, gradient in zip((q, k, v), found)), nothing, nothing
