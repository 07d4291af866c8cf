"""Marks of figures on the pages: the commit and the machine code that they are of.

Simulated figures on a page have a mark that readers do not see, `<!-- figures of COMMIT: KERNEL HASH, ... -->`. The other commands'
--markdown writes it, with all kernels that they launched. A hash is of a kernel's instructions, constants and registers.
"""

from __future__ import annotations

import functools
import hashlib
import re
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from volta_fa.errors import CommandError

ROOT = Path(__file__).resolve().parent.parent
LIBRARY = ROOT / "python" / "volta_fa" / "libvolta_fa_core.so"
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs" / "guides").glob("*.md")), *sorted((ROOT / "docs" / "reference").glob("*.md")))
#: What a mark says of figures that were taken before marks, and of those of other machine code.
NOT_RECORDED, CHANGED = "kernels not recorded", "kernels changed since"
_MARK = re.compile(r"<!-- figures of ([0-9a-f]{8})( with changes)?: (.*?) -->")


@dataclass(frozen=True)
class Mark:
    """Where figures on a page come from."""

    text: str
    commit: str
    #: Hashes of their machine code by kernel; empty if the mark says that it is not this build's.
    kernels: dict[str, str]

    def changed(self, code: dict[str, str]) -> list[str]:
        """Returns the kernels that have other machine code now, or are gone."""
        return [name for name, of in self.kernels.items() if code.get(name) != of]


def read(page: str) -> list[Mark]:
    """Returns the marks of a page."""
    found = []
    for match in _MARK.finditer(page):
        known = match[3] not in (NOT_RECORDED, CHANGED)
        found.append(Mark(match[0], match[1], dict(entry.split() for entry in match[3].split(", ")) if known else {}))
    return found


def outdate(page: str, code: dict[str, str]) -> str:
    """Returns a page whose marks of changed kernels say so, and the line of the commit above them."""
    for mark in read(page):
        if mark.changed(code):
            page = page.replace(mark.text, f"<!-- figures of {mark.commit}: {CHANGED} -->")
            page = page.replace(f"- commit: {mark.commit}\n", f"- commit: {mark.commit}, {CHANGED}\n")
    return page


@functools.cache
def code() -> dict[str, str]:
    """Returns a hash of each kernel's machine code in this checkout's library."""
    if not LIBRARY.exists():
        raise CommandError(f"{LIBRARY} has not been built: run `make build`")
    from tools import compare_kernels  # here, because only a checkout has it

    return {name: _hash(kernel.registers, kernel.sections) for name, kernel in compare_kernels.kernels(LIBRARY).items()}


def _hash(registers: int, sections: dict[str, bytes]) -> str:
    found = hashlib.sha256(str(registers).encode())
    for name, section in sorted(sections.items()):
        found.update(name.encode() + section)
    return found.hexdigest()[:8]


@functools.cache
def commit() -> str:
    """Returns the checked-out commit, or "" outside a checkout."""
    ran = subprocess.run(
        ["git", "describe", "--always", "--abbrev=8", "--exclude=*", "--dirty= with changes"], cwd=ROOT, capture_output=True
    )
    return ran.stdout.decode().strip()


def mark(kernels: Iterable[str]) -> str:
    """Returns the mark of figures of this commit and build; without kernels, one that says that they are unknown."""
    names = ", ".join(f"{name} {code()[name]}" for name in sorted(kernels))
    return f"<!-- figures of {commit()}: {names or NOT_RECORDED} -->"
