"""FlashAttention 3's functions on volta_fa: its top-level module `flash_attn_interface`, with the signatures of its main branch.

Programs such as Wan and SkyReels look for that module before flash_attn; `install_flash_attn_shim()` makes it importable.

Arguments that choose a schedule on Hopper have no effect on the result and are ignored: num_splits of the functions for training,
pack_gqa, sm_margin, scheduler_metadata. q_descale, k_descale and v_descale only scale float8 tensors, as in FlashAttention 3.
attention_chunk and qv have gradients here, which FlashAttention 3 lacks. docs/guides/flash-attn.md lists the differences."""

import math
from typing import Any

import torch
from torch import Tensor

from ...errors import bad_argument, require_none, require_tensors

# `in_range` returns which values are possible, and raises for the others where `reads_values` (on a GPU not by default). `with_unit_stride`
# copies tensors whose last dimension is not contiguous. MAX_HEADDIM: of the operators. `apply_rotary`: rotary embedding.
from ...operands import MAX_HEADDIM, in_range, reads_values, with_unit_stride
from ...rotary import apply_rotary
from .attention_chunk import split_cache, split_sequences  # the chunks of a call with attention_chunk, as packed sequences

# `_fwd` calls volta_fa::fwd; `_lengths` and `_options` return its arguments by name; `_unbind` splits a packed tensor, with checks
from .interface import _fwd, _lengths, _options, _unbind

__all__ = [
    "flash_attn_combine", "flash_attn_func", "flash_attn_qkvpacked_func", "flash_attn_varlen_func",
    "flash_attn_with_kvcache", "get_scheduler_metadata",
]  # fmt: skip

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
    options = _options(softmax_scale, causal, window_size, softcap, alibi_slopes=None) | {"deterministic": deterministic}
    return _attention(q, k, v, qv, options, attention_chunk, return_attn_probs)  # below; computes all functions for training


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
    `qkv`: (batch, seqlen, 3, nheads, headdim), or with num_heads_q (batch, seqlen, num_heads_q + 2 nheads_k, headdim)."""
    require_tensors(qkv=qkv)
    if qkv.dim() == 4 and num_heads_q is not None:
        rest = qkv.shape[2] - num_heads_q
        if num_heads_q < 1 or rest < 2 or rest % 2:
            expected = "(batch, seqlen, num_heads_q + 2 nheads_k, headdim)"
            raise bad_argument("qkv", f"shape {tuple(qkv.shape)} with num_heads_q={num_heads_q}", expected)
        q, k, v = qkv.split([num_heads_q, rest // 2, rest // 2], dim=2)
    else:
        q, k, v = _unbind("qkv", qkv, "batch, seqlen", 3)
    options = _options(softmax_scale, causal, window_size, softcap, alibi_slopes=None) | {"deterministic": deterministic}
    return _attention(q, k, v, None, options, attention_chunk, return_attn_probs)  # None: no qv


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
        seqused_q, seqused_k: int32, (batch): how many of each sequence's queries and keys count, from the first on. out is 0 for other
            queries.
        qv: (total_q, nheads, headdim_v).

    The other arguments are `flash_attn_func`'s and those of `volta_fa.flash_attn_varlen_func`. Positions count within each sequence.

    Returns out, (total_q, nheads, headdim_v); with return_attn_probs out and softmax_lse (float32, (nheads, total_q)).
    """
    require_tensors(cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
    if cu_seqlens_q.dim() != 1 or cu_seqlens_k.shape != cu_seqlens_q.shape:
        got = f"shapes {tuple(cu_seqlens_q.shape)}, {tuple(cu_seqlens_k.shape)}"
        raise bad_argument("cu_seqlens_q, cu_seqlens_k", got, "(batch + 1,) for both")
    for name, t in (("seqused_q", seqused_q), ("seqused_k", seqused_k)):
        if t is not None and (t.dtype != torch.int32 or t.shape != (len(cu_seqlens_q) - 1,)):
            expected = f"shape ({len(cu_seqlens_q) - 1},) of dtype torch.int32, one length for each sequence"
            raise bad_argument(name, f"shape {tuple(t.shape)} of dtype {t.dtype}", expected)
    packed = _lengths(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k) | {
        "seqused_q": with_unit_stride(seqused_q),
        "seqused_k": with_unit_stride(seqused_k),
        # for `split_sequences`: maximum number of queries before the position of a sequence's first key; None: unknown
        "queries_before_keys": 0 if cu_seqlens_q is cu_seqlens_k and seqused_q is None and seqused_k is None else None,
    }
    options = _options(softmax_scale, causal, window_size, softcap, alibi_slopes=None) | {"deterministic": deterministic}
    return _attention(q, k, v, qv, options, attention_chunk, return_attn_probs, packed)


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
        qv: None. A tensor raises NotImplementedError.

    The other arguments are those of `volta_fa.flash_attn_with_kvcache` and of `flash_attn_func`.

    Returns out, (batch, seqlen_q, nheads, headdim_v) or (total_q, nheads, headdim_v); with return_softmax_lse out, softmax_lse (float32,
    (batch, nheads, seqlen_q) or (nheads, total_q)), and two empty tensors in place of the partial results of splits.

    Raises ValueError for wrong arguments, and NotImplementedError for what this build does not support.
    """
    require_tensors(q=q, k_cache=k_cache, v_cache=v_cache)
    require_none("None: call volta_fa.flash_mla.flash_mla_with_kvcache, or torch.ops.volta_fa.fwd_mla, with a cache of latents", qv=qv)
    _check_dtype(q)
    if (k is None) != (v is None):
        missing, there = ("k", "v") if k is None else ("v", "k")
        raise bad_argument(missing, "None", f"a tensor: {there} is given")
    cu_seqlens_q, cu_seqlens_k_new, page_table = map(with_unit_stride, (cu_seqlens_q, cu_seqlens_k_new, page_table))
    batch = q.shape[0] if cu_seqlens_q is None else len(cu_seqlens_q) - 1
    if k is not None and v is not None and cu_seqlens_q is not None and cu_seqlens_k_new is None:
        if k.dim() == v.dim() == 4:  # the operator packs both or neither
            if not batch == k.shape[0] == v.shape[0] or k.shape[1] != v.shape[1]:
                expected = f"(batch, seqlen_new, nheads_k, headdim) with batch {batch}, that of cu_seqlens_q"
                raise bad_argument("k, v", f"shapes {tuple(k.shape)}, {tuple(v.shape)}", expected)
            cu_seqlens_k_new = torch.arange(batch + 1, dtype=torch.int32, device=q.device) * k.shape[1]
            k, v = k.flatten(0, 1), v.flatten(0, 1)
        else:
            cu_seqlens_k_new = cu_seqlens_q  # as the operator does
    if isinstance(cache_seqlens, (int, torch.SymInt)):
        cache_seqlens = torch.full((batch,), cache_seqlens, dtype=torch.int32, device=q.device)
    cache_seqlens, rotary_seqlens = with_unit_stride(cache_seqlens), with_unit_stride(rotary_seqlens)
    options = _options(softmax_scale, causal, window_size, softcap, alibi_slopes=None)
    options |= {"num_splits": max(0, num_splits), "k_descale": None, "v_descale": None}
    if k_cache.dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        options |= {"k_descale": k_descale, "v_descale": v_descale}
    cache = {
        "block_table": page_table,
        "cache_batch_idx": with_unit_stride(cache_batch_idx),
        "leftpad_k": with_unit_stride(cache_leftpad),
        "cache_seqlens": cache_seqlens,
        "cu_seqlens_q": cu_seqlens_q,
        "max_seqlen_q": max_seqlen_q,
    }
    appended: dict[str, Any] = {"cu_seqlens_k_new": cu_seqlens_k_new}
    q = with_unit_stride(q)
    if rotary_cos is not None and rotary_sin is not None and (attention_chunk > 0 or rotary_seqlens is not None):
        # The operator would rotate by cache_seqlens, and give queries different positions only under a causal mask or a window. So
        # rotation by other positions, or of queries whose only mask are chunks, happens here.
        if k is None or cache_seqlens is None:
            raise bad_argument("rotary_cos", "a tensor", "None: k or cache_seqlens is not given")
        name, first = ("cache_seqlens", cache_seqlens) if rotary_seqlens is None else ("rotary_seqlens", rotary_seqlens)
        ordered = causal or attention_chunk > 0 or options["window_left"] != -1 or options["window_right"] != -1
        lengths = (("cache_seqlens", cache_seqlens, batch), (name, first, batch), ("cu_seqlens_k_new", cu_seqlens_k_new, batch + 1))
        for argument, t, n in lengths:
            if t is not None and (t.shape != (n,) or t.dtype != torch.int32):
                raise bad_argument(argument, f"shape {tuple(t.shape)} of dtype {t.dtype}", f"shape ({n},) of dtype torch.int32")
        seqlens_q = _seqlens(q, cu_seqlens_q)
        ends_q = first + (seqlens_q if ordered else seqlens_q > 0)
        # whether the rotary tables have a row for each position of a sequence
        fits = _fits(name, first, torch.maximum(ends_q, first + _seqlens(k, cu_seqlens_k_new)), rotary_cos, rotary_sin, q.shape[-1])
        cache["cache_seqlens"] = cache_seqlens.where(fits, -1)  # an impossible length: NaN, and no append
        q = _rotated(q, rotary_cos, rotary_sin, first, cu_seqlens_q, ordered, rotary_interleaved)
        k = _rotated(k, rotary_cos, rotary_sin, first, cu_seqlens_k_new, ordered=True, interleaved=rotary_interleaved)
    else:
        tables = {"rotary_cos": with_unit_stride(rotary_cos), "rotary_sin": with_unit_stride(rotary_sin)}
        appended |= {**tables, "rotary_interleaved": rotary_interleaved}
    new = () if k is None or v is None else (with_unit_stride(k), with_unit_stride(v))
    if attention_chunk > 0:
        found = _chunked_cache(q, k_cache, v_cache, new, attention_chunk, cache, appended, options)
    else:
        found = torch.ops.volta_fa.fwd_kvcache(q, k_cache, v_cache, *new, **cache, **appended, **options)
    out, softmax_lse = found
    empty = softmax_lse.new_empty(0)
    return (out, _lse_of_fa3(softmax_lse), empty, empty) if return_softmax_lse else out


def flash_attn_combine(
    out_partial: Tensor, lse_partial: Tensor, out: Tensor | None = None, out_dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """Merges attention over disjoint sets of keys, in plain PyTorch.

    Args:
        out_partial: (sets, ..., nheads, headdim_v), lse_partial: (sets, ..., nheads), -inf for a query without a key in a set.
        out: where to write the result. out_dtype: its dtype; out_partial's unless given.

    Returns out, (..., nheads, headdim_v), and softmax_lse, (..., nheads).
    """
    require_tensors(out_partial=out_partial, lse_partial=lse_partial)
    if lse_partial.shape != out_partial.shape[:-1]:  # others might broadcast
        expected = f"shape {tuple(out_partial.shape[:-1])}, that of out_partial without the headdim"
        raise bad_argument("lse_partial", f"shape {tuple(lse_partial.shape)}", expected)
    if out is not None and out.shape != out_partial.shape[1:]:
        raise bad_argument("out", f"shape {tuple(out.shape)}", f"shape {tuple(out_partial.shape[1:])}, that of one set")
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
    qv: Tensor | None,
    options: dict[str, Any],
    attention_chunk: int,
    return_attn_probs: bool,
    packed: dict[str, Any] | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Computes all functions for training.

    Args:
        options: arguments of `volta_fa::fwd`, without lengths.
        packed: lengths of packed sequences, as arguments of `split_sequences` but for the chunk; None: a batch of equal lengths.
    """
    require_tensors(q=q, k=k, v=v)
    _check_dtype(q)
    if qv is not None:
        if qv.shape != (*q.shape[:-1], v.shape[-1]):
            raise bad_argument("qv", f"shape {tuple(qv.shape)}", f"shape {(*q.shape[:-1], v.shape[-1])}, that of out")
        if qv.dtype != q.dtype and not torch.is_autocast_enabled(q.device.type):
            raise bad_argument("qv", f"dtype {qv.dtype}", f"{q.dtype}, q's")
        if k.shape[:-1] != v.shape[:-1] or (k.dtype != v.dtype and not torch.is_autocast_enabled(q.device.type)):
            # torch.cat below would give both one dtype
            got = f"shape {tuple(k.shape)} of dtype {k.dtype}"
            raise bad_argument("k", got, f"shape {(*v.shape[:-1], q.shape[-1])} of dtype {v.dtype}, with v")
        if q.shape[-1] + v.shape[-1] > MAX_HEADDIM:
            got = f"headdim {q.shape[-1]} and headdim_v {v.shape[-1]}"
            expected = f"at most {MAX_HEADDIM} together: call torch.ops.volta_fa.fwd_mla with a cache of latents"
            raise bad_argument("qv", got, expected, error=NotImplementedError)
        q, k = torch.cat((q, qv), -1), torch.cat((k, v), -1)  # q . k + qv . v is one dot product
    pack_here = packed is None and attention_chunk > 0  # because chunks become packed sequences
    batch, seqlen_q = q.shape[:2]
    if pack_here:
        if not q.dim() == k.dim() == v.dim() == 4 or not batch == k.shape[0] == v.shape[0] or k.shape[1] != v.shape[1]:
            shapes = ", ".join(str(tuple(t.shape)) for t in (q, k, v))
            raise bad_argument("q, k, v", f"shapes {shapes}", "(batch, seqlen, nheads, headdim), k and v of one length")
        seqlen_k = k.shape[1]
        entries = torch.arange(batch + 1, dtype=torch.int32, device=q.device)
        packed = _lengths(entries * seqlen_q, entries * seqlen_k, seqlen_q, seqlen_k)
        packed["queries_before_keys"] = max(0, seqlen_q - seqlen_k)
        q, k, v = q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1)
    if packed is not None:
        if attention_chunk > 0 or packed.get("seqused_q") is not None:
            options |= split_sequences(**packed, chunk=max(0, attention_chunk))
        else:
            options |= {name: value for name, value in packed.items() if name not in ("seqused_q", "queries_before_keys")}
    out, softmax_lse, _ = _fwd(q, k, v, **options)
    if pack_here:
        out, softmax_lse = out.unflatten(0, (batch, seqlen_q)), _unpacked_lse(softmax_lse, batch, seqlen_q)
    return (out, _lse_of_fa3(softmax_lse)) if return_attn_probs or _always_return_lse else out


def _chunked_cache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    new: tuple[Tensor, ...],
    chunk: int,
    cache: dict[str, Any],
    appended: dict[str, Any],
    options: dict[str, Any],
) -> tuple[Tensor, Tensor]:
    """Computes attention to a cache by chunks. q and the new keys are rotated already. Returns out and softmax_lse, in the layout of q.

    A first call checks the arguments, appends the new keys and values, and attends queries to one key each. Its softmax_lse is NaN in
    sequences with impossible lengths, which the second call cannot see, because chunks' lengths are clamped.

    Args:
        new: new keys and values, or ().
        cache: arguments of `volta_fa::fwd_kvcache` that describe cache and queries: block_table, cache_batch_idx, leftpad_k,
            cache_seqlens, cu_seqlens_q and max_seqlen_q.
        appended: its arguments for the append alone.
        options: its other arguments.
    """
    pack_here = cache["cu_seqlens_q"] is None
    batch = q.shape[0] if pack_here else len(cache["cu_seqlens_q"]) - 1
    lengths = cache["cache_seqlens"]
    if cache["block_table"] is not None:
        require_none("None with page_table", cache_leftpad=cache["leftpad_k"])
    one_key = options | {"window_left": 0, "window_right": 0}
    first = q[:, :1] if pack_here else q  # of equal numbers of queries one is enough
    _, checked = torch.ops.volta_fa.fwd_kvcache(first, k_cache, v_cache, *new, **cache, **appended, **one_key)
    if new:
        cu_seqlens_k_new = appended["cu_seqlens_k_new"]
        lengths = lengths + (new[0].shape[1] if cu_seqlens_k_new is None else cu_seqlens_k_new.diff())
    if lengths is None:  # the cache is full
        table = cache["block_table"]
        room = k_cache.shape[1] * (1 if table is None else table.shape[1])
        lengths = torch.full((batch,), room, dtype=torch.int32, device=q.device)
    seqlen_q = q.shape[1]
    if pack_here:
        cu_seqlens_q = torch.arange(batch + 1, dtype=torch.int32, device=q.device) * seqlen_q
        cache = cache | {"cu_seqlens_q": cu_seqlens_q, "max_seqlen_q": seqlen_q}
        q = q.flatten(0, 1)
    k_cache, v_cache, chunked, chunks_per_sequence = split_cache(cache, lengths, k_cache, v_cache, chunk, options["window_left"])
    for name in ("k_descale", "v_descale"):
        t = options[name]
        if t is not None and t.dim() == 2:  # (batch, nheads_k): a scale for each sequence
            options = options | {name: t.repeat_interleave(chunks_per_sequence, 0)}
    out, softmax_lse = torch.ops.volta_fa.fwd_kvcache(q, k_cache, v_cache, **chunked, **options)
    if pack_here:
        out, softmax_lse = out.unflatten(0, (batch, seqlen_q)), _unpacked_lse(softmax_lse, batch, seqlen_q)
    impossible = checked.isnan()
    return out.masked_fill_(impossible.transpose(-1, -2)[..., None], math.nan), softmax_lse.masked_fill_(impossible, math.nan)


def _seqlens(x: Tensor, cu_seqlens: Tensor | None) -> int | Tensor:
    """Returns the length of x's sequences: one for all, or (batch) if they are packed."""
    return x.shape[1] if cu_seqlens is None else cu_seqlens.diff()


def _fits(name: str, first: Tensor, ends: Tensor, cos: Tensor, sin: Tensor, headdim: int) -> Tensor:
    """Returns whether the tables have each sequence's positions, from `first`, the argument `name`, to before `ends`. Raises ValueError for
    wrong tables, and for other positions where values are read."""
    if cos.dim() != 2 or 2 * cos.shape[1] > headdim:
        raise bad_argument("rotary_cos", f"shape {tuple(cos.shape)}", f"(seqlen, rotary_dim / 2) with rotary_dim <= {headdim}")
    if sin.shape != cos.shape:
        raise bad_argument("rotary_sin", f"shape {tuple(sin.shape)}", f"rotary_cos' shape {tuple(cos.shape)}")
    if reads_values(ends) and (ends > len(cos)).any():
        longest = int(ends.argmax())
        raise bad_argument("rotary_cos", f"{len(cos)} positions", f"at least {int(ends[longest])}, which sequence {longest} reaches")
    return in_range(name, first, len(cos), "a position") & (ends <= len(cos))


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, first: Tensor, cu_seqlens: Tensor | None, ordered: bool, interleaved: bool) -> Tensor:
    """Returns q or k with its rotary embedding applied. `first`, (batch), has the position of each sequence's first token. All tokens of a
    sequence have that position if not `ordered`."""
    if cu_seqlens is None:
        index = torch.arange(x.shape[1], dtype=torch.int32, device=x.device) * ordered
        positions = (first[:, None] + index).flatten()
    else:
        token = torch.arange(x.shape[0], dtype=torch.int32, device=x.device)
        # rows after the last sequence count as its own, so that indices stay valid: the operator rejects them, or gives them NaN
        sequence = (torch.searchsorted(cu_seqlens, token, right=True) - 1).clamp(max=len(first) - 1)
        positions = first[sequence] + (token - cu_seqlens[sequence]) * ordered
    return apply_rotary(x.reshape(-1, 1, *x.shape[-2:]), cos, sin, positions, interleaved=interleaved).view(x.shape)


def _unpacked_lse(softmax_lse: Tensor, batch: int, seqlen_q: int) -> Tensor:
    """Returns a packed softmax_lse, (nheads, batch * seqlen_q), as (batch, nheads, seqlen_q)."""
    return softmax_lse.unflatten(1, (batch, seqlen_q)).transpose(0, 1).contiguous()


def _lse_of_fa3(softmax_lse: Tensor) -> Tensor:
    """Returns softmax_lse with -inf for queries without a key, as FlashAttention 3 has it; FlashAttention 2 and this library have +inf."""
    return softmax_lse.masked_fill(softmax_lse == math.inf, -math.inf)


def _check_dtype(q: Tensor) -> None:
    if q.dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        expected = "torch.float16 or torch.bfloat16: Volta and Turing have no products in fp8"
        raise bad_argument("q", f"dtype {q.dtype}", expected, error=NotImplementedError)
