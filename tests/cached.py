"""Problems of attention with a KV cache as values: what to draw, where in a cache to put it, and what the result must be."""

from __future__ import annotations

import dataclasses
import itertools
import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

import reference
import volta_fa

#: What a table holds where no page is: padding of any kind.
NO_PAGE = (-1, 2**31 - 1, -(2**31))
ROTARY_POSITIONS = 700
#: Options that appending to a quantized cache writes into.
WRITTEN = ("k_scale", "v_scale", "k_zero_point", "v_zero_point")
#: Columns by which the rows of a wide cache are longer: 16 bytes of any type.
WIDER = 16


@dataclass(frozen=True, repr=False)
class Cached:
    """Some sequences, and how their cache is laid out."""

    lengths: tuple[tuple[int, int, int], ...]  # (queries, cached tokens, appended tokens) of each sequence
    headdim: int = 64
    headdim_v: int | None = None
    nheads: int = 2
    nheads_k: int = 1
    page: int = 16  # 0: dense
    packed: bool = False  # q, and k and v to append
    own_new: bool = False  # packed k and v have cu_seqlens_k_new
    layout: str = "nhd"  # hnd; kv: K and V interleaved in one tensor; wide: strides larger than a page
    seqlen_cache: int | None = None  # dense; room for all unless given
    is_causal: bool = True
    window_left: int = -1
    window_right: int = -1
    softmax_scale: float | None = None
    softcap: float = 0.0
    alibi: str = ""  # "h": (nheads), "bh": (batch, nheads)
    sinks: str = ""  # type
    rotary: str = ""  # half, interleaved
    rotary_dim: int | None = None
    rotary_dtype: str = "own"
    leftpad: tuple[int, ...] = ()
    batch_idx: bool = False
    num_splits: int = 0
    all_cached: bool = False  # no cache_seqlens
    spread: float = 1.0
    kv_dtype: str = ""  # of a quantized cache: volta_fa.quantize_kv
    descale: str = ""  # fp8's scales: one; h: (nheads_k); bh: (batch, nheads_k)

    def __str__(self):
        given = ((f.name, getattr(self, f.name)) for f in dataclasses.fields(self) if getattr(self, f.name) != f.default)
        parts = []
        for name, value in given:
            match name, value:
                case "lengths", _:
                    parts.append("_".join("x".join(map(str, n)) for n in value[:3]) + (f"_{len(value)}in_all" if len(value) > 3 else ""))
                case "leftpad", _:
                    parts.append("leftpad")
                case _, bool():
                    parts.append(name if value else f"not_{name}")
                case _, str():
                    parts.append(f"{name}_{value}" if len(value) < 3 else value)
                case _:
                    parts.append(f"{name}{value}")
        return "-".join(parts)

    __repr__ = __str__

    @property
    def batch(self) -> int:
        return len(self.lengths)

    @property
    def appends(self) -> bool:
        return any(new for _, _, new in self.lengths)

    def problem(self, backend) -> Problem:
        return Problem.draw(self, backend)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, interleaved: bool) -> Tensor:
    """x (tokens, heads, headdim) in fp64, each pair of dimensions turned by its angle."""
    x, cos, sin = x.double().clone(), cos.double()[positions][:, None], sin.double()[positions][:, None]
    n = cos.shape[-1]
    first, second = (slice(0, 2 * n, 2), slice(1, 2 * n, 2)) if interleaved else (slice(0, n), slice(n, 2 * n))
    x0, x1 = x[..., first].clone(), x[..., second].clone()
    x[..., first], x[..., second] = x0 * cos - x1 * sin, x0 * sin + x1 * cos
    return x


def has_scales(kv_dtype: str) -> bool:
    """Of each token and head."""
    return kv_dtype.startswith("int")


def quantized_dtype(kv_dtype: str) -> torch.dtype:
    return volta_fa.quantize_kv(torch.zeros(1, 2), kv_dtype).data.dtype


def scales_of(c: Cached, backend, entries: int, rows: int) -> dict:
    """The scales of a quantized cache, of which there are none yet."""
    if has_scales(c.kv_dtype):
        names = ["k_scale", "v_scale"] + (["k_zero_point", "v_zero_point"] if c.kv_dtype == "int4" else [])
        shape = (entries, c.nheads_k, rows) if c.layout == "hnd" else (entries, rows, c.nheads_k)
        made = {name: torch.full(shape, math.nan, device=backend.device) for name in names}
        return {name: t.transpose(1, 2) if c.layout == "hnd" else t for name, t in made.items()}
    shape = {"one": (1,), "h": (c.nheads_k,), "bh": (c.batch, c.nheads_k)}.get(c.descale)
    if shape is None:
        return {}
    return {f"{which}_descale": 2.0 ** -backend.randn(*shape).float().abs().clamp_max(1) for which in "kv"}


def descale_of(options: dict, which: str, b: int) -> Tensor | None:
    scale = options.get(f"{which}_descale")
    return scale[b] if scale is not None and scale.dim() == 2 else scale


def put(c: Cached, options: dict, which: str, cache: Tensor, tokens: tuple[Tensor, Tensor], values: Tensor, b: int) -> None:
    """Tokens of sequence b into a cache, quantized if it is."""
    if not c.kv_dtype:
        cache[tokens] = values
        return
    each = has_scales(c.kv_dtype)
    made = volta_fa.quantize_kv(values, c.kv_dtype, scale=None if each else descale_of(options, which, b))
    cache.view(torch.uint8)[tokens] = made.data.view(torch.uint8)
    if each:
        options[f"{which}_scale"][tokens] = made.scale
    if made.zero_point is not None:
        options[f"{which}_zero_point"][tokens] = made.zero_point


@dataclass
class Problem:
    case: Cached
    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    new: tuple[Tensor, ...]  # k, v where something is appended
    options: dict
    places: list[tuple[Tensor, Tensor]]  # of each sequence's tokens, appended ones included: entry and row
    cu_q: list[int] = field(default_factory=list)
    cu_new: list[int] = field(default_factory=list)

    @staticmethod
    def draw(c: Cached, backend) -> Problem:
        headdim_v = c.headdim if c.headdim_v is None else c.headdim_v
        device = backend.device
        order = torch.Generator().manual_seed(backend.seed)
        ends = [cached + new for _, cached, new in c.lengths]
        cu_q = [0, *itertools.accumulate(q for q, _, _ in c.lengths)]
        cu_new = [0, *itertools.accumulate(new for _, _, new in c.lengths)]
        options: dict = {}
        if c.page:
            pages = [-(-n // c.page) for n in ends]
            max_pages = max(pages) if c.all_cached else max(pages) + 2
            entries, rows = sum(pages) + 3, c.page
            numbers = torch.randperm(entries, generator=order)[: sum(pages)].split(pages)
            table = torch.tensor(NO_PAGE, dtype=torch.int32).repeat(c.batch * max_pages)[: c.batch * max_pages].view(c.batch, max_pages)
            for b, of_sequence in enumerate(numbers):
                table[b, : len(of_sequence)] = of_sequence
            options["block_table"] = table.to(device)
            places = [(numbers[b][torch.arange(n) // c.page], torch.arange(n) % c.page) for b, n in enumerate(ends)]
        else:
            rows = max(ends) + (0 if c.all_cached else 5) if c.seqlen_cache is None else c.seqlen_cache
            entries = c.batch + 2 if c.batch_idx else c.batch
            entry = torch.randperm(entries, generator=order)[: c.batch] if c.batch_idx else torch.arange(c.batch)
            if c.batch_idx:
                options["cache_batch_idx"] = entry.int().to(device)
            places = [(entry[b].expand(n), torch.arange(n)) for b, n in enumerate(ends)]
            if c.leftpad:
                options["leftpad_k"] = backend.ints(c.leftpad)

        poison, caches_dtype = math.nan, backend.dtype
        packed = 2 if c.kv_dtype == "int4" else 1
        if c.kv_dtype:
            # e4m3's NaN; of e5m2 one too. An integer's bytes mean nothing without scales, and these are NaN
            poison, caches_dtype = 0x7F, torch.uint8

        def cache(headdim: int) -> Tensor:
            nan, headdim = {"dtype": caches_dtype, "device": device}, headdim // packed
            if c.layout == "hnd":
                return torch.full((entries, c.nheads_k, rows, headdim), poison, **nan).transpose(1, 2)
            if c.layout == "wide":
                return torch.full((entries, rows + 3, c.nheads_k + 1, headdim + WIDER), poison, **nan)[:, 1 : rows + 1, :-1, WIDER:]
            return torch.full((entries, rows, c.nheads_k, headdim), poison, **nan)

        if c.layout == "kv":
            both = torch.full((entries, 2, rows, c.nheads_k, c.headdim // packed), poison, dtype=caches_dtype, device=device)
            k_cache, v_cache = both.unbind(1)
        else:
            k_cache, v_cache = cache(c.headdim), cache(headdim_v)
        first = c.leftpad or (0,) * c.batch
        if c.kv_dtype:
            k_cache, v_cache = (t.view(quantized_dtype(c.kv_dtype)) for t in (k_cache, v_cache))
            options |= scales_of(c, backend, entries, rows)
        for b, ((_, cached, _), pad, (entry, row)) in enumerate(zip(c.lengths, first, places)):
            there = slice(pad, cached)
            for which, t, headdim in (("k", k_cache, c.headdim), ("v", v_cache, headdim_v)):
                values = backend.randn(cached - pad, c.nheads_k, headdim, spread=c.spread)
                put(c, options, which, t, (entry[there], row[there]), values, b)

        def rows_of(cu: list[int], heads: int, headdim: int) -> Tensor:
            t = backend.randn(cu[-1], heads, headdim, spread=c.spread)
            return t if c.packed else t.unflatten(0, (c.batch, -1)) if cu[-1] else t.view(c.batch, 0, heads, headdim)

        q = rows_of(cu_q, c.nheads, c.headdim)
        new = (rows_of(cu_new, c.nheads_k, c.headdim), rows_of(cu_new, c.nheads_k, headdim_v)) if c.appends else ()
        if c.packed:
            options |= {"cu_seqlens_q": backend.ints(cu_q), "max_seqlen_q": max(n for n, _, _ in c.lengths)}
            if new and c.own_new:
                options["cu_seqlens_k_new"] = backend.ints(cu_new)
        if not c.all_cached:
            options["cache_seqlens"] = backend.ints(cached for _, cached, _ in c.lengths)
        if c.rotary:
            rotary_dim = c.headdim if c.rotary_dim is None else c.rotary_dim
            angles = torch.arange(ROTARY_POSITIONS)[:, None] / 100.0 ** (torch.arange(rotary_dim // 2) / (rotary_dim // 2))
            dtype = backend.dtype if c.rotary_dtype == "own" else torch.float32
            options |= {"rotary_cos": angles.cos().to(device, dtype), "rotary_sin": angles.sin().to(device, dtype)}
            options["rotary_interleaved"] = c.rotary == "interleaved"
        if c.alibi:
            shape = (c.nheads,) if c.alibi == "h" else (c.batch, c.nheads)
            options["alibi_slopes"] = backend.randn(*shape).float().abs() * 0.3
        if c.sinks:
            options["sinks"] = backend.randn(c.nheads).to(backend.dtype if c.sinks == "own" else torch.float32)
        options |= {"is_causal": c.is_causal, "window_left": c.window_left, "window_right": c.window_right}
        options |= {"softmax_scale": c.softmax_scale, "softcap": c.softcap, "num_splits": c.num_splits}
        return Problem(c, q, k_cache, v_cache, new, options, places, cu_q, cu_new)

    def copy_of_cache(self) -> tuple[Tensor, Tensor]:
        """With the same strides."""
        if self.case.layout == "kv":
            both = torch.stack((self.k_cache, self.v_cache), 1)
            return both[:, 0], both[:, 1]
        if self.case.layout == "wide":
            copies = (
                torch.zeros((t.shape[0], t.shape[1] + 3, t.shape[2] + 1, t.shape[3] + WIDER), dtype=t.dtype, device=t.device)
                for t in (self.k_cache, self.v_cache)
            )
            k_cache, v_cache = (t[:, 1:-2, :-1, WIDER:] for t in copies)
            return k_cache.copy_(self.k_cache), v_cache.copy_(self.v_cache)
        return self.k_cache.clone(), self.v_cache.clone()

    def sequence(self, t: Tensor, cu: list[int], b: int) -> Tensor:
        """Rows of q, out, k or v of one sequence."""
        return t[cu[b] : cu[b + 1]] if self.case.packed else t[b]

    def lse(self, t: Tensor, b: int) -> Tensor:
        """(1, nheads, seqlen_q)."""
        return (t[:, self.cu_q[b] : self.cu_q[b + 1]] if self.case.packed else t[b])[None]

    def queries(self, b: int) -> Tensor:
        """One sequence's q, rotated where that is asked for, in q's dtype."""
        q, c = self.sequence(self.q, self.cu_q, b), self.case
        if not c.rotary:
            return q
        ordered = c.is_causal or c.window_left >= 0 or c.window_right >= 0
        positions = c.lengths[b][1] + torch.arange(len(q)) * int(ordered)
        return rotate(q, self.options["rotary_cos"], self.options["rotary_sin"], positions.to(q.device), c.rotary == "interleaved").to(
            q.dtype
        )

    def appended(self, b: int) -> tuple[Tensor, Tensor]:
        """One sequence's k and v as the cache is to have them, in fp64."""
        k, v = (self.sequence(t, self.cu_new, b).double() for t in self.new)
        if self.case.rotary:
            k = self._rotate(k, self.case.lengths[b][1] + torch.arange(len(k)))
        return k, v

    def _rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        tables = self.options["rotary_cos"], self.options["rotary_sin"]
        return rotate(x, *tables, positions.to(x.device), self.case.rotary == "interleaved")

    def score_options(self, b: int) -> dict:
        names = ("is_causal", "window_left", "window_right", "softmax_scale", "softcap", "sinks")
        found = {name: self.options[name] for name in names if name in self.options}
        slopes = self.options.get("alibi_slopes")
        if slopes is not None:
            found["alibi_slopes"] = slopes[b : b + 1] if slopes.dim() == 2 else slopes
        return found

    def expected(self, b: int, k_cache: Tensor, v_cache: Tensor):
        """The inputs of one sequence as a dense problem, with the tokens that this cache has now; and fp64's result."""
        entry, row = self.places[b]
        pad = (self.case.leftpad or (0,) * self.case.batch)[b]
        tokens = (entry[pad:].to(k_cache.device), row[pad:].to(k_cache.device))
        k, v = (self.numbers(which, t, tokens, b) for which, t in (("k", k_cache), ("v", v_cache)))
        q = self.queries(b)[None]
        # the exact result is that of what the bytes stand for; an eager one has them in q's type
        ref = reference.forward(q, k[None], v[None], **self.score_options(b))
        return (q, k[None].to(q.dtype), v[None].to(q.dtype)), ref

    def numbers(self, which: str, cache: Tensor, tokens: tuple[Tensor, Tensor], b: int) -> Tensor:
        """What a cache has of one sequence's tokens; of a quantized one in fp64."""
        c, options = self.case, self.options
        if not c.kv_dtype:
            return cache[tokens]
        data = cache.view(torch.uint8)[tokens].view(cache.dtype)
        if not has_scales(c.kv_dtype):
            return volta_fa.dequantize_kv(data, c.kv_dtype, descale_of(options, which, b), dtype=torch.float64)
        found = (options.get(f"{which}_{name}") for name in ("scale", "zero_point"))
        return volta_fa.dequantize_kv(data, c.kv_dtype, *(t if t is None else t[tokens] for t in found), dtype=torch.float64)

    def fresh(self) -> dict:
        """The options, with copies of what appending writes, of the same strides."""
        written = [name for name in self.options if name in WRITTEN]
        if self.case.layout == "hnd":
            copies = {name: self.options[name].transpose(1, 2).clone().transpose(1, 2) for name in written}
        else:
            copies = {name: self.options[name].clone() for name in written}
        return self.options | copies
