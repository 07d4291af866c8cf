"""Runs PyTorch's FlexAttention interface on volta_fa and compares it with eager attention in fp64.

The mask: packed documents of 300 tokens, causal, except that tokens 50 to 129 of each document (an image) see each other.
The score function is a softcap of 30. `python examples/flex.py --device cpu` needs no GPU.
"""

import argparse

import torch
from torch.nn.attention.flex_attention import create_block_mask

import volta_fa

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
parser.add_argument("--seqlen", type=int, default=1024)
options = parser.parse_args()

device, seqlen, nheads, headdim = torch.device(options.device), options.seqlen, 4, 64
dtype = torch.float16 if device.type == "cuda" else torch.float32
query, key, value = (torch.randn(1, nheads, seqlen, headdim, device=device, dtype=dtype, requires_grad=True) for _ in range(3))

document = torch.arange(seqlen, device=device) // 300
image = (torch.arange(seqlen, device=device) % 300 >= 50) & (torch.arange(seqlen, device=device) % 300 < 130)


def mask_mod(b, h, q, kv):
    return (document[q] == document[kv]) & ((q >= kv) | (image[q] & image[kv]))


def score_mod(score, b, h, q, kv):
    return 30.0 * torch.tanh(score / 30.0)


block_mask = create_block_mask(mask_mod, B=None, H=None, Q_LEN=seqlen, KV_LEN=seqlen, device=device)
out = volta_fa.flex_attention(query, key, value, score_mod, block_mask)
out.sum().backward()

mask = volta_fa.BlockMask.from_torch(block_mask)
print(f"{mask.sparsity():.0f}% of the blocks of scores are masked completely: the kernels skip them")
print(f"the mask takes {mask.nbytes / 1024:.0f} KB, a dense one {seqlen * seqlen / 1024:.0f} KB")

scores = 30.0 * torch.tanh((query.double() @ key.double().mT) * headdim**-0.5 / 30.0)
expected = scores.masked_fill(~mask.dense(), float("-inf")).softmax(-1) @ value.double()
assert (out - expected).abs().max() < (5e-3 if dtype == torch.float16 else 1e-5)
print(f"agrees with eager attention in fp64: largest error {(out - expected).abs().max().item():.1e}")
