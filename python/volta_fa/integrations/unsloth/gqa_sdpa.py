"""Attention of Gemma 3 and Gemma 4 in unsloth: a replacement for unsloth_zoo's `make_gqa_sdpa`, which switch.py installs.

unsloth_zoo's layers for these models compute in float32 on GPUs without bfloat16, with masks in memory. Here causal masks and windows are
recognized by their values, and need no memory."""

import sys
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from . import releases  # finds names in unsloth, or raises ImportError. A Replacement: module, name, new value.

# Enabled: returns the enabled devices, or None. kernel_dtype: to which q, k and v are cast. unsupported: why no kernel takes them, or "".
from .calls import Enabled, count, kernel_dtype, unsupported

#: What is replaced: the module, its function, and the parameters of that in tested releases, for comparison.
MODULE = "unsloth_zoo.temporary_patches.sdpa_gqa"
_NAME = "make_gqa_sdpa"
_PARAMETERS = ("scaled_dot_product_attention",)
#: A module that keeps q, k and v of Qwen3-MoE in float32, because its gradients overflow in float16: unsloth's function runs for it.
_FLOAT32_MODULE = "unsloth_zoo.temporary_patches.qwen3_moe_float32"
#: Parameters of the function that `make_gqa_sdpa` returns.
_INNER_PARAMETERS = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "groups")
#: A mask that is added to scores hides a key with a value below this. transformers writes the minimum of the dtype, or -inf.
_HIDDEN = -1e4
#: Maximum number of masks in `_known_windows`. Layers and recomputations of one step share few mask tensors; reading one waits for the GPU.
_MAX_KNOWN = 8
#: By id() of a mask: the mask, its version counter, and its `causal_window`.
_known_windows: dict[int, tuple[weakref.ref[Tensor], int, int | None]] = {}


def replacements(enabled: Enabled) -> list[releases.Replacement]:
    """Returns one replacement, for unsloth_zoo's function. unsloth calls it when it loads a model, and the model's layers keep the function
    that it returns, of tensors (batch, nheads, seqlen, headdim) with `groups` query heads for each KV head.
    Raises ImportError, with the versions, if unsloth_zoo has changed what it replaces."""
    module = releases.module(MODULE)
    releases.module(_FLOAT32_MODULE)
    original = releases.find_function(module, _NAME, _PARAMETERS)
    made = original(torch.nn.functional.scaled_dot_product_attention)
    releases.check_parameters(f"{MODULE}.{_NAME}(...)", made, _INNER_PARAMETERS)

    def make_gqa_sdpa(scaled_dot_product_attention: Callable[..., Tensor]) -> Callable[..., Tensor]:
        theirs = original(scaled_dot_product_attention)
        needs_float32 = _is_called_by(_FLOAT32_MODULE)

        def gqa_sdpa(
            query: Tensor,
            key: Tensor,
            value: Tensor,
            attn_mask: Tensor | None,
            dropout_p: float,
            is_causal: bool,
            scale: float | None,
            groups: int,
        ) -> Tensor:
            devices = enabled()
            if devices is None:
                return theirs(query, key, value, attn_mask, dropout_p, is_causal, scale, groups)
            # why unsloth's function runs: a key of `unsloth_stats`, or ""
            reason = "device" if query.device not in devices else "float32" if needs_float32 else unsupported(query, key, value)
            if not reason and ((is_causal and query.shape[2] != key.shape[2]) or query.shape[1] != groups * key.shape[1]):
                reason = "shape"
            if not reason and attn_mask is not None and not _is_usable(attn_mask, query, key, is_causal):
                reason = "attention_mask"
            if reason:
                count("fell_back", reason)
                return theirs(query, key, value, attn_mask, dropout_p, is_causal, scale, groups)
            count("ran")
            dtype = kernel_dtype(query, key, value)
            q, k, v = (t.to(dtype).transpose(1, 2) for t in (query, key, value))
            options = {"is_causal": is_causal} if attn_mask is None else _mask_options(attn_mask)
            out = torch.ops.volta_fa.fwd(q, k, v, softmax_scale=scale, dropout_p=dropout_p, **options)[0]
            return out.transpose(1, 2).to(query.dtype)

        # not compiled, like unsloth's function, because the code depends on a mask's values
        return torch.compiler.disable(gqa_sdpa, recursive=True)

    return [(module, _NAME, make_gqa_sdpa)]


def _is_called_by(module: str) -> bool:
    """Returns whether code of this module is on the call stack: unsloth's layers do not say which model they belong to."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_globals.get("__name__") == module:
            return True
    return False


def _is_usable(mask: Tensor, query: Tensor, key: Tensor, is_causal: bool) -> bool:
    """Returns whether it is a mask of scaled_dot_product_attention that the operators take: (., ., queries, keys), without a gradient."""
    return (
        not is_causal
        and not mask.requires_grad
        and (mask.dtype == torch.bool or mask.is_floating_point())
        and mask.shape[2:] == (query.shape[2], key.shape[2])  # so it has four dimensions
        and mask.shape[0] in (1, query.shape[0])
        and mask.shape[1] in (1, query.shape[1])
    )


def _mask_options(mask: Tensor) -> dict[str, Any]:
    """Returns the arguments of `volta_fa::fwd` for a mask: a window needs no memory, and the kernels skip hidden keys."""
    window = causal_window(mask)
    if window is not None:
        return {"is_causal": True, "window_left": window}
    return {"attn_bias": mask if mask.dtype in (torch.bool, torch.float32) else mask.float()}


def causal_window(mask: Tensor) -> int | None:
    """Returns the number of keys before its own position that a query sees under `mask`, -1 for all, or None for another mask.

    Args:
        mask: (batch or 1, nheads or 1, seqlen, seqlen), bool, or floating-point with 0 where visible.

    Waits for the GPU: once for each of the last eight masks, each time for an inference tensor.
    """
    if mask.is_inference():  # has no version counter, so changes would not be noticed
        return _read_window(mask)
    if (known := _known_windows.get(id(mask))) is not None:
        reference, version, window = known
        if reference() is mask and version == mask._version:
            return window
    window = _read_window(mask)
    while len(_known_windows) >= _MAX_KNOWN:
        del _known_windows[next(iter(_known_windows))]
    _known_windows[id(mask)] = (weakref.ref(mask), mask._version, window)
    return window


def _read_window(mask: Tensor) -> int | None:
    """Computes `causal_window` from the mask's values."""
    rows, keys = mask.shape[-2:]
    if rows != keys or rows == 0:
        return None
    visible = mask if mask.dtype == torch.bool else mask == 0
    seen = visible[..., -1, :].sum(-1).amax()  # by the last query
    distance = torch.arange(rows, device=mask.device)[:, None] - torch.arange(keys, device=mask.device)
    is_window = (visible == ((distance >= 0) & (distance < seen))).all()
    if mask.dtype != torch.bool:
        is_window &= (visible | (mask < _HIDDEN)).all()
    matches, width = torch.stack((is_window.long(), seen)).tolist()  # one wait for both
    if not matches or not width:  # a width of 0: the mask hides every key
        return None
    return -1 if width == keys else width - 1
