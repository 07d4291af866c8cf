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
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from volta_fa import BlockMask

from . import plots, report
from .measure import aligned, simulated
from .report import Grid

BLOCK, HEADER, TILE_WORDS = 128, 4, 256
FORWARD, BACKWARD = "forward", "backward"


@dataclass(frozen=True)
class Case:
    direction: str
    density: float  # share of present blocks
    partial: bool  # whether they are partial
    seqlen: int
    bar: float | None = None  # ratio to plain; of a partial case: to the full case of the same density
    documents: int = 0  # tokens of a document, instead of random blocks; density is 0

    def __str__(self) -> str:
        if self.documents:
            return f"{self.direction} documents of {self.documents} tokens N={self.seqlen}"
        return f"{self.direction} {self.density:.0%} {'partial' if self.partial else 'full'} N={self.seqlen}"

    @property
    def plain_seqlen(self) -> int:
        return self.seqlen if self.documents else min(self.seqlen, 4096)


CASES = [
    Case(FORWARD, 1.0, False, 4096, 0.93),
    Case(FORWARD, 1.0, True, 4096, 0.85),
    Case(FORWARD, 0.1, False, 8192, 0.75),
    Case(FORWARD, 0.3, False, 8192, 0.87),
    Case(FORWARD, 0.1, False, 16384, 0.83),
    Case(BACKWARD, 1.0, False, 4096),
    Case(BACKWARD, 1.0, True, 4096),
    Case(BACKWARD, 0.1, False, 16384, 0.70),
    Case(FORWARD, 0.0, False, 4096, 0.85, documents=1365),
]
SWEEP = [
    Case(direction, density, partial, 2048)
    for direction in (FORWARD, BACKWARD)
    for density in (1 / 16, 1 / 8, 1 / 4, 1 / 2, 1.0)
    for partial in (False, True)
]


@dataclass(frozen=True)
class Row:
    gpu: str
    headdim: int
    case: Case
    settings: str
    kernel: str
    microseconds: float
    tflops: float
    plain_microseconds: float
    plain_tflops: float

    @property
    def of_plain(self) -> float:
        return self.tflops / self.plain_tflops

    def __str__(self) -> str:
        case = f"{self.gpu} D={self.headdim} {self.case} {self.settings or 'default'}"
        return f"{case}: {self.tflops:.1f} TFLOP/s, plain {self.plain_tflops:.1f}, of plain {self.of_plain:.2f} ({self.kernel})"


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


def masks(case: Case) -> tuple[dict[str, Tensor], dict[str, Tensor | int], float]:
    """Returns the options of the case, those of the plain call, and the number of pairs in present blocks or documents."""
    if not case.documents:
        options, pairs = lists_of(case.seqlen, case.density, case.partial, torch.Generator().manual_seed(0))
        return options, {}, pairs
    document = torch.arange(case.seqlen) // case.documents
    mask = BlockMask.from_mask_mod(lambda b, h, q, k: document[q] == document[k], 1, 1, case.seqlen, case.seqlen, "cpu")
    cu_seqlens = torch.tensor([*range(0, case.seqlen, case.documents), case.seqlen], dtype=torch.int32)
    packed = {f"cu_seqlens_{name}": cu_seqlens for name in "qk"} | {f"max_seqlen_{name}": case.documents for name in "qk"}
    return mask.options(), packed, float(cu_seqlens.diff().square().sum())


def call(gpu: str, headdim: int, nheads: int, seqlen: int, direction: str, settings: str, options: dict[str, Any]) -> list[dict]:
    """Returns the simulator's reports of one call. Options with cu_seqlens are those of packed tensors."""
    generator = torch.Generator().manual_seed(1)
    shape = (1, seqlen, nheads, headdim)
    q, k, v, dout = (aligned(shape, torch.float16).normal_(generator=generator) for _ in range(4))
    if direction == FORWARD:
        given = [t[0] for t in (q, k, v)] if "cu_seqlens_q" in options else [q, k, v]
        return simulated(lambda: torch.ops.volta_fa.fwd(*given, **options), settings, gpu)
    out = aligned(shape, torch.float16).zero_()
    lse = aligned((1, nheads, seqlen), torch.float32).fill_(10.0)
    return simulated(lambda: torch.ops.volta_fa.bwd(dout, q, k, v, out, lse, **options), settings, gpu)


def rows(gpu: str, headdim: int, nheads: int, settings: str, cases: Sequence[Case]) -> list[Row]:
    found: list[Row] = []
    plain: dict[tuple[str, int, int], tuple[float, float, str]] = {}

    def timed(case: Case, seqlen: int, options: dict[str, Any], pairs: float) -> tuple[float, float, str]:
        reports = call(gpu, headdim, nheads, seqlen, case.direction, settings, options)
        microseconds = sum(r["timing"]["kernel_us"] for r in reports)
        longest = max(reports, key=lambda r: r["timing"]["kernel_us"])
        operations = (4 if case.direction == FORWARD else 10) * headdim * nheads * pairs
        return microseconds, operations / microseconds / 1e6, longest["kernel"]

    for case in report.track(cases, f"{gpu}, headdim {headdim}"):
        options, of_plain, pairs = masks(case)
        key = case.direction, case.plain_seqlen, case.documents
        if key not in plain:
            plain[key] = timed(case, case.plain_seqlen, of_plain, pairs if case.documents else float(case.plain_seqlen**2))
        microseconds, tflops, kernel = timed(case, case.seqlen, options, pairs)
        found.append(Row(gpu, headdim, case, settings, kernel, microseconds, tflops, *plain[key][:2]))
        report.console.print(str(found[-1]), soft_wrap=True)
    return found


def ratio(row: Row, found: Sequence[Row]) -> float | None:
    """Returns the ratio that the case's bar limits: to plain, or of a partial case to the full one. None: the full one was not run."""
    if not row.case.partial:
        return row.of_plain
    same = (row.gpu, row.headdim, row.settings, row.case.direction, row.case.density, row.case.seqlen)
    full = (r for r in found if not r.case.partial)
    of = [r.tflops for r in full if (r.gpu, r.headdim, r.settings, r.case.direction, r.case.density, r.case.seqlen) == same]
    return row.tflops / of[0] if of else None


def grid_of(found: Sequence[Row]) -> Grid:
    columns = list(dict.fromkeys((r.gpu, r.headdim, r.settings) for r in found))
    names = [f"{gpu} {headdim}{' ' + settings if settings else ''}" for gpu, headdim, settings in columns]
    grid = Grid("Block masks: TFLOP/s, of plain (partial: of full)", ["case", "bar", *names])
    for case in dict.fromkeys(r.case for r in found):
        cells = {(r.gpu, r.headdim, r.settings): r for r in found if r.case == case}
        texts = []
        for column in columns:
            row = cells.get(column)
            of = ratio(row, found) if row else None
            texts.append(f"{row.tflops:.1f}, {'-' if of is None else f'{of:.2f}'}" if row else "")
        grid.rows.append([str(case), "" if case.bar is None else f"{case.bar:.2f}", *texts])
    return grid


def plot(found: Sequence[Row], header: dict[str, str], path: Path) -> None:
    gpus = list(dict.fromkeys(r.gpu for r in found))
    directions = list(dict.fromkeys(r.case.direction for r in found))
    title = f"Block masks, simulated, {header['date']}: full blocks solid, partial dashed, plain attention dotted"
    figure, axes = plots.panels(len(directions), len(gpus), title, (5 * len(gpus), 4 * len(directions)), sharex=True)
    for down, direction in enumerate(directions):
        for axis, gpu in zip(axes[down], gpus):
            of_panel = [r for r in found if (r.gpu, r.case.direction) == (gpu, direction)]
            for headdim in sorted({r.headdim for r in of_panel}):
                color = plots.HEADDIM_COLORS[headdim]
                for partial, style in ((False, "o-"), (True, "s--")):
                    curve = [r for r in of_panel if (r.headdim, r.case.partial) == (headdim, partial)]
                    label = f"D={headdim}, {'partial' if partial else 'full'}"
                    x, y = [100 * r.case.density for r in curve], [r.microseconds / 1e3 for r in curve]
                    axis.plot(x, y, style, color=color, markersize=4, label=label)
                plain = next(r.plain_microseconds for r in of_panel if r.headdim == headdim)
                axis.axhline(plain / 1e3, color=color, linestyle=":", label=f"D={headdim}, plain")
            axis.set(title=f"{gpu}, {direction}, N={of_panel[0].case.seqlen}", ylim=(0, None), xlim=(0, None))
            axis.set(xlabel="present blocks, %", ylabel="ms")
    plots.shared_legend(figure, axes)
    plots.save(figure, path)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.block_mask", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    report.add_output_options(parser)
    parser.add_argument("--gpu", nargs="+", default=["v100", "t4"])
    parser.add_argument("--headdim", type=int, nargs="+", default=[64, 128])
    parser.add_argument("--nheads", type=int, default=5)
    parser.add_argument("--settings", default="", help="machine constants, as VOLTA_FA_SIM_SET")
    parser.add_argument("--sweep", action="store_true", help="time against density, which --plot draws")
    parser.add_argument("--case", type=int, nargs="*", help="numbers of the cases; default: all")
    options = parser.parse_args(arguments)
    if options.plot and not options.sweep:
        parser.error("--plot draws what --sweep finds")
    cases = SWEEP if options.sweep else CASES
    cases = [cases[i] for i in options.case] if options.case else cases
    found = [row for gpu in options.gpu for d in options.headdim for row in rows(gpu, d, options.nheads, options.settings, cases)]
    header = report.facts("block_mask", arguments, **{"kind of figures": report.SIMULATED})
    grids = [grid_of(found)]
    report.deliver(
        options, header, grids, [asdict(row) | {"of_plain": row.of_plain} for row in found], lambda path: plot(found, header, path)
    )
    return 0


if __name__ == "__main__":
    report.command(main)
