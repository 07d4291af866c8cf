"""Measures the cost of options on this machine's GPU, as a share of the plain pass, beside PyTorch's kernels.

    python -m benchmarks.features [--shapes 1,32,2048,2048,64 4,32,8192,8192,128] [--json FILE]

TFLOP/s are of the whole op in fp16: 4 * B * H * M * N * D operations forward and 10 backward, half for causal. PyTorch's
figures are for the plain problem: its memory-efficient kernels and FlashAttention, where available. A bias is
(1, H, M, N), a mask (B, 1, M, N).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

import volta_fa  # noqa: F401  (loads the ops)
from volta_fa.errors import CommandError

from . import report
from .measure import median_ms
from .shapes import Shape

SHAPES = [f"{b},32,{n},{n},{d}" for b, n in ((4, 8192), (1, 2048)) for d in (64, 128, 256)]
#: Matrices of biases and masks are left out where they take more.
MOST_BYTES = 8 << 30


def options(s: Shape, feature: str) -> dict | None:
    """The op's arguments; None if that does not fit."""
    half = {"device": "cuda", "dtype": torch.float16}
    scores = {"bias": s.nheads, "bias with its gradient": s.nheads, "mask": s.batch}.get(feature, 0) * s.seqlen_q * s.seqlen_k
    if 2 * scores > MOST_BYTES:
        return None
    match feature:
        case "causal":
            return {"is_causal": True}
        case "packed":
            ends = torch.arange(s.batch + 1, device="cuda", dtype=torch.int32)
            lengths = {"max_seqlen_q": s.seqlen_q, "max_seqlen_k": s.seqlen_k}
            return {"cu_seqlens_q": ends * s.seqlen_q, "cu_seqlens_k": ends * s.seqlen_k, **lengths}
        case "softcap":
            return {"softcap": 30.0}
        case "ALiBi":
            return {"alibi_slopes": torch.linspace(0.01, 0.5, s.nheads, device="cuda")}
        case "bias" | "bias with its gradient":
            return {"attn_bias": torch.randn(1, s.nheads, s.seqlen_q, s.seqlen_k, **half)}
        case "mask":
            return {"attn_bias": torch.rand(s.batch, 1, s.seqlen_q, s.seqlen_k, device="cuda") > 0.1}
        case "dropout":
            return {"dropout_p": 0.1}
    return {}


FEATURES = ("plain", "causal", "packed", "softcap", "ALiBi", "bias", "mask", "bias with its gradient", "dropout", "deterministic")


def ours(s: Shape, tensors: list[Tensor], feature: str) -> dict[str, float]:
    """Milliseconds by pass."""
    given = options(s, feature)
    if given is None:
        return {}
    q, k, v, dout = (t.flatten(0, 1) for t in tensors) if feature == "packed" else tensors
    device = q.device
    out, lse, rng_state = torch.ops.volta_fa.fwd(q, k, v, **given)
    of_backward = {
        "rng_state": rng_state,
        "attn_bias_requires_grad": feature == "bias with its gradient",
        "deterministic": feature == "deterministic",
    }
    times = {"backward": median_ms(lambda: torch.ops.volta_fa.bwd(dout, q, k, v, out, lse, **of_backward, **given), device, 0.1)}
    if feature not in ("deterministic", "bias with its gradient"):
        times["forward"] = median_ms(lambda: torch.ops.volta_fa.fwd(q, k, v, **given), device, 0.1)
    return times


def pytorchs(tensors: list[Tensor], name: str, is_causal: bool) -> dict[str, float]:
    """The same of the aten ops; empty where they do not have the problem."""
    q, k, v, dout = (t.transpose(1, 2).contiguous() for t in tensors)
    aten, device = torch.ops.aten, q.device
    forward: Callable[[], tuple]
    try:
        if name == "memory-efficient":
            forward = lambda: aten._scaled_dot_product_efficient_attention(q, k, v, None, True, 0.0, is_causal)  # noqa: E731
            out, lse, seed, offset = forward()
            backward = lambda: aten._scaled_dot_product_efficient_attention_backward(  # noqa: E731
                dout, q, k, v, None, out, lse, seed, offset, 0.0, [True, True, True, False], is_causal
            )
        else:
            forward = lambda: aten._scaled_dot_product_flash_attention(q, k, v, 0.0, is_causal)  # noqa: E731
            out, lse, cum_q, cum_k, max_q, max_k, seed, offset, _ = forward()
            backward = lambda: aten._scaled_dot_product_flash_attention_backward(  # noqa: E731
                dout, q, k, v, out, lse, cum_q, cum_k, max_q, max_k, 0.0, is_causal, seed, offset
            )
        return {"forward": median_ms(forward, device, 0.1), "backward": median_ms(backward, device, 0.1)}
    except RuntimeError:
        return {}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.features", description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", nargs="+", default=SHAPES, metavar="B,H,M,N,D")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here too")
    chosen = parser.parse_args(arguments)
    shapes = [Shape.parse(text) for text in chosen.shapes]
    if not torch.cuda.is_available():
        raise CommandError("benchmarks.features: needs a CUDA device, and this machine has none")
    rows = []
    for s in report.track(shapes, "shapes"):
        tensors = [
            torch.randn(s.batch, n, s.nheads, s.headdim, device="cuda", dtype=torch.float16)
            for n in (s.seqlen_q, s.seqlen_k, s.seqlen_k, s.seqlen_q)
        ]
        plain: dict[str, float] = {}
        for feature in (*FEATURES, *(f"{name}{causal}" for name in ("memory-efficient", "FlashAttention") for causal in ("", ", causal"))):
            is_causal = feature.endswith("causal")
            own = feature in FEATURES
            times = ours(s, tensors, feature) if own else pytorchs(tensors, feature.split(",")[0], is_causal)
            counted = replace(s, causal=is_causal)
            flops = {"forward": counted.forward_flops, "backward": counted.backward_flops}
            rates = {name: flops[name] / ms / 1e9 for name, ms in times.items()}
            if feature == "plain":
                plain = rates
            cells = [f"{name} {rate:6.1f} TFLOP/s {rate / plain[name]:5.2f}" for name, rate in sorted(rates.items(), reverse=True)]
            print(f"{s} {feature:26s} {' | '.join(cells) or 'not measured'}", flush=True)
            rows.append({"shape": str(s), "feature": feature, **rates})
    if chosen.json:
        chosen.json.write_text(json.dumps(rows, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
