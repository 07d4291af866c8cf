"""The fp64 reference of all tests: attention, its error limits, and dropout's mask. It shares no code with the kernels or CPU backend.

`forward` and `backward` hold the whole score matrix in fp64 and differentiate by autograd. `Exact` has exact results with their limits
(budgets): twice to three times the error of PyTorch's eager attention in the same dtype. `groups` splits a problem into dense ones, each of
the batch entries or packed sequences of one length. These are `volta_fa.check`'s own modules, from which this file takes names.
Only dropout's random numbers (`philox`, `kept`) are written here."""

import importlib
import sys
import types
from pathlib import Path

import torch
from torch import Tensor

# Imports modules of `volta_fa.check` under another package name. `import volta_fa` would load its library, but VOLTA_FA_TEST_LIBRARY may
# name another library to test.
_package = sys.modules["volta_fa_check"] = types.ModuleType("volta_fa_check")
_package.__path__ = [str(Path(__file__).resolve().parent.parent / "python/volta_fa/check")]
block_masks, cases, problems, tolerance = (
    importlib.import_module(f"volta_fa_check.{name}") for name in ("block_masks", "cases", "problems", "tolerance")
)
# unused_keys: which rows of k are beyond seqused_k. tolerance.exact is `forward` here: results of one dense problem. `exact` below returns
# an Exact, of any call. delta_noise: allowed error of a row's sum(dout * out). kept_share: 1 - dropout_p, rounded to random numbers of 15
# bits: dropped_numbers of them drop. eager: attention by PyTorch's operations in the dtype of the inputs. gradient_names: of bwd's results
# for these options (dq, dk, dv, ...). max_error, rms_error: of a result against the exact one.
# score_gradients: dS.
Budget, Exact, groups, unused_keys = tolerance.Budget, problems.Exact, problems.groups, problems.unused_keys
forward, backward = tolerance.exact, tolerance.exact_gradients
delta_noise, dropped_numbers, kept_share = tolerance.delta_noise, tolerance.dropped_numbers, tolerance.kept_share
eager, eager_gradients, gradient_names = tolerance.eager, tolerance.eager_gradients, tolerance.gradient_names
forward_budget, max_error, rms_error = tolerance.forward_budget, tolerance.max_error, tolerance.rms_error
score_gradients = tolerance.score_gradients


def philox(seed: int, offset: int, group: Tensor, row: Tensor, head: Tensor) -> Tensor:
    """Returns the four random words, 0 to 2^32 - 1, of each (head, row, `group`: number of four columns), with shape (..., 4).

    The generator is Philox4x32 with 7 rounds (Salmon et al. 2011), key `seed`, counter (group, row, head, offset)."""
    mask = 0xFFFFFFFF
    x0, x1, x2, x3 = torch.broadcast_tensors(group, row, head, torch.full_like(head, offset & mask))
    k0, k1 = seed & mask, (seed >> 32) & mask
    for _ in range(7):
        # int64 products have the right 64 bits, though perhaps a wrong sign; the masks below take 32 of them
        p, r = 0xD2511F53 * x0, 0xCD9E8D57 * x2
        x0, x1, x2, x3 = ((r >> 32) & mask) ^ x1 ^ k0, r & mask, ((p >> 32) & mask) ^ x3 ^ k1, p & mask
        k0, k1 = (k0 + 0x9E3779B9) & mask, (k1 + 0xBB67AE85) & mask
    return torch.stack([x0, x1, x2, x3], -1)


def kept(rng_state: Tensor, entries: Tensor, nheads: int, seqlen_q: int, seqlen_k: int, dropout_p: float) -> Tensor:
    """Returns (entries, nheads, seqlen_q, seqlen_k) bool: True where dropout keeps the probabilities of these batch entries.

    `rng_state` is (seed, offset), as the op returns it. One call of Philox gives eight 15-bit numbers, two in each word: those of rows
    r and r + 4 (bit 2 of the row), and of four columns. Columns c and c + 2 share a word. A number decides one probability."""
    seed, offset = rng_state.tolist()
    device = entries.device
    head = entries[:, None, None, None] * nheads + torch.arange(nheads, device=device)[:, None, None]
    row, column = torch.arange(seqlen_q, device=device)[:, None], torch.arange(seqlen_k, device=device)
    words = philox(seed, offset, column // 4, row & ~4, head)
    word = (2 * (row // 4 % 2) + column % 2).expand(words.shape[:-1])
    numbers = words.gather(-1, word[..., None]).squeeze(-1) >> (column // 2 % 2 * 16) & 0x7FFF
    dropped = dropped_numbers(dropout_p)
    # numbers below a threshold mean the rarer of the two: dropped for p <= 0.5, kept for p > 0.5
    return numbers >= dropped if dropout_p <= 0.5 else numbers < 2**15 - dropped


def kept_by(rng_state: Tensor | None, nheads: int, dropout_p: float = 0.0, **_):
    """Returns a function that computes `kept` for given entries and lengths; None without dropout."""
    if not dropout_p:
        return None
    return lambda entries, seqlen_q, seqlen_k: kept(rng_state, entries, nheads, seqlen_q, seqlen_k, dropout_p)


def exact(q: Tensor, k: Tensor, v: Tensor, rng_state: Tensor | None = None, **options):
    """Returns the exact results of a call of `fwd` or `bwd`, with the limits of their errors."""
    return Exact(q, k, v, kept_by(rng_state, q.shape[-2], **options), **options)
