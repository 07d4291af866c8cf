"""The embedded PTX, as drivers meet it that are older than the compiler: it assembles, and no older version would do.

ptxas knows which version of PTX brought what, and comes with the wheels that the kernels are compiled with.
"""

import functools
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import CORE, INFO, REPOSITORY

# Of PTX, from the last without sm_70 to that of CUDA 10.2, whose drivers are of November 2019.
VERSIONS = ["5.0", "6.0", "6.1", "6.2", "6.3", "6.4", "6.5"]

# The short suite takes one kernel of each pass and family.
FIRST = {(v["family"], v["pass"]): v["name"] for v in reversed(INFO["variants"])}.values()
variants = pytest.mark.parametrize(
    "variant", [pytest.param(v, marks=[] if v["name"] in FIRST else [pytest.mark.slow]) for v in INFO["variants"]], ids=lambda v: v["name"]
)


def find_ptxas() -> str | None:
    """Of NVRTC's own release: later ones do not know sm_70."""
    home = os.environ.get("VOLTA_FA_CUDA_HOME")
    places = [Path(folder) / "nvidia/cuda_nvcc/bin/ptxas" for folder in sys.path]
    places += [Path(home) / "bin/ptxas", Path(home) / "wheels/nvidia/cuda_nvcc/bin/ptxas"] if home else []
    return next((str(place) for place in places if place.exists()), None)


PTXAS = find_ptxas()
needs_ptxas = pytest.mark.skipif(PTXAS is None, reason="no ptxas")


@functools.cache
def embedded() -> dict[str, str]:
    """The PTX of each kernel, by the kernel's name."""
    spec = importlib.util.spec_from_file_location("compare_kernels", REPOSITORY / "tools" / "compare_kernels.py")
    compare = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = compare  # its dataclass looks itself up there
    spec.loader.exec_module(compare)
    zstd, library = compare.Zstd(), CORE.read_bytes()
    frames = (zstd.frame(library[m.start() : m.start() + 2**20]) for m in re.finditer(re.escape(compare.ZSTD_MAGIC), library))
    texts = [frame.rstrip(b"\0").decode() for frame in frames if frame and b"\n.address_size 64" in frame[:4096]]
    return {re.search(r"\.entry (\w+)", text)[1]: text for text in texts}


def assemble(ptx: str, sm: int, folder: Path) -> str:
    """What ptxas says against it; empty: nothing. Without optimisation, which takes ten times as long and refuses nothing more."""
    source = folder / "kernel.ptx"
    source.write_text(ptx)
    ran = subprocess.run([PTXAS, "-O0", f"-arch=sm_{sm}", "-o", folder / "kernel.cubin", source], capture_output=True, text=True)
    return ran.stderr if ran.returncode else ""


def test_every_kernel_has_ptx():
    assert set(embedded()) == {v["name"] for v in INFO["variants"]}


@needs_ptxas
@variants
def test_the_version_is_the_lowest(variant, tmp_path):
    """A version that is too high keeps drivers out; of one that is too low ptxas names what is missing in tools/build/nvrtc.rs."""
    ptx = embedded()[variant["name"]]
    (sm,) = re.findall(r"^\.target sm_(\d+)$", ptx, re.MULTILINE)
    assert int(sm) == next(f["sm"] for f in INFO["families"] if f["name"] == variant["family"])
    version = re.search(r"^\.version (\S+)$", ptx, re.MULTILINE)[1]
    assert version in VERSIONS[1:]
    assert assemble(ptx, int(sm), tmp_path) == ""
    lower = VERSIONS[VERSIONS.index(version) - 1]
    complaint = assemble(ptx.replace(f".version {version}", f".version {lower}"), int(sm), tmp_path)
    assert f"requires PTX ISA .version {version}" in complaint or f".version {lower} does not support .target" in complaint
