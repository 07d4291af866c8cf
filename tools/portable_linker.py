"""Links as a compiler would, but for the oldest Linux on which torch's own wheels run: for rustc, and for CMake's shims.

zig, from PyPI, brings the symbols of every glibc and a linker, and takes glibc's old versions. libstdc++ and libgcc_s, which a process
shares with torch, are the system's as far as the link goes; what only newer ones have, tools/portable_symbols.cpp defines. (zig's own
libc++ would not pass exceptions to torch, nor its static unwinder to Rust.)
"""

from __future__ import annotations

import importlib.util
import os
import shlex
import subprocess
import sys
from pathlib import Path

#: What torch's wheels from 2.7 on need themselves.
GLIBC = "2.28"
PLATFORM = f"manylinux_{GLIBC.replace('.', '_')}_x86_64"
#: A library by name, as rustc asks for it, that is to be the system's and not one that zig makes.
_SYSTEM = {"-lgcc_s": "libgcc_s.so.1", "-lstdc++": "libstdc++.so.6"}


def zig() -> Path | None:
    """The program, if its package is installed."""
    spec = importlib.util.find_spec("ziglang")
    return Path(spec.origin).with_name("zig") if spec and spec.origin else None


def command() -> str:
    """For a shell: this script, run by the Python that runs now."""
    return f"{shlex.quote(sys.executable)} {shlex.quote(str(Path(__file__).resolve()))}"


def script(folder: Path) -> Path:
    """For a program that takes a linker's path without arguments, as rustc: written into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "portable-linker"
    path.write_text(f'#!/bin/sh\nexec {command()} "$@"\n')
    path.chmod(0o755)
    return path


def system_library(name: str) -> str:
    """Where the C++ compiler finds a library that it would link itself."""
    compiler = shlex.split(os.environ.get("CXX", "g++"))
    return subprocess.run([*compiler, f"-print-file-name={name}"], capture_output=True, text=True, check=True).stdout.strip()


def arguments(given: list[str]) -> list[str]:
    return [system_library(_SYSTEM[argument]) if argument in _SYSTEM else argument for argument in given]


def main(given: list[str]) -> None:
    program = zig()
    if program is None:
        raise SystemExit(f"volta_fa: ziglang is not installed for {sys.executable}")
    os.execv(program, [str(program), "cc", "-target", f"x86_64-linux-gnu.{GLIBC}", *arguments(given)])


if __name__ == "__main__":
    main(sys.argv[1:])
