"""The simulator beside real cards: benchmarks.validation holds every published figure to its band."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from conftest import REPOSITORY

pytest.importorskip("rich")
sys.path.insert(0, str(REPOSITORY))
from benchmarks import validation
from volta_fa.errors import CommandError

PAGE = REPOSITORY / "docs/validation/real-cards.md"
SIMULATOR = Path(os.environ.get("VOLTA_SIM", REPOSITORY / "target/release/volta-sim"))


def test_kept_figures_stay_in_their_bands() -> None:
    assert validation.main(["--kept"]) == 0


def test_documentation_shows_the_kept_figures() -> None:
    assert validation.grid(validation.rows()).markdown() in PAGE.read_text(), "run `python -m benchmarks.validation --kept --markdown FILE`"


@pytest.mark.parametrize(("measured", "status"), [("8.656", 0), ("9.0", 0), ("9.2", 1), ("8.2", 1)])
def test_fails_if_a_row_leaves_its_band(tmp_path: Path, measured: str, status: int) -> None:
    header, row = validation.ROWS.read_text().splitlines()[:2]
    rows = tmp_path / "rows.csv"
    rows.write_text(f"{header}\n{row.replace('8.656', measured, 1)}\n")
    assert validation.main(["--kept", "--rows", str(rows)]) == status


def test_rejects_a_band_of_its_own_without_a_reason(tmp_path: Path) -> None:
    header, row = validation.ROWS.read_text().splitlines()[:2]
    rows = tmp_path / "rows.csv"
    fields = dict(zip(header.split(","), row.split(","), strict=True)) | {"band": "0.5", "reason": ""}
    rows.write_text(f"{header}\n{','.join(fields.values())}\n")
    with pytest.raises(CommandError, match="no reason for 'dependent mma.m8n8k4'"):
        validation.rows(rows)


def test_rejects_a_simulator_that_does_not_exist(tmp_path: Path) -> None:
    with pytest.raises(CommandError, match="cargo build --release -p volta-sim"):
        validation.main(["--simulator", str(tmp_path / "absent")])


@pytest.mark.skipif(not SIMULATOR.exists(), reason="needs `cargo build --release -p volta-sim`, or its command in $VOLTA_SIM")
def test_probes_run_afresh_in_their_bands() -> None:
    probes = [row for row in validation.rows() if row.probe]
    assert len(probes) >= 7
    for row in probes:
        found = validation.simulate(row, SIMULATOR)
        assert found.model == "now"
        assert found.simulated == pytest.approx(row.simulated, abs=0.01), row.case
