"""`flash_attn_with_kvcache`, and `flash_attn_varlen_func` with a block_table, with flash-attn 2's interface, against fp64.

BACKENDS runs a test on the CPU in fp64 and fp32, and on a GPU; `sim` is the simulator of the kernels' machine code. flash_attention.py has
the fp64 reference (`attention`), comparisons (`close`, `close_lse`; `refused`: of an error's message) and inputs: `leaf` requires a
gradient, `in_pages` returns a dense cache in shuffled pages and their table, `cu` makes cu_seqlens of lengths, `slopes_of` draws ALiBi
slopes."""

import pytest
import torch

from conftest import on
from flash_attention import BACKENDS, attention, close, close_lse, cu, in_pages, leaf, refused, slopes_of
from volta_fa import flash_attn_varlen_func, flash_attn_with_kvcache
from volta_fa.check.cache_cases import rotate


def cached(q, k_cache, v_cache, seqlens, leftpad=None, **options):
    """Returns out and softmax_lse of each entry over its keys from `leftpad` to `seqlens`."""
    parts = [slice(*ends) for ends in zip(leftpad or [0] * len(q), seqlens)]
    entries = [attention(q[b : b + 1], k_cache[b : b + 1, p], v_cache[b : b + 1, p], **options)[:2] for b, p in enumerate(parts)]
    return (torch.cat(t) for t in zip(*entries))


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window_size": (3, -1)}, {"causal": True, "softcap": 2.0}], ids=str)
@pytest.mark.parametrize("headdim", [16, 12])
@BACKENDS
def test_kvcache(backend, headdim, options):
    """Lengths as an int, as a tensor, and none, against fp64."""
    q = leaf(backend, 3, 4, 4, headdim)
    k_cache, v_cache = backend.randn(3, 20, 2, headdim), backend.randn(3, 20, 2, headdim)
    lengths = backend.ints([20, 5, 11])
    for cache_seqlens, seqlens in ((None, [20] * 3), (7, [7] * 3), (lengths, lengths.tolist())):
        out, lse = flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=cache_seqlens, return_softmax_lse=True, **options)
        expected, expected_lse = cached(q, k_cache, v_cache, seqlens, **options)
        assert not out.requires_grad
        close(backend, out, expected)
        close_lse(lse, expected_lse)
        assert torch.equal(out, flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=cache_seqlens, **options))


@pytest.mark.parametrize("rotary", ["none", "interleaved", "halves"])
@pytest.mark.parametrize("causal", [True, False])
@BACKENDS
def test_kvcache_appends_in_place(backend, causal, rotary):
    """k and v go to the entries that cache_batch_idx names, after each length. Other tokens and the lengths stay as they were. With
    rotary, k is rotated by its positions. So is q if causal; else all queries are rotated by the first position."""
    q, k, v = backend.randn(2, 3, 4, 32), backend.randn(2, 3, 2, 32), backend.randn(2, 3, 2, 32)
    k_cache, v_cache = backend.randn(4, 12, 2, 32), backend.randn(4, 12, 2, 32)
    angles = backend.randn(12, 8).float() * 3
    cos, sin = angles.cos().to(q.dtype), angles.sin().to(q.dtype)
    want_k, want_v, want_q = k_cache.clone(), v_cache.clone(), q.clone()

    def turn(x, positions):
        return x if rotary == "none" else rotate(x, cos, sin, positions, rotary == "interleaved").to(x.dtype)

    entries, tokens = [3, 1], torch.arange(3)
    for b, (entry, length) in enumerate(zip(entries, (2, 9))):
        want_k[entry, length + tokens], want_v[entry, length + tokens] = turn(k[b], length + tokens), v[b]
        want_q[b] = turn(q[b], length + tokens * causal)
    lengths = backend.ints([2, 9])
    options = {"cache_seqlens": lengths, "cache_batch_idx": backend.ints(entries), "causal": causal}
    if rotary != "none":
        options |= {"rotary_cos": cos, "rotary_sin": sin, "rotary_interleaved": rotary == "interleaved"}
    out = flash_attn_with_kvcache(q, k_cache, v_cache, k, v, **options)
    if rotary == "none":
        assert torch.equal(k_cache, want_k)
    close(backend, k_cache, want_k)
    assert torch.equal(v_cache, want_v) and lengths.tolist() == [2, 9]
    close(backend, out, next(cached(want_q, want_k[entries], want_v[entries], [5, 12], causal=causal)))


@pytest.mark.parametrize("page", [16, 48, 256])
@BACKENDS
def test_kvcache_in_pages(backend, page):
    """A cache in pages of `page` tokens gives the results of the dense one, with every argument."""
    q, k, v = backend.randn(2, 3, 4, 32), backend.randn(2, 3, 2, 32), backend.randn(2, 3, 2, 32)
    caches = [backend.randn(2, 2 * page, 2, 32) for _ in range(2)]
    (k_pages, table), (v_pages, _) = (in_pages(backend, cache, page) for cache in caches)
    angles = backend.randn(2 * page, 8).float()
    options = {
        "rotary_cos": angles.cos().to(q.dtype), "rotary_sin": angles.sin().to(q.dtype), "cache_seqlens": backend.ints([page - 2, page + 5]),
        "softmax_scale": 0.3, "causal": True, "window_size": (page, 0), "softcap": 5.0, "rotary_interleaved": False,
        "alibi_slopes": slopes_of(backend, 4), "num_splits": 2, "return_softmax_lse": True,
    }  # fmt: skip
    expected = flash_attn_with_kvcache(q, *caches, k, v, **options)
    found = flash_attn_with_kvcache(q, k_pages, v_pages, k, v, block_table=table, **options)
    close(backend, found[0], expected[0])
    close_lse(found[1], expected[1])
    for pages, cache in ((k_pages, caches[0]), (v_pages, caches[1])):
        assert torch.equal(pages[table[:, :2].long()].flatten(1, 2), cache)


@pytest.mark.parametrize("page", [16, 256])
@BACKENDS
def test_varlen_in_pages(backend, page):
    """flash_attn_varlen_func with keys in pages gives the results for packed keys."""
    lengths_q, lengths_k = [3, 1, 7], [page + 1, 2 * page, 9]
    q = backend.randn(sum(lengths_q), 4, 32)
    caches = [backend.randn(3, 2 * page, 2, 32) for _ in range(2)]
    (k_pages, table), (v_pages, _) = (in_pages(backend, cache, page) for cache in caches)
    k, v = (torch.cat([entry[:n] for entry, n in zip(cache, lengths_k)]) for cache in caches)
    lengths = cu(lengths_q, backend.device), cu(lengths_k, backend.device), max(lengths_q), max(lengths_k)
    options = {"causal": True, "softcap": 3.0, "alibi_slopes": slopes_of(backend, 4), "return_attn_probs": True}
    expected = flash_attn_varlen_func(q, k, v, *lengths, **options)
    found = flash_attn_varlen_func(q, k_pages, v_pages, *lengths, block_table=table, **options)
    close(backend, found[0], expected[0])
    close_lse(found[1], expected[1])
    assert found[2].shape == (0,)
    refused(ValueError, r"dropout_p: got 0.5", flash_attn_varlen_func, q, k_pages, v_pages, *lengths, dropout_p=0.5, block_table=table)
    wrong = (lengths[0], lengths[1][1:], *lengths[2:])
    refused(ValueError, r"cu_seqlens_k: got shape \(3,\)", flash_attn_varlen_func, q, k_pages, v_pages, *wrong, block_table=table)


@BACKENDS
def test_kvcache_leftpad(backend):
    """Keys before leftpad are hidden, but positions of masks and ALiBi count them."""
    q, k_cache, v_cache = backend.randn(2, 2, 2, 16), backend.randn(2, 12, 2, 16), backend.randn(2, 12, 2, 16)
    leftpad = backend.ints([4, 0])
    slopes = slopes_of(backend, 2)
    for options in ({"causal": True}, {"window_size": (3, 0)}):
        out = flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=10, cache_leftpad=leftpad, alibi_slopes=slopes, **options)
        close(backend, out, next(cached(q, k_cache, v_cache, [10, 10], leftpad=[4, 0], alibi_slopes=slopes, **options)))


def ints(*values):
    return torch.tensor(values, dtype=torch.int32)


#: New keys or values: one token for each of two sequences.
NEW = torch.ones(2, 1, 2, 16)
#: Options of a call that the function itself refuses, and its error. The cache has two entries of 16 tokens.
CACHE_ERRORS = {
    "append beyond": (
        {"k": NEW, "v": NEW, "cache_seqlens": 16},
        r"cache_seqlens: got 16, expected a length from 0 to 15: there is room for 16 keys, and k has 1",
    ),
    "more than there is": ({"cache_seqlens": 17}, r"cache_seqlens: got 17, expected a length from 0 to 16$"),
    "more than pages": (
        {"cache_seqlens": 33, "block_table": ints([0, 1], [0, 1])},
        r"cache_seqlens: got 33, expected a length from 0 to 32: longer",
    ),
    "batch_idx shape": ({"cache_batch_idx": ints(0)}, r"cache_batch_idx: got shape \(1,\)"),
    "leftpad shape": ({"cache_leftpad": ints(0)}, r"cache_leftpad: got shape \(1,\)"),
    "leftpad dtype": ({"cache_leftpad": torch.zeros(2)}, r"cache_leftpad: got dtype torch.float32"),
    "k alone": ({"k": NEW, "cache_seqlens": 1}, r"v: got None, expected a value: k is given"),
    "v alone": ({"v": NEW, "cache_seqlens": 1}, r"v: got a tensor, expected None: k is not given"),
    "rotary alone": ({"rotary_cos": torch.ones(8, 8)}, r"rotary_cos: got a tensor, expected None: k is not given"),
}


@pytest.mark.parametrize("name", CACHE_ERRORS)
@on("cpu-fp32")
def test_kvcache_refuses_before_it_appends(backend, name):
    options, message = CACHE_ERRORS[name]
    q, cache = backend.randn(2, 1, 2, 16), backend.randn(2, 16, 2, 16)
    before = cache.clone()
    refused(ValueError, message, flash_attn_with_kvcache, q, cache, cache, **options)
    assert torch.equal(cache, before)


@on("cuda")
def test_kvcache_lengths_are_checked_on_request(backend):
    backend.monkeypatch.setenv("VOLTA_FA_CHECK_LENGTHS", "1")
    q, *caches = backend.randn(2, 1, 2, 16), backend.randn(2, 8, 2, 16), backend.randn(2, 8, 2, 16)
    lengths = backend.ints([7, 8])
    refused(ValueError, r"cache_seqlens: got 8 \(sequence 1\)", flash_attn_with_kvcache, q, *caches, q, q, cache_seqlens=lengths)


@on("sim", "cuda")
def test_kvcache_with_unchecked_invalid_entries(backend):
    """Sequences whose entries are invalid give NaN, also with lengths that the function makes."""
    backend.simulate()
    backend.monkeypatch.setenv("VOLTA_FA_CHECK_LENGTHS", "0")
    q, k_cache, v_cache = backend.randn(4, 3, 2, 16), backend.randn(3, 8, 2, 16), backend.randn(3, 8, 2, 16)
    for cache_seqlens in (None, 8, backend.ints([8] * 4)):
        out = flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=cache_seqlens, cache_batch_idx=backend.ints([2, 3, -1, 0]))
        assert out[[0, 3]].isfinite().all() and out[[1, 2]].isnan().all()
