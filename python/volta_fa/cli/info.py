"""`python -m volta_fa info`: prints `volta_fa.info()`, which describes this build and this machine, as tables or JSON. A kernel family is
the kernels for one generation of GPUs: volta or turing. A variant is one compiled kernel. A tuning file, which `check --tune` writes, says
for one kind of GPU which kernels are faster than the planner's (choices) and which failed."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING, Any

from ..errors import require_rich
from ..inspection import info

if TYPE_CHECKING:
    from rich.table import Table

SUMMARY = "print versions, devices, problems and the number of kernels; with --kernels every kernel"
DESCRIPTION = """\
Print versions, this machine's CUDA devices with the kernel family of each, problems, and how many kernels there are.
With --kernels, also print every compiled kernel variant.
Its registers and shared memory decide how many blocks an SM holds.
"""


#: Characters that suffice for every row of the kernel table.
_ROW_WIDTH = 100


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--kernels", action="store_true", help="list every kernel variant with its registers and shared memory")
    parser.add_argument("--json", action="store_true", help="print JSON for programs instead of tables")


def run(arguments: argparse.Namespace) -> int:
    facts = info()
    if arguments.json:
        print(json.dumps(facts, indent=2))
    else:
        _print_tables(facts, arguments.kernels)
    return 0


def _print_tables(facts: dict[str, Any], kernels: bool) -> None:
    require_rich()
    from rich.console import Console

    console = Console(highlight=False)
    versions = facts["versions"]
    driver = "found" if facts["cuda_driver"] else "none on this machine: the CPU backend runs everything"
    simulator = "built in (VOLTA_FA_SIMULATE=1)" if facts["simulator"] else "left out of this build"
    console.print(
        f"volta_fa {versions['volta_fa']}, torch {versions['torch']} (CUDA {versions['cuda'] or 'none'}), Python {versions['python']}\n"
        f"library      {facts['library']}\n"
        f"CUDA driver  {driver}\n"
        f"simulator    {simulator}\n"
        f"float32      computed with {facts['float32']} (torch.set_float32_matmul_precision)",
        *(f"tuning       {_tuning_line(tuning)}" for tuning in facts["tuning"]),
        sep="\n",
        soft_wrap=True,
    )
    for problem in facts["problems"]:
        console.print(f"[bold]problem[/bold]      {problem}", soft_wrap=True)
    for device in facts["devices"]:
        console.print(f"cuda:{device['index']}       {_device_line(device)}", soft_wrap=True)
    families = ", ".join(f"{family['variants']} of {family['name']} (sm_{family['sm']} or newer)" for family in facts["families"])
    console.print(f"kernels      {len(facts['variants'])}: {families}; --kernels lists them", soft_wrap=True)
    if kernels:
        title = "Kernel variants (tile: rows of a block x step; blocks an SM; KiB shared)"
        table = _table(title, [_variant_row(v) for v in facts["variants"]])
        # at least as wide as the rows, because rich would cut them at a pipe's 80 columns
        Console(highlight=False, width=max(console.width, _ROW_WIDTH)).print(table)


def _device_line(device: dict[str, Any]) -> str:
    if device["family"] is None:
        return f"{device['name']} (compute capability {device['capability']}): volta_fa needs 7.0 or newer"
    code = "its machine code" if device["native"] else "PTX, compiled by the driver"
    return f"{device['name']} (compute capability {device['capability']}): family {device['family']}, {code}"


def _tuning_line(tuning: dict[str, Any]) -> str:
    """Returns the state of a device's tuning file. `tuning`: an entry of `info()["tuning"]`. "of" is the device. "outcome" is read,
    missing, off, or, with a reason in "why", ignored or unknown. "overridden": whether this process has another tuning in its place."""
    found = {
        "read": f"{tuning.get('choices')} choices, failed kernels: {', '.join(tuning.get('failed', ())) or 'none'}",
        "missing": "none",
        "off": "switched off (VOLTA_FA_TUNING=0)",
    }.get(tuning["outcome"], f"{tuning['outcome']}: {tuning.get('why')}")
    overridden = ", overridden in this process" if tuning.get("overridden") else ""
    path = f" ({tuning['path']})" if tuning.get("path") else ""
    return f"{tuning['of']}: {found}{overridden}{path}"


def _variant_row(variant: dict[str, Any]) -> dict[str, Any]:
    headdim, headdim_v = variant["headdim"], variant["headdim_v"]
    return {
        "name": variant["name"],
        "headdim": headdim if headdim == headdim_v else f"{headdim}/{headdim_v}",  # of q and k, and of v
        # rows of a thread block, and rows of the other operand (such as keys) in a step of its loop (decode: rows of a warp); 0: no loop
        "tile": f"{variant['block_rows']}x{variant['step']}" if variant["step"] else variant["block_rows"],
        "warps": variant["threads"] // 32,  # of a block
        "blocks": variant["blocks_per_sm"],  # that an SM must hold: the kernel is compiled for as many
        "regs": variant["registers"],  # 32-bit registers of a thread
        "spill": variant["spill_bytes"],  # bytes that a thread's code stores and loads for lack of registers
        "KiB": f"{variant['shared_bytes'] / 1024:.4g}",  # dynamic shared memory of a block
    }


def _table(title: str, rows: list[dict[str, Any]]) -> Table:
    from rich.table import Table

    # no frame and short titles, so that eight columns fit _ROW_WIDTH characters, even with the longest names
    table = Table(title=f"\n{title}", title_justify="left", box=None, padding=(0, 1), pad_edge=False, collapse_padding=True)
    for index, column in enumerate(rows[0]):
        table.add_column(column, justify="left" if index == 0 else "right", no_wrap=True)
    for row in rows:
        table.add_row(*("-" if value is None else str(value) for value in row.values()))
    return table
