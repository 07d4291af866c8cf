"""Recognizes masks in memory that only say causal, or causal in a window."""

from __future__ import annotations

import weakref

import torch
from torch import Tensor

#: Scores below this are hidden. transformers writes the minimum of the dtype, or -inf.
_HIDDEN = -1e4
#: Number of masks whose answer is kept. Layers and recomputations of one step share few mask tensors; reading one waits for the GPU.
_KEPT = 8
_known: dict[int, tuple[weakref.ref[Tensor], int, int | None]] = {}


def causal_window(mask: Tensor) -> int | None:
    """Returns the number of keys before its own position that a query sees under `mask`, -1 for all, or None for another mask.

    Args:
        mask: (batch or 1, nheads or 1, seqlen, seqlen), bool, or floating-point with 0 where visible.

    Waits for the GPU: once for each of the last eight masks, each time for an inference tensor.
    """
    if mask.is_inference():  # has no version counter, so changes would not be noticed
        return _look(mask)
    known = _known.get(id(mask))
    if known is not None and known[0]() is mask and known[1] == mask._version:
        return known[2]
    window = _look(mask)
    while len(_known) >= _KEPT:
        del _known[next(iter(_known))]
    _known[id(mask)] = (weakref.ref(mask), mask._version, window)
    return window


def _look(mask: Tensor) -> int | None:
    rows, keys = mask.shape[-2:]
    if rows != keys:
        return None
    visible = mask if mask.dtype == torch.bool else mask == 0
    width = visible[..., -1, :].sum(-1).amax()
    distance = torch.arange(rows, device=mask.device)[:, None] - torch.arange(keys, device=mask.device)
    right = (visible == ((distance >= 0) & (distance < width))).all()
    if mask.dtype != torch.bool:
        right &= (visible | (mask < _HIDDEN)).all()
    is_window, seen = torch.stack((right.long(), width)).tolist()  # one wait for both
    if not is_window or not seen:  # a mask that hides every key is no window
        return None
    return -1 if seen == keys else seen - 1
