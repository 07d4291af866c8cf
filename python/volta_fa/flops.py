"""Registers the FLOP counts of `volta_fa::fwd` and `volta_fa::bwd` with `torch.utils.flop_counter.FlopCounterMode`, when imported.

The counts follow PyTorch's for its own attention: the matrix products with all keys, hidden or not, two operations for a multiply-add. So a
model's count does not depend on the implementation. Users import this module themselves: `import volta_fa` does not, because PyTorch's
counter imports Triton."""

from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake
from torch.utils.flop_counter import flop_registry, register_flop_formula


def _scores(q: Tensor, k: Tensor, options: dict[str, Any]) -> int:
    """Returns the number of scores: queries times keys, over heads and sequences. Reads packed lengths, which synchronizes; fake tensors
    have none, so there every sequence counts as the longest. Ignores other options, and `out_val`, by which FlopCounterMode passes the
    call's result."""
    cu_seqlens_q, cu_seqlens_k = options.get("cu_seqlens_q"), options.get("cu_seqlens_k")
    if cu_seqlens_q is None or cu_seqlens_k is None:
        batch, seqlen_q, nheads, _headdim = q.shape
        return batch * nheads * seqlen_q * k.shape[1]
    nheads = q.shape[1]
    if cu_seqlens_q.is_meta or is_fake(cu_seqlens_q):
        return (cu_seqlens_q.shape[0] - 1) * nheads * options["max_seqlen_q"] * options["max_seqlen_k"]
    pairs = cu_seqlens_q.diff().long() * cu_seqlens_k.diff().long()
    return nheads * int(pairs.sum())


def _fwd(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> int:
    """Counts Q K^T and P V."""
    return 2 * _scores(q, k, options) * (q.shape[-1] + v.shape[-1])


def _bwd(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, *saved: Any, **options: Any) -> int:
    """Counts Q K^T again, dO V^T, P^T dO, dS K and dS^T Q."""
    return 2 * _scores(q, k, options) * (3 * q.shape[-1] + 2 * v.shape[-1])


# get_raw: formulas get tensors instead of shapes. After a reload of the package they are registered already.
if torch.ops.volta_fa.fwd not in flop_registry:
    register_flop_formula(torch.ops.volta_fa.fwd, get_raw=True)(_fwd)
    register_flop_formula(torch.ops.volta_fa.bwd, get_raw=True)(_bwd)
