"""PyTorch's `scaled_dot_product_attention` on volta_fa, for every supported release of torch.

`enable_sdpa()` and `disable_sdpa()` switch it for the process, `sdpa_enabled()` for a block, VOLTA_FA_ENABLE_SDPA when the library is
loaded. A device is on while the switch or an open block names it.

The native library registers another kernel for the op. No Python name is replaced, so TorchScript programs, torch.nn's layers,
C++ code and modules that imported the function earlier use it too. Calls without a kernel in volta_fa run the implementation that
PyTorch would have chosen; `sdpa_stats()` counts them by reason, and docs/guides/sdpa.md explains the reasons.
"""

from __future__ import annotations

import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ..diagnostics import cuda_problem
from ..errors import bad_argument
from .devices import NO_DEVICES, Devices, devices_of

#: Part of the key of torch.compile's caches on disk while a device is on. They identify a graph by its Python code, which does not
#: show the switch.
_CACHE_TAG = "volta_fa.sdpa"
_FAST_TAG = "volta_fa.sdpa.fast"


_lock = threading.RLock()
_switch = NO_DEVICES  # the devices of enable_sdpa
_blocks: list[Devices] = []  # the devices of open `with` blocks
_active = NO_DEVICES
_switch_precision = "exact"
_block_precisions: list[str] = []  # of `_blocks`
_active_precision = "exact"


def enable_sdpa(device: str | torch.device | int | None = None, *, force: bool = False, precision: str = "exact") -> None:
    """Run `torch.nn.functional.scaled_dot_product_attention` through volta_fa, forward and backward.

    Calls without a kernel in volta_fa run the implementation that PyTorch would have chosen; `sdpa_stats()` counts both. A second
    call replaces the devices of the first, with a warning. torch.compile compiles its programs again.

    Args:
        device: one CUDA device, or "cpu", to test the routing without a GPU. Default: every CUDA device with a kernel family of its own.
        force: also use CUDA devices that are newer than every family. The kernels are correct there, but slower than PyTorch's.
        precision: "fast" runs `volta_fa::fwd_fast`, with an error of about 1%, for fp16 and bf16 calls that need no gradient and have no
            added mask and no dropout. Other calls, and all with "exact", run `volta_fa::fwd`.

    Raises RuntimeError if no device qualifies, ValueError for a device that does not exist.
    """
    request = devices_of("enable_sdpa", device, force)
    _check_precision("enable_sdpa", precision)
    with _lock:
        before = _switch
        unchanged = (before, _switch_precision) == (request, precision)
        _apply(request, _blocks, precision, _block_precisions)
        if unchanged:
            warnings.warn("volta_fa.enable_sdpa: it is enabled already: nothing changed", stacklevel=2)
        elif before not in (NO_DEVICES, request):
            warnings.warn("volta_fa.enable_sdpa: it was enabled for other devices, which this call replaces", stacklevel=2)


def disable_sdpa() -> None:
    """Undoes `enable_sdpa`. Open `sdpa_enabled` blocks stay on."""
    with _lock:
        _apply(NO_DEVICES, _blocks, "exact", _block_precisions)


@contextmanager
def sdpa_enabled(device: str | torch.device | int | None = None, *, force: bool = False, precision: str = "exact") -> Iterator[None]:
    """Enables devices, as `enable_sdpa` does, for a `with` block, in all threads. Blocks may nest and overlap.

    The precision of the block that was opened last serves all enabled devices.
    """
    request = devices_of("sdpa_enabled", device, force)
    _check_precision("sdpa_enabled", precision)
    with _lock:
        _apply(_switch, [*_blocks, request], _switch_precision, [*_block_precisions, precision])
    try:
        yield
    finally:
        with _lock:
            others = list(zip(_blocks, _block_precisions))
            others.remove((request, precision))
            _apply(_switch, [b for b, _ in others], _switch_precision, [p for _, p in others])


def sdpa_stats(reset: bool = False) -> dict[str, Any]:
    """Returns the number of calls of scaled_dot_product_attention on enabled devices, since the start or a reset.

    Keys:
        ran: calls that volta_fa ran.
        traced: calls that torch.compile or another tracer recorded as volta_fa's. Runs of the compiled program are not counted.
        fast: of these two, the calls of `volta_fa::fwd_fast`. The key is there if there were any.
        fell_back: calls that PyTorch's implementation ran, by reason; docs/guides/sdpa.md explains the reasons.

    Args:
        reset: set all counts to 0 afterwards.
    """
    counts = dict(torch.ops.volta_fa._sdpa_stats())
    if reset:
        torch.ops.volta_fa._sdpa_reset_stats()
    ran, traced, fast = counts.pop("ran"), counts.pop("traced"), counts.pop("fast")
    found: dict[str, Any] = {"ran": ran, "traced": traced} | ({"fast": fast} if fast else {})
    return found | {"fell_back": {reason: n for reason, n in sorted(counts.items()) if n}}


def _check_precision(op: str, precision: str) -> None:
    if precision not in ("exact", "fast"):
        raise bad_argument("precision", repr(precision), "'exact' or 'fast'", op=op)


def _apply(switch: Devices, blocks: list[Devices], switch_precision: str, block_precisions: list[str]) -> None:
    """Configures the library, and then stores the requests: after an error of the library nothing has changed."""
    global _switch, _blocks, _active, _switch_precision, _block_precisions, _active_precision
    wanted = switch
    for request in blocks:
        wanted |= request
    precision = [switch_precision, *block_precisions][-1]
    changes = (wanted, precision) != (_active, _active_precision)
    if changes:
        torch.ops.volta_fa._sdpa_configure(wanted.cpu, sorted(wanted.cuda), wanted.on_first_use, precision == "fast")
    _switch, _blocks, _switch_precision, _block_precisions = switch, blocks, switch_precision, block_precisions
    if changes:
        _active, _active_precision = wanted, precision
        _forget_compiled_programs(wanted != NO_DEVICES)


def _forget_compiled_programs(enabled: bool) -> None:
    """Discards what torch.compile made before the switch changed, because it decides at compile time."""
    from torch.compiler import config

    tags = [tag for tag in config.cache_key_tag.split(",") if tag and tag not in (_CACHE_TAG, _FAST_TAG)]
    ours = _FAST_TAG if _active_precision == "fast" else _CACHE_TAG
    config.cache_key_tag = ",".join([*tags, ours] if enabled else tags)
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is not None:
        dynamo.reset_code_caches()


def _read_library_state() -> None:
    """Reads the state that the library took from VOLTA_FA_ENABLE_SDPA when it was loaded."""
    global _switch, _active
    cpu, on_first_use = torch.ops.volta_fa._sdpa_from_environment()
    _switch = _active = Devices(cpu, frozenset(), on_first_use)
    if _active != NO_DEVICES:
        _forget_compiled_programs(enabled=True)
    problem = cuda_problem() if on_first_use else None
    if problem:
        warnings.warn(f"VOLTA_FA_ENABLE_SDPA: no GPU runs it: {problem}", RuntimeWarning, stacklevel=3)
