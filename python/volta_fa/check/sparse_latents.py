"""Problems of sparse latent attention that `check` gives its kernels, and their results by the fp64 CPU backend."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from .kernels import SIMULATE_VARIABLE, environment
from .problems import Error

#: Kernels of these passes get the problems here.
PASSES = ("SparseSelect", "SparseMla")
RESULTS = ("out", "softmax_lse", "max_logits")
#: Errors of out over the root mean square of what it sums, by dtype of q: rounding of out, and of fp16 products.
_OUT_LIMITS = {torch.float16: 3e-3, torch.bfloat16: 8e-3}
#: Errors of a score, of products that are rounded to fp16, over the lengths of query and key.
_SCORE_LIMIT = 1e-4


def problems(variant: dict[str, Any], seed: int) -> Iterator[tuple[str, dict[str, Any], tuple[Tensor, ...]]]:
    """Yields name, arguments of `volta_fa::fwd_sparse_mla`, and exact results. The pass that selects tokens takes any kind of them."""
    is_any = variant["pass"] == "SparseSelect"
    headdims = (576, 512) if is_any else (variant["headdim"],)
    # the name says which rows a kernel beside bf16 queries reads
    kinds = (True, False) if is_any else ("e4m3" in variant["name"],)
    dtypes = (torch.float16, torch.bfloat16) if is_any else (torch.bfloat16 if variant["cache"] == "bfloat16" else torch.float16,)
    heads = 16 if is_any else variant["block_rows"]
    for headdim in headdims:
        for is_fp8 in kinds:
            for dtype in dtypes:
                arguments, exact = _draw(seed, headdim, is_fp8, dtype, heads)
                with environment(**{SIMULATE_VARIABLE: None}):
                    expected = torch.ops.volta_fa.fwd_sparse_mla(**exact)
                kind = "fp8" if is_fp8 else "rows"
                yield f"sparse latents, {kind}, {heads} heads of {headdim}, {str(dtype).removeprefix('torch.')}", arguments, expected


def _draw(seed: int, headdim: int, is_fp8: bool, dtype: torch.dtype, heads: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns a problem over two caches and the same in fp64."""
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(3, heads, headdim, generator=generator).to(dtype)
    arguments: dict[str, Any] = {"q": q, "sinks": torch.randn(heads, generator=generator)}
    exact = {"q": q.double(), "sinks": arguments["sinks"]}
    for prefix, pages, page_size, topk in (("", 3, 64, 70), ("extra_", 9, 5, 40)):
        if is_fp8:
            cache = exact_cache = _fp8_cache(pages, page_size, headdim, generator)
        else:
            cache = torch.randn(pages, page_size, 1, headdim, generator=generator).to(dtype)
            exact_cache = cache.double()
        indices = torch.randint(-20, pages * page_size + 20, (3, topk), generator=generator).int()
        lengths = torch.tensor([topk, 0 if prefix else topk // 2, topk - 1], dtype=torch.int32)
        names = (f"{prefix}cache", f"{prefix}indices", f"{prefix or ''}topk_length")
        arguments |= dict(zip(names, (cache, indices, lengths)))
        exact |= dict(zip(names, (exact_cache, indices, lengths)))
    return arguments, exact


def _fp8_cache(pages: int, page_size: int, headdim: int, generator: torch.Generator) -> Tensor:
    """Returns pages of random codes, with scales and positions of moderate size."""
    bytes_of_row = 656 if headdim == 576 else 584
    columns = 512 if headdim == 576 else 448
    codes = torch.randn(pages, page_size, columns, generator=generator).mul(50).to(torch.float8_e4m3fn).view(torch.uint8)
    tail = torch.randn(pages, page_size, 64, generator=generator).bfloat16().view(torch.uint8)
    if headdim == 576:
        scales = torch.rand(pages, page_size, 4, generator=generator).mul(0.03).view(torch.uint8)
        return torch.cat([codes, scales, tail], -1).unsqueeze(2)
    exponents = torch.randint(120, 124, (pages, page_size * 8), generator=generator).to(torch.uint8)
    # pages begin on boundaries of 16 bytes
    cache = torch.zeros(pages, -(-page_size * bytes_of_row // 16) * 16, dtype=torch.uint8)[:, : page_size * bytes_of_row]
    cache.copy_(torch.cat([torch.cat([codes, tail], -1).flatten(1), exponents], 1))
    return cache.unflatten(1, (page_size, 1, bytes_of_row))


def errors(found: tuple[Tensor, ...], expected: tuple[Tensor, ...], arguments: dict[str, Any]) -> Iterator[Error]:
    """Yields the largest error of each result."""
    out, *of_scores = (t.cpu().double() for t in found)
    exact, *exact_of_scores = (t.double() for t in expected)
    largest = exact.abs().amax()
    error = (out - exact).abs().nan_to_num(nan=torch.inf).max().item()
    yield Error("out", "largest", error, _OUT_LIMITS[arguments["q"].dtype] * (1 + largest.item()))
    # a key of these problems is at most about 100 long
    allowed = _SCORE_LIMIT * (1 + 100 * arguments["q"].double().norm(dim=-1).max().item() * arguments["q"].shape[-1] ** -0.5)
    for name, value, exact_value in zip(RESULTS[1:], of_scores, exact_of_scores):
        difference = (value - exact_value).abs().masked_fill(value == exact_value, 0).nan_to_num(nan=torch.inf)
        yield Error(name, "largest", difference.max().item(), allowed)
