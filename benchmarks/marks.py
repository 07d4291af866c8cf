"""Compares the simulated figures in README.md and docs/ with the kernels of this build, by marks beside the figures.

    python -m benchmarks.marks                  names figures whose kernels have changed, and fails if there are any
    python -m benchmarks.marks --outdate        writes on the pages that these kernels have changed since
    python -m benchmarks.marks --mark KERNEL... prints the mark of figures that were just taken of these kernels

A mark is an HTML comment `<!-- figures of COMMIT: KERNEL HASH, ... -->`. The benchmarks' --markdown writes it, with all kernels that they
launched. A hash is of a kernel's instructions, constants and number of registers."""

from __future__ import annotations

import functools
import hashlib
import re
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from volta_fa.errors import CommandError

ROOT = Path(__file__).resolve().parent.parent
LIBRARY = ROOT / "python" / "volta_fa" / "libvolta_fa_core.so"
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs" / "guides").glob("*.md")), *sorted((ROOT / "docs" / "reference").glob("*.md")))
#: Texts instead of kernels and hashes: the kernels are unknown; the kernels have other machine code than this build.
NOT_RECORDED, CHANGED = "kernels not recorded", "kernels changed since"
_MARK = re.compile(r"<!-- figures of ([0-9a-f]{8})( with changes)?: (.*?) -->")


@dataclass(frozen=True)
class Mark:
    """A mark as it stands on a page."""

    text: str
    commit: str  # 8 hexadecimal digits
    kernels: dict[str, str]  # hashes by kernel; empty for NOT_RECORDED and CHANGED

    def changed(self, hashes: dict[str, str]) -> list[str]:
        """Returns the kernels whose hash differs in `hashes`, which code() returns, or that it lacks."""
        return [name for name, recorded in self.kernels.items() if hashes.get(name) != recorded]


def read(page: str) -> list[Mark]:
    """Returns the marks of a page."""
    found = []
    for match in _MARK.finditer(page):
        known = match[3] not in (NOT_RECORDED, CHANGED)
        found.append(Mark(match[0], match[1], dict(entry.split() for entry in match[3].split(", ")) if known else {}))
    return found


def outdate(page: str, hashes: dict[str, str]) -> str:
    """Returns the page with CHANGED in the marks of changed kernels, and in the header of each such mark's section, if it has one. Sections
    end with "<!-- end NAME -->" (benchmarks/docs.py): a header before that is another section's."""
    for mark in read(page):
        if mark.changed(hashes):
            before, after = page.split(mark.text, 1)
            headers = [*re.finditer(rf"- commit: {mark.commit}(?: with changes)?(?=\n)", before)]
            # a section's header comes first, and `<!-- end SECTION -->` last
            if headers and "<!-- end " not in before[(end := headers[-1].end()) :]:
                before = f"{before[:end]}, {CHANGED}{before[end:]}"
            page = f"{before}{mark.text.partition(': ')[0]}: {CHANGED} -->{after}"
    return page


@functools.cache
def code() -> dict[str, str]:
    """Returns by kernel name 8 digits of SHA-256 of its machine code in this checkout's library. Raises CommandError without a build."""
    if not LIBRARY.exists():
        raise CommandError(f"{LIBRARY} has not been built: run `make build`")
    from tools import compare_kernels  # here, because only a checkout has it

    kernels = compare_kernels.kernels(LIBRARY)  # by name: registers of a thread, and sections, code and constants by name
    parts = {name: (str(k.registers).encode(), *(s.encode() + k.sections[s] for s in sorted(k.sections))) for name, k in kernels.items()}
    return {name: hashlib.sha256(b"".join(part)).hexdigest()[:8] for name, part in parts.items()}


@functools.cache
def commit() -> str:
    """Returns 8 digits of the checked-out commit, with " with changes" if files differ from it, or "" outside a checkout."""
    command = ["git", "describe", "--always", "--abbrev=8", "--exclude=*", "--dirty= with changes"]
    return subprocess.run(command, cwd=ROOT, capture_output=True).stdout.decode().strip()


def mark(kernels: Iterable[str]) -> str:
    """Returns the mark of figures of this commit and build; without kernels, one that says that they are unknown."""
    names = ", ".join(f"{name} {code()[name]}" for name in sorted(kernels))
    return f"<!-- figures of {commit()}: {names or NOT_RECORDED} -->"


def main(arguments: Sequence[str]) -> int:
    from . import report  # here, because it imports this module

    parser = report.parser("marks", __doc__, outputs=False)  # without --json, --plot and --markdown
    parser.add_argument("--outdate", action="store_true")
    parser.add_argument("--mark", nargs="+", metavar="KERNEL")
    options = parser.parse_args(arguments)
    if options.mark:
        if unknown := set(options.mark) - code().keys():
            listed = "`python -m volta_fa info --kernels` lists them"
            raise CommandError(f"--mark: got {', '.join(sorted(unknown))}, expected kernels: {listed}")
        print(mark(options.mark))
        return 0
    stale = 0
    for path in PAGES:
        page = path.read_text()
        for found in read(page):
            if changed := found.changed(code()):
                stale += 1
                print(f"{path.relative_to(ROOT)}: figures of {found.commit}: other code now: {', '.join(changed)}")
        if options.outdate:
            path.write_text(outdate(page, code()))
    return 0 if options.outdate else bool(stale)


if __name__ == "__main__":
    from .report import command

    command(main)
