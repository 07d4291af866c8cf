"""Tests examples/first_light.ipynb, which installs and checks volta_fa, in the states that a new user is in: `make notebook`.

    python tools/notebook.py OUTPUT [STATE ...]     # default: all

nothing   neither a wheel nor an address: each cell that needs volta_fa stops with one line that says what to do
wheel     a wheel beside the notebook, as one that was uploaded
source    the address of a repository, here this checkout: it clones the last commit and builds all but the kernels in target/

Each state has an environment of its own, with the packages of this Python but without the checkout's. The notebooks with their
results stay in OUTPUT."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from bootstrap import Environment, package_folders  # a virtual environment, and the site-packages of this Python

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOK = ROOT / "examples" / "first_light.ipynb"
#: What the first cell prints in the state `nothing`. In the others the cell of the check prints "Exit status 0".
STOPPED = "Stopped: no volta_fa: set WHEEL or SOURCE in this cell"


def environment(folder: Path) -> Path:
    """Makes an environment that sees the packages of this Python, but not what its .pth files add, and returns its Python."""
    made = Environment(folder)
    made.create()
    (made.site_packages() / "packages.pth").write_text("".join(f"{path}\n" for path in package_folders()))
    return made.python


def with_kernels(target: Path) -> Path:
    """Makes a target folder of cargo that shares the checkout's compiled kernels. They are cached by content."""
    kernels = ROOT / "target" / "volta-fa-kernels"
    kernels.mkdir(parents=True, exist_ok=True)
    target.mkdir()
    (target / kernels.name).symlink_to(kernels)
    return target


#: Seconds that a cell may take: in the state "source" one builds the library.
MAX_SECONDS = 3600


def execute(folder: Path, state: str, source: str = "") -> tuple[int, str]:
    """Runs the notebook with this address in its variable SOURCE.

    Returns 0 if no cell raised an error, and the text of all outputs. The executed notebook stays in `folder`."""
    print(f"volta_fa: {NOTEBOOK.name}, state {state}", flush=True)
    path = folder / NOTEBOOK.name
    text = NOTEBOOK.read_text()
    assert text.count(r"SOURCE = \"\"\n") == 1
    path.write_text(text.replace(r"SOURCE = \"\"\n", rf"SOURCE = \"{source}\"\n"))
    python = environment(folder / "environment")
    code = "from nbclient.cli import main; main()"
    dropped = ("PYTHONPATH", "VIRTUAL_ENV", "MAKEFLAGS", "MAKELEVEL", "MAKEOVERRIDES", "TORCH", "PYTHON", "VOLTA_FA_CUDA_HOME")
    environ = {name: value for name, value in os.environ.items() if name not in dropped}
    if source:
        environ["CARGO_TARGET_DIR"] = str(with_kernels(folder / "target"))
    command = [python, "-c", code, f"--timeout={MAX_SECONDS}", "--inplace", "--allow-errors", path.name]
    status = subprocess.run(command, cwd=folder, env=environ).returncode
    outputs = [output for cell in json.loads(path.read_text())["cells"] for output in cell.get("outputs", ())]
    said = ["".join(output.get("text", "")) + "\n".join(output.get("traceback", ())) for output in outputs]
    errors = [output for output in outputs if output["output_type"] == "error"]
    return status or bool(errors), "\n".join(said)


def main(arguments: list[str]) -> int:
    output = Path(arguments[0]).absolute()
    shutil.rmtree(output, ignore_errors=True)
    wrong = []
    for state in arguments[1:] or ("nothing", "wheel", "source"):
        folder = output / state
        folder.mkdir(parents=True)
        if state == "wheel":
            print("volta_fa: builds a wheel", flush=True)
            pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-build-isolation", "--no-deps", "--wheel-dir", folder, ROOT]
            subprocess.run(pip, check=True)
        status, said = execute(folder, state, str(ROOT) if state == "source" else "")
        # each later cell stops with one line too, if it is run all the same
        stopped = STOPPED in said and "Exit status" not in said and "Traceback" not in said
        right = stopped if state == "nothing" else status == 0 and "Exit status 0" in said
        if not right:
            print(said[-4000:], file=sys.stderr)
            wrong.append(state)
    if wrong:
        print(f"volta_fa: {NOTEBOOK.name} is wrong in the states: {', '.join(wrong)}", file=sys.stderr)
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
