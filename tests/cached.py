"""Problems of attention with a KV cache, beside what the fp64 reference says of them."""

from __future__ import annotations

from torch import Tensor

import reference
from volta_fa.check.cache_cases import NO_PAGE, WRITTEN, CacheCase, CacheInputs, has_scales

__all__ = ["NO_PAGE", "WRITTEN", "Cached", "expected", "has_scales"]

Cached = CacheCase


def expected(p: CacheInputs, b: int, k_cache: Tensor, v_cache: Tensor):
    """Returns sequence b as a dense problem (q, k, v), with the tokens that these caches hold, and its fp64 result."""
    tokens = p.tokens(b, (p.case.leftpad or (0,) * p.case.batch)[b])
    k, v = (p.numbers(which, t, tokens, b) for which, t in (("k", k_cache), ("v", v_cache)))
    q = p.queries(b)[None]
    # the reference takes the numbers that the bytes stand for; eager attention takes them rounded to q's type
    ref = reference.forward(q, k[None], v[None], **p.score_options(b))
    return (q, k[None].to(q.dtype), v[None].to(q.dtype)), ref
