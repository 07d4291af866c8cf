"""The GEMM of turing_gemm.cu on a simulated T4: python tests/turing_gemm.py"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import numpy as np
import volta_sim as vs

cubin = vs.compile(Path(__file__).resolve().parent / "turing_gemm.cu", arch="sm_75")
rng = np.random.default_rng(1)


def run(size, k, mode, **more):
    a, b = (rng.standard_normal((size, k)).astype(np.float16) / 8 for _ in range(2))
    c = np.zeros((size, size), np.float16)
    grid = (size // 256, size // 256)
    out, report = vs.run(
        cubin, "gemm", grid, (256,), 2 * 32768, [a, b, c, np.int32(size), np.int32(k)], mode=mode, flops=2 * size * size * k, **more
    )
    return a, b, out[2], report


a, b, c, _ = run(512, 128, "functional")
error = np.abs(c - a.astype(np.float64) @ b.astype(np.float64).T).max()
assert error < 0.02, error
print(f"largest error of 512x512x128: {error:.2g}")
*_, report = run(5120, 2048, "timing", options=["--gpu", "t4", "--static", *sys.argv[1:]])
print(report["text"])
t = report["timing"]
print(f"{t['tflops']:.1f} TFLOP/s, {t['util']['tensor']:.1%} of the tensor pipe; Yan, Wang and Chu's on a T4 at 1590 MHz: 49.7, 76%")
