"""Headdims above 256, forward: on the CPU, and in both families' kernels of both block sizes."""

import json

import pytest
import torch

from conftest import INFO, Case, check, on_cases

GPUS = {70: "v100", 75: "t4"}
VARIANTS = {v["name"]: v["sm"] for v in INFO["variants"] if v["pass"] == "Forward" and v["headdim"] == 512 and not v["features"]}

CASES = [
    Case(64, 64, 512, batch=1, nheads=1),
    Case(113, 155, 512, batch=1, nheads=2, nheads_k=1, is_causal=True),
    Case(17, 255, 264, 504, batch=1, nheads=2, is_causal=True),
    Case(70, 33, 504, 264, batch=1, nheads=1, spread=3.0),
    Case(37, 50, 321, 510, batch=1, nheads=1),
    Case(40, 90, 8, 512, batch=1, nheads=1, window_left=20, window_right=3),
    # steps of keys that the first of a warp's rows sees, and the last does not
    Case(70, 190, 512, batch=1, nheads=1, window_left=60, window_right=40),
    Case(40, 90, 512, 40, batch=1, nheads=1, softmax_scale=-0.1),
    Case(140, 9, 512, batch=1, nheads=1, is_causal=True),
    Case(67, 99, 512, batch=1, nheads=2, softcap=5.0, alibi="h", sinks="own"),
    Case(67, 99, 400, batch=1, nheads=2, bias="hqk:fp32", is_causal=True),
    Case(67, 99, 512, batch=1, nheads=4, nheads_k=2, dropout_p=0.25, bias="bk:bool"),
    Case(headdim=512, lengths=((70, 90), (0, 5), (33, 31)), nheads=2, nheads_k=1, is_causal=True),
    Case(67, 99, 512, batch=2, nheads=1, used=(93, 1), sinks="fp32"),
]


@on_cases((["cpu-fp32", "cpu-bf16"], CASES))
def test_on_the_cpu(backend, case):
    (q, k, v, dout), options = case.problem(backend)
    check(backend, q, k, v, dout, **options)


def test_both_families_have_two_block_sizes():
    assert sorted(VARIANTS.values()) == [70, 70, 75, 75]


@pytest.mark.parametrize("variant", VARIANTS)
@on_cases((["sim", "cuda"], CASES))
def test_kernels(backend, force, case, variant):
    backend.monkeypatch.setenv("VOLTA_FA_SIM_GPU", GPUS[VARIANTS[variant]])
    force(choices=[{"pass": "Forward", "variant": variant.replace("512x512", words + "512x512")} for words in ("", "varlen_", "generic_")])
    (q, k, v, _), options = case.problem(backend)
    check(backend, q, k, v, **options)


def test_limits():
    assert torch.ops.volta_fa._max_headdim(0) == INFO["limits"]["max_headdim"] == 512


def test_plan_counts_launches():
    """A KV head of an entry has 1,600 tiles, and a launch at most 2,048: one head."""
    plan = json.loads(torch.ops.volta_fa._plan(3, 5000, 5000, 8, 8, 512, 512, False))["backward"]
    assert plan["main"]["grid"][1:] == [1, 1] and plan["finish"]["grid"][2] == 1
    assert plan["rounds"] == 3 * 8
