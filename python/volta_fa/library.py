"""Finds and loads the native library, whose loading registers `torch.ops.volta_fa`. `import volta_fa` calls `load`. The package has one
libvolta_fa.so for each supported torch, in torch-<release>/, and one libvolta_fa_core.so for all."""

import json
from pathlib import Path

import torch

from .version import __version__

_PACKAGE = Path(__file__).parent
_CHECKOUT = _PACKAGE.parent.parent  # the repository, if the package is not installed


def _release(version: str) -> str:
    """Returns "2.10" for "2.10.0+cu128": a library for a minor release loads into all its patch releases."""
    return ".".join(version.split("+")[0].split(".")[:2])


def library_path() -> Path:
    """Returns the path of the native library for this torch, for `torch.ops.load_library` and C++ programs. Loading it registers the
    operators, their gradients and their shape functions. It needs the core library in the folder above its own, and no Python code."""
    return _PACKAGE / f"torch-{_release(torch.__version__)}" / "libvolta_fa.so"


def load() -> None:
    """Registers `torch.ops.volta_fa`. Does nothing if another copy of the package, of the same version, has done it in this process.
    Raises ImportError with a remedy if there is no library for this torch, it does not load, or another version is loaded."""
    path = library_path()
    if hasattr(torch.ops.volta_fa, "fwd"):
        return _reuse(path)
    if not path.exists():
        raise ImportError(_missing())
    try:
        torch.ops.load_library(path)
    except OSError as error:
        raise ImportError(
            f"the native library {path} does not load into torch {torch.__version__} ({error}): "
            "rebuild it with `make build`, or install a wheel built on this kind of machine"
        ) from error


def _reuse(path: Path) -> None:
    """Checks that this package, whose library is `path`, can use the operators of the library that is loaded. Raises ImportError if that
    one has another version."""
    if loaded_path() == str(path):
        return
    version = json.loads(torch.ops.volta_fa._info())["version"]
    if version != __version__:
        raise ImportError(
            f"{path} (volta_fa {__version__}) cannot be loaded beside {loaded_path()} (volta_fa {version}), because both define "
            "torch.ops.volta_fa: use one of them in a process, or install the same version of both"
        )


def loaded_path() -> str:
    """Returns the path of the library that defined `torch.ops.volta_fa`."""
    return str(torch.ops.volta_fa._library_path()) if hasattr(torch.ops.volta_fa, "_library_path") else "an older library"


def _missing() -> str:
    """Returns why there is no library for this torch, and the remedy."""
    found = (path.parent.name.removeprefix("torch-") for path in _PACKAGE.glob("torch-*/libvolta_fa.so"))
    releases = sorted(found, key=lambda release: [int(part) for part in release.split(".")])
    wanted = _release(torch.__version__)
    in_checkout = (_CHECKOUT / "Cargo.toml").exists()
    if not releases:
        return f"the native library {library_path()} has not been built: run `make build` in the checkout, or install a wheel"
    has = f"has libraries for torch {releases[0]} to {releases[-1]}" if len(releases) > 1 else f"was built for torch {releases[0]}"
    remedy = f"run `make build` in {_CHECKOUT}" if in_checkout else f"install one of these, or a volta_fa for torch {wanted}"
    return f"volta_fa {__version__} {has}, and torch {torch.__version__} is installed: {remedy}"
