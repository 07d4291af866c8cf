"""`mask`, the function that transformers calls once a forward pass for each kind of layer (full or sliding attention).

`registration` registers it. transformers passes its result to `attention` (`attention_function`) in each layer. A mask becomes a
`MaskRule` (`mask_rule`: a few numbers instead of memory) if possible, else a `MaskRule` with a block mask, else a tensor."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import masking_utils

from ...block_mask import BlockMask  # the visible blocks of 128 queries by 64 keys
from . import sharded_sequences

# Pattern: a window, and in `sequences` the packed sequence of each token. pattern_of: the Pattern of a mask function. NeedsTensor, raised
# where neither a Pattern nor a MaskRule without blocks describes the mask: it must be a block mask or a tensor.
from .mask_rule import MaskRule, NeedsTensor, Pattern, pattern_of

#: Model types whose own code calculates with the mask, and so needs the additive masks of eager attention.
_CALCULATE_WITH_MASKS = ("beit", "bigbird_pegasus", "deepseek_v4", "doge", "gemma4_audio", "informer", "qwen4_exp_text", "t5gemma2_decoder")
#: The same, by the class of a configuration without a model type.
_CONFIGS_THAT_CALCULATE_WITH_MASKS = ("PPDocLayoutV2ReadingOrderConfig",)
#: Minimum elements of a dense mask (of 1 byte) for which a block mask is cheaper. Making one takes about 100 launches, once a forward pass
#: for each kind of layer; then each layer skips the hidden blocks.
MIN_ELEMENTS = 1 << 20
#: Minimum number of queries for which a block mask is made: its blocks have 128.
MIN_QUERIES = 128


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
    """Returns the mask that transformers passes to `attention` in every layer of one kind.

    Args:
        batch_size, kv_length: entries of the batch, and keys.
        attention_mask: (batch, keys) bool, False for padding.
        mask_function: of a batch entry, a head, a query and a key: whether the query sees the key.
        kv_offset: position of the first key.
        allow_is_causal_skip, allow_is_bidirectional_skip: whether the result may be None.
        kwargs: `q_length`, `q_offset` (position of the first query) and `device`; of transformers 4.57 `cache_position`; `config`.

    Returns one of:
        None, if every query sees every key, or while a `context_parallel` is open.
        A `MaskRule`, for causality, windows, packed sequences, padding at the ends, and a static cache that is not full. With a block
        mask, for any other pattern of at least MIN_QUERIES queries and MIN_ELEMENTS elements.
        The range of keys that one query sees, int32 (2, 1, 1, batch): [0] has each entry's first key, [1] the one after its last. For
        decoding (one query) after padding, and in compiled code and static caches. Four dimensions, because transformers passes on
        only such a mask unchanged.
        A bool tensor that broadcasts to (batch, 1, seqlen_q, keys), True where visible: for other patterns below these limits, and
        while values are unknown (tracing, capturing a CUDA graph). For padding between tokens, where nothing else limits keys, it
        has one row.
        Eager's additive mask, for models that calculate with it.
    """
    sharded = sharded_sequences.active()  # what computes attention while a `context_parallel` is open
    if sharded is not None:
        sharded.check_mask(mask_function, attention_mask)  # raises for masks that it does not support
        return None
    config = kwargs.get("config")
    if getattr(config, "model_type", None) in _CALCULATE_WITH_MASKS or type(config).__name__ in _CONFIGS_THAT_CALCULATE_WITH_MASKS:
        return masking_utils.eager_mask(
            batch_size=batch_size, kv_length=kv_length, kv_offset=kv_offset, mask_function=mask_function,
            attention_mask=attention_mask, allow_is_bidirectional_skip=allow_is_bidirectional_skip, **kwargs,
        )  # fmt: skip
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
            # decoding gets a tensor of the same shape at every step, as compiled code and static caches need
            return _range(pattern, batch_size, kv_length, kv_offset, attention_mask, kwargs)
        if tracing:
            raise NeedsTensor
        # transformers forbids None where compiled code expects a tensor at every step. For packed sequences it always forbids that,
        # because SDPA needs the tensor.
        may_be_none = allow_is_causal_skip if pattern.window_right == 0 else allow_is_bidirectional_skip
        if not may_be_none and pattern.sequences is None:
            raise NeedsTensor
        return _rule(pattern, batch_size, kv_length, kv_offset, attention_mask, kwargs)
    except NeedsTensor:
        rule = None if tracing else _block_rule(mask_function, batch_size, kv_length, int(kv_offset), attention_mask, kwargs)
        if rule is not None:
            return rule
        return masking_utils.sdpa_mask(
            batch_size=batch_size, kv_length=kv_length, kv_offset=kv_offset, mask_function=mask_function,
            attention_mask=attention_mask, allow_is_causal_skip=False, **kwargs,
        )  # fmt: skip


def _is_tracing() -> bool:
    """Returns whether tensor values are unknown: while compiling, tracing or capturing a CUDA graph."""
    if torch.compiler.is_compiling() or torch.jit.is_tracing():  # type: ignore[attr-defined, no-untyped-call]
        return True
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def _queries(
    q_length: int = 0, q_offset: int | Tensor = 0, device: torch.device | str = "cpu", cache_position: Tensor | None = None, **_: Any
) -> tuple[torch.device | str, int, int]:
    """Returns the device of the queries, their number and the position of the first. Raises NeedsTensor if the positions have gaps."""
    if cache_position is None:
        return device, q_length, int(q_offset)
    # transformers 4.57 passes the positions of all queries
    first, last = cache_position[[0, -1]].tolist()
    if last - first != len(cache_position) - 1:
        raise NeedsTensor
    return cache_position.device, len(cache_position), first


def _rule(
    pattern: Pattern, batch: int, kv_length: int, kv_offset: int, padding_mask: Tensor | None, kwargs: dict[str, Any]
) -> Tensor | None:
    """Returns the mask of a pattern with padding: None, a MaskRule, or a tensor of `_padding`. Raises NeedsTensor otherwise."""
    device, seqlen_q, q_offset = _queries(**kwargs)
    left, right, seqlen_k = pattern.window_left, pattern.window_right, kv_length
    if left >= 0 or right >= 0:
        # the operators align the last query with the last key, and causality hides later keys
        seqlen_k = q_offset + seqlen_q - kv_offset
        if not 0 < seqlen_k <= kv_length or (right != 0 and seqlen_k != kv_length):
            raise NeedsTensor
        # windows that hide nothing
        if left >= seqlen_k - 1:
            left = -1
        if right >= seqlen_q - 1 and right > 0:
            right = -1

    limits: Tensor | dict[str, Any] = {}
    if pattern.sequences is not None:
        if seqlen_q != seqlen_k or padding_mask is not None:
            raise NeedsTensor
        limits = _sequences(_run_starts(pattern.sequences.expand(batch, -1)))
    elif padding_mask is not None:
        is_unlimited = left < 0 and (right < 0 or seqlen_q == 1)
        limits = _padding(_tokens(padding_mask, batch, kv_offset, seqlen_k), seqlen_q, kv_length, is_unlimited)
    if isinstance(limits, Tensor):
        return limits
    if "cu_seqlens_q" in limits and len(limits["cu_seqlens_q"]) == batch + 1:  # with batch sequences, each entry is one
        limits = {}
    # Limits on keys need a rule: given None, `attention` reads the module's is_causal, which some causal modules lack. A single query
    # without a left limit sees all keys, causal or not. Nor may `attention` read the module's window, whose meaning differs between models:
    # a window to both sides may be one key larger.
    if limits or left >= 0 or (right >= 0 and seqlen_q > 1) or pattern.window_right > 0 or seqlen_k != kv_length:
        return MaskRule((batch, 1, seqlen_q, kv_length), device, left, right, seqlen_k, **limits)
    return None


def _padding(tokens: Tensor, seqlen_q: int, kv_length: int, is_unlimited: bool) -> Tensor | dict[str, Any]:
    """Returns padding as arguments of `MaskRule`: {} for none. Returns a tensor if it is the whole mask: the range of one query's keys, or
    bool (batch, 1, 1, kv_length), one row for all queries. Raises NeedsTensor otherwise.
    `tokens`: (batch, seqlen_k) bool, False for padding. `is_unlimited`: whether nothing else hides keys."""
    run_starts = _run_starts(tokens)
    token_starts = run_starts & tokens  # where runs of tokens begin
    answers = [tokens.all(), (token_starts.sum(1) > 1).any(), tokens[:, -1].all()]
    no_padding, padding_between_tokens, all_end_with_tokens = torch.stack(answers).tolist()  # one wait for the GPU
    if no_padding:
        return {}
    if is_unlimited and padding_between_tokens:
        # all queries see the same keys, so the mask has one row
        return F.pad(tokens, (0, kv_length - tokens.shape[1]))[:, None, None, :]
    if padding_between_tokens:
        raise NeedsTensor
    if is_unlimited and seqlen_q == 1:
        return _range_of_tokens(tokens)
    if is_unlimited:
        # Every query sees the keys that are not padding (also in cross-attention). Each run of keys is a packed sequence: all queries
        # of an entry belong to its run of tokens, or to its only run if all is padding, and none to other runs of padding.
        token_starts[:, 0] |= ~tokens.any(1)
        return _sequences(run_starts) | {"cu_seqlens_q": F.pad(token_starts[run_starts].cumsum(0).int() * seqlen_q, (1, 0))}
    if seqlen_q == tokens.shape[1]:
        return _sequences(run_starts)
    if all_end_with_tokens:
        return {"leftpad_k": tokens.to(torch.int8).argmax(1).int()}  # index of the first token
    raise NeedsTensor


def _range(
    pattern: Pattern, batch: int, kv_length: int, kv_offset: int | Tensor, padding_mask: Tensor | None, kwargs: dict[str, Any]
) -> Tensor:
    """Returns the range of keys that one query at position q_offset sees. May be traced without a padding_mask, because it then reads no
    values. Raises NeedsTensor for padding between tokens."""
    position = torch.as_tensor(kwargs.get("q_offset", 0) - kv_offset, dtype=torch.int32, device=kwargs.get("device", "cpu"))
    left, right = pattern.window_left, pattern.window_right
    begin = torch.zeros_like(position) if left < 0 else (position - left).clamp(min=0)
    end = torch.full_like(position, kv_length) if right < 0 else (position + right + 1).clamp(max=kv_length)
    seen = torch.stack((begin, end)).view(2, 1).expand(2, batch)
    if padding_mask is not None and not bool(padding_mask.all()):
        tokens = _tokens(padding_mask, batch, int(kv_offset), kv_length)
        if bool(((_run_starts(tokens) & tokens).sum(1) > 1).any()):  # padding between tokens
            raise NeedsTensor
        first, last = _range_of_tokens(tokens)[:, 0, 0]
        begin, end = torch.maximum(seen[0], first), torch.minimum(seen[1], last)
        seen = torch.stack((torch.minimum(begin, end), end))
    return seen.contiguous()[:, None, None]


def _tokens(padding_mask: Tensor, batch: int, first: int, keys: int) -> Tensor:
    """Returns a padding mask, True for tokens, for a batch and this number of keys from the first on. Keys past its end are padding."""
    return F.pad(padding_mask, (0, max(0, first + keys - padding_mask.shape[1])))[:, first : first + keys].expand(batch, -1)


def _range_of_tokens(tokens: Tensor) -> Tensor:
    """Returns begin and end of the run of True, int32 (2, 1, 1, batch), in (batch, keys) bool with at most one run."""
    count = tokens.sum(1, dtype=torch.int32)
    first = tokens.to(torch.int8).argmax(1).int()
    return torch.stack((first, first + count))[:, None, None]


def is_range(attention_mask: Tensor | None) -> bool:
    """Returns whether a mask is a range of keys: masks of models are bool or floating-point, ranges int32."""
    return attention_mask is not None and not isinstance(attention_mask, MaskRule) and attention_mask.dtype == torch.int32


def _run_starts(values: Tensor) -> Tensor:
    """Returns where runs of equal values begin in each row of `values`, (batch, seqlen) of any dtype: bool."""
    return F.pad(values[:, 1:] != values[:, :-1], (1, 0), value=True)


def _sequences(begins: Tensor) -> dict[str, Any]:
    """Returns cu_seqlens, of queries and keys alike, of sequences that begin where `begins`, (batch, seqlen) bool, is True."""
    cu_seqlens = F.pad(begins.flatten().nonzero().flatten().int(), (0, 1), value=begins.numel())
    return {"cu_seqlens_q": cu_seqlens, "cu_seqlens_k": cu_seqlens}


def _block_rule(
    mask_function: Callable[..., Any], batch: int, kv_length: int, kv_offset: int, padding_mask: Tensor | None, kwargs: dict[str, Any]
) -> MaskRule | None:
    """Returns a MaskRule with the block mask of a function, for the arguments of `mask`; None if a dense mask is cheaper, the function
    cannot be vectorized, or the queries' positions have gaps."""
    try:
        device, seqlen_q, q_offset = _queries(**kwargs)
    except NeedsTensor:
        return None
    if seqlen_q < MIN_QUERIES or batch * seqlen_q * kv_length < MIN_ELEMENTS:
        return None
    if padding_mask is not None:
        padding_mask = _tokens(padding_mask, batch, 0, kv_offset + kv_length)
        mask_function = masking_utils.and_masks(mask_function, masking_utils.padding_mask_function(padding_mask))
    mask_function = masking_utils.add_offsets_to_mask_function(mask_function, q_offset, kv_offset)
    try:
        blocks = BlockMask.from_mask_mod(mask_function, batch, H=None, Q_LEN=seqlen_q, KV_LEN=kv_length, device=device)  # None: 1 head
    except (RuntimeError, TypeError):  # of torch.vmap: the function works on tensors of positions only
        return None
    return MaskRule((batch, 1, seqlen_q, kv_length), device, blocks=blocks)
