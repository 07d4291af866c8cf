"""Attention of gpt-oss in unsloth's training: a replacement for unsloth_zoo's `flex_attention_with_sink`, which `switch`
installs. unsloth_zoo calls compiled FlexAttention and scales its result by the sinks. `volta_fa::fwd` has sinks itself."""

from typing import Any

import torch
from torch import Tensor

from . import releases  # finds names in unsloth, or raises ImportError. A Replacement: module, name, new value.

# Enabled: returns the enabled devices, or None. kernel_dtype: to which q, k and v are cast. unsupported: why no kernel takes them, or "".
from .calls import Enabled, count, kernel_dtype, unsupported

#: What is replaced: the module, its function, and the parameters of that in tested releases, for comparison.
MODULE = "unsloth_zoo.flex_attention"
_NAME = "flex_attention_with_sink"
_PARAMETERS = ("self_attn", "query", "key", "value", "attention_mask", "scale", "sliding_window", "compile", "has_static_cache")


def replacements(enabled: Enabled) -> list[releases.Replacement]:
    """Returns one replacement, for unsloth_zoo's function of query, key and value (batch, nheads, seqlen, headdim), with a result
    (batch, seqlen, nheads, headdim). Returns [] where unsloth_zoo has no function, because this PyTorch or machine has no FlexAttention:
    gpt-oss runs eager attention of transformers then. Raises ImportError, with the versions, if unsloth_zoo has changed its function."""
    module = releases.module(MODULE)
    if releases.find(module, _NAME) is None and not releases.find(module, "HAS_FLEX_ATTENTION"):
        return []
    original = releases.find_function(module, _NAME, _PARAMETERS)

    def flex_attention_with_sink(
        self_attn: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        scale: float | None = None,
        sliding_window: int | None = None,
        compile: bool = True,
        has_static_cache: bool = True,
    ) -> Tensor:
        devices = enabled()
        if devices is None:
            return original(self_attn, query, key, value, attention_mask, scale, sliding_window, compile, has_static_cache)
        sinks: Any = getattr(self_attn, "sinks", None)
        # why unsloth's function runs: a key of `unsloth_stats`, or ""
        reason = "device" if query.device not in devices else unsupported(query, key, value)
        if not reason and query.shape[2] != key.shape[2]:
            reason = "shape"
        if not reason and attention_mask is not None:
            reason = "attention_mask"
        if not reason and sinks is None:
            reason = "arguments"
        if reason:
            count("fell_back", reason)
            return original(self_attn, query, key, value, attention_mask, scale, sliding_window, compile, has_static_cache)
        count("ran")
        window = sliding_window or getattr(self_attn, "sliding_window", None)
        dtype = kernel_dtype(query, key, value)
        q, k, v = (t.to(dtype).transpose(1, 2) for t in (query, key, value))
        # as in unsloth_zoo's function, the layer's scale comes before the argument
        scale = getattr(self_attn, "scaling", None) or getattr(self_attn, "scale", None) or scale
        # transformers counts the query's own key in the window
        left = window - 1 if isinstance(window, int) and window > 0 else -1
        sinks = sinks if sinks.dtype in (dtype, torch.float32) else sinks.float()
        out = torch.ops.volta_fa.fwd(q, k, v, softmax_scale=scale, is_causal=True, window_left=left, sinks=sinks)[0]
        return out.to(query.dtype)

    return [(module, _NAME, flex_attention_with_sink)]
