"""The states of cells, 64 queries by 64 keys: the unit from which both the forward lists and the transposed ones are made.

A row block of the operators' lists has two cells on top of each other: 128 queries by 64 keys, or transposed 128 keys by 64 queries.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

#: Queries and keys of a cell.
CELL = 64
#: States of a cell: no visible element; elements must be evaluated; all elements that exist are visible.
ABSENT, UNKNOWN, FULL = -1, 0, 1


def grid_shape(seqlen_q: int, seqlen_k: int) -> tuple[int, int]:
    """Returns the number of cells in each direction."""
    return -(-seqlen_q // CELL), -(-seqlen_k // CELL)


def states_of_blocks(blocks: Tensor, block_size: tuple[int, int], seqlen_q: int, seqlen_k: int) -> Tensor:
    """Returns the states of cells, int8 (batch, heads, rows, columns), from those of blocks of another size.

    Args:
        blocks: states of blocks, int8 (batch, heads, rows, columns). Blocks may reach past the end.
    """
    shape = grid_shape(seqlen_q, seqlen_k)
    if block_size[0] % CELL == 0 and block_size[1] % CELL == 0:
        rows, columns = (size // CELL for size in block_size)
        repeated = blocks[..., :, None, :, None].expand(*blocks.shape[:-1], rows, blocks.shape[-1], columns)
        return repeated.flatten(-2).flatten(-3, -2)[..., : shape[0], : shape[1]].contiguous()
    # a cell overlaps several blocks: it is full if all of them are, absent if none is there
    corners = []
    for count, size, limit, length in zip(shape, block_size, blocks.shape[-2:], (seqlen_q, seqlen_k)):
        first = torch.arange(count, device=blocks.device) * CELL
        last = (first + CELL - 1).clamp(max=length - 1)
        corners.append(((first // size).clamp(max=limit), (last // size + 1).clamp(max=limit)))
    (top, bottom), (left, right) = corners

    def overlapped(of: Tensor) -> Tensor:
        sums = F.pad(of.to(torch.int32).cumsum(-1).cumsum(-2), (1, 0, 1, 0))
        lower, upper = sums[..., bottom, :], sums[..., top, :]
        return (lower - upper)[..., right] - (lower - upper)[..., left]

    area = (bottom - top)[:, None] * (right - left)
    present, full = overlapped(blocks != ABSENT), overlapped(blocks == FULL)
    return (present > 0).to(torch.int8) + (full == area).to(torch.int8) + ABSENT
