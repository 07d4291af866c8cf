"""The kernels on a simulated V100, T4 or RTX 2080 Ti: TFLOP/s of the machine code for sm_70 or sm_75 that this build ships.

Each case calls torch.ops.volta_fa.fwd or .bwd on fp16 CPU tensors with VOLTA_FA_SIMULATE=timing: validation, plan,
grid and parameter block are those of a GPU; then tools/volta-sim times one SM's share of every launch, with its default
model and with a perfect instruction cache (icache=false). Nothing here is measured: no such GPU takes part. "Of peak" is the
share of the tensor pipe's rate: what it is worth in TFLOP/s depends on the clock, which a T4's 70 W rarely leave at its boost.

TFLOP/s count 4*B*H*M*N*D operations forward and 10*B*H*M*N*D backward, half for causal, over the sum of all kernels of
the pass: backward's includes the row statistics, the zeroing and the conversion of dq. Launch overhead is not counted.

--json writes a list with, for each case, its shape and
    tflops, tflops_no_icache     of the whole pass, with the default model and with a perfect instruction cache
    registers, shared_bytes      of the main kernel (the slowest of the pass)
    spill_instructions           accesses to local memory in the code of all kernels of the pass
    excess_wavefront_fraction    shared-memory wavefronts of the main loop beyond a conflict-free layout's, relative to it
    loop_bytes                   code of the main loop, from its first to its last instruction
    pipes                        of the main kernel, with the default model: the share of time that parts of an SM are busy
    balance                      of the main kernel: work of the average SM, relative to that of the busiest
    waits                        of the main kernel, with the default model: what warps that do not issue wait for, of all warps' time
The last rows of each pass ask for one feature each: a bias is (1, nheads, seqlen_q, seqlen_k) in fp16 and has no gradient but
in the case dbias (Volta's kernels write all of that one, so PyTorch's kernels have no part in it);
deterministic is a backward pass whose sums have a fixed order. One more table has each as a share of plain, the same shape without it.
Of a Turing chip, which has one head for each SM in all plain cases, a first table has the shares of the tensor pipe at N=4096.
Tensors are (batch, seqlen, nheads, headdim), but for one case of each pass and headdim 64 and 128, beside the same case
in the plain layout: (batch, nheads, seqlen, headdim) memory seen through a transposed view.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

import volta_fa
from volta_fa.errors import CommandError

from . import plots, report
from .measure import aligned, launched, simulated
from .published_results import GEMM_TFLOPS, PUBLISHED_RESULTS, PublishedResult
from .report import Grid, ratio, significant, times
from .shapes import Shape


@dataclass(frozen=True)
class Gpu:
    """A GPU that volta-sim models."""

    title: str
    device: str
    sms: int
    mma_flops: int  # a clock and SM, fp16 operands and fp32 accumulators
    ghz: float
    gemm_tflops: float | None = None  # what dense matrix products reach in the simulator

    @property
    def peak_tflops(self) -> float:
        return self.sms * self.mma_flops * self.ghz / 1e3


#: By their names in VOLTA_FA_SIM_GPU.
GPUS = {
    "v100": Gpu("V100", "V100 SXM2, 80 SMs at 1.53 GHz", 80, 1024, 1.53, GEMM_TFLOPS),
    "t4": Gpu("T4", "T4, 40 SMs at 1.59 GHz", 40, 1024, 1.59),
    "rtx2080ti": Gpu("RTX 2080 Ti", "RTX 2080 Ti, 68 SMs at 1.545 GHz", 68, 512, 1.545),
    "titanrtx": Gpu("Titan RTX", "Titan RTX, 72 SMs at 1.77 GHz", 72, 1024, 1.77),
}
FORWARD, BACKWARD = "forward", "backward"
#: What a call may ask for beyond the mask, each alone: "packed" has the batch's sequences in one tensor, given by cu_seqlens.
FEATURES = ("packed", "softcap", "alibi", "bias", "sinks", "dropout")
#: The same of a backward pass: the gradient of the bias too, and sums in a fixed order.
BIAS_GRADIENT, DETERMINISTIC = "dbias", "deterministic"

#: Where the shares of a Turing chip's tensor pipe are quoted, and what they are meant to be at least.
SHARES_AT = 4096
AIMS = {
    "t4": {FORWARD: {64: 0.7, 128: 0.7, 256: 0.6}, BACKWARD: {64: 0.5, 128: 0.5, 256: 0.4}},
    "rtx2080ti": {FORWARD: dict.fromkeys((64, 128, 256), 0.8), BACKWARD: dict.fromkeys((64, 128, 256), 0.6)},
}
#: Parts of an SM that can bound a kernel, by their names in the simulator's reports.
PIPES = {"tensor": "tensor", "mio": "shared memory, L1", "xu": "XU", "issue": "issue slots"}
#: What warps wait for.
WAITS = {
    "barrier": "barriers",
    "fixed_latency": "the instruction before",
    "long_scoreboard": "global memory",
    "no_instruction": "instructions",
    "pipe_busy": "pipes",
    "short_scoreboard": "shared memory",
    "tensor_scoreboard": "HMMA's scoreboard",
    "xu_scoreboard": "XU",
}


@dataclass(frozen=True)
class Case:
    direction: str
    shape: Shape
    heads_first: bool = False  # views of (batch, nheads, seqlen, headdim) memory
    feature: str = ""  # one of FEATURES, BIAS_GRADIENT or DETERMINISTIC

    def __str__(self) -> str:
        s = self.shape
        heads = f"H={s.nheads}" if s.nheads == s.nheads_k else f"H={s.nheads} on {s.nheads_k}"
        headdim = f"D={s.headdim}" if s.headdim == s.headdim_v else f"D={s.headdim}/{s.headdim_v}"
        parts = [self.direction, headdim, f"N={s.seqlen_q}", heads] + [f"B={s.batch}"] * (s.batch > 1)
        return " ".join(parts + ["causal"] * s.causal + ["(B,H,S,D) views"] * self.heads_first + [self.feature] * bool(self.feature))


@dataclass(frozen=True)
class Figures:
    """The simulator's figures of one pass: the fields of --json after the shape's."""

    tflops: float
    tflops_no_icache: float
    registers: int
    shared_bytes: int
    spill_instructions: int
    excess_wavefront_fraction: float | None
    loop_bytes: int | None
    pipes: dict[str, float]  # PIPES
    balance: float
    waits: dict[str, float]  # WAITS


@dataclass(frozen=True)
class Row:
    case: Case
    figures: Figures
    kernel: str  # the main one
    kernel_us: dict[str, float]  # of all, with the default model

    def data(self) -> dict:
        s = self.case.shape
        return {
            "pass": self.case.direction,
            "headdim": s.headdim,
            "headdim_v": s.headdim_v,
            "seqlen_q": s.seqlen_q,
            "seqlen_k": s.seqlen_k,
            "nheads": s.nheads,
            "nheads_k": s.nheads_k,
            "batch": s.batch,
            "causal": s.causal,
            "heads_first": self.case.heads_first,
            "feature": self.case.feature,
            **asdict(self.figures),
        }


# ---- cases -------------------------------------------------------------------------------------------------------


def usual_heads(direction: str, gpu: str) -> int:
    """Enough heads for all SMs: on 80 of them as in the kernel studies, on a Turing chip one for each, so that whatever blocks a head has,
    all SMs get as many."""
    if gpu == "v100":
        return 32 if direction == FORWARD else 40
    return GPUS[gpu].sms


def cases(gpu: str = "v100") -> list[Case]:
    """Curves over N for each headdim, then grouped heads, odd lengths, views and small grids, then features."""
    found = []
    for direction in (FORWARD, BACKWARD):
        heads = usual_heads(direction, gpu)
        # a backward pass of these takes minutes
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
        found += [Case(direction, Shape(1, heads, 2048, 2048, d, False), feature=f) for d in (64, 128) for f in features]
    return found


def in_short(listed: Sequence[Case], gpu: str) -> list[Case]:
    """Those of the tables of shares and of features."""
    without = {(c.direction, c.shape) for c in listed if c.feature}
    return [c for c in listed if c.feature or ((c.direction, c.shape) in without and not c.heads_first) or _is_share(c, gpu)]


def _is_share(case: Case, gpu: str) -> bool:
    """Returns whether the case is in the table of shares."""
    return gpu in AIMS and _is_plain(case, gpu) and not case.shape.causal and case.shape.seqlen_q == SHARES_AT


def _is_plain(case: Case, gpu: str) -> bool:
    """Returns whether the case has the usual number of heads, one headdim and no feature."""
    s = case.shape
    usual = s.nheads == s.nheads_k == usual_heads(case.direction, gpu) and s.headdim_v == s.headdim
    return usual and not case.heads_first and not case.feature


def quick_cases() -> list[Case]:
    """One small case for each pass and two headdims: does it work at all?"""
    return [
        Case(direction, Shape(1, 4, 200, 200, d, causal, nheads_k=2))
        for direction in (FORWARD, BACKWARD)
        for d, causal in ((64, True), (128, False))
    ]


# ---- simulation --------------------------------------------------------------------------------------------------


def simulate(case: Case, gpu: str = "v100") -> Row | None:
    """Time one case with both machine models; None if there are no kernels for it. The environment of this process changes meanwhile."""
    try:
        default, no_icache = (_launch(case, gpu, settings) for settings in ("", "icache=false"))
    except NotImplementedError:
        return None
    main = max(default, key=_microseconds)
    loop = main["timing"]["hot_loop"]
    flops = case.shape.forward_flops if case.direction == FORWARD else case.shape.backward_flops

    def tflops(reports: list[dict]) -> float:
        return flops / sum(map(_microseconds, reports)) / 1e6

    return Row(
        case,
        Figures(
            tflops=tflops(default),
            tflops_no_icache=tflops(no_icache),
            registers=main["registers"],
            shared_bytes=main["static_smem"] + main["dynamic_smem"],
            spill_instructions=sum(r["spill_insts_static"] for r in default),
            excess_wavefront_fraction=loop and loop["smem_conflict_excess"],
            loop_bytes=loop and loop["code_bytes"],
            pipes={name: main["timing"]["util"][name] for name in PIPES},
            balance=main["timing"]["balance"],
            waits={name: main["timing"]["stall_fraction"][name] for name in WAITS},
        ),
        main["kernel"],
        {r["kernel"]: _microseconds(r) for r in default},
    )


def _microseconds(launch: dict) -> float:
    return launch["timing"]["kernel_us"]


def _launch(case: Case, gpu: str, settings: str) -> list[dict]:
    """The simulator's reports on the launches of a pass, one for each kernel."""
    s = case.shape
    q = _randn(s, s.seqlen_q, s.nheads, s.headdim, case.heads_first, seed=0)
    k = _randn(s, s.seqlen_k, s.nheads_k, s.headdim, case.heads_first, seed=1)
    v = _randn(s, s.seqlen_k, s.nheads_k, s.headdim_v, case.heads_first, seed=2)
    if case.direction == BACKWARD:
        dout = _randn(s, s.seqlen_q, s.nheads, s.headdim_v, case.heads_first, seed=3)
        # Stand-ins for a forward's results, which would take hours: no time depends on their values. The scores of
        # normal q and k have variance 1, so the log of the sum of N exponentials is about log(N) + 1/2.
        out = aligned(dout.shape, dout.dtype).zero_()
        softmax_lse = aligned((s.batch, s.nheads, s.seqlen_q), torch.float32).fill_(math.log(s.seqlen_k) + 0.5)
    options = {"is_causal": s.causal, **_options(case)}
    if case.feature == "packed":
        q, k, v = (t.flatten(0, 1) for t in (q, k, v))
    if case.direction == FORWARD:
        return simulated(lambda: torch.ops.volta_fa.fwd(q, k, v, **options), settings, gpu)
    if case.feature == "packed":
        dout, out = (t.flatten(0, 1) for t in (dout, out))
        softmax_lse = softmax_lse.view(s.nheads, -1)
    if case.feature == "dropout":
        options["rng_state"] = torch.zeros(2, dtype=torch.int64)
    return simulated(lambda: torch.ops.volta_fa.bwd(dout, q, k, v, out, softmax_lse, **options), settings, gpu)


def _options(case: Case) -> dict:
    """The op's arguments for the case's feature. Values hardly change the time."""
    s = case.shape
    if "bias" in case.feature:
        bias = aligned((1, s.nheads, s.seqlen_q, s.seqlen_k), torch.float16).zero_()
        options: dict = {"attn_bias": bias}
        if case.feature == BIAS_GRADIENT:
            options["attn_bias_requires_grad"] = True
        return options
    if case.feature == "packed":
        ends = torch.arange(s.batch + 1, dtype=torch.int32) * s.seqlen_q
        return {"cu_seqlens_q": ends, "cu_seqlens_k": ends, "max_seqlen_q": s.seqlen_q, "max_seqlen_k": s.seqlen_k}
    return {
        "": {},
        "softcap": {"softcap": 30.0},
        "alibi": {"alibi_slopes": torch.ones(s.nheads)},
        "sinks": {"sinks": torch.zeros(s.nheads)},
        "dropout": {"dropout_p": 0.1},
        DETERMINISTIC: {"deterministic": True},
    }[case.feature]


def _randn(s: Shape, seqlen: int, nheads: int, headdim: int, heads_first: bool, seed: int) -> Tensor:
    size = (s.batch, nheads, seqlen, headdim) if heads_first else (s.batch, seqlen, nheads, headdim)
    t = aligned(size, torch.float16)
    t.copy_(torch.randn(size, generator=torch.Generator().manual_seed(seed)))
    return t.transpose(1, 2) if heads_first else t


def simulate_all(chosen: Sequence[Case], gpu: str, jobs: int) -> tuple[list[Row], list[Case]]:
    """The rows, and the cases that there are no kernels for."""
    with report.progress() as bar:
        task = bar.add_task(f"simulated {GPUS[gpu].title}", total=len(chosen))
        rows, missing = [], []
        for case, row in zip(chosen, _in_order(chosen, gpu, jobs)):
            if row:
                rows.append(row)
                launched.update(row.kernel_us)
            else:
                missing.append(case)
            bar.update(task, advance=1, description=str(case))
    return rows, missing


def _in_order(chosen: Sequence[Case], gpu: str, jobs: int) -> Iterator[Row | None]:
    if jobs == 1:
        yield from (simulate(case, gpu) for case in chosen)
        return
    # Processes, because the simulator's settings are the process' environment.
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        yield from pool.map(simulate, chosen, [gpu] * len(chosen))


# ---- results -----------------------------------------------------------------------------------------------------


def grids(rows: Sequence[Row], gpu: str) -> list[Grid]:
    by_pass = {direction: [r for r in rows if r.case.direction == direction] for direction in (FORWARD, BACKWARD)}
    found = [_share_grid(rows, gpu)] + [_grid(direction, GPUS[gpu], of) for direction, of in by_pass.items() if of]
    found.append(_feature_grid(rows, gpu))
    if gpu == "v100":
        found.append(_peer_grid(rows))
    return [grid for grid in found if grid.rows]


def _share_grid(rows: Sequence[Row], gpu: str) -> Grid:
    grid = Grid(
        f"Simulated {GPUS[gpu].title}: share of the tensor pipe at N={SHARES_AT}, and what the main kernel's time goes to",
        ["pass", "target", "share", "perfect i-cache", *(f"busy: {name}" for name in PIPES.values()), "warps wait for"],
    )
    peak = GPUS[gpu].peak_tflops
    for row in sorted((r for r in rows if _is_share(r.case, gpu)), key=lambda r: (r.case.direction != FORWARD, r.case.shape.headdim)):
        f, headdim = row.figures, row.case.shape.headdim
        waits = sorted(f.waits, key=lambda name: -f.waits[name])[:3]
        grid.rows.append(
            [
                f"{row.case.direction} D={headdim}",
                f"{AIMS[gpu][row.case.direction][headdim]:.0%}",
                f"{f.tflops / peak:.1%}",
                f"{f.tflops_no_icache / peak:.1%}",
                *(f"{f.pipes[name]:.0%}" for name in PIPES),
                ", ".join(f"{WAITS[name]} {f.waits[name]:.0%}" for name in waits),
            ]
        )
    return grid


def _feature_grid(rows: Sequence[Row], gpu: str) -> Grid:
    features = (*FEATURES, BIAS_GRADIENT, DETERMINISTIC)
    grid = Grid(f"Simulated {GPUS[gpu].title}: a feature's share of plain's speed", ["pass", *features])
    found = {row.case: row.figures.tflops for row in rows}
    plain = dict.fromkeys((c.direction, c.shape) for c in found if c.feature)
    for direction, shape in plain:
        whole = found.get(Case(direction, shape))
        shares = [ratio(found.get(Case(direction, shape, feature=f)), whole) for f in features]
        if any(shares):
            name = str(Case(direction, shape))
            grid.rows.append([name, *("-" if share is None else f"{share:.2f}" for share in shares)])
    return grid


def _grid(direction: str, gpu: Gpu, rows: Sequence[Row]) -> Grid:
    grid = Grid(
        f"Simulated {gpu.title}, {direction} (TFLOP/s: default model, perfect instruction cache)",
        ["case", "TFLOP/s", "perfect i-cache", "of peak", "kernel", "registers", "shared, KB", "spills", "excess wavefronts", "loop, KB"],
    )
    for row in rows:
        f = row.figures
        excess = "-" if f.excess_wavefront_fraction is None else f"{f.excess_wavefront_fraction:.1%}"
        grid.rows.append(
            [
                str(row.case).removeprefix(direction + " "),
                f"{f.tflops:.1f}",
                f"{f.tflops_no_icache:.1f}",
                f"{f.tflops / gpu.peak_tflops:.0%}",
                row.kernel,
                str(f.registers),
                significant(f.shared_bytes / 1024),
                str(f.spill_instructions),
                excess,
                "-" if f.loop_bytes is None else f"{f.loop_bytes / 1024:.1f}",
            ]
        )
    return grid


def _peer_grid(rows: Sequence[Row]) -> Grid:
    grid = Grid(
        "Ours beside the peers' recorded figures (simulated, default model / perfect instruction cache)",
        ["peer", "case", "theirs", "published, real V100", "ours", "times as fast", "record"],
    )
    for peer in PUBLISHED_RESULTS:
        ours = next((row.figures for row in rows if _same_case(row.case, peer)), None)
        if ours is None:
            continue
        speedups = (ratio(ours.tflops, peer.tflops), ratio(ours.tflops_no_icache, peer.tflops_no_icache))
        grid.rows.append(
            [
                peer.name,
                f"{peer.direction} D={peer.headdim} N={peer.seqlen}{' causal' if peer.causal else ''}",
                f"{peer.tflops} / {significant(peer.tflops_no_icache)}",
                significant(peer.published),
                f"{ours.tflops:.1f} / {ours.tflops_no_icache:.1f}",
                " / ".join(map(times, speedups)),
                peer.source,
            ]
        )
    return grid


def _same_case(case: Case, peer: PublishedResult) -> bool:
    s = case.shape
    plain = s.nheads == s.nheads_k and s.headdim == s.headdim_v == peer.headdim and not case.heads_first and not case.feature
    return plain and (case.direction, s.seqlen_q, s.causal) == (peer.direction, peer.seqlen, peer.causal)


_TICKS = (512, 1024, 2048, 4096, 8192)


def plot(rows: Sequence[Row], gpu: str, header: dict[str, str], path: Path) -> None:
    facts = GPUS[gpu]
    title = f"volta_fa on a simulated {facts.title}, {header['date']}; solid: default model, dashed: perfect instruction cache"
    figure, axes = plots.panels(2, 2, title, (12, 9), sharex=True, sharey=True)
    peers = PUBLISHED_RESULTS if gpu == "v100" else ()
    markers = dict(zip(dict.fromkeys(p.name for p in peers), "XPs"))
    for down, direction in enumerate((FORWARD, BACKWARD)):
        for across, causal in enumerate((False, True)):
            axis = axes[down][across]
            for headdim, color in plots.HEADDIM_COLORS.items():
                curve = [r for r in rows if _on_curve(r.case, gpu, direction, headdim, causal)]
                n = [r.case.shape.seqlen_q for r in curve]
                if curve:
                    axis.plot(n, [r.figures.tflops for r in curve], "o-", color=color, label=f"D={headdim}", markersize=4)
                    axis.plot(n, [r.figures.tflops_no_icache for r in curve], "--", color=color, linewidth=0.9)
            for peer in peers:
                if (peer.direction, peer.causal) == (direction, causal):
                    color = plots.HEADDIM_COLORS[peer.headdim]
                    axis.plot(peer.seqlen, peer.tflops, markers[peer.name], color=color, label=f"{peer.name}, D={peer.headdim}")
            if facts.gemm_tflops:
                axis.axhline(facts.gemm_tflops, color="#999999", linewidth=0.8, linestyle=":", label="CUTLASS GEMM 4096³")
            axis.set_xscale("log", base=2)
            axis.set_xticks(_TICKS, map(str, _TICKS))
            axis.set(xlim=(_TICKS[0] * 0.9, _TICKS[-1] * 1.1), ylim=(0, 0.84 * facts.peak_tflops), xlabel="N", ylabel="simulated TFLOP/s")
            axis.set_title(f"{direction}, {'causal' if causal else 'not causal'}")
    plots.shared_legend(figure, axes)
    plots.save(figure, path)


def _on_curve(case: Case, gpu: str, direction: str, headdim: int, causal: bool) -> bool:
    """Plain cases at powers of two."""
    s = case.shape
    power_of_two = s.seqlen_q & (s.seqlen_q - 1) == 0
    return _is_plain(case, gpu) and power_of_two and (case.direction, s.headdim, s.causal) == (direction, headdim, causal)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.volta", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    report.add_output_options(parser)
    parser.add_argument("--gpu", choices=GPUS, default="v100", help="the simulated GPU (default v100)")
    parser.add_argument("--cases", nargs="+", default=[], metavar="WORD", help="only cases with all these words, as: backward D=64")
    parser.add_argument("--short", action="store_true", help="only the cases of the tables of shares and of features")
    parser.add_argument("--quick", action="store_true", help="four small cases: does it work at all?")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="cases simulated at a time, a core and 1 GB each (default 1)")
    return parser


def main(arguments: Sequence[str]) -> int:
    options = _parser().parse_args(arguments)
    if options.jobs < 1:
        raise CommandError(f"--jobs {options.jobs}: expected a positive number")
    if not volta_fa.info()["simulator"]:
        raise CommandError("this library was built without the simulator: run `make build` in a checkout")
    gpu = GPUS[options.gpu]
    listed = quick_cases() if options.quick else cases(options.gpu)
    if options.short:
        listed = in_short(listed, options.gpu)
    chosen = [case for case in listed if set(options.cases) <= set(str(case).split())]
    if not chosen:
        raise CommandError(f"no case has all of {' '.join(options.cases)}; cases are named as `{listed[0]}`")
    rows, missing = simulate_all(chosen, options.gpu, options.jobs)
    kind = {"kind of figures": report.SIMULATED}
    if missing:
        kind["without kernels of its own"] = ", ".join(map(str, missing))
    header = report.facts("volta", arguments, device=gpu.device, **kind)
    tables = grids(rows, options.gpu)
    report.deliver(options, header, tables, [row.data() for row in rows], lambda path: plot(rows, options.gpu, header, path))
    return 0


if __name__ == "__main__":
    report.command(main)
