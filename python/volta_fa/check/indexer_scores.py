"""Problems of the indexer that `check` gives its kernels, and their exact logits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from .problems import Error

#: Kernels of this pass get the problems here.
PASS = "Indexer"
_PAGES, _PAGE_SIZE, _KEYS = 12, 64, 300
#: Errors over the lengths of query and key, times the weight, summed over heads: fp32 sums of 128 products.
_LIMIT = 1e-6


def problems(variant: dict[str, Any], seed: int) -> Iterator[tuple[str, dict[str, Any], Tensor, Tensor]]:
    """Yields name, arguments of `volta_fa::indexer_logits`, exact logits and their allowed errors."""
    # a large tile has several queries, and a small one a query
    queries = 9 if variant["block_rows"] > 64 else 1
    for heads in (64, 32):
        for dtype in (torch.float8_e4m3fn, torch.float16, torch.bfloat16):
            yield f"{queries} queries of {heads} heads, {str(dtype).removeprefix('torch.')}", *_draw(seed, queries, heads, dtype)


def _draw(seed: int, queries: int, heads: int, dtype: torch.dtype) -> tuple[dict[str, Any], Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    batch = 2
    q = torch.randn(batch, queries, heads, 128, generator=generator).to(dtype)
    weights = torch.randn(batch, queries, heads, generator=generator)
    codes = torch.randn(_PAGES, _PAGE_SIZE, 128, generator=generator).mul(50).to(torch.float8_e4m3fn)
    scales = torch.rand(_PAGES, _PAGE_SIZE, generator=generator).mul(0.03)
    cache = torch.cat([codes.view(torch.uint8).flatten(1), scales.view(torch.uint8)], 1).unflatten(1, (_PAGE_SIZE, 1, 132))
    # page 12 does not exist
    table = torch.tensor([[3, 0, 7, _PAGES, 5], [11, 2, 9, 1, 4]], dtype=torch.int32)
    k_end = torch.tensor([_KEYS, 131], dtype=torch.int32)
    arguments = {"q": q, "k": cache, "weights": weights, "k_end": k_end, "block_table": table, "max_seqlen_k": _KEYS}

    position = torch.arange(_KEYS)
    page = table.long()[:, position // _PAGE_SIZE]
    place = page.clamp(max=_PAGES - 1), position % _PAGE_SIZE
    keys, scale = codes.float().double()[place], scales.double()[place].unsqueeze(1)
    exact_q = q.float().double()
    scores = torch.einsum("bqhd,bkd->bqhk", exact_q, keys).clamp(min=0)
    exact = torch.einsum("bqhk,bqh->bqk", scores, weights.double()) * scale
    allowed = _LIMIT * torch.einsum("bqh,bqh,bk->bqk", exact_q.norm(dim=-1), weights.abs().double(), keys.norm(dim=-1)) * scale
    end = k_end.unsqueeze(1) - torch.arange(queries - 1, -1, -1)
    hidden = (position >= end.unsqueeze(-1)) | (page == _PAGES).unsqueeze(1)
    return arguments, exact.masked_fill(hidden, -torch.inf), allowed


def error(found: Tensor, exact: Tensor, allowed: Tensor) -> Error:
    """Returns the largest error over what is allowed."""
    difference = (found.cpu().double() - exact).abs().masked_fill(found.cpu() == exact, 0).nan_to_num(nan=torch.inf)
    return Error("logits", "largest, of what is allowed", (difference / allowed).max().item(), 1.0)
