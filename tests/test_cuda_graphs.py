"""CUDA graphs of `fwd` and `bwd`, captured by hand and by torch.compile(mode="reduce-overhead"), need a GPU.

A replay with other values, lengths or random numbers in the captured tensors must give what an eager call gives for them. `backend` is the
GPU with a dtype, and draws tensors there (`cuda`: fp16, `cuda-bf16`, `cuda-fp32`)."""

import pytest
import torch
from torch._dynamo.utils import counters

from conftest import captured, on, on_cases  # captured: the CUDA graph of a function, and the results that replays overwrite
from flash_attention import cu  # cu_seqlens of these lengths

#: Of q, k and v: (batch, seqlen, nheads, headdim).
SHAPE = (2, 40, 2, 64)
#: By name: options of the call, and functions of the backend that make its other tensors, whose values change between replays.
FEATURES = {
    "plain": ({}, {}),
    "causal, deterministic": ({"is_causal": True, "deterministic": True}, {}),
    "window": ({"window_left": 7, "window_right": 3}, {}),
    "bias": ({}, {"attn_bias": lambda b: b.randn(1, 2, 40, 40).requires_grad_()}),
    "bool bias": ({}, {"attn_bias": lambda b: b.randn(2, 1, 1, 40) > -1}),
    "slopes and sinks": ({}, {"alibi_slopes": lambda b: b.randn(2).float().abs(), "sinks": lambda b: b.randn(2).requires_grad_()}),
    "softcap": ({"softcap": 5.0}, {}),
    "lengths": ({}, {"seqused_k": lambda b: torch.randint(1, 41, (2,), device=b.device, dtype=torch.int32)}),
}

#: Features that kernels of each dtype have of their own. The others change scores, which do not depend on the dtype: fp16 suffices.
OF_EACH_DTYPE = ("plain", "causal, deterministic", "bias", "lengths")


def assert_close(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-2, atol=5e-3)  # dq is summed by atomics


def training_step(tensors, dout, options):
    """Returns out and the gradients of a call's tensors that require one."""
    inputs = [t for t in tensors.values() if t.requires_grad]
    out = torch.ops.volta_fa.fwd(**tensors, **options)[0]
    return [out.detach(), *torch.autograd.grad(out, inputs, dout)]


def assert_replays(make_tensors, dout, options):
    """Replayed on other values, a captured step gives what the call itself gives for them."""
    tensors = make_tensors()
    graph, results = captured(lambda: training_step(tensors, dout, options))
    for _ in range(3):
        values = make_tensors()
        with torch.no_grad():
            for name, t in tensors.items():
                t.copy_(values[name])
        graph.replay()
        assert_close(results, training_step(values, dout, options))


@on_cases((["cuda"], FEATURES), (["cuda-bf16", "cuda-fp32"], OF_EACH_DTYPE))
def test_replay(backend, case):
    options, extra = FEATURES[case]

    def tensors():
        return {**{n: backend.randn(*SHAPE).requires_grad_() for n in "qkv"}, **{n: make(backend) for n, make in extra.items()}}

    assert_replays(tensors, backend.randn(*SHAPE), options)


@on("cuda", "cuda-bf16")
def test_replay_of_packed_sequences(backend):
    """Each replay has other lengths, up to the maximum of 40 that the capture got."""
    draws = iter([n for n in ([30, 5, 5], [1, 38, 1], [0, 13, 27], [39, 0, 1]) for _ in range(2)])  # of queries, and of keys

    def tensors():
        lengths = {name: cu(next(draws), backend.device) for name in ("cu_seqlens_q", "cu_seqlens_k")}
        return {**{n: backend.randn(40, 2, 64).requires_grad_() for n in "qkv"}, **lengths}

    assert_replays(tensors, backend.randn(40, 2, 64), {"max_seqlen_q": 40, "max_seqlen_k": 40, "is_causal": True})


@on("cuda")
def test_replay_of_misaligned_and_odd_strides(backend):
    """Tensors that the op copies before its kernels read them are copied at each replay."""

    def tensors():
        return {n: torch.nn.functional.pad(backend.randn(*SHAPE), (3, 2))[..., 3:-2].detach().requires_grad_() for n in "qkv"}

    assert_replays(tensors, backend.randn(*SHAPE), {})


def dropout_step(backend, generator=None):
    """Returns a step that returns (out, rng_state, dv, dout). v is the identity, so out is the probabilities after dropout."""
    q, k, dout = backend.randn(2, 64, 2, 64), backend.randn(2, 64, 2, 64), backend.randn(2, 64, 2, 64)
    v = torch.eye(64, device=q.device, dtype=q.dtype).view(1, 64, 1, 64).expand(2, 64, 2, 64).contiguous().requires_grad_()

    def step():
        out, _, rng_state = torch.ops.volta_fa.fwd(q, k, v, dropout_p=0.4, generator=generator)
        return out.detach(), rng_state, torch.autograd.grad(out, v, dout)[0], dout

    return step


def assert_consistent(out, rng_state, dv, dout):
    """Checks that forward and backward dropped what rng_state says. dv is P^T dout."""
    p = out.transpose(1, 2)
    assert torch.equal(p != 0, torch.ops.volta_fa._dropout_mask(rng_state, 2, 2, 64, 64, 0.4).bool())
    expected = (p.float().transpose(2, 3) @ dout.float().transpose(1, 2)).transpose(1, 2)
    torch.testing.assert_close(dv.float(), expected, rtol=1e-2, atol=1e-2)  # ten eps of fp16


@pytest.mark.parametrize("own", [False, True], ids=["default generator", "own generator"])
@on("cuda")
def test_dropout_draws_anew_at_each_replay(backend, own):
    generator = torch.Generator("cuda").manual_seed(5) if own else None
    step = dropout_step(backend, generator)  # it holds the inputs, which replays read
    graph, results = captured(step, *([generator] if own else []))
    states, outs = [], []
    for _ in range(4):
        graph.replay()
        assert_consistent(*results)
        outs.append(results[0].clone())
        states.append(tuple(results[1].tolist()))
    assert len(set(states)) == 4 and not any(torch.equal(a, b) for a, b in zip(outs, outs[1:]))
    if not own:  # replays follow the seed
        outs.clear()
        for _ in range(2):
            torch.manual_seed(11)
            graph.replay()
            outs.append(results[0].clone())
        assert torch.equal(*outs)


class Attention(torch.nn.Module):
    """PyTorch's own call, with a mask, dropout and a headdim to pad, between projections."""

    def __init__(self, dropout_p):
        super().__init__()
        self.dropout_p, self.qkv = dropout_p, torch.nn.Linear(40, 120)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 20)).transpose(1, 3).unbind(2)
        mask = (torch.arange(24, device=x.device) % 5 > 0)[None]
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, mask, self.dropout_p) * 2


@pytest.mark.slow
@pytest.mark.parametrize("dropout_p", [0.0, 0.3], ids=["", "dropout"])
@on("cuda")
def test_reduce_overhead(backend, dropout_p):
    """Training with forward and backward in CUDA graphs; the profiler shows that graphs are launched."""
    volta_fa = pytest.importorskip("volta_fa")
    torch.compiler.reset()
    counters.clear()
    torch.manual_seed(0)
    layer = Attention(dropout_p).to(backend.device, backend.dtype)
    x = backend.randn(2, 24, 40)

    def step(module):
        torch.compiler.cudagraph_mark_step_begin()
        layer.zero_grad(set_to_none=True)
        out = module(x)
        out.float().square().sum().backward()
        return [out.detach().clone(), *(p.grad.clone() for p in layer.parameters())]

    expected = step(layer)
    with volta_fa.sdpa_enabled("cuda", force=True):  # force: also on GPUs newer than the kernels are for
        compiled = torch.compile(layer, fullgraph=True, mode="reduce-overhead")
        for _ in range(4):  # the first ones warm up and record
            found = step(compiled)
        activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities) as profiler:
            again = step(compiled)
        assert volta_fa.sdpa_stats(reset=True)["traced"] > 0  # calls that torch.compile recorded as volta_fa's
    launches = sum(event.count for event in profiler.key_averages() if event.key == "cudaGraphLaunch")
    assert launches >= 2, "one graph forward, one backward"
    assert counters["inductor"]["cudagraph_skips"] == 0
    if dropout_p == 0.0:
        torch.testing.assert_close(again, expected, rtol=2e-2, atol=5e-2)
    else:
        assert not torch.equal(found[0], again[0])
    torch.compiler.reset()
