"""Simulates PyTorch's memory-efficient kernel for headdim 128 on a V100 at long lengths, from the machine code in a torch wheel.

    unzip torch-2.7.1-*.whl torch/lib/libtorch_cuda.so        # has sm_70
    cargo build --release -p volta-sim
    python -m benchmarks.pytorch_kernel torch/lib/libtorch_cuda.so target/release/volta-sim

Nothing of PyTorch is in this repository. The wheel's fat binary holds the cubins compressed with LZ4 (`pip install lz4`).
The L2 misses are those of `benchmarks.long_sequences`. The kernel has blocks of 32 query rows, three on an SM, here of three heads. A small
output is compared with fp64 first.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path

from . import report, volta
from .long_sequences import LENGTHS, machine, miss_share
from .pytorch_fmha import error, job, kernels, tflops, write_cubins
from .report import Grid

HEADDIM, _SMS, _HEADS, _KEYS = 128, 80, 3, 2048
#: Milliseconds on real V100s (torch 2.9.1, 24 heads): S-i-l-v-e-t/ComfyUI-V100, guidelines/flash-attn-v100.md, 2026-08-25.
MEASURED_MS = {4096: 5.7, 8192: 23.1, 16384: 99.3, 32768: 492.9, 65536: 2701.2}
_MEASURED_HEADS = 24


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.pytorch_kernel", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("library", type=Path, help="libtorch_cuda.so of a torch with sm_70")
    parser.add_argument("simulator", type=Path, help="volta-sim's command")
    options = parser.parse_args(arguments)
    kernel = next(k for k in kernels(70) if k.computes(volta.FORWARD, HEADDIM))
    launch = job(kernel, _HEADS, _SMS * kernel.rows, _KEYS, has_files=False)
    grid = Grid("PyTorch's memory-efficient kernel, headdim 128", ["tokens", "misses", "simulated TFLOP/s", "perfect i-cache", "measured"])
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_cubins(options.library, 70, folder)
        print(f"largest error of a small output: {error(options.simulator, folder, kernel):.1e}")
        for length in report.track(sorted({*MEASURED_MS, *LENGTHS}), "lengths"):
            share = miss_share(length, HEADDIM)
            settings = [part for s in machine(share).split(",") if s for part in ("--set", s)]
            models = (settings, [*settings, "--set", "icache=false"])
            speeds = [f"{tflops(options.simulator, folder, 'v100', launch, *of):.1f}" for of in models]
            ms = MEASURED_MS.get(length)
            measured = f"{4e-9 * _MEASURED_HEADS * length**2 * HEADDIM / ms:.1f}" if ms else "-"
            grid.rows.append([str(length), f"{share:.0%}", *speeds, measured])
    report.show(report.facts("pytorch_kernel", arguments), [grid])
    return 0


if __name__ == "__main__":
    report.command(main)
