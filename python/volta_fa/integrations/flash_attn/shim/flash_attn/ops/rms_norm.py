"""flash_attn.ops.rms_norm: plain PyTorch."""

from volta_fa.integrations.flash_attn.norms import DropoutAddRMSNorm as DropoutAddRMSNorm
from volta_fa.integrations.flash_attn.norms import RMSNorm as RMSNorm
from volta_fa.integrations.flash_attn.norms import dropout_add_rms_norm as dropout_add_rms_norm
from volta_fa.integrations.flash_attn.norms import rms_norm as rms_norm
