"""Each program in examples/ runs in a process, exits with 0, and prints what its documentation says.

Most programs compare volta_fa with PyTorch themselves and fail if results differ, so tests look at a few printed lines only."""

import importlib.util
import shutil
from collections.abc import Sequence

import pytest
import torch

import volta_fa
from conftest import REPOSITORY
from processes import environment, output_of, run_forked, sources

EXAMPLES = REPOSITORY / "examples"


def run(name: str, *arguments: object, launcher: Sequence[str] = (), **variables: str) -> str:
    """Returns what the example prints. `launcher`: words of Python's command line before the example, for torchrun."""
    return output_of(run_forked([*launcher, EXAMPLES / name, *arguments], environment(*sources(), **variables), timeout=600))


def test_sdpa():
    """The last lines show `sdpa_stats`: of two layers, of a mask with dropout, of a headdim that falls back, and of the context manager."""
    lines = run("sdpa.py").splitlines()
    assert lines[-4].endswith("{'ran': 2, 'traced': 0, 'fell_back': {}}")
    assert lines[-3].endswith("{'ran': 1, 'traced': 0, 'fell_back': {}}")
    assert lines[-2].endswith("{'ran': 0, 'traced': 0, 'fell_back': {'headdim': 1}}")
    assert lines[-1].endswith("{'ran': 1, 'traced': 0, 'fell_back': {}}")


def test_transformers_models():
    pytest.importorskip("transformers", reason="transformers is not installed")
    logits, *lines, int8, int4, training = run("transformers_models.py").splitlines()[-8:]
    assert float(logits.split()[4]) < 1e-2 and logits.endswith("2 calls in 2 layers")
    if not torch.cuda.is_available():
        assert [line.partition(": ")[2] for line in lines] == 4 * ["100% of the tokens are eager's"]
    assert lines[1].startswith("beam search: ") and lines[2].startswith("static cache: ")
    assert int8.startswith("a cache in int8: ") and "torch.int8 (3, 2, " in int8 and "torch.uint8 (3, 2, " in int4
    assert training.startswith("packed training step: loss 5.") and training.endswith(" 2 calls")


@pytest.mark.slow
def test_chat():
    pytest.importorskip("transformers", reason="transformers is not installed")
    first, said, second, again = run("chat.py", "--say", "hello", "--say", "and again", "--tokens", 8).splitlines()
    assert first == "[23 tokens, 0 of them in the cache, 0 pages]"  # of the first prompt
    # The cache then has 23 + 8 - 1 = 30: it lacks the last generated token, which was never fed back.
    assert second.startswith("[59 tokens, 30 of them in the cache, 2 pages]")
    assert said == again == "8 tokens of a model with random weights"


@pytest.mark.slow
def test_paged_cache():
    pytest.importorskip("transformers", reason="transformers is not installed")
    steps, same = run("paged_cache.py").splitlines()
    # "one token a step: N steps; with 4 guesses: M steps": the numbers above 4 are N and M
    plain, guessed = (int(word) for word in steps.replace(":", " ").split() if word.isdigit() and int(word) > 4)
    assert guessed < plain
    if not torch.cuda.is_available():
        assert same == "the same tokens"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_torchscript(tmp_path):
    """The saved module takes the input of examples/cpp/attention.cpp, (2, 9, 64), runs on volta_fa, and has gradients."""
    assert "agree with PyTorch's attention" in run("export.py", "script", "--save", tmp_path / "module.pt")
    module = torch.jit.load(str(tmp_path / "module.pt"))
    volta_fa.sdpa_stats(reset=True)
    with volta_fa.sdpa_enabled("cpu"):
        module(torch.randn(2, 9, 64)).sum().backward()
    assert volta_fa.sdpa_stats(reset=True)["ran"] == 1, "what the C++ program counts"
    assert all(p.grad is not None for p in module.parameters())


#: Text that programs print which check themselves, by command line.
PRINTED = {
    "training.py autocast": "one step skipped",
    "training.py checkpointing": "selective: gradients bitwise identical",
    "training.py cuda_graph": f"3 {'replays' if torch.cuda.is_available() else 'eager steps'}",
    "features.py": "with both: out and gradients agree",
    "flex.py": "agrees with eager attention in fp64",
    "flash_attn_training.py": "with PyTorch's attention",
    "training.py ddp": "gradients agree",
    "mla.py": "absorbed and expanded differ by",
    "export.py compile package": "the package, without the Python package, returns (2, 33, 64)",
}
#: What slow ones of them need.
NEEDS = {
    "training.py ddp": (torch.distributed.is_available(), "no torch.distributed"),
    "mla.py": (importlib.util.find_spec("transformers") is not None, "transformers is not installed"),
    "export.py compile package": (shutil.which("g++") is not None, "no g++"),
}


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name in NEEDS)) for name in PRINTED])
def test_self_checking(name):
    found, reason = NEEDS.get(name, (True, ""))
    if not found:
        pytest.skip(reason)
    assert PRINTED[name] in run(*name.split())


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
    programs = [path for path in EXAMPLES.glob("*.py") if f'"{path.name}' in tests]
    for path in EXAMPLES.glob("*.py"):
        assert path in programs or any(f"from {path.stem} import" in program.read_text() for program in programs), path
        assert f"examples/{path.name}" in documentation, path
