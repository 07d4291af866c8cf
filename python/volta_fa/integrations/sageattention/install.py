"""Lets `import sageattention` find volta_fa, for programs that import SageAttention."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

from ..stand_in import install_stand_in

#: The folder with the package and its metadata, as pip would install them from tools/sageattention_shim.
_SITE = Path(__file__).with_name("shim")


def install_sageattention_shim(*, replace: bool = False) -> None:
    """Makes `import sageattention`, and importlib.metadata's search for it, find volta_fa in this process.

    Call it before importing packages that look for sageattention, such as diffusers, because they look once. A second call does
    nothing, and so does a call where pip installed the shim.

    Args:
        replace: find the shim before an installed sageattention, in this process only.

    Raises RuntimeError if another sageattention is imported, or, without `replace`, installed.
    """
    if install_stand_in("install_sageattention_shim", "sageattention", _SITE, replace=replace) and "diffusers" in sys.modules:
        warnings.warn(
            "volta_fa.install_sageattention_shim: diffusers was imported before; if it looked for sageattention, it will not find the shim",
            stacklevel=2,
        )
