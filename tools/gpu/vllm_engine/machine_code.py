"""Zeroes GPU machine code that the target GPU does not run. Zeros compress to nothing, and host code stays as it is.

Import `reduce`. A CUDA library holds its GPU code in the ELF section .nv_fatbin: containers, each with one entry per architecture.
"""

import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

_CONTAINER, _ENTRY = struct.Struct("<IHHQ"), struct.Struct("<HHIQ")
_MAGIC = 0xBA55ED50
_ARCH = 28  # bytes from an entry to its architecture
CUBIN = 2  # an entry's kind; 1 is PTX


class Entry(NamedTuple):
    """One architecture's code: its kind, its architecture (90 for sm_90) and the range of its bytes in the file."""

    kind: int
    arch: int
    begin: int
    end: int


def section(data: bytearray, wanted: bytes) -> range:
    """Returns the range of a section of a 64-bit ELF file, empty if the file has none of this name."""
    (table,) = struct.unpack_from("<Q", data, 0x28)
    size, count, names = struct.unpack_from("<HHH", data, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", data, table + i * size) for i in range(count)]
    strings = headers[names][4]
    for name, _, _, _, offset, length in headers:
        if data.startswith(wanted + b"\0", strings + name):
            return range(offset, offset + length)
    return range(0)


def entries(data: bytearray) -> Iterator[Entry]:
    """Yields the entries of all containers of a library."""
    found = section(data, b".nv_fatbin")
    at = found.start
    while at + _CONTAINER.size <= found.stop:
        magic, _, header, length = _CONTAINER.unpack_from(data, at)
        if magic != _MAGIC:  # containers begin on 8-byte boundaries
            at += 8
            continue
        entry, at = at + header, at + header + length
        while entry + _ARCH + 4 <= at:
            kind, _, header, length = _ENTRY.unpack_from(data, entry)
            (arch,) = struct.unpack_from("<I", data, entry + _ARCH)
            yield Entry(kind, arch, entry + header, entry + header + length)
            entry += header + length


def reduce(path: Path, arch: int, wanted: Callable[[bytes], bool] = lambda code: True) -> tuple[int, int]:
    """Zeroes all entries in place except machine code for `arch` that is `wanted`. Returns the bytes kept and zeroed.

    A kernel without an entry fails at its first launch, not when the library loads.
    """
    data = bytearray(path.read_bytes())
    kept = zeroed = 0
    for entry in entries(data):
        size = entry.end - entry.begin
        if entry.kind == CUBIN and entry.arch == arch and wanted(bytes(data[entry.begin : entry.end])):
            kept += size
        else:
            data[entry.begin : entry.end] = bytes(size)
            zeroed += size
    path.write_bytes(data)
    return kept, zeroed
