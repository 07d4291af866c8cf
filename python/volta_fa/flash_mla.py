"""FlashMLA's functions on volta_fa: dense decoding, sparse decoding and sparse prefill.

    from volta_fa import flash_mla  # instead of: import flash_mla

    metadata, num_splits = flash_mla.get_mla_metadata(cache_seqlens, seqlen_q * nheads, 1)
    out, lse = flash_mla.flash_mla_with_kvcache(q, latents, block_table, cache_seqlens, 512, metadata, num_splits, causal=True)

The functions call `volta_fa::fwd_mla` and `volta_fa::fwd_sparse_mla`, whose kernels schedule on the device and need no metadata; these
functions accept and return it only because FlashMLA's do. Tensors may also be on the CPU, in any floating-point dtype. This module does
not replace flash_mla for other programs, and nothing falls back: dense attention over FlashMLA's fp8 rows raises NotImplementedError."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .errors import bad_argument, require_none, require_tensors
from .operands import with_unit_stride  # copies a tensor unless its last dimension is contiguous

__all__ = ["flash_mla_sparse_fwd", "flash_mla_with_kvcache", "get_mla_metadata"]


#: What error messages name after `volta_fa.`.
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
        num_q_tokens_per_head_k, num_heads_q, is_fp8_kvcache, topk: ignored.
        num_heads_k: 1.

    Returns (tile_scheduler_metadata, num_splits): int32 (0, 8), and int32 zeros (batch + 1).

    Raises ValueError for another num_heads_k.
    """
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
    attn_sink: Tensor | None = None,
    extra_k_cache: Tensor | None = None,
    extra_indices_in_kvcache: Tensor | None = None,
    topk_length: Tensor | None = None,
    extra_topk_length: Tensor | None = None,
    *,
    descale_k: Tensor | None = None,
    latent_scale: Tensor | None = None,
    positions_dtype: torch.dtype = torch.bfloat16,
) -> tuple[Tensor, Tensor]:
    """Computes multi-head latent attention, absorbed (DeepSeek-V2, arXiv 2405.04434), over a paged cache of latents.

    The first 512 columns of a latent are its value. With `indices` a query attends to the tokens that it chose.

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
        is_fp8_kvcache: with indices, True for a cache in FlashMLA's fp8 format; False without them.
        indices: int32 (batch, seqlen_q, topk): the tokens of each query, as page * page_size + row. Others are no tokens.
        descale_k: float32 (1,) or (batch, 1), the scale of a cache in fp8, as vLLM's FlashMLA has it; 1 unless given.
        latent_scale: float32 (num_pages, page_size, 1), the scale of each token of a cache in int8. FlashMLA has no such argument.

    With indices these differ:
        q: of 576 columns (DeepSeek V3.2), or 512, which are all values too (V4).
        k_cache: pages of any size. fp8: (num_pages, page_size, 1, bytes), 656 bytes beside 576 columns, 584 beside 512. Else q's dtype.
        block_table, cache_seqlens, causal: None and False. The indices say all.
        attn_sink: float32 (nheads): a logit in each row's denominator, also -inf and inf. softmax_lse leaves it out.
        extra_k_cache, extra_indices_in_kvcache: a second cache of the same format, and its tokens. One softmax covers both.
        topk_length, extra_topk_length: int32 (batch): indices of each query that count, from the first on.
        positions_dtype: dtype of the last 64 columns of fp8 rows: torch.bfloat16, as FlashMLA has them, or torch.float16, as vLLM writes
            them for models in float16. FlashMLA has no such argument.

    Returns out (batch, seqlen_q, nheads, 512) in q's dtype, and softmax_lse (batch, nheads, seqlen_q) in float32. No gradient. Queries
    without tokens get zeros, and inf in softmax_lse.

    Raises ValueError for wrong arguments, NotImplementedError for unsupported ones.
    """
    require_tensors(q=q, k_cache=k_cache)
    if head_dim_v != 512:
        raise bad_argument("head_dim_v", head_dim_v, "512, the columns of a latent", op=_OP)
    if indices is None:
        require_none(
            "None without indices", op=_OP, error=ValueError, attn_sink=attn_sink, extra_k_cache=extra_k_cache,
            extra_indices_in_kvcache=extra_indices_in_kvcache, topk_length=topk_length, extra_topk_length=extra_topk_length,
        )  # fmt: skip
        if is_fp8_kvcache:
            expected = "False without indices: a cache in fp8 then has 576 columns of torch.float8_e4m3fn or _e5m2, and descale_k"
            raise bad_argument("is_fp8_kvcache", is_fp8_kvcache, expected, op=_OP, error=NotImplementedError)
        for name, tensor in (("block_table", block_table), ("cache_seqlens", cache_seqlens)):
            if tensor is None:
                raise bad_argument(name, "None", "a tensor: without one FlashMLA has sparse attention alone, by indices", op=_OP)
        return torch.ops.volta_fa.fwd_mla(
            q, k_cache, block_table=with_unit_stride(block_table), cache_seqlens=with_unit_stride(cache_seqlens),
            latent_scale=latent_scale, latent_descale=descale_k, softmax_scale=softmax_scale, is_causal=causal,
        )  # fmt: skip
    expected = "None beside indices: rows in fp8 have their scales"
    require_none(expected, op=_OP, error=ValueError, descale_k=descale_k, latent_scale=latent_scale)
    if causal:
        raise bad_argument("causal", causal, "False beside indices: choose the tokens that a query may see", op=_OP)
    if is_fp8_kvcache != (k_cache.element_size() == 1):
        raise bad_argument("is_fp8_kvcache", is_fp8_kvcache, f"{not is_fp8_kvcache} beside a k_cache of dtype {k_cache.dtype}", op=_OP)
    for name, tensor in (("indices", indices), ("extra_indices_in_kvcache", extra_indices_in_kvcache)):
        if tensor is not None and (q.dim() != 4 or tensor.dim() != 3 or q.shape[:2] != tensor.shape[:2]):
            given = f"shape {tuple(tensor.shape)} beside q of shape {tuple(q.shape)}"
            raise bad_argument(name, given, "(batch, seqlen_q, topk) beside q (batch, seqlen_q, nheads, headdim)", op=_OP)
    for name, tensor in (("topk_length", topk_length), ("extra_topk_length", extra_topk_length)):
        if tensor is not None and tensor.shape != q.shape[:1]:
            raise bad_argument(name, f"shape {tuple(tensor.shape)}", f"(batch,), here ({q.shape[0]},)", op=_OP)
    if positions_dtype not in (torch.bfloat16, torch.float16):
        raise bad_argument("positions_dtype", positions_dtype, "torch.bfloat16 or torch.float16", op=_OP)
    batch, seqlen_q, nheads, _ = q.shape

    def of_queries(lengths: Tensor | None) -> Tensor | None:  # (batch) to (batch * seqlen_q)
        return None if lengths is None else lengths.unsqueeze(-1).expand(-1, seqlen_q).flatten()

    out, softmax_lse, _ = torch.ops.volta_fa.fwd_sparse_mla(
        q.flatten(0, 1), k_cache, indices.flatten(0, 1), topk_length=of_queries(topk_length), extra_cache=extra_k_cache,
        extra_indices=None if extra_indices_in_kvcache is None else extra_indices_in_kvcache.flatten(0, 1),
        extra_topk_length=of_queries(extra_topk_length), sinks=attn_sink, softmax_scale=softmax_scale,
        fp16_positions=positions_dtype == torch.float16,
    )  # fmt: skip
    return out.unflatten(0, (batch, seqlen_q)), softmax_lse.t().view(batch, seqlen_q, nheads).transpose(1, 2)


def flash_mla_sparse_fwd(
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    sm_scale: float,
    d_v: int = 512,
    attn_sink: Tensor | None = None,
    topk_length: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Computes sparse latent attention of a prompt: each query attends to the tokens that it chose.

    Args:
        q: (seqlen_q, nheads, 576), or 512 columns, which are all values too.
        kv: (seqlen_k, 1, headdim) in q's dtype.
        indices: int32 (seqlen_q, 1, topk): tokens of each query. Numbers outside kv are no tokens.
        sm_scale: factor of the scores.
        d_v: 512.
        attn_sink: float32 (nheads): a logit in each row's denominator, also -inf and inf. lse and max_logits leave it out.
        topk_length: int32 (seqlen_q): indices of each query that count, from the first on.

    Returns out (seqlen_q, nheads, 512) in q's dtype, and max_logits and lse (seqlen_q, nheads) in float32: a row's largest scaled score,
    and the logarithm of its sum of exponentials. Queries without tokens get zeros, -inf and inf. No gradient.

    Raises ValueError for wrong arguments.
    """
    require_tensors(q=q, kv=kv, indices=indices)
    if d_v != 512:
        raise bad_argument("d_v", d_v, "512, the columns of a latent", op=_OP)
    for name, tensor in (("kv", kv), ("indices", indices)):
        if tensor.dim() != 3 or tensor.shape[1] != 1:
            raise bad_argument(name, f"shape {tuple(tensor.shape)}", "rank 3 and 1 in the middle: all query heads share one head", op=_OP)
    out, softmax_lse, max_logits = torch.ops.volta_fa.fwd_sparse_mla(
        q, kv.unsqueeze(0), indices.squeeze(1), topk_length=topk_length, sinks=attn_sink, softmax_scale=sm_scale
    )
    return out, max_logits.t(), softmax_lse.t()
