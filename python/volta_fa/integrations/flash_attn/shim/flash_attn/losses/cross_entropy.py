"""flash_attn.losses.cross_entropy: a module of plain PyTorch."""

from volta_fa.integrations.flash_attn.cross_entropy import CrossEntropyLoss as CrossEntropyLoss
from volta_fa.integrations.flash_attn.cross_entropy import cross_entropy_loss as cross_entropy_loss
