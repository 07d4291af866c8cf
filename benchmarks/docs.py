"""Puts results into docs/reference/figures.md.

For each NAME.md in DIR, as the other commands' --markdown writes them, replaces the text between
`<!-- begin NAME -->` and `<!-- end NAME -->`, and copies NAME.png to images/ beside the page. Sections without a new
result stay. If a NAME.md has no section, the command changes nothing and fails.

Then, or without a DIR, writes the page's figures of the simulated V100 as package data, for `python -m volta_fa check` to compare with.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

from volta_fa.errors import CommandError

from . import report

REPOSITORY = Path(__file__).resolve().parent.parent
PAGE = REPOSITORY / "docs" / "reference" / "figures.md"
PREDICTIONS = REPOSITORY / "python" / "volta_fa" / "check" / "predictions.json"
# shapes with batch 1, at powers of two
CASE = re.compile(r"D=(?P<headdim>\d+) N=(?P<seqlen>\d+) H=(?P<nheads>\d+)(?P<causal> causal)?")


def fill(page: str, name: str, section: str) -> str:
    """Returns the page with one section replaced."""
    begin, end = f"<!-- begin {name} -->", f"<!-- end {name} -->"
    changed, count = re.subn(f"{begin}\n.*?{end}", lambda _: f"{begin}\n{section.rstrip()}\n{end}", page, flags=re.DOTALL)
    if count != 1:
        raise CommandError(f"the page has {count} sections `{begin}` ... `{end}`, expected 1")
    return changed


def predictions(page: str) -> dict:
    [section] = re.findall(r"<!-- begin volta -->\n(.*?)<!-- end volta -->", page, re.DOTALL)
    facts = dict(re.findall(r"^- (\w[\w ]*): (.*)$", section, re.MULTILINE))
    points = []
    for direction in ("forward", "backward"):
        [table] = re.findall(rf"\*\*Simulated V100, {direction} .*?\*\*\n\n(.*?)\n\n", section, re.DOTALL)
        for line in table.splitlines()[2:]:
            name, tflops, no_icache, *_ = (cell.strip() for cell in line.strip("|").split("|"))
            case = CASE.fullmatch(name)
            if case and int(case["seqlen"]) & (int(case["seqlen"]) - 1) == 0:
                numbers = {key: int(case[key]) for key in ("headdim", "seqlen", "nheads")}
                speeds = {"tflops": float(tflops), "tflops_no_icache": float(no_icache)}
                points.append({"direction": direction, **numbers, "causal": bool(case["causal"]), **speeds})
    return {
        "model": "tools/volta-sim: the sm_70 machine code on a simulated " + facts["device"],
        "kind": "simulated: nothing here was measured. tflops by the default machine model, tflops_no_icache by one with a perfect "
        "instruction cache",
        "date": facts["date"],
        "made_by": facts["command"].strip("`"),
        "versions": facts["versions"],
        "points": points,
    }


def as_text(found: dict) -> str:
    """Formats one point per line."""
    points = ",\n".join("  " + json.dumps(point) for point in found["points"])
    head = json.dumps({key: value for key, value in found.items() if key != "points"}, indent=1)
    return f'{head.removesuffix("}").rstrip()},\n "points": [\n{points}\n ]\n}}\n'


def put_sections(folder: Path, page: Path) -> None:
    sections = sorted(folder.glob("*.md"))
    if not sections:
        raise CommandError(f"{folder} has no .md files; write them with --markdown")
    text = page.read_text()
    for section in sections:
        text = fill(text, section.stem, section.read_text())
    for section in sections:
        plot = section.with_suffix(".png")
        if plot.exists():
            images = page.parent / "images"
            images.mkdir(exist_ok=True)
            shutil.copyfile(plot, images / plot.name)
    page.write_text(text)
    report.console.print(f"{page}: {', '.join(s.stem for s in sections)}", soft_wrap=True)


def main(arguments: Sequence[str]) -> int:
    parser = report.parser("docs", __doc__, outputs=False)
    parser.add_argument("folder", type=Path, nargs="?", metavar="DIR", help="folder with the results")
    parser.add_argument("--page", type=Path, default=PAGE, help="the page (default: docs/reference/figures.md)")
    options = parser.parse_args(arguments)
    if options.folder:
        put_sections(options.folder, options.page)
    if options.page == PAGE:
        PREDICTIONS.write_text(as_text(predictions(PAGE.read_text())))
        report.console.print(f"wrote {PREDICTIONS}", soft_wrap=True)
    return 0


if __name__ == "__main__":
    report.command(main)
