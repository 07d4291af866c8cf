"""Records speeds of other projects' V100 attention kernels, simulated ones and, as `published`, measured ones. Nothing here runs them.

Their machine code (sm_70, compiled with NVRTC 12.9) ran in tools/volta-sim, the simulator that also times ours:
docs/validation/simulator.md, rows 1 to 3. `published` is a time on a real card.
"""

from __future__ import annotations

from dataclasses import dataclass

_PAGE = "docs/validation/simulator.md"


@dataclass(frozen=True)
class PublishedResult:
    name: str
    direction: str  # "forward" or "backward"
    headdim: int
    seqlen: int
    causal: bool
    tflops: float  # simulated with the default model
    tflops_no_icache: float | None  # simulated with `icache=false`
    published: float | None = None  # measured by its author on a V100
    source: str = _PAGE


_PYTORCH = "PyTorch efficient (CUTLASS)"
_ZHINIANQIN = "zhinianqin/flash-attention-v100"
_AI_BOND = "ai-bond/flash-attention-v100"
# PyTorch, D=64 to 128: what scaled_dot_product_attention runs on a V100. zhinianqin: 32 heads on 8, from the times in
# milliseconds; published times include about 0.1 ms of host work.
PUBLISHED_RESULTS = (
    PublishedResult(_PYTORCH, "forward", 64, 1024, False, 21.8, 36.7, source=f"{_PAGE} row 3"),
    PublishedResult(_PYTORCH, "forward", 64, 2048, False, 26.2, 43.0, source=f"{_PAGE} row 3"),
    PublishedResult(_PYTORCH, "forward", 128, 2048, False, 37.2, 47.9, source=f"{_PAGE} row 3"),
    PublishedResult(_PYTORCH, "backward", 64, 1024, False, 20.0, 31.0, source=f"{_PAGE} row 3"),
    PublishedResult(_PYTORCH, "backward", 128, 1024, False, 27.0, 32.1, source=f"{_PAGE} row 3"),
    PublishedResult(_ZHINIANQIN, "forward", 128, 1024, True, 14.4, 20.5, 9.2, f"{_PAGE} row 1"),
    PublishedResult(_ZHINIANQIN, "forward", 128, 2048, True, 18.2, 25.9, 14.3, f"{_PAGE} row 1"),
    PublishedResult(_ZHINIANQIN, "forward", 128, 4096, True, 21.3, 30.2, 17.9, f"{_PAGE} row 1"),
    PublishedResult(_ZHINIANQIN, "forward", 128, 8192, True, 22.5, 31.9, 20.0, f"{_PAGE} row 1"),
    PublishedResult(_AI_BOND, "forward", 64, 1024, False, 17.5, None, source=f"{_PAGE} row 2"),
    PublishedResult(_AI_BOND, "forward", 64, 1024, True, 13.5, None, source=f"{_PAGE} row 2"),
)

#: Simulated CUTLASS GEMM, 4096^3: what dense matrix products reach in practice.
GEMM_TFLOPS = 98.5
