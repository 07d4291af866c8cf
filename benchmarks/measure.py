"""Measures the time of a function ("work") on a device, and what it launches in the simulator. The benchmarks call it."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

import torch

from volta_fa.check.kernels import simulate  # runs work with the simulator in a mode, and returns its reports of launches

# for the benchmarks: empty tensors aligned as CUDA's allocator does, and the peak of what work allocates
from volta_fa.demo.simulated import aligned as aligned
from volta_fa.demo.train import peak_bytes as peak_bytes

Work = Callable[[], object]


def median_ms(work: Work, device: torch.device, budget: float) -> float:
    """Returns the median time of one run in milliseconds, out of 3 to 50 runs that take about `budget` seconds together."""
    _seconds(work, device)  # loads code and fills the allocator's cache
    once = max(_seconds(work, device), 1e-6)
    repeats = min(50, max(3, int(budget / once)))
    if device.type != "cuda":
        return 1e3 * median(_seconds(work, device) for _ in range(repeats))
    # The GPU records events between kernels, so the host's time counts only where the GPU waits for it.
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
    for start, end in events:
        start.record()
        work()
        end.record()
    torch.cuda.synchronize(device)
    return median(start.elapsed_time(end) for start, end in events)


def _seconds(work: Work, device: torch.device) -> float:
    synchronize(device)
    start = time.perf_counter()
    work()
    synchronize(device)
    return time.perf_counter() - start


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def simulated(work: Work, settings: str, gpu: str = "") -> list[dict]:
    """Returns volta-sim's timed reports of work on CPU tensors, one per launch. `settings`: VOLTA_FA_SIM_SET; `gpu`: VOLTA_FA_SIM_GPU."""
    return _reports(work, "timing", settings, gpu)


def launches(work: Work, gpu: str) -> list[dict]:
    """Returns what the work would launch on a simulated GPU: kernels, grids and a digest of each kernel's machine code. Runs no kernel."""
    return _reports(work, "launches", "", gpu)


def _reports(work: Work, mode: str, settings: str, gpu: str) -> list[dict]:
    return simulate(work, mode, VOLTA_FA_SIM_SET=settings, **({"VOLTA_FA_SIM_GPU": gpu} if gpu else {}))
