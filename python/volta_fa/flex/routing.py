"""Where calls of torch's `flex_attention` run: the state of `enable_flex`."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch

from ..integrations.devices import NO_DEVICES

#: Devices whose calls run on volta_fa. `switch` sets it.
devices = NO_DEVICES
#: What `switch` has replaced in torch's module, by name.
replaced: dict[str, Callable[..., Any]] = {}

_logger = logging.getLogger("volta_fa")
_logged: set[str] = set()


def serves(device: torch.device) -> bool:
    """Returns whether torch's function runs on volta_fa for tensors on this device."""
    return device in devices


def original(name: str = "flex_attention") -> Callable[..., Any]:
    """Returns a function of torch's module, its own also while `enable_flex` replaces it."""
    import torch.nn.attention.flex_attention as module

    function: Callable[..., Any] = replaced[name] if name in replaced else getattr(module, name)
    return function


def log_fallback(operation: str) -> None:
    """Logs, once for each operation, that torch's own function runs."""
    if operation not in _logged:
        _logged.add(operation)
        _logger.warning("volta_fa.flex_attention: no kernel for %s: torch's own flex_attention runs", operation)
