"""flash_attn_v100.flash_attn_interface: what is in flash_attn_v100."""

from volta_fa.integrations.flash_attn import v100, v100_paged
from volta_fa.integrations.flash_attn.v100 import *
from volta_fa.integrations.flash_attn.v100_paged import *
from volta_fa.integrations.flash_attn.v100_paged import _flash_attn_forward as _flash_attn_forward

__all__ = [*v100.__all__, *v100_paged.__all__]
