"""Error of volta_fa::fwd_fast on easy and hard inputs, beside eager attention in fp16 and volta_fa::fwd, against fp64. Runs on the CPU.

python -m benchmarks.fast_error            # headdim 128, 2048 keys: the table of docs/guides/fast.md
python -m benchmarks.fast_error --headdim 64 --seqlen-k 8192
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable

import torch
from torch import Tensor

import volta_fa  # noqa: F401  registers the operators

fwd, fwd_fast = torch.ops.volta_fa.fwd, torch.ops.volta_fa.fwd_fast


def _normal(q: Tensor, k: Tensor, v: Tensor) -> None:
    """standard normal"""


def _biased_keys(q: Tensor, k: Tensor, v: Tensor) -> None:
    """every 16th channel of K shares a bias of deviation 12"""
    k[..., ::16] += 12 * torch.randn(k[..., ::16].shape[-1], generator=torch.Generator().manual_seed(7)).half()


def _biased_both(q: Tensor, k: Tensor, v: Tensor) -> None:
    """the same, and a bias of 8 on every 32nd channel of Q"""
    _biased_keys(q, k, v)
    q[..., 3::32] += 8


def _wide_keys(q: Tensor, k: Tensor, v: Tensor) -> None:
    """every 16th channel of K has 8 times the spread"""
    k[..., ::16] *= 8


def _sharp(q: Tensor, k: Tensor, v: Tensor) -> None:
    """logits of deviation 4"""
    q *= 4


def _outlier(q: Tensor, k: Tensor, v: Tensor) -> None:
    """one key with V = 2000"""
    v[0, 100] = 2000


INPUTS: tuple[Callable[[Tensor, Tensor, Tensor], None], ...] = (_normal, _biased_keys, _biased_both, _wide_keys, _sharp, _outlier)


def eager(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention as eager PyTorch computes it in fp16: products sum in fp32, and each result is rounded."""
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    scores = (q.float() @ k.float().mT).half() * q.shape[-1] ** -0.5
    p = torch.softmax(scores.float(), -1).half()
    return (p.float() @ v.float()).half().transpose(1, 2)


def errors(found: Tensor, expected: Tensor) -> tuple[float, float, float]:
    """Cosine, relative L1 error and largest error over the largest output."""
    found = found.double()
    difference = found - expected
    cosine = (found * expected).sum() / math.sqrt(found.square().sum() * expected.square().sum())
    l1 = difference.abs().sum() / expected.abs().sum()
    return cosine.item(), l1.item(), (difference.abs().max() / expected.abs().max()).item()


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--headdim", type=int, default=128)
    parser.add_argument("--seqlen-q", type=int, default=256)
    parser.add_argument("--seqlen-k", type=int, default=2048)
    a = parser.parse_args()
    print("| inputs | fwd_fast: cosine | relative L1 | largest | with rotate: L1 | fwd: L1 | eager: L1 |\n| --- " + "| --- " * 6 + "|")
    for change in INPUTS:
        rows = (a.seqlen_q, a.seqlen_k, a.seqlen_k)
        q, k, v = (torch.randn(1, n, 1, a.headdim, generator=torch.Generator().manual_seed(i)).half() for i, n in enumerate(rows))
        change(q, k, v)
        expected = fwd(q.double(), k.double(), v.double())[0]
        cosine, l1, largest = errors(fwd_fast(q, k, v)[0], expected)
        others = (fwd_fast(q, k, v, rotate=True)[0], fwd(q, k, v)[0], eager(q, k, v))
        rest = " | ".join(f"{errors(out, expected)[1]:.4f}" for out in others)
        print(f"| {change.__doc__} | {100 * cosine:.3f}% | {l1:.4f} | {largest:.3f} | {rest} |")


if __name__ == "__main__":
    main()
