"""flash_attn_v100: the functions of the packages of 2023, of 2026 and of 1Cat-vLLM, made of volta_fa (docs/guides/flash-attn.md there)."""

from .flash_attn_interface import *
from .flash_attn_interface import __all__ as __all__

#: The release of the package of 2026 that these functions follow.
__version__ = "26.06"
