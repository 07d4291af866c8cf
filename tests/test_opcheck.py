"""torch.library.opcheck: schema, autograd registration, fake tensors, AOT dispatch; on all backends."""

import pytest
import torch
from torch.library import opcheck

from conftest import Case, on

CASES = [
    Case(7, 9, 16, nheads=4, nheads_k=2),
    Case(9, 7, 16, 24, is_causal=True),
    Case(6, 6, 8, window_left=2, window_right=1, softmax_scale=0.3),
    Case(5, 4, 8, batch=1, nheads=1),
]


def tensors(backend, case, requires_grad):
    return [t.requires_grad_(requires_grad) for t in case.inputs(backend)]


@pytest.mark.parametrize("requires_grad", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("case", CASES, ids=str)
@on("cpu-fp32", "cpu-bf16", "sim", "cuda")
def test_forward(backend, case, requires_grad):
    if backend.name == "sim":
        backend.monkeypatch.setenv("VOLTA_FA_SIMULATE", "1")
    q, k, v, _ = tensors(backend, case, requires_grad)
    tolerance = {"atol": 2e-3, "rtol": 2e-3} if backend.name == "cuda" else {}  # dq is summed by atomics
    opcheck(torch.ops.volta_fa.fwd.default, (q, k, v), case.options, **tolerance)


@pytest.mark.parametrize("case", CASES, ids=str)
@on("cpu-fp32", "cpu-bf16", "sim", "cuda")
def test_backward(backend, case):
    if backend.name == "sim":
        backend.monkeypatch.setenv("VOLTA_FA_SIMULATE", "1")
    q, k, v, dout = tensors(backend, case, False)
    out, lse, rng_state = torch.ops.volta_fa.fwd(q, k, v, **case.options)
    tolerance = {"atol": 2e-3, "rtol": 2e-3} if backend.name == "cuda" else {}
    options = {**case.options, "rng_state": rng_state}
    opcheck(torch.ops.volta_fa.bwd.default, (dout, q, k, v, out, lse), options, **tolerance)


@on("cpu-fp32", "sim", "cuda")
def test_strided_inputs(backend):
    if backend.name == "sim":
        backend.monkeypatch.setenv("VOLTA_FA_SIMULATE", "1")
    case = Case(7, 9, 16)
    q, k, v, dout = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in case.inputs(backend))
    opcheck(torch.ops.volta_fa.fwd.default, (q, k, v))
    out, lse, _ = torch.ops.volta_fa.fwd(q, k, v)
    tolerance = {"atol": 2e-3, "rtol": 2e-3} if backend.name == "cuda" else {}
    opcheck(torch.ops.volta_fa.bwd.default, (dout, q, k, v, out, lse), **tolerance)
