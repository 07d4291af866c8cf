"""Measures the error of attention over a quantized KV cache, beside the error over fp16, in fp64.

    python -m benchmarks.kv_accuracy [--outliers 8]

Keys and values are normally distributed. With `--outliers`, 2 of 128 channels of the keys are that many times larger,
as in trained models (KIVI, Liu et al. 2024; KVQuant, Hooper et al. 2024). Queries resemble some of the keys, so a few
tokens have most of the weight. The error is the root mean square difference from attention over unrounded numbers,
relative to the output's root mean square. "rotated" multiplies keys and queries by a Hadamard matrix first, which
preserves their products and spreads each channel over all.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch
from torch import Tensor

from volta_fa.kv_cache.formats import KV_DTYPES, dequantize_kv, hadamard, quantize_kv

from . import report

HEADDIM, NHEADS, QUERIES = 128, 4, 16


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """q (queries, heads, headdim), k and v (tokens, heads, headdim), all in fp64."""
    scores = torch.einsum("qhd,thd->hqt", q, k) / HEADDIM**0.5
    return torch.einsum("hqt,thd->qhd", scores.softmax(-1), v)


def stored(x: Tensor, kv_dtype: str) -> Tensor:
    if kv_dtype == "fp16":
        return x.half().double()
    made = quantize_kv(x.half(), kv_dtype)
    return dequantize_kv(made.data, kv_dtype, made.scale, made.zero_point, dtype=torch.float64)


def errors(seqlen: int, outliers: float, seed: int = 0) -> dict[str, float]:
    generator = torch.Generator().manual_seed(seed)
    k, v = (torch.randn(seqlen, NHEADS, HEADDIM, generator=generator, dtype=torch.float64) for _ in "kv")
    liked = k[torch.randint(seqlen, (QUERIES,), generator=generator)]
    q = torch.randn(QUERIES, NHEADS, HEADDIM, generator=generator, dtype=torch.float64) + 0.7 * liked
    k[..., [5, 70]] *= outliers
    q[..., [5, 70]] /= outliers
    exact = attend(q, k, v)
    turn = hadamard(HEADDIM) / HEADDIM**0.5
    found = {}
    for name in ("fp16", *KV_DTYPES):
        for suffix, (qq, kk) in {"": (q, k), ", rotated": (q @ turn, k @ turn)}.items():
            out = attend(qq, stored(kk, name), stored(v, name))
            found[name + suffix] = ((out - exact).square().mean() / exact.square().mean()).sqrt().item()
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kv_accuracy", description=__doc__.splitlines()[0])
    parser.add_argument("--outliers", type=float, default=8.0)
    options = parser.parse_args(arguments)
    for seqlen in report.track((1024, 4096, 16384, 65536), "lengths"):
        row = errors(seqlen, options.outliers)
        print(f"{seqlen:6d}  " + "  ".join(f"{name} {100 * error:.3g}%" for name, error in row.items()), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
