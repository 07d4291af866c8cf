"""flash_attn_turing: the functions of that package, made of volta_fa."""

from volta_fa.integrations.flash_attn.turing import *
from volta_fa.integrations.flash_attn.turing import __all__ as __all__
