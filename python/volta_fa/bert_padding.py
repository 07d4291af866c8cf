"""Converts between padded batches, (batch, seqlen, ...), and their tokens without padding, (total, ...). Names, arguments and results are
those of flash-attn's `flash_attn.bert_padding`, under which name `install_flash_attn_shim()` makes them importable."""

import torch
import torch.nn.functional as F
from torch import Tensor

from .errors import bad_argument, require_tensors

__all__ = ["index_first_axis", "index_put_first_axis", "pad_input", "unpad_input", "unpad_input_for_concatenated_sequences"]


def index_first_axis(input: Tensor, indices: Tensor) -> Tensor:
    """Returns a copy of the rows of input, (rows, ...), at indices, (total): (total, ...). Differentiable."""
    return input.index_select(0, indices)


def index_put_first_axis(values: Tensor, indices: Tensor, first_axis_dim: int) -> Tensor:
    """Returns zeros, (first_axis_dim, ...), with values, (total, ...), in the rows at indices, (total). Differentiable."""
    # transformers passes int32 when it decodes, and index_copy needs int64
    return values.new_zeros(first_axis_dim, *values.shape[1:]).index_copy(0, indices.long(), values)


def unpad_input(
    hidden_states: Tensor, attention_mask: Tensor, unused_mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    """Returns the tokens of a padded batch, without the padding.

    Args:
        hidden_states: (batch, seqlen, ...).
        attention_mask: (batch, seqlen), any dtype: 1 for tokens, 0 for padding.
        unused_mask: (batch, seqlen), like attention_mask: 1 for further tokens to keep. The last result leaves these out.

    Raises ValueError for masks of another shape, or if their sum (of bool masks: either) has values other than 0 and 1. flash-attn then
    returns cu_seqlens that do not fit the tokens.

    Returns the tokens of both masks, (total, ...); their indices in the flattened batch, int64 (total); cu_seqlens, int32 (batch + 1):
    where each sequence begins among the tokens, and the total; the longest sequence's length, an int; and the number of tokens of each
    sequence in attention_mask, int32 (batch).
    """
    require_tensors(hidden_states=hidden_states, attention_mask=attention_mask)
    _check_shapes(hidden_states, attention_mask=attention_mask, unused_mask=unused_mask)
    kept = attention_mask if unused_mask is None else attention_mask + unused_mask
    if ((kept != 0) & (kept != 1)).any():
        name = "attention_mask" if unused_mask is None else "attention_mask + unused_mask"
        expected = "1 for tokens and 0 for padding: pass `mask == 0` instead of an additive mask"
        raise bad_argument(name, "other values than 0 and 1", expected)
    return *_keep(hidden_states, kept, kept.sum(-1, dtype=torch.int32)), attention_mask.sum(-1, dtype=torch.int32)


def unpad_input_for_concatenated_sequences(hidden_states: Tensor, attention_mask_in_length: Tensor) -> tuple[Tensor, Tensor, Tensor, int]:
    """Returns the tokens of a padded batch whose rows each hold several sequences, one after the other.

    Args:
        hidden_states: (batch, seqlen, ...).
        attention_mask_in_length: (batch, seqlen), int: the lengths of a row's sequences, in order; the rest of it 0.

    Raises ValueError for lengths of another shape, negative lengths, and rows with more than seqlen tokens.

    Returns the tokens, (total, ...); their indices in the flattened batch, int64 (total); cu_seqlens, int32
    (sequences + 1); and the longest sequence's length, an int.
    """
    require_tensors(hidden_states=hidden_states, attention_mask_in_length=attention_mask_in_length)
    _check_shapes(hidden_states, attention_mask_in_length=attention_mask_in_length)
    tokens, seqlen = attention_mask_in_length.sum(-1, keepdim=True), attention_mask_in_length.shape[-1]
    if (attention_mask_in_length < 0).any() or (tokens > seqlen).any():
        expected = f"lengths of at least 0, in each row at most {seqlen} tokens: pass the lengths of the sequences that the row holds"
        raise bad_argument("attention_mask_in_length", "negative lengths or rows with more tokens than seqlen", expected)
    kept = torch.arange(seqlen, device=tokens.device) < tokens
    return _keep(hidden_states, kept, attention_mask_in_length[attention_mask_in_length != 0])


def _check_shapes(hidden_states: Tensor, **masks: Tensor | None) -> None:
    """Raises ValueError for a mask that does not have hidden_states' batch and seqlen: others would keep other tokens."""
    for name, mask in masks.items():
        if mask is not None and (mask.dim() != 2 or mask.shape != hidden_states.shape[:2]):
            raise bad_argument(name, f"shape {tuple(mask.shape)}", f"shape {tuple(hidden_states.shape[:2])}, (batch, seqlen)")


def _keep(hidden_states: Tensor, kept: Tensor, seqlens: Tensor) -> tuple[Tensor, Tensor, Tensor, int]:
    """Returns the tokens where `kept`, (batch, seqlen), is not 0; their flat indices; cu_seqlens and maximum of `seqlens`, (sequences)."""
    indices = kept.flatten().nonzero().flatten()
    cu_seqlens = F.pad(seqlens.cumsum(0, dtype=torch.int32), (1, 0))
    return index_first_axis(hidden_states.flatten(0, 1), indices), indices, cu_seqlens, int(seqlens.max().item())


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """Returns (batch, seqlen, ...) with the tokens of hidden_states, (total, ...), at indices and 0 elsewhere.
    It is the inverse of `unpad_input`. Differentiable."""
    return index_put_first_axis(hidden_states, indices, batch * seqlen).unflatten(0, (batch, seqlen))
