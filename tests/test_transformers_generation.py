"""Tests of generation by transformers with attn_implementation="volta_fa" ("ours") against its "eager": greedy and beam search, static
caches, continuous batching, and several queries after cached tokens.

Helpers are those of test_transformers.py: `models(name)` returns a small random model with eager attention and the same with ours, `make`
one of them. `padding(kind)` is an attention mask, `tokens()` input_ids (BATCH, SEQLEN). `run` returns logits, `generate` 8 new tokens in a
way of GENERATION. `profile` counts volta_fa's calls: all (`count`), of fwd_kvcache (`cached`), and with a bias (`biased`). V5: transformers
5, else 4.57. A MaskRule describes a mask by numbers, without a tensor."""

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

from transformers import AttentionMaskInterface

import test_transformers as plain
import volta_fa.transformers
from test_transformers import (
    BATCH,
    CAUSAL,
    GENERATION,
    LAYERS,
    SEQLEN,
    TOLERANCE,
    V5,
    generate,
    make,
    models,
    padding,
    profile,
    run,
    tokens,
)
from volta_fa.transformers import MaskRule

pytestmark = plain.pytestmark


@pytest.mark.parametrize("how", ["greedy", *(pytest.param(how, marks=pytest.mark.slow) for how in GENERATION if how != "greedy")])
@pytest.mark.parametrize("name", CAUSAL)
def test_generate(name, how):
    eager, ours = models(name)
    inputs = {"input_ids": tokens(), "attention_mask": padding("left"), **GENERATION[how]}
    found, calls = profile(lambda: generate(ours, **inputs))
    assert torch.equal(found, generate(eager, **inputs)) and calls.count == LAYERS * 8
    if V5 and how != "beam":
        # each of the 7 steps after the prompt has one query, which sees one range of keys
        assert calls.cached == LAYERS * 7 and calls.biased == 0
    one = {"input_ids": tokens(1), **GENERATION[how]}
    found, calls = profile(lambda: generate(ours, **one))
    assert torch.equal(found, generate(eager, **one))
    if V5 or how != "static cache":
        assert calls.cached == LAYERS * 7 and calls.biased == 0


@pytest.mark.slow
@pytest.mark.skipif(not V5, reason="4.57 has tensors as masks of static caches")
@pytest.mark.parametrize("kind", ["complete", "left"])
@pytest.mark.parametrize("name", ["llama", "mistral", "gpt_oss"])
def test_compiled_decoding_with_a_static_cache(name, kind):
    """One compiled program serves all steps, and no mask has the cache's length: a step's mask is the range of keys of each entry."""
    eager, ours = models(name)
    torch.compiler.reset()
    inputs = {"input_ids": tokens(), "attention_mask": padding(kind)}
    expected = generate(eager, **inputs)
    compiled = transformers.CompileConfig(backend="aot_eager", fullgraph=True, mode=None)
    compiled._compile_all_devices = True
    masks = []

    def spy(**arguments):
        masks.append(volta_fa.transformers.mask(**arguments))
        return masks[-1]

    AttentionMaskInterface.register("volta_fa", spy)
    try:
        # transformers' sliding cache counts tokens in Python, so models with one compile again at every step
        with torch._dynamo.config.patch(error_on_recompile=name == "llama"):
            found = generate(ours, **inputs, cache_implementation="static", compile_config=compiled)
    finally:
        AttentionMaskInterface.register("volta_fa", volta_fa.transformers.mask)
        torch.compiler.reset()
    assert torch.equal(found, expected)
    of_steps = [mask for mask in masks if not isinstance(mask, MaskRule)]
    assert len(of_steps) >= 7 and all(mask.dtype == torch.int32 and mask.shape == (2, 1, 1, BATCH) for mask in of_steps)


@pytest.mark.skipif(plain.VERSION < (5, 17), reason="refused: test_continuous_batching_of_others")
@pytest.mark.parametrize("pages", [False, True], ids=["gathered", "pages"])
@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2", "gpt_oss"])
def test_continuous_batching(name, pages, monkeypatch):
    """Requests of different lengths share batches and a paged cache. Each gets the tokens that it gets alone with eager attention."""
    eager, _ = models(name)
    # with two kinds of layers the cache has two parts, and transformers gathers their keys instead of passing pages
    paged = pages and name in ("llama", "qwen3")
    check_continuous_batching(eager, make(*CAUSAL[name](transformers), "volta_fa"), pages, paged, monkeypatch)


def check_continuous_batching(eager, ours, pages, paged, monkeypatch, memory=2**28):
    """Checks that each request gets the tokens that `eager` gives it alone. `pages`: asks for decoding from pages; `paged`: whether calls
    then get a block table; `memory`: bytes that transformers finds for its cache."""
    # up to 5.20 transformers finds no memory on a CPU without psutil
    machine = (torch.device("cpu"), memory, 0, 0)
    monkeypatch.setattr("transformers.generation.continuous_batching.cache.get_device_and_memory_breakdown", lambda: machine)
    prompts = [tokens(1, n)[0].tolist() for n in (3, 20, 11, 31)]
    config = transformers.GenerationConfig(max_new_tokens=8, do_sample=False, eos_token_id=-1, pad_token_id=0)
    page_size = "page_size" if "page_size" in transformers.ContinuousBatchingConfig.__dataclass_fields__ else "block_size"  # 5.17
    batching = transformers.ContinuousBatchingConfig(max_blocks_per_request=4 if pages else 0, use_cuda_graph=False, **{page_size: 32})
    tables = []  # whether calls have a block table. The profiler does not see the thread that generates.

    def spy(*args, **kwargs):
        tables.append(kwargs.get("block_table") is not None)
        assert args[4] is None or isinstance(args[4], MaskRule), "a mask tensor"
        return volta_fa.transformers.attention(*args, **kwargs)

    names = ("volta_fa", "paged|volta_fa")  # up to 5.17 the latter, while it generates
    for registered in names:
        transformers.AttentionInterface.register(registered, spy)
    try:
        results = ours.generate_batch(prompts, generation_config=config, continuous_batching_config=batching, progress_bar=False)
    finally:
        for registered in names:
            transformers.AttentionInterface.register(registered, volta_fa.transformers.attention)
    assert ours.config._attn_implementation in names
    assert tables and any(tables) == paged
    by_prompt = {tuple(r.prompt_ids): r.generated_tokens for r in results.values()}
    for prompt in prompts:
        alone = generate(eager, input_ids=torch.tensor([prompt]))[0, len(prompt) :]
        assert by_prompt[tuple(prompt)] == alone.tolist()


def test_continuous_batching_of_others(monkeypatch):
    """Releases before 5.17, whose own cache is wrong, are refused before anything is generated."""
    monkeypatch.setattr(volta_fa.integrations.transformers.releases, "VERSION", (5, 13))
    with pytest.raises(NotImplementedError, match="generate_batch: got transformers .*, expected 5.17 or later"):
        make(*CAUSAL["llama"](transformers), "volta_fa").get_correct_attn_implementation("paged|volta_fa")


@pytest.mark.slow
@pytest.mark.parametrize("how", ["greedy", "beam"])
@pytest.mark.parametrize("name", ["bart", "t5", "whisper"])
def test_generate_from_an_encoder(name, how):
    eager, ours = models(name)
    inputs = dict(GENERATION[how])
    if name == "whisper":
        inputs["input_features"] = torch.randn(BATCH, 16, 64, generator=torch.Generator().manual_seed(1))
    else:
        inputs.update(input_ids=tokens(), attention_mask=padding("right"))
    assert torch.equal(generate(ours, **inputs), generate(eager, **inputs))


def test_several_queries_after_cached_tokens():
    """More than one query against a filled cache, as in chunked prefill and speculative decoding."""
    for name in CAUSAL:
        eager, ours = models(name)
        ids = tokens()
        expected = run(eager, input_ids=ids)
        cache = transformers.DynamicCache(config=ours.config)
        with torch.no_grad():
            found = torch.cat([ours(part, past_key_values=cache).logits for part in ids.split((9, 4, 1, 6), 1)], 1)
        torch.testing.assert_close(found, expected, **TOLERANCE)


@pytest.mark.parametrize("rows", [4, 40], ids=["few", "many"])
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2"])
def test_several_queries_after_padding(name, rows):
    """Queries against a cache with left padding: few rows without a bias; many with one, because prefill kernels do not support it."""
    eager, ours = models(name)
    ids = tokens(seqlen=SEQLEN + rows)
    mask = padding("left", ids.shape[1])
    expected = run(eager, input_ids=ids, attention_mask=mask)
    cache = transformers.DynamicCache(config=ours.config)
    with torch.no_grad():
        ours(ids[:, :SEQLEN], attention_mask=mask[:, :SEQLEN], past_key_values=cache)
        found, calls = profile(lambda: ours(ids[:, SEQLEN:], attention_mask=mask, past_key_values=cache).logits)
    torch.testing.assert_close(found, expected[:, SEQLEN:], **TOLERANCE)
    # windows no longer reach the padding, so these layers need no bias
    windows = {"llama": 0, "gemma2": 1, "mistral": LAYERS}[name]
    # 32: decode kernels take up to 64 rows, queries times the two query heads of a KV head
    assert (calls.count, calls.biased) == (LAYERS, 0 if rows < 32 else LAYERS - windows)


#: Models of later releases whose own code reads the mask of each decoding step.
READ_THEIR_MASKS = {
    "Qwen4Exp": lambda t: (
        t.Qwen4ExpTextConfig(
            **plain.GROUPED, pad_token_id=0, head_dim=16, moe_intermediate_size=32, shared_expert_intermediate_size=32, num_experts=4,
            num_experts_per_tok=2, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=16, linear_value_head_dim=16,
            indexer_n_heads=2, indexer_kv_heads=1, indexer_head_dim=16, indexer_budget=8, indexer_compress_ratio=2, hc_count=2,
            hc_lowrank=8, layer_types=["linear_attention", "indexed_attention"],
        ),
        t.Qwen4ExpForCausalLM,
    ),
    "T5Gemma2": lambda t: (t.T5Gemma2Config(**t5gemma2()), t.T5Gemma2ForConditionalGeneration),
}  # fmt: skip


def t5gemma2():
    text = dict(plain.GROUPED, pad_token_id=0, head_dim=16, sliding_window=6, query_pre_attn_scalar=16)
    text["layer_types"] = ["sliding_attention", "full_attention"]
    vision = dict(hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, image_size=16, patch_size=8)
    places = {"image_token_index": 99, "eoi_token_index": 97}
    encoder = dict(text_config=text, vision_config=vision, mm_tokens_per_image=1, boi_token_index=98, **places)
    return dict(encoder=encoder, decoder=text, **places)


@pytest.mark.parametrize("batch", [1, 2, 3])
@pytest.mark.parametrize("name", READ_THEIR_MASKS)
def test_generation_by_models_that_read_their_masks(name, batch):
    if not hasattr(transformers, f"{name}Config"):
        pytest.skip("this transformers does not have it")
    config, cls = READ_THEIR_MASKS[name](transformers)
    ids = torch.randint(3, 90, (batch, 12))
    eager, ours = plain.both(config, cls)
    assert torch.equal(generate(ours, new_tokens=4, input_ids=ids), generate(eager, new_tokens=4, input_ids=ids))
