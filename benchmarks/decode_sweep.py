"""Sweeps decoding over sequence length, batch, page size and query rows, as tables, a plot and JSON.

    python -m benchmarks.decode_sweep [--markdown FILE] [--plot FILE] [--json FILE]     simulated: one SM's share of a V100
    python -m benchmarks.decode_sweep --device cuda ...                                 measured
    python -m benchmarks.docs DIR                                                       put DIR/decode_sweep.md into the figures

Each sweep changes one size. The base case has 16 sequences of 4096 tokens, one query each, eight query heads per KV head
and pages of 16 tokens. Query rows are seqlen_q times the query heads per KV head. Shares are of the simulated DRAM's
rate, or of a copy kernel's. benchmarks/decode.py lists what a simulation leaves out. The tables also list published rates
of other V100 kernels.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from volta_fa.errors import CommandError

from . import decode, plots, report
from .decode import DRAM_GB_S, Case
from .report import Grid

BASE = Case(128, (4096,) * 16)
#: Values of each sweep, and how a value changes the case.
SWEEPS: dict[str, tuple[tuple[int, ...], Callable[[Case, int], Case]]] = {
    "tokens": ((512, 1024, 2048, 4096, 8192, 16384), lambda case, n: replace(case, lengths=(n,) * len(case.lengths))),
    "sequences": ((1, 2, 4, 8, 16, 32), lambda case, n: replace(case, lengths=case.lengths[:1] * n)),
    "page": ((16, 32, 64, 256), lambda case, n: replace(case, page=n)),
    "rows": ((8, 16, 32, 64), lambda case, n: replace(case, seqlen_q=n // case.group)),
}
#: GB/s of memory that the kernel reads (attention: the cache), derived from published times. This project measured none of them.
PUBLISHED = [
    ("1CatAI/1Cat-vLLM: headdim 256, 6 rows, fp16", "255 to 445", "35 to 39% of its card's 1130 at best"),
    ("1CatAI/1Cat-vLLM: headdim 256, 6 rows, e5m2, 65536 tokens", "131", ""),
    ("exl3's sm_70 laboratory: headdim 256, q4_0", "55", ""),
    ("zh-nj/v100llm: MLA, 16384 x 576", "49", ""),
    ("ninfer-v100: a Q4 matrix times a vector, no attention", "795", "what a V100's DRAM gives"),
    ("a copy kernel", "750 to 790", "Jia 2018, paranumal"),
]


@dataclass
class Point:
    """One case of a sweep, and its timing."""

    sweep: str
    value: int
    case: Case
    us: float
    gb_s: float
    share: float

    def data(self) -> dict[str, Any]:
        return {"sweep": self.sweep, "value": self.value, **asdict(self.case), "us": self.us, "gb_s": self.gb_s, "share": self.share}


def points(
    base: Case, headdims: Sequence[int], sweeps: Sequence[str], run_case: Callable[[Case], dict], advance: Callable[[str], None]
) -> list[Point]:
    found = []
    for headdim in headdims:
        for sweep in sweeps:
            values, change = SWEEPS[sweep]
            for value in values:
                case = change(replace(base, headdim=headdim), value)
                advance(case.name)
                timed = run_case(case)
                found.append(Point(sweep, value, case, timed["us"], timed["gb_s"], timed["share"]))
    return found


def _sweeps(found: Sequence[Point]) -> list[str]:
    return list(dict.fromkeys(p.sweep for p in found))


def grids(found: Sequence[Point]) -> list[Grid]:
    headdims = sorted({p.case.headdim for p in found})
    made = []
    for sweep in _sweeps(found):
        values, _ = SWEEPS[sweep]
        grid = Grid(f"By {sweep}: us, GB/s of the cache, share of the DRAM or copy rate", [sweep, *(f"headdim {d}" for d in headdims)])
        for value in values:
            cells = {p.case.headdim: f"{p.us:.1f}, {p.gb_s:.0f}, {p.share:.0%}" for p in found if (p.sweep, p.value) == (sweep, value)}
            grid.rows.append([str(value), *(cells[d] for d in headdims)])
        made.append(grid)
    made.append(Grid("Published by others, of V100s", ["what", "GB/s", ""], [list(row) for row in PUBLISHED]))
    return made


def plot(found: Sequence[Point], header: dict[str, str], path: Path) -> None:
    sweeps = _sweeps(found)
    title = plots.label(f"Decode on {header['device']}, {header['date']}", 110)
    figure, axes = plots.panels(1, len(sweeps), title, (3 * len(sweeps) + 1, 3.6), sharey=True)
    for axis, sweep in zip(axes[0], sweeps):
        values, _ = SWEEPS[sweep]
        for headdim in sorted({p.case.headdim for p in found}):
            curve = [p for p in found if p.sweep == sweep and p.case.headdim == headdim]
            color = plots.HEADDIM_COLORS[headdim]
            axis.plot([p.value for p in curve], [p.gb_s for p in curve], "o-", color=color, label=f"headdim {headdim}", markersize=4)
        axis.set_xscale("log", base=2)
        axis.set_xticks(values, [str(n) for n in values])
        axis.set(title=f"by {sweep}", ylim=(0, None))
    axes[0][0].set_ylabel("GB/s of the cache")
    plots.shared_legend(figure, axes)
    plots.save(figure, path)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.decode_sweep", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    report.add_output_options(parser)
    parser.add_argument("--device", choices=("simulated", "cuda"), default="simulated")
    parser.add_argument("--headdims", type=int, nargs="+", choices=(64, 128, 256), default=[64, 128, 256])
    parser.add_argument("--tokens", type=int, default=4096, metavar="N", help="length of each sequence, except in the sweep of tokens")
    parser.add_argument("--sweeps", nargs="+", choices=tuple(SWEEPS), default=list(SWEEPS), help="sweeps to run (default: all)")
    options = parser.parse_args(arguments)
    if options.tokens < 1:
        raise CommandError(f"--tokens {options.tokens}: expected a positive number")
    base = replace(BASE, lengths=(options.tokens,) * len(BASE.lengths))
    if options.device == "cuda":
        if not torch.cuda.is_available():
            raise CommandError("--device cuda: this machine has none")
        copy = decode.copy_rate()
        facts = {"device": report.device_name(torch.device("cuda", 0)), "shares are of": f"a copy kernel's {copy:.0f} GB/s"}
        facts["kind of figures"] = "measured"
        run_case = lambda case: decode.measure(case, copy)  # noqa: E731
    else:
        facts = {"device": "simulated V100 (one SM's share)", "shares are of": f"the simulated DRAM's {DRAM_GB_S:.0f} GB/s"}
        facts["kind of figures"] = "simulated, without launch overhead and the combination between blocks"
        run_case = lambda case: decode.simulate(case, "")  # noqa: E731
    header = report.facts("decode_sweep", arguments, **facts)
    with report.progress() as bar:
        task = bar.add_task("decode", total=len(options.headdims) * sum(len(SWEEPS[sweep][0]) for sweep in options.sweeps))

        def advance(name: str) -> None:
            bar.update(task, advance=1, description=name)

        found = points(base, options.headdims, options.sweeps, run_case, advance)
    tables = grids(found)
    data = {"header": header, "points": [p.data() for p in found], "published": PUBLISHED}
    report.deliver(options, header, tables, data, lambda path: plot(found, header, path))
    return 0


if __name__ == "__main__":
    report.command(main)
