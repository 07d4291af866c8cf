"""flash_attn_2_cuda: the functions of flash-attn's compiled module, made of volta_fa."""

from volta_fa.integrations.flash_attn.compiled import bwd, fwd, fwd_kvcache, varlen_bwd, varlen_fwd

__all__ = ["bwd", "fwd", "fwd_kvcache", "varlen_bwd", "varlen_fwd"]
