"""Simulates PyTorch's memory-efficient kernels, to compare ours: machine code of a torch wheel, 2.7.1 for sm_70, 2.11.0+cu130 for sm_75.

    unzip torch-*.whl torch/lib/libtorch_cuda.so
    cargo build --release -p volta-sim
    python -m benchmarks.pytorch_fmha v100 torch/lib/libtorch_cuda.so target/release/volta-sim      # headdim 128 at long lengths
    python -m benchmarks.pytorch_fmha titanrtx torch/lib/libtorch_cuda.so target/release/volta-sim  # beside measured figures, and ours

benchmarks.models --pytorch uses this too. Nothing of PyTorch is in this repository. The wheel's fat binary has cubins, compressed with LZ4
(CUDA 12; `pip install lz4`) or zstd (CUDA 13; `pip install zstandard`). Small outputs and gradients are compared with fp64 first.
PyTorch's backward kernels run with one split of the keys here: blocks of one head's splits wait for each other's dq, and the simulator
runs the blocks of one SM alone. Two heads for each SM fill the GPU as splits would. At headdim 128 the kernel of 64 x 64 tiles has one
split in PyTorch too.
On the V100, L2 misses are modeled as in `benchmarks.tables long_sequences`. An SM holds three blocks of 32 query rows, here of three heads.
TITAN_RTX has the measured figures of the Titan RTX."""

from __future__ import annotations

import importlib
import json
import mmap
import re
import struct
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import mean
from typing import NamedTuple

import torch

from volta_fa.errors import CommandError

from . import driver, report, volta
from .attention import Shape
from .driver import GPUS, Result, Row
from .long_sequences import LENGTHS, machine, miss_share  # tokens; the simulator's settings for a share of L2 misses; that share
from .report import Grid

#: Of an entry of a fat binary (see `cubins`): its kind if it is a cubin, and its flags by compression.
_CUBIN, _LZ4, _ZSTD = 2, 0x2000, 0x8000

#: Milliseconds of PyTorch's memory-efficient kernel by tokens, PYTORCH_HEADS of 128, on V100s (torch 2.9.1): S-i-l-v-e-t/ComfyUI-V100,
#: guidelines/flash-attn-v100.md, 2026-08-25.
PYTORCH_MS = {4096: 5.7, 8192: 23.1, 16384: 99.3, 32768: 492.9, 65536: 2701.2}
PYTORCH_HEADS = 24


class Speeds(NamedTuple):
    """TFLOP/s of a shape on a Titan RTX."""

    triton_turing: float
    port: float  # the FlashAttention port, "CUTLASS (CUDA)" in the charts
    pytorch: float


#: By direction and headdim, then tokens. Chennesxu/triton-turing's charts of 2026-08-06 (tutorial 06-fused-attention: 4 batches of 32
#: heads, fp16, no mask), read to 0.3 TFLOP/s. That card's clock was not locked; the simulated one has 1770 MHz.
TITAN_RTX = {
    ("forward", 64): {2048: Speeds(62.7, 49.8, 31.6), 4096: Speeds(69.0, 55.3, 32.9), 8192: Speeds(69.5, 57.5, 31.0)},
    ("forward", 128): {2048: Speeds(51.9, 48.7, 30.0), 4096: Speeds(57.3, 53.0, 28.8), 8192: Speeds(55.2, 53.0, 29.5)},
    ("backward", 64): {2048: Speeds(36.6, 27.2, 20.8), 4096: Speeds(40.0, 29.2, 22.2), 8192: Speeds(40.0, 28.4, 21.5)},
    ("backward", 128): {2048: Speeds(26.5, 30.9, 21.1), 4096: Speeds(27.6, 32.9, 22.0), 8192: Speeds(28.8, 33.0, 21.6)},
}


@dataclass(frozen=True)
class Kernel:
    """A kernel of the wheel."""

    direction: str  # volta.FORWARD or BACKWARD
    headdim: int  # maximum
    name: str
    shared_bytes: int  # minimum with which its accesses stay inside shared memory: the cubin does not tell PyTorch's size
    threads: tuple[int, int]  # of a block, in x and y
    rows: int = 0  # query rows of a forward kernel's block

    @property
    def sm(self) -> int:
        return int(self.name[-2:])

    def computes(self, direction: str, headdim: int, *lengths: int) -> bool:
        """Returns whether it computes calls of this headdim and `lengths` (query rows, keys); without lengths, calls of some.

        "seqaligned" kernels have no bounds checks and take lengths of whole tiles. The fifth part of a name has the tile, as 128x64."""
        tiles = map(int, re.findall(r"\d+", self.name.split("_")[4]))
        aligned = "seqaligned" not in self.name or all(n % tile == 0 for n, tile in zip(lengths, tiles))
        return self.direction == direction and self.headdim >= headdim and aligned


#: The torch whose wheel has the machine code of an architecture.
TORCH = {70: "2.7.1", 75: "2.11.0+cu130"}
#: In PyTorch's order of preference, but for the last two. Callers take the first one that `computes` a call.
KERNELS = (
    Kernel(volta.FORWARD, 64, "fmha_cutlassF_f16_aligned_64x64_rf_sm70", 17920, (32, 4), 64),
    Kernel(volta.FORWARD, 128, "fmha_cutlassF_f16_aligned_32x128_rf_sm70", 25600, (32, 4), 32),
    Kernel(volta.BACKWARD, 64, "fmha_cutlassB_f16_aligned_64x64_k64_seqaligned_sm70", 25088, (128, 1)),
    Kernel(volta.BACKWARD, 64, "fmha_cutlassB_f16_aligned_64x64_k64_sm70", 25088, (128, 1)),
    Kernel(volta.BACKWARD, 128, "fmha_cutlassB_f16_aligned_128x64_k128_seqaligned_sm70", 50176, (256, 1)),
    Kernel(volta.BACKWARD, 128, "fmha_cutlassB_f16_aligned_128x64_k128_sm70", 50176, (256, 1)),
    Kernel(volta.FORWARD, 64, "fmha_cutlassF_f16_aligned_64x64_rf_sm75", 18944, (32, 4), 64),
    Kernel(volta.FORWARD, 128, "fmha_cutlassF_f16_aligned_32x128_rf_sm75", 26112, (32, 4), 32),
    Kernel(volta.BACKWARD, 64, "fmha_cutlassB_f16_aligned_64x64_k64_sm75", 27904, (128, 1)),
    # PyTorch prefers the next kernel to this one if its shared memory fits, which the cubin does not tell. TITAN_RTX was measured with this
    # one: its simulated speed is the measured one, the next one's at least 1.3 times that.
    Kernel(volta.BACKWARD, 128, "fmha_cutlassB_f16_aligned_64x64_k128_sm75", 27904, (128, 1)),
    Kernel(volta.BACKWARD, 128, "fmha_cutlassB_f16_aligned_128x64_k128_sm75", 54784, (256, 1)),
)


def forward_params(sm: int, headdim: int, heads: int, rows: int, keys: int, causal: bool) -> tuple[bytearray, dict[str, int]]:
    """Returns the kernel's parameter block (AttentionKernel::Params) without pointers, and the byte offsets of these by name. Tensors are
    contiguous (head, row, headdim), and out is (row, head, headdim). All offsets are those of the wheel's struct."""
    params = bytearray(264 if sm == 70 else 272)
    struct.pack_into("<f5i", params, 0x5C, headdim**-0.5, headdim, headdim, rows, keys, keys)  # scale and sizes
    params[0x74] = causal  # kind of mask
    struct.pack_into("<5i", params, 0x78, headdim, headdim, headdim, 0, heads * headdim)  # strides of rows: q, k, v, bias, out
    struct.pack_into("<3i", params, 0x8C, rows * headdim, keys * headdim, keys * headdim)  # strides of heads: q, k, v
    struct.pack_into("<2i", params, 0xC0, 1, heads)  # batches, heads
    return params, {"q": 0, "k": 8, "v": 16, "out": 64}


def _lse_rows(rows: int) -> int:
    """Returns the stride of a head's log-sum-exp in floats, which PyTorch rounds up to 32."""
    return -(-rows // 32) * 32


def backward_params(sm: int, headdim: int, heads: int, rows: int, keys: int, causal: bool) -> tuple[bytearray, dict[str, int]]:
    """Returns AttentionBackwardKernel::Params as `forward_params` does. Gradients, out and dout are (row, head, headdim)."""
    # In torch 2.7, strides of rows have 32 bits and the state of random numbers 8 bytes less.
    size, strides, after = (432, "<6i", 0xC0) if sm == 70 else (464, "<6q", 0xD8)
    params = bytearray(size)
    struct.pack_into("<f5i", params, 0x8C, headdim**-0.5, headdim, headdim, rows, keys, heads)  # scale and sizes
    params[0xA4] = causal  # kind of mask
    struct.pack_into(strides, params, 0xA8, headdim, headdim, headdim, 0, heads * headdim, 0)  # rows of q, k, v, bias, dout, dbias
    params[after] = 1  # gradients are not packed
    strides_at = size - 0xC0  # of heads, in elements
    struct.pack_into("<q", params, strides_at, headdim)  # heads of out
    struct.pack_into("<3i", params, strides_at + 0x08, rows * headdim, keys * headdim, keys * headdim)  # heads of q, k, v
    struct.pack_into("<q", params, strides_at + 0x50, _lse_rows(rows))  # heads of lse
    struct.pack_into("<q", params, strides_at + 0x60, rows)  # heads of delta
    struct.pack_into("<2i", params, strides_at + 0x68, 1, 1)  # batches, splits of keys
    struct.pack_into("<4q", params, strides_at + 0x98, *[headdim] * 4)  # heads of dout, dq, dk, dv
    pointers = {"q": 0, "k": 8, "v": 16, "lse": 32, "out": 40, "dout": 48, "delta": 56, "dq": 80, "dk": 88, "dv": 96, "workspace": 112}
    return params, pointers


def job(kernel: Kernel, heads: int, rows: int, keys: int, has_files: bool, headdim: int = 0, causal: bool = False) -> dict:
    """Returns the launch as volta-sim's JSON (tools/volta-sim/README.md).

    With `has_files`, inputs and results are files named after them, as q.bin; else inputs are random. headdim 0 is the kernel's.
    With `causal`, `flops` counts half of the pairs, so rows and keys must be as many."""
    d, forward = headdim or kernel.headdim, kernel.direction == volta.FORWARD
    params, pointers = (forward_params if forward else backward_params)(kernel.sm, d, heads, rows, keys, causal)
    results = ("out",) if forward else ("dq", "dk", "dv")
    halves = dict.fromkeys(("q", "out", "dout", "dq"), rows) | dict.fromkeys(("k", "v", "dk", "dv"), keys)
    sizes = {name: heads * n * d * 2 for name, n in halves.items()} | {"lse": heads * _lse_rows(rows) * 4, "delta": heads * rows * 4}
    # more than the kernels use: fp32 accumulators of dk, dv (2) and dq, padded to tiles, and locks
    sizes["workspace"] = heads * (2 * (keys + 128) * d + 4 * (rows + 128) * d + 8192) * 4
    # The kernels write delta, rowsum(dO * O), themselves. Poison is NaN, so that results that no kernel writes show.
    outputs = dict.fromkeys((*results, "delta"), "poison") | {"workspace": "zeros"}
    buffers = []
    for seed, name in enumerate(pointers):
        file = f"{name}.bin"
        given = {"file": file} if has_files else {"normal_f32" if name == "lse" else "normal_f16": {"seed": seed, "scale": 0.3}}
        buffers.append({"name": name, "size": sizes[name], "init": outputs.get(name, given)})
        if has_files and name in results:
            buffers[-1]["out"] = file
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


def cubins(library: Path, sm: int) -> Iterator[bytes]:
    """Yields the cubins of an architecture in a shared library's fat binaries.

    A fat binary has a header (magic 0xBA55ED50, version, bytes of the header and of the entries) and entries. An entry's header has its
    kind at byte 0, its size at 4, the size of its padded content at 8, compressed at 16, sm at 28, flags at 40, size uncompressed at 56."""
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


def kernels(sm: int) -> tuple[Kernel, ...]:
    return tuple(kernel for kernel in KERNELS if kernel.sm == sm)


def write_cubins(library: Path, sm: int, folder: Path) -> None:
    """Writes the cubin of each kernel of an architecture from a libtorch_cuda.so."""
    missing = {kernel.name for kernel in kernels(sm)}
    with report.progress() as bar:
        task = bar.add_task("kernels in the library", total=len(missing))
        for cubin in cubins(library, sm):
            for name in sorted(missing):
                if name.encode() in cubin:
                    (folder / f"{name}.cubin").write_bytes(cubin)
                    missing.discard(name)
                    bar.advance(task)
    if missing:
        raise CommandError(f"library: got {library} without {min(missing)}, expected that of torch {TORCH[sm]}")


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
    lse = torch.nn.functional.pad(scores.logsumexp(-1).float(), (0, _lse_rows(rows) - rows))
    stored = {"q": q, "k": k, "v": v, "lse": lse}
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


def long_grids(simulator: Path, folder: Path, _: Sequence[int]) -> list[Grid]:
    """Returns the table of headdim 128 on a V100: speeds by tokens, as L2 misses slow them down."""
    headdim, heads, keys = 128, 3, 2048
    kernel = next(k for k in kernels(70) if k.computes(volta.FORWARD, headdim))
    report.console.print(f"largest error of a small output: {error(simulator, folder, kernel):.1e}")
    launch = job(kernel, heads, GPUS["v100"].sms * kernel.rows, keys, has_files=False)

    def speed(length: int, *more: str) -> str:
        settings = (*filter(None, machine(miss_share(length, headdim)).split(",")), *more)
        return f"{tflops(simulator, folder, 'v100', launch, *(part for s in settings for part in ('--set', s))):.1f}"

    columns = {
        "tokens": str,
        "misses": lambda n: f"{miss_share(n, headdim):.0%}",
        "simulated TFLOP/s": speed,
        "perfect i-cache": lambda n: speed(n, "icache=false"),
        "measured": lambda n: f"{4e-9 * PYTORCH_HEADS * n**2 * headdim / PYTORCH_MS[n]:.1f}" if n in PYTORCH_MS else "-",
    }
    lengths = report.track(sorted({*PYTORCH_MS, *LENGTHS}), "lengths")
    return [report.table("PyTorch's memory-efficient kernel, headdim 128", lengths, columns)]


def titan_grids(simulator: Path, folder: Path, lengths: Sequence[int]) -> list[Grid]:
    """Returns the tables of PyTorch's kernels, and of ours, beside figures of a Titan RTX."""
    sms = GPUS["titanrtx"].sms
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
    theirs = Grid("PyTorch's memory-efficient kernels on a Titan RTX", columns)
    for kernel in report.track(kernels(75), "PyTorch's kernels"):
        # (tokens, heads) that fill the GPU; a step over keys, or over queries, costs the same at all lengths
        full = (2048, 128) if kernel.direction == volta.FORWARD else (1024, 2 * sms)
        # At headdim 128 the kernel that TITAN_RTX measured (64x64) has one split in PyTorch too, so the charts' 128 heads run as they are.
        shapes = [full] if kernel.direction == volta.FORWARD or kernel.headdim == 64 else [full, (1024, 128)]
        largest = error(simulator, folder, kernel)
        measured = [found.pytorch for found in TITAN_RTX[kernel.direction, kernel.headdim].values()]
        for tokens, heads in shapes:
            launch = job(kernel, heads, tokens, tokens, has_files=False)
            default, perfect = (tflops(simulator, folder, "titanrtx", launch, *of) for of in ((), ("--set", "icache=false")))
            case = [f"{kernel.direction} D={kernel.headdim}", kernel.name.removeprefix("fmha_cutlass"), str(heads), str(tokens)]
            speeds = [f"{default:.1f}", f"{perfect:.1f}", f"{min(measured):.1f} to {max(measured):.1f}", f"{default / mean(measured):.2f}"]
            theirs.rows.append([*case, f"{largest:.1e}", *speeds])
    columns = ["case", "ours, simulated", "perfect i-cache", "triton-turing", "FlashAttention port", "PyTorch", "ours / triton-turing"]
    ours = Grid("Ours on a simulated Titan RTX beside measured kernels, TFLOP/s", columns)
    for ((direction, headdim), by_length), tokens in report.track(product(TITAN_RTX.items(), lengths), "our kernels"):
        # The charts have 4 batches of 32 heads. From 4096 tokens on, one batch fills the GPU as well and simulates faster.
        case = volta.Case(direction, Shape(4 if tokens < 4096 else 1, 32, tokens, tokens, headdim))
        row, found = Row(f"{direction} D={headdim} N={tokens}", case, "titanrtx"), by_length[tokens]
        result = Result(row, driver.simulate(row.call), GPUS["titanrtx"].peak_tflops)
        # tflops(1): with a perfect instruction cache
        speeds = (result.tflops(), result.tflops(1), found.triton_turing, found.port, found.pytorch)
        ours.rows.append([row.name, *(f"{speed:.1f}" for speed in speeds), f"{result.tflops() / found.triton_turing:.2f}"])
    return [theirs, ours]


def main(arguments: Sequence[str]) -> int:
    parser = report.parser("pytorch_fmha", __doc__, outputs=False)  # without --json, --plot and --markdown
    parser.add_argument("gpu", choices=("v100", "titanrtx"))
    parser.add_argument("library", type=Path, help="libtorch_cuda.so of a torch with sm_70 or sm_75")
    parser.add_argument("simulator", type=Path, help="volta-sim's command")
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 4096], metavar="N", help="tokens of our rows on a Titan RTX")
    options = parser.parse_args(arguments)
    measured = next(iter(TITAN_RTX.values()))
    if wrong := [n for n in options.lengths if n not in measured]:
        raise CommandError(f"--lengths: got {wrong[0]}, expected lengths with a measured figure: {', '.join(map(str, measured))}")
    with tempfile.TemporaryDirectory() as name:
        sm, grids = (70, long_grids) if options.gpu == "v100" else (75, titan_grids)
        write_cubins(options.library, sm, Path(name))
        found = grids(options.simulator, Path(name), options.lengths)
    report.show(report.facts("pytorch_fmha", arguments), found)
    return 0


if __name__ == "__main__":
    report.command(main)
