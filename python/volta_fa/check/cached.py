"""Problems of attention with a KV cache for `right`: what is in the cache, what is appended, and what the results are."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..kv_cache.formats import dequantize_kv, quantize_kv
from . import rule
from .kernels import Target
from .problems import Expected, agree, first_that_can, keyless

#: Kernels of these passes get the problems here.
PASSES = ("Decode", "DecodeMla", "Prefill", "Append", "Dequantize")
_NHEADS_K = 2
#: src/plan/decode.rs
_DECODE_ROWS = 64
_ROTARY_ROWS = 700
#: Of 16 bytes, by a cache's format: kernels read rows of so many where they lie, and others from copies in q's type.
_COLUMNS = {"float": 8, "bfloat16": 8, "int8": 16, "int4": 32, "fp8_e5m2": 16, "fp8_e4m3": 16}


@dataclass(frozen=True)
class Problem:
    """Some sequences, causal, and their cache, as a value: with a seed, its tensors follow from it."""

    lengths: tuple[tuple[int, int, int], ...]  # queries, tokens in the cache, tokens that are appended, of each sequence
    headdim: int
    headdim_v: int
    group: int  # query heads of a key head
    page: int = 16  # 0: no pages
    packed: bool = False
    dtype: torch.dtype = torch.float16
    window_left: int = -1
    softcap: float = 0.0
    alibi: bool = False
    sinks: bool = False
    rotary: str = ""  # half or interleaved
    cache: str = "float"  # its format, as a kernel names it
    latents: bool = False  # the cache is fwd_mla's: of one head, whose first columns are the values

    def __str__(self) -> str:
        lengths = ", ".join("/".join(map(str, n)) for n in self.lengths)
        words = [f"cache of {lengths} g{self.group} d{self.headdim}/{self.headdim_v} {str(self.dtype).removeprefix('torch.')}"]
        for field in dataclasses.fields(self)[4:]:
            value = getattr(self, field.name)
            if value != field.default and field.name != "dtype":
                words.append(field.name if value is True else f"{field.name}={value}")
        return " ".join(words)

    @property
    def nheads(self) -> int:
        """Of q."""
        return self.group * self.nheads_k

    @property
    def is_quantized(self) -> bool:
        """Whether what the cache has stands for other numbers."""
        return self.cache not in ("float", "bfloat16")

    @property
    def nheads_k(self) -> int:
        """Of the cache."""
        return 1 if self.latents else _NHEADS_K

    @property
    def is_converted(self) -> bool:
        """Whether kernels get a quantized cache as numbers of the dtype: where a sequence has more rows than decode takes."""
        return self.is_quantized and self.group * max(n for n, _, _ in self.lengths) > _DECODE_ROWS

    @property
    def needs(self) -> list[str]:
        """What kernels must be prepared for, as `info()` names it."""
        asked = {"lengths": True, "pages": True, "sinks": self.sinks, "softcap": self.softcap > 0, "alibi": self.alibi}
        return [name for name, is_asked in asked.items() if is_asked]


def problems(variant: dict[str, Any]) -> list[Problem]:
    """Odd problems that ask for all that a kernel is prepared for, the simplest first."""
    pass_ = variant["pass"]
    if variant["family"] == "cpu":
        kind = variant["dtype"]
        return [
            Problem(((3, 40, 0), (3, 17, 0), (3, 0, 0)), 40, 24, 3, dtype=kind),
            Problem(
                ((2, 9, 2), (0, 3, 0), (5, 31, 4)), 40, 40, 2, page=0, packed=True, dtype=kind, rotary="half", softcap=20.0, sinks=True
            ),
        ]
    if pass_ == "Append" and variant["cache"] != "float":  # (a rotation is rounded, and a code may be the next one then)
        found = [
            Problem(((1, 40, 1), (1, 0, 1), (1, 15, 1), (1, 300, 1)), 64, 64, 4),
            Problem(((3, 40, 5), (0, 9, 0), (1, 15, 0), (2, 0, 9)), 96, 32, 2, page=0, packed=True),
            Problem(((2, 37, 2), (2, 0, 2)), 224, 128, 2, page=48),
        ]
        return [dataclasses.replace(p, cache=variant["cache"]) for p in found]
    if pass_ == "Append":  # it takes any headdim
        return [
            Problem(((1, 40, 1), (1, 0, 1), (1, 15, 1), (1, 300, 1)), 64, 64, 4, rotary="half"),
            Problem(((3, 40, 5), (0, 9, 0), (1, 15, 0), (2, 0, 9)), 72, 40, 2, page=0, packed=True, rotary="interleaved"),
            Problem(((2, 37, 2), (2, 0, 2)), 36, 20, 2, page=48, dtype=torch.bfloat16, rotary="half"),
        ]
    if pass_ == "Dequantize":  # the same
        return [
            Problem(((45, 205, 0), (45, 31, 0)), 64, 64, 2, cache="int8"),
            Problem(((45, 300, 0), (45, 47, 0)), 128, 64, 2, page=48, dtype=torch.bfloat16, cache="int4"),
            Problem(((70, 77, 0), (0, 20, 0), (50, 3, 0)), 64, 64, 2, page=0, packed=True, window_left=50, cache="fp8_e5m2"),
            Problem(((65, 130, 0), (65, 81, 0)), 72, 40, 1, page=64, window_left=20, cache="fp8_e4m3"),
        ]
    d, dv, rows = variant["headdim"], variant["headdim_v"], variant["block_rows"]
    if pass_ == "DecodeMla":
        # of each tile some rows are nobody's; of the others a sequence has several tiles
        found = [
            Problem(((1, 905, 0), (1, 16, 0), (1, 1, 0), (1, 330, 0)), d, dv, rows - 1, latents=True),
            Problem(((5, 77, 0), (1, 0, 0), (0, 20, 0), (2, 417, 0)), d, dv, 7, page=0, packed=True, latents=True),
            Problem(((2, 81, 0), (2, 200, 0)), d, dv, rows + 5, page=64, latents=True),
        ]
        return [dataclasses.replace(p, cache=variant["cache"]) for p in found]
    if pass_ == "Decode":
        # of each tile some rows are nobody's; of the second problem a sequence has several tiles
        group = min(rows - 1, 7)
        queries = max(rows // 8, 1)
        # fp16's sequences of more rows are prefill's, beside decode, and of other caches the whole call is others'
        more = queries + 2 if variant["cache"] == "float" else min(queries + 2, _DECODE_ROWS // group)
        less = _COLUMNS[variant["cache"]]
        found = [
            Problem(((queries, 905, 0), (queries, 16, 0), (queries, 1, 0), (queries, 330, 0)), d, dv, group),
            Problem(((more, 77, 0), (1, 0, 0), (0, 20, 0), (1, 417, 0)), d - less, dv - less, group, page=0, packed=True, window_left=50),
            Problem(((queries, 81, 0), (queries, 200, 0)), d, dv, group, page=64, softcap=20.0, alibi=True, sinks=True),
        ]
        dtype = torch.bfloat16 if variant["cache"] == "bfloat16" else torch.float16
        found = [dataclasses.replace(p, cache=variant["cache"], dtype=dtype) for p in found]
    else:
        asked: dict[str, Any] = {"softcap": 20.0 if "softcap" in variant["needs"] else 0.0, "alibi": "alibi" in variant["needs"]}
        found = [
            Problem(((45, 205, 0), (45, 31, 0)), d, dv, 2, **asked),
            Problem(((70, 77, 0), (0, 20, 0), (50, 3, 0)), d - 8, dv - 8, 2, page=0, packed=True, window_left=50, **asked),
            Problem(((45, 300, 0), (45, 47, 0)), d, dv, 3, page=64, sinks="sinks" in variant["needs"], **asked),
        ]
    return found


def planned(target: Target, problem: Problem, variant: dict[str, Any]) -> list[dict[str, Any]]:
    """The kernels that serve the problem, this one being preferred, as `_plan` has them; none on the CPU."""
    if not target.has_kernels:
        return []
    p = problem
    if p.latents:
        # `_plan` has nothing of their headdims. Every kernel of the pass takes them, so the one that is preferred runs; its blocks
        # share at most this (src/plan/decode.rs has fewer than 8 levels of a merge)
        places = 2 * target.sms * variant["blocks_per_sm"]
        return [{"name": variant["name"], "partials": places * variant["block_rows"] * (p.headdim_v + 2 * 8), "semaphores": places * 8}]
    queries, news = max(q for q, _, _ in p.lengths), max(new for _, _, new in p.lengths)
    tokens = max(cached + new for _, cached, new in p.lengths)
    shape = (len(p.lengths), max(queries, news), tokens, p.nheads, p.nheads_k, p.headdim, p.headdim_v, True)
    with target.running(variant):
        plan = json.loads(torch.ops.volta_fa._plan(*shape, needs=",".join(p.needs), device=target.number))
    plans = plan["cache"]
    if p.is_quantized and news:  # (to few rows)
        return [plans["append_quantized"][p.cache], plans["quantized"][p.cache]]
    if p.is_quantized:
        return [plans["quantized"][p.cache]] if plans["convert"] is None else [plans["convert"], plan["forward"]]
    if p.cache != "float":  # (likewise, and of few rows)
        return [plans[p.cache]]
    passes = ["append"] if news else []
    # packed, both kernels run, each for the sequences that are its own
    passes += ["decode", "prefill"] if p.packed or plans["prefill"] is None else ["prefill"]
    return [plans[name] for name in passes if plans[name]]


@dataclass
class Inputs:
    """A problem's tensors on a device. What is nobody's in the caches is NaN."""

    problem: Problem
    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    new: list[Tensor]  # k and v, or nothing
    options: dict[str, Any]
    #: of each sequence, on the CPU, where its tokens lie, appended ones too: entries, rows
    places: list[tuple[Tensor, Tensor]]
    scratch_bytes: int = 0  # that the kernels' blocks share

    @classmethod
    def draw(cls, problem: Problem, seed: int, device: torch.device, kernels: Sequence[dict[str, Any]] = ()) -> Inputs:
        """Standard normal, drawn on the CPU, so that a seed gives the same everywhere."""
        p = problem
        generator = torch.Generator().manual_seed(seed)

        def randn(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator)

        batch, ends = len(p.lengths), [cached + new for _, cached, new in p.lengths]
        options: dict[str, Any] = {"is_causal": True, "window_left": p.window_left, "softcap": p.softcap}
        options["cache_seqlens"] = torch.tensor([cached for _, cached, _ in p.lengths], dtype=torch.int32)
        if p.page:
            pages = [-(-n // p.page) for n in ends]
            entries, rows = sum(pages) + 2, p.page
            numbers = torch.randperm(entries, generator=generator)[: sum(pages)].split(pages)
            table = torch.full((batch, max(pages) + 1), -1, dtype=torch.int32)
            for row, own in zip(table, numbers):
                row[: len(own)] = own
            options["block_table"] = table
            places = [(own[torch.arange(n) // p.page], torch.arange(n) % p.page) for own, n in zip(numbers, ends)]
        else:
            entries, rows = batch, max(ends) + 3
            places = [(torch.full((n,), b), torch.arange(n)) for b, n in enumerate(ends)]
        caches: list[Tensor] = []
        for which, headdim in [("k", p.headdim)] if p.latents else [("k", p.headdim), ("v", p.headdim_v)]:
            cache = torch.full((entries, rows, p.nheads_k, headdim), math.nan)
            for (_, cached, _), (entry, row) in zip(p.lengths, places):
                cache[entry[:cached], row[:cached]] = randn(cached, p.nheads_k, headdim)
            if not p.is_quantized:
                caches.append(cache.to(p.dtype).to(device))
                continue
            # NaN becomes codes of NaN or has a scale of NaN
            descale = randn(p.nheads_k).abs() + 0.5 if p.cache.startswith("fp8") else None
            made = quantize_kv(cache, p.cache, scale=descale)
            caches.append(made.data.to(device))
            scales = {"descale": descale, "scale": made.scale if descale is None else None, "zero_point": made.zero_point}
            options |= {f"{which}_{name}": scale for name, scale in scales.items() if scale is not None}
        queries, news = [q for q, _, _ in p.lengths], [new for _, _, new in p.lengths]

        def packed(counts: list[int], heads: int, headdim: int) -> Tensor:
            t = randn(sum(counts), heads, headdim).to(p.dtype).to(device)
            return t if p.packed else t.unflatten(0, (batch, counts[0]))

        q = packed(queries, p.nheads, p.headdim)
        new = [packed(news, p.nheads_k, headdim) for headdim in (p.headdim, p.headdim_v)] if any(news) else []
        if p.packed:
            options["cu_seqlens_q"], options["max_seqlen_q"] = torch.tensor([0, *queries]).cumsum(0).int(), max(queries)
            if new:
                options["cu_seqlens_k_new"] = torch.tensor([0, *news]).cumsum(0).int()
        if p.alibi:
            options["alibi_slopes"] = randn(batch, p.nheads).abs() * 0.3
        if p.sinks:
            options["sinks"] = (randn(p.nheads) * 2).to(p.dtype)
        if p.rotary:
            half = p.headdim // 4 // 8 * 8
            angles = torch.arange(_ROTARY_ROWS)[:, None] / 100.0 ** (torch.arange(half) / half)
            options |= {"rotary_cos": angles.cos().to(p.dtype), "rotary_sin": angles.sin().to(p.dtype)}
            options["rotary_interleaved"] = p.rotary == "interleaved"
        options = {name: value.to(device) if isinstance(value, Tensor) else value for name, value in options.items()}
        scratch = sum(4 * k.get("partials", 0) + 8 * k.get("semaphores", 0) for k in kernels)
        return cls(p, q, caches[0], caches[-1][..., : p.headdim_v], new, options, places, scratch)

    @property
    def given(self) -> list[Tensor]:
        """All tensors."""
        return [self.q, self.k_cache, self.v_cache, *self.new, *(t for t in self.options.values() if isinstance(t, Tensor))]

    @property
    def written(self) -> Tensor:
        """(entries, rows) bool, on the CPU: where tokens are appended."""
        found = torch.zeros(self.k_cache.shape[:2], dtype=torch.bool)
        for (_, cached, _), (entry, row) in zip(self.problem.lengths, self.places):
            found[entry[cached:], row[cached:]] = True
        return found

    def mapped(self, change: Callable[[Tensor], Tensor]) -> Inputs:
        """The same with other tensors."""
        options = {name: change(value) if isinstance(value, Tensor) else value for name, value in self.options.items()}
        q, k_cache, v_cache, *new = (change(t) for t in (self.q, self.k_cache, self.v_cache, *self.new))
        return Inputs(self.problem, q, k_cache, v_cache, new, options, self.places)

    def run(self) -> dict[str, Tensor]:
        """What the op returns, and the caches that it leaves."""
        caches = self.k_cache.clone(), self.v_cache.clone()
        if self.problem.latents:
            names = {"k_scale": "latent_scale", "k_descale": "latent_descale"}
            given = {name: value for name, value in self.options.items() if name not in ("window_left", "softcap")}
            options = {names.get(name, name): value for name, value in given.items()}
            out, softmax_lse = torch.ops.volta_fa.fwd_mla(self.q, caches[0], **options)
        else:
            out, softmax_lse = torch.ops.volta_fa.fwd_kvcache(self.q, *caches, *self.new, **self.options)
        return {"out": out, "softmax_lse": softmax_lse, "k_cache": caches[0], "v_cache": caches[1]}

    def numbers(self, which: str, cache: Tensor) -> Tensor:
        """A copy of what the cache `which`, k or v, stands for: of a quantized one in float64."""
        format, given = self.problem.cache, self.options.get
        if not self.problem.is_quantized:
            return cache.clone()
        x = "k" if self.problem.latents else which  # values that are keys have their scales
        scale = given(f"{x}_scale", given(f"{x}_descale"))
        return dequantize_kv(cache, format, scale, given(f"{x}_zero_point"), dtype=torch.float64)

    def appended(self, which: str, new: Tensor) -> Tensor:
        """What the cache stands for where these tokens were appended."""
        format = self.problem.cache
        if not self.problem.is_quantized:
            return new
        made = quantize_kv(new, format, scale=self.options.get(f"{which}_descale"))
        return dequantize_kv(made.data, format, made.scale, made.zero_point, dtype=torch.float64)

    def sequences(self, q: Tensor, k_cache: Tensor, v_cache: Tensor) -> list[tuple[tuple[Tensor, ...], dict[str, Any], slice | int]]:
        """Of each sequence with queries q, k and v as a dense problem, its options for `rule.attend`, and where it lies in q."""
        p, first = self.problem, 0
        found: list[tuple[tuple[Tensor, ...], dict[str, Any], slice | int]] = []
        for b, (n, _, _) in enumerate(p.lengths):
            at: slice | int = slice(first, first + n) if p.packed else b
            first += n
            if n == 0:
                continue
            entry, row = (t.to(q.device) for t in self.places[b])
            tensors = (q[at][None], k_cache[entry, row][None], v_cache[entry, row][None])
            options: dict[str, Any] = {
                name: self.options[name] for name in ("is_causal", "window_left", "softcap", "sinks") if name in self.options
            }
            if p.alibi:
                options["alibi_slopes"] = self.options["alibi_slopes"][b : b + 1]
            found.append((tensors, options, at))
        return found


def _rotated(x: Tensor, first: int, p: Problem, options: dict[str, Any]) -> Tensor:
    """x (tokens, heads, headdim) of a sequence whose first token is at this position."""
    if not p.rotary:
        return x
    cos, sin = (options[name][first : first + len(x), None].to(x.dtype) for name in ("rotary_cos", "rotary_sin"))
    n = cos.shape[-1]
    one, two = (slice(0, 2 * n, 2), slice(1, 2 * n, 2)) if p.rotary == "interleaved" else (slice(n), slice(n, 2 * n))
    rotated = x.clone()
    rotated[..., one], rotated[..., two] = x[..., one] * cos - x[..., two] * sin, x[..., one] * sin + x[..., two] * cos
    return rotated


def expect(inputs: Inputs) -> Expected:
    """Results of the CPU backend in float64 with the very caches that the kernels get: appended tokens as the dtype has them."""
    p = inputs.problem
    host = inputs.mapped(lambda t: t.cpu())
    # (slopes are float32 for all)
    exact = host.mapped(lambda t: t.double() if t.dtype == p.dtype else t)
    if p.alibi:
        exact.options["alibi_slopes"] = host.options["alibi_slopes"]
    values = exact.run()
    # once more by PyTorch's own operations: tokens are appended and queries rotated here, rounded as the op rounds them
    k_cache, v_cache, q = host.numbers("k", host.k_cache), host.numbers("v", host.v_cache), host.q.clone()
    for b, ((n, cached, new), first_q, first_new, (entry, row)) in enumerate(zip(p.lengths, _firsts(p, 0), _firsts(p, 2), inputs.places)):
        of_q: Any = slice(first_q, first_q + n) if p.packed else b
        q[of_q] = _rotated(host.q[of_q].double(), cached, p, host.options).to(p.dtype)
        if new:
            of_new: Any = slice(first_new, first_new + new) if p.packed else b
            rotated = _rotated(host.new[0][of_new].double(), cached, p, host.options).to(p.dtype)
            k_cache[entry[cached:], row[cached:]] = host.appended("k", rotated)
            v_cache[entry[cached:], row[cached:]] = host.appended("v", host.new[1][of_new])
    out, again = torch.zeros(values["out"].shape, dtype=p.dtype), torch.zeros_like(values["out"])
    lse = torch.full(values["softmax_lse"].shape, math.inf, dtype=torch.float64)
    sums = tolerance = largest = squares = 0.0
    for tensors, options, at in host.sequences(q, k_cache, v_cache):
        doubled: dict[str, Any] = {name: t.double() if isinstance(t, Tensor) else t for name, t in options.items()}
        ref = rule.attend(*(t.double() for t in tensors), **doubled)
        again[at], (lse[:, at] if p.packed else lse[at])[:] = ref.out[0], ref.softmax_lse[0]
        in_dtype = [t.to(p.dtype) for t in tensors]
        on_device = (
            [t.to(inputs.q.device) for t in in_dtype],
            {n: t.to(inputs.q.device) if isinstance(t, Tensor) else t for n, t in options.items()},
        )
        eager = first_that_can(lambda part: rule.eager(*part[0], **part[1]), on_device, (in_dtype, options))
        out[at] = eager[0].cpu()
        sums = max(sums, rule.forward_sums(ref, tensors[0], tensors[2]))
        allowed = rule.lse_tolerance(ref, p.dtype)
        if p.is_converted:  # what the cache stands for is rounded, as the eager result's inputs are
            nearest = rule.attend(*(t.double() for t in in_dtype), **doubled)
            allowed += rule.max_error(nearest.softmax_lse, ref.softmax_lse)
        tolerance = max(tolerance, allowed)
        if p.is_quantized:
            # kernels round a probability times its token's scale, also a single token's, whose probability is exactly 1 in eager attention
            rounded = rule.rounded_probabilities(ref.probabilities, rule.heads_first(tensors[2].double(), p.nheads), p.dtype)
            largest, squares = max(largest, rounded.largest), squares + rounded.rms**2 * ref.out.numel()
    if not p.rotary:  # float64's would not be rounded
        agree("out", values["out"], again)
        agree("softmax_lse", values["softmax_lse"], lse)
    budget = rule.Budget.of(out, again, rule.FORWARD_FACTOR, sums, rule.Rounded(largest, math.sqrt(squares / again.numel())))
    caches = {"k_cache": k_cache, "v_cache": v_cache}
    return Expected({"out": again, "softmax_lse": lse, **caches}, {"out": budget}, tolerance, keyless(lse))


def _firsts(p: Problem, which: int) -> list[int]:
    return [0, *itertools.accumulate(n[which] for n in p.lengths)]
