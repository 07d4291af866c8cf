"""PyTorch's registry of flash attention implementations, for torch 2.10 and later.

`import volta_fa` registers the name "VOLTA", which changes nothing yet. `torch.nn.attention.activate_flash_attention_impl("VOLTA")`
then replaces the kernels of PyTorch's flash attention operators in `aten` by those here; `restore_flash_attention_impl()`, from torch
2.11 on, undoes it.

volta_fa then runs `torch.nn.attention.varlen.varlen_attn`, `aten::_flash_attention_forward`, and scaled_dot_product_attention where
PyTorch chooses flash attention. PyTorch never does on Volta and Turing: use `volta_fa.enable_sdpa()` there.
Nothing falls back: arguments without a kernel raise NotImplementedError."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..errors import bad_argument, require_none
from ..operands import with_unit_stride  # copies a tensor unless its last dimension is contiguous
from .flash_attn.interface import _lengths, _options  # arguments of volta_fa's operators by name

#: The name for `activate_flash_attention_impl`.
NAME = "VOLTA"


class _Handle:
    """Holds the registered kernels, which deleting the library unregisters. PyTorch keeps it until another implementation is activated."""

    def __init__(self, library: torch.library.Library) -> None:
        self._library: torch.library.Library | None = library

    def remove(self) -> None:
        self._library = None


def _register_kernels() -> _Handle:
    """Replaces the kernels. PyTorch calls it on activation."""
    library = torch.library.Library("aten", "IMPL")
    kernels: dict[str, Callable[..., Any]] = {
        "_flash_attention_forward": _forward,
        "_flash_attention_backward": _backward,
        "_scaled_dot_product_flash_attention": _sdpa_forward,
        "_scaled_dot_product_flash_attention_backward": _sdpa_backward,
        "_flash_attention_forward_no_dropout_inplace": _forward_into,
    }
    for name, kernel in kernels.items():
        if hasattr(torch.ops.aten, name):  # not every release has them all
            for key in ("CPU", "CUDA"):  # PyTorch has no CPU kernels for these: its scaled_dot_product_attention calls other ops there
                library.impl(name, kernel, key)
    return _Handle(library)


def _window(left: int | None, right: int | None) -> tuple[int, int]:
    """Returns flash-attn's window_size, in which -1 is no limit."""
    return -1 if left is None else left, -1 if right is None else right


def _unused(q: Tensor, *shape: int) -> Tensor:
    """Returns the rng_state (2) of a call without dropout, or the result () that aten's schemas name `unused`, or `philox_offset`."""
    return torch.empty(shape, dtype=torch.uint64, device=q.device)


def _forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    seqused_k: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    block_table: Tensor | None = None,
    num_splits: int | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Implements `aten::_flash_attention_forward`, (batch, seqlen, heads, headdim), or packed sequences with cum_seq_q and cum_seq_k.
    Returns out, softmax_lse, rng_state, unused and an empty debug mask."""
    if return_debug_mask:
        raise bad_argument("return_debug_mask", True, "False: the probabilities are never in memory", error=NotImplementedError)
    options = _options(scale, is_causal, _window(window_size_left, window_size_right), softcap=0.0, alibi_slopes=alibi_slopes)
    q, k, v = with_unit_stride(query), with_unit_stride(key), with_unit_stride(value)
    cum_seq_q, cum_seq_k, seqused_k, block_table = (with_unit_stride(t) for t in (cum_seq_q, cum_seq_k, seqused_k, block_table))
    if cum_seq_q is not None:
        options |= {"cu_seqlens_q": cum_seq_q, "max_seqlen_q": max_q}
    if block_table is not None:
        if dropout_p:
            got = f"{dropout_p} together with block_table"
            raise bad_argument("dropout_p", got, "0: a cache is for inference", error=NotImplementedError)
        if seqused_k is None and cum_seq_k is not None:
            seqused_k = cum_seq_k.diff()
        options["num_splits"] = max(0, num_splits or 0)
        out, softmax_lse = torch.ops.volta_fa.fwd_kvcache(q, k, v, cache_seqlens=seqused_k, block_table=block_table, **options)
        return out, softmax_lse, _unused(q, 2), _unused(q), q.new_empty(0)
    if cum_seq_k is not None:
        options |= {"cu_seqlens_k": cum_seq_k, "max_seqlen_k": max_k}
    if torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value)):
        got, expected = "a tensor with inputs that require grad", "None: aten::_flash_attention_backward has no such argument"
        require_none(expected, got=got, seqused_k=seqused_k, alibi_slopes=alibi_slopes)
    out, softmax_lse, rng_state = torch.ops.volta_fa.fwd(q, k, v, dropout_p=dropout_p, seqused_k=seqused_k, **options)
    rng_state = rng_state.view(torch.uint64) if dropout_p else _unused(q, 2)
    return out, softmax_lse, rng_state, _unused(q), q.new_empty(0)


def _forward_into(out: Tensor, *arguments: Any, **options: Any) -> Tensor:
    """Implements `aten::_flash_attention_forward_no_dropout_inplace`: writes `out` and returns softmax_lse."""
    found, softmax_lse, *_ = _forward(*arguments, **options)
    out.copy_(found)
    return softmax_lse


def _backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    rng_state: Tensor,
    unused: Tensor,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Implements `aten::_flash_attention_backward`."""
    options = _options(scale, is_causal, _window(window_size_left, window_size_right), softcap=0.0, alibi_slopes=None)
    # the schema requires both tensors, so a dense call gives None or empty ones
    if cum_seq_q is not None and cum_seq_k is not None and cum_seq_q.numel():
        options |= _lengths(cum_seq_q, cum_seq_k, max_q, max_k)
    q, k, v = with_unit_stride(query), with_unit_stride(key), with_unit_stride(value)
    dq, dk, dv, _, _ = torch.ops.volta_fa.bwd(
        grad_out, q, k, v, out, logsumexp, rng_state=rng_state.view(torch.int64) if dropout_p else None,
        dropout_p=dropout_p, deterministic=torch.are_deterministic_algorithms_enabled(), **options,
    )  # fmt: skip
    return dq, dk, dv


def _heads_first(result: Tensor, like: Tensor) -> Tensor:
    """Returns a result (batch, seqlen, heads, headdim) as (batch, heads, seqlen, headdim), with the strides of `empty_like(like)` if it
    has that shape. Compiled programs rely on these strides, which PyTorch's kernel gives its results."""
    result = result.transpose(1, 2)
    wanted = torch.empty_like(like, device="meta")
    if result.shape == wanted.shape and result.stride() != wanted.stride():
        return torch.empty_like(like).copy_(result)
    return result


def _sdpa_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    """Implements `aten::_scaled_dot_product_flash_attention`, (batch, heads, seqlen, headdim). Returns out, softmax_lse, None for
    cum_seq_q and cum_seq_k, max_q, max_k, rng_state, unused and an empty debug mask."""
    q, k, v = (t.transpose(1, 2) for t in (query, key, value))
    max_q, max_k = q.shape[1], k.shape[1]
    dense = (None, None)  # no cum_seq_q, no cum_seq_k
    out, softmax_lse, *others = _forward(q, k, v, *dense, max_q, max_k, dropout_p, is_causal, return_debug_mask, scale=scale)
    return _heads_first(out, query), softmax_lse, None, None, max_q, max_k, *others


def _sdpa_backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor, *others: Any, scale: float | None = None
) -> tuple[Tensor, ...]:
    """Implements `aten::_scaled_dot_product_flash_attention_backward`, (batch, heads, seqlen, headdim). others: those of `_backward` from
    cum_seq_q to unused; the schema has philox_seed and philox_offset in place of rng_state and unused."""
    dout, q, k, v, o = (t.transpose(1, 2) for t in (grad_out, query, key, value, out))
    gradients = _backward(dout, q, k, v, o, logsumexp, *others, scale=scale)
    return tuple(_heads_first(gradient, t) for t, gradient in zip((query, key, value), gradients))


def register() -> None:
    """Registers the name, if this torch has the registry. `import volta_fa` calls it. Nothing changes before the name is activated."""
    import torch.nn.attention as attention

    register_impl = getattr(attention, "register_flash_attention_impl", None)
    if register_impl is not None:
        register_impl(NAME, register_fn=_register_kernels)
