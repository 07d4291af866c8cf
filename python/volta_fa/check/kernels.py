"""Which kernels a device has to be asked for, and a problem that makes the plan take each."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from .problems import Problem

#: The passes of `volta_fa::fwd`.
FORWARD = ("Forward", "ForwardStreamK")
SIMULATE_VARIABLE = "VOLTA_FA_SIMULATE"
#: Unset, the simulator is a V100.
SIMULATED_GPU_VARIABLE = "VOLTA_FA_SIM_GPU"


@contextmanager
def environment(**variables: str | None) -> Iterator[None]:
    """Set or remove variables for a while: the library reads them at each call."""
    before = {name: os.environ.get(name) for name in variables}
    _update(variables)
    try:
        yield
    finally:
        _update(before)


def _update(variables: dict[str, str | None]) -> None:
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


@dataclass(frozen=True)
class Target:
    """What is checked: a GPU, the simulated V100, or the CPU backend."""

    kind: str  # "cuda", "simulator" or "cpu"
    device: torch.device
    capability: tuple[int, int] = (7, 0)
    sms: int = 80
    shared_bytes: int = 96 * 1024  # that a block may have

    @classmethod
    def of(cls, name: str) -> Target:
        """From `cuda:N`, `simulator` or `cpu`."""
        if name in ("cpu", "simulator"):
            return cls(name, torch.device("cpu"))
        device = torch.device(name)
        facts = torch.cuda.get_device_properties(device)
        # (without a type in PyTorch's own stubs)
        shared_bytes: int = getattr(facts, "shared_memory_per_block_optin", cls.shared_bytes)
        return cls("cuda", device, (facts.major, facts.minor), facts.multi_processor_count, shared_bytes)

    @property
    def has_kernels(self) -> bool:
        """Whether there are kernels at all."""
        return self.kind != "cpu"

    @property
    def families(self) -> list[dict[str, Any]]:
        """Name, and whether as machine code, of the families that it runs, in the order of preference."""
        if not self.has_kernels:
            return []
        found: list[dict[str, Any]] = json.loads(torch.ops.volta_fa._families(*self.capability))
        return found[:1] if self.kind == "simulator" else found

    @property
    def number(self) -> int:
        """As `_plan` and `_tuning` count devices."""
        if self.kind != "cuda":
            return -1
        return torch.cuda.current_device() if self.device.index is None else self.device.index

    @contextmanager
    def running(self, variant: dict[str, Any] | None = None, failed: Sequence[str] = (), without_atomics: bool = False) -> Iterator[None]:
        """Calls of the op run here, on this kernel where it holds the problem, and on none that failed; gradients, if asked for, without
        atomics. Tuning files have no say."""
        choices = [] if variant is None or variant["family"] == "cpu" else [{"pass": variant["pass"], "variant": variant["name"]}]
        choices += [{"pass": "Backward", "deterministic": True}] * without_atomics
        simulate = "1" if self.kind == "simulator" else None
        torch.ops.volta_fa._set_tuning(json.dumps({"format": 1, "choices": choices, "failed": list(failed)}))
        try:
            with environment(**{SIMULATE_VARIABLE: simulate, SIMULATED_GPU_VARIABLE: None}):
                yield
        finally:
            torch.ops.volta_fa._set_tuning("")

    def make_current(self) -> None:
        """CUDA events and the driver's launches are of the current device."""
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)

    def synchronize(self) -> None:
        """Wait for the device; an error of a kernel shows up here at the latest."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def planned(self, problem: Problem, variant: dict[str, Any]) -> list[str]:
        """Names of the kernels of the problem's pass, this one being preferred; none on the CPU."""
        p = problem
        if not self.has_kernels:
            return []
        shape = (len(p.entries), p.seqlen_q, p.seqlen_k, p.nheads, p.nheads_k, p.headdim, p.headdim_v, p.is_causal)
        with self.running(variant):
            text = torch.ops.volta_fa._plan(*shape, deterministic=p.deterministic, needs=",".join(p.needs), device=self.number)
        plan = json.loads(text)
        if variant["pass"] in FORWARD:
            return [plan["forward"]["name"]]
        parts = (plan["backward"][name] for name in ("prepare", "main", "finish"))
        return [part["name"] for part in parts if part]


def wanted(target: Target, variants: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Those that this device can run; on the CPU the backend's dtypes stand for kernels."""
    if not target.has_kernels:
        return [
            {"name": f"cpu_{kind}_{str(dtype).removeprefix('torch.')}", "family": "cpu", "pass": kind, "dtype": dtype}
            for kind in ("Forward", "Backward", "Decode")
            for dtype in (torch.float32, torch.float16, torch.bfloat16)
        ]
    return [v for v in of_families(target, variants) if v["shared_bytes"] <= target.shared_bytes]


def of_families(target: Target, variants: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Those of the families that this device runs; some may need more shared memory than it has."""
    names = [family["name"] for family in target.families]
    return [v for v in variants if v["family"] in names]


#: How a problem asks for what a kernel cannot do without.
_ASKING: dict[str, dict[str, Any]] = {
    "softcap": {"softcap": 20.0},
    "alibi": {"alibi": True},
    "bias": {"bias": "additive"},
    "dropout": {"dropout_p": 0.2},
}


def problems(variant: dict[str, Any]) -> list[Problem]:
    """Odd problems that ask for all that a kernel is prepared for, the simplest first."""
    if variant["family"] == "cpu":
        d, dv, needs, dtype = 40, 24, {"softcap"}, variant["dtype"]
        plain = [Problem(141, 155, d, dv, dtype=dtype), Problem(77, 33, d, d, dtype=dtype, is_causal=True)]
    else:
        d, dv, needs, dtype = variant["headdim"], variant["headdim_v"], set(variant["needs"]), torch.float16
        plain = []
    deterministic = variant["pass"] in ("BackwardDkDv", "BackwardDq")
    if variant["pass"] in ("BackwardPreprocess", "BackwardPostprocess"):
        d = dv = 64  # they take any headdim
    ragged = "lengths" in needs
    if own := set(variant.get("requires", ())):
        # Some have it of dense tensors alone. (In the last, whole blocks of rows see no key.)
        found = [
            Problem(141, 155, d, dv, lengths="packed" if ragged else "", sinks=ragged, is_causal=True),
            Problem(77, 131, d - 8, dv - 8, batch=2, lengths="used" if ragged else "", window_left=60),
            Problem(288, 33, d, dv, is_causal=True),
        ]
    elif "softcap" in needs:
        found = [
            *plain,
            Problem(141, 155, d, dv, dtype=dtype, softcap=20.0, alibi=True, bias="fp32", sinks=True, is_causal=True),
            Problem(129, 97, d - 8, dv - 8, batch=2, dtype=dtype, dropout_p=0.2, bias="mask", lengths="used", window_left=50),
            Problem(65, 113, d, dv, dtype=dtype, alibi=True, dropout_p=0.3, lengths="packed", sinks=True, is_causal=True),
        ]
    elif needs:
        found = [
            Problem(141, 155, d, dv, lengths="packed", sinks=True, is_causal=True),
            Problem(77, 131, d - 8, dv - 8, batch=2, lengths="used", window_left=60),
        ]
    else:
        found = [
            Problem(141, 155, d, dv),
            Problem(113, 77, d - 8, dv - 8, is_causal=True),  # rows without a key
            Problem(65, 201, d, dv, window_left=70, is_causal=True),
        ]
    # a bf16 bias travels as fp32, which some do not read
    reads_bf16 = "bias" not in needs or "fp32_bias" in needs
    if "bf16_gradients" in needs or (variant["pass"] in FORWARD and needs and reads_bf16 and variant["family"] != "cpu"):
        found.append(Problem(113, 129, d, dv, dtype=torch.bfloat16, sinks=ragged, alibi="alibi" in needs, is_causal=True))
    if variant["pass"] == "BackwardFused":  # a block has all keys
        found = [dataclasses.replace(p, seqlen_k=min(p.seqlen_k, variant["block_rows"]) - 3) for p in found]
    asked = {name: value for need in own for name, value in _ASKING[need].items()}
    found = [dataclasses.replace(p, deterministic=deterministic, **asked) for p in found]
    if "bias" in own and "fp32_bias" in needs:
        found.append(dataclasses.replace(found[0], bias="fp32"))
    return found
