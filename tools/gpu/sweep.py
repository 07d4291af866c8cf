"""Compares random attention problems of every kind with the fp64 reference of the tests.

    python tools/gpu/sweep.py                             2,000 problems on the GPU, about 8 minutes on an H200
    python tools/gpu/sweep.py --device cpu --count 50     small problems on CPU tensors
    python tools/gpu/sweep.py --backend sim --count 5     tiny problems on the simulated kernels
    python tools/gpu/sweep.py --skip 700 --time-limit 100 continues an earlier run, for at most 100 seconds

The tolerance is that of the tests (`reference.Budget`): at most twice the error of PyTorch's eager attention for results, three times
for gradients, in the same dtype on the same inputs. Each kernel runs twice with bitwise identical results.
Prints one line per failure that repeats it, then a summary. Exits non-zero if any problem failed.
"""

import argparse
import math
import os
import random
import sys
import time
import traceback
from collections import Counter
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))
from cases import BIAS_TYPES, Case
from conftest import _worst, repeat

# the usual test lengths of attention kernels, and random lengths up to 2048
SEQLENS = (1, 2, 3, 16, 17, 63, 64, 65, 113, 127, 128, 129, 203, 239, 255, 256, 257, 512, 513, 799, 1000, 1023, 1024, 2047, 2048)
HEADDIMS = (32, 40, 64, 80, 91, 96, 112, 128, 160, 192, 224, 256)
# (nheads, nheads_k): multi-head, multi-query, grouped
HEADS = ((6, 6), (4, 4), (6, 1), (5, 1), (6, 2), (8, 4))
# Maximum scores of a problem by machine: the reference holds several fp64 matrices of this size.
MOST_SCORES = {"cuda": 2**25, "cpu": 2**17, "sim": 2**13}
LONGEST = {"cuda": 2048, "cpu": 256, "sim": 96}


def draw(rng: random.Random, machine: str) -> Case:
    longest = LONGEST[machine]

    def length(least=1):
        if rng.random() < 0.5:
            return rng.choice([n for n in SEQLENS if n <= longest])
        return rng.randint(least, longest)

    nheads, nheads_k = rng.choice(HEADS)
    packed = rng.random() < 0.4
    entries = rng.choice((1, 2, 3, 8)) if packed else rng.choice((1, 2, 4))
    same = rng.random() < 0.4  # self-attention
    lengths = []
    for _ in range(entries if packed else 1):
        seqlen_q = length(0 if packed else 1)
        seqlen_k = seqlen_q if same else length(0 if packed else 1)
        lengths.append((seqlen_q, seqlen_k))
    shorten(lengths, nheads * (1 if packed else entries), MOST_SCORES[machine])
    is_causal = rng.random() < 0.4
    window_left, window_right = -1, -1
    if rng.random() < 0.35:
        window_left, window_right = rng.choice([-1, rng.randint(0, longest)]), rng.choice([-1, rng.randint(0, longest)])
    if is_causal:
        window_right = -1  # the operator rejects both
    softcap = rng.choice((0.0, 0.0, 0.0, 5.0, 30.0))
    dims = rng.choice(("", "", "bhqk", "hqk", "qk", "bqk", "bk", "k", "q", "h"))
    keys = [k for _, k in lengths] * (1 if packed else entries)
    case = dict(
        headdim=rng.choice(HEADDIMS),
        nheads=nheads,
        nheads_k=nheads_k,
        is_causal=is_causal,
        window_left=window_left,
        window_right=window_right,
        softmax_scale=rng.choice((None, None, None, 0.3)),
        softcap=softcap,
        dropout_p=0.0 if softcap else rng.choice((0.0, 0.0, 0.0, 0.17, 0.5)),
        alibi=rng.choice(("", "", "", "h", "bh")),
        bias=f"{dims}:{rng.choice(BIAS_TYPES)}" if dims else "",
        sinks=rng.choice(("", "", "", "own", "fp32")),
        used=tuple(rng.randint(0, k) for k in keys) if rng.random() < 0.15 else (),
        headdim_v=rng.choice((None, None, None, None, rng.choice(HEADDIMS))),
    )
    if packed:
        return Case(lengths=tuple(lengths), spare=rng.choice((0, 0, 100)), **case)
    return Case(*lengths[0], batch=entries, **case)


def shorten(lengths: list[tuple[int, int]], factor: int, most: int):
    """Halves the longest lengths until the scores fit. A bias has the longest length in each dimension."""
    while len(lengths) * max(q for q, _ in lengths) * max(k for _, k in lengths) * factor > most:
        side = 0 if max(q for q, _ in lengths) >= max(k for _, k in lengths) else 1
        longest = max(pair[side] for pair in lengths)
        for i, pair in enumerate(lengths):
            if pair[side] == longest:
                lengths[i] = tuple((n + 1) // 2 if s == side else n for s, n in enumerate(pair))


def features(case: Case) -> list[str]:
    names = [name for name in ("is_causal", "softcap", "dropout_p", "alibi", "bias", "sinks", "used") if getattr(case, name)]
    if case.window_left >= 0 or case.window_right >= 0:
        names.append("local")
    kind = "mha" if case.nheads == case.nheads_k else "mqa" if case.nheads_k == 1 else "gqa"
    return [*names, kind, "packed" if case.lengths else "dense", f"headdim {case.headdim}"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--skip", type=int, default=0, help="begin after so many problems of these")
    parser.add_argument("--time-limit", type=float, default=math.inf, metavar="SECONDS", help="begin no problem after these")
    parser.add_argument("--seed", type=int, default=0, help="changes problems and inputs")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--backend", help="a backend of tests/conftest.py instead of fp16 and bf16 (CPU: all dtypes) by turns")
    parser.add_argument("--most-failures", type=int, default=20, help="stop after these")
    arguments = parser.parse_args()
    backends = ("cuda", "cuda", "cuda-bf16") if arguments.device == "cuda" else ("cpu-fp16", "cpu-bf16", "cpu-fp32", "cpu-fp64")
    backends = (arguments.backend,) if arguments.backend else backends
    os.environ["VOLTA_FA_TEST_SEED"] = str(arguments.seed)
    rng = random.Random(arguments.seed)
    counts, failures, start, run = Counter(), [], time.monotonic(), 0
    for number in range(arguments.count):
        backend = rng.choice(backends)
        machine = backend.split("-")[0]
        case, deterministic = draw(rng, machine), rng.random() < 0.3
        if number < arguments.skip:
            continue
        if time.monotonic() - start > arguments.time_limit:
            print(f"the time is up: --skip {number} goes on from here")
            break
        run += 1
        counts.update([*features(case), backend, *(["deterministic"] if deterministic else [])])
        try:
            repeat(backend, case, deterministic)
        except pytest.skip.Exception as e:
            print(f"cannot run {backend}: {e}")
            return 2
        except Exception as e:
            print(f"   {type(e).__name__}: {str(e).splitlines()[0] if str(e) else traceback.format_exc(limit=-1)}", flush=True)
            failures.append(case)
            if len(failures) >= arguments.most_failures or "CUDA" in str(e):
                print(f"stopped after problem {number + 1}: " + ("too many failures" if "CUDA" not in str(e) else "the device is lost"))
                break
    print(f"\n{run} problems, {len(failures)} failed, {time.monotonic() - start:.0f} s, seed {arguments.seed}, from {arguments.skip}")
    print("  " + ", ".join(f"{name} {n}" for name, n in sorted(counts.items())))
    print("worst errors, as a share of what is allowed:")
    for (backend, what, kind), (share, _) in sorted(_worst.items()):
        print(f"  {backend:9} {what:10} {kind:8} {share:6.1%}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
