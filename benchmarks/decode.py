"""Times attention over a paged KV cache, on a simulated GPU or a real one: decoding, in bytes of the cache a second, and prefill.

    python -m benchmarks.decode [--all]        simulated
    python -m benchmarks.decode --device cuda  measured, beside a copy kernel and PyTorch's attention
    python -m benchmarks.decode --sweep        one size after another, as tables, a plot and JSON

At most one of these replaces the usual cases; --bfloat goes with any:

    --quantized  caches in int8, int4 and fp8
    --tree       pairs of cases, without and with a tree mask: draft tokens of speculative decoding see their ancestors alone
    --wide       Gemma 4's global layers (headdim 512)
    --latents    MLA decoding (`fwd_mla`), pages of 64 tokens: all query heads read one fp16 or quantized latent of 576 columns per token,
                 whose first 512 are the values
    --prefill    a chunk of 512 causal queries, the last of 16384 tokens; shares are relative to the plain kernel on one dense tensor

The simulation (tools/volta-sim) times one SM's part of every kernel of the call, at the model's DRAM latency and at 3000 cycles, which
stands for a loaded memory. It leaves out launch overhead.

Caches are fp16 (--bfloat: bf16; --quantized: int8, int4, fp8), (pages, page, heads, headdim), with pages in random order. A share is
the rate relative to the model's DRAM, or when measured to a copy kernel. Some cases have a target: the share that they must reach.
PyTorch's attention reads the same keys from one dense tensor, without pages or lengths.

Each sweep changes one size. The base case has 16 sequences of 4096 tokens, one query each, eight query heads per KV head (the "group")
and pages of 16 tokens. "Rows" are seqlen_q times the group. The tables also list published rates of other V100 kernels."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import volta_fa
from volta_fa.check.cache_cases import random_tree, tree_words  # a random tree of draft tokens, and its tree_mask as int64 words
from volta_fa.errors import CommandError
from volta_fa.kv_cache.formats import CACHE_KV_DTYPES, parts_of

from . import driver, report
from .attention import Shape
from .driver import GPUS, Benchmark, Result, Row, run  # Row: a case on a GPU, with its models (as LATENCIES) and targets; Result: its times
from .measure import Work, aligned, median_ms  # aligned(): an empty tensor, aligned as by CUDA's allocator
from .report import Grid

#: Settings of the simulator: its default DRAM latency (430 cycles on a V100), and that of a loaded memory.
LATENCIES = ("", "dram_latency=3000")
LATENT_VALUES = 512  # columns of a latent that are values
PREFILL_TARGET = 0.85  # minimum rate of prefill by kernels that read pages, relative to the dense kernel's
#: Query heads of prefill, on 4 KV heads, by GPU ("": this machine's) and headdim. They make whole waves, because one SM is simulated.
PREFILL_HEADS = {"v100": {64: 40, 128: 40, 256: 20}, "t4": {64: 40, 128: 20, 256: 20}, "": {64: 32, 128: 32, 256: 32}}


@dataclass(frozen=True)
class Case(driver.Case):
    """One call over a cache. Its fields and `str` identify it in --resume files and tables."""

    headdim: int
    lengths: tuple[int, ...]  # tokens of each sequence
    group: int = 8  # query heads per KV head
    seqlen_q: int = 1  # queries of each sequence
    page: int = 16  # tokens; 0: no cache, but dense k and v
    kv_dtype: str = ""  # of a quantized cache
    bfloat: bool = False  # bf16 instead of fp16
    tree: bool = False  # the queries are a tree of draft tokens
    kv_heads: int = 0  # 0: 1024 / headdim, so that all headdims have 2 KB of fp16 keys per token
    latents: bool = False  # the cache has one head, whose first LATENT_VALUES columns are the values
    window: int = 0  # keys that a query sees to its left; 0: all
    softcap: float = 0.0
    sinks: bool = False

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of q, and of an unquantized cache."""
        return torch.bfloat16 if self.bfloat else torch.float16

    @property
    def nheads_k(self) -> int:
        return self.kv_heads or 1024 // self.headdim

    @property
    def bytes(self) -> int:
        """Bytes of keys and values that a call reads, with fp32 scales (int8, int4) and zero points (int4) per token and KV head."""
        tokens = sum(min(n, self.window + 1) if self.window else n for n in self.lengths)
        if self.latents:
            per_latent = self.headdim if self.kv_dtype else 2 * self.headdim
            return tokens * (per_latent + (4 if self.kv_dtype == "int8" else 0))
        per_token = 0.0
        for kv_dtype in parts_of(self.kv_dtype) if self.kv_dtype else ("", ""):
            per_token += {"": 2.0, "int4": 0.5}.get(kv_dtype, 1.0) * self.headdim + {"int8": 4, "int4": 8}.get(kv_dtype, 0)
        return int(tokens * self.nheads_k * per_token)

    @property
    def flops(self) -> float:
        headdim_v = LATENT_VALUES if self.latents else self.headdim
        heads = self.nheads_k * self.group
        return sum(Shape(1, heads, self.seqlen_q, n, self.headdim, True, headdim_v=headdim_v).forward_flops for n in self.lengths)

    def __str__(self) -> str:
        longest, batch = max(self.lengths), len(self.lengths)
        even = all(n == longest for n in self.lengths)
        lengths = f"{batch} x {longest}" if even else f"{longest} + {batch - 1} x {min(self.lengths)}"
        kind = f"{self.kv_dtype}, " if self.kv_dtype else "bf16, " if self.bfloat else ""
        tree = ", tree" if self.tree else ""
        heads = f"{self.kv_heads * self.group}/{self.kv_heads} heads" if self.kv_heads else f"group {self.group}"
        pages = f"page {self.page}" if self.page else "dense"
        return f"{kind}headdim {self.headdim}, {lengths}, {heads}, queries {self.seqlen_q}, {pages}{tree}"

    def calls(self, device: str) -> list[Work]:
        """Returns the one call of the case: `fwd` without pages, `fwd_mla` for latents, else `fwd_kvcache`."""
        q, k, v, options = self.problem(device)
        if not self.page:
            return [lambda: torch.ops.volta_fa.fwd(q, k, v, is_causal=True)]
        if not self.latents:
            return [lambda: torch.ops.volta_fa.fwd_kvcache(q, k, v, **options)]
        scale = {"latent_scale": options.pop("k_scale")} if self.kv_dtype == "int8" else {}
        options = {name: options[name] for name in ("block_table", "cache_seqlens", "is_causal")}
        return [lambda: torch.ops.volta_fa.fwd_mla(q, k, **options, **scale)]

    def problem(self, device: str) -> tuple[Tensor, Tensor, Tensor, dict]:
        """Returns q, K and V (or their caches) and options. Constant values: softmax's row maxima stay, as they do after some tiles."""
        batch, max_seqlen, heads = len(self.lengths), max(self.lengths), self.nheads_k
        q = aligned((batch, self.seqlen_q, heads * self.group, self.headdim), self.dtype, device).fill_(0.01)
        if not self.page:
            k, v = (aligned((batch, max_seqlen, heads, self.headdim), self.dtype, device).fill_(0.01) for _ in "kv")
            return q, k, v, {}
        pages = [-(-n // self.page) for n in self.lengths]
        shape = (sum(pages), self.page, heads, self.headdim)
        names = "k" if self.latents else "kv"
        tensors = [aligned(shape, self.dtype, device).fill_(0.01) for _ in names]
        options: dict = {}
        if self.kv_dtype:
            parts = dict(zip(names, parts_of(self.kv_dtype)))
            # a quantized row of each format tells its columns and its dtype
            like = [volta_fa.quantize_kv(torch.full((1, self.headdim), 0.01), kv_dtype).data for kv_dtype in parts.values()]
            tensors = [aligned((*shape[:-1], t.shape[-1]), t.dtype, device) for t in like]
            for t in tensors:
                t.view(torch.uint8).fill_(1)
            if self.kv_dtype.startswith("int"):
                # stored as (page, head, token): the scales of one head are contiguous
                scale = aligned((shape[0], shape[2], shape[1]), torch.float32, device).fill_(0.01).transpose(1, 2)
                options |= {"k_scale": scale, "v_scale": scale.transpose(1, 2).clone().transpose(1, 2)}
            for x, kv_dtype in parts.items():
                if kv_dtype == "int4":
                    options[f"{x}_zero_point"] = options[f"{x}_scale"].transpose(1, 2).clone().transpose(1, 2)
        numbers = torch.randperm(sum(pages), generator=torch.Generator().manual_seed(0)).int()
        table = torch.full((batch, -(-max_seqlen // self.page)), -1, dtype=torch.int32)
        for row, n, own in zip(table, pages, numbers.split(pages)):
            row[:n] = own
        if self.tree:
            words = tree_words(random_tree(self.seqlen_q, seed=0))
            options["tree_mask"] = torch.tensor([words] * batch, dtype=torch.int64, device=device)
        if self.window:
            options["window_left"] = self.window
        if self.softcap:
            options["softcap"] = self.softcap
        if self.sinks:
            options["sinks"] = torch.zeros(heads * self.group, device=device)
        lengths = torch.tensor(self.lengths, dtype=torch.int32, device=device)
        return q, tensors[0], tensors[-1], options | {"block_table": table.to(device), "cache_seqlens": lengths, "is_causal": True}


# ---- cases ---------------------------------------------------------------------------------------------------------------------------


class Target(NamedTuple):
    """A case and what it must reach."""

    case: Case
    shares: tuple[float, ...] = ()  # minimum at the default DRAM latency (or measured), and at 3000 cycles; fewer: no target
    tflops: float = 0.0  # minimum; 0: no target


def cases(everything: bool) -> Iterator[Target]:
    """Yields the simulated cases. Most have 65,536 tokens in total, so that their times compare."""
    for headdim in (64, 128, 256):
        for seqlen, shares in {65536: (0.90, 0.85), 16384: (0.90, 0.85), 4096: (0.80,), 1024: (0.60,)}.items():
            base = Case(headdim, (seqlen,) * (65536 // seqlen))
            groups = (1, 4, 6, 8) if everything or seqlen == 16384 else (8,)
            pages = (16, 64, 256) if everything or seqlen == 16384 else (16,)
            # other pages than 16 tokens with eight query heads per KV head alone, unless --all
            several = (replace(base, group=g, page=p) for g in groups for p in pages if everything or p == 16 or g == 8)
            yield from (Target(case, shares) for case in several)
        yield from (Target(Case(headdim, (16384,) * 4, group=g, seqlen_q=n)) for g in (4, 8) for n in (2, 4, 8))
    yield from uneven_cases()


def uneven_cases() -> Iterator[Target]:
    """Yields one long sequence among short ones, and equal sequences."""
    yield Target(Case(128, (65536, *[512] * 63)))
    yield Target(Case(128, (1528,) * 64))  # 64 x 1528 is the total of the case above


def measured_cases() -> Iterator[Target]:
    """Yields cases that are large enough for a GPU with terabytes per second."""
    for headdim in (64, 128, 256):
        yield Target(Case(headdim, (65536,) * 16), (0.85,))
        yield from (Target(Case(headdim, (16384,) * 16, seqlen_q=n)) for n in (1, 2, 4, 8))
        yield from (Target(Case(headdim, (seqlen,) * 16)) for seqlen in (4096, 1024))
    yield from uneven_cases()


def quantized_cases() -> Iterator[Target]:
    """Yields cases with about as many bytes as the fp16 cases: four times the batch for int4, twice for the others."""
    for kv_dtype in CACHE_KV_DTYPES:
        batch_factor = 4 if kv_dtype == "int4" else 2
        long = (0.88 if kv_dtype in ("int8", "fp8_e5m2") else 0.80,) * 2
        for headdim in (64, 128, 256):
            for seqlen, shares in ((65536, long), (16384, long), (4096, (0.78,))):
                for group in (8, 1) if seqlen == 16384 else (8,):
                    yield Target(Case(headdim, (seqlen,) * (batch_factor * 65536 // seqlen), group=group, kv_dtype=kv_dtype), shares)


def tree_cases() -> Iterator[Target]:
    """Yields pairs of cases, without and with a tree mask, whose times compare."""
    for headdim in (64, 128, 256):
        for group, seqlen_q in ((1, 16), (4, 8), (4, 16), (8, 8)):
            yield from (Target(Case(headdim, (4096,) * 8, group=group, seqlen_q=seqlen_q, tree=tree)) for tree in (False, True))
    for headdim in (128, 256):
        for name in CACHE_KV_DTYPES:
            yield from (Target(Case(headdim, (4096,) * 8, group=4, seqlen_q=8, kv_dtype=name, tree=tree)) for tree in (False, True))


def wide_cases(gpu: str) -> Iterator[Target]:
    """Yields cases of Gemma 4's global layers: the models' query and KV heads, steps that verify 2 to 8 draft tokens, quantized caches."""
    base = Case(512, (4096,) * 8)
    yield from (Target(replace(base, kv_heads=n), (0.95 if gpu in ("", "v100") else 0.90,)) for n in (1, 2, 4))
    yield from (Target(replace(base, kv_heads=heads, group=group)) for heads, group in ((2, 4), (1, 16)))
    yield from (Target(replace(base, kv_heads=4, seqlen_q=n)) for n in (2, 4, 8))
    yield from (Target(replace(base, kv_heads=4, kv_dtype=name)) for name in CACHE_KV_DTYPES)


def latent_cases() -> Iterator[Target]:
    """Yields cases of `fwd_mla`. With 16 heads quantized caches have twice the tokens, in about the same bytes."""

    def of(heads: int, batch: int, seqlen: int, shares: tuple[float, ...] = (), tflops: float = 0, **options: Any) -> Target:
        return Target(Case(576, (seqlen,) * batch, heads, page=64, kv_heads=1, latents=True, **options), shares, tflops)

    for kv_dtype in ("", "int8", "fp8_e5m2", "fp8_e4m3"):
        shares, batch = (0.80 if kv_dtype == "fp8_e4m3" else 0.88,) * 2, 2 if kv_dtype else 1
        yield from (of(16, 262144 // n * batch, n, shares, kv_dtype=kv_dtype) for n in (65536, 16384))
        yield of(16, 64 * batch, 4096, (0.78,), kv_dtype=kv_dtype)
        yield of(128, 16, 4096, tflops=60, kv_dtype=kv_dtype)
    yield of(16, 1, 65536, (0.88, 0.88))
    yield of(16, 1, 16384)
    yield of(16, 16, 4096, seqlen_q=2)
    yield from (of(heads, batch, seqlen) for heads, batch, seqlen in ((32, 2, 65536), (64, 16, 4096)))
    yield of(128, 1, 32768, tflops=60)


def prefill_cases(gpu: str, tokens: int) -> Iterator[Target]:
    """Yields the cases of each headdim: dense K and V first, then each page size."""
    if gpu not in PREFILL_HEADS:
        raise CommandError(f"--gpu {gpu}: expected one of {', '.join(filter(None, PREFILL_HEADS))} for --prefill")
    if tokens < 512 or tokens % 256:
        raise CommandError(f"--tokens {tokens}: expected a multiple of 256, at least 512")
    for headdim, nheads in PREFILL_HEADS[gpu].items():
        # nheads // 4: the group; 512: queries
        yield from (Target(Case(headdim, (tokens,), nheads // 4, 512, page, kv_heads=4)) for page in (0, 16, 64, 256))


#: (kernel, GB/s that it reads on a V100, note), derived from published times. Attention counts the KV cache alone. Rows: queries times
#: query heads per KV head.
DECODE_RATES = [
    ("1CatAI/1Cat-vLLM: headdim 256, 6 rows, fp16", "255 to 445", "35 to 39% of its card's 1130 at best"),
    ("1CatAI/1Cat-vLLM: headdim 256, 6 rows, e5m2, 65536 tokens", "131", ""),
    ("exl3's sm_70 laboratory: headdim 256, q4_0", "55", ""),
    ("zh-nj/v100llm: MLA, 16384 x 576", "49", ""),
    ("ninfer-v100: a Q4 matrix times a vector, no attention", "795", "what a V100's DRAM gives"),
    ("a copy kernel", "750 to 790", "Jia 2018, paranumal"),
]

BASE = Case(128, (4096,) * 16)
#: By the size that a sweep changes: its values, and a function that sets one in a case. "rows" are query rows of a KV head.
SWEEPS: dict[str, tuple[tuple[int, ...], Callable[[Case, int], Case]]] = {
    "tokens": ((512, 1024, 2048, 4096, 8192, 16384), lambda case, n: replace(case, lengths=(n,) * len(case.lengths))),
    "sequences": ((1, 2, 4, 8, 16, 32), lambda case, n: replace(case, lengths=case.lengths[:1] * n)),
    "page": ((16, 32, 64, 256), lambda case, n: replace(case, page=n)),
    "rows": ((8, 16, 32, 64), lambda case, n: replace(case, seqlen_q=n // case.group)),
}


def sweep_rows(options: argparse.Namespace) -> Iterator[Row]:
    (gpu,) = options.gpu
    base = replace(BASE, lengths=(options.tokens or 4096,) * len(BASE.lengths), bfloat=options.bfloat)
    for headdim in options.headdims:
        for sweep in options.sweeps:
            values, change = SWEEPS[sweep]
            yield from (Row(f"{sweep} {n}, headdim {headdim}", change(replace(base, headdim=headdim), n), gpu, ("",)) for n in values)


def rows(options: argparse.Namespace) -> list[Row]:
    """Returns the benchmark's rows. options.gpu is [""] for this machine's GPU (driver.run)."""
    if options.tokens is not None and options.tokens < 1:
        raise CommandError(f"--tokens {options.tokens}: expected a positive number")
    if options.kind == "sweep":
        return list(sweep_rows(options))
    (gpu,) = options.gpu
    listed = {
        "quantized": quantized_cases,
        "tree": tree_cases,
        "wide": lambda: wide_cases(gpu),
        "latents": latent_cases,
        "prefill": lambda: prefill_cases(gpu, options.tokens or 16384),
        "": measured_cases if not gpu else lambda: cases(options.all),
    }[options.kind]()
    models = LATENCIES if gpu and options.kind != "prefill" else ("",)
    found = (target._replace(case=replace(target.case, bfloat=options.bfloat)) for target in listed)
    return [Row(str(target.case), target.case, gpu, models, target.tflops, target.shares) for target in found]


# ---- results -----------------------------------------------------------------------------------------------------


def measure_pytorch(case: Case) -> dict[str, float]:
    """Returns GB/s of PyTorch's attention by backend; {} for what it lacks: latents, uneven lengths, quantized caches, several queries."""
    if len(set(case.lengths)) > 1 or case.seqlen_q > 1 or case.kv_dtype or case.latents:
        return {}
    shape = (len(case.lengths), case.nheads_k, case.lengths[0], case.headdim)
    k, v = (torch.full(shape, 0.01, device="cuda", dtype=case.dtype) for _ in "kv")
    q = torch.full((shape[0], case.nheads_k * case.group, 1, case.headdim), 0.01, device="cuda", dtype=case.dtype)
    found = {}
    for name, backend in (("flash", SDPBackend.FLASH_ATTENTION), ("cuDNN", SDPBackend.CUDNN_ATTENTION)):
        with sdpa_kernel(backend):
            try:
                ms = median_ms(lambda: scaled_dot_product_attention(q, k, v, enable_gqa=True), k.device, budget=0.3)
            except RuntimeError:  # the backend has no kernel for it
                continue
        found[name] = case.bytes / ms / 1e6
    return found


def prefill_share(result: Result, results: Sequence[Result]) -> str:
    """Returns as text the speed relative to the dense kernel's at the same headdim, marked with the target if it misses that."""
    dense = [r for r in results if not r.row.case.page and r.row.case.headdim == result.row.case.headdim]
    share = dense[0].us() / result.us() if dense else None
    return "-" if share is None else f"{share:.0%}{f' < {PREFILL_TARGET:.0%}' if share < PREFILL_TARGET else ''}"


def grids(results: Sequence[Result], options: argparse.Namespace) -> list[Grid]:
    if options.kind == "sweep":
        return sweep_grids(results, options)
    if not results:
        return []
    tflops: Callable[[Result], str] = lambda r: f"{r.tflops():.1f}{r.missed() if r.row.target else ''}"  # noqa: E731
    if options.kind == "prefill":
        columns = {"us": lambda r: f"{r.us():.1f}", "TFLOP/s": tflops, "of dense": lambda r: prefill_share(r, results)}
        return [report.table("A chunk of a prompt after cached tokens", results, {"case": lambda r: r.row.name, **columns})]
    columns = {}
    for model, latency in enumerate(results[0].row.models):
        loaded = f", {latency}" if latency else ""
        columns |= {
            f"us{loaded}": lambda r, model=model: f"{r.us(model):.1f}",
            f"GB/s{loaded}": lambda r, model=model: f"{r.gb_s(model):.0f}",
            f"share{loaded}": lambda r, model=model: f"{r.share(model):.1%}{r.missed(model) if r.row.targets else ''}",
        }
    if options.kind == "latents":
        columns["TFLOP/s"] = tflops
    if not results[0].row.gpu:
        columns["PyTorch, GB/s"] = lambda r: ", ".join(f"{name} {gb_s:.0f}" for name, gb_s in measure_pytorch(r.row.case).items())
    of = f"a simulated {GPUS[results[0].row.gpu].title}'s DRAM" if results[0].row.gpu else f"a copy kernel's {results[0].peak:.0f} GB/s"
    return [report.table(f"Decoding; shares are of {of}", results, {"case": lambda r: r.row.name, **columns})]


def sweep_grids(results: Sequence[Result], options: argparse.Namespace) -> list[Grid]:
    found = {r.row.name: r for r in results}
    made = []
    for sweep in options.sweeps:

        def cell(n: int, headdim: int, sweep: str = sweep) -> str:
            r = found.get(f"{sweep} {n}, headdim {headdim}")
            return f"{r.us():.1f}, {r.gb_s():.0f}, {r.share():.0%}" if r else "-"

        columns = {f"headdim {d}": lambda n, d=d: cell(n, d) for d in sorted(options.headdims)}
        title = f"By {sweep}: us, GB/s of the cache, share of the DRAM or copy rate"
        made.append(report.table(title, SWEEPS[sweep][0], {sweep: str, **columns}))
    return [*made, Grid("Published by others, of V100s", ["what", "GB/s", ""], [list(row) for row in DECODE_RATES])]


def plot(results: Sequence[Result], options: argparse.Namespace, header: dict[str, str], path: Path) -> None:
    if options.kind != "sweep":
        raise CommandError("--plot: draws --sweep alone")
    title = report.label(f"Decode on {header['device']}, {header['date']}", 110)
    figure, axes = report.panels(1, len(options.sweeps), title, (3 * len(options.sweeps) + 1, 3.6), sharey=True)
    for axis, sweep in zip(axes[0], options.sweeps):
        values, _ = SWEEPS[sweep]
        for headdim in sorted(options.headdims):
            rates = {r.row.name: r.gb_s() for r in results}
            curve = [(n, rates[name]) for n in values if (name := f"{sweep} {n}, headdim {headdim}") in rates]
            axis.plot(*zip(*curve), "o-", color=report.HEADDIM_COLORS[headdim], label=f"headdim {headdim}", markersize=4)
        axis.set_xscale("log", base=2)
        axis.set_xticks(values, [str(n) for n in values])
        axis.set(title=f"by {sweep}", ylim=(0, None))
    axes[0][0].set_ylabel("GB/s of the cache")
    report.shared_legend(figure, axes)
    report.save(figure, path)


#: Kinds of cases by the option that selects them, as --help shows them.
KINDS = {
    "quantized": "int8, int4 and fp8 caches",
    "tree": "draft tokens without and with a tree mask",
    "wide": "headdim 512, in Gemma 4's shapes",
    "latents": "MLA: a cache of latents",
    "prefill": "a chunk of a prompt after cached tokens",
    "sweep": "one size after another",
}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--all", action="store_true", help="every group and page with every length")
    parser.add_argument("--bfloat", action="store_true", help="bf16 instead of fp16")
    kinds = parser.add_mutually_exclusive_group()
    for name, text in KINDS.items():
        kinds.add_argument(f"--{name}", dest="kind", action="store_const", const=name, default="", help=text)
    parser.add_argument("--tokens", type=int, metavar="N", help="length of a sequence of --prefill, the chunk included, or --sweep")
    parser.add_argument("--headdims", type=int, nargs="+", choices=(64, 128, 256), default=[64, 128, 256], help="of --sweep")
    parser.add_argument("--sweeps", nargs="+", choices=tuple(SWEEPS), default=list(SWEEPS), help="of --sweep (default: all)")


def main(arguments: Sequence[str]) -> int:
    return run("decode", Benchmark(__doc__, rows, grids, add_options, plot, measurable=True, strict=True), arguments)


if __name__ == "__main__":
    report.command(main)
