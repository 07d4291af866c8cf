"""Helpers of test_sdpa*.py, which test that volta_fa runs PyTorch's scaled_dot_product_attention while `enable_sdpa` is on.

"ours" means the ops volta_fa::fwd and volta_fa::bwd, "theirs" PyTorch's attention ops (fused, or math). The profiler shows which of them
ran. A `backend` (conftest.py) is the CPU, the simulator or a GPU with a dtype, in which it draws tensors."""

import functools
import warnings
from contextlib import contextmanager

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import volta_fa
from conftest import ops_called

FLASH, EFFICIENT, MATH, CUDNN = SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH, SDPBackend.CUDNN_ATTENTION


@pytest.fixture(autouse=True)
def switched_off():
    """Disables the switch before and after each test, and starts with counters (`sdpa_stats`) of 0. In modules that import it alone."""
    volta_fa.disable_sdpa()
    volta_fa.sdpa_stats(reset=True)
    yield
    volta_fa.disable_sdpa()


def enabled(backend=None):
    """Returns a context manager that enables the switch for the backend's device, by default for the CPU. With `sim`, calls are
    simulated until the test ends."""
    if backend is not None and backend.name == "sim":
        backend.monkeypatch.setenv("VOLTA_FA_SIMULATE", "1")
    if backend is not None and backend.device == "cuda":
        return volta_fa.sdpa_enabled("cuda", force=True)  # force: also on GPUs newer than Turing
    return volta_fa.sdpa_enabled("cpu")


def ops_of(f) -> set[str]:
    """Returns the names of the ops that f() runs."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the profiler
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
            f()
    return ops_called(profiler)


OURS = {"volta_fa::fwd", "volta_fa::bwd"}


def is_theirs(op: str) -> bool:
    """Returns whether an op is one of PyTorch's, fused or math, its fallback."""
    return op.startswith("aten::_scaled_dot_product")


def assert_ours(f, backward: bool = True):
    """Checks that f() runs our ops and none of theirs. `backward`: f also computes gradients."""
    ops = ops_of(f)
    assert (OURS if backward else {"volta_fa::fwd"}) <= ops, sorted(ops)
    assert not [op for op in ops if is_theirs(op)]


def assert_theirs(f):
    """Checks that f() runs PyTorch's ops of attention and none of ours."""
    ops = ops_of(f)
    assert not OURS & ops
    assert [op for op in ops if is_theirs(op)], sorted(ops)


def leaves(*tensors):
    """Returns copies that require a gradient."""
    return [t.detach().clone(memory_format=torch.preserve_format).requires_grad_() for t in tensors]


def train(q, k, v, attention=F.scaled_dot_product_attention, **options):
    """Returns out, dq, dk and dv of the loss sum(out^2), whose gradient depends on out."""
    inputs = leaves(q, k, v)
    out = attention(*inputs, **options)
    return [out.detach(), *torch.autograd.grad(out.square().sum(), inputs)]


def recompute_all(context, op, *args, **kwargs):
    """A checkpointing policy that stores no op's result."""
    return CheckpointPolicy.PREFER_RECOMPUTE


def selective(f, *inputs):
    """Runs f(*inputs) under selective checkpointing, which runs f again in backward. PyTorch implements it as a dispatch mode."""
    contexts = functools.partial(create_selective_checkpoint_contexts, recompute_all)
    return checkpoint(f, *inputs, use_reentrant=False, context_fn=contexts)


@contextmanager
def unfused():
    """Makes PyTorch compute attention by single operations (MATH), in the dtype of the inputs instead of fp32."""
    before = torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed()
    torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(True)
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(before)


def qkv(backend, *shape):
    """Returns q, k and v, (batch, nheads, seqlen, headdim)."""
    return [backend.randn(*(shape or (2, 2, 9, 16))) for _ in range(3)]


def causal(q, k, v):
    """A function that tests call, script and compile: causal attention of q * 2."""
    return F.scaled_dot_product_attention(q * 2, k, v, is_causal=True)


class SelfAttention(torch.nn.Module):
    """A torch.nn.MultiheadAttention, called as an encoder calls it."""

    def __init__(self, dropout: float = 0.0):
        super().__init__()
        self.attention = torch.nn.MultiheadAttention(32, 2, dropout, batch_first=True)

    def forward(self, x, **masks):
        return self.attention(x, x, x, need_weights=False, **masks)[0]
