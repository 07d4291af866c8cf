"""Lets `import flash_attn` find volta_fa, for programs that import flash-attn."""

from __future__ import annotations

import importlib.util
import sys
import warnings
from pathlib import Path

from ..stand_in import install_stand_in

#: The folder with the package and its metadata, as pip would install them from tools/flash_attn_shim.
_SITE = Path(__file__).with_name("shim")


def install_flash_attn_shim(*, fa3_returns_lse: bool | None = None) -> None:
    """Makes `import flash_attn`, and importlib.metadata's search for flash-attn, find volta_fa in this process.

    So does `import flash_attn_interface`, FlashAttention 3's module, unless that is installed.

    Call it before importing packages that look for flash-attn, such as transformers, because they look once. A second call does
    nothing but for its argument, and so does a call where pip installed the shim.

    Args:
        fa3_returns_lse: True: functions of flash_attn_interface return (out, softmax_lse), as before 2025-08-29. Programs of that time,
            such as Wan 2.1, take the first of both. False: they return out alone unless asked. None: as set before, at first False.

    Raises RuntimeError if another flash_attn is installed or imported.
    """
    if fa3_returns_lse is not None:
        from . import fa3  # here, because it lengthens every import

        fa3._always_return_lse = fa3_returns_lse
    if install_stand_in("install_flash_attn_shim", "flash-attn", _SITE) and "transformers" in sys.modules:
        warnings.warn(
            "volta_fa.install_flash_attn_shim: transformers was imported before; if it looked for flash-attn, it will not find the shim",
            stacklevel=2,
        )


def provide_flash_attn_v100() -> None:
    """Makes `import flash_attn_v100` find volta_fa in this process, also where 1Cat-vLLM's wheel has a package of that name.

    Raises RuntimeError if that package is imported already.
    """
    name = "flash_attn_v100"
    package = _SITE / name / "__init__.py"
    found = sys.modules.get(name)
    if found is not None and found.__file__ == str(package):
        return
    if found is not None:
        raise RuntimeError(f"{name} was imported before from {found.__file__}: unset VOLTA_FA_VLLM_1CAT, or import it later")
    spec = importlib.util.spec_from_file_location(name, package, submodule_search_locations=[str(package.parent)])
    assert spec is not None and spec.loader is not None
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
