"""Tells the commit and the machine code of the figures on the pages.

    python -m benchmarks.provenance                  names figures whose kernels have changed, and fails if there are any
    python -m benchmarks.provenance --outdate        writes on the pages that these kernels have changed since
    python -m benchmarks.provenance --mark KERNEL... prints the mark of figures that were just taken of these kernels

benchmarks/marks.py says what marks are.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from volta_fa.errors import CommandError

from . import report
from .marks import PAGES, ROOT, code, mark, outdate, read


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.provenance", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--outdate", action="store_true")
    parser.add_argument("--mark", nargs="+", metavar="KERNEL")
    options = parser.parse_args(arguments)
    if options.mark:
        if unknown := set(options.mark) - code().keys():
            raise CommandError(
                f"--mark: got {', '.join(sorted(unknown))}, expected kernels: `python -m volta_fa info --kernels` lists them"
            )
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
    report.command(main)
