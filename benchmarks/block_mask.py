"""Simulates block masks: speed beside plain attention with its bars, or (--sweep) time against density.

Each case calls torch.ops.volta_fa.fwd or .bwd on fp16 CPU tensors with VOLTA_FA_SIMULATE=timing, as benchmarks.volta does. Nothing here
is measured. A mask has random blocks of 128 queries by 128 keys, the same number for each block of queries. Bits of partial blocks are
random: half of the scores are hidden. TFLOP/s count 4*D (backward 10*D) operations for each pair in a present block, hidden ones too.
"Of plain" is the ratio to the same shape without lists, or to one of 4096 tokens where the case has more.
The case of documents has the mask of packed documents instead, the last of them short. Its pairs are the visible ones, and its plain call
has the same documents by cu_seqlens.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from volta_fa import BlockMask
from volta_fa.errors import CommandError

from . import plots, report
from .driver import Benchmark, Result, Row, run
from .measure import Work, aligned
from .report import Grid
from .volta import BACKWARD, FORWARD, forward_results

BLOCK, HEADER, TILE_WORDS = 128, 4, 256


@dataclass(frozen=True)
class Mask:
    """A mask, one for all heads."""

    direction: str
    density: float  # share of present blocks
    partial: bool  # whether they are partial
    seqlen: int
    documents: int = 0  # tokens of a document, instead of random blocks; density is 0

    def __str__(self) -> str:
        if self.documents:
            return f"{self.direction} documents of {self.documents} tokens N={self.seqlen}"
        return f"{self.direction} {self.density:.0%} {'partial' if self.partial else 'full'} N={self.seqlen}"


#: With bars: the least ratio to plain; of a partial mask: to the full one of the same density.
MASKS = {
    Mask(FORWARD, 1.0, False, 4096): 0.93,
    Mask(FORWARD, 1.0, True, 4096): 0.85,
    Mask(FORWARD, 0.1, False, 8192): 0.75,
    Mask(FORWARD, 0.3, False, 8192): 0.87,
    Mask(FORWARD, 0.1, False, 16384): 0.83,
    Mask(BACKWARD, 1.0, False, 4096): None,
    Mask(BACKWARD, 1.0, True, 4096): None,
    Mask(BACKWARD, 0.1, False, 16384): 0.70,
    Mask(FORWARD, 0.0, False, 4096, documents=1365): 0.85,
}
SWEEP = [
    Mask(direction, density, partial, 2048)
    for direction in (FORWARD, BACKWARD)
    for density in (1 / 16, 1 / 8, 1 / 4, 1 / 2, 1.0)
    for partial in (False, True)
]


@dataclass(frozen=True)
class Case:
    """A call with a mask, or without: then with the documents by cu_seqlens, if there are any."""

    mask: Mask
    headdim: int
    nheads: int
    plain: bool = False
    bytes = 0.0

    @property
    def flops(self) -> float:
        return (4 if self.mask.direction == FORWARD else 10) * self.headdim * self.nheads * options_of(self.mask, self.plain)[1]

    def calls(self, device: str) -> list[Work]:
        """Returns the call, whose options with cu_seqlens are those of packed tensors."""
        generator = torch.Generator().manual_seed(1)
        shape = (1, self.mask.seqlen, self.nheads, self.headdim)
        q, k, v, dout = (aligned(shape, torch.float16).normal_(generator=generator) for _ in range(4))
        options, _ = options_of(self.mask, self.plain)
        if self.mask.direction == FORWARD:
            given = [t[0] for t in (q, k, v)] if "cu_seqlens_q" in options else [q, k, v]
            return [lambda: torch.ops.volta_fa.fwd(*given, **options)]
        out, lse = forward_results(dout, self.mask.seqlen)
        return [lambda: torch.ops.volta_fa.bwd(dout, q, k, v, out, lse, **options)]


def lists_of(seqlen: int, density: float, partial: bool, generator: torch.Generator) -> tuple[dict[str, Tensor], float]:
    """Returns the options of a mask of random blocks, one for all heads, and its number of pairs. The bits of the two directions are not of
    one mask: times do not depend on them."""
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
            bits = torch.randint(-(2**31), 2**31, (tiles, TILE_WORDS), generator=generator)
            options["block_bits" + suffix] = bits.to(torch.int32)
    return options, float(blocks * count * BLOCK * BLOCK)


@cache
def options_of(mask: Mask, plain: bool) -> tuple[dict[str, Tensor | int], float]:
    """Returns the options of a call, and the number of pairs in present blocks or documents."""
    if not mask.documents:
        if plain:
            return {}, float(mask.seqlen**2)
        return lists_of(mask.seqlen, mask.density, mask.partial, torch.Generator().manual_seed(0))
    cu_seqlens = torch.tensor([*range(0, mask.seqlen, mask.documents), mask.seqlen], dtype=torch.int32)
    pairs = float(cu_seqlens.diff().square().sum())
    if plain:
        packed = {f"cu_seqlens_{name}": cu_seqlens for name in "qk"} | {f"max_seqlen_{name}": mask.documents for name in "qk"}
        return packed, pairs
    document = torch.arange(mask.seqlen) // mask.documents
    found = BlockMask.from_mask_mod(lambda b, h, q, k: document[q] == document[k], 1, 1, mask.seqlen, mask.seqlen, "cpu")
    return found.options(), pairs


def plain_of(case: Case) -> Case:
    """Returns the call that a case compares with. All masks of a direction and length share one."""
    mask = case.mask
    seqlen = mask.seqlen if mask.documents else min(mask.seqlen, 4096)
    return replace(case, mask=Mask(mask.direction, 0.0, False, seqlen, documents=mask.documents), plain=True)


def rows(options: argparse.Namespace) -> list[Row]:
    found = []
    for gpu in options.gpu:
        for headdim in options.headdim:
            for mask in SWEEP if options.sweep else MASKS:
                case = Case(mask, headdim, options.nheads)
                for name, of in ((f"{mask}, plain", plain_of(case)), (str(mask), case)):
                    found.append(Row(f"{name}, D={headdim}", of, gpu, (options.settings,)))
    return found


def ratio(result: Result, found: Sequence[Result]) -> float | None:
    """Returns the ratio that the case's bar limits: to plain, or of a partial case to the full one. None: that one was not run."""
    case = result.row.case
    other = replace(case, mask=replace(case.mask, partial=False)) if case.mask.partial else plain_of(case)
    of = [r.tflops() for r in found if r.row.call == result.row.call._replace(case=other)]
    return result.tflops() / of[0] if of else None


def masked(results: Sequence[Result]) -> list[Result]:
    return [r for r in results if not r.row.case.plain]


def grids(results: Sequence[Result], options: argparse.Namespace) -> list[Grid]:
    found = {(r.row.case.mask, r.row.gpu, r.row.case.headdim): r for r in masked(results)}

    def cell(mask: Mask, gpu: str, headdim: int) -> str:
        r = found.get((mask, gpu, headdim))
        of = ratio(r, results) if r else None
        return f"{r.tflops():.1f}, {'-' if of is None else f'{of:.2f}'}" if r else ""

    columns = dict.fromkeys((gpu, headdim) for _, gpu, headdim in found)
    return [
        report.table(
            "Block masks: TFLOP/s, of plain (partial: of full)",
            dict.fromkeys(mask for mask, _, _ in found),
            {
                "case": str,
                "bar": lambda mask: f"{bar:.2f}" if (bar := MASKS.get(mask)) else "",
                **{f"{gpu} {d}": lambda mask, gpu=gpu, d=d: cell(mask, gpu, d) for gpu, d in columns},
            },
        )
    ]


def plot(results: Sequence[Result], options: argparse.Namespace, header: dict[str, str], path: Path) -> None:
    """Draws the sweep."""
    if not options.sweep:
        raise CommandError("--plot: draws what --sweep finds")
    directions = list(dict.fromkeys(r.row.case.mask.direction for r in results))
    title = f"Block masks, simulated, {header['date']}: full blocks solid, partial dashed, plain attention dotted"
    figure, axes = plots.panels(len(directions), len(options.gpu), title, (5 * len(options.gpu), 4 * len(directions)), sharex=True)
    for down, direction in enumerate(directions):
        for axis, gpu in zip(axes[down], options.gpu):
            of_panel = [r for r in results if (r.row.gpu, r.row.case.mask.direction) == (gpu, direction)]
            for headdim in sorted({r.row.case.headdim for r in of_panel}):
                color = plots.HEADDIM_COLORS[headdim]
                for partial, style in ((False, "o-"), (True, "s--")):
                    curve = [r for r in masked(of_panel) if (r.row.case.headdim, r.row.case.mask.partial) == (headdim, partial)]
                    label = f"D={headdim}, {'partial' if partial else 'full'}"
                    x, y = [100 * r.row.case.mask.density for r in curve], [r.us() / 1e3 for r in curve]
                    axis.plot(x, y, style, color=color, markersize=4, label=label)
                plain = next(r.us() for r in of_panel if r.row.case.plain and r.row.case.headdim == headdim)
                axis.axhline(plain / 1e3, color=color, linestyle=":", label=f"D={headdim}, plain")
            axis.set(title=f"{gpu}, {direction}, N={of_panel[0].row.case.mask.seqlen}", ylim=(0, None), xlim=(0, None))
            axis.set(xlabel="present blocks, %", ylabel="ms")
    plots.shared_legend(figure, axes)
    plots.save(figure, path)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--headdim", type=int, nargs="+", default=[64, 128])
    parser.add_argument("--nheads", type=int, default=5)
    parser.add_argument("--settings", default="", help="machine constants, as VOLTA_FA_SIM_SET")
    parser.add_argument("--sweep", action="store_true", help="time against density, which --plot draws")


def main(arguments: Sequence[str]) -> int:
    benchmark = Benchmark(__doc__, rows, grids, add_options, plot, ("v100", "t4"), several=True)
    return run("block_mask", benchmark, arguments)


if __name__ == "__main__":
    report.command(main)
