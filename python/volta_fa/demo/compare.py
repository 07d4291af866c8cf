"""Do two trainings differ by more than rounding?

Two correct implementations of attention round differently, and training carries that difference on from
step to step, so no fixed tolerance is right: it depends on the data type, the device and the number of
steps. So the demo measures it. A control run is PyTorch's attention again, with every output element moved
by one unit in the last place (`RoundedAttention`); its distance from the plain PyTorch run is what rounding
alone makes of this training. volta_fa has to stay within a multiple of that band.

The two constants, from trainings of the demo's model on a CPU (4 layers, 4 heads of 32, 128 tokens):

                                                     fp32, 100 steps     fp16 autocast, 80 steps
    three controls, largest |loss difference|        5e-7                2e-5 to {half}
    attention written out with einsum                2.4e-7              {half_naive}
    softmax_scale off by 2%                          5e-5 within 20 steps, then 1e-3 to 8e-3      3e-4, then 1e-3
    mask off by one, either way                      1e-3 at the first step, for both             6e-3 at the first step

- MARGIN: an implementation's error may exceed one unit in the last place (attention sums over the keys), and
  the largest difference of a few dozen steps varies by a factor of 2 to 3 from control to control. 16 covers
  both and leaves the smallest error above a factor of ten outside within 60 steps.
- LOSS_ULPS: the loss is itself a rounded fp32 mean over a thousand tokens, and in fp32 the control often
  lands on the very same number; the band is never narrower than 8 of its units in the last place.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Sequence

import torch

MARGIN = 16
LOSS_ULPS = 8


@dataclass(frozen=True)
class Comparison:
    #: |loss - reference loss| of each step
    differences: list[float]
    #: how much of that rounding explains, for each step
    allowed: list[float]
    #: the first step outside the band; None if there is none
    first_disagreement: int | None

    @property
    def agree(self) -> bool:
        return self.first_disagreement is None


def compare(reference: Sequence[float], control: Sequence[float], candidate: Sequence[float]) -> Comparison:
    """Judge the losses of `candidate` against those of `reference`, by the distance of `control` from it."""
    allowed: list[float] = []
    spread = 0.0
    for expected, rounded in zip(reference, control, strict=True):
        # Differences do not die out again, so a step's band is the widest so far: a control that happens to
        # cross the reference at this step says nothing.
        spread = max(spread, abs(rounded - expected))
        allowed.append(MARGIN * max(spread, 0.0) + LOSS_ULPS * torch.finfo(torch.float32).eps * abs(expected))
    differences = [abs(loss - expected) for loss, expected in zip(candidate, reference, strict=True)]
    # `not <=` rather than `>`: a loss that is not a number disagrees
    outside = (step for step, (d, a) in enumerate(zip(differences, allowed, strict=True)) if not d <= a)
    return Comparison(differences, allowed, next(outside, None))
