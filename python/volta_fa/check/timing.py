"""Takes the times of a piece of work on a device, within a limit of seconds."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

import torch

Work = Callable[[], object]


def median_ms(work: Work, device: torch.device, limit: float, most: int = 20, calls: int = 1) -> float:
    """Returns the median time of a call in ms, over up to `most` runs of `calls` calls each.

    The runs take about `limit` seconds together, after one to warm up. If that one takes longer than the limit, it alone counts.
    """
    _run(work, device, 1)  # loads code, fills the allocator's cache
    first = _run(work, device, calls)
    runs = min(most, int(limit / max(first / 1e3, 1e-6)))
    return median([first, *(_run(work, device, calls) for _ in range(runs))]) / calls


def _run(work: Work, device: torch.device, calls: int) -> float:
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
