"""softmax_lse near 0: its absolute error. Relative tolerances, as those of the other tests, say little there.

lse is exact to a few roundings of the scores' own size. FlashMLA's tests allow 1e-6, and so do these."""

from __future__ import annotations

import math

import pytest
import torch

from conftest import Backend, on

TOLERANCE = 1e-6
#: Keys of a row, and which one has most of the probability: none, or one that comes after the row maximum is set.
KEYS = [(1, None), (2, None), (5, None), (33, None), (150, 140)]
ROWS = 40
each_gpu = pytest.mark.parametrize("gpu", ["v100", "t4"])
each_length = pytest.mark.parametrize("keys,late", KEYS, ids=[f"{n}-keys" if late is None else f"{n}-keys-late" for n, late in KEYS])


def on_gpu(backend: Backend, gpu: str) -> None:
    """Takes a family of kernels. Other backends than the simulator run once."""
    if backend.machine == "sim":
        backend.monkeypatch.setenv("VOLTA_FA_SIM_GPU", gpu)
    elif gpu != "v100":
        pytest.skip("the simulator alone has several GPUs")


def near_zero(backend: Backend, headdim: int, keys: int, late: int | None, nheads: int = 2):
    """Returns q (1, ROWS, nheads, headdim) and k (1, keys, 1, headdim), whose rows have an lse near 0."""
    q, k = backend.randn(1, ROWS, nheads, headdim, spread=0.2), backend.randn(1, keys, 1, headdim, spread=0.2)
    # one column adds the same number to all scores of a key
    scores = torch.full((keys,), -math.log(keys))
    if late is not None:
        scores[:] = -4.5  # below the late key's by less than what moves the row maximum
        scores[late] = 0
    q[..., 0] = 1
    k[0, :, 0, 0] = (scores * math.sqrt(headdim)).to(k)
    return q, k


def logits(q, k):
    """The scores (batch, nheads, seqlen_q, seqlen_k) in fp64."""
    return torch.einsum("bihd,bjd->bhij", q.double(), k[:, :, 0].double()) / math.sqrt(q.shape[-1])


def close(lse, scores, headdim):
    """A GPU's tensor cores cut off what a sum's fp32 cannot hold, once for 8 columns: up to 2^-23 of the score each time. An H200 showed
    3.9e-6 for scores of 3.5 at headdim 256. The simulator's sums of products are exact before they are rounded."""
    expected = scores.logsumexp(-1)
    assert expected.abs().max() < 2
    error = (lse.double() - expected).abs().max().item()
    allowed = TOLERANCE + (headdim / 8 * 2**-23 * scores.abs().max().item() if lse.is_cuda else 0)
    assert error <= allowed, f"softmax_lse: max error {error:.3g} near 0, allowed {allowed:.3g}"


@on("cpu-fp32", "cpu-fp64", "cpu-fp16", "cpu-bf16", "sim", "cuda")
@each_gpu
@each_length
@pytest.mark.parametrize("headdim", [32, 64, 128, 256])
def test_forward(backend, gpu, headdim, keys, late):
    on_gpu(backend, gpu)
    q, k = near_zero(backend, headdim, keys, late)
    close(backend.forward(q, k, k)[1], logits(q, k), headdim)


@on("cpu-fp32", "sim", "cuda")
@each_gpu
@pytest.mark.parametrize("feature", ["sinks", "alibi_slopes", "attn_bias"])
@pytest.mark.parametrize("headdim", [64, 128])
def test_features(backend, gpu, headdim, feature):
    on_gpu(backend, gpu)
    q, k = near_zero(backend, headdim, 1, None)
    scores = logits(q, k)
    if feature == "sinks":
        given = torch.tensor([-2.0, 0.3], device=q.device)
        scores = torch.cat([scores, given.double()[None, :, None, None].expand(1, 2, ROWS, 1)], -1)
    elif feature == "alibi_slopes":
        given = torch.tensor([2.0**-8, 2.0**-7], device=q.device)
        # row i is i + 1 - ROWS keys away from the only key
        scores = scores - given.double()[None, :, None, None] * (ROWS - 1 - torch.arange(ROWS, device=q.device)).double()[:, None]
    else:
        given = backend.randn(1, 2, ROWS, 1, spread=0.1)
        scores = scores + given.double()
    close(backend.forward(q, k, k, **{feature: given})[1], scores, headdim)


@on("cpu-fp32", "sim", "cuda")
@each_gpu
@each_length
@pytest.mark.parametrize("headdim", [64, 128, 256, 576])
def test_decode(backend, gpu, headdim, keys, late):
    on_gpu(backend, gpu)
    q, k = near_zero(backend, headdim, keys, late, nheads=16)
    q = q[:, :1]
    pages = -(-keys // 16)
    cache = torch.full((pages, 16, 1, headdim), float("nan"), dtype=k.dtype, device=k.device)
    cache.view(-1, headdim)[:keys] = k[0, :, 0]
    options = {"block_table": backend.ints(range(pages))[None], "cache_seqlens": backend.ints([keys])}
    for _ in backend._runs(q, cache):
        if headdim == 576:
            lse = torch.ops.volta_fa.fwd_mla(q, cache, **options)[1]
        else:
            lse = torch.ops.volta_fa.fwd_kvcache(q, cache, cache, **options)[1]
        close(lse, logits(q, k), headdim)
