"""The public functions of `volta_fa.distributed`: attention over a sequence that is sharded over ranks, and sharding. All attention
functions call `_attention`. It compares the ranks' arguments, exchanges heads for positions in the Ulysses group (ulysses.py), and runs the
ring (ring.py).

Group     a type: the caller's process group, mesh, or None for all processes
Grid      its ranks in two dimensions: the process groups `ring` and `ulysses` (None: no such dimension), with this rank's rank and the
          size of each; `ranges()` are the positions that a rank holds"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, SupportsIndex

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ..errors import bad_argument, require_tensors
from .argument_check import check_same_arguments  # raises the same error on all ranks if their arguments differ
from .plan import LAYOUTS, Mask, Range, length, shard_ranges  # a mask by positions; the positions that a rank holds, as ranges
from .ring import Problem, attend, derived_generator, prepare  # `attend` runs a Problem as a ring; `prepare` sets up a group's messages
from .ulysses import to_heads, to_sequence  # exchange positions of all heads for all positions of some heads, and back


def shard_sequence(tensor: Tensor, group: Group = None, dim: int = 1, layout: str = "zigzag") -> Tensor:
    """Returns this rank's shard of a whole tensor along its sequence dimension: of q, k, v, tokens, labels or position ids.

    Every rank has the whole tensor and takes its own positions, in the order that the attention functions expect. Nothing is sent.
    Shards differ in length where the length is not divisible. Differentiable.

    Args:
        tensor: the same on all ranks.
        group: a process group, a mesh of one dimension, or of two (ring, Ulysses); all processes unless given.
        dim: the dimension of the sequence; of packed sequences, that of all tokens.
        layout: "zigzag" balances the work under a causal mask: each rank holds a chunk from the front and one from the back.
            "contiguous" gives each rank one chunk.

    Raises ValueError for a wrong group or layout, RuntimeError without a process group.
    """
    grid = grid_of("shard_sequence", group)
    check_layout("shard_sequence", layout)
    ranges = grid.ranges(tensor.shape[dim], layout)
    parts = [tensor.narrow(dim, begin, end - begin) for begin, end in ranges]
    return torch.cat(parts, dim) if parts else tensor.narrow(dim, 0, 0)


def unshard_sequence(tensor: Tensor, group: Group = None, dim: int = 1, layout: str = "zigzag") -> Tensor:
    """Returns the whole tensor on every rank, from the shards of `shard_sequence`. The arguments are the same. No gradient. Raises what
    `shard_sequence` does, ValueError for shards that do not fit together, RuntimeError if a rank does not make the call in time."""
    grid = grid_of("unshard_sequence", group)
    groups = _groups(grid)
    check_layout("unshard_sequence", layout)

    def local_arguments() -> tuple[dict[str, Any], Any]:
        others = [n for i, n in enumerate(tensor.shape) if i != dim % tensor.dim()]
        return {"tensor": f"{tensor.dtype}, {others} besides dim {dim}", "layout": layout}, tensor.shape[dim]

    lengths = check_same_arguments(groups, "unshard_sequence", local_arguments, tensor.device)
    _check_lengths("unshard_sequence", "tensor", grid, lengths, layout)
    prepare(groups[-1], tensor.device)
    t = tensor.detach().movedim(dim, 0).contiguous()
    size = grid.ulysses_size
    by_ring_rank = [lengths[r * size : (r + 1) * size] for r in range(grid.ring_size)]
    if grid.ulysses is not None:
        t = torch.cat(gather(t, grid.ulysses, by_ring_rank[grid.ring_rank]))
    assert grid.ring is not None
    whole = t.new_empty((sum(lengths), *t.shape[1:]))
    for rank, shard in enumerate(gather(t, grid.ring, [sum(of_rank) for of_rank in by_ring_rank])):
        at = 0
        for begin, end in shard_ranges(len(whole), grid.ring_size, rank, layout):
            whole[begin:end] = shard[at : at + end - begin]
            at += end - begin
    return whole.movedim(0, dim)


def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    group: Group = None,
    *,
    softmax_scale: float | None = None,
    is_causal: bool = False,
    window_left: int = -1,
    window_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    cu_seqlens: Tensor | Sequence[int] | None = None,
    layout: str = "zigzag",
    deterministic: bool = False,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Computes attention over a sequence that is sharded over ranks, as a ring. Each rank passes and gets its shard.

    Queries stay. Keys and values are sent to the ranks whose queries see them, while the kernels run. Memory and computation of a rank
    are those of its shard. Differentiable in q, k, v and sinks, with gradients as exact as on one device.

    The options are those of `volta_fa::fwd` (help(volta_fa)), for the whole sequence: is_causal and windows are aligned to its end, and
    distances are between positions in it.

    Args:
        q: (batch, seqlen_q, nheads, headdim), k: (batch, seqlen_k, nheads_k, headdim), v: (batch, seqlen_k, nheads_k, headdim_v), sharded
            by `shard_sequence`; packed sequences are (total, nheads, headdim) with cu_seqlens. float16 or bfloat16, on the CPU also
            float32 or float64.
        group: a process group or mesh of one dimension; all processes unless given.
        alibi_slopes: float32, (nheads) or (batch, nheads); the same on all ranks.
        sinks: (nheads), the same on all ranks. Its gradient is that of this rank's rows: sum it over the group, as the gradients of
            all weights.
        dropout_p, generator: all ranks pass generators in the same state, PyTorch's default one (torch.manual_seed) unless given. Ranks
            derive different random numbers from it.
        cu_seqlens: int32, (sequences + 1), or a sequence of ints: where each packed sequence begins in the whole batch, from 0, and
            at the end the number of all tokens; for queries and keys alike. The same on all ranks. Read on the host, so a tensor on
            a GPU synchronizes.
        layout: that of `shard_sequence`.

    Returns this rank's shard of the output, (batch, seqlen_q of the shard, nheads, headdim_v) or packed.

    Raises the same on all ranks, before any tensor is sent: ValueError if arguments of any rank are wrong or differ, NotImplementedError
    for unsupported ones. Raises RuntimeError if a rank does not make the call within the group's timeout.
    """
    return _attention("ring_attention", Grid.of(ring=group_of("ring_attention", group)), **locals())  # locals(): all arguments


def ulysses_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    group: Group = None,
    *,
    softmax_scale: float | None = None,
    is_causal: bool = False,
    window_left: int = -1,
    window_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    cu_seqlens: Tensor | Sequence[int] | None = None,
    layout: str = "zigzag",
    deterministic: bool = False,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Computes what `ring_attention` does by exchanging heads for positions.

    One all-to-all gives each rank the whole sequence of some heads, and another returns the output's positions. nheads must be a multiple
    of the group's size, and nheads_k a multiple or a divisor of it. It sends less than a ring of as many ranks. But kernels wait for the
    exchange, and a rank's memory is that of the whole sequence for its heads.

    Arguments, result and errors are those of `ring_attention`."""
    return _attention("ulysses_attention", Grid.of(ulysses=group_of("ulysses_attention", group)), **locals())


def context_parallel_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mesh: Group = None,
    *,
    softmax_scale: float | None = None,
    is_causal: bool = False,
    window_left: int = -1,
    window_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    cu_seqlens: Tensor | Sequence[int] | None = None,
    layout: str = "zigzag",
    deterministic: bool = False,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Computes what `ring_attention` does over a mesh of two dimensions: rings along the first, Ulysses along the second.

    The second dimension should lie inside a machine, because kernels wait for its exchanges. A group or a mesh of one dimension is a
    ring. Arguments, result and errors are those of `ring_attention`."""
    return _attention("context_parallel_attention", grid_of("context_parallel_attention", mesh), **locals())


def _groups(grid: Grid) -> list[dist.ProcessGroup]:
    """Returns the groups of a grid as `check_same_arguments` takes them: the ring last."""
    return [group for group in (grid.ulysses, grid.ring) if group is not None]


def _attention(
    op: str,
    grid: Grid,
    *,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    alibi_slopes: Tensor | None,
    sinks: Tensor | None,
    cu_seqlens: Tensor | Sequence[int] | None,
    layout: str,
    generator: torch.Generator | None,
    group: Group = None,
    mesh: Group = None,
    **options: Any,
) -> Tensor:
    """Computes the public function `op`, whose arguments these are, on the ranks of `grid`, made of group or mesh. Returns this rank's
    shard of the output. `options`: softmax_scale, is_causal, window_left, window_right, softcap, dropout_p and deterministic, as of
    `volta_fa::fwd`."""
    require_tensors(q=q, k=k, v=v)
    if torch.is_autocast_enabled(q.device.type):
        dtype = torch.get_autocast_dtype(q.device.type)
        q, k, v = (t if t.dtype == torch.float64 else t.to(dtype) for t in (q, k, v))  # as autocast does
    options["deterministic"] = options["deterministic"] or torch.are_deterministic_algorithms_enabled()
    dropout_p, window_left, window_right = (options[name] for name in ("dropout_p", "window_left", "window_right"))
    # The ranks compare their arguments, then the lengths of their shards.
    starts: list[int] | None = None  # cu_seqlens on the host; None: not packed

    def local_arguments() -> tuple[dict[str, Any], Any]:
        """Returns what all ranks must have in common, and this rank's numbers of queries and keys."""
        nonlocal starts
        check_layout(op, layout)
        if cu_seqlens is not None:
            starts = _starts(op, cu_seqlens)
        _check_locally(op, q, k, v, starts, options, {"alibi_slopes": alibi_slopes, "sinks": sinks})
        _check_heads(op, q, k, grid)
        tensors = [t for t in (q, k, v, sinks) if t is not None]
        same = {
            name: f"{str(t.dtype).removeprefix('torch.')} on {t.device.type}, {_without_rows(t)}"
            for name, t in (("q", q), ("k", k), ("v", v))
        }
        same |= {
            "options": str(options),
            "layout": layout,
            "alibi_slopes": "None" if alibi_slopes is None else f"shape {tuple(alibi_slopes.shape)}",
            "sinks": "None" if sinks is None else str(sinks.dtype),
            "cu_seqlens": "None"
            if starts is None
            else f"{len(starts) - 1} sequences of {starts[-1]} tokens, {zlib.crc32(repr(starts).encode()):08x}",
            "requires_grad": str(torch.is_grad_enabled() and any(t.requires_grad for t in tensors)),
        }
        if dropout_p:
            same["generator"] = f"a state {_state(generator, q.device)}"
        return same, [q.shape[-3], k.shape[-3]]

    groups = _groups(grid)
    lengths = check_same_arguments(groups, op, local_arguments, q.device)
    q_lengths, k_lengths = ([n[i] for n in lengths] for i in (0, 1))
    seqlen_q = _check_lengths(op, "q", grid, q_lengths, layout)
    seqlen_k = _check_lengths(op, "k", grid, k_lengths, layout)
    if starts is not None and (starts[-1] != seqlen_q or starts[-1] != seqlen_k):
        expected = f"the {seqlen_q} queries and {seqlen_k} keys of all ranks"
        raise bad_argument("cu_seqlens", f"{starts[-1]} tokens", expected, op=f"distributed.{op}")
    for part in groups:
        prepare(part, q.device)
    seed: tuple[int, ...] = ()
    if dropout_p:
        seed = (_state(generator, q.device), grid.ulysses_rank)
        torch.empty(1, device=q.device).uniform_(generator=generator)  # so that the next call draws other numbers

    packed = starts is not None
    if packed:  # below, packed tensors have a batch of 1
        q, k, v = (t.unsqueeze(0) for t in (q, k, v))
    # The Ulysses group exchanges: then this rank has some heads, of all positions of the group.
    if grid.ulysses is not None:
        size, nheads, nheads_k = grid.ulysses_size, q.shape[2], k.shape[2]
        each = nheads // size
        own_heads = slice(grid.ulysses_rank * each, (grid.ulysses_rank + 1) * each)
        # for each rank, the (first, end) of the KV heads that its query heads use
        of_keys = [(u * each * nheads_k // nheads, -(-(u + 1) * each * nheads_k // nheads)) for u in range(size)]
        own_ulysses = slice(grid.ring_rank * size, (grid.ring_rank + 1) * size)
        # without a ring, positions are put in the sequence's order; with one, the ring handles the order of the layout
        order = (size, layout) if grid.ring is None else None
        q, k, v = to_heads(op, grid.ulysses, (q, k, v), (q_lengths[own_ulysses], k_lengths[own_ulysses]), of_keys, order)
        alibi_slopes = None if alibi_slopes is None else alibi_slopes[..., own_heads].contiguous()
        sinks = None if sinks is None else sinks[own_heads]
    # The ring computes attention, by positions in the whole sequence.
    sequences = tuple(zip(starts, starts[1:])) if starts is not None else ()
    mask = Mask(
        queries=sequences or ((0, seqlen_q),),
        keys=sequences or ((0, seqlen_k),),
        left=window_left if window_left >= 0 else None,
        right=0 if options["is_causal"] else window_right if window_right >= 0 else None,
        alibi=alibi_slopes is not None,
    )
    ring_ranks = range(grid.ring_size)
    problem = Problem(
        op=op,
        group=groups[-1],  # without a ring the Ulysses group: nothing is sent, and the backward pass compares arguments in it
        rank=grid.ring_rank,
        q_ranges=[shard_ranges(seqlen_q, grid.ring_size, rank, layout) for rank in ring_ranks],
        k_ranges=[shard_ranges(seqlen_k, grid.ring_size, rank, layout) for rank in ring_ranks],
        mask=mask,
        scores={name: options[name] for name in ("softmax_scale", "softcap")},
        dropout_p=dropout_p,
        seed=seed,
        deterministic=bool(options["deterministic"]),
        alibi_slopes=alibi_slopes,
    )
    out = attend(problem, q, k, v, sinks)
    if grid.ulysses is not None:
        out = to_sequence(op, grid.ulysses, out, q_lengths[own_ulysses], order)
    return out.squeeze(0) if packed else out


def _without_rows(t: Tensor) -> str:
    """Returns the sizes of a tensor but for its tokens, in which shards may differ, as text."""
    names = ("batch", "nheads", "headdim") if t.dim() == 4 else ("nheads", "headdim")
    sizes = [n for i, n in enumerate(t.shape) if i != t.dim() - 3]
    return ", ".join(f"{name} {n}" for name, n in zip(names, sizes))


def _starts(op: str, cu_seqlens: Tensor | Sequence[int]) -> list[int]:
    """Returns cu_seqlens as ints. Raises ValueError if they are no ints, do not begin with 0, or fall."""
    given = cu_seqlens.tolist() if hasattr(cu_seqlens, "tolist") else cu_seqlens  # tensors, NumPy's arrays
    if not isinstance(given, Sequence) or not all(isinstance(n, SupportsIndex) for n in given):
        what = f"shape {tuple(cu_seqlens.shape)}, dtype {cu_seqlens.dtype}" if isinstance(cu_seqlens, Tensor) else repr(cu_seqlens)
        raise bad_argument("cu_seqlens", what, "an int32 tensor (sequences + 1), or ints", op=f"distributed.{op}")
    starts = [int(n) for n in given]
    if len(starts) < 2 or starts[0] != 0 or any(a > b for a, b in zip(starts, starts[1:])):
        shown = f"{starts[:8]}{'...' if len(starts) > 8 else ''}"
        raise bad_argument("cu_seqlens", shown, "at least 2 numbers that begin with 0 and never fall", op=f"distributed.{op}")
    return starts


def _state(generator: torch.Generator | None, device: torch.device) -> int:
    """Returns a number that identifies the state of a generator, without synchronizing."""
    if generator is None:
        if device.type == "cuda":
            index = torch.cuda.current_device() if device.index is None else device.index
            generator = torch.cuda.default_generators[index]
        else:
            generator = torch.default_generator
    if generator.device.type == "cuda":
        text = repr((generator.initial_seed(), generator.get_offset())).encode()
    else:
        text = bytes(generator.get_state().numpy())
    return int.from_bytes(hashlib.blake2b(text, digest_size=6).digest(), "little")


def generator_for(given: torch.Generator | None, device: torch.device, part: tuple[int, ...]) -> torch.Generator:
    """Returns a generator whose numbers follow from a generator's state and the part that a rank computes. Advances that state."""
    found = derived_generator(device, (_state(given, device), *part))
    torch.empty(1, device=device).uniform_(generator=given)
    return found


def _check_locally(
    op: str, q: Tensor, k: Tensor, v: Tensor, starts: list[int] | None, options: dict[str, Any], of_heads: dict[str, Tensor | None]
) -> None:
    """Raises what `volta_fa::fwd` raises for this rank's arguments, found by a call with meta tensors, with `op` in the message.
    of_heads: alibi_slopes and sinks."""
    rank, what = (3, "(total, nheads, headdim), since cu_seqlens is given") if starts else (4, "(batch, seqlen, nheads, headdim)")
    for name, t in (("q", q), ("k", k), ("v", v)):
        if t.dim() != rank:
            raise bad_argument(name, f"a tensor of rank {t.dim()}", f"rank {rank}, {what}", op=f"distributed.{op}")
        if t.device != q.device:
            raise bad_argument(name, f"device {t.device}", f"{q.device}, that of q", op=f"distributed.{op}")
        if q.device.type == "cuda" and t.dtype not in (torch.float16, torch.bfloat16):
            raise bad_argument(name, f"dtype {t.dtype}", "torch.float16 or torch.bfloat16", op=f"distributed.{op}")
    meta: dict[str, Any] = {}
    for name, option in of_heads.items():
        if option is not None and option.device != q.device:
            raise bad_argument(name, f"device {option.device}", f"{q.device}, that of q", op=f"distributed.{op}")
        if option is not None:
            meta[name] = torch.empty_strided(option.shape, option.stride(), dtype=option.dtype, device="meta")
    if starts is not None:
        # the lengths of a shard differ from cu_seqlens, so they are checked separately, across ranks
        count = len(starts) - 1
        cu = torch.empty(count + 1, dtype=torch.int32, device="meta")
        meta |= dict(cu_seqlens_q=cu, cu_seqlens_k=cu, max_seqlen_q=max(1, q.shape[0]), max_seqlen_k=max(1, k.shape[0]))
    try:
        described = (torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta") for t in (q, k, v))
        torch.ops.volta_fa.fwd(*described, **meta, **options)
    except (ValueError, NotImplementedError) as error:
        raise type(error)(str(error).replace("volta_fa::fwd", f"volta_fa.distributed.{op}")) from None


def _check_heads(op: str, q: Tensor, k: Tensor, grid: Grid) -> None:
    """Raises ValueError if the ranks of a Ulysses group cannot share the heads equally."""
    size, nheads, nheads_k = grid.ulysses_size, q.shape[-2], k.shape[-2]
    if nheads % size:
        expected = f"a multiple of the {size} ranks that share them; ring_attention takes any number"
        raise bad_argument("q", f"{nheads} heads", expected, op=f"distributed.{op}")
    if nheads_k % size and size % nheads_k:
        raise bad_argument("k", f"{nheads_k} heads", f"a multiple or a divisor of the {size} ranks that share them", op=f"distributed.{op}")


def _check_lengths(op: str, name: str, grid: Grid, lengths: Sequence[int], layout: str) -> int:
    """Returns the length of the whole sequence. Raises ValueError if the shards are not those of `shard_sequence`."""
    total = sum(lengths)
    expected = [length(grid.ranges(total, layout, r, u)) for r in range(grid.ring_size) for u in range(grid.ulysses_size)]
    if list(lengths) != expected:
        wanted = f"{', '.join(map(str, expected))}, as shard_sequence makes them of {total} with layout={layout!r}"
        raise bad_argument(name, f"shards of {', '.join(map(str, lengths))} positions", wanted, op=f"distributed.{op}")
    return total


# ---- the argument `group` or `mesh`, as process groups -----------------------------------------------------------

#: The ranks of a sharded sequence: a process group, a mesh of one dimension, or one of two, ring and Ulysses. None: all processes.
Group = dist.ProcessGroup | DeviceMesh | None


@dataclass(frozen=True)
class Grid:
    """The ranks of a sharded sequence in two dimensions. Along a ring, keys are sent; in a Ulysses group, heads are exchanged. The sequence
    is divided over the ring first, and each part over a Ulysses group. A group is None if there is no such dimension."""

    ring: dist.ProcessGroup | None
    ulysses: dist.ProcessGroup | None
    #: this rank's ranks in the two groups, and the groups' sizes; 0 and 1 without a group
    ring_rank: int
    ring_size: int
    ulysses_rank: int
    ulysses_size: int

    @classmethod
    def of(cls, ring: dist.ProcessGroup | None = None, ulysses: dist.ProcessGroup | None = None) -> Grid:
        """Returns the grid of these groups."""
        places = [(0, 1) if group is None else (dist.get_rank(group), group.size()) for group in (ring, ulysses)]
        return cls(ring, ulysses, *places[0], *places[1])

    def ranges(self, seqlen: int, layout: str, ring_rank: int | None = None, ulysses_rank: int | None = None) -> tuple[Range, ...]:
        """Returns the positions that a rank holds: this rank by default."""
        r = self.ring_rank if ring_rank is None else ring_rank
        u = self.ulysses_rank if ulysses_rank is None else ulysses_rank
        if self.ring is None:  # the layout is that of the Ulysses group
            return shard_ranges(seqlen, self.ulysses_size, u, layout)
        return shard_ranges(seqlen, self.ring_size, r, layout, self.ulysses_size, u)


def group_of(op: str, group: Group) -> dist.ProcessGroup:
    """Returns the process group of an argument. Raises ValueError if this rank is not in it, RuntimeError without process groups."""
    if not dist.is_available() or not dist.is_initialized():
        raise RuntimeError(f"volta_fa.distributed.{op}: no process group: call torch.distributed.init_process_group first")
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            expected = "one dimension of it, as mesh['ring'], or context_parallel_attention, which takes two"
            raise bad_argument("group", f"a mesh of {group.ndim} dimensions", expected, op=f"distributed.{op}")
        if group.get_coordinate() is None:
            raise bad_argument("group", f"a mesh without rank {dist.get_rank()}", "one with it", op=f"distributed.{op}")
        return group.get_group()
    found: Any = dist.group.WORLD if group is None else group
    if not isinstance(found, dist.ProcessGroup):
        given = "the result of new_group on a rank outside it" if found == dist.GroupMember.NON_GROUP_MEMBER else repr(found)
        raise bad_argument("group", given, f"a process group or mesh that rank {dist.get_rank()} is in", op=f"distributed.{op}")
    if dist.get_rank(found) < 0:
        raise bad_argument("group", f"a group without rank {dist.get_rank()}", "one with it", op=f"distributed.{op}")
    return found


def grid_of(op: str, group: Group) -> Grid:
    """Returns the grid of an argument. A group or a mesh of one dimension is a ring; a mesh of two is (ring, Ulysses)."""
    if isinstance(group, DeviceMesh) and group.ndim == 2:
        if group.get_coordinate() is None:
            raise bad_argument("mesh", f"one without rank {dist.get_rank()}", "one with it", op=f"distributed.{op}")
        return Grid.of(ring=group.get_group(0), ulysses=group.get_group(1))
    if isinstance(group, DeviceMesh) and group.ndim > 2:
        raise bad_argument("mesh", f"{group.ndim} dimensions", "1 (a ring) or 2 (ring, Ulysses)", op=f"distributed.{op}")
    return Grid.of(ring=group_of(op, group))


def check_layout(op: str, layout: str) -> None:
    """Raises ValueError for an unknown layout."""
    if layout not in LAYOUTS:
        raise bad_argument("layout", repr(layout), " or ".join(map(repr, LAYOUTS)), op=f"distributed.{op}")


def gather(t: Tensor, group: dist.ProcessGroup, lengths: list[int]) -> list[Tensor]:
    """Returns the tensors of all ranks, which may differ in the length of their first dimension."""
    longest = max(lengths)
    padded = t.new_zeros((longest, *t.shape[1:]))
    padded[: t.shape[0]] = t
    everyone = [t.new_empty(padded.shape) for _ in lengths]
    dist.all_gather(everyone, padded, group=group)
    return [whole[:n] for whole, n in zip(everyone, lengths)]
