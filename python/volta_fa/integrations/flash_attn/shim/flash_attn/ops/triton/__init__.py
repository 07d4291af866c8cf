"""flash_attn.ops.triton: cross entropy, norms and rotary embeddings. volta_fa's are plain PyTorch."""
