"""`volta_fa::indexer_logits` and volta_fa.indexer: the indexer of DeepSeek sparse attention, whose logits select each query's tokens.

logit[query, key] = sum over heads of weight[query, head] * relu(q[query, head] . k[key]) * scale[key]. Keys are fp8 codes (e4m3) of 128
columns with one fp32 scale, in one tensor, or in pages where all codes of a page precede its scales ("block-major": 132 bytes per token). A
query sees the keys from k_start to k_end. A backend is the CPU, the simulator (`sim`) or a GPU (`cuda`), with a dtype of queries. It
repeats calls in `_runs`, the simulator in two warp orders. `gpu` simulates a V100 and a T4 in turn."""

import dataclasses
import math
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from torch.library import opcheck

from conftest import ALL, BF16_KERNELS, agreed, assert_same_bits, on, on_cases, reads_no_value  # agreed: the first of equal results
from test_validation import refused  # refused(call, exception, *words of its message)
from volta_fa import flash_mla, indexer

indexer_logits = torch.ops.volta_fa.indexer_logits
# of int32
INT_MIN, INT_MAX = -(2**31), 2**31 - 1


@dataclass(frozen=True)
class Case:
    """A problem. `columns`: logits per query. `page_size` 0: keys in one tensor. `fp8`: queries in e4m3. `causal`: k_end per sequence.
    `hostile`: some invalid lengths and pages. `clean`: logits without a key are -inf, else undefined. `magnitude`: of queries."""

    heads: int
    batch: int
    seqlen_q: int
    columns: int
    page_size: int = 0
    fp8: bool = False
    causal: bool = False
    hostile: bool = False
    clean: bool = True
    magnitude: float = 1.0

    def __str__(self):
        flags = "+".join(name for name in ("fp8", "causal", "hostile", "clean") if getattr(self, name))
        return f"h{self.heads}-b{self.batch}-{self.seqlen_q}x{self.columns}-p{self.page_size}-{flags}-{self.magnitude:g}"


@dataclass
class Problem:
    """The operator's tensors and options, and what `exact` computes the expected logits of."""

    q: Tensor
    k: Tensor
    weights: Tensor
    k_end: Tensor
    options: dict
    codes: Tensor  # (batch, columns, 128) fp64
    scales: Tensor  # (batch, columns) fp64
    seen: Tensor  # (batch, seqlen_q, columns) bool: which keys each query sees

    def run(self) -> Tensor:
        """Returns logits, (batch, seqlen_q, columns) fp32."""
        return indexer_logits(self.q, self.k, self.weights, self.k_end, **self.options)


def block_major(codes: Tensor, scales: Tensor, generator) -> Tensor:
    """Returns pages as vLLM writes them, (pages, page_size, 1, 132) bytes, from codes (pages, page_size, 128) and scales (pages,
    page_size)."""
    pages, page_size, _ = codes.shape
    # pages are further apart than their bytes, and what lies between them is noise
    memory = torch.randint(0, 256, (pages, page_size * 132 + 16 + -page_size * 132 % 16), dtype=torch.uint8, generator=generator)
    for page in range(pages):
        for token in range(page_size):
            memory[page, token * 128 : token * 128 + 128] = codes[page, token].view(torch.uint8)
            place = page_size * 128 + token * 4
            memory[page, place : place + 4] = scales[page, token].view(1).view(torch.uint8)
    return memory[:, : page_size * 132].unflatten(1, (page_size, 1, 132))


def spoiled(numbers: Tensor, case: Case, values, g: torch.Generator) -> Tensor:
    """Returns the numbers, in a hostile case with 30% of them replaced by these values."""
    if not case.hostile:
        return numbers
    replaced = torch.rand(numbers.shape, generator=g) < 0.3
    return numbers.where(~replaced, torch.tensor(values)[torch.randint(0, len(values), numbers.shape, generator=g)])


def draw_keys(case: Case, g: torch.Generator, device) -> tuple[Tensor, dict, Tensor, Tensor, Tensor]:
    """Returns k and its options; and (batch, columns): codes and scales in fp64, and whether there is a key. Pages are in random order."""
    columns, options = torch.arange(case.columns), {}
    if case.page_size:
        room = -(-case.columns // case.page_size)  # pages of a sequence
        pages = case.batch * room + 3
        rows, shape = pages * case.page_size, (pages, case.page_size)
        table = torch.randperm(pages, generator=g)[: case.batch * room].view(case.batch, room)
        table = spoiled(table, case, [-1, INT_MIN, INT_MAX, pages], g)
        page = table[:, columns // case.page_size]
        exists = (page >= 0) & (page < pages)
        place = page.where(exists, 0) * case.page_size + columns % case.page_size
        options = {"block_table": table.int().to(device), "max_seqlen_k": case.columns}
    else:
        rows, shape = case.columns, (case.columns,)
        place = columns.expand(case.batch, -1)
        exists = torch.ones(case.batch, case.columns, dtype=torch.bool)
    x = torch.randn(rows, 128, generator=g) * torch.exp2(torch.randint(-3, 4, (rows, 1), generator=g))
    scales = x.abs().amax(-1) / 448  # e4m3's largest number
    codes = (x / scales.unsqueeze(-1)).to(torch.float8_e4m3fn)
    if not case.page_size:
        options["k_scales"] = scales.to(device)
    k = block_major(codes.view(*shape, 128), scales.view(shape), g) if case.page_size else codes
    return k.to(device), options, codes.double()[place], scales.double()[place], exists


def draw(backend, case: Case) -> Problem:
    """Returns random tensors of a case."""
    g, device = torch.Generator().manual_seed(backend.seed), backend.device
    batch, seqlen_q, columns = case.batch, case.seqlen_q, case.columns

    def ints(low, high, *sizes):
        lengths = torch.randint(low, high, sizes, generator=g)
        return spoiled(lengths, case, [INT_MIN, INT_MAX, -1, columns + 1, INT_MIN + 3], g).int()

    q = torch.randn(batch, seqlen_q, case.heads, 128, generator=g) * case.magnitude
    q = q.to(torch.float8_e4m3fn if case.fp8 else backend.dtype)
    weights = torch.randn(batch, seqlen_q, case.heads, generator=g) / case.magnitude
    k, options, codes, scales, exists = draw_keys(case, g, device)
    if case.causal:  # query i of n sees the keys before k_end - (n - 1 - i)
        k_end, start = ints(0, columns + 1, batch), torch.zeros(batch, seqlen_q, dtype=torch.long)
        end = k_end.long().clamp(min=0).unsqueeze(1) - (seqlen_q - 1 - torch.arange(seqlen_q))
    else:
        k_end, k_start = ints(columns // 2, columns + 1, batch, seqlen_q), ints(0, columns // 2 + 1, batch, seqlen_q)
        end, start = k_end.long(), k_start.long()
        options["k_start"] = k_start.to(device)
    position = torch.arange(columns)
    seen = (position >= start.unsqueeze(-1)) & (position < end.unsqueeze(-1)) & exists.unsqueeze(1)
    options["clean_logits"] = case.clean
    return Problem(q.to(device), k, weights.to(device), k_end.to(device), options, codes, scales, seen)


def exact(problem: Problem) -> tuple[Tensor, Tensor]:
    """Returns logits in fp64, -inf without a key, and the sum of their terms' largest magnitudes, which bounds rounding errors."""
    q, weights = problem.q.cpu().to(torch.float32).double(), problem.weights.cpu().double()
    if problem.q.dtype == torch.float64:
        q = problem.q.cpu()
    scores = torch.einsum("bqhd,bkd->bqhk", q, problem.codes)
    scales = problem.scales.unsqueeze(1)
    logits = torch.einsum("bqhk,bqh->bqk", scores.clamp(min=0), weights) * scales
    size = torch.einsum("bqh,bqh,bk->bqk", q.norm(dim=-1), weights.abs(), problem.codes.norm(dim=-1)) * scales
    return logits.masked_fill(~problem.seen, -math.inf), size


def check(problem: Problem, found: Tensor):
    """Compares logits with `exact`."""
    logits, (expected, size) = found.cpu().double(), exact(problem)
    assert found.dtype == torch.float32 and found.shape == expected.shape
    if problem.options["clean_logits"]:
        assert torch.equal(logits == -math.inf, ~problem.seen)
    # products are exact; fp32 sums of 128 and then of the heads' are not
    error = (logits - expected).abs().masked_fill(~problem.seen, 0)
    tolerance = 1e-6 * size
    assert (error <= tolerance).all(), (error / tolerance.clamp(min=1e-30)).max()


def run(backend, problem: Problem) -> Tensor:
    """Returns logits, bitwise identical in all runs. Without clean_logits those of hidden keys are undefined, so they become 0."""
    like = problem.q if problem.q.element_size() > 1 else problem.weights
    found = [problem.run() for _ in backend._runs(like)]
    if not problem.options["clean_logits"]:
        found = [logits.masked_fill(~problem.seen.to(logits.device), 0) for logits in found]
    return agreed([(logits,) for logits in found], "logits")[0]


CASES = [
    Case(64, 1, 9, 200),
    Case(64, 1, 1, 77, page_size=64, fp8=True, causal=True),
    Case(64, 3, 1, 300, page_size=64, causal=True),
    Case(64, 2, 3, 130, page_size=32, fp8=True, hostile=True),
    Case(32, 2, 9, 150, page_size=16, fp8=True),
    Case(32, 3, 2, 70, page_size=4, causal=True, hostile=True),
    Case(40, 2, 5, 65, page_size=128, fp8=True, causal=True, hostile=True),
    Case(64, 2, 6, 129, fp8=True, hostile=True),
    Case(3, 1, 10, 64, hostile=True),
    Case(64, 2, 4, 190, page_size=64, hostile=True, clean=False),
    Case(1, 1, 1, 1),
]
MAGNITUDES = [Case(64, 1, 3, 70, magnitude=2.0**exponent) for exponent in (-60, -20, 20, 60)]


@on_cases((ALL + BF16_KERNELS, CASES), (["cpu-bf16", "sim-bf16", "cuda-bf16"], MAGNITUDES))
def test_against_fp64(gpu, backend, case):
    problem = draw(backend, case)
    check(problem, run(backend, problem))


@on("sim", "cuda")
def test_more_tiles_than_threads(backend):
    """A thread of the schedule has several tiles, and some have no keys."""
    problem = draw(backend, Case(2, 700, 1, 40, page_size=16, causal=True, fp8=True))
    problem.k_end[5:400] = 0
    problem.seen[5:400] = False
    check(problem, run(backend, problem))


@on("sim", "cuda")
def test_a_logit_depends_on_its_query_and_key_alone(gpu, backend):
    """Queries of a prompt have large tiles, and one alone has a small one: the bits are the same."""
    problem = draw(backend, Case(64, 1, 8, 300, page_size=64, fp8=True))
    together = run(backend, problem)
    for i in range(8):
        own = slice(i, i + 1)
        alone = dataclasses.replace(problem, **{name: getattr(problem, name)[:, own] for name in ("q", "weights", "k_end", "seen")})
        alone.options = {**problem.options, "k_start": problem.options["k_start"][:, own]}
        assert_same_bits("logits", run(backend, alone), together[:, own])


# ---- errors that other implementations had -------------------------------------------------------------------------------


@on("cuda")  # the simulator copies 2 GiB several times
def test_keys_beyond_2_gib(backend):
    """Only the last keys of 2^24 and more are read, and only their logits are written."""
    count, first = 2**24 + 256, 2**24 - 64
    keys = torch.empty(count, 128, dtype=torch.uint8, device=backend.device)
    keys[first:] = torch.randint(0, 120, (count - first, 128), device=backend.device).to(torch.uint8)
    q, weights = backend.randn(1, 1, 64, 128), backend.randn(1, 1, 64).float()
    ends = {"k_start": backend.ints([first]).view(1, 1), "k_scales": torch.ones(count, device=backend.device), "clean_logits": False}
    logits = indexer_logits(q, keys, weights, backend.ints([count]).view(1, 1), **ends)[0, 0, first:]
    scores = q[0, 0].double() @ keys[first:].view(torch.float8_e4m3fn).double().T
    expected = (scores.clamp(min=0) * weights[0, 0].double().unsqueeze(1)).sum(0)
    assert (logits - expected).abs().max() <= 1e-5 * expected.abs().max()  # fp32 sums of 128 columns and 64 heads


@on("cpu-fp32", "sim", "cuda")
@pytest.mark.parametrize("page_size", [0, 16])
def test_tokens_that_no_query_sees_may_hold_nan(gpu, backend, page_size):
    """NaN in their codes and scales changes no bit of the result."""
    problem = draw(backend, Case(64, 2, 3, 100, page_size=page_size, fp8=True))
    problem.options["k_start"].fill_(30)
    problem.k_end.copy_(torch.tensor([[31, 70, 50], [60, 1, 90]]))
    problem.seen = (torch.arange(100) >= 30) & (torch.arange(100) < problem.k_end.cpu().unsqueeze(-1))
    expected = run(backend, problem)
    check(problem, expected)
    if page_size:
        used = torch.zeros(problem.k.shape[0], page_size, dtype=torch.bool)
        table = problem.options["block_table"].cpu().long()
        for entry, end in ((0, 70), (1, 90)):
            position = torch.arange(30, end)
            used[table[entry, position // page_size], position % page_size] = True
        memory = problem.k.cpu().clone()
        pages = memory.flatten(1)
        codes = pages[:, : page_size * 128].unflatten(1, (page_size, 128))
        codes[~used] = 255  # NaN, as are four of them as a scale
        pages[:, page_size * 128 :].unflatten(1, (page_size, 4))[~used] = 255
        problem.k = memory.to(backend.device)
    else:
        unused = (torch.arange(100) < 30) | (torch.arange(100) >= 90)
        problem.k.view(torch.uint8)[unused.to(backend.device)] = 255
        problem.options["k_scales"][unused.to(backend.device)] = math.nan
    assert_same_bits("logits", run(backend, problem), expected)


@on("cpu-fp32", "sim", "cuda")
def test_a_code_of_nan(gpu, backend):
    """A NaN in a key or in its scale makes its logits NaN, and one in a query that query's: no others."""
    problem = draw(backend, Case(64, 1, 3, 90))
    problem.options["k_start"].zero_()
    problem.k_end.fill_(90)
    problem.k.view(torch.uint8)[7, 100] = 0x7F
    problem.options["k_scales"][9] = math.nan
    problem.q[0, 1, 63, 5] = math.nan
    is_nan = run(backend, problem).isnan().cpu()
    expected = torch.zeros(1, 3, 90, dtype=torch.bool)
    expected[:, :, [7, 9]] = expected[:, 1] = True
    assert torch.equal(is_nan, expected)


@on("cpu-fp32", "sim", "cuda")
@pytest.mark.parametrize("which", ["q", "k", "k_scales", "weights", "numbers", "pages off 16 bytes", "no keys", "no pages", "no queries"])
def test_layouts(backend, which):
    """Strided tensors, start and end per query ("numbers") with strides, pages that do not begin at 16 bytes, and empty tensors."""
    paged = which in ("pages off 16 bytes", "no pages")
    problem = draw(backend, Case(64, 2, 3, 70, page_size=16 if paged else 0))
    if which == "q":
        problem.q = torch.cat([problem.q, problem.q], -1)[..., 4 : 4 + 128]
        problem.q.copy_(draw(backend, Case(64, 2, 3, 70)).q)
    elif which == "k":
        problem.k = torch.cat([problem.k.view(torch.uint8)] * 2, -1).view(torch.float8_e4m3fn)[:, :128]
    elif which == "k_scales":
        problem.options["k_scales"] = torch.stack([problem.options["k_scales"]] * 2, -1)[:, 0]
    elif which == "weights":
        problem.weights = problem.weights.transpose(0, 1).contiguous().transpose(0, 1)
    elif which == "numbers":
        problem.k_end = problem.k_end.t().contiguous().t()
        problem.options["k_start"] = problem.options["k_start"][:, :1].expand(-1, 3)
        start = problem.options["k_start"].cpu().unsqueeze(-1)
        problem.seen = (torch.arange(70) >= start) & (torch.arange(70) < problem.k_end.cpu().unsqueeze(-1))
    elif which == "pages off 16 bytes":
        pages = problem.k.shape[0]
        # a page has 16 tokens of 132 bytes, and 16 bytes of padding
        wide = torch.zeros(pages * 2128 + 4, dtype=torch.uint8, device=backend.device)
        moved = wide[4:].as_strided((pages, 16, 1, 132), (2128, 132, 132, 1), 4)
        moved.copy_(problem.k)
        problem.k = moved
    elif which == "no keys":
        problem.k, problem.options["k_scales"] = problem.k[:0], problem.options["k_scales"][:0]
        problem.codes, problem.scales, problem.seen = problem.codes[:, :0], problem.scales[:, :0], problem.seen[..., :0]
    elif which == "no pages":
        problem.k, problem.seen = problem.k[:0], torch.zeros_like(problem.seen)
    elif which == "no queries":
        assert indexer_logits(problem.q[:, :0], problem.k, problem.weights[:, :0], problem.k_end[:, :0],
                              k_scales=problem.options["k_scales"]).shape == (2, 0, 70)  # fmt: skip
        return
    check(problem, run(backend, problem))


@on("cpu-fp32", "sim", "cuda")
def test_a_table_of_fewer_tokens_than_columns(gpu, backend):
    """Keys past the end of the block table do not exist, whatever k_end is."""
    problem = draw(backend, Case(64, 2, 2, 100, page_size=16, causal=True))
    problem.k_end.fill_(99)
    problem.options["block_table"] = problem.options["block_table"][:, :3]
    problem.seen = (torch.arange(100) < torch.tensor([98, 99]).unsqueeze(-1)) & (torch.arange(100) < 48)
    problem.seen = problem.seen.expand(2, -1, -1)
    check(problem, run(backend, problem))


@on("cpu-fp32", "sim")
def test_nothing_is_read_on_the_host(backend):
    """Neither the operator nor `topk_indices` reads a value, which a CUDA graph forbids."""
    problem = draw(backend, CASES[3])
    backend.simulate()

    def choose():
        indexer.topk_indices(problem.run().flatten(0, 1), 20, block_table=problem.options["block_table"], page_size=32)

    reads_no_value(choose, "volta_fa::indexer_logits")


@on("cpu-fp32", "sim", "cuda")
@pytest.mark.parametrize("case", [CASES[0], CASES[2]], ids=str)
def test_opcheck(backend, case):
    problem = draw(backend, case)
    backend.simulate()
    # opcheck itself cannot compare fp8
    opcheck(indexer_logits.default, (problem.q, problem.k.view(torch.uint8), problem.weights, problem.k_end), problem.options)


@on("cpu-fp32", "cuda")
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled(backend, dynamic):
    problem = draw(backend, CASES[3])
    compiled = torch.compile(
        lambda q, k, weights, k_end, columns: indexer_logits(q, k, weights, k_end, **{**problem.options, "max_seqlen_k": columns}),
        backend="aot_eager", fullgraph=True, dynamic=dynamic,
    )  # fmt: skip
    for columns in (130, 100):
        expected = indexer_logits(problem.q, problem.k, problem.weights, problem.k_end, **{**problem.options, "max_seqlen_k": columns})
        assert torch.equal(compiled(problem.q, problem.k, problem.weights, problem.k_end, columns), expected)


# ---- DeepGEMM's functions ------------------------------------------------------------------------------------------------


@on("cpu-fp32", "sim", "cuda")
@pytest.mark.parametrize("fp8", [True, False])
def test_prompts_as_deep_gemm(backend, fp8):
    problem = draw(backend, Case(64, 1, 7, 120, fp8=fp8))
    backend.simulate()
    keys, bounds = (problem.k, problem.options["k_scales"]), (problem.options["k_start"][0], problem.k_end[0])
    logits = indexer.fp8_mqa_logits(problem.q[0], keys, problem.weights[0], *bounds)
    assert logits.shape == (7, 120)
    check(problem, logits.unsqueeze(0))


@on("cpu-fp32", "sim", "cuda")
@pytest.mark.parametrize("of_queries", [True, False])
def test_decoding_as_deep_gemm(backend, of_queries):
    """fp8_paged_mqa_logits takes one length per sequence, or one per query."""
    problem = draw(backend, Case(32, 3, 2, 200, page_size=64, causal=not of_queries, fp8=True))
    if of_queries:
        problem.seen = torch.arange(200) < problem.k_end.cpu().unsqueeze(-1)
    metadata = indexer.get_paged_mqa_logits_metadata(problem.k_end, 64, 80)  # tokens of a page, SMs
    backend.simulate()
    more = problem.options["block_table"], metadata, 200, True  # the last two: max_model_len, clean_logits
    logits = indexer.fp8_paged_mqa_logits(problem.q, problem.k, problem.weights.flatten(0, 1), problem.k_end, *more)
    assert logits.shape == (6, 200)
    check(problem, logits.unflatten(0, (3, 2)))


@on("cpu-fp32", "sim", "cuda")
def test_top_tokens(backend):
    """The tokens of the largest logits, in a cache of latents with the same pages, and -1 where there are fewer."""
    problem = draw(backend, Case(64, 2, 2, 150, page_size=64, causal=True))
    problem.k_end[:] = torch.tensor([140, 9])
    backend.simulate()
    logits = problem.run().flatten(0, 1)
    chosen = indexer.topk_indices(logits, 20)
    in_pages = indexer.topk_indices(logits, 20, block_table=problem.options["block_table"])
    table = problem.options["block_table"]
    assert chosen.dtype == in_pages.dtype == torch.int32 and chosen.shape == in_pages.shape == (4, 20)
    for row in range(4):
        order = logits[row].argsort(descending=True)[: min(20, int((logits[row] > -math.inf).sum()))]
        assert set(chosen[row].tolist()) - {-1} == set(order.tolist()), row
        assert (chosen[row] >= 0).sum() == len(order)
        expected = {int(table[row // 2, i // 64]) * 64 + i % 64 for i in order.tolist()}
        assert set(in_pages[row].tolist()) - {-1} == expected, row
    assert indexer.topk_indices(logits, 200).shape == (4, 200)
    if backend.name == "cpu-fp32":  # sparse attention accepts these indices
        q, latents = torch.ones(2, 2, 16, 576), torch.ones(9, 64, 1, 576)
        out, _ = flash_mla.flash_mla_with_kvcache(q, latents, None, None, 512, indices=in_pages.unflatten(0, (2, 2)))
        assert (out == 1).all()


#: Right arguments with keys in one tensor (ROWS) and in pages; then wrong ones by name: what replaces them, and words of the error.
INTS = torch.zeros(2, 3, dtype=torch.int32)
ROWS = {
    "q": torch.zeros(2, 3, 4, 128), "k": torch.zeros(70, 128).to(torch.float8_e4m3fn), "weights": torch.zeros(2, 3, 4),
    "k_end": INTS, "k_scales": torch.ones(70),
}  # fmt: skip
TABLE = torch.zeros(2, 5, dtype=torch.int32)
PAGES = {**ROWS, "k": torch.zeros(9, 16, 1, 132, dtype=torch.uint8), "k_scales": None, "block_table": TABLE, "max_seqlen_k": 60}
WRONG = {
    "q rank": ({"q": torch.zeros(3, 4, 128)}, "q: got a tensor of rank 3", "(batch, seqlen_q, nheads, 128)"),
    "q dtype": ({"q": ROWS["q"].int()}, "q: got dtype torch.int32", "torch.float8_e4m3fn"),
    "headdim": ({"q": torch.zeros(2, 3, 4, 64)}, "q: got headdim 64, expected 128"),
    "heads": ({"q": torch.zeros(2, 3, 65, 128)}, "q: got nheads 65, expected 1 to 64"),
    "no heads": ({"q": torch.zeros(2, 3, 0, 128)}, "q: got nheads 0, expected 1 to 64"),
    "weights": ({"weights": torch.zeros(2, 3, 5)}, "weights: got shape (2, 3, 5)", "here (2, 3, 4)"),
    "weights dtype": ({"weights": torch.zeros(2, 3, 4).half()}, "weights: got dtype torch.float16, expected torch.float32"),
    "weights layout": ({"weights": torch.zeros(2, 3, 8)[..., ::2]}, "weights: got stride 2 in the last dimension"),
    "k_end": ({"k_end": INTS[:, :2]}, "k_end: got shape (2, 2)", "(batch, seqlen_q) or (batch,), here (2, 3)"),
    "k_end dtype": ({"k_end": INTS.long()}, "k_end: got dtype torch.int64, expected torch.int32"),
    "k_end of sequences": ({"k_end": torch.zeros(3, dtype=torch.int32)}, "k_end: got shape (3)", "here (2)"),
    "k_start": ({"k_start": torch.zeros(2, dtype=torch.int32)}, "k_start: got shape (2)", "(batch, seqlen_q), here (2, 3)"),
    "k a number": ({"k": torch.tensor(1.0)}, "k: got a tensor of rank 0", "(total_k, 128)"),
    "k rank": ({"k": torch.zeros(9, 16, 132)}, "k: got a tensor of rank 3", "(pages, page_size, 1, 132)"),
    "device": ({"k": ROWS["k"].to("meta")}, "k: got device meta"),
}
WRONG_ROWS = {
    "k dtype": ({"k": torch.zeros(70, 128)}, "k: got dtype torch.float32, expected torch.float8_e4m3fn, or torch.uint8"),
    "k columns": ({"k": ROWS["k"][:, :64]}, "k: got shape (70, 64)", "(total_k, 128)"),
    "no scales": ({"k_scales": None}, "k_scales: got None, expected float32 (total_k,)"),
    "scales": ({"k_scales": torch.ones(71)}, "k_scales: got shape (71)", "(70,)"),
    "scales dtype": ({"k_scales": torch.ones(70).half()}, "k_scales: got dtype torch.float16"),
    "table": ({"block_table": TABLE}, "block_table: got a value, expected None"),
    "columns": ({"max_seqlen_k": 9}, "max_seqlen_k: got a value, expected None"),
}
WRONG_PAGES = {
    "cache dtype": ({"k": PAGES["k"].int()}, "k: got dtype torch.int32, expected torch.float8_e4m3fn, or torch.uint8"),
    "bytes": ({"k": torch.zeros(9, 16, 1, 128, dtype=torch.uint8)}, "k: got shape (9, 16, 1, 128)", "132"),
    "tokens apart": ({"k": torch.zeros(9, 16, 1, 144, dtype=torch.uint8)[..., :132]}, "k: got stride 144 between tokens", "132"),
    "page size": ({"k": torch.zeros(9, 48, 1, 132, dtype=torch.uint8)}, "k: got page_size 48, expected a power of two, at least 4"),
    "small pages": ({"k": torch.zeros(9, 2, 1, 132, dtype=torch.uint8)}, "k: got page_size 2"),
    "pages apart": (
        {"k": torch.zeros(9, 16 * 132 + 8, dtype=torch.uint8)[:, : 16 * 132].unflatten(1, (16, 1, 132))}, "stride 2120 between pages", "16"
    ),
    "scales": ({"k_scales": torch.ones(144)}, "k_scales: got a tensor, expected None"),
    "no table": ({"block_table": None}, "block_table: got None, expected int32 (batch, max_pages)"),
    "table dtype": ({"block_table": TABLE.long()}, "block_table: got dtype torch.int64"),
    "table shape": ({"block_table": TABLE[:1]}, "block_table: got shape (1, 5)", "here (2, 5)"),
    "no columns": ({"max_seqlen_k": None}, "max_seqlen_k: got None"),
    "negative columns": ({"max_seqlen_k": -1}, "max_seqlen_k: got -1, expected 0 to"),
}  # fmt: skip


@pytest.mark.parametrize("good,name", [
    *((good, name) for good in ("rows", "pages") for name in WRONG), *(("rows", name) for name in WRONG_ROWS),
    *(("pages", name) for name in WRONG_PAGES),
])  # fmt: skip
def test_wrong_arguments(good, name):
    arguments = {"rows": ROWS, "pages": PAGES}[good]
    wrong, *words = {**WRONG, **{"rows": WRONG_ROWS, "pages": WRONG_PAGES}[good]}[name]
    indexer_logits(**arguments)
    refused(lambda: indexer_logits(**{**arguments, **wrong}), ValueError, "volta_fa::indexer_logits", *words)


def test_wrong_arguments_of_deep_gemm():
    rows = {
        "q": torch.zeros(3, 4, 128), "kv": (ROWS["k"], ROWS["k_scales"]), "weights": torch.zeros(3, 4), "cu_seq_len_k_start": INTS[0],
        "cu_seq_len_k_end": INTS[0],
    }  # fmt: skip
    indexer.fp8_mqa_logits(**rows)
    pages = {
        "q": torch.zeros(2, 3, 4, 128), "kv_cache": PAGES["k"], "weights": torch.zeros(6, 4), "context_lens": INTS[:, 0],
        "block_table": TABLE, "schedule_metadata": None, "max_model_len": 60,
    }  # fmt: skip
    indexer.fp8_paged_mqa_logits(**pages)
    for function, good, wrong, error, message in (
        (indexer.fp8_mqa_logits, rows, {"q": torch.zeros(1, 3, 4, 128)}, ValueError, r"q: got shape \(1, 3, 4, 128\)"),
        (indexer.fp8_mqa_logits, rows, {"weights": torch.zeros(1, 3, 4)}, ValueError, r"weights: got shape \(1, 3, 4\)"),
        (indexer.fp8_mqa_logits, rows, {"cu_seq_len_k_end": INTS}, ValueError, r"cu_seq_len_k_end: got shape \(2, 3\)"),
        (indexer.fp8_mqa_logits, rows, {"kv": ROWS["k"]}, ValueError, "kv: got Tensor, expected a tuple of two tensors"),
        (indexer.fp8_mqa_logits, rows, {"kv": (ROWS["k"], None)}, ValueError, r"kv: got \['Tensor', 'NoneType'\], expected"),
        (indexer.fp8_mqa_logits, rows, {"max_seqlen_k": 7}, NotImplementedError, "max_seqlen_k: got 7, expected 0"),
        (indexer.fp8_paged_mqa_logits, pages, {"q": torch.zeros(6, 4, 128)}, ValueError, r"q: got shape \(6, 4, 128\)"),
        (indexer.fp8_paged_mqa_logits, pages, {"weights": torch.zeros(2, 3, 4)}, ValueError, "weights: got shape"),
        (indexer.fp8_paged_mqa_logits, pages, {"block_table": None}, ValueError, "block_table: got None"),
        (indexer.fp8_paged_mqa_logits, pages, {"indices": INTS}, NotImplementedError, "indices: got a tensor"),
    ):
        with pytest.raises(error, match=message):
            function(**{**good, **wrong})


def test_wrong_arguments_of_top_tokens():
    good = {"logits": torch.zeros(2, 10), "topk": 3, "block_table": torch.tensor([[4, 2]]).int(), "page_size": 5}
    assert (indexer.topk_indices(**good) >= 10).all()
    assert indexer.topk_indices(**{**good, "topk": 0}).shape == (2, 0)
    for wrong, message in (
        ({"topk": -1}, "topk: got -1, expected an int of 0 or more"),
        ({"topk": 2.0}, "topk: got 2.0"),
        ({"page_size": 0}, "page_size: got 0, expected an int of 1 or more"),
        ({"logits": torch.zeros(10)}, r"logits: got shape \(10,\), expected \(rows, columns\)"),
        ({"block_table": INTS[0]}, r"block_table: got shape \(3,\)"),
        ({"logits": torch.zeros(3, 10), "block_table": INTS}, "block_table: got batch 2, expected one that divides the rows of logits, 3"),
        ({"block_table": INTS[:0]}, "block_table: got batch 0"),
    ):
        with pytest.raises(ValueError, match=f"volta_fa.indexer: {message}"):
            indexer.topk_indices(**{**good, **wrong})


@pytest.mark.parametrize("pages", [[[4, -1]], [[4]], [[4], [4]]], ids=str)
def test_top_tokens_of_columns_without_a_page(pages):
    """A column past the table's pages, or of a negative page, is no token, although its logit is finite."""
    logits = torch.full((2, 10), -math.inf)
    logits[1, 7], logits[0, 1] = 0.5, 1.0
    table = torch.tensor(pages).int()
    assert indexer.topk_indices(logits, 3, block_table=table, page_size=5).tolist() == [[21, -1, -1], [-1, -1, -1]]
    assert indexer.topk_indices(logits, 3, block_table=table[:, :0], page_size=5).tolist() == [[-1] * 3] * 2
