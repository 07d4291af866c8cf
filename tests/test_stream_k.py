"""Tests of stream-K kernels, and of the problems for which the planner chooses them.

A usual grid has one block per tile (query rows; in the backward pass a key block). The GPU holds a limited number of resident blocks, a
wave; the last wave of a grid may leave some idle. A stream-K grid splits the tiles of that wave among all resident blocks, and the last
block of a tile combines its splits. The fixture `force` makes the planner choose a kernel on any problem. A backend is the simulator
(`sim`) or a GPU (`cuda`), with a dtype; `on_gpu` chooses the simulated GPU, `launches(call, "launches")` lists kernels without running
them."""

import json

import pytest
import torch

from cached import Cached
from cached import check as check_cached  # compares results and cache with fp64
from conftest import GPUS, INFO, Case, agreed, check_case, on, on_cases  # check_case: a Case against fp64. GPUS: by sm
from test_fp32 import check as check_fp32  # compares out with fp64, relative to PyTorch's fp32 attention

#: Kernels: of the forward pass, of that of fp32 in full precision ("ForwardSplit": a number is the sum of two fp16 parts), of a prefill
#: over a KV cache, of the backward pass.
FORWARD, FORWARD_FP32, PREFILL, BACKWARD = (
    [v for v in INFO["variants"] if v["pass"] == f"{of}StreamK"] for of in ("Forward", "ForwardSplit", "Prefill", "Backward")
)
#: Fields of a Case that request a feature, for kernels that require it: slopes (batch, nheads), a bias (batch, nheads, seqlen_q, seqlen_k).
FEATURE_FIELDS = {"softcap": {"softcap": 20.0}, "alibi": {"alibi": "bh"}, "bias": {"bias": "bhqk"}}
#: Fields of a Case. Sinks are in q's dtype ("own"); `spread` is the standard deviation of q, k and v.
PROBLEMS = {
    "odd": {"seqlen_q": 141, "seqlen_k": 155},
    "causal": {"seqlen_q": 170, "seqlen_k": 203, "nheads_k": 1, "is_causal": True, "sinks": "own"},
    "without keys": {"seqlen_q": 300, "seqlen_k": 33, "batch": 1, "is_causal": True},
    "window": {"seqlen_q": 260, "seqlen_k": 290, "batch": 1, "window_left": 60, "window_right": 9, "sinks": "own"},
    "negative": {"seqlen_q": 129, "seqlen_k": 321, "batch": 1, "softmax_scale": -0.3, "spread": 2.0},
}


def plan(batch, nheads, seqlen_q, seqlen_k, headdim, is_causal=False, nheads_k=None, **options) -> dict:
    """Returns the plan of a problem. A kernel in it has a name, pass, grid and reason. The default device is a V100."""
    sizes = batch, seqlen_q, seqlen_k, nheads, nheads_k or nheads, headdim, headdim, is_causal
    return json.loads(torch.ops.volta_fa._plan(*sizes, **options))


@pytest.mark.parametrize("name", PROBLEMS)
@pytest.mark.parametrize("variant", FORWARD, ids=lambda v: v["name"])
@on("sim", "cuda")
def test_every_forward_kernel_is_right(backend, force, variant, name):
    """Each kernel is right, also on headdims 8 smaller than its own, and on masks for which no plan chooses it."""
    force(choices=[{"pass": "ForwardStreamK", "variant": variant["name"]}])
    pad, features = 8 * (name != "odd"), variant["required_features"]
    fields = {key: value for feature in features for key, value in FEATURE_FIELDS[feature].items()}
    case = Case(**PROBLEMS[name], **fields, headdim=variant["headdim"] - pad, headdim_v=variant["headdim_v"] - pad)
    if variant["headdim"] == variant["headdim_v"]:  # plan() takes one headdim
        device = -1 if backend.machine == "sim" else torch.cuda.current_device()  # -1: the simulated GPU
        sizes = case.batch, case.nheads, case.seqlen_q, case.seqlen_k, case.headdim
        assert plan(*sizes, device=device, features=",".join(features))["forward"]["name"] == variant["name"]
    check_case(backend, case, dout=None)


@pytest.fixture(params=FORWARD_FP32, ids=lambda v: v["name"])
def fp32_kernel(request, backend, force):
    """Makes the planner take a kernel of fp32 in full precision, on its GPU."""
    backend.on_gpu(GPUS[request.param["sm"]])
    force(choices=[{"pass": "ForwardSplitStreamK", "variant": request.param["name"]}])
    return request.param["name"]


@pytest.mark.parametrize("name", PROBLEMS)
@on("sim-fp32")
def test_every_forward_kernel_of_fp32_is_right(backend, fp32_kernel, name):
    headdim = 512 - 8 * (name != "odd")
    case = Case(**PROBLEMS[name] | {"batch": 1}, headdim=headdim, headdim_v=64 if name == "window" else headdim)
    (q, k, v, _), options = case.problem(backend)
    launches = backend.launches(lambda: torch.ops.volta_fa.fwd(q, k, v, **options), "launches")
    assert fp32_kernel in [launch["kernel"] for launch in launches]
    check_fp32(backend, case)


@pytest.mark.parametrize("magnitude", [1e-30, 1e30])
@on("sim-fp32")
def test_fp32_of_any_magnitude(backend, fp32_kernel, magnitude):
    for change in (lambda q, k, v: (q, k, v * magnitude), lambda q, k, v: (q * magnitude, k / magnitude, v)):
        check_fp32(backend, Case(40, 150, 512, batch=1, nheads=1), change)


@on("sim")
def test_a_planned_grid_is_right(backend, monkeypatch):
    """165 tiles on a V100's 160 resident blocks (80 SMs, two blocks each): one full wave, and a wave of splits."""
    assert plan(1, 165, 100, 411, 64)["forward"]["pass"] == "ForwardStreamK"
    check_case(backend, Case(seqlen_q=100, seqlen_k=411, batch=1, nheads=165, nheads_k=33), dout=None)


#: (batch, nheads, seqlen_q, seqlen_k, headdim, is_causal), and whether the usual grid's last wave leaves enough resident blocks idle.
#: Under a causal mask, stream-K pays only where row tiles see about equally many keys. The same of fp32, without masks.
GRIDS = [
    ((1, 32, 512, 512, 64, False), False),
    ((1, 32, 1024, 1024, 64, False), True),
    ((1, 32, 2048, 2048, 128, False), True),
    ((1, 40, 2048, 2048, 64, False), False),  # four full waves
    ((2, 16, 2048, 2048, 256, False), True),
    ((1, 16, 512, 8192, 192, False), False),  # no kernel
    ((1, 16, 1024, 1024, 64, False), False),  # less than a wave, and splits cost more than they save
    ((1, 6, 512, 8192, 256, True), True),
    ((1, 32, 256, 4096, 128, True), True),
    ((1, 32, 256, 512, 128, True), False),
    ((1, 32, 1024, 1024, 64, True), False),
    ((1, 32, 2048, 2048, 128, True), False),
    ((2, 16, 2048, 2048, 256, True), False),
    ((1, 16, 512, 8192, 192, True), False),
]
FP32_GRIDS = [
    ((1, 1, 4096, 4096, 512, False), True),  # the VAE of a diffusion model: 128 row tiles
    ((1, 1, 4096, 4096, 512, True), False),
    ((1, 1, 1024, 1024, 512, False), True),
    ((1, 1, 1024, 1024, 512, True), False),
    ((5, 1, 4096, 4096, 512, False), False),  # eight full waves
    ((1, 1, 64, 64, 512, False), False),  # splits cost more than they save
    ((1, 1, 4096, 4096, 256, False), False),  # no kernel
]


@pytest.mark.parametrize("of, shape, pays", [*(("Forward", *grid) for grid in GRIDS), *(("ForwardSplit", *grid) for grid in FP32_GRIDS)])
def test_when_a_plan_chooses_a_forward_kernel(of, shape, pays):
    def planned(features=""):
        return plan(*shape, features=features)["forward" if of == "Forward" else "forward_split"]

    found = planned()
    assert (found["pass"] == f"{of}StreamK") == (planned("sinks")["pass"] == f"{of}StreamK") == pays
    # features for which no plan takes a stream-K kernel
    without = ("dropout", "varlen") if of == "Forward" else ("softcap", "varlen")
    assert all(planned(feature)["pass"] == of for feature in without)
    if pays:
        assert found["reason"].startswith("stream-K") and found["grid"][1:] == [1, 1]


#: A key block has steps (tiles of queries) of all query heads of its KV head: none, few or many.
BACKWARD_PROBLEMS = {
    "grouped": {"seqlen_q": 141, "seqlen_k": 155, "nheads": 6, "nheads_k": 2},
    "more splits": {"seqlen_q": 700, "seqlen_k": 150, "batch": 1, "nheads": 4, "nheads_k": 1},
    "causal": {"seqlen_q": 203, "seqlen_k": 290, "batch": 2, "nheads": 4, "nheads_k": 1, "is_causal": True},
    "rows without keys": {"seqlen_q": 300, "seqlen_k": 133, "batch": 1, "is_causal": True},
    "keys without rows": {"seqlen_q": 70, "seqlen_k": 300, "batch": 1, "nheads": 2, "window_left": 20, "window_right": 3},
    "window": {"seqlen_q": 260, "seqlen_k": 290, "batch": 1, "window_left": 60, "window_right": 9},
    "negative": {"seqlen_q": 129, "seqlen_k": 321, "batch": 1, "softmax_scale": -0.3, "spread": 2.0},
}


@pytest.mark.parametrize("name", BACKWARD_PROBLEMS)
@pytest.mark.parametrize("variant", BACKWARD, ids=lambda v: v["name"])
@on("sim", "cuda")
def test_every_backward_kernel_is_right(backend, force, variant, name):
    """Each kernel is right, also on headdims 8 smaller than its own, and on grids for which no plan chooses it."""
    force(choices=[{"pass": "BackwardStreamK", "variant": variant["name"]}])
    headdim = variant["headdim"] - 8 * (name != "grouped")
    case = Case(**BACKWARD_PROBLEMS[name], headdim=headdim, headdim_v=headdim)
    if backend.machine == "sim" and name in ("grouped", "more splits"):
        sizes = case.batch, case.nheads, case.seqlen_q, case.seqlen_k, headdim
        main = plan(*sizes, nheads_k=case.nheads_k)["backward"]["main"]
        # two key blocks, of two splits or of five each
        assert main["name"] == variant["name"] and main["grid"][1] == {"grouped": 4, "more splits": 10}[name]
    check_case(backend, case)


@on_cases((["sim"], ["volta_fwd_streamk_64x64 volta_bwd_streamk_64"]), (["sim-fp32"], [v["name"] for v in FORWARD_FP32]))
def test_results_do_not_depend_on_the_order_of_blocks(backend, force, case, monkeypatch):
    """Four host threads simulate blocks in different orders, so different blocks combine the splits: results are bitwise identical, except
    dq, which is added by atomics. VOLTA_FA_SIM_QUANTUM is the number of instructions that a warp runs before the next one does."""
    kernels = [v for v in INFO["variants"] if v["name"] in case.split()]
    backend.on_gpu(GPUS[kernels[0]["sm"]])
    force(choices=[{"pass": v["pass"], "variant": v["name"]} for v in kernels])
    has_backward = len(kernels) == 2
    problem = Case(**BACKWARD_PROBLEMS["more splits"]) if has_backward else Case(100, 200, 512, batch=1, nheads=2, spread=2.0)
    (q, k, v, dout), options = problem.problem(backend)

    def run():
        out, lse, _ = torch.ops.volta_fa.fwd(q, k, v, **options)
        return out, lse, *(torch.ops.volta_fa.bwd(dout, q, k, v, out, lse, **options)[1:3] if has_backward else ())

    monkeypatch.setenv("VOLTA_FA_SIMULATE", "1")
    expected = run()
    monkeypatch.setenv("VOLTA_FA_SIM_THREADS", "4")
    for quantum in (1, 50, 500, 5000):
        monkeypatch.setenv("VOLTA_FA_SIM_QUANTUM", str(quantum))
        agreed([expected, run()], "out", "softmax_lse", "dk", "dv")


#: (batch, nheads, nheads_k, seqlen, headdim, is_causal), and whether a block per key block would leave enough resident blocks idle.
BACKWARD_GRIDS = [
    ((1, 32, 8, 2048, 64, False), True),
    ((1, 32, 8, 2048, 128, False), True),
    ((1, 32, 8, 4096, 128, True), True),  # the first key blocks of a causal mask have the most steps
    ((1, 40, 40, 2048, 64, False), False),  # four full waves
    ((4, 32, 8, 2048, 128, True), False),  # many waves of blocks, the longest first
    ((1, 40, 40, 512, 64, False), False),
]


@pytest.mark.parametrize("shape, pays", BACKWARD_GRIDS, ids=str)
def test_when_a_plan_splits_key_blocks(shape, pays):
    batch, nheads, nheads_k, seqlen, headdim, is_causal = shape

    def main(**options):
        return plan(batch, nheads, seqlen, seqlen, headdim, is_causal, nheads_k, **options)["backward"]["main"]

    found = main()
    assert (found["pass"] == "BackwardStreamK") == pays
    assert main(deterministic=True)["pass"] != "BackwardStreamK"
    assert main(features="varlen")["pass"] == "Backward"
    if pays:
        assert found["reason"].startswith("stream-K") and found["grid"][0] == batch * nheads_k and found["grid"][2] == 1


#: Prefill over a KV cache: (queries, cached tokens, appended tokens), and options of cached.Cached (2 query heads on 1 KV head, causal):
#: `page` tokens a page (0: no pages), `own_new`: packed k and v have lengths of their own, layout "kv": K and V share a tensor.
CHUNKS = {
    "chunk": ((141, 300, 141), {"packed": True, "own_new": True}),
    "prompt": ((290, 0, 290), {"sinks": "own"}),
    "window": ((200, 255, 0), {"window_left": 60, "page": 48}),
    "no mask": ((131, 77, 0), {"is_causal": False, "layout": "kv"}),
    "dense": ((141, 300, 0), {"page": 0, "leftpad": (3,), "batch_idx": True}),
}


@pytest.mark.parametrize("name", CHUNKS)
@pytest.mark.parametrize("variant", PREFILL, ids=lambda v: v["name"])
@on("sim", "cuda")
def test_every_prefill_kernel_is_right(backend, force, variant, name):
    lengths, options = CHUNKS[name]
    force(choices=[{"pass": "PrefillStreamK", "variant": variant["name"]}])
    headdim = variant["headdim"] - 8 * (name == "window")
    if backend.machine == "sim":
        queries, cached, new = lengths
        planned = prefill_plan(1, queries, cached + new, headdim, nheads=2, nheads_k=1)
        tiles = 2 * -(-queries // 128)  # heads, and tiles of 128 rows
        assert planned["name"] == variant["name"] and planned["grid"][0] > tiles, "row tiles are split"
    check_cached(backend, Cached((lengths,), headdim=headdim, headdim_v=headdim, **options))


def prefill_plan(batch, seqlen_q, seqlen_k, headdim, nheads=32, nheads_k=8, features=""):
    # True: causal
    return plan(batch, nheads, seqlen_q, seqlen_k, headdim, True, nheads_k, features=features)["cache"]["prefill"]


@pytest.mark.parametrize("feature", ["softcap", "alibi"])
@on("sim", "cuda")
def test_chunks_with_features_of_scores(backend, feature):
    """A chunk whose row tiles a stream-K grid would split, with a feature that none of its kernels over a cache has."""
    queries, cached = 70, 954
    plain, planned = (prefill_plan(1, queries, queries + cached, 128, nheads=2, nheads_k=1, features=f) for f in ("", feature))
    assert plain["pass"] == "PrefillStreamK" and planned["pass"] == "Prefill"
    check_cached(backend, Cached(((queries, cached, 0),), headdim=128, headdim_v=128, **FEATURE_FIELDS[feature]))


def test_when_a_plan_splits_chunks():
    """A chunk after many tokens has row tiles of about equal length. Those of a prompt's beginning are uneven, the longest first."""
    for headdim in (64, 128, 256):
        assert prefill_plan(1, 512, 16384, headdim)["pass"] == "PrefillStreamK"
        assert prefill_plan(1, 4096, 4096, headdim)["pass"] == "Prefill"
        assert prefill_plan(2, 512, 16384, headdim)["pass"] == "Prefill"
    assert prefill_plan(1, 4096, 4096, 128)["grid"] == [32, 32, 1]
