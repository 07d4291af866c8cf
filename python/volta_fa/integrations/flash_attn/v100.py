"""The functions of `flash_attn_v100` and of its compiled module, which `install_flash_attn_shim()` makes importable.

Three packages for V100s, of other authors, have that name:

- of 2023: only `flash_attn_func(q, k, v, softmax_scale, causal)`.
- of 2026: flash-attn 2's functions, and a compiled module whose `fwd` and `bwd` take (batch, nheads, seqlen, headdim).
- of 1Cat-vLLM 1.3, a fork of vLLM: also paged functions. Its attention backend needs `flash_attn_func`, `flash_attn_bhmd_func`,
  `flash_attn_decode_paged` and `flash_attn_prefill_paged`, and uses the others if it finds them; here they compute the same.

Tensors are (batch, seqlen, nheads, headdim), in functions with "bhmd" (batch, nheads, seqlen, headdim). The paged functions are for
inference: they have no gradients."""

import functools
from typing import Any

import torch
from torch import Tensor

from ...errors import bad_argument, require_tensors
from ..vllm.paged import CACHE_DTYPES  # by vLLM's kv_cache_dtype: torch's dtype of a quantized cache, else None
from . import compiled, interface  # volta_fa's replacements for flash-attn's compiled module and for its functions
from .compiled import _check_out  # raises ValueError if out cannot take the result
from .compiled import fwd_kvcache as fwd_kvcache
from .compiled import varlen_bwd as varlen_bwd
from .compiled import varlen_fwd as varlen_fwd
from .interface import flash_attn_with_kvcache

__all__ = [
    "flash_attn_bhmd_func", "flash_attn_decode_paged", "flash_attn_decode_paged_wmma", "flash_attn_decode_paged_xqa",
    "flash_attn_decode_paged_xqa_available", "flash_attn_func", "flash_attn_gpu", "flash_attn_lse",
    "flash_attn_prefill_paged", "flash_attn_prefill_paged_bhmd", "flash_attn_prefill_paged_splitkv",
    "flash_attn_varlen_func", "flash_attn_varlen_gpu", "flash_attn_with_kvcache", "flash_attn_with_kvcache_gpu",
]  # fmt: skip


@functools.wraps(interface.flash_attn_func, assigned=())  # copies the signature, and no docstring
def flash_attn_func(q: Tensor, k: Tensor, v: Tensor, *args: Any, **options: Any) -> Any:
    """Computes flash-attn's function, with the positional arguments of either package. After v come softmax_scale and causal (2023), or
    dropout_p and softmax_scale (2026). So None as the fourth argument, or a bool as the fifth, means the package of 2023."""
    if args and (args[0] is None or any(isinstance(option, bool) for option in args[1:2])):
        names = ("softmax_scale", "causal")  # of 2023
        if len(args) > len(names):
            raise TypeError(f"flash_attn_func: got {3 + len(args)} arguments by position, expected q, k, v, softmax_scale and causal")
        return interface.flash_attn_func(q, k, v, **dict(zip(names, args)), **options)
    if len(args) == 1 and args[0] != 0 and "softmax_scale" not in options:
        expected = f"its name: pass dropout_p={args[0]}, or softmax_scale={args[0]} as in the package of 2023"
        raise bad_argument("dropout_p", f"{args[0]} as the only argument after v", expected)
    return interface.flash_attn_func(q, k, v, *args, **options)


@functools.wraps(interface.flash_attn_varlen_func, assigned=())
def flash_attn_varlen_func(q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, *args: Any, **options: Any) -> Any:
    """Computes flash-attn's function. Lengths have any integer dtype."""
    lengths = interface.as_int32("cu_seqlens_q", cu_seqlens_q), interface.as_int32("cu_seqlens_k", cu_seqlens_k)
    return interface.flash_attn_varlen_func(q, k, v, *lengths, *args, **options)


flash_attn_gpu = flash_attn_func
flash_attn_varlen_gpu = flash_attn_varlen_func
flash_attn_with_kvcache_gpu = flash_attn_with_kvcache


def _swapped(*tensors: Tensor | None) -> list[Any]:
    """Returns views of tensors with heads and tokens in the other order, and None for None."""
    return [None if t is None else t.transpose(1, 2) for t in tensors]


def fwd(q: Tensor, k: Tensor, v: Tensor, out: Tensor | None, *options: Any) -> list[Tensor]:
    """Computes `compiled.fwd` of (batch, nheads, seqlen, headdim). `options`: its arguments after out, by position."""
    require_tensors(q=q, k=k, v=v)
    result, *others = compiled.fwd(*_swapped(q, k, v, out), *options)
    return [result.transpose(1, 2).contiguous() if out is None else out, *others]


def bwd(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor | None,
    dk: Tensor | None,
    dv: Tensor | None,
    *options: Any,
) -> list[Tensor]:
    """Computes `compiled.bwd` of (batch, nheads, seqlen, headdim). `options`: its arguments after dv, by position."""
    require_tensors(dout=dout, q=q, k=k, v=v, out=out)
    arguments = [*_swapped(dout, q, k, v, out), softmax_lse, *_swapped(dq, dk, dv), *options]
    *gradients, softmax_d = compiled.bwd(*arguments)
    return [*(new.transpose(1, 2).contiguous() if t is None else t for new, t in zip(gradients, (dq, dk, dv))), softmax_d]


# ---- what 1Cat-vLLM's package adds ---------------------------------------------------------------------------------

#: By kv_cache_dtype of the paged functions: the dtype to which a cache is viewed; None: it has that of q already. Not int8, which needs a
#: scale for each token.
_FORMATS = {name: dtype for name, dtype in CACHE_DTYPES.items() if dtype != torch.int8} | {"bfloat16": None}


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
        out: (batch, seqlen_q, nheads, headdim of v), q's dtype: the call writes the result into it.
        kv_cache_dtype: `auto`, `float16` or `bfloat16` for q's dtype, because 1Cat-vLLM also passes `bfloat16` for a cache in float16;
            `fp8` or `fp8_e4m3`; `fp8_e5m2`.
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
    left, right = window_size  # with causal, flash-attn ignores right, and the operator would raise
    result, _ = torch.ops.volta_fa.fwd_kvcache(
        q, k_cache, v_cache, cache_seqlens=seq_lens[: len(q)], block_table=block_table[: len(q)],
        softmax_scale=softmax_scale, is_causal=causal, window_left=left, window_right=-1 if causal else right,
        **options,
    )  # fmt: skip
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
    The hints have no effect: the kernels read lengths on the GPU, and divide their work there."""
    require_tensors(q=q, v_cache=v_cache)
    _check_out(out, q, v_cache)
    result = flash_attn_prefill_paged(
        q[:, None], k_cache, v_cache, block_table, seq_lens, softmax_scale, None if out is None else out[:, None],
        kv_cache_dtype, k_scale, v_scale, window_size=window_size,
    )  # fmt: skip
    return result[:, 0] if out is None else out


flash_attn_decode_paged_xqa = flash_attn_decode_paged
flash_attn_decode_paged_wmma = flash_attn_decode_paged


def flash_attn_decode_paged_xqa_available() -> bool:
    """Returns True: `flash_attn_decode_paged_xqa` is `flash_attn_decode_paged`."""
    return True


def flash_attn_prefill_paged_bhmd(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    softmax_scale: float | None = None,
    out: Tensor | None = None,
    *arguments: Any,
    **options: Any,
) -> Tensor:
    """Computes `flash_attn_prefill_paged` of q and out (batch, nheads, seqlen_q, headdim)."""
    require_tensors(q=q)
    swapped_q, swapped_out = _swapped(q, out)
    result = flash_attn_prefill_paged(swapped_q, k_cache, v_cache, block_table, seq_lens, softmax_scale, swapped_out, *arguments, **options)
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
    result, softmax_lse, _ = interface.flash_attn_func(q, k, v, *arguments, **options)
    result = result.transpose(1, 2)
    result = result.contiguous() if out is None else out.copy_(result)
    return (result, softmax_lse, None) if return_attn_probs else result


def flash_attn_lse(q: Tensor, k: Tensor, v: Tensor, softmax_scale: float | None = None, causal: bool = False) -> Tensor:
    """Returns softmax_lse of `flash_attn_func`, float32 (batch, nheads, seqlen_q)."""
    _, softmax_lse, _ = interface.flash_attn_func(q, k, v, softmax_scale=softmax_scale, causal=causal, return_attn_probs=True)
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
    1Cat-vLLM calls it for prompts of models with latent attention (DeepSeek's MLA)."""
    generator = None
    result, softmax_lse, *_ = fwd(
        q, k, v, out, alibi_slopes, dropout_p, softmax_scale, causal, window_left, window_right, softcap, return_softmax, generator
    )
    return result, softmax_lse, None, None
