"""Trains several copies of the demo's GPT side by side, on the same batches. They differ only in their attention. The text is one that
every Python installation has: the source of its standard library. The demo (demo/__init__.py) and benchmarks.training call this module."""

from __future__ import annotations

import gc
import os
import sysconfig
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch.amp.grad_scaler import GradScaler

from ..errors import CommandError
from .model import GPT, Attention

#: 1.5 MB: large enough that a few hundred steps rarely repeat a window, small enough to read at once.
CORPUS_BYTES = 1_500_000

# One token per character: newline, the printable ASCII characters, and one for all others.
_OTHER = 0
_ALPHABET = "\n" + "".join(chr(c) for c in range(32, 127))
VOCABULARY = 1 + len(_ALPHABET)


def read_corpus(limit: int = CORPUS_BYTES) -> tuple[bytes, int]:
    """Returns the top-level modules of the standard library in order of their names, up to `limit` bytes.
    Returns the text and the number of files. The same Python gives the same text. Raises CommandError if there is less than 100 KB."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    parts: list[bytes] = []
    size = 0
    for path in sorted(folder.glob("*.py")):
        parts.append(path.read_bytes())
        size += len(parts[-1])
        if size >= limit:
            break
    if size < 100_000:
        raise CommandError(f"{folder} holds {size} bytes of Python source, too little to train on: install Python's full standard library")
    return b"".join(parts)[:limit], len(parts)


def encode(text: bytes) -> torch.Tensor:
    """Returns one token id per byte."""
    table = torch.full((256,), _OTHER, dtype=torch.long)
    for token, character in enumerate(_ALPHABET, start=1):
        table[ord(character)] = token
    return table[torch.frombuffer(bytearray(text), dtype=torch.uint8).long()]


def batches(tokens: torch.Tensor, batch: int, seqlen: int, seed: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yields batches of windows at random positions of the text, endlessly, from a seed: (input, target), both (batch, seqlen) token
    ids, the target one token later."""
    windows = tokens.unfold(0, seqlen + 1, 1)
    generator = torch.Generator().manual_seed(seed)
    while True:
        window = windows[torch.randint(len(windows), (batch,), generator=generator)]
        yield window[:, :-1].contiguous(), window[:, 1:].contiguous()


#: GradScaler's default. The loss is a mean over thousands of tokens, so gradients of scores are small. With a much smaller scale, fp16
#: would round many to zero, and each attention other ones: a larger difference than rounding.
LOSS_SCALE = 2.0**16


@dataclass(frozen=True)
class Settings:
    """The model and its training."""

    layers: int
    nheads: int
    headdim: int
    seqlen: int  # characters, which are tokens, of a window
    batch: int  # windows of a step
    steps: int
    learning_rate: float = 1e-3
    warmup: int = 20  # steps in which the learning rate rises from zero
    half: bool = False  # whether to use fp16 autocast with GradScaler; else fp32
    seed: int = 1


@dataclass
class Run:
    """One model in training."""

    name: str
    model: GPT
    optimizer: torch.optim.Optimizer
    scaler: GradScaler
    half: bool  # fp16 autocast
    losses: list[float] = field(default_factory=list)  # of each step
    seconds: list[float] = field(default_factory=list)  # of each step

    def step(self, tokens: torch.Tensor, target: torch.Tensor, learning_rate: float) -> None:
        """Takes one training step, and adds its loss and its time in seconds to the lists."""
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
        """Returns the loss of a batch, (batch, seqlen) token ids, and adds its gradients, times the scaler's scale, to the weights'."""
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
        peak = peak_bytes(lambda: self._forward_backward(tokens, target), tokens.device)
        self.optimizer.zero_grad()
        return peak


def peak_bytes(work: Callable[[], object], device: torch.device) -> int:
    """Returns the peak bytes that PyTorch's allocator held during `work`, beyond what it held before. The benchmarks call it too."""
    gc.collect()
    if device.type != "cuda":
        return cpu_peak(work)
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    work()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def cpu_peak(work: Callable[[], object]) -> int:
    """Returns the peak bytes that `work` holds from ATen's CPU allocator. The process's peak does not show it: the allocator keeps memory
    that the first run freed, so the second run would seem to need none."""
    # Kineto, which records the allocations, would report a CUDA build without a driver as an error.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the profiler
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
        sizes = {size: getattr(settings, size) for size in ("layers", "nheads", "headdim", "seqlen")}
        model = GPT(vocabulary=VOCABULARY, attention=attention, **sizes).to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=settings.learning_rate, betas=(0.9, 0.95))
        # a constant scale: if only one run skipped a step, that would look like a wrong gradient
        scaler = GradScaler(device.type, init_scale=LOSS_SCALE, growth_interval=10**9, enabled=settings.half)
        runs.append((kinds or {}).get(name, Run)(name, model, optimizer, scaler, settings.half))
    return runs


def train(settings: Settings, runs: Iterable[Run], tokens: torch.Tensor, device: torch.device, on_step: Callable[[int], None]) -> None:
    """Trains all runs together, step by step on the same batches. Calls `on_step` after each step."""
    runs = list(runs)
    drawn = batches(tokens, settings.batch, settings.seqlen, settings.seed)
    for step in range(settings.steps):
        inputs, target = (t.to(device) for t in next(drawn))
        learning_rate = settings.learning_rate * min(1.0, (step + 1) / settings.warmup)
        for run in runs:
            run.step(inputs, target, learning_rate)
        on_step(step)


def gradient_distances(reference: Run, others: Iterable[Run], batch: Sequence[torch.Tensor]) -> list[float]:
    """Returns |g - g_reference| / |g_reference| of each other run at the reference's weights. Overwrites their weights."""
    weights = reference.model.state_dict()
    expected = reference.gradients(weights, *batch)
    return [((run.gradients(weights, *batch) - expected).norm() / expected.norm()).item() for run in others]


def fresh_batch(settings: Settings, tokens: torch.Tensor, device: torch.device) -> list[torch.Tensor]:
    """Returns a batch from another seed than the training's."""
    return [t.to(device) for t in next(batches(tokens, settings.batch, settings.seqlen, settings.seed + 1))]
