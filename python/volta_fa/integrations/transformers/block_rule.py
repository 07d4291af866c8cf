"""Mask functions without a rule of their own, as block masks: image spans, chunks, documents with padding, prefixes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import masking_utils

from ...block_mask import BlockMask
from .mask_rule import MaskRule

#: Elements of a dense mask, 1 byte each, from which a block mask is cheaper. Making one takes about 100 launches, once a forward and kind
#: of layer; then each layer skips the blocks that are hidden.
MIN_ELEMENTS = 1 << 20
#: Queries from which blocks of 128 are used well.
MIN_QUERIES = 128


def block_rule(
    mask_function: Callable[..., Any],
    batch: int,
    kv_length: int,
    kv_offset: int,
    padding_mask: Tensor | None,
    device: torch.device | str,
    seqlen_q: int,
    q_offset: int,
) -> MaskRule | None:
    """Returns the rule of a mask function, or None where a dense mask is cheaper, or where the function cannot be vectorized."""
    if seqlen_q < MIN_QUERIES or batch * seqlen_q * kv_length < MIN_ELEMENTS:
        return None
    if padding_mask is not None:
        padding_mask = F.pad(padding_mask, (0, max(0, kv_offset + kv_length - padding_mask.shape[1]))).expand(batch, -1)
        mask_function = masking_utils.and_masks(mask_function, masking_utils.padding_mask_function(padding_mask))
    mask_function = masking_utils.add_offsets_to_mask_function(mask_function, q_offset, kv_offset)
    try:
        blocks = BlockMask.from_mask_mod(mask_function, batch, None, seqlen_q, kv_length, device)
    except (RuntimeError, TypeError):  # of torch.vmap: the function is for tensors of positions
        return None
    return MaskRule((batch, 1, seqlen_q, kv_length), device, blocks=blocks)
