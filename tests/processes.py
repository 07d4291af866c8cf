"""Runs Python programs of tests in forks of a server process that has imported torch.

Importing torch takes 1.6 CPU seconds, and many tests start several programs. The server imports it once and forks for each program,
which starts after milliseconds, with its own environment, standard output and exit status. `run_forked` sends a request in JSON to the
server's stdin. The server (this file as a program: `_serve`) forks, the fork becomes the program (`_run`), and the server answers with
the exit status. Callers: conftest.run_process, and tests through `run_pieces` and `succeeds`.

`run_program` starts a new interpreter instead: for programs that import other packages, or have an interpreter's own options."""

import atexit
import json
import os
import runpy
import select
import signal
import subprocess
import sys
import tempfile
import textwrap
import types
from collections.abc import Iterable
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
# Prefixes of variables that the interpreter and libraries read when they start, before a program has its own environment.
READ_AT_LOAD = ("OMP_", "MKL_", "LD_", "TORCH_LOGS", "PYTHONHASHSEED", "PYTHONWARNINGS")

# Every program has one thread: waiting threads cost more than they save in small problems, and a fork has none of its server's.
ONE_THREAD = {"OMP_NUM_THREADS": "1"}

_server: subprocess.Popen | None = None
# The server's environment, without PYTHONPATH, which each program has for itself.
_served: dict[str, str] = {}


def run_forked(arguments: list, env: dict[str, str] | None = None, cwd=None, timeout: float = 300) -> subprocess.CompletedProcess:
    """Runs `python arguments` as subprocess.run(capture_output=True, text=True) does, with an empty stdin. `timeout`: seconds.

    Args:
        arguments: -c code, -m module or a file, and what follows. No other options of the interpreter.
        env: variables that are read at load must be those of this process: a program that changes them needs a new interpreter. The
            number of threads is one, whatever OMP_NUM_THREADS says."""
    assert arguments[0] in ("-c", "-m") or not str(arguments[0]).startswith("-"), arguments
    env = {**(os.environ if env is None else env), **ONE_THREAD}
    server = _running()
    changed = {name for name in {*env, *_served} if name.startswith(READ_AT_LOAD) and env.get(name) != _served.get(name)}
    assert not changed, f"{changed} cannot change in a fork: use subprocess"
    with tempfile.TemporaryDirectory() as folder:
        request = {"arguments": [*map(str, arguments)], "env": env, "cwd": str(cwd or os.getcwd()), "folder": folder}
        answered = False
        try:
            server.stdin.write(json.dumps(request) + "\n")
            server.stdin.flush()
            answered = bool(select.select([server.stdout], [], [], timeout)[0])
        finally:
            if not answered:  # also after an interruption, because the next call would read this call's answer
                os.killpg(server.pid, signal.SIGKILL)
                server.wait()
        if not answered:
            raise subprocess.TimeoutExpired(request["arguments"], timeout)
        status = server.stdout.readline()
        assert status, f"the server ended with status {server.wait()}"
        return subprocess.CompletedProcess(request["arguments"], int(status), *((Path(folder) / n).read_text() for n in ("out", "err")))


def end_rank() -> None:
    """Ends a process that has used gloo with status 0, without finalizing the interpreter.

    gloo's threads release tensors of a collective after `wait` has returned, and take the GIL for it. If the interpreter finalizes then,
    Python unwinds the thread through a destructor, and the process aborts: "terminate called without an active exception"."""
    sys.stdout.flush()
    os._exit(0)


def environment(*folders: Path | str, **variables: str) -> dict[str, str]:
    """Returns this process's environment with these folders as PYTHONPATH ("": none), and these variables."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, map(str, folders))), **variables}


def sources() -> list[Path | str]:
    """Returns the folder of volta_fa's sources, and what PYTHONPATH has."""
    return [REPOSITORY / "python", os.environ.get("PYTHONPATH", "")]


def run_pieces(*code: str, path: Path | str = "") -> subprocess.CompletedProcess:
    """Runs these pieces of code as one program, with PYTHONPATH `path`, then volta_fa's folder."""
    import volta_fa  # not at the top of this file, which the server runs without volta_fa

    environ = environment(path, Path(volta_fa.__file__).parent.parent)
    return run_forked(["-c", "".join(map(textwrap.dedent, code))], environ, cwd="/")


def output_of(ran: subprocess.CompletedProcess[str]) -> str:
    """Returns what a program has printed. Fails if the program failed."""
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


def succeeds(*code: str, path: Path | str = "") -> str:
    """Returns what the program of `run_pieces` prints. Fails if the program fails."""
    return output_of(run_pieces(*code, path=path))


def run_program(*arguments: object, path: Iterable[Path | str] = (), **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs `python arguments` in a new interpreter and in the repository's folder, with its sources of volta_fa.

    Args:
        path: folders that come before these sources in PYTHONPATH, such as a release of another package.
        variables: environment variables."""
    env = environment(*path, *sources(), **variables)
    return subprocess.run([sys.executable, *map(str, arguments)], env=env, cwd=REPOSITORY, capture_output=True, text=True)


def _running() -> subprocess.Popen:
    """Returns the server of this process, and starts it if there is none."""
    global _server, _served
    if _server is None or _server.poll() is not None:
        _served = {name: value for name, value in {**os.environ, **ONE_THREAD}.items() if name != "PYTHONPATH"}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        # a session of its own: killpg ends the server and what programs started
        _server = subprocess.Popen([sys.executable, __file__], env=_served, start_new_session=True, **pipes)
        # closes the server's stdin, which ends it, and waits
        atexit.register(_server.communicate)
    return _server


def _serve() -> dict:
    """Forks for each request, and answers with the fork's exit status. Returns only in a fork: its request."""
    import torch  # noqa: F401

    sys.path.pop(0)  # this file's folder
    while line := sys.stdin.readline():
        if (child := os.fork()) == 0:
            return json.loads(line)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
    sys.exit()


def _run(request: dict) -> None:
    """Becomes the program of a request."""
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["cwd"])
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for target, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(os.path.join(request["folder"], name), os.O_WRONLY | os.O_CREAT), target)
    kind, *rest = request["arguments"]
    sys.path[:0] = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    if kind == "-c":
        code, *arguments = rest
        sys.argv = ["-c", *arguments]
        sys.path.insert(0, "")
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(code, "<string>", "exec"), vars(main))
    elif kind == "-m":
        sys.argv = rest
        sys.path.insert(0, os.getcwd())
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = [kind, *rest]
        sys.path.insert(0, os.path.dirname(os.path.abspath(kind)))
        runpy.run_path(kind, run_name="__main__")


if __name__ == "__main__":
    _run(_serve())
