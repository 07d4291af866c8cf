"""`volta_fa.flex_attention`, with the interface of torch's flex_attention, against fp64 and torch; `enable_flex`; torch.compile.

volta_fa traces a score function (score_mod) and maps it to the kernels' operations: a factor, softcap, ALiBi, an added bias, or a mask
(`recognize` returns `Scores`). Functions of other operations raise `Unrecognized`, and torch's own flex_attention runs.
`enable_flex` makes torch's function run volta_fa. `operands` draws query, key and value, (batch, heads, seqlen, headdim); `plain` is the
expected attention; `assert_same` compares out, softmax_lse and all gradients."""

import gc
import json
import logging
import math
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest
import torch
import torch.nn.attention.flex_attention as torch_flex
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.attention.flex_attention import create_block_mask

import volta_fa
from flash_attention import refused  # checks that a call raises this error, with a message of one line
from volta_fa import flex_attention
from volta_fa.flex.score_mod import Scores, Unrecognized, recognize

pytestmark = pytest.mark.filterwarnings("ignore")  # torch asks to compile its function
HEADS, LENGTH = 4, 150
# Tensors that score functions read: a number per head, per head and distance (300 is distance 0), per batch entry and head.
SLOPES = 0.5 ** torch.arange(1, HEADS + 1).float()
TABLE = torch.linspace(-1, 1, HEADS * 600).view(HEADS, 600)
BATCH_SLOPES = torch.tensor([[0.1, 0.2, 0.3, 0.4], [0.5, 0.25, 0.125, 0.1]])


def alibi_exp2(score, b, h, q, kv):
    return score + (kv - q) * torch.exp2(-((h + 1) * 8.0 / HEADS))


#: Score functions by name, and what they are recognized as. `bias` and `hides`: whether an added bias and a mask depend on batch entry,
#: head, query and key. `alibi`: the bias is a slope times kv - q ("relative") or times |kv - q| ("absolute").
RECOGNIZED = {
    "identity": (lambda s, b, h, q, kv: s, Scores()),
    "factor": (lambda s, b, h, q, kv: 2 * s / 4, Scores(factor=0.5)),
    "softcap": (lambda s, b, h, q, kv: 5.0 * torch.tanh(s / 5.0), Scores(factor=0.2, softcap=5.0)),
    "alibi": (lambda s, b, h, q, kv: s + SLOPES[h] * (kv - q), Scores(bias=(False, True, True, True), alibi="relative")),
    "alibi exp2": (alibi_exp2, Scores(bias=(False, True, True, True), alibi="relative")),
    "alibi absolute": (lambda s, b, h, q, kv: s - BATCH_SLOPES[b, h] * (q - kv).abs(), Scores(bias=(True,) * 4, alibi="absolute")),
    "softcap, alibi": (
        lambda s, b, h, q, kv: 2 * torch.tanh(s / 2) - SLOPES[h] * torch.abs(q - kv),
        Scores(factor=0.5, softcap=2.0, bias=(False, True, True, True), alibi="absolute"),
    ),
    "relative": (lambda s, b, h, q, kv: s + TABLE[h, q - kv + 300], Scores(bias=(False, True, True, True))),
    "alibi and a shift": (lambda s, b, h, q, kv: s + SLOPES[h] * (kv - q + 1), Scores(bias=(False, True, True, True))),
    "steps": (lambda s, b, h, q, kv: s - SLOPES[h] * ((q - kv).abs() * 0.125).to(torch.int32), Scores(bias=(False, True, True, True))),
    "causal": (lambda s, b, h, q, kv: torch.where(q >= kv, s, -float("inf")), Scores(hides=(False, False, True, True))),
    "causal, relative": (
        lambda s, b, h, q, kv: torch.where(q >= kv, s + TABLE[h, q - kv + 300], torch.tensor(-float("inf"))),
        Scores(bias=(False, True, True, True), hides=(False, False, True, True)),
    ),
}
#: Score functions that are not recognized, by the reason that the message gives.
OTHERS = {
    "mul of two scores": lambda s, b, h, q, kv: s * s,
    "mul by a value that is not a positive constant": lambda s, b, h, q, kv: s * SLOPES[h],
    "a factor of 1e": lambda s, b, h, q, kv: s * 1e300,
    "to": lambda s, b, h, q, kv: s.to(torch.int32),
    "relu": lambda s, b, h, q, kv: torch.relu(s),
    "tanh of more than a scaled score": lambda s, b, h, q, kv: 3 * torch.tanh(s + SLOPES[h]),
    "where with anything but the score and -inf": lambda s, b, h, q, kv: torch.where(q > kv, s, -1.0),
}
#: Mask functions by name: whether a query sees a key.
MASKS = {
    "causal": lambda b, h, q, kv: q >= kv,
    "documents, not for a head": lambda b, h, q, kv: (q // 40 == kv // 40) | ((h == 1) & (q < 100)),
    "empty rows and columns": lambda b, h, q, kv: (q >= 70) & (kv < 60) & (kv % 7 != 0),
    "sinks and window": lambda b, h, q, kv: (q >= kv) & ((q - kv < 30) | (kv < 4)),
}


@pytest.fixture
def enabled():
    """Makes torch's flex_attention run volta_fa on the CPU."""
    volta_fa.enable_flex("cpu")
    yield
    volta_fa.disable_flex()


def operands(batch=2, heads_k=HEADS, length_q=LENGTH, length_k=LENGTH, headdim=16, headdim_v=24, dtype=torch.float64):
    """Returns random query, key and value, which require a gradient."""
    torch.manual_seed(0)
    shapes = [(batch, HEADS, length_q, headdim), (batch, heads_k, length_k, headdim), (batch, heads_k, length_k, headdim_v)]
    return [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]


def plain(query, key, value, score_mod=None, mask_mod=None, scale=None):
    """Returns out and lse with all scores in memory, every step in the dtype of the inputs."""
    groups = query.shape[1] // key.shape[1]  # query heads per KV head
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = query @ key.mT * (query.shape[-1] ** -0.5 if scale is None else scale)
    places = torch.meshgrid(*map(torch.arange, scores.shape), indexing="ij")
    if score_mod is not None:
        scores = score_mod(scores, *places).to(scores.dtype)
    if mask_mod is not None:
        scores = scores.masked_fill(~mask_mod(*places), -math.inf)
    lse = scores.logsumexp(-1)
    probabilities = torch.where(lse.isinf()[..., None], 0, (scores - torch.where(lse.isinf(), 0, lse)[..., None]).exp())
    return probabilities @ value, lse


def gradients(out, lse, inputs):
    """Returns the gradients of a loss that depends on out and on lse, but not on rows without a visible key."""
    loss = (out * out).sum() + torch.where(lse.isinf(), 0, lse).sin().sum()
    return torch.autograd.grad(loss, inputs)


def assert_same(found, expected, inputs):
    """Compares (out, lse) of two computations, and through both the gradients of the inputs."""
    for name, a, b in zip(("out", "lse"), found, expected):
        # lse is fp32
        torch.testing.assert_close(a.to(b.dtype), b, rtol=1e-6, atol=2e-6, msg=lambda text, name=name: f"{name}: {text}")
    for name, a, b in zip(("query", "key", "value", "captured"), gradients(*found, inputs), gradients(*expected, inputs)):
        # sums over 150 rows or keys of terms that lse's rounding changes
        torch.testing.assert_close(a, b, rtol=1e-5, atol=2e-5, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("name", RECOGNIZED)
def test_recognized_score_functions(name):
    assert recognize(RECOGNIZED[name][0])[0] == RECOGNIZED[name][1]


@pytest.mark.parametrize("reason", OTHERS)
def test_other_score_functions_name_their_operation(reason):
    refused(Unrecognized, reason, recognize, OTHERS[reason])


def doubles_in_place(score, b, h, q, kv):
    score.mul_(2)  # the result is dropped
    score += SLOPES[h]
    return score


def catches(score, b, h, q, kv):
    try:
        return score * float(h)
    except RuntimeError:
        return score


#: Functions that branch on properties of their arguments, and the result of the branch that real tensors take.
BRANCHES = {
    "type": (lambda s, b, h, q, kv: 2 * s if isinstance(s, torch.Tensor) else s, lambda s, h: 2 * s),
    "types of indices": (lambda s, b, h, q, kv: s + SLOPES[h] if torch.is_tensor(h) else s, lambda s, h: s + SLOPES[h]),
    "dtype": (lambda s, b, h, q, kv: s + SLOPES[h] if s.dtype is torch.float64 else s, lambda s, h: s + SLOPES[h]),
    "device": (lambda s, b, h, q, kv: 2 * s if s.device == torch.device("cpu") else s, lambda s, h: 2 * s),
    "rank": (lambda s, b, h, q, kv: 2 * s if s.ndim == 0 == len(h.shape) else s, lambda s, h: 2 * s),
    "attribute": (lambda s, b, h, q, kv: s if hasattr(s, "has_no_such_attribute") else 2 * s, lambda s, h: 2 * s),
    "in place": (doubles_in_place, lambda s, h: 2 * s + SLOPES[h]),
    "keyword": (lambda s, b, h, q, kv: torch.where(h > 1, s, torch.full_like(s, fill_value=-math.inf)), lambda s, h: s - (h < 2) * 1e30),
}


@pytest.mark.parametrize("name", BRANCHES)
def test_score_functions_take_the_branches_of_tensors(name, monkeypatch):
    """While a function is traced, its arguments look like tensors, so it takes the branch that it takes with torch. None falls back."""
    score_mod, expected = BRANCHES[name]
    monkeypatch.setattr(volta_fa.flex.attention, "log_fallback", pytest.fail)
    query, key, value = (t.detach() for t in operands())
    expected = plain(query, key, value, lambda s, b, h, q, kv: expected(s, h))
    found = flex_attention(query, key, value, score_mod, return_lse=True)
    hidden = expected[1] < -1e29  # whole heads, which `expected` hides by a large number
    torch.testing.assert_close(found[0], torch.where(hidden[..., None], 0, expected[0]), rtol=1e-6, atol=2e-6)
    torch.testing.assert_close(found[1].double(), torch.where(hidden, -math.inf, expected[1]), rtol=1e-6, atol=2e-6)


@pytest.mark.parametrize(
    "score_mod, reason",
    [
        (catches, "cannot be traced"),
        (lambda s, b, h, q, kv: s if h > 1 else 2 * s, "cannot be traced"),
        (lambda s, b, h, q, kv: (s.detach(), s.mul_(2))[0], "cannot be traced"),
        (lambda s, b, h, q, kv: torch.add(s, 1, out=s), "cannot be traced"),
        (lambda s, b, h, q, kv: torch.where(q > kv, input=s, other=-math.inf), "where of keyword arguments"),
    ],
    ids=["catches", "value", "view", "out", "keywords"],
)
def test_score_functions_without_a_graph_are_left_to_torch(score_mod, reason):
    refused(Unrecognized, reason, recognize, score_mod)


@pytest.mark.parametrize("mask", [None, *MASKS])
@pytest.mark.parametrize("name", RECOGNIZED)
def test_scores_and_masks(name, mask):
    score_mod, mask_mod = RECOGNIZED[name][0], MASKS.get(mask)
    inputs = operands()
    block_mask = None if mask is None else create_block_mask(mask_mod, None, HEADS, LENGTH, LENGTH, device="cpu", BLOCK_SIZE=64)
    found = flex_attention(*inputs, score_mod, block_mask, return_lse=True)
    assert_same(found, plain(*inputs, score_mod, mask_mod), inputs)


@pytest.mark.parametrize("gpu", ["v100", "t4"])
@pytest.mark.parametrize("name", ["identity", "softcap, alibi"])
def test_float32_on_kernels(name, gpu, monkeypatch):
    """fp32 inputs run kernels for block masks, in the simulator, with the precision of fp32. VOLTA_FA_SIMULATE=launches only records
    which kernels run (`_sim_report`), 1 runs them."""
    monkeypatch.setenv("VOLTA_FA_SIM_GPU", gpu)
    score_mod, mask_mod = RECOGNIZED[name][0], MASKS["documents, not for a head"]
    inputs = operands(batch=1, heads_k=2, dtype=torch.float32)
    exact = [t.detach().double().requires_grad_() for t in inputs]
    block_mask = create_block_mask(mask_mod, None, HEADS, LENGTH, LENGTH, device="cpu")
    monkeypatch.setenv("VOLTA_FA_SIMULATE", "launches")
    torch.ops.volta_fa._sim_report()
    flex_attention(*inputs, score_mod, block_mask, enable_gqa=True)
    kernels = {launch["kernel"] for launch in json.loads(torch.ops.volta_fa._sim_report())}
    assert any("fwd_split_block_mask" in kernel for kernel in kernels), kernels
    monkeypatch.setenv("VOLTA_FA_SIMULATE", "1")
    found = flex_attention(*inputs, score_mod, block_mask, enable_gqa=True, return_lse=True)
    expected = plain(*exact, score_mod, mask_mod)
    for of_kernels, of_fp64 in zip((*found, *gradients(*found, inputs)), (*expected, *gradients(*expected, exact))):
        torch.testing.assert_close(of_kernels.double(), of_fp64, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("block_size", [128, 48, (128, 256)], ids=str)
def test_grouped_heads_other_lengths_and_scale(block_size):
    inputs = operands(heads_k=2, length_q=130, length_k=300)
    mask_mod = MASKS["documents, not for a head"]
    block_mask = create_block_mask(mask_mod, None, HEADS, 130, 300, device="cpu", BLOCK_SIZE=block_size)
    found = flex_attention(*inputs, block_mask=block_mask, scale=0.3, enable_gqa=True, return_lse=True)
    assert_same(found, plain(*inputs, None, mask_mod, 0.3), inputs)


def test_own_masks_and_one_key_for_all_entries():
    """volta_fa.BlockMask, and a key and value that all batch entries share (batch 1)."""
    inputs = operands()
    blocks = torch.tensor([[True, False, True], [False, False, False], [False, True, True]])
    mask = volta_fa.BlockMask.from_blocks(blocks, 50)
    key, value = (t[:1] for t in inputs[1:])
    found = flex_attention(inputs[0], key, value, block_mask=mask, return_lse=True)
    visible = blocks.repeat_interleave(50, 0).repeat_interleave(50, 1)
    expected = plain(inputs[0], key.expand_as(inputs[1]), value.expand_as(inputs[2]), None, lambda b, h, q, kv: visible[q, kv])
    assert_same(found, expected, inputs)


def test_own_masks_of_odd_lengths_and_grouped_heads():
    """The last blocks are partial, of queries and of keys."""
    inputs = operands(heads_k=1, length_q=113, length_k=203)
    blocks = torch.rand(2, HEADS, 1, 2) < 0.5
    assert 0 < blocks.sum() < blocks.numel()
    mask = volta_fa.BlockMask.from_blocks(blocks, 128, (113, 203))
    found = flex_attention(*inputs, block_mask=mask, enable_gqa=True, return_lse=True)
    assert_same(found, plain(*inputs, None, lambda b, h, q, kv: blocks[b, h, q // 128, kv // 128]), inputs)


def test_gradients_of_an_added_term():
    """A tensor that the score function reads gets a gradient."""
    table = TABLE.double().requires_grad_()
    inputs = [*operands(), table]

    def score_mod(score, b, h, q, kv):
        return score + table[h, q - kv + 300]

    block_mask = create_block_mask(MASKS["causal"], None, None, LENGTH, LENGTH, device="cpu")
    found = flex_attention(*inputs[:3], score_mod, block_mask, return_lse=True)
    assert_same(found, plain(*inputs[:3], score_mod, MASKS["causal"]), inputs)


@pytest.mark.parametrize("backend", [None, "aot_eager"])
def test_gradients_of_half_precision_terms_are_summed_in_float32(backend):
    """Each element is read by hundreds of scores, as in torch's test_relative_1d_bias. Sums in fp16 have 20 times the error."""
    query, key, value = (t.detach().half() for t in operands(headdim_v=16))
    bias = torch.randn(2 * LENGTH).half().requires_grad_()
    exact = bias.detach().double().requires_grad_()

    def score_mod(score, b, h, q, kv):
        return score + bias[(q - kv).abs()]

    function = torch.compile(flex_attention, backend=backend, fullgraph=True) if backend else flex_attention
    torch._dynamo.reset()
    out = function(query, key, value, score_mod)
    expected = plain(*(t.double() for t in (query, key, value)), lambda s, b, h, q, kv: s + exact[(q - kv).abs()])[0]
    dout = torch.randn_like(out)
    (found,) = torch.autograd.grad(out, bias, dout)
    (right,) = torch.autograd.grad(expected, exact, dout.double())
    assert found.dtype == torch.float16
    torch.testing.assert_close(found.double(), right, rtol=2e-3, atol=2e-3)


def test_results_are_those_of_torch():
    query, key, value = (t.detach() for t in operands(dtype=torch.float32))
    block_mask = create_block_mask(MASKS["empty rows and columns"], None, None, LENGTH, LENGTH, device="cpu")
    found = flex_attention(query, key, value, RECOGNIZED["alibi"][0], block_mask, return_lse=True)
    expected = torch_flex.flex_attention(query, key, value, RECOGNIZED["alibi"][0], block_mask, return_lse=True)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert (found[1][..., :70] == -math.inf).all()
    if hasattr(torch_flex, "AuxRequest"):
        out, aux = flex_attention(query, key, value, RECOGNIZED["alibi"][0], block_mask, return_aux=torch_flex.AuxRequest(lse=True))
        assert torch.equal(aux.lse, found[1]) and aux.max_scores is None


def test_other_score_functions_run_on_torch_with_one_line(caplog):
    query, key, value = (t.detach() for t in operands(dtype=torch.float32))
    with caplog.at_level(logging.WARNING, "volta_fa"):
        for _ in range(2):
            out = flex_attention(query, key, value, OTHERS["relu"])
    torch.testing.assert_close(out, plain(query, key, value, OTHERS["relu"])[0], rtol=1e-4, atol=1e-5)
    (record,) = caplog.records
    assert record.getMessage() == "volta_fa.flex_attention: no kernel for relu: torch's own flex_attention runs"
    mask = volta_fa.BlockMask.from_mask_mod(MASKS["causal"], 1, 1, LENGTH, LENGTH, "cpu")
    refused(NotImplementedError, "block_mask: got volta_fa.BlockMask", flex_attention, query, key, value, OTHERS["relu"], mask)


def test_wrong_arguments_are_refused():
    query, key, value = operands(heads_k=2)
    message = "query: got 4 heads, expected a multiple of key's 0 heads"
    refused(ValueError, message, flex_attention, query, key[:, :0], value[:, :0], enable_gqa=True)
    refused(ValueError, "key: got 2 heads", flex_attention, query, key, value)
    block_mask = create_block_mask(MASKS["causal"], None, None, 256, 256, device="cpu")
    refused(ValueError, "block_mask: got lengths", flex_attention, query, key, value, block_mask=block_mask, enable_gqa=True)
    for wrong in (torch.ones(LENGTH, LENGTH, dtype=torch.bool), MASKS["causal"]):
        message = f"block_mask: got a {type(wrong).__name__}, expected a block mask: .* make one of a function"
        refused(ValueError, message, flex_attention, query, key, value, block_mask=wrong, enable_gqa=True)


def test_compiled_calls_refuse_what_eager_calls_refuse():
    """A mask of 140 queries and keys has as many lists as one of 150."""
    shorter, right = (volta_fa.BlockMask.from_mask_mod(MASKS["causal"], 1, 1, n, n, "cpu") for n in (LENGTH - 10, LENGTH))
    torch._dynamo.reset()
    compiled = torch.compile(flex_attention, backend="eager")
    refused(ValueError, "block_mask: got lengths", compiled, *operands(), block_mask=shorter)
    if hasattr(torch_flex, "AuxRequest"):
        with pytest.raises(NotImplementedError, match="block_mask: got volta_fa.BlockMask"):
            compiled(*operands(), block_mask=right, return_aux=torch_flex.AuxRequest(max_scores=True))
    inputs = operands()
    assert_same(compiled(*inputs, block_mask=right, return_lse=True), plain(*inputs, None, MASKS["causal"]), inputs)


def compiled(function, backend, *arguments):
    """Returns out and softmax_lse of a compiled call."""
    torch._dynamo.reset()
    return torch.compile(function, backend=backend, fullgraph=True)(*arguments, return_lse=True)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("name", ["identity", "softcap, alibi", "relative"])
def test_compiled(name, backend):
    score_mod, inputs = RECOGNIZED[name][0], operands()
    documents = torch.arange(LENGTH) // 40
    block_mask = create_block_mask(lambda b, h, q, kv: documents[q] == documents[kv], None, None, LENGTH, LENGTH, device="cpu")
    found = compiled(flex_attention, backend, *inputs, score_mod, block_mask)
    assert_same(found, plain(*inputs, score_mod, lambda b, h, q, kv: q // 40 == kv // 40), inputs)


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiled_programs_stay_in_one_part(backend):
    """Packing a mask has results of unknown size. torch.compile must not break the graph there, also without fullgraph=True."""
    inputs = operands()
    block_mask = create_block_mask(MASKS["sinks and window"], None, None, LENGTH, LENGTH, device="cpu")
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    found = torch.compile(flex_attention, backend=backend)(*inputs, RECOGNIZED["softcap"][0], block_mask, return_lse=True)
    assert not torch._dynamo.utils.counters["graph_break"]
    assert_same(found, plain(*inputs, RECOGNIZED["softcap"][0], MASKS["sinks and window"]), inputs)


@pytest.mark.slow
@pytest.mark.parametrize("score, mask", [("softcap", "causal"), ("alibi and a shift", None), ("alibi absolute", "sinks and window")])
def test_programs_of_many_lengths_compile_twice(score, mask):
    """Once for the first length, and once with symbolic sizes for all others."""
    torch._dynamo.reset()
    backend = CompileCounterWithBackend("aot_eager")
    program = torch.compile(flex_attention, backend=backend)
    for length in range(256, 1025, 256):  # as many blocks as programs of torch's own need
        inputs = operands(1 if score != "alibi absolute" else 2, length_q=length, length_k=length)
        block_mask = create_block_mask(MASKS[mask], None, None, length, length, device="cpu") if mask else None
        found = program(*inputs, RECOGNIZED[score][0], block_mask, return_lse=True)
    assert backend.frame_count == 2
    assert_same(found, plain(*inputs, RECOGNIZED[score][0], MASKS[mask] if mask else None), inputs)


def test_numbers_of_score_functions_in_programs_of_any_shape():
    """With dynamic=True, a number that a score function's closure holds is symbolic."""
    torch._dynamo.reset()

    def slopes_of(heads):
        return lambda score, b, h, q, kv: score + (kv - q) * torch.exp2(-(h + 1) * 8.0 / heads)

    for length in (64, 96):
        inputs = operands(length_q=length, length_k=length)
        found = torch.compile(flex_attention, backend="aot_eager", dynamic=True)(*inputs, slopes_of(HEADS), return_lse=True)
        assert_same(found, plain(*inputs, slopes_of(HEADS), None), inputs)


@pytest.mark.slow
@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 1, 3), (2, 0, 1, 3), (3, 1, 0, 2)], ids=str)
def test_strides_are_those_of_torch(order):
    query, key, value = (t.detach().permute(order) for t in operands(headdim_v=16))
    expected = torch_flex.flex_attention(query, key, value).stride()
    assert flex_attention(query, key, value).stride() == expected
    assert torch.compile(flex_attention, backend="aot_eager")(query, key, value).stride() == expected


def test_masks_of_score_functions_end_with_them():
    shown = torch.rand(LENGTH, LENGTH) > 0.5

    def score_mod(score, b, h, q, kv):
        return torch.where(shown[q, kv], score, -math.inf)

    flex_attention(*operands(), score_mod)
    ended = weakref.ref(score_mod)
    del score_mod
    gc.collect()
    assert ended() is None


@dataclass
class Window:
    """A score function without a hash, because instances compare."""

    width: int

    def __call__(self, score, b, h, q, kv):
        return torch.where((q - kv).abs() < self.width, score, -math.inf)


class SlottedWindow:
    """A score function without weak references."""

    __slots__ = ("width",)
    __call__ = Window.__call__

    def __init__(self, width):
        self.width = width


@pytest.mark.parametrize("kind", [Window, SlottedWindow])
def test_score_functions_that_cannot_be_keys(kind):
    """Traces are kept by score function, but for functions that no dictionary takes. A changed function has its new result."""
    inputs, score_mod = operands(), kind(20)
    for score_mod.width in (20, 30):
        assert_same(flex_attention(*inputs, score_mod, return_lse=True), plain(*inputs, score_mod), inputs)


def test_score_functions_are_traced_in_one_thread_at_a_time():
    def recognizes(_):
        return [recognize(RECOGNIZED["causal, relative"][0])[0] for _ in range(50)]

    with ThreadPoolExecutor(4) as pool:
        found = [scores for of_thread in pool.map(recognizes, range(4)) for scores in of_thread]
    assert set(found) == {RECOGNIZED["causal, relative"][1]}


def test_caches_on_disk_tell_the_operators_arguments():
    """Keys of torch.compile's caches on disk have INTERFACE, a hash of the operators' signatures. So a program that another version of
    volta_fa compiled is not found."""
    from torch.compiler import config

    from volta_fa.flex.compiled import INTERFACE

    before = config.cache_key_tag
    volta_fa.enable_flex("cpu")
    assert INTERFACE in config.cache_key_tag
    volta_fa.disable_flex()
    assert config.cache_key_tag == before
    graphs = []
    torch._dynamo.reset()
    torch.compile(flex_attention, backend=lambda graph, _: graphs.append(graph) or graph)(*operands())
    assert INTERFACE in str(graphs[0].code)


def runs_on_volta_fa(function, *arguments):
    with torch.profiler.profile() as profiler:
        result = function(*arguments)
    return result, any(event.key == "volta_fa::fwd" for event in profiler.key_averages())


def test_enable_flex(enabled):
    imported_before = volta_fa.flex.switch.original()
    inputs = [t.detach() for t in operands(dtype=torch.float32)]
    block_mask = create_block_mask(MASKS["causal"], None, None, LENGTH, LENGTH, device="cpu")
    expected = plain(*inputs, None, MASKS["causal"])[0]
    functions = {
        "eager": torch_flex.flex_attention,
        "imported before": imported_before,
        "compiled": torch.compile(imported_before, backend="aot_eager", fullgraph=True),
        "compiled by its new name": torch.compile(torch_flex.flex_attention, backend="aot_eager", fullgraph=True),
    }
    for name, function in functions.items():
        out, ours = runs_on_volta_fa(lambda function=function: function(*inputs, block_mask=block_mask))
        assert ours, name
        torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
    volta_fa.disable_flex()
    assert torch_flex.flex_attention is imported_before
    for name, function in functions.items():
        if name in ("imported before", "compiled"):  # the others are the replacement itself
            assert not runs_on_volta_fa(lambda function=function: function(*inputs, block_mask=block_mask))[1], name


@pytest.mark.parametrize("new_name", [True, False], ids=["new name", "imported before"])
def test_gradients_of_compiled_programs_on_the_cpu(enabled, new_name):
    """torch's own function refuses them."""
    function = torch_flex.flex_attention if new_name else volta_fa.flex.switch.original()
    inputs = operands()
    block_mask = create_block_mask(MASKS["causal"], None, None, LENGTH, LENGTH, device="cpu")
    found = compiled(function, "aot_eager", *inputs, RECOGNIZED["softcap, alibi"][0], block_mask)
    assert_same(found, plain(*inputs, RECOGNIZED["softcap, alibi"][0], MASKS["causal"]), inputs)
    with pytest.raises(Exception, match="does not support backward on CPU"):
        compiled(function, "aot_eager", *inputs, OTHERS["relu"], block_mask)  # falls back to torch's own
    volta_fa.disable_flex()
    with pytest.raises(Exception, match="does not support backward on CPU"):
        compiled(function, "aot_eager", *inputs, None, block_mask)


def test_disable_flex_leaves_a_later_patch(enabled, monkeypatch):
    ours = torch_flex.flex_attention
    torch_function = volta_fa.flex.switch.original()

    def patched(*args, **kwargs):
        return ours(*args, **kwargs)

    monkeypatch.setattr(torch_flex, "flex_attention", patched)
    volta_fa.disable_flex()
    assert torch_flex.flex_attention is patched and volta_fa.flex.switch.original() is torch_function
    volta_fa.enable_flex("cpu")
    assert torch_flex.flex_attention is patched
    monkeypatch.undo()
    assert torch_flex.flex_attention is ours
    volta_fa.disable_flex()
    assert torch_flex.flex_attention is torch_function
