"""Activation checkpointing: trading memory for a second forward pass, with attention recomputed or kept.

    python examples/checkpointing.py         (in a checkout: PYTHONPATH=python .venv/bin/python examples/checkpointing.py)

Plain checkpointing recomputes all of a block, dropout included: the second pass drops the same. Selective checkpointing
asks a policy, which sees attention as one op and keeps its result, the most expensive one to make again. Gradients are those
without checkpointing to the bit, and, without dropout, those of PyTorch's own attention.
"""

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import volta_fa  # noqa: F401  registers the op


class Block(torch.nn.Module):
    def __init__(self, width: int = 64, nheads: int = 4, dropout_p: float = 0.0):
        super().__init__()
        self.nheads, self.dropout_p = nheads, dropout_p
        self.qkv, self.out = torch.nn.Linear(width, 3 * width), torch.nn.Linear(width, width)

    def forward(self, x, ours: bool = True):
        q, k, v = self.qkv(x).unflatten(-1, (3, self.nheads, -1)).unbind(2)
        if ours:
            # deterministic: so that two backward passes can be compared to the bit on a GPU
            out = torch.ops.volta_fa.fwd(q, k, v, is_causal=True, dropout_p=self.dropout_p, deterministic=True)[0]
        else:
            out = F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)), is_causal=True).transpose(1, 2)
        return x + self.out(out.flatten(2))


def keep_attention(context, op, *args, **kwargs):
    return CheckpointPolicy.MUST_SAVE if op is torch.ops.volta_fa.fwd.default else CheckpointPolicy.PREFER_RECOMPUTE


WAYS = {
    "plain": lambda block, x: checkpoint(block, x, use_reentrant=False),
    "plain, reentrant": lambda block, x: checkpoint(block, x, use_reentrant=True),
    "selective": lambda block, x: checkpoint(
        block, x, use_reentrant=False, context_fn=lambda: create_selective_checkpoint_contexts(keep_attention)
    ),
}


def gradients(blocks, x, run) -> list[torch.Tensor]:
    torch.manual_seed(1)  # the same dropout in every run
    x = x.detach().requires_grad_()
    out = x
    for block in blocks:
        out = run(block, out)
    blocks.zero_grad()
    out.float().square().mean().backward()
    return [x.grad, *(p.grad for p in blocks.parameters())]


def main():
    device, dtype = ("cuda", torch.float16) if torch.cuda.is_available() else ("cpu", torch.float32)
    for dropout_p in (0.0, 0.2):
        torch.manual_seed(0)
        blocks = torch.nn.ModuleList(Block(dropout_p=dropout_p) for _ in range(2)).to(device, dtype)
        x = torch.randn(2, 50, 64, device=device, dtype=dtype)
        expected = gradients(blocks, x, lambda block, x: block(x))
        for how, run in WAYS.items():
            assert all(map(torch.equal, gradients(blocks, x, run), expected)), how
            print(f"dropout {dropout_p}, {how}: gradients equal to the bit")
        if dropout_p == 0:
            tolerance = {"rtol": 2e-2, "atol": 2e-3} if device == "cuda" else {"rtol": 1e-4, "atol": 1e-6}
            for a, b in zip(expected, gradients(blocks, x, lambda block, x: block(x, ours=False)), strict=True):
                torch.testing.assert_close(a, b, **tolerance)


if __name__ == "__main__":
    main()
