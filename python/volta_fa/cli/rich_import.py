"""Checks for rich. Only the command line needs it, so the wheel does not require it."""

from __future__ import annotations

from ..errors import CommandError


def require_rich(*also: str) -> None:
    """Raises CommandError unless rich, and the packages named in `also`, are installed."""
    import importlib.util

    missing = [package for package in ("rich", *also) if importlib.util.find_spec(package) is None]
    if missing:
        raise CommandError(f"this command needs {' and '.join(missing)}: pip install {' '.join(missing)}")
