"""FlashAttention 3's functions on volta_fa: the top-level module `flash_attn_interface`, with the signatures of its main branch.

Programs such as Wan and SkyReels look for it before flash_attn. Arguments that choose a schedule on Hopper have no effect on the result
and are ignored: num_splits of the functions for training, pack_gqa, sm_margin, scheduler_metadata. q_descale, k_descale and v_descale
scale float8 tensors alone, as there. attention_chunk and qv have gradients, which FlashAttention 3 lacks.
docs/guides/flash-attn.md lists the differences.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ...errors import bad_argument, require_tensors
from ...operands import MAX_HEADDIM, readable
from ...rotary import apply_rotary
from .chunks import split_cache, split_sequences
from .interface import _fwd, _options, _unbind

__all__ = [
    "flash_attn_combine",
    "flash_attn_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_with_kvcache",
    "get_scheduler_metadata",
]

#: Whether the functions for training always return softmax_lse too, as those before 2025-08-29 did. `install_flash_attn_shim` sets it.
_always_return_lse = False


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Computes attention of a batch of sequences of one length. Differentiable in q, k, v and qv.

    Args:
        qv: (batch, seqlen_q, nheads, headdim_v): qv_i . v_j is added to q_i . k_j. headdim + headdim_v is at most 512. softmax_scale is
            then (headdim + headdim_v) ** -0.5 unless given. Costs a copy of k and v.
        attention_chunk: query i sees the keys whose positions, divided by attention_chunk and rounded down, are that of position
            i + seqlen_k - seqlen_q; 0: no limit. Together with causal and window_size.
        return_attn_probs: also return softmax_lse.

    The module's docstring has the arguments without an effect. The others, and their shapes, are those of `volta_fa.flash_attn_func`.

    Returns out, (batch, seqlen_q, nheads, headdim_v); with return_attn_probs out and softmax_lse (float32, (batch, nheads, seqlen_q)),
    -inf for a query without a visible key.

    Raises ValueError for wrong arguments, and NotImplementedError for what this build does not support.
    """
    return _attention(q, k, v, softmax_scale, causal, qv, window_size, attention_chunk, softcap, deterministic, return_attn_probs)


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    deterministic: bool = False,
    num_heads_q: int | None = None,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Computes `flash_attn_func` of q, k and v in one tensor. Its gradient is one tensor too.

    Args:
        qkv: (batch, seqlen, 3, nheads, headdim), or with num_heads_q (batch, seqlen, num_heads_q + 2 nheads_k, headdim).
    """
    require_tensors(qkv=qkv)
    if qkv.dim() == 4 and num_heads_q is not None:
        rest = qkv.shape[2] - num_heads_q
        if num_heads_q < 1 or rest < 2 or rest % 2:
            expected = "(batch, seqlen, num_heads_q + 2 nheads_k, headdim)"
            raise bad_argument("qkv", f"shape {tuple(qkv.shape)} with num_heads_q={num_heads_q}", expected)
        q, k, v = qkv.split([num_heads_q, rest // 2, rest // 2], dim=2)
    else:
        q, k, v = _unbind("qkv", qkv, "batch, seqlen", 3)
    return _attention(q, k, v, softmax_scale, causal, None, window_size, attention_chunk, softcap, deterministic, return_attn_probs)


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Computes attention of sequences of different lengths, packed one after the other. Differentiable in q, k, v and qv.

    Args:
        seqused_q, seqused_k: int32, (batch): the first queries and keys of each sequence that count. out is 0 for other queries.
        qv: (total_q, nheads, headdim_v).

    The other arguments are `flash_attn_func`'s and those of `volta_fa.flash_attn_varlen_func`. Positions count within each sequence.

    Returns out, (total_q, nheads, headdim_v); with return_attn_probs out and softmax_lse (float32, (nheads, total_q)).
    """
    require_tensors(cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
    for name, t in (("seqused_q", seqused_q), ("seqused_k", seqused_k)):
        if t is not None and (t.dtype != torch.int32 or t.shape != (len(cu_seqlens_q) - 1,)):
            expected = f"shape ({len(cu_seqlens_q) - 1},) of dtype torch.int32, one length for each sequence"
            raise bad_argument(name, f"shape {tuple(t.shape)} of dtype {t.dtype}", expected)
    same = cu_seqlens_q is cu_seqlens_k
    cu_seqlens_q, cu_seqlens_k = readable(cu_seqlens_q), readable(cu_seqlens_k)
    packed = {
        "cu_seqlens_q": cu_seqlens_q,
        "cu_seqlens_k": cu_seqlens_q if same else cu_seqlens_k,
        "max_seqlen_q": max_seqlen_q,
        "max_seqlen_k": max_seqlen_k,
        "seqused_q": readable(seqused_q),
        "seqused_k": readable(seqused_k),
        "ahead": 0 if same and seqused_q is None and seqused_k is None else None,
    }
    return _attention(q, k, v, softmax_scale, causal, qv, window_size, attention_chunk, softcap, deterministic, return_attn_probs, packed)


@torch.no_grad()
def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    qv: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    page_table: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    max_seqlen_q: int | None = None,
    rotary_seqlens: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: Tensor | None = None,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    return_softmax_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor, Tensor, Tensor]:
    """Computes attention over a KV cache, after appending k and v to it in place. No gradients.

    Args:
        q: (batch, seqlen_q, nheads, headdim), or with cu_seqlens_q and max_seqlen_q (total_q, nheads, headdim).
        k, v: (batch, seqlen_new, nheads_k, headdim or headdim_v), or with cu_seqlens_k_new (total_new, ...).
        page_table: `volta_fa.flash_attn_with_kvcache`'s block_table.
        rotary_seqlens: int32 (batch): the positions of each entry's first query and first new key, in place of cache_seqlens.
        k_descale, v_descale: float32 (batch, nheads_k): scales of a cache in float8.
        attention_chunk: as in `flash_attn_func`. With pages whose size does not divide it, a call copies the chunks' keys.

    The other arguments are those of `volta_fa.flash_attn_with_kvcache` and of `flash_attn_func`.

    Returns out, (batch, seqlen_q, nheads, headdim_v) or (total_q, nheads, headdim_v); with return_softmax_lse out, softmax_lse (float32,
    (batch, nheads, seqlen_q) or (nheads, total_q)), and two empty tensors in place of the partial results of splits.

    Raises ValueError for wrong arguments, and NotImplementedError for what this build does not support.
    """
    require_tensors(q=q, k_cache=k_cache, v_cache=v_cache)
    if qv is not None:
        remedy = "None: call volta_fa.flash_mla.flash_mla_with_kvcache, or torch.ops.volta_fa.fwd_mla, with a cache of latents"
        raise bad_argument("qv", "a tensor", remedy, error=NotImplementedError)
    _check_dtype(q)
    if (k is None) != (v is None):
        missing, there = ("k", "v") if k is None else ("v", "k")
        raise bad_argument(missing, "None", f"a tensor: {there} is given")
    cu_seqlens_q, cu_seqlens_k_new, page_table = readable(cu_seqlens_q), readable(cu_seqlens_k_new), readable(page_table)
    batch = q.shape[0] if cu_seqlens_q is None else len(cu_seqlens_q) - 1
    if isinstance(cache_seqlens, (int, torch.SymInt)):
        cache_seqlens = torch.full((batch,), cache_seqlens, dtype=torch.int32, device=q.device)
    cache_seqlens, rotary_seqlens = readable(cache_seqlens), readable(rotary_seqlens)
    options = _options(softmax_scale, causal, window_size, softcap, None)
    options |= {"num_splits": max(0, num_splits), "k_descale": None, "v_descale": None}
    if k_cache.dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        options |= {"k_descale": k_descale, "v_descale": v_descale}
    cache = {
        "block_table": page_table,
        "cache_batch_idx": readable(cache_batch_idx),
        "leftpad_k": readable(cache_leftpad),
        "cache_seqlens": cache_seqlens,
    }
    queries = {"cu_seqlens_q": cu_seqlens_q, "max_seqlen_q": max_seqlen_q}
    appended: dict[str, Any] = {"cu_seqlens_k_new": cu_seqlens_k_new}
    q = readable(q)
    if rotary_cos is not None and rotary_sin is not None and (attention_chunk > 0 or rotary_seqlens is not None):
        # the operator rotates by cache_seqlens, and orders queries by masks of its own alone
        if k is None or cache_seqlens is None:
            raise bad_argument("rotary_cos", "a tensor", "None: k or cache_seqlens is not given")
        first = cache_seqlens if rotary_seqlens is None else rotary_seqlens
        ordered = causal or attention_chunk > 0 or options["window_left"] != -1 or options["window_right"] != -1
        q = _rotated(q, rotary_cos, rotary_sin, first, cu_seqlens_q, ordered, rotary_interleaved)
        k = _rotated(k, rotary_cos, rotary_sin, first, cu_seqlens_k_new, True, rotary_interleaved)
    else:
        tables = {"rotary_cos": readable(rotary_cos), "rotary_sin": readable(rotary_sin)}
        appended |= {**tables, "rotary_interleaved": rotary_interleaved}
    new = () if k is None or v is None else (readable(k), readable(v))
    if attention_chunk > 0:
        found = _chunked_cache(q, k_cache, v_cache, new, attention_chunk, cache, queries, appended, options)
    else:
        found = torch.ops.volta_fa.fwd_kvcache(q, k_cache, v_cache, *new, **cache, **queries, **appended, **options)
    out, softmax_lse = found
    empty = softmax_lse.new_empty(0)
    return (out, _lse(softmax_lse), empty, empty) if return_softmax_lse else out


def flash_attn_combine(
    out_partial: Tensor, lse_partial: Tensor, out: Tensor | None = None, out_dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """Merges attention over disjoint sets of keys, in plain PyTorch.

    Args:
        out_partial: (sets, ..., nheads, headdim_v), lse_partial: (sets, ..., nheads), -inf for a query without a key in a set.
        out: where to write the result. out_dtype: its dtype; out_partial's unless given.

    Returns out, (..., nheads, headdim_v), and softmax_lse, (..., nheads).
    """
    softmax_lse = lse_partial.logsumexp(0)
    weights = (lse_partial - softmax_lse).exp().masked_fill(lse_partial == -math.inf, 0.0)
    result = (weights[..., None] * out_partial).sum(0).to(out_dtype or out_partial.dtype)
    return result if out is None else out.copy_(result), softmax_lse


def get_scheduler_metadata(
    batch_size: int,
    max_seqlen_q: int,
    max_seqlen_k: int,
    num_heads_q: int,
    num_heads_kv: int,
    headdim: int,
    cache_seqlens: Tensor,
    qkv_dtype: torch.dtype = torch.bfloat16,
    headdim_v: int | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    page_size: int | None = None,
    max_seqlen_k_new: int = 0,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    has_softcap: bool = False,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
) -> Tensor:
    """Returns an empty tensor: `flash_attn_with_kvcache` plans each call itself."""
    return torch.empty(0, dtype=torch.int32, device=cache_seqlens.device)


def _attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None,
    causal: bool,
    qv: Tensor | None,
    window_size: tuple[int, int],
    attention_chunk: int,
    softcap: float,
    deterministic: bool,
    return_attn_probs: bool,
    packed: dict[str, Any] | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Computes all functions for training. packed: arguments of `split_sequences` but for the chunk."""
    require_tensors(q=q, k=k, v=v)
    _check_dtype(q)
    if qv is not None:
        if qv.shape != (*q.shape[:-1], v.shape[-1]):
            raise bad_argument("qv", f"shape {tuple(qv.shape)}", f"shape {(*q.shape[:-1], v.shape[-1])}, that of out")
        if q.shape[-1] + v.shape[-1] > MAX_HEADDIM:
            got = f"headdim {q.shape[-1]} and headdim_v {v.shape[-1]}"
            expected = f"at most {MAX_HEADDIM} together: call torch.ops.volta_fa.fwd_mla with a cache of latents"
            raise bad_argument("qv", got, expected, error=NotImplementedError)
        q, k = torch.cat((q, qv), -1), torch.cat((k, v), -1)  # q . k + qv . v is one dot product
    options = _options(softmax_scale, causal, window_size, softcap, None) | {"deterministic": deterministic}
    dense = packed is None and attention_chunk > 0
    batch, seqlen_q = q.shape[:2]
    if dense:
        if not q.dim() == k.dim() == v.dim() == 4 or not batch == k.shape[0] == v.shape[0] or k.shape[1] != v.shape[1]:
            shapes = ", ".join(str(tuple(t.shape)) for t in (q, k, v))
            raise bad_argument("q, k, v", f"shapes {shapes}", "(batch, seqlen, nheads, headdim), k and v of one length")
        seqlen_k = k.shape[1]
        cu_seqlens_q, cu_seqlens_k = (
            torch.arange(batch + 1, dtype=torch.int32, device=q.device) * seqlen for seqlen in (seqlen_q, seqlen_k)
        )
        packed = {
            "cu_seqlens_q": cu_seqlens_q,
            "cu_seqlens_k": cu_seqlens_k,
            "max_seqlen_q": seqlen_q,
            "max_seqlen_k": seqlen_k,
            "ahead": max(0, seqlen_q - seqlen_k),
        }
        q, k, v = q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1)
    if packed is not None:
        if attention_chunk > 0 or packed.get("seqused_q") is not None:
            options |= split_sequences(**packed, chunk=max(0, attention_chunk))
        else:
            options |= {name: value for name, value in packed.items() if name not in ("seqused_q", "ahead")}
    out, softmax_lse, _ = _fwd(q, k, v, **options)
    if dense:
        out, softmax_lse = out.unflatten(0, (batch, seqlen_q)), _of_batch(softmax_lse, batch, seqlen_q)
    return (out, _lse(softmax_lse)) if return_attn_probs or _always_return_lse else out


def _chunked_cache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    new: tuple[Tensor, ...],
    chunk: int,
    cache: dict[str, Any],
    queries: dict[str, Any],
    appended: dict[str, Any],
    options: dict[str, Any],
) -> tuple[Tensor, Tensor]:
    """Computes attention to a cache by chunks, after an append of k and v in a call without queries. q and k are rotated."""
    cu_seqlens_q, max_seqlen_q = queries["cu_seqlens_q"], queries["max_seqlen_q"]
    batch = q.shape[0] if cu_seqlens_q is None else len(cu_seqlens_q) - 1
    lengths = cache["cache_seqlens"]
    if cache["leftpad_k"] is not None and cache["block_table"] is not None:
        raise bad_argument("cache_leftpad", "a tensor", "None with page_table", error=NotImplementedError)
    if new:
        none = q.new_empty(batch, 0, *q.shape[-2:])
        if appended["cu_seqlens_k_new"] is None and cu_seqlens_q is not None and new[0].dim() == 3:
            appended = appended | {"cu_seqlens_k_new": cu_seqlens_q}
        torch.ops.volta_fa.fwd_kvcache(none, k_cache, v_cache, *new, **cache, **appended, **options)
        cu_seqlens_k_new = appended["cu_seqlens_k_new"]
        lengths = lengths + (new[0].shape[1] if cu_seqlens_k_new is None else cu_seqlens_k_new.diff())
    if lengths is None:
        table = cache["block_table"]
        room = k_cache.shape[1] * (1 if table is None else table.shape[1])
        lengths = torch.full((batch,), room, dtype=torch.int32, device=q.device)
    dense = cu_seqlens_q is None
    seqlen_q = q.shape[1]
    if dense:
        cu_seqlens_q, max_seqlen_q = torch.arange(batch + 1, dtype=torch.int32, device=q.device) * seqlen_q, seqlen_q
        q = q.flatten(0, 1)
    elif max_seqlen_q is None:
        raise bad_argument("max_seqlen_q", None, "the length of the longest sequence, since cu_seqlens_q is given")
    k_cache, v_cache, chunked, count = split_cache(
        cu_seqlens_q, max_seqlen_q, lengths, cache["leftpad_k"], cache["cache_batch_idx"], cache["block_table"], k_cache, v_cache, chunk
    )
    for name in ("k_descale", "v_descale"):
        t = options[name]
        if t is not None and t.dim() == 2:
            options = options | {name: t.repeat_interleave(count, 0)}
    out, softmax_lse = torch.ops.volta_fa.fwd_kvcache(q, k_cache, v_cache, **chunked, **options)
    return (out.unflatten(0, (batch, seqlen_q)), _of_batch(softmax_lse, batch, seqlen_q)) if dense else (out, softmax_lse)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, first: Tensor, cu_seqlens: Tensor | None, ordered: bool, interleaved: bool) -> Tensor:
    """Returns q or k rotated by positions from `first` on, or not `ordered` all tokens of a sequence by its first position."""
    if cu_seqlens is None:
        index = torch.arange(x.shape[1], dtype=torch.int32, device=x.device) * ordered
        positions = (first[:, None] + index).flatten()
    else:
        token = torch.arange(x.shape[0], dtype=torch.int32, device=x.device)
        sequence = torch.searchsorted(cu_seqlens, token, right=True) - 1
        positions = first[sequence] + (token - cu_seqlens[sequence]) * ordered
    return apply_rotary(x.reshape(-1, 1, *x.shape[-2:]), cos, sin, positions, interleaved=interleaved).view(x.shape)


def _of_batch(softmax_lse: Tensor, batch: int, seqlen_q: int) -> Tensor:
    return softmax_lse.unflatten(1, (batch, seqlen_q)).transpose(0, 1).contiguous()


def _lse(softmax_lse: Tensor) -> Tensor:
    """FlashAttention 3 gives -inf to queries without a key, FlashAttention 2 and this library +inf."""
    return softmax_lse.masked_fill(softmax_lse == math.inf, -math.inf)


def _check_dtype(q: Tensor) -> None:
    if q.dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        expected = "torch.float16 or torch.bfloat16: Volta and Turing have no products in fp8"
        raise bad_argument("q", f"dtype {q.dtype}", expected, error=NotImplementedError)
