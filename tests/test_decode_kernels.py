"""The kernels of `fwd_kvcache`: decode, append and prefill. test_kvcache.py tests what holds for every path of the operator.

A decode kernel computes tiles of 8 to 64 rows; the rows are a sequence's queries times the query heads of a KV head. It loops over the
keys in steps of some tokens. Blocks split the keys of a tile, and the last block combines partial results. From many rows on, a prefill
kernel runs. Append writes new keys and values.

cached.py has problems (`Cached`): (queries, cached tokens, appended tokens) of each sequence, and options by name; page 0: a dense cache.
`check` compares one with fp64, `run` returns out, softmax_lse and the caches. Both run kernels twice and compare bits. `problem.places[b]`
are entry (or page) and row of each token of sequence b. A backend is the simulator (`sim`) or a GPU (`cuda`), with a dtype. `force` makes
the planner take a kernel."""

import dataclasses
import json
import math

import pytest
import torch

from cached import Cached, check, run
from conftest import GPUS, INFO, agreed, assert_same_bits, on, on_cases  # agreed: the first of results, which must be bitwise identical

fwd_kvcache = torch.ops.volta_fa.fwd_kvcache


def queries(n):
    """Returns lengths (queries, cached tokens, appended tokens) of four sequences with n queries each."""
    return tuple((n, cached, 0) for cached in (0, 1, 77, 200))


#: Every tile of rows, full and not, at every headdim of kernels; rows of one sequence in several tiles; headdims that are padded.
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


def shared(n, group, headdim, **options):
    """Returns a problem of four sequences with n queries, and `group` query heads for each of two KV heads: n * group rows a tile."""
    lengths = ((n, 403, 0), (n, 0, 0), (n, 61, 0), (n, 8 * n + 1, 0))
    return Cached(lengths, headdim=headdim, nheads=2 * group, nheads_k=2, **options)


#: Tiles whose four warps share the keys and values that they load: of 64 rows, and of 32 rows from headdim 256 on. Rows are divided into
#: queries and heads in many ways; options change what a step computes.
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
#: Row tiles whose keys several blocks split: their partial results combine in one, two and three levels, in a fixed order.
SPLIT = [
    Cached(((1, 600, 0), (1, 30, 0)), nheads=8),
    Cached(((1, 7000, 0), (1, 0, 0), (1, 900, 0)), nheads=2),
    Cached(((8, 5000, 0),), nheads=8, headdim=128, softcap=5.0, sinks="own"),
    Cached(((1, 9000, 0),), nheads=4, page=0, num_splits=2),
    Cached(((1, 2500, 0), (1, 0, 0), (1, 300, 0)), nheads=8, headdim=512),
    Cached(((4, 2000, 0),), nheads=16, headdim=512, sinks="own"),
]
#: In bf16: one of each tile and headdim, and of those that are padded; rows of several tiles; fewer rows at headdim 256.
BF16 = [
    *TILES[0:3:2], *TILES[5:7], *TILES[9:11], *TILES[11::3], TILES[-1], Cached(queries(2), headdim=128, nheads=8, nheads_k=2, page=0),
    *SHARED_STEPS, *(shared(n, group, 256) for n, group in ((2, 8), (4, 4), (3, 3), (4, 8), (5, 5))),
]  # fmt: skip


@on_cases((("sim", "cuda"), [*TILES, *SHARED_STEPS, *SPLIT]), (("sim-bf16", "cuda-bf16"), BF16))
def test_tiles(backend, case):
    check(backend, case)


@on("sim-bf16", "cuda-bf16")
@pytest.mark.parametrize(
    "queries, headdim", [(1, 64), (1, 128), (1, 256), (1, 512), (8, 64), (8, 128), (3, 256), (8, 256), (3, 512), (8, 512)]
)
@pytest.mark.parametrize("exponent", [-110, -40, 40, 110])
def test_bf16_values_of_any_magnitude(backend, queries, headdim, exponent):
    """Values scaled by a power of two give results scaled by it, bitwise."""
    lengths = ((queries, 600, 0), (queries, 30, 0), (queries, queries, 0))
    problem = Cached(lengths, headdim=headdim, nheads=8).problem(backend)
    out, lse, *_ = run(backend, problem)
    problem.v_cache *= 2.0**exponent
    scaled, same, *_ = run(backend, problem)
    expected = out * 2.0**exponent
    # subnormal expectations are rounded twice, so these may differ by one unit, 2^-133
    normal = expected.abs() >= 2.0**-126
    assert_same_bits("out", scaled[normal], expected[normal])
    assert bool(((scaled - expected)[~normal].double().abs() <= 2.0**-133).all())
    assert_same_bits("softmax_lse", same, lse)


@on("sim-bf16", "cuda-bf16")
@pytest.mark.parametrize("queries, headdim", [(1, 64), (1, 512), (8, 64), (3, 256), (8, 256), (8, 512)])
@pytest.mark.parametrize("exponents", [(17, -17), (-40, 40), (100, -101)], ids=str)
def test_bf16_queries_and_keys_of_any_magnitude(backend, queries, headdim, exponents):
    """Powers of two in q and k, with their inverse in softmax_scale, change no bit of the results."""
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
def test_bf16_values_that_grow(backend, queries, headdim, growth):
    """Values grow or shrink along the keys, so that a warp must change the power of two by which it scales bf16 values."""
    case = Cached(((queries, 150, 0), (queries, 60, 0), (queries, 9, 0)), nheads=8, headdim=headdim)

    def change(problem):
        for b, (_, cached, _) in enumerate(case.lengths):
            at = tuple(t[:cached].to(backend.device) for t in problem.places[b])
            factors = growth ** (torch.arange(cached, dtype=torch.float64, device=backend.device) / 2 - cached / 4)
            problem.v_cache[at] = (problem.v_cache[at].double() * factors[:, None, None]).to(problem.v_cache.dtype)

    check(backend, case, change)


@on("sim-bf16", "cuda-bf16")
@pytest.mark.parametrize("queries, headdim", [(2, 64), (8, 64), (8, 256), (1, 512), (8, 512)])
def test_bf16_infinities_and_large_keys(backend, queries, headdim):
    """In bf16, an infinite value changes only its column, keys beyond fp16's range are right, and a NaN key changes only its sequence."""
    problem = Cached(((queries, 50, 0), (queries, 90, 0)), headdim=headdim, nheads=8).problem(backend)
    out, lse, *_ = run(backend, problem)
    entry, row = problem.places[1]
    first = (entry[3].item(), row[3].item())
    problem.v_cache[first][0, 5] = math.inf
    found, same, *_ = run(backend, problem)
    assert not found[1, ..., 5].isfinite().any()
    columns = [column for column in range(headdim) if column != 5]
    # the other columns and the other sequence keep their bits
    assert_same_bits("out", found[..., columns], out[..., columns])
    assert_same_bits("softmax_lse", same, lse)
    problem.v_cache[first][0, 5] = 0.0
    keys = problem.k_cache[first].clone()
    results = []
    for large in (1e30, 65280.0):  # fp16 ends at 65504
        problem.k_cache[first] = torch.where(keys > 0, large, -large)
        results.append(run(backend, problem)[0])
    # The softmax of a row is 1 at the large key or 0 there, for both sizes, so results agree.
    torch.testing.assert_close(*results, rtol=1e-2, atol=1e-2)
    assert results[0].isfinite().all()
    problem.k_cache[first][0, 2] = math.nan
    found, *_ = run(backend, problem)
    assert found[1].isnan().all()
    assert_same_bits("out", found[0], out[0])


@on("sim", "cuda")
@pytest.mark.parametrize("num_splits", [1, 2, 5, 1000])
def test_num_splits(backend, num_splits):
    """Any number of splits of a tile's keys is right. With 1, a sequence has bitwise the results that it has alone."""
    case = Cached(((2, 3000, 0), (2, 17, 0), (2, 0, 0), (2, 130, 0)), nheads=4, nheads_k=2, num_splits=num_splits)
    check(backend, case)
    if num_splits == 1:
        many, alone = case.problem(backend), dataclasses.replace(case, lengths=case.lengths[:1]).problem(backend)
        for cache, other in ((alone.k_cache, many.k_cache), (alone.v_cache, many.v_cache)):
            cache[alone.places[0]] = other[many.places[0]]
        alone.q.copy_(many.q[:1])
        out, lse, *_ = run(backend, many)
        agreed([(out[:1], lse[:1]), run(backend, alone)])


@on("sim", "cuda")
@pytest.mark.parametrize("queries, headdim", [(2, 64), (8, 64), (8, 256), (40, 64), (1, 512), (8, 512)])
def test_wrong_sequences_are_nan_and_alone(backend, queries, headdim):
    """Invalid lengths and pages make their sequences NaN; the others keep their results up to rounding."""
    lengths = tuple((queries, n, 0) for n in (40, 300, 60, 90, 33))
    case = Cached(lengths, headdim=headdim, nheads=16, nheads_k=2)
    problem = case.problem(backend)
    out, lse, *_ = run(backend, problem)
    lengths, table = problem.options["cache_seqlens"], problem.options["block_table"]
    lengths[0], lengths[2] = -1, table.shape[1] * case.page + 1
    table[1, 7] = problem.k_cache.shape[0]  # the number after the last page
    backend.monkeypatch.setenv("VOLTA_FA_CHECK_LENGTHS", "0")
    found_out, found_lse, *_ = run(backend, problem)
    for b in range(case.batch):
        if b < 3:
            assert found_out[b].isnan().all() and found_lse[b].isnan().all(), b
        else:
            # other sequences' lengths change how blocks split the keys, and so the order of sums
            torch.testing.assert_close(found_out[b], out[b], rtol=2e-3, atol=2e-3)
            torch.testing.assert_close(found_lse[b], lse[b], rtol=1e-5, atol=1e-5)


@on("sim", "cuda")
@pytest.mark.parametrize("cu", [[0, 2, 4, 5], [0, 3, 2, 6], [1, 2, 4, 6], [0, 2, 9, 9]])
def test_rows_of_no_sequence_are_nan(backend, cu):
    """NaN fills packed rows after the last sequence, and those of sequences with invalid cu_seqlens. A valid sequence has at most
    max_seqlen_q of the six rows, and the first one begins at 0."""
    problem = Cached(((2, 40, 0), (2, 50, 0), (2, 60, 0)), packed=True, nheads=8, nheads_k=2).problem(backend)
    problem.options["cu_seqlens_q"] = backend.ints(cu)
    problem.options["max_seqlen_q"] = 3
    backend.monkeypatch.setenv("VOLTA_FA_CHECK_LENGTHS", "0")
    out, lse, *_ = run(backend, problem)
    owned = set()
    for b, (first, end) in enumerate(zip(cu, cu[1:])):
        if first <= end <= min(first + 3, 6) and (b or first == 0):
            owned |= {*range(first, end)}
    for row in range(6):
        assert out[row].isnan().all() == (row not in owned) and lse[:, row].isnan().all() == (row not in owned), row


def test_plans_show_a_caches_kernels():
    """`_plan` describes the kernels of a call on a V100, without tensors."""

    def plan(seqlen_q, batch=3, seqlen_k=4000, nheads=64, nheads_k=8, headdim=128, **more):
        return json.loads(torch.ops.volta_fa._plan(batch, seqlen_q, seqlen_k, nheads, nheads_k, headdim, headdim, True, **more))["cache"]

    step = plan(8)
    assert step["decode"]["name"] == "volta_decode_128x64" and step["decode"]["grid"] == [80, 1, 1] and step["prefill"] is None
    assert step["append"]["name"] == "volta_append" and step["append"]["grid"][1:] == [8, 3]
    # a block per SM, 80, with two slots for partial results of 64 rows and 128 columns
    assert step["decode"]["partials"] >= 2 * 80 * 64 * 128 and step["decode"]["semaphores"] >= 2 * 80
    quantized, appending = step.pop("quantized"), step.pop("append_quantized")
    assert quantized.keys() == appending.keys() >= {"int8", "int4", "fp8_e5m2"}
    assert quantized["fp8_e5m2"]["name"] == "volta_decode_e5m2_128x32" and appending["fp8_e5m2"]["name"] == "volta_append_e5m2"
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


# ---- append and prefill kernels ------------------------------------------------------------------------------------------

#: (queries, cached tokens, appended tokens) of each sequence: too many query rows per KV head for decode, so prefill is chosen.
MANY = ((141, 14, 141), (1, 40, 1), (0, 30, 0), (70, 85, 0), (65, 0, 65))
#: Options of a case that request a feature.
OPTIONS_OF_FEATURE = {"softcap": {"softcap": 3.0}, "alibi": {"alibi": "bh"}}
#: Kernels that the simulator runs, for fp16 caches and for quantized ones: dicts as `info()` describes them.
VARIANTS = [v for v in INFO["variants"] if v["sm"] in GPUS and v["pass"] in ("Prefill", "Append") and v["cache"] == "float"]
QUANTIZING = [v for v in INFO["variants"] if v["sm"] in GPUS and v["pass"] == "Append" and v["cache"] != "float"]


def launched(backend, problem) -> list[str]:
    """Returns the names of the kernels of a call, from the simulator's timing report."""
    call = lambda: fwd_kvcache(problem.q, *problem.copy_of_cache(), *problem.new, **problem.options)  # noqa: E731
    return [launch["kernel"] for launch in backend.launches(call)]


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: v["name"])
@on("sim")
def test_variant_runs(backend, variant, force):
    """Runs each kernel with a paged and a contiguous cache, and with a headdim below the kernel's."""
    backend.monkeypatch.setenv("VOLTA_FA_SIM_GPU", GPUS[variant["sm"]])
    feature_options = {name: value for feature in variant["features"] for name, value in OPTIONS_OF_FEATURE.get(feature, {}).items()}
    headdim = variant["headdim"] if variant["pass"] == "Prefill" else 64
    case = Cached(MANY, headdim=headdim, nheads=8, packed=True, own_new=True, sinks="own", **feature_options)
    if variant["pass"] == "Prefill":  # blocks of each size, also where the planner takes others for lengths or a mask
        force(choices=[{"pass": "Prefill", "variant": variant["name"]}])
    dense = dataclasses.replace(case, page=0, leftpad=(3, 0, 30, 2, 0), batch_idx=True, window_left=130, headdim_v=headdim - 8)
    padded = dataclasses.replace(case, page=48, layout="kv", headdim=headdim - 8, is_causal=False)
    for each in (case, dense, padded):
        assert variant["name"] in launched(backend, each.problem(backend))
        check(backend, each)


@pytest.mark.parametrize("variant", QUANTIZING, ids=lambda v: v["name"])
@on("sim")
def test_quantizing_variant_runs(backend, variant):
    """Launches each quantizing append kernel. test_kvcache_quantized.py checks what it writes."""
    backend.monkeypatch.setenv("VOLTA_FA_SIM_GPU", GPUS[variant["sm"]])
    case = Cached(((3, 40, 5), (1, 9, 2), (0, 20, 0)), packed=True, own_new=True, kv_dtype=variant["cache"])
    assert variant["name"] in launched(backend, case.problem(backend))


@pytest.mark.parametrize("rotary_dtype", ["own", "fp32"])
@pytest.mark.parametrize("interleaved", [False, True], ids=["half", "interleaved"])
@on("cpu-fp32", "sim", "cuda")
def test_rotation_is_rounded_once(backend, interleaved, rotary_dtype):
    """Rotary is computed in fp32 and rounded once: bitwise identical to PyTorch. Other columns are copied."""
    rotary = "interleaved" if interleaved else "half"
    lengths = ((3, 9, 3), (3, 0, 3), (3, 61, 3))
    case = Cached(lengths, headdim=96, headdim_v=40, rotary=rotary, rotary_dim=32, rotary_dtype=rotary_dtype, layout="hnd")
    problem = case.problem(backend)
    _, _, k_cache, v_cache, _ = run(backend, problem)
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
