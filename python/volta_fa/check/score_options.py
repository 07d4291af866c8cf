"""Options of scores: the fields that `Case` and `CacheCase` share, and what asks for each feature of a kernel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

#: What a problem has, by the feature that it asks for; `info()` names the features.
ASKING: dict[str, dict[str, Any]] = {
    "softcap": {"softcap": 20.0},
    "alibi": {"alibi": "bh"},
    "bias": {"bias": "hqk"},
    "dropout": {"dropout_p": 0.2},
    "block_mask": {"blocks": "h"},
}
#: What a problem of a cache has that asks for every feature.
EVERY = {**ASKING["softcap"], **ASKING["alibi"], "sinks": "own"}
#: Options of the operators that `tolerance.attend` takes as they are.
OF_REFERENCE = ("is_causal", "window_left", "window_right", "softmax_scale", "softcap", "dropout_p", "sinks")


def asking(features: list[str]) -> dict[str, Any]:
    """Returns the fields of a problem that uses these features, as far as they are in `ASKING`."""
    return {name: value for feature in features for name, value in ASKING.get(feature, {}).items()}


@dataclass(frozen=True, repr=False, kw_only=True)
class ScoreOptions:
    """What happens to scores."""

    window_left: int = -1
    window_right: int = -1
    softmax_scale: float | None = None
    softcap: float = 0.0
    alibi: str = ""  # "h": (nheads), "bh": (batch, nheads)
    sinks: str = ""  # type: "own" or "fp32"

    @property
    def score_features(self) -> dict[str, bool]:
        """Whether it asks for each feature, by its name in `info()`."""
        return {"sinks": bool(self.sinks), "softcap": self.softcap > 0, "alibi": bool(self.alibi)}

    @property
    def score_words(self) -> list[str]:
        """Parts of a name for the numbers that are not their defaults."""
        window = self.window_left, self.window_right
        words = [f"window{self.window_left}:{self.window_right}"] if max(window) >= 0 else []
        words += [] if self.softmax_scale is None else [f"scale{self.softmax_scale:g}"]
        return [*words, f"softcap{self.softcap:g}"] if self.softcap else words

    @property
    def score_numbers(self) -> dict[str, Any]:
        """Keyword arguments of the operators that are no tensors and not in every operator."""
        return {"window_left": self.window_left, "window_right": self.window_right, "softcap": self.softcap}
