"""Checks GPU kernels in a subprocess. A kernel that hangs or faults destroys that process's CUDA context.
The check reports it and continues in a new process."""

from __future__ import annotations

import multiprocessing
import warnings
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from typing import Any

from .correctness import DeviceLost, KernelResult, check_kernel
from .kernels import Target

#: Seconds without an answer after which a kernel counts as one that never ends. Its problems take less than one, and a driver that has
#: to compile its PTX some more.
KERNEL_TIMEOUT_S = 30.0
#: A process' start: torch, the library, CUDA.
START = 90.0
#: Where so many processes were lost, it is not single kernels that are wrong.
MAX_LOST_PROCESSES = 5

Check = Callable[[Target, dict[str, Any], int, bool], KernelResult]


def check_isolated(
    target: Target,
    variants: Sequence[dict[str, Any]],
    seed: int,
    quick: bool,
    out_of_time: Callable[[], bool],
    check: Check = check_kernel,
) -> Iterator[KernelResult]:
    """Each kernel's result, in turn; none for those that time or processes did not suffice for."""
    context = multiprocessing.get_context("spawn")  # CUDA does not survive a fork
    position = lost = 0
    while position < len(variants) and lost < MAX_LOST_PROCESSES and not out_of_time():
        ours, theirs = context.Pipe()
        process = context.Process(target=_work, args=(theirs, target, list(variants[position:]), seed, quick, check), daemon=True)
        process.start()
        theirs.close()
        started = False
        try:
            started = _receive(ours, START) == _READY
            while position < len(variants) and not out_of_time():
                answer, alive = _receive(ours, KERNEL_TIMEOUT_S)
                yield KernelResult.from_data(answer)
                position += 1
                if not alive:
                    lost += 1
                    break
        except (EOFError, TimeoutError, OSError) as error:
            timeout, variant = isinstance(error, TimeoutError), variants[position]
            result = KernelResult(variant["name"], variant["family"], variant["pass"], problems=1)
            if started:
                result.failures = [f"no answer in {KERNEL_TIMEOUT_S:.0f} s" if timeout else "the process that launched it died"]
            else:
                result.inconclusive = [f"no process had a CUDA context within {START:.0f} s" if timeout else "no process could start"]
                lost = MAX_LOST_PROCESSES
            yield result
            position += 1
            lost += 1
        finally:
            ours.close()
            process.kill()
            process.join()


_READY = "ready"


def _receive(connection: Connection, seconds: float) -> Any:
    if not connection.poll(seconds):
        raise TimeoutError
    return connection.recv()


def _work(connection: Connection, target: Target, variants: Sequence[dict[str, Any]], seed: int, quick: bool, check: Check) -> None:
    """The other process."""
    # autograd's thread has no context before its first GEMM: PyTorch makes it, and says so
    warnings.filterwarnings("ignore", message="Attempting to run cuBLAS")
    target.make_current()
    target.synchronize()
    connection.send(_READY)
    for variant in variants:
        try:
            result, alive = check(target, variant, seed, quick), True
        except DeviceLost as error:
            result, alive = error.result, False
        connection.send((result.data(), alive))
        if not alive:
            return
