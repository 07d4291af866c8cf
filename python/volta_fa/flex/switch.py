"""`enable_flex` and `disable_flex`: make torch's own `flex_attention` run on volta_fa, or no longer. `enable_flex` replaces the function in
torch.nn.attention.flex_attention. Compiled programs, and programs that imported the function before, such as transformers, reach torch's
higher-order operator `flex_attention`; `compiled` replaces that operator's kernel."""

import functools
import threading
from collections.abc import Callable
from typing import Any

import torch

from ..block_mask import kept  # a cache of packed masks
from ..integrations.devices import NO_DEVICES, Devices, devices_of, forget_compiled_programs  # last: torch.compile compiles again
from . import attention
from .attention import flex_attention, original  # original: torch's own function of a name

_lock = threading.RLock()
#: Functions that `_apply` has put into torch's module in place of those in `attention.replaced`, by name.
_replacements: dict[str, Callable[..., Any]] = {}


def enable_flex(device: str | torch.device | int | None = None, *, force: bool = False) -> None:
    """Runs torch's `flex_attention` through `volta_fa.flex_attention`, eager and compiled, forward and backward.

    transformers' `attn_implementation="flex_attention"` uses it too. Calls without a kernel in volta_fa run torch's own, and the logger
    `volta_fa` gets one line for each reason. torch.compile compiles its programs again. A second call replaces the devices of the
    first.

    Args:
        device: one CUDA device, or "cpu". Default: all Volta and Turing GPUs.
        force: also use newer GPUs.

    Raises RuntimeError if no device qualifies, ValueError for a device that does not exist.
    """
    _apply(devices_of("enable_flex", device, force))


def disable_flex() -> None:
    """Undoes `enable_flex`. If another program has wrapped the function since then, its wrapper stays and reaches torch's own."""
    _apply(NO_DEVICES)


def _apply(devices: Devices) -> None:
    """Replaces torch's functions for these devices, or restores them for NO_DEVICES."""
    import torch.nn.attention.flex_attention as module

    from .compiled import INTERFACE  # a hash of the operators' signatures; the import also replaces the kernel of torch's operator

    with _lock:
        if devices == attention.devices:
            return
        for name, make in (("flex_attention", _flex_attention), ("_validate_device", _validate_device)):
            current = getattr(module, name, None)
            if devices != NO_DEVICES and current is not None and current is original(name):
                attention.replaced[name], _replacements[name] = current, make(current)
                setattr(module, name, _replacements[name])
            elif devices == NO_DEVICES and name in _replacements and current is _replacements[name]:
                setattr(module, name, attention.replaced.pop(name))
                del _replacements[name]
        if devices == NO_DEVICES:
            kept.forget()
        attention.devices = devices
        forget_compiled_programs("volta_fa.flex", INTERFACE if devices != NO_DEVICES else "")


def _flex_attention(torch_function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `volta_fa.flex_attention` for the devices that are on, and torch's own function for others."""

    @functools.wraps(torch_function)
    def choose(query: Any, *args: Any, **kwargs: Any) -> Any:
        # while dynamo traces, torch's function makes a call of its operator, whose replaced kernel decides
        ours = not torch.compiler.is_dynamo_compiling() and query.device in attention.devices
        return (flex_attention if ours else torch_function)(query, *args, **kwargs)

    return choose


def _validate_device(torch_function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns torch's check of devices, which rejects gradients on the CPU, without effect while tracing for a CPU that is on. `compiled`
    makes torch's check after all if torch's own kernel then runs."""

    @functools.wraps(torch_function)
    def validate(query: Any, key: Any, value: Any) -> None:
        if not (query.device.type == "cpu" and attention.devices.cpu and torch.compiler.is_dynamo_compiling()):
            torch_function(query, key, value)

    return validate
