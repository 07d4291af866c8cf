"""Tests of `python -m volta_fa versus-1cat`, which runs volta_fa ("ours") and 1Cat-vLLM's package flash_attn_v100 ("theirs") at the shapes
that 1Cat-vLLM published. It prints a page and writes a JSON file: a row per shape with time (`ms`) and error as a share of the allowed one
(`share`), or why there are none (`missing`). A fake package with volta_fa's own functions stands for theirs. 1Cat-vLLM is a fork of vLLM
for V100s."""

import functools
import json
import sys
import types
from pathlib import Path

import pytest
import torch

from conftest import need
from volta_fa.check import versus
from volta_fa.check.kernels import Target
from volta_fa.cli import main
from volta_fa.integrations.flash_attn import v100


@pytest.fixture
def package(monkeypatch):
    """Installs a fake flash_attn_v100 with volta_fa's functions of the same names."""
    module = types.ModuleType("flash_attn_v100")
    module.__file__ = "site-packages/flash_attn_v100/__init__.py"
    vars(module).update({name: functools.partial(getattr(v100, name)) for name in v100.__all__})
    monkeypatch.setitem(sys.modules, "flash_attn_v100", module)
    return module


def run(tmp_path, capsys):
    """Returns the command's exit status, JSON file and page. The file has a row for each shape, whatever the outcomes are."""
    status = main(["versus-1cat", "--device", "cpu", "--output", str(tmp_path / "new" / "file.json")])
    data = json.loads((tmp_path / "new" / "file.json").read_text())
    assert len(data["rows"]) == len(versus.SHAPES) > 0
    return status, data, capsys.readouterr().out


def test_both_run(package, tmp_path, capsys):
    status, data, page = run(tmp_path, capsys)
    assert status == 0 and "did not run" not in page
    for row in data["rows"]:
        assert all(0 < row[name]["share"] <= 1 and row[name]["ms"] > 0 for name in ("volta_fa", "flash_attn_v100")), row
    assert len(page.splitlines()) < 45
    assert f"Send {tmp_path / 'new' / 'file.json'} to the person who gave you volta_fa." in page or "as an issue at https://" in page


def test_theirs_is_wrong_or_fails(package, monkeypatch, tmp_path, capsys):
    """Errors of theirs are in the page and the file, and do not change the exit status."""
    decode = package.flash_attn_decode_paged
    package.flash_attn_decode_paged_xqa_available = lambda: False
    package.flash_attn_decode_paged = lambda *args, **options: decode(*args, **options) * 1.1
    package.flash_attn_prefill_paged = lambda *args, **options: 1 / 0
    status, data, page = run(tmp_path, capsys)
    assert status == 0
    theirs = [(row["shape"]["kind"], row["flash_attn_v100"]) for row in data["rows"]]
    wrong = [found["share"] for kind, found in theirs if kind in ("decode", "verify")]
    assert len(wrong) == 6 and min(wrong) > 1
    assert [kind for kind, found in theirs if "ZeroDivisionError" in found["missing"]] == ["paged prefill"] * 3
    assert sum(kind == "paged prefill" for kind, _ in theirs) == 3
    assert "1Cat-vLLM did not run: ZeroDivisionError: division by zero" in page


def test_theirs_ends_all_use_of_the_gpu(package, monkeypatch, tmp_path, capsys):
    """After an illegal memory access by theirs nothing runs. Rows from before it stay in the file."""
    make, broken, message = versus.Inputs.__init__, [], "CUDA error: an illegal memory access was encountered"

    def init(self, *arguments):
        if broken:
            raise RuntimeError(message)
        make(self, *arguments)

    monkeypatch.setattr(versus.Inputs, "__init__", init)
    package.flash_attn_func = lambda *args, **options: broken.append(1) or 1 / 0
    status, data, page = run(tmp_path, capsys)
    assert status == 0 and all(row["volta_fa"]["share"] <= 1 for row in data["rows"])
    assert {row["flash_attn_v100"]["missing"] for row in data["rows"][1:]} == {f"RuntimeError: {message}"}
    assert "1Cat-vLLM did not run: RuntimeError: CUDA error" in page


def test_ours_is_wrong(monkeypatch, tmp_path, capsys):
    """Errors of ours give status 1, and messages show no paths of the machine."""
    right = versus.ours
    monkeypatch.setattr(versus, "ours", lambda inputs: lambda: right(inputs)().mul(1.02))
    status, data, _ = run(tmp_path, capsys)
    assert status == 1 and all(row["volta_fa"]["share"] > 1 for row in data["rows"])
    monkeypatch.setattr(versus, "ours", lambda inputs: lambda: Path("/home/joe/x/missing.so").read_text())
    status, data, page = run(tmp_path, capsys)
    assert status == 1 and "volta_fa did not run: FileNotFoundError" in page and "joe" not in page + str(data)
    assert not versus.is_wrong(versus.Outcome(missing="not enough memory")) and versus.is_wrong(versus.Outcome(ms=1.0, share=float("nan")))


@pytest.mark.parametrize("kind", ["dense prefill", "paged prefill", "verify"])
def test_a_wrong_query_row_shows(kind):
    """An error in the first, a middle or the last query row is found."""
    [shape, *_] = (shape.shortened() for shape in versus.SHAPES if shape.kind == kind)  # fewer queries and keys, for a CPU
    inputs = versus.Inputs(shape, torch.device("cpu"))
    out = versus.ours(inputs)()
    assert versus.error_share(inputs, out) <= 1
    for row in (0, shape.seqlen_q // 2, shape.seqlen_q - 1):
        changed = out.clone()
        changed[0, row, 3, 7] += 0.05
        assert versus.error_share(inputs, changed) > 1


def test_why_theirs_is_missing(monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(sys.modules, "flash_attn_v100", None)
    assert versus.package()[0] is None and "import flash_attn_v100: ModuleNotFoundError" in versus.package()[1]
    status, _, page = run(tmp_path, capsys)
    assert status == 0 and "1Cat-vLLM did not run: import flash_attn_v100" in page
    other = types.ModuleType("flash_attn_v100")
    monkeypatch.setitem(sys.modules, "flash_attn_v100", other)
    assert "not 1Cat-vLLM's" in versus.package()[1]
    other.__file__ = None  # of a folder without __init__.py
    assert "not 1Cat-vLLM's" in versus.package()[1]
    other.flash_attn_decode_paged = v100.flash_attn_decode_paged
    assert "volta_fa's stand-in" in versus.package()[1]


@pytest.mark.slow
def test_an_error_of_the_simulator_is_a_row(monkeypatch):
    """If the simulator fails, the row has the error, without paths, and the next rows are still made."""

    def fail(*arguments, **options):
        raise RuntimeError("volta-sim: no nvdisasm in /home/joe/bin/nvdisasm")

    monkeypatch.setattr(versus, "simulate", fail)
    found = list(versus.rows(Target.of("simulator")))
    assert found[0].ours.missing == "RuntimeError: volta-sim: no nvdisasm in nvdisasm" and versus.is_wrong(found[0].ours)
    assert found[-1].ours.missing == "takes too long to simulate" and not versus.is_wrong(found[-1].ours)


def test_the_simulator_times_ours(monkeypatch):
    need("sim")  # else skips
    # five draft tokens after a cache: 5 queries, 4096 keys, pages of 1616 tokens
    monkeypatch.setattr(versus, "SHAPES", (versus.Shape("verify", 5, 4096, 1616, "fp8_e5m2"), versus.SHAPES[-1]))
    first, last = versus.rows(Target.of("simulator"))
    assert 0.001 < first.ours.ms < 0.1 and first.ours.share is None and first.ours.kernels
    assert last.ours.missing == "takes too long to simulate"
