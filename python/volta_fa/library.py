"""Finding and loading the native library."""

from __future__ import annotations

from pathlib import Path

import torch

from .version import TORCH_VERSION, __version__


def library_path() -> Path:
    """Where the native library lies: what `torch.ops.load_library` and C++ programs open.

    The file needs nothing of this Python package: loading it alone registers the operators, their
    gradients and their shape functions.
    """
    return Path(__file__).with_name("libvolta_fa.so")


def load() -> None:
    """Register `torch.ops.volta_fa`; raises ImportError with the remedy if that cannot be done."""
    if torch.__version__.split("+")[0] != TORCH_VERSION:
        raise ImportError(
            f"volta_fa {__version__} needs torch {TORCH_VERSION}, and torch {torch.__version__} is installed: "
            f"run `pip install torch=={TORCH_VERSION}`"
        )
    path = library_path()
    if not path.exists():
        raise ImportError(f"the native library {path} has not been built: run `make build` in the checkout, or install a wheel")
    try:
        torch.ops.load_library(path)
    except OSError as error:
        raise ImportError(
            f"the native library {path} does not load into torch {torch.__version__} ({error}): "
            "rebuild it with `make build`, or install a wheel built on this kind of machine"
        ) from error
