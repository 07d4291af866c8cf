"""`kv_indices` of `fwd_kvcache` and `fwd_mla`: each query attends to blocks of tokens that a list selects, against fp64.

A list has `topk` numbers of blocks of `kv_block` tokens, unsorted, perhaps repeated; a -1 ends it. There is one list per query, or one per
query and KV head. Kernels read the selected tokens in place if blocks match the cache's pages; otherwise the call copies them. cached.py
has problems with a cache (`Cached`), `run` (out, softmax_lse, caches, options) and checks of these. A problem has lengths, (queries, cached
tokens, tokens that the call appends) of each sequence, and ends, its tokens after the call. Its layout is nhd (tokens before heads), "hnd",
"kv" (pages of K, then V) or "wide" (a slice of a larger tensor). descale: dimensions of fp8's scales. `latents` makes problems of fwd_mla
(multi-head latent attention). A backend is the CPU, the simulator (`sim`) or a GPU (`cuda`), with a dtype of queries."""

import dataclasses
import random

import pytest
import torch

from cached import Cached, check_cache, check_opcheck, check_reads_no_value, check_sequence, run
from conftest import BF16_KERNELS, agreed, check_form, on, on_cases  # agreed: the first of results, which must be bitwise identical
from test_mla import latents
from test_validation import refused  # refused(call, exception, *words of its message)

fwd_kvcache = torch.ops.volta_fa.fwd_kvcache


@dataclasses.dataclass(frozen=True)
class Selected:
    """A problem, and `heads` lists of `topk` blocks for each query. A case's `page` is the tokens of a page, 0 for a dense cache."""

    case: Cached
    block: int
    topk: int
    heads: int = 1

    def __str__(self):
        return f"{self.topk}x{self.block}-{self.heads}lists-{self.case}"

    __repr__ = __str__

    def problem(self, backend):
        problem = self.case.problem(backend)
        return with_lists(problem, self, lists(problem, self))


def capacity(problem) -> int:
    """Returns the tokens that a sequence has room for."""
    table = problem.options.get("block_table")
    return problem.k_cache.shape[1] * (1 if table is None else table.shape[1])


def lists(problem, selected: Selected, seed=0) -> list[list[list[list[int]]]]:
    """Returns random lists of each sequence, query and head, with repetitions, blocks past the end, and numbers after a -1."""
    source, case = random.Random(seed), problem.case
    blocks = -(-capacity(problem) // selected.block)

    def one(seqlen_k):
        own = max(-(-seqlen_k // selected.block), 1)  # blocks with tokens of the sequence
        wanted = source.sample(range(own), min(own, source.randint(1, selected.topk)))
        wanted += [source.randrange(blocks)] * source.randint(0, 1) + wanted[:1] * source.randint(0, 1)
        source.shuffle(wanted)
        after = [-1, *(source.randrange(-1, blocks) for _ in range(selected.topk))]
        return (wanted[: selected.topk] + after)[: selected.topk]

    return [[[one(end) for _ in range(selected.heads)] for _ in range(n)] for (n, _, _), end in zip(case.lengths, case.ends)]


def with_lists(problem, selected: Selected, of_sequences):
    """Returns the problem with kv_indices from these lists, by sequence, query and head."""
    rows = torch.tensor([row for of_sequence in of_sequences for row in of_sequence], dtype=torch.int32, device=problem.q.device)
    problem.options |= {"kv_indices": rows.view(*problem.q.shape[:-2], selected.heads, selected.topk), "kv_block": selected.block}
    return problem


def visible(selected: Selected, of_queries, seqlen_k: int, is_causal: bool) -> torch.Tensor:
    """Returns (1, nheads, seqlen_q, seqlen_k) bool: the keys in a query's blocks before its first -1, which are causal if asked."""
    case, seqlen_q, key = selected.case, len(of_queries), torch.arange(seqlen_k)
    found = torch.zeros(1, case.nheads, seqlen_q, seqlen_k, dtype=torch.bool)
    for i, of_heads in enumerate(of_queries):
        for head in range(case.nheads):
            blocks = of_heads[head * len(of_heads) // case.nheads]
            blocks = blocks[: blocks.index(-1)] if -1 in blocks else blocks
            found[0, head, i] = torch.isin(key // selected.block, torch.tensor(blocks, dtype=torch.int64))
    return found & (key <= torch.arange(seqlen_q)[:, None] + seqlen_k - seqlen_q) if is_causal else found


def check(backend, selected: Selected):
    """Checks fwd_kvcache, or fwd_mla for latents, against fp64 attention with the lists as a bool mask."""
    case, problem = selected.case, selected.case.problem(backend)
    of_sequences = lists(problem, selected)
    with_lists(problem, selected, of_sequences)
    given = problem.options["kv_indices"].clone()
    out, lse, *caches, options = run(backend, problem)
    check_cache(problem, *caches, options)
    assert torch.equal(problem.options["kv_indices"], given)
    check_form(problem.q, case.columns_v, out, lse)
    for b, of_queries in enumerate(of_sequences):
        if of_queries:
            seen = visible(selected, of_queries, case.ends[b], case.is_causal).to(out.device)
            options = {"is_causal": False, "window_left": -1, "window_right": -1, "attn_bias": seen}
            check_sequence(backend, problem, b, out, lse, *caches, **options)


def cached(n, *tokens, **options) -> Cached:
    """Returns a problem of sequences of these cached tokens, with n queries each."""
    return Cached(tuple((n, t, 0) for t in tokens), **options)  # 0: appends none


#: Problems with the tokens of a block, and topk. Kernels read the tokens in place: the block divides the page or entry, or the page the
#: block, or both are multiples of 16.
IN_PLACE = [
    Selected(cached(1, 300, 70, 0, 1, page=64), 64, 4),
    Selected(cached(3, 300, 70, 3, page=128, nheads=8, nheads_k=2), 64, 3),
    Selected(cached(2, 300, 70, page=16, nheads=4), 128, 2),
    Selected(cached(2, 300, 70, page=48, nheads=4, layout="kv"), 64, 4),
    Selected(cached(2, 300, 70, page=64, layout="hnd", nheads=4, nheads_k=2), 64, 4),
    Selected(cached(3, 300, 129, page=0, seqlen_cache=320, nheads=4), 64, 3),
    Selected(cached(3, 300, 129, page=0, seqlen_cache=320, nheads=4, batch_idx=True, is_causal=False), 64, 5),
    Selected(cached(2, 300, 129, page=64, nheads=6, nheads_k=3), 64, 3, heads=3),
    Selected(cached(2, 300, 129, page=64, nheads=4, nheads_k=2, sinks="own", softcap=5.0), 16, 6, heads=2),
    Selected(cached(2, 300, 129, page=64, nheads=4, nheads_k=2, kv_dtype="int8"), 64, 3),
    Selected(cached(2, 300, 129, page=64, nheads=4, nheads_k=2, kv_dtype="int4"), 64, 3, heads=2),
    Selected(cached(2, 300, 129, page=64, nheads=4, nheads_k=2, kv_dtype="fp8_e5m2", descale="bh"), 64, 3, heads=2),
    Selected(Cached(((3, 100, 3), (1, 200, 1), (0, 9, 0), (4, 0, 4)), packed=True, page=64, nheads=4), 64, 2),
    Selected(Cached(((3, 100, 3), (3, 0, 3)), page=64, nheads=4, rotary="half"), 64, 2),
    Selected(cached(1, 100, page=16, headdim=20, nheads=2), 16, 3),
    Selected(cached(2, 300, 129, page=64, nheads=4, nheads_k=2, kv_dtype="int8k_int4v"), 64, 3, heads=2),
]
#: The tokens are copied.
COPIED = [
    Selected(cached(1, 300, 70, 0, 1), 1, 40),
    Selected(cached(3, 300, 70, nheads=8, nheads_k=2, headdim=128), 4, 30),
    Selected(cached(3, 300, 70, nheads=8, nheads_k=2, page=0), 4, 30, heads=2),
    Selected(cached(2, 300, 100, page=0, seqlen_cache=301, nheads=4, sinks="fp32"), 64, 3),
    Selected(cached(2, 60, 29, page=0, layout="wide", nheads=4), 1, 9),
    Selected(cached(2, 300, 129, nheads=4, nheads_k=2, kv_dtype="int8"), 4, 20, heads=2),
    Selected(cached(2, 300, 129, nheads=4, nheads_k=2, kv_dtype="fp8_e4m3", descale="h"), 1, 70),
    Selected(Cached(((3, 100, 3), (1, 200, 1), (0, 9, 0)), packed=True, nheads=4), 4, 11),
    Selected(cached(2, 60, is_causal=False, softmax_scale=-0.2, num_splits=2), 1, 50),
    Selected(cached(2, 300, 129, nheads=4, nheads_k=2, kv_dtype="int8k_int4v"), 4, 20, heads=2),
]


def of_latents(n, *tokens, **options) -> Cached:
    """Returns the same as `cached` with a cache of latents."""
    return latents([(n, t) for t in tokens], **options)


MLA = [
    Selected(of_latents(2, 300, 65, nheads=16), 1, 100),
    Selected(of_latents(2, 300, 65, nheads=5, page=0), 64, 3),
    Selected(of_latents(1, 200, 65, nheads=16, is_causal=False), 64, 3),
    Selected(of_latents(2, 200, 65, nheads=8, kv_dtype="int8"), 1, 60),
    Selected(of_latents(2, 200, 65, nheads=8, kv_dtype="fp8_e4m3", descale="bh"), 64, 2),
]


@on_cases(
    (["cpu-fp32", "sim", "cuda"], IN_PLACE + COPIED + MLA),
    (["cpu-fp64", "cpu-bf16"], IN_PLACE[::4] + COPIED[::4]),
    (BF16_KERNELS, [IN_PLACE[1], IN_PLACE[8], IN_PLACE[12], COPIED[1], MLA[0]]),
    # DeepSeek sparse attention: 2048 tokens of each query
    (["sim", "cuda"], [Selected(of_latents(1, 3000, nheads=16), 1, 2048)]),
    slow=((["cpu-fp64", "cpu-bf16"], IN_PLACE + COPIED),),
)
def test_against_fp64(backend, case):
    check(backend, case)


@on("cpu-fp32", "sim", "cuda")
@pytest.mark.parametrize("block", [1, 64])
@pytest.mark.parametrize("topk", [0, 3])
def test_queries_without_a_block(backend, block, topk):
    """out is 0, and softmax_lse is the sink."""
    problem = cached(2, 100, 5, page=64, nheads=4, sinks="own").problem(backend)
    problem.options |= {"kv_indices": problem.q.new_full((2, 2, 1, topk), -1, dtype=torch.int32), "kv_block": block}
    out, lse, *_ = run(backend, problem)
    assert (out == 0).all()
    sinks = problem.options["sinks"].float()[None, :, None].expand(2, 4, 2)
    torch.testing.assert_close(lse, sinks, rtol=1e-3, atol=1e-3)  # not equal: kernels compute in log2 units


@on("sim", "cuda")
@pytest.mark.parametrize("block", [1, 64])
def test_unchecked_values_become_nan(backend, block):
    """Invalid lengths, and invalid pages of selected blocks, make their sequence NaN and change no bit of others."""
    backend.monkeypatch.setenv("VOLTA_FA_CHECK_LENGTHS", "0")
    case = cached(1, 100, 100, 100, page=64, nheads=4)
    last = 99 // block
    # 1: no result depends on another sequence's length; 0: it decides where blocks split a sequence, so bits may differ
    for num_splits, agree in ((1, agreed), (0, lambda pairs: torch.testing.assert_close(*pairs, rtol=0.01, atol=0.01))):
        problem = case.problem(backend)
        indices = torch.tensor([[0, last], [0, last], [0, 2**31 - 1]], dtype=torch.int32, device=problem.q.device)
        problem.options |= {"kv_indices": indices[:, None, None], "kv_block": block, "num_splits": num_splits}
        right = run(backend, problem)[:2]
        problem.options["cache_seqlens"] = backend.ints([100, 1000, 100])
        out, lse, *_ = run(backend, problem)
        assert out[1].isnan().all() and lse[1].isnan().all()
        agree([[t[[0, 2]] for t in results] for results in (right, (out, lse))])
        problem.options["cache_seqlens"] = backend.ints([100, 100, 100])
        problem.options["block_table"][0, 1] = 12345
        out, lse, *_ = run(backend, problem)
        assert out[0].isnan().all() and lse[0].isnan().all()
        agree([[t[1:] for t in results] for results in (right, (out, lse))])


@on("sim")
@pytest.mark.parametrize("block", [1, 64])
def test_no_value_is_read_on_the_host(backend, block):
    selected = Selected(cached(2, 100, 40, page=64, nheads=4, nheads_k=2), block, 3, heads=2)
    check_reads_no_value(backend, selected.problem(backend), "aten::sort")  # the call sorts the lists on the device


@on("cpu-fp32", "sim", "cuda")
@pytest.mark.parametrize("block", [4, 64])
def test_opcheck(backend, block):
    selected = Selected(Cached(((2, 60, 2), (2, 0, 2)), page=64, nheads=4, nheads_k=2), block, 2, heads=2)
    check_opcheck(backend, selected.problem(backend))


def tensor(*shape, dtype=torch.int32):
    return torch.zeros(shape, dtype=dtype)


#: Wrong options by name: of a call with 2 x 3 queries, 4 heads on 2, lists of 4 blocks of 4 tokens; and words of the error.
REFUSED = {
    "dtype": ({"kv_indices": tensor(2, 3, 1, 4, dtype=torch.int64)}, ["kv_indices: got dtype torch.int64", "torch.int32"]),
    "rank": ({"kv_indices": tensor(2, 3, 4)}, ["kv_indices: got shape (2, 3, 4)", "(batch, seqlen_q, heads, topk)"]),
    "queries": ({"kv_indices": tensor(2, 4, 1, 4)}, ["kv_indices: got shape (2, 4, 1, 4)", "(2, 3)"]),
    "heads": ({"kv_indices": tensor(2, 3, 3, 4)}, ["kv_indices: got shape (2, 3, 3, 4)", "heads is 1 or nheads_k 2"]),
    "block": ({"kv_block": 3}, ["kv_block: got 3", "1, 2, 4, 8, 16, 32, 64, 128"]),
    "no lists": ({"kv_indices": None, "kv_block": 64}, ["kv_block: got 64", "kv_indices is not given"]),
    "window": ({"window_left": 5}, ["window_left: got 5", "-1 beside kv_indices"]),
    "right window": ({"window_right": 1, "is_causal": False}, ["window_right: got 1", "at most 0 beside kv_indices"]),
    "alibi": ({"alibi_slopes": torch.ones(4)}, ["alibi_slopes: got a tensor", "None beside kv_indices"]),
    "tree": ({"tree_mask": tensor(2, 3, dtype=torch.int64)}, ["tree_mask: got a tensor", "None beside kv_indices"]),
    "negative": ({"kv_indices": tensor(2, 3, 1, 4) - 2}, ["kv_indices: got -2", "or -1 after a list's last"]),
    "too large": ({"kv_indices": tensor(2, 3, 1, 4) + 64}, ["kv_indices: got 64", "numbers of blocks below 64"]),
}


@pytest.mark.parametrize("name", REFUSED)
@on("cpu-fp32", "sim")
def test_wrong_options_are_refused(backend, name):
    backend.simulate()
    problem = cached(3, 200, 9, nheads=4, nheads_k=2).problem(backend)
    # 16 pages of 16 tokens: 64 blocks
    problem.options["block_table"] = torch.nn.functional.pad(problem.options["block_table"], (0, 16))[:, :16].contiguous()
    options, words = REFUSED[name]
    options = problem.options | {"kv_indices": tensor(2, 3, 1, 4), "kv_block": 4} | options
    refused(lambda: fwd_kvcache(problem.q, problem.k_cache, problem.v_cache, **options), ValueError, *words)


@on("cpu-fp32")
def test_leftpad_and_packed_shapes_are_refused(backend):
    problem = cached(3, 20, 9, page=0, leftpad=(2, 0)).problem(backend)
    tensors, options = (problem.q, problem.k_cache, problem.v_cache), problem.options | {"kv_indices": tensor(2, 3, 1, 4)}
    refused(lambda: fwd_kvcache(*tensors, **options), ValueError, "leftpad_k: got a tensor", "None beside kv_indices")
    packed = Cached(((3, 20, 0), (1, 9, 0)), packed=True).problem(backend)
    more, options_of_packed = (packed.q, packed.k_cache, packed.v_cache), packed.options | {"kv_indices": tensor(2, 3, 1, 4)}
    expected = "kv_indices: got shape (2, 3, 1, 4)", "(total_q, heads, topk), since cu_seqlens_q is given"
    refused(lambda: fwd_kvcache(*more, **options_of_packed), ValueError, *expected)


@on("cpu-fp16", "sim")
def test_a_scale_without_dimensions(backend):
    """One scale for all heads is a tensor of one element, or of none of the dimensions, also where each KV head has its own lists."""
    q = torch.randn(1, 1, 2, 64).half()
    k, v = (torch.randn(1, 16, 2, 64).to(torch.float8_e4m3fn) for _ in range(2))
    lists_of_heads = torch.zeros(1, 1, 2, 1, dtype=torch.int32)
    backend.simulate()
    scales = (torch.tensor(0.5), torch.tensor([0.5]))
    one, other = (fwd_kvcache(q, k, v, kv_indices=lists_of_heads, k_descale=s, v_descale=s)[0] for s in scales)
    assert torch.equal(one, other)
