"""FlashMLA's functions on volta_fa, for programs that call FlashMLA's dense decoding.

    from volta_fa import flash_mla  # instead of: import flash_mla

    metadata, num_splits = flash_mla.get_mla_metadata(cache_seqlens, seqlen_q * nheads, 1)
    out, lse = flash_mla.flash_mla_with_kvcache(q, latents, block_table, cache_seqlens, 512, metadata, num_splits, causal=True)

The functions call `volta_fa::fwd_mla`, whose kernels schedule on the device and need no metadata: these functions accept and return it
for the callers' sake. They also compute tensors on the CPU, in any floating-point dtype. Nothing is registered, and nothing falls back:
sparse attention and FlashMLA's own fp8 format raise NotImplementedError.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .errors import bad_argument, require_tensors
from .operands import readable

__all__ = ["flash_mla_with_kvcache", "get_mla_metadata"]


#: The module that begins the messages.
_OP = "flash_mla"


def get_mla_metadata(
    cache_seqlens: Tensor | None = None,
    num_q_tokens_per_head_k: int | None = None,
    num_heads_k: int | None = None,
    num_heads_q: int | None = None,
    is_fp8_kvcache: bool = False,
    topk: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns placeholders for what FlashMLA plans ahead. Does not read lengths, so it does not synchronize.

    Args:
        cache_seqlens: int32 (batch). With None, as newer callers pass it, the results are on the CPU.
        num_q_tokens_per_head_k, num_heads_q: ignored.
        num_heads_k: 1.
        is_fp8_kvcache: False. topk: None.

    Returns (tile_scheduler_metadata, num_splits): int32 (0, 8), and int32 zeros (batch + 1).

    Raises ValueError for another num_heads_k, and NotImplementedError for is_fp8_kvcache and topk.
    """
    _check_supported(is_fp8_kvcache, topk, "topk")
    if num_heads_k not in (None, 1):
        raise bad_argument("num_heads_k", num_heads_k, "1: all query heads share one head of latents", op=_OP)
    device = torch.device("cpu") if cache_seqlens is None else cache_seqlens.device
    batch = 0 if cache_seqlens is None else cache_seqlens.shape[0]
    return torch.empty(0, 8, dtype=torch.int32, device=device), torch.zeros(batch + 1, dtype=torch.int32, device=device)


def flash_mla_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    block_table: Tensor | None,
    cache_seqlens: Tensor | None,
    head_dim_v: int,
    tile_scheduler_metadata: Any = None,
    num_splits: Any = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    is_fp8_kvcache: bool = False,
    indices: Tensor | None = None,
    *,
    descale_k: Tensor | None = None,
    latent_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Computes multi-head latent attention, absorbed (DeepSeek-V2, arXiv 2405.04434), over a paged cache of latents.

    The first 512 columns of a latent are its value.

    Args:
        q: (batch, seqlen_q, nheads, 576); of each head 512 columns for the latent and 64 for positions.
        k_cache: (num_pages, page_size, 1, 576), pages of any multiple of 16 tokens. The kernels never read past a sequence's length.
            In q's dtype, or quantized by `volta_fa.quantize_kv`: torch.int8, torch.float8_e5m2 or torch.float8_e4m3fn.
        block_table: int32 (batch, max_pages).
        cache_seqlens: int32 (batch): tokens of each sequence.
        head_dim_v: 512.
        tile_scheduler_metadata, num_splits: ignored.
        softmax_scale: 576 ** -0.5 unless given. Models pass that of the headdim before absorption.
        causal: the last query sees all tokens, the one before all but the last, and so on.
        is_fp8_kvcache, indices: False and None. FlashMLA's own tokens of 656 bytes and sparse attention are not supported.
        descale_k: float32 (1,) or (batch, 1), the scale of a cache in fp8, as vLLM's FlashMLA has it; 1 unless given.
        latent_scale: float32 (num_pages, page_size, 1), the scale of each token of a cache in int8. FlashMLA has no such argument.

    Returns out (batch, seqlen_q, nheads, 512) in q's dtype, and softmax_lse (batch, nheads, seqlen_q) in float32. No gradient.

    Raises ValueError for wrong arguments, NotImplementedError for unsupported ones.
    """
    _check_supported(is_fp8_kvcache, indices, "indices")
    require_tensors(q=q, k_cache=k_cache)
    if head_dim_v != 512:
        raise bad_argument("head_dim_v", head_dim_v, "512, the columns of a latent", op=_OP)
    for name, tensor in (("block_table", block_table), ("cache_seqlens", cache_seqlens)):
        if tensor is None:
            raise bad_argument(name, "None", "a tensor: without one FlashMLA has sparse attention alone", op=_OP, error=NotImplementedError)
    return torch.ops.volta_fa.fwd_mla(
        q,
        k_cache,
        block_table=readable(block_table),
        cache_seqlens=readable(cache_seqlens),
        latent_scale=latent_scale,
        latent_descale=descale_k,
        softmax_scale=softmax_scale,
        is_causal=causal,
    )


def _check_supported(is_fp8_kvcache: bool, sparse: object, name: str) -> None:
    if is_fp8_kvcache:
        expected = "False: a cache in fp8 has 576 columns of torch.float8_e4m3fn or _e5m2, and descale_k"
        raise bad_argument("is_fp8_kvcache", is_fp8_kvcache, expected, op=_OP, error=NotImplementedError)
    if sparse is not None:
        given = f"a tensor of shape {tuple(sparse.shape)}" if isinstance(sparse, Tensor) else sparse
        raise bad_argument(name, given, "None: volta_fa has no sparse attention", op=_OP, error=NotImplementedError)
