"""VOLTA_FA_SIM_GPU: plans, kernels and times are the named GPU's."""

import json

import pytest
import torch

from conftest import Case, check, on


@pytest.fixture
def problem(backend):
    return Case(70, 60, 64, is_causal=True).problem(backend)


def timed(backend, problem) -> list[dict]:
    (q, k, v, _), options = problem
    return backend.launches(lambda: torch.ops.volta_fa.fwd(q, k, v, **options))


@pytest.mark.parametrize(
    "gpu,family", [("v100", "volta"), ("pg503", "volta"), ("t4", "turing"), ("rtx2080ti", "turing"), ("titanrtx", "turing")]
)
@on("sim")
def test_a_gpu_runs_its_own_family(backend, problem, gpu, family):
    backend.monkeypatch.setenv("VOLTA_FA_SIM_GPU", gpu)
    [launch] = timed(backend, problem)
    assert launch["kernel"].startswith(f"{family}_fwd_")
    assert launch["timing"]["util"]["tensor"] > 0 and ("HMMA.1688" in launch["timing"]["mix"]) == (family == "turing")


@pytest.mark.parametrize("gpu,kernel", [("v100", "volta_fwd_128x128"), ("t4", "turing_fwd_128x128")])
@on("sim")
def test_plans_are_asked_of_it_too(backend, gpu, kernel):
    backend.monkeypatch.setenv("VOLTA_FA_SIM_GPU", gpu)
    plan = json.loads(torch.ops.volta_fa._plan(1, 4096, 4096, 40, 40, 128, 128, False, device=-1))
    assert plan["forward"]["name"] == kernel
    assert plan["backward"]["main"]["family"] == plan["forward"]["family"]
    # device=-1 ignores such numbers. Without a device they describe the same GPU, so the plan is the same.
    shared_bytes = {"v100": 96, "t4": 64}[gpu] * 1024
    capability = {"v100": (7, 0), "t4": (7, 5)}[gpu]
    numbers = {"major": capability[0], "minor": capability[1], "sms": {"v100": 80, "t4": 40}[gpu]}
    again = torch.ops.volta_fa._plan(1, 4096, 4096, 40, 40, 128, 128, False, shared_bytes=shared_bytes, **numbers)
    assert json.loads(again) == plan


@on("sim")
def test_half_the_tensor_rate_shows(backend):
    """An RTX 2080 Ti's SM is a T4's but for the rate of fp32 accumulation, which a Titan RTX has in full."""
    problem = Case(512, 512, 64, batch=1, nheads=8).problem(backend)
    busy = {}
    for gpu in ("t4", "rtx2080ti", "titanrtx"):
        backend.monkeypatch.setenv("VOLTA_FA_SIM_GPU", gpu)
        [launch] = timed(backend, problem)
        counters = launch["timing"]["counters"]
        busy[gpu] = counters["tensor_busy"] / launch["timing"]["mix"]["HMMA.1688"]
    assert busy == {"t4": 8, "rtx2080ti": 16, "titanrtx": 8}


@on("sim")
def test_ptx_kernels_run_untimed(backend, problem):
    """Volta's kernels on a T4: PTX, for which their sm_70 code stands in."""
    backend.monkeypatch.setenv("VOLTA_FA_SIM_GPU", "t4")
    backend.monkeypatch.setenv("VOLTA_FA_FAMILY", "volta")
    (q, k, v, _), options = problem
    check(backend, q, k, v, **options)
    with pytest.raises(NotImplementedError, match="volta_fwd_.*: a t4 gets its PTX, which the simulator cannot time"):
        timed(backend, problem)


@pytest.mark.parametrize("asked", [{"softcap": 20.0}, {"alibi": "h"}, {"bias": "qk"}, {"dropout_p": 0.2}], ids=lambda a: next(iter(a)))
@on("sim")
def test_blocks_of_rows_without_a_key(backend, asked):
    """Row tiles that see no key, in kernels of one feature. ALiBi's kernel visits the keys backwards.

    Rows 0 to 127 of 288 end 128 positions before the first of 33 keys.
    """
    backend.monkeypatch.setenv("VOLTA_FA_SIM_GPU", "t4")
    (q, k, v, _), options = Case(288, 33, 64, nheads=1, is_causal=True, **asked).problem(backend)
    check(backend, q, k, v, **options)


@on("sim")
def test_a_kernel_of_one_feature_is_not_taken_without_it(backend, problem, force):
    """Forced or not: it would read what is not there."""
    backend.monkeypatch.setenv("VOLTA_FA_SIM_GPU", "t4")
    choices = [{"pass": "Forward", "variant": f"turing_fwd_{name}_64x64"} for name in ("alibi", "bias", "dropout", "softcap")]
    force(["turing_fwd_64x64", "turing_fwd_varlen_64x64"], choices)
    [launch] = timed(backend, problem)
    assert not any(launch["kernel"] == choice["variant"] for choice in choices)
    (q, k, v, _), options = problem
    check(backend, q, k, v, **options)


@on("sim")
def test_an_unknown_gpu(backend, problem):
    backend.monkeypatch.setenv("VOLTA_FA_SIM_GPU", "p100")
    with pytest.raises(ValueError, match="VOLTA_FA_SIM_GPU: got `p100`, expected v100 or pg503 or t4 or rtx2080ti or titanrtx"):
        timed(backend, problem)
