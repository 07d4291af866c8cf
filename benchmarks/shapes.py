"""Defines attention problems, their operation counts, and the list of `benchmarks.table`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from volta_fa.errors import CommandError


@dataclass(frozen=True)
class Shape:
    """One attention problem; as text `batch,nheads,seqlen_q,seqlen_k,headdim[,causal]`, without nheads_k and headdim_v."""

    batch: int
    nheads: int
    seqlen_q: int
    seqlen_k: int
    headdim: int
    causal: bool = False
    nheads_k: int = 0  # 0: as many as nheads
    headdim_v: int = 0  # 0: headdim

    def __post_init__(self):
        object.__setattr__(self, "nheads_k", self.nheads_k or self.nheads)
        object.__setattr__(self, "headdim_v", self.headdim_v or self.headdim)

    def __str__(self) -> str:
        numbers = f"{self.batch},{self.nheads},{self.seqlen_q},{self.seqlen_k},{self.headdim}"
        return numbers + (",causal" if self.causal else "")

    @staticmethod
    def parse(text: str) -> Shape:
        fields = text.replace(" ", "").split(",")
        causal = fields[-1] == "causal"
        try:
            numbers = [int(f) for f in fields[: 5 if causal else None]]
            if len(numbers) != 5 or len(fields) != 5 + causal or min(numbers) < 1:
                raise ValueError
        except ValueError:
            raise CommandError(f"`{text}` is no shape: expected B,H,M,N,D or B,H,M,N,D,causal, five positive numbers") from None
        return Shape(*numbers, causal=causal)

    @property
    def pairs(self) -> float:
        """Query-key pairs that are computed. Causal (bottom-right aligned) ones by area, as is usual: half of a square."""
        m, n = self.seqlen_q, self.seqlen_k
        if not self.causal:
            return m * n
        return m * (n - m / 2) if m <= n else n * n / 2

    @property
    def forward_flops(self) -> float:
        """S = Q K^T and O = P V."""
        return 2 * self.batch * self.nheads * self.pairs * (self.headdim + self.headdim_v)

    @property
    def backward_flops(self) -> float:
        """S again, dQ and dK over headdim, dP and dV over headdim_v: 2.5 times the forward where these are equal."""
        return 2 * self.batch * self.nheads * self.pairs * (3 * self.headdim + 2 * self.headdim_v)


def _table() -> list[Shape]:
    plain = [(1, 1, n, n, n) for n in (16, 32, 64, 128, 256)]
    plain += [(1, h, 1024, 1024, d) for h in (16, 32) for d in (16, 32, 64, 128, 256)]
    plain += [(1, 32, n, n, d) for n in (2048, 4096, 8192) for d in (128, 256)]
    return [Shape(*numbers, causal=causal) for numbers in plain for causal in (False, True)]


#: Squares of one head (seqlen = headdim), then 16 and 32 heads at seqlen 1024, then 32 heads at 2048 to 8192. Each shape is there with and
#: without a causal mask.
TABLE = _table()


def select(patterns: Sequence[str], listed: Sequence[Shape] = TABLE) -> list[Shape]:
    """Returns the shapes that the patterns name, each once; all listed shapes without patterns.

    A pattern with wildcards (`*`, `?`, `[`, as in file names) selects listed shapes by their text.
    Other patterns are shapes, listed or not.

    Raises CommandError for wildcards that match nothing, and for text that is no shape.
    """
    if not patterns:
        return list(listed)
    chosen: dict[Shape, None] = {}
    for pattern in patterns:
        wild = any(c in pattern for c in "*?[")
        found = [s for s in listed if fnmatchcase(str(s), pattern)] if wild else [Shape.parse(pattern)]
        if not found:
            raise CommandError(f"--cases {pattern} matches none of the {len(listed)} listed shapes, such as {listed[-1]}")
        chosen.update(dict.fromkeys(found))
    return list(chosen)
