"""Computes which positions of a sequence each rank holds, from sizes alone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

#: The first position, and the one after the last.
Range = tuple[int, int]

#: zigzag: of 2 * size chunks, rank i holds i and 2 * size - 1 - i, which balances the work under a causal mask: a query at position p
#: sees p + 1 keys, and the positions of each such pair of chunks have the same sum.
#: contiguous: of size chunks, rank i holds chunk i.
LAYOUTS = ("zigzag", "contiguous")


def shard_ranges(seqlen: int, size: int, rank: int, layout: str, parts: int = 1, part: int = 0) -> tuple[Range, ...]:
    """Returns the positions of a sequence that a rank holds, in the order of its shard. Adjacent ranges are joined.

    Chunks differ by at most one position where the length is not divisible, and may be empty.

    Args:
        size, rank: of the ring.
        parts, part: size and rank of the Ulysses group, which divides the positions of a ring's place.
    """
    chunks = (rank, 2 * size - 1 - rank) if layout == "zigzag" else (rank,)
    count = 2 * size if layout == "zigzag" else size
    whole = join((seqlen * c // count, seqlen * (c + 1) // count) for c in chunks)
    total = length(whole)
    return select(whole, total * part // parts, total * (part + 1) // parts)


def length(ranges: Sequence[Range]) -> int:
    """Returns the number of positions in all ranges."""
    return sum(end - begin for begin, end in ranges)


def join(ranges: Iterable[Range]) -> tuple[Range, ...]:
    """Returns the ranges without empty ones, and joins those that follow each other without a gap."""
    joined: list[Range] = []
    for begin, end in ranges:
        if begin == end:
            continue
        if joined and joined[-1][1] == begin:
            joined[-1] = (joined[-1][0], end)
        else:
            joined.append((begin, end))
    return tuple(joined)


def select(ranges: Sequence[Range], first: int, last: int) -> tuple[Range, ...]:
    """Returns the positions of rows first to last (excluded) of a shard that consists of these ranges."""
    found, at = [], 0
    for begin, end in ranges:
        found.append((begin + min(max(first - at, 0), end - begin), begin + min(max(last - at, 0), end - begin)))
        at += end - begin
    return join(found)
