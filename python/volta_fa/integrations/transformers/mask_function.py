"""The mask function: what transformers calls once a forward, and passes to the attention function in each layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import masking_utils

from . import sharded_sequences
from .mask_rule import MaskRule
from .patterns import NeedsTensor, Pattern, pattern_of

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
    sharded = sharded_sequences.active()
    if sharded is not None:
        sharded.check_mask(mask_function, attention_mask)
        return None
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
            raise NeedsTensor
        pattern = pattern_of(mask_function)
        if (
            kwargs.get("q_length") == 1
            and pattern.sequences is None
            and (tracing or (pattern.window_right == 0 and not allow_is_causal_skip))
        ):
            # decoding, with a tensor of one shape at every step
            return _range(pattern, batch_size, kv_length, kv_offset, attention_mask, kwargs.get("device", "cpu"), kwargs.get("q_offset", 0))
        if tracing:
            raise NeedsTensor
        # transformers forbids it where compiled code expects a tensor at every step. For packed sequences it always
        # does, because SDPA has no other way.
        allowed = allow_is_causal_skip if pattern.window_right == 0 else allow_is_bidirectional_skip
        if not allowed and pattern.sequences is None:
            raise NeedsTensor
        return _rule(pattern, batch_size, kv_length, kv_offset, attention_mask, *_queries(**kwargs))
    except NeedsTensor:
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
        raise NeedsTensor
    return cache_position.device, len(cache_position), first


def _rule(
    pattern: Pattern,
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
            raise NeedsTensor
        if left >= seqlen_k - 1:
            left = -1
        if right >= seqlen_q - 1 and right > 0:
            right = -1

    cu_seqlens_q = cu_seqlens_k = leftpad_k = None
    if pattern.sequences is not None:
        if seqlen_q != seqlen_k or padding_mask is not None:
            raise NeedsTensor
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
            raise NeedsTensor
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
            raise NeedsTensor

    one_each = cu_seqlens_q is None or len(cu_seqlens_q) == batch + 1
    if not one_each:
        return MaskRule((batch, 1, seqlen_q, kv_length), device, left, right, seqlen_k, cu_seqlens_q, cu_seqlens_k)
    # Causality is no None: modules that do not say whether they are causal exist of both kinds.
    if left >= 0 or (right >= 0 and seqlen_q > 1) or seqlen_k != kv_length:
        return MaskRule((batch, 1, seqlen_q, kv_length), device, left, right, seqlen_k, leftpad_k=leftpad_k)
    return None


def _range(
    pattern: Pattern,
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
            raise NeedsTensor
        first, last = _range_of_tokens(tokens)[:, 0, 0]
        begin, end = torch.maximum(seen[0], first), torch.minimum(seen[1], last)
        seen = torch.stack((torch.minimum(begin, end), end))
    return seen.contiguous()[:, None, None]


def _range_of_tokens(tokens: Tensor) -> Tensor:
    """Of (batch, keys) bool with one run of tokens at most: where that begins and ends."""
    count = tokens.sum(1, dtype=torch.int32)
    first = tokens.to(torch.int8).argmax(1).int()
    return torch.stack((first, first + count))[:, None, None]


def is_range(attention_mask: Tensor | None) -> bool:
    """Whether a mask is what `_range` makes."""
    return attention_mask is not None and not isinstance(attention_mask, MaskRule) and attention_mask.dtype == torch.int32


def _changes(values: Tensor) -> Tensor:
    """(batch, seqlen): where a row begins or its value changes."""
    return F.pad(values[:, 1:] != values[:, :-1], (1, 0), value=True)


def _cu_seqlens(begins: Tensor) -> Tensor:
    return F.pad(begins.flatten().nonzero().flatten().int(), (0, 1), value=begins.numel())
