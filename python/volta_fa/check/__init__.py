"""`python -m volta_fa check`: tests every kernel on this machine's GPU, measures it, and writes a tuning file.

machine.py             describes the machine
kernels.py             lists what is checked, with problems for each kernel
cases.py               attention problems as values, and their tensors (the tests use them too)
cache_cases.py         the same with a KV cache
tolerance.py           PyTorch's eager attention, in fp64 too, and how far a result may be from the exact one
problems.py            exact results of attention problems, part by part, and the judge (the tests use them too)
cached.py              problems of each kernel of a KV cache, and their exact results
correctness.py         checks one kernel
isolation.py           checks GPU kernels in processes that may be lost
state.py               keeps the results of an unfinished check
performance.py         measures the GPU and attention
performance_cached.py  measures attention with a KV cache
block_masks.py         draws block masks, and expands them (the tests use them too)
draft_trees.py         makes trees of draft tokens and their masks
indexer_scores.py      problems of the indexer, and their exact logits
int8_scores.py         checks the kernels of fwd_fast against their model
sparse_latents.py      problems of sparse latent attention, and their exact results
atomics.py             measures the GPU's rate of atomic additions
tune.py                turns measurements into a tuning file
findings.py            holds the settings and all results of a check
report.py              shows the page, the plot and the JSON

versus.py              is of another command, `versus-1cat`: attention beside 1Cat-vLLM's
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from fnmatch import fnmatchcase
from typing import Any

from ..errors import CommandError
from ..inspection import info
from . import correctness, isolation, machine, performance, report, tune
from .correctness import KernelResult
from .findings import Findings, Settings
from .kernels import of_families, wanted
from .state import FILE, State, made_on

#: Maximum seconds of a check on a GPU, and the shares of them after which the parts "correctness" and "speed" end. A part gets what
#: earlier parts leave. Loading kernels does not count, because the driver may have to compile them.
LIMIT = 170.0
_RIGHT_UNTIL, _FAST_UNTIL = 0.55, 0.85


def run_check(settings: Settings) -> Findings:
    """Runs the check, prints its page, and writes plot and JSON into the output folder."""
    target, begin = settings.target, time.monotonic()
    variants = [v for v in wanted(target, info()["variants"]) if fnmatchcase(v["name"], settings.kernels)]
    if not variants:
        raise CommandError(
            f"--kernels {settings.kernels}: matches no kernel of this device (`python -m volta_fa info --kernels` lists them)"
        )
    try:
        settings.output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CommandError(f"--output {settings.output}: {error.strerror}") from None
    target.make_current()
    findings = Findings(settings, trouble=machine.torch_trouble(target))
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
            progress.begin("fast", performance.steps(target, settings.quick))
            # unchecked kernels are used, as in programs; a failed kernel may never end
            failed = findings.failed if target.has_kernels else []
            started = time.monotonic()
            findings.speeds = performance.measure(target, failed, deadline, settings.quick, progress.advance)
            findings.seconds["load"] += findings.speeds.loading
            findings.seconds["fast"] = time.monotonic() - started - findings.speeds.loading
            if settings.tune:
                progress.begin("tune", tune.steps(target))
                started = time.monotonic()
                deadline = started + limit - findings.seconds["right"] - findings.seconds["fast"]
                findings.tuned = tune.tune(target, findings.results, deadline, progress.advance)
                findings.seconds["tune"] = time.monotonic() - started
    findings.seconds["all"] = time.monotonic() - begin
    report.show(findings)
    report.write(findings)
    if state is not None:  # only now: if the later parts are interrupted, these results stay
        state.close(not findings.unchecked)
    report.conclude(findings)
    return findings


def _check_kernels(findings: Findings, variants: list[dict[str, Any]], seconds: float, progress: report.Progress) -> State:
    """Checks the kernels that an unfinished check left, for `seconds` in each process. Returns the file of results."""
    settings, begin = findings.settings, time.monotonic()
    same = {"seed": settings.seed, "quick": settings.quick, "kernels": settings.kernels}
    state = State.open(settings.output / FILE, made_on(settings.target, **same))
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
        progress.advance(result.kernel)
    findings.results = [results[name] for name in names if name in results]
    findings.unreached = [v for v in variants if v["name"] not in results]
    correctness.share_blame(findings.results)
    findings.seconds["load"] = loading
    findings.seconds["right"] = time.monotonic() - begin - loading
    return state


def _results(settings: Settings, variants: list[dict[str, Any]], seconds: float, at_a_time: int) -> Iterator[KernelResult]:
    if settings.target.kind == "cuda":
        yield from isolation.check_isolated(settings.target, variants, settings.seed, settings.quick, seconds, at_a_time)
        return
    begin = time.monotonic()
    for variant in variants:
        if time.monotonic() - begin >= seconds:
            return
        yield correctness.check_kernel(settings.target, variant, settings.seed, settings.quick)
