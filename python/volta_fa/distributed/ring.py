"""Ring attention (arXiv 2310.01889): queries stay on their rank, keys and values are sent. attention.py and dtensor.py call it.

At step t a rank computes `volta_fa::fwd` with the keys of the rank t places before it, in one or several calls (launches), which plan.py
plans. It merges each result with the earlier ones by softmax_lse, in fp32 (`volta_fa::merge_attention_states_`). A probability is
exp(score - softmax_lse). So `volta_fa::bwd` with the softmax_lse and out of all keys computes the exact gradient of each launch. Gradients
of keys and values return to their rank, which sums them in fp32.

A rank sends each key directly to the ranks that read it, and no others. The messages of the next step are in flight while this step
computes, so a rank holds its own shard and at most two messages."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import first_line
from .argument_check import check_same_arguments  # raises the same error on all ranks if their arguments differ
from .plan import Distance, Launch, Mask, Range, Step, at_most_two, length, plan  # Step: launches of one rank's queries and one's keys


@dataclass
class Problem:
    """One rank's part of a call, after all ranks have compared their arguments."""

    op: str  # the public function, for messages
    group: dist.ProcessGroup
    rank: int  # in the ring
    #: the positions of the queries and of the keys that each rank holds, in the whole sequence
    q_ranges: Sequence[tuple[Range, ...]]
    k_ranges: Sequence[tuple[Range, ...]]
    mask: Mask  # the keys that a query sees, by positions in the whole sequence
    #: options of the operators that every launch gets, such as softcap. A launch is one rectangle of rows (queries) and keys (in `calls`),
    #: or several as packed sequences (`packed`)
    scores: dict[str, Any]
    deterministic: bool
    dropout_p: float = 0.0
    #: numbers from which, with the rank and the launch's number, the dropout seed of each launch is derived; (): no dropout
    seed: tuple[int, ...] = ()
    alibi_slopes: Tensor | None = None  # (nheads) or (sequences or batch, nheads), fp32
    _lengths: dict[Launch, tuple[Tensor, Tensor]] = field(default_factory=dict)  # cache of (cu_seqlens_q, cu_seqlens_k) of packed launches

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.q_ranges)

    def step(self, queries: int, keys: int) -> Step:
        """Returns the launches between one rank's queries and another's keys."""
        return plan(self.q_ranges[queries], self.k_ranges[keys], self.mask)

    def lengths(self, launch: Launch, device: torch.device) -> tuple[Tensor, Tensor]:
        """Returns cu_seqlens_q and cu_seqlens_k of a packed launch."""
        if launch not in self._lengths:
            q = [launch.q[0], *(call.q[1] for call in launch.calls)]
            k = [launch.k[0], *(call.k[1] for call in launch.calls)]
            cu_seqlens = torch.tensor([[n - q[0] for n in q], [n - k[0] for n in k]], dtype=torch.int32)
            q_lengths, k_lengths = cu_seqlens.to(device, non_blocking=True).unbind()
            self._lengths[launch] = (q_lengths, k_lengths)
        return self._lengths[launch]

    def generator(self, number: int, device: torch.device) -> torch.Generator | None:
        """Returns the generator of a launch, None without dropout. Rank and number of the launch make the random numbers differ."""
        if not self.dropout_p:
            return None
        return derived_generator(device, (*self.seed, self.rank, number))


def derived_generator(device: torch.device, numbers: tuple[int, ...]) -> torch.Generator:
    """Returns a generator seeded by 63 bits of a hash of these numbers: rng_state holds seeds as int64."""
    text = repr(numbers).encode()
    return torch.Generator(device).manual_seed(int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1)


def _operand(launch: Launch, t: Tensor, rows: Range) -> Tensor:
    """Returns rows of (batch, seqlen, ...), as a view. Here packed tensors have a batch of 1; the operator takes them without."""
    part = t[:, slice(*rows)]
    return part[0] if launch.packed else part


def _arguments(p: Problem, launch: Launch, q: Tensor) -> tuple[dict[str, Any], Tensor | None]:
    """Returns the operators' options for a launch: window, lengths of packed sequences, and ALiBi by slopes or by a bias. And what is to be
    added to all scores of a row, for its softmax_lse, (batch, nheads, rows); None: nothing."""
    options: dict[str, Any] = {
        **p.scores,
        "dropout_p": p.dropout_p,
        "window_left": -1 if launch.left is None else launch.left,
        "window_right": -1 if launch.right is None else launch.right,
    }
    call, row_scores = launch.calls[0], None
    if launch.packed:
        options["cu_seqlens_q"], options["cu_seqlens_k"] = p.lengths(launch, q.device)
        options["max_seqlen_q"] = max(call.rows for call in launch.calls)
        options["max_seqlen_k"] = max(call.keys for call in launch.calls)
    if p.alibi_slopes is not None:
        slopes = p.alibi_slopes
        if slopes.dim() == 2 and len(p.mask.queries) > 1:  # packed sequences
            slopes = slopes[[call.sequence for call in launch.calls]]
        # OWN: the operator measures the right distances. BEFORE, AFTER: all keys lie before, or after, all rows
        if call.distance is Distance.OWN:
            options["alibi_slopes"] = slopes
        else:
            options["attn_bias"], row_scores = _far_away(call.rows, call.keys, call.offset, call.distance, slopes)
    return options, row_scores


def _far_away(rows: int, keys: int, offset: int, distance: Distance, slopes: Tensor) -> tuple[Tensor, Tensor]:
    """Returns ALiBi where no distance changes its sign: attn_bias for each key, and a score for each row, to be added to softmax_lse.
    `offset`: position of row 0 less that of key 0. `-slope * (offset + i - j)` is linear in i and j. The row's term changes no probability
    in this call, only softmax_lse. The key's term counts from the nearest key, so that it is small for the largest probabilities."""
    slopes = slopes.view(-1, slopes.shape[-1], 1)
    i, j = (torch.arange(n, device=slopes.device, dtype=torch.float32) for n in (rows, keys))
    if distance is Distance.BEFORE:
        bias, of_rows = slopes * (j - (keys - 1)), -slopes * (i + (offset - (keys - 1)))
    else:
        bias, of_rows = -slopes * j, slopes * (i + offset)
    return bias.unsqueeze(2), of_rows


def forward(p: Problem, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Returns this rank's out in q's dtype, softmax_lse over all keys, and the rng_state of each launch. q, k, v: this rank's shards,
    (batch, rows, heads, headdim); packed sequences have a batch of 1. sinks: (nheads)."""
    batch, seqlen_q, nheads, _ = q.shape
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    out = torch.zeros(batch, seqlen_q, nheads, v.shape[-1], dtype=wide, device=q.device)
    lse = torch.full((batch, nheads, seqlen_q), math.inf, dtype=torch.float32, device=q.device)
    states: list[Tensor] = []
    for step, keys, values in _steps(p, k, v):  # receives the keys and values of each other rank that this rank's queries see
        for launch in step.launches:
            options, row_scores = _arguments(p, launch, q)
            generator = p.generator(len(states), q.device)
            operands = (_operand(launch, t, rows) for t, rows in ((q, launch.q), (keys, launch.k), (values, launch.k)))
            part, part_lse, rng_state = torch.ops.volta_fa.fwd(*operands, generator=generator, **options)
            states.append(rng_state)
            if launch.packed:
                part, part_lse = part.unsqueeze(0), part_lse.unsqueeze(0)
            if row_scores is not None:
                part_lse = part_lse + row_scores
            rows = slice(*launch.q)
            torch.ops.volta_fa.merge_attention_states_(out[:, rows], lse[:, :, rows], part, part_lse)
    if sinks is not None and seqlen_q:
        # a sink is a key of each head with a value of 0; one of -inf is no key, which softmax_lse represents by inf
        of_sinks = sinks.float().masked_fill(sinks.float() == -math.inf, math.inf).view(1, -1, 1).expand_as(lse).contiguous()
        torch.ops.volta_fa.merge_attention_states_(out, lse, torch.zeros_like(out), of_sinks)
    return out.to(q.dtype), lse, states


def backward(
    p: Problem, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, sinks: Tensor | None, states: Sequence[Tensor]
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Returns the gradients of q, k, v and sinks; the last is that of this rank's rows only. Shapes are those of `forward`, whose results
    are out, lse and states."""
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    of_rows, of_keys = _parts(p)  # a range for each addition to dq, and to dk and dv; up to two additions to a row need no fp32 (_Sum)
    dq = _Sum(q, wide if not at_most_two(of_rows) else q.dtype)
    dk, dv = (_Sum(x, wide if not at_most_two(of_keys) else x.dtype) for x in (k, v))
    back: _Returning | None = None
    number = 0  # of the launch
    for t, (step, keys, values) in enumerate(_steps(p, k, v)):
        # step.key_ranges: those of the shard's keys that the step reads. adds_up: several launches read a key. own: the step reads all of
        # this rank's keys, so their gradients are added to dk and dv directly
        if own := t == 0 and step.key_ranges == ((0, k.shape[1]),):
            dkeys, dvalues = dk, dv
        else:
            dkeys, dvalues = (_Sum(x, wide if step.adds_up else x.dtype) for x in (keys, values))
        for launch in step.launches:
            options, row_scores = _arguments(p, launch, q)
            rows_lse = lse[:, :, slice(*launch.q)]
            if row_scores is not None:
                rows_lse = rows_lse - row_scores
            found = torch.ops.volta_fa.bwd(
                *(_operand(launch, x, launch.q) for x in (dout, q)), *(_operand(launch, x, launch.k) for x in (keys, values)),
                _operand(launch, out, launch.q), (rows_lse[0] if launch.packed else rows_lse).contiguous(),
                rng_state=states[number] if p.dropout_p else None, deterministic=p.deterministic, **options,
            )  # fmt: skip
            number += 1
            for total, rows, part in zip((dq, dkeys, dvalues), (launch.q, launch.k, launch.k), found[:3]):
                total.add(rows, part.unsqueeze(0) if launch.packed else part)
            del found, part
        del keys, values
        if back is not None:
            back.add_to(dk, dv)
        if t > 0:
            back = _Returning(p, t, dkeys, dvalues, k, v)
        elif not own:
            _add(dk, dv, step.key_ranges, dkeys.total(), dvalues.total())
        del dkeys, dvalues
    if back is not None:
        back.add_to(dk, dv)
    dsinks = None
    if sinks is not None:
        delta = (dout.to(wide) * out.to(wide)).sum(-1)
        probability = torch.exp(sinks.to(wide).view(1, 1, -1) - lse.to(wide).transpose(1, 2))
        dsinks = -(probability * delta).sum((0, 1)).to(sinks.dtype)
    return dq.total().to(q.dtype), dk.total().to(k.dtype), dv.total().to(v.dtype), dsinks


def _parts(p: Problem) -> tuple[list[Range], list[Range]]:
    """Returns the ranges of this rank's rows, and of its keys, for which a gradient is added: one for each addition."""
    of_rows: list[Range] = []
    of_keys: list[Range] = []
    for rank in range(p.size):
        of_rows += [launch.q for launch in p.step(p.rank, rank).launches]
        of_keys += p.step(rank, p.rank).key_ranges if rank != p.rank else []
    own = p.step(p.rank, p.rank)
    # launch.k indexes the own.count keys that the step reads, in own.key_ranges. If these are not one range from key 0, assume 3 additions
    # for each: more than two
    of_keys += [launch.k for launch in own.launches] if own.key_ranges == ((0, own.count),) else 3 * list(own.key_ranges)
    return of_rows, of_keys


class _Sum:
    """The sum of the launches' gradients for rows of a tensor, in `dtype`. That is fp32, or the tensor's dtype if no row gets more than two
    parts: one addition then rounds the sum once, as the conversion from fp32 would."""

    def __init__(self, like: Tensor, dtype: torch.dtype):
        self._like, self._dtype = like, dtype
        self._total: Tensor | None = None

    def add(self, rows: Range, part: Tensor) -> None:
        """Adds a launch's gradient to these rows. The first one, if it is of all rows, becomes the sum without a copy."""
        if self._total is None and rows == (0, self._like.shape[1]) and part.dtype == self._dtype:
            self._total = part
        else:
            self.total()[:, slice(*rows)].add_(part)

    def total(self) -> Tensor:
        """Returns the sum so far, zeros at first."""
        if self._total is None:
            self._total = torch.zeros(self._like.shape, dtype=self._dtype, device=self._like.device)
        return self._total


def _add(dk: _Sum, dv: _Sum, key_ranges: Sequence[Range], dkeys: Tensor, dvalues: Tensor) -> None:
    """Adds the gradients of a step's keys, those in `key_ranges`, to those of all keys."""
    at = 0
    for begin, end in key_ranges:
        for total, part in ((dk, dkeys), (dv, dvalues)):
            total.add((begin, end), part[:, at : at + end - begin])
        at += end - begin


class _Returning:
    """Gradients in flight after step t: those of another rank's keys return to their owner, and those of this rank's keys to this rank.
    theirs, mine: the Steps of the reader of this rank's keys, and of this rank as reader. A Transfer is messages to and from a rank."""

    def __init__(self, p: Problem, t: int, dkeys: _Sum, dvalues: _Sum, k: Tensor, v: Tensor):
        owner, reader = (p.rank - t) % p.size, (p.rank + t) % p.size
        theirs, mine = p.step(reader, p.rank), p.step(p.rank, owner)
        self._key_ranges = theirs.key_ranges
        wide = torch.float64 if k.dtype == torch.float64 else torch.float32
        self._received = [x.new_empty((x.shape[0], theirs.count, *x.shape[2:]), dtype=wide if theirs.adds_up else x.dtype) for x in (k, v)]
        send = [dkeys.total().contiguous(), dvalues.total().contiguous()] if mine.count else []
        self._transfer = Transfer(p.op, p.group, send=send, to=owner, receive=self._received, source=reader)

    def add_to(self, dk: _Sum, dv: _Sum) -> None:  # waits, then adds the gradients of this rank's keys that the reader computed
        self._transfer.wait()
        _add(dk, dv, self._key_ranges, *self._received)


def _steps(p: Problem, k: Tensor, v: Tensor) -> Iterator[tuple[Step, Tensor, Tensor]]:
    """Yields (step, keys, values) of each step, while those of the next are in flight."""

    def ask(t: int) -> tuple[Transfer, Step, list[Tensor]] | None:
        """Starts the messages of step t; None if there is no such step."""
        if t == p.size:
            return None
        source, reader = (p.rank - t) % p.size, (p.rank + t) % p.size
        theirs, mine = p.step(reader, p.rank), p.step(p.rank, source)
        rooms = [room(x, mine.key_ranges) for x in (k, v)]
        send = [message for x in (k, v) for message in messages(x, theirs.key_ranges)]
        receive = [part for _, parts in rooms for part in parts]
        transfer = Transfer(p.op, p.group, send=send, to=reader, receive=receive, source=source)
        return transfer, mine, [whole for whole, _ in rooms]

    own = p.step(p.rank, p.rank)
    following = ask(1)
    yield own, select(k, own.key_ranges), select(v, own.key_ranges)
    for t in range(1, p.size):
        assert following is not None
        transfer, step, (keys, values) = following
        transfer.wait()
        following = None  # drops the references to this step's messages before the next are allocated
        following = ask(t + 1)
        yield step, keys, values
        del keys, values


# ---- messages from rank to rank, which are in flight while kernels run ---------------------------------------------

#: Groups that `prepare` has initialized.
_ready: WeakSet[dist.ProcessGroup] = WeakSet()


def prepare(group: dist.ProcessGroup, device: torch.device) -> None:
    """Initializes a group's communicator before its first messages.
    NCCL creates it in the first operation, in which all ranks must take part, and some ranks may skip the first message."""
    if group not in _ready and device.type == "cuda" and group.size() > 1:
        dist.all_reduce(torch.zeros(1, device=device), group=group)
    _ready.add(group)


class Transfer:
    """Messages in flight: tensors to rank `to` and from rank `source` of a group. Empty tensors are not sent. The backend sends and
    receives while the current stream computes: NCCL on a stream of its own, gloo in threads of its own. It starts when the earlier work on
    the current stream is done. Call `wait` before using what was received."""

    def __init__(self, op: str, group: dist.ProcessGroup, *, send: Sequence[Tensor], to: int, receive: Sequence[Tensor], source: int):
        self._op, self._source, self._to = op, source, to
        # messages between two ranks arrive in the order in which they were sent
        work = [dist.P2POp(dist.isend, t, dist.get_global_rank(group, to), group) for t in send if t.numel()]
        work += [dist.P2POp(dist.irecv, t, dist.get_global_rank(group, source), group) for t in receive if t.numel()]
        self._alive = (send, receive)  # references, so that the allocator does not reuse the memory before `wait`
        self._work = dist.batch_isend_irecv(work) if work else []

    def wait(self) -> None:
        """Makes the current stream, or on the CPU this thread, wait for the messages."""
        try:
            for work in self._work:
                work.wait()
        except RuntimeError as error:
            raise RuntimeError(
                f"volta_fa.distributed.{self._op}: sending to rank {self._to} or receiving from rank {self._source} of the group failed: "
                f"such a process is late or has ended ({first_line(error)})"
            ) from error
        self._work, self._alive = [], ((), ())


def select(t: Tensor, rows: Sequence[Range]) -> Tensor:
    """Returns the rows in these ranges of a (batch, seqlen, ...) tensor; a view if it is one range."""
    parts = [t[:, begin:end] for begin, end in rows]
    return parts[0] if len(parts) == 1 else torch.cat(parts, 1) if parts else t[:, :0]


def messages(t: Tensor, rows: Sequence[Range]) -> list[Tensor]:
    """Returns the contiguous tensors to send for rows of a (batch, seqlen, ...) tensor. With batch 1 each range is a message, and is not
    copied."""
    return [t[:, begin:end].contiguous() for begin, end in rows] if t.shape[0] == 1 else [select(t, rows).contiguous()]


def room(like: Tensor, rows: Sequence[Range]) -> tuple[Tensor, list[Tensor]]:
    """Returns a new tensor for the rows in these ranges of a tensor like `like`, and its views that receive the `messages`."""
    whole = like.new_empty((like.shape[0], length(rows), *like.shape[2:]))
    return whole, list(whole.split([end - begin for begin, end in rows], 1)) if like.shape[0] == 1 else [whole]


class _Ring(torch.autograd.Function):
    """Makes `forward` and `backward` known to autograd."""

    @staticmethod
    def forward(ctx: Any, p: Problem, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> Tensor:
        out, lse, states = forward(p, q, k, v, sinks)
        ctx.problem = p
        ctx.save_for_backward(q, k, v, sinks, out, lse, *states)
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> Any:
        q, k, v, sinks, out, lse, *states = ctx.saved_tensors
        # a rank may have ended, or make another call, since the forward pass: checks the call alone, no arguments ({}, None)
        check_same_arguments([ctx.problem.group], f"{ctx.problem.op}, backward", lambda: ({}, None), q.device)
        return None, *backward(ctx.problem, dout, q, k, v, out, lse, sinks, states)


def attend(p: Problem, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> Tensor:
    """Returns this rank's shard of the output. Differentiable in q, k, v and sinks."""
    apply: Any = _Ring.apply
    return apply(p, q, k, v, sinks)
