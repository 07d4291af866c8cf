"""`attention`, the function that transformers calls in each layer of a model with `attn_implementation="volta_fa"`.

`registration` registers it. It translates transformers' arguments, and masks (which `mask_function` makes), into options of
`volta_fa::fwd`, or of `volta_fa::fwd_kvcache` for few queries and many keys, as in decoding."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...block_mask import BlockMask  # its options(): arguments of fwd; dense(): a bool tensor
from ...errors import bad_argument
from ...operands import MAX_DECODE_ROWS, MAX_HEADDIM, with_unit_stride  # rows: queries times heads per KV head
from . import releases, sharded_sequences  # releases.VERSION: major and minor number of transformers
from .continuous_batching import continuous_batch  # attention of a batch of generate_batch
from .mask_function import is_range  # whether a mask is a range of keys
from .mask_rule import MaskRule, sequence_arguments  # a mask as windows, lengths or blocks; cu_seqlens and max_seqlen by name
from .quantized_cache import QuantizedStates, arguments  # a quantized layer's keys or values; both as arguments of fwd_kvcache

#: Arguments of attention functions that change the result and have no counterpart in the operators.
_UNSUPPORTED = {
    "head_mask": "a factor for each head",
    "indices": "sparse attention",
    "block_indices": "sparse attention",
    "sinks": "sinks that differ from token to token",
}
#: Classes whose attribute is_causal is True, although their attention to an image is not causal. transformers' eager attention ignores it.
_NOT_CAUSAL = ("BridgeTowerSelfAttention", "Phi4MultimodalVisionAttention")


def attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    max_length_q: int | Tensor | None = None,
    max_length_k: int | Tensor | None = None,
    deterministic: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Computes a layer's attention, by `volta_fa::fwd`, or by `volta_fa::fwd_kvcache` for few queries without a gradient.

    Args:
        query: (batch, nheads, seqlen_q, headdim); key and value: (batch, nheads_k, seqlen_k, headdim), value's headdim may
            differ. Up to 512; a headdim that is not a multiple of 8 costs a copy. float16, bfloat16 or float32 on CUDA. key and value may
            be the states that a `QuantizedCache` returns.
        attention_mask: what `mask` returned, or a tensor that broadcasts to (batch, nheads, seqlen_q, seqlen_k): bool, True
            where visible, or floating-point, added to the scores; or int32, the range that `mask` returns for one query. With None,
            `is_causal`, or else the module's is_causal if it has one, applies (the last query sees the last key), in a window of
            `sliding_window`.
        softcap, s_aux (nheads), dropout, scaling: the operators' softcap, sinks, dropout_p and softmax_scale.
        position_bias: floating-point, broadcasts to (batch, nheads, seqlen_q, seqlen_k), added to the scores.
        cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k: packed sequences, the operator's cu_seqlens and max_seqlen. They replace
            the mask: a mask tensor too raises NotImplementedError, except in traced code, where it describes the same sequences.
        kwargs: `cache` is that of continuous batching.

    Returns (out, None), out (batch, seqlen_q, nheads, headdim of value).

    Raises, before anything runs, NotImplementedError for unsupported arguments, such as output_attentions, and ValueError for wrong
    ones.
    """
    options: dict[str, Any] = {"sinks": s_aux, "softmax_scale": scaling, "softcap": softcap or 0.0}
    sharded = sharded_sequences.active()  # what computes attention while a `context_parallel` is open
    if sharded is not None:
        # sharded.attention raises for these unless they are None
        unsupported = dict(attention_mask=attention_mask, position_bias=position_bias, cu_seq_lens_q=cu_seq_lens_q)
        _check_supported(module, query, key, value, attention_mask=None, packed=False, kwargs=kwargs)
        # here and below, - 1: transformers counts the query's own key in a window, the operators do not
        causal, window = _is_causal(module, is_causal), -1 if sliding_window is None else sliding_window - 1
        options |= {"is_causal": causal, "window_left": window, "window_right": -1 if causal else window}
        options |= {"dropout_p": dropout, "deterministic": bool(deterministic)}
        return sharded.attention(query, key, value, unsupported, options), None
    packed = cu_seq_lens_q is not None
    cache = kwargs.pop("cache", None)
    if cache is not None:
        lengths = dict(cu_seq_lens_q=cu_seq_lens_q, cu_seq_lens_k=cu_seq_lens_k, max_length_q=max_length_q, max_length_k=max_length_k)
        options |= {"is_causal": True, "window_left": -1 if sliding_window is None else sliding_window - 1}
        return continuous_batch(module, query, key, value, cache, options, lengths | kwargs), None

    _check_supported(module, query, key, value, attention_mask, packed, kwargs)
    batch, seqlen_q, seqlen_k = query.shape[0], query.shape[2], key.shape[2]
    rule = attention_mask if isinstance(attention_mask, MaskRule) else None
    if rule is not None and tuple(rule.shape) != (batch, 1, seqlen_q, seqlen_k):
        # the kernels cannot notice it: a rule's cu_seqlens are on the GPU, and are not checked there
        raise bad_argument("attention_mask", rule, f"shape ({batch}, 1, {seqlen_q}, {seqlen_k})")
    quantized = isinstance(key, QuantizedStates)
    if quantized and (packed or dropout > 0.0 or position_bias is not None):
        name = "cu_seq_lens_q" if packed else "dropout" if dropout > 0.0 else "position_bias"
        raise bad_argument(name, "it with a QuantizedCache", "none", error=NotImplementedError)

    tensors = (query, key, value) if s_aux is None else (query, key, value, s_aux)
    has_blocks = rule is not None and rule.blocks is not None
    # Whether fwd_kvcache runs. From MAX_DECODE_ROWS query rows per KV head on, fwd's kernels fill their tiles, and are faster.
    use_kvcache = quantized or (
        not has_blocks
        and seqlen_q < (seqlen_k if rule is None else rule.seqlen_k)
        and seqlen_q * query.shape[1] // max(1, key.shape[1]) < MAX_DECODE_ROWS
        and dropout == 0.0
        and position_bias is None
        and not (torch.is_grad_enabled() and any(t.requires_grad for t in tensors))
    )
    if rule is not None:
        # a bias counts positions in the batch, packed sequences count them within each
        bias_needs_tensor = position_bias is not None and not packed and (has_blocks or rule.cu_seqlens_q is not None)
        # fwd has no leftpad_k
        padding_needs_tensor = rule.leftpad_k is not None and not use_kvcache
        if bias_needs_tensor or padding_needs_tensor:
            attention_mask = rule.as_tensor()
    visible = _visible_keys(module, query, key, attention_mask, use_kvcache, packed, _is_causal(module, is_causal), sliding_window)
    options |= {"window_left": visible.window_left, "window_right": visible.window_right}
    bias, sequences = visible.bias, visible.sequences
    if scaling is None:
        options["softmax_scale"] = _softmax_scale(module, query)
    if cu_seq_lens_q is not None:
        if cu_seq_lens_k is None or max_length_q is None or max_length_k is None:
            raise bad_argument("cu_seq_lens_q", "it without all of cu_seq_lens_k, max_length_q and max_length_k", "them too")
        sequences = sequence_arguments(cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k)
    if position_bias is not None:
        if packed:
            raise bad_argument("position_bias", "it together with cu_seq_lens_q", "one of them", error=NotImplementedError)
        bias = _sum_of_biases(bias, position_bias[..., : visible.seqlen_k])

    q = with_unit_stride(query.transpose(1, 2))
    if isinstance(key, QuantizedStates) and isinstance(value, QuantizedStates):
        if bias is not None or sequences or visible.blocks is not None:
            got = f"one that is more than causality, a window and padding before or after a sequence, in {type(module).__name__}"
            raise bad_argument("attention_mask", f"{got} with a QuantizedCache", "one of these", error=NotImplementedError)
        kv_cache = arguments(key.stored, value.stored)  # stored: codes, scales and zero points
        q = q if key.turn is None else q @ key.turn  # turn: a matrix for queries, if the cache rotated the keys before it quantized them
    else:
        k, v = (with_unit_stride(t[:, :, : visible.seqlen_k].transpose(1, 2)) for t in (key, value))
        kv_cache = {"k_cache": k, "v_cache": v}
    if use_kvcache and bias is None and not sequences:
        out, _softmax_lse = torch.ops.volta_fa.fwd_kvcache(
            q, kv_cache.pop("k_cache"), kv_cache.pop("v_cache"), **kv_cache, **visible.cache_lengths, **options
        )
        return out, None
    if sequences:
        q, k, v = (t.flatten(0, 1) for t in (q, k, v))
    options |= {"dropout_p": dropout, "deterministic": bool(deterministic)}
    if visible.blocks is not None:
        try:
            out, _softmax_lse, _rng_state = torch.ops.volta_fa.fwd(q, k, v, **visible.blocks.options(), **options)
            return out.view(batch, seqlen_q, *out.shape[-2:]), None
        except NotImplementedError:  # no kernel combines a block mask with these options
            bias = visible.blocks.dense()
    out, _softmax_lse, _rng_state = torch.ops.volta_fa.fwd(q, k, v, **sequences, attn_bias=bias, **options)
    return out.view(batch, seqlen_q, *out.shape[-2:]), None


class _VisibleKeys(NamedTuple):
    """The keys that each query sees, as arguments of the operators."""

    seqlen_k: int  # number of keys, from the first on, without the empty end of a static cache
    window_left: int = -1
    window_right: int = -1
    bias: Tensor | None = None  # attn_bias of `volta_fa::fwd`
    cache_lengths: Mapping[str, Tensor] = {}  # leftpad_k and cache_seqlens of `volta_fa::fwd_kvcache`
    sequences: Mapping[str, Any] = {}  # cu_seqlens and max_seqlen of `volta_fa::fwd`
    blocks: BlockMask | None = None  # a block mask of `volta_fa::fwd`


def _visible_keys(
    module: Any, query: Tensor, key: Tensor, mask: Tensor | None, use_kvcache: bool, packed: bool, causal: bool, sliding_window: int | None
) -> _VisibleKeys:
    """Translates a mask into arguments of the operators; without a mask, `causal` and `sliding_window`.

    Args:
        use_kvcache: whether `volta_fa::fwd_kvcache` runs if it supports the result.
        packed: whether cu_seq_lens_q is given, which replaces masks in memory.
    """
    seqlen_k = key.shape[2]
    if mask is not None and is_range(mask) and not packed:
        if mask.shape != (2, 1, 1, query.shape[0]):  # not one of `mask_function`: first key and end of each batch entry's range
            got = f"dtype {mask.dtype}, shape {tuple(mask.shape)}"
            raise bad_argument("attention_mask", got, "bool or floating-point, (batch, 1, queries, keys)")
        begin, end = mask[:, 0, 0]
        if use_kvcache and query.shape[2] == 1:
            return _VisibleKeys(seqlen_k, cache_lengths={"leftpad_k": begin, "cache_seqlens": end})
        position = torch.arange(seqlen_k, device=query.device)
        return _VisibleKeys(seqlen_k, bias=((position >= begin[:, None]) & (position < end[:, None]))[:, None, None, :])
    if isinstance(mask, MaskRule):
        lengths = {} if mask.leftpad_k is None else {"leftpad_k": mask.leftpad_k}
        sequences = {}
        if mask.cu_seqlens_q is not None and mask.cu_seqlens_k is not None:
            sequences = sequence_arguments(mask.cu_seqlens_q, mask.cu_seqlens_k, mask.max_seqlen_q, mask.max_seqlen_k)
        bias = None
        return _VisibleKeys(mask.seqlen_k, mask.window_left, mask.window_right, bias, lengths, sequences, mask.blocks)
    if mask is None or packed:
        window = -1 if sliding_window is None else sliding_window - 1
        return _VisibleKeys(seqlen_k, window, 0 if causal else window)
    bias = mask[..., :seqlen_k] if releases.VERSION < (5, 0) else mask  # some models of 4.57 make it too long
    causal = _is_old_gpt2(module) and not module.is_cross_attention
    return _VisibleKeys(seqlen_k, window_right=0 if causal else -1, bias=bias)


def _is_causal(module: torch.nn.Module, argument: bool | None) -> bool:
    """Returns whether a call without a mask is causal: by its argument is_causal, else by the module's attribute."""
    if argument is None:
        return bool(getattr(module, "is_causal", False)) and type(module).__name__ not in _NOT_CAUSAL
    return bool(argument)


def _softmax_scale(module: Any, query: Tensor) -> float:
    """Returns the softmax_scale of a module that does not pass `scaling`."""
    scale = query.shape[-1] ** -0.5
    if _is_old_gpt2(module):
        scale = scale if module.scale_attn_weights else 1.0
        scale /= module.layer_idx + 1 if module.scale_attn_by_inverse_layer_idx else 1
    return scale


def _is_old_gpt2(module: torch.nn.Module) -> bool:
    """Returns whether it is attention of GPT-2 or the decision transformer in transformers 4.57. Their eager attention reads its scale
    from the module, and is causal by a table of the module, besides the mask."""
    return releases.VERSION < (5, 0) and hasattr(module, "scale_attn_by_inverse_layer_idx")


def _check_supported(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, packed: bool, kwargs: dict[str, Any]
) -> None:
    """Raises NotImplementedError for arguments that the operators do not support."""
    name, config = type(module).__name__, getattr(module, "config", None)
    if kwargs.get("output_attentions") or getattr(config, "output_attentions", False):
        expected = "False: the weights are never in memory; attn_implementation='eager' has them"
        raise bad_argument("output_attentions", True, expected, error=NotImplementedError)
    for argument in _UNSUPPORTED:
        if kwargs.get(argument) is not None:
            raise _unsupported(argument, name)
    if attention_mask is not None and (
        not isinstance(attention_mask, MaskRule) or attention_mask.leftpad_k is not None or attention_mask.blocks is not None
    ):
        additive = attention_mask.is_floating_point()
        # ViT and its relatives in 4.57 pass a head_mask as the mask; eager attention multiplies probabilities by it
        if additive and attention_mask.dim() == 4 and attention_mask.shape[2:] == (1, 1) and key.shape[2] > 1:
            raise _unsupported("head_mask", name)
        if packed and (additive or not torch.compiler.is_compiling()):
            got = f"one that is more than causality or a window in {name}, and cu_seq_lens_q"
            remedy = ": logits_to_keep=0 keeps the mask of shared layers whole" if name.startswith("Gemma4") else ""
            raise bad_argument("attention_mask", got, f"one of them{remedy}", error=NotImplementedError)
    if packed and getattr(config, "attention_chunk_size", None):
        got = f"it in {name}, which attends in chunks"
        raise bad_argument("cu_seq_lens_q", got, "None: packed sequences have no chunks", error=NotImplementedError)
    headdim = max(query.shape[-1], value.shape[-1])
    if headdim > MAX_HEADDIM:
        raise bad_argument("headdim", f"{headdim} in {name}", f"at most {MAX_HEADDIM}", error=NotImplementedError)


def _unsupported(argument: str, module: str) -> Exception:
    got = f"{_UNSUPPORTED[argument]} in {module}"
    return bad_argument(argument, got, "None: use attn_implementation='eager'", error=NotImplementedError)


def _sum_of_biases(bias: Tensor | None, position_bias: Tensor) -> Tensor:
    if bias is None:
        return position_bias
    if bias.dtype == torch.bool:
        return torch.where(bias, position_bias, float("-inf"))
    return bias + position_bias
