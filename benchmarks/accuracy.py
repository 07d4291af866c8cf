"""Prints errors of volta_fa's attention against fp64, on easy and hard random inputs. Runs on the CPU.

    python -m benchmarks.accuracy fast            # volta_fa::fwd_fast, headdim 128, 2048 keys: the table of docs/guides/fast.md
    python -m benchmarks.accuracy fast --headdim 64 --seqlen-k 8192
    python -m benchmarks.accuracy fast --speeds FILE --plot FILE   # error against speed, of what benchmarks.tables fast --json wrote
    python -m benchmarks.accuracy kv [--outliers 8]                # attention over a quantized KV cache, beside the error over fp16

fwd_fast is the inference forward for Turing: Q K^T in int8, and sums of P V in fp16. On a CPU it models the kernels' rounding. The table
has eager fp16 attention and the exact volta_fa::fwd beside it.
In kv, keys and values are normally distributed. `--outliers F` makes 2 of 128 channels of the keys F times larger, as in trained models
(KIVI, Liu et al. 2024; KVQuant, Hooper et al. 2024). Queries resemble some of the keys, so a few tokens have most of the weight.
The error is the root mean square difference from attention over unrounded numbers, relative to the output's root mean square.
"rotated" multiplies keys and queries by an orthogonal Hadamard matrix first. Their products stay, and each channel spreads over all."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

import volta_fa  # noqa: F401  registers the operators

# CACHE_KV_DTYPES: the caches' formats, some a pair; parts_of(): the formats of keys and of values
from volta_fa.kv_cache.formats import CACHE_KV_DTYPES, dequantize_kv, hadamard, parts_of, quantize_kv

from . import report

fwd, fwd_fast = torch.ops.volta_fa.fwd, torch.ops.volta_fa.fwd_fast


def _bias_keys(k: Tensor) -> None:
    k[..., ::16] += 12 * torch.randn(k[..., ::16].shape[-1], generator=torch.Generator().manual_seed(7)).half()


#: By their names in the table and the plot, changes of standard normal q, k and v in place. Biased channels of K are 0, 16, 32, ..., of Q
#: 3, 35, 67, ...
INPUTS: dict[str, Callable[[Tensor, Tensor, Tensor], object]] = {
    "standard normal": lambda q, k, v: None,
    "every 16th channel of K shares a bias of deviation 12": lambda q, k, v: _bias_keys(k),
    "the same, and a bias of 8 on every 32nd channel of Q": lambda q, k, v: (_bias_keys(k), q[..., 3::32].add_(8)),
    "every 16th channel of K has 8 times the spread": lambda q, k, v: k[..., ::16].mul_(8),
    "logits of deviation 4": lambda q, k, v: q.mul_(4),
    "one key with V = 2000": lambda q, k, v: v[0, 100].fill_(2000),
}


def eager(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention as eager PyTorch computes it in fp16: products sum in fp32, and each result is rounded."""
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    scores = (q.float() @ k.float().mT).half() * q.shape[-1] ** -0.5
    p = torch.softmax(scores.float(), -1).half()
    return (p.float() @ v.float()).half().transpose(1, 2)


def errors(found: Tensor, expected: Tensor) -> tuple[float, float, float]:
    """Returns the cosine similarity, the L1 error over the L1 norm of `expected`, and the largest error over the largest output."""
    found = found.double()
    difference = found - expected
    cosine = (found * expected).sum() / math.sqrt(found.square().sum() * expected.square().sum())
    l1 = difference.abs().sum() / expected.abs().sum()
    return cosine.item(), l1.item(), (difference.abs().max() / expected.abs().max()).item()


def inputs(name: str, seqlen_q: int, seqlen_k: int, headdim: int) -> list[Tensor]:
    """Returns fp16 q, k and v of one head, (1, seqlen, 1, headdim), of a name in INPUTS. The seeds are fixed."""
    rows = (seqlen_q, seqlen_k, seqlen_k)
    q, k, v = (torch.randn(1, n, 1, headdim, generator=torch.Generator().manual_seed(i)).half() for i, n in enumerate(rows))
    INPUTS[name](q, k, v)
    return [q, k, v]


#: An RTX 2080 Ti's peak with fp32 sums in TFLOP/s (68 SMs, 512 operations a cycle, 1.545 GHz), and its memory's TB/s.
PEAK, BANDWIDTH = 53.8, 0.616


def eager_tflops(headdim: int) -> float:
    """Returns a bound in TFLOP/s on eager attention's speed: a query-key pair takes 4 * headdim operations, and its score crosses DRAM."""
    return 4 * headdim / (4 * headdim / PEAK + 4 * 2 / BANDWIDTH)  # 2 bytes, which Q K^T writes, softmax reads and writes, P V reads


def plot(speeds: Path, to: Path) -> None:
    """Draws relative L1 errors against simulated speeds, for normal inputs and for keys with wide channels, into the PNG `to`."""
    cases = {}  # by (seqlen, headdim): TFLOP/s by operator, fwd or fwd_fast; the plot has the first seqlen
    for r in json.loads(speeds.read_text()):
        case = r["row"]["case"]
        if r["row"]["gpu"] == "rtx2080ti" and case["kind"] == "plain":
            cases.setdefault((case["seqlen"], case["headdim"]), {})[case["op"]] = r["tflops"][0]  # [0]: by default machine constants
    (seqlen, _), *_ = cases
    figure, axes = report.panels(
        1, 2, f"Error against speed, RTX 2080 Ti (simulated; eager: at most), {seqlen} keys", (12, 4.2), sharey=True
    )
    for axis, kind in zip(axes.flat, ("standard normal", "every 16th channel of K has 8 times the spread")):
        axis.set(title=kind, xlabel="TFLOP/s, with all preparations", ylabel="relative L1 error", yscale="log", xlim=(0, 100))
        for (_, headdim), speed in cases.items():
            q, k, v = inputs(kind, 256, seqlen, headdim)
            expected = fwd(q.double(), k.double(), v.double())[0]  # exact: the CPU computes fp64
            for name, marker, tflops, out in (
                ("exact", "o", speed["fwd"], fwd(q, k, v)[0]),
                ("fast", "^", speed["fwd_fast"], fwd_fast(q, k, v)[0]),
                ("eager", "s", eager_tflops(headdim), eager(q, k, v)),
            ):
                error = errors(out, expected)[1]
                axis.plot([tflops], [error], marker, color=report.HEADDIM_COLORS[headdim], label=f"{name}, headdim {headdim}")
    report.shared_legend(figure, axes)
    report.save(figure, to)


# ---- quantized caches --------------------------------------------------------------------------------------------

HEADDIM, NHEADS, QUERIES = 128, 4, 16  # NHEADS: query heads and KV heads


def _attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Returns attention without a mask of q (queries, heads, headdim) over k and v (tokens, heads, headdim), all in fp64."""
    scores = torch.einsum("qhd,thd->hqt", q, k) / HEADDIM**0.5
    return torch.einsum("hqt,thd->qhd", scores.softmax(-1), v)


def _stored(x: Tensor, kv_dtype: str) -> Tensor:
    """Returns x in fp64 after rounding to a cache's format: "fp16" or the format of keys or of values in CACHE_KV_DTYPES."""
    if kv_dtype == "fp16":
        return x.half().double()
    made = quantize_kv(x.half(), kv_dtype)
    return dequantize_kv(made.data, kv_dtype, made.scale, made.zero_point, dtype=torch.float64)


def kv_errors(seqlen: int, outliers: float, seed: int = 0) -> dict[str, float]:
    """Returns the relative error (see the header) by cache format, as "int8", and by the same with ", rotated"."""
    generator = torch.Generator().manual_seed(seed)
    k, v = (torch.randn(seqlen, NHEADS, HEADDIM, generator=generator, dtype=torch.float64) for _ in "kv")
    resembled = k[torch.randint(seqlen, (QUERIES,), generator=generator)]  # one token for each query
    q = torch.randn(QUERIES, NHEADS, HEADDIM, generator=generator, dtype=torch.float64) + 0.7 * resembled
    k[..., [5, 70]] *= outliers  # two channels
    q[..., [5, 70]] /= outliers  # so the exact scores stay
    exact = _attend(q, k, v)
    rotation = hadamard(HEADDIM) / HEADDIM**0.5  # hadamard() has entries 1 and -1, so this is orthogonal
    found = {}
    for name in ("fp16", *CACHE_KV_DTYPES):
        key_format, value_format = parts_of(name) if name != "fp16" else (name, name)
        for suffix, (queries, keys) in {"": (q, k), ", rotated": (q @ rotation, k @ rotation)}.items():
            out = _attend(queries, _stored(keys, key_format), _stored(v, value_format))
            found[name + suffix] = ((out - exact).square().mean() / exact.square().mean()).sqrt().item()
    return found


def main(arguments: Sequence[str]) -> int:
    parser = report.parser("accuracy", __doc__, outputs=False)  # without --json, --plot and --markdown
    kinds = parser.add_subparsers(dest="kind", required=True)
    fast, kv = kinds.add_parser("fast"), kinds.add_parser("kv")
    fast.add_argument("--headdim", type=int, default=128)
    fast.add_argument("--seqlen-q", type=int, default=256)
    fast.add_argument("--seqlen-k", type=int, default=2048)
    fast.add_argument("--speeds", type=Path, metavar="FILE", help="what benchmarks.tables fast --json wrote")
    fast.add_argument("--plot", type=Path, metavar="FILE")
    kv.add_argument("--outliers", type=float, default=8.0)
    a = parser.parse_args(arguments)
    if a.kind == "kv":
        for seqlen in report.track((1024, 4096, 16384, 65536), "lengths"):
            row = kv_errors(seqlen, a.outliers)
            print(f"{seqlen:6d}  " + "  ".join(f"{name} {100 * error:.3g}%" for name, error in row.items()), flush=True)
    elif a.plot:
        plot(a.speeds, a.plot)
    else:
        fast_table(a)
    return 0


def fast_table(a: argparse.Namespace) -> None:
    """Prints a Markdown row for each of INPUTS: what `errors` returns of fwd_fast, and relative L1 errors of the others.

    `rotate=True`: fwd_fast multiplies q and k by a Hadamard matrix before it quantizes them."""
    print("| inputs | fwd_fast: cosine | relative L1 | largest | with rotate: L1 | fwd: L1 | eager: L1 |\n| --- " + "| --- " * 6 + "|")
    for name in report.track(INPUTS, "inputs"):
        q, k, v = inputs(name, a.seqlen_q, a.seqlen_k, a.headdim)
        expected = fwd(q.double(), k.double(), v.double())[0]
        cosine, l1, largest = errors(fwd_fast(q, k, v)[0], expected)
        others = (fwd_fast(q, k, v, rotate=True)[0], fwd(q, k, v)[0], eager(q, k, v))
        rest = " | ".join(f"{errors(out, expected)[1]:.4f}" for out in others)
        print(f"| {name} | {100 * cosine:.3f}% | {l1:.4f} | {largest:.3f} | {rest} |")


if __name__ == "__main__":
    report.command(main)
