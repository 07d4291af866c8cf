"""Two benchmarks of `benchmarks.tables` for DeepSeek's sparse attention: an indexer scores tokens, and attention reads the chosen ones."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from . import report
from .driver import Benchmark, Case, Result, Row  # Row: a case on a GPU; Result: its launches by model, and the times of the first
from .measure import Work
from .report import Grid

_INDEXER = """The lightning indexer (`volta_fa::indexer_logits`) on a simulated V100 and T4.

It returns a logit for each query and key: scale[key] * sum over heads of weight * relu(q @ k). Queries have heads of 128 columns in e4m3
(one row: float16). Prompts see their keys causally, decoding reads pages of 64 tokens. TFLOP/s count the products of visible keys, and
GB/s the bytes of the keys.
"""
_SPARSE = """Sparse latent attention (`volta_fa::fwd_sparse_mla`) on a simulated V100: selection of tokens, and attention.

All query heads read one latent per token, whose first 512 columns are the values (MLA). Each query chooses distinct tokens of a cache of
32,768 in pages of 64, at random.
"""
#: Tokens of a cache in decoding and of the cache that queries choose from, and of a page.
TOKENS, PAGE = 32768, 64
#: Columns of the indexer's heads. A key in a page has a byte of e4m3 for each, and an fp32 scale.
HEADDIM = 128
KEY_BYTES = HEADDIM + 4


@dataclass(frozen=True)
class IndexerCase(Case):
    """A call over `keys` of each sequence. A prompt has one sequence, and its queries are the last of its `keys` tokens."""

    queries: int  # of each sequence
    keys: int
    batch: int = 1  # sequences
    heads: int = 64  # of a query; a key has one
    dtype: torch.dtype = torch.float8_e4m3fn  # of q
    paged: bool = False  # decoding from a cache, whose bytes count

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self.batch} x {self.queries} queries, {self.keys} keys{' in pages' * self.paged}, {self.heads} heads, {dtype}"

    @property
    def flops(self) -> float:
        visible = self.batch * (self.queries * self.keys - self.queries * (self.queries - 1) // 2)
        return 2.0 * HEADDIM * self.heads * visible

    @property
    def bytes(self) -> float:
        return float(KEY_BYTES * self.batch * self.keys) if self.paged else 0.0

    def calls(self, device: str) -> list[Work]:
        q = torch.full((self.batch, self.queries, self.heads, HEADDIM), 0.5).to(self.dtype)
        weights = torch.ones(self.batch, self.queries, self.heads)
        if self.paged:
            pages = self.keys // PAGE
            keys = torch.full((self.batch * pages, PAGE, 1, KEY_BYTES), 1, dtype=torch.uint8)
            table = torch.randperm(self.batch * pages, generator=torch.Generator().manual_seed(0)).int().view(self.batch, pages)
            ends = torch.full((self.batch,), self.keys, dtype=torch.int32)
            options = {"block_table": table, "max_seqlen_k": self.keys}
        else:
            keys = torch.ones(self.keys, HEADDIM).to(torch.float8_e4m3fn)
            ends = (torch.arange(self.queries) + self.keys - self.queries + 1).int().unsqueeze(0)  # keys that each query sees
            options = {"k_scales": torch.ones(self.keys)}
        # clean_logits=False: logits of keys that a query does not see stay undefined
        return [lambda: torch.ops.volta_fa.indexer_logits(q, keys, weights, ends, **options, clean_logits=False)]


def indexer_rows(options: argparse.Namespace) -> list[Row]:
    prompts = [IndexerCase(4096, n) for n in (4096, 16384)]
    others = [replace(prompts[1], dtype=torch.float16), replace(prompts[1], heads=32)]
    decoding = [IndexerCase(n, TOKENS, batch, paged=True) for n, batch in ((1, 1), (1, 32), (2, 32), (4, 32))]
    return [Row(str(case), case, gpu) for gpu in options.gpu for case in (*prompts, *others, *decoding)]


def indexer_grids(results: Sequence[Result], _: argparse.Namespace) -> list[Grid]:
    columns = {
        "GPU": lambda r: r.row.gpu,
        "call": lambda r: r.row.name,
        "us": lambda r: f"{r.us():.1f}",
        "TFLOP/s": lambda r: f"{r.tflops():.1f}",
        "GB/s": lambda r: f"{r.gb_s():.0f}" if r.row.case.bytes else "-",
        "tensor pipe": lambda r: f"{r.main['pipes']['tensor']:.0%}",
        # us(1): by the second model of driver.MODELS, a perfect instruction cache
        "perfect i-cache, us": lambda r: f"{r.us(1):.1f}",
        "TFLOP/s there": lambda r: f"{r.tflops(1):.1f}",
        "kernel": lambda r: r.main["kernel"],
    }
    return [report.table("Indexer logits", results, columns)]


@dataclass(frozen=True)
class SparseCase(Case):
    """A call with `queries` query tokens. Each attends to its own `topk` chosen tokens of the cache."""

    queries: int
    heads: int = 128  # query heads
    topk: int = 2048  # chosen tokens of each query
    dtype: torch.dtype = torch.float16
    # Rows of the cache are fp8, else of dtype. A row has 656 bytes (headdim 576: 512 codes, 4 fp32 scales, 64 columns of 16 bits), or 584
    # (headdim 512, DeepSeek V4).
    fp8: bool = True
    headdim: int = 576
    extra: int = 0  # chosen tokens of a second cache (DeepSeek V4)

    def __str__(self) -> str:
        tokens = f"{self.topk}+{self.extra}" if self.extra else f"{self.topk}"
        dtype, rows = str(self.dtype).removeprefix("torch."), "fp8" if self.fp8 else "16-bit rows"
        return f"{self.queries} queries in {dtype}, {self.heads} heads of {self.headdim}, {tokens} tokens, {rows}"

    @property
    def flops(self) -> float:
        return 2.0 * self.queries * self.heads * (self.topk + self.extra) * (self.headdim + 512)  # 512 columns are values

    def calls(self, device: str) -> list[Work]:
        generator = torch.Generator().manual_seed(0)

        def chosen(topk: int) -> torch.Tensor:
            return torch.stack([torch.randperm(TOKENS, generator=generator)[:topk] for _ in range(self.queries)]).int()

        # constant values: softmax's row maxima stay, as they usually do after the first tiles
        q = torch.full((self.queries, self.heads, self.headdim), 0.01, dtype=self.dtype)
        row = (656 if self.headdim == 576 else 584) if self.fp8 else self.headdim
        cache = torch.full((TOKENS // PAGE, PAGE, 1, row), 0.01).to(self.dtype)
        cache = torch.ones_like(cache, dtype=torch.uint8) if self.fp8 else cache
        more = {"extra_cache": cache, "extra_indices": chosen(self.extra)} if self.extra else {}
        indices = chosen(self.topk)
        return [lambda: torch.ops.volta_fa.fwd_sparse_mla(q, cache, indices, **more)]


def sparse_rows(_: argparse.Namespace) -> list[Row]:
    many = SparseCase(64)
    rows = [replace(many, dtype=dtype, fp8=fp8) for fp8 in (True, False) for dtype in (torch.float16, torch.bfloat16)]
    few_heads = [SparseCase(n, heads=16) for n in (1, 64)]
    v4 = [SparseCase(n, heads=8, headdim=512, topk=128, extra=320) for n in (1, 16)]
    # only the default machine constants (driver.MODELS): the table has no columns of a perfect instruction cache
    return [Row(str(case), case, models=("",)) for case in (SparseCase(1), *rows, *few_heads, *v4)]


def sparse_grids(results: Sequence[Result], _: argparse.Namespace) -> list[Grid]:
    """Returns the table. The operator's first kernel selects tokens, its second computes attention."""
    columns = {
        "call": lambda r: r.row.name,
        "select, us": lambda r: f"{r.launches[0][0]['us']:.1f}",
        "attention, us": lambda r: f"{r.launches[0][1]['us']:.1f}",
        "TFLOP/s": lambda r: f"{r.tflops():.1f}",
        "kernel": lambda r: r.launches[0][1]["kernel"],
    }
    return [report.table("Sparse latent attention on a simulated V100", results, columns)]


INDEXER = Benchmark(_INDEXER, indexer_rows, indexer_grids, gpus=("v100", "t4"), several_gpus=True)
SPARSE_MLA = Benchmark(_SPARSE, sparse_rows, sparse_grids)
