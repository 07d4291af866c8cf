"""Every compiled kernel runs on the simulated GPU that has its machine code, forced, on the problems of `python -m volta_fa check`,
forward and backward, in both warp orders. tests/plan/ has that some plan takes each."""

from functools import partial

import pytest
import torch

from conftest import GPUS, INFO, Case, check, on
from volta_fa.check.kernels import problems

# What merges states or serves a KV cache has no problem of attention: tests/test_merge.py, test_decode_kernels.py and
# test_kvcache_append.py run these, test_stream_k.py those of grids of equal shares, test_batch_invariant.py those of such calls.
#: Variants of dense tensors, but stream-K kernels, which test_stream_k.py has, and those of fp32, which test_fp32.py has.
SIMULATED = [
    v
    for v in INFO["variants"]
    if v["sm"] in GPUS
    and not v["batch_invariant"]
    and (v["pass"] == "Forward" or v["pass"].startswith("Backward"))
    and not v["pass"].endswith("StreamK")
    and "Split" not in v["pass"]
]


#: The problems of each in fp16: kernels convert bf16 before they run. The short suite has two.
PROBLEMS = [
    pytest.param(variant, problem, id=f"{variant['name']}-{number}", marks=[pytest.mark.slow] if number > 1 else [])
    for variant in SIMULATED
    for number, problem in enumerate(p for p in problems(variant) if p.dtype == torch.float16)
]


def simulate(backend, force, variant):
    """Simulates the GPU that has the variant's machine code, in the mode that it belongs to. Plans take the variant."""
    backend.monkeypatch.setenv("VOLTA_FA_SIM_GPU", GPUS[variant["sm"]])
    choices = [{"pass": "Backward", "deterministic": True}] if is_deterministic(variant) else []
    force(choices=[*choices, {"pass": variant["pass"], "variant": variant["name"]}])


def is_deterministic(variant) -> bool:
    """Returns whether the variant belongs to the backward pass with a separate dq kernel."""
    return variant["pass"] in ("BackwardDkDv", "BackwardDq")


def launched(backend, case, forward: bool, deterministic=False) -> list[str]:
    """Returns the names of the kernels that an op launches for this problem. Runs none of them."""
    (q, k, v, dout), options = case.problem(backend)
    call = partial(torch.ops.volta_fa.fwd, q, k, v, **options)
    if not forward:
        # stand-ins for what the forward leaves: no choice depends on their values
        rows = (case.batch, case.nheads, case.seqlen_q) if dout.dim() == 4 else (case.nheads, len(dout))
        out, lse = torch.zeros_like(dout), torch.zeros(rows)
        rng_state = torch.zeros(2 if "dropout_p" in options else 0, dtype=torch.int64)
        call = partial(torch.ops.volta_fa.bwd, dout, q, k, v, out, lse, rng_state=rng_state, **options, deterministic=deterministic)
    return [launch["kernel"] for launch in backend.launches(call, "launches")]


@pytest.mark.parametrize("variant, problem", PROBLEMS)
@on("sim")
def test_variant_runs(backend, force, variant, problem):
    simulate(backend, force, variant)
    assert variant["name"] in launched(backend, problem, variant["pass"] == "Forward", is_deterministic(variant))
    run(backend, variant, problem)


WHOLE = [v for v in SIMULATED if v["pass"] == "BackwardFused" and "varlen" in v["features"]]


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("variant", WHOLE, ids=lambda v: v["name"])
@on("sim")
def test_rows_without_keys_where_one_kernel_does_all(backend, force, variant, is_causal):
    """Nobody else writes their dq: of a sequence without keys, and of queries before all keys."""
    simulate(backend, force, variant)
    most = variant["block_rows"]
    lengths = ((70, 0), (most - 1, most), (0, 9), (90, 1), (33, most - 31))
    case = Case(lengths=lengths, headdim=variant["headdim"], headdim_v=variant["headdim_v"], nheads=2, nheads_k=1, is_causal=is_causal)
    assert launched(backend, case, forward=False) == [variant["name"]]
    run(backend, variant, case)


def run(backend, variant, case):
    """Compares a forward kernel's results, or a backward kernel's gradients, with the reference."""
    (q, k, v, dout), options = case.problem(backend)
    if variant["pass"] == "Forward":
        dout = None
    backend.forward_on_cpu = variant["pass"] != "Forward"
    check(backend, q, k, v, dout, **options, deterministic=is_deterministic(variant))
