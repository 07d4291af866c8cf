"""flash_attn.modules: attention alone."""
