"""Block masks on a simulated V100, T4 or RTX 2080 Ti: time against density.

Each case calls torch.ops.volta_fa.fwd, or with --backward .bwd, on fp16 CPU tensors with VOLTA_FA_SIMULATE=timing, as benchmarks.volta
does. Nothing here is measured. A mask has random blocks of 128 queries by 128 keys, the same number for each block of queries. TFLOP/s
count 4*D (backward 10*D) operations for each pair in a present block. "Of plain" is the ratio to the same shape without lists.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from .measure import aligned, simulated

BLOCK, KEYS, HEADER, TILE_WORDS = 128, 64, 4, 256
#: Share of present blocks, whether they are partial, sequence length.
CASES = [(1.0, False, 4096), (1.0, True, 4096), (0.1, False, 8192), (0.3, False, 8192), (0.1, False, 16384)]


@dataclass(frozen=True)
class Row:
    gpu: str
    direction: str
    headdim: int
    seqlen: int
    density: float
    partial: bool
    settings: str
    kernel: str
    microseconds: float
    tflops: float
    plain_tflops: float

    @property
    def of_plain(self) -> float:
        return self.tflops / self.plain_tflops

    def __str__(self) -> str:
        kind = "partial" if self.partial else "full"
        case = f"{self.gpu} {self.direction} D={self.headdim} N={self.seqlen} {self.density:.0%} {kind} {self.settings or 'default'}"
        return f"{case}: {self.tflops:.1f} TFLOP/s, plain {self.plain_tflops:.1f}, of plain {self.of_plain:.2f} ({self.kernel})"


def lists_of(seqlen: int, density: float, partial: bool, generator: torch.Generator) -> tuple[dict[str, Tensor], float]:
    """Returns the options of a mask of random blocks, one for all heads, and its number of pairs. Bits are all ones."""
    blocks = seqlen // BLOCK
    count = max(1, round(density * blocks))
    order = torch.rand(blocks, blocks, generator=generator).argsort(-1)
    present = torch.zeros(blocks, blocks, dtype=torch.bool).scatter_(1, order[:, :count], True)
    options = {}
    for suffix, of in (("", present), ("_t", present.T)):
        entries = [torch.stack([2 * c, 2 * c + 1], -1).flatten() for c in (row.nonzero()[:, 0] for row in of)]
        longest = sorted(range(blocks), key=lambda r: -len(entries[r]))
        lists = torch.zeros(1, 1, blocks, HEADER + 2 * blocks, dtype=torch.int32)
        tiles = 0
        for r, row in enumerate(entries):
            n = len(row)
            lists[0, 0, r, :HEADER] = torch.tensor([n * partial, n * (not partial), tiles, longest[r]])
            lists[0, 0, r, HEADER : HEADER + n] = row
            tiles += n * partial
        options["block_lists" + suffix] = lists
        if partial:
            options["block_bits" + suffix] = torch.full((tiles, TILE_WORDS), -1, dtype=torch.int32)
    return options, float(blocks * count * BLOCK * BLOCK)


def run(gpu: str, headdim: int, nheads: int, seqlen: int, backward: bool, settings: str, options: dict[str, Tensor]) -> list[dict]:
    """Returns the simulator's reports of one call."""
    generator = torch.Generator().manual_seed(1)
    shape = (1, seqlen, nheads, headdim)
    q, k, v, dout = (aligned(shape, torch.float16).normal_(generator=generator) for _ in range(4))
    if not backward:
        return simulated(lambda: torch.ops.volta_fa.fwd(q, k, v, **options), settings, gpu)
    out = aligned(shape, torch.float16).zero_()
    lse = aligned((1, nheads, seqlen), torch.float32).fill_(10.0)
    return simulated(lambda: torch.ops.volta_fa.bwd(dout, q, k, v, out, lse, **options), settings, gpu)


def rows(gpu: str, headdim: int, nheads: int, backward: bool, settings: str, cases: Sequence[tuple[float, bool, int]]) -> list[Row]:
    found, plain = [], {}
    per_pair = (10 if backward else 4) * headdim * nheads
    for density, partial, seqlen in cases:
        options, pairs = lists_of(seqlen, density, partial, torch.Generator().manual_seed(0))

        def timed(given: dict[str, Tensor], pairs: float, seqlen: int = seqlen) -> tuple[float, float, str]:
            reports = run(gpu, headdim, nheads, seqlen, backward, settings, given)
            microseconds = sum(r["timing"]["kernel_us"] for r in reports)
            longest = max(reports, key=lambda r: r["timing"]["kernel_us"])
            return microseconds, per_pair * pairs / microseconds / 1e6, longest["kernel"]

        if seqlen not in plain:
            plain[seqlen] = timed({}, float(seqlen**2))[1]
        microseconds, tflops, kernel = timed(options, pairs)
        direction = "backward" if backward else "forward"
        found.append(Row(gpu, direction, headdim, seqlen, density, partial, settings, kernel, microseconds, tflops, plain[seqlen]))
        print(found[-1], flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpu", default="v100")
    parser.add_argument("--headdim", type=int, nargs="+", default=[64, 128])
    parser.add_argument("--nheads", type=int, default=10)
    parser.add_argument("--backward", action="store_true")
    parser.add_argument("--settings", default="", help="machine constants, as VOLTA_FA_SIM_SET")
    parser.add_argument("--case", type=int, nargs="*", default=range(len(CASES)), help="numbers of the cases")
    parser.add_argument("--json", type=Path)
    a = parser.parse_args()
    cases = [CASES[i] for i in a.case]
    found = [row for d in a.headdim for row in rows(a.gpu, d, a.nheads, a.backward, a.settings, cases)]
    if a.json:
        a.json.write_text(json.dumps([asdict(row) | {"of_plain": row.of_plain} for row in found], indent=1) + "\n")


if __name__ == "__main__":
    main()
