"""The releases of torch that volta_fa is built for: the one list, for builds, tests and messages, and where a build finds their headers.

    python tools/torch_releases.py FOLDER [RELEASE ...]     # downloads what a build needs of these releases (default: of all)

A shim, volta_fa's library for one torch (tools/build_shims.py), is compiled against one release and loads into every patch release of that
minor one. Needs the standard library, and pip to download."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

#: One patch release of each minor one.
RELEASES = ("2.7.1", "2.8.0", "2.9.1", "2.10.0", "2.11.0", "2.12.1", "2.13.0", "2.14.1", "2.15.0")
#: What a new environment gets.
DEFAULT = "2.11.0"
#: Before this release c10::Stream does not tell its handle; torch_ops/stream.cpp asks this function of libtorch_cuda instead.
STREAM_SINCE, STREAM_FUNCTION = "2.11", "aoti_torch_get_current_cuda_stream"
#: A Python for which every release has a wheel. What is taken out of one does not depend on it.
_PYTHON = "3.11"


def minor(version: str) -> str:
    """Returns the minor release, as 2.10 of 2.10.0+cu128."""
    return ".".join(version.split("+")[0].split(".")[:2])


MINORS = tuple(minor(release) for release in RELEASES)
_MAJOR, _LAST = MINORS[-1].split(".")
#: The requirement in pyproject.toml; tests/test_package.py compares them.
REQUIREMENT = f"torch>={MINORS[0]},<{_MAJOR}.{int(_LAST) + 1}"


def installed() -> tuple[str, Path] | None:
    """Returns version and folder of this Python's torch; None without one. Does not import it: that takes seconds, and may fail."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    folder = Path(spec.origin).parent
    version = re.search(r"^__version__ = ['\"](.*?)['\"]", (folder / "version.py").read_text(), re.M)
    return (version[1], folder) if version else None


def download(release: str, folder: Path) -> Path:
    """Returns the torch package of this release below `folder`, downloaded if missing: what a shim needs, include/ and libraries."""
    torch = folder / release / "torch"
    if torch.exists():
        return torch
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=f"{release}-") as scratch:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps", f"torch=={release}"]
        command += ["--only-binary=:all:", "--python-version", _PYTHON, "--platform", "manylinux_2_28_x86_64", "--dest", scratch]
        if subprocess.run(command).returncode != 0:
            raise SystemExit(f"volta_fa: `{' '.join(command)}` failed: its last lines above say why")
        (wheel,) = Path(scratch).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            wanted = ("torch/include/", "torch/lib/libtorch_cpu.so", "torch/lib/libc10.so")
            archive.extractall(scratch, [name for name in archive.namelist() if name.startswith(wanted)])
        # as a whole or not at all: a download that was broken off is no release
        torch.parent.mkdir(exist_ok=True)
        shutil.move(Path(scratch) / "torch", torch)
    return torch


def defines(library: Path, function: str) -> bool:
    """Returns whether a shared library exports this function, so that dlsym() finds it."""
    command = ["nm", "-D", "--defined-only", library]
    symbols = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return re.search(rf" [TW] {function}(@|$)", symbols, re.M) is not None


def main(arguments: list[str]) -> int:
    if not arguments or not set(arguments[1:]) <= set(RELEASES):
        print(f"usage: {Path(__file__).name} FOLDER [RELEASE ...], of {', '.join(RELEASES)}", file=sys.stderr)
        return 2
    for release in arguments[1:] or RELEASES:
        print(download(release, Path(arguments[0])), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
