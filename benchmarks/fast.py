"""volta_fa::fwd_fast beside volta_fa::fwd on a simulated RTX 2080 Ti and T4: TFLOP/s of the whole call and of its forward kernel.

    python -m benchmarks.fast [--gpu rtx2080ti] [--headdim 64] [--seqlen N ...] [--case plain causal mask packed] [--rows ROWS]
                              [--settings icache=false] [--every-length] [--json FILE]

A head for each SM, fp16. Each case calls the operators on CPU tensors with VOLTA_FA_SIMULATE=timing, as benchmarks.volta does. Nothing
here is measured. TFLOP/s count 4 * headdim operations for each pair of query and key, half of the pairs if causal, all of them under a
boolean mask, which hides a tenth at random. Packed: two sequences on half of the heads. With --rows, the last rows of the queries alone
are simulated, and the forward kernel's time counts for all rows in proportion. --every-length runs the fast kernels below the length
that the planner wants, too.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import torch

from . import report
from .measure import aligned, simulated

#: SMs of each GPU, as tools/volta-sim/src/machine.rs has them.
SMS = {"rtx2080ti": 68, "t4": 40}
CASES = ("plain", "causal", "mask", "packed")


def row(gpu: str, headdim: int, seqlen: int, case: str, settings: str = "", rows: int | None = None) -> dict[str, Any]:
    """Returns the case with the TFLOP/s of fwd_fast, of its forward kernel alone and of fwd, and microseconds of the first two."""
    generator = torch.Generator().manual_seed(1)
    rows, batch = rows or seqlen, 2 if case == "packed" else 1
    heads = SMS[gpu] // batch
    q, k, v = (aligned((batch, n, heads, headdim), torch.float16).normal_(generator=generator) for n in (rows, seqlen, seqlen))
    options: dict[str, Any] = {"is_causal": case == "causal"}
    if case == "packed":
        q, k, v = (t.flatten(0, 1) for t in (q, k, v))
        lengths = torch.arange(batch + 1, dtype=torch.int32)
        options |= {"cu_seqlens_q": lengths * rows, "cu_seqlens_k": lengths * seqlen, "max_seqlen_q": rows, "max_seqlen_k": seqlen}
    mask = torch.rand(1, 1, rows, seqlen, generator=generator) > 0.1 if case == "mask" else None
    # rows that were left out see fewer keys under a causal mask: pairs of those that ran count
    pairs = rows * seqlen - (rows * (rows - 1) / 2 if case == "causal" else 0)
    tflop_us = 4 * headdim * SMS[gpu] * pairs / 1e6

    def us(op: torch._ops.OpOverloadPacket, **of_op: Any) -> list[float]:
        reports = simulated(lambda: op(q, k, v, **options, **of_op), settings, gpu)
        return [r["timing"]["kernel_us"] for r in reports]

    fast, exact = us(torch.ops.volta_fa.fwd_fast, attn_mask=mask), us(torch.ops.volta_fa.fwd, attn_bias=mask)
    found = {"gpu": gpu, "headdim": headdim, "seqlen": seqlen, "case": case, "rows": rows}
    of_call = sum(fast[:-1]) * rows / seqlen + fast[-1]
    times = {"prepare_us": sum(fast[:-1]), "kernel_us": fast[-1]}
    return found | {"fwd_fast": tflop_us / of_call, "kernel": tflop_us / fast[-1], "fwd": tflop_us / sum(exact)} | times


def use_fast_kernels(headdim: int) -> None:
    """Tunes the planner to the fast kernel without lengths and masks, for any length."""
    choice = {"pass": "FastForward", "variant": f"turing_fast_fwd_{headdim}x{headdim}"}
    torch.ops.volta_fa._set_tuning(json.dumps({"format": 1, "choices": [choice]}))


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpu", nargs="+", default=list(SMS), choices=list(SMS))
    parser.add_argument("--headdim", type=int, nargs="+", default=[64, 128, 256])
    parser.add_argument("--seqlen", type=int, nargs="+", default=[2048])
    parser.add_argument("--case", nargs="+", default=["plain"], choices=CASES)
    parser.add_argument("--rows", type=int)
    parser.add_argument("--settings", default="", help="of volta-sim; default: its default model")
    parser.add_argument("--every-length", action="store_true")
    parser.add_argument("--json", type=Path, metavar="FILE")
    a = parser.parse_args(arguments)
    found = []
    print("| GPU | keys | case | headdim | fwd_fast | its forward kernel | fwd |\n" + "| --- " * 7 + "|")
    for gpu, seqlen, case, headdim in report.track(product(a.gpu, a.seqlen, a.case, a.headdim), "rows"):
        if a.every_length:
            use_fast_kernels(headdim)
        figures = row(gpu, headdim, seqlen, case, a.settings, a.rows)
        found.append(figures)
        cells = " | ".join(f"{figures[name]:.1f}" for name in ("fwd_fast", "kernel", "fwd"))
        print(f"| {gpu} | {seqlen} | {case} | {headdim} | {cells} |", flush=True)
    torch.ops.volta_fa._set_tuning("")
    if a.json:
        a.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
