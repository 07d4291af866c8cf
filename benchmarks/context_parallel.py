"""Measures attention over a sequence sharded across GPUs: time, memory and communication against one GPU.

    torchrun --standalone --nproc-per-node 2 -m benchmarks.context_parallel [--json FILE] [--trace FILE]

Each rank needs a CUDA device. Inputs are causal fp16 with (batch, heads, headdim) = (1, 16, 128). Each printed line is one length, with
three ways: "one", the whole sequence on one device (all ranks run it, each on its own), "ring" attention over all ranks, and "ulysses".
Each has the time of forward, of both passes, and peak memory beside the inputs. A line also times the ring's forward messages without
kernels, and PyTorch's all-gather of K and V. --trace writes rank 0's profile, and prints the share of NCCL's time beside attention kernels.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

import volta_fa
from volta_fa.distributed import ring_attention, shard_sequence, ulysses_attention
from volta_fa.distributed.plan import Mask, plan, shard_ranges
from volta_fa.distributed.ring import Transfer, messages, room

from . import report
from .measure import peak_bytes

HEADS, HEADDIM = 16, 128
SEQLENS = (8192, 16384, 32768, 65536, 131072)
ROUNDS = 5  # timed calls


def milliseconds(call: Callable[[], object], rounds: int = ROUNDS) -> float:
    """Returns the median time of a call in ms. All ranks begin each call together; two more calls come first to warm up."""
    times = []
    for _ in range(rounds + 2):
        if dist.is_initialized():
            dist.barrier()
        torch.cuda.synchronize()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return median(times[2:])


def tensors(seqlen: int, device: torch.device) -> list[torch.Tensor]:
    """Returns q, k, v and dout of the whole sequence, the same on all ranks."""
    g = torch.Generator(device).manual_seed(0)
    return [torch.randn(1, seqlen, HEADS, HEADDIM, generator=g, device=device, dtype=torch.float16) for _ in range(4)]


def exchange(k: torch.Tensor, v: torch.Tensor, seqlen: int) -> Callable[[], None]:
    """Returns a function that sends the messages of a causal ring's forward, without its kernels. In step t a rank sends the K and V rows
    that the rank t places after it needs. Zigzag: rank i of n holds chunks i and 2n - 1 - i of 2n, which balances causal work."""
    size, rank = dist.get_world_size(), dist.get_rank()
    ranges = [shard_ranges(seqlen, size, r, "zigzag") for r in range(size)]
    # queries and keys of one sequence; keys at any distance to the left (None), none to the right (0)
    mask = Mask(((0, seqlen),), ((0, seqlen),), None, 0)

    def send_all() -> None:
        for t in range(1, size):
            source, reader = (rank - t) % size, (rank + t) % size
            # plan(queries, keys).key_ranges: rows of keys that the queries need: of this rank for the reader, of the source for this rank.
            # messages(): tensors of such rows; room()[1]: views of a new tensor, which receive them
            to_reader, from_source = plan(ranges[reader], ranges[rank], mask), plan(ranges[rank], ranges[source], mask)
            send = [message for x in (k, v) for message in messages(x, to_reader.key_ranges)]
            receive = [part for x in (k, v) for part in room(x, from_source.key_ranges)[1]]
            Transfer("benchmark", dist.group.WORLD, send=send, to=reader, receive=receive, source=source).wait()

    return send_all


def both(attend: Callable[..., torch.Tensor], q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dout: torch.Tensor) -> Callable[[], None]:
    def forward_and_backward() -> None:
        leaves = [t.detach().requires_grad_() for t in (q, k, v)]
        torch.autograd.grad(attend(*leaves), leaves, dout)

    return forward_and_backward


def measure(seqlen: int, device: torch.device) -> dict[str, Any]:
    """Returns the figures of one length: times in ms, peak memory and the K and V of one rank (`message_mib`) in MiB. Shards are zigzag
    (`exchange` describes it), the default of shard_sequence() and of both attention functions."""
    found: dict[str, Any] = {"seqlen": seqlen}
    whole = tensors(seqlen, device)
    shards = [shard_sequence(t).contiguous() for t in whole]

    def one(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return torch.ops.volta_fa.fwd(q, k, v, is_causal=True)[0]

    ways: dict[str, tuple[Callable[..., torch.Tensor], list[torch.Tensor]]] = {
        "one": (one, whole),
        "ring": (lambda q, k, v: ring_attention(q, k, v, is_causal=True), shards),
        "ulysses": (lambda q, k, v: ulysses_attention(q, k, v, is_causal=True), shards),
    }
    for name, (attend, inputs) in ways.items():
        rounds = 2 if seqlen > 70000 else ROUNDS  # of SEQLENS, the longest
        q, k, v, dout = inputs
        found[name] = {"forward_ms": milliseconds(lambda: attend(q, k, v), rounds), "both_ms": milliseconds(both(attend, *inputs), rounds)}
        found[name]["peak_mib"] = peak_bytes(both(attend, *inputs), device) / 2**20
    k, v = shards[1:3]
    found["messages_ms"] = milliseconds(exchange(k, v, seqlen))
    gathered = [torch.empty(dist.get_world_size() * t.numel(), dtype=t.dtype, device=device) for t in (k, v)]
    found["all_gather_ms"] = milliseconds(lambda: [dist.all_gather_into_tensor(e, t.flatten()) for e, t in zip(gathered, (k, v))])
    found["message_mib"] = sum(t.numel() * t.element_size() for t in (k, v)) / 2**20
    return found


def overlap(trace: Path) -> dict[str, float]:
    """Returns from a profile how long NCCL's kernels run beside attention kernels (not those that merge steps), in us and as a share."""
    with gzip.open(trace, "rt") as file:
        events = json.load(file)["traceEvents"]
    kernels = [e for e in events if e.get("cat") == "kernel"]

    def spans(which: Callable[[str], bool]) -> list[tuple[float, float]]:
        return sorted((e["ts"], e["ts"] + e["dur"]) for e in kernels if which(e["name"]))

    nccl, ours = spans(lambda n: "nccl" in n.lower()), spans(lambda n: n.startswith(("volta_", "turing_")) and "merge" not in n)
    beside = sum(max(0.0, min(a[1], b[1]) - max(a[0], b[0])) for a in nccl for b in ours)
    total = sum(b - a for a, b in nccl)
    return {"nccl_us": total, "attention_us": sum(b - a for a, b in ours), "beside_us": beside, "share": beside / total if total else 0.0}


def profile(seqlen: int, device: torch.device, trace: Path) -> dict[str, float]:
    """Profiles forward and backward of the ring on all ranks. Rank 0 writes its trace and returns its `overlap`, others {}."""
    shards = [shard_sequence(t).contiguous() for t in tensors(seqlen, device)]
    call = both(lambda q, k, v: ring_attention(q, k, v, is_causal=True), *shards)
    call()
    torch.cuda.synchronize()
    dist.barrier()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]) as found:
        call()
        torch.cuda.synchronize()
    if dist.get_rank() == 0:
        found.export_chrome_trace(str(trace))
        return overlap(trace)
    return {}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--trace", type=Path, help="a .json.gz file")
    parser.add_argument("--seqlens", type=int, nargs="*", default=SEQLENS)
    arguments = parser.parse_args()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    first = dist.get_rank() == 0
    name, version = torch.cuda.get_device_name(device), volta_fa.__version__
    results: dict[str, Any] = {"ranks": dist.get_world_size(), "device": name, "volta_fa": version}
    if arguments.trace is not None:
        results["overlap"] = profile(32768, device, arguments.trace)
        if first:
            print("overlap at 32768:", {name: round(value, 3) for name, value in results["overlap"].items()}, flush=True)
    results["lines"] = []
    for seqlen in report.track(arguments.seqlens, "lengths") if first else arguments.seqlens:
        found = measure(seqlen, device)
        results["lines"].append(found)
        if first:
            print({name: {n: round(x, 3) for n, x in v.items()} if isinstance(v, dict) else v for name, v in found.items()}, flush=True)
            if arguments.json is not None:
                arguments.json.write_text(json.dumps(results, indent=1))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
