"""Tests of `volta_fa::fwd_mla`, multi-head latent attention, and of volta_fa.flash_mla, which has FlashMLA's functions.

A cache holds one latent of 576 columns per token for all query heads: keys are all columns, values the first 512. cached.py has problems
and `check`, which compares with fp64. page: tokens of a page; 0: a dense cache. layout "wide": a slice of a larger tensor. spread: standard
deviation of q and latents. kv_dtype: of a quantized cache. batch_idx: cache_batch_idx is given. all_cached: cache_seqlens is not. A backend
is the CPU, the simulator (`sim`; `launches` returns its report of each kernel) or a GPU (`cuda`), with a dtype of queries.
test_sparse_mla.py tests queries that select tokens."""

import dataclasses
import math

import pytest
import torch

from cached import Cached, check, check_opcheck, check_sequences, mla_options  # mla_options: a problem's options, named as fwd_mla's
from conftest import ALL, BF16_KERNELS, agreed, assert_same_bits, captured, on, on_cases, poison_cuda
from test_kvcache import UNCHECKED, ints, spoiled  # UNCHECKED: invalid lengths and pages. spoiled: a table with one other value
from test_validation import refused  # refused(call, exception, *words of its message)
from volta_fa import flash_mla

fwd_mla = torch.ops.volta_fa.fwd_mla
HEADDIM, HEADDIM_V = 576, 512
QUANTIZED = ("int8", "fp8_e5m2", "fp8_e4m3")


def latents(lengths, nheads=16, page=64, **options) -> Cached:
    """`lengths`: (queries, cached tokens) of each sequence. Options are fields of CacheCase."""
    # the third length, 0: no tokens to append
    return Cached(tuple((q, n, 0) for q, n in lengths), HEADDIM, HEADDIM_V, nheads, nheads_k=1, page=page, latents=True, **options)


def draw(backend, case):
    """Returns the problem, whose k_cache has the latents, and the options of fwd_mla. The cache is NaN where it holds no token."""
    problem = case.problem(backend)
    return problem, mla_options(problem)


def run(backend, problem, options):
    """Returns out and softmax_lse. Kernels run twice (simulator: in both warp orders), bitwise identically."""
    return agreed([fwd_mla(problem.q, problem.k_cache, **options) for _ in backend._runs(problem.q, problem.k_cache)])


# ---- what it computes ------------------------------------------------------------------------------------------------

LENGTHS = (0, 1, 7, 8, 9, 63, 64, 65, 200)
CASES = [
    latents([(1, n) for n in LENGTHS]),
    latents([(1, n) for n in LENGTHS], page=0, nheads=5),
    latents([(2, n) for n in LENGTHS], page=16, nheads=20, is_causal=False),
    latents([(3, 40), (3, 2), (3, 129)], nheads=16, page=256),
    latents([(8, 70), (8, 5)], nheads=6, page=48),
    latents([(1, 33), (4, 90), (0, 7), (2, 1)], packed=True, nheads=16),
    latents([(70, 90), (1, 30)], packed=True, nheads=2, page=48),
    latents([(1, 100), (1, 31)], nheads=128),
    latents([(2, 37), (2, 80)], nheads=64, page=0, batch_idx=True),
    latents([(2, 37), (2, 80)], layout="wide", nheads=32),
    latents([(2, 37), (2, 80)], layout="wide", page=0, softmax_scale=-0.05),
    latents([(1, 64), (1, 64)], all_cached=True, spread=2.0),
    latents([(2, 37), (2, 80)], softmax_scale=192**-0.5),
    # scores that grow along the keys, so that kernels must rescale a row's sums by its new maximum
    latents([(1, 200), (1, 90)], spread=3.0),
    latents([(2, 200), (2, 90)], nheads=40, spread=3.0),
]
#: Long sequences, so that several thread blocks share a tile of query rows. On kernels only, because the CPU is slow.
SHARED = [
    latents([(1, 1000), (1, 30)]),
    latents([(1, 2500), (1, 0), (1, 700)], nheads=8, page=0),
    latents([(2, 2000)], nheads=40, num_splits=3),
]


@on_cases((ALL, CASES), (BF16_KERNELS, CASES[::4]), (["sim", "cuda"], SHARED))
def test_against_fp64(backend, case):
    check(backend, case)


#: Cases of quantized caches, by number in CASES, with fp8's descale: none, one, or one per sequence and head ("bh"). int8 has none.
DESCALES = {0: "", 1: "one", 2: "bh", 4: "bh", 5: "", 7: "", 10: "", 13: "one", 14: ""}
QUANTIZED_CASES = [
    dataclasses.replace(CASES[i], kv_dtype=kv_dtype, descale="" if kv_dtype == "int8" else descale)
    for kv_dtype in QUANTIZED
    for i, descale in DESCALES.items()
]


@on_cases(
    (["cpu-fp32", "cpu-fp16", "sim", "cuda"], QUANTIZED_CASES),
    (["sim", "cuda"], [dataclasses.replace(case, kv_dtype=kv_dtype) for kv_dtype in QUANTIZED for case in SHARED[::2]]),
)
def test_quantized_against_fp64(backend, case):
    """The expected result is attention over the dequantized latents."""
    check(backend, case)


@pytest.mark.parametrize("rows", [32, 64])
@on_cases((["sim", "cuda"], [CASES[14], *(dataclasses.replace(CASES[14], kv_dtype=kv_dtype) for kv_dtype in QUANTIZED)]))
def test_tiles_of_many_rows(backend, case, rows, force):
    """`force` makes the planner take these tiles of query rows, which it takes by itself for more rows or tokens only."""
    formats = ("", *(f"{name.removeprefix('fp8_')}_" for name in QUANTIZED))
    force(choices=[{"pass": "DecodeMla", "variant": f"volta_mla_decode_{form}{rows}"} for form in formats])
    check(backend, case)


@pytest.mark.parametrize("kv_dtype", QUANTIZED)
@on("sim", "cuda")
def test_quantized_scales_of_any_size(backend, kv_dtype):
    """Tokens with very different scales: kernels change the power of two by which they scale a row's probabilities, without overflow."""
    problem, options = draw(backend, latents([(1, 150), (1, 90)], kv_dtype=kv_dtype, descale="one"))
    cache, q = problem.k_cache, problem.q
    q[..., :] *= 2.0**-6  # latents are up to 32 times as large as elsewhere: else one score would decide
    for name, t in options.items():
        if name == "latent_scale":
            t *= 2.0 ** torch.randint(-9, 6, t.shape, generator=torch.Generator().manual_seed(3)).to(t.device)
        if name == "latent_descale":
            t.fill_(0.03)
    expected = fwd_mla(q.float().cpu(), cache.cpu(), **{n: t.cpu() if torch.is_tensor(t) else t for n, t in options.items()})
    out, lse = run(backend, problem, options)
    # out: four eps of fp16, also relative to its largest number
    torch.testing.assert_close(out.float().cpu(), expected[0], rtol=4e-3, atol=4e-3 * float(expected[0].abs().max()))
    torch.testing.assert_close(lse.cpu(), expected[1], rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("code", [0x7F, 0xFF], ids=hex)
@on("sim", "cuda")
def test_a_code_of_nan(backend, code):
    """A NaN code of e4m3 in a column that is key and value makes the query's whole output and lse NaN."""
    problem, options = draw(backend, latents([(1, 40), (1, 90)], kv_dtype="fp8_e4m3"))
    backend.monkeypatch.setenv("VOLTA_FA_SIMULATE", "1")
    entry, row = (t[3] for t in problem.places[0])  # where the cache has token 3 of sequence 0
    problem.q[..., 5] = 0
    problem.k_cache.view(torch.uint8)[entry, row, 0, 5] = code
    out, lse = fwd_mla(problem.q, problem.k_cache, **options)
    assert out[0].isnan().all() and lse[0].isnan().all(), "0 times NaN is a score of NaN"
    assert not out[1].isnan().any() and not lse[1].isnan().any()


@pytest.mark.parametrize("kv_dtype,offset", [("", 8), ("", 3), ("fp8_e5m2", 3)])
@on("sim", "cuda", "sim-bf16")
def test_a_cache_inside_a_wider_tensor(backend, kv_dtype, offset):
    """Kernels read a cache in place if it is aligned to 16 bytes (offset 8 in fp16). Else it is copied, or dequantized for bf16 queries."""
    problem, options = draw(backend, latents([(1, 37), (1, 80)], nheads=4, kv_dtype=kv_dtype, descale="bh" if kv_dtype else ""))
    expected = run(backend, problem, options)
    cache = problem.k_cache
    bits = cache.view(torch.uint8 if kv_dtype else torch.int16)
    wide = torch.full((*bits.shape[:-1], HEADDIM + 16), -1, dtype=bits.dtype, device=backend.device)  # NaN
    wide[..., offset : offset + HEADDIM] = bits
    problem.k_cache = wide[..., offset : offset + HEADDIM].view(cache.dtype)
    allowed = 2e-2 if backend.dtype == torch.bfloat16 else 3e-3 if kv_dtype else 2e-3
    torch.testing.assert_close(run(backend, problem, options), expected, rtol=allowed, atol=allowed)


@on("cpu-fp32", "sim", "cuda")
def test_no_queries_or_no_keys(backend):
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
def test_many_heads_take_one_launch(backend):
    """The blocks of one launch divide the row tiles of 128 heads among themselves. The kernel spills no registers."""
    problem, options = draw(backend, latents([(1, 100)], nheads=128))
    (launch,) = backend.launches(lambda: fwd_mla(problem.q, problem.k_cache, **options))
    assert launch["kernel"].startswith("volta_mla_decode") and launch["spill_insts_static"] == 0


@on("sim")
def test_a_turing_gpu_gets_voltas_kernel(backend):
    """Turing has no such kernel and runs Volta's through PTX. The simulator runs Volta's machine code for it."""
    backend.monkeypatch.setenv("VOLTA_FA_SIM_GPU", "t4")
    check(backend, latents([(1, 100), (2, 31)], packed=True))
    backend.monkeypatch.setenv("VOLTA_FA_FAMILY", "turing")
    problem, options = draw(backend, latents([(1, 100)]))
    backend.monkeypatch.setenv("VOLTA_FA_SIMULATE", "1")
    words = "volta_fa::fwd_mla", "no turing kernel (DecodeMla) for headdim 576 and headdim_v 512", "VOLTA_FA_FAMILY"
    refused(lambda: fwd_mla(problem.q, problem.k_cache, **options), NotImplementedError, *words)


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
    check_opcheck(backend, case.problem(backend))


@on("cpu-fp32")
def test_backward_is_refused(backend):
    problem, options = draw(backend, CONTRACT[0])
    out, _ = fwd_mla(problem.q.requires_grad_(), problem.k_cache, **options)
    refused(out.sum().backward, RuntimeError, "fwd_mla")


@on("cpu-bf16")
def test_autocast_casts_q_to_the_dtype_of_the_cache(backend):
    problem, options = draw(backend, CONTRACT[0])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = fwd_mla(problem.q.float(), problem.k_cache, **options)
    assert all(map(torch.equal, found, fwd_mla(problem.q, problem.k_cache, **options)))


@pytest.mark.parametrize("kv_dtype", ["", *QUANTIZED])
@on("cuda")
def test_cuda_graph(backend, kv_dtype):
    """A replay reads the lengths of that moment: one captured graph serves all lengths."""
    problem, options = draw(backend, latents([(1, 1000), (1, 17), (1, 300)], kv_dtype=kv_dtype))
    lengths = options["cache_seqlens"]
    graph, found = captured(lambda: fwd_mla(problem.q, problem.k_cache, **options))
    for values in ((0, 0, 0), (1000, 1, 15), (16, 17, 299)):
        lengths.copy_(backend.ints(values))
        graph.replay()
        agreed([fwd_mla(problem.q, problem.k_cache, **options), found])


# ---- wrong arguments -------------------------------------------------------------------------------------------------


def good(backend, page=16):
    """Returns the arguments of a valid call by name. Tests change one of them."""
    problem, options = draw(backend, latents([(2, 9), (2, 17)], nheads=3, page=page))
    return {"q": problem.q, "latent_cache": problem.k_cache, **options}


def scales(arguments):
    return torch.ones(arguments["latent_cache"].shape[:3], device=arguments["q"].device)


def coded(arguments, dtype, **changes):
    """Returns changes of arguments: the cache is quantized (zeros), and others."""
    return {"latent_cache": torch.zeros_like(arguments["latent_cache"], dtype=torch.uint8).view(dtype), **changes}


def compare_with_fp32(arguments, magnitude=1.0):
    """Compares a call with the same in fp32 on the CPU. `magnitude`: of out. Returns out in fp32."""
    out, lse = (t.cpu() for t in fwd_mla(**arguments))
    on_cpu = {name: t.cpu() if isinstance(t, torch.Tensor) else t for name, t in arguments.items()}
    on_cpu |= {name: on_cpu[name].float() for name in ("q", "latent_cache")}
    expected, expected_lse = fwd_mla(**on_cpu)
    torch.testing.assert_close(out.float() / magnitude, expected / magnitude, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-3, atol=1e-3)
    return expected


@pytest.mark.parametrize("number", [7e4, -7e4, 3e5], ids=str)
@on("sim-bf16", "cuda-bf16")
def test_values_beyond_fp16(backend, number):
    """A number beyond fp16's range (65504) in a bf16 cache is read exactly, as a value: column 5 has no part in scores."""
    arguments = good(backend)
    backend.simulate()
    arguments["q"][..., 5] = 0
    cache = arguments["latent_cache"]
    cache[arguments["block_table"][0, 0], 2, 0, 5] = number
    assert compare_with_fp32(arguments)[0, :, :, 5].abs().max() > 100, "the number is seen"


@pytest.mark.parametrize("exponents", [(20, -20), (-40, 40), (-30, -30)], ids=str)
@on("sim-bf16", "cuda-bf16")
def test_bf16_of_any_magnitude(backend, exponents):
    arguments = good(backend)
    backend.simulate()
    of_q, of_k = (2.0**e for e in exponents)
    arguments["q"] = arguments["q"] * of_q
    arguments["latent_cache"] = arguments["latent_cache"] * of_k
    compare_with_fp32(arguments, magnitude=of_k)


#: Changes of good(), of a dense cache if the name begins with "dense"; and words of the error.
WRONG = {
    "q rank": (lambda a: {"q": a["q"][0]}, ["q: got a tensor of rank 3", "cu_seqlens_q"]),
    "q dtype": (lambda a: {"q": a["q"].int()}, ["q: got dtype torch.int32"]),
    "q headdim": (lambda a: {"q": a["q"][..., :512]}, ["q: got headdim 512, expected headdim 576, that of latent_cache"]),
    "q stride": (lambda a: {"q": a["q"].mT.contiguous().mT}, ["q: got stride", "contiguous last dimension"]),
    "cache rank": (lambda a: {"latent_cache": a["latent_cache"][:, :, 0]}, ["latent_cache: got a tensor of rank 3", "(pages,"]),
    "cache heads": (lambda a: {"latent_cache": a["latent_cache"].repeat(1, 1, 2, 1)}, ["latent_cache: got nheads_k 2", "1: all"]),
    "cache headdim": (lambda a: {"latent_cache": a["latent_cache"][..., :512]}, ["latent_cache: got headdim 512", "576", "512 columns"]),
    "cache dtype": (lambda a: {"latent_cache": a["latent_cache"].to(torch.bfloat16)}, ["latent_cache: got dtype torch.bfloat16"]),
    "int8 without scale": (lambda a: coded(a, torch.int8), ["latent_scale: got None", "one for each token"]),
    "int4": (lambda a: coded(a, torch.uint8), ["latent_cache: got dtype torch.uint8", "torch.int8, torch.float8_e5m2"]),
    "scale of fp16": (lambda a: {"latent_scale": scales(a)}, ["latent_scale: got a tensor", "not quantized"]),
    "scale dtype": (lambda a: coded(a, torch.int8, latent_scale=scales(a).double()), ["latent_scale: got dtype"]),
    "scale shape": (lambda a: coded(a, torch.int8, latent_scale=scales(a)[..., 0]), ["latent_scale: got shape"]),
    "scale value": (lambda a: coded(a, torch.int8, latent_scale=-scales(a)), ["latent_scale: got -1", "from 0 on"]),
    "descale of int8": (
        lambda a: coded(a, torch.int8, latent_scale=scales(a), latent_descale=scales(a)[0, :1, 0]), ["latent_descale: got a tensor", "int8"]
    ),
    "descale shape": (
        lambda a: coded(a, torch.float8_e5m2, latent_descale=scales(a)[0, :3, 0]), ["latent_descale: got shape (3)", "(batch, nheads_k)"]
    ),
    "descale value": (lambda a: coded(a, torch.float8_e4m3fn, latent_descale=scales(a)[0, :1, 0] * math.inf), ["latent_descale: got inf"]),
    "cache device": (lambda a: {"latent_cache": a["latent_cache"].to("meta")}, ["latent_cache: got device meta"]),
    "page size": (lambda a: {"latent_cache": a["latent_cache"][:, :12]}, ["latent_cache: got pages of 12 tokens", "multiple of 16"]),
    "table dtype": (lambda a: {"block_table": a["block_table"].long()}, ["block_table: got dtype torch.int64"]),
    "table batch": (lambda a: {"block_table": a["block_table"][:1]}, ["block_table: got shape", "(batch, max_pages)"]),
    "lengths dtype": (lambda a: {"cache_seqlens": a["cache_seqlens"].long()}, ["cache_seqlens: got dtype torch.int64"]),
    "batch_idx": (lambda a: {"cache_batch_idx": a["cache_seqlens"]}, ["cache_batch_idx: got a tensor", "block_table is given"]),
    "max_seqlen_q": (lambda a: {"max_seqlen_q": 3}, ["max_seqlen_q: got 3", "cu_seqlens_q is not given"]),
    "scale": (lambda a: {"softmax_scale": math.inf}, ["softmax_scale: got inf"]),
    "num_splits": (lambda a: {"num_splits": -1}, ["num_splits: got -1"]),
    "dense batch": (lambda a: {"latent_cache": a["latent_cache"][:1]}, ["latent_cache: got batch 1", "cache_batch_idx"]),
    # values: ints(a, ...) is an int32 tensor on q's device, and spoiled(t, i, j, x) is t with x at [i, j]
    "dense entry": (lambda a: {"cache_batch_idx": ints(a, 0, 2)}, ["cache_batch_idx: got 2 (sequence 1)", "the entries of latent_cache"]),
    "negative length": (lambda a: {"cache_seqlens": ints(a, 9, -1)}, ["cache_seqlens: got -1 (sequence 1)", "from 0 to"]),
    "long length": (lambda a: {"cache_seqlens": ints(a, 9, 65)}, ["cache_seqlens: got 65 (sequence 1)", "from 0 to 64"]),
    "page": (lambda a: {"block_table": spoiled(a["block_table"], 1, 1, 99)}, ["block_table: got 99 (page 1", "of latent_cache"]),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
@on("cpu-fp32", "sim", "cuda")
def test_wrong_arguments(backend, name):
    spoil, words = WRONG[name]
    arguments = good(backend, page=0 if name.startswith("dense") else 16)
    backend.simulate("timing")
    wrong = {**arguments, **spoil(arguments), "check_lengths": True}
    refused(lambda: fwd_mla(**wrong), ValueError, "volta_fa::fwd_mla", *words)


@on("cpu-fp32", "sim", "cuda")
def test_fwd_kvcache_names_fwd_mla(backend):
    """fwd_kvcache has no kernel for keys of headdim 576. Its error names fwd_mla."""
    arguments = good(backend)
    backend.simulate()
    q, cache = arguments["q"], arguments["latent_cache"]
    options = {name: arguments[name] for name in ("block_table", "cache_seqlens")}
    words = "volta_fa::fwd_kvcache", "v_cache: got a cache of values beside keys of headdim 576", "volta_fa::fwd_mla"
    refused(lambda: torch.ops.volta_fa.fwd_kvcache(q, cache, cache[..., :512].contiguous(), **options), ValueError, *words)


@pytest.mark.parametrize("name", ["negative length", "long length", "page", "negative page", "entry"])
@on("sim", "cuda", "sim-bf16", "cuda-bf16")
def test_unchecked_values(backend, name):
    """In a call that does not check lengths and pages, the sequence with an invalid one is NaN, and the other is right."""
    page, spoil = UNCHECKED[name]  # tokens of a page (0: a dense cache), and the change
    arguments = good(backend, page=page)
    backend.simulate()
    backend.monkeypatch.setenv("VOLTA_FA_CHECK_LENGTHS", "0")
    expected = fwd_mla(**arguments)
    if backend.machine == "cuda":
        poison_cuda(arguments["q"])  # NaN in memory for results
    out, lse = fwd_mla(**{**arguments, **spoil(arguments)})
    assert out[0].isnan().all() and lse[0].isnan().all()
    torch.testing.assert_close(out[1], expected[0][1], rtol=2e-3, atol=2e-3)
    torch.testing.assert_close(lse[1], expected[1][1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("heads", [16, 33])
@on("sim", "cuda")
def test_with_one_split_a_sequence_depends_on_no_other(backend, heads):
    """With num_splits=1, a sequence's results are bitwise those that it has alone in the call."""
    problem, options = draw(backend, latents([(1, 300), (1, 1000), (1, 17)], nheads=heads, num_splits=1))
    out, lse = run(backend, problem, options)
    problem.q = problem.q[:1]
    alone = run(backend, problem, {name: t[:1] if torch.is_tensor(t) else t for name, t in options.items()})
    assert_same_bits("out", alone[0], out[:1])
    assert_same_bits("softmax_lse", alone[1], lse[:1])


# ---- FlashMLA's functions ----------------------------------------------------------------------------------------

#: The default scale is 576^-0.5. 192^-0.5 is DeepSeek's, of the headdim before the projection to latents.
FLASH_MLA = [latents([(2, 37), (2, 150)], is_causal=False, softmax_scale=192**-0.5), latents([(2, 37), (2, 150)])]
FLASH_MLA_QUANTIZED = [latents([(2, 37), (2, 150)], kv_dtype=kv_dtype, descale="bh") for kv_dtype in ("int8", "fp8_e4m3")]


@on_cases((ALL, FLASH_MLA), (["cpu-fp32", "sim"], FLASH_MLA_QUANTIZED))
def test_flash_mla_against_fp64(backend, case):
    problem, given = draw(backend, case)
    lengths = given["cache_seqlens"]
    rows = problem.q.shape[1] * problem.q.shape[2]  # of a KV head: queries times heads
    metadata, num_splits = flash_mla.get_mla_metadata(lengths, rows, 1)  # 1: KV heads
    options = {"tile_scheduler_metadata": metadata, "num_splits": num_splits, "causal": case.is_causal, "softmax_scale": case.softmax_scale}
    options |= {"latent_scale": given.get("latent_scale"), "descale_k": given.get("latent_descale")}
    for _ in backend._runs(problem.q, problem.k_cache):
        out, lse = flash_mla.flash_mla_with_kvcache(problem.q, problem.k_cache, given["block_table"], lengths, HEADDIM_V, **options)
    assert out.shape == (2, 2, 16, HEADDIM_V) and lse.shape == (2, 16, 2)
    check_sequences(backend, problem, out, lse, problem.k_cache, problem.v_cache)


@on("cpu-fp32", "cuda")
def test_flash_mla_metadata(backend):
    """The metadata, which volta_fa does not need, has FlashMLA's shapes and device. Callers of newer FlashMLA pass no arguments."""
    lengths = backend.ints([3, 4, 5])
    metadata, num_splits = flash_mla.get_mla_metadata(lengths, 16, 1)
    assert metadata.shape == (0, 8) and num_splits.shape == (4,)
    assert {t.dtype for t in (metadata, num_splits)} == {torch.int32}
    assert {t.device.type for t in (metadata, num_splits)} == {backend.device}
    flash_mla.get_mla_metadata()
    # by name, with two of sparse decoding, ignored as the others are
    flash_mla.get_mla_metadata(cache_seqlens=lengths, num_q_tokens_per_head_k=16, num_heads_k=1, is_fp8_kvcache=True, topk=2048)
    refused(lambda: flash_mla.get_mla_metadata(lengths, 16, 2), ValueError, "num_heads_k: got 2, expected 1")


WRONG_FLASH_MLA = {
    "head_dim_v": ({"head_dim_v": 576}, ValueError, "head_dim_v: got 576, expected 512"),
    "fp8": ({"is_fp8_kvcache": True}, NotImplementedError, "is_fp8_kvcache: got True, expected False"),
    **{
        name: ({name: torch.zeros(2)}, ValueError, f"{name}: got a tensor, expected None without indices")
        for name in ("attn_sink", "extra_k_cache", "extra_indices_in_kvcache", "topk_length", "extra_topk_length")
    },
    "table": ({"block_table": None}, ValueError, "block_table: got None"),
    "lengths": ({"cache_seqlens": None}, ValueError, "cache_seqlens: got None"),
    "q": ({"q": None}, ValueError, "q: got None, expected a tensor"),
    "heads": ({"k_cache": torch.zeros(4, 64, 2, 576)}, ValueError, "latent_cache: got nheads_k 2"),
    "headdim": ({"k_cache": torch.zeros(4, 64, 1, 512)}, ValueError, "latent_cache: got headdim 512"),
}


@pytest.mark.parametrize("name", WRONG_FLASH_MLA)
def test_wrong_arguments_of_flash_mla(name):
    wrong, error, message = WRONG_FLASH_MLA[name]
    table, lengths = torch.zeros(2, 2, dtype=torch.int32), torch.tensor([3, 4], dtype=torch.int32)
    arguments = {"q": torch.zeros(2, 1, 16, 576), "k_cache": torch.zeros(4, 64, 1, 576), "head_dim_v": 512}
    arguments |= {"block_table": table, "cache_seqlens": lengths}
    flash_mla.flash_mla_with_kvcache(**arguments)
    refused(lambda: flash_mla.flash_mla_with_kvcache(**{**arguments, **wrong}), error, message)
