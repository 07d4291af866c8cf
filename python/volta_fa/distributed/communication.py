"""Sends tensors from rank to rank while kernels run."""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor

from .plan import Range, length

_ready: WeakSet[dist.ProcessGroup] = WeakSet()


def prepare(group: dist.ProcessGroup, device: torch.device) -> None:
    """Initializes a group's communicator before its first messages.

    NCCL creates it in the first operation, in which all ranks must take part, and some ranks may skip the first message.
    """
    if group not in _ready and device.type == "cuda" and group.size() > 1:
        dist.all_reduce(torch.zeros(1, device=device), group=group)
    _ready.add(group)


class Transfer:
    """Messages in flight, to at most one and from at most one other rank.

    The backend sends and receives while the current stream computes: NCCL on a stream of its own, gloo in threads of its own. It starts
    when the earlier work on the current stream is done.
    """

    def __init__(self, op: str, group: dist.ProcessGroup, *, send: Sequence[Tensor], to: int, receive: Sequence[Tensor], source: int):
        self._op, self._source, self._to = op, source, to
        # messages between two ranks arrive in the order in which they were sent
        work = [dist.P2POp(dist.isend, t, dist.get_global_rank(group, to), group) for t in send if t.numel()]
        work += [dist.P2POp(dist.irecv, t, dist.get_global_rank(group, source), group) for t in receive if t.numel()]
        self._alive = (send, receive)
        self._work = dist.batch_isend_irecv(work) if work else []

    def wait(self) -> None:
        """Makes the current stream, or on the CPU this thread, wait for the messages."""
        try:
            for work in self._work:
                work.wait()
        except RuntimeError as error:
            raise RuntimeError(
                f"volta_fa.distributed.{self._op}: sending to rank {self._to} or receiving from rank {self._source} of the group failed: "
                f"such a process is late or has ended ({str(error).splitlines()[0]})"
            ) from error
        self._work, self._alive = [], ((), ())


def select(t: Tensor, rows: Sequence[Range]) -> Tensor:
    """Returns rows of a (batch, seqlen, ...) tensor; a view if they are one range."""
    parts = [t[:, begin:end] for begin, end in rows]
    return parts[0] if len(parts) == 1 else torch.cat(parts, 1) if parts else t[:, :0]


def messages(t: Tensor, rows: Sequence[Range]) -> list[Tensor]:
    """Returns the messages for rows of a (batch, seqlen, ...) tensor. With batch 1 each range is contiguous and sent without a copy."""
    return [t[:, begin:end].contiguous() for begin, end in rows] if t.shape[0] == 1 else [select(t, rows).contiguous()]


def room(like: Tensor, rows: Sequence[Range]) -> tuple[Tensor, list[Tensor]]:
    """Returns a new tensor for rows, and the views of it that receive the `messages`."""
    whole = like.new_empty((like.shape[0], length(rows), *like.shape[2:]))
    return whole, list(whole.split([end - begin for begin, end in rows], 1)) if like.shape[0] == 1 else [whole]
