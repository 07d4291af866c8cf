"""Checks GPU kernels in subprocesses, several at a time, because a kernel that hangs or faults destroys its process's CUDA context.

`check_isolated` is the entry point. It replaces a lost process, and tries that kernel again, alone. A process takes one kernel after the
other: it loads the kernel, for which the driver may have to compile PTX, and then checks it. Only checking counts against the time
limit."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

from .correctness import DeviceLost, KernelResult, check_kernel, load_kernel
from .kernels import Target  # the device: a GPU, the simulator or the CPU

#: Maximum seconds for a step of a process: import torch and start CUDA, load a kernel, check it. A check takes less than one second.
TIMEOUTS = {"start": 120.0, "load": 300.0, "check": 30.0}
#: Factor on TIMEOUTS in a second trial. A kernel whose process was lost gets one, alone, because another kernel or program may have been
#: the reason.
SECOND_TRIAL = 2.0
#: Maximum seconds of all second trials together, without loading.
SECOND_TRIALS = 90.0
#: After this number of lost processes the check stops: the cause is not a single kernel.
MAX_LOST_PROCESSES = 5
#: Maximum number of concurrent processes, and GPU memory of each, for its CUDA context and tensors.
MAX_PROCESSES, BYTES_PER_PROCESS = 16, 2**30

#: The functions `load_kernel` (of target, variant, quick) and `check_kernel` (of target, variant, seed, quick), or a test's in their place.
Load = Callable[[Target, dict[str, Any], bool], None]
Check = Callable[[Target, dict[str, Any], int, bool], KernelResult]


def processes(target: Target, kernels: int) -> int:
    """Returns how many processes check this number of kernels on a GPU: one for each core, as far as its memory suffices."""
    free = torch.cuda.mem_get_info(target.device)[0] // BYTES_PER_PROCESS - 1
    # starting a process takes as long as checking several kernels
    return max(1, min(_cores(), free, MAX_PROCESSES, kernels // 4))


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def check_isolated(
    target: Target,
    variants: Sequence[dict[str, Any]],
    seed: int,
    quick: bool,
    seconds: float,
    at_a_time: int = 1,
    check: Check = check_kernel,
    load: Load = load_kernel,
) -> Iterator[KernelResult]:
    """Yields results of `variants`, kernels as `info()` describes them, in the order in which they finish; none for kernels for which time
    or processes did not suffice. `quick`: one problem of each kernel. `seconds` limits the time that each of `at_a_time` processes spends
    on checks. Then kernels that lost their process get a second trial, all in at most SECOND_TRIALS seconds. A kernel without a second
    trial is inconclusive, with the first failure as the reason."""
    arguments = (target, seed, quick, check, load)
    suspects = deque[tuple[dict[str, Any], KernelResult]]()
    for variant, result, lost in _run(variants, arguments, seconds, at_a_time, patience=1.0):
        if lost:
            suspects.append((variant, result))
        else:
            yield result
    left = SECOND_TRIALS
    while suspects and left > 0:
        variant, first = suspects.popleft()
        began, in_vain = time.monotonic(), False
        for _, result, _ in _run([variant], arguments, seconds=float("inf"), at_a_time=1, patience=SECOND_TRIAL):
            if result.passed:
                result.note = f"lost its process once, and not when it ran alone: {first.failures[0]}"
            in_vain = bool(result.inconclusive)
            if in_vain:
                result.inconclusive += first.failures
            left -= time.monotonic() - began - result.load_seconds
            yield result
        if in_vain:  # another trial would fail in the same way
            break
    for _, first in suspects:
        first.inconclusive, first.failures = [f"no second trial: {failure}" for failure in first.failures], []
        yield first


# A fork of this process cannot use CUDA. The fork server has no CUDA context, and imports torch once for all processes.
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload([__name__])


class _Lost(Exception):
    """A subprocess ended or does not answer."""


class _Worker:
    """A subprocess and its current step: "start" (until CUDA works), then "load" and "check" for each kernel. `patience` is the factor on
    TIMEOUTS, `variant` the current kernel, `load_seconds` its time to load, `checked_seconds` the time of all checks so far."""

    def __init__(self, patience: float, *arguments: Any):
        self.connection, theirs = _context.Pipe()
        self.process = _context.Process(target=_work, args=(theirs, *arguments), daemon=True)
        self.process.start()
        theirs.close()
        self.patience, self.variant = patience, dict[str, Any]()
        self.load_seconds = self.checked_seconds = 0.0
        self._enter("start")

    def _enter(self, step: str) -> None:
        self.step, self._since = step, time.monotonic()

    @property
    def _limit(self) -> float:
        return self.patience * TIMEOUTS[self.step]

    @property
    def seconds(self) -> float:
        """Time since the step began."""
        return time.monotonic() - self._since

    @property
    def seconds_left(self) -> float:
        """Time until the step is late."""
        return max(0.0, self._limit - self.seconds)

    def take(self, variant: dict[str, Any]) -> None:
        """Sends the next kernel to the process, which loads it."""
        self.variant = variant
        self._enter("load")
        with contextlib.suppress(OSError):  # answer() reports the end of the process
            self.connection.send(variant)

    def check(self) -> None:
        """Notes that the process has loaded the kernel and now checks it."""
        self.load_seconds = self.seconds
        self._enter("check")

    def answer(self) -> Any:
        """Returns what the process sent, which ends the step. Raises _Lost if it sent nothing: then it died or is late."""
        try:
            if self.connection.poll():
                return self.connection.recv()
        except (EOFError, OSError):
            raise _Lost("no process could start" if self.step == "start" else f"the process died ({self.step})") from None
        what = "no process had a CUDA context" if self.step == "start" else f"no answer ({self.step})"
        raise _Lost(f"{what} within {self._limit:.0f} s")

    def result(self, failures: Sequence[str] = (), inconclusive: Sequence[str] = ()) -> KernelResult:
        """Returns a result for the current kernel, whose process gave none."""
        name, family, pass_ = (self.variant[key] for key in ("name", "family", "pass"))
        return KernelResult(name, family, pass_, problems=1, failures=list(failures), inconclusive=list(inconclusive))

    def end(self) -> None:
        """Kills the process."""
        self.connection.close()
        self.process.kill()
        self.process.join()


def _run(
    variants: Sequence[dict[str, Any]], arguments: tuple[Any, ...], seconds: float, at_a_time: int, patience: float
) -> Iterator[tuple[dict[str, Any], KernelResult, bool]]:
    """Yields (kernel, result, whether the kernel's process was lost). Stops after MAX_LOST_PROCESSES lost processes.

    Args:
        arguments: the last parameters of `_work`: target, seed, quick, check, load.
        seconds, at_a_time: as for `check_isolated`.
        patience: factor on TIMEOUTS.
    """
    queue, workers = deque(variants), list[_Worker]()
    threads = max(1, _cores() // at_a_time)
    lost = 0

    def goes_on(checked_seconds: float) -> bool:
        """Returns whether a process that has checked for this time takes another kernel."""
        return bool(queue) and checked_seconds < seconds and lost < MAX_LOST_PROCESSES

    def start(checked_seconds: float = 0.0) -> None:
        """Starts a process. It gets the rest of a lost process's time."""
        if goes_on(checked_seconds):
            workers.append(_Worker(patience, threads, *arguments))
            workers[-1].checked_seconds = checked_seconds

    def end(worker: _Worker) -> None:
        worker.end()
        workers.remove(worker)

    try:
        for _ in range(min(at_a_time, len(queue))):
            start()
        while workers:
            ready = wait([worker.connection for worker in workers], min(worker.seconds_left for worker in workers))
            for worker in [w for w in workers if w.connection in ready or w.seconds_left == 0]:
                step, taken, variant = worker.step, worker.seconds, worker.variant
                worker.checked_seconds += taken if step == "check" else 0.0
                try:
                    answer = worker.answer()
                except _Lost as error:
                    end(worker)
                    if step != "start":
                        lost += 1
                        yield variant, worker.result(failures=[str(error)]), True
                        start(worker.checked_seconds)
                    elif not workers and queue:  # no process could start, which no kernel caused
                        worker.variant = queue.popleft()
                        yield worker.variant, worker.result(inconclusive=[str(error)]), False
                    continue
                if step == "load":
                    worker.check()
                    continue
                if step == "check":
                    data, alive = answer
                    result = KernelResult.from_data(data)
                    result.load_seconds, result.check_seconds = round(worker.load_seconds, 3), round(taken, 3)
                    yield variant, result, not alive
                    if not alive:
                        lost += 1
                        end(worker)
                        start(worker.checked_seconds)
                        continue
                if goes_on(worker.checked_seconds):
                    worker.take(queue.popleft())
                else:
                    end(worker)
    finally:
        for worker in workers:
            worker.end()


def _work(connection: Connection, threads: int, target: Target, seed: int, quick: bool, check: Check, load: Load) -> None:
    """Main function of a subprocess: loads and checks the kernels that arrive on the connection."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # on Ctrl-C the main process ends this one
    # autograd's thread has no CUDA context before its first GEMM, for which PyTorch warns
    warnings.filterwarnings("ignore", message="Attempting to run cuBLAS")
    torch.set_num_threads(threads)
    target.make_current()
    target.synchronize()
    connection.send(None)  # ends the step "start", and below "load"
    while True:
        try:
            variant = connection.recv()
        except EOFError:
            return
        load(target, variant, quick)
        connection.send(None)
        try:
            result, alive = check(target, variant, seed, quick), True
        except DeviceLost as error:
            result, alive = error.result, False
        connection.send((result.data(), alive))
