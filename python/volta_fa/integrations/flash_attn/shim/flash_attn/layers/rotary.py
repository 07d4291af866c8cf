"""flash_attn.layers.rotary: volta_fa.rotary."""

from volta_fa.rotary import *
from volta_fa.rotary import __all__ as __all__
