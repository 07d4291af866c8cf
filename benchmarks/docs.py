"""Puts results into docs/reference/figures.md, or with --layer into README.md.

For each NAME.md in DIR, as the other commands' --markdown writes them, replaces the text between `<!-- begin NAME -->` and
`<!-- end NAME -->` of the page, and copies NAME.png to images/ beside it. Sections without a new result stay. If the page has no section
for a NAME.md, the command changes nothing and fails.

Then, or without a DIR, writes the page's TFLOP/s of the simulated V100 as package data, with which `python -m volta_fa check` compares.

--layer simulates one attention layer on each GPU, as `make run` (`python -m volta_fa demo`) does at its end, and puts the table into
README.md, with its commit and a mark: an HTML comment with a hash of each kernel's machine code, by which benchmarks.marks tells whether
figures are current. Takes half a minute."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

from volta_fa.demo import report as demo_report
from volta_fa.demo import simulated
from volta_fa.errors import CommandError

from . import marks, report

PAGE = marks.ROOT / "docs" / "reference" / "figures.md"
PREDICTIONS = marks.ROOT / "python" / "volta_fa" / "check" / "predictions.json"
#: Names of benchmarks.volta's rows with batch 1, without a feature; `predictions` keeps those whose N is a power of two.
CASE = re.compile(r"D=(?P<headdim>\d+) N=(?P<seqlen>\d+) H=(?P<nheads>\d+)(?P<causal> causal)?")
#: In README.md, the table of the layer with its commit and mark.
_LAYER = re.compile(r"\(commit [0-9a-f]{8}\):\n\n```text\n┏.*?\n```\n\n<!-- figures of .*? -->\n", re.S)


def fill(page: str, name: str, section: str) -> str:
    """Returns the page with one section replaced."""
    begin, end = f"<!-- begin {name} -->", f"<!-- end {name} -->"
    changed, count = re.subn(f"{begin}\n.*?{end}", lambda _: f"{begin}\n{section.rstrip()}\n{end}", page, flags=re.DOTALL)
    if count != 1:
        raise CommandError(f"the page has {count} sections `{begin}` ... `{end}`, expected 1")
    return changed


def predictions(page: str) -> dict:
    """Returns the content of PREDICTIONS, from the page's section that benchmarks.volta wrote: its facts (lines "- NAME: TEXT", as of the
    device and the date), and the rows of its tables of both passes."""
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
        "use": "python -m volta_fa check shows speeds that it measures on a V100 beside these: fp16, batch 1, TFLOP/s of 2 matrix products "
        "forward and 5 backward; a causal mask leaves half of them. `python -m benchmarks.docs` takes the points from the tables of "
        "made_by",
        "model": "tools/volta-sim: the sm_70 machine code on a simulated " + facts["device"],
        "kind": "simulated: nothing here was measured. tflops by the default machine model, tflops_no_icache by one with a perfect "
        "instruction cache",
        "date": facts["date"],
        "made_by": facts["command"].strip("`"),
        "versions": facts["versions"],
        "points": points,
    }


def as_text(found: dict) -> str:
    """Returns the JSON of `predictions`, with one point per line."""
    points = ",\n".join("  " + json.dumps(point) for point in found["points"])
    head = json.dumps({key: value for key, value in found.items() if key != "points"}, indent=1)
    return f'{head.removesuffix("}").rstrip()},\n "points": [\n{points}\n ]\n}}\n'


def put_sections(folder: Path, page: Path) -> None:
    """Writes the folder's results into the page. Every section is filled before anything is written."""
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


def fill_layer(page: str, text: str, commit: str, mark: str) -> str:
    """Returns the page with the table of `text`, the demo's output, and with its commit and mark."""
    lines = "\n".join(line.rstrip() for line in text[text.index("┏") : text.index("All results are right")].rstrip().splitlines())
    changed, count = _LAYER.subn(lambda _: f"(commit {commit[:8]}):\n\n```text\n{lines}\n```\n\n{mark}\n", page)
    if count != 1:
        raise CommandError(f"the page has {count} outputs of the layer with a commit and a mark, expected 1")
    return changed


def put_layer(page: Path) -> None:
    """Simulates the layer, and writes its table into the page."""
    # by GPU: whether all errors are small enough (`right`), and the simulator's reports of launches (`forward`, `backward`)
    results = [simulated.run(gpu) for gpu in report.track(simulated.GPUS, "GPUs")]
    if not all(result.right for result in results):
        raise CommandError("a result is wrong: run `python -m volta_fa demo`")
    with demo_report._console.capture() as captured:  # of what the next line prints
        demo_report.show_simulation(results)
    mark = marks.mark({kernel["kernel"] for result in results for kernel in (*result.forward, *result.backward)})
    page.write_text(fill_layer(page.read_text(), captured.get(), marks.commit(), mark))
    report.console.print(f"wrote {page}", soft_wrap=True)


def main(arguments: Sequence[str]) -> int:
    parser = report.parser("docs", __doc__, outputs=False)  # without --json, --plot and --markdown
    parser.add_argument("folder", type=Path, nargs="?", metavar="DIR", help="folder with the results")
    parser.add_argument("--page", type=Path, default=PAGE, help="the page (default: docs/reference/figures.md)")
    parser.add_argument("--layer", action="store_true", help="put the demo's layer into README.md, and nothing else")
    options = parser.parse_args(arguments)
    if options.layer:
        put_layer(marks.ROOT / "README.md")
        return 0
    if options.folder:
        put_sections(options.folder, options.page)
    if options.page == PAGE:
        PREDICTIONS.write_text(as_text(predictions(PAGE.read_text())))
        report.console.print(f"wrote {PREDICTIONS}", soft_wrap=True)
    return 0


if __name__ == "__main__":
    report.command(main)
