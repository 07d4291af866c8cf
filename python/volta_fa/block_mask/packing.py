"""Makes the operators' lists and bits from the states of cells. docs/reference/options.md describes the layout."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .cells import ABSENT, CELL, FULL, UNKNOWN, outside
from .elements import Elements

#: Cells that are evaluated at a time: 4 M elements, 32 MB for each step of a mask function that calculates in int64.
CHUNK = 1024
#: With more cells, those that turn out full or absent are dropped after each chunk, which costs a synchronization a chunk.
COMPACT_ABOVE = 32768

_ABSENT_BITS, _FULL_BITS = 0, 1  # rows of `Cells.bits` before those of evaluated cells
#: Factor that moves the lowest bits of 8 bytes into the highest byte, the first byte's to bit 0.
_GATHER_BITS = 0x0102040810204080


class Lists(NamedTuple):
    """One direction: lists int32 (batch, heads, row blocks, 4 + max), and bits int32 (tiles, 256), or None without tiles."""

    lists: Tensor
    bits: Tensor | None


class _Cells(NamedTuple):
    """Evaluated cells."""

    states: Tensor  # int8 (batch, heads, rows, columns); UNKNOWN: visible in part
    source: Tensor  # int64, the same shape: the cell's row of bits
    bits: Tensor  # int32 (2 + cells, 64 queries, 2)
    bits_t: Tensor  # int32 (2 + cells, 64 keys, 2)


def pack(states: Tensor, elements: Elements, evaluate_all: bool = False) -> tuple[Lists, Lists]:
    """Returns the lists of row blocks of 128 queries and those of 128 keys.

    It waits for the device once, for the number of cells and tiles.

    Args:
        states: of cells, int8 (batch, heads, rows, columns).
        elements: what is visible in cells that are UNKNOWN.
        evaluate_all: all cells inside the lengths are UNKNOWN.
    """
    past_end = outside(elements.seqlen_q, elements.seqlen_k, states.device)
    if evaluate_all:
        unknown = (~past_end).expand_as(states).flatten()
        inside = -(-elements.seqlen_q // CELL) * -(-elements.seqlen_k // CELL)
        cells = _evaluate(states, _positions(unknown, states.shape[0] * states.shape[1] * inside), elements)
        tiles = _partial_tiles(cells.states, past_end).tolist()
    else:
        unknown = (states == UNKNOWN).flatten()
        # evaluation may only lower the numbers of tiles
        count, *tiles = torch.cat((unknown.sum().view(1), _partial_tiles(states, past_end))).tolist()
        cells = _evaluate(states, _positions(unknown, count), elements)
    forward = _lists(cells.states, cells.source, cells.bits, past_end, tiles[0])
    transposed = _lists(cells.states.mT, cells.source.mT, cells.bits_t, past_end.mT, tiles[1])
    return forward, transposed


def _positions(chosen: Tensor, count: int) -> Tensor:
    """Returns the places of True in a flat tensor, at most `count`, without waiting for the device."""
    place = torch.where(chosen, chosen.cumsum(0) - 1, count)
    positions = torch.zeros(count + 1, dtype=torch.int64, device=chosen.device)
    return positions.scatter_(0, place, torch.arange(len(chosen), device=chosen.device))[:count]


def _evaluate(states: Tensor, places: Tensor, elements: Elements) -> _Cells:
    """Evaluates the cells at these places of the flat grid."""
    heads, rows, columns = states.shape[1:]
    batch, head = places // (heads * rows * columns), places // (rows * columns) % heads
    row, column = places // columns % rows, places % columns
    expected = (elements.seqlen_q - row * CELL).clamp(max=CELL) * (elements.seqlen_k - column * CELL).clamp(max=CELL)
    constant = torch.zeros(2, CELL, 2, dtype=torch.int32, device=states.device)
    constant[_FULL_BITS] = -1
    bits, bits_t, found, kept = [constant], [constant], [], []
    for begin in range(0, len(places), CHUNK):
        chunk = slice(begin, begin + CHUNK)
        seen = elements.visible(batch[chunk], head[chunk], row[chunk], column[chunk])
        count = seen.sum((1, 2))
        state = (count > 0).to(torch.int8) + (count == expected[chunk]).to(torch.int8)
        where = places[chunk]
        found.append(state)
        if len(places) > COMPACT_ABOVE:
            partial = state == UNKNOWN
            seen, where = seen[partial], where[partial]
        kept.append(where)
        bits.append(_bits(seen))
        bits_t.append(_bits(seen.mT))
    new_states, source = states.flatten(), (states == FULL).flatten().long()
    if found:
        new_states = new_states.scatter(0, places, torch.cat(found))
        source = (new_states == FULL).long()  # _ABSENT_BITS, _FULL_BITS
        kept_places = torch.cat(kept)
        source = source.scatter_(0, kept_places, torch.arange(2, 2 + len(kept_places), device=states.device))
    return _Cells(new_states.view_as(states), source.view_as(states), torch.cat(bits), torch.cat(bits_t))


def _bits(seen: Tensor) -> Tensor:
    """Packs (..., 64) bool into (..., 2) int32, the first element into bit 0."""
    eight = seen.contiguous().view(torch.int64)  # bytes of 0 and 1
    return ((eight * _GATHER_BITS) >> 56).to(torch.uint8).view(torch.int32)


def _tiles(states: Tensor, past_end: Tensor) -> tuple[Tensor, Tensor]:
    """Returns which tiles, two cells on top of each other, have a visible element and which are full: bool."""
    pairs = states.unflatten(-2, (-1, 2))
    ends = past_end.unflatten(-2, (-1, 2))
    return (pairs != ABSENT).any(-2), ((pairs == FULL) | ends).all(-2)


def _partial_tiles(states: Tensor, past_end: Tensor) -> Tensor:
    """Returns the number of partial tiles of both directions, int64 (2)."""
    counts = []
    for grid, ends in ((states, past_end), (states.mT, past_end.mT)):
        some, full = _tiles(grid, ends)
        counts.append((some & ~full).sum())
    return torch.stack(counts)


def _lists(states: Tensor, source: Tensor, cell_bits: Tensor, past_end: Tensor, max_tiles: int) -> Lists:
    some, full = _tiles(states, past_end)
    partial = some & ~full
    full = some & full
    # sorts columns: partial, full, absent
    kind = 2 - 2 * partial.to(torch.uint8) - full.to(torch.uint8)
    columns = kind.sort(dim=-1, stable=True).indices
    partial_count, full_count = partial.sum(-1), full.sum(-1)
    first_tile = partial_count.flatten().cumsum(0).view_as(partial_count) - partial_count
    longest_first = (partial_count + full_count).argsort(dim=-1, descending=True, stable=True)
    head = torch.stack((partial_count, full_count, first_tile, longest_first), -1)
    lists = torch.cat((head, columns), -1).to(torch.int32)
    if max_tiles == 0:
        return Lists(lists, None)
    tiles = _positions(partial.flatten(), max_tiles)
    halves = source.unflatten(-2, (-1, 2)).transpose(-1, -2).reshape(-1, 2)[tiles]
    return Lists(lists, cell_bits[halves].view(max_tiles, 4 * CELL))
