"""Evaluates which elements of cells are visible: a mask function, the blocks that cells are cut from, and the lengths."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .cells import CELL, FULL, UNKNOWN

#: Of scalar tensors: batch entry, query head, query, key. Returns a scalar bool tensor, True where visible.
MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Elements:
    """A source of visible elements.

    Attributes:
        mask_mod: the mask function; None: every element.
        blocks: states of blocks, if a cell can overlap several: then an element is visible in full blocks, and in unknown ones
            where mask_mod says so.
    """

    mask_mod: MaskMod | None
    seqlen_q: int
    seqlen_k: int
    blocks: Tensor | None = None
    block_size: tuple[int, int] = (CELL, CELL)

    def visible(self, batch: Tensor, head: Tensor, row: Tensor, column: Tensor) -> Tensor:
        """Returns the visible elements of cells, (cells, 64, 64) bool. Elements past the end are not.

        Args:
            batch, head, row, column: int64 (cells).
        """
        place = torch.arange(CELL, device=row.device)
        query, key = row[:, None] * CELL + place, column[:, None] * CELL + place
        # mask functions read tensors at these positions
        inside_query, inside_key = query.clamp(max=self.seqlen_q - 1), key.clamp(max=self.seqlen_k - 1)
        if self.mask_mod is None:
            seen = torch.ones(len(row), CELL, CELL, dtype=torch.bool, device=row.device)
        else:
            with indexable_scalars():
                seen = _over_cells(self.mask_mod)(batch, head, inside_query, inside_key).bool()
        if self.blocks is not None:
            row_block, column_block = inside_query[:, :, None] // self.block_size[0], inside_key[:, None, :] // self.block_size[1]
            state = self.blocks[batch[:, None, None], head[:, None, None], row_block, column_block]
            seen = (seen & (state == UNKNOWN)) | (state == FULL)
        if self.seqlen_q % CELL or self.seqlen_k % CELL:
            seen = seen & (query < self.seqlen_q)[:, :, None] & (key < self.seqlen_k)[:, None, :]
        return seen


def _over_cells(function: MaskMod) -> Callable[..., Tensor]:
    over_keys = torch.vmap(function, in_dims=(None, None, None, 0))
    over_queries = torch.vmap(over_keys, in_dims=(None, None, 0, None))
    mapped: Callable[..., Tensor] = torch.vmap(over_queries, in_dims=(0, 0, 0, 0))
    return mapped


def indexable_scalars() -> contextlib.AbstractContextManager[Any]:
    """Returns the mode of torch in which mask functions may index a tensor with a scalar tensor."""
    from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex

    return TransformGetItemToIndex()
