"""Judges results of `volta_fa::fwd` and `bwd`: `Inputs` are a Case's tensors, `Exact` its results in fp64, as `Part`s with allowed errors.
`check` and the tests use it. The tests import this file without the package, so it imports nothing but torch and files that do the same."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from . import block_masks, tolerance  # tolerance: eager attention, in fp64 too, and the error that a result may have
from .cases import Case, CpuSource  # the sizes and options of a problem; draws its tensors


@contextmanager
def float32_precision(setting: str) -> Iterator[None]:
    """Sets PyTorch's precision of float32 products, "highest" or "high", within the block."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(setting)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@dataclass
class Inputs:
    """A problem's tensors on a device."""

    problem: Case
    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    options: dict[str, Any]  # keyword arguments of the operators
    scratch_bytes: int = 0  # of kernels, besides results; `correctness.poison` fills memory of that size with NaN before a call

    @classmethod
    def draw(cls, problem: Case, seed: int, device: torch.device) -> Inputs:
        """Draws the tensors. A seed gives the same numbers on every device."""
        tensors, options = problem.problem(CpuSource(device, problem.dtype or torch.float16, seed))
        return cls(problem, *tensors, options)

    @property
    def given(self) -> list[Tensor]:
        """All tensors."""
        return [self.q, self.k, self.v, self.dout, *(t for t in self.options.values() if isinstance(t, Tensor))]

    def _mapped(self, change: Callable[[Tensor], Tensor], names: Collection[str]) -> Inputs:
        """Returns the same problem with `change` applied to q, k, v, dout and the options of these names."""
        options = {name: change(t) if name in names and isinstance(t, Tensor) else t for name, t in self.options.items()}
        q, k, v, dout = (change(t) for t in (self.q, self.k, self.v, self.dout))
        return Inputs(self.problem, q, k, v, dout, options)

    def on_cpu(self) -> Inputs:
        """Returns the same tensors on the CPU."""
        return self._mapped(lambda t: t.cpu(), self.options)

    def in_fp64(self) -> Inputs:
        """Returns the same values in fp64, except bool masks, and ALiBi slopes, which are fp32 in every call."""
        return self._mapped(lambda t: t.double() if t.is_floating_point() else t, ("attn_bias", "sinks"))

    def forward(self, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Returns out, softmax_lse and rng_state of `fwd`. With the case's `as_fp32`, q, k and v are cast to float32 for the call."""
        if not self.problem.as_fp32:
            return torch.ops.volta_fa.fwd(self.q, self.k, self.v, **self.options, generator=generator)
        with float32_precision("high"):  # kernels then multiply in scaled fp16; judged by the tolerance of q's dtype
            return torch.ops.volta_fa.fwd(self.q.float(), self.k.float(), self.v.float(), **self.options, generator=generator)

    def gradients(self, out: Tensor, softmax_lse: Tensor, rng_state: Tensor) -> dict[str, Tensor]:
        """Returns the gradients of `bwd` that the problem has, by name."""
        names = tolerance.gradient_names(**self.options)
        found = torch.ops.volta_fa.bwd(
            self.dout, self.q, self.k, self.v, out, softmax_lse,
            rng_state=rng_state if self.problem.dropout_p else None, deterministic=self.problem.deterministic,
            attn_bias_requires_grad="dattn_bias" in names, **self.options,
        )  # fmt: skip
        return {name: t for name, t in zip(("dq", "dk", "dv", "dattn_bias", "dsinks"), found) if name in names}


# ---- parts of results ----------------------------------------------------------------------------------------------

Select = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Error:
    """An error of a result (out, dq, ...), and the error that is allowed."""

    result: str
    #: of the error, over the elements: "largest", "rms" (root mean square), "relative L1", or "largest, of what is allowed": the largest
    #: quotient of an element's error and the error that this element may have
    kind: str
    error: float
    allowed: float
    where: str = ""  # which elements, as a phrase; "": all
    eager: float | None = None  # the error of PyTorch's eager attention

    @property
    def share(self) -> float:
        """Error / allowed error."""
        return self.error / self.allowed if self.allowed > 0 else 0.0 if self.error == 0 else torch.inf

    def __str__(self) -> str:
        of_eager = "" if self.eager is None else f", eager attention's {self.eager:.3g}"
        return f"{self.result}: {self.kind} error{self.where} {self.error:.3g}, allowed {self.allowed:.3g}{of_eager}"


@dataclass(frozen=True)
class Part:
    """A part of a result, such as the rows of one sequence of `out`: how to select it, its exact values, and the errors it may have."""

    result: str  # its name: out, dq, ...
    select: Select  # from that result
    exact: Tensor
    allowed: tolerance.Budget | float  # Budget: of the largest and the rms error, by eager attention's; a number: of the largest alone
    where: str = ""  # as in Error

    def errors(self, results: dict[str, Tensor]) -> Iterator[Error]:
        """Yields the errors of this part; none if `results`, by name, do not have it."""
        if self.result not in results:
            return
        found, allowed = self.select(results[self.result]), self.allowed
        largest = tolerance.max_error(found, self.exact)
        if isinstance(allowed, float):
            yield Error(self.result, "largest", largest, allowed, self.where)
            return
        yield Error(self.result, "largest", largest, allowed.allowed, self.where, allowed.eager_error)
        rms = tolerance.rms_error(found, self.exact)
        yield Error(self.result, "rms", rms, allowed.allowed_rms, self.where, allowed.eager_rms)


def zeros(result: str, select: Select, chosen: Tensor, where: str) -> Part:
    """Returns a Part that must be exactly 0: the elements of `select` where the bool `chosen` is True."""
    return Part(result, lambda t: select(t)[chosen], exact=torch.zeros((), device=chosen.device), allowed=0.0, where=where)


def forward_parts(
    ref: tolerance.Eager, q: Tensor, k: Tensor, v: Tensor, rows: Select, lse: Select, more: float, **options: Any
) -> list[Part]:
    """Returns the parts of out and softmax_lse that a dense problem computes. Rows without a visible key must be exactly 0.

    Args:
        ref: the problem's exact results. `tolerance.Eager` holds results of eager attention in any dtype; these are in fp64.
            `ref.masked`: rows without a visible key, (batch, nheads, seqlen_q).
        rows: selects its part of out, (batch, seqlen_q, nheads, headdim_v).
        lse: selects its part of softmax_lse, (batch, nheads, seqlen_q).
        more: the error that softmax_lse may have beyond that of rounded sums: 0, but for caches that kernels get dequantized and rounded.
        options: of `tolerance.attend`.
    """
    return [
        Part("out", rows, ref.out, tolerance.forward_budget(ref, q, k, v, **options)),
        Part("softmax_lse", lse, ref.softmax_lse, tolerance.lse_tolerance(ref, q.dtype) + more),
        zeros("out", _heads_first(rows), ref.masked, _KEYLESS),
    ]


_KEYLESS = " of queries without a key"


def _heads_first(rows: Select) -> Select:
    return lambda t: rows(t).transpose(1, 2)


# ---- dense problems: a batch or packed sequences, cut into groups of equal lengths ------------------------------------


@dataclass
class Group:
    """Batch entries or packed sequences of the same lengths, as one dense problem of its own with n batch entries."""

    entries: Tensor  # (n) their numbers in the whole problem
    q_rows: Tensor  # (n, seqlen_q) indices of their queries among all rows of q
    k_rows: Tensor  # (n, seqlen_k) the same of k
    options: dict[str, Any]  # of `tolerance.attend`, for these entries

    def queries(self, t: Tensor) -> Tensor:
        """Returns the group's part of q, out, dout or dq, (n, seqlen_q, nheads, headdim)."""
        return _rows(t)[self.q_rows]

    def keys(self, t: Tensor) -> Tensor:
        """Returns the group's part of k, v, dk or dv, (n, seqlen_k, nheads_k, headdim)."""
        return _rows(t)[self.k_rows]

    def inputs(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the group's q, k and v."""
        return self.queries(q), self.keys(k), self.keys(v)

    def lse(self, t: Tensor) -> Tensor:
        """Returns the group's part of a softmax_lse, (n, nheads, seqlen_q)."""
        if t.dim() == 2:
            return t[:, self.q_rows].transpose(0, 1)
        return t[self.entries]

    def bias(self, t: Tensor) -> Tensor:
        """Returns the group's part of a bias; dimensions of size 1 stay."""
        t = t[:, :, : self.q_rows.shape[1], : self.k_rows.shape[1]]
        return t[self.entries] if t.shape[0] > 1 else t

    def add_to_bias(self, total: Tensor, part: Tensor) -> None:
        """Adds `part`, the group's share of a bias's gradient, to the elements of `total` that `bias` selects."""
        own = total[:, :, : part.shape[2], : part.shape[3]]
        if total.shape[0] > 1:
            own[self.entries] += part
        else:
            own += part


def _rows(t: Tensor) -> Tensor:
    """Returns (rows, heads, headdim): packed tensors have it, of others batch entries are joined."""
    return t if t.dim() == 3 else t.flatten(0, 1)


#: Of entries, seqlen_q and seqlen_k: returns which probabilities dropout keeps, (entries, nheads, seqlen_q, seqlen_k) bool.
Kept = Callable[[Tensor, int, int], Tensor]


def groups(
    q: Tensor,
    k: Tensor,
    kept: Kept | None = None,
    *,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    seqused_k: Tensor | None = None,
    attn_bias: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    block_lists: Tensor | None = None,
    block_bits: Tensor | None = None,
    block_lists_t: Tensor | None = None,
    block_bits_t: Tensor | None = None,
    **options: Any,
) -> list[Group]:
    """Returns the problem of the operators' arguments as dense ones: a group for each pair of lengths. `kept`: None without dropout. Block
    lists become a bool bias; the transposed ones have the same scores, and are not read."""
    device = q.device
    if block_lists is not None:
        attn_bias = block_masks.expand(block_lists, block_bits, q.shape[0], q.shape[-2], q.shape[1], k.shape[1])
    if cu_seqlens_q is None or cu_seqlens_k is None:
        starts_q, starts_k = ([b * t.shape[1] for b in range(q.shape[0] + 1)] for t in (q, k))
    else:
        starts_q, starts_k = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    lengths_q, lengths_k = ([b - a for a, b in zip(starts, starts[1:])] for starts in (starts_q, starts_k))
    if seqused_k is not None:
        lengths_k = seqused_k.tolist()
    entries_by_lengths = defaultdict(list)
    for entry, lengths in enumerate(zip(lengths_q, lengths_k)):
        entries_by_lengths[lengths].append(entry)
    found = []
    for (seqlen_q, seqlen_k), numbers in entries_by_lengths.items():

        def rows(starts: list[int], count: int) -> Tensor:
            first = torch.tensor([starts[n] for n in numbers], device=device)
            return first[:, None] + torch.arange(count, device=device)

        group = Group(torch.tensor(numbers, device=device), rows(starts_q, seqlen_q), rows(starts_k, seqlen_k), dict(options))
        if attn_bias is not None:
            group.options["attn_bias"] = group.bias(attn_bias)
        if alibi_slopes is not None:
            group.options["alibi_slopes"] = alibi_slopes[group.entries] if alibi_slopes.dim() == 2 else alibi_slopes
        if kept is not None:
            group.options["kept"] = kept(group.entries, seqlen_q, seqlen_k)
        found.append(group)
    return found


def unused_keys(groups_: list[Group], k: Tensor) -> Tensor:
    """Returns which rows of k belong to no entry, (rows) bool: those beyond seqused_k."""
    unused = torch.ones(len(_rows(k)), dtype=torch.bool, device=k.device)
    for group in groups_:
        unused[group.k_rows.flatten()] = False
    return unused


class Exact:
    """The exact results of a problem of `fwd` and `bwd`, by PyTorch's own operations in fp64. Each group has its own error budget."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, kept: Kept | None = None, **options: Any):
        self.tensors, self.options = (q, k, v), options
        self.groups = groups(q, k, kept, **options)
        self.refs = [tolerance.exact(*group.inputs(q, k, v), **group.options) for group in self.groups]

    def forward(self) -> list[Part]:
        """Returns the parts of out and softmax_lse."""
        found = []
        for group, ref in zip(self.groups, self.refs):
            found += forward_parts(ref, *group.inputs(*self.tensors), group.queries, group.lse, more=0.0, **group.options)
        return found

    def out(self) -> Tensor:
        """Returns out in fp64."""
        q, _, v = self.tensors
        found = torch.zeros(*q.shape[:-1], v.shape[-1], dtype=torch.float64, device=q.device)
        for group, ref in zip(self.groups, self.refs):
            _rows(found)[group.q_rows] = ref.out
        return found

    def backward(self, dout: Tensor, out: Tensor, dlse: Tensor | None = None) -> list[Part]:
        """Returns the parts of the gradients, if the backward pass gets this `out`; `dlse` is the gradient of softmax_lse."""
        q, k, v = self.tensors
        names = tolerance.gradient_names(**self.options)
        parts: list[Part] = []
        # dattn_bias and dsinks (names[3:]) are sums over all groups: exact ones, eager ones, and the rounding errors of the sums. A name
        # without its first letter is the option's.
        totals: dict[str, tuple[Tensor, Tensor]] = {n: (_zeros(self.options[n[1:]]), _zeros(self.options[n[1:]])) for n in names[3:]}
        rounding = dict.fromkeys(names, 0.0)
        for group, ref in zip(self.groups, self.refs):
            inputs = (group.queries(dout), *group.inputs(q, k, v))
            options = group.options if dlse is None else group.options | {"dlse": group.lse(dlse)}
            exact = dict(zip(names, tolerance.exact_gradients(*inputs, **options)))
            eager = dict(zip(names, tolerance.eager_gradients(*inputs, **options)))
            sums = dict(zip(names, tolerance.gradient_sums(ref, group.queries(out), *inputs, **group.options)))
            rounded = tolerance.rounded_gradients(ref, *inputs, **options)
            for name, rows, of_products in zip(names, (group.queries, group.keys, group.keys), rounded):
                budget = tolerance.Budget.of(eager[name], exact[name], tolerance.GRADIENT_FACTOR, sums[name], of_products)
                parts.append(Part(name, rows, exact[name], budget))
            parts.append(zeros("dq", _heads_first(group.queries), ref.masked, _KEYLESS))
            for name, total in totals.items():
                for whole, part in zip(total, (exact[name], eager[name].double())):
                    group.add_to_bias(whole, part) if name == "dattn_bias" else whole.add_(part)
                rounding[name] += sums[name]
        for name, (whole, of_eager) in totals.items():
            of_eager = of_eager.to(self.options[name[1:]].dtype)
            budget = tolerance.Budget.of(of_eager, whole, tolerance.GRADIENT_FACTOR, rounding[name])
            parts.append(Part(name, lambda t: t, whole, budget))
        unused = unused_keys(self.groups, k)
        return parts + [zeros(name, _rows, unused, " of keys beyond every sequence") for name in ("dk", "dv")]


def _zeros(t: Tensor) -> Tensor:
    return torch.zeros_like(t, dtype=torch.float64)


# ---- two references: `Exact` and the fp64 CPU backend, which must agree --------------------------------------------


class WrongReference(Exception):
    """The fp64 CPU backend and PyTorch's own operations in fp64 differ, so there is no reference for a kernel."""


def exact_forward(inputs: Inputs, rng_state: Tensor) -> tuple[Exact, list[Part], Tensor, Tensor]:
    """Returns the exact results of a problem on the CPU, the parts of its forward pass, and out in fp64 and softmax_lse in fp32.

    `rng_state` is the call's, for dropout. The CPU backend would draw other random numbers, so then out is PyTorch's own operations'.
    Raises WrongReference if the CPU backend disagrees with PyTorch's own operations."""
    p = inputs.problem
    kept: Kept | None = None
    if p.dropout_p:
        mask = torch.ops.volta_fa._dropout_mask(rng_state, p.entries, p.nheads, *p.longest, p.dropout_p).cpu()
        kept = lambda entries, seqlen_q, seqlen_k: mask[entries, :, :seqlen_q, :seqlen_k]  # noqa: E731
    exact = Exact(inputs.q, inputs.k, inputs.v, kept, **inputs.options)
    in_fp64 = inputs.in_fp64()
    options = {name: value for name, value in in_fp64.options.items() if name != "dropout_p"}
    out, lse, _ = torch.ops.volta_fa.fwd(in_fp64.q, in_fp64.k, in_fp64.v, **options)
    parts = exact.forward()
    out = exact.out() if p.dropout_p else out
    agree(parts, {"out": out, "softmax_lse": lse})
    return exact, parts, out, lse


def exact_backward(exact: Exact, inputs: Inputs, out: Tensor, softmax_lse: Tensor, rng_state: Tensor) -> list[Part]:
    """Returns the parts of a problem's gradients on the CPU. The other arguments are results of `exact_forward`."""
    parts = exact.backward(inputs.dout, out.to(inputs.q.dtype))
    agree(parts, inputs.in_fp64().gradients(out, softmax_lse, rng_state.cpu()))
    return parts


#: Allowed difference, relative to 1 + the largest value. The backward pass computes probabilities from softmax_lse, which is fp32 even
#: here: its rounding changes them by about 1e-7 times its size.
_AGREE = 1e-5


def agree(parts: list[Part], results: dict[str, Tensor]) -> None:
    """Raises WrongReference if results of the CPU backend in fp64 differ from the exact ones."""
    for part in parts:
        name, exact = part.result, part.exact
        if name not in results:
            continue
        error = tolerance.max_error(part.select(results[name]), exact)
        if error > _AGREE * (1 + tolerance.largest(exact[exact.isfinite()])):
            raise WrongReference(f"{name} of the CPU backend in float64 is {error:.1e} from that of PyTorch's own operations in float64")
