"""Checks that everything needed to build the native libraries is installed. Prints one line per missing item, with the remedy.

setup.py calls this before a build, the Makefile before it installs anything (`--toolchain-only`) and before it runs cargo.
Uses Python's standard library only, because nothing is installed at that point. Each check_...() returns such a line, or None."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
import re
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

import torch_releases

PYTHON_OLDEST, PYTHON_NEWEST = (3, 10), (3, 14)
#: The last CUDA release with a compiler for sm_70.
NVRTC_RELEASE = "12.9"
#: The first setuptools that reads the license expression of pyproject.toml.
SETUPTOOLS_OLDEST = 77
#: A file of each wheel in section nvrtc of tools/requirements.txt, below nvidia/ in a folder of packages.
_NVRTC_FILES = ("cuda_nvrtc/lib/libnvrtc.so.12", "cuda_runtime/include/cuda_fp16.h", "cuda_nvcc/include/crt")
_PINS = Path(__file__).with_name("requirements.txt")


def requirements(section: str) -> list[str]:
    """Returns the pinned packages in a section of tools/requirements.txt."""
    sections = dict(re.findall(r"^# \[(.+?)\].*\n((?:.+\n)+)", _PINS.read_text(), re.M))
    return sections[section].splitlines()


_NVRTC_REMEDY = f"run `pip install {' '.join(requirements('nvrtc'))}`, or point VOLTA_FA_CUDA_HOME at a CUDA 12 toolkit"


def check_python(version: tuple[int, int] = sys.version_info[:2]) -> str | None:
    if PYTHON_OLDEST <= version <= PYTHON_NEWEST:
        return None
    found, oldest, newest = (".".join(map(str, v)) for v in (version, PYTHON_OLDEST, PYTHON_NEWEST))
    needs = f"volta_fa needs Python {oldest} to {newest}"
    return f"this is Python {found}, {needs}: install one of them (conda, pyenv or the system's packages)"


def check_cargo(path: str | None = None) -> str | None:
    if shutil.which("cargo", path=path):
        return None
    return "cargo is not on PATH: install Rust 1.86 or newer with rustup (https://rustup.rs), then open a new shell"


def check_compiler(environ: Mapping[str, str] = os.environ) -> str | None:
    compiler = environ.get("CXX", "g++")
    # CXX may have arguments or a launcher ("ccache g++"): only its first word must exist
    if shutil.which((compiler.split() or [""])[0], path=environ.get("PATH")):
        return None
    if "CXX" in environ:
        return f"CXX={compiler} is not there: install it, or unset CXX to use g++"
    return "g++ is not on PATH: install g++ 11 or newer (Debian and Ubuntu: `apt install g++`, Fedora: `dnf install gcc-c++`)"


def check_torch() -> str | None:
    remedy = f"run `{sys.executable} -m pip install torch=={torch_releases.DEFAULT}`"
    try:
        version = importlib.import_module("torch").__version__
    except ModuleNotFoundError:
        return f"torch is not installed for {sys.executable}: {remedy}"
    except Exception as error:  # a broken torch fails in many ways
        return f"torch is installed for {sys.executable} but does not load ({str(error).splitlines()[0]}): {remedy}"
    oldest, newest = torch_releases.MINORS[0], torch_releases.MINORS[-1]
    if torch_releases.minor(version) not in torch_releases.MINORS:
        return f"torch {version} is installed for {sys.executable}, volta_fa needs torch {oldest} to {newest}: {remedy}"
    return None


def check_build_packages() -> str | None:
    try:
        for package in requirements("build"):
            importlib.metadata.version(package.split("==")[0])
        version = importlib.metadata.version("setuptools")
    except importlib.metadata.PackageNotFoundError as error:
        found = f"{error.name} is not installed for {sys.executable}"
    else:
        if int(version.split(".")[0]) >= SETUPTOOLS_OLDEST:
            return None
        found = f"setuptools {version} is installed for {sys.executable}, volta_fa needs {SETUPTOOLS_OLDEST} or newer"
    return f"{found}: run `{sys.executable} -m pip install {' '.join(requirements('build'))}`"


def check_nvrtc(environ: Mapping[str, str] = os.environ) -> str | None:
    home = environ.get("VOLTA_FA_CUDA_HOME")
    if home:
        if any((Path(home) / lib / "libnvrtc.so.12").exists() for lib in ("lib64", "lib")):
            return None
        return f"VOLTA_FA_CUDA_HOME={home} has no lib64/libnvrtc.so.12: point it at a CUDA 12 toolkit, or unset it to use the PyPI wheels"
    roots = [Path(folder) / "nvidia" for folder in sys.path]
    missing = [name for name in _NVRTC_FILES if not any((root / name).exists() for root in roots)]
    if missing:
        return f"NVRTC {NVRTC_RELEASE} is not installed for {sys.executable} (no nvidia/{missing[0]}): {_NVRTC_REMEDY}"
    try:
        version = importlib.metadata.version("nvidia-cuda-nvrtc-cu12")
    except importlib.metadata.PackageNotFoundError:
        return None  # installed by other means than pip
    if not version.startswith(NVRTC_RELEASE + "."):
        return f"NVRTC {version} is installed, volta_fa needs {NVRTC_RELEASE}: {_NVRTC_REMEDY}"
    return None


def check_zig() -> str | None:
    if importlib.util.find_spec("ziglang"):
        return None
    (zig,) = (package for package in requirements("wheel") if package.startswith("ziglang"))
    remedy = f"run `{sys.executable} -m pip install {zig}`"
    return f"ziglang, with which VOLTA_FA_PORTABLE=1 links, is not installed for {sys.executable}: {remedy}"


def problems(
    *, toolchain_only: bool = False, active_torch: bool = True, portable: bool = False, environ: Mapping[str, str] = os.environ
) -> list[str]:
    """Returns one line per missing item; empty if the build can start.

    toolchain_only: checks Python, cargo and g++ alone. active_torch: this Python's torch too. portable: zig too, which links wheels."""
    checks = [check_python(), check_cargo(environ.get("PATH")), check_compiler(environ)]
    if not toolchain_only and checks[0] is None:
        checks += [check_torch() if active_torch else None, check_build_packages(), check_nvrtc(environ)]
        checks += [check_zig() if portable else None]
    return [problem for problem in checks if problem]


def main(arguments: list[str]) -> int:
    if arguments not in ([], ["--toolchain-only"]):
        print(f"usage: {Path(__file__).name} [--toolchain-only]", file=sys.stderr)
        return 2
    found = problems(toolchain_only=bool(arguments))
    for problem in found:
        print(f"volta_fa: {problem}", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
