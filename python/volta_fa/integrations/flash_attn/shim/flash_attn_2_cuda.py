"""flash_attn_2_cuda, flash-attn 2's compiled module, for programs that import it: its functions, computed by volta_fa."""

from volta_fa.integrations.flash_attn.compiled import bwd, fwd, fwd_kvcache, varlen_bwd, varlen_fwd

__all__ = ["bwd", "fwd", "fwd_kvcache", "varlen_bwd", "varlen_fwd"]
