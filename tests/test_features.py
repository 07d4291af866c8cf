"""Features of `fwd` and `bwd`, forward and gradients, against the fp64 reference on every backend.

They are packed sequences, seqused_k (`used`), softcap, ALiBi, bias, sinks (one more logit per head, without a value) and dropout, also in
pairs. A backend is the CPU, the simulator (`sim`) or a GPU (`cuda`), with a dtype; KERNELS are the latter two. `check` compares out,
softmax_lse and gradients with the reference, and returns them. It runs kernels twice, in memory filled with NaN, with bitwise identical
results. `backend.results` returns the same without a comparison.

A Case (volta_fa/check/cases.py) is a problem: seqlen_q, seqlen_k, headdim, headdim_v, and fields by name. lengths: (seqlen_q, seqlen_k) of
packed sequences. used: seqused_k. spare: by how much max_seqlen exceeds the longest sequence. spread: standard deviation of q, k and v.
alibi: dimensions of the slopes (h: heads, bh: batch and heads). sinks: dtype ("own": q's). bias: its dimensions that are not 1 (of bhqk;
"-": none) and its dtype, as "hk:fp32"; ":bool" is a mask. batch and nheads are 2 by default."""

import dataclasses
import itertools
import math
import random

import pytest
import torch

import reference
from conftest import ALL, BF16_KERNELS, FP32_KERNELS, KERNELS, Case, check, check_case, on, on_cases  # check_case: `check` of a Case

op = torch.ops.volta_fa

BASE = Case(67, 93, 64, nheads=4, nheads_k=2)
#: (queries, keys) of packed sequences: tiles in part and in whole, without queries, without keys.
LENGTHS = ((17, 33), (1, 1), (113, 70), (0, 5), (5, 0), (0, 0), (64, 64), (33, 130))
PACKED = Case(headdim=64, nheads=2, nheads_k=1, lengths=LENGTHS)


def changed(case: Case, **fields) -> Case:
    """Returns the case with other fields."""
    return dataclasses.replace(case, **fields)


#: Fields of a Case that request a feature.
FEATURES = {
    "softcap": {"softcap": 1.5},
    "alibi": {"alibi": "bh"},
    "bias": {"bias": "bhqk:own"},
    "sinks": {"sinks": "fp32"},
    "dropout": {"dropout_p": 0.25},
}


def singles():
    """Each feature alone, and with each mask."""
    for base in (BASE, PACKED):
        for fields in FEATURES.values():
            for mask in ({}, {"is_causal": True}, {"window_left": 20, "window_right": 3}):
                yield changed(base, **fields, **mask)
    yield changed(BASE, alibi="h")
    yield changed(BASE, sinks="own")
    yield changed(BASE, softcap=50.0)
    # scores far beyond the cap: a flat softmax, and gradients of almost 0
    yield changed(BASE, softcap=2.0, spread=8.0)
    yield changed(BASE, dropout_p=0.9)
    yield changed(BASE, dropout_p=1e-3, is_causal=True)


def pairs():
    """Two features at once, but softcap and dropout, which the op refuses together; and some combinations of more."""
    for a, b in itertools.combinations(FEATURES, 2):
        if {a, b} != {"softcap", "dropout"}:
            yield changed(BASE, **FEATURES[a], **FEATURES[b], is_causal=True, batch=1)
            yield changed(PACKED, **FEATURES[a], **FEATURES[b], lengths=LENGTHS[:4])
    # two that Volta's forward pass has kernels for
    for d in (64, 128):
        for a, b in (("dropout", "bias"), ("alibi", "softcap")):
            fields = FEATURES[a] | FEATURES[b] | {"headdim": d, "headdim_v": d}
            yield changed(BASE, **fields, window_left=40, window_right=9, softmax_scale=-0.3)
            yield changed(BASE, **fields, seqlen_q=200, seqlen_k=33, is_causal=True)
            yield changed(BASE, **fields | {"headdim": d - 8, "headdim_v": d - 8}, spread=4.0)
    yield changed(BASE, dropout_p=0.25, bias="bhqk:fp32")
    yield changed(BASE, softcap=5.0, alibi="bh", bias="hqk:fp32", sinks="own", is_causal=True, used=(93, 40))
    yield changed(PACKED, dropout_p=0.2, alibi="h", bias="bqk:own", sinks="fp32", window_left=30)


def sizes():
    """Headdims of kernels and between them, with one of all lengths and features in turn."""
    lengths = [(q, k) for q in (1, 17, 113) for k in (1, 33, 255)]
    features = list(FEATURES.values())
    for i, d in enumerate((8, 32, 40, 64, 72, 96, 128, 160, 192, 256)):
        for j in range(2):
            fields = features[(i + 2 * j) % len(features)]
            yield Case(*lengths[(4 * i + 5 * j) % 9], d, batch=1, is_causal=j == 0, nheads=2, nheads_k=1, **fields)
        yield Case(headdim=d, lengths=LENGTHS[:3], is_causal=i % 2 == 0, nheads=2, nheads_k=2 - i % 2)
    yield Case(40, 50, 192, 128, nheads=2, **FEATURES["bias"])
    yield Case(40, 50, 64, 96, nheads=6, nheads_k=2, **FEATURES["sinks"])
    yield Case(40, 50, 128, 64, nheads=5, nheads_k=1, **FEATURES["dropout"])


def biases():
    """Broadcast in each dimension, in each type; rows that are not whole 16 bytes, but for two cases."""
    for dims in ("bhqk", "hqk", "bqk", "bhk", "bhq", "qk", "k", "q", "b", "h", "-"):
        yield Case(45, 69, 64, nheads=4, nheads_k=2, bias=f"{dims}:fp32", batch=2)
        # headdim 64 for some of the dimensions, 128 for the others
        yield Case(45, 69, 64 if dims < "bhr" else 128, nheads=4, nheads_k=2, bias=f"{dims}:own", batch=2)
    for dims in ("bhqk", "bk", "q"):
        yield Case(45, 69, 64, nheads=2, bias=f"{dims}:own", is_causal=True)
        yield Case(45, 69, 64, nheads=2, bias=f"{dims}:bool")
    yield Case(45, 72, 128, nheads=2, bias="hqk:own")  # rows of whole 16 bytes: kernels read it in place
    yield Case(45, 72, 40, nheads=2, bias="qk:fp32", window_left=10)
    # no two scores share an element, and keys come in pairs: Volta's kernels store the gradient as it is
    own = {"nheads": 4, "nheads_k": 2, "bias": "bhqk:own"}
    yield Case(69, 134, 64, **own)
    yield Case(69, 134, 40, **own, is_causal=True)
    yield Case(135, 70, 64, **own, window_left=30, window_right=5)
    yield Case(45, 70, 128, **own)
    yield Case(141, 70, 128, **own, is_causal=True)
    yield Case(45, 70, 64, **own, softcap=5.0)
    yield Case(45, 70, 96, **own, alibi="h", dropout_p=0.2, window_left=20)
    yield Case(35, 66, 256, **own)
    yield changed(PACKED, bias="hqk:fp32")
    yield changed(PACKED, bias="bk:bool", spare=3)
    yield changed(PACKED, bias="bhqk:fp32", spare=1)


def lengths():
    """Packed sequences, and seqused_k."""
    yield PACKED
    yield changed(PACKED, is_causal=True)
    yield changed(PACKED, window_left=9, window_right=4, spare=50)
    yield changed(PACKED, lengths=((0, 0), (0, 0), (3, 4)), sinks="fp32")
    yield changed(PACKED, lengths=((3, 0), (2, 0)), sinks="fp32", bias="hqk:fp32", spare=1)  # no key at all: nothing to launch
    yield changed(PACKED, lengths=((300, 5), (2, 260)), is_causal=True, nheads_k=2)
    yield changed(PACKED, lengths=((1, 90), (1, 3), (1, 0), (1, 64)), sinks="own")
    yield changed(PACKED, lengths=((90, 1), (70, 0), (3, 1)), is_causal=True)
    yield changed(PACKED, used=(30, 0, 65, 5, 0, 0, 1, 130), is_causal=True)
    yield changed(PACKED, used=(30, 1, 0, 0, 0, 0, 64, 129), alibi="bh", sinks="fp32")
    yield changed(BASE, used=(93, 1))
    yield changed(BASE, used=(0, 64), is_causal=True)
    yield changed(BASE, used=(31, 92), window_left=7, bias="bhqk:own")
    yield Case(1, 300, 128, batch=4, nheads=8, nheads_k=2, used=(300, 7, 0, 129), alibi="h")
    yield Case(200, 230, 64, nheads=1, used=(65, 190), dropout_p=0.3)
    # in fp64, dropout's factor must not be rounded to fp32
    yield changed(PACKED, nheads=3, is_causal=True, dropout_p=0.17, alibi="bh", sinks="own", lengths=((38, 47), (18, 17)))


def deterministic():
    """All gradients are bitwise identical, run to run and in both warp orders (`Backend.backward` compares)."""
    yield changed(BASE, bias="k:fp32", sinks="fp32", is_causal=True, deterministic=True)
    yield changed(BASE, bias="hqk:own", dropout_p=0.2, alibi="h", deterministic=True)
    yield changed(BASE, bias="-:fp32", softcap=3.0, headdim=128, deterministic=True)
    yield changed(PACKED, bias="hqk:fp32", sinks="own", is_causal=True, deterministic=True)
    yield changed(PACKED, used=(30, 0, 65, 5, 0, 0, 1, 130), dropout_p=0.2, deterministic=True)


SINGLES, PAIRS, SIZES, BIASES, VARLEN, DETERMINISTIC = (
    list(dict.fromkeys(f())) for f in (singles, pairs, sizes, biases, lengths, deterministic)
)


#: Queries, keys and slopes of ALiBi by name.
SLOPES = {
    # biases of up to 15,000 must not be added before the products: fp32 would lose bits
    "far before the keys": (30000, 16, [0.5]),
    # scores grow with the distance, so a row's maximum also moves where the terms' sign changes, at the diagonal
    "negative": (128, 128, [-1.0, -2.0]),
}


@pytest.mark.parametrize("headdim", [32, 64, 128])
@pytest.mark.parametrize("name", SLOPES)
@on("sim", "cuda")
def test_unusual_biases_of_alibi(backend, name, headdim):
    seqlen_q, seqlen_k, slopes = SLOPES[name]
    q, k, v = (backend.randn(1, n, len(slopes), headdim) for n in (seqlen_q, seqlen_k, seqlen_k))
    q, options = q / 8 if name == "negative" else q, {"alibi_slopes": torch.tensor(slopes, device=backend.device)}
    ref = reference.forward(q.double(), k.double(), v.double(), **options)
    error = reference.rms_error(backend.forward(q, k, v, **options)[0], ref.out)
    assert error <= 2 * reference.forward_budget(ref, q, k, v, **options).eager_rms


@on_cases(
    (["cpu-fp32", "cpu-fp64", "cpu-fp16", *KERNELS], [*SINGLES, *VARLEN, *BIASES]),
    (["cpu-fp32", *KERNELS], [*PAIRS, *SIZES]),
    (["cpu-bf16", *BF16_KERNELS], [*SINGLES[::4], *VARLEN[::4], *BIASES[::6], Case(60, 70, 128, is_causal=True)]),
    (KERNELS, DETERMINISTIC),
)
def test_problem(backend, case):
    check_case(backend, case)


@pytest.mark.parametrize("sinks", ["", "fp32"], ids=["plain", "sinks"])
@pytest.mark.parametrize("hidden_by", ["mask", "bool", "bias", "seqused_k"])
@on(*ALL)
def test_rows_without_a_key(backend, hidden_by, sinks):
    """out and dq are exactly 0; softmax_lse is +inf, or the sink."""
    tensors, options = Case(70, 40, 64, nheads=2, sinks=sinks, is_causal=hidden_by == "mask").problem(backend)
    rows, entries = slice(0, 30), slice(None)
    visible = torch.arange(70, device=backend.device)[:, None] >= 30
    if hidden_by == "bool":
        options["attn_bias"] = visible.expand(2, 1, 70, 40).contiguous()
    elif hidden_by == "bias":
        options["attn_bias"] = torch.zeros(1, 2, 70, 1, device=backend.device).masked_fill(~visible, -math.inf)
    elif hidden_by == "seqused_k":
        options["seqused_k"] = backend.ints([0, 40])
        rows, entries = slice(None), slice(0, 1)
    out, lse, dq, *_ = check(backend, *tensors, **options)
    assert (out[entries, rows] == 0).all() and (dq[entries, rows] == 0).all()
    expected = options["sinks"][None, :, None] if sinks else torch.tensor(math.inf, device=backend.device)
    found = lse[entries, :, rows]
    torch.testing.assert_close(found, expected.to(found.dtype).expand_as(found))  # not equal: kernels compute it in log2 units


#: Masks by name: whether a row sees a key.
HIDING = {
    "left padding": lambda rows, keys: keys >= 70,
    "band": lambda rows, keys: (rows - keys).abs() < 20,
    "whole rows": lambda rows, keys: (rows > 10) & (keys > -1),
}


@pytest.mark.parametrize("number", [-1.2e7, -1e8, -1e9, -1e10, -1e30, torch.finfo(torch.float32).min])
@pytest.mark.parametrize("visible", HIDING)
@on("cpu-fp32", "cpu-fp16", *KERNELS)
def test_finite_numbers_that_hide(backend, visible, number):
    """Large negative numbers in a bias, as masks often have them, hide keys bitwise as -inf does."""
    q, k, v, dout = Case(90, 100, 64, nheads=2, nheads_k=1).inputs(backend)
    seen = HIDING[visible](torch.arange(90)[:, None], torch.arange(100)).to(backend.device)
    bias = backend.randn(1, 2, 90, 100).float()

    found, expected = (backend.results(q, k, v, dout, attn_bias=bias.masked_fill(~seen, x)) for x in (number, -math.inf))
    assert all(t.isfinite().all() for t in (found[0], *found[2:]))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("number", [-1e4, -3e4, 1e9, math.inf])
@on("cpu-fp32", *KERNELS)
def test_large_numbers_in_a_bias(backend, number):
    """Large negative biases leave part of the scores visible. A large positive one gives all attention to its key, +inf gives NaN."""
    (q, k, v, dout), options = Case(90, 100, 64, nheads=2, nheads_k=1, bias="hqk:fp32").problem(backend)
    if number < 0:
        options["attn_bias"][:, :, :, :70] = number
        options["attn_bias"][:, :, 20:30] = number
        check(backend, q, k, v, dout, **options)
    else:
        options["attn_bias"][:, :, 20:30, 40] = number
        out, _ = backend.forward(q, k, v, **options)
        if number < math.inf:
            right = v[:, 40][:, None].expand(2, 10, 2, 64)
            torch.testing.assert_close(out[:, 20:30], right, rtol=2e-3, atol=1e-6)  # two eps of fp16
        else:
            assert out[:, 20:30].isnan().all() and out[:, :20].isfinite().all()


@pytest.mark.parametrize("scale, number, headdim", [(1.0, 2e18, 256), (1.0, 9e17, 512), (100.0, 9e17, 16), (100.0, 9e16, 512)])
@on("cpu-fp32")
def test_an_infinite_score_of_a_hidden_key(backend, scale, number, headdim):
    """A hidden key with an infinite score changes no gradient. dk is 0 up to the rounding of dP - delta: four rows of |dP| up to 100."""
    q, k, v, dout = Case(4, 2, headdim, batch=1, nheads=1).inputs(backend)
    q, k = torch.full_like(q, number), torch.zeros_like(k)
    k[:, 1] = number
    options = {"softmax_scale": scale, "attn_bias": torch.tensor([True, False]).view(1, 1, 1, 2)}
    out, lse = backend.forward(q, k, v, **options)
    dq, dk, dv = backend.backward(dout, q, k, v, out, lse, **options)[0]
    assert (dk / (scale * number)).abs().max() < 4 * 100 * torch.finfo(torch.float32).eps
    torch.testing.assert_close(dv[:, 0], dout.sum(1))
    assert all((zero == 0).all() for zero in (dq, dk[:, 1], dv[:, 1]))


@pytest.mark.parametrize("options", [{}, {"dropout_p": 0.2}, {"softcap": 3.0}], ids=str)
@pytest.mark.parametrize("deterministic", [False, True], ids=["", "deterministic"])
@on("cpu-fp32", *KERNELS, *FP32_KERNELS)
def test_infinity_stays_in_its_row(backend, options, deterministic):
    """An infinite gradient of one row reaches that row's dq and the keys, not other rows or heads."""
    q, k, v, dout = Case(70, 70, 64, batch=1, nheads=2, nheads_k=1).inputs(backend)
    dout[0, 0, 0, 0] = math.inf
    out, lse, rng_state = backend.forward_and_state(q, k, v, **options)
    for dq, *_ in backend.backward(dout, q, k, v, out, lse, rng_state=rng_state, deterministic=deterministic, **options):
        assert not dq[0, 0, 0].isfinite().any()
        dq[0, 0, 0] = 0
        assert dq.isfinite().all()


@pytest.mark.parametrize("is_causal", [False, True])
@on("cpu-fp32", "cpu-fp64", *KERNELS)
def test_a_sink_of_minus_infinity(backend, is_causal):
    """A sink of -inf is no sink, also in rows without visible keys and in a problem without keys."""
    q, k, v, dout = Case(30, 20, 64, nheads=2).inputs(backend)
    sinks = torch.tensor([-math.inf, 0.5], device=backend.device)
    out, lse = backend.forward(q, k, v, sinks=sinks, is_causal=is_causal)
    plain, plain_lse = backend.forward(q, k, v, is_causal=is_causal)
    torch.testing.assert_close(out[:, :, 0], plain[:, :, 0], rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(lse[:, 0], plain_lse[:, 0])
    assert lse[:, 1].isfinite().all()
    [(*gradients, dsinks), *_] = backend.backward(dout, q, k, v, out, lse, sinks=sinks, is_causal=is_causal)
    assert dsinks[0] == 0 and dsinks[1] != 0 and all(g.isfinite().all() for g in gradients)
    _, lse = backend.forward(q, k[:, :0], v[:, :0], sinks=sinks)
    assert (lse[:, 0] == math.inf).all() and (lse[:, 1] == 0.5).all()


@on("cpu-fp32", *KERNELS)
def test_neighbors_of_a_packed_sequence_may_hold_nan(backend):
    """Neighbors of a sequence, NaN in all their rows, change no bit of its results."""
    (q, k, v, dout), options = changed(PACKED, is_causal=True).problem(backend)
    expected = backend.results(q, k, v, dout, **options)
    cu_q, cu_k = options["cu_seqlens_q"].tolist(), options["cu_seqlens_k"].tolist()
    rows, keys = slice(cu_q[2], cu_q[3]), slice(cu_k[2], cu_k[3])

    def poisoned(t, keep):
        spoiled = torch.full_like(t, math.nan)
        spoiled[keep] = t[keep]
        return spoiled

    found = backend.results(poisoned(q, rows), poisoned(k, keys), poisoned(v, keys), poisoned(dout, rows), **options)
    own = {"out": rows, "softmax_lse": (slice(None), rows), "dq": rows, "dk": keys, "dv": keys}
    for (name, part), a, b in zip(own.items(), found, expected, strict=True):
        assert torch.equal(a[part], b[part]), name


@pytest.mark.parametrize("layout", ["heads_first", "slices"])
@on("cpu-fp32", *KERNELS)
def test_strides_of_packed_tensors(backend, layout):
    """A strided view gives bitwise the results of its contiguous copy."""
    (q, k, v, dout), options = Case(headdim=64, nheads=2, lengths=((20, 20), (33, 33)), is_causal=True).problem(backend)
    expected = backend.results(q, k, v, dout, **options)
    if layout == "heads_first":
        q, k, v, dout = (t.transpose(0, 1).contiguous().transpose(0, 1) for t in (q, k, v, dout))
    else:
        q, k, v = torch.stack([q, k, v], 1).unbind(1)
    assert all(map(torch.equal, backend.results(q, k, v, dout, **options), expected))


#: Sequences by backend: more than 10,000, or what the simulator runs in seconds.
MANY = {"cpu-fp32": 10_001, "sim": 550, "cuda": 10_001}


@on(*MANY)
def test_many_short_sequences(backend):
    numbers = random.Random(7)
    # only 12 different lengths, because `check` computes the reference of all sequences of one length at once
    different = [(numbers.randrange(0, 17), numbers.randrange(0, 17)) for _ in range(12)]
    lengths = tuple(numbers.choice(different) for _ in range(MANY[backend.name]))
    check_case(backend, Case(headdim=32, nheads=2, nheads_k=1, lengths=lengths, is_causal=True))


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
@on("cuda")
def test_more_entries_than_a_grid_has(backend, packed):
    """A grid has at most 65535 entries in its third dimension, so two launches run, which share scratch memory."""
    entries = 70_000
    case = Case(2, 3, 8, batch=entries, nheads=1, sinks="fp32", alibi="bh", dropout_p=0.2, bias="qk:fp32")
    if packed:
        case = changed(case, lengths=((2, 3), (1, 3)) * (entries // 2))
    check_case(backend, case)


@on("sim-bf16", "cuda-bf16")
def test_more_heads_than_casts_take(backend):
    """The cast to fp16 has the heads of q, k and v on one axis of its grid."""
    backend.simulate()
    q = backend.randn(1, 1, 22_000, 8)
    with pytest.raises(ValueError, match=r"q, k and v: got 22000 heads of q and 22000 of k in BFloat16, expected at most 65535 heads"):
        torch.ops.volta_fa.fwd(q, q, q)


# ---- bf16, scaled and converted around the kernels ------------------------------------------------------------------


#: Problems with keys beyond seqused_k.
UNUSED = [
    changed(BASE, used=(31, 92)),
    changed(BASE, used=(0, 64), headdim=128, is_causal=True, sinks="fp32"),
    changed(PACKED, used=(30, 0, 65, 5, 0, 0, 1, 129)),
    changed(PACKED, used=(33, 1, 0, 0, 0, 0, 64, 130), bias="hqk:fp32"),
]


@pytest.mark.parametrize("junk", [1e9, 1e30, math.inf, math.nan])
@on_cases((["cpu-fp32", *KERNELS, *BF16_KERNELS], UNUSED))
def test_unused_keys_may_hold_anything(backend, case, junk):
    """Keys beyond seqused_k may be large, infinite or NaN. They do not even change the powers of two that scale bf16 tensors."""
    (q, k, v, dout), options = case.problem(backend)
    unused = reference.unused_keys(reference.groups(q, k, **options), k)
    expected = backend.results(q, k, v, dout, **options)
    assert expected[0].any() and all(t.any() for t in expected[2:])
    for t in (k, v):
        t.view(-1, *t.shape[-2:])[unused] = junk
    torch.testing.assert_close(backend.results(q, k, v, dout, **options), expected, rtol=0, atol=0)


#: By name: a case, and a view of one batch entry, or of one KV head with its query heads.
PARTS = {
    "entry": (BASE, lambda t: t[1]),
    "head": (BASE, lambda t: t.unflatten(-2, (2, -1))[..., 1, :, :]),
    "head-128": (changed(BASE, headdim=128, is_causal=True), lambda t: t.unflatten(-2, (2, -1))[..., 1, :, :]),
    "packed-head": (changed(PACKED, nheads=4, nheads_k=2), lambda t: t.unflatten(-2, (2, -1))[..., 1, :, :]),
}


@pytest.mark.parametrize("exponents", [(30, 30), (-40, 0), (100, -100), (-90, 120)], ids=str)
@pytest.mark.parametrize("part", PARTS)
@on(*BF16_KERNELS)
def test_parts_of_different_size(backend, part, exponents):
    """Powers of two in one part's v and dout multiply this part's results exactly, and change no bit of others."""
    case, part = PARTS[part]
    (q, k, v, dout), options = case.problem(backend)
    out, lse, dq, dk, dv = backend.results(q, k, v, dout, **options)
    of_v, of_dout = (2.0**e for e in exponents)
    part(v).mul_(of_v)
    part(dout).mul_(of_dout)
    part(out).mul_(of_v)
    part(dv).mul_(of_dout)
    for t in (dq, dk):
        part(t).mul_(of_v).mul_(of_dout)
    torch.testing.assert_close(backend.results(q, k, v, dout, **options), [out, lse, dq, dk, dv], rtol=0, atol=0)


#: A problem, and the largest ratios of a result's rms error to bf16's rounding error of the exact result, and to eager attention's error.
PRECISION = [
    (Case(256, 256, 64, batch=1), 1.1, 0.55),
    (Case(256, 256, 64, batch=1, is_causal=True), 1.3, 0.6),
    (Case(256, 256, 128, batch=1), 1.1, 0.55),
    # scores of several units: dq and dk depend on how bf16 rounds out
    (Case(256, 256, 64, batch=1, spread=3.0), math.inf, 0.3),
]


@pytest.mark.parametrize("case,of_rounding,of_eager", PRECISION, ids=lambda x: str(x) if isinstance(x, Case) else "")
@on(*BF16_KERNELS)
def test_precision_of_bf16(backend, case, of_rounding, of_eager):
    """The test prints the figures of docs/design/numerics.md."""
    (q, k, v, dout), options = case.problem(backend)
    v /= case.spread
    found = backend.results(q, k, v, dout, **options)
    exact = [reference.forward(q, k, v, **options).out, *reference.backward(dout, q, k, v, **options)]
    eager = [reference.eager(q, k, v, **options), *reference.eager_gradients(dout, q, k, v, **options)]
    for name, f, r, e in zip(("out", "dq", "dk", "dv"), [found[0], *found[2:]], exact, eager, strict=True):
        error, rounding, eagers = (reference.rms_error(x, r) for x in (f, r.to(q.dtype), e))
        print(f"{case} {name}: {error / rounding:.3f} of rounding, {error / eagers:.3f} of eager")
        assert error <= of_rounding * rounding and error <= of_eager * eagers, name


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@on(*BF16_KERNELS)
def test_an_element_of_v_that_is_not_finite(backend, value):
    """Its column is like it in the heads that read it, and nothing else is different."""
    q, k, v, _ = BASE.inputs(backend)
    v[0, 80, 1, 5] = 0.0
    expected, _ = backend.forward(q, k, v)
    v[0, 80, 1, 5] = value
    out, _ = backend.forward(q, k, v)
    at = (0, slice(None), slice(2, 4), 5)
    torch.testing.assert_close(out[at], torch.full_like(out[at], value), equal_nan=True)
    out[at] = expected[at]
    assert torch.equal(out, expected)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("headdim", [32, 64, 128])
@on(*BF16_KERNELS)
def test_sums_beyond_fp16(backend, headdim, deterministic):
    """1100 rows whose parts of dk agree: scaled like v and dout, their sum is more than 65504.

    P is 1/2 and dP - delta is +-headdim, so a row adds +-headdim / 2 / sqrt(headdim) to dk."""
    q = torch.ones(1, 1100, 1, headdim, dtype=backend.dtype, device=backend.device)
    k = torch.zeros(1, 2, 1, headdim, dtype=backend.dtype, device=backend.device)
    v = torch.ones_like(k)
    v[:, 1] = -1.0
    _, _, _, dk, _ = check(backend, q, k, v, torch.ones_like(q), deterministic=deterministic)
    torch.testing.assert_close(dk, 550.0 * math.sqrt(headdim) * v, rtol=2**-8, atol=0.0)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("headdim", [32, 64, 128])
@on(*BF16_KERNELS)
def test_rounding_to_bf16(backend, headdim, deterministic):
    """One key has all the attention, so that dv is the sum of the rows of dout, rounded once: to nearest, ties to even."""
    q, k, v, dout = Case(2, 1, headdim, batch=4, nheads=1).inputs(backend)
    half_a_unit = 2.0**-8
    dout[0, 0] = 1.0 + torch.arange(headdim, device=backend.device)[None, :] / 128
    dout[0, 1] = half_a_unit
    dout[0, 1, :, ::3] = -half_a_unit
    dout[1] = 3.0e38  # to infinity
    dout[1, :, :, ::2] *= -1.0
    dout[2, 0, 0, :3] = torch.tensor([math.inf, -math.inf, math.nan], device=backend.device)
    out, lse = backend.forward(q, k, v)
    for _, _, dv in backend.backward(dout, q, k, v, out, lse, deterministic=deterministic):
        torch.testing.assert_close(dv, dout.float().sum(1, keepdim=True).to(dv.dtype), rtol=0.0, atol=0.0, equal_nan=True)


# ---- dropout's random numbers; test_dropout.py has the rest ------------------------------------------------------------

# Known answers of Random123's kat_vectors, philox4x32 with 7 rounds: (counter, key, result)
KNOWN = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "5f6fb709 0d893f64 4f121f81 4f730a48"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "5207ddc2 45165e59 4d8ee751 8c52f662"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "4dfccaba 190a87f0 c47362ba b6b5242a"),
]


@pytest.mark.parametrize("counter,key,result", KNOWN)
def test_the_reference_is_philox(counter, key, result):
    c, k, r = ([int(word, 16) for word in words.split()] for words in (counter, key, result))
    assert reference.philox(k[0] | k[1] << 32, c[3], *(torch.tensor(x) for x in c[:3])).tolist() == r


@pytest.mark.parametrize("seed,offset", [(0, 0), (1, 2), (2**63 - 1, 2**63 - 1), (0xDEADBEEF12345678 - 2**64, 2**40 + 3)])
@pytest.mark.parametrize("p", [0.37, 0.5, 0.83])
def test_the_library_is_philox(seed, offset, p):
    """The library's dropout mask is the reference's, also for seeds and offsets that do not fit 32 bits."""
    shape = (3, 5, 19, 41)  # batch, nheads, seqlen_q, seqlen_k
    state = torch.tensor([seed, offset])
    assert torch.equal(op._dropout_mask(state, *shape, p), reference.kept(state, torch.arange(3), *shape[1:], p))
