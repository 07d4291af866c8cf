"""Two copies of the package in one process, as a wheel and a copy from Hugging Face's hub. Each test in a process of its own."""

from __future__ import annotations

import os
import shutil
import subprocess
import textwrap
from pathlib import Path

import pytest

import volta_fa
from processes import run_forked

PACKAGE = Path(volta_fa.__file__).parent


@pytest.fixture
def copy(tmp_path) -> Path:
    """The package as `copied`, with its own libraries: PyTorch would not load a link to a library again."""
    result = tmp_path / "copied"
    shutil.copytree(PACKAGE, result, ignore=shutil.ignore_patterns("__pycache__"))
    return result


def run(copy: Path, code: str) -> subprocess.CompletedProcess:
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(copy.parent), str(PACKAGE.parent)])}
    return run_forked(["-c", textwrap.dedent(code)], environ, cwd="/")


@pytest.mark.parametrize("first", ["volta_fa", "copied"])
def test_a_copy_of_the_same_version_uses_the_loaded_library(copy, first):
    ran = run(
        copy,
        f"""
        import torch, {first}, volta_fa, copied
        assert volta_fa.info()["library"] == copied.info()["library"] == str({first}.library_path())
        q = torch.randn(1, 5, 2, 8, requires_grad=True)
        outs = [module.flash_attn_func(q, q, q, causal=True) for module in (volta_fa, copied)]
        grads = [torch.autograd.grad(out.sum(), q)[0] for out in outs]
        assert torch.equal(*outs) and torch.equal(*grads)
        copied.enable_sdpa("cpu")
        torch.nn.functional.scaled_dot_product_attention(*[q.detach().transpose(1, 2)] * 3)
        assert volta_fa.sdpa_stats()["ran"] == 1
        """,
    )
    assert ran.returncode == 0 and "Warning" not in ran.stderr, ran.stderr


def test_another_version_is_refused(copy):
    version = copy / "version.py"
    version.write_text(version.read_text().replace(volta_fa.__version__, "9.9.9"))
    ran = run(copy, "import volta_fa, copied")
    paths = [folder / Path(volta_fa.library_path()).relative_to(PACKAGE) for folder in (copy, PACKAGE)]
    message = f"ImportError: {paths[0]} (volta_fa 9.9.9) cannot be loaded beside {paths[1]} (volta_fa {volta_fa.__version__})"
    assert ran.returncode == 1 and message in ran.stderr and "install the same version of both" in ran.stderr, ran.stderr


def test_a_second_library_registers_nothing(copy):
    """PyTorch would abort the process."""
    library = copy / Path(volta_fa.library_path()).relative_to(PACKAGE)
    ran = run(
        copy,
        f"""
        import torch, volta_fa
        torch.ops.load_library({str(library)!r})
        q = torch.randn(1, 5, 2, 8)
        volta_fa.enable_sdpa("cpu")
        before = volta_fa.sdpa_stats().get("ran", 0)
        torch.nn.functional.scaled_dot_product_attention(*[q.transpose(1, 2)] * 3)
        print(volta_fa.info()["library"], volta_fa.sdpa_stats()["ran"] - before)
        """,
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.split() == [str(volta_fa.library_path()), "1"]
    assert f"{library} registers nothing: torch.ops.volta_fa comes from {volta_fa.library_path()}" in ran.stderr, ran.stderr


def test_a_library_that_was_loaded_before_the_package(copy):
    ran = run(copy, f"import torch; torch.ops.load_library({str(volta_fa.library_path())!r}); import volta_fa, copied")
    assert ran.returncode == 0 and not ran.stderr, ran.stderr
