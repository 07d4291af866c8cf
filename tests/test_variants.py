"""Every compiled kernel runs on the simulated GPU that has its machine code, on odd sizes, forward and backward, in both warp
orders; a new one that no problem here reaches fails."""

import dataclasses
from functools import partial

import pytest
import torch

from conftest import INFO, Case, check, on

# Partial tiles of rows and of keys on every variant: sizes that no tile divides.
ODD = {"seqlen_q": 141, "seqlen_k": 155}

# What volta-sim describes, by the architecture that it executes: names, and how many SMs.
GPUS = {70: ("v100", 80), 75: ("t4", 40)}

# How a problem asks for what kernels are prepared for, in two ways, since dropout and softcap exclude each other.
ASKED = [
    {
        "softcap": {"softcap": 20.0},
        "alibi": {"alibi": "bh"},
        "bias": {"bias": "hqk"},
        "fp32_bias": {"bias": "hqk:fp32"},  # instead of the one before
        "sinks": {"sinks": "own"},
        "block_mask": {"blocks": "h"},
    },
    {"dropout": {"dropout_p": 0.2}, "bias": {"bias": "bk:bool"}, "varlen": {"used": 60}, "block_mask": {"blocks": "h"}},
]
FEATURES_OF_PASS = {p["name"]: p["features"] for p in INFO["passes"]}
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


def features_for(variant):
    """Two problems for a kernel, each with all that it covers or that its pass never needs. Where it covers something, a problem
    asks for that, so that no lesser kernel is taken; and always for what a kernel requires."""
    own, required = set(variant["features"]), set(variant["required_features"])
    # a block mask excludes a bias
    free = {need for ways in ASKED for need in ways} - set(FEATURES_OF_PASS[variant["pass"]]) - {"block_mask"}
    found = []
    for ways in ASKED:
        if required <= ways.keys() and (not own or own & ways.keys()):
            found.append({name: value for need, way in ways.items() if need in own | free for name, value in way.items()})
    return found[0], found[-1]


def with_features(case, features):
    used = (features["used"],) * case.batch if "used" in features else ()
    return dataclasses.replace(case, **{**features, "used": used})


def candidates(variant):
    """Problems that may run on this variant: its own headdims, a smaller one that is padded to it, several grids."""
    # The plan picks a tile by how many blocks the grid has: the last one fills the GPU with large tiles of one row block.
    _, sms = GPUS[variant["sm"]]
    large = {"batch": 2, "nheads": sms // 2 + 1, "seqlen_q": 113}
    # Where there are three sizes, one block an SM and a third of the SMs idle is still the largest's; likewise of two blocks.
    largest = [{"batch": 1, "nheads": blocks * sms * 2 // 3 + 1} for blocks in (1, 2)]
    # Of causal grids only those that do not run at once are: five blocks for every three places of an SM that has two.
    causal = {"batch": 1, "nheads": sms * 5 // 3 + 1}
    # Where P and dS through memory are faster, not for this many queries and keys.
    long = {"batch": 1, "nheads": 1, "seqlen_q": 16600, "seqlen_k": 2200}
    # Where a block has all keys, more of these are another kernel's.
    keys = {"seqlen_k": variant["block_rows"] - 3} if variant["pass"] == "BackwardFused" else {}
    for grid in ({"batch": 1, "nheads": 4, "nheads_k": 2}, {"batch": 1, "nheads": 1}, large, *largest, causal, long):
        for pad in (0, 8):
            yield Case(**{**ODD, **grid, **keys}, headdim=variant["headdim"] - pad, headdim_v=variant["headdim_v"] - pad)


def test_problems_ask_for_what_a_kernel_covers():
    """A need that no problem here asks for would leave its kernels untested."""
    for variant in SIMULATED:
        asked = {need for ways in ASKED for need in ways} & set(variant["features"])
        # a bf16 problem takes the kernels that lengths take
        assert asked == set(variant["features"]) - {"fp32_gradients"}, variant["name"]
        assert not variant["features"] or all(features_for(variant)), variant["name"]


def simulate(backend, force, variant, forced=False):
    """Simulates the GPU that has the variant's machine code, in the mode that it belongs to. `forced`: plans take the variant."""
    backend.monkeypatch.setenv("VOLTA_FA_SIM_GPU", GPUS[variant["sm"]][0])
    choices = [{"pass": "Backward", "deterministic": True}] if is_deterministic(variant) else []
    if forced:
        choices.append({"pass": variant["pass"], "variant": variant["name"]})
    force(choices=choices)


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


PADDED_TOO = pytest.param(False, True, id="full_padded", marks=pytest.mark.slow)


@pytest.mark.parametrize(
    "is_causal, padded_too", [pytest.param(False, False, id="full"), pytest.param(True, True, id="causal"), PADDED_TOO]
)
@pytest.mark.parametrize("variant", SIMULATED, ids=lambda v: v["name"])
@on("sim")
def test_variant_runs(backend, force, variant, is_causal, padded_too):
    simulate(backend, force, variant)
    forward = variant["pass"] == "Forward"
    features, others = features_for(variant)
    cases = (with_features(dataclasses.replace(c, is_causal=is_causal), features) for c in candidates(variant))
    runs = lambda case: variant["name"] in launched(backend, case, forward, is_deterministic(variant))  # noqa: E731
    reached = next(filter(runs, cases), None)
    assert reached, f"no candidate problem runs {variant['name']}: add one that does"
    # The plan takes some kernels for large grids only. Two heads of one entry execute the same code.
    simulate(backend, force, variant, forced=True)
    reached = dataclasses.replace(reached, batch=1, nheads=2, nheads_k=1, used=(), seqlen_q=min(reached.seqlen_q, ODD["seqlen_q"]))
    reached = with_features(dataclasses.replace(reached, seqlen_k=min(reached.seqlen_k, ODD["seqlen_k"])), features)
    assert runs(reached)
    run(backend, variant, reached)
    if not padded_too:
        return
    # a headdim that the kernel pads, and lengths that are one more than its tiles'
    seqlen_k = min(65, variant["block_rows"]) if variant["pass"] == "BackwardFused" else 65
    padded = dataclasses.replace(
        reached, headdim=max(reached.headdim - 8, 8), seqlen_q=reached.seqlen_q // 128 * 128 + 65, seqlen_k=seqlen_k
    )
    padded = with_features(dataclasses.replace(padded, softcap=0.0, alibi="", bias="", sinks=""), others)
    assert runs(padded)
    run(backend, variant, padded)


WHOLE = [v for v in SIMULATED if v["pass"] == "BackwardFused" and "varlen" in v["features"]]


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("variant", WHOLE, ids=lambda v: v["name"])
@on("sim")
def test_rows_without_keys_where_one_kernel_does_all(backend, force, variant, is_causal):
    """Nobody else writes their dq: of a sequence without keys, and of queries before all keys."""
    simulate(backend, force, variant, forced=True)
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
