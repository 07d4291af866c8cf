"""`volta_fa::fwd_kvcache`: attention over a KV cache, dense or in pages, to which the call may append k and v in place.

cached.py has problems (`Cached`) and `check`, which compares results and the cache with fp64. A problem has (queries, cached
tokens, appended tokens) of each sequence, and fields by name. page: tokens of a page (default 16); 0: a dense cache. layout: "nhd"
(default) has tokens before heads, "hnd" heads first, "kv" pages of K, then V; "wide" is a slice of a larger tensor. leftpad: padding
tokens. alibi: dimensions of the slopes (b, h). sinks: dtype ("own": q's). nheads is 2, nheads_k 1, is_causal True by default. batch_idx:
cache_batch_idx is given. own_new: cu_seqlens_k_new is given. all_cached: cache_seqlens is not. rotary: the pairs of columns that are
rotated. spread: standard deviation of q, k and v.

`on(...)` lists a test's backends: the CPU, the simulator (`sim`) or a GPU (`cuda`), with a dtype. `backend.kernels`: it is not the CPU.
`backend.simulate()`: the simulator, if it is the backend, runs later calls. `force` makes the planner avoid kernels. INFO describes the
library. test_kvcache_quantized.py tests quantized caches. WRONG, DENSE and PACKED list invalid arguments with their errors."""

import functools
import math

import pytest
import torch

from cached import Cached, check, check_opcheck, run  # run: out, lse, the caches and options after the call
from conftest import ALL, BF16_KERNELS, INFO, agreed, assert_same_bits, captured, on, on_cases, poison_cuda
from test_validation import refused  # refused(call, exception, *words of its message)
from volta_fa.check.cache_cases import NO_PAGE  # page numbers that no cache has: -1 and the largest and smallest int32

fwd_kvcache = torch.ops.volta_fa.fwd_kvcache


# (queries, cached tokens, appended tokens) of each sequence
ONE = tuple((1, n, 0) for n in (0, 1, 15, 16, 17, 40))
APPEND = tuple((1, n, 1) for n in (0, 1, 15, 16, 17, 40))
CHUNKS = ((5, 0, 5), (1, 31, 1), (3, 14, 3), (0, 7, 0), (33, 16, 33), (8, 60, 8))
EVEN = ((3, 20, 0), (3, 0, 0), (3, 47, 0), (3, 2, 0))

READ = [
    Cached(ONE),
    Cached(ONE, page=0),
    Cached(ONE, page=48, nheads=6, nheads_k=1, headdim=128),
    Cached(ONE, page=256, nheads=4, nheads_k=4, headdim=32, is_causal=False),
    Cached(EVEN, layout="hnd", nheads=4, nheads_k=2),
    Cached(EVEN, layout="kv", nheads=4, nheads_k=2, page=32),
    Cached(EVEN, layout="wide", nheads=4, nheads_k=2),
    Cached(EVEN, layout="wide", page=0, headdim=40, headdim_v=72),
    Cached(EVEN, headdim=256, headdim_v=64),
    Cached(EVEN, headdim=64, headdim_v=256, is_causal=False),
    Cached(EVEN, packed=True, nheads=8, nheads_k=1),
    Cached(EVEN, window_left=5, is_causal=True),
    Cached(EVEN, window_left=4, window_right=1, is_causal=False),
    Cached(EVEN, softcap=3.0, spread=2.0),
    Cached(EVEN, alibi="h", nheads=3),
    Cached(EVEN, alibi="bh", page=0),
    Cached(EVEN, sinks="own", nheads=3, nheads_k=3),
    Cached(EVEN, sinks="fp32", window_left=6, softcap=4.0, alibi="h"),
    Cached(EVEN, softmax_scale=-0.2),
    Cached(EVEN, num_splits=3),
    Cached(EVEN, page=0, leftpad=(3, 0, 40, 2)),
    Cached(EVEN, page=0, leftpad=(0, 0, 17, 1), batch_idx=True, window_left=9, alibi="h"),
    Cached(EVEN, page=0, batch_idx=True),
    Cached(((2, 32, 0), (2, 32, 0)), all_cached=True),
    Cached(((2, 19, 0), (2, 19, 0)), all_cached=True, page=0, layout="hnd"),
    Cached(((70, 90, 0), (1, 300, 0), (0, 5, 0), (2, 129, 0)), packed=True, nheads=4, nheads_k=2),
    # around a page's end, in every layout but nhd; the second line has as many rows as the forward kernels' tiles take
    *(Cached(tuple((1, n, 0) for n in (0, 1, 47, 48, 49)), page=48, layout=layout) for layout in ("hnd", "kv", "wide")),
    *(Cached(tuple((40, n, 0) for n in (0, 1, 47, 48, 49, 95)), page=48, layout=layout) for layout in ("hnd", "kv", "wide")),
]
APPENDED = [
    Cached(APPEND),
    Cached(APPEND, page=0, batch_idx=True),
    Cached(APPEND, packed=True, headdim=128, nheads=6, nheads_k=2),
    Cached(CHUNKS, packed=True, nheads=4, nheads_k=2),
    Cached(CHUNKS, packed=True, page=64, layout="kv", window_left=20),
    Cached(CHUNKS, packed=True, page=0, layout="hnd", batch_idx=True),
    Cached(((2, 9, 4), (3, 0, 17), (1, 30, 0)), packed=True, own_new=True),
    Cached(((2, 9, 5), (2, 0, 5), (2, 59, 5)), layout="wide", headdim=40, headdim_v=24),
    Cached(((4, 9, 2), (4, 0, 2)), is_causal=False),
    Cached(((3, 9, 3), (3, 0, 3), (3, 61, 3)), rotary="half"),
    Cached(((3, 9, 3), (3, 0, 3), (3, 61, 3)), rotary="interleaved", headdim=128, nheads=6, nheads_k=2),
    Cached(((3, 9, 3), (3, 16, 3)), rotary="half", rotary_dim=32, is_causal=False, headdim=96),
    Cached(((3, 9, 3), (3, 16, 3)), rotary="interleaved", rotary_dim=16, window_left=7, rotary_dtype="fp32"),
    Cached(CHUNKS, packed=True, rotary="half", rotary_dtype="fp32"),
    Cached(((3, 9, 3), (3, 16, 3)), page=0, rotary="interleaved", leftpad=(2, 11)),
    Cached(((1, 9, 1), (1, 16, 1)), sinks="own", alibi="h", softcap=5.0, window_left=10, rotary="half"),
]
#: Headdims that are no multiple of 8: the op gathers these caches before kernels read them.
GATHERED = [
    Cached(APPEND, headdim=20, headdim_v=12, nheads=4, nheads_k=2),
    Cached(CHUNKS, packed=True, headdim=36, rotary="half", rotary_dim=12, sinks="own"),
    Cached(EVEN, headdim=12, layout="kv", window_left=5, page=32),
]


@on_cases((ALL, READ + APPENDED + GATHERED), (BF16_KERNELS, READ[::6] + APPENDED[::5]))
def test_against_fp64(backend, case):
    check(backend, case)


@on("cpu-fp32", "sim", "cuda")
def test_pages_that_a_window_left_behind(backend):
    """Servers reuse pages before a sequence's window, so their table entries may be invalid, and kernels must not read them."""
    case = Cached(((1, 100, 0), (1, 48, 1), (4, 80, 0)), packed=True, own_new=True, window_left=20)
    problem = case.problem(backend)
    expected = run(backend, problem)
    table = problem.options["block_table"]
    for b, (seqlen_q, cached, new) in enumerate(case.lengths):
        for page in range((cached + new - seqlen_q - 20) // case.page):
            table[b, page] = NO_PAGE[page % len(NO_PAGE)]
    agreed([expected, run(backend, problem)], "out", "softmax_lse")


@on("cpu-fp32", "sim", "cuda")
def test_nothing_to_do(backend):
    """Sizes of 0 in every dimension that may be 0. Without queries, a call still appends."""
    backend.simulate()
    cache = backend.randn(3, 16, 2, 8)
    lengths, table = backend.ints([3, 0]), backend.ints([2, 0]).view(2, 1)
    for shape in [(2, 0, 4, 8), (0, 1, 4, 8)]:
        batch = shape[0]
        out, lse = fwd_kvcache(backend.randn(*shape), cache, cache, cache_seqlens=lengths[:batch], block_table=table[:batch])
        assert out.shape == shape and lse.shape == (shape[0], 4, shape[1])
    k_cache, v_cache = cache.clone(), cache.clone()
    k, v = backend.randn(2, 1, 2, 8), backend.randn(2, 1, 2, 8)
    fwd_kvcache(backend.randn(2, 0, 4, 8), k_cache, v_cache, k, v, cache_seqlens=lengths, block_table=table)
    assert torch.equal(k_cache[2, 3], k[0, 0]) and torch.equal(v_cache[0, 0], v[1, 0])
    # no heads
    q, new, no_heads = (backend.randn(2, tokens, 0, 8) for tokens in (1, 1, 16))
    out, lse = fwd_kvcache(q, no_heads, no_heads.clone(), new, new.clone(), cache_seqlens=lengths * 0)
    assert out.shape == q.shape and lse.shape == (2, 0, 1)
    # no key at all
    for sinks in (None, backend.randn(4)):
        none = cache[:0], cache[:0]
        out, lse = fwd_kvcache(backend.randn(2, 1, 4, 8), *none, cache_seqlens=lengths * 0, block_table=table[:, :0], sinks=sinks)
        expected = torch.full_like(lse[..., 0], math.inf) if sinks is None else sinks.float().expand(2, 4)
        assert (out == 0).all() and torch.equal(lse[..., 0], expected)


# ---- PyTorch's contract ----------------------------------------------------------------------------------------------

CONTRACT = [
    Cached(((2, 9, 0), (2, 17, 0)), headdim=16),
    Cached(((2, 9, 0), (0, 3, 0), (3, 0, 0)), headdim=16, packed=True, alibi="h", sinks="fp32"),
    Cached(((2, 9, 2), (2, 17, 2)), headdim=16, rotary="half"),
    Cached(((2, 9, 2), (2, 17, 2)), headdim=16, page=0, batch_idx=True, leftpad=(1, 2)),
    Cached(((2, 9, 2), (0, 3, 0), (3, 0, 3)), headdim=16, packed=True, layout="hnd"),
]


@pytest.mark.parametrize("case", CONTRACT, ids=str)
@on("cpu-fp32", "cpu-bf16", "sim", "cuda")
def test_opcheck(backend, case):
    check_opcheck(backend, case.problem(backend))


class Decoder(torch.nn.Module):
    """Decodes token by token over one cache, then all queries at once. Each call reads what earlier calls appended."""

    def forward(self, q, k_cache, v_cache, k, v, cache_seqlens, block_table):
        outs, options = [], {"block_table": block_table, "is_causal": True}
        for step in range(q.shape[1]):
            q1, k1, v1 = (t[:, step : step + 1] for t in (q, k, v))
            outs.append(fwd_kvcache(q1, k_cache, v_cache, k1, v1, cache_seqlens=cache_seqlens + step, **options)[0])
        both, _ = fwd_kvcache(q, k_cache, v_cache, cache_seqlens=cache_seqlens + q.shape[1], **options)
        return torch.cat(outs, 1), both, k_cache.sum()


def steps(backend):
    """Returns a function that returns Decoder's arguments, with a new copy of the cache each time."""
    problem = Cached(((3, 15, 3), (3, 0, 3), (3, 31, 3)), headdim=16).problem(backend)
    options = problem.options
    caches = problem.k_cache.nan_to_num(0.0), problem.v_cache.nan_to_num(0.0)
    return lambda: (problem.q, *(t.clone() for t in caches), *problem.new, options["cache_seqlens"], options["block_table"])


@pytest.mark.parametrize("compiler", ["eager", "aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@on("cpu-fp32", "sim", "cuda")
def test_compile(backend, compiler):
    """Compiled programs keep the in-place writes to the cache, in their order and for the caller."""
    backend.simulate()
    arguments = steps(backend)
    eager, compiled = arguments(), arguments()
    expected = Decoder()(*eager)
    torch._dynamo.reset()
    found = torch.compile(Decoder(), backend=compiler, fullgraph=True)(*compiled)
    torch.testing.assert_close((*found, *compiled), (*expected, *eager))
    if not backend.kernels:  # these round differently for one query and for three
        torch.testing.assert_close(found[0], found[1])


@on("cpu-fp32")
def test_functionalization(backend):
    """Exported and made functional: no operator of the graph writes into its arguments, and the caches come back as results."""
    arguments = steps(backend)
    eager, functional = arguments(), arguments()
    expected = Decoder()(*eager)
    program = torch.export.export(Decoder(), functional).run_decompositions({})
    assert not any(node.target is fwd_kvcache.append for node in program.graph.nodes)
    torch.testing.assert_close((*program.module()(*functional), *functional), (*expected, *eager))


@pytest.mark.parametrize("compiler", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@on("cpu-fp32")
def test_dynamic_shapes(backend, compiler):
    compiled = torch.compile(fwd_kvcache.default, dynamic=True, fullgraph=True, backend=compiler)
    torch._dynamo.reset()
    for lengths in (((2, 9, 0), (2, 17, 0)), ((3, 40, 0), (3, 1, 0), (3, 5, 0))):
        problem = Cached(lengths, headdim=16).problem(backend)
        arguments = (problem.q, problem.k_cache, problem.v_cache)
        torch.testing.assert_close(compiled(*arguments, **problem.options), fwd_kvcache(*arguments, **problem.options))


@on("cpu-fp32")
def test_no_gradient(backend):
    problem = Cached(((2, 9, 0), (2, 17, 0)), headdim=16).problem(backend)
    out, _ = fwd_kvcache(problem.q.requires_grad_(), problem.k_cache, problem.v_cache, **problem.options)
    with pytest.raises(RuntimeError, match="fwd_kvcache"):
        out.sum().backward()


@on("cpu-fp32", "sim", "cuda")
def test_autograd_sees_what_is_appended(backend):
    """Each call that appends counts one version of the caches, whether a gradient is needed or not. Other calls count none."""
    backend.simulate()
    q, k_cache, v_cache, k, v, cache_seqlens, block_table = steps(backend)()
    lengths = {"cache_seqlens": cache_seqlens, "block_table": block_table}
    before = k_cache._version, v_cache._version
    fwd_kvcache(q, k_cache, v_cache, **lengths)
    assert (k_cache._version, v_cache._version) == before
    for calls, query in enumerate((q, q.clone().requires_grad_()), start=1):
        fwd_kvcache(query, k_cache, v_cache, k, v, **lengths)
        assert (k_cache._version, v_cache._version) == (before[0] + calls, before[1] + calls)


@on("cpu-fp32", "cpu-bf16")
def test_autocast(backend):
    """Autocast casts q, k and v to the cache's dtype, because the cache is updated in place."""
    problem = Cached(((2, 9, 2), (2, 17, 2)), headdim=16).problem(backend)
    caches = problem.copy_of_cache()
    expected = fwd_kvcache(problem.q, *problem.copy_of_cache(), *problem.new, **problem.options)
    others = (problem.q.float(), *(t.float() for t in problem.new))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = fwd_kvcache(others[0], *caches, *others[1:], **problem.options)
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("rotary", [False, True])
@on("cuda")
def test_cuda_graph(backend, rotary):
    """One graph of append and attention serves any lengths, pages and tokens: replays read the tensors' current values."""
    batch, max_pages = 3, 20
    q, k, v = backend.randn(batch, 2, 8, 128), backend.randn(batch, 2, 2, 128), backend.randn(batch, 2, 2, 128)
    caches = [backend.randn(64, 16, 2, 128) for _ in range(2)]
    lengths, table = backend.ints([90, 17, 300]), torch.arange(batch * max_pages, device="cuda", dtype=torch.int32).view(batch, max_pages)
    options = {"cache_seqlens": lengths, "block_table": table, "is_causal": True}
    if rotary:
        options |= {"rotary_cos": backend.randn(max_pages * 16, 64), "rotary_sin": backend.randn(max_pages * 16, 64)}
    graph, found = captured(lambda: fwd_kvcache(q, *caches, k, v, **options))
    for values in ((0, 0, 0), (300, 1, 15), (16, 310, 0)):
        lengths.copy_(backend.ints(values))
        for t in (q, k, v):
            t.copy_(backend.randn(*t.shape))
        table.copy_(torch.randperm(64, device="cuda")[: table.numel()].view_as(table))
        eager = [cache.clone() for cache in caches]
        expected = fwd_kvcache(q, *eager, k, v, **options)
        graph.replay()
        agreed([(*expected, *eager), (*found, *caches)])


@on("sim", "cuda")
def test_many_calls_in_a_row(backend):
    """What a call leaves in scratch memory does not affect calls of other shapes."""
    backend.simulate()
    problems = [
        Cached(((1, 200, 0), (1, 3, 0)), nheads=4, nheads_k=2).problem(backend),
        Cached(((2, 33, 2), (2, 0, 2), (2, 90, 2)), headdim=128).problem(backend),
    ]
    calls = [(p.q, *p.copy_of_cache(), *p.new) for p in problems]
    expected = [fwd_kvcache(*c, **p.options) for c, p in zip(calls, problems)]
    for i in range(1000 if backend.machine == "cuda" else 10):
        found = fwd_kvcache(*calls[i % 2], **problems[i % 2].options)
        if i % 100 < 2:
            agreed([expected[i % 2], found])


def good(backend, page=16):
    """Returns the arguments of a valid call that appends two rotated tokens to each of two sequences."""
    case = Cached(((2, 9, 2), (2, 17, 2)), nheads=6, nheads_k=3, headdim=32, headdim_v=16, page=page, rotary="half")
    problem = case.problem(backend)
    tensors = (problem.q, problem.k_cache, problem.v_cache, *problem.new)
    return dict(zip(("q", "k_cache", "v_cache", "k", "v"), tensors, strict=True)) | problem.options


def call(arguments):
    """Returns a function that calls the operator with these arguments."""
    arguments = dict(arguments)
    tensors = [arguments.pop(name) for name in ("q", "k_cache", "v_cache", "k", "v")]
    return lambda: fwd_kvcache(*(t for t in tensors if t is not None), **arguments)


ROTARY = ("rotary_cos", "rotary_sin")
NO_NEW = {"k": None, "v": None, "rotary_cos": None, "rotary_sin": None}
CU = torch.tensor([0, 2, 4], dtype=torch.int32)
#: Wrong arguments by name: a function of `good`'s arguments that returns what replaces them, and words of the error.
WRONG = {
    "q rank": (lambda a: {"q": a["q"][0]}, ["q: got a tensor of rank 3", "cu_seqlens_q"]),
    "packed q rank": (lambda a: {"cu_seqlens_q": CU, "max_seqlen_q": 2}, ["q: got a tensor of rank 4", "rank 3", "cu_seqlens_q is given"]),
    "int q": (lambda a: {"q": a["q"].int()}, ["q: got dtype torch.int32"]),
    "q device": (lambda a: {"k_cache": a["k_cache"].to("meta")}, ["k_cache: got device meta"]),
    "q stride": (lambda a: {"q": a["q"].mT.contiguous().mT}, ["q: got stride", "contiguous last dimension"]),
    "q headdim": (lambda a: {"q": a["q"][..., :24]}, ["k_cache: got headdim 32, expected headdim 24, that of q"]),
    "q heads": (lambda a: {"q": a["q"][:, :, :5]}, ["q: got nheads 5", "multiple of nheads_k 3"]),
    "k_cache rank": (lambda a: {"k_cache": a["k_cache"][0]}, ["k_cache: got a tensor of rank 3", "(pages, page_size, nheads_k, headdim)"]),
    "k_cache dtype": (lambda a: {"k_cache": a["k_cache"].double().to(torch.bfloat16)}, ["k_cache: got dtype torch.bfloat16"]),
    "v_cache dtype": (lambda a: {"v_cache": a["v_cache"].to(torch.bfloat16)}, ["v_cache: got dtype torch.bfloat16"]),
    "v_cache pages": (lambda a: {"v_cache": a["v_cache"][1:]}, ["v_cache: got shape", "as k_cache"]),
    "v_cache heads": (lambda a: {"v_cache": a["v_cache"][:, :, 1:]}, ["v_cache: got shape", "as k_cache"]),
    "cache stride": (lambda a: {"k_cache": a["k_cache"].mT.contiguous().mT}, ["k_cache: got stride"]),
    "page size": (lambda a: {n: a[n][:, :12] for n in ("k_cache", "v_cache")}, ["k_cache: got pages of 12 tokens", "multiple of 16"]),
    "table dtype": (lambda a: {"block_table": a["block_table"].long()}, ["block_table: got dtype torch.int64", "torch.int32"]),
    "table rank": (lambda a: {"block_table": a["block_table"][0]}, ["block_table: got shape", "(batch, max_pages)"]),
    "table batch": (lambda a: {"block_table": a["block_table"][:1]}, ["block_table: got shape", "(batch, max_pages)"]),
    "table stride": (lambda a: {"block_table": a["block_table"].mT.contiguous().mT}, ["block_table: got stride"]),
    "table device": (lambda a: {"block_table": a["block_table"].to("meta")}, ["block_table: got device meta"]),
    "lengths dtype": (lambda a: {"cache_seqlens": a["cache_seqlens"].long()}, ["cache_seqlens: got dtype torch.int64"]),
    "lengths shape": (lambda a: {"cache_seqlens": a["cache_seqlens"][:1]}, ["cache_seqlens: got shape (1)", "(batch,)"]),
    "no lengths": (lambda a: {"cache_seqlens": None}, ["cache_seqlens: got None", "k and v are appended"]),
    "leftpad": (lambda a: {"leftpad_k": a["cache_seqlens"]}, ["leftpad_k: got a tensor", "block_table is given"]),
    "batch_idx": (lambda a: {"cache_batch_idx": a["cache_seqlens"]}, ["cache_batch_idx: got a tensor", "block_table is given"]),
    "max_seqlen_q": (lambda a: {"max_seqlen_q": 3}, ["max_seqlen_q: got 3", "cu_seqlens_q is not given"]),
    "k batch": (lambda a: {"k": a["k"][:1], "v": a["v"][:1]}, ["k: got batch 1", "batch 2"]),
    "k heads": (lambda a: {"k": a["k"][:, :, :1], "v": a["v"][:, :, :1]}, ["k: got nheads 1", "nheads 3, that of k_cache"]),
    "k headdim": (lambda a: {"k": a["k"][..., :8]}, ["k: got headdim 8", "headdim 32, that of k_cache"]),
    "k dtype": (lambda a: {"k": a["k"].to(torch.bfloat16)}, ["k: got dtype torch.bfloat16"]),
    "k rank": (lambda a: {"k": a["k"][0]}, ["k: got a tensor of rank 3"]),
    "v seqlen": (lambda a: {"v": a["v"][:, :1]}, ["v: got shape", "that of k"]),
    "v headdim": (lambda a: {"v": a["v"][..., :8]}, ["v: got headdim 8", "headdim 16, that of v_cache"]),
    "packed k rank": (lambda a: {"cu_seqlens_k_new": CU}, ["k: got a tensor of rank 4", "cu_seqlens_k_new is given"]),
    "nothing new": (lambda a: NO_NEW | {"cu_seqlens_k_new": CU}, ["cu_seqlens_k_new: got a tensor", "no k and v"]),
    "rotary without k": (lambda a: {"k": None, "v": None}, ["rotary_cos: got a tensor", "no k and v"]),
    "cos alone": (lambda a: {"rotary_sin": None}, ["rotary_sin: got None", "rotary_cos is given"]),
    "sin alone": (lambda a: {"rotary_cos": None}, ["rotary_cos: got None", "rotary_sin is given"]),
    "rotary width": (lambda a: {n: a[n].repeat(1, 2) for n in ROTARY}, ["rotary_cos: got shape (700, 32)", "at most headdim 32"]),
    "rotary rank": (lambda a: {"rotary_cos": a["rotary_cos"][0]}, ["rotary_cos: got shape (16)"]),
    "rotary shapes": (lambda a: {"rotary_sin": a["rotary_sin"][:9]}, ["rotary_sin: got shape (9, 16)", "that of rotary_cos"]),
    "rotary dtype": (lambda a: {"rotary_cos": a["rotary_cos"].int()}, ["rotary_cos: got dtype torch.int32"]),
    "alibi dtype": (lambda a: {"alibi_slopes": torch.ones(6, dtype=torch.float64)}, ["alibi_slopes: got dtype torch.float64"]),
    "alibi shape": (lambda a: {"alibi_slopes": torch.ones(5)}, ["alibi_slopes: got shape (5)", "(6,) or (2, 6)"]),
    "sinks shape": (lambda a: {"sinks": torch.ones(5)}, ["sinks: got shape (5)", "(6,)"]),
    "scale": (lambda a: {"softmax_scale": math.inf}, ["softmax_scale: got inf"]),
    "softcap": (lambda a: {"softcap": -1.0}, ["softcap: got -1"]),
    "window": (lambda a: {"window_left": -2}, ["window_left: got -2"]),
    "causal window": (lambda a: {"window_right": 2}, ["window_right: got 2 together with is_causal"]),
    "num_splits": (lambda a: {"num_splits": -1}, ["num_splits: got -1"]),
    # values
    "negative length": (lambda a: {"cache_seqlens": ints(a, 9, -1)}, ["cache_seqlens: got -1 (sequence 1)", "from 0 to"]),
    "long length": (lambda a: {"cache_seqlens": ints(a, 9, 64)}, ["cache_seqlens: got 64 (sequence 1)", "2 more fit into 64"]),
    "page": (lambda a: {"block_table": spoiled(a["block_table"], 1, 1, 99)}, ["block_table: got 99 (page 1 of sequence 1)", "of k_cache"]),
    "negative page": (lambda a: {"block_table": spoiled(a["block_table"], 0, 0, -1)}, ["block_table: got -1 (page 0 of sequence 0)"]),
    "rotary length": (lambda a: {n: a[n][:18] for n in ROTARY}, ["rotary_cos: got 18 positions", "at least 19"]),
}  # fmt: skip
DENSE = {
    "batch": (lambda a: {n: a[n][:1] for n in ("k_cache", "v_cache")}, ["k_cache: got batch 1", "cache_batch_idx"]),
    "k_cache rank": (lambda a: {"k_cache": a["k_cache"][0]}, ["k_cache: got a tensor of rank 3", "block_table"]),
    "k seqlen": (lambda a: {n: a[n].repeat(1, 20, 1, 1) for n in ("k", "v")}, ["k: got seqlen 40", "at most 24"]),
    "batch_idx": (lambda a: {"cache_batch_idx": ints(a, 0, 2)}, ["cache_batch_idx: got 2 (sequence 1)", "the entries of k_cache"]),
    "expanded cache": (
        lambda a: {"v_cache": a["v_cache"][:1].expand_as(a["v_cache"])},
        ["v_cache: got stride 0 in dimension 0, of size 2", "the call writes it"],
    ),
    "one cache": (lambda a: {"v_cache": a["k_cache"], "v": a["k"]}, ["v_cache: got the memory of k_cache", "pass two tensors"]),
    "leftpad": (lambda a: {"leftpad_k": ints(a, 10, 2)}, ["leftpad_k: got 10 (sequence 0)", "from 0 to 9"]),
    "negative leftpad": (lambda a: {"leftpad_k": ints(a, 2, -3)}, ["leftpad_k: got -3 (sequence 1)"]),
    "long length": (lambda a: {"cache_seqlens": ints(a, 9, 23)}, ["cache_seqlens: got 23 (sequence 1)", "from 0 to 22"]),
}
PACKED = {
    "no max_seqlen_q": (lambda a: {"max_seqlen_q": None}, ["max_seqlen_q: got None"]),
    "max_seqlen_q": (lambda a: {"max_seqlen_q": -1}, ["max_seqlen_q: got -1"]),
    "short max_seqlen_q": (lambda a: {"max_seqlen_q": 1}, ["max_seqlen_q: got 1", "at least 2"]),
    "cu dtype": (lambda a: {"cu_seqlens_q": a["cu_seqlens_q"].long()}, ["cu_seqlens_q: got dtype torch.int64"]),
    "cu shape": (lambda a: {"cu_seqlens_q": a["cu_seqlens_q"][:2]}, ["block_table: got shape"]),
    "cu values": (lambda a: {"cu_seqlens_q": ints(a, 0, 3, 2)}, ["cu_seqlens_q: got 2 after 3"]),
    "cu total": (lambda a: {"cu_seqlens_q": ints(a, 0, 2, 3)}, ["cu_seqlens_q: got 3 as its last value", "4"]),
    "new total": (lambda a: {n: a[n][:3] for n in "kv"}, ["k: got total 3", "total 4", "cu_seqlens_k_new is not given"]),
    "cu new": (lambda a: {"cu_seqlens_k_new": ints(a, 1, 2, 4)}, ["cu_seqlens_k_new: got 1 as its first value"]),
    "cu new shape": (lambda a: {"cu_seqlens_k_new": ints(a, 0, 4)}, ["cu_seqlens_k_new: got shape (2)", "(batch + 1,)"]),
}


def ints(arguments, *values):
    return torch.tensor(values, dtype=torch.int32, device=arguments["q"].device)


def spoiled(table, *place_and_value):
    """Returns the table with another value at one place."""
    *place, value = place_and_value
    table = table.clone()
    table[tuple(place)] = value
    return table


#: Wrong arguments of calls with pages, with a dense cache, and of packed queries.
ALL_WRONG = [(form, name) for form, table in (("pages", WRONG), ("dense", DENSE), ("packed", PACKED)) for name in table]


@pytest.mark.parametrize("form, name", ALL_WRONG)
@on("cpu-fp32", "sim", "cuda")
def test_wrong_arguments(backend, form, name):
    """The call is refused before it writes to a cache."""
    backend.simulate("timing")  # executes kernels, so a call that is not refused changes the caches
    arguments = good(backend, page=0 if form == "dense" else 16)
    if form == "packed":
        arguments |= {n: arguments[n].flatten(0, 1) for n in ("q", "k", "v")}
        arguments |= {"cu_seqlens_q": ints(arguments, 0, 2, 4), "max_seqlen_q": 2}
    spoil, words = {"pages": WRONG, "dense": DENSE, "packed": PACKED}[form][name]
    given = {**arguments, **spoil(arguments)}
    given = {n: t.to(arguments["q"].device) if torch.is_tensor(t) and not t.is_meta else t for n, t in given.items()}
    before = [arguments[n].clone() for n in ("k_cache", "v_cache")]
    refused(call(given | {"check_lengths": True}), ValueError, "volta_fa::fwd_kvcache", *words)
    agreed([before, [arguments[n] for n in ("k_cache", "v_cache")]], "k_cache", "v_cache")


@pytest.mark.parametrize("seqlen_q, missing", [(1, "Decode"), (40, "Prefill"), (40, "Forward"), (40, "Cast")])
@on("sim")
def test_a_call_without_kernels_is_refused_before_it_appends(backend, force, seqlen_q, missing):
    """Kernels of a pass failed: those that read the cache in place, or those that read its copy (bf16 with many queries)."""
    backend.simulate("1")
    dtype = torch.float16 if missing in ("Decode", "Prefill") else torch.bfloat16
    q, k, cache = (torch.zeros(1, n, heads, 64, dtype=dtype) for n, heads in ((seqlen_q, 4), (1, 2), (64, 2)))
    k_cache, v_cache, k, lengths = cache, cache.clone(), k + 1, torch.tensor([3], dtype=torch.int32)
    force(failed=[v["name"] for v in INFO["variants"] if v["pass"] == missing])
    step = functools.partial(torch.ops.volta_fa.fwd_kvcache, q, k_cache, v_cache, k, k, cache_seqlens=lengths)
    refused(step, NotImplementedError, f"({missing})", "excluded because they failed")
    assert not k_cache.any() and not v_cache.any()


# ---- invalid values that the call does not check (VOLTA_FA_CHECK_LENGTHS=0) --------------------------------------------

#: Tokens of a page (0: a dense cache), and the arguments that are invalid.
UNCHECKED = {
    "negative length": (16, lambda a: {"cache_seqlens": ints(a, -1, 17)}),
    "most negative length": (16, lambda a: {"cache_seqlens": ints(a, -(2**31), 17)}),
    "long length": (16, lambda a: {"cache_seqlens": ints(a, 2**31 - 1, 17)}),
    "append that does not fit": (16, lambda a: {"cache_seqlens": ints(a, 63, 17)}),
    "page": (16, lambda a: {"block_table": spoiled(a["block_table"], 0, 0, 2**31 - 1)}),
    "page after the last": (16, lambda a: {"block_table": spoiled(a["block_table"], 0, 0, len(a["k_cache"]))}),
    "page -1": (16, lambda a: {"block_table": spoiled(a["block_table"], 0, 0, -1)}),
    "negative page": (16, lambda a: {"block_table": spoiled(a["block_table"], 0, 0, -(2**31))}),
    "entry": (0, lambda a: {"cache_batch_idx": ints(a, 2, 1)}),
    "negative entry": (0, lambda a: {"cache_batch_idx": ints(a, -7, 1)}),
    "leftpad": (0, lambda a: {"leftpad_k": ints(a, 10, 0)}),
    "negative leftpad": (0, lambda a: {"leftpad_k": ints(a, -1, 0)}),
    "dense append that does not fit": (0, lambda a: {"cache_seqlens": ints(a, 23, 17)}),
}  # fmt: skip


@pytest.mark.parametrize("name", UNCHECKED)
@on("sim", "cuda", "sim-bf16", "cuda-bf16")
def test_unchecked_values(backend, name):
    """The invalid sequence's results are NaN, the other's right. The call writes nothing but appended tokens."""
    page, spoil = UNCHECKED[name]
    backend.simulate()
    backend.monkeypatch.setenv("VOLTA_FA_CHECK_LENGTHS", "0")
    # 1: no result depends on another sequence's length; 0: it decides where blocks split a sequence, so bits may differ
    for num_splits in (1, 0):
        arguments = good(backend, page=page) | {"num_splits": num_splits}
        caches = [{n: arguments[n].clone() for n in ("k_cache", "v_cache")} for _ in range(2)]
        expected = call({**arguments, **caches[0]})()
        if backend.machine == "cuda":
            poison_cuda(arguments["q"])  # NaN in the memory of the results
        out, lse = call({**arguments, **spoil(arguments), **caches[1]})()
        assert out[0].isnan().all() and lse[0].isnan().all()
        for name, result, right in (("out", out, expected[0]), ("softmax_lse", lse, expected[1])):
            if num_splits == 1:
                assert_same_bits(name, result[1], right[1])
            else:
                torch.testing.assert_close(result[1], right[1], rtol=0.01, atol=0.01)
        # of the invalid sequence nothing was written, or only where a valid call writes
        for n in caches[0]:
            before, right, found = arguments[n], caches[0][n], caches[1][n]
            same = lambda x, y: (x == y) | (x.isnan() & y.isnan())  # noqa: E731
            assert (same(found, before) | same(found, right)).all(), n
