"""Holds the simulated Titan RTX to measured figures: PyTorch's memory-efficient kernels from a torch wheel, beside ours.

    cargo build --release -p volta-sim
    python -m benchmarks.titan_rtx site-packages/torch/lib/libtorch_cuda.so target/release/volta-sim     # torch 2.11.0+cu130

Nothing of PyTorch is in this repository. The wheel's fat binary holds the cubins compressed with zstd (`pip install zstandard`).
Small outputs and gradients are compared with fp64 first. Measured figures are those of Chennesxu/triton-turing's charts of
2026-08-06 (tutorial 06-fused-attention: 4 batches of 32 heads, fp16, no mask), read to 0.3 TFLOP/s. The FlashAttention port is its
"CUTLASS (CUDA)". That card's clock was not locked; the simulated one has 1770 MHz.

PyTorch's backward kernels run with one split of the keys: blocks of one head's splits wait for each other's dq, and the simulator
has the blocks of one SM alone. Two heads for each SM fill the GPU as splits would. At headdim 128 the kernel of 64 x 64 tiles has
one split in PyTorch too.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from itertools import product
from pathlib import Path

from . import report, volta
from .pytorch_fmha import error, job, kernels, tflops, write_cubins
from .report import Grid
from .shapes import Shape

GPU, SMS, HEADS = "titanrtx", 72, 128
#: TFLOP/s by direction, headdim and tokens: triton-turing, the FlashAttention port, PyTorch.
MEASURED = {
    (volta.FORWARD, 64): {2048: (62.7, 49.8, 31.6), 4096: (69.0, 55.3, 32.9), 8192: (69.5, 57.5, 31.0)},
    (volta.FORWARD, 128): {2048: (51.9, 48.7, 30.0), 4096: (57.3, 53.0, 28.8), 8192: (55.2, 53.0, 29.5)},
    (volta.BACKWARD, 64): {2048: (36.6, 27.2, 20.8), 4096: (40.0, 29.2, 22.2), 8192: (40.0, 28.4, 21.5)},
    (volta.BACKWARD, 128): {2048: (26.5, 30.9, 21.1), 4096: (27.6, 32.9, 22.0), 8192: (28.8, 33.0, 21.6)},
}


def pytorch_grid(simulator: Path, folder: Path, library: Path) -> Grid:
    """Returns the table of PyTorch's kernels."""
    columns = [
        "pass",
        "kernel",
        "heads",
        "tokens",
        "largest error",
        "simulated TFLOP/s",
        "perfect i-cache",
        "measured",
        "simulated / measured",
    ]
    grid = Grid("PyTorch's memory-efficient kernels on a Titan RTX", columns)
    write_cubins(library, 75, folder)
    for kernel in report.track(kernels(75), "PyTorch's kernels"):
        largest = error(simulator, folder, kernel)
        # a step over keys, or over queries, costs the same at all lengths
        full = (2048, HEADS) if kernel.direction == volta.FORWARD else (1024, 2 * SMS)
        shapes = [full] if kernel.direction == volta.FORWARD or kernel.headdim == 64 else [full, (1024, HEADS)]
        for tokens, heads in shapes:
            launch = job(kernel, heads, tokens, tokens, has_files=False)
            speeds = [tflops(simulator, folder, GPU, launch, *of) for of in ([], ["--set", "icache=false"])]
            measured = [row[2] for row in MEASURED[kernel.direction, kernel.headdim].values()]
            mean = sum(measured) / len(measured)
            grid.rows.append(
                [
                    f"{kernel.direction} D={kernel.headdim}",
                    kernel.name.removeprefix("fmha_cutlass"),
                    str(heads),
                    str(tokens),
                    f"{largest:.1e}",
                    *(f"{speed:.1f}" for speed in speeds),
                    f"{min(measured):.1f} to {max(measured):.1f}",
                    f"{speeds[0] / mean:.2f}",
                ]
            )
    return grid


def own_grid(lengths: Sequence[int]) -> Grid:
    """Returns the table of our kernels beside measured ones."""
    columns = ["case", "ours, simulated", "perfect i-cache", "triton-turing", "FlashAttention port", "PyTorch", "ours / triton-turing"]
    grid = Grid("Ours on a simulated Titan RTX beside measured kernels, TFLOP/s", columns)
    for ((direction, headdim), measured), tokens in report.track(product(MEASURED.items(), lengths), "our kernels"):
        # as many rows of queries: 32 heads of 4096 fill the GPU as 128 do
        row = volta.simulate(volta.Case(direction, Shape(4 if tokens < 4096 else 1, 32, tokens, tokens, headdim, False)), GPU)
        assert row is not None
        of = measured[tokens]
        speeds = (row.figures.tflops, row.figures.tflops_no_icache, *of)
        grid.rows.append([f"{direction} D={headdim} N={tokens}", *(f"{x:.1f}" for x in speeds), f"{row.figures.tflops / of[0]:.2f}"])
    return grid


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.titan_rtx", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("library", type=Path, help="libtorch_cuda.so of a torch with sm_75")
    parser.add_argument("simulator", type=Path, help="volta-sim's command")
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 4096], metavar="N", help="tokens of our rows (default 2048 4096)")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as name:
        grids = [pytorch_grid(options.simulator, Path(name), options.library), own_grid(options.lengths)]
    report.show(report.facts("titan_rtx", arguments), grids)
    return 0


if __name__ == "__main__":
    report.command(main)
