"""Tests of transformers' Gemma 4 with attn_implementation="volta_fa" against "eager": small random models, with two local layers of
headdim 256 and a window, and a global layer of headdim 512.

Helpers are those of test_transformers.py: `padding(kind)` is a mask, `kept(mask)` an index of the tokens that are no padding, `tokens()`
are input_ids, and `profile` counts volta_fa's calls, those with a bias, and other attention ops (`theirs`). GENERATION has ways to
generate. `assert_right` accepts results close to eager's, or at most twice as far from fp64's as eager's. `check_in_fp16` allows twice the
error of eager in fp16; `on("sim", "cuda")` runs the kernels in the simulator and on a GPU."""

import copy

import pytest
import torch

from conftest import on

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
if not hasattr(transformers, "Gemma4TextConfig"):
    pytest.skip("this transformers has no Gemma 4", allow_module_level=True)

import test_transformers as plain
from test_transformers import BATCH, GENERATION, SEQLEN, TOLERANCE, WINDOW, kept, padding, profile, tokens
from test_transformers_generation import check_continuous_batching
from test_transformers_masks import losses as losses_of

pytestmark = plain.pytestmark
LOCAL_GLOBAL = ["sliding_attention", "sliding_attention", "full_attention"]


def config(**options):
    """Returns the configuration of a small model; options are its fields."""
    options.setdefault("layer_types", LOCAL_GLOBAL)
    return transformers.Gemma4TextConfig(
        **dict(plain.GROUPED, num_hidden_layers=len(options["layer_types"])), vocab_size_per_layer_input=100,
        hidden_size_per_layer_input=16, sliding_window=WINDOW, **options,
    )  # fmt: skip


CONFIGS = {
    "own keys": config,
    # the models of 26B and more: keys are the values, and global layers have fewer heads of them
    "k is v": lambda: config(attention_k_eq_v=True, num_global_key_value_heads=1),
    # E2B and E4B: the last layers read the keys of earlier ones
    "shared": lambda: config(layer_types=["sliding_attention", "full_attention"] * 2, num_kv_shared_layers=2),
}


def make(made, implementation):
    """Returns a model of a config. Its weights depend only on the config."""
    model = plain.make(made, transformers.Gemma4ForCausalLM, implementation)
    for name, parameter in model.named_parameters():
        if name.endswith("q_norm.weight"):
            # scores of order 1: random weights give 20, where training amplifies any rounding
            parameter.data.mul_(parameter.numel() ** -0.5)
    return model


@pytest.fixture(scope="module", params=CONFIGS)
def pair(request):
    """Returns a model with eager attention, and the same with volta_fa."""
    eager, ours = (make(CONFIGS[request.param](), implementation) for implementation in ("eager", "volta_fa"))
    headdims = [layer.self_attn.head_dim for layer in ours.model.layers]
    assert headdims == [256 if kind == "sliding_attention" else 512 for kind in ours.config.layer_types]
    return eager, ours


@pytest.mark.parametrize("kind", ["none", "left", "right", "holes"])
def test_logits(pair, kind):
    eager, ours = pair
    mask = padding(kind)
    keep = kept(mask)
    inputs = {"input_ids": tokens(), "attention_mask": mask, "use_cache": False}
    found, calls = profile(lambda: plain.run(ours, **inputs))
    torch.testing.assert_close(found[keep], plain.run(eager, **inputs)[keep], **TOLERANCE)
    assert not calls.theirs and calls.count == len(ours.model.layers)


@pytest.mark.slow
def test_training(pair):
    eager, ours = pair
    ids = torch.randint(3, 100, (2, BATCH, SEQLEN), generator=torch.Generator().manual_seed(3))
    batches = [{"input_ids": x, "labels": x} for x in ids]

    def losses(model):
        return losses_of(model, batches, steps=50, lr=0.01)

    expected, found = losses(eager), losses(ours)
    assert expected[-1] < 0.5 * expected[0]
    plain.assert_right(found, expected, lambda: losses(copy.deepcopy(eager).double()), rtol=1e-5, atol=0)


@pytest.mark.parametrize("how", GENERATION)
def test_generate(pair, how):
    eager, ours = pair
    for inputs in ({"input_ids": tokens(), "attention_mask": padding("left")}, {"input_ids": tokens(1)}):
        inputs |= GENERATION[how]
        found, calls = profile(lambda inputs=inputs: plain.generate(ours, **inputs))
        assert torch.equal(found, plain.generate(eager, **inputs))
        assert calls.count == 8 * len(ours.model.layers) and not calls.theirs  # 8 steps
        # for a prompt, layers with shared keys compute only the last row (transformers 5.20 all rows), and get one row of mask as a bias
        cuts_rows = hasattr(transformers.modeling_utils, "slice_logits_to_keep")
        assert calls.biased == (ours.config.num_kv_shared_layers if cuts_rows else 0)


@on("sim", "cuda")
def test_on_kernels(backend):
    plain.check_in_fp16(backend, *(make(config(), implementation) for implementation in ("eager", "volta_fa")), padding("left"))


@pytest.mark.parametrize("pages", [False, True], ids=["gathered", "pages"])
def test_continuous_batching(pages, monkeypatch):
    """Global layers only: the cache of transformers 5.23 has one headdim."""
    # per_layer_config={}: no layer has options of its own. By default transformers sets head_dim (512) for global layers.
    made = config(layer_types=["full_attention"] * 3, head_dim=512, per_layer_config={})
    pair = [make(made, implementation) for implementation in ("eager", "volta_fa")]
    check_continuous_batching(*pair, pages=pages, paged=pages, monkeypatch=monkeypatch, memory=2**30)  # bytes
