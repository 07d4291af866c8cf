"""Block masks of `fwd` and `bwd`: results against the fp64 reference with the same mask, rejected arguments, and PyTorch's compilers.

A mask divides scores into blocks of 128 queries by 64 keys. Absent blocks are hidden. Tensors of a call:
- `block_lists` (batch, heads, row blocks, 4 + n) int32. For each row block (128 queries): [0] and [1] the numbers of partial and of full
  blocks, [2] the first partial block's tile in `block_bits`, [3] the row block that is launched at this place, from [4] on the key blocks
  (64 keys), partial ones first.
- `block_bits` (tiles, 256) int32: a tile has a bit for each of the 128 * 64 scores of a partial block.
- `block_lists_t` and `block_bits_t`: the transposed mask, for dk and dv.

Helpers: `block_masks.pack` (volta_fa.check) returns lists and bits of a bool mask, `options_of` a call's four tensors, `expand` the mask
again. A backend is the CPU, simulator or GPU with a dtype; `gpu` simulates a V100 and a T4 in turn. `check` compares results and gradients
with fp64, `check_case` those of a Case (volta_fa/check/cases.py), which is a problem: seqlen_q, seqlen_k, headdim, and by name other sizes
and options: `used` is seqused_k, `alibi` the dimensions of the slopes, `sinks` their dtype (own: q's)."""

import dataclasses
import math
from dataclasses import dataclass

import pytest
import torch
from torch.library import opcheck

from conftest import BF16_KERNELS, CPU, FP32_KERNELS, GPUS, KERNELS, Case, check, check_case, on, on_cases, run_python
from reference import block_masks
from test_validation import refused  # refused(call, exception, *words of its message)

op = torch.ops.volta_fa

BACKENDS = [*CPU, *KERNELS, *BF16_KERNELS]


@dataclass(frozen=True)
class Masked:
    """A problem with a random mask of `mask_batch` entries and `mask_heads` heads, which repeat (modulo) over the problem's. `density`:
    the share of blocks that are not absent."""

    case: Case
    mask_batch: int = 1
    mask_heads: int = 1
    density: float = 0.4
    deterministic: bool = False

    def __str__(self) -> str:
        return f"{self.case}_mask{self.mask_batch}x{self.mask_heads}_{self.density:g}" + "_deterministic" * self.deterministic

    def mask(self, seed: int):
        """Returns a bool mask (mask_batch, mask_heads, seqlen_q, seqlen_k)."""
        sizes = (self.mask_batch, self.mask_heads, self.case.seqlen_q, self.case.seqlen_k)
        return block_masks.random_mask(*sizes, seed, self.density)

    def problem(self, backend):
        """Returns (q, k, v, dout), and the op's options with the packed mask."""
        (q, k, v, dout), options = self.case.problem(backend)
        return (q, k, v, dout), options | block_masks.options_of(self.mask(backend.seed), backend.device, backend.seed)


# seqlen_q, seqlen_k and headdim; batch 2. Two blocks of rows and three of keys, the last of each partial.
BASE = Case(150, 140, 64, nheads=4, nheads_k=2)


def changed(**fields) -> Case:
    """Returns BASE with other fields."""
    return dataclasses.replace(BASE, **fields)


CASES = [
    Masked(Case(300, 280, 64, nheads=2, nheads_k=1), 2, 2),
    Masked(BASE),
    Masked(BASE, 2, 4),
    Masked(BASE, 1, 4, deterministic=True),
    Masked(BASE, 2, 1, density=0.1),
    # sizes that do not divide the problem's: FlexAttention repeats them too
    Masked(changed(batch=3, nheads=5, nheads_k=1), 2, 3),
    Masked(BASE, 4, 7),
    Masked(BASE, density=1.0),
    Masked(BASE, density=0.0),
    Masked(Case(1, 1, 64, nheads=1), density=1.0),
    Masked(Case(129, 63, 64, nheads=2)),
    Masked(Case(64, 513, 128, nheads=2, nheads_k=1), 1, 2),
    Masked(Case(257, 129, 128, nheads=2, is_causal=True), 1, 2),
    Masked(Case(200, 190, 64, 32, nheads=2)),
    Masked(Case(140, 150, 40, nheads=2)),
    Masked(Case(140, 150, 256, nheads=1)),
    Masked(changed(is_causal=True), 1, 4, density=0.7),
    Masked(changed(window_left=70, window_right=20), 2, 1, density=0.7),
    Masked(changed(softmax_scale=-0.3)),
    Masked(changed(softcap=1.5), 1, 4),
    Masked(changed(softcap=2.0, alibi="bh", is_causal=True), density=0.7),
    Masked(changed(alibi="h"), 1, 4),
    Masked(changed(sinks="fp32"), 2, 4),
    Masked(changed(dropout_p=0.25), 1, 4),
    Masked(changed(dropout_p=0.1, is_causal=True, sinks="own"), 2, 1, density=0.7),
    Masked(changed(used=(140, 70)), 2, 4),
    Masked(changed(used=(0, 100), is_causal=True)),
]

#: Cases for all dtypes, a third of all. The others run in fp32 on the CPU and in fp16 on kernels; slow tests run all in every dtype.
OF_EACH_DTYPE = CASES[1:4] + CASES[10:12] + CASES[17::2]


@on_cases((["cpu-fp32", *KERNELS], CASES), (BACKENDS, OF_EACH_DTYPE), slow=((BACKENDS, CASES),))
def test_attention_with_a_block_mask(backend, gpu, case):
    check_case(backend, case)


@on(*BACKENDS)
def test_gradient_of_softmax_lse(backend, gpu):
    """softmax_lse is differentiable, as in FlexAttention. Rows without visible keys get no gradient, whatever `dlse` is."""
    check_case(backend, Masked(BASE, 1, 4), dlse=backend.randn(2, 4, 150).float())


@on(*BACKENDS, *FP32_KERNELS)
def test_absent_blocks_may_hold_nan_and_inf(backend, gpu):
    """NaN and inf in keys of absent blocks do not change out, nor gradients on the CPU and of fp32 kernels. Those have tiles of 128 keys in
    backward, here of a full and an absent block, of two absent ones, and of an absent and a full block."""
    case = Case(256, 384, 64, batch=1, nheads=1)
    mask = torch.zeros(1, 1, 256, 384, dtype=torch.bool)
    mask[..., :64] = mask[..., :128, 320:] = True
    (q, k, v, dout), options = case.problem(backend)
    options |= block_masks.options_of(mask, backend.device)
    results = []
    for of_k, of_v in ((0.0, 0.0), (math.nan, math.inf)):
        k[:, 64:320], v[:, 64:320] = of_k, of_v
        results.append(backend.forward(q, k, v, **options))
        if backend.name in FP32_KERNELS or not backend.kernels:
            results[-1] += backend.backward(dout, q, k, v, *results[-1], **options)[0]
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize("softcap", [0.0, 1.5])
@pytest.mark.parametrize("which", ["q", "k", "v", "dout"])
@on(*CPU)
def test_nan_and_inf_reach_only_scores_of_present_blocks(backend, which, softcap):
    """Query heads of a KV head have different lists. NaN or inf are in rows of the first block of the first head, which alone sees the
    second key block, or in this key block. The CPU backend computes 42 query positions of three heads at once, so blocks share them."""
    (q, k, v, dout), options = Case(256, 192, 64, batch=1, nheads=3, nheads_k=1, softcap=softcap).problem(backend)
    mask = torch.ones(1, 3, 256, 192, dtype=torch.bool)
    mask[..., 64:128] = False
    mask[:, 0, :128, 64:128], mask[:, 0, :128, 128:] = True, False
    options |= block_masks.options_of(mask, backend.device)
    others = torch.ones(1, 256, 3, dtype=torch.bool)  # query positions and heads that do not see the second key block
    others[:, :128, 0] = False
    spoiled = {"q": q[:, :128, 0], "k": k[:, 64:128], "v": v[:, 64:128], "dout": dout[:, :128, 0]}[which]
    results = []
    for value in (0.0, math.nan if which in "qk" else math.inf):
        spoiled[:] = value
        out, lse = backend.forward(q, k, v, **options)
        [(dq, dk, dv)] = backend.backward(dout, q, k, v, out, lse, **options)
        assert value == 0.0 or not dq[:, :128, 0].isfinite().any()
        results.append((out[others], lse.mT[others], dq[others], dk[:, 128:], dv[:, 128:]))
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize("headdim", [64, 128])
@on("cpu-fp32", "sim", "cuda")
def test_partial_blocks_then_full_ones_then_those_at_an_edge(backend, gpu, headdim):
    """One row of blocks has partial, absent and full blocks, and blocks that the causal mask cuts. Kernels treat each kind differently."""
    case = Case(256, 448, headdim, batch=1, nheads=1, is_causal=True)
    mask = torch.ones(1, 1, 256, 448, dtype=torch.bool)
    mask[..., 128:192] = False
    for first in (0, 192):  # columns of partial blocks
        mask[..., first : first + 64] = torch.rand(256, 64, generator=torch.Generator().manual_seed(backend.seed)) < 0.5
    check_case(backend, case, dout=None, **block_masks.options_of(mask, backend.device))


@on("cpu-fp32")
def test_bits_are_optional_without_partial_blocks(backend):
    mask = torch.zeros(1, 1, 256, 192, dtype=torch.bool)
    mask[..., :128, :64] = mask[..., 128:, 64:] = True
    (q, k, v, dout), options = Case(256, 192, 32, nheads=2).problem(backend)
    lists, _ = block_masks.pack(mask)
    # transposed, the same mask has partial blocks
    transposed = block_masks.options_of(mask, backend.device)
    options |= {"block_lists": lists, "block_lists_t": transposed["block_lists_t"], "block_bits_t": transposed["block_bits_t"]}
    check(backend, q, k, v, dout, **options)


@on("cpu-fp32")
def test_strided_lists_and_bits(backend):
    """All dimensions but the last may have any stride."""
    (q, k, v, dout), options = Masked(BASE, 2, 4).problem(backend)
    expected = op.fwd(q, k, v, **options)[:2]
    lists, bits = options["block_lists"], options["block_bits"]
    options["block_lists"] = torch.stack([lists, lists], 3).transpose(0, 1).contiguous().transpose(0, 1)[..., 0, :]
    options["block_bits"] = torch.stack([bits, bits], 1)[:, 0]
    assert all(map(torch.equal, op.fwd(q, k, v, **options)[:2], expected))


def test_the_tests_own_masks_survive_packing():
    """block_masks.expand(pack(mask)) is the mask, also of the transposed one."""
    for seed in range(4):
        mask = block_masks.random_mask(2, 3, 200, 330, seed)
        assert 0 < mask.sum() < mask.numel()
        for whole in (mask, mask.transpose(-1, -2)):
            lists, bits = block_masks.pack(whole, seed)
            assert torch.equal(block_masks.expand(lists, bits, *whole.shape), whole)


def valid(backend):
    """Returns q, k, v and options of a valid call: two row blocks and three key blocks, the second partial."""
    mask = torch.ones(1, 2, 200, 192, dtype=torch.bool)
    mask[..., 70] = False
    (q, k, v, _), options = Case(200, 192, 32, nheads=2).problem(backend)
    return {"q": q, "k": k, "v": v, **options, **block_masks.options_of(mask, backend.device)}


#: Wrong arguments of `valid`'s call by name: an argument, a function that returns its replacement, and words of the error.
WRONG = {
    "dtype": ("block_lists", lambda a: a["block_lists"].long(), ["got dtype torch.int64", "torch.int32"]),
    "rank": ("block_lists", lambda a: a["block_lists"][0], ["got shape (2, 2, 9)", "here (>= 1, >= 1, 2, >= 4)"]),
    "rows": ("block_lists", lambda a: a["block_lists"][:, :, :1], ["got shape (1, 2, 1, 9)", "seqlen_q / 128"]),
    "no entry": ("block_lists", lambda a: a["block_lists"][:0], ["got shape (0, 2, 2, 9)"]),
    "header": ("block_lists", lambda a: a["block_lists"][..., :3], ["got shape (1, 2, 2, 3)", ">= 4"]),
    "stride": ("block_lists", lambda a: a["block_lists"].mT.contiguous().mT, ["contiguous last dimension"]),
    "rows of keys": ("block_lists_t", lambda a: a["block_lists_t"][:, :, :1], ["got shape (1, 2, 1,", "seqlen_k / 128"]),
    "bits' dtype": ("block_bits", lambda a: a["block_bits"].long(), ["got dtype torch.int64"]),
    "bits' shape": ("block_bits", lambda a: a["block_bits"][:, :128], ["got shape (5, 128)", "(tiles, 256)"]),
    "bits alone": ("block_lists", lambda a: None, ["block_bits: got a tensor, expected None, since block_lists is not given"]),
    "bias": ("attn_bias", lambda a: torch.zeros(1, 1, 1, 1), ["block_lists: got a tensor together with attn_bias"]),
}


@pytest.mark.parametrize("name", WRONG)
@on("cpu-fp32", "sim")
def test_wrong_arguments_are_refused(backend, name):
    argument, spoil, words = WRONG[name]
    backend.simulate()
    arguments = valid(backend)
    refused(lambda: op.fwd(**arguments | {argument: spoil(arguments)}), ValueError, "volta_fa::fwd", *words)


def test_packed_sequences_are_refused():
    """Block lists together with cu_seqlens_q are an error that names both."""
    q = torch.randn(200, 2, 32)
    cu = torch.tensor([0, 200], dtype=torch.int32)
    lists, bits = block_masks.pack(torch.ones(1, 1, 200, 200, dtype=torch.bool))
    options = {"cu_seqlens_q": cu, "cu_seqlens_k": cu, "max_seqlen_q": 200, "max_seqlen_k": 200, "block_lists": lists, "block_bits": bits}
    message = "block_lists: got a tensor together with cu_seqlens_q, expected one of the two to be None"
    refused(lambda: op.fwd(q, q, q, **options), ValueError, message)


@on("cpu-fp32")
def test_gradients_need_transposed_lists(backend):
    arguments = valid(backend)
    lists_t, bits_t = arguments.pop("block_lists_t"), arguments.pop("block_bits_t")
    q = arguments["q"].requires_grad_()
    loss = op.fwd(**arguments)[0].sum()
    refused(loss.backward, ValueError, "block_lists_t: got None, expected a tensor, since block_lists is given")
    transposed_alone = {"q": q, "k": arguments["k"], "v": arguments["v"], "block_lists_t": lists_t, "block_bits_t": bits_t}
    refused(lambda: op.fwd(**transposed_alone), ValueError, "block_lists_t: got a tensor, expected None, since block_lists is not given")


#: Wrong numbers in a list of `valid`'s call: the argument, the place (batch entry, head, row block, index in the list), the number, and
#: words of the error.
VALUES = {
    "negative count": ("block_lists", (0, 1, 1, 1), -1, ["1 partial and -1 full blocks in list (0, 1, 1)"]),
    "counts beyond the list": ("block_lists", (0, 0, 0, 1), 5, ["1 partial and 5 full blocks in list (0, 0, 0)", "at most 5"]),
    "tile outside": ("block_lists", (0, 0, 1, 2), 5, ["tiles 5 to 5 in list (0, 0, 1)", "tiles from 0 to 4"]),
    "negative tile": ("block_lists", (0, 0, 1, 2), -1, ["tiles -1 to -1"]),
    "block outside": ("block_lists", (0, 1, 0, 6), 3, ["block 3 in list (0, 1, 0)", "blocks from 0 to 2"]),
    "negative block": ("block_lists", (0, 1, 0, 4), -2, ["block -2 in list (0, 1, 0)"]),
    "unsorted": ("block_lists", (0, 1, 0, 5), 2, ["block 2 after 2 in list (0, 1, 0)", "ascend"]),
    "in both parts": ("block_lists", (0, 1, 0, 4), 0, ["block 0 as partial and as full in list (0, 1, 0)"]),
    "launch outside": ("block_lists", (0, 1, 0, 3), 2, ["row block 2 to launch in list (0, 1, 0)", "from 0 to 1"]),
    "no permutation": ("block_lists", (0, 1, slice(None), 3), 1, ["row block 1 to launch in list (0, 1, 1)"]),
    "transposed": ("block_lists_t", (0, 0, 1, 4), 7, ["block 7 in list (0, 0, 1)", "blocks from 0 to 3"]),
}


@pytest.mark.parametrize("name", VALUES)
@on("cpu-fp32", "sim")
def test_wrong_values_are_refused(backend, name):
    argument, place, value, words = VALUES[name]
    backend.simulate()
    arguments = valid(backend)
    op.fwd(**arguments, check_lengths=True)
    arguments[argument][place] = value
    refused(lambda: op.fwd(**arguments, check_lengths=True), ValueError, f"volta_fa::fwd: {argument}: got", *words)


#: Wrong values that kernels get unchecked. They must read nothing outside the tensors, which the simulator reports as an error.
UNCHECKED = {
    **VALUES,
    "counts far beyond the list": ("block_lists", (0, 0, slice(None), slice(2)), 2**30),
    "block far outside": ("block_lists", (0, 1, 0, 5), 2**30),
    "tile far outside": ("block_lists", (0, 0, 1, 2), 2**30),
}


@pytest.mark.parametrize("name", UNCHECKED)
@on("sim", "sim-fp32")
def test_unchecked_values_read_nothing_outside(backend, gpu, name):
    argument, place, value, *_ = UNCHECKED[name]
    backend.monkeypatch.setenv("VOLTA_FA_SIMULATE", "1")
    backend.monkeypatch.setenv("VOLTA_FA_CHECK_LENGTHS", "0")
    arguments = valid(backend)
    for of_pass in (argument, argument.removesuffix("_t") + "_t"):
        arguments[of_pass][place] = value
    out, lse, _ = op.fwd(**arguments)
    op.bwd(out, out=out, softmax_lse=lse, **arguments)


@on("cpu-fp32")
def test_opcheck(backend):
    (q, k, v, dout), options = Masked(Case(140, 150, 16, batch=1, nheads=2), 1, 2).problem(backend)
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    opcheck(op.fwd.default, tuple(leaves), options)
    out, lse, _ = op.fwd(q, k, v, **options)
    tests = ("test_schema", "test_faketensor")
    opcheck(op.bwd.default, (dout, q, k, v, out, lse), options | {"dlse": torch.randn_like(lse)}, test_utils=tests)


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@on("cpu-fp32")
def test_compiled(backend, dynamic):
    """torch.compile makes one graph (fullgraph=True) of forward and backward, with softmax_lse's gradient, also for a second length."""

    def loss(q, k, v, options):
        out, lse, _ = op.fwd(q, k, v, **options)
        return out.square().sum() + lse.nan_to_num(posinf=0.0).sin().sum()

    torch._dynamo.reset()
    compiled = torch.compile(loss, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for seqlen in (140, 270):
        (q, k, v, _), options = Masked(Case(seqlen, 150, 16, nheads=2), 1, 2).problem(backend)
        results = []
        for f in (loss, compiled):
            leaves = [t.clone().requires_grad_() for t in (q, k, v)]
            value = f(*leaves, options)
            results.append([value, *torch.autograd.grad(value, leaves)])
        torch.testing.assert_close(*results, rtol=1e-5, atol=1e-5)


@on("cpu-fp32")
def test_exported_and_scripted(backend, tmp_path):
    """torch.export and TorchScript, loaded in another process, give bitwise the op's result."""
    (q, k, v, _), options = Masked(BASE, 2, 4).problem(backend)
    expected = op.fwd(q, k, v, **options)[0]

    tensors = (q, k, v, options["block_lists"], options["block_bits"])
    assert torch.equal(torch.export.export(Layer(), tensors).module()(*tensors), expected)

    code = """
        import sys, torch, volta_fa
        layer = torch.jit.load(sys.argv[1])
        *tensors, expected = torch.load(sys.argv[2])
        assert torch.equal(layer(*tensors), expected)
        print("same")
    """
    torch.jit.script(Layer()).save(tmp_path / "layer.pt")
    torch.save([*tensors, expected], tmp_path / "tensors.pt")
    assert run_python(code, tmp_path / "layer.pt", tmp_path / "tensors.pt") == "same"


class Layer(torch.nn.Module):
    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lists: torch.Tensor, bits: torch.Tensor) -> torch.Tensor:
        return torch.ops.volta_fa.fwd(q, k, v, block_lists=lists, block_bits=bits)[0]


@on("sim", "sim-fp32")
def test_a_headdim_without_a_kernel_is_refused_with_the_gpu(backend, gpu):
    """Kernels with block masks end at headdim 256. The error names the GPU's architecture and its shared memory."""
    backend.simulate()
    # blocks: the mask's dimensions that are not 1, of batch and heads; "-": none of them
    (q, k, v, _), options = Case(140, 150, 264, batch=1, nheads=1, blocks="-").problem(backend)
    sm = next(sm for sm, name in GPUS.items() if name == gpu)
    words = "with block_mask for headdim 264", f"in this sm_{sm} GPU's", "bytes"
    refused(lambda: op.fwd(q, k, v, **options), NotImplementedError, *words)
