"""Measures peak memory against sequence length, for volta_fa and PyTorch's attention, on this machine.

For each sequence length N (batch 1, N queries and N keys, not causal), reports the most that PyTorch's allocator held beyond the inputs, in
a forward pass without gradients and in a forward and backward pass. Outputs and gradients count, since a model holds them too. A GPU
reports the allocator's peak statistics, a CPU the profiler's record. "growth" is the exponent of N between the two longest lengths that
ran: 1 is O(N), 2 is O(N^2)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from volta_fa.errors import CommandError

from . import report
from .attention import Inputs, Shape, implementations, why_unavailable  # Inputs.bind(): an implementation with its inputs, ready to run
from .measure import peak_bytes
from .report import Grid, significant

PASSES = ("forward", "forward and backward")
#: Defaults by device.
SEQLENS = {"cuda": [512, 1024, 2048, 4096, 8192, 16384], "cpu": [128, 256, 512, 1024, 2048, 4096]}
QUICK_SEQLENS = [64, 128]  # of --quick
NHEADS = {"cuda": 16, "cpu": 4}


@dataclass(frozen=True)
class Point:
    """One figure, a point of the plot."""

    implementation: str
    passes: str  # one of PASSES
    seqlen: int
    bytes: int | None  # peak; None: too little memory, or the implementation has no kernel for it


def measure(shape: Shape, device: torch.device, dtype: torch.dtype) -> list[Point]:
    """Returns the points of every implementation and both PASSES at one length."""
    inputs = Inputs(shape, device, dtype)
    points = []
    for implementation in implementations(dtype):
        bound = inputs.bind(implementation)
        for passes, work in zip(PASSES, (torch.no_grad()(bound.forward), bound.both)):
            points.append(Point(implementation.name, passes, shape.seqlen_q, _peak(work, device)))
    return points


def _peak(work: Callable[[], object], device: torch.device) -> int | None:
    try:
        work()  # allocates what a process allocates once, such as cuBLAS's workspace, so that it does not count
        return peak_bytes(work, device)
    except RuntimeError as error:
        if why_unavailable(error) is None:
            raise
        return None


def grids(points: Sequence[Point]) -> list[Grid]:
    seqlens = sorted({p.seqlen for p in points})
    found = []
    for passes in PASSES:
        grid = Grid(f"Peak memory of {passes}, MiB", ["N", *map(str, seqlens), "growth"])
        for name in dict.fromkeys(p.implementation for p in points):
            curve = {p.seqlen: p.bytes for p in points if (p.implementation, p.passes) == (name, passes)}
            if any(curve.values()):
                cells = [significant(None if curve[n] is None else curve[n] / 2**20) for n in seqlens]
                grid.rows.append([name, *cells, significant(_growth(curve), 2)])
        found.append(grid)
    return found


def _growth(curve: dict[int, int | None]) -> float | None:
    """Returns log(bytes ratio) / log(N ratio) of the two longest lengths that ran; None: fewer ran."""
    known = sorted((n, peak) for n, peak in curve.items() if peak)[-2:]
    if len(known) < 2:
        return None
    (n0, low), (n1, high) = known
    return math.log(high / low) / math.log(n1 / n0)


def plot(points: Sequence[Point], header: dict[str, str], path: Path) -> None:
    title = f"Peak memory on {header['device']}, {header['inputs']}, {header['date']} (measured)"
    figure, axes = report.panels(1, 2, title, (12, 4.8), sharey=True)
    seqlens = sorted({p.seqlen for p in points})
    for axis, passes in zip(axes[0], PASSES):
        for name in dict.fromkeys(p.implementation for p in points):
            curve = [(p.seqlen, p.bytes / 2**20) for p in points if (p.implementation, p.passes) == (name, passes) and p.bytes]
            if curve:
                axis.plot(*zip(*curve), marker=report.MARKERS[name], color=report.COLORS[name], label=name, markersize=5)
        axis.set_xscale("log", base=2)
        axis.set_xticks(seqlens, map(str, seqlens))
        axis.set(yscale="log", title=passes, xlabel="N", ylabel="MiB beyond the inputs")
    report.shared_legend(figure, axes)
    report.save(figure, path)


def main(arguments: Sequence[str]) -> int:
    parser = report.parser("memory", __doc__, measures=True)  # with --json, --plot, --markdown and --device
    default = "default: {cuda} on a GPU, {cpu} on a CPU".format
    parser.add_argument("--seqlens", type=int, nargs="+", metavar="N", help=default(**SEQLENS))
    parser.add_argument("--nheads", type=int, metavar="H", help=default(**NHEADS))
    parser.add_argument("--headdim", type=int, default=64, metavar="D", help="default: 64")
    parser.add_argument("--quick", action="store_true", help=f"sequences of {QUICK_SEQLENS}: does it work at all?")
    options = parser.parse_args(arguments)
    device = report.choose_device(options.device)
    dtype = report.dtype_for(device)
    seqlens = QUICK_SEQLENS if options.quick else options.seqlens or SEQLENS[device.type]
    nheads = options.nheads or NHEADS[device.type]
    if min(*seqlens, nheads, options.headdim, 1) < 1:
        raise CommandError("--seqlens, --nheads and --headdim are positive numbers")
    shape = f"B=1, H={nheads}, D={options.headdim}"
    header = report.facts_of(device, "memory", arguments, inputs=f"{shape}, {str(dtype).removeprefix('torch.')}")
    points: list[Point] = []
    for n in report.track(sorted(seqlens), "lengths"):
        points += measure(Shape(1, nheads, n, n, options.headdim), device, dtype)
    data = {"header": header, "points": [asdict(p) for p in points]}
    report.deliver(options, header, grids(points), data, lambda path: plot(points, header, path))
    return 0


if __name__ == "__main__":
    report.command(main)
