"""Measures volta_fa.flex_attention beside torch's compiled flex_attention on a GPU: document mask, prefix-LM, window, random blocks.

    python -m benchmarks.flex [--seqlen N] [--packing] [--json FILE]

Times are medians in ms of forward, and of forward and backward, over about half a second of calls. Packing turns torch's BlockMask into
volta_fa's lists of blocks. It is timed apart: volta_fa keeps a mask whose values do not change, so it happens once.
--packing measures packing alone, on more masks, and counts how often it waits for the GPU. It fails above the targets.
A GPU newer than Turing emulates Volta's tensor-core instruction, so times of Volta's kernels mean nothing there. The printed header says
which kernels run ("kernels").
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from itertools import product

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

import volta_fa
from volta_fa.block_mask import kept  # masks that were packed before, by their Source: what a mask is packed from
from volta_fa.block_mask.source import source_of

from . import report
from .measure import median_ms  # (work, device, budget): the median of as many calls as take `budget` seconds

HEADS = 16
#: Maximum milliseconds and synchronizations of packing one mask of torch's.
MAX_PACKING_MS, MAX_SYNCHRONIZATIONS = 2.0, 1


def random_blocks(seqlen: int, share: float, device: torch.device) -> Tensor:
    """Returns which blocks of 128 queries by 128 keys a mask has, a bool matrix with this share of True."""
    blocks = -(-seqlen // 128)
    return torch.rand(blocks, blocks, generator=torch.Generator().manual_seed(0)).to(device) < share


def masks(seqlen: int, device: torch.device) -> dict[str, BlockMask]:
    """Returns torch's block masks by name. Documents have 1,365 tokens. `random` has the blocks of the diagonal, and 10% of the others."""
    documents = torch.arange(seqlen, device=device).div(1365, rounding_mode="floor")
    blocks = random_blocks(seqlen, 0.1, device)
    blocks.fill_diagonal_(True)
    functions: dict[str, Callable] = {
        "documents": lambda b, h, q, k: (documents[q] == documents[k]) & (q >= k),
        "prefix-LM": lambda b, h, q, k: (k < 1024) | (q >= k),
        "window": lambda b, h, q, k: (q >= k) & (q - k < 1024),
        "random": lambda b, h, q, k: blocks[q // 128, k // 128],
    }
    return {name: create_block_mask(f, None, None, seqlen, seqlen, device=device) for name, f in functions.items()}


def _synchronizations(work: Callable[[], object]) -> int:
    """Returns how often the work waits for the GPU, by the warnings of torch's sync debug mode."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            work()
    finally:
        torch.cuda.set_sync_debug_mode(before)
    return sum("synchroniz" in str(warning.message) for warning in caught)


def measure_packing(seqlen: int, device: torch.device) -> list[dict]:
    """Returns ms and synchronizations by mask: of BlockMask.from_torch, of from_mask_mod, and of finding a mask packed before ("kept")."""
    blocks = random_blocks(seqlen, 0.3, device)
    more: dict[str, Callable] = {
        "30% partial": lambda b, h, q, k: blocks[q // 128, k // 128] & ((q + k) % 2 == 0),
        "causal": lambda b, h, q, k: q >= k,
    }
    given = masks(seqlen, device) | {name: create_block_mask(f, None, None, seqlen, seqlen, device=device) for name, f in more.items()}
    calls: dict[str, Callable[[], object]] = {name: lambda mask=mask: volta_fa.BlockMask.from_torch(mask) for name, mask in given.items()}
    for name in ("documents", "causal"):
        calls[f"{name}, kept"] = lambda mask=given[name]: kept.block_mask_of(source_of(mask, 1, 1))  # batch, heads
        calls[f"{name}, from_mask_mod"] = lambda f=given[name].mask_mod: volta_fa.BlockMask.from_mask_mod(f, 1, 1, seqlen, seqlen, device)
    return [{"mask": name, "ms": median_ms(work, device, 0.3), "synchronizations": _synchronizations(work)} for name, work in calls.items()]


def measure(headdim: int, mask: BlockMask, seqlen: int, device: torch.device) -> dict[str, float]:
    """Returns milliseconds by implementation ("volta_fa", "torch": compiled) and pass ("both": forward and backward), and of packing."""
    q, k, v, dout = (torch.randn(1, HEADS, seqlen, headdim, device=device, dtype=torch.float16) for _ in range(4))
    leaves = [t.requires_grad_() for t in (q, k, v)]
    torch._dynamo.reset()  # torch compiles one function at most eight times, once per mask and grad mode
    compiled = torch.compile(flex_attention, fullgraph=True)
    found = {"packing": median_ms(lambda: volta_fa.BlockMask.from_torch(mask), device, 0.3)}
    for name, function in (("volta_fa", volta_fa.flex_attention), ("torch", compiled)):

        def forward(function: Callable = function) -> Tensor:
            return function(*leaves, block_mask=mask)

        with torch.no_grad():
            found[f"{name} forward"] = median_ms(forward, device, 0.5)
        found[f"{name} both"] = median_ms(lambda: torch.autograd.grad(forward(), leaves, dout), device, 0.5)
    return found


def main(arguments: Sequence[str]) -> int:
    parser = report.parser("flex", __doc__, plot=False)  # with --json and --markdown, which report.deliver() writes
    parser.add_argument("--seqlen", type=int, default=8192, metavar="N")
    parser.add_argument("--packing", action="store_true", help="measure packing alone")
    options = parser.parse_args(arguments)
    device = report.choose_device("cuda")
    header = report.facts("flex", arguments, device=report.device_name(device), kernels=report.kernels(device))
    missed = 0
    if options.packing:
        rows = measure_packing(options.seqlen, device)
        limited = [row for row in rows if "from_mask_mod" not in row["mask"]]
        missed = sum(row["ms"] > MAX_PACKING_MS or row["synchronizations"] > MAX_SYNCHRONIZATIONS for row in limited)
        limits = f"at most {MAX_PACKING_MS} ms and {MAX_SYNCHRONIZATIONS} synchronization, from_mask_mod excepted"
        title = f"Packing of block masks, N={options.seqlen}: {limits}"
        columns = {"ms": lambda row: f"{row['ms']:.2f}", "synchronizations": lambda row: str(row["synchronizations"])}
    else:
        rows = []
        for headdim, (name, mask) in report.track(product((64, 128), masks(options.seqlen, device).items()), "masks"):
            rows.append({"mask": name, "headdim": headdim, **measure(headdim, mask, options.seqlen, device)})
            print(rows[-1], flush=True)
        title = f"flex_attention, {HEADS} heads, N={options.seqlen}, ms: volta_fa, torch compiled, torch / volta_fa"
        columns = {"headdim": lambda row: str(row["headdim"])}
        for part in ("forward", "both"):
            ours, theirs = f"volta_fa {part}", f"torch {part}"
            columns |= {name: lambda row, name=name: f"{row[name]:.2f}" for name in (ours, theirs)}
            columns[f"ratio, {part}"] = lambda row, ours=ours, theirs=theirs: f"{row[theirs] / row[ours]:.2f}"
        columns["packing"] = lambda row: f"{row['packing']:.2f}"
    report.deliver(options, header, [report.table(title, rows, {"mask": lambda row: row["mask"], **columns})], rows)
    if missed:
        print(f"{missed} figures above their targets")
    return int(bool(missed))


if __name__ == "__main__":
    report.command(main)
