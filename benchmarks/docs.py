"""Puts results into docs/reference/figures.md.

For each NAME.md in DIR, as the other commands' --markdown writes them, replaces the text between
`<!-- begin NAME -->` and `<!-- end NAME -->`, and copies NAME.png to images/ beside the page. Sections without a new
result stay. If a NAME.md has no section, the command changes nothing and fails.
"""

from __future__ import annotations

import argparse
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

from volta_fa.errors import CommandError

from . import report

PAGE = Path(__file__).resolve().parent.parent / "docs" / "reference" / "figures.md"


def fill(page: str, name: str, section: str) -> str:
    """Returns the page with one section replaced."""
    begin, end = f"<!-- begin {name} -->", f"<!-- end {name} -->"
    changed, count = re.subn(f"{begin}\n.*?{end}", lambda _: f"{begin}\n{section.rstrip()}\n{end}", page, flags=re.DOTALL)
    if count != 1:
        raise CommandError(f"the page has {count} sections `{begin}` ... `{end}`, expected 1")
    return changed


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.docs", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, metavar="DIR", help="folder with the results")
    parser.add_argument("--page", type=Path, default=PAGE, help="the page (default: docs/reference/figures.md)")
    options = parser.parse_args(arguments)
    sections = sorted(options.folder.glob("*.md"))
    if not sections:
        raise CommandError(f"{options.folder} has no .md files; write them with --markdown")
    page = options.page.read_text()
    for section in sections:
        page = fill(page, section.stem, section.read_text())
    for section in sections:
        plot = section.with_suffix(".png")
        if plot.exists():
            images = options.page.parent / "images"
            images.mkdir(exist_ok=True)
            shutil.copyfile(plot, images / plot.name)
    options.page.write_text(page)
    report.console.print(f"{options.page}: {', '.join(s.stem for s in sections)}", soft_wrap=True)
    return 0


if __name__ == "__main__":
    report.command(main)
