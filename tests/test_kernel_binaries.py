"""What the embedded machine code promises: no spills, whole families, a library of bounded size.

tests/kernels.rs checks on the cubins that each kernel's parameter block has the size of the Rust struct, and that it has the registers of
its table, and that the declared blocks fit an SM.
"""

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
from conftest import CORE, INFO, LIBRARY, REPOSITORY, on


def test_there_are_kernels_for_both_passes():
    passes = {v["pass"] for v in INFO["variants"]}
    assert {"Forward", "Backward"} <= passes
    assert passes <= {p["name"] for p in INFO["passes"]}
    assert len({v["name"] for v in INFO["variants"]}) == len(INFO["variants"])


#: Grids of equal shares, backward in one kernel and the fast forward are for what gains most by them: a plan does without where there
#: is no kernel.
SPARED = ("ForwardStreamK", "BackwardStreamK", "PrefillStreamK", "BackwardFused", "FastPrepare", "FastForward")
WITH_BLOCK_MASKS = ("Forward", "Backward", "BackwardDkDv", "BackwardDq", "ForwardSplit", "BackwardSplitScores", "BackwardSplitGradients")
#: The indexer's queries have 128 columns.
OF_ONE_HEADDIM = ("Indexer",)


@pytest.mark.parametrize("pass_", [p for p in INFO["passes"] if p["name"] not in SPARED + OF_ONE_HEADDIM], ids=lambda p: p["name"])
def test_volta_covers_every_headdim_and_need(pass_):
    mine = [v for v in INFO["variants"] if (v["family"], v["pass"]) == ("volta", pass_["name"])]
    # a block mask has kernels of its own, which take no bias
    whole = [v for v in mine if set(v["features"]) == set(pass_["features"]) - {"block_mask"}]
    masked = [v for v in mine if "block_mask" in v["features"]]
    assert bool(masked) == (pass_["name"] in WITH_BLOCK_MASKS)
    for found in (mine, whole, *[masked] * bool(masked)):
        assert max(v["headdim"] for v in found) >= 256 and max(v["headdim_v"] for v in found) >= 256


def plan(headdim=64, **arguments):
    return json.loads(torch.ops.volta_fa._plan(1, 500, 500, 8, 8, headdim, headdim, False, **arguments))


def test_the_plan_shows_kernels_for_features_and_modes():
    assert plan()["forward"]["features"] == []
    found = plan(features="alibi,dropout", deterministic=True)
    assert {"alibi", "dropout"} <= set(found["forward"]["features"])
    assert [found["backward"][k]["pass"] for k in ("prepare", "main", "finish")] == [
        "BackwardPreprocess",
        "Backward",
        "BackwardPostprocess",
    ]
    assert (found["backward"]["rounds"], found["backward"]["dq_accum_splits"], found["backward"]["tail"]) == (1, 4, None)
    found = plan(deterministic=True, major=7, minor=5)["backward"]
    assert [found[k]["pass"] for k in ("prepare", "main", "finish")] == ["BackwardPreprocess", "BackwardDkDv", "BackwardDq"]
    assert (found["rounds"], found["dq_accum_splits"]) == (1, 0)
    assert "fp32_gradients" in plan(features="fp32_gradients")["backward"]["finish"]["features"]
    found = plan(features="fp32_bias")
    assert found["mode"]["features"] == ["bias", "fp32_bias"] and "fp32_bias" in found["forward"]["features"]
    assert "fp32_bias" not in plan(features="bias")["forward"]["features"]
    with pytest.raises(ValueError, match="features: got `alibis`, expected .*alibi"):
        plan(features="alibis")


@pytest.mark.parametrize("features", ["block_mask", "block_mask,softcap"])
@pytest.mark.parametrize("headdim", [40, 64, 96, 128, 256])
def test_turing_runs_its_own_kernels_of_block_masks(headdim, features):
    """Volta's, compiled by the driver, would compute the same, many times slower."""
    found = plan(headdim, features=features, major=7, minor=5)
    kernels = [found["forward"], *(found["backward"][part] for part in ("prepare", "main", "finish"))]
    assert {kernel["family"] for kernel in kernels} == {"turing"}


@pytest.mark.parametrize(
    "capability, expected",
    [((6, 1), []), ((7, 0), [("volta", True)]), ((7, 2), [("volta", True)]), ((7, 5), [("volta", False)]), ((9, 0), [("volta", False)])],
)
def test_where_volta_runs(capability, expected):
    """And how: as machine code, or compiled from PTX; what comes before it may be other families."""
    found = [(f["name"], f["native"]) for f in json.loads(torch.ops.volta_fa._families(*capability))]
    assert found[-1:] == expected


def test_the_choice_of_families_can_be_restricted(monkeypatch):
    monkeypatch.setenv("VOLTA_FA_FAMILY", "volta")
    assert json.loads(torch.ops.volta_fa._families(9, 0)) == [{"name": "volta", "native": False}]
    assert plan(major=9)["forward"]["family"] == "volta"
    monkeypatch.setenv("VOLTA_FA_FAMILY", "pascal")
    for call in (lambda: torch.ops.volta_fa._families(7, 0), plan):
        with pytest.raises(ValueError, match="VOLTA_FA_FAMILY: got `pascal`, expected a kernel family: .*volta"):
            call()


@on("sim")
def test_the_restriction_holds_for_calls(backend):
    q = torch.zeros(1, 8, 1, 64, dtype=torch.half)
    backend.monkeypatch.setenv("VOLTA_FA_SIMULATE", "1")
    backend.monkeypatch.setenv("VOLTA_FA_FAMILY", "pascal")
    with pytest.raises(ValueError, match="volta_fa::fwd: VOLTA_FA_FAMILY: got `pascal`"):
        torch.ops.volta_fa.fwd(q, q, q)
    backend.monkeypatch.setenv("VOLTA_FA_FAMILY", "volta")
    torch.ops.volta_fa.fwd(q, q, q)


COMPARE = REPOSITORY / "tools" / "compare_kernels.py"


def test_a_library_compared_with_itself():
    ran = subprocess.run([sys.executable, COMPARE, CORE, CORE], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout == f"{len(INFO['variants'])} kernels have the same machine code, 0 do not\n"


def test_compared_kernels_differ_by_a_bit():
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
    assert os.path.getsize(CORE) + os.path.getsize(LIBRARY) <= 40 * 2**20


@pytest.mark.parametrize("major, minor", [(7, 5), (8, 0), (9, 0)])
def test_turing_is_taken_where_it_has_kernels(major, minor):
    """The families as they are: Turing's kernels are preferred from its own GPUs on, for everything but merging."""
    found = json.loads(torch.ops.volta_fa._families(major, minor))
    assert [f["name"] for f in found] == ["turing", "volta"]
    assert found[0]["native"] == ((major, minor) == (7, 5))
    assert not found[1]["native"]
    for headdim in (8, 72, 256, 264, 512):
        chosen = plan(headdim, major=major, minor=minor)
        assert chosen["forward"]["family"] == "turing"
    for headdim in (256, 512):
        whole = plan(headdim, major=major, minor=minor, features="varlen,sinks,softcap,alibi,bias,fp32_bias,dropout")
        assert whole["forward"]["family"] == "turing"
    for headdim in (64, 72, 256):
        for mode in ({}, {"deterministic": True}, {"features": "dropout"}):
            chosen = plan(headdim, major=major, minor=minor, **mode)
            kernels = [chosen["backward"][name] for name in ("prepare", "main", "finish")]
            assert {kernel["family"] for kernel in kernels} == {"turing"}


# ---- PTX, as drivers meet it that are older than the compiler: it assembles, and no older version would do -----------------

# Of PTX, from the last without sm_70 to that of CUDA 10.2, whose drivers are of November 2019.
VERSIONS = ["5.0", "6.0", "6.1", "6.2", "6.3", "6.4", "6.5"]

# The short suite takes one kernel of each pass and family.
FIRST = {(v["family"], v["pass"]): v["name"] for v in reversed(INFO["variants"])}.values()
with_ptx = pytest.mark.parametrize(
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
    zstd, library = compare_kernels.Zstd(), CORE.read_bytes()
    frames = (zstd.frame(library[m.start() : m.start() + 2**20]) for m in re.finditer(re.escape(compare_kernels.ZSTD_MAGIC), library))
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
@with_ptx
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
