"""Results of small problems by the fp64 CPU backend, with the error that others may have."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from . import block_masks, tolerance
from .cases import Case, CpuSource
from .score_options import OF_REFERENCE


@dataclass
class Inputs:
    """A problem's tensors on a device."""

    problem: Case
    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    options: dict[str, Any]
    scratch_bytes: int = 0  # beyond what follows from the tensors' sizes

    @classmethod
    def draw(cls, problem: Case, seed: int, device: torch.device) -> Inputs:
        """Draws the tensors. A seed gives the same numbers on every device."""
        tensors, options = problem.problem(CpuSource(device, problem.dtype or torch.float16, seed))
        return cls(problem, *tensors, options)

    @property
    def given(self) -> list[Tensor]:
        """All tensors."""
        return [self.q, self.k, self.v, self.dout, *(t for t in self.options.values() if isinstance(t, Tensor))]

    def on_cpu(self) -> Inputs:
        """Returns the same tensors on the CPU."""
        options = {name: value.cpu() if isinstance(value, Tensor) else value for name, value in self.options.items()}
        q, k, v, dout = (t.cpu() for t in (self.q, self.k, self.v, self.dout))
        return Inputs(self.problem, q, k, v, dout, options)

    def in_fp64(self) -> Inputs:
        """Returns the same values in fp64, except ALiBi slopes, which are fp32 in every call."""
        options = {
            name: value.double() if name in ("attn_bias", "sinks") and value.is_floating_point() else value
            for name, value in self.options.items()
        }
        q, k, v, dout = (t.double() for t in (self.q, self.k, self.v, self.dout))
        return Inputs(self.problem, q, k, v, dout, options)

    def forward(self, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Returns out, softmax_lse and rng_state of `fwd`."""
        return torch.ops.volta_fa.fwd(self.q, self.k, self.v, **self.options, generator=generator)

    def gradients(self, out: Tensor, softmax_lse: Tensor, rng_state: Tensor) -> dict[str, Tensor]:
        """Returns the gradients of `bwd` that the problem has, by name."""
        names = tolerance.gradient_names(**self.options)
        found = torch.ops.volta_fa.bwd(
            self.dout,
            self.q,
            self.k,
            self.v,
            out,
            softmax_lse,
            rng_state=rng_state if self.problem.dropout_p else None,
            deterministic=self.problem.deterministic,
            attn_bias_requires_grad="dattn_bias" in names,
            **self.options,
        )
        return {name: t for name, t in zip(("dq", "dk", "dv", "dattn_bias", "dsinks"), found) if name in names}

    def dtype_of(self, name: str) -> torch.dtype:
        """Of a gradient."""
        given = self.options.get(name[1:])
        return given.dtype if isinstance(given, Tensor) else self.q.dtype

    def parts(self, rng_state: Tensor) -> Iterator[Part]:
        """Yields each batch entry or sequence with queries and keys, as a dense problem of its own."""
        p = self.problem
        kept = None
        if p.dropout_p:
            kept = torch.ops.volta_fa._dropout_mask(rng_state, p.entries, p.nheads, *p.longest, p.dropout_p)
            kept = kept.to(self.q.device)
        first_q = first_k = 0
        for number, (seqlen_q, seqlen_k) in enumerate(p.seqlens):
            entry = slice(number, number + 1)
            at_q: tuple[slice, ...] = (entry, slice(seqlen_q))
            at_k: tuple[slice, ...] = (entry, slice(seqlen_k))
            if p.lengths:
                at_q, at_k = (slice(first_q, first_q + seqlen_q),), (slice(first_k, first_k + seqlen_k),)
                first_q, first_k = first_q + seqlen_q, first_k + p.lengths[number][1]
            if seqlen_q and seqlen_k:
                yield Part(self, number, at_q, at_k, seqlen_q, seqlen_k, kept)


@dataclass
class Part:
    """One batch entry or sequence: where its rows are, and its dense problem."""

    inputs: Inputs
    number: int
    at_q: tuple[slice, ...]
    at_k: tuple[slice, ...]
    seqlen_q: int
    seqlen_k: int
    kept: Tensor | None

    def queries(self, t: Tensor) -> Tensor:
        """(1, seqlen_q, nheads, headdim) of q, out, dout or dq: a view."""
        return t[self.at_q].unsqueeze(0) if t.dim() == 3 else t[self.at_q]

    def keys(self, t: Tensor) -> Tensor:
        """(1, seqlen_k, nheads_k, headdim) of k, v, dk or dv: a view."""
        return t[self.at_k].unsqueeze(0) if t.dim() == 3 else t[self.at_k]

    def of_bias(self, t: Tensor) -> Tensor:
        """The part of a bias or of its gradient: a view."""
        t = t[:, :, : self.seqlen_q, : self.seqlen_k]
        return t[self.number : self.number + 1] if t.shape[0] > 1 else t

    def lse(self, t: Tensor) -> Tensor:
        """(1, nheads, seqlen_q) of a softmax_lse: a view."""
        return t[None, :, self.at_q[0]] if t.dim() == 2 else t[self.number : self.number + 1]

    def of_gradient(self, name: str, t: Tensor) -> Tensor:
        """Returns the view of a gradient to which the part adds."""
        places = {"dq": self.queries, "dk": self.keys, "dv": self.keys, "dattn_bias": self.of_bias}
        return places[name](t) if name in places else t

    @property
    def options(self) -> dict[str, Any]:
        """Returns the options of this part for the references in tolerance.py."""
        given = self.inputs.options
        options = {name: given[name] for name in OF_REFERENCE if name in given}
        if "attn_bias" in given:
            options["attn_bias"] = self.of_bias(given["attn_bias"])
        if "block_lists" in given:
            sizes = self.inputs.problem.batch, self.inputs.problem.nheads, self.inputs.problem.seqlen_q, self.inputs.problem.seqlen_k
            options["attn_bias"] = self.of_bias(block_masks.expand(given["block_lists"], given["block_bits"], *sizes))
        if "alibi_slopes" in given:
            slopes = given["alibi_slopes"]
            slopes = slopes[self.number : self.number + 1] if slopes.dim() == 2 else slopes
            options["alibi_slopes"] = slopes.double() if self.inputs.q.dtype == torch.float64 else slopes
        if self.kept is not None:
            options["kept"] = self.kept[self.number : self.number + 1, :, : self.seqlen_q, : self.seqlen_k]
        return options

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v."""
        return self.queries(self.inputs.q), self.keys(self.inputs.k), self.keys(self.inputs.v)


_Given = TypeVar("_Given")
_Result = TypeVar("_Result")


def first_that_can(work: Callable[[_Given], _Result], *parts: _Given) -> _Result:
    """Returns `work` of the first part for which PyTorch has the operations: on the GPU, else on the CPU. (Old GPUs lack bf16 products.)"""
    for part in parts[:-1]:
        try:
            return work(part)
        except (RuntimeError, NotImplementedError):
            continue
    return work(parts[-1])


class WrongReference(Exception):
    """The fp64 CPU backend and PyTorch's own operations in fp64 differ, so there is no reference for a kernel."""


@dataclass
class Expected:
    """Results of the fp64 CPU backend, with the allowed errors."""

    values: dict[str, Tensor]
    budgets: dict[str, tolerance.Budget]
    lse_tolerance: float = 0.0
    #: of q without its last dimension: queries that see no key. Their out and gradient are exactly 0
    keyless: Tensor | None = None


def expect_forward(inputs: Inputs, rng_state: Tensor) -> Expected:
    """Returns out and softmax_lse in fp64, with allowed errors.

    With dropout, the CPU backend's forward pass would draw other random numbers, so out comes from PyTorch's own operations.
    """
    host = inputs.on_cpu()
    exact = host.in_fp64()
    options = {name: value for name, value in exact.options.items() if name != "dropout_p"}
    out, lse, _ = torch.ops.volta_fa.fwd(exact.q, exact.k, exact.v, **options)
    eager, again = torch.zeros(out.shape, dtype=inputs.q.dtype, device=inputs.q.device), torch.zeros_like(out)
    sums = lse_tolerance = 0.0
    # the same part on the device, on the CPU, and in fp64 on the CPU
    for mine, same, theirs in zip(inputs.parts(rng_state), host.parts(rng_state), exact.parts(rng_state)):
        ref = tolerance.attend(*theirs.tensors, **theirs.options)
        theirs.queries(again).copy_(ref.out)
        mine.queries(eager).copy_(first_that_can(lambda part: tolerance.eager(*part.tensors, **part.options), mine, same))
        sums = max(sums, tolerance.forward_sums(ref, same.tensors[0], same.tensors[2], inputs.problem.dropout_p))
        lse_tolerance = max(lse_tolerance, tolerance.lse_tolerance(ref, inputs.q.dtype))
        agree("softmax_lse", theirs.lse(lse), ref.softmax_lse)
    if inputs.problem.dropout_p:
        out = again
    agree("out", out, again)
    budget = tolerance.Budget.of(eager.cpu(), out, tolerance.FORWARD_FACTOR, sums)
    return Expected({"out": out, "softmax_lse": lse}, {"out": budget}, lse_tolerance, keyless(lse))


def expect_backward(inputs: Inputs, forward: Expected, rng_state: Tensor) -> Expected:
    """Returns the problem's gradients in fp64, with allowed errors."""
    host = inputs.on_cpu()
    exact = host.in_fp64()
    names = tolerance.gradient_names(**inputs.options)
    values = exact.gradients(forward.values["out"], forward.values["softmax_lse"], rng_state.cpu())
    eager = {n: torch.zeros(t.shape, dtype=inputs.dtype_of(n), device=inputs.q.device) for n, t in values.items()}
    again = {n: torch.zeros_like(t) for n, t in values.items()}
    sums = dict.fromkeys(names, 0.0)
    for mine, same, theirs in zip(inputs.parts(rng_state), host.parts(rng_state), exact.parts(rng_state)):
        ref = tolerance.attend(*theirs.tensors, **theirs.options)
        for parts, into in (((mine, same), eager), ((theirs,), again)):
            of_part = first_that_can(lambda p: tolerance.eager_gradients(p.queries(p.inputs.dout), *p.tensors, **p.options), *parts)
            for name, gradient in zip(names, of_part):
                place = parts[0].of_gradient(name, into[name])
                place.add_(gradient.to(place.device))
        rounded = ref.out.to(inputs.q.dtype)  # what `correctness` gives the backward pass
        of_sums = tolerance.gradient_sums(ref, rounded, same.queries(host.dout), *same.tensors, **theirs.options)
        for name, value in zip(names, of_sums):
            # what all parts add to has the roundings of all of them
            sums[name] = max(sums[name], value) if name in ("dq", "dk", "dv") else sums[name] + value
    for name in names:
        agree(name, values[name], again[name])
    budgets = {n: tolerance.Budget.of(eager[n].cpu(), values[n], tolerance.GRADIENT_FACTOR, sums[n]) for n in names}
    return Expected(values, budgets, keyless=forward.keyless)


def keyless(softmax_lse: Tensor) -> Tensor:
    """Returns which queries see no key, in the shape of q without its last dimension."""
    return softmax_lse.transpose(-1, -2) == torch.inf


#: softmax_lse, from which the backward pass has its probabilities, is fp32: relative errors of 1e-7 times its size.
_AGREE = 1e-5


def agree(name: str, found: Tensor, again: Tensor) -> None:
    """Raises WrongReference if the two references differ."""
    error = tolerance.max_error(found, again)
    finite = again[again.isfinite()]
    if error > _AGREE * (1 + tolerance.largest(finite)):
        raise WrongReference(f"{name} of the CPU backend in float64 is {error:.1e} from that of PyTorch's own operations in float64")
