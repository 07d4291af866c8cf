"""Lets `import flash_attn` find volta_fa, for programs that import flash-attn."""

from __future__ import annotations

import importlib.util
import sys
import warnings
from importlib import metadata
from pathlib import Path

#: The folder with the package and its metadata, as pip would install them from tools/flash_attn_shim.
_SITE = Path(__file__).with_name("shim")


def install_flash_attn_shim() -> None:
    """Makes `import flash_attn`, and importlib.metadata's search for flash-attn, find volta_fa in this process.

    Call it before importing packages that look for flash-attn, such as transformers, because they look once. A second call does
    nothing, and so does a call where pip installed the shim.

    Raises RuntimeError if another flash_attn is installed or imported.
    """
    installed = next(iter(metadata.distributions(name="flash-attn")), None)
    if installed is not None and installed.version.endswith("+volta"):
        return
    if installed is not None:
        raise RuntimeError(
            f"volta_fa.install_flash_attn_shim: flash-attn {installed.version} is installed in {installed.locate_file('')}: "
            "use it, or run `pip uninstall flash-attn`"
        )
    found = sys.modules.get("flash_attn") or importlib.util.find_spec("flash_attn")
    if found is not None:
        raise RuntimeError(f"volta_fa.install_flash_attn_shim: there is another flash_attn, which the shim must not shadow: {found}")
    if "transformers" in sys.modules:
        warnings.warn(
            "volta_fa.install_flash_attn_shim: transformers was imported before; if it looked for flash-attn, it will not find the shim",
            stacklevel=2,
        )
    # at the end, so that a flash-attn that is installed later is found first
    sys.path.append(str(_SITE))
    importlib.invalidate_caches()
