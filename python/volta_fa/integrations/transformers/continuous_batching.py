"""Continuous batching of transformers (`generate_batch`): the attention of its batches over a paged KV cache.

`attention_function` calls `continuous_batch`. `registration` calls `register`, which makes transformers treat volta_fa like flash-attn,
which it recognizes by the implementation's name."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...errors import bad_argument
from ...operands import with_unit_stride  # copies a tensor unless its last dimension is contiguous
from . import releases  # VERSION: major and minor number of transformers
from .mask_rule import sequence_arguments  # cu_seqlens and max_seqlen of `volta_fa::fwd` by name
from .releases import NAME, PAGED_NAME  # attn_implementation, and what some releases set in its place in generate_batch

#: The first supported transformers. In 5.13 the cache of sliding layers gives wrong tokens, with transformers' own attention too. The
#: releases between are untested.
_FIRST_RELEASE = (5, 17)


def continuous_batch(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, cache: Any, options: dict[str, Any], kwargs: dict[str, Any]
) -> Tensor:
    """Computes attention of a batch of `generate_batch`: packed sequences, whose earlier keys are in the pages of `cache`.

    `cache.update` writes the new keys into the pages, and returns all keys of each sequence, copied together: `volta_fa::fwd` attends to
    these. In steps in which each sequence has one query it may instead put a block_table into kwargs: then `volta_fa::fwd_kvcache` appends
    the new keys, and reads the pages in place.

    Args:
        query, key, value: (1, nheads or nheads_k, tokens, headdim).
        options: arguments of both operators.
        kwargs: arguments of the attention function. `cache.update` adds to them, with a block_table also k_cache and v_cache.

    Returns (1, tokens, nheads, headdim). Raises NotImplementedError for another cache, or another release of transformers.
    """
    if not hasattr(cache, "update"):
        got = f"a {type(cache).__name__} in {type(module).__name__}"
        raise bad_argument("cache", got, "the cache of transformers' continuous batching", error=NotImplementedError)
    check_release()
    parameters = inspect.signature(cache.update).parameters
    if "kwargs" in parameters:
        key, value = cache.update(key_states=key, value_states=value, layer_idx=module.layer_idx, kwargs=kwargs)
    elif {"read_index", "write_index"} <= set(parameters):
        key, value = _older_cache(module, key, value, cache, options["window_left"] >= 0, kwargs)
    else:
        got = f"the one of transformers {releases.transformers_version}"
        raise bad_argument("cache", got, "an update method as in 5.17 or 5.23: install one of these", error=NotImplementedError)
    cu_seqlens_k = kwargs["cu_seq_lens_k"]
    if kwargs.get("block_table") is not None:
        q, k, v = (with_unit_stride(t.squeeze(0).transpose(0, 1).unsqueeze(1)) for t in (query, key, value))
        # cu_seqlens_k counts the new token too
        cached = cu_seqlens_k.diff()[: len(q)] - 1
        out, _softmax_lse = torch.ops.volta_fa.fwd_kvcache(
            q, kwargs["k_cache"], kwargs["v_cache"], k, v, cache_seqlens=cached, block_table=kwargs["block_table"], **options
        )
        return out.transpose(0, 1)
    q, k, v = (with_unit_stride(t.squeeze(0).transpose(0, 1)) for t in (query, key, value))
    sequences = sequence_arguments(kwargs["cu_seq_lens_q"], cu_seqlens_k, kwargs["max_length_q"], kwargs["max_length_k"])
    out, _softmax_lse, _rng_state = torch.ops.volta_fa.fwd(q, k, v, **sequences, **options)
    return out.unsqueeze(0)


def check_release() -> None:
    """Raises NotImplementedError for a transformers without a supported continuous batching."""
    if releases.VERSION < _FIRST_RELEASE:
        got = f"transformers {releases.transformers_version}"
        raise bad_argument("generate_batch", got, "5.17 or later, whose continuous batching volta_fa follows", error=NotImplementedError)


def _older_cache(
    module: torch.nn.Module, key: Tensor, value: Tensor, cache: Any, has_window: bool, kwargs: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """Does what `cache.update(kwargs=...)` of later releases does, with the cache of transformers 5.17. Its `update` takes indices, and it
    has a block table for each group of layers of one kind. Returns keys and values, and adds to kwargs."""
    for name in ("cu_seq_lens_k", "max_seqlen_k"):
        if isinstance(kwargs[name], dict):
            kwargs[name] = kwargs[name]["sliding_attention" if has_window else "full_attention"]
    kwargs |= {"max_length_q": kwargs["max_seqlen_q"], "max_length_k": kwargs["max_seqlen_k"]}
    if kwargs.get("block_table") is None:
        indices = {name: kwargs[name] for name in ("read_index", "write_index")}
        key, value = cache.update(key_states=key, value_states=value, layer_idx=module.layer_idx, **indices)
        return key.transpose(0, 1).unsqueeze(0), value.transpose(0, 1).unsqueeze(0)
    group, layer = cache.layer_index_to_group_indices[module.layer_idx]  # numbers of the layer's group, and of the layer in it
    shape = (-1, cache.block_size, cache.num_key_value_heads, cache.head_dim)
    kwargs["block_table"] = kwargs["block_table"][group]
    kwargs |= {"k_cache": cache.key_cache[layer].view(shape), "v_cache": cache.value_cache[layer].view(shape)}
    return key, value


def register() -> None:
    """Makes continuous batching treat volta_fa like flash-attn: without mask tensors, and with block tables. transformers decides both by
    the names of implementations. Does nothing if a release has other modules."""
    try:
        from transformers.generation.continuous_batching import cache, continuous_api, initialization
    except ImportError:
        return

    def or_volta_fa(is_requested: Callable[..., bool]) -> Callable[..., bool]:
        """Returns transformers' question whether flash-attn is requested, answered with True for volta_fa too."""

        @functools.wraps(is_requested)
        def wrapper(config: Any = None, requested_attention_implementation: str | None = None, **kwargs: Any) -> bool:
            name = requested_attention_implementation if config is None else config._attn_implementation
            return name in (NAME, PAGED_NAME) or is_requested(config, requested_attention_implementation, **kwargs)

        return wrapper

    for module in (cache, continuous_api, initialization):
        if hasattr(module, "is_flash_attention_requested"):
            module.is_flash_attention_requested = or_volta_fa(module.is_flash_attention_requested)  # type: ignore[attr-defined]

    # transformers lets only flash-attn on GPUs read pages; volta_fa reads them on every device
    theirs: Any = initialization
    original = getattr(theirs, "ensure_decode_fast_path_is_available", None)
    if original is not None:

        @functools.wraps(original)
        def ensure_decode_fast_path_is_available(config: Any, cb_config: Any, *args: Any, **kwargs: Any) -> None:
            if config._attn_implementation not in (NAME, PAGED_NAME):
                return original(config, cb_config, *args, **kwargs)
            if hasattr(theirs, "ATTN_TYPE_TO_ALLOCATOR"):
                kinds = theirs.group_layers_by_attn_type(config)
                have_tables = all(theirs.ATTN_TYPE_TO_ALLOCATOR[kind].supports_block_table for kind in kinds)
            else:  # up to 5.17, where layers with a sliding window have no block tables
                kinds = getattr(config, "layer_types", None)
                has_window = getattr(config, "sliding_window", None) is not None if kinds is None else "sliding_attention" in kinds
                have_tables = not has_window
            if not have_tables:
                cb_config.max_blocks_per_request = 0  # no block tables: steps copy the keys together

        theirs.ensure_decode_fast_path_is_available = ensure_decode_fast_path_is_available
