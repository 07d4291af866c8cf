"""What the ops must compute, written as plainly as possible.

Nothing here is shared with the kernels or the CPU backend: the whole score matrix in fp64, the mask straight from its rule,
gradients from their formulas. How far a result may be from it is the rule of `python -m volta_fa check`.
"""

from __future__ import annotations

import importlib
import math
import sys
import types
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

# Modules of `volta_fa.check` in a package of another name: importing volta_fa would load its library, and tests may be of another one.
_package = sys.modules["volta_fa_check"] = types.ModuleType("volta_fa_check")
_package.__path__ = [str(Path(__file__).resolve().parent.parent / "python/volta_fa/check")]
block_masks, cases, tolerance = (importlib.import_module(f"volta_fa_check.{name}") for name in ("block_masks", "cases", "tolerance"))
Budget, FORWARD_FACTOR, GRADIENT_FACTOR = tolerance.Budget, tolerance.FORWARD_FACTOR, tolerance.GRADIENT_FACTOR
delta_noise, gradient_sums, lse_tolerance = tolerance.delta_noise, tolerance.gradient_sums, tolerance.lse_tolerance
dropped_numbers, kept_share = tolerance.dropped_numbers, tolerance.kept_share
eager, eager_gradients, gradient_names = tolerance.eager, tolerance.eager_gradients, tolerance.gradient_names
max_error, rms_error, visible = tolerance.max_error, tolerance.rms_error, tolerance.visible
by_row, heads_first, largest, score, sum_groups = (
    tolerance.by_row,
    tolerance.heads_first,
    tolerance.largest,
    tolerance.score,
    tolerance.sum_groups,
)


def philox(seed: int, offset: int, group: Tensor, row: Tensor, head: Tensor) -> Tensor:
    """(..., 4): the words, 0 to 2^32 - 1, of each (head, row, group of four columns): Philox4x32 with 7 rounds, Salmon et al. 2011."""
    mask = 0xFFFFFFFF
    x0, x1, x2, x3 = torch.broadcast_tensors(group, row, head, torch.full_like(head, offset & mask))
    k0, k1 = seed & mask, (seed >> 32) & mask
    for _ in range(7):
        # the low 64 bits of a product, whatever int64 makes of its sign
        p, r = 0xD2511F53 * x0, 0xCD9E8D57 * x2
        x0, x1, x2, x3 = ((r >> 32) & mask) ^ x1 ^ k0, r & mask, ((p >> 32) & mask) ^ x3 ^ k1, p & mask
        k0, k1 = (k0 + 0x9E3779B9) & mask, (k1 + 0xBB67AE85) & mask
    return torch.stack([x0, x1, x2, x3], -1)


def kept(rng_state: Tensor, entries: Tensor, nheads: int, seqlen_q: int, seqlen_k: int, dropout_p: float) -> Tensor:
    """(entries, nheads, seqlen_q, seqlen_k) bool: what dropout leaves of these batch entries' probabilities."""
    seed, offset = rng_state.tolist()
    device = entries.device
    head = entries[:, None, None, None] * nheads + torch.arange(nheads, device=device)[:, None, None]
    row, column = torch.arange(seqlen_q, device=device)[:, None], torch.arange(seqlen_k, device=device)
    words = philox(seed, offset, column // 4, row & ~4, head)
    word = (2 * (row // 4 % 2) + column % 2).expand(words.shape[:-1])
    numbers = words.gather(-1, word[..., None]).squeeze(-1) >> (column // 2 % 2 * 16) & 0x7FFF
    dropped = dropped_numbers(dropout_p)
    # the numbers below a threshold have the rarer fate
    return numbers >= dropped if dropout_p <= 0.5 else numbers < 2**15 - dropped


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
    block_lists=None,
    block_bits=None,
    block_lists_t=None,
    block_bits_t=None,
    rng_state=None,
    **options,
) -> list[Group]:
    """The problem that the op's arguments describe, as dense ones."""
    device, nheads = q.device, q.shape[-2]
    if block_lists is not None:
        attn_bias = block_masks.expand(block_lists, block_bits, q.shape[0], nheads, q.shape[1], k.shape[1])
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


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None = None,
    *,
    dropout_p: float = 0.0,
    kept: Tensor | None = None,
    **options,
) -> Forward:
    """A dense problem; `kept` is dropout's mask."""
    q, k, v = q.double(), k.double(), v.double()
    exact = {name: t.double() if torch.is_tensor(t) and t.is_floating_point() else t for name, t in options.items()}
    s = score(q, k, softmax_scale, **exact)
    logits = s.logits
    row_max = logits.amax(-1, keepdim=True) if logits.shape[-1] else logits.new_full((*logits.shape[:3], 1), -math.inf)
    row_max = row_max.masked_fill(row_max == -math.inf, 0.0)
    weights = torch.exp(logits - row_max)
    total = weights.sum(-1, keepdim=True)
    none = total == 0
    probabilities = (weights / total.masked_fill(none, 1.0))[..., : k.shape[1]]
    # a bool tensor divided by a number would be fp32
    factors = 1.0 if kept is None else kept.double() / kept_share(dropout_p)
    out = torch.einsum("bhij,bhjd->bihd", probabilities * factors, heads_first(v, q.shape[2]))
    lse = (row_max + total.log()).masked_fill(none, math.inf).squeeze(-1)
    largest_score = max(largest(s.products), largest(s.scores[probabilities > 1e-9]))
    return Forward(out, lse, probabilities, factors, s.tanh, (s.scores == -math.inf).all(-1), largest_score)


def backward(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, softmax_scale: float | None = None, dlse: Tensor | None = None, **options):
    """The gradients of `gradient_names`, in fp64, of a dense problem. `dlse` is the gradient of softmax_lse."""
    f = forward(q, k, v, softmax_scale, **options)
    attn_bias, sinks, softcap = (options.get(name) for name in ("attn_bias", "sinks", "softcap"))
    nheads, nheads_k = q.shape[2], k.shape[2]
    scale = q.shape[3] ** -0.5 if softmax_scale is None else softmax_scale
    do = dout.double().transpose(1, 2)
    qh, kh, vh = (heads_first(t.double(), nheads) for t in (q, k, v))
    p = f.probabilities
    dv = torch.einsum("bhij,bhid->bhjd", p * f.factors, do)
    dp = torch.einsum("bhid,bhjd->bhij", do, vh) * f.factors
    delta = (p * dp).sum(-1, keepdim=True)
    if dlse is not None:
        delta = delta - dlse.double().masked_fill(f.softmax_lse == math.inf, 0.0)[..., None]
    ds = p * (dp - delta)
    extra = []
    if attn_bias is not None and attn_bias.dtype != torch.bool:
        extra.append(ds.sum_to_size(attn_bias.shape))
    if sinks is not None:
        of_sinks = torch.exp(by_row(sinks.double(), delta) - f.softmax_lse[..., None])
        extra.append(-(of_sinks * delta).sum((0, 2, 3)))
    if softcap:
        ds = ds * (1 - f.tanh**2)
    dq = torch.einsum("bhij,bhjd->bihd", ds, kh) * scale
    dk = torch.einsum("bhij,bhid->bhjd", ds, qh) * scale
    return dq, sum_groups(dk, nheads_k), sum_groups(dv, nheads_k), *extra


def forward_budget(ref: Forward, q: Tensor, k: Tensor, v: Tensor, **options) -> Budget:
    weights, values = ref.probabilities * ref.factors, heads_first(v.double(), q.shape[2])
    rounded = tolerance.rounded_probabilities(weights, values, q.dtype)
    return Budget.of(eager(q, k, v, **options), ref.out, FORWARD_FACTOR, tolerance.forward_sums(ref, q, v, **options), rounded)


def gradient_budgets(ref: Forward, refs, out: Tensor, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, **options) -> list[Budget]:
    """Budgets of `gradient_names`, if the backward pass gets this `out`."""
    sums = gradient_sums(ref, out, dout, q, k, v, **options)
    found = eager_gradients(dout, q, k, v, **options)
    return [Budget.of(e, r, GRADIENT_FACTOR, s) for e, r, s in zip(found, refs, sums)]
