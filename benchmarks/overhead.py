"""Measures the host time (wall clock) of a call against PyTorch's op, aten::_scaled_dot_product_flash_attention.

    python -m benchmarks.overhead [--json FILE]

Needs a CUDA device on which PyTorch's op runs. A call returns when its kernels are queued, so its host time leaves them out. The benchmark
drains the GPU's queue before each round of calls, outside the timed region: a full queue would make the host wait for kernels."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median

import torch

import volta_fa

from . import report

CALLS = 64  # per round: far fewer launches than the GPU's queue holds (about 1024)
ROUNDS = 60


def microseconds(call: Callable[[], object]) -> float:
    """Returns the mean time of a call within a round, as the median over the last three quarters of the rounds."""
    rounds = []
    for _ in range(ROUNDS):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(CALLS):
            call()
        rounds.append((time.perf_counter() - start) / CALLS)
    return 1e6 * median(rounds[ROUNDS // 4 :])  # warm-up loads modules and fills the allocator's cache


def measure() -> dict[str, float]:
    """Returns the microseconds of each call by name, on q, k and v of (1, 64, 1, 64). fwd_kvcache has one query."""
    half = {"device": "cuda", "dtype": torch.float16}
    t = torch.randn(1, 64, 1, 64, **half)  # ours: (batch, seqlen, nheads, headdim)
    by_head = t.transpose(1, 2)  # PyTorch's
    none = t[:, :0]
    fwd = torch.ops.volta_fa.fwd.default
    flash = torch.ops.aten._scaled_dot_product_flash_attention.default
    kvcache = torch.ops.volta_fa.fwd_kvcache
    pages = torch.randn(4, 16, 1, 64, **half)
    new = t[:, :1]
    lengths, table = (torch.tensor(x, dtype=torch.int32, device="cuda") for x in ([40], [[2, 0, 3, 1]]))
    cached = {"cache_seqlens": lengths, "block_table": table, "is_causal": True}
    empty = torch.ops.aten.empty.memory_format
    sdpa = torch.nn.functional.scaled_dot_product_attention
    calls: dict[str, Callable[[], object]] = {
        "aten::alias, the cheapest op: dispatch and a view": lambda: torch.ops.aten.alias.default(t),
        "torch.empty": lambda: torch.empty(64, **half),
        "aten::empty as an op": lambda: empty([64], **half),
        "volta_fa::fwd without a launch (seqlen_q 0)": lambda: fwd(none, t, t),
        "volta_fa::fwd": lambda: fwd(t, t, t),
        # the cache holds 64 tokens in one tensor, or in four pages of 16; of the pages 40 tokens are used
        "volta_fa::fwd_kvcache, contiguous cache": lambda: kvcache.default(new, t, t),
        "volta_fa::fwd_kvcache, paged cache": lambda: kvcache.default(new, pages, pages, **cached),
        "volta_fa::fwd_kvcache.append, same paged cache": lambda: kvcache.append(new, pages, pages, new, new, **cached),
        "aten::_scaled_dot_product_flash_attention": lambda: flash(by_head, by_head, by_head),
        "scaled_dot_product_attention, PyTorch's": lambda: sdpa(by_head, by_head, by_head),
    }
    with torch.no_grad():
        found = {name: microseconds(call) for name, call in calls.items()}
        with volta_fa.sdpa_enabled(force=True):  # also on GPUs newer than Turing
            found["scaled_dot_product_attention, ours"] = microseconds(lambda: sdpa(by_head, by_head, by_head))
    return found


def main(arguments: Sequence[str]) -> int:
    options = report.parser("overhead", __doc__, plot=False).parse_args(arguments)  # --json and --markdown, which deliver() writes
    device = report.choose_device("cuda")
    found = measure()
    flash, paged = found["aten::_scaled_dot_product_flash_attention"], found["volta_fa::fwd_kvcache, paged cache"]
    grid = report.table("Host time", found.items(), {"call": lambda pair: pair[0], "us": lambda pair: f"{pair[1]:.1f}"})
    grid.rows += [
        ["volta_fa::fwd minus PyTorch's op (target: at most 15 us)", f"{found['volta_fa::fwd'] - flash:.1f}"],
        ["volta_fa::fwd_kvcache, paged cache, over PyTorch's op (target: at most 1)", f"{paged / flash:.2f}"],
    ]
    header = report.facts("overhead", arguments, device=report.device_name(device))
    report.deliver(options, header, [grid], {"device": header["device"], "torch": torch.__version__, "microseconds": found})
    return 0


if __name__ == "__main__":
    report.command(main)
