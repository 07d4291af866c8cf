"""Compares the machine code of the kernels in two builds, instruction by instruction: for changes that must not alter any.

    python tools/compare_kernels.py BEFORE AFTER

BEFORE and AFTER are built libraries (libvolta_fa_core.so) or folders of compiled kernels (target/volta-fa-kernels; the newest entry
of each kernel counts). Exits with 0 if both have the same kernels with the same machine code, else with 1.
tests/test_kernel_binaries.py and benchmarks/marks.py use kernels().

Needs Python's standard library and libzstd. Disassembles differing kernels with the nvdisasm of VOLTA_SIM_NVDISASM or of triton,
if there is one."""

from __future__ import annotations

import argparse
import ctypes
import ctypes.util
import difflib
import importlib.util
import os
import re
import struct
import subprocess
import sys
import tempfile
from collections import namedtuple
from dataclasses import dataclass
from pathlib import Path

#: Compared sections of a cubin: code, and the constants that the compiler laid out. Not constant bank 4: there every namespace-scope
#: constant of a header leaves its address, used or not, and code that took one from there would differ itself.
COMPARED = re.compile(r"\.text\.|\.nv\.constant(?!4)")
#: How a zstd frame and an ELF file begin, and the number at byte 18 of an ELF file that is a cubin.
ZSTD_MAGIC, ELF_MAGIC, EM_CUDA = b"\x28\xb5\x2f\xfd", b"\x7fELF", 190
#: An entry of ELF's table of sections, in the order of the file. `name` is an offset in the section of names.
SectionHeader = namedtuple("SectionHeader", "name type flags address offset size link info")
#: Shown lines of a difference, per kernel.
SHOWN = 12


@dataclass(frozen=True)
class Kernel:
    """The executable parts of one cubin."""

    cubin: bytes
    sections: dict[str, bytes]  # contents of those in COMPARED, by name
    registers: int  # of a thread

    def instructions(self, nvdisasm: str) -> list[str]:
        """Returns the assembly without addresses."""
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(self.cubin)
            file.flush()
            text = subprocess.run([nvdisasm, "-c", file.name], capture_output=True, text=True, check=True).stdout
        return [" ".join(line.split()) for line in re.findall(r"/\*[0-9a-f]{4,}\*/\s+(.*?;)", text)]


class Zstd:
    """Binds the functions of libzstd that unpack frames anywhere in a file."""

    def __init__(self) -> None:
        name = ctypes.util.find_library("zstd")
        if name is None:
            raise SystemExit("compare_kernels: libzstd is not installed")
        self._library = library = ctypes.CDLL(name)
        for function in ("ZSTD_findFrameCompressedSize", "ZSTD_decompress", "ZSTD_isError"):
            getattr(library, function).restype = ctypes.c_size_t
        # 16 MiB: frames do not record the size of their content; a kernel has a few hundred KB
        self._content = ctypes.create_string_buffer(2**24)

    def frame(self, data: bytes) -> bytes | None:
        """Returns the content of the frame at the start of `data`; None if there is no frame."""
        library, content = self._library, self._content
        size = library.ZSTD_findFrameCompressedSize(data, ctypes.c_size_t(len(data)))
        if library.ZSTD_isError(ctypes.c_size_t(size)):
            return None
        got = library.ZSTD_decompress(content, ctypes.c_size_t(len(content)), data, ctypes.c_size_t(size))
        return None if library.ZSTD_isError(ctypes.c_size_t(got)) else ctypes.string_at(content, got)


def parse(cubin: bytes) -> tuple[str, Kernel]:
    """Returns the name and the kernel of an ELF cubin: 64-bit ELF, whose header tells its table of sections from byte 40 on."""
    (table,) = struct.unpack_from("<Q", cubin, 40)
    entry_bytes, count, strings = struct.unpack_from("<HHH", cubin, 58)  # strings: index of the section that holds the names
    headers = [SectionHeader(*struct.unpack_from("<IIQQQQII", cubin, table + i * entry_bytes)) for i in range(count)]
    found, registers, kernel = {}, 0, ""
    for header in headers:
        start = headers[strings].offset + header.name
        name = cubin[start : cubin.index(b"\0", start)].decode()
        if COMPARED.match(name):
            found[name] = cubin[header.offset : header.offset + header.size]
        if name.startswith(".text."):
            kernel, registers = name.removeprefix(".text."), header.info >> 24  # registers of a thread
    return kernel, Kernel(cubin, found, registers)


def kernels(path: Path) -> dict[str, Kernel]:
    """Returns the kernels of a library or of a folder of compiled kernels, by name."""
    zstd = Zstd()
    if path.is_dir():
        packed = [file.read_bytes() for file in sorted(path.glob("*/cubin.zst"), key=lambda file: file.stat().st_mtime)]
    else:
        library = path.read_bytes()
        # only unpacking tells the end of a frame: 1 MiB is longer than any
        packed = [library[m.start() : m.start() + 2**20] for m in re.finditer(re.escape(ZSTD_MAGIC), library)]
    contents = (zstd.frame(data) for data in packed)
    cubins = [data for data in contents if data and data.startswith(ELF_MAGIC) and struct.unpack_from("<H", data, 18)[0] == EM_CUDA]
    if not cubins:
        raise SystemExit(f"compare_kernels: {path} holds no kernels")
    return dict(map(parse, cubins))


def find_nvdisasm() -> str | None:
    """Returns the path of an nvdisasm; None if there is none."""
    if named := os.environ.get("VOLTA_SIM_NVDISASM"):
        return named
    triton = importlib.util.find_spec("triton")
    tool = Path(triton.origin).parent / "backends/nvidia/bin/nvdisasm" if triton and triton.origin else None
    return str(tool) if tool and tool.exists() else None


def difference(before: Kernel, after: Kernel, nvdisasm: str | None) -> list[str]:
    """Returns lines that describe the difference of two kernels, a summary first; empty if they are equal."""
    if before.sections == after.sections and before.registers == after.registers:
        return []
    summary = f"registers {before.registers} -> {after.registers}"
    if nvdisasm is None:
        return [f"{summary}; nvdisasm, which would say more, was not found"]
    old, new = before.instructions(nvdisasm), after.instructions(nvdisasm)
    summary += f", instructions {len(old)} -> {len(new)}"
    if old == new:
        names = sorted(before.sections.keys() | after.sections.keys())
        differing = [name for name in names if before.sections.get(name) != after.sections.get(name)] or ["register counts"]
        return [f"{summary}: the same instructions; {', '.join(differing)} differ"]
    changes = [line for line in difflib.unified_diff(old, new, lineterm="", n=0) if line[:2] not in ("--", "++", "@@")]
    lines = [f"{summary}, {len(changes)} lines of difference", *changes[:SHOWN]]
    return lines + ["..."] if len(changes) > SHOWN else lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    options = parser.parse_args()
    before, after = kernels(options.before), kernels(options.after)
    nvdisasm = find_nvdisasm()
    changed, names = 0, sorted(before.keys() | after.keys())
    for name in names:
        if name not in after or name not in before:
            lines = ["only in " + str(options.before if name in before else options.after)]
        else:
            lines = difference(before[name], after[name], nvdisasm)
        if lines:
            changed += 1
            print(f"{name}: " + "\n    ".join(lines))
    print(f"{len(names) - changed} kernels have the same machine code, {changed} do not")
    return 1 if changed else 0


if __name__ == "__main__":
    sys.exit(main())
