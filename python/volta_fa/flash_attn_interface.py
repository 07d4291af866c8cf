"""flash-attn 2's functions on `torch.ops.volta_fa.fwd`: the same signatures, defaults and results.

Masks are aligned bottom-right, a query that sees no key gets out 0 and softmax_lse +inf, and gradients come from
autograd. docs/flash-attn.md says where these functions do more or less than flash-attn's.
"""

from __future__ import annotations

import operator
import os
from typing import Any

import torch
from torch import Tensor

from .rotary import apply_rotary

__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
]

_MAX_HEADDIM = 256
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
) -> Tensor | tuple[Tensor, Tensor, Tensor]:
    """Attention of a batch of sequences of one length.

    Args:
        q: (batch, seqlen_q, nheads, headdim), in float16 or bfloat16; on the CPU also float32 and float64. headdim is at
            most 256; what is not a multiple of 8 costs a copy.
        k: (batch, seqlen_k, nheads_k, headdim), where nheads_k divides nheads.
        v: (batch, seqlen_k, nheads_k, headdim_v).
        dropout_p: probability of dropping an element of softmax's result, in [0, 1).
        softmax_scale: headdim ** -0.5 unless given.
        causal: query i sees the keys j <= i + seqlen_k - seqlen_q.
        window_size: (left, right): query i sees the keys from i + seqlen_k - seqlen_q - left to
            i + seqlen_k - seqlen_q + right; a negative number is no limit. Tensors of one element are taken too.
        softcap: scores x become softcap * tanh(x / softcap); 0 is off. Not together with dropout.
        alibi_slopes: float32, (nheads) or (batch, nheads): slope * |i + seqlen_k - seqlen_q - j| is subtracted from
            the scores.
        deterministic: gradients equal to the bit, run to run.
        return_attn_probs: for tests, see below.

    Returns out, (batch, seqlen_q, nheads, headdim_v) in q's dtype; with return_attn_probs=True out, softmax_lse
    (float32, (batch, nheads, seqlen_q)) and S_dmask. S_dmask is empty without dropout. With dropout it has softmax's
    result, (batch, nheads, seqlen_q, seqlen_k) in q's dtype, negative where it was dropped; that takes the memory
    that the kernels do without.

    Raises ValueError, naming the argument, for wrong ones, and NotImplementedError for what this build lacks.
    """
    return _attention(q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs)


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
    """`flash_attn_func` of k and v in one tensor, whose gradient is one tensor too.

    Args:
        kv: (batch, seqlen_k, 2, nheads_k, headdim).
    """
    k, v = _unbind("kv", kv, "batch, seqlen_k", 2)
    return _attention(q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs)


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
    """`flash_attn_func` of q, k and v in one tensor, whose gradient is one tensor too.

    Args:
        qkv: (batch, seqlen, 3, nheads, headdim).
    """
    q, k, v = _unbind("qkv", qkv, "batch, seqlen", 3)
    return _attention(q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs)


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
) -> Tensor | tuple[Tensor, Tensor, Tensor]:
    """Attention of sequences of different lengths, packed one after the other.

    Args:
        q: (total_q, nheads, headdim), k: (total_k, nheads_k, headdim), v: (total_k, nheads_k, headdim_v).
        cu_seqlens_q, cu_seqlens_k: int32, (batch + 1), on q's device: where each sequence begins, from 0, and at the end
            total_q and total_k. Sequences may be empty.
        max_seqlen_q, max_seqlen_k: at least the longest sequence's length. Tensors of one element are taken too.
        block_table: not implemented: a paged k and v.

    The other arguments are `flash_attn_func`'s; what they say of positions, and of a batch, is meant for each sequence.

    Returns out, (total_q, nheads, headdim_v); with return_attn_probs=True out, softmax_lse (float32,
    (nheads, total_q)) and S_dmask ((batch, nheads, max_seqlen_q, max_seqlen_k), 0 outside of the sequences).
    """
    if block_table is not None:
        raise NotImplementedError("volta_fa: block_table: paged keys and values are not implemented; pass contiguous k and v")
    return _attention(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs,
        (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k),
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
    """`flash_attn_varlen_func` of k and v in one tensor, whose gradient is one tensor too.

    Args:
        kv: (total_k, 2, nheads_k, headdim).
    """
    k, v = _unbind("kv", kv, "total_k", 2)
    return _attention(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs,
        (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k),
    )  # fmt: skip


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
    """`flash_attn_varlen_func` of q, k and v in one tensor, whose gradient is one tensor too.

    Args:
        qkv: (total, 3, nheads, headdim).
    """
    q, k, v = _unbind("qkv", qkv, "total", 3)
    return _attention(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs,
        (cu_seqlens, cu_seqlens, max_seqlen, max_seqlen),
    )  # fmt: skip


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
) -> Tensor | tuple[Tensor, Tensor]:
    """Inference with a cache of keys and values, to which k and v are appended first, in place. No gradients.

    Args:
        q: (batch, seqlen_q, nheads, headdim).
        k_cache, v_cache: (batch_cache, seqlen_cache, nheads_k, headdim).
        k, v: (batch, seqlen_new, nheads_k, headdim), written behind the cache_seqlens keys that are there; both or neither.
        rotary_cos, rotary_sin: (seqlen_rotary, rotary_dim / 2): k is rotated by its positions from cache_seqlens on, q
            likewise where causal or a window orders the queries; else all of q by position cache_seqlens.
        cache_seqlens: int, or int32 (batch): how many keys each entry has, the ones before cache_leftpad included, and what
            is appended must fit behind them; without it, all seqlen_cache.
        cache_batch_idx: int32 (batch): the cache's entry of each entry of q; reading it costs a copy of these entries.
        cache_leftpad: int32 (batch): so many keys at the cache's beginning do not exist.
        block_table: not implemented: a paged cache.
        rotary_interleaved: rotate dimensions 0 and 1, 2 and 3 ..., instead of the first half and the second.
        num_splits: without effect.

    The other arguments are `flash_attn_func`'s, for the keys that exist.

    Returns out, (batch, seqlen_q, nheads, headdim), and with return_softmax_lse=True also softmax_lse (float32,
    (batch, nheads, seqlen_q)). Raises ValueError, naming the argument, for wrong ones. The values of a cache_seqlens or
    cache_batch_idx that is on a GPU are checked with VOLTA_FA_CHECK_LENGTHS=1 only, since that means waiting. Unchecked,
    an entry that does not fit gets NaN, in out, in softmax_lse, and in its cache where k and v should have gone (of a
    cache_batch_idx that does not exist, in the cache's first or last entry).
    """
    if block_table is not None:
        raise NotImplementedError("volta_fa: block_table: paged caches are not implemented; pass contiguous k_cache and v_cache")
    _check_headdims({"q": q, "k_cache": k_cache, "v_cache": v_cache})
    options = _options(softmax_scale, causal, window_size, softcap, alibi_slopes)
    _check_cache(q, k_cache, v_cache, k, v, rotary_cos, rotary_sin, cache_seqlens, cache_batch_idx, cache_leftpad)
    batch, appended = q.shape[0], 0 if k is None else k.shape[1]
    if isinstance(cache_seqlens, int):
        cache_seqlens = torch.full((batch,), cache_seqlens, dtype=torch.int32, device=q.device)
    fits = _fits(cache_seqlens, cache_batch_idx, appended, k_cache)
    if fits is not None and cache_batch_idx is not None:
        cache_batch_idx = cache_batch_idx.clamp(0, k_cache.shape[0] - 1)
    if k is not None:
        assert v is not None and isinstance(cache_seqlens, Tensor)
        if rotary_cos is not None:
            assert rotary_sin is not None
            offsets = cache_seqlens if fits is None else cache_seqlens.clamp(min=0)
            tables: dict[str, Any] = {"cos": rotary_cos, "sin": rotary_sin, "seqlen_offsets": offsets, "interleaved": rotary_interleaved}
            k = apply_rotary(k, **tables)
            if causal or options["window_left"] >= 0 or options["window_right"] >= 0:
                q = apply_rotary(q, **tables)
            else:
                q = apply_rotary(q.flatten(1, 2)[:, None], **tables).view_as(q)
        entries = torch.arange(batch, device=q.device) if cache_batch_idx is None else cache_batch_idx
        positions = cache_seqlens[:, None] + torch.arange(appended, device=q.device)
        if fits is not None:
            positions = positions.clamp(0, k_cache.shape[1] - 1)
            k, v = (t.masked_fill(~fits[:, None, None, None], float("nan")) for t in (k, v))
        k_cache[entries[:, None], positions] = k
        v_cache[entries[:, None], positions] = v
        cache_seqlens = cache_seqlens + appended
    if fits is not None:
        # a length that the op makes NaN of
        used = k_cache.shape[1] if cache_seqlens is None else cache_seqlens
        cache_seqlens = torch.where(fits, used, -1).to(torch.int32)
    if cache_batch_idx is not None:
        k_cache, v_cache = k_cache[cache_batch_idx], v_cache[cache_batch_idx]
    attn_bias = None
    if cache_leftpad is not None:
        exists = torch.arange(k_cache.shape[1], device=q.device) >= cache_leftpad[:, None]
        attn_bias = exists[:, None, None, :]
    out, softmax_lse, _ = _fwd(q, k_cache, v_cache, seqused_k=cache_seqlens, attn_bias=attn_bias, **options)
    return (out, softmax_lse) if return_softmax_lse else out


def _check_cache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    rotary_cos: Tensor | None,
    rotary_sin: Tensor | None,
    cache_seqlens: int | Tensor | None,
    cache_batch_idx: Tensor | None,
    cache_leftpad: Tensor | None,
) -> None:
    """Refuses what would change the cache before the op refuses it, and what is not an argument of the op."""
    batch, (entries, seqlen_cache) = q.shape[0], k_cache.shape[:2]
    if v_cache.shape[:3] != k_cache.shape[:3]:
        raise _wrong("v_cache", f"shape {tuple(v_cache.shape)}", f"{(*k_cache.shape[:3], 'headdim')}, as k_cache")
    if cache_batch_idx is None and entries != batch:
        raise _wrong("k_cache", f"batch {entries}", f"batch {batch}, that of q, or cache_batch_idx, which says whose it is")
    for name, t, dtypes in (
        ("cache_seqlens", cache_seqlens, (torch.int32,)),
        ("cache_batch_idx", cache_batch_idx, (torch.int32, torch.int64)),
        ("cache_leftpad", cache_leftpad, _INTEGERS),
    ):
        if isinstance(t, Tensor):
            if t.dtype not in dtypes:
                raise _wrong(name, f"dtype {t.dtype}", " or ".join(map(str, dtypes)))
            if t.shape != (batch,):
                raise _wrong(name, f"shape {tuple(t.shape)}", f"shape (batch,), here ({batch},)")
            if t.device != q.device:
                raise _wrong(name, f"device {t.device}", f"device {q.device}, that of q")
    if k is None:
        for name, t in (("v", v), ("rotary_cos", rotary_cos), ("rotary_sin", rotary_sin)):
            if t is not None:
                raise _wrong(name, "a tensor", "None: k is not given")
    else:
        if v is None:
            raise _wrong("v", "None", "a value: k is given")
        if cache_seqlens is None:
            raise _wrong("cache_seqlens", "None", "a value: k is given")
        if (rotary_cos is None) != (rotary_sin is None):
            missing, there = ("rotary_cos", "rotary_sin") if rotary_cos is None else ("rotary_sin", "rotary_cos")
            raise _wrong(missing, "None", f"a tensor: {there} is given")
        for name, t, cache in (("k", k, k_cache), ("v", v, v_cache)):
            # seqlen_new is k's, and what is written must be as the cache is
            expected = (batch, k.shape[1] if k.dim() == 4 else "seqlen_new", *cache.shape[2:])
            if tuple(t.shape) != expected:
                raise _wrong(name, f"shape {tuple(t.shape)}", f"{expected}: (batch, seqlen_new, nheads_k, headdim), as k and {name}_cache")
            if (t.dtype, t.device) != (cache.dtype, cache.device):
                raise _wrong(name, f"{t.dtype} on {t.device}", f"{cache.dtype} on {cache.device}, as {name}_cache")

    appended = 0 if k is None else k.shape[1]
    # an int's value is there to be seen; so is that of a tensor on the CPU
    for name, values, least, most, why in (
        ("cache_seqlens", cache_seqlens, 0, seqlen_cache - appended, f"k_cache has {seqlen_cache} rows, and k {appended}"),
        ("cache_batch_idx", cache_batch_idx, 0, entries - 1, f"k_cache has {entries} entries"),
    ):
        if isinstance(values, Tensor):
            numbers = values.tolist() if _values_are_read(values) else []
        else:
            numbers = [] if values is None else [values]
        for i, n in enumerate(numbers):
            if not least <= n <= most:
                where = f" (entry {i})" if len(numbers) > 1 else ""
                raise _wrong(name, f"{n}{where}", f"a number from {least} to {most}: {why}")


def _values_are_read(t: Tensor) -> bool:
    """As the op does it for lengths: on a GPU that means waiting for it."""
    return not torch.compiler.is_compiling() and (not t.is_cuda or os.environ.get("VOLTA_FA_CHECK_LENGTHS") == "1")


def _fits(cache_seqlens: Tensor | None, cache_batch_idx: Tensor | None, appended: int, k_cache: Tensor) -> Tensor | None:
    """(batch) bool, where nobody has read the values: which entries exist and have room. None if all do."""
    checks = []
    if appended and cache_seqlens is not None and not _values_are_read(cache_seqlens):
        checks.append((cache_seqlens >= 0) & (cache_seqlens <= k_cache.shape[1] - appended))
    if cache_batch_idx is not None and not _values_are_read(cache_batch_idx):
        checks.append((cache_batch_idx >= 0) & (cache_batch_idx < k_cache.shape[0]))
    return checks[0] & checks[-1] if checks else None


def _attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size: tuple[int, int],
    softcap: float,
    alibi_slopes: Tensor | None,
    deterministic: bool,
    return_attn_probs: bool,
    packed: tuple[Tensor, Tensor, int, int] | None = None,
) -> Tensor | tuple[Tensor, Tensor, Tensor]:
    """What all functions for training share; packed: cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k."""
    options = _options(softmax_scale, causal, window_size, softcap, alibi_slopes)
    options |= {"dropout_p": dropout_p, "deterministic": deterministic}
    if packed is not None:
        options |= zip(("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"), packed)
    out, softmax_lse, rng_state = _fwd(q, k, v, **options)
    if not return_attn_probs:
        return out
    return out, softmax_lse, _s_dmask(q, k, softmax_lse, rng_state, **options) if dropout_p > 0 else q.new_empty(0)


def _options(
    softmax_scale: float | None,
    causal: bool,
    window_size: tuple[int, int],
    softcap: float,
    alibi_slopes: Tensor | None,
) -> dict[str, Any]:
    """The op's names for what every function has."""
    left, right = _window(window_size)
    return {
        "softmax_scale": softmax_scale,
        "is_causal": causal,
        "window_left": left,
        "window_right": -1 if causal else right,  # flash-attn lets causal win; the op refuses to choose
        "softcap": softcap,
        "alibi_slopes": alibi_slopes,
    }


def _fwd(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, Tensor, Tensor]:
    """The op, for any strides."""
    return torch.ops.volta_fa.fwd(_operand(q), _operand(k), _operand(v), **options)


def _check_headdims(operands: dict[str, Tensor]) -> None:
    """The op's own rules, under the names that the arguments have here."""
    layout = ("batch", "seqlen", "nheads", "headdim")
    for name, t in operands.items():
        if t.dim() != len(layout):
            expected = f"rank {len(layout)}, ({', '.join(layout)})"
            raise _wrong(name, f"a tensor of rank {t.dim()} with shape {tuple(t.shape)}", expected)
        if not 1 <= t.shape[-1] <= _MAX_HEADDIM:
            raise _wrong(name, f"headdim {t.shape[-1]}", f"a headdim from 1 to {_MAX_HEADDIM}")
    q, k, _ = operands.values()
    if k.shape[-1] != q.shape[-1]:
        _, name, _ = operands
        raise _wrong(name, f"headdim {k.shape[-1]}", f"headdim {q.shape[-1]}, that of q")


def _wrong(name: str, got: str, expected: str) -> ValueError:
    return ValueError(f"volta_fa: {name}: got {got}, expected {expected}")


def _operand(t: Tensor) -> Tensor:
    return t if t.dim() == 0 or t.stride(-1) == 1 else t.contiguous()


def _unbind(name: str, packed: Tensor, leading: str, count: int) -> tuple[Tensor, ...]:
    """The tensors in dimension -3. Unbinding them at once makes their gradient one stack; a slice for each would fill
    and add as many tensors of the whole size."""
    expected = (*leading.split(", "), str(count), "nheads" if count == 3 else "nheads_k", "headdim")
    if packed.dim() != len(expected) or packed.shape[-3] != count:
        raise _wrong(name, f"shape {tuple(packed.shape)}", f"({', '.join(expected)})")
    return packed.unbind(-3)


def _window(window_size: Any) -> tuple[int | torch.SymInt | Tensor, int | torch.SymInt | Tensor]:
    """window_left and window_right. flash-attn takes any negative number as no limit, the op -1."""
    pair = isinstance(window_size, (tuple, list)) or (isinstance(window_size, Tensor) and window_size.dim() == 1)
    if not pair or len(window_size) != 2 or not all(map(_is_integer, window_size)):
        raise _wrong("window_size", repr(window_size), "(left, right), two integers or integer tensors of one element")
    left, right = (bound if isinstance(bound, (Tensor, torch.SymInt)) else operator.index(bound) for bound in window_size)
    return max(-1, left), max(-1, right)


def _is_integer(bound: Any) -> bool:
    if isinstance(bound, Tensor):
        return bound.numel() == 1 and bound.dtype in _INTEGERS
    return isinstance(bound, torch.SymInt) or hasattr(bound, "__index__")


@torch.no_grad()
def _s_dmask(
    q: Tensor,
    k: Tensor,
    softmax_lse: Tensor,
    rng_state: Tensor,
    *,
    dropout_p: float,
    softmax_scale: float | None,
    is_causal: bool,
    window_left: int,
    window_right: int,
    alibi_slopes: Tensor | None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int = 0,
    max_seqlen_k: int = 0,
    **_: Any,
) -> Tensor:
    """softmax's result, negative where dropped. softcap is not among the options here: it excludes dropout."""
    nheads, nheads_k = q.shape[-2], k.shape[-2]
    if softmax_scale is None:
        softmax_scale = q.shape[-1] ** -0.5
    if cu_seqlens_q is None or cu_seqlens_k is None:
        batch, max_seqlen_q, max_seqlen_k = q.shape[0], q.shape[1], k.shape[1]
        sequences = zip(q, k, softmax_lse)
    else:
        batch = len(cu_seqlens_q) - 1
        lengths_q, lengths_k = cu_seqlens_q.diff().tolist(), cu_seqlens_k.diff().tolist()
        sequences = zip(q.split(lengths_q), k.split(lengths_k), softmax_lse.split(lengths_q, dim=-1))
    keep = torch.ops.volta_fa._dropout_mask(rng_state, batch, nheads, max_seqlen_q, max_seqlen_k, dropout_p)
    result = q.new_zeros(keep.shape)
    wide = torch.promote_types(q.dtype, torch.float32)
    for b, (q_b, k_b, lse_b) in enumerate(sequences):
        seqlen_q, seqlen_k = len(q_b), len(k_b)
        scores = torch.einsum("ihd,jhd->hij", q_b.to(wide), k_b.to(wide).repeat_interleave(nheads // nheads_k, dim=1)) * softmax_scale
        i = torch.arange(seqlen_q, device=q.device)[:, None] + seqlen_k - seqlen_q
        ahead = torch.arange(seqlen_k, device=q.device) - i
        if alibi_slopes is not None:
            scores -= alibi_slopes.to(wide).expand(batch, nheads)[b, :, None, None] * ahead.abs()
        hidden = torch.zeros_like(ahead, dtype=torch.bool)
        if window_left >= 0:
            hidden |= ahead < -window_left
        if is_causal or window_right >= 0:
            hidden |= ahead > (0 if is_causal else window_right)
        p = (scores - lse_b[..., None]).exp().masked_fill(hidden, 0.0)
        result[b, :, :seqlen_q, :seqlen_k] = torch.where(keep[b, :, :seqlen_q, :seqlen_k], p, -p)
    return result
