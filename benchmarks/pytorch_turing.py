"""PyTorch's memory-efficient kernels for sm_75 in the simulator, from the machine code in the wheel of torch 2.11.0+cu130.

Nothing of PyTorch is in this repository: the wheel's fat binary holds the cubins (`pytorch_kernel.cubins`).
PyTorch's backward kernels run with one split of the keys here: blocks of one head's splits wait for each other's dq, and the simulator
has the blocks of one SM alone.
"""

from __future__ import annotations

import json
import re
import struct
import subprocess
from dataclasses import dataclass
from pathlib import Path

import torch

from volta_fa.errors import CommandError

from . import volta
from .pytorch_kernel import cubins


@dataclass(frozen=True)
class Kernel:
    """A kernel of torch 2.11. `shared_bytes` is the least with which it stays inside its shared memory."""

    direction: str
    headdim: int
    name: str
    shared_bytes: int
    threads: tuple[int, int]
    rows: int = 0  # query rows of a forward kernel's block


KERNELS = (
    Kernel(volta.FORWARD, 64, "fmha_cutlassF_f16_aligned_64x64_rf_sm75", 18944, (32, 4), 64),
    Kernel(volta.FORWARD, 128, "fmha_cutlassF_f16_aligned_32x128_rf_sm75", 26112, (32, 4), 32),
    Kernel(volta.BACKWARD, 64, "fmha_cutlassB_f16_aligned_64x64_k64_sm75", 27904, (128, 1)),
    Kernel(volta.BACKWARD, 128, "fmha_cutlassB_f16_aligned_64x64_k128_sm75", 27904, (128, 1)),
    # PyTorch prefers it if its shared memory fits, which the cubin does not tell
    Kernel(volta.BACKWARD, 128, "fmha_cutlassB_f16_aligned_128x64_k128_sm75", 54784, (256, 1)),
)


def forward_params(headdim: int, heads: int, rows: int, keys: int, causal: bool = False) -> tuple[bytearray, dict[str, int]]:
    """Returns AttentionKernel::Params without pointers, and where these go: contiguous (head, row, headdim), out (row, head, headdim)."""
    params = bytearray(272)
    struct.pack_into("<f5i", params, 0x5C, headdim**-0.5, headdim, headdim, rows, keys, keys)
    params[0x74] = causal
    struct.pack_into("<5i", params, 0x78, headdim, headdim, headdim, 0, heads * headdim)
    struct.pack_into("<3i", params, 0x8C, rows * headdim, keys * headdim, keys * headdim)
    struct.pack_into("<2i", params, 0xC0, 1, heads)
    return params, {"q": 0, "k": 8, "v": 16, "out": 64}


def backward_params(headdim: int, heads: int, rows: int, keys: int, causal: bool = False) -> tuple[bytearray, dict[str, int]]:
    """The same of AttentionBackwardKernel::Params. Gradients, out and dout are (row, head, headdim)."""
    params = bytearray(464)
    struct.pack_into("<f5i", params, 0x8C, headdim**-0.5, headdim, headdim, rows, keys, heads)
    params[0xA4] = causal
    struct.pack_into("<6q", params, 0xA8, headdim, headdim, headdim, 0, heads * headdim, 0)  # rows of q, k, v, bias, dout, dbias
    params[0xD8] = 1  # gradients are not packed
    struct.pack_into("<q", params, 0x110, headdim)  # heads of out
    struct.pack_into("<3i", params, 0x118, rows * headdim, keys * headdim, keys * headdim)  # heads of q, k, v
    struct.pack_into("<q", params, 0x160, rows)  # heads of lse
    struct.pack_into("<q", params, 0x170, rows)  # heads of delta
    struct.pack_into("<2i", params, 0x178, 1, 1)  # batches, splits of keys
    struct.pack_into("<4q", params, 0x1A8, *[headdim] * 4)  # heads of dout, dq, dk, dv
    pointers = {"q": 0, "k": 8, "v": 16, "lse": 32, "out": 40, "dout": 48, "delta": 56, "dq": 80, "dk": 88, "dv": 96, "workspace": 112}
    return params, pointers


def job(kernel: Kernel, heads: int, rows: int, keys: int, has_files: bool, headdim: int = 0, causal: bool = False) -> dict:
    """Returns the launch for volta-sim. `has_files`: inputs and results are files; else inputs are random. `headdim` 0: the kernel's."""
    d, forward = headdim or kernel.headdim, kernel.direction == volta.FORWARD
    params, pointers = (forward_params if forward else backward_params)(d, heads, rows, keys, causal)
    results = ("out",) if forward else ("dq", "dk", "dv")
    halves = dict.fromkeys(("q", "out", "dout", "dq"), rows) | dict.fromkeys(("k", "v", "dk", "dv"), keys)
    sizes = {name: heads * n * d * 2 for name, n in halves.items()} | dict.fromkeys(("lse", "delta"), heads * rows * 4)
    # an accumulator of each gradient, and locks
    sizes["workspace"] = heads * (2 * (keys + 128) * d + 4 * (rows + 128) * d + 8192) * 4
    buffers = []
    for seed, name in enumerate(pointers):
        random = {"normal_f32" if name in ("lse", "delta") else "normal_f16": {"seed": seed, "scale": 0.3}}
        init = "poison" if name in results else "zeros" if name == "workspace" else {"file": f"{name}.bin"} if has_files else random
        buffers.append(
            {"name": name, "size": sizes[name], "init": init} | ({"out": f"{name}.bin"} if has_files and name in results else {})
        )
    return {
        "cubin": f"{kernel.name}.cubin",
        "kernel": kernel.name,
        "grid": [-(-rows // kernel.rows) if forward else 1, heads, 1],
        "block": [*kernel.threads, 1],
        "smem": kernel.shared_bytes,
        "flops": (4.0 if forward else 10.0) * heads * rows * keys * d * (0.5 if causal else 1),
        "buffers": buffers,
        "params": [{"bytes": {"hex": params.hex(), "relocs": [{"at": at, "buffer": name, "offset": 0} for name, at in pointers.items()]}}],
    }


def write_cubins(library: Path, folder: Path) -> None:
    """Writes the cubin of each kernel of `KERNELS` from a libtorch_cuda.so."""
    missing = {kernel.name for kernel in KERNELS}
    for cubin in cubins(library, 75):
        for name in sorted(missing):
            if name.encode() in cubin:
                (folder / f"{name}.cubin").write_bytes(cubin)
                missing.discard(name)
    if missing:
        raise CommandError(f"library: got {library} without {min(missing)}, expected that of torch 2.11.0+cu130")


def _run(simulator: Path, folder: Path, launch: dict, *options: str) -> str:
    (folder / "job.json").write_text(json.dumps(launch))
    done = subprocess.run([simulator, folder / "job.json", *options], capture_output=True, text=True)
    if done.returncode:
        raise CommandError(f"{simulator}: {done.stderr.strip()}")
    return done.stdout


def error(simulator: Path, folder: Path, kernel: Kernel, heads: int = 2, rows: int = 128, keys: int = 192) -> float:
    """Returns the largest difference of a small output, or of gradients, from fp64."""
    d, generator = kernel.headdim, torch.Generator().manual_seed(0)
    q, k, v, dout = (torch.randn(heads, n, d, generator=generator).half() for n in (rows, keys, keys, rows))
    exact = [t.double().requires_grad_() for t in (q, k, v)]
    scores = (exact[0] @ exact[1].mT) * d**-0.5
    out = scores.softmax(-1) @ exact[2]
    out.backward(dout.double())
    lse, delta = scores.logsumexp(-1), (dout.double() * out).sum(-1)
    stored = {"q": q, "k": k, "v": v, "lse": lse.float(), "delta": delta.float()}
    stored |= {"out": out.half().transpose(0, 1), "dout": dout.transpose(0, 1)}
    for name, tensor in stored.items():
        tensor.detach().contiguous().numpy().tofile(folder / f"{name}.bin")
    _run(simulator, folder, job(kernel, heads, rows, keys, has_files=True), "--functional-only")
    expected = {"out": out} if kernel.direction == volta.FORWARD else dict(zip(("dq", "dk", "dv"), (t.grad for t in exact)))

    def found(name: str) -> torch.Tensor:
        return torch.frombuffer(bytearray((folder / f"{name}.bin").read_bytes()), dtype=torch.float16).view(-1, heads, d).transpose(0, 1)

    return max((found(name).double() - tensor).abs().max().item() for name, tensor in expected.items())


def tflops(simulator: Path, folder: Path, gpu: str, launch: dict, *options: str) -> float:
    """Returns the simulated speed of a launch by the default model, or as volta-sim's `options` change it."""
    text = _run(simulator, folder, launch, "--timing", "--gpu", gpu, *options)
    return float(re.findall(r"= ([\d.]+) TFLOP/s", text)[0])
