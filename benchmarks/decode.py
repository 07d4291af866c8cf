"""Measures decoding over a paged KV cache, in bytes of the cache per second, on a simulated V100 or a real GPU.

    python -m benchmarks.decode [--all]        simulated
    python -m benchmarks.decode --device cuda  measured, beside a copy kernel and PyTorch's attention

Both take --quantized, --bfloat, --tree, --wide, --only TEXT and --json FILE. --tree has pairs of cases, without and with a tree
mask. --wide has Gemma 4's global layers, with headdim 512. --latents has MLA decoding (`fwd_mla`) over a cache of latents, fp16 or
quantized, in pages of 64 tokens. Simulations take --gpu t4, whose DRAM rate then counts.

The simulation times one SM's share of the launch (tools/volta-sim) at the model's DRAM latency and at 3000 cycles,
which stands for a loaded memory. Shares are of the model's DRAM rate. Simulated times include what one SM does for every
kernel of the call. They leave out launch overhead and the combination of partial results between SMs.

Caches are fp16 (--bfloat: bf16; --quantized: int8, int4, fp8), (pages, page, heads, headdim), with pages in random
order. Some cases have a target: the share that they must reach. Measured shares are of the copy kernel's rate.
PyTorch's attention reads the same keys from one dense tensor, without pages or lengths.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import volta_fa
from volta_fa.check import draft_trees
from volta_fa.errors import CommandError
from volta_fa.kv_cache.formats import KV_DTYPES

from . import report
from .measure import aligned, ended, median_ms, simulated

#: DRAM rate that volta-sim's V100 attains (`dram_gb_per_s` in tools/volta-sim/src/machine.rs).
DRAM_GB_S = 783.0
#: The same of its GPUs.
DRAM_RATES = {"v100": DRAM_GB_S, "t4": 220.0, "rtx2080ti": 493.0, "titanrtx": 538.0}
#: Simulator settings for each DRAM latency, in cycles: the model's default, and that of a loaded memory.
LATENCIES = {"430": "", "3000": "dram_latency=3000"}
#: Columns of a latent that are values.
LATENT_VALUES = 512


@dataclass(frozen=True)
class Case:
    headdim: int
    lengths: tuple[int, ...]
    group: int = 8
    seqlen_q: int = 1
    page: int = 16
    kv_dtype: str = ""  # of a quantized cache
    bfloat: bool = False  # bf16 instead of fp16
    tree: bool = False  # the queries are a tree of draft tokens
    kv_heads: int = 0  # 0: 2 KB of fp16 keys per token, so that an SM's share is the same
    latents: bool = False  # the cache has one head, whose first LATENT_VALUES columns are the values
    target: float = 0.0  # share to reach: simulated at the default DRAM latency, or measured
    slow_target: float = 0.0  # share to reach at a DRAM latency of 3000 cycles
    tflops_target: float = 0.0  # TFLOP/s to reach at the default DRAM latency

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of q, and of an unquantized cache."""
        return torch.bfloat16 if self.bfloat else torch.float16

    @property
    def nheads_k(self) -> int:
        return self.kv_heads or 1024 // self.headdim

    @property
    def bytes(self) -> int:
        """Bytes of keys and values that a call reads, including scales and zero points."""
        if self.latents:
            of_token = self.headdim if self.kv_dtype else 2 * self.headdim
            return sum(self.lengths) * (of_token + (4 if self.kv_dtype == "int8" else 0))
        per_token = {"": 4.0, "int8": 2.0, "int4": 1.0}.get(self.kv_dtype, 2.0) * self.headdim
        per_token += {"int8": 8, "int4": 16}.get(self.kv_dtype, 0)
        return int(sum(self.lengths) * self.nheads_k * per_token)

    @property
    def flops(self) -> int:
        headdim_v = LATENT_VALUES if self.latents else self.headdim
        return sum(self.lengths) * self.nheads_k * self.group * self.seqlen_q * 2 * (self.headdim + headdim_v)

    @property
    def name(self) -> str:
        longest, batch = max(self.lengths), len(self.lengths)
        even = all(n == longest for n in self.lengths)
        lengths = f"{batch} x {longest}" if even else f"{longest} + {batch - 1} x {min(self.lengths)}"
        kind = f"{self.kv_dtype}, " if self.kv_dtype else "bf16, " if self.bfloat else ""
        tree = ", tree" if self.tree else ""
        heads = f"{self.kv_heads * self.group}/{self.kv_heads} heads" if self.kv_heads else f"group {self.group}"
        return f"{kind}headdim {self.headdim}, {lengths}, {heads}, queries {self.seqlen_q}, page {self.page}{tree}"


def cases(everything: bool) -> Iterator[Case]:
    # most cases have 65,536 tokens in total, so that their times compare
    targets = {65536: (0.90, 0.85), 16384: (0.90, 0.85), 4096: (0.80, 0.0), 1024: (0.60, 0.0)}
    for headdim in (64, 128, 256):
        for seqlen, (target, slow_target) in targets.items():
            base = Case(headdim, (seqlen,) * (65536 // seqlen), target=target, slow_target=slow_target)
            groups = (1, 4, 6, 8) if everything or seqlen == 16384 else (8,)
            pages = (16, 64, 256) if everything or seqlen == 16384 else (16,)
            yield from (replace(base, group=g, page=p) for g in groups for p in pages if everything or p == 16 or g == 8)
        yield from (Case(headdim, (16384,) * 4, group=4, seqlen_q=n) for n in (2, 4, 8))
        yield from (Case(headdim, (16384,) * 4, group=8, seqlen_q=n) for n in (2, 4, 8))
    yield Case(128, (65536, *[512] * 63))
    yield Case(128, (1528,) * 64)  # total of the case before, evenly


def measured_cases() -> Iterator[Case]:
    """Returns cases that are large enough for a GPU with terabytes per second."""
    for headdim in (64, 128, 256):
        yield Case(headdim, (65536,) * 16, target=0.85)
        yield from (Case(headdim, (16384,) * 16, seqlen_q=n) for n in (1, 2, 4, 8))
        yield from (Case(headdim, (seqlen,) * 16) for seqlen in (4096, 1024))
    yield Case(128, (65536, *[512] * 63))
    yield Case(128, (1528,) * 64)  # total of the case before, evenly


def quantized_cases() -> Iterator[Case]:
    """Returns cases with as many bytes as the fp16 cases: four times the batch for int4, twice for 8-bit formats."""
    for kv_dtype in KV_DTYPES:
        batch_factor = 4 if kv_dtype == "int4" else 2
        long_target = 0.88 if kv_dtype in ("int8", "fp8_e5m2") else 0.80
        for headdim in (64, 128, 256):
            for seqlen, target, slow_target in ((65536, long_target, long_target), (16384, long_target, long_target), (4096, 0.78, 0.0)):
                for group in (8, 1) if seqlen == 16384 else (8,):
                    yield Case(
                        headdim,
                        (seqlen,) * (batch_factor * 65536 // seqlen),
                        group=group,
                        kv_dtype=kv_dtype,
                        target=target,
                        slow_target=slow_target,
                    )


def tree_cases() -> Iterator[Case]:
    """Returns pairs of cases, without and with a tree mask, whose times compare."""
    for headdim in (64, 128, 256):
        for group, seqlen_q in ((1, 16), (4, 8), (4, 16), (8, 8)):
            for tree in (False, True):
                yield Case(headdim, (4096,) * 8, group=group, seqlen_q=seqlen_q, tree=tree)


def wide_cases(gpu: str) -> Iterator[Case]:
    """Returns cases of Gemma 4's global layers: the models' query and KV heads, and verification steps."""
    base = Case(512, (4096,) * 8)
    target = 0.95 if gpu == "v100" else 0.90
    yield from (replace(base, kv_heads=n, target=target) for n in (1, 2, 4))
    yield from (replace(base, kv_heads=heads, group=group) for heads, group in ((2, 4), (1, 16)))
    yield from (replace(base, kv_heads=4, seqlen_q=n) for n in (2, 4, 8))
    yield from (replace(base, kv_heads=4, kv_dtype=name) for name in KV_DTYPES)


def latent_cases() -> Iterator[Case]:
    """Returns cases of `fwd_mla`. With 16 heads quantized caches have twice the tokens, in about the same bytes."""

    def of(heads: int, batch: int, seqlen: int, **options: Any) -> Case:
        return Case(576, (seqlen,) * batch, heads, page=64, kv_heads=1, latents=True, **options)

    for kv_dtype in ("", "int8", "fp8_e5m2", "fp8_e4m3"):
        target, batch = 0.80 if kv_dtype == "fp8_e4m3" else 0.88, 2 if kv_dtype else 1
        yield from (of(16, 262144 // n * batch, n, kv_dtype=kv_dtype, target=target, slow_target=target) for n in (65536, 16384))
        yield of(16, 64 * batch, 4096, kv_dtype=kv_dtype, target=0.78)
        yield of(128, 16, 4096, kv_dtype=kv_dtype, tflops_target=60)
    yield of(16, 1, 65536, target=0.88, slow_target=0.88)
    yield of(16, 1, 16384)
    yield of(16, 16, 4096, seqlen_q=2)
    yield from (of(heads, batch, seqlen) for heads, batch, seqlen in ((32, 2, 65536), (64, 16, 4096)))
    yield of(128, 1, 32768, tflops_target=60)


def call(case: Case, device: str) -> Callable[[], object]:
    """Returns the call to time."""
    q, k, v, options = problem(case, device)
    if not case.latents:
        return lambda: torch.ops.volta_fa.fwd_kvcache(q, k, v, **options)
    scale = {"latent_scale": options.pop("k_scale")} if case.kv_dtype == "int8" else {}
    return lambda: torch.ops.volta_fa.fwd_mla(
        q, k, **{name: options[name] for name in ("block_table", "cache_seqlens", "is_causal")}, **scale
    )


def problem(case: Case, device: str) -> tuple[Tensor, Tensor, Tensor, dict]:
    batch, max_seqlen = len(case.lengths), max(case.lengths)
    pages = [-(-n // case.page) for n in case.lengths]
    shape = (sum(pages), case.page, case.nheads_k, case.headdim)
    # equal values: row maxima never move, as is usual after the first tiles
    dtype = case.dtype
    names = "k" if case.latents else "kv"
    tensors = [aligned(shape, dtype, device).fill_(0.01) for _ in names]
    options: dict = {}
    if case.kv_dtype:
        like = volta_fa.quantize_kv(torch.full((1, case.headdim), 0.01), case.kv_dtype).data
        tensors = [aligned((*shape[:-1], like.shape[-1]), like.dtype, device) for _ in names]
        for t in tensors:
            t.view(torch.uint8).fill_(1)
        if case.kv_dtype.startswith("int"):
            # stored as (page, head, token): the scales of one head are contiguous
            scale = aligned((shape[0], shape[2], shape[1]), torch.float32, device).fill_(0.01).transpose(1, 2)
            options |= {"k_scale": scale, "v_scale": scale.transpose(1, 2).clone().transpose(1, 2)}
        if case.kv_dtype == "int4":
            options |= {f"{x}_zero_point": options[f"{x}_scale"].transpose(1, 2).clone().transpose(1, 2) for x in "kv"}
    numbers = torch.randperm(sum(pages), generator=torch.Generator().manual_seed(0)).int()
    table = torch.full((batch, -(-max_seqlen // case.page)), -1, dtype=torch.int32)
    for row, n, of_sequence in zip(table, pages, numbers.split(pages)):
        row[:n] = of_sequence
    q = aligned((batch, case.seqlen_q, case.nheads_k * case.group, case.headdim), dtype, device).fill_(0.01)
    lengths = torch.tensor(case.lengths, dtype=torch.int32, device=device)
    if case.tree:
        words = draft_trees.words(draft_trees.random_tree(case.seqlen_q, seed=0))
        options["tree_mask"] = torch.tensor([words] * batch, dtype=torch.int64, device=device)
    return q, tensors[0], tensors[-1], options | {"block_table": table.to(device), "cache_seqlens": lengths, "is_causal": True}


def simulate(case: Case, settings: str, gpu: str = "v100") -> dict:
    reports = simulated(call(case, "cpu"), settings, gpu)
    (report,) = (r for r in reports if "decode" in r["kernel"])
    us = sum(r["timing"]["kernel_us"] for r in reports)
    gb_s = case.bytes / us / 1e3
    rates = {"us": us, "gb_s": gb_s, "share": gb_s / DRAM_RATES[gpu], "tflops": case.flops / us / 1e6}
    return {"kernel": report["kernel"], **rates, "issue": report["timing"]["util"]["issue"]}


def measure(case: Case, copy_gb_s: float) -> dict:
    device = torch.device("cuda")
    us = 1e3 * median_ms(call(case, "cuda"), device, budget=0.5)
    gb_s = case.bytes / us / 1e3
    return {"kernel": "", "us": us, "gb_s": gb_s, "share": gb_s / copy_gb_s, "tflops": case.flops / us / 1e6}


def measure_pytorch(case: Case) -> dict[str, float]:
    """Returns GB/s of PyTorch's attention by backend.

    Returns {} for latents, for different lengths and quantized caches, and for several queries, where PyTorch aligns the causal mask
    top-left.
    """
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
            except RuntimeError:  # no kernel of the backend has it
                continue
        found[name] = case.bytes / ms / 1e6
    return found


def copy_rate() -> float:
    """Returns GB/s that PyTorch's copy kernel reads and writes together."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.numel() / median_ms(lambda: target.copy_(source), source.device, budget=0.5) / 1e6


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.decode", description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("simulated", "cuda"), default="simulated")
    parser.add_argument("--all", action="store_true", help="every group and page with every length")
    parser.add_argument("--quantized", action="store_true", help="int8, int4 and fp8 caches")
    parser.add_argument("--bfloat", action="store_true", help="bf16 instead of fp16")
    parser.add_argument("--tree", action="store_true", help="draft tokens without and with a tree mask")
    parser.add_argument("--wide", action="store_true", help="headdim 512, in Gemma 4's shapes")
    parser.add_argument("--latents", action="store_true", help="MLA: a cache of latents")
    parser.add_argument("--gpu", choices=DRAM_RATES, default="v100", help="the simulated GPU")
    parser.add_argument("--only", default="", metavar="TEXT", help="cases whose name contains TEXT")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here too")
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        raise CommandError("benchmarks.decode: needs a CUDA device, and this machine has none")
    measured = options.device == "cuda"
    usual = measured_cases() if measured else cases(options.all)
    every = quantized_cases() if options.quantized else tree_cases() if options.tree else usual
    if options.wide or options.latents:
        every = latent_cases() if options.latents else wide_cases(options.gpu)
    every = (replace(case, bfloat=options.bfloat) for case in every)
    chosen = [case for case in every if options.only in case.name]
    rows, failed = [], 0
    if measured:
        copy = copy_rate()
        print(f"copy kernel: {copy:.0f} GB/s")
        settings = {"measured": ""}
    else:
        settings = LATENCIES
    for case in report.track(chosen, "cases"):
        cells = []
        for name, setting in settings.items():
            found = measure(case, copy) if measured else simulate(case, setting, options.gpu)
            target = case.slow_target if name == "3000" else case.target
            slow = name != "3000" and found["tflops"] < case.tflops_target
            missed = f" < {target:.0%}" if found["share"] < target else f" < {case.tflops_target:.0f} TFLOP/s" if slow else ""
            failed += bool(missed)
            tflops = f" {found['tflops']:5.1f} TFLOP/s" if case.latents else ""
            cells.append(f"{found['us']:9.1f} us {found['gb_s']:6.0f} GB/s {found['share']:6.1%}{tflops}{missed}")
            others = measure_pytorch(case) if measured else {}
            cells += (f"{other} {gb_s:.0f} GB/s" for other, gb_s in others.items())
            rows.append({**asdict(case), "latency": name, **found, "target": target, "others": others})
        print(f"{case.name:66s} {' | '.join(cells)}", flush=True)
    return ended(rows, failed, options.json)


if __name__ == "__main__":
    sys.exit(main())
