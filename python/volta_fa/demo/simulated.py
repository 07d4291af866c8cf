"""Runs one attention layer's kernels on a simulated V100 and T4, forward and backward: errors, times, and how busy parts of an SM are. The
simulator executes the kernels' machine code on the CPU; no GPU is needed. It executes one sequence in full, for the errors, and times one
SM's share of the whole batch. `python -m volta_fa demo` prints the results."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..check.cases import Case  # sizes and options of a problem
from ..check.kernels import environment, simulate  # sets environment variables for a block; runs a call in the simulator

# Inputs: a problem's tensors. Part: a part of a result with exact values and the allowed error. exact_forward returns the exact results,
# their Parts, out and softmax_lse; exact_backward the Parts of the gradients.
from ..check.problems import Error, Inputs, Part, exact_backward, exact_forward
from ..inspection import info

#: The layer: attention of BERT base, for which figures of PyTorch's kernels in the same simulator exist. (The demo's layers fill no GPU.)
LAYER = "BERT base"
BATCH, SEQLEN, NHEADS, HEADDIM = 16, 512, 12, 64
#: Parts of an SM by their names in the simulator's reports. One that is always busy bounds the kernel.
PIPES = {"tensor": "tensor cores", "mio": "shared memory", "xu": "exponentials", "issue": "issue slots"}


@dataclass(frozen=True)
class Gpu:
    """A simulated GPU."""

    name: str  # in VOLTA_FA_SIM_GPU
    title: str
    #: TFLOP/s of PyTorch's memory-efficient kernels for this layer, simulated: docs/reference/figures.md, "BERT base, training".
    pytorch_tflops: float


GPUS = (Gpu("v100", "V100", 24.5), Gpu("t4", "T4", 13.1))


@dataclass
class Simulated:
    """Results on one GPU."""

    gpu: Gpu
    errors: dict[str, Error]  # the largest error of each of out, dq, dk and dv, over all elements
    forward: list[dict[str, Any]]  # the simulator's reports, one for each kernel
    backward: list[dict[str, Any]]

    @property
    def right(self) -> bool:
        """Whether no error exceeds the allowed one. `share` is error / allowed error."""
        return all(error.share <= 1 for error in self.errors.values())

    @property
    def tflops(self) -> float:
        """Speed of forward and backward together: two and five products, of two operations for each query, key, head and column."""
        operations = (4 + 10) * BATCH * NHEADS * SEQLEN**2 * HEADDIM
        return operations / (microseconds(self.forward) + microseconds(self.backward)) / 1e6

    @property
    def main_kernels(self) -> list[dict[str, Any]]:
        """The slowest kernel of each pass."""
        return [max(reports, key=lambda report: microseconds([report])) for reports in (self.forward, self.backward)]


def microseconds(reports: Sequence[dict[str, Any]]) -> float:
    """Returns the simulated time of all reported kernels."""
    return float(sum(report["timing"]["kernel_us"] for report in reports))


def run(gpu: Gpu) -> Simulated:
    """Runs the layer, in less than ten seconds on two cores."""
    forward, backward = _time(gpu)
    return Simulated(gpu, _errors(gpu, [*forward, *backward]), forward, backward)


def _time(gpu: Gpu) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Returns the simulator's reports on the forward and on the backward pass."""
    q, k, v, dout, out = (aligned((BATCH, SEQLEN, NHEADS, HEADDIM), torch.float16).zero_() for _ in range(5))
    for t in (q, k):
        t.copy_(torch.randn(t.shape, generator=torch.Generator().manual_seed(0)))
    # Only times matter here, and of all values only q and k affect them. So out, dout and v are zeros, and lse is that of scores of
    # variance 1, log(SEQLEN * exp(1 / 2)).
    lse = aligned((BATCH, NHEADS, SEQLEN), torch.float32).fill_(math.log(SEQLEN) + 0.5)
    forward = simulate(lambda: torch.ops.volta_fa.fwd(q, k, v), VOLTA_FA_SIM_GPU=gpu.name)
    return forward, simulate(lambda: torch.ops.volta_fa.bwd(dout, q, k, v, out, lse), VOLTA_FA_SIM_GPU=gpu.name)


def _errors(gpu: Gpu, timed: Sequence[dict[str, Any]]) -> dict[str, Error]:
    """Runs one sequence in full with the kernels that were timed, and compares it with fp64. A tuning (a text that tells the planner which
    kernels to take) chooses them, because the planner might take others for one sequence."""
    inputs, parts = _expected()
    names = {report["kernel"] for report in timed}
    choices = [{"pass": v["pass"], "variant": v["name"]} for v in info()["variants"] if v["name"] in names]
    torch.ops.volta_fa._set_tuning(json.dumps({"format": 1, "choices": choices, "failed": []}))
    try:
        with environment(VOLTA_FA_SIMULATE="1", VOLTA_FA_SIM_GPU=gpu.name, VOLTA_FA_SIM_THREADS=str(torch.get_num_threads())):
            out, lse, rng_state = inputs.forward()
            found = {"out": out, **inputs.gradients(out, lse, rng_state)}
    finally:
        torch.ops.volta_fa._set_tuning("")  # removes the tuning
    errors = (error for part in parts for error in part.errors(found))
    # others have another `kind`, such as "rms", or are of some elements only, which `where` describes (check/problems.py)
    return {error.result: error for error in errors if error.kind == "largest" and not error.where}


@functools.cache
def _expected() -> tuple[Inputs, list[Part]]:
    """Returns one sequence with its results in fp64."""
    case = Case(SEQLEN, SEQLEN, HEADDIM, batch=1, nheads=NHEADS, dtype=torch.float16)
    inputs = Inputs.draw(case, seed=0, device=torch.device("cpu"))
    no_dropout = torch.zeros(2, dtype=torch.int64)  # an rng_state, which is not used
    exact, forward, out, lse = exact_forward(inputs, no_dropout)
    return inputs, [*forward, *exact_backward(exact, inputs, out, lse, no_dropout)]


#: Alignment in bytes of CUDA's allocations, so that rows fall into cache lines as on a GPU. ATen's CPU allocator aligns to 64 bytes.
_ALIGNMENT = 256


def aligned(shape: Sequence[int], dtype: torch.dtype, device: str = "cpu") -> Tensor:
    """Returns an uninitialized tensor that is aligned as by CUDA's allocator."""
    numel, spare = math.prod(shape), _ALIGNMENT // dtype.itemsize
    memory = torch.empty(numel + spare, dtype=dtype, device=device)
    first = -memory.data_ptr() % _ALIGNMENT // dtype.itemsize
    return memory[first : first + numel].view(tuple(shape))
