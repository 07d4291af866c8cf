"""Tests tools/gpu/flash_attn_tests.py, which runs a random sample of flash-attn's own test file on volta_fa.

That file is not in this repository, so FILE stands in for it. FILE has one instance of each thing that the tool replaces.
"""

from pathlib import Path

from processes import run_forked

REPOSITORY = Path(__file__).parents[1]

# FILE needs each replacement to pass:
# - `get_device_capability` and `device = "cuda"`: without them FILE needs a GPU;
# - `_get_block_size_n`: the shim lacks it, and the import fails;
# - `normalize_flash_attn_S`: must return its argument, and the original calls None;
# - the grid of 2 * 999 * 60 cases: must become a sample of those that `--max-seqlen` allows.
# Cases with causal=True fail on purpose. test_other must not run, because the default `--tests` do not name it.
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
    command = [str(REPOSITORY / "tools/gpu/flash_attn_tests.py"), str(file), "--device", "cpu", "--max-seqlen", "60"]

    def run(*arguments):
        return run_forked([*command, *arguments])

    result = run("--sample", "40", "--list", str(failed))
    assert result.returncode == 1, result.stdout + result.stderr
    # Causal cases fail with messages that differ in their numbers only. The tool reports these failures as one.
    count = len(failed.read_text().splitlines())
    assert 0 < count < 40
    assert f"{40 - count} passed, {count} failed, 0 skipped (seed 0)" in result.stdout
    assert f"{count} x test_flash_attn_kvcache" in result.stdout and "all have: causal=True" in result.stdout
    # --cases runs the failed cases again; --only draws from the cases that pass
    again = run("--cases", str(failed))
    assert f"0 passed, {count} failed" in again.stdout, again.stdout + again.stderr
    right = run("--sample", "7", "--only", "causal=False")
    assert right.returncode == 0 and "7 passed, 0 failed" in right.stdout, right.stdout + right.stderr
