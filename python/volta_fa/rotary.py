"""Rotary position embeddings in plain PyTorch, with the interface of flash-attn's `flash_attn.layers.rotary`. Programs import
that name, which `volta_fa.install_flash_attn_shim()` provides, or this module.

A pair of dimensions (x0, x1) at position p becomes (x0 cos - x1 sin, x0 sin + x1 cos), with row p of cos and sin (RoFormer, arXiv
2104.09864). With `interleaved` dimensions 2 i and 2 i + 1 are a pair, else i and i + rotary_dim / 2. Dimensions from rotary_dim on stay the
same. Computes in float32, or in x's dtype if that is wider."""

from typing import Any, SupportsIndex

import torch
from torch import Tensor

from .errors import bad_argument, require_tensors
from .operands import reads_values  # whether a call checks a tensor's values: on a GPU not by default, because that synchronizes

__all__ = [
    "RotaryEmbedding", "apply_rotary", "apply_rotary_emb", "apply_rotary_emb_func", "apply_rotary_emb_kv_",
    "apply_rotary_emb_qkv_", "apply_rotary_emb_torch",
]  # fmt: skip


def apply_rotary(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    seqlen_offsets: int | Tensor = 0,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
    interleaved: bool = False,
    inplace: bool = False,
    conjugate: bool = False,
) -> Tensor:
    """Rotates x. Differentiable, unless `inplace`: then use `apply_rotary_emb`.

    Args:
        x: (batch, seqlen, nheads, headdim), or (total, nheads, headdim) with cu_seqlens. Of a floating-point dtype.
        cos, sin: (seqlen_rotary, rotary_dim / 2), with rotary_dim <= headdim.
        seqlen_offsets: the position of each sequence's first token: an int, 0 or more, or an int tensor (batch). With a tensor or
            cu_seqlens, tokens at positions outside the table stay the same.
        cu_seqlens: int32 or int64, (batch + 1), where each sequence begins, from 0, and where the last ends; rows after that stay the
            same. On the CPU, values that no sequences can have raise an error.
        max_seqlen: the longest sequence's length; required with cu_seqlens.
        conjugate: rotate backwards.

    Returns a tensor like x; with `inplace` x itself. Raises ValueError for wrong arguments.
    """
    _check_shapes(x, cos, sin, seqlen_offsets, cu_seqlens, max_seqlen)
    return _apply(x, cos, sin, seqlen_offsets, cu_seqlens, interleaved, inplace, conjugate)


def _apply(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    seqlen_offsets: int | Tensor,
    cu_seqlens: Tensor | None = None,
    interleaved: bool = False,
    inplace: bool = False,
    conjugate: bool = False,
) -> Tensor:
    """Computes `apply_rotary` of arguments that `_check_shapes` has checked."""
    cos, sin = _rows(x, cos, sin, seqlen_offsets, cu_seqlens)
    rotated = _rotated(x, cos, -sin if conjugate else sin, interleaved)
    rotary_dim = rotated.shape[-1]
    if inplace:
        x[..., :rotary_dim] = rotated
        return x
    return torch.cat((rotated.to(x.dtype), x[..., rotary_dim:]), dim=-1)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Returns the first rotary_dim dimensions of x, rotated. cos and sin broadcast to (..., rotary_dim / 2)."""
    pairs = x[..., : 2 * cos.shape[-1]].to(torch.promote_types(x.dtype, torch.float32))
    pairs = pairs.unflatten(-1, (-1, 2)) if interleaved else pairs.unflatten(-1, (2, -1)).transpose(-1, -2)
    x0, x1 = pairs.unbind(-1)
    return torch.stack((x0 * cos - x1 * sin, x0 * sin + x1 * cos), dim=-1 if interleaved else -2).flatten(-2)


def apply_rotary_emb_torch(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """Rotates x by tables that have a row for each token. Differentiable in x, cos and sin: flash-attn's reference.

    Args:
        x: (batch, seqlen, nheads, headdim), of a floating-point dtype.
        cos, sin: (seqlen, rotary_dim / 2) or (batch, seqlen, rotary_dim / 2), with rotary_dim <= headdim.

    Returns a tensor like x. Raises ValueError for wrong arguments.
    """
    _check_tables(x, cos, sin)
    if x.dim() != 4:
        raise bad_argument("x", f"shape {tuple(x.shape)}", "(batch, seqlen, nheads, headdim)")
    half, allowed = cos.shape[-1], (x.shape[1:2], x.shape[:2])
    if cos.shape[:-1] not in allowed or 2 * half > x.shape[-1]:
        expected = f"({x.shape[1]}, rotary_dim / 2) or ({x.shape[0]}, {x.shape[1]}, rotary_dim / 2) with rotary_dim <= {x.shape[-1]}"
        raise bad_argument("cos", f"shape {tuple(cos.shape)}", expected)
    if sin.shape != cos.shape:
        raise bad_argument("sin", f"shape {tuple(sin.shape)}", f"cos' shape {tuple(cos.shape)}")
    rotated = _rotated(x, cos.unsqueeze(-2), sin.unsqueeze(-2), interleaved)
    return torch.cat((rotated.to(x.dtype), x[..., 2 * half :]), dim=-1)


def _rows(x: Tensor, cos: Tensor, sin: Tensor, seqlen_offsets: int | Tensor, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
    """Returns the rows of cos and sin for every token, broadcast over heads."""
    if cu_seqlens is None:
        positions = torch.arange(x.shape[1], device=x.device)
        positions = positions + (seqlen_offsets[:, None] if isinstance(seqlen_offsets, Tensor) else seqlen_offsets)
    else:
        cu_seqlens = cu_seqlens.contiguous()
        tokens = torch.arange(x.shape[0], dtype=cu_seqlens.dtype, device=x.device)
        sequence = (torch.searchsorted(cu_seqlens, tokens, right=True) - 1).clamp(max=len(cu_seqlens) - 2)
        positions = tokens - cu_seqlens[sequence]
        positions = positions + (seqlen_offsets[sequence] if isinstance(seqlen_offsets, Tensor) else seqlen_offsets)
        positions = positions.where((tokens >= cu_seqlens[0]) & (tokens < cu_seqlens[-1]), -1)
    cos, sin = (t.to(torch.promote_types(x.dtype, torch.float32)) for t in (cos, sin))
    if isinstance(seqlen_offsets, Tensor) or cu_seqlens is not None:  # values are not read, so positions may lie outside the tables
        inside = ((positions >= 0) & (positions < cos.shape[0]))[..., None]
        positions = positions.clamp(0, cos.shape[0] - 1)
        cos, sin = torch.where(inside, cos[positions], 1.0), torch.where(inside, sin[positions], 0.0)
    else:
        cos, sin = cos[positions], sin[positions]
    return cos.unsqueeze(-2), sin.unsqueeze(-2)


def _check_shapes(
    x: Tensor, cos: Tensor, sin: Tensor, seqlen_offsets: int | Tensor, cu_seqlens: Tensor | None, max_seqlen: int | None
) -> None:
    """Raises ValueError for wrong arguments of `apply_rotary`."""
    _check_tables(x, cos, sin)
    rank, layout = (4, "(batch, seqlen, nheads, headdim)") if cu_seqlens is None else (3, "(total, nheads, headdim)")
    if x.dim() != rank:
        raise bad_argument("x", f"shape {tuple(x.shape)}", layout)
    if cos.dim() != 2 or 2 * cos.shape[1] > x.shape[-1]:
        raise bad_argument("cos", f"shape {tuple(cos.shape)}", f"(seqlen, rotary_dim / 2) with rotary_dim <= {x.shape[-1]}")
    if sin.shape != cos.shape:
        raise bad_argument("sin", f"shape {tuple(sin.shape)}", f"cos' shape {tuple(cos.shape)}")
    longest = x.shape[1] if cu_seqlens is None else max_seqlen
    if longest is None:
        raise bad_argument("max_seqlen", None, "the longest sequence's length: cu_seqlens is given")
    if cu_seqlens is not None:
        _check_cu_seqlens(cu_seqlens, x.shape[0])
    batch = x.shape[0] if cu_seqlens is None else len(cu_seqlens) - 1
    _check_offsets("seqlen_offsets", seqlen_offsets)
    if isinstance(seqlen_offsets, Tensor) and seqlen_offsets.shape != (batch,):
        raise bad_argument("seqlen_offsets", f"shape {tuple(seqlen_offsets.shape)}", f"({batch},)")
    needed = longest if isinstance(seqlen_offsets, Tensor) else longest + seqlen_offsets
    if cos.shape[0] < needed:
        raise bad_argument("cos", f"{cos.shape[0]} positions", f"at least {needed}")


def _check_cu_seqlens(cu_seqlens: Tensor, total: int) -> None:
    """Raises ValueError for wrong arguments of `apply_rotary`. Checks values only where `reads_values`. total: rows of x."""
    require_tensors(cu_seqlens=cu_seqlens)
    if cu_seqlens.dim() != 1 or len(cu_seqlens) == 0:
        raise bad_argument("cu_seqlens", f"shape {tuple(cu_seqlens.shape)}", "(batch + 1,)")
    if cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise bad_argument("cu_seqlens", f"dtype {cu_seqlens.dtype}", "torch.int32 or torch.int64")
    if not reads_values(cu_seqlens):
        return
    starts = cu_seqlens.tolist()
    if starts[0] != 0:
        raise bad_argument("cu_seqlens", f"{starts[0]} as its first value", 0)
    for entry, (start, end) in enumerate(zip(starts, starts[1:]), 1):
        if end < start:
            raise bad_argument("cu_seqlens", f"{end} after {start} (entry {entry})", "values that never descend")
    if starts[-1] > total:
        raise bad_argument("cu_seqlens", f"{starts[-1]} as its last value", f"at most {total}, the rows of x")


def _check_tables(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Raises ValueError for a missing tensor, for an x whose result would be truncated, and for tables that a conversion to float32
    would change."""
    require_tensors(x=x, cos=cos, sin=sin)
    if not x.is_floating_point():
        raise bad_argument("x", f"dtype {x.dtype}", "a floating-point dtype: convert x first")
    for name, t in (("cos", cos), ("sin", sin)):
        if not t.is_floating_point():
            raise bad_argument(name, f"dtype {t.dtype}", "a floating-point dtype: pass the real and imaginary part of a complex table")


def _check_offsets(name: str, offsets: int | Tensor) -> None:
    """Raises ValueError for positions, the argument `name`, that are not integers, and for a negative int."""
    if isinstance(offsets, Tensor):
        if offsets.is_floating_point() or offsets.is_complex() or offsets.dtype == torch.bool:
            raise bad_argument(name, f"dtype {offsets.dtype}", "torch.int32 or torch.int64")
    elif not isinstance(offsets, SupportsIndex) or offsets < 0:
        raise bad_argument(name, offsets, "an int, 0 or more, or an int tensor (batch)")


class _Rotate(torch.autograd.Function):
    """Rotates parts of x, each (index into x, cos, sin), in place or in a copy. The backward pass rotates backwards. As in flash-attn, x is
    not marked dirty, because autograd would then reject leaves and the views of unbind and chunk."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, parts: list[tuple[Any, Tensor, Tensor]], inplace: bool, options: dict[str, Any]) -> Tensor:
        ctx.parts, ctx.options = parts, options
        return _rotate_parts(x if inplace else x.clone(), parts, **options)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        return _rotate_parts(dout.clone(), ctx.parts, conjugate=True, **ctx.options), None, None, None


def _rotate(x: Tensor, parts: list[tuple[Any, Tensor, Tensor]], inplace: bool, options: dict[str, Any]) -> Tensor:
    """Returns x with parts of it rotated, in place or in a copy. Differentiable in x. Raises ValueError before it writes anything.
    `parts`: as in `_Rotate`. `options`: other arguments of `apply_rotary`, by name."""
    options = dict(options)
    max_seqlen = options.pop("max_seqlen", None)  # the checks alone need it
    for index, cos, sin in parts:
        _check_shapes(x[index], cos, sin, options["seqlen_offsets"], options.get("cu_seqlens"), max_seqlen)
    if not torch.compiler.is_compiling():
        return _Rotate.apply(x, parts, inplace, options)
    # torch.compile traces no autograd function whose sizes are symbolic: neither slices of them as arguments, nor sizes that a check
    # within it makes constant. In a compiled program the copy costs nothing: PyTorch fuses it.
    rotated = _rotate_parts(x.clone(), parts, **options)
    if inplace:
        with torch.no_grad():
            x.copy_(rotated)
    return rotated


def _rotate_parts(x: Tensor, parts: list[tuple[Any, Tensor, Tensor]], **options: Any) -> Tensor:
    """Rotates parts of x in place, and returns x. The arguments have been checked."""
    for index, cos, sin in parts:
        _apply(x[index], cos, sin, inplace=True, **options)
    return x


def apply_rotary_emb(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool = False,
    inplace: bool = False,
    seqlen_offsets: int | Tensor = 0,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
) -> Tensor:
    """Computes `apply_rotary`, differentiable in x also with `inplace`; cos and sin get no gradient."""
    require_tensors(x=x)
    options = {"interleaved": interleaved, "seqlen_offsets": seqlen_offsets, "cu_seqlens": cu_seqlens, "max_seqlen": max_seqlen}
    return _rotate(x, [(..., cos, sin)], inplace, options)


apply_rotary_emb_func = apply_rotary_emb  # its name before flash-attn 2.0


def apply_rotary_emb_qkv_(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    cos_k: Tensor | None = None,
    sin_k: Tensor | None = None,
    interleaved: bool = False,
    seqlen_offsets: int | Tensor = 0,
    num_heads_q: int | None = None,
) -> Tensor:
    """Rotates q and k inside qkv, in place. Differentiable in qkv.

    Args:
        qkv: (batch, seqlen, 3, nheads, headdim), or with num_heads_q (batch, seqlen, num_heads_q + 2 nheads_k, headdim).
        cos_k, sin_k: k's tables, if they differ from q's.
        seqlen_offsets: as in `apply_rotary`.

    Returns qkv. Raises ValueError for shapes that do not match.
    """
    require_tensors(qkv=qkv)
    q: tuple[slice | int, ...]
    k: tuple[slice | int, ...]
    if qkv.dim() == 5 and qkv.shape[2] == 3:
        q, k = (slice(None), slice(None), 0), (slice(None), slice(None), 1)
    elif qkv.dim() == 4 and num_heads_q is not None and qkv.shape[2] >= num_heads_q and (qkv.shape[2] - num_heads_q) % 2 == 0:
        end = num_heads_q + (qkv.shape[2] - num_heads_q) // 2
        q, k = (slice(None), slice(None), slice(num_heads_q)), (slice(None), slice(None), slice(num_heads_q, end))
    else:
        expected = "(batch, seqlen, 3, nheads, headdim), or (batch, seqlen, num_heads_q + 2 nheads_k, headdim)"
        raise bad_argument("qkv", f"shape {tuple(qkv.shape)} with num_heads_q={num_heads_q}", expected)
    parts = [(q, cos, sin), (k, cos if cos_k is None else cos_k, sin if sin_k is None else sin_k)]
    return _rotate(qkv, parts, inplace=True, options={"interleaved": interleaved, "seqlen_offsets": seqlen_offsets})


def apply_rotary_emb_kv_(kv: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False, seqlen_offsets: int | Tensor = 0) -> Tensor:
    """Rotates k inside kv, (batch, seqlen, 2, nheads_k, headdim), in place, and returns kv. Raises ValueError for
    shapes that do not match."""
    return _rotate(kv, [(_keys_of(kv), cos, sin)], inplace=True, options={"interleaved": interleaved, "seqlen_offsets": seqlen_offsets})


def _keys_of(kv: Tensor) -> tuple[slice | int, ...]:
    """Returns the index of k in kv, (batch, seqlen, 2, nheads_k, headdim). Raises ValueError for another shape."""
    require_tensors(kv=kv)
    if kv.dim() != 5 or kv.shape[2] != 2:
        raise bad_argument("kv", f"shape {tuple(kv.shape)}", "(batch, seqlen, 2, nheads_k, headdim)")
    return slice(None), slice(None), 0


#: gamma of xPos (arXiv 2212.10554): pair i has the base scale (2 i / dim + gamma) / (1 + gamma).
_XPOS_GAMMA = 0.4


class RotaryEmbedding(torch.nn.Module):
    """Rotary embeddings with tables that grow with the sequences.

    Args:
        dim: rotary_dim, even.
        base: pair i turns by base ** (-2 i / dim) radians from one position to the next.
        interleaved: which dimensions are pairs; see the module's docstring.
        scale_base: xPos (arXiv 2212.10554): q is also multiplied, and k divided, by powers that make scores decay with distance.
        device: device of the buffers.

    Raises ValueError for another dim.
    """

    inv_freq: Tensor  # (dim / 2): radians by which each pair turns from one position to the next
    scale: Tensor | None  # (dim / 2): the base of xPos' powers for each pair; None without xPos

    def __init__(
        self, dim: int, base: float = 10000.0, interleaved: bool = False, scale_base: float | None = None, device: Any = None
    ) -> None:
        super().__init__()
        if dim < 0 or dim % 2:
            raise bad_argument("dim", dim, "an even number, 0 or more: two dimensions are a pair")
        self.dim = dim
        self.base = float(base)
        self.interleaved = interleaved
        self.scale_base = scale_base
        self.register_buffer("inv_freq", self._compute_inv_freq(device), persistent=False)
        pair = torch.arange(0, dim, 2, device=device, dtype=torch.float32) / dim
        scale = None if scale_base is None else (pair + _XPOS_GAMMA) / (1 + _XPOS_GAMMA)
        self.register_buffer("scale", scale, persistent=False)
        # subclasses read these, such as transformers' ModernBERT
        self._seq_len_cached = 0
        self._cos_cached: Tensor | None = None
        self._sin_cached: Tensor | None = None
        self._cos_k_cached: Tensor | None = None
        self._sin_k_cached: Tensor | None = None

    def _compute_inv_freq(self, device: Any = None) -> Tensor:
        return 1.0 / self.base ** (torch.arange(0, self.dim, 2, device=device, dtype=torch.float32) / self.dim)

    def _update_cos_sin_cache(self, seqlen: int, device: Any = None, dtype: torch.dtype | None = None) -> None:
        """Computes the tables for positions below seqlen, unless there are such tables."""
        cached = self._cos_cached
        if cached is not None and seqlen <= self._seq_len_cached and (cached.device, cached.dtype) == (device, dtype):
            return
        # not inference tensors, which autograd could not save if training follows
        with torch.inference_mode(False), torch.no_grad():
            self._make_tables(seqlen, device, dtype)

    def _make_tables(self, seqlen: int, device: Any, dtype: torch.dtype | None) -> None:
        """Computes cos and sin of positions below seqlen; with xPos also scaled, for q and for k."""
        # all in float32: half precision cannot represent all positions above 2048, and a cast of the module rounds inv_freq
        inv_freq = self.inv_freq if self.inv_freq.dtype == torch.float32 else self._compute_inv_freq()
        positions = torch.arange(seqlen, device=device, dtype=torch.float32)
        angles = positions[:, None] * inv_freq.to(device)
        cos, sin = angles.cos(), angles.sin()
        self._seq_len_cached = seqlen
        if self.scale is None or self.scale_base is None:
            self._cos_cached, self._sin_cached = cos.to(dtype), sin.to(dtype)
            return
        # xPos: powers count from the middle position, so that those of both ends stay near 1
        power = self.scale.to(device, torch.float32) ** ((positions - seqlen // 2) / self.scale_base)[:, None]
        self._cos_cached, self._sin_cached = (cos * power).to(dtype), (sin * power).to(dtype)
        self._cos_k_cached, self._sin_k_cached = (cos / power).to(dtype), (sin / power).to(dtype)

    def forward(
        self,
        qkv: Tensor,
        kv: Tensor | None = None,
        seqlen_offset: int | Tensor = 0,
        max_seqlen: int | None = None,
        num_heads_q: int | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Rotates q and k in place.

        Args:
            qkv: as in `apply_rotary_emb_qkv_`; if kv is given, q alone, (batch, seqlen, nheads, headdim).
            kv: (batch, seqlen, 2, nheads_k, headdim).
            seqlen_offset: the first token's position: an int, 0 or more, or an int tensor (batch). A tensor, whose values are not read
                here, does not make the tables grow: without max_seqlen they stay as before, as in flash-attn, and do not rotate tokens
                past their end.
            max_seqlen: minimum number of positions in the tables. Required with a tensor in the first call.

        Returns qkv, or (q, kv). Raises ValueError for wrong arguments.
        """
        _check_offsets("seqlen_offset", seqlen_offset)
        if max_seqlen is not None:
            self._update_cos_sin_cache(max_seqlen, qkv.device, qkv.dtype)
        elif isinstance(seqlen_offset, int):
            self._update_cos_sin_cache(qkv.shape[1] + seqlen_offset, qkv.device, qkv.dtype)
        cos, sin, cos_k, sin_k = self._cos_cached, self._sin_cached, self._cos_k_cached, self._sin_k_cached
        if cos is None or sin is None:
            raise bad_argument("max_seqlen", None, "the number of positions: seqlen_offset is a tensor")
        options: dict[str, Any] = {"interleaved": self.interleaved, "seqlen_offsets": seqlen_offset}
        if kv is None:
            return apply_rotary_emb_qkv_(qkv, cos, sin, cos_k, sin_k, num_heads_q=num_heads_q, **options)
        if cos_k is None or sin_k is None:
            cos_k, sin_k = cos, sin
        # before q is written
        _check_shapes(kv[_keys_of(kv)], cos_k, sin_k, seqlen_offset, None, None)
        return apply_rotary_emb(qkv, cos, sin, inplace=True, **options), apply_rotary_emb_kv_(kv, cos_k, sin_k, **options)
