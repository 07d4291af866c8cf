"""`python -m volta_fa demo --ranks N`: runs the demo in N processes (ranks). Each trains PyTorch's model alone, on whole sequences.
Together they train volta_fa's model by ring attention: each rank has its shard of the positions of every window."""

from __future__ import annotations

import os
import sys
import tempfile
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ..distributed import ring_attention, shard_sequence
from ..errors import CommandError
from . import report, run_demo
from .train import Run, Settings  # one model in training; sizes of model and training

#: Timeout of the group: enough for a late process on a busy machine, and a short wait after a process has ended.
_TIMEOUT = timedelta(minutes=5)


class ShardedRun(Run):
    """Trains on this process's positions of each window. All processes together take the step of a single one."""

    def _forward_backward(self, tokens: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Returns the loss of whole windows, (batch, seqlen) ids that every process has. Sums it and the gradients over the processes."""
        positions = shard_sequence(torch.arange(tokens.shape[1], device=tokens.device), dim=0)
        mine, expected = shard_sequence(tokens), shard_sequence(target)
        with torch.autocast(tokens.device.type, torch.float16, enabled=self.half):
            # this process's part of the mean over all positions
            loss = self.model(mine, expected, positions) * (mine.numel() / tokens.numel())
        self.scaler.scale(loss).backward()
        total = loss.detach().clone()
        for t in (total, *(p.grad for p in self.model.parameters() if p.grad is not None)):
            dist.all_reduce(t)
        return total


def ring(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return ring_attention(q, k, v, is_causal=True)


def run_on_ranks(ranks: int, settings: Settings, device: torch.device, output: Path) -> bool:
    """Runs the demo in `ranks` new processes. Returns whether the trainings agree, which rank 0 reports by a file."""
    if device.type == "cuda" and torch.cuda.device_count() < ranks:
        raise CommandError(
            f"--ranks {ranks}: this machine has {torch.cuda.device_count()} CUDA device(s), and each rank needs one; "
            "--device cpu works everywhere"
        )
    if not dist.is_available():
        raise CommandError(f"--ranks {ranks}: torch {torch.__version__} was built without torch.distributed")
    if settings.seqlen < 2 * ranks:
        raise CommandError(f"--ranks {ranks}: expected at most {settings.seqlen // 2}, because each rank has two chunks of a window")
    report.say(f"starting {ranks} processes ...")
    with tempfile.TemporaryDirectory() as folder:
        spawn: Any = torch.multiprocessing.spawn  # type: ignore[attr-defined]
        spawn(_work, (ranks, settings, device.type, output.absolute(), folder), nprocs=ranks)
        return (Path(folder) / "agree").exists()


def _work(rank: int, ranks: int, settings: Settings, device_type: str, output: Path, folder: str) -> None:
    """Runs the demo on one rank. Rank 0 prints and plots."""
    device = torch.device("cuda", rank) if device_type == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(max(1, torch.get_num_threads() // ranks))
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # one machine
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=rank, world_size=ranks, timeout=_TIMEOUT)
    if rank > 0:
        report.silence()
    report.say(f"{report.CANDIDATE} trains in {ranks} processes over {backend}, each with its share of the positions of every window")
    comparison = run_demo(settings, device, Path(folder) / str(rank) if rank else output, attention=ring, kind=ShardedRun)
    if rank == 0 and comparison.agree:
        (Path(folder) / "agree").touch()
    dist.barrier()
    dist.destroy_process_group()
    # gloo's threads may still free tensors, and PyTorch aborts a process whose interpreter ends meanwhile
    sys.stdout.flush()
    os._exit(0)
