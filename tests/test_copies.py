"""Copies by `copy.deepcopy`, `pickle` and `torch.save` of objects that users hold: masks, caches, prepared keys, random states.

Each object is used before it is copied, because use may attach derived data. A copy must give the same result and share no memory."""

import copy
import io
import pickle

import pytest
import torch
from torch.nn.attention.flex_attention import BlockMask as TorchBlockMask
from torch.nn.attention.flex_attention import create_block_mask

import volta_fa
from volta_fa.kv_cache.formats import quantize_kv

LENGTH = 200  # queries, and keys


def saved(thing):
    """Returns what torch.load reads of a file that torch.save wrote."""
    file = io.BytesIO()
    torch.save(thing, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


#: Functions that copy an object, by name.
WAYS = {"deepcopy": copy.deepcopy, "pickle": lambda thing: pickle.loads(pickle.dumps(thing)), "torch.save": saved}


def operands(dtype=torch.float32):
    """Returns q, k and v, (batch, seqlen, nheads, headdim)."""
    torch.manual_seed(0)
    return [torch.randn(1, LENGTH, 2, 16, dtype=dtype) for _ in range(3)]


class Documents:
    """A mask function with a tensor, which pickle takes: a lambda it does not."""

    def __init__(self):
        self.documents = torch.arange(LENGTH) // 70

    def __call__(self, b, h, q, kv):
        return self.documents[q] == self.documents[kv]


def relative_alibi(score, b, h, q, kv):
    return score + 0.25 * (h + 1) * (kv - q)


class Layer(torch.nn.Module):
    """Attention with a block mask. Its parameter is a part of the result."""

    def __init__(self, block_mask):
        super().__init__()
        self.block_mask = block_mask
        self.scale = torch.nn.Parameter(torch.ones(()))

    def forward(self, q, k, v):
        # a score function that asks whether the mask is causal
        return self.scale * volta_fa.flex_attention(*(t.transpose(1, 2) for t in (q, k, v)), relative_alibi, self.block_mask)


def torch_mask():
    return create_block_mask(Documents(), None, None, LENGTH, LENGTH, device="cpu")


def packed_mask():
    return volta_fa.BlockMask.from_mask_mod(Documents(), None, None, LENGTH, LENGTH, "cpu")


# Functions that use an object of THINGS and return the result: out of attention, but for with_rng_state.


def run(layer):
    return layer(*operands())


def with_mask(mask):
    return run(Layer(mask))


def with_prepared(prepared):
    return torch.ops.volta_fa.fwd_fast(*operands(dtype=torch.float16), prepared=prepared)[0]


def with_rng_state(state):
    """Returns dv, for which backward drops what the state says."""
    q, k, v = operands()
    out, lse, _ = torch.ops.volta_fa.fwd(q, k, v)
    _, _, dv, *_ = torch.ops.volta_fa.bwd(torch.ones_like(out), q, k, v, out, lse, dropout_p=0.5, rng_state=state)
    return dv


def with_codes(pair):
    """Returns attention over keys and values in int4: data, scale and zero_point of each."""
    rest = {f"{of}_{name}": getattr(kv, name) for of, kv in zip("kv", pair) for name in ("scale", "zero_point")}
    return torch.ops.volta_fa.fwd_kvcache(operands()[0][:, :3], pair[0].data, pair[1].data, **rest)[0]


#: Objects by name: a function that makes one, one that uses it and returns the result, and one that changes it in place.
THINGS = {
    "torch's BlockMask": (torch_mask, with_mask, lambda mask: mask.kv_num_blocks.data.zero_()),
    "what torch's BlockMask reads": (torch_mask, with_mask, lambda mask: mask.mask_mod.documents.data.copy_(torch.arange(LENGTH))),
    "BlockMask": (packed_mask, with_mask, lambda mask: mask.block_bits.zero_()),
    "a module with torch's BlockMask": (lambda: Layer(torch_mask()), run, lambda layer: layer.block_mask.kv_num_blocks.data.zero_()),
    "a module with BlockMask": (lambda: Layer(packed_mask()), run, lambda layer: layer.block_mask.block_bits.zero_()),
    "prepared keys and values": (lambda: volta_fa.prepare_fast(*operands(dtype=torch.float16)[1:]), with_prepared, torch.Tensor.zero_),
    "rng_state": (lambda: torch.ops.volta_fa.fwd(*operands(), dropout_p=0.5)[2], with_rng_state, lambda state: state.add_(1)),
    "quantized keys and values": (lambda: [quantize_kv(t, "int4") for t in operands()[1:]], with_codes, lambda pair: pair[1].scale.mul_(2)),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", THINGS)
def test_copies_after_use(name, way):
    make, use, change = THINGS[name]
    thing = make()
    before = use(thing)
    assert torch.equal(use(thing), before)
    copied = WAYS[way](thing)
    assert torch.equal(use(copied), before)
    change(copied)
    assert not torch.equal(use(copied), before) and torch.equal(use(thing), before)


@pytest.mark.parametrize("way", WAYS)
def test_copies_of_transformers_masks_and_caches(way):
    pytest.importorskip("transformers")
    from volta_fa.integrations.transformers.mask_rule import MaskRule
    from volta_fa.integrations.transformers.quantized_cache import QuantizedLayer

    rule = MaskRule((2, 1, LENGTH, LENGTH), "cpu", window_right=0, blocks=packed_mask())
    layer = QuantizedLayer("int4", rotate_keys=True)
    _, k, v = (t.transpose(1, 2) for t in operands())
    layer.update(k, v)
    # the keys that attention gets: `stored` is their part of the cache, `turn` the rotation of queries
    states = layer.update(k[:, :, :1], v[:, :, :1])[0]
    copied_rule, copied_layer, copied_states = WAYS[way]((rule, layer, states))
    assert torch.equal(copied_rule.as_tensor(), rule.as_tensor())
    copied_rule.blocks.block_bits.zero_()
    assert not torch.equal(copied_rule.as_tensor(), rule.as_tensor())
    for original, copied in ((layer.keys, copied_layer.keys), (states, copied_states)):
        stored, copied = original.stored, copied.stored
        assert all(torch.equal(a, b) and a.data_ptr() != b.data_ptr() for a, b in zip(stored, copied) if a is not None)
    assert copied_states.shape == states.shape and torch.equal(copied_states.turn, states.turn)


def test_torchs_mask_holds_nothing_of_ours():
    """volta_fa attaches no attribute to torch's BlockMask, so copies of it work without volta_fa."""
    mask = torch_mask()
    names = set(vars(mask))
    with_mask(mask)
    assert isinstance(mask, TorchBlockMask) and set(vars(mask)) == names
