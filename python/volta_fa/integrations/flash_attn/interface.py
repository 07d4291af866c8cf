"""flash-attn 2's functions on `volta_fa::fwd` and `volta_fa::fwd_kvcache`, with the signatures, defaults and results of 2.8.3.

`volta_fa` exports them, and the shim's `flash_attn` package too (`install_flash_attn_shim()`). Masks are aligned bottom-right: the last
query sees the last key. A query without a visible key has out 0 and softmax_lse +inf. Gradients come from autograd.
docs/guides/flash-attn.md lists the differences from flash-attn. Below the functions, `_options` and `_lengths` check arguments and return
the operators' by name; `_attention` calls `volta_fa::fwd` for all but those over a cache or pages."""

import operator
from typing import Any

import torch
from torch import Tensor

from ...errors import bad_argument, require_none, require_strided, require_tensors
from ...operands import with_unit_stride  # copies a tensor unless its last dimension is contiguous

__all__ = [
    "flash_attn_func", "flash_attn_kvpacked_func", "flash_attn_qkvpacked_func", "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func", "flash_attn_varlen_qkvpacked_func", "flash_attn_with_kvcache",
]  # fmt: skip

_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    s_aux: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor, Tensor]:
    """Computes attention of a batch of sequences of one length. Differentiable in q, k and v.

    Args:
        q: (batch, seqlen_q, nheads, headdim), in float16, bfloat16 or float32; on the CPU also float64. headdim is at
            most 512; a headdim that is not a multiple of 8 costs a copy.
        k: (batch, seqlen_k, nheads_k, headdim), where nheads_k divides nheads.
        v: (batch, seqlen_k, nheads_k, headdim_v).
        dropout_p: probability of dropping a softmax probability, in [0, 1).
        softmax_scale: headdim ** -0.5 unless given.
        causal: query i sees the keys j <= i + seqlen_k - seqlen_q.
        window_size: (left, right): query i sees the keys from i + seqlen_k - seqlen_q - left to
            i + seqlen_k - seqlen_q + right; a negative number is no limit. Integer tensors of one element work too.
        softcap: scores x become softcap * tanh(x / softcap); 0 is off. Not together with dropout.
        alibi_slopes: float32, (nheads) or (batch, nheads): slope * |i + seqlen_k - seqlen_q - j| is subtracted from
            the scores.
        deterministic: gradients are bitwise identical from run to run.
        return_attn_probs: also return softmax_lse and S_dmask, for tests.
        s_aux: (nheads), q's dtype or float32: attention sinks, differentiable. flash-attn 2 has no such argument; transformers hands
            gpt-oss's sinks to functions that have it.

    Returns out, (batch, seqlen_q, nheads, headdim_v) in q's dtype; with return_attn_probs=True out, softmax_lse
    (float32, (batch, nheads, seqlen_q)) and S_dmask. S_dmask is empty without dropout. With dropout it holds the
    probabilities, (batch, nheads, seqlen_q, seqlen_k) in q's dtype, negative where dropped, in memory that the kernels
    otherwise save.

    Raises ValueError for wrong arguments, and NotImplementedError for what this build does not support.
    """
    options = _options(softmax_scale, causal, window_size, softcap, alibi_slopes, s_aux)
    return _attention(q, k, v, options, dropout_p, deterministic, return_attn_probs)


def flash_attn_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Tensor | tuple[Tensor, Tensor, Tensor]:
    """Computes `flash_attn_func` of k and v in one tensor. Its gradient is one tensor too.
    `kv`: (batch, seqlen_k, 2, nheads_k, headdim)."""
    k, v = _unbind("kv", kv, "batch, seqlen_k", 2)  # 2: the size of dimension -3. The text names the dimensions before it, for the error
    return flash_attn_func(q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs)


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Tensor | tuple[Tensor, Tensor, Tensor]:
    """Computes `flash_attn_func` of q, k and v in one tensor. Its gradient is one tensor too.
    `qkv`: (batch, seqlen, 3, nheads, headdim)."""
    q, k, v = _unbind("qkv", qkv, "batch, seqlen", 3)
    return flash_attn_func(q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs)


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
    *,
    s_aux: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor, Tensor]:
    """Computes attention of sequences of different lengths, packed one after the other. Differentiable in q, k and v.

    Args:
        q: (total_q, nheads, headdim), k: (total_k, nheads_k, headdim), v: (total_k, nheads_k, headdim_v).
        cu_seqlens_q, cu_seqlens_k: int32, (batch + 1), on q's device: where each sequence begins, from 0, and at the end
            total_q and total_k. Sequences may be empty.
        max_seqlen_q, max_seqlen_k: at least the longest sequence's length. Tensors of one element work too.
        block_table: int32, (batch, max_pages): the pages of each sequence, in order. k and v are then pages, (num_pages, page_size,
            nheads_k, headdim or headdim_v), and only the lengths in cu_seqlens_k count. page_size is any multiple of 16. For
            inference: no dropout, no gradients.

    The other arguments are `flash_attn_func`'s. Positions count within each sequence.

    Returns out, (total_q, nheads, headdim_v); with return_attn_probs=True out, softmax_lse (float32,
    (nheads, total_q)) and S_dmask ((batch, nheads, max_seqlen_q, max_seqlen_k), 0 outside of the sequences).
    """
    options = _options(softmax_scale, causal, window_size, softcap, alibi_slopes, s_aux)
    options |= _lengths(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    if block_table is not None:
        out, softmax_lse = _paged(q, k, v, dropout_p, block_table, options)
        return (out, softmax_lse, q.new_empty(0)) if return_attn_probs else out
    return _attention(q, k, v, options, dropout_p, deterministic, return_attn_probs)


def _paged(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float, block_table: Tensor, options: dict[str, Any], num_splits: int = 0
) -> tuple[Tensor, Tensor]:
    """Computes `flash_attn_varlen_func` over pages. Returns out and softmax_lse. `options`: what `_options` and `_lengths` return, and
    seqused_k, the sequences' lengths, unless those in cu_seqlens_k count."""
    require_strided(q=q, k=k, v=v)
    cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_k = (
        options.pop(name, None) for name in ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "seqused_k")
    )
    if dropout_p != 0.0:
        raise bad_argument("dropout_p", dropout_p, "0: a cache is for inference")
    if cu_seqlens_k.shape != cu_seqlens_q.shape or cu_seqlens_k.dtype != torch.int32:
        expected = f"shape {tuple(cu_seqlens_q.shape)} of dtype torch.int32, as cu_seqlens_q"
        raise bad_argument("cu_seqlens_k", f"shape {tuple(cu_seqlens_k.shape)} of dtype {cu_seqlens_k.dtype}", expected)
    if max_seqlen_k is None or max_seqlen_k < 0:
        raise bad_argument("max_seqlen_k", max_seqlen_k, "the length of the longest sequence")
    return torch.ops.volta_fa.fwd_kvcache(
        with_unit_stride(q), k, v, cu_seqlens_q=cu_seqlens_q, max_seqlen_q=max_seqlen_q,
        cache_seqlens=cu_seqlens_k.diff() if seqused_k is None else seqused_k,
        block_table=with_unit_stride(block_table), num_splits=num_splits, **options,
    )  # fmt: skip


def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Tensor | tuple[Tensor, Tensor, Tensor]:
    """Computes `flash_attn_varlen_func` of k and v in one tensor. Its gradient is one tensor too. `kv`: (total_k, 2, nheads_k, headdim)."""
    k, v = _unbind("kv", kv, "total_k", 2)
    options = _options(softmax_scale, causal, window_size, softcap, alibi_slopes)
    options |= _lengths(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    return _attention(q, k, v, options, dropout_p, deterministic, return_attn_probs)


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Tensor | tuple[Tensor, Tensor, Tensor]:
    """Computes `flash_attn_varlen_func` of q, k and v in one tensor. Its gradient is one tensor too. `qkv`: (total, 3, nheads, headdim)."""
    require_tensors(cu_seqlens=cu_seqlens)
    q, k, v = _unbind("qkv", qkv, "total", 3)
    options = _options(softmax_scale, causal, window_size, softcap, alibi_slopes)
    options |= _lengths(cu_seqlens, cu_seqlens, max_seqlen, max_seqlen)
    return _attention(q, k, v, options, dropout_p, deterministic, return_attn_probs)


@torch.no_grad()
def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
    *,
    s_aux: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Computes attention over a KV cache, after appending k and v to it in place. No gradients.

    Args:
        q: (batch, seqlen_q, nheads, headdim).
        k_cache: (batch_cache, seqlen_cache, nheads_k, headdim); with a block_table pages, (num_pages, page_size, nheads_k,
            headdim), of any page_size that is a multiple of 16. All strides but the last are free, so keys and values may be
            views of one tensor.
        v_cache: the same with headdim_v.
        k, v: (batch, seqlen_new, nheads_k, headdim or headdim_v), written after the first cache_seqlens keys; both or
            neither.
        rotary_cos, rotary_sin: (seqlen_rotary, rotary_dim / 2), q's dtype or float32: k is rotated by its positions from
            cache_seqlens on, and so is q with causal or a window. Otherwise all of q is rotated by position cache_seqlens.
        cache_seqlens: int, or int32 (batch): keys of each entry before the append, those before cache_leftpad included. None: as many
            as the cache has room for.
        cache_batch_idx: int32 (batch): the cache's entry of each entry of q. Not together with block_table.
        cache_leftpad: int32 (batch): keys at the beginning of each cache entry that are padding. Not together with block_table.
        block_table: int32 (batch, max_pages): the pages of each entry, in order. Entries after the last key's page are not read.
        rotary_interleaved: rotate dimensions 0 and 1, 2 and 3 ..., instead of the first half and the second.
        num_splits: maximum number of parts into which the keys of an entry are split; 0 lets the scheduler decide.

    The other arguments are `flash_attn_func`'s, for keys that are not padding.

    Returns out, (batch, seqlen_q, nheads, headdim_v), and with return_softmax_lse=True also softmax_lse (float32,
    (batch, nheads, seqlen_q)).

    Raises ValueError for wrong arguments. Values of tensors on a GPU are only checked with VOLTA_FA_CHECK_LENGTHS=1, because that
    synchronizes. Otherwise an entry with impossible lengths or pages gets NaN in out and softmax_lse, and the kernels access no
    memory of other entries for it.
    """
    require_strided(q=q, k_cache=k_cache, v_cache=v_cache)
    for name, operand in (("q", q), ("k_cache", k_cache), ("v_cache", v_cache)):
        if operand.dim() != 4:
            expected = "rank 4, (batch, seqlen, nheads, headdim)"
            raise bad_argument(name, f"a tensor of rank {operand.dim()} with shape {tuple(operand.shape)}", expected)
    options = _options(softmax_scale, causal, window_size, softcap, alibi_slopes, s_aux)
    batch = q.shape[0]
    if k is None:
        require_none("None: k is not given", error=ValueError, v=v, rotary_cos=rotary_cos, rotary_sin=rotary_sin)
    elif v is None:
        raise bad_argument("v", "None", "a value: k is given")
    if isinstance(cache_seqlens, (int, torch.SymInt)):
        # a Python number, unlike a tensor's values, can be checked without synchronizing
        for name, t in (("k", k), ("block_table", block_table)):
            if t is not None:
                require_tensors(**{name: t})
        capacity = k_cache.shape[1] * (1 if block_table is None else block_table.shape[-1])
        room = capacity - (0 if k is None or k.dim() != 4 else k.shape[1])
        if not 0 <= cache_seqlens <= room:
            why = "" if room == capacity else f": there is room for {capacity} keys, and k has {capacity - room}"
            remedy = "" if block_table is None else ": longer sequences need more columns in block_table"
            raise bad_argument("cache_seqlens", cache_seqlens, f"a length from 0 to {room}{why}{remedy}")
        cache_seqlens = torch.full((batch,), cache_seqlens, dtype=torch.int32, device=q.device)
    out, softmax_lse = torch.ops.volta_fa.fwd_kvcache(
        with_unit_stride(q), k_cache, v_cache, *(() if k is None or v is None else (with_unit_stride(k), with_unit_stride(v))),
        cache_seqlens=with_unit_stride(cache_seqlens), block_table=with_unit_stride(block_table),
        cache_batch_idx=_int32("cache_batch_idx", cache_batch_idx, q),
        leftpad_k=_int32("cache_leftpad", cache_leftpad, q), rotary_cos=with_unit_stride(rotary_cos),
        rotary_sin=with_unit_stride(rotary_sin), rotary_interleaved=rotary_interleaved, num_splits=max(0, num_splits),
        **options,
    )  # fmt: skip
    return (out, softmax_lse) if return_softmax_lse else out


def _int32(name: str, t: Tensor | None, q: Tensor) -> Tensor | None:
    """Returns a tensor (batch) of any integer dtype as int32."""
    if t is None:
        return None
    if t.shape != q.shape[:1]:
        raise bad_argument(name, f"shape {tuple(t.shape)}", f"shape (batch,), here ({q.shape[0]},)")
    return as_int32(name, t)


def as_int32(name: str, t: Tensor) -> Tensor:
    """Returns a tensor of any integer dtype, the argument `name`, as int32. Raises ValueError for others, which would be truncated."""
    require_tensors(**{name: t})
    if t.dtype not in _INTEGERS:
        raise bad_argument(name, f"dtype {t.dtype}", "an integer dtype")
    return with_unit_stride(t.to(torch.int32))


def _attention(
    q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any], dropout_p: float, deterministic: bool, return_attn_probs: bool
) -> Tensor | tuple[Tensor, Tensor, Tensor]:
    """Computes all functions for training. options: what `_options` and `_lengths` return."""
    require_strided(q=q, k=k, v=v)
    options |= {"dropout_p": dropout_p, "deterministic": deterministic}
    out, softmax_lse, rng_state = _fwd(q, k, v, **options)
    if not return_attn_probs:
        return out
    return out, softmax_lse, _s_dmask(q, k, softmax_lse, rng_state, options) if dropout_p > 0 else q.new_empty(0)


def _lengths(cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int) -> dict[str, Any]:
    """Returns the lengths of packed sequences, as arguments of `volta_fa::fwd` and `volta_fa::bwd`."""
    require_tensors(cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
    return {
        "cu_seqlens_q": with_unit_stride(cu_seqlens_q),
        "cu_seqlens_k": with_unit_stride(cu_seqlens_k),
        "max_seqlen_q": max_seqlen_q,
        "max_seqlen_k": max_seqlen_k,
    }


def _options(
    softmax_scale: float | None,
    causal: bool,
    window_size: tuple[int, int],
    softcap: float,
    alibi_slopes: Tensor | None,
    s_aux: Tensor | None = None,
) -> dict[str, Any]:
    """Returns the options that all functions have, as arguments of `volta_fa::fwd`, `bwd` and `fwd_kvcache`."""
    left, right = _window(window_size)
    return {
        "softmax_scale": softmax_scale,
        "is_causal": causal,
        "window_left": left,
        "window_right": -1 if causal else right,  # flash-attn ignores it with causal; the operators raise
        "softcap": softcap,
        "alibi_slopes": with_unit_stride(alibi_slopes),
        "sinks": with_unit_stride(s_aux),
    }


def _fwd(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Calls `volta_fa::fwd` for tensors of any strides; it requires a contiguous last dimension."""
    return torch.ops.volta_fa.fwd(with_unit_stride(q), with_unit_stride(k), with_unit_stride(v), **options)


def _unbind(name: str, packed: Tensor, leading: str, count: int) -> tuple[Tensor, ...]:
    """Returns the `count` tensors in dimension -3 of `packed`. `leading` names the dimensions before it, for the error. torch.unbind's
    backward stacks the gradients once. Separate slices would fill and add `count` tensors of the whole size."""
    require_strided(**{name: packed})
    expected = (*leading.split(", "), str(count), "nheads" if count == 3 else "nheads_k", "headdim")
    if packed.dim() != len(expected) or packed.shape[-3] != count:
        raise bad_argument(name, f"shape {tuple(packed.shape)}", f"({', '.join(expected)})")
    return packed.unbind(-3)


def _window(window_size: Any) -> tuple[int | torch.SymInt | Tensor, int | torch.SymInt | Tensor]:
    """Returns window_left and window_right. Any negative number is no limit in flash-attn; the operators take -1."""
    pair = isinstance(window_size, (tuple, list)) or (isinstance(window_size, Tensor) and window_size.dim() == 1)
    if not pair or len(window_size) != 2 or not all(map(_is_integer, window_size)):
        raise bad_argument("window_size", repr(window_size), "(left, right), two integers or integer tensors of one element")
    left, right = (bound if isinstance(bound, (int, Tensor, torch.SymInt)) else operator.index(bound) for bound in window_size)
    return max(-1, left), max(-1, right)


def _is_integer(bound: Any) -> bool:
    if isinstance(bound, Tensor):
        return bound.numel() == 1 and bound.dtype in _INTEGERS
    # torch.compile takes symbolic integers for int, and traces no hasattr of them
    return isinstance(bound, (int, torch.SymInt)) or hasattr(bound, "__index__")


@torch.no_grad()
def _s_dmask(q: Tensor, k: Tensor, softmax_lse: Tensor, rng_state: Tensor, options: dict[str, Any]) -> Tensor:
    """Returns flash-attn's S_dmask: the probabilities, (batch, nheads, max_seqlen_q, max_seqlen_k), negative where dropped.
    In plain PyTorch, because only tests ask for it. `options`: those of `volta_fa::fwd`. Dropout excludes softcap, so that is not read."""
    nheads, nheads_k, alibi_slopes = q.shape[-2], k.shape[-2], options["alibi_slopes"]
    is_causal, window_left, window_right = options["is_causal"], options["window_left"], options["window_right"]
    softmax_scale = q.shape[-1] ** -0.5 if options["softmax_scale"] is None else options["softmax_scale"]
    if options.get("cu_seqlens_q") is None:
        batch, max_seqlen_q, max_seqlen_k = q.shape[0], q.shape[1], k.shape[1]
        sequences = zip(q, k, softmax_lse)
    else:
        batch, max_seqlen_q, max_seqlen_k = len(options["cu_seqlens_q"]) - 1, options["max_seqlen_q"], options["max_seqlen_k"]
        lengths_q, lengths_k = options["cu_seqlens_q"].diff().tolist(), options["cu_seqlens_k"].diff().tolist()
        sequences = zip(q.split(lengths_q), k.split(lengths_k), softmax_lse.split(lengths_q, dim=-1))
    keep = torch.ops.volta_fa._dropout_mask(rng_state, batch, nheads, max_seqlen_q, max_seqlen_k, options["dropout_p"])
    result = q.new_zeros(keep.shape)
    wide = torch.promote_types(q.dtype, torch.float32)
    for b, (q_b, k_b, lse_b) in enumerate(sequences):
        seqlen_q, seqlen_k = len(q_b), len(k_b)
        scores = torch.einsum("ihd,jhd->hij", q_b.to(wide), k_b.to(wide).repeat_interleave(nheads // nheads_k, dim=1)) * softmax_scale
        position_q = torch.arange(seqlen_q, device=q.device)[:, None] + seqlen_k - seqlen_q
        distance = torch.arange(seqlen_k, device=q.device) - position_q  # positive: a later key
        if alibi_slopes is not None:
            scores -= alibi_slopes.to(wide).expand(batch, nheads)[b, :, None, None] * distance.abs()
        hidden = torch.zeros_like(distance, dtype=torch.bool)
        if window_left >= 0:
            hidden |= distance < -window_left
        if is_causal or window_right >= 0:
            hidden |= distance > (0 if is_causal else window_right)
        p = (scores - lse_b[..., None]).exp().masked_fill(hidden, 0.0)
        result[b, :, :seqlen_q, :seqlen_k] = torch.where(keep[b, :, :seqlen_q, :seqlen_k], p, -p)
    return result
