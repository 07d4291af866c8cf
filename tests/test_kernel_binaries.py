"""The embedded kernels: which family a GPU runs, the libraries' size, and the PTX's version.

A family (volta, turing) has kernels in machine code for its GPUs ("native"), and in PTX, which newer GPUs' drivers compile.
`INFO["variants"]` lists the kernels. `CORE` is the library that embeds them, `LIBRARY` the small one that joins it to this
torch (the shim). tools/compare_kernels.py compares the machine code of two libraries. tests/kernels.rs checks parameters, registers and
spills."""

import dataclasses
import functools
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import compare_kernels
from conftest import CORE, INFO, LIBRARY, need
from processes import output_of, run_program


def plan(headdim=64, **arguments):
    """Returns the plan of a call: batch 1, 500 queries and keys, 8 heads, not causal. `major`, `minor`: the GPU, else a V100."""
    return json.loads(torch.ops.volta_fa._plan(1, 500, 500, 8, 8, headdim, headdim, False, **arguments))


def backward_kernels(planned, what):
    """Returns this property of the plan's three kernels of the backward pass."""
    return [planned["backward"][kernel][what] for kernel in ("preprocess", "main", "postprocess")]


def test_the_plan_shows_kernels_for_features_and_modes():
    assert plan()["forward"]["features"] == []
    found = plan(features="alibi,dropout", deterministic=True)
    assert {"alibi", "dropout"} <= set(found["forward"]["features"])
    assert backward_kernels(found, "pass") == ["BackwardPreprocess", "Backward", "BackwardPostprocess"]
    # one launch, in which each of the 4 blocks of 128 keys has an accumulator of dq of its own; no tail, a last launch with smaller blocks
    assert (found["backward"]["main_launches"], found["backward"]["dq_accum_splits"], found["backward"]["tail"]) == (1, 4, None)
    found = plan(deterministic=True, major=7, minor=5)
    assert backward_kernels(found, "pass") == ["BackwardPreprocess", "BackwardDkDv", "BackwardDq"]
    assert (found["backward"]["main_launches"], found["backward"]["dq_accum_splits"]) == (1, 0)
    assert "fp32_gradients" in plan(features="fp32_gradients")["backward"]["postprocess"]["features"]
    found = plan(features="fp32_bias")
    assert found["mode"]["features"] == ["bias", "fp32_bias"] and "fp32_bias" in found["forward"]["features"]
    assert "fp32_bias" not in plan(features="bias")["forward"]["features"]
    with pytest.raises(ValueError, match="features: got `alibis`, expected .*alibi"):
        plan(features="alibis")


def test_the_choice_of_families_can_be_restricted(monkeypatch):
    """VOLTA_FA_FAMILY names the family that GPUs run. Another name is an error of every call."""
    need("sim")
    monkeypatch.setenv("VOLTA_FA_FAMILY", "volta")
    assert json.loads(torch.ops.volta_fa._families(9, 0)) == [{"name": "volta", "native": False}]
    assert plan(major=9)["forward"]["family"] == "volta"
    monkeypatch.setenv("VOLTA_FA_FAMILY", "pascal")
    q = torch.zeros(1, 8, 1, 64, dtype=torch.half)
    monkeypatch.setenv("VOLTA_FA_SIMULATE", "launches")
    for call in (lambda: torch.ops.volta_fa._families(7, 0), plan, lambda: torch.ops.volta_fa.fwd(q, q, q)):
        with pytest.raises(ValueError, match="VOLTA_FA_FAMILY: got `pascal`, expected a kernel family: .*volta"):
            call()


def test_a_library_compared_with_itself():
    printed = output_of(run_program("tools/compare_kernels.py", CORE, CORE))
    assert printed == f"{len(INFO['variants'])} kernels have the same machine code, 0 do not\n"


def test_compared_kernels_differ_by_a_bit():
    """`difference` finds a changed bit of machine code or a changed number of registers. With nvdisasm it shows the first instructions."""
    found = compare_kernels.kernels(CORE)
    assert {name: kernel.registers for name, kernel in found.items()} == {v["name"]: v["registers"] for v in INFO["variants"]}
    kernel = found["volta_fwd_64x64"]
    assert compare_kernels.difference(kernel, kernel, None) == []
    code = bytearray(kernel.sections[".text.volta_fwd_64x64"])
    code[1000] ^= 1
    changed = dataclasses.replace(kernel, sections={**kernel.sections, ".text.volta_fwd_64x64": bytes(code)})
    assert f"registers {kernel.registers} -> {kernel.registers}" in compare_kernels.difference(kernel, changed, None)[0]
    assert compare_kernels.difference(kernel, dataclasses.replace(kernel, registers=kernel.registers + 1), None)
    nvdisasm = compare_kernels.find_nvdisasm()
    if nvdisasm:
        summary, *lines = compare_kernels.difference(kernel, found["volta_fwd_varlen_64x64"], nvdisasm)
        assert "instructions" in summary and len(lines) == compare_kernels.SHOWN + 1


def test_library_size():
    """At most 40 MiB, core and shim."""
    assert os.path.getsize(CORE) + os.path.getsize(LIBRARY) <= 40 * 2**20


def families(major, minor):
    """Returns (family, whether its machine code is native) of a GPU, the preferred family first."""
    return [(family["name"], family["native"]) for family in json.loads(torch.ops.volta_fa._families(major, minor))]


def test_gpus_without_turings_kernels():
    assert families(6, 1) == [] and families(7, 0) == families(7, 2) == [("volta", True)]


@pytest.mark.parametrize("major, minor", [(7, 5), (8, 0), (9, 0)])
def test_turing_is_taken_where_it_has_kernels(major, minor):
    """Turing's kernels are preferred from its own GPUs on, forward at every headdim and backward. Volta's kernels through PTX would give
    the same results many times slower."""
    assert families(major, minor) == [("turing", (major, minor) == (7, 5)), ("volta", False)]
    for headdim in (8, 72, 256, 264, 512):
        assert plan(headdim, major=major, minor=minor)["forward"]["family"] == "turing"
    for headdim in (256, 512):
        whole = plan(headdim, major=major, minor=minor, features="varlen,sinks,softcap,alibi,bias,fp32_bias,dropout")
        assert whole["forward"]["family"] == "turing"
    for headdim in (64, 72, 256):
        for mode in ({}, {"deterministic": True}, *({"features": f} for f in ("dropout", "block_mask", "block_mask,softcap"))):
            assert {*backward_kernels(plan(headdim, major=major, minor=minor, **mode), "family")} == {"turing"}


# ---- the PTX's version: each kernel names the lowest one that it needs, so that old drivers accept it ---------------------

# Versions of PTX: from 5.0, the last without sm_70, to 6.5 of CUDA 10.2 (drivers of November 2019).
VERSIONS = ["5.0", "6.0", "6.1", "6.2", "6.3", "6.4", "6.5"]

# The short suite takes one kernel of each pass and family.
FIRST = {(v["family"], v["pass"]): v["name"] for v in reversed(INFO["variants"])}.values()
with_ptx = pytest.mark.parametrize(
    "variant", [pytest.param(v, marks=[] if v["name"] in FIRST else [pytest.mark.slow]) for v in INFO["variants"]], ids=lambda v: v["name"]
)


def find_ptxas() -> str | None:
    """Returns the ptxas of NVRTC's release, because later releases do not know sm_70."""
    home = os.environ.get("VOLTA_FA_CUDA_HOME")
    places = [Path(folder) / "nvidia/cuda_nvcc/bin/ptxas" for folder in sys.path]
    places += [Path(home) / "bin/ptxas", Path(home) / "wheels/nvidia/cuda_nvcc/bin/ptxas"] if home else []
    return next((str(place) for place in places if place.exists()), None)


PTXAS = find_ptxas()
needs_ptxas = pytest.mark.skipif(PTXAS is None, reason="no ptxas")


@functools.cache
def embedded() -> dict[str, str]:
    """The PTX of each kernel, by the kernel's name."""
    zstd, library = compare_kernels.Zstd(), CORE.read_bytes()
    frames = (zstd.frame(library[m.start() : m.start() + 2**20]) for m in re.finditer(re.escape(compare_kernels.ZSTD_MAGIC), library))
    texts = [frame.rstrip(b"\0").decode() for frame in frames if frame and b"\n.address_size 64" in frame[:4096]]
    return {re.search(r"\.entry (\w+)", text)[1]: text for text in texts}


def assemble(ptx: str, sm: int, folder: Path) -> str:
    """Returns ptxas's errors, empty if it accepts the PTX. Without optimization, which takes ten times as long and finds no more errors."""
    source = folder / "kernel.ptx"
    source.write_text(ptx)
    ran = subprocess.run([PTXAS, "-O0", f"-arch=sm_{sm}", "-o", folder / "kernel.cubin", source], capture_output=True, text=True)
    return ran.stderr if ran.returncode else ""


@needs_ptxas
@with_ptx
def test_the_version_is_the_lowest(variant, tmp_path):
    """ptxas accepts the kernel's version and rejects the one below. tools/build/nvrtc.rs chooses the version."""
    ptx = embedded()[variant["name"]]
    (sm,) = re.findall(r"^\.target sm_(\d+)$", ptx, re.MULTILINE)
    version = re.search(r"^\.version (\S+)$", ptx, re.MULTILINE)[1]
    assert version in VERSIONS[1:] and assemble(ptx, int(sm), tmp_path) == ""
    lower = VERSIONS[VERSIONS.index(version) - 1]
    complaint = assemble(ptx.replace(f".version {version}", f".version {lower}"), int(sm), tmp_path)
    assert f"requires PTX ISA .version {version}" in complaint or f".version {lower} does not support .target" in complaint
