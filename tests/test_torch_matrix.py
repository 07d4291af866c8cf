"""Tests of tools/torch_matrix.py, which installs a wheel with each torch release and runs some tests (CHECKS) there.

A fake uv and a fake python stand for the environments. A check is a row of the tool's table: "vmap", "flash attention impl" (PyTorch's
registry of attention implementations, which old releases lack). The matrix itself runs the last tests of this file with each release."""

import ctypes
import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("rich")

import check_build_env
import torch_matrix
import torch_releases
import volta_fa
from conftest import LIBRARY, NEEDS_COMPILER, REPOSITORY

# Release, installed torch, its Python, seconds, verdict of each check ("- reason": the release lacks what is checked).
GOOD = torch_matrix.Release("2.10.0", "2.10.0+cu128", "3.11.7", 100, {"stream": "ok", "inductor": "ok"})
BAD = torch_matrix.Release("2.15.0", "2.15.0+cu132", "3.11.7", 200, {"stream": "- c10::Stream tells it", "inductor": "AssertionError: no"})


def test_results_become_a_table():
    text = torch_matrix.markdown([GOOD, BAD], "volta_fa.whl", "2026-11-22")
    assert text.splitlines()[:5] == [
        "| | 2.10.0+cu128 | 2.15.0+cu132 |",
        "| --- | --- | --- |",
        "| Python | 3.11 | 3.11 |",
        "| stream | ok | - |",
        "| inductor | ok | fails |",
    ]
    assert "Absent (-): stream: c10::Stream tells it." in text
    assert GOOD.passed and not BAD.passed
    assert not torch_matrix.Release("2.10.0", checks={"environment": "uv failed"}).passed


def test_the_table_replaces_the_one_in_the_documentation(tmp_path, monkeypatch):
    text = torch_matrix.DOCS.read_text()
    assert [text.count(mark) for mark in torch_matrix.MARKS] == [1, 1]
    monkeypatch.setattr(torch_matrix, "DOCS", tmp_path / "install.md")
    torch_matrix.DOCS.write_text(text)
    torch_matrix.write_docs("| a table |\n")
    torch_matrix.write_docs("| another |\n")
    written = torch_matrix.DOCS.read_text()
    assert "| another |" in written and "| a table |" not in written
    assert written.split(torch_matrix.MARKS[0])[0] == text.split(torch_matrix.MARKS[0])[0]
    assert written.split(torch_matrix.MARKS[1])[1] == text.split(torch_matrix.MARKS[1])[1]


MISUSE = [
    (["nowhere.whl"], "nowhere.whl does not exist"),
    ([__file__, "--releases", "2.6.0"], "invalid choice: '2.6.0'"),
    ([__file__, "--docs", "--releases", "2.10.0"], "--docs is for the whole matrix"),
]


@pytest.mark.parametrize("arguments, said", MISUSE)
def test_misuse(arguments, said, capsys):
    with pytest.raises(SystemExit) as stopped:
        torch_matrix.main(arguments)
    assert stopped.value.code == 2 and said in capsys.readouterr().err


#: The fake uv: makes environments with the fake Python, and has no torch 2.8.0.
UV = """#!/bin/sh
case "$1" in
venv) for folder; do :; done; mkdir -p "$folder/bin"; cp {python} "$folder/bin/python" ;;
pip) case "$*" in *torch==2.8.0*) echo "no wheel" >&2; exit 1 ;; esac ;;
esac
"""
#: The fake Python: prints versions of Python, torch and transformers for -c. Else it is pytest, and writes a report.
PYTHON = """#!/bin/sh
case "$1" in
-c) echo 3.11.7 2.7.1+cu126 5.23.0 ;;
*) test -z "$VOLTA_FA_SIMULATE" || exit 3
   test -z "$PYTHONPATH" || test {oldest} = runs || exit 4
   for argument; do case $argument in --junitxml=*) report=${{argument#--junitxml=}} ;; esac; done
   cat > "$report" <<END
<testsuites><testsuite>
<testcase classname="tests.test_routes" name="test_vmap[cpu-fp32]">{result}</testcase>
<testcase classname="tests.test_routes" name="test_vmap[cuda]"><skipped message="no GPU"/></testcase>
<testcase classname="tests.test_kvcache_api" name="test_a_program_that_never_restores_pytorch"><skipped message="no registry"/></testcase>
</testsuite></testsuites>
END
   exit {status} ;;
esac
"""
WRONG = '<failure message="AssertionError: it is wrong&#10;more">a traceback</failure>'


@pytest.fixture
def pretend(tmp_path, monkeypatch):
    """Returns a function that installs the fake uv and Python: tests of the fake have this result (XML) and exit status. A release runs
    them with its transformers, then with the oldest, which PYTHONPATH names: with `oldest` "fails" the fake exits with 4 there. It exits
    with 3 if it inherits VOLTA_FA_SIMULATE."""

    def install(result: str, status: int, oldest: str = "runs") -> None:
        python = PYTHON.format(result=result, status=status, oldest=oldest)
        for name, text in {"python": python, "uv": UV.format(python=tmp_path / "python")}.items():
            (tmp_path / name).write_text(text)
            (tmp_path / name).chmod(0o755 | stat.S_IXUSR)
        monkeypatch.setattr(torch_matrix.shutil, "which", lambda name, path="": str(tmp_path / name))
        monkeypatch.setattr(torch_matrix, "old_libraries", lambda folder: folder)
        monkeypatch.setenv("VOLTA_FA_SIMULATE", "1")
        chosen = ("vmap", "flash attention impl")
        monkeypatch.setattr(torch_matrix, "CHECKS", {name: torch_matrix.CHECKS[name] for name in chosen})
        monkeypatch.setattr(torch_matrix, "TRANSFORMERS", ["test_routes.py::test_vmap[cpu-fp32]"])

    return install


def test_a_release_without_the_oldest_transformers(pretend, tmp_path, capsys):
    """If the environment with the oldest transformers fails, the release counts as not tried (status 2), with the verdicts before."""
    pretend(WRONG, 1, oldest="fails")
    assert torch_matrix.main([__file__, "--releases", "2.7.1", "--output", str(tmp_path / "out")]) == 2
    [release] = json.loads((tmp_path / "out" / "matrix.json").read_text())
    assert "wrong" in release["checks"]["vmap"] and "failed" in release["checks"]["environment"]


@pytest.mark.parametrize("releases, wrong, status", [(["2.7.1"], False, 0), (["2.7.1"], True, 1), (["2.8.0", "2.7.1"], False, 2)])
def test_verdict_and_exit_status(releases, wrong, status, pretend, tmp_path, capsys):
    """Status 1: a check failed. Status 2: an environment could not be made; the other releases are still tried."""
    pretend(WRONG if wrong else "", int(wrong))
    output = tmp_path / "out"
    assert torch_matrix.main([__file__, "--releases", *releases, "--output", str(output)]) == status
    found = {release["release"]: release for release in json.loads((output / "matrix.json").read_text())}
    assert list(found) == releases
    verdict = "test_vmap[cpu-fp32]: AssertionError: it is wrong" if wrong else "ok"
    transformers = dict.fromkeys(("transformers 5.23.0", "transformers 4.57.6"), verdict)
    assert found["2.7.1"]["checks"] == {"vmap": verdict, "flash attention impl": "- no registry", **transformers}
    printed = capsys.readouterr().out
    if status == 1:
        assert "torch 2.7.1: vmap: test_vmap[cpu-fp32]: AssertionError: it is wrong" in printed
    if status == 2:
        assert "environment" in found["2.8.0"]["checks"] and "torch-2.8.0.log" in printed
        assert "no wheel" in (output / "torch-2.8.0.log").read_text()
    assert not (output / "torch-2.7.1").exists()


def test_a_failure_without_a_message(tmp_path):
    report = tmp_path / "report.xml"
    for result, line in (
        ('<failure type="Failed">&#10;the first line of a traceback&#10;more</failure>', "the first line of a traceback"),
        ("<error/>", "error"),
        ('<error message=" "> </error>', "error"),
    ):
        case = f'<testcase classname="tests.test_routes" name="test_vmap">{result}</testcase>'
        report.write_text(f"<testsuites><testsuite>{case}</testsuite></testsuites>")
        assert torch_matrix.verdict(report, ["test_routes.py::test_vmap"]) == f"test_vmap: {line}"


def test_each_release_has_a_python_and_each_python_a_release():
    assert tuple(torch_matrix.PYTHONS) == torch_releases.RELEASES
    ours = range(check_build_env.PYTHON_OLDEST[1], check_build_env.PYTHON_NEWEST[1] + 1)
    # uv offers no Python 3.14: docs/reference/compatibility.md says what was tried with it
    assert set(torch_matrix.PYTHONS.values()) == {f"3.{minor}" for minor in ours} - {"3.14"}


@NEEDS_COMPILER
def test_old_userland_c_loads_the_library(tmp_path):
    """tools/old_userland.c loads torch and the library without Python, here with this system's C library, in the matrix Debian 11's."""
    program, source = tmp_path / "load", REPOSITORY / "tools" / "old_userland.c"
    subprocess.run(["gcc", "-O1", source, "-o", program, "-ldl", "-lm"], check=True)
    torch_libraries = [Path(torch.__file__).parent / "lib" / name for name in ("libc10.so", "libtorch_cpu.so")]

    def load(*libraries: Path) -> subprocess.CompletedProcess:
        return subprocess.run([program, *torch_libraries, *libraries], capture_output=True, text=True)

    ran = load(LIBRARY)
    assert ran.returncode == 0, ran.stderr
    missing = load(tmp_path / "libvolta_fa.so")
    assert missing.returncode == 1 and "libvolta_fa.so" in missing.stderr and load().returncode == 1


def test_a_machine_without_debians_packages(tmp_path, monkeypatch):
    """The libraries of Debian 11 need apt-get, unless a folder has them already."""
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(torch_matrix.Unavailable, match="no apt-get here"):
        torch_matrix.old_libraries(tmp_path / "old")
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "load").touch()
    assert torch_matrix.old_libraries(tmp_path / "old") == tmp_path / "old"


@pytest.mark.slow
def test_the_tests_of_the_table_exist():
    """pytest collects all tests that CHECKS and TRANSFORMERS name."""
    names = {f"tests/{test}" for tests in (*torch_matrix.CHECKS.values(), torch_matrix.TRANSFORMERS) for test in tests}
    command = [sys.executable, "-m", "pytest", "-q", "--collect-only", "-p", "no:cacheprovider", *sorted(names)]
    ran = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout[-2000:] + ran.stderr


# ---- with each release ------------------------------------------------------------------------------------------


def test_all_symbols_are_found():
    """RTLD_NOW resolves all functions of the library; by default the loader looks for a function at its first call."""
    ctypes.CDLL(str(volta_fa.library_path()), os.RTLD_NOW)


def test_torch_exports_the_function_of_the_stream():
    """Before torch 2.11 the library asks this function for the current CUDA stream (torch_ops/stream.cpp). The linker checks no name."""
    libtorch_cuda = Path(torch.__file__).parent / "lib/libtorch_cuda.so"
    if not libtorch_cuda.exists():
        pytest.skip("this torch has no CUDA")
    assert torch_releases.defines(libtorch_cuda, torch_releases.STREAM_FUNCTION)
    assert not torch_releases.defines(libtorch_cuda, torch_releases.STREAM_FUNCTION + "s")


def test_the_libraries_of_an_older_linux():
    """Loads the libraries and computes with them, without Python."""
    if "OLD_USERLAND" not in os.environ:
        pytest.skip("tools/torch_matrix.py names no older libraries")
    torch_package = Path(torch.__file__).parent
    assert not torch_matrix.complaint(Path(os.environ["OLD_USERLAND"]), torch_package, volta_fa.library_path())
