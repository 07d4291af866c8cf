"""Evaluates which elements of cells (64 queries by 64 keys) are visible. `packing` calls it for the cells whose state is UNKNOWN. An
element is visible if its query and key lie inside the lengths, and its block is FULL, or is UNKNOWN and the mask function says so.
Blocks are those of the user's list, of any size. Without one, and where each cell lies in one block, that of an UNKNOWN cell is UNKNOWN."""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..errors import bad_argument
from .cells import CELL, FULL, UNKNOWN
from .recording import MaskMod, Recording  # a mask function; one as a list of torch operations


@dataclass(frozen=True)
class Elements:
    """What decides which elements are visible."""

    mask_mod: MaskMod | None  # the mask function; None: true everywhere
    seqlen_q: int
    seqlen_k: int
    #: states of blocks, int8 (batch, heads, block rows, block columns), only if a cell can overlap several blocks. All elements of a FULL
    #: block are visible, those of an UNKNOWN one where mask_mod says so, and none of an ABSENT one.
    blocks: Tensor | None = None
    block_size: tuple[int, int] = (CELL, CELL)  # queries and keys of a block

    @property
    def has_uniform_squares(self) -> bool:
        """Whether cells are in squares of two by two that each lie in one block. A square's cells then have one state before evaluation. A
        tile is two cells whose bits are stored together: one above the other, for the backward pass side by side. So n UNKNOWN cells lie
        in n / 2 tiles, and `packing` allocates bits of that many without counting them on the device."""
        return all(size % (2 * CELL) == 0 and -(-n // CELL) % 2 == 0 for size, n in zip(self.block_size, (self.seqlen_q, self.seqlen_k)))

    def states(self, visible: Tensor, places: Tensor) -> Tensor:
        """Returns the states of evaluated cells, int8 (cells): ABSENT, FULL, or UNKNOWN for partly visible ones.

        Args:
            visible: the number of visible elements of each cell, int64 (cells).
            places: batch entry, head, row and column of each cell, int64 (cells, 4).
        """
        # (2 * visible - existing) / existing is -1 (ABSENT) without visible elements, 1 (FULL) if all existing ones are visible, and
        # otherwise truncated to 0 (UNKNOWN). Integer arithmetic does not depend on torch's default dtype.
        existing = self._existing(places)
        return (2 * visible - existing).div_(existing, rounding_mode="trunc").to(torch.int8)

    def _existing(self, places: Tensor) -> Tensor | int:
        """Returns the number of elements inside the lengths: int64 (cells), or one number if it is the same in all cells."""
        if self.seqlen_q % CELL == 0 and self.seqlen_k % CELL == 0:
            return CELL * CELL
        return (self.seqlen_q - places[:, 2] * CELL).clamp(max=CELL) * (self.seqlen_k - places[:, 3] * CELL).clamp(max=CELL)

    def visible(self, places: Tensor) -> Tensor:
        """Returns the elements of cells, bool (cells, 64 queries, 64 keys): True where visible. Elements past the lengths are not.
        `places`: batch entry, head, row and column of each cell, int64 (cells, 4)."""
        batch, head = places[:, 0], places[:, 1]
        query, key = torch.add(torch.arange(CELL, device=places.device), places[:, 2:, None], alpha=CELL).unbind(1)
        # mask functions index tensors with positions, so these must lie inside the lengths
        inside_query = query.clamp(max=self.seqlen_q - 1) if self.seqlen_q % CELL else query
        inside_key = key.clamp(max=self.seqlen_k - 1) if self.seqlen_k % CELL else key
        if self.mask_mod is None:
            seen = torch.ones(len(places), CELL, CELL, dtype=torch.bool, device=places.device)
        else:
            seen = _over_cells(self.mask_mod, batch, head, inside_query, inside_key)
        if self.blocks is not None:
            row_block, column_block = inside_query[:, :, None] // self.block_size[0], inside_key[:, None, :] // self.block_size[1]
            state = self.blocks[batch[:, None, None], head[:, None, None], row_block, column_block]
            seen = (seen & (state == UNKNOWN)) | (state == FULL)
        if self.seqlen_q % CELL or self.seqlen_k % CELL:
            seen = seen & (query < self.seqlen_q)[:, :, None] & (key < self.seqlen_k)[:, None, :]
        return seen


# ---- mask functions take scalar tensors; here they are evaluated for all elements of many cells at once ----
#
# `torch.vmap` works with any function, but takes milliseconds for one that indexes a tensor. Most functions only compare, combine and
# index. Such a function has a `Recording`, which repeats its operations on tensors that broadcast.


def _over_cells(mask_mod: MaskMod, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """Returns the values of a mask function for all elements of cells, bool (cells, queries, keys).
    `batch`, `head`: int64 (cells). `query`, `key`: int64 (cells, n)."""
    shape = (*query.shape, key.shape[1])
    if isinstance(mask_mod, Recording):
        seen = mask_mod(batch[:, None, None], head[:, None, None], query[:, :, None], key[:, None, :])
    else:
        with indexable_scalars():
            seen = _mapped(mask_mod)(batch, head, query, key)
        if not isinstance(seen, Tensor) or seen.shape != shape:
            got = f"a result of shape {tuple(seen.shape[3:])}" if isinstance(seen, Tensor) else f"a {type(seen).__name__}"
            raise bad_argument("mask_mod", got, "one scalar tensor for scalar tensors", op="BlockMask")
    return seen.bool().expand(shape)


def _mapped(function: MaskMod) -> Callable[..., Tensor]:
    """Returns the function over (cells), (cells), (cells, queries) and (cells, keys), with results (cells, queries, keys)."""
    over_keys = torch.vmap(function, in_dims=(None, None, None, 0))
    over_queries = torch.vmap(over_keys, in_dims=(None, None, 0, None))
    return torch.vmap(over_queries, in_dims=(0, 0, 0, 0))


def indexable_scalars() -> contextlib.AbstractContextManager[Any]:
    """Returns the mode of torch in which mask functions may index a tensor with a scalar tensor."""
    from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex

    return TransformGetItemToIndex()
