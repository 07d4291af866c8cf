"""A training script written for flash-attn, one line added.

    python examples/flash_attn_training.py   (in a checkout: PYTHONPATH=python .venv/bin/python examples/flash_attn_training.py)

After the added line, `import flash_attn` imports volta_fa's replacement; the rest is as for flash-attn on a newer GPU. Padded documents
of different lengths are packed for attention and padded after it. Losses must agree with a training with PyTorch's attention.
"""

import volta_fa

volta_fa.install_flash_attn_shim()  # the one line, before anything imports flash_attn

import torch
import torch.nn.functional as F
from flash_attn import flash_attn_varlen_qkvpacked_func
from flash_attn.bert_padding import pad_input, unpad_input


def flash_attention(qkv, mask):
    """Returns causal attention of qkv (batch, seqlen, 3, nheads, headdim). `mask` (batch, seqlen) is False at padding."""
    batch, seqlen = mask.shape
    packed, indices, cu_seqlens, max_seqlen, _ = unpad_input(qkv, mask)
    out = flash_attn_varlen_qkvpacked_func(packed, cu_seqlens, max_seqlen, causal=True)
    return pad_input(out, indices, batch, seqlen)


def pytorch_attention(qkv, mask):
    # needs no mask: padding is on the right, and causal attention hides it from the tokens before it
    q, k, v = (t.transpose(1, 2) for t in qkv.unbind(2))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


class Model(torch.nn.Module):
    def __init__(self, width: int = 64, nheads: int = 4, vocabulary: int = 16):
        super().__init__()
        self.nheads = nheads
        self.embedding = torch.nn.Embedding(vocabulary, width)
        self.qkv = torch.nn.Linear(width, 3 * width)
        self.head = torch.nn.Linear(width, vocabulary)

    def forward(self, tokens, mask, attention):
        x = self.embedding(tokens)
        qkv = self.qkv(x).unflatten(-1, (3, self.nheads, -1))
        return self.head(x + attention(qkv, mask).flatten(2))


def train(attention, device: str, steps: int = 20) -> list[float]:
    torch.manual_seed(0)
    model = Model().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    tokens = torch.randint(16, (4, 30), device=device)
    mask = torch.arange(30, device=device) < torch.tensor([30, 11, 24, 5], device=device)[:, None]
    labels = tokens.roll(1, 1).masked_fill(~mask, -100)  # the task: say the token before this one
    labels[:, 0] = -100
    scaler = torch.amp.GradScaler(device, enabled=device == "cuda")
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        with torch.autocast(device, torch.float16, enabled=device == "cuda"):
            logits = model(tokens, mask, attention)
        loss = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    return losses


def main():
    device = "cuda" if torch.cuda.is_available() else "cpu"
    found, expected = (train(attention, device) for attention in (flash_attention, pytorch_attention))
    print(f"loss {found[0]:.3f} -> {found[-1]:.3f}, with PyTorch's attention {expected[0]:.3f} -> {expected[-1]:.3f}")
    assert found[-1] < 0.9 * found[0]
    torch.testing.assert_close(found, expected, rtol=2e-2 if device == "cuda" else 1e-4, atol=0)


if __name__ == "__main__":
    main()
