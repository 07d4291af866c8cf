"""The programs in examples/ run, as their documentation says."""

import os
import shutil
import subprocess
import sys

import pytest

from conftest import REPOSITORY


def run(name: str) -> str:
    path = [str(REPOSITORY / "python"), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, path))}
    command = [sys.executable, str(REPOSITORY / "examples" / name)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_sdpa():
    lines = run("sdpa.py").splitlines()
    assert lines[-4].endswith("{'ran': 2, 'traced': 0, 'fell_back': {}}")
    assert lines[-3].endswith("{'ran': 1, 'traced': 0, 'fell_back': {}}")
    assert lines[-2].endswith("{'ran': 0, 'traced': 0, 'fell_back': {'headdim': 1}}")
    assert lines[-1].endswith("{'ran': 1, 'traced': 0, 'fell_back': {}}")


def test_transformers_llama():
    pytest.importorskip("transformers", reason="transformers is not installed")
    logits, generation, training = run("transformers_llama.py").splitlines()[-3:]
    assert float(logits.split()[4].rstrip(",")) < 1e-2 and logits.endswith("2 calls of volta_fa::fwd in 2 layers")
    assert generation == "greedy generation: the same tokens"
    assert training.startswith("packed training step: loss 5.") and training.endswith(" 2 calls")


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")
def test_compile_and_package():
    assert "without the Python package: True" in run("compile_and_package.py")
