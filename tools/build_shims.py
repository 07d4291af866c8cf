"""Builds the shims and installs them into the package, with the core library that `cargo build` made.

    python tools/build_shims.py                 # for this Python's torch: target/release into python/volta_fa
    python tools/build_shims.py --releases all  # for every release in tools/torch_releases.py; pip downloads their headers

`make build` runs it; setup.py, for wheels, calls build(). A shim is the library for one minor release of torch, since their C++ interfaces
differ, made of the C++ in torch_ops/ alone. Kernels and Rust are in the core library, which all shims share. The core leaves functions
undefined, and each shim exports exactly these."""

from __future__ import annotations

import argparse
import filecmp
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import heartbeat
import portable_linker
import torch_releases

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "python" / "volta_fa"
CORE, SHIM = "libvolta_fa_core.so", "libvolta_fa.so"
#: The first release of torch with headers that need C++20.
CXX20_SINCE = (2, 14)
#: Seconds between lines about the progress. Lines, not a bar, so that a pipe and a log have them too.
INTERVAL = 10.0


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
    version, folder = found
    return {torch_releases.minor(version): folder}


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
        wrong = f"got {folder} without torch headers, expected `all` or folders with include/ and lib/"
        raise SystemExit(f"volta_fa: VOLTA_FA_TORCH_RELEASES: {wrong}")
    return f"{numbers['TORCH_VERSION_MAJOR']}.{numbers['TORCH_VERSION_MINOR']}"


@dataclass(frozen=True)
class Step:
    """A command that makes `output` from `inputs`, and from the headers in the compiler's dependency file (`-MD`).

    As in make, it runs only if something changed. A file beside the output, with suffix .command, keeps the command that made it."""

    command: list[str]
    output: Path
    inputs: list[Path]

    def run(self) -> None:
        """Runs the command unless the output is up to date."""
        if self.is_up_to_date():
            return
        stamp = self.output.with_suffix(".command")
        stamp.parent.mkdir(parents=True, exist_ok=True)
        stamp.unlink(missing_ok=True)  # an interrupted or failed command leaves no stamp
        ran = subprocess.run(self.command, capture_output=True, text=True)
        sys.stderr.write(ran.stderr)
        if ran.returncode != 0:
            raise SystemExit(f"{ran.stdout}volta_fa: cannot make {self.output}: the lines above say why (g++ 11 or newer is needed)")
        stamp.write_text(json.dumps(self.command))

    def is_up_to_date(self) -> bool:
        """Returns whether this command made the output, and no input is newer."""
        stamp, headers = self.output.with_suffix(".command"), self.output.with_suffix(".d")
        if not (self.output.exists() and stamp.exists() and stamp.read_text() == json.dumps(self.command)):
            return False
        inputs = [*self.inputs, *(prerequisites(headers.read_text()) if headers.exists() else [])]
        return all(path.exists() and path.stat().st_mtime <= self.output.stat().st_mtime for path in inputs)


def prerequisites(rule: str) -> list[Path]:
    """Returns the files after the colon of a make rule, as compilers write it: a backslash continues a line and escapes blanks."""
    files = rule.partition(": ")[2].replace("\\\n", " ")
    return [Path(file.replace("\\ ", " ")) for file in re.findall(r"(?:\\ |\S)+", files)]


def run_all(steps: Sequence[Step], done: Callable[[], None] = lambda: None) -> None:
    """Runs steps on all CPUs. After an error no further one starts."""
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        running = [pool.submit(step.run) for step in steps]
        try:
            for step in running:
                step.result()
                done()
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)
            raise


class Progress:
    """Prints how many of `of` units are compiled: at the begin, about every INTERVAL, and at the end. Prints nothing for no units."""

    def __init__(self, of: int) -> None:
        self.done, self.of = 0, of
        if of:
            self._say()

    def advance(self) -> None:
        self.done += 1
        if self.done == self.of or time.monotonic() - self._said >= INTERVAL:
            self._say()

    def _say(self) -> None:
        self._said = time.monotonic()
        # the cursor may be at the end of cargo's bar; pip hides standard error
        line = f"\r\033[Kvolta_fa: compiled {self.done} of {self.of} C++ units\n"
        try:
            with open(os.environ[heartbeat.PROGRESS], "a") as file:  # $VOLTA_FA_PROGRESS
                file.write(line)
        except (KeyError, OSError):
            sys.stderr.write(line)
            sys.stderr.flush()


def symbols(library: Path, kinds: str) -> set[str]:
    """Returns the dynamic symbols of these kinds of nm without a version. Those of the C library have one, as memcpy@GLIBC_2.14."""
    listed = subprocess.run(["nm", "-D", "--with-symbol-versions", library], capture_output=True, text=True, check=True).stdout
    return set(re.findall(rf"^[ 0-9a-f]* [{kinds}] ([^@\s]+)$", listed, re.M))


def needed_from_shim(core: Path) -> set[str]:
    """Returns the functions that the core library expects a shim to define: undefined (U), and not weak, which may stay undefined."""
    needed = symbols(core, "U")
    if not needed:
        raise SystemExit(f"volta_fa: {core} needs no function of a shim, expected the core library")
    return needed


def version_script(exports: set[str]) -> str:
    """Returns the linker's script that exports these functions and nothing else."""
    return f"{{ global: {'; '.join(sorted(exports))}; local: *; }};\n"


def check_exports(shim: Path, needed: set[str]) -> None:
    """Fails, and removes the shim, if it does not export all of `needed`: here, and not when the library is imported."""
    missing = needed - symbols(shim, "TW")  # defined functions, strong and weak
    if missing:
        shim.unlink()
        raise SystemExit(f"volta_fa: Rust calls functions that torch_ops/ does not define: {', '.join(sorted(missing))}")


def compiler(release: str, torch: Path) -> list[str]:
    """Returns the compiler with all flags of a release of torch."""
    standard = "c++20" if tuple(map(int, release.split("."))) >= CXX20_SINCE else "c++17"
    command = shlex.split(os.environ.get("CXX", "g++"))
    command += ["-O2", "-ffunction-sections", "-fdata-sections", "-fPIC", "-m64", "-march=x86-64"]
    command += [f"-std={standard}", "-I", str(target_folder() / "volta-fa-headers"), "-I", str(ROOT / "torch_ops"), "-Wall", "-Wextra"]
    command += ["-Wno-maybe-uninitialized"]  # g++ 12 warns wrongly about std::optional in templates of torch
    for include in ("include", "include/torch/csrc/api/include"):
        command += ["-isystem", str(torch / include)]  # no warnings about headers of torch
    return [*command, "-DNDEBUG", "-D_GLIBCXX_USE_CXX11_ABI=1", *shlex.split(os.environ.get("CXXFLAGS", ""))]


def compile_steps(release: str, torch: Path, work: Path, portable: bool, units: int) -> list[Step]:
    """Returns the steps that compile torch_ops/ as this many units, with `portable` the symbols of tools/portable_linker.py too.

    A unit is a generated file that includes several sources, because torch's headers cost more time than a source."""
    # dealt out from the largest on, so that units have about the same size
    sources = sorted((ROOT / "torch_ops").glob("*.cpp"), key=lambda source: (-source.stat().st_size, source.name))
    folder, command, steps = work / f"torch-{release}" / "objects", compiler(release, torch), []
    folder.mkdir(parents=True, exist_ok=True)
    count = min(units, len(sources))
    texts = {f"unit-{i}-of-{count}": "".join(f'#include "{source}"\n' for source in sources[i::count]) for i in range(count)}
    if portable:  # alone, because it declares functions before the standard library does
        texts["portable"] = portable_linker.SYMBOLS
    for name, text in texts.items():
        unit = folder / f"{name}.cpp"
        if not (unit.exists() and unit.read_text() == text):
            unit.write_text(text)
        output = unit.with_suffix(".o")
        steps.append(Step([*command, "-MD", "-c", str(unit), "-o", str(output)], output, [unit]))
    return steps


def link_step(release: str, torch: Path, core: Path, objects: list[Path], exports: Path, linker: Path | None) -> Step:
    """Returns the step that links a release's shim into the folder of `exports`, the version script. `linker` as in build()."""
    shim = exports.parent / f"torch-{release}" / SHIM
    libraries = [core, torch / "lib" / "libtorch_cpu.so", torch / "lib" / "libc10.so"]
    command = [str(linker)] if linker else compiler(release, torch)
    command += ["-shared", *(f"-Wl,{flag}" for flag in ("-z,defs", "--gc-sections", "--strip-debug", "--enable-new-dtags"))]
    command += [f"-Wl,--version-script={exports}", *os.environ.get("LDFLAGS", "").split(), f"-Wl,-soname,{SHIM}", "-o", str(shim)]
    # the core library is beside the folders of the releases
    command += [*map(str, objects), "-Wl,-rpath,$ORIGIN/..", *map(str, libraries)]
    command += ["-lstdc++", "-lgcc_s"] if linker else []  # the compiler adds these by itself
    return Step(command, shim, [*objects, *libraries, exports])


def build(core: Path, package: Path, *, releases: str = "", linker: Path | None = None) -> list[Path]:
    """Builds a shim for each release (torch_folders) and installs it and `core` into `package`. Returns the installed libraries.

    linker: the program that links, a script that runs tools/portable_linker.py. None: the compiler."""
    folders = torch_folders(releases)
    work = target_folder() / "shims"
    work.mkdir(parents=True, exist_ok=True)
    needed, exports = needed_from_shim(core), work / "exports.map"
    script = version_script(needed)
    if not (exports.exists() and exports.read_text() == script):
        exports.write_text(script)
    units = max(1, len(os.sched_getaffinity(0)) // len(folders))
    compiles = {release: compile_steps(release, torch, work, linker is not None, units) for release, torch in folders.items()}
    objects = {release: [step.output for step in steps] for release, steps in compiles.items()}
    links = [link_step(release, torch, core, objects[release], exports, linker) for release, torch in folders.items()]
    stale = [step for steps in compiles.values() for step in steps if not step.is_up_to_date()]
    run_all(stale, Progress(len(stale)).advance)
    run_all(links)
    for link in links:
        check_exports(link.output, needed)
    # A shim from an earlier build may not match this core library.
    for old in package.glob("torch-*"):
        if old.name.removeprefix("torch-") not in folders:
            shutil.rmtree(old)
    return [_install(core, package / CORE)] + [_install(link.output, package / link.output.parent.name / SHIM) for link in links]


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
