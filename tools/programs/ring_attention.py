"""Runs ring_flash_attn and yunchang on volta_fa's flash_attn, in several processes, and compares them with dense attention.

    python tools/programs/ring_attention.py                       two processes over gloo on the CPU, in float16
    python tools/programs/ring_attention.py --device cuda         one process for each GPU over NCCL, in float16
    python tools/programs/ring_attention.py --tests FOLDER ...    also the packages' own tests

Both are packages for context parallelism: each rank holds a part ("shard") of every sequence, and ranks exchange keys and values. Needs one
of them from PyPI: ring_flash_attn 0.1.8 (with transformers 4: its adapters do not import on 5) or yunchang 0.6.4 (with einops). A package
that does not import is skipped. FOLDER is `test/` of either repository. The packages need half precision, whose gradients they convert
to float32 for their sums. Converting float32 would make no copy, so the next call would overwrite the sums.

Each row compares out and the gradients of q, k and v with dense attention in float64: the maximum error relative to the largest
value, and in parentheses that of PyTorch's eager attention in the same dtype. Exits with 1 if an error is too large."""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import os
import re
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

#: Lengths of packed sequences, in multiples of twice the number of processes: `zigzag` cuts a sequence into that many pieces.
PACKED = (3, 11, 18)
NHEADS, NHEADS_K, HEADDIM = 4, 2, 32
#: Allowed error, as a multiple of eager attention's. flash-attn's tests have the same limits.
ALLOWED = {"out": 2.0, "dq": 3.0, "dk": 3.0, "dv": 3.0}
#: Error that is allowed in any case, relative to the largest value: fp16's unit roundoff, half of bf16's.
ROUNDING = {torch.float16: 2**-11, torch.bfloat16: 2**-9}
#: Time limit of one collective operation: a rank that fails leaves the others waiting.
LIMIT = timedelta(minutes=2)
#: First words of the names of cases whose package returns dq in bfloat16, whatever the dtype of q.
ROUNDED_DQ = ("ring", "basic")
#: Keys to the left and to the right that a query sees: -1, as in flash-attn, is no limit.
NO_WINDOW = (-1, -1)


# ---- the reference ---------------------------------------------------------------------------------------------


def attention(q, k, v, causal, window=NO_WINDOW):
    """Attention of one sequence, (seqlen, nheads, headdim), by hand."""
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], dim=1) for t in (k, v))
    scores = torch.einsum("ihd,jhd->hij", q, k) * q.shape[-1] ** -0.5
    i, j = torch.arange(len(q), device=q.device)[:, None], torch.arange(len(k), device=q.device)
    hidden = (j > i) & causal
    if window[0] >= 0:
        hidden |= j < i - window[0]
    return torch.einsum("hij,jhd->ihd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v)


def dense(operands, lengths, dout, dtype, causal, window=NO_WINDOW):
    """Returns out, dq, dk and dv of packed sequences, computed in a dtype, in float64."""
    leaves = [t.detach().to(dtype).requires_grad_() for t in operands]
    parts = zip(*(t.split(lengths) for t in leaves))
    out = torch.cat([attention(*part, causal, window) for part in parts])
    return [t.double() for t in (out, *torch.autograd.grad(out, leaves, dout.to(dtype)))]


# ---- layouts: which tokens of a sequence are the shard of `rank` -----------------------------------------------------


def chunks(t, rank, ranks):
    return t.chunk(ranks)[rank]


def zigzag(t, rank, ranks):
    parts = t.chunk(2 * ranks)
    return torch.cat([parts[rank], parts[2 * ranks - 1 - rank]])


def stripes(t, rank, ranks):
    return t[rank::ranks]


def shard(t, lengths, layout, rank, ranks):
    """Returns the rank's shards of packed sequences."""
    return torch.cat([layout(part, rank, ranks) for part in t.split(lengths)])


# ---- the packages' functions -----------------------------------------------------------------------------------


class Case(NamedTuple):
    """A function of a rank's q, k and v, each (tokens, heads, headdim), which returns out, and what it computes."""

    name: str
    lengths: list[int]  # of the sequences, over all ranks
    layout: Callable | None  # of each sequence: chunks, zigzag or stripes. None: chunks of the row of all sequences
    function: Callable
    causal: bool = True
    window: tuple[int, int] = NO_WINDOW


def batched(function, **options):
    """Returns a function of packed operands that calls `function` with a batch of one."""
    return lambda *operands: function(*(t[None] for t in operands), **options)[0]


def ring_flash_attn_cases(lengths, rank, ranks) -> list[Case]:
    import ring_flash_attn as package

    one = [sum(lengths)]
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)

    def varlen(function):
        return lambda q, k, v: function(q, k, v, cu_seqlens.to(q.device) // ranks, max(lengths) // ranks, causal=True)

    def llama3(window):
        def function(q, k, v):
            # True: causal. heads_k_stride: KV heads that are gathered at a time; local_k: the keys that this rank's queries see
            *given, local_k = package.llama3_flash_attn_prepare_cu_seqlens(cu_seqlens.to(q.device), True, rank, ranks)
            options = {"heads_k_stride": 1, "local_k_slice": local_k, "causal": True, "window_size": window}
            return package.llama3_flash_attn_varlen_func(q, k, v, *given, **options)

        return function

    ring = [Case(f"ring, causal={c}", one, chunks, batched(package.ring_flash_attn_func, causal=c), c) for c in (False, True)]
    return ring + [
        Case("zigzag", one, zigzag, batched(package.zigzag_ring_flash_attn_func, causal=True)),
        Case("stripe", one, stripes, batched(package.stripe_flash_attn_func, causal=True)),
        Case("ring varlen", lengths, chunks, varlen(package.ring_flash_attn_varlen_func)),
        Case("zigzag varlen", lengths, zigzag, varlen(package.zigzag_ring_flash_attn_varlen_func)),
        *(Case(f"llama3 varlen, window={w}", lengths, None, llama3(w), window=w) for w in (NO_WINDOW, (9, 0))),
    ]


def yunchang_cases(lengths, rank, ranks) -> list[Case]:
    import yunchang
    from yunchang.kernels import AttnType

    one = [sum(lengths)]
    yunchang.set_seq_parallel_pg(1, ranks, rank, ranks)

    def ring(kind, layout, causal):
        function = batched(yunchang.LongContextAttention(ring_impl_type=kind, attn_type=AttnType.FA), causal=causal)
        return Case(f"{kind}, causal={causal}", one, layout, function, causal)

    rings = [ring("basic", chunks, False), ring("basic", chunks, True), ring("zigzag", zigzag, True)]
    # not with a ring of one process, which sends to itself: gloo cannot
    return [*rings, Case("Ulysses", one, chunks, batched(yunchang.UlyssesAttention(attn_type=AttnType.FA), causal=True))]


PACKAGES = {"ring_flash_attn": ring_flash_attn_cases, "yunchang": yunchang_cases}


def compare(name, found, expected, eager, dtype, rank) -> bool:
    """Compares a rank's out, dq, dk and dv. Prints a row on rank 0. Returns whether all errors of all ranks are small enough."""
    row, passes = f"{name:42}", True
    for label, ours, exact, theirs in zip(("out", "dq", "dk", "dv"), found, expected, eager):
        errors = torch.stack([(t.double() - exact).abs().max() / exact.abs().max() for t in (ours, theirs)]).to(torch.float32)
        dist.all_reduce(errors, dist.ReduceOp.MAX)
        error, of_eager = errors.tolist()
        extra = ROUNDING[torch.bfloat16] if label == "dq" and name.startswith(ROUNDED_DQ) else 0.0
        passes &= error <= max(ALLOWED[label] * of_eager, ROUNDING[dtype]) + extra
        row += f"  {label} {error:.1e} ({of_eager:.1e})"
    if rank == 0:
        print(row + ("" if passes else "  TOO LARGE"), flush=True)
    return passes


def worker(rank: int, options: argparse.Namespace, store: str, failed) -> None:
    """Runs all packages' cases as one rank. Rank 0 prints, and appends names to the shared list `failed`. `store`: the ranks' meeting
    point, a URL for init_process_group."""
    import volta_fa

    volta_fa.install_flash_attn_shim()
    device = torch.device(options.device, rank) if options.device == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    ranks, dtype = options.processes, getattr(torch, options.dtype)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", init_method=store, rank=rank, world_size=ranks, timeout=LIMIT)
    lengths = [n * 2 * ranks for n in PACKED]
    torch.manual_seed(0)
    shapes = [(sum(lengths), NHEADS, HEADDIM), *[(sum(lengths), NHEADS_K, HEADDIM)] * 2, (sum(lengths), NHEADS, HEADDIM)]
    *operands, dout = (torch.randn(shape).to(device, dtype) for shape in shapes)
    for package, cases in PACKAGES.items():
        try:
            version = importlib.metadata.version(package)
            importlib.import_module(package)
        except ImportError as error:
            if rank == 0:
                print(f"{package}: skipped ({error})")
            continue
        if rank == 0:
            print(f"{package} {version}, {ranks} processes, {device.type}, {options.dtype}: error (eager attention's)")
        for case in cases(lengths, rank, ranks):

            def mine(t):
                return shard(t, case.lengths if case.layout else [sum(lengths)], case.layout or chunks, rank, ranks)

            local = [mine(t).detach().clone().requires_grad_() for t in operands]
            out = case.function(*local)
            found = [out, *torch.autograd.grad(out, local, mine(dout).contiguous())]
            expected, eager = (
                [mine(t) for t in dense(operands, case.lengths, dout, d, case.causal, case.window)] for d in (torch.float64, dtype)
            )
            if not compare(case.name, found, expected, eager, dtype, rank) and rank == 0:
                failed.append(case.name)
    dist.destroy_process_group()


# ---- the packages' own tests -----------------------------------------------------------------------------------
#
# They are scripts for torchrun. On the CPU they are adapted to gloo and shorter sequences. On two GPUs they run as they are, but for one
# line more, which installs volta_fa's flash_attn.

#: Makes `import flash_attn` find volta_fa's.
SHIM = "import volta_fa; volta_fa.install_flash_attn_shim()\n"
#: Patterns of a test's source, and what takes their place on the CPU: gloo, the CPU as the device, short sequences.
ADAPTATIONS = {
    '"nccl"': '"gloo"',
    r'f"cuda:\{(local_)?rank\}"': '"cpu"',
    r"\[0, 120, 1248, 4232\]|\[0, 128, 1248, 4240\]": "[0, 16, 48, 128]",
    r"\bseqlen = 38\d\d\b": "seqlen = 128",
    r"torch\.cuda\.max_memory_allocated\([^)]*\)": "0",
    r"torch\.cuda\.(reset_peak_memory_stats|synchronize)\([^)]*\)": "None",
}
_ONE_RUN = {"cpu": [""], "cuda": [""]}
_HYBRID = "--attn_impl fa --sp_ulysses_degree"
_RINGS = [f"{_HYBRID} 1 --use_bwd{more}" for more in ("", " --causal", " --causal --ring_impl_type zigzag")]
#: Tests by file, with the arguments of each run by device ("": none). test_hybrid_qkvpacked_attn.py is left out: in yunchang 0.6.4 it
#: misses an argument.
OWN_TESTS = {
    "test_ring_flash_attn_func.py": _ONE_RUN,
    "test_zigzag_ring_flash_attn_func.py": _ONE_RUN,
    "test_stripe_flash_attn_func.py": _ONE_RUN,
    "test_ring_flash_attn_varlen_func.py": _ONE_RUN,
    "test_zigzag_ring_flash_attn_varlen_func.py": _ONE_RUN,
    "test_llama3_flash_attn_varlen_func.py": _ONE_RUN,
    "test_hybrid_attn.py": {
        # a ring of one process sends gradients to itself, which gloo cannot
        "cpu": [f"{run} --seqlen 128" for run in (*_RINGS, f"{_HYBRID} 2", f"{_HYBRID} 2 --causal")],
        "cuda": [f"{run} --seqlen 4096" for run in (*_RINGS, f"{_HYBRID} 2 --use_bwd", f"{_HYBRID} 2 --causal --use_bwd")],
    },
    "test_ulysses_attn.py": _ONE_RUN,
}
#: A line of their reports: a title, or the values of one rank, or both.
REPORT = re.compile(
    r"^(?:\[\D*\d+\] )?(?P<title>[^\[\]:\n]*):(?: max (?P<only>[^,]+),.*)?\s*$|^\[\D*\d+\] max (?P<value>[^,]+),", re.MULTILINE
)
#: Allowed differences from dense attention in bfloat16: 2**-7 of the largest value, one to two units in its last place. At least 0.06 is
#: allowed, about two units of values from 4 to 8.
ALLOWED_DIFFERENCE, ALLOWED_SHARE = 0.06, 2**-7
#: Seconds for one test.
TEST_LIMIT = 300


def differences(report: str) -> tuple[dict[str, float], float]:
    """Returns the largest difference of each title of a test's report, and the largest output or gradient."""
    title, worst, largest = "", {}, 0.0
    for line in REPORT.finditer(report):
        title = title if line["title"] is None else line["title"]
        value = line["value"] or line["only"]
        if value and "diff" in title:
            worst[title] = max(worst.get(title, 0.0), float(value))
        elif value and "lse" not in title:
            largest = max(largest, float(value))
    return worst, largest


def test_passes(name: str, arguments: str, work: str, device: str) -> bool:
    """Runs a test, prints its differences, and what it printed if it fails."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = f"--master-port={free.getsockname()[1]}"
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", port, name, *arguments.split()]
    environ = {**os.environ, "OMP_NUM_THREADS": "1"} | ({"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {})
    try:
        ran = subprocess.run(command, cwd=work, env=environ, capture_output=True, text=True, timeout=TEST_LIMIT)
        status, printed = ran.returncode, ran.stdout[-1500:] + ran.stderr[-3000:]
        worst, largest = differences(ran.stdout)
    except subprocess.TimeoutExpired as expired:
        status, printed, worst, largest = None, f"{(expired.stderr or b'')[-3000:]!r}: no end in {TEST_LIMIT} s", {}, 0.0
    right = bool(status == 0 and worst and max(worst.values()) <= max(ALLOWED_DIFFERENCE, ALLOWED_SHARE * largest))
    print(f"{name} {arguments}: {'passed' if right else 'FAILED'}  {worst}, largest value {largest:.3g}", flush=True)
    if not right:
        print(printed)
    return right


def run_tests(folder: Path, device: str) -> list[str]:
    """Runs the tests in a package's folder, and returns those that failed."""
    with tempfile.TemporaryDirectory() as work:
        for file in folder.glob("*.py"):
            text = file.read_text()
            if file.name in OWN_TESTS:
                for pattern, replacement in ADAPTATIONS.items() if device == "cpu" else ():
                    text = re.sub(pattern, replacement, text)
                text = SHIM + text
            (Path(work) / file.name).write_text(text)
        runs = [(name, run) for name, by_device in OWN_TESTS.items() if (folder / name).exists() for run in by_device[device]]
        return [f"{name} {run}" for name, run in runs if not test_passes(name, run, work, device)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--processes", type=int, default=0, help="2 on the CPU, the number of GPUs otherwise")
    parser.add_argument("--dtype", choices=("float16", "bfloat16"), default="float16")
    parser.add_argument("--tests", type=Path, nargs="+", default=[], help="folders with a package's own tests")
    options = parser.parse_args()
    options.processes = options.processes or (2 if options.device == "cpu" else torch.cuda.device_count())
    with torch.multiprocessing.Manager() as manager, tempfile.TemporaryDirectory() as folder:
        failed = manager.list()
        try:
            torch.multiprocessing.spawn(worker, (options, f"file://{folder}/store", failed), nprocs=options.processes)
        except (torch.multiprocessing.ProcessRaisedException, torch.multiprocessing.ProcessExitedException) as error:
            print(error)
            failed.append("a process")
        names = list(failed)
    for folder in options.tests:
        names += run_tests(folder, options.device)
    print("failed: " + ", ".join(names) if names else "all right")
    return bool(names)


if __name__ == "__main__":
    sys.exit(main())
