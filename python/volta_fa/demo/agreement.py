"""Do two trainings differ by more than rounding?

Two correct implementations of attention round differently, and what becomes of that depends on the data
type, the device, the model and the number of steps: no tolerance written down here would be right for all.
So the demo measures it. Control runs are PyTorch's attention again, with every output element moved by one
unit in the last place (`RoundedAttention`); the largest of their distances from the plain PyTorch run is what
rounding alone does. volta_fa has to stay within a multiple of that distance, in two respects:

- the losses of every step, which say whether the two trainings are the same training;
- the gradients of one batch at the same weights (those that the PyTorch run ends with), which training does
  not amplify, and which therefore show errors that are too small, or too late, to show in the losses.

The constants come from trainings of such a model on a CPU (4 layers, 4 heads of 32, 128 characters); the
figures are distances from PyTorch's attention, "|g|" the relative distance of the gradients after training:

                                          fp32, 150 steps             fp16 autocast, 60 to 80 steps
                                          loss            |g|         loss            |g|
    controls (three seeds)                5e-7 to 7e-7    2.5e-7      3e-4 to 6e-4    4.6e-4
    attention written out with einsum     7e-7            2.8e-7      5e-4            3.0e-4
    softmax_scale off by 2%               1e-2            5e-2        4e-3            1.0e-2
    mask off by one                       0.2 and more    2e-1        8e-2            1.3e-1

CONTROLS: at a high learning rate rounding grows by itself. In 20 steps of a model of two layers (fp16, 3e-3) eight
controls strayed by 3e-4 to 5e-3, so one alone may stay seventeen times nearer than another, by luck.
LOSS_MARGIN: the largest loss difference of the trainings above varies by a factor of up to 2 from control to control, and a
correct implementation may err by more than one unit in the last place: attention sums over the keys. A factor
of 16 covers both.
LOSS_ULPS: a loss is itself a rounded fp32 mean over a thousand characters, and in fp32 the control often
lands on the very same number: the band is never narrower than 8 units in the last place of the loss.
GRADIENT_MARGIN: controls agree with each other within a few per cent here. The project's rule allows
gradients three times the error of PyTorch's; 6 is twice that, and the error of 2% above is 22 times the
control's distance in fp16 and 10^5 times in fp32.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

CONTROLS = 3
LOSS_MARGIN = 16
LOSS_ULPS = 8
GRADIENT_MARGIN = 6


@dataclass(frozen=True)
class Comparison:
    #: |loss - reference loss| of each step
    loss_differences: list[float]
    #: how much of that rounding explains, for each step
    loss_allowed: list[float]
    #: relative distance of the gradients from the reference's, at the same weights
    gradient_difference: float
    #: how much of that rounding explains
    gradient_allowed: float

    @property
    def first_disagreement(self) -> int | None:
        """The first step whose losses differ by more than rounding; None if there is none."""
        # `not <=` rather than `>`: a loss that is not a number disagrees
        steps = enumerate(zip(self.loss_differences, self.loss_allowed, strict=True))
        return next((step for step, (difference, allowed) in steps if not difference <= allowed), None)

    @property
    def gradients_agree(self) -> bool:
        return self.gradient_difference <= self.gradient_allowed

    @property
    def agree(self) -> bool:
        return self.first_disagreement is None and self.gradients_agree


def compare(
    reference: Sequence[float],
    controls: Sequence[Sequence[float]],
    candidate: Sequence[float],
    *,
    gradient_controls: Sequence[float],
    gradient_candidate: float,
) -> Comparison:
    """Judge `candidate` against `reference`, by the distances of `controls` from it.

    The sequences are the losses of each step; the gradients are relative distances from the reference's.
    """
    loss_allowed: list[float] = []
    spread = 0.0
    for expected, *rounded in zip(reference, *controls, strict=True):
        # Differences do not die out again, so a step's band is the widest so far: a control that happens to
        # cross the reference at this step says nothing.
        spread = max(spread, *(abs(loss - expected) for loss in rounded))
        loss_allowed.append(LOSS_MARGIN * spread + LOSS_ULPS * torch.finfo(torch.float32).eps * abs(expected))
    return Comparison(
        loss_differences=[abs(loss - expected) for loss, expected in zip(candidate, reference, strict=True)],
        loss_allowed=loss_allowed,
        gradient_difference=gradient_candidate,
        gradient_allowed=GRADIENT_MARGIN * max(gradient_controls),
    )
