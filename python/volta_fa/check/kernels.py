"""Lists the kernels that a device can run, and for each of them problems that it computes. The planner chooses the library's kernels for a
call, so a problem must be one for which it takes that kernel. A "variant" is a kernel's entry in `volta_fa.info()["variants"]`: its name,
family (volta or turing code), pass (what it computes, such as Forward or BackwardDq), sizes and features. `Target` is the device;
`correctness`, `performance` and `tune` run operators on it."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from .. import inspection
from .cases import ASKING, EVERY, Case, asking  # ASKING: by feature, the fields of a Case that uses it; asking: those for some features

#: The passes of `volta_fa::fwd`. StreamK: grids that divide the keys of a tile of queries among blocks too. Split: `is_split`.
FORWARD = ("Forward", "ForwardStreamK", "ForwardSplit", "ForwardSplitStreamK")
#: The passes that `correctness` checks without a problem from here. They merge results, cast, or score, list and attend to chosen tokens.
WITHOUT_PROBLEM = ("Merge", "Cast", "SparseSelect", "SparseMla", "Indexer")


@contextmanager
def environment(**variables: str | None) -> Iterator[None]:
    """Sets environment variables within the block, or removes those that are None. The library reads them at each call.

    VOLTA_FA_SIMULATE runs fp16 and bf16 CPU tensors through the machine code in the simulator, VOLTA_FA_SIM_GPU names the simulated GPU
    (unset: a V100)."""
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


def simulate(work: Callable[[], object], mode: str = "timing", **variables: str | None) -> list[dict[str, Any]]:
    """Runs `work` on CPU tensors in the simulator, and returns its reports, one for each kernel launch.

    Args:
        mode: value of `VOLTA_FA_SIMULATE`: `timing`, or `launches`, which runs no kernel.
        variables: further environment variables of the simulator.
    """
    with environment(VOLTA_FA_SIMULATE=mode, **variables):
        torch.ops.volta_fa._sim_report()  # forgets earlier launches
        work()
        return json.loads(torch.ops.volta_fa._sim_report())


#: Texts of RuntimeErrors by which libraries report that GPU memory is used up, perhaps by another program.
_NO_MEMORY = ("out of memory", "CUDA_ERROR_OUT_OF_MEMORY", "CUBLAS_STATUS_ALLOC_FAILED", "CUBLAS_STATUS_NOT_INITIALIZED")


def lacks_memory(error: Exception) -> bool:
    """Returns True for an error about memory. Such an error is no failure of a kernel."""
    return isinstance(error, torch.cuda.OutOfMemoryError) or any(text in str(error) for text in _NO_MEMORY)


@dataclass(frozen=True)
class Target:
    """The device to check: a GPU, the simulated V100, or the CPU backend. The defaults are a V100's properties."""

    kind: str  # "cuda", "simulator" or "cpu"
    device: torch.device
    capability: tuple[int, int] = (7, 0)
    sms: int = 80
    shared_bytes: int = 96 * 1024  # maximum shared memory of a block

    @classmethod
    def of(cls, name: str) -> Target:
        """Returns the target of a name: `cuda:N`, `simulator` or `cpu`."""
        if name in ("cpu", "simulator"):
            return cls(name, torch.device("cpu"))
        device = torch.device(name)
        facts = torch.cuda.get_device_properties(device)
        # PyTorch's stubs have no type for it
        shared_bytes: int = getattr(facts, "shared_memory_per_block_optin", cls.shared_bytes)
        return cls("cuda", device, (facts.major, facts.minor), facts.multi_processor_count, shared_bytes)

    @property
    def has_kernels(self) -> bool:
        """Whether kernels run on this target: False for the CPU backend."""
        return self.kind != "cpu"

    @property
    def families(self) -> list[dict[str, Any]]:
        """The kernel families that the target runs, preferred first: `name`, and `native` if it has machine code (else PTX). Of a simulated
        GPU the preferred one."""
        if not self.has_kernels:
            return []
        if self.kind == "cuda":
            return [family for family in inspection.families(self.capability) if family["name"]]  # no name: no family serves this GPU
        return json.loads(torch.ops.volta_fa._families(*self.capability))[:1]

    @property
    def number(self) -> int:
        """The device number that the operators `_plan` and `_tuning` take; -1 is the simulator."""
        if self.kind != "cuda":
            return -1
        return torch.cuda.current_device() if self.device.index is None else self.device.index

    @contextmanager
    def running(self, variant: dict[str, Any] | None = None, failed: Sequence[str] = (), without_atomics: bool = False) -> Iterator[None]:
        """Runs calls of the operators within the block on this target, without tuning files (JSON files that tell the planner which kernels
        are faster on a GPU, and which must not run).

        Args:
            variant: the preferred kernel, which runs if it is applicable.
            failed: names of kernels that must not run.
            without_atomics: computes gradients without atomics, by the kernels for deterministic gradients.

        Sets these choices as a tuning file would, and removes them after the block.
        """
        choices = [] if variant is None or variant["family"] == "cpu" else [{"pass": variant["pass"], "variant": variant["name"]}]
        choices += [{"pass": "Backward", "deterministic": True}] * without_atomics
        mode = "1" if self.kind == "simulator" else None  # "1": computes results, without times
        torch.ops.volta_fa._set_tuning(json.dumps({"format": 1, "choices": choices, "failed": list(failed)}))
        try:
            invariant = "1" if variant and variant.get("batch_invariant") else None
            with environment(VOLTA_FA_SIMULATE=mode, VOLTA_FA_SIM_GPU=None, VOLTA_FA_BATCH_INVARIANT=invariant):
                yield
        finally:
            torch.ops.volta_fa._set_tuning("")

    def make_current(self) -> None:
        """Makes the target torch's current device, which CUDA events and the driver's launches use."""
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)

    def synchronize(self) -> None:
        """Waits for the device. Raises the error of a kernel that failed."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def planned(self, problem: Case, variant: dict[str, Any]) -> list[str]:
        """Returns the names of the kernels that run for the problem if `variant` is preferred; none on the CPU."""
        p = problem
        if not self.has_kernels:
            return []
        shape = (p.entries, *p.longest, p.nheads, p.nheads_k, p.headdim, p.headdim_v, p.is_causal)  # batch, seqlen_q, seqlen_k, ...
        with self.running(variant):
            text = torch.ops.volta_fa._plan(*shape, deterministic=p.deterministic, features=",".join(p.features), device=self.number)
        plan = json.loads(text)
        if variant["pass"] in FORWARD:
            kernel = plan["forward_split" if is_split(variant) else "forward"]
            return [kernel["name"]] if kernel else []
        backward = plan["backward_split" if is_split(variant) else "backward"] or {}
        parts = (backward.get(name) for name in ("preprocess", "main", "postprocess"))
        return [part["name"] for part in parts if part]


def is_split(variant: dict[str, Any]) -> bool:
    """Returns whether the variant computes fp32 tensors in full precision, each number as the sum of two fp16 numbers."""
    return "Split" in variant["pass"]


def wanted(target: Target, variants: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the variants that the target can run. On the CPU, a stand-in for each pass and dtype."""
    if not target.has_kernels:
        return [
            {"name": f"cpu_{kind}_{str(dtype).removeprefix('torch.')}", "family": "cpu", "pass": kind, "dtype": dtype}
            for kind in ("Forward", "Backward", "Decode")
            for dtype in (torch.float32, torch.float16, torch.bfloat16)
        ]
    return [v for v in of_families(target, variants) if v["shared_bytes"] <= target.shared_bytes]


def of_families(target: Target, variants: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the variants of the target's families, preferred family first. Some may need more shared memory than it has."""
    return [v for family in target.families for v in variants if v["family"] == family["name"]]


def problems(variant: dict[str, Any]) -> list[Case]:
    """Returns problems of `fwd` and `bwd` that together use every feature of a kernel; `--quick` runs the first. `cached.problems` has
    those of kernels with a KV cache. Most sizes are odd, so that tiles have partial rows and columns.

        features              of a variant: what it can compute; required_features: it runs only for problems with all of these
        alibi, bias, blocks   of a Case: the dimensions of that tensor that are not 1 (b, h, q, k), after a colon its dtype
        sinks="own"           sinks in q's dtype
        EVERY                 softcap, ALiBi and sinks together
        as_fp32               `fwd` gets q, k and v cast to float32"""
    if variant["family"] == "cpu":
        d, dv, features, dtype = 40, 24, set(ASKING), variant["dtype"]
    else:
        d, dv, features = variant["headdim"], variant["headdim_v"], set(variant["features"])
        dtype = torch.float32 if is_split(variant) else torch.float16
    if variant["pass"] in ("BackwardPreprocess", "BackwardPostprocess"):
        d = dv = 64  # these kernels take any headdim
    # BackwardFused: a thread block holds all keys of a head, at most block_rows
    most_keys = variant["block_rows"] if variant["pass"] == "BackwardFused" else None
    if variant.get("batch_invariant"):
        features.discard("dropout")  # batch-invariant calls reject it
    required = set(variant.get("required_features", ()))
    asked = asking(sorted(required))
    group = max(2, variant.get("heads", 1))  # query heads of a KV head: a block may compute several
    asked["deterministic"] = variant["pass"] in ("BackwardDkDv", "BackwardDq")

    def case(seqlen_q: int, seqlen_k: int, less: int = 0, packed: bool = False, used: bool = False, batch: int = 1, **options: Any) -> Case:
        """Returns a problem.

        Args:
            less: columns fewer than the kernel's headdim.
            packed: adds a sequence without queries and a short one.
            used: each batch entry uses fewer keys than it has (seqused_k).
        """
        keys = seqlen_k if most_keys is None else min(seqlen_k, most_keys) - 3  # so rows of the block have no key
        if "dropout" not in features:
            options.pop("dropout_p", None)
        return Case(
            seqlen_q, keys, d - less, dv - less, batch, nheads=2 * group, nheads_k=2,
            lengths=((seqlen_q, keys), (0, 5), (seqlen_q // 2 + 1, keys // 3)) if packed else (),
            used=tuple(keys - 1 - 45 * i for i in range(batch)) if used else (), **{"dtype": dtype, **options, **asked},
        )  # fmt: skip

    varlen = "varlen" in features
    sinks = "own" if "sinks" in features else ""
    if "block_mask" in required:
        found = [case(141, 155), case(290, 200, less=8, batch=2, used=varlen, sinks=sinks, window_left=60), case(288, 33, is_causal=True)]
        if "alibi" in features:
            found += [case(141, 155, **EVERY, is_causal=True), case(129, 97, alibi="h", dropout_p=0.2)]
    elif required:
        # Some kernels have their required feature for dense tensors only. In the last problem, whole tiles of rows see no key.
        found = [
            case(141, 155, packed=varlen, sinks=sinks, is_causal=True),
            case(77, 131, less=8, batch=2, used=varlen, window_left=60),
            case(288, 33, is_causal=True),
        ]
    elif features & set(ASKING):
        found = [
            case(141, 155, **EVERY, bias="hqk:fp32", is_causal=True),
            case(129, 97, less=8, batch=2, dropout_p=0.2, bias="bk:bool", used=True, window_left=50),
            case(65, 113, alibi="bh", dropout_p=0.3, packed=True, sinks="own", is_causal=True),
        ]
    elif features:
        found = [case(141, 155, packed=varlen, sinks=sinks, is_causal=True), case(77, 131, less=8, batch=2, used=varlen, window_left=60)]
    else:
        found = [
            case(141, 155),
            case(113, 77, less=8, is_causal=True),  # rows without a key
            case(65, 201, window_left=70, is_causal=True),
        ]
    if variant["family"] == "cpu":
        found = [
            case(141, 155),
            case(141, 155, blocks="h", sinks="own"),
            dataclasses.replace(case(77, 33, is_causal=True), headdim_v=d),
            *found,
        ]
    # a bf16 bias is cast to fp32 for the kernels, and some read no fp32 bias
    reads_bf16 = "bias" not in features or "fp32_bias" in features
    if "fp32_gradients" in features or (variant["pass"] in FORWARD and dtype == torch.float16 and features and reads_bf16):
        alibi = "bh" if "alibi" in features else ""
        found.append(case(113, 129, dtype=torch.bfloat16, sinks=sinks, alibi=alibi, is_causal=True))
    if "fp32_output" in features:
        packed = varlen and "block_mask" not in required
        found.append(case(113, 129, packed=packed, as_fp32=True, sinks=sinks and "fp32", is_causal=True))
    if "bias" in required and "fp32_bias" in features:
        found.append(dataclasses.replace(found[0], bias="hqk:fp32"))
    return found
