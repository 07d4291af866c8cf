"""The speed of what people run, beside its targets, on a simulated V100.

    python -m benchmarks.targets [--only WORDS] [--jobs N] [--json FILE] [--markdown FILE]

TFLOP/s of the whole pass with the default model and with a perfect instruction cache, as `benchmarks.volta` counts them.
"Tensor pipe" and "shared memory" are shares of the main kernel's time with the default model. "Balance" is the work of the
average SM, relative to that of the busiest: a grid without waves and tails has 1.
"""

from __future__ import annotations

import argparse
import multiprocessing
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

import volta_fa
from volta_fa.errors import CommandError

from . import prefill, report
from .measure import simulated
from .report import Grid
from .shapes import Shape
from .volta import BACKWARD, BIAS_GRADIENT, FORWARD, Case, simulate


@dataclass(frozen=True)
class Target:
    case: Case | prefill.Case
    tflops: float

    @property
    def name(self) -> str:
        case = self.case
        if isinstance(case, Case):
            return str(case)
        return f"prefill D={case.headdim} H={case.nheads} on {case.nheads_k}, {case.seqlen_q} behind {case.seqlen_k - case.seqlen_q}"


@dataclass(frozen=True)
class Result:
    tflops: float
    tflops_no_icache: float
    tensor: float  # of the main kernel, as the next two
    mio: float
    balance: float
    kernel: str


def _plain(direction: str, n: int, causal: bool, *of_headdims: float) -> list[Target]:
    """Targets of headdims 64 and 128 with the usual number of heads."""
    heads = 32 if direction == FORWARD else 40
    return [Target(Case(direction, Shape(1, heads, n, n, d, causal)), tflops) for d, tflops in zip((64, 128), of_headdims)]


def _feature(direction: str, feature: str, *of_headdims: float, batch: int = 1) -> list[Target]:
    heads = 32 if direction == FORWARD else 40
    shapes = [Shape(batch, heads, 2048, 2048, d) for d in (64, 128)]
    return [Target(Case(direction, shape, feature=feature), tflops) for shape, tflops in zip(shapes, of_headdims)]


TARGETS = [
    *(Target(Case(BACKWARD, Shape(1, 32, 2048, 2048, d, nheads_k=8)), tflops) for d, tflops in ((64, 74), (128, 75))),
    *_feature(FORWARD, "packed", 84, 87),
    *_feature(FORWARD, "packed", 84, 87, batch=8),
    *_feature(FORWARD, "sinks", 85, 88),
    *_feature(FORWARD, "bias", 68, 70),
    *_feature(BACKWARD, "bias", 60, 62),
    *_feature(BACKWARD, BIAS_GRADIENT, 50, 52),
    *_plain(FORWARD, 1024, True, 72, 70),
    *_plain(FORWARD, 4096, True, 90, 90),
    *_plain(BACKWARD, 1024, True, 60, 60),
    *_plain(BACKWARD, 4096, True, 78, 78),
    *_plain(FORWARD, 512, False, 66, 66),
    *_plain(FORWARD, 512, True, 48, 46),
    *_plain(BACKWARD, 512, False, 66, 66),
    *_plain(BACKWARD, 512, True, 45, 46),
    *_plain(FORWARD, 4096, False, 100, 98),
    *_plain(BACKWARD, 2048, False, 82, 83),
    Target(Case(FORWARD, Shape(1, 32, 1024, 1024, 96)), 78),
    Target(Case(BACKWARD, Shape(1, 40, 1024, 1024, 96)), 70),
    Target(Case(FORWARD, Shape(1, 32, 1024, 1024, 192, headdim_v=128)), 74),
    Target(Case(BACKWARD, Shape(1, 40, 1024, 1024, 192, headdim_v=128)), 66),
    *(Target(prefill.Case(256, 6, 16, 1, 4096, 4096 + before), 70) for before in (0, 16384, 128000)),
    *(Target(prefill.Case(128, 32, 16, 8, 4096, 4096 + before), 85) for before in (0, 16384)),
    # without targets: what else these shapes depend on
    *(Target(Case(BACKWARD, Shape(1, 32, n, n, d, True, nheads_k=8)), 0) for n in (2048, 4096) for d in (64, 128)),
    *(Target(Case(BACKWARD, Shape(1, 32, 2048, 2048, d)), 0) for d in (64, 128)),
]


def measure(case: Case | prefill.Case) -> Result:
    if isinstance(case, Case):
        row = simulate(case)
        if not row:
            raise CommandError(f"{case}: there are no kernels for it")
        f = row.figures
        return Result(f.tflops, f.tflops_no_icache, f.pipes["tensor"], f.pipes["mio"], f.balance, row.kernel)
    work = prefill.call(case, "cpu")
    default, no_icache = (simulated(work, settings, "v100") for settings in ("", "icache=false"))
    main = max(default, key=lambda r: r["timing"]["kernel_us"])
    of = main["timing"]
    tflops = [case.flops / sum(r["timing"]["kernel_us"] for r in reports) / 1e6 for reports in (default, no_icache)]
    return Result(tflops[0], tflops[1], of["util"]["tensor"], of["util"]["mio"], of["balance"], main["kernel"])


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.targets", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    report.add_output_options(parser, plot=False)
    parser.add_argument("--only", nargs="+", default=[], metavar="WORD", help="only rows with all these words, as: backward D=64")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="rows simulated at a time, a core and 1 GB each (default 1)")
    options = parser.parse_args(arguments)
    if not volta_fa.info()["simulator"]:
        raise CommandError("this library was built without the simulator: run `make build` in a checkout")
    chosen = [target for target in TARGETS if set(options.only) <= set(target.name.replace(",", "").split())]
    if not chosen:
        raise CommandError(f"no row has all of {' '.join(options.only)}; rows are named as `{TARGETS[0].name}`")
    grid = Grid(
        "Simulated V100 (TFLOP/s: default model, perfect instruction cache)",
        ["case", "target", "TFLOP/s", "perfect i-cache", "tensor pipe", "shared memory", "balance", "main kernel"],
    )
    results = []
    # processes, because the simulator's settings are the process' environment
    spawned = multiprocessing.get_context("spawn")
    with report.progress() as bar, ProcessPoolExecutor(options.jobs, mp_context=spawned) as pool:
        task = bar.add_task("", total=len(chosen))
        for target, r in zip(chosen, pool.map(measure, [target.case for target in chosen])):
            bar.advance(task)
            results.append(r)
            cells = [f"{r.tflops:.1f}", f"{r.tflops_no_icache:.1f}", f"{r.tensor:.0%}", f"{r.mio:.0%}", f"{r.balance:.2f}", r.kernel]
            grid.rows.append([target.name, f"{target.tflops:g}" if target.tflops else "-", *cells])
    header = report.facts("targets", arguments, **{"kind of figures": report.SIMULATED})
    rows = [{"case": t.name, "target": t.tflops, **vars(r)} for t, r in zip(chosen, results)]
    report.deliver(options, header, [grid], rows)
    return 0


if __name__ == "__main__":
    report.command(main)
