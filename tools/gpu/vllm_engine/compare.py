"""Compares the results of run.py: python compare.py OUTPUT. Exits non-zero if anything is wrong or failed.

Greedy tokens of two backends part where the best two tokens of a step tie within rounding. reference.py measures the largest error of
each backend's log-probabilities against float32. Ours must be at most twice that of vLLM's backend. Two backends can rank two tokens
differently only if the gap between them is at most twice the sum of both errors, so a larger gap at the first difference is wrong.

Without reference.json, the gap and the differences before it must be within twice those between vLLM's own backends (jobs.CONTROLS).
"""

import json
import re
import sys
from pathlib import Path
from typing import NamedTuple

from jobs import COMPARISONS, CONTROLS

#: For a version without controls.
ASSUMED = 0.05


class Difference(NamedTuple):
    """How two results differ, over both rounds."""

    sequences: int
    equal: int
    noise: float  # largest difference of the best token's log-probability before sequences part
    gap: float  # largest gap between the best two tokens where sequences part


def difference(found: dict, expected: dict) -> Difference:
    """Returns the difference of two results of kind tokens."""
    sequences = equal = 0
    noise = gap = 0.0
    for ours, theirs in zip(found["rounds"], expected["rounds"]):
        for i, (tokens, wanted) in enumerate(zip(ours["tokens"], theirs["tokens"], strict=True)):
            best = theirs["logprobs"][i]
            here = ours.get("logprobs", theirs["logprobs"])[i]
            parts = next((k for k, pair in enumerate(zip(tokens, wanted)) if pair[0] != pair[1]), None)
            sequences, equal = sequences + 1, equal + (parts is None and len(tokens) == len(wanted))
            noise = max([noise, *(abs(a[0] - b[0]) for a, b in zip(here[:parts], best[:parts]))])
            if parts is not None:
                gap = max(gap, best[parts][0] - best[parts][1])
    return Difference(sequences, equal, noise, gap)


def error_of(log: Path) -> str:
    """Returns the last line of a log that looks like an error."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines()]
    errors = [line for line in lines if re.search(r"\b\w*(Error|Exception)\b", line)]
    return (errors or lines or ["no log"])[-1][:160]


def report_load(version: str, load: dict) -> bool:
    """Prints the result of a mixed load. Returns whether all is right."""
    left, growth, counters = load["left"], load["growth"], load["counters"]
    right = not load["wrong"] and not load["errors"] and not any(left.values())
    leaks = max(growth.values()) > 16
    print(
        f"{'ok   ' if right and not leaks else 'WRONG'} {version} mixed load: {load['sent']} requests, {load['cancelled']} cancelled, "
        f"{counters.get('num_preemptions_total', 0):.0f} preemptions; {load['compared']} tokens compared, {len(load['wrong'])} wrong, "
        f"{load['ties']} ties (gap {load['largest_gap']:.4f}), noise {load['largest_noise']:.4f}, {len(load['errors'])} errors; "
        f"left: {sum(left.values()):g}; growth: host {growth['host_mb']:.1f} MB, GPU {growth['gpu_mb']:.1f} MB"
    )
    return right and not leaks


def report_version(folder: Path) -> bool:
    """Prints a version's comparisons. Returns whether all is right."""
    version, right = folder.name, True
    exact = json.loads((folder / "reference.json").read_text()) if (folder / "reference.json").exists() else {}
    names = {path.name.removesuffix(".json") for path in folder.glob("*.json")} - {"reference"}
    jobs = {name.removesuffix(".job") for name in names if name.endswith(".job")}
    results = {name: json.loads((folder / f"{name}.json").read_text()) for name in sorted(names & jobs)}
    for name in sorted(jobs - set(results)):
        print(f"FAILED {version} {name}: {error_of(folder / f'{name}.log')}")
        right = False
    controls = [difference(results[a], results[b]) for a, b in CONTROLS if a in results and b in results]
    tolerance = 2 * max(max(c.noise, c.gap) for c in controls) if controls else ASSUMED
    print(f"{version}: tolerance {tolerance:.4f}, {'measured' if controls else 'assumed'}, {len(controls)} controls")
    for ours, theirs, what in COMPARISONS:
        if ours not in results or theirs not in results:
            continue
        found = difference(results[ours], results[theirs])
        if {ours, theirs} <= set(exact):
            error, other = exact[ours]["max"], exact[theirs]["max"]
            passes = error <= 2 * other and found.gap <= 2 * (error + other)
            measured = f"error {error:.4f}, theirs {other:.4f} (rms {exact[ours]['rms']:.4f}, {exact[theirs]['rms']:.4f})"
        else:
            passes, measured = max(found.noise, found.gap) <= tolerance, f"noise {found.noise:.4f}"
        extra = f", {results[ours]['preemptions']:.0f} preemptions" if "preemptions" in results[ours] else ""
        passes = passes and results[ours].get("preemptions") != 0
        plans = [line for line in (folder / f"{ours}.log").read_text(errors="replace").splitlines() if line.startswith("volta_fa: ")]
        extra += f", {len(plans)} lines of VOLTA_FA_LOG" if plans else ""
        if "lora" in ours:  # the adapter must have an effect
            plain = results.get("llama64-custom", {"rounds": []})["rounds"]
            same = [a == b for a, b in zip(*(r[0]["tokens"] for r in (results[ours]["rounds"], plain)))] if plain else []
            extra += f", {sum(same[::2])} of {len(same[::2])} without and {sum(same[1::2])} of {len(same[1::2])} with adapter as llama64"
            passes = passes and not any(same[1::2])
        print(
            f"{'ok   ' if passes else 'WRONG'} {version} {ours} and {theirs}: {found.equal} of {found.sequences} sequences equal, "
            f"gap {found.gap:.4f}, {measured}{extra} ({what})"
        )
        right = right and passes
    if {"encoder-custom", "encoder-triton"} <= set(results):
        ours, theirs = (max(results[f"encoder-{name}"]["errors"]) for name in ("custom", "triton"))
        print(f"{'ok   ' if ours <= 2 * theirs else 'WRONG'} {version} encoder: error {ours:.1e}, TRITON_ATTN's {theirs:.1e}")
        right = right and ours <= 2 * theirs
    for name, result in results.items():
        if "refused" in result:
            print(f"ok    {version} {name}: {result['refused'][-120:]}, after {result['seconds']:.0f} s")
    if "load" in results:
        right = report_load(version, results["load"]) and right
    return right


def report(output: Path) -> int:
    """Prints all versions' comparisons. Returns 0 if all is right, else 1."""
    verdicts = [report_version(folder) for folder in sorted(output.iterdir()) if folder.is_dir()]
    return 0 if all(verdicts) else 1


if __name__ == "__main__":
    sys.exit(report(Path(sys.argv[1])))
