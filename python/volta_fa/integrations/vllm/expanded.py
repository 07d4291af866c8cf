"""Attention of long prompts with latents to expanded keys and values (DeepSeek's MLA), without vLLM.

A latent of 512 columns and its rotary part of 64 stand for the keys and values of all heads. Expanded, a head's key has 128 + 64 columns
and its value 128, so that a query and key take 640 operations of a head in place of the absorbed form's 2,176. To expand takes
2 * 512 * (128 + 128) operations of a token and head, whatever the number of its queries.

Does not import vLLM. Does not synchronize with a GPU.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor

from ...merge import merge_attention_states
from .paged import split_latents

#: Most queries of a sequence for which the absorbed form costs less, with DeepSeek's sizes.
MOST_ABSORBED_QUERIES = 2 * 512 * (128 + 128) // (2 * (576 + 512) - 2 * (192 + 128))

#: Most bytes of expanded keys and values of earlier tokens at a time. vLLM does not count them.
_WORKSPACE = 256 << 20


@dataclasses.dataclass
class Prompts:
    """The sequences of a step whose new tokens attend to expanded keys. The cache already holds the new tokens.

    Attributes:
        cu_seqlens_q: int32 (batch + 1): where the new tokens of each sequence begin.
        max_seqlen_q: at least the longest sequence's number of new tokens.
        context_lens: int32 (batch): tokens of each sequence before the new ones.
        max_context_len: at least the largest of them.
        block_table: int32 (batch, max_blocks): the blocks of each sequence, in order.
    """

    cu_seqlens_q: Tensor
    max_seqlen_q: int
    context_lens: Tensor
    max_context_len: int
    block_table: Tensor


@dataclasses.dataclass
class Expansion:
    """How a layer expands latents.

    Attributes:
        project: from latents (tokens, kv_lora_rank) to (tokens, num_heads * (qk_nope_head_dim + v_head_dim)).
        num_heads, qk_nope_head_dim, v_head_dim: of that result.
    """

    project: Callable[[Tensor], Tensor]
    num_heads: int
    qk_nope_head_dim: int
    v_head_dim: int

    def keys_and_values(self, latent: Tensor, rotary: Tensor) -> tuple[Tensor, Tensor]:
        """Returns k (tokens, num_heads, qk_nope_head_dim + rotary) and v (tokens, num_heads, v_head_dim), a view.

        Args:
            latent: (tokens, kv_lora_rank).
            rotary: (tokens, rotary) or (tokens, 1, rotary), of all heads.
        """
        sizes = (self.qk_nope_head_dim, self.v_head_dim)
        k, v = self.project(latent).view(-1, self.num_heads, sum(sizes)).split(sizes, dim=-1)
        of_all = rotary.reshape(len(latent), 1, -1).expand(-1, self.num_heads, -1)
        return torch.cat((k, of_all), dim=-1), v

    def tokens_at_a_time(self, rotary: int) -> int:
        """Returns how many tokens fit into the workspace, as the projection's result and as keys."""
        columns = 2 * self.qk_nope_head_dim + self.v_head_dim + rotary
        return _WORKSPACE // (torch.float16.itemsize * self.num_heads * columns)


def attend_to_expanded(
    q: Tensor,
    latent: Tensor,
    rotary: Tensor,
    cache: Tensor,
    prompts: Prompts,
    expansion: Expansion,
    softmax_scale: float,
    kv_cache_dtype: str = "auto",
    k_scale: Tensor | None = None,
) -> Tensor:
    """Returns causal attention of the new tokens to themselves and to earlier tokens, (tokens, num_heads, v_head_dim).

    The new tokens' latents are not read from the cache, so that a quantized cache does not round them. Those of earlier tokens are
    expanded in chunks, and the partial results are merged (`merge_attention_states`).

    Args:
        q: (tokens, num_heads, qk_nope_head_dim + rotary).
        latent: (tokens, kv_lora_rank); rotary: (tokens, rotary) or (tokens, 1, rotary).
        cache, kv_cache_dtype, k_scale: as for `paged.split_latents`.
    """
    starts, longest = prompts.cu_seqlens_q, prompts.max_seqlen_q
    k, v = expansion.keys_and_values(latent, rotary)
    out, softmax_lse, _ = torch.ops.volta_fa.fwd(
        q,
        k,
        v,
        cu_seqlens_q=starts,
        cu_seqlens_k=starts,
        max_seqlen_q=longest,
        max_seqlen_k=longest,
        is_causal=True,
        softmax_scale=softmax_scale,
    )
    batch, page, columns = len(prompts.context_lens), cache.shape[1], rotary.shape[-1]
    blocks = max(expansion.tokens_at_a_time(columns) // (batch * page), 1)
    last = -(-prompts.max_context_len // page)
    for first in range(0, last, blocks):
        table = prompts.block_table[:, first : min(first + blocks, last)]
        earlier = _read(cache, table, kv_cache_dtype, k_scale).to(q.dtype)
        tokens = len(earlier) // batch
        k, v = expansion.keys_and_values(earlier[:, :-columns], earlier[:, -columns:])
        part, part_lse, _ = torch.ops.volta_fa.fwd(
            q,
            k,
            v,
            cu_seqlens_q=starts,
            cu_seqlens_k=torch.arange(0, len(earlier) + 1, tokens, dtype=torch.int32, device=q.device),
            max_seqlen_q=longest,
            max_seqlen_k=tokens,
            seqused_k=(prompts.context_lens - first * page).clamp(0, tokens),
            softmax_scale=softmax_scale,
        )
        out, softmax_lse = merge_attention_states(out, softmax_lse, part, part_lse)
    return out


def _read(cache: Tensor, table: Tensor, kv_cache_dtype: str, k_scale: Tensor | None) -> Tensor:
    """Returns the latents of these blocks with their rotary parts, (batch * blocks * block_size, columns).

    Entries of the table after a sequence's last block may be anything, so they are kept within the cache.
    """
    latents, scales = split_latents(cache, kv_cache_dtype, k_scale)
    at = table.reshape(-1).long().clamp(0, len(cache) - 1)
    found = latents[at].flatten(0, 2)
    if "descale" in scales:
        return found.float() * scales["descale"]
    if "scale" in scales:
        return found * scales["scale"][at].reshape(-1, 1)
    return found
