"""`enable_unsloth` replaces the attention functions of unsloth's modules, `disable_unsloth` restores them."""

import sys
import threading
from types import ModuleType
from typing import Any

import torch

from ..devices import Devices, devices_of  # devices_of: those that the user names and that have kernels

_lock = threading.Lock()
#: Module, name, unsloth's function, and volta_fa's.
_replaced: list[tuple[ModuleType, str, Any, Any]] = []
#: The enabled devices; None: off.
_devices: Devices | None = None


def enable_unsloth(device: str | torch.device | int | None = None, *, force: bool = False) -> None:
    """Runs the attention of unsloth's training through volta_fa: call it after `import unsloth` and before from_pretrained.

    Calls without a kernel in volta_fa run unsloth's function; `unsloth_stats()` counts both. A second call replaces the devices of the
    first, also for loaded models.

    Args:
        device: one CUDA device, or "cpu" for tests. Default: all Volta and Turing GPUs.
        force: also use newer GPUs. The kernels are correct there, but slower than unsloth's.

    Raises RuntimeError if no device qualifies, ValueError for a device that does not exist, and ImportError if unsloth is not imported or
    has changed what this replaces: nothing is replaced then, and the last also undoes an earlier call. Warns if the release is untested.
    """
    if "unsloth" not in sys.modules:
        raise ImportError("volta_fa.enable_unsloth: unsloth is not imported: run `import unsloth` first, because it replaces functions too")
    from . import dispatch, gqa_sdpa, releases, sinks  # here, because every `import volta_fa` runs this file
    from .calls import prepare_for_tracing

    global _devices
    devices = devices_of("enable_unsloth", device, force)
    with _lock:
        _restore()
        # each replacement is a module of unsloth, the name of an attribute, and its new value
        found = [replacement for part in (dispatch, gqa_sdpa, sinks) for replacement in part.replacements(lambda: _devices)]
        releases.warn_if_untested()
        prepare_for_tracing()
        for module, name, value in found:
            _replaced.append((module, name, getattr(module, name), value))
            setattr(module, name, value)
        _devices = devices


def disable_unsloth() -> None:
    """Undoes `enable_unsloth`, also for loaded models. Exception: a Gemma 2 that was used while it was enabled must be loaded again. If
    another program has replaced or wrapped volta_fa's functions since then, its functions stay."""
    with _lock:
        _restore()


def _restore() -> None:
    """Switches off, and puts unsloth's functions back where volta_fa's still are. Callers hold `_lock`."""
    global _devices
    _devices = None
    while _replaced:
        module, name, before, ours = _replaced.pop()
        if getattr(module, name) is ours:
            setattr(module, name, before)
