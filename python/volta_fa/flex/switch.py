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

from ..integrations.devices import NO_DEVICES, Devices, devices_of

#: Part of the key of torch.compile's caches on disk while a device is on.
_CACHE_TAG = "volta_fa.flex"

_lock = threading.RLock()
_active = NO_DEVICES
_original: Callable[..., Any] | None = None
_replaced: Callable[..., Any] | None = None


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


def serves(device: torch.device) -> bool:
    """Returns whether torch's function runs on volta_fa for tensors on this device."""
    return device in _active


def original() -> Callable[..., Any]:
    """Returns torch's own function."""
    if _original is not None:
        return _original
    from torch.nn.attention.flex_attention import flex_attention

    return flex_attention


def _apply(devices: Devices) -> None:
    global _active, _original, _replaced
    import torch.nn.attention.flex_attention as module

    from . import compiled  # noqa: F401  replaces the kernel of torch's operator

    with _lock:
        if devices == _active:
            return
        if devices != NO_DEVICES and module.flex_attention is original():
            _original = module.flex_attention
            _replaced = _replacement(_original)
            module.flex_attention = _replaced
        elif devices == NO_DEVICES and module.flex_attention is _replaced:
            module.flex_attention = original()
            _original = _replaced = None
        _active = devices
        _forget_compiled_programs(devices != NO_DEVICES)


def _replacement(torch_function: Callable[..., Any]) -> Callable[..., Any]:
    from .attention import flex_attention

    @functools.wraps(torch_function)
    def replaced(query: Any, *args: Any, **kwargs: Any) -> Any:
        # where dynamo traces, the kernel of torch's operator decides
        ours = not torch.compiler.is_dynamo_compiling() and serves(query.device)
        return (flex_attention if ours else torch_function)(query, *args, **kwargs)

    return replaced


def _forget_compiled_programs(enabled: bool) -> None:
    """Discards what torch.compile made before the switch changed, because it decides at compile time."""
    from torch.compiler import config

    tags = [tag for tag in config.cache_key_tag.split(",") if tag and tag != _CACHE_TAG]
    config.cache_key_tag = ",".join([*tags, _CACHE_TAG] if enabled else tags)
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is not None:
        dynamo.reset_code_caches()
