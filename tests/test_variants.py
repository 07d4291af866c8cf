"""Tests of every compiled attention kernel (variant) in the simulator (`on("sim")`), on the problems of `python -m volta_fa check`, each
in two warp orders.

A variant's `pass` is its part of the work (Forward, BackwardDkDv, BackwardDq, ...), `sm` the architecture of its machine code (70: V100,
75: T4). The fixture `force` makes the planner choose the variant. tests/plan/ tests that some plan chooses each variant by itself. Kernels
that merge states or serve KV caches are in test_merge.py, test_decode_kernels.py and test_kvcache.py."""

import pytest
import torch

from conftest import GPUS, INFO, Case, check_case, on  # check_case: a Case against fp64. GPUS: the simulator's, by sm
from volta_fa.check.kernels import problems

#: Attention kernels without those of test_batch_invariant.py, test_stream_k.py (StreamK) and test_fp32.py (Split: fp32 in full precision).
SIMULATED = [
    v
    for v in INFO["variants"]
    if v["sm"] in GPUS
    and not v["batch_invariant"]
    and (v["pass"] == "Forward" or v["pass"].startswith("Backward"))
    and not v["pass"].endswith("StreamK")
    and "Split" not in v["pass"]
]


def problems_of(variant) -> list:
    """Returns a variant's fp16 problems. (bf16 and fp32 tensors are cast first: test_fp32.py.) `make test` runs the first two, and all of
    kernels that require softcap, alibi, bias or dropout: in the third, whole row tiles see no key."""
    made = [problem for problem in problems(variant) if problem.dtype == torch.float16 and not problem.as_fp32]
    is_plain = set(variant["required_features"]) <= {"block_mask"}
    marks = [[pytest.mark.slow] if i > 1 and is_plain else [] for i in range(len(made))]
    return [pytest.param(variant, problem, id=f"{variant['name']}-{i}", marks=marks[i]) for i, problem in enumerate(made)]


def simulate(backend, force, variant):
    """Simulates the GPU that has the variant's machine code. Makes plans choose the variant, and the backward mode that it belongs to."""
    backend.monkeypatch.setenv("VOLTA_FA_SIM_GPU", GPUS[variant["sm"]])
    choices = [{"pass": "Backward", "deterministic": True}] if is_deterministic(variant) else []
    force(choices=[*choices, {"pass": variant["pass"], "variant": variant["name"]}])


def is_deterministic(variant) -> bool:
    """Returns whether the variant belongs to the backward pass with a separate dq kernel."""
    return variant["pass"] in ("BackwardDkDv", "BackwardDq")


def launched(backend, case, forward: bool, deterministic=False) -> list[str]:
    """Returns the names of the kernels that an op launches for this problem, without executing them."""
    (q, k, v, dout), options = case.problem(backend)
    if forward:
        call = lambda: torch.ops.volta_fa.fwd(q, k, v, **options)  # noqa: E731
    else:
        # zeros for the forward's results: no choice of kernels depends on their values
        rows = (case.batch, case.nheads, case.seqlen_q) if dout.dim() == 4 else (case.nheads, len(dout))
        options |= {"rng_state": torch.zeros(2 if "dropout_p" in options else 0, dtype=torch.int64), "deterministic": deterministic}
        saved = torch.zeros_like(dout), torch.zeros(rows)
        call = lambda: torch.ops.volta_fa.bwd(dout, q, k, v, *saved, **options)  # noqa: E731
    return [launch["kernel"] for launch in backend.launches(call, how="launches")]


@pytest.mark.parametrize("variant, problem", [problem for variant in SIMULATED for problem in problems_of(variant)])
@on("sim")
def test_variant_runs(backend, force, variant, problem):
    simulate(backend, force, variant)
    assert variant["name"] in launched(backend, problem, variant["pass"] == "Forward", is_deterministic(variant))
    run(backend, variant, problem)


#: Kernels that compute a whole backward pass of short sequences.
FUSED = [v for v in SIMULATED if v["pass"] == "BackwardFused" and "varlen" in v["features"]]


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("variant", FUSED, ids=lambda v: v["name"])
@on("sim")
def test_rows_without_keys_in_fused_kernels(backend, force, variant, is_causal):
    """A fused backward kernel, the only one of the pass, also writes dq (0) of sequences without keys and of queries before all keys."""
    simulate(backend, force, variant)
    max_keys = variant["block_rows"]  # the kernel's one block has all keys of a sequence
    # (queries, keys) of each sequence
    lengths = ((70, 0), (max_keys - 1, max_keys), (0, 9), (90, 1), (33, max_keys - 31))
    case = Case(lengths=lengths, headdim=variant["headdim"], headdim_v=variant["headdim_v"], nheads=2, nheads_k=1, is_causal=is_causal)
    assert launched(backend, case, forward=False) == [variant["name"]]
    run(backend, variant, case)


def run(backend, variant, case):
    """Compares a forward kernel's results, or a backward kernel's gradients, with the reference."""
    is_forward = variant["pass"] == "Forward"
    backend.forward_on_cpu = not is_forward  # then only the backward pass is simulated
    check_case(backend, case, deterministic=is_deterministic(variant), **({"dout": None} if is_forward else {}))
