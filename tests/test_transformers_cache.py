"""Tests of `volta_fa.transformers.QuantizedCache`, a KV cache in int8, int4 or fp8 for models with attn_implementation="volta_fa".

`Reference` is transformers' own cache, whose tokens went through `quantize_kv` and `dequantize_kv`; transformers' own attention reads it.
The small random models compute in fp64, so that both caches almost never round a number to different codes. Helpers are those of
test_transformers.py: `padding(kind)` is a mask, `kept(mask)` an index of the tokens that are no padding, `tokens()` are input_ids
(BATCH, SEQLEN), and `profile` counts volta_fa's calls. TOLERANCE is that of fp32 sums in different orders.
`parts_of(kv_dtype)` gives the formats of keys and values (other parts are of a prompt), `quantize_kv(x, format)` data, scale and zero_point
(None where a format lacks it), `hadamard(n)` a Hadamard matrix (n, n) of 1 and -1. `refused` checks that a call raises an error that
matches. `on("sim")` runs a test on the kernels in the simulator."""

import copy
import functools

import pytest
import torch

from conftest import on
from flash_attention import refused

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

import test_transformers as plain
import volta_fa.transformers
from test_transformers import BATCH, CAUSAL, LAYERS, SEQLEN, TOLERANCE, V5, WINDOW, kept, padding, profile, tokens  # V5: transformers 5
from volta_fa.kv_cache.formats import CACHE_KV_DTYPES, dequantize_kv, hadamard, parts_of, quantize_kv
from volta_fa.transformers import QuantizedCache

pytestmark = plain.pytestmark
#: Tokens of each call of in_parts(): a prompt, then three parts.
PARTS = (9, 4, 1, 6)
#: Models whose reference uses SDPA: eager attention in fp64 gives NaN for padding, because its mask is infinite in its fp32 softmax.
WITH_SDPA = ("llama", "qwen3", "mistral", "gemma3")
#: A model for each way in which layers attend: to all tokens, in windows, in both.
WAYS = ("llama", "mistral", "gemma3")


class Reference(transformers.DynamicCache):
    """transformers' own cache with tokens rounded as a quantized cache rounds them. A prompt attends to its unrounded tokens. With
    `rotate_keys`, keys are rounded in a rotated basis and rotated back, so queries need no rotation."""

    def __init__(self, config, kv_dtype, rotate_keys=False):
        super().__init__(config=config)
        self.kv_dtype, self.rotate_keys = kv_dtype, rotate_keys

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        is_prompt = self.get_seq_length(layer_idx) == 0
        rounded = []
        for x, kv_dtype in zip((key_states, value_states), parts_of(self.kv_dtype)):
            turn = torch.eye(x.shape[-1], dtype=x.dtype)
            if self.rotate_keys and x is key_states:
                # a Hadamard matrix times the power of two that the cache uses: fp8 codes have a range, so the scale matters
                turn = hadamard(len(turn)).to(x.dtype) * 2.0 ** -(len(turn).bit_length() // 2)
            made = quantize_kv(x @ turn, kv_dtype)
            numbers = dequantize_kv(made.data, kv_dtype, made.scale, made.zero_point, dtype=x.dtype)
            rounded.append(numbers @ turn.double().inverse().to(x.dtype))
        seen = super().update(*rounded, layer_idx, *args, **kwargs)
        return (key_states, value_states) if is_prompt else seen


@functools.cache
def models(name):
    """Returns the reference model and the one with volta_fa."""
    # not test_transformers.models(): tests of output_attentions leave hooks in those models
    made = (plain.CAUSAL | plain.ENCODERS_DECODERS)[name](transformers)
    pair = [plain.make(*made, implementation).double() for implementation in ("eager", "volta_fa")]
    if name == "gpt_oss" and V5:
        for model in pair:
            model.set_experts_implementation("eager")  # the other one has no fp64
    if name in WITH_SDPA:
        pair[0].set_attn_implementation("sdpa")
    return pair


def caches(name, kv_dtype, rotate_keys=False):
    """Returns an empty cache for each of `models(name)`."""
    eager, ours = models(name)
    return Reference(eager.config, kv_dtype, rotate_keys), QuantizedCache(ours.config, kv_dtype, rotate_keys=rotate_keys)


def in_parts(model, cache, parts=PARTS, mask=None):
    """Returns the logits of all tokens, which the model gets in parts, with the cache."""
    logits, done = [], 0
    for part in tokens(seqlen=sum(parts)).split(parts, 1):
        done += part.shape[1]
        with torch.no_grad():
            logits.append(model(part, attention_mask=None if mask is None else mask[:, :done], past_key_values=cache).logits)
    return torch.cat(logits, 1)


@pytest.mark.parametrize(
    "name,kv_dtype,kind",
    [(name, kv_dtype, "none") for name in CAUSAL for kv_dtype in CACHE_KV_DTYPES]
    + [(name, kv_dtype, "left") for name in WITH_SDPA for kv_dtype in ("int8", "int4")],
)
def test_in_parts(name, kv_dtype, kind):
    """A prompt, two longer parts and a single token; windows, sinks and softcaps; padding."""
    mask = padding(kind)
    keep = kept(mask)
    eager, ours = models(name)
    reference, cache = caches(name, kv_dtype)
    expected = in_parts(eager, reference, mask=mask)
    found, calls = profile(lambda: in_parts(ours, cache, mask=mask))
    torch.testing.assert_close(found[keep], expected[keep], **TOLERANCE)
    # calls.count: calls of fwd and fwd_kvcache, calls.cached: of the latter. In a layer each part appends, and all but the prompt read
    assert calls.cached == LAYERS * (2 * len(PARTS) - 1) and calls.count == calls.cached + LAYERS
    assert cache.get_seq_length() == SEQLEN
    unrounded = in_parts(eager, transformers.DynamicCache(config=eager.config), mask=mask)
    assert (found - unrounded)[keep].abs().max() > 100 * TOLERANCE["atol"]  # so the comparison shows that the cache is read


@pytest.mark.parametrize("kv_dtype", CACHE_KV_DTYPES)
@pytest.mark.parametrize("name", WAYS)
def test_rotated_keys(name, kv_dtype):
    eager, ours = models(name)
    reference, cache = caches(name, kv_dtype, rotate_keys=True)
    found = in_parts(ours, cache)
    torch.testing.assert_close(found, in_parts(eager, reference), **TOLERANCE)
    assert (found - in_parts(ours, caches(name, kv_dtype)[1])).abs().max() > 100 * TOLERANCE["atol"]


def test_a_rotation_spreads_a_large_channel():
    """If one channel of the keys is 100 times the others, int4 loses the others. A rotation reduces the mean square error tenfold."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, 1, 50, 128, generator=generator)
    x[..., 7] *= 100
    q = torch.randn(1, 1, 20, 128, generator=generator)
    q[..., 7] /= 100
    errors = []
    for turn in (torch.eye(128), hadamard(128).float() / 128**0.5):
        made = quantize_kv(x @ turn, "int4")
        back = dequantize_kv(made.data, "int4", made.scale, made.zero_point)
        errors.append((q @ turn @ back.mT - q @ x.mT).square().mean())
    assert errors[1] < errors[0] / 10
    h = hadamard(64)
    assert torch.equal(h @ h, 64 * torch.eye(64, dtype=h.dtype)) and torch.equal(h, h.mT) and (h.abs() == 1).all()


def generate(model, cache, **inputs):
    return plain.generate(model, new_tokens=16, past_key_values=cache, **inputs)


GENERATION = {
    "greedy": {},
    "beam": {"num_beams": 3},
    "prompt lookup": {"prompt_lookup_num_tokens": 4},
    "several": {"num_return_sequences": 2, "num_beams": 2},
    "chunks": {"prefill_chunk_size": 7},
}


@pytest.mark.parametrize("how", GENERATION)
@pytest.mark.parametrize("name", WAYS)
def test_generate(name, how):
    inputs = {"input_ids": tokens(), "attention_mask": padding("left"), **GENERATION[how]}
    if how == "prompt lookup":  # of one sequence, whose prompt repeats. Wrong guesses are cropped
        ids = tokens(1).repeat(1, 3)
        inputs |= {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        if not V5 and name != "llama":
            pytest.skip("transformers 4.57's own caches do not crop windows")
    eager, ours = models(name)
    reference, cache = caches(name, "int8")
    expected = generate(eager, reference, **inputs)
    assert torch.equal(generate(ours, cache, **inputs), expected)
    assert cache.get_seq_length() == reference.get_seq_length() >= SEQLEN + 15


@pytest.mark.skipif(not V5, reason="BART of 4.57 makes tensors of its masks, which are refused")
def test_encoder_decoder():
    eager, ours = models("bart")
    inputs = {"input_ids": tokens(), "attention_mask": padding("right")}
    reference, cache = caches("bart", "int8")
    pair = [transformers.EncoderDecoderCache(own, transformers.DynamicCache(config=eager.config)) for own in (reference, cache)]
    assert torch.equal(*(generate(model, both, **inputs) for model, both in zip((eager, ours), pair)))
    assert cache.get_seq_length() == 16 and cache.layers[0].stored[0].data.dtype == torch.int8


@on("sim")
@pytest.mark.parametrize("kv_dtype", ["int8", "int4", "int8k_int4v"])
def test_on_kernels(backend, kv_dtype):
    """In fp16 the error is at most twice that of transformers' attention in fp16, both against fp64."""
    mask = padding("left")
    eager, ours = models("gemma3")
    exact = in_parts(eager, caches("gemma3", kv_dtype)[0], mask=mask)
    theirs = in_parts(copy.deepcopy(eager).half(), caches("gemma3", kv_dtype)[0], mask=mask).double()
    backend.simulate()
    found = in_parts(copy.deepcopy(ours).half(), caches("gemma3", kv_dtype)[1], mask=mask).double()
    keep = mask.bool()
    assert (found - exact)[keep].abs().max() <= 2 * (theirs - exact)[keep].abs().max()


# ---- storage -------------------------------------------------------------------------------------------------------


def filled(kv_dtype="int8", name="llama", n=SEQLEN):
    """Returns a cache with n tokens in each layer, and their keys and values, (2, BATCH, KV heads, n, headdim)."""
    _, ours = models(name)
    cache = QuantizedCache(ours.config, kv_dtype)
    states = torch.randn(2, BATCH, 2, n, 16, generator=torch.Generator().manual_seed(0))
    for layer in range(LAYERS):
        cache.update(states[0], states[1], layer)
    return cache, states


@pytest.mark.parametrize("kv_dtype", CACHE_KV_DTYPES)
def test_stored_as_the_format_says(kv_dtype):
    """Stored codes and scales are bitwise those of `quantize_kv`, after several appends too, in at most 1.25 times the memory needed."""
    cache, states = filled(kv_dtype)
    more = torch.randn(2, BATCH, 2, 7, 16)
    # layer.stored: memory for keys and for values, with spare room; layer.keys and .values: tensor subclasses, whose `stored` has no room
    for i in range(7):
        cache.update(more[0, :, :, i : i + 1], more[1, :, :, i : i + 1], 0)
    layer = cache.layers[0]
    for stored, x, shown, of in zip(layer.stored, torch.cat((states, more), 3), (layer.keys, layer.values), parts_of(kv_dtype)):
        expected = quantize_kv(x, of)
        for a, b, c in zip(stored, expected, shown.stored):
            assert (a is None) == (b is None) == (c is None)
            if a is not None:
                assert a.dtype == b.dtype and a.shape[2] <= 1.25 * (SEQLEN + 7)
                as_bytes = [t.contiguous().view(torch.uint8) for t in (a[:, :, : SEQLEN + 7], b, c)]
                assert torch.equal(as_bytes[0], as_bytes[1]) and torch.equal(as_bytes[2], as_bytes[1])
    assert shown.shape == (BATCH, 2, SEQLEN + 7, 16) and shown.dtype == torch.float32


@pytest.mark.parametrize("kv_dtype", CACHE_KV_DTYPES)
def test_sequences_are_reordered_selected_and_repeated(kv_dtype):
    cache, states = filled(kv_dtype)

    def check(indices):
        for layer in cache.layers:
            for stored, x, of in zip(layer.stored, states, parts_of(kv_dtype)):
                for a, b in zip(stored, quantize_kv(x[indices], of)):
                    assert (a is None and b is None) or torch.equal(a[:, :, :SEQLEN].float(), b.float())

    cache.reorder_cache(torch.tensor([2, 0, 0]))
    check([2, 0, 0])
    cache.batch_select_indices(torch.tensor([1, 0]))
    check([0, 2])
    cache.batch_repeat_interleave(2)
    check([0, 0, 2, 2])


def test_crop_and_reset():
    cache, states = filled()
    cache.crop(-3)  # removes 3 tokens
    assert cache.get_seq_length() == SEQLEN - 3 and cache.layers[1].keys.shape[2] == SEQLEN - 3
    cache.crop(0)
    assert cache.get_seq_length() == SEQLEN - 3
    cache.crop(5)  # positive, as in transformers 4.57: keeps 5 tokens
    k, _ = cache.update(states[0, :, :, :2], states[1, :, :, :2], 0)
    assert cache.get_seq_length() == 7
    expected = quantize_kv(torch.cat((states[0, :, :, :5], states[0, :, :, :2]), 2), "int8")
    assert torch.equal(k.stored.data, expected.data) and torch.equal(k.stored.scale, expected.scale)
    cache.reset()
    assert cache.get_seq_length() == 0 and not cache.is_initialized and cache.layers[0].keys is None
    key, value = states
    assert cache.update(key, value, 0)[0] is key


def test_layers_with_a_window_keep_only_its_tokens():
    """The memory of a window's layer does not grow, and crop() removes only as many tokens as memory still covers."""
    cache, states = filled(name="mistral", n=30)
    layer = cache.layers[0]
    one = states[:, :, :, :1]
    room = 0
    for i in range(100):
        k, _ = cache.update(one[0], one[1], 0)
        assert k.shape[2] == WINDOW
        if i == 10:
            room = layer.stored[0].data.shape[2]
    assert layer.stored[0].data.shape[2] == room <= 1.25 * WINDOW and layer.length == 130
    refused(ValueError, r"tokens_to_remove: got -5 after 130 tokens, of which the last \d are in memory", cache.crop, -5)
    layer.activate_past_recording()
    for _ in range(8):
        cache.update(one[0], one[1], 0)
    layer.crop(-8)
    assert layer.length == 130 and cache.get_mask_sizes(1, 0) == (WINDOW, 130 - WINDOW + 1)


# ---- what is refused -----------------------------------------------------------------------------------------------


def test_invalid_caches_are_refused():
    eager, ours = models("llama")
    formats = "int8, int4, fp8_e5m2, fp8_e4m3, int8k_int4v"
    refused(ValueError, f"kv_dtype: got 'int2', expected one of {formats}", QuantizedCache, ours.config, "int2")
    refused(ValueError, "config: got attn_implementation 'sdpa', expected 'volta_fa'", QuantizedCache, eager.config)
    config = copy.deepcopy(ours.config)
    config.layer_types = ["full_attention", "linear_attention"]
    message = "config: got a layer of linear_attention, expected full_attention or sliding_attention"
    refused(NotImplementedError, message, QuantizedCache, config)
    odd = torch.zeros(1, 2, 3, 15)
    refused(ValueError, "headdim 15, expected an even one", QuantizedCache(ours.config, "int4").update, odd, odd, 0)
    with pytest.raises(ValueError, match="rotate_keys: got True with headdim 24, expected a power of two"):
        QuantizedCache(ours.config, rotate_keys=True).update(*torch.zeros(2, 1, 2, 3, 24), 0)
    refused(ValueError, "n: got 48, expected a power of two", hadamard, 48)


def test_other_operations_on_a_quantized_cache_are_refused():
    """Any operation but volta_fa's attention on a quantized cache's keys or values raises an error."""
    cache, states = filled()
    k, v = cache.update(states[0], states[1], 0)
    for f in (lambda: k + 1, lambda: k[:, :, :4], lambda: torch.cat((v, v)), lambda: v.float().sum()):
        refused(NotImplementedError, "past_key_values: got a QuantizedCache whose keys or values are given to", f)
    assert k.detach() is k and "QuantizedStates" in repr(k)
    eager, ours = models("llama")
    cache = QuantizedCache(ours.config)
    with torch.no_grad():
        eager(tokens(), past_key_values=cache)
        refused(
            NotImplementedError,
            "expected a model with attn_implementation='volta_fa' that gives .*: caches of latents",
            eager,
            tokens(),
            past_key_values=cache,
        )


def test_masks_that_are_refused():
    _, ours = models("llama")
    own = torch.ones(BATCH, 1, 3, SEQLEN + 3, dtype=torch.bool)
    for mask in (torch.cat((padding("holes"), torch.ones(BATCH, 3, dtype=torch.long)), 1), own):
        cache = QuantizedCache(ours.config)
        with torch.no_grad():
            ours(tokens(), past_key_values=cache)
            with pytest.raises(NotImplementedError, match="attention_mask: got one that is more than .* in LlamaAttention"):
                ours(tokens(seqlen=3), attention_mask=mask, past_key_values=cache)
    cache, states = filled()
    k, v = cache.update(states[0], states[1], 0)
    q = torch.zeros(BATCH, 4, 1, 16)
    packed = dict(cu_seq_lens_q=torch.tensor([0, 1]), cu_seq_lens_k=torch.tensor([0, 1]), max_length_q=1, max_length_k=1)
    for given in ({"dropout": 0.1}, {"position_bias": torch.zeros(1, 1, 1, 1)}, packed):
        message = f"{next(iter(given))}: got it with a QuantizedCache"
        refused(NotImplementedError, message, volta_fa.transformers.attention, torch.nn.Module(), q, k, v, None, **given)
