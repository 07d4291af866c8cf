"""Reads torch's BlockMask: fields by name, because releases add some."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .recording import MaskMod, Recording, recorded
from .source import Source

#: Block size from which torch means "one block for all", whatever its lengths.
NO_BLOCKS = 1 << 30


def source_of(block_mask: Any, batch: int, heads: int, seq_lengths: tuple[int, int] | None = None) -> Source:
    """Returns what torch's mask is made of.

    Args:
        batch, heads: sizes of the problem.
        seq_lengths: those of the problem, for one block of all lengths; torch's object does not know them.
    """
    if seq_lengths is None or min(block_mask.BLOCK_SIZE) < NO_BLOCKS:
        seq_lengths = block_mask.seq_lengths
    counts, device = block_mask.kv_num_blocks, block_mask.kv_num_blocks.device
    lists = (counts, block_mask.kv_indices, block_mask.full_kv_num_blocks, block_mask.full_kv_indices)
    mask_mod = None if is_trivial(block_mask.mask_mod) else recorded(block_mask.mask_mod, device)
    batch, heads = expanded(counts.shape, batch, heads, (may_use(mask_mod, 0), may_use(mask_mod, 1)))
    return made_of(lists, mask_mod, block_mask.BLOCK_SIZE, seq_lengths, batch, heads)


def made_of(
    lists: tuple[Tensor | None, ...],
    mask_mod: MaskMod | None,
    block_size: tuple[int, int],
    seq_lengths: tuple[int, int],
    batch: int,
    heads: int,
) -> Source:
    """Returns the source of these fields of torch's object, whose numbers may be other integers than Python's."""
    assert lists[0] is not None
    queries, keys = map(int, seq_lengths)
    return Source(mask_mod, (queries, keys), batch, heads, lists[0].device, lists, (int(block_size[0]), int(block_size[1])))


def is_empty(block_mask: Any) -> bool:
    """Returns whether torch's object stands for no mask, as torch itself makes it without one."""
    return bool(min(block_mask.BLOCK_SIZE) >= NO_BLOCKS and is_trivial(block_mask.mask_mod))


def is_trivial(mask_mod: Callable[..., Tensor] | None) -> bool:
    """Returns whether a mask function is torch's own that hides nothing."""
    from torch.nn.attention.flex_attention import noop_mask

    return mask_mod is None or mask_mod is noop_mask


def may_use(mask_mod: MaskMod | None, argument: int) -> bool:
    """Returns whether a mask may depend on an argument of its function: 0 for the batch entry, 1 for the head."""
    return mask_mod.uses(argument) if isinstance(mask_mod, Recording) else mask_mod is not None


def expanded(sizes: torch.Size, batch: int, heads: int, uses: tuple[bool, bool]) -> tuple[int, int]:
    """Returns the batch and heads to evaluate. mask_mod gets the problem's, although lists count modulo the mask's sizes.

    Args:
        sizes: of the counts of torch's lists.
        uses: whether the mask function uses the batch entry, and the head.
    """
    own = ((1,) * (3 - len(sizes)) + tuple(sizes))[:2]
    entries, own_heads = (max(mine, wanted) if used else mine for mine, wanted, used in zip(own, (batch, heads), uses))
    return entries, own_heads
