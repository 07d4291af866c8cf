"""Problems of sparse attention that `correctness` gives its kernels, with exact results: attention to latents that each query chose
(`volta_fa::fwd_sparse_mla`), and the indexer's logits (`volta_fa::indexer_logits`), the scores by which queries choose."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from .kernels import environment  # sets environment variables for a block
from .problems import Error  # of a result: its kind, the error, and the allowed error
from .tolerance import largest, max_error  # the largest absolute value, and difference; infinity where one side alone is NaN

#: Results of `volta_fa::fwd_sparse_mla`; max_logits: the largest scaled score of each query and head.
RESULTS = ("out", "softmax_lse", "max_logits")
#: Allowed error of out relative to 1 + its largest value, by dtype of q: rounding of out, and of fp16 products.
_OUT_LIMITS = {torch.float16: 3e-3, torch.bfloat16: 8e-3}
#: Allowed error of a score relative to 1 + softmax_scale * |q| * |k|: operands are rounded to fp16.
_SCORE_LIMIT = 1e-4


def problems(variant: dict[str, Any], seed: int) -> Iterator[tuple[str, dict[str, Any], tuple[Tensor, ...]]]:
    """Yields name, arguments of `volta_fa::fwd_sparse_mla`, and results of the fp64 CPU backend. `variant`: a kernel's entry in
    `info()["variants"]`. The pass SparseSelect, which lists the tokens that queries chose, takes any headdim, cache and dtype; a SparseMla
    kernel has its own."""
    is_any = variant["pass"] == "SparseSelect"
    headdims = (576, 512) if is_any else (variant["headdim"],)
    kinds = (True, False) if is_any else ("e4m3" in variant["name"],)  # whether the cache has fp8 rows, or q's dtype
    dtypes = (torch.float16, torch.bfloat16) if is_any else (torch.bfloat16 if variant["cache"] == "bfloat16" else torch.float16,)
    heads = 16 if is_any else variant["block_rows"]  # a thread block's rows are the heads of one query
    for headdim, is_fp8, dtype in itertools.product(headdims, kinds, dtypes):
        arguments = _draw(seed, headdim, is_fp8, dtype, heads)
        exact = {name: t.double() if t.dtype == dtype else t for name, t in arguments.items()}
        with environment(VOLTA_FA_SIMULATE=None):  # CPU tensors run on the CPU backend
            expected = torch.ops.volta_fa.fwd_sparse_mla(**exact)
        kind = "fp8" if is_fp8 else "rows"
        yield f"sparse latents, {kind}, {heads} heads of {headdim}, {str(dtype).removeprefix('torch.')}", arguments, expected


def _draw(seed: int, headdim: int, is_fp8: bool, dtype: torch.dtype, heads: int) -> dict[str, Tensor]:
    """Returns arguments of a problem over two caches (the second: "extra_"). Some indices name no token."""
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(3, heads, headdim, generator=generator).to(dtype)
    arguments = {"q": q, "sinks": torch.randn(heads, generator=generator)}
    for prefix, pages, page_size, topk in (("", 3, 64, 70), ("extra_", 9, 5, 40)):
        if is_fp8:
            cache = _fp8_cache(pages, page_size, headdim, generator)
        else:
            cache = torch.randn(pages, page_size, 1, headdim, generator=generator).to(dtype)
        indices = torch.randint(-20, pages * page_size + 20, (3, topk), generator=generator).int()
        # of three queries, the number of indices that count
        lengths = torch.tensor([topk, 0 if prefix else topk // 2, topk - 1], dtype=torch.int32)
        arguments |= {f"{prefix}cache": cache, f"{prefix}indices": indices, f"{prefix}topk_length": lengths}
    return arguments


def _fp8_cache(pages: int, page_size: int, headdim: int, generator: torch.Generator) -> Tensor:
    """Returns a cache of random fp8 rows in FlashMLA's layout, with moderate scales. headdim 576: a row has 512 e4m3 codes, 4 fp32 scales
    and 64 bf16 columns. 512: a page has 448 codes and 64 bf16 columns of each row, then 8 E8M0 exponents of each row (7 scales and
    padding)."""
    bytes_of_row = 512 + 4 * 4 + 64 * 2 if headdim == 576 else 448 + 64 * 2 + 8
    columns = 512 if headdim == 576 else 448
    codes = torch.randn(pages, page_size, columns, generator=generator).mul(50).to(torch.float8_e4m3fn).view(torch.uint8)
    tail = torch.randn(pages, page_size, 64, generator=generator).bfloat16().view(torch.uint8)
    if headdim == 576:
        scales = torch.rand(pages, page_size, 4, generator=generator).mul(0.03).view(torch.uint8)
        return torch.cat([codes, scales, tail], -1).unsqueeze(2)
    exponents = torch.randint(120, 124, (pages, page_size * 8), generator=generator).to(torch.uint8)  # scales of 2^-7 to 2^-4
    # pages begin on boundaries of 16 bytes
    cache = torch.zeros(pages, -(-page_size * bytes_of_row // 16) * 16, dtype=torch.uint8)[:, : page_size * bytes_of_row]
    cache.copy_(torch.cat([torch.cat([codes, tail], -1).flatten(1), exponents], 1))
    return cache.unflatten(1, (page_size, 1, bytes_of_row))


def errors(found: tuple[Tensor, ...], expected: tuple[Tensor, ...], arguments: dict[str, Any]) -> Iterator[Error]:
    """Yields the largest error of each result in `found` from `expected`. NaN counts as an infinite error."""
    allowed = _OUT_LIMITS[arguments["q"].dtype] * (1 + largest(expected[0]))
    yield Error("out", "largest", max_error(found[0].cpu(), expected[0]), allowed)
    # 100: an upper bound of a key's norm in these problems; the last factor is softmax_scale
    allowed = _SCORE_LIMIT * (1 + 100 * arguments["q"].double().norm(dim=-1).max().item() * arguments["q"].shape[-1] ** -0.5)
    for name, value, exact in zip(RESULTS[1:], found[1:], expected[1:]):
        yield Error(name, "largest", max_error(value.cpu(), exact), allowed)


# ---- the indexer -------------------------------------------------------------------------------------------------

#: Pages of the cache, tokens of a page, and columns of logits: the table's fifth page is used in part.
_PAGES, _PAGE_SIZE, _KEYS = 12, 64, 300
#: Allowed error of a logit relative to the sum over heads of |weight| * |q| * |k|: fp32 sums of 128 products.
_LOGITS_LIMIT = 1e-6


def indexer_problems(variant: dict[str, Any], seed: int) -> Iterator[tuple[str, dict[str, Any], Tensor, Tensor]]:
    """Yields name, arguments of `volta_fa::indexer_logits`, exact logits and their allowed errors."""
    # A tile's rows are heads of queries: 256 rows take four queries of 64 heads, or eight of 32, and 9 queries leave a partial tile.
    queries = 9 if variant["block_rows"] > 64 else 1
    for heads in (64, 32):
        for dtype in (torch.float8_e4m3fn, torch.float16, torch.bfloat16):
            yield f"{queries} queries of {heads} heads, {str(dtype).removeprefix('torch.')}", *_draw_indexer(seed, queries, heads, dtype)


def _draw_indexer(seed: int, queries: int, heads: int, dtype: torch.dtype) -> tuple[dict[str, Any], Tensor, Tensor]:
    """Returns arguments over a paged cache, exact logits and their allowed errors. A logit is the key's scale times the sum over heads of
    weight * max(q . k, 0). One page in the table does not exist."""
    generator = torch.Generator().manual_seed(seed)
    batch = 2
    q = torch.randn(batch, queries, heads, 128, generator=generator).to(dtype)
    weights = torch.randn(batch, queries, heads, generator=generator)
    # numbers of up to about 200, of e4m3's 448; scales bring them back to a few
    codes = torch.randn(_PAGES, _PAGE_SIZE, 128, generator=generator).mul(50).to(torch.float8_e4m3fn)
    scales = torch.rand(_PAGES, _PAGE_SIZE, generator=generator).mul(0.03)
    cache = torch.cat([codes.view(torch.uint8).flatten(1), scales.view(torch.uint8)], 1).unflatten(1, (_PAGE_SIZE, 1, 132))
    # codes of all tokens of a page, then their scales; page 12 does not exist
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
    allowed = _LOGITS_LIMIT * torch.einsum("bqh,bqh,bk->bqk", exact_q.norm(dim=-1), weights.abs().double(), keys.norm(dim=-1)) * scale
    end = k_end.unsqueeze(1) - torch.arange(queries - 1, -1, -1)
    hidden = (position >= end.unsqueeze(-1)) | (page == _PAGES).unsqueeze(1)
    return arguments, exact.masked_fill(hidden, -torch.inf), allowed


def indexer_error(found: Tensor, exact: Tensor, allowed: Tensor) -> Error:
    """Returns the largest error of a logit, as a share of what is allowed for that logit."""
    difference = (found.cpu().double() - exact).abs().masked_fill(found.cpu() == exact, 0).nan_to_num(nan=torch.inf)
    return Error("logits", "largest, of what is allowed", (difference / allowed).max().item(), allowed=1.0)
