"""Attention of unsloth's own models: Llama, Mistral, Qwen 3, Gemma 2, Granite, Cohere and Falcon H1, with packed sequences too.

All of them call `unsloth.utils.attention_dispatch.run_attention`, which calls `_run_attention` of the same module: `replacements` returns
what `switch` puts in its place. The configuration that the models pass holds the arguments of flash-attn's functions, whether flash-attn is
installed or not. The replacement calls volta_fa's functions of these names with them."""

from typing import Any

from torch import Tensor

from ...errors import bad_argument
from ..flash_attn.interface import flash_attn_func, flash_attn_varlen_func
from . import releases  # finds names in unsloth, or raises ImportError. A Replacement: module, name, new value.

# Enabled: returns the enabled devices, or None. kernel_dtype: to which q, k and v are cast. unsupported: why no kernel takes them, or "".
from .calls import Enabled, count, kernel_dtype, unsupported

#: What is replaced: the module and its function.
MODULE = "unsloth.utils.attention_dispatch"
_NAME = "_run_attention"
#: A flag of these modules. If True, Gemma 2 calls `run_attention`, with its softcap, instead of eager attention over masks in memory.
_FLAG = "HAS_FLASH_ATTENTION_SOFTCAPPING"
_FLAG_MODULES = ("unsloth.models.gemma2", "unsloth.models.llama")
# Parameters of the replaced function, and fields of its first two arguments, in tested releases, for comparison.
_PARAMETERS = ("config", "context", "Q", "K", "V")
_CONFIG = frozenset({
    "backend", "n_kv_heads", "n_groups", "flash_dense_kwargs", "flash_varlen_kwargs", "sdpa_kwargs", "xformers_kwargs",
})  # fmt: skip
_CONTEXT = frozenset({
    "bsz", "q_len", "kv_seq_len", "n_heads", "head_dim", "requires_grad", "seq_info", "attention_mask", "causal_mask", "sliding_window",
    "prefix_seg_info", "is_causal", "training",
})  # fmt: skip
#: The arguments of flash-attn's functions that unsloth's models use.
_ARGUMENTS = {"causal", "window_size", "softmax_scale", "softcap", "dropout_p"}
#: Types of masks that unsloth passes for causal attention with or without a window, which flash-attn's arguments describe too.
_CAUSAL_MASKS = ("NoneType", "bool", "LowerTriangularMask", "BlockDiagonalCausalMask", "BlockDiagonalCausalLocalAttentionMask")


def replacements(enabled: Enabled) -> list[releases.Replacement]:
    """Returns replacements for `switch`: a function that calls flash-attn's functions of volta_fa, or unsloth's function, and the flags.
    Raises ImportError, with the versions, if unsloth has changed what they replace.

    The function takes unsloth's AttentionConfig and AttentionContext, and Q, K, V (batch, nheads, seqlen, headdim), and returns (batch,
    seqlen, nheads, headdim). `context.seq_info` describes packed sequences."""
    module = releases.module(MODULE)
    original = releases.find_function(module, _NAME, _PARAMETERS)
    releases.check_fields(module, "AttentionConfig", _CONFIG)
    releases.check_fields(module, "AttentionContext", _CONTEXT)
    cover_padded_cu_seqlens = releases.find_function(module, "cover_padded_cu_seqlens", ("seq_info", "total_tokens"))
    ring_active = releases.find_function(module, "_ring_attention_active", ())
    flags = [(releases.module(name), _FLAG, True) for name in _FLAG_MODULES]
    for flagged, name, _ in flags:
        releases.find(flagged, name)

    def run_attention(*, config: Any, context: Any, Q: Tensor, K: Tensor, V: Tensor) -> Tensor:
        devices = enabled()
        if devices is None:
            return original(config=config, context=context, Q=Q, K=K, V=V)
        packed = context.seq_info is not None
        given = config.flash_varlen_kwargs if packed else config.flash_dense_kwargs
        arguments = {name: value for name, value in (given or {}).items() if value is not None}
        softcap = arguments.get("softcap", 0.0) != 0.0
        # Why `original` runs: a key of `unsloth_stats`, or "". A softcap runs here on any device: switch.py sets the flag that sends
        # Gemma 2 here, so it has no other implementation.
        reason = "device" if Q.device not in devices and not softcap else ""
        if context.prefix_seg_info is not None:  # GRPO's shared prefixes
            reason = "prefix"
        elif ring_active():
            reason = "context_parallel"
        elif context.attention_mask is not None:
            reason = "attention_mask"
        elif not reason:
            reason = unsupported(Q, K, V)
            if not reason and (given is None or not arguments.keys() <= _ARGUMENTS or (packed and Q.shape[2] != K.shape[2])):
                reason = "arguments"
            if not reason and type(context.causal_mask).__name__ not in _CAUSAL_MASKS and not softcap:
                reason = "causal_mask"
            if not reason and not softcap:  # with a softcap only flash-attn's arguments count, because no others have one
                reason = _mismatch(config, context, arguments, Q, K)
        if reason:
            if softcap and reason not in ("prefix", "context_parallel"):
                raise bad_argument("softcap", f"it with a call that has no kernel ({reason})", "none", error=NotImplementedError)
            count("fell_back", reason)
            return original(config=config, context=context, Q=Q, K=K, V=V)
        count("ran")
        if not context.is_causal:
            arguments["causal"] = False
        dtype = kernel_dtype(Q, K, V)
        q, k, v = (t.to(dtype).transpose(1, 2) for t in (Q, K, V))
        if packed:
            batch, seqlen = q.shape[:2]
            # unsloth's function: cu_seqlens in which the padding after the last sequence is a sequence too, and the longest length
            cu_seqlens, longest = cover_padded_cu_seqlens(context.seq_info, batch * seqlen)
            q, k, v = (t.flatten(0, 1) for t in (q, k, v))
            out: Any = flash_attn_varlen_func(q, k, v, cu_seqlens, cu_seqlens, longest, longest, **arguments)
            out = out.view(batch, seqlen, *out.shape[1:])
        else:
            out = flash_attn_func(q, k, v, **arguments)
        return out.to(Q.dtype)

    return [(module, _NAME, run_attention), *flags]


def _mismatch(config: Any, context: Any, arguments: dict[str, Any], q: Tensor, k: Tensor) -> str:
    """Returns the reason if flash-attn's arguments describe other attention than those of unsloth's other backends, else ""."""
    keys = k.shape[2]
    # unsloth's scaled_dot_product_attention without a mask is causal only if there are as many queries as keys
    if context.is_causal and q.shape[2] not in (1, keys):
        return "shape"
    window, left = context.sliding_window, arguments.get("window_size", (-1, -1))[0]
    visible = window if window is not None and 0 < window < keys else keys
    if visible != (left + 1 if 0 <= left < keys else keys) or (visible < keys and not context.is_causal):
        return "arguments"
    for name, ours, default in (("scale", "softmax_scale", q.shape[3] ** -0.5), ("dropout_p", "dropout_p", 0.0)):
        given = (config.sdpa_kwargs or {}).get(name)
        if (default if given is None else given) != arguments.get(ours, default):
            return "arguments"
    return "attention_mask" if (config.sdpa_kwargs or {}).get("attn_mask") is not None else ""
