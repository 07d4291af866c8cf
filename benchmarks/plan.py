"""Prints the kernels that the planner (src/plan) selects for a shape, without running anything.

Shapes are B,H,M,N,D or B,H,M,N,D,causal. Without any, the command lists those of benchmarks.table. --nheads-k and
--headdim-v apply to all of them. The device is a V100, or that of --device: a T4, or this machine's GPU.

    kernel         name, as in `python -m volta_fa info`
    tile           forward: query rows per block x keys per step; backward: keys per block x queries per step; other kernels of
                   backward: rows per block
    grid           blocks per head, heads, batches; under a causal mask the planner may put heads first;
                   stream-K, whose blocks divide the keys of all heads evenly: blocks, 1, 1
    waves          blocks of the grid / resident blocks (SMs x blocks per SM); below 1, the grid does not fill the device

A backward pass may launch its main kernel several times (`main_launches` of `volta_fa::_plan`), and one with smaller blocks for the last
keys (`tail`). The command prints the first launch."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, replace

import torch

from volta_fa.errors import CommandError

from . import report
from .attention import TABLE, Shape
from .report import Grid, significant

#: The properties of a device by which the planner selects: SMs, compute capability, bytes of shared memory that a block may use.
LIMITS = {
    "v100": {"sms": 80, "major": 7, "minor": 0, "shared_bytes": 96 * 1024},
    "t4": {"sms": 40, "major": 7, "minor": 5, "shared_bytes": 64 * 1024},
}


def plan(shape: Shape, limits: dict[str, int]) -> list[dict]:
    """Returns the forward and the backward kernels, in launch order, for a device of these limits (as in LIMITS). Raises CommandError if
    its KV heads do not divide its heads, or volta_fa has no kernels for it.

    A kernel has `role`, "forward" or "backward, PASS", and what `volta_fa::_plan` returns: name, tile, threads, registers, shared memory,
    occupancy and grid."""
    s, op = shape, torch.ops.volta_fa._plan
    if s.nheads_k < 1 or s.nheads % s.nheads_k:
        raise CommandError(f"{shape}: --nheads-k {s.nheads_k} does not divide {s.nheads} heads")
    try:
        found = json.loads(op(s.batch, s.seqlen_q, s.seqlen_k, s.nheads, s.nheads_k, s.headdim, s.headdim_v, s.causal, **limits))
    except (ValueError, NotImplementedError, RuntimeError) as error:
        raise CommandError(f"{shape}: {str(error).splitlines()[0]}") from None
    backward = found["backward"]
    parts = ({"role": f"backward, {name}", **backward[name]} for name in ("preprocess", "main", "postprocess") if backward[name])
    return [{"role": "forward", **found["forward"]}, *parts]


def grid(plans: dict[Shape, list[dict]], sms: int) -> Grid:
    columns = ["B,H,M,N,D", "pass", "kernel", "tile", "threads", "registers", "shared, KB", "blocks per SM", "grid", "waves"]
    found = Grid("Kernels of the plan", columns)
    for shape, kernels in plans.items():
        for i, v in enumerate(kernels):
            tile = f"{v['block_rows']} x {v['step']}" if v["step"] else str(v["block_rows"])
            resources = [str(v["threads"]), str(v["registers"]), significant(v["shared_bytes"] / 1024), str(v["blocks_per_sm"])]
            waves = math.prod(v["grid"]) / (sms * v["blocks_per_sm"])
            blocks = [" x ".join(map(str, v["grid"])), significant(waves, 2)]
            found.rows.append([_label(shape) if i == 0 else "", v["role"], v["name"], tile, *resources, *blocks])
    return found


def _label(shape: Shape) -> str:
    label = str(shape) + (f" {shape.nheads_k} KV heads" if shape.nheads_k != shape.nheads else "")
    return label + (f" headdim_v {shape.headdim_v}" if shape.headdim_v != shape.headdim else "")


def device_limits() -> dict[str, int]:
    """Returns the limits of this machine's first GPU."""
    report.choose_device("cuda")
    properties = torch.cuda.get_device_properties(0)
    shared = properties.shared_memory_per_block_optin
    return {"sms": properties.multi_processor_count, "major": properties.major, "minor": properties.minor, "shared_bytes": shared}


def main(arguments: Sequence[str]) -> int:
    parser = report.parser("plan", __doc__, outputs=False)
    parser.add_argument("shapes", nargs="*", metavar="SHAPE", help="B,H,M,N,D[,causal]")
    parser.add_argument("--nheads-k", type=int, default=0, metavar="N", help="KV heads (default: as many as query heads)")
    parser.add_argument("--headdim-v", type=int, default=0, metavar="N", help="headdim of v and out (default: that of q and k)")
    parser.add_argument("--device", choices=(*LIMITS, "cuda"), default="v100", help="default: v100; cuda: this machine's")
    parser.add_argument("--json", action="store_true", help="print JSON: for each shape the kernels with all their fields")
    options = parser.parse_args(arguments)
    limits = LIMITS.get(options.device) or device_limits()
    shapes = [Shape.parse(text) for text in options.shapes] or TABLE
    # without an option (0), the shape's own: those of nheads and headdim
    changes = {name: n for name in ("nheads_k", "headdim_v") if (n := getattr(options, name)) != 0}
    plans = {shape: plan(shape, limits) for shape in (replace(s, **changes) for s in shapes)}
    if options.json:
        print(json.dumps([{**asdict(shape), "kernels": found} for shape, found in plans.items()], indent=1))
        return 0
    header = {"device": "sm_{major}{minor}, {sms} SMs, {shared_bytes} bytes of shared memory per block".format(**limits)}
    report.show(header, [grid(plans, limits["sms"])])
    return 0


if __name__ == "__main__":
    report.command(main)
