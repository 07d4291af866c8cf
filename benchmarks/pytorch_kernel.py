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
import importlib
import json
import mmap
import re
import struct
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from volta_fa.errors import CommandError

from . import report
from .long_sequences import LENGTHS, machine, miss_share
from .report import Grid

KERNEL = "fmha_cutlassF_f16_aligned_32x128_rf_sm70"
HEADDIM, _ROWS, _SMS, _HEADS, _KEYS = 128, 32, 80, 3, 2048
#: Milliseconds on real V100s (torch 2.9.1, 24 heads): S-i-l-v-e-t/ComfyUI-V100, guidelines/flash-attn-v100.md, 2026-08-25.
MEASURED_MS = {4096: 5.7, 8192: 23.1, 16384: 99.3, 32768: 492.9, 65536: 2701.2}
_MEASURED_HEADS = 24
_CUBIN, _LZ4, _ZSTD = 2, 0x2000, 0x8000


def cubins(library: Path, sm: int) -> Iterator[bytes]:
    """Yields the cubins of an architecture in a shared library's fat binaries."""
    with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        at = data.find(b"\x50\xed\x55\xba")
        while at >= 0:
            _, version, header, size = struct.unpack_from("<IHHQ", data, at)
            entry, end = at + header, at + header + size
            while version == 1 and entry < end <= len(data):
                kind, _, entry_header, padded = struct.unpack_from("<HHIQ", data, entry)
                if kind == _CUBIN and struct.unpack_from("<I", data, entry + 28)[0] == sm:
                    content = data[entry + entry_header : entry + entry_header + padded]
                    flags, size = struct.unpack_from("<Q", data, entry + 40)[0], struct.unpack_from("<Q", data, entry + 56)[0]
                    compressed = content[: struct.unpack_from("<I", data, entry + 16)[0]]
                    yield _decompressed(compressed, flags, size) if flags & (_LZ4 | _ZSTD) else content
                entry += entry_header + padded
            at = data.find(b"\x50\xed\x55\xba", at + 16)


def _decompressed(content: bytes, flags: int, size: int) -> bytes:
    """Returns the content of an entry: compilers of CUDA 12 compress with LZ4, of CUDA 13 with zstd."""
    package = "zstandard" if flags & _ZSTD else "lz4.block"
    try:
        module = importlib.import_module(package)
    except ImportError as error:
        name = package.split(".")[0]
        raise CommandError(f"{name} is not installed; run `pip install {name}`") from error
    if flags & _ZSTD:
        return module.ZstdDecompressor().decompress(content, max_output_size=size)
    return module.decompress(content, uncompressed_size=size)


def job(keys: int, rows: int) -> dict:
    """Returns the launch for volta-sim: `rows` queries in each of three heads of contiguous (head, row, headdim) memory."""
    params = bytearray(264)  # of AttentionKernel::Params in torch 2.7
    struct.pack_into("<f5i", params, 0x5C, HEADDIM**-0.5, HEADDIM, HEADDIM, rows, keys, keys)
    struct.pack_into("<5i", params, 0x78, HEADDIM, HEADDIM, HEADDIM, 0, _HEADS * HEADDIM)  # rows of q, k, v, bias, out
    struct.pack_into("<3i", params, 0x8C, rows * HEADDIM, keys * HEADDIM, keys * HEADDIM)  # heads of q, k, v
    struct.pack_into("<2i", params, 0xC0, 1, _HEADS)
    sizes = {"q": rows, "k": keys, "v": keys, "o": rows}
    buffers = [{"name": name, "size": _HEADS * n * HEADDIM * 2, "init": {"file": f"{name}.bin"}} for name, n in sizes.items()]
    buffers[-1] |= {"init": "poison", "out": "o.bin"}
    pointers = [{"at": at, "buffer": name, "offset": 0} for at, name in ((0, "q"), (8, "k"), (16, "v"), (64, "o"))]
    return {
        "cubin": "kernel.cubin",
        "kernel": KERNEL,
        "grid": [rows // _ROWS, _HEADS, 1],
        "block": [32, 4, 1],
        "smem": 30 << 10,  # at least the kernel's
        "flops": 4.0 * _HEADS * rows * keys * HEADDIM,
        "buffers": buffers,
        "params": [{"bytes": {"hex": params.hex(), "relocs": pointers}}],
    }


def _run(simulator: Path, folder: Path, keys: int, rows: int, *options: str) -> str:
    generator = torch.Generator().manual_seed(keys)
    for name, n in (("q", rows), ("k", keys), ("v", keys)):
        torch.randn(_HEADS, n, HEADDIM, generator=generator).half().numpy().tofile(folder / f"{name}.bin")
    (folder / "job.json").write_text(json.dumps(job(keys, rows)))
    done = subprocess.run([simulator, folder / "job.json", *options], capture_output=True, text=True)
    if done.returncode:
        raise CommandError(f"{simulator}: {done.stderr.strip()}")
    return done.stdout


def error(simulator: Path, folder: Path) -> float:
    """Returns the largest difference of a small output from fp64."""
    _run(simulator, folder, 256, 64, "--functional-only")
    q, k, v = (
        torch.frombuffer(bytearray((folder / f"{n}.bin").read_bytes()), dtype=torch.float16).view(_HEADS, -1, HEADDIM).double()
        for n in "qkv"
    )
    out = torch.frombuffer(bytearray((folder / "o.bin").read_bytes()), dtype=torch.float16).view(-1, _HEADS, HEADDIM).transpose(0, 1)
    return (((q @ k.mT) * HEADDIM**-0.5).softmax(-1) @ v - out).abs().max().item()


def tflops(simulator: Path, folder: Path, share: float, icache: bool) -> float:
    """Returns the simulated speed with this share of L2 misses."""
    settings = [s for s in (*machine(share).split(","), "" if icache else "icache=false") if s]
    text = _run(simulator, folder, _KEYS, _SMS * _ROWS, "--timing", *(part for s in settings for part in ("--set", s)))
    return float(re.findall(r"= ([\d.]+) TFLOP/s", text)[0])


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.pytorch_kernel", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("library", type=Path, help="libtorch_cuda.so of a torch with sm_70")
    parser.add_argument("simulator", type=Path, help="volta-sim's command")
    options = parser.parse_args(arguments)
    kernel = next((c for c in cubins(options.library, 70) if KERNEL.encode() in c), None)
    if kernel is None:
        raise CommandError(f"library: got {options.library} without {KERNEL}, expected that of torch 2.7.1")
    grid = Grid("PyTorch's memory-efficient kernel, headdim 128", ["tokens", "misses", "simulated TFLOP/s", "perfect i-cache", "measured"])
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "kernel.cubin").write_bytes(kernel)
        print(f"largest error of a small output: {error(options.simulator, folder):.1e}")
        for length in sorted({*MEASURED_MS, *LENGTHS}):
            share = miss_share(length, HEADDIM)
            speeds = [f"{tflops(options.simulator, folder, share, icache):.1f}" for icache in (True, False)]
            ms = MEASURED_MS.get(length)
            measured = f"{4e-9 * _MEASURED_HEADS * length**2 * HEADDIM / ms:.1f}" if ms else "-"
            grid.rows.append([str(length), f"{share:.0%}", *speeds, measured])
    report.show(report.facts("pytorch_kernel", arguments), [grid])
    return 0


if __name__ == "__main__":
    report.command(main)
