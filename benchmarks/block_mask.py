"""Simulates block masks: speed as a share of plain attention, with targets, or (--sweep) time against density.

A block mask, as of FlexAttention, lists the blocks of scores that exist. A full block has all scores, a partial one has a bit for each.
Each case calls torch.ops.volta_fa.fwd or .bwd on fp16 CPU tensors with VOLTA_FA_SIMULATE=timing, which times the GPU kernels in
tools/volta-sim. Nothing here is measured. A mask has random blocks of 128 queries by 128 keys, the same number for each block of queries.
Bits of partial blocks are random: half of the scores are hidden. TFLOP/s count 4*D (backward 10*D) operations for each query-key pair
in a present block, hidden ones too. "Of plain" is the ratio to the same call without a mask, at 4096 tokens where the case has more; a
partial mask is compared with the full one instead.
The case of documents has the mask of packed documents instead, the last of them short; its plain call has the same by cu_seqlens."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from pathlib import Path

import torch
from torch import Tensor

from volta_fa import BlockMask
from volta_fa.errors import CommandError

from . import driver, report
from .driver import Benchmark, Result, Row, run  # Row: a case on a GPU, with settings of the simulator (models); Result: its times by model
from .measure import Work, aligned  # aligned(): an empty tensor, aligned as by CUDA's allocator
from .report import Grid
from .volta import BACKWARD, FORWARD, forward_results  # forward_results(): stand-ins for out and softmax_lse, inputs of the backward pass

BLOCK = 128  # queries and keys of a block


@dataclass(frozen=True)
class Mask:
    """A mask, one for all heads, and the pass that is timed with it."""

    direction: str  # FORWARD or BACKWARD
    density: float  # share of present blocks
    partial: bool  # whether they are partial
    seqlen: int
    documents: int = 0  # tokens of a document, instead of random blocks; density is 0

    def __str__(self) -> str:
        if self.documents:
            return f"{self.direction} documents of {self.documents} tokens N={self.seqlen}"
        return f"{self.direction} {self.density:.0%} {'partial' if self.partial else 'full'} N={self.seqlen}"


#: The cases without --sweep, as (pass, density, partial, tokens), with the minimum of `ratio`. None: no target.
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
SWEEP = [Mask(*sizes, 2048) for sizes in product((FORWARD, BACKWARD), (1 / 16, 1 / 8, 1 / 4, 1 / 2, 1.0), (False, True))]


@dataclass(frozen=True)
class Case(driver.Case):
    """A call with the mask. If `plain`, a call of the same shape without it; documents are then given by cu_seqlens."""

    mask: Mask
    headdim: int
    nheads: int
    plain: bool = False

    @property
    def flops(self) -> float:
        _, pairs = options_of(self.mask, self.plain)
        return (4 if self.mask.direction == FORWARD else 10) * self.headdim * self.nheads * pairs

    def calls(self, device: str) -> list[Work]:
        """Returns the one call of the case. Inputs lose their batch dimension, as packed tensors, if the options have cu_seqlens."""
        generator = torch.Generator().manual_seed(1)
        shape = (1, self.mask.seqlen, self.nheads, self.headdim)
        q, k, v, dout = (aligned(shape, torch.float16).normal_(generator=generator) for _ in range(4))
        options, _ = options_of(self.mask, self.plain)
        if self.mask.direction == FORWARD:
            inputs = [t[0] for t in (q, k, v)] if "cu_seqlens_q" in options else [q, k, v]
            return [lambda: torch.ops.volta_fa.fwd(*inputs, **options)]
        out, lse = forward_results(dout, self.mask.seqlen)
        return [lambda: torch.ops.volta_fa.bwd(dout, q, k, v, out, lse, **options)]


def random_mask(mask: Mask) -> BlockMask:
    """Returns a mask of random blocks, as many for each block of queries."""
    generator, blocks = torch.Generator().manual_seed(0), mask.seqlen // BLOCK
    order = torch.rand(blocks, blocks, generator=generator).argsort(-1)
    present = torch.zeros(blocks, blocks, dtype=torch.bool).scatter_(1, order[:, : present_blocks(mask)], True)
    if not mask.partial:
        return BlockMask.from_blocks(present, BLOCK)
    shown = torch.rand(mask.seqlen, mask.seqlen, generator=generator) < 0.5
    mask_mod = lambda b, h, q, k: present[q // BLOCK, k // BLOCK] & shown[q, k]  # noqa: E731
    return BlockMask.from_mask_mod(mask_mod, 1, 1, mask.seqlen, mask.seqlen, "cpu")  # 1, 1: for all batch entries and heads


def present_blocks(mask: Mask) -> int:
    """Returns the number of blocks that exist for each block of queries."""
    return max(1, round(mask.density * (mask.seqlen // BLOCK)))


@cache
def options_of(mask: Mask, plain: bool) -> tuple[dict[str, Tensor | int | None], float]:
    """Returns the operator's options for a call, and its query-key pairs per head: those in present blocks, or in documents."""
    if not mask.documents:
        return ({}, float(mask.seqlen**2)) if plain else (random_mask(mask).options(), float(mask.seqlen * present_blocks(mask) * BLOCK))
    cu_seqlens = torch.tensor([*range(0, mask.seqlen, mask.documents), mask.seqlen], dtype=torch.int32)
    pairs = float(cu_seqlens.diff().square().sum())
    if plain:
        packed = {f"cu_seqlens_{name}": cu_seqlens for name in "qk"} | {f"max_seqlen_{name}": mask.documents for name in "qk"}
        return packed, pairs
    document = torch.arange(mask.seqlen) // mask.documents
    found = BlockMask.from_mask_mod(lambda b, h, q, k: document[q] == document[k], 1, 1, mask.seqlen, mask.seqlen, "cpu")
    return found.options(), pairs


def plain_of(case: Case) -> Case:
    """Returns the plain call of a case. Random masks of a direction share one of at most 4096 tokens."""
    mask = case.mask
    seqlen = mask.seqlen if mask.documents else min(mask.seqlen, 4096)
    return replace(case, mask=Mask(mask.direction, 0.0, False, seqlen, documents=mask.documents), plain=True)


def rows(options: argparse.Namespace) -> list[Row]:
    found = []
    for gpu, headdim, mask in product(options.gpu, options.headdim, SWEEP if options.sweep else MASKS):
        case = Case(mask, headdim, options.nheads)
        for name, call in ((f"{mask}, plain", plain_of(case)), (str(mask), case)):
            found.append(Row(f"{name}, D={headdim}", call, gpu, models=(options.settings,)))
    return found


def ratio(result: Result, found: Sequence[Result]) -> float | None:
    """Returns the case's TFLOP/s relative to plain, or of a partial mask to the full one. None: that call was not run."""
    case = result.row.case
    other = replace(case, mask=replace(case.mask, partial=False)) if case.mask.partial else plain_of(case)
    reference = [r.tflops() for r in found if r.row.call == result.row.call._replace(case=other)]
    return result.tflops() / reference[0] if reference else None


def masked(results: Sequence[Result]) -> list[Result]:
    """Returns the results with a mask. The plain ones are only what these compare with."""
    return [r for r in results if not r.row.case.plain]


def grids(results: Sequence[Result], options: argparse.Namespace) -> list[Grid]:
    found = {(r.row.case.mask, r.row.gpu, r.row.case.headdim): r for r in masked(results)}

    def cell(mask: Mask, gpu: str, headdim: int) -> str:
        r = found.get((mask, gpu, headdim))
        relative = ratio(r, results) if r else None
        return f"{r.tflops():.1f}, {'-' if relative is None else f'{relative:.2f}'}" if r else ""

    columns = dict.fromkeys((gpu, headdim) for _, gpu, headdim in found)
    return [
        report.table(
            "Block masks: TFLOP/s, of plain (partial: of full)",
            dict.fromkeys(mask for mask, _, _ in found),
            {
                "case": str,
                "target": lambda mask: f"{target:.2f}" if (target := MASKS.get(mask)) else "",
                **{f"{gpu} {d}": lambda mask, gpu=gpu, d=d: cell(mask, gpu, d) for gpu, d in columns},
            },
        )
    ]


def plot(results: Sequence[Result], options: argparse.Namespace, header: dict[str, str], path: Path) -> None:
    """Draws milliseconds against density, a panel for each pass and GPU."""
    if not options.sweep:
        raise CommandError("--plot: draws what --sweep finds")
    directions = list(dict.fromkeys(r.row.case.mask.direction for r in results))
    title = f"Block masks, simulated, {header['date']}: full blocks solid, partial dashed, plain attention dotted"
    figure, axes = report.panels(len(directions), len(options.gpu), title, (5 * len(options.gpu), 4 * len(directions)), sharex=True)
    for down, direction in enumerate(directions):
        for axis, gpu in zip(axes[down], options.gpu):
            of_panel = [r for r in results if (r.row.gpu, r.row.case.mask.direction) == (gpu, direction)]
            for headdim in sorted({r.row.case.headdim for r in of_panel}):
                color = report.HEADDIM_COLORS[headdim]
                for partial, style in ((False, "o-"), (True, "s--")):
                    curve = [r for r in masked(of_panel) if (r.row.case.headdim, r.row.case.mask.partial) == (headdim, partial)]
                    label = f"D={headdim}, {'partial' if partial else 'full'}"
                    x, y = [100 * r.row.case.mask.density for r in curve], [r.us() / 1e3 for r in curve]
                    axis.plot(x, y, style, color=color, markersize=4, label=label)
                plain = next(r.us() for r in of_panel if r.row.case.plain and r.row.case.headdim == headdim)
                axis.axhline(plain / 1e3, color=color, linestyle=":", label=f"D={headdim}, plain")
            axis.set(title=f"{gpu}, {direction}, N={of_panel[0].row.case.mask.seqlen}", ylim=(0, None), xlim=(0, None))
            axis.set(xlabel="present blocks, %", ylabel="ms")
    report.shared_legend(figure, axes)
    report.save(figure, path)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--headdim", type=int, nargs="+", default=[64, 128])
    parser.add_argument("--nheads", type=int, default=5)
    parser.add_argument("--settings", default="", help="the simulator's machine constants, as VOLTA_FA_SIM_SET: NAME=VALUE,...")
    parser.add_argument("--sweep", action="store_true", help="time against density, which --plot draws")


def main(arguments: Sequence[str]) -> int:
    benchmark = Benchmark(__doc__, rows, grids, add_options, plot, ("v100", "t4"), several_gpus=True)  # the tuple: default of --gpu
    return run("block_mask", benchmark, arguments)


if __name__ == "__main__":
    report.command(main)
