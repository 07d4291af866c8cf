"""flash_attn.ops: of its ops, the rotary function alone."""
