"""flash_attn.ops: the function under the rotary embeddings is the op that is here."""
