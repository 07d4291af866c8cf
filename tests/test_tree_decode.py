"""Tests of `tree_mask` of volta_fa::fwd_kvcache, for speculative decoding: the queries are draft tokens that form a tree.

Each query sees all tokens before the drafts, and of the drafts only itself and its ancestors: bit j of its int64 word is draft j.

cached.py has problems (`Cached`: (queries, cached tokens, appended tokens) of each sequence), `run` and `check`, which compares with fp64.
page: tokens of a page (default 16); 0: a dense cache.
layout: "hnd" has heads before tokens, "wide" is a slice of a larger tensor. batch_idx: cache_batch_idx is given. spread: standard deviation
of q, k and v. descale: dimensions of fp8's scales (h: heads). nheads is 2, nheads_k 1 and headdim 64 by default. A backend is the CPU, the
simulator (`sim`) or a GPU, with a dtype."""

import dataclasses

import pytest
import torch

from cached import Cached, check, check_opcheck, check_reads_no_value, run
from conftest import BF16_KERNELS, INFO, agreed, on, on_cases  # agreed: the first of results, which must be bitwise identical
from test_validation import refused  # refused(call, exception, *words of its message)
from volta_fa.check.cache_cases import random_tree, tree_words
from volta_fa.kv_cache.formats import CACHE_KV_DTYPES

fwd_kvcache = torch.ops.volta_fa.fwd_kvcache


def trees(lengths, **options) -> Cached:
    """lengths: (draft tokens, cached tokens, appended tokens) of each sequence. Options are fields of CacheCase."""
    return Cached(lengths, tree=True, **options)


def even(n, *cached, **options) -> Cached:
    """Returns sequences of n draft tokens each, with these numbers of cached tokens, drafts included, and none to append."""
    return trees(tuple((n, tokens, 0) for tokens in cached), **options)


LAYOUTS = [
    even(8, 40, 8, 9, 203),
    even(8, 40, 8, 9, 203, page=0, nheads=8),
    even(5, 5, 77, 64, nheads=6, nheads_k=2, is_causal=False),
    even(64, 64, 65, 130, nheads=4, nheads_k=4),
    even(64, 90, 300, nheads=2, nheads_k=1, page=48),
    # 128 rows per KV head: more than decode kernels take without a tree (64)
    even(16, 16, 140, nheads=16, nheads_k=2),
    # fewer keys than draft tokens
    even(8, 3, 0, 7),
    even(1, 12, 1),
    trees(((8, 30, 8), (8, 0, 8)), nheads=4, nheads_k=2, headdim=96),
    trees(((7, 30, 7), (3, 5, 3), (0, 9, 0), (21, 40, 21)), packed=True, nheads=4),
    trees(((7, 30, 0), (1, 5, 0), (33, 40, 0)), packed=True, page=0, nheads=3, window_left=4),
    even(9, 60, 20, sinks="own", softcap=4.0, spread=2.0),
    even(9, 60, 20, page=0, leftpad=(3, 11)),
    even(9, 60, 20, page=0, batch_idx=True, layout="hnd", num_splits=2),
    even(9, 60, 20, softmax_scale=-0.3, layout="wide"),
]
WINDOWS = [even(12, 60, 20, 12, window_left=w, page=page) for w, page in ((0, 16), (1, 0), (3, 16), (9, 16), (25, 0))]
WINDOWS += [even(64, 150, 90, window_left=7, nheads=1), trees(((8, 30, 8), (8, 7, 8)), window_left=2, nheads=4, window_right=0)]
#: Kernels do not read these in place: rows are not aligned to 16 bytes.
COPIED = [even(8, 40, 9, headdim=20, nheads=4), even(8, 40, 9, headdim=24, kv_dtype="int8", nheads=4, window_left=3)]
QUANTIZED = [
    even(8, 40, 9, 100, kv_dtype="int8", nheads=4),
    even(8, 40, 9, 100, kv_dtype="int4", nheads=4, page=0, window_left=3),
    even(8, 40, 9, 100, kv_dtype="int8k_int4v", nheads=4, window_left=3),
    even(20, 40, 29, kv_dtype="fp8_e5m2", descale="h", nheads=8, nheads_k=2, window_left=30),
    trees(((7, 30, 7), (3, 5, 3)), packed=True, nheads=4, kv_dtype="fp8_e4m3"),
]
#: Every kernel over quantized caches: 48 rows per KV head, which are two tiles of 32 rows or three of 16.
QUANTIZED_KERNELS = [
    even(12, 70, 9, nheads=8, nheads_k=2, headdim=d, kv_dtype=name, descale="h" if name.startswith("fp8") else "")
    for name in CACHE_KV_DTYPES
    for d in (64, 128, 256, 512)
]
#: Every kernel: tiles of 16, 32 and 64 rows (drafts * query heads of a KV head) in each headdim, and several tiles of a sequence.
TILES = [even(n, 300, 70, nheads=4 * g, nheads_k=4, headdim=d) for d in (64, 128, 256) for n, g in ((4, 4), (8, 4), (8, 8), (15, 6))]
#: Long sequences, so that several thread blocks share a tile.
SHARED = [even(8, 2500, 30, nheads=8, headdim=128), even(16, 3000, nheads=4, headdim=64, window_left=2900)]


# slices of lists: a few cases, where all would take too long
@on_cases(
    (["cpu-fp32", "sim", "cuda"], LAYOUTS + WINDOWS + COPIED + QUANTIZED),
    (["cpu-fp64", "cpu-bf16"], LAYOUTS[::4] + QUANTIZED[:1]),
    (["sim", "cuda"], TILES + SHARED + QUANTIZED_KERNELS),
    (BF16_KERNELS, TILES + LAYOUTS[5:11:2] + WINDOWS[3:4] + COPIED[:1] + QUANTIZED[1:2]),
    slow=((["cpu-fp64", "cpu-bf16"], LAYOUTS + WINDOWS + COPIED + QUANTIZED),),
)
def test_against_fp64(backend, case):
    check(backend, case)


@on("sim")
def test_a_window_needs_no_dequantize_kernel(backend, force):
    """Under a window ATen copies a quantized cache that kernels cannot read in place, because queries of a tree see different tokens."""
    force(failed=[v["name"] for v in INFO["variants"] if v["pass"] == "Dequantize"])
    check(backend, COPIED[1])


@on("sim")
@pytest.mark.parametrize("case", TILES + WINDOWS[2:3], ids=str)
def test_turing_kernels(backend, case):
    backend.monkeypatch.setenv("VOLTA_FA_SIM_GPU", "t4")
    check(backend, case)


@on_cases((["cpu-fp32", "sim", "cuda"], [LAYOUTS[0], LAYOUTS[9], even(12, 60, 20, window_left=5, nheads=8)]))
def test_a_chain_is_a_causal_mask(backend, case):
    """A tree in which each draft follows the one before gives the result of a causal mask."""
    chains = [tree_words(list(range(-1, n - 1))) for n, _, _ in case.lengths]  # of each draft's parent; -1: none

    def change(problem):
        mask = torch.tensor([w for chain in chains for w in chain] if case.packed else chains)
        problem.options["tree_mask"] = mask.to(problem.q.device)

    check(backend, dataclasses.replace(case, tree=False), change)


@on("cpu-fp32", "sim", "cuda")
def test_is_causal_window_right_and_unused_bits_have_no_effect(backend):
    """The tree replaces is_causal and window_right. Bits 8 to 63 (-256) are of drafts that do not exist."""
    problem = even(8, 40, 21, nheads=4, is_causal=False).problem(backend)
    results = []
    for options in ({}, {"is_causal": True}, {"is_causal": False, "window_right": 3}, {"tree_mask": problem.options["tree_mask"] | -256}):
        problem.options |= options
        results.append(run(backend, problem)[:2])
    agreed(results)


@on("cpu-fp32", "sim", "cuda")
def test_one_tree_serves_a_whole_batch(backend):
    problem = even(8, 40, 21, 8, nheads=4).problem(backend)
    problem.options["tree_mask"] = torch.tensor([tree_words(random_tree(8, seed=3))] * 3, device=problem.q.device)
    expected = run(backend, problem)[:2]
    problem.options["tree_mask"] = problem.options["tree_mask"][0].expand(3, 8)
    agreed([expected, run(backend, problem)])


@on("cpu-fp32", "sim", "cuda")
def test_a_mask_of_zeros_shows_the_keys_before_the_drafts(backend):
    problem = even(4, 40, nheads=2).problem(backend)
    problem.options["tree_mask"] = torch.zeros(1, 4, dtype=torch.int64, device=problem.q.device)
    found = run(backend, problem)[:2]
    before = problem.options | {"cache_seqlens": problem.options["cache_seqlens"] - 4, "is_causal": False}
    del before["tree_mask"]
    backend.simulate()
    expected = fwd_kvcache(problem.q, problem.k_cache, problem.v_cache, **before)
    torch.testing.assert_close(found, expected, rtol=2e-3, atol=2e-3)  # two eps of fp16: kernels may add in another order


@on("sim")
def test_no_value_is_read_on_the_host(backend):
    check_reads_no_value(backend, even(8, 40, 21, nheads=4).problem(backend))


@on("cpu-fp32", "sim", "cuda")
@pytest.mark.parametrize("case", [even(3, 20, 7), trees(((2, 9, 2), (2, 0, 2)))], ids=str)
def test_opcheck(backend, case):
    check_opcheck(backend, case.problem(backend))


#: A change of a call with a mask (2, 4), and words of the error.
REFUSED = {
    "dtype": (lambda p: {"tree_mask": p.options["tree_mask"].int()}, ["tree_mask: got dtype torch.int32", "torch.int64"]),
    "shape": (lambda p: {"tree_mask": p.options["tree_mask"][:, :3]}, ["tree_mask: got shape (2, 3)", "(batch, seqlen_q)", "(2, 4)"]),
    "strides": (lambda p: {"tree_mask": p.options["tree_mask"].t().contiguous().t()}, ["tree_mask: got stride 2", "contiguous"]),
    "alibi": (lambda p: {"alibi_slopes": torch.ones(2)}, ["alibi_slopes: got a tensor", "None beside tree_mask", "depths"]),
}


@pytest.mark.parametrize("name", REFUSED)
@on("cpu-fp32", "sim")
def test_invalid_trees_are_refused(backend, name):
    problem = even(4, 20, 9).problem(backend)
    change, message = REFUSED[name]
    options = problem.options | change(problem)
    refused(lambda: fwd_kvcache(problem.q, problem.k_cache, problem.v_cache, **options), ValueError, *message)


@on("cpu-fp32")
def test_many_drafts_and_rotary_embedding_are_refused(backend):
    """A tree has at most 64 drafts, the bits of a word. Their positions are not consecutive, so the call cannot rotate q and k."""

    def refuse(case, *words, **options):
        problem = case.problem(backend)
        tensors, options = (problem.q, problem.k_cache, problem.v_cache, *problem.new), problem.options | options
        refused(lambda: fwd_kvcache(*tensors, **options), ValueError, *words)

    many, most = Cached(((65, 80, 0), (65, 70, 0))), "at most 64 draft tokens"
    refuse(many, "q: got seqlen 65", most, tree_mask=torch.zeros(2, 65, dtype=torch.int64))
    refuse(trees(((3, 9, 3), (3, 16, 3)), rotary="half"), "rotary_cos: got a tensor", "Rotate q and k before the call")
    packed = Cached(((3, 9, 0), (66, 80, 0)), packed=True)
    refuse(packed, "max_seqlen_q: got 66", most, tree_mask=torch.zeros(69, dtype=torch.int64))
