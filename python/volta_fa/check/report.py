"""`Settings` of `python -m volta_fa check`, and `Findings`, all that it finds, with what shows them: progress, one printed page, a plot,
and the JSON file that users send. check/__init__.py fills the findings, and calls `introduce`, `show`, `write` and `conclude`, in this
order. The parts of a check are "right" (correctness), "fast" (speed) and "tune"."""

from __future__ import annotations

import json
import math
import os
import shlex
import sys
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from .. import diagnostics, progress
from . import performance
from .correctness import INCOMPLETE, RIGHT, WRONG, KernelResult, Worst  # outcomes; what the check of a kernel found; its largest error
from .kernels import Target  # the device: a GPU, the simulator or the CPU

# Names of the implementations. GROUP and PAGE: query heads of a KV head, tokens of a page. Point, CachePoint: times of a shape; Speeds: all
from .performance import DETERMINISTIC, EFFICIENT, GROUP, MATH, PAGE, VOLTA_FA, CachePoint, Point, Speeds
from .tune import Tuned  # the choices in the tuning file, or why there is none

#: Version of the JSON's structure.
FORMAT = 1
# 140 columns in a pipe or a file, which has no width of its own
_console = Console(highlight=False, width=None if sys.stdout.isatty() or "COLUMNS" in os.environ else 140)

#: Kernel passes, and what the page calls them.
_PASSES = {
    "Forward": "forward",
    "ForwardStreamK": "forward, stream-K",
    "ForwardSplit": "forward, float32",
    "ForwardSplitStreamK": "forward, float32, stream-K",
    "BackwardPreprocess": "backward, preprocess",
    "Backward": "backward, atomics",
    "BackwardStreamK": "backward, stream-K",
    "BackwardDkDv": "deterministic, dk and dv",
    "BackwardDq": "deterministic, dq",
    "BackwardPostprocess": "backward, postprocess",
    "BackwardFused": "backward, whole",
    "BackwardScores": "large headdim, P and dS",
    "BackwardGradients": "large headdim, gradients",
    "BackwardSplitScores": "float32, P and dS",
    "BackwardSplitGradients": "float32, gradients",
    "Merge": "merge",
    "FastPrepare": "int8 scores, prepare",
    "FastForward": "int8 scores, forward",
    "Decode": "KV cache, decode",
    "DecodeMla": "KV cache, latents",
    "Prefill": "KV cache, prefill",
    "PrefillStreamK": "KV cache, stream-K",
    "Append": "KV cache, append",
    "Dequantize": "KV cache, dequantize",
    "Cast": "bf16 or fp32 to fp16",
    "SparseSelect": "sparse latents, select",
    "SparseMla": "sparse latents",
    "Indexer": "indexer",
}


@dataclass(frozen=True)
class Settings:
    """Settings from the command line."""

    target: Target
    output: Path  # folder of the report
    seed: int = 0
    quick: bool = False  # one problem of each kernel, and fewer shapes to time
    tune: bool = False  # whether to write a tuning file
    kernels: str = "*"  # glob of kernel names
    limit: float | None = None  # seconds; None: the default

    @property
    def command(self) -> str:
        """The command that continues or repeats the check, with the default time limit."""
        device = self.target.kind if self.target.kind != "cuda" else str(self.target.device)
        words = ["python", "-m", "volta_fa", "check", "--device", device, "--output", str(self.output)]
        words += ["--seed", str(self.seed)] * (self.seed != 0)
        words += ["--quick"] * self.quick + ["--tune"] * self.tune
        words += ["--kernels", self.kernels] * (self.kernels != "*")
        return shlex.join(words)


@dataclass
class Findings:
    """All results of a check."""

    settings: Settings
    machine: dict[str, Any] = field(default_factory=dict)  # of `machine.describe`
    trouble: str | None = None  # why this torch cannot run on the GPU
    results: list[KernelResult] = field(default_factory=list)
    continued: int = 0  # number of results from an earlier, unfinished check
    unreached: list[dict[str, Any]] = field(default_factory=list)  # entries of `info()`: not checked, for lack of time or after crashes
    unfit: list[str] = field(default_factory=list)  # kernels that need more shared memory than the GPU has
    speeds: Speeds = field(default_factory=Speeds)
    tuned: Tuned | None = None
    seconds: dict[str, float] = field(default_factory=dict)  # of "load", "right", "fast", "tune" and "all"

    @property
    def failed(self) -> list[str]:
        """Names of wrong kernels."""
        return [v.kernel for v in self.results if v.failures]

    @property
    def unchecked(self) -> list[str]:
        """Names of kernels without a verdict, for lack of time or another reason. Plans still use them."""
        doubtful = [v.kernel for v in self.results if v.inconclusive and not v.failures]
        return [*doubtful, *(v["name"] for v in self.unreached)]

    @property
    def wrong(self) -> list[str]:
        """All that is wrong: names of kernels, and "torch", "speed" or "tuning" if that part of the check had an error."""
        parts = {"torch": self.trouble, "speed": self.speeds.troubles, "tuning": self.tuned and self.tuned.trouble}
        return [*self.failed, *(name for name, trouble in parts.items() if trouble)]

    @property
    def outcome(self) -> str:
        """RIGHT, WRONG or INCOMPLETE."""
        return WRONG if self.wrong else INCOMPLETE if self.unchecked or not self.results else RIGHT


#: GPU utilization in percent before the check from which another program is assumed to use the GPU.
_BUSY = 25


def say_trouble(text: str) -> None:
    """Prints why this torch cannot run on the GPU, before anything else."""
    _console.print(f"[red]{text}[/red]", "", soft_wrap=True)


def introduce(facts: dict[str, Any]) -> None:
    """Prints the machine, as `machine.describe` has it: a name and a text in each line."""
    versions, card = facts["versions"], facts.get("card")
    table = Table.grid(padding=(0, 2))
    if card:
        table.add_row("card", f"{card['name']} (sm_{card['capability'].replace('.', '')}), {card['sms']} SMs, {card['memory_gib']} GiB")
        if "nvidia_smi" in card:
            table.add_row("clocks", f"unknown: nvidia-smi {card['nvidia_smi']}")
        else:
            clocks = f"SM {_of_max(card, 'sm_clock_mhz')} MHz, memory {_of_max(card, 'memory_clock_mhz')} MHz"
            power = f"{_text(card['power_limit_w'])} of {_text(card['power_limit_max_w'])} W allowed"
            table.add_row("driver", f"{_text(card['driver'])}; {clocks}; {power}; ECC {_text(card['ecc'])}")
    elif facts["target"] == "simulator":
        table.add_row("device", "a simulated V100: sm_70 machine code on this machine's CPU")
    else:
        table.add_row("device", "the CPU: ATen operations, no kernels")
        if "no_gpu" in facts:
            table.add_row("GPU", f"none: {facts['no_gpu']}")
    built_for = " ".join(facts["torch_architectures"]) or "no GPU"
    table.add_row("torch", f"{versions['torch']} (CUDA {versions['cuda'] or 'none'}; for {built_for}), Python {versions['python']}")
    table.add_row("library", f"volta_fa {versions['volta_fa']}, {facts['library']}")
    for number, family in enumerate(facts["families"]):
        how = "its machine code" if family["native"] else "PTX, compiled by the driver"
        then = "kernels" if number == 0 else "and then"
        table.add_row(then, f"family {family['name']}, {how}")
    if card and (card.get("utilization_percent") or 0) > _BUSY:
        table.add_row("", "[yellow]another program uses this GPU: times are too long, verdicts hold[/yellow]")
    if facts["families"] and not diagnostics.loads_machine_code():
        table.add_row("", "[yellow]the driver is older than 525, so it compiles the kernels: loading takes minutes, once[/yellow]")
    elif facts["families"] and not any(family["native"] for family in facts["families"]):
        table.add_row("", "[yellow]made for older cards: results are what they are there, times are not[/yellow]")
    _console.print(table)


def say_continued(note: str, done: int, total: int) -> None:
    """Prints what was found of an earlier, unfinished check: results of `done` of `total` kernels, or the reason to ignore it."""
    if note:
        _console.print(f"[yellow]{note}[/yellow]", soft_wrap=True)
    if done:
        _console.print(f"continues an unfinished check: {done} of {total} kernels are done", soft_wrap=True)


def _text(value: Any) -> str:  # None: nvidia-smi has no value
    return "unknown" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def _of_max(card: dict[str, Any], name: str) -> str:
    """Returns a clock of nvidia-smi beside its maximum."""
    return f"{_text(card[name])} of {_text(card[name.replace('_mhz', '_max_mhz')])}"


class Progress(progress.Progress):
    """A progress bar for each part of the check; in a pipe, lines (volta_fa.progress)."""

    def __init__(self) -> None:
        columns = (
            TextColumn("{task.description:<6}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[at]}"),
        )
        super().__init__(*columns, console=_console, transient=True)

    def begin(self, name: str, steps: int, done: int = 0) -> None:
        """Begins a part of this number of steps."""
        self._task = self.add_task(name, total=steps, completed=done, at="")

    def step(self, at: str) -> None:
        """Takes one step. `at`: its name, shown at the end of the bar."""
        self.update(self._task, advance=1, at=at)


def show(findings: Findings) -> None:
    """Prints the page between the machine and the outcome: correctness, speeds, tuning."""
    if findings.trouble is None:
        _show_verdicts(findings)
        _show_speeds(findings.speeds)
        if findings.tuned:
            _console.print(findings.tuned.summary, soft_wrap=True)


def conclude(findings: Findings) -> None:
    """Prints the last lines: seconds of the parts, the outcome, and the command that checks what is left."""
    seconds = ", ".join(f"{name} {value:.0f}" for name, value in findings.seconds.items())
    left, total = len(findings.unchecked), len(findings.results) + len(findings.unreached)
    to_finish = f"{left} of {total} kernels are not checked. To finish: {findings.settings.command}"
    wrong = ", ".join(findings.wrong[:_MOST_FAILURES])
    if len(findings.wrong) > _MOST_FAILURES:
        wrong += f" and {len(findings.wrong) - _MOST_FAILURES} others"
    right = (
        f"{total} kernels."
        if findings.settings.target.has_kernels
        else f"the CPU backend in {total} cases. No kernel ran: that needs a GPU."
    )
    text = {
        RIGHT: f"[green]All is right:[/green] {right}",
        WRONG: f"[red]Wrong:[/red] {wrong}." + (f" {to_finish}" if left else ""),
        INCOMPLETE: f"[yellow]Incomplete:[/yellow] {to_finish}",
    }
    _console.print(f"seconds: {seconds}\n\n{text[findings.outcome]}", soft_wrap=True)


#: Maximum number of failures, names and reasons of one kind on the page; the JSON file has all.
_MOST_FAILURES = 12


def _show_verdicts(findings: Findings) -> None:
    """Prints a row for each family and pass (correct kernels, the largest error as a share of the allowed one, its result and kind), and
    the failures."""
    by_pass: dict[tuple[str, str], list[KernelResult]] = defaultdict(list)
    for result in findings.results:
        by_pass[result.family, result.pass_].append(result)
    unreached = Counter((v["family"], v["pass"]) for v in findings.unreached)
    _console.print("\nRight: errors as a share of what is allowed")
    table = _table("kernels", "right", "worst", "of", padding=2)
    for family, pass_ in dict.fromkeys([*by_pass, *unreached]):
        results = by_pass[family, pass_]
        worst = max((v.worst for v in results), key=lambda w: w.share, default=Worst())
        passed, total = sum(v.passed for v in results), len(results) + unreached[family, pass_]
        what = f"{worst.result}, {worst.kind}" if worst.result else "-"
        table.add_row(f"{family} {_PASSES[pass_]}", f"{passed} of {total}", _percent(worst.share) if results else "-", what)
    _console.print(table)
    failed = [v for v in findings.results if v.failures]
    _show_kernels("red", [f"[red]{v.kernel} failed[/red]: {_failure(v)}" for v in failed])
    doubtful = [v for v in findings.results if v.inconclusive]
    _show_kernels("yellow", [f"[yellow]{v.kernel} could not be checked[/yellow]: {v.inconclusive[0]}" for v in doubtful])
    if findings.unfit:
        _console.print(f"{len(findings.unfit)} others need more shared memory than this card has")
    for note in sorted({v.note for v in findings.results if v.note}):
        _console.print(f"{', '.join(v.kernel for v in findings.results if v.note == note)}: {note}", soft_wrap=True)
    if not all(v.poisoned for v in findings.results):
        _console.print("memory was not filled with NaN before each call: PyTorch's allocator does not hand out what was just freed")
    if failed and not findings.settings.tune and findings.settings.target.kind == "cuda":
        _console.print("with --tune, plans on this card will not take them any more")
    if findings.unchecked:
        _console.print(f"[yellow]{len(findings.unchecked)} are not checked[/yellow]; plans take them all the same", soft_wrap=True)


def _show_kernels(color: str, lines: Sequence[str]) -> None:
    """Prints a line for each kernel, at most _MOST_FAILURES."""
    for line in lines[:_MOST_FAILURES]:
        _console.print(line, soft_wrap=True)
    if len(lines) > _MOST_FAILURES:
        _console.print(f"[{color}]and {len(lines) - _MOST_FAILURES} others[/{color}]: the JSON file names them")


def _failure(result: KernelResult) -> str:
    """Returns a kernel's worst error if it is too large, else its first failure, and the number of failures."""
    worst, text = result.worst, result.failures[0]
    if worst.share > 1:
        text = f"{worst.result}: {worst.kind} error {worst.error:.3g}, allowed {worst.allowed:.3g} ({worst.problem}, seed {worst.seed})"
    return text + (f"; {len(result.failures)} failures in all" if len(result.failures) > 1 else "")


def _table(*columns: str, padding: int = 1) -> Table:
    """Returns a table without a frame. Figures are on the right of their columns."""
    table = Table(box=None, padding=(0, padding), pad_edge=False)
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number and column != "of" else "left", no_wrap=True)
    return table


def _percent(share: float) -> str:
    return f"{share:.0%}" if share < 10 else f"{share:.0f} x" if math.isfinite(share) else "infinite"


#: Sequence lengths on the page; the plot and the JSON have all.
_SHOWN_SEQLENS = (512, 2048, 8192)


def _show_speeds(speeds: Speeds) -> None:
    """Prints figures of the card, and a row for each shape."""
    if speeds.note:
        _console.print(f"\nFast: {speeds.note}", soft_wrap=True)
        return
    card = speeds.card
    if card:
        figures = [
            f"GEMM ({card['gemm']}) {card.get('gemm_tflops', math.nan):.1f} TFLOP/s",
            f"copy {card.get('copy_gb_s', math.nan):.0f} GB/s",
        ]
        if "atomic_adds_lines_g_s" in card:
            lines, rows = card["atomic_adds_lines_g_s"], card["atomic_adds_rows_g_s"]
            figures.append(f"fp32 atomic adds {lines:.0f} G/s in lines of 128 bytes, {rows:.0f} G/s in rows of 32")
        _console.print("\nFast: " + "; ".join(figures), soft_wrap=True)
    if speeds.missing:
        _console.print(f"\nFast: {speeds.missing}", soft_wrap=True)
    shown = [p for p in speeds.points if p.seqlen in _SHOWN_SEQLENS] or speeds.points
    predicted = speeds.predictions is not None
    heads = {p.direction: p.nheads for p in speeds.points}
    _console.print("TFLOP/s" + "".join(f", {n} heads {direction}" for direction, n in heads.items()))
    share = ["pred."] if predicted else []
    table = _table("seqlen, headdim", "fwd", "eff.", "math", *share, "bwd", "det.", "eff.", "math", *share)
    for (seqlen, headdim, causal), pair in _pairs(shown).items():
        row = [f"{seqlen}, {headdim}" + (", causal" if causal else "")]
        for direction, names in (("forward", (VOLTA_FA, EFFICIENT, MATH)), ("backward", (VOLTA_FA, DETERMINISTIC, EFFICIENT, MATH))):
            point = pair.get(direction)
            row += [_number(point.tflops(name), point.missing.get(name)) if point else "-" for name in names]
            if predicted:
                row.append(f"{point.of_prediction:.0%}" if point and point.of_prediction else "-")
        table.add_row(*row)
    _console.print(table)
    _console.print("det.: deterministic; eff., math: PyTorch's own" + ("; pred.: share of the simulated V100's" if predicted else ""))
    _show_cached(speeds.cached)
    for trouble in speeds.troubles[:_MOST_FAILURES]:
        _console.print(f"[red]failed[/red]: {trouble}", soft_wrap=True)
    ratios = [r for p in speeds.points if (r := p.of_prediction)]
    if ratios:
        _console.print(f"of what was predicted: median {median(ratios):.0%}, from {min(ratios):.0%} to {max(ratios):.0%}")
    missing = [p.missing for p in speeds.points] + [p.missing for p in speeds.cached]
    late = sum(why == performance.OUT_OF_TIME for of_point in missing for why in of_point.values())
    if late:
        _console.print(f"{late} figures were left out for lack of time")


def _show_cached(points: Sequence[CachePoint]) -> None:
    """Prints a row for each shape with a KV cache."""
    if not points:
        return
    _console.print(
        f"KV cache, pages of {PAGE} tokens, {GROUP} query heads a KV head; GB/s of the cache, prefill TFLOP/s; beside it dense tensors"
    )
    table = _table("sequences", "volta_fa", "eff.", "math")
    for point in points:
        table.add_row(str(point), *(_number(point.speed(name), point.missing.get(name)) for name in (VOLTA_FA, EFFICIENT, MATH)))
    _console.print(table)


def _pairs(points: Sequence[Point]) -> dict[tuple[int, int, bool], dict[str, Point]]:
    """Returns the points by (seqlen, headdim, causal) and direction, in the order of the page's rows."""
    found: dict[tuple[int, int, bool], dict[str, Point]] = defaultdict(dict)
    for point in sorted(points, key=lambda p: (p.headdim, p.causal, p.seqlen)):
        found[point.seqlen, point.headdim, point.causal][point.direction] = point
    return found


def _number(found: float | None, missing: str | None) -> str:
    """Returns a speed in three digits; without one "memory" if it was used up, else "-"."""
    if found is not None:
        return f"{found:.0f}" if found >= 100 else f"{found:.1f}" if found >= 1 else f"{found:.2g}"
    return "memory" if missing == performance.OUT_OF_MEMORY else "-"


def write(findings: Findings) -> None:
    """Writes the JSON file, and the plot if anything was timed."""
    output = findings.settings.output
    output.mkdir(parents=True, exist_ok=True)
    path = output / "volta_fa-check.json"
    path.write_text(json.dumps(data(findings), indent=1, allow_nan=False) + "\n")
    _console.print(
        f"report: {path}: versions, GPU, driver, clocks, and each kernel's error and time; no host name, user name or serial number"
        + (f"\n{diagnostics.send(path)}" if findings.settings.target.kind == "cuda" else ""),
        soft_wrap=True,
    )
    if any(point.ms for point in findings.speeds.points):
        _console.print(f"plot: {plot(findings, output / 'volta_fa-check.png')}", soft_wrap=True)


def data(findings: Findings) -> dict[str, Any]:
    """Returns the findings as the JSON file has them."""
    settings, speeds = findings.settings, findings.speeds
    predictions = {k: v for k, v in speeds.predictions.items() if k != "points"} if speeds.predictions else None
    return {
        "format": FORMAT,
        "outcome": findings.outcome,
        "wrong": findings.wrong,
        "not_checked": findings.unchecked,
        "to_finish": settings.command if findings.unchecked else None,
        "settings": {name: getattr(settings, name) for name in ("seed", "quick", "tune", "kernels", "limit")},
        "seconds": {name: round(value, 1) for name, value in findings.seconds.items()},
        "trouble": findings.trouble,
        "machine": findings.machine,
        "right": [result.data() for result in findings.results],
        "continued": findings.continued,
        "unfit": findings.unfit,
        "fast": {
            "card": speeds.card,
            "points": [point.data() for point in speeds.points],
            "cached": [point.data() for point in speeds.cached],
            "predictions": predictions,
            "troubles": speeds.troubles,
            "missing": speeds.missing,
            "note": speeds.note,
        },
        "tune": findings.tuned.data() if findings.tuned else None,
    }


_COLORS = {VOLTA_FA: "#c0392b", DETERMINISTIC: "#e67e22", EFFICIENT: "#2c6fbb", MATH: "#333333", "predicted": "#8c8c8c"}


def plot(findings: Findings, path: Path) -> Path:
    """Plots TFLOP/s over seqlen: a row for each direction and mask, a column for each headdim. The band is the simulator's prediction,
    from the default model to a perfect instruction cache."""
    import matplotlib

    matplotlib.use("Agg")  # no display is needed
    from matplotlib import pyplot

    points = findings.speeds.points
    headdims = sorted({p.headdim for p in points})
    seqlens = sorted({p.seqlen for p in points})
    kinds = [(direction, causal) for direction in performance.HEADS for causal in (False, True)]
    size = (4.2 * max(len(headdims), 2), 10)
    figure, axes = pyplot.subplots(len(kinds), len(headdims), figsize=size, layout="constrained", squeeze=False, sharex=True)
    for row, (direction, causal) in zip(axes, kinds):
        for axis, headdim in zip(row, headdims):
            of_axis = [p for p in points if (p.direction, p.causal, p.headdim) == (direction, causal, headdim)]
            curve = sorted(of_axis, key=lambda p: p.seqlen)
            for name in (MATH, EFFICIENT, DETERMINISTIC, VOLTA_FA):
                timed = [(p.seqlen, p.tflops(name)) for p in curve if name in p.ms]
                if timed:
                    axis.plot(*zip(*timed), "o-", color=_COLORS[name], label=name, markersize=3)
            band = [(p.seqlen, *p.predicted) for p in curve if p.predicted]
            if band:
                n, low, high = zip(*band)
                axis.fill_between(n, low, high, color=_COLORS["predicted"], alpha=0.35, label="predicted for a V100")
                axis.plot(n, low, "--", color=_COLORS["predicted"], linewidth=1)
            axis.set_xscale("log", base=2)
            axis.set_xticks(seqlens, [str(n) for n in seqlens])
            axis.set_ylim(bottom=0)
            axis.grid(True, color="#dddddd", linewidth=0.6)
            axis.set_title(f"{direction}{', causal' if causal else ''}, headdim {headdim}", fontsize=9)
        row[0].set_ylabel("TFLOP/s")
    for axis in axes[-1]:
        axis.set_xlabel("seqlen")
    facts = findings.machine
    name = facts["card"]["name"] if "card" in facts else "CPU"
    figure.suptitle(
        f"volta_fa {facts['versions']['volta_fa']} on {name}, torch {facts['versions']['torch']}, {facts['date'][:10]}", fontsize=11
    )
    unique = {text: handle for axis in axes.flat for handle, text in zip(*axis.get_legend_handles_labels())}
    figure.legend(unique.values(), unique.keys(), loc="outside lower center", ncols=5, fontsize=8)
    figure.savefig(path, dpi=100)
    pyplot.close(figure)
    return path
