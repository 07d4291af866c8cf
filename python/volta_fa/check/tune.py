"""Finds better kernels for this GPU than the planner's choice, and writes them into a tuning file (docs/reference/tuning-file.md).

`python -m volta_fa check --tune` calls `tune`. It measures alternatives for problems without options: gradients without atomics, and in the
forward pass other tile sizes and stream-K grids, which divide the keys too. Each class of shapes is measured at one shape. A choice is
written only if it is faster by a clear margin in every round."""

from __future__ import annotations

import itertools
import json
import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ..errors import first_line
from ..inspection import info
from .correctness import KernelResult  # what the check of one kernel found
from .kernels import Target  # the device: a GPU, the simulator or the CPU
from .performance import Work, median_ms  # a call to time, and its median time in ms

#: An alternative must be this share faster in every round. Repeated medians of one kernel differ by less.
MARGIN = 0.05
_ROUNDS = 3  # in each, all alternatives of a class are measured
_SECONDS_PER_FIGURE = 0.01  # of one alternative in one round
#: Calls between two CUDA events. A launch costs the CPU about 10 us, and several calls hide this.
_CALLS = 8
#: Maximum number of choices that src/tuning.rs reads from a file.
MAX_CHOICES = 512

#: Shapes that are measured, batch 1. Neighbors differ by factors of 2 (`Class.bounds`). The backward pass has enough heads for a V100.
_BACKWARD_SEQLENS = (512, 1024, 2048, 4096)
_BACKWARD_HEADS = 40
_FORWARD_SEQLENS = (256, 512, 1024, 2048)
_FORWARD_HEADS = (1, 2, 4, 8, 16, 32, 64)


@dataclass
class Tuned:
    """Result of tuning: the choices and failed kernels in the file, or why there is none."""

    path: str | None = None  # of the tuning file; None: there is no folder for it
    choices: list[dict[str, Any]] = field(default_factory=list)  # each: `Class.bounds`, `Alternative.takes`, and a note with the times
    failed: list[str] = field(default_factory=list)
    #: number of classes measured, and of those left out for lack of time, memory or kernels
    measured: int = 0
    left_out: int = 0
    trouble: str = ""  # why no file was written

    @property
    def summary(self) -> str:
        """Returns the lines for the printed page."""
        if self.trouble:
            return f"\n[red]Tune: {self.trouble}[/red]"
        parts = [f"\nTune: of {self.measured} classes of shapes, another choice is more than {MARGIN:.0%} faster for {len(self.choices)}"]
        if self.choices:
            best = max(self.choices, key=lambda c: c["note"]["times_as_fast"])
            parts.append(f"(at most {best['note']['times_as_fast']:.2f} times as fast: {best['note']['measured_at']})")
        if self.left_out:
            parts.append(f"; {self.left_out} were left out for lack of time, memory or kernels")
        if self.failed:
            parts.append(f"; plans will not take {', '.join(self.failed)}, which failed")
        return " ".join(parts).replace(" ;", ";") + f"\nwritten to {self.path}"

    def data(self) -> dict[str, Any]:
        """Returns data for JSON."""
        return {"margin": MARGIN, **vars(self)}


@dataclass(frozen=True)
class Class:
    """A class of shapes that get the same choice, and the shape that is measured for it."""

    pass_: str  # Forward or Backward
    headdim: int
    above: int  # headdim of the next narrower kernel: the class has headdims above it, up to `headdim`
    seqlen: int
    nheads: int
    causal: bool

    def __str__(self) -> str:
        heads = f"{self.nheads} heads, seqlen {self.seqlen}, headdim {self.headdim}"
        return f"{self.pass_}, {heads}{', causal' if self.causal else ''}"

    @property
    def bounds(self) -> dict[str, Any]:
        """The class's bounds in a tuning file. Measured shapes differ by factors of 2, so a bound is a factor of sqrt(2) away. Rows are
        queries times heads. Forward classes bound them from above too, because their number decides which tiles fill the GPU."""
        half = math.sqrt(2)
        seqlens = [math.ceil(self.seqlen / half), math.floor(self.seqlen * half)]
        rows = self.seqlen * self.nheads
        # 2**53: no bound; the largest integer that every JSON reader keeps exactly
        most = math.floor(rows * half) if self.pass_ == "Forward" else 2**53
        headdims = [self.above + 1, self.headdim]
        return {
            "pass": self.pass_,
            "headdim": headdims,
            "headdim_v": headdims,
            "seqlen_q": seqlens,
            "seqlen_k": seqlens,
            "rows": [math.ceil(rows / half), most],
            "is_causal": self.causal,
            "features": [],
        }


@dataclass(frozen=True)
class Alternative:
    """One way to compute a class: what to time, and what a choice of it says in a tuning file."""

    takes: dict[str, Any]  # fields of the choice, beside the bounds of the class
    variant: dict[str, Any] | None = None  # the kernel to time, as `info()` describes it; None: the planner's
    deterministic: bool = False  # whether to time gradients without atomics


def steps(target: Target) -> int:
    """Returns the number of steps of `tune`, for a progress bar."""
    return len(classes(target, info()["variants"], ()))


def classes(target: Target, variants: Sequence[dict[str, Any]], failed: Sequence[str]) -> list[tuple[Class, list[Alternative]]]:
    """Returns all classes to measure with their alternatives: forward ones, then the backward ones by seqlen. `variants`: of `info()`."""
    families = [family["name"] for family in target.families]
    # plain kernels: without features, or with sinks, which every stream-K kernel supports when it stores its output
    plain = [v for v in variants if v["family"] in families and set(v["features"]) <= {"sinks"} and v["name"] not in failed]
    plain = [v for v in plain if v["shared_bytes"] <= target.shared_bytes]
    found: list[tuple[Class, list[Alternative]]] = []
    # only the preferred family: the planner takes others where it has no kernel
    square = [v for v in plain if v["family"] in families[:1] and v["headdim"] == v["headdim_v"]]
    widths = sorted({v["headdim"] for v in square if v["pass"] == "Forward"})
    for above, headdim in zip([0, *widths], widths):
        passes = ("Forward", "ForwardStreamK")
        blocks, stream_k = ([v for v in square if (v["pass"], v["headdim"]) == (pass_, headdim)] for pass_ in passes)
        if len(blocks) < 2:
            continue
        kernels = [Alternative({"variant": v["name"]}, v) for v in blocks]
        # the same tiles on a stream-K grid, which a choice of the pass "Forward" (`Class.bounds`) excludes
        kernels += [Alternative({"pass": v["pass"], "variant": v["name"]}, v) for v in stream_k]
        for nheads, seqlen, causal in itertools.product(_FORWARD_HEADS, _FORWARD_SEQLENS, (False, True)):
            found.append((Class("Forward", headdim, above, seqlen, nheads, causal), kernels))
    headdims = sorted({v["headdim"] for v in plain if v["pass"] == "Backward"})
    modes = [Alternative({}), Alternative({"deterministic": True}, deterministic=True)]
    for seqlen, (above, headdim), causal in itertools.product(_BACKWARD_SEQLENS, zip([0, *headdims], headdims), (False, True)):
        found.append((Class("Backward", headdim, above, seqlen, _BACKWARD_HEADS, causal), modes))
    return found


def tune(target: Target, results: Sequence[KernelResult], deadline: float, advance: Callable[[str], None]) -> Tuned:
    """Measures until `deadline`, a time of time.monotonic(), and writes the GPU's tuning file. `results`: of the check."""
    file = json.loads(torch.ops.volta_fa._tuning(target.number))  # the GPU's tuning file, as `info()["tuning"]` has it
    if file["outcome"] == "off":
        # a new file would lose the kernels that failed before
        return Tuned(trouble="VOLTA_FA_TUNING=0 says that no tuning is read, so none is written")
    # a kernel that failed once on this GPU stays excluded
    tuned = Tuned(file["path"], failed=sorted({*file["failed"], *(v.kernel for v in results if v.failures)}))
    for class_, alternatives in classes(target, info()["variants"], tuned.failed):
        advance(str(class_))
        if time.monotonic() > deadline:
            tuned.left_out += 1
            continue
        try:
            choice = compare(target, class_, alternatives, tuned.failed)
        except (torch.cuda.OutOfMemoryError, NotImplementedError):  # the latter: too few kernels are left, because others failed
            tuned.left_out += 1
            continue
        except Exception as error:
            tuned.trouble = f"{class_}: {first_line(error)}"
            return tuned
        tuned.measured += 1
        if choice:
            tuned.choices.append(choice)
    by_gain = sorted(tuned.choices, key=lambda c: -c["note"]["times_as_fast"])
    tuned.choices = by_gain[:MAX_CHOICES]
    try:
        _write(tuned, file)
    except (OSError, ValueError) as error:
        tuned.trouble = f"the file was not written: {error}"
    return tuned


def compare(target: Target, class_: Class, alternatives: Sequence[Alternative], failed: Sequence[str]) -> dict[str, Any] | None:
    """Returns a choice for the tuning file if an alternative is clearly faster than the plan's, else None. Runs no failed kernel.

    Raises NotImplementedError if the plan takes none of the alternatives, as after failures."""
    planned = _planned(target, class_, alternatives, failed)
    if planned is None:
        raise NotImplementedError("the plan takes none of the alternatives")
    with target.running(failed=failed):
        works = [_work(target, class_, alternative) for alternative in alternatives]
    times: list[list[float]] = [[] for _ in alternatives]  # of each alternative, its median ms in each round
    for _ in range(_ROUNDS):
        for alternative, work, medians in zip(alternatives, works, times):
            with target.running(alternative.variant, failed, alternative.deterministic):  # the last: without atomics
                # most: runs after the first, of _CALLS calls each
                medians.append(median_ms(work, target.device, _SECONDS_PER_FIGURE, most=10, calls=_CALLS))
    # of each alternative: how many times as fast as the plan's kernel it was in its worst round
    gains = [min(ms_planned / ms for ms_planned, ms in zip(times[planned], medians)) for medians in times]
    best = max(range(len(gains)), key=gains.__getitem__)
    if best == planned or gains[best] <= 1 + MARGIN:
        return None
    note = {
        "times_as_fast": round(gains[best], 3),
        "measured_at": str(class_),
        "ms": round(min(times[best]), 4),
        "ms_of_the_plan": round(min(times[planned]), 4),
    }
    return {**class_.bounds, **alternatives[best].takes, "note": note}


def _planned(target: Target, class_: Class, alternatives: Sequence[Alternative], failed: Sequence[str]) -> int | None:
    """Returns the index of the alternative that the plan takes without a tuning; None if it takes another."""
    shape = (1, class_.seqlen, class_.seqlen, class_.nheads, class_.nheads, class_.headdim, class_.headdim, class_.causal)
    with target.running(failed=failed):
        plan = json.loads(torch.ops.volta_fa._plan(*shape, device=target.number))
    if class_.pass_ == "Backward":  # alternative 0 is with atomics
        return None if plan["backward"]["deterministic"] else 0
    names = [a.variant["name"] if a.variant else "" for a in alternatives]
    return names.index(plan["forward"]["name"]) if plan["forward"]["name"] in names else None


def _work(target: Target, class_: Class, alternative: Alternative) -> Work:
    """Returns a call of a class's shape in fp16: the forward pass, or the backward pass alone."""
    shape = (1, class_.seqlen, class_.nheads, class_.headdim)
    q, k, v, dout = (torch.randn(shape, device=target.device, dtype=torch.float16) for _ in range(4))
    if class_.pass_ == "Forward":
        return lambda: torch.ops.volta_fa.fwd(q, k, v, is_causal=class_.causal)
    out, lse, _ = torch.ops.volta_fa.fwd(q, k, v, is_causal=class_.causal)
    return lambda: torch.ops.volta_fa.bwd(dout, q, k, v, out, lse, is_causal=class_.causal)


def _write(tuned: Tuned, file: dict[str, Any]) -> None:
    """Writes the choices and failed kernels into the tuning file, after the library has accepted them."""
    if tuned.path is None:
        raise OSError("there is no home folder; VOLTA_FA_TUNING=<path> names a file")
    made_on = {name: file[name] for name in ("volta_fa", "device", "driver")}
    note = {"made_by": "python -m volta_fa check --tune", "margin": MARGIN, "date": time.strftime("%Y-%m-%d")}
    tuning = {"format": 1, **made_on, "failed": tuned.failed, "choices": tuned.choices, "note": note}
    text = json.dumps(tuning, indent=1) + "\n"
    torch.ops.volta_fa._set_tuning(text)  # raises ValueError if the library would ignore this text as a file
    torch.ops.volta_fa._set_tuning("")  # undoes the line above
    path = Path(tuned.path)
    path.parent.mkdir(parents=True, exist_ok=True)
    # replaces the file atomically, because another process may be reading it
    new = path.with_name(f"{path.name}.{os.getpid()}")
    new.write_text(text)
    new.replace(path)
