"""Times the lightning indexer (`volta_fa::indexer_logits`) on a simulated V100 and T4.

    python -m benchmarks.indexer

Queries have 64 heads of 128 columns in e4m3 (another case: float16). Prompts see their keys causally. The simulation times one SM's share
of each launch (tools/volta-sim), without launch overhead, by the default model and with a perfect instruction cache. TFLOP/s count the
products of visible keys, and GB/s the bytes of the keys.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from rich.console import Console
from rich.table import Table

from volta_fa.check.kernels import simulate

from . import report

PAGE = 64
GPUS = ("v100", "t4")


@dataclass(frozen=True)
class Case:
    """A call. `keys`: of each sequence. Prompts have one sequence, whose last queries these are."""

    queries: int
    keys: int
    batch: int = 1
    heads: int = 64
    dtype: torch.dtype = torch.float8_e4m3fn
    paged: bool = False

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self.batch} x {self.queries} queries, {self.keys} keys{' in pages' * self.paged}, {self.heads} heads, {dtype}"

    @property
    def logits(self) -> int:
        """Returns the logits of visible keys."""
        return self.batch * (self.queries * self.keys - self.queries * (self.queries - 1) // 2)

    def call(self) -> None:
        q = torch.full((self.batch, self.queries, self.heads, 128), 0.5).to(self.dtype)
        weights = torch.ones(self.batch, self.queries, self.heads)
        if self.paged:
            pages = self.keys // PAGE
            cache = torch.full((self.batch * pages, PAGE, 1, 132), 1, dtype=torch.uint8)
            table = torch.randperm(self.batch * pages, generator=torch.Generator().manual_seed(0)).int().view(self.batch, pages)
            lengths = torch.full((self.batch,), self.keys, dtype=torch.int32)
            options = {"block_table": table, "max_seqlen_k": self.keys}
            torch.ops.volta_fa.indexer_logits(q, cache, weights, lengths, **options, clean_logits=False)
            return
        codes = torch.ones(self.keys, 128).to(torch.float8_e4m3fn)
        ends = (torch.arange(self.queries) + self.keys - self.queries + 1).int().unsqueeze(0)
        torch.ops.volta_fa.indexer_logits(q, codes, weights, ends, k_scales=torch.ones(self.keys), clean_logits=False)


CASES = (
    Case(4096, 4096),
    Case(4096, 16384),
    Case(4096, 16384, dtype=torch.float16),
    Case(4096, 16384, heads=32),
    Case(1, 32768, paged=True),
    Case(1, 32768, batch=32, paged=True),
    Case(2, 32768, batch=32, paged=True),
    Case(4, 32768, batch=32, paged=True),
)


def main() -> None:
    table = Table("GPU", "call", "us", "TFLOP/s", "GB/s", "tensor pipe", "us, perfect icache", "TFLOP/s", "kernel")
    for gpu in GPUS:
        for case in report.track(CASES, f"calls on a simulated {gpu}"):
            runs = [simulate(case.call, VOLTA_FA_SIM_GPU=gpu, VOLTA_FA_SIM_SET=how)[0] for how in (None, "icache=false")]
            times = [run["timing"]["kernel_us"] for run in runs]
            speeds = [2e-6 * 128 * case.heads * case.logits / time for time in times]
            bandwidth = case.batch * case.keys * 132e-3 / times[0]
            numbers = f"{times[0]:.1f}", f"{speeds[0]:.1f}", f"{bandwidth:.0f}", f"{runs[0]['timing']['util']['tensor']:.2f}"
            table.add_row(gpu, str(case), *numbers, f"{times[1]:.1f}", f"{speeds[1]:.1f}", runs[0]["kernel"])
    Console(width=180).print(table)


if __name__ == "__main__":
    main()
