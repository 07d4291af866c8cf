"""Simulates headdim 512 on a V100, a T4 and an RTX 2080 Ti: forward, backward and decoding, by the default model and by one with a
perfect instruction cache.

Forward and backward are as `benchmarks.volta` has them: a V100 has 32 heads on 8, a Turing chip a head for each SM. One head is that of
an image decoder. Decoding is as `benchmarks.decode --wide` has it: 8 sequences of 4096 tokens, and shares of the DRAM rate.

--resume FILE keeps each figure in a line of JSON, so that an interrupted command continues.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from . import decode, report, volta
from .report import Grid
from .shapes import Shape
from .volta import BACKWARD, FORWARD, GPUS

#: What has targets.
CARDS = {name: GPUS[name] for name in ("v100", "t4", "rtx2080ti")}


@dataclass(frozen=True)
class Row:
    """A case on one GPU. `case`: of a pass, or of decoding."""

    name: str
    gpu: str
    case: volta.Case | decode.Case


def rows() -> Iterator[Row]:
    for gpu, facts in CARDS.items():
        is_v100 = gpu == "v100"
        heads, on = (32, 8) if is_v100 else (facts.sms, facts.sms)

        def of(direction: str, n: int, causal: bool = False, nheads: int = heads, nheads_k: int = on, gpu: str = gpu) -> Row:
            what = "one head, " if nheads == 1 else ""
            case = volta.Case(direction, Shape(1, nheads, n, n, 512, causal, nheads_k=nheads_k))
            return Row(f"{direction}, {what}N={n}{', causal' if causal else ''}", gpu, case)

        yield of(FORWARD, 2048)
        if gpu == "rtx2080ti":
            continue
        if is_v100:
            yield of(FORWARD, 4096)
        yield of(FORWARD, 4096, causal=True)
        yield from (of(FORWARD, n, nheads=1, nheads_k=1) for n in (4096, 16384))
        yield of(BACKWARD, 2048)
        unquantized = (case for case in decode.wide_cases(gpu) if case.target)
        yield from (Row(f"decode, {case.kv_heads * case.group} heads on {case.kv_heads}", gpu, case) for case in unquantized)


def simulate(row: Row) -> list[float]:
    """Returns TFLOP/s, or the share of the DRAM rate, of both models."""
    if isinstance(row.case, decode.Case):
        return [decode.simulate(row.case, settings, row.gpu)["share"] for settings in ("", "icache=false")]
    found = volta.simulate(row.case, row.gpu)
    assert found, "each family has kernels of headdim 512"
    return [found.figures.tflops, found.figures.tflops_no_icache]


def cell(row: Row, figures: Sequence[float] | None) -> str:
    if figures is None:
        return "not simulated"
    if isinstance(row.case, decode.Case):
        return " / ".join(f"{share:.1%}" for share in figures) + " of DRAM"
    speeds = " / ".join(f"{speed:.1f}" for speed in figures)
    return f"{speeds} ({figures[0] / GPUS[row.gpu].peak_tflops:.1%})"


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.headdim_512", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    report.add_output_options(parser, plot=False)
    parser.add_argument("--only", default="", metavar="TEXT", help="simulate only cases whose GPU and name contain TEXT")
    parser.add_argument("--resume", type=Path, metavar="FILE", help="keep figures in this file, and simulate only those that it has not")
    options = parser.parse_args(arguments)
    lines = options.resume.read_text().splitlines() if options.resume and options.resume.exists() else []
    found = {(line["gpu"], line["name"]): line["figures"] for line in map(json.loads, lines)}
    listed = list(rows())
    with report.progress() as bar:
        todo = [row for row in listed if (row.gpu, row.name) not in found and options.only in f"{row.gpu} {row.name}"]
        task = bar.add_task("", total=len(todo))
        for row in todo:
            bar.update(task, description=f"{row.gpu} {row.name}")
            found[row.gpu, row.name] = simulate(row)
            if options.resume:
                with options.resume.open("a") as file:
                    file.write(json.dumps({"gpu": row.gpu, "name": row.name, "figures": found[row.gpu, row.name]}) + "\n")
            bar.advance(task)
    title = "Headdim 512: TFLOP/s by the default model / a perfect instruction cache (share of the tensor pipe)"
    grid = Grid(title, ["case", *(gpu.title for gpu in CARDS.values())])
    for name in dict.fromkeys(row.name for row in listed):
        of_gpu = {row.gpu: cell(row, found.get((row.gpu, name))) for row in listed if row.name == name}
        grid.rows.append([name, *(of_gpu.get(gpu, "") for gpu in CARDS)])
    header = report.facts("headdim_512", arguments, **{"kind of figures": report.SIMULATED})
    data = [{"gpu": gpu, "name": name, "figures": of} for (gpu, name), of in found.items()]
    # rows of the file may be of other kernels
    report.deliver(options, header, [grid], data, **({"kernels": ()} if lines else {}))
    return 0


if __name__ == "__main__":
    report.command(main)
