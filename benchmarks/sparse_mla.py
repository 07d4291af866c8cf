"""Times sparse latent attention (`volta_fa::fwd_sparse_mla`) on a simulated V100: selection of tokens, and attention.

    python -m benchmarks.sparse_mla

Each query chooses distinct tokens of a cache of 32,768 in pages of 64, at random. The simulation times one SM's share of each launch
(tools/volta-sim), without launch overhead and without the combination of partial results between SMs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from volta_fa.check.kernels import simulate

from . import report

TOKENS, PAGE = 32768, 64


@dataclass(frozen=True)
class Case:
    """A call. `extra`: tokens of a second cache (DeepSeek V4)."""

    queries: int
    heads: int = 128
    topk: int = 2048
    dtype: torch.dtype = torch.float16
    fp8: bool = True
    headdim: int = 576
    extra: int = 0

    def __str__(self) -> str:
        rows = "fp8" if self.fp8 else "16-bit rows"
        tokens = f"{self.topk}+{self.extra}" if self.extra else f"{self.topk}"
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self.queries} queries in {dtype}, {self.heads} heads of {self.headdim}, {tokens} tokens, {rows}"

    @property
    def flops(self) -> float:
        return 2.0 * self.queries * self.heads * (self.topk + self.extra) * (self.headdim + 512)

    def call(self) -> None:
        generator = torch.Generator().manual_seed(0)

        def indices(topk: int) -> Tensor:
            return torch.stack([torch.randperm(TOKENS, generator=generator)[:topk] for _ in range(self.queries)]).int()

        # equal values: row maxima never move, as is usual after the first tiles
        q = torch.full((self.queries, self.heads, self.headdim), 0.01, dtype=self.dtype)
        if self.fp8:
            cache = torch.full((TOKENS // PAGE, PAGE, 1, 656 if self.headdim == 576 else 584), 1, dtype=torch.uint8)
        else:
            cache = torch.full((TOKENS // PAGE, PAGE, 1, self.headdim), 0.01, dtype=self.dtype)
        more = {"extra_cache": cache, "extra_indices": indices(self.extra)} if self.extra else {}
        torch.ops.volta_fa.fwd_sparse_mla(q, cache, indices(self.topk), **more)


CASES = (
    Case(1),
    Case(64),
    Case(64, dtype=torch.bfloat16),
    Case(64, fp8=False),
    Case(64, dtype=torch.bfloat16, fp8=False),
    Case(1, heads=16),
    Case(64, heads=16),
    Case(1, heads=8, headdim=512, topk=128, extra=320),
    Case(16, heads=8, headdim=512, topk=128, extra=320),
)


def main() -> None:
    table = Table("call", "select, us", "attention, us", "TFLOP/s", "kernel")
    for case in report.track(CASES, "calls"):
        select, attention = simulate(case.call)
        times = [run["timing"]["kernel_us"] for run in (select, attention)]
        speed = case.flops / 1e6 / sum(times)
        table.add_row(str(case), f"{times[0]:.1f}", f"{times[1]:.1f}", f"{speed:.1f}", attention["kernel"])
    Console(width=160).print(table)


if __name__ == "__main__":
    main()
