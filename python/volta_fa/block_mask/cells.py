"""States of cells: squares of 64 queries by 64 keys, from which `packing` makes the operators' block lists. The operators need each mask
twice: in tiles of 128 queries by 64 keys, and transposed, of 128 keys by 64 queries, for gradients. A cell is half of a tile in either
direction. `source` calls `states_of_blocks`, which turns blocks of another size (such as torch's 128 by 128) into cells."""

import torch
import torch.nn.functional as F
from torch import Tensor

#: Queries and keys of a cell.
CELL = 64
#: States of a cell. ABSENT: no element is visible. FULL: all elements inside the lengths are. UNKNOWN: the mask function decides about each
#: element, and after its evaluation: some are visible, and some are not.
ABSENT, UNKNOWN, FULL = -1, 0, 1


def grid_shape(seqlen_q: int, seqlen_k: int) -> tuple[int, int]:
    """Returns the numbers of rows and of columns of cells that cover the lengths."""
    return -(-seqlen_q // CELL), -(-seqlen_k // CELL)


def states_of_blocks(blocks: Tensor, block_size: tuple[int, int], seqlen_q: int, seqlen_k: int) -> Tensor:
    """Returns the states of cells, int8 (batch, heads, rows, columns), from those of blocks of another size.

    Args:
        blocks: states of blocks, int8 (batch, heads, block rows, block columns). The last blocks may reach past the lengths.
        block_size: queries and keys of a block.
    """
    shape = grid_shape(seqlen_q, seqlen_k)
    if block_size[0] % CELL == 0 and block_size[1] % CELL == 0:
        rows, columns = (size // CELL for size in block_size)
        repeated = blocks[..., :, None, :, None].expand(*blocks.shape[:-1], rows, blocks.shape[-1], columns)
        return repeated.flatten(-2).flatten(-3, -2)[..., : shape[0], : shape[1]].contiguous()
    # A cell may overlap several blocks. It is full if all of them are, absent if all of them are, else unknown.
    corners = []  # for rows, then columns of cells: the first block that each overlaps, and the one after the last
    # count: cells; size: of a block, in queries or keys; limit: blocks
    for count, size, limit, length in zip(shape, block_size, blocks.shape[-2:], (seqlen_q, seqlen_k)):
        first = torch.arange(count, device=blocks.device) * CELL
        last = (first + CELL - 1).clamp(max=length - 1)
        corners.append(((first // size).clamp(max=limit), (last // size + 1).clamp(max=limit)))
    (top, bottom), (left, right) = corners

    def overlapped(is_counted: Tensor) -> Tensor:
        """Returns the number of True blocks among those that each cell overlaps, by sums over all blocks above and to the left."""
        sums = F.pad(is_counted.to(torch.int32).cumsum(-1).cumsum(-2), (1, 0, 1, 0))
        lower, upper = sums[..., bottom, :], sums[..., top, :]
        return (lower - upper)[..., right] - (lower - upper)[..., left]

    area = (bottom - top)[:, None] * (right - left)
    present, full = overlapped(blocks != ABSENT), overlapped(blocks == FULL)
    # -1 (ABSENT), + 1 if a block is present, + 1 more if all are full
    return (present > 0).to(torch.int8) + (full == area).to(torch.int8) + ABSENT
