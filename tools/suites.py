"""Runs on volta_fa the test suites of other projects (flash-attn, PyTorch and others), changed only as suite_adapters.py says.

    python tools/suites.py flash-attn --sources FOLDER --sample 100 --workers 4 --time-limit 300 --json report.json
    python tools/suites.py flash-attn --sources FOLDER --device cpu --where 'max(seqlen_q, seqlen_k) <= 300' --sample 5
    python tools/suites.py sdpa --sources FOLDER --cases failed.txt          cases of an earlier report, one id per line

FOLDER has the checkouts of SUITES, each under the name of its repository: flash-attention, flash-attention-turing, FlashMLA,
SageAttention, comfy-kitchen, xformers (with the same release installed) and pytorch. Debian's source package `pytorch` holds torch's tests;
they need expecttest, and flash-attn's need einops.

Cases run in random order, in processes of pytest-xdist. Each failure is printed when it happens. A crash or a case above --case-limit
ends one process, which another one replaces. --time-limit, SIGTERM and Ctrl-C end the run with a report of what ran. Failures are grouped
by reason: a known one of the adapter, else "PyTorch alone fails too" for suites that also run without volta_fa, else line and message.
The exit status is 1 if a failure has no known reason, or nothing passed. The tolerances are those of the suites."""

from __future__ import annotations

import argparse
import fnmatch
import functools
import inspect
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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from suite_adapters import SUITES, Suite  # by name: files, functions that adapt them to volta_fa, known failures

#: Environment variable with the options as JSON, for the processes that run cases: main()'s, and `alone`, true to run without volta_fa.
OPTIONS = "VOLTA_FA_SUITES"


# In the processes that run cases. run() below appends a call of prepare() to each test file, and pytest loads this module as a plugin.


def grid(function) -> list[list[dict]]:
    """Returns the axes of a test function's grid: for each `parametrize` mark a list of its values, by the names of its parameters.

    Empty if a mark says more than names and values."""
    axes = []
    for mark in (m for m in getattr(function, "pytestmark", []) if m.name == "parametrize"):
        if mark.kwargs or len(mark.args) != 2:
            return []
        names, values = mark.args
        names = names.replace(" ", "").split(",") if isinstance(names, str) else names
        if any(isinstance(value, type(pytest.param())) for value in values):
            return []
        axes.append([dict(zip(names, value if len(names) > 1 else (value,))) for value in values])
    return axes


def drawn(axes: list[list[dict]], count: float, wanted: Callable[[dict], bool], rng: random.Random | None) -> list[dict]:
    """Returns at most `count` different wanted cases, each a value of every axis: random ones, or the first without rng.

    Does not expand the grid, which takes minutes. A case has a number: its index in the expanded grid."""
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
    """Returns the id of a case: its parameters in alphabetical order."""
    return "-".join(f"{name}={str(value).removeprefix('torch.')}" for name, value in sorted(flat(case).items()))


compiled = functools.cache(lambda where: compile(where, "--where", "eval"))


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
    suite = SUITES[options.suite]
    listed = options.cases and {case.rpartition("::")[2] for case in options.cases}  # names of --cases, without files
    suite.prepare(module, options)
    for name, function in [(n, f) for n, f in module.items() if n.startswith("test_") and inspect.isfunction(f)]:
        axes = [[case for case in axis if fits(case, options.where)] for axis in grid(function)]
        if not asked_for(name, options):
            del module[name]
        elif axes:

            def wanted(case, name=name):
                return fits(case, options.where) and suite.wanted(case) and (not listed or f"{name}[{label(case)}]" in listed)

            if listed:
                cases = drawn(axes, math.inf, wanted, None)
            else:
                cases = drawn(axes, options.sample or math.inf, wanted, random.Random(f"{options.seed} {name}"))
            names = [key for axis in axes for key in axis[0]] if all(axes) else []
            # pytest takes a tuple of one value for the value
            rows = [tuple(case[key] for key in names) if len(names) > 1 else case[names[0]] for case in cases]
            function.pytestmark = [mark for mark in function.pytestmark if mark.name != "parametrize"]
            module[name] = pytest.mark.parametrize(",".join(names) or "_", rows, ids=list(map(label, cases)))(function)
            if not rows:
                del module[name]


def case_name(nodeid: str) -> str:
    """Returns a case's id with the name of its file alone, without folders."""
    path, colons, rest = nodeid.partition("::")
    return Path(path).name + colons + rest


class Worker:
    """pytest plugin of a process that runs cases: chooses them, and adds to reports what went wrong where and which calls fell back."""

    def __init__(self, options):
        self.options, self.suite = options, SUITES[options.suite]
        #: Returns the reasons of calls that fell back to PyTorch since it was last called: with `list`, none.
        self.fallbacks = list if options.alone else self.suite.install(options)
        self.lost = False  # whether this process can no longer use its GPU

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
        self.fallbacks()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, call):
        report = yield
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr or ""  # of a skip: (file, line, reason)
        line, lines = 0, str(reason).splitlines()
        if report.failed and call.excinfo is not None:
            lines = [line.strip() for line in f"{call.excinfo.typename}: {call.excinfo.value}".splitlines() if line.strip()]
            lines = [line for line in lines if not line.startswith("+ ")]  # where pytest took a value from
            # the last line of the suite itself
            line = [0, *(entry.lineno + 1 for entry in call.excinfo.traceback if os.getcwd() in str(entry.path))][-1]
        if hasattr(report, "wasxfail"):
            lines = ["fails as the suite expects"]
        report.message, report.line = " | ".join(lines[:4])[:500], line
        report.fallbacks = self.fallbacks() if report.when == "call" else []
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
    """A failed case."""

    case: str  # its id
    message: str
    line: int  # of the suite's file; 0: unknown
    reason: str  # why the failure is known; "": it is not


class Report:
    """pytest plugin of the process that reports: collects what happens to cases, and prints failures."""

    def __init__(self, suite: Suite):
        #: chosen: number of cases. started: seconds of time.monotonic() by case.
        self.suite, self.chosen, self.started = suite, 0, {}
        self.stdout = os.fdopen(os.dup(1), "w")  # pytest keeps what is printed to sys.stdout until its end
        #: By case: passed, failed, skipped or "passed, with calls that PyTorch ran".
        self.outcomes: dict[str, str] = {}
        #: Numbers of cases by reason, twice, and Failures.
        self.skipped, self.fell_back, self.failures = Counter(), Counter(), []

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids):
        self.chosen = len(ids)

    def pytest_collection_finish(self, session):
        self.chosen = len(session.items)

    def pytest_collectreport(self, report):
        if report.failed:
            self.fail(report.nodeid, f"does not load: {str(report.longrepr).strip().splitlines()[-1]}", line=0)

    def pytest_report_teststatus(self):
        return "", "", ""  # no letters between the failures

    def pytest_runtest_logstart(self, nodeid):
        self.started[nodeid] = time.monotonic()

    def pytest_runtest_logreport(self, report):
        fallbacks = getattr(report, "fallbacks", [])
        self.fell_back.update(set(fallbacks))
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
            self.outcomes[report.nodeid] = "passed, with calls that PyTorch ran" if fallbacks else "passed"

    def fail(self, nodeid: str, message: str, line: int) -> None:
        """Records a failure with its known reason, if the suite has one, and prints it."""
        case = case_name(nodeid)
        known = next((why for why, pattern in self.suite.known.items() if re.search(pattern, f"{case}: {message}")), "")
        self.outcomes[nodeid] = "failed"
        self.failures.append(Failure(case, message, line, known))
        print(f"FAILED {case}, line {line}: {message[:300]}{f' [{known}]' if known else ''}", file=self.stdout, flush=True)

    def unknown(self) -> list[Failure]:
        """Returns the failures without a known reason."""
        return [failure for failure in self.failures if not failure.reason]

    def summary(self) -> dict[str, Any]:
        """Returns counts, and failures by reason. Messages that differ in numbers only are one reason."""
        groups = defaultdict(list)
        for failure in self.failures:
            shape = re.sub(r"0x[0-9a-f]+|[-+]?\d[\d.]*(e[-+]?\d+)?", "#", failure.message[:200].split(". Tried to allocate")[0])
            groups[failure.reason or f"line {failure.line}: {shape}"].append(failure)
        failures = [
            {"reason": reason, "known": bool(found[0].reason), "count": len(found), "common": common(f.case for f in found)}
            | {"message": found[0].message, "cases": [f.case for f in found]}
            for reason, found in sorted(groups.items(), key=lambda item: -len(item[1]))
        ]
        counts = {**Counter(self.outcomes.values()), "did not run": max(0, self.chosen - len(self.outcomes))}
        return {"counts": counts, "skipped": self.skipped, "fell_back": self.fell_back, "failures": failures}


def common(cases: Iterable[str]) -> list[str]:
    """Returns the parameters that all of these cases share. A case is as `file.py::test[causal=True-d=64]`."""
    parameters = (set(re.split(r"-(?=\w+=)", case.partition("[")[2].removesuffix("]"))) for case in cases)
    return sorted(set.intersection(*parameters) - {""})


class Signals:
    """Makes signals end the cases of a run, and no more than these: the report follows. pytest takes an interruption as their end."""

    def __init__(self):
        self.running = self.stopped = False
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGALRM):
            signal.signal(number, self.receive)

    def receive(self, number: int, _) -> None:
        self.stopped |= number != signal.SIGALRM
        if self.running:
            self.running = False
            raise KeyboardInterrupt

    def end(self, cases: Callable[[], Any]) -> None:
        self.running = not self.stopped
        try:
            if self.running:
                cases()
            self.running = False
        except BaseException:  # pytest itself fails if it is interrupted where a frame has no line number, as at `with` in Python 3.11
            if self.running:
                raise


def run(options, report: Report, seconds: float, signals: Signals) -> None:
    """Runs a suite for at most these seconds."""
    suite = report.suite
    with tempfile.TemporaryDirectory() as temporary:
        # pytest imports a package's modules by the folder's name
        folder = Path(temporary).resolve() / Path(suite.folder).name
        shutil.copytree(options.sources / suite.folder, folder, ignore=lambda _, names: set(names) & {"conftest.py", "csrc", ".git"})
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
        signals.end(lambda: pytest.main(arguments, plugins=[report]))
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
    parser.add_argument("--where", default="", help="runs the cases of a parameter grid whose parameters satisfy this Python expression")
    parser.add_argument("--cases", type=Path, help="a file with the ids of cases to run, and no others")
    parser.add_argument("--seed", type=int, default=0)
    workers = "processes; 0: this one, where a crash ends all, and no case runs without volta_fa"
    parser.add_argument("--workers", type=int, default=1, help=workers)
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
    signals = Signals()
    report = Report(suite)
    # a fifth of the time is for the failures, which run again without volta_fa
    run(options, report, options.time_limit * (0.8 if suite.runs_alone else 1), signals)
    # without workers, volta_fa is in this process
    if suite.runs_alone and options.workers and not signals.stopped and (again := report.unknown()):
        print(f"\n{len(again)} cases without volta_fa:", flush=True)
        alone = Report(suite)
        those = argparse.Namespace(**vars(options) | {"cases": [f.case for f in again], "alone": True})
        run(those, alone, options.time_limit + start - time.monotonic(), signals)
        fails = {failure.case for failure in alone.failures}
        for failure in again:
            failure.reason = "PyTorch alone fails too" if failure.case in fails else ""
    summary = report.summary()
    show(summary)
    if options.json:
        head = {"suite": options.suite, "seed": options.seed, "device": options.device, "torch": torch.__version__}
        head |= {"seconds": round(time.monotonic() - start)}
        options.json.write_text(json.dumps(head | summary, indent=1) + "\n")
    return int(bool(report.unknown()) or not any(name.startswith("passed") for name in summary["counts"]))


if __name__ == "__main__":
    import suites  # pytest loads this module by its name

    sys.exit(suites.main())
