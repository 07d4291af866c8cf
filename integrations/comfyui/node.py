"""The node that ComfyUI shows, and what the package switches on when ComfyUI imports it (__init__.py).

The node sets an override (attention.py), which ComfyUI's models call for each attention, on one model. Text encoders and VAEs ignore
overrides: enable_default_attention() serves these.
"""

from __future__ import annotations

import logging
import os
import sys
from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any

import volta_fa

from .attention import counts, describe, make_override  # the override's calls by outcome; a text of such counts; makes an override

#: Names the wrapper that logs, so that a second node on a model replaces it.
_KEY = "volta_fa"
#: Counts of calls outside the node, by switch, when the log's last line was written.
_last_line: defaultdict[str, Counter[str]] = defaultdict(Counter)


class VoltaAttention:
    """Runs a model's attention on volta_fa, whichever attention ComfyUI was started with."""

    RETURN_TYPES = ("MODEL",)
    FUNCTION = "apply"
    CATEGORY = "model/patch"
    DESCRIPTION = (
        "Runs this model's attention on volta_fa: fp16 and fp32 on Volta and Turing GPUs. Other calls run ComfyUI's own attention. "
        "The log counts both after each sampling run."
    )

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        """Returns the inputs, in the form that ComfyUI reads."""
        everywhere = "Also on newer GPUs and on the CPU: correct, but slower than ComfyUI's own attention. For tests."
        fast = "fast: int8 scores on GeForce RTX 20, with an error of about 1% of each call. Compare an image with exact."
        optional = {
            "every_device": ("BOOLEAN", {"default": False, "tooltip": everywhere}),
            "precision": (["exact", "fast"], {"default": "exact", "tooltip": fast}),
        }
        return {"required": {"model": ("MODEL",)}, "optional": optional}

    def apply(self, model: Any, every_device: bool = False, precision: str = "exact") -> tuple[Any]:
        """Returns a clone of the model (ComfyUI's ModelPatcher) with the override, and with a log line after each sampling run. The other
        arguments are those of `make_override`."""
        from comfy.patcher_extension import WrappersMP

        model = model.clone()
        options = model.model_options.setdefault("transformer_options", {})
        options["optimized_attention_override"] = make_override(every_device, options.get("optimized_attention_override"), precision)
        model.remove_wrappers_with_key(WrappersMP.OUTER_SAMPLE, _KEY)  # wrappers of a whole sampling run, all its steps
        model.add_wrapper_with_key(WrappersMP.OUTER_SAMPLE, _KEY, _log_counts)
        return (model,)


def enable_default_attention() -> None:
    """Enables volta_fa for PyTorch's attention, and for an xformers that ComfyUI imported, which it prefers.

    They serve models without the node, and those that ignore overrides. VOLTA_FA_ENABLE_SDPA, if set, decides instead, for both:
    0 leaves both alone.
    """
    choice = os.environ.get("VOLTA_FA_ENABLE_SDPA")
    try:
        if choice is None:  # else `import volta_fa` has done what it says
            volta_fa.enable_sdpa()
        if "xformers.ops" in sys.modules and choice in (None, "1", "force", "cpu"):
            # device: "cpu", or None for all Volta and Turing GPUs
            volta_fa.enable_xformers("cpu" if choice == "cpu" else None, force=choice == "force")
    except (ImportError, RuntimeError) as error:  # no GPU qualifies, or xformers has another structure
        logging.info("%s", error)


def _log_counts(sample: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Samples, then logs in one line the run's counts, and those of PyTorch's attention and xformers since the last line."""
    before = counts.copy()
    try:
        return sample(*args, **kwargs)
    finally:
        logging.info("volta_fa: attention calls of this run: %s%s", describe(counts - before), _around())


def _around() -> str:
    """Returns text about calls outside the node since the last line: empty if there were none."""
    stats = {"scaled_dot_product_attention": volta_fa.sdpa_stats(), "xformers": volta_fa.xformers_stats()}
    text = ""
    for name, found in stats.items():  # found: "ran", a number of calls, and "fell_back", numbers by reason
        calls = Counter({"ran": found["ran"], **found["fell_back"]})
        if new := calls - _last_line[name]:
            text += f"; of {name} since the last line: {describe(new)}"
        _last_line[name] = calls
    return text
