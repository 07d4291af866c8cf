"""Runs ring_flash_attn and yunchang on volta_fa's flash_attn, in several processes, and compares them with dense attention.

    python tools/programs/ring_attention.py                       two processes over gloo on the CPU, in float16
    python tools/programs/ring_attention.py --device cuda         one process for each GPU over NCCL, in float16
    python tools/programs/ring_attention.py --tests FOLDER ...    also the packages' own tests (ring_attention_tests.py)

Needs ring_flash_attn 0.1.8 (with transformers 4: its adapters do not import on 5) or yunchang 0.6.4 (with einops), both from PyPI.
A package that does not import is skipped. FOLDER is `test/` of either repository. The packages need half precision: with float32
their sums of gradients would be the buffers that the next call overwrites.

Each row compares out and the gradients of q, k and v with dense attention in float64: the maximum error relative to the largest
value, beside the error of PyTorch's eager attention in the same dtype. Exits with 1 if an error is too large.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import sys
import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from ring_attention_tests import run_tests

#: Lengths of packed sequences, in multiples of twice the number of processes.
PACKED = (3, 11, 18)
NHEADS, NHEADS_K, HEADDIM = 4, 2, 32
#: Allowed error, as a multiple of eager attention's, and at least half a unit in the last place of the largest value.
ALLOWED = {"out": 2.0, "dq": 3.0, "dk": 3.0, "dv": 3.0}
ROUNDING = {torch.float16: 2**-11, torch.bfloat16: 2**-9}
#: For one collective: a rank that fails leaves the others waiting.
LIMIT = timedelta(minutes=2)
#: Functions that return dq in bfloat16, whatever the dtype of q.
ROUNDED_DQ = ("ring", "basic")
EVERY = (-1, -1)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--processes", type=int, default=0, help="2 on the CPU, the number of GPUs otherwise")
    parser.add_argument("--dtype", choices=("float16", "bfloat16"), default="float16")
    parser.add_argument("--tests", type=Path, nargs="+", default=[], help="folders with a package's own tests")
    return parser.parse_args()


# ---- the reference ---------------------------------------------------------------------------------------------


def attention(q, k, v, causal, window=EVERY):
    """Attention of one sequence, (seqlen, nheads, headdim), by hand."""
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], dim=1) for t in (k, v))
    scores = torch.einsum("ihd,jhd->hij", q, k) * q.shape[-1] ** -0.5
    i, j = torch.arange(len(q), device=q.device)[:, None], torch.arange(len(k), device=q.device)
    hidden = (j > i) & causal
    if window[0] >= 0:
        hidden |= j < i - window[0]
    return torch.einsum("hij,jhd->ihd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v)


def dense(operands, lengths, dout, dtype, causal, window=EVERY):
    """Returns out, dq, dk and dv of packed sequences, computed in a dtype, in float64."""
    leaves = [t.detach().to(dtype).requires_grad_() for t in operands]
    parts = zip(*(t.split(lengths) for t in leaves))
    out = torch.cat([attention(*part, causal, window) for part in parts])
    return [t.double() for t in (out, *torch.autograd.grad(out, leaves, dout.to(dtype)))]


# ---- how each function shares a sequence -----------------------------------------------------------------------


def chunks(t, rank, ranks):
    return t.chunk(ranks)[rank]


def zigzag(t, rank, ranks):
    parts = t.chunk(2 * ranks)
    return torch.cat([parts[rank], parts[2 * ranks - 1 - rank]])


def stripes(t, rank, ranks):
    return t[rank::ranks]


def share(t, lengths, way, rank, ranks):
    return torch.cat([way(part, rank, ranks) for part in t.split(lengths)])


# ---- the packages' functions -----------------------------------------------------------------------------------


class Case(NamedTuple):
    """A function of local q, k and v, and what it computes."""

    name: str
    lengths: list[int]
    way: Callable | None  # None: shares ignore the borders of sequences
    function: Callable
    causal: bool = True
    window: tuple[int, int] = EVERY


def batched(function, **options):
    return lambda *operands: function(*(t[None] for t in operands), **options)[0]


def ring_flash_attn_cases(lengths, rank, ranks) -> list[Case]:
    import ring_flash_attn as package

    one = [sum(lengths)]
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)

    def varlen(function):
        return lambda q, k, v: function(q, k, v, cu_seqlens.to(q.device) // ranks, max(lengths) // ranks, causal=True)

    def llama3(window):
        def function(q, k, v):
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
        *(Case(f"llama3 varlen, window={w}", lengths, None, llama3(w), window=w) for w in (EVERY, (9, 0))),
    ]


def yunchang_cases(lengths, rank, ranks) -> list[Case]:
    import yunchang
    from yunchang.kernels import AttnType

    one = [sum(lengths)]
    yunchang.set_seq_parallel_pg(1, ranks, rank, ranks)
    rings = [
        Case(
            f"{kind}, causal={c}", one, way, batched(yunchang.LongContextAttention(ring_impl_type=kind, attn_type=AttnType.FA), causal=c), c
        )
        for kind, way, c in (("basic", chunks, False), ("basic", chunks, True), ("zigzag", zigzag, True))
    ]
    # not with a ring of one process, which sends to itself: gloo cannot
    return [*rings, Case("Ulysses", one, chunks, batched(yunchang.UlyssesAttention(attn_type=AttnType.FA), causal=True))]


PACKAGES = {"ring_flash_attn": ring_flash_attn_cases, "yunchang": yunchang_cases}


def compare(name, found, right, eager, dtype, rank) -> bool:
    """Prints a row on rank 0. Returns whether all errors of all ranks are small enough."""
    row, passes = f"{name:42}", True
    for label, f, r, e in zip(("out", "dq", "dk", "dv"), found, right, eager):
        largest = r.abs().max()
        errors = torch.stack([(f.double() - r).abs().max() / largest, (e - r).abs().max() / largest]).to(torch.float32)
        dist.all_reduce(errors, dist.ReduceOp.MAX)
        error, of_eager = errors.tolist()
        extra = ROUNDING[torch.bfloat16] if label == "dq" and name.startswith(ROUNDED_DQ) else 0.0
        passes &= error <= max(ALLOWED[label] * of_eager, ROUNDING[dtype]) + extra
        row += f"  {label} {error:.1e} ({of_eager:.1e})"
    if rank == 0:
        print(row + ("" if passes else "  TOO LARGE"), flush=True)
    return passes


def worker(rank: int, options: argparse.Namespace, store: str, failed) -> None:
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
        for name, sizes, way, function, causal, window in cases(lengths, rank, ranks):
            sizes_of_shares = sizes if way else [sum(sizes)]

            def mine(t, sizes=sizes_of_shares, way=way):
                return share(t, sizes, way or chunks, rank, ranks)

            local = [mine(t).detach().clone().requires_grad_() for t in operands]
            out = function(*local)
            found = [out, *torch.autograd.grad(out, local, mine(dout).contiguous())]
            right, eager = (list(map(mine, dense(operands, sizes, dout, d, causal, window))) for d in (torch.float64, dtype))
            if not compare(name, found, right, eager, dtype, rank) and rank == 0:
                failed.append(name)
    dist.destroy_process_group()


def main() -> int:
    options = parse()
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
