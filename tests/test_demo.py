"""`python -m volta_fa demo` (`make run`): it runs, accepts right attention functions and rejects wrong ones.

The demo trains a small GPT with volta_fa's attention and with PyTorch's. Losses may differ as much as those of a control, which is
PyTorch's attention rounded differently, times a margin (demo/agreement.py). Gradients are compared alike. It then simulates one layer on a
V100 and a T4."""

import functools
import math
import os
import re
from pathlib import Path

import pytest
import torch

import volta_fa
import volta_fa.demo
from conftest import run_python
from volta_fa.cli import main
from volta_fa.demo import agreement, run_demo, simulated, train
from volta_fa.demo.model import RoundedAttention, torch_attention, volta_attention
from volta_fa.demo.train import Settings

CPU = torch.device("cpu")
SMALL = Settings(layers=2, nheads=2, headdim=32, seqlen=64, batch=4, steps=12, learning_rate=3e-3, warmup=4)


def causal_attention(q, k, v, *, scale=1.0, diagonal=0):
    """Causal attention by single operations. `scale` other than 1 and `diagonal` other than 0 make it wrong."""
    n = q.shape[1]
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * (scale * q.shape[-1] ** -0.5)
    visible = torch.ones(n, n, dtype=torch.bool, device=q.device).tril(diagonal)
    visible[0, 0] = True  # whatever the diagonal, no row without a key
    return torch.einsum("bhij,bjhd->bihd", scores.masked_fill(~visible, -math.inf).softmax(-1).to(v.dtype), v)


#: Attention functions that the demo must accept, and others that it must reject.
RIGHT = {"volta_fa": volta_attention, "written out": causal_attention, "rounded differently": RoundedAttention(99)}
WRONG = {
    "scale 2% up": functools.partial(causal_attention, scale=1.02),
    "scale 2% down": functools.partial(causal_attention, scale=0.98),
    "sees the next key": functools.partial(causal_attention, diagonal=1),
    "misses its own key": functools.partial(causal_attention, diagonal=-1),
    "gradient of v lost": lambda q, k, v: volta_attention(q, k, v.detach()),
    "not a number": lambda q, k, v: volta_attention(q, k, v) * math.nan,
}


@pytest.fixture
def no_simulation(monkeypatch):
    """Skips the simulation, which takes seconds."""
    monkeypatch.setattr(volta_fa.demo, "run_simulated", lambda: True)


@pytest.mark.usefixtures("no_simulation")
def test_the_command(tmp_path, capsys):
    assert main(["demo", "--device", "cpu", "--steps", "3", "--output", str(tmp_path / "new" / "folder")]) == 0
    printed = capsys.readouterr().out
    for expected in ("CPU backend", torch.__version__, "time of a step", "peak memory", "losses.png", "agree to within rounding"):
        assert expected in printed
    assert (tmp_path / "new" / "folder" / "losses.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
@pytest.mark.skipif(not torch.distributed.is_available(), reason="no torch.distributed")
def test_ranks(tmp_path, monkeypatch, capfd):
    """Two processes with half of each window have the losses of one."""
    path = str(Path(volta_fa.__file__).parents[1])
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [path, os.environ.get("PYTHONPATH")])))
    monkeypatch.setattr(volta_fa.demo, "settings_for", lambda *arguments, **options: SMALL)
    assert main(["demo", "--device", "cpu", "--ranks", "2", "--output", str(tmp_path)]) == 0
    printed = capfd.readouterr().out
    assert "2 processes over gloo" in printed and printed.count("agree to within rounding") == 1
    assert [entry.name for entry in tmp_path.iterdir()] == ["losses.png"]


@pytest.mark.parametrize("attention", RIGHT.values(), ids=RIGHT)
def test_passes_right_attention(attention, tmp_path):
    assert run_demo(SMALL, CPU, tmp_path, attention=attention).agree


@pytest.mark.parametrize(
    "attention",
    [
        pytest.param(attention, marks=[] if name in ("scale 2% up", "gradient of v lost") else [pytest.mark.slow])
        for name, attention in WRONG.items()
    ],
    ids=WRONG,
)
def test_catches_wrong_attention(attention, tmp_path, capsys):
    comparison = run_demo(SMALL, CPU, tmp_path, attention=attention)
    assert not comparison.agree and not comparison.gradients_agree
    assert "disagree" in capsys.readouterr().out


@pytest.mark.usefixtures("no_simulation")
def test_disagreement_is_the_exit_status(tmp_path, monkeypatch):
    wrong = functools.partial(run_demo, SMALL, attention=WRONG["scale 2% up"])
    monkeypatch.setattr(volta_fa.demo, "run_demo", lambda settings, *arguments: wrong(*arguments))
    assert main(["demo", "--device", "cpu", "--output", str(tmp_path)]) == 1


@pytest.mark.skipif(not volta_fa.info()["simulator"], reason="built without the simulator")
def test_the_layer_on_simulated_gpus(monkeypatch, capsys):
    """The simulation of a small layer reports times and checks results. With changed expectations it reports dk as wrong and fails."""
    monkeypatch.setattr(simulated, "BATCH", 1)
    monkeypatch.setattr(simulated, "SEQLEN", 128)
    monkeypatch.setattr(simulated, "NHEADS", 2)
    simulated._expected.cache_clear()
    assert volta_fa.demo.run_simulated()
    printed = capsys.readouterr().out
    speeds = (f" {gpu.pytorch_tflops:.1f} " for gpu in simulated.GPUS)  # of PyTorch's kernels
    for expected in ("simulating a V100", "simulating a T4", "TFLOP/s", "tensor cores", "█", "All results are right", *speeds):
        assert expected in printed
    _, parts = simulated._expected()
    next(part for part in parts if part.result == "dk").exact.add_(1)
    assert not volta_fa.demo.run_simulated()
    assert "Wrong: dk on the V100, dk on the T4." in capsys.readouterr().out
    simulated._expected.cache_clear()


@pytest.mark.skipif(not volta_fa.info()["simulator"], reason="built without the simulator")
def test_the_first_make_run_compiles_the_demos_kernels(monkeypatch):
    """The Makefile lists words of kernels' names. A first `make run` compiles these kernels alone; the demo needs no others."""
    makefile = (Path(__file__).parents[1] / "Makefile").read_text()
    compiled = re.search("^DEMO_KERNELS = (.*)$", makefile, re.MULTILINE)[1].split(",")
    monkeypatch.setattr(simulated, "simulate", functools.partial(simulated.simulate, mode="launches"))
    for gpu in simulated.GPUS:
        kernels = [report["kernel"] for reports in simulated._time(gpu) for report in reports]
        assert len(kernels) >= 4 and all(any(part in kernel for part in compiled) for kernel in kernels)


def test_pytorchs_speed_is_that_of_the_figures():
    """The demo has TFLOP/s of PyTorch's kernels as constants. They are those of the table of models in docs/reference/figures.md."""
    page = (Path(__file__).parents[1] / "docs/reference/figures.md").read_text()
    lines = page.split("<!-- begin models -->")[1].split("<!-- end models -->")[0].splitlines()
    columns = next(line for line in lines if line.startswith("| model and use")).split(" | ")
    name = f"| {simulated.LAYER}, training: {simulated.BATCH} x {simulated.SEQLEN}, heads {simulated.NHEADS}"
    row = next(line for line in lines if line.startswith(name)).split(" | ")
    for gpu in simulated.GPUS:
        assert float(row[columns.index(f"{gpu.title}: PyTorch's TFLOP/s (ratio)")].split()[0]) == gpu.pytorch_tflops


def test_without_a_disassembler_the_simulation_says_why(tmp_path):
    # a fresh process and folder: without the listings that earlier tests left in memory and on disk
    code = "import volta_fa.demo; assert volta_fa.demo.run_simulated()"
    out = run_python(code, fresh=True, VOLTA_SIM_NVDISASM="/nowhere/nvdisasm", VOLTA_SIM_LISTINGS=str(tmp_path))
    assert "for lack of a disassembler" in out


@pytest.mark.slow
@pytest.mark.parametrize(
    "attention, agree",
    [(volta_attention, True), (causal_attention, True), (WRONG["scale 2% up"], False), (WRONG["misses its own key"], False)],
    ids=["volta_fa", "written out", "scale 2% up", "misses its own key"],
)
def test_judges_half_precision(attention, agree, tmp_path):
    """Trains in fp16, as on GPUs. After 60 steps scores are large enough that a wrong scale shows."""
    half = Settings(**{**vars(SMALL), "half": True, "steps": 60})
    assert run_demo(half, CPU, tmp_path, attention=attention).agree is agree


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_on_a_gpu(no_simulation, tmp_path, capsys):
    assert main(["demo", "--device", "cuda", "--steps", "30", "--output", str(tmp_path)]) == 0
    assert f"family {volta_fa.kernel_family(torch.device('cuda'))}" in capsys.readouterr().out


@pytest.mark.parametrize("steps", ["0", "-1", "many"])
def test_refuses_a_number_of_steps(steps, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["demo", "--steps", steps])
    assert "expected a whole number above 0" in capsys.readouterr().err


def test_the_text_is_the_same_each_time():
    text, files = train.read_corpus(200_000)  # of Python's standard library
    assert len(text) == 200_000 and files > 1
    assert train.read_corpus(200_000) == (text, files)
    tokens = train.encode(text)
    assert tokens.min() >= 0 and tokens.max() < train.VOCABULARY
    assert len(train.encode(b"\n ~\xff").unique()) == 4  # newline, space, ~, and one token for all other bytes


def test_a_missing_standard_library_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(train.sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    with pytest.raises(train.CommandError, match="standard library"):
        train.read_corpus()


def test_batches_depend_on_the_seed_only():
    tokens = torch.arange(1000)
    draws = [next(train.batches(tokens, 3, 10, seed)) for seed in (5, 5, 6)]
    assert torch.equal(draws[0][0], draws[1][0]) and not torch.equal(draws[0][0], draws[2][0])
    assert torch.equal(draws[0][0] + 1, draws[0][1])  # the target is the next token
    assert draws[0][0].shape == (3, 10)


def test_runs_start_from_the_same_weights():
    first, second = train.make_runs(SMALL, CPU, {"a": torch_attention, "b": volta_attention})
    for a, b in zip(first.model.parameters(), second.model.parameters(), strict=True):
        assert torch.equal(a, b) and a.data_ptr() != b.data_ptr()


def test_memory_on_the_cpu_is_exact():
    def work():
        a = torch.empty(1000, 1000)
        b = a + 1
        del a
        return b * 2  # at its highest: two of the three

    assert train.cpu_peak(work) == pytest.approx(2 * 4_000_000, rel=1e-3)


def judge(control, candidate, gradient=1e-7):
    """Compares losses of volta_fa (`candidate`) and of a control, given as differences from the reference's losses of 3, step by step.
    `gradient`: the error of the candidate's gradient; the control's is 1e-7."""
    reference, control, candidate = ([3.0 + difference for difference in of] for of in ([0.0] * len(control), control, candidate))
    return agreement.compare(reference, [reference, control], candidate, gradient_controls=[0.0, 1e-7], gradient_candidate=gradient)


def test_the_band_is_as_wide_as_the_control_strays():
    """A step's loss may differ by LOSS_MARGIN times the largest difference of the control up to that step."""
    stray = 1e-3 * agreement.LOSS_MARGIN
    assert judge([0, 1e-3, 0], [0, 0, 0.9 * stray]).agree  # the control's return to zero does not narrow it
    assert judge([0, 1e-3, 0], [0, 1.1 * stray, 0]).first_disagreement == 1
    assert judge([0, 1e-3, 0], [0.9 * stray, 0, 0]).first_disagreement == 0  # nor does the future widen it
    assert judge([0, 0, 0], [5e-7, 0, 0]).agree  # a loss is rounded itself
    assert not judge([0, 0, 0], [1e-4, 0, 0]).agree


def test_gradients_are_judged_too():
    assert judge([0], [0], gradient=0.9e-7 * agreement.GRADIENT_MARGIN).agree
    assert not judge([0], [0], gradient=1.1e-7 * agreement.GRADIENT_MARGIN).agree


def test_nan_counts_as_disagreement():
    assert judge([0, 0], [0, math.nan]).first_disagreement == 1
    assert not judge([0], [0], gradient=math.nan).agree
    assert not agreement.compare([math.nan], [[3.0]], [3.0], gradient_controls=[0.0], gradient_candidate=0.0).agree
    # a control that fails widens nothing
    assert not judge([0, math.nan], [0, 1.0]).agree
