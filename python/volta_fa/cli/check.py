"""`python -m volta_fa check`: parses the arguments of the check of all kernels, which is in volta_fa/check. `demo` and
`versus-1cat` also choose their device by `choose_device`."""

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
    """Runs the check and returns DESCRIPTION's exit status. Raises CommandError (status 2) for arguments that this machine cannot serve."""
    require_rich("matplotlib")  # raises CommandError unless rich and matplotlib are installed
    name = choose_device(arguments.device)
    from ..check import run_check
    from ..check.correctness import INCOMPLETE, RIGHT, WRONG
    from ..check.kernels import Target
    from ..check.report import Settings

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


def choose_device(name: str, kinds: str = "auto, cpu, simulator, cuda or cuda:N") -> str:
    """Returns `cuda:N`, `cpu` or `simulator` for the argument --device. Raises CommandError if that is not available. `kinds`: the allowed
    values in words, for the message; the simulator is allowed if its name is among these words. A GPU for which torch has no code is
    accepted: `check` reports it, and `demo` tests it."""
    count = torch.cuda.device_count()
    # if torch cannot see the GPU, "auto" must not check the CPU instead
    hidden = diagnostics.problems() if not count and (name == "auto" or name.startswith("cuda")) else []
    if hidden:
        raise CommandError(f"--device {name}: {'; '.join(hidden)}; --device cpu works everywhere")
    if name == "auto":
        name = "cuda" if count else "cpu"
    if name == "cpu":
        return name
    if name == "simulator" and name in kinds:
        if not info()["simulator"]:
            raise CommandError("--device simulator: this library was built without it: run `make build` in a checkout")
        return name
    kind, _, index = name.partition(":")
    if kind != "cuda" or not (index.isdecimal() or name == "cuda"):
        raise CommandError(f"--device {name}: expected {kinds}")
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
