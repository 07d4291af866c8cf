"""Defines attention problems with their operation counts, and the implementations that benchmarks.table and benchmarks.memory compare,
with their inputs and the fp64 reference.

Every implementation computes the same attention of the same values. Each gets contiguous tensors in its own layout,
prepared outside the timed region: volta_fa (batch, seqlen, nheads, headdim), PyTorch (batch, nheads, seqlen, headdim)."""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from volta_fa.errors import CommandError


@dataclass(frozen=True)
class Shape:
    """One attention problem; as text `batch,nheads,seqlen_q,seqlen_k,headdim[,causal]`, without nheads_k and headdim_v."""

    batch: int
    nheads: int
    seqlen_q: int
    seqlen_k: int
    headdim: int
    causal: bool = False
    nheads_k: int = 0  # 0: as many as nheads
    headdim_v: int = 0  # 0: headdim

    def __post_init__(self):
        object.__setattr__(self, "nheads_k", self.nheads_k or self.nheads)
        object.__setattr__(self, "headdim_v", self.headdim_v or self.headdim)

    def __str__(self) -> str:
        numbers = f"{self.batch},{self.nheads},{self.seqlen_q},{self.seqlen_k},{self.headdim}"
        return numbers + (",causal" if self.causal else "")

    @staticmethod
    def parse(text: str) -> Shape:
        fields = text.replace(" ", "").split(",")
        causal = fields[-1] == "causal"
        try:
            numbers = [int(f) for f in fields[: 5 if causal else None]]
            if len(numbers) != 5 or len(fields) != 5 + causal or min(numbers) < 1:
                raise ValueError
        except ValueError:
            raise CommandError(f"`{text}` is no shape: expected B,H,M,N,D or B,H,M,N,D,causal, five positive numbers") from None
        return Shape(*numbers, causal=causal)

    @property
    def pairs(self) -> float:
        """Query-key pairs of one head. Causal ones (bottom-right aligned) by area: a square has half, as flash-attn counts."""
        m, n = self.seqlen_q, self.seqlen_k
        if not self.causal:
            return m * n
        return m * (n - m / 2) if m <= n else n * n / 2

    @property
    def forward_flops(self) -> float:
        """Operations of S = Q K^T and O = P V, 2 for each multiply-add."""
        return 2 * self.batch * self.nheads * self.pairs * (self.headdim + self.headdim_v)

    @property
    def backward_flops(self) -> float:
        """Operations of S again, dQ and dK (headdim) and of dP and dV (headdim_v): 2.5 times the forward's if the headdims are equal."""
        return 2 * self.batch * self.nheads * self.pairs * (3 * self.headdim + 2 * self.headdim_v)


#: (batch, nheads, seqlen_q, seqlen_k, headdim): one head with seqlen = headdim, then 16 and 32 heads at 1024, then 32 at 2048 to 8192.
_SIZES = [(1, 1, n, n, n) for n in (16, 32, 64, 128, 256)]
_SIZES += [(1, h, 1024, 1024, d) for h in (16, 32) for d in (16, 32, 64, 128, 256)]
_SIZES += [(1, 32, n, n, d) for n in (2048, 4096, 8192) for d in (128, 256)]
#: The shapes that benchmarks.table and benchmarks.plan list unless others are named.
TABLE = [Shape(*sizes, causal=causal) for sizes in _SIZES for causal in (False, True)]


def select(patterns: Sequence[str], listed: Sequence[Shape] = TABLE) -> list[Shape]:
    """Returns the shapes that the patterns name, each once; all listed shapes without patterns.

    A pattern with wildcards (`*`, `?`, `[`, as in file names) selects listed shapes by their text. Another is a shape, listed or not.
    Raises CommandError for wildcards that match nothing, and for text that is no shape."""
    if not patterns:
        return list(listed)
    chosen: dict[Shape, None] = {}
    for pattern in patterns:
        wild = any(c in pattern for c in "*?[")
        found = [s for s in listed if fnmatchcase(str(s), pattern)] if wild else [Shape.parse(pattern)]
        if not found:
            raise CommandError(f"--cases {pattern} matches none of the {len(listed)} listed shapes, such as {listed[-1]}")
        chosen.update(dict.fromkeys(found))
    return list(chosen)


# ---- implementations -----------------------------------------------------------------------------------------------

RESULTS = ("out", "dq", "dk", "dv")  # of a forward and backward pass


@dataclass(frozen=True)
class Implementation:
    """A way to compute attention. `attend` takes q, k and v in its own layout, and the Inputs for the mask. It returns out."""

    name: str
    heads_first: bool  # (batch, nheads, seqlen, headdim) rather than (batch, seqlen, nheads, headdim)
    attend: Callable[[Tensor, Tensor, Tensor, Inputs], Tensor]


def _volta_fa(q: Tensor, k: Tensor, v: Tensor, inputs: Inputs) -> Tensor:
    return torch.ops.volta_fa.fwd(q, k, v, is_causal=inputs.shape.causal)[0]  # (out, softmax_lse, rng_state)[0]


def _eager(q: Tensor, k: Tensor, v: Tensor, inputs: Inputs) -> Tensor:
    scores = (q * q.shape[-1] ** -0.5) @ k.transpose(-1, -2)
    if inputs.hidden is not None:
        scores = scores.masked_fill_(inputs.hidden, -math.inf)
    return scores.softmax(-1) @ v


def _eager_fp32(q: Tensor, k: Tensor, v: Tensor, inputs: Inputs) -> Tensor:
    return _eager(q.float(), k.float(), v.float(), inputs).to(q.dtype)


def _sdpa(q: Tensor, k: Tensor, v: Tensor, inputs: Inputs, backend: SDPBackend) -> Tensor:
    # TABLE is square. In other causal shapes SDPA aligns the mask top-left, volta_fa bottom-right, and the errors show it.
    with sdpa_kernel(backend), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch warns why a backend cannot run
        return F.scaled_dot_product_attention(q, k, v, is_causal=inputs.shape.causal)


OURS, EAGER = "volta_fa", "eager"

#: In the order of the tables' columns; with True, heads come before tokens.
IMPLEMENTATIONS = (
    Implementation(OURS, False, _volta_fa),
    Implementation(EAGER, True, _eager),
    Implementation("eager fp32", True, _eager_fp32),
    Implementation("SDPA efficient", True, partial(_sdpa, backend=SDPBackend.EFFICIENT_ATTENTION)),
    Implementation("SDPA flash", True, partial(_sdpa, backend=SDPBackend.FLASH_ATTENTION)),
)


def implementations(dtype: torch.dtype) -> list[Implementation]:
    """Returns IMPLEMENTATIONS. For fp32 inputs "eager fp32" is left out, because it equals "eager"."""
    return [i for i in IMPLEMENTATIONS if not (i.attend is _eager_fp32 and dtype == torch.float32)]


def why_unavailable(error: RuntimeError) -> str | None:
    """Returns why an implementation could not run: lack of memory or of a kernel for the problem. None: the error is a fault."""
    if isinstance(error, torch.cuda.OutOfMemoryError):
        return "out of memory"
    # SDPA's two messages if the one allowed backend has no kernel
    if re.search("No available kernel|No viable backend", str(error)):
        return "no such kernel for this shape, dtype and device"
    return None


@dataclass
class Inputs:
    """Standard normal q, k, v and dout, (batch, seqlen, nheads, headdim), and `hidden`: the causal mask of eager attention, else None."""

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
        """Returns the implementation with contiguous copies of the inputs in its layout, so that timed calls do not transpose."""
        values = (self.q, self.k, self.v, self.dout)
        if implementation.heads_first:
            values = tuple(t.transpose(1, 2).contiguous() for t in values)
        q, k, v = (t.detach().requires_grad_() for t in values[:3])
        return Bound(implementation, self, q, k, v, values[3])


@dataclass
class Bound:
    """An implementation with its inputs, as leaves that require grad."""

    implementation: Implementation
    inputs: Inputs
    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor

    def forward(self) -> Tensor:
        return self.implementation.attend(self.q, self.k, self.v, self.inputs)

    def backward(self, out: Tensor) -> tuple[Tensor, ...]:
        """Returns dq, dk and dv. Callers time repeated calls for the same out, so the graph is retained."""
        return torch.autograd.grad(out, (self.q, self.k, self.v), self.dout, retain_graph=True)

    def both(self) -> tuple[Tensor, ...]:
        """Returns out, dq, dk and dv, as a training step computes them."""
        out = self.forward()
        return out, *torch.autograd.grad(out, (self.q, self.k, self.v), self.dout)

    def results(self) -> dict[str, Tensor]:
        """Returns out, dq, dk and dv by name, each (batch, seqlen, nheads, headdim)."""
        tensors = (t.detach() for t in self.both())
        return dict(zip(RESULTS, (t.transpose(1, 2) if self.implementation.heads_first else t for t in tensors)))


def hidden(shape: Shape, device: torch.device) -> Tensor:
    """Returns a (seqlen_q, seqlen_k) bool mask of causal attention, aligned bottom-right. True: query i does not see key j."""
    m, n = shape.seqlen_q, shape.seqlen_k
    return torch.ones(m, n, dtype=torch.bool, device=device).triu_(n - m + 1)


#: Maximum fp64 scores, over the heads of one step of `reference`: 512 MiB on a GPU, 64 MiB on a CPU. About five such matrices are alive.
_REFERENCE_SCORES = {"cuda": 1 << 26, "cpu": 1 << 23}


def reference(inputs: Inputs) -> Iterator[tuple[int, slice, dict[str, Tensor]]]:
    """Yields (batch index, slice of heads, results by name) in fp64, some heads at a time; results are (seqlen, heads, headdim)."""
    s = inputs.shape
    heads = max(1, _REFERENCE_SCORES[inputs.device.type] // (s.seqlen_q * s.seqlen_k))
    for batch in range(s.batch):
        for first in range(0, s.nheads, heads):
            part = slice(first, first + heads)
            *leaves, dout = (t[batch, :, part].transpose(0, 1).double() for t in (inputs.q, inputs.k, inputs.v, inputs.dout))
            out = _eager(*(t.requires_grad_() for t in leaves), inputs)
            found = (out.detach(), *torch.autograd.grad(out, leaves, dout))
            yield batch, part, {name: t.transpose(0, 1) for name, t in zip(RESULTS, found)}


def max_errors(inputs: Inputs, results: dict[str, dict[str, Tensor]]) -> dict[str, dict[str, float]]:
    """Returns the largest absolute error by implementation and result. A NaN counts as infinite."""
    errors = {name: dict.fromkeys(RESULTS, 0.0) for name in results}
    for batch, part, expected in reference(inputs):
        for name, found in results.items():
            for what in RESULTS:
                difference = (found[what][batch, :, part].double() - expected[what]).abs_().nan_to_num_(nan=math.inf)
                errors[name][what] = max(errors[name][what], difference.max().item())
    return errors
