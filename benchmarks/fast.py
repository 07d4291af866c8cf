"""volta_fa::fwd_fast beside volta_fa::fwd on a simulated RTX 2080 Ti and T4: TFLOP/s of the whole call and of its forward kernel.

    python -m benchmarks.fast [--gpu rtx2080ti] [--headdim 64] [--seqlen N] [--causal] [--settings icache=false]

A head for each SM, fp16. Each case calls the operators on CPU tensors with VOLTA_FA_SIMULATE=timing, as benchmarks.volta does. Nothing
here is measured. TFLOP/s count 4 * headdim operations for each pair of query and key, half of the pairs if causal.
"""

from __future__ import annotations

import argparse

import torch

from .measure import aligned, simulated

#: SMs of each GPU, as tools/volta-sim/src/machine.rs has them.
SMS = {"rtx2080ti": 68, "t4": 40}


def row(gpu: str, headdim: int, seqlen: int, is_causal: bool, settings: str) -> tuple[float, float, float]:
    """Returns the TFLOP/s of fwd_fast, of its forward kernel alone and of fwd."""
    generator = torch.Generator().manual_seed(1)
    q, k, v = (aligned((1, seqlen, SMS[gpu], headdim), torch.float16).normal_(generator=generator) for _ in range(3))
    pairs = seqlen * (seqlen + 1) / 2 if is_causal else seqlen**2
    tflop_us = 4 * headdim * SMS[gpu] * pairs / 1e6

    def us(op: torch._ops.OpOverloadPacket) -> list[float]:
        reports = simulated(lambda: op(q, k, v, is_causal=is_causal), settings, gpu)
        return [r["timing"]["kernel_us"] for r in reports]

    fast, exact = us(torch.ops.volta_fa.fwd_fast), us(torch.ops.volta_fa.fwd)
    return tflop_us / sum(fast), tflop_us / fast[-1], tflop_us / sum(exact)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpu", nargs="+", default=list(SMS), choices=list(SMS))
    parser.add_argument("--headdim", type=int, nargs="+", default=[64, 128, 256])
    parser.add_argument("--seqlen", type=int, default=2048)
    parser.add_argument("--causal", action="store_true")
    parser.add_argument("--settings", default="", help="of volta-sim; default: its default model")
    arguments = parser.parse_args()
    print("| GPU | headdim | fwd_fast | its forward kernel | fwd |\n| --- | --- | --- | --- | --- |")
    for gpu in arguments.gpu:
        for headdim in arguments.headdim:
            figures = row(gpu, headdim, arguments.seqlen, arguments.causal, arguments.settings)
            print(f"| {gpu} | {headdim} | " + " | ".join(f"{x:.1f}" for x in figures) + " |", flush=True)


if __name__ == "__main__":
    main()
