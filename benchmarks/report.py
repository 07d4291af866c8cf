"""Formats what the benchmarks print, write and draw. A command makes its `parser`, measures, and calls `deliver` with a header from `facts`
(command, device, date, versions) and tables from `table`, which go to the terminal, to Markdown and to JSON."""

from __future__ import annotations

import argparse
import datetime
import io
import json
import math
import platform
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import matplotlib
import torch
from PIL import Image
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

import volta_fa
from volta_fa.cli import check  # check.choose_device(): the device that --device names
from volta_fa.errors import CommandError
from volta_fa.progress import Progress  # rich's bar; in a pipe, lines

from . import marks

matplotlib.use("Agg")  # no display is needed
from matplotlib import pyplot

#: What headers of simulated results say: volta-sim's times exclude launches (docs/validation/real-cards.md).
SIMULATED = "simulated with tools/volta-sim; each launch takes 10 to 20 us more on a real card"

# Tables are wide. A pipe or a file has no width, for which rich assumes 80 columns.
_WIDTH = None if sys.stdout.isatty() else 200
console = Console(highlight=False, width=_WIDTH)
T = TypeVar("T")

HEADDIM_COLORS = {32: "#7f7f7f", 64: "#c0392b", 96: "#e67e22", 128: "#2c6fbb", 192: "#8e44ad", 256: "#27824a"}
#: By the names of attention.IMPLEMENTATIONS.
COLORS = {"volta_fa": "#c0392b", "eager": "#333333", "eager fp32": "#999999", "SDPA efficient": "#2c6fbb", "SDPA flash": "#27824a"}
MARKERS = {"volta_fa": "o", "eager": "s", "eager fp32": "D", "SDPA efficient": "^", "SDPA flash": "v"}


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
    """Returns a table with a row for each item. `columns`: by title, a function from an item to its cell."""
    return Grid(title, list(columns), [[cell(item) for cell in columns.values()] for item in items])


def _cells(row: Sequence[str]) -> str:
    return "| " + " | ".join(row) + " |"


def parser(module: str, text: str | None, outputs: bool = True, plot: bool = True, measures: bool = False) -> argparse.ArgumentParser:
    """Returns the parser of a command. `outputs` adds --json, --markdown and, if `plot`, --plot, which `deliver` reads. `measures` adds
    --device, which `choose_device` reads."""
    layout = argparse.RawDescriptionHelpFormatter
    made = argparse.ArgumentParser(prog=f"python -m benchmarks.{module}", description=text, formatter_class=layout)
    if outputs:
        made.set_defaults(plot=None)
        made.add_argument("--json", type=Path, metavar="FILE", help="write the results as JSON")
        if plot:
            made.add_argument("--plot", type=Path, metavar="FILE", help="draw the results into a PNG")
        made.add_argument("--markdown", type=Path, metavar="FILE", help="write the results as a section for docs/reference/figures.md")
    if measures:
        made.add_argument("--device", default="auto", help="auto (a supported GPU if there is one, else the CPU), cpu or cuda")
    return made


def facts(module: str, arguments: Sequence[str], **more: str) -> dict[str, str]:
    """Returns the header of results: command, date, commit, versions, and `more`, such as the device."""
    return {
        "command": shlex.join(["python", "-m", *f"benchmarks.{module}".split(), *arguments]),
        "date": datetime.date.today().isoformat(),
        **({"commit": commit} if (commit := marks.commit()) else {}),
        "versions": f"volta_fa {volta_fa.__version__}, torch {torch.__version__}, Python {platform.python_version()}",
        **more,
    }


def facts_of(device: torch.device, module: str, arguments: Sequence[str], **more: str) -> dict[str, str]:
    """Returns the header of results that were measured on a device."""
    about = {"device": device_name(device), "kernels": kernels(device), **more, "kind of figures": "measured"}
    return facts(module, arguments, **about)


def processor() -> str:
    """Returns the name of this machine's CPU."""
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
    """Returns the device of --device. Raises CommandError for a GPU that is absent or that volta_fa has no kernels for."""
    if name not in ("auto", "cpu", "cuda"):
        raise CommandError(f"--device {name}: expected auto, cpu or cuda")
    return torch.device(check.choose_device(name))


def dtype_for(device: torch.device) -> torch.dtype:
    """Returns the dtype to measure on the device: the kernels' fp16 on GPUs, fp32 on the CPU."""
    return torch.float16 if device.type == "cuda" else torch.float32


def kernels(device: torch.device) -> str:
    """Returns as text which code runs on the device: a family of kernels, volta or turing, natively or through PTX on newer GPUs."""
    if device.type != "cuda":
        return "volta_fa's CPU backend (ATen operations)"
    known = volta_fa.info()
    mine = known["devices"][torch.cuda.current_device() if device.index is None else device.index]
    family = next(f for f in known["families"] if f["name"] == mine["family"])
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
    """Yields the items and shows a progress bar on stderr."""
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
    """Shows results, and writes them where the options of `parser` say: `data` to --json, what `draw` draws, a PNG, to --plot.

    kernels: names of the simulated kernels; empty if unknown. --markdown's file gets a mark, an HTML comment with hashes of their code
    (benchmarks/marks.py)."""
    show(header, grids)
    if options.json:
        _write(options.json, json.dumps(data, indent=1) + "\n")
    if options.plot and draw:
        draw(options.plot)
    if options.markdown:
        mark = [marks.mark(kernels)] if header.get("kind of figures", "").startswith("simulated") else []
        _write_markdown(options.markdown, header, grids, options.plot, mark)


def _write_markdown(path: Path, header: dict[str, str], grids: Sequence[Grid], plot: Path | None, mark: Sequence[str]) -> None:
    """Writes a section for `benchmarks.docs`, which copies the plot to images/ beside the page."""
    parts = ["\n".join(f"- {name}: {'`' + value + '`' if name == 'command' else value}" for name, value in header.items())]
    parts += mark
    if plot is not None:
        parts.append(f"![{plot.stem}](images/{plot.name})")
    _write(path, "\n\n".join(parts + [grid.markdown() for grid in grids]) + "\n")


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    console.print(f"wrote {path}", soft_wrap=True)


# ---- figures: panels with a grid, a legend, one resolution --------------------------------------------------------


def panels(rows: int, columns: int, title: str, size: tuple[float, float], **options: Any):
    """Returns a figure and its axes, a (rows, columns) array. `size` in inches; `options` are those of pyplot.subplots."""
    figure, axes = pyplot.subplots(rows, columns, figsize=size, layout="constrained", squeeze=False, **options)
    figure.suptitle(title, fontsize=11)
    for axis in axes.flat:
        axis.grid(True, color="#dddddd", linewidth=0.6)
    return figure, axes


def shared_legend(figure, axes) -> None:
    """Adds a legend below all panels, with each label once."""
    unique = {}
    for axis in axes.flat:
        for handle, text in zip(*axis.get_legend_handles_labels()):
            unique.setdefault(text, handle)
    figure.legend(unique.values(), unique.keys(), loc="outside lower center", ncols=6, fontsize=8)


def label(text: str, size: int = 60) -> str:
    """Returns the text, cut to `size` characters."""
    return text if len(text) <= size else text[: size - 1] + "…"


def save(figure, path: Path) -> None:
    """Writes the figure as a PNG of 64 colors: a quarter of the size of all colors, which every clone of the repository pays for."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rendered = io.BytesIO()
    figure.savefig(rendered, dpi=90, format="png")
    in_few_colors = Image.open(rendered).convert("RGB").quantize(64, dither=Image.Dither.NONE)
    in_few_colors.save(path, "png", optimize=True)
    pyplot.close(figure)
    console.print(f"wrote {path}", soft_wrap=True)


# ---- numbers and commands -----------------------------------------------------------------------------------------


def significant(value: float | None, digits: int = 3) -> str:
    """Returns the number with `digits` significant digits, or "-" for None."""
    if value is None:
        return "-"
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    exponent = math.floor(math.log10(abs(value)))
    return f"{value:.{digits - 1}e}" if exponent < -3 else f"{value:.{max(0, digits - 1 - exponent)}f}"


def ratio(numerator: float | None, denominator: float | None) -> float | None:
    """Returns the quotient; None if a number is missing or the denominator is 0."""
    return numerator / denominator if numerator is not None and denominator else None


def times(value: float | None) -> str:
    """Returns the number as a factor, as 2.4x."""
    return "-" if value is None else f"{significant(value, 2)}x"


def command(main: Callable[[Sequence[str]], int]) -> None:
    """Runs a module's main and exits with its status. A CommandError, a mistake of the user, prints one line and exits with 2."""
    try:
        status = main(sys.argv[1:])
    except CommandError as error:
        print(f"benchmarks: {error}", file=sys.stderr)
        status = 2
    except KeyboardInterrupt:
        print("benchmarks: stopped", file=sys.stderr)
        status = 130
    sys.exit(status)
