"""Checks process groups and meshes that are arguments, and gathers over them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ..errors import bad_argument
from .plan import LAYOUTS, Range, shard_ranges

#: The ranks of a sharded sequence: a process group, a mesh of one dimension, or one of two, ring and Ulysses. None: all processes.
Group = dist.ProcessGroup | DeviceMesh | None


@dataclass(frozen=True)
class Grid:
    """A ring of places, each of which is a Ulysses group. None for a dimension without a group."""

    ring: dist.ProcessGroup | None
    ulysses: dist.ProcessGroup | None
    #: this rank's place in the ring and its rank in the Ulysses group, and their sizes
    ring_rank: int
    ring_size: int
    ulysses_rank: int
    ulysses_size: int

    def ranges(self, seqlen: int, layout: str, ring_rank: int | None = None, ulysses_rank: int | None = None) -> tuple[Range, ...]:
        """Returns the positions that a rank holds: this rank by default."""
        r = self.ring_rank if ring_rank is None else ring_rank
        u = self.ulysses_rank if ulysses_rank is None else ulysses_rank
        return shard_ranges(seqlen, self.ring_size, r, layout, self.ulysses_size, u)


def group_of(op: str, group: Group, *, name: str = "group") -> dist.ProcessGroup:
    """Returns the process group of an argument. Raises ValueError if this rank is not in it, RuntimeError without process groups."""
    if not dist.is_available() or not dist.is_initialized():
        raise RuntimeError(f"volta_fa.distributed.{op}: no process group: call torch.distributed.init_process_group first")
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            expected = "one dimension of it, as mesh['ring'], or context_parallel_attention, which takes two"
            raise bad_argument(name, f"a mesh of {group.ndim} dimensions", expected, op=f"distributed.{op}")
        if group.get_coordinate() is None:
            raise bad_argument(name, f"a mesh without rank {dist.get_rank()}", "one with it", op=f"distributed.{op}")
        return group.get_group()
    found: Any = dist.group.WORLD if group is None else group
    if not isinstance(found, dist.ProcessGroup):
        given = "the result of new_group on a rank outside it" if found == dist.GroupMember.NON_GROUP_MEMBER else repr(found)
        raise bad_argument(name, given, f"a process group or mesh that rank {dist.get_rank()} is in", op=f"distributed.{op}")
    if dist.get_rank(found) < 0:
        raise bad_argument(name, f"a group without rank {dist.get_rank()}", "one with it", op=f"distributed.{op}")
    return found


def grid_of(op: str, group: Group) -> Grid:
    """Returns the grid of an argument. A group or a mesh of one dimension is a ring; a mesh of two is (ring, Ulysses)."""
    if isinstance(group, DeviceMesh) and group.ndim == 2:
        if group.get_coordinate() is None:
            raise bad_argument("mesh", f"one without rank {dist.get_rank()}", "one with it", op=f"distributed.{op}")
        ring, ulysses = group.get_group(0), group.get_group(1)
        return Grid(ring, ulysses, dist.get_rank(ring), ring.size(), dist.get_rank(ulysses), ulysses.size())
    if isinstance(group, DeviceMesh) and group.ndim > 2:
        raise bad_argument("mesh", f"{group.ndim} dimensions", "1 (a ring) or 2 (ring, Ulysses)", op=f"distributed.{op}")
    ring = group_of(op, group)
    return Grid(ring, None, dist.get_rank(ring), ring.size(), 0, 1)


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
