"""Reads torch's BlockMask: fields by name, because releases add some. Lists may be in any order, of any integer dtype, and undefined
behind their counts."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..errors import bad_argument
from .cells import ABSENT, CELL, FULL, UNKNOWN
from .mask import BlockMask
from .source import Source

#: The attribute of torch's object that keeps the packed mask.
_ATTRIBUTE = "_volta_fa_block_mask"
#: Block size from which torch means "one block for all", whatever its lengths.
NO_BLOCKS = 1 << 30


def packed(block_mask: Any, batch: int, heads: int, seq_lengths: tuple[int, int] | None = None) -> BlockMask:
    """Returns torch's mask in volta_fa's form. Keeps it on torch's object while the tensors it is made of do not change.

    Args:
        seq_lengths: those of the problem, for one block of all lengths; torch's object does not know them.
    """
    fields, mask_mod = _fields(block_mask), block_mask.mask_mod
    batch, heads = expanded(fields[0].shape, batch, heads, mask_mod)
    if seq_lengths is None or min(block_mask.BLOCK_SIZE) < NO_BLOCKS:
        seq_lengths = block_mask.seq_lengths
    source = Source.of(mask_mod, *fields, batch, heads, *seq_lengths)
    kept = getattr(block_mask, _ATTRIBUTE, None)
    if kept is not None and kept[0] == source:
        found: BlockMask = kept[1]
        return found
    mask = packed_fields(*fields, mask_mod, block_mask.BLOCK_SIZE, seq_lengths, batch, heads)
    setattr(block_mask, _ATTRIBUTE, (source, mask))
    return mask


def packed_fields(
    counts: Tensor,
    indices: Tensor,
    full_counts: Tensor | None,
    full_indices: Tensor | None,
    mask_mod: Callable[..., Tensor] | None,
    block_size: tuple[int, int],
    seq_lengths: tuple[int, int],
    batch: int,
    heads: int,
) -> BlockMask:
    """Returns the mask of these fields of torch's object, for a batch and a number of heads that its sizes divide."""
    seqlen_q, seqlen_k = map(int, seq_lengths)
    # one block for all lengths
    size = (min(int(block_size[0]), CELL * -(-seqlen_q // CELL)), min(int(block_size[1]), CELL * -(-seqlen_k // CELL)))
    rows, columns = -(-seqlen_q // size[0]), -(-seqlen_k // size[1])
    if indices.shape[-2] < rows:
        raise bad_argument("block_mask", f"{indices.shape[-2]} rows of blocks", f"at least {rows} for {seqlen_q} queries", op="BlockMask")
    blocks = torch.full((*indices.shape[:-1], columns + 2), ABSENT, dtype=torch.int8, device=indices.device)
    _mark(blocks, counts, indices, UNKNOWN)
    if full_counts is not None and full_indices is not None:
        _mark(blocks, full_counts, full_indices, FULL)
    blocks = blocks[..., 1:-1]
    blocks = blocks.view((1,) * (4 - blocks.dim()) + blocks.shape)[..., :rows, :]
    if blocks.shape[:2] != (batch, heads):
        entry, head = (torch.arange(n, device=blocks.device) % own for n, own in zip((batch, heads), blocks.shape))
        blocks = blocks[entry[:, None], head]
    mask_mod = None if is_trivial(mask_mod) else mask_mod
    with torch.no_grad():
        return BlockMask._from_states(blocks, size, mask_mod, seqlen_q, seqlen_k)


def is_empty(block_mask: Any) -> bool:
    """Returns whether torch's object stands for no mask, as torch itself makes it without one."""
    return bool(min(block_mask.BLOCK_SIZE) >= NO_BLOCKS and is_trivial(block_mask.mask_mod))


def _fields(block_mask: Any) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    return block_mask.kv_num_blocks, block_mask.kv_indices, block_mask.full_kv_num_blocks, block_mask.full_kv_indices


def _mark(blocks: Tensor, counts: Tensor, indices: Tensor, state: int) -> None:
    """Writes a state into the blocks that lists name: int8 (..., rows, 1 + columns + 1). The first and last take what names no block."""
    number = torch.arange(1, indices.shape[-1] + 1, device=indices.device)
    named = indices.clamp(-1, blocks.shape[-1] - 2).masked_fill_(number > counts[..., None], -1)
    blocks.scatter_(-1, named + number[:1], state)  # int64, as scatter_ requires


def is_trivial(mask_mod: Callable[..., Tensor] | None) -> bool:
    """Returns whether a mask function is torch's own that hides nothing."""
    from torch.nn.attention.flex_attention import noop_mask

    return mask_mod is None or mask_mod is noop_mask


def expanded(sizes: torch.Size, batch: int, heads: int, mask_mod: Callable[..., Tensor], captured: tuple[Any, ...] = ()) -> tuple[int, int]:
    """Returns the batch and heads to evaluate. mask_mod gets the problem's, although lists count modulo the mask's sizes."""
    own = (1,) * (3 - len(sizes)) + tuple(sizes)
    found = []
    for dimension, (mine, wanted) in enumerate(zip(own, (batch, heads))):
        grows = wanted > mine and not is_trivial(mask_mod) and _uses(mask_mod, dimension, captured)
        found.append(wanted if grows else mine)
    return found[0], found[1]


_used: weakref.WeakKeyDictionary[Callable[..., Any], tuple[bool, ...]] = weakref.WeakKeyDictionary()


def _uses(mask_mod: Callable[..., Tensor], argument: int, captured: tuple[Any, ...]) -> bool:
    """Returns whether a mask function may depend on one of its arguments."""
    try:
        known = _used.get(mask_mod)
    except TypeError:  # not hashable or without weak references
        known = None
    if known is None:
        from ..flex.tracing import trace

        graph = trace(mask_mod, 4, captured)
        known = (True,) * 4 if graph is None else tuple(len(p.users) > 0 for p in graph.arguments)
        with contextlib.suppress(TypeError):
            _used[mask_mod] = known
    return known[argument]
