"""Heads before tokens, (batch, nheads, seqlen, headdim): the operator warns once in a process where that is likely."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

PROLOGUE = """
import torch, volta_fa
from volta_fa.integrations.flash_attn import fa3

def call(q, k, function=volta_fa.flash_attn_func):
    function(torch.randn(q), torch.randn(k), torch.randn(k))
"""
#: A program, the variable, and what its only warning says; None: it must not warn. Each in a process of its own.
SWAPPED = "call((1, 2, 100, 16), (1, 2, 100, 16))\n"
PROGRAMS = {
    "meant": (
        """
for q, k in [
    ((2, 256, 8, 16), (2, 256, 8, 16)),
    ((1, 5, 32, 16), (1, 5, 32, 16)),  # a short prompt
    ((1, 5, 128, 16), (1, 5, 8, 16)),  # the same of many heads, grouped
    ((1, 1, 128, 16), (1, 200, 128, 16)),  # decoding
    ((1, 80, 160, 16), (1, 77, 80, 16)),  # no numbers of heads
]:
    call(q, k)
""",
        "",
        None,
    ),
    "swapped, twice": (2 * SWAPPED, "", "[1, 2, 100, 16]: 100 heads and 2 tokens, expected (batch, seqlen, nheads, headdim)"),
    "grouped heads": ("call((1, 32, 512, 16), (1, 8, 512, 16))", "", "512 heads and 32 tokens"),
    "other tokens": ("call((1, 8, 256, 16), (1, 8, 128, 16))", "", "pass q.transpose(1, 2)"),
    "the operator": ("call((1, 8, 256, 16), (1, 8, 256, 16), torch.ops.volta_fa.fwd)", "", "256 heads"),
    "FlashAttention 3": ("call((1, 8, 256, 16), (1, 8, 256, 16), fa3.flash_attn_func)", "", "256 heads"),
    "silenced": (SWAPPED, "0", None),
    "later calls": ("for _ in range(100): call((1, 100, 2, 16), (1, 100, 2, 16))\n" + SWAPPED, "", None),
}


@pytest.mark.parametrize("program", PROGRAMS)
def test_heads_first(program):
    source, variable, text = PROGRAMS[program]
    environment = os.environ | {"VOLTA_FA_WARN_LAYOUT": variable}
    done = subprocess.run([sys.executable, "-c", PROLOGUE + source], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    warned = [line for line in done.stderr.splitlines() if "volta_fa: q: got shape" in line]
    assert len(warned) == (text is not None), done.stderr
    assert text is None or text in warned[0]
