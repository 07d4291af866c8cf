"""Records speeds of other projects' attention kernels, simulated ones and measured ones. Nothing here runs them.

Of PUBLISHED_RESULTS the machine code (sm_70, compiled with NVRTC 12.9) ran in tools/volta-sim, the simulator that also times ours:
docs/validation/real-cards.md, rows 1 to 3. `published` is a time on a real card.
"""

from __future__ import annotations

from dataclasses import dataclass

_PAGE = "docs/validation/real-cards.md"


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

#: (kernel, GB/s of memory that it reads on a V100, note), derived from published times. For attention, memory is the cache.
DECODE_RATES = [
    ("1CatAI/1Cat-vLLM: headdim 256, 6 rows, fp16", "255 to 445", "35 to 39% of its card's 1130 at best"),
    ("1CatAI/1Cat-vLLM: headdim 256, 6 rows, e5m2, 65536 tokens", "131", ""),
    ("exl3's sm_70 laboratory: headdim 256, q4_0", "55", ""),
    ("zh-nj/v100llm: MLA, 16384 x 576", "49", ""),
    ("ninfer-v100: a Q4 matrix times a vector, no attention", "795", "what a V100's DRAM gives"),
    ("a copy kernel", "750 to 790", "Jia 2018, paranumal"),
]
#: Milliseconds of PyTorch's memory-efficient kernel by tokens, 24 heads of 128, on V100s (torch 2.9.1): S-i-l-v-e-t/ComfyUI-V100,
#: guidelines/flash-attn-v100.md, 2026-08-25.
PYTORCH_MS = {4096: 5.7, 8192: 23.1, 16384: 99.3, 32768: 492.9, 65536: 2701.2}
#: TFLOP/s on a Titan RTX by direction, headdim and tokens: triton-turing, the FlashAttention port ("CUTLASS (CUDA)"), PyTorch.
#: Chennesxu/triton-turing's charts of 2026-08-06 (tutorial 06-fused-attention: 4 batches of 32 heads, fp16, no mask), read to 0.3
#: TFLOP/s. That card's clock was not locked; the simulated one has 1770 MHz.
TITAN_RTX = {
    ("forward", 64): {2048: (62.7, 49.8, 31.6), 4096: (69.0, 55.3, 32.9), 8192: (69.5, 57.5, 31.0)},
    ("forward", 128): {2048: (51.9, 48.7, 30.0), 4096: (57.3, 53.0, 28.8), 8192: (55.2, 53.0, 29.5)},
    ("backward", 64): {2048: (36.6, 27.2, 20.8), 4096: (40.0, 29.2, 22.2), 8192: (40.0, 28.4, 21.5)},
    ("backward", 128): {2048: (26.5, 30.9, 21.1), 4096: (27.6, 32.9, 22.0), 8192: (28.8, 33.0, 21.6)},
}
