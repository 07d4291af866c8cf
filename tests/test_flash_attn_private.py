"""flash-attn's private functions (`_flash_attn_forward` etc.) and those of its compiled module flash_attn_2_cuda, which ring_flash_attn,
xformers and Transformer Engine call: signatures, results against fp64, and gradients written into given tensors.

flash_attention.py has the fp64 reference (`attention`, `packed`) and comparisons in the backend's dtype (`close`). LSE_ROUNDING is the
least tolerance of gradients and probabilities: they are computed from softmax_lse, which is fp32 even where all else is fp64. LENGTHS are
(queries, keys) of five packed sequences, for which `packed_leaves` draws q, k and v. CASES are options by name, whose slopes `drawn` draws.
`cu` makes cu_seqlens, `in_pages` shuffled pages and their table of a dense cache. BACKENDS: CPU in fp64 and fp32, GPU."""

import inspect

import pytest
import torch

import flash_attention
from conftest import on
from flash_attention import BACKENDS, LENGTHS, LSE_ROUNDING, attention, close, close_lse, cu, in_pages, packed, refused, slopes_of
from volta_fa.integrations.flash_attn import compiled, private
from volta_fa.integrations.flash_attn.private import _flash_attn_backward, _flash_attn_forward, _flash_attn_varlen_forward

#: Positional arguments of the calls below have this order. After OPTIONS comes return_softmax (forward) or deterministic (backward).
OPTIONS = "dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes"
VARLEN = "cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k"
GRADIENTS = "dout, q, k, v, out, softmax_lse, dq, dk, dv"
SIGNATURES = {
    "forward": f"q, k, v, {OPTIONS}, return_softmax",
    "varlen_forward": (
        f"q, k, v, {VARLEN}, dropout_p, softmax_scale, causal, window_size_left=-1, window_size_right=-1, softcap=0.0, alibi_slopes=None, "
        "return_softmax=False, block_table=None, leftpad_k=None, seqused_k=None, zero_tensors=False, num_splits=0"
    ),
    "backward": f"{GRADIENTS}, {OPTIONS}, deterministic, rng_state=None",
    "varlen_backward": f"{GRADIENTS}, {VARLEN}, {OPTIONS}, deterministic, rng_state=None, zero_tensors=False",
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures_are_flash_attns(name):
    """They are plain functions without a wrapper, because ring_flash_attn reads their signatures with `inspect`."""
    function = getattr(private, f"_flash_attn_{name}")
    assert getattr(private, f"_wrapped_flash_attn_{name}") is function
    assert inspect.isfunction(function) and not hasattr(function, "__wrapped__")
    assert flash_attention.signature_of(function) == f"({SIGNATURES[name]})"


# 1e-30 is below 2^-16, half of what the kernels' random numbers resolve: nothing is dropped
CASES = flash_attention.CASES | {"too little dropout": {"dropout_p": 1e-30, "window_size": (7, -1)}}


def split(backend, case, entries):
    """Returns the options of `attention`, and the private functions' positional ones, which begin with dropout_p."""
    options = {"softmax_scale": 0.25, "causal": False, "window_size": (-1, -1), "softcap": 0.0, "alibi_slopes": None, "dropout_p": 0.0}
    options |= flash_attention.drawn(backend, CASES[case], entries)
    scale, causal, window_size, softcap, slopes, dropout_p = options.values()
    return options, (dropout_p, scale, causal, *window_size, softcap, slopes)


def check(backend, expected, operands, forward, backward, dropout_p):
    """Compares a forward's results, and a backward's in tensors of other strides, with `expected(leaves, keep)`: out, lse, probabilities.
    `keep`: the dropout mask, which the forward returns in the signs of s_dmask; None without dropout. Returns s_dmask and probabilities."""
    out, lse, s_dmask, rng_state = forward(dropout_p > 0)
    drops = dropout_p > 1e-3  # less drops nothing (CASES)
    assert rng_state.numel() == 2 * drops and (s_dmask.numel() > 0) == drops
    keep = ~s_dmask.signbit() if drops else None
    leaves = [t.detach().requires_grad_() for t in operands]
    right, right_lse, p = expected(leaves, keep)
    close(backend, out, right)
    close_lse(lse, right_lse)
    dout = backend.randn(*out.shape)
    before = dout.clone()
    given = dq, dk, dv = [t.new_full((*t.shape[:-2], t.shape[-1], t.shape[-2]), torch.nan).transpose(-1, -2) for t in operands]
    softmax_d = backward(dout, out, lse, given, rng_state)
    want = torch.autograd.grad(right, leaves, dout.to(right.dtype))
    for g, w in zip((dq, dk, dv), want):
        close(backend, g, w, LSE_ROUNDING)
    close_lse(softmax_d, (dout.double() * out.double()).sum(-1).transpose(-1, -2))
    assert torch.equal(dout, before), "an input changed"
    return s_dmask, p


@pytest.mark.parametrize("case", CASES)
@BACKENDS
def test_dense(backend, case):
    operands = backend.randn(2, 33, 4, 16), backend.randn(2, 40, 2, 16), backend.randn(2, 40, 2, 16)
    options, positional = split(backend, case, 2)

    def backward(dout, out, lse, given, rng_state):
        return _flash_attn_backward(dout, *operands, out, lse, *given, *positional, False, rng_state)

    s_dmask, p = check(
        backend, lambda leaves, keep: attention(*leaves, keep=keep, **options), operands,
        lambda return_softmax: _flash_attn_forward(*operands, *positional, return_softmax), backward, positional[0],
    )  # fmt: skip
    if s_dmask.numel():
        close(backend, s_dmask.abs(), p, LSE_ROUNDING)


@pytest.mark.parametrize("case", CASES)
@BACKENDS
def test_varlen(backend, case):
    lengths_q, lengths_k = LENGTHS
    operands, lengths = flash_attention.packed_leaves(backend, headdim_v=24)
    options, positional = split(backend, case, len(lengths_q))

    def backward(dout, out, lse, given, rng_state):
        return private._flash_attn_varlen_backward(dout, *operands, out, lse, *given, *lengths, *positional, True, rng_state)

    check(
        backend, lambda leaves, keep: packed(*leaves, lengths_q, lengths_k, keep=keep, **options), operands,
        lambda return_softmax: _flash_attn_varlen_forward(*operands, *lengths, *positional, return_softmax), backward, positional[0],
    )  # fmt: skip


@BACKENDS
def test_backward_without_room_for_a_gradient(backend):
    """None in place of a tensor for dq, dk or dv: the others are the same."""
    q, k, v = (backend.randn(1, 9, 2, 16) for _ in range(3))
    options = 0.0, 0.25, True, -1, -1, 0.0, None
    out, lse, *_ = _flash_attn_forward(q, k, v, *options, False)
    both, dk = (torch.empty_like(k) for _ in range(2))
    _flash_attn_backward(out, q, k, v, out, lse, torch.empty_like(q), both, torch.empty_like(v), *options, False)
    _flash_attn_backward(out, q, k, v, out, lse.transpose(1, 2).contiguous().transpose(1, 2), None, dk, None, *options, False)
    assert torch.equal(dk, both)


@on("cpu-fp32")
def test_neither_autograd_nor_autocast(backend):
    """The private functions record no gradient and ignore autocast, as flash-attn's do."""
    q = backend.randn(1, 16, 2, 16).requires_grad_()
    options = 0.0, 0.25, True, -1, -1, 0.0, None
    right, lse, *_ = _flash_attn_forward(q.detach(), q.detach(), q.detach(), *options, False)
    dq = [torch.empty_like(q) for _ in range(2)]
    _flash_attn_backward(right, q, q, q, right, lse, dq[0], None, None, *options, False)
    rows, lengths = q[0], (cu([16]), cu([16]), 16, 16)
    with torch.autocast(q.device.type, torch.bfloat16):
        found = [
            _flash_attn_forward(q, q, q, *options, False)[0],
            _flash_attn_varlen_forward(rows, rows, rows, *lengths, *options, False)[0][None],
            _flash_attn_varlen_forward(rows, q, q, *lengths, *options, False, backend.ints([0])[None])[0][None],
        ]
        _flash_attn_backward(right, q, q, q, right, lse, dq[1], None, None, *options, False)
    for out in found:
        assert not out.requires_grad and out.dtype == q.dtype
        torch.testing.assert_close(out, right)
    assert torch.equal(*dq)


@pytest.mark.parametrize("with_used", [False, True])
@BACKENDS
def test_padding_on_the_left_and_lengths_in_use(backend, with_used):
    """Keys before leftpad_k and after seqused_k, here NaN, do not count."""
    lengths_q, lengths_k, left = [3, 1, 7, 2], [9, 4, 12, 5], [2, 0, 11, 5]
    used = [7, 4, 12, 5] if with_used else lengths_k
    q, k, v = backend.randn(sum(lengths_q), 4, 16), backend.randn(sum(lengths_k), 2, 16), backend.randn(sum(lengths_k), 2, 16)
    seen = [slice(begin + a, begin + b) for begin, a, b in zip(cu(lengths_k).tolist(), left, used)]
    kept = [b - a for a, b in zip(left, used)]
    parts = (torch.cat([t[s] for s in seen]) for t in (k, v))
    right, right_lse, _ = packed(q, *parts, lengths_q, kept, causal=True, softmax_scale=0.25)
    outside = torch.ones(sum(lengths_k), dtype=torch.bool)
    for s in seen:
        outside[s] = False
    k[outside], v[outside] = torch.nan, torch.nan
    out, lse, *_ = _flash_attn_varlen_forward(
        q, k, v, cu(lengths_q, backend.device), cu(lengths_k, backend.device), 7, 12, 0.0, 0.25, True,
        leftpad_k=backend.ints(left), seqused_k=backend.ints(used) if with_used else None,
    )  # fmt: skip
    close(backend, out, right)
    close_lse(lse, right_lse)


@pytest.mark.parametrize("with_used", [False, True])
@BACKENDS
def test_pages(backend, with_used):
    """_flash_attn_varlen_forward with keys in pages of 16 tokens."""
    page, lengths_q, lengths_k = 16, [3, 1, 7], [17, 32, 9]
    q = backend.randn(sum(lengths_q), 4, 32)
    caches = [backend.randn(3, 2 * page, 2, 32) for _ in range(2)]
    (k_pages, table), (v_pages, _) = (in_pages(backend, cache, page) for cache in caches)
    k, v = (torch.cat([entry[:n] for entry, n in zip(cache, lengths_k)]) for cache in caches)
    right, right_lse, _ = packed(q, k, v, lengths_q, lengths_k, causal=True, window_size=(5, -1))
    # seqused_k takes the place of the lengths in cu_seqlens_k
    others = {"block_table": table} | ({"seqused_k": backend.ints(lengths_k)} if with_used else {})
    lengths = cu(lengths_q, backend.device), cu([32] * 3 if with_used else lengths_k, backend.device), 7, 32
    for num_splits, dropout_p in ((0, 0.0), (1, 0.0), (0, CASES["too little dropout"]["dropout_p"])):
        options = dropout_p, 32**-0.5, True, 5  # dropout_p, softmax_scale, causal, window_size_left
        results = _flash_attn_varlen_forward(q, k_pages, v_pages, *lengths, *options, num_splits=num_splits, **others)
        out, lse, s_dmask, rng_state = results
        close(backend, out, right)
        close_lse(lse, right_lse)
        assert s_dmask.numel() == rng_state.numel() == 0


@on("cpu-fp32")
def test_errors(backend):
    q = backend.randn(1, 9, 2, 16)
    options = 0.0, 0.25, True, -1, -1, 0.0, None
    out, lse, *_ = _flash_attn_forward(q, q, q, *options, False)
    into = [torch.zeros_like(q) for _ in range(3)]

    def backward(error, message, *given, dropout_p=0.0):
        before = [t.clone() for t in given if t is not None]
        refused(error, message, _flash_attn_backward, q, q, q, q, out, lse, *given, dropout_p, *options[1:], False)
        assert all(torch.equal(a, b) for a, b in zip(before, [t for t in given if t is not None]))

    refused(ValueError, r"k: got None, expected a tensor", _flash_attn_forward, q, None, q, *options, False)
    refused(ValueError, r"return_softmax: got True, expected False without dropout", _flash_attn_forward, q, q, q, *options, True)
    backward(ValueError, r"rng_state: got None, expected what the forward call returned", *into, dropout_p=0.5)
    message = r"dk: got shape \(1, 8, 2, 16\) of dtype torch.float32 on cpu, expected shape \(1, 9, 2, 16\) .*, as k, or None"
    backward(ValueError, message, into[0], into[1][:, 1:], None)
    backward(ValueError, r"dq: got .* of dtype torch.float64", into[0].double(), None, None)
    backward(ValueError, r"dk: got an expanded tensor", into[0], into[1][:, :1].expand_as(q), None)

    rows, lengths = q[0], (backend.ints([0, 9]), backend.ints([0, 9]), 9, 9, 0.0, 0.25, True)
    pages, table = backend.randn(1, 16, 2, 16), backend.ints([0])[None]

    def varlen(error, message, k=rows, **more):
        refused(error, message, _flash_attn_varlen_forward, rows, k, k, *lengths, **more)

    varlen(ValueError, r"leftpad_k: got shape \(2,\)", leftpad_k=backend.ints([0, 0]))
    for left, used, message in (
        (2, 10, r"seqused_k: got 10 \(entry 0\), expected a length from 0 to 9"),
        (4, 3, r"leftpad_k: got 4 \(entry 0\), expected a number from 0 to 3"),
        (-1, 3, r"leftpad_k: got -1 "),
    ):
        varlen(ValueError, message, leftpad_k=backend.ints([left]), seqused_k=backend.ints([used]))
    left = lengths[0][:1]
    longer = torch.cat((rows, rows))
    refused(ValueError, "v: got 18 rows, expected 9, as k", _flash_attn_varlen_forward, rows, rows, longer, *lengths, leftpad_k=left)
    for ends in ([0, 9, 4], [0, 5, 12]):  # impossible cu_seqlens_k beside cu_seqlens_q of two sequences
        arguments = rows, rows, rows, backend.ints([0, 4, 9]), backend.ints(ends), *lengths[2:]
        refused(ValueError, "cu_seqlens_k: got ", _flash_attn_varlen_forward, *arguments, leftpad_k=backend.ints([0, 0]))
    varlen(NotImplementedError, r"leftpad_k: got a tensor, expected None with block_table", pages, block_table=table, leftpad_k=left)
    varlen(NotImplementedError, r"num_splits > 1 is not supported .* got 2", pages, block_table=table, num_splits=2)
    varlen(NotImplementedError, r"return_softmax: got True", seqused_k=backend.ints([9]), return_softmax=True)
    refused(
        ValueError, r"dropout_p: got 0.5, expected 0", _flash_attn_varlen_forward,
        rows, pages, pages, *lengths[:4], 0.5, 0.25, True, block_table=table,
    )  # fmt: skip


@BACKENDS
def test_compiled_module(backend):
    """flash_attn_2_cuda's functions give the results of the private ones, written into the tensors that its arguments name."""
    q, k, v = backend.randn(2, 9, 4, 16), backend.randn(2, 11, 2, 16), backend.randn(2, 11, 2, 16)
    slopes = slopes_of(backend, 4)
    options, window = (0.0, 0.25), (5, 2, 0.0)  # dropout_p, softmax_scale; window_size_left, window_size_right, softcap
    right = _flash_attn_forward(q, k, v, *options, False, *window, slopes, False)
    into = torch.empty_like(q)
    out, lse, _, rng_state = compiled.fwd(q, k, v, into, slopes, *options, False, *window, False, None)
    assert out is into and torch.equal(out, right[0]) and torch.equal(lse, right[1])

    want = [torch.empty_like(t) for t in (q, k, v)]
    softmax_d = _flash_attn_backward(q, q, k, v, out, lse, *want, *options, False, *window, slopes, True, rng_state)
    dq = torch.empty_like(q)
    found = compiled.bwd(q, q, k, v, out, lse, dq, None, None, slopes, *options, False, *window, True, None, rng_state)
    assert found[0] is dq and all(map(torch.equal, found, (*want, softmax_d)))

    rows, lengths = [t.flatten(0, 1) for t in (q, k, v)], (cu([9, 9], backend.device), cu([11, 11], backend.device))
    into = torch.empty_like(rows[0])
    packed_out, packed_lse, _, rng_state = compiled.varlen_fwd(
        *rows, into, *lengths, None, None, None, slopes, 9, 11, *options, False, False, *window, False, None
    )
    assert packed_out is into
    close(backend, packed_out, out.flatten(0, 1))
    found = compiled.varlen_bwd(
        rows[0], *rows, packed_out, packed_lse, None, None, None, *lengths, slopes, 9, 11, *options, False, False, *window, True, None,
        rng_state,
    )  # fmt: skip
    for f, w in zip(found, want):
        close(backend, f, w.flatten(0, 1))

    left = backend.ints([0, 3])
    out, lse = compiled.fwd_kvcache(
        q, k, v, None, None, None, None, None, None, left, None, slopes, torch.empty_like(q), 0.25, False, *window, False, 0
    )
    close(backend, out[0], right[0][0])
    expected, *_ = attention(q[1:], k[1:, 3:], v[1:, 3:], softmax_scale=0.25, window_size=(5, 2), alibi_slopes=slopes)
    close(backend, out[1:], expected)

    def generator(function, *arguments):
        refused(NotImplementedError, "`generator` argument is no longer supported", function, *arguments)

    generator(compiled.fwd, q, k, v, None, None, *options, False, *window, False, torch.Generator())
    refused(ValueError, r"out: got shape \(1,\)", compiled.fwd, q, k, v, q.new_empty(1), None, *options, False, *window, False, None)


@on("cpu-fp32")
def test_compiled_module_checks_out_first(backend):
    """A wrong `out` is an error before anything is appended to a cache or drawn from the generator."""
    q, cache, new = backend.randn(1, 1, 2, 16), torch.zeros(2, 1, 32, 1, 16), backend.randn(1, 1, 1, 16)
    seqlens = backend.ints([4])
    state = torch.get_rng_state()
    for out in (q.new_empty(1), q.double(), q.to("meta"), q[:, :, :1].expand_as(q)):
        refused(
            ValueError, "out: got", compiled.fwd_kvcache, q, *cache, new, new, seqlens, None, None, None, None, None, None, out,
            0.25, True, -1, -1, 0.0, True, 0,
        )  # fmt: skip
        refused(ValueError, "out: got", compiled.fwd, q, q, q, out, None, 0.5, 0.25, True, -1, -1, 0.0, False, None)
    assert not cache.any() and torch.equal(state, torch.get_rng_state())
