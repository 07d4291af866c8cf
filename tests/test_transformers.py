"""Tests of Hugging Face transformers with attn_implementation="volta_fa" ("ours") against its "eager": small random models in fp32.

`models(name)` returns both models with equal weights, and `padding(kind)` a mask. `profile` counts volta_fa's calls, and those with packed
sequences or a bias: masks become packed sequences or a few numbers (a MaskRule) where possible, else a bias tensor. test_transformers_*.py
have more tests with these helpers.

The tests run with the installed transformers, and once more in a process with 4.57. `on("sim", "cuda")` runs a test's kernels in the
simulator (`backend.simulate`) and on a GPU.
Environment:
- VOLTA_FA_TEST_TRANSFORMERS_4_57: a folder with that release, instead of the one that tools/bootstrap.py makes"""

import copy
import functools
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from conftest import REPOSITORY, on
from processes import output_of, run_program

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

import volta_fa.transformers  # noqa: F401  registers attn_implementation="volta_fa"

VERSION = tuple(int(part) for part in transformers.__version__.split(".")[:2])
V5 = VERSION >= (5, 0)
FOLDER_4_57 = Path(os.environ.get("VOLTA_FA_TEST_TRANSFORMERS_4_57", Path(sys.prefix) / "transformers-4.57"))
transformers.logging.set_verbosity_error()
pytestmark = pytest.mark.filterwarnings("ignore")  # transformers' deprecations, the profiler's advice
LAYERS = 2
BATCH, SEQLEN, DECODER_SEQLEN = 3, 20, 9
#: Ours against eager: both sum in fp32, in different orders.
TOLERANCE = {"rtol": 0, "atol": 2e-5}

# ---- models --------------------------------------------------------------------------------------------------------

SMALL = dict(
    vocab_size=100, hidden_size=64, intermediate_size=64, num_hidden_layers=LAYERS, num_attention_heads=4, max_position_embeddings=128
)
GROUPED = dict(SMALL, num_key_value_heads=2)
WINDOW = 6  # tokens, the query's own included
ENCODER_DECODER = dict(
    vocab_size=100, d_model=64, encoder_layers=LAYERS, decoder_layers=LAYERS, encoder_attention_heads=4, decoder_attention_heads=4,
    encoder_ffn_dim=64, decoder_ffn_dim=64, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=2,
)  # fmt: skip
TOKENS = dict(pad_token_id=0, bos_token_id=1, eos_token_id=2, cls_token_id=1, sep_token_id=2)

#: Models by name, here and below: a function of the module transformers (`t`) that returns a configuration and the model's class.
CAUSAL = {
    "llama": lambda t: (t.LlamaConfig(**GROUPED), t.LlamaForCausalLM),
    "qwen3": lambda t: (t.Qwen3Config(**GROUPED, head_dim=16), t.Qwen3ForCausalLM),
    "mistral": lambda t: (t.MistralConfig(**GROUPED, sliding_window=WINDOW), t.MistralForCausalLM),
    # a headdim that is padded; layers with and without a window
    "gemma2": lambda t: (
        t.Gemma2Config(**GROUPED, head_dim=20, sliding_window=WINDOW, query_pre_attn_scalar=16, attn_logit_softcapping=2.0),
        t.Gemma2ForCausalLM,
    ),
    "gemma3": lambda t: (
        t.Gemma3TextConfig(
            **GROUPED, head_dim=256, sliding_window=WINDOW, query_pre_attn_scalar=256, layer_types=["sliding_attention", "full_attention"]
        ),
        t.Gemma3ForCausalLM,
    ),
    "gpt_oss": lambda t: (
        t.GptOssConfig(**GROUPED, head_dim=16, sliding_window=WINDOW, num_local_experts=2, num_experts_per_tok=1),
        t.GptOssForCausalLM,
    ),
}
ENCODERS = {
    "bert": lambda t: (t.BertConfig(**SMALL), t.BertModel),
    "modernbert": lambda t: (
        t.ModernBertConfig(**SMALL, **TOKENS, local_attention=2 * WINDOW, global_attn_every_n_layers=2),
        t.ModernBertModel,
    ),
}
ENCODERS_DECODERS = {
    "bart": lambda t: (t.BartConfig(**ENCODER_DECODER, max_position_embeddings=128), t.BartForConditionalGeneration),
    "t5": lambda t: (
        t.T5Config(vocab_size=100, d_model=64, d_kv=16, d_ff=64, num_layers=LAYERS, num_heads=4, pad_token_id=0, decoder_start_token_id=0),
        t.T5ForConditionalGeneration,
    ),
}
OTHERS = {
    "whisper": lambda t: (
        t.WhisperConfig(**ENCODER_DECODER, num_mel_bins=16, max_source_positions=32, max_target_positions=32),
        t.WhisperForConditionalGeneration,
    ),
    # headdim 15
    "vit": lambda t: (
        t.ViTConfig(hidden_size=60, intermediate_size=64, num_hidden_layers=LAYERS, num_attention_heads=4, image_size=32, patch_size=8),
        t.ViTModel,
    ),
}
#: Models that transformers 4.57 does not have, or that do not use its attention interface.
NOT_IN_4_57 = ("bert", "modernbert", "t5", "beit", "deepseek_v4")
GPT2 = dict(vocab_size=100, n_embd=64, n_layer=LAYERS, n_head=4, n_positions=64, bos_token_id=1, eos_token_id=2)
VISION = dict(hidden_size=64, intermediate_size=64, num_hidden_layers=LAYERS, num_attention_heads=4, image_size=32, patch_size=8)
#: Models whose eager attention or use of masks differs from most, in one of the versions at least.
PECULIAR_TEXT = {
    # in 4.57 the attention module decides the scale and causality
    "gpt2": lambda t: (t.GPT2Config(**GPT2), t.GPT2LMHeadModel),
    "gpt2 unscaled": lambda t: (t.GPT2Config(**GPT2, scale_attn_weights=False), t.GPT2LMHeadModel),
    "gpt2 by layer": lambda t: (t.GPT2Config(**GPT2, scale_attn_by_inverse_layer_idx=True), t.GPT2LMHeadModel),
    "gpt2 upcast": lambda t: (t.GPT2Config(**GPT2, scale_attn_by_inverse_layer_idx=True, reorder_and_upcast_attn=True), t.GPT2LMHeadModel),
    # in 4.57 its masks have one key more than there are
    "persimmon": lambda t: (t.PersimmonConfig(**SMALL), t.PersimmonForCausalLM),
    # calculate with their masks
    "bigbird_pegasus": lambda t: (
        t.BigBirdPegasusConfig(**ENCODER_DECODER, attention_type="original_full", max_position_embeddings=128), t.BigBirdPegasusModel,
    ),
    "doge": lambda t: (t.DogeConfig(**GROUPED, pad_token_id=0, keep_window_size=8), t.DogeForCausalLM),
    "deepseek_v4": lambda t: (
        t.DeepseekV4Config(
            vocab_size=100, hidden_size=64, moe_intermediate_size=32, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=1,
            head_dim=32, q_lora_rank=16, n_routed_experts=4, num_experts_per_tok=2, max_position_embeddings=128, sliding_window=8,
            index_topk=4, index_n_heads=2, index_head_dim=16, o_groups=2, o_lora_rank=16,
            compress_rates={"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
        ),
        t.DeepseekV4ForCausalLM,
    ),
    # attend in both directions, but their modules have no is_causal=False
    "align": lambda t: (t.AlignTextConfig(**SMALL), t.AlignTextModel),
    "clap": lambda t: (t.ClapTextConfig(**SMALL), t.ClapTextModel),
    "markuplm": lambda t: (t.MarkupLMConfig(**SMALL), t.MarkupLMModel),
    "splinter": lambda t: (t.SplinterConfig(**SMALL), t.SplinterModel),
}  # fmt: skip


def phi4_vision(t):
    from transformers.models.phi4_multimodal import configuration_phi4_multimodal, modeling_phi4_multimodal

    # the model returns the second to last layer's state, so one more layer
    config = configuration_phi4_multimodal.Phi4MultimodalVisionConfig(**dict(VISION, num_hidden_layers=LAYERS + 1), crop_size=32)
    return config, modeling_phi4_multimodal.Phi4MultimodalVisionModel


PECULIAR_VISION = {
    "beit": lambda t: (t.BeitConfig(**VISION, use_relative_position_bias=True), t.BeitModel),
    "chinese_clip": lambda t: (t.ChineseCLIPVisionConfig(**VISION), t.ChineseCLIPVisionModel),
    # its modules have is_causal=True, which eager attention ignores
    "phi4": phi4_vision,
}


@functools.cache
def models(name: str):
    """Returns the model twice, eager and ours, with the same weights."""
    if not V5 and name in NOT_IN_4_57:
        pytest.skip("does not use the attention interface in transformers 4.57, or is not in it")
    config, cls = (CAUSAL | ENCODERS | ENCODERS_DECODERS | OTHERS | PECULIAR_TEXT | PECULIAR_VISION)[name](transformers)
    return both(config, cls)


def both(config, cls):
    """Returns a model of this configuration twice, eager and ours, with the same weights."""
    eager, ours = (make(config, cls, implementation) for implementation in ("eager", "volta_fa"))
    ours.load_state_dict(eager.state_dict())
    return eager, ours


def make(config, cls, implementation: str):
    """Returns a model with weights from seed 0, so large that its attention is not uniform."""
    torch.manual_seed(0)
    model = cls._from_config(copy.deepcopy(config), attn_implementation=implementation).eval()
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            parameter.data.mul_(5)
        if name.endswith("sinks"):
            parameter.data.copy_(torch.linspace(-2, 2, parameter.numel()))
    return model


#: Kinds of padding: no mask, a mask of ones, padding on a side or on both, and within.
KINDS = ["none", "complete", "left", "right", "both", "holes"]


def padding(kind: str, seqlen: int = SEQLEN):
    """Returns an attention mask (BATCH, seqlen) with 0 for padding; None for the kind "none"."""
    mask = torch.ones(BATCH, seqlen, dtype=torch.long)
    match kind:
        case "none":
            return None
        case "left":
            mask[0, :5] = mask[1, :1] = 0
        case "empty":  # an entry without tokens
            mask[0] = mask[1, -3:] = 0
        case "right":
            mask[0, -6:] = mask[2, -2:] = 0
        case "both":
            mask[0, :3] = mask[0, -2:] = mask[1, -4:] = 0
        case "holes":
            mask[0, 4:6] = mask[0, 9] = mask[2, :2] = 0
    return mask


def kept(mask):
    """Returns an index of the tokens that are no padding."""
    return slice(None) if mask is None else mask.bool()


def tokens(batch: int = BATCH, seqlen: int = SEQLEN):
    """Returns input_ids (batch, seqlen), always the same of a size."""
    return torch.randint(3, 100, (batch, seqlen), generator=torch.Generator().manual_seed(seqlen))


# ---- what ran ------------------------------------------------------------------------------------------------------


@dataclass
class Calls:
    """The calls of volta_fa::fwd and fwd_kvcache in a profile: their count, those of fwd_kvcache, those with packed sequences, and those
    with a bias. `theirs`: attention ops and softmaxes outside of them."""

    count: int = 0
    cached: int = 0
    packed: int = 0
    biased: int = 0
    theirs: list[str] = field(default_factory=list)


def profile(f) -> tuple[object, Calls]:
    """Returns what f() returns, and the calls of attention in it."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as profiler:
        result = f()
    calls, end = Calls(), {}
    # profiler.events() takes seconds for a training step
    for event in sorted(profiler.profiler.kineto_results.events(), key=lambda event: event.start_ns()):
        if event.start_ns() < end.get(event.start_thread_id(), 0):
            continue  # inside an op of volta_fa: autograd's kernel calls the device's, and the CPU backend ATen's attention
        if event.name().startswith("volta_fa::"):
            end[event.start_thread_id()] = event.end_ns()
        if event.name() in ("volta_fa::fwd", "volta_fa::fwd_kvcache"):
            q, *rest = event.shapes()
            calls.count += 1
            calls.cached += event.name() == "volta_fa::fwd_kvcache"
            calls.packed += len(q) == 3
            calls.biased += any(len(shape) == 4 for shape in rest[2:])
        if "scaled_dot_product" in event.name() or event.name() == "aten::softmax":
            calls.theirs.append(event.name())
    return result, calls


def run(model, **inputs):
    """Returns the logits, or the last hidden state of a model without logits."""
    with torch.no_grad():
        out = model(**inputs)
    return out.logits if hasattr(out, "logits") else out.last_hidden_state


def generate(model, new_tokens=8, **inputs):
    """Returns the tokens of the inputs and exactly `new_tokens` more, without sampling."""
    with torch.no_grad():
        return model.generate(**inputs, max_new_tokens=new_tokens, min_new_tokens=new_tokens, do_sample=False, pad_token_id=0)


GENERATION = {"greedy": {}, "beam": {"num_beams": 3}, "static cache": {"cache_implementation": "static"}}


def assert_right(found, expected, exact, factor=2, **tolerance):
    """Checks that `found` is close to eager's result, or at most `factor` times as far from fp64's (which `exact` computes) as eager's is.

    Scores of some models, such as T5's, which it does not scale, are so large that another order of fp32 operations changes results."""
    if not torch.allclose(found, expected, **tolerance):
        values = exact()
        error, allowed = ((t.double() - values).abs().max().item() for t in (found, expected))
        assert error <= factor * allowed, f"{error:.3g} from the result in fp64, eager attention {allowed:.3g}"


def in_fp64(model, **inputs):
    inputs = {name: t.double() if torch.is_tensor(t) and t.is_floating_point() else t for name, t in inputs.items()}
    return run(copy.deepcopy(model).double(), **inputs)


def compare(name: str, mask=None, **inputs) -> Calls:
    """Compares what both models return for tokens that are no padding. Returns the calls in ours."""
    eager, ours = models(name)
    expected, keep = run(eager, **inputs), kept(mask)
    found, calls = profile(lambda: run(ours, **inputs))
    assert_right(found[keep], expected[keep], lambda: in_fp64(eager, **inputs)[keep], **TOLERANCE)
    # these models have other softmaxes, of an encoder, a router, compression, pooling
    assert not calls.theirs or name in ("bigbird_pegasus", "gpt_oss", "deepseek_v4", "phi4"), calls.theirs
    return calls


# ---- logits --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("use_cache", [False, True], ids=["", "cache"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", CAUSAL)
def test_causal_models(name, kind, use_cache):
    mask = padding(kind)
    calls = compare(name, mask, input_ids=tokens(), attention_mask=mask, use_cache=use_cache)
    assert calls.count == LAYERS
    # padding at the ends becomes packed sequences, padding within ("holes") a bias
    assert calls.packed == (LAYERS if kind in ("left", "right", "both") else 0)
    assert calls.biased == (LAYERS if kind == "holes" else 0)


@pytest.mark.parametrize("name", [name for name in CAUSAL if name != "gpt_oss"])
def test_packed_by_position_ids(name):
    """position_ids that start at 0 again begin a sequence. gpt_oss ignores them; test_packed_by_cu_seq_lens has it."""
    rows = [torch.cat([torch.arange(n) for n in lengths]) for lengths in ((3, 1, 16), (12, 8), (20,))]
    calls = compare(name, input_ids=tokens(), position_ids=torch.stack(rows), use_cache=False)
    assert (calls.count, calls.packed, calls.biased) == (LAYERS, LAYERS, 0)


@pytest.mark.parametrize("as_tensor", [False, True], ids=["int", "tensor"])
@pytest.mark.parametrize("name", CAUSAL)
def test_packed_by_cu_seq_lens(name, as_tensor):
    """Lengths as DataCollatorWithFlattening makes them. Eager attention of the sequences one by one is the reference."""
    lengths = (3, 1, 16)
    ids = tokens(1)
    position_ids = torch.cat([torch.arange(n) for n in lengths])[None]
    cu_seq_lens = torch.tensor([0, 3, 4, 20])  # int64, as transformers documents it
    longest = torch.tensor(16) if as_tensor else 16
    eager, ours = models(name)
    expected = torch.cat([run(eager, input_ids=part) for part in ids.split(lengths, 1)], 1)
    packed = dict(cu_seq_lens_q=cu_seq_lens, cu_seq_lens_k=cu_seq_lens, max_length_q=longest, max_length_k=longest)
    found, calls = profile(lambda: run(ours, input_ids=ids, position_ids=position_ids, use_cache=False, **packed))
    torch.testing.assert_close(found, expected, **TOLERANCE)
    assert (calls.count, calls.packed) == (LAYERS, LAYERS)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ENCODERS)
def test_encoders(name, kind):
    mask = padding(kind)
    calls = compare(name, mask, input_ids=tokens(), attention_mask=mask)
    assert calls.count == LAYERS and calls.packed == (LAYERS if kind in ("left", "right", "both") else 0)


@pytest.mark.parametrize("seqlen", [DECODER_SEQLEN, SEQLEN])  # shorter than the encoder's tokens, and as long
@pytest.mark.parametrize("kind", ["none", "left", "right", "holes"])
@pytest.mark.parametrize("name", ENCODERS_DECODERS)
def test_encoder_decoder(name, kind, seqlen):
    mask = padding(kind)
    decoder_mask = None if kind == "none" else padding("right", seqlen)
    decoder = {"decoder_input_ids": tokens(seqlen=seqlen), "decoder_attention_mask": decoder_mask}
    calls = compare(name, decoder_mask, input_ids=tokens(), attention_mask=mask, **decoder)
    assert calls.count == 3 * LAYERS  # in the encoder, in the decoder, and across


def test_whisper():
    features = torch.randn(BATCH, 16, 64, generator=torch.Generator().manual_seed(1))
    inputs = {"input_features": features, "decoder_input_ids": tokens(seqlen=DECODER_SEQLEN)}
    for kind in ("none", "right"):
        mask = padding(kind, DECODER_SEQLEN)
        assert compare("whisper", mask, **inputs, decoder_attention_mask=mask).count == 3 * LAYERS


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32], ids=str)
@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_users_own_mask(name, dtype):
    """4-D masks reach the layers unchanged, and become biases: here the first 7 tokens see each other."""
    visible = torch.ones(SEQLEN, SEQLEN, dtype=torch.bool).tril()
    visible[:7, :7] = True
    visible = visible.expand(BATCH, 1, -1, -1)
    additive = torch.where(visible, 0.0, torch.finfo(torch.float32).min)
    eager, ours = models(name)
    expected = run(eager, input_ids=tokens(), attention_mask=additive)
    found, calls = profile(lambda: run(ours, input_ids=tokens(), attention_mask=visible if dtype == torch.bool else additive))
    torch.testing.assert_close(found, expected, **TOLERANCE)
    assert (calls.count, calls.biased) == (LAYERS, LAYERS)


@pytest.mark.parametrize("name", PECULIAR_TEXT)
def test_peculiar_models(name):
    for kind in ("none", "left", "holes"):
        mask = padding(kind)
        calls = compare(name, mask, input_ids=tokens(), attention_mask=mask)
        config = models(name)[1].config
        # of a decoder after an encoder, whose own attention is another, each layer has two
        assert calls.count == config.num_hidden_layers * (2 if config.is_encoder_decoder else 1)


@pytest.mark.parametrize("name", [*PECULIAR_VISION, "vit"])
def test_vision_models(name):
    pixels = torch.randn(BATCH, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    calls = compare(name, pixel_values=pixels)
    assert calls.count >= LAYERS and (name != "vit" or (calls.count, calls.biased) == (LAYERS, 0))
    if name == "beit":
        mask = padding("right", 17)
        assert compare(name, mask, pixel_values=pixels, attention_mask=mask).count == LAYERS


def test_gpt2_with_a_4d_mask():
    """In transformers 4.57 GPT-2 stays causal even if the mask shows later keys."""
    additive = torch.where(torch.ones(SEQLEN, SEQLEN, dtype=torch.bool).tril(4), 0.0, torch.finfo(torch.float32).min)
    compare("gpt2", input_ids=tokens(), attention_mask=additive.expand(BATCH, 1, -1, -1))


@on("sim", "cuda")
@pytest.mark.parametrize("kind", ["none", "left", "holes"])
@pytest.mark.parametrize("name", ["llama", "gemma2", "gemma3", "gpt_oss"])
def test_on_kernels(backend, name, kind):
    eager, ours = (copy.deepcopy(model) for model in models(name))
    check_in_fp16(backend, eager, ours, padding(kind))


def check_in_fp16(backend, eager, ours, mask):
    """Checks that the error of ours in fp16 is at most twice that of eager in fp16, both against eager in fp32. Changes the models."""
    mask = mask if mask is None else mask.to(backend.device)
    inputs = {"input_ids": tokens().to(backend.device), "attention_mask": mask}
    exact = run(eager.to(backend.device), **inputs)
    theirs = run(eager.half(), **inputs).float()
    backend.simulate()
    found = run(ours.to(backend.device).half(), **inputs).float()
    keep = kept(mask)
    assert (found - exact)[keep].abs().max() <= 2 * (theirs - exact)[keep].abs().max()


def test_two_patterns_keep_the_tighter_bounds():
    """A pattern is (window_left, window_right); -1: no bound."""
    from volta_fa.integrations.transformers.mask_rule import Pattern

    assert Pattern(3, 2) & Pattern(5, 1) == Pattern(3, 1) and Pattern(-1, 4) & Pattern(5, -1) == Pattern(5, 4)


@pytest.mark.slow
@pytest.mark.skipif(not V5, reason="this process runs 4.57")
def test_transformers_4_57():
    """Runs this file, ..._masks.py, ..._cache.py and ..._generation.py with the oldest supported transformers."""
    if not (FOLDER_4_57 / "transformers").is_dir():
        pytest.skip(f"no transformers 4.57 in {FOLDER_4_57}: tools/bootstrap.py puts it there")
    check = "import transformers; assert transformers.__version__.startswith('4.57.'), transformers.__version__"
    output_of(run_program("-c", check, path=[FOLDER_4_57]))
    files = [__file__, *(REPOSITORY / "tests" / f"test_transformers_{name}.py" for name in ("masks", "cache", "generation"))]
    command = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "--no-header", *files]
    assert " passed" in output_of(run_program(*command, path=[FOLDER_4_57]))
