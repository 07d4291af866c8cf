"""Checks that a wheel of `make wheel` loads on every Linux that torch wheels support.

    python tools/check_wheel.py dist/volta_fa-*.whl

`make wheel` runs it. Prints the wheel's size, the newest symbol versions that each library needs (a C library without them refuses to load
it) and auditwheel's verdict. Exits with 1 if any exceeds its limit."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import build_shims
import portable_linker

#: Maximum size of a wheel, in bytes.
LARGEST = 40 * 2**20
#: Newest symbol versions that a library may need: of glibc as in portable_linker, of libstdc++ and libgcc_s as in gcc 5.
NEWEST = {"GLIBC": portable_linker.GLIBC, "GLIBCXX": "3.4.21", "CXXABI": "1.3.9", "GCC": "4.3.0"}
#: Libraries of torch, and of the system, that a library may need.
_TORCH = ("libtorch_cpu.so", "libc10.so")
_SYSTEM = re.compile(r"lib(c|m|dl|rt|pthread|util|stdc\+\+|gcc_s)\.so\.\d+|ld-linux-x86-64\.so\.2")


def _numbers(version: str) -> list[int]:
    return [int(part) for part in version.split(".")]


def is_old_enough(version: str) -> bool:
    """Returns whether a symbol version, as GLIBC_2.14, is within NEWEST."""
    name, _, number = version.rpartition("_")
    return name in NEWEST and _numbers(number) <= _numbers(NEWEST[name])


def needed_versions(library: Path) -> list[str]:
    """Returns the symbol versions that a library needs from others, without duplicates."""
    symbols = subprocess.run(["nm", "-D", "--undefined-only", library], capture_output=True, text=True, check=True).stdout
    return sorted(set(re.findall(r"@([A-Z]+_[\d.]+)$", symbols, re.M)), key=lambda v: (v.split("_")[0], _numbers(v.split("_")[1])))


def problems_of(library: Path) -> list[str]:
    """Returns the libraries and the symbol versions that a library needs and may not need."""
    dynamic = subprocess.run(["readelf", "-dW", library], capture_output=True, text=True, check=True).stdout
    needed = re.findall(r"\(NEEDED\).*\[(.*)\]", dynamic)
    # beside the system's, the core library (Rust, kernels) needs none, and a shim, the library for one torch release, the core and torch's
    allowed = () if library.name == build_shims.CORE else (build_shims.CORE, *_TORCH)
    found = [f"needs {name}" for name in needed if name not in allowed and not _SYSTEM.fullmatch(name)]
    return found + [f"needs {version}" for version in needed_versions(library) if not is_old_enough(version)]


def auditwheel(wheel: Path) -> str:
    """Returns the oldest platform tag with every symbol, as manylinux_2_28_x86_64.

    auditwheel's overall verdict also rejects libraries outside the wheel; the shims need torch's."""
    command = [sys.executable, "-m", "auditwheel", "show", "--json", wheel]
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)["sym_tag"]


def no_newer_than(platform: str, promised: str) -> bool:
    """Returns whether the first of two platform tags, as manylinux_2_28_x86_64, needs no newer glibc than the second."""
    first, second = (re.fullmatch(r"manylinux_(\d+)_(\d+)_x86_64", name) for name in (platform, promised))
    return bool(first and second) and [int(part) for part in first.groups()] <= [int(part) for part in second.groups()]


def main(arguments: list[str]) -> int:
    if len(arguments) != 1:
        print(f"usage: {Path(__file__).name} WHEEL", file=sys.stderr)
        return 2
    wheel, found = Path(arguments[0]), []
    size = wheel.stat().st_size
    print(f"{wheel.name}: {size / 2**20:.1f} MiB")
    if size > LARGEST:
        found.append(f"{wheel.name} has more than {LARGEST / 2**20:.0f} MiB")
    if f"-{portable_linker.PLATFORM}." not in wheel.name:
        found.append(f"{wheel.name} is not of the platform {portable_linker.PLATFORM}")
    with tempfile.TemporaryDirectory() as folder:
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder)
        for library in sorted(Path(folder).rglob("*.so*")):
            name = library.relative_to(folder)
            newest = {version.split("_")[0]: version for version in needed_versions(library)}  # sorted: the last one stays
            print(f"{name}: {library.stat().st_size / 2**20:.2f} MiB, needs {', '.join(newest.values())}")
            found += [f"{name} {problem}" for problem in problems_of(library)]
    verdict = auditwheel(wheel)
    print(f"auditwheel: every symbol is on {verdict}")
    if not no_newer_than(verdict, portable_linker.PLATFORM):
        found.append(f"auditwheel takes {wheel.name} for {verdict}")
    for problem in found:
        print(f"volta_fa: {problem}", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
