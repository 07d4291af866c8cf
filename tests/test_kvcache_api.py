"""What is built on fwd_kvcache beside flash-attn's interface: cascades, anchored windows, and PyTorch's own door for flash attention."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

import reference
import volta_fa
from cached import Cached
from conftest import on, run_python
from volta_fa import anchored_window_attention, anchored_window_attention_with_kvcache, cascade_attention

BACKENDS = on("cpu-fp32", "cpu-fp64", "sim", "cuda")


def close(backend, found, expected):
    tolerance = {torch.float64: 1e-6, torch.float32: 2e-5}.get(backend.dtype, 4e-3)  # softmax_lse is fp32
    torch.testing.assert_close(found.double(), expected.double(), rtol=tolerance, atol=tolerance)


# ---- cascades --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"softcap": 4.0, "softmax_scale": 0.2}, {"sinks": True}], ids=str)
@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
@pytest.mark.parametrize("appends", [False, True], ids=["read", "append"])
@BACKENDS
def test_cascade(backend, appends, packed, options):
    """The same as with the shared pages at the beginning of every sequence's own."""
    backend.simulate()
    shared_pages, new = 3, 2 if appends else 0
    lengths = ((2, 48 + 9, new), (2, 48 + 17, new), (2, 48 + 4, new))
    problem = Cached(lengths, nheads=4, nheads_k=2, packed=packed).problem(backend)
    options = {**options, "sinks": backend.randn(4)} if options.get("sinks") else options
    table = problem.options["block_table"].clone()
    table[:, :shared_pages] = table[0, :shared_pages]
    own = {n: problem.options[n] for n in ("cu_seqlens_q", "max_seqlen_q") if n in problem.options}
    lengths = problem.options["cache_seqlens"]
    caches = problem.copy_of_cache(), problem.copy_of_cache()
    expected = torch.ops.volta_fa.fwd_kvcache(
        problem.q, *caches[0], *problem.new, cache_seqlens=lengths, block_table=table, is_causal=True, **own, **options
    )
    for shared_seqlen in (48, backend.ints([48])):
        found = cascade_attention(
            problem.q, *caches[1], table[0, :shared_pages].clone(), shared_seqlen, block_table=table[:, shared_pages:].contiguous(),
            cache_seqlens=lengths - 48, **dict(zip("kv", problem.new)), **own, **options,
        )  # fmt: skip
        for a, b in zip(found, expected):
            close(backend, a, b)
    for a, b in zip(caches[0], caches[1]):
        assert torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0))


@on("cpu-fp32")
def test_cascade_errors(backend):
    problem = Cached(((2, 9, 2), (2, 17, 2))).problem(backend)
    table, lengths = problem.options["block_table"], problem.options["cache_seqlens"]
    caches = problem.k_cache, problem.v_cache
    with pytest.raises(ValueError, match=r"shared_block_table: got shape \(2, 4\)"):
        cascade_attention(problem.q, *caches, table, 16, block_table=table, cache_seqlens=lengths)
    with pytest.raises(ValueError, match=r"v: got None"):
        cascade_attention(problem.q, *caches, table[0], 16, block_table=table, cache_seqlens=lengths, k=problem.new[0])
    with pytest.raises(ValueError, match=r"cache_seqlens: got 99"):
        cascade_attention(problem.q, *caches, table[0], 99, block_table=table, cache_seqlens=lengths)


# ---- PyTorch's door --------------------------------------------------------------------------------------------------

attention = pytest.importorskip("torch.nn.attention")
HAS_DOOR = hasattr(attention, "activate_flash_attention_impl")
# torch 2.10's leads in, and not out again
NEEDS_DOOR = pytest.mark.skipif(not hasattr(attention, "restore_flash_attention_impl"), reason="this torch has no door with a way back")


@pytest.fixture
def active():
    attention.activate_flash_attention_impl("VOLTA")
    yield
    attention.restore_flash_attention_impl()


def forwards(function):
    """What `function` returns, and how often the ops ran."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        result = function()
    names = [event.name for event in profile.events()]
    return result, {op: names.count(f"volta_fa::{op}") for op in ("fwd", "bwd", "fwd_kvcache")}


@NEEDS_DOOR
@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (5, 0), (4, 2)], ids=str)
@on("cpu-fp32", "cpu-fp64", "sim", "cuda")
def test_varlen_attn(backend, active, window):
    from torch.nn.attention.varlen import varlen_attn

    backend.simulate()
    lengths_q, lengths_k = [5, 33, 1], [20, 33, 2]
    cu_q, cu_k = (backend.ints([0, *torch.tensor(n).cumsum(0).tolist()]) for n in (lengths_q, lengths_k))
    q, k, v = (backend.randn(sum(n), 2, 32).requires_grad_() for n in (lengths_q, lengths_k, lengths_k))
    options = {"window_left": window[0], "window_right": window[1]}
    out, counts = forwards(lambda: varlen_attn(q, k, v, cu_q, cu_k, 33, 33, window_size=window))
    assert counts["fwd"] >= 1
    expected, _, _ = torch.ops.volta_fa.fwd(
        q, k, v, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, max_seqlen_q=33, max_seqlen_k=33, **options
    )  # fmt: skip
    assert torch.equal(out, expected)
    dout = backend.randn(*out.shape)
    for a, b in zip(torch.autograd.grad(out, (q, k, v), dout), torch.autograd.grad(expected, (q, k, v), dout)):
        close(backend, a, b)


@NEEDS_DOOR
@on("cpu-fp32", "sim", "cuda")
def test_flash_attention_forward(backend, active):
    """Dense, with what varlen_attn of this release does not pass on: lengths, slopes, dropout; and pages."""
    backend.simulate()
    q, k, v = backend.randn(2, 9, 4, 32), backend.randn(2, 40, 2, 32), backend.randn(2, 40, 2, 32)
    slopes, used = backend.randn(4).float().abs(), backend.ints([40, 13])
    aten = torch.ops.aten._flash_attention_forward
    out, lse, *_ = aten(q, k, v, None, None, 9, 40, 0.0, True, False, scale=0.2, alibi_slopes=slopes, seqused_k=used)
    expected = torch.ops.volta_fa.fwd(q, k, v, is_causal=True, softmax_scale=0.2, alibi_slopes=slopes, seqused_k=used)
    assert torch.equal(out, expected[0]) and torch.equal(lse, expected[1])
    _, _, rng_state, _, _ = aten(q, k, v, None, None, 9, 40, 0.3, True, False)
    assert rng_state.shape == (2,) and rng_state.dtype == torch.uint64
    with pytest.raises(NotImplementedError, match="return_debug_mask"):
        aten(q, k, v, None, None, 9, 40, 0.0, True, True)
    problem = Cached(((3, 9, 0), (3, 17, 0))).problem(backend)
    arguments = (problem.q, problem.k_cache, problem.v_cache, None, None, 3, 64, 0.0, True, False)
    pages = {"seqused_k": problem.options["cache_seqlens"], "block_table": problem.options["block_table"]}
    found, *_ = volta_fa.integrations.torch_flash_impl._forward(*arguments, **pages)
    assert torch.equal(found, torch.ops.volta_fa.fwd_kvcache(*arguments[:3], **problem.options)[0])
    into = torch.empty_like(problem.q)
    volta_fa.integrations.torch_flash_impl._forward_into(into, *arguments, **pages, num_splits=1)
    close(backend, into, found)


@NEEDS_DOOR
@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@on("cuda")
def test_sdpa_through_the_door(backend, active, layout):
    """Where PyTorch chooses flash attention it is ours, forward and backward, eager and compiled."""
    shape = (2, 65, 4, 64) if layout == "bshd" else (2, 4, 65, 64)
    q, k, v = (backend.randn(*shape) for _ in range(3))
    q, k, v = ((t.transpose(1, 2) if layout == "bshd" else t).requires_grad_() for t in (q, k, v))
    ref = reference.forward(*(t.detach().transpose(1, 2) for t in (q, k, v)), is_causal=True)
    for call in (torch.nn.functional.scaled_dot_product_attention, torch.compile(torch.nn.functional.scaled_dot_product_attention)):
        with attention.sdpa_kernel(attention.SDPBackend.FLASH_ATTENTION):
            out, counts = forwards(lambda call=call: call(q, k, v, is_causal=True))
            gradients = torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
        assert counts["fwd"] >= 1
        close(backend, out.transpose(1, 2), ref.out)
        assert all(g.shape == q.shape and g.isfinite().all() for g in gradients)


@pytest.mark.skipif(not HAS_DOOR, reason="this torch has no such door")
def test_a_program_that_stays_inside():
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


@NEEDS_DOOR
def test_the_name_is_known_and_nothing_is_active():
    assert "VOLTA" in attention.list_flash_attention_impls()
    assert attention.current_flash_attention_impl() is None
    attention.activate_flash_attention_impl("VOLTA")
    assert attention.current_flash_attention_impl() == "VOLTA"
    attention.restore_flash_attention_impl()
    q = torch.randn(1, 3, 1, 8)
    with pytest.raises(NotImplementedError):
        torch.ops.aten._flash_attention_forward(q, q, q, None, None, 3, 3, 0.0, True, False)


# ---- prefix-anchored windows, against a mask in fp64 -----------------------------------------------------------------


HEADS, KV_HEADS, HEADDIM = 4, 2, 64
#: queries, keys, anchors, window
SIZES = [(70, 70, 4, 20), (5, 90, 33, 0), (70, 70, 0, 9), (40, 50, 45, 12), (1, 64, 16, 30), (9, 9, 4, 100), (30, 31, 1, 29)]


def anchored(q: Tensor, k: Tensor, v: Tensor, anchors: int, window: int) -> Tensor:
    """Attention by a boolean mask, in fp64."""
    q, k, v = (t.double().transpose(1, 2) for t in (q, k, v))
    position = torch.arange(q.shape[2])[:, None] + k.shape[2] - q.shape[2]
    key = torch.arange(k.shape[2])
    mask = (key <= position) & ((key < anchors) | (key >= position - window))
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True).transpose(1, 2)


def drawn(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape, HEADDIM).to(dtype)


@pytest.fixture
def on_device(backend) -> Iterator[None]:
    """New tensors are where the backend runs."""
    with torch.device(backend.device):
        yield


@pytest.mark.usefixtures("on_device")
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@on("cpu-fp32", "sim", "cuda")
def test_anchored_window(backend, sizes):
    seqlen_q, seqlen_k, anchors, window = sizes
    backend.simulate()
    dtype = backend.dtype
    q, k, v = (drawn(2, n, h, dtype=dtype) for n, h in ((seqlen_q, HEADS), (seqlen_k, KV_HEADS), (seqlen_k, KV_HEADS)))
    out, lse = anchored_window_attention(q, k, v, anchor_tokens=anchors, window_left=window)
    assert (out - anchored(q, k, v, anchors, window)).abs().max() < (4e-3 if dtype == torch.float16 else 1e-5)
    assert out.dtype == dtype and lse.shape == (2, HEADS, seqlen_q) and lse.isfinite().all()


@pytest.mark.parametrize("sizes", SIZES[:4], ids=str)
def test_gradients_of_anchored_windows(sizes):
    seqlen_q, seqlen_k, anchors, window = sizes
    shapes = ((seqlen_q, HEADS), (seqlen_k, KV_HEADS), (seqlen_k, KV_HEADS))
    tensors = [drawn(1, n, h, dtype=torch.float64).requires_grad_() for n, h in shapes]
    dout = drawn(1, seqlen_q, HEADS, dtype=torch.float64)
    out, _ = anchored_window_attention(*tensors, anchor_tokens=anchors, window_left=window)
    found = torch.autograd.grad(out, tensors, dout)
    exact = torch.autograd.grad(anchored(*tensors, anchors, window), tensors, dout)
    for name, a, b in zip("qkv", found, exact):
        assert (a - b).abs().max() < 1e-5, name


@pytest.mark.usefixtures("on_device")
@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("seqlen_q", [1, 3])
@on("cpu-fp32", "sim", "cuda")
def test_decoding_with_an_anchored_window(backend, seqlen_q, paged):
    """Sequences shorter than the anchors, than the window, and longer than both."""
    backend.simulate()
    dtype = backend.dtype
    lengths, anchors, window, page = [3, 20, 40, 96], 18, 25, 16
    q = drawn(len(lengths), seqlen_q, HEADS, dtype=dtype)
    k, v = (drawn(len(lengths), 96, KV_HEADS, dtype=dtype) for _ in "kv")
    table = torch.randperm(len(lengths) * 6, dtype=torch.int32).view(len(lengths), 6) if paged else None
    caches = [k, v]
    if table is not None:
        caches = [torch.empty(len(lengths) * 6, page, KV_HEADS, HEADDIM, dtype=dtype) for _ in "kv"]
        for cache, t in zip(caches, (k, v)):
            cache[table.flatten().long()] = t.reshape(-1, page, KV_HEADS, HEADDIM)
    out, lse = anchored_window_attention_with_kvcache(
        q,
        *caches,
        anchor_tokens=anchors,
        window_left=window,
        cache_seqlens=torch.tensor(lengths, dtype=torch.int32),
        block_table=table,
    )
    for b, n in enumerate(lengths):
        exact = anchored(q[b : b + 1], k[b : b + 1, :n], v[b : b + 1, :n], anchors, window)
        assert (out[b : b + 1] - exact).abs().max() < (4e-3 if dtype == torch.float16 else 1e-5), n
    assert lse.isfinite().all()


def test_anchored_window_errors():
    q = drawn(1, 4, HEADS, dtype=torch.float32)
    with pytest.raises(ValueError, match="anchor_tokens: got -1"):
        anchored_window_attention(q, q, q, anchor_tokens=-1, window_left=2)
    with pytest.raises(ValueError, match="window_left: got -1"):
        anchored_window_attention(q, q, q, anchor_tokens=1, window_left=-1)
    with pytest.raises(ValueError, match="k: got seqlen 2, expected at least q's, 4"):
        anchored_window_attention(q, q[:, :2], q[:, :2], anchor_tokens=1, window_left=1)
    with pytest.raises(ValueError, match="q: got shape"):
        anchored_window_attention(q[0], q, q, anchor_tokens=1, window_left=1)


@pytest.mark.parametrize("window", [2**30, 2**31 + 20, 2**32 + 3])
def test_windows_beyond_every_length(window):
    q, k, v = (drawn(1, n, h, dtype=torch.float32) for n, h in ((2, HEADS), (32, KV_HEADS), (32, KV_HEADS)))
    lengths = {"cache_seqlens": torch.tensor([20], dtype=torch.int32)}
    out, lse = anchored_window_attention_with_kvcache(q, k, v, anchor_tokens=4, window_left=window, **lengths)
    plain, plain_lse = torch.ops.volta_fa.fwd_kvcache(q, k, v, is_causal=True, **lengths)
    torch.testing.assert_close(out, plain, rtol=0, atol=1e-6)
    torch.testing.assert_close(lse, plain_lse, rtol=0, atol=1e-6)
