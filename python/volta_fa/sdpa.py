"""Running PyTorch's own `scaled_dot_product_attention` through volta_fa.

The switch is one for the process: `enable_sdpa` and each open `sdpa_enabled` block ask for devices, and a device is
on while anybody asks for it. Nothing in Python's namespaces is replaced: the op itself gets another kernel, so
modules that imported the function long ago, TorchScript programs, torch.nn's layers and C++ code are all reached.
"""

from __future__ import annotations

import os
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from .inspection import info

_VARIABLE = "VOLTA_FA_ENABLE_SDPA"
#: In the key of torch.compile's caches on disk while something is enabled: they know a graph by its Python code,
#: which is the same whether we are switched on or not.
_CACHE_TAG = "volta_fa.sdpa"


@dataclass(frozen=True)
class _Request:
    """Devices that somebody wants volta_fa for."""

    cpu: bool
    cuda: frozenset[int]

    def __or__(self, other: _Request) -> _Request:
        return _Request(self.cpu or other.cpu, self.cuda | other.cuda)


_NOTHING = _Request(False, frozenset())

_lock = threading.RLock()
_switch = _NOTHING  # what enable_sdpa asked for
_blocks: list[_Request] = []  # what open `with` blocks ask for
_active = _NOTHING


def enable_sdpa(device: str | torch.device | int | None = None, *, force: bool = False) -> None:
    """Run `torch.nn.functional.scaled_dot_product_attention` through volta_fa, forward and backward.

    Calls that volta_fa cannot serve go to the implementation that PyTorch would have chosen; `sdpa_stats()` counts
    both. Enabling again replaces the devices of the first time, with a warning. Programs that torch.compile compiled
    before are compiled again.

    device: one CUDA device, or "cpu" (to try and test the routing without a GPU; it is no faster than PyTorch's own).
        Default: every CUDA device that a kernel family is made for.
    force: also use CUDA devices that are newer than every family, where the kernels are correct but slower than
        PyTorch's own.

    Raises RuntimeError where no device qualifies, ValueError for a device that does not exist.
    """
    global _switch
    request = _request(device, force)
    with _lock:
        if _switch == request:
            warnings.warn("volta_fa.enable_sdpa: it is enabled already: nothing changed", stacklevel=2)
        elif _switch != _NOTHING:
            warnings.warn("volta_fa.enable_sdpa: it was enabled for other devices, which this call replaces", stacklevel=2)
        _switch = request
        _apply()


def disable_sdpa() -> None:
    """Undo `enable_sdpa`; without effect if nothing is enabled, and on `sdpa_enabled` blocks that are open."""
    global _switch
    with _lock:
        _switch = _NOTHING
        _apply()


@contextmanager
def sdpa_enabled(device: str | torch.device | int | None = None, *, force: bool = False) -> Iterator[None]:
    """`enable_sdpa` for the length of a `with` block, in all threads; blocks nest and overlap freely."""
    request = _request(device, force)
    with _lock:
        _blocks.append(request)
        _apply()
    try:
        yield
    finally:
        with _lock:
            _blocks.remove(request)
            _apply()


def sdpa_stats(reset: bool = False) -> dict[str, Any]:
    """What became of the calls of scaled_dot_product_attention on enabled devices, since the start or a reset.

    Keys:
        ran: calls that volta_fa ran.
        traced: calls that torch.compile or another tracer recorded as volta_fa's. What it compiled then runs
            without asking again, and is not counted.
        fell_back: calls that went to PyTorch's implementation, counted by reason; docs/sdpa.md explains them.
    """
    counts = dict(torch.ops.volta_fa._sdpa_stats())
    if reset:
        torch.ops.volta_fa._sdpa_reset_stats()
    ran, traced = counts.pop("ran"), counts.pop("traced")
    return {"ran": ran, "traced": traced, "fell_back": {reason: n for reason, n in sorted(counts.items()) if n}}


def _request(device: str | torch.device | int | None, force: bool) -> _Request:
    if device is None:
        return _Request(False, frozenset(_usable(range(torch.cuda.device_count()), force)))
    device = torch.device(device)
    if device.type == "cpu":
        return _Request(True, frozenset())
    if device.type != "cuda":
        raise ValueError(f"volta_fa.enable_sdpa: device: got {device}, expected a CUDA device, or cpu for tests")
    count = torch.cuda.device_count()
    if device.index is not None and device.index >= count:
        raise ValueError(f"volta_fa.enable_sdpa: device: got {device}, and this machine has {count} CUDA devices")
    return _Request(False, frozenset(_usable(range(count) if device.index is None else [device.index], force)))


def _usable(indices, force: bool) -> list[int]:
    """Those of the CUDA devices that qualify; raises RuntimeError if none does."""
    families = {family["sm"]: family["name"] for family in info()["families"]}
    oldest = min(families, default=None)
    usable, refused = [], []
    for index in indices:
        major, minor = torch.cuda.get_device_capability(index)
        sm = 10 * major + minor
        if _family_made_for(sm, families) or (force and oldest is not None and sm >= oldest):
            usable.append(index)
        else:
            refused.append(f"cuda:{index} is a {torch.cuda.get_device_name(index)}, sm_{sm}")
    if not usable:
        names = ", ".join(families.values()) or "no family: it was built without kernels"
        found = "; ".join(refused) or "this machine has no CUDA device"
        hint = " (force=True uses newer devices too)" if refused and not force else ' (device="cpu" tries the routing without a GPU)'
        raise RuntimeError(f"volta_fa.enable_sdpa: this library has kernels for {names}, and {found}{hint}")
    return usable


def _family_made_for(sm: int, families: dict[int, str]) -> bool:
    """sm_72 runs sm_70's machine code as it is and just as well; sm_75 has other tensor cores."""
    return sm in families or (sm == 72 and 70 in families)


def _apply() -> None:
    """Make what is asked for effective."""
    global _active
    wanted = _switch
    for request in _blocks:
        wanted |= request
    if wanted == _active:
        return
    torch.ops.volta_fa._sdpa_configure(wanted.cpu, sorted(wanted.cuda))
    _active = wanted
    _forget_compiled_programs(wanted != _NOTHING)


def _forget_compiled_programs(enabled: bool) -> None:
    """torch.compile decides once, when it compiles: what it compiled with the switch in another position is stale."""
    from torch.compiler import config

    tags = [tag for tag in config.cache_key_tag.split(",") if tag and tag != _CACHE_TAG]
    config.cache_key_tag = ",".join([*tags, _CACHE_TAG] if enabled else tags)
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is not None:
        dynamo.reset_code_caches()


def _enable_from_environment() -> None:
    """VOLTA_FA_ENABLE_SDPA at import. It must not start CUDA, which would make fork impossible, nor fail."""
    value = os.environ.get(_VARIABLE, "").strip().lower()
    if value in ("", "0"):
        return
    if value == "cpu":
        enable_sdpa("cpu")
    elif value not in ("1", "force"):
        warnings.warn(f"{_VARIABLE}: got {value!r}, expected 1, force, cpu or 0: nothing is enabled", stacklevel=2)
    elif not torch.cuda.is_available():
        warnings.warn(f"{_VARIABLE}={value}: this machine has no CUDA device: nothing is enabled", stacklevel=2)
    else:
        torch.cuda._lazy_call(lambda: _enable_or_warn(force=value == "force"))


def _enable_or_warn(force: bool) -> None:
    try:
        enable_sdpa(force=force)
    except RuntimeError as error:
        warnings.warn(f"{_VARIABLE}: nothing is enabled: {error}", stacklevel=2)
