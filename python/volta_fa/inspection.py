"""What this build contains and what this machine has."""

from __future__ import annotations

import json
import platform
from typing import Any

import torch

from .library import library_path
from .version import __version__


def info() -> dict[str, Any]:
    """Versions, devices, kernel families and kernel variants, as plain data.

    Keys:
        versions: of volta_fa, torch, the CUDA that torch was built with (None for a CPU build) and Python.
        library: path of the native library.
        simulator: whether the library can run its kernels in the simulator (`VOLTA_FA_SIMULATE=1`).
        cuda_driver: whether this machine has a CUDA driver.
        devices: for each CUDA device its name, compute capability and kernel family (None: unsupported).
        families: for each kernel family its name, lowest compute capability and number of variants.
        variants: for each compiled kernel its name, family, sm, pass, flavor (what it is prepared for), source, headdims, tile
            sizes, threads, blocks an SM, registers a thread, spilled bytes, shared memory and parameters in bytes.
    """
    build = json.loads(torch.ops.volta_fa._info())
    families = _families(build["variants"])
    return {
        "versions": {
            "volta_fa": __version__,
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "python": platform.python_version(),
        },
        "library": str(library_path()),
        "simulator": build["simulator"],
        "cuda_driver": build["cuda_driver"],
        "devices": _devices(families),
        "families": families,
        "variants": build["variants"],
    }


def kernel_family(device: torch.device) -> str | None:
    """Name of the kernel family that runs fp16 and bf16 tensors of this device (on a newer GPU: through PTX); None where there is none.

    CPU tensors are computed by ATen operations, so the CPU has no family.
    """
    if device.type != "cuda":
        return None
    return _family_of(_families(json.loads(torch.ops.volta_fa._info())["variants"]), torch.cuda.get_device_capability(device))


def _families(variants: list[dict[str, Any]]) -> list[dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for variant in variants:
        family = found.setdefault(variant["family"], {"name": variant["family"], "sm": variant["sm"], "variants": 0})
        family["variants"] += 1
    return sorted(found.values(), key=lambda family: family["sm"])


def _family_of(families: list[dict[str, Any]], capability: tuple[int, int]) -> str | None:
    """The newest family that the device can run: its own, or an older one's through PTX."""
    major, minor = capability
    runnable = [family["name"] for family in families if family["sm"] <= 10 * major + minor]
    return runnable[-1] if runnable else None


def _devices(families: list[dict[str, Any]]) -> list[dict[str, Any]]:
    devices = []
    for index in range(torch.cuda.device_count()):
        capability = torch.cuda.get_device_capability(index)
        devices.append(
            {
                "index": index,
                "name": torch.cuda.get_device_name(index),
                "capability": f"{capability[0]}.{capability[1]}",
                "family": _family_of(families, capability),
            }
        )
    return devices
