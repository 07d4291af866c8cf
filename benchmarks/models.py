"""Simulates the attention of well-known models on a V100, T4 or RTX 2080 Ti: one layer in training, prefill and decoding.

Every row calls the operator that programs call, as `benchmarks.volta` does. Nothing here is measured.

Training is forward and backward. TFLOP/s count the query-key pairs that the mask keeps: 4 operations a pair, head and column forward,
10 backward. Decoding counts bytes of keys and values (a cache in pages of 16 tokens). The share is of the tensor pipe's rate,
or of the DRAM rate of the simulated GPU. Turing has no kernels for a cache of latents.

--pytorch adds the speed of PyTorch's memory-efficient kernels, from the wheel of torch 2.7.1 (V100) or 2.11.0+cu130 (Turing), for rows of
training and prefill that they compute without a mask in memory, with headdims to 128. --resume keeps these speeds for later tables.
K and V of grouped heads are repeated for PyTorch's kernels before, which is not counted.
PyTorch's launches have fewer or more heads than the model: the time of a block does not depend on its head.
Backward launches have one block for each head (`pytorch_fmha`).
Lengths are those of a usual run.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from . import decode, driver, plots, pytorch_fmha, report
from .driver import GPUS, Benchmark, Kept, Result, run
from .measure import Work, aligned
from .model_configs import DECODE, FORWARD, TRAIN, Attention, Row
from .model_configs import rows as all_rows
from .report import Grid
from .volta import BACKWARD, forward_results
from .volta import FORWARD as FORWARD_PASS


@dataclass(frozen=True)
class Case:
    """Forward and, in training, backward of a layer."""

    attention: Attention
    batch: int
    seqlen_q: int
    seqlen_k: int
    backward: bool
    bytes = 0.0

    @property
    def flops(self) -> float:
        a = self.attention
        forward, backward = a.headdim + a.headdim_v, 3 * a.headdim + 2 * a.headdim_v
        return 2.0 * self.batch * a.nheads * self.visible_pairs() * (forward + (backward if self.backward else 0))

    def visible_pairs(self) -> int:
        """Returns the query-key pairs that the mask keeps, for one head of one sequence. Causal masks align bottom-right."""
        a, shift = self.attention, self.seqlen_k - self.seqlen_q
        total = 0
        for query in range(shift, shift + self.seqlen_q):
            right = query if a.causal else query + a.window if a.window else self.seqlen_k - 1
            left = query - a.window if a.window else 0
            total += max(min(right, self.seqlen_k - 1) + 1 - max(left, 0), 0)
        return total

    def calls(self, device: str) -> list[Work]:
        a, options = self.attention, self._options()
        q = _randn(self.batch, self.seqlen_q, a.nheads, a.headdim)
        k = _randn(self.batch, self.seqlen_k, a.nheads_k, a.headdim)
        v = _randn(self.batch, self.seqlen_k, a.nheads_k, a.headdim_v)
        passes: list[Work] = [lambda: torch.ops.volta_fa.fwd(q, k, v, **options)]
        if self.backward:
            dout = aligned((self.batch, self.seqlen_q, a.nheads, a.headdim_v), torch.float16).fill_(0.01)
            out, lse = forward_results(dout, self.seqlen_k)
            passes.append(lambda: torch.ops.volta_fa.bwd(dout, q, k, v, out, lse, **options))
        return passes

    def _options(self) -> dict:
        a = self.attention
        options: dict = {"is_causal": a.causal}
        if a.window:
            options |= {"window_left": a.window} | ({} if a.causal else {"window_right": a.window})
        if a.softcap:
            options["softcap"] = a.softcap
        if a.sinks:
            options["sinks"] = torch.zeros(a.nheads)
        return options


def _randn(*shape: int) -> Tensor:
    return aligned(shape, torch.float16).copy_(torch.randn(shape, generator=torch.Generator().manual_seed(len(shape))))


def case_of(row: Row) -> driver.Case:
    """Returns the calls of a row. Models with the same calls share them: a window that hides no key counts as none."""
    a = replace(row.attention, window=row.window)
    if row.use != DECODE:
        return Case(a, row.batch, row.seqlen_q, row.seqlen_k, row.use == TRAIN)
    features = {"latents": a.latents} if a.latents else {"window": a.window, "softcap": a.softcap, "sinks": a.sinks}
    return decode.Case(a.headdim, (row.seqlen_k,) * row.batch, a.nheads // a.nheads_k, kv_heads=a.nheads_k, **features)


class PyTorch:
    """PyTorch's kernels on a simulated GPU. Without their library, only kept figures."""

    def __init__(self, gpu: str, kept: Kept, library: Path | None = None, simulator: Path | None = None) -> None:
        self._simulator, self._gpu, self._kept = simulator, gpu, kept
        self._temporary = tempfile.TemporaryDirectory()
        sm = 70 if gpu == "v100" else 75
        self._kernels = pytorch_fmha.kernels(sm)
        if library:
            pytorch_fmha.write_cubins(library, sm, Path(self._temporary.name))

    def tflops(self, row: Row) -> float | None:
        """Returns the speed by the default model; None if the kernels do not compute the row, or nothing is known."""
        a = row.attention
        if row.use == DECODE or row.window or a.softcap or a.sinks or a.headdim != a.headdim_v or a.headdim > 128:
            return None
        forward = self._speed(FORWARD_PASS, row)
        backward = self._speed(BACKWARD, row) if forward and row.use == TRAIN else None
        # 4 operations forward, 10 backward
        return forward if row.use == FORWARD else forward and backward and 14 / (4 / forward + 10 / backward)

    def _speed(self, direction: str, row: Row) -> float | None:
        a, sms, forward = row.attention, GPUS[self._gpu].sms, direction == FORWARD_PASS
        # without a mask, a step costs the same at all lengths
        longest = row.seqlen_k if a.causal else 8192 if forward else 1024
        rows, keys = (min(n, longest) for n in (row.seqlen_q, row.seqlen_k))
        kernel = next(k for k in self._kernels if k.computes(direction, a.headdim, row.seqlen_q, row.seqlen_k))
        if forward:
            # four times what the GPU holds at once
            heads = -(-4 * 3 * sms * kernel.rows // rows)
            heads = heads if row.wave else min(row.batch * a.nheads, heads)
        else:
            # a block for each head, and 256 threads on each SM
            heads = sms * 256 // math.prod(kernel.threads)
        launch = pytorch_fmha.job(kernel, heads, rows, keys, False, a.headdim, a.causal)
        # its random inputs are the same each time, so its name and sizes say what it does
        key = {"gpu": self._gpu, "pytorch": json.loads(json.dumps(launch))}
        known = self._kept.get(key)
        if known is None and self._simulator:
            known = pytorch_fmha.tflops(self._simulator, Path(self._temporary.name), self._gpu, launch)
            self._kept.put(key, known)
        return known


def model_rows(gpu: str) -> Iterator[Row]:
    return (row for row in all_rows(GPUS[gpu].sms) if gpu == "v100" or not row.attention.latents)


def rows(options: argparse.Namespace) -> list[driver.Row]:
    options.pytorch = {gpu: PyTorch(gpu, options.store, *(options.pytorch or ())) for gpu in options.gpu}
    return [driver.Row(str(row), case_of(row), gpu) for gpu in options.gpu for row in model_rows(gpu)]


def pytorch_of(results: Sequence[Result], options: argparse.Namespace) -> dict[tuple[str, str], float]:
    """Returns TFLOP/s of PyTorch's kernels by GPU and row."""
    wanted = {(r.row.gpu, r.row.name) for r in results}
    rows = [(gpu, row) for gpu in options.pytorch for row in model_rows(gpu) if (gpu, str(row)) in wanted]
    found = {(gpu, str(row)): options.pytorch[gpu].tflops(row) for gpu, row in report.track(rows, "PyTorch's kernels")}
    return {name: speed for name, speed in found.items() if speed is not None}


def use_of(result: Result) -> str:
    case = result.row.case
    return DECODE if case.bytes else TRAIN if case.backward else FORWARD


def rate(result: Result, model: int = 0, unit: bool = False) -> str:
    if result.row.case.bytes:
        return f"{result.gb_s(model):.0f}{' GB/s' * unit}"
    return f"{result.tflops(model):.1f}{' TFLOP/s' * unit}"


def grids(results: Sequence[Result], options: argparse.Namespace) -> list[Grid]:
    """Returns one table, with a row for each model and use, and columns for each GPU."""
    options.beside = pytorch_of(results, options)

    def pytorch(result: Result) -> str:
        speed = options.beside.get((result.row.gpu, result.row.name))
        return "-" if speed is None else f"{speed:.1f} ({result.tflops() / speed:.1f})"

    columns = {
        "us": lambda r: f"{r.us():.0f}",
        "TFLOP/s or GB/s, perfect i-cache": lambda r: f"{rate(r)}, {rate(r, 1, unit=True)}",
        "share": lambda r: f"{r.share():.0%}",
        "PyTorch's TFLOP/s (ratio)": pytorch,
    }
    grid = Grid("Attention of one layer", ["model and use", *(f"{GPUS[gpu].title}: {name}" for gpu in options.gpu for name in columns)])
    of = {(r.row.gpu, r.row.name): r for r in results}
    for name in dict.fromkeys(r.row.name for r in results):
        found = [of.get((gpu, name)) for gpu in options.gpu]
        grid.rows.append([name, *(cell(r) if r else "-" for r in found for cell in columns.values())])
    return [grid]


def plot(results: Sequence[Result], options: argparse.Namespace, header: dict[str, str], path: Path) -> None:
    """Draws the shares on the first GPU as bars, one panel for each use, with PyTorch's as thin bars on them."""
    gpu = options.gpu[0]
    results = [r for r in results if r.row.gpu == gpu]
    uses = [use for use in (TRAIN, FORWARD, DECODE) if any(use_of(r) == use for r in results)]
    title = f"volta_fa on a simulated {GPUS[gpu].title}, {header['date']}: share of the tensor pipe (decoding: of DRAM)"
    longest = max(sum(use_of(r) == use for r in results) for use in uses)
    figure, axes = plots.panels(1, len(uses), title, (6.5 * len(uses), 1 + 0.3 * longest), sharex=True)
    for axis, use in zip(axes[0], uses):
        bars = {r.row.name.partition(f", {use}:")[0]: r for r in results[::-1] if use_of(r) == use}
        drawn = axis.barh(
            list(bars), [100 * r.share() for r in bars.values()], color=plots.COLORS["volta_fa"], height=0.6, label="volta_fa"
        )
        speeds = {model: options.beside.get((gpu, r.row.name)) for model, r in bars.items()}
        beside = {model: 100 * speed / bars[model].peak for model, speed in speeds.items() if speed}
        if beside:
            axis.barh(*zip(*beside.items()), color=plots.COLORS["SDPA efficient"], height=0.25, label="PyTorch, memory-efficient")
        axis.bar_label(drawn, [rate(r, unit=True) for r in bars.values()], padding=3, fontsize=8)
        axis.set(xlim=(0, 115), title=use, xlabel="%")
        axis.tick_params(axis="y", labelsize=8)
        axis.set_axisbelow(True)
    plots.shared_legend(figure, axes)
    plots.save(figure, path)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--pytorch", type=Path, nargs=2, metavar=("LIBTORCH_CUDA", "VOLTA_SIM"), help="beside PyTorch's kernel")


def main(arguments: Sequence[str]) -> int:
    return run("models", Benchmark(__doc__, rows, grids, add_options, plot, several=True), arguments)


if __name__ == "__main__":
    report.command(main)
