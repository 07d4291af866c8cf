"""flash_attn_v100: the functions of three packages for V100s, made of volta_fa. See volta_fa's docs/guides/flash-attn.md."""

from .flash_attn_interface import *
from .flash_attn_interface import __all__ as __all__

#: The release whose functions these are.
__version__ = "26.06"
