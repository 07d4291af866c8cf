"""Makes the operators' lists and bits from the states of cells of 64 queries by 64 keys. docs/reference/options.md describes the layout.

Launches cost more than the work of most of them, so both directions of a square mask share theirs.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .cells import ABSENT, CELL, FULL, UNKNOWN
from .elements import Elements

#: Cells that are evaluated at a time, at most: 10 M elements, 84 MB for a step of a mask function that calculates them in int64.
CHUNK = 2560
#: With more UNKNOWN cells, the bits of those that turn out full or absent are dropped after each chunk. That costs a synchronization
#: a chunk and saves 1 KB a cell.
COMPACT_ABOVE = 32768

#: First row of `_Cells.bits` for evaluated cells. Row FULL has all bits, row ABSENT, the last, none. Row 0, UNKNOWN, is not used.
_FIRST_EVALUATED = FULL + 1
#: Factor that moves the lowest bits of 8 bytes into the highest byte, the first byte's to bit 0.
_GATHER_BITS = 0x0102040810204080


class Lists(NamedTuple):
    """One direction: lists int32 (batch, heads, row blocks, 4 + column blocks), and bits int32 (tiles, 256), None if no tile may be
    partial. Where evaluation finds fewer partial tiles than were possible, the last tiles are not used."""

    lists: Tensor
    bits: Tensor | None


class _Cells(NamedTuple):
    """All cells, evaluated."""

    states: Tensor  # int8 (batch, heads, rows, columns); UNKNOWN: visible in part
    source: Tensor  # int64, the same shape: the cell's row of bits
    bits: Tensor  # int32 (2, evaluated cells and constant rows, 64, 2): of queries, then transposed, of keys


def pack(states: Tensor, elements: Elements, evaluate_all: bool = False) -> tuple[Lists, Lists]:
    """Returns the lists and bits of row blocks of 128 queries, and those of 128 keys.

    It waits for the device once, for the numbers that it does not know, and with more than COMPACT_ABOVE UNKNOWN cells once a chunk.

    Args:
        states: of cells, int8 (batch, heads, rows, columns). The call overwrites them.
        elements: what is visible in cells that are UNKNOWN.
        evaluate_all: all cells are UNKNOWN.
    """
    counts = None
    if evaluate_all:
        unknown = states.numel()
    elif elements.has_pairs:
        (unknown,) = _partial_counts(states[None])
        # the two cells of a tile have one state in either direction, so half as many tiles as cells may be partial
        counts = [unknown // 2] * 2
    else:
        unknown, *counts = _partial_counts(states[None], *_tiles(states))
    cells = _evaluate(states, unknown, elements)
    tiles = _tiles(cells.states)
    # evaluation may only lower the numbers of tiles
    counts = _partial_counts(*tiles) if counts is None else counts
    directions = ((tile, lists) for of in tiles for tile, lists in zip(of, _lists(of)))
    forward, transposed = (
        Lists(lists, _tile_bits(tile, source, bits, count) if count else None)
        for (tile, lists), source, bits, count in zip(directions, (cells.source, cells.source.mT), cells.bits, counts)
    )
    return forward, transposed


def _partial_counts(*states: Tensor) -> list[int]:
    """Returns the number of UNKNOWN states in each part of the first dimension of all tensors. It waits for the device."""
    known = torch.cat([of.flatten(1).count_nonzero(1) for of in states]).tolist()
    sizes = (of[0].numel() for of in states for _ in of)
    return [size - n for size, n in zip(sizes, known)]


def _evaluate(states: Tensor, count: int, elements: Elements) -> _Cells:
    """Evaluates the `count` cells that are UNKNOWN. Their states are overwritten."""
    constant = torch.full((2, _FIRST_EVALUATED, CELL, 2), -1, dtype=torch.int32, device=states.device)
    bits = [constant]
    if count:
        # with the size given, this does not wait for the device
        places = torch.nonzero_static(states == UNKNOWN, size=count)
        compact, visible = count > COMPACT_ABOVE, []
        for place in places.split(-(-count // -(-count // CHUNK))):  # of equal size, but for the last
            seen = elements.visible(place)
            visible.append(seen.sum((1, 2)))
            if compact:
                seen = seen[elements.states(visible[-1], place) == UNKNOWN]
            bits.append(_packed(torch.stack((seen, seen.mT))))
        states[places.unbind(1)] = elements.states(torch.cat(visible), places)
        if compact:
            places = torch.nonzero_static(states == UNKNOWN, size=sum(of.shape[1] for of in bits[1:]))
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
    """Returns the cells of each tile: (..., rows, 2, columns). An odd last row is repeated."""
    if cells.shape[-2] % 2:
        cells = torch.cat((cells, cells[..., -1:, :]), -2)
    return cells.unflatten(-2, (-1, 2))


def _tiles(cells: Tensor) -> list[Tensor]:
    """Returns the states of tiles, two cells on top of each other: int8 (directions, batch, heads, rows, columns). Both directions are
    in one tensor if the mask is square."""
    transposed = cells.mT
    grids = [torch.stack((cells, transposed))] if cells.shape == transposed.shape else [cells[None], transposed[None]]
    # two cells are FULL or ABSENT together, else UNKNOWN: half of -2 to 2
    return [_pairs(grid).sum(-2, dtype=torch.int8).div_(2, rounding_mode="trunc") for grid in grids]


def _lists(tiles: Tensor) -> Tensor:
    """Returns the lists of each direction: int32 (directions, batch, heads, rows, 4 + columns)."""
    kinds = torch.arange(ABSENT, FULL + 1, device=tiles.device)
    absent, partial, full = (tiles[..., None, :] == kinds[:, None]).sum(-1).unbind(-1)
    # as unsigned numbers: UNKNOWN, FULL, ABSENT
    columns = tiles.view(torch.uint8).sort(dim=-1, stable=True).indices
    first_tile = partial.flatten(1).cumsum(1).view_as(partial) - partial
    longest_first = absent.argsort(dim=-1, stable=True)
    header = (of[..., None] for of in (partial, full, first_tile, longest_first))
    return torch.cat((*header, columns), -1).to(torch.int32)


def _tile_bits(tiles: Tensor, source: Tensor, bits: Tensor, count: int) -> Tensor:
    """Returns the bits of at most `count` partial tiles, int32 (count, 256).

    Args:
        tiles: states, int8 (batch, heads, rows, columns).
        source, bits: of cells.
    """
    batch, head, row, column = torch.nonzero_static(tiles == UNKNOWN, size=count, fill_value=0).unbind(1)
    return bits[_pairs(source)[batch, head, row, :, column]].view(count, 4 * CELL)
