"""Measures volta_fa.flex_attention beside torch's compiled flex_attention on a GPU: document mask, prefix-LM, window, random blocks.

    python -m benchmarks.flex [--seqlen N] [--json FILE]

Times are medians of forward, and of forward and backward, in one run. Packing of the mask is timed apart: it happens once for a mask.
A GPU newer than Turing emulates Volta's tensor-core instruction, so times of Volta's kernels say nothing there: the last columns name the
kernels that ran.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

import volta_fa

from . import report
from .measure import median_ms

HEADS = 16


def masks(seqlen: int, device: torch.device) -> dict[str, BlockMask]:
    """Returns torch's block masks by name. Documents have 1,365 tokens. `random` has the diagonal, and 10% of the other blocks."""
    documents = torch.arange(seqlen, device=device).div(1365, rounding_mode="floor")
    blocks = torch.rand(-(-seqlen // 128), -(-seqlen // 128), generator=torch.Generator().manual_seed(0)).to(device) < 0.1
    blocks |= torch.eye(len(blocks), dtype=torch.bool, device=device)
    functions: dict[str, Callable] = {
        "documents": lambda b, h, q, k: (documents[q] == documents[k]) & (q >= k),
        "prefix-LM": lambda b, h, q, k: (k < 1024) | (q >= k),
        "window": lambda b, h, q, k: (q >= k) & (q - k < 1024),
        "random": lambda b, h, q, k: blocks[q // 128, k // 128],
    }
    return {name: create_block_mask(f, None, None, seqlen, seqlen, device=device) for name, f in functions.items()}


def _pack(mask: BlockMask) -> None:
    """Packs a mask anew: from_torch keeps the result on torch's object."""
    vars(mask).pop("_volta_fa_block_mask", None)
    volta_fa.BlockMask.from_torch(mask)


def measure(headdim: int, mask: BlockMask, seqlen: int, device: torch.device) -> dict[str, float]:
    """Returns milliseconds by implementation and pass, and of packing."""
    q, k, v, dout = (torch.randn(1, HEADS, seqlen, headdim, device=device, dtype=torch.float16) for _ in range(4))
    leaves = [t.requires_grad_() for t in (q, k, v)]
    torch._dynamo.reset()  # one function compiles for at most eight masks and modes
    compiled = torch.compile(flex_attention, fullgraph=True)
    found = {"packing": median_ms(lambda: _pack(mask), device, 0.3)}
    for name, function in (("volta_fa", volta_fa.flex_attention), ("torch", compiled)):

        def forward(function: Callable = function) -> Tensor:
            return function(*leaves, block_mask=mask)

        with torch.no_grad():
            found[f"{name} forward"] = median_ms(forward, device, 0.5)
        found[f"{name} both"] = median_ms(lambda: torch.autograd.grad(forward(), leaves, dout), device, 0.5)
    return found


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.flex", description=__doc__.splitlines()[0])
    parser.add_argument("--seqlen", type=int, default=8192, metavar="N")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results as JSON")
    options = parser.parse_args(arguments)
    device = report.choose_device("cuda")
    rows = []
    table = report.Grid(
        f"flex_attention, {HEADS} heads, N={options.seqlen}, ms: volta_fa, torch compiled, torch / volta_fa",
        ["mask", "headdim", "forward", "torch", "ratio", "both", "torch", "ratio", "packing"],
    )
    for headdim in (64, 128):
        for name, mask in masks(options.seqlen, device).items():
            ms = measure(headdim, mask, options.seqlen, device)
            rows.append({"mask": name, "headdim": headdim, **ms})
            cells = []
            for part in ("forward", "both"):
                ours, theirs = ms[f"volta_fa {part}"], ms[f"torch {part}"]
                cells += [f"{ours:.2f}", f"{theirs:.2f}", f"{theirs / ours:.2f}"]
            table.rows.append([name, str(headdim), *cells, f"{ms['packing']:.2f}"])
            print(name, headdim, {key: round(value, 3) for key, value in ms.items()}, flush=True)
    report.show(report.facts("flex", arguments, device=report.device_name(device), kernels=report.kernels(device)), [table])
    if options.json:
        report.write_json(options.json, rows)
    return 0


if __name__ == "__main__":
    report.command(main)
