"""Expected results of flash-attn's functions in fp64, comparisons and inputs, for test_flash_attn_*.py.

`backend` (conftest.py) has the device and dtype of a test, and draws its tensors. Masks align queries with the last keys.
Options have flash-attn's names: `causal`, `window_size`, `softcap`, `alibi_slopes`."""

import inspect
import math

import pytest
import torch

import reference
from conftest import on

BACKENDS = on("cpu-fp64", "cpu-fp32", "cuda")
#: Queries and keys of five packed sequences: one without queries, one without keys, one with more queries than keys.
LENGTHS = [5, 0, 17, 1, 8], [7, 3, 17, 0, 6]
#: Tolerance of what is computed from softmax_lse, which is fp32 (rounding 6e-8) even if all else is fp64.
LSE_ROUNDING = 1e-6
#: Options of calls by name. `alibi_slopes`: whether each batch entry or sequence has slopes of its own (`drawn` replaces it by tensors).
CASES = {
    "plain": {},
    "causal": {"causal": True},
    "scale": {"softmax_scale": 0.3},
    "left": {"window_size": (3, -1)},
    "right": {"window_size": (-1, 2)},
    "window": {"window_size": (2, 1)},
    "causal_window": {"causal": True, "window_size": (4, 4)},
    "tensors": {"window_size": (torch.tensor(2), torch.tensor([-1]))},
    "negative": {"window_size": (-7, 0)},
    "softcap": {"softcap": 1.5, "causal": True},
    "alibi": {"alibi_slopes": False},
    "alibi_causal": {"alibi_slopes": True, "causal": True},
    "alibi_window": {"alibi_slopes": False, "window_size": (3, 2), "softcap": 2.0},
    "alibi_window_of_entries": {"alibi_slopes": True, "window_size": (3, 2), "softcap": 2.0},
    "dropout": {"dropout_p": 0.3},
    "dropout_window": {"dropout_p": 0.3, "causal": True, "window_size": (11, -1)},
    "dropout_alibi": {"dropout_p": 0.3, "alibi_slopes": False},
}


def attention(q, k, v, causal=False, window_size=(-1, -1), keep=None, **options):
    """Returns out, softmax_lse and probabilities (batch, nheads, seqlen_q, seqlen_k) of a batch in fp64, differentiable.
    `keep` has the probabilities' shape, False where dropout drops."""
    left, right = map(int, window_size)
    found = reference.forward(q, k, v, is_causal=causal, window_left=left, window_right=right, kept=keep, **options)
    return found.out, found.softmax_lse, found.probabilities


def close(backend, found, expected, at_least=0.0):
    """Compares with the tolerance of the backend's dtype, or `at_least` if that is larger. In eps of the dtype, relative plus absolute,
    it is about 170 + 170 for fp32 and 20 + 5 for fp16. For fp64 it admits any order of additions, but not one rounding to fp32 (6e-8)."""
    rtol, atol = {torch.float64: (1e-10, 1e-10), torch.float32: (2e-5, 2e-5), torch.float16: (2e-2, 5e-3)}[backend.dtype]
    torch.testing.assert_close(found.double(), expected.double(), rtol=max(rtol, at_least), atol=max(atol, at_least))


def close_lse(found, expected):
    """Compares softmax_lse, which is fp32 for every dtype. 2e-4: 64 roundings of scores of 25, because kernels approximate ex2 and lg2."""
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected.float(), rtol=2e-4, atol=2e-4)


def signature_of(function) -> str:
    """Returns the function's arguments and defaults as text, without annotations."""
    parameters = inspect.signature(function).parameters.values()
    return str(inspect.Signature([p.replace(annotation=p.empty) for p in parameters]))


def slopes_of(backend, *shape):
    """Returns slopes of ALiBi: positive fp32 numbers, (nheads) or (batch, nheads)."""
    return backend.randn(*shape).abs().float()


def drawn(backend, options, entries=2):
    """Returns options of CASES with slopes drawn: (4 heads), or (entries, 4), where entries are batch entries or packed sequences."""
    return {n: slopes_of(backend, *(entries,) * value, 4) if n == "alibi_slopes" else value for n, value in options.items()}


def leaf(backend, *shape):
    """Returns a random tensor that requires a gradient."""
    return backend.randn(*shape).requires_grad_()


def packed_leaves(backend, headdim=16, headdim_v=16):
    """Returns q, k and v of sequences of LENGTHS, and cu_seqlens_q, cu_seqlens_k, max_seqlen_q and max_seqlen_k."""
    total_q, total_k = map(sum, LENGTHS)
    leaves = leaf(backend, total_q, 4, headdim), leaf(backend, total_k, 2, headdim), leaf(backend, total_k, 2, headdim_v)
    return leaves, (*(cu(lengths, backend.device) for lengths in LENGTHS), *map(max, LENGTHS))


def check_gradients(backend, found, expected, leaves):
    """Compares the leaves' gradients through `found` and `expected`, for one random gradient of both."""
    dout = backend.randn(*found.shape)
    got = torch.autograd.grad(found, leaves, dout)
    want = torch.autograd.grad(expected, leaves, dout.to(expected.dtype))
    for g, w, t in zip(got, want, leaves):
        assert g.shape == t.shape and g.dtype == t.dtype
        close(backend, g, w)


def packed(q, k, v, lengths_q, lengths_k, alibi_slopes=None, keep=None, **options):
    """Returns `attention` of each packed sequence: out (total_q, nheads, headdim_v), softmax_lse (nheads, total_q), and a list of
    probabilities."""
    entries = [
        attention(
            *(t[None] for t in parts),
            alibi_slopes=alibi_slopes if alibi_slopes is None or alibi_slopes.dim() == 1 else alibi_slopes[b],
            keep=None if keep is None else keep[b : b + 1, :, : lengths_q[b], : lengths_k[b]],
            **options,
        )
        for b, parts in enumerate(zip(q.split(lengths_q), k.split(lengths_k), v.split(lengths_k)))
    ]
    outs, lses, ps = zip(*((t[0] for t in entry) for entry in entries))
    return torch.cat(outs), torch.cat(lses, dim=-1), ps


def cu(lengths, device="cpu"):
    """Returns cu_seqlens: the first row of each sequence, and the total."""
    return torch.tensor([0, *lengths], device=device).cumsum(0, dtype=torch.int32)


def in_pages(backend, cache, page):
    """Returns the entries of a dense cache in shuffled pages of `page` tokens, and their table, padded with invalid page numbers (-1).
    Two pages of NaN belong to no entry."""
    batch, seqlen = cache.shape[:2]
    order = torch.randperm(batch * (seqlen // page) + 2, generator=torch.Generator().manual_seed(backend.seed))
    table = order[: batch * (seqlen // page)].view(batch, -1).int().to(backend.device)
    pages = torch.full((len(order), page, *cache.shape[2:]), math.nan, dtype=cache.dtype, device=cache.device)
    pages[table.long()] = cache.unflatten(1, (-1, page))
    return pages, torch.nn.functional.pad(table, (0, 2), value=-1)


def refused(error, message, function, *arguments, **options):
    """Checks that a call raises this error, with a message of one line that matches."""
    with pytest.raises(error, match=message) as caught:
        function(*arguments, **options)
    assert "\n" not in str(caught.value).split("\nException raised from")[0], "one line"
