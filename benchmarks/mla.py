"""Measures MLA decoding over a paged cache of latents, in bytes of the cache per second and TFLOP/s, on a simulated V100.

    python -m benchmarks.mla [--only TEXT] [--json FILE]

As in `benchmarks.decode`, the simulation times one SM's share of a launch without the launch itself, at the model's DRAM
latency and at 3000 cycles. Data that other SMs would bring into L2 counts as present. Latents are fp16 or quantized, in
pages of 64 tokens in random order.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

import volta_fa

from .decode import DRAM_GB_S, LATENCIES
from .measure import aligned, ended, simulated

HEADDIM, HEADDIM_V, PAGE = 576, 512, 64
QUANTIZED = ("int8", "fp8_e5m2", "fp8_e4m3")


@dataclass(frozen=True)
class Case:
    nheads: int
    batch: int
    seqlen: int
    seqlen_q: int = 1
    kv_dtype: str = ""  # of a quantized cache
    target: float = 0.0  # share of the DRAM rate to reach at the default latency
    slow_target: float = 0.0  # the same at 3000 cycles
    tflops_target: float = 0.0

    @property
    def name(self) -> str:
        return f"{self.kv_dtype or 'fp16'}, {self.nheads} heads, {self.batch} x {self.seqlen}, queries {self.seqlen_q}"

    @property
    def bytes(self) -> int:
        """Bytes of latents that a call reads, including scales."""
        of_token = HEADDIM if self.kv_dtype else 2 * HEADDIM
        return self.batch * self.seqlen * (of_token + (4 if self.kv_dtype == "int8" else 0))

    @property
    def flops(self) -> int:
        return self.batch * self.seqlen * self.nheads * self.seqlen_q * 2 * (HEADDIM + HEADDIM_V)


def cases() -> Iterator[Case]:
    yield Case(16, 4, 65536, target=0.88, slow_target=0.88)
    yield Case(16, 16, 16384, target=0.88, slow_target=0.88)
    yield Case(16, 64, 4096, target=0.78)
    yield Case(16, 1, 65536, target=0.88, slow_target=0.88)
    yield Case(16, 1, 16384)
    yield Case(16, 16, 4096, seqlen_q=2)
    yield Case(32, 2, 65536)
    yield Case(64, 16, 4096)
    yield Case(128, 16, 4096, tflops_target=60)
    yield Case(128, 1, 32768, tflops_target=60)
    # With 16 heads, twice the tokens in about the same bytes; with 128 heads, the same tokens.
    for kv_dtype in QUANTIZED:
        target = 0.80 if kv_dtype == "fp8_e4m3" else 0.88
        yield Case(16, 8, 65536, kv_dtype=kv_dtype, target=target, slow_target=target)
        yield Case(16, 32, 16384, kv_dtype=kv_dtype, target=target, slow_target=target)
        yield Case(16, 128, 4096, kv_dtype=kv_dtype, target=0.78)
        yield Case(128, 16, 4096, kv_dtype=kv_dtype, tflops_target=60)


def problem(case: Case) -> tuple[Tensor, Tensor, dict]:
    pages = -(-case.seqlen // PAGE)
    # no time depends on the values
    if case.kv_dtype:
        dtype = volta_fa.quantize_kv(torch.zeros(1, HEADDIM), case.kv_dtype).data.dtype
        cache = aligned((case.batch * pages, PAGE, 1, HEADDIM), dtype)
        cache.view(torch.uint8).fill_(1)
    else:
        cache = aligned((case.batch * pages, PAGE, 1, HEADDIM), torch.float16).fill_(0.01)
    table = torch.randperm(case.batch * pages, generator=torch.Generator().manual_seed(0)).int().view(case.batch, pages)
    q = aligned((case.batch, case.seqlen_q, case.nheads, HEADDIM), torch.float16).fill_(0.01)
    lengths = torch.full((case.batch,), case.seqlen, dtype=torch.int32)
    options = {"block_table": table, "cache_seqlens": lengths, "is_causal": True}
    if case.kv_dtype == "int8":
        options["latent_scale"] = aligned((case.batch * pages, PAGE, 1), torch.float32).fill_(0.01)
    return q, cache, options


def simulate(case: Case, settings: str) -> dict:
    q, cache, options = problem(case)
    (report,) = simulated(lambda: torch.ops.volta_fa.fwd_mla(q, cache, **options), settings)
    us = report["timing"]["kernel_us"]
    gb_s = case.bytes / us / 1e3
    return {"kernel": report["kernel"], "us": us, "gb_s": gb_s, "share": gb_s / DRAM_GB_S, "tflops": case.flops / us / 1e6}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.mla", description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", metavar="TEXT", help="cases whose name contains TEXT")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here too")
    options = parser.parse_args(arguments)
    rows, failed = [], 0
    for case in cases():
        if options.only not in case.name:
            continue
        cells = []
        for latency, settings in LATENCIES.items():
            found = simulate(case, settings)
            target = case.target if latency == "430" else case.slow_target
            missed = found["share"] < target or (latency == "430" and found["tflops"] < case.tflops_target)
            failed += missed
            cells.append(
                f"{found['us']:8.1f} us {found['share']:6.1%} {found['tflops']:5.1f} TFLOP/s{' below its target' if missed else ''}"
            )
            rows.append({**asdict(case), "latency": latency, **found})
        print(f"{case.name:44s} {found['kernel']:21s} {' | '.join(cells)}", flush=True)
    return ended(rows, failed, options.json)


if __name__ == "__main__":
    sys.exit(main())
