"""Tests of the ops under PyTorch's tools: torch.compile, export, AOTInductor, checkpointing, functorch, FLOP counting, streams, devices.

`Layer`, self-attention with the op volta_fa::fwd, is compared with itself run eagerly. `on(...)` lists backends: CPU and GPU
(`backend.kernels`). `fwd` returns out alone, and `leaves(tensors)` copies that require a gradient. Autograd and TorchScript are in
test_autograd.py, the same routes through scaled_dot_product_attention in test_sdpa_routes.py, processes and C++ in test_processes.py."""

import functools
import shutil
import subprocess
import sys
import tempfile

import pytest
import torch
from torch._dynamo.utils import counters
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import flop_counter
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from conftest import LIBRARY, NEEDS_COMPILER, Case, on, on_cases, run_python
from flash_attention import cu  # cu_seqlens of lengths
from test_autograd import fwd, leaves

DROPOUT = pytest.mark.parametrize("dropout_p", [0.0, 0.4], ids=["", "dropout"])


class Layer(torch.nn.Module):
    """Causal self-attention around the op."""

    def __init__(self, width: int = 32, nheads: int = 2, dropout_p: float = 0.0):
        super().__init__()
        self.nheads = nheads
        self.dropout_p = dropout_p
        self.qkv = torch.nn.Linear(width, 3 * width)
        self.out = torch.nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, s, w = x.shape
        q, k, v = self.qkv(x).view(b, s, 3, self.nheads, w // self.nheads).unbind(2)
        out, _softmax_lse, _rng_state = torch.ops.volta_fa.fwd(q, k, v, dropout_p=self.dropout_p, is_causal=True)
        return self.out(out.reshape(b, s, w))


@pytest.fixture(autouse=True)
def fresh_compiler():
    """Resets torch.compile and its counters before and after each test."""
    torch.compiler.reset()
    counters.clear()
    yield
    torch.compiler.reset()


@pytest.fixture
def layer_on(backend):
    """Returns a function that makes a Layer and a function that makes its inputs, on the backend's device in its dtype."""
    torch.manual_seed(0)

    def make(dropout_p=0.0):
        return Layer(dropout_p=dropout_p).to(backend.device, backend.dtype), lambda seqlen=9: backend.randn(2, seqlen, 32).requires_grad_()

    return make


def gradients(module, *inputs, seed=0, **options):
    """Returns the parameters' gradients of sum(out^2), for a module or what is compiled or wrapped around it."""
    module.zero_grad()
    torch.manual_seed(seed)
    module(*inputs, **options).float().square().sum().backward()
    return [p.grad.clone() for p in module.parameters()]


def assert_same_gradients(found, expected):
    for a, b in zip(found, expected, strict=True):
        # on a GPU: fp16, and atomics add dq in any order
        torch.testing.assert_close(a, b, **({"rtol": 2e-2, "atol": 5e-2} if a.is_cuda else {"rtol": 1e-4, "atol": 1e-5}))


# ---- inductor --------------------------------------------------------------------------------------------------------

DYNAMIC = pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])


@pytest.mark.slow
@NEEDS_COMPILER
@DROPOUT
@DYNAMIC
@on("cpu-fp32", "cuda")
def test_inductor(backend, layer_on, dynamic, dropout_p):
    layer, inputs = layer_on(dropout_p)
    compiled = torch.compile(layer, fullgraph=True, dynamic=dynamic)
    for seqlen in (8, 13, 21) if dynamic else (8,):
        x = inputs(seqlen)
        assert_same_gradients(gradients(compiled, x), gradients(layer, x))
    assert counters["stats"]["unique_graphs"] == 1, "a new seqlen compiled again"


@DYNAMIC
@on("cpu-fp32", "cuda")
def test_only_static_programs_are_compiled_again_when_seqlen_changes(backend, layer_on, dynamic):
    layer, inputs = layer_on()
    compiled = torch.compile(layer, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for seqlen in (8, 9, 64, 2, 33) if dynamic else (8, 13):
        x = inputs(seqlen)
        assert_same_gradients(gradients(compiled, x), gradients(layer, x))
        with torch.no_grad():
            torch.testing.assert_close(compiled(x), layer(x), **({"rtol": 1e-2, "atol": 1e-2} if backend.kernels else {}))
    # a graph with gradients and one without; static graphs for each of the two lengths
    assert counters["stats"]["unique_graphs"] == (2 if dynamic else 4)


@on("cpu-fp32", "cuda")
def test_compiled_dropout_draws_anew(backend):
    """Each call of a compiled program drops other elements, as PyTorch's seed determines. v is the identity, so out shows which."""
    q = backend.randn(1, 16, 2, 16)
    eye = torch.eye(16, device=q.device, dtype=q.dtype).view(1, 16, 1, 16).expand(1, 16, 2, 16)
    compiled = torch.compile(lambda t: fwd(t, t, eye, dropout_p=0.5), fullgraph=True, backend="aot_eager")
    torch.manual_seed(0)
    first, second = compiled(q), compiled(q)
    torch.manual_seed(0)
    assert torch.equal(first, compiled(q)) and not torch.equal(first, second)


def packed_attention(qkv, cu_seqlens, max_seqlen: int, **options):
    """Causal attention of packed sequences, with operations before and after, so that a compiled graph has more than the op."""
    q, k, v = (qkv * 1.5).unbind(1)
    lengths = {"cu_seqlens_q": cu_seqlens, "cu_seqlens_k": cu_seqlens, "max_seqlen_q": max_seqlen, "max_seqlen_k": max_seqlen}
    return fwd(q, k, v, **lengths, is_causal=True, **options).square()


@DROPOUT
@on("cpu-fp32", "cuda")
def test_compiled_packed_sequences(backend, dropout_p):
    """Other numbers of sequences, lengths and max_seqlen use the program that the first call compiled."""
    compiled = torch.compile(packed_attention, fullgraph=True, dynamic=True, backend="aot_eager")
    for lengths in ([5, 9, 7], [11, 0, 3, 6], [2, 30, 1, 1, 9]):
        qkv, cu_seqlens = backend.randn(sum(lengths), 3, 2, 16), cu(lengths, backend.device)
        results = []
        for f in (packed_attention, compiled):
            torch.manual_seed(0)
            (x,) = leaves([qkv])
            out = f(x, cu_seqlens, max(lengths), dropout_p=dropout_p)
            results.append([out.detach(), *torch.autograd.grad(out.float().sum(), x)])
        torch.testing.assert_close(*results, **({"rtol": 2e-2, "atol": 2e-2} if backend.kernels else {}))
    assert counters["stats"]["unique_graphs"] == 1


# ---- packages --------------------------------------------------------------------------------------------------------

#: Runs a package in a process that loads the library but not the Python package.
LOAD = """
    import sys, torch
    import torch._inductor.codecache  # torch 2.10 needs it and does not import it
    library, package, data = sys.argv[1:]
    torch.ops.load_library(library)
    inputs, expected = torch.load(data)
    aoti = package.endswith("aoti.pt2")
    found = (torch._inductor.aoti_load_package(package) if aoti else torch.export.load(package).module())(*inputs)
    tolerance = 1e-2 if aoti and found.is_cuda else None
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
    assert "volta_fa" not in sys.modules
    print("fine")
"""


@functools.cache
def aot_inductor_works_on_cuda() -> bool:
    """Returns whether PyTorch loads an AOTInductor package of a trivial module. With torch 2.11 on an H200 that crashed."""
    load = 'import sys, torch; torch._inductor.aoti_load_package(sys.argv[1])(torch.ones(8, device="cuda"))'
    with tempfile.TemporaryDirectory() as folder:
        program = torch.export.export(torch.nn.ReLU(), (torch.ones(8, device="cuda"),))
        package = torch._inductor.aoti_compile_and_package(program, package_path=f"{folder}/trivial.pt2")
        return subprocess.run([sys.executable, "-c", load, package], capture_output=True, timeout=300).returncode == 0


class Packed(torch.nn.Module):
    """packed_attention of sequences of at most 12 tokens, with a bias."""

    def forward(self, qkv, cu_seqlens, bias):
        return packed_attention(qkv, cu_seqlens, 12, attn_bias=bias)


@on_cases((["cpu-fp32", "cuda"], ["export"]), slow=((["cpu-fp32", "cuda"], ["aoti"]),))
def test_package_without_our_python_package(backend, case, tmp_path):
    """An exported module, and one that AOTInductor compiles to machine code ("aoti"), run in a process without the package volta_fa."""
    if case == "aoti" and not shutil.which("g++"):
        pytest.skip("no g++")
    if case == "aoti" and backend.device == "cuda" and not aot_inductor_works_on_cuda():
        pytest.skip("here PyTorch cannot load an AOTInductor package for CUDA, not even of a module without our op")

    def arguments(lengths):
        return backend.randn(sum(lengths), 3, 2, 16), cu(lengths, backend.device), backend.randn(1, 2, 12, 12)

    dynamic = ({0: torch.export.Dim.DYNAMIC}, {0: torch.export.Dim.DYNAMIC}, None)  # None: the bias keeps its shape
    program = torch.export.export(Packed(), arguments([5, 12, 7]), dynamic_shapes=dynamic)
    assert "volta_fa.fwd" in str(program.graph)
    package = str(tmp_path / f"{case}.pt2")
    if case == "aoti":
        torch._inductor.aoti_compile_and_package(program, package_path=package)
    else:
        torch.export.save(program, package)
    inputs = arguments([3, 12, 0, 9])
    torch.save((inputs, Packed()(*inputs)), tmp_path / "data.pt")
    assert run_python(LOAD, LIBRARY, package, tmp_path / "data.pt") == "fine"


# ---- activation checkpointing ------------------------------------------------------------------------------------------


class Checkpointed(torch.nn.Module):
    """A module whose forward pass runs again in the backward pass, by a policy that keeps attention's results or not."""

    def __init__(self, module, keep_attention):
        super().__init__()

        def policy(context, op, *args, **kwargs):
            keep = keep_attention and op is torch.ops.volta_fa.fwd.default
            return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

        self.module, self.contexts = module, lambda: create_selective_checkpoint_contexts(policy)

    def forward(self, x):
        out = checkpoint(self.module, x, use_reentrant=False, context_fn=self.contexts)
        # random numbers after the checkpoint must not change those of its recomputation
        return out + torch.rand_like(out) * 0


@DROPOUT
@pytest.mark.parametrize("keep_attention", [False, True])
@on("cpu-fp32", "cuda")
def test_selective_checkpoint(backend, layer_on, keep_attention, dropout_p):
    """A policy sees volta_fa::fwd as one op, and can keep it."""
    layer, inputs = layer_on(dropout_p)
    x = inputs()
    expected = gradients(layer, x)
    checkpointed = Checkpointed(layer, keep_attention)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        found = gradients(checkpointed, x)
    assert_same_gradients(found, expected)
    if backend.kernels:  # they have no ATen products to count
        return
    # Each dispatcher layer that sees an op records an event. Only the innermost one that contains an ATen product ran the op: a
    # recomputation that finds the kept result has none.
    products = [e.time_range for e in profiler.events() if e.name in ("aten::bmm", "aten::_scaled_dot_product_flash_attention_for_cpu")]
    calls = [e.time_range for e in profiler.events() if e.name == "volta_fa::fwd"]

    def inside(a, b):
        return a is not b and b.start <= a.start and a.end <= b.end

    runs = [c for c in calls if any(inside(p, c) for p in products) and not any(inside(other, c) for other in calls)]
    assert len(runs) == (1 if keep_attention else 2)


@pytest.mark.slow
@pytest.mark.parametrize("keep_attention", [False, True])
@DROPOUT
@on("cpu-fp32", "cuda")
def test_checkpoint_compiled(backend, layer_on, keep_attention, dropout_p):
    """A compiled program plans recomputation ahead: random operations keep their state, or their result."""
    layer, inputs = layer_on(dropout_p)
    x = inputs()
    expected = gradients(layer, x)
    compiled = torch.compile(Checkpointed(layer, keep_attention), backend="aot_eager_decomp_partition", fullgraph=True)
    found = gradients(compiled, x)
    # for what it recomputes on CUDA, PyTorch gives a compiled program generators of its own, which manual_seed does not set
    if not (backend.kernels and dropout_p and not keep_attention):
        assert_same_gradients(found, expected)

    # the gradient of the last layer's weight is linear in attention's output, so it shows whether the recomputed output is the same
    layer.zero_grad()
    out = compiled(x)
    out.double().square().sum().backward()
    weight, bias, out = layer.out.weight, layer.out.bias.detach(), out.detach().double()
    torch.testing.assert_close((weight.grad.double() * weight.detach()).sum(), (2 * out * (out - bias)).sum(), rtol=1e-2, atol=0.0)


# ---- functorch -------------------------------------------------------------------------------------------------------


@on("cpu-fp32")
def test_functorch_says_what_it_cannot_do(backend):
    """torch.func's transforms cannot use derivatives written in C++, so they raise an error."""
    q, k, v, _ = Case(5, 6, 8).inputs(backend)
    with pytest.raises(RuntimeError, match="(?i)functorch|torch.func|vmap"):
        torch.func.grad(lambda t: fwd(t, k, v).sum())(q)
    with pytest.raises(NotImplementedError, match="volta_fa::fwd.*forward-mode"):
        torch.func.jvp(lambda t: fwd(t, k, v), (q,), (torch.ones_like(q),))
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(v, torch.ones_like(v))
        with pytest.raises(NotImplementedError, match="volta_fa::fwd.*forward-mode"):
            fwd(q, k, dual)
    with pytest.raises(RuntimeError, match="(?i)functorch|torch.func|vmap"):
        torch.func.grad(lambda b: fwd(q, k, v, attn_bias=b).sum())(backend.randn(1, 2, 5, 6))
    with pytest.raises(NotImplementedError, match="volta_fa::fwd.*forward-mode"):
        torch.func.jvp(lambda s: fwd(q, k, v, sinks=s), (backend.randn(2),), (torch.ones(2),))


@on("cpu-fp32")
def test_vmap(backend):
    """Without a gradient, PyTorch's vmap loops over the batch."""
    q, k, v, _ = (torch.stack([t, t * 2]) for t in Case(5, 6, 8).inputs(backend))
    found = torch.vmap(fwd)(q, k, v)
    for i in range(2):
        torch.testing.assert_close(found[i], fwd(q[i], k[i], v[i]))


# ---- counting operations ---------------------------------------------------------------------------------------------


def flops_of(call) -> tuple[int, int]:
    """Returns the floating-point operations of volta_fa::fwd and bwd in a call, as PyTorch's counter has them."""
    import volta_fa.flops  # noqa: F401  tells the counter their formulas

    with flop_counter.FlopCounterMode(display=False) as counter:
        call()
    counts = {str(op): n for op, n in counter.get_flop_counts()["Global"].items()}
    return counts["volta_fa.fwd"], counts["volta_fa.bwd"]


@on("cpu-fp32", "cuda")
def test_flops(backend):
    """volta_fa.flops counts as many operations as PyTorch counts for its own attention."""
    q, k, v, dout = Case(9, 15, 16, 24, nheads=4, nheads_k=2).inputs(backend)
    # PyTorch's shapes, of repeated KV heads
    shapes = (2, 4, 9, 16), (2, 4, 15, 16), (2, 4, 15, 24)
    inputs = leaves((q, k, v))
    counted = flops_of(lambda: fwd(*inputs, is_causal=True).backward(dout))
    assert counted == (flop_counter.sdpa_flop_count(*shapes), flop_counter.sdpa_backward_flop_count((2, 4, 9, 24), *shapes))


@on("cpu-fp32", "cuda")
def test_flops_of_packed_sequences(backend):
    def count(qkv, cu_seqlens):
        return flops_of(lambda: packed_attention(qkv, cu_seqlens, 9).float().sum().backward())

    lengths, nheads = [5, 0, 9], 2
    qkv, cu_seqlens = backend.randn(14, 3, nheads, 16).requires_grad_(), cu(lengths, backend.device)
    pairs = nheads * sum(n * n for n in lengths)
    # two operations for a multiply-add: headdim + headdim_v = 32 columns forward, 3 * 16 + 2 * 16 = 80 backward
    assert count(qkv, cu_seqlens) == (2 * pairs * 32, 2 * pairs * 80)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        # a fake tensor has no lengths, so each of the three sequences counts with max_seqlen 9
        pairs = nheads * 3 * 9 * 9
        assert count(mode.from_tensor(qkv), mode.from_tensor(cu_seqlens)) == (2 * pairs * 32, 2 * pairs * 80)


# ---- streams and devices ---------------------------------------------------------------------------------------------


@on("cuda")
def test_streams(backend):
    """Forward and backward run on the caller's stream, after the work enqueued there: the inputs are written late on four streams."""
    problems = [Case(64 + 32 * i, 64 + 32 * i, 64, is_causal=True).inputs(backend) for i in range(4)]

    def step(q, k, v, dout):
        inputs = [t.requires_grad_() for t in (q, k, v)]
        out = fwd(*inputs, is_causal=True)
        return [out.detach(), *torch.autograd.grad(out, inputs, dout)]

    expected = [step(*leaves(p)) for p in problems]
    torch.cuda.synchronize()
    found = []
    for p in problems:
        with torch.cuda.stream(torch.cuda.Stream()):
            late = [torch.zeros_like(t) for t in p]
            torch.cuda._sleep(50_000_000)  # cycles: the inputs get their values long after the call has returned
            for a, b in zip(late, p):
                a.copy_(b)
            found.append(step(*late))
    torch.cuda.synchronize()
    torch.testing.assert_close(found, expected, rtol=2e-3, atol=2e-3)


@on("cuda")
def test_devices(backend):
    """Calls on every GPU of the machine work while the first is the current device."""
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU")
    tensors = Case(40, 50, 64, nheads=4, nheads_k=2, is_causal=True).inputs(backend)
    bias = backend.randn(1, 4, 40, 50)

    def step(device, dropout_p):
        inputs = leaves([t.to(device) for t in (*tensors[:3], bias)])
        torch.manual_seed(1)
        out = fwd(*inputs[:3], attn_bias=inputs[3], is_causal=True, dropout_p=dropout_p)
        assert out.device == torch.device(device) and torch.cuda.current_device() == 0
        return [t.cpu() for t in (out.detach(), *torch.autograd.grad(out, inputs, tensors[3].to(device)))]

    for dropout_p in (0.0, 0.3):
        expected = step("cuda:0", dropout_p)
        for i in range(1, torch.cuda.device_count()):
            torch.testing.assert_close(step(f"cuda:{i}", dropout_p), expected, rtol=5e-3, atol=5e-3)


@on("cuda")
def test_nothing_waits_for_the_gpu(backend):
    """Neither pass synchronizes the host with the GPU, with lengths on the device, a bias, sinks and dropout."""
    q, k, v = (backend.randn(40, 2, 64).requires_grad_() for _ in range(3))
    cu_seqlens = cu([11, 0, 29], backend.device)
    options = {"cu_seqlens_q": cu_seqlens, "cu_seqlens_k": cu_seqlens, "max_seqlen_q": 29, "max_seqlen_k": 29, "dropout_p": 0.2}
    options |= {"attn_bias": backend.randn(1, 2, 29, 29).requires_grad_(), "alibi_slopes": torch.rand(2, device="cuda")}
    options["sinks"] = torch.randn(2, device="cuda", requires_grad=True)
    fwd(q, k, v, **options).sum().backward()  # loads the kernels
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        fwd(q, k, v, **options).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
