"""`python -m volta_fa versus-1cat`: both implementations, their errors, the file. volta_fa's own functions play 1Cat-vLLM's package."""

from __future__ import annotations

import functools
import json
import re
import sys
import types
from pathlib import Path

import pytest
import torch

from volta_fa import lines
from volta_fa.check import versus
from volta_fa.check.kernels import Target
from volta_fa.cli import main
from volta_fa.integrations.flash_attn import v100, v100_paged


@pytest.fixture
def package(monkeypatch):
    """What 1Cat-vLLM's package offers."""
    module = types.ModuleType("flash_attn_v100")
    module.__file__ = "site-packages/flash_attn_v100/__init__.py"
    vars(module).update({name: functools.partial(getattr(of, name)) for of in (v100, v100_paged) for name in of.__all__})
    monkeypatch.setitem(sys.modules, "flash_attn_v100", module)
    return module


def run(tmp_path, capsys):
    status = main(["versus-1cat", "--device", "cpu", "--output", str(tmp_path / "new" / "file.json")])
    return status, json.loads((tmp_path / "new" / "file.json").read_text()), capsys.readouterr().out


def test_both_run(package, tmp_path, capsys):
    status, data, page = run(tmp_path, capsys)
    assert status == 0 and len(data["rows"]) == len(versus.SHAPES) and "did not run" not in page
    for row in data["rows"]:
        assert all(0 < row[name]["share"] <= 1 and row[name]["ms"] > 0 for name in ("volta_fa", "flash_attn_v100")), row
    assert len(page.splitlines()) < 45
    assert f"Send {tmp_path / 'new' / 'file.json'} to the person who gave you volta_fa." in page or "as an issue at https://" in page


def test_shows_progress(package, tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(lines.Lines, "interval", 0.02)
    main(["versus-1cat", "--device", "cpu", "--output", str(tmp_path / "file.json")])
    assert re.search(rf"of {len(versus.SHAPES)} shapes done, \d s\n", capfd.readouterr().err)


def test_theirs_is_wrong_or_fails(package, monkeypatch, tmp_path, capsys):
    """Their mistakes stand in the page and leave the status."""
    decode = package.flash_attn_decode_paged
    package.flash_attn_decode_paged_xqa_available = lambda: False
    package.flash_attn_decode_paged = lambda *args, **options: decode(*args, **options) * 1.1
    package.flash_attn_prefill_paged = lambda *args, **options: 1 / 0
    status, data, page = run(tmp_path, capsys)
    assert status == 0
    for row in data["rows"]:
        found, kind = row["flash_attn_v100"], row["shape"]["kind"]
        assert kind not in ("decode", "verify") or found["share"] > 1
        assert ("ZeroDivisionError" in found["missing"]) == (kind == "paged prefill")
    assert "1Cat-vLLM did not run: ZeroDivisionError: division by zero" in page


def test_theirs_ends_all_use_of_the_gpu(package, monkeypatch, tmp_path, capsys):
    """Nothing runs after an illegal access. What was found before is in the file."""
    make, broken = versus.Inputs.__init__, []

    def init(self, *arguments):
        if broken:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        make(self, *arguments)

    monkeypatch.setattr(versus.Inputs, "__init__", init)
    package.flash_attn_func = lambda *args, **options: broken.append(1) or 1 / 0
    status, data, page = run(tmp_path, capsys)
    assert status == 0 and all(row["volta_fa"]["share"] <= 1 for row in data["rows"])
    assert [row["flash_attn_v100"]["missing"] for row in data["rows"]][1:] == [
        "RuntimeError: CUDA error: an illegal memory access was encountered"
    ] * (len(versus.SHAPES) - 1)
    assert "1Cat-vLLM did not run: RuntimeError: CUDA error" in page


def test_ours_is_wrong(monkeypatch, tmp_path, capsys):
    right = versus.ours
    monkeypatch.setattr(versus, "ours", lambda inputs: lambda: right(inputs)().mul(1.02))
    status, data, _ = run(tmp_path, capsys)
    assert status == 1 and all(row["volta_fa"]["share"] > 1 for row in data["rows"])
    monkeypatch.setattr(versus, "ours", lambda inputs: lambda: Path("/home/joe/x/missing.so").read_text())
    status, data, page = run(tmp_path, capsys)
    assert status == 1 and "volta_fa did not run: FileNotFoundError" in page and "joe" not in page + str(data)
    assert not versus.is_wrong(versus.Outcome(missing="not enough memory")) and versus.is_wrong(versus.Outcome(1.0, float("nan")))


@pytest.mark.parametrize("kind", ["dense prefill", "paged prefill", "verify"])
def test_a_wrong_row_shows(kind):
    """Each of the rows that are compared counts."""
    [shape, *_] = (shape.shortened() for shape in versus.SHAPES if shape.kind == kind)
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
    other.flash_attn_decode_paged = v100_paged.flash_attn_decode_paged
    assert "volta_fa's stand-in" in versus.package()[1]


def test_the_simulator_times_ours(monkeypatch):
    from conftest import need

    need("sim")
    monkeypatch.setattr(versus, "SHAPES", (versus.Shape("verify", 5, 4096, 1616, "fp8_e5m2"), versus.SHAPES[-1]))
    first, last = versus.rows(Target.of("simulator"))
    assert 0.001 < first.ours.ms < 0.1 and first.ours.share is None and first.ours.kernels
    assert last.ours.missing == "takes too long to simulate"
