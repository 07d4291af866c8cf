"""Tests of tools/suites.py, which runs test suites of other projects (flash-attn, FlashMLA, PyTorch's SDPA and FlexAttention) on volta_fa.

Small files, written by the tests, stand for the suites, which are not in this repository: each contains what the tool adapts. The tool
changes a suite's source where it needs another GPU or device (tools/suite_adapters.py), draws a sample of its cases, runs them in worker
processes, and groups failures. `run` returns the tool's exit status, output and JSON report."""

import json
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from processes import run_forked

TOOL = str(Path(__file__).parents[1] / "tools/suites.py")

#: Needs all that the adapter replaces: capability 9.0, "cuda", normalize_flash_attn_S, and in *_bounds tests RuntimeError, for which
#: volta_fa raises ValueError, if VOLTA_FA_CHECK_LENGTHS is set. Cases with causal=True fail with messages that differ only in numbers: one
#: group.
FLASH_ATTN = """
import os
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


@pytest.mark.parametrize("_", argvalues=[0])
def test_flash_attn_bounds(_):
    with pytest.raises(RuntimeError, match="x"):
        raise ValueError("x") if os.environ.get("VOLTA_FA_CHECK_LENGTHS") else KeyError


def test_other():
    raise RuntimeError
"""
#: Calls its test in a loop; the tool makes each call a case. Of the cases 4 of 16 fail: s_k = 3, with 2 batch sizes and 2 dtypes. The tool
#: leaves out those with h_kv = 2 or test_performance, which would fail too.
FLASH_MLA = """
import dataclasses
import torch
import kernelkit as kk
import flash_mla


@dataclasses.dataclass
class TestParam:
    b: int
    s_k: int
    h_kv: int = 1
    test_performance: bool = False


def test_flash_mla(t):
    print("----")
    print(f"Running on {t}...")
    torch.cuda.synchronize()
    lengths = torch.full((t.b,), t.s_k, dtype=torch.int32, device="cpu").cuda()
    assert t.h_kv == 1 and not t.test_performance
    q, cache = torch.zeros(t.b, 1, 1, 576), torch.zeros(1, 64, 1, 576)
    assert q.dtype != torch.float32
    table = torch.zeros(t.b, 1, dtype=torch.int32)
    out, lse = flash_mla.flash_mla_with_kvcache(q, cache, table, lengths, 512, *flash_mla.get_mla_metadata())
    assert kk.check("lse", lse.exp(), t.s_k)


def main(torch_dtype):
    device = torch.device("cuda:0")
    torch.set_default_dtype(torch_dtype)
    torch.set_default_device(device)
    torch.cuda.set_device(device)
    assert torch.cuda.get_device_capability()[0] == 9
    for t in [TestParam(b, s_k, h_kv, slow) for b in (1, 2) for s_k in (1, 2, 3, 60) for h_kv in (1, 2) for slow in (False, True)]:
        test_flash_mla(t)
"""
#: kernelkit, the module with which FlashMLA's tests compare results.
KIT = """
def check(name, found, expected):
    right = (found - expected).abs().max() < .001 and expected != 3
    if not right:
        print(f"`{name}` mismatch: {found.max()}")
    return right
"""
#: Cases that crash, hang, fall back or fail. test_removed fails without volta_fa too, test_override only with it. The tool does not
#: run TestSDPACUDA, for another device, and leaves out TestPrivateUse1, which builds a C++ extension.
SDPA = """
import os, signal, time, unittest
import torch
from test_cpp_extensions_open_device_registration import (
    generate_faked_module
)


class TestSDPA(unittest.TestCase):
    def test_passes(self):
        q = torch.ones(1, 1, 8, 8)
        assert torch.equal(torch.nn.functional.scaled_dot_product_attention(q, q, q), q)

    def test_falls_back(self):
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            self.test_passes()

    def test_override(self):
        q = torch.ones(1, 1, 8, 8)
        torch.nn.functional.scaled_dot_product_attention(q, q, q)
        assert not torch.ops.volta_fa._sdpa_stats()["ran"] if hasattr(torch.ops.volta_fa, "_sdpa_stats") else True

    def test_removed(self):
        assert generate_faked_module

    def test_crash(self):
        os.kill(os.getpid(), signal.SIGSEGV)

    def test_hangs(self):
        time.sleep(1000)

    def test_dropout_p_0_5(self):
        raise AssertionError

    @unittest.expectedFailure
    def test_xfail(self):
        raise AssertionError


class TestSDPACUDA(unittest.TestCase):
    device_type = "cuda"

    def test_other_device(self):
        raise AssertionError


class TestPrivateUse1(unittest.TestCase):
    def test_extension(self):
        raise AssertionError
"""
#: Compares compiled attention with eager attention, in which the tool must leave PyTorch's own. volta_fa cannot run test_squared.
FLEX = """
import functools
import unittest
import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention


class TestFlexAttention(unittest.TestCase):
    def run_test(self, score_mod, wrong=False):
        query, key, value = (torch.randn(1, 2, 150, 16) for _ in range(3))
        block_mask = create_block_mask(lambda b, h, q, kv: q >= kv, None, None, 150, 150, device="cpu")
        attention = functools.partial(flex_attention, score_mod=score_mod, block_mask=block_mask)
        with torch.profiler.profile() as eager:
            expected = attention(query, key, value)
        found = torch.compile(attention)(query, key, value)
        assert torch.allclose(found, 2 * expected if wrong else expected, atol=1e-5)
        assert "volta_fa::fwd" not in {event.key for event in eager.key_averages()}  # the reference is torch's own

    def test_scaled(self):
        self.run_test(lambda s, b, h, q, kv: 2 * s)

    def test_squared(self):
        self.run_test(lambda s, b, h, q, kv: s * s)

    def test_wrong(self):
        self.run_test(None, wrong=True)
"""


def run(folder: Path, suite: str, *arguments, forked=True, **files: str):
    """Writes a suite's files (`__` in a name: a folder) and runs the tool on them. `forked`: in a fork and without workers."""
    places = {"flash-attn": "flash-attention/tests", "flash-mla": "FlashMLA/tests"}
    tests = folder / places.get(suite, "pytorch/test")
    (tests / "inductor").mkdir(parents=True, exist_ok=True)
    for name, source in files.items():
        (tests / f"{name.replace('__', '/')}.py").write_text(source)
    command = [TOOL, suite, "--sources", folder, "--device", "cpu", "--json", folder / "report.json", *arguments]
    if forked:
        result = run_forked([*command, "--workers", "0"])
    else:
        result = subprocess.run([sys.executable, *map(str, command)], capture_output=True, text=True, timeout=900)
    assert (folder / "report.json").exists(), result.stdout + result.stderr
    return result.returncode, result.stdout + result.stderr, json.loads((folder / "report.json").read_text())


@pytest.mark.slow
def test_flash_attn_cases_are_sampled_and_failures_grouped(tmp_path):
    """40 cases of test_flash_attn_kvcache are drawn, and test_flash_attn_bounds adds one."""
    arguments = ["--where", "max(seqlen_q, seqlen_k) <= 60", "--tests", "*kvcache,*_bounds"]
    status, said, report = run(tmp_path, "flash-attn", *arguments, "--sample", "40", test_flash_attn=FLASH_ATTN)
    assert len(report["failures"]) == 1, said
    (group,) = report["failures"]
    assert (status, group["common"]) == (1, ["causal=True"]), said
    assert 0 < group["count"] < 40 and report["counts"] == {"failed": group["count"], "passed": 41 - group["count"], "did not run": 0}
    # --cases runs the failed cases again; another expression of --where draws from the cases that pass
    (tmp_path / "failed.txt").write_text("\n".join(group["cases"]))
    status, said, again = run(tmp_path, "flash-attn", "--cases", tmp_path / "failed.txt")
    assert again["counts"] == {"failed": group["count"], "did not run": 0}, said
    status, said, right = run(tmp_path, "flash-attn", "--sample", "7", "--where", "seqlen_k <= 60 and not causal", "--tests", "*kvcache")
    assert (status, right["counts"]) == (0, {"passed": 7, "did not run": 0}), said


def test_flash_mla_cases_of_a_loop_are_tests(tmp_path):
    status, said, report = run(tmp_path, "flash-mla", test_flash_mla_dense_decoding=FLASH_MLA, kernelkit=KIT)
    assert len(report["failures"]) == 1, said
    (group,) = report["failures"]
    assert (status, report["counts"]) == (1, {"passed": 12, "failed": 4, "did not run": 0}), said
    assert "s_k=3" in group["common"] and "`lse` mismatch: " in group["message"]
    status, said, report = run(tmp_path, "flash-mla", "--where", "b * s_k <= 2 and dtype == 'float16'")
    assert (status, report["counts"]) == (0, {"passed": 3, "did not run": 0}), said


@pytest.mark.slow
def test_workers_survive_crashes_and_long_cases(tmp_path):
    status, said, report = run(tmp_path, "sdpa", "--case-limit", "30", forked=False, test_transformers=SDPA)
    assert status == 1, said
    counts = {"passed": 1, "passed, with calls that PyTorch ran": 1, "failed": 5, "skipped": 2, "did not run": 0}
    assert report["counts"] == counts, said
    reasons = {case.rpartition("::")[2]: group["reason"] for group in report["failures"] for case in group["cases"]}
    assert reasons["test_removed"] == reasons["test_crash"] == reasons["test_hangs"] == "PyTorch alone fails too"
    # dropout: the case repeats the mask of PyTorch's own kernel. Line 19 is test_override's assert, in the source as the adapter changed it
    assert "dropout" in reasons["test_dropout_p_0_5"] and reasons["test_override"].startswith("line 19: AssertionError"), reasons
    assert int(re.search(r"FAILED test_transformers.py::TestSDPA::test_hangs, line 0: the process ended after (\d+) s", said)[1]) >= 30
    assert report["skipped"].keys() == {"left out: builds a C++ extension", "fails as the suite expects"}
    assert report["fell_back"] == {"sdpa_kernel": 1}


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 1])
def test_interrupted_run_prints_failures_at_once_and_reports_them(tmp_path, workers):
    """A failure is printed when it happens, and SIGTERM ends the run with a report. Else the run would wait for test_b until the limit."""
    source = "import time\ndef test_a():\n    assert 0\ndef test_b():\n    time.sleep(1000)\n"
    (tmp_path / "pytorch/test").mkdir(parents=True)
    (tmp_path / "pytorch/test/test_transformers.py").write_text(source)
    command = [sys.executable, TOOL, "sdpa", "--sources", tmp_path, "--device", "cpu", "--workers", workers, "--json", tmp_path / "report"]
    process = subprocess.Popen([*map(str, command)], stdout=subprocess.PIPE, text=True)
    limit = threading.Timer(250, process.kill)  # seconds, so that this test ends even if the tool does not
    limit.start()
    line = next((line for line in process.stdout if line.startswith("FAILED")), "")
    process.send_signal(signal.SIGTERM)
    rest, _ = process.communicate()
    limit.cancel()
    assert "test_a, line 3: AssertionError: assert 0" in line, rest
    assert process.returncode == 1, rest
    assert json.loads((tmp_path / "report").read_text())["counts"] == {"failed": 1, "did not run": 1}, rest


@pytest.mark.slow
def test_compiled_flex_attention_is_compared_with_torch(tmp_path):
    status, said, report = run(tmp_path, "flex", inductor__test_flex_attention=FLEX)
    counts = {"failed": 1, "passed": 1, "passed, with calls that PyTorch ran": 1, "did not run": 0}
    assert (status, report["counts"]) == (1, counts), said
    assert report["fell_back"] == {"mul of two scores": 1} and "test_wrong" in report["failures"][0]["cases"][0]
