"""`Source`: the mask function and lists of blocks that a `BlockMask` is packed from, and the steps from them to `packing.pack`. `source_of`
reads torch's `torch.nn.attention.flex_attention.BlockMask`; `kept` compares Sources with those of cached masks. Cells are squares of 64
queries by 64 keys."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..errors import bad_argument
from .cells import ABSENT, CELL, FULL, UNKNOWN, grid_shape, states_of_blocks  # states_of_blocks: of cells, from blocks of any size
from .elements import Elements  # decides which elements of UNKNOWN cells are visible
from .packing import Lists, pack  # Lists: the lists and bits of a mask or of its transpose; pack makes both
from .recording import MaskMod, Recording, recorded


@dataclass(frozen=True)
class Source:
    """A mask function, and torch's lists of the blocks that exist."""

    #: the mask function; None: every element is visible. A Recording if possible: the list of torch operations that the function applies,
    #: with the tensors that it reads
    mask_mod: MaskMod | None
    seq_lengths: tuple[int, int]  # numbers of queries and keys
    #: sizes of the mask. The lists may have fewer, which then repeat: entry b has the lists of b modulo their number.
    batch: int
    heads: int
    device: torch.device
    #: kv_num_blocks, kv_indices, full_kv_num_blocks and full_kv_indices of torch's BlockMask; the last two may be None. Indices are in any
    #: order, of any integer dtype, and undefined after the count. (): the mask function alone decides.
    lists: tuple[Tensor | None, ...] = ()
    block_size: tuple[int, int] = (CELL, CELL)  # queries and keys of a block of the lists

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors whose values decide about the mask."""
        read = self.mask_mod.tensors if isinstance(self.mask_mod, Recording) else ()
        return (*(t for t in self.lists if t is not None), *read)

    def with_tensors(self, tensors: tuple[Tensor, ...]) -> Source:
        """Returns the source with other tensors in place of `tensors`."""
        rest = iter(tensors)
        lists = tuple(None if t is None else next(rest) for t in self.lists)
        read = replace(self.mask_mod, tensors=tuple(rest)) if isinstance(self.mask_mod, Recording) else self.mask_mod
        return replace(self, lists=lists, mask_mod=read)

    def packed(self) -> tuple[Lists, Lists]:
        """Returns the lists and bits of tiles of 128 queries by 64 keys, and those of 128 keys by 64 queries, for gradients."""
        if self.lists:
            return pack_blocks(self._blocks(), self._size(), self.mask_mod, self.seq_lengths)
        shape = (self.batch, self.heads, *grid_shape(*self.seq_lengths))
        states = torch.full(shape, UNKNOWN, dtype=torch.int8, device=self.device)
        return pack(states, Elements(self.mask_mod, *self.seq_lengths), evaluate_all=True)

    def _size(self) -> tuple[int, int]:
        """Returns the block size, at most the lengths rounded up to cells: torch's "no blocks" is one block of size 2^30."""
        queries, keys = (min(size, CELL * -(-length // CELL)) for size, length in zip(self.block_size, self.seq_lengths))
        return queries, keys

    def _blocks(self) -> Tensor:
        """Returns the states of all blocks by the lists, int8 (batch, heads, rows, columns): UNKNOWN, FULL, or ABSENT if not listed."""
        counts, indices, full_counts, full_indices = self.lists
        assert counts is not None and indices is not None
        rows, columns = (-(-length // size) for length, size in zip(self.seq_lengths, self._size()))
        if indices.shape[-2] < rows:
            given, expected = f"{indices.shape[-2]} rows of blocks", f"at least {rows} for {self.seq_lengths[0]} queries"
            raise bad_argument("block_mask", given, expected, op="BlockMask")
        # `_mark` needs a column more on either side
        blocks = torch.full((*indices.shape[:-1], columns + 2), ABSENT, dtype=torch.int8, device=indices.device)
        _mark(blocks, counts, indices, UNKNOWN)
        if full_counts is not None and full_indices is not None:
            _mark(blocks, full_counts, full_indices, FULL)
        blocks = blocks[..., 1:-1]
        blocks = blocks.view((1,) * (4 - blocks.dim()) + blocks.shape)[..., :rows, :]
        if blocks.shape[:2] != (self.batch, self.heads):
            entry, head = (torch.arange(n, device=blocks.device) % own for n, own in zip((self.batch, self.heads), blocks.shape))
            blocks = blocks[entry[:, None], head]
        return blocks


def pack_blocks(blocks: Tensor, block_size: tuple[int, int], mask_mod: MaskMod | None, seq_lengths: tuple[int, int]) -> tuple[Lists, Lists]:
    """Returns what `Source.packed` does, for blocks with known states.

    Args:
        blocks: ABSENT, UNKNOWN or FULL for each block, int8 (batch, heads, rows, columns).
        block_size: queries and keys of a block.
        mask_mod: decides about the elements of UNKNOWN blocks; None: all are visible.
        seq_lengths: numbers of queries and keys; the last blocks may reach past them.
    """
    states = states_of_blocks(blocks, block_size, *seq_lengths)  # of cells
    aligned = all(size % CELL == 0 for size in block_size)
    if mask_mod is None and aligned:
        states = torch.where(states == ABSENT, states, FULL)
    # Elements reads blocks only if a cell can overlap several of them
    return pack(states, Elements(mask_mod, *seq_lengths, None if aligned else blocks, block_size))


def _mark(blocks: Tensor, counts: Tensor, indices: Tensor, state: int) -> None:
    """Writes `state` into the listed blocks, int8 (..., rows, 1 + columns + 1). The first and last column take indices outside the mask,
    and those after the count. `counts`: (..., rows) length of each row's list; `indices`: (..., rows, entries) its columns."""
    number = torch.arange(1, indices.shape[-1] + 1, device=indices.device)  # of each index in its list, from 1 on; int64
    named = indices.clamp(-1, blocks.shape[-1] - 2).masked_fill_(number > counts[..., None], -1)
    blocks.scatter_(-1, named + number[:1], state)  # plus 1 for the first column; the sum is int64, as scatter_ requires


# ---- torch's BlockMask. Fields are read by name, because torch's releases add some ----

#: Block size from which torch means "one block for all lengths": its mask without blocks has size 2^30.
NO_BLOCKS = 1 << 30


def source_of(block_mask: Any, batch: int, heads: int, seq_lengths: tuple[int, int] | None = None) -> Source:
    """Returns the Source of torch's BlockMask.

    Args:
        batch, heads: sizes of the problem.
        seq_lengths: the problem's numbers of queries and keys. Used if torch's mask has one block for all lengths, and so no lengths.
    """
    if seq_lengths is None or min(block_mask.BLOCK_SIZE) < NO_BLOCKS:
        seq_lengths = block_mask.seq_lengths
    counts, device = block_mask.kv_num_blocks, block_mask.kv_num_blocks.device
    lists = (counts, block_mask.kv_indices, block_mask.full_kv_num_blocks, block_mask.full_kv_indices)
    mask_mod = None if is_trivial(block_mask.mask_mod) else recorded(block_mask.mask_mod, device)
    # whether the mask may depend on the batch entry, and on the head
    uses = (mask_mod.uses(0), mask_mod.uses(1)) if isinstance(mask_mod, Recording) else (mask_mod is not None, mask_mod is not None)
    batch, heads = expanded(counts.shape, batch, heads, uses)
    # sizes may be of other integer types than Python's int
    (queries, keys), (rows, columns) = map(int, seq_lengths), map(int, block_mask.BLOCK_SIZE)
    return Source(mask_mod, (queries, keys), batch, heads, device, lists, (rows, columns))


def is_empty(block_mask: Any) -> bool:
    """Returns whether torch's BlockMask hides nothing: torch makes such a mask for calls without one."""
    return bool(min(block_mask.BLOCK_SIZE) >= NO_BLOCKS and is_trivial(block_mask.mask_mod))


def is_trivial(mask_mod: Callable[..., Tensor] | None) -> bool:
    """Returns whether a mask function is absent or torch's `noop_mask`, which hides nothing."""
    from torch.nn.attention.flex_attention import noop_mask

    return mask_mod is None or mask_mod is noop_mask


def expanded(sizes: torch.Size, batch: int, heads: int, uses: tuple[bool, bool]) -> tuple[int, int]:
    """Returns the batch and heads of a Source. They are those of torch's lists, which repeat for larger problems. A mask function gets the
    problem's batch entry and head, so if it uses one, the mask needs as many as the problem has.

    Args:
        sizes: shape of the counts of torch's lists, which ends in (batch, heads, rows).
        batch, heads: sizes of the problem.
        uses: whether the mask function uses the batch entry, and the head.
    """
    own = ((1,) * (3 - len(sizes)) + tuple(sizes))[:2]
    entries, own_heads = (max(mine, wanted) if used else mine for mine, wanted, used in zip(own, (batch, heads), uses))
    return entries, own_heads
