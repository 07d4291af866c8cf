"""`python -m volta_fa check`: tests every kernel on this machine's GPU, measures it, and writes a tuning file.

machine.py             describes the machine
kernels.py             lists what is checked, with problems for each kernel
cases.py               attention problems as values, and their tensors (the tests use them too)
cache_cases.py         the same with a KV cache, and trees of draft tokens
tolerance.py           PyTorch's eager attention, in fp64 too, and how far a result may be from the exact one
problems.py            exact results of attention problems, with the error that each part may have (the tests use them too)
cached.py              problems of each kernel of a KV cache, and their exact results
correctness.py         checks one kernel
isolation.py           checks GPU kernels in processes that may be lost
state.py               keeps the results of an unfinished check
performance.py         measures the GPU, and attention with and without a KV cache
block_masks.py         draws block masks, and expands them (the tests use them too)
int8_scores.py         checks the kernels of fwd_fast against their model
sparse_cases.py        problems of sparse latent attention and of the indexer, and their exact results
atomics.py             measures the GPU's rate of atomic additions
tune.py                turns measurements into a tuning file
report.py              holds the settings and all results of a check, and shows the page, the plot and the JSON

versus.py belongs to another command, `versus-1cat`: it times attention beside that of 1Cat-vLLM, a fork of vLLM for V100s.

A "variant" is one compiled kernel with its properties, as `volta_fa.info()["variants"]` describes it. In a backward pass, a "main" kernel
has the matrix products, and preprocess and postprocess kernels run before and after it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from fnmatch import fnmatchcase
from typing import Any

from ..errors import CommandError, require_output
from ..inspection import info
from . import correctness, isolation, machine, performance, report, tune
from .correctness import KernelResult
from .kernels import of_families, wanted  # the variants of the device's families; those of them that it can run
from .report import Findings, Settings  # all results, and what is wrong in them; the command line's settings
from .state import FILE, State, made_on  # results of an unfinished check: the file's name, the file, the conditions under which they hold

#: Maximum seconds of a check on a GPU, and the shares of them at which the parts "right" (correctness) and "fast" (speed) end. "tune"
#: gets the rest. A part may use what earlier parts leave. Loading kernels does not count: the driver may have to compile them.
LIMIT = 170.0
_RIGHT_UNTIL, _FAST_UNTIL = 0.55, 0.85


def run_check(settings: Settings) -> Findings:
    """Runs the check, prints its page, and writes plot and JSON into the output folder. Raises CommandError if --kernels matches no kernel
    of the device, or if nothing can be written there."""
    target, begin = settings.target, time.monotonic()
    variants = [v for v in wanted(target, info()["variants"]) if fnmatchcase(v["name"], settings.kernels)]
    if not variants:
        raise CommandError(
            f"--kernels {settings.kernels}: matches no kernel of this device (`python -m volta_fa info --kernels` lists them)"
        )
    require_output(settings.output, is_folder=True)
    target.make_current()
    findings = Findings(settings, trouble=machine.torch_trouble(target))  # trouble: why this torch cannot run on the GPU, or None
    # kernels of the device's families that it cannot launch: report.py counts them
    findings.unfit = [v["name"] for v in of_families(target, info()["variants"]) if v["shared_bytes"] > target.shared_bytes]
    if findings.trouble:
        report.say_trouble(findings.trouble)
    findings.machine = machine.describe(target)
    report.introduce(findings.machine)
    state = None
    if findings.trouble is None:
        limit = settings.limit if settings.limit is not None else LIMIT if target.kind == "cuda" else float("inf")
        with report.Progress() as progress:
            state = _check_kernels(findings, variants, _RIGHT_UNTIL * limit, progress)
            deadline = time.monotonic() + _FAST_UNTIL * limit - findings.seconds["right"]
            progress.begin("fast", performance.steps(target, settings.quick))  # a step: the times of one shape
            # unchecked kernels run, as in programs; failed ones do not, because they may hang
            failed = findings.failed if target.has_kernels else []
            started = time.monotonic()
            findings.speeds = performance.measure(target, failed, deadline, settings.quick, progress.step)
            findings.seconds["load"] += findings.speeds.loading
            findings.seconds["fast"] = time.monotonic() - started - findings.speeds.loading
            if settings.tune:
                progress.begin("tune", tune.steps(target))
                started = time.monotonic()
                deadline = started + limit - findings.seconds["right"] - findings.seconds["fast"]
                findings.tuned = tune.tune(target, findings.results, deadline, progress.step)
                findings.seconds["tune"] = time.monotonic() - started
    findings.seconds["all"] = time.monotonic() - begin
    report.show(findings)
    report.write(findings)
    if state is not None:  # at the end, so that the results stay if a later part is interrupted; deletes them if all kernels are checked
        state.close(not findings.unchecked)
    report.conclude(findings)
    return findings


def _check_kernels(findings: Findings, variants: list[dict[str, Any]], seconds: float, progress: report.Progress) -> State:
    """Checks `variants`, except those that an earlier, unfinished check has results of, and adds all results to `findings`.
    `seconds`: maximum time that each process spends on checking. Returns the file that keeps the results until the check is finished."""
    settings, begin = findings.settings, time.monotonic()
    conditions = {"seed": settings.seed, "quick": settings.quick, "kernels": settings.kernels}
    state = State.open(settings.output / FILE, made_on(settings.target, **conditions))
    names = [v["name"] for v in variants]
    results = {v.kernel: v for v in state.results if v.kernel in names}
    findings.continued = len(results)
    left = [v for v in variants if v["name"] not in results]
    report.say_continued(state.note, findings.continued, len(variants))
    at_a_time = isolation.processes(settings.target, len(left)) if settings.target.kind == "cuda" else 1
    loading = 0.0
    progress.begin("right", len(variants), len(results))
    for result in _results(settings, left, seconds, at_a_time):
        results[result.kernel] = result
        state.add(result)
        loading += result.load_seconds / at_a_time
        progress.step(result.kernel)
    findings.results = [results[name] for name in names if name in results]
    findings.unreached = [v for v in variants if v["name"] not in results]
    # a wrong preprocess or postprocess kernel makes every main kernel of its calls fail, and the reverse: removes failures of correct ones
    correctness.share_blame(findings.results)
    findings.seconds["load"] = loading
    findings.seconds["right"] = time.monotonic() - begin - loading
    return state


def _results(settings: Settings, variants: list[dict[str, Any]], seconds: float, at_a_time: int) -> Iterator[KernelResult]:
    """Yields results for at most `seconds`. GPU kernels run in `at_a_time` subprocesses, which they may destroy."""
    if settings.target.kind == "cuda":
        yield from isolation.check_isolated(settings.target, variants, settings.seed, settings.quick, seconds, at_a_time)
        return
    begin = time.monotonic()
    for variant in variants:
        if time.monotonic() - begin >= seconds:
            return
        yield correctness.check_kernel(settings.target, variant, settings.seed, settings.quick)
