"""flash-attn 2's package, made of volta_fa: for programs that import flash_attn. See volta_fa's docs/flash-attn.md."""

from .flash_attn_interface import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_with_kvcache,
)

__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
]

#: The release whose interface this is. Only the distribution's version says +volta, as flash-attn's own wheels do with
#: their local versions: programs split this one at its dots.
__version__ = "2.8.3"
