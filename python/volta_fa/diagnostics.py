"""Finds GPUs, drivers and torch builds that do not work together, and says in one line what to install. `volta_fa.info()`, the command line
and `enable_sdpa()` report these lines; `import volta_fa` schedules a warning (`warn_when_cuda_starts`). `send` says where a report goes."""

import contextlib
import ctypes
import json
import re
import warnings
from collections.abc import Iterable
from pathlib import Path

import torch

#: PyTorch's package index with the newest builds that have code for Volta, and the last torch in it. Its first is 2.6; volta_fa needs 2.7.
_VOLTA_CUDA, _LAST_VOLTA_TORCH = "cu126", "2.14.1"
#: PyTorch's package index of CUDA 11, which runs with drivers from 450 on, and the last torch in it.
_OLD_CUDA, _LAST_OLD_TORCH = "cu118", "2.7.1"
#: The first CUDA release that loads the kernels' machine code, which CUDA 12.9 compiled.
_MACHINE_CODE_CUDA = (12, 0)
#: The first driver of each major release of CUDA. It also runs the minor releases.
_FIRST_DRIVERS = {11: 450, 12: 525, 13: 580}
#: URLs of the release's files, its sources and its issue tracker, each empty if not published. `make release` writes it.
_ADDRESSES = Path(__file__).with_name("addresses.json")


def pip_line(release: str, cuda: str) -> str:
    """Returns the pip command for a build of torch. `+cu126` makes pip replace another build of the same release."""
    return f"pip install torch=={release}+{cuda} --index-url https://download.pytorch.org/whl/{cuda}"


def torch_for_volta(version: str) -> str:
    """Returns the pip command for a torch with code for Volta: of the installed release, or of an older one that has it."""
    release = version.split("+")[0]
    numbers = tuple(map(int, release.split("."))) if re.fullmatch(r"\d+\.\d+\.\d+", release) else None
    has_one = numbers is not None and numbers <= tuple(map(int, _LAST_VOLTA_TORCH.split(".")))
    return pip_line(release if has_one else _LAST_VOLTA_TORCH, _VOLTA_CUDA)


def has_code_for(architectures: Iterable[str], capability: tuple[int, int]) -> bool:
    """Returns whether programs for these architectures, in the form of `torch.cuda.get_arch_list()`, run on such a device."""
    for kind, major, minor in re.findall(r"\b(sm|compute)_(\d+)(\d)", " ".join(architectures)):
        compiled = (int(major), int(minor))
        # machine code runs on later devices of its major version, PTX on all later ones
        if compiled <= capability and (kind == "compute" or compiled[0] == capability[0]):
            return True
    return False


def torch_problem(name: str, capability: tuple[int, int], architectures: list[str], version: str, driver: str) -> str | None:
    """Returns a line with GPU, driver and remedy if torch's own kernels do not run on a Volta or Turing GPU, else None."""
    if not architectures or capability[0] != 7 or has_code_for(architectures, capability):
        return None
    return (
        f"torch {version} has no code for {name} (sm_{capability[0]}{capability[1]}, driver {driver}): volta_fa's kernels run there, "
        f"torch's own do not. Run `{torch_for_volta(version)}`"
    )


def driver_problem(driver: str, driver_cuda: tuple[int, int], version: str, torch_cuda: str | None) -> str | None:
    """Returns a line with the remedy if the driver is too old for torch, which then finds no device, else None."""
    major = int(torch_cuda.split(".")[0]) if torch_cuda else 0
    if major <= driver_cuda[0]:
        return None
    shown = driver if driver.startswith("CUDA") else f"{driver} (CUDA {driver_cuda[0]}.{driver_cuda[1]})"
    remedy = f"update it to {_FIRST_DRIVERS.get(major, 'a newer one')}"
    remedy += " or newer" if major in _FIRST_DRIVERS else ""
    if driver_cuda[0] == 12:
        remedy += f", or run `{torch_for_volta(version)}`"
    elif driver_cuda[0] == 11:
        remedy += f", or run `{pip_line(_LAST_OLD_TORCH, _OLD_CUDA)}`"
    return f"the NVIDIA driver {shown} is too old for torch {version}: {remedy}"


def driver_cuda() -> tuple[int, int] | None:
    """Returns the CUDA release of this machine's driver, None without a driver. Does not initialize CUDA."""
    version = ctypes.c_int()
    try:
        ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except (OSError, AttributeError):
        return None
    return version.value // 1000, version.value % 1000 // 10  # 12090 is CUDA 12.9


def loads_machine_code() -> bool:
    """Returns False if this machine's driver is older than 525 (CUDA 12.0): it compiles the kernels' PTX, because it cannot load their
    machine code. True without a driver."""
    cuda = driver_cuda()
    return cuda is None or cuda >= _MACHINE_CODE_CUDA


def driver_version() -> str:
    """Returns the driver version as nvidia-smi prints it, or its CUDA release where the kernel module is not visible (WSL, containers)."""
    with contextlib.suppress(OSError):
        return Path("/sys/module/nvidia/version").read_text().strip()
    cuda = driver_cuda()
    return "CUDA {}.{}".format(*cuda) if cuda else "unknown"


def cuda_problem() -> str | None:
    """Returns why torch can use no GPU of this machine; None if it could, even if there is none. Does not initialize CUDA."""
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is a build without CUDA: run `{torch_for_volta(torch.__version__)}`"
    cuda = driver_cuda()
    if cuda is None:
        return "no CUDA driver on this machine (libcuda.so.1 not found): install the NVIDIA driver, or pass the GPU into the container"
    return driver_problem(driver_version(), cuda, torch.__version__, torch.version.cuda)


def problems() -> list[str]:
    """Returns the problems of this machine, one line each. Initializes CUDA if there is a device."""
    cuda = driver_cuda()
    too_old = driver_problem(driver_version(), cuda, torch.__version__, torch.version.cuda) if cuda else None
    if too_old:
        return [too_old]
    return _torch_problems()


def _torch_problems() -> list[str]:
    """Returns `torch_problem`'s lines for this machine's devices, equal ones once."""
    architectures, driver = torch.cuda.get_arch_list(), driver_version()
    devices = ((torch.cuda.get_device_name(i), torch.cuda.get_device_capability(i)) for i in range(torch.cuda.device_count()))
    found = (torch_problem(name, capability, architectures, torch.__version__, driver) for name, capability in devices)
    return list(dict.fromkeys(problem for problem in found if problem))


def warn_when_cuda_starts() -> None:
    """Schedules a warning for the program's first use of CUDA, if torch's own kernels do not run on the GPU."""

    def warn() -> None:
        with contextlib.suppress(Exception):  # torch reports problems of CUDA itself
            for problem in _torch_problems():
                warnings.warn(f"volta_fa: {problem}", RuntimeWarning, stacklevel=2)

    # a private function, by which torch runs its own checks of the GPU; in a release without it, there is no warning
    later = getattr(torch.cuda, "_lazy_call", None)
    if later is not None:
        later(warn)


def send(file: Path) -> str:
    """Returns an instruction to send `file`, a report, to the issue tracker; without one, to the person who provided the package."""
    issues = json.loads(_ADDRESSES.read_text())["issues"]
    return f"Send {file} " + (f"as an issue at {issues}" if issues else "to the person who gave you volta_fa")
