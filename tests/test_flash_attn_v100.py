"""Tests volta_fa's versions of other FlashAttention packages for Volta and Turing: arguments, results against fp64, and errors.

Three packages are called flash_attn_v100: one of 2023, one of 2026 (with flash-attn 2's arguments), and that of 1Cat-vLLM, which has
functions for paged caches. The module `v100` has the functions of all three, `turing` those of a fourth package, flash_attn_turing.
Tensors are (batch, seqlen, nheads, headdim). Functions with "bhmd" in their names, and `fwd`, `bwd` and `_flash_attn_forward` of
flash_attn_v100, take (batch, nheads, seqlen, headdim) instead, "heads first".

flash_attention.py has the fp64 reference (`attention`, and `packed` for sequences of LENGTHS: numbers of queries and of keys), comparisons
in the backend's dtype (`close`, `close_lse`), and `refused`, which checks an error. LSE_ROUNDING is the least tolerance of gradients: they
are computed from softmax_lse, which is fp32 even where all else is fp64. BACKENDS: CPU in fp64 and fp32, GPU."""

import inspect
import sys
import types

import pytest
import torch

from flash_attention import BACKENDS, LENGTHS, LSE_ROUNDING, attention, close, close_lse, packed, packed_leaves, refused
from volta_fa.integrations.flash_attn import interface, turing, v100
from volta_fa.integrations.stand_in import provide_flash_attn_v100
from volta_fa.integrations.vllm import paged


def heads_first(*tensors):
    """Returns tensors (batch, seqlen, nheads, headdim) as (batch, nheads, seqlen, headdim), contiguous."""
    return [t.transpose(1, 2).contiguous() for t in tensors]


def test_signatures():
    """Signatures of the package of 2026 are flash-attn 2's. Each function has a second name with _gpu."""
    for name in ("flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache"):
        assert inspect.signature(getattr(v100, name)) == inspect.signature(getattr(interface, name))
        assert getattr(v100, name.replace("_func", "") + "_gpu") is getattr(v100, name)


@BACKENDS
def test_arguments_of_2023_and_of_2026(backend):
    """Positional arguments after v are (softmax_scale, causal) of 2023, or (dropout_p, softmax_scale, causal, ...) of 2026."""
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
    message = "dropout_p: got 0.3 as the only argument after v, expected its name"
    refused(ValueError, message, v100.flash_attn_func, q, k, v, 0.3, causal=True)
    refused(TypeError, "got 6 arguments by position", v100.flash_attn_func, q, k, v, 0.3, True, (-1, -1))
    lengths = torch.tensor([0.0, 4.5]), torch.tensor([0, 4])
    refused(ValueError, "cu_seqlens_q: got dtype torch.float32, expected an integer", v100.flash_attn_varlen_func, q, k, v, *lengths, 4, 4)


@BACKENDS
def test_heads_first(backend):
    """The compiled functions, and 1Cat-vLLM's for dense tensors, with and without tensors for their results."""
    q, k, v, dout = backend.randn(2, 9, 4, 16), backend.randn(2, 12, 2, 16), backend.randn(2, 12, 2, 16), backend.randn(2, 9, 4, 16)
    leaves = [t.detach().requires_grad_() for t in (q, k, v)]
    scale = {"softmax_scale": 0.3, "causal": True}
    right, right_lse, *_ = attention(*leaves, **scale)
    # alibi_slopes None, then dropout_p, softmax_scale, causal, window (-1: no bound), softcap; of fwd return_softmax and generator, of bwd
    # deterministic and generator
    options = 0.0, 0.3, True, -1, -1, 0.0, False, None
    first = heads_first(q, k, v)

    def check_right(out, lse):
        close(backend, out.transpose(1, 2), right)
        close_lse(lse, right_lse)

    for into in (None, torch.full_like(first[0], torch.nan)):
        of_1cat, lse, _ = v100.flash_attn_bhmd_func(*first, dropout_p=0.0, return_attn_probs=True, out=into, **scale)
        check_right(of_1cat, lse)
        out, lse, _, rng_state = v100.fwd(*first, into, None, *options)
        check_right(out, lse)
        assert out.is_contiguous() and of_1cat.is_contiguous() and (into is None or of_1cat is out is into)
    for given in ([None] * 3, [torch.full_like(t, torch.nan) for t in first]):
        *gradients, softmax_d = v100.bwd(*heads_first(dout), *first, out, lse, *given, None, *options, rng_state)
        assert softmax_d.shape == lse.shape
        for found, want, target in zip(gradients, torch.autograd.grad(right, leaves, dout.to(right.dtype), retain_graph=True), given):
            assert target is None or found is target
            close(backend, found.transpose(1, 2), want, LSE_ROUNDING)
    close_lse(v100.flash_attn_lse(q, k, v, **scale), right_lse)
    check_right(v100.flash_attn_bhmd_func(*first, **scale), lse)
    # out, dropout_p, softmax_scale, causal, window_left, window_right, softcap, alibi_slopes, return_softmax
    out, lse, *none = v100._flash_attn_forward(*first, None, 0.0, 0.3, True, -1, -1, 0.0, None, False)
    check_right(out, lse)
    assert none == [None, None]


@BACKENDS
def test_lengths_of_any_integer_dtype(backend):
    (q, k, v), (cu_q, cu_k, *longest) = packed_leaves(backend)
    out = v100.flash_attn_varlen_func(q, k, v, cu_q.long(), cu_k.long(), *longest, causal=True)
    close(backend, out, packed(q, k, v, *LENGTHS, causal=True)[0])


# ---- flash_attn_v100 of 1Cat-vLLM ------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [(-1, -1), (5, 0)], ids=str)
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8", "fp8_e5m2"])
@BACKENDS
def test_paged_functions(backend, kv_cache_dtype, window):
    """Prompts and decoding over a cache whose K and V are views of one tensor, in both layouts."""
    page, lengths, dtype = 16, [40, 21], paged.CACHE_DTYPES[kv_cache_dtype]  # tokens of a page and of each sequence; None for "auto"
    table = torch.tensor([[4, 1, 2], [0, 3, -1]], device=backend.device, dtype=torch.int32)
    drawn = backend.randn(5, 2, page, 2, 16)  # (pages, K and V, tokens, KV heads, headdim)
    cache = drawn if dtype is None else drawn.to(dtype)
    numbers, scales = cache.to(backend.dtype), (1.0, 1.0) if dtype is None else (0.5, 2.0)  # a value is its number times the scale
    k_cache, v_cache = (cache if dtype is None else cache.view(torch.uint8)).unbind(1)
    arguments = k_cache, v_cache, table, torch.tensor(lengths, device=backend.device, dtype=torch.int32)
    options = {"softmax_scale": 0.3, "kv_cache_dtype": kv_cache_dtype, "k_scale": scales[0], "v_scale": scales[1], "window_size": window}
    q = backend.randn(2, 7, 4, 16)

    def expected(rows, causal=True):
        """Returns attention of these queries, (batch, rows, nheads, headdim), over the dequantized tokens of each sequence."""
        outs = []
        for b, n in enumerate(lengths):
            pages = table[b, : -(-n // page)].long()
            k, v = (t[pages].flatten(0, 1)[None, :n] * scale for t, scale in zip(numbers.unbind(1), scales))
            outs.append(attention(rows[b : b + 1], k, v, softmax_scale=0.3, causal=causal, window_size=window)[0])
        return torch.cat(outs)

    into = torch.full_like(q, torch.nan)
    assert v100.flash_attn_prefill_paged(q, *arguments, out=into, **options) is into
    close(backend, into, expected(q))
    close(backend, v100.flash_attn_prefill_paged_splitkv(q, *arguments, split_kv_tokens=16, **options), expected(q))
    close(backend, v100.flash_attn_prefill_paged(q, *arguments, causal=False, **options), expected(q, causal=False))
    [first] = heads_first(q)
    into = torch.full_like(first, torch.nan)
    for out in (None, into):
        result = v100.flash_attn_prefill_paged_bhmd(first, *arguments, 0.3, out, kv_cache_dtype, *scales, True, window)  # True: causal
        assert result.is_contiguous() and (out is None or result is out)
        close(backend, result.transpose(1, 2), expected(q))
    into = torch.full_like(q[:, 0], torch.nan)
    for out in (None, into):
        result = v100.flash_attn_decode_paged(q[:, 0], *arguments, out=out, max_seq_len_hint=64, **options)
        assert out is None or result is out
        close(backend, result, expected(q[:, :1])[:, 0])
    decode, arguments = v100.flash_attn_decode_paged, (q[:, 0], *arguments)
    message = "kv_cache_dtype: got `int8_per_token_head`, expected auto or float16"
    refused(ValueError, message, decode, *arguments, kv_cache_dtype="int8_per_token_head")
    message = r"out: got shape \(2, 4, 15\) of dtype .* expected shape \(2, 4, 16\)"
    refused(ValueError, message, decode, *arguments, out=into[..., 1:], **options)


def test_the_stand_in_has_all_three_packages(monkeypatch):
    """1Cat-vLLM imports these names of flash_attn_v100. If another package of that name is already imported, it stays."""
    monkeypatch.delitem(sys.modules, "flash_attn_v100", raising=False)
    for _ in range(2):
        provide_flash_attn_v100()
    import flash_attn_v100

    assert {*v100.__all__} == set(flash_attn_v100.__all__)
    assert flash_attn_v100.flash_attn_interface.flash_attn_decode_paged is v100.flash_attn_decode_paged
    assert v100.flash_attn_decode_paged_xqa_available()
    other = types.ModuleType("flash_attn_v100")
    other.__file__ = "elsewhere.py"
    monkeypatch.setitem(sys.modules, "flash_attn_v100", other)
    refused(RuntimeError, "flash_attn_v100 was imported before from elsewhere.py", provide_flash_attn_v100)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("lengths", [(9, 12), (12, 9), (1, 5)], ids=str)
@BACKENDS
def test_turing(backend, lengths, causal):
    """flash_attn_turing's `fwd` and `bwd`, which return out and softmax_lse, and dq, dk and dv."""
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
    """Packed sequences. softmax_lse is padded: (sequences, nheads, max_seqlen_q), with 0 after a sequence's last query."""
    lengths_q, lengths_k = LENGTHS
    (q, k, v), lengths = packed_leaves(backend)
    dout, options = backend.randn(*q.shape), (*lengths, causal)  # cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal
    expected, *_ = packed(q, k, v, lengths_q, lengths_k, causal=causal)
    out, lse = turing.varlen_fwd(q, k, v, *options)
    close(backend, out, expected)
    assert lse.shape == (len(lengths_q), 4, max(lengths_q))
    for lse_of_one, *parts in zip(lse, q.split(lengths_q), k.split(lengths_k), v.split(lengths_k)):
        close_lse(lse_of_one[:, : len(parts[0])], attention(*(t[None] for t in parts), causal=causal)[1][0])
        assert not lse_of_one[:, len(parts[0]) :].any()
    want = torch.autograd.grad(expected, (q, k, v), dout.to(expected.dtype))
    for found, right in zip(turing.varlen_bwd(q, k, v, out, lse, dout, *options), want):
        close(backend, found, right, LSE_ROUNDING)
    refused(ValueError, "lse: got shape", turing.varlen_bwd, q, k, v, out, lse[..., 1:], dout, *options)
    if q.is_cuda:  # lengths are not validated: rows after the last sequence belong to none and change nothing
        padded = [torch.nn.functional.pad(t, (0, 0, 0, 0, 0, 20), value=1.0) for t in (q, out, dout)]
        assert torch.equal(turing.varlen_fwd(padded[0], k, v, *options)[1], lse)
        close(backend, turing.varlen_bwd(padded[0], k, v, padded[1], lse, padded[2], *options)[0][: len(q)], want[0], LSE_ROUNDING)
        return
    more_q, more_out, more_dout = (torch.cat([t, t]) for t in (q, out, dout))
    message = "cu_seqlens_q: got .* as its last value"
    refused(ValueError, message, turing.varlen_bwd, more_q, k, v, more_out, lse, more_dout, *options)
    short = (*options[:2], 1, *options[3:])  # max_seqlen_q 1
    refused(ValueError, "max_seqlen_q", turing.varlen_bwd, q, k, v, out, lse[..., :1], dout, *short)
