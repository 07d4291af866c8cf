"""float32 tensors on the kernels: in full precision by default, and as scaled fp16 where torch.set_float32_matmul_precision allows it."""

import itertools
import math

import pytest
import torch
from torch import Tensor

import reference
import volta_fa
from cases import Case
from conftest import FP32_KERNELS, HAS_CUDA, on, on_cases

NEEDS_GPU = pytest.mark.skipif(not HAS_CUDA, reason="no GPU")

#: Largest error relative to that of PyTorch's fp32 attention, written out.
FACTOR = 4
#: The same where operands are rounded to 11 bits, relative to attention of operands rounded to TF32.
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
    return reference.max_error(found, ref), reference.rms_error(found, ref)


def check(backend, case: Case, change=lambda *inputs: inputs, rounded=lambda t: t, factor=FACTOR) -> Tensor:
    """Compares with fp64, relative to the error of eager fp32 attention of rounded inputs. `change`: of q, k and v. Returns out."""
    (q, k, v, _), options = case.problem(backend)
    q, k, v = change(q, k, v)
    out, lse = backend.forward(q, k, v, **options)
    assert out.dtype == torch.float32 and out.shape == (*q.shape[:-1], v.shape[-1])
    for group in reference.groups(q, k, **options):
        if not group.q_rows.numel():
            continue
        qs, ks, vs = group.queries(q), group.keys(k), group.keys(v)
        ref = reference.forward(qs, ks, vs, **group.options)
        eager = reference.eager(*map(rounded, (qs, ks, vs)), **group.options)
        floor = 2.0**-22 * float(vs.abs().max()) if vs.numel() else 0.0
        for error, allowed in zip(errors(group.queries(out), ref.out), errors(eager, ref.out)):
            assert error <= factor * max(allowed, floor / factor), (error, allowed, floor)
        found, expected = group.lse(lse).double(), ref.softmax_lse
        assert torch.equal(found == math.inf, expected == math.inf)
        seen = expected != math.inf
        tolerance = 2e-5 if factor == FACTOR else 2e-2
        torch.testing.assert_close(found[seen], expected[seen], rtol=tolerance, atol=tolerance)
    return out


@on_cases((FP32_KERNELS, CASES))
def test_full_precision(backend, case):
    check(backend, case)


@on_cases((FP32_KERNELS, [*CASES[:4], Case(40, 50, 256), Case(40, 70, 64, dropout_p=0.0, softcap=5.0)]))
def test_reduced_precision(backend, case, precision):
    precision("high")
    check(backend, case, rounded=as_tf32, factor=REDUCED_FACTOR)


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


@on_cases((FP32_KERNELS, GRADIENT_CASES))
@pytest.mark.parametrize("deterministic", [False, True])
def test_gradients_in_reduced_precision(backend, case, deterministic, precision):
    """dq, dk and dv are float32, and as exact as eager attention's of operands rounded to TF32. Magnitudes beyond fp16's range."""
    precision("high")
    (q, k, v, dout), options = case.problem(backend)
    q, k, v, dout = q * 1e6, k * 1e-6, v * 1e7, dout * 1e-5
    out, lse, state = backend.forward_and_state(q, k, v, **options)
    # the state of a call without dropout is empty
    given = options | ({"rng_state": state} if case.dropout_p else {})
    for found in backend.backward(dout, q, k, v, out, lse, deterministic=deterministic, **given):
        for group in reference.groups(q, k, reference.kept_by(state, q.shape[-2], **options), **options):
            qs, ks, vs, do = group.queries(q), group.keys(k), group.keys(v), group.queries(dout)
            expected = reference.backward(do, qs, ks, vs, **group.options)
            rounded = reference.eager_gradients(*map(as_tf32, (do, qs, ks, vs)), **group.options)
            parts = [group.queries(found[0]), group.keys(found[1]), group.keys(found[2])]
            for name, part, exact, eager in zip(("dq", "dk", "dv"), parts, expected, rounded):
                assert part.dtype == torch.float32 and part.isfinite().all()
                # dS is rounded to 11 bits too: three roundings, as in fp16's rule
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
    case = Case(50, 130, 64, nheads=2)
    change = lambda q, k, v: (q * of_q, k * of_k, v * of_v)  # noqa: E731
    out = check(backend, case, change, *((as_tf32, REDUCED_FACTOR) if mode == "high" else ()))
    assert out.isfinite().all()


@on(*FP32_KERNELS)
def test_rows_of_different_magnitudes(backend):
    """Rows of one tensor that differ by 1e6."""
    case = Case(60, 60, 64)
    rows = torch.logspace(-6, 0, 60, device=backend.device)[None, :, None, None]
    for of_q, of_k in itertools.product((1.0, rows), repeat=2):
        check(backend, case, lambda q, k, v: (q * of_q, k * of_k, v))


@on(*FP32_KERNELS)
def test_more_digits_than_fp16(backend, precision):
    """The two precisions differ, as their names say: a program that asks for all digits gets them."""
    case = Case(64, 64, 64)
    q, k, v, _ = case.inputs(backend)
    ref = reference.forward(q, k, v).out
    full = reference.max_error(backend.forward(q, k, v)[0], ref)
    precision("high")
    reduced = reference.max_error(backend.forward(q, k, v)[0], ref)
    assert full < 1e-5 < 1e-4 < reduced


@NEEDS_GPU
@pytest.mark.parametrize("options,match", [({"dropout_p": 0.5}, "dropout_p 0.5"), ({}, "headdim 256")])
def test_what_has_no_kernel_is_refused(options, match):
    q = torch.randn(1, 8, 1, 64 if options else 256, device="cuda")
    with pytest.raises(ValueError, match=match):
        torch.ops.volta_fa.fwd(q, q, q, **options)


@NEEDS_GPU
def test_gradients_in_full_precision_are_refused_on_a_gpu():
    q = torch.randn(1, 8, 1, 64, device="cuda", requires_grad=True)
    with pytest.raises(NotImplementedError, match="set_float32_matmul_precision"):
        torch.ops.volta_fa.fwd(q, q, q)
    with pytest.raises(ValueError, match="set_float32_matmul_precision"):
        torch.ops.volta_fa.bwd(q, q, q, q, q, q.new_empty(1, 1, 8))


@pytest.mark.parametrize("mode", ["highest", "high", "medium"])
def test_the_setting_is_read_at_each_call(mode, precision):
    precision(mode)
    assert torch.ops.volta_fa._reduces_fp32() == (mode != "highest")
    assert volta_fa.info()["float32"] == ("two fp16 parts" if mode == "highest" else "scaled fp16")
