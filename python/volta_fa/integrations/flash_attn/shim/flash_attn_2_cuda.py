"""flash_attn_2_cuda, flash-attn 2's compiled module, for programs that import it: its functions, computed by volta_fa.
`volta_fa.install_flash_attn_shim()` makes it importable."""

from volta_fa.integrations.flash_attn.compiled import bwd, fwd, fwd_kvcache, varlen_bwd, varlen_fwd

__all__ = ["bwd", "fwd", "fwd_kvcache", "varlen_bwd", "varlen_fwd"]
