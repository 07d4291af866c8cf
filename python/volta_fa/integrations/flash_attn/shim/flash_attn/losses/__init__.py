"""flash_attn.losses: cross entropy."""
