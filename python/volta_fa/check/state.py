"""Keeps the results of an unfinished check in the report's folder, so that the same command continues there."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .. import diagnostics
from ..errors import CommandError
from ..library import library_path
from .correctness import KernelResult  # what the check of one kernel found
from .kernels import Target  # the device: a GPU, the simulator or the CPU

#: Name of the file in the report's folder.
FILE = "volta_fa-check.unfinished"


def made_on(target: Target, **settings: Any) -> dict[str, Any]:
    """Returns the conditions of results: library, GPU, driver, torch, and `settings` that change results. Results hold under these only."""
    library = hashlib.sha256()  # of both libraries: the operators, built for this torch, and the core with the kernels
    for path in (library_path(), library_path().parent.parent / "libvolta_fa_core.so"):
        library.update(path.read_bytes())
    gpu, driver = target.kind, None
    if target.kind == "cuda":
        card = torch.cuda.get_device_properties(target.device)
        # a hash of the UUID, because two GPUs of one machine may have the same name
        number = hashlib.sha256(str(getattr(card, "uuid", target.number)).encode()).hexdigest()[:8]
        gpu, driver = f"{card.name} ({number})", diagnostics.driver_version()
    return {"library": library.hexdigest()[:16], "gpu": gpu, "driver": driver, "torch": torch.__version__, **settings}


@dataclass
class State:
    """A file of results: one line for their conditions, then one line per kernel."""

    path: Path
    conditions: dict[str, Any]
    results: list[KernelResult]
    note: str = ""  # why an existing file is ignored

    @classmethod
    def open(cls, path: Path, conditions: dict[str, Any]) -> State:
        """Reads the file. Starts a new one, with a note, if it is damaged or has other conditions.
        Raises CommandError if the file cannot be written."""
        state = cls(path, conditions, [])
        try:
            text = path.read_text()
            whole = text[: text.rfind("\n") + 1]  # a line without an end was cut off
            first, *lines = [json.loads(line) for line in whole.splitlines()]
            different = [name for name in conditions if first[name] != conditions[name]]
            if different:
                name = different[0]
                state.note = f"{path} is ignored: its {name} was {first[name]}, and is {conditions[name]}"
            else:
                state.results = [KernelResult.from_data(line) for line in lines]
                if whole != text:
                    path.write_text(whole)
                return state
        except FileNotFoundError:
            pass
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            state.note = f"{path} is ignored: it is damaged ({type(error).__name__})"
        try:
            path.write_text(json.dumps(conditions) + "\n")
        except OSError as error:
            raise CommandError(f"--output {path.parent}: {path.name}: {error.strerror}") from None
        return state

    def add(self, result: KernelResult) -> None:
        """Appends a conclusive result. The next run checks inconclusive kernels again."""
        if not result.inconclusive:
            with self.path.open("a") as file:
                file.write(json.dumps(result.data(), allow_nan=False) + "\n")

    def close(self, is_finished: bool) -> None:
        """Deletes the file of a finished check, so that the next check starts over."""
        if is_finished:
            self.path.unlink(missing_ok=True)
