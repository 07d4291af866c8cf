"""flash_attn.flash_attn_interface: volta_fa's module of that name, and what other packages look for in it."""

from typing import NoReturn

from volta_fa.integrations.flash_attn.interface import *
from volta_fa.integrations.flash_attn.interface import __all__ as __all__


class _NoExtension:
    """xformers and unsloth look for flash-attn's compiled module when they are imported, and xformers calls it on GPUs
    of compute capability 8.0 and above."""

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"volta_fa: flash_attn_gpu.{name}: flash-attn's compiled module is not here; call flash_attn's functions")


flash_attn_gpu = _NoExtension()
