"""Mask functions that read state which changes between calls: each call of `volta_fa.flex_attention` sees the new state, as torch's does.

volta_fa packs a mask and keeps it (volta_fa.block_mask.kept). To reuse it, it records which values the function read, and compares them
at the next call. A case is a mask function of `kv < width`, and a function that sets the width in some kind of state: a closure, a
module, a tensor's memory, a random generator."""

import collections
import random
import time
import types
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy
import pytest
import torch
import torch.nn.attention.flex_attention as torch_flex

from volta_fa import flex_attention
from volta_fa.block_mask import kept
from volta_fa.block_mask.recording import Recording, recorded
from volta_fa.block_mask.source import source_of

LENGTH = 96
#: The widths that a test sets.
WIDTHS = (40, 17, 90, 40)
#: By width: a state of `random` in which the next randrange(1, LENGTH) is that width.
SEEDS = {random.Random(seed).randrange(1, LENGTH): random.Random(seed).getstate() for seed in range(3000)}
WIDTH = 0


def reading(read, change):
    """Returns a case: a mask function of `kv < read()`, and `change(width)`, which sets what `read` reads."""
    return lambda b, h, q, kv: kv < read(), change


def call(function, *args):
    """Returns a change: `function(*args, width)`."""
    return lambda n: function(*args, n)


def item(items, at=0):
    """Returns a case of a container's item."""
    return reading(lambda: items[at], call(items.__setitem__, at))


def attribute(owner, of=None):
    """Returns a case of an object's attribute, which `of` has if it is another object."""
    return reading(lambda: owner.width, call(setattr, owner if of is None else of, "width"))


def number(t, read):
    """Returns a case of a tensor whose elements all become the width: a mask function of read(t, h, kv)."""
    return lambda b, h, q, kv: read(t, h, kv), lambda n: t.data.fill_(n)


def copy_into(t, new):
    t.data.copy_(new)


def keys(shown, write=copy_into, read=lambda t, q, kv: t[kv]):
    """Returns a case of a tensor with a bool for each key, or of what holds one. `write` puts the visible keys into it."""
    return lambda b, h, q, kv: read(shown, q, kv), lambda n: write(shown, below(n))


def below(n):
    """Returns which keys are before n."""
    return torch.arange(LENGTH) < n


def hidden(*shape):
    """Returns bools of False, by default one for each key."""
    return torch.zeros(*(shape or (LENGTH,)), dtype=torch.bool)


def integers(*shape):
    """Returns int32 zeros; without sizes, one number."""
    return torch.zeros(shape, dtype=torch.int32)


class Plain:
    width = 0


class WithProperty:
    value = 0
    width = property(lambda self: self.value)


#: Functions that make a case: a mask function of `kv < width`, and a function that sets the width.
CASES = {
    # numbers of Python, which a recording has as constants
    "global_variable": lambda: (lambda b, h, q, kv: kv < WIDTH, call(globals().__setitem__, "WIDTH")),
    "python_module": lambda: attribute(types.ModuleType("settings")),
    "deque": lambda: item(collections.deque([0])),
    "clock": lambda: reading(lambda: int(time.time()), lambda n: setattr(time, "time", lambda: n + 0.5)),
    "random_number": lambda: reading(lambda: random.randrange(1, LENGTH), lambda n: random.setstate(SEEDS[n])),
    "iterator": lambda: reading(iter(WIDTHS).__next__, lambda n: None),
    "numpy_integer": lambda: item(numpy.zeros(3, dtype=numpy.int64), 1),
    "numpy_array": lambda: (lambda a: reading(lambda: int(a[1]), call(a.__setitem__, 1)))(numpy.zeros(3, dtype=numpy.int64)),
    "property_of_an_object": lambda: (lambda owner: reading(lambda: owner.width, call(setattr, owner, "value")))(WithProperty()),
    "class_attribute_read_through_an_object": lambda: (lambda owner: attribute(owner(), of=owner))(type("Fresh", (Plain,), {})),
    "shape_of_a_tensor": lambda: (lambda t: reading(lambda: t.shape[0], t.resize_))(torch.zeros(1)),
    "item_of_a_tensor": lambda: number(integers(1), lambda t, h, kv: kv < t.item()),
    # numbers in tensors
    "number_in_a_tensor": lambda: number(integers(), lambda t, h, kv: kv < t),
    "floating_point_number_in_a_tensor": lambda: number(torch.zeros(()), lambda t, h, kv: kv + 0.5 < t + 0.25),
    "maximum_of_a_tensor": lambda: number(integers(3), lambda t, h, kv: kv < t.max()),
    "element_for_each_head": lambda: number(integers(2), lambda t, h, kv: kv < t[h]),
    # memory of tensors, written in all ways
    "tensor": lambda: keys(hidden(), torch.Tensor.copy_),
    "data_of_a_tensor": lambda: keys(hidden()),
    "storage_of_a_tensor": lambda: keys(hidden(), lambda shown, new: shown.untyped_storage().copy_(new.untyped_storage())),
    "other_memory_for_a_tensor": lambda: keys(hidden(), lambda shown, new: setattr(shown, "data", new)),
    "view_of_a_tensor": lambda: keys(hidden(2, LENGTH, 2)[1, :, 0], lambda shown, new: shown._base.data[1, :, 0].copy_(new)),
    "tensor_of_inference_mode": lambda: keys(torch.inference_mode()(hidden)(), torch.inference_mode()(torch.Tensor.copy_)),
    "expanded_tensor": lambda: keys(hidden().expand(LENGTH, LENGTH), lambda t, new: t._base.data.copy_(new), lambda t, q, kv: t[q, kv]),
    # memory of tensors, read in other ways
    "row_of_a_tensor": lambda: keys(hidden(LENGTH, LENGTH), read=lambda t, q, kv: t[q][kv]),
    "reduction_of_a_row": lambda: keys(hidden(LENGTH, 3), lambda t, new: t.data.copy_(new[:, None]), lambda t, q, kv: t[kv].any()),
    "sum_of_a_tensor": lambda: keys(hidden(), read=lambda t, q, kv: kv < t.sum()),
    "subclass_of_tensor": lambda: keys(
        hidden().as_subclass(type("Fresh", (torch.Tensor,), {})), read=lambda t, q, kv: t[kv].as_subclass(torch.Tensor)
    ),
    "parameter_of_a_module": lambda: keys(
        torch.nn.Linear(1, LENGTH), lambda layer, new: layer.weight.data.copy_(new[:, None]), lambda layer, q, kv: layer.weight[kv, 0] > 0
    ),
}


def case(make):
    CASES[make.__name__] = make
    return make


@case
def closure():
    width = 0

    def change(n):
        nonlocal width
        width = n

    return lambda b, h, q, kv: kv < width, change


@case
def torchs_and_masks():
    width = [0]
    return torch_flex.and_masks(torch_flex.noop_mask, item(width)[0]), call(width.__setitem__, 0)


@case
def list_of_visible_keys():
    items = []

    def mask_mod(b, h, q, kv):
        shown = kv < 0
        for n in items:
            shown = shown | (kv == n)
        return shown

    return mask_mod, lambda n: items.__setitem__(slice(None), range(n))


@case
def value_of_another_thread():
    pool, items = ThreadPoolExecutor(1), [0]
    return reading(lambda: pool.submit(lambda: items[0]).result(), call(items.__setitem__, 0))


@case
def default_dtype():
    """torch's own state decides what a quotient is: 2049 / 2 is 1024 in fp16."""

    def change(n):
        torch.set_default_dtype(torch.float16 if n == 17 else torch.float32)

    return lambda b, h, q, kv: (kv * 0 + 2049) / 2 > 1024 + kv * 0, change


def numpy_keys(tensor_of, made_inside=False):
    """Returns a case of a numpy array. The mask function reads the tensor of its memory that `tensor_of` makes, before or at each call."""
    numbers = numpy.zeros(LENGTH, dtype=numpy.int8)
    shown = tensor_of(numbers)

    def change(n):
        numbers[:] = numpy.arange(LENGTH) < n

    return lambda b, h, q, kv: (tensor_of(numbers) if made_inside else shown)[kv] > 0, change


CASES["tensor_of_numpy_memory"] = lambda: numpy_keys(torch.from_numpy)
CASES["tensor_made_of_numpy_inside"] = lambda: numpy_keys(torch.from_numpy, made_inside=True)
CASES["tensor_of_dlpack"] = lambda: numpy_keys(torch.from_dlpack)


@pytest.fixture(autouse=True)
def restored(monkeypatch):
    """Forgets kept masks before a test, and undoes what cases change in torch and `time`."""
    # torch evaluates the mask function at each call, in place of a program that dynamo made of it
    monkeypatch.setattr(torch_flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True, raising=False)
    monkeypatch.setattr(time, "time", time.time)
    kept.forget()
    yield
    torch.set_default_dtype(torch.float32)


def operands():
    """Returns query, key and value, (batch, heads, LENGTH, headdim)."""
    torch.manual_seed(0)
    return [torch.randn(1, 2, LENGTH, 8, dtype=torch.float64) for _ in range(3)]


def partial_block(mask_mod):
    """Returns torch's mask of one partial block, for which the function is evaluated at each call."""
    one, zero = torch.ones(1, 1, 1, dtype=torch.int32), torch.zeros(1, 1, 1, 1, dtype=torch.int32)
    return torch_flex.BlockMask.from_kv_blocks(one, zero, BLOCK_SIZE=128, mask_mod=mask_mod, seq_lengths=(LENGTH, LENGTH))


def of_width(inputs, n):
    """Returns attention over the first n keys."""
    query, key, value = inputs
    return torch.nn.functional.scaled_dot_product_attention(query, key[..., :n, :], value[..., :n, :])


@pytest.mark.parametrize("name", CASES)
def test_every_call_sees_the_state(name):
    inputs = operands()
    (ours, change_ours), (theirs, change_theirs) = CASES[name](), CASES[name]()
    ours, theirs = partial_block(ours), partial_block(theirs)
    results = []
    for n in WIDTHS:
        change_theirs(n)
        expected = torch_flex.flex_attention(*inputs, block_mask=theirs)
        change_ours(n)
        results.append(flex_attention(*inputs, block_mask=ours))
        torch.testing.assert_close(results[-1], expected, rtol=1e-9, atol=1e-9)
        if name != "default_dtype":
            torch.testing.assert_close(expected, of_width(inputs, n), rtol=1e-9, atol=1e-9)
    assert not torch.equal(results[0], results[1])


@pytest.mark.parametrize("name", ["data_of_a_tensor", "tensor_of_numpy_memory", "numpy_array", "python_module", "deque", "closure"])
def test_every_call_sees_the_state_of_a_score_function(name):
    inputs = operands()
    mask_mod, change = CASES[name]()

    def score_mod(score, b, h, q, kv):
        return torch.where(mask_mod(b, h, q, kv), score, -float("inf"))

    for n in WIDTHS:
        change(n)
        torch.testing.assert_close(flex_attention(*inputs, score_mod), of_width(inputs, n), rtol=1e-9, atol=1e-9)


COMPILED = """
    data_of_a_tensor tensor_of_numpy_memory python_module class_attribute_read_through_an_object deque view_of_a_tensor
    parameter_of_a_module closure storage_of_a_tensor
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", COMPILED.split())
def test_every_call_of_a_compiled_program_sees_the_state(name):
    torch._dynamo.reset()
    inputs = operands()
    mask_mod, change = CASES[name]()
    block_mask = partial_block(mask_mod)
    program = torch.compile(lambda *inputs: flex_attention(*inputs, block_mask=block_mask), backend="aot_eager", fullgraph=True)
    for n in WIDTHS:
        change(n)
        torch.testing.assert_close(program(*inputs), of_width(inputs, n), rtol=1e-9, atol=1e-9)
    assert len(kept._entries) == len(set(WIDTHS))  # not packed again for 40


#: Cases whose masks are kept: the recording has the values that the mask function read, and these show whether the mask still holds.
KEPT = """
    closure global_variable property_of_an_object deque clock numpy_array tensor data_of_a_tensor number_in_a_tensor view_of_a_tensor
    tensor_of_numpy_memory shape_of_a_tensor parameter_of_a_module torchs_and_masks sum_of_a_tensor tensor_of_inference_mode
    row_of_a_tensor numpy_integer
"""


@pytest.mark.parametrize("name", KEPT.split())
def test_masks_are_kept_while_values_are(name):
    mask_mod, change = CASES[name]()
    masks = []
    for n in (40, 40, 17, 40):
        change(n)
        masks.append(kept.block_mask_of(source_of(partial_block(mask_mod), batch=1, heads=2)))
    assert masks[0] is masks[1] is masks[3] and masks[2] is not masks[0]


#: Functions with values that a recording cannot compare, so their masks are packed at each call.
OTHERS = {
    "random numbers of torch": lambda b, h, q, kv: kv < torch.rand(()) * LENGTH,
    "random numbers like an argument": lambda b, h, q, kv: kv < torch.rand_like(kv.float()) * LENGTH,
    "a write": lambda b, h, q, kv: kv < torch.zeros(()).add_(40),
    "a write into an argument": lambda b, h, q, kv: kv < 40 + q.mul_(0),
    "a branch": lambda b, h, q, kv: kv < 40 if q >= 0 else kv < 50,
    "a hidden branch": lambda b, h, q, kv: kv < (40 if hides_exceptions(lambda: bool(q > 0)) else 50),
    "a number": lambda b, h, q, kv: kv < 40 + 0 * hides_exceptions(q.item),
    "an array by an argument": lambda b, h, q, kv: kv < 40 + hides_exceptions(lambda: numpy.arange(LENGTH)[q]),
    "a slice by an argument": lambda b, h, q, kv: kv < hides_exceptions(lambda: torch.arange(LENGTH)[q:].sum()),
    "a thread of its own": lambda b, h, q, kv: ThreadPoolExecutor(1).submit(lambda: kv < 40).result(),
    "the type of an argument": lambda b, h, q, kv: kv < 40 + 0 * len(str(q)),
}


def hides_exceptions(function):
    try:
        return function()
    except Exception:
        return 0


@pytest.mark.parametrize("name", OTHERS)
def test_functions_whose_values_do_not_show_are_not_recorded(name):
    assert not isinstance(recorded(OTHERS[name], torch.device("cpu")), Recording)


def test_constants_of_other_types_are_other_masks():
    """Numbers that are equal in Python give other masks if their types or signs of zero differ: q * 1.0 is floating-point, q * 1 is not."""
    values = [1, True, 1.0, 0.0, -0.0]
    recordings = [recorded(lambda b, h, q, kv, n=n: q * n <= kv, torch.device("cpu")) for n in values]
    assert len({r.key for r in recordings}) == len(values)


def test_few_masks_are_kept(monkeypatch):
    width = [0]
    block_mask = partial_block(lambda b, h, q, kv: kv < width[0])
    for width[0] in range(1, 20):
        last = kept.block_mask_of(source_of(block_mask, 1, 1))
    assert len(kept._entries) == kept.MAX_MASKS
    monkeypatch.setattr(kept, "MAX_BYTES", 2 * last.nbytes)
    kept.block_mask_of(source_of(block_mask, 1, 1))
    assert len(kept._entries) == 2


def test_a_mask_of_inference_mode_trains_later():
    inputs = [t.requires_grad_() for t in operands()]
    block_mask = partial_block(lambda b, h, q, kv: q >= kv)
    with torch.inference_mode():
        flex_attention(*inputs, block_mask=block_mask)
    flex_attention(*inputs, block_mask=block_mask).sum().backward()
    assert all(t.grad is not None for t in inputs)


def test_cuda_graphs_need_a_packed_mask(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    source = source_of(partial_block(lambda b, h, q, kv: q >= kv), 1, 1)
    with pytest.raises(RuntimeError, match="block_mask: got torch's BlockMask, expected volta_fa.BlockMask in a CUDA graph"):
        kept.block_mask_of(replace(source, device=torch.device("cuda")))
