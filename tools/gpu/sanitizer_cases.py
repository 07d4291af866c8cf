"""A small set of forward and backward launches for compute-sanitizer: odd sizes, masks, GQA, both backward modes.

    compute-sanitizer --tool memcheck python tools/gpu/sanitizer_cases.py

Takes the library from python/volta_fa. Exits non-zero if a result is not finite; the sanitizer finds the rest.
"""

import json
import sys
from pathlib import Path

import torch

LIBRARY = Path(__file__).resolve().parents[2] / "python/volta_fa/libvolta_fa.so"


def main() -> int:
    torch.ops.load_library(str(LIBRARY))
    variants = json.loads(torch.ops.volta_fa._info())["variants"]
    sizes = sorted({(v["headdim"], v["headdim_v"]) for v in variants if v["pass"] == "Forward"})

    def tensor(*shape: int) -> torch.Tensor:
        # torch.randn would launch kernels of its own on fresh memory; copying from the CPU initialises every byte
        x = torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).half()
        return x.cuda()

    count = 0
    for headdim, headdim_v in sizes:
        for d, dv in {(headdim, headdim_v), (headdim - 8, headdim_v - 8)}:
            for seqlen_q, seqlen_k, options in [
                (113, 255, {}),
                (77, 33, {"is_causal": True}),
                (130, 257, {"is_causal": True, "window_left": 40}),
            ]:
                q, k, v = tensor(1, seqlen_q, 2, d), tensor(1, seqlen_k, 1, d), tensor(1, seqlen_k, 1, dv)
                out, lse, _ = torch.ops.volta_fa.fwd(q, k, v, **options)
                for deterministic in (False, True):
                    gradients = torch.ops.volta_fa.bwd(torch.ones_like(out), q, k, v, out, lse, deterministic=deterministic, **options)
                    if not all(torch.isfinite(x.cpu()).all() for x in (out, *gradients)):
                        print(f"not finite: headdim {d}, {dv}, seqlens {seqlen_q}, {seqlen_k}, {options}, {deterministic=}")
                        return 1
                    count += 1
    torch.cuda.synchronize()
    print(f"{count} backward passes, with their forward ones")
    return 0


if __name__ == "__main__":
    sys.exit(main())
