"""Public name of `volta_fa.integrations.flash_attn.install`: the stand-in for flash-attn's package."""

from .integrations.flash_attn.install import install_flash_attn_shim

__all__ = ["install_flash_attn_shim"]
