"""Block masks of `check` and of the tests: draws random masks, packs them into the operators' lists and bits, and expands these again.

It is a second, plain implementation of the layout, independent of `volta_fa.block_mask`. For each block of 128 queries a list has a
header of 4 numbers (partial blocks, full blocks, first tile of bits, launch order) and then the numbers of its blocks of 64 keys, partial
before full. A partial block has a tile: one bit for each of its scores, in 256 words. Transposed lists have 128 keys by 64 queries.

The tests import this file without the package, so it imports nothing but torch."""

from __future__ import annotations

import math
import random

import torch
from torch import Tensor

#: Rows and columns of a block, and the length of a list's header.
BLOCK_ROWS, BLOCK_COLUMNS, LIST_HEADER = 128, 64, 4

#: Value of entries after a list's counts, and of a tile that no list refers to. A kernel that reads them as blocks or bits goes wrong.
UNDEFINED = -123456789


def words_of(block: Tensor) -> Tensor:
    """Returns the tile, (256) int32, of a block's bool scores. Blocks at the ends of a mask may be smaller than 128 by 64."""
    whole = torch.zeros(BLOCK_ROWS, BLOCK_COLUMNS, dtype=torch.int64)
    whole[: block.shape[0], : block.shape[1]] = block
    words = (whole.view(BLOCK_ROWS, 2, 32) << torch.arange(32)).sum(-1).flatten()  # as unsigned numbers
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def pack(mask: Tensor, seed: int = 0, spare: int = 2) -> tuple[Tensor, Tensor]:
    """Returns lists and bits of a bool mask (mask batch, mask heads, rows, columns). Lists have `spare` entries more than they need. `seed`
    draws the order of the block rows' tiles, and their launch order."""
    numbers = random.Random(seed)
    batch, heads, rows, columns = mask.shape
    row_blocks, column_blocks = math.ceil(rows / BLOCK_ROWS), math.ceil(columns / BLOCK_COLUMNS)
    lists = torch.full((batch, heads, row_blocks, LIST_HEADER + column_blocks + spare), UNDEFINED, dtype=torch.int32)
    tiles = [torch.full((256,), UNDEFINED, dtype=torch.int32)]
    block_rows = [(b, h, r) for b in range(batch) for h in range(heads) for r in range(row_blocks)]
    for b, h, r in numbers.sample(block_rows, len(block_rows)):
        partial, full, first = [], [], len(tiles)
        for c in range(column_blocks):
            block = mask[b, h, r * BLOCK_ROWS : (r + 1) * BLOCK_ROWS, c * BLOCK_COLUMNS : (c + 1) * BLOCK_COLUMNS]
            if block.all():
                full.append(c)
            elif block.any():
                partial.append(c)
                tiles.append(words_of(block))
        entries = [len(partial), len(full), first, 0, *partial, *full]  # 0: launch order, drawn below
        lists[b, h, r, : len(entries)] = torch.tensor(entries, dtype=torch.int32)
    for b in range(batch):
        for h in range(heads):
            lists[b, h, :, 3] = torch.tensor(numbers.sample(range(row_blocks), row_blocks), dtype=torch.int32)
    return lists, torch.stack(tiles)


def options_of(mask: Tensor, device: str | torch.device = "cpu", seed: int = 0) -> dict[str, Tensor]:
    """Returns the operators' keyword arguments for a bool mask (mask batch, mask heads, queries, keys)."""
    (lists, bits), (lists_t, bits_t) = pack(mask, seed), pack(mask.transpose(-1, -2), seed + 1)
    options = {"block_lists": lists, "block_bits": bits, "block_lists_t": lists_t, "block_bits_t": bits_t}
    return {name: t.to(device) for name, t in options.items()}


def random_mask(batch: int, heads: int, rows: int, columns: int, seed: int, density: float = 0.4) -> Tensor:
    """Returns a bool mask (batch, heads, rows, columns). Each head is drawn in blocks of one size: a share of 1 - `density` absent, the
    others full, or with random scores, rows or columns. The first rows of half of the heads, and the last columns of half, are hidden."""
    numbers = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    mask = torch.zeros(batch, heads, rows, columns, dtype=torch.bool)
    for b in range(batch):
        for h in range(heads):
            of_head = mask[b, h]
            height, width = numbers.choice((32, 64, 128, 200)), numbers.choice((16, 64, 128))
            for i in range(0, rows, height):
                for j in range(0, columns, width):
                    block = of_head[i : i + height, j : j + width]
                    if numbers.random() >= density:
                        continue
                    kind = numbers.choice(("full", "full", "scores", "rows", "columns"))
                    sizes = {"scores": block.shape, "rows": (block.shape[0], 1), "columns": (1, block.shape[1])}.get(kind, (1, 1))
                    block |= True if kind == "full" else torch.rand(sizes, generator=generator) < 0.5
            if numbers.random() < 0.5:
                of_head[: min(numbers.choice((1, 130)), rows // 2)] = False
            if numbers.random() < 0.5:
                of_head[:, columns - min(numbers.choice((1, 70)), columns // 2) :] = False
    return mask


def expand(lists: Tensor, bits: Tensor | None, batch: int, nheads: int, rows: int, columns: int) -> Tensor:
    """Returns which scores lists and bits leave visible, bool (batch, nheads, rows, columns). Rows are queries, or keys of transposed
    lists."""
    seen = torch.zeros(batch, nheads, rows, columns, dtype=torch.bool)
    on_host, tiles = lists.tolist(), [] if bits is None else bits.tolist()
    for b in range(batch):
        for h in range(nheads):
            of_head = on_host[b % len(on_host)]
            for block, (partial, full, tile, _launch, *entries) in enumerate(of_head[h % len(of_head)]):
                place = seen[b, h, block * BLOCK_ROWS : (block + 1) * BLOCK_ROWS]
                for column in entries[partial : partial + full]:
                    place[:, column * BLOCK_COLUMNS : (column + 1) * BLOCK_COLUMNS] = True
                for i, column in enumerate(entries[:partial]):
                    words = torch.tensor(tiles[tile + i]).view(BLOCK_ROWS, 2, 1)
                    scores = (words >> torch.arange(32) & 1).bool().view(BLOCK_ROWS, BLOCK_COLUMNS)
                    part = place[:, column * BLOCK_COLUMNS : (column + 1) * BLOCK_COLUMNS]
                    part |= scores[: part.shape[0], : part.shape[1]]
    return seen.to(lists.device)
