"""Mask functions that read state which changes between calls: each call of `volta_fa.flex_attention` sees it, as torch's does."""

import array
import builtins
import collections
import contextvars
import ctypes
import functools
import itertools
import mmap
import os
import random
import sys
import threading
import time
import types
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy
import pytest
import torch

if "VOLTA_FA_TEST_LIBRARY" in os.environ:
    pytest.skip("the Python package loads its own library", allow_module_level=True)

import torch.nn.attention.flex_attention as torch_flex

import volta_fa
from volta_fa import flex_attention
from volta_fa.block_mask import kept
from volta_fa.block_mask.recording import Recording, recorded
from volta_fa.block_mask.torch_mask import source_of

LENGTH = 96
#: The states: a query sees as many keys.
WIDTHS = (40, 17, 90, 40)
CASES = {}


def case(make):
    """Registers a case: a function that returns a mask function of `kv < width`, and what changes the width."""
    CASES[make.__name__.removeprefix("_")] = make
    return make


def reading(read):
    """Returns the mask function of a width that a function of no arguments reads."""
    return lambda b, h, q, kv: kv < read()


def of_object(owner):
    return lambda b, h, q, kv: kv < owner.width, lambda n: setattr(owner, "width", n)


def of_items(items, at=0):
    return lambda b, h, q, kv: kv < items[at], lambda n: items.__setitem__(at, n)


# ---- variables of functions


@case
def closure():
    width = 0

    def change(n):
        nonlocal width
        width = n

    return lambda b, h, q, kv: kv < width, change


@case
def closure_of_a_nested_function():
    width = 0

    def inner(kv):
        def innermost():
            return kv < width

        return innermost()

    def change(n):
        nonlocal width
        width = n

    return lambda b, h, q, kv: inner(kv), change


@case
def contents_of_a_cell():
    def make(width):
        return lambda b, h, q, kv: kv < width

    mask_mod = make(0)
    return mask_mod, lambda n: setattr(mask_mod.__closure__[0], "cell_contents", n)


WIDTH = 0


@case
def global_variable():
    return lambda b, h, q, kv: kv < WIDTH, lambda n: globals().__setitem__("WIDTH", n)


@case
def globals_of_another_module():
    scope = {"width": 0}
    exec("def mask_mod(b, h, q, kv): return kv < width", scope)
    return scope["mask_mod"], lambda n: scope.__setitem__("width", n)


@case
def builtin_name():
    mask_mod = eval("lambda b, h, q, kv: kv < width_among_builtins", {"__builtins__": builtins})
    return mask_mod, lambda n: setattr(builtins, "width_among_builtins", n)


@case
def default():
    mask_mod = lambda b, h, q, kv, width=0: kv < width  # noqa: E731
    return mask_mod, lambda n: setattr(mask_mod, "__defaults__", (n,))


@case
def list_as_default():
    items = [0]
    return lambda b, h, q, kv, items=items: kv < items[0], lambda n: items.__setitem__(0, n)


@case
def default_of_a_keyword():
    def mask_mod(b, h, q, kv, *, width=0):
        return kv < width

    return mask_mod, lambda n: mask_mod.__kwdefaults__.__setitem__("width", n)


@case
def code():
    def mask_mod(b, h, q, kv):
        return kv < 0

    return mask_mod, lambda n: setattr(mask_mod, "__code__", eval(f"lambda b, h, q, kv: kv < {n}").__code__)


@case
def attribute_of_a_function():
    def mask_mod(b, h, q, kv):
        return kv < mask_mod.width

    return mask_mod, lambda n: setattr(mask_mod, "width", n)


@case
def partial():
    items = [0]
    return functools.partial(lambda items, b, h, q, kv: kv < items[0], items), lambda n: items.__setitem__(0, n)


@case
def keyword_of_a_partial():
    mask_mod = functools.partial(lambda b, h, q, kv, width: kv < width, width=0)
    return mask_mod, lambda n: mask_mod.keywords.__setitem__("width", n)


@case
def decorated():
    width = [0]

    def decorate(function):
        return functools.wraps(function)(lambda *args: function(*args, width[0]))

    return decorate(lambda b, h, q, kv, n: kv < n), lambda n: width.__setitem__(0, n)


@case
def torchs_and_masks():
    width = [0]
    return torch_flex.and_masks(torch_flex.noop_mask, reading(lambda: width[0])), lambda n: width.__setitem__(0, n)


@case
def cache_of_a_function():
    values = [0]
    read = functools.lru_cache(lambda: values[0])

    def change(n):
        values[0] = n
        read.cache_clear()

    return reading(read), change


@case
def function_in_a_list():
    functions = [None]
    return reading(lambda: functions[0]()), lambda n: functions.__setitem__(0, lambda: n)


@case
def generator():
    def count():
        while True:
            yield state[0]

    state, numbers = [0], count()
    return reading(lambda: next(numbers)), lambda n: state.__setitem__(0, n)


@case
def iterator():
    numbers = iter(WIDTHS)
    return reading(lambda: next(numbers)), lambda n: None


@case
def generator_based_context():
    numbers = itertools.chain(WIDTHS)
    return reading(numbers.__next__), lambda n: None


# ---- objects


class Plain:
    width = 0


@case
def attribute():
    return of_object(Plain())


@case
def attribute_of_an_attribute():
    inner, outer = Plain(), Plain()
    outer.inner = inner
    return lambda b, h, q, kv: kv < outer.inner.width, lambda n: setattr(inner, "width", n)


@case
def class_attribute_read_through_an_object():
    owner = type("Fresh", (Plain,), {})
    instance = owner()
    return lambda b, h, q, kv: kv < instance.width, lambda n: setattr(owner, "width", n)


@case
def class_attribute_of_a_base():
    base = type("Base", (Plain,), {})
    instance = type("Derived", (base,), {})()
    return lambda b, h, q, kv: kv < instance.width, lambda n: setattr(base, "width", n)


@case
def class_attribute():
    owner = type("Fresh", (Plain,), {})
    return lambda b, h, q, kv: kv < owner.width, lambda n: setattr(owner, "width", n)


@case
def attribute_of_a_metaclass():
    meta = type("Meta", (type,), {"width": 0})
    owner = meta("Fresh", (), {})
    return lambda b, h, q, kv: kv < owner.width, lambda n: setattr(meta, "width", n)


class Methods:
    shared = [0]

    def __init__(self):
        self.width = 0

    def mask_mod(self, b, h, q, kv):
        return kv < self.width

    def __call__(self, b, h, q, kv):
        return self.read(kv)

    def read(self, kv):
        return kv < self.width

    @property
    def through_a_property(self):
        return self.width

    @classmethod
    def of_class(cls, b, h, q, kv):
        return kv < cls.shared[0]

    @staticmethod
    def of_none(b, h, q, kv):
        return kv < Methods.shared[0]

    def __getattr__(self, name):
        if name != "made_up":
            raise AttributeError(name)
        return self.width


@case
def method():
    owner = Methods()
    return owner.mask_mod, lambda n: setattr(owner, "width", n)


@case
def callable_object():
    owner = Methods()
    return owner, lambda n: setattr(owner, "width", n)


@case
def method_replaced_in_an_object():
    owner = Methods()
    return owner, lambda n: setattr(owner, "read", lambda kv: kv < n)


@case
def method_replaced_in_a_class():
    owner = type("Fresh", (Methods,), {})
    return owner(), lambda n: setattr(owner, "read", lambda self, kv: kv < n)


@case
def property_of_an_object():
    owner = Methods()
    return reading(lambda: owner.through_a_property), lambda n: setattr(owner, "width", n)


@case
def class_method():
    return Methods().of_class, lambda n: Methods.shared.__setitem__(0, n)


@case
def static_method():
    return Methods.of_none, lambda n: Methods.shared.__setitem__(0, n)


@case
def getattr_of_an_object():
    owner = Methods()
    return reading(lambda: owner.made_up), lambda n: setattr(owner, "width", n)


@case
def descriptor():
    class Descriptor:
        value = 0

        def __get__(self, instance, owner):
            return self.value

    made = Descriptor()
    instance = type("Fresh", (), {"width": made})()
    return reading(lambda: instance.width), lambda n: setattr(made, "value", n)


@case
def slots():
    return of_object(type("Slotted", (), {"__slots__": ("width",)})())


@case
def namespace():
    return of_object(types.SimpleNamespace(width=0))


@case
def data_class():
    @dataclass
    class Data:
        width: int = 0

        def __call__(self, b, h, q, kv):
            return kv < self.width

    made = Data()
    return made, lambda n: setattr(made, "width", n)


@case
def replaced_named_tuple():
    kind = collections.namedtuple("Options", "width")
    holder = Plain()
    holder.options = kind(0)
    return reading(lambda: holder.options.width), lambda n: setattr(holder, "options", kind(n))


@case
def python_module():
    return of_object(types.ModuleType("settings"))


@case
def imported_module():
    sys.modules["volta_fa_test_settings"] = module = types.ModuleType("volta_fa_test_settings")

    def mask_mod(b, h, q, kv):
        import volta_fa_test_settings

        return kv < volta_fa_test_settings.width

    return mask_mod, lambda n: setattr(module, "width", n)


@case
def weak_reference():
    owner = Plain()
    kept_by_change, reference = owner, weakref.ref(owner)
    return reading(lambda: reference().width), lambda n: setattr(kept_by_change, "width", n)


# ---- containers


@case
def list_():
    return of_items([0])


@case
def list_in_a_tuple():
    items = [0]
    held = ((items,),)
    return reading(lambda: held[0][0][0]), lambda n: items.__setitem__(0, n)


@case
def length_of_a_list():
    items = []
    return reading(lambda: len(items)), lambda n: items.__setitem__(slice(None), [0] * n)


@case
def dict_():
    return of_items({}, "width")


@case
def default_dict():
    return of_items(collections.defaultdict(int), "width")


@case
def chain_map():
    items = {"width": 0}
    chained = collections.ChainMap({}, items)
    return reading(lambda: chained["width"]), lambda n: items.__setitem__("width", n)


@case
def mapping_proxy():
    items = {"width": 0}
    proxy = types.MappingProxyType(items)
    return reading(lambda: proxy["width"]), lambda n: items.__setitem__("width", n)


@case
def set_():
    items = set()

    def change(n):
        items.clear()
        items.add(n)

    return reading(lambda: max(items)), change


@case
def deque():
    return of_items(collections.deque([0]))


@case
def array_of_python():
    return of_items(array.array("i", [0]))


@case
def byte_array():
    return of_items(bytearray(1))


@case
def memory_view():
    memory = bytearray(1)
    view = memoryview(memory)
    return reading(lambda: view[0]), lambda n: memory.__setitem__(0, n)


@case
def memory_map():
    return of_items(mmap.mmap(-1, 16))


@case
def list_of_visible_keys():
    items = []
    return (lambda b, h, q, kv: functools.reduce(lambda a, n: a | (kv == n), items, kv < 0)), lambda n: items.__setitem__(
        slice(None), range(n)
    )


# ---- the process


@case
def environment_variable():
    return reading(lambda: int(os.environ["VOLTA_FA_TEST_WIDTH"])), lambda n: os.environ.__setitem__("VOLTA_FA_TEST_WIDTH", str(n))


@case
def context_variable():
    variable = contextvars.ContextVar("width")
    return reading(variable.get), variable.set


@case
def thread_local():
    return of_object(threading.local())


@case
def value_of_another_thread():
    pool, items = ThreadPoolExecutor(1), [0]
    return reading(lambda: pool.submit(lambda: items[0]).result()), lambda n: items.__setitem__(0, n)


@case
def clock():
    return reading(lambda: int(time.time())), lambda n: setattr(time, "time", lambda: n + 0.5)


@case
def random_number():
    return reading(lambda: random.randrange(1, LENGTH)), lambda n: random.setstate(SEEDS[n])


SEEDS = {}
for seed in range(3000):
    if (drawn := random.Random(seed).randrange(1, LENGTH)) in WIDTHS:
        SEEDS[drawn] = random.Random(seed).getstate()


@case
def file():
    path = os.environ["VOLTA_FA_TEST_FILE"]

    def change(n):
        with open(path, "w") as opened:
            opened.write(str(n))

    def read():
        with open(path) as opened:
            return int(opened.read())

    return reading(read), change


@case
def ctypes_number():
    number = ctypes.c_int(0)
    return reading(lambda: number.value), lambda n: setattr(number, "value", n)


@case
def ctypes_address():
    number = ctypes.c_int(0)
    address = ctypes.addressof(number)
    return reading(lambda n=number: ctypes.c_int.from_address(address).value), lambda n: setattr(number, "value", n)


# ---- numpy


@case
def numpy_array():
    numbers = numpy.zeros(3, dtype=numpy.int64)
    return reading(lambda: int(numbers[1])), lambda n: numbers.__setitem__(1, n)


@case
def numpy_scalar():
    numbers = numpy.zeros(3, dtype=numpy.float64)
    return reading(lambda: numbers[1]), lambda n: numbers.__setitem__(1, n)


@case
def numpy_shape():
    holder = Plain()
    return reading(lambda: holder.numbers.shape[0]), lambda n: setattr(holder, "numbers", numpy.zeros(n))


@case
def numpy_generator():
    numbers = Plain()
    return reading(lambda: int(numbers.made.integers(n, n + 1)) if (n := numbers.width) else 0), lambda n: (
        setattr(numbers, "made", numpy.random.default_rng(n)),
        setattr(numbers, "width", n),
    )


@case
def tensor_of_numpy_memory():
    numbers = numpy.zeros(LENGTH, dtype=bool)
    shown = torch.from_numpy(numbers)
    return lambda b, h, q, kv: shown[kv], lambda n: numbers.__setitem__(slice(None), numpy.arange(LENGTH) < n)


@case
def tensor_made_of_numpy_inside():
    numbers = numpy.zeros(LENGTH, dtype=bool)
    return lambda b, h, q, kv: torch.from_numpy(numbers)[kv], lambda n: numbers.__setitem__(slice(None), numpy.arange(LENGTH) < n)


@case
def number_of_numpy_memory():
    numbers = numpy.zeros((), dtype=numpy.int32)
    width = torch.from_numpy(numbers)
    return lambda b, h, q, kv: kv < width, lambda n: numbers.__setitem__((), n)


# ---- tensors


def of_tensor(shown, write):
    return lambda b, h, q, kv: shown[kv], lambda n: write(torch.arange(LENGTH) < n)


def hidden():
    return torch.zeros(LENGTH, dtype=torch.bool)


@case
def tensor():
    shown = hidden()
    return of_tensor(shown, shown.copy_)


@case
def data_of_a_tensor():
    shown = hidden()
    return of_tensor(shown, lambda new: shown.data.copy_(new))


@case
def number_in_a_tensor():
    width = torch.zeros((), dtype=torch.int64)
    return lambda b, h, q, kv: kv < width, lambda n: width.data.fill_(n)


@case
def floating_point_number_in_a_tensor():
    width = torch.zeros(())
    return lambda b, h, q, kv: kv + 0.5 < width + 0.25, lambda n: width.data.fill_(n)


@case
def item_of_a_tensor():
    width = torch.zeros(1, dtype=torch.int64)
    return reading(lambda: width.item()), lambda n: width.data.fill_(n)


@case
def sum_of_a_tensor():
    shown = hidden()
    return lambda b, h, q, kv: kv < shown.sum(), lambda n: shown.data.copy_(torch.arange(LENGTH) < n)


@case
def element_of_a_tensor():
    widths = torch.zeros(3, dtype=torch.int32)
    return lambda b, h, q, kv: kv < widths[1], lambda n: widths.data.fill_(n)


@case
def element_for_each_head():
    widths = torch.zeros(2, dtype=torch.int32)
    return lambda b, h, q, kv: kv < widths[h], lambda n: widths.data.fill_(n)


@case
def row_of_a_tensor():
    shown = torch.zeros(LENGTH, LENGTH, dtype=torch.bool)
    return lambda b, h, q, kv: shown[q][kv], lambda n: shown.data.copy_(torch.arange(LENGTH) < n)


@case
def reduction_of_a_row():
    shown = torch.zeros(LENGTH, 3, dtype=torch.bool)
    return lambda b, h, q, kv: shown[kv].any(), lambda n: shown.data.copy_((torch.arange(LENGTH) < n)[:, None])


@case
def view_of_a_tensor():
    base = torch.zeros(2, LENGTH, 2, dtype=torch.bool)
    return of_tensor(base[1, :, 0], lambda new: base.data[1, :, 0].copy_(new))


@case
def expanded_tensor():
    base = hidden()
    shown = base.expand(LENGTH, LENGTH)
    return lambda b, h, q, kv: shown[q, kv], lambda n: base.data.copy_(torch.arange(LENGTH) < n)


@case
def base_of_a_view():
    base = hidden()
    view = base.view(2, -1)
    return of_tensor(base, lambda new: view.detach().copy_(new.view(2, -1)))


@case
def storage_of_a_tensor():
    shown = hidden()
    return of_tensor(shown, lambda new: shown.untyped_storage().copy_(new.untyped_storage()))


@case
def other_memory_for_a_tensor():
    shown = hidden()
    return of_tensor(shown, lambda new: setattr(shown, "data", new))


@case
def shape_of_a_tensor():
    shown = torch.zeros(1)
    return reading(lambda: shown.shape[0]), lambda n: shown.resize_(n)


@case
def attribute_of_a_tensor():
    shown = torch.zeros(1)
    return reading(lambda: shown.width), lambda n: setattr(shown, "width", n)


@case
def address_of_a_tensor():
    shown = hidden()
    return of_tensor(shown, lambda new: ctypes.memmove(shown.data_ptr(), new.data_ptr(), LENGTH))


@case
def tensor_of_a_buffer():
    memory = bytearray(LENGTH)
    shown = torch.frombuffer(memory, dtype=torch.bool)
    return lambda b, h, q, kv: shown[kv], lambda n: memory.__setitem__(slice(None), bytes([1] * n + [0] * (LENGTH - n)))


@case
def tensor_of_dlpack():
    numbers = numpy.zeros(LENGTH, dtype=numpy.int8)
    shown = torch.from_dlpack(numbers)
    return lambda b, h, q, kv: shown[kv] > 0, lambda n: numbers.__setitem__(slice(None), numpy.arange(LENGTH) < n)


@case
def tensor_of_inference_mode():
    with torch.inference_mode():
        shown = hidden()

    def write(new):
        with torch.inference_mode():
            shown.copy_(new)

    return of_tensor(shown, write)


@case
def tensor_made_of_a_list_inside():
    items = [False] * LENGTH
    return lambda b, h, q, kv: torch.tensor(items)[kv], lambda n: items.__setitem__(slice(None), [True] * n + [False] * (LENGTH - n))


@case
def tensor_in_a_list():
    held = [hidden()]
    return lambda b, h, q, kv: held[0][kv], lambda n: held.__setitem__(0, torch.arange(LENGTH) < n)


@case
def parameter():
    width = torch.nn.Parameter(torch.zeros(()))
    return lambda b, h, q, kv: kv < width, lambda n: width.data.fill_(n)


@case
def parameter_of_a_module():
    module = torch.nn.Linear(1, LENGTH, bias=False)
    return lambda b, h, q, kv: module.weight[kv, 0] > 0, lambda n: module.weight.data.copy_((torch.arange(LENGTH) < n)[:, None])


@case
def buffer_of_a_module():
    module = torch.nn.Module()
    module.register_buffer("shown", hidden())
    return lambda b, h, q, kv: module.shown[kv], lambda n: module.load_state_dict({"shown": torch.arange(LENGTH) < n})


@case
def number_of_a_module():
    return of_object(torch.nn.Module())


@case
def method_of_a_module():
    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.width = 0

        def mask_mod(self, b, h, q, kv):
            return kv < self.width

    layer = Layer()
    return layer.mask_mod, lambda n: setattr(layer, "width", n)


@case
def gradient_of_a_parameter():
    width = torch.nn.Parameter(torch.zeros(()))
    return lambda b, h, q, kv: kv < width.grad, lambda n: setattr(width, "grad", torch.tensor(float(n)))


@case
def subclass_of_tensor():
    class Own(torch.Tensor):
        pass

    shown = hidden().as_subclass(Own)
    return lambda b, h, q, kv: shown[kv].as_subclass(torch.Tensor), lambda n: shown.data.copy_(torch.arange(LENGTH) < n)


@case
def version_of_a_tensor():
    counted = torch.zeros(1)

    def change(n):
        while counted._version % LENGTH != n:
            counted.zero_()

    return reading(lambda: counted._version % LENGTH), change


@case
def default_dtype():
    """A type of torch's own state decides what a quotient is: 2049 / 2 is 1024 in fp16."""

    def change(n):
        torch.set_default_dtype(torch.float16 if n == 17 else torch.float32)

    return lambda b, h, q, kv: (kv * 0 + 2049) / 2 > 1024 + kv * 0, change


@pytest.fixture(autouse=True)
def restored(monkeypatch, tmp_path):
    # torch evaluates the mask function at each call, in place of a program that dynamo made of it
    monkeypatch.setattr(torch_flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True, raising=False)
    monkeypatch.setattr(time, "time", time.time)
    monkeypatch.setattr(builtins, "width_among_builtins", 0, raising=False)
    monkeypatch.setitem(sys.modules, "volta_fa_test_settings", None)
    monkeypatch.setenv("VOLTA_FA_TEST_WIDTH", "0")
    monkeypatch.setenv("VOLTA_FA_TEST_FILE", str(tmp_path / "width"))
    kept.forget()
    yield
    torch.set_default_dtype(torch.float32)


def operands():
    torch.manual_seed(0)
    return [torch.randn(1, 2, LENGTH, 8, dtype=torch.float64) for _ in range(3)]


def partial_block(mask_mod):
    """Returns torch's mask of one block that exists in part, which evaluates the function at each call."""
    one, zero = torch.ones(1, 1, 1, dtype=torch.int32), torch.zeros(1, 1, 1, 1, dtype=torch.int32)
    return torch_flex.BlockMask.from_kv_blocks(one, zero, BLOCK_SIZE=128, mask_mod=mask_mod, seq_lengths=(LENGTH, LENGTH))


def of_width(inputs, n):
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


COMPILED = """data_of_a_tensor tensor_of_numpy_memory python_module class_attribute_read_through_an_object deque view_of_a_tensor
    parameter_of_a_module closure storage_of_a_tensor""".split()


@pytest.mark.parametrize("name", COMPILED)
def test_every_call_of_a_compiled_program_sees_the_state(name):
    torch._dynamo.reset()
    inputs = operands()
    mask_mod, change = CASES[name]()
    block_mask = partial_block(mask_mod)
    program = torch.compile(lambda *inputs: flex_attention(*inputs, block_mask=block_mask), backend="aot_eager", fullgraph=True)
    for n in WIDTHS:
        change(n)
        torch.testing.assert_close(program(*inputs), of_width(inputs, n), rtol=1e-9, atol=1e-9)


#: Cases whose masks are kept, because their values show whether they hold.
KEPT = """closure global_variable property_of_an_object deque clock numpy_array tensor data_of_a_tensor number_in_a_tensor view_of_a_tensor
    tensor_of_numpy_memory shape_of_a_tensor parameter_of_a_module torchs_and_masks sum_of_a_tensor tensor_of_inference_mode""".split()


@pytest.mark.parametrize("name", KEPT)
def test_masks_are_kept_while_values_are(name):
    mask_mod, change = CASES[name]()
    masks = []
    for n in (40, 40, 17, 40):
        change(n)
        masks.append(kept.block_mask_of(source_of(partial_block(mask_mod), 1, 2)))
    assert masks[0] is masks[1] is masks[3] and masks[2] is not masks[0]


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
def test_functions_whose_values_do_not_show(name):
    assert not isinstance(recorded(OTHERS[name], torch.device("cpu")), Recording)


def test_constants_of_other_types_are_other_masks():
    """5 // 2.0 and 5 // 2 have other types, and True and 1 other operators."""
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
