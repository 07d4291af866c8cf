"""Trains with volta_fa and with PyTorch's own attention, and checks that the loss curves agree.

Trains a 4-layer character GPT (the demo's) on the source of Python's standard library, once for each headdim. Each attention begins with
the same weights and gets the same batches:
- volta_fa
- "torch": PyTorch's scaled_dot_product_attention, as it chooses its kernel
- each of PyTorch's kernels by name
- "torch" with one rounding error: every output and gradient element moved by one or two units in the last place
PyTorch's are all correct, and training amplifies any rounding. So the largest distance of their losses from "torch" is the band of correct
runs.
The loss of volta_fa must stay within twice the band (BAND_FACTOR). Its gradients, at the first and at volta_fa's last weights, may be at
most three times as far from a float64 model's as PyTorch's (GRADIENT_FACTOR). Exits 1 if one of these fails."""

from __future__ import annotations

import argparse
import copy
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from volta_fa.demo.model import Attention, RoundedAttention, torch_attention, volta_attention

# make_runs(): for each attention a Run, a model in training with its losses, all from the same weights; train(): a step of each in turn;
# batches(): windows of tokens and their targets; encode(): a token per byte of text; read_corpus(): the text, and the number of its files
from volta_fa.demo.train import Run, Settings, batches, encode, make_runs, read_corpus, train
from volta_fa.errors import CommandError

from . import report
from .report import Grid, significant

WIDTH = 256  # nheads * headdim
LAYERS = 4
#: PyTorch's kernels, where this device has them.
KERNELS = {"flash": SDPBackend.FLASH_ATTENTION, "efficient": SDPBackend.EFFICIENT_ATTENTION, "math": SDPBackend.MATH}
#: Above 1, because the band has few runs and another correct one may stray further. A wrong mask or scale is off by orders of magnitude.
BAND_FACTOR = 2.0
#: Losses are averaged over this many steps before they are compared: a single batch's loss is noise.
SMOOTH = 10
#: Maximum error of volta_fa's gradients relative to PyTorch's, as in flash-attn's tests.
GRADIENT_FACTOR = 3.0


@dataclass
class Result:
    """All runs at one headdim."""

    headdim: int
    settings: dict
    losses: dict[str, list[float]]  # by run, of each step
    distance: float  # largest difference of volta_fa's smoothed loss from that of "torch"
    band: float  # the same of PyTorch's other runs, the largest of all
    gradients: dict[str, dict[str, float]]  # by "first weights" or "last weights", and run: relative error against float64

    @property
    def agrees(self) -> bool:
        close = all(g["volta_fa"] <= GRADIENT_FACTOR * g["torch"] for g in self.gradients.values())
        return close and self.distance <= BAND_FACTOR * self.band


def with_kernel(backend: SDPBackend) -> Attention:
    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        with sdpa_kernel(backend):
            return torch_attention(q, k, v)

    return attention


def band_attentions(device: torch.device, settings: Settings) -> dict[str, Attention]:
    """Returns the attentions of the band by name, without kernels that this device lacks."""
    found: dict[str, Attention] = {"torch, one rounding error": RoundedAttention(1)}  # 1: the seed of directions
    probe = torch.zeros(1, 8, settings.nheads, settings.headdim, device=device, dtype=torch.float16 if settings.half else torch.float32)
    for name, backend in KERNELS.items():
        attention = with_kernel(backend)
        try:
            attention(probe, probe, probe)
        except RuntimeError:  # not on this device
            continue
        found[f"torch, {name}"] = attention
    return found


def smoothed(losses: Sequence[float]) -> torch.Tensor:
    """Returns the moving average over SMOOTH steps."""
    return torch.tensor(losses).unfold(0, min(SMOOTH, len(losses)), 1).mean(1)


def exact_gradients(run: Run, batch: Sequence[torch.Tensor]) -> torch.Tensor:
    """Returns the gradients of the run's model in float64 as one vector, with PyTorch's attention by its plain formula."""
    model = copy.deepcopy(run.model).double()
    for block in model.blocks:
        block.attention.attention = torch_attention
    with sdpa_kernel(SDPBackend.MATH):
        model(*batch).backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()])


def compare_gradients(runs: Sequence[Run], batch: Sequence[torch.Tensor]) -> dict[str, float]:
    """Returns by run the relative distance of its gradients from float64's, all at the first run's weights.

    Run.gradients() loads these weights and returns a vector as `exact_gradients` does. Afterwards each run has its own weights again."""
    weights = {k: v.clone() for k, v in runs[0].model.state_dict().items()}
    exact = exact_gradients(runs[0], batch)
    own = [{k: v.clone() for k, v in run.model.state_dict().items()} for run in runs]
    distances = {run.name: ((run.gradients(weights, *batch) - exact).norm() / exact.norm()).item() for run in runs}
    for run, state in zip(runs, own):
        run.model.load_state_dict(state)
    return distances


def measure(headdim: int, options: argparse.Namespace, tokens: torch.Tensor, device: torch.device, advance) -> Result:
    """Trains all runs at one headdim. Calls `advance` after each step."""
    sizes = {"layers": LAYERS, "nheads": max(1, WIDTH // headdim), "headdim": headdim}
    sizes |= {name: getattr(options, name) for name in ("seqlen", "batch", "steps")}
    settings = Settings(**sizes, half=options.dtype == "float16")
    attentions = {"volta_fa": volta_attention, "torch": torch_attention}
    attentions |= band_attentions(device, settings)
    runs = make_runs(settings, device, attentions)  # runs[0] is volta_fa, runs[1] "torch", the others are the band
    # one window of tokens and its targets, which training does not draw
    batch = [t.to(device) for t in next(batches(tokens, 1, settings.seqlen, settings.seed + 1))]
    gradients = {"first weights": compare_gradients(runs[:2], batch)}
    train(settings, runs, tokens, device, lambda step: advance())
    gradients["last weights"] = compare_gradients(runs[:2], batch)
    reference = smoothed(runs[1].losses)
    distances = [(smoothed(run.losses) - reference).abs().max().item() for run in runs]
    return Result(headdim, asdict(settings), {r.name: r.losses for r in runs}, distances[0], max(distances[2:]), gradients)


def grid(results: Sequence[Result]) -> Grid:
    table = Grid(
        f"Loss (mean of {SMOOTH} steps) and gradients",
        ["headdim", "steps", "final loss, volta_fa", "torch", "largest distance", "torch's band"]
        + [f"gradient error {when}, {run}" for when in ("first", "last") for run in ("volta_fa", "torch")]
        + ["agrees"],
    )
    for r in results:
        final = [significant(smoothed(r.losses[name])[-1].item(), 5) for name in ("volta_fa", "torch")]
        errors = [significant(r.gradients[f"{when} weights"][run]) for when in ("first", "last") for run in ("volta_fa", "torch")]
        distances = [significant(r.distance), significant(r.band)]
        table.rows.append([str(r.headdim), str(len(r.losses["torch"])), *final, *distances, *errors, "yes" if r.agrees else "NO"])
    return table


def plot(results: Sequence[Result], header: dict[str, str], path: Path) -> None:
    figure, axes = report.panels(2, len(results), f"Training, {header['device']}", (5.5 * len(results), 6.5))
    for column, r in enumerate(results):
        reference = smoothed(r.losses["torch"])
        for name, losses in r.losses.items():
            in_band = name.startswith("torch,")  # a variant of torch's run, for the band of its differences
            color = "#999999" if in_band else report.COLORS["volta_fa"] if name == "volta_fa" else "#2c6fbb"
            style = {"color": color} | ({"linewidth": 0.8} if in_band else {})
            label = "torch: its other kernels, one rounding error" if in_band else name
            axes[0, column].plot(losses, label=label, **style)
            axes[1, column].plot(smoothed(losses) - reference, label=label, **style)
        axes[0, column].set(title=f"headdim {r.headdim}, seqlen {r.settings['seqlen']}", ylabel="loss")
        axes[1, column].set(xlabel="step", ylabel=f"loss minus torch's (mean of {SMOOTH})")
    report.shared_legend(figure, axes)
    report.save(figure, path)


def main(arguments: Sequence[str]) -> int:
    parser = report.parser("training", __doc__, measures=True)  # with --json, --plot, --markdown and --device
    parser.add_argument("--headdims", type=int, nargs="+", default=[64, 128], metavar="D", help="default: 64 128")
    parser.add_argument("--seqlen", type=int, default=2048, metavar="N", help="default: 2048")
    parser.add_argument("--batch", type=int, default=4, metavar="B", help="default: 4")
    parser.add_argument("--steps", type=int, default=200, metavar="N", help="default: 200")
    parser.add_argument("--dtype", choices=["float16", "float32"], help="default: float16 autocast on a GPU, float32 on the CPU")
    options = parser.parse_args(arguments)
    if min(*options.headdims, options.seqlen, options.batch, options.steps) < 1:
        raise CommandError("--headdims, --seqlen, --batch and --steps are positive numbers")
    device = report.choose_device(options.device)
    options.dtype = options.dtype or ("float16" if device.type == "cuda" else "float32")
    model = f"{LAYERS} layers, width {WIDTH}, {'fp16 autocast and GradScaler' if options.dtype == 'float16' else 'fp32'}"
    header = report.facts_of(device, "training", arguments, model=model)
    tokens = encode(read_corpus()[0])  # 1.5 MB of source, one token per character
    results = []
    with report.progress() as bar:
        task = bar.add_task("training", total=options.steps * len(options.headdims))
        for headdim in options.headdims:
            bar.update(task, description=f"headdim {headdim}")
            results.append(measure(headdim, options, tokens, device, lambda: bar.advance(task)))
    data = {"header": header, "results": [asdict(r) for r in results]}
    report.deliver(options, header, [grid(results)], data, lambda path: plot(results, header, path))
    return 0 if all(r.agrees for r in results) else 1


if __name__ == "__main__":
    report.command(main)
