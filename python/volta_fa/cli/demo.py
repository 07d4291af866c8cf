"""`python -m volta_fa demo`: trains a small GPT with volta_fa and with PyTorch's attention, and compares."""

import argparse
from pathlib import Path

import torch

from .. import diagnostics
from ..errors import CommandError, first_line, require_output, require_rich
from ..inspection import kernel_family
from .check import choose_device  # cuda:N or cpu for --device, or CommandError

SUMMARY = "train a small GPT with volta_fa and with PyTorch's attention, and compare losses, time and memory"
DESCRIPTION = """\
Train a small character-level GPT on the source of Python's standard library, twice: with volta_fa and with PyTorch's
scaled_dot_product_attention. Both runs begin with the same weights and see the same batches.
The demo prints losses, step time and peak memory side by side, and writes a plot.

On a GPU it trains in float16 autocast with GradScaler. On a CPU it trains in float32, less than a minute on two cores.
Then one attention layer runs as machine code on a simulated V100 and T4, forward and backward: at most 20 seconds on two cores.

With --ranks 2, volta_fa trains in two processes that share each sequence by ring attention. They use NCCL with two GPUs, and gloo
on a CPU. PyTorch still trains in one process, and no layer is simulated.

Exit status: 0 if the two runs agree within rounding and the layer, where it runs, is right; else 1. It is 2 if the demo cannot run here.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", default="auto", help="auto (a supported GPU if there is one, else the CPU), cpu, cuda or cuda:N")
    parser.add_argument("--steps", type=_positive, help="training steps of each run (default: 60 on a CPU, 300 on a GPU)")
    parser.add_argument("--quick", action="store_true", help="train for 15 steps")
    parser.add_argument("--ranks", type=_positive, default=1, help="processes that share volta_fa's sequences (default: 1)")
    parser.add_argument("--output", type=Path, default=Path("demo-output"), help="folder for the plot (default: ./demo-output)")


def run(arguments: argparse.Namespace) -> int:
    """Trains, simulates a layer (only with one rank), and returns DESCRIPTION's exit status. Raises CommandError for status 2."""
    require_rich("matplotlib")  # raises CommandError unless rich and matplotlib are installed
    from ..demo import run_demo, run_simulated, settings_for

    device = _choose_device(arguments.device)
    require_output(arguments.output, is_folder=True)
    settings = settings_for(device, steps=arguments.steps, quick=arguments.quick)
    if arguments.ranks > 1:
        from ..demo.ranks import run_on_ranks

        return 0 if run_on_ranks(arguments.ranks, settings, device, arguments.output) else 1
    agree = run_demo(settings, device, arguments.output).agree
    return 0 if run_simulated() and agree else 1


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"got {text}, expected a whole number above 0")
    return int(text)


def _choose_device(name: str) -> torch.device:
    """Returns the device of --device. Raises CommandError if torch cannot compute on it."""
    if name == "auto":
        usable = torch.cuda.is_available() and kernel_family(torch.device("cuda", 0)) is not None
        name = "cuda" if usable else "cpu"
    device = torch.device(choose_device(name, "auto, cpu, cuda or cuda:N"))
    try:
        torch.zeros(1, device=device).add_(1).item()
    except RuntimeError as error:
        reason = "; ".join(diagnostics.problems()) or first_line(error)
        raise CommandError(f"--device {name}: {reason}; --device cpu works everywhere") from None
    return device
