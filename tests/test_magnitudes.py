"""Tests of bf16 and fp32 inputs of any magnitude. Kernels multiply fp16 numbers, so the library scales tensors by powers of two before.

Each result must be as exact as for inputs near 1, and keys that no query sees must not influence the scales. BF16_KERNELS and FP32_KERNELS
run tests in the simulator and on a GPU, with tensors of that dtype: `case.inputs(backend)` draws q, k, v and dout. test_fp32.py has more
tests of fp32."""

import math

import pytest
import torch

from conftest import BF16_KERNELS, FP32_KERNELS, Case, on
from reference import block_masks

# Powers of two by which q and k, drawn near 1, are multiplied, and softmax_scale (None: the default): beyond either end of fp16's range
# (2^-24 to 2^16), both small, and scales that no model has.
MAGNITUDES = {
    "large q": (17, -17, None),
    "large k": (-40, 40, None),
    "largest q": (120, -122, None),
    "both small": (-40, -40, None),
    "tiny scale": (40, 1, 2.0**-44),
    "large scale": (-17, -17, 2.0**31),
}


@pytest.mark.parametrize("magnitudes", MAGNITUDES.values(), ids=MAGNITUDES)
@pytest.mark.parametrize("options", [{}, {"is_causal": True, "softcap": 3.0}, {"window_left": 20}], ids=str)
@on(*BF16_KERNELS)
def test_bf16_of_any_magnitude(backend, magnitudes, options):
    of_q, of_k, scale = magnitudes
    q, k, v, dout = Case(70, 90, 64, batch=2, nheads=2, nheads_k=1).inputs(backend)  # seqlen_q, seqlen_k, headdim
    q, k = q * 2.0**of_q, k * 2.0**of_k
    options = {**options, "softmax_scale": scale}
    check_against(exactly(q, k, v, dout, **options), backend, q, k, v, dout, **options)


def check_against(expected, backend, q, k, v, dout, **options):
    """Checks errors of out, softmax_lse and gradients, which `backend.results` returns, relative to the largest number of each: at most one
    eps of bf16, or 25 of fp32."""
    options = {name: x.to(backend.device) if isinstance(x, torch.Tensor) else x for name, x in options.items()}
    found = backend.results(q, k, v, dout, **options)[:5]
    bound = torch.finfo(torch.bfloat16).eps if q.dtype == torch.bfloat16 else 3e-6
    for name, a, b in zip(("out", "lse", "dq", "dk", "dv"), found, expected, strict=True):
        error = (a.cpu().double() - b).abs().max() / b.abs().max()
        assert error < (1e-5 if name == "lse" else bound), f"{name}: {error:.2e}"


def exactly(q, k, v, dout, **options):
    """Returns out, softmax_lse and the gradients of q, k and v by the CPU backend in fp64."""
    q, k, v, dout = (t.detach().cpu().double() for t in (q, k, v, dout))
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("VOLTA_FA_SIMULATE", raising=False)
        out, lse, _ = torch.ops.volta_fa.fwd(q, k, v, **options)
        return out, lse, *torch.ops.volta_fa.bwd(dout, q, k, v, out, lse, **options)[:3]


@pytest.mark.parametrize("large", [2.0**13, 2.0**15], ids=["2^13", "2^15"])
@on(*BF16_KERNELS, *FP32_KERNELS)
def test_large_columns_of_q_and_of_k_that_do_not_meet(backend, large):
    """Large q and large k in different columns make no large score, so no row may be scaled down: its softmax would be another."""
    q, k, v, dout = Case(33, 70, 64, nheads=2, nheads_k=1).inputs(backend)
    q, k = q.detach().clone(), k.detach().clone()
    q[..., 1], k[..., 0] = 0, 0
    q[..., 0], k[:, 3, :, 1] = large * 0.9, large * 0.9
    check_against(exactly(q, k, v, dout), backend, q, k, v, dout)


@on(*BF16_KERNELS, *FP32_KERNELS)
def test_scores_below_the_range_of_fp16(backend):
    """Scores of 2^-60 are 0 for the softmax, not raised to fp16's smallest numbers."""
    q, k, v, dout = Case(33, 70, 64).inputs(backend)
    q, k = torch.full_like(q, 2.0**-30), torch.full_like(k, 2.0**-30)
    out, lse = backend.forward(q, k, v)
    expected, expected_lse = exactly(q, k, v, dout)[:2]
    assert (lse.cpu().double() - expected_lse).abs().max() < 1e-6
    assert (out.cpu().double() - expected).abs().max() < torch.finfo(q.dtype).eps * expected.abs().max()


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
@on(*BF16_KERNELS)
def test_rows_of_q_may_differ_by_a_million(backend, packed):
    """Each row of q has its own scale, so small rows keep their precision beside rows 10^6 times as large."""
    q, k, v, _ = Case(60, 80, 64, batch=1, nheads=2).inputs(backend)
    q = q * torch.logspace(-3, 3, 60, dtype=q.dtype, device=q.device).view(1, -1, 1, 1)
    cu_seqlens = {}
    if packed:
        q, k, v = (t[0] for t in (q, k, v))
        cu_seqlens = {"cu_seqlens_q": backend.ints([0, 60]), "cu_seqlens_k": backend.ints([0, 80])}
    longest = {"max_seqlen_q": 60, "max_seqlen_k": 80} if packed else {}
    out, lse = backend.forward(q, k, v, **cu_seqlens, **longest)
    expected = exactly(q, k, v, torch.zeros_like(q), **{name: t.cpu() for name, t in cu_seqlens.items()}, **longest)
    for a, b, bound in ((out, expected[0], 2**-7), (lse, expected[1], 1e-6)):  # 2^-7: bf16's rounding
        assert ((a.cpu().double() - b).abs() / b.abs().clamp_min(1)).max() < bound


@pytest.mark.parametrize("column", [1.0, 2.0**12, 2.0**20], ids=str)
@on(*BF16_KERNELS)
def test_gradients_of_giant_scores_are_finite(backend, column):
    """Scores of 5e5 to 5e17, which column 5 of q and k decides. fp32 resolves few of their digits after the point, or none."""
    q, k, v, dout = Case(77, 77, 64, batch=1, nheads=2).inputs(backend)
    for t in (q, k):
        t[..., 5] *= column * 2000
    out, lse = backend.forward(q, k, v)
    found = [out, lse, *backend.backward(dout, q, k, v, out, lse)[0]]
    assert all(t.isfinite().all() for t in found)
    # a row's best key is unique where its two largest scores differ by more than fp32's rounding of them
    scores = (q.cpu().double().transpose(1, 2) @ k.cpu().double().transpose(1, 2).mT) / 64**0.5
    top = scores.topk(2).values
    unique = (top[..., 0] - top[..., 1]) > top[..., 0].abs() * 2.0**-16 + 30
    chosen = v.cpu().transpose(1, 2).gather(2, scores.argmax(-1, keepdim=True).expand(-1, -1, -1, 64))
    assert unique.float().mean() > 0.5
    torch.testing.assert_close(out.cpu().transpose(1, 2)[unique], chosen[unique], rtol=2**-7, atol=2**-7)


# ---- keys that no query sees -----------------------------------------------------------------------------------------

QUERIES, KEYS = 140, torch.arange(200)

# Each function returns the keys that all queries do not see (bool), one key that a single query sees, and the call's options for that.


def by_bias():
    """Hides by a bias of -1e38, which is below every score."""
    hidden = (KEYS > 30) & (KEYS < 170)
    bias = torch.zeros(1, 1, QUERIES, 200).masked_fill(hidden, -1e38)
    bias[..., 100, 90] = 0
    return hidden & (KEYS != 90), 90, {"attn_bias": bias}


def by_heads():
    """One query of one head sees a key."""
    seen = (KEYS >= 100).expand(1, 4, QUERIES, 200).clone()
    seen[:, 2, 5, 99] = True
    return KEYS < 99, 99, {"attn_bias": seen}


def by_blocks():
    """Absent blocks of a block mask, and bits of partial ones."""
    hidden = (KEYS >= 64) & (KEYS < 150)
    seen = ~hidden.repeat(1, 1, QUERIES, 1)
    seen[..., 130, 100] = True
    return hidden & (KEYS != 100), 100, block_masks.options_of(seen, "cpu")


def by_window():
    """The queries are the last 140 of 200 positions, so the first one, at 60, sees keys from 40 on."""
    return KEYS < 40, 40, {"window_left": 20}


def by_windows():
    """Two packed sequences, of 60 queries and 90 keys, and of 80 and 110: the first queries see keys from 10 on."""
    cu = {"cu_seqlens_q": torch.tensor([0, 60, QUERIES]).int(), "cu_seqlens_k": torch.tensor([0, 90, 200]).int()}
    return (KEYS < 10) | ((KEYS >= 90) & (KEYS < 100)), 10, {"window_left": 20, "max_seqlen_q": 80, "max_seqlen_k": 110, **cu}


@pytest.fixture(params=[by_bias, by_heads, by_blocks, by_window, by_windows], ids=lambda of: of.__name__)
def masked(request, backend):
    """Returns q, k, v, dout, and what a function above returns."""
    inputs = Case(QUERIES, 200, 64, batch=1, nheads=4, nheads_k=2).inputs(backend)
    return *(t[0] if request.param is by_windows else t for t in inputs), *request.param()


@pytest.mark.parametrize("magnitude", [2.0**7, 2.0**17, 2.0**110], ids=["2^7", "2^17", "2^110"])
@on(*BF16_KERNELS, *FP32_KERNELS)
def test_hidden_keys_may_have_any_magnitude(backend, masked, magnitude):
    """Keys that no query sees may be uninitialized memory. Others keep their precision, and hidden keys get no gradient."""
    q, k, v, dout, hidden, _, options = masked
    expected = exactly(q, k, v, dout, **options)
    for t in (k, v):
        t[..., hidden, :, :] *= magnitude
    check_against(expected, backend, q, k, v, dout, **options)


@on(*BF16_KERNELS, *FP32_KERNELS)
def test_gradients_of_a_bias_and_of_sinks_beside_hidden_keys(backend):
    """Gradients of a bias and of sinks sum over heads and entries, so v of all entries has one common power of two."""
    q, k, v, dout = Case(40, 90, 64, batch=2, nheads=4, nheads_k=2).inputs(backend)
    v[0] *= 64
    bias = backend.randn(1, 4, 40, 90).float()
    bias[..., 30:60] = -math.inf
    options = {"attn_bias": bias, "sinks": torch.tensor([0.5, -1.0, 0.0, 2.0], device=backend.device)}
    found = []
    for magnitude in (1.0, 2.0**100):
        k2, v2 = k.clone(), v.clone()
        k2[:, 30:60] *= magnitude
        v2[:, 30:60] *= magnitude
        found.append(backend.results(q, k2, v2, dout, **options))
    for a, b in zip(*found, strict=True):
        # of bf16 inputs, softmax_lse and the gradients of bias and sinks are fp32
        bound = torch.finfo(torch.bfloat16).eps if a.dtype == torch.bfloat16 else 3e-3 if q.dtype == torch.bfloat16 else 3e-6
        assert (a.double() - b.double()).abs().max() < bound * b.abs().max()


@on(*BF16_KERNELS, *FP32_KERNELS)
def test_a_key_that_one_query_sees_counts(backend, masked):
    """Values of such a key exceed fp16's range, so the scales must include them."""
    q, k, v, dout, hidden, seen_once, options = masked
    v[..., seen_once, :, :] *= 2.0**17
    expected = exactly(q, k, v, dout, **options)
    v[..., hidden, :, :] *= 2.0**110
    check_against(expected, backend, q, k, v, dout, **options)
