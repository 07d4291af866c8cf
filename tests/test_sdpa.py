"""Tests of scaled_dot_product_attention run by volta_fa (`enabled()` switches it on): results, and calls that fall back to PyTorch.

`sdpa_stats()` counts calls that volta_fa `ran`, `traced` into a compiled graph, or that `fell_back`, by reason. Of sdpa_helpers.py:
`assert_ours(f)` checks that f() runs the ops of volta_fa alone, `qkv` draws q, k and v, `train` returns out and their gradients of
sum(out^2), `leaves` copies tensors that then require a gradient, `unfused` makes PyTorch compute attention by single operations,
`selective` runs a function under selective checkpointing. A backend is the CPU, the simulator (`sim`) or a GPU (`cuda`), with a dtype;
`backend.kernels`: not the CPU."""

from contextlib import nullcontext, suppress

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import sdpa_kernel
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.flop_counter import FlopCounterMode

import volta_fa
from conftest import on, run_python
from sdpa_helpers import CUDNN, EFFICIENT, FLASH, MATH, assert_ours, enabled, leaves, qkv, selective, train, unfused
from sdpa_helpers import switched_off as switched_off  # a fixture of every test

sdpa = F.scaled_dot_product_attention  # PyTorch's function, which runs volta_fa while the switch is on

# ---- right answers -------------------------------------------------------------------------------------------------

#: seqlen_q, seqlen_k, nheads, nheads_k, headdim, headdim_v, options.
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
#: Added to the allowed error: with one key PyTorch's gradients of q and k are exactly 0, and volta_fa's are rounding errors.
FLOOR = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 2e-4, torch.bfloat16: 2e-3}


def check(backend, q, k, v, attn_mask=None, **options):
    """Checks that errors against fp64 are at most 2 (out) or 3 (gradients) times those of PyTorch's unfused attention."""
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
def test_problems_against_math(backend, problem):
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
    torch.testing.assert_close(found, expected, rtol=2e-3, atol=2e-3)  # two eps of fp16: a GPU adds dq by atomics
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


def additive(make, value=float("-inf")):
    """Returns a function for the additive form of a bool mask: `value` where it hides a key, else 0."""
    return lambda b, dtype: torch.zeros((), dtype=dtype, device=b.device).masked_fill(~make(b, dtype), value)


def numbers(*shape):
    """A mask of random numbers, which are added to scores."""
    return lambda b, dtype: b.randn(*shape).to(dtype)


#: mask(backend, q's dtype) for 2 batch entries of 9 queries and 33 keys; headdim; nheads and nheads_k, if they are not 4.
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
    "grouped heads": (numbers(6, 9, 33), 16, 6, 2),
    "grouped heads, odd headdim": (numbers(6, 9, 33), 13, 6, 2),
    "fp32": (lambda b, dtype: b.randn(4, 9, 33).float(), 16),
    "strided": (lambda b, dtype: b.randn(33, 9, 4).to(dtype).permute(2, 1, 0), 16),
    "misaligned": (lambda b, dtype: b.randn(9, 36).to(dtype)[:, 3:], 16),
    "-inf": (additive(hidden_padding), 16),
    "-inf, whole rows": (additive(hiding_rows([8])), 16),
    "lowest number": (lambda b, dtype: additive(hidden_padding, torch.finfo(dtype).min)(b, dtype), 16),
}


@pytest.mark.parametrize("mask", MASKS)
@on("cpu-fp32", "cpu-fp64", "cpu-bf16", "cpu-fp16", "sim", "cuda")
def test_masks_against_math(backend, mask):
    make, headdim, *heads = MASKS[mask]
    nheads, nheads_k = heads or (4, 4)
    q, k, v = backend.randn(2, nheads, 9, headdim), backend.randn(2, nheads_k, 33, headdim), backend.randn(2, nheads_k, 33, headdim)
    check(backend, q, k, v, make(backend, q.dtype), enable_gqa=nheads != nheads_k)


@pytest.mark.parametrize("shape", [(9, 33), (1, 4, 9, 33), (2, 1, 1, 33), (4, 9, 1), (2, 4, 9, 33)], ids=str)
@pytest.mark.parametrize("alone", [False, True], ids=["", "alone"])
@on("cpu-fp32", "cpu-fp64", "cuda")
def test_gradient_of_a_mask(backend, shape, alone):
    """A learned bias, with or without gradients of q, k and v."""
    q, k, v, mask = (backend.randn(*sizes) for sizes in ((2, 4, 9, 16), (2, 4, 33, 16), (2, 4, 33, 16), shape))

    def step(q, k, v, mask):
        inputs = leaves(mask) if alone else leaves(q, k, v, mask)
        tensors = [q, k, v, *inputs] if alone else inputs
        return torch.autograd.grad(sdpa(*tensors).float().square().sum(), inputs)

    with unfused():
        exact, theirs = step(q.double(), k.double(), v.double(), mask.double()), step(q, k, v, mask)
    with enabled(backend):
        assert_ours(lambda: step(q, k, v, mask))
        ours = step(q, k, v, mask)
    assert ours[-1].shape == mask.shape and ours[-1].dtype == mask.dtype
    # The gradient of one value for all keys of a row is 0 up to noise, because backward subtracts sum(out * dout) with the rounded out.
    noise = 0.0
    if shape[-1] == 1:
        out = sdpa(q.double(), k.double(), v.double(), mask.double())
        of_rows = 4 * (2 * out * (out.to(q.dtype) - out)).norm(dim=-1, keepdim=True)  # as reference.delta_noise; dout is 2 * out
        noise = of_rows.square().sum_to_size(shape).sqrt().max()
    for e, t, o in zip(exact, theirs, ours):
        allowed = 3 * (t.double() - e).abs().max() + FLOOR[q.dtype] + (noise if o is ours[-1] else 0.0)
        assert (o.double() - e).abs().max() <= allowed


@on("cpu-fp32", "sim", "cuda")
def test_dropout(backend):
    """PyTorch's seed determines what dropout drops, and backward drops the same elements as forward."""
    q, k = backend.randn(2, 2, 16, 16), backend.randn(2, 2, 16, 16)
    # v is the identity matrix, so out is the probabilities after dropout
    v = torch.eye(16, device=q.device, dtype=q.dtype).expand(2, 2, 16, 16)
    dout = backend.randn(2, 2, 16, 16)

    def step(seed):
        torch.manual_seed(seed)
        inputs = leaves(q, k, v)
        out = sdpa(*inputs, dropout_p=0.25)
        return out.detach(), torch.autograd.grad(out, inputs[2], dout)[0]

    undropped = sdpa(q, k, v)
    with enabled(backend):
        assert_ours(lambda: step(0))
        (p, dv), (again, _), (other, _) = step(0), step(0), step(1)
    assert torch.equal(p, again) and not torch.equal(p, other)
    kept = p != 0
    assert 0.6 < kept.float().mean() < 0.9
    torch.testing.assert_close(p[kept], undropped[kept] / 0.75, rtol=5e-3, atol=1e-3)
    torch.testing.assert_close(dv, p.transpose(2, 3) @ dout, rtol=1e-2, atol=1e-2 if backend.kernels else 1e-5)


@on("cpu-fp32", "cuda")
def test_dropout_with_a_mask_and_an_odd_headdim(backend):
    """out is bitwise that of the op on tensors padded to headdim 16 with the same seed. Other tests check the op."""
    q, k, v, mask = backend.randn(2, 4, 9, 13), backend.randn(2, 4, 33, 13), backend.randn(2, 4, 33, 13), backend.randn(9, 33)
    padded = [F.pad(t, (0, 3)).transpose(1, 2) for t in (q, k, v)]
    torch.manual_seed(3)
    expected = torch.ops.volta_fa.fwd(*padded, attn_bias=mask[None, None], dropout_p=0.3, softmax_scale=13**-0.5)[0]
    with enabled(backend):
        torch.manual_seed(3)
        assert torch.equal(sdpa(q, k, v, mask, dropout_p=0.3), expected.transpose(1, 2)[..., :13])


@on("cpu-fp32", "cuda")
def test_empty_tensors(backend):
    for batch, seqlen_q, seqlen_k in ((2, 5, 0), (0, 5, 6), (2, 0, 6)):
        q, kv = backend.randn(batch, 2, seqlen_q, 8), backend.randn(batch, 2, seqlen_k, 8)
        # on the CPU: PyTorch's CUDA op returns None for an empty batch that needs a gradient (torch 2.11)
        expected = train(*(t.cpu().float() for t in (q, kv, kv)))
        with enabled(backend):
            for a, b in zip(train(q, kv, kv), expected):
                torch.testing.assert_close(a, b.to(a.device, a.dtype))


# ---- fallbacks -------------------------------------------------------------------------------------------------------

#: Reason in sdpa_stats(), and calls that PyTorch must run for this reason.
FALLBACKS = {
    # PyTorch's fused CPU implementation accepts both, its others refuse
    "attn_mask": {"and is_causal": lambda q, k, v: sdpa(q, k, v, torch.ones(9, 9).tril(-1) + 0.5, is_causal=True)},
    "dropout": {"of everything": lambda q, k, v: sdpa(q, k, v, dropout_p=1.0)},
    "shape": {
        "rank 3": lambda q, k, v: sdpa(q[0], k[0], v[0]),
        "broadcast heads": lambda q, k, v: sdpa(q, k[:, :1], v[:, :1]),
        "broadcast batch": lambda q, k, v: sdpa(q, k[:1], v[:1]),
    },
    "headdim": {"528": lambda q, k, v: sdpa(*(t.repeat(1, 1, 1, 33) for t in (q, k, v)))},
    "scale": {str(s): lambda q, k, v, s=s: sdpa(q, k, v, scale=s) for s in (float("inf"), float("nan"), 1e39)},
}


@pytest.mark.parametrize("reason,f", [pytest.param(r, f, id=f"{r} {n}".strip()) for r, g in FALLBACKS.items() for n, f in g.items()])
@on("cpu-fp32")
def test_fallback(backend, reason, f):
    """A call that volta_fa does not support gives PyTorch's bits, and is counted once with its reason."""
    tensors = qkv(backend)
    torch.manual_seed(0)
    expected = train(*tensors, attention=f)
    with enabled():
        torch.manual_seed(0)
        found = train(*tensors, attention=f)
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
    assert volta_fa.sdpa_stats() == {"ran": 0, "traced": 0, "fell_back": {reason: 1}}


@on("cuda")
def test_dtypes_and_determinism_on_cuda(backend):
    """bf16 and fp32 run, fp64 falls back. With PyTorch's deterministic algorithms two runs are bitwise identical."""
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
def test_sdpa_kernel_decides(backend, allowed):
    """volta_fa runs a call only if sdpa_kernel allows what it replaces: flash; on CUDA also memory-efficient attention."""
    tensors = qkv(backend)
    ours = FLASH in allowed or (EFFICIENT in allowed and backend.device == "cuda")
    with enabled(backend), sdpa_kernel(allowed):
        train(*tensors)
    assert volta_fa.sdpa_stats() == {"ran": int(ours), "traced": 0, "fell_back": {} if ours else {"sdpa_kernel": 1}}


@on("cpu-fp32")
def test_nested_tensors_fall_back(backend):
    nested = torch.nested.nested_tensor([torch.randn(2, 5, 16), torch.randn(2, 7, 16)])
    expected = sdpa(nested, nested, nested)
    with enabled():
        found = sdpa(nested, nested, nested)
    assert all(map(torch.equal, found.unbind(), expected.unbind()))
    assert volta_fa.sdpa_stats()["fell_back"] == {"layout": 1}


@on("cpu-fp32")
def test_functorch_and_forward_mode_fall_back(backend):
    q, k, v = qkv(backend)
    expected = train(q, k, v)[1]
    with enabled():
        found = torch.func.grad(lambda t: sdpa(t, k, v).square().sum())(q)
        torch.testing.assert_close(found, expected)
        # without a gradient, vmap has taken the op apart before our kernel is reached
        found = torch.vmap(sdpa)(*(t[None] for t in (q, k, v)))
        torch.testing.assert_close(found[0], sdpa(q, k, v))
        with torch.autograd.forward_ad.dual_level(), sdpa_kernel([MATH, FLASH]):
            dual = torch.autograd.forward_ad.make_dual(q, torch.ones_like(q))
            with suppress(NotImplementedError):  # PyTorch's fused attention has no forward mode either
                sdpa(dual, k, v)
    assert volta_fa.sdpa_stats() == {"ran": 1, "traced": 0, "fell_back": {"forward_mode": 1, "functorch": 1}}


def counted(f, *inputs):
    """Runs f under FlopCounterMode, a dispatch mode."""
    with FlopCounterMode(display=False):
        return f(*inputs)


@pytest.mark.parametrize("under", [lambda f, *t: f(*t), selective, counted], ids=["", "selective checkpointing", "FlopCounterMode"])
@on("cpu-fp32")
def test_subclasses_fall_back(backend, under):
    """Calls on an unknown tensor subclass fall back, also while a dispatch mode is active that does not trace."""
    q, k, v = (TwoTensor(t, t.clone()) for t in qkv(backend))
    with enabled():
        assert isinstance(under(sdpa, q, k, v), TwoTensor)
        assert volta_fa.sdpa_stats() == {"ran": 0, "traced": 0, "fell_back": {"subclass": 1}}


@pytest.mark.parametrize("under", [selective, counted], ids=["selective checkpointing", "FlopCounterMode"])
@on("cpu-fp32")
def test_calls_under_dispatch_modes_are_not_traced(backend, under):
    tensors = leaves(*qkv(backend))
    with enabled():
        out = under(sdpa, *tensors)
        assert volta_fa.sdpa_stats(reset=True) == {"ran": 1, "traced": 0, "fell_back": {}}
        out.sum().backward()
        assert volta_fa.sdpa_stats() == {"ran": int(under is selective), "traced": 0, "fell_back": {}}


def test_dtensor():
    """DTensors, for which the ops have sharding rules, run through volta_fa: eager, under a mode, compiled. TwoTensors fall back."""
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
    # gloo of some torch releases prints that it is connected
    lines = [line for line in run_python(code, GLOO_SOCKET_IFNAME="lo").splitlines() if not line.startswith("[Gloo]")]
    assert lines == [
        *["DTensor True {'ran': True, 'traced': False, 'fell_back': False}"] * 2,
        "DTensor True {'ran': False, 'traced': True, 'fell_back': False}",
        "TwoTensor True {'ran': False, 'traced': False, 'fell_back': True}",
    ]


def with_mask(*shape, dtype=torch.float32):
    return lambda q, k, v: sdpa(q, k, v, torch.ones(*shape, dtype=dtype))


WRONG = {
    "mask shape": (with_mask(5, 3, dtype=torch.bool), "size|shape|expand|match"),
    "mask that has too many heads": (with_mask(3, 9, 9), "shape|expand|match"),
    "mask of rank 1": (with_mask(9), "[Dd]imension"),
    "mask of rank 5": (with_mask(1, 1, 1, 9, 9), "shape|match"),
    "mask dtype": (with_mask(9, 9, dtype=torch.int64), "attn_mask dtype"),
    "mask in another precision": (with_mask(9, 9, dtype=torch.float16), "attn_mask dtype"),
    "dropout_p": (lambda q, k, v: sdpa(q, k, v, dropout_p=1.5), "dropout probability"),
    "dtypes": (lambda q, k, v: sdpa(q, k.half(), v), "same dtype"),
    "devices": (lambda q, k, v: sdpa(q, k.to("meta"), v.to("meta")), "same device"),
    "heads": (lambda q, k, v: sdpa(q[:, :1].repeat(1, 3, 1, 1), k, v), "size|match|broadcast"),
    "headdims": (lambda q, k, v: sdpa(q, k[..., :8], v), "size|shape|must match|mat"),
}


@pytest.mark.parametrize("what", WRONG)
@on("cpu-fp32")
def test_wrong_arguments_get_pytorchs_errors(backend, what):
    f, message = WRONG[what]
    tensors = qkv(backend)
    errors = []
    for switch in (nullcontext(), enabled()):
        with pytest.raises((RuntimeError, IndexError), match=message) as raised, switch:
            f(*tensors)
        errors.append((raised.type, str(raised.value)))
    assert errors[0] == errors[1]
    assert volta_fa.sdpa_stats()["ran"] == 0
