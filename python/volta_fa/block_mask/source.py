"""`Source`: what a block mask is made of."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..errors import bad_argument
from .cells import ABSENT, CELL, FULL, UNKNOWN, grid_shape, states_of_blocks
from .elements import Elements
from .packing import Lists, pack
from .recording import MaskMod, Recording


@dataclass(frozen=True)
class Source:
    """A mask function, and torch's lists of the blocks that exist.

    Attributes:
        mask_mod: the mask function, if possible a Recording; None: every element is visible.
        seq_lengths: numbers of queries and keys.
        batch, heads: sizes of the mask. With lists, those of the lists divide them.
        lists: counts and indices of blocks that exist in part, then counts and indices of full ones, or None twice. In any order,
            of any integer dtype, and undefined behind the counts. (): the mask function alone.
        block_size: queries and keys of a block of the lists.
    """

    mask_mod: MaskMod | None
    seq_lengths: tuple[int, int]
    batch: int
    heads: int
    device: torch.device
    lists: tuple[Tensor | None, ...] = ()
    block_size: tuple[int, int] = (CELL, CELL)

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
        """Returns the lists and bits of row blocks of 128 queries, and those of 128 keys."""
        if self.lists:
            return pack_blocks(self._blocks(), self._size(), self.mask_mod, self.seq_lengths)
        shape = (self.batch, self.heads, *grid_shape(*self.seq_lengths))
        states = torch.full(shape, UNKNOWN, dtype=torch.int8, device=self.device)
        return pack(states, Elements(self.mask_mod, *self.seq_lengths), evaluate_all=True)

    def _size(self) -> tuple[int, int]:
        """Returns the block size, cut where one block is for all lengths."""
        queries, keys = (min(size, CELL * -(-length // CELL)) for size, length in zip(self.block_size, self.seq_lengths))
        return queries, keys

    def _blocks(self) -> Tensor:
        """Returns the states of the blocks that lists name, int8 (batch, heads, rows, columns)."""
        counts, indices, full_counts, full_indices = self.lists
        assert counts is not None and indices is not None
        rows, columns = (-(-length // size) for length, size in zip(self.seq_lengths, self._size()))
        if indices.shape[-2] < rows:
            given, expected = f"{indices.shape[-2]} rows of blocks", f"at least {rows} for {self.seq_lengths[0]} queries"
            raise bad_argument("block_mask", given, expected, op="BlockMask")
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
    """Returns the lists and bits of row blocks of 128 queries, and those of 128 keys.

    Args:
        blocks: the states of `cells`, of blocks, int8 (batch, heads, rows, columns).
    """
    states = states_of_blocks(blocks, block_size, *seq_lengths)
    aligned = all(size % CELL == 0 for size in block_size)
    if mask_mod is None and aligned:
        states = torch.where(states == ABSENT, states, FULL)
    return pack(states, Elements(mask_mod, *seq_lengths, None if aligned else blocks, block_size))


def _mark(blocks: Tensor, counts: Tensor, indices: Tensor, state: int) -> None:
    """Writes a state into the blocks that lists name: int8 (..., rows, 1 + columns + 1). The first and last take what names no block."""
    number = torch.arange(1, indices.shape[-1] + 1, device=indices.device)
    named = indices.clamp(-1, blocks.shape[-1] - 2).masked_fill_(number > counts[..., None], -1)
    blocks.scatter_(-1, named + number[:1], state)  # int64, as scatter_ requires
