"""volta_fa::fwd_mla: attention over a cache of latents, one for all heads, whose first columns are the values. And volta_fa.flash_mla:
FlashMLA's functions, called as its users call them."""

from __future__ import annotations

import inspect
import math

import pytest
import torch
from torch.library import opcheck

from cached import Cached, check_sequences
from conftest import ALL, BF16_KERNELS, agreed, assert_same_bits, on, on_cases, poison_cuda
from test_kvcache import ints, spoiled
from test_validation import refused
from volta_fa import flash_mla

fwd_mla = torch.ops.volta_fa.fwd_mla
HEADDIM, HEADDIM_V = 576, 512
OPTIONS = ("cache_seqlens", "cu_seqlens_q", "max_seqlen_q", "block_table", "cache_batch_idx", "softmax_scale", "is_causal", "num_splits")
QUANTISED = ("int8", "fp8_e5m2", "fp8_e4m3")


def latents(lengths, nheads=16, page=64, **options) -> Cached:
    """`lengths`: (queries, cached tokens) of each sequence."""
    return Cached(tuple((q, n, 0) for q, n in lengths), HEADDIM, HEADDIM_V, nheads, 1, page, **options)


def draw(backend, case):
    """The problem, and the options of fwd_mla. What is no token is NaN in the cache."""
    problem = case.problem(backend)
    problem.v_cache = problem.k_cache[..., :HEADDIM_V]
    options = {name: problem.options[name] for name in OPTIONS if name in problem.options}
    for name in ("scale", "descale"):
        if f"k_{name}" in problem.options:
            options[f"latent_{name}"] = problem.options[f"v_{name}"] = problem.options[f"k_{name}"]
    return problem, options


def run(backend, problem, options):
    """Returns out and softmax_lse. Kernels run twice (simulator: in both warp orders), bitwise identically."""
    return agreed([fwd_mla(problem.q, problem.k_cache, **options) for _ in backend._runs(problem.q, problem.k_cache)])


def check(backend, case):
    problem, options = draw(backend, case)
    out, lse = run(backend, problem, options)
    check_sequences(backend, problem, out, lse, problem.k_cache, problem.v_cache)


# ---- what it computes ------------------------------------------------------------------------------------------------

LENGTHS = (0, 1, 7, 8, 9, 63, 64, 65, 200)
CASES = [
    latents([(1, n) for n in LENGTHS]),
    latents([(1, n) for n in LENGTHS], page=0, nheads=5),
    latents([(2, n) for n in LENGTHS], page=16, nheads=20, is_causal=False),
    latents([(3, 40), (3, 2), (3, 129)], nheads=16, page=256),
    latents([(8, 70), (8, 5)], nheads=6),
    latents([(1, 33), (4, 90), (0, 7), (2, 1)], packed=True, nheads=16),
    latents([(70, 90), (1, 30)], packed=True, nheads=2, page=48),
    latents([(1, 100), (1, 31)], nheads=128),
    latents([(2, 37), (2, 80)], nheads=64, page=0, batch_idx=True),
    latents([(2, 37), (2, 80)], layout="wide", nheads=32),
    latents([(2, 37), (2, 80)], layout="wide", page=0, softmax_scale=-0.05),
    latents([(1, 64), (1, 64)], all_cached=True, spread=2.0),
    latents([(2, 37), (2, 80)], softmax_scale=192**-0.5),
    # scores that grow by more than the softmax's slack: references move
    latents([(1, 200), (1, 90)], spread=3.0),
    latents([(2, 200), (2, 90)], nheads=20, spread=3.0),
]
#: More than one block has of a row set; kernels alone, since the reference takes its time.
SHARED = [
    latents([(1, 1000), (1, 30)]),
    latents([(1, 2500), (1, 0), (1, 700)], nheads=8, page=0),
    latents([(2, 2000)], nheads=40, num_splits=3),
]


@on_cases((ALL, CASES), (BF16_KERNELS, CASES[::4]), (["sim", "cuda"], SHARED))
def test_against_fp64(backend, case):
    check(backend, case)


def quantized(kv_dtype) -> list[Cached]:
    of = {"kv_dtype": kv_dtype}
    fp8 = {} if kv_dtype == "int8" else {"descale": "one"}
    own = {} if kv_dtype == "int8" else {"descale": "bh"}
    return [
        latents([(1, n) for n in LENGTHS], **of),
        latents([(1, n) for n in LENGTHS], page=0, nheads=5, **of, **fp8),
        latents([(2, n) for n in LENGTHS], page=16, nheads=20, is_causal=False, **of, **own),
        latents([(8, 70), (8, 5)], nheads=6, page=48, **of, **own),
        latents([(1, 33), (4, 90), (0, 7), (2, 1)], packed=True, nheads=16, **of),
        latents([(1, 100), (1, 31)], nheads=128, **of),
        latents([(2, 37), (2, 80)], layout="wide", nheads=32, softmax_scale=-0.05, **of),
        latents([(1, 200), (1, 90)], spread=3.0, **of, **fp8),
        latents([(2, 200), (2, 90)], nheads=40, spread=3.0, **of),
    ]


def shared_quantized(kv_dtype) -> list[Cached]:
    return [latents([(1, 1000), (1, 30)], kv_dtype=kv_dtype), latents([(2, 2000)], nheads=40, num_splits=3, kv_dtype=kv_dtype)]


@on_cases(
    (["cpu-fp32", "cpu-fp16", "sim", "cuda"], [c for kv_dtype in QUANTISED for c in quantized(kv_dtype)]),
    (["sim", "cuda"], [c for kv_dtype in QUANTISED for c in shared_quantized(kv_dtype)]),
)
def test_quantized_against_fp64(backend, case):
    """The exact result is that of what the bytes stand for."""
    check(backend, case)


@pytest.mark.parametrize("kv_dtype", QUANTISED)
@on("sim", "cuda")
def test_quantized_scales_of_any_size(backend, kv_dtype):
    """Values of very different sizes, token by token: a row's unit moves, and nothing overflows or vanishes."""
    problem, options = draw(backend, latents([(1, 150), (1, 90)], kv_dtype=kv_dtype, descale="one"))
    cache, q = problem.k_cache, problem.q
    q[..., :] *= 2.0**-6
    for name, t in options.items():
        if name == "latent_scale":
            t *= 2.0 ** torch.randint(-9, 6, t.shape, generator=torch.Generator().manual_seed(3)).to(t.device)
        if name == "latent_descale":
            t.fill_(0.03)
    expected = fwd_mla(q.float().cpu(), cache.cpu(), **{n: t.cpu() if torch.is_tensor(t) else t for n, t in options.items()})
    out, lse = run(backend, problem, options)
    torch.testing.assert_close(out.float().cpu(), expected[0], rtol=4e-3, atol=4e-3 * float(expected[0].abs().max()))
    torch.testing.assert_close(lse.cpu(), expected[1], rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("code", [0x7F, 0xFF], ids=hex)
@on("sim", "cuda")
def test_a_code_of_nan(backend, code):
    """A NaN code of e4m3 in a column that is key and value makes the query's whole output and lse NaN."""
    problem, options = draw(backend, latents([(1, 40), (1, 90)], kv_dtype="fp8_e4m3"))
    backend.monkeypatch.setenv("VOLTA_FA_SIMULATE", "1")
    entry, row = (t[3] for t in problem.places[0])
    problem.q[..., 5] = 0
    problem.k_cache.view(torch.uint8)[entry, row, 0, 5] = code
    out, lse = fwd_mla(problem.q, problem.k_cache, **options)
    assert out[0].isnan().all() and lse[0].isnan().all(), "0 times NaN is a score of NaN"
    assert not out[1].isnan().any() and not lse[1].isnan().any()


@on("sim", "cuda", "sim-bf16")
def test_quantized_copies(backend):
    """Where the kernels cannot read the bytes: rows off 16-byte boundaries, and bf16 queries."""
    problem, options = draw(backend, latents([(1, 37), (1, 80)], nheads=4, kv_dtype="fp8_e5m2", descale="bh"))
    expected = run(backend, problem, options)
    wide = torch.zeros((*problem.k_cache.shape[:-1], HEADDIM + 16), dtype=torch.uint8, device=backend.device)
    wide[..., 3 : 3 + HEADDIM] = problem.k_cache.view(torch.uint8)
    problem.k_cache = wide[..., 3 : 3 + HEADDIM].view(torch.float8_e5m2)
    allowed = 2e-2 if backend.dtype == torch.bfloat16 else 3e-3
    for a, b in zip(run(backend, problem, options), expected):
        torch.testing.assert_close(a, b, rtol=allowed, atol=allowed)


@on("sim", "cuda")
@pytest.mark.parametrize("offset", [8, 3])
def test_latents_off_boundaries(backend, offset):
    """Part of a wider tensor: where the kernels read it, and where its tokens are copied."""
    problem, options = draw(backend, latents([(1, 37), (1, 80)], nheads=4))
    expected = run(backend, problem, options)
    wide = torch.full((*problem.k_cache.shape[:-1], HEADDIM + 16), math.nan, dtype=backend.dtype, device=backend.device)
    wide[..., offset : offset + HEADDIM] = problem.k_cache
    problem.k_cache = wide[..., offset : offset + HEADDIM]
    for a, b in zip(run(backend, problem, options), expected):
        torch.testing.assert_close(a, b, rtol=2e-3, atol=2e-3)


@on("cpu-fp32", "sim", "cuda")
def test_nothing_to_do(backend):
    backend.simulate()
    cache = backend.randn(3, 16, 1, HEADDIM)
    lengths, table = backend.ints([3, 0]), backend.ints([2, 0]).view(2, 1)
    for shape in [(2, 0, 4, HEADDIM), (0, 1, 4, HEADDIM)]:
        batch = shape[0]
        out, lse = fwd_mla(backend.randn(*shape), cache, cache_seqlens=lengths[:batch], block_table=table[:batch])
        assert out.shape == (*shape[:-1], HEADDIM_V) and lse.shape == (shape[0], 4, shape[1])
    # no key at all: an empty cache, an empty table, entries without rows
    q = backend.randn(2, 1, 4, HEADDIM)
    for out, lse in (
        fwd_mla(q, cache[:0], cache_seqlens=lengths * 0, block_table=table),
        fwd_mla(q, cache, cache_seqlens=lengths * 0, block_table=table[:, :0]),
        fwd_mla(q, cache[:2, :0]),
        fwd_mla(q, cache[:2], cache_seqlens=lengths * 0),
    ):
        assert (out == 0).all() and (lse == math.inf).all()


@on("sim")
def test_the_grid_is_the_gpus(backend):
    """128 heads take one launch, without spills: the blocks schedule the row tiles."""
    problem, options = draw(backend, latents([(1, 100)], nheads=128))
    (launch,) = backend.launches(lambda: fwd_mla(problem.q, problem.k_cache, **options))
    assert launch["kernel"].startswith("volta_mla_decode") and launch["spill_insts_static"] == 0


@on("sim")
def test_a_turing_gpu_gets_voltas_kernel(backend):
    """Through PTX, since Turing's family has none; here its machine code stands for that."""
    backend.monkeypatch.setenv("VOLTA_FA_SIM_GPU", "t4")
    check(backend, latents([(1, 100), (2, 31)], packed=True))
    backend.monkeypatch.setenv("VOLTA_FA_FAMILY", "turing")
    problem, options = draw(backend, latents([(1, 100)]))
    backend.monkeypatch.setenv("VOLTA_FA_SIMULATE", "1")
    refused(
        lambda: fwd_mla(problem.q, problem.k_cache, **options),
        NotImplementedError,
        "volta_fa::fwd_mla",
        "no turing kernel (DecodeMla) for headdim 576 and headdim_v 512",
        "VOLTA_FA_FAMILY",
    )


# ---- PyTorch's contract ----------------------------------------------------------------------------------------------

CONTRACT = [
    latents([(2, 9), (2, 17)], nheads=2),
    latents([(2, 9), (0, 3), (3, 0)], nheads=2, packed=True),
    latents([(2, 9), (2, 17)], nheads=2, page=0, batch_idx=True),
    latents([(2, 9), (2, 17)], nheads=2, kv_dtype="int8"),  # (opcheck multiplies its arguments, which fp8 cannot be)
]


@pytest.mark.parametrize("case", CONTRACT, ids=str)
@on("cpu-fp32", "cpu-bf16", "sim", "cuda")
def test_opcheck(backend, case):
    backend.simulate()
    problem, options = draw(backend, case)
    # what is nobody's is NaN, which opcheck would not find equal to itself
    if case.kv_dtype:
        problem.k_cache = torch.ones_like(problem.k_cache.view(torch.uint8)).view(problem.k_cache.dtype)
        options["latent_scale"] = options["latent_scale"].nan_to_num(0.0)
    opcheck(fwd_mla.default, (problem.q, problem.k_cache if case.kv_dtype else problem.k_cache.nan_to_num(0.0)), options)


@on("cpu-fp32")
def test_compile_with_dynamic_shapes(backend):
    compiled = torch.compile(fwd_mla.default, dynamic=True, fullgraph=True, backend="aot_eager")
    torch._dynamo.reset()
    for lengths in ([(2, 9), (2, 17)], [(3, 40), (3, 1), (3, 5)]):
        problem, options = draw(backend, latents(lengths, nheads=2))
        for a, b in zip(compiled(problem.q, problem.k_cache, **options), fwd_mla(problem.q, problem.k_cache, **options)):
            torch.testing.assert_close(a, b)


@on("cpu-fp32")
def test_no_gradient(backend):
    problem, options = draw(backend, CONTRACT[0])
    out, _ = fwd_mla(problem.q.requires_grad_(), problem.k_cache, **options)
    with pytest.raises(RuntimeError, match="fwd_mla"):
        out.sum().backward()


@on("cpu-bf16")
def test_autocast(backend):
    problem, options = draw(backend, CONTRACT[0])
    expected = fwd_mla(problem.q, problem.k_cache, **options)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = fwd_mla(problem.q.float(), problem.k_cache, **options)
    for a, b in zip(found, expected):
        assert torch.equal(a, b)


@pytest.mark.parametrize("kv_dtype", ["", *QUANTISED])
@on("cuda")
def test_cuda_graph(backend, kv_dtype):
    problem, options = draw(backend, latents([(1, 1000), (1, 17), (1, 300)], kv_dtype=kv_dtype))
    lengths = options["cache_seqlens"]
    fwd_mla(problem.q, problem.k_cache, **options)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = fwd_mla(problem.q, problem.k_cache, **options)
    for values in ((0, 0, 0), (1000, 1, 15), (16, 17, 299)):
        lengths.copy_(backend.ints(values))
        graph.replay()
        agreed([fwd_mla(problem.q, problem.k_cache, **options), captured])


# ---- wrong arguments -------------------------------------------------------------------------------------------------


def good(backend, page=16):
    problem, options = draw(backend, latents([(2, 9), (2, 17)], nheads=3, page=page))
    return {"q": problem.q, "latent_cache": problem.k_cache, **options}


def codes(arguments, dtype):
    return torch.zeros_like(arguments["latent_cache"], dtype=torch.uint8).view(dtype)


def scales(arguments):
    return torch.ones(arguments["latent_cache"].shape[:3], device=arguments["q"].device)


def call(arguments):
    arguments = dict(arguments)
    tensors = arguments.pop("q"), arguments.pop("latent_cache")
    return lambda: fwd_mla(*tensors, **arguments)


@pytest.mark.parametrize("number", [7e4, -7e4, 3e5], ids=str)
@on("sim-bf16", "cuda-bf16")
def test_latents_beyond_fp16(backend, number):
    """A value that fp16 does not have counts as what it is."""
    arguments = good(backend)
    backend.simulate()
    arguments["q"][..., 5] = 0  # a value, and no part of scores
    cache = arguments["latent_cache"]
    cache[arguments["block_table"][0, 0], 2, 0, 5] = number
    out, lse = (t.cpu() for t in call(arguments)())
    on_cpu = {name: t.cpu() if isinstance(t, torch.Tensor) else t for name, t in arguments.items()}
    exact = {"q": on_cpu["q"].float(), "latent_cache": on_cpu["latent_cache"].float()}
    expected, expected_lse = call({**on_cpu, **exact})()
    assert expected[0, :, :, 5].abs().max() > 100, "the number is seen"
    torch.testing.assert_close(out.float(), expected.float(), rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("exponents", [(20, -20), (-40, 40), (-30, -30)], ids=str)
@on("sim-bf16", "cuda-bf16")
def test_bf16_of_any_magnitude(backend, exponents):
    """Powers of two in queries and latents give the results of fp32."""
    arguments = good(backend)
    backend.simulate()
    of_q, of_k = (2.0**e for e in exponents)
    arguments["q"] = arguments["q"] * of_q
    arguments["latent_cache"] = arguments["latent_cache"] * of_k
    out, lse = (t.cpu() for t in call(arguments)())
    on_cpu = {name: t.cpu() if isinstance(t, torch.Tensor) else t for name, t in arguments.items()}
    exact = {"q": on_cpu["q"].float(), "latent_cache": on_cpu["latent_cache"].float()}
    expected, expected_lse = call({**on_cpu, **exact})()
    torch.testing.assert_close(out.float() / of_k, expected / of_k, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-3, atol=1e-3)


WRONG = {
    "q rank": (lambda a: {"q": a["q"][0]}, ["q: got a tensor of rank 3", "cu_seqlens_q"]),
    "q dtype": (lambda a: {"q": a["q"].int()}, ["q: got dtype torch.int32"]),
    "q headdim": (lambda a: {"q": a["q"][..., :512]}, ["q: got headdim 512, expected headdim 576, that of latent_cache"]),
    "q stride": (lambda a: {"q": a["q"].mT.contiguous().mT}, ["q: got stride", "contiguous last dimension"]),
    "cache rank": (lambda a: {"latent_cache": a["latent_cache"][:, :, 0]}, ["latent_cache: got a tensor of rank 3", "(pages,"]),
    "cache heads": (lambda a: {"latent_cache": a["latent_cache"].repeat(1, 1, 2, 1)}, ["latent_cache: got nheads_k 2", "1: all"]),
    "cache headdim": (lambda a: {"latent_cache": a["latent_cache"][..., :512]}, ["latent_cache: got headdim 512", "576", "512 columns"]),
    "cache dtype": (lambda a: {"latent_cache": a["latent_cache"].to(torch.bfloat16)}, ["latent_cache: got dtype torch.bfloat16"]),
    "int8 without scale": (lambda a: {"latent_cache": codes(a, torch.int8)}, ["latent_scale: got None", "one for each token"]),
    "int4": (lambda a: {"latent_cache": codes(a, torch.uint8)}, ["latent_cache: got dtype torch.uint8", "torch.int8, torch.float8_e5m2"]),
    "scale of fp16": (lambda a: {"latent_scale": scales(a)}, ["latent_scale: got a tensor", "not quantized"]),
    "scale dtype": (lambda a: {"latent_cache": codes(a, torch.int8), "latent_scale": scales(a).double()}, ["latent_scale: got dtype"]),
    "scale shape": (lambda a: {"latent_cache": codes(a, torch.int8), "latent_scale": scales(a)[..., 0]}, ["latent_scale: got shape"]),
    "scale value": (lambda a: {"latent_cache": codes(a, torch.int8), "latent_scale": -scales(a)}, ["latent_scale: got -1", "from 0 on"]),
    "descale of int8": (
        lambda a: {"latent_cache": codes(a, torch.int8), "latent_scale": scales(a), "latent_descale": scales(a)[0, :1, 0]},
        ["latent_descale: got a tensor", "int8"],
    ),
    "descale shape": (
        lambda a: {"latent_cache": codes(a, torch.float8_e5m2), "latent_descale": scales(a)[0, :3, 0]},
        ["latent_descale: got shape (3)", "(batch, nheads_k)"],
    ),
    "descale value": (
        lambda a: {"latent_cache": codes(a, torch.float8_e4m3fn), "latent_descale": scales(a)[0, :1, 0] * math.inf},
        ["latent_descale: got inf"],
    ),
    "cache device": (lambda a: {"latent_cache": a["latent_cache"].to("meta")}, ["latent_cache: got device meta"]),
    "page size": (lambda a: {"latent_cache": a["latent_cache"][:, :12]}, ["latent_cache: got pages of 12 tokens", "multiple of 16"]),
    "table dtype": (lambda a: {"block_table": a["block_table"].long()}, ["block_table: got dtype torch.int64"]),
    "table batch": (lambda a: {"block_table": a["block_table"][:1]}, ["block_table: got shape", "(batch, max_pages)"]),
    "lengths dtype": (lambda a: {"cache_seqlens": a["cache_seqlens"].long()}, ["cache_seqlens: got dtype torch.int64"]),
    "batch_idx": (lambda a: {"cache_batch_idx": a["cache_seqlens"]}, ["cache_batch_idx: got a tensor", "block_table is given"]),
    "max_seqlen_q": (lambda a: {"max_seqlen_q": 3}, ["max_seqlen_q: got 3", "cu_seqlens_q is not given"]),
    "scale": (lambda a: {"softmax_scale": math.inf}, ["softmax_scale: got inf"]),
    "num_splits": (lambda a: {"num_splits": -1}, ["num_splits: got -1"]),
    # values
    "negative length": (lambda a: {"cache_seqlens": ints(a, 9, -1)}, ["cache_seqlens: got -1 (sequence 1)", "from 0 to"]),
    "long length": (lambda a: {"cache_seqlens": ints(a, 9, 65)}, ["cache_seqlens: got 65 (sequence 1)", "from 0 to 64"]),
    "page": (lambda a: {"block_table": spoiled(a["block_table"], 1, 1, 99)}, ["block_table: got 99 (page 1", "of latent_cache"]),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
@on("cpu-fp32", "sim", "cuda")
def test_wrong_arguments(backend, name):
    spoil, words = WRONG[name]
    arguments = good(backend)
    backend.simulate("timing")
    refused(call({**arguments, **spoil(arguments), "check_lengths": True}), ValueError, "volta_fa::fwd_mla", *words)


@on("cpu-fp32", "sim", "cuda")
def test_dense_entries(backend):
    arguments = good(backend, page=0)
    backend.simulate()
    one = {**arguments, "latent_cache": arguments["latent_cache"][:1]}
    refused(call(one), ValueError, "volta_fa::fwd_mla", "latent_cache: got batch 1", "cache_batch_idx")
    wrong = {**arguments, "cache_batch_idx": ints(arguments, 0, 2), "check_lengths": True}
    refused(call(wrong), ValueError, "volta_fa::fwd_mla", "cache_batch_idx: got 2 (sequence 1)", "the entries of latent_cache")


@on("cpu-fp32", "sim", "cuda")
def test_a_second_tensor_of_values(backend):
    """fwd_kvcache has no latents: it says who has."""
    arguments = good(backend)
    backend.simulate()
    cache, table, lengths = (arguments[name] for name in ("latent_cache", "block_table", "cache_seqlens"))
    kvcache = torch.ops.volta_fa.fwd_kvcache
    refused(
        lambda: kvcache(arguments["q"], cache, cache[..., :512].contiguous(), block_table=table, cache_seqlens=lengths),
        ValueError,
        "volta_fa::fwd_kvcache",
        "v_cache: got a cache of values beside keys of headdim 576",
        "volta_fa::fwd_mla",
    )


UNCHECKED = {
    "negative length": (16, lambda a: {"cache_seqlens": ints(a, -1, 17)}),
    "long length": (16, lambda a: {"cache_seqlens": ints(a, 2**31 - 1, 17)}),
    "page": (16, lambda a: {"block_table": spoiled(a["block_table"], 0, 0, 2**31 - 1)}),
    "negative page": (16, lambda a: {"block_table": spoiled(a["block_table"], 0, 0, -(2**31))}),
    "entry": (0, lambda a: {"cache_batch_idx": ints(a, 2, 1)}),
}


@pytest.mark.parametrize("name", UNCHECKED)
@on("sim", "cuda", "sim-bf16", "cuda-bf16")
def test_unchecked_values(backend, name):
    """The sequence is NaN, the other is right."""
    page, spoil = UNCHECKED[name]
    arguments = good(backend, page=page)
    backend.simulate()
    backend.monkeypatch.setenv("VOLTA_FA_CHECK_LENGTHS", "0")
    expected = call(arguments)()
    if backend.machine == "cuda":
        poison_cuda(arguments["q"])
    out, lse = call({**arguments, **spoil(arguments)})()
    assert out[0].isnan().all() and lse[0].isnan().all()
    torch.testing.assert_close(out[1], expected[0][1], rtol=2e-3, atol=2e-3)
    torch.testing.assert_close(lse[1], expected[1][1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("heads", [16, 33])
@on("sim", "cuda")
def test_num_splits_of_one_is_the_sequences_own(backend, heads):
    """Its result depends on no other sequence then."""
    case = latents([(1, 300), (1, 1000), (1, 17)], nheads=heads, num_splits=1)
    problem, options = draw(backend, case)
    out, lse = run(backend, problem, options)
    own = {name: t[:1] if torch.is_tensor(t) else t for name, t in options.items()}
    alone = fwd_mla(problem.q[:1], problem.k_cache, **own) if backend.machine == "cuda" else simulated(backend, problem, own)
    assert_same_bits("out", alone[0], out[:1])
    assert_same_bits("softmax_lse", alone[1], lse[:1])


def simulated(backend, problem, options):
    backend.monkeypatch.setenv("VOLTA_FA_SIMULATE", "1")
    return fwd_mla(problem.q[:1], problem.k_cache, **options)


# ---- FlashMLA's functions ----------------------------------------------------------------------------------------


def call_flash_mla(backend, case, **options):
    problem, given = draw(backend, case)
    lengths = given["cache_seqlens"]
    metadata, num_splits = flash_mla.get_mla_metadata(lengths, problem.q.shape[1] * problem.q.shape[2], 1)
    for _ in backend._runs(problem.q, problem.k_cache):
        found = flash_mla.flash_mla_with_kvcache(
            problem.q, problem.k_cache, given["block_table"], lengths, 512, metadata, num_splits, **options
        )
    return problem, found


@on("cpu-fp32", "cpu-fp64", "cpu-bf16", "cpu-fp16", "sim", "cuda")
@pytest.mark.parametrize("causal", [False, True])
def test_flash_mla_against_fp64(backend, causal):
    problem, (out, lse) = call_flash_mla(backend, latents([(2, 37), (2, 150)], is_causal=causal), causal=causal)
    assert out.shape == (2, 2, 16, 512) and lse.shape == (2, 16, 2)
    check_sequences(backend, problem, out, lse, problem.k_cache, problem.v_cache)


@on("cpu-fp32", "sim")
@pytest.mark.parametrize("kv_dtype", ["int8", "fp8_e4m3"])
def test_flash_mla_quantized(backend, kv_dtype):
    problem, given = draw(backend, latents([(2, 37), (2, 150)], kv_dtype=kv_dtype, descale="bh"))
    backend.monkeypatch.setenv("VOLTA_FA_SIMULATE", "1" if backend.machine == "sim" else "0")
    scales = {"latent_scale": given.get("latent_scale"), "descale_k": given.get("latent_descale")}
    assert any(t is not None for t in scales.values())
    expected = torch.ops.volta_fa.fwd_mla(problem.q, problem.k_cache, **given)
    arguments = problem.q, problem.k_cache, given["block_table"], given["cache_seqlens"], 512
    found = flash_mla.flash_mla_with_kvcache(*arguments, causal=True, **scales)
    for a, b in zip(found, expected):
        assert torch.equal(a, b)


@on("cpu-fp32")
def test_the_scale_of_flash_mla_is_that_of_the_whole_headdim(backend):
    case = latents([(1, 37)])
    _, found = call_flash_mla(backend, case)
    backend.generator.manual_seed(backend.seed)
    _, given = call_flash_mla(backend, case, softmax_scale=576**-0.5)
    backend.generator.manual_seed(backend.seed)
    _, other = call_flash_mla(backend, case, softmax_scale=192**-0.5)
    assert torch.equal(found[0], given[0]) and not torch.equal(found[0], other[0])


@on("cpu-fp32", "cuda")
def test_flash_mla_metadata(backend):
    """Where the lengths are, and of the shapes that callers keep buffers for; newer callers give none."""
    metadata, num_splits = flash_mla.get_mla_metadata(backend.ints([3, 4, 5]), 16, 1)
    assert metadata.shape == (0, 8) and num_splits.shape == (4,)
    assert {t.dtype for t in (metadata, num_splits)} == {torch.int32}
    assert {t.device.type for t in (metadata, num_splits)} == {backend.device}
    flash_mla.get_mla_metadata()


def test_arguments_of_flash_mla():
    """By name and in order, as its README and vLLM call them."""
    assert list(inspect.signature(flash_mla.get_mla_metadata).parameters)[:3] == ["cache_seqlens", "num_q_tokens_per_head_k", "num_heads_k"]
    parameters = inspect.signature(flash_mla.flash_mla_with_kvcache).parameters
    assert [name for name, p in parameters.items() if p.kind is not p.KEYWORD_ONLY] == [
        "q", "k_cache", "block_table", "cache_seqlens", "head_dim_v", "tile_scheduler_metadata", "num_splits", "softmax_scale", "causal",
        "is_fp8_kvcache", "indices", "attn_sink", "extra_k_cache", "extra_indices_in_kvcache", "topk_length", "extra_topk_length",
    ]  # fmt: skip


WRONG_FLASH_MLA = {
    "head_dim_v": ({"head_dim_v": 576}, ValueError, "head_dim_v: got 576, expected 512"),
    "fp8": ({"is_fp8_kvcache": True}, NotImplementedError, "is_fp8_kvcache: got True, expected False"),
    "sparse": ({"topk_length": torch.zeros(2)}, ValueError, "topk_length: got a tensor, expected None without indices"),
    "sink": ({"attn_sink": torch.zeros(16)}, ValueError, "attn_sink: got a tensor, expected None without indices"),
    "table": ({"block_table": None}, ValueError, "block_table: got None"),
    "lengths": ({"cache_seqlens": None}, ValueError, "cache_seqlens: got None"),
    "q": ({"q": None}, ValueError, "q: got None, expected a tensor"),
    "heads": ({"k_cache": torch.zeros(4, 64, 2, 576)}, ValueError, "latent_cache: got nheads_k 2"),
    "headdim": ({"k_cache": torch.zeros(4, 64, 1, 512)}, ValueError, "latent_cache: got headdim 512"),
}


@pytest.mark.parametrize("name", WRONG_FLASH_MLA)
def test_wrong_arguments_of_flash_mla(name):
    wrong, error, message = WRONG_FLASH_MLA[name]
    arguments = {
        "q": torch.zeros(2, 1, 16, 576),
        "k_cache": torch.zeros(4, 64, 1, 576),
        "block_table": torch.zeros(2, 2, dtype=torch.int32),
        "cache_seqlens": torch.tensor([3, 4], dtype=torch.int32),
        "head_dim_v": 512,
    }
    flash_mla.flash_mla_with_kvcache(**arguments)
    with pytest.raises(error, match=message):
        flash_mla.flash_mla_with_kvcache(**{**arguments, **wrong})


def test_wrong_metadata_of_flash_mla():
    lengths = torch.tensor([3, 4], dtype=torch.int32)
    with pytest.raises(ValueError, match="num_heads_k: got 2, expected 1"):
        flash_mla.get_mla_metadata(lengths, 16, 2)
    # of sparse decoding, ignored as the others are
    flash_mla.get_mla_metadata(lengths, 16, 1, is_fp8_kvcache=True, topk=2048)
