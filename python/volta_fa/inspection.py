"""Describes this build and this machine: versions, devices, kernels, tuning. `info` is public (`python -m volta_fa info` prints it). The
native library has the tables of kernels, limits and cache formats, and returns them as JSON (the operator `volta_fa::_info`). A kernel
family is the kernels for one generation of GPUs: volta or turing."""

import functools
import json
import os
import platform
from typing import Any

import torch

from . import diagnostics
from .errors import first_line
from .library import load, loaded_path
from .version import __version__


def info() -> dict[str, Any]:
    """Returns versions, devices, kernel families and kernel variants, as data for JSON.

    Keys:
        versions: of volta_fa, torch, the CUDA that torch was built with (None for a CPU build) and Python.
        library: path of the native library.
        simulator: whether the library can run its kernels in the simulator (`VOLTA_FA_SIMULATE=1`).
        cuda_driver: whether this machine has a CUDA driver.
        devices: for each CUDA device its index, name, compute capability, preferred kernel family (None: the device is unsupported), and
            native: whether it runs that family's machine code (else the driver compiles PTX).
        tuning: for each CUDA device, and for the simulator where it is switched on, its name ("of") and its tuning file: device, driver and
            volta_fa (what the file has to be made on), path, outcome (off, missing, read or ignored; then why), the number of choices, the
            kernels that failed, and overridden: whether the process was given another tuning instead. docs/reference/tuning-file.md has
            more.
        float32: how kernels compute with float32 under PyTorch's present setting: "two fp16 parts" of each number, or "scaled fp16" after
            `torch.set_float32_matmul_precision("high")`.
        problems: mismatches of GPU, driver and torch, each one line with its remedy.
        families: for each kernel family its name, lowest compute capability and number of variants.
        variants: for each compiled kernel its name, family, sm (70 or 75: what it is compiled for), pass (what it computes, as Forward),
            features (those it has code for), required_features (those the problem must use), source (the header that has it), headdims,
            tile sizes, threads, blocks an SM, registers a thread, spilled bytes, shared memory and parameters in bytes.
    """
    build = json.loads(torch.ops.volta_fa._info())
    versions = {"torch": torch.__version__, "cuda": torch.version.cuda, "python": platform.python_version()}
    return {
        "versions": {"volta_fa": __version__, **versions},
        "library": loaded_path(),
        "simulator": build["simulator"],
        "cuda_driver": build["cuda_driver"],
        "devices": [_device(index) for index in range(torch.cuda.device_count())],
        "tuning": _tunings(build["simulator"]),
        "float32": "scaled fp16" if torch.ops.volta_fa._reduces_fp32() else "two fp16 parts",
        "problems": diagnostics.problems(),
        "families": [{name: family[name] for name in ("name", "sm", "variants")} for family in build["families"]],
        "variants": build["variants"],
    }


def limits() -> dict[str, Any]:
    """Returns the limits of the operators, as the native library has them: max_headdim, headdim_multiple, latent_headdims,
    page_size_multiple, max_decode_rows, max_draft_tokens, max_seqlen, max_sequences, max_heads, max_row_stride, max_merged_headdim,
    softcap (smallest and largest)."""
    return dict(_build()["limits"])


def cache_formats() -> list[dict[str, Any]]:
    """Returns the table of KV-cache formats.

    Each row has name, dtype (empty: that of q), bits (of a column), columns (of an element of the cache's tensor), scale ("none", "token"
    or "head": what has one), zero_point (whether there are any), max_code (the largest magnitude of a code), is_quantized, of_latents
    (whether a cache of latents can have it), keys and values. The last two are the formats of keys and of values; where they differ, the
    others describe the keys."""
    return [dict(row) for row in _build()["cache_formats"]]


@functools.cache
def _build() -> dict[str, Any]:
    """Returns the native library's tables, which do not change while a process runs."""
    load()
    return json.loads(torch.ops.volta_fa._info())


def kernel_family(device: torch.device) -> str | None:
    """Returns the name of the kernel family that this device prefers for fp16 and bf16 tensors; None if it runs none.

    If that family has no kernel for a problem, another family of the device may compute it. The CPU has no family, because ATen operations
    compute its tensors."""
    if device.type != "cuda":
        return None
    return families(torch.cuda.get_device_capability(device))[0]["name"]


def families(capability: tuple[int, int]) -> list[dict[str, Any]]:
    """Returns the kernel families that such a device runs with this driver, preferred first: name, and native (machine code, not PTX). If
    there is none, returns one entry whose name is None."""
    found = json.loads(torch.ops.volta_fa._families(*capability)) or [{"name": None, "native": False}]
    return [{**family, "native": family["native"] and diagnostics.loads_machine_code()} for family in found]


def _device(index: int) -> dict[str, Any]:
    """Returns the entry of a CUDA device in `info()["devices"]`."""
    capability = torch.cuda.get_device_capability(index)
    try:
        preferred = families(capability)[0]
    except ValueError as error:  # VOLTA_FA_FAMILY names a family that this device does not run
        preferred = {"name": f"none: {error}", "native": False}
    return {
        "index": index,
        "name": torch.cuda.get_device_name(index),
        "capability": f"{capability[0]}.{capability[1]}",
        "family": preferred["name"],
        "native": preferred["native"],
    }


def _tunings(has_simulator: bool) -> list[dict[str, Any]]:
    """Returns `info()["tuning"]`."""
    devices = [(f"cuda:{index}", index) for index in range(torch.cuda.device_count())]
    if has_simulator and os.environ.get("VOLTA_FA_SIMULATE", "0") not in ("", "0"):
        devices.append(("simulator", -1))  # its device number in `_tuning`
    return [{"of": name, **_tuning(index)} for name, index in devices]


def _tuning(index: int) -> dict[str, Any]:
    """Returns the entry of `info()["tuning"]` for a device number, without "of"."""
    try:
        return json.loads(torch.ops.volta_fa._tuning(index))
    except RuntimeError as error:  # the library finds no driver
        return {"outcome": "unknown", "why": first_line(error)}
