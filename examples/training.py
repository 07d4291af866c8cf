"""Training with PyTorch's tools around volta_fa: autocast, activation checkpointing, a CUDA graph, DistributedDataParallel.

    python examples/training.py [autocast] [checkpointing] [cuda_graph] [ddp]
    (in a checkout: PYTHONPATH=python .venv/bin/python examples/training.py)

Runs the named parts, or all. Each compares its results with those of PyTorch's own attention. Without a GPU all run on the CPU, and the
step of `cuda_graph` runs eagerly.
"""

import os
import sys
import tempfile
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import volta_fa  # noqa: F401  registers the op

WORLD = 2  # processes of ddp
CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"


def ours(q, k, v, **options):
    return torch.ops.volta_fa.fwd(q, k, v, is_causal=True, **options)[0]  # out; the others are softmax_lse and rng_state


def theirs(q, k, v):
    return F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)), is_causal=True).transpose(1, 2)


class Block(torch.nn.Module):
    def __init__(self, attention, width: int = 64, nheads: int = 4):
        super().__init__()
        self.attention, self.nheads = attention, nheads
        self.qkv, self.out = torch.nn.Linear(width, 3 * width), torch.nn.Linear(width, width)

    def forward(self, x):
        # (batch, seqlen, nheads, headdim). Under autocast the linear layer returns fp16; the op would cast other dtypes to it.
        q, k, v = self.qkv(x).unflatten(-1, (3, self.nheads, -1)).unbind(2)
        return x + self.out(self.attention(q, k, v).flatten(2))


# ---- autocast: weights in fp32, attention in fp16 (a V100 has no bf16 tensor cores), a gradient scaler ---------------


def train(attention, steps: int = 30) -> list[float]:
    """Returns the losses. Step 10 has gradients that overflow: the scaler skips it and halves its scale."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Embedding(16, 64), Block(attention), torch.nn.Linear(64, 16)).to(DEVICE)
    tokens = torch.randint(16, (8, 32), device=DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scaler = torch.amp.GradScaler(DEVICE, init_scale=2.0**12)
    losses, skipped = [], 0
    for step in range(steps):
        optimizer.zero_grad()
        with torch.autocast(DEVICE, torch.float16):
            # the task: say the token before this one
            loss = F.cross_entropy(model(tokens)[:, 1:].flatten(0, 1).float(), tokens[:, :-1].flatten())
        factor = 1e30 if step == 10 else 1.0  # times the scale of 2^12 this exceeds fp16: its gradients are infinite
        scaler.scale(loss * factor).backward()
        before = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        skipped += scaler.get_scale() < before
        losses.append(loss.item())
    assert skipped == 1 and scaler.get_scale() == 2.0**11
    assert model[1].qkv.weight.dtype == model[1].qkv.weight.grad.dtype == torch.float32
    return losses


def autocast():
    found, expected = train(ours), train(theirs)
    print(f"loss {found[0]:.3f} -> {found[-1]:.3f}, with PyTorch's attention {expected[0]:.3f} -> {expected[-1]:.3f}, one step skipped")
    assert found[-1] < 0.8 * found[0]
    torch.testing.assert_close(found, expected, rtol=0.02, atol=0)


# ---- checkpointing: a second forward pass instead of memory, with attention recomputed or kept -----------------------


def keep_attention(context, op, *args, **kwargs):
    """A policy that keeps the result of attention, because that costs most to recompute."""
    return CheckpointPolicy.MUST_SAVE if op is torch.ops.volta_fa.fwd.default else CheckpointPolicy.PREFER_RECOMPUTE


WAYS = {
    "plain": partial(checkpoint, use_reentrant=False),
    "plain, reentrant": partial(checkpoint, use_reentrant=True),
    "selective": partial(checkpoint, use_reentrant=False, context_fn=lambda: create_selective_checkpoint_contexts(keep_attention)),
}


def gradients(attention, x, run=lambda block, x: block(x)) -> list[torch.Tensor]:
    """Returns the gradients of x and of the weights of two blocks. `run` runs each block."""
    torch.manual_seed(0)  # the same weights, and the same dropout in each run
    blocks = torch.nn.ModuleList(Block(attention) for _ in range(2)).to(x.device, x.dtype)
    out = x = x.detach().requires_grad_()
    for block in blocks:
        out = run(block, out)
    out.float().square().mean().backward()
    return [x.grad, *(p.grad for p in blocks.parameters())]


def checkpointing():
    """All gradients are bitwise identical to those without: a recomputed block drops the same elements as in the first pass."""
    x = torch.randn(2, 50, 64, device=DEVICE, dtype=torch.float16 if CUDA else torch.float32)
    for dropout_p in (0.0, 0.2):
        # `deterministic` because the GPU's default backward adds dq by atomics, in an order that changes from run to run
        attention = partial(ours, dropout_p=dropout_p, deterministic=True)
        expected = gradients(attention, x)
        for how, run in WAYS.items():
            assert all(map(torch.equal, gradients(attention, x, run), expected)), how
            print(f"dropout {dropout_p}, {how}: gradients bitwise identical")
        if dropout_p == 0:
            tolerance = {"rtol": 2e-2, "atol": 2e-3} if CUDA else {"rtol": 1e-4, "atol": 1e-6}
            for a, b in zip(expected, gradients(theirs, x), strict=True):
                torch.testing.assert_close(a, b, **tolerance)


# ---- cuda_graph: a step that is captured once, then replayed with other data -----------------------------------------


def attention_step(attention, q, k, v, dout):
    """Forward and backward: everything that a capture records."""
    out = attention(q, k, v)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), dout)]


def capture(inputs):
    """Returns the graph, and the tensors that each replay overwrites: out, dq, dk, dv."""
    # Kernels are loaded and memory is reserved at the first run: that must happen before the capture.
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        attention_step(ours, *inputs)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = attention_step(ours, *inputs)
    return graph, results


def cuda_graph():
    torch.manual_seed(0)
    options = {"device": DEVICE, "dtype": torch.float16 if CUDA else torch.float32}
    inputs = [torch.randn(2, 100, 4, 64, **options, requires_grad=i < 3) for i in range(4)]
    if CUDA:
        graph, results = capture(inputs)
    for _ in range(3):
        with torch.no_grad():
            for t in inputs:
                t.copy_(torch.randn_like(t))  # a graph reads the tensors that it was captured with
        if CUDA:
            graph.replay()
        else:
            results = attention_step(ours, *inputs)
        tolerance = {"rtol": 1e-2, "atol": 1e-2} if CUDA else {"rtol": 1e-4, "atol": 1e-5}
        expected = attention_step(theirs, *(t.detach().float().requires_grad_() for t in inputs))
        for a, b in zip(results, expected, strict=True):
            torch.testing.assert_close(a.float(), b, **tolerance)
    print(f"3 {'replays' if CUDA else 'eager steps, because a CUDA graph needs a GPU,'} agree with PyTorch's attention")


# ---- ddp: two processes with half of the batch each (NCCL with two GPUs or more, otherwise gloo on the CPU) ----------


def ddp_process(rank: int, meeting_point: str):
    """DDP's averaged gradients must agree with those of one process with the whole batch, which each process also computes."""
    nccl = torch.cuda.device_count() >= WORLD
    device = torch.device("cuda", rank) if nccl else torch.device("cpu")
    if nccl:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if nccl else "gloo", init_method=f"file://{meeting_point}", rank=rank, world_size=WORLD)

    torch.manual_seed(0)  # the same weights and data everywhere
    alone = Block(theirs).to(device)
    block = Block(ours).to(device)
    block.load_state_dict(alone.state_dict())
    batch = torch.randn(4, 30, 64).to(device)
    parallel = torch.nn.parallel.DistributedDataParallel(block)
    with torch.autocast("cuda", torch.float16, enabled=nccl):  # attention on a GPU is in fp16; on the CPU fp32 shows more
        parallel(batch.chunk(WORLD)[rank]).float().square().mean().backward()
    alone(batch).square().mean().backward()
    for found, expected in zip(parallel.parameters(), alone.parameters(), strict=True):
        tolerance = 2e-2 * expected.grad.abs().max().item() if nccl else 1e-6
        torch.testing.assert_close(found.grad, expected.grad, rtol=0, atol=tolerance)
    if rank == 0:
        print(f"{WORLD} processes, {dist.get_backend()}: gradients agree with those of one process and PyTorch's attention")
    dist.destroy_process_group()


def ddp():
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # one machine
    with tempfile.TemporaryDirectory() as folder:
        # spawned, not forked: neither CUDA nor PyTorch's threads work after a fork
        torch.multiprocessing.spawn(ddp_process, (str(Path(folder) / "meeting_point"),), nprocs=WORLD)


if __name__ == "__main__":
    parts = {part.__name__: part for part in (autocast, checkpointing, cuda_graph, ddp)}
    for name in sys.argv[1:] or parts:
        parts[name]()
