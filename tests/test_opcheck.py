"""torch.library.opcheck: schema, autograd registration, fake tensors, AOT dispatch; on the CPU, the simulator and a GPU."""

import pytest
import torch
from torch.library import opcheck

from conftest import Case, on

CASES = [
    Case(7, 9, 16, nheads=4, nheads_k=2),
    Case(9, 7, 16, 24, is_causal=True),
    Case(6, 6, 8, window_left=2, window_right=1, softmax_scale=0.3),
    Case(5, 4, 8, batch=1, nheads=1),
    Case(headdim=8, lengths=((3, 5), (0, 2), (4, 1)), is_causal=True, spare=2),
    Case(headdim=8, lengths=((3, 5), (4, 2)), bias="hqk:fp32", sinks="own"),
    Case(7, 9, 8, used=(9, 4)),
    Case(7, 9, 8, bias="bqk:own"),
    Case(7, 9, 8, bias="hk:fp32", sinks="fp32", alibi="bh"),
    Case(7, 9, 8, bias="qk:bool", softcap=2.0),
    Case(7, 9, 8, dropout_p=0.3, sinks="own", alibi="h"),
]
BACKENDS = on("cpu-fp32", "sim", "cuda", slow=("cpu-bf16", "sim-bf16"))


def problem(backend, case, requires_grad):
    """q, k, v, dout and the options; of these the ones that can need a gradient do so."""
    if backend.machine == "sim":
        backend.monkeypatch.setenv("VOLTA_FA_SIMULATE", "1")
    tensors, options = case.problem(backend)
    for t in (*tensors, options.get("attn_bias"), options.get("sinks")):
        if t is not None and t.is_floating_point():
            t.requires_grad_(requires_grad)
    return tensors, options


def tolerance(backend):
    """Runs of the kernels differ in dq and the gradient of a bias, which atomics add up."""
    return {"atol": 2e-3, "rtol": 2e-3} if backend.kernels else {}


@pytest.mark.parametrize("requires_grad", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("case", CASES, ids=str)
@BACKENDS
def test_forward(backend, case, requires_grad):
    (q, k, v, _), options = problem(backend, case, requires_grad)
    opcheck(torch.ops.volta_fa.fwd.default, (q, k, v), options, **tolerance(backend))


@pytest.mark.parametrize("case", CASES, ids=str)
@BACKENDS
def test_backward(backend, case):
    (q, k, v, dout), options = problem(backend, case, False)
    out, lse, rng_state = torch.ops.volta_fa.fwd(q, k, v, **options)
    options |= {"rng_state": rng_state, "attn_bias_requires_grad": case.bias != "" and not case.bias.endswith("bool")}
    opcheck(torch.ops.volta_fa.bwd.default, (dout, q, k, v, out, lse), options, **tolerance(backend))


@on("cpu-fp32", "sim", "cuda")
def test_strided_inputs(backend):
    if backend.name == "sim":
        backend.monkeypatch.setenv("VOLTA_FA_SIMULATE", "1")
    case = Case(7, 9, 16)
    q, k, v, dout = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in case.inputs(backend))
    opcheck(torch.ops.volta_fa.fwd.default, (q, k, v))
    out, lse, _ = torch.ops.volta_fa.fwd(q, k, v)
    opcheck(torch.ops.volta_fa.bwd.default, (dout, q, k, v, out, lse), **tolerance(backend))
