"""What the ops must compute, written as plainly as possible, and how far a result may be from it.

Nothing here is shared with the library: the whole score matrix in fp64, the mask straight from its rule,
gradients from their formulas.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


def visible(seqlen_q: int, seqlen_k: int, is_causal=False, window_left=-1, window_right=-1, device="cpu") -> Tensor:
    """(seqlen_q, seqlen_k) bool: query i sees key j where i+o-left <= j <= i+o+right, o = seqlen_k - seqlen_q."""
    i = torch.arange(seqlen_q, device=device)[:, None] + (seqlen_k - seqlen_q)
    j = torch.arange(seqlen_k, device=device)[None, :]
    if is_causal:
        window_right = 0
    seen = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool, device=device)
    if window_left >= 0:
        seen &= j >= i - window_left
    if window_right >= 0:
        seen &= j <= i + window_right
    return seen


def _heads_first(t: Tensor, nheads: int) -> Tensor:
    """(batch, seqlen, nheads_k, headdim) to (batch, nheads, seqlen, headdim), key heads repeated for their queries."""
    return t.repeat_interleave(nheads // t.shape[2], dim=2).transpose(1, 2)


def _sum_groups(t: Tensor, nheads_k: int) -> Tensor:
    """The gradient of `_heads_first`'s repetition."""
    batch, nheads, seqlen, headdim = t.shape
    return t.reshape(batch, nheads_k, nheads // nheads_k, seqlen, headdim).sum(2).transpose(1, 2)


@dataclass
class Forward:
    out: Tensor  # (batch, seqlen_q, nheads, headdim_v)
    softmax_lse: Tensor  # (batch, nheads, seqlen_q)
    probabilities: Tensor  # (batch, nheads, seqlen_q, seqlen_k)
    largest_score: float


def forward(q: Tensor, k: Tensor, v: Tensor, softmax_scale: float | None = None, **mask) -> Forward:
    q, k, v = q.double(), k.double(), v.double()
    nheads = q.shape[2]
    scale = q.shape[3] ** -0.5 if softmax_scale is None else softmax_scale
    seen = visible(q.shape[1], k.shape[1], device=q.device, **mask)
    scores = torch.einsum("bhid,bhjd->bhij", _heads_first(q, nheads), _heads_first(k, nheads)) * scale
    largest = scores.abs().max().item() if scores.numel() else 0.0
    scores = scores.masked_fill(~seen, -math.inf)
    row_max = scores.amax(-1, keepdim=True)
    row_max = row_max.masked_fill(row_max == -math.inf, 0.0)
    weights = torch.exp(scores - row_max)
    total = weights.sum(-1, keepdim=True)
    none = total == 0
    probabilities = weights / total.masked_fill(none, 1.0)
    out = torch.einsum("bhij,bhjd->bihd", probabilities, _heads_first(v, nheads))
    lse = (row_max + total.log()).masked_fill(none, math.inf).squeeze(-1)
    return Forward(out, lse, probabilities, largest)


def backward(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, softmax_scale: float | None = None, **mask):
    """dq, dk, dv in fp64."""
    f = forward(q, k, v, softmax_scale, **mask)
    nheads, nheads_k = q.shape[2], k.shape[2]
    scale = q.shape[3] ** -0.5 if softmax_scale is None else softmax_scale
    do = dout.double().transpose(1, 2)
    qh, kh, vh = (_heads_first(t.double(), nheads) for t in (q, k, v))
    p = f.probabilities
    dv = torch.einsum("bhij,bhid->bhjd", p, do)
    dp = torch.einsum("bhid,bhjd->bhij", do, vh)
    ds = p * (dp - (p * dp).sum(-1, keepdim=True))
    dq = torch.einsum("bhij,bhjd->bihd", ds, kh) * scale
    dk = torch.einsum("bhij,bhid->bhjd", ds, qh) * scale
    return dq, _sum_groups(dk, nheads_k), _sum_groups(dv, nheads_k)


def eager(q: Tensor, k: Tensor, v: Tensor, softmax_scale: float | None = None, **mask) -> Tensor:
    """PyTorch's own eager attention, every step in the dtype of the inputs: the yardstick for rounding."""
    nheads = q.shape[2]
    scale = q.shape[3] ** -0.5 if softmax_scale is None else softmax_scale
    seen = visible(q.shape[1], k.shape[1], device=q.device, **mask)
    scores = (_heads_first(q, nheads) * scale) @ _heads_first(k, nheads).transpose(-1, -2)
    probabilities = scores.masked_fill(~seen, -math.inf).softmax(-1)
    probabilities = probabilities.masked_fill(~seen.any(-1, keepdim=True), 0.0)
    return (probabilities @ _heads_first(v, nheads)).transpose(1, 2)


def eager_gradients(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, softmax_scale: float | None = None, **mask):
    leaves = [t.detach().clone().requires_grad_() for t in (q, k, v)]
    with torch.enable_grad():
        out = eager(*leaves, softmax_scale=softmax_scale, **mask)
        return torch.autograd.grad(out, leaves, dout)


def max_error(found: Tensor, expected: Tensor) -> float:
    """Largest absolute difference; equal infinities agree, a NaN on one side only is infinitely wrong."""
    if found.numel() == 0:
        return 0.0
    found, expected = found.double(), expected.double()
    difference = (found - expected).abs()
    agree = (found == expected) | (found.isnan() & expected.isnan())
    return difference.masked_fill(agree, 0.0).nan_to_num(nan=math.inf, posinf=math.inf).max().item()


def rms_error(found: Tensor, expected: Tensor) -> float:
    """Root of the mean square difference."""
    if found.numel() == 0:
        return 0.0
    return (found.double() - expected.double()).square().mean().sqrt().nan_to_num(nan=math.inf).item()


@dataclass
class Budget:
    """How far one result may be from the fp64 reference: `factor` times the error of eager attention in the same
    dtype on the same inputs, by the largest error and by the root mean square. (One key of a thousand left out
    hides below the largest rounding error of the first rows, not below the mean.)

    Eager's error may be nearly zero by luck (one key: every probability is exactly 1), so no less is allowed than
    what a perfect implementation has too: the rounding of its result, half a unit in the last place of each
    element, and of the sums that lead to it, `sums`.
    """

    eager_error: float
    eager_rms: float
    factor: float
    largest: float
    rms: float
    sums: float
    dtype: torch.dtype

    @classmethod
    def of(cls, eager: Tensor, ref: Tensor, factor: float, sums: float) -> Budget:
        zero = torch.zeros_like(ref)
        return cls(
            max_error(eager, ref), rms_error(eager, ref), factor, _largest(ref), rms_error(ref, zero), sums, eager.dtype
        )

    def _unavoidable(self, size: float) -> float:
        return torch.finfo(self.dtype).eps / 2 * size + self.sums

    @property
    def allowed(self) -> float:
        return max(self.factor * self.eager_error, self._unavoidable(self.largest))

    @property
    def allowed_rms(self) -> float:
        return max(self.factor * self.eager_rms, self._unavoidable(self.rms))


FORWARD_FACTOR = 2.0
GRADIENT_FACTOR = 3.0


def accumulation_eps(dtype: torch.dtype) -> float:
    """Unit of rounding of the type that sums are kept in: fp64 for fp64, fp32 for all others."""
    return torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).eps


def _largest(t: Tensor) -> float:
    return t.abs().max().item() if t.numel() else 0.0


def _largest_row(t: Tensor) -> float:
    return t.double().norm(dim=-1).max().item() if t.numel() else 0.0


def forward_budget(ref: Forward, q: Tensor, k: Tensor, v: Tensor, **options) -> Budget:
    # An error e of a score is a relative error e of its probability; scores are sums of rounded products.
    sums = accumulation_eps(q.dtype) * (1 + ref.largest_score) * _largest(v)
    return Budget.of(eager(q, k, v, **options), ref.out, FORWARD_FACTOR, sums)


def gradient_budgets(ref: Forward, refs, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, **options) -> list[Budget]:
    """Budgets of dq, dk and dv."""
    scale = options.get("softmax_scale")
    scale = abs(q.shape[3] ** -0.5 if scale is None else scale)
    eps = accumulation_eps(q.dtype) * (1 + ref.largest_score)
    # |dP| and |delta| by Cauchy-Schwarz; dk and dv add up independent roundings of every query row that sees a key.
    dp = _largest_row(dout) * _largest_row(v)
    rows = math.sqrt(q.shape[1] * q.shape[2] / max(k.shape[2], 1))
    sums = [eps * dp * _largest(k) * scale, eps * dp * _largest(q) * scale * rows, eps * _largest(dout) * rows]
    found = eager_gradients(dout, q, k, v, **options)
    return [Budget.of(e, r, GRADIENT_FACTOR, s) for e, r, s in zip(found, refs, sums)]


def lse_tolerance(ref: Forward, dtype: torch.dtype) -> float:
    """softmax_lse is an fp32 sum of fp32 sums: a few roundings of its own size and of the scores'.

    The kernels get it through the hardware's approximate ex2 and lg2 and a row maximum that may lag behind, a few
    bits worse. An error of 2^-17 changes each probability of the backward pass by less than 1% of fp16's rounding.
    """
    roundings = 64 if dtype == torch.float16 else 8
    finite = ref.softmax_lse[ref.softmax_lse.isfinite()]
    return roundings * torch.finfo(torch.float32).eps * (1 + max(ref.largest_score, _largest(finite)))
