"""Compares volta-sim, the simulator of tools/volta-sim, with figures that others published of real cards.

    cargo build --release -p volta-sim
    python -m benchmarks.validation                # simulates the probes, kernels of tools/volta-sim/tests/fixtures/probe.cu, again
    python -m benchmarks.validation --kept         # the file's figures only: needs no simulator

benchmarks/validation.csv has a row for each published figure, which `rows` reads into Row: what was measured, what volta-sim gave, the band
of the ratio, and the source. Other projects' kernels are not in this repository, so their rows keep the simulated figure. A row without
one was not simulated. The command fails if a ratio of times differs from 1 by more than its band: 5% for cycles, 10% for times and rates.
A row with another band, or without a simulated figure, has a reason."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from volta_fa.errors import CommandError

from . import report
from .report import Grid

_ROOT = Path(__file__).parents[1]
ROWS = Path(__file__).with_name("validation.csv")
_FIXTURES = _ROOT / "tools/volta-sim/tests/fixtures"
_SIMULATOR = _ROOT / "target/release/volta-sim"
_BANDS = {"cycles": 0.05, "us": 0.10, "ms": 0.10, "TFLOP/s": 0.10}


@dataclass(frozen=True)
class Row:
    """A published figure beside the simulated one."""

    card: str  # a name of --gpu
    case: str
    unit: str  # a key of _BANDS
    measured: float
    simulated: float | None
    perfect: float | None  # with a perfect instruction cache
    model: str  # date of volta-sim's model that gave the simulated figure
    built: bool  # the kernel's machine code was available to simulate
    probe: str  # kernel of probe.cu; "": another project's kernel
    per: int  # operations of the probe, by which its cycles are divided
    own_band: float | None  # None: the unit's
    reason: str  # of own_band, or why nothing was simulated
    source: str

    @property
    def band(self) -> float:
        return self.own_band if self.own_band is not None else _BANDS[self.unit]

    @property
    def ratio(self) -> float | None:
        """Returns simulated time / measured time; of TFLOP/s, whose inverse is time, measured / simulated."""
        if self.simulated is None:
            return None
        return self.measured / self.simulated if self.unit == "TFLOP/s" else self.simulated / self.measured

    @property
    def holds(self) -> bool:
        return self.ratio is None or abs(self.ratio - 1) <= self.band


def rows(path: Path = ROWS) -> list[Row]:
    def number(text: str) -> float | None:
        return float(text) if text else None

    with path.open(newline="") as file:
        found = [
            Row(
                **{name: row[name] for name in ("card", "case", "unit", "reason", "source")},
                **{name: number(row[name]) for name in ("measured", "simulated")},
                perfect=number(row["simulated_perfect_icache"]),
                model=row["model_date"],
                built=row["code_available"] == "yes",
                probe=row["probe_kernel"],
                per=int(row["probe_operations"] or 1),
                own_band=number(row["band"]),
            )
            for row in csv.DictReader(file)
        ]
    for row in found:
        if (row.own_band is not None or row.simulated is None) and not row.reason:
            raise CommandError(f"{path.name}: got no reason for {row.case!r}, expected one for a band of its own or without a simulation")
    return found


def clocked_cycles(simulator: Path, gpu: str, probe: str) -> float:
    """Returns the simulated cycles between the two clock reads of a probe, which takes the pointers `words` and `cycles`."""
    sm = 75 if gpu == "t4" else 70
    buffers = [{"name": name, "size": 256, "init": "zeros"} for name in ("words", "cycles")]
    relocs = [{"at": 8 * i, "buffer": buffer["name"], "offset": 0} for i, buffer in enumerate(buffers)]
    launch = {"cubin": str(_FIXTURES / f"probe_sm{sm}.cubin"), "kernel": probe, "grid": [1], "block": [32], "buffers": buffers}
    launch["params"] = [{"bytes": {"hex": "00" * 16, "relocs": relocs}}]
    with tempfile.TemporaryDirectory() as name:
        job, result = Path(name) / "job.json", Path(name) / "report.json"
        job.write_text(json.dumps(launch))
        command = [simulator, job, "--timing", "--gpu", gpu, "--set", "icache=false", "--json", result]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise CommandError(f"{simulator}: {done.stderr.strip()}")
        return json.loads(result.read_text())["timing"]["clocked_cycles"]


def simulate(row: Row, simulator: Path) -> Row:
    """Returns the row with a fresh figure if it is a probe's."""
    return replace(row, simulated=clocked_cycles(simulator, row.card, row.probe) / row.per, model="now") if row.probe else row


def grid(found: Sequence[Row]) -> Grid:
    columns = ["case", "card", "measured", "simulated", "perfect i-cache", "time ratio", "band", "code here", "model", "source", "why"]
    table = Grid("volta-sim beside real cards", columns)
    for row in found:
        number = lambda x: "-" if x is None else f"{x:.4g}"  # noqa: E731
        ratio = "-" if row.ratio is None else f"{row.ratio:.2f}" + ("" if row.holds else " (out)")
        cells = (f"{row.measured:.4g} {row.unit}", number(row.simulated), number(row.perfect), ratio, f"{row.band:.0%}")
        table.rows.append([row.case, row.card, *cells, "yes" if row.built else "no", row.model or "-", row.source, row.reason or "-"])
    return table


def main(arguments: Sequence[str]) -> int:
    parser = report.parser("validation", __doc__, plot=False)  # with --json and --markdown, which deliver() writes
    parser.add_argument("--rows", type=Path, default=ROWS, help="file of the figures")
    parser.add_argument("--kept", action="store_true", help="run no probe")
    words = "volta-sim's command (default $VOLTA_SIM, else target/release/volta-sim)"
    parser.add_argument("--simulator", type=Path, default=Path(os.environ.get("VOLTA_SIM", _SIMULATOR)), help=words)
    options = parser.parse_args(arguments)
    found = rows(options.rows)
    if not options.kept:
        if not options.simulator.exists():
            built = "run `cargo build --release -p volta-sim`, or pass --kept"
            raise CommandError(f"--simulator: got {options.simulator}, which does not exist, expected volta-sim's command; {built}")
        found = [simulate(row, options.simulator) for row in report.track(found, "rows")]
    header = report.facts("validation", arguments, **{"kind of figures": "published of real cards; simulated with tools/volta-sim"})
    report.deliver(options, header, [grid(found)], [vars(row) | {"ratio": row.ratio, "holds": row.holds} for row in found])
    out = [row.case for row in found if not row.holds]
    if out:
        report.console.print(f"outside their bands: {', '.join(out)}")
    return bool(out)


if __name__ == "__main__":
    report.command(main)
