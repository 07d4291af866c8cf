"""Simulates the attention of well-known models on a V100, T4 or RTX 2080 Ti: one layer in training, prefill and decoding.

Every row calls the operator that programs call, as `benchmarks.volta` does: tools/volta-sim times one SM's share of every launch, with its
default model and with a perfect instruction cache (icache=false). Nothing here is measured. Launch overhead is not counted.

Training is forward and backward. TFLOP/s count the query-key pairs that the mask keeps: 4 operations a pair, head and column forward,
10 backward. Decoding counts bytes of keys and values (a cache in pages of 16 tokens). The share is of the tensor pipe's rate,
or of the DRAM rate of the simulated GPU. Turing has no kernels for a cache of latents.

--pytorch adds the speed of PyTorch's memory-efficient kernels, from the wheel of torch 2.7.1 (V100) or 2.11.0+cu130 (Turing), for rows of
training and prefill that they compute without a mask in memory, with headdims to 128. K and V of grouped heads are repeated for them
before, which is not counted. PyTorch's launches have fewer or more heads than the model: the time of a block does not depend on its head.
Backward launches have one block for each head (`pytorch_fmha`).
Lengths are those of a usual run.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from volta_fa.errors import CommandError

from . import plots, pytorch_fmha, report
from .decode import DRAM_RATES
from .measure import Work, aligned, launches, simulated
from .model_configs import DECODE, FORWARD, TRAIN, Attention, Row
from .model_configs import rows as all_rows
from .report import Grid
from .volta import BACKWARD, GPUS
from .volta import FORWARD as FORWARD_PASS

_PAGE = 16


@dataclass(frozen=True)
class Figures:
    """Simulated time of a row, by the default model and with a perfect instruction cache."""

    us: float
    us_no_icache: float
    rate: float  # TFLOP/s, or GB/s in decoding, by the default model
    rate_no_icache: float
    share: float  # of the tensor pipe's or DRAM's rate, by the default model
    kernels: str  # the slowest of each pass, with a perfect instruction cache
    pytorch: float | None = None  # TFLOP/s of PyTorch's kernel, by the default model


def visible_pairs(row: Row) -> int:
    """Returns the query-key pairs that the mask keeps, for one head of one sequence. Causal masks align bottom-right."""
    a, shift = row.attention, row.seqlen_k - row.seqlen_q
    total = 0
    for query in range(shift, shift + row.seqlen_q):
        right = query if a.causal else query + a.window if a.window else row.seqlen_k - 1
        left = query - a.window if a.window else 0
        total += max(min(right, row.seqlen_k - 1) + 1 - max(left, 0), 0)
    return total


def work(row: Row) -> float:
    """Returns operations, or bytes of the cache in decoding."""
    a = row.attention
    if row.use == DECODE:
        tokens = min(row.seqlen_k, a.window + 1) if a.window else row.seqlen_k
        columns = a.headdim if a.latents else a.headdim + a.headdim_v
        return 2.0 * row.batch * tokens * a.nheads_k * columns
    forward, backward = a.headdim + a.headdim_v, 3 * a.headdim + 2 * a.headdim_v
    return 2.0 * row.batch * a.nheads * visible_pairs(row) * (forward + (backward if row.use == TRAIN else 0))


def _options(a: Attention) -> dict:
    options: dict = {"is_causal": a.causal}
    if a.window:
        options |= {"window_left": a.window} | ({} if a.causal else {"window_right": a.window})
    if a.softcap:
        options["softcap"] = a.softcap
    if a.sinks:
        options["sinks"] = torch.zeros(a.nheads)
    return options


def _tensor(*shape: int, value: float | None = None) -> Tensor:
    t = aligned(shape, torch.float16)
    return t.copy_(torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)))) if value is None else t.fill_(value)


def _passes(row: Row) -> list[Work]:
    """Returns the calls of a row: forward and, in training, backward."""
    a = row.attention
    q = _tensor(row.batch, row.seqlen_q, a.nheads, a.headdim)
    if row.use == DECODE:
        return [_decode(row, q)]
    k = _tensor(row.batch, row.seqlen_k, a.nheads_k, a.headdim)
    v = _tensor(row.batch, row.seqlen_k, a.nheads_k, a.headdim_v)
    options = _options(a)
    passes: list[Work] = [lambda: torch.ops.volta_fa.fwd(q, k, v, **options)]
    if row.use == TRAIN:
        # stand-ins for results of a forward pass: no time depends on their values
        dout, out = (_tensor(row.batch, row.seqlen_q, a.nheads, a.headdim_v, value=value) for value in (0.01, 0.0))
        lse = aligned((row.batch, a.nheads, row.seqlen_q), torch.float32).fill_(math.log(row.seqlen_k) + 0.5)
        passes.append(lambda: torch.ops.volta_fa.bwd(dout, q, k, v, out, lse, **options))
    return passes


def _decode(row: Row, q: Tensor) -> Work:
    a = row.attention
    pages = -(-row.seqlen_k // _PAGE)
    k = _tensor(row.batch * pages, _PAGE, a.nheads_k, a.headdim, value=0.01)
    v = _tensor(row.batch * pages, _PAGE, a.nheads_k, a.headdim_v, value=0.01)
    table = torch.randperm(row.batch * pages, generator=torch.Generator().manual_seed(0)).int().view(row.batch, pages)
    options = {"block_table": table, "cache_seqlens": torch.full((row.batch,), row.seqlen_k, dtype=torch.int32)}
    if a.latents:
        return lambda: torch.ops.volta_fa.fwd_mla(q, k, **options, is_causal=True)
    return lambda: torch.ops.volta_fa.fwd_kvcache(q, k, v, **options, **_options(a))


def simulate(row: Row, gpu: str) -> Figures:
    """Returns the figures of a row on a simulated GPU."""
    times, kernels, passes = [], "", _passes(row)
    for settings in ("", "icache=false"):
        reports = [simulated(work, settings, gpu) for work in passes]
        times.append(sum(r["timing"]["kernel_us"] for of in reports for r in of))
        kernels = ", ".join(max(of, key=lambda r: r["timing"]["kernel_us"])["kernel"] for of in reports)
    unit = 1e3 if row.use == DECODE else 1e6
    rates = [work(row) / us / unit for us in times]
    limit = DRAM_RATES[gpu] if row.use == DECODE else GPUS[gpu].peak_tflops
    return Figures(*times, *rates, rates[0] / limit, kernels)


class PyTorch:
    """PyTorch's kernels on a simulated GPU."""

    def __init__(self, library: Path, simulator: Path, folder: Path, gpu: str) -> None:
        self._simulator, self._folder, self._gpu = simulator, folder, gpu
        sm = 70 if gpu == "v100" else 75
        self._kernels = pytorch_fmha.kernels(sm)
        self._known: dict[str, float] = {}
        pytorch_fmha.write_cubins(library, sm, folder)

    def tflops(self, row: Row) -> float | None:
        """Returns the speed by the default model; None if the kernels do not compute the row."""
        a = row.attention
        if row.use == DECODE or row.window or a.softcap or a.sinks or a.headdim != a.headdim_v or a.headdim > 128:
            return None
        forward = self._speed(FORWARD_PASS, row)
        # 4 operations forward, 10 backward
        return forward if row.use == FORWARD else 14 / (4 / forward + 10 / self._speed(BACKWARD, row))

    def _speed(self, direction: str, row: Row) -> float:
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
        name = json.dumps(launch)
        if name not in self._known:
            self._known[name] = pytorch_fmha.tflops(self._simulator, self._folder, self._gpu, launch)
        return self._known[name]


def _key(row: Row, gpu: str) -> dict:
    """Returns what figures of a row depend on: the GPU, the call, and every launch with a digest of the kernel's machine code.

    Models with the same call share figures. A window that hides no key counts as none."""
    call = replace(row, model="", attention=replace(row.attention, window=row.window))
    return {"gpu": gpu, "call": repr(call), "launches": [launch for work in _passes(row) for launch in launches(work, gpu)]}


def _kept(file: Path, key: dict) -> Figures | None:
    """Returns the figures that `_keep` wrote last for this key."""
    lines = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    return next((Figures(**line["figures"]) for line in reversed(lines) if key.items() <= line.items()), None)


def _keep(file: Path, key: dict, figures: Figures) -> None:
    with file.open("a") as lines:
        lines.write(json.dumps(key | {"figures": asdict(figures)}) + "\n")


def _figures(row: Row, gpu: str, file: Path | None, kept: bool, pytorch: PyTorch | None) -> Figures | None:
    """Returns the figures of a row, from `file` if it has those of the same kernels. `kept`: None instead of simulating."""
    key = _key(row, gpu) if file else {}
    known = _kept(file, key) if file else None
    if kept and known is None:
        return None
    figures = known or simulate(row, gpu)
    if pytorch and figures.pytorch is None:
        figures = replace(figures, pytorch=pytorch.tflops(row))
    if file and figures != known:
        _keep(file, key, figures)
    return figures


def grid(results: Sequence[tuple[Row, Figures]], gpu: str) -> Grid:
    """Returns the table of a GPU."""
    beside = any(f.pytorch for _, f in results)
    found = Grid(
        f"Attention of one layer on a simulated {GPUS[gpu].title}",
        ["model and use", "us", "TFLOP/s or GB/s", "perfect i-cache", "share", *["PyTorch, TFLOP/s", "ratio"] * beside, "kernels"],
    )
    for row, f in results:
        pytorch = [f"{f.pytorch:.1f}", f"{f.rate / f.pytorch:.1f}"] if f.pytorch else ["-", "-"]
        unit = "GB/s" if row.use == DECODE else "TFLOP/s"
        rates = (f"{f.rate:.0f}", f"{f.rate_no_icache:.0f}") if row.use == DECODE else (f"{f.rate:.1f}", f"{f.rate_no_icache:.1f}")
        found.rows.append([str(row), f"{f.us:.0f}", f"{rates[0]} {unit}", rates[1], f"{f.share:.0%}", *pytorch * beside, f.kernels])
    return found


def plot(results: Sequence[tuple[Row, Figures]], gpu: str, header: dict[str, str], path) -> None:
    """Draws the shares as bars, one panel for each use, with PyTorch's as thin bars on them."""
    uses = [use for use in (TRAIN, FORWARD, DECODE) if any(row.use == use for row, _ in results)]
    title = f"volta_fa on a simulated {GPUS[gpu].title}, {header['date']}: share of the tensor pipe (decoding: of DRAM)"
    longest = max(sum(row.use == use for row, _ in results) for use in uses)
    figure, axes = plots.panels(1, len(uses), title, (6.5 * len(uses), 1 + 0.3 * longest), sharex=True)
    for axis, use in zip(axes[0], uses):
        bars = [(row, f) for row, f in results if row.use == use][::-1]
        shares = [100 * f.share for _, f in bars]
        drawn = axis.barh([row.model for row, _ in bars], shares, color=plots.COLORS["volta_fa"], height=0.6, label="volta_fa")
        pytorch = {row.model: 100 * f.pytorch / GPUS[gpu].peak_tflops for row, f in bars if f.pytorch}
        if pytorch:
            axis.barh(*zip(*pytorch.items()), color=plots.COLORS["SDPA efficient"], height=0.25, label="PyTorch, memory-efficient")
        unit = "GB/s" if use == DECODE else "TFLOP/s"
        axis.bar_label(drawn, [f"{f.rate:.0f} {unit}" for _, f in bars], padding=3, fontsize=8)
        axis.set(xlim=(0, 115), title=use, xlabel="%")
        axis.tick_params(axis="y", labelsize=8)
        axis.set_axisbelow(True)
    plots.shared_legend(figure, axes)
    plots.save(figure, path)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.models", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    report.add_output_options(parser)
    parser.add_argument("--gpu", choices=GPUS, default="v100", help="the simulated GPU (default v100)")
    parser.add_argument("--only", default="", metavar="TEXT", help="rows whose name contains TEXT")
    parser.add_argument("--resume", type=Path, metavar="FILE", help="keep every row in FILE, and take from it rows of the same kernels")
    parser.add_argument("--kept", action="store_true", help="only rows that --resume's FILE has")
    parser.add_argument("--pytorch", type=Path, nargs=2, metavar=("LIBTORCH_CUDA", "VOLTA_SIM"), help="beside PyTorch's kernel")
    return parser


def main(arguments: Sequence[str]) -> int:
    options = _parser().parse_args(arguments)
    if options.kept and not options.resume:
        raise CommandError("--kept: got no --resume FILE, which has the rows that are kept")
    known = [row for row in all_rows(GPUS[options.gpu].sms) if options.gpu == "v100" or not row.attention.latents]
    rows = [row for row in known if options.only in str(row)]
    if not rows:
        raise CommandError(f"--only: got {options.only}, expected a part of a row's name, such as `{known[0]}`")
    results: list[tuple[Row, Figures]] = []
    with report.progress() as bar, ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        library, simulator = options.pytorch or (None, None)
        pytorch = PyTorch(library, simulator, folder, options.gpu) if options.pytorch else None
        task = bar.add_task("", total=len(rows))
        for row in rows:
            bar.update(task, description=str(row))
            figures = _figures(row, options.gpu, options.resume, options.kept, pytorch)
            results += [(row, figures)] if figures else []
            bar.advance(task)
    header = report.facts("models", arguments, device=GPUS[options.gpu].device, **{"kind of figures": report.SIMULATED})
    data = [{"row": str(row), "use": row.use, **asdict(f)} for row, f in results]
    report.deliver(options, header, [grid(results, options.gpu)], data, lambda path: plot(results, options.gpu, header, path))
    return 0


if __name__ == "__main__":
    report.command(main)
