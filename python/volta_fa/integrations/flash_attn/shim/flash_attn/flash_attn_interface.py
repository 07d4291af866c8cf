"""flash_attn.flash_attn_interface: flash-attn 2's public functions, private ones (`_flash_attn_forward`, ...) and compiled module, all
computed by volta_fa. `volta_fa.install_flash_attn_shim()` makes it importable."""

from volta_fa.integrations.flash_attn import compiled
from volta_fa.integrations.flash_attn.interface import *
from volta_fa.integrations.flash_attn.interface import __all__ as __all__
from volta_fa.integrations.flash_attn.private import *

#: The functions of flash-attn's compiled module. unsloth and xformers look for them here.
flash_attn_gpu = compiled

#: Whether flash_attn_gpu is the module for AMD GPUs.
USE_TRITON_ROCM = False
