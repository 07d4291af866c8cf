"""Tests of invalid arguments of fwd and bwd: the exception's type, and a message of one line that names the argument and what is allowed.

Every backend raises before it launches anything. tests/problem.rs tests arguments that only tensors of a GPU can have. Lengths in GPU
memory are an exception: without `check_lengths` the host does not read them. Kernels then access nothing outside the tensors, and write NaN
to the affected rows (test_unchecked_*). Tables such as TENSORS list: name, change of a valid call, words of the message. `on(...)` lists
the values of the fixture `backend`: CPU (`cpu-DTYPE`), simulator (`sim`), GPU (`cuda`). Tests of other operators import `refused`."""

import functools
import json

import pytest
import torch

from conftest import INFO, LIBRARY, Case, check, on, run_python  # check: results and gradients against fp64


@pytest.fixture
def good(backend):
    """Returns q, k and v of a valid call; tests spoil one argument."""
    backend.simulate("timing")  # reports every launch, which refused() looks for
    return {"q": backend.randn(2, 10, 6, 64), "k": backend.randn(2, 12, 3, 64), "v": backend.randn(2, 12, 3, 32)}


def refused(call, exception, *words):
    """Checks that a call raises exactly this exception, with all words in a message of one line, and launches no kernel."""
    with pytest.raises(exception) as e:
        call()
    assert type(e.value) is exception, f"{type(e.value)} instead of {exception}"
    for word in words:
        assert word in str(e.value), f"{str(e.value)!r} does not say {word!r}"
    assert "\n" not in str(e.value).strip(), "a message is one line"
    if INFO["simulator"]:
        assert json.loads(torch.ops.volta_fa._sim_report()) == [], "something was launched"


def call(arguments):
    """Returns a function that calls fwd."""
    return lambda: torch.ops.volta_fa.fwd(**arguments)


def misaligned(t):
    """Returns a copy that begins one element after the beginning of its memory."""
    return torch.empty(t.numel() + 1, dtype=t.dtype, device=t.device)[1:].view(t.shape).copy_(t)


def ones(a, *shape):
    """Returns ones in fp32 on the device of the arguments."""
    return a["q"].new_ones(shape, dtype=torch.float32)


TENSORS = {
    "q rank 3": (lambda a: {"q": a["q"][0]}, ["q: got", "rank 3", "rank 4", "(batch, seqlen, nheads, headdim)"]),
    "k rank 5": (lambda a: {"k": a["k"][None]}, ["k: got", "rank 5", "rank 4"]),
    "v rank 2": (lambda a: {"v": a["v"][0, 0]}, ["v: got", "rank 2", "rank 4"]),
    "int q": (lambda a: {"q": a["q"].int()}, ["q: got", "torch.int32", "torch.float16"]),
    "complex q": (lambda a: {"q": a["q"].to(torch.complex64)}, ["q: got", "torch.complex64"]),
    "k dtype": (lambda a: {"k": a["k"].to(torch.bfloat16)}, ["k: got", "torch.bfloat16"]),
    "v dtype": (lambda a: {"v": a["v"].double()}, ["v: got", "torch.float64"]),
    "k batch": (lambda a: {"k": a["k"][:1]}, ["k: got batch 1", "batch 2"]),
    "v batch": (lambda a: {"v": torch.cat([a["v"]] * 2)}, ["v: got batch 4", "batch 2"]),
    "v seqlen": (lambda a: {"v": a["v"][:, :11]}, ["v: got seqlen 11", "seqlen 12", "k"]),
    "v nheads": (lambda a: {"v": a["v"][:, :, :1]}, ["v: got nheads 1", "nheads 3", "k"]),
    "nheads not divisible": (lambda a: {"q": a["q"][:, :, :5]}, ["q: got nheads 5", "multiple of nheads_k 3"]),
    "fewer query heads": (lambda a: {"q": a["q"][:, :, :2]}, ["q: got nheads 2", "multiple of nheads_k 3"]),
    "no KV heads": (lambda a: {"k": a["k"][:, :, :0], "v": a["v"][:, :, :0]}, ["q: got nheads 6", "nheads_k 0"]),
    "k headdim": (lambda a: {"k": a["k"][..., :32]}, ["k: got headdim 32", "headdim 64"]),
    "headdim 0": (lambda a: {"q": a["q"][..., :0], "k": a["k"][..., :0]}, ["q: got headdim 0", "1 to 512"]),
    "headdim 520": (lambda a: {n: a[n].repeat(1, 1, 1, 9)[..., :520] for n in "qk"}, ["q: got headdim 520", "1 to 512"]),
    "headdim_v 0": (lambda a: {"v": a["v"][..., :0]}, ["v: got headdim 0", "1 to 512"]),
    "headdim_v 544": (lambda a: {"v": a["v"].repeat(1, 1, 1, 17)}, ["v: got headdim 544", "1 to 512"]),
    "q last dimension": (lambda a: {"q": a["q"].mT.contiguous().mT}, ["q: got stride 6", "contiguous last dimension"]),
    "k every other": (lambda a: {"k": a["k"].repeat(1, 1, 1, 2)[..., ::2]}, ["k: got stride 2", "contiguous last dimension"]),
    "v expanded": (lambda a: {"v": a["v"][..., :1].expand(2, 12, 3, 32)}, ["v: got stride 0", "contiguous last dimension"]),
}

FEATURES = {
    "seqused_k dtype": (lambda a: {"seqused_k": ones(a, 2).long()}, ["seqused_k: got dtype torch.int64", "torch.int32"]),
    "seqused_k shape": (lambda a: {"seqused_k": ones(a, 1).int()}, ["seqused_k: got shape (1)", "here (2,)"]),
    "alibi_slopes dtype": (lambda a: {"alibi_slopes": ones(a, 6).double()}, ["alibi_slopes: got dtype torch.float64", "torch.float32"]),
    "alibi_slopes shape": (lambda a: {"alibi_slopes": ones(a, 6, 2)}, ["alibi_slopes: got shape (6, 2)", "(6,) or (2, 6)"]),
    "alibi_slopes of KV heads": (lambda a: {"alibi_slopes": ones(a, 3)}, ["alibi_slopes: got shape (3)", "(6,) or (2, 6)"]),
    "sinks dtype": (lambda a: {"sinks": ones(a, 6).long()}, ["sinks: got dtype torch.int64", "(q's) or torch.float32"]),
    "sinks shape": (lambda a: {"sinks": ones(a, 2, 6)}, ["sinks: got shape (2, 6)", "here (6,)"]),
    "attn_bias dtype": (lambda a: {"attn_bias": ones(a, 1, 1, 10, 12).long()}, ["attn_bias: got dtype torch.int64", "torch.bool"]),
    "attn_bias rank": (lambda a: {"attn_bias": ones(a, 10, 12)}, ["attn_bias: got shape (10, 12)", "(2, 6, 10, 12)"]),
    "attn_bias heads": (lambda a: {"attn_bias": ones(a, 2, 3, 10, 12)}, ["attn_bias: got shape (2, 3, 10, 12)", "(2, 6, 10, 12)"]),
    "attn_bias keys": (lambda a: {"attn_bias": ones(a, 2, 6, 10, 11)}, ["attn_bias: got shape (2, 6, 10, 11)"]),
}

SCALARS = {
    "dropout_p 1": ({"dropout_p": 1.0}, ["dropout_p: got 1", "[0, 1)"]),
    "dropout_p negative": ({"dropout_p": -0.1}, ["dropout_p: got -0.1", "[0, 1)"]),
    "dropout_p nan": ({"dropout_p": float("nan")}, ["dropout_p: got NaN", "[0, 1)"]),
    "softmax_scale inf": ({"softmax_scale": float("inf")}, ["softmax_scale: got inf", "finite"]),
    "softmax_scale nan": ({"softmax_scale": float("nan")}, ["softmax_scale: got NaN", "finite"]),
    "softmax_scale beyond fp32": ({"softmax_scale": 1e300}, ["softmax_scale: got", "float32"]),
    "window_left": ({"window_left": -2}, ["window_left: got -2", "-1 (no bound)"]),
    "window_right": ({"window_right": -100}, ["window_right: got -100", "-1 (no bound)"]),
    "softcap": ({"softcap": -1.0}, ["softcap: got -1", "0 (off) or a number from 1e-4 to 1e4"]),
    "softcap inf": ({"softcap": float("inf")}, ["softcap: got inf", "1e-4 to 1e4"]),
    "softcap nan": ({"softcap": float("nan")}, ["softcap: got NaN", "1e-4 to 1e4"]),
    "softcap tiny": ({"softcap": 9e-5}, ["softcap: got 0.00009", "1e-4 to 1e4"]),
    "softcap huge": ({"softcap": 10001.0}, ["softcap: got 10001", "1e-4 to 1e4"]),
    "causal and window_right": ({"is_causal": True, "window_right": 3}, ["window_right: got 3 together with is_causal=True", "-1 or 0"]),
    "max_seqlen_q alone": ({"max_seqlen_q": 12}, ["max_seqlen_q: got 12", "None"]),
    "max_seqlen_k alone": ({"max_seqlen_k": 12}, ["max_seqlen_k: got 12", "None"]),
    "softcap with dropout": ({"softcap": 30.0, "dropout_p": 0.1}, ["softcap: got 30 together with dropout_p 0.1"]),
}
ARGUMENTS = TENSORS | FEATURES | {name: (lambda a, changes=changes: changes, words) for name, (changes, words) in SCALARS.items()}


@pytest.mark.parametrize("name", ARGUMENTS)
@on("cpu-fp32", "sim", "cuda")
def test_tensors_and_scalars(backend, good, name):
    spoil, words = ARGUMENTS[name]
    refused(call({**good, **spoil(good)}), ValueError, "volta_fa::fwd", *words)


@pytest.mark.parametrize("name", ARGUMENTS)
@on("cpu-fp32")
def test_meta_and_fake_tensors(backend, good, name):
    """Tensors without data raise the same errors as others, so that tracing finds a model that cannot run."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    spoil, words = ARGUMENTS[name]
    spoiled = {**good, **spoil(good)}
    for without_data in (lambda t: torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta"), FakeTensorMode().from_tensor):
        arguments = {n: without_data(t) if isinstance(t, torch.Tensor) else t for n, t in spoiled.items()}
        refused(call(arguments), ValueError, "volta_fa::fwd", *words)


@on("cpu-fp32")
def test_meta_tensors_beside_others(backend, good):
    """A call that mixes meta tensors with others is refused. Else it would return memory that no kernel wrote."""
    refused(call({**good, "k": good["k"].to("meta")}), ValueError, "k: got device meta, expected device cpu, that of q")
    refused(call({**good, "q": good["q"].to("meta")}), ValueError, "k: got device cpu, expected device meta, that of q")


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("name", [
    "fwd", "bwd", "fwd_fast", "fwd_kvcache", "fwd_kvcache.append", "fwd_mla", "fwd_sparse_mla", "indexer_logits",
    "merge_attention_states", "merge_attention_states_",
])  # fmt: skip
def test_none_for_a_required_tensor(name, device):
    name, _, overload = name.partition(".")
    op = getattr(getattr(torch.ops.volta_fa, name), overload or "default")
    required = [a.name for a in op._schema.arguments if not a.has_default_value()]
    for missing in required:
        for requires_grad in {False, name == "fwd"}:
            tensors = {n: torch.zeros(1, 8, 2, 16, device=device, requires_grad=requires_grad) for n in required}
            without = functools.partial(op, **{**tensors, missing: None})
            refused(without, ValueError, f"volta_fa::{name}: {missing}: got None, expected a tensor")


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_none_for_k_and_v_to_append(device):
    q, cache = torch.zeros(1, 8, 2, 16, device=device), torch.zeros(1, 8, 2, 16, device=device)
    append = functools.partial(torch.ops.volta_fa.fwd_kvcache.append, q, cache, cache, None, None)
    refused(append, ValueError, "volta_fa::fwd_kvcache: k: got None, expected a tensor")


def test_bwd_has_the_options_of_fwd():
    """bwd has all options of fwd with the same types and defaults, because autograd passes them on by name."""
    own = {"generator", "rng_state", "attn_bias_requires_grad", "dlse"}
    schemas = (torch.ops.volta_fa.fwd.default._schema, torch.ops.volta_fa.bwd.default._schema)
    fwd, bwd = ([(a.name, str(a.type), a.default_value) for a in s.arguments if a.kwarg_only and a.name not in own] for s in schemas)
    assert fwd == bwd and ("softcap", "float", 0.0) in fwd


@on("cpu-fp32")
def test_meta_tensors_in_bwd(backend, good):
    q, k, v = (good[n].to("meta") for n in "qkv")
    out, softmax_lse, _ = torch.ops.volta_fa.fwd(q, k, v)

    def backward(dout, **options):
        return torch.ops.volta_fa.bwd(dout, q, k, v, out, softmax_lse, **options)

    refused(lambda: backward(out[:, 1:]), ValueError, "volta_fa::bwd: dout: got shape (2, 9, 6, 32)")
    refused(lambda: backward(out, dropout_p=0.5), ValueError, "rng_state: got None")
    backward(out[..., :1].expand(out.shape))  # dout may have any layout


@pytest.mark.parametrize("window_right", [-1, 0])
@on("cpu-fp32", "sim", "cuda")
def test_window_right_that_is_causal_implies(backend, good, window_right):
    """window_right -1 or 0 beside is_causal is allowed, and equals window_right 0 alone."""
    backend.simulate()
    out = call({**good, "is_causal": True, "window_right": window_right})()[0]
    assert torch.equal(out, call({**good, "window_right": 0})()[0])


@on("cpu-fp32", "sim", "cuda")
def test_smallest_softcap(backend):
    """The smallest softcap works. Gradients are not compared: the capped score is almost a step, whose derivative has no digits."""
    case = Case(seqlen_q=40, seqlen_k=50, headdim=64, nheads=2, softcap=1e-4)
    q, k, v, _ = case.inputs(backend)
    check(backend, q, k, v, **case.options)


@on("cpu-fp32", "sim", "cuda")
def test_largest_softcap(backend):
    """The largest softcap leaves these scores unchanged, except for the error of the kernels' formula (SOFTCAPS in src/problem)."""
    q, k, v, _ = Case(seqlen_q=40, seqlen_k=50, headdim=64, nheads=2).inputs(backend)
    (out, lse), (plain, plain_lse) = (backend.forward(q, k, v, softcap=softcap) for softcap in (1e4, 0.0))
    torch.testing.assert_close(lse, plain_lse, rtol=0, atol=1.5e-3)
    torch.testing.assert_close(out, plain, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("name", ["q", "k", "v"])
@on("cpu-fp32", "cpu-fp16", "sim", "cuda")
def test_tensors_of_any_alignment(backend, good, name):
    backend.simulate()
    assert torch.equal(call({**good, name: misaligned(good[name])})()[0], call(good)()[0])


@on("cuda")
def test_kernels_refuse_fp64(backend, good):
    spoiled = {n: t.double() for n, t in good.items()}
    refused(call(spoiled), ValueError, "q: got", "torch.float64", "torch.float16, torch.bfloat16 or torch.float32")


@pytest.mark.parametrize("name", ["q", "k"])
@on("cuda")
def test_tensors_on_another_device(backend, good, name):
    """Other tensors must be on q's device."""
    refused(call({**good, name: good[name].cpu()}), ValueError, "k: got device", "cpu", "cuda:0")


# ---- packed sequences -----------------------------------------------------------------------------------------------


def packed(backend, good):
    """Returns the arguments of a valid packed call: three sequences with 7, 0 and 13 queries, and 9, 2 and 13 keys."""
    lengths = {"cu_seqlens_q": backend.ints([0, 7, 7, 20]), "cu_seqlens_k": backend.ints([0, 9, 11, 24])}
    return {name: t.flatten(0, 1) for name, t in good.items()} | lengths | {"max_seqlen_q": 13, "max_seqlen_k": 13}


PACKED = {
    "cu_seqlens_q alone": (lambda a: {"cu_seqlens_k": None}, ["cu_seqlens_k: got None", "cu_seqlens_q"]),
    "cu_seqlens_k alone": (lambda a: {"cu_seqlens_q": None}, ["cu_seqlens_q: got None", "cu_seqlens_k"]),
    "cu_seqlens_q dtype": (lambda a: {"cu_seqlens_q": a["cu_seqlens_q"].long()}, ["cu_seqlens_q: got", "torch.int64", "torch.int32"]),
    "cu_seqlens_k dtype": (lambda a: {"cu_seqlens_k": a["cu_seqlens_k"].float()}, ["cu_seqlens_k: got", "torch.float32", "torch.int32"]),
    "cu_seqlens_q rank": (lambda a: {"cu_seqlens_q": a["cu_seqlens_q"][None]}, ["cu_seqlens_q: got shape (1, 4)", "(batch + 1,)"]),
    "cu_seqlens_k length": (lambda a: {"cu_seqlens_k": a["cu_seqlens_k"][:3]}, ["cu_seqlens_k: got shape (3)", "here (4,)"]),
    "cu_seqlens_q strided": (lambda a: {"cu_seqlens_q": a["cu_seqlens_q"].repeat(2)[::2]}, ["cu_seqlens_q: got stride 2", "contiguous"]),
    "no max_seqlen_q": (lambda a: {"max_seqlen_q": None}, ["max_seqlen_q: got None", "longest sequence"]),
    "no max_seqlen_k": (lambda a: {"max_seqlen_k": None}, ["max_seqlen_k: got None", "longest sequence"]),
    "max_seqlen_k negative": (lambda a: {"max_seqlen_k": -5}, ["max_seqlen_k: got -5"]),
    "max_seqlen_k beyond int32": (lambda a: {"max_seqlen_k": 2**31}, ["max_seqlen_k: got 2147483648", "0 to 2147483647"]),
    "max_seqlen_q of nothing": (lambda a: {"max_seqlen_q": 0}, ["max_seqlen_q: got 0", "at least 1", "20 rows"]),
    "max_seqlen_k of nothing": (lambda a: {"max_seqlen_k": 0}, ["max_seqlen_k: got 0", "at least 1", "24 rows"]),
    "max_seqlen_k of nothing, seqused_k": (
        lambda a: {"max_seqlen_k": 0, "seqused_k": a["cu_seqlens_k"].new_zeros(3)},
        ["max_seqlen_k: got 0", "at least 1", "24 rows"],
    ),
    "no sequence": (lambda a: {n: a[n][:1] for n in ("cu_seqlens_q", "cu_seqlens_k")}, ["cu_seqlens_q: got shape (1)", "20 rows"]),
    "q rank 4": (lambda a: {"q": a["q"][None]}, ["q: got", "rank 4", "rank 3", "(total, nheads, headdim)"]),
    "v total": (lambda a: {"v": a["v"][1:]}, ["v: got total 23", "total 24", "k"]),
    "seqused_k length": (lambda a: {"seqused_k": a["cu_seqlens_q"]}, ["seqused_k: got shape (4)", "here (3,)"]),
    "attn_bias for totals": (
        lambda a: {"attn_bias": a["q"].new_zeros(1, 1, 20, 24)},
        ["attn_bias: got shape (1, 1, 20, 24)", "(3, 6, 13, 13)"],
    ),
    "alibi_slopes batch": (lambda a: {"alibi_slopes": a["q"].new_zeros(2, 6).float()}, ["alibi_slopes: got shape (2, 6)", "(3, 6)"]),
}

#: Invalid values of lengths: change of packed(), words of the message if the host reads them (on a GPU only with VOLTA_FA_CHECK_LENGTHS=1,
#: because that waits for the GPU), and bounds of the rows of queries and of keys that become NaN if it does not. All other rows are right.
LENGTHS = {
    "start": ({"cu_seqlens_q": [1, 7, 7, 20]}, ["cu_seqlens_q: got 1 as its first value", "expected 0"], [0, 7], [0, 9]),
    # keys 9 and 10 belong to sequence 0, which is valid, and to sequence 2, which is too long
    "descend": ({"cu_seqlens_k": [0, 11, 9, 24]}, ["cu_seqlens_k: got 9 after 11 (entry 2)", "never descend"], [7, 20], [11, 24]),
    "end early": ({"cu_seqlens_q": [0, 7, 7, 19]}, ["cu_seqlens_q: got 19 as its last value", "20"], [19, 20], []),
    "end early k": ({"cu_seqlens_k": [0, 9, 11, 23]}, ["cu_seqlens_k: got 23 as its last value", "24"], [], [23, 24]),
    "end late": ({"cu_seqlens_k": [0, 9, 11, 25], "max_seqlen_k": 20}, ["cu_seqlens_k: got 25 as its last value", "24"], [7, 20], [11, 24]),
    "max_seqlen_q": ({"max_seqlen_q": 12}, ["max_seqlen_q: got 12", "at least 13", "sequence 2"], [7, 20], [11, 24]),
    "max_seqlen_k": ({"max_seqlen_k": 8}, ["max_seqlen_k: got 8", "at least 9", "sequence 0"], [0, 20], [0, 9, 11, 24]),
    # sequence 1 has no queries
    "seqused_k": ({"seqused_k": [9, 3, 13]}, ["seqused_k: got 3 (entry 1)", "0 to 2"], [], [9, 11]),
    "seqused_k negative": ({"seqused_k": [9, 2, -1]}, ["seqused_k: got -1 (entry 2)", "0 to 13"], [7, 20], [11, 24]),
}


@pytest.mark.parametrize("name", PACKED)
@on("cpu-fp32", "sim", "cuda")
def test_arguments_of_packed_sequences(backend, good, name):
    good = packed(backend, good)
    spoil, words = PACKED[name]
    refused(call({**good, **spoil(good)}), ValueError, "volta_fa::fwd", *words)


def with_tensors(backend, options):
    """Returns options with tensors in place of lists."""
    return {n: backend.ints(x) if isinstance(x, list) else x for n, x in options.items()}


@pytest.fixture(params=["default", "0", "1"])
def checked(request, backend):
    """Sets VOLTA_FA_CHECK_LENGTHS. Skips if the host then does not read lengths: on a GPU unless it is 1; in the simulator if it is 0."""
    if request.param == "default":
        backend.monkeypatch.delenv("VOLTA_FA_CHECK_LENGTHS", raising=False)
    else:
        backend.monkeypatch.setenv("VOLTA_FA_CHECK_LENGTHS", request.param)
    if {"sim": request.param == "0", "cuda": request.param != "1"}.get(backend.machine, False):
        pytest.skip("the host does not read lengths: test_unchecked_lengths")


@pytest.mark.parametrize("name", LENGTHS)
@on("cpu-fp32", "sim", "cuda")
def test_lengths(backend, good, checked, name):
    spoil, words, *_ = LENGTHS[name]
    refused(call(packed(backend, good) | with_tensors(backend, spoil)), ValueError, "volta_fa::fwd", *words)


@on("cpu-fp32", "sim", "cuda")
def test_lengths_of_a_dense_batch(backend, good, checked):
    words = ["seqused_k: got 13 (entry 1)", "a length from 0 to 12"]
    refused(call({**good, "seqused_k": backend.ints([12, 13])}), ValueError, *words)


@pytest.mark.parametrize("variable", ["", "0", "1"])
@on("cpu-fp32", "sim", "cuda")
def test_check_lengths_of_fwd_and_bwd(backend, good, variable):
    """fwd and bwd check lengths with check_lengths=True, whatever VOLTA_FA_CHECK_LENGTHS is, or if it is 1."""
    backend.monkeypatch.setenv("VOLTA_FA_CHECK_LENGTHS", variable)
    arguments = packed(backend, good) | {"cu_seqlens_k": backend.ints([0, 9, 11, 23]), "check_lengths": variable != "1"}
    refused(call(arguments), ValueError, "volta_fa::fwd", "cu_seqlens_k: got 23")
    out = backend.randn(20, 6, 32)
    arguments |= {"dout": out, "out": out, "softmax_lse": torch.zeros(6, 20, device=backend.device)}
    refused(lambda: torch.ops.volta_fa.bwd(**arguments), ValueError, "volta_fa::bwd", "cu_seqlens_k: got 23")


@on("cpu-fp32", "sim", "cuda")
def test_invalid_check_lengths_variable(backend, good):
    backend.monkeypatch.setenv("VOLTA_FA_CHECK_LENGTHS", "yes")
    refused(call(packed(backend, good)), ValueError, "VOLTA_FA_CHECK_LENGTHS: got `yes`, expected 0 or 1")


@pytest.fixture
def unchecked(backend):
    """Turns the length check off. The simulator then behaves like a GPU, whose lengths the host does not read."""
    backend.monkeypatch.delenv("VOLTA_FA_CHECK_LENGTHS", raising=False)
    if backend.machine == "sim":
        backend.monkeypatch.setenv("VOLTA_FA_CHECK_LENGTHS", "0")


def leave_ones(*like):
    """Fills the memory that the next outputs get with ones, so that unwritten rows are not NaN by chance."""
    kinds = [(t, dtype) for t in like for dtype in (t.dtype, t.dtype, torch.float32)]
    held = [torch.ones(t.numel(), dtype=dtype, device=t.device) for t, dtype in kinds]
    del held


def assert_nan_in(name, t, *bounds):
    """Checks that rows are NaN from the first bound to the second, from the third to the fourth, and so on, and all others finite."""
    spoiled = torch.zeros(len(t), dtype=torch.bool, device=t.device)
    for first, last in zip(bounds[::2], bounds[1::2]):
        spoiled[first:last] = True
    assert t[spoiled].isnan().all(), f"{name} is not NaN in rows {bounds}"
    assert t[~spoiled].isfinite().all(), f"{name} is not finite outside of rows {bounds}"
    if t.device.type == "cpu" and t.dtype == torch.float16:
        # The simulator fills outputs with bytes 0xff (a NaN too) before kernels run, so the kernel's NaN must differ. A GPU does not.
        assert (t[spoiled].contiguous().view(torch.int16) != -1).all(), f"{name}: no kernel wrote the NaN in rows {bounds}"


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("name", LENGTHS)
@on("sim", "cuda", "sim-bf16", "cuda-bf16")
def test_unchecked_lengths(backend, good, unchecked, name, deterministic):
    """Kernels access nothing outside the tensors (the simulator raises), and write NaN to the rows that LENGTHS lists."""
    spoil, _, queries, keys = LENGTHS[name]
    options = packed(backend, good) | with_tensors(backend, spoil)
    q, k, v = (options.pop(n) for n in "qkv")
    dout = backend.randn(20, 6, 32)
    leave_ones(q, k, v)
    out, lse = backend.forward(q, k, v, **options)
    assert_nan_in("out", out, *queries)
    assert_nan_in("softmax_lse", lse.T, *queries)
    leave_ones(q, k, v)
    for gradients in backend.backward(dout, q, k, v, out, lse, deterministic=deterministic, **options):
        for n, t, rows in zip(("dq", "dk", "dv"), gradients, (queries, keys, keys)):
            assert_nan_in(n, t, *rows)


@on("sim", "cuda")
def test_unchecked_lengths_of_a_dense_batch(backend, good, unchecked):
    q, k, v = good.values()
    options = {"seqused_k": backend.ints([11, 13]), "sinks": backend.randn(6).float()}
    leave_ones(q, k, v)
    out, lse = backend.forward(q, k, v, **options)
    assert_nan_in("out", out, 1, 2)
    assert_nan_in("softmax_lse", lse, 1, 2)
    leave_ones(q, k, v)
    for gradients in backend.backward(torch.ones_like(out), q, k, v, out, lse, deterministic=True, **options):
        for name, t in zip(("dq", "dk", "dv"), gradients):
            assert_nan_in(name, t, 1, 2)


@pytest.mark.parametrize("bias", [None, "1", "rows"])
@on("cpu-fp32", "sim", "cuda")
def test_max_seqlen_is_an_upper_limit(backend, bias):
    """A maximum far above the sequences' lengths changes nothing: 2^30 twice overflows an int32, and such a grid would never end."""
    tensors, options = Case(headdim=32, nheads=2, nheads_k=1, lengths=((7, 9), (0, 2), (13, 13))).problem(backend)
    assert tensors[0].shape[0] == 20
    far = {"max_seqlen_q": 2**30, "max_seqlen_k": 2**30}
    if bias == "1":
        options["attn_bias"] = backend.randn(3, 2, 1, 1)
    elif bias == "rows":
        # longer than all sequences together
        far = {"max_seqlen_q": 50, "max_seqlen_k": 60}
        options["attn_bias"] = backend.randn(1, 2, 50, 60)
    check(backend, *tensors, deterministic=True, **options | far)


# ---- backward -------------------------------------------------------------------------------------------------------


def rng_state(arguments, count, dtype=torch.int64):
    return {"rng_state": torch.zeros(count, dtype=dtype, device=arguments["q"].device)}


SAVED = {
    "dout shape": (lambda a: {"dout": a["dout"][..., :24]}, ["dout: got shape (2, 10, 6, 24)", "(2, 10, 6, 32)"]),
    "dout rank": (lambda a: {"dout": a["dout"][0]}, ["dout: got", "rank 3"]),
    "dout dtype": (lambda a: {"dout": a["dout"].to(torch.bfloat16)}, ["dout: got", "torch.bfloat16"]),
    "out shape": (lambda a: {"out": a["out"][:, :9]}, ["out: got shape (2, 9, 6, 32)", "(2, 10, 6, 32)"]),
    "out dtype": (lambda a: {"out": a["out"].double()}, ["out: got", "torch.float64"]),
    "softmax_lse shape": (lambda a: {"softmax_lse": a["softmax_lse"][:, :5]}, ["softmax_lse: got shape (2, 5, 10)", "(2, 6, 10)"]),
    "softmax_lse dtype": (lambda a: {"softmax_lse": a["softmax_lse"].half()}, ["softmax_lse: got", "torch.float16", "torch.float32"]),
    "k shape": (lambda a: {"k": a["k"][..., :32]}, ["k: got headdim 32", "headdim 64"]),
    "window": (lambda a: {"window_left": -3}, ["window_left: got -3"]),
    "no rng_state": (lambda a: {"dropout_p": 0.1}, ["rng_state: got None", "dropout_p"]),
    "rng_state shape": (lambda a: {"dropout_p": 0.1, **rng_state(a, 3)}, ["rng_state: got shape (3)", "(2,)"]),
    "rng_state dtype": (lambda a: {"dropout_p": 0.1, **rng_state(a, 2, torch.int32)}, ["rng_state: got", "torch.int32", "torch.int64"]),
    "rng_state without dropout": (lambda a: rng_state(a, 2), ["rng_state: got a tensor of shape (2)", "dropout_p is 0"]),
    "gradient of a bool bias": (
        lambda a: {"attn_bias": a["q"].new_ones(1, 1, 10, 12).bool(), "attn_bias_requires_grad": True},
        ["attn_bias_requires_grad: got True", "bool"],
    ),
    "gradient of no bias": (lambda a: {"attn_bias_requires_grad": True}, ["attn_bias_requires_grad: got True without an attn_bias"]),
    "causal and window_right": (lambda a: {"is_causal": True, "window_right": 1}, ["window_right: got 1", "is_causal=True"]),
}


@pytest.mark.parametrize("name", SAVED)
@on("cpu-fp32", "sim", "cuda")
def test_backward(backend, good, name):
    """Arguments of bwd that do not fit fwd's results are errors that say what was expected."""
    out = backend.randn(2, 10, 6, 32)
    arguments = {"dout": out, **good, "out": out, "softmax_lse": torch.zeros(2, 6, 10, device=backend.device)}
    spoil, words = SAVED[name]
    arguments |= spoil(arguments)
    refused(lambda: torch.ops.volta_fa.bwd(**arguments), ValueError, "volta_fa::bwd", *words)


# ---- environment and device ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variable,value", [
    ("VOLTA_FA_SIMULATE", "yes"), ("VOLTA_FA_SIM_QUANTUM", "many"), ("VOLTA_FA_SIM_THREADS", "0"), ("VOLTA_FA_SIM_SET", "nosuchconstant=1"),
    ("VOLTA_FA_SIM_GPU", "p100"), ("VOLTA_FA_SIM_SET", "sms=0"), ("VOLTA_FA_SIM_SET", "sms=4000000000"),
    *((name, "\udcff") for name in ("VOLTA_FA_SIMULATE", "VOLTA_FA_SIM_GPU", "VOLTA_FA_SIM_THREADS")),  # a byte that is not UTF-8
])  # fmt: skip
@on("sim")
def test_invalid_variables_of_the_simulator(backend, good, variable, value):
    backend.monkeypatch.setenv("VOLTA_FA_SIMULATE", "timing" if variable == "VOLTA_FA_SIM_SET" else "1")
    backend.monkeypatch.setenv(variable, value)
    refused(call(good), ValueError, variable, "UTF-8" if value == "\udcff" else value.partition("=")[0])


def test_simulating_without_the_simulator(monkeypatch):
    if INFO["simulator"]:
        pytest.skip("this library has the simulator")
    monkeypatch.setenv("VOLTA_FA_SIMULATE", "1")
    q = torch.zeros(1, 4, 1, 8, dtype=torch.float16)
    refused(lambda: torch.ops.volta_fa.fwd(q, q, q), NotImplementedError, "VOLTA_FA_SIMULATE", "`sim`")


@on("cuda")
def test_call_after_a_cuda_error(backend):
    """After a fault of earlier work on the GPU, CUDA fails all calls of the process. The error names CUDA, not an argument."""
    output = run_python(
        """
        import sys, torch
        torch.ops.load_library(sys.argv[1])
        q = torch.randn(1, 64, 1, 64, device="cuda", dtype=torch.float16)
        torch.ops.volta_fa.fwd(q, q, q)
        table = torch.zeros(4, device="cuda")
        table[torch.tensor([10**6], device="cuda")]  # a device-side assertion fails
        try:
            torch.cuda.synchronize()
        except RuntimeError:
            print("lost")
        try:
            torch.ops.volta_fa.fwd(q, q, q)
            print("no error")
        except RuntimeError as e:
            print("CUDA" in str(e), "q:" in str(e))
        sys.stdout.flush()
        import os; os._exit(0)  # the context is lost; do not tear it down
        """,
        LIBRARY,
    )
    assert output.split() == ["lost", "True", "False"]
