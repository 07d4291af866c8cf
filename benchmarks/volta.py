"""Simulates the kernels on a V100, T4 or RTX 2080 Ti: TFLOP/s of the machine code for sm_70 or sm_75 that this build ships.

Each case calls torch.ops.volta_fa.fwd or .bwd on fp16 CPU tensors with VOLTA_FA_SIMULATE=timing: validation, plan, grid and parameter block
are those of a GPU. Then tools/volta-sim times one SM's part of every launch, with its default model and with a perfect instruction cache
(icache=false). No GPU takes part. "Of peak" is the share of the tensor pipe's rate at the boost clock, which a T4 rarely holds at its 70 W.

B is batch, H nheads, M seqlen_q, N seqlen_k, D headdim. TFLOP/s count 4*B*H*M*N*D operations forward and 10*B*H*M*N*D backward, half for
causal, over all kernels of the pass: backward's include row statistics, and zeroing and converting dq. Launch overhead is not counted.

Tensors are (batch, seqlen, nheads, headdim); "(B,H,S,D) views" are views of (batch, nheads, seqlen, headdim). The last rows of each pass
have one feature each:

    bias            (1, nheads, seqlen_q, seqlen_k) in fp16
    dbias           the bias's gradient too, on a V100 alone: there the kernels store it themselves
    deterministic   a backward pass whose sums have a fixed order

One more table has each feature as a share of "plain", the same shape without it. For a Turing chip, a first table has the tensor pipe's
shares at N=4096."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from . import driver, report
from .attention import Shape

# PIPES: parts of an SM by name; SPEEDS: columns of TFLOP/s by both models; Row: a case on a GPU; Result: its times
from .driver import GPUS, PIPES, SPEEDS, Benchmark, Gpu, Result, Row, run
from .measure import Work, aligned  # aligned(): an empty tensor, aligned as by CUDA's allocator
from .report import Grid, ratio, significant, times

FORWARD, BACKWARD = "forward", "backward"
#: What a call may use beyond a causal mask, each alone: "packed" has the batch's sequences in one tensor, given by cu_seqlens.
FEATURES = ("packed", "softcap", "alibi", "bias", "sinks", "dropout")
#: Features of a backward pass alone: the gradient of the bias too, and sums in a fixed order.
BIAS_GRADIENT, DETERMINISTIC = "dbias", "deterministic"

#: Tokens of the table of shares, and target shares of a Turing chip's tensor pipe by GPU, pass and headdim.
SHARES_AT = 4096
TARGETS = {
    "t4": {FORWARD: {64: 0.84, 128: 0.82, 256: 0.7}, BACKWARD: {64: 0.7, 128: 0.7, 256: 0.6}},
    "rtx2080ti": {FORWARD: dict.fromkeys((64, 128, 256), 0.8), BACKWARD: dict.fromkeys((64, 128, 256), 0.6)},
}


@dataclass(frozen=True)
class Case(driver.Case):
    """One forward or backward pass. `str` names its row."""

    direction: str  # FORWARD or BACKWARD
    shape: Shape
    heads_first: bool = False  # views of (batch, nheads, seqlen, headdim) memory
    feature: str = ""  # one of FEATURES, BIAS_GRADIENT, DETERMINISTIC, or "mask", a boolean one (benchmarks.tables features)

    def __str__(self) -> str:
        s = self.shape
        heads = f"H={s.nheads}" if s.nheads == s.nheads_k else f"H={s.nheads} on {s.nheads_k}"
        headdim = f"D={s.headdim}" if s.headdim == s.headdim_v else f"D={s.headdim}/{s.headdim_v}"
        parts = [self.direction, headdim, f"N={s.seqlen_q}", heads] + [f"B={s.batch}"] * (s.batch > 1)
        return " ".join(parts + ["causal"] * s.causal + ["(B,H,S,D) views"] * self.heads_first + [self.feature] * bool(self.feature))

    @property
    def flops(self) -> float:
        return self.shape.forward_flops if self.direction == FORWARD else self.shape.backward_flops

    def calls(self, device: str) -> list[Work]:
        s = self.shape
        q = self._randn(s.seqlen_q, s.nheads, s.headdim, device, seed=0)
        k = self._randn(s.seqlen_k, s.nheads_k, s.headdim, device, seed=1)
        v = self._randn(s.seqlen_k, s.nheads_k, s.headdim_v, device, seed=2)
        if self.direction == BACKWARD:
            dout = self._randn(s.seqlen_q, s.nheads, s.headdim_v, device, seed=3)
            out, softmax_lse = forward_results(dout, s.seqlen_k)
        options = {"is_causal": s.causal, **self._options(device)}
        if self.feature == "packed":
            q, k, v = (t.flatten(0, 1) for t in (q, k, v))
        if self.direction == FORWARD:
            return [lambda: torch.ops.volta_fa.fwd(q, k, v, **options)]
        if self.feature == "packed":
            dout, out = (t.flatten(0, 1) for t in (dout, out))
            softmax_lse = softmax_lse.view(s.nheads, -1)
        if self.feature == "dropout":
            options["rng_state"] = torch.zeros(2, dtype=torch.int64, device=device)
        return [lambda: torch.ops.volta_fa.bwd(dout, q, k, v, out, softmax_lse, **options)]

    def _randn(self, seqlen: int, nheads: int, headdim: int, device: str, seed: int) -> Tensor:
        batch = self.shape.batch
        size = (batch, nheads, seqlen, headdim) if self.heads_first else (batch, seqlen, nheads, headdim)
        t = aligned(size, torch.float16, device)
        t.copy_(torch.randn(size, generator=torch.Generator().manual_seed(seed)))
        return t.transpose(1, 2) if self.heads_first else t

    def _options(self, device: str) -> dict:
        """Returns the operator's arguments for the case's feature. Their values hardly change the time."""
        s = self.shape
        if "bias" in self.feature:
            options: dict = {"attn_bias": aligned((1, s.nheads, s.seqlen_q, s.seqlen_k), torch.float16, device).zero_()}
            return options | ({"attn_bias_requires_grad": True} if self.feature == BIAS_GRADIENT else {})
        if self.feature == "mask":
            return {"attn_bias": torch.rand(s.batch, 1, s.seqlen_q, s.seqlen_k, device=device) > 0.1}
        if self.feature == "packed":
            ends = torch.arange(s.batch + 1, dtype=torch.int32, device=device) * s.seqlen_q
            return {"cu_seqlens_q": ends, "cu_seqlens_k": ends, "max_seqlen_q": s.seqlen_q, "max_seqlen_k": s.seqlen_k}
        return {
            "": {},
            "softcap": {"softcap": 30.0},
            "alibi": {"alibi_slopes": torch.ones(s.nheads, device=device)},
            "sinks": {"sinks": torch.zeros(s.nheads, device=device)},
            "dropout": {"dropout_p": 0.1},
            DETERMINISTIC: {"deterministic": True},
        }[self.feature]


def forward_results(dout: Tensor, seqlen_k: int) -> tuple[Tensor, Tensor]:
    """Returns stand-ins for the forward's out and softmax_lse, whose simulation would take hours. No time depends on their values.

    The scores of normal q and k have variance 1, so the log of the sum of N exponentials is about log(N) + 1/2."""
    batch, seqlen_q, nheads, _ = dout.shape
    lse = aligned((batch, nheads, seqlen_q), torch.float32, dout.device).fill_(math.log(seqlen_k) + 0.5)
    return aligned(dout.shape, dout.dtype, dout.device).zero_(), lse


# ---- cases -------------------------------------------------------------------------------------------------------


def usual_heads(direction: str, gpu: str) -> int:
    """Returns enough heads for all SMs: 32 or 40 on a V100, and on a Turing chip one for each SM, so that all get as many blocks."""
    if gpu == "v100":
        return 32 if direction == FORWARD else 40
    return GPUS[gpu].sms


def cases(gpu: str = "v100") -> list[Case]:
    """Returns the cases of a GPU: curves over N for each headdim, then grouped heads, odd lengths, views and small grids, then features."""
    found = []
    for direction in (FORWARD, BACKWARD):
        heads = usual_heads(direction, gpu)
        # to simulate a longer backward pass takes minutes
        longest = 4096 if direction == FORWARD or gpu != "v100" else 2048

        def add(n: int, d: int, causal: bool = False, nheads: int = heads, heads_first: bool = False, **shape: int) -> None:
            found.append(Case(direction, Shape(1, nheads, n, n, d, causal, **shape), heads_first))

        for d in (64, 128):
            for n in (512, 1024, 2048, 4096):
                if n <= longest:
                    add(n, d)
                add(n, d, causal=True)
        for d in (32, 96, 192, 256):
            for n in (512, 1024, 2048):
                if direction == FORWARD or n < 2048:
                    add(n, d)
        if gpu != "v100":
            add(SHARES_AT, 256)
        add(1024, 192, headdim_v=128)
        for d in (64, 128):
            add(2048, d, nheads=32, nheads_k=8)
            add(2047, d)
            add(1111, d)
            add(2048, d, heads_first=True)
        add(1024, 64, nheads=16)
        add(512, 128, nheads=8)
        features = FEATURES if direction == FORWARD else (*FEATURES, *[BIAS_GRADIENT] * (gpu == "v100"), DETERMINISTIC)
        found += [Case(direction, Shape(1, heads, 2048, 2048, d), feature=f) for d in (64, 128) for f in features]
    return found


def in_short(listed: Sequence[Case], gpu: str) -> list[Case]:
    """Returns the cases of --short: those of the table of shares, and features with the plain cases that they compare with."""
    without = {(c.direction, c.shape) for c in listed if c.feature}
    return [c for c in listed if c.feature or ((c.direction, c.shape) in without and not c.heads_first) or _is_share(c, gpu)]


def _is_share(case: Case, gpu: str) -> bool:
    """Returns whether the case is in the table of shares."""
    return gpu in TARGETS and _is_plain(case, gpu) and not case.shape.causal and case.shape.seqlen_q == SHARES_AT


def _is_plain(case: Case, gpu: str) -> bool:
    """Returns whether the case has the usual number of heads, one headdim and no feature."""
    s = case.shape
    usual = s.nheads == s.nheads_k == usual_heads(case.direction, gpu) and s.headdim_v == s.headdim
    return usual and not case.heads_first and not case.feature


def quick_cases() -> list[Case]:
    """Returns the cases of --quick, which tests whether the command works at all: one small case for each pass and two headdims."""
    return [
        Case(direction, Shape(1, 4, 200, 200, d, causal, nheads_k=2))
        for direction in (FORWARD, BACKWARD)
        for d, causal in ((64, True), (128, False))
    ]


def rows_of(options: argparse.Namespace) -> list[Row]:
    (gpu,) = options.gpu
    listed = quick_cases() if options.quick else cases(gpu)
    return [Row(str(case), case, gpu) for case in (in_short(listed, gpu) if options.short else listed)]


# ---- other projects' kernels -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PublishedResult:
    """A kernel whose machine code (sm_70, compiled with NVRTC 12.9) ran in tools/volta-sim, as ours does."""

    name: str
    direction: str  # FORWARD or BACKWARD
    headdim: int
    seqlen: int
    causal: bool
    tflops: float  # simulated with the default model
    tflops_no_icache: float | None  # simulated with a perfect instruction cache (`icache=false`)
    row: int  # number of its row in the table of docs/validation/real-cards.md
    published: float | None = None  # TFLOP/s that its author measured on a V100


_PYTORCH = "PyTorch efficient (CUTLASS)"
_ZHINIANQIN = "zhinianqin/flash-attention-v100"
_AI_BOND = "ai-bond/flash-attention-v100"
# PyTorch, D=64 to 128: what scaled_dot_product_attention runs on a V100. zhinianqin: 32 heads on 8, computed from its times
# in milliseconds; published times include about 0.1 ms of host work.
PUBLISHED_RESULTS = (
    PublishedResult(_PYTORCH, FORWARD, 64, 1024, False, 21.3, 25.9, 3),
    PublishedResult(_PYTORCH, FORWARD, 64, 2048, False, 26.5, 32.3, 3),
    PublishedResult(_PYTORCH, FORWARD, 128, 2048, False, 36.9, 42.5, 3),
    PublishedResult(_PYTORCH, BACKWARD, 64, 1024, False, 24.0, 35.5, 3),
    PublishedResult(_PYTORCH, BACKWARD, 128, 1024, False, 30.5, 36.0, 3),
    PublishedResult(_ZHINIANQIN, FORWARD, 128, 1024, True, 14.4, 20.5, 1, 9.2),
    PublishedResult(_ZHINIANQIN, FORWARD, 128, 2048, True, 18.2, 25.9, 1, 14.3),
    PublishedResult(_ZHINIANQIN, FORWARD, 128, 4096, True, 21.3, 30.2, 1, 17.9),
    PublishedResult(_ZHINIANQIN, FORWARD, 128, 8192, True, 22.5, 31.9, 1, 20.0),
    PublishedResult(_AI_BOND, FORWARD, 64, 1024, False, 17.5, None, 2),
    PublishedResult(_AI_BOND, FORWARD, 64, 1024, True, 13.5, None, 2),
)

#: TFLOP/s of a simulated CUTLASS GEMM, 4096^3, on a V100: what dense matrix products reach in practice.
GEMM_TFLOPS = 98.5


# ---- results -----------------------------------------------------------------------------------------------------


def grids(results: Sequence[Result], options: argparse.Namespace) -> list[Grid]:
    (gpu,) = options.gpu
    by_pass = {direction: [r for r in results if r.row.case.direction == direction] for direction in (FORWARD, BACKWARD)}
    found = [_share_grid(results, gpu)] + [_grid(direction, GPUS[gpu], of) for direction, of in by_pass.items() if of]
    return [*found, _feature_grid(results, gpu), *([_peer_grid(results)] if gpu == "v100" else [])]


def _share_grid(results: Sequence[Result], gpu: str) -> Grid:
    shares = [r for r in results if _is_share(r.row.case, gpu)]
    return report.table(
        f"Simulated {GPUS[gpu].title}: share of the tensor pipe at N={SHARES_AT}, and what the main kernel's time goes to",
        sorted(shares, key=lambda r: (r.row.case.direction != FORWARD, r.row.case.shape.headdim)),
        {
            "pass": lambda r: f"{r.row.case.direction} D={r.row.case.shape.headdim}",
            "target": lambda r: f"{TARGETS[gpu][r.row.case.direction][r.row.case.shape.headdim]:.0%}",
            "share": lambda r: f"{r.share():.1%}",
            "perfect i-cache": lambda r: f"{r.share(1):.1%}",
            **{f"busy: {title}": lambda r, name=name: f"{r.main['pipes'][name]:.0%}" for name, title in PIPES.items()},
            "warps wait for": lambda r: r.waits(3),
        },
    )


def _feature_grid(results: Sequence[Result], gpu: str) -> Grid:
    features = (*FEATURES, BIAS_GRADIENT, DETERMINISTIC)
    grid = Grid(f"Simulated {GPUS[gpu].title}: a feature's share of plain's speed", ["pass", *features])
    found = {r.row.case: r.tflops() for r in results}
    plain = dict.fromkeys((c.direction, c.shape) for c in found if c.feature)
    for direction, shape in plain:
        without = found.get(Case(direction, shape))
        shares = [ratio(found.get(Case(direction, shape, feature=f)), without) for f in features]
        if any(shares):
            grid.rows.append([str(Case(direction, shape)), *("-" if share is None else f"{share:.2f}" for share in shares)])
    return grid


def _grid(direction: str, gpu: Gpu, results: Sequence[Result]) -> Grid:
    def excess(r: Result) -> str:
        found = r.main["excess_wavefront_fraction"]
        return "-" if found is None else f"{found:.1%}"

    return report.table(
        f"Simulated {gpu.title}, {direction} (TFLOP/s: default model, perfect instruction cache)",
        results,
        {
            "case": lambda r: r.row.name.removeprefix(direction + " "),
            **SPEEDS,
            "of peak": lambda r: f"{r.share():.0%}",
            "kernel": lambda r: r.main["kernel"],
            "registers": lambda r: str(r.main["registers"]),
            "shared, KB": lambda r: significant(r.main["shared_bytes"] / 1024),
            "spills": lambda r: str(sum(launch["spill_instructions"] for launch in r.launches[0])),
            "excess wavefronts": excess,
            "loop, KB": lambda r: "-" if r.main["loop_bytes"] is None else f"{r.main['loop_bytes'] / 1024:.1f}",
        },
    )


def _peer_grid(results: Sequence[Result]) -> Grid:
    """Returns the table of other projects' kernels for which `results` have the same case."""
    # reversed, so that of several numbers of heads the first, the usual one, stays
    ours = {peer: result for peer in PUBLISHED_RESULTS for result in reversed(results) if _same_case(result.row.case, peer)}

    def speedups(peer: PublishedResult) -> str:
        by_default, without_icache = ratio(ours[peer].tflops(), peer.tflops), ratio(ours[peer].tflops(1), peer.tflops_no_icache)
        return f"{times(by_default)} / {times(without_icache)}"

    return report.table(
        "Ours beside the peers' recorded figures (simulated, default model / perfect instruction cache)",
        ours,
        {
            "peer": lambda peer: peer.name,
            "case": lambda peer: f"{peer.direction} D={peer.headdim} N={peer.seqlen}{' causal' if peer.causal else ''}",
            "theirs": lambda peer: f"{peer.tflops} / {significant(peer.tflops_no_icache)}",
            "published, real V100": lambda peer: significant(peer.published),
            "ours": lambda peer: f"{ours[peer].tflops():.1f} / {ours[peer].tflops(1):.1f}",
            "times as fast": speedups,
            "record": lambda peer: f"docs/validation/real-cards.md row {peer.row}",
        },
    )


def _same_case(case: Case, peer: PublishedResult) -> bool:
    s = case.shape
    plain = s.nheads == s.nheads_k and s.headdim == s.headdim_v == peer.headdim and not case.heads_first and not case.feature
    return plain and (case.direction, s.seqlen_q, s.causal) == (peer.direction, peer.seqlen, peer.causal)


_TICKS = (512, 1024, 2048, 4096, 8192)


def plot(results: Sequence[Result], options: argparse.Namespace, header: dict[str, str], path: Path) -> None:
    (gpu,) = options.gpu
    facts = GPUS[gpu]
    title = f"volta_fa on a simulated {facts.title}, {header['date']}; solid: default model, dashed: perfect instruction cache"
    figure, axes = report.panels(2, 2, title, (12, 9), sharex=True, sharey=True)
    peers = PUBLISHED_RESULTS if gpu == "v100" else ()
    markers = dict(zip(dict.fromkeys(p.name for p in peers), "XPs"))
    for down, direction in enumerate((FORWARD, BACKWARD)):
        for across, causal in enumerate((False, True)):
            axis = axes[down][across]
            for headdim, color in report.HEADDIM_COLORS.items():
                curve = [r for r in results if _on_curve(r.row.case, gpu, direction, headdim, causal)]
                n = [r.row.case.shape.seqlen_q for r in curve]
                if curve:
                    axis.plot(n, [r.tflops() for r in curve], "o-", color=color, label=f"D={headdim}", markersize=4)
                    axis.plot(n, [r.tflops(1) for r in curve], "--", color=color, linewidth=0.9)
            for peer in peers:
                if (peer.direction, peer.causal) == (direction, causal):
                    color = report.HEADDIM_COLORS[peer.headdim]
                    axis.plot(peer.seqlen, peer.tflops, markers[peer.name], color=color, label=f"{peer.name}, D={peer.headdim}")
            if gpu == "v100":
                axis.axhline(GEMM_TFLOPS, color="#999999", linewidth=0.8, linestyle=":", label="CUTLASS GEMM 4096³")
            axis.set_xscale("log", base=2)
            axis.set_xticks(_TICKS, map(str, _TICKS))
            axis.set(xlim=(_TICKS[0] * 0.9, _TICKS[-1] * 1.1), ylim=(0, 0.84 * facts.peak_tflops), xlabel="N", ylabel="simulated TFLOP/s")
            axis.set_title(f"{direction}, {'causal' if causal else 'not causal'}")
    report.shared_legend(figure, axes)
    report.save(figure, path)


def _on_curve(case: Case, gpu: str, direction: str, headdim: int, causal: bool) -> bool:
    """Returns whether the plot has the case: plain ones at powers of two."""
    s = case.shape
    power_of_two = s.seqlen_q & (s.seqlen_q - 1) == 0
    return _is_plain(case, gpu) and power_of_two and (case.direction, s.headdim, s.causal) == (direction, headdim, causal)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--short", action="store_true", help="only the cases of the tables of shares and of features")
    parser.add_argument("--quick", action="store_true", help="four small cases: does it work at all?")


def main(arguments: Sequence[str]) -> int:
    return run("volta", Benchmark(__doc__, rows_of, grids, add_options, plot), arguments)


if __name__ == "__main__":
    report.command(main)
