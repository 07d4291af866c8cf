"""The option `batch_invariant`: the bits of a query row's results do not depend on other rows, the batch, or how a kernel splits keys.

Each test computes some rows in two ways (alone, in a chunk, in a batch) and compares bits. Inputs (`uneven`) differ in size by powers of
two from row to row, so that softmax maxima change for some rows of a warp and not for others. Without the option the comparisons fail
(`test_without_the_option_bits_differ`). The fixture `family` runs a test with each kernel family (volta, turing), `machine` with one; both
in the simulator and, if there is one, on the GPU. VOLTA_FA_SIMULATE=1 runs calls on CPU tensors in the simulator; with `launches`, kernels
do not run and `_sim_report` names them. Results are (out, softmax_lse)."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import volta_fa
from conftest import need  # skips a test where its backend cannot run
from flash_attention import refused  # checks that a call raises this error, with a message of one line

FWD, FWD_KVCACHE, FWD_MLA = torch.ops.volta_fa.fwd, torch.ops.volta_fa.fwd_kvcache, torch.ops.volta_fa.fwd_mla
HEADS, KV_HEADS = 4, 2
LONG = 530  # tokens; more than a split of decode kernels has, so that several blocks share a row
#: By kernel family, the GPU that is simulated.
GPUS = {"volta": "v100", "turing": "t4"}


@pytest.fixture(params=["sim", pytest.param("cuda", marks=pytest.mark.cuda)])
def machine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Runs kernels in the simulator on CPU tensors, or on the GPU, where it also puts new tensors."""
    need(request.param)
    if request.param == "sim":
        monkeypatch.setenv("VOLTA_FA_SIMULATE", "1")
        yield
        return
    with torch.device("cuda"):
        yield


@pytest.fixture(params=sorted(GPUS))
def family(request: pytest.FixtureRequest, machine: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the planner take kernels of one family."""
    monkeypatch.setenv("VOLTA_FA_SIM_GPU", GPUS[request.param])
    monkeypatch.setenv("VOLTA_FA_FAMILY", request.param)


def uneven(*size: int, dtype: torch.dtype = torch.float16) -> Tensor:
    """Random rows of sizes from 1/4 to 8."""
    return (torch.randn(*size) * torch.exp2(torch.randint(-2, 4, (*size[:-1], 1)))).to(dtype)


def lengths(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def assert_same(got: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> None:
    """Compares out (batch, rows, heads, headdim) and softmax_lse (batch, heads, rows) bit by bit."""
    assert all(map(torch.equal, got, expected))


def rows(result: tuple[Tensor, Tensor], first: int, last: int, batch: int | None = None) -> tuple[Tensor, Tensor]:
    """Takes rows of a result, and of one batch entry if it is given."""
    entries = slice(None) if batch is None else slice(batch, batch + 1)
    return result[0][entries, first:last], result[1][entries, :, first:last]


class Sequence:
    """A sequence in a cache: `attend` computes its query rows as a call may have them."""

    def __init__(self, headdim: int, dtype: torch.dtype = torch.float16, **options: Any) -> None:
        self.q = uneven(1, LONG, HEADS, headdim, dtype=dtype)
        self.k, self.v = (uneven(1, LONG, KV_HEADS, headdim, dtype=dtype) for _ in "kv")
        self.options = {"is_causal": True, "batch_invariant": True, **options}
        if "sinks" in options:
            self.options["sinks"] = torch.tensor(options["sinks"])

    def attend(self, first: int, last: int) -> tuple[Tensor, Tensor]:
        """Computes rows [first, last) of a sequence of `last` tokens."""
        return FWD_KVCACHE(self.q[:, first:last], self.k, self.v, cache_seqlens=lengths(last), **self.options)

    def assert_near_fp64(self, out: Tensor) -> None:
        """Compares the last rows of all LONG tokens with causal attention in fp64: a few roundings of fp16."""
        q, k, v = (t.double().transpose(1, 2) for t in (self.q, self.k, self.v))
        exact = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)
        exact = exact[:, -out.shape[1] :]
        assert (out.double() - exact).abs().max() < 2e-3 * exact.abs().max()

    def attend_among(self, first: int, others: list[int]) -> tuple[Tensor, Tensor]:
        """Computes the rows from `first` on in a batch with sequences of other lengths, the second of all."""
        used = [others[0], LONG, *others[1:]]
        parts = []
        for own in (self.q[:, first:], self.k, self.v):
            of_others = uneven(len(used), *own.shape[1:], dtype=own.dtype) * 3
            of_others[1] = own[0]
            parts.append(of_others)
        return FWD_KVCACHE(*parts, cache_seqlens=lengths(*used), **self.options)


#: By name: headdim, dtype and options.
CASES: dict[str, tuple[int, torch.dtype, dict[str, Any]]] = {
    "64": (64, torch.float16, {}),
    "128": (128, torch.float16, {}),
    "256": (256, torch.float16, {}),
    "512": (512, torch.float16, {}),
    "96": (96, torch.float16, {}),
    "bf16": (128, torch.bfloat16, {}),
    "bf16_64": (64, torch.bfloat16, {}),
    "bf16_256": (256, torch.bfloat16, {}),
    "window": (64, torch.float16, {"window_left": 70}),
    "window_128": (128, torch.float16, {"window_left": 70}),
    "softcap": (64, torch.float16, {"softcap": 20.0}),
    "softcap_128": (128, torch.float16, {"softcap": 20.0}),
    "sinks": (64, torch.float16, {"sinks": [0.3, -1.0, 2.0, 0.0]}),
    "no_splits": (64, torch.float16, {"num_splits": 1}),
    "no_splits_128": (128, torch.float16, {"num_splits": 1}),
}


@pytest.mark.parametrize("case", CASES)
def test_decode_verification_chunks_and_prompt_agree(family: None, case: str) -> None:
    """A call for some rows over a cache gives the bits of the call for the whole prompt."""
    headdim, dtype, options = CASES[case]
    sequence = Sequence(headdim, dtype, **options)
    prompt = sequence.attend(0, LONG)
    # decoding of one row, verification of five draft tokens, the same early in the sequence, and chunks of a prompt
    for first, last in ((LONG - 1, LONG), (LONG - 5, LONG), (3, 4), (3, 8), (100, 341), (0, 513)):
        assert_same(sequence.attend(first, last), rows(prompt, first, last))


@pytest.mark.parametrize("case", ["64", "128"])
def test_chunks_of_pages_and_large_groups_agree(family: None, case: str) -> None:
    """Shuffled pages, and five query heads per KV head, so that tiles begin and end inside a query's heads."""
    headdim, dtype, options = CASES[case]
    page, group = 16, 5
    sequence = Sequence(headdim, dtype, **options)
    sequence.q = uneven(1, LONG, group * KV_HEADS, headdim, dtype=dtype)
    prompt = sequence.attend(0, LONG)
    count = -(-LONG // page)
    sequence.options["block_table"] = table = torch.randperm(count).int()[None]
    for name in "kv":
        dense = torch.nn.functional.pad(getattr(sequence, name)[0], (0, 0, 0, 0, 0, count * page - LONG))
        pages = torch.empty(count, page, *dense.shape[1:], dtype=dtype)
        pages[table[0].long()] = dense.unflatten(0, (count, page))
        setattr(sequence, name, pages)
    for first, last in ((LONG - 1, LONG), (LONG - 7, LONG), (90, 131), (0, LONG)):
        assert_same(sequence.attend(first, last), rows(prompt, first, last))


@pytest.mark.parametrize("case", ["64", "128", "256", "bf16", "bf16_64"])
@pytest.mark.parametrize("gpu", GPUS.values())
def test_tiles_of_32_and_of_64_rows_run(gpu: str, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """More than 32 query rows per KV head take a tile of 64 rows. So the comparisons above are of different kernels."""
    need("sim")
    monkeypatch.setenv("VOLTA_FA_SIM_GPU", gpu)
    monkeypatch.setenv("VOLTA_FA_SIMULATE", "launches")
    sequence = Sequence(*CASES[case][:2])
    group = HEADS // KV_HEADS
    for queries, tile in ((1, 32), (32 // group, 32), (32 // group + 1, 64), (300, 64)):
        sequence.attend(LONG - queries, LONG)
        (launch,) = json.loads(torch.ops.volta_fa._sim_report())
        assert launch["kernel"].endswith(f"x{tile}")


@pytest.mark.parametrize("case", ["64", "128", "bf16", "no_splits"])
def test_a_sequence_in_a_batch_has_the_bits_of_one_alone(family: None, case: str) -> None:
    headdim, dtype, options = CASES[case]
    sequence = Sequence(headdim, dtype, **options)
    alone = sequence.attend(LONG - 2, LONG)
    for more in (0, 54):  # another plan may serve a large batch
        batch = sequence.attend_among(LONG - 2, [1, 2, 63, 64, 65, 300, LONG, 0, 17, *torch.randint(0, 200, (more,)).tolist()])
        assert_same(rows(batch, 0, 2, batch=1), alone)


def test_both_grids_agree(machine: None) -> None:
    """A grid that splits keys over blocks and one without splits (num_splits=1) give the same bits, near fp64 attention."""
    sequence = Sequence(64)
    spread = sequence.attend(0, LONG)
    sequence.options["num_splits"] = 1
    assert_same(sequence.attend(0, LONG), spread)
    sequence.assert_near_fp64(spread[0])


def test_both_grids_agree_about_rows_whose_keys_all_count_as_0(machine: None) -> None:
    """Scores below any that softmax tells apart: each split has a sum of 0, and only the sink is left."""
    sequence = Sequence(64, sinks=[-100.0] * HEADS)
    sequence.q[:], sequence.k[:] = 60000.0, -60000.0
    spread = sequence.attend(LONG - 3, LONG)
    sequence.options["num_splits"] = 1
    assert_same(sequence.attend(LONG - 3, LONG), spread)
    assert torch.equal(spread[1], torch.full_like(spread[1], -100.0)) and not spread[0].any()


@pytest.mark.parametrize("headdim", [64, 128, 256, 512])
def test_chunks_are_near_fp64(machine: None, headdim: int) -> None:
    sequence = Sequence(headdim)
    sequence.assert_near_fp64(sequence.attend(LONG - 77, LONG)[0])


@pytest.mark.parametrize("headdim", [64, 256])
@pytest.mark.parametrize("name", ["int8", "int4", "fp8_e4m3"])
def test_quantized_caches(machine: None, name: str, headdim: int) -> None:
    """Quantized caches: the power of two by which kernels scale a row's probabilities depends on this row alone."""
    sequence = Sequence(headdim)
    is_fp8 = name.startswith("fp8")
    for letter in "kv":
        # fp8 has the scale that a caller gives; int8 and int4 compute scales for each token and head, int4 also a zero point
        made = volta_fa.quantize_kv(getattr(sequence, letter), name, scale=1.0 if is_fp8 else None)
        setattr(sequence, letter, made.data)
        parts = {"scale": made.scale, "zero_point": made.zero_point}
        sequence.options |= {f"{letter}_{part}": t for part, t in parts.items() if t is not None and not is_fp8}
    prompt = sequence.attend(0, LONG)
    for first, last in ((LONG - 1, LONG), (LONG - 5, LONG), (100, 180)):
        assert_same(sequence.attend(first, last), rows(prompt, first, last))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_latents(machine: None, dtype: torch.dtype) -> None:
    """Latents: the cache of multi-head latent attention, 576 columns per token. The first 512 are also the values."""
    q, latents = uneven(1, 40, 16, 576, dtype=dtype), uneven(1, LONG, 1, 576, dtype=dtype)

    def attend(first: int, last: int) -> tuple[Tensor, Tensor]:
        used = lengths(LONG - 40 + last)
        return FWD_MLA(q[:, first:last], latents, cache_seqlens=used, is_causal=True, batch_invariant=True)

    prompt = attend(0, 40)
    for first, last in ((39, 40), (35, 40), (0, 9)):
        assert_same(attend(first, last), rows(prompt, first, last))


#: Names in CASES for `fwd`, which has no `num_splits`, and a case that only its bf16 kernels have.
FORWARD = (*(name for name in CASES if "no_splits" not in name), "bf16_64_large_last_token")


@pytest.mark.parametrize("case", FORWARD)
def test_chunks_of_a_forward_agree(family: None, case: str) -> None:
    """Rows of `fwd` have the same bits alone, in chunks, in the whole prompt, in a batch and in packed sequences."""
    headdim, dtype, options = CASES[case.removesuffix("_large_last_token")]
    n = 300
    q, k, v = (uneven(1, n, heads, headdim, dtype=dtype) for heads in (HEADS, KV_HEADS, KV_HEADS))
    options = {"is_causal": True, "batch_invariant": True, **options}
    if "sinks" in options:
        options["sinks"] = torch.tensor(options["sinks"])
    if case.endswith("_large_last_token"):
        # v of very different sizes: with one power-of-two scale for all of v, small numbers would lose bits beside a large last token
        v[..., ::2] *= 2**-12
        v[:, -1] = 500
    prompt = FWD(q, k, v, **options)[:2]
    for first, last in ((n - 1, n), (n - 5, n), (50, 197), (0, 129)):
        assert_same(FWD(q[:, first:last], k[:, :last], v[:, :last], **options)[:2], rows(prompt, first, last))
    wide = [torch.cat((uneven(1, *t.shape[1:], dtype=dtype), t, t)) for t in (q, k, v)]
    assert_same(rows(FWD(*wide, **options)[:2], 0, n, batch=1), prompt)
    cu = lengths(0, 11, 11 + n)
    packed = [torch.cat((uneven(11, *t.shape[2:], dtype=dtype), t[0])) for t in (q, k, v)]
    out, lse, *_ = FWD(*packed, cu_seqlens_q=cu, cu_seqlens_k=cu, max_seqlen_q=n, max_seqlen_k=n, **options)
    assert_same((out[None, 11:], lse[None, :, 11:]), prompt)


def test_without_the_option_bits_differ(family: None) -> None:
    """The comparisons above can fail."""
    sequence = Sequence(64, batch_invariant=False)
    prompt = sequence.attend(0, LONG)
    assert not torch.equal(sequence.attend(LONG - 5, LONG)[0], rows(prompt, LONG - 5, LONG)[0])


def test_the_environment_variable_sets_it_for_all_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VOLTA_FA_SIMULATE", "launches")
    sequence = Sequence(64, batch_invariant=False)
    kernels = []
    for value in ("", "0", "1"):
        monkeypatch.setenv("VOLTA_FA_BATCH_INVARIANT", value)
        sequence.attend(LONG - 1, LONG)
        kernels.append("invariant" in str(torch.ops.volta_fa._sim_report()))
    assert kernels == [False, False, True]
    monkeypatch.setenv("VOLTA_FA_BATCH_INVARIANT", "yes")
    refused(ValueError, "VOLTA_FA_BATCH_INVARIANT: got `yes`, expected 0 or 1", sequence.attend, LONG - 1, LONG)


def test_options_without_invariant_kernels_are_refused() -> None:
    q, tree = torch.randn(1, 4, HEADS, 64, dtype=torch.float16), torch.ones(1, 4, dtype=torch.int64)
    invariant = {"batch_invariant": True}
    refused(ValueError, "dropout_p: got 0.5, expected 0 with batch_invariant", FWD, q, q, q, dropout_p=0.5, **invariant)
    refused(ValueError, "tree_mask: got a tensor, expected None with batch_invariant", FWD_KVCACHE, q, q, q, tree_mask=tree, **invariant)
    refused(ValueError, "batch_invariant: got True, expected False on the CPU backend", FWD, *[q.float()] * 3, **invariant)


@pytest.mark.parametrize("selects", [False, True])
def test_a_call_without_invariant_kernels_writes_nothing(selects: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A T4 has no room for the tile of quantized caches of headdim 320. The error names the option, before the append."""
    need("sim")
    monkeypatch.setenv("VOLTA_FA_SIM_GPU", "t4")
    monkeypatch.setenv("VOLTA_FA_SIMULATE", "1")
    written = [torch.zeros(1, 32, 1, 320, dtype=torch.int8) for _ in "kv"] + [torch.zeros(1, 32, 1) for _ in "kv"]
    q, k = torch.randn(1, 1, 2, 320).half(), torch.randn(1, 1, 1, 320).half()
    options = {"cache_seqlens": lengths(5), "k_scale": written[2], "v_scale": written[3]}
    if selects:
        options |= {"kv_indices": torch.zeros(1, 1, 1, 1, dtype=torch.int32), "kv_block": 16}
    message = r"no turing or volta kernel \(Decode\) with batch_invariant for .*Call without batch_invariant"
    refused(NotImplementedError, message, FWD_KVCACHE, q, *written[:2], k, k, batch_invariant=True, **options)
    assert not any(t.any() for t in written)
    FWD_KVCACHE(q, *written[:2], k, k, **options)  # as the error says
    assert all(t.any() for t in written)


def test_a_call_with_the_option_has_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VOLTA_FA_SIMULATE", "1")
    q = torch.randn(1, 8, HEADS, 64, dtype=torch.float16, requires_grad=True)
    FWD(q, q.detach(), q.detach(), batch_invariant=True)[0].sum().backward()
    assert q.grad is not None and q.grad.isfinite().all()
