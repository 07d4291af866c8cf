"""Mixed-precision training, as one trains on a V100: weights in fp32, attention in fp16, a gradient scaler.

    python examples/autocast_training.py     (in a checkout: PYTHONPATH=python .venv/bin/python examples/autocast_training.py)

Two copies of a model learn the same task, one with volta_fa, one with PyTorch's attention, and stay together. One step has
gradients that overflow: the scaler skips it and halves its scale. On a machine without a GPU all of it runs on the CPU.
"""

import copy

import torch
import torch.nn.functional as F

import volta_fa  # noqa: F401  registers the op


def ours(q, k, v):
    return torch.ops.volta_fa.fwd(q, k, v, is_causal=True)[0]


def theirs(q, k, v):
    return F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)), is_causal=True).transpose(1, 2)


class Model(torch.nn.Module):
    def __init__(self, attention, width: int = 64, nheads: int = 4):
        super().__init__()
        self.attention, self.nheads = attention, nheads
        self.embedding = torch.nn.Embedding(16, width)
        self.qkv = torch.nn.Linear(width, 3 * width)
        self.head = torch.nn.Linear(width, 16)

    def forward(self, tokens):
        x = self.embedding(tokens)
        # under autocast the linear layer returns fp16, and the op casts what is not
        q, k, v = self.qkv(x).unflatten(-1, (3, self.nheads, -1)).unbind(2)
        return self.head(x + self.attention(q, k, v).flatten(2))


def train(model, tokens, device: str, steps: int = 30) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scaler = torch.amp.GradScaler(device, init_scale=2.0**12)
    losses, skipped = [], 0
    for step in range(steps):
        optimizer.zero_grad()
        with torch.autocast(device, torch.float16):
            # the task: say the token before this one
            loss = F.cross_entropy(model(tokens)[:, 1:].flatten(0, 1).float(), tokens[:, :-1].flatten())
        blow_up = 1e30 if step == 10 else 1.0
        scaler.scale(loss * blow_up).backward()
        before = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        skipped += scaler.get_scale() < before
        losses.append(loss.item())
    assert skipped == 1 and scaler.get_scale() == 2.0**11
    return losses


def main():
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    model = Model(ours).to(device)
    other = copy.deepcopy(model)
    other.attention = theirs
    tokens = torch.randint(16, (8, 32), device=device)
    found, expected = train(model, tokens, device), train(other, tokens, device)
    assert model.qkv.weight.dtype == model.qkv.weight.grad.dtype == torch.float32
    print(f"loss {found[0]:.3f} -> {found[-1]:.3f}, with PyTorch's attention {expected[0]:.3f} -> {expected[-1]:.3f}, one step skipped")
    assert found[-1] < 0.8 * found[0]
    torch.testing.assert_close(found, expected, rtol=0.02, atol=0)


if __name__ == "__main__":
    main()
