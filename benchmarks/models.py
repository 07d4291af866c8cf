"""Simulates the attention of well-known models on a V100, T4 or RTX 2080 Ti: one layer in training, forward (prefill) and decoding.

Every row calls volta_fa's operator, whose GPU kernels tools/volta-sim times. Nothing here is measured.

    training, forward   TFLOP/s of the query-key pairs that the mask keeps: per pair, head and column 4 operations forward and, in training
                        also, 10 backward; the share is of the simulated GPU's tensor pipe rate
    decode              GB/s of keys and values, a cache in pages of 16 tokens; the share is of the DRAM rate

Turing has no kernels for a cache of latents (MLA).

--pytorch adds the speed of PyTorch's memory-efficient kernels, from the wheel of torch 2.7.1 (V100) or 2.11.0+cu130 (Turing). They run rows
of training and prefill without window, softcap and sinks, with one headdim of at most 128. --resume keeps these speeds for later tables.
Repeating K and V of grouped heads, which PyTorch's kernels need, is not timed.
PyTorch's launches have fewer or more heads than the model, because the time of a block does not depend on its head.
Backward launches have one block for each head (see `pytorch_fmha`)."""

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

from . import decode, driver, pytorch_fmha, report
from .driver import GPUS, Benchmark, Kept, Result, run  # Kept: the figures in --resume's file
from .measure import Work, aligned  # aligned(): an empty tensor, aligned as by CUDA's allocator
from .report import Grid
from .volta import BACKWARD, forward_results  # forward_results(): stand-ins for out and softmax_lse, inputs of the backward pass
from .volta import FORWARD as FORWARD_PASS

# ---- models ------------------------------------------------------------------------------------------------------
#
# Numbers are those of the published configurations (config.json on the Hugging Face hub, or the model's paper), read on 2026-11-23.
# A causal `sliding_window` counts the query's own key, so `window` is one less. ModernBERT's counts keys on either side.

#: Uses of a model; FORWARD is the prefill of a language model, and the forward pass of others.
TRAIN, FORWARD, DECODE = "training", "forward", "decode"


@dataclass(frozen=True)
class Attention:
    """Attention of a layer."""

    nheads: int  # query heads
    nheads_k: int  # KV heads
    headdim: int
    headdim_v: int = 0  # 0: headdim
    causal: bool = True
    window: int = 0  # keys that a query sees to its left, and without `causal` to its right; 0: all
    softcap: float = 0.0
    sinks: bool = False
    latents: bool = False  # decodes from a cache of latents of this headdim, whose first `headdim_v` columns are the values

    def __post_init__(self):
        object.__setattr__(self, "headdim_v", self.headdim_v or self.headdim)


@dataclass(frozen=True)
class Row:
    """One layer's attention in one use of a model. A `driver.Row` (a case on a GPU) is made of it for each GPU, with its text as name."""

    model: str
    attention: Attention
    use: str  # TRAIN, FORWARD or DECODE
    batch: int
    seqlen_q: int
    seqlen_k: int
    wave: bool = False  # heads and queries are not the model's: a few full waves of blocks stand for its larger call

    @property
    def window(self) -> int:
        """The attention's window; 0 if it hides no key."""
        return self.attention.window if self.attention.window < self.seqlen_k - 1 else 0

    def __str__(self) -> str:
        a = self.attention
        heads = f"{a.nheads}" if a.nheads == a.nheads_k else f"{a.nheads}/{a.nheads_k}"
        headdim = f"{a.headdim}" if a.headdim == a.headdim_v else f"{a.headdim}/{a.headdim_v}"
        lengths = f"{self.seqlen_q}" if self.seqlen_q == self.seqlen_k else f"{self.seqlen_q}x{self.seqlen_k}"
        counted = "heads that fill the GPU" if self.wave else f"heads {heads}"
        return f"{self.model}, {self.use}: {self.batch} x {lengths}, {counted}, headdim {headdim}"


def language_model(
    name: str, layers: dict[str, Attention], train: int = 2048, prefill: int = 4096, decode: tuple[int, int] = (8, 4096)
) -> Iterator[Row]:
    """Yields a training step, a prefill and a decode step for each kind of layer. `decode` is sequences and tokens of each."""
    for kind, attention in layers.items():
        model = f"{name}, {kind}" if kind else name
        yield Row(model, attention, TRAIN, 1, train, train)
        yield Row(model, attention, FORWARD, 1, prefill, prefill)
        yield Row(model, attention, DECODE, decode[0], 1, decode[1])


def encoder(name: str, attention: Attention, use: str, batch: int, seqlen_q: int, seqlen_k: int = 0) -> Row:
    """Returns a row of bidirectional attention. `seqlen_k` 0: self-attention."""
    return Row(name, replace(attention, causal=False), use, batch, seqlen_q, seqlen_k or seqlen_q)


def layers_of_models(sms: int) -> Iterator[Row]:
    """Yields one layer of each kind, in the uses that the model has. `sms`: of the GPU; it sizes the rows with `wave`."""
    yield from language_model("Llama 3 8B", {"": Attention(32, 8, 128)})
    yield from language_model("Qwen3 0.6B", {"": Attention(16, 8, 128)})
    yield from language_model("Qwen3 8B", {"": Attention(32, 8, 128)}, train=1024, prefill=8192)  # Llama 3 8B's attention at other lengths
    yield from language_model("Qwen3 32B", {"": Attention(64, 8, 128)})
    yield from language_model("Qwen3.5 9B, full attention", {"": Attention(16, 4, 256)})
    yield from language_model("Mistral 7B v0.1", {"": Attention(32, 8, 128, window=4095)}, prefill=8192, decode=(8, 8192))
    gemma2 = Attention(16, 8, 256, softcap=50.0)
    yield from language_model("Gemma 2 9B", {"global": gemma2, "local": replace(gemma2, window=4095)})
    gemma3 = Attention(8, 4, 256)
    yield from language_model("Gemma 3 4B", {"global": gemma3, "local": replace(gemma3, window=1023)})
    yield from language_model("Gemma 4 E4B", {"local": Attention(8, 2, 256, window=511)})
    gpt_oss = Attention(64, 8, 64, sinks=True)
    yield from language_model("gpt-oss 20B", {"full": gpt_oss, "sliding": replace(gpt_oss, window=127)})
    latents = Attention(16, 1, 576, headdim_v=512, latents=True)
    lite = language_model("DeepSeek V2 Lite", {"": Attention(16, 16, 192, headdim_v=128)})
    yield from (replace(row, attention=latents) if row.use == DECODE else row for row in lite)
    yield encoder("BERT base", Attention(12, 12, 64), TRAIN, 16, 512)
    modern = Attention(12, 12, 64)
    yield encoder("ModernBERT base, global", modern, TRAIN, 2, 4096)
    yield encoder("ModernBERT base, local", replace(modern, window=64), TRAIN, 2, 4096)
    yield encoder("ViT-L/14", Attention(16, 16, 64), TRAIN, 32, 257)
    yield encoder("Whisper large v3, encoder", Attention(20, 20, 64), FORWARD, 4, 1500)
    yield encoder("Stable Diffusion 1.5, 64x64", Attention(8, 8, 40), FORWARD, 2, 4096)
    yield encoder("SDXL, 64x64", Attention(10, 10, 64), FORWARD, 2, 4096)
    yield encoder("SDXL, 32x32", Attention(20, 20, 64), FORWARD, 2, 1024)
    yield encoder("SDXL, 64x64 to text", Attention(10, 10, 64), FORWARD, 2, 4096, 77)
    yield encoder("Stable Diffusion 3 medium", Attention(24, 24, 64), FORWARD, 2, 4096 + 333)
    yield encoder("FLUX.1, 1024x1024", Attention(24, 24, 128), FORWARD, 1, 4096 + 512)
    # Full waves, at least 80 blocks of 128 queries, stand for the call, since all blocks do the same. A head of 1024 queries has 8 blocks.
    heads = -(-80 // sms) * sms // 8
    for name, keys in (("Wan 2.1 1.3B, a wave of 480p", 32760), ("HunyuanVideo, a wave of 720p", 115200 + 256)):
        yield replace(encoder(name, Attention(heads, heads, 128), FORWARD, 1, 1024, keys), wave=True)


# ---- their calls -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case(driver.Case):
    """Forward and, in training, backward of a layer. Decoding has decode.Case instead."""

    attention: Attention
    batch: int
    seqlen_q: int
    seqlen_k: int
    backward: bool

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
        """Returns the operator calls. `device` is always "cpu", which runs the simulator: this benchmark has no --device."""
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
    """Returns standard normal fp16 values from a fixed seed."""
    return aligned(shape, torch.float16).copy_(torch.randn(shape, generator=torch.Generator().manual_seed(len(shape))))


def case_of(row: Row) -> driver.Case:
    """Returns the calls of a row. Models with the same calls share them: a window that hides no key counts as none."""
    a = replace(row.attention, window=row.window)
    if row.use != DECODE:
        return Case(a, row.batch, row.seqlen_q, row.seqlen_k, row.use == TRAIN)
    features = {"latents": a.latents} if a.latents else {"window": a.window, "softcap": a.softcap, "sinks": a.sinks}
    return decode.Case(a.headdim, (row.seqlen_k,) * row.batch, a.nheads // a.nheads_k, kv_heads=a.nheads_k, **features)


class PyTorch:
    """PyTorch's kernels on a simulated GPU. `library`: libtorch_cuda.so; `simulator`: volta-sim's command. None: only kept figures."""

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
        # The time is 4 operations at the forward's speed and 10 at the backward's.
        return forward if row.use == FORWARD else forward and backward and 14 / (4 / forward + 10 / backward)

    def _speed(self, direction: str, row: Row) -> float | None:
        a, sms, forward = row.attention, GPUS[self._gpu].sms, direction == FORWARD_PASS
        # Without a mask each step over keys costs the same, so at most 8192 tokens (backward: 1024) stand for longer ones.
        longest = row.seqlen_k if a.causal else 8192 if forward else 1024
        rows, keys = (min(n, longest) for n in (row.seqlen_q, row.seqlen_k))
        # the first kernel that takes this headdim and these lengths; kernel.rows: query rows of its block
        kernel = next(k for k in self._kernels if k.computes(direction, a.headdim, row.seqlen_q, row.seqlen_k))
        if forward:
            # heads for four waves of three blocks on each SM, but (without `wave`) at most the row's
            heads = -(-4 * 3 * sms * kernel.rows // rows)
            heads = heads if row.wave else min(row.batch * a.nheads, heads)
        else:
            # one block for each head: on each SM as many as have 256 threads in all
            heads = sms * 256 // math.prod(kernel.threads)
        launch = pytorch_fmha.job(kernel, heads, rows, keys, has_files=False, headdim=a.headdim, causal=a.causal)
        # Its inputs are random with fixed seeds, so the launch identifies the result. JSON turns its tuples into the file's lists.
        key = {"gpu": self._gpu, "pytorch": json.loads(json.dumps(launch))}
        known = self._kept.get(key)
        if known is None and self._simulator:
            known = pytorch_fmha.tflops(self._simulator, Path(self._temporary.name), self._gpu, launch)
            self._kept.put(key, known)
        return known


def model_rows(gpu: str) -> Iterator[Row]:
    """Yields the rows that a GPU has kernels for."""
    return (row for row in layers_of_models(GPUS[gpu].sms) if gpu == "v100" or not row.attention.latents)


def rows(options: argparse.Namespace) -> list[driver.Row]:
    """Returns the benchmark's rows. Replaces options.pytorch, two paths or None, by a PyTorch object for each GPU."""
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
    """Returns the row's GB/s (decoding) or TFLOP/s as text. `model` 0: the simulator's default; 1: a perfect instruction cache."""
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
    by_name = {(r.row.gpu, r.row.name): r for r in results}
    for name in dict.fromkeys(r.row.name for r in results):
        found = [by_name.get((gpu, name)) for gpu in options.gpu]
        grid.rows.append([name, *(cell(r) if r else "-" for r in found for cell in columns.values())])
    return [grid]


def plot(results: Sequence[Result], options: argparse.Namespace, header: dict[str, str], path: Path) -> None:
    """Draws the shares on the first GPU as bars, one panel for each use, with PyTorch's as thin bars on them."""
    gpu = options.gpu[0]
    results = [r for r in results if r.row.gpu == gpu]
    uses = [use for use in (TRAIN, FORWARD, DECODE) if any(use_of(r) == use for r in results)]
    title = f"volta_fa on a simulated {GPUS[gpu].title}, {header['date']}: share of the tensor pipe (decoding: of DRAM)"
    longest = max(sum(use_of(r) == use for r in results) for use in uses)
    figure, axes = report.panels(1, len(uses), title, (6.5 * len(uses), 1 + 0.3 * longest), sharex=True)
    for axis, use in zip(axes[0], uses):
        bars = {r.row.name.partition(f", {use}:")[0]: r for r in results[::-1] if use_of(r) == use}
        shares = [100 * r.share() for r in bars.values()]
        drawn = axis.barh(list(bars), shares, color=report.COLORS["volta_fa"], height=0.6, label="volta_fa")
        speeds = {model: options.beside.get((gpu, r.row.name)) for model, r in bars.items()}
        beside = {model: 100 * speed / bars[model].peak for model, speed in speeds.items() if speed}
        if beside:
            axis.barh(*zip(*beside.items()), color=report.COLORS["SDPA efficient"], height=0.25, label="PyTorch, memory-efficient")
        axis.bar_label(drawn, [rate(r, unit=True) for r in bars.values()], padding=3, fontsize=8)
        axis.set(xlim=(0, 115), title=use, xlabel="%")
        axis.tick_params(axis="y", labelsize=8)
        axis.set_axisbelow(True)
    report.shared_legend(figure, axes)
    report.save(figure, path)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--pytorch", type=Path, nargs=2, metavar=("LIBTORCH_CUDA", "VOLTA_SIM"), help="adds PyTorch's kernels")


def main(arguments: Sequence[str]) -> int:
    return run("models", Benchmark(__doc__, rows, grids, add_options, plot, several_gpus=True), arguments)


if __name__ == "__main__":
    report.command(main)
