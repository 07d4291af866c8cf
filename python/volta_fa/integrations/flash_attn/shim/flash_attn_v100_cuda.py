"""flash_attn_v100_cuda, the compiled module of flash_attn_v100 (a package for V100s): its functions, computed by volta_fa.
fwd and bwd take (batch, nheads, seqlen, headdim)."""

from volta_fa.integrations.flash_attn.v100 import bwd, fwd, fwd_kvcache, varlen_bwd, varlen_fwd

__all__ = ["bwd", "fwd", "fwd_kvcache", "varlen_bwd", "varlen_fwd"]
