"""`python -m volta_fa check`: tests every kernel on this machine's GPU, measures it, and writes a tuning file.

machine.py             describes the machine
kernels.py             lists what is checked, with problems for each kernel
score_options.py       what happens to scores in these problems
cases.py               attention problems as values, and their tensors (the tests use them too)
cache_cases.py         the same with a KV cache
problems.py            expected results of attention problems
cached.py              problems of each kernel of a KV cache, and their expected results
tolerance.py           how far a result may be from the expected one
correctness.py         checks one kernel
isolation.py           checks GPU kernels in a process that may be lost
performance.py         measures the GPU and attention
performance_cached.py  measures attention with a KV cache
atomics.py             measures the GPU's rate of atomic additions
timing.py              takes one time
tune.py                turns measurements into a tuning file
report.py              shows the page, the plot and the JSON
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from ..errors import CommandError
from ..inspection import info
from . import correctness, isolation, machine, performance, report, tune
from .correctness import KernelResult
from .kernels import Target, of_families, wanted
from .performance import Speeds
from .tune import Tuned

#: Seconds that all of it may take on a GPU, and the share of each part: what one leaves, the next one has.
LIMIT = 170.0
_RIGHT_UNTIL, _FAST_UNTIL = 0.55, 0.85


@dataclass(frozen=True)
class Settings:
    """What the command line asked for."""

    target: Target
    output: Path
    seed: int = 0
    quick: bool = False
    tune: bool = False
    kernels: str = "*"


@dataclass
class Findings:
    """All that came out."""

    settings: Settings
    machine: dict[str, Any] = field(default_factory=dict)
    trouble: str | None = None  # this torch cannot run on the card
    results: list[KernelResult] = field(default_factory=list)
    unchecked: list[str] = field(default_factory=list)  # kernels that time did not suffice for
    unfit: list[str] = field(default_factory=list)  # that need more shared memory than the card has
    speeds: Speeds = field(default_factory=Speeds)
    tuned: Tuned | None = None
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def all_right(self) -> bool:
        """Whether every kernel was checked and passed, and nothing else went wrong."""
        complete = bool(self.results) and not self.unchecked and all(v.passed for v in self.results)
        return complete and self.trouble is None and not self.speeds.troubles and not (self.tuned and self.tuned.trouble)


def run_check(settings: Settings) -> Findings:
    """Check, print, and write the plot and the JSON into the output folder."""
    target, begin = settings.target, time.monotonic()
    variants = [v for v in wanted(target, info()["variants"]) if fnmatchcase(v["name"], settings.kernels)]
    if not variants:
        raise CommandError(f"--kernels {settings.kernels}: matches no kernel of this device (`python -m volta_fa info` lists them)")
    target.make_current()
    findings = Findings(settings, trouble=machine.torch_trouble(target))
    findings.unfit = [v["name"] for v in of_families(target, info()["variants"]) if v["shared_bytes"] > target.shared_bytes]
    if findings.trouble:
        report.say_trouble(findings.trouble)
    findings.machine = machine.describe(target)
    report.introduce(findings.machine)
    if findings.trouble is None:
        limit = LIMIT if target.kind == "cuda" else float("inf")
        with report.Progress() as progress:
            progress.begin("right", len(variants))
            for result in _verdicts(settings, variants, begin + _RIGHT_UNTIL * limit):
                findings.results.append(result)
                progress.advance(result.kernel)
            findings.unchecked = [v["name"] for v in variants[len(findings.results) :]]
            correctness.share_blame(findings.results)
            findings.seconds["right"] = time.monotonic() - begin
            progress.begin("fast", performance.steps(target, settings.quick))
            doubtful = [*findings.unchecked, *(v.kernel for v in findings.results if v.failures)] if target.has_kernels else []
            findings.speeds = performance.measure(target, doubtful, begin + _FAST_UNTIL * limit, settings.quick, progress.advance)
            findings.seconds["fast"] = time.monotonic() - begin - findings.seconds["right"]
            if settings.tune:
                progress.begin("tune", tune.steps(target))
                findings.tuned = tune.tune(target, findings.results, begin + limit, progress.advance)
                findings.seconds["tune"] = time.monotonic() - begin - sum(findings.seconds.values())
    findings.seconds["all"] = time.monotonic() - begin
    report.show(findings)
    report.write(findings)
    return findings


def _verdicts(settings: Settings, variants: list[dict[str, Any]], deadline: float) -> Iterator[KernelResult]:
    def out_of_time() -> bool:
        return time.monotonic() > deadline

    if settings.target.kind == "cuda":
        yield from isolation.check_isolated(settings.target, variants, settings.seed, settings.quick, out_of_time)
    else:
        for variant in variants:
            yield correctness.check_kernel(settings.target, variant, settings.seed, settings.quick)
