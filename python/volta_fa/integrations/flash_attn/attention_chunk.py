"""Chunked local attention, the option attention_chunk of FlashAttention 3 (fa3.py): a query attends to the keys of its own chunk of
positions. Each chunk becomes a packed sequence of its own.

Masks are aligned bottom-right: query i of a sequence is at position i + seqlen_k - seqlen_q, and key j at position j. The queries of a
chunk lie side by side, and so do its keys. Its last query and its last key have one position, so causal masks and windows stay the same.
Example: with attention_chunk 4, 3 queries and 10 keys have positions 7 to 9 and 0 to 9. The chunks are 0 to 3 without a query, 4 to 7
with the first query, and 8 to 9 with the other two.
No length is read on the host: a batch has as many chunks for each sequence as its longest can have, and some are empty."""

from typing import Any

import torch
from torch import Tensor

from ...operands import in_range  # whether each value is from 0 to a maximum; raises for others, but on a GPU not by default


def split_sequences(
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    chunk: int,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    queries_before_keys: int | None = None,
) -> dict[str, Any]:
    """Returns the lengths of chunks, as options of `volta_fa::fwd`. Queries after seqused_q become sequences without keys.

    Args:
        chunk: positions of a chunk; 0: one chunk of all.
        queries_before_keys: maximum number of queries of a sequence before the position of its first key. None: unknown.

    The others are those of fa3.py's `flash_attn_varlen_func`. Sequences with an impossible seqused_q or seqused_k give NaN.
    """
    longest = max(max_seqlen_q, max_seqlen_k, 1)
    # rows of q and k. Tensors below are (batch, chunks), or (batch, 1)
    begins_q, begins_k = cu_seqlens_q[:-1, None], cu_seqlens_k[:-1, None]
    used_q, used_k = cu_seqlens_q.diff()[:, None], cu_seqlens_k.diff()[:, None]
    possible = torch.ones_like(used_q, dtype=torch.bool)
    if seqused_q is not None:
        possible = possible & in_range("seqused_q", seqused_q, used_q[:, 0], "a length")[:, None]
        used_q = _within(seqused_q[:, None], used_q)
    if seqused_k is not None:
        possible = possible & in_range("seqused_k", seqused_k, used_k[:, 0], "a length")[:, None]
        used_k = _within(seqused_k[:, None], used_k)
    if chunk:
        chunk = min(chunk, longest)
        # numbers of chunks before position 0, that of the first key, and from it on
        before = -(-(max_seqlen_q if queries_before_keys is None else queries_before_keys) // chunk)
        after = max(1, -(-max_seqlen_k // chunk))
        firsts = chunk * torch.arange(-before, after, dtype=torch.int32, device=cu_seqlens_q.device)  # first positions of chunks
    else:  # from the position of the first query on, which may lie before that of the first key
        chunk, firsts = 2 * longest, cu_seqlens_q.new_full((1,), -longest)
    starts_q = begins_q + _within(firsts - used_k + used_q, used_q)
    starts_k = begins_k + _within(firsts, used_k)
    keys = _within(firsts + chunk, used_k) - _within(firsts, used_k)
    if seqused_q is not None:
        starts_q = torch.cat((starts_q, begins_q + used_q), 1)
        starts_k = torch.cat((starts_k, begins_k + used_k), 1)
        keys = torch.cat((keys, torch.zeros_like(used_k)), 1)
    return {
        "cu_seqlens_q": torch.cat((starts_q.flatten(), cu_seqlens_q[-1:])),
        "cu_seqlens_k": torch.cat((starts_k.flatten(), cu_seqlens_k[-1:])),
        # a sequence's unused rows follow its last chunk, so the last sequence of each may be as long as before
        "max_seqlen_q": max_seqlen_q if seqused_q is not None else min(chunk, max_seqlen_q),
        "max_seqlen_k": max_seqlen_k if seqused_k is not None else min(chunk, max_seqlen_k),
        # -1, an impossible length: NaN
        "seqused_k": None if seqused_q is None and seqused_k is None else keys.where(possible, -1).flatten(),
    }


def split_cache(
    cache: dict[str, Any], lengths: Tensor, k_cache: Tensor, v_cache: Tensor, chunk: int, window_left: int
) -> tuple[Tensor, Tensor, dict[str, Any], int]:
    """Splits the queries of a call with a cache into chunks, and describes each chunk's keys as those of a sequence of its own.

    Args:
        cache: `volta_fa::fwd_kvcache`'s block_table, cache_batch_idx, leftpad_k, cu_seqlens_q and max_seqlen_q, by name.
        lengths: int32 (batch), keys of each entry, those of leftpad_k included.
        chunk, window_left: positions of a chunk; keys that a query sees before its own position, -1: no limit.

    Returns k_cache and v_cache, options of `volta_fa::fwd_kvcache` for packed queries, and the number of chunks of each sequence.
    Where a chunk may begin within a page, the chunks' keys are copied, because kernels begin with a whole page.
    """
    cu_seqlens_q, max_seqlen_q, leftpad_k = cache["cu_seqlens_q"], cache["max_seqlen_q"], cache["leftpad_k"]
    cache_batch_idx, block_table = cache["cache_batch_idx"], cache["block_table"]
    chunk = min(chunk, 2**29)  # hides no more keys, because no sequence is that long; sums stay int32
    # the most chunks into which max_seqlen_q neighboring positions fall
    count = -(-(max_seqlen_q - 1) // chunk) + 1 if max_seqlen_q else 1
    # tensors below are (batch, chunks), or (batch, 1)
    padding = torch.zeros_like(lengths) if leftpad_k is None else leftpad_k
    padding, used_q = padding[:, None], cu_seqlens_q.diff()[:, None]
    used_k = lengths[:, None] - padding
    # the first query's chunk, and those after it
    chunks = (used_k - used_q).div(chunk, rounding_mode="floor") + torch.arange(count, dtype=torch.int32, device=lengths.device)
    firsts = chunks * chunk  # first positions of chunks
    starts_q = cu_seqlens_q[:-1, None] + _within(firsts - used_k + used_q, used_q)
    begins, ends = padding + _within(firsts, used_k), padding + _within(firsts + chunk, used_k)
    cu_seqlens = torch.cat((starts_q.flatten(), cu_seqlens_q[-1:]))
    options: dict[str, Any] = {"cu_seqlens_q": cu_seqlens, "max_seqlen_q": min(chunk, max_seqlen_q)}
    if block_table is None:
        entries = torch.arange(len(lengths), dtype=torch.int32, device=lengths.device) if cache_batch_idx is None else cache_batch_idx
        options["cache_batch_idx"] = entries.repeat_interleave(count)
        return k_cache, v_cache, options | {"leftpad_k": begins.flatten(), "cache_seqlens": ends.flatten()}, count
    page_size, pages = k_cache.shape[1], block_table.shape[1]
    aligned = chunk % page_size == 0
    # pages of a chunk: if it may begin within one, it may also end within one
    width = min(pages, chunk // page_size if aligned else (chunk - 1) // page_size + 2)
    # Pages from the first key that a query sees to the last. Others may be anything: servers free pages that a window has passed.
    first_key = begins[:, :1] if window_left < 0 else begins[:, :1].maximum(used_k - used_q - window_left)
    page = page_size * torch.arange(pages, dtype=torch.int32, device=lengths.device)
    is_read = (used_q > 0) & (page < lengths[:, None]) & (page + page_size > first_key)
    possible = in_range("page_table", block_table.where(is_read, 0), len(k_cache) - 1, "a page").all(1, keepdim=True)
    ends = ends.where(possible, -1)  # an impossible length: NaN
    first_page = begins // page_size
    columns = first_page[..., None] + torch.arange(width, dtype=torch.int32, device=lengths.device)
    table = block_table.gather(1, columns.clamp(0, pages - 1).flatten(1).long()).unflatten(1, (count, width)).flatten(0, 1)
    begins, ends = (begins - first_page * page_size).flatten(), (ends - first_page * page_size).flatten()
    if aligned:
        return k_cache, v_cache, options | {"block_table": table, "cache_seqlens": ends}, count
    table = table.clamp(0, len(k_cache) - 1).flatten().long()
    k_cache, v_cache = (_rows(t, table).unflatten(0, (-1, width)).flatten(1, 2) for t in (k_cache, v_cache))
    return k_cache, v_cache, options | {"leftpad_k": begins, "cache_seqlens": ends}, count


def _within(positions: Tensor, length: Tensor) -> Tensor:
    """Returns positions clamped to 0 to length."""
    return positions.clamp(min=0).minimum(length)


def _rows(t: Tensor, rows: Tensor) -> Tensor:
    """Returns rows of a tensor. Formats of one byte are indexed as uint8, because PyTorch cannot index all of them."""
    return t.view(torch.uint8)[rows].view(t.dtype) if t.element_size() == 1 else t[rows]
