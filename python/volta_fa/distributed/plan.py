"""Computes which positions of a sequence each rank holds. Plans the calls of `volta_fa::fwd`, "the op", between one rank's queries and
another rank's keys, from positions and a mask alone. ring.py runs the plan; nothing here touches a tensor.

shard    one or two ranges of positions (`shard_ranges`); its queries are "rows"
Call     a rectangle of rows and keys whose positions have no gaps: row i and key j have the positions `q + i` and `k + j`
Launch   one call of the op: a Call, or several as packed sequences
Step     the launches between one rank's queries and another's keys

In a sequence with the window (left, right), whose keys end `shift` positions after its queries, row i sees the keys

    q + i + shift - left <= k + j <= q + i + shift + right

The op aligns its window to the last row and the last key of a call: i + keys - rows - op_left <= j <= i + keys - rows + op_right. So in a
rectangle of `rows` x `keys`

    op_right = right + (q + rows + shift) - (k + keys)        op_left = left - (q + rows + shift) + (k + keys)

Neither may be negative. If op_right is negative, no row sees the last keys; these are cut off until it is 0. If op_left is negative, the
last rows see no key; they are cut off. First rows and keys without a visible pair are cut off too, which saves work."""

import enum
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

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
        parts, part: size and rank of the Ulysses group, which divides the positions of a rank of the ring.
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


@dataclass(frozen=True)
class Mask:
    """The keys that a query sees, by positions in the whole sequences."""

    #: ranges of positions of each sequence's queries and of its keys; a dense problem has one sequence
    queries: tuple[Range, ...]
    keys: tuple[Range, ...]
    #: window_left and window_right of the whole sequence; None: no bound
    left: int | None = None
    right: int | None = None
    alibi: bool = False  # whether scores depend on distances, so that calls may not cross a gap between positions


class Distance(enum.Enum):
    """How a call computes ALiBi, whose distances the op measures from the last row and the last key of the call."""

    OWN = "own"  # by the op's alibi_slopes, because those distances are correct; also without ALiBi
    BEFORE = "before"  # by a bias for each key, because all keys lie before all rows, or at them: -slope * |i - j| is linear in j
    AFTER = "after"  # by a bias for each key, because all keys lie after all rows, or at them


@dataclass(frozen=True)
class Call:
    """A rectangle of rows and keys, and the op's window in it."""

    q: Range  # of rows in the queries' shard
    k: Range  # of keys in the keys' shard; in a Step's launches, in the concatenation of its `key_ranges`
    left: int | None  # the op's window_left and window_right; None: no bound
    right: int | None
    distance: Distance = Distance.OWN
    offset: int = 0  # position of the first row, plus the shift of its sequence, minus that of the first key; for Distance.BEFORE and AFTER
    sequence: int = 0  # number of the packed sequence

    @property
    def rows(self) -> int:
        """Number of query rows."""
        return self.q[1] - self.q[0]

    @property
    def keys(self) -> int:
        """Number of keys."""
        return self.k[1] - self.k[0]

    @property
    def sees_to_the_left(self) -> bool:
        """Whether the left bound hides no key: for the last row it lies at or before the first key."""
        return self.left is None or self.left >= self.keys - 1

    @property
    def sees_to_the_right(self) -> bool:
        """Whether the right bound hides no key: for the first row it lies at or after the last key."""
        return self.right is None or self.right >= self.rows - 1

    @property
    def sees_all(self) -> bool:
        """Whether every row sees every key."""
        return self.sees_to_the_left and self.sees_to_the_right


@dataclass(frozen=True)
class Launch:
    """One call of the op: a rectangle, or several as packed sequences, if each begins where the one before ends, in rows and in keys, and
    all have one window (`_pack`)."""

    calls: tuple[Call, ...]

    @property
    def packed(self) -> bool:
        """Whether its calls are packed sequences."""
        return len(self.calls) > 1

    @property
    def q(self) -> Range:
        """The rows of all its calls."""
        return (self.calls[0].q[0], self.calls[-1].q[1])

    @property
    def k(self) -> Range:
        """The keys of all its calls."""
        return (self.calls[0].k[0], self.calls[-1].k[1])

    @property
    def left(self) -> int | None:
        """The op's window_left; None if it hides no key in any call."""
        return None if all(c.sees_to_the_left for c in self.calls) else self.calls[0].left

    @property
    def right(self) -> int | None:
        """The op's window_right; None if it hides no key in any call."""
        return None if all(c.sees_to_the_right for c in self.calls) else self.calls[0].right


@dataclass(frozen=True)
class Step:
    """The launches between one rank's queries and one rank's keys."""

    key_ranges: tuple[Range, ...]  # of the keys' shard, those that any launch reads, in order; only these keys are sent
    launches: tuple[Launch, ...]  # their `k` counts in the concatenation of `key_ranges`

    @property
    def count(self) -> int:
        """Number of keys that are sent."""
        return length(self.key_ranges)

    @property
    def adds_up(self) -> bool:
        """Whether a key belongs to several launches, whose gradients are then added."""
        ranges = sorted(launch.k for launch in self.launches)
        return any(a[1] > b[0] for a, b in zip(ranges, ranges[1:]))


@lru_cache(maxsize=4096)
def plan(q_ranges: tuple[Range, ...], k_ranges: tuple[Range, ...], mask: Mask) -> Step:
    """Returns the launches between two shards, given by their positions. Every visible pair of a row and a key is in exactly one call."""
    calls = list(_rectangles(q_ranges, k_ranges, mask))
    if not mask.alibi:
        calls = _fewer(calls)
    key_ranges = _union(call.k for call in calls)
    calls = [replace(call, k=_among(key_ranges, call.k)) for call in calls]
    return Step(key_ranges, tuple(_pack(calls, len(mask.queries) > 1)))


def _rectangles(q_ranges: Sequence[Range], k_ranges: Sequence[Range], mask: Mask) -> Iterable[Call]:
    """Yields a call for each range of rows, range of keys and sequence that have a visible pair. q_at, k_at: rows and keys of the shards
    before the two ranges."""
    q_at = 0
    for q_begin, q_end in q_ranges:
        k_at = 0
        for k_begin, k_end in k_ranges:
            # sequences are in order: those before this one end before the first row
            first = max(bisect_right(mask.queries, (q_begin, q_begin)) - 1, 0)
            for number in range(first, len(mask.queries)):
                (sq0, sq1), (sk0, sk1) = mask.queries[number], mask.keys[number]
                if sq0 >= q_end:
                    break
                both = (max(q_begin, sq0), min(q_end, sq1)), (max(k_begin, sk0), min(k_end, sk1))
                for q, k, distance in _by_distance(*both, sk1 - sq1, mask):
                    cut = _cut(q, k, sk1 - sq1, mask)
                    if cut is not None:
                        (q0, q1), (k0, k1), left, right = cut
                        rows, keys = (q0 - q_begin + q_at, q1 - q_begin + q_at), (k0 - k_begin + k_at, k1 - k_begin + k_at)
                        yield Call(rows, keys, left, right, distance, q0 + sk1 - sq1 - k0, number)
            k_at += k_end - k_begin
        q_at += q_end - q_begin


def _by_distance(q: Range, k: Range, shift: int, mask: Mask) -> Iterable[tuple[Range, Range, Distance]]:
    """With ALiBi, splits a rectangle into parts in which the op's distances are correct, or in which no distance changes its sign. The op's
    distances are correct if the last row and the last key have the same position."""
    (q0, q1), (k0, k1) = q, k
    if q0 >= q1 or k0 >= k1:
        return
    if not mask.alibi:
        yield q, k, Distance.OWN
    elif k1 <= q0 + shift + 1:
        yield q, k, Distance.BEFORE
    elif k0 >= q1 + shift - 1:
        yield q, k, Distance.AFTER
    elif k1 > q1 + shift:
        yield q, (k0, q1 + shift), Distance.OWN
        yield q, (q1 + shift, k1), Distance.AFTER
    else:
        yield (q0, k1 - shift), k, Distance.OWN
        if k1 - shift < q1:
            yield (k1 - shift, q1), k, Distance.BEFORE


def _cut(q: Range, k: Range, shift: int, mask: Mask) -> tuple[Range, Range, int | None, int | None] | None:
    """Cuts off rows without a visible key and keys that no row sees. Returns the rest and the op's window in it; None for nothing."""
    (q0, q1), (k0, k1) = q, k
    while True:
        before = (q0, q1, k0, k1)
        if mask.right is not None:
            k1 = min(k1, q1 + shift + mask.right)
            q0 = max(q0, k0 - shift - mask.right)
        if mask.left is not None:
            k0 = max(k0, q0 + shift - mask.left)
            q1 = min(q1, k1 - shift + mask.left)
        if q0 >= q1 or k0 >= k1:
            return None
        if (q0, q1, k0, k1) == before:
            break
    ahead = (q1 + shift) - k1
    return (q0, q1), (k0, k1), None if mask.left is None else mask.left - ahead, None if mask.right is None else mask.right + ahead


def _fewer(calls: list[Call]) -> list[Call]:
    """Returns fewer calls: joins rectangles that are adjacent in the shards, though not in the sequence, if one window describes both."""
    open_left = [call for call in calls if call.sees_to_the_left]
    others = [call for call in calls if not call.sees_to_the_left]
    merged = True
    while merged:
        merged = False
        # same rows, adjacent keys: joined if all keys of the first call are visible, because the window counts from the last key
        by_first_key = {(call.q, call.k[0]): call for call in open_left}
        for call in open_left:
            after = by_first_key.get((call.q, call.k[1]))
            if call.sees_all and after is not None:
                both = replace(after, k=(call.k[0], after.k[1]), left=None)
                open_left = [c for c in open_left if c not in (call, after)] + [both]
                merged = True
                break
        if merged:
            continue
        by_first_row = {(call.k[0], call.q[0]): call for call in open_left}
        for call in open_left:
            below = by_first_row.get((call.k[0], call.q[1]))
            if below is None:
                continue
            if call.k == below.k and call.sees_all and below.sees_all:
                both = replace(below, q=(call.q[0], below.q[1]), left=None, right=None)
            # one right bound through both: in each call the last row sees exactly up to the last key
            elif call.right == 0 and below.right == 0 and call.k[1] - call.q[1] == below.k[1] - below.q[1]:
                both = replace(below, q=(call.q[0], below.q[1]), left=None)
            else:
                continue
            open_left = [c for c in open_left if c not in (call, below)] + [both]
            merged = True
            break
    return open_left + others


def _union(ranges: Iterable[Range]) -> tuple[Range, ...]:
    """Returns sorted, disjoint ranges with the same positions."""
    found: list[Range] = []
    for begin, end in sorted(ranges):
        if found and begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((begin, end))
    return tuple(found)


def at_most_two(ranges: Iterable[Range]) -> bool:
    """Returns whether no position is in more than two ranges."""
    open_ranges = 0
    # at one position ends (-1) sort before beginnings
    for _, change in sorted((at, change) for begin, end in ranges for at, change in ((begin, 1), (end, -1))):
        open_ranges += change
        if open_ranges > 2:
            return False
    return True


def _among(ranges: Sequence[Range], part: Range) -> Range:
    """Returns `part`, which lies in one of `ranges`, counted in the concatenation of `ranges`."""
    at = 0
    for begin, end in ranges:
        if begin <= part[0] and part[1] <= end:
            return (part[0] - begin + at, part[1] - begin + at)
        at += end - begin
    raise AssertionError((ranges, part))


def _pack(calls: Sequence[Call], packed: bool) -> Iterable[Launch]:
    """Returns launches of the calls. Of packed sequences, calls with one window that follow each other in rows and keys share a launch."""
    chains: list[list[Call]] = []
    ends: dict[object, list[Call]] = {}
    for call in sorted(calls, key=lambda call: (call.q, call.k)):
        window = (call.left, call.right)
        chain = ends.pop((call.q[0], call.k[0], window), None) if packed and call.distance is Distance.OWN else None
        if chain is None:
            chain = []
            chains.append(chain)
        chain.append(call)
        if call.distance is Distance.OWN:
            ends[(call.q[1], call.k[1], window)] = chain
    return [Launch(tuple(chain)) for chain in chains]
