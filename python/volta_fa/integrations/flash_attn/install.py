"""Lets `import flash_attn` find volta_fa, for programs that import flash-attn."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

from ..stand_in import install_stand_in

#: The folder with the package and its metadata, as pip would install them from tools/flash_attn_shim.
_SITE = Path(__file__).with_name("shim")


def install_flash_attn_shim() -> None:
    """Makes `import flash_attn`, and importlib.metadata's search for flash-attn, find volta_fa in this process.

    Call it before importing packages that look for flash-attn, such as transformers, because they look once. A second call does
    nothing, and so does a call where pip installed the shim.

    Raises RuntimeError if another flash_attn is installed or imported.
    """
    if install_stand_in("install_flash_attn_shim", "flash-attn", _SITE) and "transformers" in sys.modules:
        warnings.warn(
            "volta_fa.install_flash_attn_shim: transformers was imported before; if it looked for flash-attn, it will not find the shim",
            stacklevel=2,
        )
