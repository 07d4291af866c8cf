"""Tests of volta_fa::fwd_sparse_mla: multi-head latent attention in which each query sees only the tokens that `indices` lists.

A latent is one token's row: its key and (the first 512 columns) its value, for all heads. Caches are in the dtype of q or in FlashMLA's fp8
formats, whose last 64 columns ("positions": the rotated ones) are bf16 or fp16. A call may read a second cache (`extra_cache`).

`draw` makes a problem of a Case, `run` calls the operator several times with bitwise identical results, and `check` compares with `exact`,
in fp64. A backend is the CPU, the simulator or a GPU (KERNELS, `backend.kernels`: the latter two), with a dtype of queries. It repeats
calls in `_runs`, the simulator in two warp orders. `refused` checks an error's words."""

import itertools
import math
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor
from torch.library import opcheck

from conftest import ALL, BF16_KERNELS, KERNELS, agreed, captured, on, on_cases, reads_no_value  # agreed: the first of equal results
from test_validation import refused
from volta_fa import flash_mla

sparse_mla = torch.ops.volta_fa.fwd_sparse_mla


@dataclass(frozen=True)
class Case:
    """A problem."""

    fp8: bool  # whether caches are in FlashMLA's format of this headdim, else in the dtype of q
    headdim: int
    heads: int
    queries: int
    caches: tuple[tuple[int, int, int], ...]  # (indices per query, tokens of a page, pages) of one or two caches
    lengths: bool = False  # whether each query counts only the first of its indices (topk_length)
    sinks: bool = False
    magnitude: float = 1.0  # of latents; queries have its inverse
    fp16_positions: bool = False
    scale: float | None = None  # softmax_scale

    def __str__(self):
        caches = "+".join("x".join(map(str, c)) for c in self.caches)
        flags = "".join(name[0] for name in ("lengths", "sinks", "fp16_positions") if getattr(self, name))
        kind = "fp8" if self.fp8 else "rows"
        return f"{kind}-{self.headdim}-h{self.heads}-q{self.queries}-{caches}-{flags}-{self.magnitude:g}-{self.scale}"


@dataclass
class Problem:
    """Tensors of a case. Lists have an element for each cache."""

    q: Tensor
    caches: list[Tensor] = field(default_factory=list)  # as the operator takes them
    indices: list[Tensor] = field(default_factory=list)  # (queries, indices per query)
    lengths: list[Tensor | None] = field(default_factory=list)  # how many of these each query counts
    numbers: list[Tensor] = field(default_factory=list)  # the caches' tokens in fp64, (tokens, headdim)
    sinks: Tensor | None = None

    def options(self, case: Case) -> dict:
        """Returns the operator's keyword arguments."""
        options = {"topk_length": self.lengths[0], "sinks": self.sinks, "softmax_scale": case.scale}
        if len(self.caches) > 1:
            options |= {"extra_cache": self.caches[1], "extra_indices": self.indices[1], "extra_topk_length": self.lengths[1]}
        return {**options, "fp16_positions": case.fp16_positions}


def quantized(x: Tensor, page_size: int, positions: torch.dtype, generator) -> tuple[Tensor, Tensor]:
    """Returns a cache in FlashMLA's fp8 format and its values in fp64, from rows (tokens, headdim) in fp32.

    Headdim 576: a token has 656 bytes: 512 codes, 4 fp32 scales (of 128 codes each), 64 positions of 2 bytes. Headdim 512: 584 bytes: 448
    codes and 64 positions, and after those of the page's other tokens 7 exponents of scales (of 64 codes each) and 1 byte of padding."""
    tokens, headdim = x.shape
    columns, codes_per_scale, row = (512, 128, 656) if headdim == 576 else (448, 64, 584)
    parts = x[:, :columns].unflatten(1, (-1, codes_per_scale))
    scale = parts.abs().amax(-1) / torch.finfo(torch.float8_e4m3fn).max + 1e-30
    if headdim == 512:
        exponents = torch.frexp(scale).exponent.clamp(-126, 126)
        scale = torch.exp2(exponents.float())
        exponents = (exponents + 127).to(torch.uint8)  # as in fp32
    codes = (parts / scale.unsqueeze(-1)).to(torch.float8_e4m3fn)
    tail = x[:, columns:].to(positions)
    numbers = torch.cat([(codes.double() * scale.double().unsqueeze(-1)).flatten(1), tail.double()], 1)
    codes, tail = codes.flatten(1).view(torch.uint8), tail.view(torch.uint8)
    pages = tokens // page_size
    page_stride = -(-(page_size * row + 40) // 16) * 16  # more bytes than a page has, a multiple of 16
    padded = torch.randint(0, 256, (pages, page_stride), dtype=torch.uint8, generator=generator)
    if headdim == 576:
        parts = [torch.cat([codes, scale.view(torch.uint8), tail], 1)]
    else:
        parts = [torch.cat([codes, tail], 1), torch.cat([exponents, torch.full((tokens, 1), 255, dtype=torch.uint8)], 1)]
    padded[:, : page_size * row] = torch.cat([part.view(pages, -1) for part in parts], 1)
    cache = padded[:, : page_size * row].unflatten(1, (page_size, 1, row))
    return cache.view(torch.float8_e4m3fn), numbers


def draw(backend, case: Case) -> Problem:
    """Returns random tensors of a case. A fifth of the indices is invalid, and some repeat: such a token counts as often."""
    g = torch.Generator().manual_seed(backend.seed)
    device, dtype = backend.device, backend.dtype

    def normal(*sizes):
        return torch.randn(*sizes, generator=g)

    q = (normal(case.queries, case.heads, case.headdim) / case.magnitude).to(dtype)
    problem = Problem(q=q.to(device))
    for topk, page_size, pages in case.caches:
        count = page_size * pages
        x = normal(count, case.headdim) * case.magnitude * torch.exp2(torch.randint(-3, 4, (count, 1), generator=g))
        if case.fp8:
            cache, numbers = quantized(x, page_size, torch.float16 if case.fp16_positions else torch.bfloat16, g)
        else:
            cache = x.to(dtype).view(pages, page_size, 1, case.headdim)
            numbers = cache.double().view(count, -1)
        invalid = torch.tensor([-1, -(2**31), -123456, 2**31 - 1, count, count + 5])  # no tokens: queries ignore them
        index = torch.randint(0, count, (case.queries, topk), generator=g)
        replaced = torch.rand(case.queries, topk, generator=g) < 0.2
        index = torch.where(replaced, invalid[torch.randint(0, len(invalid), index.shape, generator=g)], index).int()
        if case.queries > 2:  # one query without a token
            index[1] = -1
        lengths = torch.randint(-2, topk + 4, (case.queries,), generator=g).int() if case.lengths else None
        problem.caches.append(cache.to(device))
        problem.indices.append(index.to(device))
        problem.lengths.append(None if lengths is None else lengths.to(device))
        problem.numbers.append(numbers)
    if case.sinks:
        sinks = normal(case.heads)
        sinks[::5], sinks[1::5] = -math.inf, math.inf
        problem.sinks = sinks.to(device)
    return problem


def exact(problem: Problem, case: Case) -> list[Tensor]:
    """Returns out, softmax_lse and max_logits in fp64, and two bounds for rounding errors of each row: of values, the largest root mean
    square weighted by the probabilities; of scores, |q| * max |k| * |scale|."""
    scale = case.headdim**-0.5 if case.scale is None else case.scale
    results = []
    for query, q in enumerate(problem.q.cpu().double()):
        chosen = []
        for index, lengths, numbers in zip(problem.indices, problem.lengths, problem.numbers):
            own = index[query].cpu()
            own = own if lengths is None else own[: max(int(lengths[query]), 0)]
            chosen.append(numbers[own[(own >= 0) & (own < len(numbers))].long()])
        keys = torch.cat(chosen)
        if not len(keys):
            inf, ones = q.new_full((case.heads,), math.inf), q.new_ones(case.heads)
            results.append((q.new_zeros(case.heads, 512), inf, -inf, ones, ones))
            continue
        scores = q @ keys.T * scale
        lse = scores.logsumexp(1)
        p = (scores - lse.unsqueeze(1)).exp()
        if problem.sinks is not None:
            p /= 1 + (problem.sinks.cpu().double() - lse).exp().unsqueeze(1)
        magnitude = (p @ keys[:, :512].square()).sqrt().amax(1)
        products = q.norm(dim=1) * keys.norm(dim=1).max() * abs(scale)
        results.append((p @ keys[:, :512], lse, scores.amax(1), magnitude, products))
    return [torch.stack(x) for x in zip(*results)]


def check(backend, case: Case, found: tuple[Tensor, Tensor, Tensor], problem: Problem):
    """Compares out, softmax_lse and max_logits (the largest score of each row) with `exact`."""
    out, lse, max_logits = (t.cpu().double() for t in found)
    expected, expected_lse, expected_max, magnitude, products = exact(problem, case)
    assert out.shape == expected.shape and lse.shape == (case.heads, case.queries) == max_logits.shape
    assert found[0].dtype == problem.q.dtype
    rounding = {torch.float64: 2e-7, torch.float32: 2e-6, torch.float16: 2**-11, torch.bfloat16: 2**-8}[problem.q.dtype]
    # relative errors: kernels round queries, keys and probabilities to fp16, the CPU backend to fp32
    of_scores, of_values = (1e-4, 2e-3) if backend.kernels else (3e-7, 3e-6)
    score_error = of_scores * (1 + products)  # of a score, so nearly the relative error of its probability; twice, with softmax_lse's
    tolerance = rounding * expected.abs() + (of_values + 2 * score_error).unsqueeze(-1) * magnitude.unsqueeze(-1)
    assert ((out - expected).abs() <= tolerance).all(), ((out - expected).abs() / tolerance).max()
    for name, x, y in (("softmax_lse", lse, expected_lse.T), ("max_logits", max_logits, expected_max.T)):
        error = torch.where(x == y, 0, (x - y).abs())
        assert (error <= score_error.T).all(), f"{name}: {error.max()}, {(error / score_error.T).max()} of what is allowed"


def call(case: Case, problem: Problem):
    """Returns out, softmax_lse and max_logits of one call."""
    return sparse_mla(problem.q, problem.caches[0], problem.indices[0], **problem.options(case))


def run(backend, case: Case, problem: Problem):
    """Returns the same of several runs, which must be bitwise identical."""
    return agreed([call(case, problem) for _ in backend._runs(problem.q)], "out", "softmax_lse", "max_logits")


#: fp8, headdim, heads, queries, caches, options.
CASES = [
    Case(True, 576, 16, 3, ((40, 64, 3),)),
    Case(True, 576, 128, 3, ((65, 2, 100),), lengths=True, sinks=True),
    Case(True, 576, 5, 4, ((33, 69, 2), (17, 61, 2)), lengths=True, sinks=True),
    Case(True, 512, 64, 3, ((40, 64, 3),)),
    Case(True, 512, 40, 4, ((128, 64, 3), (50, 2, 64)), lengths=True, sinks=True),
    Case(True, 512, 8, 4, ((1, 256, 1), (7, 53, 2)), sinks=True, scale=-0.03),
    Case(False, 576, 128, 3, ((70, 200, 1),), sinks=True),
    Case(False, 512, 33, 3, ((70, 100, 2), (16, 7, 9)), lengths=True, sinks=True),
    Case(False, 576, 16, 1, ((1, 1, 1),)),
]
FP16_POSITIONS = [Case(True, 576, 16, 3, ((40, 64, 3),), fp16_positions=True), Case(True, 512, 16, 3, ((9, 3, 7),), fp16_positions=True)]
#: Long lists, so that several blocks share a query's tokens and combine partial results.
SHARED = [
    Case(True, 576, 128, 2, ((1500, 64, 40),), sinks=True),
    Case(True, 512, 16, 2, ((600, 64, 12), (900, 2, 600)), lengths=True, sinks=True),
    Case(False, 576, 20, 3, ((900, 1000, 1),)),
]
#: Of latents, within bf16's range and far beyond fp16's.
MAGNITUDES = [
    Case(fp8, headdim, 16, 3, ((40, 64, 3),), sinks=True, magnitude=2.0**exponent)
    for fp8, headdim in ((True, 576), (True, 512), (False, 576), (False, 512))
    for exponent in (-36, -20, 20, 30)
]


@on_cases(
    (ALL + BF16_KERNELS, CASES + FP16_POSITIONS), (KERNELS + BF16_KERNELS, SHARED), (["cpu-bf16", "sim-bf16", "cuda-bf16"], MAGNITUDES)
)
def test_against_fp64(backend, case):
    problem = draw(backend, case)
    check(backend, case, run(backend, case, problem), problem)


@pytest.mark.parametrize("rows", [32, 64])
@on_cases((KERNELS, [CASES[i] for i in (1, 4, 6, 7)]))
def test_tiles_of_many_rows(backend, case, rows, force):
    """`force` makes the planner take these tiles of query rows, which it takes by itself for more rows or tokens only."""
    kinds = itertools.product(("", "bf16_"), ("", "e4m3_"), (576, 512))
    force(
        choices=[
            {"pass": "SparseMla", "variant": f"volta_sparse_mla_{dtype}{rows_of}{headdim}x{rows}"} for dtype, rows_of, headdim in kinds
        ]
    )
    problem = draw(backend, case)
    check(backend, case, run(backend, case, problem), problem)


@on("cpu-fp32", "sim", "sim-bf16", "cuda")
@pytest.mark.parametrize("fp8", [True, False])
def test_unchosen_tokens_are_not_read(backend, fp8):
    """With NaN in all tokens that no query chose, the result is bitwise identical."""
    case = Case(fp8, 576, 16, 3, ((40, 64, 3),), lengths=True)
    problem = draw(backend, case)
    expected = run(backend, case, problem)
    index, lengths = problem.indices[0].cpu(), problem.lengths[0].cpu()
    counts = torch.arange(40) < lengths.unsqueeze(1)
    unchosen = torch.ones(3, 64, dtype=torch.bool)  # pages and their tokens
    unchosen.view(-1)[index[counts & (index >= 0) & (index < 192)].long()] = False
    cache = problem.caches[0].view(torch.uint8) if fp8 else problem.caches[0]
    cache[unchosen.to(backend.device)] = 255 if fp8 else math.nan
    assert all(map(torch.equal, run(backend, case, problem), expected))


@on("cpu-fp32", "sim", "sim-bf16", "cuda")
@pytest.mark.parametrize("headdim", [576, 512])
def test_a_code_of_nan(backend, headdim):
    """A NaN (code 0x7F) in a chosen token makes this query's rows NaN, and no other query's."""
    case = Case(True, headdim, 16, 2, ((20, 64, 2),))
    problem = draw(backend, case)
    problem.indices[0][0] = torch.arange(20)
    problem.indices[0][1] = torch.arange(20) + 40
    problem.caches[0].view(torch.uint8)[0, 3].flatten()[5] = 0x7F
    out, lse, _ = run(backend, case, problem)
    assert out[0].isnan().all() and lse[:, 0].isnan().all()
    assert not out[1].isnan().any() and not lse[:, 1].isnan().any()


@on("sim", "sim-bf16", "cuda")
def test_queries_take_several_launches(backend):
    """Scratch memory has a limit, so 70 queries with 2^18 indices each, nearly all invalid, take several launches."""
    case = Case(True, 512, 4, 70, ((3, 16, 5),), sinks=True)
    problem = draw(backend, case)
    problem.indices[0] = torch.cat([problem.indices[0], torch.full((70, 1 << 18), -1, dtype=torch.int32, device=backend.device)], 1)
    check(backend, case, run(backend, case, problem), problem)


@on("cpu-fp32", "sim", "sim-bf16", "cuda")
@pytest.mark.parametrize("which", ["q", "indices", "cache off 16 bytes", "no tokens", "no page", "no queries"])
def test_strided_misaligned_and_empty_tensors(backend, which):
    """Strided q and indices, a cache that is not aligned to 16 bytes, and tensors without tokens, pages or queries give right results."""
    case = Case(False, 576, 16, 3, ((24, 10, 9),), sinks=True)
    problem = draw(backend, case)
    if which == "q":
        problem.q = torch.cat([problem.q, problem.q], -1)[..., 4 : 4 + 576]
    elif which == "indices":
        problem.indices[0] = problem.indices[0].t().contiguous().t()
    elif which == "cache off 16 bytes":
        wide = torch.zeros(9, 10, 1, 580, dtype=problem.q.dtype, device=backend.device)
        wide[..., 3:579] = problem.caches[0]
        problem.caches[0] = wide[..., 3:579]
    elif which == "no tokens":
        problem.indices[0] = problem.indices[0][:, :0]
    elif which == "no page":
        problem.caches[0], problem.numbers[0] = problem.caches[0][:0], problem.numbers[0][:0]
    elif which == "no queries":
        case = Case(False, 576, 16, 0, ((24, 10, 9),), sinks=True)
        problem.q, problem.indices[0] = problem.q[:0], problem.indices[0][:0]
        out, lse, max_logits = run(backend, case, problem)
        assert out.shape == (0, 16, 512) and lse.shape == max_logits.shape == (16, 0)
        return
    check(backend, case, run(backend, case, problem), problem)


@on("cpu-fp32", "sim")
def test_no_value_is_read_on_the_host(backend):
    case = CASES[2]
    problem = draw(backend, case)
    backend.simulate()
    reads_no_value(lambda: call(case, problem), "volta_fa::fwd_sparse_mla")


@on("cuda")
def test_cuda_graph(backend):
    """A replay reads the indices and lengths of that moment."""
    case = Case(True, 576, 128, 4, ((200, 64, 20),), lengths=True, sinks=True)
    problem = draw(backend, case)
    graph, found = captured(lambda: call(case, problem))
    for seed in range(3):
        g = torch.Generator().manual_seed(seed)
        problem.indices[0].copy_(torch.randint(-5, 1400, problem.indices[0].shape, generator=g).int())
        problem.lengths[0].copy_(torch.randint(0, 200, (4,), generator=g).int())
        graph.replay()
        check(backend, case, found, problem)


@on("cpu-fp32", "sim", "cuda")
def test_opcheck(backend):
    case = CASES[2]
    problem = draw(backend, case)
    backend.simulate()
    cache, extra = (cache.view(torch.uint8) for cache in problem.caches)  # opcheck cannot compare fp8
    opcheck(sparse_mla.default, (problem.q, cache, problem.indices[0]), {**problem.options(case), "extra_cache": extra})


# ---- FlashMLA's functions ----------------------------------------------------------------------------------------------


@on("cpu-fp32", "cpu-bf16", "sim-bf16", "cuda-bf16")
@pytest.mark.parametrize("headdim", [576, 512])
def test_decoding_as_flash_mla(backend, headdim):
    """FlashMLA's decoding function has one length per sequence (2 sequences of 3 queries), and indices per query."""
    case = Case(True, headdim, 64, 6, ((30, 64, 3), (9, 2, 40)), lengths=True, sinks=True)
    problem = draw(backend, case)
    for n, lengths in enumerate(problem.lengths):
        problem.lengths[n] = lengths.view(2, 3)[:, :1].expand(2, 3).flatten()
    backend.simulate()
    in_sequences = [index.unflatten(0, (2, 3)) for index in problem.indices]
    of_sequences = [lengths[::3].contiguous() for lengths in problem.lengths]
    metadata, _ = flash_mla.get_mla_metadata()
    # by position, as FlashMLA's callers: ..., block_table, cache_seqlens, head_dim_v, metadata, num_splits, softmax_scale, causal,
    # is_fp8_kvcache, indices, attn_sink, extra_k_cache, extra_indices_in_kvcache, topk_length, extra_topk_length
    out, lse = flash_mla.flash_mla_with_kvcache(
        problem.q.unflatten(0, (2, 3)), problem.caches[0], None, None, 512, metadata, None, case.scale, False, True, in_sequences[0],
        problem.sinks, problem.caches[1], in_sequences[1], of_sequences[0], of_sequences[1],
    )  # fmt: skip
    assert out.shape == (2, 3, 64, 512) and lse.shape == (2, 64, 3)
    _, _, max_logits = call(case, problem)
    check(backend, case, (out.flatten(0, 1), lse.transpose(1, 2).flatten(0, 1).t(), max_logits), problem)


@on("cpu-fp32", "cpu-bf16", "sim-bf16", "cuda-bf16")
@pytest.mark.parametrize("headdim", [576, 512])
def test_prefill_as_flash_mla(backend, headdim):
    case = Case(False, headdim, 64, 5, ((50, 90, 1),), lengths=True, sinks=True, scale=0.05)
    problem = draw(backend, case)
    backend.simulate()
    out, max_logits, lse = flash_mla.flash_mla_sparse_fwd(  # q, kv, indices, sm_scale, d_v, attn_sink, topk_length
        problem.q, problem.caches[0][0], problem.indices[0].unsqueeze(1), 0.05, 512, problem.sinks, problem.lengths[0]
    )
    assert lse.shape == max_logits.shape == (5, 64)
    check(backend, case, (out, lse.t(), max_logits.t()), problem)


# ---- wrong arguments ---------------------------------------------------------------------------------------------------

Q = torch.zeros(3, 4, 576)
GOOD = {"q": Q, "cache": torch.zeros(2, 64, 1, 576), "indices": torch.zeros(3, 5, dtype=torch.int32)}
FP8 = torch.zeros(2, 64, 1, 656, dtype=torch.uint8)
INTS = torch.zeros(3, dtype=torch.int32)
#: A change of GOOD, and words of the error.
WRONG = {
    "q rank": ({"q": torch.zeros(1, 3, 4, 576)}, "q: got a tensor of rank 4", "(total_q, nheads, headdim)"),
    "headdim": ({"q": torch.zeros(3, 4, 192)}, "q: got headdim 192", "576"),
    "dtype": ({"q": Q.int()}, "q: got dtype torch.int32"),
    "cache rank": ({"cache": torch.zeros(64, 1, 576)}, "cache: got a tensor of rank 3"),
    "cache dtype": ({"cache": torch.zeros(2, 64, 1, 576, dtype=torch.float16)}, "cache: got dtype torch.float16", "torch.float32, q's"),
    "columns": ({"cache": torch.zeros(2, 64, 1, 512)}, "cache: got shape (2, 64, 1, 512)", "576"),
    "bytes": ({"cache": FP8[..., :584]}, "cache: got shape (2, 64, 1, 584)", "656"),
    "rows apart": ({"cache": torch.zeros(2, 64, 1, 700, dtype=torch.uint8)[..., :656]}, "cache: got stride 700", "656"),
    "heads": ({"cache": torch.zeros(2, 64, 2, 576)}, "cache: got shape (2, 64, 2, 576)"),
    "indices dtype": ({"indices": GOOD["indices"].long()}, "indices: got dtype torch.int64", "torch.int32"),
    "indices shape": ({"indices": GOOD["indices"][:2]}, "indices: got shape (2, 5)", "(total_q, topk)"),
    "lengths": ({"topk_length": INTS[:2]}, "topk_length: got shape (2)", "(total_q,)"),
    "lengths dtype": ({"topk_length": INTS.long()}, "topk_length: got dtype torch.int64"),
    "extra indices": ({"extra_indices": GOOD["indices"]}, "extra_cache: got None", "extra_indices"),
    "extra lengths": ({"extra_topk_length": INTS}, "extra_cache: got None", "extra_topk_length"),
    "extra cache": ({"extra_cache": GOOD["cache"]}, "extra_indices: got None"),
    "extra format": ({"extra_cache": FP8, "extra_indices": GOOD["indices"]}, "extra_cache: got fp8 elements", "the format of cache"),
    "sinks": ({"sinks": torch.zeros(3)}, "sinks: got shape (3)", "(nheads,)"),
    "sinks dtype": ({"sinks": torch.zeros(4, dtype=torch.float16)}, "sinks: got dtype torch.float16"),
    "scale": ({"softmax_scale": math.inf}, "softmax_scale: got inf"),
    "device": ({"cache": GOOD["cache"].to("meta")}, "cache: got device meta"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments(name):
    wrong, *words = WRONG[name]
    sparse_mla(**GOOD)
    refused(lambda: sparse_mla(**{**GOOD, **wrong}), ValueError, "volta_fa::fwd_sparse_mla", *words)


WRONG_OF_FLASH_MLA = {
    "causal": ({"causal": True}, "causal: got True, expected False"),
    "fp8": ({"is_fp8_kvcache": False}, "is_fp8_kvcache: got False, expected True"),
    "indices": ({"indices": torch.zeros(3, 5, dtype=torch.int32)}, r"indices: got shape \(3, 5\)"),
    "extra indices": (
        {"extra_k_cache": FP8, "extra_indices_in_kvcache": torch.zeros(3, 1, 5, dtype=torch.int32)},
        r"extra_indices_in_kvcache: got shape \(3, 1, 5\)",
    ),
    "lengths": ({"topk_length": INTS}, r"topk_length: got shape \(3,\), expected \(batch,\), here \(1,\)"),
    "rank of lengths": ({"topk_length": INTS[None, :1]}, r"topk_length: got shape \(1, 1\), expected \(batch,\)"),
    "descale": ({"descale_k": torch.ones(1)}, "descale_k: got a tensor, expected None"),
    "positions": ({"positions_dtype": torch.float32}, "positions_dtype: got torch.float32"),
}


@pytest.mark.parametrize("name", WRONG_OF_FLASH_MLA)
def test_wrong_arguments_of_flash_mla(name):
    wrong, message = WRONG_OF_FLASH_MLA[name]
    good = {
        "q": Q.unsqueeze(0), "k_cache": FP8, "block_table": None, "cache_seqlens": None, "head_dim_v": 512, "is_fp8_kvcache": True,
        "indices": torch.zeros(1, 3, 5, dtype=torch.int32),
    }  # fmt: skip
    flash_mla.flash_mla_with_kvcache(**good)
    with pytest.raises(ValueError, match=message):
        flash_mla.flash_mla_with_kvcache(**{**good, **wrong})
    prefill = {"q": Q, "kv": torch.zeros(9, 1, 576), "indices": torch.zeros(3, 1, 5, dtype=torch.int32), "sm_scale": 0.1}
    flash_mla.flash_mla_sparse_fwd(**prefill)
    for wrong, message in ({"d_v": 576}, "d_v: got 576"), ({"kv": torch.zeros(9, 576)}, r"kv: got shape \(9, 576\)"):
        with pytest.raises(ValueError, match=message):
            flash_mla.flash_mla_sparse_fwd(**{**prefill, **wrong})


def test_batch_invariance_is_refused(monkeypatch):
    monkeypatch.setenv("VOLTA_FA_BATCH_INVARIANT", "1")
    q, cache, indices = torch.zeros(1, 4, 576), torch.zeros(1, 64, 1, 576), torch.zeros(1, 8, dtype=torch.int32)
    with pytest.raises(ValueError, match="VOLTA_FA_BATCH_INVARIANT: got 1, expected 0 for fwd_sparse_mla"):
        torch.ops.volta_fa.fwd_sparse_mla(q, cache, indices)
