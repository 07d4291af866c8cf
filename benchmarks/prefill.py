"""Measures a chunk of a prompt after cached tokens: kernels that read pages, beside the plain kernel on one dense tensor.

    python -m benchmarks.prefill [--json FILE]                  simulated, a V100
    python -m benchmarks.prefill --gpu t4 [--json FILE]         simulated, a T4
    python -m benchmarks.prefill --device cuda [--json FILE]    measured

The chunk has 512 causal queries, and its sequence 16384 tokens including them. TFLOP/s count 4 * headdim operations for
each visible pair of query and key in each query head. Pages are in random order.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

import volta_fa  # noqa: F401  (loads the ops)
from volta_fa.errors import CommandError

from . import report
from .measure import aligned, ended, median_ms, simulated
from .shapes import Shape

#: Minimum rate of kernels that read pages, as a fraction of the dense kernel's.
TARGET = 0.85
#: Query heads by GPU and headdim. The simulation times one SM only, so its row tiles fill whole waves. "": a real GPU, with any number.
HEADS = {"v100": {64: 40, 128: 40, 256: 20}, "t4": {64: 40, 128: 20, 256: 20}, "": {64: 32, 128: 32, 256: 32}}


@dataclass(frozen=True)
class Case:
    headdim: int
    nheads: int
    page: int  # 0: dense
    nheads_k: int = 4
    seqlen_q: int = 512
    seqlen_k: int = 16384

    @property
    def name(self) -> str:
        return f"headdim {self.headdim}, {self.nheads} heads on {self.nheads_k}, {f'pages of {self.page}' if self.page else 'dense'}"

    @property
    def flops(self) -> float:
        return Shape(1, self.nheads, self.seqlen_q, self.seqlen_k, self.headdim, causal=True).forward_flops


def cases(heads: dict[int, int]) -> Iterator[Case]:
    """Yields the cases of each headdim: dense K and V first, then each page size."""
    for headdim, nheads in heads.items():
        yield from (Case(headdim, nheads, page) for page in (0, 16, 64, 256))


def call(case: Case, device: str) -> Callable[[], object]:
    """Returns the call to time. All elements are 0.01, because no time depends on them."""

    def tensor(*shape: int) -> Tensor:
        return aligned(shape, torch.float16, device).fill_(0.01)

    q = tensor(1, case.seqlen_q, case.nheads, case.headdim)
    if not case.page:
        k, v = (tensor(1, case.seqlen_k, case.nheads_k, case.headdim) for _ in "kv")
        return lambda: torch.ops.volta_fa.fwd(q, k, v, is_causal=True)
    pages = case.seqlen_k // case.page
    k, v = (tensor(pages, case.page, case.nheads_k, case.headdim) for _ in "kv")
    table = torch.randperm(pages, generator=torch.Generator().manual_seed(0)).int()[None].to(device)
    lengths = torch.tensor([case.seqlen_k], dtype=torch.int32, device=device)
    return lambda: torch.ops.volta_fa.fwd_kvcache(q, k, v, block_table=table, cache_seqlens=lengths, is_causal=True)


def microseconds(case: Case, gpu: str) -> float:
    """Returns the time of a case on this simulated GPU, or on a real one if `gpu` is empty."""
    work = call(case, "cpu" if gpu else "cuda")
    if not gpu:
        return 1e3 * median_ms(work, torch.device("cuda"), budget=0.5)
    return sum(report["timing"]["kernel_us"] for report in simulated(work, "", gpu))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.prefill", description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("simulated", "cuda"), default="simulated")
    parser.add_argument("--gpu", choices=("v100", "t4"), default="v100", help="that is simulated")
    parser.add_argument("--only", default="", metavar="WORDS", help="cases whose name has these words")
    parser.add_argument("--tokens", type=int, default=16384, metavar="N", help="of the sequence, the chunk included")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here too")
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        raise CommandError("benchmarks.prefill: needs a CUDA device, and this machine has none")
    if options.tokens < 512 or options.tokens % 256:
        raise CommandError(f"--tokens {options.tokens}: expected a multiple of 256, at least 512")
    gpu = "" if options.device == "cuda" else options.gpu
    rows, failed, dense = [], 0, 0.0
    every = (replace(case, seqlen_k=options.tokens) for case in cases(HEADS[gpu]))
    for case in report.track((case for case in every if options.only in case.name), "cases"):
        us = microseconds(case, gpu)
        if not case.page:
            dense = us
        share = dense / us if dense else 0.0
        missed = 0.0 < share < TARGET
        failed += missed
        rows.append({**asdict(case), "us": us, "tflops": case.flops / us / 1e6, "share": share})
        print(
            f"{case.name:46s} {us:9.1f} us {case.flops / us / 1e6:6.1f} TFLOP/s {share:5.0%}{f' < {TARGET:.0%}' if missed else ''}",
            flush=True,
        )
    return ended(rows, failed, options.json)


if __name__ == "__main__":
    sys.exit(main())
