"""Public name of `volta_fa.integrations.vllm`: vLLM's plugin entry point is `volta_fa.vllm:register`."""

from types import ModuleType

from .integrations.vllm import *
from .integrations.vllm import __all__ as __all__


def __getattr__(name: str) -> ModuleType:
    """Imports these modules on first use: `backend` and `mla` import vLLM, which an import of this module must not do."""
    if name not in ("backend", "mla", "paged"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return import_module(f"volta_fa.integrations.vllm.{name}")
