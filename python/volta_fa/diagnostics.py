"""What to install where a card, its driver and torch do not fit each other: each in one line."""

from __future__ import annotations

import contextlib
import ctypes
import re
import warnings
from collections.abc import Iterable
from pathlib import Path

import torch

#: PyTorch's index of the last CUDA release that knows Volta, and its last torch.
_VOLTA_CUDA, _LAST_VOLTA_TORCH = "cu126", "2.14.1"
#: That of CUDA 11, whose programs run with drivers from 450 on, and its last torch.
_OLD_CUDA, _LAST_OLD_TORCH = "cu118", "2.7.1"
#: The first driver of each major release of CUDA: from it on the minor releases run, too.
_FIRST_DRIVERS = {11: 450, 12: 525, 13: 580}


def pip_line(release: str, cuda: str) -> str:
    """The command that puts this very build in the place of another of the same release: without `+cu126` pip would keep that."""
    return f"pip install torch=={release}+{cuda} --index-url https://download.pytorch.org/whl/{cuda}"


def torch_for_volta(version: str) -> str:
    """The command that installs a torch that runs on Volta: of the installed release, where that has one."""
    release = version.split("+")[0]
    numbers = tuple(map(int, release.split("."))) if re.fullmatch(r"\d+\.\d+\.\d+", release) else None
    has_one = numbers is not None and numbers <= tuple(map(int, _LAST_VOLTA_TORCH.split(".")))
    return pip_line(release if has_one else _LAST_VOLTA_TORCH, _VOLTA_CUDA)


def has_code_for(architectures: Iterable[str], capability: tuple[int, int]) -> bool:
    """Do programs compiled for these (as `torch.cuda.get_arch_list()` has them) run on such a device?"""
    for kind, major, minor in re.findall(r"\b(sm|compute)_(\d+)(\d)", " ".join(architectures)):
        compiled = (int(major), int(minor))
        # machine code runs on later devices of its major version, PTX on all later ones
        if compiled <= capability and (kind == "compute" or compiled[0] == capability[0]):
            return True
    return False


def torch_problem(name: str, capability: tuple[int, int], architectures: list[str], version: str, driver: str) -> str | None:
    """Where torch's own kernels do not run on a Volta or Turing card: the card, the driver and the remedy. Else None."""
    if not architectures or capability[0] != 7 or has_code_for(architectures, capability):
        return None
    return (
        f"torch {version} has no code for {name} (sm_{capability[0]}{capability[1]}, driver {driver}): volta_fa's kernels run there, "
        f"torch's own do not. Run `{torch_for_volta(version)}`"
    )


def driver_problem(driver: str, driver_cuda: tuple[int, int], version: str, torch_cuda: str | None) -> str | None:
    """Where the driver is too old for torch, which then finds no device: both and the remedy. Else None."""
    major = int(torch_cuda.split(".")[0]) if torch_cuda else 0
    if major <= driver_cuda[0]:
        return None
    remedy = f"update it to {_FIRST_DRIVERS.get(major, 'a newer one')}"
    remedy += " or newer" if major in _FIRST_DRIVERS else ""
    if driver_cuda[0] == 12:
        remedy += f", or run `{torch_for_volta(version)}`"
    elif driver_cuda[0] == 11:
        remedy += f", or run `{pip_line(_LAST_OLD_TORCH, _OLD_CUDA)}`"
    return f"the NVIDIA driver {driver} (CUDA {driver_cuda[0]}.{driver_cuda[1]}) is too old for torch {version}: {remedy}"


def driver_cuda() -> tuple[int, int] | None:
    """The CUDA release that this machine's driver was made for; None without a driver. Starts nothing."""
    version = ctypes.c_int()
    try:
        ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except (OSError, AttributeError):
        return None
    return version.value // 1000, version.value % 1000 // 10


def driver_version() -> str:
    """As nvidia-smi prints it; where the kernel module is out of sight (WSL, some containers), the CUDA release it was made for."""
    with contextlib.suppress(OSError):
        return Path("/sys/module/nvidia/version").read_text().strip()
    cuda = driver_cuda()
    return "CUDA {}.{}".format(*cuda) if cuda else "unknown"


def problems() -> list[str]:
    """What does not fit on this machine, a line each. Starts CUDA where there is a device."""
    cuda = driver_cuda()
    too_old = driver_problem(driver_version(), cuda, torch.__version__, torch.version.cuda) if cuda else None
    if too_old:
        return [too_old]
    return _torch_problems()


def _torch_problems() -> list[str]:
    architectures, driver = torch.cuda.get_arch_list(), driver_version()
    devices = ((torch.cuda.get_device_name(i), torch.cuda.get_device_capability(i)) for i in range(torch.cuda.device_count()))
    found = (torch_problem(name, capability, architectures, torch.__version__, driver) for name, capability in devices)
    return list(dict.fromkeys(problem for problem in found if problem))


def warn_when_cuda_starts() -> None:
    """Say once, when the program first uses CUDA, that torch's own kernels do not run on its card."""

    def warn() -> None:
        with contextlib.suppress(Exception):  # torch says what ails CUDA itself
            for problem in _torch_problems():
                warnings.warn(f"volta_fa: {problem}", RuntimeWarning, stacklevel=2)

    # where torch puts such checks of its own; were it gone, only the warning would be
    later = getattr(torch.cuda, "_lazy_call", None)
    if later is not None:
        later(warn)
