"""Headdims from 257 to 512: forward kernels of both families and block sizes, and the backward pass that stores P and dS in memory.

That backward pass ("stored") also runs on Volta above headdim 192. One kernel writes the probabilities P and their gradients dS of a
launch's key tiles, another computes dq, dk and dv from them. Budgets are the allowed errors. A backend is the CPU, the simulator (`sim`) or
a GPU (`cuda`), with a dtype; `gpu` simulates a V100 and a T4 in turn; `forward_on_cpu` leaves the forward pass to the CPU. `force` makes
the planner take kernels.

A Case (volta_fa/check/cases.py) is a problem: seqlen_q, seqlen_k, headdim, headdim_v, and fields by name. lengths: (seqlen_q, seqlen_k) of
packed sequences. used: seqused_k. bias: dimensions that are not 1, and its dtype (q's by default). alibi: dimensions of the slopes.
sinks: dtype ("own": q's)."""

import pytest
import torch

from conftest import BF16_KERNELS, GPUS, INFO, Case, check_case, on, on_cases  # check_case: a Case against fp64. GPUS: by sm

#: Forward kernels at headdim 512 without further features, and the compute capability (70, 75) of their GPU.
VARIANTS = {v["name"]: v["sm"] for v in INFO["variants"] if v["pass"] == "Forward" and v["headdim"] == 512 and not v["features"]}

CASES = [
    Case(64, 64, 512, batch=1, nheads=1),
    Case(113, 155, 512, batch=1, nheads=2, nheads_k=1, is_causal=True),
    Case(17, 255, 264, 504, batch=1, nheads=2, is_causal=True),
    Case(70, 33, 504, 264, batch=1, nheads=1, spread=3.0),
    Case(37, 50, 321, 510, batch=1, nheads=1),
    Case(40, 90, 8, 512, batch=1, nheads=1, window_left=20, window_right=3),
    # a window that ends inside key steps: the first row of a warp sees other keys than the last
    Case(70, 190, 512, batch=1, nheads=1, window_left=60, window_right=40),
    Case(40, 90, 512, 40, batch=1, nheads=1, softmax_scale=-0.1),
    Case(140, 9, 512, batch=1, nheads=1, is_causal=True),
    Case(67, 99, 512, batch=1, nheads=2, softcap=5.0, alibi="h", sinks="own"),
    Case(67, 99, 400, batch=1, nheads=2, bias="hqk:fp32", is_causal=True),
    Case(67, 99, 512, batch=1, nheads=4, nheads_k=2, dropout_p=0.25, bias="bk:bool"),
    Case(headdim=512, lengths=((70, 90), (0, 5), (33, 31)), nheads=2, nheads_k=1, is_causal=True),
    Case(67, 99, 512, batch=2, nheads=1, used=(93, 1), sinks="fp32"),
]


@on_cases((["cpu-fp32", "cpu-bf16"], CASES))
def test_on_the_cpu(backend, case):
    check_case(backend, case)


def test_limits():
    """Both families have two block sizes, so test_kernels runs all of them."""
    assert sorted(VARIANTS.values()) == [70, 70, 75, 75]
    assert torch.ops.volta_fa._max_headdim(0) == INFO["limits"]["max_headdim"] == 512  # 0: of the CPU


@pytest.mark.parametrize("variant", VARIANTS)
@on_cases((["sim", "cuda"], CASES))
def test_kernels(backend, force, case, variant):
    """Each forward kernel, also with packed sequences and other features ("generic"), is within the budgets."""
    backend.monkeypatch.setenv("VOLTA_FA_SIM_GPU", GPUS[VARIANTS[variant]])
    force(choices=[{"pass": "Forward", "variant": variant.replace("512x512", words + "512x512")} for words in ("", "varlen_", "generic_")])
    check_case(backend, case, dout=None)


# ---- the backward pass that stores P and dS: lengths around its tiles of 128, its launches, and every option --------------


@pytest.fixture
def forward_on_cpu(backend):
    backend.forward_on_cpu = True


#: Lengths, headdims and masks; then options.
SHAPES = [
    Case(1, 1, 264, batch=1),
    Case(130, 140, 512, nheads=2, nheads_k=1, batch=1, is_causal=True),
    # the first query sees most keys of a tile, but not all
    Case(130, 220, 264, batch=1, nheads=1, is_causal=True),
    # queries and keys that are partial tiles, headdims that are partial columns
    Case(37, 150, 328, 456, batch=2, nheads=2),
    # one of the headdims is small
    Case(150, 270, 512, 40, batch=1, nheads=1, window_left=30, window_right=20),
    Case(140, 33, 16, 264, batch=1, nheads=3, nheads_k=1),
    # not multiples of 8
    Case(33, 20, 333, 301, batch=1, nheads=1, softmax_scale=-0.1, is_causal=True),
    # rows without a key, and keys without a row
    Case(200, 60, 264, batch=1, nheads=1, is_causal=True),
    Case(20, 300, 264, batch=1, nheads=1, window_left=5, window_right=5),
    # on Volta
    Case(130, 140, 256, nheads=2, nheads_k=1, batch=1, is_causal=True),
    Case(33, 20, 201, 77, batch=1, nheads=1, window_left=9),
]

OPTIONS = [
    Case(140, 150, 264, batch=1, nheads=2, softcap=1.5, alibi="h", is_causal=True),
    Case(140, 150, 264, batch=2, nheads=2, dropout_p=0.17),
    Case(140, 150, 264, batch=1, nheads=4, nheads_k=2, bias="bhqk"),
    Case(131, 151, 264, batch=1, nheads=2, bias="qk:fp32", dropout_p=0.5, used=(120,)),
    Case(140, 150, 264, batch=1, nheads=2, alibi="bh", bias="hqk:bool", sinks="own", window_left=60),
    Case(headdim=264, nheads_k=1, lengths=((140, 150), (1, 70), (30, 0), (0, 5), (17, 129)), spare=5, sinks="fp32", is_causal=True),
    Case(lengths=((40, 50), (1, 70), (30, 200)), used=(30, 70, 100), headdim=320, nheads=2),
    Case(lengths=((40, 50), (1, 70), (30, 200)), headdim=256, nheads=2, alibi="h", bias="qk", dropout_p=0.2),
]


@on_cases((["sim", "cuda", *BF16_KERNELS], [*SHAPES, *OPTIONS]))
def test_stored(backend, case, gpu, forward_on_cpu):
    """The backward pass that stores P and dS is within the budgets."""
    check_case(backend, case)


@pytest.mark.parametrize("gpu", ["v100", pytest.param("t4", marks=pytest.mark.slow)], indirect=True)
@on("sim", "cuda")
def test_some_heads_and_keys_of_each_launch(backend, gpu, forward_on_cpu):
    """1,200 empty sequences take up tiles of a launch's limit, so each launch has one KV head and one of the three key tiles."""
    lengths = ((140, 300), *((0, 0),) * 1200, (20, 150))
    check_case(backend, Case(lengths=lengths, headdim=264, headdim_v=16, nheads=2, is_causal=True))


@pytest.mark.parametrize("deterministic", [False, True])
@on("sim", "cuda")
def test_stored_is_deterministic(backend, deterministic, gpu, forward_on_cpu):
    """In either mode dq, dk and dv have no atomics: kernels run in two orders give the same bits."""
    q, k, v, dout = Case(140, 270, 264, batch=1, nheads=2, nheads_k=1).inputs(backend)
    out, lse = backend.forward(q, k, v)
    runs = backend.backward(dout, q, k, v, out, lse, deterministic=deterministic)
    for other in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(runs[0], other))
