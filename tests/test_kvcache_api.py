"""Tests of functions built on `fwd_kvcache` and `fwd`: cascade_attention, anchored windows, PyTorch's flash attention implementations.

Cascade attention reads pages of a prefix that all sequences share. An anchored window shows a query the first `anchor_tokens` keys, the
`window_left` keys before its own, and its own. torch.nn.attention.activate_flash_attention_impl("VOLTA"), from torch 2.10 on, makes
PyTorch's flash attention operators run volta_fa: PyTorch's registry of implementations. A `Cached` problem (cached.py) has lengths, a cache
in pages of 16 tokens, the operator's `options` and `new`: k and v to append. `on(...)` lists backends: CPU, simulator (`sim`), GPU."""

from __future__ import annotations

import pytest
import torch
import torch.nn.attention as attention
from torch import Tensor

import reference
import volta_fa
from cached import Cached, check_sequence  # check_sequence: compares one sequence's results with fp64
from conftest import Case, check_form, judge, on, run_python  # check_form: shapes and strides. judge: errors within budgets
from flash_attention import refused  # checks that a call raises this error, with a message of one line
from volta_fa import anchored_window_attention, anchored_window_attention_with_kvcache, cascade_attention
from volta_fa.check.cache_cases import has_scales

#: Allowed error of numbers near 1: four eps of fp16, 170 of fp32; beside fp64 that of softmax_lse, which is fp32.
TOLERANCE = {torch.float64: 1e-6, torch.float32: 2e-5, torch.float16: 4e-3}


def close(backend, found, expected):
    """Compares with TOLERANCE, relative and absolute."""
    tolerance = TOLERANCE[backend.dtype]
    torch.testing.assert_close(found.double(), expected.double(), rtol=tolerance, atol=tolerance)


# ---- cascades --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"softcap": 4.0, "softmax_scale": 0.2}, {"sinks": True}], ids=str)
@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
@pytest.mark.parametrize("appends", [False, True], ids=["read", "append"])
@on("cpu-fp32", "cpu-fp64", "sim", "cuda")
def test_cascade(backend, appends, packed, options):
    """Gives the result of fwd_kvcache with the shared pages at the beginning of every sequence's own block table."""
    backend.simulate()
    shared_pages, shared, new = 3, 48, 2 if appends else 0  # 48 tokens: three pages of 16
    lengths = ((2, shared + 9, new), (2, shared + 17, new), (2, shared + 4, new))  # queries, cached and new tokens of each sequence
    problem = Cached(lengths, nheads=4, nheads_k=2, packed=packed).problem(backend)
    options = {**options, "sinks": backend.randn(4)} if options.get("sinks") else options
    table = problem.options["block_table"].clone()
    table[:, :shared_pages] = table[0, :shared_pages]
    own = {n: problem.options[n] for n in ("cu_seqlens_q", "max_seqlen_q") if n in problem.options} | options
    lengths = problem.options["cache_seqlens"]
    caches = problem.copy_of_cache(), problem.copy_of_cache()
    whole = {"cache_seqlens": lengths, "block_table": table, "is_causal": True}
    expected = torch.ops.volta_fa.fwd_kvcache(problem.q, *caches[0], *problem.new, **whole, **own)
    for shared_seqlen in (shared, backend.ints([shared])):
        found = cascade_attention(
            problem.q, *caches[1], table[0, :shared_pages].clone(), shared_seqlen, block_table=table[:, shared_pages:].contiguous(),
            cache_seqlens=lengths - shared, **dict(zip("kv", problem.new)), **own,
        )  # fmt: skip
        for a, b in zip(found, expected):
            close(backend, a, b)
    torch.testing.assert_close(*caches, rtol=0, atol=0, equal_nan=True)  # NaN is where no token is


@on("cpu-fp32")
def test_cascade_errors(backend):
    problem = Cached(((2, 9, 2), (2, 17, 2))).problem(backend)  # queries, cached and new tokens
    table, lengths = problem.options["block_table"], problem.options["cache_seqlens"]
    caches, before = (problem.k_cache, problem.v_cache), problem.copy_of_cache()
    own = {"block_table": table, "cache_seqlens": lengths}
    refused(ValueError, r"shared_block_table: got shape \(2, 4\)", cascade_attention, problem.q, *caches, table, 16, **own)
    refused(ValueError, r"k_cache: got shape \(8,\)", cascade_attention, problem.q, torch.ones(8), caches[1], table[0], 16, **own)
    refused(ValueError, "v: got None", cascade_attention, problem.q, *caches, table[0], 16, **own, k=problem.new[0])
    refused(ValueError, r"q: got shape \(2, 2, 64\)", cascade_attention, problem.q[0], *caches, table[0], 16, **own)
    pages, new = table[0], dict(zip("kv", problem.new))
    for shared_seqlen in (99, -1, 30.5, 2**40):
        refused(
            ValueError, f"shared_seqlen: got {shared_seqlen}", cascade_attention, problem.q, *caches, pages, shared_seqlen, **own, **new
        )
    many = backend.ints([99])
    refused(ValueError, " shared_seqlen: got 99 .* in shared_block_table", cascade_attention, problem.q, *caches, pages, many, **own, **new)
    refused(ValueError, " shared_block_table: got dtype", cascade_attention, problem.q, *caches, pages.long(), 16, **own, **new)
    for a, b in zip(caches, before):
        assert torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0)), "nothing was appended"


# ---- PyTorch's registry of flash attention implementations -----------------------------------------------------------

HAS_REGISTRY = hasattr(attention, "activate_flash_attention_impl")
# torch 2.10 cannot restore its own implementation
NEEDS_RESTORE = pytest.mark.skipif(not hasattr(attention, "restore_flash_attention_impl"), reason="this torch cannot restore its own")


@pytest.fixture
def active():
    """PyTorch's flash attention operators run volta_fa during the test."""
    attention.activate_flash_attention_impl("VOLTA")
    yield
    attention.restore_flash_attention_impl()


def runs_fwd(function):
    """Returns what `function` returns. Checks that it runs volta_fa::fwd."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        result = function()
    assert "volta_fa::fwd" in {event.name for event in profile.events()}
    return result


@NEEDS_RESTORE
@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (5, 0), (4, 2)], ids=str)
@on("cpu-fp32", "cpu-fp64", "sim", "cuda")
def test_varlen_attn(backend, active, window):
    """PyTorch's function for packed sequences gives bitwise the result of volta_fa::fwd."""
    from torch.nn.attention.varlen import varlen_attn

    backend.simulate()
    lengths_q, lengths_k = [5, 33, 1], [20, 33, 2]
    cu_q, cu_k = (backend.ints([0, *torch.tensor(n).cumsum(0).tolist()]) for n in (lengths_q, lengths_k))
    q, k, v = (backend.randn(sum(n), 2, 32).requires_grad_() for n in (lengths_q, lengths_k, lengths_k))
    out = runs_fwd(lambda: varlen_attn(q, k, v, cu_q, cu_k, 33, 33, window_size=window))
    lengths = {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k, "max_seqlen_q": 33, "max_seqlen_k": 33}
    expected, _, _ = torch.ops.volta_fa.fwd(q, k, v, **lengths, window_left=window[0], window_right=window[1])
    assert torch.equal(out, expected)
    dout = backend.randn(*out.shape)
    for a, b in zip(torch.autograd.grad(out, (q, k, v), dout), torch.autograd.grad(expected, (q, k, v), dout)):
        close(backend, a, b)


@NEEDS_RESTORE
@on("cpu-fp32", "sim", "cuda")
def test_flash_attention_forward(backend, active):
    """aten::_flash_attention_forward with arguments that varlen_attn does not pass: lengths, ALiBi slopes, dropout, and pages."""
    backend.simulate()
    q, k, v = backend.randn(2, 9, 4, 32), backend.randn(2, 40, 2, 32), backend.randn(2, 40, 2, 32)
    slopes, used = backend.randn(4).float().abs(), backend.ints([40, 13])
    aten = torch.ops.aten._flash_attention_forward
    # by position: q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, is_causal, return_debug_mask
    out, lse, *_ = aten(q, k, v, None, None, 9, 40, 0.0, True, False, scale=0.2, alibi_slopes=slopes, seqused_k=used)
    expected = torch.ops.volta_fa.fwd(q, k, v, is_causal=True, softmax_scale=0.2, alibi_slopes=slopes, seqused_k=used)
    assert torch.equal(out, expected[0]) and torch.equal(lse, expected[1])
    _, _, rng_state, _, _ = aten(q, k, v, None, None, 9, 40, 0.3, True, False)
    assert rng_state.shape == (2,) and rng_state.dtype == torch.uint64
    refused(NotImplementedError, "return_debug_mask", aten, q, k, v, None, None, 9, 40, 0.0, True, True)
    # two sequences of 3 queries over a paged cache, with which aten calls these functions of volta_fa
    problem = Cached(((3, 9, 0), (3, 17, 0))).problem(backend)
    arguments = (problem.q, problem.k_cache, problem.v_cache, None, None, 3, 64, 0.0, True, False)
    pages = {"seqused_k": problem.options["cache_seqlens"], "block_table": problem.options["block_table"]}
    found, *_ = volta_fa.integrations.torch_flash_impl._forward(*arguments, **pages)
    assert torch.equal(found, torch.ops.volta_fa.fwd_kvcache(*arguments[:3], **problem.options)[0])
    into = torch.empty_like(problem.q)
    volta_fa.integrations.torch_flash_impl._forward_into(into, *arguments, **pages, num_splits=1)
    close(backend, into, found)


@NEEDS_RESTORE
@on("cpu-fp32", "sim", "cuda")
def test_flash_attention_backward_of_a_dense_call(backend, active):
    """aten::_flash_attention_backward without offsets of sequences: autograd passes None, other callers empty tensors."""
    backend.simulate()
    q, k, v = leaves = [backend.randn(2, n, heads, 32).requires_grad_() for n, heads in ((9, 4), (40, 2), (40, 2))]
    dout = backend.randn(2, 9, 4, 32)
    # after q, k, v: cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, is_causal, return_debug_mask
    out, lse, rng_state, unused, _ = torch.ops.aten._flash_attention_forward(*leaves, None, None, 9, 40, 0.0, True, False)
    expected = torch.autograd.grad(torch.ops.volta_fa.fwd(*leaves, is_causal=True)[0], leaves, dout)
    of_none = torch.autograd.grad(out, leaves, dout)
    empty = backend.ints([])
    saved = (t.detach() for t in (dout, q, k, v, out, lse))
    of_empty = torch.ops.aten._flash_attention_backward(*saved, empty, empty, 9, 40, 0.0, True, rng_state, unused)
    for found in (of_none, of_empty):
        for a, b in zip(found, expected):
            close(backend, a, b)


@NEEDS_RESTORE
@pytest.mark.parametrize("layout", ["bshd", "bhsd"])  # b: batch, s: seqlen, h: heads, d: headdim
@on("cuda")
def test_sdpa_runs_the_active_implementation(backend, active, layout):
    """If PyTorch chooses flash attention it runs volta_fa, forward and backward, eager and compiled."""
    shape = (2, 65, 4, 64) if layout == "bshd" else (2, 4, 65, 64)
    q, k, v = (backend.randn(*shape) for _ in range(3))
    q, k, v = ((t.transpose(1, 2) if layout == "bshd" else t).requires_grad_() for t in (q, k, v))
    ref = reference.forward(*(t.detach().transpose(1, 2) for t in (q, k, v)), is_causal=True)
    for call in (torch.nn.functional.scaled_dot_product_attention, torch.compile(torch.nn.functional.scaled_dot_product_attention)):
        with attention.sdpa_kernel(attention.SDPBackend.FLASH_ATTENTION):
            out = runs_fwd(lambda call=call: call(q, k, v, is_causal=True))
            gradients = torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
        close(backend, out.transpose(1, 2), ref.out)
        assert all(g.shape == q.shape and g.isfinite().all() for g in gradients)


@pytest.mark.skipif(not HAS_REGISTRY, reason="this torch has no registry")
def test_a_program_that_never_restores_pytorch():
    """Activates VOLTA, calls varlen_attn and exits, in a process of its own: torch 2.10 has no function that restores."""
    code = """
        import torch, volta_fa
        from torch.nn.attention import activate_flash_attention_impl
        from torch.nn.attention.varlen import varlen_attn

        activate_flash_attention_impl("VOLTA")
        q, k, v = torch.randn(3, 9, 2, 16).unbind()
        lengths = torch.tensor([0, 4, 9], dtype=torch.int32)
        expected, *_ = torch.ops.volta_fa.fwd(q, k, v, cu_seqlens_q=lengths, cu_seqlens_k=lengths, max_seqlen_q=5, max_seqlen_k=5)
        print(torch.equal(varlen_attn(q, k, v, lengths, lengths, 5, 5), expected))
    """
    assert run_python(code) == "True"


@NEEDS_RESTORE
def test_importing_registers_the_name_and_activates_nothing():
    assert "VOLTA" in attention.list_flash_attention_impls()
    assert attention.current_flash_attention_impl() is None
    attention.activate_flash_attention_impl("VOLTA")
    try:
        assert attention.current_flash_attention_impl() == "VOLTA"
    finally:
        attention.restore_flash_attention_impl()
    q = torch.randn(1, 3, 1, 8)
    with pytest.raises(NotImplementedError):
        torch.ops.aten._flash_attention_forward(q, q, q, None, None, 3, 3, 0.0, True, False)


# ---- anchored windows, against a mask in fp64 ------------------------------------------------------------------------

#: queries, keys, anchors, window
SIZES = [(70, 70, 4, 20), (5, 90, 33, 0), (70, 70, 0, 9), (40, 50, 45, 12), (1, 64, 16, 30), (9, 9, 4, 100), (30, 31, 1, 29)]
#: (queries, keys) of packed sequences: prompts, a chunk, several new tokens, decoding, without queries, without anchors, odd lengths.
PACKED = ((37, 37), (0, 5), (5, 61), (1, 3), (19, 90), (1, 96), (0, 0), (3, 44))
#: Heads of all problems.
HEADS = {"nheads": 4, "nheads_k": 2}


def shown(seqlen_q: int, seqlen_k: int, anchors: int, window: int) -> Tensor:
    """Returns which keys an anchored window shows, bool (seqlen_q, seqlen_k)."""
    position, key = torch.arange(seqlen_q)[:, None] + seqlen_k - seqlen_q, torch.arange(seqlen_k)
    return (key <= position) & ((key < anchors) | (key >= position - window))


def masked(lengths, anchors: int, window: int, device) -> Tensor:
    """Returns `shown` of each of these (queries, keys), bool (sequences, 1, longest queries, longest keys)."""
    seen = torch.zeros(len(lengths), 1, *map(max, zip(*lengths)), dtype=torch.bool)
    for of_sequence, (n, m) in zip(seen, lengths):
        of_sequence[0, :n, :m] = shown(n, m, anchors, window)
    return seen.to(device)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@on("cpu-fp32", "sim", "cuda")
def test_anchored_window(backend, sizes):
    *lengths, anchors, window = sizes
    q, k, v, _ = Case(*lengths, **HEADS).inputs(backend)
    backend.simulate()
    out, lse = anchored_window_attention(q, k, v, anchor_tokens=anchors, window_left=window)
    check_form(q, 64, out, lse)
    exact = reference.exact(q, k, v, attn_bias=masked([lengths], anchors, window, q.device))
    judge(backend, exact.forward(), {"out": out, "softmax_lse": lse})


@pytest.mark.parametrize("sizes", SIZES[:4], ids=str)
@on("cpu-fp64")
def test_gradients_of_anchored_windows(backend, sizes):
    *lengths, anchors, window = sizes
    *tensors, dout = Case(*lengths, **HEADS, batch=1).inputs(backend)
    out, _ = anchored_window_attention(*(t.requires_grad_() for t in tensors), anchor_tokens=anchors, window_left=window)
    exact = reference.backward(dout, *tensors, attn_bias=masked([lengths], anchors, window, "cpu"))
    for a, b in zip(torch.autograd.grad(out, tensors, dout), exact):
        close(backend, a, b)


@pytest.mark.parametrize("anchors,window", [(4, 20), (33, 0), (0, 9), (18, 25), (4, 100)])
@on("cpu-fp32", "sim", "cuda")
def test_packed_anchored_window(backend, anchors, window):
    """Sequences of any lengths in one call, without a cache."""
    case = Case(lengths=PACKED, **HEADS)
    (q, k, v, _), lengths = case.inputs(backend), case.tensors(backend)
    backend.simulate()
    out, lse = anchored_window_attention(q, k, v, anchor_tokens=anchors, window_left=window, **lengths)
    check_form(q, 64, out, lse)
    exact = reference.exact(q, k, v, attn_bias=masked(PACKED, anchors, window, q.device), **lengths)
    judge(backend, exact.forward(), {"out": out, "softmax_lse": lse})


def over_a_cache(backend, lengths, paged, **options):
    """Draws a problem of these (queries, keys), and returns it with the options of anchored_window_attention_with_kvcache. Entries of the
    cache that no token occupies are NaN."""
    problem = Cached(tuple((n, m, 0) for n, m in lengths), **HEADS, page=16 if paged else 0, **options).problem(backend)
    others = ("is_causal", "softmax_scale", "num_splits", *problem.case.score_numbers)
    return problem, {name: value for name, value in problem.options.items() if name not in others}


def check_windows(backend, problem, options, anchors, window, is_dequantized=False):
    """Checks a call over a cache, each sequence with its mask."""
    backend.simulate()
    options = options | {"anchor_tokens": anchors, "window_left": window}
    out, lse = anchored_window_attention_with_kvcache(problem.q, problem.k_cache, problem.v_cache, **options)
    check_form(problem.q, 64, out, lse)
    for b, (n, m, _) in enumerate(problem.case.lengths):
        if n:
            mask = {"is_causal": False, "attn_bias": shown(n, m, anchors, window)[None, None].to(out.device)}
            check_sequence(backend, problem, b, out, lse, problem.k_cache, problem.v_cache, is_dequantized, **mask)


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("seqlen_q", [1, 3])
@on("cpu-fp32", "sim", "cuda")
def test_decoding_with_an_anchored_window(backend, seqlen_q, paged):
    """Sequences shorter than the anchors, than the window, and longer than both."""
    check_windows(backend, *over_a_cache(backend, [(seqlen_q, n) for n in (3, 20, 40, 96)], paged), 18, 25)


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("anchors,window", [(4, 20), (33, 0), (18, 25), (4, 100)])
@on("cpu-fp32", "sim", "cuda")
def test_packed_queries_with_an_anchored_window(backend, anchors, window, paged):
    """Packed queries over a cache: prompts, chunks, several new tokens and decoding in one call."""
    check_windows(backend, *over_a_cache(backend, PACKED, paged, packed=True), anchors, window)


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("kv_dtype", ["int8", "int4", "int8k_int4v", "fp8_e4m3"])
@on("cpu-fp32", "sim", "cuda")
def test_anchored_window_of_a_quantized_cache(backend, kv_dtype, paged):
    """Codes and scales of no token stand for NaN."""
    descale = "" if has_scales(kv_dtype) else "h"
    problem, options = over_a_cache(backend, PACKED, paged, packed=True, kv_dtype=kv_dtype, descale=descale)
    check_windows(backend, problem, options, 18, 25, is_dequantized=backend.kernels)
    caches, options = (problem.k_cache, problem.v_cache), options | {"anchor_tokens": 18, "window_left": 25}
    options["k_descale"] = torch.ones(len(PACKED), 2, device=backend.device)
    message = r"k_descale: got shape \(8, 2\), expected \(1\) or \(nheads_k\)"
    refused(ValueError, message, anchored_window_attention_with_kvcache, problem.q, *caches, **options)


def unchecked(backend, anchors, window):
    """Returns a problem of PACKED over pages, and a function that calls it with other options. The call does not check lengths, as on a
    GPU."""
    backend.monkeypatch.setenv("VOLTA_FA_CHECK_LENGTHS", "0")
    problem, options = over_a_cache(backend, PACKED, True, packed=True)
    backend.simulate()
    tensors, options = (problem.q, problem.k_cache, problem.v_cache), options | {"anchor_tokens": anchors, "window_left": window}
    return problem, lambda **changed: anchored_window_attention_with_kvcache(*tensors, **options | changed)


@on("sim", "cuda")
def test_anchors_on_a_page_that_does_not_exist(backend):
    """Rows that see such anchors are NaN, and all others right."""
    problem, call = unchecked(backend, 4, 2)
    right, _ = call()
    sequence = PACKED.index((1, 96))  # its query sees the anchors on page 0, and a window far from it
    rows = torch.arange(len(problem.q), device=backend.device) == problem.cu_q[sequence]
    for page in (-1, 10**6):
        table = problem.options["block_table"].clone()
        table[sequence, 0] = page
        out, _ = call(block_table=table)
        assert out[rows].isnan().all()
        close(backend, out[~rows], right[~rows])


@on("sim", "cuda")
def test_unchecked_lengths_of_anchored_windows(backend):
    """Invalid lengths give NaN in rows of their own sequences. All other rows are right."""
    problem, call = unchecked(backend, 18, 25)
    right, _ = call()
    row, room = problem.cu_q, 16 * problem.options["block_table"].shape[1]  # tokens of a table
    for sequence, wrong in ((0, -1), (2, 2**31 - 1), (4, -(2**31)), (5, room + 1)):
        cache_seqlens = problem.options["cache_seqlens"].clone()
        cache_seqlens[sequence] = wrong
        out, lse = call(cache_seqlens=cache_seqlens)
        own = torch.zeros(len(out), dtype=torch.bool, device=out.device)
        own[row[sequence] : row[sequence + 1]] = True
        assert out[own].isnan().all() and lse[:, own].isnan().all(), wrong
        close(backend, out[~own], right[~own])
    case = Case(lengths=PACKED, **HEADS)
    (q, k, v, _), lengths = case.inputs(backend), case.tensors(backend)
    # element `at` of cu_seqlens (9 starts and ends of 8 sequences) is wrong
    for at, wrong in ((3, -9), (3, 2**31 - 1), (5, 10**6), (8, 10**6), (0, -5)):
        starts, ends = lengths["cu_seqlens_q"].clone(), lengths["cu_seqlens_k"].clone()
        starts[at] = wrong
        out, _ = call(cu_seqlens_q=starts)
        assert out.shape == q.shape
        if at < 5:  # sequences from 5 on begin at a right element
            close(backend, out[row[5] :], right[row[5] :])
        ends[at] = wrong
        out, _ = anchored_window_attention(q, k, v, anchor_tokens=18, window_left=25, **lengths | {"cu_seqlens_k": ends})
        assert out[row[max(at - 1, 0)] : row[max(at, 1)]].isnan().all(), wrong  # the sequence that ends there, or the first


def test_packed_anchored_windows_wait_for_nothing():
    """No value is read on the host: meta tensors have none, and reading one raises."""
    with torch.device("meta"):
        q, k, cache = torch.empty(9, 4, 64), torch.empty(30, 2, 64), torch.empty(7, 16, 2, 64)
        cu_seqlens, table = torch.empty(3, dtype=torch.int32), torch.empty(2, 3, dtype=torch.int32)
    options = {"anchor_tokens": 4, "window_left": 6, "cu_seqlens_q": cu_seqlens, "max_seqlen_q": 5}
    for out, lse in (
        anchored_window_attention(q, k, k, **options, cu_seqlens_k=cu_seqlens, max_seqlen_k=20),
        anchored_window_attention_with_kvcache(q, cache, cache, **options, cache_seqlens=cu_seqlens[:2], block_table=table),
    ):
        assert out.shape == q.shape and lse.shape == (4, 9)


def test_anchored_window_errors():
    def fails(message, *tensors, function=anchored_window_attention, error=ValueError, anchor_tokens=1, window_left=2, **options):
        refused(error, message, function, *tensors, anchor_tokens=anchor_tokens, window_left=window_left, **options)

    q = torch.randn(1, 4, 4, 64)
    fails("anchor_tokens: got -1", q, q, q, anchor_tokens=-1)
    fails("anchor_tokens: got 1.5", q, q, q, anchor_tokens=1.5)
    fails("window_left: got -1", q, q, q, window_left=-1)
    fails("k: got seqlen 2, expected at least q's, 4", q, q[:, :2], q[:, :2], window_left=1)
    fails("q: got shape", q[0], q, q, window_left=1)
    packed = {"cu_seqlens_q": torch.tensor([0, 4], dtype=torch.int32), "max_seqlen_q": 4}
    of_cache = {"function": anchored_window_attention_with_kvcache, "cache_seqlens": packed["cu_seqlens_q"][1:]}
    fails(r"q: got shape \(1, 4, 4, 64\), expected \(total_q, nheads, headdim\) with cu_seqlens_q", q, q, q, **of_cache, **packed)
    fails("cu_seqlens_k: got None, expected one, as for cu_seqlens_q", q[0], q[0], q[0], **packed)
    fails(r"q: got shape \(4, 4, 64\), expected \(batch, .*, or cu_seqlens_q", q[0], q[0], q[0])
    packed |= {"cu_seqlens_k": packed["cu_seqlens_q"], "max_seqlen_k": 4, "error": NotImplementedError}
    fails("cu_seqlens_q: got a tensor, expected None where a gradient is needed", q[0].requires_grad_(), q[0], q[0], **packed)


@pytest.mark.parametrize("anchors, window", [(4, 2**30), (4, 2**31 + 20), (4, 2**32 + 3), (4, 2**63), (2**31, 5), (2**63, 2**63)], ids=str)
def test_windows_beyond_every_length(anchors, window):
    """Windows and anchors larger than any length, also than an int32 or int64, count as no window: over a cache, packed and dense."""
    q, k, v = torch.randn(1, 2, 4, 64), torch.randn(1, 20, 2, 64), torch.randn(1, 20, 2, 64)
    options = {"anchor_tokens": anchors, "window_left": window}
    lengths = {"cache_seqlens": torch.tensor([20], dtype=torch.int32)}
    cu_seqlens_q, cu_seqlens_k = (torch.tensor([0, n], dtype=torch.int32) for n in (2, 20))
    packed = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k, "max_seqlen_q": 2, "max_seqlen_k": 20}
    plain, plain_lse = torch.ops.volta_fa.fwd_kvcache(q, k, v, is_causal=True, **lengths)
    for out, lse in (
        anchored_window_attention_with_kvcache(q, k, v, **options, **lengths),
        anchored_window_attention(q[0], k[0], v[0], **options, **packed),
        anchored_window_attention(q, k, v, **options),
    ):
        torch.testing.assert_close(out.view_as(plain), plain, rtol=0, atol=1e-6)
        torch.testing.assert_close(lse.view_as(plain_lse), plain_lse, rtol=0, atol=1e-6)
