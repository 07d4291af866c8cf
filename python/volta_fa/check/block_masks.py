"""Block masks of check and of the tests: random ones, packed into the ops' lists and bits and expanded again, as plainly as possible.

The tests import this file without the package, so it imports nothing but torch.
"""

from __future__ import annotations

import math
import random

import torch
from torch import Tensor

#: Sizes of a block mask's blocks, and of what comes before the blocks in a list.
BLOCK_ROWS, BLOCK_COLUMNS, LIST_HEADER = 128, 64, 4

#: Entries behind the counts of a list, and tiles that no list has: no kernel may read them as blocks or bits.
UNDEFINED = -123456789


def words_of(block: Tensor) -> Tensor:
    """(256) int32 of the bool scores of a block, which may reach less far than a whole one."""
    whole = torch.zeros(BLOCK_ROWS, BLOCK_COLUMNS, dtype=torch.int64)
    whole[: block.shape[0], : block.shape[1]] = block
    words = (whole.view(BLOCK_ROWS, 2, 32) << torch.arange(32)).sum(-1).flatten()
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def pack(mask: Tensor, seed: int = 0, spare: int = 2) -> tuple[Tensor, Tensor]:
    """Returns lists and bits of a bool mask (mask batch, mask heads, rows, columns). Lists have `spare` entries more than they need. Tiles
    of row blocks are in no order, and so is the launch."""
    numbers = random.Random(seed)
    batch, heads, rows, columns = mask.shape
    row_blocks, column_blocks = math.ceil(rows / BLOCK_ROWS), math.ceil(columns / BLOCK_COLUMNS)
    lists = torch.full((batch, heads, row_blocks, LIST_HEADER + column_blocks + spare), UNDEFINED, dtype=torch.int32)
    tiles = [torch.full((256,), UNDEFINED, dtype=torch.int32)]
    places = [(b, h, r) for b in range(batch) for h in range(heads) for r in range(row_blocks)]
    for b, h, r in numbers.sample(places, len(places)):
        partial, full, first = [], [], len(tiles)
        for c in range(column_blocks):
            block = mask[b, h, r * BLOCK_ROWS : (r + 1) * BLOCK_ROWS, c * BLOCK_COLUMNS : (c + 1) * BLOCK_COLUMNS]
            if block.all():
                full.append(c)
            elif block.any():
                partial.append(c)
                tiles.append(words_of(block))
        entries = [len(partial), len(full), first, 0, *partial, *full]
        lists[b, h, r, : len(entries)] = torch.tensor(entries, dtype=torch.int32)
    for b in range(batch):
        for h in range(heads):
            lists[b, h, :, 3] = torch.tensor(numbers.sample(range(row_blocks), row_blocks), dtype=torch.int32)
    return lists, torch.stack(tiles)


def options_of(mask: Tensor, device: str | torch.device = "cpu", seed: int = 0) -> dict[str, Tensor]:
    """Returns the ops' keyword arguments for a mask of single scores."""
    (lists, bits), (lists_t, bits_t) = pack(mask, seed), pack(mask.transpose(-1, -2), seed + 1)
    options = {"block_lists": lists, "block_bits": bits, "block_lists_t": lists_t, "block_bits_t": bits_t}
    return {name: t.to(device) for name, t in options.items()}


def random_mask(batch: int, heads: int, rows: int, columns: int, seed: int, density: float = 0.4) -> Tensor:
    """Returns a mask of blocks of several sizes: absent, full, of single scores, and of whole rows and columns; the first rows and the last
    columns of some heads see nothing."""
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
    """(batch, nheads, rows, columns) bool: the scores that lists and bits of a block mask leave. Rows are queries; of transposed
    lists, keys."""
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
