"""Cascade attention, exported by `volta_fa`: sequences with a shared prefix in a paged KV cache, which is read once for all of them."""

from typing import SupportsIndex

import torch
from torch import Tensor

from ..errors import bad_argument, require_tensors
from ..operators import merge_attention_states  # of attention to two disjoint sets of keys


@torch.no_grad()
def cascade_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    shared_block_table: Tensor,
    shared_seqlen: int | Tensor,
    *,
    block_table: Tensor,
    cache_seqlens: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    max_seqlen_q: int | None = None,
    sinks: Tensor | None = None,
    softmax_scale: float | None = None,
    is_causal: bool = True,
    softcap: float = 0.0,
    num_splits: int = 0,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    k_zero_point: Tensor | None = None,
    v_zero_point: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Computes attention over a paged KV cache in which all sequences share their first pages: a system prompt, a document, beams.

    `volta_fa::fwd_kvcache` would read the shared tokens once for each sequence. This function reads them once for the queries of all
    sequences, then each sequence's own tokens for its queries. It merges both results by their softmax_lse (cascade inference, as in
    FlashInfer, arXiv 2501.01005).

    Args:
        q: (batch, seqlen_q, nheads, headdim), or packed (total_q, nheads, headdim) with cu_seqlens_q, int32 (batch + 1), and max_seqlen_q.
        k_cache, v_cache: (num_pages, page_size, nheads_k, headdim or headdim_v).
        shared_block_table: int32 (pages): the pages of the shared tokens.
        shared_seqlen: number of shared tokens, as an int or as an int32 tensor (1) on q's device.
        block_table: int32 (batch, max_pages): each sequence's own pages, without the shared ones.
        cache_seqlens: int32 (batch): each sequence's own tokens before this call appends, without the shared ones.
        k, v: (batch, seqlen_new, nheads_k, headdim or headdim_v), or packed like q: appended after those, in place.
        sinks: (nheads), q's dtype or float32: a logit of each head's softmax without a value.
        softmax_scale: headdim ** -0.5 unless given. softcap: scores x become softcap * tanh(x / softcap); 0: off.
        num_splits: maximum number of parts into which a sequence's keys are split; 0: the scheduler decides.
        k_scale, v_scale, k_zero_point, v_zero_point: of int8 and int4 caches, float32 (num_pages, page_size, nheads_k).
        k_descale, v_descale: of fp8 caches, float32 (1) or (nheads_k); 1 unless given.
        is_causal: the last query of a sequence sees all its tokens, the one before it all but the last, and so on. All queries see all
            shared tokens.

    Returns (out, softmax_lse) as `volta_fa::fwd_kvcache`. No gradient. Windows, ALiBi and rotary positions count from the beginning of a
    sequence, so they are not arguments: rotate q and k before the call.

    Raises ValueError for wrong arguments, before k and v are appended.
    """
    require_tensors(
        q=q, k_cache=k_cache, v_cache=v_cache, shared_block_table=shared_block_table, block_table=block_table, cache_seqlens=cache_seqlens
    )
    if q.dim() != (4 if cu_seqlens_q is None else 3):
        expected = "(batch, seqlen_q, nheads, headdim), or packed (total_q, nheads, headdim) with cu_seqlens_q"
        raise bad_argument("q", f"shape {tuple(q.shape)}", expected)
    if k_cache.dim() != 4:
        raise bad_argument("k_cache", f"shape {tuple(k_cache.shape)}", "(num_pages, page_size, nheads_k, headdim)")
    if shared_block_table.dim() != 1:
        got = f"shape {tuple(shared_block_table.shape)}"
        raise bad_argument("shared_block_table", got, "(pages,): one list of pages for all sequences")
    if (k is None) != (v is None):
        missing, there = ("k", "v") if k is None else ("v", "k")
        raise bad_argument(missing, "None", f"a tensor: {there} is given")
    if not isinstance(shared_seqlen, Tensor):
        tokens = len(shared_block_table) * k_cache.shape[1]
        if not isinstance(shared_seqlen, SupportsIndex) or not 0 <= int(shared_seqlen) <= tokens:
            expected = f"an int from 0 to {tokens}, the tokens in shared_block_table's pages, or an int32 tensor (1)"
            raise bad_argument("shared_seqlen", shared_seqlen, expected)
        shared_seqlen = torch.full((1,), int(shared_seqlen), dtype=torch.int32, device=q.device)
    scales = {"k_scale": k_scale, "v_scale": v_scale, "k_zero_point": k_zero_point, "v_zero_point": v_zero_point}
    descales = {"k_descale": k_descale, "v_descale": v_descale}
    options = {"softmax_scale": softmax_scale, "softcap": softcap, "num_splits": num_splits, **scales, **descales}
    # all queries as those of one sequence, without a mask; first, because the other call appends and must not precede an error
    packed = q if q.dim() == 3 else q.flatten(0, 1)
    try:
        shared, shared_lse = torch.ops.volta_fa.fwd_kvcache(
            packed[None], k_cache, v_cache, cache_seqlens=shared_seqlen, block_table=shared_block_table[None], **options
        )
    except ValueError as error:
        message = str(error).replace("cache_seqlens", "shared_seqlen").replace("block_table", "shared_block_table")
        raise ValueError(message) from None
    shared, shared_lse = shared[0], shared_lse[0]
    new = () if k is None or v is None else (k, v)
    # only this call gets the sinks, because the merge adds the sums of exponentials
    own, own_lse = torch.ops.volta_fa.fwd_kvcache(
        q, k_cache, v_cache, *new, cache_seqlens=cache_seqlens, block_table=block_table,
        cu_seqlens_q=cu_seqlens_q, max_seqlen_q=max_seqlen_q, sinks=sinks, is_causal=is_causal, **options,
    )  # fmt: skip
    if q.dim() == 4:
        batch, seqlen_q = q.shape[:2]
        shared = shared.unflatten(0, (batch, seqlen_q))
        shared_lse = shared_lse.unflatten(1, (batch, seqlen_q)).transpose(0, 1)
    return merge_attention_states(own, own_lse, shared, shared_lse)
