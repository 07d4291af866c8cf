"""float32 tensors on the kernels, in the simulator and on a GPU (FP32_KERNELS).

By default precision is full: kernels take each number as a sum of two fp16 numbers ("split"). With torch.set_float32_matmul_precision
"high" or "medium", kernels take scaled fp16 numbers with fp32 results. Errors are compared with those of PyTorch's fp32 attention by single
operations ("eager"), or in reduced precision with eager attention of operands rounded to TF32 (11 bits with the implicit one). `check` does
so for out, `check_gradients` for gradients. `reference.groups` splits a problem into groups of entries of one length, whose methods
`inputs`, `queries`, `keys` and `lse` take their part of tensors. `kept_by` makes dropout's mask from the call's state. `backend` runs a
call: `forward_and_state` returns out, softmax_lse and that state, `backward` the gradients of each of two runs. `gpu` simulates a V100 and
a T4 in turn. test_stream_k.py has more kernels of fp32.

A Case (volta_fa/check/cases.py) is a problem: seqlen_q, seqlen_k, headdim, and fields by name. lengths: (seqlen_q, seqlen_k) of packed
sequences. spare: by how much max_seqlen exceeds the longest. used: seqused_k. bias and blocks (a block mask): dimensions that are not 1
(b, h, q, k; "-": none), and of a bias the dtype. alibi: dimensions of the slopes. sinks: dtype ("own": q's)."""

import itertools
import json
import math

import pytest
import torch
from torch import Tensor

import reference
import volta_fa
from conftest import FP32_KERNELS, Case, captured, on, on_cases
from reference import block_masks

#: Allowed error in full precision, as a multiple of eager fp32 attention's. docs/design/numerics.md has this rule and measured errors.
FACTOR = 4
#: Allowed error in reduced precision, as a multiple of eager attention's of operands rounded to TF32: kernels also round probabilities.
REDUCED_FACTOR = 2

CASES = [
    Case(70, 90, 64),
    Case(1, 33, 64),
    Case(130, 130, 128, is_causal=True),
    Case(37, 200, 40, nheads=4, nheads_k=2, is_causal=True),
    Case(65, 47, 96, headdim_v=64, window_left=20, window_right=3),
    Case(50, 70, 64, softcap=15.0, alibi="h"),
    Case(50, 70, 128, bias="bhqk:own", sinks="own"),
    Case(33, 65, 64, bias="k:bool", softmax_scale=-0.1),
    Case(0, 0, 64, batch=2, nheads=2, nheads_k=1, lengths=((40, 61), (17, 0), (1, 33)), is_causal=True, spare=5),
    Case(20, 50, 72, batch=3, used=(50, 17, 0), alibi="bh"),
    Case(50, 60, 40, bias="bhqk:own", dropout_p=0.3),
    Case(37, 83, 128, dropout_p=0.5, nheads=4, nheads_k=2, is_causal=True),
    Case(70, 90, 256),
    Case(33, 45, 512, batch=2, nheads=1),
    Case(40, 130, 160, nheads=4, nheads_k=2, is_causal=True),
    Case(35, 60, 512, softcap=15.0, alibi="h", sinks="own"),
    Case(35, 60, 300, headdim_v=64, bias="bhqk:own", window_left=20),
    Case(70, 50, 192, headdim_v=128, dropout_p=0.4, alibi="bh"),
    Case(0, 0, 256, batch=2, nheads=2, nheads_k=1, lengths=((40, 61), (17, 0), (1, 33)), is_causal=True, spare=5),
]
#: Problems with block masks (blocks of 128 queries by 64 keys).
BLOCK_MASK_CASES = [
    Case(150, 330, 64, batch=1, nheads=4, nheads_k=2, blocks="h"),
    Case(130, 200, 128, batch=1, nheads=2, blocks="-", is_causal=True),
    Case(140, 150, 256, batch=1, nheads=2, nheads_k=1, blocks="h"),
    Case(200, 140, 40, batch=2, nheads=2, headdim_v=64, blocks="bh", window_left=70, window_right=20),
    Case(100, 200, 64, batch=2, nheads=2, blocks="b", used=(200, 70), softcap=5.0, alibi="bh", sinks="own"),
    Case(100, 270, 128, batch=1, nheads=2, blocks="h", dropout_p=0.25),
    Case(33, 70, 160, batch=1, nheads=1, blocks="-", softmax_scale=-0.1),
    Case(1, 70, 64, batch=1, nheads=1, blocks="-"),
]


@pytest.fixture
def precision():
    """Sets PyTorch's precision of float32 products until the test ends."""
    before = torch.get_float32_matmul_precision()
    yield torch.set_float32_matmul_precision
    torch.set_float32_matmul_precision(before)


def as_tf32(t: Tensor) -> Tensor:
    """Rounds to TF32's 10 bits of mantissa."""
    bits = t.contiguous().view(torch.int32)
    return ((bits + 0x0FFF + (bits >> 13 & 1)) & ~0x1FFF).view(torch.float32)


def errors(found: Tensor, ref: Tensor) -> tuple[float, float]:
    """Returns the largest error and the rms error."""
    return reference.max_error(found, ref), reference.rms_error(found, ref)


def check(backend, case: Case, change=lambda *inputs: inputs, rounded=lambda t: t, factor=FACTOR) -> Tensor:
    """Compares out and softmax_lse with fp64. out's error may be `factor` times that of eager fp32 attention of inputs that `rounded`
    rounds. `change` changes q, k and v before the call. Returns out."""
    (q, k, v, _), options = case.problem(backend)
    q, k, v = change(q, k, v)
    out, lse, state = backend.forward_and_state(q, k, v, **options)
    assert out.dtype == torch.float32 and out.shape == (*q.shape[:-1], v.shape[-1])
    for group in reference.groups(q, k, reference.kept_by(state, q.shape[-2], **options), **options):
        if not group.q_rows.numel():
            continue
        inputs = group.inputs(q, k, v)
        ref = reference.forward(*inputs, **group.options)
        eager = reference.eager(*map(rounded, inputs), **group.options)
        # two fp32 roundings of v's largest number, because eager's error may be 0 by chance
        floor = 2.0**-22 * float(inputs[2].abs().max()) if inputs[2].numel() else 0.0
        for error, of_eager in zip(errors(group.queries(out), ref.out), errors(eager, ref.out)):
            assert error <= max(factor * of_eager, floor), (error, of_eager, floor)
        found, expected = group.lse(lse).double(), ref.softmax_lse
        assert torch.equal(found == math.inf, expected == math.inf)
        seen = expected != math.inf
        tolerance = 2e-5 if factor == FACTOR else 2e-2  # of softmax_lse: scores of fp32 numbers, or of numbers with 11 bits
        torch.testing.assert_close(found[seen], expected[seen], rtol=tolerance, atol=tolerance)
    return out


@on_cases((FP32_KERNELS, CASES + BLOCK_MASK_CASES))
def test_full_precision(backend, case, gpu):
    check(backend, case)


@on_cases((FP32_KERNELS, [Case(2, 4096, 64, batch=1, nheads=1), Case(2, 2048, 512, batch=1, nheads=1)]))
def test_small_probabilities_after_a_large_one(backend, case, gpu):
    """Thousands of probabilities count that are each below half a unit in the last place of a sum with the largest."""
    (q, k, v, _), options = case.problem(backend)
    k /= 100
    k[:, 0] = 18 * case.headdim**0.5 * q[:, 0] / q[:, 0].square().sum(-1, keepdim=True)  # query 0: 18 for key 0, others near 0
    out, *_ = backend.forward_and_state(q, k, v, **options)
    assert reference.max_error(out, reference.forward(q, k, v, **options).out) <= 4e-6  # without compensated sums 3e-5


@on_cases((FP32_KERNELS, [*CASES[:4], Case(40, 50, 256), Case(40, 70, 64, dropout_p=0.0, softcap=5.0)]))
def test_reduced_precision(backend, case, precision):
    precision("high")
    check(backend, case, rounded=as_tf32, factor=REDUCED_FACTOR)


def test_the_plan_of_a_vae_in_reduced_precision():
    # batch, seqlen_q, seqlen_k, nheads, nheads_k, headdim, headdim_v, is_causal
    planned = json.loads(torch.ops.volta_fa._plan(1, 4096, 4096, 1, 1, 512, 512, False, features="fp32_output"))["forward"]
    assert planned["name"] == "volta_fwd_streamk_fp32_output_512x512"


#: Problems whose values lie near 1.
MEANS = [
    *(Case(65, 150, d, is_causal=True) for d in (64, 128, 200, 512)),
    Case(0, 0, 72, lengths=((40, 61), (17, 0), (1, 33)), nheads=4, nheads_k=2),
    Case(65, 150, 64, softcap=15.0),
    Case(65, 150, 512, softcap=15.0),
    Case(65, 150, 512, headdim_v=8),
    Case(65, 150, 256, softcap=15.0),
    Case(141, 155, 64, blocks="h"),
    Case(141, 155, 128, blocks="h", softcap=15.0),
]


@on_cases((FP32_KERNELS, MEANS))
def test_means_in_reduced_precision(backend, case, precision):
    """out is a mean of values near 1. Rounding errors of its terms cancel to below 2^-13, which an out rounded to fp16 could not have."""
    precision("high")
    (q, k, v, _), options = case.problem(backend)
    v = 1 + v.abs() / 8
    out, _ = backend.forward(q, k, v, **options)
    for group in reference.groups(q, k, **options):
        exact = reference.forward(*group.inputs(q, k, v), **group.options).out
        assert reference.rms_error(group.queries(out), exact) <= 2.0**-13 or not exact.numel()


#: Problems of the backward pass in both precisions, and more in full precision.
GRADIENT_CASES = [
    Case(70, 90, 64),
    Case(130, 70, 128, nheads=4, nheads_k=2, is_causal=True),
    Case(50, 60, 40, bias="bhqk:own", dropout_p=0.3),
    Case(50, 60, 64, softcap=15.0, alibi="h", sinks="own"),
    Case(0, 0, 64, batch=2, nheads=2, nheads_k=1, lengths=((40, 61), (17, 5)), is_causal=True),
    Case(40, 50, 256),
    Case(40, 50, 512),
    Case(24, 30, 64, window_left=9),
]
FULL_GRADIENT_CASES = [
    *GRADIENT_CASES,
    Case(1, 33, 64),
    Case(200, 300, 64, batch=2, nheads=1),
    Case(150, 140, 96, headdim_v=64, window_left=20, window_right=3),
    Case(37, 200, 40, nheads=4, nheads_k=2, is_causal=True, softmax_scale=-0.1),
    Case(50, 60, 128, bias="hqk:fp32", alibi="bh", softcap=5.0),
    Case(20, 50, 72, batch=3, used=(50, 17, 0), bias="bk:bool"),
    Case(130, 260, 160, headdim_v=256, dropout_p=0.2, is_causal=True),
    *BLOCK_MASK_CASES,
]


def noise_of_delta(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, dlse=None, **options) -> tuple[Tensor, ...]:
    """Returns the fp32 rounding errors of dq and dk through dP - delta, with delta = sum(dout * out), as fused kernels compute it.
    Eager attention's softmax gradient is exact where one key has all of a row's probability, so its error is no fair limit there. A
    gradient of softmax_lse (`dlse`) adds no such error."""
    heads = lambda t: reference.tolerance.heads_first(t, q.shape[2])  # noqa: E731  (batch, nheads, seqlen, headdim), KV heads repeated
    ref, share = reference.forward(q, k, v, **options), reference.kept_share(options.get("dropout_p", 0.0))
    in_fp32 = heads(dout), heads(v), heads(reference.eager(q, k, v, **options))
    in_fp64 = heads(dout.double()), heads(v.double()), heads(ref.out)
    found, right = (do @ vs.mT / share - (do * out).sum(-1, keepdim=True) for do, vs, out in (in_fp32, in_fp64))
    scale = options.get("softmax_scale")
    ds = ref.probabilities * (found - right) * (q.shape[3] ** -0.5 if scale is None else scale)
    of_keys = (ds.mT @ heads(q.double())).unflatten(1, (k.shape[2], -1)).sum(2)
    return (ds @ heads(k.double())).transpose(1, 2), of_keys.transpose(1, 2)


def noise_of_sinks(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, *, sinks: Tensor, dlse=None, **options) -> float:
    """Returns delta's rounding error in dsinks, which sums it over rows: the root of the sum of squares, for the worst sink. Errors of
    eager attention may cancel by chance, because there are few sinks."""
    heads = lambda t: reference.tolerance.heads_first(t, q.shape[2])  # noqa: E731
    ref = reference.forward(q, k, v, sinks=sinks, **options)
    out = heads(reference.eager(q, k, v, sinks=sinks, **options))
    delta = (heads(dout) * out).sum(-1).double() - (heads(dout.double()) * heads(ref.out)).sum(-1)
    return float((torch.exp(sinks.double()[:, None] - ref.softmax_lse) * delta).square().sum((0, 2)).sqrt().max())


def gradients_of_groups(backend, case: Case, change, deterministic, dlse_too=False):
    """Yields, for each run and each group of entries of one length: dout, q, k and v of the group, its options, and its gradients by name
    with the exact ones. Gradients of a bias and of sinks sum over groups, so they come only if there is one. `change`: of q, k, v, dout."""
    (q, k, v, dout), options = case.problem(backend)
    q, k, v, dout = change(q, k, v, dout)
    out, lse, state = backend.forward_and_state(q, k, v, **options)
    # the state of a call without dropout is empty
    given = options | ({"rng_state": state} if case.dropout_p else {})
    names = reference.gradient_names(**options)
    dlse = torch.randn(lse.shape, generator=backend.generator, device=lse.device) if dlse_too else None
    given |= {"dlse": dlse} if dlse_too else {}
    for found in backend.backward(dout, q, k, v, out, lse, deterministic=deterministic, **given):
        groups = reference.groups(q, k, reference.kept_by(state, q.shape[-2], **options), **options)
        for group in groups:
            inputs = group.queries(dout), *group.inputs(q, k, v)
            own = group.options | ({"dlse": group.lse(dlse)} if dlse_too else {})
            parts = [group.queries(found[0]), group.keys(found[1]), group.keys(found[2])]
            parts += found[3:] if len(groups) == 1 else []
            assert all(part.dtype == torch.float32 and part.isfinite().all() for part in parts)
            yield inputs, own, list(zip(names, parts, reference.backward(*inputs, **own)))


def check_gradients(backend, case: Case, change=lambda *inputs: inputs, deterministic=False, dlse_too=False):
    """Compares with fp64, relative to the error of eager fp32 attention."""
    for inputs, options, parts in gradients_of_groups(backend, case, change, deterministic, dlse_too):
        noise = noise_of_delta(*inputs, **options)
        eager = reference.eager_gradients(*inputs, **options)
        eager = [t + noise[i] if i < len(noise) else t for i, t in enumerate(eager)]
        for (name, part, exact), of_eager in zip(parts, eager):
            # A minimum, because eager's error may be 0 for sums of few terms. A GPU's tensor cores truncate each sum of four
            # products, and its exponential has an error of 2^-22; the simulator rounds both.
            floor = (2.0**-21 if part.is_cuda else 2.0**-22) * float(exact.abs().max()) if exact.numel() else 0.0
            if name == "dsinks":
                floor = max(floor, FACTOR * noise_of_sinks(*inputs, **options))
            for error, allowed in zip(errors(part, exact), errors(of_eager, exact)):
                assert error <= max(FACTOR * allowed, floor), (name, error, allowed, floor)


@on_cases((FP32_KERNELS, FULL_GRADIENT_CASES))
@pytest.mark.parametrize("deterministic", [False, True])
def test_gradients_in_full_precision(backend, case, deterministic, gpu):
    check_gradients(backend, case, deterministic=deterministic)


@on_cases((FP32_KERNELS, GRADIENT_CASES))
@pytest.mark.parametrize("deterministic", [False, True])
def test_gradients_in_reduced_precision(backend, case, deterministic, precision):
    """Errors are at most three times those of eager attention of operands rounded to TF32, for magnitudes beyond fp16's range."""
    precision("high")
    change = lambda q, k, v, dout: (q * 1e6, k * 1e-6, v * 1e7, dout * 1e-5)  # noqa: E731
    for inputs, options, parts in gradients_of_groups(backend, case, change, deterministic):
        rounded = reference.eager_gradients(*map(as_tf32, inputs), **options)
        for (name, part, exact), eager in zip(parts[:3], rounded):
            # three times: kernels also round P and dS to 11 bits, eager attention the operands alone
            error, allowed = reference.rms_error(part, exact), reference.rms_error(eager, exact)
            assert error <= 3 * max(allowed, 2.0**-12 * float(exact.abs().mean())), (name, error, allowed)


@on(*FP32_KERNELS)
@pytest.mark.parametrize("mode", ["highest", "high"])
@pytest.mark.parametrize(
    "of_q,of_k,of_v", [(1e5, 1e-5, 1.0), (1e-12, 1e12, 1e20), (1e30, 1e-30, 1e-30), (1e-30, 1.0, 1e30), (1e8, 1e-8, 1e-20)]
)
def test_magnitudes(backend, mode, of_q, of_k, of_v, precision):
    """Magnitudes of fp32 do not overflow and keep their digits."""
    precision(mode)
    change = lambda q, k, v: (q * of_q, k * of_k, v * of_v)  # noqa: E731
    out = check(backend, Case(50, 130, 64, nheads=2), change, *((as_tf32, REDUCED_FACTOR) if mode == "high" else ()))
    assert out.isfinite().all()


@on(*FP32_KERNELS)
def test_rows_of_different_magnitudes(backend):
    """Rows of one tensor that differ by 1e6."""
    rows = torch.logspace(-6, 0, 60, device=backend.device)[None, :, None, None]
    for of_q, of_k in itertools.product((1.0, rows), repeat=2):
        check(backend, Case(60, 60, 64), lambda q, k, v: (q * of_q, k * of_k, v))


@on(*FP32_KERNELS)
def test_columns_of_v_of_different_magnitudes(backend):
    """All columns of v in a head are scaled by one power of two. Columns 2^15 times smaller than the largest still keep their digits: the
    allowed error is ten times fp32's unit roundoff, 2^-24."""
    q, k, v, _ = Case(60, 64, 64).inputs(backend)
    v = v * torch.logspace(0, -15, 64, base=2, device=v.device)
    out, exact = backend.forward(q, k, v)[0].double(), reference.forward(q, k, v).out
    error = ((out - exact).flatten(0, 2).norm(dim=0) / exact.flatten(0, 2).norm(dim=0)).cpu()
    assert (error <= 6e-7).all()


@on(*FP32_KERNELS)
def test_rows_of_small_gradients(backend):
    """Rows whose dout is 1e-4 of the other rows' keep their digits, beside keys of their own."""
    q, k, v, dout = Case(200, 200, 64, batch=1, nheads=1).inputs(backend)
    dout[:, 100:] *= 1e-4
    mask = torch.ones(200, 200, dtype=torch.bool, device=q.device)
    mask[:100, 100:] = mask[100:, :100] = False
    options = {"attn_bias": mask[None, None]}
    out, lse = backend.forward(q, k, v, **options)
    exact = reference.backward(*(t[:, 100:] for t in (dout, q, k, v)))
    for found in backend.backward(dout, q, k, v, out, lse, **options):
        for part, ref in zip(found, exact):
            assert (part[:, 100:].double() - ref).norm() <= 1e-6 * ref.norm()


@on(*FP32_KERNELS)
def test_more_digits_than_fp16(backend, precision):
    """Full precision has errors below 1e-5, reduced precision above 1e-4."""
    q, k, v, _ = Case(64, 64, 64).inputs(backend)
    ref = reference.forward(q, k, v).out
    full = reference.max_error(backend.forward(q, k, v)[0], ref)
    precision("high")
    reduced = reference.max_error(backend.forward(q, k, v)[0], ref)
    assert full < 1e-5 < 1e-4 < reduced


@on(*FP32_KERNELS)
@pytest.mark.parametrize(
    "of_q,of_k,of_v,of_dout",
    [(1e5, 1e-5, 1.0, 1.0), (1e-12, 1e12, 1e20, 1e-20), (1e30, 1e-30, 1e-30, 1e20), (1e-30, 1e30, 1e30, 1e-30), (1e8, 1e-8, 1e-20, 1e10)],
)
def test_magnitudes_of_gradients(backend, of_q, of_k, of_v, of_dout):
    """Inputs far beyond fp16's range give gradients as exact as usual."""
    change = lambda q, k, v, dout: (q * of_q, k * of_k, v * of_v, dout * of_dout)  # noqa: E731
    check_gradients(backend, Case(50, 130, 64, nheads=2), change)


@on(*FP32_KERNELS)
@pytest.mark.parametrize("of_q,of_k", [(1e-3, 1.0), (1e-3, 1e-3), (1e-8, 1e-12), (1e-30, 1.0)])
def test_gradients_of_tiny_scores(backend, of_q, of_k):
    """Scores below 1e-3 take nothing from the digits of gradients, although the low parts of q and k as their factors are subnormal."""
    check_gradients(backend, Case(50, 130, 40, nheads=4, nheads_k=2), lambda q, k, v, dout: (q * of_q, k * of_k, v, dout))


@on(*FP32_KERNELS)
def test_gradients_of_many_keys(backend):
    """3000 keys make all probabilities small. Unscaled fp16 parts of dS would lose their low bits."""
    check_gradients(backend, Case(40, 3000, 64, batch=1, nheads=1), lambda q, k, v, dout: (q * 0.1, k, v, dout))


@on(*FP32_KERNELS)
@pytest.mark.parametrize("case", [Case(40, 50, 64), Case(33, 140, 40, softcap=10.0)], ids=str)
def test_gradient_of_softmax_lse(backend, case):
    """A gradient of softmax_lse (`dlse`) adds to dq and dk, beside that of out."""
    check_gradients(backend, case, dlse_too=True)


@on(*FP32_KERNELS)
def test_an_infinite_gradient_of_softmax_lse_stays_in_its_row(backend):
    """An infinite `dlse` of one row makes this row's dq infinite or NaN, and changes no other row of its tile."""
    q, k, v, dout = Case(70, 70, 64, batch=1, nheads=1).inputs(backend)
    out, lse = backend.forward(q, k, v)
    dlse = torch.zeros_like(lse)
    expected = backend.backward(dout, q, k, v, out, lse, dlse=dlse)[0][0]
    dlse[0, 0, 5] = math.inf
    for dq, *_ in backend.backward(dout, q, k, v, out, lse, dlse=dlse):
        assert not dq[0, 5].isfinite().any()
        others = torch.arange(70, device=dq.device) != 5
        torch.testing.assert_close(dq[:, others], expected[:, others], rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@on("sim-fp32")
def test_block_masks_beside_several_launches(backend, gpu):
    """With two launches over keys, sums of dq stay in memory between them, and a row's list may have no block in one launch.

    A launch stores at most 2,048 tiles of 128 x 128 scores (src/plan/backward/plan.rs). Here 16 heads x 43 query tiles x 3 key tiles are
    2,064. (A launch with fewer than 640 blocks of gradients might store more. 16 * 43 of dq alone are 688.) The mask shows a few blocks."""
    case = Case(5504, 384, 16, batch=1, nheads=16, nheads_k=1)
    mask = torch.zeros(1, 1, case.seqlen_q, case.seqlen_k, dtype=torch.bool)
    mask[..., 128:256, 128:192] = mask[..., -128:-30, :64] = mask[..., -60:, 300:330] = True
    seeing = [*range(128, 256), *range(case.seqlen_q - 128, case.seqlen_q)]  # queries that see a key
    (q, k, v, dout), options = case.problem(backend)
    options |= block_masks.options_of(mask)
    out, lse = backend.forward(q, k, v, **options)
    launches = backend.launches(lambda: torch.ops.volta_fa.bwd(dout, q, k, v, out, lse, **options), "launches")
    assert sum("scores" in launch["kernel"] for launch in launches) == 2
    [(dq, dk, dv)] = backend.backward(dout, q, k, v, out, lse, **options)[:1]
    exact = reference.backward(dout[:, seeing], q[:, seeing], k, v, attn_bias=mask[:, :, seeing])
    for found, wanted in zip((dq[:, seeing], dk, dv), exact):
        torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-5)
    assert dq.count_nonzero() == dq[:, seeing].count_nonzero()


@pytest.mark.parametrize("headdim", [64, 512])
@on("cuda")
def test_a_graph_and_a_compiled_function_have_the_same_bits(backend, headdim):
    q, k, v = (torch.randn(1, 200, 2, headdim, device="cuda", requires_grad=True) for _ in range(3))

    def step(q, k, v):
        out, *_ = torch.ops.volta_fa.fwd(q, k, v, is_causal=True)
        # without the graph of out: its leaves would hold the default stream, which a capture may not wait for
        return (out.detach(), *torch.autograd.grad(out.square().sum(), (q, k, v)))

    expected = step(q, k, v)
    graph, found = captured(lambda: step(q, k, v))
    graph.replay()
    compiled = torch.compile(lambda q, k, v: torch.ops.volta_fa.fwd(q, k, v, is_causal=True)[0], backend="aot_eager", fullgraph=True)
    out = compiled(q, k, v)
    assert torch.equal(out, expected[0])
    for results in (found, (out, *torch.autograd.grad(out.square().sum(), (q, k, v)))):
        assert all(torch.equal(a, b) for a, b in zip(results, expected))


@pytest.mark.parametrize("mode", ["highest", "high", "medium"])
def test_the_setting_is_read_at_each_call(mode, precision):
    precision(mode)
    assert torch.ops.volta_fa._reduces_fp32() == (mode != "highest")
    assert volta_fa.info()["float32"] == ("two fp16 parts" if mode == "highest" else "scaled fp16")
