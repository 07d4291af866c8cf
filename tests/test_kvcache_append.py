"""Tests of the append and prefill kernels. test_kvcache.py has what all paths of fwd_kvcache share."""

from __future__ import annotations

import dataclasses
import itertools
import json

import pytest
import torch

from cached import Cached
from conftest import INFO, assert_same_bits, on
from test_kvcache import check, run
from test_variants import GPUS

fwd_kvcache = torch.ops.volta_fa.fwd_kvcache

#: (queries, cached tokens, appended tokens) of each sequence: too many query rows per KV head for decode, so prefill is chosen.
MANY = ((141, 14, 141), (1, 40, 1), (0, 30, 0), (70, 85, 0), (65, 0, 65))
#: Options of a case that request a feature.
OPTIONS_OF_FEATURE = {"softcap": {"softcap": 3.0}, "alibi": {"alibi": "bh"}}
VARIANTS = [v for v in INFO["variants"] if v["sm"] in GPUS and v["pass"] in ("Prefill", "Append") and v["cache"] == "float"]
QUANTIZING = [v for v in INFO["variants"] if v["sm"] in GPUS and v["pass"] == "Append" and v["cache"] != "float"]


def launched(backend, problem) -> list[str]:
    """Returns the names of the kernels of a call, from the simulator's timing report."""
    backend.monkeypatch.setenv("VOLTA_FA_SIMULATE", "timing")
    torch.ops.volta_fa._sim_report()  # forgets earlier launches
    fwd_kvcache(problem.q, *problem.copy_of_cache(), *problem.new, **problem.options)
    backend.monkeypatch.delenv("VOLTA_FA_SIMULATE")
    return [launch["kernel"] for launch in json.loads(torch.ops.volta_fa._sim_report())]


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: v["name"])
@on("sim")
def test_variant_runs(backend, variant):
    """Runs each kernel with a paged and a contiguous cache, and with a headdim below the kernel's."""
    gpu, _ = GPUS[variant["sm"]]
    backend.monkeypatch.setenv("VOLTA_FA_SIM_GPU", gpu)
    feature_options = {name: value for feature in variant["features"] for name, value in OPTIONS_OF_FEATURE.get(feature, {}).items()}
    headdim = variant["headdim"] if variant["pass"] == "Prefill" else 64
    case = Cached(MANY, headdim=headdim, packed=True, own_new=True, sinks="own", **feature_options)
    # the planner chooses larger row blocks for more query heads per KV head
    cases = (dataclasses.replace(case, nheads=nheads) for nheads in (2, 4, 6, 8, 16))
    case = next(c for c in cases if variant["name"] in launched(backend, c.problem(backend)))
    check(backend, case)
    dense = dataclasses.replace(case, page=0, leftpad=(3, 0, 30, 2, 0), batch_idx=True, window_left=60, headdim_v=headdim - 8)
    padded = dataclasses.replace(case, page=48, layout="kv", headdim=headdim - 8, is_causal=False)
    for other in (dense, padded):
        assert variant["name"] in launched(backend, other.problem(backend))
        check(backend, other)


@pytest.mark.parametrize("variant", QUANTIZING, ids=lambda v: v["name"])
@on("sim")
def test_quantizing_variant_runs(backend, variant):
    """Launches each quantizing append kernel. test_kvcache_quantized.py checks what it writes."""
    backend.monkeypatch.setenv("VOLTA_FA_SIM_GPU", GPUS[variant["sm"]][0])
    case = Cached(((3, 40, 5), (1, 9, 2), (0, 20, 0)), packed=True, own_new=True, kv_dtype=variant["cache"])
    assert variant["name"] in launched(backend, case.problem(backend))


@on("sim")
def test_two_launches(backend):
    """A decode step that appends with rotary launches two kernels: append and decode."""
    problem = Cached(((1, 9, 1), (1, 40, 1)), nheads=4, nheads_k=2, rotary="half").problem(backend)
    append, attention = launched(backend, problem)
    assert "append" in append and "decode" in attention


@pytest.mark.parametrize("rotary_dtype", ["own", "fp32"])
@pytest.mark.parametrize("interleaved", [False, True], ids=["half", "interleaved"])
@on("cpu-fp32", "sim", "cuda")
def test_rotation_is_rounded_once(backend, interleaved, rotary_dtype):
    """Rotary is computed in fp32 and rounded once: bitwise identical to PyTorch. Other columns are copied."""
    rotary = "interleaved" if interleaved else "half"
    lengths = ((3, 9, 3), (3, 0, 3), (3, 61, 3))
    case = Cached(lengths, headdim=96, headdim_v=40, rotary=rotary, rotary_dim=32, rotary_dtype=rotary_dtype, layout="hnd")
    problem = case.problem(backend)
    _, _, k_cache, v_cache = run(backend, problem)
    cos, sin = (problem.options[name].float() for name in ("rotary_cos", "rotary_sin"))
    for b, (_, cached, new) in enumerate(lengths):
        k, v = (problem.sequence(t, problem.cu_new, b) for t in problem.new)
        turned = k[..., :32].float().unflatten(-1, (16, 2) if interleaved else (2, 16))
        x, y = turned.unbind(-1 if interleaved else -2)
        c, s = (t[cached : cached + new, None] for t in (cos, sin))
        turned = torch.stack((x * c - y * s, x * s + y * c), -1 if interleaved else -2).flatten(-2).to(k.dtype)
        place = tuple(t[cached : cached + new].to(k.device) for t in problem.places[b])
        assert_same_bits("k", k_cache[place], torch.cat((turned, k[..., 32:]), -1))
        assert_same_bits("v", v_cache[place], v)


@pytest.mark.parametrize("page", [16, 0], ids=["pages", "dense"])
@on("sim", "cuda")
def test_tokens_beyond_the_cache_are_not_written(backend, page):
    """With unchecked invalid lengths or pages, the call writes only the tokens of valid sequences."""
    lengths = ((2, 9, 2), (2, 30, 2), (2, 17, 2))
    # 63 or 36: one more than the capacity (64 or 37 tokens) minus the two new tokens
    wrong = [("cache_seqlens", 1, value) for value in (-1, -(2**31), 2**31 - 1, 63 if page else 36)]
    wrong += [("block_table", (1, 1), value) for value in (-1, 99, 2**31 - 1)] if page else []
    backend.monkeypatch.setenv("VOLTA_FA_CHECK_LENGTHS", "0")
    for name, place, value in wrong:
        problem = Cached(lengths, page=page, rotary="half").problem(backend)
        problem.options[name][place] = value
        out, lse, *caches = run(backend, problem)
        assert out[1].isnan().all() and lse[1].isnan().all(), (name, value)
        assert not out[::2].isnan().any()
        for before, after in zip((problem.k_cache, problem.v_cache), caches):
            expected = before.clone()
            for b in (0, 2):
                tokens = tuple(t[lengths[b][1] :].to(before.device) for t in problem.places[b])
                expected[tokens] = after[tokens]
                assert not after[tokens].isnan().any()
            # sequence 1 has an invalid length, or both new tokens (30 and 31) are in its invalid page
            assert_same_bits(f"{name} {value}", after, expected)


@on("sim", "cuda")
def test_tensors_of_any_stride(backend):
    """q, k and v may begin anywhere and have odd strides between heads and tokens."""
    problem = Cached(((3, 9, 3), (3, 16, 3)), nheads=4, nheads_k=2, headdim=48, rotary="interleaved").problem(backend)
    expected = run(backend, problem)

    def moved(t):
        wide = torch.full((*t.shape[:2], t.shape[2] + 1, t.shape[3] + 5), torch.nan, dtype=t.dtype, device=t.device)
        return wide[:, :, 1:, 3:-2].copy_(t)

    problem.q, problem.new = moved(problem.q), tuple(moved(t) for t in problem.new)
    for name, a, b in zip(("out", "softmax_lse", "k_cache", "v_cache"), run(backend, problem), expected):
        assert_same_bits(name, a, b)


@on("cuda")
def test_graph_of_decode_steps(backend):
    """A graph of append and attention stays valid when lengths, tokens and pages change between replays."""
    lengths = tuple((1, n, 1) for n in (0, 15, 16, 300, 77))
    problem = Cached(lengths, nheads=8, nheads_k=2, headdim=128, rotary="half").problem(backend)
    options, caches = problem.options, [t.nan_to_num(0.0) for t in (problem.k_cache, problem.v_cache)]
    table = options["block_table"]
    options["block_table"] = torch.arange(table.numel(), dtype=torch.int32, device=table.device).view_as(table)
    caches = [t.repeat(table.numel() // len(t) + 1, 1, 1, 1) for t in caches]
    call = lambda caches: fwd_kvcache(problem.q, *caches, *problem.new, **options)  # noqa: E731
    call([t.clone() for t in caches])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call(caches)
    room = table.shape[1] * problem.case.page - 1
    for step, seed in itertools.product((1, 7), range(5)):
        options["cache_seqlens"].copy_(torch.tensor([(seed * 97 + b * step) % room for b in range(len(lengths))], dtype=torch.int32))
        options["block_table"].copy_(options["block_table"].flip(0))
        for t in (problem.q, *problem.new):
            t.copy_(backend.randn(*t.shape))
        others = [t.clone() for t in caches]
        expected = call(others)
        graph.replay()
        for name, a, b in zip(("out", "softmax_lse", "k_cache", "v_cache"), (*captured, *caches), (*expected, *others)):
            assert_same_bits(name, a, b)
