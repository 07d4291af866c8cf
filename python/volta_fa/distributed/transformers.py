"""Attention of Hugging Face models over sharded sequences: what `volta_fa.transformers.context_parallel` puts in place."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from .attention import context_parallel_attention
from .groups import Group


@dataclass
class Sharded:
    """A mesh, and how sequences lie in it."""

    mesh: Group
    cu_seqlens: Tensor | Sequence[int] | None
    layout: str

    def mask(self, pattern: Callable[[Any], Any], function: Any, attention_mask: Tensor | None) -> None:
        """A shard of a sequence has a mask of the whole one, which layers say themselves: causal or not, and a window. Refuses what is
        more than that. Position ids that begin again mean nothing here, since chunks of a shard do not follow each other."""
        if attention_mask is not None and not bool(attention_mask.all()):
            raise NotImplementedError(
                "volta_fa: attention_mask: got padding with context_parallel, expected sequences without: pack them (cu_seqlens)"
            )
        try:
            pattern(function)
        except Exception as error:
            raise NotImplementedError(
                f"volta_fa: got a mask of {getattr(function, '__qualname__', function)} with context_parallel, "
                "expected causality or a window of transformers' own"
            ) from error

    def attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        given: Mapping[str, Any],
        dropout: float,
        scaling: float | None,
        sliding_window: int | None,
        softcap: float,
        is_causal: bool,
        sinks: Tensor | None,
        deterministic: bool,
    ) -> Tensor:
        """(batch, nheads, seqlen, headdim) in, (batch, seqlen, nheads, headdim) out."""
        for name, value_given in given.items():
            if value_given is not None:
                raise NotImplementedError(f"volta_fa: {name}: got it with context_parallel, expected None")
        if query.shape[2] != key.shape[2]:
            raise NotImplementedError(
                f"volta_fa: got {query.shape[2]} queries and {key.shape[2]} keys with context_parallel, expected training, without a cache"
            )
        q, k, v = (t.transpose(1, 2) for t in (query, key, value))
        batch = q.shape[0]
        if self.cu_seqlens is not None:
            if batch != 1:
                raise ValueError(f"volta_fa: cu_seqlens: got a batch of {batch} with context_parallel, expected 1: all tokens in one row")
            q, k, v = (t[0] for t in (q, k, v))
        window = -1 if sliding_window is None else sliding_window - 1
        out = context_parallel_attention(
            q,
            k,
            v,
            self.mesh,
            softmax_scale=scaling,
            is_causal=is_causal,
            window_left=window,
            window_right=-1 if is_causal else window,
            softcap=softcap,
            sinks=sinks,
            dropout_p=dropout,
            cu_seqlens=self.cu_seqlens,
            layout=self.layout,
            deterministic=deterministic,
        )
        return out if self.cu_seqlens is None else out.unsqueeze(0)
