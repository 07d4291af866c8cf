"""flash-attn 2.8's private functions, which ring attention, diffusers and others import from `flash_attn.flash_attn_interface` (shim/).

Autograd does not record them: a backward function writes gradients into given tensors. They have flash-attn's argument names and defaults,
because programs read these with `inspect`. Signatures are those of 2.8.3, with `num_splits` of later releases.
docs/guides/flash-attn.md lists the differences from flash-attn.
All raise ValueError for wrong arguments, and NotImplementedError for what this build does not support."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from ...errors import bad_argument, require_none, require_tensors

# `in_range` returns which values are possible, and raises for the others where values are read. `with_unit_stride` copies a tensor unless
# its last dimension is contiguous.
from ...operands import in_range, with_unit_stride

# _fwd: `volta_fa::fwd` of any strides; _paged: `fwd_kvcache` of pages. _lengths, _options: arguments of these operators by name.
# _s_dmask: S_dmask in plain PyTorch.
from .interface import _fwd, _lengths, _options, _paged, _s_dmask

__all__ = [
    "_flash_attn_backward", "_flash_attn_forward", "_flash_attn_varlen_backward", "_flash_attn_varlen_forward",
    "_wrapped_flash_attn_backward", "_wrapped_flash_attn_forward", "_wrapped_flash_attn_varlen_backward",
    "_wrapped_flash_attn_varlen_forward",
]  # fmt: skip

#: A smaller dropout_p counts as 0 (`_effective`). The kernels round it to a multiple of 2**-15, and so drop nothing below 2**-16.
#: diffusers passes 1e-30 to get a softmax_lse.
_MIN_DROPOUT = 2**-17


def _flash_attn_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    return_softmax: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Computes attention of a batch of sequences of one length.

    Args:
        q: (batch, seqlen_q, nheads, headdim), k: (batch, seqlen_k, nheads_k, headdim), v: (batch, seqlen_k, nheads_k, headdim_v), of
            `flash_attn_func`'s dtypes.
        window_size_left, window_size_right: the elements of `flash_attn_func`'s window_size.
        return_softmax: also compute S_dmask, the probabilities with a minus where dropout drops them, for tests. Only with dropout.

    The other arguments are `flash_attn_func`'s.

    Returns out, (batch, seqlen_q, nheads, headdim_v) in q's dtype; softmax_lse, float32, (batch, nheads, seqlen_q); S_dmask, that of
    `flash_attn_func`, empty without return_softmax; rng_state, int64, two numbers for `_flash_attn_backward`, empty without dropout.
    """
    require_tensors(q=q, k=k, v=v)
    options = _options(softmax_scale, causal, (window_size_left, window_size_right), softcap, alibi_slopes)
    return _forward(q, k, v, dropout_p, return_softmax, options)


def _flash_attn_varlen_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    return_softmax: bool = False,
    block_table: Tensor | None = None,
    leftpad_k: Tensor | None = None,
    seqused_k: Tensor | None = None,
    zero_tensors: bool = False,
    num_splits: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Computes attention of sequences of different lengths, packed one after the other.

    Args:
        q: (total_q, nheads, headdim), k: (total_k, nheads_k, headdim), v: (total_k, nheads_k, headdim_v).
        block_table: int32, (batch, max_pages): k and v are pages, as for `flash_attn_varlen_func`.
        leftpad_k: int32, (batch): number of keys at the beginning of each sequence that are padding. Costs a copy of k and v. Not
            together with block_table.
        seqused_k: int32, (batch): number of valid keys of each sequence, those of leftpad_k included.
        zero_tensors: no effect. cu_seqlens_q covers all rows of q, so no row of out keeps an old value.
        num_splits: 0 or 1, the number of parts into which the keys of a block_table are split; 0 lets the scheduler decide.

    The other arguments are `flash_attn_varlen_func`'s and `_flash_attn_forward`'s. Positions count within each sequence, after padding.

    Returns what `_flash_attn_forward` returns, with out (total_q, nheads, headdim_v) and softmax_lse (nheads, total_q).
    """
    require_tensors(q=q, k=k, v=v, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
    options = _options(softmax_scale, causal, (window_size_left, window_size_right), softcap, alibi_slopes)
    options |= _lengths(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    if return_softmax and (leftpad_k is not None or seqused_k is not None):
        raise bad_argument("return_softmax", True, "False with leftpad_k or seqused_k", error=NotImplementedError)
    if block_table is not None:
        require_none("None with block_table", leftpad_k=leftpad_k)
        if num_splits > 1:
            message = "volta_fa: num_splits > 1 is not supported with block_table, as in flash-attn: got {}, expected 0 or 1"
            raise NotImplementedError(message.format(num_splits))
        _check_return_softmax(return_softmax, dropout_p)
        with torch.no_grad(), _no_autocast(q):
            options |= {"seqused_k": with_unit_stride(seqused_k)}
            out, softmax_lse = _paged(q, k, v, _effective(dropout_p), block_table, options, num_splits)
        return out, softmax_lse, q.new_empty(0), torch.empty(0, dtype=torch.int64, device=q.device)
    if leftpad_k is not None:
        k, v, seqused_k = _without_padding(k, v, options["cu_seqlens_k"], leftpad_k, seqused_k)
    return _forward(q, k, v, dropout_p, return_softmax, options | {"seqused_k": with_unit_stride(seqused_k)})


def _flash_attn_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor | None,
    dk: Tensor | None,
    dv: Tensor | None,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    deterministic: bool,
    rng_state: Tensor | None = None,
) -> Tensor:
    """Computes the gradients of `_flash_attn_forward` into dq, dk and dv.

    Args:
        dout: the gradient of out, with out's shape and dtype.
        out, softmax_lse: what the forward returned.
        dq, dk, dv: tensors of the shapes and dtypes of q, k and v, of any strides, which the call overwrites. None leaves a gradient out.
        rng_state: what the forward returned. Required with dropout.

    The other arguments are the forward's.

    Returns softmax_d, float32, (batch, nheads, seqlen_q): the sum of dout * out over the headdim.
    """
    options = _options(softmax_scale, causal, (window_size_left, window_size_right), softcap, alibi_slopes)
    return _backward(dout, q, k, v, out, softmax_lse, (dq, dk, dv), dropout_p, deterministic, rng_state, options)[-1]


def _flash_attn_varlen_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor | None,
    dk: Tensor | None,
    dv: Tensor | None,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    deterministic: bool,
    rng_state: Tensor | None = None,
    zero_tensors: bool = False,
) -> Tensor:
    """Computes the gradients of `_flash_attn_varlen_forward` into dq, dk and dv.

    Args:
        zero_tensors: no effect, as in the forward.

    The other arguments are `_flash_attn_backward`'s and the forward's.

    Returns softmax_d, float32, (nheads, total_q).
    """
    options = _options(softmax_scale, causal, (window_size_left, window_size_right), softcap, alibi_slopes)
    options |= _lengths(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    return _backward(dout, q, k, v, out, softmax_lse, (dq, dk, dv), dropout_p, deterministic, rng_state, options)[-1]


# flash-attn wraps the four as custom operators for torch.compile. Here torch.compile traces the plain functions to volta_fa's operators.
_wrapped_flash_attn_forward = _flash_attn_forward
_wrapped_flash_attn_varlen_forward = _flash_attn_varlen_forward
_wrapped_flash_attn_backward = _flash_attn_backward
_wrapped_flash_attn_varlen_backward = _flash_attn_varlen_backward


@torch.no_grad()
def _forward(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float, return_softmax: bool, options: dict[str, Any]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Computes both forward functions, without pages. options: arguments of `volta_fa::fwd`, without dropout_p."""
    _check_return_softmax(return_softmax, dropout_p)
    options = options | {"dropout_p": _effective(dropout_p)}
    with _no_autocast(q):
        out, softmax_lse, rng_state = _fwd(q, k, v, **options)
    s_dmask = _s_dmask(q, k, softmax_lse, rng_state, options) if return_softmax and rng_state.numel() else q.new_empty(0)
    return out, softmax_lse, s_dmask, rng_state


@torch.no_grad()
def _backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    gradients: tuple[Tensor | None, Tensor | None, Tensor | None],
    dropout_p: float,
    deterministic: bool,
    rng_state: Tensor | None,
    options: dict[str, Any],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Computes both backward functions. options: arguments of `volta_fa::bwd` that the forward had too. Returns dq, dk and dv, which are
    the tensors in `gradients` where given, and softmax_d."""
    require_tensors(dout=dout, q=q, k=k, v=v, out=out, softmax_lse=softmax_lse)
    for name, given, like in zip(("dq", "dk", "dv"), gradients, (q, k, v)):
        if given is not None:
            _check_target(name, given, like.shape, like.dtype, like.device, f"as {name[1:]}, or None")
    dropout_p = _effective(dropout_p)
    if dropout_p == 0.0:
        rng_state = None
    elif rng_state is None:
        raise bad_argument("rng_state", "None", "what the forward call returned: dropout_p is not 0")
    with _no_autocast(q):
        options = options | {"rng_state": rng_state, "dropout_p": dropout_p, "deterministic": deterministic}
        computed = torch.ops.volta_fa.bwd(*map(with_unit_stride, (dout, q, k, v, out)), softmax_lse.contiguous(), **options)
    # in float32, because products of float16 overflow; in place, so that there is one such copy
    softmax_d = dout.to(torch.promote_types(dout.dtype, torch.float32), copy=True).mul_(out).sum(-1)
    dq, dk, dv = (new if given is None else given.copy_(new) for given, new in zip(gradients, computed))
    return dq, dk, dv, softmax_d.transpose(-1, -2).float().contiguous()


def _no_autocast(q: Tensor) -> AbstractContextManager[Any]:
    """Returns a context without autocast: as in flash-attn, results have the dtypes of the inputs."""
    if q.is_meta:  # torch has no autocast for meta tensors
        return nullcontext()
    return torch.autocast(q.device.type, enabled=False)


def _check_target(name: str, t: Tensor, shape: Sequence[int], dtype: torch.dtype, device: torch.device, remark: str) -> None:
    """Raises ValueError unless a call can write a result of that shape, dtype and device into t. `remark` ends the message."""
    if t.shape != torch.Size(shape) or t.dtype != dtype or t.device != device:
        raise bad_argument(name, _describe(t), f"shape {tuple(shape)} of dtype {dtype} on {device}, {remark}")
    if any(n > 1 and stride == 0 for n, stride in zip(t.shape, t.stride())):
        raise bad_argument(name, f"an expanded tensor of strides {t.stride()}", "elements of their own")


def _effective(dropout_p: float) -> float:
    """Returns 0 for a dropout_p below _MIN_DROPOUT, which drops nothing: kernels without dropout are faster."""
    return 0.0 if 0.0 <= dropout_p < _MIN_DROPOUT else dropout_p


def _check_return_softmax(return_softmax: bool, dropout_p: float) -> None:
    if return_softmax and not dropout_p > 0.0:
        raise bad_argument("return_softmax", True, "False without dropout: there is no S_dmask")


def _without_padding(
    k: Tensor, v: Tensor, cu_seqlens_k: Tensor, leftpad_k: Tensor, seqused_k: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns k and v with each sequence rotated so that its leftpad_k rows of padding come last, and seqused_k, the numbers of its keys
    without padding."""
    lengths = cu_seqlens_k.diff()
    for name, t in (("leftpad_k", leftpad_k), ("seqused_k", seqused_k)):
        if t is not None and (t.shape != lengths.shape or t.dtype != torch.int32 or t.device != lengths.device):
            raise bad_argument(name, _describe(t), f"{_describe(lengths)}, one number for each sequence")
    if v.shape[:1] != k.shape[:1]:  # the rows of k would be taken of v
        raise bad_argument("v", f"{v.shape[0]} rows", f"{k.shape[0]}, as k")
    token = torch.arange(k.shape[0], dtype=torch.int32, device=k.device)
    sequence = torch.bucketize(token, cu_seqlens_k[1:], right=True).clamp_(max=lengths.shape[0] - 1)
    first, length = cu_seqlens_k[sequence], lengths[sequence].clamp(min=1)
    source = (first + (token - first + leftpad_k[sequence]) % length).clamp_(0, k.shape[0] - 1)  # cu_seqlens_k may be wrong
    used = lengths if seqused_k is None else seqused_k
    possible = used >= 0 if seqused_k is None else in_range("seqused_k", seqused_k, lengths, "a length")
    possible = possible & in_range("leftpad_k", leftpad_k, used.clamp(min=0), "a number")
    return k[source], v[source], (used - leftpad_k).where(possible, -1)  # -1, an impossible length: NaN


def _describe(t: Tensor) -> str:
    return f"shape {tuple(t.shape)} of dtype {t.dtype} on {t.device}"
