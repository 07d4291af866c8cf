"""Ways by which programs reach the ops: compilers, packages, checkpointing, functorch, streams and devices. Also counts operations.

The basics of autograd and TorchScript are in test_autograd.py; the routes through PyTorch's own scaled_dot_product_attention in
test_sdpa.py; processes and C++ in test_processes.py.
"""

import functools
import subprocess
import sys
import tempfile
import textwrap

import pytest
import torch
import torch.utils.checkpoint
from torch._dynamo.utils import counters

from conftest import LIBRARY, NEEDS_COMPILER, Case, on, run_python
from test_autograd import fwd, leaves


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


@pytest.fixture
def layer_on(backend):
    """A layer and its inputs, where the backend is."""
    torch.manual_seed(0)

    def make(dropout_p=0.0):
        return Layer(dropout_p=dropout_p).to(backend.device, backend.dtype), lambda seqlen=9: backend.randn(2, seqlen, 32).requires_grad_()

    return make


def gradients(module, x, seed=0):
    """Of a module, or of something compiled or wrapped around it."""
    module.zero_grad()
    torch.manual_seed(seed)
    module(x).float().square().sum().backward()
    return [p.grad.clone() for p in module.parameters()]


def assert_same_gradients(found, expected):
    for a, b in zip(found, expected, strict=True):
        # fp16 on a GPU, where dq is summed by atomics besides
        torch.testing.assert_close(a, b, **({"rtol": 2e-2, "atol": 5e-2} if a.is_cuda else {"rtol": 1e-4, "atol": 1e-5}))


# ---- inductor --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@NEEDS_COMPILER
@pytest.mark.parametrize("dropout_p", [0.0, 0.3], ids=["", "dropout"])
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@on("cpu-fp32", "cuda")
def test_inductor(backend, layer_on, dynamic, dropout_p):
    torch.compiler.reset()
    counters.clear()
    layer, inputs = layer_on(dropout_p)
    compiled = torch.compile(layer, fullgraph=True, dynamic=dynamic)
    for seqlen in (8, 13, 21) if dynamic else (8,):
        x = inputs(seqlen)
        found = gradients(compiled, x)
        assert_same_gradients(found, gradients(layer, x))
    assert counters["stats"]["unique_graphs"] == 1, "a new seqlen compiled again"
    torch.compiler.reset()


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@on("cpu-fp32", "cuda")
def test_no_recompilation_when_seqlen_changes(backend, layer_on, dynamic):
    torch.compiler.reset()
    counters.clear()
    layer, inputs = layer_on()
    compiled = torch.compile(layer, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for seqlen in (8, 9, 64, 2, 33) if dynamic else (8, 13):
        x = inputs(seqlen)
        assert_same_gradients(gradients(compiled, x), gradients(layer, x))
        with torch.no_grad():
            torch.testing.assert_close(compiled(x), layer(x), **({"rtol": 1e-2, "atol": 1e-2} if backend.kernels else {}))
    if dynamic:  # one with gradients and one without
        assert counters["stats"]["unique_graphs"] == 2
    torch.compiler.reset()


def packed_attention(qkv, cu_seqlens, max_seqlen: int, dropout_p: float = 0.0):
    """Packed sequences between other operations."""
    q, k, v = (qkv * 1.5).unbind(1)
    lengths = {"cu_seqlens_q": cu_seqlens, "cu_seqlens_k": cu_seqlens, "max_seqlen_q": max_seqlen, "max_seqlen_k": max_seqlen}
    return fwd(q, k, v, **lengths, is_causal=True, dropout_p=dropout_p).square()


def packed_lengths(backend, lengths):
    return torch.tensor([0, *lengths], device=backend.device).cumsum(0, dtype=torch.int32)


@pytest.mark.parametrize("dropout_p", [0.0, 0.3], ids=["", "dropout"])
@on("cpu-fp32", "cuda")
def test_compiled_packed_sequences(backend, dropout_p):
    """Another number of sequences, other lengths, another longest one: one program."""
    torch.compiler.reset()
    counters.clear()
    compiled = torch.compile(packed_attention, fullgraph=True, dynamic=True, backend="aot_eager")
    for lengths in ([5, 9, 7], [11, 0, 3, 6], [2, 30, 1, 1, 9]):
        qkv, cu_seqlens = backend.randn(sum(lengths), 3, 2, 16), packed_lengths(backend, lengths)
        results = []
        for f in (packed_attention, compiled):
            torch.manual_seed(0)
            (x,) = leaves([qkv])
            out = f(x, cu_seqlens, max(lengths), dropout_p)
            results.append([out.detach(), *torch.autograd.grad(out.float().sum(), x)])
        for a, b in zip(*results):
            torch.testing.assert_close(a, b, **({"rtol": 2e-2, "atol": 2e-2} if backend.kernels else {}))
    assert counters["stats"]["unique_graphs"] == 1
    torch.compiler.reset()


@on("cpu-fp32", "cuda")
def test_compiled_dropout_draws_anew(backend):
    """Two calls of a compiled program drop other elements."""
    torch.compiler.reset()
    q = backend.randn(1, 16, 2, 16)
    eye = torch.eye(16, device=q.device, dtype=q.dtype).view(1, 16, 1, 16).expand(1, 16, 2, 16)
    compiled = torch.compile(lambda t: fwd(t, t, eye, dropout_p=0.5), fullgraph=True, backend="aot_eager")
    torch.manual_seed(0)
    first, second = compiled(q), compiled(q)
    torch.manual_seed(0)
    again = compiled(q)
    assert torch.equal(first, again) and not torch.equal(first, second)
    torch.compiler.reset()


# ---- packages --------------------------------------------------------------------------------------------------------


@on("cpu-fp32", "cuda")
def test_export_package_without_our_python_package(backend, layer_on, tmp_path):
    layer, inputs = layer_on()
    program = torch.export.export(layer.eval(), (inputs(8),), dynamic_shapes=({1: torch.export.Dim.DYNAMIC},))
    assert "volta_fa.fwd" in str(program.graph)
    torch.export.save(program, tmp_path / "layer.pt2")
    x = inputs(11).detach()
    torch.save((x, layer(x).detach()), tmp_path / "data.pt")
    code = """
        import sys, torch
        library, package, data = sys.argv[1:]
        torch.ops.load_library(library)
        x, expected = torch.load(data)
        torch.testing.assert_close(torch.export.load(package).module()(x), expected)
        assert "volta_fa" not in sys.modules
        print("fine")
    """
    assert run_python(code, LIBRARY, tmp_path / "layer.pt2", tmp_path / "data.pt") == "fine"


@functools.cache
def aot_inductor_works_on_cuda() -> bool:
    """On some machines PyTorch's own packages crash as they are loaded: seen with torch 2.11 on an H200."""
    make = """
        import sys, torch

        class Module(torch.nn.Module):
            def forward(self, x):
                return x * 2 + 1

        program = torch.export.export(Module(), (torch.randn(8, device="cuda"),))
        print(torch._inductor.aoti_compile_and_package(program, package_path=sys.argv[1]))
    """
    load = """
        import sys, torch
        x = torch.randn(8, device="cuda")
        torch.testing.assert_close(torch._inductor.aoti_load_package(sys.argv[1])(x), x * 2 + 1)
    """
    with tempfile.TemporaryDirectory() as folder:
        package = run_python(make, f"{folder}/trivial.pt2").splitlines()[-1]
        return subprocess.run([sys.executable, "-c", textwrap.dedent(load), package], capture_output=True, timeout=300).returncode == 0


def need_aot_inductor(backend):
    if backend.device == "cuda" and not aot_inductor_works_on_cuda():
        pytest.skip("here PyTorch cannot load an AOTInductor package for CUDA, not even of a module without our op")


AOTI = """
    import sys, torch
    import torch._inductor.codecache  # torch 2.10 takes for granted that somebody did
    library, package, data = sys.argv[1:]
    torch.ops.load_library(library)
    x, expected = torch.load(data)
    found = torch._inductor.aoti_load_package(package)(*x)
    torch.testing.assert_close(found, expected, rtol=1e-2 if found.is_cuda else None, atol=1e-2 if found.is_cuda else None)
    assert "volta_fa" not in sys.modules
    print("fine")
"""


@pytest.mark.slow
@NEEDS_COMPILER
@on("cpu-fp32", "cuda")
def test_aot_inductor_package(backend, layer_on, tmp_path):
    """Compiled to machine code, loaded and run where only the library is."""
    need_aot_inductor(backend)
    layer, inputs = layer_on()
    program = torch.export.export(layer.eval(), (inputs(8).detach(),), dynamic_shapes=({1: torch.export.Dim.DYNAMIC},))
    package = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "layer.pt2"))
    x = inputs(11).detach()
    torch.save(((x,), layer(x).detach()), tmp_path / "data.pt")
    assert run_python(AOTI, LIBRARY, package, tmp_path / "data.pt") == "fine"


class Packed(torch.nn.Module):
    def forward(self, qkv, cu_seqlens, bias):
        q, k, v = (qkv * 1.5).unbind(1)
        lengths = {"cu_seqlens_q": cu_seqlens, "cu_seqlens_k": cu_seqlens, "max_seqlen_q": 12, "max_seqlen_k": 12}
        return fwd(q, k, v, **lengths, attn_bias=bias) + 1


@pytest.mark.slow
@NEEDS_COMPILER
@on("cpu-fp32", "cuda")
def test_aot_inductor_package_with_optional_tensors(backend, tmp_path):
    need_aot_inductor(backend)

    def arguments(lengths):
        return backend.randn(sum(lengths), 3, 2, 16), packed_lengths(backend, lengths), backend.randn(1, 2, 12, 12)

    dynamic = ({0: torch.export.Dim.DYNAMIC}, {0: torch.export.Dim.DYNAMIC}, None)
    program = torch.export.export(Packed(), arguments([5, 12, 7]), dynamic_shapes=dynamic)
    package = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "packed.pt2"))
    x = arguments([3, 12, 0, 9])
    torch.save((x, Packed()(*x)), tmp_path / "data.pt")
    assert run_python(AOTI, LIBRARY, package, tmp_path / "data.pt") == "fine"


# ---- activation checkpointing ------------------------------------------------------------------------------------------


class Checkpointed(torch.nn.Module):
    """A module whose forward pass runs again in the backward pass."""

    def __init__(self, module, **options):
        super().__init__()
        self.module, self.options = module, options

    def forward(self, x):
        out = torch.utils.checkpoint.checkpoint(self.module, x, **self.options)
        # draws random numbers after the checkpoint, which must not change those of its recomputation
        return out + torch.rand_like(out) * 0


def selectively(layer, keep_attention):
    """Checkpoints a layer by a policy that keeps attention's results or not."""
    from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

    def policy(context, op, *args, **kwargs):
        keep = keep_attention and op is torch.ops.volta_fa.fwd.default
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    return Checkpointed(layer, use_reentrant=False, context_fn=lambda: create_selective_checkpoint_contexts(policy))


DROPOUT = pytest.mark.parametrize("dropout_p", [0.0, 0.4], ids=["", "dropout"])


@DROPOUT
@pytest.mark.parametrize("reentrant", [False, True], ids=["", "reentrant"])
@on("cpu-fp32", "cuda")
def test_checkpoint(backend, layer_on, reentrant, dropout_p):
    """With dropout, the recomputation drops the same."""
    layer, inputs = layer_on(dropout_p)
    x = inputs()
    expected = gradients(layer, x)
    assert_same_gradients(gradients(Checkpointed(layer, use_reentrant=reentrant), x), expected)


@DROPOUT
@pytest.mark.parametrize("keep_attention", [False, True])
@on("cpu-fp32", "cuda")
def test_selective_checkpoint(backend, layer_on, keep_attention, dropout_p):
    """A policy sees volta_fa::fwd as one op, and can keep it."""
    layer, inputs = layer_on(dropout_p)
    x = inputs()
    expected = gradients(layer, x)
    checkpointed = selectively(layer, keep_attention)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        found = gradients(checkpointed, x)
    assert_same_gradients(found, expected)
    if backend.kernels:  # they have no ATen products to count
        return
    # An op has an event for each layer of the dispatcher that sees it; the ATen op inside tells a run apart from
    # a recomputation that finds the result in the cache.
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
    """In a compiled program the recomputation is planned ahead: random operations keep their state, or their result."""
    torch.compiler.reset()
    layer, inputs = layer_on(dropout_p)
    x = inputs()
    expected = gradients(layer, x)
    checkpointed = selectively(layer, keep_attention)
    compiled = torch.compile(checkpointed, backend="aot_eager_decomp_partition", fullgraph=True)
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
    torch.compiler.reset()


# ---- functorch -------------------------------------------------------------------------------------------------------


@on("cpu-fp32")
def test_functorch_says_what_it_cannot_do(backend):
    """torch.func's transforms do not see through derivatives written in C++: an error, never a wrong answer."""
    q, k, v, _ = Case(5, 6, 8).inputs(backend)
    with pytest.raises(RuntimeError, match="(?i)functorch|torch.func|vmap"):
        torch.func.grad(lambda t: fwd(t, k, v).sum())(q)
    with pytest.raises(NotImplementedError, match="volta_fa::fwd.*forward-mode"):
        torch.func.jvp(lambda t: fwd(t, k, v), (q,), (torch.ones_like(q),))
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(v, torch.ones_like(v))
        with pytest.raises(NotImplementedError, match="volta_fa::fwd.*forward-mode"):
            fwd(q, k, dual)


@on("cpu-fp32")
def test_functorch_does_not_differentiate_a_bias_either(backend):
    q, k, v, _ = Case(5, 6, 8).inputs(backend)
    with pytest.raises(RuntimeError, match="(?i)functorch|torch.func|vmap"):
        torch.func.grad(lambda b: fwd(q, k, v, attn_bias=b).sum())(backend.randn(1, 2, 5, 6))
    with pytest.raises(NotImplementedError, match="volta_fa::fwd.*forward-mode"):
        torch.func.jvp(lambda s: fwd(q, k, v, sinks=s), (backend.randn(2),), (torch.ones(2),))


@on("cpu-fp32")
def test_vmap(backend):
    """Without a gradient, PyTorch's loop over the batch serves; with one, see above."""
    q, k, v, _ = (torch.stack([t, t * 2]) for t in Case(5, 6, 8).inputs(backend))
    found = torch.vmap(fwd)(q, k, v)
    for i in range(2):
        torch.testing.assert_close(found[i], fwd(q[i], k[i], v[i]))


# ---- counting operations ---------------------------------------------------------------------------------------------


@on("cpu-fp32", "cuda")
def test_flops(backend):
    """As many as PyTorch counts for its own attention."""
    from torch.utils import flop_counter

    import volta_fa.flops  # noqa: F401  registers them

    q, k, v, dout = Case(9, 15, 16, 24, nheads=4, nheads_k=2).inputs(backend)
    q_heads, v_heads = (2, 4, 9, 16), (2, 4, 15, 24)
    k_heads = (2, 4, 15, 16)
    inputs = leaves((q, k, v))
    with flop_counter.FlopCounterMode(display=False) as counter:
        fwd(*inputs, is_causal=True).backward(dout)
    counts = {str(op): n for op, n in counter.get_flop_counts()["Global"].items()}
    assert counts["volta_fa.fwd"] == flop_counter.sdpa_flop_count(q_heads, k_heads, v_heads)
    assert counts["volta_fa.bwd"] == flop_counter.sdpa_backward_flop_count((2, 4, 9, 24), q_heads, k_heads, v_heads)


@on("cpu-fp32", "cuda")
def test_flops_of_packed_sequences(backend):
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.utils.flop_counter import FlopCounterMode

    import volta_fa.flops  # noqa: F401  registers them

    def count(qkv, cu_seqlens):
        with FlopCounterMode(display=False) as counter:
            packed_attention(qkv, cu_seqlens, 9).float().sum().backward()
        counts = {str(op): n for op, n in counter.get_flop_counts()["Global"].items()}
        return counts["volta_fa.fwd"], counts["volta_fa.bwd"]

    lengths = [5, 0, 9]
    qkv, cu_seqlens = backend.randn(14, 3, 2, 16).requires_grad_(), packed_lengths(backend, lengths)
    pairs = 2 * sum(n * n for n in lengths)
    # two operations for a multiply-add: headdim + headdim_v = 32 columns forward, 3 * 16 + 2 * 16 = 80 backward
    assert count(qkv, cu_seqlens) == (2 * pairs * 32, 2 * pairs * 80)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        # a fake tensor has no lengths, so each of the three sequences counts with max_seqlen 9; two heads
        longest = 2 * 3 * 81
        assert count(mode.from_tensor(qkv), mode.from_tensor(cu_seqlens)) == (2 * longest * 32, 2 * longest * 80)


# ---- streams and devices ---------------------------------------------------------------------------------------------


@on("cuda")
def test_streams(backend):
    """Forward and backward run on the caller's stream: behind what it enqueued there, whatever other streams do."""
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
            torch.cuda._sleep(50_000_000)  # the inputs get their values long after the call has returned
            for a, b in zip(late, p):
                a.copy_(b)
            found.append(step(*late))
    torch.cuda.synchronize()
    for f, e in zip(found, expected):
        for a, b in zip(f, e):
            torch.testing.assert_close(a, b, rtol=2e-3, atol=2e-3)


@on("cuda")
def test_devices(backend):
    """Every device of the machine in one process, none of them the current one but the first."""
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
            for a, b in zip(step(f"cuda:{i}", dropout_p), expected):
                torch.testing.assert_close(a, b, rtol=5e-3, atol=5e-3)


@on("cuda")
def test_nothing_waits_for_the_gpu(backend):
    """Neither pass synchronizes, with lengths on the device, a bias, sinks and dropout."""
    q, k, v = (backend.randn(40, 2, 64).requires_grad_() for _ in range(3))
    cu_seqlens = packed_lengths(backend, [11, 0, 29])
    options = {
        "cu_seqlens_q": cu_seqlens,
        "cu_seqlens_k": cu_seqlens,
        "max_seqlen_q": 29,
        "max_seqlen_k": 29,
        "attn_bias": backend.randn(1, 2, 29, 29).requires_grad_(),
        "sinks": torch.randn(2, device="cuda", requires_grad=True),
        "dropout_p": 0.2,
        "alibi_slopes": torch.rand(2, device="cuda"),
    }
    fwd(q, k, v, **options).sum().backward()  # loads the kernels
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        fwd(q, k, v, **options).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
