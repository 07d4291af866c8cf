"""Problems of distributed_worker.py (attention over a sequence that is sharded over ranks), and the comparison of its results.

`whole_of` computes a problem in one process, `sharded` on all ranks, and `compare` compares them. `judge` compares fp16 and bf16 results
with the fp64 reference instead. A result is a list: out, dq, dk, dv, and dsinks if there are sinks (NAMES).
Zigzag, the default layout, gives rank r the chunks r and 2 * ranks - 1 - r of a sequence."""

import dataclasses
import math
import os

import torch
import torch.distributed as dist

import reference
from volta_fa.distributed import shard_sequence, unshard_sequence

#: A problem, and what draws its tensors (volta_fa/check/cases.py).
Case, CpuSource = reference.cases.Case, reference.cases.CpuSource

#: With VOLTA_FA_TEST_NCCL=1 ranks communicate over NCCL and each has a GPU. Otherwise they are processes on the CPU, over gloo.
NCCL = os.environ.get("VOLTA_FA_TEST_NCCL") == "1"


def unroll(ranges):
    """Returns the numbers in ranges (begin, end): positions of a sequence, as `shard_ranges` gives them to a rank."""
    return [i for begin, end in ranges for i in range(begin, end)]


def sized(seqlen=37, seqlen_k=None, lengths=(), **fields):
    """Returns a Case. `lengths`: of packed sequences."""
    sizes = {"headdim": 16, "nheads": 4, "nheads_k": 2} | fields
    return Case(seqlen, seqlen if seqlen_k is None else seqlen_k, lengths=tuple((n, n) for n in lengths), **sizes)


def inputs(dtype, device, **sizes):
    """Returns q, k, v and dout of the whole problem, the same on all ranks. `sizes`: arguments of `sized`."""
    return sized(**sizes).inputs(CpuSource(device, dtype, seed=0))


def whole_of(q, k, v, dout, sinks=None, **options):
    """Returns the result that the op computes in this process alone."""
    leaves = [t.detach().clone().requires_grad_() for t in (q, k, v, *([] if sinks is None else [sinks]))]
    out = torch.ops.volta_fa.fwd(*leaves[:3], sinks=leaves[3] if len(leaves) > 3 else None, **options)[0]
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


def sharded(attend, group, q, k, v, dout, sinks=None, layout="zigzag", **options):
    """Returns the same, computed by `attend` (ring_attention, ...) on this rank's shards and gathered from all ranks. dsinks is summed.
    `group`: a process group or mesh; None: all ranks."""
    # the op's four options of packed tensors; `attend` takes one cu_seqlens, for queries and keys
    cu_seqlens, *_ = (options.pop(name, None) for name in ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"))
    dim = 1 if cu_seqlens is None else 0
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
#: Allowed error in fp64, relative to the larger of 1 and the largest element. fp32 softmax_lse merges the results of a ring's steps.
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


#: Problems by name. `alibi`: slopes of each head ("h"), or of each batch entry or sequence and head ("bh"). `sinks`: "own", of q's dtype.
#: In "sinks alone" the first queries see no key, only their head's sink.
PROBLEMS = {
    "plain": sized(),
    "causal": sized(is_causal=True),
    "window": sized(window_left=5, window_right=3),
    "causal window": sized(is_causal=True, window_left=9),
    "odd causal": sized(is_causal=True, seqlen=41),
    "shorter than the chunks": sized(is_causal=True, seqlen=5),
    "one position": sized(is_causal=True, seqlen=1),
    "no position": sized(seqlen=0),
    "cross": sized(seqlen=19, seqlen_k=30),
    "cross causal": sized(seqlen=19, seqlen_k=30, is_causal=True),
    "more queries than keys": sized(seqlen=30, seqlen_k=19, is_causal=True),
    "softcap": sized(softcap=3.0, is_causal=True),
    "scale": sized(softmax_scale=0.4, headdim_v=24),
    "alibi": sized(alibi="h"),
    "alibi causal": sized(alibi="bh", is_causal=True),
    "alibi window": sized(alibi="h", window_left=6, window_right=4),
    "alibi cross": sized(alibi="h", seqlen=19, seqlen_k=30),
    "sinks": sized(sinks="own", is_causal=True),
    "sinks alone": sized(sinks="own", seqlen=30, seqlen_k=19, is_causal=True),
    "packed": sized(lengths=(7, 1, 12, 0, 17)),
    "packed causal": sized(lengths=(7, 1, 12, 0, 17), is_causal=True),
    "packed, one long": sized(lengths=(2, 60, 3), is_causal=True),
    "packed, many short": sized(lengths=(3, 2, 4, 1, 5, 2, 2, 3, 4, 6, 1, 2), is_causal=True),
    "packed window": sized(lengths=(20, 3, 18), window_left=4, window_right=1),
    "packed alibi sinks": sized(lengths=(20, 3, 18), alibi="bh", sinks="own", is_causal=True),
}


def problem(name, dtype, device, stretch=1):
    """Returns (q, k, v, dout) and the op's options of a problem, with all lengths and windows multiplied by `stretch`."""
    case = PROBLEMS[name]
    numbers = {n: getattr(case, n) for n in ("seqlen_q", "seqlen_k", "window_left", "window_right")}
    longer = {n: number * stretch for n, number in numbers.items() if number > 0}
    case = dataclasses.replace(case, **longer, lengths=tuple((q * stretch, k * stretch) for q, k in case.lengths))
    tensors, options = case.problem(CpuSource(device, dtype, seed=0))
    if case.sinks:
        options["sinks"][-1] = -math.inf  # the last head has none
    return tensors, options


def judge(what, tensors, found, **options):
    """Checks a result of the whole problem against the fp64 reference, within the budgets of `python -m volta_fa check`."""
    q, k, v, dout = tensors
    exact, results = reference.exact(q, k, v, **options), dict(zip(NAMES, found))
    for part in [*exact.forward(), *exact.backward(dout, results["out"])]:
        for error in part.errors(results):
            assert error.share <= 1, f"{what}: {error}"
