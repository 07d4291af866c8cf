"""The node that ComfyUI shows, and what the package switches on."""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Callable
from typing import Any

import volta_fa

from .attention import counts, describe, make_override

_KEY = "volta_fa"
_sdpa_before: Counter[str] = Counter()


class VoltaAttention:
    """Runs a model's attention on volta_fa, whichever attention ComfyUI was started with."""

    RETURN_TYPES = ("MODEL",)
    FUNCTION = "apply"
    CATEGORY = "model/patch"
    DESCRIPTION = (
        "Runs this model's attention on volta_fa: fp16 on Volta and Turing GPUs. Other calls run ComfyUI's own attention. "
        "The log counts both after each sampling run."
    )

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        """Returns the inputs, in the form that ComfyUI reads."""
        tooltip = "Also on newer GPUs and on the CPU: correct, but slower than ComfyUI's own attention. For tests."
        return {"required": {"model": ("MODEL",)}, "optional": {"every_device": ("BOOLEAN", {"default": False, "tooltip": tooltip})}}

    def apply(self, model: Any, every_device: bool = False) -> tuple[Any]:
        """Returns a clone of the model with the override, and with a log line after each sampling run."""
        from comfy.patcher_extension import WrappersMP

        model = model.clone()
        options = model.model_options.setdefault("transformer_options", {})
        options["optimized_attention_override"] = make_override(every_device, options.get("optimized_attention_override"))
        model.remove_wrappers_with_key(WrappersMP.OUTER_SAMPLE, _KEY)
        model.add_wrapper_with_key(WrappersMP.OUTER_SAMPLE, _KEY, _log_counts)
        return (model,)


def enable_sdpa() -> None:
    """Enables volta_fa for PyTorch's attention, which text encoders use. They ignore overrides.

    VOLTA_FA_ENABLE_SDPA, if set, decides instead; 0 leaves PyTorch's attention.
    """
    if "VOLTA_FA_ENABLE_SDPA" in os.environ:
        return
    try:
        volta_fa.enable_sdpa()
    except RuntimeError as error:  # no GPU qualifies
        logging.info("%s", error)


def _log_counts(sample: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Samples, then logs the run's counts, and those of PyTorch's attention since the last line, in one line."""
    before = counts.copy()
    try:
        return sample(*args, **kwargs)
    finally:
        logging.info("volta_fa: attention calls of this run: %s%s", describe(counts - before), _sdpa_since_last_line())


def _sdpa_since_last_line() -> str:
    stats = volta_fa.sdpa_stats()
    calls = Counter({"ran": stats["ran"], **stats["fell_back"]})
    new = calls - _sdpa_before
    _sdpa_before.clear()
    _sdpa_before.update(calls)
    return f"; of scaled_dot_product_attention since the last line: {describe(new)}" if new else ""
