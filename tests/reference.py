"""What the ops must compute, written as plainly as possible: attention and its judge in `python -m volta_fa check`, and dropout's mask.

Nothing here is shared with the kernels or the CPU backend: the whole score matrix in fp64, the mask straight from its rule,
gradients by PyTorch's autograd.
"""

from __future__ import annotations

import importlib
import sys
import types
from pathlib import Path

import torch
from torch import Tensor

# Modules of `volta_fa.check` in a package of another name: importing volta_fa would load its library, and tests may be of another one.
_package = sys.modules["volta_fa_check"] = types.ModuleType("volta_fa_check")
_package.__path__ = [str(Path(__file__).resolve().parent.parent / "python/volta_fa/check")]
block_masks, cases, problems, tolerance = (
    importlib.import_module(f"volta_fa_check.{name}") for name in ("block_masks", "cases", "problems", "tolerance")
)
Budget, Exact, groups, unused_keys = tolerance.Budget, problems.Exact, problems.groups, problems.unused_keys
forward, backward = tolerance.exact, tolerance.exact_gradients
delta_noise, dropped_numbers, kept_share = tolerance.delta_noise, tolerance.dropped_numbers, tolerance.kept_share
eager, eager_gradients, gradient_names = tolerance.eager, tolerance.eager_gradients, tolerance.gradient_names
forward_budget, lse_tolerance, max_error, rms_error = (
    tolerance.forward_budget,
    tolerance.lse_tolerance,
    tolerance.max_error,
    tolerance.rms_error,
)
by_row, score, visible = tolerance.by_row, tolerance.score, tolerance.visible


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
    """(entries, nheads, seqlen_q, seqlen_k) bool: what dropout leaves of these batch entries' probabilities.

    A call of Philox has eight 15-bit numbers: those of rows r and r + 4, and of four columns. Columns c and c + 2 share a word.
    """
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


def kept_by(rng_state: Tensor | None, nheads: int, dropout_p: float = 0.0, **_):
    """Returns `kept` of the entries and lengths that it is given; None without dropout."""
    if not dropout_p:
        return None
    return lambda entries, seqlen_q, seqlen_k: kept(rng_state, entries, nheads, seqlen_q, seqlen_k, dropout_p)


def exact(q: Tensor, k: Tensor, v: Tensor, rng_state: Tensor | None = None, **options):
    """The exact results of a problem of the op, and what is allowed."""
    return Exact(q, k, v, kept_by(rng_state, q.shape[-2], **options), **options)
