"""Tests of tunings through the library, the log of plans (VOLTA_FA_LOG), and the GPUs that VOLTA_FA_SIM_GPU simulates.

A tuning is JSON with choices of kernels and with failed kernels of one GPU, which the planner heeds. The fixture `force` sets one for a
test; a program reads its GPU's file. tests/plan/tunings.rs tests its contents and their effect on plans. `on(...)` lists the values of the
fixture `backend`: simulator (`sim`) and GPU (`cuda`). `run_process` runs a program with the given environment variables. `refused` checks
that a call raises an error that matches. The operator _plan(batch, seqlen_q, seqlen_k, nheads, nheads_k, headdim, headdim_v, is_causal)
returns a plan as JSON, by default for a V100."""

import json
import os
import re

import pytest
import torch

import volta_fa
from conftest import HAS_CUDA, INFO, REPOSITORY, Case, check, need, on, run_process  # check: results against fp64
from flash_attention import refused
from volta_fa import cli

#: The device of plans for the simulated GPU.
SIMULATOR = -1


def plan(device, seqlen=141, headdim=64, nheads=2, batch=1, **options):
    """Returns the plan of a shape without mask on this device: SIMULATOR or a CUDA device's number."""
    return json.loads(torch.ops.volta_fa._plan(batch, seqlen, seqlen, nheads, nheads, headdim, headdim, False, device=device, **options))


def device_of(backend) -> int:
    """Returns the number of the backend's device for `plan`."""
    return SIMULATOR if backend.machine == "sim" else 0


# ---- tunings set by a test ---------------------------------------------------------------------------------------


def gradients(backend, problem, **options):
    """Returns the results of bwd for a problem, with fwd's in its options."""
    (q, k, v, dout), given = problem
    backend.monkeypatch.setenv("VOLTA_FA_SIMULATE", "1")
    out, lse, _ = torch.ops.volta_fa.fwd(q, k, v, **given)
    wants_bias = "attn_bias" in given
    return torch.ops.volta_fa.bwd(dout, q, k, v, out, lse, **given, **options, attn_bias_requires_grad=wants_bias)


@pytest.mark.parametrize("bias", ["", "qk:fp32"])
@on("sim", "sim-bf16", "cuda")
def test_a_tuning_may_choose_the_deterministic_kernels(backend, force, bias):
    """The gradients are then bitwise those of the deterministic mode, except of a broadcast bias ("qk"), which batch entries share."""
    problem = tensors, options = Case(seqlen_q=70, seqlen_k=90, bias=bias).problem(backend)
    force(choices=[{"pass": "Backward", "deterministic": True}])
    expected = gradients(backend, problem, deterministic=True)
    found = plan(device_of(backend))
    assert (found["mode"]["deterministic"], found["backward"]["deterministic"]) == (False, True)
    assert found["backward"]["main"]["reason"] == "tuned: faster without atomics"
    assert all(map(torch.equal, expected[:3], gradients(backend, problem)[:3]))
    check(backend, *tensors, **options)


@on("sim", "cuda")
def test_a_failed_kernel_is_replaced_or_named(backend, force):
    """Another kernel runs, then the deterministic kernels if all others failed; if those failed too, the error names what failed."""
    problem = tensors, options = Case(seqlen_q=170, seqlen_k=190).problem(backend)
    own = plan(device_of(backend), 170)["backward"]["main"]["name"]
    # both block sizes, because the planner would else take the larger one for its usual reason
    failed = sorted({own, own.removesuffix("_small")})
    force(failed=failed)
    found = plan(device_of(backend), 170)["backward"]["main"]
    assert (found["pass"], found["reason"]) == ("Backward", "another one failed on this card") and found["name"] not in failed
    check(backend, *tensors, **options)
    force(failed=[v["name"] for v in INFO["variants"] if v["pass"] == "Backward"])
    assert plan(device_of(backend), 170)["backward"]["deterministic"]
    gradients(backend, problem)
    force(failed=[v["name"] for v in INFO["variants"] if v["pass"] != "Forward"])
    message = f"volta_fa::bwd: .*excluded because they failed `python -m volta_fa check` on this GPU: .*{own}"
    refused(NotImplementedError, message, gradients, backend, problem)


def test_invalid_tuning_is_refused(force):
    force(choices=[{"pass": "Forward", "variant": "volta_fwd_128x128"}])
    before = json.loads(torch.ops.volta_fa._plan(1, 100, 100, 1, 1, 64, 64, False))
    refused(ValueError, "volta_fa::_set_tuning: tuning: format: got 2, expected 1", torch.ops.volta_fa._set_tuning, '{"format": 2}')
    assert json.loads(torch.ops.volta_fa._plan(1, 100, 100, 1, 1, 64, 64, False)) == before  # the earlier tuning stays
    assert before["forward"]["name"] == "volta_fwd_128x128"


def test_unknown_devices_are_refused():
    refused(ValueError, "device: got -2, expected the number of a CUDA device, or -1: the simulator", plan, -2)
    if not HAS_CUDA:
        refused(RuntimeError, "no CUDA driver", torch.ops.volta_fa._tuning, 0)


@on("sim")
def test_a_plan_names_its_mode(backend):
    mode = {"is_causal": False, "deterministic": True, "fp32_gradients": True, "features": ["fp32_gradients", "alibi"]}
    assert plan(SIMULATOR, features="alibi,fp32_gradients", deterministic=True)["mode"] == mode
    # the ops pad headdims to a multiple of 8, because kernels read whole groups of 8
    assert plan(SIMULATOR, headdim=57) == plan(SIMULATOR, headdim=64)


# ---- files -----------------------------------------------------------------------------------------------------

GPU = {"device": "simulated V100", "driver": "simulator", "volta_fa": volta_fa.__version__}
CHOICE = {"pass": "Forward", "variant": "volta_fwd_128x128"}
GOOD = {"format": 1, **GPU, "failed": ["volta_bwd_64", "volta_bwd_64_small"], "choices": [CHOICE], "note": "a test"}
#: The tuning file of that GPU and driver.
NAME = f"simulated_V100-simulator-{volta_fa.__version__}.json"

# Two calls and two plans, because the file must be read, and its warning printed, once. Prints names of kernels and info()'s facts.
PROGRAM = """
import json, torch, volta_fa
op = torch.ops.volta_fa
q = torch.randn(1, 70, 2, 64, dtype=torch.float16)
exact = torch.nn.functional.scaled_dot_product_attention(*[q.float().transpose(1, 2)] * 3).transpose(1, 2)
for _ in range(2):
    assert (op.fwd(q, q, q)[0] - exact).abs().max() < 2e-3
    planned = json.loads(op._plan(1, 70, 70, 2, 2, 64, 64, False, device=-1))
[tuning] = volta_fa.info()["tuning"]
print(json.dumps([planned["forward"]["name"], planned["backward"]["main"]["name"], tuning]))
"""


def run_with(folder, **environment):
    """Runs PROGRAM in the simulator. Returns the names of the forward and backward kernels, info()'s facts about the file, and stderr."""
    need("sim")
    settings = {"VOLTA_FA_SIMULATE": "1", "VOLTA_FA_TUNING": "", "XDG_DATA_HOME": str(folder), "CUDA_VISIBLE_DEVICES": ""}
    result = run_process(PROGRAM, **{**settings, **environment})
    return *json.loads(result.stdout), result.stderr


def write_tuning(folder, text):
    """Writes the GPU's tuning file into a folder of user data (XDG_DATA_HOME). Returns its path."""
    file = folder / "volta_fa" / "tuning" / NAME
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return file


#: Kernels of PROGRAM's problem without a tuning, and with GOOD.
OWN = ("volta_fwd_64x64_small", "volta_bwd_64_small")
TUNED = ("volta_fwd_128x128", "volta_bwd_varlen_64")


def test_the_file_of_the_gpu_is_read(tmp_path):
    forward, backward, tuning, stderr = run_with(tmp_path)
    assert ((forward, backward), tuning["outcome"], stderr) == (OWN, "missing", "")
    file = write_tuning(tmp_path, json.dumps(GOOD))
    assert tuning["path"] == str(file)
    forward, backward, tuning, stderr = run_with(tmp_path)
    assert ((forward, backward), stderr) == (TUNED, "")
    result = {"outcome": "read", "why": None, "choices": 1, "failed": ["volta_bwd_64", "volta_bwd_64_small"], "overridden": False}
    assert tuning == {"of": "simulator", **GPU, "path": str(file), **result}


def test_the_example_of_the_documentation(tmp_path):
    """The example in docs/reference/tuning-file.md is valid, and prints the log line that the page shows."""
    page = (REPOSITORY / "docs/reference/tuning-file.md").read_text()
    example = json.loads(re.search(r"```json\n(.*?)```", page, re.S)[1])
    (tmp_path / "tuning.json").write_text(json.dumps({**example, "device": "simulated V100", "driver": "simulator"}))
    code = "import torch, volta_fa; q = torch.zeros(2, 50, 2, 128).half(); torch.ops.volta_fa.fwd(q, q, q)"
    assert log_of(code, VOLTA_FA_TUNING=str(tmp_path / "tuning.json")) == re.search(r"```text\n(.*?)```", page, re.S)[1]


def test_the_environment_chooses_the_file(tmp_path):
    write_tuning(tmp_path, json.dumps(GOOD))
    forward, backward, tuning, stderr = run_with(tmp_path, VOLTA_FA_TUNING="0")
    assert ((forward, backward), tuning["outcome"], stderr) == (OWN, "off", "")
    # a relative XDG_DATA_HOME does not count
    forward, _, tuning, _ = run_with(".", HOME=str(tmp_path / "home"))
    assert tuning["path"] == str(tmp_path / "home/.local/share/volta_fa/tuning" / NAME)
    other = tmp_path / "other.json"
    other.write_text(json.dumps({**GOOD, "failed": [], "choices": [{"pass": "Forward", "variant": "volta_fwd_96x96"}]}))
    forward, backward, tuning, stderr = run_with(tmp_path, VOLTA_FA_TUNING=str(other))
    assert (forward, backward, tuning["path"], stderr) == ("volta_fwd_96x96", OWN[1], str(other), "")
    forward, _, tuning, stderr = run_with(tmp_path, VOLTA_FA_TUNING=str(tmp_path / "nosuch"))
    assert (forward, tuning["why"]) == (OWN[0], "there is no such file") and stderr.count("is ignored: there is no such file") == 1


@pytest.mark.parametrize(
    "text, why",
    [
        ("{", "tuning: got EOF"),
        (json.dumps({**GOOD, "device": "Tesla V100-SXM2-16GB"}), "tuning: device: got `Tesla V100-SXM2-16GB`, expected `simulated V100`"),
        (json.dumps({**GOOD, "note": "x" * (1 << 20)}), "tuning: got more than 1048576 bytes"),
    ],
    ids=["no JSON", "device", "size"],
)
def test_an_invalid_file_is_ignored_with_one_warning(tmp_path, text, why):
    file = write_tuning(tmp_path, text)
    forward, backward, tuning, stderr = run_with(tmp_path)
    assert (forward, backward) == OWN and tuning["outcome"] == "ignored" and tuning["why"].startswith(why)
    [line] = stderr.splitlines()
    assert line.startswith(f"volta_fa: the tuning {file} is ignored: {why}") and "check --tune" in line and "VOLTA_FA_TUNING=0" in line


def test_choices_that_no_plan_may_take_are_ignored_with_one_warning(tmp_path):
    """The warning names choices of another family, and of batch-invariant kernels. A choice of these for some numbers of rows would give a
    row other bits alone than in a batch."""
    kernels = [v for v in INFO["variants"] if v["pass"] == "Forward"]
    ignored = {v["name"]: "this GPU does not run the family turing" for v in kernels if v["family"] == "turing"}
    invariant = next(v["name"] for v in kernels if v["batch_invariant"] and v["family"] == "volta")
    ignored[invariant] = "a batch-invariant call takes no choice"
    choices = [{"pass": "Forward", "variant": name, "rows": [0, 200]} for name in ignored]
    write_tuning(tmp_path, json.dumps({**GOOD, "choices": [*choices, CHOICE]}))
    forward, backward, tuning, stderr = run_with(tmp_path)
    assert ((forward, backward), tuning["choices"]) == (TUNED, 1)
    [line] = stderr.splitlines()
    assert len(ignored) > 1 and all(f"{name}: {why}" in line for name, why in ignored.items())


def test_a_pipe_is_no_tuning_file(tmp_path):
    """Opening one would wait for a writer."""
    os.mkfifo(tmp_path / "pipe")
    forward, _, tuning, stderr = run_with(tmp_path, VOLTA_FA_TUNING=str(tmp_path / "pipe"))
    assert (forward, tuning["why"]) == (OWN[0], "tuning: got a folder, pipe or device, expected a file")
    assert len(stderr.splitlines()) == 1


def test_info_prints_what_became_of_the_file(monkeypatch, capsys, force):
    found = {"of": "cuda:0", **GPU, "path": "/p.json", "why": None, "choices": 3, "failed": [], "overridden": False}
    facts = {**volta_fa.info(), "devices": []}
    overridden = {"failed": ["a", "b"], "overridden": True}
    for outcome, more, expected in [
        ("read", overridden, "cuda:0: 3 choices, failed kernels: a, b, overridden in this process (/p.json)"),
        ("missing", {}, "cuda:0: none (/p.json)"),
        ("off", {}, "cuda:0: switched off (VOLTA_FA_TUNING=0) (/p.json)"),
        ("ignored", {"why": "tuning: bad"}, "cuda:0: ignored: tuning: bad (/p.json)"),
    ]:
        monkeypatch.setattr(cli.info, "info", lambda o=outcome, m=more: {**facts, "tuning": [{**found, "outcome": o, **m}]})
        assert cli.main(["info"]) == 0 and f"tuning       {expected}\n" in capsys.readouterr().out
    monkeypatch.undo()
    monkeypatch.setenv("VOLTA_FA_SIMULATE", "1")
    force()
    if INFO["simulator"]:
        assert volta_fa.info()["tuning"][-1]["overridden"]


def test_a_machine_without_a_driver_has_no_tuning(monkeypatch, capsys):
    if HAS_CUDA:
        pytest.skip("this machine has a driver")
    for name, value in (("device_count", 1), ("get_device_capability", (7, 0)), ("get_device_name", "a GPU")):
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    [tuning] = volta_fa.info()["tuning"]
    assert tuning["outcome"] == "unknown" and "no CUDA driver" in tuning["why"]
    assert cli.main(["info"]) == 0
    assert "tuning       cuda:0: unknown: volta_fa::_tuning: no CUDA driver" in capsys.readouterr().out


# ---- the log of plans ------------------------------------------------------------------------------------------


def log_of(code, **environment):
    """Runs a program in the simulator with the log of plans. Returns what it prints on stderr."""
    need("sim")
    return run_process(code, **{"VOLTA_FA_SIMULATE": "1", "VOLTA_FA_LOG": "1", **environment}).stderr


#: Each call twice, then one with a tuning.
CALLS = """
import json, torch, volta_fa
op = torch.ops.volta_fa
q = torch.randn(2, 70, 2, 64, dtype=torch.float16)
few, few_lse = q[:, :50], torch.zeros(2, 2, 50)
for _ in range(2):
    out, lse, _ = op.fwd(q, q, q, is_causal=True)
    op.bwd(out, q, q, q, out, lse, is_causal=True)
    op.bwd(out, q, q, q, out, lse, is_causal=True, deterministic=True)
    op.bwd(few, few, few, few, few, few_lse)
    op.fwd(q, q, q, window_left=3, softcap=2.0)
    op.merge_attention_states(out, lse, out, lse)
op._set_tuning(json.dumps({"format": 1, "choices": [{"pass": "Forward", "variant": "volta_fwd_128x128"}]}))
op.fwd(q, q, q, is_causal=True)
"""


def test_each_plan_is_logged_once():
    lines = log_of(CALLS).splitlines()
    shape = "batch 2, seqlen 70 x 70, 2 heads on 2, headdim 64 / 64"
    usual = "(the cheapest that covers it)"
    preprocess = f"volta_bwd_varlen_preprocess on 2 x 2 x 2 blocks {usual}"
    kernels = {
        f"forward, {shape}, causal": "volta_fwd_64x64_small on 2 x 2 x 2 blocks (smaller blocks, since all run at once)",
        f"backward, {shape}, causal": f"{preprocess}, volta_bwd_64_small on 2 x 2 x 2",
        f"deterministic backward, main in launches: 1, {shape}, causal": f"{preprocess}, volta_bwd_64",
        f"backward in one kernel, {shape.replace('70', '50')}": f"volta_bwd_varlen_fused_64_small on 1 x 2 x 2 blocks {usual}",
        f"forward, {shape}, window 3:all, with softcap": f"volta_fwd_softcap_64x64 on 1 x 2 x 2 blocks {usual}",
        "merge, batch 2, seqlen 70, 2 heads, headdim_v 64": "volta_merge on ",
    }
    *logged, tuned = lines
    assert len(logged) == len(kernels)
    for line, (problem, kernel) in zip(logged, kernels.items()):
        assert line.startswith(f"volta_fa: {problem}: {kernel}"), line
    assert tuned == f"volta_fa: forward, {shape}, causal: volta_fwd_128x128 on 2 x 1 x 2 blocks (tuned)"


def test_log_counts_launches_and_names_what_runs():
    """A backward pass that stores scores takes a launch for each part of the batch. fwd_fast does not prepare K and V again."""
    code = """
    import json, torch, volta_fa
    op = torch.ops.volta_fa
    x = torch.zeros(160, 2, 264, dtype=torch.float16)
    k = torch.zeros(450, 2, 264, dtype=torch.float16)
    # 602 sequences. Only the first and the last are not empty
    cu = [torch.tensor([0] + [n] * 601 + [len(t)], dtype=torch.int32) for n, t in ((140, x), (300, k))]
    lengths = dict(cu_seqlens_q=cu[0], cu_seqlens_k=cu[1], max_seqlen_q=140, max_seqlen_k=300)
    op.bwd(x, x, k, k, x, torch.zeros(2, 160), **lengths)
    op._set_tuning(json.dumps({"format": 1, "choices": [{"pass": "FastForward", "variant": "turing_fast_fwd_64x64"}]}))
    x = torch.zeros(1, 70, 1, 64, dtype=torch.float16)
    op.fwd_fast(x, x, x, prepared=op.prepare_fast(x, x))
    op.fwd_fast(x, x, x)
    """
    stored, *fast = log_of(code, VOLTA_FA_SIM_GPU="t4").splitlines()
    assert stored.startswith("volta_fa: backward without atomics, scores and gradients in launches: 2, batch 602, "), stored
    prepare, forward = "turing_fast_fwd_varlen_prepare_64 on ", "turing_fast_fwd_64x64 on "
    assert fast[0].startswith(f"volta_fa: fast prepare, batch 1, seqlen 70, 1 heads, headdim 64 / 64: {prepare}"), fast
    assert f": {forward}" in fast[1] and f": {prepare}" in fast[2] and forward in fast[2] and len(fast) == 3, fast


def test_the_log_is_bounded():
    """Plans with a kernel and reason that were logged before are not logged again."""
    code = """
    import torch, volta_fa
    for seqlen in range(1, 400):
        q = torch.randn(1 + seqlen % 3, seqlen, 1, 8, dtype=torch.float16)
        torch.ops.volta_fa.fwd(q, q[:, :1], q[:, :1])
    """
    lines = log_of(code, VOLTA_FA_SIMULATE="launches").splitlines()
    chosen = [line[line.index(": volta_") :].split(" on ")[0] + line[line.rindex("(") :] for line in lines]
    assert 1 <= len(lines) == len(set(chosen)) < 10, lines


@pytest.mark.parametrize("value", ["", "0"])
def test_no_log_unless_asked(value):
    assert log_of(CALLS, VOLTA_FA_LOG=value) == ""


def test_an_invalid_log_variable_is_refused():
    code = """
    import sys, torch, volta_fa
    q = torch.randn(1, 4, 1, 8, dtype=torch.float16)
    for _ in range(2):
        try:
            torch.ops.volta_fa.fwd(q, q, q)
        except ValueError as error:
            print(error, file=sys.stderr)
    """
    assert log_of(code, VOLTA_FA_LOG="yes").count("volta_fa::fwd: VOLTA_FA_LOG: got `yes`, expected 0 or 1") == 2


# ---- the GPU that is simulated -----------------------------------------------------------------------------------


@pytest.fixture
def problem(backend):
    return Case(seqlen_q=70, seqlen_k=60, headdim=64, is_causal=True).problem(backend)


def timed(backend, problem) -> list[dict]:
    """Returns the simulator's timing report of each kernel launch."""
    (q, k, v, _), options = problem
    return backend.launches(lambda: torch.ops.volta_fa.fwd(q, k, v, **options))


@pytest.mark.parametrize(
    "gpu,family,cycles",
    [("v100", "volta", 0), ("pg503", "volta", 0), ("t4", "turing", 8), ("rtx2080ti", "turing", 16), ("titanrtx", "turing", 8)],
)
@on("sim")
def test_a_gpu_runs_its_own_family(backend, problem, gpu, family, cycles):
    """`cycles`: those of an HMMA.1688, which an RTX 2080 Ti accumulates in fp32 at half the rate."""
    backend.monkeypatch.setenv("VOLTA_FA_SIM_GPU", gpu)
    [launch] = timed(backend, problem)
    assert launch["kernel"].startswith(f"{family}_fwd_")
    timing = launch["timing"]
    assert timing["util"]["tensor"] > 0 and ("HMMA.1688" in timing["mix"]) == (family == "turing")
    assert not cycles or timing["counters"]["tensor_busy"] == cycles * timing["mix"]["HMMA.1688"]


#: Compute capability, SMs and bytes of shared memory of a block.
V100 = {"major": 7, "minor": 0, "sms": 80, "shared_bytes": 96 * 1024}
T4 = {"major": 7, "minor": 5, "sms": 40, "shared_bytes": 64 * 1024}


@pytest.mark.parametrize("gpu,numbers,kernel", [("v100", V100, "volta_fwd_128x128"), ("t4", T4, "turing_fwd_128x128")])
@on("sim")
def test_plans_are_for_the_simulated_gpu(backend, gpu, numbers, kernel):
    """VOLTA_FA_SIM_GPU selects the kernels' family, and the plan is that of a real GPU with the same numbers."""
    backend.monkeypatch.setenv("VOLTA_FA_SIM_GPU", gpu)
    found = plan(SIMULATOR, 4096, 128, nheads=40)
    assert found["forward"]["name"] == kernel
    assert found["backward"]["main"]["family"] == found["forward"]["family"]
    # the simulator as device ignores numbers, and without a device they describe the GPU
    assert json.loads(torch.ops.volta_fa._plan(1, 4096, 4096, 40, 40, 128, 128, False, **numbers)) == found


@on("sim")
def test_ptx_kernels_run_untimed(backend, problem):
    """Volta's kernels on a T4 are PTX. The simulator runs their sm_70 code instead, and refuses to time it."""
    backend.monkeypatch.setenv("VOLTA_FA_SIM_GPU", "t4")
    backend.monkeypatch.setenv("VOLTA_FA_FAMILY", "volta")
    (q, k, v, _), options = problem
    check(backend, q, k, v, **options)
    refused(NotImplementedError, "volta_fwd_.*: a t4 gets its PTX, which the simulator cannot time", timed, backend, problem)
