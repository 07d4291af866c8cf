"""Hugging Face transformers models on volta_fa.

    import volta_fa.transformers

    model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float16, attn_implementation="volta_fa")

Importing this module registers an attention function, and the mask function that belongs to it, under the name
`volta_fa`, for the models that use transformers' attention interface, in transformers 4.57 and 5.x. A model that does
not use it raises ValueError when it is constructed with this name. docs/transformers.md says what is covered.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_map_only

from ...version import __version__

try:
    from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel, masking_utils
    from transformers import __version__ as transformers_version
except ImportError as error:
    raise ImportError(
        f"volta_fa {__version__} needs transformers 4.57 or 5.x ({error}): run `pip install 'transformers>=4.57,<6'`"
    ) from error

from .quantized_cache import QuantizedCache, QuantizedStates, arguments

__all__ = ["NAME", "MaskRule", "QuantizedCache", "attention", "context_parallel", "mask"]

#: The value of `attn_implementation`.
NAME = "volta_fa"
#: What continuous batching makes of it up to transformers 5.17, while it generates.
_PAGED = f"paged|{NAME}"
#: The first transformers whose continuous batching runs on it. In 5.13 its own cache of sliding layers gives wrong tokens, with its own
#: attention too; what lies between was not looked at.
_BATCHES = (5, 17)
_VERSION = tuple(int(part) for part in transformers_version.split(".")[:2])


class MaskRule(Tensor):
    """A mask of shape (batch, 1, seqlen_q, keys), dtype bool, True where visible, that has no memory: a few numbers say
    it all, and `attention` hands them to the op. A model that does anything else with it than to pass it on gets the
    tensor that it stands for.

    Attributes:
        window_left, window_right: query i sees the keys i + o - window_left <= j <= i + o + window_right, with
            o = seqlen_k - seqlen_q; -1 is no limit.
        seqlen_k: so many of the keys exist. The rest is the empty end of a static cache.
        cu_seqlens_q, cu_seqlens_k: int32, where the sequences begin among the batch * seqlen_q queries and the batch *
            seqlen_k keys, and at the end their number; None if each entry of the batch is one sequence. A run of padding is
            a sequence too, so that the tokens can stay where they are.
        max_seqlen_q, max_seqlen_k: the longest of them.
        leftpad_k: int32 (batch), how many of the first keys are padding, that no query sees; None for none.
    """

    window_left: int
    window_right: int
    seqlen_k: int
    cu_seqlens_q: Tensor | None
    cu_seqlens_k: Tensor | None
    max_seqlen_q: int
    max_seqlen_k: int
    leftpad_k: Tensor | None

    @staticmethod
    def __new__(
        cls,
        shape: tuple[int, int, int, int],
        device: torch.device | str,
        window_left: int = -1,
        window_right: int = -1,
        seqlen_k: int | None = None,
        cu_seqlens_q: Tensor | None = None,
        cu_seqlens_k: Tensor | None = None,
        leftpad_k: Tensor | None = None,
    ) -> MaskRule:
        """Of this shape, on this device; the other arguments are the attributes."""
        self = Tensor._make_wrapper_subclass(cls, shape, dtype=torch.bool, device=torch.device(device))
        self.window_left, self.window_right = window_left, window_right
        self.seqlen_k = shape[3] if seqlen_k is None else seqlen_k
        self.cu_seqlens_q, self.cu_seqlens_k, self.leftpad_k = cu_seqlens_q, cu_seqlens_k, leftpad_k
        self.max_seqlen_q = self.max_seqlen_k = 0
        if cu_seqlens_q is not None:
            assert cu_seqlens_k is not None
            self.max_seqlen_q, self.max_seqlen_k = torch.stack([cu_seqlens_q.diff().max(), cu_seqlens_k.diff().max()]).tolist()
        return self

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # Tensor's is a placeholder without arguments' defaults
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten.detach.default:  # gradient checkpointing
            return args[0]
        if func is torch.ops.aten.alias.default:  # a slice of all keys, which some models take
            return args[0]._copy(args[0].device)
        if func is torch.ops.aten._to_copy.default and (kwargs or {}).get("dtype") in (None, torch.bool):  # layers on several devices
            return args[0]._copy((kwargs or {}).get("device") or args[0].device)
        args, kwargs = tree_map_only(cls, cls.as_tensor, (args, kwargs or {}))
        return func(*args, **kwargs)

    def _copy(self, device: torch.device | str) -> MaskRule:
        copy = Tensor._make_wrapper_subclass(type(self), self.shape, dtype=torch.bool, device=torch.device(device))
        copy.__dict__.update({name: value.to(device) if isinstance(value, Tensor) else value for name, value in self.__dict__.items()})
        return copy

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]  # Tensor's has the default only
        return (
            f"MaskRule(shape={tuple(self.shape)}, window=({self.window_left}, {self.window_right}), "
            f"seqlen_k={self.seqlen_k}, cu_seqlens_q={self.cu_seqlens_q}, cu_seqlens_k={self.cu_seqlens_k}, leftpad_k={self.leftpad_k})"
        )

    def as_tensor(self) -> Tensor:
        """What it stands for, in memory."""
        batch, _, seqlen_q, keys = self.shape
        i = torch.arange(seqlen_q, device=self.device)[:, None] + self.seqlen_k - seqlen_q
        j = torch.arange(keys, device=self.device)
        visible = (j < self.seqlen_k).expand(batch, 1, seqlen_q, keys)
        if self.window_left >= 0:
            visible = visible & (j >= i - self.window_left)
        if self.window_right >= 0:
            visible = visible & (j <= i + self.window_right)
        if self.leftpad_k is not None:
            visible = visible & (j >= self.leftpad_k[:, None, None, None])
        if self.cu_seqlens_q is not None and self.cu_seqlens_k is not None:
            sequence_q, sequence_k = (
                torch.bucketize(torch.arange(batch * length, dtype=torch.int32, device=self.device), cu_seqlens, right=True).view(
                    batch, 1, length
                )
                for length, cu_seqlens in ((seqlen_q, self.cu_seqlens_q), (self.seqlen_k, self.cu_seqlens_k))
            )
            same = sequence_q[..., :, None] == sequence_k[..., None, :]
            visible = visible & F.pad(same, (0, keys - self.seqlen_k))
        return visible


# ---- the mask function -----------------------------------------------------------------------------------------------


class _NeedsTensor(Exception):
    """No rule describes this mask."""


#: Model types whose own code adds to the mask or compares it with 0: right with eager's additive masks only. (Gemma 4's
#: vision tower, of another type, does not.)
_CALCULATE_WITH_MASKS = ("beit", "deepseek_v4", "doge", "gemma4_audio")


def mask(
    batch_size: int,
    kv_length: int,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = masking_utils.causal_mask_function,
    attention_mask: Tensor | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    **kwargs: Any,
) -> Tensor | None:
    """The mask function: transformers calls it once a forward (for each kind of layer) and hands what it returns to
    `attention` in every layer.

    Args:
        attention_mask: (batch, keys) bool, False for padding.

    Returns None where nothing is hidden; a `MaskRule` for causality, windows, packed sequences, padding at the ends, and
    a static cache that is being filled; for one query after padding, or over a static cache that compiled code reads, the range of
    keys that it sees, int32 (2, 1, 1, batch): the first, and the end; else a bool tensor that broadcasts to (batch, 1, seqlen_q,
    keys), True where visible: for padding behind cached keys or in the middle, for patterns that are not transformers' own, and while
    tracing or capturing a CUDA graph, which forbid a look at the values. Models that calculate with their mask get eager's.
    """
    if _sharded is not None:
        return _sharded.mask(_pattern, mask_function, attention_mask)
    if getattr(kwargs.get("config"), "model_type", None) in _CALCULATE_WITH_MASKS:
        return masking_utils.eager_mask(
            batch_size=batch_size,
            kv_length=kv_length,
            kv_offset=kv_offset,
            mask_function=mask_function,
            attention_mask=attention_mask,
            allow_is_bidirectional_skip=allow_is_bidirectional_skip,
            **kwargs,
        )
    tracing = _is_tracing()
    try:
        if tracing and (attention_mask is not None or kwargs.get("q_length") != 1):
            raise _NeedsTensor
        pattern = _pattern(mask_function)
        if (
            kwargs.get("q_length") == 1
            and pattern.sequences is None
            and (tracing or (pattern.window_right == 0 and not allow_is_causal_skip))
        ):
            # decoding, with a tensor of one shape at every step
            return _range(pattern, batch_size, kv_length, kv_offset, attention_mask, kwargs.get("device", "cpu"), kwargs.get("q_offset", 0))
        if tracing:
            raise _NeedsTensor
        # transformers forbids it where compiled code expects a tensor at every step. For packed sequences it always
        # does, because SDPA has no other way.
        allowed = allow_is_causal_skip if pattern.window_right == 0 else allow_is_bidirectional_skip
        if not allowed and pattern.sequences is None:
            raise _NeedsTensor
        return _rule(pattern, batch_size, kv_length, kv_offset, attention_mask, *_queries(**kwargs))
    except _NeedsTensor:
        return masking_utils.sdpa_mask(
            batch_size=batch_size,
            kv_length=kv_length,
            kv_offset=kv_offset,
            mask_function=mask_function,
            attention_mask=attention_mask,
            allow_is_causal_skip=False,
            **kwargs,
        )


def _is_tracing() -> bool:
    """Whether the values of tensors are nobody's to look at now."""
    if torch.compiler.is_compiling() or torch.jit.is_tracing():  # type: ignore[attr-defined, no-untyped-call]
        return True
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


@dataclasses.dataclass(frozen=True)
class _Pattern:
    """A mask function of transformers, in the op's terms."""

    window_left: int = -1
    window_right: int = -1
    sequences: Tensor | None = None  # (batch, seqlen): which of the packed sequences a token belongs to

    def __and__(self, other: _Pattern) -> _Pattern:
        if self.sequences is not None and other.sequences is not None:
            raise _NeedsTensor
        return _Pattern(
            _tighter(self.window_left, other.window_left),
            _tighter(self.window_right, other.window_right),
            other.sequences if self.sequences is None else self.sequences,
        )


def _tighter(a: int, b: int) -> int:
    return max(a, b) if min(a, b) < 0 else min(a, b)


def _pattern(function: Callable[..., Any]) -> _Pattern:
    """What a mask function says. Those of transformers are named functions, or closures over their parameters; of any
    other, and if transformers changes them, nothing is assumed."""
    if getattr(function, "__module__", None) != masking_utils.__name__:
        raise _NeedsTensor
    variables = {name: cell.cell_contents for name, cell in zip(function.__code__.co_freevars, function.__closure__ or ())}
    match function.__qualname__.partition(".")[0], variables:
        case "causal_mask_function", _:
            return _Pattern(window_right=0)
        case "bidirectional_mask_function", _:
            return _Pattern()
        case "sliding_window_overlay", {"sliding_window": int(size)}:
            return _Pattern(window_left=size - 1)
        case "sliding_window_bidirectional_overlay", {"sliding_window": int(size)}:
            return _Pattern(size, size)
        case "packed_sequence_mask_function", {"packed_sequence_mask": Tensor() as sequences}:
            return _Pattern(sequences=sequences)
        case "remap_positions_for_packed_sequence", {"mask_function": inner}:
            # to positions inside a sequence, which lie as far apart as the tokens do
            return _pattern(inner)
        case "and_masks", {"mask_functions": tuple(parts)}:
            return functools.reduce(_Pattern.__and__, map(_pattern, parts))
    raise _NeedsTensor


def _queries(
    q_length: int = 0,
    q_offset: int | Tensor = 0,
    device: torch.device | str = "cpu",
    cache_position: Tensor | None = None,
    **_: Any,
) -> tuple[torch.device | str, int, int]:
    """Where the queries are, how many, and the position of the first."""
    if cache_position is None:
        return device, q_length, int(q_offset)
    # transformers 4.57 names all positions
    first, last = cache_position[[0, -1]].tolist()
    if last - first != len(cache_position) - 1:
        raise _NeedsTensor
    return cache_position.device, len(cache_position), first


def _rule(
    pattern: _Pattern,
    batch: int,
    kv_length: int,
    kv_offset: int,
    padding_mask: Tensor | None,
    device: torch.device | str,
    seqlen_q: int,
    q_offset: int,
) -> Tensor | None:
    left, right, seqlen_k = pattern.window_left, pattern.window_right, kv_length
    if left >= 0 or right >= 0:
        # The op aligns the last query with the last key, and causality hides what comes after it.
        seqlen_k = q_offset + seqlen_q - kv_offset
        if not 0 < seqlen_k <= kv_length or (right != 0 and seqlen_k != kv_length):
            raise _NeedsTensor
        if left >= seqlen_k - 1:
            left = -1
        if right >= seqlen_q - 1 and right > 0:
            right = -1

    cu_seqlens_q = cu_seqlens_k = leftpad_k = None
    if pattern.sequences is not None:
        if seqlen_q != seqlen_k or padding_mask is not None:
            raise _NeedsTensor
        cu_seqlens_q = cu_seqlens_k = _cu_seqlens(_changes(pattern.sequences.expand(batch, -1)))
    elif padding_mask is not None:
        padding_mask = F.pad(padding_mask, (0, max(0, kv_offset + kv_length - padding_mask.shape[1])))
        padding_mask = padding_mask[:, kv_offset : kv_offset + seqlen_k].expand(batch, -1)
        changes = _changes(padding_mask)
        begins = changes & padding_mask  # of runs of tokens
        facts = [padding_mask.all(), (begins.sum(1) > 1).any(), padding_mask[:, -1].all()]
        complete, broken, ends = torch.stack(facts).tolist()  # one wait for the GPU
        unlimited = left < 0 and (right < 0 or seqlen_q == 1)
        if complete:
            pass
        elif unlimited and seqlen_q == 1 and not broken:
            return _range_of_tokens(padding_mask)
        elif unlimited and (broken or seqlen_q == 1):
            # with one query, the memory that this takes is nothing beside the copy of a cache
            return F.pad(padding_mask, (0, kv_length - seqlen_k))[:, None, None, :]
        elif broken:
            raise _NeedsTensor
        elif unlimited:
            # All queries belong to the tokens among the keys. They need not be the same tokens: cross-attention.
            cu_seqlens_k = _cu_seqlens(changes)
            begins[:, 0] |= ~padding_mask.any(1)
            cu_seqlens_q = F.pad(begins[changes].cumsum(0).int() * seqlen_q, (1, 0))
        elif seqlen_q == seqlen_k:
            cu_seqlens_q = cu_seqlens_k = _cu_seqlens(changes)
        elif ends:
            leftpad_k = padding_mask.to(torch.int8).argmax(1).int()
        else:
            raise _NeedsTensor

    one_each = cu_seqlens_q is None or len(cu_seqlens_q) == batch + 1
    if not one_each:
        return MaskRule((batch, 1, seqlen_q, kv_length), device, left, right, seqlen_k, cu_seqlens_q, cu_seqlens_k)
    # Causality is no None: modules that do not say whether they are causal exist of both kinds.
    if left >= 0 or (right >= 0 and seqlen_q > 1) or seqlen_k != kv_length:
        return MaskRule((batch, 1, seqlen_q, kv_length), device, left, right, seqlen_k, leftpad_k=leftpad_k)
    return None


def _range(
    pattern: _Pattern,
    batch: int,
    kv_length: int,
    kv_offset: int | Tensor,
    padding_mask: Tensor | None,
    device: torch.device | str,
    q_offset: int | Tensor,
) -> Tensor:
    """The keys that one query sees, at position q_offset, which may be a tensor that nobody has to look at."""
    position = torch.as_tensor(q_offset - kv_offset, dtype=torch.int32, device=device)
    left, right = pattern.window_left, pattern.window_right
    begin = torch.zeros_like(position) if left < 0 else (position - left).clamp(min=0)
    end = torch.full_like(position, kv_length) if right < 0 else (position + right + 1).clamp(max=kv_length)
    seen = torch.stack((begin, end)).view(2, 1).expand(2, batch)
    if padding_mask is not None and not bool(padding_mask.all()):
        offset = int(kv_offset)
        tokens = F.pad(padding_mask, (0, max(0, offset + kv_length - padding_mask.shape[1])))
        tokens = tokens[:, offset : offset + kv_length].expand(batch, -1)
        if bool(((_changes(tokens) & tokens).sum(1) > 1).any()):
            raise _NeedsTensor
        first, last = _range_of_tokens(tokens)[:, 0, 0]
        begin, end = torch.maximum(seen[0], first), torch.minimum(seen[1], last)
        seen = torch.stack((torch.minimum(begin, end), end))
    return seen.contiguous()[:, None, None]


def _range_of_tokens(tokens: Tensor) -> Tensor:
    """Of (batch, keys) bool with one run of tokens at most: where that begins and ends."""
    count = tokens.sum(1, dtype=torch.int32)
    first = tokens.to(torch.int8).argmax(1).int()
    return torch.stack((first, first + count))[:, None, None]


def _is_range(attention_mask: Tensor | None) -> bool:
    """Whether a mask is what `_range` makes."""
    return attention_mask is not None and not isinstance(attention_mask, MaskRule) and attention_mask.dtype == torch.int32


def _changes(values: Tensor) -> Tensor:
    """(batch, seqlen): where a row begins or its value changes."""
    return F.pad(values[:, 1:] != values[:, :-1], (1, 0), value=True)


def _cu_seqlens(begins: Tensor) -> Tensor:
    return F.pad(begins.flatten().nonzero().flatten().int(), (0, 1), value=begins.numel())


# ---- the attention function ------------------------------------------------------------------------------------------

#: Arguments of attention functions that change the result and that nothing here can do.
_LACKING = {
    "head_mask": "a factor for each head",
    "indices": "sparse attention",
    "block_indices": "sparse attention",
    "sinks": "sinks that differ from token to token",
}
#: They say is_causal, and eager attention, which does not ask, shows them everything, as an image needs.
_NOT_CAUSAL = ("Phi4MultimodalVisionAttention",)
_MAX_HEADDIM = 256
#: Queries, of all heads of a key head, from which on the forward kernels are faster than those for decoding: their tiles are full then.
_FEW_ROWS = 64


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
    """The attention function: runs `volta_fa::fwd`; `volta_fa::fwd_kvcache` for few queries without a gradient, and in continuous batching.

    Args:
        query: (batch, nheads, seqlen_q, headdim); key and value: (batch, nheads_k, seqlen_k, headdim), value's headdim may
            differ. Up to 256; what is not a multiple of 8 costs a copy. float16 or bfloat16 on CUDA. Or what a `QuantizedCache` has
            returned for them.
        attention_mask: what `mask` returned, or a tensor that broadcasts to (batch, nheads, seqlen_q, seqlen_k): bool, True
            where visible, or floating-point, added to the scores; or int32, the range that `mask` returns for one query. None: what
            `is_causal`, or else the module's is_causal if it has one, says (the last query sees the last key), in a window of
            `sliding_window`.
        softcap, s_aux (nheads), dropout, scaling: the op's softcap, sinks, dropout_p and softmax_scale.
        position_bias: floating-point, broadcasts to (batch, nheads, seqlen_q, seqlen_k), added to the scores.
        cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k: packed sequences, the op's cu_seqlens and max_seqlen; then
            these say what belongs together, and a tensor as a mask is refused, unless it comes from tracing: that one says
            the same.

    Returns (out, None), out (batch, seqlen_q, nheads, headdim of value). Raises, before anything runs,
    NotImplementedError for what is lacking, output_attentions among it, and ValueError for wrong arguments.
    """
    if _sharded is not None:
        given = dict(attention_mask=attention_mask, position_bias=position_bias, cu_seq_lens_q=cu_seq_lens_q)
        _refuse(module, query, key, value, None, False, kwargs)
        if is_causal is None:
            is_causal = getattr(module, "is_causal", False) and type(module).__name__ not in _NOT_CAUSAL
        return _sharded.attention(
            query, key, value, given, dropout, scaling, sliding_window, softcap or 0.0, bool(is_causal), s_aux, bool(deterministic)
        ), None
    packed = cu_seq_lens_q is not None
    cache = kwargs.pop("cache", None)
    if cache is not None:
        lengths = {
            "cu_seq_lens_q": cu_seq_lens_q,
            "cu_seq_lens_k": cu_seq_lens_k,
            "max_length_q": max_length_q,
            "max_length_k": max_length_k,
        }
        options = {"sinks": s_aux, "softmax_scale": scaling, "softcap": softcap or 0.0, "is_causal": True}
        options["window_left"] = -1 if sliding_window is None else sliding_window - 1
        return _continuous_batch(module, query, key, value, cache, options, lengths | kwargs), None
    _refuse(module, query, key, value, attention_mask, packed, kwargs)
    batch, seqlen_q, keys = query.shape[0], query.shape[2], key.shape[2]
    rule = attention_mask if isinstance(attention_mask, MaskRule) else None
    if rule is not None and tuple(rule.shape) != (batch, 1, seqlen_q, keys):
        # its cu_seqlens are on the GPU, where to check them would be to wait
        raise ValueError(f"volta_fa: attention_mask: got {rule}, expected shape ({batch}, 1, {seqlen_q}, {keys})")
    quantized = isinstance(key, QuantizedStates)
    if quantized and (packed or dropout > 0.0 or position_bias is not None):
        name = "cu_seq_lens_q" if packed else "dropout" if dropout > 0.0 else "position_bias"
        raise NotImplementedError(f"volta_fa: {name}: got it with a QuantizedCache, expected none")

    window_left = window_right = -1
    bias: Tensor | None = None
    sequences: dict[str, Any] = {}
    tensors = (query, key, value) if s_aux is None else (query, key, value, s_aux)
    few = quantized or (
        seqlen_q < (keys if rule is None else rule.seqlen_k)
        and seqlen_q * query.shape[1] // max(1, key.shape[1]) < _FEW_ROWS
        and dropout == 0.0
        and position_bias is None
        and not (torch.is_grad_enabled() and any(t.requires_grad for t in tensors))
    )
    if rule is not None and (
        # a bias is for each position in the batch, not in a sequence; and fwd knows of no padding among cached keys
        (position_bias is not None and not packed and rule.cu_seqlens_q is not None) or (rule.leftpad_k is not None and not few)
    ):
        attention_mask = rule.as_tensor()
        rule = None
    seen: dict[str, Tensor] = {}
    if _is_range(attention_mask) and not packed:
        assert attention_mask is not None
        begin, end = attention_mask[:, 0, 0]
        if few and seqlen_q == 1:
            seen = {"leftpad_k": begin, "cache_seqlens": end}
        else:
            position = torch.arange(keys, device=query.device)
            bias = ((position >= begin[:, None]) & (position < end[:, None]))[:, None, None, :]
    elif rule is not None:
        window_left, window_right, keys = rule.window_left, rule.window_right, rule.seqlen_k
        seen = {} if rule.leftpad_k is None else {"leftpad_k": rule.leftpad_k}
        if rule.cu_seqlens_q is not None and rule.cu_seqlens_k is not None:
            sequences = _sequences(rule.cu_seqlens_q, rule.cu_seqlens_k, rule.max_seqlen_q, rule.max_seqlen_k)
    elif attention_mask is None or packed:
        if sliding_window is not None:
            window_left = window_right = sliding_window - 1
        if is_causal is None:
            is_causal = getattr(module, "is_causal", False) and type(module).__name__ not in _NOT_CAUSAL
        if is_causal:
            window_right = 0
    else:
        bias = attention_mask[..., :keys] if _VERSION < (5, 0) else attention_mask  # some models of 4.57 make it too long
        if _is_old_gpt2(module) and not module.is_cross_attention:
            window_right = 0  # whatever the mask shows
    if scaling is None:
        scaling = query.shape[-1] ** -0.5
        if _is_old_gpt2(module):
            gpt2: Any = module
            scaling = scaling if gpt2.scale_attn_weights else 1.0
            scaling /= gpt2.layer_idx + 1 if gpt2.scale_attn_by_inverse_layer_idx else 1
    if cu_seq_lens_q is not None:
        if cu_seq_lens_k is None or max_length_q is None or max_length_k is None:
            raise ValueError(
                "volta_fa: cu_seq_lens_q: got it without all of cu_seq_lens_k, max_length_q and max_length_k, expected them too"
            )
        sequences = _sequences(cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k)
    if position_bias is not None:
        if packed:
            raise NotImplementedError("volta_fa: position_bias: got it together with cu_seq_lens_q, expected one of them")
        bias = _sum_of_biases(bias, position_bias[..., :keys])

    q = query.transpose(1, 2)
    if isinstance(key, QuantizedStates) and isinstance(value, QuantizedStates):
        if bias is not None or sequences:
            raise NotImplementedError(
                f"volta_fa: attention_mask: {type(module).__name__} got one that is more than causality, a window and padding before or "
                "after a sequence, with a QuantizedCache: expected one of these"
            )
        cache = arguments(key.stored, value.stored)
        q = q if key.turn is None else q @ key.turn
    else:
        k, v = (t[:, :, :keys].transpose(1, 2) for t in (key, value))
        cache = {"k_cache": k, "v_cache": v}
    if few and bias is None and not sequences:
        out, _softmax_lse = torch.ops.volta_fa.fwd_kvcache(
            q if q.stride(-1) == 1 else q.contiguous(),
            cache.pop("k_cache"),
            cache.pop("v_cache"),
            **cache,
            **seen,
            sinks=s_aux,
            softmax_scale=scaling,
            window_left=window_left,
            window_right=window_right,
            softcap=softcap or 0.0,
        )
        return out, None
    if sequences:
        q, k, v = (t.flatten(0, 1) for t in (q, k, v))
    out, _softmax_lse, _rng_state = torch.ops.volta_fa.fwd(
        q,
        k,
        v,
        **sequences,
        attn_bias=bias,
        sinks=s_aux,
        dropout_p=dropout,
        softmax_scale=scaling,
        window_left=window_left,
        window_right=window_right,
        softcap=softcap or 0.0,
        deterministic=bool(deterministic),
    )
    return out.view(batch, seqlen_q, *out.shape[-2:]), None


def _continuous_batch(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, cache: Any, options: dict[str, Any], kwargs: dict[str, Any]
) -> Tensor:
    """The attention of transformers' continuous batching, (1, tokens, nheads, headdim): packed sequences, some of whose keys are in
    the pages of `cache`. It has written what is new there and gathered the keys of each sequence, unless it gives a block_table, which
    it does where all sequences have one query."""
    if not hasattr(cache, "update"):
        raise NotImplementedError(
            f"volta_fa: cache: {type(module).__name__} uses a {type(cache).__name__}, expected the cache of transformers' "
            "continuous batching"
        )
    _refuse_older_batches()
    parameters = inspect.signature(cache.update).parameters
    if "kwargs" in parameters:
        key, value = cache.update(key_states=key, value_states=value, layer_idx=module.layer_idx, kwargs=kwargs)
    elif {"read_index", "write_index"} <= set(parameters):
        key, value = _older_cache(module, key, value, cache, options["window_left"] >= 0, kwargs)
    else:
        raise NotImplementedError(
            f"volta_fa: cache: continuous batching of transformers {transformers_version} hands over its cache in another way than 5.17 "
            "and 5.23 do, which volta_fa follows: expected one of these"
        )
    cu_seqlens_k = kwargs["cu_seq_lens_k"]
    if kwargs.get("block_table") is not None:
        q, k, v = (t.squeeze(0).transpose(0, 1).unsqueeze(1) for t in (query, key, value))
        # the lengths are those with the new token
        cached = cu_seqlens_k.diff()[: len(q)] - 1
        out, _softmax_lse = torch.ops.volta_fa.fwd_kvcache(
            q, kwargs["k_cache"], kwargs["v_cache"], k, v, cache_seqlens=cached, block_table=kwargs["block_table"], **options
        )
        return out.transpose(0, 1)
    q, k, v = (t.squeeze(0).transpose(0, 1) for t in (query, key, value))
    sequences = _sequences(kwargs["cu_seq_lens_q"], cu_seqlens_k, kwargs["max_length_q"], kwargs["max_length_k"])
    out, _softmax_lse, _rng_state = torch.ops.volta_fa.fwd(q, k, v, **sequences, **options)
    return out.unsqueeze(0)


def _refuse_older_batches() -> None:
    if _VERSION < _BATCHES:
        raise NotImplementedError(
            f"volta_fa: generate_batch: got transformers {transformers_version}, expected 5.17 or later, whose continuous batching "
            "volta_fa follows"
        )


def _older_cache(
    module: torch.nn.Module, key: Tensor, value: Tensor, cache: Any, has_window: bool, kwargs: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """What `cache.update(kwargs=...)` does, with the cache of transformers 5.17: it takes indices, and all layers of a kind share
    a group, whose block table is one of several."""
    for name in ("cu_seq_lens_k", "max_seqlen_k"):
        if isinstance(kwargs[name], dict):
            kwargs[name] = kwargs[name]["sliding_attention" if has_window else "full_attention"]
    kwargs |= {"max_length_q": kwargs["max_seqlen_q"], "max_length_k": kwargs["max_seqlen_k"]}
    if kwargs.get("block_table") is None:
        indices = {name: kwargs[name] for name in ("read_index", "write_index")}
        key, value = cache.update(key_states=key, value_states=value, layer_idx=module.layer_idx, **indices)
        return key.transpose(0, 1).unsqueeze(0), value.transpose(0, 1).unsqueeze(0)
    group, layer = cache.layer_index_to_group_indices[module.layer_idx]
    shape = (-1, cache.block_size, cache.num_key_value_heads, cache.head_dim)
    kwargs["block_table"] = kwargs["block_table"][group]
    kwargs |= {"k_cache": cache.key_cache[layer].view(shape), "v_cache": cache.value_cache[layer].view(shape)}
    return key, value


def _is_old_gpt2(module: torch.nn.Module) -> bool:
    """GPT-2 and the decision transformer of transformers 4.57, whose eager attention looks up in the module how to scale,
    and is causal by a table of its own."""
    return _VERSION < (5, 0) and hasattr(module, "scale_attn_by_inverse_layer_idx")


def _refuse(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, packed: bool, kwargs: dict[str, Any]
) -> None:
    if kwargs.get("output_attentions") or getattr(getattr(module, "config", None), "output_attentions", False):
        raise NotImplementedError(
            "volta_fa: output_attentions: got True, expected False: the weights are never in memory; attn_implementation='eager' has them"
        )
    for name, what in _LACKING.items():
        if kwargs.get(name) is not None:
            raise NotImplementedError(f"volta_fa: {name}: {type(module).__name__} uses {what}, which volta_fa does not have")
    name = type(module).__name__
    if attention_mask is not None and (not isinstance(attention_mask, MaskRule) or attention_mask.leftpad_k is not None):
        additive = attention_mask.is_floating_point()
        # 4.57's ViT and its relatives pass it as the mask, and eager multiplies by it
        if additive and attention_mask.dim() == 4 and attention_mask.shape[2:] == (1, 1) and key.shape[2] > 1:
            raise NotImplementedError(f"volta_fa: head_mask: {name} uses {_LACKING['head_mask']}, which volta_fa does not have")
        if packed and (additive or not torch.compiler.is_compiling()):
            raise NotImplementedError(
                f"volta_fa: attention_mask: {name} got one that is more than causality or a window, and cu_seq_lens_q: expected one of them"
            )
    if packed and getattr(getattr(module, "config", None), "attention_chunk_size", None):
        raise NotImplementedError(f"volta_fa: cu_seq_lens_q: {name} attends in chunks, which packed sequences here do not")
    headdim = max(query.shape[-1], value.shape[-1])
    if headdim > _MAX_HEADDIM:
        raise NotImplementedError(f"volta_fa: headdim: {name} has {headdim}, expected at most {_MAX_HEADDIM}")


def _sum_of_biases(bias: Tensor | None, position_bias: Tensor) -> Tensor:
    if bias is None:
        return position_bias
    if bias.dtype == torch.bool:
        return torch.where(bias, position_bias, float("-inf"))
    return bias + position_bias


def _sequences(cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int | Tensor, max_seqlen_k: int | Tensor) -> dict[str, Any]:
    return {
        "cu_seqlens_q": cu_seqlens_q.int(),
        "cu_seqlens_k": cu_seqlens_k.int(),
        "max_seqlen_q": int(max_seqlen_q),
        "max_seqlen_k": int(max_seqlen_k),
    }


# ---- sequences that are sharded over devices -----------------------------------------------------------------------------

#: What stands in the place of `attention` and `mask` while `context_parallel` is open.
_sharded: Any = None


@contextmanager
def context_parallel(mesh: Any = None, *, cu_seqlens: Any = None, layout: str = "zigzag") -> Iterator[None]:
    """Models with `attn_implementation="volta_fa"` attend over sequences that are sharded over `mesh`, in all threads.

        with volta_fa.transformers.context_parallel(mesh):
            shards = (shard_sequence(t, mesh) for t in (input_ids, position_ids, shift_labels))
            ...
            loss.backward()

    Tokens, position ids and labels are made with `volta_fa.distributed.shard_sequence`. A loss shifts labels by one position, which
    is elsewhere than one place further in a shard: shift them before, and hand them over as `shift_labels`. The backward pass belongs
    inside too, since activation checkpointing computes forward passes in it.

    Args:
        mesh, layout: as of `volta_fa.distributed.context_parallel_attention`.
        cu_seqlens: packed batches of one row: where the sequences begin in it, as of the same function.
    """
    global _sharded
    from ...distributed.transformers import Sharded

    before, _sharded = _sharded, Sharded(mesh, cu_seqlens, layout)
    try:
        yield
    finally:
        _sharded = before


# ---- registration ----------------------------------------------------------------------------------------------------


def _register() -> None:
    if _VERSION < (4, 57):
        raise ImportError(f"volta_fa {__version__} needs transformers 4.57 or 5.x, and {transformers_version} is installed")
    if _VERSION >= (6, 0):
        warnings.warn(
            f"volta_fa {__version__} is tested with transformers 4.57 and 5.x, and {transformers_version} is installed", stacklevel=3
        )
    for name in (NAME, _PAGED):
        AttentionInterface.register(name, attention)
        AttentionMaskInterface.register(name, mask)

    # transformers takes any registered name for any model, and one that does not use the interface would then go on
    # with an attention of its own.
    models: Any = PreTrainedModel  # whose methods are replaced
    accept = models.get_correct_attn_implementation
    ask = models._can_set_attn_implementation.__func__

    # transformers reads the source of the class's module: of a class from a notebook there is none, and other attention
    # in a program says nothing about the model that it derives. What counts is the model of transformers underneath.
    @functools.wraps(ask)
    def can_set(cls: type[PreTrainedModel]) -> bool:
        for base in cls.__mro__:
            if base is not PreTrainedModel and base.__module__.startswith("transformers.") and issubclass(base, PreTrainedModel):
                return ask(base)
        try:
            inspect.getsource(sys.modules[cls.__module__])
        except (KeyError, OSError, TypeError):
            return True
        return ask(cls)

    @functools.wraps(accept)
    def checked(self: PreTrainedModel, requested_attention: str | None, *args: Any, **kwargs: Any) -> str:
        if requested_attention == _PAGED:
            _refuse_older_batches()
        if requested_attention in (NAME, _PAGED) and not self._can_set_attn_implementation():
            raise ValueError(
                f"attn_implementation: got {NAME!r}, and {type(self).__name__} of transformers {transformers_version} does not use the "
                "attention interface: expected 'sdpa', which volta_fa.enable_sdpa() also runs, or 'eager'"
            )
        return accept(self, requested_attention, *args, **kwargs)

    models._can_set_attn_implementation = classmethod(can_set)
    models.get_correct_attn_implementation = checked
    _join_continuous_batching()


def _join_continuous_batching() -> None:
    """Continuous batching asks by name whether an implementation can do without mask tensors and with block tables; ours can."""
    try:
        from transformers.generation.continuous_batching import cache, continuous_api, initialization
    except ImportError:
        return  # another version's

    def with_ours(ask: Callable[..., bool]) -> Callable[..., bool]:
        @functools.wraps(ask)
        def asked(config: Any = None, requested_attention_implementation: str | None = None, **kwargs: Any) -> bool:
            name = requested_attention_implementation if config is None else config._attn_implementation
            return name in (NAME, _PAGED) or ask(config, requested_attention_implementation, **kwargs)

        return asked

    for module in (cache, continuous_api, initialization):
        if hasattr(module, "is_flash_attention_requested"):
            module.is_flash_attention_requested = with_ours(module.is_flash_attention_requested)  # type: ignore[attr-defined]

    # transformers lets flash-attn read pages, by its names and on GPUs only; ours does it wherever the op runs
    theirs: Any = initialization
    ensure = getattr(theirs, "ensure_decode_fast_path_is_available", None)
    if ensure is not None:

        @functools.wraps(ensure)
        def ensured(config: Any, cb_config: Any, *args: Any, **kwargs: Any) -> None:
            if config._attn_implementation not in (NAME, _PAGED):
                return ensure(config, cb_config, *args, **kwargs)
            if hasattr(theirs, "ATTN_TYPE_TO_ALLOCATOR"):
                kinds = theirs.group_layers_by_attn_type(config)
                have_tables = all(theirs.ATTN_TYPE_TO_ALLOCATOR[kind].supports_block_table for kind in kinds)
            else:  # up to 5.17
                kinds = getattr(config, "layer_types", None)
                windows = getattr(config, "sliding_window", None) is not None if kinds is None else "sliding_attention" in kinds
                have_tables = not windows
            if not have_tables:
                cb_config.max_blocks_per_request = 0

        theirs.ensure_decode_fast_path_is_available = ensured


_register()
