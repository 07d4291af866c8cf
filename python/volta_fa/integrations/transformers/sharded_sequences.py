"""Models over sequences that are sharded over devices: while `context_parallel` is open, `attention_function` and `mask_function` call the
`Sharded` object here, which runs `volta_fa.distributed.context_parallel_attention`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ...errors import bad_argument, require_none
from .mask_rule import NeedsTensor, pattern_of  # raises NeedsTensor for masks that are more than windows and packed sequences

if TYPE_CHECKING:
    from ...distributed.attention import Group  # a process group, a DeviceMesh, or None

#: The object of the open `context_parallel`; None outside of one.
_active: Sharded | None = None


def active() -> Sharded | None:
    """Returns the object that computes attention inside `context_parallel`; None outside of it."""
    return _active


@contextmanager
def context_parallel(mesh: Any = None, *, cu_seqlens: Any = None, layout: str = "zigzag") -> Iterator[None]:
    """Runs models with `attn_implementation="volta_fa"` over sequences that are sharded over `mesh`, in all threads.

        with volta_fa.transformers.context_parallel(mesh):
            shards = (shard_sequence(t, mesh) for t in (input_ids, position_ids, shift_labels))
            ...
            loss.backward()

    Shard tokens, position ids and labels with `volta_fa.distributed.shard_sequence`. A loss shifts labels by one position, and the
    next position may be on another rank: shift labels before sharding, and pass them as `shift_labels`. Run the backward pass inside
    too, because activation checkpointing computes forward passes in it.

    Args:
        mesh: a process group, a DeviceMesh of one dimension (a ring), or of two (ring, Ulysses); all processes unless given.
        cu_seqlens: for packed batches of one row: where each sequence begins in the whole row, and its total, as int32 or ints.
        layout: that of `shard_sequence`. "zigzag": a rank has a chunk from the front and one from the back, which balances causal
            masks; "contiguous": one chunk.

    Inside, attention raises NotImplementedError for caches, padding and masks other than causality or a window of transformers' own.
    """
    global _active
    before, _active = _active, Sharded(mesh, cu_seqlens, layout)
    try:
        yield
    finally:
        _active = before


@dataclass
class Sharded:
    """The arguments of the open `context_parallel`."""

    mesh: Group
    cu_seqlens: Tensor | Sequence[int] | None
    layout: str

    def check_mask(self, mask_function: Callable[..., Any], attention_mask: Tensor | None) -> None:
        """Raises NotImplementedError for masks other than causality and a window, which each layer states itself. Packed sequences that
        transformers derives from position ids are ignored: a shard's chunks are not adjacent, so its position ids jump. `cu_seqlens` of
        `context_parallel` describes packed sequences instead."""
        if attention_mask is not None and not bool(attention_mask.all()):
            expected = "sequences without: pack them (cu_seqlens)"
            raise bad_argument("attention_mask", "padding with context_parallel", expected, error=NotImplementedError)
        try:
            pattern_of(mask_function)
        except NeedsTensor as error:
            got = f"{getattr(mask_function, '__qualname__', mask_function)} with context_parallel"
            expected = "causality or a window of transformers' own"
            raise bad_argument("attention_mask", got, expected, error=NotImplementedError) from error

    def attention(self, query: Tensor, key: Tensor, value: Tensor, unsupported: Mapping[str, Any], options: Mapping[str, Any]) -> Tensor:
        """Replaces the attention function on this rank's shards: (batch, nheads, seqlen, headdim) in, (batch, seqlen, nheads, headdim) out.
        `unsupported`: arguments that must be None, by name. `options`: those of `context_parallel_attention`."""
        from ...distributed import context_parallel_attention

        require_none("None", got="it with context_parallel", **unsupported)
        if query.shape[2] != key.shape[2]:
            got = f"{key.shape[2]} keys for {query.shape[2]} queries with context_parallel"
            raise bad_argument("key", got, "training, without a cache", error=NotImplementedError)
        q, k, v = (t.transpose(1, 2) for t in (query, key, value))
        batch = q.shape[0]
        if self.cu_seqlens is not None:
            if batch != 1:
                raise bad_argument("cu_seqlens", f"a batch of {batch} with context_parallel", "1: all tokens in one row")
            q, k, v = (t[0] for t in (q, k, v))
        out = context_parallel_attention(q, k, v, self.mesh, cu_seqlens=self.cu_seqlens, layout=self.layout, **options)
        return out if self.cu_seqlens is None else out.unsqueeze(0)
