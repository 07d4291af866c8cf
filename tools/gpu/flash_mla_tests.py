"""Runs FlashMLA's tests of dense decoding against volta_fa under the name flash_mla.

    python tools/gpu/flash_mla_tests.py FILE                                 on the GPU: every case with one KV head, in fp16
    python tools/gpu/flash_mla_tests.py FILE --dtype bf16 --time-limit 60
    python tools/gpu/flash_mla_tests.py FILE --device cpu --max-tokens 300   small cases, on the CPU

FILE is `tests/test_flash_mla_dense_decoding.py` of FlashMLA. Its folder `kernelkit` lies beside it, and needs Triton. FILE's own loop
lists the cases. This script leaves out those with several KV heads, which `volta_fa.flash_mla` has not, and those that measure time.
They run in random order. --time-limit (seconds) ends the run between two cases. The tolerances are those of FILE.

Prints failures by message, with one case each, and exits non-zero if there were any.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import math
import random
import re
import sys
import time
import traceback
from collections import defaultdict
from pathlib import Path

import torch


def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--dtype", choices=("fp16", "bf16"), default="fp16")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--max-tokens", type=float, default=math.inf, help="leave out cases with more tokens in all sequences together")
    parser.add_argument("--sample", type=int, help="cases at most")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--time-limit", type=float, default=math.inf)
    parser.add_argument("--list", type=Path, help="where to write the cases that failed")
    return parser.parse_args()


def adapted(source: str, device: str) -> str:
    """Returns FILE for a device."""
    if device == "cuda":
        return source
    source = source.replace('torch.device("cuda:0")', f'torch.device("{device}")').replace(".cuda()", f'.to("{device}")')
    return re.sub(r"^\s*torch\.cuda\.(synchronize|set_device)\(.*\)\n", "", source, flags=re.MULTILINE)


def load(file: Path, device: str) -> dict:
    """Executes FILE, in which `import flash_mla` gives `volta_fa.flash_mla`."""
    import volta_fa.flash_mla

    sys.modules["flash_mla"] = volta_fa.flash_mla
    sys.path.insert(0, str(file.parent))
    # Dataclasses look for the module that defines them.
    module = sys.modules["flash_mla_tests_file"] = type(sys)("flash_mla_tests_file")
    exec(compile(adapted(file.read_text(), device), str(file), "exec"), vars(module))
    return vars(module)


def cases(module: dict, dtype: torch.dtype) -> list:
    """Returns the cases of FILE's `main`, which leaves torch's default dtype and device set to those of its tests."""
    found: list = []
    test, capability = module["test_flash_mla"], torch.cuda.get_device_capability
    # FILE asserts the GPU that FlashMLA's kernels need
    module["test_flash_mla"], torch.cuda.get_device_capability = found.append, lambda *_: (9, 0)
    try:
        module["main"](dtype)
    finally:
        module["test_flash_mla"], torch.cuda.get_device_capability = test, capability
    return found


def failure(test, case) -> str:
    """Runs a case. Returns what FILE says about it, or "" if it passes."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stdout(said):
            test(case)
    except AssertionError:
        lines = said.getvalue().splitlines()[2:]  # after a rule and the case
        return "; ".join(lines) or traceback.format_exc().strip().splitlines()[-1]
    except Exception:
        return traceback.format_exc().strip().splitlines()[-1]
    return ""


def main() -> int:
    options = parse()
    if options.device == "cuda" and not torch.cuda.is_available():
        print("no CUDA device: --device cpu runs small cases (--max-tokens) on the CPU", file=sys.stderr)
        return 2
    module = load(options.file, options.device)
    listed = cases(module, {"fp16": torch.float16, "bf16": torch.bfloat16}[options.dtype])
    chosen = [c for c in listed if c.h_kv == 1 and not c.test_performance and c.b * c.s_k <= options.max_tokens]
    random.Random(options.seed).shuffle(chosen)
    chosen = chosen[: options.sample]
    # messages that differ in numbers only count as one
    failures: defaultdict = defaultdict(list)
    end, ran = time.monotonic() + options.time_limit, 0
    for case in chosen:
        if time.monotonic() > end:
            print(f"stopped by the time limit of {options.time_limit:g} s")
            break
        ran += 1
        if message := failure(module["test_flash_mla"], case):
            failures[re.sub(r"[-+]?\d[\d.]*(e[-+]?\d+)?", "#", message)].append((case, message))
    for found in sorted(failures.values(), key=len, reverse=True):
        case, message = found[0]
        print(f"\n{len(found)} x {message}\n    {case}")
    if options.list:
        options.list.write_text("".join(f"{case}\n" for found in failures.values() for case, _ in found))
    failed = sum(map(len, failures.values()))
    print(f"\n{ran - failed} passed, {failed} failed, of {len(chosen)} cases ({options.dtype}, seed {options.seed})")
    return int(failed > 0 or ran == 0)


if __name__ == "__main__":
    sys.exit(main())
