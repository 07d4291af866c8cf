"""tools/torch_matrix.py, as far as it goes without environments: what it makes of verdicts, and what it refuses."""

import json
import stat

import pytest

pytest.importorskip("rich")

import torch_matrix
import torch_releases

GOOD = torch_matrix.Release("2.10.0", "2.10.0+cu128", "3.11.7", 100, {"stream": "ok", "inductor": "ok"})
BAD = torch_matrix.Release("2.15.0", "2.15.0+cu132", "3.11.7", 200, {"stream": "- c10::Stream tells it", "inductor": "AssertionError: no"})


def test_the_table():
    text = torch_matrix.markdown([GOOD, BAD], "volta_fa.whl", "2026-11-22")
    assert text.splitlines()[:4] == [
        "| | 2.10.0+cu128 | 2.15.0+cu132 |",
        "| --- | --- | --- |",
        "| stream | ok | - |",
        "| inductor | ok | fails |",
    ]
    assert "Absent (-): stream: c10::Stream tells it." in text
    assert GOOD.passed and not BAD.passed
    assert not torch_matrix.Release("2.10.0", checks={"environment": "uv failed"}).passed


def test_the_documentation_has_the_place_of_the_table(tmp_path, monkeypatch):
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


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["nowhere.whl"], "nowhere.whl does not exist"),
        ([__file__, "--releases", "2.6.0"], "invalid choice: '2.6.0'"),
        ([__file__, "--docs", "--releases", "2.10.0"], "--docs is for the whole matrix"),
    ],
)
def test_misuse(arguments, said, capsys):
    with pytest.raises(SystemExit) as stopped:
        torch_matrix.main(arguments)
    assert stopped.value.code == 2 and said in capsys.readouterr().err


UV = """#!/bin/sh
case "$1" in
venv) for folder; do :; done; mkdir -p "$folder/bin"; cp {python} "$folder/bin/python" ;;
pip) case "$*" in *torch==2.8.0*) echo "no wheel" >&2; exit 1 ;; esac ;;
esac
"""
PYTHON = """#!/bin/sh
case "$*" in
*-c*) echo 3.11.7 ;;
*transformers) echo '{{"torch": "2.7.1+cu126", "checks": {{"transformers": "ok"}}}}' ;;
*) test -z "$VOLTA_FA_SIMULATE" && echo '{{"torch": "2.7.1+cu126", "checks": {{"vmap": "{verdict}"}}}}' ;;
esac
"""


@pytest.mark.parametrize(
    "releases, verdict, status", [(["2.7.1"], "ok", 0), (["2.7.1"], "AssertionError: it is wrong", 1), (["2.8.0", "2.7.1"], "ok", 2)]
)
def test_what_becomes_of_releases(releases, verdict, status, tmp_path, monkeypatch, capsys):
    """With an uv and a Python that only play it; a release that cannot be tried does not keep others from it."""
    programs = {"python": PYTHON.format(verdict=verdict), "uv": UV.format(python=tmp_path / "python")}
    for name, text in programs.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755 | stat.S_IXUSR)
    monkeypatch.setattr(torch_matrix.shutil, "which", lambda name, path: str(tmp_path / name))
    monkeypatch.setenv("VOLTA_FA_SIMULATE", "1")
    output = tmp_path / "out"
    assert torch_matrix.main([__file__, "--releases", *releases, "--output", str(output)]) == status
    found = {release["release"]: release for release in json.loads((output / "matrix.json").read_text())}
    assert list(found) == releases
    assert found["2.7.1"]["checks"]["vmap"] == verdict
    assert len(found["2.7.1"]["checks"]) == 3  # and the oldest and the newest transformers
    printed = capsys.readouterr().out
    if status == 1:
        assert "torch 2.7.1: vmap: AssertionError: it is wrong" in printed
    if status == 2:
        assert "environment" in found["2.8.0"]["checks"] and "torch-2.8.0.log" in printed
        assert "no wheel" in (output / "torch-2.8.0.log").read_text()
    assert not (output / "torch-2.7.1").exists() and torch_releases.RELEASES
