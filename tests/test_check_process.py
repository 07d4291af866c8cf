"""`python -m volta_fa check`: kernels that crash their process, interrupted and continued checks, speed (`fast`), and tuning.

The check runs kernels in subprocesses (check/isolation.py), because a kernel that hangs or faults destroys its CUDA context. It kills a
process after a timeout and tries its kernel once more alone. check/state.py saves results, so that an interrupted check continues. Tests
use fake kernels (`troubled`), fake GPUs, and the CPU backend. A Target is the device to check: CPU, SIMULATOR (device -1; its kernels are
SIMULATED) or a GPU. test_check.py tests what a check finds. It has `check`, which runs the command and returns its exit status and JSON,
and `fail`, which raises "the launch failed"."""

import dataclasses
import json
import math
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

import volta_fa
import volta_fa.check
from conftest import INFO, REPOSITORY, need
from test_check import CPU, SIMULATED, SIMULATOR, check, fail
from volta_fa import diagnostics
from volta_fa.check import atomics, correctness, isolation, kernels, machine, performance, report, state, tune
from volta_fa.check.correctness import DeviceLost, KernelResult
from volta_fa.check.kernels import Target
from volta_fa.check.performance import OUT_OF_TIME, VOLTA_FA, Point, Speeds
from volta_fa.cli import main

# ---- a GPU that may be lost --------------------------------------------------------------------------------------


def troubled(target, variant, seed, quick):
    """Replaces `correctness.check_kernel` in the subprocess: does what the kernel's name says."""
    name = variant["name"]
    result = KernelResult(name, "family", "Forward", problems=1)
    if name == "dies":
        os._exit(3)
    if name in ("dies once", "busy") and not (trial := variant["folder"] / name).exists():
        trial.touch()
        os._exit(3)
    if name == "busy":
        result.inconclusive.append("out of memory")
    if name == "sleeps":
        time.sleep(0.8)
    if name == "hangs":
        time.sleep(60)
    if name == "loses":
        result.failures.append("AcceleratorError: an illegal memory access")
        raise DeviceLost(result)
    return result


def unloaded(target, variant, quick):
    """Replaces `correctness.load_kernel`, with nothing to load."""


def slowly_loaded(target, variant, quick):
    time.sleep(1)


def both_loaded(target, variant, quick):
    """Waits until two kernels are loaded."""
    (variant["folder"] / variant["name"]).touch()
    while len(list(variant["folder"].iterdir())) < 2:
        time.sleep(0.01)


def kernels_named(*names, folder=None):
    """Returns fake kernels. Those that behave differently the second time remember the first in `folder`."""
    return [{"name": name, "family": "f", "pass": "Forward", "folder": folder} for name in names]


def isolated(variants, processes=1, seconds=math.inf, load=unloaded, target=CPU):
    """Returns the results of `check_isolated` with this number of processes at a time. Each checks for `seconds`."""
    options = {"seed": 0, "quick": True, "seconds": seconds, "at_a_time": processes, "check": troubled, "load": load}
    return list(isolation.check_isolated(target, variants, **options))


def test_crashing_kernel_is_named(monkeypatch):
    monkeypatch.setitem(isolation.TIMEOUTS, "check", 1.5)
    found = {v.kernel: v.failures for v in isolated(kernels_named("fine", "dies", "hangs", "loses", "fine too"), processes=2)}
    assert found == {
        "fine": [],
        "dies": ["the process died (check)"],
        "hangs": ["no answer (check) within 3 s"],  # of the second trial, which has twice the time
        "loses": ["AcceleratorError: an illegal memory access"],
        "fine too": [],
    }


def test_a_kernel_that_another_took_down_is_right(tmp_path):
    """A kernel passes if it loses its process once but not alone: under MPS, another process' fault ends all, and a busy GPU is late."""
    [result] = isolated(kernels_named("dies once", folder=tmp_path))
    assert result.kernel == "dies once" and result.passed
    assert result.note == "lost its process once, and not when it ran alone: the process died (check)"


def test_a_second_trial_in_vain_is_the_last(tmp_path):
    """After a second trial that could not check its kernel (out of memory), no other kernel gets one. All are reported as unchecked."""
    found = isolated(kernels_named("busy", "dies", folder=tmp_path))
    assert [(v.kernel, v.failures, v.inconclusive, v.note) for v in found] == [
        ("busy", [], ["out of memory", "the process died (check)"], ""),
        ("dies", [], ["no second trial: the process died (check)"], ""),
    ]


def test_second_trials_share_a_limit(monkeypatch):
    monkeypatch.setitem(isolation.TIMEOUTS, "check", 0.5)
    monkeypatch.setattr(isolation, "SECOND_TRIALS", 0.5)  # seconds for all
    found = isolated(kernels_named("hangs", "hangs"), processes=2)
    assert found[0].failures == ["no answer (check) within 1 s"]
    assert not found[1].failures and found[1].inconclusive == ["no second trial: no answer (check) within 0 s"]


class OneProcess(Target):
    """A GPU with memory for one process. `kind` is a folder, in which the first process leaves a file."""

    def make_current(self):
        try:
            (Path(self.kind) / "started").touch(exist_ok=False)
        except FileExistsError:
            os._exit(3)


def test_processes_that_do_not_start_lend_no_time_to_others(tmp_path):
    """The limit of 1.2 s is each process's own: one that starts, of four, begins checks of 0.8 s for 1.2 s."""
    target = OneProcess(str(tmp_path), torch.device("cpu"))
    assert len(isolated(kernels_named(*["sleeps"] * 9), processes=4, seconds=1.2, target=target)) == 2


def test_loading_does_not_count(monkeypatch):
    """Three kernels take a second each to load, and no time to check: neither the limit nor the timeout of checks ends them."""
    monkeypatch.setitem(isolation.TIMEOUTS, "check", 0.8)
    found = isolated(kernels_named("a", "b", "c"), seconds=0.5, load=slowly_loaded)
    assert [v.kernel for v in found] == ["a", "b", "c"] and all(v.passed for v in found)
    assert all(v.load_seconds >= 1 and v.check_seconds < 0.5 for v in found)


def test_kernels_load_and_run_at_the_same_time(tmp_path):
    """Each of two kernels waits for the other to load."""
    found = isolated(kernels_named("a", "b", folder=tmp_path), processes=2, load=both_loaded)
    assert len(found) == 2 and all(v.passed for v in found)


def test_a_process_for_each_core_as_far_as_memory_suffices(monkeypatch):
    """Cases: free GiB of GPU memory, kernels to check, expected processes, on a machine of 12 cores."""
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
    [result] = isolated(kernels_named("a", "b"), processes=2, target=Unstartable(kind, torch.device("cpu")))
    assert result.inconclusive == [why] and not result.failures


# ---- what is not checked -----------------------------------------------------------------------------------------


@pytest.fixture
def short_of_time(monkeypatch):
    """Makes a check run its first kernel alone, and measure no speed. Returns a function that lets it run all."""
    monkeypatch.setattr(performance, "measure", lambda *_: Speeds(note="not now"))
    find = volta_fa.check._results
    monkeypatch.setattr(volta_fa.check, "_results", lambda settings, variants, *rest: find(settings, variants[:1], *rest))
    return lambda: monkeypatch.setattr(volta_fa.check, "_results", find)


def test_an_unfinished_check_is_incomplete_and_continues(short_of_time, tmp_path, capsys):
    assert isolated(kernels_named("fine"), seconds=0.0) == []
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
    status, data = check(tmp_path, *shlex.split(command)[4:])  # after `python -m volta_fa check`
    assert status == 0 and data["continued"] == 1 and len(data["right"]) == 4 and data["not_checked"] == []
    assert "continues an unfinished check: 1 of 4 kernels are done" in capsys.readouterr().out
    status, data = check(tmp_path, *arguments)
    assert status == 0 and data["continued"] == 0  # a finished check starts again


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
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("Wrong: cpu_Forward_float32. 1 of 2 kernels are not checked. To finish: python")
    short_of_time()
    status, data = check(tmp_path, *arguments)
    assert status == 1 and data["wrong"] == ["cpu_Forward_float32"] and data["not_checked"] == []
    assert seen == ["cpu_Forward_float32", "cpu_Forward_float16"]  # each once


#: What replaces text of a saved state ("": all of it), and the note about it.
SPOILED = {
    "torch": (f'"torch": "{torch.__version__}"', '"torch": "2.4.0"', f"its torch was 2.4.0, and is {torch.__version__}"),
    "gpu": ('"gpu": "cpu"', '"gpu": "Tesla T4 (0)"', "its gpu was Tesla T4 (0), and is cpu"),
    "seed": ('"seed": 0', '"seed": 1', "its seed was 1, and is 0"),
    "other fields": ('"kernel"', '"kernels"', "it is damaged"),
    "binary": ("", "\0\x80", "it is damaged"),
    "no key": ("", "[]\n", "it is damaged"),
    "empty": ("", "", "it is damaged"),
}


@pytest.mark.parametrize("what", SPOILED)
def test_a_damaged_or_foreign_state_is_ignored_with_a_note(what, short_of_time, tmp_path, capsys):
    old, new, note = SPOILED[what]
    arguments = ["--device", "cpu", "--quick", "--kernels", "cpu_Forward_float*"]
    assert check(tmp_path, *arguments)[0] == 3
    path = tmp_path / state.FILE
    path.write_text(path.read_text().replace(old, new) if old else new)
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
    path.write_text(path.read_text()[:-20])  # a line has more than 20 characters
    second = state.State.open(path, {"seed": 0})
    assert [v.kernel for v in second.results] == ["a", "b"] and not second.note
    second.add(KernelResult("c", "f", "Forward", 1))
    assert [v.kernel for v in state.State.open(path, {"seed": 0}).results] == ["a", "b", "c"]


def test_a_state_that_cannot_be_written_is_an_error(tmp_path, capsys):
    (tmp_path / state.FILE).mkdir()
    assert main(["check", "--output", str(tmp_path), "--device", "cpu", "--quick"]) == 2
    assert f"--output {tmp_path}: {state.FILE}: Is a directory" in capsys.readouterr().err


def test_results_survive_an_interruption_of_the_timing(monkeypatch, tmp_path):
    with monkeypatch.context() as patch:
        patch.setattr(performance, "measure", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            volta_fa.check.run_check(volta_fa.check.Settings(CPU, tmp_path, quick=True, kernels="cpu_Forward_float*"))
    status, data = check(tmp_path, "--device", "cpu", "--quick", "--kernels", "cpu_Forward_float*")
    assert status == 0 and data["continued"] == 2 and not (tmp_path / state.FILE).exists()


def test_results_hold_for_one_build_gpu_and_driver(monkeypatch, tmp_path):
    """`made_on` identifies them: a hash of the libraries, 16 hexadecimal digits, the GPU's name and UUID, the driver's version."""
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


def test_the_measurement_of_speed_avoids_failed_kernels_alone(monkeypatch, tmp_path):
    """The measurement of speed avoids kernels that failed, but not kernels that were not checked."""
    need("sim")
    seen = []
    monkeypatch.setattr(performance, "measure", lambda target, failed, *_: seen.append(failed) or Speeds(note="not now"))

    def one_wrong(settings, variants, *_):
        yield KernelResult(variants[0]["name"], "volta", "Forward", 1, failures=["wrong"])
        yield KernelResult(variants[1]["name"], "volta", "Forward", 1, inconclusive=["out of memory"])

    monkeypatch.setattr(volta_fa.check, "_results", one_wrong)
    status, data = check(tmp_path, "--device", "simulator", "--kernels", "volta_fwd_*")
    assert status == 1 and seen == [data["wrong"]] and len(seen[0]) == 1 and len(data["not_checked"]) > 5


@pytest.mark.parametrize("preferred", ["turing", "volta"])
def test_the_preferred_family_is_first(preferred, monkeypatch):
    families = [{"name": name, "native": False} for name in ("turing", "volta")]
    monkeypatch.setattr(Target, "families", families if preferred == "turing" else families[::-1])
    order = [v["family"] for v in kernels.wanted(Target("cuda", torch.device("cpu")), INFO["variants"])]
    assert order == sorted(order, reverse=preferred == "volta") and {*order} == {"turing", "volta"}


def test_a_kernel_is_loaded_with_those_that_run_with_it(monkeypatch):
    need("sim")
    loaded = []
    monkeypatch.setattr(torch.ops.volta_fa, "_preload", lambda name, device: loaded.append(name))
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
def test_lack_of_memory_has_many_names(text, monkeypatch):
    """Errors of CUDA and its libraries that are not torch.cuda.OutOfMemoryError. Where the GPU's own figures lack memory, the report says
    so, and it is no fault."""
    assert kernels.lacks_memory(RuntimeError(text)) and not kernels.lacks_memory(RuntimeError("an illegal memory access"))
    monkeypatch.setattr(performance, "card_figures", Mock(side_effect=RuntimeError(text)))
    speeds = measure(seconds=-1)
    assert speeds.troubles == [] and speeds.missing == "the card's figures: out of memory"


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
    """A causal backward pass has 10 * nheads * seqlen^2 * headdim / 2 operations; its TFLOP/s are compared with the predicted ones."""
    point = Point("backward", headdim=128, seqlen=2048, causal=True, nheads=40, ms={VOLTA_FA: 2.0}, predicted=(50.0, 60.0))
    assert point.flops == 10 * 40 * 2048**2 * 128 / 2
    assert point.of_prediction == pytest.approx(point.flops / 2e-3 / 1e12 / 50)
    why = {"math": performance.OUT_OF_MEMORY, VOLTA_FA: OUT_OF_TIME}
    missing = Point("forward", headdim=128, seqlen=2048, causal=True, nheads=32, missing=why)
    report._show_speeds(Speeds(points=[point, missing], predictions={"points": []}))
    page = capsys.readouterr().out
    assert "2048, 128, causal" in page and "memory" in page and f"{point.of_prediction:.0%}" in page
    assert "1 figures were left out" in page and max(map(len, page.splitlines())) <= 100


def measure(failed=(), seconds=60):
    """Returns the speeds on the CPU backend of a quick measurement that ends after `seconds`, without failed kernels."""
    return performance.measure(CPU, failed, time.monotonic() + seconds, quick=True, advance=lambda at: None)


def test_without_time_left_points_are_listed_and_not_measured(monkeypatch):
    monkeypatch.setattr(performance, "card_figures", lambda target: {})
    speeds = measure(seconds=-1)
    assert speeds.points and all(set(p.missing.values()) == {OUT_OF_TIME} and not p.ms for p in speeds.points)


def test_failed_kernel_does_not_run_again(monkeypatch):
    """Neither the measurement of speed nor of a tuning runs a failed kernel, which might hang."""
    need("sim")
    seen = []

    def planned(point, target, name):
        # batch, seqlen_q, seqlen_k, nheads, nheads_k, headdim, headdim_v, is_causal
        shape = (1, point.seqlen, point.seqlen, point.nheads, point.nheads, point.headdim, point.headdim, point.causal)
        seen.append(json.loads(torch.ops.volta_fa._plan(*shape, device=-1))["forward"]["name"])
        return lambda: None

    monkeypatch.setattr(performance, "_ours", planned)
    monkeypatch.setattr(performance, "card_figures", lambda target: {})
    # heads of the measured problems: with 200, unlike 32, one plain kernel (no stream-K) is planned at all lengths, unless it failed
    monkeypatch.setattr(performance, "HEADS", {"forward": 200})
    for failed in ("volta_fwd_64x64", "volta_fwd_64x64_medium", "volta_fwd_64x64_small"):
        seen.clear()
        measure([failed])
        assert seen and failed not in seen
    # headdims above 32, up to 64
    shape = tune.Class("Backward", headdim=64, above=32, seqlen=512, nheads=40, causal=False)
    alternatives = [tune.Alternative({}), tune.Alternative({"deterministic": True}, deterministic=True)]
    of_headdim = [v["name"] for v in SIMULATED if v["pass"] == "Backward" and v["headdim"] >= 64]
    # the index of the alternative that the plan takes: with volta_bwd_64 failed another kernel with atomics, else none of the two
    assert tune._planned(SIMULATOR, shape, alternatives, ["volta_bwd_64"]) == 0
    assert tune._planned(SIMULATOR, shape, alternatives, of_headdim) is None


def test_errors_of_the_measurement_of_speed_are_recorded(monkeypatch):
    monkeypatch.setattr(performance, "card_figures", lambda target: fail())
    monkeypatch.setattr(performance, "_pytorch", fail)
    speeds = measure()
    assert speeds.troubles == ["the card's figures: RuntimeError: the launch failed"]
    assert all(p.ms[VOLTA_FA] > 0 and p.missing["math"] == "the launch failed" for p in speeds.points)
    monkeypatch.setattr(performance, "_ours", fail)
    assert "volta_fa, forward, seqlen 128, headdim 64: RuntimeError: the launch failed" in measure().troubles


@pytest.mark.parametrize("architecture", ["sm_70", "sm_75", "sm_90"])
def test_the_kernel_that_adds_compiles(architecture, tmp_path):
    """The check measures the speed of atomic additions with a kernel in PTX. ptxas of the installed triton assembles it."""
    pytest.importorskip("triton")
    import triton

    ptxas = Path(triton.__file__).parent / "backends/nvidia/bin/ptxas"
    (tmp_path / "adds.ptx").write_text(atomics._PTX)
    command = [ptxas, f"-arch={architecture}", tmp_path / "adds.ptx", "-o", tmp_path / "adds.cubin"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_classes_are_apart():
    """Classes of a tuning (ranges of a problem's sizes with one choice of kernel) do not overlap, and contain their measured shape."""
    need("sim")
    listed = [class_ for class_, _ in tune.classes(SIMULATOR, INFO["variants"], ())]
    assert len(listed) <= tune.MAX_CHOICES

    def has(class_, shape):
        bounds = class_.bounds
        numbers = {"headdim": shape.headdim, "headdim_v": shape.headdim, "seqlen_q": shape.seqlen, "seqlen_k": shape.seqlen}
        numbers["rows"] = shape.seqlen * shape.nheads
        inside = all(bounds[name][0] <= number <= bounds[name][1] for name, number in numbers.items())
        return inside and bounds["pass"] == shape.pass_ and bounds["is_causal"] == shape.causal

    for shape in listed:
        assert [c for c in listed if has(c, shape)] == [shape]


def timed(monkeypatch, ms):
    """Makes each alternative of a tuning (a kernel or a mode) take the time that ms(alternative) returns."""
    monkeypatch.setattr(tune, "_work", lambda target, class_, alternative: alternative)
    monkeypatch.setattr(tune, "median_ms", lambda alternative, *_, **__: ms(alternative))


def test_only_what_is_clearly_faster_is_written(monkeypatch, tmp_path):
    need("sim")
    timed(monkeypatch, lambda a: 0.97 if a.deterministic else 1.0)  # 3% are within the noise of measurements
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
    monkeypatch.setattr(torch.ops.volta_fa, "_tuning", lambda number: json.dumps(about))
    failed = [KernelResult(f"volta_fwd_64x64_{size}", "volta", "Forward", 1, failures=["wrong"]) for size in ("medium", "small")]
    seen = []
    tuned = tune.tune(SIMULATOR, [*failed, KernelResult("volta_fwd_64x64", "volta", "Forward", 1)], time.monotonic() + 60, seen.append)
    assert tuned.failed == ["volta_bwd_64", *(result.kernel for result in failed)] and not tuned.trouble  # what failed before stays
    assert json.loads((tmp_path / "card.json").read_text())["failed"] == tuned.failed
    assert not any(at.startswith("Forward") and "headdim 64" in at for at in seen)  # nothing to compare with
    assert "plans will not take volta_bwd_64, volta_fwd_64x64_medium, volta_fwd_64x64_small" in tuned.summary
    about["outcome"] = "off"
    assert "VOLTA_FA_TUNING=0" in tune.tune(SIMULATOR, [], time.monotonic() + 60, seen.append).trouble
    about["outcome"] = "missing"
    with monkeypatch.context() as patch:  # a class whose plan is none of the alternatives is not measured
        patch.setattr(tune, "_planned", lambda *_: None)
        nothing = tune.tune(SIMULATOR, [], time.monotonic() + 60, seen.append)
        assert nothing.measured == 0 and nothing.left_out > 0 and not nothing.trouble
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
