"""PyTorch's `scaled_dot_product_attention` on volta_fa, for every supported release of torch.

`enable_sdpa()` and `disable_sdpa()` switch it for the process, `sdpa_enabled()` for a `with` block, and VOLTA_FA_ENABLE_SDPA when the
library is loaded. A device is on while the switch or an open block names it.

The native library registers another kernel for that operator. No Python name is replaced, so TorchScript programs, torch.nn's layers,
C++ code and modules that imported the function earlier use it too. Calls without a kernel in volta_fa run the implementation that
PyTorch would have chosen; `sdpa_stats()` counts them by reason, and docs/guides/sdpa.md explains the reasons."""

import hashlib
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from ..diagnostics import cuda_problem  # why torch can use no GPU, or None
from ..errors import bad_argument

# Devices: cpu (bool), cuda (device numbers), and on_first_use: "1" or "force" if the library decides about each CUDA device when it first
# sees it, else "". devices_of: those that the user names and that have kernels.
from .devices import NO_DEVICES, Devices, devices_of, forget_compiled_programs


@dataclass(frozen=True)
class Request:
    """What `enable_sdpa` or an `sdpa_enabled` block asks for."""

    devices: Devices
    precision: str = "exact"  # or "fast", as of `enable_sdpa`


OFF = Request(NO_DEVICES)
_lock = threading.RLock()
#: The request of `enable_sdpa`, or OFF; then those of open `with` blocks. Blocks are removed by identity: equal ones may overlap.
_requests: tuple[Request, ...] = (OFF,)


def active(requests: Sequence[Request] | None = None) -> Request:
    """Returns the request in effect: the devices of all requests, and the precision of the last."""
    requests = _requests if requests is None else requests
    devices = NO_DEVICES
    for request in requests:
        devices |= request.devices
    return Request(devices, requests[-1].precision)


def enable_sdpa(device: str | torch.device | int | None = None, *, force: bool = False, precision: str = "exact") -> None:
    """Run `torch.nn.functional.scaled_dot_product_attention` through volta_fa, forward and backward.

    Calls without a kernel in volta_fa run the implementation that PyTorch would have chosen; `sdpa_stats()` counts both. A second
    call replaces the devices of the first, with a warning. torch.compile compiles its programs again.

    Args:
        device: one CUDA device, or "cpu", to test the routing without a GPU. Default: all Volta and Turing GPUs.
        force: also use newer GPUs. The kernels are correct there, but slower than PyTorch's.
        precision: "fast" runs `volta_fa::fwd_fast`, with an error of about 1%, for fp16 and bf16 calls that need no gradient and have no
            added mask and no dropout. Other calls, and all with "exact", run `volta_fa::fwd`.

    Raises RuntimeError if no device qualifies, ValueError for a device that does not exist or another precision.
    """
    request = _request("enable_sdpa", device, force, precision)
    with _lock:
        before, *blocks = _requests
        _apply(request, *blocks)
        if before == request:
            warnings.warn("volta_fa.enable_sdpa: it is enabled already: nothing changed", stacklevel=2)
        elif before.devices not in (NO_DEVICES, request.devices):
            warnings.warn("volta_fa.enable_sdpa: it was enabled for other devices, which this call replaces", stacklevel=2)


def disable_sdpa() -> None:
    """Undoes `enable_sdpa`. Open `sdpa_enabled` blocks stay on."""
    with _lock:
        _apply(OFF, *_requests[1:])


@contextmanager
def sdpa_enabled(device: str | torch.device | int | None = None, *, force: bool = False, precision: str = "exact") -> Iterator[None]:
    """Enables devices, as `enable_sdpa` does, for a `with` block, in all threads. Blocks may nest and overlap.
    The precision of the block that was opened last serves all enabled devices. Arguments and errors are those of `enable_sdpa`."""
    request = _request("sdpa_enabled", device, force, precision)
    with _lock:
        _apply(*_requests, request)
    try:
        yield
    finally:
        with _lock:
            _apply(*(other for other in _requests if other is not request))


def sdpa_stats(reset: bool = False) -> dict[str, Any]:
    """Returns the number of calls of scaled_dot_product_attention on enabled devices, since the start or a reset.
    `reset`: set all counts to 0 afterwards.

    Keys:
        ran: calls that volta_fa ran.
        traced: calls that torch.compile or another tracer recorded as volta_fa's. Runs of the compiled program are not counted.
        fast: of these two, the calls of `volta_fa::fwd_fast`. The key is there if there were any.
        fell_back: calls that PyTorch's implementation ran, by reason; docs/guides/sdpa.md explains the reasons.
    """
    counts = dict(torch.ops.volta_fa._sdpa_stats())
    if reset:
        torch.ops.volta_fa._sdpa_reset_stats()
    ran, traced, fast = counts.pop("ran"), counts.pop("traced"), counts.pop("fast")
    found: dict[str, Any] = {"ran": ran, "traced": traced} | ({"fast": fast} if fast else {})
    return found | {"fell_back": {reason: n for reason, n in sorted(counts.items()) if n}}


def _request(op: str, device: str | torch.device | int | None, force: bool, precision: str) -> Request:
    """Returns the Request of the public function `op`, after checking its arguments."""
    if precision not in ("exact", "fast"):
        raise bad_argument("precision", repr(precision), "'exact' or 'fast'", op=op)
    return Request(devices_of(op, device, force), precision)


def _apply(*requests: Request) -> None:
    """Configures the library for these requests, and then stores them, so that an error of the library changes nothing."""
    global _requests
    wanted = active(requests)
    changes = wanted != active()
    if changes:
        devices = wanted.devices
        torch.ops.volta_fa._sdpa_configure(devices.cpu, sorted(devices.cuda), devices.on_first_use, wanted.precision == "fast")
    _requests = requests
    if changes:
        _forget_compiled_programs(wanted)


def _forget_compiled_programs(request: Request) -> None:
    """Makes torch.compile forget its programs. Its caches on disk identify a graph by its Python code, which does not show the switch.
    So their keys get a hash of what compiled programs hold: the devices, the precision and the operators' schemas."""
    devices, tag = request.devices, ""
    if devices != NO_DEVICES:
        schemas = [op.default._schema for op in (torch.ops.volta_fa.fwd, torch.ops.volta_fa.fwd_fast)]
        shown = (devices.cpu, sorted(devices.cuda), devices.on_first_use, request.precision)
        tag = hashlib.sha256(f"{shown}{schemas}".encode()).hexdigest()
    forget_compiled_programs("volta_fa.sdpa", tag)


def _read_library_state() -> None:
    """Stores the request that the native library read from VOLTA_FA_ENABLE_SDPA when it was loaded. `import volta_fa` calls it once."""
    global _requests
    cpu, on_first_use = torch.ops.volta_fa._sdpa_from_environment()
    _requests = (Request(Devices(cpu, frozenset(), on_first_use)),)
    if active() != OFF:
        _forget_compiled_programs(active())
    problem = cuda_problem() if on_first_use else None
    if problem:
        warnings.warn(f"VOLTA_FA_ENABLE_SDPA: no GPU runs it: {problem}", RuntimeWarning, stacklevel=3)
