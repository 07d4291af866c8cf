"""Tests of softmax_lse, the log of a row's sum of exponentials: its error near 0, and the gradient of a loss that uses it (`dlse`).

Other tests have relative tolerances, which mean little near 0. Here the absolute error may be 1e-6, as in FlashMLA's tests. A backend is
the CPU, the simulator (`sim`) or a GPU (`cuda`), with a dtype; `gpu` simulates a V100 and a T4 in turn. `check` compares results and
gradients with the fp64 reference. A Case (volta_fa/check/cases.py) is a problem: seqlen_q, seqlen_k, headdim, and fields by name.
`used` is seqused_k, `lengths` has (seqlen_q, seqlen_k) of packed sequences, and "own" is q's dtype."""

import dataclasses
import functools
import math

import pytest
import torch

import reference
from conftest import ALL, BF16_KERNELS, Backend, Case, check, on, on_cases

op = torch.ops.volta_fa

TOLERANCE = 1e-6
#: Keys of a row, and the key that has most of the probability: none, or one after the first tiles of keys, which set the row maximum.
KEYS = [(1, None), (2, None), (5, None), (33, None), (150, 140)]
ROWS = 40  # queries of each head
each_length = pytest.mark.parametrize("keys,late", KEYS, ids=[f"{n}-keys" if late is None else f"{n}-keys-late" for n, late in KEYS])


def near_zero(backend: Backend, headdim: int, keys: int, late: int | None, nheads: int = 2):
    """Returns q (1, ROWS, nheads, headdim) and k (1, keys, 1, headdim) with softmax_lse near 0: `keys` scores of about -log(keys)."""
    q, k = backend.randn(1, ROWS, nheads, headdim, spread=0.2), backend.randn(1, keys, 1, headdim, spread=0.2)
    # column 0, which is 1 in q, adds the same number to all scores of a key
    scores = torch.full((keys,), -math.log(keys))
    if late is not None:
        # 6.5 log2 units below the late key: kernels keep the earlier keys' row maximum up to 7 (kRescaleThreshold, csrc/softmax.cuh)
        scores[:] = -4.5
        scores[late] = 0
    q[..., 0] = 1
    k[0, :, 0, 0] = (scores * math.sqrt(headdim)).to(k)
    return q, k


def check_lse(lse, q, k, **options):
    """Checks the error of lse. A GPU's tensor cores truncate fp32 sums once per 8 columns, by up to 2^-23 of the score: an H200 had an
    error of 3.9e-6 for scores of 3.5 at headdim 256. The simulator rounds instead, so it gets no allowance."""
    exact = reference.forward(q, k, k, **options)
    assert exact.softmax_lse.abs().max() < 2
    error = (lse.double() - exact.softmax_lse).abs().max().item()
    allowed = TOLERANCE + (q.shape[-1] / 8 * 2**-23 * exact.largest_score if lse.is_cuda else 0)
    assert error <= allowed, f"softmax_lse: max error {error:.3g} near 0, allowed {allowed:.3g}"


@on("cpu-fp32", "cpu-fp64", "cpu-fp16", "cpu-bf16", "sim", "cuda")
@each_length
@pytest.mark.parametrize("headdim", [32, 64, 128, 256])
def test_forward(backend, gpu, headdim, keys, late):
    q, k = near_zero(backend, headdim, keys, late)
    check_lse(backend.forward(q, k, k)[1], q, k)  # k as v: lse does not depend on v


@on("cpu-fp32", "sim", "cuda")
@pytest.mark.parametrize("feature", ["sinks", "alibi_slopes", "attn_bias"])
@pytest.mark.parametrize("headdim", [64, 128])
def test_forward_with_a_feature(backend, gpu, headdim, feature):
    q, k = near_zero(backend, headdim, 1, None)  # one key, no late one
    numbers = {"sinks": [-2.0, 0.3], "alibi_slopes": [2.0**-8, 2.0**-7]}.get(feature)
    given = {feature: torch.tensor(numbers, device=q.device) if numbers else backend.randn(1, 2, ROWS, 1, spread=0.1)}
    check_lse(backend.forward(q, k, k, **given)[1], q, k, **given)


@on("cpu-fp32", "sim", "cuda")
@each_length
@pytest.mark.parametrize("headdim", [64, 128, 256, 576])  # 576: MLA
def test_decode(backend, gpu, headdim, keys, late):
    """The cache has pages of 16 tokens, and NaN after the last token."""
    q, k = near_zero(backend, headdim, keys, late, nheads=16)
    q = q[:, :1]
    pages = -(-keys // 16)
    cache = torch.full((pages, 16, 1, headdim), float("nan"), dtype=k.dtype, device=k.device)
    cache.view(-1, headdim)[:keys] = k[0, :, 0]
    options = {"block_table": backend.ints(range(pages))[None], "cache_seqlens": backend.ints([keys])}
    for _ in backend._runs(q, cache):  # in the simulator in two warp orders, on a GPU twice
        lse = (op.fwd_mla(q, cache, **options) if headdim == 576 else op.fwd_kvcache(q, cache, cache, **options))[1]
        check_lse(lse, q, k)


# ---- dlse, the gradient of softmax_lse: what it adds to the gradients of q, k, v, a bias and sinks ----------------------

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
    Case(40, 50, 264, batch=1),
]


def draw_dlse(backend, q):
    """Returns a gradient of softmax_lse for q, of numbers as large as those of dout."""
    rows = (q.shape[0], q.shape[2], q.shape[1]) if q.dim() == 4 else (q.shape[1], q.shape[0])
    return backend.randn(*rows).float()


# a quarter of the cases in the other dtypes, which are cast to fp16 before the same kernels
@on_cases((["cpu-fp32", "sim", "cuda"], CASES), (ALL + BF16_KERNELS, CASES[1::4]), slow=((ALL + BF16_KERNELS, CASES),))
def test_gradients(backend, gpu, case):
    inputs, options = case.problem(backend)
    backend.forward_on_cpu = backend.machine == "sim"  # then only the backward kernels are simulated
    check(backend, *inputs, deterministic=case.deterministic, dlse=draw_dlse(backend, inputs[0]), **options)


@on("cpu-fp32", "sim", "cuda")
def test_sinks_of_a_part_without_keys(backend):
    """As in ring attention, out and softmax_lse are those of all keys. The gradient of the sinks does not depend on the part."""
    (q, k, v, dout), options = changed(sinks="fp32").problem(backend)
    options["sinks"] += 4.0  # about as much weight as all keys
    backend.simulate()
    out, lse, _ = torch.ops.volta_fa.fwd(q, k, v, **options)
    options["dlse"] = draw_dlse(backend, q)
    whole, part = (torch.ops.volta_fa.bwd(dout, q, k[:, :n], v[:, :n], out, lse, **options)[4] for n in (93, 0))
    assert whole.abs().min() > 0.1
    torch.testing.assert_close(part, whole, rtol=2e-3, atol=2e-3)  # two eps of fp16


@pytest.mark.parametrize("scale", [2.0**-12, 2.0**12], ids=["small", "large"])
@on("cpu-fp32", *BF16_KERNELS)
def test_dlse_of_another_magnitude_than_dout(backend, scale):
    """`dlse` is 4096 times as small or large as dout, beside dout near 1 and near bf16's smallest numbers (2^-126)."""
    (q, k, v, dout), options = BASE.problem(backend)
    for size in (1.0, 2.0**-100):
        check(backend, q, k, v, dout * size, dlse=draw_dlse(backend, q) * size * scale, **options)


@on("cpu-fp32", "sim")
def test_rows_without_a_key_take_no_gradient(backend):
    """A row without visible keys has softmax_lse +inf. Its `dlse` may be NaN, and changes no gradient."""
    q, k, v, dout = changed(seqlen_q=150).inputs(backend)  # the first 57 of 150 queries see none of the 93 keys
    out, lse = backend.forward(q, k, v, is_causal=True)
    dlse = draw_dlse(backend, q)
    backward = functools.partial(backend.backward, dout, q, k, v, out, lse, is_causal=True, deterministic=True)
    expected = backward(dlse=dlse)[0]
    dlse[lse == math.inf] = math.nan
    assert dlse.isnan().any() and all(map(torch.equal, backward(dlse=dlse)[0], expected))


# ---- autograd -------------------------------------------------------------------------------------------------------


@on("cpu-fp32", "cpu-fp64")
def test_autograd_of_both_results(backend):
    """The gradients of a loss on out and lse, on lse alone, and on out alone are those of attention by PyTorch's operations."""
    *leaves, dout = Case(9, 11, 16, nheads=2).inputs(backend)
    out, lse, _ = op.fwd(*(t.requires_grad_() for t in leaves))
    exact = reference.tolerance.attend(*leaves)

    def losses(out, lse):
        of_out, of_lse = (out * dout).sum(), lse.square().sum()
        return of_out + of_lse, of_lse, of_out

    for ours, theirs in zip(losses(out, lse), losses(exact.out, exact.softmax_lse)):
        expected = torch.autograd.grad(theirs, leaves, retain_graph=True, allow_unused=True)  # lse alone does not use v
        for found, wanted, t in zip(torch.autograd.grad(ours, leaves, retain_graph=True), expected, leaves):
            torch.testing.assert_close(found, torch.zeros_like(t) if wanted is None else wanted, rtol=1e-5, atol=1e-5)


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
    assert call.input_shapes.count(list(lse.shape)) == 1, call.input_shapes  # softmax_lse itself, and no dlse


@on("cpu-fp32", "sim")
def test_dlse_of_a_wrong_form_is_refused(backend):
    """The dtype and shape must be those of softmax_lse. Any strides are allowed."""
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
    """softmax_lse of a row without keys is its sink: a head's gradient counts its rows, 2 batch entries of 3. A sink of -inf has none."""
    q, k = backend.randn(2, 3, 4, 64), backend.randn(2, 0, 2, 64)
    sinks = torch.tensor([0.5, -1.0, 0.0, -math.inf], device=q.device, requires_grad=True)
    backend.simulate()
    lse = op.fwd(q, k, k, sinks=sinks)[1]
    (gradient,) = torch.autograd.grad(lse[:, :3].sum(), sinks)
    assert gradient.tolist() == [6.0, 6.0, 6.0, 0.0]
