"""How often volta_fa ran unsloth's attention, and why it did not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

_ran: Counter[str] = Counter()
_traced: Counter[str] = Counter()
_fell_back: Counter[str] = Counter()


def unsloth_stats(reset: bool = False) -> dict[str, Any]:
    """Returns the number of calls of unsloth's attention functions since the start or a reset.

    Keys:
        ran: calls that volta_fa ran.
        traced: calls that torch.compile recorded as volta_fa's. Runs of the compiled program are not counted.
        fell_back: calls that unsloth's function ran, by reason; docs/guides/unsloth.md explains the reasons.

    Args:
        reset: set all counts to 0 afterwards.
    """
    result = {"ran": _ran["calls"], "traced": _traced["calls"], "fell_back": dict(sorted(_fell_back.items()))}
    if reset:
        for counter in (_ran, _traced, _fell_back):
            counter.clear()
    return result


def count_run() -> None:
    """Counts a call that volta_fa runs."""
    if torch.compiler.is_compiling():
        _count_trace()
    else:
        _ran["calls"] += 1


def count_fallback(reason: str) -> None:
    """Counts a call that unsloth's function runs."""
    if torch.compiler.is_compiling():
        _count_traced_fallback(reason)
    else:
        _fell_back[reason] += 1


def _add_trace() -> None:
    _traced["calls"] += 1


def _add_traced_fallback(reason: str) -> None:
    _fell_back[reason] += 1


# Dynamo runs these while it traces. If it traced a counter instead, each count would compile the program again.
_count_trace: Callable[[], None] = _add_trace
_count_traced_fallback: Callable[[str], None] = _add_traced_fallback


def prepare_for_tracing() -> None:
    """Lets Dynamo call the counters. This imports Dynamo, which takes long, so it is not done at import."""
    global _count_trace, _count_traced_fallback
    _count_trace = torch.compiler.assume_constant_result(_add_trace)
    _count_traced_fallback = torch.compiler.assume_constant_result(_add_traced_fallback)
