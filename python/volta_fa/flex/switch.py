"""`enable_flex` and `disable_flex`: torch's own `flex_attention` runs on volta_fa.

`torch.nn.attention.flex_attention.flex_attention` is replaced. Programs that imported the function earlier, such as transformers,
and compiled programs reach the operator of FlexAttention in torch, whose kernel `compiled` replaces.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable
from typing import Any

import torch

from ..block_mask import kept
from ..integrations.devices import NO_DEVICES, Devices, devices_of
from . import routing
from .attention import flex_attention
from .routing import original, serves

#: Part of the key of torch.compile's caches on disk while a device is on.
_CACHE_TAG = "volta_fa.flex"

_lock = threading.RLock()
#: What stands in torch's module in place of `routing.replaced`, by name.
_replacements: dict[str, Callable[..., Any]] = {}


def enable_flex(device: str | torch.device | int | None = None, *, force: bool = False) -> None:
    """Runs torch's `flex_attention` through `volta_fa.flex_attention`, eager and compiled, forward and backward.

    transformers' `attn_implementation="flex_attention"` uses it too. Calls without a kernel in volta_fa run torch's own, and the logger
    `volta_fa` gets one line for each reason. torch.compile compiles its programs again. A second call replaces the devices of the
    first.

    Args:
        device: one CUDA device, or "cpu". Default: every CUDA device with a kernel family of its own.
        force: also use CUDA devices that are newer than every family.

    Raises RuntimeError if no device qualifies, ValueError for a device that does not exist.
    """
    _apply(devices_of("enable_flex", device, force))


def disable_flex() -> None:
    """Undoes `enable_flex`. A function that another program put around ours since then stays, and reaches torch's own."""
    _apply(NO_DEVICES)


def _apply(devices: Devices) -> None:
    import torch.nn.attention.flex_attention as module

    from . import compiled  # noqa: F401  replaces the kernel of torch's operator

    with _lock:
        if devices == routing.devices:
            return
        for name, make in (("flex_attention", _flex_attention), ("_validate_device", _validate_device)):
            current = getattr(module, name, None)
            if devices != NO_DEVICES and current is not None and current is original(name):
                routing.replaced[name], _replacements[name] = current, make(current)
                setattr(module, name, _replacements[name])
            elif devices == NO_DEVICES and name in _replacements and current is _replacements[name]:
                setattr(module, name, routing.replaced.pop(name))
                del _replacements[name]
        if devices == NO_DEVICES:
            kept.forget()
        routing.devices = devices
        _forget_compiled_programs(devices != NO_DEVICES)


def _flex_attention(torch_function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(torch_function)
    def replaced(query: Any, *args: Any, **kwargs: Any) -> Any:
        # where dynamo traces, the kernel of torch's operator decides
        ours = not torch.compiler.is_dynamo_compiling() and serves(query.device)
        return (flex_attention if ours else torch_function)(query, *args, **kwargs)

    return replaced


def _validate_device(torch_function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns torch's check without its refusal of gradients on the CPU. `compiled` repeats it where torch's own kernel runs."""

    @functools.wraps(torch_function)
    def replaced(query: Any, key: Any, value: Any) -> None:
        if not (query.device.type == "cpu" and routing.devices.cpu and torch.compiler.is_dynamo_compiling()):
            torch_function(query, key, value)

    return replaced


def _forget_compiled_programs(enabled: bool) -> None:
    """Discards what torch.compile made before the switch changed, because it decides at compile time."""
    from torch.compiler import config

    from .mask_op import INTERFACE

    tags = [tag for tag in config.cache_key_tag.split(",") if tag and not tag.startswith(_CACHE_TAG)]
    config.cache_key_tag = ",".join([*tags, f"{_CACHE_TAG}.{INTERFACE}"] if enabled else tags)
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is not None:
        dynamo.reset_code_caches()
