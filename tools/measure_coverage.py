"""Prints the line coverage of the Rust tests and of quick Python tests, one percentage each (`make coverage`).

    python tools/measure_coverage.py [PYTEST ARGUMENT ...]    # default: the quick tests in PYTHON_TESTS

Rust: `cargo test` with instrumented code, in a target folder of its own (target/coverage).
llvm-profdata and llvm-cov must be as new as rustc's profiles. They come from, in this order, $LLVM_BIN, the toolchain
(`rustup component add llvm-tools`), or the newest LLVM of the system, 19 or later (Debian and Ubuntu: `apt install llvm-19`).
Python: coverage.py, without subprocesses.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
#: A subset of five minutes. The other tests take much longer and mostly run Python in subprocesses, which are not measured.
PYTHON_TESTS = ["-m", "not slow"]
PYTHON_TESTS += [
    f"tests/test_{name}.py"
    for name in (
        "validation",
        "flash_attn_api",
        "flash_attn_layers",
        "flash_mla",
        "diagnostics",
        "kvcache_api",
        "tuning",
        "tolerance",
        "vllm",
        "distributed_plan",
        "transformers",
        "transformers_cache",
        "import",
    )
]
TARGET = "x86_64-unknown-linux-gnu"
_LLVM_OLDEST = 19


def llvm_bin() -> Path:
    """Returns the folder of llvm-profdata and llvm-cov."""
    sysroot = Path(subprocess.run(["rustc", "--print", "sysroot"], capture_output=True, text=True, check=True, cwd=ROOT).stdout.strip())
    system = [folder for folder in Path("/usr/lib").glob("llvm-*/bin") if re.fullmatch(r"llvm-\d+", folder.parent.name)]
    system.sort(key=lambda folder: -int(folder.parent.name.removeprefix("llvm-")))
    candidates = [Path(os.environ["LLVM_BIN"])] if "LLVM_BIN" in os.environ else []
    candidates += [sysroot / "lib/rustlib" / TARGET / "bin"]
    candidates += [folder for folder in system if int(folder.parent.name.removeprefix("llvm-")) >= _LLVM_OLDEST]
    for folder in candidates:
        if (folder / "llvm-cov").exists() and (folder / "llvm-profdata").exists():
            return folder
    raise SystemExit(f"volta_fa: llvm-cov: not found, expected LLVM {_LLVM_OLDEST} or newer: run `rustup component add llvm-tools`")


def rust() -> float:
    """Returns the percentage of lines of src/ and tools/volta-sim/src that `cargo test` runs."""
    llvm, target = llvm_bin(), ROOT / "target" / "coverage"
    profiles = target / "profiles"
    profiles.mkdir(parents=True, exist_ok=True)
    for old in profiles.glob("*.prof*"):
        old.unlink()
    # compiled kernels are the same with and without instrumented host code
    kernels = target / "volta-fa-kernels"
    if not kernels.exists():
        (ROOT / "target" / "volta-fa-kernels").mkdir(parents=True, exist_ok=True)
        kernels.symlink_to(ROOT / "target" / "volta-fa-kernels")
    environ = {
        **os.environ,
        "CARGO_TARGET_DIR": str(target),
        "RUSTFLAGS": "-C instrument-coverage",
        "LLVM_PROFILE_FILE": str(profiles / "%p-%m.profraw"),
    }
    # --target keeps build scripts free of instrumentation
    command = ["cargo", "test", "--release", "--locked", "--features", "sim", "--workspace", "--target", TARGET]
    built = subprocess.run([*command, "--no-run", "--message-format=json"], env=environ, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    if built.returncode != 0 or subprocess.run(command, env=environ, cwd=ROOT, stdout=sys.stderr).returncode != 0:
        raise SystemExit("volta_fa: cargo test failed")
    messages = [json.loads(line) for line in built.stdout.splitlines() if line.startswith("{")]
    programs = [message["executable"] for message in messages if message.get("executable")]
    return line_coverage(llvm, profiles, programs)


def line_coverage(llvm: Path, profiles: Path, programs: list[str]) -> float:
    """Returns the percentage of lines that these programs ran, in all sources of this repository."""
    merged = profiles / "merged.profdata"
    subprocess.run([llvm / "llvm-profdata", "merge", "--sparse", *profiles.glob("*.profraw"), "-o", merged], check=True)
    command = [llvm / "llvm-cov", "export", "--summary-only", f"--instr-profile={merged}", programs[0]]
    command += [word for program in programs[1:] for word in ("--object", program)]
    command += [ROOT / "src", ROOT / "tools" / "volta-sim" / "src"]
    summary = json.loads(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout)
    return summary["data"][0]["totals"]["lines"]["percent"]


def python(arguments: list[str]) -> float:
    """Returns the percentage of lines of python/volta_fa that these tests run."""
    data = ROOT / "target" / "coverage" / "python"
    data.parent.mkdir(parents=True, exist_ok=True)
    coverage = [sys.executable, "-m", "coverage"]
    run = [*coverage, "run", f"--data-file={data}", "--source=python/volta_fa", "-m", "pytest", "-q", "-n", "0", *arguments]
    failed = subprocess.run(run, cwd=ROOT, stdout=sys.stderr).returncode != 0
    command = [*coverage, "report", f"--data-file={data}", "--format=total", "--precision=1"]
    total = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True).stdout
    if failed:
        raise SystemExit("volta_fa: pytest failed")
    return float(total)


def main(arguments: list[str]) -> int:
    percent = python(arguments or PYTHON_TESTS)
    print(f"Python: {percent:.1f} % of lines ({' '.join(arguments or PYTHON_TESTS)})", flush=True)
    print(f"Rust: {rust():.1f} % of lines (cargo test)")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
