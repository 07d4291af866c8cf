"""The lightning indexer of DeepSeek V3.2 and GLM-5, by DeepGEMM's functions: which tokens each query of sparse attention takes.

    from volta_fa import indexer  # instead of: import deep_gemm

    logits = indexer.fp8_paged_mqa_logits(q, kv_cache, weights, context_lens, block_table, None, max_model_len, clean_logits=True)
    chosen = indexer.topk_indices(logits, 2048, block_table=block_table)

A logit is `scale[key] * sum over heads of weights[query, head] * relu(q[query, head] . k[key])`. The functions call
`volta_fa::indexer_logits`, which reads lengths and tables on the GPU and needs no metadata. Tensors may also be on the CPU.
`volta_fa.flash_mla` then attends to the chosen tokens."""

from typing import Any, SupportsIndex

import torch
from torch import Tensor

from .errors import bad_argument, require_none, require_tensors
from .operands import with_unit_stride  # copies a tensor unless its last dimension is contiguous

__all__ = ["fp8_mqa_logits", "fp8_paged_mqa_logits", "get_paged_mqa_logits_metadata", "topk_indices"]

#: What error messages name after `volta_fa.`.
_OP = "indexer"


def get_paged_mqa_logits_metadata(context_lens: Tensor, block_kv: int, num_sms: int, indices: Tensor | None = None) -> Tensor:
    """Returns a placeholder for what DeepGEMM plans ahead: int32 zeros (num_sms + 1, 2). Does not read lengths."""
    return torch.zeros(num_sms + 1, 2, dtype=torch.int32, device=context_lens.device)


def fp8_mqa_logits(
    q: Tensor,
    kv: tuple[Tensor, Tensor],
    weights: Tensor,
    cu_seq_len_k_start: Tensor,
    cu_seq_len_k_end: Tensor,
    clean_logits: bool = True,
    max_seqlen_k: int = 0,
) -> Tensor:
    """Computes the logits of prompts: each query sees the keys from its start to its end.

    Args:
        q: (seqlen_q, nheads, 128), torch.float8_e4m3fn with its scales in weights, torch.float16 or torch.bfloat16. Up to 64 heads.
        kv: codes, torch.float8_e4m3fn (seqlen_k, 128), and their scales, float32 (seqlen_k).
        weights: float32 (seqlen_q, nheads).
        cu_seq_len_k_start, cu_seq_len_k_end: int32 (seqlen_q). Numbers outside of kv are moved to its ends.
        clean_logits: False: logits outside of a query's keys are undefined, instead of -inf.
        max_seqlen_k: 0: column j of the result is key j, for all queries.

    Returns logits, float32 (seqlen_q, seqlen_k). No gradient.

    Raises ValueError for wrong arguments, NotImplementedError for another max_seqlen_k.
    """
    require_tensors(q=q, weights=weights, cu_seq_len_k_start=cu_seq_len_k_start, cu_seq_len_k_end=cu_seq_len_k_end)
    parts: Any = kv
    if not isinstance(parts, (tuple, list)) or [isinstance(t, Tensor) for t in parts] != [True, True]:
        got = [type(t).__name__ for t in parts] if isinstance(parts, (tuple, list)) else type(parts).__name__
        raise bad_argument("kv", got, "a tuple of two tensors, (codes, scales)", op=_OP)
    codes, scales = kv
    if max_seqlen_k:
        raise bad_argument("max_seqlen_k", max_seqlen_k, "0: logits of all keys", op=_OP, error=NotImplementedError)
    _check_rank("q", q, 3, "(seqlen_q, nheads, 128)")
    _check_rank("weights", weights, 2, "(seqlen_q, nheads)")
    for name, tensor in (("cu_seq_len_k_start", cu_seq_len_k_start), ("cu_seq_len_k_end", cu_seq_len_k_end)):
        _check_rank(name, tensor, 1, "(seqlen_q,)")
    return torch.ops.volta_fa.indexer_logits(
        with_unit_stride(q).unsqueeze(0), codes, with_unit_stride(weights).unsqueeze(0), cu_seq_len_k_end.unsqueeze(0),
        k_start=cu_seq_len_k_start.unsqueeze(0), k_scales=scales, clean_logits=clean_logits,
    ).squeeze(0)  # fmt: skip


def fp8_paged_mqa_logits(
    q: Tensor,
    kv_cache: Tensor,
    weights: Tensor,
    context_lens: Tensor,
    block_table: Tensor,
    schedule_metadata: Any,
    max_model_len: int,
    clean_logits: bool = False,
    indices: Tensor | None = None,
) -> Tensor:
    """Computes the logits of a decode step over a paged cache, with one query or several of each sequence.

    Args:
        q: (batch, next_n, nheads, 128) with next_n queries of each sequence: torch.float8_e4m3fn with its scales in weights,
            torch.float16 or torch.bfloat16. Up to 64 heads.
        kv_cache: torch.uint8 (num_pages, page_size, 1, 132), as vLLM writes it: a page has the e4m3 codes of all its tokens, then
            the float32 scales of all its tokens. page_size is a power of two, at least 4.
        weights: float32 (batch * next_n, nheads).
        context_lens: int32 (batch), the tokens that the last query sees; each query before sees one less. Or (batch, next_n), those of
            each query.
        block_table: int32 (batch, max_pages). Tokens of pages outside of the cache get -inf.
        schedule_metadata: ignored.
        max_model_len: columns of the result.
        clean_logits: False: logits past a query's length are undefined, instead of -inf.
        indices: None.

    Returns logits, float32 (batch * next_n, max_model_len). No gradient.

    Raises ValueError for wrong arguments, NotImplementedError for indices.
    """
    require_tensors(q=q, kv_cache=kv_cache, weights=weights, context_lens=context_lens, block_table=block_table)
    require_none("None: give each query a row of block_table", op=_OP, indices=indices)
    _check_rank("q", q, 4, "(batch, next_n, nheads, 128)")
    batch, next_n = q.shape[:2]
    if weights.dim() != 2 or weights.shape[0] != batch * next_n:
        raise bad_argument("weights", f"shape {tuple(weights.shape)}", f"(batch * next_n, nheads), here {batch * next_n} rows", op=_OP)
    return torch.ops.volta_fa.indexer_logits(
        with_unit_stride(q), kv_cache, with_unit_stride(weights).unflatten(0, (batch, next_n)), context_lens,
        block_table=with_unit_stride(block_table), max_seqlen_k=max_model_len, clean_logits=clean_logits,
    ).flatten(0, 1)  # fmt: skip


def topk_indices(logits: Tensor, topk: int, *, block_table: Tensor | None = None, page_size: int = 64) -> Tensor:
    """Returns the tokens with the largest logits of each row, int32 (rows, topk) in any order, and -1 where a row has fewer.

    Args:
        logits: (rows, columns), clean: -inf where there is no token.
        topk: tokens of a row, 0 or more. DeepSeek V3.2 takes 2048.
        block_table: int32 (batch, max_pages), with rows a multiple of batch: tokens are page * page_size + row, as
            `flash_mla_with_kvcache` takes them. A column without a page (past the table, or a negative one) is no token. None: columns.
        page_size: tokens of a page of the cache that these indices are for, 1 or more.

    Raises ValueError for wrong arguments. Reads no values on the host.
    """
    require_tensors(logits=logits)
    _check_rank("logits", logits, 2, "(rows, columns)")
    for name, value, least in (("topk", topk, 0), ("page_size", page_size, 1)):
        if not isinstance(value, SupportsIndex) or value < least:
            raise bad_argument(name, value, f"an int of {least} or more", op=_OP)
    largest, tokens = logits.topk(min(topk, logits.shape[-1]), dim=-1, sorted=False)
    is_token = largest != -torch.inf
    if block_table is not None:
        _check_rank("block_table", block_table, 2, "(batch, max_pages)")
        rows, (batch, pages) = logits.shape[0], block_table.shape
        queries = rows // max(batch, 1)  # of each sequence
        if queries * batch != rows:
            raise bad_argument("block_table", f"batch {batch}", f"one that divides the rows of logits, {rows}", op=_OP)
        # columns past the table look up a page of -1 there
        table = torch.nn.functional.pad(block_table, (0, 1), value=-1).repeat_interleave(queries, dim=0)
        page = table.gather(1, tokens.div(page_size, rounding_mode="floor").clamp(max=pages))
        tokens, is_token = page * page_size + tokens % page_size, is_token & (page >= 0)
    chosen = tokens.where(is_token, -1).int()
    return torch.nn.functional.pad(chosen, (0, topk - chosen.shape[-1]), value=-1)


def _check_rank(name: str, tensor: Tensor, rank: int, expected: str) -> None:
    if tensor.dim() != rank:
        raise bad_argument(name, f"shape {tuple(tensor.shape)}", expected, op=_OP)
