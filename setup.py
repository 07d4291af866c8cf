"""Builds the native libraries for `pip install` and wheels, and packs them: the core (Rust and CUDA, by cargo) and one C++ shim per torch
release, which PyTorch opens and which loads the core. pyproject.toml has everything else.

Environment variables:
VOLTA_FA_TORCH_RELEASES   torch releases to build for: `all` or comma-separated folders of torch packages; default: the installed torch
VOLTA_FA_PORTABLE=1       link for the oldest Linux that torch wheels support (tools/portable_linker.py) and tag the wheel with it
VOLTA_FA_CUDA_HOME        CUDA 12 toolkit to take NVRTC from, instead of the PyPI wheels; build.rs compiles csrc/ with it
"""

import os
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).parent.resolve()
sys.path.insert(0, str(ROOT / "tools"))

import check_build_env  # noqa: E402  # in tools/, as build_shims (the C++ compiler's calls) and portable_linker

RELEASES = os.environ.get("VOLTA_FA_TORCH_RELEASES", "")
PORTABLE = os.environ.get("VOLTA_FA_PORTABLE", "0") not in ("", "0")

# Report every missing tool, one a line, before the import of setuptools-rust and minutes of compilation.
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
#: A linker program for rustc and for the shims, written into cargo's target folder; None: the system's linker.
LINKER = portable_linker.script(build_shims.target_folder()) if PORTABLE else None


class FreshSources(build_py):
    """Removes the package of earlier builds from build/: setuptools would ship its modules that no longer exist in the source."""

    def run(self) -> None:
        if not self.editable_mode:
            shutil.rmtree(Path(self.build_lib) / "volta_fa", ignore_errors=True)
        super().run()


class NativeLibraries(build_ext):
    """Names libraries without a Python ABI tag (`name.so`), because they are no extension modules and serve every Python."""

    def get_ext_filename(self, fullname: str) -> str:
        return os.path.join(*fullname.split(".")) + ".so"


class CoreAndShims(build_rust):
    """Builds the core by cargo, then by a C++ compiler the shims, into folders beside it."""

    def run(self) -> None:
        super().run()
        core = Path(self.get_dylib_ext_path(self.extensions[0], CORE)).absolute()
        build_shims.build(core, core.parent, releases=RELEASES, linker=LINKER)


class PlatformWheel(bdist_wheel):
    """Tags one wheel for all supported Pythons: the libraries depend on torch and the platform only."""

    def get_tag(self) -> tuple[str, str, str]:
        return ("py3", "none", portable_linker.PLATFORM if PORTABLE else super().get_tag()[2])


def cargo_environment() -> dict[str, str]:
    """Returns cargo's environment. build.rs asks `python` or `python3` on PATH where NVRTC is, so this Python comes first there."""
    environ = {**os.environ, "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])}
    environ.pop("VIRTUAL_ENV", None)
    if sys.prefix != sys.base_prefix:
        environ["VIRTUAL_ENV"] = sys.prefix
    return environ


CLI = check_build_env.requirements("cli")  # the pinned packages in a section of tools/requirements.txt
setup(
    # `demo` is the old name of `cli`
    extras_require={"cli": CLI, "demo": CLI, "test": [*CLI, *check_build_env.requirements("numpy"), *check_build_env.requirements("test")]},
    rust_extensions=[
        RustExtension(
            CORE,
            path="Cargo.toml",
            binding=Binding.NoBinding,
            # wheels contain the simulator, as tested builds do
            features=["sim"],
            args=["--locked"],
            rustc_flags=[f"-Clinker={LINKER}"] if LINKER else [],
            debug=False,
            strip=Strip.Debug,
            env=cargo_environment(),
        )
    ],
    cmdclass={"build_py": FreshSources, "build_ext": NativeLibraries, "build_rust": CoreAndShims, "bdist_wheel": PlatformWheel},
)
