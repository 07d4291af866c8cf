"""Running PyTorch's own `scaled_dot_product_attention` through volta_fa.

The switch is one for the process: `enable_sdpa` and each open `sdpa_enabled` block ask for devices, and a device is
on while anybody asks for it. Nothing in Python's namespaces is replaced: the op itself gets another kernel, so
modules that imported the function long ago, TorchScript programs, torch.nn's layers and C++ code are all reached.
"""

from __future__ import annotations

import sys
import threading
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import bad_argument
from ..inspection import info

#: In the key of torch.compile's caches on disk while something is enabled: they know a graph by its Python code,
#: which is the same whether we are switched on or not.
_CACHE_TAG = "volta_fa.sdpa"


@dataclass(frozen=True)
class _Request:
    """Devices that somebody wants volta_fa for."""

    cpu: bool
    cuda: frozenset[int]
    #: VOLTA_FA_ENABLE_SDPA's "1" or "force": CUDA devices that the library decides on when it first meets each
    on_first_use: str = ""

    def __or__(self, other: _Request) -> _Request:
        return _Request(self.cpu or other.cpu, self.cuda | other.cuda, self.on_first_use or other.on_first_use)


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

    Args:
        device: one CUDA device, or "cpu" (to try and test the routing without a GPU; it is no faster than PyTorch's own).
            Default: every CUDA device that a kernel family is made for.
        force: also use CUDA devices that are newer than every family, where the kernels are correct but slower than
            PyTorch's own.

    Raises RuntimeError where no device qualifies, ValueError for a device that does not exist.
    """
    request = _request(device, force)
    with _lock:
        before = _switch
        _apply(request, _blocks)
        if before == request:
            warnings.warn("volta_fa.enable_sdpa: it is enabled already: nothing changed", stacklevel=2)
        elif before != _NOTHING:
            warnings.warn("volta_fa.enable_sdpa: it was enabled for other devices, which this call replaces", stacklevel=2)


def disable_sdpa() -> None:
    """Undo `enable_sdpa`; without effect if nothing is enabled, and on `sdpa_enabled` blocks that are open."""
    with _lock:
        _apply(_NOTHING, _blocks)


@contextmanager
def sdpa_enabled(device: str | torch.device | int | None = None, *, force: bool = False) -> Iterator[None]:
    """`enable_sdpa` for the length of a `with` block, in all threads; blocks nest and overlap freely."""
    request = _request(device, force)
    with _lock:
        _apply(_switch, [*_blocks, request])
    try:
        yield
    finally:
        with _lock:
            others = list(_blocks)
            others.remove(request)
            _apply(_switch, others)


def sdpa_stats(reset: bool = False) -> dict[str, Any]:
    """What became of the calls of scaled_dot_product_attention on enabled devices, since the start or a reset.

    Keys:
        ran: calls that volta_fa ran.
        traced: calls that torch.compile or another tracer recorded as volta_fa's. What it compiled then runs
            without asking again, and is not counted.
        fell_back: calls that went to PyTorch's implementation, counted by reason; docs/guides/sdpa.md explains them.
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
        raise bad_argument("device", device, "a CUDA device, or cpu for tests", op="enable_sdpa")
    count = torch.cuda.device_count()
    if device.index is not None and device.index >= count:
        raise bad_argument("device", device, f"one of this machine's {count} CUDA devices", op="enable_sdpa")
    return _Request(False, frozenset(_usable(range(count) if device.index is None else [device.index], force)))


def _usable(indices: Iterable[int], force: bool) -> list[int]:
    """Those of the CUDA devices that qualify; raises RuntimeError if none does."""
    usable, refused = [], []
    for index in indices:
        major, minor = torch.cuda.get_device_capability(index)
        sm = 10 * major + minor
        if torch.ops.volta_fa._sdpa_serves(sm, force):
            usable.append(index)
        else:
            refused.append(f"cuda:{index} is a {torch.cuda.get_device_name(index)}, sm_{sm}")
    if not usable:
        names = ", ".join(family["name"] for family in info()["families"]) or "no family: it was built without kernels"
        found = "; ".join(refused) or "this machine has no CUDA device"
        hint = " (force=True uses newer devices too)" if refused and not force else ' (device="cpu" tries the routing without a GPU)'
        raise RuntimeError(f"volta_fa.enable_sdpa: this library has kernels for {names}, and {found}{hint}")
    return usable


def _apply(switch: _Request, blocks: list[_Request]) -> None:
    """Make what is asked for effective, and then remember it: what the library refuses changes nothing."""
    global _switch, _blocks, _active
    wanted = switch
    for request in blocks:
        wanted |= request
    if wanted != _active:
        torch.ops.volta_fa._sdpa_configure(wanted.cpu, sorted(wanted.cuda), wanted.on_first_use)
    _switch, _blocks = switch, blocks
    if wanted != _active:
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


def _follow_the_library() -> None:
    """Where VOLTA_FA_ENABLE_SDPA is set, the library has switched on by itself, as it does without this package."""
    global _switch, _active
    cpu, on_first_use = torch.ops.volta_fa._sdpa_from_environment()
    _switch = _active = _Request(cpu, frozenset(), on_first_use)
    if _active != _NOTHING:
        _forget_compiled_programs(enabled=True)
