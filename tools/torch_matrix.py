"""Installs the wheel and each torch release in an environment of its own, and runs tests of each kind of use there.

    python tools/torch_matrix.py WHEEL                              # every release of tools/torch_releases.py
    python tools/torch_matrix.py WHEEL --releases 2.10.0 2.15.0
    python tools/torch_matrix.py WHEEL --docs                       # and put the table into docs/reference/compatibility.md

`CHECKS` names the tests. Prints the Markdown of a table, and writes it and JSON to --output.
uv makes the environments as links into its cache. Each environment is removed after its checks: the run needs about 12 GB of disk.
The releases use different supported Pythons, if installed. On Debian, a test also loads the libraries with those of Debian 11.

Exit status: 0 if every check passed, 1 if one did not, 2 if a release could not be tried."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from dataclasses import asdict, dataclass, field
from pathlib import Path

import check_build_env
import portable_linker  # the linker of wheels, for an old glibc
import torch_releases

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs" / "reference" / "compatibility.md"
MARKS = ("<!-- the matrix: tools/torch_matrix.py --docs -->", "<!-- end of the matrix -->")
#: The oldest release that volta_fa.transformers supports and what it needs, for a folder of its own.
OLD_TRANSFORMERS = check_build_env.requirements("transformers-4.57")
#: Ends of the ids of two problems in CHECKS: number of keys, heads (h), headdim (d) and mask.
PROBLEMS = ("33_h2_d64_causal", "255_h2_d64")
#: The table's rows and the tests of each: functions, or one of a function's cases.
CHECKS = {
    "symbols": ["test_torch_matrix.py::test_all_symbols_are_found"],
    "stream": ["test_torch_matrix.py::test_torch_exports_the_function_of_the_stream"],
    "old userland": ["test_torch_matrix.py::test_the_libraries_of_an_older_linux"],
    "gradients fp32": [f"test_forward_backward.py::test_problem[cpu-fp32-b2_q17_k{case}]" for case in PROBLEMS],
    "simulated fp16": [f"test_forward_backward.py::test_problem[sim-b2_q17_k{case}]" for case in PROBLEMS],
    "simulated bf16": ["test_features.py::test_problem[sim-bf16-b2_q60_k70_h2_d128_causal]"],
    "gradcheck": ["test_dropout.py::test_gradcheck"],
    "opcheck": ["test_block_mask.py::test_opcheck", "test_kvcache_quantized.py::test_opcheck"],
    "fake tensors": ["test_autograd.py::test_opcheck_of_strided_inputs"],
    "autocast": ["test_autograd.py::test_autocast_cpu"],
    "dropout": ["test_dropout.py::test_dropout_follows_the_generators"],
    "errors": ["test_validation.py::test_none_for_a_required_tensor", "test_routes.py::test_functorch_says_what_it_cannot_do"],
    "vmap": ["test_routes.py::test_vmap"],
    "inference mode": ["test_autograd.py::test_inference_mode"],
    "double backward": ["test_autograd.py::test_second_derivative_is_refused"],
    "kv cache": [f"test_kvcache.py::test_{name}" for name in ("nothing_to_do", "opcheck", "dynamic_shapes", "many_calls_in_a_row")],
    "flash attention impl": ["test_kvcache_api.py::test_a_program_that_never_restores_pytorch"],
    "aot eager dynamic": ["test_routes.py::test_only_static_programs_are_compiled_again_when_seqlen_changes"],
    "inductor": ["test_routes.py::test_inductor"],
    "sdpa override": ["test_sdpa.py::test_layouts"],
    "context parallelism": ["test_distributed.py::test_ranks[gloo-2]", "test_sdpa.py::test_dtensor"],
    "torchscript": ["test_autograd.py::test_torchscript"],
    "export": ["test_routes.py::test_package_without_our_python_package[cpu-fp32-export]"],
}
#: The tests that also run with the oldest transformers.
TRANSFORMERS = [
    "test_transformers.py::test_causal_models",
    "test_transformers_generation.py::test_generate",
    "test_transformers_masks.py::test_training",
]
#: The Python of each release: varied within the range that it supports. This Python if uv does not find it.
PYTHONS = {
    "2.7.1": "3.10", "2.8.0": "3.13", "2.9.1": "3.12", "2.10.0": "3.10", "2.11.0": "3.13",
    "2.12.1": "3.12", "2.13.0": "3.10", "2.14.1": "3.11", "2.15.0": "3.13",
}  # fmt: skip
#: Time limit of one process, in seconds.
TIMEOUT_S = 1200
#: Verdicts: "ok", or "- REASON" of tests that were skipped. Any other is an error.
OK, ABSENT = "ok", "-"


@dataclass
class Release:
    """The results of one torch release."""

    release: str  # as 2.10.0
    torch: str = ""  # its version with CUDA's; "": it could not be tried
    python: str = ""
    seconds: float = 0.0
    checks: dict[str, str] = field(default_factory=dict)  # verdict of each check, or its first error

    @property
    def passed(self) -> bool:
        return bool(self.torch) and all(verdict == OK or verdict.startswith(ABSENT) for verdict in self.checks.values())


class Failure(Exception):
    """A release cannot be installed or run; the message says why."""


def run(command: list[str | Path], log: Path, cwd: str | Path = "/", success: tuple[int, ...] = (0,), **environment: str) -> str:
    """Returns standard output. Also logs it, with standard error. Raises Failure for another exit status than `success` has."""
    # the caller's packages and volta_fa variables must not affect the results
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VOLTA_FA_", "VIRTUAL_ENV"))}
    with log.open("a") as file:
        print("$", *command, file=file, flush=True)
        streams = {"stdout": subprocess.PIPE, "stderr": file, "text": True}
        try:
            ran = subprocess.run(command, **streams, timeout=TIMEOUT_S, env={**inherited, **environment}, cwd=cwd)
        except subprocess.TimeoutExpired:
            raise Failure(f"{Path(command[0]).name} took more than {TIMEOUT_S} s: {log}") from None
        print(ran.stdout, file=file)
    if ran.returncode not in success:
        raise Failure(f"`{' '.join(map(str, command[:6]))} ...` failed: the last lines of {log} say why")
    return ran.stdout


# ---- the libraries of an older Linux -------------------------------------------------------------------------------

#: Debian 11 (glibc 2.31, libstdc++ of gcc 10), the oldest release on Debian's mirrors. tools/check_wheel.py checks the versions of symbols
#: down to glibc 2.28. A library that was linked without tools/portable_linker.py fails here, because it refers to newer symbols.
_SUITE = "bullseye"
_PACKAGES = ("libc6", "libstdc++6", "libgcc-s1", "libgomp1", "zlib1g")
_KEYS = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
_LIBRARIES = ("lib/x86_64-linux-gnu", "usr/lib/x86_64-linux-gnu")
#: The program that loads torch and a shim (volta_fa's library for one torch release) without Python, and its name beside the libraries.
_SOURCE, _PROGRAM = Path(__file__).with_name("old_userland.c"), "load"


class Unavailable(Exception):
    """This machine cannot provide the old libraries."""


def _output(*command: str | Path, cwd: Path | None = None) -> str:
    """Returns a command's output. A failure means Unavailable."""
    ran = subprocess.run(command, capture_output=True, text=True, cwd=cwd)
    if ran.returncode != 0:
        raise Unavailable(f"`{' '.join(map(str, command[:3]))} ...` failed: {(ran.stderr.strip() or ran.stdout.strip())[-300:]}")
    return ran.stdout


def _mirror() -> str:
    """Returns the Debian mirror in this machine's package sources."""
    if shutil.which("apt-get") is None or shutil.which("dpkg") is None:
        raise Unavailable("no apt-get here")
    found = re.findall(r"^(\S+/debian/?)$", _output("apt-get", "indextargets", "--format", "$(REPO_URI)", "Created-By: Packages"), re.M)
    if not found or not _KEYS.exists():
        raise Unavailable("this machine has no mirror of Debian")
    return found[0]


def old_libraries(folder: Path) -> Path:
    """Returns the folder with the old libraries and the program. Makes it if it is missing, without a change to apt's state."""
    folder = folder.absolute()
    if (folder / _PROGRAM).exists():
        return folder
    mirror, apt = _mirror(), folder / "apt"
    shutil.rmtree(folder, ignore_errors=True)
    for name in ("lists/partial", "cache/archives/partial", "packages"):
        (apt / name).mkdir(parents=True)
    (apt / "status").touch()
    (apt / "sources.list").write_text(f"deb [signed-by={_KEYS}] {mirror} {_SUITE} main\n")
    settings = {"State": "", "State::Lists": "lists", "State::Status": "status", "Cache": "cache", "Etc::SourceList": "sources.list"}
    options = [f"-oDir::{name}={apt / path}" for name, path in settings.items()]
    options += ["-oDir::Etc::SourceParts=-", "-oAPT::Sandbox::User=root"]
    _output("apt-get", *options, "update")
    _output("apt-get", *options, "download", *_PACKAGES, cwd=apt / "packages")
    for package in (apt / "packages").glob("*.deb"):
        _output("dpkg", "-x", package, folder)
    shutil.rmtree(apt)
    linker = (sys.executable, Path(portable_linker.__file__))
    _output(*linker, "-O1", _SOURCE, "-o", folder / f"{_PROGRAM}.new", "-ldl", "-lm")
    (folder / f"{_PROGRAM}.new").rename(folder / _PROGRAM)
    return folder


def complaint(folder: Path, torch: Path, shim: Path) -> str:
    """Returns the errors when this torch package and this shim load with the old libraries in `folder`; empty if there are none."""
    path = ":".join(str(folder / part) for part in _LIBRARIES)
    libraries = [torch / "lib" / name for name in ("libc10.so", "libtorch_cpu.so")]
    command = [folder / _LIBRARIES[0] / "ld-linux-x86-64.so.2", "--library-path", path, folder / _PROGRAM, *libraries, shim]
    ran = subprocess.run(command, capture_output=True, text=True)
    return "" if ran.returncode == 0 else ran.stderr.strip() or f"ended with {ran.returncode}"


# ---- the run -------------------------------------------------------------------------------------------------------


class Matrix:
    """The run: its folder, and the way to try one release after the other. `options` are the arguments of this program."""

    def __init__(self, options: argparse.Namespace):
        self.options = options
        self.folder = options.output.absolute()
        self.folder.mkdir(parents=True, exist_ok=True)
        self.uv = shutil.which("uv", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")
        if self.uv is None:
            raise SystemExit("volta_fa: uv is not installed: run `make matrix`, or pip install uv")
        # a copy without the checkout's package, which would hide the installed one, but for what tests/reference.py reads of it
        self.sources = self.folder / "sources"
        shutil.rmtree(self.sources, ignore_errors=True)
        for name in ("tests", "tools", "benchmarks", "python/volta_fa/check"):
            shutil.copytree(ROOT / name, self.sources / name, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / "pyproject.toml", self.sources)
        # on the disk of the environments, because their files are links to it
        self.cache = self.folder / "uv-cache"
        self.userland = {}  # environment variables of the tests; empty where there are no old libraries
        try:
            self.userland["OLD_USERLAND"] = str(old_libraries(self.folder / "old-userland"))
        except Unavailable as reason:
            print(f"volta_fa: nothing is loaded with older libraries: {reason}", file=sys.stderr)

    def python_for(self, release: str) -> str:
        if self.options.python:
            return self.options.python
        find = [self.uv, "python", "find", "--no-python-downloads", "--no-project", PYTHONS[release]]
        return subprocess.run(find, capture_output=True, text=True).stdout.strip() or sys.executable

    def install(self, python: Path, *arguments: str | Path, log: Path) -> None:
        run([self.uv, "pip", "install", "--quiet", "--python", python, *arguments], log, UV_CACHE_DIR=str(self.cache))

    def try_release(self, release: str) -> Release:
        """Returns the results of a release. One that cannot be tried has a failed check `environment`."""
        found, begun = Release(release), time.monotonic()
        folder, log = self.folder / f"torch-{release}", self.folder / f"torch-{release}.log"
        log.unlink(missing_ok=True)
        try:
            self.check(found, folder, log)
        except Failure as failure:
            found.checks["environment"] = str(failure)
        if not self.options.keep:
            shutil.rmtree(folder, ignore_errors=True)
            # other releases may use the cached CUDA libraries, but not this torch
            subprocess.run([self.uv, "cache", "clean", "--quiet", "torch"], env={**os.environ, "UV_CACHE_DIR": str(self.cache)})
        found.seconds = round(time.monotonic() - begun)
        return found

    def check(self, found: Release, folder: Path, log: Path) -> None:
        """Runs all tests with a release. Raises Failure before `found.torch` is set if the release cannot be tried."""
        python = folder / "bin" / "python"
        environment = {"UV_CACHE_DIR": str(self.cache)}
        # seeded as `python -m venv` does it: torch's C++ extensions import setuptools, which it requires from Python 3.12 on alone
        run([self.uv, "venv", "--quiet", "--seed", "--clear", "--python", self.python_for(found.release), folder], log, **environment)
        self.install(python, f"torch=={found.release}", f"volta-fa[test] @ {self.options.wheel.absolute().as_uri()}", log=log)
        # Python's version, torch's with its CUDA, and that of the newest transformers that pip chose
        facts = "import platform, torch, transformers as t; print(platform.python_version(), torch.__version__, t.__version__)"
        found.python, tried, newest = run([python, "-c", facts], log).split()
        oldest = folder / "transformers-oldest"
        self.install(python, "--target", oldest, "--no-deps", *OLD_TRANSFORMERS, log=log)
        found.checks = self.test({**CHECKS, f"transformers {newest}": TRANSFORMERS}, python, log)
        (pin,) = (package for package in OLD_TRANSFORMERS if package.startswith("transformers=="))
        found.checks |= self.test({pin.replace("==", " "): TRANSFORMERS}, python, log, PYTHONPATH=str(oldest))
        found.torch = tried

    def test(self, checks: dict[str, list[str]], python: Path, log: Path, **environment: str) -> dict[str, str]:
        """Returns the verdict of each check. Status 1 of pytest means that a test failed."""
        tests = [f"tests/{test}" for of_check in checks.values() for test in of_check]
        report = log.with_suffix(".xml")
        command = [python, "-m", "pytest", "-p", "no:cacheprovider", f"--junitxml={report}", *tests]
        run(command, log, cwd=self.sources, success=(0, 1), OMP_WAIT_POLICY="PASSIVE", **self.userland, **environment)
        return {name: verdict(report, of_check) for name, of_check in checks.items()}


def verdict(report: Path, tests: list[str]) -> str:
    """Returns the first error of these tests in a report of pytest, or "- REASON" if one of them was skipped in all its cases."""
    skipped: dict[str, str] = {}
    passed: set[str] = set()
    for case in ET.parse(report).iter("testcase"):
        test = f"{case.get('classname').rpartition('.')[2]}.py::{case.get('name')}"
        test = test if test in tests else test.partition("[")[0]
        if test not in tests:
            continue
        result = next((case.find(kind) for kind in ("failure", "error", "skipped") if case.find(kind) is not None), None)
        if result is None:
            passed.add(test)
        elif result.tag == "skipped":
            skipped.setdefault(test, result.get("message"))
        else:
            lines = (result.get("message") or result.text or result.tag).strip().splitlines()
            return f"{case.get('name')}: {lines[0] if lines else result.tag}"
    for test in tests:
        if test not in passed:
            return f"{ABSENT} {skipped[test]}" if test in skipped else f"{test} did not run"
    return OK


def names_of(releases: list[Release]) -> list[str]:
    return list(dict.fromkeys(name for release in releases for name in release.checks))


def cell(release: Release, name: str) -> str:
    """Returns what the table has for a check: ok, -, fails, or nothing if it did not run."""
    verdict = release.checks.get(name, "")
    return verdict if verdict in ("", OK) else ABSENT if verdict.startswith(ABSENT) else "fails"


def markdown(releases: list[Release], wheel: str, date: str) -> str:
    """Returns the table, then its date and the reasons for absent checks."""
    lines = [f"| | {' | '.join(release.torch or release.release for release in releases)} |", "| --- |" + " --- |" * len(releases)]
    lines += [f"| Python | {' | '.join('.'.join(release.python.split('.')[:2]) for release in releases)} |"]
    lines += [f"| {name} | {' | '.join(cell(release, name) for release in releases)} |" for name in names_of(releases)]
    reasons = {f"{name}: {v.removeprefix('- ')}" for r in releases for name, v in r.checks.items() if v.startswith(ABSENT)}
    lines += ["", f"{date}, `{wheel}`, Linux {platform.machine()} without a GPU."]
    lines += [f"Absent (-): {'; '.join(sorted(reasons))}." if reasons else ""]
    return "\n".join(lines).strip() + "\n"


def write_docs(text: str) -> None:
    before, rest = DOCS.read_text().split(MARKS[0])
    _, after = rest.split(MARKS[1])
    DOCS.write_text(f"{before}{MARKS[0]}\n\n{text}\n{MARKS[1]}{after}")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--releases", nargs="+", metavar="RELEASE", choices=torch_releases.RELEASES, default=torch_releases.RELEASES)
    parser.add_argument("--python", help="version or path, for uv (default: of each release another, where uv finds it)")
    parser.add_argument("--output", type=Path, default=ROOT / "target" / "torch-matrix", help="folder of environments, logs and results")
    parser.add_argument("--keep", action="store_true", help="leave the environments and uv's cache")
    parser.add_argument("--docs", action="store_true", help="put the table of all releases into docs/reference/compatibility.md")
    options = parser.parse_args(arguments)
    if not options.wheel.exists():
        parser.error(f"{options.wheel} does not exist: `make matrix` builds one")
    if options.docs and tuple(options.releases) != torch_releases.RELEASES:
        parser.error("--docs is for the whole matrix, without --releases")
    matrix, releases = Matrix(options), []
    for release in options.releases:
        found = matrix.try_release(release)
        releases.append(found)
        wrong = sum(cell(found, name) == "fails" for name in found.checks)
        print(f"torch {release}: {len(found.checks)} checks in {found.seconds:.0f} s, {wrong} failed", flush=True)
    if not options.keep:
        shutil.rmtree(matrix.cache, ignore_errors=True)
    text = markdown(releases, options.wheel.name, datetime.date.today().isoformat())
    print(text)
    for found in releases:
        for name, verdict in found.checks.items():
            if cell(found, name) == "fails":
                print(f"torch {found.release}: {name}: {verdict}")
    (matrix.folder / "matrix.md").write_text(text)
    (matrix.folder / "matrix.json").write_text(json.dumps([asdict(release) for release in releases], indent=2) + "\n")
    if options.docs:
        write_docs(text)
    if not all(release.torch for release in releases):
        return 2
    return 0 if all(release.passed for release in releases) else 1


if __name__ == "__main__":
    sys.exit(main())
