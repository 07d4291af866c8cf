"""Runs a command, and prints the seconds since its start after every ten silent ones, where no terminal shows its progress.

    python tools/heartbeat.py COMMAND [ARGUMENT ...]

pip, cargo and notebooks are silent for minutes in a pipe or a log. On a terminal they show bars of their own. $VOLTA_FA_PROGRESS names a
file for lines of programs whose output cargo or pip hide: the build script (tools/build/embed.rs). Standard library only."""

from __future__ import annotations

import contextlib
import math
import os
import re
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

#: Seconds of silence after which a line comes.
INTERVAL = 10.0
PROGRESS = "VOLTA_FA_PROGRESS"


def run(command: Sequence[str | Path], env: Mapping[str, str] | None = None) -> int:
    """Runs a command with the output of this process. Returns its exit status, as a shell does."""
    env = os.environ if env is None else env
    if sys.stdout.isatty() and sys.stderr.isatty():
        with subprocess.Popen(command, env={**env, PROGRESS: f"/proc/{os.getpid()}/fd/2"}) as process, _signals_to(process):
            return _status(process.wait())
    (out, into_out), (err, into_err) = os.pipe(), os.pipe()
    # Programs open this path of the pipe's read end for writing, which makes a new write end. This process keeps none open: a pipe ends
    # only when all its write ends are closed.
    env = {**env, PROGRESS: f"/proc/{os.getpid()}/fd/{err}"}
    try:
        with subprocess.Popen(command, env=env, stdout=into_out, stderr=into_err) as process, _signals_to(process):
            os.close(into_out)
            os.close(into_err)
            try:
                _forward({out: sys.stdout.fileno(), err: sys.stderr.fileno()}, process, _name(command))
            except BrokenPipeError:  # of a reader such as `head`
                process.terminate()
    finally:
        os.close(out)
        os.close(err)
    return _status(process.returncode)


@contextlib.contextmanager
def _signals_to(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """Forwards SIGTERM and SIGHUP. Ignores SIGINT, which a terminal sends to the command too: the command then ends in its own way."""

    def forward(number: int, _: object) -> None:
        process.send_signal(number)

    handlers = {signal.SIGINT: lambda *_: None, signal.SIGTERM: forward, signal.SIGHUP: forward}
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _forward(targets: dict[int, int], process: subprocess.Popen[bytes], name: str) -> None:
    """Copies what comes from pipes until they end, or until about INTERVAL after the process's end.

    targets: by pipe, the file descriptor to copy to. name: the command's, in the lines with seconds."""
    began, at_line_start, until = time.monotonic(), True, math.inf
    with selectors.DefaultSelector() as pipes:
        for pipe in targets:
            pipes.register(pipe, selectors.EVENT_READ)
        while pipes.get_map():
            ready = pipes.select(INTERVAL)
            if process.poll() is not None:
                until = min(until, time.monotonic() + INTERVAL)
                if not ready or time.monotonic() > until:
                    return  # a process that the command left behind holds the pipes
            if not ready:
                begin = "" if at_line_start else "\n"
                print(f"{begin}volta_fa: {name}: {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
                at_line_start = True
            for key, _ in ready:
                data = os.read(key.fd, 1 << 16)
                if not data:
                    pipes.unregister(key.fd)
                    continue
                at_line_start = data.endswith(b"\n")
                while data:
                    data = data[os.write(targets[key.fd], data) :]


def _status(code: int) -> int:
    """Returns a shell's exit status: 128 + N for a process that signal N ended. subprocess has -N for it."""
    return code if code >= 0 else 128 - code


def _name(command: Sequence[str | Path]) -> str:
    """Returns the program and what it does: `pip wheel`, `cargo build`, `notebook.py`."""
    words = [Path(word).name if "\n" not in word else "" for word in map(str, command)]  # "": a program, as after `sh -c`
    if words[0].startswith("python") and re.fullmatch(r"-m|[\w.]+", words[1] if len(words) > 1 else ""):
        words = words[2:] if words[1] == "-m" else words[1:]
    action = str(command[-len(words) + 1]) if len(words) > 1 else ""
    return f"{words[0]} {action}" if re.fullmatch(r"[a-z]+", action) else words[0]


if __name__ == "__main__":
    if len(sys.argv) < 2:
        raise SystemExit("usage: heartbeat.py COMMAND [ARGUMENT ...]")
    sys.exit(run(sys.argv[1:]))
