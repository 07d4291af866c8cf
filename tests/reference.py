"""What the ops must compute, written as plainly as possible, and how far a result may be from it.

Nothing here is shared with the library: the whole score matrix in fp64, the mask straight from its rule,
gradients from their formulas.
"""

from __future__ import annotations

import math
from collections import defaultdict
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


def philox(seed: int, offset: int, column: Tensor, row: Tensor, head: Tensor) -> Tensor:
    """The number, 0 to 2^32 - 1, of each (head, row, column): Philox4x32 with 7 rounds, Salmon et al. 2011."""
    mask = 0xFFFFFFFF
    x0, x1, x2, x3 = torch.broadcast_tensors(column // 4, row, head, torch.full_like(head, offset & mask))
    k0, k1 = seed & mask, (seed >> 32) & mask
    for _ in range(7):
        # the low 64 bits of a product, whatever int64 makes of its sign
        p, r = 0xD2511F53 * x0, 0xCD9E8D57 * x2
        x0, x1, x2, x3 = ((r >> 32) & mask) ^ x1 ^ k0, r & mask, ((p >> 32) & mask) ^ x3 ^ k1, p & mask
        k0, k1 = (k0 + 0x9E3779B9) & mask, (k1 + 0xBB67AE85) & mask
    words = torch.stack([x0, x1, x2, x3], -1)
    return words.gather(-1, (column % 4).expand(words.shape[:-1])[..., None]).squeeze(-1)


def kept(rng_state: Tensor, entries: Tensor, nheads: int, seqlen_q: int, seqlen_k: int, dropout_p: float) -> Tensor:
    """(entries, nheads, seqlen_q, seqlen_k) bool: what dropout leaves of these batch entries' probabilities."""
    seed, offset = rng_state.tolist()
    device = entries.device
    head = entries[:, None, None, None] * nheads + torch.arange(nheads, device=device)[:, None, None]
    row, column = torch.arange(seqlen_q, device=device)[:, None], torch.arange(seqlen_k, device=device)
    return philox(seed, offset, column, row, head) >= math.floor(dropout_p * 2**32)


@dataclass
class Group:
    """Batch entries or packed sequences of the same lengths, as one dense problem of its own."""

    entries: Tensor  # (n) their numbers
    q_rows: Tensor  # (n, seqlen_q) where their rows are among all rows
    k_rows: Tensor  # (n, seqlen_k)
    options: dict  # of `forward`: features that belong to these entries

    @staticmethod
    def _gather(t: Tensor, rows: Tensor, packed: bool) -> Tensor:
        return (t if packed else t.flatten(0, 1))[rows]

    def queries(self, t: Tensor) -> Tensor:
        """(n, seqlen_q, nheads, headdim) of q, out, dout or dq."""
        return self._gather(t, self.q_rows, t.dim() == 3)

    def keys(self, t: Tensor) -> Tensor:
        """(n, seqlen_k, nheads_k, headdim) of k, v, dk or dv."""
        return self._gather(t, self.k_rows, t.dim() == 3)

    def lse(self, t: Tensor) -> Tensor:
        """(n, nheads, seqlen_q) of a softmax_lse."""
        if t.dim() == 2:
            return t[:, self.q_rows].transpose(0, 1)
        return t[self.entries]

    def bias(self, t: Tensor) -> Tensor:
        """The part of a bias; dimensions of size 1 stay."""
        t = t[:, :, : self.q_rows.shape[1], : self.k_rows.shape[1]]
        return t[self.entries] if t.shape[0] > 1 else t

    def add_to_bias(self, total: Tensor, part: Tensor):
        """Where `bias` reads, add."""
        at = (slice(None), slice(part.shape[2]), slice(part.shape[3]))
        if total.shape[0] > 1:
            total[(self.entries, *at)] += part
        else:
            total[(slice(None), *at)] += part


def groups(
    q: Tensor,
    k: Tensor,
    *,
    cu_seqlens_q=None,
    cu_seqlens_k=None,
    max_seqlen_q=None,
    max_seqlen_k=None,
    seqused_k=None,
    attn_bias=None,
    alibi_slopes=None,
    rng_state=None,
    **options,
) -> list[Group]:
    """The problem that the op's arguments describe, as dense ones."""
    device, nheads = q.device, q.shape[-2]
    if cu_seqlens_q is None:
        starts_q = [b * q.shape[1] for b in range(q.shape[0])]
        starts_k = [b * k.shape[1] for b in range(q.shape[0])]
        lengths_q, lengths_k = [q.shape[1]] * q.shape[0], [k.shape[1]] * q.shape[0]
    else:
        starts_q, starts_k = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
        lengths_q = [b - a for a, b in zip(starts_q, starts_q[1:])]
        lengths_k = [b - a for a, b in zip(starts_k, starts_k[1:])]
    if seqused_k is not None:
        lengths_k = seqused_k.tolist()
    alike = defaultdict(list)
    for entry, lengths in enumerate(zip(lengths_q, lengths_k)):
        alike[lengths].append(entry)
    found = []
    for (seqlen_q, seqlen_k), numbers in alike.items():

        def rows(starts, count):
            first = torch.tensor([starts[n] for n in numbers], device=device)
            return first[:, None] + torch.arange(count, device=device)

        group = Group(torch.tensor(numbers, device=device), rows(starts_q, seqlen_q), rows(starts_k, seqlen_k), dict(options))
        if attn_bias is not None:
            group.options["attn_bias"] = group.bias(attn_bias)
        if alibi_slopes is not None:
            group.options["alibi_slopes"] = alibi_slopes[group.entries] if alibi_slopes.dim() == 2 else alibi_slopes
        if options.get("dropout_p"):
            group.options["kept"] = kept(rng_state, group.entries, nheads, seqlen_q, seqlen_k, options["dropout_p"])
        found.append(group)
    return found


def unused_keys(groups_: list[Group], k: Tensor) -> Tensor:
    """Rows of k, among all rows, that are no entry's key."""
    unused = torch.ones(k.shape[0] if k.dim() == 3 else k.shape[0] * k.shape[1], dtype=torch.bool, device=k.device)
    for group in groups_:
        unused[group.k_rows.flatten()] = False
    return unused


@dataclass
class Forward:
    out: Tensor  # (batch, seqlen_q, nheads, headdim_v)
    softmax_lse: Tensor  # (batch, nheads, seqlen_q)
    probabilities: Tensor  # (batch, nheads, seqlen_q, seqlen_k), before dropout
    factors: Tensor | float  # dropout's
    tanh: Tensor | None  # of softcap
    masked: Tensor  # (batch, nheads, seqlen_q) rows that see no key
    largest_score: float  # of those that are computed and those that count


def _distance(seqlen_q: int, seqlen_k: int, device) -> Tensor:
    """|i + o - j| of ALiBi."""
    i = torch.arange(seqlen_q, device=device)[:, None] + (seqlen_k - seqlen_q)
    return (i - torch.arange(seqlen_k, device=device)[None, :]).abs()


def _by_row(sinks: Tensor, like: Tensor) -> Tensor:
    """The sink of each row of `like`, (batch, nheads, seqlen_q, 1)."""
    return sinks[None, :, None, None].expand(*like.shape[:3], 1)


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    attn_bias: Tensor | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    kept: Tensor | None = None,
    **mask,
) -> Forward:
    """A dense problem; `kept` is dropout's mask."""
    q, k, v = q.double(), k.double(), v.double()
    nheads = q.shape[2]
    scale = q.shape[3] ** -0.5 if softmax_scale is None else softmax_scale
    seen = visible(q.shape[1], k.shape[1], device=q.device, **mask)
    scores = torch.einsum("bhid,bhjd->bhij", _heads_first(q, nheads), _heads_first(k, nheads)) * scale
    largest = _largest(scores)
    tanh = None
    if softcap > 0:
        tanh = torch.tanh(scores / softcap)
        scores = softcap * tanh
    if alibi_slopes is not None:
        scores = scores - alibi_slopes.double()[..., None, None] * _distance(q.shape[1], k.shape[1], q.device)
    if attn_bias is not None and attn_bias.dtype == torch.bool:
        seen = seen & attn_bias
    elif attn_bias is not None:
        scores = scores + attn_bias.double()
    scores = scores.masked_fill(~seen, -math.inf)
    logits = scores if sinks is None else torch.cat([scores, _by_row(sinks.double(), scores)], -1)
    row_max = logits.amax(-1, keepdim=True) if logits.shape[-1] else logits.new_full((*logits.shape[:3], 1), -math.inf)
    row_max = row_max.masked_fill(row_max == -math.inf, 0.0)
    weights = torch.exp(logits - row_max)
    total = weights.sum(-1, keepdim=True)
    none = total == 0
    probabilities = (weights / total.masked_fill(none, 1.0))[..., : k.shape[1]]
    # a bool tensor divided by a number would be fp32
    factors = 1.0 if kept is None else kept.double() / (1 - dropout_p)
    out = torch.einsum("bhij,bhjd->bihd", probabilities * factors, _heads_first(v, nheads))
    lse = (row_max + total.log()).masked_fill(none, math.inf).squeeze(-1)
    largest = max(largest, _largest(scores[probabilities > 1e-9]))
    return Forward(out, lse, probabilities, factors, tanh, (scores == -math.inf).all(-1), largest)


def gradient_names(attn_bias: Tensor | None = None, sinks: Tensor | None = None, **_) -> list[str]:
    """What the backward passes of these options return."""
    names = ["dq", "dk", "dv"]
    if attn_bias is not None and attn_bias.dtype != torch.bool:
        names.append("dattn_bias")
    return names if sinks is None else [*names, "dsinks"]


def backward(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, softmax_scale: float | None = None, **options):
    """The gradients of `gradient_names`, in fp64, of a dense problem."""
    f = forward(q, k, v, softmax_scale, **options)
    attn_bias, sinks, softcap = (options.get(name) for name in ("attn_bias", "sinks", "softcap"))
    nheads, nheads_k = q.shape[2], k.shape[2]
    scale = q.shape[3] ** -0.5 if softmax_scale is None else softmax_scale
    do = dout.double().transpose(1, 2)
    qh, kh, vh = (_heads_first(t.double(), nheads) for t in (q, k, v))
    p = f.probabilities
    dv = torch.einsum("bhij,bhid->bhjd", p * f.factors, do)
    dp = torch.einsum("bhid,bhjd->bhij", do, vh) * f.factors
    delta = (p * dp).sum(-1, keepdim=True)
    ds = p * (dp - delta)
    extra = []
    if attn_bias is not None and attn_bias.dtype != torch.bool:
        extra.append(ds.sum_to_size(attn_bias.shape))
    if sinks is not None:
        of_sinks = torch.exp(_by_row(sinks.double(), delta) - f.softmax_lse[..., None])
        extra.append(-(of_sinks * delta).sum((0, 2, 3)))
    if softcap:
        ds = ds * (1 - f.tanh**2)
    dq = torch.einsum("bhij,bhjd->bihd", ds, kh) * scale
    dk = torch.einsum("bhij,bhid->bhjd", ds, qh) * scale
    return dq, _sum_groups(dk, nheads_k), _sum_groups(dv, nheads_k), *extra


def eager(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    attn_bias: Tensor | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    kept: Tensor | None = None,
    **mask,
) -> Tensor:
    """PyTorch's own eager attention of a dense problem, every step in the dtype of the inputs, or in fp32 from where an
    fp32 tensor (slopes, a bias, sinks) comes in: the yardstick for rounding."""
    nheads = q.shape[2]
    scale = q.shape[3] ** -0.5 if softmax_scale is None else softmax_scale
    seen = visible(q.shape[1], k.shape[1], device=q.device, **mask)
    scores = (_heads_first(q, nheads) * scale) @ _heads_first(k, nheads).transpose(-1, -2)
    if softcap > 0:
        scores = softcap * torch.tanh(scores / softcap)
    if alibi_slopes is not None:
        scores = scores - alibi_slopes[..., None, None] * _distance(q.shape[1], k.shape[1], q.device)
    if attn_bias is not None and attn_bias.dtype == torch.bool:
        seen = seen & attn_bias
    elif attn_bias is not None:
        scores = scores + attn_bias
    scores = scores.masked_fill(~seen, -math.inf)
    if sinks is not None:
        scores = torch.cat([scores, _by_row(sinks, scores)], -1)
    # a row of -inf would be one of NaN, in the gradients too
    none = (scores == -math.inf).all(-1, keepdim=True)
    probabilities = scores.masked_fill(none, 0.0).softmax(-1).masked_fill(none, 0.0)[..., : k.shape[1]]
    if kept is not None:
        probabilities = probabilities * kept / (1 - dropout_p)
    return (probabilities.to(v.dtype) @ _heads_first(v, nheads)).transpose(1, 2)


def eager_gradients(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, **options):
    """The gradients of `gradient_names`, by autograd through `eager`."""
    names = gradient_names(**options)
    leaves = {name: t.detach().clone().requires_grad_() for name, t in (("dq", q), ("dk", k), ("dv", v))}
    options = dict(options)
    for name in names[3:]:
        leaves[name] = options[name[1:]] = options[name[1:]].detach().clone().requires_grad_()
    with torch.enable_grad():
        out = eager(leaves["dq"], leaves["dk"], leaves["dv"], **options)
        found = torch.autograd.grad(out, list(leaves.values()), dout, allow_unused=True)
    return [torch.zeros_like(t) if g is None else g for g, t in zip(found, leaves.values())]


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
        return cls(max_error(eager, ref), rms_error(eager, ref), factor, _largest(ref), rms_error(ref, zero), sums, eager.dtype)

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
    sums = accumulation_eps(q.dtype) * (1 + ref.largest_score) * _largest(v) / (1 - options.get("dropout_p", 0.0))
    return Budget.of(eager(q, k, v, **options), ref.out, FORWARD_FACTOR, sums)


def gradient_sums(ref: Forward, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, **options) -> list[float]:
    """What rounded sums alone may put on each of `gradient_names`."""
    scale = options.get("softmax_scale")
    scale = abs(q.shape[3] ** -0.5 if scale is None else scale)
    factor = 1 / (1 - options.get("dropout_p", 0.0))
    eps = accumulation_eps(q.dtype) * (1 + ref.largest_score)
    # |dP| and |delta| by Cauchy-Schwarz; dk and dv add up independent roundings of every query row that sees a key.
    dp = _largest_row(dout) * _largest_row(v) * factor
    rows = math.sqrt(q.shape[1] * q.shape[2] / max(k.shape[2], 1))
    sums = [eps * dp * _largest(k) * scale, eps * dp * _largest(q) * scale * rows, eps * _largest(dout) * rows * factor]
    attn_bias, sinks = options.get("attn_bias"), options.get("sinks")
    noise = delta_noise(ref, dout)
    from_delta = noise * ref.probabilities
    if ref.tanh is not None:
        from_delta = from_delta * (1 - ref.tanh**2)
    heads = [_heads_first(t.double(), q.shape[2]) for t in (q, k)]
    sums[0] += _largest(torch.einsum("bhij,bhjd->bhid", from_delta, heads[1])) * scale
    of_heads = torch.einsum("bhij,bhid->bhjd", from_delta**2, heads[0] ** 2)
    sums[1] += _largest(_sum_groups(of_heads, k.shape[2]).sqrt()) * scale
    if attn_bias is not None and attn_bias.dtype != torch.bool:
        shared = ref.probabilities.numel() / max(attn_bias.numel(), 1)
        along_keys = ref.probabilities.sum(-1, keepdim=True) if attn_bias.shape[-1] == 1 else ref.probabilities
        of_delta = (along_keys * noise).square().sum_to_size(attn_bias.shape).sqrt()
        sums.append(eps * dp * math.sqrt(shared) + _largest(of_delta))
    if sinks is not None:
        of_sinks = torch.exp(_by_row(sinks.double(), noise) - ref.softmax_lse[..., None])
        of_delta = (of_sinks * noise).square().sum((0, 2, 3)).sqrt()
        sums.append(eps * dp * math.sqrt(q.shape[0] * q.shape[1]) + _largest(of_delta))
    return sums


def delta_noise(ref: Forward, dout: Tensor) -> Tensor:
    """(batch, nheads, seqlen_q, 1): four standard deviations of what the rounding of `out` makes of each row's delta, the
    sum of dout * out. Backward gets no more than that `out`; eager keeps probabilities instead, so that it is exact where
    one key has all the attention or a bias has one element for all keys of a row."""
    rounding = ref.out.to(dout.dtype).double() - ref.out
    return 4 * (dout.double() * rounding).norm(dim=-1).transpose(1, 2)[..., None]


def gradient_budgets(ref: Forward, refs, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, **options) -> list[Budget]:
    """Budgets of `gradient_names`."""
    sums = gradient_sums(ref, dout, q, k, v, **options)
    found = eager_gradients(dout, q, k, v, **options)
    return [Budget.of(e, r, GRADIENT_FACTOR, s) for e, r, s in zip(found, refs, sums)]


def lse_tolerance(ref: Forward, dtype: torch.dtype) -> float:
    """softmax_lse is an fp32 sum of fp32 sums: a few roundings of its own size and of the scores'.

    The kernels get it through the hardware's approximate ex2 and lg2 and a row maximum that may lag behind, a few
    bits worse. An error of 2^-17 changes each probability of the backward pass by less than 1% of fp16's rounding.
    """
    roundings = 64 if dtype in (torch.float16, torch.bfloat16) else 8
    finite = ref.softmax_lse[ref.softmax_lse.isfinite()]
    return roundings * torch.finfo(torch.float32).eps * (1 + max(ref.largest_score, _largest(finite)))
