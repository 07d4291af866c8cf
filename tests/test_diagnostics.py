"""volta_fa.diagnostics: warnings about a torch build without code for the GPU, and about drivers that are too old, with their remedies.

Tests replace what torch and the driver report. `volta_fa` warns once when CUDA starts; `info` and the CLI list the same problems."""

import subprocess
import warnings

import pytest
import torch

import volta_fa
from volta_fa import cli, diagnostics

# torch's architecture lists (torch.cuda.get_arch_list) in wheels for CUDA 12.8 and 13.0; the latter has nothing for Volta.
CU128 = ["sm_70", "sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120"]
CU130 = ["sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_110", "sm_120", "compute_120"]
#: (name, compute capability).
V100 = ("Tesla V100-SXM2-16GB", (7, 0))
T4 = ("Tesla T4", (7, 5))


@pytest.mark.parametrize(
    "architectures, capability, runs",
    [
        (CU128, (7, 0), True),
        (CU130, (7, 0), False),
        (CU130, (7, 5), True),
        (["sm_70"], (7, 2), True),
        (["sm_70"], (7, 5), True),
        (["sm_75"], (7, 2), False),
        (["sm_70"], (8, 0), False),
        (["compute_70"], (8, 0), True),
        (["sm_120"], (12, 1), True),
        (["sm_90a"], (9, 0), True),
        ([], (7, 0), False),
    ],
)
def test_architectures_that_run(architectures, capability, runs):
    """Machine code (sm_) runs on GPUs of the same major version from its minor version on, PTX (compute_) on all later GPUs."""
    assert diagnostics.has_code_for(architectures, capability) == runs


@pytest.mark.parametrize(
    "installed, remedy",
    [
        ("2.11.0+cu130", "torch==2.11.0+cu126"),
        ("2.10.0+cu130", "torch==2.10.0+cu126"),
        ("2.14.1", "torch==2.14.1+cu126"),
        ("2.15.0+cu132", "torch==2.14.1+cu126"),
        ("2.16.0.dev20261101+cu132", "torch==2.14.1+cu126"),
    ],
)
def test_a_torch_without_volta(installed, remedy):
    """The remedy is the same release for CUDA 12.6 (cu126), or the last release that has such a wheel."""
    said = diagnostics.torch_problem(*V100, CU130, installed, "570.86.15")
    assert said.endswith(f"Run `pip install {remedy} --index-url https://download.pytorch.org/whl/cu126`")
    for part in (f"torch {installed} has no code for Tesla V100-SXM2-16GB (sm_70, driver 570.86.15)", "volta_fa's kernels run there"):
        assert part in said
    assert "\n" not in said


def test_no_warning_without_a_problem():
    assert diagnostics.torch_problem(*V100, CU128, "2.10.0+cu128", "570.86.15") is None
    assert diagnostics.torch_problem(*T4, CU130, "2.15.0+cu132", "590.1") is None
    # a CPU build of torch, and a GPU (sm_61) that volta_fa does not support
    assert diagnostics.torch_problem(*V100, [], "2.11.0+cpu", "570.86.15") is None
    assert diagnostics.torch_problem("GTX 1080", (6, 1), CU130, "2.11.0+cu130", "570.86.15") is None


@pytest.mark.parametrize(
    "driver, cuda, torch_cuda, version, parts",
    [
        ("470.57.02", (11, 4), "12.8", "2.10.0+cu128", ["470.57.02 (CUDA 11.4)", "update it to 525 or newer", "torch==2.7.1+cu118 "]),
        ("535.54.03", (12, 2), "13.0", "2.11.0+cu130", ["update it to 580 or newer", "torch==2.11.0+cu126 "]),
        ("418.39", (10, 1), "12.6", "2.7.1+cu126", ["update it to 525 or newer"]),
        ("CUDA 11.4", (11, 4), "12.8", "2.10.0", ["the NVIDIA driver CUDA 11.4 is too old"]),
    ],
)
def test_a_driver_that_is_too_old_for_torch(driver, cuda, torch_cuda, version, parts):
    """`cuda`: the newest CUDA that the driver supports. A driver runs all releases of its major version; 11.4 is too old for 12.8."""
    for new_enough, of_torch in (((12, 0), "12.9"), ((13, 0), "12.6"), ((11, 4), None)):
        assert diagnostics.driver_problem(driver, new_enough, version, of_torch) is None
    said = diagnostics.driver_problem(driver, cuda, version, torch_cuda)
    for part in (f"is too old for torch {version}", *parts):
        assert part in said
    assert "\n" not in said


@pytest.fixture
def volta_without_its_torch(monkeypatch):
    """Two V100s, and a torch without code for them."""
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: CU130)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: V100[0])
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: V100[1])
    monkeypatch.setattr(diagnostics, "driver_version", lambda: "570.86.15")
    monkeypatch.setattr(diagnostics, "driver_cuda", lambda: (12, 8))
    monkeypatch.setattr(torch.version, "cuda", "12.8")


def test_the_warning_comes_when_cuda_starts_and_once(volta_without_its_torch, monkeypatch):
    waiting = []  # functions that torch calls when CUDA starts
    monkeypatch.setattr(torch.cuda, "_lazy_call", waiting.append)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        diagnostics.warn_when_cuda_starts()
    assert len(waiting) == 1
    with pytest.warns(RuntimeWarning, match=r"^volta_fa: torch .* has no code for Tesla V100") as caught:
        waiting[0]()
    assert len(caught) == 1  # for two GPUs of one kind


def test_trouble_with_cuda_is_left_to_torch(monkeypatch):
    """An error while the warning is prepared raises nothing."""
    waiting = []
    monkeypatch.setattr(torch.cuda, "_lazy_call", waiting.append)
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: 1 // 0)
    diagnostics.warn_when_cuda_starts()
    waiting[0]()


def test_why_no_gpu_can_be_used_is_found_without_starting_cuda(monkeypatch):
    """VOLTA_FA_ENABLE_SDPA asks while the library loads, when a fork must stay possible."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(diagnostics, "driver_version", lambda: "535.54.03")
    monkeypatch.setattr(diagnostics, "driver_cuda", lambda: None)
    assert "no CUDA driver on this machine" in diagnostics.cuda_problem()
    monkeypatch.setattr(diagnostics, "driver_cuda", lambda: (12, 2))
    assert "535.54.03 (CUDA 12.2) is too old for torch" in diagnostics.cuda_problem()
    monkeypatch.setattr(diagnostics, "driver_cuda", lambda: (13, 0))
    assert diagnostics.cuda_problem() is None
    monkeypatch.setattr(torch.version, "cuda", None)
    assert "is a build without CUDA: run `pip install torch==" in diagnostics.cuda_problem()
    assert not torch.cuda.is_initialized()


def test_info_tells(volta_without_its_torch, capsys):
    pytest.importorskip("rich")
    assert "has no code for" in volta_fa.info()["problems"][0]
    assert cli.main(["info"]) == 0
    assert "problem      torch " in capsys.readouterr().out


def test_the_drivers_cuda_is_asked_of_libcuda(tmp_path, monkeypatch):
    """cuDriverGetVersion gives 1000 * major + 10 * minor, here from a fake library."""
    source = "int cuDriverGetVersion(int* version) { *version = 12060; return 0; }"
    library = tmp_path / "libcuda.so.1"
    subprocess.run(["g++", "-x", "c", "-shared", "-fPIC", "-o", library, "-"], input=source, text=True, check=True)
    found = diagnostics.ctypes.CDLL(library)
    monkeypatch.setattr(diagnostics.ctypes, "CDLL", lambda name: found)
    assert diagnostics.driver_cuda() == (12, 6)
    monkeypatch.setattr(diagnostics, "Path", lambda name: tmp_path / "nothing")
    assert diagnostics.driver_version() == "CUDA 12.6"
