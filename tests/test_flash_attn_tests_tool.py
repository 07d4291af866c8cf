"""tools/gpu/flash_attn_tests.py, with a file that has what it looks for in flash-attn's own, which is not in this repository."""

import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]

FILE = """
import pytest
import torch
from flash_attn import flash_attn_func
from flash_attn.flash_attn_interface import _get_block_size_n

is_sm90 = torch.cuda.get_device_capability("cuda") == (9, 0)


def normalize_flash_attn_S(attn_unnorm, q, k, v):
    return _get_block_size_n(attn_unnorm)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("seqlen_q,seqlen_k", [(i, 2 * i) for i in range(1, 1000)])
@pytest.mark.parametrize("scale", range(60))
def test_flash_attn_kvcache(seqlen_q, seqlen_k, causal, scale):
    device = "cuda"
    assert is_sm90 and seqlen_k == 2 * seqlen_q <= 60
    q = torch.ones(1, seqlen_q, 1, 8, device=device)
    assert torch.equal(normalize_flash_attn_S(q, q, q, q), q)
    assert not causal or flash_attn_func(q, q, q).sum() == 8 * seqlen_q + 1


@pytest.mark.parametrize("causal", [False])
def test_other(causal):
    raise RuntimeError
"""


def test_flash_attn_tests(tmp_path):
    file, failed = tmp_path / "test_flash_attn.py", tmp_path / "failed.txt"
    file.write_text(FILE)
    command = [sys.executable, str(REPOSITORY / "tools/gpu/flash_attn_tests.py"), str(file), "--device", "cpu", "--max-seqlen", "60"]

    def run(*arguments):
        return subprocess.run([*command, *arguments], capture_output=True, text=True)

    result = run("--sample", "40", "--list", str(failed))
    assert result.returncode == 1, result.stdout + result.stderr
    # two kinds of numbers, one message
    count = len(failed.read_text().splitlines())
    assert 0 < count < 40
    assert f"{40 - count} passed, {count} failed, 0 skipped (seed 0)" in result.stdout
    assert f"{count} x test_flash_attn_kvcache" in result.stdout and "all have: causal=True" in result.stdout
    # the same cases again, and others
    again = run("--cases", str(failed))
    assert f"0 passed, {count} failed" in again.stdout, again.stdout + again.stderr
    right = run("--sample", "7", "--only", "causal=False")
    assert right.returncode == 0 and "7 passed, 0 failed" in right.stdout, right.stdout + right.stderr
