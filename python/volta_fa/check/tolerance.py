"""The error that a result may have: at most 2x (gradients: 3x) that of PyTorch's eager attention in the same dtype on the same inputs.

`problems` and the tests judge results by it. `attend` is eager attention (scores in memory), `exact` the same in fp64, `Budget` the allowed
error. All handle dense problems, (batch, seqlen, nheads, headdim); callers split packed ones. The tests import this file without the
package, so it imports nothing but torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

#: Allowed error over eager attention's: of out, and of gradients.
FORWARD_FACTOR, GRADIENT_FACTOR = 2.0, 3.0


# ---- the yardstick: eager attention --------------------------------------------------------------------------------


def dropped_numbers(dropout_p: float) -> int:
    """Returns how many of the 2^15 values of dropout's random numbers drop a probability: never all."""
    return min(round(dropout_p * 2**15), 2**15 - 1)


def kept_share(dropout_p: float) -> float:
    """Returns the share of probabilities that dropout keeps, by which the kept ones are divided."""
    return 1 - dropped_numbers(dropout_p) / 2**15


def visible(
    seqlen_q: int, seqlen_k: int, is_causal: bool = False, window_left: int = -1, window_right: int = -1, device: torch.device | str = "cpu"
) -> Tensor:
    """Returns (seqlen_q, seqlen_k) bool: query i sees key j where i+o-left <= j <= i+o+right, o = seqlen_k - seqlen_q. -1: no limit."""
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


def heads_first(t: Tensor, nheads: int) -> Tensor:
    """Returns (batch, nheads, seqlen, headdim) of (batch, seqlen, nheads_k, headdim): KV heads are repeated for their query heads."""
    return t.repeat_interleave(nheads // t.shape[2], dim=2).transpose(1, 2)


def sum_groups(t: Tensor, nheads_k: int) -> Tensor:
    """Returns the gradient of `heads_first`: of the KV heads, (batch, seqlen, nheads_k, headdim), from that of the repeated ones."""
    batch, nheads, seqlen, headdim = t.shape
    return t.reshape(batch, nheads_k, nheads // nheads_k, seqlen, headdim).sum(2).transpose(1, 2)


def distance(seqlen_q: int, seqlen_k: int, device: torch.device) -> Tensor:
    """Returns ALiBi's distances |i + seqlen_k - seqlen_q - j|, (seqlen_q, seqlen_k)."""
    i = torch.arange(seqlen_q, device=device)[:, None] + (seqlen_k - seqlen_q)
    return (i - torch.arange(seqlen_k, device=device)[None, :]).abs()


def by_row(sinks: Tensor, like: Tensor) -> Tensor:
    """Returns sinks, (nheads), for each row of `like`: (batch, nheads, seqlen_q, 1)."""
    return sinks[None, :, None, None].expand(*like.shape[:3], 1)


@dataclass
class Eager:
    """Results of eager attention and its intermediate values, every step in the dtype of the inputs."""

    out: Tensor  # (batch, seqlen_q, nheads, headdim_v)
    softmax_lse: Tensor  # (batch, nheads, seqlen_q)
    probabilities: Tensor  # (batch, nheads, seqlen_q, seqlen_k), before dropout
    weights: Tensor  # the same, after dropout
    tanh: Tensor | None  # of softcap: tanh(x / softcap)
    masked: Tensor  # (batch, nheads, seqlen_q) bool: rows that see no key
    #: magnitude of the largest product q.k, or of the largest score whose rounding can be seen in out: with a probability above 1e-9.
    #: 0 unless the tensors are fp64
    largest_score: float


@dataclass
class Scores:
    """Scores before the softmax."""

    scores: Tensor  # (batch, nheads, seqlen_q, seqlen_k), -inf where a key is hidden
    logits: Tensor  # the same, with the sinks as a last column
    tanh: Tensor | None  # of softcap
    products: Tensor  # softmax_scale * q.k, before softcap, ALiBi and bias


def score(
    q: Tensor,
    k: Tensor,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    attn_bias: Tensor | None = None,
    sinks: Tensor | None = None,
    **mask: Any,
) -> Scores:
    """Returns the scores of a dense problem, every step in the dtype of the inputs. `mask`: arguments of `visible`."""
    nheads = q.shape[2]
    scale = q.shape[3] ** -0.5 if softmax_scale is None else softmax_scale
    seen = visible(q.shape[1], k.shape[1], device=q.device, **mask)
    scores = products = (heads_first(q, nheads) * scale) @ heads_first(k, nheads).transpose(-1, -2)
    tanh = None
    if softcap > 0:
        tanh = torch.tanh(scores / softcap)
        scores = softcap * tanh
    if alibi_slopes is not None:
        scores = scores - alibi_slopes[..., None, None] * distance(q.shape[1], k.shape[1], q.device)
    if attn_bias is not None and attn_bias.dtype == torch.bool:
        seen = seen & attn_bias
    elif attn_bias is not None:
        scores = scores + attn_bias
    scores = scores.masked_fill(~seen, -math.inf)
    logits = scores if sinks is None else torch.cat([scores, by_row(sinks, scores)], -1)
    return Scores(scores, logits, tanh, products)


def attend(q: Tensor, k: Tensor, v: Tensor, *, dropout_p: float = 0.0, kept: Tensor | None = None, **options: Any) -> Eager:
    """Computes eager attention of a dense problem with `score`'s options by PyTorch's operations. Every step is in the dtype of the inputs,
    or in fp32 from where an fp32 tensor (slopes, a bias, sinks) comes in. `kept`: bool, which probabilities dropout keeps."""
    s = score(q, k, **options)
    # rows of -inf alone, for which softmax and its gradients would be NaN
    none = (s.logits == -math.inf).all(-1, keepdim=True)
    probabilities = s.logits.masked_fill(none, 0.0).softmax(-1).masked_fill(none, 0.0)[..., : k.shape[1]]
    weights = probabilities if kept is None else probabilities * kept / kept_share(dropout_p)
    out = (weights.to(v.dtype) @ heads_first(v, q.shape[2])).transpose(1, 2)
    lse = s.logits.masked_fill(none, 0.0).logsumexp(-1).masked_fill(none.squeeze(-1), math.inf)
    is_exact = q.dtype == torch.float64
    largest_score = max(largest(s.products), largest(s.scores[probabilities > 1e-9])) if is_exact else 0.0
    return Eager(out, lse, probabilities, weights, s.tanh, (s.scores == -math.inf).all(-1), largest_score)


def in_fp64(options: dict[str, Any]) -> dict[str, Any]:
    """Returns options with tensors in fp64, but for masks."""
    return {name: t.double() if isinstance(t, Tensor) and t.is_floating_point() else t for name, t in options.items()}


def exact(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Eager:
    """Returns `attend` in fp64, the reference."""
    return attend(q.double(), k.double(), v.double(), **in_fp64(options))


def eager(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """Returns `attend`'s out."""
    return attend(q, k, v, **options).out


def gradient_names(attn_bias: Tensor | None = None, sinks: Tensor | None = None, **_: Any) -> list[str]:
    """Returns the names of the gradients that a problem with these options has."""
    names = ["dq", "dk", "dv"]
    if attn_bias is not None and attn_bias.dtype != torch.bool:
        names.append("dattn_bias")
    return names if sinks is None else [*names, "dsinks"]


def eager_gradients(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, dlse: Tensor | None = None, **options: Any) -> list[Tensor]:
    """Returns the gradients of `gradient_names`, by autograd through `attend`; `dlse` is the gradient of its softmax_lse."""
    names = gradient_names(**options)
    leaves = {name: t.detach().clone().requires_grad_() for name, t in (("dq", q), ("dk", k), ("dv", v))}
    options = dict(options)
    for name in names[3:]:  # dattn_bias and dsinks; without the d, the option's name
        leaves[name] = options[name[1:]] = options[name[1:]].detach().clone().requires_grad_()
    with torch.enable_grad():
        attended = attend(leaves["dq"], leaves["dk"], leaves["dv"], **options)
        results, of_results = [attended.out], [dout]
        if dlse is not None:
            results.append(attended.softmax_lse)
            of_results.append(dlse.to(attended.softmax_lse.dtype))
        found = torch.autograd.grad(results, list(leaves.values()), of_results, allow_unused=True)
    return [torch.zeros_like(t) if g is None else g for g, t in zip(found, leaves.values())]


def exact_gradients(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> list[Tensor]:
    """Returns `eager_gradients` in fp64, the reference."""
    return eager_gradients(dout.double(), q.double(), k.double(), v.double(), **in_fp64(options))


# ---- errors and what is allowed ------------------------------------------------------------------------------------


def max_error(found: Tensor, expected: Tensor) -> float:
    """Returns the largest absolute difference. Equal infinities and NaN on both sides differ by 0, NaN on one side by infinity."""
    if found.numel() == 0:
        return 0.0
    found, expected = found.double(), expected.double()
    difference = (found - expected).abs()
    agree = (found == expected) | (found.isnan() & expected.isnan())
    return difference.masked_fill(agree, 0.0).nan_to_num(nan=math.inf, posinf=math.inf).max().item()


def rms_error(found: Tensor, expected: Tensor) -> float:
    """Returns the root of the mean square difference; infinity if it is NaN."""
    if found.numel() == 0:
        return 0.0
    return (found.double() - expected.double()).square().mean().sqrt().nan_to_num(nan=math.inf).item()


@dataclass(frozen=True)
class Rounded:
    """A bound on the error of a result from rounding its probabilities (for dq and dk: the gradients of scores) to the dtype of the inputs,
    in which tensor cores (and eager attention) multiply them: the largest error, and the root mean square. It is statistical:
    `_DEVIATIONS` standard deviations."""

    largest: float = 0.0
    rms: float = 0.0


@dataclass(frozen=True)
class Budget:
    """How far one result may be from the fp64 reference: `factor` times the error of eager attention in the same dtype on the same inputs.

    Both the largest error and the root mean square must be inside. (One key of a thousand left out changes less than the largest rounding
    error of the first rows, but more than the mean.) Eager's error may be nearly zero: with one key, every probability is exactly 1. So at
    least the unavoidable error is allowed, which a perfect implementation has too. It has three parts: the result is rounded by half a unit
    in the last place; `sums`, from rounding scores and other sums on the way; and `rounded`, as `Rounded` says."""

    eager_error: float  # the largest
    eager_rms: float
    allowed: float  # the largest error
    allowed_rms: float

    @classmethod
    def of(cls, eager: Tensor, ref: Tensor, factor: float, sums: float, rounded: Rounded = Rounded()) -> Budget:
        """Returns the budget for eager attention's result and the reference. `factor`, `sums` and `rounded`: as the class says."""
        errors = max_error(eager, ref), rms_error(eager, ref)
        sizes = largest(ref), rms_error(ref, torch.zeros_like(ref))  # of the reference: its largest magnitude and root mean square
        unavoidable = (cls._unavoidable(size, sums, more, eager.dtype) for size, more in zip(sizes, (rounded.largest, rounded.rms)))
        return cls(*errors, *(max(factor * error, least) for error, least in zip(errors, unavoidable)))

    @staticmethod
    def _unavoidable(size: float, sums: float, rounded: float, dtype: torch.dtype) -> float:
        return torch.finfo(dtype).eps / 2 * size + sums + rounded


def largest(t: Tensor) -> float:
    """Returns the largest absolute value."""
    return t.abs().max().item() if t.numel() else 0.0


def largest_row(t: Tensor) -> float:
    """Returns the largest norm of a row (the last dimension)."""
    return t.double().norm(dim=-1).max().item() if t.numel() else 0.0


#: Standard deviations of a random rounding error that are allowed for it.
_DEVIATIONS = 4


def score_error(ref: Eager, q: Tensor) -> float:
    """Returns the error of a score from rounded sums, which is the relative error of its probability.

    If the reference is more precise than the result, that is a unit in the last place of the largest score. An fp64 result is compared with
    another fp64 result, whose BLAS may add the headdim products in another order. Each step rounds the sum so far with a variance of
    1/12 unit^2, relative to that sum, which grows to the score. So all steps have a variance of headdim / 3 / 12 unit^2, relative to it."""
    if q.dtype == torch.float64:
        units = max(1.0, _DEVIATIONS * math.sqrt(q.shape[-1] / 3 / 12))
        return torch.finfo(torch.float64).eps * (1 + units * ref.largest_score)
    return torch.finfo(torch.float32).eps * (1 + ref.largest_score)  # all others sum in fp32


def rounded_product(weights: Tensor, values: Tensor, dtype: torch.dtype, roundings: int = 1) -> Rounded:
    """Returns the bound for weights @ values, (batch, nheads, rows, n) and (batch, nheads, n, columns) in fp64, if weights are rounded
    `roundings` times.

    A rounded number's error is uniformly distributed over a unit in its last place. Relative to the number it is at most eps / 2, with a
    variance of (eps / 2)^2 / 3 / m^2 for mantissa m. m is between 1 and 2, for which 1 / m^2 is 3 / (8 ln 2) on average."""
    if weights.numel() == 0 or values.numel() == 0:
        return Rounded()
    half = torch.finfo(dtype).eps / 2
    variance = roundings * half**2 / 3 * 3 / (8 * math.log(2)) * (weights**2 @ values**2)
    # no more than if all roundings had the same sign
    error = torch.minimum(_DEVIATIONS * variance.sqrt(), roundings * half * (weights.abs() @ values.abs()))
    # The mean square of few numbers varies, by sqrt(2 / n) of itself. One rounding serves all columns, so rows are counted, by weight.
    rows = variance.sum(-1)
    count = (rows.sum() ** 2 / (rows**2).sum()).nan_to_num(nan=1.0).item()
    return Rounded(largest(error), variance.mean().sqrt().item() * (1 + _DEVIATIONS / math.sqrt(2 * count)))


def forward_budget(ref: Eager, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Budget:
    """Returns how far out may be from `exact`'s."""
    rounded = rounded_product(ref.weights, heads_first(v.double(), q.shape[2]), q.dtype)
    sums = score_error(ref, q) * largest(v) / kept_share(options.get("dropout_p", 0.0))  # the error that rounded sums alone may cause
    return Budget.of(eager(q, k, v, **options), ref.out, FORWARD_FACTOR, sums, rounded)


def gradient_sums(ref: Eager, out: Tensor, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> list[float]:
    """Returns the errors that rounded sums alone may cause in each of `gradient_names`, if the backward pass gets this `out`.

    The backward pass subtracts delta, the sum of dout * out of a row, from dP = dout . v."""
    scale = options.get("softmax_scale")
    scale = abs(q.shape[3] ** -0.5 if scale is None else scale)
    factor = 1 / kept_share(options.get("dropout_p", 0.0))
    if q.dtype == torch.float32:
        # The pass computes exp(score - softmax_lse) with a score that it sums again, perhaps in another order: two sums, and half a unit of
        # softmax_lse. Partial sums of random directions are as large as this, even where the score is small.
        partial = scale * largest_row(q) * largest_row(k) / math.sqrt(q.shape[3])
        lse = largest(ref.softmax_lse[ref.softmax_lse.isfinite()])
        eps = torch.finfo(torch.float32).eps * (2 * (1 + max(ref.largest_score, partial)) + lse / 2)
    else:
        eps = score_error(ref, q)
    # |dP| and |delta| by Cauchy-Schwarz; dk and dv add up independent roundings of every query row that sees a key.
    dp = largest_row(dout) * largest_row(v) * factor
    rows = math.sqrt(q.shape[1] * q.shape[2] / max(k.shape[2], 1))
    sums = [eps * dp * largest(k) * scale, eps * dp * largest(q) * scale * rows, eps * largest(dout) * rows * factor]  # of dq, dk, dv
    attn_bias, sinks = options.get("attn_bias"), options.get("sinks")
    noise = delta_noise(ref, out, dout)
    from_delta = noise * ref.probabilities
    if ref.tanh is not None:
        from_delta = from_delta * (1 - ref.tanh**2)
    heads = [heads_first(t.double(), q.shape[2]) for t in (q, k)]
    sums[0] += largest(torch.einsum("bhij,bhjd->bhid", from_delta, heads[1])) * scale
    of_heads = torch.einsum("bhij,bhid->bhjd", from_delta**2, heads[0] ** 2)
    sums[1] += largest(sum_groups(of_heads, k.shape[2]).sqrt()) * scale
    if attn_bias is not None and attn_bias.dtype != torch.bool:
        shared = ref.probabilities.numel() / max(attn_bias.numel(), 1)  # scores that share an element of the bias
        # one error of delta affects all keys of a row, so where they share a bias, it counts once for their sum
        along_keys = ref.probabilities.sum(-1, keepdim=True) if attn_bias.shape[-1] == 1 else ref.probabilities
        of_delta = (along_keys * noise).square().sum_to_size(attn_bias.shape).sqrt()
        sums.append(eps * dp * math.sqrt(shared) + largest(of_delta))
    if sinks is not None:
        of_sinks = torch.exp(by_row(sinks.double(), noise) - ref.softmax_lse[..., None])
        of_delta = (of_sinks * noise).square().sum((0, 2, 3)).sqrt()
        sums.append(eps * dp * math.sqrt(q.shape[0] * q.shape[1]) + largest(of_delta))
    return sums


def score_gradients(ref: Eager, dout: Tensor, v: Tensor, dlse: Tensor | None = None) -> Tensor:
    """Returns the gradients dS of products softmax_scale * q.k, (batch, nheads, seqlen_q, seqlen_k) in fp64; arguments as in
    `eager_gradients`."""
    nheads = ref.weights.shape[1]
    of_weights = ref.weights * (dout.double().transpose(1, 2) @ heads_first(v.double(), nheads).transpose(-1, -2))
    delta = of_weights.sum(-1, keepdim=True)
    if dlse is not None:
        delta = delta - dlse.double()[..., None]
    of_scores = of_weights - ref.probabilities * delta
    return of_scores if ref.tanh is None else of_scores * (1 - ref.tanh**2)


def rounded_gradients(
    ref: Eager, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, dlse: Tensor | None = None, softmax_scale: float | None = None, **_: Any
) -> list[Rounded]:
    """Returns the bounds for dq, dk and dv: dS @ k, dS^T @ q and P^T @ dout, with P as dropout left it.

    P is rounded once for dv. dS, which is P * (dP - delta), is rounded twice: P may be (kernels with two roles pass it from one role to the
    other; eager attention keeps it in memory), and dS itself."""
    scale = q.shape[3] ** -0.5 if softmax_scale is None else softmax_scale
    of_scores = scale * score_gradients(ref, dout, v, dlse)

    def by_kv_head(t: Tensor) -> Tensor:
        """Returns (batch, nheads_k, rows of all query heads of a KV head, columns) of (batch, nheads, rows, columns)."""
        return t.unflatten(1, (k.shape[2], -1)).flatten(2, 3)

    queries, of_out = (by_kv_head(t.double().transpose(1, 2)) for t in (q, dout))
    return [
        rounded_product(of_scores, heads_first(k.double(), q.shape[2]), q.dtype, roundings=2),
        rounded_product(by_kv_head(of_scores).mT, queries, q.dtype, roundings=2),
        rounded_product(by_kv_head(ref.weights).mT, of_out, q.dtype),
    ]


def delta_noise(ref: Eager, out: Tensor, dout: Tensor) -> Tensor:
    """Returns the allowed error of each row's delta, (batch, nheads, seqlen_q, 1), from errors of `out`.

    That is `_DEVIATIONS` standard deviations of the error from rounding the exact out, or the error that the given `out` does cause, if it
    is larger: out's errors have a budget of their own. Eager attention computes gradients from probabilities, without delta. So it is
    exact where one key has all the attention, or a bias has one element for all keys of a row."""
    dout64 = dout.double()
    rounding = _DEVIATIONS * (dout64 * (ref.out.to(dout.dtype).double() - ref.out)).norm(dim=-1)
    made = (dout64 * (out.double() - ref.out)).sum(-1).abs() * (1 + 4 * torch.finfo(dout.dtype).eps)
    return torch.maximum(rounding, made).transpose(1, 2)[..., None]


def lse_tolerance(ref: Eager, dtype: torch.dtype) -> float:
    """Returns the allowed error of softmax_lse: some fp32 roundings of its own magnitude and of the scores'.

    fp16 and bf16 kernels get 64, because they use the hardware's approximate ex2 and lg2, and a row maximum that may lag behind. For small
    scores that is about 2^-17, which changes each probability of the backward pass by less than 1% of fp16's eps."""
    roundings = 64 if dtype in (torch.float16, torch.bfloat16) else 8
    finite = ref.softmax_lse[ref.softmax_lse.isfinite()]
    return roundings * torch.finfo(torch.float32).eps * (1 + max(ref.largest_score, largest(finite)))
