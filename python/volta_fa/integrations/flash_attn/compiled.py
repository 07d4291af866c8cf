"""The functions of flash-attn 2.8's compiled module, flash_attn_2_cuda, for programs that call it (as `flash_attn_gpu`).

xformers calls the forwards and backwards, TransformerEngine imports `varlen_bwd`; both pass arguments by position. The functions compute
what flash-attn's private Python functions do (private.py), and write the result into a given `out`. They return lists of:

- out, and softmax_lse, the log-sum-exp of each row of scores.
- S_dmask: the probabilities, negative where dropped; empty unless return_softmax.
- rng_state: dropout's seed and offset, for the backward pass.
- dq, dk, dv; and softmax_d, the sum of dout * out over each row."""

import torch
from torch import Tensor

from ...errors import require_tensors
from .interface import _lengths, _options, flash_attn_with_kvcache  # arguments of volta_fa's operators by name

# _backward computes both backward functions; _check_target raises ValueError unless a tensor can take a result
from .private import _backward, _check_target, _flash_attn_forward, _flash_attn_varlen_forward

__all__ = ["bwd", "fwd", "fwd_kvcache", "varlen_bwd", "varlen_fwd"]


def fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor | None,
    alibi_slopes: Tensor | None,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    return_softmax: bool,
    generator: None,
) -> list[Tensor]:
    """Computes `_flash_attn_forward`. Returns out, softmax_lse, S_dmask and rng_state. Raises what that raises."""
    _check_generator(generator)
    _check_out(out, q, v)
    results = _flash_attn_forward(
        q, k, v, dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes, return_softmax
    )
    return [_copied_to(out, results[0]), *results[1:]]


def varlen_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor | None,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    seqused_k: Tensor | None,
    leftpad_k: Tensor | None,
    block_table: Tensor | None,
    alibi_slopes: Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float,
    zero_tensors: bool,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    return_softmax: bool,
    generator: None,
    num_splits: int = 0,
) -> list[Tensor]:
    """Computes `_flash_attn_varlen_forward`, where zero_tensors has no effect. Returns out, softmax_lse, S_dmask and rng_state. Raises
    what that raises."""
    _check_generator(generator)
    _check_out(out, q, v)
    results = _flash_attn_varlen_forward(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal, window_size_left,
        window_size_right, softcap, alibi_slopes, return_softmax, block_table, leftpad_k, seqused_k, zero_tensors, num_splits,
    )  # fmt: skip
    return [_copied_to(out, results[0]), *results[1:]]


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
    alibi_slopes: Tensor | None,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    deterministic: bool,
    generator: None,
    rng_state: Tensor | None,
) -> list[Tensor]:
    """Computes `_flash_attn_backward`. Returns dq, dk, dv and softmax_d. Raises what that raises."""
    _check_generator(generator)
    options = _options(softmax_scale, causal, (window_size_left, window_size_right), softcap, alibi_slopes)
    return [*_backward(dout, q, k, v, out, softmax_lse, (dq, dk, dv), dropout_p, deterministic, rng_state, options)]


def varlen_bwd(
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
    alibi_slopes: Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float,
    zero_tensors: bool,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    deterministic: bool,
    generator: None,
    rng_state: Tensor | None,
) -> list[Tensor]:
    """Computes `_flash_attn_varlen_backward`. Returns dq, dk, dv and softmax_d. Raises what that raises."""
    _check_generator(generator)
    options = _options(softmax_scale, causal, (window_size_left, window_size_right), softcap, alibi_slopes)
    options |= _lengths(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    return [*_backward(dout, q, k, v, out, softmax_lse, (dq, dk, dv), dropout_p, deterministic, rng_state, options)]


def fwd_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    cache_seqlens: Tensor | None,
    rotary_cos: Tensor | None,
    rotary_sin: Tensor | None,
    cache_batch_idx: Tensor | None,
    cache_leftpad: Tensor | None,
    block_table: Tensor | None,
    alibi_slopes: Tensor | None,
    out: Tensor | None,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    rotary_interleaved: bool,
    num_splits: int,
) -> list[Tensor]:
    """Computes `flash_attn_with_kvcache`. Returns out and softmax_lse. Raises what that raises."""
    _check_out(out, q, v_cache)
    result, softmax_lse = flash_attn_with_kvcache(
        q, k_cache, v_cache, k, v, rotary_cos, rotary_sin, cache_seqlens, cache_batch_idx, cache_leftpad, block_table, softmax_scale,
        causal, (window_size_left, window_size_right), softcap, rotary_interleaved, alibi_slopes, num_splits, return_softmax_lse=True,
    )  # fmt: skip
    return [_copied_to(out, result), softmax_lse]


def _check_out(out: Tensor | None, q: Tensor, v: Tensor) -> None:
    """Raises ValueError unless `out` can take the result. Callers check before the call, which may write a cache or draw random numbers."""
    if out is not None:
        require_tensors(q=q, v=v, out=out)
        _check_target("out", out, (*q.shape[:-1], v.shape[-1]), q.dtype, q.device, "or None")


def _copied_to(out: Tensor | None, result: Tensor) -> Tensor:
    """Returns the result, or `out` with the result copied into it."""
    if out is None:
        return result
    with torch.no_grad():
        return out.copy_(result)


def _check_generator(generator: object) -> None:
    # releases before 2.8.4 took one; a program that passes one would get other random numbers than it expects
    if generator is not None:
        raise NotImplementedError(
            "volta_fa: the `generator` argument is no longer supported, as in flash-attn: pass None, and seed PyTorch's own"
        )
