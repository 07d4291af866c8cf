"""Attention of long prompts in models with latents (DeepSeek's MLA): it expands latents to keys and values. mla.py calls
`attend_to_expanded`. Does not import vLLM. Does not synchronize with a GPU.

A latent of 512 columns and its rotary part of 64 stand for the keys and values of all heads. Multiplications and additions for a head:

- Expanded, a key has 128 + 64 columns and a value 128. So a query and key take 2 * (192 + 128) = 640.
- Absorbed, a query attends to latents directly. So a query and key take 2 * (576 + 512) = 2,176.
- Expanding a token takes 2 * 512 * (128 + 128) = 262,144, whatever the number of queries. So it pays from 171 queries on."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor

from ...operators import merge_attention_states  # of attention to two sets of keys
from .paged import attend_packed  # attention of packed sequences

#: Maximum number of new tokens of a sequence for which the absorbed form costs less, with the sizes above: 170.
MOST_ABSORBED_QUERIES = 2 * 512 * (128 + 128) // (2 * (576 + 512) - 2 * (192 + 128))

#: Maximum bytes (256 MiB) of expanded keys and values of earlier tokens at a time. vLLM does not reserve memory for them.
_WORKSPACE = 256 << 20


@dataclasses.dataclass
class Prompts:
    """The sequences of a step whose new tokens attend to expanded keys. The cache already holds the new tokens."""

    cu_seqlens_q: Tensor  # int32 (batch + 1): where the new tokens of each sequence begin
    max_seqlen_q: int  # at least the longest sequence's number of new tokens
    context_lens: Tensor  # int32 (batch): tokens of each sequence before the new ones
    most_context: Tensor  # integers (batch) on the CPU, upper bounds of context_lens
    block_table: Tensor  # int32 (batch, max_blocks): the blocks of each sequence, in order
    _parts: dict[int, list[Part]] = dataclasses.field(default_factory=dict)  # what `parts` returned, by `blocks`

    def parts(self, block_size: int, blocks: int) -> list[Part]:
        """Divides the earlier tokens of all sequences into parts of at most `blocks` blocks of the cache, of `block_size` tokens each. All
        layers share these."""
        if blocks not in self._parts:
            counts = (-(-self.most_context // block_size)).clamp(0, self.block_table.shape[1])
            ends = counts.cumsum(0)
            self._parts[blocks] = [self._part(counts, ends, first, blocks, block_size) for first in range(0, int(ends[-1]), blocks)]
        return self._parts[blocks]

    def _part(self, counts: Tensor, ends: Tensor, first: int, blocks: int, block_size: int) -> Part:
        """Returns the part from block `first` on. counts, ends: blocks of each sequence, and their cumulative sums."""
        # Block numbers count through all sequences; a part has those from `first` on. Of each sequence that is one range, maybe empty.
        begin = (first - (ends - counts)).clamp(min=0).minimum(counts)
        end = (first + blocks - (ends - counts)).clamp(min=0).minimum(counts)
        sizes = end - begin
        sequence = torch.arange(len(sizes)).repeat_interleave(sizes)
        column = torch.arange(int(sizes.sum())) - (sizes.cumsum(0) - sizes)[sequence] + begin[sequence]
        starts = torch.nn.functional.pad(sizes.cumsum(0) * block_size, (1, 0))
        sequence, column, starts, begin_tokens, most = (
            to_device(t, self.block_table.device) for t in (sequence, column, starts, begin * block_size, sizes * block_size)
        )
        return Part(
            blocks=self.block_table[sequence, column].long(),
            cu_seqlens_k=starts.int(),
            seqused_k=(self.context_lens - begin_tokens).clamp(min=0).minimum(most).int(),
            max_seqlen_k=int(sizes.max()) * block_size,
        )


@dataclasses.dataclass
class Part:
    """Some earlier tokens of the sequences, which are expanded together."""

    blocks: Tensor  # int64: the cache's blocks that hold them, those of one sequence side by side
    cu_seqlens_k: Tensor  # int32 (batch + 1): where each sequence begins among these blocks' tokens
    seqused_k: Tensor  # int32 (batch): how many of each sequence's tokens there are valid
    max_seqlen_k: int  # at least the largest number of one sequence


def to_device(t: Tensor, device: torch.device) -> Tensor:
    """Copies a CPU tensor to the device, without waiting."""
    return t.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else t.to(device)


@dataclasses.dataclass
class Expansion:
    """How a layer expands latents."""

    project: Callable[[Tensor], Tensor]  # from latents (tokens, kv_lora_rank) to (tokens, num_heads * (qk_nope_head_dim + v_head_dim))
    num_heads: int
    qk_nope_head_dim: int  # columns of a key without its rotary part
    v_head_dim: int

    def keys_and_values(self, latent: Tensor, rotary: Tensor) -> tuple[Tensor, Tensor]:
        """Returns k (tokens, num_heads, qk_nope_head_dim + rotary) and v (tokens, num_heads, v_head_dim), a view.
        `latent`: (tokens, kv_lora_rank). `rotary`: (tokens, rotary) or (tokens, 1, rotary), of all heads."""
        sizes = (self.qk_nope_head_dim, self.v_head_dim)
        k, v = self.project(latent).view(-1, self.num_heads, sum(sizes)).split(sizes, dim=-1)
        of_all = rotary.reshape(len(latent), 1, -1).expand(-1, self.num_heads, -1)
        return torch.cat((k, of_all), dim=-1), v

    def tokens_at_a_time(self, rotary: int) -> int:
        """Returns how many tokens fit into _WORKSPACE, as the projection's result and as keys. `rotary`: columns of the rotary part."""
        columns = 2 * self.qk_nope_head_dim + self.v_head_dim + rotary  # of a head: (nope + v) projected, and (nope + rotary) as a key
        return _WORKSPACE // (torch.float16.itemsize * self.num_heads * columns)


def attend_to_expanded(
    q: Tensor, new: tuple[Tensor, Tensor], cached: tuple[Tensor, dict[str, Tensor]], prompts: Prompts, expansion: Expansion, scale: float
) -> Tensor:
    """Returns causal attention of the new tokens to themselves and to earlier tokens, (tokens, num_heads, v_head_dim).

    The new tokens' latents are not read from the cache, so that a quantized cache does not round them. Those of earlier tokens are
    expanded in parts, and the partial results are merged (`merge_attention_states`).

    Args:
        q: (tokens, num_heads, qk_nope_head_dim + rotary).
        new: latents of the new tokens (tokens, kv_lora_rank), and their rotary parts (tokens, rotary) or (tokens, 1, rotary).
        cached: the cache, (blocks, block_size, 1, kv_lora_rank + rotary), and its scales as "scale" (int8) or "descale" (fp8), if any:
            the results of `paged.split_latents`.
        scale: softmax_scale.
    """
    starts, longest = prompts.cu_seqlens_q, prompts.max_seqlen_q
    k, v = expansion.keys_and_values(*new)
    out, softmax_lse = attend_packed(q, k, v, starts, longest, is_causal=True, softmax_scale=scale)
    block_size, columns = cached[0].shape[1], new[1].shape[-1]
    for part in prompts.parts(block_size, max(expansion.tokens_at_a_time(columns) // block_size, 1)):
        earlier = _read(*cached, part.blocks).to(q.dtype)
        k, v = expansion.keys_and_values(earlier[:, :-columns].contiguous(), earlier[:, -columns:])
        more, more_lse, _ = torch.ops.volta_fa.fwd(
            q, k, v, cu_seqlens_q=starts, cu_seqlens_k=part.cu_seqlens_k, max_seqlen_q=longest,
            max_seqlen_k=part.max_seqlen_k, seqused_k=part.seqused_k, softmax_scale=scale,
        )  # fmt: skip
        out, softmax_lse = merge_attention_states(out, softmax_lse, more, more_lse)
    return out


def _read(latents: Tensor, scales: dict[str, Tensor], blocks: Tensor) -> Tensor:
    """Returns the latents of these blocks with their rotary parts, (blocks * block_size, columns). Entries of a block table after a
    sequence's end may be any numbers, so they are clamped to blocks of the cache."""
    at = blocks.clamp(0, len(latents) - 1)
    found = latents[at].flatten(0, 2)
    if "descale" in scales:  # fp8: one scale of the layer
        return found.float() * scales["descale"]
    if "scale" in scales:  # int8: a scale of each token
        return found * scales["scale"][at].reshape(-1, 1)
    return found
