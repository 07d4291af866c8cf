"""Settings and all results of a check."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .correctness import INCOMPLETE, RIGHT, WRONG, KernelResult
from .kernels import Target
from .performance import Speeds
from .tune import Tuned


@dataclass(frozen=True)
class Settings:
    """Settings from the command line."""

    target: Target
    output: Path
    seed: int = 0
    quick: bool = False
    tune: bool = False
    kernels: str = "*"
    limit: float | None = None

    @property
    def command(self) -> str:
        """Returns the command that repeats the check without a time limit."""
        device = self.target.kind if self.target.kind != "cuda" else str(self.target.device)
        words = ["python", "-m", "volta_fa", "check", "--device", device, "--output", str(self.output)]
        words += ["--seed", str(self.seed)] * (self.seed != 0)
        words += ["--quick"] * self.quick + ["--tune"] * self.tune
        words += ["--kernels", self.kernels] * (self.kernels != "*")
        return shlex.join(words)


@dataclass
class Findings:
    """All results of a check."""

    settings: Settings
    machine: dict[str, Any] = field(default_factory=dict)
    trouble: str | None = None  # why this torch cannot run on the GPU
    results: list[KernelResult] = field(default_factory=list)
    continued: int = 0  # number of results from an earlier, unfinished check
    unreached: list[dict[str, Any]] = field(default_factory=list)  # kernels that time or processes did not suffice for
    unfit: list[str] = field(default_factory=list)  # kernels that need more shared memory than the GPU has
    speeds: Speeds = field(default_factory=Speeds)
    tuned: Tuned | None = None
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def failed(self) -> list[str]:
        """Returns the names of wrong kernels."""
        return [v.kernel for v in self.results if v.failures]

    @property
    def unchecked(self) -> list[str]:
        """Returns the kernels without a result, for lack of time or another reason. Plans still use them."""
        doubtful = [v.kernel for v in self.results if v.inconclusive and not v.failures]
        return [*doubtful, *(v["name"] for v in self.unreached)]

    @property
    def wrong(self) -> list[str]:
        """Returns all that is wrong: names of kernels, and of parts of the check."""
        parts = {"torch": self.trouble, "speed": self.speeds.troubles, "tuning": self.tuned and self.tuned.trouble}
        return [*self.failed, *(name for name, trouble in parts.items() if trouble)]

    @property
    def outcome(self) -> str:
        """Returns RIGHT, WRONG or INCOMPLETE."""
        return WRONG if self.wrong else INCOMPLETE if self.unchecked or not self.results else RIGHT
