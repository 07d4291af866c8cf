"""Runs models and pipelines of diffusers on volta_fa (tools/programs/run_diffusers.py), and test_xformers.py with xformers installed.

They run in subprocesses with another PYTHONPATH, because other tests must not find diffusers and xformers. The script prints a row per
model and way of using volta_fa, with the numbers of attention calls that volta_fa ran and left to PyTorch ("fell back").

Environment:
- VOLTA_FA_TEST_DIFFUSERS: a folder with diffusers, xformers and what they need, instead of the one that tools/bootstrap.py makes"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import need
from processes import output_of, run_program

FOLDER = Path(os.environ.get("VOLTA_FA_TEST_DIFFUSERS", Path(sys.prefix) / "diffusers"))


def run(*command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs `python command` with diffusers and volta_fa, or skips the test."""
    if not (FOLDER / "diffusers").is_dir():
        pytest.skip(f"no diffusers in {FOLDER}: tools/bootstrap.py puts it there")
    return run_program(*command, path=[FOLDER], **variables)


def rows_of(*arguments: str, **variables: str) -> dict[tuple[str, str], list[str]]:
    """Returns the cells of the script's rows by model and way. The script exits with 1 if a result's error is too large."""
    lines = output_of(run("tools/programs/run_diffusers.py", *arguments, **variables)).splitlines()
    return {(line[:26].strip(), line[26:53].strip()): line[53:].split() for line in lines}


#: (model, way): "flash" is diffusers' backend of that name, on volta_fa's flash-attn.
FLUX = [*(("flux", way) for way in ("enable_sdpa", "flash", "enable_xformers")), ("FluxPipeline", "enable_sdpa")]
VAE = ("vae-512", "enable_sdpa")


@pytest.mark.slow
@pytest.mark.parametrize("dtype, models, ways", [("float16", "flux/*,FluxPipeline/*,", [*FLUX, VAE]), ("float32", "", [VAE])])
def test_models_and_a_pipeline(dtype, models, ways):
    """Runs the kernels' machine code in the simulator. SDXL's VAE computes in full precision: outputs and gradients."""
    need("sim")
    rows = rows_of("--dtype", dtype, "--no-processes", "--only", f"{models}vae-512/enable_sdpa", VOLTA_FA_SIMULATE="1")
    for way in ways:
        ran, fell_back = rows[way][-2:]
        assert int(ran) > 0 and fell_back == "0", rows


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
    output_of(run("-c", program))


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


@pytest.mark.slow
def test_xformers():
    command = ("-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", "--no-header", "tests/test_xformers.py")
    assert " passed" in output_of(run(*command))
