"""Runs the rows of a benchmark in the simulator or on this machine's GPU, shows its tables and writes its figures.

benchmarks.volta, decode, models, block_mask and tables call `run` with a Benchmark: a list of rows, each with calls of operators, and
functions that make tables of their results. tools/volta-sim times one SM's part of every launch with each "model" of a row, a setting of
its machine constants. The usual ones are the default and a perfect instruction cache (icache=false). Launch overhead is not counted.

--json writes a list with an object for each row:
    row                          its name, case, GPU, models and targets
    us, tflops, gb_s, share      lists by model, of all its kernels. Shares are of the tensor pipe's rate, or of DRAM's in decoding cases
    kernels                      by the first model: microseconds of each kernel's last launch
    main                         by the first model, an object for the slowest launch:
        registers, shared_bytes  per thread, and per block
        loop_bytes               of the main loop's code
        spill_instructions       instructions in the kernel's code that access local memory
        excess_wavefront_fraction  shared-memory wavefronts of the main loop beyond a conflict-free layout's, relative to it
        pipes                    the share of time that parts of an SM are busy
        balance                  work of the average SM, relative to that of the busiest
        waits                    what warps that do not issue wait for, of all warps' time"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

import volta_fa
from volta_fa.errors import CommandError

from . import report
from .measure import Work, launches, median_ms, simulated
from .report import Grid


@dataclass(frozen=True)
class Gpu:
    """A GPU that volta-sim models (tools/volta-sim/src/machine.rs)."""

    title: str
    device: str  # for headers of results
    sms: int
    mma_flops: int  # operations per cycle and SM with fp16 operands and fp32 accumulators
    ghz: float
    dram_gb_s: float  # GB/s that the model's DRAM attains, less than the card's nominal rate

    @property
    def peak_tflops(self) -> float:
        return self.sms * self.mma_flops * self.ghz / 1e3


#: By their names in VOLTA_FA_SIM_GPU.
GPUS = {
    "v100": Gpu("V100", "V100 SXM2, 80 SMs at 1.53 GHz", 80, 1024, 1.53, 783.0),
    "t4": Gpu("T4", "T4, 40 SMs at 1.59 GHz", 40, 1024, 1.59, 220.0),
    "rtx2080ti": Gpu("RTX 2080 Ti", "RTX 2080 Ti, 68 SMs at 1.545 GHz", 68, 512, 1.545, 493.0),
    "titanrtx": Gpu("Titan RTX", "Titan RTX, 72 SMs at 1.77 GHz", 72, 1024, 1.77, 538.0),
}
#: Machine constants (VOLTA_FA_SIM_SET, comma-separated NAME=VALUE) of the usual models.
MODELS = ("", "icache=false")
#: Parts of an SM that can bound a kernel, by their names in the simulator's reports.
PIPES = {"tensor": "tensor", "mio": "shared memory, L1", "l2_bw": "L2", "dram_bw": "DRAM", "xu": "XU", "issue": "issue slots"}
#: What warps wait for, by the simulator's names of stalls.
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


class Case:
    """What a row times. Subclasses are frozen dataclasses: their fields determine the calls, and their repr is a key of --resume files."""

    bytes = 0.0  # of keys and values that decoding reads; 0: operations bound the case

    @property
    def flops(self) -> float:
        """Operations of all calls."""
        raise NotImplementedError

    def calls(self, device: str) -> list[Work]:
        """Returns the calls on tensors of a device."""
        raise NotImplementedError


class Call(NamedTuple):
    """What the times of a row depend on. Rows with equal Calls are run once. `gpu` "": this machine's."""

    case: Case
    gpu: str
    models: tuple[str, ...]


@dataclass(frozen=True)
class Row:
    """A line of a benchmark's tables."""

    name: str
    case: Case
    gpu: str = "v100"  # a key of GPUS; "": this machine's
    models: tuple[str, ...] = MODELS
    target: float = 0.0  # TFLOP/s by the first model
    targets: tuple[float, ...] = ()  # shares by model

    @property
    def call(self) -> Call:
        return Call(self.case, self.gpu, self.models)


@dataclass(frozen=True)
class Result:
    """A row with its kernel launches (`_launch`) by model. Methods take the index of a model.

    `peak`: the rate of share 1: the simulated GPU's TFLOP/s, or GB/s of DRAM if the case counts bytes; measured, GB/s of `copy_rate`."""

    row: Row
    launches: list[list[dict[str, Any]]]
    peak: float

    def us(self, model: int = 0) -> float:
        return sum(launch["us"] for launch in self.launches[model])

    def tflops(self, model: int = 0) -> float:
        return self.row.case.flops / self.us(model) / 1e6

    def gb_s(self, model: int = 0) -> float:
        return self.row.case.bytes / self.us(model) / 1e3

    def share(self, model: int = 0) -> float:
        return (self.gb_s(model) if self.row.case.bytes else self.tflops(model)) / self.peak

    def missed(self, model: int = 0) -> str:
        """Returns the target that the row misses, as text; "" if it misses none."""
        if model < len(self.row.targets) and self.share(model) < self.row.targets[model]:
            return f" < {self.row.targets[model]:.0%}"
        return f" < {self.row.target:g} TFLOP/s" if model == 0 and self.tflops() < self.row.target else ""

    @property
    def main(self) -> dict[str, Any]:
        """The slowest kernel by the first model."""
        return max(self.launches[0], key=lambda launch: launch["us"])

    def waits(self, most: int) -> str:
        """Returns the `most` largest shares of all warps' time in `main` that are spent waiting, as text, the largest first."""
        found = self.main["waits"]
        return ", ".join(f"{WAITS[name]} {found[name]:.0%}" for name in sorted(found, key=lambda name: -found[name])[:most])

    def data(self) -> dict[str, Any]:
        models = range(len(self.row.models))
        figures = {name: [getattr(self, name)(m) for m in models] for name in ("us", "tflops", "gb_s", "share")}
        kernels = {launch["kernel"]: launch["us"] for launch in self.launches[0]}
        return {"row": asdict(self.row), **figures, "kernels": kernels, "main": self.main}


#: Columns of tables with the results of both MODELS.
SPEEDS: dict[str, Callable[[Result], str]] = {"TFLOP/s": lambda r: f"{r.tflops():.1f}", "perfect i-cache": lambda r: f"{r.tflops(1):.1f}"}


@dataclass(frozen=True)
class Benchmark:
    """Rows and their tables. All functions get the command's options; `rows` reads `options.gpu`, a list of names."""

    text: str  # for --help
    rows: Callable[[argparse.Namespace], Sequence[Row]]
    grids: Callable[[Sequence[Result], argparse.Namespace], list[Grid]]  # tables of results
    add_options: Callable[[argparse.ArgumentParser], object] = lambda _: None  # of its own
    plot: Callable[[Sequence[Result], argparse.Namespace, dict[str, str], Path], None] | None = None  # the header and the PNG's path too
    gpus: tuple[str, ...] = ("v100",)  # default of --gpu
    several_gpus: bool = False  # --gpu takes several names
    measurable: bool = False  # --device cuda exists; its cases count bytes
    strict: bool = False  # a missed target fails the command


def simulate(call: Call) -> list[list[dict[str, Any]]] | None:
    """Returns the launches by model; None if volta_fa has no kernels for the call. Sets this process's environment while it runs."""
    try:
        works = call.case.calls("cpu")
        return [[_launch(r, i) for i, work in enumerate(works) for r in simulated(work, model, call.gpu)] for model in call.models]
    except NotImplementedError:
        return None


def _launch(found: dict, call: int) -> dict[str, Any]:
    """Returns from the simulator's report what tables and --json have of a launch. `call`: the index of its call in the case."""
    timing, loop = found["timing"], found["timing"]["hot_loop"]
    return {
        "kernel": found["kernel"],
        "call": call,
        "us": timing["kernel_us"],
        "registers": found["registers"],
        "shared_bytes": found["static_smem"] + found["dynamic_smem"],
        "spill_instructions": found["spill_insts_static"],
        "excess_wavefront_fraction": loop and loop["smem_conflict_excess"],
        "loop_bytes": loop and loop["code_bytes"],
        "pipes": {name: timing["util"][name] for name in PIPES},
        "balance": timing["balance"],
        "waits": {name: timing["stall_fraction"][name] for name in WAITS},
    }


def measure(call: Call) -> list[list[dict[str, Any]]] | None:
    """Returns the median time of all calls on this machine's GPU, as one launch; None if volta_fa has no kernels for them."""
    try:
        us = 1e3 * sum(median_ms(work, torch.device("cuda"), budget=0.3) for work in call.case.calls("cuda"))  # seconds of repetitions
    except NotImplementedError:
        return None
    return [[{"kernel": "", "call": 0, "us": us}]]


class Kept:
    """Figures of earlier runs in --resume's file. A line is a JSON object of `key`, what the figures depend on, and `figures`.

    writes: whether `put` will be called, which needs a file to write."""

    def __init__(self, file: Path | None, writes: bool = True) -> None:
        self._file = file
        lines: list[str] = []
        try:
            if file and writes:
                file.open("a").close()  # fails now, because `put` writes only after minutes of simulation
            if file and file.exists():
                lines = file.read_text().splitlines()
        except OSError as error:
            raise CommandError(f"--resume: got {file}, expected a file to read and write: {error.strerror}") from error
        found = list(map(json.loads, lines))
        if not all("key" in line for line in found):
            raise CommandError(f"--resume: got {file}, which another version wrote, expected lines with keys: name another file")
        self._known = {json.dumps(line["key"]): line["figures"] for line in found}

    def get(self, key: Any) -> Any:
        """Returns the figures of a key; None if there are none."""
        return self._known.get(json.dumps(key))

    def put(self, key: Any, figures: Any) -> None:
        """Keeps the figures of a key, in the file too. Does nothing with None: without a kernel there are no figures."""
        if figures is None:
            return
        self._known[json.dumps(key)] = figures
        if self._file:
            with self._file.open("a") as file:
                file.write(json.dumps({"key": key, "figures": figures}) + "\n")


def key_of(call: Call) -> dict[str, Any]:
    """Returns a key of `Kept`: GPU, models, case, reported parts and stalls, each launch with a digest of its machine code, the simulator.

    So a changed kernel runs again, and so does a row whose figures lack what this version reports, and all after a change of the simulator.
    """
    try:
        made = [launch for work in call.case.calls("cpu") for launch in launches(work, call.gpu)]
    except NotImplementedError:
        made = []
    parts = [*PIPES, *WAITS]
    of_call = {"gpu": call.gpu, "models": list(call.models), "case": repr(call.case)}
    return {**of_call, "parts": parts, "launches": made, "simulator": _simulator_digest()}


@functools.cache
def _simulator_digest() -> str:
    """Returns 8 hexadecimal digits of the sources by which the simulator takes times."""
    source = Path(__file__).resolve().parent.parent / "tools" / "volta-sim" / "src"
    files = [source / "machine.rs", source / "run.rs", *sorted((source / "timing").glob("*.rs"))]
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:8]


def timed(rows: Sequence[Row], kept: Kept, only_kept: bool = False, jobs: int = 1, on_gpu: bool = False) -> Iterator[Any]:
    """Yields the launches of each row. None: volta_fa has no kernels for it or, with `only_kept`, the file has no figures."""
    calls = list(dict.fromkeys(row.call for row in rows))
    keys = {call: key_of(call) for call in calls} if kept._file else {}
    known = {call: found for call, key in keys.items() if (found := kept.get(key)) is not None}
    if only_kept:
        known = dict.fromkeys(calls) | known
    # processes and not threads, because the simulator reads its settings from the process's environment
    spawned = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=spawned) if jobs > 1 else nullcontext() as pool:
        run = measure if on_gpu else simulate
        # each result is kept when it ends, not in the order of rows, so a stopped command loses none
        started = {call: pool.submit(run, call) for call in calls if call not in known} if pool else {}
        for call, future in started.items():
            future.add_done_callback(partial(_keep, kept, keys.get(call)))
        try:
            for row in rows:
                if row.call not in known:
                    known[row.call] = started[row.call].result() if pool else run(row.call)
                    if not pool:
                        kept.put(keys.get(row.call), known[row.call])
                yield known[row.call]
        finally:  # an error, or the caller, ended it: what has not begun does not begin
            if pool:
                pool.shutdown(cancel_futures=True)


def _keep(kept: Kept, key: Any, ended: Future) -> None:
    """Keeps the figures of a process that ended without an error."""
    if not ended.cancelled() and not ended.exception():
        kept.put(key, ended.result())


def copy_rate() -> float:
    """Returns GB/s that PyTorch's copy kernel reads and writes together."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.numel() / median_ms(lambda: target.copy_(source), source.device, budget=0.5) / 1e6


def results_of(rows: Sequence[Row], options: argparse.Namespace, kept: Kept) -> tuple[list[Result], list[Row]]:
    """Returns the results, and the rows for which volta_fa has no kernels."""
    results, missing = [], []
    copy = copy_rate() if options.device == "cuda" else 0.0
    with report.progress() as bar:
        task = bar.add_task("", total=len(rows))
        found = timed(rows, kept, options.kept, options.jobs, options.device == "cuda")
        for row in rows:
            bar.update(task, description=f"{row.gpu} {row.name}".strip())
            launched = next(found)
            bar.advance(task)
            if launched:
                gpu = GPUS.get(row.gpu)
                peak = copy if gpu is None else gpu.dram_gb_s if row.case.bytes else gpu.peak_tflops
                results.append(Result(row, launched, peak))
            elif not options.kept:
                missing.append(row)
    return results, missing


def _parser(name: str, benchmark: Benchmark) -> argparse.ArgumentParser:
    parser = report.parser(name, benchmark.text, plot=benchmark.plot is not None)
    parser.set_defaults(device="simulated")
    number = "+" if benchmark.several_gpus else 1
    parser.add_argument("--gpu", nargs=number, choices=GPUS, default=list(benchmark.gpus), help="simulated GPU (default: %(default)s)")
    if benchmark.measurable:
        parser.add_argument("--device", choices=("simulated", "cuda"), help="cuda measures on this machine's GPU")
    parser.add_argument("--only", "--cases", nargs="+", default=[], metavar="TEXT", help="rows whose GPU and name have all, as: D=64")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="rows simulated at a time, a core and 1 GB each (default 1)")
    parser.add_argument("--resume", type=Path, metavar="FILE", help="keep the figures in FILE, and take from it those of the same kernels")
    parser.add_argument("--kept", action="store_true", help="only rows that --resume's FILE has")
    benchmark.add_options(parser)
    return parser


def run(name: str, benchmark: Benchmark, arguments: Sequence[str]) -> int:
    """Runs the command of a benchmark and returns its exit status."""
    options = _parser(name, benchmark).parse_args(arguments)
    if options.jobs < 1:
        raise CommandError(f"--jobs {options.jobs}: expected a positive number")
    if options.kept and not options.resume:
        raise CommandError("--kept: got no --resume FILE, which has the rows that are kept")
    if options.device == "cuda":
        options.gpu, options.jobs = [""], 1  # "": this machine's
    options.store = Kept(options.resume, writes=not options.kept)  # benchmarks.models reads it
    listed = benchmark.rows(options)
    rows = [row for row in listed if all(text in f"{row.gpu} {row.name}" for text in options.only)]
    if not rows:
        raise CommandError(f"--only: got {' '.join(options.only)}, expected parts of a row's name, such as `{listed[0].name}`")
    if options.device == "cuda" and not torch.cuda.is_available():
        raise CommandError(f"benchmarks.{name}: needs a CUDA device, and this machine has none")
    if options.device != "cuda" and not volta_fa.info()["simulator"]:
        raise CommandError("this library was built without the simulator: run `make build` in a checkout")
    results, missing = results_of(rows, options, options.store)
    device = report.device_name(torch.device("cuda", 0)) if options.device == "cuda" else "; ".join(GPUS[gpu].device for gpu in options.gpu)
    kind = {"kind of figures": "measured" if options.device == "cuda" else report.SIMULATED}
    if missing:
        kind["without kernels of its own"] = ", ".join(row.name for row in missing)
    header = report.facts(name, arguments, device=device, **kind)
    grids = [grid for grid in benchmark.grids(results, options) if grid.rows]
    draw, kernels = benchmark.plot, {launch["kernel"] for r in results for model in r.launches for launch in model}
    report.deliver(options, header, grids, [r.data() for r in results], lambda path: draw and draw(results, options, header, path), kernels)
    below = sum(" < " in cell for grid in grids for row in grid.rows for cell in row)  # as tables mark a missed target
    if below and benchmark.strict:
        report.console.print(f"{below} figures below their targets")
    return int(bool(below) and benchmark.strict)
