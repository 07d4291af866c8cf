"""flash_attn.ops.triton: the place of flash-attn's rotary function. volta_fa's is plain PyTorch."""
