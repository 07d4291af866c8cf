"""Compares the results of run.py: python compare.py OUTPUT. Exits with 1 if anything is wrong or failed. run.py calls report() too.

A job is one vLLM engine that decodes greedily (jobs.py). jobs.COMPARISONS pairs jobs: "ours" runs volta_fa (names in -custom) and must
repeat the tokens of "theirs". Theirs is mostly the same job with vLLM's own backend (-triton, -flash). For servers, speculation and
preemption it is a plain job with volta_fa. Tokens may part only where the best two of a step tie within rounding. reference.py measures
the largest error of each job's log-probabilities (nats) against float32, and their root mean square. Ours must be at most twice theirs.
Between two jobs, a token's log-probability differs by at most the sum of both errors. So where tokens first differ, a gap of more than
twice this sum is wrong.
Without reference.json, the gap and the differences before it must be within twice those between vLLM's own backends (jobs.CONTROLS).
jobs.ALONE: ours without a counterpart. Its error may be twice that of a job with full attention."""

import json
import math
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from jobs import ACCEPTED, ALONE, COMPARISONS, CONTROLS  # ACCEPTED: vLLM's counter of accepted speculative tokens

#: Largest difference of log-probabilities, in nats, that counts as rounding in a version without controls.
ASSUMED = 0.05
#: MB (10^6 bytes) by which a server's host memory, and its GPU memory, may grow in the last third of a load.
GROWTH_MB = 16


def largest(values: Iterable[float]) -> float:
    """Returns the maximum, 0 without values; infinity if a value is not a number, which max() may pass over."""
    return max((math.inf if math.isnan(x) else x for x in values), default=0.0)


class Difference(NamedTuple):
    """How two results differ, over both rounds. Differences of log-probabilities are in nats."""

    sequences: int  # compared
    equal: int  # of these, sequences with the same tokens
    noise: float  # largest difference of the best token's log-probability before sequences part
    gap: float  # largest gap between the best two tokens where sequences part


def difference(found: dict, expected: dict) -> Difference:
    """Returns the difference of two results of kind tokens (jobs.py), whose prompts ran twice."""
    sequences = equal = 0
    noise = gap = 0.0
    for ours, theirs in zip(found["rounds"], expected["rounds"]):
        for i, (tokens, wanted) in enumerate(zip(ours["tokens"], theirs["tokens"], strict=True)):
            # of each step, the log-probabilities of the best two tokens; a job that speculates has none, so noise stays 0
            their_best = theirs["logprobs"][i]
            our_best = ours.get("logprobs", theirs["logprobs"])[i]
            parts = next((k for k, pair in enumerate(zip(tokens, wanted)) if pair[0] != pair[1]), None)  # the first step that differs
            sequences, equal = sequences + 1, equal + (parts is None and len(tokens) == len(wanted))
            noise = largest([noise, *(abs(a[0] - b[0]) for a, b in zip(our_best[:parts], their_best[:parts]))])
            if parts is not None:
                gap = largest([gap, their_best[parts][0] - their_best[parts][1]])
    return Difference(sequences, equal, noise, gap)


class Version:
    """The jobs and results of a version of vLLM, in its folder: NAME.job.json, NAME.json and NAME.log of each job, and reference.json."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        read = {path.name.removesuffix(".json"): path for path in sorted(folder.glob("*.json"))}
        self.jobs = [name.removesuffix(".job") for name in read if name.endswith(".job")]  # names of jobs
        self.results = {name: json.loads(read[name].read_text()) for name in self.jobs if name in read}
        #: By job, the errors against float32 in nats: "max" and "rms".
        self.exact = json.loads(read["reference"].read_text()) if "reference" in read else {}

    def has(self, *names: str) -> bool:
        return set(names) <= set(self.results)

    def job(self, name: str) -> dict:
        return json.loads((self.folder / f"{name}.job.json").read_text())

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text(errors="replace")

    @cached_property
    def controls(self) -> list[Difference]:
        return [difference(self.results[a], self.results[b]) for a, b in CONTROLS if self.has(a, b)]

    @property
    def tolerance(self) -> float:
        """Difference of log-probabilities, in nats, that counts as rounding."""
        return 2 * max(max(c.noise, c.gap) for c in self.controls) if self.controls else ASSUMED


# ---- rules of a pair of results: whether it is right, and what to print ------------------------------------------


def errors(version: Version, ours: str, theirs: str, found: Difference) -> tuple[bool, str]:
    """Our error is at most twice theirs; without reference.json, differences are within the tolerance.

    A job that speculates has no log-probabilities. Its error counts as theirs."""
    if theirs in version.exact and "logprobs" not in version.results[ours]["rounds"][0]:
        their_error = version.exact[theirs]["max"]
        return found.gap <= 2 * (their_error + their_error), f", theirs {their_error:.4f}"
    if not {ours, theirs} <= set(version.exact):
        return max(found.noise, found.gap) <= version.tolerance, f", noise {found.noise:.4f}"
    of_ours, of_theirs = (version.exact[name] for name in (ours, theirs))
    our_error, their_error = of_ours["max"], of_theirs["max"]
    text = f", error {our_error:.4f}, theirs {their_error:.4f} (rms {of_ours['rms']:.4f}, {of_theirs['rms']:.4f})"
    is_close = our_error <= 2 * their_error < math.inf and of_ours["rms"] <= 2 * of_theirs["rms"]
    # noise counts too: reference.py measures the first round alone, and prefix caching serves the second
    return is_close and max(found.noise, found.gap) <= 2 * (our_error + their_error), f", noise {found.noise:.4f}{text}"


def counts(version: Version, ours: str, _theirs: str, _found: Difference) -> tuple[bool, str]:
    """A job that reports counters of preemptions had some. One that speculates has accepted some of the guessed tokens instead."""
    if "counts" not in version.results[ours]:
        return True, ""
    count = version.results[ours]["counts"]
    needed = ACCEPTED if ACCEPTED in count else "num_preemptions"
    return count.get(needed, 0) > 0, "".join(f", {name} {value:.0f}" for name, value in count.items())


def pages(version: Version, ours: str, _theirs: str, _found: Difference) -> tuple[bool, str]:
    """Only prints: vLLM's page size, if the log names one, and the prompt tokens of each round that prefix caching found."""
    size = re.search(r"Setting attention block size to (\d+) tokens", version.log(ours))
    cached = [r["cached"] for r in version.results[ours]["rounds"]]
    return True, f", pages of {size[1]} tokens, {cached[0]} and {cached[1]} prompt tokens from the cache" if size else ""


def plans(version: Version, ours: str, _theirs: str, _found: Difference) -> tuple[bool, str]:
    """A job with VOLTA_FA_LOG has logged kernels: so these have run, and no other backend in their place."""
    count = sum(line.startswith("volta_fa: ") for line in version.log(ours).splitlines())
    is_asked = "VOLTA_FA_LOG" in version.job(ours).get("env", {})
    return not is_asked or count > 0, f", {count} lines of VOLTA_FA_LOG" if is_asked or count else ""


def adapter(version: Version, ours: str, _theirs: str, _found: Difference) -> tuple[bool, str]:
    """The LoRA adapter has an effect: every other sequence, which uses it, differs from that of the plain model (llama64)."""
    if "lora" not in ours:
        return True, ""
    plain = version.results.get("llama64-custom", {"rounds": []})["rounds"]
    same = [a == b for a, b in zip(*(r[0]["tokens"] for r in (version.results[ours]["rounds"], plain)))] if plain else []
    without, using = same[::2], same[1::2]
    text = f", {sum(without)} of {len(without)} without and {sum(using)} of {len(using)} with adapter as llama64"
    return not any(using), text


def chats(version: Version, ours: str, _theirs: str, _found: Difference) -> tuple[bool, str]:
    """The server's chat answers, whole and streamed, have the tokens of its completions, up to a tie."""
    found = version.results[ours].get("chat")
    return not found or not found["wrong"], f", {found['compared']} tokens of chats, {len(found['wrong'])} wrong" if found else ""


PAIR_RULES: list[Callable[[Version, str, str, Difference], tuple[bool, str]]] = [errors, counts, pages, plans, adapter, chats]


# ---- checks of a version: each yields a mark and a line ----------------------------------------------------------

OK, WRONG, FAILED = "ok   ", "WRONG", "FAILED"


def failed_jobs(version: Version) -> Iterator[tuple[str, str]]:
    for name in version.jobs:
        if name not in version.results:
            lines = [line.strip() for line in version.log(name).splitlines()]
            like_errors = [line for line in lines if re.search(r"\b\w*(Error|Exception)\b", line)]
            yield FAILED, f"{name}: {(like_errors or lines or ['no log'])[-1][:160]}"


def pairs(version: Version) -> Iterator[tuple[str, str]]:
    for ours, theirs, what in COMPARISONS:
        if version.has(ours, theirs):
            found = difference(version.results[ours], version.results[theirs])
            verdicts = [rule(version, ours, theirs, found) for rule in PAIR_RULES]
            text = f"{ours} and {theirs}: {found.equal} of {found.sequences} sequences equal, gap {found.gap:.4f}"
            yield OK if all(right for right, _ in verdicts) else WRONG, f"{text}{''.join(t for _, t in verdicts)} ({what})"


def alone(version: Version) -> Iterator[tuple[str, str]]:
    for ours, theirs, what in ALONE:
        if not version.has(ours):
            continue
        if not {ours, theirs} <= set(version.exact):
            yield FAILED, f"{ours}: reference.json lacks its error or that of {theirs} ({what})"
            continue
        our_error, their_error = (version.exact[name]["max"] for name in (ours, theirs))
        mark = OK if our_error <= 2 * their_error < math.inf else WRONG
        yield mark, f"{ours}: error {our_error:.4f}, that of {theirs} {their_error:.4f} ({what})"


def encoders(version: Version) -> Iterator[tuple[str, str]]:
    if version.has("encoder-custom", "encoder-triton"):
        # of embeddings, against transformers in float32
        ours, theirs = (largest(version.results[f"encoder-{name}"]["errors"]) for name in ("custom", "triton"))
        yield OK if ours <= 2 * theirs < math.inf else WRONG, f"encoder: error {ours:.1e}, TRITON_ATTN's {theirs:.1e}"


def refusals(version: Version) -> Iterator[tuple[str, str]]:
    for name, result in version.results.items():
        if "refused" in version.job(name) and "refused" not in result:
            yield WRONG, f"{name}: ran, expected a refusal"
        if "refused" in result:
            yield OK, f"{name}: {result['refused'][-120:]}, after {result['seconds']:.0f} s"


def mixed_load(version: Version) -> Iterator[tuple[str, str]]:
    for name in (name for name in ("load", "load-hybrid") if version.has(name)):
        load = version.results[name]
        # left: requests and cache that the idle server still holds
        left, growth = load["left"], load["growth"]
        right = not load["wrong"] and not load["errors"] and not any(left.values()) and max(growth.values()) <= GROWTH_MB
        yield (
            OK if right else WRONG,
            f"{name}: {load['sent']} requests, {load['cancelled']} cancelled, "
            f"{load['counters'].get('num_preemptions_total', 0):.0f} preemptions; {load['compared']} tokens compared, "
            f"{len(load['wrong'])} wrong, {load['ties']} ties (gap {load['largest_gap']:.4f}), noise {load['largest_noise']:.4f}, "
            f"{len(load['errors'])} errors; left: {sum(left.values()):g}; "
            f"growth: host {growth['host_mb']:.1f} MB, GPU {growth['gpu_mb']:.1f} MB",
        )


CHECKS = [failed_jobs, pairs, alone, encoders, refusals, mixed_load]


def report(output: Path) -> int:
    """Prints all versions' comparisons. Returns 0 if all is right, else 1."""
    right = True
    for folder in sorted(path for path in output.iterdir() if path.is_dir()):
        version = Version(folder)
        kind = "measured" if version.controls else "assumed"
        print(f"{folder.name}: tolerance {version.tolerance:.4f}, {kind}, {len(version.controls)} controls")
        for mark, line in (found for check in CHECKS for found in check(version)):
            print(f"{mark} {folder.name} {line}")
            right &= mark == OK
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(report(Path(sys.argv[1])))
