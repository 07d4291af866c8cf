"""Measures the GPU, then attention beside PyTorch's own kernels, with predictions by the simulator for a V100. `measure` is the part "fast"
of `python -m volta_fa check`; `report` shows its `Speeds`. `tune` and `versus` time by `median_ms`."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from ..errors import first_line
from ..integrations.sdpa import disable_sdpa
from . import atomics, machine
from .kernels import Target, lacks_memory  # the device: a GPU, the simulator or the CPU; whether an error is about memory

#: Seconds for the runs of one figure, besides the two runs that always happen.
_SECONDS_PER_FIGURE = 0.12
#: Query heads (batch 1) of the predictions and so of these figures: enough thread blocks for a V100 at every length.
HEADS = {"forward": 32, "backward": 40}
#: Implementations: volta_fa's gradients with and without atomics, and two of PyTorch's.
VOLTA_FA, DETERMINISTIC, EFFICIENT, MATH = "volta_fa", "volta_fa, deterministic", "memory-efficient", "math"
_PYTORCH = {EFFICIENT: SDPBackend.EFFICIENT_ATTENTION, MATH: SDPBackend.MATH}
OUT_OF_MEMORY, OUT_OF_TIME = "out of memory", "no time left"

#: A call to time.
Work = Callable[[], object]


@dataclass
class Point:
    """One shape in one direction: milliseconds of each implementation, or why there are none."""

    direction: str  # forward or backward
    headdim: int
    seqlen: int
    causal: bool
    nheads: int
    ms: dict[str, float] = field(default_factory=dict)  # by implementation
    missing: dict[str, str] = field(default_factory=dict)  # by implementation, why it has no time
    #: TFLOP/s of a simulated V100: by the default machine model, and by one with a perfect instruction cache
    predicted: tuple[float, float] | None = None

    def __str__(self) -> str:
        return f"{self.direction}, seqlen {self.seqlen}, headdim {self.headdim}"

    @property
    def names(self) -> tuple[str, ...]:
        """Implementations to time, the slowest last, because time may run out."""
        return tuple(name for name in (VOLTA_FA, DETERMINISTIC, EFFICIENT, MATH) if name != DETERMINISTIC or self.direction == "backward")

    @property
    def math_bytes(self) -> int:
        """Minimum memory of PyTorch's math implementation in bytes: two or, backward, four score matrices in fp32."""
        return (2 if self.direction == "forward" else 4) * 4 * self.nheads * self.seqlen**2

    @property
    def flops(self) -> float:
        """Floating-point operations: two matrix products forward, five backward; causal ones count half."""
        products = 2 if self.direction == "forward" else 5
        return 2 * products * self.nheads * self.seqlen**2 * self.headdim / (2 if self.causal else 1)

    def tflops(self, name: str) -> float | None:
        """Returns an implementation's TFLOP/s, if it was timed."""
        return self.flops / self.ms[name] / 1e9 if name in self.ms else None

    @property
    def of_prediction(self) -> float | None:
        """Measured over predicted speed, by the default model."""
        found = self.tflops(VOLTA_FA)
        return found / self.predicted[0] if found and self.predicted else None

    def data(self) -> dict[str, Any]:
        """Returns the point for the JSON file."""
        speeds = {name: round(self.flops / ms / 1e9, 3) for name, ms in self.ms.items()}
        return {**asdict(self), "batch": 1, "tflops": speeds, "of_prediction": self.of_prediction}


#: Query heads of a KV head, tokens of a page, and KV heads. The pages of a sequence lie in random order.
GROUP, PAGE, _KV_HEADS = 8, 16, 4


@dataclass
class CachePoint:
    """One shape with a KV cache: milliseconds of each implementation, or why there are none."""

    kind: str  # decode: one query a sequence; append: decode, and its token is written too; prefill: a chunk of a prompt
    headdim: int
    batch: int
    seqlen: int  # cached tokens of each sequence
    seqlen_q: int
    ms: dict[str, float] = field(default_factory=dict)  # by implementation
    missing: dict[str, str] = field(default_factory=dict)  # by implementation, why it has no time

    def __str__(self) -> str:
        return f"{self.kind}, {self.batch} x {self.seqlen}, headdim {self.headdim}"

    @property
    def names(self) -> tuple[str, ...]:
        """Implementations to time. PyTorch's do not append."""
        return (VOLTA_FA,) if self.kind == "append" else (VOLTA_FA, EFFICIENT, MATH)

    @property
    def unit(self) -> str:
        """Unit of `speed`: decode is limited by memory, prefill by matrix products."""
        return "TFLOP/s" if self.kind == "prefill" else "GB/s"

    def speed(self, name: str) -> float | None:
        """Returns an implementation's GB/s of an fp16 cache, or TFLOP/s as if no key were masked; None if it was not timed."""
        if name not in self.ms:
            return None
        elements = self.batch * self.seqlen * _KV_HEADS * self.headdim  # of K, and as many of V
        # 4: two products of two operations, or two tensors of two bytes. The result is in 10^9 a second; / 1e3: 10^12
        work = 4 * GROUP * self.seqlen_q * elements / 1e3 if self.unit == "TFLOP/s" else 4 * elements
        return work / self.ms[name] / 1e6

    @property
    def math_bytes(self) -> int:
        """Minimum memory of PyTorch's math implementation in bytes: three score matrices in fp32."""
        return 3 * 4 * self.batch * _KV_HEADS * GROUP * self.seqlen_q * self.seqlen

    def data(self) -> dict[str, Any]:
        """Returns the point for the JSON file."""
        return {**asdict(self), "unit": self.unit, "speed": {name: self.speed(name) for name in self.ms}}


@dataclass
class Speeds:
    """All measurements."""

    card: dict[str, Any] = field(default_factory=dict)  # of `card_figures`
    points: list[Point] = field(default_factory=list)
    cached: list[CachePoint] = field(default_factory=list)
    predictions: dict[str, Any] | None = None  # of `load_predictions`, on a V100
    troubles: list[str] = field(default_factory=list)  # errors, except lack of memory and errors of PyTorch's own kernels
    loading: float = 0.0  # seconds of setting up and first calling our kernels, which the driver may compile then
    missing: str = ""  # why there are no figures of the card
    note: str = ""  # why nothing was timed


def median_ms(work: Work, device: torch.device, limit: float, most: int = 20, calls: int = 1) -> float:
    """Returns the median time of a call in ms, over at most 1 + `most` runs of `calls` calls each. One call warms up. The runs after the
    first take about `limit` seconds together; if the first takes longer, it alone counts."""
    _run_ms(work, device, calls=1)  # loads code, fills the allocator's cache
    first = _run_ms(work, device, calls)
    runs = min(most, int(limit / max(first / 1e3, 1e-6)))
    return median([first, *(_run_ms(work, device, calls) for _ in range(runs))]) / calls


def _run_ms(work: Work, device: torch.device, calls: int) -> float:
    """Returns the time of `calls` calls in ms."""
    if device.type != "cuda":
        begin = time.perf_counter()
        for _ in range(calls):
            work()
        return 1e3 * (time.perf_counter() - begin)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(calls):
        work()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def load_predictions() -> dict[str, Any]:
    """Returns predictions.json: "points" with TFLOP/s of a simulated V100, and how they were made (by `python -m benchmarks.docs`)."""
    return json.loads(Path(__file__).with_name("predictions.json").read_text())


def shapes(target: Target, quick: bool) -> list[tuple[int, int, bool]]:
    """Returns (seqlen, headdim, causal) of each shape, the most important first, because time may run out."""
    if target.kind == "cpu":
        return [(n, 64, causal) for n in (128, 256) for causal in (False, True)]
    lengths = (2048, 512) if quick else (2048, 1024, 4096, 512, 8192)
    return list(itertools.product(lengths, (64, 128, 256), (False, True)))


def steps(target: Target, quick: bool) -> int:
    """Returns how many steps `measure` has."""
    return 0 if target.kind == "simulator" else 1 + len(cached_points(target, quick)) + len(HEADS) * len(shapes(target, quick))


def measure(target: Target, failed: Sequence[str], deadline: float, quick: bool, advance: Callable[[str], None]) -> Speeds:
    """Measures all figures until `deadline`, a time of time.monotonic(). Loading kernels does not count. `failed` names kernels that must
    not run, because they may hang. `advance` gets each step's name before the step."""
    speeds = Speeds()
    if target.kind == "simulator":
        speeds.note = "not timed: what the simulator takes says nothing about a card (`python -m benchmarks.volta` predicts one)"
        return speeds
    disable_sdpa()  # so that scaled_dot_product_attention runs PyTorch's own kernels
    if target.capability == (7, 0) and target.kind == "cuda":
        speeds.predictions = load_predictions()
    advance("the card itself")
    try:
        speeds.card = card_figures(target)
    except Exception as error:
        if lacks_memory(error):
            speeds.missing = f"the card's figures: {OUT_OF_MEMORY}"
        else:
            speeds.troubles.append(f"the card's figures: {type(error).__name__}: {first_line(error)}")
    for cached in cached_points(target, quick):
        speeds.cached.append(cached)
        advance(str(cached))
        with target.running(failed=failed):
            _measure_point(speeds, target, cached, deadline)
    for seqlen, headdim, causal in shapes(target, quick):
        for direction in HEADS:
            nheads = HEADS[direction] if target.kind == "cuda" else 2
            point = Point(direction, headdim, seqlen, causal, nheads)
            point.predicted = _predicted(speeds.predictions, point)
            speeds.points.append(point)
            advance(str(point))
            with target.running(failed=failed):
                _measure_point(speeds, target, point, deadline)
    return speeds


def _predicted(predictions: dict[str, Any] | None, point: Point) -> tuple[float, float] | None:
    """Returns `Point.predicted` for a point, from `load_predictions`; None if its shape has no prediction."""
    for row in predictions["points"] if predictions else []:
        if all(row[name] == getattr(point, name) for name in ("direction", "headdim", "seqlen", "causal", "nheads")):
            return row["tflops"], row["tflops_no_icache"]
    return None


def card_figures(target: Target) -> dict[str, Any]:
    """Returns TFLOP/s of a GEMM, GB/s of a copy, and on a GPU 10^9 atomic adds per second, clocks and power under load."""
    device, on_gpu = target.device, target.kind == "cuda"
    size, dtype = (4096, torch.float16) if on_gpu else (512, torch.float32)
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    into = torch.empty_like(a)

    def gemm() -> None:
        torch.mm(a, b, out=into)

    figures: dict[str, Any] = {"gemm": f"{size}^3, {str(dtype).removeprefix('torch.')}"}
    ms = median_ms(gemm, device, limit=0.5, most=200)
    figures["gemm_tflops"] = 2 * size**3 / ms / 1e9
    if on_gpu:  # clocks and power while about 0.7 s of GEMMs are queued
        for _ in range(int(700 / ms)):
            gemm()
        under_load = machine.query(device)  # nvidia-smi's values by name
        torch.cuda.synchronize(device)
        figures["under_load"] = {
            name: under_load.get(name) for name in ("sm_clock_mhz", "memory_clock_mhz", "power_draw_w", "throttle_reasons")
        }
    # 256 MiB on a GPU, far larger than its caches
    source = torch.empty(2**28 if on_gpu else 2**25, dtype=torch.uint8, device=device).fill_(1)
    copy = torch.empty_like(source)
    figures["copy_gb_s"] = 2 * source.numel() / median_ms(lambda: copy.copy_(source), device, limit=0.3) / 1e6
    if on_gpu:
        for name, rate in atomics.rates(device, target.sms).items():  # to whole lines of 128 bytes, and to rows of 32
            figures[f"atomic_adds_{name}_g_s"] = rate
    return figures


def _measure_point(speeds: Speeds, target: Target, point: Point | CachePoint, deadline: float) -> None:
    """Times each implementation, or records why it has no time."""
    on_gpu = target.kind == "cuda"
    for name in point.names:
        if name == EFFICIENT and not on_gpu:
            continue
        if time.monotonic() - speeds.loading > deadline:
            point.missing[name] = OUT_OF_TIME
        elif name == MATH and on_gpu and point.math_bytes > torch.cuda.mem_get_info(target.device)[0]:
            point.missing[name] = OUT_OF_MEMORY
        else:
            _time(speeds, target, point, name)
        if on_gpu and point.seqlen >= 4096:  # else large tensors stay in the allocator's cache
            torch.cuda.empty_cache()


def _time(speeds: Speeds, target: Target, point: Point | CachePoint, name: str) -> None:
    """Times an implementation, or records why it has no time. The first call of volta_fa's kernels counts as loading."""
    is_ours = name in (VOLTA_FA, DETERMINISTIC)
    try:
        begin, work = time.monotonic(), _work(point, target, name)
        if is_ours:
            work()
            speeds.loading += time.monotonic() - begin
        point.ms[name] = median_ms(work, target.device, _SECONDS_PER_FIGURE)
    except Exception as error:
        if lacks_memory(error):
            point.missing[name] = OUT_OF_MEMORY
            return
        point.missing[name] = first_line(error)
        if is_ours:  # errors of PyTorch's own kernels are no failure of this library
            speeds.troubles.append(f"{name}, {point}: {type(error).__name__}: {point.missing[name]}")


def _work(point: Point | CachePoint, target: Target, name: str) -> Work:
    """Returns a call of the implementation."""
    if isinstance(point, CachePoint):
        return cached_ours(point, target) if name == VOLTA_FA else _attention(name, *dense_of_cached(point, target))
    return (_ours if name in (VOLTA_FA, DETERMINISTIC) else _pytorch)(point, target, name)


def _attention(name: str, q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False) -> Callable[[], Tensor]:
    """Returns a call of PyTorch's implementation `name`."""

    def forward() -> Tensor:
        with sdpa_kernel(_PYTORCH[name]):
            return scaled_dot_product_attention(q, k, v, is_causal=is_causal)

    return forward


def _drawn(target: Target, *shapes: tuple[int, ...]) -> Iterator[Tensor]:
    """Yields a standard normal tensor of each shape: fp16 on a GPU, fp32 on a CPU."""
    generator = torch.Generator(target.device).manual_seed(0)
    dtype = torch.float16 if target.kind == "cuda" else torch.float32
    for shape in shapes:
        yield torch.randn(shape, generator=generator, device=target.device, dtype=dtype)


def _ours(point: Point, target: Target, name: str) -> Work:
    """Returns a call of volta_fa, forward or backward. Tensors are (batch, seqlen, nheads, headdim)."""
    q, k, v, dout = _drawn(target, *[(1, point.seqlen, point.nheads, point.headdim)] * 4)

    def forward() -> tuple[Tensor, Tensor, Tensor]:
        return torch.ops.volta_fa.fwd(q, k, v, is_causal=point.causal)

    if point.direction == "forward":
        return forward
    out, lse, _ = forward()
    return lambda: torch.ops.volta_fa.bwd(dout, q, k, v, out, lse, is_causal=point.causal, deterministic=name == DETERMINISTIC)


def _pytorch(point: Point, target: Target, name: str) -> Work:
    """Returns a call of PyTorch's implementation, forward or backward. Tensors are (batch, nheads, seqlen, headdim)."""
    q, k, v, dout = _drawn(target, *[(1, point.nheads, point.seqlen, point.headdim)] * 4)
    forward = _attention(name, q, k, v, point.causal)
    if point.direction == "forward":
        return forward
    leaves = [t.requires_grad_() for t in (q, k, v)]
    out = forward()
    return lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True)


# ---- with a KV cache: decode, append and paged prefill, beside PyTorch's own attention of dense tensors -----------------------


def cached_points(target: Target, quick: bool) -> list[CachePoint]:
    """Returns the shapes, the most important first."""
    if target.kind == "cpu":
        kinds = (("decode", 1), ("append", 1), ("prefill", 32))
        return [CachePoint(kind, headdim=64, batch=2, seqlen=128, seqlen_q=n) for kind, n in kinds]
    # kind, sequences, cached tokens, queries
    listed = [("decode", 16, 4096, 1), ("prefill", 1, 8192, 512), ("append", 16, 4096, 1)]
    if not quick:
        listed += [("decode", 1, 16384, 1), ("decode", 64, 1024, 1)]
    return [CachePoint(kind, d, batch, seqlen, n) for (kind, batch, seqlen, n), d in itertools.product(listed, (128, 64, 256))]


def cached_ours(point: CachePoint, target: Target) -> Callable[[], object]:
    """Returns a call of fwd_kvcache on pages."""
    q, k, v = _cached_tensors(point, target)
    pages = -(-point.seqlen // PAGE)
    # a page more of each sequence, for the token that is appended
    table = torch.randperm(point.batch * (pages + 1), generator=torch.Generator().manual_seed(0)).int().view(point.batch, -1)
    shape = (table.numel(), PAGE, _KV_HEADS, point.headdim)
    caches = [torch.empty(shape, device=target.device, dtype=q.dtype).normal_() for _ in "kv"]
    new = [t[:, :1] for t in (k, v)] if point.kind == "append" else []
    lengths = torch.full((point.batch,), point.seqlen, dtype=torch.int32, device=target.device)
    options = {"cache_seqlens": lengths, "block_table": table.to(target.device), "is_causal": True}
    return lambda: torch.ops.volta_fa.fwd_kvcache(q, *caches, *new, **options)


def dense_of_cached(point: CachePoint, target: Target) -> tuple[Tensor, Tensor, Tensor]:
    """Returns q, k and v in the form that is cheapest for PyTorch: query heads of a KV head are rows of one head. No key is masked."""
    q, k, v = _cached_tensors(point, target)
    rows = q.view(point.batch, point.seqlen_q, _KV_HEADS, GROUP, point.headdim).permute(0, 2, 1, 3, 4)
    return rows.reshape(point.batch, _KV_HEADS, -1, point.headdim), k.transpose(1, 2), v.transpose(1, 2)


def _cached_tensors(point: CachePoint, target: Target) -> Iterator[Tensor]:
    """Yields q, and the cached tokens as dense k and v."""
    rows = ((point.seqlen_q, GROUP * _KV_HEADS), (point.seqlen, _KV_HEADS), (point.seqlen, _KV_HEADS))
    return _drawn(target, *((point.batch, n, heads, point.headdim) for n, heads in rows))
