"""Tests of `volta_fa::merge_attention_states`: attention over two parts of the keys, merged to attention over all keys.

A state is out and softmax_lse of attention over some keys; without keys softmax_lse is +inf. `merge_attention_states_` adds a part to a
state in place, which is fp32. Ring attention and cascade attention call both. A backend is the CPU, the simulator (`sim`) or a GPU
(`cuda`), with a dtype; `launches` returns the simulator's report of each kernel."""

import math

import pytest
import torch
from torch.library import opcheck

import volta_fa
from conftest import INFO, on
from test_validation import refused  # refused(call, exception, *words of its message)

merge, add = torch.ops.volta_fa.merge_attention_states, torch.ops.volta_fa.merge_attention_states_
BACKENDS = on("cpu-fp32", "cpu-fp64", "cpu-bf16", "sim", "sim-bf16", "sim-fp32", "cuda", "cuda-bf16", "cuda-fp32")
#: Relative error of out: one rounding of fp16 and bf16; a few of fp32, in which weights are computed from softmax_lse.
EPSILON = {torch.float16: 2**-11, torch.bfloat16: 2**-8, torch.float32: 2**-22, torch.float64: 2**-22}


@pytest.fixture(autouse=True)
def simulated(backend):
    """Runs the kernels in the simulator, if a test is on the backend `sim`."""
    backend.simulate()


def reference(out_a, lse_a, out_b, lse_b):
    """Returns the merged out and softmax_lse in fp64: outs weighted by exp(softmax_lse)."""
    sum_a, sum_b = (torch.where(lse == math.inf, 0.0, lse.double().exp()).transpose(-1, -2)[..., None] for lse in (lse_a, lse_b))
    both = sum_a + sum_b
    out = (sum_a * out_a.double() + sum_b * out_b.double()) / both
    lse = both.log()[..., 0].transpose(-1, -2)
    return out.masked_fill(both == 0, 0.0), lse.masked_fill(lse == -math.inf, math.inf)


def draw(backend, *shape, without_keys=False):
    """Returns out and softmax_lse of two states, for out of this shape: (batch, seqlen, heads, headdim), or packed without batch.
    `without_keys`: rows for which one state, the other, or both have no key."""
    out_a, out_b = backend.randn(*shape), backend.randn(*shape)
    lse_a, lse_b = (backend.randn(*shape[:-3], shape[-2], shape[-3]).float() * 3 for _ in "ab")
    if without_keys:
        lse_a.flatten()[::5] = math.inf
        lse_b.flatten()[::7] = math.inf
    return out_a, lse_a, out_b, lse_b


#: Shapes of out: batches and packed rows, then states without rows.
SHAPES = [(2, 33, 3, 64), (1, 1, 1, 8), (3, 70, 2, 20), (65, 5, 256), (40, 2, 512), (2, 64, 4, 1), (0, 5, 2, 8), (2, 0, 2, 8), (0, 2, 8)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@BACKENDS
def test_against_the_formula(backend, shape):
    """What out of a state without keys holds does not matter: here NaN."""
    out_a, lse_a, *b = draw(backend, *shape, without_keys=True)
    expected, expected_lse = reference(out_a, lse_a, *b)
    rows = lse_a.transpose(-1, -2) == math.inf
    out, lse = volta_fa.merge_attention_states(torch.where(rows[..., None], torch.nan, out_a), lse_a, *b)
    assert (out.dtype, lse.dtype) == (out_a.dtype, torch.float32)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=2**-22, atol=2**-20)
    torch.testing.assert_close(out.double(), expected, rtol=EPSILON[out.dtype], atol=4 * EPSILON[out.dtype])


@on("cpu-fp32", "cpu-fp64", "sim", "cuda", "cuda-bf16")
def test_extreme_softmax_lse(backend):
    """All pairs of extremes. +inf means no keys, -inf a sum of 0, which is the same. NaN, from invalid lengths, stays NaN."""
    extremes = (math.nan, math.inf, -math.inf, 0.0, 88.0, -1e4, 1e30)  # 88: the largest integer with a finite exp in fp32
    pairs = [(a, b) for a in extremes for b in extremes]
    lse_a, lse_b = torch.tensor(pairs, device=backend.device).T.contiguous()[:, None]
    out_a, out_b = backend.randn(len(pairs), 1, 8), backend.randn(len(pairs), 1, 8)
    out, lse = merge(out_a, lse_a, out_b, lse_b)
    for row, (a, b) in enumerate(pairs):
        has_a, has_b = abs(a) != math.inf, abs(b) != math.inf
        if math.isnan(a) or math.isnan(b):
            assert lse[0, row].isnan() and out[row].isnan().all(), (a, b)
        elif has_a and has_b and abs(a - b) < 100:
            weight = 1 / (1 + math.exp(b - a))
            expected = weight * out_a[row].double() + (1 - weight) * out_b[row].double()
            torch.testing.assert_close(out[row].double(), expected, rtol=EPSILON[out.dtype], atol=4 * EPSILON[out.dtype])
        elif has_a or has_b:  # one has all the weight: they differ by more than 8000
            a_wins = has_a and (not has_b or a > b)
            assert torch.equal(out[row], (out_a if a_wins else out_b)[row]), (a, b)
            assert lse[0, row] == torch.tensor(a if a_wins else b), (a, b)
        else:
            assert (out[row] == 0).all() and lse[0, row] == math.inf, (a, b)


@pytest.mark.parametrize("magnitude", [1e3, 6e4])
@on("cpu-fp32", "sim", "cuda")
def test_weights_of_large_softmax_lse(backend, magnitude):
    """Weights are exact for a large softmax_lse: 1/2 each for equal parts, although the merged softmax_lse rounds."""
    ones, lse = torch.ones_like(backend.randn(2, 9, 3, 16)), torch.full((2, 3, 9), magnitude, device=backend.device)
    out, _ = merge(ones, lse, ones, lse)
    assert torch.equal(out, ones)


@on("sim")
def test_one_launch_of_the_merge_kernel(backend):
    [launch] = backend.launches(lambda: merge(*draw(backend, 2, 9, 3, 16)))
    assert launch["kernel"] in {v["name"] for v in INFO["variants"] if v["pass"] == "Merge"}


@on("cpu-fp32", "sim", "cuda")
def test_strided_states(backend):
    out_a, lse_a, *b = draw(backend, 2, 19, 3, 40)
    strided = out_a.transpose(1, 2).contiguous().transpose(1, 2), lse_a.mT.contiguous().mT
    for found, expected in zip(merge(*strided, *b), merge(out_a, lse_a, *b)):
        assert torch.equal(found, expected) and found.is_contiguous()


@pytest.mark.parametrize("layout", ["whole", "rows", "heads first", "headdim 20", "packed"])
@BACKENDS
def test_in_place(backend, layout):
    """A part is added to a state in fp32 (fp64 if the part is), also to a slice of its rows ("rows")."""
    headdim = 20 if layout == "headdim 20" else 64
    shape = (40, 3, headdim) if layout == "packed" else (2, 40, 3, headdim)
    out_a, lse_a, out_b, lse_b = draw(backend, *shape, without_keys=True)
    out_a = out_a.to(torch.float64 if backend.dtype == torch.float64 else torch.float32)
    if layout == "heads first":
        out_a = out_a.transpose(1, 2).contiguous().transpose(1, 2)
    rows = slice(7, 29) if layout == "rows" else slice(None)
    some = (slice(None), rows) if out_a.dim() == 4 else (rows,)
    expected, expected_lse = reference(out_a[some], lse_a[..., rows], out_b[some], lse_b[..., rows])
    before, before_lse = out_a.clone(), lse_a.clone()
    assert add(out_a[some], lse_a[..., rows], out_b[some], lse_b[..., rows]) is None
    torch.testing.assert_close(lse_a[..., rows].double(), expected_lse, rtol=2**-22, atol=2**-20)
    torch.testing.assert_close(out_a[some].double(), expected, rtol=2**-20, atol=2**-20)
    others = torch.ones(40, dtype=torch.bool, device=out_a.device)
    others[rows] = False
    assert torch.equal(out_a.movedim(-3, 0)[others], before.movedim(-3, 0)[others])
    assert torch.equal(lse_a[..., others], before_lse[..., others])


@on("cpu-bf16", "sim", "cuda")
def test_many_parts_lose_nothing(backend):
    """Sixteen parts added one by one: the sum is never rounded to the dtype of the parts."""
    parts = [draw(backend, 1, 32, 2, 64)[:2] for _ in range(16)]
    out, lse = torch.zeros(1, 32, 2, 64, device=backend.device), torch.full((1, 2, 32), math.inf, device=backend.device)
    weights = torch.stack([lse for _, lse in parts]).double().softmax(0).transpose(-1, -2)[..., None]
    for part, part_lse in parts:
        add(out, lse, part, part_lse)
    expected = (weights * torch.stack([part for part, _ in parts]).double()).sum(0)
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=2e-6)


@on("cpu-fp32", "sim", "cuda")
def test_opcheck(backend):
    out_a, *others = draw(backend, 2, 9, 3, 16)
    opcheck(merge.default, (out_a, *others))
    opcheck(add.default, (out_a.float(), *others))


@on("cpu-fp32", "sim", "cuda")
def test_wrong_arguments_in_place(backend):
    out_a, lse_a, out_b, lse_b = draw(backend, 2, 9, 3, 16)
    refused(lambda: add(out_a.half(), lse_a, out_b.double(), lse_b), ValueError, "volta_fa::merge_attention_states_", "out_b: got dtype")
    refused(lambda: add(out_a.float(), lse_a, out_b[:, 1:], lse_b), ValueError, "out_b: got shape")


@pytest.mark.parametrize("name", ["out_a", "softmax_lse_a"])
@on("cpu-fp32", "sim", "cuda")
def test_expanded_states_are_refused_in_place(backend, name):
    """Rows that share memory would be written over one another. Nothing is written."""
    state = dict(zip(NAMES, draw(backend, 2, 9, 3, 16)))
    state[name] = state[name][:1].expand(2, *state[name].shape[1:])
    before = {n: t.clone() for n, t in state.items()}
    refused(lambda: add(**state), ValueError, f"{name}: got stride 0 in dimension 0, of size 2", "pass a contiguous tensor")
    assert all(torch.equal(state[n], t) for n, t in before.items())
    merge(**state)  # which only reads them


@on("cpu-fp32", "sim", "cuda")
def test_autograd_sees_what_is_written(backend):
    """A backward pass that saved the state before a part was added raises an error, as after PyTorch's in-place operators."""
    out_a, lse_a, out_b, lse_b = draw(backend, 2, 9, 3, 16)
    out_a = out_a.float()
    product = (torch.ones_like(out_a).requires_grad_() * out_a).sum()
    before = [t._version for t in (out_a, lse_a, out_b, lse_b)]
    add(out_a[:, 2:], lse_a[..., 2:], out_b[:, 2:], lse_b[..., 2:])
    assert [t._version for t in (out_a, lse_a, out_b, lse_b)] == [before[0] + 1, before[1] + 1, *before[2:]]
    refused(product.backward, RuntimeError, "modified by an inplace operation")
    with torch.inference_mode():
        state = out_a.clone(), lse_a.clone()
        add(*state, out_b, lse_b)
    add(*state, out_b, lse_b)  # a tensor of inference mode has no version


NAMES = ("out_a", "softmax_lse_a", "out_b", "softmax_lse_b")
#: Changes of arguments, and words of the error.
WRONG = {
    "rank": (
        lambda a: {"out_a": a["out_a"][0, 0]},
        ["out_a: got a tensor of rank 2", "expected (batch, seqlen_q, nheads, headdim_v) or packed"],
    ),
    "rank 9": (lambda a: {"out_a": a["out_a"][(None,) * 5]}, ["out_a: got a tensor of rank 9"]),
    "dtype": (lambda a: {"out_a": a["out_a"].int()}, ["out_a: got dtype torch.int32", "torch.float16"]),
    "other dtype": (lambda a: {"out_b": a["out_b"].double()}, ["out_b: got dtype torch.float64"]),
    "shape": (lambda a: {"out_b": a["out_b"][:, 1:]}, ["out_b: got shape (2, 9, 6, 64)", "(2, 10, 6, 64)"]),
    "stride": (lambda a: {"out_b": a["out_b"][..., :1].expand(2, 10, 6, 64)}, ["out_b: got stride 0 in the last dimension"]),
    "lse dtype": (lambda a: {"softmax_lse_a": a["softmax_lse_a"].half()}, ["softmax_lse_a: got dtype torch.float16", "torch.float32"]),
    "lse shape": (lambda a: {"softmax_lse_b": a["softmax_lse_b"].mT}, ["softmax_lse_b: got shape (2, 10, 6)", "(2, 6, 10)"]),
    "device": (lambda a: {"softmax_lse_b": a["softmax_lse_b"].to("meta")}, ["softmax_lse_b: got device meta"]),
}


@pytest.mark.parametrize("name", WRONG)
@on("cpu-fp32", "sim", "cuda")
def test_wrong_arguments(backend, name):
    good = dict(zip(NAMES, draw(backend, 2, 10, 6, 64)))
    spoil, words = WRONG[name]
    refused(lambda: merge(**{**good, **spoil(good)}), ValueError, "volta_fa::merge_attention_states", *words)


@on("cpu-fp32")
def test_backward_is_refused(backend):
    out_a, *others = draw(backend, 1, 3, 1, 8)
    out, _ = merge(out_a.requires_grad_(), *others)
    refused(out.sum().backward, RuntimeError, "merge_attention_states")


@pytest.mark.parametrize("place", range(4), ids=NAMES)
@on("cpu-fp32")
def test_tensors_that_require_grad_are_refused_in_place(backend, place):
    """The in-place op has no gradient, so it raises an error for tensors that require one: autograd would return wrong gradients."""
    tensors = list(draw(backend, 1, 3, 1, 8))
    tensors[place] = tensors[place].requires_grad_() * 1
    refused(lambda: add(*tensors), NotImplementedError, "merge_attention_states_", "requires grad", "Use torch.no_grad()")
    with torch.autograd.forward_ad.dual_level():
        dual = [t.detach() for t in tensors]
        dual[place] = torch.autograd.forward_ad.make_dual(dual[place], torch.ones_like(dual[place]))
        refused(lambda: add(*dual), NotImplementedError, "merge_attention_states_", "a tangent", "Pass its primal")
    with torch.no_grad():
        add(*tensors)
