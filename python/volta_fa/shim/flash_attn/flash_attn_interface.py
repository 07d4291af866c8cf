from volta_fa.flash_attn_interface import (
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


class _NoExtension:
    """xformers and unsloth look for flash-attn's compiled module when they are imported, and xformers calls it on GPUs
    of compute capability 8.0 and above."""

    def __getattr__(self, name: str):
        raise AttributeError(
            f"volta_fa: flash_attn_gpu.{name}: flash-attn's compiled module is not here; call flash_attn's functions"
        )


flash_attn_gpu = _NoExtension()
