"""Tests that scaled_dot_product_attention reaches volta_fa under torch.compile, export, checkpointing, TorchScript and torch.nn.

Of sdpa_helpers.py: `enabled(backend)` switches volta_fa on, `assert_ours(f)` and `assert_theirs(f)` check whose ops f() runs, `qkv` draws
q, k and v, `train` returns out and their gradients of sum(out^2). `leaves` copies tensors that then require a gradient, `causal` is
attention of q * 2, k and v, `selective` runs a function under selective checkpointing, SelfAttention is a layer of torch.nn. `gradients`
returns those of a module's parameters. `sdpa_stats` counts calls that `ran` eagerly or were `traced` by torch.compile, not the runs of a
compiled program. A backend is the CPU, the simulator (`sim`) or a GPU (`cuda`); `backend.kernels`: not the CPU."""

from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.utils import counters
from torch.nn.attention import sdpa_kernel
from torch.utils.checkpoint import checkpoint

import volta_fa
from conftest import on, run_python
from sdpa_helpers import EFFICIENT, MATH, SelfAttention, assert_ours, assert_theirs, causal, enabled, leaves, qkv, selective, train
from sdpa_helpers import switched_off as switched_off  # a fixture of every test
from test_routes import assert_same_gradients, gradients
from test_routes import fresh_compiler as fresh_compiler  # another: resets torch.compile


@on("cpu-fp32", "sim", "cuda")
def test_eager(backend):
    tensors = qkv(backend)
    with enabled(backend):
        assert_ours(lambda: train(*tensors))
        with torch.no_grad():
            assert_ours(lambda: F.scaled_dot_product_attention(*tensors), backward=False)
        with torch.inference_mode():
            assert_ours(lambda: F.scaled_dot_product_attention(*tensors), backward=False)
    if backend.name == "cpu-fp32":
        assert_theirs(lambda: train(*tensors))


class Causal(torch.nn.Module):
    def forward(self, q, k, v):
        return causal(q, k, v)


def grouped(q, k, v):
    return F.scaled_dot_product_attention(q, k[:, :1], v[:, :1], enable_gqa=True)


def masked(q, k, v):
    """A bool mask and a bias that depends on k, so that it has a gradient."""
    visible = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril(2)
    bias = k.sum(-1)[:, :, None].masked_fill(~visible, float("-inf"))
    return F.scaled_dot_product_attention(q, k, v, bias) + F.scaled_dot_product_attention(q, k, v, visible)


def dropped(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, dropout_p=0.3)


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("f", [causal, grouped, masked, dropped])
@on("cpu-fp32", "cuda")
def test_compile(backend, f, dynamic):
    """A function compiled by AOTAutograd, the part of torch.compile before inductor, runs volta_fa and gives eager's results."""
    compiled = torch.compile(f, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    with enabled(backend):
        for shape in ((2, 2, 9, 16), (2, 2, 14, 16), (2, 2, 9, 20)):
            tensors = qkv(backend, *shape)
            assert_ours(lambda: train(*tensors, attention=compiled))
            torch.manual_seed(0)
            found = train(*tensors, attention=compiled)
            torch.manual_seed(0)
            tolerance = 1e-2 if backend.kernels else 1e-5
            for a, b in zip(found, train(*tensors, attention=f)):
                torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)
                assert a.stride() == b.stride()
            with torch.inference_mode():
                assert_ours(lambda: compiled(*tensors), backward=False)
        assert volta_fa.sdpa_stats()["traced"] > 0
    # a graph with gradients and one without
    assert not dynamic or counters["stats"]["unique_graphs"] == 2, "another shape compiled again"


COMPILED = pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])


@COMPILED
@pytest.mark.parametrize("how", ["checkpoint", "reentrant", "selective"])
@on("cpu-fp32", "cuda")
def test_checkpoint(backend, how, compiled):
    """The recomputation runs volta_fa again and drops the same elements."""
    if compiled and how == "reentrant":
        pytest.skip("torch.compile takes the other kind only")
    tensors = qkv(backend)

    def checkpointed(q, k, v):
        if how == "selective":
            return selective(dropped, q, k, v)
        return checkpoint(dropped, q, k, v, use_reentrant=how == "reentrant")

    def step(f):
        torch.manual_seed(0)
        inputs = leaves(*tensors)
        f(*inputs).square().sum().backward()
        return [t.grad for t in inputs]

    run = torch.compile(checkpointed, fullgraph=True, backend="aot_eager_decomp_partition") if compiled else checkpointed
    with enabled(backend):
        expected = step(dropped)
        assert_ours(lambda: step(run))
        volta_fa.sdpa_stats(reset=True)
        found = step(run)
        if not (compiled and backend.kernels):  # on CUDA, what a compiled program recomputes has a generator that manual_seed does not set
            torch.testing.assert_close(found, expected, **({"rtol": 2e-2, "atol": 2e-2} if backend.kernels else {}))
        assert volta_fa.sdpa_stats() == {"ran": 0 if compiled else 2, "traced": 0, "fell_back": {}}


@pytest.mark.parametrize("mask", [False, True], ids=["", "learned mask"])
@on("cpu-fp32")
def test_second_derivatives_are_refused(backend, mask):
    """volta_fa has no second derivatives. PyTorch's fused attention has none either; unfused, with a learned mask, it has them."""
    q, k, v, bias = leaves(*qkv(backend), backend.randn(9, 9))

    def step():
        out = F.scaled_dot_product_attention(q, k, v, bias if mask else None)
        torch.autograd.grad(out.square().sum(), q, create_graph=True)[0].sum().backward()

    with enabled(), pytest.raises(RuntimeError, match="volta_fa::bwd is not implemented"):
        step()
    with nullcontext() if mask else pytest.raises(RuntimeError, match="is not implemented"):
        step()
    with enabled(), sdpa_kernel(MATH):
        step()


@on("cuda")
def test_strides_are_those_of_memory_efficient_attention(backend):
    """out has the strides of memory-efficient attention, which PyTorch uses on Volta."""
    tensors = qkv(backend)
    with sdpa_kernel(EFFICIENT):
        expected = F.scaled_dot_product_attention(*tensors)
    with enabled(backend):
        assert F.scaled_dot_product_attention(*tensors).stride() == expected.stride()


STRIDES = {
    "contiguous": lambda b, h, n, d: torch.randn(b, h, n, d),
    "transposed": lambda b, h, n, d: torch.randn(b, n, h, d).transpose(1, 2),
    "part of a projection": lambda b, h, n, d: torch.randn(b, n, 3, h, d)[:, :, 1].transpose(1, 2),
    "tokens first": lambda b, h, n, d: torch.randn(n, b, h, d).permute(1, 2, 0, 3),
    "strided headdim": lambda b, h, n, d: torch.randn(b, h, d, n).transpose(2, 3),
    "expanded": lambda b, h, n, d: torch.randn(1, h, 1, d).expand(b, h, n, d),
}


@pytest.mark.parametrize("layout", STRIDES)
@pytest.mark.parametrize(
    "case", ["plain", "mask", "mask of rank 3", "gradient of a mask", "dropout", "other headdim", "grouped heads", "one query"]
)
def test_strides_on_the_cpu_are_those_of_torch(case, layout):
    """out has the strides of PyTorch's result. torch's test_sdpa_backward_with_gradient depends on them."""
    queries, headdim_v, heads_k = 1 if case == "one query" else 5, 12 if case == "other headdim" else 8, 2 if case == "grouped heads" else 4
    q = STRIDES[layout](2, 4, queries, 8).requires_grad_()
    mask = torch.zeros(queries, 7, requires_grad=case == "gradient of a mask") if "mask" in case else None
    mask = mask.expand(4, -1, -1) if case == "mask of rank 3" else mask
    for kind in ("contiguous", "transposed", "strided headdim"):
        k, v = STRIDES[kind](2, heads_k, 7, 8), STRIDES[kind](2, heads_k, 7, headdim_v)
        options = {"attn_mask": mask, "dropout_p": 0.5 * (case == "dropout"), "enable_gqa": case == "grouped heads"}
        expected = F.scaled_dot_product_attention(q, k, v, **options)
        with enabled():
            found = F.scaled_dot_product_attention(q, k, v, **options)
        assert found.stride() == expected.stride(), kind
        assert volta_fa.sdpa_stats(reset=True)["ran"] == 1


@pytest.mark.parametrize("how", ["compiled", "exported"])
@on("cpu-fp32")
def test_programs_follow_the_switch(backend, how):
    """The switch decides when a program runs, not when it is compiled, or exported with the switch off."""
    tensors = qkv(backend)
    compiled = torch.compile(causal, fullgraph=True, backend="aot_eager")
    program = compiled if how == "compiled" else torch.export.export(Causal(), tuple(tensors)).module()
    for _ in range(2):
        assert_theirs(lambda: train(*tensors, attention=program))
        with enabled():
            assert_ours(lambda: train(*tensors, attention=program))


#: What a program does before it enables the switch.
BEFORE_THE_SWITCH = {
    "compiled": "compile()",
    "compiled, without gradients": "with torch.no_grad(): compile()",
    "exported": "torch.export.export(Module(), tensors)",
    "exported and taken apart": "torch.export.export(Module(), tensors).run_decompositions()",
    "packaged": """
        import torch._inductor.config as config
        def stop(graph):
            raise InterruptedError  # before the C++ compiler, which is slow
        config.post_grad_custom_post_pass = stop
        try:
            torch._inductor.aoti_compile_and_package(torch.export.export(Module(), tensors), package_path="/nowhere/a.pt2")
        except Exception as error:
            assert "InterruptedError" in str(error)
    """,
}


@pytest.mark.parametrize(
    "before, imported",
    [
        ("compiled", "late"),
        *(pytest.param(before, "first", marks=[] if before == "packaged" else pytest.mark.slow) for before in BEFORE_THE_SWITCH),
    ],
)
def test_graphs_traced_before_enable_sdpa(before, imported):
    """PyTorch's Python dispatcher caches where a traced call went. Graphs traced after the switch must not use entries from before it."""
    code = f"""
        import sys, torch, torch.nn.functional as F
        if "{imported}" == "first":
            import volta_fa

        class Module(torch.nn.Module):
            def forward(self, q, k, v):
                return F.scaled_dot_product_attention(q * 2, k, v, is_causal=True)

        tensors = tuple(torch.randn(2, 2, 9, 16, requires_grad=True) for _ in range(3))

        def compile():
            return torch.compile(Module(), fullgraph=True, backend="aot_eager")(*tensors)

        exec(__import__("textwrap").dedent(sys.argv[1]))
        torch.compiler.reset()
        import volta_fa
        volta_fa.enable_sdpa("cpu")
        for gradients in (True, False):
            torch.set_grad_enabled(gradients)
            out = compile()
            functions = "Attention" in str(out.grad_fn.next_functions) if gradients else out.grad_fn
            print(functions, volta_fa.sdpa_stats(reset=True)["traced"] > 0)
        decomposed = torch.export.export(Module(), tensors).run_decompositions()
        print("volta_fa.fwd" in str(decomposed.graph))
    """
    lines = run_python(code, BEFORE_THE_SWITCH[before].strip("\n")).splitlines()
    assert [line.split()[-1] for line in lines] == ["True"] * 3, lines


@on("cpu-fp32")
def test_export_of_a_data_dependent_batch(backend):
    """The number of rows comes from a tensor's value. A mask adds no condition on it, such as that it is not 1."""

    class Module(torch.nn.Module):
        def forward(self, rows, q, k, v, mask):
            ones = q.new_ones(rows.item(), 1, 1, 1)
            return F.scaled_dot_product_attention(*(t * ones for t in (q, k, v)), attn_mask=mask & ones.bool())

    q, k, v = qkv(backend)
    q, k, v = (t[:1] for t in (q, k, v))
    mask = torch.ones(1, 1, 1, k.shape[2], dtype=torch.bool)
    mask[..., 1::2] = False
    with enabled():
        program = torch.export.export(Module(), (torch.tensor(3), q, k, v, mask)).run_decompositions()
        assert any("volta_fa.fwd" in str(node.target) for node in program.graph.nodes)
    for rows in (0, 1, 2):
        arguments = torch.tensor(rows), q, k, v, mask
        torch.testing.assert_close(program.module()(*arguments), Module()(*arguments))


@on("cpu-fp32")
def test_run_decompositions_follows_the_switch(backend):
    """It gives volta_fa's op while the switch is on, and PyTorch's decomposition before and after."""

    def targets():
        for with_gradients in (True, False):
            with torch.set_grad_enabled(with_gradients):
                program = torch.export.export(Causal(), tuple(qkv(backend)))
                yield {str(node.target) for node in program.run_decompositions().graph.nodes}

    before = list(targets())
    with enabled():
        assert all("volta_fa.fwd.default" in found for found in targets())
    assert list(targets()) == before and all("aten._softmax.default" in found for found in before)


@pytest.mark.parametrize("order", [(0, 1, 2), (0, 2, 1), (2, 1, 0)], ids=["contiguous", "heads_after_tokens", "tokens_first"])
@on("cpu-fp32")
def test_a_decomposed_program_trains(backend, order):
    """The result has the layout of q. An aten::copy into it had no derivative. `order`: dimensions of q, from the outermost in memory."""

    class Module(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = torch.nn.Parameter(torch.linspace(0.5, 1.5, 16))

        def forward(self, q, k, v):
            return F.scaled_dot_product_attention(q * self.scale, k, v, is_causal=True)

    q, k, v = qkv(backend, 2, 3, 9, 16)
    q = q.permute(*order, 3).contiguous().permute(*(order.index(i) for i in range(3)), 3)
    module = Module()
    with enabled():
        program = torch.export.export(module, (q, k, v)).run_decompositions().module()
        out, found = module(q, k, v), program(q, k, v)
        assert found.stride() == out.stride()
        torch.testing.assert_close(found, out)
        want = torch.autograd.grad(out.square().sum(), module.scale)
        torch.testing.assert_close(torch.autograd.grad(found.square().sum(), list(program.parameters())), want)


@on("cpu-fp32")
def test_settings_are_in_the_key_of_the_disk_cache(backend, monkeypatch):
    """Keys of torch.compile's disk cache differ by setting (devices, precision) and by the library's op schemas."""
    from torch.compiler import config

    sdpa, before = volta_fa.integrations.sdpa, config.cache_key_tag
    found = [before]
    monkeypatch.setattr(torch.ops.volta_fa, "_sdpa_configure", lambda *_: None)  # this machine may not have two GPUs
    for cuda in (frozenset(), frozenset([0]), frozenset([0, 1])):
        for precision in ("exact", "fast"):
            monkeypatch.setattr(sdpa, "devices_of", lambda *_, cuda=cuda: sdpa.Devices(True, cuda))
            with volta_fa.sdpa_enabled(precision=precision):
                found.append(config.cache_key_tag)
    monkeypatch.setattr(torch.ops.volta_fa, "fwd", torch.ops.volta_fa.bwd)  # another schema, as of another release of the library
    with volta_fa.sdpa_enabled():
        found.append(config.cache_key_tag)
    assert len(set(found)) == len(found) == 8 and config.cache_key_tag == before


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.parametrize("f", [causal, masked])
@pytest.mark.parametrize("how", ["script", "trace"])
@on("cpu-fp32", "cuda")
def test_torchscript(backend, how, f, tmp_path):
    """A program saved with the switch off runs our kernels with the switch on."""
    tensors = qkv(backend)
    program = torch.jit.script(f) if how == "script" else torch.jit.trace(f, tuple(tensors))
    program.save(str(tmp_path / "program.pt"))
    program = torch.jit.load(str(tmp_path / "program.pt"))
    with enabled(backend):
        for _ in range(3):  # TorchScript optimizes later runs
            assert_ours(lambda: train(*tensors, attention=program))


LAYERS = {
    "MultiheadAttention": SelfAttention,
    "TransformerEncoderLayer": lambda dropout=0.0: torch.nn.TransformerEncoderLayer(32, 2, 64, dropout, batch_first=True),
    "TransformerDecoderLayer": lambda dropout=0.0: torch.nn.TransformerDecoderLayer(32, 2, 64, dropout, batch_first=True),
}
PADDED = torch.tensor([[False] * 9, [False] * 6 + [True] * 3])
FUTURE = torch.nn.Transformer.generate_square_subsequent_mask(9)
LAYER_MASKS = {
    "MultiheadAttention": {
        "": {},
        "key_padding_mask": {"key_padding_mask": PADDED},
        "attn_mask": {"attn_mask": FUTURE.isinf()},
        "float attn_mask": {"attn_mask": FUTURE},
        "both": {"attn_mask": FUTURE.isinf(), "key_padding_mask": PADDED},
    },
    "TransformerEncoderLayer": {
        "": {},
        "both": {"src_mask": FUTURE.isinf(), "src_key_padding_mask": PADDED},
        "causal": {"src_mask": FUTURE, "is_causal": True},
    },
    "TransformerDecoderLayer": {"": {}, "masks": {"tgt_mask": FUTURE, "memory_key_padding_mask": PADDED}},
}


def masks_on(backend, masks):
    """Returns the masks on the backend's device, floating-point ones in its dtype."""

    def move(t):
        return t if not isinstance(t, torch.Tensor) else t.to(backend.device, t.dtype if t.dtype == torch.bool else backend.dtype)

    return {name: move(t) for name, t in masks.items()}


@COMPILED
@pytest.mark.parametrize("layer,masks", [pytest.param(layer, m, id=f"{layer} {m}".strip()) for layer, g in LAYER_MASKS.items() for m in g])
@on("cpu-fp32", "cuda")
def test_layers(backend, layer, masks, compiled):
    """PyTorch's attention layers run volta_fa's op, eagerly and compiled, without a fallback; parameters get the same gradients."""
    torch.manual_seed(0)
    module = LAYERS[layer]().to(backend.device, backend.dtype)
    masks = masks_on(backend, LAYER_MASKS[layer][masks])
    x = backend.randn(2, 9, 32)
    inputs = (x, x) if "Decoder" in layer else (x,)
    expected = gradients(module, *inputs, **masks)
    run = torch.compile(module, fullgraph=True, backend="aot_eager") if compiled else module
    with enabled(backend):
        assert_ours(lambda: gradients(run, *inputs, **masks))
        assert_same_gradients(gradients(run, *inputs, **masks), expected)
    assert volta_fa.sdpa_stats()["fell_back"] == {}


@COMPILED
@pytest.mark.parametrize("layer", LAYERS)
@on("cpu-fp32", "cuda")
def test_layers_train_with_dropout(backend, layer, compiled):
    """Gradients follow PyTorch's seed."""
    torch.manual_seed(0)
    module = LAYERS[layer](dropout=0.3).to(backend.device, backend.dtype)
    x = backend.randn(2, 9, 32)
    inputs = (x, x) if "Decoder" in layer else (x,)
    run = torch.compile(module, fullgraph=True, backend="aot_eager") if compiled else module

    def step(seed):
        return torch.cat([g.flatten() for g in gradients(run, *inputs, seed=seed)]).float()

    with enabled(backend):
        assert_ours(lambda: step(0))
        first, same, other = step(1), step(1), step(2)
    torch.testing.assert_close(first, same, rtol=2e-2, atol=2e-2 if backend.kernels else 1e-6)  # dq is summed by atomics
    assert (first - other).norm() > 0.05 * first.norm()
    assert volta_fa.sdpa_stats()["fell_back"] == {}


@pytest.mark.parametrize("masks", ["", "padding"])
@pytest.mark.parametrize("layer", ["MultiheadAttention", "TransformerEncoderLayer"])
@on("cpu-fp32", "cuda")
def test_inference_fast_path_of_layers(backend, layer, masks):
    """torch.nn's inference kernels for whole layers (the fast path) have attention of their own, on CUDA only for calls with a mask.
    volta_fa runs the rest, and all calls with set_fastpath_enabled(False)."""
    module = LAYERS[layer]().to(backend.device, backend.dtype).eval()
    name = "key_padding_mask" if layer == "MultiheadAttention" else "src_key_padding_mask"
    masks = masks_on(backend, {name: PADDED} if masks else {})
    x = backend.randn(2, 9, 32)
    with torch.no_grad(), enabled(backend):
        expected = module(x, **masks)
        assert volta_fa.sdpa_stats(reset=True)["ran"] == int(backend.device == "cuda" and not masks)
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            assert_ours(lambda: module(x, **masks), backward=False)
            found = module(x, **masks)
        finally:
            torch.backends.mha.set_fastpath_enabled(True)
    keep = ~PADDED.to(backend.device) if masks else slice(None)  # results of padding are undefined
    torch.testing.assert_close(found[keep], expected[keep], **({"rtol": 2e-2, "atol": 2e-2} if backend.kernels else {}))


@on("cpu-fp32", "cuda")
def test_autocast(backend):
    """In an autocast region fp32 tensors are computed in its dtype, and gradients are fp32."""
    tensors = [t.float() for t in qkv(backend)]
    dtype = torch.float16 if backend.kernels else torch.bfloat16
    with enabled(backend), torch.autocast(backend.device, dtype):
        assert_ours(lambda: train(*tensors))
        out, *gradients = train(*tensors)
    assert out.dtype == dtype and all(g.dtype == torch.float32 for g in gradients)
