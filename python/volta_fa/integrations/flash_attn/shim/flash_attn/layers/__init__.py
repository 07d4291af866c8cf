"""flash_attn.layers: of its layers, rotary embeddings alone."""
