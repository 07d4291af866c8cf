"""K and V that are quantized once for many calls of `volta_fa::fwd_fast`."""

from __future__ import annotations

import torch
from torch import Tensor


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
    """Returns the codes of K and the range of V, as the option `prepared` of any number of calls of `volta_fa::fwd_fast`.

    The calls still take k and v, and the same lengths and `rotate`; of these only the sizes of tensors and `rotate` are compared.
    A call's own `smooth_k` has no effect. Results are bitwise identical to those without `prepared`.

    Args:
        k, v, cu_seqlens_k, max_seqlen_k, smooth_k, rotate, check_lengths: as for `volta_fa::fwd_fast`.
    """
    lengths = {"cu_seqlens_k": cu_seqlens_k, "max_seqlen_k": max_seqlen_k, "check_lengths": check_lengths}
    prepared: Tensor = torch.ops.volta_fa.prepare_fast(k, v, **lengths, smooth_k=smooth_k, rotate=rotate)
    return prepared
