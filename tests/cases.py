"""Attention problems as values: what to draw, how to say it in a test's name, how to repeat it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate

from torch import Tensor


@dataclass(frozen=True, repr=False)
class Case:
    """One attention problem.

    `lengths` makes it packed: (seqlen_q, seqlen_k) of each sequence, and `seqlen_q`, `seqlen_k`, `batch` do not count.
    """

    seqlen_q: int = 0
    seqlen_k: int = 0
    headdim: int = 64
    headdim_v: int | None = None
    batch: int = 2
    nheads: int = 2
    nheads_k: int | None = None
    is_causal: bool = False
    window_left: int = -1
    window_right: int = -1
    softmax_scale: float | None = None
    spread: float = 1.0  # standard deviation of q, k and v
    softcap: float = 0.0
    dropout_p: float = 0.0
    alibi: str = ""  # "h": (nheads), "bh": (batch, nheads)
    bias: str = ""  # its dimensions that are not 1, as "bhqk", "hqk" or "k", or "-" for none; then its type, as "qk:fp32"
    sinks: str = ""  # type
    lengths: tuple[tuple[int, int], ...] = ()
    spare: int = 0  # max_seqlen beyond the longest sequence
    used: tuple[int, ...] = ()  # seqused_k

    def __repr__(self):
        given = ((f, getattr(self, f.name)) for f in dataclasses.fields(self))
        return f"Case({', '.join(f'{f.name}={value!r}' for f, value in given if value != f.default)})"

    def __str__(self):
        parts = [f"b{self.batch}", f"q{self.seqlen_q}", f"k{self.seqlen_k}"]
        if self.lengths:
            shown = [f"{q}x{k}" for q, k in self.lengths[:4]]
            parts = ["packed" + ",".join([*shown, f"{len(self.lengths)}in all"] if len(self.lengths) > 4 else shown)]
        if self.spare:
            parts.append(f"spare{self.spare}")
        if self.used:
            parts.append("used" + ",".join(map(str, self.used[:4])))
        parts.append(f"h{self.nheads}" + ("" if self.nheads_k is None else f"on{self.nheads_k}"))
        parts.append(f"d{self.headdim}" + ("" if self.headdim_v is None else f"v{self.headdim_v}"))
        if self.is_causal:
            parts.append("causal")
        if self.window_left >= 0 or self.window_right >= 0:
            parts.append(f"window{self.window_left}:{self.window_right}")
        if self.softmax_scale is not None:
            parts.append(f"scale{self.softmax_scale:g}")
        if self.spread != 1.0:
            parts.append(f"spread{self.spread:g}")
        if self.softcap:
            parts.append(f"softcap{self.softcap:g}")
        if self.dropout_p:
            parts.append(f"dropout{self.dropout_p:g}")
        for name in ("alibi", "bias", "sinks"):
            if getattr(self, name):
                parts.append(name + getattr(self, name).replace(":", ""))
        return "_".join(parts)

    @property
    def longest(self) -> tuple[int, int]:
        """max_seqlen_q and max_seqlen_k."""
        if not self.lengths:
            return self.seqlen_q, self.seqlen_k
        q, k = zip(*self.lengths)
        return max(q) + self.spare, max(k) + self.spare

    @property
    def entries(self) -> int:
        return len(self.lengths) or self.batch

    @property
    def options(self) -> dict:
        """The op's keyword arguments that are no tensors; the reference takes the same."""
        o = {"is_causal": self.is_causal, "window_left": self.window_left, "window_right": self.window_right}
        if self.softmax_scale is not None:
            o["softmax_scale"] = self.softmax_scale
        if self.softcap:
            o["softcap"] = self.softcap
        if self.dropout_p:
            o["dropout_p"] = self.dropout_p
        return o

    def inputs(self, backend) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """q, k, v and dout."""
        hk = self.nheads if self.nheads_k is None else self.nheads_k
        dv = self.headdim if self.headdim_v is None else self.headdim_v
        rows_q, rows_k = (self.batch, self.seqlen_q), (self.batch, self.seqlen_k)
        if self.lengths:
            rows_q, rows_k = ((sum(lengths),) for lengths in zip(*self.lengths))
        q = backend.randn(*rows_q, self.nheads, self.headdim, spread=self.spread)
        k = backend.randn(*rows_k, hk, self.headdim, spread=self.spread)
        v = backend.randn(*rows_k, hk, dv, spread=self.spread)
        return q, k, v, backend.randn(*rows_q, self.nheads, dv)

    def tensors(self, backend) -> dict:
        """The op's keyword arguments that are tensors, and what belongs to them."""
        o = {}
        if self.lengths:
            for name, lengths, longest in zip("qk", zip(*self.lengths), self.longest):
                o[f"cu_seqlens_{name}"] = backend.ints([0, *accumulate(lengths)])
                o[f"max_seqlen_{name}"] = longest
        if self.used:
            o["seqused_k"] = backend.ints(self.used)
        if self.alibi:
            # steep enough that they matter beside scores of a few units
            shape = (self.entries, self.nheads) if self.alibi == "bh" else (self.nheads,)
            o["alibi_slopes"] = backend.randn(*shape).float().abs() * 0.3
        if self.bias:
            dims, _, dtype = self.bias.partition(":")
            full = dict(zip("bhqk", (self.entries, self.nheads, *self.longest)))
            bias = backend.randn(*(n if name in dims else 1 for name, n in full.items()))
            o["attn_bias"] = bias > -0.8 if dtype == "bool" else bias.float() if dtype == "fp32" else bias
        if self.sinks:
            sinks = backend.randn(self.nheads) * 2
            o["sinks"] = sinks.float() if self.sinks == "fp32" else sinks
        return o

    def problem(self, backend) -> tuple[tuple[Tensor, Tensor, Tensor, Tensor], dict]:
        """(q, k, v, dout), and every keyword argument."""
        return self.inputs(backend), {**self.options, **self.tensors(backend)}


WINDOWS = (-1, -1, 0, 1, 7, 40)
BIASES = ("", "", "bhqk", "hqk", "qk", "bqk", "bk", "hq", "k", "q", "-")
BIAS_TYPES = ("own", "fp32", "bool")


def random_case(pick: Callable, lengths: Callable[[], int], headdims, most_entries=3, most_heads=4) -> Case:
    """A combination of everything. `pick` takes one of a sequence, of which the simplest is first; `lengths` draws one."""
    nheads_k = pick(range(1, most_heads // 2 + 1))
    groups = pick([g for g in range(1, most_heads + 1) if g * nheads_k <= most_heads])
    headdim = pick(headdims)
    entries = pick(range(1, most_entries + 1))
    packed = pick((False, True))
    seqlens = tuple((lengths(), lengths()) for _ in range(entries)) if packed else ((max(lengths(), 1), max(lengths(), 1)),) * entries
    softcap = pick((0.0, 0.0, 1.5, 30.0))
    dims = pick(BIASES)
    is_causal = pick((False, True))
    return Case(
        seqlen_q=0 if packed else seqlens[0][0],
        seqlen_k=0 if packed else seqlens[0][1],
        lengths=seqlens if packed else (),
        batch=2 if packed else entries,
        spare=pick((0, 0, 5)) if packed else 0,
        used=tuple(pick(sorted({k, k // 2, max(k - 1, 0), 0}, reverse=True)) for _, k in seqlens) if pick((False, False, True)) else (),
        headdim=headdim,
        headdim_v=pick((None, None, pick(headdims))),
        nheads=nheads_k * groups,
        nheads_k=nheads_k,
        is_causal=is_causal,
        window_left=pick(WINDOWS),
        window_right=-1 if is_causal else pick(WINDOWS),  # the op refuses both
        softmax_scale=pick((None, None, 0.5, -0.1)),
        softcap=softcap,
        dropout_p=0.0 if softcap else pick((0.0, 0.0, 0.17, 0.5)),
        alibi=pick(("", "", "h", "bh")),
        bias=f"{dims}:{pick(BIAS_TYPES)}" if dims else "",
        sinks=pick(("", "", "own", "fp32")),
    )
