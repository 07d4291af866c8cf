"""The backward pass that passes P and dS through memory, for headdims above 256, and on Volta above 192: lengths beside its tiles
of 128, its launches, and every option."""

import pytest
import torch

from conftest import Case, check, on, on_cases

BACKENDS = ["sim", "cuda", "sim-bf16", "cuda-bf16"]

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
    Case(
        lengths=((140, 150), (1, 70), (30, 0), (0, 5), (17, 129)), spare=5, headdim=264, nheads=2, nheads_k=1, sinks="fp32", is_causal=True
    ),
    Case(lengths=((40, 50), (1, 70), (30, 200)), used=(30, 70, 100), headdim=320, nheads=2),
    Case(lengths=((40, 50), (1, 70), (30, 200)), headdim=256, nheads=2, alibi="h", bias="qk", dropout_p=0.2),
]


@pytest.fixture(autouse=True)
def forward_on_cpu(backend):
    backend.forward_on_cpu = True


@pytest.fixture(params=["v100", "t4"])
def gpu(request, monkeypatch):
    """Both families. A GPU of this machine runs one of them."""
    monkeypatch.setenv("VOLTA_FA_SIM_GPU", request.param)


@on_cases((BACKENDS, [*SHAPES, *OPTIONS]))
def test_problem(backend, case, gpu):
    (q, k, v, dout), options = case.problem(backend)
    check(backend, q, k, v, dout, **options)


@on("sim", "cuda")
def test_gradient_of_lse(backend, gpu):
    case = Case(40, 50, 264, batch=1)
    q, k, v, dout = case.inputs(backend)
    check(backend, q, k, v, dout, dlse=backend.randn(1, 2, 40).float(), **case.options)


@pytest.mark.parametrize("gpu", ["v100", pytest.param("t4", marks=pytest.mark.slow)], indirect=True)
@on("sim", "cuda")
def test_some_heads_and_keys_of_each_launch(backend, gpu):
    """Empty sequences take room for tiles, so that launches have one KV head, and one of three key tiles."""
    lengths = ((140, 300), *((0, 0),) * 1200, (20, 150))
    case = Case(lengths=lengths, headdim=264, headdim_v=16, nheads=2, is_causal=True)
    (q, k, v, dout), options = case.problem(backend)
    check(backend, q, k, v, dout, **options)


@pytest.mark.parametrize("deterministic", [False, True])
@on("sim", "cuda")
def test_is_deterministic(backend, deterministic, gpu):
    """In either mode dq, dk and dv have no atomics: kernels run in two orders give the same bits."""
    case = Case(140, 270, 264, batch=1, nheads=2, nheads_k=1)
    q, k, v, dout = case.inputs(backend)
    out, lse = backend.forward(q, k, v, **case.options)
    runs = backend.backward(dout, q, k, v, out, lse, deterministic=deterministic, **case.options)
    for other in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(runs[0], other))
