"""Packs a mask into the operators' lists and bits.

`source` calls `pack` with the states of cells: FULL (1), ABSENT (-1), or UNKNOWN (0), evaluated here.

cell         64 queries by 64 keys
tile         two cells: 128 queries by 64 keys, and for the backward pass, transposed, 128 keys by 64 queries
list         of a row of tiles: a header of four numbers, the columns of its partial tiles, those of its full ones
header       partial tiles, full tiles, first tile of `Lists.bits` that the row uses, launch order (entry i: the row of thread block i)
bits         256 words of 32 bits for each partial tile
directions   the mask and its transpose

Launches of small kernels dominate the time of packing. So both directions of a square mask are in one tensor."""

from typing import NamedTuple

import torch
from torch import Tensor

from .cells import ABSENT, CELL, FULL, UNKNOWN
from .elements import Elements  # of given cells: visible() returns the visible elements, states() the states that their counts mean

#: Cells that are evaluated at a time, at most: 10 M elements, 84 MB for a step of a mask function that calculates them in int64.
CHUNK = 2560
#: With more UNKNOWN cells, the bits of those that turn out full or absent are dropped after each chunk. That costs a synchronization
#: a chunk and saves 1 KB a cell: 64 * 64 bits, in both directions.
COMPACT_ABOVE = 32768

#: First index, in dimension 1 of `_Cells.bits`, of evaluated cells. Index FULL has all bits, ABSENT (-1), the last, none; 0 is not used.
_FIRST_EVALUATED = FULL + 1
#: Bits 56, 49, ..., 7. A product with it moves the lowest bit of each of 8 bytes into the highest byte, byte i's to bit i.
_GATHER_BITS = 0x0102040810204080


class Lists(NamedTuple):
    """The mask in one direction: lists, int32 (batch, heads, tile rows, 4 + tile columns), and bits, int32 (tiles, 256). Bits are None if
    no tile can be partial. They have room for all tiles that could be partial before evaluation; lists do not refer to the last ones if
    evaluation finds fewer."""

    lists: Tensor
    bits: Tensor | None


class _Cells(NamedTuple):
    """All cells, evaluated."""

    states: Tensor  # int8 (batch, heads, rows, columns); UNKNOWN: visible in part
    source: Tensor  # int64, the same shape: where the cell's bits are in dimension 1 of `bits`
    bits: Tensor  # int32 (2, evaluated cells and constant rows, 64, 2): 64 keys of each query, then transposed, 64 queries of each key


def pack(states: Tensor, elements: Elements, evaluate_all: bool = False) -> tuple[Lists, Lists]:
    """Returns the lists and bits of tiles of 128 queries by 64 keys, and those of 128 keys by 64 queries.

    It waits for the device once, for the numbers of UNKNOWN cells and of partial tiles, which are sizes of tensors. With more than
    COMPACT_ABOVE UNKNOWN cells it also waits once a chunk.

    Args:
        states: of cells, int8 (batch, heads, rows, columns). The call overwrites them.
        elements: decides which elements of UNKNOWN cells are visible.
        evaluate_all: all cells are UNKNOWN.
    """
    counts = None  # per direction, the maximum number of partial tiles; None: counted after evaluation
    if evaluate_all:
        unknown = states.numel()
    elif elements.has_uniform_squares:
        (unknown,) = _partial_counts(states[None])
        # each aligned square of two by two cells has one state, so half as many tiles as cells may be partial, in either direction
        counts = [unknown // 2] * 2
    else:
        unknown, *counts = _partial_counts(states[None], *_tiles(states))
    cells = _evaluate(states, unknown, elements)
    tiles = _tiles(cells.states)
    # counts from before evaluation still suffice, because evaluation only lowers the numbers of partial tiles
    counts = _partial_counts(*tiles) if counts is None else counts
    # of each direction: states of tiles and their lists. `tiles` is one tensor of both directions, or one tensor for each
    directions = [(tile_states, lists) for grid in tiles for tile_states, lists in zip(grid, _lists(grid))]
    sources = (cells.source, cells.source.mT)
    found = []
    for (tile_states, lists), source, bits, count in zip(directions, sources, cells.bits, counts):
        found.append(Lists(lists, _tile_bits(tile_states, source, bits, count) if count else None))
    return found[0], found[1]


def _partial_counts(*states: Tensor) -> list[int]:
    """Returns the number of UNKNOWN states, which are 0, for each index of the tensors' first dimension. It waits for the device."""
    known = torch.cat([grid.flatten(1).count_nonzero(1) for grid in states]).tolist()
    sizes = (grid[0].numel() for grid in states for _ in grid)
    return [size - n for size, n in zip(sizes, known)]


def _evaluate(states: Tensor, count: int, elements: Elements) -> _Cells:
    """Evaluates the `count` cells that are UNKNOWN, and overwrites their states."""
    constant = torch.full((2, _FIRST_EVALUATED, CELL, 2), -1, dtype=torch.int32, device=states.device)
    bits = [constant]
    if count:
        # with the size given, this does not wait for the device
        places = torch.nonzero_static(states == UNKNOWN, size=count)
        compact, visible = count > COMPACT_ABOVE, []
        chunks = -(-count // CHUNK)
        for place in places.split(-(-count // chunks)):  # of equal size, but for the last
            seen = elements.visible(place)
            visible.append(seen.sum((1, 2)))
            if compact:
                seen = seen[elements.states(visible[-1], place) == UNKNOWN]
            bits.append(_packed(torch.stack((seen, seen.mT))))
        states[places.unbind(1)] = elements.states(torch.cat(visible), places)
        if compact:
            places = torch.nonzero_static(states == UNKNOWN, size=sum(chunk.shape[1] for chunk in bits[1:]))
    source = states.long()
    if count:
        source[places.unbind(1)] = torch.arange(_FIRST_EVALUATED, _FIRST_EVALUATED + len(places), device=states.device)
    bits.append(torch.zeros_like(constant[:, :1]))
    return _Cells(states, source, torch.cat(bits, 1))


def _packed(seen: Tensor) -> Tensor:
    """Packs (..., 64) bool, contiguous, into (..., 2) int32, the first element into bit 0."""
    eight = seen.view(torch.int64)  # bytes of 0 and 1
    packed = (eight * _GATHER_BITS).view(torch.uint8)[..., 7::8]
    # not contiguous(): a tensor without elements counts as such, and its offset of 7 bytes would stay
    return packed.clone(memory_format=torch.contiguous_format).view(torch.int32)


def _pairs(cells: Tensor) -> Tensor:
    """Returns the cells of each tile: (..., tile rows, 2, columns). An odd last row is repeated, so its state stays the tile's."""
    if cells.shape[-2] % 2:
        cells = torch.cat((cells, cells[..., -1:, :]), -2)
    return cells.unflatten(-2, (-1, 2))


def _tiles(cells: Tensor) -> list[Tensor]:
    """Returns the states of tiles, int8 (directions, batch, heads, rows, columns): one tensor of both directions if the mask is square,
    else one tensor for each."""
    transposed = cells.mT
    grids = [torch.stack((cells, transposed))] if cells.shape == transposed.shape else [cells[None], transposed[None]]
    # the sum of two states is 2 if both are FULL, -2 if both are ABSENT; half of it, truncated, is the tile's state
    return [_pairs(grid).sum(-2, dtype=torch.int8).div_(2, rounding_mode="trunc") for grid in grids]


def _lists(tiles: Tensor) -> Tensor:
    """Returns the lists of each direction: int32 (directions, batch, heads, rows, 4 + columns)."""
    kinds = torch.arange(ABSENT, FULL + 1, device=tiles.device)
    absent, partial, full = (tiles[..., None, :] == kinds[:, None]).sum(-1).unbind(-1)
    # as unsigned numbers the order is UNKNOWN 0, FULL 1, ABSENT 255: the lists end with absent columns, which the counts leave out
    columns = tiles.view(torch.uint8).sort(dim=-1, stable=True).indices
    first_tile = partial.flatten(1).cumsum(1).view_as(partial) - partial
    launch_order = absent.argsort(dim=-1, stable=True)  # rows with the most tiles first, so that they do not end last
    header = (number[..., None] for number in (partial, full, first_tile, launch_order))
    return torch.cat((*header, columns), -1).to(torch.int32)


def _tile_bits(tiles: Tensor, source: Tensor, bits: Tensor, count: int) -> Tensor:
    """Returns the bits of the partial tiles, int32 (count, 256), `count` being at least their number.
    `tiles`: states, int8 (batch, heads, rows, columns). `source`, `bits`: of cells, as in `_Cells`, in the direction of `tiles`."""
    # with fewer partial tiles, the last places are those of tile (0, 0, 0, 0): no list refers to them
    batch, head, row, column = torch.nonzero_static(tiles == UNKNOWN, size=count, fill_value=0).unbind(1)
    return bits[_pairs(source)[batch, head, row, :, column]].view(count, 4 * CELL)
