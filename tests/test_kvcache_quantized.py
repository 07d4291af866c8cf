"""Tests of quantized KV caches: their formats, attention over them (`fwd_kvcache`), appending to them, and rejected arguments.

Formats (`kv_dtype`): int8 and int4 have a scale for each token and KV head (int4 also a zero point), fp8 has at most one scale per sequence
and KV head (`descale`), int8k_int4v has int8 keys and int4 values. `volta_fa.quantize_kv` and `dequantize_kv` define them. Decode kernels
read the codes in place; calls with many queries first dequantize tokens to q's dtype.

cached.py has problems (`Cached`). Their fields:
    lengths     (queries, cached tokens, tokens that the call appends) of each sequence
    page        tokens of a page (default 16); 0: a dense cache
    layout      "hnd": heads before tokens; "kv": pages of K, then V; "wide": a slice of a larger tensor
    descale     "one", or the dimensions of fp8's scales (h: heads, bh: batch and heads)
    all_cached  whether cache_seqlens is not given: the whole cache counts
    own_new     whether appended tokens have cu_seqlens_k_new
    spread      standard deviation of q, k and v

WRITTEN names the options that appending writes. VOLTA_FA_CHECK_LENGTHS=0: the call reads no lengths, pages or scales on the host (the
simulator's default is 1), so kernels meet invalid ones.

`on(...)` lists a test's backends: the CPU, the simulator (`sim`) or a GPU (`cuda`), with a dtype of queries. INFO describes the library.
Of cached.py: `run` returns out, softmax_lse, the caches and the options after the call, `check` compares these with fp64 and with what an
append must write, `check_cache` and `check_sequences` do half of that each, `store` writes codes and scales of tokens into a cache."""

from __future__ import annotations

import dataclasses
import functools
import math

import pytest
import torch

import reference
import volta_fa
from cached import Cached, check, check_cache, check_opcheck, check_reads_no_value, check_sequences, keys_and_values, run, store
from conftest import GPUS, INFO, agreed, assert_same_bits, captured, judge, on, on_cases
from test_decode_kernels import launched  # names of a call's kernels

# Lengths: one query of each sequence, with its token appended (APPEND) or not (ONE); 3 queries (EVEN); 0 to 33, appended (CHUNKS).
from test_kvcache import APPEND, CHUNKS, EVEN, ONE
from volta_fa.check.cache_cases import WRITTEN, has_scales
from volta_fa.kv_cache.formats import CACHE_KV_DTYPES, KV_DTYPES, parts_of

fwd_kvcache = torch.ops.volta_fa.fwd_kvcache


def test_every_code_is_dequantized_as_its_format_defines():
    codes = torch.arange(256, dtype=torch.uint8).view(256, 1, 1)
    one = torch.ones(256, 1)
    found = volta_fa.dequantize_kv(codes.view(torch.int8), "int8", one * 0.5)
    assert found.flatten().tolist() == [(n - 256 if n > 127 else n) / 2 for n in range(256)]
    found = volta_fa.dequantize_kv(codes, "int4", one * 2, one * 1.5)
    assert found[:, 0].tolist() == [[2 * (n % 16 - 1.5), 2 * (n // 16 - 1.5)] for n in range(256)]
    for kv_dtype, dtype, mantissa, bias in (("fp8_e5m2", torch.float8_e5m2, 2, 15), ("fp8_e4m3", torch.float8_e4m3fn, 3, 7)):
        found = volta_fa.dequantize_kv(codes.view(dtype), kv_dtype, torch.tensor([4.0])).flatten()
        for n, value in enumerate(found.tolist()):
            exponent, fraction = (n & 127) >> mantissa, n & (1 << mantissa) - 1
            if kv_dtype == "fp8_e5m2" and exponent == 31:
                expected = math.inf if fraction == 0 else math.nan
            elif kv_dtype == "fp8_e4m3" and n & 127 == 127:
                expected = math.nan
            else:
                expected = (fraction / 2**mantissa + (exponent > 0)) * 2.0 ** (max(exponent, 1) - bias)
            expected *= -4 if n & 128 else 4
            assert value == expected or (math.isnan(value) and math.isnan(expected)), (kv_dtype, n)


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_quantize(kv_dtype, dtype):
    """The error is at most half a step. Zeros, and in int4 equal numbers, come back exactly. In int8 and int4, NaN and infinities make
    their row NaN; fp8 keeps NaN and clamps infinities to its largest number."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(7, 3, 64, generator=generator).to(dtype) * torch.tensor([1e-4, 1.0, 300.0])[:, None].to(dtype)
    x[0], x[1, :, :32], x[1, :, 32:] = 0.0, -2.5, -2.5
    scale = None if has_scales(kv_dtype) else torch.tensor([1e-2, 1.0, 4.0])
    made = volta_fa.quantize_kv(x, kv_dtype, scale=scale)
    back = volta_fa.dequantize_kv(made.data, kv_dtype, made.scale, made.zero_point, dtype=torch.float64)
    assert back.shape == x.shape and (back[0] == 0).all()
    exact = x.double()
    if has_scales(kv_dtype):
        assert made.scale is not None and made.scale.shape == x.shape[:-1]
        allowed = made.scale.double()[..., None] * (0.5 + 1e-4)  # 1e-4: fp32 rounding
        if kv_dtype == "int4":
            assert (back[1] == -2.5).all()
    else:
        assert scale is not None
        mantissa_bits, smallest = (2, 2.0**-16) if kv_dtype == "fp8_e5m2" else (3, 2.0**-9)  # smallest: the subnormal numbers' step
        allowed = torch.maximum(exact.abs() * 2.0 ** -(mantissa_bits + 1), smallest / 2 * scale.double()[:, None]) * (1 + 1e-6)
    assert ((back - exact).abs() <= allowed).all()
    for bad in (math.nan, math.inf, -math.inf):
        y = x.clone()
        y[3, 1, 5] = bad
        other = volta_fa.quantize_kv(y, kv_dtype, scale=scale)
        found = volta_fa.dequantize_kv(other.data, kv_dtype, other.scale, other.zero_point)
        if has_scales(kv_dtype):
            assert found[3, 1].isnan().all() and not found[3, ::2].isnan().any()
        else:
            largest = 57344.0 if kv_dtype == "fp8_e5m2" else 448.0
            assert math.isnan(found[3, 1, 5]) if math.isnan(bad) else found[3, 1, 5] == math.copysign(largest, bad)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_int4_of_a_range_beyond_float32(dtype):
    """max x - min x exceeds float32's largest number, which no x does. Codes and zero points are those of x / 4."""
    x = ((torch.rand(7, 3, 64, generator=torch.Generator().manual_seed(3)) * 2 - 1) * 3.3e38).to(dtype)
    x[0, 0, ::2], x[0, 0, 1::2] = torch.finfo(dtype).max, torch.finfo(dtype).min
    assert (x.float().amax(-1) - x.float().amin(-1)).isinf().all()
    made, quarter = volta_fa.quantize_kv(x, "int4"), volta_fa.quantize_kv(x / 4, "int4")
    assert torch.equal(made.data, quarter.data) and torch.equal(made.zero_point, quarter.zero_point)
    assert torch.equal(made.scale, quarter.scale * 4)
    back = volta_fa.dequantize_kv(made.data, "int4", made.scale, made.zero_point)
    assert ((back.double() - x.double()).abs() <= made.scale.double()[..., None] * (0.5 + 1e-4)).all()


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@on("cuda")
def test_quantizes_on_a_gpu_bitwise_as_on_the_cpu(backend, kv_dtype):
    x = torch.randn(100, 3, 64, generator=torch.Generator().manual_seed(2))
    for scale in (None,) if has_scales(kv_dtype) else (0.3, torch.tensor([0.1, 0.7, 3.0])):
        there, here = (volta_fa.quantize_kv(t, kv_dtype, scale=scale) for t in (x.to(backend.device), x))
        for name, a, b in zip(here._fields, there, here, strict=True):
            if a is not None:
                assert_same_bits(name, a.cpu(), b)


def test_a_scale_given_as_a_number_is_a_tensor_beside_the_codes():
    for scale in (2, 2.0):
        made = volta_fa.quantize_kv(torch.empty(2, 3, 8, device="meta"), "fp8_e5m2", scale=scale).scale
        assert made is not None and (made.shape, made.dtype, made.device.type) == ((1,), torch.float32, "meta")


def test_invalid_arguments_of_quantize_and_dequantize_are_refused():
    x = torch.randn(2, 3, 8)
    for message, call in (
        ("kv_dtype: got 'int3'", lambda: volta_fa.quantize_kv(x, "int3")),
        ("x: got dtype torch.int64", lambda: volta_fa.quantize_kv(x.long(), "int8")),
        ("x: got a tensor of rank 1", lambda: volta_fa.quantize_kv(x[0, 0], "int8")),
        ("x: got headdim 7", lambda: volta_fa.quantize_kv(x[..., :7], "int4")),
        ("scale: got one", lambda: volta_fa.quantize_kv(x, "int8", scale=1.0)),
        (r"scale: got shape \(4,\), expected one that broadcasts", lambda: volta_fa.quantize_kv(x, "fp8_e4m3", scale=torch.ones(4))),
        (r"scale: got shape \(1, 1, 1\)", lambda: volta_fa.quantize_kv(x, "fp8_e4m3", scale=torch.ones(1, 1, 1))),
        (r"scale: got shape \(4,\)", lambda: volta_fa.dequantize_kv(x.to(torch.int8), "int8", torch.ones(4))),
        (r"zero_point: got shape \(4,\)", lambda: volta_fa.dequantize_kv(x.to(torch.uint8), "int4", x[..., 0], torch.ones(4))),
        ("data: got dtype torch.float32", lambda: volta_fa.dequantize_kv(x, "int8", x[..., 0])),
        ("scale: got None", lambda: volta_fa.dequantize_kv(x.to(torch.int8), "int8")),
        ("zero_point: got None", lambda: volta_fa.dequantize_kv(x.to(torch.uint8), "int4", x[..., 0])),
        ("zero_point: got a tensor", lambda: volta_fa.dequantize_kv(x.to(torch.int8), "int8", x[..., 0], x[..., 0])),
    ):
        with pytest.raises(ValueError, match=message):
            call()


CASES = [
    Cached(ONE),
    Cached(ONE, page=0, nheads=4, nheads_k=2),
    Cached(ONE, page=48, nheads=6, nheads_k=1, headdim=128),
    Cached(ONE, page=256, nheads=4, nheads_k=4, headdim=32, is_causal=False),
    Cached(EVEN, layout="hnd", nheads=4, nheads_k=2),
    Cached(EVEN, layout="kv", nheads=4, nheads_k=2, page=32, headdim=128),
    Cached(EVEN, layout="wide", nheads=4, nheads_k=2),
    Cached(EVEN, headdim=256, headdim_v=64),
    Cached(EVEN, headdim=96, headdim_v=160, is_causal=False),
    Cached(EVEN, packed=True, nheads=8, nheads_k=1, headdim=128),
    Cached(EVEN, window_left=5, sinks="own", softcap=4.0, alibi="h"),
    Cached(EVEN, softmax_scale=-0.2),
    Cached(EVEN, num_splits=3, spread=3.0),
    Cached(EVEN, page=0, leftpad=(3, 0, 40, 2), batch_idx=True),
    Cached(((2, 19, 0), (2, 19, 0)), all_cached=True, page=0, layout="hnd"),
    Cached(((70, 90, 0), (1, 300, 0), (0, 5, 0), (2, 129, 0)), packed=True, nheads=4, nheads_k=2),
    Cached(APPEND, nheads=4, nheads_k=2),
    Cached(APPEND, packed=True, headdim=128, nheads=6, nheads_k=2, layout="hnd"),
    Cached(CHUNKS, packed=True, page=64, layout="kv", window_left=20),
    Cached(CHUNKS, packed=True, page=0, layout="hnd", batch_idx=True),
    Cached(((2, 9, 5), (2, 0, 5), (2, 59, 5)), layout="wide", headdim=40, headdim_v=24),
    Cached(((3, 9, 3), (3, 0, 3), (3, 61, 3)), rotary="half"),
    Cached(((3, 9, 3), (3, 16, 3)), page=0, rotary="interleaved", leftpad=(2, 11), nheads=4, nheads_k=2),
    Cached(((2, 9, 5), (2, 0, 5), (2, 59, 5)), headdim=512, rotary="half"),
    # headdims whose rows are not aligned to 16 bytes, so the call dequantizes first
    Cached(APPEND, headdim=20, headdim_v=12, nheads=4, nheads_k=2),
]

#: Row tiles of every size at every headdim, and row tiles that several blocks share.
TILES = [
    *(
        Cached(tuple((n, cached, 0) for cached in (1, 77, 200)), headdim=d, nheads=2 * group, nheads_k=2)
        for d in (64, 128, 256, 512)
        for n, group in ((1, 8), (2, 6), (4, 8))
    ),
    Cached(((1, 7000, 0), (1, 0, 0), (1, 900, 0)), nheads=2),
]

#: int4 kernels load tiles several steps ahead ("staged"): all group sizes and headdims, page sizes around a step, lengths of any remainder.
STAGED = [
    Cached(
        tuple((1, n, 0) for n in (900 - 7 * group, 340 + group, 16 + group, 0)), headdim=d, nheads=2 * group, nheads_k=2, page=page,
        layout="hnd" if group % 2 else "nhd", num_splits=group % 3, window_left=350 if group == 4 else -1, kv_dtype="int4",
    )
    for d in (64, 128, 256, 512)
    for group, page in zip(range(1, 9), (16, 64, 256, 48, 0, 16, 32, 256))
]  # fmt: skip

MANY = ((40, 60, 40), (40, 0, 40), (40, 129, 40), (40, 200, 40))
#: More query rows than decode kernels take (64 per KV head), so the call dequantizes the tokens before a forward kernel.
DEQUANTIZED = [
    Cached(MANY, nheads=4, nheads_k=2),
    Cached(MANY, nheads=4, nheads_k=2, page=48, layout="kv", headdim=128, window_left=30),
    Cached(((141, 14, 141), (1, 40, 1), (0, 30, 0), (70, 85, 0), (65, 0, 65)), packed=True, own_new=True, layout="hnd", sinks="own"),
    Cached(((70, 90, 0), (1, 300, 0), (0, 5, 0), (2, 129, 0)), packed=True, page=0, leftpad=(3, 11, 0, 2), batch_idx=True, window_left=9),
    Cached(((70, 90, 3), (70, 30, 3)), layout="wide", headdim=40, headdim_v=24, is_causal=False),
    Cached(((70, 90, 0), (70, 30, 0)), headdim=20, headdim_v=14, is_causal=False),
    Cached(((70, 90, 70), (70, 0, 70)), headdim=256, rotary="half", window_left=20, window_right=3, is_causal=False),
]


def in_each_format(cases):
    """Yields the cases with each kv_dtype, those of fp8 with each form of scales in turn."""
    descales = ("", "one", "h", "bh")
    for kv_dtype in CACHE_KV_DTYPES:
        for i, case in enumerate(cases):
            yield dataclasses.replace(case, kv_dtype=kv_dtype, descale="" if has_scales(kv_dtype) else descales[i % 4])


@on_cases(
    (("cpu-fp32", "sim", "cuda"), list(in_each_format([*CASES, *DEQUANTIZED]))),
    (("sim", "cuda"), [*in_each_format(TILES), *STAGED]),
    (("cpu-fp64", "cpu-bf16", "sim-bf16"), list(in_each_format(CASES[::8]))),
    (("sim-bf16",), list(in_each_format(DEQUANTIZED[::3]))),
)
def test_against_fp64(backend, case):
    check(backend, case)


@pytest.mark.parametrize("kv_dtype", CACHE_KV_DTYPES)
@on("cpu-fp32", "sim", "cuda")
def test_tokens_of_all_magnitudes(backend, kv_dtype):
    """Magnitudes of tokens, and so their scales, range from 2^-9 to 2^5 (keys: to 1) in random order."""
    case = Cached(((1, 200, 0), (3, 77, 0)), packed=True, nheads=4, nheads_k=2, kv_dtype=kv_dtype)
    problem = case.problem(backend)
    for which, cache in (("k", problem.k_cache), ("v", problem.v_cache)):
        for entry, row in problem.places:
            n = len(entry)
            sizes = 2.0 ** torch.linspace(-9, 5, n)[torch.randperm(n, generator=torch.Generator().manual_seed(n))]
            if which == "k":
                sizes = sizes.clamp_max(1.0)
            x = backend.randn(n, case.nheads_k, case.headdim) * sizes[:, None, None].to(backend.device, problem.q.dtype)
            place = (entry.to(x.device), row.to(x.device))
            store(which, cache, problem.options, place, volta_fa.quantize_kv(x, case.kv_dtype_of(which)))
    out, lse, *caches, _ = run(backend, problem)
    check_sequences(backend, problem, out, lse, *caches)


@pytest.mark.parametrize("kv_dtype", ["int4", "int8k_int4v"])
@on("cpu-fp32", "cpu-bf16", "sim-bf16", "cuda-bf16")
def test_appends_tokens_of_a_range_beyond_float32(backend, kv_dtype):
    problem = Cached(APPEND, nheads=4, nheads_k=2, kv_dtype=kv_dtype).problem(backend)
    problem.q.zero_()  # scores are 0: others of such keys would overflow
    for t in problem.new:
        t.copy_((torch.rand(t.shape, generator=backend.generator, device=backend.device) * 2 - 1) * 3.3e38)
    out, _, *caches, options = run(backend, problem)
    check_cache(problem, *caches, options)
    assert out.isfinite().all()


@pytest.mark.parametrize("kv_dtype", ["fp8_e5m2", "fp8_e4m3"])
@on("cpu-fp32", "sim", "cuda")
def test_every_code_of_fp8_is_read(backend, kv_dtype):
    """Kernels read every finite fp8 code exactly, subnormal ones too. NaN and (e5m2) infinite codes of values give NaN and infinities."""
    problem = Cached(((1, 256, 0),) * 4, nheads=2, nheads_k=1, kv_dtype=kv_dtype, is_causal=False).problem(backend)
    dtype = problem.k_cache.dtype
    codes = torch.arange(256, dtype=torch.uint8)
    finite = codes[volta_fa.dequantize_kv(codes.view(dtype).view(256, 1, 1), kv_dtype).flatten().isfinite()]
    # of keys only small ones, whose scores are not infinite either
    small = finite[volta_fa.dequantize_kv(finite.view(dtype).view(-1, 1, 1), kv_dtype).flatten().abs() < 8]
    k_bytes, v_bytes = caches = [t.view(torch.uint8) for t in (problem.k_cache, problem.v_cache)]
    for which, (cache, all_codes) in enumerate(zip(caches, (small, finite))):
        for b, (entry, row) in enumerate(problem.places):
            # spreads the codes over tokens and columns, in another order in each sequence, and in K and V
            index = (torch.arange(256)[:, None] * (7 + b) + torch.arange(64) * 3 + which) % len(all_codes)
            cache[entry, row] = all_codes[index][:, None].to(cache.device)
    nan = 0x7F if kv_dtype == "fp8_e4m3" else 0x7D  # a code
    (_, (entry1, row1), (entry2, row2), (entry3, row3)) = problem.places
    v_bytes[entry1[100], row1[100], 0, 9] = nan  # NaN in one column of sequence 1's output
    k_bytes[entry2[33], row2[33], 0, 5] = nan | 0x80  # -NaN: in all of sequence 2's
    if kv_dtype == "fp8_e5m2":
        v_bytes[entry3[7], row3[7], 0, 3] = 0xFC  # -inf: in one column of sequence 3's
    out, lse, *_ = run(backend, problem)
    for b in (0, 1, 3):
        k, v = keys_and_values(problem, b, problem.k_cache, problem.v_cache)
        exact = reference.forward(problem.queries(b)[None], k[None], v[None], **problem.score_options(b)).out
        special = ~exact.isfinite()
        assert_same_bits(f"sequence {b}", out[b][None].double()[special].nan_to_num(7.0), exact[special].nan_to_num(7.0))
        assert special.sum() == {0: 0, 1: 2, 3: 2 if kv_dtype == "fp8_e5m2" else 0}[b]  # of two heads
        # the other columns are as if the special value were 0
        out[b][special[0]] = 0.0
        out_part, *others = problem.parts(b, k, v.nan_to_num(0.0, 0.0, 0.0))
        judge(backend, [dataclasses.replace(out_part, exact=out_part.exact.masked_fill(special, 0.0)), *others], {"out": out})
    assert out[2].isnan().all() and lse[2].isnan().all()


@on("sim", "cuda")
@pytest.mark.parametrize("kv_dtype", ["int8", "int4", "int8k_int4v"])
def test_unchecked_scales_give_nan(backend, kv_dtype):
    """A scale that is NaN (of K or V), infinite or negative (of V) makes all output of its sequence and KV head NaN, and no other."""
    backend.monkeypatch.setenv("VOLTA_FA_CHECK_LENGTHS", "0")
    for name, value in (("k_scale", math.nan), ("v_scale", math.nan), ("v_scale", math.inf), ("v_scale", -1.0)):
        problem = Cached(((1, 60, 0), (1, 60, 0)), nheads=4, nheads_k=2, kv_dtype=kv_dtype).problem(backend)
        entry, row = problem.places[0]
        problem.options[name][entry[20], row[20], 1] = value
        out, *_ = run(backend, problem)
        assert out[0, :, 2:].isnan().all(), (name, value)
        assert torch.isfinite(out[0, :, :2]).all() and torch.isfinite(out[1]).all()


@pytest.mark.parametrize("kv_dtype", CACHE_KV_DTYPES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@on("sim", "cuda")
def test_dequantizes_bitwise(backend, kv_dtype, dtype):
    """The kernel dequantizes bitwise as dequantize_kv: attention over dequantize_kv's tokens has the same bits."""
    backend.monkeypatch.setenv("VOLTA_FA_CHECK_LENGTHS", "0")
    lengths = ((70, 100, 0), (70, 71, 0), (70, 300, 0))
    case = Cached(lengths, nheads=2, nheads_k=2, kv_dtype=kv_dtype, descale="" if has_scales(kv_dtype) else "bh", window_left=40)
    backend.dtype = dtype
    problem = case.problem(backend)
    found, lse, *_ = run(backend, problem)
    seqlen_k = case.page * problem.options["block_table"].shape[1]  # the length that the call assumes, because it reads no lengths
    dense = torch.zeros(2, len(lengths), seqlen_k, case.nheads_k, case.headdim, dtype=dtype, device=backend.device)
    for b, (entry, row) in enumerate(problem.places):
        place = entry.to(backend.device), row.to(backend.device)
        for i, (which, cache) in enumerate((("k", problem.k_cache), ("v", problem.v_cache))):
            made = {s: t[place] for s in ("scale", "zero_point") if (t := problem.options.get(f"{which}_{s}")) is not None}
            if not has_scales(kv_dtype):
                made["scale"] = problem.options[f"{which}_descale"][b]
            data = cache.view(torch.uint8)[place].view(cache.dtype)
            dense[i, b, : len(row)] = volta_fa.dequantize_kv(data, case.kv_dtype_of(which), **made, dtype=dtype)
        # zeroes the tokens before the window, as the call does: otherwise they would change the power of two that scales bf16
        dense[:, b, : max(0, len(row) - 70 - case.window_left)] = 0
    used = backend.ints([cached for _, cached, _ in lengths])
    for _ in backend._runs(problem.q):
        expected, expected_lse, _ = torch.ops.volta_fa.fwd(problem.q, *dense, seqused_k=used, is_causal=True, window_left=40)
        assert_same_bits("out", found, expected)
        assert_same_bits("softmax_lse", lse, expected_lse)


@pytest.mark.parametrize("headdim", [64, 96, 256])
@pytest.mark.parametrize("sm", GPUS)
@on("sim")
def test_each_family_dequantizes_before_its_forward_kernel(backend, sm, headdim):
    """The forward kernel reads up to three keys before the window, which must not be NaN then."""
    backend.monkeypatch.setenv("VOLTA_FA_SIM_GPU", GPUS[sm])
    lengths = ((70, 161, 0), (70, 90, 0), (70, 128, 0))
    case = Cached(lengths, headdim=headdim, window_left=30, softcap=4.0, alibi="h", sinks="own", kv_dtype="int8")
    [dequantize] = [v["name"] for v in INFO["variants"] if v["pass"] == "Dequantize" and v["sm"] == sm]
    assert dequantize in launched(backend, case.problem(backend))
    check(backend, case)


@on("sim")
def test_dequantizes_in_one_launch(backend):
    """A call launches two kernels, whatever the pages, and three if it appends. A pair of formats needs a launch for each."""
    for case in (Cached(MANY, nheads=4, nheads_k=2, kv_dtype="int8"), Cached(((40, 60, 0),), nheads=4, nheads_k=1, kv_dtype="int4")):
        names = launched(backend, case.problem(backend))
        assert [name.split("_")[1] for name in names] == ["append"] * case.appends + ["dequantize", "fwd"]
    names = launched(backend, Cached(((40, 60, 0),), nheads=4, nheads_k=1, kv_dtype="int8k_int4v").problem(backend))
    assert [name.split("_")[1] for name in names] == ["dequantize", "dequantize", "fwd"]


@on("sim", "cuda")
@pytest.mark.parametrize("headdim", [64, 128, 256, 512])
@pytest.mark.parametrize("kv_dtype", ["int4", "int8k_int4v"])
def test_a_page_that_does_not_exist_while_decoding(backend, headdim, kv_dtype):
    """An invalid page anywhere among the tiles that int4 kernels load ahead makes its sequence NaN, and no other."""
    backend.monkeypatch.setenv("VOLTA_FA_CHECK_LENGTHS", "0")
    case = Cached(((1, 500, 0), (1, 333, 0)), headdim=headdim, nheads=8, nheads_k=2, window_left=299, num_splits=1, kv_dtype=kv_dtype)
    # the query sees the last 300 of 500 tokens, which begin on page 12 (200 / 16)
    for page in (0, 11, 12, 13, 14, 20, 31):
        problem = case.problem(backend)
        problem.options["block_table"][0, page] = -1 if page % 2 else 10**6
        out, lse, *_ = run(backend, problem)
        assert out[0].isnan().all().item() == lse[0].isnan().all().item() == (page >= 12), page
        assert torch.isfinite(out[1]).all() and torch.isfinite(lse[1]).all()
        assert page >= 12 or torch.isfinite(out[0]).all()


@on("sim", "cuda")
@pytest.mark.parametrize("kv_dtype", ["int8", "int8k_int4v"])
def test_a_page_that_does_not_exist_while_dequantizing(backend, kv_dtype):
    """An invalid page that a query sees makes the sequence NaN. Before the window it changes nothing."""
    backend.monkeypatch.setenv("VOLTA_FA_CHECK_LENGTHS", "0")
    problem = Cached(((40, 200, 0), (40, 200, 0)), nheads=4, nheads_k=2, kv_dtype=kv_dtype, window_left=30).problem(backend)
    expected, *_ = run(backend, problem)
    assert torch.isfinite(expected).all()
    pages = problem.options["block_table"].clone()
    # the first query, token 160, sees tokens from 130 on, which begin on page 8 (130 / 16)
    for page, is_seen in ((7, False), (8, True), (12, True)):
        problem.options["block_table"] = pages.clone()
        problem.options["block_table"][1, page] = 10**6
        found, lse, *_ = run(backend, problem)
        assert found[1].isnan().all().item() == lse[1].isnan().all().item() == is_seen
        assert is_seen or torch.equal(found[1], expected[1])
        assert torch.equal(found[0], expected[0])
    problem.options["block_table"] = pages
    problem.options["cache_seqlens"][1] = 10**6
    found, *_ = run(backend, problem)
    assert found[1].isnan().all() and torch.isfinite(found[0]).all()


@on("cpu-fp32")
def test_appends_to_no_tensor_twice(backend):
    """Scales of values in the place of those of keys, or one scale for all pages, would lose what the append writes."""
    problem = Cached(APPEND, headdim=16, kv_dtype="int4").problem(backend)
    k_cache, v_cache = problem.copy_of_cache()
    for wrong, words in (
        ({"v_scale": problem.options["k_scale"]}, "v_scale: got the memory of k_scale"),
        ({"v_zero_point": problem.options["k_zero_point"]}, "v_zero_point: got the memory of k_zero_point"),
        ({"k_scale": problem.options["k_scale"][:1].expand_as(problem.options["k_scale"])}, "k_scale: got stride 0 in dimension 0"),
    ):
        with pytest.raises(ValueError, match=words):
            fwd_kvcache(problem.q, k_cache, v_cache, *problem.new, **problem.options | wrong)
    assert_same_bits("k_cache", k_cache, problem.k_cache)


@pytest.mark.parametrize("kv_dtype", CACHE_KV_DTYPES)
@on("cpu-fp32", "sim", "cuda")
def test_appending_to_more_sequences_than_pages(backend, kv_dtype):
    """Five sequences append to rows of one page, as a server's cache update does. Scales belong to pages (int) or sequences (fp8)."""
    backend.simulate()  # run(), which other tests of kernels call, does this
    k, v = backend.randn(5, 1, 2, 32), backend.randn(5, 1, 2, 32)
    scale = None if kv_dtype.startswith("int") else 0.5
    made = [volta_fa.quantize_kv(t[:, 0], of, scale=scale) for t, of in zip((k, v), parts_of(kv_dtype))]
    caches = [torch.zeros(1, 16, *m.data.shape[1:], dtype=m.data.dtype, device=backend.device) for m in made]
    options = {"cache_seqlens": backend.ints(list(range(5))), "block_table": backend.ints([[0]] * 5)}
    if kv_dtype.startswith("fp8"):
        options |= {f"{side}_descale": torch.full((5, 2), 0.5, device=backend.device) for side in "kv"}
    else:
        for side, of in zip("kv", parts_of(kv_dtype)):
            names = ("scale", "zero_point") if of == "int4" else ("scale",)
            options |= {f"{side}_{name}": torch.zeros(1, 16, 2, device=backend.device) for name in names}
    fwd_kvcache(k.new_empty(5, 0, 2, 32), *caches, k, v, **options)
    for side, cache, m in zip("kv", caches, made):
        assert torch.equal(cache[0, :5].view(torch.uint8), m.data.view(torch.uint8))
        for name, t in (("scale", m.scale), ("zero_point", m.zero_point)):
            if f"{side}_{name}" in options:
                assert torch.equal(options[f"{side}_{name}"][0, :5], t)


@pytest.mark.parametrize("seqlen_q", [1, 40])
@pytest.mark.parametrize("kv_dtype", CACHE_KV_DTYPES)
@on("sim")
def test_no_value_is_read_on_the_host(backend, kv_dtype, seqlen_q):
    """CUDA graphs need it. The call appends, and decodes (1 query) or dequantizes (40)."""
    descale = "" if has_scales(kv_dtype) else "one"
    case = Cached(((seqlen_q, 40, 1), (seqlen_q, 60, 1)), nheads=4, nheads_k=2, kv_dtype=kv_dtype, descale=descale)
    check_reads_no_value(backend, case.problem(backend))


@pytest.mark.parametrize("kv_dtype", ["int8k_int4v", "fp8_e4m3"])
@on("cuda")
def test_graph_of_decode_steps(backend, kv_dtype):
    """A graph of append and attention: lengths and tokens change between replays. Caches are bitwise those of eager calls."""
    lengths = (0, 15, 16, 300, 77)
    descale = "" if has_scales(kv_dtype) else "one"
    case = Cached(tuple((1, n, 1) for n in lengths), nheads=8, nheads_k=2, headdim=128, kv_dtype=kv_dtype, descale=descale)
    problem = case.problem(backend)
    caches = {"k_cache": problem.k_cache, "v_cache": problem.v_cache}
    caches |= {name: problem.options[name] for name in WRITTEN if name in problem.options}

    def call(caches):
        return fwd_kvcache(problem.q, k=problem.new[0], v=problem.new[1], **{**problem.options, **caches})

    graph, found = captured(lambda: call(caches))
    for step in range(5):
        problem.options["cache_seqlens"].copy_(torch.tensor([n * (5 - step) // 5 for n in lengths], dtype=torch.int32))
        for t in (problem.q, *problem.new):
            t.copy_(backend.randn(*t.shape))
        others = {name: t.clone() for name, t in caches.items()}
        expected = call(others)
        graph.replay()
        agreed([(*expected, *others.values()), (*found, *caches.values())], "out", "softmax_lse", *caches)
        assert not found[0].isnan().any()


@pytest.mark.parametrize("kv_dtype", CACHE_KV_DTYPES)
@pytest.mark.parametrize("new", [0, 2])
@on("cpu-fp32")
def test_opcheck(backend, kv_dtype, new):
    problem = Cached(((2, 9, new), (2, 17, new)), headdim=16, kv_dtype=kv_dtype).problem(backend)
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    if kv_dtype.startswith("fp8"):
        tests = tests[1:]  # it compares caches by an operation that float8 lacks
    check_opcheck(backend, problem, test_utils=tests)


@on("cpu-fp32")
def test_autocast(backend):
    """With a quantized cache, autocast casts q, k and v to its own dtype."""
    problem = Cached(((2, 9, 2), (2, 17, 2)), headdim=16, kv_dtype="int8").problem(backend)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out, _ = fwd_kvcache(problem.q, *problem.copy_of_cache(), *problem.new, **problem.fresh())
    assert out.dtype == torch.bfloat16


@on("cpu-fp32")
def test_invalid_arguments_are_refused(backend):
    """Each line: the argument that the error names, words of the message, and a call in one format ("": not quantized)."""
    cases = {kv_dtype: Cached(((1, 20, 0), (1, 30, 0)), nheads=4, nheads_k=2, kv_dtype=kv_dtype) for kv_dtype in ("", *CACHE_KV_DTYPES)}

    def call(kv_dtype, **changed):
        problem = cases[kv_dtype].problem(backend)
        caches = [changed.pop(name, t) for name, t in (("k_cache", problem.k_cache), ("v_cache", problem.v_cache))]
        return lambda: fwd_kvcache(problem.q, *caches, **(problem.options | changed))

    entries = len(cases["int8"].problem(backend).k_cache)
    zeros = functools.partial(torch.zeros, entries, 16, 2, 64)
    right, some = (entries, 16, 2), torch.ones(3)
    nan, negative = torch.full(right, math.nan), torch.full(right, -0.5)
    for argument, words, call_it in (
        ("k_scale", ["None", "torch.int8"], call("int8", k_scale=None)),
        ("v_scale", ["None", "torch.uint8"], call("int4", v_scale=None)),
        ("v_zero_point", ["None", "int4 (torch.uint8)"], call("int4", v_zero_point=None)),
        ("k_zero_point", ["a tensor", "int8"], call("int8", k_zero_point=torch.ones(right))),
        ("k_scale", ["a tensor", "not quantized"], call("", k_scale=torch.ones(right))),
        ("k_descale", ["a tensor", "not quantized"], call("", k_descale=some[:1])),
        ("v_descale", ["a tensor", "int8"], call("int8", v_descale=some[:1])),
        ("k_scale", ["a tensor", "fp8_e4m3"], call("fp8_e4m3", k_scale=torch.ones(right))),
        ("k_scale", ["dtype torch.float16", "torch.float32"], call("int8", k_scale=torch.ones(right).half())),
        ("k_scale", [f"({entries}, 16, 1)", f"({entries}, 16, 2)"], call("int8", k_scale=torch.ones(entries, 16, 1))),
        ("v_zero_point", ["shape (16, 2)"], call("int4", v_zero_point=torch.ones(16, 2))),
        ("k_descale", ["shape (3)", "(2)", "(2, 2)"], call("fp8_e5m2", k_descale=some)),
        ("k_descale", ["dtype torch.float64"], call("fp8_e5m2", k_descale=some[:2].double())),
        ("v_cache", ["torch.float32", "torch.int8", "k_cache, or torch.uint8 (int4)"], call("int8", v_cache=zeros())),
        ("v_cache", ["torch.int8", "torch.uint8, that of k_cache"], call("int4", v_cache=zeros(dtype=torch.int8))),
        ("v_cache", ["torch.uint8", "float8_e5m2"], call("fp8_e5m2", v_cache=zeros(dtype=torch.uint8))),
        ("v_cache", ["torch.uint8", "float32, that of k_cache"], call("", v_cache=zeros(dtype=torch.uint8))),
        ("v_zero_point", ["None", "int8k_int4v (k_cache torch.int8, v_cache torch.uint8)"], call("int8k_int4v", v_zero_point=None)),
        ("k_zero_point", ["a tensor", "int8k_int4v"], call("int8k_int4v", k_zero_point=torch.ones(right))),
        ("v_scale", ["None", "int8k_int4v"], call("int8k_int4v", v_scale=None)),
        ("v_descale", ["a tensor", "int8k_int4v"], call("int8k_int4v", v_descale=some[:1])),
        ("v_zero_point", ["nan"], call("int8k_int4v", v_zero_point=nan)),
        ("k_cache", ["torch.int16", "torch.float8_e4m3fn"], call("int8", k_cache=zeros(dtype=torch.int16))),
        ("k_scale", ["nan", "finite numbers from 0 on"], call("int8", k_scale=nan)),
        ("v_scale", ["-0.5"], call("int4", v_scale=negative)),
        ("k_zero_point", ["nan"], call("int4", k_zero_point=nan)),
        ("v_descale", ["-1"], call("fp8_e4m3", v_descale=-some[:1])),
        ("k_descale", ["nan"], call("fp8_e4m3", k_descale=nan[0, 0])),
    ):
        with pytest.raises(ValueError, match=f"fwd_kvcache: {argument}: got ") as error:
            call_it()
        message = str(error.value)
        assert all(word in message for word in words), message
