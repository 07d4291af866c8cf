"""Runs the own tests of ring_flash_attn and yunchang, scripts for torchrun, on volta_fa's flash_attn in two processes.

On the CPU they are adapted to gloo and shorter sequences. On two GPUs they run as they are, but for one line more, which installs
volta_fa's flash_attn. Import `run_tests`.
"""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

#: Lets volta_fa's flash_attn answer for flash-attn.
SHIM = "import volta_fa; volta_fa.install_flash_attn_shim()\n"
#: Patterns of a test's source, and what takes their place on the CPU.
ADAPTATIONS = {
    '"nccl"': '"gloo"',
    r'f"cuda:\{(local_)?rank\}"': '"cpu"',
    r"\[0, 120, 1248, 4232\]|\[0, 128, 1248, 4240\]": "[0, 16, 48, 128]",
    r"\bseqlen = 38\d\d\b": "seqlen = 128",
    r"torch\.cuda\.max_memory_allocated\([^)]*\)": "0",
    r"torch\.cuda\.(reset_peak_memory_stats|synchronize)\([^)]*\)": "None",
}
#: Tests, and the arguments of each run by device. test_hybrid_qkvpacked_attn.py fails in yunchang 0.6.4 itself: an argument is missing.
_ONE_RUN = {"cpu": [""], "cuda": [""]}
_HYBRID = "--attn_impl fa --sp_ulysses_degree"
_RINGS = [f"{_HYBRID} 1 --use_bwd{more}" for more in ("", " --causal", " --causal --ring_impl_type zigzag")]
OWN_TESTS = {
    "test_ring_flash_attn_func.py": _ONE_RUN,
    "test_zigzag_ring_flash_attn_func.py": _ONE_RUN,
    "test_stripe_flash_attn_func.py": _ONE_RUN,
    "test_ring_flash_attn_varlen_func.py": _ONE_RUN,
    "test_zigzag_ring_flash_attn_varlen_func.py": _ONE_RUN,
    "test_llama3_flash_attn_varlen_func.py": _ONE_RUN,
    "test_hybrid_attn.py": {
        # a ring of one process sends gradients to itself, which gloo cannot
        "cpu": [f"{run} --seqlen 128" for run in (*_RINGS, f"{_HYBRID} 2", f"{_HYBRID} 2 --causal")],
        "cuda": [f"{run} --seqlen 4096" for run in (*_RINGS, f"{_HYBRID} 2 --use_bwd", f"{_HYBRID} 2 --causal --use_bwd")],
    },
    "test_ulysses_attn.py": _ONE_RUN,
}
#: A line of their reports: a title, or the values of one rank, or both.
REPORT = re.compile(
    r"^(?:\[\D*\d+\] )?(?P<title>[^\[\]:\n]*):(?: max (?P<only>[^,]+),.*)?\s*$|^\[\D*\d+\] max (?P<value>[^,]+),", re.MULTILINE
)
#: Allowed differences from dense attention in bfloat16: one to two units in the last place of the largest value, or of one just
#: below 8.
ALLOWED_DIFFERENCE, ALLOWED_SHARE = 0.06, 2**-7
#: Seconds for one test.
LIMIT = 300


def adapted(source: str) -> str:
    """Returns a test for gloo, the CPU and short sequences."""
    for pattern, replacement in ADAPTATIONS.items():
        source = re.sub(pattern, replacement, source)
    return source


def differences(report: str) -> tuple[dict[str, float], float]:
    """Returns the largest difference of each title of a test's report, and the largest output or gradient."""
    title, worst, largest = "", {}, 0.0
    for line in REPORT.finditer(report):
        title = title if line["title"] is None else line["title"]
        value = line["value"] or line["only"]
        if value and "diff" in title:
            worst[title] = max(worst.get(title, 0.0), float(value))
        elif value and "lse" not in title:
            largest = max(largest, float(value))
    return worst, largest


def passes(name: str, arguments: str, work: str, device: str) -> bool:
    """Runs a test, prints its differences, and what it printed if it fails."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = f"--master-port={free.getsockname()[1]}"
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", port, name, *arguments.split()]
    environ = {**os.environ, "OMP_NUM_THREADS": "1"} | ({"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {})
    try:
        ran = subprocess.run(command, cwd=work, env=environ, capture_output=True, text=True, timeout=LIMIT)
        status, printed = ran.returncode, ran.stdout[-1500:] + ran.stderr[-3000:]
        worst, largest = differences(ran.stdout)
    except subprocess.TimeoutExpired as expired:
        status, printed, worst, largest = None, f"{(expired.stderr or b'')[-3000:]!r}: no end in {LIMIT} s", {}, 0.0
    right = bool(status == 0 and worst and max(worst.values()) <= max(ALLOWED_DIFFERENCE, ALLOWED_SHARE * largest))
    print(f"{name} {arguments}: {'passed' if right else 'FAILED'}  {worst}, largest value {largest:.3g}", flush=True)
    if not right:
        print(printed)
    return right


def run_tests(folder: Path, device: str) -> list[str]:
    """Runs the tests in a package's folder, and returns those that failed."""
    with tempfile.TemporaryDirectory() as work:
        for file in folder.glob("*.py"):
            text = file.read_text()
            if file.name in OWN_TESTS:
                text = SHIM + (adapted(text) if device == "cpu" else text)
            (Path(work) / file.name).write_text(text)
        runs = [(name, run) for name, by_device in OWN_TESTS.items() if (folder / name).exists() for run in by_device[device]]
        return [f"{name} {run}" for name, run in runs if not passes(name, run, work, device)]
