"""Prefix-anchored windows: each query sees a sliding window and the first tokens of its sequence ("anchors"), as in StreamingLLM. Both
functions attend twice, to the window and to the anchors before it, and merge the results by softmax_lse. That takes no kernel of its own.
No query sees a key in both. `volta_fa` exports the functions."""

import math
from typing import Any, SupportsIndex

import torch
from torch import Tensor

from ..errors import bad_argument, require_tensors
from ..operators import merge_attention_states  # of attention to two disjoint sets of keys


def anchored_window_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    anchor_tokens: int,
    window_left: int,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    batch_invariant: bool = False,
) -> tuple[Tensor, Tensor]:
    """Computes causal attention in which a query sees the first `anchor_tokens` keys and the last `window_left + 1`.

    Args:
        q: (batch, seqlen_q, nheads, headdim). k, v: (batch, seqlen_k, nheads_k, headdim or headdim_v). Packed, all without the batch.
        anchor_tokens: keys from the first on that every query after them sees, 0 or more.
        window_left: keys before a query's own position that it sees, 0 or more.
        cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k: of packed sequences: int32 (batch + 1), where each begins and the total,
            and the longest one's length.
        softmax_scale: headdim ** -0.5 unless given. softcap: scores x become softcap * tanh(x / softcap); 0: off.
        sinks: (nheads), q's dtype or float32: a logit of each head's softmax without a value.
        batch_invariant: a row's result has the same bits in any batch.

    Returns (out, softmax_lse) as `volta_fa::fwd`, with gradients of q, k, v and sinks. Packed sequences have no gradient: each of their
    queries is a sequence of its own for the anchors, because the mask of one call has one offset for all sequences. On a GPU they are
    float16 or bfloat16, which `volta_fa::fwd_kvcache` takes.

    Raises ValueError for wrong arguments, NotImplementedError for packed sequences that need a gradient.
    """
    require_tensors(q=q, k=k, v=v)
    packed = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k, "max_seqlen_q": max_seqlen_q, "max_seqlen_k": max_seqlen_k}
    is_packed, anchor_tokens, window_left = _check(q, anchor_tokens, window_left, packed)
    options = {"softmax_scale": softmax_scale, "softcap": softcap, "batch_invariant": batch_invariant}
    fwd = torch.ops.volta_fa.fwd
    in_window = {"is_causal": True, "window_left": window_left, "sinks": sinks}
    # Sinks go to one call only, so they count once.
    if is_packed:
        if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (q, k, v, sinks)):
            expected = "None where a gradient is needed: call once for each sequence, or under torch.no_grad()"
            raise bad_argument("cu_seqlens_q", "a tensor", expected, error=NotImplementedError)
        assert cu_seqlens_k is not None and max_seqlen_k is not None
        out, lse, _ = fwd(q, k, v, **in_window, **packed, **options)
        if anchor_tokens == 0 or 0 in (*q.shape, *k.shape):
            return out, lse
        sequence, visible = _visible_anchors(q, cu_seqlens_k.diff(), cu_seqlens_q, anchor_tokens, window_left)
        # a dense cache with the first keys of each sequence; `visible` hides those past its end
        rows = cu_seqlens_k[:-1, None] + torch.arange(min(anchor_tokens, max_seqlen_k), dtype=torch.int32, device=q.device)
        k_cache, v_cache = (t[rows.clamp(0, len(t) - 1)] for t in (k, v))
        return _merge_anchors(out, lse, q, k_cache, v_cache, cache_seqlens=visible, cache_batch_idx=sequence, **options)
    if k.dim() == 4 and k.shape[1] < q.shape[1]:
        raise bad_argument("k", f"seqlen {k.shape[1]}", f"at least q's, {q.shape[1]}: each query has a key of its own")
    out, lse, _ = fwd(q, k, v, **in_window, **options)
    # The mask is aligned at the last key. Anchors in the last query's window are left out here: each other query has them in its window,
    # or precedes them.
    anchors = min(anchor_tokens, k.shape[1] - window_left - 1)
    if anchors <= 0 or 0 in q.shape:
        return out, lse
    # Query i sees the anchors before its window: up to i + seqlen_k - seqlen_q - window_left - 1. The operator aligns windows to the last
    # key it gets, anchors - 1.
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
    cu_seqlens_q: Tensor | None = None,
    max_seqlen_q: int | None = None,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    batch_invariant: bool = False,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    k_zero_point: Tensor | None = None,
    v_zero_point: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Computes `anchored_window_attention` over a KV cache that holds the new tokens already: a sequence's last query is its last token.

    Each query is a sequence of its own for the anchors. Over pages, and with several queries of a sequence, the anchors are copied into a
    dense cache once. Lengths are read on the GPU. Pages between the anchors and the window are not read.

    Args:
        q: (batch, seqlen_q, nheads, headdim), or packed (total_q, nheads, headdim) with cu_seqlens_q and max_seqlen_q.
        k_cache, v_cache: (entries, seqlen, nheads_k, headdim or headdim_v), with block_table pages (pages, page_size, nheads_k, ...).
        cache_seqlens: int32 (batch), tokens of each sequence. block_table: int32 (batch, max_pages), its pages in order.
        anchor_tokens, window_left, softmax_scale, softcap, sinks, batch_invariant: as for `anchored_window_attention`.
        k_scale, v_scale, k_zero_point, v_zero_point: of int8 and int4 caches, float32, the cache's shape without the headdim.
        k_descale, v_descale: of fp8 caches, float32 (1) or (nheads_k).

    Returns (out, softmax_lse) as `volta_fa::fwd_kvcache`. No gradient.

    Raises ValueError for wrong arguments.
    """
    require_tensors(q=q, k_cache=k_cache, v_cache=v_cache, cache_seqlens=cache_seqlens)
    packed = {"cu_seqlens_q": cu_seqlens_q, "max_seqlen_q": max_seqlen_q}
    _, anchor_tokens, window_left = _check(q, anchor_tokens, window_left, packed)
    descales = {"k_descale": k_descale, "v_descale": v_descale}
    for name, t in descales.items():
        if t is not None and t.dim() > 1:
            raise bad_argument(name, f"shape {tuple(t.shape)}", "(1) or (nheads_k): scales of sequences have no place for single queries")
    scales = {"k_scale": k_scale, "v_scale": v_scale, "k_zero_point": k_zero_point, "v_zero_point": v_zero_point}
    options = {"softmax_scale": softmax_scale, "softcap": softcap, "batch_invariant": batch_invariant, **scales, **descales}
    lengths = {"cache_seqlens": cache_seqlens, "block_table": block_table, **packed}
    out, lse = torch.ops.volta_fa.fwd_kvcache(
        q, k_cache, v_cache, is_causal=True, window_left=window_left, sinks=sinks, **lengths, **options
    )
    if anchor_tokens == 0 or 0 in q.shape:
        return out, lse
    sequence, visible = _visible_anchors(q, cache_seqlens, cu_seqlens_q, anchor_tokens, window_left)
    if block_table is None:
        entries = {"cache_batch_idx": sequence}
        # where the operator copies, it copies no more than these
        k_cache, v_cache = (t[:, :anchor_tokens] for t in (k_cache, v_cache))
        options |= {name: t[:, :anchor_tokens] for name, t in scales.items() if t is not None}
    elif len(sequence) > len(block_table) and len(k_cache) > 0:
        # each query is a sequence here, and the operator may copy whole pages for each: so the anchors are copied into a dense cache
        token = torch.arange(min(anchor_tokens, block_table.shape[1] * k_cache.shape[1]), device=q.device)
        page = block_table[:, token // k_cache.shape[1]].long()
        # tokens before the first one whose page is not in the cache; rows that see more get length -1, which is invalid: they become NaN
        found = ((page >= 0) & (page < len(k_cache))).cumprod(1).sum(1).int()
        visible = visible.where(visible <= found.index_select(0, sequence), -1)
        places = page.clamp(0, len(k_cache) - 1), token % k_cache.shape[1]
        k_cache, v_cache = k_cache[places], v_cache[places]
        options |= {name: t[places] for name, t in scales.items() if t is not None}
        entries = {"cache_batch_idx": sequence}
    else:
        pages = min(-(-anchor_tokens // k_cache.shape[1]), block_table.shape[1])
        entries = {"block_table": block_table[:, :pages].index_select(0, sequence)}
    return _merge_anchors(out, lse, q, k_cache, v_cache, cache_seqlens=visible, **entries, **options)


def _check(q: Tensor, anchor_tokens: int, window_left: int, packed: dict[str, Any]) -> tuple[bool, int, int]:
    """Raises ValueError for wrong arguments. Returns whether sequences are packed (whether any of `packed` is given), and anchor_tokens and
    window_left as numbers that int32 holds, also their sums with lengths."""
    is_packed = any(value is not None for value in packed.values())
    if is_packed:
        for name, value in packed.items():
            if value is None:
                raise bad_argument(name, "None", f"one, as for {next(n for n, t in packed.items() if t is not None)}: sequences are packed")
    shape = "(total_q, nheads, headdim) with cu_seqlens_q" if is_packed else "(batch, seqlen_q, nheads, headdim), or cu_seqlens_q"
    if q.dim() != (3 if is_packed else 4):
        raise bad_argument("q", f"shape {tuple(q.shape)}", shape)
    for name, value, what in (("anchor_tokens", anchor_tokens, "tokens"), ("window_left", window_left, "keys before a query")):
        if not isinstance(value, SupportsIndex) or int(value) < 0:
            raise bad_argument(name, repr(value), f"an int of 0 or more, a number of {what}")
    # 2**30 is beyond every length
    return is_packed, min(int(anchor_tokens), 2**30), min(int(window_left), 2**30)


def _visible_anchors(
    q: Tensor, lengths: Tensor, cu_seqlens_q: Tensor | None, anchor_tokens: int, window_left: int
) -> tuple[Tensor, Tensor]:
    """Returns of each query, in int32: the number of its sequence, and how many anchors are before its window.

    Both are in range for any values in `lengths` (keys of each sequence) and `cu_seqlens_q`, which may be wrong on a GPU. There the call
    for the window returns NaN, and the merge keeps it. For rows of no sequence they mean nothing."""
    row = torch.arange(q.shape[:-2].numel(), dtype=torch.int32, device=q.device)
    if cu_seqlens_q is None:
        sequence = row // q.shape[1]
        end = (sequence + 1) * q.shape[1]
    else:
        ends = cu_seqlens_q[1:].contiguous()
        sequence = torch.searchsorted(ends, row, right=True, out_int32=True).clamp(0, len(ends) - 1)
        end = ends.index_select(0, sequence)
    length = lengths.index_select(0, sequence)
    return sequence, (length - window_left - end + row).clamp(0, anchor_tokens)


def _merge_anchors(out: Tensor, lse: Tensor, q: Tensor, k_cache: Tensor, v_cache: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """Merges attention of each query to its anchors into (out, lse); options have a sequence for each query."""
    rows = q.flatten(0, -3)[:, None]
    before, before_lse = torch.ops.volta_fa.fwd_kvcache(rows, k_cache, v_cache, **options)
    before_lse = before_lse.view(*q.shape[:-1]).transpose(-1, -2)
    return merge_attention_states(out, lse, before.view_as(out), before_lse.contiguous())


def _merged(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Merges attention to the window (out, lse) with that to the anchors. If gradients are needed, uses PyTorch's operations, because the
    operator has no derivative."""
    if not (torch.is_grad_enabled() and any(t.requires_grad for t in (out, other))):
        return merge_attention_states(out, lse, other, other_lse)
    # every query has a key in the window, its own; lse is inf for one that sees no anchor
    visible = other_lse.masked_fill(other_lse == math.inf, -math.inf)
    joint = torch.logaddexp(lse, visible)
    weights = [(part - joint).exp().transpose(1, 2).unsqueeze(-1) for part in (lse, visible)]
    return (weights[0] * out + weights[1] * other).to(out.dtype), joint
