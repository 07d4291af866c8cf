"""Which devices qualify for a switch: `enable_sdpa`, `enable_flex`, `enable_xformers`, `enable_unsloth`, and the ComfyUI node.

By default those are the GPUs with a kernel family of their own: one that was compiled for their generation, Volta or Turing. Newer GPUs
run Turing's kernels from PTX, and qualify with `force`. "sm" is a compute capability as a number, such as 70 for 7.0."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from ..diagnostics import cuda_problem
from ..errors import bad_argument
from ..inspection import info


@dataclass(frozen=True)
class Devices:
    """The devices for which a switch or a `with` block is on: the CPU, and CUDA devices by number."""

    cpu: bool
    cuda: frozenset[int]
    #: VOLTA_FA_ENABLE_SDPA's "1" or "force": the native library decides about each CUDA device when it first sees it. Else "".
    on_first_use: str = ""

    def __or__(self, other: Devices) -> Devices:
        return Devices(self.cpu or other.cpu, self.cuda | other.cuda, self.on_first_use or other.on_first_use)

    def __contains__(self, device: torch.device) -> bool:
        """Returns whether a tensor's device is on. Devices that the library decides about on first use do not count."""
        return self.cpu if device.type == "cpu" else device.type == "cuda" and device.index in self.cuda


NO_DEVICES = Devices(cpu=False, cuda=frozenset())


def devices_of(op: str, device: str | torch.device | int | None, force: bool) -> Devices:
    """Returns those of the devices that the user names which qualify.

    Args:
        op: the public function that asks, for error messages.
        device: one CUDA device, or "cpu". Default: all Volta and Turing GPUs.
        force: also use newer GPUs.

    Raises RuntimeError if no device qualifies, ValueError for a device that does not exist.
    """
    if device is None:
        return Devices(cpu=False, cuda=frozenset(_usable(op, range(torch.cuda.device_count()), force)))
    device = torch.device(device)
    if device.type == "cpu":
        return Devices(cpu=True, cuda=frozenset())
    if device.type != "cuda":
        raise bad_argument("device", device, "a CUDA device, or cpu for tests", op=op)
    count = torch.cuda.device_count()
    if device.index is not None and device.index >= count:
        raise bad_argument("device", device, f"one of this machine's {count} CUDA devices{'' if count else _why_no_gpu()}", op=op)
    return Devices(cpu=False, cuda=frozenset(_usable(op, range(count) if device.index is None else [device.index], force)))


def serves(index: int, force: bool = False) -> bool:
    """Returns True for a CUDA device with a kernel family of its own, with `force` also for newer ones."""
    return bool(torch.ops.volta_fa._sdpa_serves(_sm(index), force))  # enable_sdpa's rule, for all switches


def max_headdim(device: torch.device) -> int:
    """Returns the largest headdim that the kernels of a device take; of the CPU, that of the CPU backend."""
    sm = _sm(device.index) if device.type == "cuda" and device.index is not None else 0
    return int(torch.ops.volta_fa._max_headdim(sm))


# torch.compile cannot trace get_device_capability. torch.compiler.assume_constant_result sets this attribute too, but imports
# torch._dynamo, which takes longer than importing torch.
max_headdim._dynamo_marked_constant = True  # type: ignore[attr-defined]


def forget_compiled_programs(switch: str, tag: str) -> None:
    """Makes torch.compile drop programs from before a switch changed, because they contain its decision.

    Args:
        switch: its name, a prefix that no other switch's name has.
        tag: identifies what is on. It becomes part of the keys of torch.compile's caches on disk. "": the switch is off.
    """
    from torch.compiler import config

    tags = [other for other in config.cache_key_tag.split(",") if other and not other.startswith(switch)]
    config.cache_key_tag = ",".join([*tags, f"{switch}.{tag}"] if tag else tags)
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is not None:
        dynamo.reset_code_caches()


def _why_no_gpu() -> str:
    """Returns why torch can use no GPU, as the end of a sentence."""
    problem = cuda_problem()
    return f": {problem}" if problem else ""


def _sm(index: int) -> int:
    major, minor = torch.cuda.get_device_capability(index)
    return 10 * major + minor


def _usable(op: str, indices: Iterable[int], force: bool) -> list[int]:
    """Returns the CUDA devices that qualify. Raises RuntimeError if none does."""
    usable, refused = [], []
    for index in indices:
        if serves(index, force):
            usable.append(index)
        else:
            refused.append(f"cuda:{index} is a {torch.cuda.get_device_name(index)}, sm_{_sm(index)}")
    if not usable:
        names = ", ".join(family["name"] for family in info()["families"]) or "no family: it was built without kernels"
        found = "; ".join(refused) or f"this machine has no CUDA device that torch can use{_why_no_gpu()}"
        hint = " (force=True uses newer devices too)" if refused and not force else ' (device="cpu" tries the routing without a GPU)'
        raise RuntimeError(f"volta_fa.{op}: this library has kernels for {names}, and {found}{hint}")
    return usable
