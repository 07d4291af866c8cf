"""flash_attn.ops.triton.layer_norm: plain PyTorch."""

from volta_fa.integrations.flash_attn.norms import RMSNorm as RMSNorm
from volta_fa.integrations.flash_attn.norms import layer_norm_fn as layer_norm_fn
from volta_fa.integrations.flash_attn.norms import layer_norm_linear_fn as layer_norm_linear_fn
from volta_fa.integrations.flash_attn.norms import layer_norm_ref as layer_norm_ref
from volta_fa.integrations.flash_attn.norms import rms_norm_fn as rms_norm_fn
from volta_fa.integrations.flash_attn.norms import rms_norm_ref as rms_norm_ref
