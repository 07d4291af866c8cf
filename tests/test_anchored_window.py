"""Prefix-anchored windows against a mask in fp64: forward, gradients and decoding, on the CPU and in the simulator."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from conftest import on
from volta_fa import anchored_window_attention, anchored_window_attention_with_kvcache

HEADS, KV_HEADS, HEADDIM = 4, 2, 64
#: queries, keys, anchors, window
SIZES = [(70, 70, 4, 20), (5, 90, 33, 0), (70, 70, 0, 9), (40, 50, 45, 12), (1, 64, 16, 30), (9, 9, 4, 100), (30, 31, 1, 29)]


def expected(q: Tensor, k: Tensor, v: Tensor, anchors: int, window: int) -> Tensor:
    """Attention by a boolean mask, in fp64."""
    q, k, v = (t.double().transpose(1, 2) for t in (q, k, v))
    position = torch.arange(q.shape[2])[:, None] + k.shape[2] - q.shape[2]
    key = torch.arange(k.shape[2])
    mask = (key <= position) & ((key < anchors) | (key >= position - window))
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True).transpose(1, 2)


def random(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape, HEADDIM).to(dtype)


@pytest.fixture
def on_device(backend) -> Iterator[None]:
    """New tensors are where the backend runs."""
    with torch.device(backend.device):
        yield


@pytest.mark.usefixtures("on_device")
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@on("cpu-fp32", "sim", "cuda")
def test_forward(backend, sizes):
    seqlen_q, seqlen_k, anchors, window = sizes
    backend.simulate()
    dtype = backend.dtype
    q, k, v = (random(2, n, h, dtype=dtype) for n, h in ((seqlen_q, HEADS), (seqlen_k, KV_HEADS), (seqlen_k, KV_HEADS)))
    out, lse = anchored_window_attention(q, k, v, anchor_tokens=anchors, window_left=window)
    assert (out - expected(q, k, v, anchors, window)).abs().max() < (4e-3 if dtype == torch.float16 else 1e-5)
    assert out.dtype == dtype and lse.shape == (2, HEADS, seqlen_q) and lse.isfinite().all()


@pytest.mark.parametrize("sizes", SIZES[:4], ids=str)
def test_gradients(sizes):
    seqlen_q, seqlen_k, anchors, window = sizes
    shapes = ((seqlen_q, HEADS), (seqlen_k, KV_HEADS), (seqlen_k, KV_HEADS))
    tensors = [random(1, n, h, dtype=torch.float64).requires_grad_() for n, h in shapes]
    dout = random(1, seqlen_q, HEADS, dtype=torch.float64)
    out, _ = anchored_window_attention(*tensors, anchor_tokens=anchors, window_left=window)
    found = torch.autograd.grad(out, tensors, dout)
    exact = torch.autograd.grad(expected(*tensors, anchors, window), tensors, dout)
    for name, a, b in zip("qkv", found, exact):
        assert (a - b).abs().max() < 1e-5, name


@pytest.mark.usefixtures("on_device")
@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("seqlen_q", [1, 3])
@on("cpu-fp32", "sim", "cuda")
def test_decoding(backend, seqlen_q, paged):
    """Sequences shorter than the anchors, than the window, and longer than both."""
    backend.simulate()
    dtype = backend.dtype
    lengths, anchors, window, page = [3, 20, 40, 96], 18, 25, 16
    q = random(len(lengths), seqlen_q, HEADS, dtype=dtype)
    k, v = (random(len(lengths), 96, KV_HEADS, dtype=dtype) for _ in "kv")
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
        exact = expected(q[b : b + 1], k[b : b + 1, :n], v[b : b + 1, :n], anchors, window)
        assert (out[b : b + 1] - exact).abs().max() < (4e-3 if dtype == torch.float16 else 1e-5), n
    assert lse.isfinite().all()


def test_errors():
    q = random(1, 4, HEADS, dtype=torch.float32)
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
    q, k, v = (random(1, n, h, dtype=torch.float32) for n, h in ((2, HEADS), (32, KV_HEADS), (32, KV_HEADS)))
    lengths = {"cache_seqlens": torch.tensor([20], dtype=torch.int32)}
    out, lse = anchored_window_attention_with_kvcache(q, k, v, anchor_tokens=4, window_left=window, **lengths)
    plain, plain_lse = torch.ops.volta_fa.fwd_kvcache(q, k, v, is_causal=True, **lengths)
    torch.testing.assert_close(out, plain, rtol=0, atol=1e-6)
    torch.testing.assert_close(lse, plain_lse, rtol=0, atol=1e-6)
