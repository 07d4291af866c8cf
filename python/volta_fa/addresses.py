"""Says where users send a report, such as the files that `python -m volta_fa check` writes. `make release` writes addresses.json: URLs of
the release's files, its sources and its issue tracker, each empty if not published."""

from __future__ import annotations

import json
from pathlib import Path

_FILE = Path(__file__).with_name("addresses.json")


def send(file: Path) -> str:
    """Returns an instruction to send `file` to the issue tracker; without one, to the person who provided the package."""
    issues = json.loads(_FILE.read_text())["issues"]
    return f"Send {file} " + (f"as an issue at {issues}" if issues else "to the person who gave you volta_fa")
