"""Tensors that travel from rank to rank while something else is computed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor

from .layout import Range

_ready: WeakSet[dist.ProcessGroup] = WeakSet()


def prepare(group: dist.ProcessGroup, device: torch.device) -> None:
    """Before a group's first messages: NCCL makes its communicator with the first operation, which all ranks have to take part in,
    and of messages that some ranks skip not all would."""
    if group not in _ready and device.type == "cuda" and group.size() > 1:
        dist.all_reduce(torch.zeros(1, device=device), group=group)
    _ready.add(group)


class Transfer:
    """Messages on their way: at most one to, and one from, another rank.

    The backend sends and receives beside what the current stream does (NCCL on a stream of its own, gloo in threads of its
    own), once what has been asked of that stream so far is done.
    """

    def __init__(
        self,
        op: str,
        group: dist.ProcessGroup,
        *,
        send: Tensor | None = None,
        to: int = 0,
        receive: Tensor | None = None,
        source: int = 0,
    ):
        self._op, self._source, self._to, self.received = op, source, to, receive
        # the messages of a pair of ranks are taken in the order in which they were sent
        work = []
        if send is not None and send.numel():
            work.append(dist.P2POp(dist.isend, send, dist.get_global_rank(group, to), group))
        if receive is not None and receive.numel():
            work.append(dist.P2POp(dist.irecv, receive, dist.get_global_rank(group, source), group))
        self._sent = send  # alive until it has been sent
        self._work = dist.batch_isend_irecv(work) if work else []

    def wait(self) -> None:
        """Until it has arrived: the current stream, or on the CPU this thread."""
        try:
            for work in self._work:
                work.wait()
        except RuntimeError as error:
            raise RuntimeError(
                f"volta_fa.distributed.{self._op}: sending to rank {self._to} or receiving from rank {self._source} of the group failed: "
                f"such a process is late or has ended ({str(error).splitlines()[0]})"
            ) from error
        self._work, self._sent = [], None


def pack(tensors: Sequence[Tensor], rows: Sequence[Range]) -> Tensor:
    """These rows of (batch, seqlen, ...) tensors, in one message."""
    return torch.cat([select(t, rows).flatten() for t in tensors])


def select(t: Tensor, rows: Sequence[Range]) -> Tensor:
    """These rows of a (batch, seqlen, ...) tensor; of one range a view."""
    parts = [t[:, begin:end] for begin, end in rows]
    return parts[0] if len(parts) == 1 else torch.cat(parts, 1) if parts else t[:, :0]


def room(tensors: Sequence[Tensor], count: int, dtype: torch.dtype | None = None) -> Tensor:
    """For a message with so many rows of tensors like these."""
    return tensors[0].new_empty(count * sum(_row(t) for t in tensors), dtype=dtype)


def _row(t: Tensor) -> int:
    """Elements of one row of all entries."""
    return t.shape[0] * math.prod(t.shape[2:])


def unpack(message: Tensor, tensors: Sequence[Tensor], count: int) -> list[Tensor]:
    """Of each of the tensors, the rows that `pack` took."""
    parts = message.split([count * _row(t) for t in tensors])
    return [part.view(t.shape[0], count, *t.shape[2:]) for part, t in zip(parts, tensors)]
