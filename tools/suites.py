"""Runs test suites that others wrote on volta_fa, changed only as their adapters below say.

    python tools/suites.py flash-attn --sources FOLDER --sample 100 --workers 4 --time-limit 300 --json report.json
    python tools/suites.py flash-attn --sources FOLDER --device cpu --where 'max(seqlen_q, seqlen_k) <= 300' --sample 5
    python tools/suites.py sdpa --sources FOLDER --cases failed.txt          cases of an earlier report, one id per line

FOLDER has the checkouts of SUITES, each under the name of its repository: flash-attention, FlashMLA, SageAttention, comfy-kitchen,
xformers (with the same release installed) and pytorch. Debian's source package `pytorch` holds torch's tests; they need expecttest, and
flash-attn's need einops.

Cases run in random order, in processes of pytest-xdist. Each failure is printed when it happens. A crash or a case above --case-limit
ends one process, which another one replaces. --time-limit, SIGTERM and Ctrl-C end the run with a report of what ran. Failures are grouped
by reason: a known one of the adapter, else "PyTorch alone fails too" for suites that also run without volta_fa, else line and message.
The exit status is 1 if a failure has no known reason, or nothing passed. The tolerances are those of the suites.
"""

from __future__ import annotations

import argparse
import contextlib
import fnmatch
import functools
import importlib
import inspect
import io
import json
import math
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
import types
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

TORCH_ALONE = "PyTorch alone fails too"
OPTIONS = "VOLTA_FA_SUITES"


# In the processes that run cases


def grid(function) -> list[list[dict]]:
    """Returns the axes of a test function: for each mark its values, by the names of its parameters. None where a mark says more."""
    axes = []
    for mark in (m for m in getattr(function, "pytestmark", []) if m.name == "parametrize"):
        names, values = mark.args[:2]
        names = names.replace(" ", "").split(",") if isinstance(names, str) else names
        if mark.kwargs or any(isinstance(value, type(pytest.param())) for value in values):
            return []
        axes.append([dict(zip(names, value if len(names) > 1 else (value,))) for value in values])
    return axes


def drawn(axes: list[list[dict]], count: float, wanted: Callable[[dict], bool], rng: random.Random | None) -> list[dict]:
    """Returns at most `count` different cases: random ones, or the first without rng. Does not expand the grid, which takes minutes."""
    total, draws = math.prod(map(len, axes)), 100_000
    numbers: Iterable[int] = range(total)
    if rng is not None:
        numbers = rng.sample(numbers, total) if total <= draws else (rng.randrange(total) for _ in range(draws))
    cases: dict[int, dict] = {}
    for number in numbers:
        if len(cases) >= count:
            break
        case, rest = {}, number
        for axis in axes:
            rest, at = divmod(rest, len(axis))
            case |= axis[at]
        if wanted(case):
            cases[number] = case
    return list(cases.values())


def flat(case: dict) -> dict:
    """Returns a case with the entries of its dictionaries in place of these."""
    return {k: v for name, value in case.items() for k, v in (value.items() if isinstance(value, dict) else [(name, value)])}


def label(case: dict) -> str:
    return "-".join(f"{name}={str(value).removeprefix('torch.')}" for name, value in sorted(flat(case).items()))


@functools.cache
def compiled(where: str) -> Any:
    return compile(where, "--where", "eval")


def fits(case: dict, where: str) -> bool:
    """Returns whether a case satisfies the expression `where`. A case without a parameter that it names does."""
    try:
        return not where or bool(eval(compiled(where), {}, flat(case)))
    except NameError:
        return True


def asked_for(name: str, options) -> bool:
    """Returns whether --tests names a test, with or without its parameters."""
    return any(fnmatch.fnmatch(name.partition("[")[0], pattern) or fnmatch.fnmatch(name, pattern) for pattern in options.tests.split(","))


def prepare(module: dict) -> None:
    """Runs at the end of each module of a suite. Replaces the parameter grids of its tests by samples, whose ids name the parameters."""
    options = types.SimpleNamespace(**json.loads(os.environ[OPTIONS]))
    suite, listed = SUITES[options.suite], options.cases and {case.rpartition("::")[2] for case in options.cases}
    suite.prepare(module, options)
    for name, function in [(n, f) for n, f in module.items() if n.startswith("test_") and inspect.isfunction(f)]:
        axes = [[case for case in axis if fits(case, options.where)] for axis in grid(function)]
        if not asked_for(name, options):
            del module[name]
        elif axes:

            def wanted(case, name=name):
                return fits(case, options.where) and suite.wanted(case) and (not listed or f"{name}[{label(case)}]" in listed)

            rng = None if listed else random.Random(f"{options.seed} {name}")
            cases = drawn(axes, options.sample or math.inf if not listed else math.inf, wanted, rng)
            names = [key for axis in axes for key in axis[0]] if all(axes) else []
            # pytest takes a tuple of one value for the value
            rows = [tuple(case[key] for key in names) if len(names) > 1 else case[names[0]] for case in cases]
            function.pytestmark = [mark for mark in function.pytestmark if mark.name != "parametrize"]
            module[name] = pytest.mark.parametrize(",".join(names) or "_", rows, ids=list(map(label, cases)))(function)
            if not rows:
                del module[name]


def case_name(nodeid: str) -> str:
    path, colons, rest = nodeid.partition("::")
    return Path(path).name + colons + rest


class Worker:
    """Chooses cases, and adds to their reports what went wrong where and which calls did not run on volta_fa."""

    def __init__(self, options):
        self.options, self.suite = options, SUITES[options.suite]
        self.used = list if options.alone else self.suite.install(options)
        self.lost = False

    def runs(self, item) -> bool:
        # torch has a class of tests for each kind of device
        if getattr(item.cls, "device_type", self.options.device) != self.options.device:
            return False
        if self.options.cases:
            return case_name(item.nodeid) in self.options.cases
        return asked_for(item.nodeid.partition("::")[2], self.options)

    def pytest_collection_modifyitems(self, items):
        rng, groups = random.Random(self.options.seed), defaultdict(list)
        for item in filter(self.runs, items):
            groups[item.cls, inspect.unwrap(item.obj).__name__].append(item)
            for reason, pattern in self.suite.left_out.items():
                if re.search(pattern, item.nodeid):
                    item.add_marker(pytest.mark.skip(reason=f"left out: {reason}"))
        for group in groups.values():
            rng.shuffle(group)
        items[:] = [item for group in groups.values() for item in group[: None if self.options.cases else self.options.sample]]
        rng.shuffle(items)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self):
        self.used()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, call):
        report = yield
        line, lines = 0, str(report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr or "").splitlines()
        if report.failed and call.excinfo is not None:
            lines = [line.strip() for line in f"{call.excinfo.typename}: {call.excinfo.value}".splitlines() if line.strip()]
            lines = [line for line in lines if not line.startswith("+ ")]  # where pytest took a value from
            # the last line of the suite itself
            line = [0, *(entry.lineno + 1 for entry in call.excinfo.traceback if os.getcwd() in str(entry.path))][-1]
        if hasattr(report, "wasxfail"):
            lines = ["fails as the suite expects"]
        report.message, report.line, report.used = " | ".join(lines[:4])[:500], line, self.used() if report.when == "call" else []
        self.lost = bool(report.failed and re.search("CUDA error|CUBLAS_STATUS|device-side assert", report.message))
        return report

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logfinish(self):
        if self.lost and self.options.workers:
            os._exit(1)  # the process has no GPU any more: pytest-xdist starts another one


def pytest_configure(config) -> None:
    options = types.SimpleNamespace(**json.loads(os.environ[OPTIONS]))
    if not options.workers or hasattr(config, "workerinput"):
        config.pluginmanager.register(Worker(options))


# In the process that reports


@dataclass
class Failure:
    case: str
    message: str
    line: int
    reason: str


class Report:
    """Collects what happens to cases, and prints failures."""

    def __init__(self, suite: Suite):
        self.suite, self.chosen, self.started = suite, 0, {}
        self.stdout = os.fdopen(os.dup(1), "w")  # pytest keeps what is printed to sys.stdout until its end
        self.outcomes: dict[str, str] = {}
        self.skipped, self.fell_back, self.failures = Counter(), Counter(), []

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids):
        self.chosen = len(ids)

    def pytest_collection_finish(self, session):
        self.chosen = len(session.items)

    def pytest_collectreport(self, report):
        if report.failed:
            self.fail(report.nodeid, f"does not load: {str(report.longrepr).strip().splitlines()[-1]}", 0)

    def pytest_report_teststatus(self):
        return "", "", ""  # no letters between the failures

    def pytest_runtest_logstart(self, nodeid):
        self.started[nodeid] = time.monotonic()

    def pytest_runtest_logreport(self, report):
        used = getattr(report, "used", [])
        self.fell_back.update(set(used))
        if report.failed and self.outcomes.get(report.nodeid) != "failed":
            message = getattr(report, "message", None)
            if message is None:  # pytest-xdist's report of a process that ended
                seconds = time.monotonic() - self.started.get(report.nodeid, math.inf)
                message = f"the process ended after {max(0, seconds):.0f} s"
            self.fail(report.nodeid, message, getattr(report, "line", 0))
        elif report.skipped:
            self.skipped[report.message.removeprefix("Skipped: ")] += 1
            self.outcomes[report.nodeid] = "skipped"
        elif report.when == "call" and report.passed:
            self.outcomes[report.nodeid] = "passed, with calls that PyTorch ran" if used else "passed"

    def fail(self, nodeid: str, message: str, line: int) -> None:
        case = case_name(nodeid)
        known = next((why for why, pattern in self.suite.known.items() if re.search(pattern, f"{case}: {message}")), "")
        self.outcomes[nodeid] = "failed"
        self.failures.append(Failure(case, message, line, known))
        print(f"FAILED {case}, line {line}: {message[:300]}{f' [{known}]' if known else ''}", file=self.stdout, flush=True)

    def unknown(self) -> list[Failure]:
        return [failure for failure in self.failures if not failure.reason]

    def summary(self) -> dict[str, Any]:
        """Returns counts, and failures by reason. Messages that differ in numbers only are one reason."""
        groups = defaultdict(list)
        for failure in self.failures:
            shape = re.sub(r"0x[0-9a-f]+|[-+]?\d[\d.]*(e[-+]?\d+)?", "#", failure.message[:200])
            groups[failure.reason or f"line {failure.line}: {shape}"].append(failure)
        failures = [
            {"reason": reason, "known": bool(found[0].reason), "count": len(found), "common": common(f.case for f in found)}
            | {"message": found[0].message, "cases": [f.case for f in found]}
            for reason, found in sorted(groups.items(), key=lambda item: -len(item[1]))
        ]
        counts = {**Counter(self.outcomes.values()), "did not run": max(0, self.chosen - len(self.outcomes))}
        return {"counts": counts, "skipped": self.skipped, "fell_back": self.fell_back, "failures": failures}


def common(cases: Iterable[str]) -> list[str]:
    """Returns the parameters that all of these cases share."""
    return sorted(set.intersection(*(set(re.split(r"-(?=\w+=)", case.partition("[")[2].removesuffix("]"))) for case in cases)) - {""})


def run(options, report: Report, seconds: float) -> None:
    """Runs a suite for at most these seconds."""
    suite = report.suite
    with tempfile.TemporaryDirectory() as temporary:
        # pytest imports a package's modules by the folder's name
        folder = Path(temporary).resolve() / Path(suite.folder).name
        shutil.copytree(options.sources / suite.folder, folder, ignore=lambda _, names: set(names) & {"conftest.py"})
        files = [folder / name for name in suite.files if (folder / name).exists()]
        for file in files:
            file.write_text(f"{suite.adapt(file.read_text(), options)}\n\nimport suites\nsuites.prepare(globals())\n")
        os.environ[OPTIONS] = json.dumps(vars(options), default=str)
        os.chdir(folder)
        arguments = ["-p", "suites", "-p", "no:cacheprovider", "-q", "-W", "ignore", "--rootdir", temporary, "-c", os.devnull]
        arguments += ["--no-header", "--tb=no", "-r", "N", "--continue-on-collection-errors", *map(str, files)]
        if options.workers:
            arguments += ["-n", str(options.workers), "--max-worker-restart", "100"]
            arguments += ["-o", f"faulthandler_timeout={options.case_limit}", "-o", "faulthandler_exit_on_timeout=true"]
        signal.setitimer(signal.ITIMER_REAL, max(0.1, seconds) if seconds < math.inf else 0)
        pytest.main(arguments, plugins=[report])
        signal.setitimer(signal.ITIMER_REAL, 0)
        os.chdir("/")


def show(summary: dict) -> None:
    for kind in ("skipped", "fell_back"):
        for reason, count in summary[kind].most_common():
            print(f"{kind.replace('_', ' ')}: {count} x {reason[:200]}")
    for group in summary["failures"]:
        print(f"\n{group['count']} x {group['reason']}{' (known)' if group['known'] else ''}")
        print(f"    {group['cases'][0]}: {group['message'][:300]}")
        print(f"    all have: {', '.join(group['common']) or 'nothing in common'}")
    print("\n" + ", ".join(f"{count} {name}" for name, count in summary["counts"].items()), flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("suite", choices=SUITES)
    parser.add_argument("--sources", type=Path, required=True)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--tests", default="*", help="patterns of test functions (Class::name with a class), comma-separated")
    parser.add_argument("--sample", type=int, help="cases of each test function at most (default: of the suite, else all)")
    parser.add_argument("--where", default="", help="a Python expression of parameters of a parameter grid that its cases satisfy")
    parser.add_argument("--cases", type=Path, help="a file with the ids of cases to run, and no others")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=1, help="processes; 0 runs cases in this one, where a crash or a long case ends all")
    parser.add_argument("--time-limit", type=float, default=math.inf, help="of the run, in seconds")
    parser.add_argument("--case-limit", type=float, default=300, help="of a case, in seconds")
    parser.add_argument("--backend", help="of torch.compile where the suite names none (default: inductor, aot_eager on the CPU)")
    parser.add_argument("--json", type=Path, help="where to write the report")
    options = parser.parse_args()
    suite, start = SUITES[options.suite], time.monotonic()
    options.sources, options.json = options.sources.absolute(), options.json and options.json.absolute()
    options.sample, options.alone = suite.sample if options.sample is None else options.sample, False
    options.cases = options.cases and options.cases.read_text().split("\n")
    if not any((options.sources / suite.folder / file).exists() for file in suite.files):
        parser.error(f"--sources: got {options.sources} without {suite.folder}/{suite.files[0]}, expected a folder with that checkout")
    import torch

    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device: got cuda, and torch finds no CUDA device: --device cpu runs on the CPU")
    threads = max(1, (os.cpu_count() or 1) // max(1, options.workers))
    defaults = {"OMP_NUM_THREADS": str(threads), "TORCHINDUCTOR_COMPILE_THREADS": "1", "PYTORCH_PRINT_REPRO_ON_FAILURE": "0"}
    os.environ.update(defaults | os.environ)
    for number in (signal.SIGTERM, signal.SIGALRM):
        signal.signal(number, signal.default_int_handler)
    report = Report(suite)
    # a fifth of the time is for the failures
    run(options, report, options.time_limit * (0.8 if suite.runs_alone else 1))
    if suite.runs_alone and (again := report.unknown()):
        print(f"\n{len(again)} cases without volta_fa:", flush=True)
        alone = Report(suite)
        run(
            argparse.Namespace(**vars(options) | {"cases": [f.case for f in again], "alone": True}),
            alone,
            options.time_limit + start - time.monotonic(),
        )
        fails = {failure.case for failure in alone.failures}
        for failure in again:
            failure.reason = TORCH_ALONE if failure.case in fails else ""
    summary = report.summary()
    show(summary)
    if options.json:
        head = {"suite": options.suite, "seed": options.seed, "device": options.device, "torch": torch.__version__}
        head |= {"seconds": round(time.monotonic() - start)}
        options.json.write_text(json.dumps(head | summary, indent=1) + "\n")
    return int(bool(report.unknown()) or not any(name.startswith("passed") for name in summary["counts"]))


# Adapters


def nothing(*_) -> None: ...


def anything(_: dict) -> bool:
    return True


def unchanged(source: str, _) -> str:
    return source


@dataclass(frozen=True)
class Suite:
    """What the runner has to know of a suite."""

    #: Folder below --sources, which is copied, and the files of tests in it. Those that are missing in a release are left out.
    folder: str
    files: tuple[str, ...]
    #: Makes the suite's calls run on volta_fa. The function that it returns says why calls since its last call did not.
    install: Callable[[Any], Callable[[], list[str]]]
    #: Changes a file's source.
    adapt: Callable[[str, Any], str] = unchanged
    #: Changes a file's module at its end.
    prepare: Callable[[dict, Any], None] = nothing
    #: Whether a case of a parameter grid runs.
    wanted: Callable[[dict], bool] = anything
    #: Patterns of tests that do not run, and of failures (`case: message`), by reason.
    left_out: dict[str, str] = field(default_factory=dict)
    known: dict[str, str] = field(default_factory=dict)
    #: Cases of each test function unless --sample says how many.
    sample: int | None = None
    #: Whether it runs on PyTorch without volta_fa.
    runs_alone: bool = False


def on_device(source: str, options) -> str:
    """Returns a source for a device. It asks `torch.cuda` only for memory and limits of some GPUs."""
    if options.device == "cuda":
        return source
    source = re.sub(r"torch\.cuda\.get_device_capability\([^)]*\)", "(9, 0)", source)
    source = re.sub(r'device\s*=\s*"cuda(:0)?"', f'device="{options.device}"', source)
    source = re.sub(r"torch\.cuda\.get_device_properties\([^)]*\)\.total_memory", "2**40", source)
    source = source.replace('torch.device("cuda:0")', f'torch.device("{options.device}")').replace(".cuda()", f'.to("{options.device}")')
    source = re.sub(r"^\s*torch\.cuda\.(synchronize|set_device)\(.*\)\n", "", source, flags=re.MULTILINE)
    return source.replace("torch.cuda.is_available()", "True")


# flash-attn


def install_flash_attn(_) -> Callable[[], list[str]]:
    import volta_fa

    volta_fa.install_flash_attn_shim()
    import flash_attn.flash_attn_interface as interface

    # the tile sizes of flash-attn, which only `normalize_flash_attn_S` uses
    interface._get_block_size_n = None
    return list


def adapt_flash_attn(source: str, options) -> str:
    # volta_fa raises ValueError for wrong arguments
    return on_device(source.replace("pytest.raises(RuntimeError,", "pytest.raises((RuntimeError, ValueError),"), options)


def prepare_flash_attn(module: dict, _) -> None:
    def normalized(attn_unnorm, q, k, v, query_padding_mask=None, *_, **__):
        """flash-attn returns unnormalized dropout probabilities by tile; here they are exact."""
        hidden = None if query_padding_mask is None else ~query_padding_mask[:, None, :, None]
        return attn_unnorm if hidden is None else attn_unnorm.masked_fill(hidden, 0.0)

    def checked(function):
        @functools.wraps(function)
        def run(*args, **kwargs):
            os.environ["VOLTA_FA_CHECK_LENGTHS"] = "1"
            try:
                return function(*args, **kwargs)
            finally:
                del os.environ["VOLTA_FA_CHECK_LENGTHS"]

        return run

    if "normalize_flash_attn_S" in module:
        module["normalize_flash_attn_S"] = normalized
    # tests that expect errors for lengths in GPU memory
    module |= {name: checked(function) for name, function in module.items() if fnmatch.fnmatch(name, "test_*_bounds")}


def wanted_flash_attn(case: dict) -> bool:
    """Leaves out what the file itself skips, after its setup."""
    paged, rotary = case.get("paged_kv_block_size"), case.get("rotary_fraction", 0) > 0
    return not (paged and (case.get("has_leftpad") or case.get("has_batch_idx"))) and (case.get("new_kv", True) or not rotary)


# FlashMLA


def install_flash_mla(_) -> Callable[[], list[str]]:
    sys.modules["flash_mla"] = importlib.import_module("volta_fa.flash_mla")
    return list


def prepare_flash_mla(module: dict, options) -> None:
    """Makes the cases of the file's own loop tests: all with one KV head, which `volta_fa.flash_mla` has, that measure no time."""
    import torch

    test, param, capability, cases = module["test_flash_mla"], module["TestParam"], torch.cuda.get_device_capability, []
    # the file asserts the GPU that FlashMLA's kernels need
    torch.cuda.get_device_capability = lambda *_: (9, 0)
    for dtype in ("float16", "bfloat16"):
        listed: list = []
        module["test_flash_mla"] = listed.append
        module["main"](getattr(torch, dtype))
        cases += [{"dtype": dtype, **vars(c)} for c in listed if c.h_kv == 1 and not c.test_performance]
    torch.cuda.get_device_capability = capability

    def test_flash_mla(case):
        torch.set_default_dtype(getattr(torch, case["dtype"]))
        said = io.StringIO()
        try:
            with contextlib.redirect_stdout(said):
                test(param(**{name: value for name, value in case.items() if name != "dtype"}))
        except AssertionError as error:
            # after a rule and the case
            raise AssertionError("; ".join(said.getvalue().splitlines()[2:]) or str(error)) from None

    param.__test__ = False
    module["test_flash_mla"] = pytest.mark.parametrize("case", cases)(test_flash_mla)


# torch


def install_sdpa(options) -> Callable[[], list[str]]:
    import volta_fa

    volta_fa.enable_sdpa("cpu" if options.device == "cpu" else None, force=options.device != "cpu")
    return lambda: list(volta_fa.sdpa_stats(reset=True)["fell_back"])


def install_flex(options) -> Callable[[], list[str]]:
    """Enables FlexAttention. The suite's eager references stay torch's own."""
    import torch
    import torch.nn.attention.flex_attention as module

    import volta_fa
    from volta_fa.flex import attention, compiled, routing

    torch_function, torch_compile, reasons = module.flex_attention, torch.compile, []
    volta_fa.enable_flex("cpu" if options.device == "cpu" else None, force=options.device != "cpu")
    enabled = module.flex_attention

    def flex_attention(*args, **kwargs):
        if torch.compiler.is_dynamo_compiling():
            return enabled(*args, **kwargs)
        devices, routing.devices = routing.devices, routing.NO_DEVICES
        try:
            return torch_function(*args, **kwargs)
        finally:
            routing.devices = devices

    def compile_(*args, **kwargs):
        return torch_compile(*args, **({"backend": options.backend or "aot_eager"} | kwargs))

    module.flex_attention = flex_attention
    if options.backend or options.device == "cpu":
        torch.compile = compile_
    attention.log_fallback = compiled.log_fallback = reasons.append

    def used() -> list[str]:
        torch._dynamo.reset()
        found = list(reasons)
        reasons.clear()
        return found

    return used


def adapt_torch(source: str, _) -> str:
    """Replaces imports that torch has not, or not any more: their tests fail, or are left out."""
    source = re.sub(r"from test_cpp_extensions_open_device_registration import \(\s*generate_faked_module\s*\)", "pass", source)
    return source.replace("import create_nested_block_mask, flex_attention", "import flex_attention")


# SageAttention and comfy-kitchen


def select_fast_kernels(device: str) -> None:
    """Lets a tuning choose the fast kernels for all lengths, which the plan takes from 1024 keys on."""
    import torch

    import volta_fa

    if device != "cuda":
        return
    names = [v["name"] for v in volta_fa.info()["variants"] if v["pass"] == "FastForward"]
    # the plain one first, then that with lengths and masks
    names.sort(key=lambda name: (int(name.rpartition("x")[2]), "generic" in name))
    choices = [{"pass": "FastForward", "variant": name} for name in names]
    torch.ops.volta_fa._set_tuning(json.dumps({"format": 1, "choices": choices}))


def install_sageattention(options) -> Callable[[], list[str]]:
    import volta_fa

    select_fast_kernels(options.device)
    volta_fa.install_sageattention_shim(replace=True)
    return list


def prepare_sageattention(module: dict, _) -> None:
    """Makes a test of the script: it prints differences, and says that all but the largest relative one are to be below 0.05."""

    def test_differences():
        output = io.StringIO()
        with contextlib.redirect_stdout(output):
            module["torch"].manual_seed(0)
            module["main"]()
        found = {name: float(value) for name, value in re.findall(r"(\w+_[ar]tol)=(\S+)", output.getvalue())}
        assert len(found) == 4 and all(value < 0.05 for name, value in found.items() if name != "max_rtol"), found

    module["test_differences"] = test_differences


def install_comfy_kitchen(options) -> Callable[[], list[str]]:
    """Makes comfy_kitchen's attention, laid out as torch's. It rotates Q and K; `fwd_fast` has no fp32, which is cast to fp16 and back."""
    import torch

    import volta_fa

    select_fast_kernels(options.device)

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
    sys.modules |= {"comfy_kitchen": made, "comfy_kitchen.sage_attention": made.sage_attention}
    return list


# xformers


def install_xformers(options) -> Callable[[], list[str]]:
    """Puts operators with volta_fa's declarations in the place of xformers' lists, which its tests read, and calls of them on `fmha`."""
    import torch
    from xformers.ops import fmha
    from xformers.ops.fmha import attn_bias
    from xformers.ops.fmha.common import AttentionBwOpBase, AttentionFwOpBase

    import volta_fa
    from volta_fa.integrations.xformers import _RULES

    biases = {name: getattr(attn_bias, name, None) for name in _RULES} | {"None": type(None), "Tensor": torch.Tensor}
    cpu = options.device == "cpu"

    class Declarations:
        OPERATOR = staticmethod(lambda: None)
        SUPPORTED_DEVICES = frozenset({options.device})
        SUPPORTED_DTYPES = frozenset({torch.float32 if cpu else torch.float16})
        SUPPORTED_MAX_K = 256
        SUPPORTS_DROPOUT = SUPPORTS_CUSTOM_SCALE = SUPPORTS_DIFFERENT_VALUE_EMBED = SUPPORTS_BMGHK = True
        _TEST_BATCH_SIZES = (1, 7)

        @classmethod
        def is_available(cls) -> bool:
            return True

    class Forward(Declarations, AttentionFwOpBase):
        NAME = "voltaF"
        SUPPORTED_ATTN_BIAS_TYPES = tuple(kind for kind in biases.values() if kind is not None)

    class Backward(Declarations, AttentionBwOpBase):
        NAME = "voltaB"
        SUPPORTS_ATTN_BIAS_GRAD = True
        SUPPORTED_ATTN_BIAS_TYPES = tuple(kind for kind in Forward.SUPPORTED_ATTN_BIAS_TYPES if not kind.__name__.startswith("Paged"))

    fmha.ALL_FW_OPS[:], fmha.ALL_BW_OPS[:] = [Forward], [Backward]
    volta_fa.enable_xformers(options.device, force=not cpu)
    door = fmha._memory_efficient_attention

    def forward(query: Any, key: Any, value: Any, bias: Any = None, p: float = 0.0, scale: Any = None, *, op: Any = None) -> Any:
        return door(fmha.Inputs(query=query, key=key, value=value, attn_bias=bias, p=p, scale=scale), None)

    fmha._memory_efficient_attention = lambda inp, op=None: door(inp, None)
    fmha.memory_efficient_attention_forward = sys.modules["xformers.ops"].memory_efficient_attention_forward = forward
    counts = Counter()

    def used() -> list[str]:
        found = Counter(volta_fa.xformers_stats()["fell_back"])
        new = found - counts
        counts.update(new)
        return list(new)

    return used


TORCH = {"folder": "pytorch/test", "adapt": adapt_torch, "runs_alone": True}
FLEX = TORCH | {
    "install": install_flex,
    "known": {"P is handed on in fp16: 1.2 times eager's mean error": r"Grad_(Query|Key) Compiled error"},
}
SDPA = TORCH | {"install": install_sdpa}
SUITES = {
    "flash-attn": Suite(
        "flash-attention/tests",
        ("test_flash_attn.py", "test_rotary.py", "ops/triton/test_layer_norm.py", "losses/test_cross_entropy.py"),
        install_flash_attn,
        adapt_flash_attn,
        prepare_flash_attn,
        wanted_flash_attn,
        sample=500,
    ),
    "flash-mla": Suite("FlashMLA/tests", ("test_flash_mla_dense_decoding.py",), install_flash_mla, on_device, prepare_flash_mla),
    "sdpa": Suite(
        files=("test_transformers.py",),
        left_out={"builds a C++ extension": "PrivateUse1"},
        known={"repeats the dropout mask of PyTorch's own kernel": r"dropout(_p)?_0_[1-9]"},
        **SDPA,
    ),
    "nested": Suite(files=("test_nestedtensor.py",), **SDPA),
    "flex": Suite(files=("inductor/test_flex_attention.py",), **FLEX),
    "flex-decoding": Suite(files=("inductor/test_flex_decoding.py",), **FLEX),
    "sageattention": Suite("SageAttention/tests", ("test_sageattn.py",), install_sageattention, on_device, prepare_sageattention),
    "comfy-kitchen": Suite(
        "comfy-kitchen/tests",
        ("test_int8_attention.py",),
        install_comfy_kitchen,
        on_device,
        left_out={"of comfy-kitchen's own parts": "availability|cta_k_selection|rejects_cpu|y_dispatch|hip_dispatch|allocates|releases"},
    ),
    "xformers": Suite(
        "xformers/tests",
        ("test_mem_eff_attention.py",),
        install_xformers,
        left_out={
            "of xformers' dispatcher, logsumexp and other kernels": "::(?!test_(.*_)?(forward|backward|custom_scale|grad_check|empty))"
        },
    ),
}

if __name__ == "__main__":
    import suites  # pytest loads this module by its name

    sys.exit(suites.main())
