"""Builds the native libraries, the core with cargo and the shims with CMake, and puts them into the package; all else is in pyproject.toml.

VOLTA_FA_TORCH_RELEASES   the releases of torch to build for: `all`, or folders of torch packages between commas; the active torch if unset
VOLTA_FA_PORTABLE=1       link for the oldest Linux that torch's own wheels run on (tools/portable_linker.py); the wheel's name says so
VOLTA_FA_CUDA_HOME        a CUDA 12 toolkit to take NVRTC from, instead of the PyPI wheels
"""

import os
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).parent.resolve()
sys.path.insert(0, str(ROOT / "tools"))

import check_build_env  # noqa: E402

RELEASES = os.environ.get("VOLTA_FA_TORCH_RELEASES", "")
PORTABLE = os.environ.get("VOLTA_FA_PORTABLE", "0") not in ("", "0")

# Before setuptools-rust is imported and cargo compiles for minutes: one line for each thing that is missing.
if found := check_build_env.problems(active_torch=not RELEASES, portable=PORTABLE):
    raise SystemExit("\n".join(f"volta_fa: {problem}" for problem in found))

from setuptools import setup  # noqa: E402
from setuptools.command.bdist_wheel import bdist_wheel  # noqa: E402
from setuptools.command.build_ext import build_ext  # noqa: E402
from setuptools.command.build_py import build_py  # noqa: E402
from setuptools_rust import Binding, RustExtension, Strip, build_rust  # noqa: E402

import build_shims  # noqa: E402
import portable_linker  # noqa: E402

CORE = "volta_fa.libvolta_fa_core"


class FreshSources(build_py):
    """Without what an earlier build left in build/: setuptools would ship modules that are no longer there."""

    def run(self) -> None:
        if not self.editable_mode:
            shutil.rmtree(Path(self.build_lib) / "volta_fa", ignore_errors=True)
        super().run()


class NativeLibraries(build_ext):
    """The libraries are no extension modules: no Python ABI in their names."""

    def get_ext_filename(self, fullname: str) -> str:
        return os.path.join(*fullname.split(".")) + ".so"


class CoreAndShims(build_rust):
    """The shims go beside the core, when that is there."""

    def run(self) -> None:
        super().run()
        core = Path(self.get_dylib_ext_path(self.extensions[0], CORE)).absolute()
        build_shims.build(core, core.parent, releases=RELEASES, linker=portable_linker.command() if PORTABLE else "")


class PlatformWheel(bdist_wheel):
    """One wheel for every supported Python: the libraries depend on torch and the platform only."""

    def get_tag(self) -> tuple[str, str, str]:
        return ("py3", "none", portable_linker.PLATFORM if PORTABLE else super().get_tag()[2])


def cargo_environment() -> dict[str, str]:
    """build.rs asks `python` (in a virtual environment) or `python3` for NVRTC: make that this Python."""
    environ = {**os.environ, "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])}
    environ.pop("VIRTUAL_ENV", None)
    if sys.prefix != sys.base_prefix:
        environ["VIRTUAL_ENV"] = sys.prefix
    return environ


setup(
    rust_extensions=[
        RustExtension(
            CORE,
            path="Cargo.toml",
            binding=Binding.NoBinding,
            # what ships is what is tested
            features=["sim"],
            args=["--locked"],
            rustc_flags=[f"-Clinker={portable_linker.script(build_shims.target_folder())}"] if PORTABLE else [],
            debug=False,
            strip=Strip.Debug,
            env=cargo_environment(),
        )
    ],
    cmdclass={"build_py": FreshSources, "build_ext": NativeLibraries, "build_rust": CoreAndShims, "bdist_wheel": PlatformWheel},
)
