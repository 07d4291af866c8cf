"""`python -m volta_fa check`: checks and times the kernels on this GPU, and tunes the choice of kernels."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from .. import diagnostics
from ..errors import CommandError, require_rich
from ..inspection import info, kernel_family

SUMMARY = "check and time every kernel on this GPU, and write a report to send"
DESCRIPTION = """\
Check and time every kernel on this GPU. The check compares small problems of odd sizes with the CPU backend in float64.
Then it times attention beside PyTorch's kernels and, on a V100, beside the simulator's prediction.
It prints a page and writes a plot and a JSON file. It takes at most three minutes on a GPU. The first run takes longer on a GPU
whose driver compiles the kernels.

--tune writes a tuning file with faster and with failed kernels, which later plans read (docs/reference/tuning-file.md).

Exit status: 0 if every kernel is right, 1 if one is wrong, 2 if the check cannot run here, 3 if it is incomplete: nothing is wrong, but
some kernels were not checked. The same command with the same folder then checks these.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--device",
        default="auto",
        help="auto (a GPU if there is one, else the CPU), cuda:N, cpu, or simulator: the kernels on a simulated V100",
    )
    parser.add_argument(
        "--output", type=Path, default=Path("check-output"), metavar="DIR", help="folder for the report (default: ./check-output)"
    )
    parser.add_argument("--quick", action="store_true", help="run one problem per kernel and fewer shapes: half a minute")
    parser.add_argument("--tune", action="store_true", help="write a tuning file for this GPU")
    parser.add_argument("--seed", type=int, default=0, help="select other inputs (default: 0)")
    parser.add_argument("--limit", type=_seconds, metavar="SECONDS", help="time for all but loading kernels (default: 170 on a GPU)")
    parser.add_argument("--kernels", default="*", metavar="PATTERN", help="check only kernels with such names, as 'volta_fwd_*'")


def run(arguments: argparse.Namespace) -> int:
    require_rich("matplotlib")
    name = choose_device(arguments.device)
    from ..check import run_check
    from ..check.correctness import INCOMPLETE, RIGHT, WRONG
    from ..check.findings import Settings
    from ..check.kernels import Target

    target = Target.of(name)
    if arguments.tune and not target.kind == "cuda":
        raise CommandError(f"--tune: needs a GPU, and this check is of {name}")
    settings = Settings(target, arguments.output, arguments.seed, arguments.quick, arguments.tune, arguments.kernels, limit=arguments.limit)
    return {RIGHT: 0, WRONG: 1, INCOMPLETE: 3}[run_check(settings).outcome]


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = float("nan")
    if not 0 <= seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"got {text}, expected seconds, 0 or more")
    return seconds


def choose_device(name: str) -> str:
    """Returns `cuda:N`, `cpu` or `simulator`. A GPU for which torch has no code passes: the check reports it."""
    count = torch.cuda.device_count()
    # a GPU that torch cannot see must not count as checked
    hidden = diagnostics.problems() if not count and (name == "auto" or name.startswith("cuda")) else []
    if hidden:
        raise CommandError(f"--device {name}: {'; '.join(hidden)} (--device cpu works everywhere)")
    if name == "auto":
        name = "cuda" if count else "cpu"
    if name == "cpu":
        return name
    if name == "simulator":
        if not info()["simulator"]:
            raise CommandError("--device simulator: this library was built without it: run `make build` in a checkout")
        return name
    kind, _, index = name.partition(":")
    if kind != "cuda" or not (index.isdecimal() or name == "cuda"):
        raise CommandError(f"--device {name}: expected auto, cpu, simulator, cuda or cuda:N")
    if not count:
        raise CommandError(f"--device {name}: torch {torch.__version__} finds no CUDA device here; --device cpu works everywhere")
    number = int(index or 0)
    if number >= count:
        raise CommandError(f"--device {name}: this machine has {count} CUDA device(s)")
    device = torch.device("cuda", number)
    if kernel_family(device) is None:
        major, minor = torch.cuda.get_device_capability(device)
        raise CommandError(f"--device {name}: {torch.cuda.get_device_name(device)} is sm_{major}{minor}, volta_fa needs sm_70 or newer")
    return f"cuda:{number}"
