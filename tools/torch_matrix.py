"""Installs the wheel and each torch release in an environment of its own, and runs one check per kind of use there.

    python tools/torch_matrix.py WHEEL                              # every release of tools/torch_releases.py
    python tools/torch_matrix.py WHEEL --releases 2.10.0 2.15.0
    python tools/torch_matrix.py WHEEL --docs                       # and put the table into docs/reference/compatibility.md

tools/torch_matrix_checks.py has the checks. Prints a table and writes JSON and Markdown to --output.
uv makes the environments as links into its cache. Each environment is removed after its checks: the run needs about 12 GB of disk.
The releases use different supported Pythons, if installed. On Debian, the checks also load the libraries with those of Debian 11.

Exit status: 0 if every check passed, 1 if one did not, 2 if a release could not be tried.
"""

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
from dataclasses import asdict, dataclass, field
from pathlib import Path

from rich.console import Console
from rich.table import Table

import old_userland
import torch_releases

ROOT = Path(__file__).resolve().parent.parent
CHECKS = Path(__file__).with_name("torch_matrix_checks.py")
DOCS = ROOT / "docs" / "reference" / "compatibility.md"
MARKS = ("<!-- the matrix: tools/torch_matrix.py --docs -->", "<!-- end of the matrix -->")
_REQUIREMENTS = ROOT / "tools" / "requirements"
#: The oldest release that volta_fa.transformers supports and what it needs, for a folder of its own; and the newest.
OLD_TRANSFORMERS, NEW_TRANSFORMERS = _REQUIREMENTS / "transformers-4.57.txt", _REQUIREMENTS / "test.txt"
#: The Python of each release: varied within the range that it supports. This Python if uv does not find it.
PYTHONS = {
    "2.7.1": "3.10", "2.8.0": "3.13", "2.9.1": "3.12", "2.10.0": "3.10", "2.11.0": "3.13",
    "2.12.1": "3.12", "2.13.0": "3.10", "2.14.1": "3.11", "2.15.0": "3.13",
}  # fmt: skip
#: Time limit of one process, in seconds.
TIMEOUT_S = 1200
OK, ABSENT = "ok", "-"


@dataclass
class Release:
    """The results of one torch release."""

    release: str
    torch: str = ""
    python: str = ""
    seconds: float = 0.0
    #: check to "ok", "- REASON" if the release cannot run it, or the error
    checks: dict[str, str] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        return bool(self.torch) and all(verdict == OK or verdict.startswith(ABSENT) for verdict in self.checks.values())


class Failure(Exception):
    """A release that cannot be installed or run."""


def run(command: list[str | Path], log: Path, **environment: str) -> str:
    """Returns standard output. Also logs it, with standard error."""
    # the caller's packages and volta_fa variables must not affect the results
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VOLTA_FA_", "VIRTUAL_ENV"))}
    with log.open("a") as file:
        print("$", *command, file=file, flush=True)
        try:
            ran = subprocess.run(
                command, stdout=subprocess.PIPE, stderr=file, text=True, timeout=TIMEOUT_S, env={**inherited, **environment}, cwd="/"
            )
        except subprocess.TimeoutExpired:
            raise Failure(f"{Path(command[0]).name} took more than {TIMEOUT_S} s: {log}") from None
        print(ran.stdout, file=file)
    if ran.returncode != 0 and not ran.stdout.startswith("{"):
        raise Failure(f"`{' '.join(map(str, command[:6]))} ...` failed: the last lines of {log} say why")
    return ran.stdout


class Matrix:
    def __init__(self, options: argparse.Namespace):
        self.options = options
        self.folder = options.output.absolute()
        self.folder.mkdir(parents=True, exist_ok=True)
        self.uv = shutil.which("uv", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")
        if self.uv is None:
            raise SystemExit("volta_fa: uv is not installed: run `make matrix`, or pip install -r tools/requirements/wheel.txt")
        # on the disk of the environments, because their files are links to it
        self.cache = self.folder / "uv-cache"
        self.userland = {}
        try:
            self.userland["OLD_USERLAND"] = str(old_userland.prepare(self.folder / "old-userland"))
        except old_userland.Unavailable as reason:
            print(f"volta_fa: nothing is loaded with older libraries: {reason}", file=sys.stderr)

    def python_for(self, release: str) -> str:
        """Returns the Python for the environment of a release."""
        if self.options.python:
            return self.options.python
        find = [self.uv, "python", "find", "--no-python-downloads", "--no-project", PYTHONS[release]]
        return subprocess.run(find, capture_output=True, text=True).stdout.strip() or sys.executable

    def install(self, python: Path, *arguments: str | Path, log: Path) -> None:
        run([self.uv, "pip", "install", "--quiet", "--python", python, *arguments], log, UV_CACHE_DIR=str(self.cache))

    def try_release(self, release: str) -> Release:
        found, begun = Release(release), time.monotonic()
        folder, log = self.folder / f"torch-{release}", self.folder / f"torch-{release}.log"
        log.unlink(missing_ok=True)
        try:
            found.checks = self.checks_of(release, folder, log, found)
        except Failure as failure:
            found.checks = {**found.checks, "environment": str(failure)}
        if not self.options.keep:
            shutil.rmtree(folder, ignore_errors=True)
            # other releases may use the cached CUDA libraries, but not this torch
            subprocess.run([self.uv, "cache", "clean", "--quiet", "torch"], env={**os.environ, "UV_CACHE_DIR": str(self.cache)})
        found.seconds = round(time.monotonic() - begun)
        return found

    def checks_of(self, release: str, folder: Path, log: Path, found: Release) -> dict[str, str]:
        python = folder / "bin" / "python"
        environment = {"UV_CACHE_DIR": str(self.cache)}
        run([self.uv, "venv", "--quiet", "--clear", "--python", self.python_for(release), folder], log, **environment)
        newest = pin_of_transformers(NEW_TRANSFORMERS)
        self.install(python, f"torch=={release}", "numpy", newest, self.options.wheel.absolute(), log=log)
        found.python = run([python, "-c", "import platform; print(platform.python_version())"], log).strip()
        oldest = folder / "transformers-oldest"
        self.install(python, "--target", oldest, "--no-deps", "-r", OLD_TRANSFORMERS, log=log)
        verdicts: dict[str, str] = {}
        for arguments, path, suffix in (
            ((), None, ""),
            (("transformers",), oldest, pin_of_transformers(OLD_TRANSFORMERS)),
            (("transformers",), None, newest),
        ):
            added = {"OMP_WAIT_POLICY": "PASSIVE", **self.userland, **({"PYTHONPATH": str(path)} if path else {})}
            output = run([python, CHECKS, *arguments], log, **added)
            # the last one: torch 2.10's gloo prints a line of its own when it ends
            answer = json.loads(next(line for line in reversed(output.splitlines()) if line.startswith("{")))
            found.torch = answer["torch"]
            verdicts |= {suffix.replace("==", " ") or name: verdict for name, verdict in answer["checks"].items()}
        return verdicts


def pin_of_transformers(requirements: Path) -> str:
    return re.search(r"^transformers==[^\s;]+", requirements.read_text(), re.M)[0]


def names_of(releases: list[Release]) -> list[str]:
    return list(dict.fromkeys(name for release in releases for name in release.checks))


def cell(release: Release, name: str) -> str:
    verdict = release.checks.get(name, "")
    return verdict if verdict in ("", OK) else ABSENT if verdict.startswith(ABSENT) else "fails"


def print_table(releases: list[Release], console: Console) -> None:
    table = Table(box=None, padding=(0, 1))
    table.add_column("torch")
    for release in releases:
        table.add_column(torch_releases.minor(release.release), justify="right")
    for name in names_of(releases):
        colours = {OK: "green", "fails": "bold red"}
        cells = (cell(release, name) for release in releases)
        table.add_row(name, *(f"[{colours[c]}]{c}[/]" if c in colours else c for c in cells))
    table.add_row("seconds", *(f"{release.seconds:.0f}" for release in releases))
    console.print(table)
    for release in releases:
        for name, verdict in release.checks.items():
            if cell(release, name) == "fails":
                console.print(f"torch {release.release}: {name}: {verdict}", soft_wrap=True, markup=False)


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
    matrix, console, releases = Matrix(options), Console(highlight=False), []
    for release in options.releases:
        found = matrix.try_release(release)
        releases.append(found)
        wrong = sum(cell(found, name) == "fails" for name in found.checks)
        console.print(f"torch {release}: {len(found.checks)} checks in {found.seconds:.0f} s, {wrong} failed")
    if not options.keep:
        shutil.rmtree(matrix.cache, ignore_errors=True)
    print_table(releases, console)
    text = markdown(releases, options.wheel.name, datetime.date.today().isoformat())
    (matrix.folder / "matrix.md").write_text(text)
    (matrix.folder / "matrix.json").write_text(json.dumps([asdict(release) for release in releases], indent=2) + "\n")
    if options.docs:
        write_docs(text)
    if not all(release.torch for release in releases):
        return 2
    return 0 if all(release.passed for release in releases) else 1


if __name__ == "__main__":
    sys.exit(main())
