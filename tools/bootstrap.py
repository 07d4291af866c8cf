"""Makes the virtual environment, with pinned requirements, in which the Makefile's targets build and run volta_fa. The Makefile calls it.

    python tools/bootstrap.py .venv nvrtc     # the environment with NVRTC, which compiles the kernels: cargo can begin
    python tools/bootstrap.py .venv torch     # torch and what `make run`, the demo, needs beside it, while cargo compiles
    python tools/bootstrap.py .venv test      # adds the requirements of `make test`; `lint`, `docs` and so on: see EXTRAS

The first two take `torch==2.10.0` too: then the environment gets this release, whatever else is installed.

- If the Python that runs `nvrtc` has a supported torch (tools/torch_releases.py), the new environment uses it, by a link to that Python's
  packages.
- Otherwise, `torch` installs the default release. On a machine with a Volta GPU, it comes from PyTorch's CUDA 12.6 index,
  because the default wheels have no code for sm_70.
- NVRTC is in a folder of its own, because a torch for CUDA 12 requires an older one, and ours only compiles the kernels. The folder,
  `.venv/cuda12`, has the form of a CUDA toolkit; the build takes $VOLTA_FA_CUDA_HOME instead if set.
- The simulator (tools/volta-sim) runs machine code that nvdisasm disassembled. Triton's wheels have an nvdisasm, up to CUDA 13.0 one that
  knows sm_70. If torch's triton is newer, an older triton goes into `.venv/triton`. `.venv/nvdisasm` links to the right program.
- Tests need more, which `make run` does without: the newest transformers in the environment, the oldest supported one in
  `.venv/transformers-4.57`, diffusers and xformers in `.venv/diffusers`.

uv or pip alone do not suffice: they neither reuse the active torch without an installation into its environment, nor choose an index by
the GPU, nor keep conflicting versions in folders. Uses the standard library only."""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import heartbeat  # heartbeat.run prints the seconds of a silent command, and returns its exit status
import torch_releases

# Checks return a problem as text, or None. requirements() returns the pins of a section of tools/requirements.txt.
from check_build_env import check_python, check_torch, requirements

#: PyTorch's index for CUDA 12.6, the last with sm_70 in its wheels.
VOLTA_TORCH_INDEX = "https://download.pytorch.org/whl/cu126"
#: The last CUDA release with an nvdisasm for sm_70, and the last triton with such an nvdisasm.
NVDISASM_NEWEST, NVDISASM_WHEEL = (13, 0), "triton==3.6.0"
#: Sections of tools/requirements.txt that `make run` needs beside torch and nvdisasm.
BASE = ("build", "cli", "numpy")
#: Folders beside the environment's packages for `make test`, each with the section of its name. Tests put them first on their path.
FOLDERS = ("transformers-4.57", "diffusers")
#: Makefile targets with more requirements, which are installed at their first use.
EXTRAS = ("test", "lint", "docs", "wheel", "hub", "notebook")
#: File that adds folders to the environment's sys.path: those of the Python whose torch it uses.
_LINK = "volta_fa_torch_of_another_environment.pth"


def say(text: str) -> None:
    print(f"volta_fa: {text}", flush=True)


def gpu_capabilities() -> list[str]:
    """Returns the compute capabilities of this machine's NVIDIA GPUs, as "7.0"; empty without a driver."""
    query = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
    try:
        return subprocess.run(query, capture_output=True, text=True, timeout=60, check=True).stdout.split()
    except (OSError, subprocess.SubprocessError):
        return []


def torch_arguments(capabilities: list[str]) -> list[str]:
    """Returns pip's arguments for a torch that runs on these GPUs."""
    return [f"torch=={torch_releases.DEFAULT}", *(["--index-url", VOLTA_TORCH_INDEX] if "7.0" in capabilities else [])]


def package_folders() -> list[str]:
    """Returns the folders in which this Python finds installed packages."""
    return [entry for entry in sys.path if Path(entry).name in ("site-packages", "dist-packages") and Path(entry).is_dir()]


class Environment:
    """The virtual environment in `folder`."""

    def __init__(self, folder: Path):
        self.folder = folder.absolute()
        self.python = self.folder / "bin" / "python"

    def create(self) -> None:
        """Makes the environment, unless it exists with this Python's version."""
        probe = "import sys, pip; assert sys.version_info[:2] == tuple(map(int, sys.argv[1:]))"
        version = map(str, sys.version_info[:2])
        if self.python.exists() and subprocess.run([self.python, "-c", probe, *version], capture_output=True).returncode == 0:
            return
        say(f"making {self.folder} with {sys.executable} (Python {'.'.join(map(str, sys.version_info[:3]))})")
        made = subprocess.run([sys.executable, "-m", "venv", "--clear", self.folder], capture_output=True, text=True)
        if made.returncode != 0:
            shutil.rmtree(self.folder, ignore_errors=True)
            remedy = "install its venv module (Debian and Ubuntu: `apt install python3-venv`)"
            raise SystemExit(f"volta_fa: {sys.executable} cannot make virtual environments: {remedy}")

    def output(self, code: str) -> str:
        """Returns what the environment's Python prints for `code`."""
        return subprocess.run([self.python, "-c", code], capture_output=True, text=True, check=True).stdout.strip()

    def sees_torch(self) -> bool:
        """Returns whether the environment has a supported torch, or a link to one."""
        check = "import sys, check_build_env; sys.exit(check_build_env.check_torch() is not None)"
        return subprocess.run([self.python, "-c", check], cwd=Path(__file__).parent).returncode == 0

    def site_packages(self) -> Path:
        return Path(self.output("import sysconfig; print(sysconfig.get_paths()['purelib'])"))

    def pip_install(self, *arguments: str | Path) -> None:
        command = [self.python, "-m", "pip", "install", "--disable-pip-version-check", *arguments]
        # pip would count packages on the caller's PYTHONPATH or user site as installed.
        environ = {**os.environ, "PYTHONNOUSERSITE": "1"}
        environ.pop("PYTHONPATH", None)
        if heartbeat.run(command, environ) != 0:
            raise SystemExit(f"volta_fa: `{' '.join(map(str, command))}` failed: its last lines above say why")


def link_active_torch(environment: Environment) -> None:
    """Lets the environment see the packages of this Python if they have a supported torch. Run by the environment's own Python, does
    nothing."""
    if Path(sys.prefix) == environment.folder:
        return
    link = environment.site_packages() / _LINK
    link.unlink(missing_ok=True)
    if check_torch() is None:
        import torch

        say(f"using torch {torch.__version__} of {sys.prefix} as it is")
        link.write_text("".join(f"{folder}\n" for folder in package_folders()))


def install_torch(environment: Environment, wanted: str | None = None) -> None:
    """Installs this release; without one, the default release unless the environment sees a supported one."""
    if wanted is None and environment.sees_torch():
        return
    arguments = [wanted] if wanted else torch_arguments(gpu_capabilities())
    if VOLTA_TORCH_INDEX in arguments:
        say(f"this machine's GPU is a Volta (sm_70): taking torch from {VOLTA_TORCH_INDEX}, since the default wheel cannot run on it")
    environment.pip_install(*arguments)


def install_nvrtc(environment: Environment) -> None:
    """Installs NVRTC's wheels into the environment's cuda12/, arranged as a CUDA toolkit."""
    home = environment.folder / "cuda12"
    shutil.rmtree(home, ignore_errors=True)
    environment.pip_install("--target", home / "wheels", "--no-deps", *requirements("nvrtc"))
    make_cuda_home(home, home / "wheels" / "nvidia")


def nvdisasm_release(program: Path) -> tuple[int, int] | None:
    """Returns the CUDA release of this nvdisasm; None if it does not run."""
    try:
        text = subprocess.run([program, "--version"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return None
    found = re.search(r"release (\d+)\.(\d+)", text)
    return (int(found[1]), int(found[2])) if found else None


def install_nvdisasm(environment: Environment) -> None:
    """Links nvdisasm into the environment: that of triton if it knows sm_70, else of NVDISASM_WHEEL."""
    in_triton = "backends/nvidia/bin/nvdisasm"
    code = "import importlib.util as u; found = u.find_spec('triton'); print(found.submodule_search_locations[0] if found else '')"
    program = Path(environment.output(code) or environment.folder) / in_triton
    release = nvdisasm_release(program)
    if release is None or release > NVDISASM_NEWEST:
        say("this torch's triton has no nvdisasm that knows sm_70: putting an older one into " + str(environment.folder / "triton"))
        program = environment.folder / "triton" / "triton" / in_triton
        if nvdisasm_release(program) is None:
            environment.pip_install("--target", environment.folder / "triton", "--no-deps", "--no-compile", NVDISASM_WHEEL)
    link = environment.folder / "nvdisasm"
    link.unlink(missing_ok=True)
    link.symlink_to(program)


def install_folder(environment: Environment, name: str) -> None:
    """Installs requirements into a folder of their own."""
    folder, pins = environment.folder / name, requirements(name)
    stamp = folder / "requirements.txt"
    if stamp.exists() and stamp.read_text().splitlines() == pins:
        return
    shutil.rmtree(folder, ignore_errors=True)
    environment.pip_install("--target", folder, "--no-deps", "--no-compile", *pins)
    stamp.write_text("\n".join(pins))


def make_cuda_home(home: Path, wheels: Path) -> None:
    """Arranges the NVRTC wheels like a CUDA toolkit: lib64/ and include/."""
    (home / "lib64").symlink_to(wheels / "cuda_nvrtc" / "lib")
    (home / "include").mkdir()
    for package in ("cuda_runtime", "cuda_nvcc"):
        for entry in (wheels / package / "include").iterdir():
            link = home / "include" / entry.name
            if not link.exists():
                link.symlink_to(entry)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("part", choices=("nvrtc", "torch", *EXTRAS))
    parser.add_argument("release", nargs="?", choices=[f"torch=={release}" for release in torch_releases.RELEASES])
    given = parser.parse_args(arguments)
    if problem := check_python():
        print(f"volta_fa: {problem}", file=sys.stderr)
        return 1
    environment = Environment(given.folder)
    match given.part:
        case "nvrtc":
            environment.create()
            if given.release is None:
                link_active_torch(environment)
            install_nvrtc(environment)
        case "torch":
            install_torch(environment, given.release)
            environment.pip_install(*(package for name in BASE for package in requirements(name)))
            install_nvdisasm(environment)
            # `python -m volta_fa` and pytest use the checkout's package, so edits need no install step
            checkout = Path(__file__).resolve().parent.parent / "python"
            (environment.site_packages() / "volta_fa_checkout.pth").write_text(f"{checkout}\n")
        case extra:
            say(f"installing what `make {extra}` needs in addition")
            environment.pip_install(*requirements(extra))
            for name in FOLDERS if extra == "test" else ():
                install_folder(environment, name)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
