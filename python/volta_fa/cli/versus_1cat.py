"""`python -m volta_fa versus-1cat`: prints times of volta_fa beside those of 1Cat-vLLM's attention (check/versus.py measures them).
1Cat-vLLM is a fork of vLLM for V100s that published times of its package flash_attn_v100, mostly on a Tesla PG503-216 (a V100 with 72
SMs). Both run at those shapes on this GPU."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..diagnostics import send  # a sentence on where to send a file
from ..errors import require_output
from ..progress import Lines  # prints lines of progress until it is stopped
from .check import choose_device  # cuda:N, cpu or simulator for --device

if TYPE_CHECKING:
    from ..check.versus import Outcome, Row

SUMMARY = "time attention beside 1Cat-vLLM's flash_attn_v100, and write a file to send"
DESCRIPTION = """\
Time volta_fa and 1Cat-vLLM's flash_attn_v100 at the shapes of its published times: headdim 256, 6 query heads on 1, prompts, decoding
and verification of 5 tokens. Both get the same tensors, and both results are compared with float64. Without that package, only volta_fa
runs. It takes about a minute on a GPU. Each row is printed after volta_fa ran, and again after the package did.

The file has the card's name, clocks and power, the driver, versions, and the figures: no names of users, machines or folders.

Exit status: 0 if volta_fa's results are right, 1 if one is wrong or raised an error, 2 if the command cannot run here. The simulator gives
times alone.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--device",
        default="auto",
        help="auto (a GPU if there is one, else the CPU), cuda:N, cpu (short shapes), or simulator (volta_fa on a simulated PG503-216)",
    )
    parser.add_argument(
        "--output", type=Path, default=Path("versus-1cat.json"), metavar="FILE", help="the file to write (default: ./versus-1cat.json)"
    )


def run(arguments: argparse.Namespace) -> int:
    """Prints a row for each shape (volta_fa's time and share of the allowed error, the package's, the published time), writes the file,
    and returns DESCRIPTION's exit status."""
    from ..check import machine, versus
    from ..check.kernels import Target

    target = Target.of(choose_device(arguments.device))
    target.make_current()
    facts = machine.describe(target)
    require_output(arguments.output, is_folder=False)
    print(_title(target.kind, facts), flush=True)
    found: dict[int, Row] = {}  # by id(): a row comes twice, after volta_fa ran and after the package did
    progress = Lines(lambda: f"{len(found)} of {len(versus.SHAPES)} shapes done")
    try:
        for row in versus.rows(target):
            found[id(row)] = row
            print(f"{row.shape!s:50} {_cell(row.ours):>24} {_cell(row.theirs):>24} {_ms(row.shape.published):>10}", flush=True)
        if target.kind == "cuda":
            facts["card_after"] = machine.query(target.device)
    finally:
        progress.stop()
        arguments.output.write_text(json.dumps({"machine": facts, "rows": [row.data() for row in found.values()]}, indent=1) + "\n")
    for name, side in (("volta_fa", "ours"), ("1Cat-vLLM", "theirs")):
        for reason in sorted({getattr(row, side).missing for row in found.values()} - {""}):
            print(f"{name} did not run: {reason}")
    print(f"\n{send(arguments.output)}.")
    return int(any(versus.is_wrong(row.ours) for row in found.values()))


def _title(kind: str, facts: dict[str, Any]) -> str:
    """Returns the device, and the heads of the columns. `kind`: cpu, simulator or cuda. `facts`: of `machine.describe`."""
    without_card = {
        "cpu": "the CPU backend, on shorter shapes: times mean nothing here",
        "simulator": "a simulated Tesla PG503-216 (72 SMs, 1312 MHz): a launch on a real card takes 10 to 20 us more",
    }
    card = facts.get("card", {})
    where = without_card.get(kind) or f"{card['name']}, {card['sms']} SMs, {card.get('sm_clock_mhz', '?')} MHz at the start"
    heads = f"{'milliseconds (share of the allowed error)':50} {'volta_fa':>24} {'1Cat-vLLM here':>24} {'published':>10}"
    return f"{where}\n\n{heads}"


def _ms(ms: float | None) -> str:
    return "-" if ms is None else f"{ms:.4g}"


def _cell(outcome: Outcome) -> str:
    """Returns milliseconds and, in parentheses, the error as a share of what is allowed, each only if known; "-" for neither."""
    share = "" if outcome.share is None else f" ({outcome.share:.0%})"
    return f"{_ms(outcome.ms)}{share}" if outcome.ms is not None or not outcome.missing else "-"
