"""Describes this machine for the report of a check: driver, GPU, clocks, torch and its architectures, and the library. The description has
no host name, user name or serial number, because users send the report."""

from __future__ import annotations

import csv
import datetime
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch

from .. import diagnostics  # problems(): mismatches of GPU, driver and torch; torch_for_volta(): the pip command for a torch that fits
from ..errors import first_line
from ..inspection import info
from .kernels import Target  # the device: a GPU, the simulator or the CPU

#: nvidia-smi's fields, and their names in the report. Units are MHz, W, degrees Celsius and percent.
_FIELDS = {
    "driver_version": "driver",
    "vbios_version": "vbios",
    "clocks.sm": "sm_clock_mhz",
    "clocks.max.sm": "sm_clock_max_mhz",
    "clocks.mem": "memory_clock_mhz",
    "clocks.max.mem": "memory_clock_max_mhz",
    "power.draw": "power_draw_w",
    "power.limit": "power_limit_w",
    "power.max_limit": "power_limit_max_w",
    "temperature.gpu": "temperature_c",
    "utilization.gpu": "utilization_percent",
    "ecc.mode.current": "ecc",
    "mig.mode.current": "mig",
    "clocks_throttle_reasons.active": "throttle_reasons",
}


def describe(target: Target) -> dict[str, Any]:
    """Returns the machine's description as data for JSON."""
    build = info()
    facts: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "target": target.kind,
        "versions": build["versions"],
        "library": _without_home(build["library"]),
        "torch_architectures": torch.cuda.get_arch_list(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}, {' '.join(platform.libc_ver())}",
        "families": target.families,  # the kernel families that it runs, preferred first
        # the tuning file of each device, without its path, which may contain the user's name
        "tuning": [{name: value for name, value in tuning.items() if name != "path"} for tuning in build["tuning"]],
    }
    if target.kind == "cpu" and torch.cuda.device_count() == 0:
        facts["no_gpu"] = _why_no_gpu()
    if target.kind == "cuda":
        properties = torch.cuda.get_device_properties(target.device)
        facts["card"] = {
            "name": properties.name,
            "capability": f"{properties.major}.{properties.minor}",
            "sms": properties.multi_processor_count,
            "memory_gib": round(properties.total_memory / 2**30, 1),
            "shared_bytes_per_block": target.shared_bytes,
            **query(target.device),
        }
    return facts


def _why_no_gpu() -> str:
    """Returns why torch finds no GPU, in one line."""
    if problems := diagnostics.problems():
        return "; ".join(problems)
    try:
        torch.cuda.init()
    except Exception as error:
        return first_line(error)
    return "torch finds no CUDA device"


def query(device: torch.device) -> dict[str, Any]:
    """Returns nvidia-smi's current values for the GPU, or {"nvidia_smi": reason} if there are none."""
    uuid = str(getattr(torch.cuda.get_device_properties(device), "uuid", ""))
    # by UUID if torch knows it, because CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER change device numbers
    return ask(f"GPU-{uuid}" if uuid and not uuid.startswith("GPU-") else uuid or str(device.index or 0))


def ask(which: str) -> dict[str, Any]:
    """Returns what `query` does for a GPU by UUID or number, as nvidia-smi's -i takes it."""
    command = ["nvidia-smi", f"--query-gpu={','.join(_FIELDS)}", "--format=csv,noheader,nounits", "-i", which]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired) as error:
        return {"nvidia_smi": f"did not run: {error}"}
    rows = list(csv.reader(done.stdout.splitlines(), skipinitialspace=True))
    if done.returncode != 0 or len(rows) != 1 or len(rows[0]) != len(_FIELDS):
        said = (done.stdout + done.stderr).strip().splitlines()
        return {"nvidia_smi": f"said: {said[0] if said else 'nothing'}"}
    return {name: _number(value) for name, value in zip(_FIELDS.values(), rows[0])}


def _number(text: str) -> float | str | None:
    """Returns a value of nvidia-smi: a number, other text, or None where the GPU has none."""
    if text.startswith("["):  # [N/A] or [Not Supported]
        return None
    try:
        return float(text)
    except ValueError:
        return text


def torch_trouble(target: Target) -> str | None:
    """Returns why this torch cannot compute on the GPU, with the remedy; None if it can. It runs an operation, because torch's list of
    architectures does not show whether the driver can compile torch's PTX."""
    if target.kind != "cuda":
        return None
    try:
        torch.zeros(1, device=target.device).add_(1).item()
        return None
    except RuntimeError as error:
        why = first_line(error)
    major, minor = target.capability
    sm, built_for = f"sm_{major}{minor}", " ".join(torch.cuda.get_arch_list())
    name = torch.cuda.get_device_name(target.device)
    return f"torch {torch.__version__} cannot run on this {name}: it is {sm}, and torch was built for {built_for} ({why}). {remedy(sm)}"


def remedy(sm: str) -> str:
    """Returns which torch to install for a GPU that the installed torch does not support."""
    if sm not in ("sm_70", "sm_72"):
        return "Install a torch whose torch.cuda.get_arch_list() has it."
    return (
        f"For Volta run `{diagnostics.torch_for_volta(torch.__version__)}`: "
        "PyTorch's builds for CUDA 12.8 up to 2.10 and for 12.6 up to 2.14 have it."
    )


def _without_home(path: str) -> str:
    """Returns the path with `~` for the home folder, whose name may be the user's."""
    found = Path(path)
    return str(Path("~") / found.relative_to(Path.home())) if found.is_relative_to(Path.home()) else path
