"""Public Python functions for two operators: merging attention over several sets of keys, and quantizing keys once for several
calls of `volta_fa::fwd_fast`, attention with int8 scores. `volta_fa` exports both."""

import torch
from torch import Tensor

from .errors import require_tensors


def merge_attention_states(out_a: Tensor, softmax_lse_a: Tensor, out_b: Tensor, softmax_lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Computes attention over the union of two disjoint sets of keys from the attention over each, by `volta_fa::merge_attention_states`.

    The softmax over the union is the mean of both softmaxes, weighted by their sums of exponentials, exp(softmax_lse) (the online softmax
    of FlashAttention). Merging is associative, so it extends to any number of sets. No gradient: torch.compile needs torch.no_grad() or
    detached tensors.

    Args:
        out_a, out_b: (batch, seqlen_q, nheads, headdim_v), or packed (total_q, nheads, headdim_v), of any headdim_v up to 2**20:
            float16, bfloat16 or float32, on the CPU also float64; both of one dtype.
        softmax_lse_a, softmax_lse_b: float32, (batch, nheads, seqlen_q) or (nheads, total_q), as `volta_fa::fwd` returns them: +inf
            for a query without a key; its out is then ignored.

    Returns (out, softmax_lse) of the union: out in the dtype of out_a, rounded once; 0 and +inf for a query without a key in both.

    Raises ValueError for wrong arguments, NotImplementedError on a device without kernels.
    """
    require_tensors(out_a=out_a, softmax_lse_a=softmax_lse_a, out_b=out_b, softmax_lse_b=softmax_lse_b)
    return torch.ops.volta_fa.merge_attention_states(out_a, softmax_lse_a, out_b, softmax_lse_b)


def prepare_fast(
    k: Tensor,
    v: Tensor,
    *,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_k: int | None = None,
    smooth_k: bool = True,
    rotate: bool = False,
    check_lengths: bool = False,
) -> Tensor:
    """Returns the int8 codes of K and the range of V, in one uint8 tensor: the option `prepared` of calls of `volta_fa::fwd_fast`.

    The calls still take k and v, and the same lengths and `rotate`; of these only the sizes of tensors and `rotate` are compared.
    A call's own `smooth_k` has no effect. Results are bitwise identical to those without `prepared`.

    Args:
        k, v: float16 or bfloat16, (batch, seqlen_k, nheads_k, headdim or headdim_v), or packed (total_k, nheads_k, ...).
        cu_seqlens_k, max_seqlen_k: of packed sequences, int32 (batch + 1) where each begins and the total, and the longest one's length.
        check_lengths: check the values of cu_seqlens_k on a GPU too, which synchronizes.
        smooth_k: quantizes K less its mean over keys, which lowers the error.
        rotate: multiplies K by a Hadamard matrix before it is quantized, which lowers the error where few channels are wide.

    Raises ValueError for wrong arguments.
    """
    lengths = {"cu_seqlens_k": cu_seqlens_k, "max_seqlen_k": max_seqlen_k, "check_lengths": check_lengths}
    return torch.ops.volta_fa.prepare_fast(k, v, **lengths, smooth_k=smooth_k, rotate=rotate)
