"""Decode context parallelism (`--decode-context-parallel-size`): the ranks of a group share the cached tokens of a KV head.

Each rank has some query heads of the KV head, and all new tokens. It attends to the new tokens for its own heads. For the earlier tokens
it gathers the queries of all heads and attends to those tokens that its cache holds. The ranks combine these partial results by their
softmax_lse, and each merges its heads' with those of the new tokens.

Does not import vLLM."""

import dataclasses
from collections.abc import Callable
from typing import Any

from torch import Tensor


@dataclasses.dataclass
class Ranks:
    """The ranks that share a KV head's tokens."""

    group: Any  # vLLM's group of these ranks, with `world_size`, `rank_in_group` and `all_gather(tensor, dim)`
    interleave: int  # consecutive tokens that a rank holds before the next rank's turn (vLLM's cp_kv_cache_interleave_size)
    #: vLLM's function of (out, softmax_lse, group, return_lse=True). It takes this rank's partial results for all heads, (tokens, nheads,
    #: headdim_v) and softmax_lse (tokens, nheads), and returns the combined results of all ranks for this rank's heads. In softmax_lse,
    #: infinities of either sign stand for no tokens.
    combine: Callable[..., tuple[Tensor, Tensor]]

    def local_lengths(self, lengths: Tensor) -> Tensor:
        """Returns how many of each sequence's first tokens this rank holds: of 5 tokens with interleave 2, two ranks hold 3 and 2.
        `lengths`: integers (batch), tokens of all ranks together."""
        each = lengths // (self.interleave * self.group.world_size) * self.interleave
        rest = lengths - each * self.group.world_size - self.group.rank_in_group * self.interleave
        return each + rest.clamp(0, self.interleave)


@dataclasses.dataclass
class Earlier:
    """The tokens of a step's sequences before the new ones."""

    ranks: Ranks  # the ranks that share them
    lengths: Tensor  # int32 (batch): those that this rank holds. Always the same memory, because captured graphs read it.
    any: bool  # False only if no rank holds an earlier token. The ranks then exchange nothing, so all must have the same value.
