"""The ops inside PyTorch: autograd, autocast, torch.compile, TorchScript, fake tensors, and without our Python package."""

import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch._dynamo.utils import counters

import reference
from conftest import LIBRARY, Case, on


def fwd(q, k, v, **options):
    return torch.ops.volta_fa.fwd(q, k, v, **options)[0]


def leaves(tensors):
    return [t.detach().clone().requires_grad_() for t in tensors]


GRADCHECK = [
    Case(5, 7, 8, 16, batch=2, nheads=4, nheads_k=2),
    Case(6, 6, 8, is_causal=True, batch=1),
    Case(7, 4, 8, is_causal=True, batch=1),  # rows without any key
    Case(6, 9, 8, window_left=2, window_right=1, batch=1, nheads=2, nheads_k=1),
    Case(4, 5, 16, softmax_scale=-0.7, batch=1),
    Case(4, 5, 8, softmax_scale=0.0, batch=1),
]


@pytest.mark.parametrize("case", GRADCHECK, ids=str)
@on("cpu-fp64")
def test_gradcheck(backend, case):
    q, k, v, _ = case.inputs(backend)
    assert torch.autograd.gradcheck(lambda *t: fwd(*t, **case.options), leaves((q, k, v)))


@pytest.mark.parametrize("case", GRADCHECK, ids=str)
@on("cpu-fp64")
def test_gradient_is_bwd(backend, case):
    """Autograd's gradient is volta_fa::bwd's, and the reference's."""
    q, k, v, dout = case.inputs(backend)
    inputs = leaves((q, k, v))
    found = torch.autograd.grad(fwd(*inputs, **case.options), inputs, dout)
    for g, r in zip(found, reference.backward(dout, q, k, v, **case.options)):
        torch.testing.assert_close(g, r)


@on("cpu-fp32", "sim", "cuda")
def test_autograd_through_the_backend(backend):
    """requires_grad, backward() and a scalar loss, whose gradient arrives expanded with strides of 0."""
    if backend.name == "sim":
        backend.monkeypatch.setenv("VOLTA_FA_SIMULATE", "1")
    case = Case(20, 30, 64, nheads=4, nheads_k=2, is_causal=True)
    q, k, v, _ = case.inputs(backend)
    inputs = leaves((q, k, v))
    fwd(*inputs, **case.options).sum().backward()
    ones = torch.ones_like(q)
    for t, r in zip(inputs, reference.backward(ones, q, k, v, **case.options)):
        torch.testing.assert_close(t.grad.double(), r, rtol=5e-3, atol=5e-3)


@on("cpu-fp32")
def test_only_the_gradients_asked_for(backend):
    q, k, v, dout = Case(5, 6, 8).inputs(backend)
    for wanted in ([0], [1], [2], [0, 2]):
        inputs = [q.clone(), k.clone(), v.clone()]
        for i in wanted:
            inputs[i].requires_grad_()
        fwd(*inputs).backward(dout)
        for i, t in enumerate(inputs):
            assert (t.grad is not None) == (i in wanted)
    with torch.no_grad():
        assert not fwd(*leaves((q, k, v))).requires_grad
    assert not fwd(q, k, v).requires_grad


@on("cpu-fp32")
def test_lse_and_rng_state_are_not_differentiable(backend):
    out, lse, rng_state = torch.ops.volta_fa.fwd(*leaves(Case(5, 6, 8).inputs(backend)[:3]))
    assert out.requires_grad and not lse.requires_grad and not rng_state.requires_grad
    assert rng_state.numel() == 0 and rng_state.dtype == torch.int64


@on("cpu-fp64", "cuda")
def test_second_derivative_is_refused(backend):
    inputs = leaves(Case(5, 6, 8).inputs(backend)[:3])
    out = fwd(*inputs)
    grads = torch.autograd.grad(out.square().sum(), inputs, create_graph=True)
    with pytest.raises(RuntimeError, match="volta_fa::bwd"):
        torch.autograd.grad(grads[0].sum(), inputs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@on("cpu-fp32")
def test_autocast_cpu(backend, dtype):
    q, k, v, dout = Case(20, 20, 16, is_causal=True).inputs(backend)
    inputs = leaves((q, k, v))
    with torch.autocast("cpu", dtype=dtype):
        out = fwd(*inputs, is_causal=True)
        mixed = fwd(inputs[0].to(dtype), inputs[1], inputs[2], is_causal=True)
    assert out.dtype == dtype and torch.equal(out, mixed)
    assert torch.equal(out, fwd(*(t.to(dtype) for t in inputs), is_causal=True))
    out.backward(dout.to(dtype))
    assert all(t.grad.dtype == torch.float32 for t in inputs)
    for t, r in zip(inputs, reference.backward(dout, q, k, v, is_causal=True)):
        torch.testing.assert_close(t.grad.double(), r, rtol=0.05, atol=0.05)


@on("cuda")
def test_autocast_cuda(backend):
    tensors = [t.float() for t in Case(40, 40, 64).inputs(backend)]
    inputs = leaves(tensors[:3])
    with torch.autocast("cuda", dtype=torch.float16):
        out = fwd(*inputs)
    assert out.dtype == torch.float16
    out.backward(tensors[3].half())
    assert all(t.grad.dtype == torch.float32 for t in inputs)


# ---- torch.compile --------------------------------------------------------------------------------------------------


def block(x, weight, nheads):
    """A small attention layer, with views and a projection around the op."""
    b, s, _ = x.shape
    q, k, v = (x @ weight).view(b, s, 3, nheads, -1).unbind(2)
    return fwd(q, k, v, is_causal=True).reshape(b, s, -1).square()


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@on("cpu-fp32", "cuda")
def test_compile(backend, dynamic):
    torch.compiler.reset()
    counters.clear()
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for seqlen in (8, 13, 21):
        x, weight = backend.randn(2, seqlen, 32), backend.randn(32, 96, spread=0.2)
        results = []
        for f in (block, compiled):
            inputs = leaves((x, weight))
            out = f(*inputs, 4)
            out.sum().backward()
            results.append((out.detach(), *(t.grad for t in inputs)))
        for a, b in zip(*results):
            torch.testing.assert_close(a, b, rtol=1e-2 if backend.name == "cuda" else 1e-5, atol=1e-2 if backend.name == "cuda" else 1e-5)
    if dynamic:
        assert counters["stats"]["unique_graphs"] == 1
    torch.compiler.reset()


@on("cpu-fp32")
def test_export(backend):
    class Layer(torch.nn.Module):
        def forward(self, q, k, v):
            return torch.ops.volta_fa.fwd(q, k, v, is_causal=True)[0]

    q, k, v, _ = Case(8, 12, 16).inputs(backend)
    seqlen = torch.export.Dim("seqlen", min=2, max=64)
    program = torch.export.export(Layer(), (q, k, v), dynamic_shapes=({1: seqlen}, None, None))
    q = backend.randn(2, 11, 2, 16)
    assert torch.equal(program.module()(q, k, v), fwd(q, k, v, is_causal=True))


@on("cpu-bf16")
def test_fake_tensors(backend):
    """Shapes, dtypes and strides without data, of strided inputs too."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    case = Case(7, 9, 16, 24, nheads=4, nheads_k=2)
    real = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in case.inputs(backend)]
    expected = torch.ops.volta_fa.fwd(*real[:3])
    expected_grads = torch.ops.volta_fa.bwd(real[3], *real[:3], *expected[:2])
    for to_shape in ("fake", "meta"):
        if to_shape == "fake":
            mode = FakeTensorMode()
            q, k, v, dout = (mode.from_tensor(t) for t in real)
        else:
            q, k, v, dout = (t.to("meta") for t in real)
        found = torch.ops.volta_fa.fwd(q, k, v)
        grads = torch.ops.volta_fa.bwd(dout, q, k, v, *found[:2])
        for f, e in zip((*found, *grads), (*expected, *expected_grads)):
            assert (f.shape, f.dtype, f.stride()) == (e.shape, e.dtype, e.stride())


# ---- TorchScript (deprecated in PyTorch, and still what many C++ programs load) ----------------------------------------------------------------------------------------------------


def scripted_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    out, _softmax_lse, _rng_state = torch.ops.volta_fa.fwd(q, k, v, softmax_scale=0.2, is_causal=True, window_left=9)
    return out * 2


torchscript = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")


@torchscript
@pytest.mark.parametrize("how", ["script", "trace"])
@on("cpu-fp32", "cuda")
def test_torchscript(backend, how, tmp_path):
    q, k, v, dout = Case(12, 12, 16, nheads=4, nheads_k=2).inputs(backend)
    if how == "script":
        program = torch.jit.script(scripted_attention)
    else:
        program = torch.jit.trace(scripted_attention, (q, k, v))
    program.save(str(tmp_path / "program.pt"))
    program = torch.jit.load(str(tmp_path / "program.pt"))
    expected = leaves((q, k, v))
    scripted_attention(*expected).backward(dout)
    for _ in range(3):  # the first runs profile, the later ones run the optimised graph
        inputs = leaves((q, k, v))
        program(*inputs).backward(dout)
        for a, b in zip(inputs, expected):
            torch.testing.assert_close(a.grad, b.grad, rtol=2e-3, atol=2e-3 if backend.name == "cuda" else 1e-6)


def run_python(code: str, *arguments) -> str:
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)], capture_output=True, text=True, timeout=300
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


@torchscript
def test_without_our_python_package(tmp_path):
    """load_library alone: eager and a saved TorchScript program, both with gradients."""
    torch.jit.script(scripted_attention).save(str(tmp_path / "program.pt"))
    output = run_python(
        """
        import sys, torch
        torch.ops.load_library(sys.argv[1])
        torch.manual_seed(0)
        q, k, v = (torch.randn(2, 12, 4, 16, requires_grad=True) for _ in range(3))
        program = torch.jit.load(sys.argv[2])
        found = torch.autograd.grad(program(q, k, v).sum(), (q, k, v))
        out = torch.ops.volta_fa.fwd(q, k, v, softmax_scale=0.2, is_causal=True, window_left=9)[0] * 2
        expected = torch.autograd.grad(out.sum(), (q, k, v))
        for a, b in zip(found, expected):
            torch.testing.assert_close(a, b)
        assert "volta_fa" not in sys.modules
        print("fine")
        """,
        LIBRARY,
        tmp_path / "program.pt",
    )
    assert output.strip() == "fine"


def test_no_cuda_at_load_time():
    """Loading opens no CUDA library; the GPU's is opened on first use."""
    output = run_python(
        """
        import sys, torch
        before = set(l.split()[-1] for l in open("/proc/self/maps"))
        torch.ops.load_library(sys.argv[1])
        torch.ops.volta_fa.fwd(*(torch.randn(1, 4, 1, 8) for _ in range(3)))
        after = set(l.split()[-1] for l in open("/proc/self/maps"))
        print([l for l in after - before if "cuda" in l or "nv" in l])
        """,
        LIBRARY,
    )
    assert output.strip() == "[]"


# ---- threads --------------------------------------------------------------------------------------------------------


@on("cpu-fp32", "sim", "cuda")
def test_calls_from_many_threads(backend):
    if backend.name == "sim":
        backend.monkeypatch.setenv("VOLTA_FA_SIMULATE", "1")
    problems = [Case(20 + i, 40, d).inputs(backend) for i, d in enumerate((8, 40, 72, 104, 136, 200, 64, 128))]

    def both(tensors):
        q, k, v, dout = tensors
        out, lse, _ = torch.ops.volta_fa.fwd(q, k, v)
        return out, *torch.ops.volta_fa.bwd(dout, q, k, v, out, lse)[:3]

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(both, problems))
    if backend.name == "cuda":
        torch.cuda.synchronize()
    for f, tensors in zip(found, problems):
        for a, b in zip(f, both(tensors)):
            torch.testing.assert_close(a, b, rtol=2e-3, atol=2e-3 if backend.name == "cuda" else 1e-5)
