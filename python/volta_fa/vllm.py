"""Public name of `volta_fa.integrations.vllm`: vLLM's plugin entry point is `volta_fa.vllm:register`."""

from types import ModuleType

from .integrations.vllm import *
from .integrations.vllm import __all__ as __all__


def __getattr__(name: str) -> ModuleType:
    """Imports the modules on vLLM's classes on first use, because `register` must not import vLLM."""
    if name not in ("backend", "mla", "paged"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return import_module(f"volta_fa.integrations.vllm.{name}")
