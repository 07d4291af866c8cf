"""flash_attn_2_cuda: the functions of flash-attn's compiled module, made of volta_fa."""

from volta_fa.integrations.flash_attn.compiled import *
from volta_fa.integrations.flash_attn.compiled import __all__ as __all__
