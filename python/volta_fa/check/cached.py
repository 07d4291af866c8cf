"""Problems of attention with a KV cache that `correctness` gives each kernel, runs of them, and their exact results on the CPU.

Passes are what kernels compute: Append writes keys and values into the cache. Decode attends with few queries of a sequence, DecodeMla over
latents, Prefill with many queries, PrefillStreamK on a grid that divides the keys too. Dequantize casts a quantized cache for Forward."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..inspection import cache_formats  # a row for each format of a cache: its name, its bits, the formats of its keys and values
from ..kv_cache.formats import dequantize_kv, quantize_kv
from ..operands import MAX_DECODE_ROWS  # the most rows (queries times query heads of a KV head) that decode kernels take

# has_scales: whether each token and head has a scale. CacheCase: a problem; `ends`: tokens of each sequence after the call; columns_v:
# headdim_v. CacheInputs: its tensors; `places`: for each sequence the entry (or page) and row of each token. mapped() changes each tensor,
# numbers() reads tokens of a cache, dequantized; parts(b, k, v, ...) computes the exact results of sequence b by PyTorch.
from .cache_cases import CacheCase, CacheInputs, has_scales
from .cases import EVERY, CpuSource, asking  # EVERY: softcap, ALiBi and sinks; CpuSource draws tensors; asking: fields for features
from .kernels import Target  # the device: a GPU, the simulator or the CPU
from .problems import Part, agree  # a result's part with exact values and allowed errors; raises if two references differ

#: Bits of a column (an element of a token and head), by cache format.
_BITS = {row["name"]: row["bits"] for row in cache_formats()}
#: Columns in 16 bytes (128 bits), by cache format, of the narrower of keys and values; "": fp16 and bf16. Kernels read a cache in place if
#: its rows are multiples of 16 bytes, else a copy in q's dtype.
_COLUMNS = {row["name"] if row["is_quantized"] else "": 128 // min(_BITS[row["keys"]], _BITS[row["values"]]) for row in cache_formats()}
#: (queries, cached tokens, appended tokens) of each sequence.
Lengths = tuple[tuple[int, int, int], ...]
#: Dtype of a cache that is not quantized, by the name that `info()` has for it in a kernel's "cache".
_UNQUANTIZED = {"float": torch.float16, "bfloat16": torch.bfloat16}


def _case(lengths: Lengths, headdim: int, headdim_v: int, group: int, cache: str = "float", **options: Any) -> CacheCase:
    """Returns a problem with two KV heads, or with one head of latents. `group`: query heads of each KV head. `cache`: the cache's format,
    as in a variant's "cache". `options`: other fields. Without them the mask is causal and pages have 16 tokens; page=0: a dense cache.
    sinks="own": in q's dtype. own_new: appended tokens have cu_seqlens_k_new. descale="h": a scale for each KV head, for formats without
    one for each token."""
    if options.get("rotary"):
        options["rotary_dim"] = headdim // 4 // 8 * 16  # at most half of the columns, a multiple of 16
    nheads_k = 1 if options.get("latents") else 2
    kv_dtype = "" if cache in _UNQUANTIZED else cache
    options["own_new"] = options.get("packed", False) and any(new for _, _, new in lengths)
    descale = "h" if kv_dtype and not has_scales(kv_dtype) else ""
    options = {"dtype": _UNQUANTIZED.get(cache, torch.float16), "kv_dtype": kv_dtype, "descale": descale, **options}
    return CacheCase(lengths, headdim, headdim_v, group * nheads_k, nheads_k, **options)


def problems(variant: dict[str, Any]) -> list[CacheCase]:
    """Returns problems that together use every feature of a kernel (`variant`: its entry in `info()`); `--quick` runs the first.
    Lengths are arbitrary, but most leave the last tile and the last page partial, and some sequences are empty."""
    if variant["family"] == "cpu":
        rest = {"page": 0, "packed": True, "dtype": variant["dtype"], "rotary": "half", **EVERY}
        return [
            # lengths (queries, cached, appended), headdim, headdim_v, group
            _case(((3, 40, 0), (3, 17, 0), (3, 0, 0)), 40, 24, 3, dtype=variant["dtype"]),
            _case(((2, 9, 2), (0, 3, 0), (5, 31, 4)), 40, 40, 2, **rest),
        ]
    return _OF_PASS[variant["pass"]](variant)


# ---- the problems of each pass: functions of `_OF_PASS` ----


def _append(variant: dict[str, Any]) -> list[CacheCase]:
    cache = variant["cache"]
    short, packed = ((1, 40, 1), (1, 0, 1), (1, 15, 1), (1, 300, 1)), ((3, 40, 5), (0, 9, 0), (1, 15, 0), (2, 0, 9))
    if cache != "float":  # no rotation: its rounding may turn a code into the next one
        return [
            _case(short, 64, 64, 4, cache),
            _case(packed, 96, 32, 2, cache, page=0, packed=True),
            _case(((2, 37, 2), (2, 0, 2)), 224, 128, 2, cache, page=48),
        ]
    return [
        _case(short, 64, 64, 4, rotary="half"),
        _case(packed, 72, 40, 2, page=0, packed=True, rotary="interleaved"),
        _case(((2, 37, 2), (2, 0, 2)), 36, 20, 2, page=48, dtype=torch.bfloat16, rotary="half"),
    ]


def _dequantize(variant: dict[str, Any]) -> list[CacheCase]:
    return [
        _case(((45, 205, 0), (45, 31, 0)), 64, 64, 2, "int8"),
        _case(((45, 300, 0), (45, 47, 0)), 128, 64, 2, "int4", page=48, dtype=torch.bfloat16),
        _case(((70, 77, 0), (0, 20, 0), (50, 3, 0)), 64, 64, 2, "fp8_e5m2", page=0, packed=True, window_left=50),
        _case(((65, 130, 0), (65, 81, 0)), 72, 40, 1, "fp8_e4m3", page=64, window_left=20),
    ]


def _mla(variant: dict[str, Any]) -> list[CacheCase]:
    d, dv, rows = variant["headdim"], variant["headdim_v"], variant["block_rows"]
    # (query heads, lengths, layout). A tile has `rows` rows, each a query and a head: in the first problem one row of each tile belongs
    # to no query; in the others a sequence may need several tiles.
    found: list[tuple[int, Lengths, dict[str, Any]]] = [
        (rows - 1, ((1, 905, 0), (1, 16, 0), (1, 1, 0), (1, 330, 0)), {}),
        (7, ((5, 77, 0), (1, 0, 0), (0, 20, 0), (2, 417, 0)), {"page": 0, "packed": True}),
        (rows + 5, ((2, 81, 0), (2, 200, 0)), {"page": 64}),
    ]
    return [_case(lengths, d, dv, heads, variant["cache"], latents=True, **layout) for heads, lengths, layout in found]


def _decode(variant: dict[str, Any]) -> list[CacheCase]:
    """Returns problems of few queries per sequence over a cache: more than one tile, and partial ones."""
    d, dv, rows, cache = variant["headdim"], variant["headdim_v"], variant["block_rows"], variant["cache"]
    # A tile has `rows` rows, each a query and one of the `group` query heads of a KV head. With up to 7 heads, some rows of each tile have
    # no query.
    group, queries = min(rows - 1, 7), max(rows // 8, 1)
    # With more rows than MAX_DECODE_ROWS, an fp16 cache needs a prefill kernel beside the decode kernel, for these sequences. With
    # another cache, no decode kernel takes part in the call.
    more_queries = queries + 2 if cache == "float" else min(queries + 2, MAX_DECODE_ROWS // group)
    pad = _COLUMNS["" if cache in _UNQUANTIZED else cache]  # a headdim 16 bytes below the kernel's is still read in place
    second: dict[str, Any] = {"page": 0, "packed": True, "window_left": 50}
    if "tree" in variant["required_features"]:
        return [
            _case(((queries, 905, 0), (queries, 16, 0), (queries, 1, 0), (queries, 330, 0)), d, dv, group, cache, tree=True),
            _case(((more_queries, 77, 0), (1, 9, 0), (0, 20, 0), (5, 417, 0)), d - pad, dv - pad, group, cache, tree=True, **second),
            _case(((queries, 81, 0), (queries, 200, 0)), d, dv, group, cache, page=64, tree=True, softcap=20.0, sinks="own"),
        ]
    return [
        _case(((queries, 905, 0), (queries, 16, 0), (queries, 1, 0), (queries, 330, 0)), d, dv, group, cache),
        _case(((more_queries, 77, 0), (1, 0, 0), (0, 20, 0), (1, 417, 0)), d - pad, dv - pad, group, cache, **second),
        _case(((queries, 81, 0), (queries, 200, 0)), d, dv, group, cache, page=64, **EVERY),
    ]


def _prefill(variant: dict[str, Any]) -> list[CacheCase]:
    d, dv, features = variant["headdim"], variant["headdim_v"], variant["features"]
    asked, heads = asking(features), variant["heads"]
    group, other_group = (2, 3) if heads == 1 else (heads, 2 * heads)  # a block computes `heads` query heads of a KV head
    second: dict[str, Any] = {"page": 0, "packed": True, "window_left": 50}
    return [
        _case(((45, 205, 0), (45, 31, 0)), d, dv, group, **asked),
        _case(((70, 77, 0), (0, 20, 0), (50, 3, 0)), d - 8, dv - 8, group, **second, **asked),
        _case(((45, 300, 0), (45, 47, 0)), d, dv, other_group, page=64, sinks="own" if "sinks" in features else "", **asked),
    ]


def _prefill_stream_k(variant: dict[str, Any]) -> list[CacheCase]:
    """Returns problems of one sequence: these grids have no more."""
    d, dv = variant["headdim"], variant["headdim_v"]
    return [
        _case(((145, 205, 0),), d, dv, 2),
        _case(((70, 377, 0),), d - 8, dv - 8, 2, page=0, packed=True, window_left=50),
        _case(((300, 310, 0),), d, dv, 3, page=64, sinks="own"),
    ]


#: By a kernel's pass, the function that returns its problems.
_OF_PASS = {
    "Append": _append,
    "Dequantize": _dequantize,
    "DecodeMla": _mla,
    "Decode": _decode,
    "Prefill": _prefill,
    "PrefillStreamK": _prefill_stream_k,
}
#: Kernels of these passes get the problems here.
PASSES = tuple(_OF_PASS)


def planned(target: Target, problem: CacheCase, variant: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns the planner's kernels for the problem if `variant` is preferred, as entries of `_plan`'s JSON; none on the CPU."""
    if not target.has_kernels:
        return []
    p = problem
    if p.latents:
        # `_plan` has no entry for latents. Every kernel of the pass can compute them, so the preferred one runs. This bounds its scratch
        # memory, in floats and semaphores: a block has two partial results, and the tree that combines them at most 8 levels.
        splits, levels = 2 * target.sms * variant["blocks_per_sm"], 8
        partials = splits * variant["block_rows"] * (p.columns_v + 2 * levels)
        return [{"name": variant["name"], "partials": partials, "semaphores": splits * levels}]
    queries, news = max(q for q, _, _ in p.lengths), max(new for _, _, new in p.lengths)
    tokens = max(p.ends)
    # `_plan` takes one number for queries and for tokens to append; True: is_causal
    shape = (p.batch, max(queries, news), tokens, p.nheads, p.nheads_k, p.headdim, p.columns_v, True)
    with target.running(variant):
        plan = json.loads(torch.ops.volta_fa._plan(*shape, features=",".join(p.features), device=target.number))
    plans = plan["cache"]
    if p.kv_dtype and news:  # problems that append have few query rows: a decode kernel computes them
        return [plans["append_quantized"][p.kv_dtype], plans["quantized"][p.kv_dtype]]
    if p.kv_dtype:
        return [plans["quantized"][p.kv_dtype]] if plans["dequantize"] is None else [plans["dequantize"], plan["forward"]]
    passes = ["append"] if news else []
    if p.dtype == torch.bfloat16:  # problems in bf16 have few query rows too
        passes.append("bfloat16")
    else:  # with packed queries both kernels run: decode for sequences of few rows, prefill for the others
        passes += ["decode", "prefill"] if p.packed or plans["prefill"] is None else ["prefill"]
    return [plans[name] for name in passes if plans[name]]


def draw(problem: CacheCase, seed: int, device: torch.device, kernels: Sequence[dict[str, Any]] = ()) -> CacheInputs:
    """Draws a problem's tensors. A seed gives the same numbers on every device."""
    inputs = CacheInputs.draw(problem, CpuSource(device, problem.dtype or torch.float16, seed))
    inputs.scratch_bytes = sum(4 * k.get("partials", 0) + 8 * k.get("semaphores", 0) for k in kernels)
    return inputs


def run(inputs: CacheInputs) -> dict[str, Tensor]:
    """Runs the operator on copies of the caches, and returns its results and the caches after it. Appending to a quantized cache also
    writes its scales, in `inputs.options`."""
    k_cache, v_cache = inputs.k_cache.clone(), inputs.v_cache.clone()
    if inputs.case.latents:
        names = {"k_scale": "latent_scale", "k_descale": "latent_descale"}
        options = {names.get(name, name): value for name, value in inputs.options.items()}
        out, softmax_lse = torch.ops.volta_fa.fwd_mla(inputs.q, k_cache, **options)
    else:
        out, softmax_lse = torch.ops.volta_fa.fwd_kvcache(inputs.q, k_cache, v_cache, *inputs.new, **inputs.options)
    return {"out": out, "softmax_lse": softmax_lse, "k_cache": k_cache, "v_cache": v_cache}


def written(inputs: CacheInputs) -> Tensor:
    """Returns where in the cache the call appends tokens, (entries, rows) bool, on the CPU."""
    found = torch.zeros(inputs.k_cache.shape[:2], dtype=torch.bool)
    for (_, cached, _), (entry, row) in zip(inputs.case.lengths, inputs.places):
        found[entry[cached:], row[cached:]] = True
    return found


def numbers(inputs: CacheInputs, which: str, cache: Tensor) -> Tensor:
    """Returns a copy of a cache's values on the CPU (`which`: "k" or "v"). A quantized cache is dequantized to fp64."""
    everywhere: Any = (slice(None), slice(None))
    return inputs.mapped(lambda t: t.cpu()).numbers(which, cache.cpu(), everywhere, 0).clone()


def _as_stored(inputs: CacheInputs, which: str, values: Tensor) -> Tensor:
    """Returns appended values as a cache represents them: rounded to its format if it is quantized."""
    c = inputs.case
    if not c.kv_dtype:
        return values
    kv_dtype = c.kv_dtype_of(which)
    made = quantize_kv(values, kv_dtype, scale=inputs.options.get(f"{which}_descale"))
    return dequantize_kv(made.data, kv_dtype, made.scale, made.zero_point, dtype=torch.float64)


def exact(inputs: CacheInputs) -> tuple[list[Part], dict[str, Tensor]]:
    """Returns the parts of a problem's exact results, and the values of the caches after the call, rounded to the cache's format.

    PyTorch's own operations append, rotate and attend here. Raises WrongReference if the fp64 CPU backend's results differ from theirs.

    Args:
        inputs: a problem on the CPU.
    """
    c, dtype = inputs.case, inputs.q.dtype
    caches = {f"{which}_cache": numbers(inputs, which, t) for which, t in (("k", inputs.k_cache), ("v", inputs.v_cache))}
    parts = []
    for b, (n, cached, new) in enumerate(c.lengths):
        entry, row = inputs.places[b]
        if new:
            for which, appended in zip("kv", inputs.appended(b)):
                caches[f"{which}_cache"][entry[cached:], row[cached:]] = _as_stored(inputs, which, appended.to(dtype))
        if n:
            k, v = (t[entry, row] for t in caches.values())
            parts += inputs.parts(b, k, v, _is_dequantized(c))
    if not c.rotary:  # with fp64 tensors the operator would not round rotated keys to q's dtype, as above
        in_fp64 = inputs.mapped(lambda t: t.double() if t.dtype == dtype else t)
        if c.alibi:  # slopes are fp32 in every call
            in_fp64.options["alibi_slopes"] = inputs.options["alibi_slopes"]
        agree(parts, run(in_fp64))
    return parts, caches


def _is_dequantized(c: CacheCase) -> bool:
    """Returns whether a quantized cache is dequantized to q's dtype before attention: for more rows (queries times query heads of a KV
    head) than decode kernels take. With a tree they take any number."""
    return bool(c.kv_dtype) and not c.tree and c.nheads // c.nheads_k * max(n for n, _, _ in c.lengths) > MAX_DECODE_ROWS
