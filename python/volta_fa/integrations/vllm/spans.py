"""Image spans whose queries also see later tokens (vLLM's mm-prefix: Gemma 3 and 4, Molmo 2, PaliGemma). backend.py calls `find_spans`.

A span is the tokens of an image. Its queries see all tokens of the span, besides those that they see by the causal mask. Here each span
is one more sequence: all tokens up to the span's last, with the span's new tokens as queries. Without a causal mask and with the layer's
window on the left, these queries see exactly what they must. `paged` overwrites their rows of the output with this result. So windows,
softcap, sinks and all cache formats work, without another kernel.

Does not import vLLM."""

import dataclasses
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from .expanded import to_device  # copies a CPU tensor without waiting
from .paged import Batch  # the sequences of a step, under vLLM's names


@dataclasses.dataclass
class Spans:
    """The queries of a step that see later tokens."""

    rows: Tensor  # int64 (queries): their rows among the step's packed queries
    batch: Batch  # one sequence for each span, up to the span's last token in the cache
    max_seqlen_k: int  # tokens of the longest of these sequences
    longest: int  # tokens of the longest span, those of earlier steps included: backend.py rejects one longer than a layer's window


def find_spans(
    ranges: Mapping[int, Sequence[tuple[int, int]]], starts: Sequence[int], seq_lens: Sequence[int], block_table: Tensor
) -> Spans | None:
    """Returns the spans with queries in a step that see later tokens, or None.

    Args:
        ranges: of each sequence by its index, the first and last position of each span. Spans do not overlap.
        starts: where each sequence's queries begin, and the total (batch + 1).
        seq_lens: tokens of each sequence in the cache, new ones included. It may be too large for a sequence that generates: all its
            spans are in its prompt, before the new tokens, so they have no queries here either way.
        block_table: int32 (batch, max_blocks): the blocks of each sequence, in order.
    """
    rows: list[Tensor] = []
    sequences, ends, longest = [], [], 0
    for sequence, spans in ranges.items():
        begin, end = starts[sequence], starts[sequence + 1]
        to_row = end - seq_lens[sequence]  # a position plus this is the row of its query
        for first, last in spans:
            low, high = max(first, begin - to_row), min(last, end - 1 - to_row)
            if low < high:  # one query alone sees no later token
                rows.append(torch.arange(low + to_row, high + to_row + 1))
                sequences.append(sequence)
                ends.append(high + 1)
                longest = max(longest, last - first + 1)
    if not rows:
        return None
    device, lengths = block_table.device, [len(part) for part in rows]
    cu_seqlens_q = torch.tensor([0, *lengths]).cumsum(0).int()
    index, cu_seqlens_q, sequence_of_span, seq_lens_k = (
        to_device(t, device) for t in (torch.cat(rows), cu_seqlens_q, torch.tensor(sequences), torch.tensor(ends, dtype=torch.int32))
    )
    batch = Batch(
        num_actual_tokens=sum(lengths), max_query_len=max(lengths), query_start_loc=cu_seqlens_q, seq_lens=seq_lens_k,
        block_table=block_table.index_select(0, sequence_of_span), causal=False,
    )  # fmt: skip
    return Spans(index, batch, max(ends), longest)
