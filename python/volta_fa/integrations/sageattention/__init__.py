"""The functions of SageAttention 2.2, attention with int8 scores for inference, on `volta_fa::fwd_fast`.

Users call them in `volta_fa.sageattention`; `shim/` is the package for programs that import sageattention.

Calls with a mask that is added to scores run on `volta_fa::fwd`, which is exact. Arguments that choose among SageAttention's kernels and
quantizations (`qk_quant_gran`, `pv_accum_dtype`, `quantization_backend`, `smooth_v`) are checked and change nothing: there is one kernel.
Functions that multiply in fp8 raise NotImplementedError, because Volta and Turing cannot."""

from typing import Any, NoReturn

import torch
from torch import Tensor

from ...errors import bad_argument, require_none
from ..flash_attn.interface import as_int32  # a tensor of any integer dtype

__all__ = [
    "sageattn", "sageattn_qk_int8_pv_fp8_cuda", "sageattn_qk_int8_pv_fp8_cuda_sm90", "sageattn_qk_int8_pv_fp16_cuda",
    "sageattn_qk_int8_pv_fp16_triton", "sageattn_varlen",
]  # fmt: skip

_LAYOUTS = ("HND", "NHD")  # (batch, nheads, seqlen, headdim); (batch, seqlen, nheads, headdim)
#: Keywords without effect, and their accepted values. Functions that apply an `attn_mask` take it out first; the others accept None.
_ACCEPTED: dict[str, tuple[Any, ...]] = {
    "qk_quant_gran": ("per_warp", "per_thread"),
    "pv_accum_dtype": ("fp32", "fp16", "fp16+fp32"),
    "quantization_backend": ("triton", "cuda"),
    "smooth_v": (False, True),
    "enable_gqa": (False, True),
    "dropout_p": (None, 0.0),
    "attn_mask": (None,),
}

Attention = Tensor | tuple[Tensor, Tensor]  # out, or (out, softmax_lse)


def sageattn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tensor_layout: str = "HND",
    is_causal: bool = False,
    sm_scale: float | None = None,
    return_lse: bool = False,
    **kwargs: Any,
) -> Attention:
    """Computes attention with int8 scores, for inference.

    Args:
        q: (batch, nheads, seqlen_q, headdim) in the layout HND, (batch, seqlen_q, nheads, headdim) in NHD; fp16 or bf16.
        k, v: likewise, with nheads_k and seqlen_k.
        tensor_layout: HND or NHD.
        is_causal: query i sees the keys j <= i.
        sm_scale: of the scores; headdim ** -0.5 unless given.
        return_lse: also return the log-sum-exp of the scores, (batch, nheads, seqlen_q) in fp32.
        kwargs: `attn_mask`, broadcastable to (batch, nheads, seqlen_q, seqlen_k): bool, where False hides a key, or added to the
            scores. `smooth_k`: quantize K after subtracting its mean over tokens, True unless given. `scale`, which is `sm_scale`, and
            `enable_gqa`, for programs that put this function in place of PyTorch's scaled_dot_product_attention; SageAttention ignores
            both. And the keywords of the other functions.

    Raises TypeError for an unknown keyword, NotImplementedError for a value that would change the result, ValueError for wrong arguments.
    """
    op = "sageattention.sageattn"
    mask, smooth_k, scale = kwargs.pop("attn_mask", None), kwargs.pop("smooth_k", True), kwargs.pop("scale", None)
    if sm_scale is not None and scale not in (None, sm_scale):
        raise bad_argument("scale", scale, f"sm_scale, {sm_scale}: give one of them", op=op)
    sm_scale = scale if sm_scale is None else sm_scale
    _check_choices(op, kwargs)
    return _attend(op, q, k, v, tensor_layout, is_causal, mask, sm_scale, smooth_k, return_lse)


def sageattn_qk_int8_pv_fp16_triton(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tensor_layout: str = "HND",
    quantization_backend: str = "triton",
    is_causal: bool = False,
    attn_mask: Tensor | None = None,
    sm_scale: float | None = None,
    smooth_k: bool = True,
    return_lse: bool = False,
    **kwargs: Any,
) -> Attention:
    """Computes `sageattn`."""
    op = "sageattention.sageattn_qk_int8_pv_fp16_triton"
    _check_choices(op, {"quantization_backend": quantization_backend, **kwargs})
    return _attend(op, q, k, v, tensor_layout, is_causal, attn_mask, sm_scale, smooth_k, return_lse)


def sageattn_qk_int8_pv_fp16_cuda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tensor_layout: str = "HND",
    is_causal: bool = False,
    qk_quant_gran: str = "per_thread",
    sm_scale: float | None = None,
    pv_accum_dtype: str = "fp32",
    smooth_k: bool = True,
    smooth_v: bool = False,
    return_lse: bool = False,
    **kwargs: Any,
) -> Attention:
    """Computes `sageattn`."""
    op = "sageattention.sageattn_qk_int8_pv_fp16_cuda"
    mask = kwargs.pop("attn_mask", None)
    _check_choices(op, {"qk_quant_gran": qk_quant_gran, "pv_accum_dtype": pv_accum_dtype, "smooth_v": smooth_v, **kwargs})
    return _attend(op, q, k, v, tensor_layout, is_causal, mask, sm_scale, smooth_k, return_lse)


def sageattn_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    is_causal: bool = False,
    sm_scale: float | None = None,
    smooth_k: bool = True,
    **kwargs: Any,
) -> Tensor:
    """Computes `sageattn` of packed sequences.

    Args:
        q: (total_q, nheads, headdim).
        k, v: (total_k, nheads_k, headdim).
        cu_seqlens_q, cu_seqlens_k: (batch + 1), int32 or int64: where sequences begin, and the total.
        max_seqlen_q, max_seqlen_k: the longest sequence's length.
        is_causal: query i of a sequence sees its keys j <= i. Sequences must have as many queries as keys. The check reads the lengths
            on the host, unless `cu_seqlens_k` is the same tensor as `cu_seqlens_q`.
        sm_scale, smooth_k: as in `sageattn`.
    """
    op = "sageattention.sageattn_varlen"
    require_none("None: packed sequences take none. Use sageattn", got="a mask", op=op, attn_mask=kwargs.get("attn_mask"))
    _check_choices(op, kwargs)
    is_same = cu_seqlens_q is cu_seqlens_k
    cu_seqlens_q, cu_seqlens_k = as_int32("cu_seqlens_q", cu_seqlens_q), as_int32("cu_seqlens_k", cu_seqlens_k)
    # SageAttention's causal mask begins at a sequence's first query, volta_fa's at its last
    if is_causal and not is_same and not torch.equal(cu_seqlens_q, cu_seqlens_k):
        found = "True with sequences that have more keys or more queries"
        raise bad_argument("is_causal", found, "as many queries as keys in each sequence. Call sageattn for each", op=op)
    out, _ = torch.ops.volta_fa.fwd_fast(
        q, k, v, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, max_seqlen_q=int(max_seqlen_q),
        max_seqlen_k=int(max_seqlen_k), softmax_scale=sm_scale, is_causal=is_causal, smooth_k=smooth_k,
    )  # fmt: skip
    return out


def sageattn_qk_int8_pv_fp8_cuda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tensor_layout: str = "HND",
    is_causal: bool = False,
    qk_quant_gran: str = "per_thread",
    sm_scale: float | None = None,
    pv_accum_dtype: str = "fp32+fp16",
    smooth_k: bool = True,
    smooth_v: bool = False,
    return_lse: bool = False,
    **kwargs: Any,
) -> Attention:
    """Raises NotImplementedError: Volta and Turing have no products in fp8."""
    _refuse_fp8("sageattn_qk_int8_pv_fp8_cuda")


def sageattn_qk_int8_pv_fp8_cuda_sm90(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tensor_layout: str = "HND",
    is_causal: bool = False,
    qk_quant_gran: str = "per_thread",
    sm_scale: float | None = None,
    pv_accum_dtype: str = "fp32+fp32",
    smooth_k: bool = True,
    return_lse: bool = False,
    **kwargs: Any,
) -> Attention:
    """Raises NotImplementedError: Volta and Turing have no products in fp8."""
    _refuse_fp8("sageattn_qk_int8_pv_fp8_cuda_sm90")


def _refuse_fp8(name: str) -> NoReturn:
    raise NotImplementedError(f"volta_fa.sageattention.{name}: Volta and Turing have no products in fp8. Use sageattn")


def _check_choices(op: str, choices: dict[str, Any]) -> None:
    """Raises an error for keywords that are unknown or would change the result; values that select among SageAttention's kernels pass."""
    for name, value in choices.items():
        if name not in _ACCEPTED:
            names = ", ".join([*_ACCEPTED, "smooth_k"])
            raise bad_argument(name, "an unknown keyword", f"one of {names}. Drop it", op=op, error=TypeError)
        if value not in _ACCEPTED[name]:
            raise bad_argument(name, repr(value), " or ".join(map(repr, _ACCEPTED[name])), op=op, error=NotImplementedError)


def _attend(
    op: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tensor_layout: str,
    is_causal: bool,
    mask: Tensor | None,
    scale: float | None,
    smooth_k: bool,
    return_lse: bool,
) -> Attention:
    """Computes a batch of sequences of one length, for the function `op`. Returns out, or (out, softmax_lse)."""
    if tensor_layout not in _LAYOUTS:
        raise bad_argument("tensor_layout", repr(tensor_layout), "'HND' or 'NHD'", op=op)
    for name, t in (("q", q), ("k", k), ("v", v)):
        if t.ndim != 4:
            raise bad_argument(name, f"shape {tuple(t.shape)}", f"four dimensions, {tensor_layout} after the batch", op=op)
    heads_first = tensor_layout == "HND"
    if heads_first:
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    options: dict[str, Any] = {"softmax_scale": scale, "is_causal": is_causal}
    seqlen_q, seqlen_k = q.shape[1], k.shape[1]
    mask = None if mask is None else _rank_4(op, mask, q.dtype, (q.shape[0], q.shape[2], seqlen_q, seqlen_k))
    # SageAttention's causal mask is aligned to the first query and the first key, volta_fa's to the last ones
    if is_causal and seqlen_k > seqlen_q:
        k, v = k[:, :seqlen_q], v[:, :seqlen_q]
        mask = mask if mask is None or mask.shape[3] == 1 else mask[..., :seqlen_q]
    elif is_causal and seqlen_k < seqlen_q:
        options |= {"is_causal": False, "window_right": seqlen_q - seqlen_k}
    if mask is None or mask.dtype == torch.bool:
        out, lse = torch.ops.volta_fa.fwd_fast(q, k, v, attn_mask=mask, smooth_k=smooth_k, **options)
    else:
        out, lse, _ = torch.ops.volta_fa.fwd(q, k, v, attn_bias=mask, **options)
    out = out.transpose(1, 2) if heads_first else out
    return (out, lse) if return_lse else out


def _rank_4(op: str, mask: Tensor, dtype: torch.dtype, full: tuple[int, ...]) -> Tensor:
    """Returns the mask with four dimensions, after checking that it broadcasts to the shape `full` and that it is bool, of q's `dtype` or
    float32."""
    if mask.dtype not in (torch.bool, torch.float32, dtype):
        raise bad_argument("attn_mask", f"dtype {mask.dtype}", f"torch.bool, {dtype} (q's) or torch.float32", op=op)
    sizes = (1,) * (4 - mask.ndim) + tuple(mask.shape)
    if len(sizes) != 4 or any(size not in (1, whole) for size, whole in zip(sizes, full)):
        raise bad_argument("attn_mask", f"shape {tuple(mask.shape)}", f"one that broadcasts to {full}", op=op)
    return mask.reshape(sizes)
