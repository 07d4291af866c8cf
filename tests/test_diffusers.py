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

from conftest import REPOSITORY

if "VOLTA_FA_TEST_LIBRARY" in os.environ:
    pytest.skip("the Python package loads its own library", allow_module_level=True)

FOLDER = Path(os.environ.get("VOLTA_FA_TEST_DIFFUSERS", Path(sys.prefix) / "diffusers"))


def run(*command: str) -> subprocess.CompletedProcess[str]:
    if not (FOLDER / "diffusers").is_dir():
        pytest.skip(f"no diffusers in {FOLDER}: tools/bootstrap.py puts it there")
    path = [str(FOLDER), str(REPOSITORY / "python"), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, path))}
    return subprocess.run([sys.executable, *command], env=environment, cwd=REPOSITORY, capture_output=True, text=True)


def test_models_pipelines_and_context_parallelism():
    """The script fails by itself if an error is too large, or if volta_fa ran no call of a row."""
    result = run("tools/doors/diffusers.py", "--only", "flux,sdxl-unet,vae,FluxPipeline")
    assert result.returncode == 0, result.stdout + result.stderr
    rows = {(line[:26].strip(), line[26:53].strip()): line[53:].split() for line in result.stdout.splitlines()}
    for model, way in [
        *(("flux", way) for way in ("enable_sdpa", "flash", "enable_xformers")),
        *(("flux", f"{kind}, {way}") for kind in ("ring", "Ulysses") for way in ("_native_flash", "flash")),
        *((model, way) for model in ("sdxl-unet", "vae") for way in ("enable_sdpa", "enable_xformers")),
        ("FluxPipeline", "enable_sdpa"),
    ]:
        ran, fell_back = rows[model, way][-2:]
        assert int(ran) > 0 and fell_back == "0", (model, way, result.stdout)
    assert rows["vae-512", "enable_sdpa"][-2:] == ["2", "headdim"]


def test_a_wrong_result_fails():
    """The script notices an error of one part in a thousand in the scale of the scores."""
    program = """
import runpy, sys, torch
import torch.nn.functional as F
import volta_fa
attention = F.scaled_dot_product_attention
def wrong(query, key, value, *arguments, scale=None, **options):
    ours = volta_fa.integrations.sdpa._active.cpu
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    return attention(query, key, value, *arguments, scale=scale * (1.001 if ours else 1), **options)
F.scaled_dot_product_attention = wrong
sys.argv = ["tools/doors/diffusers.py", "--only", "sd3"]
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
