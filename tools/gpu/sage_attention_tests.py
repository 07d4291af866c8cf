"""Runs tests of int8 attention that others wrote against volta_fa.

    python tools/gpu/sage_attention_tests.py [--sageattention FILE] [--comfy-kitchen FILE] [--device cpu]

FILE is `tests/test_sageattn.py` of woct0rdho's SageAttention, and `tests/test_int8_attention.py` of comfy-kitchen. The limits are
those of the files: 0.05 for the mean absolute, mean relative and largest absolute difference, and an NRMSE of 0.03. The largest
relative difference is printed without a limit. The shapes are short, so on a GPU a tuning selects the fast kernels, which the plan
takes from 1024 keys on. What this script changes:

- FILE's device, with --device,
- fp32 tensors are cast to fp16 and back: `fwd_fast` has no fp32,
- tests of comfy-kitchen's own parts (which kernels it selects, what it allocates, when it is available) are left out,
- on the CPU, so are tests of CUDA graphs.

comfy-kitchen rotates Q and K, so its tests run with `rotate=True`. Its separate quantization is `volta_fa.prepare_fast`.
Prints the outcome and exits non-zero if a test failed.
"""

import argparse
import contextlib
import io
import json
import os
import re
import sys
import tempfile
import types
from pathlib import Path

import pytest
import torch

import volta_fa

#: Tests of comfy-kitchen that are about its implementation.
INTERNAL = ("availability", "cta_k_selection", "rejects_cpu", "capability_dispatch", "hip_dispatch", "allocates_only", "releases_float")
LIMIT = 0.05


def select_fast_kernels() -> None:
    """Lets a tuning choose the fast kernels for all lengths: the plain one first, then that with lengths and masks."""
    names = [v["name"] for v in volta_fa.info()["variants"] if v["pass"] == "FastForward"]
    names.sort(key=lambda name: (int(name.rpartition("x")[2]), "generic" in name))
    choices = [{"pass": "FastForward", "variant": name} for name in names]
    torch.ops.volta_fa._set_tuning(json.dumps({"format": 1, "choices": choices}))


def on(device: str, source: str) -> str:
    source = re.sub(r'device\s*=\s*"cuda"', f'device="{device}"', source)
    return source if device == "cuda" else source.replace("torch.cuda.is_available()", "True")


def run_sageattention(file: Path, device: str) -> bool:
    """Runs the script, and compares the differences that it prints, except the largest relative one, with LIMIT."""
    volta_fa.install_sageattention_shim(replace=True)
    output, module = io.StringIO(), {"__name__": "test_sageattn"}
    with contextlib.redirect_stdout(output):
        torch.manual_seed(0)
        exec(compile(on(device, file.read_text()), str(file), "exec"), module)
        module["main"]()
    print(output.getvalue().strip())
    found = {name: float(value) for name, value in re.findall(r"(\w+_[ar]tol)=(\S+)", output.getvalue())}
    right = len(found) == 4 and all(value < LIMIT for name, value in found.items() if name != "max_rtol")
    print(f"SageAttention's test: {'passed' if right else 'FAILED'}")
    return right


def kitchen() -> types.ModuleType:
    """Returns comfy_kitchen with its attention, as `torch.nn.functional.scaled_dot_product_attention` lays tensors out."""

    def operands(q, k, v):
        return [(t.half() if t.dtype == torch.float32 else t).transpose(1, 2) for t in (q, k, v)]

    def attend(operands, dtype, mask, scale, prepared=None):
        q, k, v = operands
        if mask is None or mask.dtype == torch.bool:
            options = {"attn_mask": mask, "rotate": True, "prepared": prepared}
            out = torch.ops.volta_fa.fwd_fast(q, k, v, softmax_scale=scale, **options)[0]
        else:  # an added mask
            out = torch.ops.volta_fa.fwd(q, k, v, attn_bias=mask.to(q.dtype), softmax_scale=scale)[0]
        return out.transpose(1, 2).to(dtype)

    def int8_attention(q, k, v, attn_mask=None, scale=None):
        return attend(operands(q, k, v), q.dtype, attn_mask, scale)

    def prequantize_int8_attention(q, k, v, attn_mask=None, scale=None):
        found = operands(q, k, v)
        return found, q.dtype, attn_mask, scale, volta_fa.prepare_fast(*found[1:], rotate=True)

    made = types.ModuleType("comfy_kitchen")
    made.int8_attention, made.prequantize_int8_attention = int8_attention, prequantize_int8_attention
    made.int8_attention_from_prequantized = lambda prequantized: attend(*prequantized)
    made.int8_attention_is_available = lambda: True
    made.sage_attention = types.ModuleType("comfy_kitchen.sage_attention")
    return made


class Count:
    """Counts outcomes."""

    def __init__(self):
        self.passed, self.failed = 0, []

    def pytest_runtest_logreport(self, report):
        if report.failed:
            self.failed.append(report.nodeid.rpartition("::")[2])
        self.passed += report.when == "call" and report.passed


def run_kitchen(file: Path, device: str) -> bool:
    made, count = kitchen(), Count()
    sys.modules |= {"comfy_kitchen": made, "comfy_kitchen.sage_attention": made.sage_attention}
    chosen = "not (" + " or ".join((*INTERNAL, *(("cuda_graph",) if device == "cpu" else ()))) + ")"
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "test_int8_attention.py"
        copy.write_text(on(device, file.read_text()))
        os.chdir(folder)
        arguments = ["-q", "-p", "no:cacheprovider", "-W", "ignore", "--rootdir", folder, "-c", os.devnull, "--no-header", "--tb=short"]
        code = pytest.main([*arguments, "-k", chosen, str(copy)], plugins=[count])
        os.chdir("/")
    print(f"comfy-kitchen's tests: {count.passed} passed, {len(count.failed)} failed {' '.join(count.failed)}")
    return code == 0 and count.passed > 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sageattention", type=Path)
    parser.add_argument("--comfy-kitchen", type=Path)
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args()
    files = [file.absolute() if file else None for file in (options.sageattention, options.comfy_kitchen)]
    if not any(files):
        parser.error("expected --sageattention or --comfy-kitchen")
    if options.device == "cuda":
        select_fast_kernels()
    right = True
    if files[0]:
        right &= run_sageattention(files[0], options.device)
    if files[1]:
        right &= run_kitchen(files[1], options.device)
    return not right


if __name__ == "__main__":
    sys.exit(main())
