"""A `flash_attn` package made of volta_fa, for programs that import flash-attn."""

from __future__ import annotations

import importlib.util
import sys
import warnings
from importlib import metadata
from pathlib import Path

#: The package and its metadata, as pip would install them (tools/flash_attn_shim in the repository is the distribution).
_SITE = Path(__file__).with_name("shim")


def install_flash_attn_shim() -> None:
    """Make `import flash_attn`, and questions for the distribution flash-attn, find volta_fa, in this process.

    Call it before importing anything that looks for flash-attn, transformers first of all: what they found they
    remember. Calling it again, or where the shim was installed with pip, does nothing.

    Raises RuntimeError if there is another flash_attn, which stays what it is.
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
    # At the end: a flash-attn that is installed later comes first.
    sys.path.append(str(_SITE))
    importlib.invalidate_caches()
