"""Where reports go. addresses.json has the addresses of a release, which `make release` writes."""

from __future__ import annotations

import json
from pathlib import Path

_FILE = Path(__file__).with_name("addresses.json")


def send(file: Path) -> str:
    """Returns the sentence that says where to send a report."""
    issues = json.loads(_FILE.read_text())["issues"]
    return f"Send {file} " + (f"as an issue at {issues}" if issues else "to the person who gave you volta_fa")
