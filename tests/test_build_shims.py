"""tools/build_shims.py: what it compiles again, and the functions that a shim has to export."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

import pytest

import build_shims
from build_shims import Progress, Step, check_exports, needed_from_shim, prerequisites, run_all, symbols


def test_reads_a_dependency_file() -> None:
    rule = "out/a.o: torch_ops/a.cpp \\\n /some\\ where/b.h \\\n c.h\n"
    assert prerequisites(rule) == [Path("torch_ops/a.cpp"), Path("/some where/b.h"), Path("c.h")]


def test_a_step_runs_again_only_after_a_change_of_an_input_or_of_the_command(tmp_path: Path) -> None:
    given, header, output, runs = (tmp_path / name for name in ("in", "header", "out.o", "runs"))
    for path in (given, header):
        path.touch()
        os.utime(path, (time.time() - 60,) * 2)
    (tmp_path / "out.d").write_text(f"out.o: {header}\n")

    def make(text: str) -> int:
        Step(["sh", "-c", "echo $1 >> $2; : > $3", "sh", text, str(runs), str(output)], output, [given]).run()
        return len(runs.read_text().splitlines())

    assert [make("a"), make("a"), make("b"), make("b")] == [1, 1, 2, 2]
    for changed, expected in ((given, 3), (header, 4)):
        os.utime(changed, (time.time() + 60,) * 2)
        assert make("b") == expected
        os.utime(changed, (time.time() - 60,) * 2)


def test_an_error_ends_the_build_and_leaves_nothing_up_to_date(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    wrong = Step(["sh", "-c", "echo wrong >&2; : > $0; exit 1", str(tmp_path / "a.o")], tmp_path / "a.o", [])
    with pytest.raises(SystemExit, match="cannot make .*a.o"):
        run_all([wrong])
    assert "wrong" in capfd.readouterr().err and not wrong.is_up_to_date()


@pytest.mark.parametrize(("interval", "of", "lines"), [(1e9, 3, [0, 3]), (0, 2, [0, 1, 2]), (0, 0, [])])
def test_progress(interval: float, of: int, lines: list[int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(build_shims, "INTERVAL", interval)
    progress = Progress(of)
    for _ in range(of):
        progress.advance()
    said = capsys.readouterr().err.split("\n")[:-1]
    assert [line.removeprefix("\r\033[Kvolta_fa: compiled ") for line in said] == [f"{n} of {of} C++ files" for n in lines]


def test_names_functions_that_a_shim_lacks_or_hides(tmp_path: Path) -> None:
    def compiled(source: str, name: str, *flags: str) -> Path:
        file, library = tmp_path / f"{name}.c", tmp_path / f"{name}.so"
        file.write_text(source)
        subprocess.run(["g++", "-x", "c", "-shared", "-fPIC", "-o", library, file, *flags], check=True)
        return library

    # malloc has a version, optional is weak: neither is a function of a shim
    calls = "void *at_there(void), *at_here(void), *malloc(unsigned long), *optional(void) __attribute__((weak));"
    core = compiled(f"{calls} void *core(void) {{ return at_there() ? at_here() : optional ? optional() : malloc(1); }}", "core")
    needed = needed_from_shim(core)
    assert needed == {"at_here", "at_there"}
    here, there = "void *at_here(void) { return 0; }", "void *at_there(void) { return 0; } void inner(void) {}"
    script = tmp_path / "exports.map"
    script.write_text(build_shims.version_script(needed))
    flag = f"-Wl,--version-script={script}"
    for source in (here, f'{here} __attribute__((visibility("hidden"))) {there}'):
        shim = compiled(source, "shim", flag)
        with pytest.raises(SystemExit, match="does not define: at_there$"):
            check_exports(shim, needed)
        assert not shim.exists()
    shim = compiled(f"{here} {there}", "shim", flag)
    check_exports(shim, needed)
    assert symbols(shim, "TW") == needed
    with pytest.raises(SystemExit, match="expected the core library"):
        needed_from_shim(shim)
