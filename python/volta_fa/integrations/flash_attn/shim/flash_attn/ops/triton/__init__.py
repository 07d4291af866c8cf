"""flash_attn.ops.triton: where flash-attn has its rotary function. Here it is plain PyTorch."""
