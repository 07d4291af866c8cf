"""flash_attn_v100, the name of three packages for V100s (of 2023, of 2026, and of 1Cat-vLLM, a fork of vLLM), for programs that import one:
the functions of all three, computed by volta_fa. volta_fa's docs/guides/flash-attn.md describes them."""

import importlib

from volta_fa.integrations.flash_attn.v100 import *
from volta_fa.integrations.flash_attn.v100 import __all__ as __all__
from volta_fa.integrations.stand_in import provide_submodules

#: The release of the package of 2026 that these functions follow.
__version__ = "26.06"

provide_submodules({"flash_attn_v100.flash_attn_interface": "volta_fa.integrations.flash_attn.v100"})
importlib.import_module("flash_attn_v100.flash_attn_interface")  # programs that import the package alone use it
