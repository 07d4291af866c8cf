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
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .version import __version__

try:
    from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel, masking_utils
    from transformers import __version__ as transformers_version
except ImportError as error:
    raise ImportError(f"volta_fa {__version__} needs transformers 4.57 or 5.x ({error}): run `pip install 'transformers>=4.57,<6'`") from error

__all__ = ["NAME", "MaskRule", "attention", "mask"]

#: The value of `attn_implementation`.
NAME = "volta_fa"


@dataclasses.dataclass(frozen=True)
class MaskRule:
    """A mask that needs no tensor of seqlen_q x seqlen_k. `mask` makes it, models hand it to their layers as they do
    with any `attention_mask`, and `attention` obeys it.

    window_left, window_right: query i sees the keys i + o - window_left <= j <= i + o + window_right, with
        o = seqlen_k - seqlen_q; -1 is no limit.
    seqlen_k: so many keys exist. More of them are the empty end of a static cache.
    cu_seqlens: int32, where the sequences begin in the (batch * seqlen) tokens, and at the end that product; None if
        each entry of the batch is one sequence. A run of padding is a sequence too: nobody looks at what comes out of
        it, and so the tokens can stay where they are.
    max_seqlen: of these sequences.
    tokens: batch * seqlen.
    """

    window_left: int
    window_right: int
    seqlen_k: int
    cu_seqlens: Tensor | None = None
    max_seqlen: int = 0
    tokens: int = 0

    # What transformers and accelerate do with the attention masks that they pass on.
    ndim = 0

    def contiguous(self) -> MaskRule:
        return self

    def to(self, *args: Any, **kwargs: Any) -> MaskRule:
        return self if self.cu_seqlens is None else dataclasses.replace(self, cu_seqlens=self.cu_seqlens.to(*args, **kwargs))

    def as_tensor(self, batch: int, seqlen_q: int, device: torch.device) -> Tensor:
        """bool, broadcasts to (batch, 1, seqlen_q, seqlen_k); True where visible."""
        i = torch.arange(seqlen_q, device=device)[:, None] + self.seqlen_k - seqlen_q
        j = torch.arange(self.seqlen_k, device=device)
        visible = torch.ones(1, 1, seqlen_q, self.seqlen_k, dtype=torch.bool, device=device)
        if self.window_left >= 0:
            visible = visible & (j >= i - self.window_left)
        if self.window_right >= 0:
            visible = visible & (j <= i + self.window_right)
        if self.cu_seqlens is not None:
            tokens = torch.arange(self.tokens, dtype=torch.int32, device=device)
            sequence = torch.bucketize(tokens, self.cu_seqlens.to(device), right=True).view(batch, 1, seqlen_q)
            visible = visible & (sequence[..., :, None] == sequence[..., None, :])
        return visible


# ---- the mask function -----------------------------------------------------------------------------------------------


class _NeedsTensor(Exception):
    """No rule describes this mask."""


def mask(
    batch_size: int,
    kv_length: int,
    kv_offset: int = 0,
    mask_function: Callable = masking_utils.causal_mask_function,
    attention_mask: Tensor | MaskRule | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    **kwargs: Any,
) -> Tensor | MaskRule | None:
    """The mask function: transformers calls it once a forward (for each kind of layer) and hands what it returns to
    `attention` in every layer.

    attention_mask: (batch, keys) bool, False for padding.

    Returns None where at most causality limits what is visible; a `MaskRule` for windows, packed sequences, padding
    at the ends, and a static cache that is being filled; else a bool tensor that broadcasts to (batch, 1, seqlen_q,
    seqlen_k), True where visible: for padding before cached keys or in the middle, for patterns that are not
    transformers' own, and while tracing, which forbids a look at the values.
    """
    if isinstance(attention_mask, MaskRule):  # generate() has made it, and the model asks again
        return attention_mask
    try:
        if torch.compiler.is_compiling() or torch.jit.is_tracing():
            raise _NeedsTensor
        pattern = _pattern(mask_function)
        # transformers forbids it where it combines masks, and where compiled code expects a tensor at every step.
        # For packed sequences it always does, because SDPA has no other way.
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


def _pattern(function: Callable) -> _Pattern:
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
    q_length: int | None = None, q_offset: int | Tensor = 0, cache_position: Tensor | None = None, **_: Any
) -> tuple[int, int]:
    """The number of queries and the position of the first."""
    if cache_position is None:
        return q_length, int(q_offset)
    # transformers 4.57 names all positions
    first, last = cache_position[[0, -1]].tolist()
    if last - first != len(cache_position) - 1:
        raise _NeedsTensor
    return len(cache_position), first


def _rule(
    pattern: _Pattern, batch: int, kv_length: int, kv_offset: int, not_padding: Tensor | None, seqlen_q: int, q_offset: int
) -> Tensor | MaskRule | None:
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

    begins = None  # (batch, seqlen): tokens with which a sequence begins
    if pattern.sequences is not None:
        if seqlen_q != seqlen_k or not_padding is not None:
            raise _NeedsTensor
        begins = _changes(pattern.sequences.expand(batch, -1))
    elif not_padding is not None:
        not_padding = F.pad(not_padding, (0, max(0, kv_offset + seqlen_k - not_padding.shape[1])))
        not_padding = not_padding[:, kv_offset : kv_offset + seqlen_k].expand(batch, -1)
        changes = _changes(not_padding)
        runs = (changes & not_padding).sum(1)
        complete, broken = torch.stack([not_padding.all(), (runs > 1).any()]).tolist()  # one wait for the GPU
        if not complete:
            if seqlen_q == seqlen_k and not broken:
                begins = changes
            elif left < 0 and (right < 0 or seqlen_q == 1):
                return not_padding[:, None, None, :]
            else:
                raise _NeedsTensor

    if begins is not None:
        tokens = batch * seqlen_q
        cu_seqlens = F.pad(begins.flatten().nonzero().flatten().int(), (0, 1), value=tokens)
        if len(cu_seqlens) > batch + 1:
            return MaskRule(left, right, seqlen_k, cu_seqlens, int(cu_seqlens.diff().max()), tokens)
    if left < 0 and right == pattern.window_right and seqlen_k == kv_length:
        return None
    return MaskRule(left, right, seqlen_k)


def _changes(values: Tensor) -> Tensor:
    """(batch, seqlen): where a row begins or its value changes."""
    return F.pad(values[:, 1:] != values[:, :-1], (1, 0), value=True)


# ---- the attention function ------------------------------------------------------------------------------------------

#: Arguments of attention functions that change the result and that nothing here can do.
_LACKING = {
    "head_mask": "a factor for each head",
    "indices": "sparse attention",
    "block_indices": "sparse attention",
    "sinks": "sinks that differ from token to token",
    "cache": "a paged cache",
}
_MAX_HEADDIM = 256
_HEADDIM_MULTIPLE = 8


def attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | MaskRule | None,
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
    """The attention function: runs `volta_fa::fwd`.

    query: (batch, nheads, seqlen_q, headdim); key and value: (batch, nheads_k, seqlen_k, headdim), value's headdim may
        differ. Up to 256; what is not a multiple of 8 is padded, at the cost of a copy. float16 or bfloat16 on CUDA.
    attention_mask: what `mask` returned, or a tensor that broadcasts to (batch, nheads, seqlen_q, seqlen_k): bool, True
        where visible, or floating-point, added to the scores. None: what `is_causal`, or else the module's is_causal,
        says (the last query sees the last key), in a window of `sliding_window`.
    softcap, s_aux (nheads), dropout, scaling: the op's softcap, sinks, dropout_p and softmax_scale.
    position_bias: floating-point, broadcasts to (batch, nheads, seqlen_q, seqlen_k), added to the scores.
    cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k: packed sequences, the op's cu_seqlens and max_seqlen; then
        these say what belongs together, and no tensor of a mask does.

    Returns (out, None), out (batch, seqlen_q, nheads, headdim of value). Raises, before anything runs,
    NotImplementedError for what is lacking, output_attentions among it, and ValueError for wrong arguments.
    """
    _refuse(module, query, value, kwargs)
    packed = cu_seq_lens_q is not None
    if isinstance(attention_mask, MaskRule):
        rule, bias = attention_mask, None
    elif attention_mask is None or packed:
        rule, bias = _implied_rule(module, key.shape[2], sliding_window, is_causal), None
    else:
        # transformers 4.57 makes some of them longer than the keys
        rule, bias = MaskRule(-1, -1, key.shape[2]), attention_mask[..., : key.shape[2]]
    batch, seqlen_q = query.shape[0], query.shape[2]
    _check_belongs(rule, batch * seqlen_q, key.shape[2])

    if position_bias is not None:
        if packed:
            raise NotImplementedError("volta_fa: position_bias: got it with cu_seq_lens_q, expected sequences that are not packed")
        if rule.cu_seqlens is not None:
            rule, bias = MaskRule(-1, -1, rule.seqlen_k), rule.as_tensor(batch, seqlen_q, query.device)
        bias = _sum_of_biases(bias, position_bias[..., : rule.seqlen_k])

    q, k, v = (_padded(t.transpose(1, 2)) for t in (query, key[:, :, : rule.seqlen_k], value[:, :, : rule.seqlen_k]))
    sequences = {}
    if packed:
        sequences = _sequences(cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k)
    elif rule.cu_seqlens is not None:
        sequences = _sequences(rule.cu_seqlens, rule.cu_seqlens, rule.max_seqlen, rule.max_seqlen)
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
        softmax_scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        window_left=rule.window_left,
        window_right=rule.window_right,
        softcap=softcap or 0.0,
        deterministic=bool(deterministic),
    )
    return out.view(batch, seqlen_q, *out.shape[-2:])[..., : value.shape[-1]], None


def _refuse(module: torch.nn.Module, query: Tensor, value: Tensor, kwargs: dict[str, Any]) -> None:
    if kwargs.get("output_attentions") or getattr(getattr(module, "config", None), "output_attentions", False):
        raise NotImplementedError(
            "volta_fa: output_attentions: got True, expected False: the weights are never in memory; attn_implementation='eager' has them"
        )
    for name, what in _LACKING.items():
        if kwargs.get(name) is not None:
            raise NotImplementedError(f"volta_fa: {name}: {type(module).__name__} uses {what}, which volta_fa does not have")
    headdim = max(query.shape[-1], value.shape[-1])
    if headdim > _MAX_HEADDIM:
        raise NotImplementedError(f"volta_fa: headdim: {type(module).__name__} has {headdim}, expected at most {_MAX_HEADDIM}")


def _implied_rule(module: torch.nn.Module, seqlen_k: int, sliding_window: int | None, is_causal: bool | None) -> MaskRule:
    """What a layer without a mask means."""
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    reach = -1 if sliding_window is None else sliding_window - 1
    return MaskRule(reach, 0 if is_causal else reach, seqlen_k)


def _check_belongs(rule: MaskRule, tokens: int, seqlen_k: int) -> None:
    """The values of cu_seqlens are on the GPU, where checking them would mean waiting."""
    if seqlen_k < rule.seqlen_k or (rule.cu_seqlens is not None and rule.tokens != tokens):
        raise ValueError(
            f"volta_fa: attention_mask: got one for {rule.tokens or tokens} tokens and {rule.seqlen_k} keys, "
            f"expected one for {tokens} tokens and {seqlen_k} keys"
        )


def _sum_of_biases(bias: Tensor | None, position_bias: Tensor) -> Tensor:
    if bias is None:
        return position_bias
    if bias.dtype == torch.bool:
        return torch.where(bias, position_bias, float("-inf"))
    return bias + position_bias


def _padded(t: Tensor) -> Tensor:
    missing = -t.shape[-1] % _HEADDIM_MULTIPLE
    return F.pad(t, (0, missing)) if missing else t


def _sequences(cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int | Tensor, max_seqlen_k: int | Tensor) -> dict[str, Any]:
    return {
        "cu_seqlens_q": cu_seqlens_q.int(),
        "cu_seqlens_k": cu_seqlens_k.int(),
        "max_seqlen_q": int(max_seqlen_q),
        "max_seqlen_k": int(max_seqlen_k),
    }


# ---- registration ----------------------------------------------------------------------------------------------------


def _register() -> None:
    version = tuple(int(part) for part in transformers_version.split(".")[:2])
    if version < (4, 57):
        raise ImportError(f"volta_fa {__version__} needs transformers 4.57 or 5.x, and {transformers_version} is installed")
    if version >= (6, 0):
        warnings.warn(f"volta_fa {__version__} is tested with transformers 4.57 and 5.x, and {transformers_version} is installed", stacklevel=3)
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, mask)

    # transformers takes any registered name for any model, and one that does not use the interface would then go on
    # with an attention of its own.
    accept = PreTrainedModel.get_correct_attn_implementation

    @functools.wraps(accept)
    def checked(self: PreTrainedModel, requested_attention: str | None, *args: Any, **kwargs: Any) -> str:
        if requested_attention == NAME and not self._can_set_attn_implementation():
            raise ValueError(
                f"attn_implementation: got {NAME!r}, and {type(self).__name__} of transformers {transformers_version} does not use the "
                "attention interface: expected 'sdpa', which volta_fa.enable_sdpa() also runs, or 'eager'"
            )
        return accept(self, requested_attention, *args, **kwargs)

    PreTrainedModel.get_correct_attn_implementation = checked


_register()
