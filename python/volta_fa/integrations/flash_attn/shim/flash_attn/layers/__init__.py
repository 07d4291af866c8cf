"""flash_attn.layers: rotary embeddings are the layers that are here."""
