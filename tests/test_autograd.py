"""The ops `fwd` and `bwd` inside PyTorch: autograd, autocast, TorchScript, threads.

`on(...)` lists a test's backends: the CPU (`cpu-DTYPE`), the kernels in the simulator (`sim`; `backend.simulate()` runs later calls there)
or on a GPU (`cuda`). Case(seqlen_q, seqlen_k, headdim, headdim_v), with further fields by name (batch and nheads are 2), is a problem.
`case.inputs(backend)` draws q, k, v and dout, `case.problem(backend)` also the op's options."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch._dynamo
from torch._dynamo.utils import counters
from torch.library import opcheck

import reference
from conftest import Case, on


def fwd(q, k, v, **options):
    return torch.ops.volta_fa.fwd(q, k, v, **options)[0]


def leaves(tensors):
    return [t.detach().clone().requires_grad_() for t in tensors]


@on("cpu-fp32")
def test_only_the_gradients_asked_for(backend):
    """out requires a gradient if any of q, k, v, the bias and sinks does, and backward gives those alone."""
    q, k, v, dout = Case(5, 6, 8).inputs(backend)
    for wanted in ([0], [1], [2], [0, 2]):
        inputs = [t.clone().requires_grad_(i in wanted) for i, t in enumerate((q, k, v))]
        fwd(*inputs).backward(dout)
        assert [i for i, t in enumerate(inputs) if t.grad is not None] == wanted
    with torch.no_grad():
        assert not fwd(*leaves((q, k, v))).requires_grad
    assert not fwd(q, k, v).requires_grad
    # options alone
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


@on("cpu-fp32", "cuda")
def test_compiled_autograd(backend):
    """PyTorch's compiled autograd traces the graph of the backward pass. Other options get other gradients, also where their sizes are
    equal: a scale of 0 is not the default, and numbers are inputs of a trace. Calls repeat each set of options with new tensors."""
    counters.clear()
    plain = ({}, {"softmax_scale": 0.0}, {"softmax_scale": 0.7}, {"is_causal": True}, {"window_left": 3}, {"dropout_p": 0.3})
    for options in (*plain, {"sinks": backend.randn(2).requires_grad_(), "attn_bias": backend.randn(2, 1, 9, 11).requires_grad_()}) * 2:
        q, k, v, dout = Case(9, 11, 8).inputs(backend)
        inputs = [*leaves((q, k, v)), *filter(torch.is_tensor, options.values())]
        out, lse, _ = torch.ops.volta_fa.fwd(*inputs[:3], **options)
        loss = (out * dout).sum() + lse.square().sum()
        expected = torch.autograd.grad(loss, inputs, retain_graph=True)
        for t in inputs:
            t.grad = None
        with torch._dynamo.config.patch(compiled_autograd=True):
            torch.compile(loss.backward, backend="eager")()
        assert all(torch.equal(t.grad, gradient) for t, gradient in zip(inputs, expected, strict=True))
    assert counters["compiled_autograd"]["captures"] > 0


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
    for g in torch.autograd.grad(out.square().sum(), inputs, create_graph=True):
        with pytest.raises(RuntimeError, match="volta_fa::bwd.*not implemented|not implemented.*volta_fa::bwd"):
            torch.autograd.grad(g.sum(), inputs, retain_graph=True)


@on("sim", "cuda")
def test_misaligned_tensors(backend):
    """The op copies operands that are not 16-byte aligned. It must not reject them, because torch.compile cannot know addresses."""
    backend.simulate()

    def misaligned(t):
        return torch.empty(t.numel() + 1, dtype=t.dtype, device=t.device)[1:].view(t.shape).copy_(t)

    q, k, v, dout = Case(9, 12, 16, 24, nheads=4, nheads_k=2).inputs(backend)
    out, lse, _ = torch.ops.volta_fa.fwd(q, k, v)
    found = torch.ops.volta_fa.fwd(*map(misaligned, (q, k, v)))
    assert torch.equal(found[0], out) and torch.equal(found[1], lse)
    expected = torch.ops.volta_fa.bwd(dout, q, k, v, out, lse)
    found = torch.ops.volta_fa.bwd(*map(misaligned, (dout, q, k, v, out)), lse)
    torch.testing.assert_close(found, expected, rtol=2e-3, atol=2e-3)  # two eps of fp16: a GPU adds dq by atomics


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@on("cpu-fp32")
def test_autocast_cpu(backend, dtype):
    """Autocast computes in its dtype, also if an input has it already. Gradients of fp32 inputs are fp32, with errors of that dtype."""
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
        torch.testing.assert_close(t.grad.double(), r, rtol=0.05, atol=0.05)  # six eps of bf16


@on("cpu-fp32", "cuda")
def test_autocast_of_bias_sinks_and_masks(backend):
    """Autocast leaves a bias and sinks in fp32 unchanged, and casts those of lower precision to q's dtype. A bool mask stays bool."""
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
        assert all(torch.equal(a.grad, b.grad.to(a.dtype)) for a, b in zip(inputs, expected_inputs))
    visible = bias > 0
    with torch.autocast(backend.device, torch.float16):
        assert torch.equal(fwd(q, k, v, attn_bias=visible), fwd(*half, attn_bias=visible))


# ---- TorchScript (deprecated in PyTorch, and still what many C++ programs load) -------------------------------------


def scripted_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    out, _softmax_lse, _rng_state = torch.ops.volta_fa.fwd(q, k, v, softmax_scale=0.2, is_causal=True, window_left=9)
    return out * 2


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.parametrize("how", ["script", "trace"])
@on("cpu-fp32", "cuda")
def test_torchscript(backend, how, tmp_path):
    """A saved and loaded program has the gradients of the function."""
    q, k, v, dout = Case(12, 12, 16, nheads=4, nheads_k=2).inputs(backend)
    program = torch.jit.script(scripted_attention) if how == "script" else torch.jit.trace(scripted_attention, (q, k, v))
    program.save(str(tmp_path / "program.pt"))
    program = torch.jit.load(str(tmp_path / "program.pt"))
    expected = leaves((q, k, v))
    scripted_attention(*expected).backward(dout)
    for _ in range(3):  # TorchScript's first runs profile, later ones run the optimized graph
        inputs = leaves((q, k, v))
        program(*inputs).backward(dout)
        for a, b in zip(inputs, expected):
            torch.testing.assert_close(a.grad, b.grad, rtol=2e-3, atol=2e-3 if backend.name == "cuda" else 1e-6)


@on("cpu-fp32", "sim", "cuda")
def test_calls_from_many_threads(backend):
    """Eight threads with different headdims get the results of calls one after the other. (A GPU adds dq by atomics: 2e-3.)"""
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
        torch.testing.assert_close(f, both(tensors), rtol=2e-3, atol=2e-3 if backend.name == "cuda" else 1e-5)


# ---- torch.library.opcheck: schema, autograd registration, fake tensors, AOT dispatch ------------------------------------

#: Positional fields: seqlen_q, seqlen_k, headdim, headdim_v. lengths: (seqlen_q, seqlen_k) of packed sequences. spare: by how much
#: max_seqlen exceeds the longest. bias: its dimensions that are not 1, and its dtype (own: q's). sinks: dtype. used: seqused_k.
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
    """Returns q, k, v, dout and the options. All that are differentiable require a gradient if `requires_grad`."""
    backend.simulate()
    tensors, options = case.problem(backend)
    for t in (*tensors, options.get("attn_bias"), options.get("sinks")):
        if t is not None and t.is_floating_point():
            t.requires_grad_(requires_grad)
    return tensors, options


def opcheck_tolerance(backend):
    """Returns opcheck's tolerances. opcheck compares two calls, and kernels (`backend.kernels`: not the CPU) add up dq and a bias' gradient
    by atomics in changing order."""
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
    (q, k, v, dout), options = opcheck_problem(backend, case, False)  # False: requires_grad
    out, lse, rng_state = torch.ops.volta_fa.fwd(q, k, v, **options)
    options |= {"rng_state": rng_state, "attn_bias_requires_grad": case.bias != "" and not case.bias.endswith("bool")}
    opcheck(torch.ops.volta_fa.bwd.default, (dout, q, k, v, out, lse), options, **opcheck_tolerance(backend))


@on("cpu-fp32", "sim", "cuda")
def test_opcheck_of_strided_inputs(backend):
    """Tensors with heads before tokens in memory. Results on meta tensors have the sizes and strides of real ones."""
    backend.simulate()
    case = Case(7, 9, 16, 24, nheads=4, nheads_k=2)
    q, k, v, dout = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in case.inputs(backend))
    opcheck(torch.ops.volta_fa.fwd.default, (q, k, v))
    out, lse, rng_state = torch.ops.volta_fa.fwd(q, k, v)
    opcheck(torch.ops.volta_fa.bwd.default, (dout, q, k, v, out, lse), **opcheck_tolerance(backend))
    for f, e in zip(torch.ops.volta_fa.fwd(*(t.to("meta") for t in (q, k, v))), (out, lse, rng_state)):
        assert (f.shape, f.dtype, f.stride()) == (e.shape, e.dtype, e.stride())
