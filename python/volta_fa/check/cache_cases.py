"""Problems of attention with a KV cache: `CacheCase` describes one, `CacheInputs` are its tensors and the exact results that they have.
`python -m volta_fa check` (`cached`) and the tests share them. Parts of a cache that no token occupies hold NaN, or codes and scales that
stand for NaN, so that a kernel that reads them gives NaN."""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..inspection import cache_formats  # rows with name and scale of each format: "token" (one for each token and head), "head" or "none"
from ..kv_cache.formats import cache_dtype, dequantize_kv, parts_of, quantize_kv  # parts_of: the formats of keys and values
from . import tolerance  # eager attention, exact results, and the error that a result may have
from .cases import OF_REFERENCE, ScoreOptions, Source  # options of `tolerance.attend`; windows, softcap, ALiBi, sinks; draws tensors
from .problems import Part, forward_parts  # parts of out and softmax_lse with exact values and allowed errors

#: Block-table entries after a sequence's last page. They name no page, and kernels must not use them.
NO_PAGE = (-1, 2**31 - 1, -(2**31))
#: Rows of the tables rotary_cos and rotary_sin: more than the longest sequence of a problem with a rotation.
ROTARY_POSITIONS = 700
#: Options that appending to a quantized cache writes.
WRITTEN = ("k_scale", "v_scale", "k_zero_point", "v_zero_point")
#: Columns by which the rows of a cache with layout "wide" are longer: at least 16 bytes of any type.
WIDER = 16


@dataclass(frozen=True, repr=False)
class CacheCase(ScoreOptions):
    """One problem of `volta_fa::fwd_kvcache`, or with `latents` of `volta_fa::fwd_mla`: its sequences, and the layout of their cache. str()
    gives a short name from the fields that are not their defaults, which reports and test names show."""

    lengths: tuple[tuple[int, int, int], ...]  # of each sequence: queries; cached tokens, with padding; appended tokens
    headdim: int = 64
    headdim_v: int | None = None
    nheads: int = 2
    nheads_k: int = 1
    page: int = 16  # tokens of a page; 0: a dense cache
    packed: bool = False  # whether q, and k and v to append, are packed (cu_seqlens_q)
    own_new: bool = False  # packed k and v have cu_seqlens_k_new; else q's lengths
    layout: str = "nhd"  # tokens before heads; hnd: heads first; kv: a page has K, then V; wide: a slice of a larger tensor
    seqlen_cache: int | None = None  # tokens of a dense cache's entry; None: room for all, and 5 more unless all_cached
    is_causal: bool = True
    rotary: str = ""  # pairs of dimensions: "half" or "interleaved"; "": no rotation
    rotary_dim: int | None = None  # None: headdim
    rotary_dtype: str = "own"  # q's dtype; else fp32
    leftpad: tuple[int, ...] = ()  # padding tokens at the beginning of each entry
    batch_idx: bool = False  # whether cache_batch_idx maps sequences to entries
    num_splits: int = 0  # the operator's: maximum number of parts of a sequence's keys; 0: the scheduler decides
    all_cached: bool = False  # no cache_seqlens
    spread: float = 1.0  # standard deviation of q, k and v
    kv_dtype: str = ""  # of a quantized cache: a kv_dtype of kv_cache/formats.py, such as int8; "": the cache is not quantized
    descale: str = ""  # shape of fp8's scales: "one": (1); "h": (nheads_k); "bh": (batch, nheads_k); "": none
    tree: bool = False  # the queries of each sequence are a tree of draft tokens
    latents: bool = False  # the cache is of one head, whose first headdim_v columns are the values
    dtype: torch.dtype | None = None  # None: the source that draws the tensors decides

    def __str__(self) -> str:
        of_scores = {f.name for f in dataclasses.fields(ScoreOptions)}
        fields = sorted(dataclasses.fields(self), key=lambda f: f.name in of_scores)
        given = ((f.name, getattr(self, f.name)) for f in fields if getattr(self, f.name) != f.default)
        parts = []
        for name, value in given:
            match name, value:
                case "lengths", _:
                    parts.append("_".join("x".join(map(str, n)) for n in value[:3]) + (f"_{len(value)}in_all" if len(value) > 3 else ""))
                case "leftpad", _:
                    parts.append("leftpad")
                case _, bool():
                    parts.append(name if value else f"not_{name}")
                case _, torch.dtype():
                    parts.append(str(value).removeprefix("torch."))
                case _, str():
                    parts.append(f"{name}_{value}" if len(value) < 3 else value)
                case _:
                    parts.append(f"{name}{value}")
        return "-".join(parts)

    __repr__ = __str__

    @property
    def batch(self) -> int:
        """Number of sequences."""
        return len(self.lengths)

    def kv_dtype_of(self, which: str) -> str:
        """Returns the kv_dtype of the keys (k) or values (v) of a quantized cache."""
        return parts_of(self.kv_dtype)["kv".index(which)]

    @property
    def appends(self) -> bool:
        """Whether any sequence gets new tokens."""
        return any(new for _, _, new in self.lengths)

    @property
    def columns_v(self) -> int:
        """Columns of the values: headdim_v, or headdim if that is None."""
        return self.headdim if self.headdim_v is None else self.headdim_v

    @property
    def ends(self) -> list[int]:
        """Tokens of each sequence, appended ones included."""
        return [cached + new for _, cached, new in self.lengths]

    @property
    def features(self) -> list[str]:
        """Features that a kernel must have to run the problem, by their names in `info()`."""
        asked = {"varlen": True, "paged_kv": True, "tree": self.tree, **self.score_features}  # `fwd_kvcache` asks for the first two always
        return [name for name, is_asked in asked.items() if is_asked]

    @property
    def trees(self) -> list[Tree]:
        """The tree of draft tokens of each sequence."""
        return [random_tree(n, seed) for seed, (n, _, _) in enumerate(self.lengths)]

    def problem(self, source: Source) -> CacheInputs:
        """Draws the tensors."""
        return CacheInputs.draw(self, source)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, interleaved: bool) -> Tensor:
    """Returns x, (tokens, heads, headdim), in fp64 and with rotary embedding. cos and sin are (positions, rotated pairs)."""
    x, cos, sin = x.double().clone(), cos.double()[positions][:, None], sin.double()[positions][:, None]
    n = cos.shape[-1]
    first, second = (slice(0, 2 * n, 2), slice(1, 2 * n, 2)) if interleaved else (slice(0, n), slice(n, 2 * n))
    x0, x1 = x[..., first].clone(), x[..., second].clone()
    x[..., first], x[..., second] = x0 * cos - x1 * sin, x0 * sin + x1 * cos
    return x


def has_scales(kv_dtype: str) -> bool:
    """Returns whether the format has a scale for each token and head."""
    return any(row["name"] == kv_dtype and row["scale"] == "token" for row in cache_formats())


class _Caches:
    """Empty caches of a case, with their scales and the options that say where tokens lie.

    Attributes:
        entries, rows: pages and tokens of a page, or entries of a dense cache and tokens for which each has room.
        places: for each sequence the entry and the row of each of its tokens.
        caches: by "k" and "v" (latents: "k" alone) a tensor (entries, rows, nheads_k, elements). Elements are columns, of int4 two in one.
        options: by name, the operator's block_table, cache_batch_idx, leftpad_k, scales and zero points.
    """

    def __init__(self, c: CacheCase, source: Source):
        self.case, self.source, self.options = c, source, dict[str, Any]()
        order = torch.Generator().manual_seed(source.seed)
        if c.page:
            self._lay_out_pages(order)
        else:
            self._lay_out_entries(order)
        # 0x7F is NaN in e4m3 and e5m2. Codes of int8 and int4 have no NaN, but their scales are NaN.
        self._poison: float = 0x7F if c.kv_dtype else math.nan
        self._dtype = torch.uint8 if c.kv_dtype else source.dtype
        elements = {"k": c.headdim} if c.latents else {"k": c.headdim, "v": c.columns_v}  # of a row: int4 has two in a byte
        if c.kv_dtype:
            elements = {which: n // 2 if c.kv_dtype_of(which) == "int4" else n for which, n in elements.items()}
        if c.layout == "kv":  # one tensor, whose pages hold K, then V
            sizes = [self.rows * c.nheads_k * n for n in elements.values()]
            parts = self._full(self.entries, sum(sizes)).split(sizes, 1)
            caches = [t.unflatten(1, (self.rows, c.nheads_k, -1)) for t in parts]
        else:
            caches = [self._empty(n) for n in elements.values()]
        self.caches = dict(zip(elements, caches))
        if c.kv_dtype:
            self.caches = {which: t.view(cache_dtype(c.kv_dtype_of(which))) for which, t in self.caches.items()}
            self.options |= self._empty_scales()

    def _lay_out_pages(self, order: torch.Generator) -> None:
        """Gives each sequence pages in random order, and block tables with further entries that name no page. Three pages are unused."""
        c = self.case
        pages = [-(-n // c.page) for n in c.ends]
        max_pages = max(pages) if c.all_cached else max(pages) + 2
        self.entries, self.rows = sum(pages) + 3, c.page
        numbers = torch.randperm(self.entries, generator=order)[: sum(pages)].split(pages)
        table = torch.tensor(NO_PAGE, dtype=torch.int32).repeat(c.batch * max_pages)[: c.batch * max_pages].view(c.batch, max_pages)
        for b, of_sequence in enumerate(numbers):
            table[b, : len(of_sequence)] = of_sequence
        self.options["block_table"] = table.to(self.source.device)
        self.places = [(numbers[b][torch.arange(n) // c.page], torch.arange(n) % c.page) for b, n in enumerate(c.ends)]

    def _lay_out_entries(self, order: torch.Generator) -> None:
        """Gives each sequence an entry of a dense cache, with `batch_idx` in random order and two more entries that are unused."""
        c = self.case
        self.rows = max(c.ends) + (0 if c.all_cached else 5) if c.seqlen_cache is None else c.seqlen_cache
        self.entries = c.batch + 2 if c.batch_idx else c.batch
        entry = torch.randperm(self.entries, generator=order)[: c.batch] if c.batch_idx else torch.arange(c.batch)
        if c.batch_idx:
            self.options["cache_batch_idx"] = entry.int().to(self.source.device)
        if c.leftpad:
            self.options["leftpad_k"] = self.source.ints(c.leftpad)
        self.places = [(entry[b].expand(n), torch.arange(n)) for b, n in enumerate(c.ends)]

    def _full(self, *shape: int) -> Tensor:
        """Returns a tensor of NaN."""
        return torch.full(shape, self._poison, dtype=self._dtype, device=self.source.device)

    def _empty(self, elements: int) -> Tensor:
        """Returns a cache of NaN, (entries, rows, nheads_k, elements), with the strides of the case's layout."""
        c, rows = self.case, self.rows
        if c.layout == "hnd":
            return self._full(self.entries, c.nheads_k, rows, elements).transpose(1, 2)
        if c.layout == "wide":
            return self._full(self.entries, rows + 3, c.nheads_k + 1, elements + WIDER)[:, 1 : rows + 1, :-1, WIDER:]
        return self._full(self.entries, rows, c.nheads_k, elements)

    def _empty_scales(self) -> dict[str, Tensor]:
        """Returns the scales of a quantized cache: NaN for each token and head, or of fp8 caches k_descale and v_descale."""
        c, source = self.case, self.source
        which = "k" if c.latents else "kv"
        if has_scales(c.kv_dtype):
            names = [f"{x}_scale" for x in which] + [f"{x}_zero_point" for x in which if c.kv_dtype_of(x) == "int4"]
            shape = (self.entries, c.nheads_k, self.rows) if c.layout == "hnd" else (self.entries, self.rows, c.nheads_k)
            made = {name: torch.full(shape, math.nan, device=source.device) for name in names}
            return {name: t.transpose(1, 2) if c.layout == "hnd" else t for name, t in made.items()}
        of_scale = {"one": (1,), "h": (c.nheads_k,), "bh": (c.batch, c.nheads_k)}.get(c.descale)
        return {} if of_scale is None else {f"{x}_descale": 2.0 ** -source.randn(*of_scale).float().abs().clamp_max(1) for x in which}

    def put(self, which: str, tokens: tuple[Tensor, Tensor], values: Tensor, b: int) -> None:
        """Stores tokens of sequence b, quantized if the cache is. `which`: "k" or "v". `tokens`: their entries and rows, as in `places`."""
        c, cache, options = self.case, self.caches[which], self.options
        if not c.kv_dtype:
            cache[tokens] = values
            return
        made = quantize_kv(values, c.kv_dtype_of(which), scale=None if has_scales(c.kv_dtype) else _descale(options, which, b))
        cache.view(torch.uint8)[tokens] = made.data.view(torch.uint8)
        if has_scales(c.kv_dtype):
            options[f"{which}_scale"][tokens] = made.scale
        if made.zero_point is not None:
            options[f"{which}_zero_point"][tokens] = made.zero_point


def _copies(*tensors: Tensor) -> list[Tensor]:
    """Returns copies with the same strides, of tensors and of the memory around them."""
    memory = {t.untyped_storage().data_ptr(): t.untyped_storage().clone() for t in tensors}
    return [
        torch.empty(0, dtype=t.dtype, device=t.device).set_(memory[t.untyped_storage().data_ptr()], t.storage_offset(), t.shape, t.stride())
        for t in tensors
    ]


def _descale(options: dict[str, Any], which: str, b: int) -> Tensor | None:
    """Returns sequence b's k_descale or v_descale (`which`: "k" or "v"), (1) or (nheads_k); None: 1."""
    scale: Tensor | None = options.get(f"{which}_descale")
    return scale[b] if scale is not None and scale.dim() == 2 else scale


@dataclass
class CacheInputs:
    """A problem's tensors on a device."""

    case: CacheCase
    q: Tensor
    k_cache: Tensor  # (entries or pages, rows, nheads_k, elements)
    v_cache: Tensor  # of latents: a view of k_cache
    new: Sequence[Tensor]  # k and v to append, or none
    options: dict[str, Any]  # keyword arguments of the operator
    places: list[tuple[Tensor, Tensor]]  # of each sequence's tokens, appended ones included, on the CPU: entry and row in the cache
    cu_q: list[int] = field(default_factory=list)  # cumulative numbers of queries: where each sequence begins, and the total
    cu_new: list[int] = field(default_factory=list)  # of the appended tokens
    scratch_bytes: int = 0  # of the kernels, for partial results; `correctness.poison` fills memory of that size with NaN

    @classmethod
    def draw(cls, c: CacheCase, source: Source) -> CacheInputs:
        """Draws queries, cached tokens, tokens to append and options."""
        made = _Caches(c, source)
        columns = {"k": c.headdim} if c.latents else {"k": c.headdim, "v": c.columns_v}
        for b, ((_, cached, _), (entry, row)) in enumerate(zip(c.lengths, made.places)):
            stored = slice(c.leftpad[b] if c.leftpad else 0, cached)
            for which, headdim in columns.items():
                values = source.randn(stored.stop - stored.start, c.nheads_k, headdim, spread=c.spread)
                made.put(which, (entry[stored], row[stored]), values, b)
        cu_q = [0, *itertools.accumulate(q for q, _, _ in c.lengths)]
        cu_new = [0, *itertools.accumulate(new for _, _, new in c.lengths)]

        def rows_of(cu: list[int], heads: int, headdim: int) -> Tensor:
            t = source.randn(cu[-1], heads, headdim, spread=c.spread)
            return t if c.packed else t.unflatten(0, (c.batch, -1)) if cu[-1] else t.view(c.batch, 0, heads, headdim)

        q = rows_of(cu_q, c.nheads, c.headdim)
        new = [rows_of(cu_new, c.nheads_k, headdim) for headdim in columns.values()] if c.appends else []
        options = made.options
        if c.packed:
            options |= {"cu_seqlens_q": source.ints(cu_q), "max_seqlen_q": max(n for n, _, _ in c.lengths)}
            if new and c.own_new:
                options["cu_seqlens_k_new"] = source.ints(cu_new)
        if not c.all_cached:
            options["cache_seqlens"] = source.ints(cached for _, cached, _ in c.lengths)
        options |= _score_tensors(c, source)
        options |= {"is_causal": c.is_causal, "softmax_scale": c.softmax_scale, "num_splits": c.num_splits}
        if not c.latents:
            options |= c.score_numbers
        k_cache = made.caches["k"]
        v_cache = k_cache[..., : c.columns_v] if c.latents else made.caches["v"]
        return cls(c, q, k_cache, v_cache, new, options, made.places, cu_q, cu_new)

    @property
    def given(self) -> list[Tensor]:
        """All tensors that the operator gets."""
        return [self.q, self.k_cache, self.v_cache, *self.new, *(t for t in self.options.values() if isinstance(t, Tensor))]

    def mapped(self, change: Callable[[Tensor], Tensor]) -> CacheInputs:
        """Returns the same problem with `change` applied to each tensor."""
        options = {name: change(value) if isinstance(value, Tensor) else value for name, value in self.options.items()}
        q, k_cache, v_cache, *new = (change(t) for t in (self.q, self.k_cache, self.v_cache, *self.new))
        return dataclasses.replace(self, q=q, k_cache=k_cache, v_cache=v_cache, new=new, options=options)

    def copy_of_cache(self) -> tuple[Tensor, Tensor]:
        """Returns copies of the caches with the same strides, in one memory if K and V share theirs."""
        k_cache, v_cache = _copies(self.k_cache, self.v_cache)
        return k_cache, v_cache

    def fresh(self) -> dict[str, Any]:
        """Returns the options for a call that appends: those that it writes (WRITTEN) are copies with the same strides."""
        return self.options | {name: _copies(self.options[name])[0] for name in WRITTEN if name in self.options}

    def sequence(self, t: Tensor, cu: list[int], b: int) -> Tensor:
        """Returns the rows of sequence b of q, out, k or v. cu: the tensor's cumulative lengths, `cu_q` or `cu_new`."""
        return t[cu[b] : cu[b + 1]] if self.case.packed else t[b]

    def lse(self, t: Tensor, b: int) -> Tensor:
        """Returns softmax_lse of sequence b, (1, nheads, seqlen_q)."""
        return (t[:, self.cu_q[b] : self.cu_q[b + 1]] if self.case.packed else t[b])[None]

    def queries(self, b: int) -> Tensor:
        """Returns q of sequence b in q's dtype, with the case's rotation."""
        q, c = self.sequence(self.q, self.cu_q, b), self.case
        if not c.rotary:
            return q
        # without a mask that orders the queries, all have the first one's position
        ordered = c.is_causal or c.window_left >= 0 or c.window_right >= 0
        return self._rotate(q, c.lengths[b][1] + torch.arange(len(q)) * int(ordered)).to(q.dtype)

    def appended(self, b: int) -> tuple[Tensor, Tensor]:
        """Returns the k and v that sequence b appends in fp64, k with the case's rotation."""
        k, v = (self.sequence(t, self.cu_new, b).double() for t in self.new)
        if self.case.rotary:
            k = self._rotate(k, self.case.lengths[b][1] + torch.arange(len(k)))
        return k, v

    def _rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        tables = self.options["rotary_cos"], self.options["rotary_sin"]
        return rotate(x, *tables, positions.to(x.device), self.case.rotary == "interleaved")

    def score_options(self, b: int) -> dict[str, Any]:
        """Returns the options of `tolerance.attend` for sequence b as a dense problem: a tree mask becomes a bool attn_bias."""
        found = {name: self.options[name] for name in OF_REFERENCE if name in self.options}
        slopes = self.options.get("alibi_slopes")
        if slopes is not None:
            found["alibi_slopes"] = slopes[b : b + 1] if slopes.dim() == 2 else slopes
        if self.case.tree:
            seqlen_k = self.case.ends[b] - (self.case.leftpad[b] if self.case.leftpad else 0)
            seen = visible_to_tree(self.case.trees[b], seqlen_k, self.case.window_left)
            found |= {"is_causal": False, "window_left": -1, "window_right": -1, "attn_bias": seen[None, None].to(self.q.device)}
        return found

    def tokens(self, b: int, first: int = 0, end: int | None = None) -> tuple[Tensor, Tensor]:
        """Returns entries and rows of sequence b's tokens first to end - 1 on the cache's device: an index into its caches."""
        entry, row = self.places[b]
        return entry[first:end].to(self.k_cache.device), row[first:end].to(self.k_cache.device)

    def numbers(self, which: str, cache: Tensor, tokens: tuple[Tensor, Tensor], b: int) -> Tensor:
        """Returns the values of `cache` at these tokens of sequence b. A quantized cache is dequantized to fp64.
        `which`: "k" or "v": whose scales apply."""
        c, options = self.case, self.options
        if not c.kv_dtype:
            return cache[tokens]
        which = "k" if c.latents else which  # the values are columns of the latents, which have one scale
        data = cache.view(torch.uint8)[tokens].view(cache.dtype)
        if not has_scales(c.kv_dtype):
            return dequantize_kv(data, c.kv_dtype_of(which), _descale(options, which, b), dtype=torch.float64)
        found = (options.get(f"{which}_{name}") for name in ("scale", "zero_point"))
        return dequantize_kv(data, c.kv_dtype_of(which), *(t if t is None else t[tokens] for t in found), dtype=torch.float64)

    def parts(self, b: int, k: Tensor, v: Tensor, is_dequantized: bool = False, **changed: Any) -> list[Part]:
        """Returns sequence b's parts of out and softmax_lse: what they are exactly, and the errors that they may have.

        Args:
            k, v: values of the cache at the sequence's tokens, (tokens, nheads_k, headdim).
            is_dequantized: kernels get the cache rounded to q's dtype, as eager attention does.
            changed: score options instead of the case's.
        """
        options = self.score_options(b) | changed
        q, k, v = self.queries(b)[None], k[None], v[None]
        rounded = q, k.to(q.dtype), v.to(q.dtype)
        ref, more = tolerance.exact(q, k, v, **options), 0.0
        if is_dequantized:  # softmax_lse may differ by what this rounding does to it
            more = tolerance.max_error(tolerance.exact(*rounded, **options).softmax_lse, ref.softmax_lse)
        return forward_parts(ref, *rounded, lambda t: self.sequence(t, self.cu_q, b)[None], lambda t: self.lse(t, b), more, **options)


def _score_tensors(c: CacheCase, source: Source) -> dict[str, Any]:
    """Draws the operator's options that are tensors and concern scores: rotary tables, slopes, tree masks and sinks."""
    options: dict[str, Any] = {}
    if c.rotary:
        rotary_dim = c.headdim if c.rotary_dim is None else c.rotary_dim
        angles = torch.arange(ROTARY_POSITIONS)[:, None] / 100.0 ** (torch.arange(rotary_dim // 2) / (rotary_dim // 2))
        dtype = source.dtype if c.rotary_dtype == "own" else torch.float32
        options |= {"rotary_cos": angles.cos().to(source.device, dtype), "rotary_sin": angles.sin().to(source.device, dtype)}
        options["rotary_interleaved"] = c.rotary == "interleaved"
    if c.alibi:
        shape = (c.nheads,) if c.alibi == "h" else (c.batch, c.nheads)
        options["alibi_slopes"] = source.randn(*shape).float().abs() * 0.3
    if c.tree:
        words = [tree_words(tree) for tree in c.trees]
        flat = [word for of_sequence in words for word in of_sequence]
        options["tree_mask"] = torch.tensor(flat if c.packed else words, dtype=torch.int64, device=source.device)
    if c.sinks:
        options["sinks"] = source.randn(c.nheads).to(source.dtype if c.sinks == "own" else torch.float32)
    return options


# ---- trees of draft tokens (speculative decoding): the `tree_mask` of `volta_fa::fwd_kvcache`, and the keys that it shows --------

#: Draft tokens, as the list of their parents. A parent comes before its children; -1: the token follows the cached ones.
Tree = list[int]
#: Bit of an int64's sign: Python's numbers have none, so it is subtracted.
_SIGN = 63


def random_tree(n: int, seed: int) -> Tree:
    """Returns a tree of n tokens with branches and chains."""
    source = random.Random(seed)
    return [source.randrange(-1, i) if source.random() < 0.5 else i - 1 for i in range(n)]


def tree_paths(tree: Tree) -> list[list[int]]:
    """Returns each token's path from the root: its ancestors, the oldest first, and the token itself."""
    found: list[list[int]] = []
    for i, parent in enumerate(tree):
        found.append([*(found[parent] if parent >= 0 else []), i])
    return found


def tree_words(tree: Tree) -> list[int]:
    """Returns each token's word of tree_mask: bit j is set if the token sees draft token j, that is if j is on its path."""
    return [sum(-(1 << _SIGN) if j == _SIGN else 1 << j for j in path) for path in tree_paths(tree)]


def visible_to_tree(tree: Tree, seqlen_k: int, window_left: int) -> Tensor:
    """Returns which keys each draft token sees, bool (draft tokens, seqlen_k): its path and the cached keys, inside the window. The draft
    tokens are the last keys. A window counts positions; a draft token's follows from its depth."""
    first = seqlen_k - len(tree)
    paths = tree_paths(tree)
    found = torch.zeros(len(tree), seqlen_k, dtype=torch.bool)
    for i, path in enumerate(paths):
        for key in range(seqlen_k):
            position = first + len(paths[key - first]) - 1 if key >= first else key
            is_near = window_left < 0 or first + len(path) - 1 - position <= window_left
            found[i, key] = is_near and (key < first or key - first in path)
    return found
