"""Whether a wheel that `make wheel` has built loads on every Linux on which torch's own wheels do.

    python tools/check_wheel.py dist/volta_fa-*.whl

Prints its size, what each library needs, and auditwheel's verdict; the exit status is 1 if any of it is more than is promised.
"""

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

#: Bytes that a wheel may have.
LARGEST = 40 * 2**20
#: The newest versions of symbols that a library may need: of glibc as portable_linker says, of libstdc++ and libgcc_s those of gcc 5.
NEWEST = {"GLIBC": portable_linker.GLIBC, "GLIBCXX": "3.4.21", "CXXABI": "1.3.9", "GCC": "4.3.0"}
#: What else a process has: torch, and the core beside the shims.
_TORCH = ("libtorch_cpu.so", "libc10.so")
_SYSTEM = re.compile(r"lib(c|m|dl|rt|pthread|util|stdc\+\+|gcc_s)\.so\.\d+|ld-linux-x86-64\.so\.2")


def _numbers(version: str) -> list[int]:
    return [int(part) for part in version.split(".")]


def is_old_enough(version: str) -> bool:
    """Of a symbol's version, as GLIBC_2.14."""
    name, _, number = version.rpartition("_")
    return name in NEWEST and _numbers(number) <= _numbers(NEWEST[name])


def needed_versions(library: Path) -> list[str]:
    """The versions of other libraries' symbols that this one needs, each once."""
    symbols = subprocess.run(["nm", "-D", "--undefined-only", library], capture_output=True, text=True, check=True).stdout
    return sorted(set(re.findall(r"@([A-Z]+_[\d.]+)$", symbols, re.M)), key=lambda v: (v.split("_")[0], _numbers(v.split("_")[1])))


def problems_of(library: Path) -> list[str]:
    dynamic = subprocess.run(["readelf", "-dW", library], capture_output=True, text=True, check=True).stdout
    needed = re.findall(r"\(NEEDED\).*\[(.*)\]", dynamic)
    allowed = () if library.name == build_shims.CORE else (build_shims.CORE, *_TORCH)
    found = [f"needs {name}" for name in needed if name not in allowed and not _SYSTEM.fullmatch(name)]
    return found + [f"needs {version}" for version in needed_versions(library) if not is_old_enough(version)]


def auditwheel(wheel: Path) -> str:
    """The oldest platform that has every symbol. (Its other verdict minds that torch is none of the platform's libraries.)"""
    command = [sys.executable, "-m", "auditwheel", "show", "--json", wheel]
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)["sym_tag"]


def no_newer_than(platform: str, promised: str) -> bool:
    """Of two names like manylinux_2_28_x86_64, whether the first asks for no more."""
    glibc = [re.fullmatch(r"manylinux_(\d+)_(\d+)_x86_64", name) for name in (platform, promised)]
    return all(glibc) and [int(part) for part in glibc[0].groups()] <= [int(part) for part in glibc[1].groups()]


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
