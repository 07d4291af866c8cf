"""flash_attn.ops.triton.rotary: the function of volta_fa.rotary that has no gradient of its own."""

from volta_fa.rotary import apply_rotary as apply_rotary
