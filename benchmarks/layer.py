"""Puts the layer that `make run` ends with into README.md: its output, its commit and the mark of its kernels. Takes half a minute."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from pathlib import Path

from volta_fa.demo import report as demo_report
from volta_fa.demo import simulated
from volta_fa.errors import CommandError

from . import marks, report

PAGE = marks.ROOT / "README.md"
_BLOCK = re.compile(r"\(commit [0-9a-f]{8}\):\n\n```text\n┏.*?\n```\n\n<!-- figures of .*? -->\n", re.S)


def fill(page: str, text: str, commit: str, mark: str) -> str:
    """Returns the page with another output of the layer."""
    lines = "\n".join(line.rstrip() for line in text[text.index("┏") : text.index("All results are right")].rstrip().splitlines())
    changed, count = _BLOCK.subn(lambda _: f"(commit {commit[:8]}):\n\n```text\n{lines}\n```\n\n{mark}\n", page)
    if count != 1:
        raise CommandError(f"the page has {count} outputs of the layer with a commit and a mark, expected 1")
    return changed


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.layer", description=__doc__)
    parser.add_argument("--page", type=Path, default=PAGE, help="the page (default: README.md)")
    options = parser.parse_args(arguments)
    results = [simulated.run(gpu) for gpu in report.track(simulated.GPUS, "GPUs")]
    if not all(result.right for result in results):
        raise CommandError("a result is wrong: run `python -m volta_fa demo`")
    with demo_report._console.capture() as captured:
        demo_report.show_simulation(results)
    mark = marks.mark({kernel["kernel"] for result in results for kernel in (*result.forward, *result.backward)})
    options.page.write_text(fill(options.page.read_text(), captured.get(), marks.commit(), mark))
    print(f"wrote {options.page}")
    return 0


if __name__ == "__main__":
    report.command(main)
