"""Lets programs that import flash_attn or sageattention find volta_fa's packages of these names."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import warnings
from importlib import metadata
from pathlib import Path

#: Folders with a package and its metadata, as pip would install them from tools/flash_attn_shim and tools/sageattention_shim.
_FLASH_ATTN, _SAGEATTENTION = (Path(__file__).parent / package / "shim" for package in ("flash_attn", "sageattention"))


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
        from .flash_attn import fa3  # here, because it lengthens every import

        fa3._always_return_lse = fa3_returns_lse
    if _install("install_flash_attn_shim", "flash-attn", _FLASH_ATTN) and "transformers" in sys.modules:
        warnings.warn(
            "volta_fa.install_flash_attn_shim: transformers was imported before; if it looked for flash-attn, it will not find the shim",
            stacklevel=2,
        )


def install_sageattention_shim(*, replace: bool = False) -> None:
    """Makes `import sageattention`, and importlib.metadata's search for it, find volta_fa in this process.

    Call it before importing packages that look for sageattention, such as diffusers, because they look once. A second call does
    nothing, and so does a call where pip installed the shim.

    Args:
        replace: find the shim before an installed sageattention, in this process only.

    Raises RuntimeError if another sageattention is imported, or, without `replace`, installed.
    """
    if _install("install_sageattention_shim", "sageattention", _SAGEATTENTION, replace=replace) and "diffusers" in sys.modules:
        warnings.warn(
            "volta_fa.install_sageattention_shim: diffusers was imported before; if it looked for sageattention, it will not find the shim",
            stacklevel=2,
        )


def provide_flash_attn_v100() -> None:
    """Makes `import flash_attn_v100` find volta_fa in this process, also where 1Cat-vLLM's wheel has a package of that name.

    Raises RuntimeError if that package is imported already.
    """
    name = "flash_attn_v100"
    package = _FLASH_ATTN / name / "__init__.py"
    found = sys.modules.get(name)
    if found is not None and found.__file__ == str(package):
        return
    if found is not None:
        raise RuntimeError(f"{name} was imported before from {found.__file__}: unset VOLTA_FA_VLLM_1CAT, or import it later")
    spec = importlib.util.spec_from_file_location(name, package, submodule_search_locations=[str(package.parent)])
    assert spec is not None and spec.loader is not None
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)


def _install(caller: str, distribution: str, site: Path, *, replace: bool = False) -> bool:
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
