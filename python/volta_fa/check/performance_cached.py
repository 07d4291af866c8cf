"""Measures attention with a KV cache: decode, append and paged prefill, beside PyTorch's own attention of dense tensors."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from .kernels import Target

#: Query heads of a key head. Tokens of a page; the pages of a sequence lie in random order.
GROUP, PAGE = 8, 16
_KEY_HEADS = 4


@dataclass
class CachePoint:
    """One shape: milliseconds of each implementation, or why there are none."""

    kind: str  # decode: one query a sequence; append: its token is written besides; prefill: a chunk of a prompt
    headdim: int
    batch: int
    seqlen: int  # tokens of each sequence
    seqlen_q: int
    ms: dict[str, float] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.kind}, {self.batch} x {self.seqlen}, headdim {self.headdim}"

    @property
    def unit(self) -> str:
        """What `speed` counts: decoding waits for memory, prefill for products."""
        return "TFLOP/s" if self.kind == "prefill" else "GB/s"

    def speed(self, name: str) -> float | None:
        """Returns bytes of the cache per ns, as if in fp16, or 10^12 operations per second, as if no key were masked."""
        if name not in self.ms:
            return None
        elements = self.batch * self.seqlen * _KEY_HEADS * self.headdim
        work = 4 * GROUP * self.seqlen_q * elements / 1e3 if self.unit == "TFLOP/s" else 4 * elements
        return work / self.ms[name] / 1e6

    @property
    def math_bytes(self) -> int:
        """Least bytes that PyTorch's own operations take: several matrices of scores in fp32."""
        return 3 * 4 * self.batch * _KEY_HEADS * GROUP * self.seqlen_q * self.seqlen

    def data(self) -> dict[str, Any]:
        """Returns the point for the JSON file."""
        return {**asdict(self), "unit": self.unit, "speed": {name: self.speed(name) for name in self.ms}}


def points(target: Target, quick: bool) -> list[CachePoint]:
    """Returns the shapes, the most telling first."""
    if target.kind == "cpu":
        return [CachePoint(kind, 64, 2, 128, n) for kind, n in (("decode", 1), ("append", 1), ("prefill", 32))]
    shapes = [("decode", 16, 4096, 1), ("prefill", 1, 8192, 512), ("append", 16, 4096, 1)]
    if not quick:
        shapes += [("decode", 1, 16384, 1), ("decode", 64, 1024, 1)]
    return [CachePoint(kind, d, batch, seqlen, n) for (kind, batch, seqlen, n), d in itertools.product(shapes, (128, 64, 256))]


def ours(point: CachePoint, target: Target) -> Callable[[], object]:
    """Returns a call of fwd_kvcache on pages."""
    q, k, v = _tensors(point, target)
    pages = -(-point.seqlen // PAGE)
    # room for the token that is appended
    table = torch.randperm(point.batch * (pages + 1), generator=torch.Generator().manual_seed(0)).int().view(point.batch, -1)
    shape = (table.numel(), PAGE, _KEY_HEADS, point.headdim)
    caches = [torch.empty(shape, device=target.device, dtype=q.dtype).normal_() for _ in "kv"]
    new = [t[:, :1] for t in (k, v)] if point.kind == "append" else []
    lengths = torch.full((point.batch,), point.seqlen, dtype=torch.int32, device=target.device)
    options = {"cache_seqlens": lengths, "block_table": table.to(target.device), "is_causal": True}
    return lambda: torch.ops.volta_fa.fwd_kvcache(q, *caches, *new, **options)


def dense(point: CachePoint, target: Target) -> tuple[Tensor, Tensor, Tensor]:
    """Returns q, k and v in the form that is cheapest for PyTorch: query heads of a key head are rows of one head. No key is masked."""
    q, k, v = _tensors(point, target)
    rows = q.view(point.batch, point.seqlen_q, _KEY_HEADS, GROUP, point.headdim).permute(0, 2, 1, 3, 4)
    return rows.reshape(point.batch, _KEY_HEADS, -1, point.headdim), k.transpose(1, 2), v.transpose(1, 2)


def _tensors(point: CachePoint, target: Target) -> Iterator[Tensor]:
    dtype = torch.float16 if target.kind == "cuda" else torch.float32
    generator = torch.Generator(target.device).manual_seed(0)
    for rows, heads in ((point.seqlen_q, GROUP * _KEY_HEADS), (point.seqlen, _KEY_HEADS), (point.seqlen, _KEY_HEADS)):
        yield torch.randn((point.batch, rows, heads, point.headdim), generator=generator, device=target.device, dtype=dtype)
