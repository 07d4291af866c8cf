"""Finding and loading the native library."""

from __future__ import annotations

from pathlib import Path

import torch

from .version import __version__

_PACKAGE = Path(__file__).parent
_CHECKOUT = _PACKAGE.parent.parent


def _release(version: str) -> str:
    """2.10 of 2.10.0+cu128: what a library is built against, and loads into every patch release of."""
    return ".".join(version.split("+")[0].split(".")[:2])


def _releases() -> list[str]:
    """The torch releases that this package has a library for, oldest first."""
    found = (path.parent.name.removeprefix("torch-") for path in _PACKAGE.glob("torch-*/libvolta_fa.so"))
    return sorted(found, key=lambda release: [int(part) for part in release.split(".")])


def library_path() -> Path:
    """Where the native library for this torch lies: what `torch.ops.load_library` and C++ programs open.

    The file needs nothing of this Python package but the core library in the folder above its own: loading it alone registers the
    operators, their gradients and their shape functions.
    """
    return _PACKAGE / f"torch-{_release(torch.__version__)}" / "libvolta_fa.so"


def load() -> None:
    """Register `torch.ops.volta_fa`; raises ImportError with the remedy if that cannot be done."""
    path = library_path()
    if not path.exists():
        raise ImportError(_missing())
    try:
        torch.ops.load_library(path)
    except OSError as error:
        raise ImportError(
            f"the native library {path} does not load into torch {torch.__version__} ({error}): "
            "rebuild it with `make build`, or install a wheel built on this kind of machine"
        ) from error


def _missing() -> str:
    """Why there is no library for this torch, and what to do."""
    releases, wanted = _releases(), _release(torch.__version__)
    in_checkout = (_CHECKOUT / "Cargo.toml").exists()
    if not releases:
        return f"the native library {library_path()} has not been built: run `make build` in the checkout, or install a wheel"
    has = f"has libraries for torch {releases[0]} to {releases[-1]}" if len(releases) > 1 else f"was built for torch {releases[0]}"
    remedy = f"run `make build` in {_CHECKOUT}" if in_checkout else f"install one of these, or a volta_fa for torch {wanted}"
    return f"volta_fa {__version__} {has}, and torch {torch.__version__} is installed: {remedy}"
