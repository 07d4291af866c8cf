"""The limits of the kernels that Python code checks. src/limits.rs has the same limits, and the native library checks all calls."""

#: Largest headdim of `volta_fa::fwd`, `bwd` and `fwd_kvcache`.
MAX_HEADDIM = 256
#: Tokens that the page size of a paged KV cache is a multiple of.
PAGE_SIZE_MULTIPLE = 16
#: Query rows per KV head (seqlen_q * nheads / nheads_k) that one tile of a decode kernel holds.
MAX_DECODE_ROWS = 64
