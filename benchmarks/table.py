"""Measures errors, memory and speed of volta_fa against PyTorch's own attention, on this machine.

For each shape (batch, nheads, seqlen_q, seqlen_k, headdim), causal and not:

errors   the largest error of out and of dq, dk, dv against fp64 on the same inputs, and its ratio to that of PyTorch's eager attention
memory   the most that PyTorch's allocator held at once in a forward and backward pass beyond the inputs, and the share saved of eager's
speed    median time of forward (recording gradients), backward, and their sum; TFLOP/s count 4*B*H*M*N*D operations forward and
         10*B*H*M*N*D backward, half for causal: batch B, nheads H, seqlen_q M, seqlen_k N, headdim D

Compared are eager attention (softmax(QK^T)V in the dtype of the inputs, and on a GPU also computed in fp32), and the efficient and flash
backends of scaled_dot_product_attention where they exist. All get the same random values, each contiguous in its own layout: volta_fa
(batch, seqlen, nheads, headdim), PyTorch (batch, nheads, seqlen, headdim). Masks that eager needs are made before the timed calls. The
dtype is fp16 on a GPU and fp32 on a CPU. Nothing clears L2 between repetitions."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from volta_fa.errors import CommandError

from . import report

# OURS, EAGER: names of implementations; TABLE: the listed shapes; Bound: an implementation with its inputs
from .attention import EAGER, OURS, RESULTS, TABLE, Bound, Inputs, Shape, implementations, max_errors, select, why_unavailable
from .measure import median_ms, peak_bytes
from .report import Grid, ratio, significant, times  # significant(x, digits), times(x): text of a number, "-" for None

PASSES = ("forward", "backward", "total")
#: out, or the gradients, by whether they are gradients.
_RESULTS_OF = {False: RESULTS[:1], True: RESULTS[1:]}
#: Maximum sequence length on a CPU without --max-seqlen and --cases.
CPU_MAX_SEQLEN = 256


@dataclass
class Result:
    """One implementation on one shape."""

    unavailable: str | None = None  # why it did not run
    errors: dict[str, float] = field(default_factory=dict)  # largest absolute error by result: out, dq, dk, dv
    peak_bytes: int | None = None
    ms: dict[str, float] = field(default_factory=dict)  # by PASSES
    tflops: dict[str, float] = field(default_factory=dict)  # by PASSES


@dataclass
class Row:
    """All implementations on one shape."""

    shape: Shape
    results: dict[str, Result]  # by the implementation's name

    def error(self, name: str, backward: bool) -> float | None:
        """Returns an implementation's error of out, or (`backward`) the largest of its gradients'."""
        errors = self.results[name].errors
        return max(errors[w] for w in _RESULTS_OF[backward]) if errors else None

    def error_ratio(self, backward: bool) -> float | None:
        """Returns volta_fa's error relative to eager's, of out, or (`backward`) of the gradient where it is largest."""
        ours, eager = self.results[OURS].errors, self.results[EAGER].errors
        if not ours or not eager:
            return None
        # relative to an error of 0: 1 for 0, else infinity
        return max(ours[w] / eager[w] if eager[w] else math.inf if ours[w] else 1.0 for w in _RESULTS_OF[backward])

    def memory_saving(self) -> float | None:
        """Returns the share of eager's peak memory that volta_fa saves."""
        ours, eager = self.results[OURS].peak_bytes, self.results[EAGER].peak_bytes
        return 1 - ours / eager if ours is not None and eager else None

    def data(self) -> dict[str, Any]:
        return {
            **asdict(self.shape),
            "error_ratio_forward": self.error_ratio(backward=False),
            "error_ratio_backward": self.error_ratio(backward=True),
            "memory_saving": self.memory_saving(),
            "results": {name: asdict(result) for name, result in self.results.items()},
        }


def measure(shape: Shape, device: torch.device, dtype: torch.dtype, budget: float, seed: int) -> Row:
    """Returns the figures of every implementation on a shape. `budget`: seconds of repetitions for each time."""
    inputs = Inputs(shape, device, dtype, seed)
    row = Row(shape, {})
    outputs = {}
    bound = {i.name: inputs.bind(i) for i in implementations(dtype)}
    for name, b in bound.items():
        row.results[name] = Result()
        outputs[name] = _attempt(row.results[name], b.results)
    ran = {name: found for name, found in outputs.items() if found is not None}
    for name, errors in max_errors(inputs, ran).items():
        row.results[name].errors = errors
    del outputs, ran
    for name, b in bound.items():
        _attempt(row.results[name], lambda: _measure_one(row.results[name], b, budget))
    return row


def _measure_one(result: Result, bound: Bound, budget: float) -> None:
    device, shape = bound.inputs.device, bound.inputs.shape
    result.peak_bytes = peak_bytes(bound.both, device)
    forward = median_ms(bound.forward, device, budget)
    out = bound.forward()
    backward = median_ms(lambda: bound.backward(out), device, budget)
    result.ms = dict(zip(PASSES, (forward, backward, forward + backward)))
    flops = (shape.forward_flops, shape.backward_flops, shape.forward_flops + shape.backward_flops)
    result.tflops = {name: f / result.ms[name] / 1e9 for name, f in zip(PASSES, flops)}


def _attempt(result: Result, work: Callable[[], Any]) -> Any:
    """Returns what `work` returns. If it cannot run here, sets `result.unavailable`; then this and later attempts return None."""
    if result.unavailable:
        return None
    try:
        return work()
    except RuntimeError as error:
        result.unavailable = why_unavailable(error)
        if result.unavailable is None:
            raise
        return None


def grids(rows: Sequence[Row]) -> list[Grid]:
    names = _names(rows)
    quality = Grid(
        "Errors against fp64, and peak memory of forward and backward",
        ["B,H,M,N,D", "out", "eager's", "ratio", "dq, dk, dv", "eager's", "worst ratio", "memory, MiB", "eager's", "saved"],
    )
    for row in rows:
        cells = [str(row.shape)]
        for backward in (False, True):
            cells += [significant(row.error(name, backward), 3) for name in (OURS, EAGER)]
            cells.append(significant(row.error_ratio(backward), 2))
        for name in (OURS, EAGER):
            peak = row.results[name].peak_bytes
            cells.append(significant(None if peak is None else peak / 2**20))
        saving = row.memory_saving()
        quality.rows.append(cells + ["-" if saving is None else f"{saving:.0%}"])
    passes = PASSES[:2]
    columns = [c for p in passes for c in (f"{p}: volta_fa, ms", *names)]
    speed = Grid("TFLOP/s, and in brackets how many times as fast volta_fa is", ["B,H,M,N,D", *columns])
    for row in rows:
        cells = [str(row.shape)]
        for which in passes:
            ours = row.results[OURS]
            cells += [significant(ours.ms.get(which)), significant(ours.tflops.get(which))]
            for name in names[1:]:
                other = row.results[name]
                speedup = times(ratio(other.ms.get(which), ours.ms.get(which)))
                cells.append(f"{significant(other.tflops.get(which))} ({speedup})" if which in other.ms else "-")
        speed.rows.append(cells)
    return [quality, speed]


def _names(rows: Sequence[Row]) -> list[str]:
    """Returns volta_fa and the implementations that ran on any shape."""
    return [name for name in rows[0].results if name == OURS or any(row.results[name].ms for row in rows)]


def plot(rows: Sequence[Row], header: dict[str, str], path: Path) -> None:
    title = f"Attention on {header['device']}, {header['dtype']}, {header['date']} (measured)"
    figure, axes = report.panels(2, 2, report.label(title, 110), (12, 8), sharey=True)
    for across, causal in enumerate((False, True)):
        of_mask = [row for row in rows if row.shape.causal == causal]
        labels = [str(row.shape).removesuffix(",causal") for row in of_mask]
        for down, which in enumerate(("forward", "backward")):
            axis = axes[down][across]
            for name in _names(rows):
                speeds = [row.results[name].tflops.get(which, math.nan) for row in of_mask]
                axis.plot(labels, speeds, report.MARKERS[name], color=report.COLORS[name], label=name, markersize=5)
            axis.set(yscale="log", title=f"{which}, {'causal' if causal else 'not causal'}", ylabel="TFLOP/s")
            axis.tick_params(axis="x", rotation=75, labelsize=7)
    report.shared_legend(figure, axes)
    report.save(figure, path)


def main(arguments: Sequence[str]) -> int:
    parser = report.parser("table", __doc__, measures=True)  # with --json, --plot, --markdown and --device
    words = "shapes B,H,M,N,D[,causal], or patterns for the listed ones, as '1,32,1024,*' or '*,128,causal' (default: all listed)"
    parser.add_argument("--cases", nargs="+", default=[], metavar="SHAPE", help=words)
    words = f"leave out longer sequences (default on a CPU: {CPU_MAX_SEQLEN}, unless --cases is given)"
    parser.add_argument("--max-seqlen", type=int, metavar="N", help=words)
    parser.add_argument("--quick", action="store_true", help="sequences to 64 and few repetitions: does it work at all?")
    parser.add_argument("--time-limit", type=float, default=math.inf, metavar="S", help="start no further shape after so many seconds")
    parser.add_argument("--seed", type=int, default=0, help="of the random inputs")
    options = parser.parse_args(arguments)
    device = report.choose_device(options.device)
    dtype = report.dtype_for(device)
    longest = 64 if options.quick else options.max_seqlen
    if longest is None:
        longest = math.inf if device.type == "cuda" or options.cases else CPU_MAX_SEQLEN
    shapes = [s for s in select(options.cases) if max(s.seqlen_q, s.seqlen_k) <= longest]
    if not shapes:
        raise CommandError(f"no shape is left: --cases and --max-seqlen {longest} exclude all {len(TABLE)}")
    inputs = "standard normal, the same values for all; volta_fa (B,S,H,D), PyTorch (B,H,S,D), each contiguous"
    header = report.facts_of(device, "table", arguments, dtype=str(dtype).removeprefix("torch."), inputs=inputs)
    start = time.monotonic()
    rows: list[Row] = []
    with report.progress() as bar:
        task = bar.add_task("table", total=len(shapes))
        for shape in shapes:
            if time.monotonic() - start > options.time_limit:
                header["left out"] = f"{len(shapes) - len(rows)} shapes, from {shape} on, after {options.time_limit:g} s"
                break
            bar.update(task, description=str(shape))
            try:
                # 0.01, 0.2: seconds of repetitions
                rows.append(measure(shape, device, dtype, 0.01 if options.quick else 0.2, options.seed))
            except RuntimeError as error:
                # The command fails, but shows the shapes before, which may have taken hours.
                header["FAILED"] = f"{shape}: {error}"
                break
            bar.advance(task)
    if not rows:
        raise CommandError(header.get("FAILED", f"--time-limit {options.time_limit:g} is too short for any shape"))
    data = {"header": header, "rows": [row.data() for row in rows]}
    report.deliver(options, header, grids(rows), data, lambda path: plot(rows, header, path))
    return 1 if "FAILED" in header else 0


if __name__ == "__main__":
    report.command(main)
