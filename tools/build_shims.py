"""Builds the shims and installs them into the package, with the core library that `cargo build` made.

    python tools/build_shims.py                 # for this Python's torch: target/release into python/volta_fa
    python tools/build_shims.py --releases all  # for every release in tools/torch_releases.py; pip downloads their headers

This script finds torch. The program in tools/shims compiles and links. setup.py calls build().
"""

from __future__ import annotations

import argparse
import filecmp
import os
import shutil
import subprocess
import sys
from pathlib import Path

import torch_releases

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "python" / "volta_fa"
CORE, SHIM = "libvolta_fa_core.so", "libvolta_fa.so"


def target_folder() -> Path:
    """Returns cargo's target folder. build.rs writes the headers for the shims there."""
    return Path(os.environ.get("CARGO_TARGET_DIR") or ROOT / "target").absolute()


def torch_folders(releases: str = "") -> dict[str, Path]:
    """Maps minor releases to torch packages: this Python's torch, `all` releases, or comma-separated folders of torch packages."""
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
    """Returns the release in a torch package's headers, as 2.11."""
    numbers = {}
    for header in ("torch/headeronly/version.h", "torch/csrc/api/include/torch/version.h"):
        path = folder / "include" / header
        for line in path.read_text().splitlines() if path.exists() else []:
            match line.split():
                case ["#define", "TORCH_VERSION_MAJOR" | "TORCH_VERSION_MINOR" as name, number]:
                    numbers[name] = number
    if len(numbers) != 2:
        raise SystemExit(
            f"volta_fa: VOLTA_FA_TORCH_RELEASES: got {folder} without torch headers, expected `all` or folders with include/ and lib/"
        )
    return f"{numbers['TORCH_VERSION_MAJOR']}.{numbers['TORCH_VERSION_MINOR']}"


def build(core: Path, package: Path, *, releases: str = "", linker: Path | None = None) -> list[Path]:
    """Builds a shim for each release and installs it and `core` into `package`. `linker` replaces the compiler for links.

    Returns the installed libraries. Compiles only what changed.
    """
    folders = torch_folders(releases)
    work = target_folder() / "shims"
    command = ["cargo", "run", "--release", "--locked", "--quiet", "--package", "volta-fa-shims", "--"]
    command += ["--root", ROOT, "--core", core, "--headers", target_folder() / "volta-fa-headers", "--out", work]
    command += ["--linker", linker] if linker else []
    command += [f"{release}={folder}" for release, folder in folders.items()]
    if subprocess.run(command, cwd=ROOT).returncode != 0:
        raise SystemExit("volta_fa: torch_ops/ does not compile or link: the lines above say why (g++ 11 or newer is needed)")
    # A shim from an earlier build may not match this core library.
    for stale in package.glob("torch-*"):
        if stale.name.removeprefix("torch-") not in folders:
            shutil.rmtree(stale)
    libraries = [_install(core, package / CORE)]
    return libraries + [_install(work / name / SHIM, package / name / SHIM) for name in (f"torch-{release}" for release in folders)]


def _install(source: Path, destination: Path) -> Path:
    """Replaces the file as a whole, if it changed: a running Python keeps the old file mapped."""
    if not (destination.exists() and filecmp.cmp(source, destination, shallow=False)):
        destination.parent.mkdir(parents=True, exist_ok=True)
        fresh = destination.with_suffix(".so.new")
        shutil.copy(source, fresh)
        fresh.rename(destination)
    return destination


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--releases", default="", help="`all`, or comma-separated folders of torch packages; default: this Python's torch")
    build(target_folder() / "release" / SHIM, PACKAGE, releases=parser.parse_args().releases)
    return 0


if __name__ == "__main__":
    sys.exit(main())
