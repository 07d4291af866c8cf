"""Prefix-anchored windows: a sliding window and the first tokens of a sequence, as StreamingLLM's attention sinks.

Both functions attend twice, to the window and to the tokens before it that are anchors, and merge. That takes no kernel of its own, and
each key is read once.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..errors import bad_argument, require_tensors
from ..operators import merge_attention_states


def anchored_window_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    anchor_tokens: int,
    window_left: int,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    batch_invariant: bool = False,
) -> tuple[Tensor, Tensor]:
    """Computes causal attention in which a query sees the first `anchor_tokens` keys and the last `window_left + 1`.

    Args:
        q: (batch, seqlen_q, nheads, headdim). k, v: (batch, seqlen_k, nheads_k, headdim or headdim_v).
        anchor_tokens: keys from the first on that every query after them sees, 0 or more.
        window_left: keys before a query's own position that it sees, 0 or more.
        softmax_scale, softcap, sinks, batch_invariant: as for `volta_fa::fwd`.

    Returns (out, softmax_lse) as `volta_fa::fwd`, with gradients of q, k, v and sinks.

    Raises ValueError for wrong arguments.
    """
    require_tensors(q=q, k=k, v=v)
    _check(q, anchor_tokens, window_left)
    if k.dim() == 4 and k.shape[1] < q.shape[1]:
        raise bad_argument("k", f"seqlen {k.shape[1]}", f"at least q's, {q.shape[1]}: each query has a key of its own")
    options = {"softmax_scale": softmax_scale, "softcap": softcap, "batch_invariant": batch_invariant}
    fwd = torch.ops.volta_fa.fwd
    out, lse, _ = fwd(q, k, v, is_causal=True, window_left=window_left, sinks=sinks, **options)
    # The mask is aligned at the last key. Sinks go to one call only, so they count once. Anchors beyond what the last query's window
    # leaves out are in every window.
    anchors = min(anchor_tokens, k.shape[1] - window_left - 1)
    if anchors <= 0 or 0 in q.shape:
        return out, lse
    # query i sees the anchors up to i + seqlen_k - seqlen_q - window_left - 1, those before its window
    right = k.shape[1] - window_left - 1 - anchors
    before, before_lse, _ = fwd(q, k[:, :anchors], v[:, :anchors], window_right=right, **options)
    return _merged(out, lse, before, before_lse)


@torch.no_grad()
def anchored_window_attention_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    anchor_tokens: int,
    window_left: int,
    cache_seqlens: Tensor,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    batch_invariant: bool = False,
) -> tuple[Tensor, Tensor]:
    """Computes the same over a KV cache that holds the new tokens already: the last query of a sequence is its last token.

    Each query is a sequence of its own for the anchors, so this is for decoding and verification, not for long prompts. Lengths are read
    on the GPU. Pages between the anchors and the window are not read.

    Args:
        q: (batch, seqlen_q, nheads, headdim).
        k_cache, v_cache, cache_seqlens, block_table: as for `volta_fa::fwd_kvcache`, unquantized.
        anchor_tokens, window_left, softmax_scale, softcap, sinks, batch_invariant: as for `anchored_window_attention`.

    Returns (out, softmax_lse) as `volta_fa::fwd_kvcache`. No gradient.

    Raises ValueError for wrong arguments.
    """
    require_tensors(q=q, k_cache=k_cache, v_cache=v_cache, cache_seqlens=cache_seqlens)
    _check(q, anchor_tokens, window_left)
    options = {"softmax_scale": softmax_scale, "softcap": softcap, "batch_invariant": batch_invariant}
    attend = torch.ops.volta_fa.fwd_kvcache
    lengths = {"cache_seqlens": cache_seqlens, "block_table": block_table}
    out, lse = attend(q, k_cache, v_cache, is_causal=True, window_left=window_left, sinks=sinks, **lengths, **options)
    if anchor_tokens == 0 or 0 in q.shape:
        return out, lse
    batch, seqlen_q = q.shape[:2]
    window_left = min(window_left, 2**30)  # beyond every length, and int32 holds the differences
    # the anchors of a query are the tokens before its window; an impossible length stays so, and gives NaN
    first = cache_seqlens[:, None] - seqlen_q - window_left + torch.arange(seqlen_q, dtype=torch.int32, device=q.device)
    visible = first.clamp(0, anchor_tokens).where(cache_seqlens[:, None] >= 0, -1).flatten()
    sequence = torch.arange(batch, dtype=torch.int32, device=q.device).repeat_interleave(seqlen_q)
    if block_table is None:
        entries = {"cache_batch_idx": sequence}
    else:
        pages = min(-(-anchor_tokens // k_cache.shape[1]), block_table.shape[1])
        entries = {"block_table": block_table[:, :pages].repeat_interleave(seqlen_q, 0)}
    before, before_lse = attend(q.flatten(0, 1)[:, None], k_cache, v_cache, cache_seqlens=visible, **entries, **options)
    before_lse = before_lse.view(batch, seqlen_q, -1).transpose(1, 2)
    return merge_attention_states(out, lse, before.view_as(out), before_lse.contiguous())


def _check(q: Tensor, anchor_tokens: int, window_left: int) -> None:
    if q.dim() != 4:
        raise bad_argument("q", f"shape {tuple(q.shape)}", "(batch, seqlen_q, nheads, headdim): packed sequences need a call each")
    for name, value, what in (("anchor_tokens", anchor_tokens, "tokens"), ("window_left", window_left, "keys before a query")):
        if value < 0:
            raise bad_argument(name, value, f"a number of {what} of 0 or more")


def _merged(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Merges two states. With gradients by PyTorch's operations, because the operator has none."""
    if not (torch.is_grad_enabled() and any(t.requires_grad for t in (out, other))):
        return merge_attention_states(out, lse, other, other_lse)
    # every query has a key in the window, its own; lse is inf for one that sees no anchor
    visible = other_lse.masked_fill(other_lse == math.inf, -math.inf)
    joint = torch.logaddexp(lse, visible)
    weights = [(part - joint).exp().transpose(1, 2).unsqueeze(-1) for part in (lse, visible)]
    return (weights[0] * out + weights[1] * other).to(out.dtype), joint
