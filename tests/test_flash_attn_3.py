"""volta_fa's functions with FlashAttention 3's interface (integrations/flash_attn/fa3.py): signatures, results against fp64, and errors.

New against flash-attn 2 are `attention_chunk` (a query sees only keys of its own chunk of that many positions), `qv` (a second query
that is multiplied with values), `seqused_q`, and rotary in the cache function. `on(...)` lists backends: CPU (`cpu-DTYPE`), `cuda`.
`leaf(backend, *shape)` is a random tensor that requires a gradient, `close` compares with the tolerance of the backend's dtype, and
`refused` checks an error and its message."""

import math

import pytest
import torch

import reference
from conftest import on
from flash_attention import close, close_lse, leaf, refused, signature_of
from volta_fa.check.cache_cases import rotate
from volta_fa.integrations.flash_attn import fa3

BACKENDS = on("cpu-fp64", "cuda")
CPU = on("cpu-fp64")
CAUSAL = pytest.mark.parametrize("causal", [False, True], ids=["all", "causal"])
WINDOWS = [(-1, -1), (4, -1), (3, 2)]


def attention(q, k, v, chunk=0, causal=False, window_size=(-1, -1), qv=None, **options):
    """Returns out and softmax_lse of one sequence (seqlen, nheads, headdim) in fp64. As in FlashAttention 3, lse is -inf without keys."""
    if qv is not None:
        q, k = torch.cat((q, qv), -1), torch.cat((k, v), -1)
    if chunk:
        position = torch.arange(len(q), device=q.device)[:, None] + len(k) - len(q)
        options["attn_bias"] = (position // chunk == torch.arange(len(k), device=q.device) // chunk)[None, None]
    window = {"is_causal": causal, "window_left": window_size[0], "window_right": window_size[1]}
    found = reference.forward(*(t[None] for t in (q, k, v)), **window, **options)
    return found.out[0], found.softmax_lse.masked_fill(found.masked, -math.inf)[0]  # masked: rows that see no key


def check(backend, found, expected, leaves):
    """Compares results, and the leaves' gradients of a random sum of out plus the finite softmax_lse."""
    (out, lse), (want, want_lse) = found, expected
    close(backend, out, want)
    close_lse(lse, want_lse)
    weights, seen = backend.randn(*out.shape).double(), want_lse.isfinite()

    def gradients(out, lse):
        return torch.autograd.grad((out.double() * weights).sum() + lse.masked_fill(~seen, 0.0).sum(), leaves)

    for g, w in zip(gradients(out, lse), gradients(want, want_lse)):
        close(backend, g, w)


DESCALES = "q_descale=None, k_descale=None, v_descale=None, "
TRAINING = (
    f"softmax_scale=None, causal=False, qv=None, {DESCALES}window_size=(-1, -1), attention_chunk=0, softcap=0.0, num_splits=1, "
    "pack_gqa=None, deterministic=False, sm_margin=0, return_attn_probs=False)"
)
SIGNATURES = {
    "flash_attn_func": f"(q, k, v, {TRAINING}",
    "flash_attn_varlen_func": (
        "(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q=None, seqused_k=None, " + TRAINING
    ),
    "flash_attn_qkvpacked_func": (
        f"(qkv, softmax_scale=None, causal=False, {DESCALES}window_size=(-1, -1), attention_chunk=0, softcap=0.0, deterministic=False, "
        "num_heads_q=None, sm_margin=0, return_attn_probs=False)"
    ),
    "flash_attn_with_kvcache": (
        "(q, k_cache, v_cache, k=None, v=None, qv=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None, cache_batch_idx=None, "
        "cache_leftpad=None, page_table=None, cu_seqlens_q=None, cu_seqlens_k_new=None, max_seqlen_q=None, rotary_seqlens=None, "
        f"{DESCALES}softmax_scale=None, causal=False, window_size=(-1, -1), attention_chunk=0, softcap=0.0, rotary_interleaved=True, "
        "scheduler_metadata=None, num_splits=0, pack_gqa=None, sm_margin=0, return_softmax_lse=False)"
    ),
    "flash_attn_combine": "(out_partial, lse_partial, out=None, out_dtype=None)",
    "get_scheduler_metadata": (
        "(batch_size, max_seqlen_q, max_seqlen_k, num_heads_q, num_heads_kv, headdim, cache_seqlens, qkv_dtype=torch.bfloat16, "
        "headdim_v=None, cu_seqlens_q=None, cu_seqlens_k_new=None, cache_leftpad=None, page_size=None, max_seqlen_k_new=0, causal=False, "
        "window_size=(-1, -1), attention_chunk=0, has_softcap=False, num_splits=0, pack_gqa=None, sm_margin=0)"
    ),
}


@pytest.mark.parametrize("name", fa3.__all__)
def test_signatures_are_those_of_flash_attention_3(name):
    assert signature_of(getattr(fa3, name)) == SIGNATURES[name]


@CAUSAL
@pytest.mark.parametrize("window_size", WINDOWS, ids=str)
@pytest.mark.parametrize("seqlens", [(11, 11), (5, 17), (17, 6), (1, 9), (9, 1)], ids=str)
@pytest.mark.parametrize("chunk", [1, 4, 6, 100])
@BACKENDS
def test_chunks(backend, chunk, seqlens, window_size, causal):
    """Chunks count from the first key. Queries before it are in chunks without keys."""
    q, k, v = leaf(backend, 2, seqlens[0], 4, 8), leaf(backend, 2, seqlens[1], 2, 8), leaf(backend, 2, seqlens[1], 2, 16)
    options = {"causal": causal, "window_size": window_size, "softcap": 20.0}
    found = fa3.flash_attn_func(q, k, v, attention_chunk=chunk, return_attn_probs=True, **options)
    expected = [torch.stack(t) for t in zip(*(attention(q[b], k[b], v[b], chunk, **options) for b in range(2)))]
    check(backend, found, expected, (q, k, v))


@CAUSAL
@pytest.mark.parametrize("chunk", [0, 1, 5, 100])
@pytest.mark.parametrize("used", ["all", "queries", "keys", "both"])
@pytest.mark.parametrize("kind", ["self", "same lengths", "cross"])
@BACKENDS
def test_packed_chunks(backend, kind, used, chunk, causal):
    """Unused queries have out 0, softmax_lse -inf and no gradient. Unused keys have none either. "self": one tensor of cu_seqlens."""
    lengths_q, lengths_k = [7, 0, 12, 1], [7, 0, 12, 1] if kind != "cross" else [16, 3, 5, 0]
    q, k, v = leaf(backend, 20, 4, 8), leaf(backend, sum(lengths_k), 2, 8), leaf(backend, sum(lengths_k), 2, 8)
    begins_q, begins_k = (torch.tensor([0, *lengths]).cumsum(0).tolist() for lengths in (lengths_q, lengths_k))
    cu_seqlens_q = backend.ints(begins_q)
    cu_seqlens_k = cu_seqlens_q if kind == "self" else backend.ints(begins_k)
    used_q = [max(0, n - 3) for n in lengths_q] if used in ("queries", "both") else lengths_q
    used_k = [max(0, n - 2) for n in lengths_k] if used in ("keys", "both") else lengths_k
    found = fa3.flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max(lengths_q), max(lengths_k),
        None if used_q is lengths_q else backend.ints(used_q), None if used_k is lengths_k else backend.ints(used_k),
        causal=causal, attention_chunk=chunk, return_attn_probs=True,
    )  # fmt: skip
    outs, lses = [], []
    for b in range(4):
        queries, keys = (slice(begins[b], begins[b] + used[b]) for begins, used in ((begins_q, used_q), (begins_k, used_k)))
        out, lse = attention(q[queries], k[keys], v[keys], chunk, causal)
        rest = lengths_q[b] - used_q[b]
        outs += [out, out.new_zeros(rest, 4, 8)]
        lses += [lse, lse.new_full((4, rest), -math.inf)]
    check(backend, found, (torch.cat(outs), torch.cat(lses, 1)), (q, k, v))


@pytest.mark.parametrize("form", ["five", "four"])
@CPU
def test_packed_projections(backend, form):
    """q, k and v in one tensor of five dimensions, or of four: all heads of q, then of k, then of v."""
    qkv = leaf(backend, 2, 9, 3, 4, 8) if form == "five" else leaf(backend, 2, 9, 4 + 2 + 2, 8)
    q, k, v = qkv.unbind(2) if form == "five" else qkv.split([4, 2, 2], 2)
    options = {"softmax_scale": 0.3, "causal": True, "num_heads_q": None if form == "five" else 4}
    found = fa3.flash_attn_qkvpacked_func(qkv, **options, attention_chunk=4, return_attn_probs=True)
    expected = [torch.stack(t) for t in zip(*(attention(q[b], k[b], v[b], 4, True, softmax_scale=0.3) for b in range(2)))]
    check(backend, found, expected, (qkv,))


@pytest.mark.parametrize("chunk", [0, 4])
@CPU
def test_a_second_query_for_values(backend, chunk):
    """`qv`, a second query of the values' headdim, adds its product with v to the scores, also in the gradients."""
    q, k, v, qv = leaf(backend, 2, 9, 4, 8), leaf(backend, 2, 9, 2, 8), leaf(backend, 2, 9, 2, 24), leaf(backend, 2, 9, 4, 24)
    found = fa3.flash_attn_func(q, k, v, causal=True, qv=qv, attention_chunk=chunk, return_attn_probs=True)
    expected = [torch.stack(t) for t in zip(*(attention(q[b], k[b], v[b], chunk, True, qv=qv[b]) for b in range(2)))]
    check(backend, found, expected, (q, k, v, qv))


@CPU
def test_arguments_for_hoppers_kernels_are_ignored(backend):
    """Arguments for Hopper's kernels (descales without fp8, pack_gqa, sm_margin, metadata, num_splits) are ignored."""
    q, k, v = backend.randn(2, 7, 4, 8), backend.randn(2, 9, 2, 8), backend.randn(2, 9, 2, 8)
    scale = torch.full((2, 2), 3.0)
    ignored = {"q_descale": scale, "k_descale": scale, "v_descale": scale, "pack_gqa": True, "sm_margin": 5}
    assert torch.equal(fa3.flash_attn_func(q, k, v, num_splits=3, **ignored), fa3.flash_attn_func(q, k, v))
    metadata = fa3.get_scheduler_metadata(2, 7, 9, 4, 2, 8, backend.ints([9, 9]))
    found = fa3.flash_attn_with_kvcache(q, k, v, scheduler_metadata=metadata, **ignored)
    assert torch.equal(found, fa3.flash_attn_with_kvcache(q, k, v))
    assert torch.equal(found, fa3.flash_attn_func(q, k, v))


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@CPU
def test_chunks_compile(backend, dynamic):
    torch.compiler.reset()
    compiled = torch.compile(fa3.flash_attn_func, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    for seqlen in (9, 13) if dynamic else (9,):
        q, k, v = leaf(backend, 2, seqlen, 4, 8), leaf(backend, 2, 11, 2, 8), leaf(backend, 2, 11, 2, 8)
        results = [f(q, k, v, causal=True, attention_chunk=4, return_attn_probs=True) for f in (compiled, fa3.flash_attn_func)]
        check(backend, *results, (q, k, v))
    torch.compiler.reset()


def cached(q, k_cache, v_cache, lengths, chunk, leftpad=None, **options):
    """Returns `attention` of each sequence's queries over the first `lengths` keys of its cache entry, after `leftpad`."""
    leftpad = leftpad or [0] * len(q)
    return [attention(q[b], k_cache[b, leftpad[b] : n], v_cache[b, leftpad[b] : n], chunk, **options) for b, n in enumerate(lengths)]


@CAUSAL
@pytest.mark.parametrize("window_size", WINDOWS[::2], ids=str)
@pytest.mark.parametrize("layout", ["dense", "leftpad", "entries", "pages", "no lengths"])
@pytest.mark.parametrize("seqlen_q", [1, 7])
@pytest.mark.parametrize("chunk", [1, 5, 16, 2**30, 2**31 - 1])  # the last two hide no key: a chunk's end, as an int32, must not wrap
@BACKENDS
def test_chunks_of_a_cache(backend, chunk, seqlen_q, layout, window_size, causal):
    """With pages of 16 tokens, chunks of 16 take whole pages, and others begin within one. Without lengths a cache is full."""
    q, k_cache, v_cache = backend.randn(3, seqlen_q, 4, 8), backend.randn(3, 48, 2, 8), backend.randn(3, 48, 2, 16)
    lengths = [48] * 3 if layout == "no lengths" else [48, 30, 5]
    leftpad = [3, 20, 0] if layout == "leftpad" else None
    options = {"causal": causal, "window_size": window_size, "return_softmax_lse": True, "attention_chunk": chunk}
    options["cache_seqlens"] = None if layout == "no lengths" else backend.ints(lengths)
    options["cache_leftpad"] = None if leftpad is None else backend.ints(leftpad)
    given = k_cache, v_cache
    if layout == "entries":
        order = torch.tensor([2, 0, 1])
        given = tuple(torch.empty_like(t).index_copy_(0, order.to(t.device), t) for t in given)
        options["cache_batch_idx"] = backend.ints(order.tolist())
    if layout == "pages":
        pages = torch.randperm(9, generator=torch.Generator().manual_seed(0)).view(3, 3)
        given = tuple(torch.empty_like(t).flatten(0, 1).unflatten(0, (9, 16)) for t in given)
        for b, row in enumerate(pages.tolist()):
            for i, page in enumerate(row):
                for t, whole in zip(given, (k_cache, v_cache)):
                    t[page] = whole[b, 16 * i : 16 * i + 16]
        pages[1, 2:], pages[2, 1:] = -7, 10**6  # what is after a sequence's last page is not read
        options["page_table"] = backend.ints(pages.flatten().tolist()).view(3, 3)
    out, lse, *rest = fa3.flash_attn_with_kvcache(q, *given, **options)
    assert [t.numel() for t in rest] == [0, 0]
    expected = cached(q, k_cache, v_cache, lengths, chunk, leftpad, causal=causal, window_size=window_size)
    close(backend, out, torch.stack([e[0] for e in expected]))
    close_lse(lse, torch.stack([e[1] for e in expected]))


@CAUSAL
@pytest.mark.parametrize("chunk", [0, 4, 100])
@pytest.mark.parametrize("rotary", ["none", "cache_seqlens", "rotary_seqlens"])
@pytest.mark.parametrize("layout", ["dense", "packed", "packed as q"])
@BACKENDS
def test_append(backend, layout, rotary, chunk, causal):
    """Appended k is rotated by its positions, and so is q under a causal mask or with chunks. Else all q take the first position."""
    lengths_q, lengths_new = {"dense": ([3, 3], [3, 3]), "packed": ([4, 1], [2, 3]), "packed as q": ([4, 1], [4, 1])}[layout]
    packed = layout != "dense"
    k_cache, v_cache = backend.randn(2, 20, 2, 16), backend.randn(2, 20, 2, 16)
    before, first = [2, 11], [2, 11] if rotary != "rotary_seqlens" else [5, 0]
    q, k, v = ([backend.randn(n, heads, 16) for n in of] for heads, of in ((4, lengths_q), (2, lengths_new), (2, lengths_new)))
    angles = backend.randn(20, 4).float() * 3
    cos, sin = angles.cos().to(backend.dtype), angles.sin().to(backend.dtype)

    def turn(x, begin, ordered=True):
        positions = begin + torch.arange(len(x)) * ordered
        return x if rotary == "none" else rotate(x, cos, sin, positions, interleaved=False).to(x.dtype)

    want_k, want_v, want_q = k_cache.clone(), v_cache.clone(), []
    for b in range(2):
        place = slice(before[b], before[b] + lengths_new[b])
        want_k[b, place], want_v[b, place] = turn(k[b], first[b]), v[b]
        want_q.append(turn(q[b], first[b], causal or chunk > 0))
    join = torch.cat if packed else torch.stack
    options = {"causal": causal, "attention_chunk": chunk, "rotary_interleaved": False, "cache_seqlens": backend.ints(before)}
    if rotary != "none":
        options |= {"rotary_cos": cos, "rotary_sin": sin}
    if rotary == "rotary_seqlens":
        options["rotary_seqlens"] = backend.ints(first)
    if packed:
        cu = [backend.ints([0, n[0], sum(n)]) for n in (lengths_q, lengths_new)]
        options |= {"cu_seqlens_q": cu[0], "cu_seqlens_k_new": cu[1] if layout == "packed" else None, "max_seqlen_q": max(lengths_q)}
    out = fa3.flash_attn_with_kvcache(join(q), k_cache, v_cache, join(k), join(v), **options)
    close(backend, k_cache, want_k)
    assert torch.equal(v_cache, want_v)
    lengths = [n + new for n, new in zip(before, lengths_new)]
    close(backend, out, join([e[0] for e in cached(want_q, want_k, want_v, lengths, chunk, causal=causal)]))


@pytest.mark.parametrize("chunk", [0, 4])
@CPU
def test_append_of_a_batch_by_packed_queries(backend, chunk):
    """q is packed, k and v are not."""
    q, k, v, lengths = backend.randn(5, 4, 8), backend.randn(2, 3, 2, 8), backend.randn(2, 3, 2, 8), backend.ints([2, 11])
    options = {"cu_seqlens_q": backend.ints([0, 4, 5]), "max_seqlen_q": 4, "cache_seqlens": lengths, "attention_chunk": chunk}
    caches = [[torch.zeros(2, 20, 2, 8, dtype=q.dtype) for _ in range(2)] for _ in range(2)]
    packed = fa3.flash_attn_with_kvcache(
        q, *caches[0], k.flatten(0, 1), v.flatten(0, 1), cu_seqlens_k_new=backend.ints([0, 3, 6]), **options
    )
    assert torch.equal(fa3.flash_attn_with_kvcache(q, *caches[1], k, v, **options), packed)
    assert all(torch.equal(*pair) for pair in zip(*caches))
    for wrong in ((k[:1], v[:1]), (k, v[:, :1])):
        refused(ValueError, r"k, v: got shapes .*, expected .* with batch 2", fa3.flash_attn_with_kvcache, q, *caches[1], *wrong, **options)


@pytest.mark.parametrize("chunk", [16, 24])
@on("cpu-fp32", "sim", "cuda")
def test_freed_pages(backend, chunk):
    """Entries of pages that a window has passed may be anything, and all entries of a sequence without queries."""
    q, k, v = backend.randn(3, 4, 16), backend.randn(8, 16, 2, 16), backend.randn(8, 16, 2, 16)
    table, lengths = backend.ints([[2, 3, 4], [0, 1, 5]]), backend.ints([47, 40])
    freed = backend.ints([[2, 3, 4], [-1, -1, -1]]).where(backend.ints([[-1, 0, 0]] * 2) == 0, -1)
    options = {"window_size": (5, 0), "attention_chunk": chunk, "cu_seqlens_q": backend.ints([0, 3, 3]), "max_seqlen_q": 3}
    backend.simulate()
    whole, part = (fa3.flash_attn_with_kvcache(q, k, v, page_table=t, cache_seqlens=lengths, **options) for t in (table, freed))
    assert whole.isfinite().all() and torch.equal(part, whole)


#: Impossible values for the first of two entries with 10 and 20 keys in a cache of 32: options (lists are int32), the CPU's message.
WRONG_CACHES = {
    "long": ({"cache_seqlens": [33, 20]}, r"cache_seqlens: got 33 \(sequence 0\), expected a length from 0 to"),
    "negative": ({"cache_seqlens": [-3, 20]}, r"cache_seqlens: got -3"),
    "page": ({"page_table": [[2, 9], [0, 1]], "cache_seqlens": [30, 20]}, r"block_table: got 9 \(page 1 of sequence 0\)"),
    "first page": ({"page_table": [[9, 3], [0, 1]], "cache_seqlens": [18, 20]}, r"_table: got 9 \(.*0.*\)"),
    "negative page": ({"page_table": [[-1, 3], [0, 1]], "cache_seqlens": [14, 20]}, r"block_table: got -1"),
    "padding": ({"cache_leftpad": [12, 0]}, r"leftpad_k: got 12 \(sequence 0\), expected a number from 0 to 10"),
    "negative padding": ({"cache_leftpad": [-5, 0]}, r"leftpad_k: got -5"),
    "entry": ({"cache_batch_idx": [5, 0]}, r"cache_batch_idx: got 5"),
    "table": ({"rotary": 22, "cache_seqlens": [21, 0]}, r"rotary_cos: got 22 positions, expected at least 23, which sequence 0 reaches"),
    "positions": ({"rotary": 9, "rotary_seqlens": [8, 7]}, r"rotary_cos: got 9 positions, expected at least 10"),
    "negative position": ({"rotary": 9, "rotary_seqlens": [-1, 7]}, r"rotary_seqlens: got -1 \(entry 0\), expected a position from 0 to 9"),
}


def wrong_cache(backend, name, chunk):
    """Returns a call's arguments, and its options: those of WRONG_CACHES[name]."""
    if name == "first page" and chunk == 16:
        pytest.skip("no query sees that page")
    options = {"cache_seqlens": [10, 20]} | WRONG_CACHES[name][0]
    if name in ("long", "negative"):
        options["page_table"] = [[2, 3], [0, 1]]
    shape = (8, 16, 2, 16) if "page_table" in options else (2, 32, 2, 16)
    rows = options.pop("rotary", None)
    options = {name: torch.tensor(value, dtype=torch.int32, device=backend.device) for name, value in options.items()}
    if rows:
        options |= {"rotary_cos": backend.randn(rows, 4), "rotary_sin": backend.randn(rows, 4)}
    draws = [(2, 2, 4, 16), shape, shape, (2, 2, 2, 16), (2, 2, 2, 16)]
    return [backend.randn(*s) for s in draws], options | {"attention_chunk": chunk, "causal": True}


@pytest.mark.parametrize("name", WRONG_CACHES)
@pytest.mark.parametrize("chunk", [0, 7, 16, 24])
@on("cpu-fp32")
def test_impossible_entries(backend, chunk, name):
    (q, k_cache, v_cache, k, v), options = wrong_cache(backend, name, chunk)
    before = k_cache.clone()
    refused(ValueError, WRONG_CACHES[name][1], fa3.flash_attn_with_kvcache, q, k_cache, v_cache, k, v, **options)
    assert torch.equal(k_cache, before) or name == "first page"  # found after the append, which does not read that page
    if "rotary_cos" not in options:
        refused(ValueError, WRONG_CACHES[name][1], fa3.flash_attn_with_kvcache, q, k_cache, v_cache, **options)


@pytest.mark.parametrize("name", WRONG_CACHES)
@pytest.mark.parametrize("chunk", [7, 16])
@on("sim", "cuda")
def test_impossible_entries_unchecked(backend, chunk, name):
    """They get NaN, others do not."""
    backend.simulate()
    backend.monkeypatch.setenv("VOLTA_FA_CHECK_LENGTHS", "0")
    given, options = wrong_cache(backend, name, chunk)
    for tensors in (given,) if "rotary_cos" in options else (given, given[:3]):
        out, lse, *_ = fa3.flash_attn_with_kvcache(*tensors, **options, return_softmax_lse=True)
        assert out[0].isnan().all() and lse[0].isnan().all() and out[1].isfinite().all()


@pytest.mark.parametrize(
    "wrong, message",
    [
        ({"max_seqlen_q": None}, r"max_seqlen_q: got None"),
        ({"max_seqlen_q": 2}, r"max_seqlen_q: got 2, expected at least 3, the length of sequence 0"),
        ({"cu_seqlens_q": [0, 3, 5]}, r"cu_seqlens_q: got 5 as its last value, expected 6"),
        ({"cu_seqlens_q": [0, 3, 5], "rotary_seqlens": [5, 6]}, r"cu_seqlens_q: got 5 as its last value, expected 6"),
        ({"rotary_seqlens": [5, 6, 7]}, r"rotary_seqlens: got shape \(3,\)"),
        ({"rotary_seqlens": [5, 6], "cache_seqlens": [5]}, r"cache_seqlens: got shape \(1,\)"),
        ({"cu_seqlens_k_new": [0, 6], "rotary_seqlens": [5, 6]}, r"cu_seqlens_k_new: got shape \(2,\)"),
        ({"rotary_seqlens": [5, 6], "rotary_sin": torch.ones(20, 3)}, r"rotary_sin: got shape \(20, 3\)"),
    ],
    ids=str,
)
@pytest.mark.parametrize("chunk", [0, 8])
@on("cpu-fp32")
def test_no_append_with_wrong_lengths(backend, chunk, wrong, message):
    q, k, cache, cos = backend.randn(6, 4, 16), backend.randn(6, 2, 16), backend.randn(2, 32, 2, 16), backend.randn(20, 4)
    options = {"cu_seqlens_q": [0, 3, 6], "cu_seqlens_k_new": [0, 3, 6], "max_seqlen_q": 3, "cache_seqlens": [5, 6]} | wrong
    options = {name: backend.ints(value) if isinstance(value, list) else value for name, value in options.items()}
    if "rotary_seqlens" in options:
        options = {"rotary_cos": cos, "rotary_sin": cos} | options
    before = cache.clone()
    refused(ValueError, message, fa3.flash_attn_with_kvcache, q, cache, cache.clone(), k, k, attention_chunk=chunk, **options)
    assert torch.equal(cache, before)


@pytest.mark.parametrize("name", ["seqused_q", "seqused_k"])
@pytest.mark.parametrize("chunk", [0, 2, 100])
@on("cpu-fp32", "sim", "cuda")
def test_lengths_beyond_a_sequence(backend, chunk, name):
    """One error that names the argument, or NaN in all rows of the sequence where a call does not check."""
    x, cu = backend.randn(8, 2, 16), backend.ints([0, 4, 8])
    backend.simulate()
    for number, used in ((0, [6, 4]), (1, [4, 6]), (0, [-1, 4])):
        backend.monkeypatch.setenv("VOLTA_FA_CHECK_LENGTHS", "0" if backend.kernels else "1")
        call = fa3.flash_attn_varlen_func, x, x, x, cu, cu, 4, 4
        options = {"causal": True, "attention_chunk": chunk, name: backend.ints(used)}
        if backend.kernels:
            bad = call[0](*call[1:], **options).isnan().flatten(1)
            assert bad[4 * number : 4 * number + 4].all() and bad.sum() == 4 * 32
        else:
            expected = f"got {used[number]} \\(entry {number}\\), expected a length from 0 to 4"
            refused(ValueError, f"{name}: {expected}", *call, **options)


@CPU
def test_a_cache_in_float8(backend):
    """Its scales count, one for each entry and head, also where chunks repeat the entries."""
    q, scales = backend.randn(2, 6, 2, 16), [torch.tensor([[0.5, 2.0], [3.0, 0.25]]), torch.tensor([[1.0, 0.5], [2.0, 4.0]])]
    codes = [backend.randn(2, 32, 2, 16).float().to(torch.float8_e4m3fn) for _ in range(2)]
    caches = [c.double() * s.double()[:, None, :, None] for c, s in zip(codes, scales)]
    lengths = [32, 13]
    for chunk, pages in ((0, False), (4, False), (16, True), (5, True)):
        given = [c.flatten(0, 1).unflatten(0, (4, 16)) for c in codes] if pages else codes
        table = backend.ints(range(4)).view(2, 2) if pages else None
        out = fa3.flash_attn_with_kvcache(
            q, *given, cache_seqlens=backend.ints(lengths), page_table=table, attention_chunk=chunk, causal=True,
            k_descale=scales[0], v_descale=scales[1],
        )  # fmt: skip
        close(backend, out, torch.stack([e[0] for e in cached(q, *caches, lengths, chunk, causal=True)]))


@CPU
def test_combine(backend):
    """The states of three parts of the keys, one of them empty, combine to that of all keys, in `out` if it is given."""
    q, k, v = backend.randn(1, 5, 2, 8), backend.randn(1, 12, 2, 8), backend.randn(1, 12, 2, 8)
    parts = [fa3.flash_attn_func(q, k[:, r], v[:, r], return_attn_probs=True) for r in (slice(0, 4), slice(4, 12), slice(0, 0))]
    outs, lses = torch.stack([p[0] for p in parts]), torch.stack([p[1].transpose(1, 2) for p in parts])
    want, want_lse = fa3.flash_attn_func(q, k, v, return_attn_probs=True)
    into = torch.empty_like(want)
    out, lse = fa3.flash_attn_combine(outs, lses, into)
    assert out is into and fa3.flash_attn_combine(outs, lses, out_dtype=torch.float16)[0].dtype == torch.float16
    torch.testing.assert_close(out, want, rtol=1e-5, atol=1e-5)
    close_lse(lse, want_lse.transpose(1, 2))
    refused(ValueError, r"lse_partial: got shape \(3, 1, 1, 2\), expected", fa3.flash_attn_combine, outs, lses[:, :, :1])
    refused(ValueError, r"out: got shape \(2, 1, 5, 2, 8\), expected", fa3.flash_attn_combine, outs, lses, torch.stack([want, want]))


@CPU
def test_errors(backend):
    q, lengths = backend.randn(1, 5, 2, 8), backend.ints([0, 5])
    fp8 = q.to(torch.float8_e4m3fn)
    refused(NotImplementedError, r"q: got dtype torch.float8_e4m3fn, expected torch.float16", fa3.flash_attn_func, fp8, fp8, fp8)
    refused(ValueError, r"qv: got shape \(1, 5, 2, 4\), expected shape \(1, 5, 2, 8\)", fa3.flash_attn_func, q, q, q, qv=q[..., :4])
    refused(ValueError, r"qv: got dtype torch.float16, expected torch.float64, q's", fa3.flash_attn_func, q, q, q, qv=q.half())
    with torch.autocast(backend.device, torch.bfloat16):  # gives q and qv one dtype
        fa3.flash_attn_func(q.float(), q.float(), q.float(), qv=q.bfloat16())
    wide = backend.randn(1, 5, 2, 512)
    refused(NotImplementedError, r"qv: got headdim 8 and headdim_v 512.*fwd_mla", fa3.flash_attn_func, q, q, wide, qv=wide)
    half = wide[..., :256]
    assert fa3.flash_attn_func(half, half, half, qv=half).isfinite().all()  # both headdims are 512 together, the most that is allowed
    refused(NotImplementedError, r"qv: got a tensor, expected None: call volta_fa.flash_mla", fa3.flash_attn_with_kvcache, q, q, q, qv=q)
    packed = q[0], q[0], q[0], lengths, lengths, 5, 5
    refused(ValueError, r"seqused_q: got shape \(2,\).*\(1,\)", fa3.flash_attn_varlen_func, *packed, seqused_q=lengths)
    refused(ValueError, r"k: got .* dtype torch.float16, expected .* torch.float64, with v", fa3.flash_attn_func, q, q.half(), q, qv=q)
    refused(ValueError, r"k: got shape \(1, 4, 2, 8\)", fa3.flash_attn_func, q, q[:, :4], q, qv=q)
    refused(
        ValueError, r"cu_seqlens_q, cu_seqlens_k: got shapes \(2,\), \(1,\)", fa3.flash_attn_varlen_func, *packed[:4], lengths[:1], 5, 5,
        attention_chunk=2,
    )  # fmt: skip
    refused(ValueError, r"q, k, v: got shapes", fa3.flash_attn_func, q, q, q[:, :4], attention_chunk=2)
    refused(ValueError, r"q, k, v: got shapes", fa3.flash_attn_func, *packed[:3], attention_chunk=2)
    refused(ValueError, r"qkv: got shape \(1, 5, 2, 8\) with num_heads_q=1", fa3.flash_attn_qkvpacked_func, q, num_heads_q=1)
    refused(ValueError, r"v: got None, expected a tensor: k is given", fa3.flash_attn_with_kvcache, q, q, q, q)
    refused(
        NotImplementedError, r"cache_leftpad: got a tensor, expected None with page_table", fa3.flash_attn_with_kvcache, q,
        backend.randn(1, 16, 2, 8), backend.randn(1, 16, 2, 8), page_table=backend.ints([0]).view(1, 1), attention_chunk=4,
        cache_leftpad=backend.ints([0]),
    )  # fmt: skip
