"""The command line: `python -m volta_fa COMMAND`, with one module per command. A command's module has SUMMARY and DESCRIPTION for --help,
`add_arguments(parser)`, and `run(arguments)`, which returns the exit status."""

import argparse
import os
import sys
from collections.abc import Sequence

from ..errors import CommandError
from ..version import __version__
from . import check, demo, info, versus_1cat

_COMMANDS = (demo, info, check, versus_1cat)

_DESCRIPTION = """\
Exact attention, forward and backward, for NVIDIA Volta and Turing GPUs, as native PyTorch operators
(torch.ops.volta_fa.fwd and .bwd). Without a GPU, the same operators run on the CPU.
"""

_EPILOG = """\
examples:
  python -m volta_fa demo                train a small GPT with volta_fa and with PyTorch's attention, and compare
  python -m volta_fa demo --quick        train for 15 steps
  python -m volta_fa info                describe this build and this machine's devices
  python -m volta_fa info --kernels      list every kernel
  python -m volta_fa info --json         print the same as JSON
  python -m volta_fa check               check and time every kernel on this GPU
  python -m volta_fa check --tune        also write a tuning file with the fastest kernels
  python -m volta_fa versus-1cat         time attention beside 1Cat-vLLM's, and write a file to send

environment:
  VOLTA_FA_SIMULATE=1   simulate the kernels for float16 and bfloat16 CPU tensors on a V100,
                        or on a T4 with VOLTA_FA_SIM_GPU=t4

The operators' arguments, shapes and errors: python -c "import volta_fa; help(volta_fa)"
"""


def build_parser() -> argparse.ArgumentParser:
    """Returns the parser of all commands. A command's name is its module's, with hyphens; parsed arguments have its `run`."""
    parser = argparse.ArgumentParser(
        prog="python -m volta_fa", description=_DESCRIPTION, epilog=_EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--version", action="version", version=f"volta_fa {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for module in _COMMANDS:
        command = commands.add_parser(
            module.__name__.rpartition(".")[2].replace("_", "-"),
            help=module.SUMMARY,
            description=module.DESCRIPTION,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit status: 2 if it cannot run (CommandError), 130 after Ctrl-C. `argv`: the words after
    `python -m volta_fa`; None: the process's own."""
    arguments = build_parser().parse_args(argv)
    try:
        status = arguments.run(arguments)
        sys.stdout.flush()
        return status
    except CommandError as error:
        print(f"volta_fa: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        # the reader closed the pipe (`... | head`), so Python must not flush again at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        print("volta_fa: stopped", file=sys.stderr)
        return 130
