"""Lets programs that import flash_attn, flash_attn_v100 or sageattention find volta_fa's packages of these names ("shims").

Users call the `install_` functions, the shims' packages `provide_submodules`, and `volta_fa.vllm` `provide_flash_attn_v100`."""

import importlib
import importlib.util
import sys
import warnings
from collections.abc import Sequence
from importlib import metadata
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

#: Folders with a package and its metadata, as pip would install them from tools/flash_attn_shim and tools/sageattention_shim.
_FLASH_ATTN, _SAGEATTENTION = (Path(__file__).parent / package / "shim" for package in ("flash_attn", "sageattention"))


class _Submodules(MetaPathFinder, Loader):
    """An import hook for modules without files, which have the names that other modules define."""

    def __init__(self, sources: dict[str, str]) -> None:
        self._sources = sources  # by module, the module whose names it gets on its first import

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        # a package between, such as flash_attn.ops; the shim's own, without a dot, has files
        is_package = "." in fullname and any(name.startswith(f"{fullname}.") for name in self._sources)
        if not is_package and fullname not in self._sources:
            return None
        return ModuleSpec(fullname, self, origin=self._sources.get(fullname), is_package=is_package)

    def exec_module(self, module: ModuleType) -> None:
        if source := self._sources.get(module.__name__):
            found = vars(importlib.import_module(source))
            vars(module).update({name: value for name, value in found.items() if name == "__all__" or not name.startswith("__")})


def provide_submodules(sources: dict[str, str]) -> None:
    """Makes submodules of a shim's package importable. Its `__init__` calls it, because Python imports a package before its modules.

    Args:
        sources: by module, the module whose names it gets. The packages between, such as flash_attn.ops, follow.
    """
    # at the end: files come first
    sys.meta_path.append(_Submodules(sources))


def install_flash_attn_shim(*, fa3_returns_lse: bool | None = None) -> None:
    """Makes `import flash_attn`, and importlib.metadata's search for flash-attn, find volta_fa in this process.

    `import flash_attn_interface`, FlashAttention 3's module, finds it too, unless that is installed.

    Call it before importing packages that look for flash-attn, such as transformers, because they look once. A second call only
    applies its argument, and so does a call if pip has installed the shim.

    Args:
        fa3_returns_lse: True: functions of flash_attn_interface return (out, softmax_lse), as before 2025-08-29. Programs of that time,
            such as Wan 2.1, take the first of both. False: they return out alone unless asked. None: as set before, at first False.

    Raises RuntimeError if another flash_attn is installed or imported.
    """
    if fa3_returns_lse is not None:
        from .flash_attn import fa3  # here, because it lengthens every import

        fa3._always_return_lse = fa3_returns_lse
    _install("install_flash_attn_shim", "flash-attn", _FLASH_ATTN, looked_for_by="transformers")


def install_sageattention_shim(*, replace: bool = False) -> None:
    """Makes `import sageattention`, and importlib.metadata's search for it, find volta_fa in this process.

    Call it before importing packages that look for sageattention, such as diffusers, because they look once. A second call does
    nothing, and so does a call if pip has installed the shim.

    Args:
        replace: find the shim before an installed sageattention, in this process only.

    Raises RuntimeError if another sageattention is imported, or, without `replace`, installed.
    """
    _install("install_sageattention_shim", "sageattention", _SAGEATTENTION, looked_for_by="diffusers", replace=replace)


def provide_flash_attn_v100() -> None:
    """Makes `import flash_attn_v100` find volta_fa in this process, even if the package that 1Cat-vLLM (a fork of vLLM for V100s) brings is
    installed. `volta_fa.vllm` calls it if VOLTA_FA_VLLM_1CAT=package. Raises RuntimeError if another package of that name is imported."""
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


def _install(caller: str, distribution: str, folder: Path, *, looked_for_by: str, replace: bool = False) -> None:
    """Puts a folder with a package and its metadata into the search path of this process.

    Args:
        caller: the public function, for messages.
        distribution: the name that pip would install.
        folder: has the package and its `dist-info`, whose version ends with +volta.
        looked_for_by: a package that looks for it once, when it is imported; a warning says if that was before.
        replace: find the shim before an installed package.

    Does nothing if a shim is there already. Raises RuntimeError if another package is imported, or, without `replace`, installed.
    """
    module = distribution.replace("-", "_")
    installed = next(iter(metadata.distributions(name=distribution)), None)
    if installed is not None and installed.version.endswith("+volta"):
        return
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
    # without `replace` the folder goes to the end, so that a package that is installed later is found first
    sys.path.insert(0 if replace else len(sys.path), str(folder))
    importlib.invalidate_caches()
    if looked_for_by in sys.modules:
        text = f"{looked_for_by} was imported before; if it looked for {distribution}, it will not find the shim"
        warnings.warn(f"volta_fa.{caller}: {text}", stacklevel=3)
