"""`python -m volta_fa check`: does it run, does it pass what is right, and does it name what is wrong?"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import shlex
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

import volta_fa
import volta_fa.check
from conftest import INFO, REPOSITORY, need
from volta_fa import diagnostics
from volta_fa.check import (
    atomics,
    cached,
    correctness,
    int8_scores,
    isolation,
    kernels,
    machine,
    performance,
    problems,
    report,
    state,
    tolerance,
    tune,
)
from volta_fa.check.correctness import DeviceLost, KernelResult, Worst
from volta_fa.check.kernels import Target
from volta_fa.check.performance import OUT_OF_TIME, VOLTA_FA, Point, Speeds
from volta_fa.cli import main

CPU, SIMULATOR = Target.of("cpu"), Target.of("simulator")
SIMULATED = kernels.wanted(SIMULATOR, INFO["variants"])


def check(tmp_path, *arguments):
    """Exit status and the JSON's data."""
    status = main(["check", "--output", str(tmp_path), *arguments])
    return status, json.loads((tmp_path / "volta_fa-check.json").read_text())


# ---- the whole command -------------------------------------------------------------------------------------------


def test_the_report_has_a_line_for_each_pass():
    assert {v["pass"] for v in INFO["variants"]} <= report._PASSES.keys()


def test_on_the_cpu(tmp_path, capsys):
    status, data = check(tmp_path, "--device", "cpu", "--seed", "3")
    assert status == 0 and data["outcome"] == "right" and data["settings"]["seed"] == 3
    assert data["wrong"] == data["not_checked"] == [] and data["to_finish"] is None
    assert len(data["right"]) == 9 and all(0 < v["worst"]["share"] < 1 for v in data["right"])
    assert all(point["ms"]["volta_fa"] > 0 and point["ms"]["math"] > 0 for point in data["fast"]["points"])
    with_cache = data["fast"]["cached"]
    assert [point["kind"] for point in with_cache] == ["decode", "append", "prefill"]
    assert all(point["speed"]["volta_fa"] > 0 and ("math" in point["ms"]) == (point["kind"] != "append") for point in with_cache)
    assert data["fast"]["card"]["gemm_tflops"] > 0 and data["fast"]["card"]["copy_gb_s"] > 0
    assert data["machine"]["library"] == machine._without_home(volta_fa.info()["library"]) and data["machine"]["families"] == []
    assert (tmp_path / "volta_fa-check.png").stat().st_size > 10_000
    page = capsys.readouterr().out
    assert "All is right: the CPU backend in " in page and "No kernel ran" in page and "the CPU: ATen operations" in page
    assert "decode, 2 x 128" in page and page.count("\n") < 50  # one page


def test_in_the_simulator(tmp_path, capsys):
    need("sim")
    status, data = check(tmp_path, "--device", "simulator", "--quick", "--kernels", "volta_*wd_*64*")
    assert status == 0, capsys.readouterr().out
    expected = {
        v["name"] for v in SIMULATED if v["headdim"] == v["headdim_v"] == 64 and v["pass"] not in (*kernels.WITHOUT_PROBLEM, *cached.PASSES)
    }
    assert {v["kernel"] for v in data["right"]} == expected and len(expected) > 8
    assert all(v["passed"] and v["problems"] == 1 and v["worst"]["share"] > 0 for v in data["right"])
    assert data["fast"]["points"] == [] and "not timed" in capsys.readouterr().out


# `make test` runs these kernels in other tests.
MORE_KERNELS_OF_A_CACHE = ["volta_decode_64x[!3]*", "volta_decode_*_64x16", "volta_mla_decode_*"]


@pytest.mark.parametrize(
    "pattern", ["volta_decode_64x32", "volta_append*", *(pytest.param(p, marks=pytest.mark.slow) for p in MORE_KERNELS_OF_A_CACHE)]
)
def test_kernels_of_a_cache_in_the_simulator(tmp_path, capsys, pattern):
    need("sim")
    status, data = check(tmp_path, "--device", "simulator", "--kernels", pattern)
    printed = capsys.readouterr().out
    assert status == 0, printed
    assert data["right"] and all(v["passed"] and v["problems"] == 3 and v["worst"]["share"] > 0 for v in data["right"])
    assert ("volta KV cache, append" in printed) == ("append" in pattern)


def test_the_kernel_of_a_dequantized_cache_in_the_simulator(tmp_path):
    need("sim")
    status, data = check(tmp_path, "--device", "simulator", "--kernels", "volta_dequantize")
    assert status == 0 and [v["problems"] for v in data["right"]] == [4] and data["right"][0]["runs_with"]


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_on_a_gpu(tmp_path, capsys):
    status, data = check(tmp_path, "--device", "cuda", "--quick")
    assert status == 0, capsys.readouterr().out
    assert data["fast"]["card"]["atomic_adds_lines_g_s"] > data["fast"]["card"]["atomic_adds_rows_g_s"] > 0
    assert data["not_checked"] == []


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--device", "tpu"], "expected auto, cpu, simulator, cuda or cuda:N"),
        (["--device", "cuda:x"], "expected auto, cpu, simulator, cuda or cuda:N"),
        (["--device", "cuda:99"], "CUDA device"),
        (["--device", "cpu", "--tune"], "needs a GPU"),
        (["--device", "cpu", "--kernels", "volta_*"], "matches no kernel"),
    ],
)
def test_says_what_is_wrong_with_arguments(arguments, message, capsys, tmp_path):
    assert main(["check", "--output", str(tmp_path), *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


@pytest.mark.parametrize("limit", ["inf", "nan", "-1"])
def test_a_limit_is_a_number(limit, capsys, tmp_path):
    with pytest.raises(SystemExit) as caught:
        main(["check", "--output", str(tmp_path), f"--limit={limit}"])
    assert caught.value.code == 2 and f"--limit: got {limit}, expected" in capsys.readouterr().err


@pytest.mark.parametrize("device", ["auto", "cuda:0"])
def test_a_card_that_torch_cannot_see_is_not_passed_over(device, monkeypatch, capsys, tmp_path):
    """A driver too old for torch is an error: the check must not run on the CPU and report success."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(diagnostics, "driver_cuda", lambda: (11, 4))
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    assert main(["check", "--output", str(tmp_path), "--device", device]) == 2
    error = capsys.readouterr().err
    assert "is too old for torch" in error and "update it to 525 or newer" in error and error.count("\n") == 1


# ---- right: what is asked ----------------------------------------------------------------------------------------


def test_each_kernel_gets_problems_that_it_runs():
    """Asked of the plan: the kernel under test is what runs, and not another that would do as well."""
    need("sim")
    for variant in SIMULATED:
        if variant["pass"] in cached.PASSES:
            for problem in cached.problems(variant):
                names = [kernel["name"] for kernel in cached.planned(SIMULATOR, problem, variant)]
                assert variant["name"] in names, f"{variant['name']}: {problem}"
        elif variant["pass"] not in kernels.WITHOUT_PROBLEM:
            for problem in kernels.problems(variant):
                assert variant["name"] in SIMULATOR.planned(problem, variant), f"{variant['name']}: {problem}"


def launched(variant, work) -> list[str]:
    """Names of the kernels that run where `check` asks for this one."""
    with SIMULATOR.running(variant), kernels.environment(VOLTA_FA_SIMULATE="timing"):
        torch.ops.volta_fa._sim_report()
        work()
        return [launch["kernel"] for launch in json.loads(torch.ops.volta_fa._sim_report())]


def test_kernels_of_other_caches_and_of_latents_really_run():
    """(`_plan` does not know latents. A quantized cache whose rows are not aligned to 16 bytes would be copied to fp16.)"""
    need("sim")
    listed = [v for v in SIMULATED if v["pass"] == "DecodeMla" or (v["cache"] != "float" and v["headdim"] == 64)]
    assert len(listed) > 12
    for variant in listed:
        for problem in cached.problems(variant):
            inputs = cached.draw(problem, 0, SIMULATOR.device)
            assert launched(variant, lambda inputs=inputs: cached.run(inputs)) == [variant["name"]], problem


def test_kernels_of_a_bias_really_run():
    """(A plan is asked for by features. A call shows its features by its tensors: those of a bias by its dtype.)"""
    need("sim")
    listed = [v for v in SIMULATED if v["pass"] == "Forward" and "bias" in v["required_features"]]
    assert listed
    for variant in listed:
        for problem in kernels.problems(variant):
            inputs = problems.Inputs.draw(problem, 0, SIMULATOR.device)
            assert launched(variant, inputs.forward) == [variant["name"]], problem


def test_problems_ask_for_all_that_a_kernel_covers():
    for variant in SIMULATED:
        if variant["pass"] not in kernels.WITHOUT_PROBLEM:
            given = (cached if variant["pass"] in cached.PASSES else kernels).problems(variant)
            asked = {need for problem in given for need in problem.features}
            assert set(variant["features"]) <= asked, variant["name"]


class SimulatedT4(Target):
    """The simulator, which is a V100 for the check, as a GPU with int8 products."""

    @contextmanager
    def running(self, *args, **kwargs):
        with super().running(*args, **kwargs), kernels.environment(VOLTA_FA_SIM_GPU="t4"):
            yield


@pytest.mark.parametrize("name", ["turing_fast_fwd_64x64", "turing_fast_fwd_generic_64x64", "turing_fast_fwd_varlen_prepare_64"])
def test_kernels_with_int8_scores(name, monkeypatch):
    need("sim")
    t4 = SimulatedT4("simulator", torch.device("cpu"), (7, 5), 40, 64 * 1024)
    (variant,) = (v for v in kernels.wanted(t4, INFO["variants"]) if v["name"] == name)
    result = correctness.check_kernel(t4, variant, 0, quick=True)
    assert result.passed and result.problems == 1 and 0 < result.worst.share < 1
    draw = int8_scores.FastInputs.model
    monkeypatch.setattr(
        int8_scores.FastInputs, "model", lambda self, *a: tuple(1.03 * t for t in draw(self, *a)) if not a else draw(self, *a)
    )
    assert "out: relative L1 error" in correctness.check_kernel(t4, variant, 0, quick=True).failures[0]


def test_a_kernel_that_the_plan_does_not_take_fails():
    need("sim")
    variant = next(v for v in SIMULATED if v["name"] == "volta_fwd_64x64")
    result = correctness.check_kernel(SIMULATOR, {**variant, "headdim": 128, "headdim_v": 128}, 0, quick=True)
    assert not result.passed and result.inconclusive[0].startswith("the plan takes volta_fwd_128x128") and not result.failures


# ---- right: what is found ----------------------------------------------------------------------------------------


def corrupted(monkeypatch, change):
    """Makes the op's forward pass wrong. The fp64 reference does not use it."""
    forward = problems.Inputs.forward
    calls = []

    def wrong(self, generator=None):
        calls.append(self)
        return change(*forward(self, generator), len(calls))

    monkeypatch.setattr(problems.Inputs, "forward", wrong)


def lose_element(out, lse, rng_state, call):
    out.view(-1)[-1] = math.nan
    return out, lse, rng_state


def differ_in_a_bit(out, lse, rng_state, call):
    if call % 2 == 0:
        out.view(torch.int16).view(-1)[3] ^= 1
    return out, lse, rng_state


def fail(*_):
    raise RuntimeError("the launch failed\nand more")


WRONG = {
    "2% too large": (lambda out, lse, rng, _: (out * 1.02, lse, rng), "out: "),
    "an element that nobody wrote": (lose_element, "out: largest error inf"),
    "a wrong softmax_lse": (lambda out, lse, rng, _: (out, lse + 0.01, rng), "softmax_lse: "),
    "two runs that differ": (differ_in_a_bit, "out: 1 of "),
    "a launch that raises": (fail, "RuntimeError: the launch failed ("),
}


def test_lack_of_memory_is_no_kernels_fault(monkeypatch, tmp_path, capsys):
    def no_memory(*_):
        raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB.")

    corrupted(monkeypatch, no_memory)
    monkeypatch.setattr(performance, "measure", lambda *_: Speeds(note="not now"))
    status, data = check(tmp_path, "--device", "cpu", "--kernels", "cpu_Forward_float16", "--quick")
    assert status == 3 and data["right"][0]["failures"] == [] and "out of memory" in data["right"][0]["inconclusive"][0]
    assert data["outcome"] == "incomplete" and data["not_checked"] == ["cpu_Forward_float16"] and data["wrong"] == []
    assert "cpu_Forward_float16 could not be checked: CUDA out of memory" in capsys.readouterr().out
    monkeypatch.undo()
    monkeypatch.setattr(performance, "measure", lambda *_: Speeds(note="not now"))
    status, data = check(tmp_path, "--device", "cpu", "--kernels", "cpu_Forward_float16", "--quick")
    assert status == 0 and data["continued"] == 0  # tried again


@pytest.mark.parametrize("change, message", WRONG.values(), ids=WRONG)
def test_a_wrong_kernel_is_named_and_the_rest_goes_on(change, message, monkeypatch, tmp_path, capsys):
    corrupted(monkeypatch, change)
    monkeypatch.setattr(performance, "measure", lambda *_: Speeds(note="not now"))
    status, data = check(tmp_path, "--device", "cpu", "--kernels", "cpu_*ward_float16", "--quick")
    forward, backward = data["right"]
    assert status == 1 and data["outcome"] == "wrong" and data["wrong"] == ["cpu_Forward_float16"]
    assert not forward["passed"] and backward["passed"]
    assert forward["failures"][0].startswith(message), forward["failures"]
    assert "seed " in forward["failures"][0] and "q141_k155_h4on2_d40" in forward["failures"][0]
    page = capsys.readouterr().out
    assert "cpu_Forward_float16 failed" in page and "and more" not in page
    assert page.splitlines()[-1] == "Wrong: cpu_Forward_float16."


CPU_DECODE = {"name": "x", "family": "cpu", "pass": "Decode", "dtype": torch.float16}


def write_too_far(found):
    found["k_cache"].view(-1)[-1] = 1.0  # of an entry's last row, where nothing is appended


def append_wrongly(found):
    """(In problem 2 the first sequence appends this token; in problem 1 no sequence has it.)"""
    found["v_cache"][0, 9] += 0.01


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda found: found["out"].mul_(1.02), "out: "),
        (lambda found: found["softmax_lse"].add_(0.01), "softmax_lse: "),
        (write_too_far, "k_cache: 1 elements changed"),
        (append_wrongly, "v_cache: largest error"),
    ],
    ids=["out", "softmax_lse", "write_too_far", "append_wrongly"],
)
def test_a_wrong_kernel_of_a_cache_is_named(change, message, monkeypatch):
    run = cached.run

    def wrong(self):
        found = run(self)
        if self.q.dtype == torch.float16:  # and not the reference
            change(found)
        return found

    monkeypatch.setattr(cached, "run", wrong)
    result = correctness.check_kernel(CPU, CPU_DECODE, 0)
    assert any(text.startswith(message) for text in result.failures), result.failures
    assert all("headdim40" in text and "seed " in text for text in result.failures)


def spoil_scale(inputs):
    """(Of one token of hundreds, 5%.)"""
    entry, row = inputs.places[1]
    inputs.options["v_scale"][entry[7], row[7]] *= 1.05


def spoil_latent(inputs):
    """(One of the columns that keys alone have.)"""
    inputs.k_cache[..., 550] = 0.0


@pytest.mark.parametrize(
    "name, spoil",
    [("volta_decode_int8_64x8", spoil_scale), ("volta_decode_int4_64x16", spoil_scale), ("volta_mla_decode_16", spoil_latent)],
)
def test_a_wrong_kernel_of_another_cache_is_named(name, spoil, monkeypatch):
    need("sim")
    run = cached.run

    def wrong(self):
        if self.q.dtype == torch.float16:  # and not the reference
            self = self.mapped(lambda t: t.clone())
            spoil(self)
        return run(self)

    variant = next(v for v in SIMULATED if v["name"] == name)
    monkeypatch.setattr(cached, "run", wrong)
    result = correctness.check_kernel(SIMULATOR, variant, 0, quick=True)
    assert any(text.startswith("out: ") for text in result.failures) and not result.inconclusive, result


def test_a_wrong_reference_of_a_cache_is_noticed(monkeypatch):
    attend = tolerance.attend
    monkeypatch.setattr(
        cached.tolerance, "attend", lambda q, *rest, **options: attend(q * (1.01 if q.dtype == torch.float64 else 1), *rest, **options)
    )
    result = correctness.check_kernel(CPU, CPU_DECODE, 0, quick=True)
    assert not result.passed and not result.failures and "out of the CPU backend in float64 is" in result.inconclusive[0]


def test_a_key_too_many_is_noticed(monkeypatch):
    forward = problems.Inputs.forward

    def wrong(self, generator=None):
        wider = {"is_causal": False, "window_right": 1} if self.problem.is_causal else {}
        return forward(dataclasses.replace(self, options={**self.options, **wider}), generator)

    monkeypatch.setattr(problems.Inputs, "forward", wrong)
    result = correctness.check_kernel(CPU, {"name": "x", "family": "cpu", "pass": "Forward", "dtype": torch.float16}, 0)
    causal = [str(p) for p in kernels.problems({"family": "cpu", "pass": "Forward", "dtype": torch.float16}) if p.is_causal]
    assert len(causal) >= 3
    for problem in causal:
        assert any(problem in text for text in result.failures), problem
    assert all("causal" in text for text in result.failures)


def test_queries_without_a_key_have_exact_zeros(monkeypatch):
    def tiny(out, lse, rng_state, call):
        out.view(-1)[0] += 1e-7  # the first query of 77 sees none of 33 keys
        return out, lse, rng_state

    corrupted(monkeypatch, tiny)
    result = correctness.check_kernel(CPU, {"name": "x", "family": "cpu", "pass": "Forward", "dtype": torch.float16}, 0)
    assert [text.split(" (")[0] for text in result.failures] == ["out: not 0 where a query sees no key"]


@pytest.mark.parametrize("name", ["dq", "dk", "dv", "dattn_bias", "dsinks"])
def test_a_wrong_gradient_is_named(name, monkeypatch):
    gradients = problems.Inputs.gradients

    def wrong(self, *arguments):
        found = gradients(self, *arguments)
        if name in found and self.q.dtype == torch.float16:
            found[name] = found[name] * 1.05
        return found

    monkeypatch.setattr(problems.Inputs, "gradients", wrong)
    result = correctness.check_kernel(CPU, {"name": "x", "family": "cpu", "pass": "Backward", "dtype": torch.float16}, 0)
    assert result.failures and all(text.startswith(f"{name}: ") for text in result.failures)
    assert result.worst.result == name and result.worst.share > 1


def test_a_wrong_reference_is_noticed(monkeypatch):
    attend = problems.tolerance.attend

    def wrong(q, *arguments, **options):
        found = attend(q, *arguments, **options)
        return dataclasses.replace(found, out=found.out * 1.001) if q.dtype == torch.float64 else found

    monkeypatch.setattr(problems.tolerance, "attend", wrong)
    result = correctness.check_kernel(CPU, {"name": "x", "family": "cpu", "pass": "Forward", "dtype": torch.float16}, 0, quick=True)
    assert not result.passed and not result.failures  # it is not the kernel's fault
    assert "out of the CPU backend in float64 is" in result.inconclusive[0]


def test_reference_falls_back_to_the_cpu(monkeypatch):
    """(Here the GPU's tensors are the CPU's, so the first of two calls stands for the GPU's. `calls` counts calls in bf16 only.)"""
    calls = []

    def lacking(name):
        on_cpu = getattr(problems.tolerance, name)

        def work(*arguments, **options):
            calls.append(name)
            if arguments[0].dtype == torch.bfloat16 and len(calls) % 2:
                raise RuntimeError("CUBLAS_STATUS_NOT_SUPPORTED")
            if arguments[0].dtype != torch.bfloat16:
                calls.pop()
            return on_cpu(*arguments, **options)

        monkeypatch.setattr(problems.tolerance, name, work)

    lacking("eager_gradients")
    result = correctness.check_kernel(CPU, {"name": "x", "family": "cpu", "pass": "Backward", "dtype": torch.bfloat16}, 0, quick=True)
    assert result.passed and len(calls) == 2, result


def test_merging_is_checked(monkeypatch):
    need("sim")
    variant = next(v for v in SIMULATED if v["pass"] == "Merge")
    assert correctness.check_kernel(SIMULATOR, variant, 0).passed
    merge = torch.ops.volta_fa.merge_attention_states

    def wrong(out_a, *rest):
        out, lse = merge(out_a, *rest)
        return (out if out_a.dtype == torch.float64 else out * 1.01), lse

    class Ops:
        merge_attention_states = staticmethod(wrong)
        _set_tuning = staticmethod(torch.ops.volta_fa._set_tuning)

    monkeypatch.setattr(torch.ops, "volta_fa", Ops)
    assert not correctness.check_kernel(SIMULATOR, variant, 0).passed


def test_blame_is_shared():
    def result(name, pass_, failure, runs_with):
        return KernelResult(name, "f", pass_, 1, runs_with, [failure] if failure else [])

    def shared(*failures):
        """Names the kernels that are wrong after sharing blame. Kernels a, b and c run with `finish`, which is checked together with a."""
        mains = [result(name, "Backward", failure, ["finish"]) for name, failure in zip("abc", failures)]
        found = [*mains, result("finish", "BackwardPostprocess", "dq: wrong", ["a"])]
        correctness.share_blame(found)
        return [v.kernel for v in found if not v.passed]

    assert shared("dq: wrong", "", "") == ["a"]
    assert shared("dq: wrong", "dk: wrong", "") == ["a", "b"]
    # nothing that ran with it is right
    assert shared("dq: wrong", "dq: wrong", "dq: wrong") == ["finish"]
    assert shared("dq: wrong", "dk: wrong", "dq: wrong") == ["b", "finish"]
    # it is wrong by itself
    assert shared("", "", "") == ["finish"]


def test_verdicts_travel():
    result = KernelResult("a", "f", "Forward", 2, ["b"], ["c"], ["d"], Worst(math.inf, "out", "rms", math.inf, 0.1, "p", 3))
    data = json.loads(json.dumps(result.data(), allow_nan=False))
    assert KernelResult.from_data(data) == result


# ---- a GPU that may be lost --------------------------------------------------------------------------------------


def troubled(target, variant, seed, quick):
    """What a kernel may do to its process. (In that other process.)"""
    name = variant["name"]
    result = KernelResult(name, "f", "Forward", 1)
    if name == "dies":
        os._exit(3)
    if name == "dies once" and not (trials := variant["folder"] / "trials").exists():
        trials.touch()
        os._exit(3)
    if name == "busy" and not (trials := variant["folder"] / "busy").exists():
        trials.touch()
        os._exit(3)
    if name == "busy":
        result.inconclusive.append("out of memory")
    if name == "sleeps":
        time.sleep(0.3)
    if name == "hangs":
        time.sleep(60)
    if name == "loses":
        result.failures.append("AcceleratorError: an illegal memory access")
        raise DeviceLost(result)
    return result


def unloaded(target, variant, quick):
    """Nothing to load."""


def slowly_loaded(target, variant, quick):
    time.sleep(1)


def both_loaded(target, variant, quick):
    (variant["folder"] / variant["name"]).touch()
    while len(list(variant["folder"].iterdir())) < 2:
        time.sleep(0.01)


def kernels_named(*names, folder=None):
    return [{"name": name, "family": "f", "pass": "Forward", "folder": folder} for name in names]


def test_crashing_kernel_is_named(monkeypatch):
    monkeypatch.setitem(isolation.TIMEOUTS, "check", 1.5)
    variants = kernels_named("fine", "dies", "hangs", "loses", "fine too")
    found = {v.kernel: v.failures for v in isolation.check_isolated(CPU, variants, 0, True, math.inf, 2, troubled, unloaded)}
    assert found == {
        "fine": [],
        "dies": ["the process died (check)"],
        "hangs": ["no answer (check) within 3 s"],
        "loses": ["AcceleratorError: an illegal memory access"],
        "fine too": [],
    }


def test_a_kernel_that_another_took_down_is_right(tmp_path):
    """(Under MPS a fault is one of all processes, and on a busy GPU a kernel may be late.) It fails if it is lost alone too."""
    [result] = isolation.check_isolated(CPU, kernels_named("dies once", folder=tmp_path), 0, True, math.inf, 1, troubled, unloaded)
    assert result.kernel == "dies once" and result.passed
    assert result.note == "lost its process once, and not when it ran alone: the process died (check)"


def test_a_second_trial_in_vain_ends_them_and_nothing_is_forgotten(tmp_path):
    variants = kernels_named("busy", "dies", folder=tmp_path)
    found = list(isolation.check_isolated(CPU, variants, 0, True, math.inf, 1, troubled, unloaded))
    assert [(v.kernel, v.failures, v.inconclusive, v.note) for v in found] == [
        ("busy", [], ["out of memory", "the process died (check)"], ""),
        ("dies", [], ["no second trial: the process died (check)"], ""),
    ]


def test_second_trials_share_a_limit(monkeypatch):
    monkeypatch.setitem(isolation.TIMEOUTS, "check", 0.5)
    monkeypatch.setattr(isolation, "SECOND_TRIALS", 0.5)
    found = list(isolation.check_isolated(CPU, kernels_named("hangs", "hangs"), 0, True, math.inf, 2, troubled, unloaded))
    assert found[0].failures == ["no answer (check) within 1 s"]
    assert not found[1].failures and found[1].inconclusive == ["no second trial: no answer (check) within 0 s"]


class OneProcess(Target):
    """A GPU with memory for one process; its kind is a folder."""

    def make_current(self):
        try:
            (Path(self.kind) / "started").touch(exist_ok=False)
        except FileExistsError:
            os._exit(3)


def test_processes_that_do_not_start_leave_no_time(tmp_path):
    target = OneProcess(str(tmp_path), torch.device("cpu"))
    found = list(isolation.check_isolated(target, kernels_named(*["sleeps"] * 9), 0, True, 0.5, 4, troubled, unloaded))
    assert len(found) == 2


def test_loading_does_not_count(monkeypatch):
    """Three kernels take a second each to load, and no time to check: neither the limit nor the timeout of checks ends them."""
    monkeypatch.setitem(isolation.TIMEOUTS, "check", 0.8)
    found = list(isolation.check_isolated(CPU, kernels_named("a", "b", "c"), 0, True, 0.5, 1, troubled, slowly_loaded))
    assert [v.kernel for v in found] == ["a", "b", "c"] and all(v.passed for v in found)
    assert all(v.load_seconds >= 1 and v.check_seconds < 0.5 for v in found)


def test_kernels_load_and_run_at_the_same_time(tmp_path):
    """Each of two kernels waits for the other to load."""
    found = list(isolation.check_isolated(CPU, kernels_named("a", "b", folder=tmp_path), 0, True, math.inf, 2, troubled, both_loaded))
    assert len(found) == 2 and all(v.passed for v in found)


def test_a_process_for_each_core_as_far_as_memory_suffices(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(12)), raising=False)
    gpu = Target("cuda", torch.device("cpu"))
    for free, kernel_count, expected in [(80, 300, 12), (5, 300, 4), (0, 300, 1), (80, 9, 2), (80, 1, 1)]:
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device, free=free: (free * 2**30, 80 * 2**30))
        assert isolation.processes(gpu, kernel_count) == expected


class Unstartable(Target):
    """A GPU on which no process gets a CUDA context."""

    def make_current(self):
        if self.kind == "hangs":
            time.sleep(60)
        os._exit(3)


@pytest.mark.parametrize("kind, why", [("hangs", "no process had a CUDA context within 1 s"), ("dies", "no process could start")])
def test_where_no_process_starts_no_kernel_is_to_blame(kind, why, monkeypatch):
    monkeypatch.setitem(isolation.TIMEOUTS, "start", 1.0 if kind == "hangs" else 60.0)
    target = Unstartable(kind, torch.device("cpu"))
    [result] = isolation.check_isolated(target, kernels_named("a", "b"), 0, True, math.inf, 2, troubled, unloaded)
    assert result.inconclusive == [why] and not result.failures


# ---- what is not checked -----------------------------------------------------------------------------------------


@pytest.fixture
def short_of_time(monkeypatch):
    """Time for one kernel of a check."""
    monkeypatch.setattr(performance, "measure", lambda *_: Speeds(note="not now"))
    find = volta_fa.check._results
    monkeypatch.setattr(volta_fa.check, "_results", lambda settings, variants, *rest: find(settings, variants[:1], *rest))
    return lambda: monkeypatch.setattr(volta_fa.check, "_results", find)


def test_an_unfinished_check_is_incomplete_and_continues(short_of_time, tmp_path, capsys):
    assert list(isolation.check_isolated(CPU, [{"name": "a"}], 0, True, 0.0)) == []
    arguments = ["--device", "cpu", "--quick", "--kernels", "cpu_*ward_float*"]
    status, data = check(tmp_path, *arguments, "--limit", "60")
    assert status == 3 and data["outcome"] == "incomplete" and data["wrong"] == [] and data["continued"] == 0
    assert [v["kernel"] for v in data["right"]] == ["cpu_Forward_float32"]
    assert data["not_checked"] == ["cpu_Forward_float16", "cpu_Backward_float32", "cpu_Backward_float16"]
    page = capsys.readouterr().out
    command = f"python -m volta_fa check --device cpu --output {tmp_path} --quick --kernels 'cpu_*ward_float*'"
    assert page.splitlines()[-1] == f"Incomplete: 3 of 4 kernels are not checked. To finish: {command}"
    assert data["to_finish"] == command and "3 are not checked; plans take them all the same" in page
    assert "cpu backward, atomics    0 of 2" in page
    short_of_time()
    status, data = check(tmp_path, *shlex.split(command)[4:])
    assert status == 0 and data["continued"] == 1 and len(data["right"]) == 4 and data["not_checked"] == []
    assert "continues an unfinished check: 1 of 4 kernels are done" in capsys.readouterr().out
    status, data = check(tmp_path, *arguments)
    assert status == 0 and data["continued"] == 0  # what is finished begins anew


def test_continued_run_keeps_failures(short_of_time, monkeypatch, tmp_path, capsys):
    run = correctness.check_kernel
    seen = []

    def wrong(target, variant, *rest):
        seen.append(variant["name"])
        result = run(target, variant, *rest)
        result.failures = ["wrong"] * (variant["name"] == "cpu_Forward_float32")
        return result

    monkeypatch.setattr(correctness, "check_kernel", wrong)
    arguments = ["--device", "cpu", "--quick", "--kernels", "cpu_Forward_float*"]
    status, data = check(tmp_path, *arguments)
    assert status == 1 and data["wrong"] == ["cpu_Forward_float32"] and data["not_checked"] == ["cpu_Forward_float16"]
    assert (
        capsys.readouterr().out.splitlines()[-1].startswith("Wrong: cpu_Forward_float32. 1 of 2 kernels are not checked. To finish: python")
    )
    short_of_time()
    status, data = check(tmp_path, *arguments)
    assert status == 1 and data["wrong"] == ["cpu_Forward_float32"] and data["not_checked"] == []
    assert seen == ["cpu_Forward_float32", "cpu_Forward_float16"]  # each once


@pytest.mark.parametrize(
    "spoil, note",
    [
        (
            lambda text: text.replace(f'"torch": "{torch.__version__}"', '"torch": "2.4.0"'),
            f"its torch was 2.4.0, and is {torch.__version__}",
        ),
        (lambda text: text.replace('"gpu": "cpu"', '"gpu": "Tesla T4 (0)"'), "its gpu was Tesla T4 (0), and is cpu"),
        (lambda text: text.replace('"seed": 0', '"seed": 1'), "its seed was 1, and is 0"),
        (lambda text: text.replace('"kernel"', '"kernels"'), "it is damaged"),
        (lambda text: "\0\x80", "it is damaged"),
        (lambda text: "[]\n", "it is damaged"),
        (lambda text: "", "it is damaged"),
    ],
    ids=["torch", "gpu", "seed", "other fields", "binary", "no key", "empty"],
)
def test_a_damaged_or_foreign_state_is_ignored_with_a_note(spoil, note, short_of_time, tmp_path, capsys):
    arguments = ["--device", "cpu", "--quick", "--kernels", "cpu_Forward_float*"]
    assert check(tmp_path, *arguments)[0] == 3
    path = tmp_path / state.FILE
    path.write_text(spoil(path.read_text()))
    short_of_time()
    status, data = check(tmp_path, *arguments)
    assert status == 0 and data["continued"] == 0 and len(data["right"]) == 2
    assert f"{path} is ignored: {note}" in capsys.readouterr().out
    assert not path.exists()


def test_a_last_line_that_was_cut_off_costs_one_result(tmp_path):
    path = tmp_path / state.FILE
    first = state.State.open(path, {"seed": 0})
    for name in "abc":
        first.add(KernelResult(name, "f", "Forward", 1))
    path.write_text(path.read_text()[:-20])
    second = state.State.open(path, {"seed": 0})
    assert [v.kernel for v in second.results] == ["a", "b"] and not second.note
    second.add(KernelResult("c", "f", "Forward", 1))
    assert [v.kernel for v in state.State.open(path, {"seed": 0}).results] == ["a", "b", "c"]


def test_a_state_that_cannot_be_written_is_an_error(tmp_path, capsys):
    (tmp_path / state.FILE).mkdir()
    assert main(["check", "--output", str(tmp_path), "--device", "cpu", "--quick"]) == 2
    assert f"--output {tmp_path}: {state.FILE}: Is a directory" in capsys.readouterr().err


def test_results_survive_an_interruption_of_the_timing(monkeypatch, tmp_path):
    arguments = ["--device", "cpu", "--quick", "--kernels", "cpu_Forward_float*"]

    def interrupted(*_):
        raise KeyboardInterrupt

    measure = performance.measure
    monkeypatch.setattr(performance, "measure", interrupted)
    with pytest.raises(KeyboardInterrupt):
        volta_fa.check.run_check(volta_fa.check.Settings(CPU, tmp_path, quick=True, kernels="cpu_Forward_float*"))
    monkeypatch.setattr(performance, "measure", measure)
    status, data = check(tmp_path, *arguments)
    assert status == 0 and data["continued"] == 2 and not (tmp_path / state.FILE).exists()


def test_results_hold_for_one_build_gpu_and_driver(monkeypatch, tmp_path):
    of_cpu = state.made_on(CPU, seed=0)
    assert of_cpu["torch"] == torch.__version__ and of_cpu["gpu"] == "cpu" and len(of_cpu["library"]) == 16 and of_cpu["seed"] == 0
    monkeypatch.setattr(state, "library_path", lambda: tmp_path / "torch-2.11" / "libvolta_fa.so")
    (tmp_path / "torch-2.11").mkdir()
    for path in (tmp_path / "torch-2.11" / "libvolta_fa.so", tmp_path / "libvolta_fa_core.so"):
        path.write_bytes(b"another build")
    assert state.made_on(CPU)["library"] != of_cpu["library"]

    class Card:
        name, uuid = "Tesla T4", "1"

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Card)
    monkeypatch.setattr(diagnostics, "driver_version", lambda: "535.104.05")
    gpu = Target("cuda", torch.device("cuda:0"))
    first = state.made_on(gpu)
    assert first["gpu"].startswith("Tesla T4 (") and first["driver"] == "535.104.05"
    Card.uuid = "2"
    assert state.made_on(gpu)["gpu"] != first["gpu"]


def test_only_what_failed_is_replaced(monkeypatch, tmp_path):
    """Where speed is measured, kernels that were not checked run."""
    need("sim")
    seen = []
    monkeypatch.setattr(performance, "measure", lambda target, failed, *_: seen.append(failed) or Speeds(note="not now"))

    def one_wrong(settings, variants, *_):
        yield KernelResult(variants[0]["name"], "volta", "Forward", 1, failures=["wrong"])
        yield KernelResult(variants[1]["name"], "volta", "Forward", 1, inconclusive=["out of memory"])

    monkeypatch.setattr(volta_fa.check, "_results", one_wrong)
    status, data = check(tmp_path, "--device", "simulator", "--kernels", "volta_fwd_*")
    assert status == 1 and seen == [data["wrong"]] and len(seen[0]) == 1 and len(data["not_checked"]) > 5


def test_the_preferred_family_is_first(monkeypatch):
    families = [{"name": "turing", "native": False}, {"name": "volta", "native": False}]
    monkeypatch.setattr(Target, "families", families)
    order = [v["family"] for v in kernels.wanted(Target("cuda", torch.device("cpu")), INFO["variants"])]
    assert order == sorted(order) and {*order} == {"turing", "volta"}
    monkeypatch.setattr(Target, "families", families[::-1])
    order = [v["family"] for v in kernels.wanted(Target("cuda", torch.device("cpu")), INFO["variants"])]
    assert order == sorted(order, reverse=True) and {*order} == {"turing", "volta"}


def test_a_kernel_is_loaded_with_those_that_run_with_it(monkeypatch):
    need("sim")
    loaded = []

    class Ops:
        _preload = staticmethod(lambda name, device: loaded.append(name))
        _set_tuning, _plan, _families = (getattr(torch.ops.volta_fa, name) for name in ("_set_tuning", "_plan", "_families"))

    monkeypatch.setattr(torch.ops, "volta_fa", Ops)
    monkeypatch.setattr(Target, "number", -1)
    variant = next(v for v in SIMULATED if v["name"] == "volta_bwd_64")
    correctness.load_kernel(dataclasses.replace(SIMULATOR, kind="cuda"), variant, False)
    assert loaded[0] == "volta_bwd_64" and loaded[1:] == ["volta_bwd_varlen_preprocess", "volta_bwd_varlen_postprocess"]
    loaded.clear()
    correctness.load_kernel(SIMULATOR, variant, False)
    assert loaded == []  # there is no driver


def test_preload_says_what_it_cannot_load():
    with pytest.raises(ValueError, match="_preload: kernel: got `nonsense`, expected a kernel that"):
        torch.ops.volta_fa._preload("nonsense", 0)


@pytest.mark.parametrize(
    "text", ["CUDA error: out of memory", "CUDA driver: loading x: CUDA_ERROR_OUT_OF_MEMORY", "CUBLAS_STATUS_ALLOC_FAILED when"]
)
def test_lack_of_memory_has_many_names(text):
    assert kernels.lacks_memory(RuntimeError(text)) and not kernels.lacks_memory(RuntimeError("an illegal memory access"))
    speeds = Speeds()
    performance._attempt(speeds, "the card's figures", lambda: (_ for _ in ()).throw(RuntimeError(text)))
    assert speeds.troubles == [] and speeds.missing == "the card's figures: out of memory"


# ---- fast --------------------------------------------------------------------------------------------------------


def test_predictions_are_those_of_the_documentation():
    sys.path.insert(0, str(REPOSITORY))
    from benchmarks import docs

    text = docs.as_text(docs.predictions(docs.PAGE.read_text()))
    assert docs.PREDICTIONS.read_text() == text, "run `python -m benchmarks.docs`"
    found = performance.load_predictions()
    assert found["date"] and "simulated" in found["kind"] and found["made_by"].startswith("python -m benchmarks.volta")
    for direction, nheads in performance.HEADS.items():
        for headdim in (64, 128, 256):
            assert performance._predicted(found, Point(direction, headdim, 512, False, nheads)), (direction, headdim)
    assert performance._predicted(found, Point("forward", 64, 512, False, 8)) is None


def test_points_and_their_share_of_the_prediction(capsys):
    point = Point("backward", 128, 2048, True, 40, ms={VOLTA_FA: 2.0}, predicted=(50.0, 60.0))
    assert point.flops == 10 * 40 * 2048**2 * 128 / 2
    assert point.of_prediction == pytest.approx(point.flops / 2e-3 / 1e12 / 50)
    missing = Point("forward", 128, 2048, True, 32, missing={"math": performance.OUT_OF_MEMORY, VOLTA_FA: OUT_OF_TIME})
    report._show_speeds(Speeds(points=[point, missing], predictions={"points": []}))
    page = capsys.readouterr().out
    assert "2048, 128, causal" in page and "memory" in page and f"{point.of_prediction:.0%}" in page
    assert "1 figures were left out" in page and max(map(len, page.splitlines())) <= 100


def test_no_time_left(monkeypatch):
    monkeypatch.setattr(performance, "card_figures", lambda target: {})
    speeds = performance.measure(CPU, (), time.monotonic() - 1, True, lambda at: None)
    assert speeds.points and all(set(p.missing.values()) == {OUT_OF_TIME} and not p.ms for p in speeds.points)


def test_failed_kernel_does_not_run_again(monkeypatch):
    """Neither where speed is measured, nor where a tuning is: it may never end."""
    need("sim")
    seen = []

    def planned(point, target, name):
        shape = (1, point.seqlen, point.seqlen, point.nheads, point.nheads, point.headdim, point.headdim, point.causal)
        seen.append(json.loads(torch.ops.volta_fa._plan(*shape, device=-1))["forward"]["name"])
        return lambda: None

    monkeypatch.setattr(performance, "_ours", planned)
    monkeypatch.setattr(performance, "card_figures", lambda target: {})
    monkeypatch.setattr(performance, "HEADS", {"forward": 200})
    for failed in ("volta_fwd_64x64", "volta_fwd_64x64_small"):
        seen.clear()
        performance.measure(CPU, [failed], time.monotonic() + 60, True, lambda at: None)
        assert seen and failed not in seen
    takes = tune.Class("Backward", 64, 32, 512, 40, False)
    alternatives = [tune.Alternative({}), tune.Alternative({"deterministic": True}, deterministic=True)]
    of_headdim = [v["name"] for v in SIMULATED if v["pass"] == "Backward" and v["headdim"] >= 64]
    assert tune._own(SIMULATOR, takes, alternatives, ["volta_bwd_64"]) == 0
    assert tune._own(SIMULATOR, takes, alternatives, of_headdim) is None  # deterministic ones are all that is left


def test_raising_kernel_is_recorded(monkeypatch):
    monkeypatch.setattr(performance, "card_figures", lambda target: fail())
    monkeypatch.setattr(performance, "_pytorch", fail)
    speeds = performance.measure(CPU, (), time.monotonic() + 60, True, lambda at: None)
    assert speeds.troubles == ["the card's figures: RuntimeError: the launch failed"]
    assert all(p.ms[VOLTA_FA] > 0 and p.missing["math"] == "the launch failed" for p in speeds.points)
    monkeypatch.setattr(performance, "_ours", fail)
    speeds = performance.measure(CPU, (), time.monotonic() + 60, True, lambda at: None)
    assert "volta_fa, forward, seqlen 128, headdim 64: RuntimeError: the launch failed" in speeds.troubles


@pytest.mark.parametrize("architecture", ["sm_70", "sm_75", "sm_90"])
def test_the_kernel_that_adds_compiles(architecture, tmp_path):
    pytest.importorskip("triton")
    import triton

    ptxas = Path(triton.__file__).parent / "backends/nvidia/bin/ptxas"
    (tmp_path / "adds.ptx").write_text(atomics._PTX)
    done = subprocess.run(
        [ptxas, f"-arch={architecture}", tmp_path / "adds.ptx", "-o", tmp_path / "adds.cubin"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


# ---- the machine -------------------------------------------------------------------------------------------------


def fake_nvidia_smi(tmp_path, monkeypatch, script):
    path = tmp_path / "nvidia-smi"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)


def test_output_of_nvidia_smi(tmp_path, monkeypatch):
    fake_nvidia_smi(
        tmp_path, monkeypatch, "echo '535.104.05, 88.00.4F, 1290, 1530, 877, 877, 41.2, 300.00, 300.00, 35, 98, Enabled, [N/A], 0x0'"
    )
    found = machine.ask("0")
    assert found["driver"] == "535.104.05" and found["sm_clock_max_mhz"] == 1530 and found["power_limit_w"] == 300
    assert found["mig"] is None and found["throttle_reasons"] == "0x0"
    fake_nvidia_smi(tmp_path, monkeypatch, "echo 'No devices were found'; exit 6")
    assert machine.ask("0") == {"nvidia_smi": "said: No devices were found"}
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    assert machine.ask("0")["nvidia_smi"].startswith("did not run: ")


@pytest.mark.parametrize("release, expected", [("2.10.0+cu130", "torch==2.10.0+cu126 "), ("2.15.1+cu132", "torch==2.14.1+cu126 ")])
def test_the_remedy_for_a_torch_without_volta(release, expected, monkeypatch):
    monkeypatch.setattr(torch, "__version__", release)
    assert expected in machine.remedy("sm_70") and "cu126" in machine.remedy("sm_70")
    assert "cu126" not in machine.remedy("sm_121")


def test_a_torch_without_code_for_the_card(monkeypatch):
    def no_image(*_, **__):
        raise RuntimeError("CUDA error: no kernel image is available for execution on the device\nCUDA kernel errors ...")

    monkeypatch.setattr(torch, "zeros", no_image)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla V100-SXM2-16GB")
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_75", "sm_90"])
    said = machine.torch_trouble(Target("cuda", torch.device("cpu")))
    assert "Tesla V100" in said and "it is sm_70, and torch was built for sm_75 sm_90" in said
    assert "no kernel image is available" in said and "pip install" in said and "\n" not in said
    assert machine.torch_trouble(CPU) is None


def test_says_why_there_is_no_gpu(monkeypatch):
    def no_driver():
        raise RuntimeError("Found no NVIDIA driver on your system.\nMore.")

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch.cuda, "init", no_driver)
    assert machine.describe(CPU)["no_gpu"] == "Found no NVIDIA driver on your system."


def test_a_torch_that_cannot_run_is_the_first_thing_said(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(machine, "torch_trouble", lambda target: "torch has no code for this card: install another")
    status, data = check(tmp_path, "--device", "cpu")
    assert status == 1 and data["trouble"] and data["right"] == []
    page = capsys.readouterr().out
    assert page.startswith("torch has no code for this card: install another") and page.endswith("\nWrong: torch.\n")


# ---- tune --------------------------------------------------------------------------------------------------------


def test_classes_are_apart():
    """A shape is in one class of a pass at most, and the one that is measured for a class is in it."""
    need("sim")
    listed = [class_ for class_, _ in tune.classes(SIMULATOR, INFO["variants"], ())]
    assert len(listed) <= tune.MOST_CHOICES

    def has(class_, shape):
        bounds = class_.bounds
        numbers = {"headdim": shape.headdim, "headdim_v": shape.headdim, "seqlen_q": shape.seqlen, "seqlen_k": shape.seqlen}
        numbers["rows"] = shape.seqlen * shape.nheads
        inside = all(low <= numbers[name] <= high for name in numbers for low, high in [bounds[name]])
        return inside and bounds["pass"] == shape.pass_ and bounds["is_causal"] == shape.causal

    for shape in listed:
        assert [c for c in listed if has(c, shape)] == [shape]


def timed(monkeypatch, faster):
    """Makes kernels and modes take the ms that `faster` returns."""
    monkeypatch.setattr(tune, "_work", lambda target, class_, alternative: alternative)
    monkeypatch.setattr(tune, "median_ms", lambda alternative, *_, **__: faster(alternative))


def test_only_what_is_clearly_faster_is_written(monkeypatch, tmp_path):
    need("sim")
    timed(monkeypatch, lambda a: 0.97 if a.deterministic else 1.0)
    listed = tune.classes(SIMULATOR, INFO["variants"], ())
    assert not any(tune.compare(SIMULATOR, class_, alternatives, ()) for class_, alternatives in listed)

    timed(monkeypatch, lambda a: 0.5 if a.deterministic or (a.variant and a.variant["name"] == "volta_fwd_64x64_small") else 1.0)
    about = {"volta_fa": "0", "device": "a card", "driver": "1"}
    tuned = tune.Tuned(str(tmp_path / "folder" / "card.json"), failed=["volta_fwd_128x128_small", "volta_fwd_streamk_128x128"])
    tuned.choices = [found for class_, alternatives in listed if (found := tune.compare(SIMULATOR, class_, alternatives, ()))]
    tune._write(tuned, about)
    text = Path(tuned.path).read_text()
    assert [path.name for path in (tmp_path / "folder").iterdir()] == ["card.json"]

    def planned(seqlen, nheads, headdim, causal=False):
        plan = json.loads(torch.ops.volta_fa._plan(1, seqlen, seqlen, nheads, nheads, headdim, headdim, causal, device=-1))
        return plan["forward"]["name"], plan["backward"]["deterministic"]

    torch.ops.volta_fa._set_tuning('{"format": 1}')
    try:
        assert planned(2048, 40, 64) == ("volta_fwd_64x64", False) and planned(512, 2, 128)[0] == "volta_fwd_128x128_small"
        torch.ops.volta_fa._set_tuning(text)
        assert planned(2048, 40, 64) == ("volta_fwd_64x64_small", True)
        assert planned(2047, 41, 56, causal=True) == ("volta_fwd_64x64_small", True)
        assert planned(100_000, 40, 64) == ("volta_fwd_64x64", False)  # beyond what was measured
        assert planned(512, 2, 128)[0] == "volta_fwd_128x128"  # the other failed
    finally:
        torch.ops.volta_fa._set_tuning("")


def test_a_kernel_that_failed_is_written_and_not_measured(monkeypatch, tmp_path):
    need("sim")
    timed(monkeypatch, lambda a: 1.0)
    about = {"volta_fa": "0", "device": "a card", "driver": "1", "path": str(tmp_path / "card.json")}
    about |= {"outcome": "read", "failed": ["volta_bwd_64"]}

    class Ops:
        _tuning = staticmethod(lambda number: json.dumps(about))
        _set_tuning, _plan, _families = (getattr(torch.ops.volta_fa, name) for name in ("_set_tuning", "_plan", "_families"))
        _info = torch.ops.volta_fa._info

    monkeypatch.setattr(torch.ops, "volta_fa", Ops)
    failed = KernelResult("volta_fwd_64x64_small", "volta", "Forward", 1, failures=["wrong"])
    seen = []
    tuned = tune.tune(SIMULATOR, [failed, KernelResult("volta_fwd_64x64", "volta", "Forward", 1)], time.monotonic() + 60, seen.append)
    assert tuned.failed == ["volta_bwd_64", "volta_fwd_64x64_small"] and not tuned.trouble  # what failed before stays
    assert json.loads((tmp_path / "card.json").read_text())["failed"] == tuned.failed
    assert not any(at.startswith("Forward") and "headdim 64" in at for at in seen)  # nothing to compare with
    assert "plans will not take volta_bwd_64, volta_fwd_64x64_small" in tuned.summary
    about["outcome"] = "off"
    assert "VOLTA_FA_TUNING=0" in tune.tune(SIMULATOR, [], time.monotonic() + 60, seen.append).trouble
    about["outcome"] = "missing"
    late = tune.tune(SIMULATOR, [], time.monotonic() - 1, seen.append)
    assert late.measured == 0 and late.left_out > 0 and "lack of time" in late.summary


def test_the_report_has_no_name_of_a_home_folder(monkeypatch):
    monkeypatch.setenv("HOME", "/home/somebody")
    assert machine._without_home("/home/somebody/a/b.so") == "~/a/b.so"
    assert machine._without_home("/opt/somebody/b.so") == "/opt/somebody/b.so"


@pytest.mark.parametrize("limit", ["soon", "-1", "nan", "inf"])
def test_a_limit_that_is_no_time_is_one_clear_error(limit, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["check", f"--limit={limit}"])
    assert f"argument --limit: got {limit}, expected seconds, 0 or more" in capsys.readouterr().err
