"""Lets a program import a package that volta_fa provides in place of another: flash_attn, sageattention."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from importlib import metadata
from pathlib import Path


def install_stand_in(caller: str, distribution: str, site: Path, *, replace: bool = False) -> bool:
    """Puts a folder with a package and its metadata into the search path of this process.

    Args:
        caller: the public function, for messages.
        distribution: the name that pip would install.
        site: a folder with the package and its `dist-info`, whose version ends with +volta.
        replace: find the stand-in before an installed package.

    Returns False if a stand-in is there already. Raises RuntimeError if another package is imported, or, without `replace`, installed.
    """
    module = distribution.replace("-", "_")
    installed = next(iter(metadata.distributions(name=distribution)), None)
    if installed is not None and installed.version.endswith("+volta"):
        return False
    if replace and module in sys.modules:
        raise RuntimeError(f"volta_fa.{caller}: {module} was imported before: call it before the first import of {module}")
    if not replace and installed is not None:
        raise RuntimeError(
            f"volta_fa.{caller}: {distribution} {installed.version} is installed in {installed.locate_file('')}: "
            f"use it, or run `pip uninstall {distribution}`"
        )
    found = None if replace else sys.modules.get(module) or importlib.util.find_spec(module)
    if found is not None:
        raise RuntimeError(f"volta_fa.{caller}: there is another {module}, which the shim must not shadow: {found}")
    # without `replace` at the end, so that a package that is installed later is found first
    sys.path.insert(0 if replace else len(sys.path), str(site))
    importlib.invalidate_caches()
    return True
