"""`python -m volta_fa info`: what this build contains and what this machine has."""

from __future__ import annotations

import argparse
import json
from typing import Any

from ..info import info
from .rich_import import require_rich

SUMMARY = "print versions, devices, kernel families and kernel variants with their registers and shared memory"
DESCRIPTION = """\
Print the versions in play, this machine's CUDA devices with the kernel family that each would use, and every
compiled kernel variant with the registers and the shared memory that decide how many blocks an SM holds.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON for programs instead of tables")


def run(arguments: argparse.Namespace) -> int:
    facts = info()
    if arguments.json:
        print(json.dumps(facts, indent=2))
    else:
        _print_tables(facts)
    return 0


def _print_tables(facts: dict[str, Any]) -> None:
    require_rich()
    from rich.console import Console

    console = Console()
    versions = facts["versions"]
    console.print(f"volta_fa {versions['volta_fa']}, torch {versions['torch']} (CUDA {versions['cuda'] or 'none'}), Python {versions['python']}")
    console.print(f"library: {facts['library']}", soft_wrap=True, highlight=False)
    console.print(f"simulator: {'built in (VOLTA_FA_SIMULATE=1)' if facts['simulator'] else 'left out of this build'}")
    console.print(f"CUDA driver: {'found' if facts['cuda_driver'] else 'none on this machine: the CPU backend runs everything'}")
    if facts["devices"]:
        console.print(_table("Devices", facts["devices"], ["index", "name", "capability", "family"]))
    if facts["families"]:
        console.print(_table("Kernel families", facts["families"], ["name", "sm", "variants"]))
    if facts["variants"]:
        console.print(_table("Kernel variants", [_variant_row(v) for v in facts["variants"]]))


def _variant_row(variant: dict[str, Any]) -> dict[str, Any]:
    return {
        "name": variant["name"],
        "pass": variant["pass"],
        "headdim": variant["headdim"] if variant["headdim"] == variant["headdim_v"] else f"{variant['headdim']}/{variant['headdim_v']}",
        "tile": f"{variant['block_rows']} x {variant['step']}",
        "threads": variant["threads"],
        "blocks/SM": variant["blocks_per_sm"],
        "registers": variant["registers"],
        "spills": variant["spill_bytes"],
        "shared KiB": f"{variant['shared_bytes'] / 1024:g}",
    }


def _table(title: str, rows: list[dict[str, Any]], columns: list[str] | None = None):
    from rich.table import Table

    columns = columns or list(rows[0])
    table = Table(title=title, title_justify="left")
    for column in columns:
        numeric = isinstance(rows[0][column], int)
        table.add_column(column, justify="right" if numeric else "left", overflow="fold")
    for row in rows:
        table.add_row(*("-" if row[column] is None else str(row[column]) for column in columns))
    return table
