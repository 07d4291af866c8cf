"""Runs the mask cases of torch's own FlexAttention tests on volta_fa.

    python tools/gpu/flex_attention_tests.py FILE                       on the GPU
    python tools/gpu/flex_attention_tests.py FILE --device cpu
    python tools/gpu/flex_attention_tests.py FILE --tests 'test_builtin_*,*mask*'

FILE is `test/inductor/test_flex_attention.py` of PyTorch, of the release that is installed. FILE compares a compiled `flex_attention`
with torch's eager one in the same dtype and in fp64. This script changes:

- what FILE compiles is `volta_fa.flex_attention`; its eager references stay torch's own,
- the backend of torch.compile where FILE names none, with --backend: inductor on a GPU, aot_eager on the CPU unless given,
- FILE's sequence length S, with --seqlen,
- tests of Triton itself (LEFT_OUT: kernel options, generated code, its decoding kernel and more) are left out.

Cases that pass and ran on torch's own function once or more, because volta_fa has no kernel for a call, are counted apart.
Prints failures by message and exits non-zero if there were any. The tolerances are those of FILE.
"""

import argparse
import fnmatch
import os
import re
import sys
import tempfile
from collections import Counter, defaultdict
from pathlib import Path

import pytest
import torch

DEFAULT_TESTS = "*mask*,*builtin*,*gqa*,*GQA*,*logsumexp*,*lse*,*block_size*,*empty*,*causal*,*strided*,*captured*,*head_dependent*"
#: Tests of Triton's kernels and of the source code that inductor writes.
LEFT_OUT = "*kernel_options*,*triton*,*autotune*,*tma*,*code*,*inductor*,*flop*,*decoding*,*cpp*,*fp8*,*graph*,*debug*,*distributed*"


def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--tests", default=DEFAULT_TESTS, help="patterns of test names, comma-separated (%(default)s)")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--backend", help="of torch.compile")
    parser.add_argument("--seqlen", type=int, help="FILE's S")
    parser.add_argument("--limit", type=int, default=10**9, help="number of cases at most")
    parser.add_argument("--verbose", action="store_true", help="pytest's report of each failure")
    return parser.parse_args()


def adapted(source: str, seqlen: int | None) -> str:
    """Returns FILE with another sequence length."""
    return source if seqlen is None else re.sub(r"^S = \d+$", f"S = {seqlen}", source, flags=re.M)


def matches(name: str, patterns: str) -> bool:
    return any(fnmatch.fnmatch(name, pattern) for pattern in patterns.split(","))


class Report:
    """Chooses cases, and collects outcomes, failures by message, and how many cases ran on torch's own function, by reason."""

    def __init__(self, options):
        self.options = options
        self.outcomes: Counter = Counter()
        self.failures: defaultdict = defaultdict(list)
        self.fell_back: defaultdict = defaultdict(int)
        self.reasons: list[str] = []

    def pytest_collection_modifyitems(self, items):
        other = "*_cpu*" if self.options.device == "cuda" else "*_cuda*"  # FILE's names, where it makes them for several devices
        chosen = [i for i in items if matches(i.name, self.options.tests) and not matches(i.name, f"{LEFT_OUT},{other}")]
        items[:] = chosen[: self.options.limit]

    def pytest_runtest_setup(self, item):
        self.reasons.clear()
        torch._dynamo.reset()

    def pytest_runtest_logreport(self, report):
        if report.when != "call" and report.passed:
            return
        for reason in set(self.reasons):
            self.fell_back[reason] += 1
        fallback = report.passed and self.reasons
        self.outcomes["on torch's own function" if fallback else report.outcome] += 1
        if report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)
            message = (crash.message if crash else str(report.longrepr)).splitlines()[0]
            self.failures[re.sub(r"[-+]?\d[\d.]*(e[-+]?\d+)?", "#", message)[:200]].append(report.nodeid.split("::")[-1])

    def summary(self) -> None:
        for reason, count in sorted(self.fell_back.items()):
            print(f"{count} cases: no kernel for {reason}")
        for message, cases in sorted(self.failures.items(), key=lambda item: -len(item[1])):
            print(f"\n{len(cases)} x {message}\n    {cases[0]}")
        print("\n" + ", ".join(f"{count} {name}" for name, count in sorted(self.outcomes.items())))


def install(report: Report, backend: str) -> None:
    """Makes what FILE compiles volta_fa's function, and reports what runs on torch's own."""
    import torch.nn.attention.flex_attention as module

    import volta_fa
    import volta_fa.flex.compiled as compiled

    torch_function, torch_compile = module.flex_attention, torch.compile

    def flex_attention(*args, **kwargs):
        if torch.compiler.is_dynamo_compiling():
            return volta_fa.flex_attention(*args, **kwargs)
        return torch_function(*args, **kwargs)

    def compile_(function, **kwargs):
        return torch_compile(function, **({"backend": backend} | kwargs))

    module.flex_attention, torch.compile = flex_attention, compile_
    compiled.log_fallback = report.reasons.append


def main() -> int:
    options = parse()
    if options.device == "cuda" and not torch.cuda.is_available():
        print("no CUDA device: --device cpu runs on the CPU", file=sys.stderr)
        return 2
    report = Report(options)
    install(report, options.backend or ("inductor" if options.device == "cuda" else "aot_eager"))
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "test_flex_attention.py"
        copy.write_text(adapted(options.file.read_text(), options.seqlen))
        os.chdir(folder)
        arguments = ["-q", "-p", "no:cacheprovider", "-W", "ignore", "--rootdir", folder, "-c", os.devnull, "--no-header"]
        arguments += ["--tb=short", "-r", "f"] if options.verbose else ["--tb=no", "-r", "N"]
        code = pytest.main([*arguments, str(copy)], plugins=[report])
    report.summary()
    return int(code)


if __name__ == "__main__":
    sys.exit(main())
