"""PyTorch's scaled_dot_product_attention through volta_fa: which kernel ran (a profiler says), and whether it is right."""

import copy
import functools
import os
import threading
import warnings
import zipfile
from contextlib import ExitStack, contextmanager, nullcontext, suppress

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.utils import counters
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from conftest import LIBRARY, NEEDS_COMPILER, NEEDS_FORK, on, ops_called, run_process, run_python
from test_routes import AOTI, need_aot_inductor

if "VOLTA_FA_TEST_LIBRARY" in os.environ:
    pytest.skip("the Python package loads its own library", allow_module_level=True)

import volta_fa
from volta_fa.diagnostics import driver_cuda

FLASH, EFFICIENT, MATH, CUDNN = SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH, SDPBackend.CUDNN_ATTENTION


@pytest.fixture(autouse=True)
def switched_off():
    """Each test starts and ends with everything off and the counters at 0."""
    volta_fa.disable_sdpa()
    volta_fa.sdpa_stats(reset=True)
    yield
    volta_fa.disable_sdpa()


def enabled(backend=None):
    if backend is not None and backend.name == "sim":
        backend.monkeypatch.setenv("VOLTA_FA_SIMULATE", "1")
    if backend is not None and backend.device == "cuda":
        return volta_fa.sdpa_enabled("cuda", force=True)
    return volta_fa.sdpa_enabled("cpu")


def ops_of(f) -> set[str]:
    """The names of the ops that a call runs."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the profiler's own advice
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
            f()
    return ops_called(profiler)


OURS = {"volta_fa::fwd", "volta_fa::bwd"}


def is_fused(op: str) -> bool:
    return op.startswith("aten::_scaled_dot_product")


def assert_ours(f, backward: bool = True):
    ops = ops_of(f)
    assert (OURS if backward else {"volta_fa::fwd"}) <= ops, sorted(ops)
    assert not [op for op in ops if is_fused(op)]


def assert_theirs(f):
    ops = ops_of(f)
    assert not OURS & ops
    assert [op for op in ops if is_fused(op)], sorted(ops)


def leaves(*tensors):
    return [t.detach().clone(memory_format=torch.preserve_format).requires_grad_() for t in tensors]


def train(q, k, v, attention=F.scaled_dot_product_attention, **options):
    """out, dq, dk, dv for a gradient that depends on out."""
    inputs = leaves(q, k, v)
    out = attention(*inputs, **options)
    return [out.detach(), *torch.autograd.grad(out.square().sum(), inputs)]


def recompute_all(context, op, *args, **kwargs):
    return CheckpointPolicy.PREFER_RECOMPUTE


def selective(f, *inputs):
    """f, to be run again in the backward pass by selective checkpointing, which works by a dispatch mode."""
    contexts = functools.partial(create_selective_checkpoint_contexts, recompute_all)
    return checkpoint(f, *inputs, use_reentrant=False, context_fn=contexts)


@contextmanager
def unfused():
    """PyTorch's attention out of single operations, all in the dtype of the inputs: by default they are in fp32."""
    before = torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed()
    torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(True)
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(before)


# ---- right answers -------------------------------------------------------------------------------------------------

#         seqlen_q, seqlen_k, nheads, nheads_k, headdim, headdim_v, options
PROBLEMS = {
    "plain": (20, 20, 2, 2, 16, 16, {}),
    "cross": (7, 33, 2, 2, 64, 64, {}),
    "causal": (20, 20, 2, 2, 64, 64, {"is_causal": True}),
    "causal, fewer keys": (33, 7, 2, 2, 16, 16, {"is_causal": True}),
    "causal, more keys": (7, 33, 2, 2, 16, 16, {"is_causal": True}),
    "causal, one query": (1, 9, 2, 2, 16, 16, {"is_causal": True}),
    "causal, one key": (9, 1, 2, 2, 16, 16, {"is_causal": True}),
    "grouped heads": (12, 15, 6, 2, 32, 32, {"enable_gqa": True, "is_causal": True}),
    "one kv head": (12, 15, 4, 1, 8, 8, {"enable_gqa": True}),
    "odd headdim": (12, 15, 2, 2, 13, 13, {"is_causal": True}),
    "two headdims": (12, 15, 2, 2, 24, 40, {}),
    "two odd headdims": (15, 12, 4, 2, 5, 27, {"is_causal": True, "enable_gqa": True}),
    "headdim 256": (5, 6, 1, 1, 256, 256, {}),
    "headdim 512": (5, 6, 1, 1, 512, 512, {}),
    "scale": (12, 12, 2, 2, 16, 16, {"scale": 0.31}),
    "negative scale": (12, 12, 2, 2, 16, 16, {"scale": -0.2}),
}


# Added to what is allowed: with one key PyTorch's gradients of q and k are exact zeros, ours a rounding away.
FLOOR = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 2e-4, torch.bfloat16: 2e-3}


def check(backend, q, k, v, attn_mask=None, **options):
    """Errors against fp64 at most 2 (out) and 3 (gradients) times those of PyTorch's unfused attention."""
    exact_mask = attn_mask if attn_mask is None or attn_mask.dtype == torch.bool else attn_mask.double()
    with unfused():
        exact = train(q.double(), k.double(), v.double(), attn_mask=exact_mask, **options)
        theirs = train(q, k, v, attn_mask=attn_mask, **options)
    with enabled(backend):
        ours = train(q, k, v, attn_mask=attn_mask, **options)
    assert volta_fa.sdpa_stats() == {"ran": 1, "traced": 0, "fell_back": {}}
    for name, e, t, o in zip(("out", "dq", "dk", "dv"), exact, theirs, ours):
        assert o.shape == e.shape and o.dtype == q.dtype, name
        allowed = (2 if name == "out" else 3) * (t.double() - e).abs().max() + FLOOR[q.dtype]
        assert (o.double() - e).abs().max() <= allowed, name


@pytest.mark.parametrize("problem", PROBLEMS)
@on("cpu-fp32", "cpu-fp64", "cpu-bf16", "cpu-fp16", "sim", "cuda")
def test_against_math(backend, problem):
    seqlen_q, seqlen_k, nheads, nheads_k, headdim, headdim_v, options = PROBLEMS[problem]
    shapes = (2, nheads, seqlen_q, headdim), (2, nheads_k, seqlen_k, headdim), (2, nheads_k, seqlen_k, headdim_v)
    check(backend, *(backend.randn(*shape) for shape in shapes), **options)


LAYOUTS = {
    "heads transposed": lambda t: t.transpose(1, 2).contiguous().transpose(1, 2),
    "headdim strided": lambda t: t.transpose(2, 3).contiguous().transpose(2, 3),
    "odd row stride": lambda t: F.pad(t, (0, 3))[..., : t.shape[-1]],
    "misaligned": lambda t: F.pad(t, (3, 5))[..., 3:-5],
    "batch expanded": lambda t: t[:1].expand_as(t),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@on("cpu-fp32", "sim", "cuda")
def test_layouts(backend, layout):
    tensors = [LAYOUTS[layout](backend.randn(2, 2, 9, 16)) for _ in range(3)]
    with enabled(backend):
        found = train(*tensors)
        expected = train(*(t.contiguous() for t in tensors))
    for a, b in zip(found, expected):
        torch.testing.assert_close(a, b, rtol=2e-3, atol=2e-3)
    assert volta_fa.sdpa_stats()["ran"] == 2


# ---- masks and dropout -----------------------------------------------------------------------------------------------


def hiding_rows(rows):
    """A bool mask that hides every key of the rows, and the odd ones of the others."""

    def make(b, dtype):
        visible = (torch.arange(33, device=b.device) % 2 == 0).repeat(9, 1)
        visible[rows] = False
        return visible

    return make


def hidden_padding(b, dtype):
    """(batch, 1, 1, seqlen_k), as padding arrives: entry 0 has 20 keys, entry 1 all 33."""
    return (torch.arange(33, device=b.device) < torch.tensor([20, 33], device=b.device)[:, None])[:, None, None]


def numbers(*shape):
    return lambda b, dtype: b.randn(*shape).to(dtype)


#        mask(backend, q's dtype) for q (2, 4, 9, 16) and k (2, 4, 33, 16); headdim
MASKS = {
    "bool": (hiding_rows([]), 16),
    "bool, hidden rows": (hiding_rows([0, 5]), 16),
    "bool, padding": (hidden_padding, 16),
    "bool, expanded": (lambda b, dtype: hidden_padding(b, dtype).expand(2, 4, 9, 33), 16),
    "bool, odd headdim": (hidden_padding, 13),
    "rank 2": (numbers(9, 33), 16),
    "rank 3": (numbers(4, 9, 33), 16),
    "rank 3, one head": (numbers(1, 9, 33), 16),
    "rank 4": (numbers(2, 4, 9, 33), 16),
    "per row": (numbers(9, 1), 16),
    "per head": (numbers(4, 1, 1), 16),
    "per key": (numbers(1, 33), 16),
    "one number": (numbers(1, 1), 16),
    "odd headdim": (numbers(4, 9, 33), 13),
    "fp32": (lambda b, dtype: b.randn(4, 9, 33).float(), 16),
    "strided": (lambda b, dtype: b.randn(33, 9, 4).to(dtype).permute(2, 1, 0), 16),
    "misaligned": (lambda b, dtype: b.randn(9, 36).to(dtype)[:, 3:], 16),
    "-inf": (lambda b, dtype: torch.where(hidden_padding(b, dtype), 0.0, float("-inf")).to(dtype), 16),
    "-inf, whole rows": (lambda b, dtype: torch.where(hiding_rows([8])(b, dtype), 0.0, float("-inf")).to(dtype), 16),
    "lowest": (
        lambda b, dtype: torch.zeros_like(hidden_padding(b, dtype), dtype=dtype).masked_fill(
            ~hidden_padding(b, dtype), torch.finfo(dtype).min
        ),
        16,
    ),
}


@pytest.mark.parametrize("mask", MASKS)
@on("cpu-fp32", "cpu-fp64", "cpu-bf16", "cpu-fp16", "sim", "cuda")
def test_masks_against_math(backend, mask):
    make, headdim = MASKS[mask]
    q, k, v = backend.randn(2, 4, 9, headdim), backend.randn(2, 4, 33, headdim), backend.randn(2, 4, 33, headdim)
    check(backend, q, k, v, make(backend, q.dtype))


@pytest.mark.parametrize("headdim", [16, 13])
@on("cpu-fp32", "cuda")
def test_mask_with_grouped_heads(backend, headdim):
    q, k, v = backend.randn(2, 6, 9, headdim), backend.randn(2, 2, 33, headdim), backend.randn(2, 2, 33, headdim)
    options = {"attn_mask": backend.randn(6, 9, 33), "enable_gqa": True}
    with unfused():
        expected = train(q, k, v, **options)
    with enabled(backend):
        assert_ours(lambda: train(q, k, v, **options))
        for a, b in zip(train(q, k, v, **options), expected):
            torch.testing.assert_close(a, b, rtol=2e-2 if backend.kernels else 1e-4, atol=2e-2 if backend.kernels else 1e-5)


@pytest.mark.parametrize("shape", [(9, 33), (1, 4, 9, 33), (2, 1, 1, 33), (4, 9, 1), (2, 4, 9, 33)], ids=str)
@pytest.mark.parametrize("alone", [False, True], ids=["", "alone"])
@on("cpu-fp32", "cpu-fp64", "cuda")
def test_gradient_of_a_mask(backend, shape, alone):
    """A learned bias, with or without gradients of q, k and v."""
    q, k, v, mask = backend.randn(2, 4, 9, 16), backend.randn(2, 4, 33, 16), backend.randn(2, 4, 33, 16), backend.randn(*shape)

    def step(q, k, v, mask):
        inputs = leaves(mask) if alone else leaves(q, k, v, mask)
        tensors = [q, k, v, *inputs] if alone else inputs
        F.scaled_dot_product_attention(*tensors).float().square().sum().backward()
        return [t.grad for t in inputs]

    with unfused():
        exact, theirs = step(q.double(), k.double(), v.double(), mask.double()), step(q, k, v, mask)
    with enabled(backend):
        assert_ours(lambda: step(q, k, v, mask))
        ours = step(q, k, v, mask)
    assert ours[-1].shape == mask.shape and ours[-1].dtype == mask.dtype
    # One value for all keys of a row changes nothing: its gradient is 0, up to what backward takes from the rounded result.
    noise = 0.0
    if shape[-1] == 1:
        out = F.scaled_dot_product_attention(q.double(), k.double(), v.double(), mask.double())
        of_rows = 4 * (2 * out * (out.to(q.dtype) - out)).norm(dim=-1, keepdim=True)  # as reference.delta_noise; dout is 2 * out
        noise = of_rows.square().sum_to_size(shape).sqrt().max()
    for e, t, o in zip(exact, theirs, ours):
        of_mask = noise if o is ours[-1] else 0.0
        assert (o.double() - e).abs().max() <= 3 * (t.double() - e).abs().max() + FLOOR[q.dtype] + of_mask


@on("cpu-fp32", "sim", "cuda")
def test_dropout(backend):
    """With the numbers of PyTorch's default generator, the same in forward and backward."""
    q, k = backend.randn(2, 2, 16, 16), backend.randn(2, 2, 16, 16)
    # with this v, out is what dropout leaves of the probabilities
    v = torch.eye(16, device=q.device, dtype=q.dtype).expand(2, 2, 16, 16)
    dout = backend.randn(2, 2, 16, 16)

    def step(seed):
        torch.manual_seed(seed)
        inputs = leaves(q, k, v)
        out = F.scaled_dot_product_attention(*inputs, dropout_p=0.25)
        return out.detach(), torch.autograd.grad(out, inputs[2], dout)[0]

    undropped = F.scaled_dot_product_attention(q, k, v)
    with enabled(backend):
        assert_ours(lambda: step(0))
        (p, dv), (again, _), (other, _) = step(0), step(0), step(1)
    assert torch.equal(p, again) and not torch.equal(p, other)
    kept = p != 0
    assert 0.6 < kept.float().mean() < 0.9
    torch.testing.assert_close(p[kept], undropped[kept] / 0.75, rtol=5e-3, atol=1e-3)
    torch.testing.assert_close(dv, p.transpose(2, 3) @ dout, rtol=1e-2, atol=1e-2 if backend.kernels else 1e-5)


@on("cpu-fp32", "cuda")
def test_dropout_and_mask_and_odd_headdim(backend):
    """As the op itself, which other tests check, does with the same numbers."""
    q, k, v, mask = backend.randn(2, 4, 9, 13), backend.randn(2, 4, 33, 13), backend.randn(2, 4, 33, 13), backend.randn(9, 33)
    padded = [F.pad(t, (0, 3)).transpose(1, 2) for t in (q, k, v)]
    torch.manual_seed(3)
    expected = torch.ops.volta_fa.fwd(*padded, attn_bias=mask[None, None], dropout_p=0.3, softmax_scale=13**-0.5)[0]
    with enabled(backend):
        torch.manual_seed(3)
        assert torch.equal(F.scaled_dot_product_attention(q, k, v, mask, dropout_p=0.3), expected.transpose(1, 2)[..., :13])


@on("cpu-fp32", "cuda")
def test_no_keys_and_no_batch(backend):
    for batch, seqlen_q, seqlen_k in ((2, 5, 0), (0, 5, 6), (2, 0, 6)):
        q, kv = backend.randn(batch, 2, seqlen_q, 8), backend.randn(batch, 2, seqlen_k, 8)
        # on the CPU: PyTorch's CUDA op returns None for an empty batch that needs a gradient (torch 2.11)
        expected = train(*(t.cpu().float() for t in (q, kv, kv)))
        with enabled(backend):
            for a, b in zip(train(q, kv, kv), expected):
                torch.testing.assert_close(a, b.to(a.device, a.dtype))


# ---- every way in ----------------------------------------------------------------------------------------------------


def qkv(backend, *shape):
    return [backend.randn(*(shape or (2, 2, 9, 16))) for _ in range(3)]


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


early_import = F.scaled_dot_product_attention


@on("cpu-fp32")
def test_function_imported_early(backend):
    tensors = qkv(backend)
    with enabled():
        assert_ours(lambda: train(*tensors, attention=early_import))
        assert_ours(lambda: train(*tensors, attention=torch.ops.aten.scaled_dot_product_attention))


def causal(q, k, v):
    return F.scaled_dot_product_attention(q * 2, k, v, is_causal=True)


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
    """Through AOTAutograd, which inductor sits on."""
    torch.compiler.reset()
    compiled = torch.compile(f, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    with enabled(backend):
        for shape in ((2, 2, 9, 16), (2, 2, 14, 16), (2, 2, 9, 20)):
            tensors = qkv(backend, *shape)
            assert_ours(lambda: train(*tensors, attention=compiled))
            torch.manual_seed(0)
            found = train(*tensors, attention=compiled)
            torch.manual_seed(0)
            for a, b in zip(found, train(*tensors, attention=f)):
                torch.testing.assert_close(
                    a, b, rtol=1e-2 if backend.device == "cuda" else 1e-5, atol=1e-2 if backend.device == "cuda" else 1e-5
                )
                assert a.stride() == b.stride()
            with torch.inference_mode():
                assert_ours(lambda: compiled(*tensors), backward=False)
        assert volta_fa.sdpa_stats()["traced"] > 0
    torch.compiler.reset()


@pytest.mark.slow
@NEEDS_COMPILER
@pytest.mark.parametrize("f", [causal, masked, dropped])
@on("cpu-fp32", "cuda")
def test_inductor(backend, f):
    torch.compiler.reset()
    compiled = torch.compile(f, fullgraph=True)
    tensors = qkv(backend)
    with enabled(backend):
        assert_ours(lambda: train(*tensors, attention=compiled))
        if f is not dropped:  # inductor has random numbers of its own
            for a, b in zip(train(*tensors, attention=compiled), train(*tensors, attention=f)):
                torch.testing.assert_close(a, b, **({"rtol": 1e-2, "atol": 1e-2} if backend.kernels else {}))
        with torch.no_grad():
            assert_ours(lambda: compiled(*tensors), backward=False)
    torch.compiler.reset()


@pytest.mark.slow
@NEEDS_COMPILER
@pytest.mark.parametrize("exported", ["on", "off"])
@on("cpu-fp32", "cuda")
def test_aot_inductor_package(backend, exported, tmp_path):
    """Compiled with the switch on, it runs our op wherever the library is."""
    need_aot_inductor(backend)

    tensors = tuple(qkv(backend))
    with enabled(backend) if exported == "on" else nullcontext():
        program = torch.export.export(Causal(), tensors, dynamic_shapes=({2: torch.export.Dim.DYNAMIC},) * 3)
    with enabled(backend):
        package = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "attention.pt2"))
    with zipfile.ZipFile(package) as files:
        assert any(b"volta_fa::fwd" in files.read(name) for name in files.namelist())
    tensors = tuple(qkv(backend, 2, 2, 14, 16))
    torch.save((tensors, causal(*tensors)), tmp_path / "data.pt")
    assert run_python(AOTI, LIBRARY, package, tmp_path / "data.pt") == "fine"


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("how", ["checkpoint", "reentrant", "selective"])
@on("cpu-fp32", "cuda")
def test_checkpoint(backend, how, compiled):
    """The recomputation drops the same, and runs ours again."""
    if compiled and how == "reentrant":
        pytest.skip("torch.compile takes the other kind only")
    torch.compiler.reset()
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
        # on CUDA, what a compiled program recomputes has a generator that manual_seed does not set
        for a, b in zip(step(run), expected if not (compiled and backend.kernels) else []):
            torch.testing.assert_close(a, b, **({"rtol": 2e-2, "atol": 2e-2} if backend.kernels else {}))
        assert volta_fa.sdpa_stats() == {"ran": 0 if compiled else 2, "traced": 0, "fell_back": {}}
    torch.compiler.reset()


@pytest.mark.parametrize("mask", [False, True], ids=["", "learned mask"])
@on("cpu-fp32")
def test_second_derivatives_name_the_op(backend, mask):
    """PyTorch's own fused attention has none either, but takes a learned mask to its unfused one, which has."""
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
    """Which is the one that PyTorch uses on Volta."""
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
@pytest.mark.parametrize("case", ["plain", "mask", "gradient of a mask", "dropout", "other headdim", "grouped heads", "one query"])
def test_strides_on_the_cpu_are_those_of_torch(case, layout):
    """torch's test_sdpa_backward_with_gradient draws numbers for tensors of these strides."""
    queries, headdim_v, heads_k = 1 if case == "one query" else 5, 12 if case == "other headdim" else 8, 2 if case == "grouped heads" else 4
    q = STRIDES[layout](2, 4, queries, 8).requires_grad_()
    mask = torch.zeros(queries, 7, requires_grad=case == "gradient of a mask") if "mask" in case else None
    for kind in ("contiguous", "transposed", "strided headdim"):
        k, v = STRIDES[kind](2, heads_k, 7, 8), STRIDES[kind](2, heads_k, 7, headdim_v)
        options = {"attn_mask": mask, "dropout_p": 0.5 * (case == "dropout"), "enable_gqa": case == "grouped heads"}
        expected = F.scaled_dot_product_attention(q, k, v, **options)
        with enabled():
            found = F.scaled_dot_product_attention(q, k, v, **options)
        assert found.stride() == expected.stride(), kind
        assert volta_fa.sdpa_stats(reset=True)["ran"] == 1


def self_attention(x):
    """With a mask that depends on the length, and dropout."""
    visible = torch.ones(x.shape[2], x.shape[2], dtype=torch.bool, device=x.device).tril(2)
    causally = F.scaled_dot_product_attention(x, x, x, is_causal=True)
    return F.scaled_dot_product_attention(causally, x, x, visible, dropout_p=0.1)


@on("cpu-fp32", "cuda")
def test_no_recompilation_when_seqlen_changes(backend):
    torch.compiler.reset()
    counters.clear()
    compiled = torch.compile(self_attention, fullgraph=True, dynamic=True, backend="aot_eager")
    with enabled(backend):
        for seqlen in (8, 9, 64, 2, 33):
            x = backend.randn(2, 2, seqlen, 16).requires_grad_()
            assert_ours(lambda: compiled(x).float().sum().backward())
    assert counters["stats"]["unique_graphs"] == 1
    torch.compiler.reset()


@on("cpu-fp32")
def test_compiled_programs_follow_the_switch(backend):
    torch.compiler.reset()
    compiled = torch.compile(causal, fullgraph=True, backend="aot_eager")
    tensors = qkv(backend)
    for _ in range(2):
        assert_theirs(lambda: train(*tensors, attention=compiled))
        with enabled():
            assert_ours(lambda: train(*tensors, attention=compiled))
    torch.compiler.reset()


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
    """Tracing goes through PyTorch's dispatcher in Python, which remembers where a call went: nothing of that may be stale."""
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
def test_export_of_a_batch_that_only_data_tell(backend):
    """A mask adds no condition on the number of rows, such as that it is not 1."""

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
def test_export_takes_it_apart_as_ever(backend):
    """ExportedProgram.run_decompositions, with the switch off before, on, and off again."""

    def targets():
        for gradients in (True, False):
            with torch.set_grad_enabled(gradients):
                program = torch.export.export(Causal(), tuple(qkv(backend)))
                yield {str(node.target) for node in program.run_decompositions().graph.nodes}

    before = list(targets())
    with enabled():
        assert all("volta_fa.fwd.default" in found for found in targets())
    assert list(targets()) == before
    assert all("aten._softmax.default" in found for found in before)


@on("cpu-fp32")
def test_caches_on_disk_know_the_switch(backend, monkeypatch):
    """A program that another setting or another library compiled has another key."""
    from torch.compiler import config

    sdpa, before = volta_fa.integrations.sdpa, config.cache_key_tag
    found = [before]
    monkeypatch.setattr(torch.ops.volta_fa, "_sdpa_configure", lambda *_: None)  # this machine may have no such device
    for cuda in (frozenset(), frozenset([0]), frozenset([0, 1])):
        for precision in ("exact", "fast"):
            monkeypatch.setattr(sdpa, "devices_of", lambda *_, cuda=cuda: sdpa.Devices(True, cuda))
            with volta_fa.sdpa_enabled(precision=precision):
                found.append(config.cache_key_tag)
    monkeypatch.setattr(torch.ops.volta_fa, "fwd", torch.ops.volta_fa.bwd)  # stands for other arguments
    with volta_fa.sdpa_enabled():
        found.append(config.cache_key_tag)
    assert len(set(found)) == len(found) == 8
    assert config.cache_key_tag == before


def test_the_last_open_block_has_its_precision():
    with ExitStack() as outer, ExitStack() as inner:
        outer.enter_context(volta_fa.sdpa_enabled("cpu", precision="fast"))
        outer.enter_context(volta_fa.sdpa_enabled("cpu"))
        inner.enter_context(volta_fa.sdpa_enabled("cpu", precision="fast"))
        active = volta_fa.integrations.sdpa.active
        assert active().precision == "fast"
        inner.close()  # equal to the first
        assert active().precision == "exact"


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
        for _ in range(3):  # later runs are optimised
            assert_ours(lambda: train(*tensors, attention=program))


class FakeMultihead(torch.nn.Module):
    """MultiheadAttention as an encoder calls it."""

    def __init__(self, dropout: float = 0.0):
        super().__init__()
        self.attention = torch.nn.MultiheadAttention(32, 2, dropout, batch_first=True)

    def forward(self, x, **masks):
        return self.attention(x, x, x, need_weights=False, **masks)[0]


LAYERS = {
    "MultiheadAttention": FakeMultihead,
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
    """A float mask in the dtype of the rest."""

    def move(t):
        return t if not isinstance(t, torch.Tensor) else t.to(backend.device, t.dtype if t.dtype == torch.bool else backend.dtype)

    return {name: move(t) for name, t in masks.items()}


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize(
    "layer,masks", [pytest.param(layer, m, id=f"{layer} {m}".strip()) for layer, group in LAYER_MASKS.items() for m in group]
)
@on("cpu-fp32", "cuda")
def test_layers(backend, layer, masks, compiled):
    torch.manual_seed(0)
    torch.compiler.reset()
    module = LAYERS[layer]().to(backend.device, backend.dtype)
    masks = masks_on(backend, LAYER_MASKS[layer][masks])
    x = backend.randn(2, 9, 32)
    inputs = (x, x) if "Decoder" in layer else (x,)

    def step(m):
        m.zero_grad()
        m(*inputs, **masks).float().square().sum().backward()
        return [p.grad.clone() for p in m.parameters()]

    expected = step(module)
    run = torch.compile(module, fullgraph=True, backend="aot_eager") if compiled else module
    with enabled(backend):
        assert_ours(lambda: step(run))
        for a, b in zip(step(run), expected):
            torch.testing.assert_close(
                a, b, rtol=2e-2 if backend.device == "cuda" else 1e-4, atol=5e-2 if backend.device == "cuda" else 1e-5
            )
    assert volta_fa.sdpa_stats()["fell_back"] == {}
    torch.compiler.reset()


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("layer", LAYERS)
@on("cpu-fp32", "cuda")
def test_layers_train_with_dropout(backend, layer, compiled):
    """Two seeds give two gradients, one seed the same twice, and the attention is ours."""
    torch.manual_seed(0)
    torch.compiler.reset()
    module = LAYERS[layer](dropout=0.3).to(backend.device, backend.dtype)
    x = backend.randn(2, 9, 32)
    inputs = (x, x) if "Decoder" in layer else (x,)
    run = torch.compile(module, fullgraph=True, backend="aot_eager") if compiled else module

    def step(seed):
        torch.manual_seed(seed)
        module.zero_grad()
        run(*inputs).float().square().sum().backward()
        return torch.cat([p.grad.flatten() for p in module.parameters()]).float()

    with enabled(backend):
        assert_ours(lambda: step(0))
        first, same, other = step(1), step(1), step(2)
    torch.testing.assert_close(first, same, rtol=2e-2, atol=2e-2 if backend.kernels else 1e-6)  # dq is summed by atomics
    assert (first - other).norm() > 0.05 * first.norm()
    assert volta_fa.sdpa_stats()["fell_back"] == {}
    torch.compiler.reset()


@pytest.mark.parametrize("masks", ["", "padding"])
@pytest.mark.parametrize("layer", ["MultiheadAttention", "TransformerEncoderLayer"])
@on("cpu-fp32", "cuda")
def test_fast_path(backend, layer, masks):
    """torch.nn's inference kernels for whole layers have attention of their own, on CUDA for calls with a mask only; they
    can be switched off."""
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
    keep = ~PADDED.to(backend.device) if masks else slice(None)  # what is padding comes out as anything
    torch.testing.assert_close(found[keep], expected[keep], **({"rtol": 2e-2, "atol": 2e-2} if backend.kernels else {}))


@on("cpu-fp32")
def test_multihead_attention_that_returns_weights(backend):
    """need_weights, which is on by default, takes the op out of torch.nn.MultiheadAttention."""
    module = torch.nn.MultiheadAttention(32, 2, batch_first=True)
    x = backend.randn(2, 9, 32)
    with enabled():
        module(x, x, x)
        assert volta_fa.sdpa_stats()["ran"] == 0
        module(x, x, x, need_weights=False)
        assert volta_fa.sdpa_stats()["ran"] == 1


@on("cpu-fp32", "cuda")
def test_autocast(backend):
    """fp32 tensors, which CUDA has no kernels for, arrive in the region's dtype; gradients go back in fp32."""
    tensors = [t.float() for t in qkv(backend)]
    dtype = torch.float16 if backend.kernels else torch.bfloat16
    with enabled(backend), torch.autocast(backend.device, dtype):
        assert_ours(lambda: train(*tensors))
        out, *gradients = train(*tensors)
    assert out.dtype == dtype and all(g.dtype == torch.float32 for g in gradients)


@on("cpu-fp32")
def test_export_decides_when_it_is_lowered(backend):
    """A graph exported with the switch off still says scaled_dot_product_attention: compiling it decides."""

    tensors = qkv(backend)
    program = torch.export.export(Causal(), tuple(tensors)).module()
    assert_theirs(lambda: program(*tensors))
    with enabled():
        assert_ours(lambda: program(*tensors), backward=False)


# ---- fallbacks -------------------------------------------------------------------------------------------------------


FALLBACKS = {
    # PyTorch's fused CPU implementation takes both, its others refuse
    "attn_mask": {
        "and is_causal": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, torch.ones(9, 9).tril(-1) + 0.5, is_causal=True)
    },
    "dropout": {"of everything": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, dropout_p=1.0)},
    "shape": {
        "rank 3": lambda q, k, v: F.scaled_dot_product_attention(q[0], k[0], v[0]),
        "broadcast heads": lambda q, k, v: F.scaled_dot_product_attention(q, k[:, :1], v[:, :1]),
        "broadcast batch": lambda q, k, v: F.scaled_dot_product_attention(q, k[:1], v[:1]),
    },
    "headdim": {"": lambda q, k, v: F.scaled_dot_product_attention(*(t.repeat(1, 1, 1, 33) for t in (q, k, v)))},
    "scale": {str(s): lambda q, k, v, s=s: F.scaled_dot_product_attention(q, k, v, scale=s) for s in (float("inf"), float("nan"))},
}


@pytest.mark.parametrize(
    "reason,f", [pytest.param(r, f, id=f"{r} {n}".strip()) for r, group in FALLBACKS.items() for n, f in group.items()]
)
@on("cpu-fp32")
def test_fallback(backend, reason, f):
    tensors = qkv(backend)
    torch.manual_seed(0)
    expected = train(*tensors, attention=f)
    with enabled():
        torch.manual_seed(0)
        found = train(*tensors, attention=f)
    for a, b in zip(found, expected):
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)
    assert volta_fa.sdpa_stats() == {"ran": 0, "traced": 0, "fell_back": {reason: 1}}


@on("cuda")
def test_dtypes_and_determinism_on_cuda(backend):
    tensors = qkv(backend)
    with enabled(backend):
        train(*(t.double() for t in tensors))
        for dtype in (torch.bfloat16, torch.float32):
            assert_ours(lambda dtype=dtype: train(*(t.to(dtype) for t in tensors)))
        torch.use_deterministic_algorithms(True)
        try:
            first, second = train(*tensors), train(*tensors)
        finally:
            torch.use_deterministic_algorithms(False)
    assert all(torch.equal(a, b) for a, b in zip(first, second))
    assert volta_fa.sdpa_stats() == {"ran": 4, "traced": 0, "fell_back": {"dtype": 1}}


@pytest.mark.parametrize(
    "allowed", [[MATH], [CUDNN, MATH], [EFFICIENT, MATH], [FLASH], [FLASH, MATH]], ids=lambda a: "+".join(b.name for b in a)
)
@on("cpu-fp32", "cuda")
def test_users_choice_is_respected(backend, allowed):
    """We stand in for fused attention: flash on the CPU, which has no other, flash and memory-efficient on CUDA."""
    tensors = qkv(backend)
    ours = FLASH in allowed or (EFFICIENT in allowed and backend.device == "cuda")
    with enabled(backend), sdpa_kernel(allowed):
        train(*tensors)
    found = volta_fa.sdpa_stats()
    assert found == ({"ran": 1, "traced": 0, "fell_back": {}} if ours else {"ran": 0, "traced": 0, "fell_back": {"sdpa_kernel": 1}})


@on("cpu-fp32")
def test_nested_tensors_fall_back(backend):
    nested = torch.nested.nested_tensor([torch.randn(2, 5, 16), torch.randn(2, 7, 16)])
    expected = F.scaled_dot_product_attention(nested, nested, nested)
    with enabled():
        found = F.scaled_dot_product_attention(nested, nested, nested)
    for a, b in zip(found.unbind(), expected.unbind()):
        assert torch.equal(a, b)
    assert volta_fa.sdpa_stats()["fell_back"] == {"layout": 1}


@on("cpu-fp32")
def test_functorch_and_forward_mode_fall_back(backend):
    q, k, v = qkv(backend)
    expected = train(q, k, v, attention=lambda *t: F.scaled_dot_product_attention(*t))[1]
    with enabled():
        found = torch.func.grad(lambda t: F.scaled_dot_product_attention(t, k, v).square().sum())(q)
        torch.testing.assert_close(found, expected)
        # without a gradient, vmap has taken the op apart before our kernel is reached
        found = torch.vmap(F.scaled_dot_product_attention)(*(t[None] for t in (q, k, v)))
        torch.testing.assert_close(found[0], F.scaled_dot_product_attention(q, k, v))
        with torch.autograd.forward_ad.dual_level(), sdpa_kernel([SDPBackend.MATH, SDPBackend.FLASH_ATTENTION]):
            dual = torch.autograd.forward_ad.make_dual(q, torch.ones_like(q))
            with suppress(NotImplementedError):  # PyTorch's fused attention has no forward mode either
                F.scaled_dot_product_attention(dual, k, v)
    assert volta_fa.sdpa_stats() == {"ran": 1, "traced": 0, "fell_back": {"forward_mode": 1, "functorch": 1}}


def counted(f, *inputs):
    """f under FlopCounterMode, another one."""
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False):
        return f(*inputs)


@pytest.mark.parametrize("under", [lambda f, *t: f(*t), selective, counted], ids=["", "selective checkpointing", "FlopCounterMode"])
@on("cpu-fp32")
def test_subclasses_fall_back(backend, under):
    """Also where a dispatch mode is active that traces nothing."""
    from torch.testing._internal.two_tensor import TwoTensor

    q, k, v = (TwoTensor(t, t.clone()) for t in qkv(backend))
    with enabled():
        out = under(F.scaled_dot_product_attention, q, k, v)
        assert isinstance(out, TwoTensor)
        assert volta_fa.sdpa_stats() == {"ran": 0, "traced": 0, "fell_back": {"subclass": 1}}


@pytest.mark.parametrize("under", [selective, counted], ids=["selective checkpointing", "FlopCounterMode"])
@on("cpu-fp32")
def test_calls_under_dispatch_modes_are_not_traced(backend, under):
    tensors = leaves(*qkv(backend))
    with enabled():
        out = under(F.scaled_dot_product_attention, *tensors)
        assert volta_fa.sdpa_stats(reset=True) == {"ran": 1, "traced": 0, "fell_back": {}}
        out.sum().backward()
        assert volta_fa.sdpa_stats() == {"ran": int(under is selective), "traced": 0, "fell_back": {}}


def test_dtensor():
    """DTensor has rules for our ops (test_distributed.py), eager, under dispatch modes and compiled; another subclass falls back."""
    code = """
        import os, torch, volta_fa
        import torch.distributed as dist
        import torch.nn.functional as F
        from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh
        from torch.utils.flop_counter import FlopCounterMode

        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        mesh = init_device_mesh("cpu", (1,))
        tensors = [distribute_tensor(torch.randn(2, 4, 9, 16), mesh, [Shard(1)]) for _ in range(3)]

        from torch.testing._internal.two_tensor import TwoTensor

        expected = F.scaled_dot_product_attention(*(t.to_local() for t in tensors))

        def call(f, tensors=tensors):
            out = f(*tensors)
            counts = {name: bool(n) for name, n in volta_fa.sdpa_stats(reset=True).items()}
            print(type(out).__name__, torch.allclose(getattr(out, "_local_tensor", expected), expected, atol=1e-5), counts)

        volta_fa.enable_sdpa("cpu")
        call(F.scaled_dot_product_attention)
        with FlopCounterMode(display=False):
            call(F.scaled_dot_product_attention)
        call(torch.compile(lambda *t: F.scaled_dot_product_attention(*t), backend="aot_eager", fullgraph=True))
        call(F.scaled_dot_product_attention, [TwoTensor(t.to_local(), t.to_local()) for t in tensors])
        dist.destroy_process_group()
    """
    # of some releases of torch, gloo prints that it is connected
    lines = [line for line in run_python(code, GLOO_SOCKET_IFNAME="lo").splitlines() if not line.startswith("[Gloo]")]
    assert lines == [
        *["DTensor True {'ran': True, 'traced': False, 'fell_back': False}"] * 2,
        "DTensor True {'ran': False, 'traced': True, 'fell_back': False}",
        "TwoTensor True {'ran': False, 'traced': False, 'fell_back': True}",
    ]


@on("cpu-fp32")
def test_flop_counting(backend):
    """What our op computes counts as PyTorch's attention does."""
    from torch.utils.flop_counter import FlopCounterMode

    import volta_fa.flops  # noqa: F401  registers them

    def count(f=train):
        with FlopCounterMode(display=False) as counter:
            f(*qkv(backend))
        return counter.get_total_flops()

    with sdpa_kernel(SDPBackend.MATH):
        expected = count()
    with enabled():
        # the backward pass multiplies Q and K again
        assert count() == expected + 2 * 2 * 2 * 9 * 9 * 16
        with torch.inference_mode():
            assert count(F.scaled_dot_product_attention) == 2 * 2 * 2 * 2 * 9 * 9 * 16


def with_mask(*shape, dtype=torch.float32):
    return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, torch.ones(*shape, dtype=dtype))


WRONG = {
    "mask shape": (with_mask(5, 3, dtype=torch.bool), "size|shape|expand|match"),
    "mask that has too many heads": (with_mask(3, 9, 9), "shape|expand|match"),
    "mask of rank 1": (with_mask(9), "[Dd]imension"),
    "mask of rank 5": (with_mask(1, 1, 1, 9, 9), "shape|match"),
    "mask dtype": (with_mask(9, 9, dtype=torch.int64), "attn_mask dtype"),
    "mask in another precision": (with_mask(9, 9, dtype=torch.float16), "attn_mask dtype"),
    "dropout_p": (lambda q, k, v: F.scaled_dot_product_attention(q, k, v, dropout_p=1.5), "dropout probability"),
    "dtypes": (lambda q, k, v: F.scaled_dot_product_attention(q, k.half(), v), "same dtype"),
    "devices": (lambda q, k, v: F.scaled_dot_product_attention(q, k.to("meta"), v.to("meta")), "same device"),
    "heads": (lambda q, k, v: F.scaled_dot_product_attention(q[:, :1].repeat(1, 3, 1, 1), k, v), "size|match|broadcast"),
    "headdims": (lambda q, k, v: F.scaled_dot_product_attention(q, k[..., :8], v), "size|shape|must match|mat"),
}


@pytest.mark.parametrize("what", WRONG)
@on("cpu-fp32")
def test_wrong_arguments_get_pytorchs_errors(backend, what):
    f, message = WRONG[what]
    tensors = qkv(backend)
    errors = []
    for on_ in (False, True):
        with pytest.raises((RuntimeError, IndexError), match=message) as raised, enabled() if on_ else nullcontext():
            f(*tensors)
        errors.append((raised.type, str(raised.value)))
    assert errors[0] == errors[1]
    assert volta_fa.sdpa_stats()["ran"] == 0


# ---- the switch ------------------------------------------------------------------------------------------------------


def is_on() -> bool:
    t = torch.randn(1, 1, 2, 8)
    return "volta_fa::fwd" in ops_of(lambda: F.scaled_dot_product_attention(t, t, t))


def test_on_and_off():
    assert not is_on()
    volta_fa.enable_sdpa("cpu")
    assert is_on()
    volta_fa.disable_sdpa()
    assert not is_on()
    volta_fa.disable_sdpa()  # harmless
    assert volta_fa.sdpa_stats(reset=True)["ran"] == 1
    assert volta_fa.sdpa_stats()["ran"] == 0


def test_enabling_twice_warns():
    volta_fa.enable_sdpa("cpu")
    with pytest.warns(UserWarning, match="enabled already: nothing changed"):
        volta_fa.enable_sdpa(torch.device("cpu"))
    assert is_on()
    volta_fa.disable_sdpa()  # once is enough
    assert not is_on()


def test_blocks_nest_and_overlap():
    with volta_fa.sdpa_enabled("cpu"):
        with volta_fa.sdpa_enabled("cpu"):
            assert is_on()
            volta_fa.disable_sdpa()  # undoes enable_sdpa, which nobody called
            assert is_on()
        assert is_on()
        volta_fa.enable_sdpa("cpu")
    assert is_on()
    first, second = volta_fa.sdpa_enabled("cpu"), volta_fa.sdpa_enabled("cpu")
    volta_fa.disable_sdpa()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert is_on()
    second.__exit__(None, None, None)
    assert not is_on()
    with pytest.raises(KeyError), volta_fa.sdpa_enabled("cpu"):
        raise KeyError
    assert not is_on()


def fast_and_exact(q, k, v, **options):
    """Returns what fwd_fast and fwd compute of SDPA's arguments."""
    operands = [t.transpose(1, 2) for t in (q, k, v)]
    mask, fwd, fwd_fast = options.pop("attn_mask", None), torch.ops.volta_fa.fwd, torch.ops.volta_fa.fwd_fast
    fast = None if mask is not None and mask.dtype != torch.bool else fwd_fast(*operands, attn_mask=mask, **options)[0].transpose(1, 2)
    return fast, fwd(*operands, attn_bias=mask, **options)[0].transpose(1, 2)


@on("cpu-fp16", "cpu-bf16")
def test_fast_precision(backend):
    q, k, v = qkv(backend, 2, 2, 40, 64)
    mask = backend.randn(1, 1, 40, 40) > 0
    cases = [({}, {}), ({"is_causal": True}, {"is_causal": True}), ({"attn_mask": mask[0, 0]}, {"attn_mask": mask})]
    with volta_fa.sdpa_enabled("cpu", precision="fast"):
        for passed, options in cases:
            fast, exact = fast_and_exact(q, k, v, **options)
            assert torch.equal(F.scaled_dot_product_attention(q, k, v, **passed), fast) and not torch.equal(fast, exact)
        assert volta_fa.sdpa_stats(reset=True) == {"ran": 3, "traced": 0, "fast": 3, "fell_back": {}}
        # what it has no form for
        bias = mask.to(q.dtype)
        assert torch.equal(F.scaled_dot_product_attention(q, k, v, attn_mask=bias), fast_and_exact(q, k, v, attn_mask=bias)[1])
        leaf = q.clone().requires_grad_()
        out = F.scaled_dot_product_attention(leaf, k, v)
        assert torch.equal(out, fast_and_exact(q, k, v)[1]) and torch.autograd.grad(out.sum(), leaf)
        F.scaled_dot_product_attention(q, k, v, dropout_p=0.5)
        F.scaled_dot_product_attention(q.float(), k.float(), v.float())
        assert volta_fa.sdpa_stats(reset=True) == {"ran": 4, "traced": 0, "fell_back": {}}
        with torch.no_grad():
            assert torch.equal(F.scaled_dot_product_attention(leaf, k, v), fast_and_exact(q, k, v)[0])


@on("cpu-fp16")
def test_compiled_programs_follow_the_precision(backend):
    torch.compiler.reset()
    compiled = torch.compile(F.scaled_dot_product_attention, fullgraph=True, backend="aot_eager")
    q, k, v = qkv(backend, 2, 2, 40, 64)
    fast, exact = fast_and_exact(q, k, v)
    for precision, expected in (("fast", fast), ("exact", exact), ("fast", fast)):
        with volta_fa.sdpa_enabled("cpu", precision=precision):
            assert torch.equal(compiled(q, k, v), expected)
    with volta_fa.sdpa_enabled("cpu", precision="fast"):
        leaf = q.clone().requires_grad_()
        assert torch.equal(compiled(leaf, k, v), exact)
    torch.compiler.reset()


def test_the_last_block_decides_about_the_precision():
    q = torch.randn(1, 1, 40, 64).half()
    attention, (fast, exact) = F.scaled_dot_product_attention, fast_and_exact(q, q, q)
    with pytest.raises(ValueError, match="enable_sdpa: precision: got 'int8', expected 'exact' or 'fast'"):
        volta_fa.enable_sdpa("cpu", precision="int8")
    with pytest.raises(ValueError, match="sdpa_enabled: precision: got 'int8'"), volta_fa.sdpa_enabled("cpu", precision="int8"):
        pass
    volta_fa.enable_sdpa("cpu", precision="fast")
    assert torch.equal(attention(q, q, q), fast)
    with volta_fa.sdpa_enabled("cpu"):
        assert torch.equal(attention(q, q, q), exact)
    assert torch.equal(attention(q, q, q), fast)
    volta_fa.enable_sdpa("cpu")  # the default stays exact
    assert torch.equal(attention(q, q, q), exact)
    volta_fa.disable_sdpa()


def test_threads():
    """One switch for all threads, flipped and used by many at once; the counters lose nothing."""
    tensors = [torch.randn(1, 1, 4, 8) for _ in range(3)]
    expected = F.scaled_dot_product_attention(*tensors)
    calls, errors = 40, []

    def work(toggle):
        try:
            for _ in range(calls):
                if toggle:
                    with volta_fa.sdpa_enabled("cpu"):
                        out = F.scaled_dot_product_attention(*tensors)
                else:
                    out = F.scaled_dot_product_attention(*tensors)
                torch.testing.assert_close(out, expected)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(i % 2 == 0,)) for i in range(6)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not errors
    assert not is_on()
    assert 3 * calls <= volta_fa.sdpa_stats()["ran"] <= 6 * calls


def test_other_devices_are_refused():
    with pytest.raises(ValueError, match="got meta, expected a CUDA device"):
        volta_fa.enable_sdpa("meta")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu():
    with pytest.raises(RuntimeError, match="this machine has no CUDA device.*cpu"):
        volta_fa.enable_sdpa()
    with pytest.raises(RuntimeError, match="volta_fa.sdpa_enabled: .*no CUDA device"), volta_fa.sdpa_enabled(force=True):
        pass
    with pytest.raises(ValueError, match="cuda:3, expected one of this machine.s 0 CUDA devices"):
        volta_fa.enable_sdpa("cuda:3")
    assert not is_on()


MACHINES = {
    # capabilities, force -> devices that are switched on, or None: an error
    "V100": ([(7, 0)], False, [0]),
    "Xavier": ([(7, 2)], False, [0]),
    "H200": ([(9, 0)], False, None),
    "H200 forced": ([(9, 0)], True, [0]),
    "P100 forced": ([(6, 0)], True, None),
    "mixed": ([(9, 0), (7, 0), (6, 1)], False, [1]),
    "mixed forced": ([(9, 0), (7, 0), (6, 1)], True, [0, 1]),
}


@pytest.mark.parametrize("machine", MACHINES)
def test_which_devices(machine, monkeypatch):
    capabilities, force, expected = MACHINES[machine]
    asked = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(capabilities))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda i: capabilities[i])
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda i: f"device {i}")
    monkeypatch.setattr("volta_fa.integrations.devices.info", lambda: {"families": [{"name": "sm_70", "sm": 70, "variants": 1}]})
    monkeypatch.setattr("volta_fa.integrations.sdpa._apply", lambda request, *others: asked.append(sorted(request.devices.cuda)))
    if expected is None:
        with pytest.raises(RuntimeError, match=r"kernels for sm_70, and cuda:0 is a device 0, sm_\d+"):
            volta_fa.enable_sdpa(force=force)
    else:
        volta_fa.enable_sdpa(force=force)
        assert asked == [expected]
    volta_fa.disable_sdpa()


def test_a_refused_device_changes_nothing(monkeypatch):
    """The library has room for 64 devices."""
    sdpa = volta_fa.integrations.sdpa
    monkeypatch.setattr(sdpa, "devices_of", lambda op, device, force: sdpa.Devices(False, frozenset([64])))
    with pytest.raises(ValueError, match="got CUDA device 64, expected one from 0 to 63"):
        volta_fa.enable_sdpa()
    with pytest.raises(ValueError, match="got CUDA device 64"), volta_fa.sdpa_enabled():
        pass
    monkeypatch.undo()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        volta_fa.enable_sdpa("cpu")
    assert is_on()
    volta_fa.disable_sdpa()
    assert not is_on()


# ---- the environment variable ----------------------------------------------------------------------------------------

LOADED = {
    "package": "import volta_fa",
    "library": "torch.ops.load_library(sys.argv[1])",
    "library, then package": "torch.ops.load_library(sys.argv[1]); import volta_fa",
}
VALUES = [
    # how it is loaded, the variable, calls that are ours on the CPU
    *(("package", value, int(value == "cpu")) for value in ("cpu", "0", "1", "force", "maybe")),
    *(("library", value, int(value == "cpu")) for value in ("cpu", "", "maybe")),
    *(("library, then package", value, int(value == "cpu")) for value in ("cpu", "1")),
]


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.parametrize("loaded,value,ran", VALUES)
def test_environment_variable(loaded, value, ran, tmp_path):
    """When the library is loaded, with the Python package or without; it fails nothing, and does not start CUDA."""
    torch.jit.script(causal).save(str(tmp_path / "program.pt"))
    code = f"""
        import sys, torch
        {LOADED[loaded]}
        program = torch.jit.load(sys.argv[2])
        t = torch.randn(1, 1, 4, 8)
        program(t, t, t)
        print(torch.ops.volta_fa._sdpa_stats()["ran"], torch.cuda.is_initialized())
        if "package" in "{loaded}":
            from torch.compiler import config
            print(config.cache_key_tag.partition("sdpa.")[0])
            volta_fa.disable_sdpa()  # it counts as enable_sdpa
            print(config.cache_key_tag)
            program(t, t, t)
            print(volta_fa.sdpa_stats()["ran"])
    """
    result = run_process(code, LIBRARY, tmp_path / "program.pt", VOLTA_FA_ENABLE_SDPA=value, CUDA_VISIBLE_DEVICES="")
    asked = value in ("1", "force", "cpu")
    expected = [f"{ran} False"] + (["volta_fa." if asked else "", "", str(ran)] if "package" in loaded else [])
    assert result.stdout.split("\n")[:-1] == expected
    assert ("VOLTA_FA_ENABLE_SDPA: got 'maybe', expected 1, force, cpu or 0" in result.stderr) == (value == "maybe")
    no_driver = "package" in loaded and value in ("1", "force") and driver_cuda() is None
    assert result.stderr.count("VOLTA_FA_ENABLE_SDPA: no GPU runs it: no CUDA driver on this machine") == no_driver
    assert value == "maybe" or no_driver or "VOLTA_FA_ENABLE_SDPA" not in result.stderr


@NEEDS_FORK
@pytest.mark.parametrize("how", ["1", "force", "cpu", "enable_sdpa"])
def test_fork(how):
    """Neither the variable nor switching on for the CPU uses CUDA, which a forked process could then not use."""
    code = """
        import os, sys, torch, volta_fa
        if sys.argv[1] == "enable_sdpa":
            volta_fa.enable_sdpa("cpu")
        t = torch.randn(1, 1, 4, 8)
        torch.nn.functional.scaled_dot_product_attention(t, t, t)
        if os.fork() == 0:
            torch.nn.functional.scaled_dot_product_attention(t, t, t)
            print(torch.cuda._is_in_bad_fork(), volta_fa.sdpa_stats()["ran"], flush=True)
            os._exit(0)
        os.wait()
    """
    environment = {} if how == "enable_sdpa" else {"VOLTA_FA_ENABLE_SDPA": how}
    assert run_python(code, how, **environment) == f"False {2 if how in ('cpu', 'enable_sdpa') else 0}"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_environment_variable_where_a_device_cannot_be_asked():
    """Its first call decides on a device, and says once why it stays off. Such tensors exist without a GPU, for shapes only."""
    code = """
        import torch, volta_fa
        from torch._subclasses.fake_tensor import FakeTensorMode
        with FakeTensorMode():
            t = torch.empty(1, 1, 4, 8, device="cuda:1", dtype=torch.float16)
            for _ in range(2):
                print(torch.nn.functional.scaled_dot_product_attention(t, t, t).shape)
                with volta_fa.sdpa_enabled("cpu"):
                    pass
        print(volta_fa.sdpa_stats())
    """
    result = run_process(code, VOLTA_FA_ENABLE_SDPA="1")
    assert result.stdout.splitlines()[-1] == "{'ran': 0, 'traced': 0, 'fell_back': {}}"
    assert result.stderr.count("VOLTA_FA_ENABLE_SDPA: cuda:1 keeps PyTorch's attention") == 1
    assert "no CUDA driver" in result.stderr


@NEEDS_FORK
@pytest.mark.parametrize("loaded", LOADED)
@on("cuda")
def test_environment_variable_on_cuda(backend, loaded):
    """CUDA is not started before the first tensor; a process forked before that uses the GPU too."""
    code = f"""
        import os, sys, torch
        {LOADED[loaded]}
        def say(what):  # at once: print may write the end of the line by itself
            os.write(1, f"{{what}}\\n".encode())
        say(torch.cuda.is_initialized())
        child = os.fork()
        t = torch.randn(1, 2, 40, 64, device="cuda", dtype=torch.float16, requires_grad=True)
        torch.nn.functional.scaled_dot_product_attention(t, t, t).sum().backward()
        say(torch.ops.volta_fa._sdpa_stats()["ran"])
        if child == 0:
            os._exit(0)
        os.wait()
    """
    forced = run_process(code, LIBRARY, VOLTA_FA_ENABLE_SDPA="force")
    assert forced.stdout.split() == ["False", "1", "1"] and "VOLTA_FA_ENABLE_SDPA" not in forced.stderr
    suitable = run_process(code, LIBRARY, VOLTA_FA_ENABLE_SDPA="1")
    made_for = torch.cuda.get_device_capability() in ((7, 0), (7, 2))
    assert suitable.stdout.split() == ["False", *["1" if made_for else "0"] * 2]
    assert ("cuda:0 keeps PyTorch's attention: it is of sm_" in suitable.stderr) != made_for


def test_modules_are_not_touched():
    """Nothing of the switch travels with a module: it copies as before."""
    with enabled():
        module = copy.deepcopy(FakeMultihead())
        assert_ours(lambda: module(torch.randn(2, 5, 32, requires_grad=True)).sum().backward())
