"""Benchmarks that anyone can rerun from the root of a checkout, after `make build`.

    python -m benchmarks.table      errors, memory and speed against PyTorch's attention, on this machine
    python -m benchmarks.memory     peak memory against sequence length, on this machine
    python -m benchmarks.training   loss curves and gradients of a small GPT against PyTorch's attention
    python -m benchmarks.volta      the kernels on a simulated V100, beside published kernels; --gpu simulates a Turing card
    python -m benchmarks.decode     decoding and prefill over a KV cache, simulated or on this machine's GPU
    python -m benchmarks.tables     small tables: shapes with a target speed, headdim 512, the fast forward, long sequences
    python -m benchmarks.plan       the kernels that the planner selects for a shape
    python -m benchmarks.docs DIR   put results of the above into docs/reference/figures.md

The other modules are commands too, except attention, driver, long_sequences, measure, report and sparse, on which they are built. All but
ring_simulation have --help; most write --json, --plot or --markdown files. Simulated times come from tools/volta-sim, which runs the
kernels' machine code on a CPU. Importing this package selects the checkout's build if there is one, else the installed package."""

import importlib.util
import os
import sys
from pathlib import Path

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # torch's profiler, which measures memory, reports missing GPUs as errors

_PYTHON = Path(__file__).resolve().parent.parent / "python"
if (_PYTHON / "volta_fa" / "libvolta_fa_core.so").exists():
    sys.path.insert(0, str(_PYTHON))

# Users run these modules as commands, so a missing package is one line and not a traceback.
_missing = [package for package in ("matplotlib", "rich") if importlib.util.find_spec(package) is None]
if _missing:
    sys.exit(f"benchmarks: {' and '.join(_missing)} missing; run: pip install {' '.join(_missing)}")
try:
    import volta_fa  # noqa: F401  registers the operators
except ImportError as error:
    sys.exit(f"benchmarks: {error}")
