"""Compiles the shims with CMake, and puts them and the core library, which cargo has built, into the package.

    python tools/build_shims.py                 # of target/release, for this Python's torch, into python/volta_fa
    python tools/build_shims.py --releases all  # for every release of tools/torch_releases.py, whose headers pip downloads

setup.py calls build().
"""

from __future__ import annotations

import argparse
import contextlib
import filecmp
import importlib.metadata
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path

import torch_releases

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "python" / "volta_fa"
CORE, SHIM = "libvolta_fa_core.so", "libvolta_fa.so"


def target_folder() -> Path:
    """Where cargo builds, and build.rs writes the headers that the shims include."""
    return Path(os.environ.get("CARGO_TARGET_DIR") or ROOT / "target").absolute()


def torch_folders(releases: str = "") -> dict[str, Path]:
    """Minor release to torch package: of this Python's torch, of `all` releases, or of those whose folders are named, between commas."""
    if releases == "all":
        cache = target_folder() / "torch"
        return {torch_releases.minor(release): torch_releases.download(release, cache) for release in torch_releases.RELEASES}
    if releases:
        folders = [Path(folder).absolute() for folder in releases.split(",")]
        return {_minor_of(folder): folder for folder in folders}
    found = torch_releases.installed()
    if found is None:
        raise SystemExit(f"volta_fa: torch is not installed for {sys.executable}")
    return {torch_releases.minor(found[0]): found[1]}


def _minor_of(folder: Path) -> str:
    """What a torch package's headers say of its release."""
    numbers = {}
    for header in ("torch/headeronly/version.h", "torch/csrc/api/include/torch/version.h"):
        path = folder / "include" / header
        for line in path.read_text().splitlines() if path.exists() else []:
            match line.split():
                case ["#define", "TORCH_VERSION_MAJOR" | "TORCH_VERSION_MINOR" as name, number]:
                    numbers[name] = number
    if len(numbers) != 2:
        raise SystemExit(
            f"volta_fa: {folder} has no headers of torch: VOLTA_FA_TORCH_RELEASES names folders with include/ and lib/, or is `all`"
        )
    return f"{numbers['TORCH_VERSION_MAJOR']}.{numbers['TORCH_VERSION_MINOR']}"


def program(name: str, environ: Mapping[str, str] = os.environ) -> str:
    """A build tool, this environment's before others on PATH, before that of another environment whose packages this one sees."""
    path = os.pathsep.join([sysconfig.get_path("scripts"), environ.get("PATH", "")])
    found = shutil.which(name, path=path)
    if found is None:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            installed = [Path(file.locate()) for file in importlib.metadata.files(name) or () if file.name == name]
            found = next((str(file.resolve()) for file in installed if os.access(file, os.X_OK) and file.is_file()), None)
    if found is None:
        raise SystemExit(f"volta_fa: {name} is not installed for {sys.executable}")
    return found


def build(core: Path, package: Path, *, releases: str = "", linker: str = "") -> list[Path]:
    """The libraries of `package`, made or brought up to date: `core` and a shim for each release. `linker` as in the CMakeLists."""
    folders = torch_folders(releases)
    work = target_folder() / "shims"
    settings = {
        "VOLTA_FA_CORE": core,
        "VOLTA_FA_HEADERS": target_folder() / "volta-fa-headers",
        "VOLTA_FA_TORCH": ";".join(f"{release}={folder}" for release, folder in folders.items()),
        "VOLTA_FA_LINKER": linker,
    }
    configure = [program("cmake"), "-G", "Ninja", "-S", ROOT / "torch_ops", "-B", work, f"-DCMAKE_MAKE_PROGRAM={program('ninja')}"]
    configure += [f"-D{name}={value}" for name, value in settings.items()]
    # A target folder that checkouts share, as CARGO_TARGET_DIR can name one: CMake refuses what it has not configured itself.
    cache = work / "CMakeCache.txt"
    if cache.exists() and f"CMAKE_HOME_DIRECTORY:INTERNAL={ROOT / 'torch_ops'}\n" not in cache.read_text():
        shutil.rmtree(work)
    for command in (configure, [program("cmake"), "--build", work]):
        ran = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if ran.returncode != 0:
            print(ran.stdout, end="", file=sys.stderr)
            raise SystemExit("volta_fa: torch_ops/ does not compile or link: the lines above say why (g++ 11 or newer is needed)")
    # A shim of an earlier build may call the core library otherwise than this one expects.
    for stale in package.glob("torch-*"):
        if stale.name.removeprefix("torch-") not in folders:
            shutil.rmtree(stale)
    libraries = [_install(core, package / CORE)]
    return libraries + [_install(work / name / SHIM, package / name / SHIM) for name in (f"torch-{release}" for release in folders)]


def _install(source: Path, destination: Path) -> Path:
    """Copied as a whole and only if it changed: a Python that runs has the old file mapped."""
    if not (destination.exists() and filecmp.cmp(source, destination, shallow=False)):
        destination.parent.mkdir(parents=True, exist_ok=True)
        fresh = destination.with_suffix(".so.new")
        shutil.copy(source, fresh)
        fresh.rename(destination)
    return destination


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--releases", default="", help="`all`, or folders of torch packages between commas; this Python's torch unless given"
    )
    build(target_folder() / "release" / SHIM, PACKAGE, releases=parser.parse_args().releases)
    return 0


if __name__ == "__main__":
    sys.exit(main())
