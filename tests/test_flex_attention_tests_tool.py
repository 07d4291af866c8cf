"""Tests tools/gpu/flex_attention_tests.py, which runs torch's own FlexAttention tests on volta_fa.

That file is not in this repository, so FILE stands in for it: what it compiles is compared with an eager reference.
"""

import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]

# test_squared_mask passes on torch's own function, test_wrong_mask fails on purpose, and the last three must not run.
FILE = """
import functools
import unittest
import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

S = 2048


class TestFlexAttention(unittest.TestCase):
    def run_test(self, score_mod, mask_mod, wrong=False):
        assert S == 150
        query, key, value = (torch.randn(1, 2, S, 16) for _ in range(3))
        block_mask = create_block_mask(mask_mod, None, None, S, S, device="cpu")
        attention = functools.partial(flex_attention, score_mod=score_mod, block_mask=block_mask)
        expected = attention(query, key, value)
        found = torch.compile(attention)(query, key, value)
        assert torch.allclose(found, 2 * expected if wrong else expected, atol=1e-5)

    def test_builtin_mask(self):
        self.run_test(lambda s, b, h, q, kv: 2 * s, lambda b, h, q, kv: q >= kv)

    def test_squared_mask(self):
        self.run_test(lambda s, b, h, q, kv: s * s, lambda b, h, q, kv: q >= kv)

    def test_wrong_mask(self):
        self.run_test(None, lambda b, h, q, kv: q >= kv, wrong=True)

    def test_mask_kernel_options(self):
        raise RuntimeError

    def test_mask_cuda(self):
        raise RuntimeError

    def test_other(self):
        raise RuntimeError
"""


@pytest.mark.slow
def test_flex_attention_tests(tmp_path):
    file = tmp_path / "test_flex_attention.py"
    file.write_text(FILE)
    command = [sys.executable, str(REPOSITORY / "tools/gpu/flex_attention_tests.py"), str(file), "--device", "cpu", "--seqlen", "150"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 1, result.stdout + result.stderr
    last = result.stdout.strip().splitlines()[-1]
    assert last == "1 failed, 1 on torch's own function, 1 passed"
    assert "1 cases: no kernel for mul of two scores" in result.stdout
