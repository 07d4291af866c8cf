"""Ways by which programs reach the ops: compilers, packages, checkpointing, functorch, processes, C++.

The basics of autograd, torch.compile, export and TorchScript are in test_autograd.py; the routes through PyTorch's own
scaled_dot_product_attention in test_sdpa.py.
"""

import copy
import os
import pickle
import shutil
import socket
import subprocess
import sys
import textwrap

import pytest
import torch
from torch._dynamo.utils import counters

from conftest import LIBRARY, REPOSITORY, Case, on

NEEDS_COMPILER = pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")


def fwd(q, k, v, **options):
    return torch.ops.volta_fa.fwd(q, k, v, **options)[0]


def leaves(tensors):
    return [t.detach().clone().requires_grad_() for t in tensors]


class Layer(torch.nn.Module):
    """Causal self-attention around the op."""

    def __init__(self, width: int = 32, nheads: int = 2):
        super().__init__()
        self.nheads = nheads
        self.qkv = torch.nn.Linear(width, 3 * width)
        self.out = torch.nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, s, w = x.shape
        q, k, v = self.qkv(x).view(b, s, 3, self.nheads, w // self.nheads).unbind(2)
        out, _softmax_lse, _rng_state = torch.ops.volta_fa.fwd(q, k, v, is_causal=True)
        return self.out(out.reshape(b, s, w))


@pytest.fixture
def layer():
    torch.manual_seed(0)
    return Layer()


def gradients(module, x):
    module.zero_grad()
    module(x).square().sum().backward()
    return [p.grad.clone() for p in module.parameters()]


def assert_same_gradients(found, expected, **tolerance):
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, **(tolerance or {"rtol": 1e-4, "atol": 1e-5}))


def run_python(code: str, *arguments, **environment) -> str:
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


# ---- inductor --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@NEEDS_COMPILER
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_inductor(layer, dynamic):
    torch.compiler.reset()
    counters.clear()
    compiled = torch.compile(layer, fullgraph=True, dynamic=dynamic)
    for seqlen in (8, 13, 21) if dynamic else (8,):
        x = torch.randn(2, seqlen, 32)
        found = gradients(compiled, x)
        assert_same_gradients(found, gradients(layer, x))
    assert counters["stats"]["unique_graphs"] == 1, "a new seqlen compiled again"
    torch.compiler.reset()


def test_no_recompilation_when_seqlen_changes(layer):
    torch.compiler.reset()
    counters.clear()
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
    for seqlen in (8, 9, 64, 2, 33):
        x = torch.randn(2, seqlen, 32)
        assert_same_gradients(gradients(compiled, x), gradients(layer, x))
        with torch.no_grad():
            torch.testing.assert_close(compiled(x), layer(x))
    # one with gradients and one without
    assert counters["stats"]["unique_graphs"] == 2
    torch.compiler.reset()


# ---- packages --------------------------------------------------------------------------------------------------------


def test_export_package_without_our_python_package(layer, tmp_path):
    program = torch.export.export(layer.eval(), (torch.randn(2, 8, 32),), dynamic_shapes=({1: torch.export.Dim.DYNAMIC},))
    assert "volta_fa.fwd" in str(program.graph)
    torch.export.save(program, tmp_path / "layer.pt2")
    x = torch.randn(2, 11, 32)
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


@pytest.mark.slow
@NEEDS_COMPILER
def test_aot_inductor_package(layer, tmp_path):
    """Compiled to machine code, loaded and run where only the library is."""
    program = torch.export.export(layer.eval(), (torch.randn(2, 8, 32),), dynamic_shapes=({1: torch.export.Dim.DYNAMIC},))
    package = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "layer.pt2"))
    x = torch.randn(2, 11, 32)
    torch.save((x, layer(x).detach()), tmp_path / "data.pt")
    code = """
        import sys, torch
        library, package, data = sys.argv[1:]
        torch.ops.load_library(library)
        x, expected = torch.load(data)
        torch.testing.assert_close(torch._inductor.aoti_load_package(package)(x), expected)
        assert "volta_fa" not in sys.modules
        print("fine")
    """
    assert run_python(code, LIBRARY, package, tmp_path / "data.pt") == "fine"


# ---- activation checkpointing ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reentrant", [False, True], ids=["", "reentrant"])
def test_checkpoint(layer, reentrant):
    x = torch.randn(2, 9, 32, requires_grad=True)
    expected = gradients(layer, x)
    layer.zero_grad()
    torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=reentrant).square().sum().backward()
    assert_same_gradients([p.grad for p in layer.parameters()], expected)


@pytest.mark.parametrize("keep_attention", [False, True])
def test_selective_checkpoint(layer, keep_attention):
    """A policy sees volta_fa::fwd as one op, and can keep it."""
    from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

    def policy(context, op, *args, **kwargs):
        keep = keep_attention and op is torch.ops.volta_fa.fwd.default
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    x = torch.randn(2, 9, 32, requires_grad=True)
    expected = gradients(layer, x)
    layer.zero_grad()
    with torch.profiler.profile() as profiler:
        checkpoint(
            layer, x, use_reentrant=False, context_fn=lambda: create_selective_checkpoint_contexts(policy)
        ).square().sum().backward()
    assert_same_gradients([p.grad for p in layer.parameters()], expected)
    # An op has an event for each layer of the dispatcher that sees it; the matrix product inside tells a run apart from
    # a recomputation that finds the result in the cache.
    products = [e.time_range for e in profiler.events() if e.name == "aten::bmm"]
    calls = [e.time_range for e in profiler.events() if e.name == "volta_fa::fwd"]
    inside = lambda a, b: a is not b and b.start <= a.start and a.end <= b.end
    runs = [c for c in calls if any(inside(p, c) for p in products) and not any(inside(other, c) for other in calls)]
    assert len(runs) == (1 if keep_attention else 2)


def test_checkpoint_compiled(layer):
    torch.compiler.reset()
    x = torch.randn(2, 9, 32, requires_grad=True)
    expected = gradients(layer, x)
    layer.zero_grad()
    f = torch.compile(lambda t: torch.utils.checkpoint.checkpoint(layer, t, use_reentrant=False), backend="aot_eager", fullgraph=True)
    f(x).square().sum().backward()
    assert_same_gradients([p.grad for p in layer.parameters()], expected)
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
def test_vmap(backend):
    """Without a gradient, PyTorch's loop over the batch serves; with one, see above."""
    q, k, v, _ = (torch.stack([t, t * 2]) for t in Case(5, 6, 8).inputs(backend))
    found = torch.vmap(fwd)(q, k, v)
    for i in range(2):
        torch.testing.assert_close(found[i], fwd(q[i], k[i], v[i]))


@on("cpu-fp64")
def test_double_backward_names_the_op(backend):
    inputs = leaves(Case(5, 6, 8).inputs(backend)[:3])
    grads = torch.autograd.grad(fwd(*inputs).square().sum(), inputs, create_graph=True)
    with pytest.raises(RuntimeError, match="volta_fa::bwd.*not implemented|not implemented.*volta_fa::bwd"):
        grads[0].sum().backward()


# ---- modules and processes ---------------------------------------------------------------------------------------------


def test_deepcopy_and_pickle(layer, tmp_path):
    x = torch.randn(2, 9, 32)
    expected = gradients(layer, x)
    torch.save(layer, tmp_path / "layer.pt")
    for twin in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), torch.load(tmp_path / "layer.pt", weights_only=False)):
        assert_same_gradients(gradients(twin, x), expected)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_fork_after_import():
    code = """
        import os, sys, torch
        torch.ops.load_library(sys.argv[1])
        t = torch.randn(1, 4, 1, 8)
        expected = torch.ops.volta_fa.fwd(t, t, t)[0]
        child = os.fork()
        if child == 0:
            same = torch.equal(torch.ops.volta_fa.fwd(t, t, t)[0], expected)
            os._exit(0 if same and not torch.cuda.is_initialized() else 1)
        print(os.waitpid(child, 0)[1])
    """
    assert run_python(code, LIBRARY) == "0"


def test_data_loader_workers(layer):
    """Worker processes fork from one that has used the op, and use it themselves."""
    code = """
        import sys, torch
        torch.ops.load_library(sys.argv[1])
        torch.set_num_threads(1)

        class Data(torch.utils.data.Dataset):
            def __len__(self):
                return 4

            def __getitem__(self, i):
                t = torch.full((1, 3, 1, 8), float(i))
                return torch.ops.volta_fa.fwd(t, t, t)[0].mean()

        Data()[0]
        print([b.item() for b in torch.utils.data.DataLoader(Data(), num_workers=2)])
    """
    assert run_python(code, LIBRARY) == "[0.0, 1.0, 2.0, 3.0]"


DDP = """
    import sys, torch
    import torch.distributed as dist
    torch.ops.load_library(sys.argv[1])
    rank, port, source = int(sys.argv[2]), sys.argv[3], sys.argv[4]
    torch.set_num_threads(1)
    sys.path.insert(0, source)
    from routes_layer import Layer, data
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(Layer())
    x = data()
    model(x[rank : rank + 1]).square().sum().backward()
    # DDP averages over ranks: half of the gradient of the whole batch
    torch.manual_seed(0)
    alone = Layer()
    alone(x).square().sum().backward()
    for p, q in zip(model.parameters(), alone.parameters()):
        torch.testing.assert_close(p.grad, q.grad / 2, rtol=1e-4, atol=1e-5)
    dist.destroy_process_group()
    print("fine")
"""


@pytest.mark.skipif(not torch.distributed.is_available(), reason="no torch.distributed")
def test_ddp_over_two_processes(tmp_path):
    import inspect

    (tmp_path / "routes_layer.py").write_text(
        f"import torch\n\n\n{inspect.getsource(Layer)}\n\ndef data():\n    g = torch.Generator().manual_seed(7)\n    return torch.randn(2, 9, 32, generator=g)\n"
    )
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    code = textwrap.dedent(DDP)
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(LIBRARY), str(rank), str(port), str(tmp_path)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "GLOO_SOCKET_IFNAME": "lo"},
        )
        for rank in range(2)
    ]
    for p in processes:
        out, err = p.communicate(timeout=180)
        assert p.returncode == 0 and out.strip().endswith("fine"), err


# ---- programs without Python -------------------------------------------------------------------------------------------

CPP = REPOSITORY / "examples" / "cpp"


def build(source, target):
    """A plain g++ line against libtorch, as docs/routes.md shows it."""
    from torch.utils.cpp_extension import include_paths

    torch_lib = os.path.join(os.path.dirname(torch.__file__), "lib")
    command = ["g++", "-std=c++17", "-O1", str(source), "-o", str(target)]
    command += [f"-isystem{path}" for path in include_paths()]
    command += [f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"]
    command += [f"-L{torch_lib}", f"-Wl,-rpath,{torch_lib}", "-ltorch", "-ltorch_cpu", "-lc10", "-ldl"]
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=600)


@pytest.mark.slow
@NEEDS_COMPILER
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_cpp_program(tmp_path, layer):
    """A program that links libtorch only: the op by name, its gradients, and a saved TorchScript module."""
    torch.jit.script(layer).save(str(tmp_path / "layer.pt"))
    build(CPP / "attention.cpp", tmp_path / "attention")
    linked = subprocess.run(["ldd", tmp_path / "attention"], capture_output=True, text=True).stdout
    names = [line.split()[0] for line in linked.splitlines()]
    assert not [name for name in names if "python" in name or "volta" in name]
    result = subprocess.run([tmp_path / "attention", LIBRARY, tmp_path / "layer.pt"], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr + result.stdout
    assert "gradients agree" in result.stdout and "module: 2 9 32" in result.stdout
