"""Published figures of docs/ and README.md: each names its commit, and figures of kernels that have changed since are found.

A mark is an HTML comment `<!-- figures of COMMIT: KERNEL HASH, ... -->` with hashes of the kernels' machine code (benchmarks.marks);
`marks.code()` returns this build's hashes by kernel, and marks.PAGES are pages whose figures have marks. The second part compares simulated
times with published measurements of real GPUs: each must stay within its band (benchmarks.validation)."""

import os
import re
import sys
from pathlib import Path

import pytest

from conftest import INFO, LIBRARY, REPOSITORY
from flash_attention import refused  # checks that a call raises this error, with a message of one line

if LIBRARY.parents[1].name != "volta_fa":
    pytest.skip("the marks are of the package's kernels", allow_module_level=True)
sys.path.insert(0, str(REPOSITORY))
pytest.importorskip("rich")
from benchmarks import docs, driver, marks, report, validation, volta
from volta_fa.errors import CommandError

#: Text of the sections of docs/reference/figures.md by name.
SECTIONS = dict(re.findall(r"<!-- begin (\w[\w-]*) -->\n(.*?)<!-- end \1 -->", docs.PAGE.read_text(), re.S))
#: All pages but those whose rows are records of a date.
RECORDS = ("runs.md", "trials.md", "programs.md")
PAGES = [REPOSITORY / "README.md", *(page for page in sorted((REPOSITORY / "docs").rglob("*.md")) if page.name not in RECORDS)]
#: Commands with a date: where a page says when its figures were taken.
CITED = re.compile(r"\(`python -m benchmarks\.[^)]*?\b20\d\d-\d\d-\d\d[^)]*\)")


@pytest.mark.parametrize("name", SECTIONS)
def test_every_section_names_its_commit(name):
    (commit,) = re.findall(r"^- commit: ([0-9a-f]{8})\b", SECTIONS[name], re.M)
    if "- kind of figures: simulated" in SECTIONS[name]:
        assert [mark.commit for mark in marks.read(SECTIONS[name])] == [commit]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_cited_command_names_its_commit(page):
    """On pages with marks, a citation names the commit of one of them."""
    text = page.read_text()
    marked = {mark.commit for mark in marks.read(text)}
    for citation in CITED.findall(text):
        commits = set(re.findall(r"commit\s([0-9a-f]{8})\b", citation))
        assert commits & marked if page in marks.PAGES else commits, citation


#: A paragraph with simulated times or rates, and the parentheses with a date in it.
SIMULATED = re.compile(r"^(?:[^\n]+\n)*?[^\n]*\b[Ss]imulated\b(?! kernels)[^\n]*\n(?:[^\n]+\n)*", re.M)
DATED = re.compile(r"\([^()]*\b20\d\d-\d\d-\d\d[^()]*\)")


@pytest.mark.parametrize("page", marks.PAGES, ids=lambda page: page.name)
def test_simulated_figures_name_their_commit_and_have_a_mark(page):
    text = page.read_text()
    marked = {mark.commit for mark in marks.read(text)}
    for paragraph in SIMULATED.findall(text):
        for dated in DATED.findall(paragraph):
            assert set(re.findall(r"commit\s([0-9a-f]{8})\b", dated)) & marked, dated


def test_the_first_page_has_figures_of_recorded_kernels():
    assert any(mark.kernels for mark in marks.read((REPOSITORY / "README.md").read_text()))


@pytest.mark.parametrize("page", marks.PAGES, ids=lambda page: page.name)
def test_figures_are_of_this_machine_code(page):
    """No kernel of a mark has changed. Remedy: take the figures again, or `python -m benchmarks.marks --outdate`."""
    assert {mark.commit: changed for mark in marks.read(page.read_text()) if (changed := mark.changed(marks.code()))} == {}


def test_every_kernel_has_a_hash():
    """Few kernels share machine code, and so a hash."""
    assert marks.code().keys() == {v["name"] for v in INFO["variants"]}
    assert len(set(marks.code().values())) > 0.9 * len(INFO["variants"])


def test_a_mark_is_read_back_and_outdated():
    """`outdate` notes in the section's header that kernels have changed, and forgets their hashes, in sections where that is so."""
    first, second = list(marks.code())[:2]
    mark = marks.mark({second, first})
    header = f"- commit: {marks.commit()[:8]}\n"
    page = f"{header}\n{mark}\n<!-- end first -->\n\n<!-- figures of 01234567: {marks.NOT_RECORDED} -->\n{header}"
    found, unknown = marks.read(page)
    assert found.kernels == {name: marks.code()[name] for name in (first, second)} and unknown.kernels == {}
    assert found.changed(marks.code()) == unknown.changed(marks.code()) == []
    assert marks.outdate(page, marks.code()) == page
    other = marks.code() | {first: "00000000"}
    del other[second]
    assert sorted(found.changed(other)) == sorted([first, second])
    outdated = marks.outdate(page, other)
    assert outdated.startswith(f"- commit: {found.commit}, kernels changed since\n") and marks.read(outdated)[0].kernels == {}
    assert outdated.endswith(f"-->\n{header}")  # another section's
    of_changes = f"- commit: 01234567 with changes\n<!-- figures of 01234567 with changes: {first} 00000000 -->"
    expected = "- commit: 01234567 with changes, kernels changed since\n<!-- figures of 01234567 with changes: kernels changed since -->"
    assert marks.outdate(of_changes, marks.code()) == expected
    assert marks.outdate(f"{header}<!-- end first -->\n{mark}", other).startswith(f"{header}<!-- end first -->\n")  # not in a section
    assert marks.mark(()).endswith("kernels not recorded -->")


def test_the_layers_output_replaces_that_of_the_page():
    """`fill_layer` puts the demo's table of simulated GPUs, the lines from the first box character on, into README.md."""
    page = (REPOSITORY / "README.md").read_text()
    mark = marks.mark(())
    filled = docs.fill_layer(page, "simulating a T4 ...\n┏━━┓  \n┃ 1\nAll results are right.", "01234567 with changes", mark)
    assert f"(commit 01234567):\n\n```text\n┏━━┓\n┃ 1\n```\n\n{mark}\n" in filled
    assert [found.kernels for found in marks.read(filled)] == [{}] and len(filled.splitlines()) < len(page.splitlines())
    refused(CommandError, "expected 1", docs.fill_layer, page.replace("(commit ", "("), "┏All results are right", "01234567", mark)


def test_results_have_the_mark_of_what_ran(tmp_path):
    name = next(iter(marks.code()))
    options = report.argparse.Namespace(json=None, plot=None, markdown=tmp_path / "a.md")
    header = report.facts("volta", [], **{"kind of figures": report.SIMULATED})
    report.deliver(options, header, [], None, kernels=[name])  # no tables, no data
    text = options.markdown.read_text()
    assert f"- commit: {marks.commit()}\n" in text and list(marks.read(text)[0].kernels) == [name]


def test_simulated_kernels_are_noted(tmp_path, monkeypatch):
    if not INFO["simulator"]:
        pytest.skip("this build has no simulator")
    row = driver.Row("forward", volta.quick_cases()[0], models=("",))
    section = tmp_path / "a.md"
    driver.run("volta", driver.Benchmark("", lambda _: [row], lambda *_: []), ["--markdown", str(section)])
    launched = {launch["kernel"] for launch in driver.simulate(row.call)[0]}
    assert set(marks.read(section.read_text())[0].kernels) == launched != set()


# ---- benchmarks.validation: simulated times against measured ones, rows of a CSV file with a band of allowed ratios --------

SIMULATOR = Path(os.environ.get("VOLTA_SIM", REPOSITORY / "target/release/volta-sim"))


def test_kept_figures_stay_in_their_bands() -> None:
    assert validation.main(["--kept"]) == 0


def test_documentation_shows_the_kept_figures() -> None:
    page = (REPOSITORY / "docs/validation/real-cards.md").read_text()
    assert validation.grid(validation.rows()).markdown() in page, "run `python -m benchmarks.validation --kept --markdown FILE`"


@pytest.mark.parametrize(("measured", "status"), [("8.656", 0), ("9.0", 0), ("9.2", 1), ("8.2", 1)])
def test_fails_if_a_row_leaves_its_band(tmp_path: Path, measured: str, status: int) -> None:
    """The first row of the file was measured as 8.656 cycles, and its band is 5%."""
    header, row = validation.ROWS.read_text().splitlines()[:2]
    rows = tmp_path / "rows.csv"
    rows.write_text(f"{header}\n{row.replace('8.656', measured, 1)}\n")
    assert validation.main(["--kept", "--rows", str(rows)]) == status


def test_rejects_a_band_of_its_own_without_a_reason(tmp_path: Path) -> None:
    header, row = validation.ROWS.read_text().splitlines()[:2]
    rows = tmp_path / "rows.csv"
    fields = dict(zip(header.split(","), row.split(","), strict=True)) | {"band": "0.5", "reason": ""}
    rows.write_text(f"{header}\n{','.join(fields.values())}\n")
    refused(CommandError, "no reason for 'dependent mma.m8n8k4'", validation.rows, rows)


def test_rejects_a_simulator_that_does_not_exist(tmp_path: Path) -> None:
    refused(CommandError, "cargo build --release -p volta-sim", validation.main, ["--simulator", str(tmp_path / "absent")])


@pytest.mark.skipif(not SIMULATOR.exists(), reason="needs `cargo build --release -p volta-sim`, or its command in $VOLTA_SIM")
def test_probes_run_afresh_in_their_bands() -> None:
    probes = [row for row in validation.rows() if row.probe]  # rows of tools/volta-sim's own small kernels, not of other projects'
    assert len(probes) >= 7
    for row in probes:
        found = validation.simulate(row, SIMULATOR)
        assert found.model == "now"  # simulated by this build
        assert found.simulated == pytest.approx(row.simulated, abs=0.01), row.case
