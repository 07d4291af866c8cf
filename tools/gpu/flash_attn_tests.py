"""Runs the tests of flash-attn against volta_fa under the name flash_attn.

    python tools/gpu/flash_attn_tests.py FILE                        on the GPU, 500 cases of each test of caches and block tables
    python tools/gpu/flash_attn_tests.py FILE --tests '*' --sample 100 --time-limit 300
    python tools/gpu/flash_attn_tests.py FILE --device cpu --max-seqlen 300 --sample 20
    python tools/gpu/flash_attn_tests.py FILE --cases tests.txt      the cases of an earlier list of failures, one per line

FILE is `tests/test_flash_attn.py` of flash-attn 2.8, from its source distribution on PyPI, or of its main branch. It needs einops.
FILE has hundreds of thousands of cases, so the run takes a random sample of each test, in random order.
--time-limit (seconds) ends the run between two cases. This script changes four things:

- FILE's device, with --device,
- `normalize_flash_attn_S`: flash-attn returns unnormalized dropout probabilities by tile; here they are exact,
- where FILE expects RuntimeError, ValueError passes too: volta_fa raises it for wrong arguments,
- lengths on a GPU are checked (VOLTA_FA_CHECK_LENGTHS=1) in tests that expect an error for wrong ones.

Prints failures by message, with one case each, and exits non-zero if there were any. The tolerances are those of FILE.
"""

import argparse
import fnmatch
import itertools
import math
import os
import random
import re
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch

#: Tests that expect errors for lengths in GPU memory.
CHECKED_TESTS = "*_bounds"
DEFAULT_TESTS = "*kvcache,*splitkv,*varlen_causal,*varlen_output"


def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--tests", default=DEFAULT_TESTS, help="patterns of test functions, comma-separated (%(default)s)")
    parser.add_argument("--sample", type=int, default=500, help="cases of each function at most")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--max-seqlen", type=int, default=math.inf, help="leave out cases with longer sequences")
    parser.add_argument("--only", default="", help="parameters that cases must have, as 'paged_kv_block_size=256,new_kv=True'")
    parser.add_argument("--time-limit", type=float, default=math.inf)
    parser.add_argument("--cases", type=Path, help="a file with the ids of cases to run, and no others")
    parser.add_argument("--list", type=Path, help="where to write the ids of the cases that failed")
    parser.add_argument("--verbose", action="store_true", help="pytest's report of each failure")
    return parser.parse_args()


def adapted(source: str, device: str) -> str:
    """Returns FILE for a device and volta_fa's errors. It uses `torch.cuda` only for memory and limits of some GPUs."""
    source = source.replace("pytest.raises(RuntimeError,", "pytest.raises((RuntimeError, ValueError),")
    if device != "cuda":
        source = re.sub(r"torch\.cuda\.get_device_capability\([^)]*\)", "(9, 0)", source)
        source = re.sub(r'device\s*=\s*"cuda"', f'device = "{device}"', source)
        source = re.sub(r"torch\.cuda\.get_device_properties\([^)]*\)\.total_memory", "2**40", source)
    return source


def grid(function) -> list[list[tuple[tuple[str, ...], tuple]]]:
    """Returns the axes of a test: for each axis its names with each of their values."""
    axes = []
    for mark in getattr(function, "pytestmark", []):
        if mark.name == "parametrize":
            names, values = mark.args[:2]
            names = tuple(name.strip() for name in names.split(","))
            axes.append([(names, value if len(names) > 1 else (value,)) for value in values])
    return axes


def drawn(axes, count: int, wanted, rng: random.Random | None) -> list[dict]:
    """Returns at most `count` different cases: random ones, or the first without rng. Does not expand the grid, which takes minutes."""
    total, draws = math.prod(map(len, axes)), 100_000
    numbers: Iterable[int] = range(total)
    if rng is not None:
        numbers = rng.sample(numbers, total) if total <= draws else (rng.randrange(total) for _ in range(draws))
    cases: dict[int, dict] = {}
    for number in numbers:
        if len(cases) == count:
            break
        case, rest = {}, number
        for axis in axes:
            rest, at = divmod(rest, len(axis))
            names, values = axis[at]
            case |= zip(names, values)
        if wanted(case):
            cases[number] = case
    return list(cases.values())


def label(case: dict) -> str:
    return "-".join(f"{name}={str(value).removeprefix('torch.')}" for name, value in sorted(case.items()))


def sample(module: dict, options) -> None:
    """Replaces the parameter grids of a module's tests by samples."""
    rng = random.Random(options.seed)
    only = dict(item.split("=") for item in options.only.split(",") if item)
    listed = set(options.cases.read_text().split()) if options.cases else None

    def wanted(name, case):
        if any(value > options.max_seqlen for key, value in case.items() if key.startswith("seqlen") and not isinstance(value, bool)):
            return False
        if listed is not None and f"{name}[{label(case)}]" not in listed:
            return False
        # cases that FILE itself skips, after their setup
        if case.get("paged_kv_block_size") and (case.get("has_leftpad") or case.get("has_batch_idx")):
            return False
        if not case.get("new_kv", True) and case.get("rotary_fraction", 0) > 0:
            return False
        return all(key in case and str(case[key]) == value for key, value in only.items())

    for name, function in list(module.items()):
        if not name.startswith("test_"):
            continue
        if not any(fnmatch.fnmatch(name, pattern) for pattern in options.tests.split(",")):
            del module[name]
            continue
        axes = grid(function)
        if not axes:
            if listed is not None and name not in listed:
                del module[name]
            continue
        count = options.sample if listed is None else sum(entry.startswith(f"{name}[") for entry in listed)
        cases = drawn(axes, count, lambda case, name=name: wanted(name, case), rng if listed is None else None)
        names = list(itertools.chain.from_iterable(axis[0][0] for axis in axes))
        function.pytestmark = []
        # pytest takes a tuple of one value for the value
        rows = [tuple(case[key] for key in names) if len(names) > 1 else case[names[0]] for case in cases]
        if rows:
            module[name] = pytest.mark.parametrize(",".join(names), rows, ids=list(map(label, cases)))(function)
        else:
            del module[name]


class Report:
    """Collects failures by message, and sets the order of cases."""

    def __init__(self, options):
        self.options = options
        self.outcomes: Counter = Counter()
        self.ran: Counter = Counter()
        self.failures: defaultdict = defaultdict(list)
        self.end = time.monotonic() + options.time_limit

    def pytest_collection_modifyitems(self, items):
        random.Random(self.options.seed).shuffle(items)

    def pytest_runtest_setup(self, item):
        if time.monotonic() > self.end:
            item.session.shouldstop = f"the time limit of {self.options.time_limit:g} s"
        if fnmatch.fnmatch(item.originalname, CHECKED_TESTS):
            os.environ["VOLTA_FA_CHECK_LENGTHS"] = "1"

    def pytest_runtest_teardown(self):
        os.environ.pop("VOLTA_FA_CHECK_LENGTHS", None)

    def pytest_runtest_logreport(self, report):
        if report.when != "call" and report.passed:
            return
        test = report.nodeid.split("::")[1]
        self.outcomes[report.outcome] += 1
        self.ran[test.split("[")[0]] += report.outcome != "skipped"
        if report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)
            message = crash.message.splitlines()[0] if crash else str(report.longrepr).splitlines()[-1]
            line = crash.lineno if crash else 0
            # messages that differ in numbers only count as one
            shape = re.sub(r"[-+]?\d[\d.]*(e[-+]?\d+)?", "#", message)
            self.failures[test.split("[")[0], line, shape].append((test, message))

    def summary(self) -> None:
        print("\n== ran:", ", ".join(f"{name} {count}" for name, count in sorted(self.ran.items())))
        for (name, line, _), cases in sorted(self.failures.items(), key=lambda item: -len(item[1])):
            test, message = cases[0]
            print(f"\n{len(cases)} x {name}, line {line}: {message}\n    {test}")
            print(f"    all have: {', '.join(common(case for case, _ in cases)) or 'nothing in common'}")
        if self.options.list:
            self.options.list.write_text("".join(f"{test}\n" for cases in self.failures.values() for test, _ in cases))
        failed, passed, skipped = (self.outcomes[kind] for kind in ("failed", "passed", "skipped"))
        print(f"\n{passed} passed, {failed} failed, {skipped} skipped (seed {self.options.seed})")


def common(tests) -> list[str]:
    """Returns the parameters that all of these cases share."""
    shared = set.intersection(*(set(re.split(r"-(?=\w+=)", test.partition("[")[2].removesuffix("]"))) for test in tests))
    return sorted(shared)


def install() -> None:
    """Installs the flash_attn names and the other modules that its tests import."""
    import volta_fa

    volta_fa.install_flash_attn_shim()
    import flash_attn.flash_attn_interface as interface

    # the tile sizes of flash-attn, which only `normalize_flash_attn_S` uses
    interface._get_block_size_n = None


def prepare(module: dict, options) -> None:
    """Runs at the end of the copy of FILE."""

    def normalised(attn_unnorm, q, k, v, query_padding_mask=None, *_, **__):
        if query_padding_mask is not None:
            attn_unnorm = attn_unnorm.masked_fill(~query_padding_mask[:, None, :, None], 0.0)
        return attn_unnorm

    assert "normalize_flash_attn_S" in module, "not flash-attn's tests/test_flash_attn.py"
    module["normalize_flash_attn_S"] = normalised
    sample(module, options)


def main() -> int:
    options = parse()
    if options.device == "cuda" and not torch.cuda.is_available():
        print("no CUDA device: --device cpu runs small cases (--max-seqlen) on the CPU", file=sys.stderr)
        return 2
    install()
    report = Report(options)
    hook = sys.modules["volta_fa_flash_attn_tests"] = type(sys)("volta_fa_flash_attn_tests")
    hook.prepare = lambda module: prepare(module, options)
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "test_flash_attn.py"
        last = "\n\nimport volta_fa_flash_attn_tests\nvolta_fa_flash_attn_tests.prepare(globals())\n"
        copy.write_text(adapted(options.file.read_text(), options.device) + last)
        os.chdir(folder)
        arguments = ["-q", "-p", "no:cacheprovider", "-W", "ignore", "--rootdir", folder, "-c", os.devnull, "--no-header"]
        arguments += ["--tb=short" if options.verbose else "--tb=no", "-r", "N" if not options.verbose else "f"]
        code = pytest.main([*arguments, str(copy)], plugins=[report])
    report.summary()
    return int(code)


if __name__ == "__main__":
    sys.exit(main())
