"""`volta_fa::fwd` and `bwd` without further features, against the fp64 reference, on every backend: CPU, simulator (`sim`), GPU (`cuda`).

The largest error of a result is at most twice (gradients: three times) that of PyTorch's eager attention in the same dtype, both against
fp64, as in flash-attn's tests (`volta_fa.check.tolerance.Budget`). `check` (conftest.py) applies this rule, and compares two runs bitwise.
`backend.forward` returns out and softmax_lse, `backend.backward` the gradients of each run. ALL: the CPU in four dtypes, and KERNELS, the
simulator and a GPU in fp16. A Case (volta_fa/check/cases.py) is a problem: seqlen_q, seqlen_k, headdim, headdim_v, and fields by name:
batch and nheads (2), options of the op, and `spread`, the standard deviation of q, k and v. `force` makes the planner take kernels;
`_plan` describes a call's kernels."""

import json
import math

import pytest
import torch

import reference
from conftest import ALL, KERNELS, Case, assert_same_bits, check, check_case, on, on_cases  # check_case: `check` of a Case

HEADDIMS = [8, 40, 64, 72, 96, 104, 128, 136, 192, 256]
#: (seqlen_q, seqlen_k).
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
    # nearly one-hot rows: a probability of almost 1 beside ones that underflow. Below, a spread of 30 makes such rows, 1e-3 uniform ones
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

#: Larger ones, with the lengths and headdims of flash-attn's tests.
GPU_CASES = [
    Case(m, n, d, batch=b, nheads=h, is_causal=c)
    for sizes in (
        [(1, 1, n, n, n) for n in (16, 32, 64, 128, 256)],
        [(1, 16, 1024, 1024, d) for d in (64, 128, 256)],
        [(1, 32, 2048, 2048, d) for d in (128, 256)],
        [(2, 6, m, n, d) for m in (1, 17, 113, 1000) for n in (1, 33, 255, 1023) for d in (40, 64, 96, 128, 192, 256)],
    )
    for b, h, m, n, d in sizes
    for c in (False, True)
]


@on_cases(
    (ALL, [*shapes(), *MIXED_HEADDIMS, *ODD_HEADDIMS, *GROUPS, *MASKS, *SCALES]),
    (["cpu-fp32", "cpu-bf16", *KERNELS], REAL),
    (["cuda"], GPU_CASES),
)
def test_problem(backend, case):
    check_case(backend, case)


def inside(t):
    """Returns a copy of t that is in every dimension a slice of something larger, with NaN around it."""
    b, s, h, d = t.shape
    big = torch.full((b + 1, s + 3, h + 2, d + 16), float("nan"), dtype=t.dtype, device=t.device)
    return big[1:, 2 : s + 2, :h, 8 : d + 8].copy_(t)


#: By name: a function that returns q, k, v and dout in this memory layout.
LAYOUTS = {
    "heads_first": lambda *tensors: [t.transpose(1, 2).contiguous().transpose(1, 2) for t in tensors],
    "packed_qkv": lambda q, k, v, dout: [*torch.stack([q, k, v], dim=2).unbind(2), dout],
    "sliced": lambda *tensors: [inside(t) for t in tensors],
    # rows that do not start on 16 bytes
    "odd_strides": lambda *tensors: [torch.nn.functional.pad(t, (0, 3))[..., :-3] for t in tensors],
    # stride 0 over batch, keys' heads and output rows
    "expanded": lambda q, k, v, dout: [
        q[:1].expand_as(q), k[:, :, :1].expand_as(k), v[:1, :, :1].expand_as(v), dout[:, :1].expand_as(dout)
    ],
    # stride 0 over columns too, as of `out.sum().backward()`
    "gradient_of_a_sum": lambda q, k, v, dout: [q, k, v, dout[:1, :1, :1, :1].expand_as(dout)],
    "batch_second": lambda *tensors: [t.transpose(0, 1).contiguous().transpose(0, 1) for t in tensors],
}  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS)
@on(*ALL)
def test_layouts(backend, layout):
    """A strided view gives bitwise the results of its contiguous copy, in bwd also one of out and of softmax_lse."""
    case = Case(40, 40, 64, nheads=4, is_causal=True)
    q, k, v, dout = LAYOUTS[layout](*case.inputs(backend))
    out, lse = check(backend, q, k, v, **case.options)
    dense = [t.contiguous() for t in (q, k, v, dout)]
    dense_out, dense_lse = backend.forward(*dense[:3], **case.options)
    assert torch.equal(out, dense_out) and torch.equal(lse, dense_lse)
    far_out, far_lse = torch.stack([out, out], 3)[:, :, :, 1], torch.stack([lse, lse], -1)[..., 0]
    [strided, *_] = backend.backward(dout, q, k, v, far_out, far_lse, **case.options)
    [plain, *_] = backend.backward(dense[3], *dense[:3], dense_out, dense_lse, **case.options)
    for name, a, b in zip(("dq", "dk", "dv"), strided, plain):
        if name == "dq" and backend.name == "cuda":  # summed by atomics
            torch.testing.assert_close(a, b, rtol=2e-3, atol=1e-3)
        else:
            assert torch.equal(a, b), name
        assert a.is_contiguous()


@pytest.mark.parametrize("batch,seqlen_q,seqlen_k,nheads", [(0, 5, 6, 2), (2, 0, 6, 2), (2, 5, 0, 2), (2, 0, 0, 2), (2, 5, 6, 0)])
@on(*ALL)
def test_empty(backend, batch, seqlen_q, seqlen_k, nheads):
    """Without batch entries, queries, keys or heads, shapes are right, out and gradients 0, and lse is +inf."""
    q = backend.randn(batch, seqlen_q, nheads, 64)
    k, v = backend.randn(batch, seqlen_k, nheads, 64), backend.randn(batch, seqlen_k, nheads, 32)
    out, lse = backend.forward(q, k, v)
    assert out.shape == (batch, seqlen_q, nheads, 32) and (out == 0).all()
    assert lse.shape == (batch, nheads, seqlen_q) and (lse == math.inf).all()
    for gradients in backend.backward(torch.ones_like(out), q, k, v, out, lse):
        for g, t in zip(gradients, (q, k, v)):
            assert g.shape == t.shape and (g == 0).all()


def math_attention(q, k, v):
    """Returns PyTorch's attention by single operations, in fp64."""
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        heads = [t.double().transpose(1, 2) for t in (q, k, v)]
        return torch.nn.functional.scaled_dot_product_attention(*heads).transpose(1, 2)


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("name", ["q", "k", "v"])
@on(*ALL)
def test_infinities_and_nan(backend, name, value):
    """One element of q, k or v is not finite: out is infinite or NaN exactly where PyTorch's attention by single operations is."""
    q, k, v, _ = Case(37, 45, 64, batch=1, nheads=1).inputs(backend)
    {"q": q, "k": k, "v": v}[name][0, 20, 0, 5] = value
    expected = math_attention(q, k, v)
    out, _ = backend.forward(q, k, v)
    assert torch.equal(out.isnan(), expected.isnan())
    assert torch.equal(out.isposinf(), expected.isposinf()) and torch.equal(out.isneginf(), expected.isneginf())
    finite = expected.isfinite()
    torch.testing.assert_close(out.double()[finite], expected[finite], rtol=1e-2, atol=2e-2)  # bf16's eps is 8e-3


@on(*ALL)
def test_a_row_of_scores_of_minus_infinity(backend):
    """PyTorch's safe softmax makes it a row of zeros. (q is -inf, keys are positive.)"""
    q, k, v = backend.randn(1, 3, 1, 64).abs(), backend.randn(1, 5, 1, 64).abs(), backend.randn(1, 5, 1, 64)
    q[0, 1, 0, :] = -math.inf
    out, lse = backend.forward(q, k, v)
    torch.testing.assert_close(out.double(), math_attention(q, k, v), rtol=1e-2, atol=2e-2, equal_nan=True)
    assert lse[0, 0, [0, 2]].isfinite().all()


@on(*ALL)
def test_a_nan_key_behind_the_mask(backend):
    """A NaN key changes no bit of rows that do not see it, and makes all others NaN."""
    case = Case(50, 50, 64, is_causal=True)
    q, k, v, _ = case.inputs(backend)
    clean, clean_lse = backend.forward(q, k, v, **case.options)
    k[:, 30] = math.nan
    out, lse = backend.forward(q, k, v, **case.options)
    assert torch.equal(out[:, :30], clean[:, :30]) and torch.equal(lse[..., :30], clean_lse[..., :30])
    assert out[:, 30:].isnan().all()


@on(*ALL)
def test_products_far_beyond_fp16(backend):
    """Products q . k up to 3e5 (scores to 4e4), of both signs, where fp16's largest number is 65504: each row is its largest key's value,
    and gradients are finite."""
    case = Case(40, 60, 64, spread=100.0, is_causal=True)
    q, k, v, dout = case.inputs(backend)
    out, lse = backend.forward(q, k, v, **case.options)
    right = reference.forward(q, k, v, **case.options).out
    # 5.0 is 5% of the values' standard deviation
    torch.testing.assert_close(out.double(), right, rtol=1e-2, atol=5.0 if backend.dtype != torch.float64 else 1e-6)
    for gradients in backend.backward(dout, q, k, v, out, lse, **case.options):
        assert all(g.isfinite().all() for g in gradients)


@on("cuda")
def test_strides_beyond_2_31_elements(backend):
    """Views into one storage of more than 2^31 elements, with strides that only 64 bits hold."""
    if torch.cuda.mem_get_info()[0] < 24 * 2**30:
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
    seqlen, nheads, headdim = 2**17 + 9, 128, 128
    elements = seqlen * nheads * headdim
    assert elements > 2**31
    needed = 14 * 2 * elements + 2 * 2**30  # bytes: 14 tensors in fp16, and 2 GiB
    if torch.cuda.mem_get_info()[0] < needed:
        pytest.skip(f"needs {needed / 2**30:.0f} GiB of free GPU memory")
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


#: 8192 tokens: uniform, usual and nearly one-hot rows.
LONG = [Case(8192, 8192, d, batch=1, is_causal=c, spread=s) for d in (64, 128) for c in (False, True) for s in (1e-3, 1.0, 30.0)]


@on_cases((["cuda"], LONG))
@pytest.mark.parametrize("deterministic", [False, True], ids=["atomics", "deterministic"])
def test_long(backend, case, deterministic):
    check_case(backend, case, deterministic=deterministic)


DETERMINISTIC = [
    Case(113, 155, d, headdim_v=dv, batch=1, nheads=4, nheads_k=2, is_causal=is_causal)
    for d, dv in [(32, None), (40, None), (64, None), (96, 64), (128, None), (192, 128), (256, None)]
    for is_causal in (False, True)
] + [Case(141, 70, 64, batch=1, window_left=30, window_right=5), Case(1, 300, 128), Case(300, 1, 64)]


@on_cases((KERNELS, DETERMINISTIC))
@pytest.mark.parametrize("dq", ["several launches", "own kernel"])
def test_deterministic(backend, case, dq, force):
    """Gradients are bitwise identical in all runs and warp orders. dv is that of the default mode, and so is dk up to headdim 192; above,
    the default mode stores P and dS in memory as fp16 (docs/design/numerics.md).

    dq is summed over several launches of the main kernel with an accumulator per block, or computed by a kernel of its own."""
    q, k, v, dout = case.inputs(backend)
    # a tuning forces the second way; without one the planner takes the first where it is faster
    force(choices=[{"pass": "Backward", "deterministic": True}] * (dq == "own kernel"))
    out, lse, _, dk, dv = check(backend, q, k, v, dout, deterministic=True, **case.options)
    force()
    default = backend.backward(dout, q, k, v, out, lse, **case.options)[0]
    if case.headdim <= 192:
        assert_same_bits("dk", dk, default[1])
    assert_same_bits("dv", dv, default[2])


#: More key blocks than are resident on a V100, so that the deterministic pass takes several launches. The last launch has smaller blocks,
#: a "tail", or fewer than the others. Few queries suffice, because launches divide keys.
LAUNCHES = [
    Case(9, 4 * 128 + 5, 64, batch=2, nheads=20, is_causal=True),
    Case(9, 4 * 128 + 5, 128, batch=2, nheads=20, nheads_k=10),
    Case(9, 9 * 64 + 5, 192, batch=1, nheads=20),
    Case(headdim=128, nheads=10, lengths=((9, 4 * 128 + 5), (40, 300)), is_causal=True),
]
MORE_LAUNCHES = [
    Case(9, 4 * 128 + 5, 64, batch=2, nheads=20),
    Case(9, 4 * 128 + 5, 64, batch=2, nheads=20, window_left=300, window_right=9),
    Case(9, 4 * 128 + 5, 128, batch=2, nheads=10, is_causal=True),
    Case(headdim=64, nheads=20, lengths=((9, 4 * 128 + 5), (7, 130))),
]


@on_cases((["sim"], LAUNCHES), (["sim-bf16"], LAUNCHES[1:2]), slow=((["sim", "sim-bf16"], LAUNCHES + MORE_LAUNCHES),))
def test_several_launches(backend, case):
    """Each launch of the deterministic pass adds dq into accumulators (splits) of its own key blocks."""
    (q, k, v, dout), options = case.problem(backend)
    # batch, seqlen_q, seqlen_k, nheads, nheads_k, headdim, headdim_v
    shape = (case.entries, *case.longest, case.nheads, case.nheads_k or case.nheads, case.headdim, case.headdim)
    features = ",".join(["varlen"] * bool(case.lengths) + ["fp32_gradients"] * (q.dtype == torch.bfloat16))
    planned, default = (
        json.loads(torch.ops.volta_fa._plan(*shape, case.is_causal, deterministic=d, features=features))["backward"] for d in (True, False)
    )
    assert (planned["main_launches"] > 1 or planned["tail"]) and planned["dq_accum_splits"] > 1, planned
    out, lse, dq, *_ = check(backend, q, k, v, dout, deterministic=True, **options)
    if planned["main_launches"] > 1 and backend.name == "sim" and not case.lengths:
        # The simulator runs blocks one after the other, so atomics add them in that order. Separate accumulators must add in another order,
        # which shows in some of 20,000 fp16 elements; packed cases have too few elements.
        in_order = backend.backward(dout, q, k, v, out, lse, **options)[0][0]
        assert not torch.equal(dq, in_order), "a launch's blocks of keys share a sum"
    if default["tail"]:
        check(backend, q, k, v, dout, **options)


@on("sim", "cuda")
def test_torchs_deterministic_switch(backend):
    """torch.use_deterministic_algorithms reaches the backward pass through autograd."""
    case = Case(150, 170, 64, is_causal=True)
    q, k, v, dout = case.inputs(backend)
    gradients = []
    torch.use_deterministic_algorithms(True)
    try:
        for _ in backend._runs(q, k, v):  # twice: in both warp orders of the simulator, or with NaN in the GPU's free memory
            leaves = [t.detach().clone().requires_grad_() for t in (q, k, v)]
            torch.ops.volta_fa.fwd(*leaves, **case.options)[0].backward(dout)
            gradients.append([t.grad for t in leaves])
    finally:
        torch.use_deterministic_algorithms(False)
    for a, b in zip(*gradients):
        assert_same_bits("gradient", a, b)
