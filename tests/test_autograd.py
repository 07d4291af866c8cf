"""The ops inside PyTorch: autograd, autocast, TorchScript, fake tensors, and without our Python package."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.library import opcheck

import reference
from conftest import LIBRARY, Case, on, run_python


def fwd(q, k, v, **options):
    return torch.ops.volta_fa.fwd(q, k, v, **options)[0]


def leaves(tensors):
    return [t.detach().clone().requires_grad_() for t in tensors]


@on("cpu-fp32", "sim", "cuda")
def test_autograd_through_the_backend(backend):
    """requires_grad, backward() and a scalar loss, whose gradient arrives expanded with strides of 0."""
    backend.simulate()
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
    for name, t in (("attn_bias", backend.randn(2, 1, 5, 1)), ("sinks", backend.randn(2))):
        options = {name: t.requires_grad_()}
        fwd(q, k, v, **options).backward(dout)
        assert t.grad.shape == t.shape and t.grad.count_nonzero() > 0
        with torch.no_grad():
            assert not fwd(q, k, v, **options).requires_grad


@on("cpu-fp32")
def test_rng_state_is_not_differentiable(backend):
    for dropout_p, size in ((0.0, 0), (0.5, 2)):
        out, lse, rng_state = torch.ops.volta_fa.fwd(*leaves(Case(5, 6, 8).inputs(backend)[:3]), dropout_p=dropout_p)
        assert out.requires_grad and lse.requires_grad and not rng_state.requires_grad
        assert rng_state.shape == (size,) and rng_state.dtype == torch.int64


@on("cpu-fp32", "sim", "cuda")
def test_inference_mode(backend):
    backend.simulate()
    q, k, v, _ = Case(9, 11, 16, nheads=4, nheads_k=2).inputs(backend)
    with torch.inference_mode():
        out = fwd(q, k, v)
    assert out.is_inference() and torch.equal(out, fwd(q, k, v))


@on("cpu-fp64", "cuda")
def test_second_derivative_is_refused(backend):
    """The second derivative of every gradient raises an error."""
    inputs = leaves([*Case(5, 6, 8).inputs(backend)[:3], backend.randn(1, 2, 5, 6), backend.randn(2)])
    out = fwd(*inputs[:3], attn_bias=inputs[3], sinks=inputs[4])
    grads = torch.autograd.grad(out.square().sum(), inputs, create_graph=True)
    for g in grads:
        with pytest.raises(RuntimeError, match="volta_fa::bwd.*not implemented|not implemented.*volta_fa::bwd"):
            torch.autograd.grad(g.sum(), inputs, retain_graph=True)


@on("sim", "cuda")
def test_any_pointer(backend):
    """Operands that do not begin on a 16-byte boundary are copied, not refused; torch.compile could not know."""
    backend.simulate()

    def misaligned(t):
        return torch.empty(t.numel() + 1, dtype=t.dtype, device=t.device)[1:].view(t.shape).copy_(t)

    q, k, v, dout = Case(9, 12, 16, 24, nheads=4, nheads_k=2).inputs(backend)
    out, lse, _ = torch.ops.volta_fa.fwd(q, k, v)
    found = torch.ops.volta_fa.fwd(*map(misaligned, (q, k, v)))
    assert torch.equal(found[0], out) and torch.equal(found[1], lse)
    expected = torch.ops.volta_fa.bwd(dout, q, k, v, out, lse)
    for a, b in zip(torch.ops.volta_fa.bwd(*map(misaligned, (dout, q, k, v, out)), lse)[:3], expected):
        torch.testing.assert_close(a, b, rtol=2e-3, atol=2e-3)


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


@on("cpu-fp32", "cuda")
def test_autocast_and_what_is_added_to_scores(backend):
    """A bias or sinks in fp32 stay so; in a lower precision they follow q. Slopes are always fp32, and a bool mask bool."""
    q, k, v, dout = (t.float() for t in Case(9, 12, 16).inputs(backend))
    bias, sinks, slopes = torch.randn(1, 2, 9, 12, device=q.device), torch.randn(2, device=q.device), torch.rand(2, device=q.device)
    half = [t.half() for t in (q, k, v)]

    def train(tensors, bias, sinks):
        inputs = leaves([*tensors, bias, sinks])
        out = fwd(*inputs[:3], attn_bias=inputs[3], sinks=inputs[4], alibi_slopes=slopes, deterministic=True)
        out.backward(dout.half())
        return out, inputs

    with torch.autocast(backend.device, torch.float16), pytest.raises(ValueError, match="attn_bias: got dtype torch.float8"):
        fwd(q, k, v, attn_bias=bias.to(torch.float8_e4m3fn))
    for other in (torch.float32, torch.bfloat16, torch.float16):
        with torch.autocast(backend.device, torch.float16):
            found, inputs = train((q, k, v), bias.to(other), sinks.to(other))
        lowered = [t.to(other).to(torch.float32 if other == torch.float32 else torch.float16) for t in (bias, sinks)]
        expected, expected_inputs = train(half, *lowered)
        assert torch.equal(found, expected)
        for a, b in zip(inputs, expected_inputs):
            assert torch.equal(a.grad, b.grad.to(a.dtype))
    visible = bias > 0
    with torch.autocast(backend.device, torch.float16):
        assert torch.equal(fwd(q, k, v, attn_bias=visible), fwd(*half, attn_bias=visible))


@on("cpu-fp32", "cuda")
def test_scaled_training_step(backend):
    """fp16 autocast and a gradient scaler: a step like that of fp32, and none where the scaled gradients overflow."""
    torch.manual_seed(0)
    x, target = (t.float() for t in (backend.randn(2, 24, 32), backend.randn(2, 24, 32)))
    weight = torch.nn.Linear(32, 96, device=x.device)
    before = weight.weight.detach().clone()
    optimizer = torch.optim.SGD(weight.parameters(), lr=0.1)

    def loss():
        q, k, v = weight(x).view(2, 24, 3, 2, 16).unbind(2)
        return (fwd(q, k, v, is_causal=True).flatten(2) - target).square().mean()

    def step(scale):
        with torch.no_grad():
            weight.weight.copy_(before)
        scaler = torch.amp.GradScaler(backend.device, init_scale=scale)
        optimizer.zero_grad()
        with torch.autocast(backend.device, torch.float16):
            scaled = loss()
        scaler.scale(scaled).backward()
        scaler.step(optimizer)
        scaler.update()
        return weight.weight.detach() - before, scaler.get_scale()

    optimizer.zero_grad()
    if backend.kernels:
        q, k, v = (t.cpu() for t in weight(x).view(2, 24, 3, 2, 16).unbind(2))
        (fwd(q, k, v, is_causal=True).flatten(2) - target.cpu()).square().mean().backward()
    else:
        loss().backward()
    expected = -0.1 * weight.weight.grad
    moved, scale = step(2.0**14)
    torch.testing.assert_close(moved, expected, rtol=0.02, atol=2e-2 * expected.abs().max().item())
    assert scale == 2.0**14
    moved, scale = step(2.0**40)
    assert moved.count_nonzero() == 0 and scale == 2.0**39


@on("cuda")
def test_autocast_cuda(backend):
    tensors = [t.float() for t in Case(40, 40, 64).inputs(backend)]
    inputs = leaves(tensors[:3])
    with torch.autocast("cuda", dtype=torch.float16):
        out = fwd(*inputs)
    assert out.dtype == torch.float16
    out.backward(tensors[3].half())
    assert all(t.grad.dtype == torch.float32 for t in inputs)


# ---- fake tensors ---------------------------------------------------------------------------------------------------


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


# ---- TorchScript (deprecated in PyTorch, and still what many C++ programs load) -------------------------------------


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
    backend.simulate()
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


# ---- torch.library.opcheck: schema, autograd registration, fake tensors, AOT dispatch ------------------------------------

OPCHECKED = [
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
OPCHECKING = on("cpu-fp32", "sim", "cuda", slow=("cpu-bf16", "sim-bf16"))


def opcheck_problem(backend, case, requires_grad):
    """q, k, v, dout and the options; of these the ones that can need a gradient do so."""
    backend.simulate()
    tensors, options = case.problem(backend)
    for t in (*tensors, options.get("attn_bias"), options.get("sinks")):
        if t is not None and t.is_floating_point():
            t.requires_grad_(requires_grad)
    return tensors, options


def opcheck_tolerance(backend):
    """Runs of the kernels differ in dq and the gradient of a bias, which atomics add up."""
    return {"atol": 2e-3, "rtol": 2e-3} if backend.kernels else {}


@pytest.mark.parametrize("requires_grad", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("case", OPCHECKED, ids=str)
@OPCHECKING
def test_opcheck_forward(backend, case, requires_grad):
    (q, k, v, _), options = opcheck_problem(backend, case, requires_grad)
    opcheck(torch.ops.volta_fa.fwd.default, (q, k, v), options, **opcheck_tolerance(backend))


@pytest.mark.parametrize("case", OPCHECKED, ids=str)
@OPCHECKING
def test_opcheck_backward(backend, case):
    (q, k, v, dout), options = opcheck_problem(backend, case, False)
    out, lse, rng_state = torch.ops.volta_fa.fwd(q, k, v, **options)
    options |= {"rng_state": rng_state, "attn_bias_requires_grad": case.bias != "" and not case.bias.endswith("bool")}
    opcheck(torch.ops.volta_fa.bwd.default, (dout, q, k, v, out, lse), options, **opcheck_tolerance(backend))


@on("cpu-fp32", "sim", "cuda")
def test_opcheck_of_strided_inputs(backend):
    backend.simulate()
    case = Case(7, 9, 16)
    q, k, v, dout = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in case.inputs(backend))
    opcheck(torch.ops.volta_fa.fwd.default, (q, k, v))
    out, lse, _ = torch.ops.volta_fa.fwd(q, k, v)
    opcheck(torch.ops.volta_fa.bwd.default, (dout, q, k, v, out, lse), **opcheck_tolerance(backend))
