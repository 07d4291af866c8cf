"""Problems of distributed_worker.py (attention over a sequence that is sharded over ranks), and the comparison of its results.

`whole_of` computes a problem in one process, `sharded` on all ranks, and `compare` compares them. `judge` compares fp16 and bf16 results
with the fp64 reference instead. A result is a list: out, dq, dk, dv, and dsinks if there are sinks (NAMES).
Zigzag, the default layout, gives rank r the chunks r and 2 * ranks - 1 - r of a sequence."""

import os

import torch
import torch.distributed as dist

import reference
from volta_fa.distributed import shard_sequence, unshard_sequence

#: With VOLTA_FA_TEST_NCCL=1 ranks communicate over NCCL and each has a GPU. Otherwise they are processes on the CPU, over gloo.
NCCL = os.environ.get("VOLTA_FA_TEST_NCCL") == "1"


def unroll(ranges):
    """Returns the numbers in ranges (begin, end): positions of a sequence, as `shard_ranges` gives them to a rank."""
    return [i for begin, end in ranges for i in range(begin, end)]


def inputs(dtype, device, *, seqlen=37, seqlen_k=None, nheads=4, nheads_k=2, headdim=16, headdim_v=None, batch=2, packed=False, seed=0):
    """Returns q, k, v and dout of the whole problem, the same on all ranks. `packed`: no batch dimension."""
    g = torch.Generator().manual_seed(seed)
    shapes = [
        (seqlen, nheads, headdim),
        (seqlen_k or seqlen, nheads_k, headdim),
        (seqlen_k or seqlen, nheads_k, headdim_v or headdim),
        (seqlen, nheads, headdim_v or headdim),
    ]
    return [torch.randn(*(shape if packed else (batch, *shape)), generator=g).to(dtype).to(device) for shape in shapes]


def whole_of(q, k, v, dout, sinks=None, cu_seqlens=None, **options):
    """Returns the result that the op computes in this process alone. `cu_seqlens`: a list, for packed sequences."""
    leaves = [t.detach().clone().requires_grad_() for t in (q, k, v, *([] if sinks is None else [sinks]))]
    if cu_seqlens is not None:
        cu = torch.tensor(cu_seqlens, dtype=torch.int32, device=q.device)
        options |= dict(cu_seqlens_q=cu, cu_seqlens_k=cu, max_seqlen_q=q.shape[0], max_seqlen_k=q.shape[0])
    out = torch.ops.volta_fa.fwd(*leaves[:3], sinks=leaves[3] if len(leaves) > 3 else None, **options)[0]
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


def sharded(attend, group, q, k, v, dout, sinks=None, layout="zigzag", cu_seqlens=None, **options):
    """Returns the same, computed by `attend` (ring_attention, ...) on this rank's shards and gathered from all ranks. dsinks is summed."""
    dim = 0 if cu_seqlens is not None else 1
    leaves = [shard_sequence(t, group, dim, layout).detach().clone().requires_grad_() for t in (q, k, v)]
    if sinks is not None:
        leaves.append(sinks.detach().clone().requires_grad_())
    out = attend(*leaves[:3], group, sinks=leaves[3] if sinks is not None else None, layout=layout, cu_seqlens=cu_seqlens, **options)
    assert out.dtype == q.dtype and out.shape == (*leaves[0].shape[:-1], v.shape[-1])
    grads = torch.autograd.grad(out, leaves, shard_sequence(dout, group, dim, layout))
    found = [unshard_sequence(t, group, dim, layout) for t in (out, *grads[:3])]
    if sinks is not None:
        total = grads[3].clone()
        dist.all_reduce(total)
        found.append(total)
    return found


#: Two dtypes that the device supports, for cases in which the dtype does not matter.
DTYPE, OTHER = (torch.float16, torch.bfloat16) if NCCL else (torch.float64, torch.float32)
NAMES = ("out", "dq", "dk", "dv", "dsinks")
#: Allowed error in fp64, relative to the larger of 1 and the largest element. softmax_lse, which merges steps, is fp32.
CLOSE = 2e-6


def compare(found, expected, what):
    """Checks shapes and errors (CLOSE) of a result. `what` begins the message of a failure."""
    for name, f, e in zip(NAMES, found, expected, strict=False):
        assert f.shape == e.shape, f"{what} {name}: {tuple(f.shape)}, expected {tuple(e.shape)}"
        if not e.numel():
            continue
        limit = CLOSE * max(1.0, e.abs().max().item())
        error = (f - e).abs().max().item()
        assert error <= limit, f"{what} {name}: off by {error:.2e}, expected at most {limit:.2e}"
    assert len(found) == len(expected)


#: Problems by name: options of the op, and arguments of `inputs`. `lengths`: packed sequences; `alibi`: slopes per head ("h") or per
#: entry and head ("bh"); `sinks`: whether there are any.
PROBLEMS = {
    "plain": {},
    "causal": dict(is_causal=True),
    "window": dict(window_left=5, window_right=3),
    "causal window": dict(is_causal=True, window_left=9),
    "odd causal": dict(is_causal=True, seqlen=41),
    "shorter than the chunks": dict(is_causal=True, seqlen=5),
    "one position": dict(is_causal=True, seqlen=1),
    "no position": dict(seqlen=0),
    "cross": dict(seqlen=19, seqlen_k=30),
    "cross causal": dict(seqlen=19, seqlen_k=30, is_causal=True),
    "more queries than keys": dict(seqlen=30, seqlen_k=19, is_causal=True),
    "softcap": dict(softcap=3.0, is_causal=True),
    "scale": dict(softmax_scale=0.4, headdim_v=24),
    "alibi": dict(alibi="h"),
    "alibi causal": dict(alibi="bh", is_causal=True),
    "alibi window": dict(alibi="h", window_left=6, window_right=4),
    "alibi cross": dict(alibi="h", seqlen=19, seqlen_k=30),
    "sinks": dict(sinks=True, is_causal=True),
    "sinks alone": dict(sinks=True, seqlen=30, seqlen_k=19, is_causal=True),
    "packed": dict(lengths=(7, 1, 12, 0, 17)),
    "packed causal": dict(lengths=(7, 1, 12, 0, 17), is_causal=True),
    "packed, one long": dict(lengths=(2, 60, 3), is_causal=True),
    "packed, many short": dict(lengths=(3, 2, 4, 1, 5, 2, 2, 3, 4, 6, 1, 2), is_causal=True),
    "packed window": dict(lengths=(20, 3, 18), window_left=4, window_right=1),
    "packed alibi sinks": dict(lengths=(20, 3, 18), alibi="bh", sinks=True, is_causal=True),
}


def problem(name, dtype, device, stretch=1):
    """Returns (q, k, v, dout) and the op's options of a problem, with all lengths and windows multiplied by `stretch`."""
    options = {"seqlen": 37} | PROBLEMS[name]
    for key in ("seqlen", "seqlen_k", "window_left", "window_right"):
        options |= {key: options[key] * stretch} if key in options else {}
    if "lengths" in options:
        options["lengths"] = tuple(n * stretch for n in options["lengths"])
    lengths, alibi, sinks = options.pop("lengths", None), options.pop("alibi", None), options.pop("sinks", False)
    sizes = {key: options.pop(key) for key in ("seqlen", "seqlen_k", "headdim_v") if key in options}
    if lengths is not None:
        sizes |= dict(seqlen=sum(lengths), packed=True)
        options["cu_seqlens"] = torch.tensor((0, *lengths)).cumsum(0).tolist()
    tensors = inputs(dtype, device, **sizes)
    nheads = tensors[0].shape[-2]
    if alibi:
        slopes = torch.tensor([0.5, 0.25, 0.11, 0.02], device=device)[:nheads]
        entries = len(lengths) if lengths is not None else tensors[0].shape[0]
        options["alibi_slopes"] = slopes if alibi == "h" else torch.stack([slopes * (i + 1) for i in range(entries)])
    if sinks:
        options["sinks"] = torch.tensor([0.3, -1.0, 2.0, -float("inf")], dtype=dtype, device=device)[:nheads]
    return tensors, options


def judge(what, tensors, found, cu_seqlens=None, **options):
    """Checks a result of the whole problem against the fp64 reference, within the budgets of `python -m volta_fa check`."""
    q, k, v, dout = tensors
    if cu_seqlens is not None:
        cu = torch.tensor(cu_seqlens, dtype=torch.int32, device=q.device)
        options |= dict(cu_seqlens_q=cu, cu_seqlens_k=cu)
    exact, results = reference.exact(q, k, v, **options), dict(zip(NAMES, found))
    for part in [*exact.forward(), *exact.backward(dout, results["out"])]:
        for error in part.errors(results):
            assert error.share <= 1, f"{what}: {error}"
