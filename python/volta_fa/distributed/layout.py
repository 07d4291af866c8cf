"""Which positions of a sequence each rank holds. Pure: sizes go in, ranges of positions come out."""

from __future__ import annotations

from collections.abc import Sequence

#: First position, and the one after the last.
Range = tuple[int, int]

#: zigzag: of 2 * size chunks, rank i holds i and 2 * size - 1 - i, so that each rank has as much to do under a causal mask as any
#: other: a query at position p sees p + 1 keys, and the positions of each pair of chunks have the same sum.
#: contiguous: of size chunks, rank i holds chunk i.
LAYOUTS = ("zigzag", "contiguous")


def shard_ranges(seqlen: int, size: int, rank: int, layout: str, parts: int = 1, part: int = 0) -> tuple[Range, ...]:
    """The positions of a sequence that a rank holds, in the order of its shard; adjacent ranges are one.

    Lengths that do not divide make chunks that differ by at most one position, empty ones among them. With `parts`, what rank has is
    cut into so many pieces, of which this is `part`: a mesh of a ring and, inside each of its places, Ulysses.
    """
    chunks = (rank, 2 * size - 1 - rank) if layout == "zigzag" else (rank,)
    count = 2 * size if layout == "zigzag" else size
    whole = join((seqlen * c // count, seqlen * (c + 1) // count) for c in chunks)
    total = length(whole)
    return select(whole, total * part // parts, total * (part + 1) // parts)


def length(ranges: Sequence[Range]) -> int:
    return sum(end - begin for begin, end in ranges)


def join(ranges: Sequence[Range] | object) -> tuple[Range, ...]:
    """Without empty ranges; each that begins where the one before it ends becomes part of that."""
    joined: list[Range] = []
    for begin, end in ranges:  # type: ignore[attr-defined]
        if begin == end:
            continue
        if joined and joined[-1][1] == begin:
            joined[-1] = (joined[-1][0], end)
        else:
            joined.append((begin, end))
    return tuple(joined)


def select(ranges: Sequence[Range], first: int, last: int) -> tuple[Range, ...]:
    """Rows first to last (excluded) of a shard that consists of these ranges, as ranges of positions."""
    found, at = [], 0
    for begin, end in ranges:
        found.append((begin + min(max(first - at, 0), end - begin), begin + min(max(last - at, 0), end - begin)))
        at += end - begin
    return join(found)
