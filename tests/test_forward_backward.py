"""Forward and backward against the fp64 reference, on every backend.

The rule for kernels is that of this field: the largest error of a result is at most twice (gradients: three times)
that of PyTorch's own fp16 eager attention on the same inputs, both against fp64; see `volta_fa.check.tolerance.Budget`.
"""

import json
import math

import pytest
import torch

import reference
from conftest import ALL, KERNELS, Case, assert_same_bits, check, judge, on, on_cases

HEADDIMS = [8, 40, 64, 72, 96, 104, 128, 136, 192, 256]
SEQLENS = [(q, k) for q in (1, 17, 113) for k in (1, 33, 255)]


def shapes():
    """Every pair of lengths, causal and not; every headdim, with lengths that take turns."""
    for i, (q, k) in enumerate(SEQLENS):
        yield Case(q, k, 64, is_causal=i % 2 == 0)
        yield Case(q, k, 40, 72, is_causal=i % 2 == 1, batch=1)
    for i, d in enumerate(HEADDIMS):
        yield Case(*SEQLENS[(4 + i) % 9], d, is_causal=True, batch=1)
        yield Case(*SEQLENS[(8 + 2 * i) % 9], d, is_causal=False, batch=1)


MIXED_HEADDIMS = [
    Case(45, 70, qk, v, batch=1, is_causal=True)
    for qk, v in [(192, 128), (128, 192), (64, 128), (128, 64), (8, 256), (256, 8), (40, 104), (96, 64), (72, 24)]
]

# Not multiples of 8: padded in the op, whose default scale is that of the given headdim.
ODD_HEADDIMS = [
    Case(37, 50, qk, v, batch=1, is_causal=True, **options)
    for qk, v, options in [(20, 20, {}), (13, 57, {}), (1, 8, {}), (64, 3, {"nheads": 4, "nheads_k": 2}), (121, 66, {}), (250, 255, {})]
]

GROUPS = [
    Case(37, 50, 64, nheads=4, nheads_k=2),
    Case(37, 50, 64, nheads=6, nheads_k=2, is_causal=True),
    Case(50, 37, 128, nheads=5, nheads_k=1, is_causal=True, batch=1),
    Case(1, 90, 128, nheads=8, nheads_k=2, batch=3),
    Case(20, 20, 96, 40, nheads=3, nheads_k=1, window_left=5, window_right=2),
]

MASKS = [
    # more queries than keys: the first rows see nothing
    Case(70, 40, 64, is_causal=True),
    Case(140, 9, 40, is_causal=True, batch=1),
    Case(33, 100, 64, window_left=0, window_right=0),
    Case(100, 100, 64, window_left=16),
    Case(100, 100, 64, window_right=16),
    Case(90, 140, 64, window_left=30, window_right=20),
    Case(100, 100, 64, window_left=7, is_causal=True),
    # is_causal overrides the right bound
    Case(60, 60, 64, window_left=20, window_right=0, is_causal=True),
    # the window ends before the first key or after the last one for some rows
    Case(150, 20, 64, window_left=3, window_right=3, batch=1),
    Case(20, 150, 64, window_left=3, window_right=1, batch=1),
    Case(65, 65, 128, window_left=1000, window_right=1000, batch=1),
    Case(65, 65, 64, window_left=2**40, window_right=2**62, batch=1),
    Case(200, 230, 192, window_left=33, window_right=1, batch=1, nheads=1),
    Case(64, 64, 256, window_left=2, window_right=2, batch=1, nheads=1),
]

SCALES = [
    Case(40, 50, 64, softmax_scale=0.0),
    Case(40, 50, 64, softmax_scale=-0.125),
    Case(40, 50, 64, softmax_scale=-0.3, is_causal=True),
    Case(40, 50, 64, softmax_scale=1.0),
    Case(40, 50, 64, softmax_scale=1e-4),
    # nearly one-hot rows: a probability of almost 1 beside ones that underflow
    Case(40, 50, 64, softmax_scale=8.0, is_causal=True),
    Case(40, 70, 128, spread=1e-3),
    Case(40, 70, 64, spread=1e-3, is_causal=True),
    Case(40, 70, 64, spread=30.0),
    Case(40, 70, 128, spread=30.0, is_causal=True),
]

# many tiles of rows and keys
REAL = [
    *(Case(n, n, d, batch=1, nheads=1, is_causal=c) for n, d in [(1024, 64), (511, 128), (333, 256)] for c in (False, True)),
    Case(300, 700, 128, batch=1, nheads=8, nheads_k=2, is_causal=True),
    Case(700, 300, 32, nheads=3, window_left=120, window_right=40),
]


@on_cases((ALL, [*shapes(), *MIXED_HEADDIMS, *ODD_HEADDIMS, *GROUPS, *MASKS, *SCALES]), (["cpu-fp32", "cpu-bf16", *KERNELS], REAL))
def test_problem(backend, case):
    q, k, v, dout = case.inputs(backend)
    check(backend, q, k, v, dout, **case.options)


# ---- the GPU list -------------------------------------------------------------------------------------------------

GPU_CASES = [
    Case(m, n, d, batch=b, nheads=h, is_causal=c)
    for shapes_ in (
        [(1, 1, n, n, n) for n in (16, 32, 64, 128, 256)],
        [(1, 16, 1024, 1024, d) for d in (64, 128, 256)],
        [(1, 32, 2048, 2048, d) for d in (128, 256)],
        [(2, 6, m, n, d) for m in (1, 17, 113, 1000) for n in (1, 33, 255, 1023) for d in (40, 64, 96, 128, 192, 256)],
    )
    for b, h, m, n, d in shapes_
    for c in (False, True)
]


@on_cases((["cuda"], GPU_CASES))
def test_gpu_list(backend, case):
    q, k, v, dout = case.inputs(backend)
    # a head's share at a time: the reference holds several (heads, seqlen_q, seqlen_k) fp64 matrices
    heads = max(1, 2**26 // (case.batch * case.seqlen_q * case.seqlen_k))
    whole = check_whole(backend, q, k, v, dout, **case.options)
    for h in range(0, case.nheads, heads):
        part = slice(h, h + heads)
        compare_with_fp64(backend, [t[:, :, part] for t in (q, k, v, dout)], whole, part, case.options)


def check_whole(backend, q, k, v, dout, **options):
    out, lse = backend.forward(q, k, v, **options)
    return out, lse, backend.backward(dout, q, k, v, out, lse, **options)


def compare_with_fp64(backend, inputs, whole, part, options):
    q, k, v, dout = inputs
    out, lse, runs = whole
    results = {"out": out[:, :, part], "softmax_lse": lse[:, part]}
    exact = reference.exact(q, k, v, **options)
    judge(backend, exact.forward(), results)
    parts = exact.backward(dout, results["out"])
    for gradients in runs:
        judge(backend, parts, {name: g[:, :, part] for name, g in zip(("dq", "dk", "dv"), gradients)})


# ---- layouts ------------------------------------------------------------------------------------------------------


def _strided(backend, case, layout):
    q, k, v, dout = case.inputs(backend)
    if layout == "heads_first":  # (B, H, S, D) memory, seen as (B, S, H, D)
        return [t.transpose(1, 2).contiguous().transpose(1, 2) for t in (q, k, v, dout)]
    if layout == "packed_qkv":  # slices of one projection (B, S, 3, H, D)
        return [*torch.stack([q, k, v], dim=2).unbind(2), dout]
    if layout == "sliced":  # every dimension a slice of something larger

        def inside(t):
            b, s, h, d = t.shape
            big = torch.full((b + 1, s + 3, h + 2, d + 16), float("nan"), dtype=t.dtype, device=t.device)
            view = big[1:, 2 : s + 2, :h, 8 : d + 8]
            view.copy_(t)
            return view

        return [inside(t) for t in (q, k, v, dout)]
    if layout == "odd_strides":  # rows that do not start on 16 bytes

        def odd(t):
            b, s, h, d = t.shape
            view = torch.empty(b, s, h, d + 3, dtype=t.dtype, device=t.device)[..., :d]
            view.copy_(t)
            return view

        return [odd(t) for t in (q, k, v, dout)]
    if layout == "expanded":  # stride 0 over batch, keys' heads and output rows
        return [q[:1].expand_as(q), k[:, :, :1].expand_as(k), v[:1, :, :1].expand_as(v), dout[:, :1].expand_as(dout)]
    if layout == "reversed_batch_order":  # (S, B, H, D) memory
        return [t.transpose(0, 1).contiguous().transpose(0, 1) for t in (q, k, v, dout)]
    raise AssertionError(layout)


@pytest.mark.parametrize("layout", ["heads_first", "packed_qkv", "sliced", "odd_strides", "expanded", "reversed_batch_order"])
@on(*ALL)
def test_layouts(backend, layout):
    """A strided view gives, to the bit, what its contiguous copy gives."""
    case = Case(40, 40, 64, nheads=4, is_causal=True)
    q, k, v, dout = _strided(backend, case, layout)
    out, lse = check(backend, q, k, v, **case.options)
    dense = [t.contiguous() for t in (q, k, v, dout)]
    dense_out, dense_lse = backend.forward(*dense[:3], **case.options)
    assert torch.equal(out, dense_out) and torch.equal(lse, dense_lse)
    [strided, *_] = backend.backward(dout, q, k, v, out, lse, **case.options)
    [plain, *_] = backend.backward(dense[3], *dense[:3], dense_out, dense_lse, **case.options)
    for name, a, b in zip(("dq", "dk", "dv"), strided, plain):
        if name == "dq" and backend.name == "cuda":  # summed by atomics
            torch.testing.assert_close(a, b, rtol=2e-3, atol=1e-3)
        else:
            assert torch.equal(a, b), name
        assert a.is_contiguous()


@on(*ALL)
def test_strided_saved_tensors(backend):
    """out and softmax_lse need not come back to bwd as fwd left them."""
    case = Case(40, 50, 64)
    q, k, v, dout = case.inputs(backend)
    out, lse = backend.forward(q, k, v)
    [expected, *_] = backend.backward(dout, q, k, v, out, lse)
    far_out = torch.stack([out, out], 3)[:, :, :, 1]
    far_lse = torch.stack([lse, lse], -1)[..., 0]
    [found, *_] = backend.backward(dout, q, k, v, far_out, far_lse)
    for a, b in zip(found, expected):
        torch.testing.assert_close(a, b, rtol=2e-3 if backend.name == "cuda" else 0, atol=1e-3 if backend.name == "cuda" else 0)


@on(*ALL)
def test_inputs_are_left_alone(backend):
    case = Case(40, 50, 64, softmax_scale=-0.2)
    tensors = case.inputs(backend)
    q, k, v, dout = tensors
    out, lse = backend.forward(q, k, v, **case.options)
    before = [t.clone() for t in (*tensors, out, lse)]
    backend.backward(dout, q, k, v, out, lse, **case.options)
    for t, b in zip((*tensors, out, lse), before):
        assert torch.equal(t, b)


# ---- empty problems -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch,seqlen_q,seqlen_k,nheads", [(0, 5, 6, 2), (2, 0, 6, 2), (2, 5, 0, 2), (2, 0, 0, 2), (2, 5, 6, 0)])
@on(*ALL)
def test_empty(backend, batch, seqlen_q, seqlen_k, nheads):
    q = backend.randn(batch, seqlen_q, nheads, 64)
    k, v = backend.randn(batch, seqlen_k, nheads, 64), backend.randn(batch, seqlen_k, nheads, 32)
    out, lse = backend.forward(q, k, v)
    assert out.shape == (batch, seqlen_q, nheads, 32) and (out == 0).all()
    assert lse.shape == (batch, nheads, seqlen_q) and (lse == math.inf).all()
    for gradients in backend.backward(torch.ones_like(out), q, k, v, out, lse):
        for g, t in zip(gradients, (q, k, v)):
            assert g.shape == t.shape and (g == 0).all()


@on(*ALL)
def test_every_row_masked(backend):
    """A window that no key is in: seqlen_q far beyond seqlen_k, and only the last rows would see any."""
    case = Case(90, 3, 64, window_left=1, window_right=0)
    q, k, v, dout = case.inputs(backend)
    out, lse, dq, dk, dv = check(backend, q, k, v, dout, **case.options)
    assert (lse[..., :87] == math.inf).all() and lse[..., 87:].isfinite().all()


# ---- infinities and NaN -------------------------------------------------------------------------------------------

POISON = {
    "q+inf": ("q", math.inf),
    "q-inf": ("q", -math.inf),
    "k+inf": ("k", math.inf),
    "k-inf": ("k", -math.inf),
    "v+inf": ("v", math.inf),
    "v-inf": ("v", -math.inf),
    "qnan": ("q", math.nan),
    "knan": ("k", math.nan),
    "vnan": ("v", math.nan),
}


@pytest.mark.parametrize("poison", POISON)
@on(*ALL)
def test_infinities_and_nan(backend, poison):
    """As PyTorch's math SDPA treats them: infinite and NaN where it is, and nowhere else."""
    case = Case(37, 45, 64, batch=1, nheads=1)
    q, k, v, _ = case.inputs(backend)
    name, value = POISON[poison]
    {"q": q, "k": k, "v": v}[name][0, 20, 0, 5] = value
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        heads = [t.double().transpose(1, 2) for t in (q, k, v)]
        expected = torch.nn.functional.scaled_dot_product_attention(*heads).transpose(1, 2)
    out, _ = backend.forward(q, k, v)
    assert torch.equal(out.isnan(), expected.isnan())
    assert torch.equal(out.isposinf(), expected.isposinf()) and torch.equal(out.isneginf(), expected.isneginf())
    finite = expected.isfinite()
    torch.testing.assert_close(out.double()[finite], expected[finite], rtol=1e-2, atol=2e-2)


@on(*ALL)
def test_minus_infinity_everywhere(backend):
    """Scores of -inf in a whole row: PyTorch's safe softmax makes them a row of zeros."""
    q, k, v = backend.randn(1, 3, 1, 64).abs(), backend.randn(1, 5, 1, 64).abs(), backend.randn(1, 5, 1, 64)
    q[0, 1, 0, :] = -math.inf
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        heads = [t.double().transpose(1, 2) for t in (q, k, v)]
        expected = torch.nn.functional.scaled_dot_product_attention(*heads).transpose(1, 2)
    out, lse = backend.forward(q, k, v)
    torch.testing.assert_close(out.double(), expected, rtol=1e-2, atol=2e-2, equal_nan=True)
    assert lse[0, 0, [0, 2]].isfinite().all()


@on(*ALL)
def test_poison_behind_the_mask(backend):
    """What a row does not see cannot touch it, whatever it is: NaN in k, and in rows of q next to it."""
    case = Case(50, 50, 64, is_causal=True)
    q, k, v, _ = case.inputs(backend)
    clean, clean_lse = backend.forward(q, k, v, **case.options)
    k = k.clone()
    k[:, 30] = math.nan
    out, lse = backend.forward(q, k, v, **case.options)
    assert torch.equal(out[:, :30], clean[:, :30]) and torch.equal(lse[..., :30], clean_lse[..., :30])
    assert out[:, 30:].isnan().all()


@on(*ALL)
def test_scores_far_beyond_fp16(backend):
    """Scores up to 1e6, of both signs: each row is its largest key's value, and gradients are finite."""
    case = Case(40, 60, 64, spread=100.0, is_causal=True)
    q, k, v, dout = case.inputs(backend)
    out, lse = backend.forward(q, k, v, **case.options)
    ref = reference.forward(q, k, v, **case.options)
    torch.testing.assert_close(out.double(), ref.out, rtol=1e-2, atol=5.0 if backend.dtype != torch.float64 else 1e-6)
    for gradients in backend.backward(dout, q, k, v, out, lse, **case.options):
        assert all(g.isfinite().all() for g in gradients)


# ---- huge tensors -------------------------------------------------------------------------------------------------


@on("cuda")
def test_strides_beyond_2_31_elements(backend):
    """Views into one storage of more than 2^31 elements, with strides that only 64 bits hold."""
    gib = 2**30
    if torch.cuda.mem_get_info()[0] < 24 * gib:
        pytest.skip("needs 24 GiB of free GPU memory")
    batch_stride = 2**31 + 64
    storage = torch.empty(2 * batch_stride, dtype=torch.float16, device="cuda")
    case = Case(70, 90, 64, nheads=4, nheads_k=2, is_causal=True)
    views, start = [], 0
    for t in case.inputs(backend):
        b, s, h, d = t.shape
        view = storage.as_strided((b, s, h, d), (batch_stride, h * d, d, 1), start)
        view.copy_(t)
        views.append(view)
        start += s * h * d
    q, k, v, dout = views
    check(backend, q, k, v, dout, **case.options)


@on("cuda")
@pytest.mark.slow
def test_more_than_2_31_elements(backend):
    """Whole tensors of more than 2^31 elements; a narrow window keeps the work linear."""
    gib = 2**30
    seqlen, nheads, headdim = 2**17 + 9, 128, 128
    bytes_of_one = 2 * seqlen * nheads * headdim
    assert bytes_of_one / 2 > 2**31
    if torch.cuda.mem_get_info()[0] < 14 * bytes_of_one + 2 * gib:
        pytest.skip(f"needs {(14 * bytes_of_one + 2 * gib) / gib:.0f} GiB of free GPU memory")
    window = {"window_left": 6, "window_right": 0}

    def randn():
        # 2^31 elements are too many for one call of the generator
        t = torch.empty(1, seqlen, nheads, headdim, dtype=torch.float16, device="cuda")
        for h in range(0, nheads, 16):
            t[:, :, h : h + 16].copy_(torch.randn(1, seqlen, 16, headdim, device="cuda", generator=backend.generator))
        return t

    q, k, v, dout = randn(), randn(), randn(), randn()
    out, lse, _ = torch.ops.volta_fa.fwd(q, k, v, **window)
    dq, dk, dv, *_ = torch.ops.volta_fa.bwd(dout, q, k, v, out, lse, **window)
    # The last rows of the last head lie beyond 2^31 elements. A window of 7 keys needs no more than its neighbors.
    rows = slice(seqlen - 200, seqlen)
    q, k, v, dout = (t[:, rows, -1:].clone() for t in (q, k, v, dout))
    refs = [reference.forward(q, k, v, **window).out, *reference.backward(dout, q, k, v, **window)]
    for name, found, ref in zip(("out", "dq", "dk", "dv"), (out, dq, dk, dv), refs):
        # the first rows of the cut miss the keys before it
        torch.testing.assert_close(found[:, rows, -1:][:, 20:].double(), ref[:, 20:], rtol=1e-2, atol=1e-2, msg=lambda m: f"{name}: {m}")


# ---- long ---------------------------------------------------------------------------------------------------------

# A spread of 30 makes nearly one-hot rows, one of 1e-3 nearly uniform ones.
LONG = [
    Case(8192, 8192, d, batch=1, is_causal=is_causal, spread=spread)
    for d in (64, 128)
    for is_causal in (False, True)
    for spread in (1e-3, 1.0, 30.0)
]


@on_cases((["cuda"], LONG))
@pytest.mark.parametrize("deterministic", [False, True], ids=["atomics", "deterministic"])
def test_long(backend, case, deterministic):
    check(backend, *case.inputs(backend), deterministic=deterministic, **case.options)


# ---- deterministic ------------------------------------------------------------------------------------------------

DETERMINISTIC = [
    Case(113, 155, d, headdim_v=dv, batch=1, nheads=4, nheads_k=2, is_causal=is_causal)
    for d, dv in [(32, None), (40, None), (64, None), (96, 64), (128, None), (192, 128), (256, None)]
    for is_causal in (False, True)
] + [Case(141, 70, 64, batch=1, window_left=30, window_right=5), Case(1, 300, 128), Case(300, 1, 64)]


@on_cases((KERNELS, DETERMINISTIC))
@pytest.mark.parametrize("dq", ["in rounds", "by a kernel of its own"])
def test_deterministic(backend, case, dq, force):
    """dq too is bitwise identical, run to run and in both warp orders. dk and dv are those of the default mode, but for dk where one mode
    passes P through memory (docs/design/numerics.md)."""
    q, k, v, dout = case.inputs(backend)
    # a tuning tells the two ways apart; without one it is the faster
    force(choices=[{"pass": "Backward", "deterministic": True}] * (dq == "by a kernel of its own"))
    out, lse, _, dk, dv = check(backend, q, k, v, dout, deterministic=True, **case.options)
    force()
    default = backend.backward(dout, q, k, v, out, lse, **case.options)[0]
    if case.headdim <= 192:
        assert_same_bits("dk", dk, default[1])
    assert_same_bits("dv", dv, default[2])


# More blocks of keys than run at once on a V100, so that there are several launches, of which the last has smaller blocks, or fewer left
# than its grid. (Few queries: what is new is which keys a launch has.)
ROUNDS = [
    Case(9, 4 * 128 + 5, 64, batch=2, nheads=20, is_causal=True),
    Case(9, 4 * 128 + 5, 128, batch=2, nheads=20, nheads_k=10),
    Case(9, 9 * 64 + 5, 192, batch=1, nheads=20),
    Case(headdim=128, nheads=10, lengths=((9, 4 * 128 + 5), (40, 300)), is_causal=True),
]
MORE_ROUNDS = [
    Case(9, 4 * 128 + 5, 64, batch=2, nheads=20),
    Case(9, 4 * 128 + 5, 64, batch=2, nheads=20, window_left=300, window_right=9),
    Case(9, 4 * 128 + 5, 128, batch=2, nheads=10, is_causal=True),
    Case(headdim=64, nheads=20, lengths=((9, 4 * 128 + 5), (7, 130))),
]


@on_cases((["sim"], ROUNDS), (["sim-bf16"], ROUNDS[1:2]), slow=((["sim", "sim-bf16"], ROUNDS + MORE_ROUNDS),))
def test_several_launches(backend, case):
    (q, k, v, dout), options = case.problem(backend)
    packed = {"seqlen_q": 40, "seqlen_k": 4 * 128 + 5, "batch": 2}
    sizes = packed if case.lengths else {name: getattr(case, name) for name in packed}
    shape = (sizes["batch"], sizes["seqlen_q"], sizes["seqlen_k"], case.nheads, case.nheads_k or case.nheads, case.headdim, case.headdim)
    features = ",".join(["varlen"] * bool(case.lengths) + ["fp32_gradients"] * (q.dtype == torch.bfloat16))
    plans = [
        json.loads(torch.ops.volta_fa._plan(*shape, case.is_causal, deterministic=d, features=features))["backward"] for d in (True, False)
    ]
    assert (plans[0]["rounds"] > 1 or plans[0]["tail"]) and plans[0]["dq_accum_splits"] > 1, plans[0]
    out, lse, dq, *_ = check(backend, q, k, v, dout, deterministic=True, **options)
    if plans[0]["rounds"] > 1 and backend.name == "sim" and not case.lengths:
        # The simulator's blocks run one after the other, so with atomics all are added in this order: a launch's blocks must not be.
        # (Another order shows in some of 20,000 fp16 elements; the packed cases have fewer with as many blocks.)
        in_order = backend.backward(dout, q, k, v, out, lse, **options)[0][0]
        assert not torch.equal(dq, in_order), "a launch's blocks of keys share a sum"
    if plans[1]["tail"]:
        check(backend, q, k, v, dout, **options)


@on("sim", "cuda")
def test_torchs_deterministic_switch(backend):
    """torch.use_deterministic_algorithms reaches the backward pass through autograd."""
    case = Case(150, 170, 64, is_causal=True)
    q, k, v, dout = case.inputs(backend)
    gradients = []
    torch.use_deterministic_algorithms(True)
    try:
        for _ in backend._runs(q, k, v):
            leaves = [t.detach().clone().requires_grad_() for t in (q, k, v)]
            torch.ops.volta_fa.fwd(*leaves, **case.options)[0].backward(dout)
            gradients.append([t.grad for t in leaves])
    finally:
        torch.use_deterministic_algorithms(False)
    for a, b in zip(*gradients):
        assert_same_bits("gradient", a, b)


# ---- streams ------------------------------------------------------------------------------------------------------


@on("cuda")
def test_runs_on_the_current_stream(backend):
    case = Case(600, 600, 64, is_causal=True)
    q, k, v, dout = case.inputs(backend)
    expected = torch.ops.volta_fa.fwd(q, k, v, **case.options)[0]
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        late = torch.full_like(q, float("nan"))
        torch.cuda._sleep(20_000_000)
        late.copy_(q)
        out = torch.ops.volta_fa.fwd(late, k, v, **case.options)[0]
    stream.synchronize()
    assert torch.equal(out, expected)
