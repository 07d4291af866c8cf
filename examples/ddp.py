"""DistributedDataParallel over two processes.

    python examples/ddp.py                   (in a checkout: PYTHONPATH=python .venv/bin/python examples/ddp.py)

Each process has half of the batch; gradients are averaged while backward runs. They agree with those of one process that
has the whole batch and PyTorch's own attention. NCCL with two GPUs or more, otherwise gloo on the CPU.
"""

import os
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F

import volta_fa  # noqa: F401  registers the op

WORLD = 2


class Attention(torch.nn.Module):
    def __init__(self, ours: bool, width: int = 64, nheads: int = 4):
        super().__init__()
        self.ours, self.nheads = ours, nheads
        self.qkv = torch.nn.Linear(width, 3 * width)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, self.nheads, -1)).unbind(2)
        if self.ours:
            return torch.ops.volta_fa.fwd(q, k, v, is_causal=True)[0].flatten(2)
        by_head = (t.transpose(1, 2) for t in (q, k, v))
        return F.scaled_dot_product_attention(*by_head, is_causal=True).transpose(1, 2).flatten(2)


def model(ours: bool, device):
    torch.manual_seed(0)  # the same weights everywhere
    return Attention(ours).to(device)


def work(rank: int, meeting_point: str):
    nccl = torch.cuda.device_count() >= WORLD
    device = torch.device("cuda", rank) if nccl else torch.device("cpu")
    if nccl:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if nccl else "gloo", init_method=f"file://{meeting_point}", rank=rank, world_size=WORLD)

    batch = torch.randn(4, 30, 64, generator=torch.Generator().manual_seed(1)).to(device)
    parallel = torch.nn.parallel.DistributedDataParallel(model(True, device))
    with torch.autocast("cuda", torch.float16, enabled=nccl):  # attention on a GPU is in fp16; on the CPU fp32 shows more
        parallel(batch.chunk(WORLD)[rank]).float().square().mean().backward()

    alone = model(False, device)
    alone(batch).square().mean().backward()
    for found, expected in zip(parallel.parameters(), alone.parameters(), strict=True):
        tolerance = 2e-2 * expected.grad.abs().max().item() if nccl else 1e-6
        torch.testing.assert_close(found.grad, expected.grad, rtol=0, atol=tolerance)
    if rank == 0:
        print(f"{WORLD} processes, {dist.get_backend()}: gradients agree with those of one process and PyTorch's attention")
    dist.destroy_process_group()


def main():
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # one machine
    with tempfile.TemporaryDirectory() as folder:
        method = "spawn" if torch.cuda.device_count() >= WORLD else "fork"  # which CUDA does not survive, and is quicker
        torch.multiprocessing.start_processes(work, (str(Path(folder) / "meeting_point"),), nprocs=WORLD, start_method=method)


if __name__ == "__main__":
    main()
