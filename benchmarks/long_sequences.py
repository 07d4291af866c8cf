"""Simulates forward passes of 8K to 115K tokens on a V100, where K and V of a head do not fit L2.

tools/volta-sim simulates one SM and lets reads of data that other SMs read hit L2. That holds while blocks walk over K and V together.
In a long grid they drift apart. Then a block finds in L2 only what others read last: with blocks at independent places, the share
C / S of its reads, for an L2 of C bytes and S bytes of K and V in a head. The rest comes from DRAM. This command simulates that share with
the machine's own constants: every read has DRAM's latency, the misses share DRAM's bandwidth, and the blocks of an SM share nothing.

One wave of blocks over 2048 keys stands for the call: each step over keys costs the same. Shares 0, 0.3 and 1 bound the model.
docs/validation/simulator.md compares the model with PyTorch's kernel on real V100s.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch

from . import report
from .measure import aligned, simulated
from .report import Grid

#: Of volta-sim's V100 (tools/volta-sim/src/machine.rs): bytes of L2; bytes a cycle and SM; cycles.
L2_BYTES = 6 << 20
L2_RATE, DRAM_RATE = 17.6, 6.4
DRAM_LATENCY = 430

LENGTHS = (8192, 16384, 32768, 65536, 115456)
SHARES = (0.0, 0.3, 1.0)
_SMS, _KEYS = 80, 2048


def miss_share(keys: int, headdim: int, l2_bytes: float = L2_BYTES) -> float:
    """Returns the share of reads of fp16 K and V that L2 misses, with blocks of a head at independent places."""
    return max(0.0, 1.0 - l2_bytes / (4 * keys * headdim))


def machine(share: float) -> str:
    """Returns constants for VOLTA_FA_SIM_SET under which this share of reads misses L2."""
    if share == 0:
        return ""
    rate = min(L2_RATE, DRAM_RATE / share)
    return f"l2_latency={DRAM_LATENCY},l2_bytes_per_clk={rate:.3f}"


def tflops(headdim: int, share: float, icache: bool, keys: int = _KEYS) -> float:
    """Returns the simulated speed of a wave of blocks: two on each SM, of 128 rows. They are of two heads, so that L1 serves no block with
    what the other read, as at independent places in one head."""
    rows = _SMS * 128
    q, k, v = (aligned((1, length, 2, headdim), torch.float16).normal_() for length in (rows, keys, keys))
    settings = ",".join(s for s in (machine(share), "" if icache else "icache=false") if s)
    reports = simulated(lambda: torch.ops.volta_fa.fwd(q, k, v), settings, "v100")
    return 8 * rows * keys * headdim / sum(r["timing"]["kernel_us"] for r in reports) / 1e6


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.long_sequences", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    report.add_output_options(parser, plot=False)
    parser.add_argument("--headdims", type=int, nargs="+", default=[64, 128], metavar="D")
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS, metavar="N")
    parser.add_argument("--shares", type=float, nargs="*", default=SHARES, metavar="SHARE", help="shares of misses beside the model's")
    parser.add_argument("--keys", type=int, default=_KEYS, help=f"keys that are simulated (default {_KEYS})")
    options = parser.parse_args(arguments)
    cases = [(d, f"{n} tokens", miss_share(n, d)) for d in options.headdims for n in options.lengths]
    cases += [(d, "bound", share) for d in options.headdims for share in options.shares]
    found: dict[tuple[int, float], tuple[float, float]] = {}
    with report.progress() as bar:
        task = bar.add_task("", total=len(cases))
        for headdim, _, share in cases:
            if (headdim, share) not in found:
                found[headdim, share] = tuple(tflops(headdim, share, icache, options.keys) for icache in (True, False))
            bar.advance(task)
    grid = Grid("Forward on a simulated V100, L2 misses modeled", ["headdim, length", "misses", "TFLOP/s", "perfect i-cache"])
    for headdim, length, share in cases:
        grid.rows.append([f"{headdim}, {length}", f"{share:.0%}", *(f"{speed:.1f}" for speed in found[headdim, share])])
    header = report.facts("long_sequences", arguments, **{"kind of figures": report.SIMULATED})
    rows = [{"headdim": d, "length": n, "share": s, "tflops": found[d, s][0], "tflops_no_icache": found[d, s][1]} for d, n, s in cases]
    report.deliver(options, header, [grid], rows)
    return 0


if __name__ == "__main__":
    report.command(main)
