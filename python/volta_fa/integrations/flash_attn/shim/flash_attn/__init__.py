"""flash-attn 2's package, made of volta_fa: for programs that import flash_attn. See volta_fa's docs/guides/flash-attn.md."""

from .flash_attn_interface import *
from .flash_attn_interface import __all__ as __all__

#: The release whose interface this is. Only the distribution's version says +volta, as flash-attn's own wheels do with
#: their local versions: programs split this one at its dots.
__version__ = "2.8.3"
