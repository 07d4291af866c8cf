"""Recognizes the mask functions of transformers and states them as windows and packed sequences."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor
from transformers import masking_utils


class NeedsTensor(Exception):
    """The mask is no `Pattern`, or no `MaskRule` has it: it must be a tensor."""


@dataclasses.dataclass(frozen=True)
class Pattern:
    """A mask function of transformers, as a window and packed sequences. `&` is the intersection."""

    window_left: int = -1
    window_right: int = -1
    sequences: Tensor | None = None  # (batch, seqlen): which of the packed sequences a token belongs to

    def __and__(self, other: Pattern) -> Pattern:
        if self.sequences is not None and other.sequences is not None:
            raise NeedsTensor
        return Pattern(
            _tighter(self.window_left, other.window_left),
            _tighter(self.window_right, other.window_right),
            other.sequences if self.sequences is None else self.sequences,
        )


def _tighter(a: int, b: int) -> int:
    return max(a, b) if min(a, b) < 0 else min(a, b)


def pattern_of(function: Callable[..., Any]) -> Pattern:
    """Returns the pattern of a mask function of transformers, which are named functions or closures over their parameters.

    Raises NeedsTensor for any other function.
    """
    if getattr(function, "__module__", None) != masking_utils.__name__:
        raise NeedsTensor
    variables = {name: cell.cell_contents for name, cell in zip(function.__code__.co_freevars, function.__closure__ or ())}
    match function.__qualname__.partition(".")[0], variables:
        case "causal_mask_function", _:
            return Pattern(window_right=0)
        case "bidirectional_mask_function", _:
            return Pattern()
        case "sliding_window_overlay", {"sliding_window": int(size)}:
            return Pattern(window_left=size - 1)
        case "sliding_window_bidirectional_overlay", {"sliding_window": int(size)}:
            return Pattern(size, size)
        case "packed_sequence_mask_function", {"packed_sequence_mask": Tensor() as sequences}:
            return Pattern(sequences=sequences)
        case "remap_positions_for_packed_sequence", {"mask_function": inner}:
            # positions inside a sequence have the same distances as the tokens
            return pattern_of(inner)
        case "and_masks", {"mask_functions": tuple(parts)}:
            return functools.reduce(Pattern.__and__, map(pattern_of, parts))
    raise NeedsTensor
