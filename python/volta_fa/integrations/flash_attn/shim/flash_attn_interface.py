"""flash_attn_interface, FlashAttention 3's top-level module, for programs that import it: its functions, computed by volta_fa."""

from volta_fa.integrations.flash_attn.fa3 import *
from volta_fa.integrations.flash_attn.fa3 import __all__ as __all__
