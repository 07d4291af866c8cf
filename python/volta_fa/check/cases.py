"""Attention problems of `volta_fa::fwd` and `bwd` as values: a `Case` has sizes and options, and draws its tensors from a `Source`. `python
-m volta_fa check` and the tests share them; cache_cases.py adds those with a KV cache. The tests import this file without the package, so
it imports nothing but torch and files that do the same."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Protocol

import torch
from torch import Tensor

from . import block_masks


class Source(Protocol):
    """Draws a problem's tensors: on one device, in one dtype, from one seed."""

    device: Any
    dtype: torch.dtype
    seed: int

    def randn(self, *shape: int, spread: float = 1.0) -> Tensor:
        """Returns normal numbers with this standard deviation, in the problem's dtype."""

    def ints(self, values: Any) -> Tensor:
        """Returns these numbers as int32."""


@dataclass
class CpuSource:
    """Draws on the CPU and moves to `device`, so that a seed gives the same numbers on every device."""

    device: torch.device
    dtype: torch.dtype
    seed: int

    def __post_init__(self) -> None:
        self.generator = torch.Generator().manual_seed(self.seed)

    def randn(self, *shape: int, spread: float = 1.0) -> Tensor:
        """Returns normal numbers with this standard deviation."""
        return (torch.randn(shape, generator=self.generator) * spread).to(self.dtype).to(self.device)

    def ints(self, values: Any) -> Tensor:
        """Returns these numbers as int32."""
        return torch.tensor(list(values), dtype=torch.int32, device=self.device)


#: Fields that make a Case use a feature of kernels, by the feature's name in `info()`.
ASKING: dict[str, dict[str, Any]] = {
    "softcap": {"softcap": 20.0},
    "alibi": {"alibi": "bh"},
    "bias": {"bias": "hqk"},
    "dropout": {"dropout_p": 0.2},
    "block_mask": {"blocks": "h"},
}
#: Fields of a problem that uses every feature of kernels with a cache.
EVERY = {**ASKING["softcap"], **ASKING["alibi"], "sinks": "own"}
#: Options of the operators that `tolerance.attend` takes as they are.
OF_REFERENCE = ("is_causal", "window_left", "window_right", "softmax_scale", "softcap", "dropout_p", "sinks")


def asking(features: list[str]) -> dict[str, Any]:
    """Returns the fields of a problem that uses these features, as far as they are in `ASKING`."""
    return {name: value for feature in features for name, value in ASKING.get(feature, {}).items()}


@dataclass(frozen=True, repr=False, kw_only=True)
class ScoreOptions:
    """Options of a problem that change scores, as the operators define them."""

    window_left: int = -1  # keys that a query sees before its own position, and after it; -1: no limit
    window_right: int = -1
    softmax_scale: float | None = None  # None: headdim ** -0.5
    softcap: float = 0.0  # 0: off
    alibi: str = ""  # shape of the slopes: "h" (nheads), "bh" (batch, nheads); "": none
    sinks: str = ""  # dtype: "own" (q's) or "fp32"; "": none

    @property
    def score_features(self) -> dict[str, bool]:
        """Whether the problem uses each feature, by its name in `info()`."""
        return {"sinks": bool(self.sinks), "softcap": self.softcap > 0, "alibi": bool(self.alibi)}

    @property
    def score_words(self) -> list[str]:
        """Parts of the problem's name for window, scale and softcap, where they are not their defaults."""
        window = self.window_left, self.window_right
        words = [f"window{self.window_left}:{self.window_right}"] if max(window) >= 0 else []
        words += [] if self.softmax_scale is None else [f"scale{self.softmax_scale:g}"]
        return [*words, f"softcap{self.softcap:g}"] if self.softcap else words

    @property
    def score_numbers(self) -> dict[str, Any]:
        """The operators' keyword arguments for window and softcap. `fwd_mla` has none of them."""
        return {"window_left": self.window_left, "window_right": self.window_right, "softcap": self.softcap}


@dataclass(frozen=True, repr=False)
class Case(ScoreOptions):
    """One problem of `volta_fa::fwd` and `volta_fa::bwd`. `lengths` makes it packed: (seqlen_q, seqlen_k) of each sequence; `seqlen_q`,
    `seqlen_k` and `batch` are then ignored. repr() gives the fields that are not their defaults, str() a short name for reports and test
    names."""

    seqlen_q: int = 0
    seqlen_k: int = 0
    headdim: int = 64
    headdim_v: int | None = None  # None: headdim
    batch: int = 2
    nheads: int = 2
    nheads_k: int | None = None  # None: nheads
    is_causal: bool = False
    spread: float = 1.0  # standard deviation of q, k and v
    dropout_p: float = 0.0
    bias: str = ""  # attn_bias: its dimensions that are not 1, as "bhqk", or "-"; then ":fp32" or ":bool" if not q's dtype; "": no bias
    blocks: str = ""  # dimensions of a block mask that are not 1, as "bh" or "h", or "-" for none of them; "": no mask
    lengths: tuple[tuple[int, int], ...] = ()
    spare: int = 0  # how much max_seqlen_q and max_seqlen_k exceed the longest sequence
    used: tuple[int, ...] = ()  # seqused_k: keys that count, of each entry
    dtype: torch.dtype | None = None  # None: the source that draws the tensors decides
    deterministic: bool = False  # `bwd` gets deterministic=True: gradients bitwise the same in each run, without atomics
    as_fp32: bool = False  # `fwd` gets q, k and v as float32 under torch's precision "high": scaled fp16 products, and out in fp32

    def __repr__(self) -> str:
        given = ((f, getattr(self, f.name)) for f in dataclasses.fields(self))
        return f"Case({', '.join(f'{f.name}={value!r}' for f, value in given if value != f.default)})"

    def __str__(self) -> str:
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
        if self.dtype is not None:
            parts.append(str(self.dtype).removeprefix("torch."))
        if self.is_causal:
            parts.append("causal")
        parts += self.score_words
        if self.spread != 1.0:
            parts.append(f"spread{self.spread:g}")
        if self.dropout_p:
            parts.append(f"dropout{self.dropout_p:g}")
        for name in ("alibi", "bias", "blocks", "sinks"):
            if getattr(self, name):
                parts.append(name + getattr(self, name).replace(":", ""))
        parts += [name for name in ("deterministic", "as_fp32") if getattr(self, name)]
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
        """Number of batch entries or packed sequences."""
        return len(self.lengths) or self.batch

    @property
    def seqlens(self) -> list[tuple[int, int]]:
        """(seqlen_q, keys that count) of each batch entry or packed sequence."""
        of_tensors = self.lengths or ((self.seqlen_q, self.seqlen_k),) * self.batch
        return [(q, self.used[i] if self.used else k) for i, (q, k) in enumerate(of_tensors)]

    @property
    def features(self) -> list[str]:
        """Features that a kernel must have to run the problem, by their names in `info()`."""
        bias, _, bias_type = self.bias.partition(":")
        is_bf16 = self.dtype == torch.bfloat16
        asked = {
            "varlen": bool(self.lengths or self.used),
            "fp32_gradients": is_bf16,  # `bwd` runs bf16 on fp16 kernels, which must store gradients beyond fp16's range
            **self.score_features,
            "bias": bool(bias),
            "dropout": self.dropout_p > 0,
            "block_mask": bool(self.blocks),
            "fp32_output": self.as_fp32,
            # kernels get a bf16 bias as fp32
            "fp32_bias": bool(bias) and (bias_type == "fp32" or (not bias_type and self.dtype in (torch.bfloat16, torch.float32))),
        }
        return [name for name, is_asked in asked.items() if is_asked]

    @property
    def options(self) -> dict[str, Any]:
        """The keyword arguments that are no tensors, which `fwd`, `bwd` and the reference, `tolerance.attend`, share."""
        found: dict[str, Any] = {"is_causal": self.is_causal, **self.score_numbers}
        if self.softmax_scale is not None:
            found["softmax_scale"] = self.softmax_scale
        if self.dropout_p:
            found["dropout_p"] = self.dropout_p
        return found

    def inputs(self, source: Source) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Draws q, k, v and dout."""
        nheads_k = self.nheads if self.nheads_k is None else self.nheads_k
        headdim_v = self.headdim if self.headdim_v is None else self.headdim_v
        rows_q: tuple[int, ...] = (self.batch, self.seqlen_q)
        rows_k: tuple[int, ...] = (self.batch, self.seqlen_k)
        if self.lengths:
            rows_q, rows_k = ((sum(lengths),) for lengths in zip(*self.lengths))
        q = source.randn(*rows_q, self.nheads, self.headdim, spread=self.spread)
        k = source.randn(*rows_k, nheads_k, self.headdim, spread=self.spread)
        v = source.randn(*rows_k, nheads_k, headdim_v, spread=self.spread)
        return q, k, v, source.randn(*rows_q, self.nheads, headdim_v)

    def tensors(self, source: Source) -> dict[str, Any]:
        """Draws the operators' keyword arguments that are tensors, with max_seqlen_q and max_seqlen_k."""
        found: dict[str, Any] = {}
        if self.lengths:
            for name, lengths, longest in zip("qk", zip(*self.lengths), self.longest):
                found[f"cu_seqlens_{name}"] = source.ints([0, *accumulate(lengths)])
                found[f"max_seqlen_{name}"] = longest
        if self.used:
            found["seqused_k"] = source.ints(self.used)
        if self.alibi:
            # around 0.3, so that slope * distance matters beside scores of a few units
            shape = (self.entries, self.nheads) if self.alibi == "bh" else (self.nheads,)
            found["alibi_slopes"] = source.randn(*shape).float().abs() * 0.3
        if self.bias:
            dims, _, dtype = self.bias.partition(":")
            full = dict(zip("bhqk", (self.entries, self.nheads, *self.longest)))
            bias = source.randn(*(n if name in dims else 1 for name, n in full.items()))
            # of a bool mask, 79% are True: the normal numbers above -0.8
            found["attn_bias"] = bias > -0.8 if dtype == "bool" else bias.float() if dtype == "fp32" else bias
        if self.blocks:
            batch, nheads = self.batch if "b" in self.blocks else 1, self.nheads if "h" in self.blocks else 1
            mask = block_masks.random_mask(batch, nheads, self.seqlen_q, self.seqlen_k, source.seed, density=0.4)
            found |= block_masks.options_of(mask, source.device, source.seed)
        if self.sinks:
            sinks = source.randn(self.nheads) * 2
            found["sinks"] = sinks.float() if self.sinks == "fp32" else sinks
        return found

    def problem(self, source: Source) -> tuple[tuple[Tensor, Tensor, Tensor, Tensor], dict[str, Any]]:
        """Draws (q, k, v, dout), and every keyword argument."""
        return self.inputs(source), {**self.options, **self.tensors(source)}
