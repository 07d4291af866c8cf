"""Formats what the commands print and write: facts about the run, tables as text and Markdown, JSON, progress."""

from __future__ import annotations

import argparse
import datetime
import json
import math
import platform
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

import volta_fa
from volta_fa.errors import CommandError
from volta_fa.progress import Progress

from . import marks

#: What headers of simulated results say: volta-sim's times exclude launches (docs/validation/real-cards.md).
SIMULATED = "simulated with tools/volta-sim; each launch takes 10 to 20 us more on a real card"

# Tables are wide; a pipe or a file has no width of its own.
_WIDTH = None if sys.stdout.isatty() else 200
console = Console(highlight=False, width=_WIDTH)
T = TypeVar("T")


@dataclass
class Grid:
    """A table of text: the first column is left-aligned."""

    title: str
    columns: Sequence[str]
    rows: list[Sequence[str]] = field(default_factory=list)

    def text(self) -> Table:
        table = Table(title=self.title, title_justify="left")
        for i, column in enumerate(self.columns):
            table.add_column(column, justify="right" if i else "left", no_wrap=i == 0, overflow="fold")
        for row in self.rows:
            table.add_row(*row)
        return table

    def markdown(self) -> str:
        lines = [f"**{self.title}**", "", _cells(self.columns), _cells(["---"] + ["---:"] * (len(self.columns) - 1))]
        return "\n".join(lines + [_cells(row) for row in self.rows])


def table(title: str, items: Iterable[T], columns: dict[str, Callable[[T], str]]) -> Grid:
    """Returns a table with a row for each item. `columns`: what a column shows of an item."""
    return Grid(title, list(columns), [[cell(item) for cell in columns.values()] for item in items])


def _cells(row: Sequence[str]) -> str:
    return "| " + " | ".join(row) + " |"


def parser(module: str, text: str | None, outputs: bool = True, plot: bool = True) -> argparse.ArgumentParser:
    """Returns the parser of a command. outputs: with the options that `deliver` reads. plot: the results can be drawn."""
    made = argparse.ArgumentParser(
        prog=f"python -m benchmarks.{module}", description=text, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    if outputs:
        made.set_defaults(plot=None)
        made.add_argument("--json", type=Path, metavar="FILE", help="write the results as JSON")
        if plot:
            made.add_argument("--plot", type=Path, metavar="FILE", help="draw the results into a PNG")
        made.add_argument("--markdown", type=Path, metavar="FILE", help="write the results as a section for docs/reference/figures.md")
    return made


def facts(module: str, arguments: Sequence[str], **more: str) -> dict[str, str]:
    """The header of every result: what ran, on what, when."""
    return {
        "command": shlex.join(["python", "-m", *f"benchmarks.{module}".split(), *arguments]),
        "date": datetime.date.today().isoformat(),
        **({"commit": commit} if (commit := marks.commit()) else {}),
        "versions": f"volta_fa {volta_fa.__version__}, torch {torch.__version__}, Python {platform.python_version()}",
        **more,
    }


def processor() -> str:
    """Name of this machine's CPU."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def device_name(device: torch.device) -> str:
    if device.type != "cuda":
        return f"CPU, {processor()}, threads: {torch.get_num_threads()}"
    major, minor = torch.cuda.get_device_capability(device)
    gib = torch.cuda.get_device_properties(device).total_memory / 2**30
    return f"{torch.cuda.get_device_name(device)} (sm_{major}{minor}, {gib:.0f} GiB, CUDA {torch.version.cuda})"


def choose_device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name not in ("cpu", "cuda"):
        raise CommandError(f"--device {name}: expected auto, cpu or cuda")
    device = torch.device(name, 0) if name == "cuda" else torch.device(name)
    if name == "cuda" and not torch.cuda.is_available():
        raise CommandError(f"--device cuda: torch {torch.__version__} finds no CUDA device here")
    if name == "cuda" and volta_fa.kernel_family(device) is None:
        raise CommandError(f"--device cuda: volta_fa has no kernels for {device_name(device)}")
    return device


def dtype_for(device: torch.device) -> torch.dtype:
    """Returns the dtype to measure on the device: the kernels' fp16 on GPUs, fp32 on the CPU."""
    return torch.float16 if device.type == "cuda" else torch.float32


def kernels(device: torch.device) -> str:
    """Which code runs on the device, and what its speed there means."""
    if device.type != "cuda":
        return "volta_fa's CPU backend (ATen operations)"
    facts = volta_fa.info()
    mine = facts["devices"][torch.cuda.current_device() if device.index is None else device.index]
    family = next(f for f in facts["families"] if f["name"] == mine["family"])
    if mine["native"]:
        return f"family {family['name']}, machine code for sm_{family['sm']}"
    through = f"family {family['name']}, compiled by the driver from PTX for compute_{family['sm']}"
    if family["name"] == "volta":
        return f"{through}: this GPU emulates its tensor-core instructions: errors and memory are as on its own GPUs, times are not"
    return f"{through}, which this GPU runs as it is: times are its own, not those of an sm_{family['sm']}"


def progress(quiet: bool = False) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    # a terminal's bar must not take what goes into a pipe
    redirect = sys.stdout.isatty()
    return Progress(*columns, console=Console(stderr=True), transient=True, disable=quiet, redirect_stdout=redirect)


def track(items: Iterable[T], what: str) -> Iterator[T]:
    """Yields the items and shows how many are done, for commands that print a row when they have it."""
    listed = list(items)
    with progress() as bar:
        task = bar.add_task(what, total=len(listed))
        for item in listed:
            yield item
            bar.advance(task)


def show(header: dict[str, str], grids: Sequence[Grid]) -> None:
    listing = Table.grid(padding=(0, 2))
    for name, value in header.items():
        listing.add_row(name, value)
    console.print(listing, "")
    for grid in grids:
        console.print(grid.text())


def deliver(
    options: argparse.Namespace,
    header: dict[str, str],
    grids: Sequence[Grid],
    data: Any,
    draw: Callable[[Path], None] | None = None,
    kernels: Iterable[str] = (),
) -> None:
    """Shows results, and writes them where the options of `parser` say.

    Args:
        data: for --json.
        draw: draws the results into a PNG, for --plot.
        kernels: those of simulated figures, for the mark of --markdown; empty if they are unknown.
    """
    show(header, grids)
    if options.json:
        write_json(options.json, data)
    if options.plot and draw:
        draw(options.plot)
    if options.markdown:
        mark = [marks.mark(kernels)] if header.get("kind of figures", "").startswith("simulated") else []
        _write_markdown(options.markdown, header, grids, options.plot, mark)


def write_json(path: Path, data: Any) -> None:
    _write(path, json.dumps(data, indent=1) + "\n")


def _write_markdown(path: Path, header: dict[str, str], grids: Sequence[Grid], plot: Path | None, mark: Sequence[str]) -> None:
    """A section for `benchmarks.docs`, which puts plots beside each other into images/."""
    parts = ["\n".join(f"- {name}: {'`' + value + '`' if name == 'command' else value}" for name, value in header.items())]
    parts += mark
    if plot is not None:
        parts.append(f"![{plot.stem}](images/{plot.name})")
    _write(path, "\n\n".join(parts + [grid.markdown() for grid in grids]) + "\n")


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    console.print(f"wrote {path}", soft_wrap=True)


def significant(value: float | None, digits: int = 3) -> str:
    """A number with so many significant digits."""
    if value is None:
        return "-"
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    exponent = math.floor(math.log10(abs(value)))
    return f"{value:.{digits - 1}e}" if exponent < -3 else f"{value:.{max(0, digits - 1 - exponent)}f}"


def ratio(numerator: float | None, denominator: float | None) -> float | None:
    return numerator / denominator if numerator is not None and denominator else None


def times(value: float | None) -> str:
    return "-" if value is None else f"{significant(value, 2)}x"


def command(main: Callable[[Sequence[str]], int]) -> None:
    """Run a module's main; what the user did wrong is one line."""
    try:
        status = main(sys.argv[1:])
    except CommandError as error:
        print(f"benchmarks: {error}", file=sys.stderr)
        status = 2
    except KeyboardInterrupt:
        print("benchmarks: stopped", file=sys.stderr)
        status = 130
    sys.exit(status)
