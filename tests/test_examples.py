"""The programs in examples/ run, as their documentation says."""

import os
import shutil
from collections.abc import Sequence

import pytest
import torch

import volta_fa
from conftest import REPOSITORY
from processes import run_forked

EXAMPLES = REPOSITORY / "examples"


def run(name: str, *arguments: object, launcher: Sequence[str] = (), **variables: str) -> str:
    """Returns what the example prints."""
    path = [str(REPOSITORY / "python"), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, path)), **variables}
    result = run_forked([*launcher, EXAMPLES / name, *arguments], environment, timeout=600)
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
def test_transformers_generation():
    pytest.importorskip("transformers", reason="transformers is not installed")
    *lines, int8, int4 = run("transformers_generation.py").splitlines()[-6:]
    assert int8.startswith("a cache in int8: ") and "torch.int8 (3, 2, " in int8 and "torch.uint8 (3, 2, " in int4
    if not torch.cuda.is_available():
        assert [line.partition(": ")[2] for line in lines] == 4 * ["100% of the tokens are eager's"]
    assert lines[1].startswith("beam search: ") and lines[2].startswith("static cache: ")


@pytest.mark.slow
def test_chat():
    pytest.importorskip("transformers", reason="transformers is not installed")
    first, said, second, again = run("chat.py", "--say", "hello", "--say", "and again", "--tokens", 8).splitlines()
    assert first == "[23 tokens, 0 of them in the cache, 0 pages]"
    # 23 + 8 - 1: the cache lacks the last generated token, which was never fed back
    assert second.startswith("[59 tokens, 30 of them in the cache, 2 pages]")
    assert said == again == "8 tokens of a model with random weights"


@pytest.mark.slow
def test_speculative():
    pytest.importorskip("transformers", reason="transformers is not installed")
    steps, same = run("speculative.py").splitlines()
    # the numbers of steps; the number of guesses is 4
    plain, guessed = (int(word) for word in steps.replace(":", " ").split() if word.isdigit() and int(word) > 4)
    assert guessed < plain
    if not torch.cuda.is_available():
        assert same == "the same tokens"


@pytest.mark.slow
def test_mla():
    """The example itself compares absorbed and expanded MLA."""
    pytest.importorskip("transformers.models.deepseek_v2", reason="no transformers with DeepSeek-V2")
    differ, sizes = run("mla.py").splitlines()
    assert "absorbed and expanded differ by" in differ and sizes.startswith("the cache holds ")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_torchscript(tmp_path):
    """The saved module takes the input of examples/cpp/attention.cpp, (2, 9, 32), and has gradients."""
    assert "agree with PyTorch's attention" in run("torchscript.py", tmp_path / "module.pt")
    module = torch.jit.load(str(tmp_path / "module.pt"))
    volta_fa.sdpa_stats(reset=True)
    with volta_fa.sdpa_enabled("cpu"):
        module(torch.randn(2, 9, 32)).sum().backward()
    assert volta_fa.sdpa_stats(reset=True)["ran"] == 1, "what the C++ program counts"
    assert all(p.grad is not None for p in module.parameters())


def test_cuda_graph():
    lines = run("cuda_graph.py").splitlines()
    if torch.cuda.is_available():
        assert lines == ["3 replays agree with PyTorch's attention"]
    else:
        assert lines == [
            "CUDA graphs need a GPU, and there is none: running the step eagerly on the CPU",
            "3 eager steps agree with PyTorch's attention",
        ]


#: Text in the last line of examples that check themselves.
LAST_LINES = {
    "autocast_training.py": "one step skipped",
    "checkpointing.py": "selective: gradients equal to the bit",
    "features.py": "with both: out and gradients agree",
    "flex.py": "agrees with eager attention in fp64",
    "flash_attn_training.py": "with PyTorch's attention",
}


@pytest.mark.parametrize("name", LAST_LINES)
def test_self_checking(name):
    assert LAST_LINES[name] in run(name).splitlines()[-1]


@pytest.mark.slow
@pytest.mark.skipif(not torch.distributed.is_available(), reason="no torch.distributed")
def test_ddp():
    assert "gradients agree" in run("ddp.py").splitlines()[-1]


@pytest.mark.slow
@pytest.mark.skipif(not torch.distributed.is_available(), reason="no torch.distributed")
def test_context_parallel():
    """Runs in a single process, and under torchrun on a mesh of 1 x 2."""
    assert "1 processes as 1 x 1" in run("context_parallel.py").splitlines()[-1]
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    output = run("context_parallel.py", launcher=torchrun, OMP_NUM_THREADS="1")
    assert "2 processes as 1 x 2" in output and "agree with those of one process" in output


def test_every_example_is_here_and_in_the_documentation():
    """This file names each example, or one that imports it, and a page of docs/ names each too."""
    tests = (REPOSITORY / "tests" / "test_examples.py").read_text()
    documentation = "".join(path.read_text() for path in (REPOSITORY / "docs").rglob("*.md"))
    programs = [path for path in EXAMPLES.glob("*.py") if f'"{path.name}"' in tests]
    for path in EXAMPLES.glob("*.py"):
        assert path in programs or any(f"from {path.stem} import" in program.read_text() for program in programs), path
        assert f"examples/{path.name}" in documentation, path


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")
def test_compile_and_package():
    output = run("compile_and_package.py")
    assert "an existing model, compiled: volta_fa::bwd volta_fa::fwd" in output
    assert "without the Python package: True" in output
