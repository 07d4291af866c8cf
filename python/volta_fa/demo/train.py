"""Training several copies of one model side by side, which differ in their attention only."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch.amp.grad_scaler import GradScaler

from .data import VOCABULARY, Batches
from .model import GPT, Attention

#: GradScaler's default. A loss averaged over thousands of tokens leaves gradients of scores that fp16 would flush to
#: zero with a much smaller scale, each attention in its own places: more than rounding.
LOSS_SCALE = 2.0**16


@dataclass(frozen=True)
class Settings:
    layers: int
    nheads: int
    headdim: int
    seqlen: int
    batch: int
    steps: int
    learning_rate: float = 1e-3
    #: steps over which the learning rate rises from zero
    warmup: int = 20
    #: fp16 autocast with GradScaler; else fp32
    half: bool = False
    seed: int = 1


@dataclass
class Run:
    """One model in training."""

    name: str
    model: GPT
    optimizer: torch.optim.Optimizer
    scaler: GradScaler
    half: bool
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    def step(self, tokens: torch.Tensor, target: torch.Tensor, learning_rate: float) -> None:
        started = time.perf_counter()
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        loss = self._forward_backward(tokens, target)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        # .item() also waits for the device, so that the clock sees the whole step
        self.losses.append(loss.item())
        self.seconds.append(time.perf_counter() - started)

    def _forward_backward(self, tokens: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        with torch.autocast(tokens.device.type, torch.float16, enabled=self.half):
            loss = self.model(tokens, target)
        self.scaler.scale(loss).backward()
        return loss.detach()

    def gradients(self, weights: Mapping[str, torch.Tensor], tokens: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """All gradients of one batch at these weights, in one float64 vector."""
        self.model.load_state_dict(weights)
        self._forward_backward(tokens, target)
        flat = torch.cat([p.grad.flatten() for p in self.model.parameters() if p.grad is not None]).double() / self.scaler.get_scale()
        self.optimizer.zero_grad()
        return flat

    def peak_memory(self, tokens: torch.Tensor, target: torch.Tensor) -> int:
        """Bytes that one forward and backward allocate at their highest point, gradients included."""
        if tokens.is_cuda:
            torch.cuda.synchronize(tokens.device)
            torch.cuda.reset_peak_memory_stats(tokens.device)
            before = torch.cuda.memory_allocated(tokens.device)
            self._forward_backward(tokens, target)
            peak = torch.cuda.max_memory_allocated(tokens.device) - before
        else:
            peak = cpu_peak(lambda: self._forward_backward(tokens, target))
        self.optimizer.zero_grad()
        return peak


def cpu_peak(work: Callable[[], object]) -> int:
    """The highest sum of what `work` took from ATen's CPU allocator and had not given back.

    The process's own high-water mark would not do: the allocator keeps what the first run freed, and the
    second run would seem to need nothing.
    """
    # Kineto, which records the allocations, would report a CUDA build without a driver as an error.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profile:
        work()
    held = peak = 0
    for event in profile.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
    return peak


def make_runs(
    settings: Settings, device: torch.device, attentions: Mapping[str, Attention], kinds: Mapping[str, type[Run]] | None = None
) -> list[Run]:
    """One run for each attention, all from the same weights; of the kind that is given for its name."""
    runs: list[Run] = []
    for name, attention in attentions.items():
        torch.manual_seed(settings.seed)
        model = GPT(
            vocabulary=VOCABULARY,
            layers=settings.layers,
            nheads=settings.nheads,
            headdim=settings.headdim,
            seqlen=settings.seqlen,
            attention=attention,
        ).to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=settings.learning_rate, betas=(0.9, 0.95))
        # A constant scale: a step skipped by one run and not by another would look like a wrong gradient.
        scaler = GradScaler(device.type, init_scale=LOSS_SCALE, growth_interval=10**9, enabled=settings.half)
        runs.append((kinds or {}).get(name, Run)(name, model, optimizer, scaler, settings.half))
    return runs


def train(settings: Settings, runs: Iterable[Run], tokens: torch.Tensor, device: torch.device, on_step: Callable[[int], None]) -> None:
    """Advance all runs together, step by step on the same batches; `on_step` is told each finished step."""
    runs = list(runs)
    batches = Batches(tokens, settings.batch, settings.seqlen, settings.seed)
    for step in range(settings.steps):
        inputs, target = (t.to(device) for t in next(batches))
        learning_rate = settings.learning_rate * min(1.0, (step + 1) / settings.warmup)
        for run in runs:
            run.step(inputs, target, learning_rate)
        on_step(step)


def measure_memory(settings: Settings, runs: Iterable[Run], tokens: torch.Tensor, device: torch.device) -> list[int]:
    """Peak memory of one training step of each run."""
    batch = _fresh_batch(settings, tokens, device)
    return [run.peak_memory(*batch) for run in runs]


def gradient_distances(
    settings: Settings, reference: Run, others: Iterable[Run], tokens: torch.Tensor, device: torch.device
) -> list[float]:
    """|g - g_reference| / |g_reference| of each of the others, at the reference's weights, which they then hold."""
    batch = _fresh_batch(settings, tokens, device)
    weights = reference.model.state_dict()
    expected = reference.gradients(weights, *batch)
    return [((run.gradients(weights, *batch) - expected).norm() / expected.norm()).item() for run in others]


def _fresh_batch(settings: Settings, tokens: torch.Tensor, device: torch.device) -> list[torch.Tensor]:
    """A batch that the training did not see."""
    return [t.to(device) for t in next(Batches(tokens, settings.batch, settings.seqlen, settings.seed + 1))]
