"""Public name of `volta_fa.integrations.flash_attn.interface`: flash-attn's functions."""

from .integrations.flash_attn.interface import *
from .integrations.flash_attn.interface import __all__ as __all__
