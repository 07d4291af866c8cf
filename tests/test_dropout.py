"""Dropout of `fwd` and `bwd`, gradients against finite differences (gradcheck), and random combinations of all options.

Dropout's mask follows from `rng_state` (seed, offset) and a score's position alone (`_dropout_mask`), so backward repeats forward's.
A backend is the CPU, the simulator (`sim`) or a GPU (`cuda`), with a dtype; ALL are four dtypes on the CPU, and kernels in fp16. Its
`forward_and_state` returns out, softmax_lse and rng_state. Its `backward` runs kernels several times (in the simulator in each of some warp
orders), and returns the gradients of each run. `repeat` runs a `Case` (volta_fa/check/cases.py) on a backend against the fp64 reference,
and prints a command that repeats a failure. BASE is a case of 67 queries, 93 keys, headdim 64, 4 query heads on 2 KV heads."""

import math
import os
import subprocess
import sys

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
from torch.library import opcheck

import reference
from conftest import ALL, REPOSITORY, Case, on, repeat
from test_features import BASE

op = torch.ops.volta_fa


@on(*ALL)
def test_dropout_mask(backend):
    """Forward and backward drop what `_dropout_mask` says, whatever their tiles are."""
    p, seqlen_q, seqlen_k, headdim_v = 0.3, 75, 101, 256
    shape = 2, 2, seqlen_q, seqlen_k  # of the mask: 2 batch entries, 2 heads
    sizes = ((seqlen_q, 8), (seqlen_k, 8), (seqlen_k, headdim_v))
    q, k, v = (torch.zeros(2, n, 2, d, dtype=backend.dtype, device=backend.device) for n, d in sizes)
    # v is the identity, so column j of out is not 0 exactly where dropout keeps key j
    v[:, torch.arange(seqlen_k), :, torch.arange(seqlen_k)] = 1.0
    out, lse, rng_state = backend.forward_and_state(q, k, v, dropout_p=p)
    mask = op._dropout_mask(rng_state, *shape, p)
    assert torch.equal(out[..., :seqlen_k].transpose(1, 2) != 0, mask)
    # dout has a one in column i of row i, so dv of key j has the kept probability of row i in column i
    dout = torch.zeros_like(out)
    dout[:, torch.arange(seqlen_q), :, torch.arange(seqlen_q)] = 1.0
    [(_, _, dv), *_] = backend.backward(dout, q, k, v, out, lse, dropout_p=p, rng_state=rng_state)
    # dv, of the first run of bwd: (batch, key, head, row)
    assert torch.equal(dv[..., :seqlen_q].permute(0, 2, 3, 1) != 0, mask)


def test_dropout_mask_has_a_meta_kernel():
    """torch.compile traces `_dropout_mask` with fake tensors, whose `rng_state` has no memory to read."""
    arguments = (1, 2, 9, 13, 0.3)
    opcheck(op._dropout_mask.default, (torch.tensor([5, 3]), *arguments))
    mask = op._dropout_mask(torch.empty(2, dtype=torch.int64, device="meta"), *arguments)
    assert mask.is_meta and mask.shape == (1, 2, 9, 13) and mask.dtype == torch.bool


@pytest.mark.parametrize("p", [1e-9, 2.0**-17, 2.0**-15, 0.3, 0.5, 0.77, 1 - 2.0**-15, 1 - 1e-9])
@on("cpu-fp64")
def test_dropout_keeps_the_mean(backend, p):
    """Kept probabilities are divided by the exact share that is kept, for p rounded to 15 bits, so means are right. The share is not 0."""
    q, k, v = (torch.ones(1, n, 2, 8, dtype=backend.dtype) for n in (40, 300, 300))
    out, _, rng_state = backend.forward_and_state(q, k, v, dropout_p=p)
    share = reference.kept_share(p)
    assert 0 < share <= 1 and abs(share - (1 - p)) <= max(2**-16, 2**-15 - (1 - p))
    of_keys = op._dropout_mask(rng_state, 1, 2, 40, 300, p).double().mean(-1)
    torch.testing.assert_close(out[..., 0].transpose(1, 2), of_keys / share)


@pytest.mark.parametrize("p", [0.01, 0.17, 0.5, 0.9])
def test_drop_rate(p):
    """The rate is p within five standard deviations, on the whole and along each dimension."""
    shape = (3, 4, 200, 300)
    mask = op._dropout_mask(torch.tensor([2**62 + 12345, 77]), *shape, p)
    for dims in ((0, 1, 2, 3), (1, 2, 3), (0, 2, 3), (0, 1, 3), (0, 1, 2)):
        rate = 1 - mask.double().mean(dims)
        count = math.prod(shape[d] for d in dims)
        assert ((rate - p).abs() < 5 * math.sqrt(p * (1 - p) / count)).all(), dims


@on("cpu-fp32", "cuda")
def test_dropout_follows_the_generators(backend):
    """Random numbers come from torch's generator, or from the one that a call gets. A call without dropout has no rng_state."""
    q, k, v, _ = BASE.inputs(backend)

    def drawn(**generator):
        out, _, state = op.fwd(q, k, v, dropout_p=0.5, **generator)
        return out, state.tolist()

    torch.manual_seed(3)
    first, second = drawn(), drawn()
    torch.manual_seed(3)
    again = drawn()
    assert first[1] == again[1] != second[1] and torch.equal(first[0], again[0]) and not torch.equal(first[0], second[0])
    own = [torch.Generator(backend.device).manual_seed(11) for _ in range(2)]
    assert drawn(generator=own[0])[1] == drawn(generator=own[1])[1] != drawn(generator=own[0])[1]
    assert op.fwd(q, k, v)[2].shape == (0,)


#: Fields: seqlen_q, seqlen_k, headdim, headdim_v; lengths: (seqlen_q, seqlen_k) of packed sequences; bias: its dimensions that are not 1,
#: and its dtype (own: q's); alibi: dimensions of the slopes; sinks: dtype; used: seqused_k.
GRADCHECK = [
    Case(6, 7, 8, nheads=2, batch=2, bias="hqk:own", is_causal=True),
    Case(6, 7, 8, nheads=2, batch=2, alibi="bh", softcap=2.0, sinks="own", window_left=3),
    Case(6, 7, 8, nheads=2, batch=2, used=(7, 3)),
    Case(5, 7, 8, 16, batch=2, nheads=4, nheads_k=2),
    Case(7, 4, 8, is_causal=True, batch=1),  # rows without any key
    Case(4, 5, 16, softmax_scale=-0.7, batch=1),
    # a generator of the same seed for each call makes dropout a function
    Case(headdim=8, nheads=4, nheads_k=2, lengths=((4, 3), (0, 2), (6, 5)), bias="hk:own", sinks="own", dropout_p=0.3),
]


@pytest.mark.parametrize("case", GRADCHECK, ids=str)
@on("cpu-fp64")
def test_gradcheck(backend, case):
    """The gradients of q, k, v, bias and sinks are those of finite differences."""
    (q, k, v, _), options = case.problem(backend)
    leaves = {"q": q, "k": k, "v": v, **{n: options.pop(n) for n in ("attn_bias", "sinks") if n in options}}
    leaves = {name: t.requires_grad_() for name, t in leaves.items()}

    def out(*t):
        generator = torch.Generator().manual_seed(1) if case.dropout_p else None
        return op.fwd(**dict(zip(leaves, t)), **options, generator=generator)[0]

    assert torch.autograd.gradcheck(out, list(leaves.values()))


#: Keys to one side of a window; -1: all.
WINDOWS = (-1, -1, 0, 1, 7, 40)
#: Dimensions of a bias that are not 1; "-": all are 1; empty: no bias. Repeated values come up more often.
BIASES = ("", "", "bhqk", "hqk", "qk", "bqk", "bk", "hq", "k", "q", "-")
#: The usual test lengths of attention kernels.
SEQLENS = (1, 2, 3, 16, 17, 63, 64, 65, 113, 127, 128, 129, 203, 239, 255, 256, 257, 512, 513, 799, 1000, 1023, 1024, 2047, 2048)
#: Most scores of a problem on a GPU: the reference holds several fp64 matrices of this size.
MAX_SCORES = 2**25


def options_of_scores(pick):
    """Returns a combination of the Case's fields that change scores."""
    softcap, dims = pick((0.0, 0.0, 1.5, 30.0)), pick(BIASES)
    return dict(
        softcap=softcap,
        dropout_p=0.0 if softcap else pick((0.0, 0.0, 0.17, 0.5)),  # the op refuses both
        alibi=pick(("", "", "h", "bh")),
        bias=f"{dims}:{pick(('own', 'fp32', 'bool'))}" if dims else "",
        sinks=pick(("", "", "own", "fp32")),
    )


@st.composite
def combinations(draw, most, headdims=(8, 32, 40, 64, 20, 128, 1, 91), most_heads=4):
    """Returns a Case: a combination of all options, with lengths up to `most`. Half of the problems have no option that changes scores, for
    kernels without features."""

    def pick(options):  # the simplest is first
        return draw(st.sampled_from(options))

    def lengths():
        return draw(st.integers(0, most) | st.sampled_from([n for n in SEQLENS if n <= most]))

    nheads_k = pick(range(1, most_heads // 2 + 1))
    groups = pick([g for g in range(1, most_heads + 1) if g * nheads_k <= most_heads])
    headdim = pick(headdims)
    entries = pick(range(1, 4))
    packed = pick((False, True))
    seqlens = tuple((lengths(), lengths()) for _ in range(entries)) if packed else ((max(lengths(), 1), max(lengths(), 1)),) * entries
    is_causal = pick((False, True))
    scores = options_of_scores(pick) if pick((False, True)) else {}
    if pick((False, False, True)):
        scores["used"] = tuple(pick(sorted({k, k // 2, max(k - 1, 0), 0}, reverse=True)) for _, k in seqlens)
    return Case(
        seqlen_q=0 if packed else seqlens[0][0],
        seqlen_k=0 if packed else seqlens[0][1],
        lengths=seqlens if packed else (),
        batch=2 if packed else entries,
        spare=pick((0, 0, 5)) if packed else 0,  # by how much max_seqlen exceeds the longest sequence
        headdim=headdim,
        headdim_v=pick((None, None, pick(headdims))),
        nheads=nheads_k * groups,
        nheads_k=nheads_k,
        is_causal=is_causal,
        window_left=pick(WINDOWS),
        window_right=-1 if is_causal else pick(WINDOWS),  # the op refuses is_causal with keys to the right
        softmax_scale=pick((None, None, 0.5, -0.1)),
        **scores,
    )


def examples(n):
    """Makes a test draw n random problems, or VOLTA_FA_TEST_EXAMPLES."""
    count = int(os.environ.get("VOLTA_FA_TEST_EXAMPLES", n))
    return hypothesis.settings(max_examples=count, suppress_health_check=list(hypothesis.HealthCheck))


#: By backend: the largest lengths of problems, and their number.
COMBINATIONS = {"cpu-fp32": (120, 200), "sim": (45, 25), "cpu-fp64": (50, 60), "sim-bf16": (35, 8)}


@pytest.mark.parametrize(
    "name", [*list(COMBINATIONS)[:2], *(pytest.param(name, marks=pytest.mark.slow) for name in list(COMBINATIONS)[2:])]
)
def test_random_combinations(name):
    most, count = COMBINATIONS[name]

    @examples(count)
    @hypothesis.given(combinations(most), st.booleans())
    def run(case, deterministic):
        repeat(name, case, deterministic)

    run()


@pytest.mark.cuda
@examples(300)
@hypothesis.given(
    st.sampled_from(("cuda", "cuda", "cuda-bf16")),
    combinations(2048, (8, 32, 40, 64, 80, 91, 96, 112, 128, 160, 192, 224, 256), most_heads=8),
    st.booleans(),
)
def test_random_combinations_cuda(name, case, deterministic):
    """Random options and shapes, of at most MAX_SCORES scores, so that the fp64 reference fits memory."""
    longest = (n - case.spare for n in case.longest)  # case.longest is max_seqlen of q and k; scores exist for the lengths alone
    hypothesis.assume(case.entries * case.nheads * math.prod(longest) <= MAX_SCORES)
    repeat(name, case, deterministic)


@pytest.mark.slow
def test_a_failure_prints_what_repeats_it(monkeypatch, capsys):
    # allows a tenth of eager attention's error, which no fp16 result reaches, so that the test fails
    monkeypatch.setattr(reference.tolerance, "FORWARD_FACTOR", 0.1)
    monkeypatch.setattr(reference.Budget, "_unavoidable", lambda *_: 0.0)
    with pytest.raises(AssertionError):
        repeat("cpu-fp16", Case(40, 50, 64, is_causal=True))
    command = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("to repeat: ")).removeprefix("to repeat: ")
    again = subprocess.run(command.replace("python", sys.executable, 1), shell=True, cwd=REPOSITORY, capture_output=True, text=True)
    assert again.returncode == 0, again.stdout + again.stderr
