"""Measures the GPU, then attention beside PyTorch's own kernels and beside the simulator's predictions."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from ..integrations.sdpa import disable_sdpa
from . import atomics, machine, performance_cached
from .kernels import Target, lacks_memory
from .performance_cached import CachePoint

#: Seconds for the runs of one figure, besides the two runs that always happen.
_OF_A_FIGURE = 0.12
#: Heads with which the predictions were made: enough blocks for a V100 at every length.
HEADS = {"forward": 32, "backward": 40}
VOLTA_FA, DETERMINISTIC, EFFICIENT, MATH = "volta_fa", "volta_fa, deterministic", "memory-efficient", "math"
_PYTORCH = {EFFICIENT: SDPBackend.EFFICIENT_ATTENTION, MATH: SDPBackend.MATH}
OUT_OF_MEMORY, OUT_OF_TIME = "out of memory", "no time left"


Work = Callable[[], object]


@dataclass
class Point:
    """One shape and pass: milliseconds of each implementation, or why there are none."""

    direction: str  # forward or backward
    headdim: int
    seqlen: int
    causal: bool
    nheads: int
    ms: dict[str, float] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    #: simulated TFLOP/s: default model, perfect instruction cache
    predicted: tuple[float, float] | None = None

    @property
    def flops(self) -> float:
        """Operations: two products forward, five backward; causal ones count half."""
        products = 2 if self.direction == "forward" else 5
        return 2 * products * self.nheads * self.seqlen**2 * self.headdim / (2 if self.causal else 1)

    def tflops(self, name: str) -> float | None:
        """Returns the speed of an implementation, if it was timed."""
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


@dataclass
class Speeds:
    """What was timed."""

    card: dict[str, Any] = field(default_factory=dict)
    points: list[Point] = field(default_factory=list)
    cached: list[CachePoint] = field(default_factory=list)
    predictions: dict[str, Any] | None = None
    #: errors, except lack of memory and errors of PyTorch's own kernels
    troubles: list[str] = field(default_factory=list)
    #: seconds of setting up and first calling our kernels, which the driver may compile then
    loading: float = 0.0
    #: why there are no figures of the card
    missing: str = ""
    note: str = ""


def median_ms(work: Work, device: torch.device, limit: float, most: int = 20, calls: int = 1) -> float:
    """Returns the median time of a call in ms, over up to `most` runs of `calls` calls each.

    The runs take about `limit` seconds together, after one to warm up. If that one takes longer than the limit, it alone counts.
    """
    _run_ms(work, device, 1)  # loads code, fills the allocator's cache
    first = _run_ms(work, device, calls)
    runs = min(most, int(limit / max(first / 1e3, 1e-6)))
    return median([first, *(_run_ms(work, device, calls) for _ in range(runs))]) / calls


def _run_ms(work: Work, device: torch.device, calls: int) -> float:
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
    """Returns figures of the simulated V100; `python -m benchmarks.docs` makes the file."""
    found: dict[str, Any] = json.loads(Path(__file__).with_name("predictions.json").read_text())
    return found


def shapes(target: Target, quick: bool) -> list[tuple[int, int, bool]]:
    """Returns (seqlen, headdim, causal) of each shape, the most telling first, because time may run out."""
    if target.kind == "cpu":
        return [(n, 64, causal) for n in (128, 256) for causal in (False, True)]
    lengths = (2048, 512) if quick else (2048, 1024, 4096, 512, 8192)
    return list(itertools.product(lengths, (64, 128, 256), (False, True)))


def steps(target: Target, quick: bool) -> int:
    """Returns how many steps `measure` has."""
    return 0 if target.kind == "simulator" else 1 + len(performance_cached.points(target, quick)) + len(HEADS) * len(shapes(target, quick))


def measure(target: Target, failed: Sequence[str], deadline: float, quick: bool, advance: Callable[[str], None]) -> Speeds:
    """Measures all figures until `deadline`, a time of time.monotonic(). Loading kernels does not count.

    Kernels that failed do not run, because they may never end. `advance` is called before each step.
    """
    speeds = Speeds()
    if target.kind == "simulator":
        speeds.note = "not timed: what the simulator takes says nothing about a card (`python -m benchmarks.volta` predicts one)"
        return speeds
    disable_sdpa()  # PyTorch's attention is to be PyTorch's
    if target.capability == (7, 0) and target.kind == "cuda":
        speeds.predictions = load_predictions()
    advance("the card itself")
    _attempt(speeds, "the card's figures", lambda: speeds.card.update(card_figures(target)))
    for cached in performance_cached.points(target, quick):
        speeds.cached.append(cached)
        advance(str(cached))
        with target.running(failed=failed):
            _measure_cached(speeds, target, cached, deadline)
    for seqlen, headdim, causal in shapes(target, quick):
        for direction in HEADS:
            nheads = HEADS[direction] if target.kind == "cuda" else 2
            point = Point(direction, headdim, seqlen, causal, nheads)
            point.predicted = _predicted(speeds.predictions, point)
            speeds.points.append(point)
            advance(f"{direction}, seqlen {seqlen}, headdim {headdim}")
            with target.running(failed=failed):
                _measure_point(speeds, target, point, deadline)
    return speeds


def _predicted(predictions: dict[str, Any] | None, point: Point) -> tuple[float, float] | None:
    for row in predictions["points"] if predictions else []:
        if all(row[name] == getattr(point, name) for name in ("direction", "headdim", "seqlen", "causal", "nheads")):
            return row["tflops"], row["tflops_no_icache"]
    return None


def _attempt(speeds: Speeds, what: str, work: Callable[[], object]) -> None:
    try:
        work()
    except Exception as error:
        said = str(error).splitlines()[0] if str(error) else ""
        if lacks_memory(error):
            speeds.missing = f"{what}: {OUT_OF_MEMORY}"
            return
        speeds.troubles.append(f"{what}: {type(error).__name__}: {said}")


def card_figures(target: Target) -> dict[str, Any]:
    """Returns TFLOP/s of a GEMM, GB/s of a copy, and on a GPU 10^9 atomic adds per second, clocks and power under load."""
    device, on_gpu = target.device, target.kind == "cuda"
    size, dtype = (4096, torch.float16) if on_gpu else (512, torch.float32)
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    into = torch.empty_like(a)

    def gemm() -> None:
        torch.mm(a, b, out=into)

    figures: dict[str, Any] = {"gemm": f"{size}^3, {str(dtype).removeprefix('torch.')}"}
    ms = median_ms(gemm, device, 0.5, most=200)
    figures["gemm_tflops"] = 2 * size**3 / ms / 1e9
    if on_gpu:  # clocks while it works
        for _ in range(int(700 / ms)):
            gemm()
        under_load = machine.query(device)
        torch.cuda.synchronize(device)
        figures["under_load"] = {
            name: under_load.get(name) for name in ("sm_clock_mhz", "memory_clock_mhz", "power_draw_w", "throttle_reasons")
        }
    # far larger than any cache
    source = torch.empty(2**28 if on_gpu else 2**25, dtype=torch.uint8, device=device).fill_(1)
    copy = torch.empty_like(source)
    figures["copy_gb_s"] = 2 * source.numel() / median_ms(lambda: copy.copy_(source), device, 0.3) / 1e6
    if on_gpu:
        for name, rate in atomics.rates(device, target.sms).items():
            figures[f"atomic_adds_{name}_g_s"] = rate
    return figures


def _measure_point(speeds: Speeds, target: Target, point: Point, deadline: float) -> None:
    # PyTorch's slowest is the first to be left out
    for name in (VOLTA_FA, DETERMINISTIC, EFFICIENT, MATH):
        if (name == DETERMINISTIC and point.direction == "forward") or (name == EFFICIENT and target.kind != "cuda"):
            continue
        make = _ours if name in (VOLTA_FA, DETERMINISTIC) else _pytorch
        place = f"{name}, {point.direction}, seqlen {point.seqlen}, headdim {point.headdim}"
        needed = _math_bytes(point) if name == MATH else 0
        _measure_one(speeds, target, point, name, place, lambda: make(point, target, name), needed, deadline)
        if target.kind == "cuda" and point.seqlen >= 4096:
            torch.cuda.empty_cache()


def _measure_cached(speeds: Speeds, target: Target, point: CachePoint, deadline: float) -> None:
    for name in (VOLTA_FA, EFFICIENT, MATH):
        if (name == EFFICIENT and target.kind != "cuda") or (name != VOLTA_FA and point.kind == "append"):
            continue
        if name == VOLTA_FA:
            _measure_one(speeds, target, point, name, str(point), lambda: performance_cached.ours(point, target), 0, deadline)
        else:
            needed = point.math_bytes if name == MATH else 0
            make = partial(_attention, name, performance_cached.dense, point, target)
            _measure_one(speeds, target, point, name, str(point), make, needed, deadline)


def _attention(name: str, tensors: Callable[..., Sequence[Tensor]], *of: Any) -> Callable[[], Tensor]:
    q, k, v = tensors(*of)

    def forward() -> Tensor:
        with sdpa_kernel(_PYTORCH[name]):
            return scaled_dot_product_attention(q, k, v)

    return forward


def _measure_one(
    speeds: Speeds,
    target: Target,
    point: Point | CachePoint,
    name: str,
    place: str,
    make: Callable[[], Work],
    needed: int,
    deadline: float,
) -> None:
    """Times what `make` makes, or records why it has no time."""
    if time.monotonic() - speeds.loading > deadline:
        point.missing[name] = OUT_OF_TIME
        return
    if target.kind == "cuda" and needed > torch.cuda.mem_get_info(target.device)[0]:
        point.missing[name] = OUT_OF_MEMORY
        return
    try:
        begin, work = time.monotonic(), make()
        if name in (VOLTA_FA, DETERMINISTIC):
            work()
            speeds.loading += time.monotonic() - begin
        point.ms[name] = median_ms(work, target.device, _OF_A_FIGURE)
    except Exception as error:
        if lacks_memory(error):
            point.missing[name] = OUT_OF_MEMORY
            return
        point.missing[name] = str(error).splitlines()[0] if str(error) else type(error).__name__
        if name in (VOLTA_FA, DETERMINISTIC):  # what PyTorch's own lacks is not for us to judge
            speeds.troubles.append(f"{place}: {type(error).__name__}: {point.missing[name]}")


def _math_bytes(point: Point) -> int:
    """Returns the least bytes that the scores take: PyTorch's own operations keep several matrices of them in fp32."""
    matrices = 2 if point.direction == "forward" else 4
    return matrices * 4 * point.nheads * point.seqlen**2


def _tensors(point: Point, target: Target, heads_first: bool) -> Iterator[Tensor]:
    shape = (1, point.nheads, point.seqlen, point.headdim) if heads_first else (1, point.seqlen, point.nheads, point.headdim)
    generator = torch.Generator(target.device).manual_seed(0)
    dtype = torch.float16 if target.kind == "cuda" else torch.float32
    for _ in range(4):
        yield torch.randn(shape, generator=generator, device=target.device, dtype=dtype)


def _ours(point: Point, target: Target, name: str) -> Work:
    q, k, v, dout = _tensors(point, target, heads_first=False)

    def forward() -> tuple[Tensor, Tensor, Tensor]:
        return torch.ops.volta_fa.fwd(q, k, v, is_causal=point.causal)

    if point.direction == "forward":
        return forward
    out, lse, _ = forward()
    return lambda: torch.ops.volta_fa.bwd(dout, q, k, v, out, lse, is_causal=point.causal, deterministic=name == DETERMINISTIC)


def _pytorch(point: Point, target: Target, name: str) -> Work:
    q, k, v, dout = _tensors(point, target, heads_first=True)

    def forward() -> Tensor:
        with sdpa_kernel(_PYTORCH[name]):
            return scaled_dot_product_attention(q, k, v, is_causal=point.causal)

    if point.direction == "forward":
        return forward
    leaves = [t.requires_grad_() for t in (q, k, v)]
    out = forward()
    return lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True)
