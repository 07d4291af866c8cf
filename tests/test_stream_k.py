"""Forward grids of equal shares: every kernel, on any mask and odd sizes; whoever joins the pieces; and where a plan takes them."""

import json

import pytest
import torch

from conftest import INFO, Case, assert_same_bits, check, on

VARIANTS = [v for v in INFO["variants"] if v["pass"] == "ForwardStreamK"]
#: What a kernel does unasked, asked for.
ASKING = {"softcap": {"softcap": 20.0}, "alibi": {"alibi": "bh"}, "bias": {"bias": "bhqk"}}
PROBLEMS = {
    "odd": {"seqlen_q": 141, "seqlen_k": 155},
    "causal": {"seqlen_q": 170, "seqlen_k": 203, "nheads_k": 1, "is_causal": True, "sinks": "own"},
    "without keys": {"seqlen_q": 300, "seqlen_k": 33, "batch": 1, "is_causal": True},
    "window": {"seqlen_q": 260, "seqlen_k": 290, "batch": 1, "window_left": 60, "window_right": 9, "sinks": "own"},
    "negative": {"seqlen_q": 129, "seqlen_k": 321, "batch": 1, "softmax_scale": -0.3, "spread": 2.0},
}


def plan(batch, nheads, seqlen_q, seqlen_k, headdim, is_causal=False, **options):
    return json.loads(torch.ops.volta_fa._plan(batch, seqlen_q, seqlen_k, nheads, nheads, headdim, headdim, is_causal, **options))[
        "forward"
    ]


@pytest.mark.parametrize("name", PROBLEMS)
@pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: v["name"])
@on("sim", "cuda")
def test_every_kernel_is_right(backend, force, variant, name):
    """Also on headdims that it pads, and on masks for which no plan takes it."""
    force(choices=[{"pass": "ForwardStreamK", "variant": variant["name"]}])
    pad = 8 * (name != "odd")
    asked = {key: value for need in variant["requires"] for key, value in ASKING[need].items()}
    case = Case(**PROBLEMS[name], **asked, headdim=variant["headdim"] - pad, headdim_v=variant["headdim_v"] - pad)
    device = -1 if backend.machine == "sim" else torch.cuda.current_device()
    found = plan(case.batch, case.nheads, case.seqlen_q, case.seqlen_k, case.headdim, device=device, needs=",".join(variant["requires"]))
    assert variant["headdim"] != variant["headdim_v"] or found["name"] == variant["name"]
    (q, k, v, _), options = case.problem(backend)
    check(backend, q, k, v, **options)


@on("sim")
def test_whoever_joins_them_the_bits_are_the_same(backend, force, monkeypatch):
    """Two host threads run blocks in ever other orders."""
    force(choices=[{"pass": "ForwardStreamK", "variant": "volta_fwd_streamk_64x64"}])
    (q, k, v, _), options = Case(300, 400, batch=1, nheads=3, spread=2.0).problem(backend)
    monkeypatch.setenv("VOLTA_FA_SIMULATE", "1")
    expected = torch.ops.volta_fa.fwd(q, k, v, **options)[:2]
    monkeypatch.setenv("VOLTA_FA_SIM_THREADS", "4")
    for quantum in (1, 50, 500, 5000):
        monkeypatch.setenv("VOLTA_FA_SIM_QUANTUM", str(quantum))
        for name, a, b in zip(("out", "softmax_lse"), torch.ops.volta_fa.fwd(q, k, v, **options), expected):
            assert_same_bits(name, a, b)


@on("sim")
def test_a_planned_grid_is_right(backend, monkeypatch):
    """Full rounds and pieces, as many blocks as a V100 has places and some more."""
    assert plan(1, 165, 100, 411, 64)["pass"] == "ForwardStreamK"
    (q, k, v, _), options = Case(100, 411, batch=1, nheads=165, nheads_k=33).problem(backend)
    check(backend, q, k, v, **options)


#: (batch, nheads, seqlen_q, seqlen_k, headdim), and whether the usual grid's last round leaves enough places idle.
GRIDS = [
    ((1, 32, 512, 512, 64), False),
    ((1, 32, 1024, 1024, 64), True),
    ((1, 32, 2048, 2048, 128), True),
    ((1, 40, 2048, 2048, 64), False),  # four full rounds
    ((2, 16, 2048, 2048, 96), True),
    ((2, 16, 2048, 2048, 256), False),  # this headdim has no such kernel
    ((1, 16, 1024, 1024, 64), False),  # less than a round, and cut rows cost more than they bring
]


@pytest.mark.parametrize("shape, pays", GRIDS, ids=lambda x: ",".join(map(str, x)) if isinstance(x, tuple) else str(x))
def test_where_a_plan_takes_them(shape, pays):
    found = plan(*shape)
    assert (found["pass"] == "ForwardStreamK") == pays
    assert plan(*shape, is_causal=True)["pass"] == "Forward"
    assert (plan(*shape, needs="sinks")["pass"] == "ForwardStreamK") == pays
    assert plan(*shape, needs="dropout")["pass"] == "Forward" and plan(*shape, needs="lengths")["pass"] == "Forward"
    if pays:
        assert found["reason"].startswith("stream-K") and found["grid"][1:] == [1, 1]
