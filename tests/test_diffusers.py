"""diffusers' own models and pipelines through volta_fa, and the tests of xformers. They run in processes of their own, because other tests
must not find these packages.

Environment:
- VOLTA_FA_TEST_DIFFUSERS: a folder with diffusers, xformers and what they need, instead of the one that tools/bootstrap.py makes
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import REPOSITORY, need

if "VOLTA_FA_TEST_LIBRARY" in os.environ:
    pytest.skip("the Python package loads its own library", allow_module_level=True)

FOLDER = Path(os.environ.get("VOLTA_FA_TEST_DIFFUSERS", Path(sys.prefix) / "diffusers"))


def run(*command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    if not (FOLDER / "diffusers").is_dir():
        pytest.skip(f"no diffusers in {FOLDER}: tools/bootstrap.py puts it there")
    path = [str(FOLDER), str(REPOSITORY / "python"), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, path)), **variables}
    return subprocess.run([sys.executable, *command], env=environment, cwd=REPOSITORY, capture_output=True, text=True)


def rows_of(*arguments: str, **variables: str) -> dict[tuple[str, str], list[str]]:
    """Returns the cells of the script's rows by model and way. The script fails by itself if an error is too large."""
    result = run("tools/programs/run_diffusers.py", *arguments, **variables)
    assert result.returncode == 0, result.stdout + result.stderr
    return {(line[:26].strip(), line[26:53].strip()): line[53:].split() for line in result.stdout.splitlines()}


def test_models_and_a_pipeline():
    """On the kernels' machine code in the simulator."""
    need("sim")
    rows = rows_of("--dtype", "float16", "--no-processes", "--only", "flux/*,vae-512/enable_sdpa,FluxPipeline/*", VOLTA_FA_SIMULATE="1")
    ways = [*(("flux", way) for way in ("enable_sdpa", "flash", "enable_xformers")), ("FluxPipeline", "enable_sdpa")]
    ways.append(("vae-512", "enable_sdpa"))
    for model, way in ways:
        ran, fell_back = rows[model, way][-2:]
        assert int(ran) > 0 and fell_back == "0", rows


def test_a_vae_in_float32():
    """In full precision, as SDXL's VAE computes: outputs and gradients."""
    need("sim")
    rows = rows_of("--dtype", "float32", "--no-processes", "--only", "vae-512/enable_sdpa", VOLTA_FA_SIMULATE="1")
    ran, fell_back = rows["vae-512", "enable_sdpa"][-2:]
    assert int(ran) > 0 and fell_back == "0", rows


@pytest.mark.slow
def test_memory_of_a_head_of_512():
    """A VAE's attention at 4096 pixels: no tensor of 4096 x 4096, and PyTorch's error."""
    program = """
import copy, torch, volta_fa
from diffusers import AutoencoderKL
from torch.nn.attention import SDPBackend, sdpa_kernel
torch.manual_seed(0)
blocks = dict(down_block_types=["DownEncoderBlock2D"] * 2, up_block_types=["UpDecoderBlock2D"] * 2, block_out_channels=(32, 512))
block = AutoencoderKL(**blocks, norm_num_groups=16, layers_per_block=1).decoder.mid_block.attentions[0].eval().requires_grad_(False)
assert block.heads == 1 and block.to_q.out_features == 512
for parameter in block.parameters():
    parameter.data.mul_(3 if parameter.dim() > 1 else 1)
x = torch.randn(1, 512, 64, 64)

def peak():
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        out = block(x)
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    total = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        total += event.nbytes()
        most = max(most, total)
    return out, most, max(event.nbytes() for event in events)

with volta_fa.sdpa_enabled("cpu"):
    found, most, largest = peak()
    assert volta_fa.sdpa_stats() == {"ran": 1, "traced": 0, "fell_back": {}}, volta_fa.sdpa_stats()
with sdpa_kernel(SDPBackend.MATH):
    theirs, most_of_math, largest_of_math = peak()
square, one = 4 * 4096**2, x.nbytes
assert largest == one and most < 7 * one < square <= largest_of_math, (most, largest, most_of_math, largest_of_math)
exact = copy.deepcopy(block).double()(x.double())
error, allowed = ((t - exact).abs().max().item() for t in (found, theirs))
assert error <= 2 * allowed, (error, allowed)
"""
    result = run("-c", program)
    assert result.returncode == 0, result.stderr


@pytest.mark.slow
def test_context_parallelism():
    """Two processes on the CPU."""
    rows = rows_of("--only", "flux/ring*,flux/Ulysses*")
    for way in (f"{kind}, {backend}" for kind in ("ring", "Ulysses") for backend in ("_native_flash", "flash")):
        ran, fell_back = rows["flux", way][-2:]
        assert int(ran) > 0 and fell_back == "0", rows


@pytest.mark.slow
def test_the_way_through_xformers_leaves_no_trace():
    """diffusers' own switch leaves SD3's layers with processors that fail, so the ways after it would be wrong."""
    program = """
import sys
sys.path.insert(0, "tools/programs")
import torch
from run_diffusers import SMALL, build, forward, xformers
model = next(model for model in SMALL if model.name == "sd3")
module, inputs = build(model, "cpu")
before = forward(module, inputs)
with xformers(module, model, "cpu") as stats:
    forward(module, inputs)
    assert stats() == {"ran": 3, "fell_back": {}}
assert torch.equal(forward(module, inputs), before)
"""
    result = run("-c", program)
    assert result.returncode == 0, result.stderr


@pytest.mark.slow
def test_a_wrong_result_fails():
    """The script notices an error of one part in a thousand in the scale of the scores."""
    program = """
import runpy, sys, torch
import torch.nn.functional as F
import volta_fa
attention = F.scaled_dot_product_attention
def wrong(query, key, value, *arguments, scale=None, **options):
    ours = volta_fa.integrations.sdpa.active().devices.cpu
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    return attention(query, key, value, *arguments, scale=scale * (1.001 if ours else 1), **options)
F.scaled_dot_product_attention = wrong
sys.argv = ["tools/programs/run_diffusers.py", "--only", "sd3/enable_sdpa"]
sys.path.insert(0, "tools/programs")
runpy.run_path(sys.argv[0], run_name="__main__")
"""
    result = run("-c", program)
    assert result.returncode == 1, result.stdout + result.stderr
    wrong = [line for line in result.stdout.splitlines() if line.endswith("WRONG")]
    assert len(wrong) == 1 and "enable_sdpa" in wrong[0], result.stdout


def test_xformers():
    result = run("-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", "--no-header", str(REPOSITORY / "tests" / "test_xformers.py"))
    assert result.returncode == 0, result.stdout
    assert " passed" in result.stdout
