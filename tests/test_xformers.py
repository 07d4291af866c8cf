"""Tests of xformers' memory_efficient_attention run by volta_fa (enable_xformers), in fp64 on the CPU or fp16 on a GPU.

xformers' masks are objects ("biases"). Each is compared with its own dense form (`materialize`). Calls that volta_fa does not support run
xformers' own function. The test environment lacks xformers: `pip install --no-deps xformers==0.0.35` with torch 2.10 or newer."""

import dataclasses
import sys
import warnings

import pytest
import torch

import volta_fa
from conftest import HAS_CUDA

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # its compiled parts may not fit this torch; none is used
    fmha = pytest.importorskip("xformers.ops.fmha", reason="xformers is not installed")

from xformers.ops import memory_efficient_attention
from xformers.ops.fmha import attn_bias as biases

HEADS, HEADDIM, HEADDIM_V = 4, 16, 24
#: For fp64, because gradients depend on softmax_lse, which is fp32.
TOLERANCE = {"rtol": 0, "atol": 2e-6}
DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.cuda, pytest.mark.skipif(not HAS_CUDA, reason="no CUDA device")])]


@pytest.fixture(autouse=True)
def enabled():
    """Makes xformers run volta_fa on the CPU during each test."""
    volta_fa.xformers_stats(reset=True)
    volta_fa.enable_xformers("cpu")
    yield
    volta_fa.disable_xformers()


def random(*shape, **options):
    return torch.randn(*shape, dtype=torch.float64, **options)


def to_device(bias, device):
    """Moves a bias, because xformers puts the lengths of packed sequences on the GPU if there is one."""
    return bias if bias is None or is_tensor(bias) else bias.to(torch.device(device))


def dense_attention(q, k, v, bias, scale=None):
    """Attention of (batch, seqlen, heads, headdim) tensors with a bias that broadcasts to (batch, heads, seqlen_q, seqlen_k)."""
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    return torch.einsum("bhqk,bkhd->bqhd", (scores if bias is None else scores + bias).softmax(-1), v)


def is_tensor(bias):
    return type(bias) is torch.Tensor  # some releases have biases that are subclasses


def materialize(bias, q, k):
    if bias is None or is_tensor(bias):
        return bias
    return bias.materialize((q.shape[0], q.shape[2], q.shape[1], k.shape[1]), dtype=torch.float64)


def compare(q, k, v, bias, device="cpu"):
    """Compares out and the gradients of all inputs that require one. On a GPU the errors are at most 2 and 3 times eager fp16's."""
    bias = to_device(bias, "cpu")
    dense = materialize(bias, q, k)
    arguments = [t for t in (q, k, v, bias) if is_tensor(t)]
    wanted = [t for t in arguments if t.requires_grad]
    expected = dense_attention(q, k, v, dense)
    dout = torch.randn_like(expected)
    expected = [expected, *(torch.autograd.grad(expected, wanted, dout) if wanted else ())]

    def run(attention, bias):
        def there(t):
            return t.detach().half().cuda().requires_grad_(t.requires_grad) if device == "cuda" else t

        copies = [there(t) for t in arguments]
        out = attention(*copies[:3], copies[3] if len(copies) > 3 else bias)
        inputs = [t for t in copies if t.requires_grad]
        return [t.cpu().double() for t in (out, *(torch.autograd.grad(out, inputs, dout.to(out)) if inputs else ()))]

    if device == "cuda":
        volta_fa.enable_xformers("cuda", force=True)
    found = run(memory_efficient_attention, to_device(bias, device))
    assert volta_fa.xformers_stats() == {"ran": 1, "fell_back": {}}
    if device == "cpu":
        torch.testing.assert_close(found, expected, **TOLERANCE)
        return
    eager = run(dense_attention, None if dense is None else dense.half().cuda())
    for limit, ours, native, theirs in zip([2.0] + [3.0] * 4, found, eager, expected):
        assert (ours - theirs).abs().max() <= limit * (native - theirs).abs().max() + 1e-4


def inputs(seqlen_q, seqlen_k, batch=2, grad=True):
    shapes = (seqlen_q, HEADS, HEADDIM), (seqlen_k, HEADS, HEADDIM), (seqlen_k, HEADS, HEADDIM_V)
    return tuple(random(batch, *shape, requires_grad=grad) for shape in shapes)


#: Biases of (batch, seqlen) tensors, for numbers of queries and keys.
WHOLE = {
    "none": lambda q, k: None,
    "tensor": lambda q, k: random(2, HEADS, q, k),
    "tensor with gradient": lambda q, k: random(2, HEADS, q, k, requires_grad=True),
    "expanded tensor": lambda q, k: random(2, 1, 1, k).expand(2, HEADS, q, k),
    "top-left": lambda q, k: biases.LowerTriangularMask(),
    "top-left with tensor": lambda q, k: biases.LowerTriangularMask().add_bias(random(2, HEADS, q, k)),
    "bottom-right": lambda q, k: biases.LowerTriangularFromBottomRightMask(),
    "bottom-right window": lambda q, k: biases.LowerTriangularFromBottomRightMask().make_local_attention(3),
    "local": lambda q, k: biases.LocalAttentionFromBottomRightMask(2, 1),
}


@pytest.mark.parametrize("seqlen_q, seqlen_k", [(9, 9), (6, 11), (11, 6)])
@pytest.mark.parametrize("kind", WHOLE)
@pytest.mark.parametrize("device", DEVICES)
def test_biases_of_whole_batches(kind, seqlen_q, seqlen_k, device):
    if seqlen_q > seqlen_k and ("bottom-right" in kind or kind == "local"):
        pytest.skip("some queries see no key, and the dense form is NaN there")
    if kind == "top-left with tensor" and device == "cuda":
        pytest.skip("its tensor would stay in fp64")
    compare(*inputs(seqlen_q, seqlen_k), WHOLE[kind](seqlen_q, seqlen_k), device)


#: Lengths of three packed sequences, and biases of these: queries, bias, keys (padded or gappy: rows in all). A padded bias has 7 rows of
#: keys per sequence, a gappy one the row where each sequence's keys begin. A causal window is one number, which counts the query's own key;
#: a local one has two, for keys before and after it.
Q, SHORTER, LONGER, MIXED = [3, 6, 1], [2, 3, 1], [5, 6, 4], [5, 4, 1]
Q2, ONE_LESS = [3, 6, 2], [2, 5, 1]
PACKED = {
    "blocks": (Q, lambda: biases.BlockDiagonalMask.from_seqlens(Q, MIXED), MIXED),
    "causal": (Q, lambda: biases.BlockDiagonalMask.from_seqlens(Q).make_causal(), Q),
    "causal, longer keys": (Q, lambda: biases.BlockDiagonalCausalMask.from_seqlens(Q, LONGER), LONGER),
    "causal, shorter keys": (Q, lambda: biases.BlockDiagonalCausalMask.from_seqlens(Q, SHORTER), SHORTER),
    "causal, mixed": (Q, lambda: biases.BlockDiagonalCausalMask.from_seqlens(Q, MIXED), MIXED),
    "causal, one key less": (Q2, lambda: biases.BlockDiagonalCausalMask.from_seqlens(Q2, ONE_LESS), ONE_LESS),
    "causal window": (Q, lambda: biases.BlockDiagonalMask.from_seqlens(Q).make_local_attention(2), Q),
    "causal window, longer keys": (Q, lambda: biases.BlockDiagonalMask.from_seqlens(Q, LONGER).make_local_attention(2), LONGER),
    "causal window, mixed": (Q, lambda: biases.BlockDiagonalMask.from_seqlens(Q, MIXED).make_local_attention(3), MIXED),
    "causal window, one key less": (Q2, lambda: biases.BlockDiagonalMask.from_seqlens(Q2, ONE_LESS).make_local_attention(3), ONE_LESS),
    "bottom-right": (Q, lambda: biases.BlockDiagonalMask.from_seqlens(Q, LONGER).make_causal_from_bottomright(), LONGER),
    "bottom-right window": (Q, lambda: biases.BlockDiagonalMask.from_seqlens(Q, LONGER).make_local_attention_from_bottomright(2), LONGER),
    "padded": (Q, lambda: biases.BlockDiagonalPaddedKeysMask.from_seqlens(Q, 7, LONGER), [21]),
    "padded causal": (Q, lambda: biases.BlockDiagonalCausalWithOffsetPaddedKeysMask.from_seqlens(Q, 7, LONGER), [21]),
    "padded causal window": (Q, lambda: biases.BlockDiagonalCausalLocalAttentionPaddedKeysMask.from_seqlens_local(Q, 7, LONGER, 2), [21]),
    "padded local": (Q, lambda: biases.BlockDiagonalPaddedKeysMask.from_seqlens(Q, 7, LONGER).make_local_attention(2, 1), [21]),
    "gappy": (Q, lambda: biases.BlockDiagonalGappyKeysMask.from_seqlens(Q, [2, 8, 14, 20], LONGER), [20]),
    "gappy, overlapping": (Q, lambda: biases.BlockDiagonalGappyKeysMask.from_seqlens(Q, [9, 0, 3, 20], LONGER), [20]),
    "gappy causal": (Q, lambda: biases.BlockDiagonalCausalWithOffsetGappyKeysMask.from_seqlens(Q, [0, 8, 14, 20], LONGER), [20]),
}


@pytest.mark.parametrize("kind", PACKED)
@pytest.mark.parametrize("device", DEVICES)
def test_biases_of_packed_sequences(kind, device):
    seqlens_q, make, seqlens_k = PACKED[kind]
    try:
        bias = make()
    except AttributeError as missing:
        pytest.skip(f"this xformers has no such bias: {missing}")
    compare(*inputs(sum(seqlens_q), sum(seqlens_k), batch=1), bias, device)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("device", DEVICES)
def test_pages(causal, device):
    """Three sequences of 20, 32 and 7 keys in a table of two pages each of 16 tokens."""
    kind = biases.PagedBlockDiagonalCausalWithOffsetPaddedKeysMask if causal else biases.PagedBlockDiagonalPaddedKeysMask
    tables = torch.tensor([[4, 1], [0, 2], [5, 3]], dtype=torch.int32)
    unpaged = biases.BlockDiagonalPaddedKeysMask.from_seqlens(Q, 32, [20, 32, 7])
    compare(*inputs(sum(Q), 6 * 16, batch=1, grad=False), to_device(unpaged, "cpu").make_paged(tables, 16, kind), device)


@pytest.mark.parametrize("bias", ["none", "top-left", "tensor", "packed"])
@pytest.mark.parametrize("expanded", [True, False])
def test_groups_of_heads(bias, expanded):
    """Tensors (batch, seqlen, groups, heads, headdim), with one KV head per group, expanded, or with a KV head per query head."""
    groups, heads, seqlen = 2, 3, 10
    q = random(1, seqlen, groups, heads, HEADDIM, requires_grad=True)
    shape = (1, seqlen, groups, 1 if expanded else heads, HEADDIM)
    k, v = random(*shape, requires_grad=True), random(*shape, requires_grad=True)
    bias = {
        "none": None,
        "top-left": biases.LowerTriangularMask(),
        "tensor": random(1, groups, heads, seqlen, seqlen),
        "packed": to_device(biases.BlockDiagonalMask.from_seqlens([7, 3]).make_causal(), "cpu"),
    }[bias]
    wide = [t.expand(1, seqlen, groups, heads, HEADDIM) for t in (k, v)]
    flat = [t.flatten(2, 3) for t in (q, *wide)]
    dense = bias.flatten(1, 2) if is_tensor(bias) else materialize(bias, *flat[:2])
    expected = dense_attention(*flat, dense).reshape(q.shape)
    out = memory_efficient_attention(q, *wide, attn_bias=bias)
    assert volta_fa.xformers_stats() == {"ran": 1, "fell_back": {}}
    torch.testing.assert_close(out, expected, **TOLERANCE)
    dout = torch.randn_like(out)
    torch.testing.assert_close(torch.autograd.grad(out, (q, k, v), dout), torch.autograd.grad(expected, (q, k, v), dout), **TOLERANCE)


def test_a_leaf_of_expanded_heads_has_a_gradient_for_each_head():
    q = random(1, 5, 2, 3, HEADDIM)
    k = random(1, 5, 2, 1, HEADDIM).expand_as(q).requires_grad_()
    v = random(1, 5, 2, 1, HEADDIM).expand_as(q)
    out, expected = memory_efficient_attention(q, k, v), dense_attention(*(t.flatten(2, 3) for t in (q, k, v)), None)
    dout = torch.randn_like(out)
    (found,), (wanted,) = torch.autograd.grad(out, k, dout), torch.autograd.grad(expected, k, dout.flatten(2, 3))
    torch.testing.assert_close(found, wanted, **TOLERANCE)


def test_three_dimensions_and_scale():
    q, k, v, bias = random(2, 5, 8), random(2, 7, 8), random(2, 7, 8), random(2, 5, 7)
    expected = dense_attention(*(t.unsqueeze(2) for t in (q, k, v)), bias.unsqueeze(1), scale=0.7).squeeze(2)
    torch.testing.assert_close(memory_efficient_attention(q, k, v, bias, scale=0.7), expected, **TOLERANCE)
    assert volta_fa.xformers_stats()["ran"] == 1


def test_dropout_keeps_the_mean_and_repeats_its_mask():
    q, k, v = inputs(16, 16)
    torch.manual_seed(0)
    out = memory_efficient_attention(q, k, torch.ones_like(v), p=0.25)
    assert 0.9 < out.mean() < 1.1 and out.std() > 0.05
    torch.manual_seed(0)
    assert torch.equal(out, memory_efficient_attention(q, k, torch.ones_like(v), p=0.25))


def test_autocast_changes_no_dtype():
    q, k, v = (t.detach().float() for t in inputs(5, 5))
    with torch.autocast("cpu", torch.bfloat16):
        assert memory_efficient_attention(q, k, v).dtype == torch.float32


@pytest.mark.parametrize("bias", [None, biases.LowerTriangularFromBottomRightMask()], ids=["none", "causal"])
def test_compiled_without_a_graph_break(bias):
    q, k, v = inputs(6, 6)
    torch._dynamo.reset()
    compiled = torch.compile(lambda q, k, v: memory_efficient_attention(q, k, v, bias), backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(q, k, v), dense_attention(q, k, v, materialize(bias, q, k)), **TOLERANCE)
    assert volta_fa.xformers_stats()["ran"] == 0  # counting would compile it again at each call


@pytest.fixture
def original(monkeypatch):
    """Replaces xformers' own function, which volta_fa calls where it does not support a call, by one that returns "original"."""
    monkeypatch.setattr("volta_fa.integrations.xformers._original", lambda inp, op: "original")


class OwnMask(biases.LowerTriangularFromBottomRightMask):
    pass


FALLS_BACK = {
    "attn_bias": lambda: (*inputs(5, 5, batch=1, grad=False), OwnMask()),
    "headdim": lambda: [random(1, 2, 1, 513)] * 3,
    "dtype": lambda: [torch.zeros(1, 2, 1, 8, dtype=torch.int32)] * 3,
    "arguments": lambda: [random(1, 2, 1, 8), random(1, 2, 1, 8), random(2, 2, 1, 8)],
}


@pytest.mark.parametrize("reason", [*FALLS_BACK, "dropout", "op"])
def test_other_calls_run_the_original_and_are_counted(reason, monkeypatch):
    asked = []
    monkeypatch.setattr("volta_fa.integrations.xformers._original", lambda inp, op: asked.append((inp, op)) or "original")
    arguments = FALLS_BACK.get(reason, lambda: inputs(3, 3))()
    options = {"dropout": {"p": 1.0}, "op": {"op": fmha.MemoryEfficientAttentionCutlassOp}}.get(reason, {})
    assert memory_efficient_attention(*arguments, **options) == "original"
    assert volta_fa.xformers_stats() == {"ran": 0, "fell_back": {reason: 1}}
    [(inp, op)] = asked
    assert inp.query is arguments[0] and inp.key is arguments[1] and op is options.get("op")


def test_pages_with_a_gradient_fall_back(original):
    tables = torch.tensor([[1], [0]], dtype=torch.int32)
    bias = biases.BlockDiagonalPaddedKeysMask.from_seqlens([2, 1], 16, [9, 16])
    paged = bias.make_paged(tables, 16, biases.PagedBlockDiagonalPaddedKeysMask)
    assert memory_efficient_attention(*inputs(3, 32, batch=1), paged) == "original"
    assert volta_fa.xformers_stats()["fell_back"] == {"gradient": 1}


def test_disable_restores_xformers():
    """Without enable_xformers, xformers finds no kernel of its own for fp64 on the CPU."""
    volta_fa.disable_xformers()
    assert fmha._memory_efficient_attention.__module__ == "xformers.ops.fmha"
    volta_fa.disable_xformers()  # nothing to do
    with pytest.raises(NotImplementedError, match="No operator found"):
        memory_efficient_attention(*inputs(3, 3))
    assert volta_fa.xformers_stats() == {"ran": 0, "fell_back": {}}
    volta_fa.enable_xformers("cpu")
    volta_fa.enable_xformers("cpu")  # again: the original is not lost
    volta_fa.disable_xformers()
    assert fmha._memory_efficient_attention.__module__ == "xformers.ops.fmha"


def around(function):
    """Returns another program's wrapper of xformers' function."""
    return lambda inp, op=None: function(inp, op)


def test_another_programs_function_around_ours_stays(original, monkeypatch):
    other = around(fmha._memory_efficient_attention)
    monkeypatch.setattr(fmha, "_memory_efficient_attention", other)
    for _ in range(2):
        volta_fa.enable_xformers("cpu")
        assert fmha._memory_efficient_attention is other
        assert memory_efficient_attention(*FALLS_BACK["headdim"]()) == "original"
        volta_fa.disable_xformers()
        assert fmha._memory_efficient_attention is other and memory_efficient_attention(*inputs(3, 3)) == "original"


def test_a_function_put_in_place_while_off_comes_back(monkeypatch):
    volta_fa.disable_xformers()
    other = around(fmha._memory_efficient_attention)
    monkeypatch.setattr(fmha, "_memory_efficient_attention", other)
    volta_fa.enable_xformers("cpu")
    assert fmha._memory_efficient_attention is not other
    volta_fa.disable_xformers()
    assert fmha._memory_efficient_attention is other


def test_a_reference_kept_while_enabled_runs_the_original(original, monkeypatch):
    kept = fmha._memory_efficient_attention
    volta_fa.disable_xformers()
    assert kept(fmha.Inputs(*inputs(3, 3)), None) == "original"
    monkeypatch.setattr(fmha, "_memory_efficient_attention", around(kept))
    volta_fa.enable_xformers("cpu")
    assert memory_efficient_attention(*FALLS_BACK["headdim"]()) == "original"
    volta_fa.disable_xformers()


def test_another_device_runs_the_original(original):
    assert memory_efficient_attention(*[torch.zeros(1, 2, 1, 8, device="meta")] * 3) == "original"
    assert volta_fa.xformers_stats() == {"ran": 0, "fell_back": {}}


CHANGES = {
    "does not take": ("_memory_efficient_attention", lambda inp, op, more: None),
    "does not call": ("memory_efficient_attention", lambda q, k, v: None),
    "has other fields": ("Inputs", dataclasses.make_dataclass("Inputs", ["query", "key"])),
}


@pytest.mark.parametrize("difference", CHANGES)
def test_refuses_a_changed_xformers(difference, monkeypatch):
    volta_fa.disable_xformers()
    monkeypatch.setattr(fmha, *CHANGES[difference])
    with pytest.raises(RuntimeError, match=f"xformers: got .*, expected 0.0.29 to 0.0.35 .*{difference}"):
        volta_fa.enable_xformers("cpu")


def test_says_what_is_missing(monkeypatch):
    volta_fa.disable_xformers()
    monkeypatch.setitem(sys.modules, "xformers.ops.fmha", None)
    with pytest.raises(ImportError, match="needs xformers 0.0.29 to 0.0.35"):
        volta_fa.enable_xformers("cpu")
