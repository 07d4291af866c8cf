"""Tests of transformers' masks that become block masks with attn_implementation="volta_fa": image spans, packed documents, chunks.

A block mask lists the blocks of the score matrix that have visible keys. `Operations` records the bytes of the largest tensor of any
operation: none is as large as the dense mask, SEQLEN * SEQLEN bytes. A MaskRule is volta_fa's mask; its `blocks` are the block mask, or
None. `sparsity()` is the share of absent blocks in percent. `make` returns a model with weights from seed 0."""

import pytest
import torch

from test_block_mask_packing import Operations

transformers = pytest.importorskip("transformers", minversion="5.0", reason="needs transformers 5")

from transformers import masking_utils

import volta_fa.transformers
from test_transformers import make
from volta_fa.block_mask import packing
from volta_fa.transformers import MaskRule

#: So long that some blocks are absent and block masks are chosen.
SEQLEN = 1152
TEXT = dict(
    vocab_size=100, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    max_position_embeddings=4096, pad_token_id=0, bos_token_id=1, eos_token_id=2,
)  # fmt: skip


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    """Packing evaluates 64 cells of 64 by 64 scores at a time instead of 2560, so these masks take several chunks."""
    monkeypatch.setattr(packing, "CHUNK", 64)


@pytest.fixture
def masks(monkeypatch):
    """Collects the masks that the attention function gets."""
    from volta_fa.integrations.transformers import attention_function

    seen, inner = [], attention_function._visible_keys

    def spy(module, query, key, mask, *rest):
        seen.append(mask)
        return inner(module, query, key, mask, *rest)

    monkeypatch.setattr(attention_function, "_visible_keys", spy)
    return seen


def gemma3():
    """Returns the configuration and the class of a small Gemma 3 with a vision encoder."""
    sliding = dict(head_dim=8, sliding_window=200, query_pre_attn_scalar=8, layer_types=["sliding_attention", "full_attention"])
    vision = dict(hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, image_size=28, patch_size=14)
    config = transformers.Gemma3Config(text_config=TEXT | sliding, vision_config=vision, mm_tokens_per_image=4)
    return config, transformers.Gemma3ForConditionalGeneration


def logits(made, implementation, **inputs):
    """Returns the logits of a model, `made` of (configuration, class), and the bytes of the largest tensor of any operation."""
    with torch.no_grad(), Operations() as operations:
        found = make(*made, implementation)(use_cache=False, **inputs).logits
    return found, operations.largest


def compare(made, masks, **inputs):
    """Compares volta_fa with eager attention. Both layers (`masks`: of calls) must get block masks, and no dense one may exist."""
    torch.manual_seed(1)
    inputs["input_ids"] = torch.randint(5, 100, (1, SEQLEN))
    expected, largest = logits(made, "eager", **inputs)
    assert not masks and largest > SEQLEN * SEQLEN
    found, largest = logits(made, "volta_fa", **inputs)
    assert largest < SEQLEN * SEQLEN
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-5)  # both sum in fp32, in another order
    assert len(masks) == 2 and all(isinstance(mask, MaskRule) and mask.blocks is not None for mask in masks)
    assert all(mask.blocks.sparsity() > 20 for mask in masks)


def test_image_spans_of_gemma3(masks):
    """Tokens of an image (token type 1) see each other in both directions."""
    images = torch.zeros(1, SEQLEN, dtype=torch.int64)
    images[:, 100:400] = images[:, 700:760] = 1
    compare(gemma3(), masks, token_type_ids=images)


def test_packed_documents_with_padding():
    documents = torch.arange(SEQLEN)[None] // 300
    mask_function = masking_utils.and_masks(masking_utils.causal_mask_function, masking_utils.packed_sequence_mask_function(documents))
    padding = torch.ones(1, SEQLEN, dtype=torch.bool)
    padding[:, 900:1000] = False
    geometry = dict(batch_size=1, q_length=SEQLEN, kv_length=SEQLEN, mask_function=mask_function, attention_mask=padding)
    with Operations() as operations:
        mask = volta_fa.transformers.mask(**geometry, allow_is_causal_skip=False)
    assert operations.largest < SEQLEN * SEQLEN
    assert torch.equal(mask.blocks.dense(), masking_utils.sdpa_mask(**geometry, allow_is_causal_skip=False))
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, 2, SEQLEN, 16, dtype=torch.float64, requires_grad=True) for _ in range(3))
    module = torch.nn.Module()
    out, _ = volta_fa.transformers.attention(module, query, key, value, mask)
    dense = volta_fa.transformers.attention(module, query, key, value, mask.as_tensor())[0]
    torch.testing.assert_close(out, dense, rtol=0, atol=1e-12)
    gradients = [torch.autograd.grad(result.square().sum(), (query, key, value)) for result in (out, dense)]
    torch.testing.assert_close(*gradients, rtol=0, atol=1e-10)


def test_chunks():
    """transformers' chunked mask becomes a block mask with the same visible keys. More than 80 % of it is absent."""
    mask_function = masking_utils.chunked_causal_mask_function(256, torch.zeros(1, dtype=torch.int64))
    geometry = dict(batch_size=1, q_length=SEQLEN, kv_length=SEQLEN, mask_function=mask_function)
    mask = volta_fa.transformers.mask(**geometry)
    assert mask.blocks.sparsity() > 80
    assert torch.equal(mask.as_tensor(), masking_utils.sdpa_mask(**geometry, allow_is_causal_skip=False))


def test_short_masks_stay_dense():
    mask_function = masking_utils.chunked_causal_mask_function(4, torch.zeros(1, dtype=torch.int64))
    assert type(volta_fa.transformers.mask(batch_size=1, q_length=20, kv_length=20, mask_function=mask_function)) is torch.Tensor


@pytest.mark.slow
def test_flex_attention_of_transformers():
    """transformers' own attn_implementation="flex_attention" runs volta_fa while enable_flex() is on."""
    tokens, padding = torch.randint(5, 100, (2, 200)), torch.ones(2, 200, dtype=torch.int64)
    padding[0, :20] = 0
    made = transformers.LlamaConfig(**TEXT), transformers.LlamaForCausalLM
    inputs = dict(input_ids=tokens, attention_mask=padding, use_cache=False)
    volta_fa.enable_flex("cpu")
    try:
        with torch.no_grad(), torch.profiler.profile() as profiler:
            found = make(*made, "flex_attention")(**inputs).logits
            expected = make(*made, "eager")(**inputs).logits
    finally:
        volta_fa.disable_flex()
    assert any(event.key == "volta_fa::fwd" for event in profiler.key_averages())
    torch.testing.assert_close(found[padding.bool()], expected[padding.bool()], rtol=0, atol=2e-5)
