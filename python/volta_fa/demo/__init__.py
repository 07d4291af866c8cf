"""`python -m volta_fa demo`: trains a small language model with volta_fa and with PyTorch's attention, and compares the two.

model.py      defines the GPT and its attentions
train.py      loads the text, and trains side by side on the same batches
agreement.py  decides whether trainings differ by more than rounding
report.py     prints progress and tables, draws the plot
ranks.py      shards volta_fa's sequences over several processes
simulated.py  runs one layer as machine code on simulated GPUs"""

from __future__ import annotations

from pathlib import Path

import torch

from ..errors import first_line
from ..inspection import info
from . import report, simulated, train
from .agreement import CONTROLS, Comparison, compare  # number of control runs; differences and what is allowed; makes a Comparison
from .model import Attention, RoundedAttention, torch_attention, volta_attention  # Attention: a function of q, k and v
from .train import Run, Settings  # one model in training, with its losses; sizes of model and training

# Sizes: on two CPU cores the trainings take less than a minute, on a V100 or T4 an estimated one to three minutes.
_CPU = Settings(layers=3, nheads=3, headdim=32, seqlen=128, batch=8, steps=60)
_CUDA = Settings(layers=6, nheads=6, headdim=64, seqlen=512, batch=16, steps=300, half=True)
_QUICK_STEPS = 15


def settings_for(device: torch.device, *, steps: int | None = None, quick: bool = False) -> Settings:
    """Returns model and training settings for this device; `steps` overrides the number of steps."""
    settings = _CUDA if device.type == "cuda" else _CPU
    if steps is None:
        steps = _QUICK_STEPS if quick else settings.steps
    return Settings(**{**vars(settings), "steps": steps})


def run_demo(
    settings: Settings, device: torch.device, output: Path, *, attention: Attention = volta_attention, kind: type[Run] = Run
) -> Comparison:
    """Trains, prints, plots into `output`, and compares. `attention` is the implementation under test (the "candidate"), in a run of class
    `kind`; ranks.py passes a ring. PyTorch's attention is the reference; controls are PyTorch's with every output rounded differently."""
    text, files = train.read_corpus()
    tokens = train.encode(text)
    rounded: dict[str, Attention] = {f"{report.CONTROL} {i}": RoundedAttention(settings.seed + i) for i in range(CONTROLS)}
    attentions: dict[str, Attention] = {report.REFERENCE: torch_attention, report.CANDIDATE: attention, **rounded}
    runs = reference, candidate, *controls = train.make_runs(settings, device, attentions, {report.CANDIDATE: kind})
    report.introduce(settings, device, len(tokens), files, runs)
    with report.Progress(settings.steps, runs) as progress:
        train.train(settings, runs, tokens, device, progress.on_step)
    batch = train.fresh_batch(settings, tokens, device)
    peaks = [run.peak_memory(*batch) for run in (reference, candidate)]
    of_candidate, *of_controls = train.gradient_distances(reference, (candidate, *controls), batch)
    losses = (run.losses for run in controls)
    comparison = compare(reference.losses, list(losses), candidate.losses, gradient_controls=of_controls, gradient_candidate=of_candidate)
    report.summarize((reference, candidate), peaks, comparison)
    report.plot(output, reference, candidate, comparison)
    report.judge(comparison)
    return comparison


def run_simulated() -> bool:
    """Runs one layer on simulated GPUs, and prints the results. Returns True if all are right, or if the simulator cannot run here."""
    if not info()["simulator"]:
        report.say("\nNo layer runs on a simulated V100 and T4: this library was built without the simulator.")
        return True
    report.introduce_simulation()
    results = []
    for gpu in simulated.GPUS:
        report.say(f"simulating a {gpu.title} ...")
        try:
            results.append(simulated.run(gpu))
        except RuntimeError as error:
            if "nvdisasm" not in str(error):
                raise
            report.say(f"No layer runs on a simulated {gpu.title}, for lack of a disassembler: {first_line(error)}")
            return True
    report.show_simulation(results)
    return all(result.right for result in results)
