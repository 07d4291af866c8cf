"""The gradient of softmax_lse, against the fp64 reference: what a loss on it adds to the gradients of q, k, v, a bias and sinks."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from conftest import ALL, BF16_KERNELS, Case, check, on, on_cases

op = torch.ops.volta_fa
GPUS = ("v100", "t4")

BASE = Case(67, 93, 64, nheads=4, nheads_k=2)


def changed(**fields) -> Case:
    return dataclasses.replace(BASE, **fields)


CASES = [
    BASE,
    # one block has all keys: without this gradient one kernel computes the whole backward pass
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


@pytest.fixture(params=GPUS)
def gpu(request, backend):
    """Runs simulated kernels of each family, and other backends once."""
    if backend.machine == "sim":
        backend.monkeypatch.setenv("VOLTA_FA_SIM_GPU", request.param)
    elif request.param != GPUS[0]:
        pytest.skip("the simulator alone has several GPUs")


def gradient_of_lse(backend, q):
    """Returns numbers as large as those of dout."""
    rows = (q.shape[0], q.shape[2], q.shape[1]) if q.dim() == 4 else (q.shape[1], q.shape[0])
    return backend.randn(*rows).float()


#: Other dtypes take the same road.
OF_EACH_DTYPE = CASES[1::4]


@on_cases((["cpu-fp32", "sim", "cuda"], CASES), (ALL + BF16_KERNELS, OF_EACH_DTYPE), slow=((ALL + BF16_KERNELS, CASES),))
def test_gradients(backend, gpu, case):
    inputs, options = case.problem(backend)
    backend.forward_on_cpu = backend.machine == "sim"
    check(backend, *inputs, deterministic=case.deterministic, dlse=gradient_of_lse(backend, inputs[0]), **options)


@pytest.mark.parametrize("scale", [2.0**-12, 2.0**12], ids=["small", "large"])
@on("cpu-fp32", *BF16_KERNELS)
def test_other_magnitudes_than_dout(backend, scale):
    """bf16 has room for both."""
    (q, k, v, dout), options = BASE.problem(backend)
    check(backend, q, k, v, dout, dlse=gradient_of_lse(backend, q) * scale, **options)
    check(backend, q, k, v, dout * 2.0**-100, dlse=gradient_of_lse(backend, q) * 2.0**-100 * scale, **options)


@on("cpu-fp32", "sim")
def test_rows_without_a_key_take_no_gradient(backend):
    """Their softmax_lse is +inf, and a loss on it may send anything."""
    (q, k, v, dout), _ = changed(seqlen_q=150).problem(backend)
    out, lse = backend.forward(q, k, v, is_causal=True)
    dlse = gradient_of_lse(backend, q)
    expected = backend.backward(dout, q, k, v, out, lse, is_causal=True, deterministic=True, dlse=dlse)[0]
    dlse[lse == float("inf")] = float("nan")
    assert dlse.isnan().any()
    found = backend.backward(dout, q, k, v, out, lse, is_causal=True, deterministic=True, dlse=dlse)[0]
    assert all(torch.equal(a, b) for a, b in zip(found, expected))


# ---- autograd -------------------------------------------------------------------------------------------------------


def scores(q, k):
    return torch.einsum("bihd,bjhd->bhij", q, k) * q.shape[-1] ** -0.5


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
                s = scores(*leaves[:2])
                out, lse = torch.einsum("bhij,bjhd->bihd", s.softmax(-1), leaves[2]), s.logsumexp(-1)
            parts = [w * t for w, t in zip(weights, ((out * dout).sum(), lse.square().sum())) if w]
            results.append(torch.autograd.grad(sum(parts), leaves, allow_unused=True))
        for found, expected in zip(*results):
            expected = torch.zeros_like(v) if expected is None else expected
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@on("cpu-fp32")
def test_unused_lse_has_no_gradient(backend):
    """The operator gets none, so nothing is paid for it."""
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
    if backend.machine == "sim":
        backend.monkeypatch.setenv("VOLTA_FA_SIMULATE", "1")
    q, k, v, dout = Case(9, 11, 16, nheads=2).inputs(backend)
    out, lse, _ = op.fwd(q, k, v)
    for wrong, words in ((lse.half(), "dlse: got dtype torch.float16"), (lse[:, :1], r"dlse: got shape \(2, 1, 9\)")):
        with pytest.raises(ValueError, match=words):
            op.bwd(dout, q, k, v, out, lse, dlse=wrong)
    expanded = torch.ones((), dtype=torch.float32).expand(lse.shape)
    for found, expected in zip(
        *(op.bwd(dout, q, k, v, out, lse, dlse=t, deterministic=True)[:3] for t in (expanded, torch.ones_like(lse)))
    ):
        assert torch.equal(found, expected)
