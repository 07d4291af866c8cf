"""The limits of the kernels that Python code checks, as the native library publishes them. It checks all calls itself."""

from .inspection import limits

_LIMITS = limits()

#: Largest headdim of `volta_fa::fwd`, `bwd` and `fwd_kvcache`.
MAX_HEADDIM: int = _LIMITS["max_headdim"]
#: Columns of a latent of `volta_fa::fwd_mla`: values and rotary.
LATENT_HEADDIMS: tuple[int, int] = tuple(_LIMITS["latent_headdims"])
#: Tokens that the page size of a paged KV cache is a multiple of.
PAGE_SIZE_MULTIPLE: int = _LIMITS["page_size_multiple"]
#: Query rows per KV head (seqlen_q * nheads / nheads_k) that one tile of a decode kernel holds.
MAX_DECODE_ROWS: int = _LIMITS["max_decode_rows"]
