"""Ulysses (arXiv 2309.14509): each rank exchanges its positions of all heads for all positions of its heads, and back. attention.py calls
`to_heads` before attention, and `to_sequence` after it. Tensors are (batch, positions, heads, headdim)."""

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import first_line
from .plan import shard_ranges  # the positions that a rank holds, as ranges

#: Number of ranks and layout ("zigzag" or "contiguous") whose shards, concatenated by rank, must be put in the order of their positions;
#: None: they stay as they are, because the ring handles the layout.
Order = tuple[int, str] | None


def _all_to_all(op: str, group: dist.ProcessGroup, parts: Sequence[Tensor], sizes: Sequence[Sequence[int]]) -> list[Tensor]:
    """Sends `parts[r]` to rank r, and receives a tensor of shape `sizes[r]` from it. Sends bytes, which every backend supports."""
    like = parts[0]
    width = like.element_size()
    send = torch.cat([part.reshape(-1) for part in parts]).view(torch.uint8)
    counts = [width * math.prod(shape) for shape in sizes]
    received = send.new_empty(sum(counts))
    try:
        dist.all_to_all_single(received, send, counts, [width * part.numel() for part in parts], group=group)
    except RuntimeError as error:
        raise RuntimeError(
            f"volta_fa.distributed.{op}: the exchange of heads and positions failed: a rank is late or has ended ({first_line(error)})"
        ) from error
    return [part.view(like.dtype).view(*shape) for part, shape in zip(received.split(counts), sizes)]


@lru_cache(maxsize=16)
def _positions(order: Order, seqlen: int, device: torch.device) -> Tensor | None:
    """Returns the position of each row of the concatenated shards; None if they are in order."""
    if order is None:
        return None
    ranges = [r for rank in range(order[0]) for r in shard_ranges(seqlen, size=order[0], rank=rank, layout=order[1])]
    if all(a[1] == b[0] for a, b in zip(ranges, ranges[1:])):
        return None
    return torch.cat([torch.arange(*r) for r in ranges]).to(device, non_blocking=True)


def _to_heads(t: Tensor, op: str, group: dist.ProcessGroup, lengths: list[int], heads: list[tuple[int, int]], order: Order) -> Tensor:
    """Exchanges this rank's positions of all heads for all positions of `heads[this rank]`, ranges that may overlap. `lengths`: numbers of
    positions of each rank."""
    mine = heads[dist.get_rank(group)]
    sizes = [(t.shape[0], n, mine[1] - mine[0], t.shape[3]) for n in lengths]
    parts = _all_to_all(op, group, [t[:, :, first:last] for first, last in heads], sizes)
    shards = torch.cat(parts, 1)
    where = _positions(order, shards.shape[1], shards.device)
    return shards if where is None else torch.empty_like(shards).index_copy_(1, where, shards)


def _to_sequence(t: Tensor, op: str, group: dist.ProcessGroup, lengths: list[int], heads: list[tuple[int, int]], order: Order) -> Tensor:
    """The reverse exchange, and the derivative of the first: sums heads that several ranks have."""
    rows, nheads = lengths[dist.get_rank(group)], heads[-1][1]
    sizes = [(t.shape[0], rows, last - first, t.shape[3]) for first, last in heads]
    where = _positions(order, t.shape[1], t.device)
    shards = t if where is None else t.index_select(1, where)
    parts = _all_to_all(op, group, shards.split(lengths, 1), sizes)
    if sum(last - first for first, last in heads) == nheads:
        return torch.cat(parts, 2)
    # several ranks read the same KV heads: their gradients are summed in fp32
    wide = torch.promote_types(t.dtype, torch.float32)
    total = torch.zeros(t.shape[0], rows, nheads, t.shape[3], dtype=wide, device=t.device)
    for (first, last), part in zip(heads, parts):
        total[:, :, first:last].add_(part)
    return total.to(t.dtype)


class _Exchange(torch.autograd.Function):
    """`_to_heads` if `forth`, else `_to_sequence`. Each is the other's derivative."""

    @staticmethod
    def forward(ctx: Any, t: Tensor, forth: bool, *arguments: Any) -> Tensor:
        ctx.arguments = (not forth, *arguments)
        return (_to_heads if forth else _to_sequence)(t, *arguments)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        # A function of autograd, so that create_graph=True records this exchange: a second derivative then raises, as attention has none.
        apply: Any = _Exchange.apply
        return apply(gradient, *ctx.arguments), *(None,) * len(ctx.arguments)


def to_heads(
    op: str, group: dist.ProcessGroup, tensors: Sequence[Tensor], lengths: Sequence[list[int]], heads: list[tuple[int, int]], order: Order
) -> list[Tensor]:
    """Returns q, k and v with all positions in `group`, in order, and this rank's heads. Differentiable. `op`: the public function, for
    messages. `lengths`: numbers of queries of each rank, and of keys. `heads`: (first, end) of the KV heads for each rank's query heads."""
    q, k, v = tensors
    of_queries = _even_ranges(q.shape[2] // group.size(), group)
    apply: Any = _Exchange.apply
    # True: forth. i: index in `lengths`
    return [apply(t, True, op, group, lengths[i], which, order) for t, i, which in ((q, 0, of_queries), (k, 1, heads), (v, 1, heads))]


def to_sequence(op: str, group: dist.ProcessGroup, out: Tensor, lengths: list[int], order: Order) -> Tensor:
    """Returns this rank's positions of all heads, from all positions of its heads. Differentiable."""
    apply: Any = _Exchange.apply
    return apply(out, False, op, group, lengths, _even_ranges(out.shape[2], group), order)  # False: back


def _even_ranges(each: int, group: dist.ProcessGroup) -> list[tuple[int, int]]:
    """Returns the (first, end) of the heads for each rank: `each` of them."""
    return [(u * each, (u + 1) * each) for u in range(group.size())]
