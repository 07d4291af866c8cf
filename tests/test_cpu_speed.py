"""The CPU backend: within 2x of PyTorch's own attention, and memory that grows with the sequence only."""

import time

import pytest
import torch

from conftest import CORES, LIBRARY, on
from test_autograd import run_python

SHAPE = (1, 8, 1024, 64)  # batch, heads, seqlen, headdim
ALLOWED = 2.0


@pytest.fixture
def all_cores():
    torch.set_num_threads(CORES)
    yield
    torch.set_num_threads(1)


def attention(which, q, k, v, is_causal):
    if which == "ours":
        return torch.ops.volta_fa.fwd(q, k, v, is_causal=is_causal)[0]
    heads = (t.transpose(1, 2) for t in (q, k, v))
    return torch.nn.functional.scaled_dot_product_attention(*heads, is_causal=is_causal).transpose(1, 2)


def timer(which, training, is_causal, q, k, v, dout):
    """A function that runs once and returns the seconds; for training, those of the backward pass."""
    inputs = [t.clone().requires_grad_(training) for t in (q, k, v)]

    def run():
        start = time.perf_counter()
        out = attention(which, *inputs, is_causal)
        if training:
            start = time.perf_counter()
            torch.autograd.grad(out, inputs, dout)
        return time.perf_counter() - start

    return run


@pytest.mark.slow
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("training", [False, True], ids=["forward", "backward"])
@on("cpu-fp32")
def test_within_twice_sdpa(backend, all_cores, training, is_causal):
    """Other work on the machine disturbs both: take turns, compare the best of each, and try again before failing."""
    b, h, s, d = SHAPE
    q, k, v, dout = (backend.randn(b, s, h, d) for _ in range(4))
    timers = {which: timer(which, training, is_causal, q, k, v, dout) for which in ("ours", "sdpa")}
    best = dict.fromkeys(timers, float("inf"))
    for attempt in range(6):
        for _ in range(6):
            for which, run in timers.items():
                best[which] = min(best[which], run())
        if best["ours"] <= ALLOWED * best["sdpa"]:
            break
    print({which: f"{1e3 * t:.1f} ms" for which, t in best.items()})
    assert best["ours"] <= ALLOWED * best["sdpa"], f"{best['ours'] / best['sdpa']:.2f} times the time of SDPA"
    torch.testing.assert_close(attention("ours", q, k, v, is_causal), attention("sdpa", q, k, v, is_causal), rtol=1e-4, atol=1e-5)


MEMORY = """
    import resource, sys, torch
    torch.ops.load_library(sys.argv[1])
    torch.set_num_threads(1)
    def peak():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    def step(seqlen):
        q, k, v = (torch.randn(1, seqlen, 1, 8, requires_grad=True) for _ in range(3))
        torch.ops.volta_fa.fwd(q, k, v, is_causal=True)[0].sum().backward()
    step(100)
    before = peak()
    step(int(sys.argv[2]))
    print((peak() - before) / 1024)
"""


def test_memory_is_linear():
    """At this length, one row of scores for each query, in fp32, would be 1 GiB."""
    mebibytes = float(run_python(MEMORY, LIBRARY, 16384))
    assert mebibytes < 64, f"{mebibytes:.0f} MiB"


@on("cuda")
def test_memory_is_linear_on_the_gpu(backend):
    """Beyond inputs and outputs: two fp32 numbers a row for the statistics, and dq in fp32."""
    def extra(seqlen):
        q, k, v, dout = (backend.randn(1, seqlen, 4, 64) for _ in range(4))
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        start = torch.cuda.memory_allocated()
        out, lse, _ = torch.ops.volta_fa.fwd(q, k, v)
        grads = torch.ops.volta_fa.bwd(dout, q, k, v, out, lse)
        kept = torch.cuda.memory_allocated() - start
        del grads
        return torch.cuda.max_memory_allocated() - start - kept, q.numel()

    for seqlen in (2048, 8192):
        scratch, elements = extra(seqlen)
        assert scratch <= 1.25 * 4 * elements + 2**21, f"{scratch} bytes for {elements} elements"
