"""Problems of attention with a KV cache, and what the fp64 reference says of their results."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.library import opcheck

from conftest import agreed, check_form, judge
from volta_fa.check.cache_cases import NO_PAGE, WRITTEN, CacheCase, CacheInputs, has_scales

__all__ = [
    "NO_PAGE", "WRITTEN", "Cached", "check_compiled", "check_opcheck", "check_reads_no_value", "check_sequence", "check_sequences",
    "has_scales", "keys_and_values",
]  # fmt: skip

Cached = CacheCase
fwd_kvcache = torch.ops.volta_fa.fwd_kvcache


def keys_and_values(p: CacheInputs, b: int, k_cache: Tensor, v_cache: Tensor) -> list[Tensor]:
    """Returns k and v of sequence b, (tokens, nheads_k, headdim): what these caches stand for."""
    tokens = p.tokens(b, (p.case.leftpad or (0,) * p.case.batch)[b])
    return [p.numbers(which, t, tokens, b) for which, t in (("k", k_cache), ("v", v_cache))]


def check_sequence(
    backend, p: CacheInputs, b: int, out: Tensor, lse: Tensor, k_cache: Tensor, v_cache: Tensor, is_dequantized=False, **changed
):
    """Judges sequence b. `changed`: options of scores instead of the case's."""
    parts = p.parts(b, *keys_and_values(p, b, k_cache, v_cache), is_dequantized, **changed)
    judge(backend, parts, {"out": out, "softmax_lse": lse})


def check_sequences(backend, p: CacheInputs, out: Tensor, lse: Tensor, k_cache: Tensor, v_cache: Tensor, is_dequantized=False):
    """Judges a call's results, with the tokens that these caches hold after it."""
    check_form(p.q, p.case.columns_v, out, lse)
    for b, (seqlen_q, _, _) in enumerate(p.case.lengths):
        if seqlen_q:
            check_sequence(backend, p, b, out, lse, k_cache, v_cache, is_dequantized)


def check_opcheck(backend, p: CacheInputs, **options):
    backend.simulate()
    # opcheck compares caches: NaN would differ from itself
    caches = (p.k_cache.nan_to_num_(0.0), p.v_cache.nan_to_num_(0.0))
    opcheck(fwd_kvcache.append if p.new else fwd_kvcache.default, (p.q, *caches, *p.new), p.options, **options)


def check_reads_no_value(backend, p: CacheInputs, *calls: str):
    """No value is read on the host, as CUDA graphs need it. `calls`: operators that the call has."""
    backend.monkeypatch.setenv("VOLTA_FA_CHECK_LENGTHS", "0")
    backend.simulate()
    with torch.profiler.profile() as profiler:
        fwd_kvcache(p.q, p.k_cache, p.v_cache, **p.options)
    called = {event.name for event in profiler.events()}
    assert called >= {"volta_fa::fwd_kvcache", *calls}
    assert not called & {"aten::item", "aten::_local_scalar_dense", "aten::nonzero", "aten::is_nonzero"}


def check_compiled(p: CacheInputs):
    def step(q, k_cache, v_cache, options):
        return fwd_kvcache(q, k_cache, v_cache, **options)

    tensors = (p.q, p.k_cache, p.v_cache, p.options)
    agreed([step(*tensors), torch.compile(step, backend="aot_eager", fullgraph=True)(*tensors)])
