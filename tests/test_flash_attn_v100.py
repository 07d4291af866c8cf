"""The functions of the packages flash_attn_v100 and flash_attn_turing against attention in fp64."""

from __future__ import annotations

import inspect

import pytest
import torch

from conftest import on
from test_flash_attn_api import LENGTHS, LSE_ROUNDING, attention, close, close_lse, cu, packed
from volta_fa.integrations.flash_attn import interface, turing, v100

BACKENDS = on("cpu-fp64", "cpu-fp32", "cuda")


def heads_first(*tensors):
    return [t.transpose(1, 2).contiguous() for t in tensors]


# ---- flash_attn_v100 -------------------------------------------------------------------------------------------


def test_signatures():
    for name in ("flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache"):
        assert inspect.signature(getattr(v100, name)) == inspect.signature(getattr(interface, name))
        assert getattr(v100, name.replace("_func", "") + "_gpu") is getattr(v100, name)


@BACKENDS
def test_arguments_of_2023_and_of_2026(backend):
    q, k, v = (backend.randn(2, 9, 2, 16) for _ in range(3))

    plain, scaled, causal = ({"softmax_scale": scale, "causal": causal} for scale, causal in ((None, False), (0.3, False), (0.3, True)))
    cases = [
        ((), {}, plain),
        ((0.3, True), {}, causal),  # softmax_scale, causal
        ((0.3, False), {}, scaled),
        ((None, False), {}, plain),
        ((None,), {}, plain),
        ((), {"softmax_scale": 0.3, "causal": True}, causal),
        ((0.0, 0.3, True), {}, causal),  # dropout_p, softmax_scale, causal
        ((0.0, None, False, (-1, -1), 0.0), {}, plain),
        ((0.0, 0.3), {"causal": True}, causal),
    ]
    for args, options, expected in cases:
        close(backend, v100.flash_attn_func(q, k, v, *args, **options), attention(q, k, v, **expected)[0])
    with pytest.raises(ValueError, match="dropout_p: got 0.3 as the only argument after v, expected its name"):
        v100.flash_attn_func(q, k, v, 0.3, causal=True)
    with pytest.raises(TypeError, match="got 6 arguments by position"):
        v100.flash_attn_func(q, k, v, 0.3, True, (-1, -1))


@BACKENDS
def test_compiled_functions_take_heads_first(backend):
    q, k, v, dout = backend.randn(2, 9, 4, 16), backend.randn(2, 12, 2, 16), backend.randn(2, 12, 2, 16), backend.randn(2, 9, 4, 16)
    leaves = [t.detach().requires_grad_() for t in (q, k, v)]
    expected, expected_lse, *_ = attention(*leaves, softmax_scale=0.3, causal=True)
    right = [expected, *torch.autograd.grad(expected, leaves, dout.to(expected.dtype))]
    options = 0.0, 0.3, True, -1, -1, 0.0, False, None
    first = heads_first(q, k, v)
    into = torch.full_like(first[0], torch.nan)
    for out in (None, into):
        result, lse, _, rng_state = v100.fwd(*first, out, None, *options)
        assert result.is_contiguous() and (out is None or result is out)
        close(backend, result.transpose(1, 2), right[0])
        close_lse(lse, expected_lse)
    for given in ([None] * 3, [torch.full_like(t, torch.nan) for t in first]):
        *gradients, softmax_d = v100.bwd(*heads_first(dout), *first, result, lse, *given, None, *options, rng_state)
        assert softmax_d.shape == lse.shape
        for found, expected, target in zip(gradients, right[1:], given):
            assert target is None or found is target
            close(backend, found.transpose(1, 2), expected, LSE_ROUNDING)


@BACKENDS
def test_lengths_of_any_integer_dtype(backend):
    lengths_q, lengths_k = LENGTHS
    q, k, v = backend.randn(sum(lengths_q), 4, 16), backend.randn(sum(lengths_k), 2, 16), backend.randn(sum(lengths_k), 2, 16)
    lengths = [cu(lengths, backend.device).long() for lengths in LENGTHS]
    out = v100.flash_attn_varlen_func(q, k, v, *lengths, max(lengths_q), max(lengths_k), causal=True)
    close(backend, out, packed(q, k, v, lengths_q, lengths_k, causal=True)[0])


# ---- flash_attn_turing -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("lengths", [(9, 12), (12, 9), (1, 5)], ids=str)
@BACKENDS
def test_turing(backend, lengths, causal):
    q, k, v = (backend.randn(2, n, h, 16) for n, h in zip((*lengths, lengths[1]), (4, 2, 2)))
    dout, leaves = backend.randn(*q.shape), [t.detach().requires_grad_() for t in (q, k, v)]
    expected, expected_lse, *_ = attention(*leaves, causal=causal)
    out, lse = turing.fwd(q, k, v, causal)
    close(backend, out, expected)
    close_lse(lse, expected_lse)
    for found, want in zip(turing.bwd(q, k, v, out, lse, dout, causal), torch.autograd.grad(expected, leaves, dout.to(expected.dtype))):
        close(backend, found, want, LSE_ROUNDING)


@pytest.mark.parametrize("causal", [False, True])
@BACKENDS
def test_turing_varlen(backend, causal):
    lengths_q, lengths_k = LENGTHS
    q, k, v = backend.randn(sum(lengths_q), 4, 16), backend.randn(sum(lengths_k), 2, 16), backend.randn(sum(lengths_k), 2, 16)
    dout, leaves = backend.randn(*q.shape), [t.detach().requires_grad_() for t in (q, k, v)]
    expected, *_ = packed(*leaves, lengths_q, lengths_k, causal=causal)
    lengths = cu(lengths_q, backend.device), cu(lengths_k, backend.device), max(lengths_q), max(lengths_k), causal
    out, lse = turing.varlen_fwd(q, k, v, *lengths)
    close(backend, out, expected)
    assert lse.shape == (len(lengths_q), 4, max(lengths_q))
    for own, *parts in zip(lse, q.split(lengths_q), k.split(lengths_k), v.split(lengths_k)):
        close_lse(own[:, : len(parts[0])], attention(*(t[None] for t in parts), causal=causal)[1][0])
        assert not own[:, len(parts[0]) :].any()
    want = torch.autograd.grad(expected, leaves, dout.to(expected.dtype))
    for found, right in zip(turing.varlen_bwd(q, k, v, out, lse, dout, *lengths), want):
        close(backend, found, right, LSE_ROUNDING)
    with pytest.raises(ValueError, match="lse: got shape"):
        turing.varlen_bwd(q, k, v, out, lse[..., 1:], dout, *lengths)
