"""Prints what `python -m volta_fa demo` shows, and draws its plot of losses. The demo trains a small GPT with volta_fa and with PyTorch's
attention, compares them, and times one layer on simulated GPUs. demo/__init__.py and demo/ranks.py call this module."""

from __future__ import annotations

import platform
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar
from rich.table import Table

from ..inspection import families, kernel_family  # the kernels for a GPU generation, preferred first; the preferred one's name
from ..version import __version__
from . import simulated
from .agreement import CONTROLS, Comparison  # number of control runs; differences of losses and gradients, and what is allowed
from .simulated import Simulated  # times of one GPU, and errors; the share of an error is error / allowed error
from .train import Run, Settings  # one model in training; sizes of model and training

#: Names of the runs: PyTorch's attention, volta_fa's, and those that show what rounding alone does.
REFERENCE, CANDIDATE, CONTROL = "PyTorch", "volta_fa", "PyTorch, rounded differently"

_console = Console(highlight=False)


def silence() -> None:
    """Disables output: of several processes only one reports."""
    _console.quiet = True


def say(text: str) -> None:
    _console.print(text)


def introduce(settings: Settings, device: torch.device, tokens: int, files: int, runs: Sequence[Run]) -> None:
    """Prints the machine, the model and the planned runs."""
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        found = f"{torch.cuda.get_device_name(device)} (sm_{major}{minor})"
        is_native = families((major, minor))[0]["native"]
        code = f"machine code for sm_{major}{minor}" if is_native else "through PTX that the driver compiles"
        kernels = f"family {kernel_family(device)}, {code}"
    else:
        found = f"CPU ({platform.machine()}, {torch.get_num_threads()} threads)"
        kernels = "CPU backend: PyTorch's own operations, so the losses may be equal"
    precision = "float16 autocast with GradScaler" if settings.half else "float32"
    parameters = sum(p.numel() for p in runs[0].model.parameters())
    facts = {
        "device": found,
        "kernels": kernels,
        "torch": f"{torch.__version__}, volta_fa {__version__}, Python {platform.python_version()}",
        "model": f"GPT of {parameters / 1e6:.2f} million parameters: {settings.layers} layers, {settings.nheads} heads of "
        f"{settings.headdim}, {settings.seqlen} characters; {precision}",
        "text": f"{tokens / 1e6:.1f} million characters of Python's standard library ({files} files)",
        "runs": f"{settings.steps} steps of {settings.batch} windows, from the same weights on the same batches: {REFERENCE}'s attention; "
        f"{CANDIDATE}; and {REFERENCE}'s with every output rounded differently, {CONTROLS} times, which shows what rounding alone does",
    }
    table = Table.grid(padding=(0, 2))
    for name, value in facts.items():
        table.add_row(name, value)
    _console.print(table, "")


class Progress(Bar):
    """Shows a progress bar, and above it rows of losses: _ROWS in all, and one after _MAX_SECONDS without. In a pipe only these. A row has
    the step from 1 on, the reference's and the candidate's loss, their difference, and that of the farthest control."""

    _ROWS = 10
    _MAX_SECONDS = 8.0
    _FORMAT = "{:>6}  {:>10}  {:>10}  {:>12}  {:>12}"

    def __init__(self, steps: int, runs: Sequence[Run]):
        self._steps, self._runs = steps, runs
        self._interval = max(1, steps // self._ROWS)
        self._shown = time.monotonic()
        super().__init__(TextColumn("training"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), console=_console, transient=True)
        self._task = self.add_task("training", total=steps)

    def start(self) -> None:
        _console.print(self._FORMAT.format("", "loss", "loss", "difference", "rounding's"))
        _console.print(self._FORMAT.format("step", REFERENCE, CANDIDATE, "of the two", "difference"))
        super().start()

    def on_step(self, step: int) -> None:
        """Advances the bar, and prints a row if one is due. `train.train` calls it after each step, from 0 on."""
        self.advance(self._task)
        late = time.monotonic() - self._shown > self._MAX_SECONDS
        if step == 0 or (step + 1) % self._interval == 0 or step + 1 == self._steps or late:
            self._shown = time.monotonic()
            reference, candidate, *controls = (run.losses[-1] for run in self._runs)
            control = max(controls, key=lambda loss: abs(loss - reference))
            self.console.print(
                self._FORMAT.format(
                    step + 1, f"{reference:.4f}", f"{candidate:.4f}", f"{candidate - reference:+.1e}", f"{control - reference:+.1e}"
                )
            )


def summarize(runs: Sequence[Run], peaks: Sequence[int], comparison: Comparison) -> None:
    """Prints last losses, times and memory of both runs (REFERENCE, CANDIDATE; `peaks` in bytes), and the differences."""
    table = Table()
    for column in ("", *(run.name for run in runs)):
        table.add_column(column, justify="right" if column else "left")
    table.add_row("last loss", *(f"{run.losses[-1]:.4f}" for run in runs))
    table.add_row("time of a step (median)", *(f"{1e3 * median(run.seconds):.1f} ms" for run in runs))
    table.add_row("peak memory of a step", *(f"{peak / 2**20:.1f} MiB" for peak in peaks))
    _console.print(table)
    _console.print(
        f"losses:    largest difference {max(comparison.loss_differences):.1e}, rounding explains up to {comparison.loss_allowed[-1]:.1e}\n"
        f"gradients: relative difference at the same weights {comparison.gradient_difference:.1e}, "
        f"rounding explains up to {comparison.gradient_allowed:.1e}",
        soft_wrap=True,
    )


def plot(output: Path, reference: Run, candidate: Run, comparison: Comparison) -> None:
    """Draws the losses and their difference into `output`/losses.png, and prints the path."""
    import matplotlib

    matplotlib.use("Agg")  # no display is needed
    from matplotlib import pyplot

    steps = range(1, len(reference.losses) + 1)
    figure, (losses, differences) = pyplot.subplots(2, 1, figsize=(8, 7), sharex=True, layout="constrained")
    losses.plot(steps, reference.losses, color="#8c8c8c", linewidth=4, label=reference.name)
    losses.plot(steps, candidate.losses, color="#c0392b", linewidth=1.2, label=candidate.name)
    losses.set(title="A small GPT on the source of Python's standard library", ylabel="training loss (nats a character)")
    losses.legend()
    differences.semilogy(steps, comparison.loss_allowed, color="#8c8c8c", linestyle="--", label="explained by rounding")
    # a logarithmic axis omits steps with bitwise identical losses
    differences.semilogy(
        steps, comparison.loss_differences, ".", color="#c0392b", label=f"|{candidate.name} - {reference.name}|, where not 0"
    )
    differences.set(xlabel="step", ylabel="difference of the losses")
    differences.set_ylim(bottom=1e-8)
    differences.legend()
    output.mkdir(parents=True, exist_ok=True)
    path = output / "losses.png"
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    _console.print(f"plot: {path}", soft_wrap=True)


def judge(comparison: Comparison) -> None:
    """Prints the conclusion."""
    if comparison.agree:
        _console.print("[green]The two trainings agree to within rounding.[/green]")
        return
    reasons = []
    step = comparison.first_disagreement
    if step is not None:
        difference, allowed = comparison.loss_differences[step], comparison.loss_allowed[step]
        reasons.append(f"at step {step + 1} their losses differ by {difference:.1e}, and rounding explains {allowed:.1e}")
    if not comparison.gradients_agree:
        reasons.append(
            f"at the same weights their gradients differ by {comparison.gradient_difference:.1e} (relative), "
            f"and rounding explains {comparison.gradient_allowed:.1e}"
        )
    _console.print(f"[red]The two trainings disagree: {'; '.join(reasons)}.[/red]", soft_wrap=True)


def introduce_simulation() -> None:
    s = simulated
    _console.print(
        f"\nOne attention layer as machine code on simulated GPUs: {s.LAYER}, {s.BATCH} x {s.SEQLEN} tokens, "
        f"{s.NHEADS} heads of {s.HEADDIM}, fp16.",
        soft_wrap=True,
    )


def show_simulation(results: Sequence[Simulated]) -> None:
    """Prints times and errors, and the busy parts of an SM as bars. PyTorch's TFLOP/s are constants of an earlier simulation (`Gpu`)."""
    table = Table()
    table.add_column("simulated")
    for result in results:
        table.add_column(result.gpu.title, justify="right")
    for name in ("forward", "backward"):
        table.add_row(f"{name}, microseconds", *(f"{simulated.microseconds(getattr(result, name)):.0f}" for result in results))
    table.add_row("both, TFLOP/s", *(f"{result.tflops:.1f}" for result in results))
    table.add_row("PyTorch's kernels, TFLOP/s", *(f"{result.gpu.pytorch_tflops:.1f}" for result in results))
    table.add_row("times as fast", *(f"{result.tflops / result.gpu.pytorch_tflops:.1f}" for result in results))
    for name in results[0].errors:
        errors = [result.errors[name] for result in results]
        table.add_row(f"largest error of {name}, fp64 (allowed)", *(f"{error.error:.1e} ({error.allowed:.1e})" for error in errors))
    _console.print(table)
    kernels = [(f"{result.gpu.title} {way}", kernel) for result in results for way, kernel in zip(("fwd", "bwd"), result.main_kernels)]
    bars = Table(
        title="How busy the parts of an SM are in the main kernels", title_justify="left", box=None, padding=(0, 1), pad_edge=False
    )
    bars.add_column("")
    for name, _ in kernels:
        bars.add_column(name)
    for pipe, title in simulated.PIPES.items():
        bars.add_row(title, *(bar(kernel["timing"]["util"][pipe]) for _, kernel in kernels))
    _console.print(bars)
    wrong = [f"{name} on the {result.gpu.title}" for result in results for name, error in result.errors.items() if error.share > 1]
    if wrong:
        _console.print(f"[red]Wrong: {', '.join(wrong)}.[/red]", soft_wrap=True)
    else:
        _console.print(
            "[green]All results are right. No V100 and no T4 took part: the figures are the simulator's.[/green]", soft_wrap=True
        )


def bar(share: float, width: int = 10) -> str:
    """Returns a bar of blocks and the percentage."""
    full = round(share * width)
    return "█" * full + "░" * (width - full) + f" {share:3.0%}"
