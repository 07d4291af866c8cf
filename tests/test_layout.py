"""Heads before tokens, (batch, nheads, seqlen, headdim): flash-attn's functions warn once where that is likely."""

from __future__ import annotations

import warnings

import pytest
import torch

from volta_fa import flash_attn_func, flash_attn_kvpacked_func, flash_attn_qkvpacked_func, operands
from volta_fa.integrations.flash_attn import fa3

SWAPPED = [
    ((2, 8, 256, 16), (2, 8, 256, 16)),
    ((1, 32, 512, 16), (1, 8, 512, 16)),  # grouped heads
    ((1, 8, 256, 16), (1, 8, 128, 16)),  # other tokens
]
MEANT = [
    ((2, 256, 8, 16), (2, 256, 8, 16)),
    ((1, 5, 32, 16), (1, 5, 32, 16)),  # a short prompt
    ((1, 5, 128, 16), (1, 5, 8, 16)),  # the same of many heads, grouped
    ((1, 1, 128, 16), (1, 200, 128, 16)),  # decoding
    ((1, 80, 160, 16), (1, 77, 80, 16)),  # no numbers of heads
]


@pytest.fixture
def unwarned(monkeypatch):
    monkeypatch.setattr(operands, "_calls_left", 100)


@pytest.mark.parametrize("q_shape, k_shape", SWAPPED)
def test_heads_first_warns_once_at_the_caller(unwarned, q_shape, k_shape):
    q, k = torch.randn(q_shape), torch.randn(k_shape)
    with pytest.warns(UserWarning, match=r"(256|512) heads .*expected \(batch, seqlen, nheads, headdim\).*transpose") as caught:
        flash_attn_func(q, k, k)
    assert [w.filename for w in caught] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        flash_attn_func(q, k, k)


def test_heads_first_warns_for_packed_operands_and_flash_attn_3(unwarned, monkeypatch):
    for call in (
        lambda t: flash_attn_qkvpacked_func(torch.stack((t, t, t), 2)),
        lambda t: flash_attn_kvpacked_func(t, torch.stack((t, t), 2)),
        lambda t: fa3.flash_attn_func(t, t, t),
    ):
        monkeypatch.setattr(operands, "_calls_left", 100)
        with pytest.warns(UserWarning, match="heads come first") as caught:
            call(torch.randn(1, 2, 100, 16))
        assert [w.filename for w in caught] == [__file__]


@pytest.mark.parametrize("q_shape, k_shape", MEANT)
def test_a_meant_layout_does_not_warn(unwarned, q_shape, k_shape):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        flash_attn_func(torch.randn(q_shape), torch.randn(k_shape), torch.randn(k_shape))


def test_compiled_calls_do_not_look_at_the_layout(unwarned):
    t = torch.randn(1, 2, 100, 16)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "volta_fa")
        torch.compile(flash_attn_func, backend="aot_eager", fullgraph=True)(t, t, t)
    assert operands._calls_left == 100


def test_heads_first_can_be_silenced_and_traces_without_a_warning(unwarned):
    t = torch.randn(1, 2, 100, 16)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", category=DeprecationWarning)  # of torch.jit itself
        torch.jit.trace(flash_attn_func, (t, t, t), check_trace=False)
        assert operands._calls_left == 100
        warnings.filterwarnings("ignore", "volta_fa: q: got shape")
        flash_attn_func(t, t, t)
    assert operands._calls_left == 0


def test_later_calls_are_not_looked_at(unwarned, monkeypatch):
    monkeypatch.setattr(operands, "_calls_left", 1)
    meant, swapped = torch.randn(1, 100, 2, 16), torch.randn(1, 2, 100, 16)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        flash_attn_func(meant, meant, meant)
        flash_attn_func(swapped, swapped, swapped)
