"""Defines a small GPT that takes its attention as an argument, and the attentions that the demo and benchmarks.training compare."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional

#: (q, k, v) -> out, all (batch, seqlen, nheads, headdim), causal.
Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def volta_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Computes attention with `volta_fa::fwd`; autograd calls `volta_fa::bwd`."""
    return torch.ops.volta_fa.fwd(q, k, v, is_causal=True)[0]


def torch_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Computes PyTorch's attention with the kernel that PyTorch chooses."""
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    return functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


class RoundedAttention:
    """PyTorch's attention with every output element, and so every incoming gradient, scaled by 1 + eps or 1 - eps. That moves them by one
    or two units in the last place. Training amplifies it like the rounding of any correct implementation. The demo's controls use it."""

    def __init__(self, seed: int):
        self._seed = seed
        self._generator: torch.Generator | None = None

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out = torch_attention(q, k, v)
        if self._generator is None:
            self._generator = torch.Generator(out.device).manual_seed(self._seed)
        sign = torch.randint(0, 2, out.shape, generator=self._generator, device=out.device, dtype=out.dtype) * 2 - 1
        return out * (1 + torch.finfo(out.dtype).eps * sign)


class SelfAttention(nn.Module):
    """Projects x, (batch, seqlen, nheads * headdim), to q, k and v, and the attention's result back."""

    def __init__(self, nheads: int, headdim: int, attention: Attention):
        super().__init__()
        self.nheads, self.headdim, self.attention = nheads, headdim, attention
        width = nheads * headdim
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.project = nn.Linear(width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # (batch, seqlen, 3, nheads, headdim): q, k and v are strided views, which the operator takes without copies
        q, k, v = self.qkv(x).unflatten(-1, (3, self.nheads, self.headdim)).unbind(2)
        return self.project(self.attention(q, k, v).flatten(2))


class Block(nn.Module):
    """A layer: attention and an MLP, each after a norm and added to its input."""

    def __init__(self, nheads: int, headdim: int, attention: Attention):
        super().__init__()
        width = nheads * headdim
        self.attention_norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = SelfAttention(nheads, headdim, attention)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class GPT(nn.Module):
    """Pre-norm decoder with learned positions; returns the mean cross entropy of predicting `target`."""

    def __init__(self, *, vocabulary: int, layers: int, nheads: int, headdim: int, seqlen: int, attention: Attention):
        super().__init__()
        width = nheads * headdim
        self.token = nn.Embedding(vocabulary, width)
        self.position = nn.Parameter(torch.zeros(seqlen, width))
        self.blocks = nn.Sequential(*(Block(nheads, headdim, attention) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.apply(_initialize)

    def forward(self, tokens: torch.Tensor, target: torch.Tensor, positions: torch.Tensor | None = None) -> torch.Tensor:
        """Computes the loss. `positions`: (seqlen) positions of a shard's tokens; from 0 on by default."""
        at = self.position[: tokens.shape[1]] if positions is None else self.position[positions]
        x = self.blocks(self.token(tokens) + at)
        return functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1).float(), target.flatten())


def _initialize(module: nn.Module) -> None:
    if isinstance(module, (nn.Linear, nn.Embedding)):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)
