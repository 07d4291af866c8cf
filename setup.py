"""Builds the native library with cargo and puts it into the package; all else is in pyproject.toml.

VOLTA_FA_FEATURES   cargo features, separated by commas ("sim" adds the simulator); none by default
VOLTA_FA_CUDA_HOME  a CUDA 12 toolkit to take NVRTC from, instead of the PyPI wheels
"""

import os
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).parent.resolve()
sys.path.insert(0, str(ROOT / "tools"))

import check_build_env  # noqa: E402

# Before setuptools-rust is imported and cargo compiles for minutes: one line for each thing that is missing.
if found := check_build_env.problems():
    raise SystemExit("\n".join(f"volta_fa: {problem}" for problem in found))

from setuptools import setup  # noqa: E402
from setuptools.command.bdist_wheel import bdist_wheel  # noqa: E402
from setuptools.command.build_ext import build_ext  # noqa: E402
from setuptools.command.build_py import build_py  # noqa: E402
from setuptools_rust import Binding, RustExtension, Strip  # noqa: E402


class FreshSources(build_py):
    """Without what an earlier build left in build/: setuptools would ship modules that are no longer there."""

    def run(self) -> None:
        if not self.editable_mode:
            shutil.rmtree(Path(self.build_lib) / "volta_fa", ignore_errors=True)
        super().run()


class NativeLibrary(build_ext):
    """The library is no extension module: no Python ABI in its name."""

    def get_ext_filename(self, fullname: str) -> str:
        return os.path.join(*fullname.split(".")) + ".so"


class PlatformWheel(bdist_wheel):
    """One wheel for every supported Python: the library depends on libtorch and the platform only."""

    def get_tag(self) -> tuple[str, str, str]:
        return ("py3", "none", super().get_tag()[2])


def cargo_environment() -> dict[str, str]:
    """build.rs asks `python` (in a virtual environment) or `python3` for torch: make that this Python."""
    environ = {**os.environ, "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])}
    environ.pop("VIRTUAL_ENV", None)
    if sys.prefix != sys.base_prefix:
        environ["VIRTUAL_ENV"] = sys.prefix
    return environ


setup(
    rust_extensions=[
        RustExtension(
            "volta_fa.libvolta_fa",
            path="Cargo.toml",
            binding=Binding.NoBinding,
            features=os.environ.get("VOLTA_FA_FEATURES", "").replace(",", " ").split(),
            args=["--locked"],
            debug=False,
            strip=Strip.Debug,
            env=cargo_environment(),
        )
    ],
    cmdclass={"build_py": FreshSources, "build_ext": NativeLibrary, "bdist_wheel": PlatformWheel},
)
