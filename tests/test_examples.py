"""The programs in examples/ run, as their documentation says."""

import os
import shutil
import subprocess
import sys

import pytest

from conftest import REPOSITORY


def run(name: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY / "python")}
    command = [sys.executable, str(REPOSITORY / "examples" / name)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_sdpa():
    lines = run("sdpa.py").splitlines()
    assert lines[-3].endswith("{'ran': 2, 'traced': 0, 'fell_back': {}}")
    assert lines[-2].endswith("{'ran': 0, 'traced': 0, 'fell_back': {'attn_mask': 1}}")
    assert lines[-1].endswith("{'ran': 1, 'traced': 0, 'fell_back': {}}")


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")
def test_compile_and_package():
    assert "without the Python package: True" in run("compile_and_package.py")
