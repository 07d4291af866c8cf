"""Replaces the attributes of unsloth's modules, and restores them."""

from __future__ import annotations

import sys
import threading
from types import ModuleType
from typing import Any

import torch

from ...inspection import info

#: Modules with the flag that lets Gemma 2 call `run_attention`, with its softcap, instead of eager attention over masks in memory.
_SOFTCAP_MODULES = ("unsloth.models.gemma2", "unsloth.models.llama")
_SOFTCAP_FLAG = "HAS_FLASH_ATTENTION_SOFTCAPPING"

_lock = threading.Lock()
_replaced: list[tuple[ModuleType, str, Any]] = []


def _enabled() -> bool:
    return bool(_replaced)


def enable_unsloth(*, force: bool = False) -> None:
    """Runs the attention of unsloth's training through volta_fa: call it after `import unsloth` and before from_pretrained.

    Calls without a kernel in volta_fa run unsloth's function; `unsloth_stats()` counts both. A second call replaces the devices of the
    first.

    Args:
        force: use every device, also CUDA devices with compute capability 8.0 and more, and the CPU: for tests. Default: the CUDA
            devices with a kernel family of their own.

    Raises RuntimeError if no device qualifies, and ImportError if unsloth is not imported or has changed what this replaces. Nothing is
    replaced then. Warns if the release is untested.
    """
    if "unsloth" not in sys.modules:
        raise ImportError("volta_fa.enable_unsloth: unsloth is not imported: run `import unsloth` first, because it replaces functions too")
    from . import dispatch, gqa_sdpa, releases, sinks  # here, because every `import volta_fa` runs this file
    from .operands import Devices
    from .stats import prepare_for_tracing

    devices = Devices(frozenset() if force else _qualifying(), force)
    with _lock:
        _restore()
        attention_module, attention = dispatch.check()
        gemma_module, make_gqa_sdpa = gqa_sdpa.check()
        sink_module, flex_attention_with_sink = sinks.check()
        flags = [(releases.module(name), _SOFTCAP_FLAG) for name in _SOFTCAP_MODULES]
        for module, name in flags:
            releases.find(module, name)
        releases.warn_if_untested()
        prepare_for_tracing()

        _replace(attention_module, dispatch.NAME, dispatch.make(attention_module, attention, devices))
        for module, name in flags:
            _replace(module, name, True)
        _replace(gemma_module, gqa_sdpa.NAME, gqa_sdpa.make(make_gqa_sdpa, devices, _enabled))
        if flex_attention_with_sink is not None:  # else gpt-oss runs eager attention of transformers
            _replace(sink_module, sinks.NAME, sinks.make(flex_attention_with_sink, devices, _enabled))


def disable_unsloth() -> None:
    """Undoes `enable_unsloth`, also for loaded models. Load a Gemma 2 that trained in between again."""
    with _lock:
        _restore()


def _replace(module: ModuleType, name: str, value: Any) -> None:
    _replaced.append((module, name, getattr(module, name)))
    setattr(module, name, value)


def _restore() -> None:
    while _replaced:
        module, name, value = _replaced.pop()
        setattr(module, name, value)


def _qualifying() -> frozenset[int]:
    """Returns the CUDA devices with a kernel family of their own. Raises RuntimeError if there is none."""
    found = {index: torch.cuda.get_device_capability(index) for index in range(torch.cuda.device_count())}
    devices = frozenset(index for index, (major, minor) in found.items() if torch.ops.volta_fa._sdpa_serves(10 * major + minor, False))
    if not devices:
        families = ", ".join(family["name"] for family in info()["families"]) or "no family: it was built without kernels"
        cards = (
            "; ".join(f"cuda:{index} is sm_{major}{minor}" for index, (major, minor) in found.items()) or "this machine has no CUDA device"
        )
        raise RuntimeError(f"volta_fa.enable_unsloth: this library has kernels for {families}, and {cards} (force=True uses every device)")
    return devices
