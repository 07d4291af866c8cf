"""Bad input: the exception's type, and a message that names the argument and says what is allowed.

The rules themselves are tested without tensors in tests/problem.rs; here they arrive in Python, from every backend,
with nothing launched.
"""

import json

import pytest
import torch

from conftest import INFO, LIBRARY, on
from test_autograd import run_python


@pytest.fixture
def good(backend):
    """A valid call's q, k, v and options; tests spoil one of them."""
    if backend.name == "sim":
        # timed simulations report every launch, so that none can hide
        backend.monkeypatch.setenv("VOLTA_FA_SIMULATE", "timing")
        torch.ops.volta_fa._sim_report()
    return {
        "q": backend.randn(2, 10, 6, 64),
        "k": backend.randn(2, 12, 3, 64),
        "v": backend.randn(2, 12, 3, 32),
    }


def refused(call, exception, *words):
    with pytest.raises(exception) as e:
        call()
    assert type(e.value) is exception, f"{type(e.value)} instead of {exception}"
    for word in words:
        assert word in str(e.value), f"{str(e.value)!r} does not say {word!r}"
    assert "\n" not in str(e.value).strip(), "a message is one line"
    if INFO["simulator"]:
        assert json.loads(torch.ops.volta_fa._sim_report()) == [], "something was launched"


def call(arguments):
    arguments = dict(arguments)
    q, k, v = (arguments.pop(n) for n in "qkv")
    return lambda: torch.ops.volta_fa.fwd(q, k, v, **arguments)


def misaligned(t):
    flat = torch.empty(t.numel() + 1, dtype=t.dtype, device=t.device)[1:]
    return flat.view(t.shape).copy_(t)


# name: (what to spoil, words of the message)
TENSORS = {
    "q rank 3": (lambda a: {"q": a["q"][0]}, ["q: got", "rank 3", "rank 4", "(batch, seqlen, nheads, headdim)"]),
    "k rank 5": (lambda a: {"k": a["k"][None]}, ["k: got", "rank 5", "rank 4"]),
    "v rank 2": (lambda a: {"v": a["v"][0, 0]}, ["v: got", "rank 2", "rank 4"]),
    "int q": (lambda a: {"q": a["q"].int()}, ["q: got", "torch.int32", "torch.float16"]),
    "complex q": (lambda a: {"q": a["q"].to(torch.complex64)}, ["q: got", "torch.complex64"]),
    "k dtype": (lambda a: {"k": a["k"].to(torch.bfloat16)}, ["k: got", "torch.bfloat16"]),
    "v dtype": (lambda a: {"v": a["v"].double()}, ["v: got", "torch.float64"]),
    "k batch": (lambda a: {"k": a["k"][:1]}, ["k: got batch 1", "batch 2"]),
    "v batch": (lambda a: {"v": torch.cat([a["v"]] * 2)}, ["v: got batch 4", "batch 2"]),
    "v seqlen": (lambda a: {"v": a["v"][:, :11]}, ["v: got seqlen 11", "seqlen 12", "k"]),
    "v nheads": (lambda a: {"v": a["v"][:, :, :1]}, ["v: got nheads 1", "nheads 3", "k"]),
    "nheads not divisible": (lambda a: {"q": a["q"][:, :, :5]}, ["q: got nheads 5", "multiple of nheads_k 3"]),
    "fewer query heads": (lambda a: {"q": a["q"][:, :, :2]}, ["q: got nheads 2", "multiple of nheads_k 3"]),
    "no key heads": (lambda a: {"k": a["k"][:, :, :0], "v": a["v"][:, :, :0]}, ["q: got nheads 6", "nheads_k 0"]),
    "k headdim": (lambda a: {"k": a["k"][..., :32]}, ["k: got headdim 32", "headdim 64"]),
    "headdim 20": (lambda a: {"q": a["q"][..., :20], "k": a["k"][..., :20]}, ["q: got headdim 20", "multiple of 8"]),
    "headdim 0": (lambda a: {"q": a["q"][..., :0], "k": a["k"][..., :0]}, ["q: got headdim 0", "multiple of 8"]),
    "headdim 264": (
        lambda a: {"q": a["q"].repeat(1, 1, 1, 5)[..., :264], "k": a["k"].repeat(1, 1, 1, 5)[..., :264]},
        ["q: got headdim 264", "8 to 256"],
    ),
    "headdim_v 12": (lambda a: {"v": a["v"][..., :12]}, ["v: got headdim 12", "multiple of 8"]),
    "headdim_v 320": (lambda a: {"v": a["v"].repeat(1, 1, 1, 10)}, ["v: got headdim 320", "8 to 256"]),
    "q last dimension": (
        lambda a: {"q": a["q"].transpose(2, 3).contiguous().transpose(2, 3)},
        ["q: got stride 6", "contiguous last dimension"],
    ),
    "k every other": (lambda a: {"k": a["k"].repeat(1, 1, 1, 2)[..., ::2]}, ["k: got stride 2", "contiguous last dimension"]),
    "v expanded": (lambda a: {"v": a["v"][..., :1].expand(2, 12, 3, 32)}, ["v: got stride 0", "contiguous last dimension"]),
}

SCALARS = {
    "dropout_p 1": ({"dropout_p": 1.0}, ["dropout_p: got 1", "[0, 1)"]),
    "dropout_p negative": ({"dropout_p": -0.1}, ["dropout_p: got -0.1", "[0, 1)"]),
    "dropout_p nan": ({"dropout_p": float("nan")}, ["dropout_p: got NaN", "[0, 1)"]),
    "softmax_scale inf": ({"softmax_scale": float("inf")}, ["softmax_scale: got inf", "finite"]),
    "softmax_scale nan": ({"softmax_scale": float("nan")}, ["softmax_scale: got NaN", "finite"]),
    "softmax_scale beyond fp32": ({"softmax_scale": 1e300}, ["softmax_scale: got", "float32"]),
    "window_left": ({"window_left": -2}, ["window_left: got -2", "-1 (no bound)"]),
    "window_right": ({"window_right": -100}, ["window_right: got -100", "-1 (no bound)"]),
    "softcap": ({"softcap": -1.0}, ["softcap: got -1", "positive"]),
    "softcap inf": ({"softcap": float("inf")}, ["softcap: got inf", "finite"]),
}


@pytest.mark.parametrize("name", TENSORS)
@on("cpu-fp32", "sim", "cuda")
def test_tensors(backend, good, name):
    spoil, words = TENSORS[name]
    refused(call({**good, **spoil(good)}), ValueError, "volta_fa::fwd", *words)


@pytest.mark.parametrize("name", SCALARS)
@on("cpu-fp32", "sim", "cuda")
def test_scalars(backend, good, name):
    options, words = SCALARS[name]
    refused(call({**good, **options}), ValueError, "volta_fa::fwd", *words)


@pytest.mark.parametrize("name", ["q", "k", "v"])
@on("cpu-fp32", "cpu-fp16")
def test_the_cpu_takes_any_pointer(backend, good, name):
    out = call({**good, name: misaligned(good[name])})()[0]
    assert torch.equal(out, call(good)()[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@on("cuda")
def test_kernels_take_fp16_only(backend, good, dtype):
    spoiled = {n: t.to(dtype) for n, t in good.items()}
    refused(call(spoiled), ValueError, "q: got", str(dtype), "torch.float16")


@pytest.mark.parametrize("name", ["q", "k", "v"])
@on("cuda")
def test_devices(backend, good, name):
    spoiled = "k" if name == "q" else name  # q says where the others belong
    expected = ["cpu", "cuda:0"]
    refused(call({**good, name: good[name].cpu()}), ValueError, f"{spoiled}: got device", *expected)


# ---- what the schema has and this version lacks -------------------------------------------------------------------


def features(backend):
    ints = torch.tensor([0, 5, 10], dtype=torch.int32, device=backend.device)
    return {
        "cu_seqlens_q": ints,
        "cu_seqlens_k": ints,
        "max_seqlen_q": 10,
        "max_seqlen_k": 12,
        "seqused_k": ints[1:],
        "attn_bias": backend.randn(2, 6, 10, 12),
        "alibi_slopes": torch.ones(6, device=backend.device),
        "sinks": torch.ones(6, device=backend.device),
        "dropout_p": 0.1,
        "softcap": 30.0,
    }


@pytest.mark.parametrize("name", ["cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "seqused_k", "attn_bias", "alibi_slopes", "sinks", "dropout_p", "softcap"])
@on("cpu-fp32", "sim", "cuda")
def test_features_to_come(backend, good, name):
    refused(call({**good, name: features(backend)[name]}), NotImplementedError, "volta_fa::fwd", name, "not implemented")


@on("cpu-fp32", "sim", "cuda")
def test_cu_seqlens_type(backend, good):
    """A wrong type is the user's mistake, and said first."""
    for name in ("cu_seqlens_q", "cu_seqlens_k"):
        ints = features(backend)[name]
        refused(call({**good, name: ints.long()}), ValueError, f"{name}: got", "torch.int64", "torch.int32")
        refused(call({**good, name: ints.float()}), ValueError, f"{name}: got", "torch.float32", "torch.int32")
        refused(call({**good, name: ints[None]}), ValueError, f"{name}: got", "(batch + 1,)")


# ---- backward -------------------------------------------------------------------------------------------------------

SAVED = {
    "dout shape": ({"dout": lambda a: a["dout"][..., :24]}, ["dout: got shape (2, 10, 6, 24)", "(2, 10, 6, 32)"]),
    "dout rank": ({"dout": lambda a: a["dout"][0]}, ["dout: got", "rank 3"]),
    "dout dtype": ({"dout": lambda a: a["dout"].to(torch.bfloat16)}, ["dout: got", "torch.bfloat16"]),
    "out shape": ({"out": lambda a: a["out"][:, :9]}, ["out: got shape (2, 9, 6, 32)", "(2, 10, 6, 32)"]),
    "out dtype": ({"out": lambda a: a["out"].double()}, ["out: got", "torch.float64"]),
    "softmax_lse shape": ({"softmax_lse": lambda a: a["softmax_lse"][:, :5]}, ["softmax_lse: got shape (2, 5, 10)", "(2, 6, 10)"]),
    "softmax_lse dtype": ({"softmax_lse": lambda a: a["softmax_lse"].half()}, ["softmax_lse: got", "torch.float16", "torch.float32"]),
    "k shape": ({"k": lambda a: a["k"][..., :32]}, ["k: got headdim 32", "headdim 64"]),
    "window": ({"window_left": lambda a: -3}, ["window_left: got -3"]),
}


@pytest.mark.parametrize("name", SAVED)
@on("cpu-fp32", "sim", "cuda")
def test_backward(backend, good, name):
    out = backend.randn(2, 10, 6, 32)
    arguments = {"dout": out, **good, "out": out, "softmax_lse": torch.zeros(2, 6, 10, device=backend.device)}
    spoil, words = SAVED[name]
    arguments.update({n: f(arguments) for n, f in spoil.items()})
    order = ["dout", "q", "k", "v", "out", "softmax_lse"]
    tensors = [arguments.pop(n) for n in order]
    refused(lambda: torch.ops.volta_fa.bwd(*tensors, **arguments), ValueError, "volta_fa::bwd", *words)


# ---- surroundings ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "variable,value", [("VOLTA_FA_SIMULATE", "yes"), ("VOLTA_FA_SIM_QUANTUM", "many"), ("VOLTA_FA_SIM_THREADS", "x")]
)
@on("sim")
def test_environment(backend, good, variable, value):
    backend.monkeypatch.setenv("VOLTA_FA_SIMULATE", "1")
    backend.monkeypatch.setenv(variable, value)
    refused(call(good), ValueError, variable, value)


@on("sim")
def test_machine_constants(backend, good):
    backend.monkeypatch.setenv("VOLTA_FA_SIM_SET", "nosuchconstant=1")
    refused(call(good), ValueError, "VOLTA_FA_SIM_SET", "nosuchconstant")


def test_simulating_without_the_simulator(monkeypatch):
    if INFO["simulator"]:
        pytest.skip("this library has the simulator")
    monkeypatch.setenv("VOLTA_FA_SIMULATE", "1")
    q = torch.zeros(1, 4, 1, 8, dtype=torch.float16)
    refused(lambda: torch.ops.volta_fa.fwd(q, q, q), NotImplementedError, "VOLTA_FA_SIMULATE", "`sim`")


@on("cuda")
def test_sticky_cuda_error(backend):
    """A fault of earlier work on the device: an exception, not a crash, and not blamed on the arguments."""
    output = run_python(
        """
        import sys, torch
        torch.ops.load_library(sys.argv[1])
        q = torch.randn(1, 64, 1, 64, device="cuda", dtype=torch.float16)
        torch.ops.volta_fa.fwd(q, q, q)
        table = torch.zeros(4, device="cuda")
        table[torch.tensor([10**6], device="cuda")]  # a device-side assertion fails
        try:
            torch.cuda.synchronize()
        except RuntimeError:
            print("lost")
        try:
            torch.ops.volta_fa.fwd(q, q, q)
            print("no error")
        except RuntimeError as e:
            print("CUDA" in str(e), "q:" in str(e))
        sys.stdout.flush()
        import os; os._exit(0)  # the context is lost; do not tear it down
        """,
        LIBRARY,
    )
    assert output.split() == ["lost", "True", "False"]
