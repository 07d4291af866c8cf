"""Links for the oldest Linux on which torch's own wheels run. For `make wheel`, rustc and tools/build_shims.py run it as their linker.

zig, from PyPI, has a linker and the symbols of every glibc, so it can link against an old one.
libstdc++ and libgcc_s come from the system, because a process shares them with torch: exceptions cross library boundaries.
SYMBOLS defines what only newer versions of these two, and of glibc, have."""

from __future__ import annotations

import importlib.util
import os
import shlex
import subprocess
import sys
from pathlib import Path

#: The glibc that torch wheels need, from 2.7 on.
GLIBC = "2.28"
PLATFORM = f"manylinux_{GLIBC.replace('.', '_')}_x86_64"
#: Libraries to take from the system instead of zig.
_SYSTEM = {"-lgcc_s": "libgcc_s.so.1", "-lstdc++": "libstdc++.so.6"}

#: C++ source of symbols that code of a new g++ refers to and that older libraries lack, so that the wheel loads there. Hidden, so no other
#: library sees them. tools/build_shims.py compiles it into each shim (torch_ops for one release of torch) that is linked here.
SYMBOLS = """
#include <new>
// glibc 2.32 has it. While it is true, std::shared_ptr counts without atomics. A process with torch has threads: always false.
extern "C" {
__attribute__((visibility("hidden"))) char __libc_single_threaded = 0;
}
namespace std {
// libstdc++ of gcc 11 (GLIBCXX_3.4.29)
__attribute__((visibility("hidden"), noreturn)) void __throw_bad_array_new_length() { throw bad_array_new_length(); }
}  // namespace std
"""


def zig() -> Path | None:
    """Returns the zig program, or None if its package is not installed."""
    spec = importlib.util.find_spec("ziglang")
    return Path(spec.origin).with_name("zig") if spec and spec.origin else None


def script(folder: Path) -> Path:
    """Writes a shell script into `folder` that runs this file, and returns its path: rustc takes a linker without arguments only."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "portable-linker"
    path.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} {shlex.quote(str(Path(__file__).resolve()))} "$@"\n')
    path.chmod(0o755)
    return path


def system_library(name: str) -> str:
    """Returns the path of a library that the C++ compiler would link."""
    compiler = shlex.split(os.environ.get("CXX", "g++"))
    return subprocess.run([*compiler, f"-print-file-name={name}"], capture_output=True, text=True, check=True).stdout.strip()


def arguments(given: list[str]) -> list[str]:
    """Returns a linker's arguments with paths in place of the libraries in _SYSTEM."""
    return [system_library(_SYSTEM[argument]) if argument in _SYSTEM else argument for argument in given]


def main(given: list[str]) -> None:
    program = zig()
    if program is None:
        raise SystemExit(f"volta_fa: ziglang is not installed for {sys.executable}")
    os.execv(program, [str(program), "cc", "-target", f"x86_64-linux-gnu.{GLIBC}", *arguments(given)])


if __name__ == "__main__":
    main(sys.argv[1:])
