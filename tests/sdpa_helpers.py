"""Problems and profiles of scaled_dot_product_attention, for test_sdpa*.py."""

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
    """Each test starts and ends with everything off and the counters at 0."""
    volta_fa.disable_sdpa()
    volta_fa.sdpa_stats(reset=True)
    yield
    volta_fa.disable_sdpa()


def enabled(backend=None):
    if backend is not None and backend.name == "sim":
        backend.monkeypatch.setenv("VOLTA_FA_SIMULATE", "1")
    if backend is not None and backend.device == "cuda":
        return volta_fa.sdpa_enabled("cuda", force=True)
    return volta_fa.sdpa_enabled("cpu")


def ops_of(f) -> set[str]:
    """The names of the ops that a call runs."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the profiler's own advice
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
            f()
    return ops_called(profiler)


OURS = {"volta_fa::fwd", "volta_fa::bwd"}


def is_fused(op: str) -> bool:
    return op.startswith("aten::_scaled_dot_product")


def assert_ours(f, backward: bool = True):
    ops = ops_of(f)
    assert (OURS if backward else {"volta_fa::fwd"}) <= ops, sorted(ops)
    assert not [op for op in ops if is_fused(op)]


def assert_theirs(f):
    ops = ops_of(f)
    assert not OURS & ops
    assert [op for op in ops if is_fused(op)], sorted(ops)


def leaves(*tensors):
    return [t.detach().clone(memory_format=torch.preserve_format).requires_grad_() for t in tensors]


def train(q, k, v, attention=F.scaled_dot_product_attention, **options):
    """out, dq, dk, dv for a gradient that depends on out."""
    inputs = leaves(q, k, v)
    out = attention(*inputs, **options)
    return [out.detach(), *torch.autograd.grad(out.square().sum(), inputs)]


def recompute_all(context, op, *args, **kwargs):
    return CheckpointPolicy.PREFER_RECOMPUTE


def selective(f, *inputs):
    """f, to be run again in the backward pass by selective checkpointing, which works by a dispatch mode."""
    contexts = functools.partial(create_selective_checkpoint_contexts, recompute_all)
    return checkpoint(f, *inputs, use_reentrant=False, context_fn=contexts)


@contextmanager
def unfused():
    """PyTorch's attention out of single operations, all in the dtype of the inputs: by default they are in fp32."""
    before = torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed()
    torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(True)
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(before)


def qkv(backend, *shape):
    return [backend.randn(*(shape or (2, 2, 9, 16))) for _ in range(3)]


def causal(q, k, v):
    return F.scaled_dot_product_attention(q * 2, k, v, is_causal=True)


class SelfAttention(torch.nn.Module):
    """A torch.nn.MultiheadAttention, called as an encoder calls it."""

    def __init__(self, dropout: float = 0.0):
        super().__init__()
        self.attention = torch.nn.MultiheadAttention(32, 2, dropout, batch_first=True)

    def forward(self, x, **masks):
        return self.attention(x, x, x, need_weights=False, **masks)[0]
