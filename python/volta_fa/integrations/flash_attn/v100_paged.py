"""The functions of 1Cat-vLLM 1.3's `flash_attn_v100` that `v100` lacks. `v100` has those of an older package of this name, of 2026.

Its attention backend needs `flash_attn_func`, `flash_attn_bhmd_func`, `flash_attn_decode_paged` and `flash_attn_prefill_paged`, and
takes further routes if it finds the others. Here all compute the same. Layouts are bmhd, (batch, seqlen, nheads, headdim), or bhmd, with
the middle dimensions exchanged. The paged functions are for inference: they have no gradients.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...errors import bad_argument, require_tensors
from ..vllm.paged import CACHE_DTYPES
from .interface import flash_attn_func
from .v100 import _swapped, fwd

__all__ = [
    "flash_attn_bhmd_func",
    "flash_attn_decode_paged",
    "flash_attn_decode_paged_wmma",
    "flash_attn_decode_paged_xqa",
    "flash_attn_decode_paged_xqa_available",
    "flash_attn_lse",
    "flash_attn_prefill_paged",
    "flash_attn_prefill_paged_bhmd",
    "flash_attn_prefill_paged_splitkv",
]

#: Values of kv_cache_dtype, and the dtype of the cache's bytes; None: that of q.
_FORMATS = {name: dtype for name, dtype in CACHE_DTYPES.items() if dtype != torch.int8} | {"bfloat16": None}


def _check_out(out: Tensor | None, q: Tensor, v: Tensor) -> None:
    """Raises ValueError unless `out` has the shape of q, with v's headdim."""
    expected = (*q.shape[:-1], v.shape[-1])
    if out is not None and out.shape != expected:
        raise bad_argument("out", f"shape {tuple(out.shape)}", str(expected))


def flash_attn_prefill_paged(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    softmax_scale: float | None = None,
    out: Tensor | None = None,
    kv_cache_dtype: str = "auto",
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    causal: bool = True,
    window_size: tuple[int, int] = (-1, -1),
) -> Tensor:
    """Computes attention of the last tokens of each sequence over a paged cache that holds them already.

    Args:
        q: (batch, seqlen_q, nheads, headdim), float16.
        k_cache, v_cache: (blocks, block_size, nheads_k, headdim), any strides; fp8 may come as uint8. block_size is a multiple of 16.
        block_table: int32 (batch, max_blocks); more rows have no effect.
        seq_lens: int32 (batch), tokens in the cache, with those of q; more have no effect.
        out: as q; it gets the result.
        kv_cache_dtype: `auto`, `float16` and `bfloat16`, which 1Cat-vLLM says of float16 too; `fp8` and `fp8_e4m3`; or `fp8_e5m2`.
        k_scale, v_scale: factors of fp8 codes.
        window_size: tokens that a query sees to the left and right of its own; -1: all.

    Raises ValueError for other formats, and what `volta_fa::fwd_kvcache` raises.
    """
    require_tensors(q=q, k_cache=k_cache, v_cache=v_cache, block_table=block_table, seq_lens=seq_lens)
    _check_out(out, q, v_cache)
    if kv_cache_dtype not in _FORMATS:
        raise bad_argument("kv_cache_dtype", f"`{kv_cache_dtype}`", " or ".join(_FORMATS))
    options: dict[str, Any] = {}
    if (dtype := _FORMATS[kv_cache_dtype]) is not None:
        k_cache, v_cache = k_cache.view(dtype), v_cache.view(dtype)
        options = {f"{side}_descale": q.new_full((1,), scale, dtype=torch.float32) for side, scale in (("k", k_scale), ("v", v_scale))}
    left, right = window_size
    result, _ = torch.ops.volta_fa.fwd_kvcache(
        q,
        k_cache,
        v_cache,
        cache_seqlens=seq_lens[: len(q)],
        block_table=block_table[: len(q)],
        softmax_scale=softmax_scale,
        is_causal=causal,
        window_left=left,
        window_right=-1 if causal else right,
        **options,
    )
    return result if out is None else out.copy_(result)


def flash_attn_decode_paged(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    softmax_scale: float | None = None,
    out: Tensor | None = None,
    kv_cache_dtype: str = "auto",
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    window_size: tuple[int, int] = (-1, -1),
    max_seq_len_hint: int | None = None,
    workspace_seq_capacity_hint: int | None = None,
    active_num_partitions: Tensor | None = None,
    partition_size_hint: int | None = None,
) -> Tensor:
    """Computes `flash_attn_prefill_paged` of one token of each sequence: q and out are (batch, nheads, headdim).

    The hints have no effect: the kernels read lengths on the GPU, and divide their work there.
    """
    require_tensors(q=q, v_cache=v_cache)
    _check_out(out, q, v_cache)
    result = flash_attn_prefill_paged(
        q[:, None],
        k_cache,
        v_cache,
        block_table,
        seq_lens,
        softmax_scale,
        None if out is None else out[:, None],
        kv_cache_dtype,
        k_scale,
        v_scale,
        window_size=window_size,
    )
    return result[:, 0] if out is None else out


flash_attn_decode_paged_xqa = flash_attn_decode_paged
flash_attn_decode_paged_wmma = flash_attn_decode_paged


def flash_attn_decode_paged_xqa_available() -> bool:
    """Returns True: it is `flash_attn_decode_paged`."""
    return True


def flash_attn_prefill_paged_bhmd(q: Tensor, *arguments: Any, out: Tensor | None = None, **options: Any) -> Tensor:
    """Computes `flash_attn_prefill_paged` of q and out (batch, nheads, seqlen_q, headdim)."""
    require_tensors(q=q)
    q, options["out"] = _swapped(q, out)
    result = flash_attn_prefill_paged(q, *arguments, **options)
    return result.transpose(1, 2).contiguous() if out is None else out


def flash_attn_prefill_paged_splitkv(
    q: Tensor, *arguments: Any, split_kv_tokens: int = 32768, max_seq_len_hint: int = 0, **options: Any
) -> Tensor:
    """Computes `flash_attn_prefill_paged`. The planner decides about splits, so the two hints have no effect."""
    return flash_attn_prefill_paged(q, *arguments, **options)


def flash_attn_bhmd_func(
    q: Tensor, k: Tensor, v: Tensor, *arguments: Any, return_attn_probs: bool = False, out: Tensor | None = None, **options: Any
) -> Any:
    """Computes `flash_attn_func` of (batch, nheads, seqlen, headdim). Returns out or, with return_attn_probs, (out, softmax_lse, None)."""
    require_tensors(q=q, k=k, v=v)
    _check_out(out, q, v)
    q, k, v = _swapped(q, k, v)
    options["return_attn_probs"] = True
    result, softmax_lse, _ = flash_attn_func(q, k, v, *arguments, **options)
    result = result.transpose(1, 2)
    result = result.contiguous() if out is None else out.copy_(result)
    return (result, softmax_lse, None) if return_attn_probs else result


def flash_attn_lse(q: Tensor, k: Tensor, v: Tensor, softmax_scale: float | None = None, causal: bool = False) -> Tensor:
    """Returns softmax_lse of `flash_attn_func`, float32 (batch, nheads, seqlen_q)."""
    _, softmax_lse, _ = flash_attn_func(q, k, v, softmax_scale=softmax_scale, causal=causal, return_attn_probs=True)
    return softmax_lse


def _flash_attn_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor | None,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_left: int,
    window_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    return_softmax: bool,
) -> tuple[Tensor, Tensor, None, None]:
    """Returns out (batch, nheads, seqlen_q, headdim) and softmax_lse (batch, nheads, seqlen_q).

    1Cat-vLLM calls it for prompts of models with latents.
    """
    result, softmax_lse, *_ = fwd(
        q, k, v, out, alibi_slopes, dropout_p, softmax_scale, causal, window_left, window_right, softcap, return_softmax, None
    )
    return result, softmax_lse, None, None
