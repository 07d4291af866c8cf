"""Tests of transformers with attn_implementation="volta_fa" beyond logits: training, torch.compile, mask functions, loading, refusals.

transformers calls `volta_fa.transformers.mask` once per step, and `attention` in each layer with the result: None, a tensor, or a MaskRule,
which describes a mask by numbers (bounds of a window, lengths) and allocates no tensor. Helpers are those of test_transformers.py:
`models(name)` returns a model with eager attention and the same with volta_fa ("ours"), `padding(kind)` a mask, `tokens()` input_ids
(BATCH, SEQLEN), `kept(mask)` an index of the tokens that are no padding. `make` and `both` build such models of a configuration, `run`
returns logits. `profile` counts volta_fa's calls: LAYERS in a forward pass. TOLERANCE is that of sums in fp32 in different orders;
`assert_right` accepts more where eager's own error is larger. V5: transformers 5, else 4.57."""

import copy
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import test_transformers
from conftest import run_python
from flash_attention import refused
from test_transformers import BATCH, CAUSAL, KINDS, LAYERS, SEQLEN, TOLERANCE, V5, both, kept, make, models, padding, profile, run, tokens

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

from transformers import AttentionMaskInterface, masking_utils

import volta_fa.transformers
from volta_fa.transformers import MaskRule

pytestmark = test_transformers.pytestmark

# ---- training ------------------------------------------------------------------------------------------------------


def losses(model, batches, steps=20, lr=0.05, **inputs):
    """Returns the loss of each step of training a copy of the model."""
    model = copy.deepcopy(model).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    history = []
    for step in range(steps):
        loss = model(**batches[step % len(batches)], **inputs).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        history.append(loss.item())
    return torch.tensor(history)


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss"])
def test_training(name):
    """20 steps over padded batches: the losses stay together, and fall."""
    eager, ours = models(name)
    batches = []
    for kind in ("right", "left", "complete"):
        mask = padding(kind)
        # no labels at padding, nor after padding, whose prediction is undefined
        asked = mask.bool() & F.pad(mask.bool(), (1, -1), value=True)
        batches.append({"input_ids": tokens(), "attention_mask": mask, "labels": tokens().masked_fill(~asked, -100)})
    expected, found = losses(eager, batches), losses(ours, batches)
    assert expected[-1] < 0.7 * expected[0]
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)  # both sum in fp32, in different orders
    assert profile(lambda: losses(ours, batches, steps=1))[1].count == LAYERS


def test_training_packed():
    eager, ours = models("mistral")
    ids = tokens()
    batches = [{"input_ids": ids, "labels": ids, "position_ids": torch.cat([torch.arange(8), torch.arange(12)]).expand(BATCH, -1)}]
    expected = losses(eager, batches, use_cache=False)
    torch.testing.assert_close(losses(ours, batches, use_cache=False), expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing(reentrant):
    _, ours = models("mistral")
    ids, mask = tokens(), padding("left")
    batches = [{"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}]
    expected = losses(ours, batches, steps=3)
    checkpointed = copy.deepcopy(ours)
    checkpointed.gradient_checkpointing_enable({"use_reentrant": reentrant})
    assert torch.equal(losses(checkpointed, batches, steps=3), expected)


@pytest.mark.skipif(not V5, reason="T5 of 4.57 does not use the attention interface")
def test_gradient_of_a_position_bias():
    """T5's position bias is a parameter that only attention uses. (Sinks are another: test_training of gpt_oss.)"""

    def gradient(model):
        model.zero_grad()
        model(input_ids=tokens(), labels=tokens(seqlen=5)).logits.square().mean().backward()
        return model.get_parameter("encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight").grad

    eager, ours = models("t5")
    expected = gradient(eager)
    assert expected.abs().max() > 0
    exact = lambda: gradient(copy.deepcopy(eager).double())  # noqa: E731
    test_transformers.assert_right(gradient(ours), expected, exact, factor=3, rtol=1e-4, atol=1e-6)


def test_dropout():
    """Dropout follows PyTorch's seed, and applies only in training."""
    config, cls = CAUSAL["llama"](transformers)
    config.attention_dropout = 0.3
    model = make(config, cls, "volta_fa").train()
    first, again, other = (torch.manual_seed(seed) and run(model, input_ids=tokens()) for seed in (1, 1, 2))
    assert torch.equal(first, again) and not torch.allclose(first, other, atol=0.1)
    torch.testing.assert_close(run(model.eval(), input_ids=tokens()), run(models("llama")[1], input_ids=tokens()))


@pytest.mark.parametrize("name", ["llama", "gpt_oss"])
def test_autocast(name):
    """Autocast passes queries in bf16 with masks and sinks in fp32. The error is at most twice that of eager."""
    inputs = {"input_ids": tokens(), "attention_mask": padding("left")}
    eager, ours = models(name)
    exact = run(eager, **inputs)
    with torch.autocast("cpu", torch.bfloat16):
        theirs, found = run(eager, **inputs), run(ours, **inputs)
    keep = padding("left").bool()
    assert (found - exact)[keep].abs().max() <= 2 * (theirs - exact)[keep].abs().max()


# ---- compiling -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["none", "left", "packed"])
def test_compile(kind):
    """fullgraph, forward and backward."""
    _, ours = models("mistral")
    if kind == "packed":
        cu_seq_lens = torch.tensor([0, 3, 20], dtype=torch.int32)
        inputs = {"input_ids": tokens(1), "position_ids": torch.cat([torch.arange(3), torch.arange(17)])[None]}
        inputs.update(cu_seq_lens_q=cu_seq_lens, cu_seq_lens_k=cu_seq_lens, max_length_q=17, max_length_k=17)
    else:
        inputs = {"input_ids": tokens(), "attention_mask": padding(kind)}
    keep = kept(inputs.get("attention_mask"))
    found = []
    for model in (ours, torch.compile(ours, backend="aot_eager", fullgraph=True)):
        ours.zero_grad()
        logits = model(**inputs, use_cache=False).logits[keep]
        logits.square().mean().backward()
        found.append((logits.detach(), ours.model.layers[0].self_attn.k_proj.weight.grad))
    torch.testing.assert_close(*found, **TOLERANCE)


# ---- the mask function ---------------------------------------------------------------------------------------------


def geometry(seqlen_q: int, past: int) -> dict:
    """Returns the arguments of a mask function for queries after `past` tokens."""
    if V5:
        return {"q_length": seqlen_q, "q_offset": past}
    return {"cache_position": torch.arange(past, past + seqlen_q)}


def causal_window(size):
    """Returns a mask function: a query sees `size` tokens, its own included."""
    return masking_utils.sliding_window_causal_mask_function(size)


PATTERNS = {
    "causal": (masking_utils.causal_mask_function, {}),
    "window": (causal_window(4), {"local_size": 4}),
    "wide window": (causal_window(64), {"local_size": 64}),
}
if V5:
    PATTERNS["bidirectional"] = (masking_utils.bidirectional_mask_function, {"allow_is_bidirectional_skip": True})
    PATTERNS["bidirectional window"] = (
        masking_utils.sliding_window_bidirectional_mask_function(3), {"allow_is_bidirectional_skip": True, "local_size": 3},
    )  # fmt: skip


@pytest.mark.parametrize("kind", [*KINDS, "empty"])
#                                                 seqlen_q, past, keys, the first key's position
@pytest.mark.parametrize(
    "seqlen_q,past,kv_length,kv_offset", [(12, 0, 12, 0), (1, 11, 12, 0), (5, 7, 12, 0), (4, 0, 12, 0), (3, 5, 12, 0), (2, 10, 5, 7)]
)
@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("skip", [True, False], ids=["", "compiled"])
def test_mask_function(pattern, seqlen_q, past, kv_length, kv_offset, kind, skip):
    """The mask shows the same keys as the tensor that transformers makes for SDPA, for all queries that are no padding.

    The mask is None (nothing is hidden), a MaskRule, bool, or int32 (2, 1, 1, batch): the begin and end of the visible keys of each entry's
    single query. `skip`: the caller allows None."""
    function, options = PATTERNS[pattern]
    options = dict(options, allow_is_causal_skip=skip)
    mask = padding(kind, 12)
    visible = mask if mask is None else mask.bool()
    arguments = dict(
        batch_size=BATCH, kv_length=kv_length, kv_offset=kv_offset, mask_function=function, attention_mask=visible, device="cpu",
        **geometry(seqlen_q, past), **options,
    )  # fmt: skip
    found = volta_fa.transformers.mask(**arguments)
    arguments.update(allow_is_causal_skip=False, allow_is_bidirectional_skip=False)
    expected = masking_utils.sdpa_mask(**arguments).expand(BATCH, 1, seqlen_q, kv_length)
    if found is None:
        found = MaskRule(expected.shape, "cpu")
    if isinstance(found, MaskRule):
        assert found.shape == expected.shape
        found = found.as_tensor()
    if found.dtype == torch.int32:
        assert seqlen_q == 1 and found.shape == (2, 1, 1, BATCH)
        (begin, end), keys = found[:, 0, 0, :, None], torch.arange(kv_length)
        found = ((begin <= keys) & (keys < end))[:, None, None]
    found = found.expand_as(expected)
    queries = slice(None) if visible is None else visible[:, past : past + seqlen_q]
    if visible is not None:
        found, expected = (t.squeeze(1)[queries] for t in (found, expected))
    assert torch.equal(found, expected)


def contents(rule: MaskRule) -> tuple:
    """Returns window_left and window_right (-1: no bound), seqlen_k, cu_seqlens_q and cu_seqlens_k (None: not packed)."""
    assert isinstance(rule, MaskRule)
    cu_seqlens = [None if t is None else t.tolist() for t in (rule.cu_seqlens_q, rule.cu_seqlens_k)]
    return rule.window_left, rule.window_right, rule.seqlen_k, *cu_seqlens


def test_mask_function_makes_no_tensor():
    """Masks that a few numbers describe become a MaskRule or None, without memory of seqlen_q * seqlen_k elements."""
    function = volta_fa.transformers.mask
    assert AttentionMaskInterface()["volta_fa"] is function
    plain = dict(batch_size=BATCH, kv_length=SEQLEN, device="cpu", **geometry(SEQLEN, 0))
    LEFT = [0, 5, 20, 21, 40, 60]  # an entry's padding (5, 1, 0 tokens) and its tokens are packed sequences
    # causality is a rule, None is that nothing is hidden
    causal = (-1, 0, SEQLEN, None, None)
    assert contents(function(**plain)) == causal
    assert contents(function(**plain, attention_mask=padding("complete").bool())) == causal
    assert function(**dict(plain, **geometry(1, SEQLEN - 1))) is None
    assert contents(function(**plain, mask_function=causal_window(4))) == (3, 0, SEQLEN, None, None)
    assert contents(function(**plain, mask_function=causal_window(SEQLEN))) == causal
    assert contents(function(**plain, attention_mask=padding("left").bool())) == (-1, 0, SEQLEN, LEFT, LEFT)
    if V5:
        # both directions: no mask, packed sequences (padding has no queries), or one row of keys of each entry
        cross = dict(plain, mask_function=masking_utils.bidirectional_mask_function, allow_is_bidirectional_skip=True)
        assert function(**cross) is None
        assert contents(function(**cross, attention_mask=padding("left").bool())) == (-1, -1, SEQLEN, [0, 0, 20, 20, 40, 60], LEFT)
        assert function(**cross, attention_mask=padding("holes").bool()).shape == (BATCH, 1, 1, SEQLEN)
    static = dict(batch_size=BATCH, kv_length=50, device="cpu", **geometry(SEQLEN, 0))
    assert contents(function(**static)) == (-1, 0, SEQLEN, None, None)


def test_unknown_patterns_stay_tensors():
    def every_second(batch_idx, head_idx, q_idx, kv_idx):
        return (kv_idx <= q_idx) & (kv_idx % 2 == 0)

    arguments = dict(batch_size=BATCH, kv_length=SEQLEN, device="cpu", **geometry(SEQLEN, 0))
    for pattern in (every_second, masking_utils.and_masks(masking_utils.causal_mask_function, every_second)):
        found = volta_fa.transformers.mask(**arguments, mask_function=pattern, use_vmap=True)
        assert torch.equal(found, masking_utils.sdpa_mask(**arguments, mask_function=pattern, use_vmap=True, allow_is_causal_skip=False))
    # with allow_is_causal_skip=False the caller may combine the result with another mask, so it is a tensor
    found = volta_fa.transformers.mask(**arguments, allow_is_causal_skip=False)
    assert found.dtype == torch.bool and found.shape[-2:] == (SEQLEN, SEQLEN)


# ---- loading, and what is refused -------------------------------------------------------------------------------------


def test_from_pretrained(tmp_path):
    eager, ours = models("llama")
    eager.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="volta_fa")
    assert loaded.config._attn_implementation == "volta_fa"
    found, calls = profile(lambda: run(loaded, input_ids=tokens()))
    assert torch.equal(found, run(ours, input_ids=tokens())) and calls.count == LAYERS
    loaded.set_attn_implementation("eager")
    assert profile(lambda: run(loaded, input_ids=tokens()))[1].count == 0
    loaded.set_attn_implementation("volta_fa")
    assert profile(lambda: run(loaded, input_ids=tokens()))[1].count == LAYERS


def test_models_without_the_attention_interface_are_refused():
    config = transformers.XLNetConfig(vocab_size=10, d_model=16, n_layer=1, n_head=2, d_inner=16)
    with pytest.raises(ValueError, match="attn_implementation: got 'volta_fa', and XLNetModel .* expected 'sdpa', .* or 'eager'"):
        transformers.XLNetModel._from_config(config, attn_implementation="volta_fa")
    transformers.XLNetModel._from_config(config, attn_implementation="eager")
    if V5:  # SAM has a table of attention classes
        with pytest.raises(ValueError, match="attn_implementation: got 'volta_fa', and SamModel .* does not use the attention interface"):
            transformers.SamModel._from_config(transformers.SamConfig(), attn_implementation="volta_fa")


#: What a notebook, a REPL or `python -` run: classes without a file.
NOTEBOOK = """
import torch, transformers, volta_fa.transformers

class Own(transformers.LlamaForCausalLM):
    pass

class Refused(transformers.XLNetModel):
    pass

config = transformers.LlamaConfig(
    vocab_size=100, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4, attn_implementation="volta_fa"
)
model = Own(config).eval()
ids = torch.arange(3, 23)[None]
with torch.no_grad():
    ours = model(ids).logits
    model.set_attn_implementation("eager")
    eager = model(ids).logits
    model.set_attn_implementation("volta_fa")
    torch.testing.assert_close(ours, eager, rtol=0, atol=2e-5)
assert model.config._attn_implementation == "volta_fa"
config = transformers.XLNetConfig(vocab_size=10, d_model=16, n_layer=1, n_head=2, d_inner=16)
for name in ("volta_fa", "paged|volta_fa"):
    try:
        Refused._from_config(config, attn_implementation=name)
    except ValueError as error:
        message = str(error)
        # transformers 5 removes the prefix first
        asked = name if transformers.__version__ < "5" else "volta_fa"
        assert f"got {asked!r}, and Refused" in message and "does not use the attention interface" in message, message
    else:
        raise AssertionError("accepted")
"""


def test_classes_without_a_source():
    run_python(NOTEBOOK)


class Derived(transformers.LlamaForCausalLM):
    pass


class OtherAttention(nn.Module):
    """Unrelated to Derived, but in the same file: transformers looks for attention classes in a model's source file."""


def test_a_model_beside_an_unrelated_attention_class():
    config = transformers.LlamaConfig(**test_transformers.GROUPED)
    assert Derived._from_config(config, attn_implementation="volta_fa").config._attn_implementation == "volta_fa"


def test_untested_versions_of_transformers(monkeypatch):
    """Older versions are refused. With newer ones and a changed interface, volta_fa warns."""
    integration = volta_fa.integrations.transformers
    monkeypatch.setattr(integration.releases, "VERSION", (4, 56))
    refused(ImportError, "needs transformers 4.57 or 5.x", integration.register)
    monkeypatch.setattr(integration.releases, "VERSION", (6, 0))
    monkeypatch.setattr(transformers.PreTrainedModel, "get_correct_attn_implementation", None)
    with pytest.warns(UserWarning, match="tested with transformers 4.57 and 5.x"):
        integration.register()


def test_headdim_above_512_is_refused():
    config = transformers.LlamaConfig(**test_transformers.GROUPED, head_dim=520)
    model = transformers.LlamaForCausalLM._from_config(config, attn_implementation="volta_fa")
    refused(NotImplementedError, "headdim: got 520 in LlamaAttention, expected at most 512", run, model, input_ids=tokens())


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss", "bert", "bart", "t5"])
def test_output_attentions_is_refused(name):
    _, ours = models(name)
    inputs = {"decoder_input_ids": tokens()} if name in test_transformers.ENCODERS_DECODERS else {}
    with pytest.raises(NotImplementedError, match="output_attentions: got True, expected False.*'eager'"):
        run(ours, input_ids=tokens(), output_attentions=True, **inputs)
    with pytest.raises(ValueError, match="output_attentions"):
        ours.config.output_attentions = True


#: Options of MaskRule(shape, device, window_left, window_right, seqlen_k): three packed sequences in a batch of 2 with 6 tokens each.
SEQUENCES = {f"cu_seqlens_{t}": torch.tensor([0, 2, 6, 12], dtype=torch.int32) for t in "qk"}


def call(attention_mask=None, batch=2, seqlen=6, **kwargs):
    """Calls the attention function as a causal layer of two heads does."""
    q, k, v = (torch.randn(batch, 2, seqlen, 8) for _ in range(3))
    return volta_fa.transformers.attention(SimpleNamespace(is_causal=True), q, k, v, attention_mask, **kwargs)


@pytest.mark.parametrize("name", ["head_mask", "indices", "block_indices", "sinks", "cache"])
def test_unsupported_arguments_are_refused(name):
    refused(NotImplementedError, f"{name}: got .* in SimpleNamespace, expected (None|the cache)", call, **{name: torch.ones(1)})
    call(**{name: None})


def test_head_masks_are_refused():
    """In transformers 4.57 ViT and similar models pass a head mask as the attention mask."""
    _, ours = models("vit")
    pixels = torch.randn(BATCH, 3, 32, 32)
    with pytest.raises(NotImplementedError, match="head_mask: got a factor for each head in ViT.*Attention, expected None"):
        run(ours, pixel_values=pixels, head_mask=torch.tensor([1.0, 0.0, 1.0, 0.5]))


def test_packed_sequences_with_a_mask_are_refused():
    """A mask that hides more than the sequences do is refused, because attention of packed sequences would ignore it."""
    sequences = dict(cu_seq_lens_q=SEQUENCES["cu_seqlens_q"], cu_seq_lens_k=SEQUENCES["cu_seqlens_k"], max_length_q=6, max_length_k=6)
    call(**sequences)
    call(MaskRule((2, 1, 6, 6), "cpu", 3, 0), **sequences)
    padded = MaskRule((2, 1, 6, 6), "cpu", -1, 0, leftpad_k=torch.tensor([1, 0], dtype=torch.int32))
    for mask in (torch.ones(2, 1, 6, 6, dtype=torch.bool), torch.zeros(2, 1, 6, 6), padded):
        with pytest.raises(NotImplementedError, match="attention_mask: got .* in SimpleNamespace, and cu_seq_lens_q, expected one of them"):
            call(mask, **sequences)
    gemma4 = type("Gemma4TextAttention", (), {"is_causal": True})()
    with pytest.raises(NotImplementedError, match="expected one of them: logits_to_keep=0"):
        volta_fa.transformers.attention(gemma4, *torch.randn(3, 2, 2, 6, 8), mask, **sequences)
    module = SimpleNamespace(is_causal=True, config=SimpleNamespace(attention_chunk_size=3))
    with pytest.raises(NotImplementedError, match="cu_seq_lens_q: got it in SimpleNamespace, which attends in chunks"):
        volta_fa.transformers.attention(module, *torch.randn(3, 2, 2, 6, 8), None, **sequences)


def test_is_causal_without_a_mask():
    """Without a mask, the argument is_causal decides, else the module's attribute, else attention is not causal."""
    q, k, v = torch.randn(3, 2, 2, 6, 8)
    for module, is_causal, expected in (
        (SimpleNamespace(is_causal=True), None, True),
        (SimpleNamespace(is_causal=False), None, False),
        (SimpleNamespace(is_causal=False), True, True),
        (SimpleNamespace(), None, False),
    ):
        out, _ = volta_fa.transformers.attention(module, q, k, v, None, is_causal=is_causal)
        torch.testing.assert_close(out.transpose(1, 2), F.scaled_dot_product_attention(q, k, v, is_causal=expected))


@pytest.mark.parametrize(
    "mask",
    [torch.ones(2, 1, 6, 5, dtype=torch.bool), torch.ones(2, 3, 6, 6), torch.ones(2, 6), torch.ones(2, 1, 6, 6, dtype=torch.int64)],
    ids=lambda t: f"{tuple(t.shape)}-{t.dtype}",
)
def test_masks_of_the_wrong_shape_or_dtype_are_refused(mask):
    refused(ValueError, "attn_bias", call, mask)


def test_a_mask_of_another_batch_is_refused():
    rule = MaskRule((2, 1, 6, 6), "cpu", -1, 0, **SEQUENCES)
    call(rule)
    refused(ValueError, r"attention_mask: got MaskRule\(shape=\(2, 1, 6, 6\).*, expected shape \(3, 1, 6, 6\)", call, rule, batch=3)
    refused(ValueError, r"attention_mask: got .*, expected shape \(2, 1, 5, 5\)", call, rule, seqlen=5)


def test_a_mask_rule_is_a_tensor_in_operations():
    """Any operation of a model on a MaskRule gets the dense tensor in its place."""
    rule = MaskRule((2, 1, 6, 8), "cpu", 3, 0, 6, **SEQUENCES)
    plain = rule.as_tensor()
    assert type(plain) is torch.Tensor and plain.dtype == torch.bool
    assert isinstance(rule, torch.Tensor) and (rule.shape, rule.dtype, rule.dim()) == (plain.shape, plain.dtype, 4)
    for f in (
        lambda t: t[:, :, :, :5],
        lambda t: torch.where(t, 0.0, float("-inf")),
        lambda t: ~t,
        lambda t: t & torch.ones(8, dtype=torch.bool),
        lambda t: torch.zeros(2, 1, 6, 8).masked_fill(t, 1.0),
        lambda t: t.expand(2, 4, 6, 8).sum(),
    ):
        assert type(f(rule)) is torch.Tensor and torch.equal(f(rule), f(plain))
    assert rule.contiguous() is rule and rule.to("cpu") is rule and rule.detach() is rule
    moved = rule.to("meta")
    assert type(moved) is MaskRule and (moved.device.type, moved.cu_seqlens_q.device.type) == ("meta", "meta")
    assert contents(rule[:, :, :, :8]) == contents(rule)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_compiled_layers(name):
    """Compiled layers distinguish MaskRules of equal shapes, which the model makes outside of the compiled code."""
    torch.compiler.reset()  # PyTorch counts what other tests have compiled of the same code
    ours = make(*CAUSAL[name](transformers), "volta_fa")  # a fresh one: asking for attentions leaves a hook that cannot be compiled
    compiled = copy.deepcopy(ours)
    for layer in compiled.model.layers:
        layer.compile(backend="aot_eager", fullgraph=True)
    packed = torch.cat([torch.arange(8), torch.arange(12)]).expand(BATCH, -1)
    for inputs in ({}, {"attention_mask": padding("left")}, {"attention_mask": padding("right")}, {}, {"position_ids": packed}):
        keep = inputs.get("attention_mask", torch.ones(BATCH, SEQLEN)).bool()
        inputs = {"input_ids": tokens(), "use_cache": False, **inputs}
        found, calls = profile(lambda: run(compiled, **inputs))
        torch.testing.assert_close(found[keep], run(ours, **inputs)[keep], **TOLERANCE)
        assert calls.biased == 0


@pytest.mark.parametrize("seqlen", [6, 1])
@pytest.mark.parametrize("strided", ["q", "k", "v"])
def test_a_strided_last_dimension_is_copied(strided, seqlen):
    """Models may pass transposed states, which eager attention takes."""
    given = dict(zip("qkv", torch.randn(3, 2, 2, 6, 8)))
    given[strided] = given[strided].transpose(2, 3).contiguous().transpose(2, 3)
    q, k, v = given.values()
    q = q[:, :, -seqlen:]
    out, _ = volta_fa.transformers.attention(SimpleNamespace(is_causal=False), q, k, v, None)
    torch.testing.assert_close(out.transpose(1, 2), F.scaled_dot_product_attention(q, k, v))


@pytest.mark.skipif(not V5, reason="does not use the attention interface in transformers 4.57")
def test_informers_sparse_attention_adds_its_mask():
    config = transformers.InformerConfig(
        prediction_length=8, context_length=16, d_model=32, encoder_layers=1, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=32, decoder_ffn_dim=32, lags_sequence=[1, 2], num_time_features=1, dropout=0.0,
        attention_dropout=0.0, activation_dropout=0.0, attention_type="prob", distil=False,
    )  # fmt: skip
    past, future = (2, 18), (2, 8)
    inputs = dict(
        past_values=torch.randn(past), past_time_features=torch.randn(*past, 1), past_observed_mask=torch.ones(past),
        future_values=torch.randn(future), future_time_features=torch.randn(*future, 1),
    )  # fmt: skip
    found = []
    for model in both(config, transformers.InformerModel):
        torch.manual_seed(0)  # the attention samples keys
        found.append(model(**inputs).last_hidden_state)
    torch.testing.assert_close(*found, **TOLERANCE)


@pytest.mark.skipif(not V5, reason="does not use the attention interface in transformers 4.57")
def test_bridgetowers_images_attend_in_both_directions():
    text = dict(test_transformers.SMALL, attention_probs_dropout_prob=0.0, hidden_dropout_prob=0.0, pad_token_id=0)
    vision = dict(hidden_size=64, num_hidden_layers=2, image_size=32, patch_size=8)
    config = transformers.BridgeTowerConfig(
        hidden_size=64, num_hidden_layers=1, num_attention_heads=4, text_config=text, vision_config=vision
    )
    mask = torch.ones(2, 12, dtype=torch.long)
    mask[1, 8:] = 0
    inputs = dict(
        input_ids=torch.randint(3, 100, (2, 12)),
        attention_mask=mask,
        pixel_values=torch.randn(2, 3, 32, 32),
        pixel_mask=torch.ones(2, 32, 32),
    )
    eager, ours = (model(**inputs) for model in both(config, transformers.BridgeTowerModel))
    torch.testing.assert_close(ours.image_features, eager.image_features, rtol=0, atol=1e-4)


@pytest.mark.skipif(not V5, reason="4.57 does not have the model")
def test_a_model_whose_configuration_has_no_type_adds_its_mask():
    from transformers.models.pp_doclayout_v2 import configuration_pp_doclayout_v2, modeling_pp_doclayout_v2

    sizes = dict(hidden_size=64, num_attention_heads=4, num_hidden_layers=2, intermediate_size=64)
    config = configuration_pp_doclayout_v2.PPDocLayoutV2ReadingOrderConfig(**sizes)
    boxes = torch.randint(0, 900, (2, 10, 4))
    boxes[..., 2:] = boxes[..., :2] + 50
    mask = torch.ones(2, 10, dtype=torch.bool)
    mask[1, 6:] = False
    inputs = dict(boxes=boxes, labels=torch.randint(0, 5, (2, 10)), mask=mask)
    eager, ours = (model(**inputs) for model in both(config, modeling_pp_doclayout_v2.PPDocLayoutV2ReadingOrder))
    torch.testing.assert_close(ours[1, :6, :6], eager[1, :6, :6], rtol=1e-5, atol=1e-4)


@pytest.mark.skipif(not V5, reason="its encoder's window is one key larger in transformers 5")
@pytest.mark.parametrize("seqlen", [5, 6, 7])
def test_a_window_to_both_sides_that_hides_nothing(seqlen):
    """T5Gemma's encoder sees sliding_window keys to each side; its modules' own sliding_window counts one less."""
    layers = dict(
        test_transformers.SMALL, num_key_value_heads=2, head_dim=16, sliding_window=5, layer_types=["sliding_attention", "full_attention"],
        query_pre_attn_scalar=16, attn_logit_softcapping=None, final_logit_softcapping=None, dropout_rate=0.0, pad_token_id=0,
    )  # fmt: skip
    ids = torch.randint(3, 50, (2, seqlen))
    config = transformers.T5GemmaConfig(encoder=layers, decoder=layers)
    found = [model(ids, decoder_input_ids=ids[:, :4]).logits for model in both(config, transformers.T5GemmaForConditionalGeneration)]
    torch.testing.assert_close(*found, **TOLERANCE)


def test_int32_masks_of_a_user_raise():
    """int32 marks the library's own range of keys."""
    q, k, v = torch.randn(3, 3, 2, 1, 8)
    with pytest.raises(ValueError, match=r"attention_mask: got dtype torch.int32, shape \(3, 1, 1, 1\), expected bool or floating-point"):
        volta_fa.transformers.attention(SimpleNamespace(is_causal=True), q, k, v, torch.ones(3, 1, 1, 1, dtype=torch.int32))
