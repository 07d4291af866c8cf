"""Trains several copies of one model side by side. They differ only in their attention."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch.amp.grad_scaler import GradScaler

from .data import VOCABULARY, Batches
from .model import GPT, Attention

#: GradScaler's default. The loss is a mean over thousands of tokens, so gradients of scores are small. With a much smaller scale fp16 would
#: flush them to zero, each attention at other elements: a larger difference than rounding.
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
    #: Steps in which the learning rate rises from zero.
    warmup: int = 20
    #: Whether to use fp16 autocast with GradScaler; else fp32.
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
        """Returns all gradients of one batch at these weights, in one float64 vector."""
        self.model.load_state_dict(weights)
        self._forward_backward(tokens, target)
        flat = torch.cat([p.grad.flatten() for p in self.model.parameters() if p.grad is not None]).double() / self.scaler.get_scale()
        self.optimizer.zero_grad()
        return flat

    def peak_memory(self, tokens: torch.Tensor, target: torch.Tensor) -> int:
        """Returns the peak bytes that one forward and backward allocate, gradients included."""
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
    """Returns the peak bytes that `work` holds from ATen's CPU allocator.

    The peak of the process does not help: the allocator keeps memory that the first run freed, so the second
    run would seem to need none.
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
    """Returns one run per attention, all from the same weights. `kinds` gives the class of a run by its name."""
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
        # a constant scale: if only one run skipped a step, that would look like a wrong gradient
        scaler = GradScaler(device.type, init_scale=LOSS_SCALE, growth_interval=10**9, enabled=settings.half)
        runs.append((kinds or {}).get(name, Run)(name, model, optimizer, scaler, settings.half))
    return runs


def train(settings: Settings, runs: Iterable[Run], tokens: torch.Tensor, device: torch.device, on_step: Callable[[int], None]) -> None:
    """Trains all runs together, step by step on the same batches. Calls `on_step` after each step."""
    runs = list(runs)
    batches = Batches(tokens, settings.batch, settings.seqlen, settings.seed)
    for step in range(settings.steps):
        inputs, target = (t.to(device) for t in next(batches))
        learning_rate = settings.learning_rate * min(1.0, (step + 1) / settings.warmup)
        for run in runs:
            run.step(inputs, target, learning_rate)
        on_step(step)


def measure_memory(settings: Settings, runs: Iterable[Run], tokens: torch.Tensor, device: torch.device) -> list[int]:
    """Returns the peak memory of one training step of each run, in bytes."""
    batch = _fresh_batch(settings, tokens, device)
    return [run.peak_memory(*batch) for run in runs]


def gradient_distances(
    settings: Settings, reference: Run, others: Iterable[Run], tokens: torch.Tensor, device: torch.device
) -> list[float]:
    """Returns |g - g_reference| / |g_reference| of each other run at the reference's weights. Overwrites their weights."""
    batch = _fresh_batch(settings, tokens, device)
    weights = reference.model.state_dict()
    expected = reference.gradients(weights, *batch)
    return [((run.gradients(weights, *batch) - expected).norm() / expected.norm()).item() for run in others]


def _fresh_batch(settings: Settings, tokens: torch.Tensor, device: torch.device) -> list[torch.Tensor]:
    """Returns a batch from another seed than the training's."""
    return [t.to(device) for t in next(Batches(tokens, settings.batch, settings.seqlen, settings.seed + 1))]
