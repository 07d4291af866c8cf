"""flash_attn_interface, FlashAttention 3's top-level module, for programs that import it: its functions, computed by volta_fa.
`volta_fa.install_flash_attn_shim()` puts this folder on sys.path."""

from volta_fa.integrations.flash_attn.fa3 import *
from volta_fa.integrations.flash_attn.fa3 import __all__ as __all__
