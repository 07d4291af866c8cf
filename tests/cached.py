"""Checks of `torch.ops.volta_fa.fwd_kvcache`, attention with a KV cache, for test_kvcache*.py, test_decode_kernels.py and others.

`Cached` (volta_fa.check.cache_cases.CacheCase) describes a problem: lengths of each sequence, and the layout of the cache.
`CacheInputs` are its tensors: q, k_cache, v_cache, `new` (k and v to append, or none), and the operator's options. `judge` (conftest.py)
compares results with attention in fp64 over the tokens of each sequence, by `parts`: exact values with allowed errors. A test passes its
`backend` (conftest.py): device and dtype. `backend.simulate()` runs kernels on CPU tensors, in the simulator."""

import torch
from torch import Tensor
from torch.library import opcheck

from conftest import check_form, judge, reads_no_value
from volta_fa.check.cache_cases import CacheCase as Cached
from volta_fa.check.cache_cases import CacheInputs

__all__ = ["Cached", "check_opcheck", "check_reads_no_value", "check_sequence", "check_sequences", "keys_and_values"]

fwd_kvcache = torch.ops.volta_fa.fwd_kvcache


def keys_and_values(p: CacheInputs, b: int, k_cache: Tensor, v_cache: Tensor) -> list[Tensor]:
    """Returns k and v of sequence b, (tokens, nheads_k, headdim), read from these caches and dequantized. Left padding is left out."""
    tokens = p.tokens(b, p.case.leftpad[b] if p.case.leftpad else 0)
    return [p.numbers(which, t, tokens, b) for which, t in (("k", k_cache), ("v", v_cache))]


def check_sequence(
    backend, p: CacheInputs, b: int, out: Tensor, lse: Tensor, k_cache: Tensor, v_cache: Tensor, is_dequantized=False, **changed
):
    """Judges out and softmax_lse of sequence b. `is_dequantized`: the operator rounded a quantized cache to q's dtype before attention.
    `changed`: options of scores that replace the case's."""
    parts = p.parts(b, *keys_and_values(p, b, k_cache, v_cache), is_dequantized, **changed)
    judge(backend, parts, {"out": out, "softmax_lse": lse})


def check_sequences(backend, p: CacheInputs, out: Tensor, lse: Tensor, k_cache: Tensor, v_cache: Tensor, is_dequantized=False):
    """Judges a call's results, with the tokens that these caches hold after it."""
    check_form(p.q, p.case.columns_v, out, lse)
    for b, (seqlen_q, _, _) in enumerate(p.case.lengths):
        if seqlen_q:
            check_sequence(backend, p, b, out, lse, k_cache, v_cache, is_dequantized)


def check_opcheck(backend, p: CacheInputs, **options):
    """Runs torch.library.opcheck on the call. `options` are opcheck's."""
    backend.simulate()
    # opcheck compares caches: NaN would differ from itself
    caches = (p.k_cache.nan_to_num_(0.0), p.v_cache.nan_to_num_(0.0))
    opcheck(fwd_kvcache.append if p.new else fwd_kvcache.default, (p.q, *caches, *p.new), p.options, **options)


def check_reads_no_value(backend, p: CacheInputs, *calls: str):
    """Checks that the call reads no tensor value on the host, which a CUDA graph forbids, and that it runs the operators `calls`."""
    backend.monkeypatch.setenv("VOLTA_FA_CHECK_LENGTHS", "0")  # the check reads lengths on the host
    backend.simulate()
    reads_no_value(lambda: fwd_kvcache(p.q, p.k_cache, p.v_cache, *p.new, **p.options), "volta_fa::fwd_kvcache", *calls)
