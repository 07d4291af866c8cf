"""Sequences that outgrow one GPU: FSDP2 and context parallelism on a mesh of two dimensions.

    torchrun --nproc-per-node 4 examples/context_parallel.py      # NCCL with as many GPUs, otherwise gloo on the CPU
    python examples/context_parallel.py                           # one process: everything works, nothing is shared

FSDP2 (`fully_shard`) shards the weights over all ranks. The first dimension of the mesh shards the batch, the second each sequence.
A rank holds the positions that `shard_sequence` gives it, of tokens, targets and position ids alike. Only attention exchanges data
between positions of different ranks. Every rank also computes the whole batch alone, and losses and gradients must agree.
"""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import volta_fa  # noqa: F401  registers the operators
from volta_fa.distributed import context_parallel_attention, shard_sequence

VOCABULARY, HEADS, HEADDIM, LAYERS, BATCH, SEQLEN, STEPS = 64, 4, 16, 2, 4, 96, 3


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        width = HEADS * HEADDIM
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x, attend):
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, HEADS, HEADDIM)).unbind(2)
        x = x + self.project(attend(q, k, v).flatten(2))
        return x + self.mlp(self.norm2(x))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        width = HEADS * HEADDIM
        self.token, self.position = nn.Embedding(VOCABULARY, width), nn.Embedding(SEQLEN, width)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, tokens, positions, attend):
        x = self.token(tokens) + self.position(positions)
        for block in self.blocks:
            x = block(x, attend)
        return self.head(x)


def one_process_attention(q, k, v):
    return torch.ops.volta_fa.fwd(q, k, v, is_causal=True)[0]  # out; the others are softmax_lse and rng_state


def mean_loss(model, tokens, targets, positions, attend, device):
    """Returns the loss summed over these positions, divided by the number of positions of the whole batch. Ranks' values add up to it."""
    with torch.autocast(device.type, torch.float16, enabled=device.type == "cuda"):
        logits = model(tokens, positions, attend)
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="sum") / (BATCH * SEQLEN)


def main():
    # what torchrun sets, for a process that it did not start
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}.items():
        os.environ.setdefault(name, value)
    if int(os.environ["WORLD_SIZE"]) > 1:  # gloo's own choice of a network needs a host name that resolves
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo" if os.environ["MASTER_ADDR"] in ("127.0.0.1", "localhost") else "")
    nccl = torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if nccl else torch.device("cpu")
    if nccl:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if nccl else "gloo")
    size, rank = dist.get_world_size(), dist.get_rank()
    # rows of the mesh, each with a part of the batch; the ranks of a row share its sequences
    replicas = 2 if size % 2 == 0 and size > 2 else 1
    mesh = init_device_mesh(device.type, (replicas, size // replicas), mesh_dim_names=("batch", "sequence"))
    sequence = mesh["sequence"]

    torch.manual_seed(0)  # the same weights on every rank
    reference = Model().to(device)
    model = Model().to(device)
    model.load_state_dict(reference.state_dict())
    all_ranks = mesh._flatten("all") if size > 1 else mesh["sequence"]
    for part in (*model.blocks, model):
        fully_shard(part, mesh=all_ranks)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.5) for m in (model, reference)]

    def attend(q, k, v):
        return context_parallel_attention(q, k, v, sequence, is_causal=True)

    generator = torch.Generator().manual_seed(1)
    for step in range(STEPS):
        text = torch.randint(VOCABULARY, (BATCH, SEQLEN + 1), generator=generator).to(device)
        positions = torch.arange(SEQLEN, device=device).expand(BATCH, -1)
        batch = (text[:, :-1], text[:, 1:], positions)
        mine = [shard_sequence(t.chunk(replicas)[mesh.get_local_rank("batch")], sequence) for t in batch]
        loss = mean_loss(model, *mine, attend, device)
        # FSDP averages gradients over the ranks. The ranks' losses are parts of a sum, so each is multiplied by their number.
        (loss * size).backward()
        total = loss.detach().clone()
        dist.all_reduce(total)
        expected = mean_loss(reference, *batch, one_process_attention, device)
        expected.backward()
        worst = 0.0
        for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
            gradient = ours.grad.full_tensor() if isinstance(ours.grad, DTensor) else ours.grad
            worst = max(worst, ((gradient - theirs.grad).abs().max() / theirs.grad.abs().max().clamp(min=1e-6)).item())
        tolerance = 2e-2 if nccl else 1e-4  # fp16 on GPUs
        assert abs(total - expected) < tolerance and worst < tolerance, (total.item(), expected.item(), worst)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if rank == 0:
            print(f"step {step}: loss {total.item():.4f}, of one process {expected.item():.4f}; gradients differ by {worst:.1e}")
    if rank == 0:
        shape = f"{replicas} x {size // replicas}"
        print(f"{size} processes as {shape} (batch x sequence), {dist.get_backend()}: losses and gradients agree with those of one process")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
    # Skips the interpreter's end: gloo's threads may still release tensors then, which aborts the process.
    sys.stdout.flush()
    os._exit(0)
