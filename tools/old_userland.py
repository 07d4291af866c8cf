"""Checks that a shim loads and computes with the C and C++ libraries of an older Linux.

    python tools/old_userland.py FOLDER                       # fills FOLDER: packages of Debian 11 (with apt-get), and a program
    python tools/old_userland.py FOLDER TORCH_PACKAGE SHIM    # loads both there, without Python, and calls an operator

Debian 11 (glibc 2.31, libstdc++ of gcc 10) is the oldest release on Debian's mirrors.
For older systems, down to glibc 2.28, tools/check_wheel.py checks the versions of symbols.
A library that was linked without tools/portable_linker.py fails here, because it refers to newer symbols.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import portable_linker

SUITE = "bullseye"
PACKAGES = ("libc6", "libstdc++6", "libgcc-s1", "libgomp1", "zlib1g")
_KEYS = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
_LIBRARIES = ("lib/x86_64-linux-gnu", "usr/lib/x86_64-linux-gnu")
_SOURCE, _PROGRAM = Path(__file__).with_suffix(".c"), "load"


class Unavailable(Exception):
    """This machine cannot provide the old libraries."""


def _run(*command: str | Path, cwd: Path | None = None) -> str:
    ran = subprocess.run(command, capture_output=True, text=True, cwd=cwd)
    if ran.returncode != 0:
        raise Unavailable(f"`{' '.join(map(str, command[:3]))} ...` failed: {(ran.stderr.strip() or ran.stdout.strip())[-300:]}")
    return ran.stdout


def _mirror() -> str:
    """Returns the Debian mirror in this machine's package sources."""
    if shutil.which("apt-get") is None or shutil.which("dpkg") is None:
        raise Unavailable("no apt-get here")
    found = re.findall(r"^(\S+/debian/?)$", _run("apt-get", "indextargets", "--format", "$(REPO_URI)", "Created-By: Packages"), re.M)
    if not found or not _KEYS.exists():
        raise Unavailable("this machine has no mirror of Debian")
    return found[0]


def prepare(folder: Path) -> Path:
    """Returns the folder with the old libraries and the program. Makes it if it is missing, without a change to apt's state."""
    folder = folder.absolute()
    if (folder / _PROGRAM).exists():
        return folder
    mirror, apt = _mirror(), folder / "apt"
    shutil.rmtree(folder, ignore_errors=True)
    for name in ("lists/partial", "cache/archives/partial", "packages"):
        (apt / name).mkdir(parents=True)
    (apt / "status").touch()
    (apt / "sources.list").write_text(f"deb [signed-by={_KEYS}] {mirror} {SUITE} main\n")
    settings = {"State": "", "State::Lists": "lists", "State::Status": "status", "Cache": "cache", "Etc::SourceList": "sources.list"}
    options = [f"-oDir::{name}={apt / path}" for name, path in settings.items()] + [
        "-oDir::Etc::SourceParts=-",
        "-oAPT::Sandbox::User=root",
    ]
    _run("apt-get", *options, "update")
    _run("apt-get", *options, "download", *PACKAGES, cwd=apt / "packages")
    for package in (apt / "packages").glob("*.deb"):
        _run("dpkg", "-x", package, folder)
    shutil.rmtree(apt)
    linker = (sys.executable, Path(portable_linker.__file__))
    _run(*linker, "-O1", _SOURCE, "-o", folder / f"{_PROGRAM}.new", "-ldl", "-lm")
    (folder / f"{_PROGRAM}.new").rename(folder / _PROGRAM)
    return folder


def complaint(folder: Path, torch: Path, shim: Path) -> str:
    """Returns the errors with this torch package and this shim; empty if there are none."""
    path = ":".join(str(folder / part) for part in _LIBRARIES)
    libraries = [torch / "lib" / name for name in ("libc10.so", "libtorch_cpu.so")]
    command = [folder / _LIBRARIES[0] / "ld-linux-x86-64.so.2", "--library-path", path, folder / _PROGRAM, *libraries, shim]
    ran = subprocess.run(command, capture_output=True, text=True)
    return "" if ran.returncode == 0 else ran.stderr.strip() or f"ended with {ran.returncode}"


def main(arguments: list[str]) -> int:
    if len(arguments) not in (1, 3):
        print(f"usage: {Path(__file__).name} FOLDER [TORCH_PACKAGE SHIM]", file=sys.stderr)
        return 2
    try:
        folder = prepare(Path(arguments[0]))
    except Unavailable as error:
        print(f"volta_fa: {error}", file=sys.stderr)
        return 2
    if len(arguments) == 1:
        return 0
    found = complaint(folder, *(Path(argument).absolute() for argument in arguments[1:]))
    print(found or "loads and computes", file=sys.stderr if found else sys.stdout)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
