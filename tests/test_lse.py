"""softmax_lse, the log of a row's sum of exponentials: its error near 0, and the gradient of a loss that uses it (`dlse`).

Other tests have relative tolerances, which mean little near 0. Here the absolute error may be 1e-6, as in FlashMLA's tests.
`on(...)` lists backends: CPU (`cpu-DTYPE`), simulator (`sim`), GPU (`cuda`); `gpu` runs simulated kernels of V100 and T4."""

from __future__ import annotations

import dataclasses
import functools
import math

import pytest
import torch

import reference
from conftest import ALL, BF16_KERNELS, Backend, Case, check, on, on_cases

op = torch.ops.volta_fa

TOLERANCE = 1e-6
#: Keys of a row, and which one has most of the probability: none, or one that comes after the row maximum is set.
KEYS = [(1, None), (2, None), (5, None), (33, None), (150, 140)]
ROWS = 40
each_length = pytest.mark.parametrize("keys,late", KEYS, ids=[f"{n}-keys" if late is None else f"{n}-keys-late" for n, late in KEYS])


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
    """Checks the error of lse. A GPU's tensor cores truncate fp32 sums once per 8 columns, by up to 2^-23 of the score: an H200 had an
    error of 3.9e-6 for scores of 3.5 at headdim 256. The simulator rounds instead, so it gets no allowance."""
    expected = scores.logsumexp(-1)
    assert expected.abs().max() < 2
    error = (lse.double() - expected).abs().max().item()
    allowed = TOLERANCE + (headdim / 8 * 2**-23 * scores.abs().max().item() if lse.is_cuda else 0)
    assert error <= allowed, f"softmax_lse: max error {error:.3g} near 0, allowed {allowed:.3g}"


@on("cpu-fp32", "cpu-fp64", "cpu-fp16", "cpu-bf16", "sim", "cuda")
@each_length
@pytest.mark.parametrize("headdim", [32, 64, 128, 256])
def test_forward(backend, gpu, headdim, keys, late):
    q, k = near_zero(backend, headdim, keys, late)
    close(backend.forward(q, k, k)[1], logits(q, k), headdim)  # k as v: lse does not depend on v


@on("cpu-fp32", "sim", "cuda")
@pytest.mark.parametrize("feature", ["sinks", "alibi_slopes", "attn_bias"])
@pytest.mark.parametrize("headdim", [64, 128])
def test_features(backend, gpu, headdim, feature):
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
@each_length
@pytest.mark.parametrize("headdim", [64, 128, 256, 576])  # 576: MLA
def test_decode(backend, gpu, headdim, keys, late):
    q, k = near_zero(backend, headdim, keys, late, nheads=16)
    q = q[:, :1]
    pages = -(-keys // 16)
    cache = torch.full((pages, 16, 1, headdim), float("nan"), dtype=k.dtype, device=k.device)
    cache.view(-1, headdim)[:keys] = k[0, :, 0]
    options = {"block_table": backend.ints(range(pages))[None], "cache_seqlens": backend.ints([keys])}
    for _ in backend._runs(q, cache):  # in the simulator, each order of warps
        if headdim == 576:
            lse = torch.ops.volta_fa.fwd_mla(q, cache, **options)[1]
        else:
            lse = torch.ops.volta_fa.fwd_kvcache(q, cache, cache, **options)[1]
        close(lse, logits(q, k), headdim)


# ---- dlse, the gradient of softmax_lse: what it adds to the gradients of q, k, v, a bias and sinks ----------------------

# Fields of a Case: `bias` names its dimensions that are not 1, then its dtype ("own": q's); `sinks` names a dtype, `alibi` the dimensions
# of the slopes; `used` is seqused_k; `lengths` has (queries, keys) of packed sequences.
BASE = Case(67, 93, 64, nheads=4, nheads_k=2)
changed = functools.partial(dataclasses.replace, BASE)
CASES = [
    BASE,
    # one block has all keys: without a gradient of lse one fused kernel would compute the whole backward pass
    changed(seqlen_k=40),
    changed(seqlen_q=20, seqlen_k=40, headdim=128, batch=1, nheads=1, nheads_k=1),
    changed(is_causal=True, seqlen_q=150),  # rows that see no key
    changed(headdim=40, headdim_v=24),
    changed(sinks="fp32", is_causal=True, seqlen_q=150),
    changed(bias="bhqk:own"),
    changed(softcap=1.5, alibi="h"),
    changed(dropout_p=0.2),
    changed(used=(93, 0)),
    Case(headdim=64, nheads=2, nheads_k=1, lengths=((17, 33), (1, 1), (113, 70), (0, 5), (5, 0), (0, 0), (64, 64))),
    Case(headdim=128, nheads=2, lengths=((40, 60), (33, 20)), is_causal=True, sinks="own"),
    changed(deterministic=True, headdim=128),
]


def gradient_of_lse(backend, q):
    """Returns numbers as large as those of dout."""
    rows = (q.shape[0], q.shape[2], q.shape[1]) if q.dim() == 4 else (q.shape[1], q.shape[0])
    return backend.randn(*rows).float()


#: Enough for other dtypes, which are cast to fp16 around the same kernels.
OF_EACH_DTYPE = CASES[1::4]


@on_cases((["cpu-fp32", "sim", "cuda"], CASES), (ALL + BF16_KERNELS, OF_EACH_DTYPE), slow=((ALL + BF16_KERNELS, CASES),))
def test_gradients(backend, gpu, case):
    inputs, options = case.problem(backend)
    backend.forward_on_cpu = backend.machine == "sim"  # to simulate the backward kernels alone
    check(backend, *inputs, deterministic=case.deterministic, dlse=gradient_of_lse(backend, inputs[0]), **options)


@pytest.mark.parametrize("scale", [2.0**-12, 2.0**12], ids=["small", "large"])
@on("cpu-fp32", *BF16_KERNELS)
def test_other_magnitudes_than_dout(backend, scale):
    """`dlse` and dout of very different size, both within bf16's range."""
    (q, k, v, dout), options = BASE.problem(backend)
    check(backend, q, k, v, dout, dlse=gradient_of_lse(backend, q) * scale, **options)
    check(backend, q, k, v, dout * 2.0**-100, dlse=gradient_of_lse(backend, q) * 2.0**-100 * scale, **options)


@on("cpu-fp32", "sim")
def test_rows_without_a_key_take_no_gradient(backend):
    """A row without visible keys has softmax_lse +inf. Its `dlse` may be NaN, and changes no gradient."""
    (q, k, v, dout), _ = changed(seqlen_q=150).problem(backend)
    out, lse = backend.forward(q, k, v, is_causal=True)
    dlse = gradient_of_lse(backend, q)
    expected = backend.backward(dout, q, k, v, out, lse, is_causal=True, deterministic=True, dlse=dlse)[0]
    dlse[lse == float("inf")] = float("nan")
    assert dlse.isnan().any()
    found = backend.backward(dout, q, k, v, out, lse, is_causal=True, deterministic=True, dlse=dlse)[0]
    assert all(torch.equal(a, b) for a, b in zip(found, expected))


# ---- autograd -------------------------------------------------------------------------------------------------------


@on("cpu-fp32", "cpu-fp64")
def test_autograd_of_both_results(backend):
    """A loss on out and lse, on lse alone, and on out alone, as through PyTorch's own operations."""
    q, k, v, dout = Case(9, 11, 16, nheads=2).inputs(backend)
    for weights in ((1.0, 1.0), (0.0, 1.0), (1.0, 0.0)):
        results = []
        for own in (True, False):
            leaves = [t.clone().requires_grad_() for t in (q, k, v)]
            if own:
                out, lse, _ = op.fwd(*leaves)
            else:
                theirs = reference.tolerance.attend(*leaves)
                out, lse = theirs.out, theirs.softmax_lse
            parts = [w * t for w, t in zip(weights, ((out * dout).sum(), lse.square().sum())) if w]
            results.append(torch.autograd.grad(sum(parts), leaves, allow_unused=True))
        for found, expected in zip(*results):
            expected = torch.zeros_like(v) if expected is None else expected
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@on("cpu-fp32")
def test_unused_lse_has_no_gradient(backend):
    """If no loss uses softmax_lse, autograd passes no `dlse` to the operator, which then costs nothing."""
    q, k, v, dout = Case(9, 11, 16, nheads=2).inputs(backend)
    q.requires_grad_()
    out, lse, rng_state = op.fwd(q, k, v)
    assert lse.requires_grad and not rng_state.requires_grad
    with torch.autograd.profiler.profile(record_shapes=True) as profile:
        out.backward(dout)
    [call] = [event for event in profile.function_events if event.name == "volta_fa::bwd"]
    given = [shape for shape in call.input_shapes if shape == list(lse.shape)]
    assert len(given) == 1, call.input_shapes  # softmax_lse itself


@on("cpu-fp32", "sim")
def test_wrong_gradients_are_refused(backend):
    backend.simulate()
    q, k, v, dout = Case(9, 11, 16, nheads=2).inputs(backend)
    out, lse, _ = op.fwd(q, k, v)
    for wrong, words in ((lse.half(), "dlse: got dtype torch.float16"), (lse[:, :1], r"dlse: got shape \(2, 1, 9\)")):
        with pytest.raises(ValueError, match=words):
            op.bwd(dout, q, k, v, out, lse, dlse=wrong)
    expanded = torch.ones((), dtype=torch.float32).expand(lse.shape)
    found, expected = (op.bwd(dout, q, k, v, out, lse, dlse=t, deterministic=True)[:3] for t in (expanded, torch.ones_like(lse)))
    assert all(map(torch.equal, found, expected))


@on("cpu-fp32", "sim", "cuda")
def test_gradient_of_sinks_without_keys(backend):
    """softmax_lse of a row without keys is its sink."""
    q, k = backend.randn(2, 3, 4, 64), backend.randn(2, 0, 2, 64)
    sinks = torch.tensor([0.5, -1.0, 0.0, -math.inf], device=q.device, requires_grad=True)
    backend.simulate()
    lse = op.fwd(q, k, k, sinks=sinks)[1]
    (gradient,) = torch.autograd.grad(lse[:, :3].sum(), sinks)
    assert gradient.tolist() == [6.0, 6.0, 6.0, 0.0]
