"""Kernels of decode, append and prefill: tiles of rows, splits. test_kvcache.py has what all paths of fwd_kvcache share."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math

import pytest
import torch

from cached import Cached
from conftest import GPUS, INFO, agreed, assert_same_bits, on, on_cases
from test_kvcache import check, run

fwd_kvcache = torch.ops.volta_fa.fwd_kvcache

#: (queries, cached tokens, appended tokens) of each sequence.
RAGGED = ((1, 0, 0), (1, 1, 0), (1, 77, 0), (1, 200, 0))


def queries(n, lengths=RAGGED):
    return tuple((n, cached, 0) for _, cached, _ in lengths)


#: Every tile of rows, full and not, in every width of it; rows of one sequence in several tiles; headdims that are padded.
TILES = [
    *(
        Cached(queries(n), headdim=d, nheads=4 * group, nheads_k=4)
        for d in (64, 128, 256, 512)
        for n, group in ((1, 8), (2, 6), (4, 8), (8, 8))
    ),
    *(
        Cached(queries(3), headdim=d, headdim_v=dv, nheads=3)
        for d, dv in ((8, 200), (200, 8), (72, 104), (136, 248), (264, 504), (504, 8), (8, 296))
    ),
    # 64 rows, whose warps share what they load
    *(
        Cached(queries(8), headdim=d, headdim_v=dv, nheads=8, window_left=70, page=0)
        for d, dv in ((40, 64), (104, 72), (200, 136), (392, 456), (264, 64))
    ),
    *(Cached(queries(n), headdim=d, is_causal=False) for d in (128, 512) for n in (3, 6, 13)),
    Cached(queries(11), nheads=5, is_causal=False),
    Cached(((9, 40, 0), (1, 300, 0), (30, 90, 0)), packed=True, nheads=7, headdim=128),
]


@on_cases((("sim", "cuda"), TILES))
def test_tiles(backend, case):
    check(backend, case)


def shared(n, group, headdim, **options):
    lengths = ((n, 403, 0), (n, 0, 0), (n, 61, 0), (n, 8 * n + 1, 0))
    return Cached(lengths, headdim=headdim, nheads=2 * group, nheads_k=2, **options)


#: Rows whose four warps share what they load: tiles of 64 rows, and of 32 rows from headdim 256 on. In all splits into queries and heads,
#: with what else changes a step.
SHARED_STEPS = [
    *(shared(n, 64 // n, 256) for n in (1, 2, 4, 16, 32, 64)),
    *(shared(n, group, 512) for n, group in ((1, 17), (1, 32), (4, 16), (11, 3), (9, 7), (5, 8), (3, 8), (2, 8))),
    *(shared(n, group, d) for d, n, group in ((256, 11, 3), (128, 17, 3), (256, 9, 7), (64, 9, 7), (256, 5, 8), (128, 5, 8))),
    *(shared(8, 8, d, window_left=90, softcap=20.0, alibi="bh", sinks="own") for d in (64, 128, 256, 512)),
    *(shared(7, 6, d, page=0, is_causal=False, window_right=13, num_splits=3) for d in (64, 256, 512)),
    *(shared(6, 8, d, packed=True, page=48) for d in (64, 256, 512)),
    shared(12, 5, 200, headdim_v=248, leftpad=(3, 0, 8, 70), page=0),
    shared(12, 5, 328, headdim_v=264, leftpad=(3, 0, 8, 70), page=0),
]


@on_cases((("sim", "cuda"), SHARED_STEPS))
def test_shared_steps(backend, case):
    check(backend, case)


#: The same in bf16, and fewer rows at headdim 256.
BFLOAT_SHARED_STEPS = [*SHARED_STEPS, *(shared(n, group, 256) for n, group in ((2, 8), (4, 4), (3, 3), (4, 8), (5, 5)))]


@on_cases((("sim-bf16", "cuda-bf16"), BFLOAT_SHARED_STEPS))
def test_bfloat_shared_steps(backend, case):
    check(backend, case)


#: The same in bf16: one of each tile and headdim, and of those that are padded; rows of several tiles.
BFLOAT = [*TILES[0:3:2], *TILES[5:7], *TILES[9:11], *TILES[11::3], TILES[-1], Cached(queries(2), headdim=128, nheads=8, nheads_k=2, page=0)]


@on_cases((("sim-bf16", "cuda-bf16"), BFLOAT))
def test_bfloat_tiles(backend, case):
    check(backend, case)


@on("sim-bf16", "cuda-bf16")
@pytest.mark.parametrize(
    "queries, headdim", [(1, 64), (1, 128), (1, 256), (1, 512), (8, 64), (8, 128), (3, 256), (8, 256), (3, 512), (8, 512)]
)
@pytest.mark.parametrize("exponent", [-110, -40, 40, 110])
def test_bfloat_values_of_any_magnitude(backend, queries, headdim, exponent):
    """Values scaled by a power of two give results scaled by it, bitwise."""
    lengths = ((queries, 600, 0), (queries, 30, 0), (queries, queries, 0))
    problem = Cached(lengths, headdim=headdim, nheads=8).problem(backend)
    out, lse, *_ = run(backend, problem)
    problem.v_cache *= 2.0**exponent
    scaled, same, *_ = run(backend, problem)
    expected = out * 2.0**exponent
    # but for subnormal numbers, whose expectation is rounded twice: next to each other
    normal = expected.abs() >= 2.0**-126
    assert_same_bits("out", scaled[normal], expected[normal])
    assert bool(((scaled - expected)[~normal].double().abs() <= 2.0**-133).all())
    assert_same_bits("softmax_lse", same, lse)


@on("sim-bf16", "cuda-bf16")
@pytest.mark.parametrize("queries, headdim", [(1, 64), (1, 512), (8, 64), (3, 256), (8, 256), (8, 512)])
@pytest.mark.parametrize("exponents", [(17, -17), (-40, 40), (100, -101)], ids=str)
def test_bfloat_queries_and_keys_of_any_magnitude(backend, queries, headdim, exponents):
    """Powers of two whose product is 1 change no score, bitwise: the last of them halves the scale, which doubles."""
    lengths = ((queries, 600, 0), (queries, 30, 0), (queries, queries, 0))
    problem = Cached(lengths, headdim=headdim, nheads=8).problem(backend)
    out, lse, *_ = run(backend, problem)
    of_q, of_k = exponents
    problem.q *= 2.0**of_q
    problem.k_cache *= 2.0**of_k
    problem.options["softmax_scale"] = headdim**-0.5 * 2.0 ** -(of_q + of_k)
    agreed([(out, lse), run(backend, problem)])


@on("sim-bf16", "cuda-bf16")
@pytest.mark.parametrize("growth", [2.0, 0.5])
@pytest.mark.parametrize("queries, headdim", [(1, 128), (8, 64), (8, 128), (3, 256), (8, 256), (1, 512), (4, 512), (8, 512)])
def test_bfloat_values_that_grow(backend, queries, headdim, growth):
    """A warp that has begun with small values meets large ones, and the other way round; so do warps that share steps."""
    case = Cached(((queries, 150, 0), (queries, 60, 0), (queries, 9, 0)), nheads=8, headdim=headdim)

    def change(problem):
        for b, (_, cached, _) in enumerate(case.lengths):
            at = tuple(t[:cached].to(backend.device) for t in problem.places[b])
            factors = growth ** (torch.arange(cached, dtype=torch.float64, device=backend.device) / 2 - cached / 4)
            problem.v_cache[at] = (problem.v_cache[at].double() * factors[:, None, None]).to(problem.v_cache.dtype)

    check(backend, case, change)


@on("sim-bf16", "cuda-bf16")
@pytest.mark.parametrize("queries, headdim", [(2, 64), (8, 64), (8, 256), (1, 512), (8, 512)])
def test_bfloat_infinities_and_large_keys(backend, queries, headdim):
    problem = Cached(((queries, 50, 0), (queries, 90, 0)), headdim=headdim, nheads=8).problem(backend)
    out, lse, *_ = run(backend, problem)
    entry, row = problem.places[1]
    first = (entry[3].item(), row[3].item())
    problem.v_cache[first][0, 5] = math.inf
    found, same, *_ = run(backend, problem)
    assert not found[1, ..., 5].isfinite().any()
    columns = [column for column in range(headdim) if column != 5]
    # the other columns, and the other sequence, do not know of it
    assert_same_bits("out", found[..., columns], out[..., columns])
    assert_same_bits("softmax_lse", same, lse)
    problem.v_cache[first][0, 5] = 0.0
    keys = problem.k_cache[first].clone()
    results = []
    for large in (1e30, 65280.0):  # fp16 ends at 65504
        problem.k_cache[first] = torch.where(keys > 0, large, -large)
        results.append(run(backend, problem)[0])
    # A row takes the large key alone or not at all, and the others are what they are beside a smaller one.
    torch.testing.assert_close(*results, rtol=1e-2, atol=1e-2)
    assert results[0].isfinite().all()
    problem.k_cache[first][0, 2] = math.nan
    found, *_ = run(backend, problem)
    assert found[1].isnan().all()
    assert_same_bits("out", found[0], out[0])


#: Row tiles that several blocks share: their partial results merge in one, two and three levels.
SHARED = [
    Cached(((1, 600, 0), (1, 30, 0)), nheads=8),
    Cached(((1, 7000, 0), (1, 0, 0), (1, 900, 0)), nheads=2),
    Cached(((8, 5000, 0),), nheads=8, headdim=128, softcap=5.0, sinks="own"),
    Cached(((1, 9000, 0),), nheads=4, page=0, num_splits=2),
    Cached(((1, 2500, 0), (1, 0, 0), (1, 300, 0)), nheads=8, headdim=512),
    Cached(((4, 2000, 0),), nheads=16, headdim=512, sinks="own"),
]


@on_cases((("sim", "cuda"), SHARED))
def test_shared_row_sets(backend, case):
    """run() compares two runs bitwise: the last block combines partial results in a fixed order."""
    check(backend, case)


@on("sim", "cuda")
@pytest.mark.parametrize("num_splits", [1, 2, 5, 1000])
def test_num_splits(backend, num_splits):
    case = Cached(((2, 3000, 0), (2, 17, 0), (2, 0, 0), (2, 130, 0)), nheads=4, nheads_k=2, num_splits=num_splits)
    check(backend, case)
    if num_splits == 1:
        # the order of the sum does not depend on other sequences then
        alone = dataclasses.replace(case, lengths=case.lengths[:1])
        outs = []
        for c in (case, alone):
            backend.generator.manual_seed(backend.seed)
            problem = c.problem(backend)
            outs.append((problem, run(backend, problem)))
        (many, (out, lse, *_)), (one, _) = outs
        tokens = [cache[entry, row] for (entry, row) in many.places[:1] for cache in (many.k_cache, many.v_cache)]
        for cache, values in zip((one.k_cache, one.v_cache), tokens):
            entry, row = one.places[0]
            cache[entry, row] = values
        one.q.copy_(many.q[:1])
        assert_same_bits("out", run(backend, one)[0], out[:1])
        assert_same_bits("softmax_lse", run(backend, one)[1], lse[:1])


@on("sim", "cuda")
@pytest.mark.parametrize("queries, headdim", [(2, 64), (8, 64), (8, 256), (40, 64), (1, 512), (8, 512)])
def test_wrong_sequences_are_nan_and_alone(backend, queries, headdim):
    lengths = tuple((queries, n, 0) for n in (40, 300, 60, 90, 33))
    case = Cached(lengths, headdim=headdim, nheads=16, nheads_k=2)
    problem = case.problem(backend)
    out, lse, *_ = run(backend, problem)
    lengths, table = problem.options["cache_seqlens"], problem.options["block_table"]
    lengths[0], lengths[2] = -1, table.shape[1] * case.page + 1
    table[1, 7] = problem.k_cache.shape[0]
    backend.monkeypatch.setenv("VOLTA_FA_CHECK_LENGTHS", "0")
    found_out, found_lse, *_ = run(backend, problem)
    for b in range(case.batch):
        if b < 3:
            assert found_out[b].isnan().all() and found_lse[b].isnan().all(), b
        else:
            # other sequences' lengths move the blocks' shares, and so where sums begin
            torch.testing.assert_close(found_out[b], out[b], rtol=2e-3, atol=2e-3)
            torch.testing.assert_close(found_lse[b], lse[b], rtol=1e-5, atol=1e-5)


@on("sim", "cuda")
@pytest.mark.parametrize("cu", [[0, 2, 4, 5], [0, 3, 2, 6], [1, 2, 4, 6], [0, 2, 9, 9]])
def test_rows_of_no_sequence_are_nan(backend, cu):
    """Packed rows behind the last sequence, and those of sequences that cannot be."""
    problem = Cached(((2, 40, 0), (2, 50, 0), (2, 60, 0)), packed=True, nheads=8, nheads_k=2).problem(backend)
    problem.options["cu_seqlens_q"] = backend.ints(cu)
    problem.options["max_seqlen_q"] = 3
    backend.monkeypatch.setenv("VOLTA_FA_CHECK_LENGTHS", "0")
    out, lse, *_ = run(backend, problem)
    owned = {
        row
        for b, (first, end) in enumerate(zip(cu, cu[1:]))
        if 0 <= first <= end <= min(first + 3, 6) and (b or first == 0)
        for row in range(first, end)
    }
    for row in range(6):
        assert out[row].isnan().all() == (row not in owned) and lse[:, row].isnan().all() == (row not in owned), row


def test_plans_show_a_caches_kernels():
    """For a V100, by numbers alone."""
    plan = lambda seqlen_q, **more: json.loads(torch.ops.volta_fa._plan(3, seqlen_q, 4000, 64, 8, 128, 128, True, **more))["cache"]  # noqa: E731
    step = plan(8)
    assert step["decode"]["name"] == "volta_decode_128x64" and step["decode"]["grid"] == [80, 1, 1] and step["prefill"] is None
    assert step["append"]["name"] == "volta_append" and step["append"]["grid"][1:] == [8, 3]
    # two slots for each of 80 blocks, of 64 rows and 128 columns
    assert step["decode"]["partials"] >= 2 * 80 * 64 * 128 and step["decode"]["semaphores"] >= 2 * 80
    quantized = step.pop("quantized")
    assert {name: kernel["name"] for name, kernel in quantized.items()} == {
        "int8": "volta_decode_int8_128x32", "int4": "volta_decode_int4_128x32",
        "fp8_e5m2": "volta_decode_e5m2_128x32", "fp8_e4m3": "volta_decode_e4m3_128x32",
    }  # fmt: skip
    appending = step.pop("append_quantized")
    assert {name: kernel["name"] for name, kernel in appending.items()} == {
        "int8": "volta_append_int8", "int4": "volta_append_int4", "fp8_e5m2": "volta_append_e5m2", "fp8_e4m3": "volta_append_e4m3",
    }  # fmt: skip
    assert all(kernel["reason"] for kernel in [*step.values(), *quantized.values(), *appending.values()] if kernel)
    chunk = plan(100)
    assert chunk["prefill"]["pass"] == "Prefill" and chunk["prefill"]["grid"][2] == 3 and chunk["decode"]["block_rows"] == 32
    assert plan(100, features="softcap")["prefill"]["name"] != chunk["prefill"]["name"]
    assert plan(8, features="bias") is None and plan(8, features="dropout") is None


@on("cuda")
def test_semaphores_are_clean_after_many_calls(backend):
    """Calls on two streams split row tiles, and do not depend on the state of their scratch memory."""
    problem = Cached(((1, 4000, 0), (1, 100, 0), (1, 0, 0)), nheads=8, nheads_k=2).problem(backend)
    expected = fwd_kvcache(problem.q, problem.k_cache, problem.v_cache, **problem.options)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    for i in range(1000):
        with torch.cuda.stream(side if i % 3 else torch.cuda.current_stream()):
            found = fwd_kvcache(problem.q, problem.k_cache, problem.v_cache, **problem.options)
            if i % 100 == 99:
                torch.cuda.synchronize()
                agreed([expected, found])


@on("cuda")
def test_graph_serves_any_lengths(backend):
    problem = Cached(((1, 4000, 0), (1, 100, 0), (1, 0, 0), (1, 777, 0)), nheads=8, nheads_k=2, page=0).problem(backend)
    call = lambda: fwd_kvcache(problem.q, problem.k_cache, problem.v_cache, **problem.options)  # noqa: E731
    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call()
    lengths = problem.options["cache_seqlens"]
    # behind a sequence's tokens there is NaN
    for i in range(20):
        lengths.copy_(torch.tensor([4000 - 199 * i, 5 * i, 0, i], dtype=torch.int32))
        graph.replay()
        agreed([call(), captured])
        assert not captured[0].isnan().any() and not captured[1].isnan().any()


@on("sim")
def test_memory_of_any_content(backend, monkeypatch):
    """Neither scratch memory nor what calls leave in it is looked at: the simulator fills all of it with ones before each call."""
    case = Cached(((1, 3000, 0),), nheads=8)
    problem = case.problem(backend)
    first = run(backend, problem)
    for _ in range(3):
        agreed([first, run(backend, problem)])
    assert math.isfinite(first[0].sum().item())


# ---- append and prefill kernels ------------------------------------------------------------------------------------------

#: (queries, cached tokens, appended tokens) of each sequence: too many query rows per KV head for decode, so prefill is chosen.
MANY = ((141, 14, 141), (1, 40, 1), (0, 30, 0), (70, 85, 0), (65, 0, 65))
#: Options of a case that request a feature.
OPTIONS_OF_FEATURE = {"softcap": {"softcap": 3.0}, "alibi": {"alibi": "bh"}}
VARIANTS = [v for v in INFO["variants"] if v["sm"] in GPUS and v["pass"] in ("Prefill", "Append") and v["cache"] == "float"]
QUANTIZING = [v for v in INFO["variants"] if v["sm"] in GPUS and v["pass"] == "Append" and v["cache"] != "float"]


def launched(backend, problem) -> list[str]:
    """Returns the names of the kernels of a call, from the simulator's timing report."""
    call = lambda: fwd_kvcache(problem.q, *problem.copy_of_cache(), *problem.new, **problem.options)  # noqa: E731
    return [launch["kernel"] for launch in backend.launches(call)]


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: v["name"])
@on("sim")
def test_variant_runs(backend, variant):
    """Runs each kernel with a paged and a contiguous cache, and with a headdim below the kernel's."""
    backend.monkeypatch.setenv("VOLTA_FA_SIM_GPU", GPUS[variant["sm"]])
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
    backend.monkeypatch.setenv("VOLTA_FA_SIM_GPU", GPUS[variant["sm"]])
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
    agreed([expected, run(backend, problem)])


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
        agreed([(*expected, *others), (*captured, *caches)])
