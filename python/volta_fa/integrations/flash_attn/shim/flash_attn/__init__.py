"""flash-attn 2's package, made of volta_fa, for programs that import flash_attn. `volta_fa.install_flash_attn_shim()` puts this folder's
parent on sys.path; tools/flash_attn_shim installs it with pip. See volta_fa's docs/guides/flash-attn.md."""

from volta_fa.integrations.stand_in import provide_submodules

from .flash_attn_interface import *
from .flash_attn_interface import __all__ as __all__

#: The release whose interface this is. Programs split it at its dots, so only the distribution's metadata has the suffix +volta.
__version__ = "2.8.3"

provide_submodules(
    {
        "flash_attn.bert_padding": "volta_fa.bert_padding",
        "flash_attn.layers.rotary": "volta_fa.rotary",
        "flash_attn.losses.cross_entropy": "volta_fa.integrations.flash_attn.cross_entropy",
        "flash_attn.modules.mha": "volta_fa.integrations.flash_attn.mha",
        "flash_attn.ops.rms_norm": "volta_fa.integrations.flash_attn.norms",
        "flash_attn.ops.triton.cross_entropy": "volta_fa.integrations.flash_attn.cross_entropy",
        "flash_attn.ops.triton.layer_norm": "volta_fa.integrations.flash_attn.norms",
        "flash_attn.ops.triton.rotary": "volta_fa.rotary",
    }
)
