"""The benchmark `long_sequences` of benchmarks.tables, and its model of reads that miss L2, which benchmarks.pytorch_fmha uses too."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from . import report, volta
from .attention import Shape
from .driver import GPUS, MODELS, SPEEDS, Benchmark, Result, Row  # MODELS: the default and a perfect i-cache; SPEEDS: columns of both
from .report import Grid
from .volta import FORWARD

_TEXT = """Simulates forward passes of 8K to 115K tokens on a V100, whose L2 holds K and V of a head at the shortest lengths only.

L2 holds 24K tokens of headdim 64, or 12K of headdim 128. tools/volta-sim simulates one SM and lets reads of data that other SMs read hit
L2. That holds while blocks walk over K and V together. In a long grid they drift apart. Then a block finds in L2 only what others read
last: with blocks at independent places, the share C / S of its reads, for an L2 of C bytes and S > C bytes of K and V in a head. The rest
misses and comes from DRAM. This command simulates a share of misses above 0 by other machine constants: all reads, hits too, have DRAM's
latency, and L2's rate falls so far that the misses share DRAM's bandwidth.

One wave of blocks over 2048 keys stands for the call: each step over keys costs the same. Rows "bound" have miss shares of 0, 0.3 and 1, to
compare.
docs/validation/real-cards.md compares the model with PyTorch's kernel on real V100s.
"""
#: Of volta-sim's V100 (tools/volta-sim/src/machine.rs).
L2_BYTES = 6 << 20
L2_RATE, DRAM_RATE = 17.6, 6.4  # bytes per cycle and SM; DRAM: 783 GB/s over 80 SMs at 1.53 GHz
DRAM_LATENCY = 430  # cycles
LENGTHS = (8192, 16384, 32768, 65536, 115456)  # tokens; the last is a 720p video of HunyuanVideo


def miss_share(keys: int, headdim: int, l2_bytes: float = L2_BYTES) -> float:
    """Returns the share of a head's fp16 K and V reads that miss L2, with blocks at independent places. A key takes 4 * headdim bytes."""
    return max(0.0, 1.0 - l2_bytes / (4 * keys * headdim))


def machine(share: float) -> str:
    """Returns constants for VOLTA_FA_SIM_SET under which this share of reads misses L2. If it is above 0, all reads have DRAM's latency."""
    if share == 0:
        return ""
    rate = min(L2_RATE, DRAM_RATE / share)
    return f"l2_latency={DRAM_LATENCY},l2_bytes_per_clk={rate:.3f}"


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--headdims", type=int, nargs="+", default=[64, 128], metavar="D")
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS, metavar="N")
    parser.add_argument("--shares", type=float, nargs="*", default=(0.0, 0.3, 1.0), metavar="SHARE", help="of misses beside the model's")
    parser.add_argument("--keys", type=int, default=2048, help="keys that are simulated (default 2048)")


def rows(options: argparse.Namespace) -> list[Row]:
    found = []
    lengths = [(d, f"{n} tokens", miss_share(n, d)) for d in options.headdims for n in options.lengths]
    for d, length, share in lengths + [(d, "bound", share) for d in options.headdims for share in options.shares]:
        # batch 1, 2 heads, an SM's block of 128 query rows of each: so a block finds nothing in L1 that the SM's other block read
        case = volta.Case(FORWARD, Shape(1, 2, GPUS["v100"].sms * 128, options.keys, d))
        models = tuple(",".join(filter(None, (machine(share), model))) for model in MODELS)
        found.append(Row(f"{d}, {length}, {share:.0%} misses", case, models=models))
    return found


def grids(results: Sequence[Result], _: argparse.Namespace) -> list[Grid]:
    columns = {
        "headdim, length": lambda r: r.row.name.rpartition(", ")[0],
        "misses": lambda r: r.row.name.rpartition(", ")[2].removesuffix(" misses"),
        **SPEEDS,
    }
    return [report.table("Forward on a simulated V100, L2 misses modeled", results, columns)]


LONG_SEQUENCES = Benchmark(_TEXT, rows, grids, add_options)
