"""Decides whether two trainings differ by more than rounding. The demo calls `compare` with the losses and gradients of its runs.

The distance of two correct implementations depends on the data type, the device, the model and the number of steps. So the demo measures
it instead of fixing a tolerance. Control runs are PyTorch's attention with every output element moved by one unit in the last place
(`RoundedAttention`). Their largest distance from the plain PyTorch run is what rounding alone does. volta_fa must stay within a multiple
of it in the losses of every step, and in the gradients of one batch at the PyTorch run's last weights. Training does not amplify the
gradients' distance, so it shows errors that are too small, or too late, to show in the losses.

The constants come from trainings of such a model on a CPU (4 layers, 4 heads of 32, 128 characters). The figures are distances from
PyTorch's attention; "|g|" is the relative distance of the gradients after training:

                                          fp32, 150 steps             fp16 autocast, 60 to 80 steps
                                          loss            |g|         loss            |g|
    controls (three seeds)                5e-7 to 7e-7    2.5e-7      3e-4 to 6e-4    4.6e-4
    attention written out with einsum     7e-7            2.8e-7      5e-4            3.0e-4
    softmax_scale off by 2%               1e-2            5e-2        4e-3            1.0e-2
    mask off by one                       0.2 and more    2e-1        8e-2            1.3e-1
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

#: Number of control runs. One is not enough, because rounding grows at a high learning rate: after 20 steps of a model of two layers (fp16,
#: learning rate 3e-3) eight controls had distances of 3e-4 to 5e-3, a factor of seventeen.
CONTROLS = 3
#: Allowed loss difference over the controls' largest. That varies by a factor of up to 2 above. Also, a correct implementation may err by
#: more than one unit in the last place, because attention sums over the keys.
LOSS_MARGIN = 16
#: Units in the last place of a loss that are allowed in any case: it is an fp32 mean over a thousand characters, and an fp32 control often
#: has the same number.
LOSS_ULPS = 8
#: Allowed gradient distance over the controls' largest, which varies by a few percent. check/tolerance.py allows gradients three times the
#: error of PyTorch's; this is twice that. The error of 2% above is 22 times the control's distance in fp16, and 10^5 times in fp32.
GRADIENT_MARGIN = 6


@dataclass(frozen=True)
class Comparison:
    """Differences of a candidate's training from the reference's, and how much of each rounding explains."""

    loss_differences: list[float]  # |loss - reference loss| of each step
    loss_allowed: list[float]  # how much of that rounding explains, for each step
    gradient_difference: float  # relative distance of the gradients from the reference's, at the same weights
    gradient_allowed: float  # how much of that rounding explains

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
    """Compares the losses of each step of `candidate` with those of `reference`, by the distances of `controls` from it.
    `gradient_controls` and `gradient_candidate` are relative distances from the reference's gradients."""
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
