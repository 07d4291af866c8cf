"""`python -m volta_fa versus-1cat`: times attention by volta_fa and by 1Cat-vLLM's package at the shapes that 1Cat-vLLM published.
1Cat-vLLM is a fork of vLLM for V100s; its attention is the package flash_attn_v100. All shapes are those of Qwen3.5 and 3.6 on one of four
GPUs: headdim 256, 6 query heads on 1 KV head. Published times are of real cards, mostly of a Tesla PG503-216 (a V100 with 72 SMs), from
1Cat-vLLM's docs/design of 2026-08-22; `Shape.source` names the file, and the clock where it matters or is known."""

from __future__ import annotations

import functools
import importlib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ..demo.simulated import aligned, microseconds  # a tensor aligned as by CUDA's allocator; the time of all simulated kernels
from ..integrations.flash_attn import v100  # volta_fa's stand-in for flash_attn_v100
from . import tolerance  # results in fp64, and how far others may be from them
from .kernels import Target, lacks_memory, simulate  # the device; whether an error is about memory; runs a call in the simulator
from .performance import median_ms  # the median time of a call

NHEADS, NHEADS_K, HEADDIM = 6, 1, 256  # query heads, KV heads
#: The machine that `--device simulator` times on, at its application clock of 1312 MHz.
SIMULATED_GPU = "pg503"
#: Maximum seqlen_q * seqlen_k that the simulator times within a minute.
_SIMULATED_PRODUCTS = 4096 * 8192
_NO_MEMORY, _TOO_LONG = "not enough memory", "takes too long to simulate"
_SECONDS_PER_FIGURE = 0.5  # of timed calls


@dataclass(frozen=True)
class Shape:
    """One call: the last seqlen_q of seqlen_k tokens attend to all before them."""

    kind: str  # "dense prefill", "paged prefill", "decode", or "verify" (of the draft tokens in speculative decoding)
    seqlen_q: int
    seqlen_k: int
    page: int = 0  # tokens of a page, 0 without pages
    kv_dtype: str = "float16"  # of the cache, as vLLM's --kv-cache-dtype
    published: float | None = None  # milliseconds
    source: str = ""  # of the published time

    def __str__(self) -> str:
        return f"{self.kind}, {self.seqlen_q:,} of {self.seqlen_k:,} tokens, {self.kv_dtype}"

    def shortened(self) -> Shape:
        """Returns a smaller shape of the same kind, for a CPU, on which times mean nothing."""
        seqlen_q = min(self.seqlen_q, 32)
        return Shape(self.kind, seqlen_q, min(self.seqlen_k, 256), self.page and 16, self.kv_dtype)  # 0, no pages, stays 0


# Pages are as vLLM sized them in these runs: 784 tokens, or 1616 with speculation. By position: kind, seqlen_q, seqlen_k, page, kv_dtype,
# milliseconds, source.
_FA2 = "sm70_fa2_d256_prefill_pipeline.md, 1312 MHz"
_FA2_UNKNOWN_CLOCK = "sm70_fa2_d256_prefill_pipeline.md, clock not stated"
_DEC = "sm70_tp4_nomtp_long_context_decode.md"
_FP8 = "sm70_flash_v100_fp8_kv_long_context.md"
_MTP = "sm70_qwen36_27b_awq_mtp4_optimization.md"
SHAPES = (
    Shape("dense prefill", 1024, 1024, published=0.213, source=_FA2_UNKNOWN_CLOCK),
    Shape("dense prefill", 4096, 4096, published=1.779, source=_FA2_UNKNOWN_CLOCK),
    Shape("dense prefill", 4096, 8192, published=4.657, source=_FA2),
    Shape("paged prefill", 4096, 8192, 784, published=5.054, source=_FA2),
    Shape("decode", 1, 4097, 784, published=0.0855, source=_DEC),
    Shape("decode", 1, 65536, 784, published=0.211, source=_DEC),
    Shape("decode", 1, 131072, 784, published=0.306, source=_DEC),
    Shape("decode", 1, 65536, 784, "fp8_e5m2", 0.338, _FP8),
    Shape("verify", 5, 65536, 1616, "fp8_e5m2", 1.209, _MTP),
    Shape("verify", 5, 131072, 1616, "fp8_e5m2", 1.744, _MTP),
    Shape("dense prefill", 4096, 65536, published=46.46, source=_FA2),
    Shape("paged prefill", 4096, 65536, 784, published=50.45, source=_FA2),
    Shape("dense prefill", 4096, 131072, published=94.75, source=_FA2),
    Shape("paged prefill", 4096, 262144, 784, published=210.7, source=_FA2),
)


@dataclass
class Outcome:
    """What one implementation did at a shape."""

    ms: float | None = None  # of one call
    share: float | None = None  # of the allowed error, at most 1 if the result is right
    missing: str = ""  # why there is no time
    kernels: list[str] = field(default_factory=list)  # that the simulator ran


@dataclass
class Row:
    """A shape and the outcomes of volta_fa and of 1Cat-vLLM's package."""

    shape: Shape
    ours: Outcome = field(default_factory=Outcome)
    theirs: Outcome = field(default_factory=Outcome)

    def data(self) -> dict[str, Any]:
        """Returns the row for the JSON file."""
        return {"shape": vars(self.shape), "volta_fa": vars(self.ours), "flash_attn_v100": vars(self.theirs)}


def package() -> tuple[ModuleType | None, str]:
    """Returns 1Cat-vLLM's package, or None and the reason."""
    try:
        found = importlib.import_module("flash_attn_v100")
    except Exception as error:  # a wheel for another CUDA or Python raises many kinds
        return None, f"import flash_attn_v100: {_reason(error)}"
    if getattr(found, "flash_attn_decode_paged", None) is v100.flash_attn_decode_paged:
        return None, "flash_attn_v100 is volta_fa's stand-in: unset VOLTA_FA_VLLM_1CAT"
    if not hasattr(found, "flash_attn_decode_paged"):
        return None, "the installed flash_attn_v100 is not 1Cat-vLLM's: it has no flash_attn_decode_paged"
    return found, ""


def rows(target: Target) -> Iterator[Row]:
    """Runs volta_fa at each shape, then the package, and yields a row after each run.
    The package runs last, because an error of its kernels may end all use of the GPU in this process."""
    module, reason = (None, "no such GPU takes part") if target.kind == "simulator" else package()
    found = [Row(shape if target.kind != "cpu" else shape.shortened()) for shape in SHAPES]
    for row in found:
        row.ours = _simulated(row.shape) if target.kind == "simulator" else _measured(row.shape, ours, target)
        row.theirs.missing = reason
        yield row
    if module is not None:
        for row in found:
            row.theirs = _measured(row.shape, functools.partial(of_1cat, module=module), target)
            yield row


class Inputs:
    """Tensors of a shape, the same for both implementations: q, (1, seqlen_q, NHEADS, HEADDIM); cache, (pages, K or V, page, NHEADS_K,
    HEADDIM), a single page without paging; table, (1, pages), in random order; lengths, (1)."""

    def __init__(self, shape: Shape, device: torch.device) -> None:
        self.shape = shape
        generator = torch.Generator(device).manual_seed(0)

        def normal(*sizes: int) -> Tensor:
            return aligned(sizes, torch.float16, str(device)).normal_(generator=generator)

        self.q = normal(1, shape.seqlen_q, NHEADS, HEADDIM)
        pages = -(-shape.seqlen_k // shape.page) if shape.page else 1
        cache = normal(pages, 2, shape.page or shape.seqlen_k, NHEADS_K, HEADDIM)
        self.cache = cache if shape.kv_dtype == "float16" else cache.to(torch.float8_e5m2)
        order = torch.randperm(pages, generator=torch.Generator().manual_seed(0)).to(device)
        self.table = order.int()[None]
        self.lengths = torch.tensor([shape.seqlen_k], dtype=torch.int32, device=device)

    @property
    def caches(self) -> tuple[Tensor, ...]:
        """K and V, (pages, page, 1, headdim)."""
        return self.cache.unbind(1)

    def keys(self, count: int) -> list[Tensor]:
        """Returns the first `count` tokens of K and of V in their order, (count, headdim) in fp16."""
        first = self.table[0, : -(-count // self.cache.shape[2])].long()
        return [cache[first].flatten(0, 2)[:count].half() for cache in self.caches]


Work = Callable[[], Tensor]


def ours(inputs: Inputs) -> Work:
    """Returns volta_fa's call. It returns (1, seqlen_q, nheads, headdim)."""
    q, caches = inputs.q, inputs.caches
    if not inputs.shape.page:
        return lambda: torch.ops.volta_fa.fwd(q, *caches, is_causal=True)[0]
    options = {"cache_seqlens": inputs.lengths, "block_table": inputs.table, "is_causal": True}
    return lambda: torch.ops.volta_fa.fwd_kvcache(q, *caches, **options)[0]


def of_1cat(inputs: Inputs, module: ModuleType) -> Work:
    """Returns the package's call for the same inputs: the function that 1Cat-vLLM's attention backend calls for them."""
    shape, q, scale = inputs.shape, inputs.q, HEADDIM**-0.5
    if shape.kind == "dense prefill":
        k, v = inputs.caches
        return lambda: module.flash_attn_func(q, k, v, causal=True, softmax_scale=scale)
    is_fp8 = shape.kv_dtype != "float16"
    k, v = (t.view(torch.uint8) if is_fp8 else t for t in inputs.caches)
    options = {"softmax_scale": scale, "kv_cache_dtype": shape.kv_dtype if is_fp8 else "auto"}
    if shape.kind == "paged prefill":
        return lambda: module.flash_attn_prefill_paged(q, k, v, inputs.table, inputs.lengths, causal=True, **options)
    # 1Cat-vLLM verifies several tokens as sequences of one query each
    queries = q[0].contiguous()
    table = inputs.table.expand(shape.seqlen_q, -1).contiguous()
    lengths = torch.arange(shape.seqlen_k - shape.seqlen_q + 1, shape.seqlen_k + 1, dtype=torch.int32, device=q.device)
    # newer releases have another kernel for grouped queries
    has_xqa = getattr(module, "flash_attn_decode_paged_xqa_available", lambda: False)()
    decode = module.flash_attn_decode_paged_xqa if has_xqa else module.flash_attn_decode_paged
    options |= {
        "max_seq_len_hint": shape.seqlen_k,
        # keys of a partition, as its backend chooses them
        "partition_size_hint": 256 if shape.kind == "decode" else 1024,
        "out": torch.empty_like(queries),
    }
    return lambda: decode(queries, k, v, table, lengths, **options)[None]


def _measured(shape: Shape, call: Callable[[Inputs], Work], target: Target) -> Outcome:
    """Returns time and error of an implementation; `call` makes its call from the tensors of a shape."""
    try:
        inputs = Inputs(shape, target.device)
        work = call(inputs)
        share = error_share(inputs, work())
        # several calls of short kernels, so that the GPU need not wait for the host
        calls = 20 if shape.kind in ("decode", "verify") and target.kind == "cuda" else 1
        return Outcome(median_ms(work, target.device, _SECONDS_PER_FIGURE, calls=calls), share)
    except Exception as error:
        return _missing(error)


def _missing(error: Exception) -> Outcome:
    return Outcome(missing=_NO_MEMORY if lacks_memory(error) else _reason(error))


def _reason(error: Exception) -> str:
    """Returns the first line of an error, with file names but no folders: others read the file, and folders may have a user's name."""
    return re.sub(r"(?:[A-Za-z]:)?[\\/][^\s:'\"]*[\\/]", "", f"{type(error).__name__}: {error}".splitlines()[0])


def error_share(inputs: Inputs, out: Tensor) -> float:
    """Returns the largest error of the first, a middle and the last query (`row`) as a share of what tolerance.py allows. The mask is
    causal, so a query is computed without a mask over its prefix of the keys, and fp64 needs little memory."""
    worst = 0.0
    shape = inputs.shape
    for row in sorted({0, shape.seqlen_q // 2, shape.seqlen_q - 1}):
        q = inputs.q[:, row, :, None]
        k, v = (t[None, :, None] for t in inputs.keys(shape.seqlen_k - shape.seqlen_q + 1 + row))
        exact = tolerance.exact(q, k, v)
        error = tolerance.max_error(out[:, row, :, None], exact.out)
        worst = max(worst, error / tolerance.forward_budget(exact, q, k, v).allowed)
    return worst


def _simulated(shape: Shape) -> Outcome:
    """Returns volta_fa's simulated time, or why there is none."""
    if shape.seqlen_q * shape.seqlen_k > _SIMULATED_PRODUCTS:
        return Outcome(missing=_TOO_LONG)
    try:
        work = ours(Inputs(shape, torch.device("cpu")))
        reports = simulate(work, VOLTA_FA_SIM_GPU=SIMULATED_GPU)  # one for each kernel launch
    except Exception as error:
        return _missing(error)
    return Outcome(microseconds(reports) / 1e3, kernels=[report["kernel"] for report in reports])


def is_wrong(outcome: Outcome) -> bool:
    """Returns whether an implementation gave a wrong result or raised an error. A lack of memory or time is no error."""
    if outcome.missing:
        return outcome.missing not in (_NO_MEMORY, _TOO_LONG)
    return outcome.share is not None and not outcome.share <= 1
