"""flash_attn_turing, a package of flash attention for Turing GPUs, for programs that import it: its functions, computed by volta_fa."""

from volta_fa.integrations.flash_attn.turing import *
from volta_fa.integrations.flash_attn.turing import __all__ as __all__
