"""flash_attn_turing, a package of flash attention for Turing GPUs, for programs that import it: its functions, computed by volta_fa.
`volta_fa.install_flash_attn_shim()` makes it importable."""

from volta_fa.integrations.flash_attn.turing import *
from volta_fa.integrations.flash_attn.turing import __all__ as __all__
