"""flash_attn.ops.triton.cross_entropy: plain PyTorch."""

from volta_fa.integrations.flash_attn.cross_entropy import cross_entropy_loss as cross_entropy_loss
