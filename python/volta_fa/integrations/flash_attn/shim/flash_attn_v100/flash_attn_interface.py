"""flash_attn_v100.flash_attn_interface: what is in flash_attn_v100."""

from volta_fa.integrations.flash_attn.v100 import *
from volta_fa.integrations.flash_attn.v100 import __all__ as __all__
