"""Defines the compared attention implementations, their inputs and the fp64 reference.

Every implementation computes the same attention of the same values. Each gets contiguous tensors in its own layout,
prepared outside the timed region: volta_fa (batch, seqlen, nheads, headdim), PyTorch (batch, nheads, seqlen, headdim).
"""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from .shapes import Shape

RESULTS = ("out", "dq", "dk", "dv")


@dataclass(frozen=True)
class Implementation:
    name: str
    heads_first: bool  # (batch, nheads, seqlen, headdim) rather than (batch, seqlen, nheads, headdim)
    attend: Callable[[Tensor, Tensor, Tensor, Inputs], Tensor]


def _volta_fa(q: Tensor, k: Tensor, v: Tensor, inputs: Inputs) -> Tensor:
    return torch.ops.volta_fa.fwd(q, k, v, is_causal=inputs.shape.causal)[0]


def _eager(q: Tensor, k: Tensor, v: Tensor, inputs: Inputs) -> Tensor:
    scores = (q * q.shape[-1] ** -0.5) @ k.transpose(-1, -2)
    if inputs.hidden is not None:
        scores = scores.masked_fill_(inputs.hidden, -math.inf)
    return scores.softmax(-1) @ v


def _eager_fp32(q: Tensor, k: Tensor, v: Tensor, inputs: Inputs) -> Tensor:
    return _eager(q.float(), k.float(), v.float(), inputs).to(q.dtype)


def _sdpa(q: Tensor, k: Tensor, v: Tensor, inputs: Inputs, backend: SDPBackend) -> Tensor:
    # Listed causal shapes are square. For others, SDPA aligns the mask top-left, and the errors show it.
    with sdpa_kernel(backend), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it explains why a backend is not there
        return F.scaled_dot_product_attention(q, k, v, is_causal=inputs.shape.causal)


OURS, EAGER = "volta_fa", "eager"

#: In the order of the tables' columns.
IMPLEMENTATIONS = (
    Implementation(OURS, False, _volta_fa),
    Implementation(EAGER, True, _eager),
    Implementation("eager fp32", True, _eager_fp32),
    Implementation("SDPA efficient", True, partial(_sdpa, backend=SDPBackend.EFFICIENT_ATTENTION)),
    Implementation("SDPA flash", True, partial(_sdpa, backend=SDPBackend.FLASH_ATTENTION)),
)


def implementations(dtype: torch.dtype) -> list[Implementation]:
    """All, but fp32 eager where eager itself is fp32."""
    return [i for i in IMPLEMENTATIONS if not (i.attend is _eager_fp32 and dtype == torch.float32)]


def why_unavailable(error: RuntimeError) -> str | None:
    """Why an implementation did not run, if that is no fault: not each knows every problem or finds the memory."""
    if isinstance(error, torch.cuda.OutOfMemoryError):
        return "out of memory"
    # SDPA's two ways to say that the one allowed backend is not there
    if re.search("No available kernel|No viable backend", str(error)):
        return "no such kernel for this shape, dtype and device"
    return None


@dataclass
class Inputs:
    """q, k, v and dout as (batch, seqlen, nheads, headdim), and the mask that eager attention needs."""

    shape: Shape
    device: torch.device
    dtype: torch.dtype
    seed: int = 0
    hidden: Tensor | None = field(init=False)

    def __post_init__(self):
        s, generator = self.shape, torch.Generator(self.device).manual_seed(self.seed)

        def normal(seqlen: int, nheads: int, headdim: int) -> Tensor:
            size = (s.batch, seqlen, nheads, headdim)
            return torch.randn(size, generator=generator, device=self.device, dtype=torch.float32).to(self.dtype)

        self.q, self.k = normal(s.seqlen_q, s.nheads, s.headdim), normal(s.seqlen_k, s.nheads_k, s.headdim)
        self.v, self.dout = normal(s.seqlen_k, s.nheads_k, s.headdim_v), normal(s.seqlen_q, s.nheads, s.headdim_v)
        self.hidden = hidden(s, self.device) if s.causal else None

    def bind(self, implementation: Implementation) -> Bound:
        values = (self.q, self.k, self.v, self.dout)
        if implementation.heads_first:
            values = tuple(t.transpose(1, 2).contiguous() for t in values)
        q, k, v = (t.detach().requires_grad_() for t in values[:3])
        return Bound(implementation, self, q, k, v, values[3])


@dataclass
class Bound:
    """An implementation with its inputs."""

    implementation: Implementation
    inputs: Inputs
    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor

    def forward(self) -> Tensor:
        return self.implementation.attend(self.q, self.k, self.v, self.inputs)

    def backward(self, out: Tensor) -> tuple[Tensor, ...]:
        """dq, dk and dv; can be repeated for the same out."""
        return torch.autograd.grad(out, (self.q, self.k, self.v), self.dout, retain_graph=True)

    def both(self) -> tuple[Tensor, ...]:
        """out, dq, dk and dv, as a training step computes them."""
        out = self.forward()
        return out, *torch.autograd.grad(out, (self.q, self.k, self.v), self.dout)

    def results(self) -> dict[str, Tensor]:
        """The same, by name, each (batch, seqlen, nheads, headdim)."""
        tensors = (t.detach() for t in self.both())
        return dict(zip(RESULTS, (t.transpose(1, 2) if self.implementation.heads_first else t for t in tensors)))


def hidden(shape: Shape, device: torch.device) -> Tensor:
    """(seqlen_q, seqlen_k) bool: query i does not see key j. Causal, bottom-right aligned."""
    m, n = shape.seqlen_q, shape.seqlen_k
    return torch.ones(m, n, dtype=torch.bool, device=device).triu_(n - m + 1)


#: fp64 elements of one score matrix that the reference holds at once; about five of them are alive together.
_REFERENCE_SCORES = {"cuda": 1 << 26, "cpu": 1 << 23}


def reference(inputs: Inputs) -> Iterator[tuple[int, slice, dict[str, Tensor]]]:
    """(batch, heads, results) in fp64 from the formulas, some heads at a time; results are (seqlen, heads, headdim)."""
    s = inputs.shape
    if s.nheads_k != s.nheads:
        raise NotImplementedError("the reference has no grouped heads")
    heads = max(1, _REFERENCE_SCORES[inputs.device.type] // (s.seqlen_q * s.seqlen_k))
    scale = s.headdim**-0.5
    for batch in range(s.batch):
        for first in range(0, s.nheads, heads):
            part = slice(first, first + heads)
            q, k, v, dout = (t[batch, :, part].transpose(0, 1).double() for t in (inputs.q, inputs.k, inputs.v, inputs.dout))
            scores = q @ k.mT * scale
            if inputs.hidden is not None:
                scores.masked_fill_(inputs.hidden, -math.inf)
            p = scores.softmax(-1)
            del scores
            out = p @ v
            ds = dout @ v.mT
            ds -= (dout * out).sum(-1, keepdim=True)
            ds *= p
            found = (out, ds @ k * scale, ds.mT @ q * scale, p.mT @ dout)
            yield batch, part, {name: t.transpose(0, 1) for name, t in zip(RESULTS, found)}


def max_errors(inputs: Inputs, results: dict[str, dict[str, Tensor]]) -> dict[str, dict[str, float]]:
    """For each implementation's results, the largest error of each; a NaN counts as infinite."""
    errors = {name: dict.fromkeys(RESULTS, 0.0) for name in results}
    for batch, part, expected in reference(inputs):
        for name, found in results.items():
            for what in RESULTS:
                difference = (found[what][batch, :, part].double() - expected[what]).abs_().nan_to_num_(nan=math.inf)
                errors[name][what] = max(errors[name][what], difference.max().item())
    return errors
