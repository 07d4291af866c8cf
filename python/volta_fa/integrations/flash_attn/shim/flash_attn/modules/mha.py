"""flash_attn.modules.mha: volta_fa's modules of these names."""

from volta_fa.integrations.flash_attn.mha import *
from volta_fa.integrations.flash_attn.mha import __all__ as __all__
