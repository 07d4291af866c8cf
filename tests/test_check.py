"""`python -m volta_fa check`, which tests and times every kernel on the user's GPU: it runs, passes right kernels, and names wrong ones.

The check compares each kernel with the CPU backend in fp64, and that with `tolerance.attend`, plain PyTorch. Tests run it on the CPU
backend or the simulator (`need("sim")` skips a test without it), and make results wrong by monkeypatching. Exit status: 0 right, 1 wrong,
2 bad arguments, 3 incomplete. In the JSON, `right` lists the kernels' results, `fast` the times. `cached.PASSES` are passes over a KV
cache; kernels of `kernels.WITHOUT_PROBLEM` (merging, sparse attention and others) have checks of their own.

A Target is the device to check; in `target.running(variant)` plans take this kernel. A KernelResult has `failures` (wrong results),
`inconclusive` (problems that could not be checked) and `worst.share`, the largest error over the allowed one."""

import dataclasses
import functools
import itertools
import json
import math
import os
import re
from contextlib import contextmanager
from unittest.mock import Mock

import pytest
import torch

import volta_fa
import volta_fa.check
import volta_fa.demo
from conftest import INFO, need
from volta_fa import diagnostics, progress
from volta_fa.check import cached, correctness, int8_scores, kernels, machine, performance, problems, report, tolerance, versus
from volta_fa.check.correctness import KernelResult, Worst
from volta_fa.check.kernels import Target
from volta_fa.check.performance import Speeds
from volta_fa.check.report import Findings, Settings
from volta_fa.cli import demo, main
from volta_fa.errors import CommandError

CPU, SIMULATOR = Target.of("cpu"), Target.of("simulator")
#: The kernels that a check in the simulator runs: those for a V100. A variant is a kernel, a dict as `info()` describes it.
SIMULATED = kernels.wanted(SIMULATOR, INFO["variants"])
#: Checks a variant on a target, and returns a KernelResult. `quick`: its first problem alone.
check_kernel = functools.partial(correctness.check_kernel, seed=0)


def cpu(pass_):
    """Returns a variant that stands for a pass (Forward, Backward, Decode) of the CPU backend in fp16."""
    return {"name": "x", "family": "cpu", "pass": pass_, "dtype": torch.float16}


@pytest.fixture
def untimed(monkeypatch):
    """Skips the measurement of speed."""
    monkeypatch.setattr(performance, "measure", lambda *_: Speeds(note="not now"))


def check(tmp_path, *arguments):
    """Runs the command. Returns its exit status and the report's JSON."""
    status = main(["check", "--output", str(tmp_path), *arguments])
    return status, json.loads((tmp_path / "volta_fa-check.json").read_text())


# ---- the whole command -------------------------------------------------------------------------------------------


def test_the_report_has_a_line_for_each_pass():
    assert {v["pass"] for v in INFO["variants"]} <= report._PASSES.keys()


def test_on_the_cpu(tmp_path, capsys):
    """A whole check: exit status, JSON, plot and printed page."""
    status, data = check(tmp_path, "--device", "cpu", "--seed", "3")
    assert status == 0 and data["outcome"] == "right" and data["settings"]["seed"] == 3
    assert data["wrong"] == data["not_checked"] == [] and data["to_finish"] is None  # the command that finishes an unfinished check
    # passes Forward, Backward and Decode in fp32, fp16 and bf16
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


def test_shows_progress_in_a_pipe(tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(progress.Lines, "interval", 0.02)
    check(tmp_path, "--device", "cpu", "--quick")
    out, err = capfd.readouterr()
    assert re.search(r"^right: \d of 9 done, \d s$", err, re.M) and " done, " not in out


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


# Slow here: `make test` runs these kernels in other tests.
MORE_KERNELS_OF_A_CACHE = ["volta_decode_64x[!3]*", "volta_decode_*_64x16", "volta_mla_decode_*"]


@pytest.mark.parametrize(
    "pattern",
    [
        "volta_decode_64x32",
        "volta_append*",
        "volta_dequantize",
        *(pytest.param(p, marks=pytest.mark.slow) for p in MORE_KERNELS_OF_A_CACHE),
    ],
)
def test_kernels_of_a_cache_in_the_simulator(tmp_path, capsys, pattern):
    """Each kernel that decodes from a KV cache or appends to it gets three problems, which it passes. The kernel that dequantizes one gets
    four, and the report names the kernels that ran with it."""
    need("sim")
    dequantizes = pattern == "volta_dequantize"
    status, data = check(tmp_path, "--device", "simulator", "--kernels", pattern)
    printed = capsys.readouterr().out
    assert status == 0, printed
    assert data["right"] and all(v["passed"] and v["problems"] == 3 + dequantizes and v["worst"]["share"] > 0 for v in data["right"])
    assert not dequantizes or data["right"][0]["runs_with"]
    assert ("volta KV cache, append" in printed) == ("append" in pattern)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_on_a_gpu(tmp_path, capsys):
    status, data = check(tmp_path, "--device", "cuda", "--quick")
    assert status == 0, capsys.readouterr().out
    assert data["fast"]["card"]["atomic_adds_lines_g_s"] > data["fast"]["card"]["atomic_adds_rows_g_s"] > 0
    assert data["not_checked"] == []


@pytest.mark.parametrize(
    "command, arguments, message",
    [
        ("check", ["--device", "tpu"], "expected auto, cpu, simulator, cuda or cuda:N"),
        ("check", ["--device", "cuda:x"], "expected auto, cpu, simulator, cuda or cuda:N"),
        ("check", ["--device", "cuda:99"], "CUDA device"),
        ("check", ["--device", "cpu", "--tune"], "needs a GPU"),
        ("check", ["--device", "cpu", "--kernels", "volta_*"], "matches no kernel"),
        ("check", ["--device", "cpu", "--output", __file__], "test_check.py: File exists"),
        ("demo", ["--device", "tpu"], "expected auto, cpu, cuda or cuda:N"),
        ("demo", ["--device", "meta"], "expected auto, cpu, cuda or cuda:N"),
        ("demo", ["--device", "cuda:99"], "CUDA device"),
        ("demo", ["--device", "cpu", "--output", __file__], f"volta_fa: --output {__file__}: File exists\n"),
        ("versus-1cat", ["--device", "cpu", "--output", "."], "volta_fa: --output .: Is a directory\n"),
        ("versus-1cat", ["--device", "cpu", "--output", f"{__file__}/a.json"], f"volta_fa: --output {__file__}/a.json: File exists\n"),
    ],
)
def test_says_what_is_wrong_with_arguments(command, arguments, message, monkeypatch, capsys, tmp_path):
    """Invalid arguments are an error before the command does anything else."""
    monkeypatch.setattr(volta_fa.demo, "run_demo", None)
    monkeypatch.setattr(versus, "rows", None)
    assert main([command, "--output", str(tmp_path), *arguments]) == 2
    printed, error = capsys.readouterr()
    assert not printed and message in error and error.count("\n") == 1


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
    """The planner takes the kernel under test for each problem of the check, and no other kernel that is applicable too."""
    need("sim")
    for variant in SIMULATED:
        listed = correctness._problems(variant, quick=False)
        assert listed or variant["pass"] in kernels.WITHOUT_PROBLEM
        for problem in listed:
            assert variant["name"] in correctness._planned(SIMULATOR, problem, variant), f"{variant['name']}: {problem}"


def launched(variant, work) -> list[str]:
    """Returns the names of the kernels that work() launches where `check` asks for this one."""
    with SIMULATOR.running(variant):
        return [launch["kernel"] for launch in kernels.simulate(work)]


@pytest.mark.slow
def test_kernels_of_other_caches_and_of_latents_really_run():
    """Looks at launches, because `_plan` does not plan for latents, and rows not aligned to 16 bytes would be copied to fp16."""
    need("sim")
    # "float": a cache that is not quantized
    listed = [v for v in SIMULATED if v["pass"] == "DecodeMla" or (v["cache"] != "float" and v["headdim"] == 64)]
    assert len(listed) > 12
    for variant in listed:
        for problem in cached.problems(variant):
            inputs = cached.draw(problem, 0, SIMULATOR.device)
            assert launched(variant, lambda inputs=inputs: cached.run(inputs)) == [variant["name"]], problem


def test_kernels_of_a_bias_really_run():
    """Looks at launches, because a call's features follow from its tensors (a bias' dtype), while `_plan` takes them as names."""
    need("sim")
    listed = [v for v in SIMULATED if v["pass"] == "Forward" and "bias" in v["required_features"]]
    assert listed
    for variant in listed:
        for problem in kernels.problems(variant):
            inputs = problems.Inputs.draw(problem, 0, SIMULATOR.device)
            assert launched(variant, inputs.forward) == [variant["name"]], problem


def test_problems_ask_for_all_that_a_kernel_covers():
    """The problems of a kernel use all its features. (Calls with batch_invariant refuse dropout.)"""
    for variant in SIMULATED:
        if given := correctness._problems(variant, quick=False):
            asked = {feature for problem in given for feature in problem.features}
            refused = {"dropout"} if variant["batch_invariant"] else set()
            assert set(variant["features"]) - refused <= asked, variant["name"]


class SimulatedT4(Target):
    """The simulator, which is a V100 for the check, as a T4, whose tensor cores multiply int8."""

    @contextmanager
    def running(self, *args, **kwargs):
        with super().running(*args, **kwargs), kernels.environment(VOLTA_FA_SIM_GPU="t4"):
            yield


@pytest.mark.parametrize("name", ["turing_fast_fwd_64x64", "turing_fast_fwd_generic_64x64", "turing_fast_fwd_varlen_prepare_64"])
def test_kernels_with_int8_scores(name, monkeypatch):
    need("sim")
    t4 = SimulatedT4("simulator", torch.device("cpu"), capability=(7, 5), sms=40, shared_bytes=64 * 1024)
    (variant,) = (v for v in kernels.wanted(t4, INFO["variants"]) if v["name"] == name)
    result = check_kernel(t4, variant, quick=True)
    assert result.passed and result.problems == 1 and 0 < result.worst.share < 1
    model = int8_scores.FastInputs.model  # computes the expected results on the CPU, from prepared (quantized) keys and values if given

    def wrong(self, *prepared):
        """Returns results that are 3% too large, but right ones for the check of the prepare kernel."""
        expected = model(self, *prepared)
        return expected if prepared else tuple(1.03 * t for t in expected)

    monkeypatch.setattr(int8_scores.FastInputs, "model", wrong)
    assert "out: relative L1 error" in check_kernel(t4, variant, quick=True).failures[0]


def test_a_kernel_that_the_plan_does_not_take_fails():
    need("sim")
    variant = next(v for v in SIMULATED if v["name"] == "volta_fwd_64x64")
    result = check_kernel(SIMULATOR, {**variant, "headdim": 128, "headdim_v": 128}, quick=True)
    assert not result.passed and result.inconclusive[0].startswith("the plan takes volta_fwd_128x128") and not result.failures


# ---- right: what is found ----------------------------------------------------------------------------------------


def spoil_results(monkeypatch, owner, name, change):
    """Makes owner.name return change(its result) where its first argument, inputs or a tensor, is in fp16, as the reference's is not."""
    right = getattr(owner, name)

    def wrong(first, *arguments, **options):
        found = right(first, *arguments, **options)
        return change(found) if getattr(first, "q", first).dtype == torch.float16 else found

    monkeypatch.setattr(owner, name, wrong)


def corrupted(monkeypatch, change):
    """Makes the op's forward pass wrong: its results become change(out, softmax_lse, rng_state, number of the call)."""
    calls = itertools.count(1)
    spoil_results(monkeypatch, problems.Inputs, "forward", lambda found: change(*found, next(calls)))


def lose_element(out, lse, rng_state, call):
    out.view(-1)[-1] = math.nan
    return out, lse, rng_state


def differ_in_a_bit(out, lse, rng_state, call):
    if call % 2 == 0:
        out.view(torch.int16).view(-1)[3] ^= 1
    return out, lse, rng_state


#: A function that raises.
fail = Mock(side_effect=RuntimeError("the launch failed\nand more"))
#: Changes of forward's results for `corrupted`, and how the failure's message begins.
WRONG = {
    "2% too large": (lambda out, lse, rng, _: (out * 1.02, lse, rng), "out: "),
    "an element that is not written": (lose_element, "out: largest error inf"),
    "a wrong softmax_lse": (lambda out, lse, rng, _: (out, lse + 0.01, rng), "softmax_lse: "),
    "two runs that differ": (differ_in_a_bit, "out: 1 of "),
    "a launch that raises": (fail, "RuntimeError: the launch failed ("),
}


def test_lack_of_memory_is_no_kernels_fault(untimed, monkeypatch, tmp_path, capsys):
    """The kernel is not checked, and the next check tries it again."""
    no_memory = torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB.")
    arguments = ("--device", "cpu", "--kernels", "cpu_Forward_float16", "--quick")
    with monkeypatch.context() as patch:
        corrupted(patch, Mock(side_effect=no_memory))
        status, data = check(tmp_path, *arguments)
    assert status == 3 and data["right"][0]["failures"] == [] and "out of memory" in data["right"][0]["inconclusive"][0]
    assert data["outcome"] == "incomplete" and data["not_checked"] == ["cpu_Forward_float16"] and data["wrong"] == []
    assert "cpu_Forward_float16 could not be checked: CUDA out of memory" in capsys.readouterr().out
    status, data = check(tmp_path, *arguments)
    assert status == 0 and data["continued"] == 0


@pytest.mark.parametrize("change, message", WRONG.values(), ids=WRONG)
def test_a_wrong_kernel_is_named_and_the_rest_goes_on(change, message, untimed, monkeypatch, tmp_path, capsys):
    corrupted(monkeypatch, change)
    status, data = check(tmp_path, "--device", "cpu", "--kernels", "cpu_*ward_float16", "--quick")
    forward, backward = data["right"]
    assert status == 1 and data["outcome"] == "wrong" and data["wrong"] == ["cpu_Forward_float16"]
    assert not forward["passed"] and backward["passed"]
    assert forward["failures"][0].startswith(message), forward["failures"]
    assert "seed " in forward["failures"][0] and "q141_k155_h4on2_d40" in forward["failures"][0]
    page = capsys.readouterr().out
    assert "cpu_Forward_float16 failed" in page and "and more" not in page
    assert page.splitlines()[-1] == "Wrong: cpu_Forward_float16."


def write_too_far(found):
    found["k_cache"].view(-1)[-1] = 1.0  # of an entry's last row, where nothing is appended


def append_wrongly(found):
    """Changes a token that the first sequence appends in problem 2, and that no sequence of problem 1 has."""
    found["v_cache"][0, 9] += 0.01


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda found: found | {"out": found["out"] * 1.02}, "out: "),
        (lambda found: found | {"softmax_lse": found["softmax_lse"] + 0.01}, "softmax_lse: "),
        (write_too_far, "k_cache: 1 elements changed"),
        (append_wrongly, "v_cache: largest error"),
    ],
    ids=["out", "softmax_lse", "write_too_far", "append_wrongly"],
)
def test_a_wrong_kernel_of_a_cache_is_named(change, message, monkeypatch):
    spoil_results(monkeypatch, cached, "run", lambda found: change(found) or found)
    result = check_kernel(CPU, cpu("Decode"))
    assert any(text.startswith(message) for text in result.failures), result.failures
    assert all("headdim40" in text and "seed " in text for text in result.failures)


def spoil_scale(inputs):
    """Changes the scale of one token among hundreds by 5%."""
    entry, row = inputs.places[1]
    inputs.options["v_scale"][entry[7], row[7]] *= 1.05


def spoil_latent(inputs):
    """Zeroes a column that only keys have: 512 to 575 of a latent."""
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
    result = check_kernel(SIMULATOR, variant, quick=True)
    assert any(text.startswith("out: ") for text in result.failures) and not result.inconclusive, result


def test_a_key_too_many_is_noticed(monkeypatch):
    """A causal mask that shows one key more fails every causal problem, and no other."""
    forward = problems.Inputs.forward

    def wrong(self, generator=None):
        wider = {"is_causal": False, "window_right": 1} if self.problem.is_causal else {}
        return forward(dataclasses.replace(self, options={**self.options, **wider}), generator)

    monkeypatch.setattr(problems.Inputs, "forward", wrong)
    result = check_kernel(CPU, cpu("Forward"))
    causal = [str(p) for p in kernels.problems(cpu("Forward")) if p.is_causal]
    assert len(causal) >= 3
    for problem in causal:
        assert any(problem in text for text in result.failures), problem
    assert all("causal" in text for text in result.failures)


def test_queries_without_a_key_have_exact_zeros(monkeypatch):
    def tiny(out, lse, rng_state, call):
        out.view(-1)[0] += 1e-7  # the first query of 77 sees none of 33 keys
        return out, lse, rng_state

    corrupted(monkeypatch, tiny)
    result = check_kernel(CPU, cpu("Forward"))
    assert result.failures
    # 1e-7 is 1.19e-07 in fp16, twice its smallest number
    assert all(text.startswith("out: largest error of queries without a key 1.19e-07, allowed 0 ") for text in result.failures)


@pytest.mark.parametrize("name", ["dq", "dk", "dv", "dattn_bias", "dsinks"])
def test_a_wrong_gradient_is_named(name, monkeypatch):
    spoil_results(monkeypatch, problems.Inputs, "gradients", lambda found: {n: t * 1.05 if n == name else t for n, t in found.items()})
    result = check_kernel(CPU, cpu("Backward"))
    assert result.failures and all(text.startswith(f"{name}: ") for text in result.failures)
    assert result.worst.result == name and result.worst.share > 1


@pytest.mark.parametrize("pass_", ["Forward", "Decode"])
def test_a_wrong_reference_is_noticed(pass_, monkeypatch):
    attend = tolerance.attend

    def wrong(q, *arguments, **options):
        found = attend(q, *arguments, **options)
        return dataclasses.replace(found, out=found.out * 1.001) if q.dtype == torch.float64 else found

    monkeypatch.setattr(tolerance, "attend", wrong)
    result = check_kernel(CPU, cpu(pass_), quick=True)
    assert not result.passed and not result.failures  # it is not the kernel's fault
    assert "out of the CPU backend in float64 is" in result.inconclusive[0]


def test_merging_is_checked(monkeypatch):
    need("sim")
    variant = next(v for v in SIMULATED if v["pass"] == "Merge")
    assert check_kernel(SIMULATOR, variant).passed
    spoil_results(monkeypatch, torch.ops.volta_fa, "merge_attention_states", lambda found: (found[0] * 1.01, found[1]))
    assert not check_kernel(SIMULATOR, variant).passed


def test_blame_is_shared():
    """A postprocess kernel is checked with one main kernel. Its wrong result counts against it only if no main kernel was right with it."""

    def result(name, pass_, failure, runs_with):
        return KernelResult(name, "family", pass_, runs_with=runs_with, failures=[failure] if failure else [])

    def shared(*failures):
        """Names the kernels that are wrong after sharing blame. Kernels a, b and c run with `finish`, which is checked together with a."""
        mains = [result(name, "Backward", failure, ["finish"]) for name, failure in zip("abc", failures)]
        found = [*mains, result("finish", "BackwardPostprocess", "dq: wrong", ["a"])]
        correctness.share_blame(found)
        return [v.kernel for v in found if not v.passed]

    assert shared("dq: wrong", "", "") == ["a"] and shared("dq: wrong", "dk: wrong", "") == ["a", "b"]
    # nothing that ran with it is right
    assert shared("dq: wrong", "dq: wrong", "dq: wrong") == ["finish"]
    assert shared("dq: wrong", "dk: wrong", "dq: wrong") == ["b", "finish"]
    # it is wrong by itself
    assert shared("", "", "") == ["finish"]


def test_results_survive_json():
    """A result travels between processes as JSON, without loss, also of infinite errors."""
    worst = Worst(math.inf, "out", "rms", error=math.inf, allowed=0.1, problem="p", seed=3)
    result = KernelResult("a", "family", "Forward", problems=2, runs_with=["b"], failures=["c"], inconclusive=["d"], worst=worst)
    assert KernelResult.from_data(json.loads(json.dumps(result.data(), allow_nan=False))) == result


# ---- the machine -------------------------------------------------------------------------------------------------


def fake_nvidia_smi(tmp_path, monkeypatch, script):
    """Puts a shell script named nvidia-smi first on PATH."""
    path = tmp_path / "nvidia-smi"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)


def test_output_of_nvidia_smi(tmp_path, monkeypatch):
    fields = "535.104.05, 88.00.4F, 1290, 1530, 877, 877, 41.2, 300.00, 300.00, 35, 98, Enabled, [N/A], 0x0"
    fake_nvidia_smi(tmp_path, monkeypatch, f"echo '{fields}'")
    found = machine.ask("0")
    assert found["driver"] == "535.104.05" and found["sm_clock_max_mhz"] == 1530 and found["power_limit_w"] == 300
    assert found["mig"] is None and found["throttle_reasons"] == "0x0"
    fake_nvidia_smi(tmp_path, monkeypatch, "echo 'No devices were found'; exit 6")
    assert machine.ask("0") == {"nvidia_smi": "said: No devices were found"}
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    assert machine.ask("0")["nvidia_smi"].startswith("did not run: ")


def test_a_torch_without_code_for_the_card(monkeypatch):
    no_image = RuntimeError("CUDA error: no kernel image is available for execution on the device\nCUDA kernel errors ...")
    monkeypatch.setattr(torch, "zeros", Mock(side_effect=no_image))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla V100-SXM2-16GB")
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_75", "sm_90"])
    said = machine.torch_trouble(Target("cuda", torch.device("cpu")))
    assert "Tesla V100" in said and "it is sm_70, and torch was built for sm_75 sm_90" in said
    assert "no kernel image is available" in said and "pip install" in said and "\n" not in said
    assert machine.torch_trouble(CPU) is None


@pytest.mark.parametrize("kind", ["cuda", "cpu"])
def test_says_where_to_send_the_report_of_a_gpu(kind, tmp_path, capsys):
    settings = Settings(Target(kind, torch.device("cpu")), tmp_path, seed=0, quick=True, tune=False, kernels="*")
    report.write(Findings(settings, trouble=None))
    page = capsys.readouterr().out
    assert (diagnostics.send(tmp_path / "volta_fa-check.json") in page) == (kind == "cuda") and "no host name" in page


def test_says_why_there_is_no_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch.cuda, "init", Mock(side_effect=RuntimeError("Found no NVIDIA driver on your system.\nMore.")))
    assert machine.describe(CPU)["no_gpu"] == "Found no NVIDIA driver on your system."


@pytest.mark.parametrize("driver, native", [(None, True), ((11, 4), False), ((12, 0), True)])
def test_says_that_an_old_driver_compiles_the_kernels(driver, native, monkeypatch, capsys):
    monkeypatch.setattr(diagnostics, "driver_cuda", lambda: driver)
    families = Target("cuda", torch.device("cpu"), (7, 0)).families
    assert families == [{"name": "volta", "native": native}]
    report.introduce({**machine.describe(CPU), "families": families})
    page = capsys.readouterr().out
    assert ("family volta, its machine code" in page) == native and ("older than 525" in page) != native
    assert "made for older cards" not in page


def test_a_report_without_a_gpu_says_what_to_do_about_an_old_driver(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(diagnostics, "driver_cuda", lambda: (11, 4))
    monkeypatch.setattr(diagnostics, "driver_version", lambda: "470.57.02")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert "driver 470.57.02 (CUDA 11.4) is too old for torch" in machine.describe(CPU)["no_gpu"]
    with pytest.raises(CommandError, match="--device cuda: the NVIDIA driver 470.57.02 .* is too old .*; --device cpu works"):
        demo._choose_device("cuda")


def test_a_torch_that_cannot_run_is_the_first_thing_said(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(machine, "torch_trouble", lambda target: "torch has no code for this card: install another")
    status, data = check(tmp_path, "--device", "cpu")
    assert status == 1 and data["trouble"] and data["right"] == []
    page = capsys.readouterr().out
    assert page.startswith("torch has no code for this card: install another") and page.endswith("\nWrong: torch.\n")
