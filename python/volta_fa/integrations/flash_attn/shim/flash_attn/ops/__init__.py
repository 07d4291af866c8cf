"""flash_attn.ops: RMS norm, and what is in `triton`."""
