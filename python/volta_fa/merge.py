"""Attention over several sets of keys, from the attention over each."""

from __future__ import annotations

import torch
from torch import Tensor

from .errors import require_tensors


def merge_attention_states(out_a: Tensor, softmax_lse_a: Tensor, out_b: Tensor, softmax_lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over two disjoint sets of keys together, from the attention over each: `volta_fa::merge_attention_states`.

    A softmax over both sets is the mean of the softmaxes over each, weighted by their sums of exponentials, whose logarithms are
    their softmax_lse. Merging is associative, so any number of sets can be merged, two at a time. No gradient: torch.compile takes it
    under torch.no_grad() or on detached tensors.

    Args:
        out_a, out_b: (batch, seqlen_q, nheads, headdim_v), or packed (total_q, nheads, headdim_v), of any headdim_v up to 2**20:
            float16, bfloat16 or float32, on the CPU also float64; both alike.
        softmax_lse_a, softmax_lse_b: float32, (batch, nheads, seqlen_q) or (nheads, total_q), as `volta_fa::fwd` returns them: +inf
            where a query saw no key; its out does not matter then.

    Returns (out, softmax_lse) of both sets: out in the dtype of out_a, rounded once; 0 and +inf where a query saw no key at all.

    Raises ValueError for wrong arguments, NotImplementedError on a device without kernels.
    """
    require_tensors(out_a=out_a, softmax_lse_a=softmax_lse_a, out_b=out_b, softmax_lse_b=softmax_lse_b)
    out, softmax_lse = torch.ops.volta_fa.merge_attention_states(out_a, softmax_lse_a, out_b, softmax_lse_b)
    return out, softmax_lse
