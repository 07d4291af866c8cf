"""Writes the simulated V100 figures of docs/reference/figures.md as package data, for `python -m volta_fa check` to compare with.

    python tools/predictions.py            writes python/volta_fa/check/predictions.json
    python tools/predictions.py --check    exits non-zero if that file differs

Run it after `python -m benchmarks.docs` has put new figures into the page.
"""

import argparse
import json
import re
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
PAGE = REPOSITORY / "docs/reference/figures.md"
PREDICTIONS = REPOSITORY / "python/volta_fa/check/predictions.json"
# shapes with batch 1, at powers of two
CASE = re.compile(r"D=(?P<headdim>\d+) N=(?P<seqlen>\d+) H=(?P<nheads>\d+)(?P<causal> causal)?")
SPEED = re.compile(r"\d+\.\d")


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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; fail where the file is not what it would be")
    arguments = parser.parse_args()
    text = as_text(predictions(PAGE.read_text()))
    if arguments.check:
        if PREDICTIONS.read_text() != text:
            print(f"{PREDICTIONS} is not what {PAGE} says: run `python tools/predictions.py`", file=sys.stderr)
            return 1
        return 0
    PREDICTIONS.write_text(text)
    print(f"wrote {PREDICTIONS}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
