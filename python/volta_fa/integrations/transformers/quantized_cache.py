"""`volta_fa.transformers.QuantizedCache`: a KV cache for transformers in int8, int4 or fp8 that no step dequantizes.

transformers' class of that name returns the whole cache in the model's dtype at each step. This one returns `QuantizedStates`, tensors
without memory that refer to codes and scales. `attention` (attention_function) passes these to `volta_fa::fwd_kvcache`."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from ...errors import bad_argument
from ...kv_cache.formats import QuantizedKV, hadamard, parts_of, quantize_kv  # parts_of: the formats of keys and of values
from ...operands import with_unit_stride  # copies a tensor unless its last dimension is contiguous

#: Full storage grows to 1 + 1 / _GROWTH times the needed size. So a token is copied about _GROWTH times, however long the sequence becomes.
_GROWTH = 4


class QuantizedStates(Tensor):
    """Keys or values of a layer, of shape (batch, nheads_k, seqlen, headdim) and the model's dtype, without memory of their own.

    Every operation on them but detach and alias raises NotImplementedError, so no code can dequantize the whole cache."""

    stored: QuantizedKV  # data, scales and zero points, as of `quantize_kv`: views of the cache's storage
    turn: Tensor | None  # a matrix (headdim, headdim) for the queries to be multiplied by, if the keys were rotated

    @staticmethod
    def __new__(cls, stored: QuantizedKV, headdim: int, dtype: torch.dtype, turn: Tensor | None = None) -> QuantizedStates:
        """Returns the states of storage rows, (batch, nheads_k, seqlen, columns)."""
        shape = (*stored.data.shape[:-1], headdim)
        self = Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=stored.data.device)
        self.stored, self.turn = stored, turn
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> QuantizedStates:
        stored, turn = copy.deepcopy((self.stored, self.turn), memo)
        memo[id(self)] = copied = QuantizedStates(stored, self.shape[-1], self.dtype, turn)
        return copied

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]  # Tensor's has the default only
        return f"QuantizedStates(shape={tuple(self.shape)}, {self.stored.data.dtype})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # Tensor's is a placeholder without arguments' defaults
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            return args[0]
        got = f"a QuantizedCache whose keys or values are given to {func}"
        expected = "a model with attn_implementation='volta_fa' that gives the cache's keys and values to attention as they are"
        raise bad_argument("past_key_values", got, f"{expected}: caches of latents need a DynamicCache", error=NotImplementedError)


class QuantizedLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]  # a base that registers classes
    """One layer of a `QuantizedCache`. Its storage is (batch, nheads_k, tokens, columns), so the tokens of a head are adjacent. There are
    headdim columns of a byte, in int4 headdim / 2, which hold two codes each.
    With `rotate_keys`, keys (before they are quantized) and queries are multiplied by a Hadamard matrix, which changes no score."""

    is_croppable = True  # transformers may call `crop`

    def __init__(self, kv_dtype: str, sliding_window: int | None = None, rotate_keys: bool = False) -> None:
        # not super().__init__(), which sets the attributes keys and values; they are properties here
        self.kv_dtype, self.rotate_keys = kv_dtype, rotate_keys
        self.sliding_window = sliding_window
        self.is_sliding = sliding_window is not None
        self.record_past = False
        self.reset()

    def reset(self) -> None:
        """Removes all tokens and frees the memory."""
        self.is_initialized = False
        self.stored: tuple[QuantizedKV, ...] = ()  # keys, values
        self.length = 0  # tokens so far
        self.dropped = 0  # tokens at the beginning that left the window and are no longer in memory
        self.shown = 0  # position of the first token that the last call's queries could see

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor | None = None) -> None:
        """Allocates for tensors (batch, nheads_k, any, headdim) of these dtypes and devices."""
        value_states = key_states if value_states is None else value_states
        self.device, self.dtype = key_states.device, key_states.dtype
        self.headdims = (key_states.shape[-1], value_states.shape[-1])
        self.turns: list[Tensor] = []  # with rotate_keys, the matrices for keys and for queries
        if self.rotate_keys:
            n = key_states.shape[-1]
            if n & (n - 1):
                raise bad_argument("rotate_keys", f"True with headdim {n}", "a power of two")
            # H H^T = n, so the scales of keys and queries have the product 1 / n. Both are powers of two, so exact in any dtype.
            half = n.bit_length() // 2
            scale_k, scale_q = 2.0**-half, 2.0**half / n
            self.turns = [(hadamard(n) * scale).to(self.device, self.dtype) for scale in (scale_k, scale_q)]
        states = zip((key_states, value_states), parts_of(self.kv_dtype))
        self.stored = tuple(quantize_kv(t[:, :, :0], kv_dtype) for t, kv_dtype in states)
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Quantizes and appends keys and values (batch, nheads_k, tokens, headdim). Returns `keys` and `values`.
        For a prompt on an empty cache it returns the arguments, so attention to it is not quantized."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        new, at = key_states.shape[2], self._make_room(key_states.shape[2])
        keys = key_states @ self.turns[0] if self.turns else key_states
        k, v = (with_unit_stride(t.detach().transpose(1, 2)) for t in (keys, value_states))
        cache = arguments(*(_rows(stored, at, new) for stored in self.stored))
        # Only appends: k[:, :0] are no queries, because attention runs later, with the mask. The cache argument is the rows of the new
        # tokens alone, so its length before is 0.
        zeros = torch.zeros(len(k), dtype=torch.int32, device=self.device)
        torch.ops.volta_fa.fwd_kvcache(k[:, :0], cache.pop("k_cache"), cache.pop("v_cache"), k, v, cache_seqlens=zeros, **cache)
        is_prompt = self.length == 0
        _, self.shown = self.get_mask_sizes(0)  # before the new tokens count
        self.length += new
        return (key_states, value_states) if is_prompt else (self._states(0), self._states(1))

    def _make_room(self, new: int) -> int:
        """Makes room for `new` tokens, and returns the row of the first in the storage. Drops tokens outside of the window if it copies."""
        used = self.length - self.dropped
        if used + new > self.stored[0].data.shape[2]:
            kept = used if self.sliding_window is None or self.record_past else min(used, self.sliding_window - 1)
            room = kept + new + (kept + new) // _GROWTH

            def moved(t: Tensor) -> Tensor:
                larger = t.new_empty((*t.shape[:2], room, *t.shape[3:]))
                larger[:, :, :kept] = t[:, :, used - kept : used]
                return larger

            self._change(moved)
            self.dropped += used - kept
            used = kept
        return used

    def _change(self, change: Callable[[Tensor], Tensor]) -> None:
        """Replaces each tensor of the storage by `change` of it."""
        self.stored = tuple(_each(change, stored) for stored in self.stored)

    def _states(self, i: int) -> QuantizedStates:
        """Returns keys (i = 0) or values (1) of the tokens that the last call's queries could see."""
        rows = _rows(self.stored[i], self.shown - self.dropped, self.length - self.shown)
        return QuantizedStates(rows, self.headdims[i], self.dtype, self.turns[1] if self.turns and i == 0 else None)

    @property
    def keys(self) -> QuantizedStates | None:  # type: ignore[override]  # an attribute of the base
        """The keys that the last call's queries could see; None before the first."""
        return self._states(0) if self.is_initialized else None

    @property
    def values(self) -> QuantizedStates | None:  # type: ignore[override]
        """The values of the same tokens."""
        return self._states(1) if self.is_initialized else None

    def get_seq_length(self) -> int:
        """Returns the number of tokens so far."""
        return self.length

    def get_mask_sizes(self, query_length: int | Tensor) -> tuple[int, int]:
        """Returns the number of keys for the next `query_length` queries, these included, and the position of the first key.
        transformers 4.57 passes the queries' positions instead of their number."""
        queries = len(query_length) if isinstance(query_length, Tensor) else query_length
        past = self.length if self.sliding_window is None else min(self.length, self.sliding_window - 1)
        return past + queries, self.length - past

    def get_max_length(self) -> int:
        """Returns -1: the cache has no maximum."""
        return -1

    get_max_cache_shape = get_max_length  # transformers 4.57

    def activate_past_recording(self) -> None:
        """Keeps all tokens from now on, so that `crop` can go back past a window."""
        self.record_past = True

    def crop(self, tokens_to_remove: int) -> None:
        """Removes the last -tokens_to_remove tokens. A positive number, as in transformers 4.57, is the number of tokens to keep.
        Raises ValueError if a window would show tokens that are no longer in memory."""
        left = max(0, self.length + tokens_to_remove) if tokens_to_remove <= 0 else min(self.length, tokens_to_remove)
        needed = 0 if self.sliding_window is None else self.sliding_window - 1
        if self.dropped and left - self.dropped < needed:
            got = f"{tokens_to_remove} after {self.length} tokens, of which the last {self.length - self.dropped} are in memory"
            expected = f"to leave {needed} of these, which a window shows; activate_past_recording() keeps all"
            raise bad_argument("tokens_to_remove", got, expected)
        self.length, self.shown = left, min(self.shown, left)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Replaces sequence i by sequence beam_idx[i]."""
        if self.is_initialized:
            indices = beam_idx.to(self.device)
            # as bytes, because torch has no index_select for some float8 dtypes on CUDA
            self._change(lambda t: t.view(torch.uint8).index_select(0, indices).view(t.dtype) if t.element_size() == 1 else t[indices])

    batch_select_indices = reorder_cache

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeats each sequence `repeats` times."""
        if self.is_initialized:
            self.reorder_cache(torch.arange(len(self.stored[0].data), device=self.device).repeat_interleave(repeats))


def _each(change: Callable[[Tensor], Tensor], stored: QuantizedKV) -> QuantizedKV:
    data, scale, zero_point = stored
    return QuantizedKV(change(data), None if scale is None else change(scale), None if zero_point is None else change(zero_point))


def _rows(stored: QuantizedKV, first: int, count: int) -> QuantizedKV:  # tokens first to first + count - 1
    return _each(lambda t: t.narrow(2, first, count), stored)


def arguments(k: QuantizedKV, v: QuantizedKV) -> dict[str, Tensor]:
    """Returns a layer's keys and values as arguments of `volta_fa::fwd_kvcache`, whose layout has tokens before heads."""
    named = {"k_cache": k.data, "k_scale": k.scale, "k_zero_point": k.zero_point}
    named |= {"v_cache": v.data, "v_scale": v.scale, "v_zero_point": v.zero_point}
    return {name: t.transpose(1, 2) for name, t in named.items() if t is not None}


class QuantizedCache(Cache):
    """A KV cache in int8, int4 or fp8, for models with `attn_implementation="volta_fa"`.

        cache = volta_fa.transformers.QuantizedCache(model.config, kv_dtype="int8")
        model.generate(**inputs, past_key_values=cache)

    It grows by a quarter when it is full, so at most a fifth of its memory is empty. Tokens are quantized as they are appended, and the
    kernels read codes and scales. The cache is only copied where `fwd_kvcache` itself copies it: for bfloat16 models and many queries.
    A prompt on an empty cache attends to its own keys and values before rounding; later calls, of chunked prefill too, attend to the
    cache. Layers with a sliding window keep the tokens in it.

    Supports beam search, crop (assisted decoding), batches padded on the left, and chunked prefill. In encoder-decoder models it can
    hold self-attention: `EncoderDecoderCache(QuantizedCache(...), DynamicCache(...))`.

    Args:
        config: the model's.
        kv_dtype: "int8", "int4", "fp8_e5m2" or "fp8_e4m3", as of `volta_fa.quantize_kv`; the fp8 ones have a scale of 1. "int8k_int4v"
            has keys in int8 and values in int4.
        rotate_keys: multiply keys, before they are quantized, and queries by a Hadamard matrix. Scores stay the same, and outliers of a
            channel spread over all channels (as in QuaRot, arXiv 2404.00456).

    Raises ValueError for another kv_dtype and a config with another attn_implementation, and NotImplementedError for layers that are
    neither full nor sliding attention. At the first token, raises ValueError for an odd headdim with int4, and for a headdim that is no
    power of two with rotate_keys. The model's attention raises NotImplementedError for masks that are more than causality, a window and
    padding before or after a sequence, and for another attention implementation.
    """

    def __init__(self, config: Any, kv_dtype: str = "int8", *, rotate_keys: bool = False) -> None:
        parts_of(kv_dtype)  # raises ValueError for another
        implementation = getattr(config, "_attn_implementation", None)
        if implementation not in (None, "volta_fa"):
            raise bad_argument("config", f"attn_implementation {implementation!r}", "'volta_fa', which alone reads a QuantizedCache")
        text = config.get_text_config(decoder=True)
        window = getattr(text, "sliding_window", None)
        types = getattr(text, "layer_types", None)
        if types is None:
            has_chunks = getattr(text, "attention_chunk_size", None)
            kind = "sliding_attention" if window else "chunked_attention" if has_chunks else "full_attention"
            types = [kind] * text.num_hidden_layers
        windows = {"full_attention": None, "sliding_attention": window}
        for kind in types:
            if kind not in windows:
                raise bad_argument("config", f"a layer of {kind}", " or ".join(windows), error=NotImplementedError)
        super().__init__(layers=[QuantizedLayer(kv_dtype, windows[kind], rotate_keys) for kind in types])
