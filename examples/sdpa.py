"""Existing PyTorch code, one line added: its scaled_dot_product_attention runs volta_fa. Prints volta_fa's counters of such calls.

    python examples/sdpa.py         (in a checkout: PYTHONPATH=python .venv/bin/python examples/sdpa.py)

`sdpa_stats` counts calls that volta_fa ran, and those left to PyTorch, by reason. Without a Volta or Turing GPU all runs on the CPU.
"""

import torch
import torch.nn.functional as F

import volta_fa


class Block(torch.nn.Module):
    """Causal self-attention as in existing model code, which does not know volta_fa."""

    def __init__(self, width: int = 128, nheads: int = 4):
        super().__init__()
        self.nheads = nheads
        self.qkv = torch.nn.Linear(width, 3 * width)
        self.out = torch.nn.Linear(width, width)

    def forward(self, x):
        b, s, w = x.shape
        q, k, v = self.qkv(x).view(b, s, 3, self.nheads, -1).permute(2, 0, 3, 1, 4)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(out.transpose(1, 2).reshape(b, s, w))


def main():
    try:
        volta_fa.enable_sdpa()  # the one line
        device, dtype = "cuda", torch.float16
    except RuntimeError as error:
        print(error)
        volta_fa.enable_sdpa("cpu")
        device, dtype = "cpu", torch.float32

    torch.manual_seed(0)
    block = Block().to(device, dtype)
    encoder = torch.nn.TransformerEncoderLayer(128, 4, batch_first=True).to(device, dtype)  # with its dropout
    x = torch.randn(2, 50, 128, device=device, dtype=dtype)  # (batch, seqlen, width)

    (block(x) + encoder(x)).float().square().mean().backward()
    print("two layers, forward and backward:", volta_fa.sdpa_stats(reset=True))

    mask = torch.ones(50, 50, device=device, dtype=torch.bool).tril(4)
    q = torch.randn(2, 4, 50, 30, device=device, dtype=dtype)  # (batch, nheads, seqlen, headdim), PyTorch's order
    F.scaled_dot_product_attention(q, q, q, attn_mask=mask, dropout_p=0.1)
    print("a mask, dropout and a headdim to pad:", volta_fa.sdpa_stats(reset=True))

    q = torch.randn(2, 4, 50, 520, device=device, dtype=dtype)
    F.scaled_dot_product_attention(q, q, q)
    print("headdim 520, which is above volta_fa's limit of 512, so PyTorch runs it:", volta_fa.sdpa_stats(reset=True))

    volta_fa.disable_sdpa()
    with volta_fa.sdpa_enabled(device):
        block(x)
    block(x)
    print("one call inside the context manager, one outside:", volta_fa.sdpa_stats())


if __name__ == "__main__":
    main()
