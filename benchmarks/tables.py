"""Small benchmarks, each a list of rows for benchmarks.driver and a function that makes a table of their results:

    python -m benchmarks.tables targets          usual shapes on a V100, beside their target speed
    python -m benchmarks.tables headdim_512      headdim 512: forward, backward and decoding
    python -m benchmarks.tables fast             volta_fa::fwd_fast beside volta_fa::fwd on Turing
    python -m benchmarks.tables float32          float32 in both precisions
    python -m benchmarks.tables batch_invariant  what batch invariance costs
    python -m benchmarks.tables long_sequences   forward passes of 8K to 115K tokens, most with more K and V in a head than L2 holds
    python -m benchmarks.tables indexer          logits of DeepSeek's indexer
    python -m benchmarks.tables sparse_mla       latent attention over chosen tokens
    python -m benchmarks.tables features         options as a share of the plain pass, measured on this machine's GPU

Each has --help. Only the last is measured; tools/volta-sim simulates a GPU for the others, with its default model (`r.tflops()` of a
result r) and with a perfect instruction cache (`r.tflops(1)`). TABLES lists them."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from volta_fa.check.kernels import environment  # sets environment variables in a context
from volta_fa.check.problems import float32_precision  # sets PyTorch's precision of float32 products in a context
from volta_fa.errors import CommandError

from . import decode, models, report, sparse, volta
from .attention import Shape

# PIPES: parts of an SM by name; SPEEDS: columns of TFLOP/s by both models; Row: a case on a GPU, with targets; Result: its times
from .driver import GPUS, PIPES, SPEEDS, Benchmark, Case, Result, Row, run
from .long_sequences import LONG_SEQUENCES
from .measure import Work, aligned  # aligned(): an empty tensor, aligned as by CUDA's allocator
from .report import Grid
from .volta import BACKWARD, BIAS_GRADIENT, FORWARD

# ---- targets -----------------------------------------------------------------------------------------------------

TARGETS_TEXT = """The speed of usual shapes and of what people run, beside the targets of the project, on a simulated V100.

TFLOP/s of the whole pass with the default model and with a perfect instruction cache, as `benchmarks.volta` counts them; GB/s of decoding.
"Busy" is the busiest part of an SM, or its share of L2 or DRAM, and how much of the slowest kernel's time it works, with the default model.
The tensor pipe's share stands beside it. "Balance" is the work of the average SM, relative to that of the busiest: below 1, the last wave
of blocks leaves SMs idle. "Warps wait for" has the two largest shares of all warps' time without an instruction.
"""

#: Direction, feature ("": none), tokens, batch and target TFLOP/s by headdim. The number of heads is volta.usual_heads': 32 or 40.
USUAL: list[tuple[str, str, int, int, dict[int, int]]] = [
    (FORWARD, "", 4096, 1, {64: 104, 128: 104, 256: 86}),
    (FORWARD, "", 1024, 1, {64: 88, 128: 90, 256: 78}),
    (FORWARD, "causal", 4096, 1, {64: 96, 128: 96, 256: 82}),
    (FORWARD, "causal", 1024, 1, {64: 76, 128: 76, 256: 66}),
    (BACKWARD, "", 2048, 1, {64: 86, 128: 88, 256: 78}),
    (BACKWARD, "causal", 4096, 1, {64: 84, 128: 84}),  # at headdim 256 (76) the simulation takes more than ten minutes
    (BACKWARD, "causal", 1024, 1, {64: 66, 128: 66, 256: 60}),
    (FORWARD, "packed", 2048, 1, {64: 84, 128: 87}),
    (FORWARD, "packed", 2048, 8, {64: 84, 128: 87}),
    (FORWARD, "sinks", 2048, 1, {64: 85, 128: 88}),
    (FORWARD, "bias", 2048, 1, {64: 68, 128: 70}),
    (BACKWARD, "bias", 2048, 1, {64: 60, 128: 62}),
    (BACKWARD, BIAS_GRADIENT, 2048, 1, {64: 50, 128: 52}),
    (FORWARD, "", 512, 1, {64: 66, 128: 66}),
    (FORWARD, "causal", 512, 1, {64: 48, 128: 46}),
    (BACKWARD, "", 512, 1, {64: 66, 128: 66}),
    (BACKWARD, "causal", 512, 1, {64: 45, 128: 46}),
]
#: Direction, shape and target TFLOP/s.
OTHERS = [
    *((BACKWARD, Shape(1, 32, 2048, 2048, d, nheads_k=8), tflops) for d, tflops in ((64, 74), (128, 75))),
    (FORWARD, Shape(1, 32, 1024, 1024, 96), 78),
    (BACKWARD, Shape(1, 40, 1024, 1024, 96), 70),
    (FORWARD, Shape(1, 32, 1024, 1024, 192, headdim_v=128), 74),
    (BACKWARD, Shape(1, 40, 1024, 1024, 192, headdim_v=128), 66),
]
#: Prefill of 4096 tokens over a paged cache: headdim, query heads, KV heads, cached tokens before, target TFLOP/s.
PREFILL = [(256, 6, 1, before, 70) for before in (0, 16384)] + [(128, 32, 8, before, 85) for before in (0, 16384)]
#: Rows of benchmarks.models by the beginnings of their names, and target TFLOP/s. LOCAL_DECODE's target is in GB/s.
MODELS_TARGETS = {
    "gpt-oss 20B, sliding, forward": 42,
    "gpt-oss 20B, sliding, training": 36,
    "ModernBERT base, local, training": 34,
    "ViT-L/14, training": 42,
    "SDXL, 64x64 to text, forward": 40,
}
LOCAL_DECODE, LOCAL_DECODE_GB_S = "Gemma 4 E4B, local, decode", 550


# A `Row.target` is TFLOP/s. `Row.targets` are shares of a rate: here of DRAM's, and only the decoding row has them.
def target_rows(_: argparse.Namespace) -> list[Row]:
    found = []
    for direction, feature, n, batch, targets in USUAL:
        for d, tflops in targets.items():
            shape = Shape(batch, volta.usual_heads(direction, "v100"), n, n, d, feature == "causal")
            found.append((volta.Case(direction, shape, feature="" if feature == "causal" else feature), tflops))
    found += [(volta.Case(direction, shape), tflops) for direction, shape, tflops in OTHERS]
    rows = [Row(str(case), case, target=tflops) for case, tflops in found]
    for headdim, nheads, kv_heads, before, tflops in PREFILL:
        # one sequence, query heads per KV head, queries
        case = decode.Case(headdim, (4096 + before,), nheads // kv_heads, 4096, kv_heads=kv_heads)
        rows.append(Row(f"prefill D={headdim} H={nheads} on {kv_heads}, 4096 behind {before}", case, target=tflops))
    for layer in models.layers_of_models(GPUS["v100"].sms):
        name = str(layer)
        rows += [Row(name, models.case_of(layer), target=t) for begin, t in MODELS_TARGETS.items() if name.startswith(begin)]
        if name.startswith(LOCAL_DECODE):
            rows.append(Row(name, models.case_of(layer), targets=(LOCAL_DECODE_GB_S / GPUS["v100"].dram_gb_s,)))
    return rows


def target_grids(results: Sequence[Result], _: argparse.Namespace) -> list[Grid]:
    def rate(r: Result, model: int) -> str:
        return f"{r.gb_s(model):.0f} GB/s" if r.row.targets else f"{r.tflops(model):.1f}"

    def busiest(r: Result) -> str:
        name, share = max(r.main["pipes"].items(), key=lambda pipe: pipe[1])
        return f"{PIPES[name]} {share:.0%}"

    columns = {
        "case": lambda r: r.row.name,
        "target": lambda r: f"{LOCAL_DECODE_GB_S} GB/s" if r.row.targets else f"{r.row.target:g}",
        "TFLOP/s": lambda r: rate(r, 0),
        "perfect i-cache": lambda r: rate(r, 1),
        "tensor pipe": lambda r: f"{r.main['pipes']['tensor']:.0%}",
        "busy": busiest,
        "balance": lambda r: f"{r.main['balance']:.2f}",
        "warps wait for": lambda r: r.waits(2),
        "main kernel": lambda r: r.main["kernel"],
    }
    return [report.table("Simulated V100 (TFLOP/s: default model, perfect instruction cache)", results, columns)]


# ---- headdim 512 -------------------------------------------------------------------------------------------------

HEADDIM_512_TEXT = """Simulates headdim 512 on a V100, a T4 and an RTX 2080 Ti: forward, backward and decoding, by the default model and by
one with a perfect instruction cache.

In forward and backward a V100 has 32 query heads on 8 KV heads, a Turing chip a head for each SM. "One head" is the shape of an image
decoder. Decoding has the cases with targets of `benchmarks.decode --wide`: 8 sequences of 4096 tokens, and shares of the DRAM rate.
"""
#: Direction, tokens, causal, one head, GPUs.
PASSES_512 = [
    (FORWARD, 2048, False, False, ("v100", "t4", "rtx2080ti")),
    (FORWARD, 4096, False, False, ("v100",)),
    (FORWARD, 4096, True, False, ("v100", "t4")),
    (FORWARD, 4096, False, True, ("v100", "t4")),
    (FORWARD, 16384, False, True, ("v100", "t4")),
    (BACKWARD, 2048, False, False, ("v100", "t4")),
]


def headdim_512_rows(_: argparse.Namespace) -> list[Row]:
    found = []
    for gpu in ("v100", "t4", "rtx2080ti"):
        for direction, n, causal, one, gpus in PASSES_512:
            heads, kv_heads = (1, 1) if one else (32, 8) if gpu == "v100" else (GPUS[gpu].sms,) * 2
            case = volta.Case(direction, Shape(1, heads, n, n, 512, causal, nheads_k=kv_heads))
            if gpu in gpus:
                found.append(Row(f"{direction}, {'one head, ' * one}N={n}{', causal' * causal}", case, gpu))
        if gpu != "rtx2080ti":
            with_target = (target.case for target in decode.wide_cases(gpu) if target.shares)
            found += [Row(f"decode, {case.kv_heads * case.group} heads on {case.kv_heads}", case, gpu) for case in with_target]
    return found


def headdim_512_grids(results: Sequence[Result], options: argparse.Namespace) -> list[Grid]:
    rows, found = headdim_512_rows(options), {(r.row.gpu, r.row.name): r for r in results}
    known = {(row.gpu, row.name) for row in rows}

    def cell(name: str, gpu: str) -> str:
        r = found.get((gpu, name))
        if r is None:
            return "not simulated" if (gpu, name) in known else ""
        if r.row.case.bytes:
            return f"{r.share():.1%} / {r.share(1):.1%} of DRAM"
        return f"{r.tflops():.1f} / {r.tflops(1):.1f} ({r.share():.1%})"

    title = "Headdim 512: TFLOP/s by the default model / a perfect instruction cache (share of the tensor pipe)"
    columns = {GPUS[gpu].title: lambda name, gpu=gpu: cell(name, gpu) for gpu in dict.fromkeys(row.gpu for row in rows)}
    return [report.table(title, dict.fromkeys(row.name for row in rows), {"case": str, **columns})]


# ---- the fast forward --------------------------------------------------------------------------------------------

FAST_TEXT = """volta_fa::fwd_fast beside volta_fa::fwd on a simulated RTX 2080 Ti and T4: TFLOP/s of the call and of its forward kernel.

fwd_fast is the inexact forward for Turing: Q K^T in int8, sums of P V in fp16. Its first kernels quantize K and pack masks: "preparations".
A head for each SM, fp16. TFLOP/s count 4 * headdim operations for each pair of query and key, half of the pairs if causal, all of them
under a boolean mask, which hides a tenth at random. Packed: two sequences on half of the heads. --rows simulates only the last rows of the
queries, and counts their share of the preparations' time.
"""


@dataclass(frozen=True)
class FastCase(Case):
    """A call of fwd_fast, or of fwd for the same problem."""

    op: str  # fwd_fast or fwd
    kind: str  # plain, causal, mask or packed
    headdim: int
    seqlen: int  # keys
    rows: int  # queries, the last of seqlen (packed: of each sequence)
    sms: int  # heads (packed: heads x sequences)

    @property
    def flops(self) -> float:
        # causal: the last rows see all keys less a triangle of rows x rows
        pairs = self.rows * self.seqlen - (self.rows * (self.rows - 1) / 2 if self.kind == "causal" else 0)
        return 4 * self.headdim * self.sms * pairs

    def calls(self, device: str) -> list[Work]:
        generator = torch.Generator().manual_seed(1)
        rows, seqlen, batch = self.rows, self.seqlen, 2 if self.kind == "packed" else 1
        heads = self.sms // batch
        q, k, v = (aligned((batch, n, heads, self.headdim), torch.float16).normal_(generator=generator) for n in (rows, seqlen, seqlen))
        options: dict = {"is_causal": self.kind == "causal"}
        if self.kind == "packed":
            q, k, v = (t.flatten(0, 1) for t in (q, k, v))
            lengths = torch.arange(batch + 1, dtype=torch.int32)
            options |= {"cu_seqlens_q": lengths * rows, "cu_seqlens_k": lengths * seqlen, "max_seqlen_q": rows, "max_seqlen_k": seqlen}
        mask = torch.rand(1, 1, rows, seqlen, generator=generator) > 0.1 if self.kind == "mask" else None
        options["attn_mask" if self.op == "fwd_fast" else "attn_bias"] = mask

        return [lambda: getattr(torch.ops.volta_fa, self.op)(q, k, v, **options)]


def add_fast_options(parser: argparse.ArgumentParser) -> None:
    kinds = ("plain", "causal", "mask", "packed")
    parser.add_argument("--headdim", type=int, nargs="+", default=[64, 128, 256])
    parser.add_argument("--seqlen", type=int, nargs="+", default=[2048])
    parser.add_argument("--case", nargs="+", default=["plain"], choices=kinds)
    parser.add_argument("--rows", type=int)
    parser.add_argument("--settings", default="", help="of volta-sim; default: its default model")


def fast_rows(options: argparse.Namespace) -> Iterator[Row]:
    for gpu, seqlen, kind, headdim in itertools.product(options.gpu, options.seqlen, options.case, options.headdim):
        fast = FastCase("fwd_fast", kind, headdim, seqlen, options.rows or seqlen, GPUS[gpu].sms)
        for case in (fast, replace(fast, op="fwd")):
            yield Row(f"{case.op}, {seqlen} keys, {kind}, headdim {headdim}", case, gpu, models=(options.settings,))


def fast_grids(results: Sequence[Result], _: argparse.Namespace) -> list[Grid]:
    exact = {(r.row.gpu, replace(r.row.case, op="fwd_fast")): r for r in results if r.row.case.op == "fwd"}

    def with_preparations(r: Result) -> float:
        """Returns TFLOP/s of all kernels. Preparations take the time for all rows, and --rows gets its share."""
        *before, kernel = (launch["us"] for launch in r.launches[0])
        return r.row.case.flops / (sum(before) * r.row.case.rows / r.row.case.seqlen + kernel) / 1e6

    def of_exact(r: Result) -> str:
        other = exact.get((r.row.gpu, r.row.case))
        return f"{other.tflops():.1f}" if other else "-"

    columns = {
        "GPU": lambda r: r.row.gpu,
        "keys": lambda r: str(r.row.case.seqlen),
        "case": lambda r: r.row.case.kind,
        "headdim": lambda r: str(r.row.case.headdim),
        "fwd_fast": lambda r: f"{with_preparations(r):.1f}",
        "its forward kernel": lambda r: f"{r.row.case.flops / r.launches[0][-1]['us'] / 1e6:.1f}",
        "fwd": of_exact,
    }
    return [
        report.table("TFLOP/s of fwd_fast, of its forward kernel alone and of fwd", [r for r in results if r.row.case.op != "fwd"], columns)
    ]


# ---- float32 -----------------------------------------------------------------------------------------------------

FLOAT32_TEXT = """float32 tensors on a simulated V100 and T4: TFLOP/s of the call, with its casts, and of the attention kernel alone.

"highest" and "high" are PyTorch's settings (torch.set_float32_matmul_precision). 2048 queries and keys; a V100 has 32 heads, a T4 one for
each SM. Headdim 512 is a VAE: one head and 4096 tokens. The fp32 FMA pipes, without tensor cores, peak at 15.7 TFLOP/s (V100) and 8.1 (T4).
"""


@dataclass(frozen=True)
class PassCase(Case):
    """One pass. A subclass has its `calls`; `kind` is what it varies."""

    kind: str
    direction: str
    shape: Shape

    @property
    def flops(self) -> float:
        return volta.Case(self.direction, self.shape).flops


class Float32Case(PassCase):
    """A pass over float32 tensors. kind: the precision."""

    def calls(self, device: str) -> list[Work]:
        s = self.shape
        q, k, v, dout = (aligned((s.batch, n, s.nheads, s.headdim), torch.float32).zero_() for n in (s.seqlen_q, s.seqlen_k) * 2)
        lse = torch.zeros(s.batch, s.nheads, s.seqlen_q)

        def call() -> None:
            with float32_precision(self.kind):
                if self.direction == FORWARD:
                    torch.ops.volta_fa.fwd(q, k, v)
                else:
                    torch.ops.volta_fa.bwd(dout, q, k, v, q, lse)

        return [call]


def float32_rows(options: argparse.Namespace) -> list[Row]:
    found = []
    for gpu in options.gpu:
        heads = 32 if gpu == "v100" else GPUS[gpu].sms
        shapes = [*(Shape(1, heads, 2048, 2048, headdim) for headdim in (64, 128)), Shape(1, 1, 4096, 4096, 512)]
        for shape, precision, direction in itertools.product(shapes, ("highest", "high"), (FORWARD, BACKWARD)):
            case = Float32Case(precision, direction, shape)
            found.append(Row(f"{precision}, {direction}, headdim {shape.headdim}", case, gpu))
    return found


def float32_grids(results: Sequence[Result], _: argparse.Namespace) -> list[Grid]:
    columns = {
        "GPU": lambda r: r.row.gpu,
        "case": lambda r: r.row.name,
        **SPEEDS,
        "slowest kernel alone": lambda r: f"{r.row.case.flops / r.main['us'] / 1e6:.1f}",
    }
    return [report.table("float32: TFLOP/s by the default model, by a perfect instruction cache, of the slowest kernel", results, columns)]


# ---- batch invariance --------------------------------------------------------------------------------------------

INVARIANT_TEXT = """What `batch_invariant` costs on a simulated V100: microseconds of usual and of invariant calls, kernels alone.

Invariant calls fix the order of all sums, so a row has the same bits in any batch. 32 query heads on 8 KV heads, headdim 128, fp16:
decoding and a chunk of a prompt over pages of 16 tokens, and a dense causal prompt.
"""
#: Name, tokens of each sequence, queries of a sequence, and tokens of a page; 0: dense.
INVARIANT = [
    ("decode 1 x 65,536 tokens", (65536,), 1, 16),
    ("decode 1 x 16,384", (16384,), 1, 16),
    ("decode 32 x 4,096", (4096,) * 32, 1, 16),
    ("a chunk of 256 after 3,840 tokens, in a cache", (4096,), 256, 16),
    ("`fwd`, causal prompt of 4,096", (4096,), 4096, 0),
]


@dataclass(frozen=True)
class InvariantCase(Case):
    """A call under VOLTA_FA_BATCH_INVARIANT."""

    usual: decode.Case

    @property
    def flops(self) -> float:
        return self.usual.flops

    def calls(self, device: str) -> list[Work]:
        def invariant(work: Work) -> None:
            with environment(VOLTA_FA_BATCH_INVARIANT="1"):
                work()

        return [partial(invariant, work) for work in self.usual.calls(device)]


def invariant_rows(_: argparse.Namespace) -> list[Row]:
    found = []  # models: settings of volta-sim, a simulation for each; "": its default model
    for name, lengths, seqlen_q, page in INVARIANT:
        case = decode.Case(128, lengths, 4, seqlen_q, page, kv_heads=8)
        found += [Row(f"{name}, usual", case, models=("",)), Row(f"{name}, invariant", InvariantCase(case), models=("",))]
    return found


def invariant_grids(results: Sequence[Result], _: argparse.Namespace) -> list[Grid]:
    us = {r.row.name: r.us() for r in results}
    both = [name for name, *_ in INVARIANT if {f"{name}, usual", f"{name}, invariant"} <= us.keys()]
    columns = {
        "Case": lambda name: name,
        "Usual": lambda name: f"{us[f'{name}, usual']:.0f} us",
        "Invariant": lambda name: f"{us[f'{name}, invariant']:.0f} us",
        "Cost": lambda name: f"{us[f'{name}, invariant'] / us[f'{name}, usual'] - 1:+.0%}",
    }
    return [report.table("Usual and invariant calls", both, columns)]


# ---- options on a GPU ----------------------------------------------------------------------------------------------

FEATURES_TEXT = """Measures the cost of options on this machine's GPU, as a share of the plain pass, beside PyTorch's kernels.

TFLOP/s are of the whole op in fp16: 4 * B * H * M * N * D operations forward and 10 backward, half for causal. PyTorch's
figures are for the plain problem: its memory-efficient kernels and FlashAttention, where available. A bias is
(1, H, M, N), a mask (B, 1, M, N).
"""
FEATURES = ("", "causal", "packed", "softcap", "alibi", "bias", "mask", BIAS_GRADIENT, "dropout", volta.DETERMINISTIC)
#: PyTorch's kernels.
BACKENDS = {"efficient": SDPBackend.EFFICIENT_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}
#: A row is left out if its bias or mask takes more.
MOST_BYTES = 8 << 30


class PyTorchCase(PassCase):
    """scaled_dot_product_attention on PyTorch's kernels. kind: a key of BACKENDS."""

    def calls(self, device: str) -> list[Work]:
        s = self.shape
        lengths = (s.seqlen_q, s.seqlen_k, s.seqlen_k, s.seqlen_q)
        *leaves, dout = (torch.randn(s.batch, s.nheads, n, s.headdim, device=device, dtype=torch.float16) for n in lengths)
        leaves = [t.requires_grad_() for t in leaves]

        def forward() -> Tensor:
            with sdpa_kernel(BACKENDS[self.kind]):
                return scaled_dot_product_attention(*leaves, is_causal=s.causal)

        try:
            out = forward()
        except RuntimeError as error:
            raise NotImplementedError(str(error)) from error
        return [forward if self.direction == FORWARD else lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True)]


def add_feature_options(parser: argparse.ArgumentParser) -> None:
    shapes = [f"{b},32,{n},{n},{d}" for b, n in ((4, 8192), (1, 2048)) for d in (64, 128, 256)]
    parser.add_argument("--shapes", nargs="+", default=shapes, metavar="B,H,M,N,D")
    parser.set_defaults(device="cuda")


def feature_rows(options: argparse.Namespace) -> list[Row]:
    found = []
    for plain in map(Shape.parse, options.shapes):
        matrix = 2 * plain.seqlen_q * plain.seqlen_k  # bytes in fp16
        size = {"bias": matrix * plain.nheads, BIAS_GRADIENT: matrix * plain.nheads, "mask": matrix * plain.batch}
        for direction in (FORWARD, BACKWARD):
            for feature in FEATURES:
                case = volta.Case(direction, replace(plain, causal=feature == "causal"), feature=feature if feature != "causal" else "")
                if size.get(feature, 0) <= MOST_BYTES and (direction == BACKWARD or feature not in (BIAS_GRADIENT, volta.DETERMINISTIC)):
                    found.append(Row(f"{plain} {direction}, {feature or 'plain'}", case, gpu="", models=("",)))
            for kernels in BACKENDS:
                for causal in (False, True):
                    case = PyTorchCase(kernels, direction, replace(plain, causal=causal))
                    found.append(Row(f"{plain} {direction}, PyTorch {kernels}{', causal' * causal}", case, gpu="", models=("",)))
    return found


def feature_grids(results: Sequence[Result], _: argparse.Namespace) -> list[Grid]:
    plain = {r.row.name.removesuffix(", plain"): r.tflops() for r in results if r.row.name.endswith(", plain")}

    def of_plain(r: Result) -> str:
        speeds = [speed for name, speed in plain.items() if r.row.name.startswith(f"{name},")]
        return f"{r.tflops() / speeds[0]:.2f}" if speeds else "-"

    columns = {"B,H,M,N,D, pass and option": lambda r: r.row.name, "TFLOP/s": lambda r: f"{r.tflops():.1f}", "of plain": of_plain}
    return [report.table("Options on this GPU", results, columns)]


TABLES = {
    "targets": Benchmark(TARGETS_TEXT, target_rows, target_grids),
    "headdim_512": Benchmark(HEADDIM_512_TEXT, headdim_512_rows, headdim_512_grids, gpus=("v100", "t4", "rtx2080ti"), several_gpus=True),
    "fast": Benchmark(FAST_TEXT, lambda o: list(fast_rows(o)), fast_grids, add_fast_options, gpus=("rtx2080ti", "t4"), several_gpus=True),
    "float32": Benchmark(FLOAT32_TEXT, float32_rows, float32_grids, gpus=("v100", "t4"), several_gpus=True),
    "batch_invariant": Benchmark(INVARIANT_TEXT, invariant_rows, invariant_grids),
    "long_sequences": LONG_SEQUENCES,
    "indexer": sparse.INDEXER,
    "sparse_mla": sparse.SPARSE_MLA,
    "features": Benchmark(FEATURES_TEXT, feature_rows, feature_grids, add_feature_options),
}


def main(arguments: Sequence[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help"):
        print(__doc__)
        return 0
    if arguments[0] not in TABLES:
        raise CommandError(f"benchmarks.tables: got {arguments[0]}, expected one of {', '.join(TABLES)}")
    return run(f"tables {arguments[0]}", TABLES[arguments[0]], arguments[1:])


if __name__ == "__main__":
    report.command(main)
