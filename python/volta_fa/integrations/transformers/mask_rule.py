"""Masks without memory, which `mask_function` makes and `attention_function.attention` reads: `MaskRule` describes causality, windows,
packed sequences and padding in a few numbers, and any other pattern by a block mask. `pattern_of` recognizes mask functions of
transformers."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_map_only
from transformers import masking_utils

from ...block_mask import BlockMask  # the visible blocks of 128 queries by 64 keys
from ..flash_attn.interface import _lengths  # cu_seqlens and max_seqlen as keyword arguments


class MaskRule(Tensor):
    """A bool tensor (batch, 1, seqlen_q, keys), True where visible, that has attributes instead of memory.

    transformers' code handles it like any mask. `attention` passes the attributes to the operators. Any other operation on it gets
    `as_tensor()` in its place.

    Attributes:
        window_left, window_right: query i sees the keys i + o - window_left <= j <= i + o + window_right, with
            o = seqlen_k - seqlen_q; -1 is no limit.
        seqlen_k: number of keys without the empty end of a static cache.
        cu_seqlens_q, cu_seqlens_k: int32, where the sequences begin among the batch * seqlen_q queries and the batch *
            seqlen_k keys, and at the end the number of these; None if each entry of the batch is one sequence. A run of padding is
            a sequence too, so tokens stay in place.
        max_seqlen_q, max_seqlen_k: length of the longest sequence.
        leftpad_k: int32 (batch), number of keys at the beginning that are padding and hidden; None for none.
        blocks: the mask of patterns that the attributes above do not describe; None for none.
    """

    window_left: int
    window_right: int
    seqlen_k: int
    cu_seqlens_q: Tensor | None
    cu_seqlens_k: Tensor | None
    max_seqlen_q: int
    max_seqlen_k: int
    leftpad_k: Tensor | None
    blocks: BlockMask | None

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
        blocks: BlockMask | None = None,
    ) -> MaskRule:
        """Returns a mask of a shape on a device. The other arguments are the attributes. Waits for the GPU if cu_seqlens_q is given."""
        self = Tensor._make_wrapper_subclass(cls, shape, dtype=torch.bool, device=torch.device(device))
        self.window_left, self.window_right = window_left, window_right
        self.seqlen_k = shape[3] if seqlen_k is None else seqlen_k
        self.cu_seqlens_q, self.cu_seqlens_k, self.leftpad_k = cu_seqlens_q, cu_seqlens_k, leftpad_k
        self.blocks = blocks
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
        """Returns a mask with the same attributes, whose tensors are on the device."""
        copied = Tensor._make_wrapper_subclass(type(self), self.shape, dtype=torch.bool, device=torch.device(device))
        copied.__dict__.update(
            {name: value.to(device) if isinstance(value, (Tensor, BlockMask)) else value for name, value in self.__dict__.items()}
        )
        return copied

    def __deepcopy__(self, memo: dict[int, Any]) -> MaskRule:
        memo[id(self)] = copied = self._copy(self.device)
        copied.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return copied

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]  # Tensor's has the default only
        return (
            f"MaskRule(shape={tuple(self.shape)}, window=({self.window_left}, {self.window_right}), "
            f"seqlen_k={self.seqlen_k}, cu_seqlens_q={self.cu_seqlens_q}, cu_seqlens_k={self.cu_seqlens_k}, leftpad_k={self.leftpad_k}, "
            f"blocks={None if self.blocks is None else self.blocks.shape})"
        )

    def as_tensor(self) -> Tensor:
        """Returns the mask in memory."""
        if self.blocks is not None:
            return self.blocks.dense()
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


def sequence_arguments(
    cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int | Tensor, max_seqlen_k: int | Tensor
) -> dict[str, Any]:
    """Returns the arguments of `volta_fa::fwd` for packed sequences."""
    return _lengths(cu_seqlens_q.int(), cu_seqlens_k.int(), int(max_seqlen_q), int(max_seqlen_k))


class NeedsTensor(Exception):
    """Neither a `Pattern` nor a `MaskRule` without blocks describes the mask: it must be a tensor or a block mask."""


@dataclass(frozen=True)
class Pattern:
    """A mask function of transformers as a window (-1: no limit) and packed sequences. `&` is the intersection."""

    window_left: int = -1
    window_right: int = -1
    sequences: Tensor | None = None  # (batch, seqlen): which of the packed sequences a token belongs to

    def __and__(self, other: Pattern) -> Pattern:
        if self.sequences is not None and other.sequences is not None:
            raise NeedsTensor
        return Pattern(
            _tighter(self.window_left, other.window_left),
            _tighter(self.window_right, other.window_right),
            other.sequences if self.sequences is None else self.sequences,
        )


def _tighter(a: int, b: int) -> int:  # of two window bounds; -1 is no limit
    return max(a, b) if min(a, b) < 0 else min(a, b)


def pattern_of(function: Callable[..., Any]) -> Pattern:
    """Returns the pattern of a mask function of transformers. Raises NeedsTensor for any other function. transformers' functions are
    recognized by name; their parameters are the variables of closures."""
    if getattr(function, "__module__", None) != masking_utils.__name__:
        raise NeedsTensor
    variables = {name: cell.cell_contents for name, cell in zip(function.__code__.co_freevars, function.__closure__ or ())}
    match function.__qualname__.partition(".")[0], variables:
        case "causal_mask_function", _:
            return Pattern(window_right=0)
        case "bidirectional_mask_function", _:
            return Pattern()
        case "sliding_window_overlay", {"sliding_window": int(size)}:
            return Pattern(window_left=size - 1)  # keys at a distance below size
        case "sliding_window_bidirectional_overlay", {"sliding_window": int(size)}:
            return Pattern(size, size)  # keys at a distance of up to size
        case "packed_sequence_mask_function", {"packed_sequence_mask": Tensor() as sequences}:
            return Pattern(sequences=sequences)
        case "remap_positions_for_packed_sequence", {"mask_function": inner}:
            # positions inside a sequence have the same distances as the tokens
            return pattern_of(inner)
        case "and_masks", {"mask_functions": tuple(parts)}:
            return functools.reduce(Pattern.__and__, map(pattern_of, parts))
    raise NeedsTensor
