"""Mask functions that read state: `CASES`, by name. Each makes a mask function of `kv < width`, and what sets the width."""

import array
import builtins
import collections
import contextvars
import ctypes
import functools
import mmap
import os
import random
import sys
import threading
import time
import types
import weakref
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.nn.attention.flex_attention as torch_flex

LENGTH = 96
#: The widths that a test sets.
WIDTHS = (40, 17, 90, 40)
CASES = {}


def registers(cases):
    """Returns a decorator that adds a case by the name of its function."""

    def case(make):
        cases[make.__name__] = make
        return make

    return case


case = registers(CASES)


def reading(read, change):
    """Returns a case of a width that a function of no arguments reads."""
    return lambda b, h, q, kv: kv < read(), change


def attribute(owner, of=None):
    """Returns a case of an object's attribute, which `of` has if it is another object."""
    return lambda b, h, q, kv: kv < owner.width, lambda n: setattr(owner if of is None else of, "width", n)


def item(items, at=0):
    """Returns a case of an element of a container."""
    return lambda b, h, q, kv: kv < items[at], lambda n: items.__setitem__(at, n)


def below(n):
    """Returns which keys are below n, for changing_tensors.py."""
    return torch.arange(LENGTH) < n


def hidden(*shape):
    """Returns bools that hide every key, for changing_tensors.py."""
    return torch.zeros(*(shape or (LENGTH,)), dtype=torch.bool)


def call(function, *args):
    """Returns a function that calls with one more argument."""
    return lambda n: function(*args, n)


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
    width = [0]

    def inner(kv):
        def innermost():
            return kv < width[0]

        return innermost()

    return lambda b, h, q, kv: inner(kv), call(width.__setitem__, 0)


@case
def contents_of_a_cell():
    mask_mod = (lambda width: lambda b, h, q, kv: kv < width)(0)
    return mask_mod, call(setattr, mask_mod.__closure__[0], "cell_contents")


@case
def default_of_a_keyword():
    def mask_mod(b, h, q, kv, *, width=0):
        return kv < width

    return mask_mod, call(mask_mod.__kwdefaults__.__setitem__, "width")


@case
def attribute_of_a_function():
    def mask_mod(b, h, q, kv):
        return kv < mask_mod.width

    return mask_mod, call(setattr, mask_mod, "width")


@case
def code():
    def mask_mod(b, h, q, kv):
        return kv < 0

    return mask_mod, lambda n: setattr(mask_mod, "__code__", eval(f"lambda b, h, q, kv: kv < {n}").__code__)


WIDTH = 0


@case
def global_variable():
    return lambda b, h, q, kv: kv < WIDTH, call(globals().__setitem__, "WIDTH")


@case
def globals_of_another_module():
    scope = {"width": 0}
    return eval("lambda b, h, q, kv: kv < width", scope), call(scope.__setitem__, "width")


@case
def builtin_name():
    return eval("lambda b, h, q, kv: kv < width_among_builtins", {}), call(setattr, builtins, "width_among_builtins")


@case
def default():
    mask_mod = lambda b, h, q, kv, width=0: kv < width  # noqa: E731
    return mask_mod, lambda n: setattr(mask_mod, "__defaults__", (n,))


@case
def list_as_default():
    items = [0]
    return lambda b, h, q, kv, items=items: kv < items[0], call(items.__setitem__, 0)


@case
def partial():
    items = [0]
    return functools.partial(lambda items, b, h, q, kv: kv < items[0], items), call(items.__setitem__, 0)


@case
def keyword_of_a_partial():
    mask_mod = functools.partial(lambda b, h, q, kv, width: kv < width, width=0)
    return mask_mod, call(mask_mod.keywords.__setitem__, "width")


@case
def decorated():
    width = [0]

    def decorate(function):
        return functools.wraps(function)(lambda *args: function(*args, width[0]))

    return decorate(lambda b, h, q, kv, n: kv < n), call(width.__setitem__, 0)


@case
def torchs_and_masks():
    width = [0]
    return torch_flex.and_masks(torch_flex.noop_mask, item(width)[0]), call(width.__setitem__, 0)


@case
def cache_of_a_function():
    values = [0]
    read = functools.lru_cache(lambda: values[0])
    return reading(read, lambda n: (values.__setitem__(0, n), read.cache_clear()))


@case
def function_in_a_list():
    functions = [None]
    return reading(lambda: functions[0](), lambda n: functions.__setitem__(0, lambda: n))


@case
def generator():
    def count():
        while True:
            yield state[0]

    state, numbers = [0], count()
    return reading(lambda: next(numbers), call(state.__setitem__, 0))


@case
def iterator():
    return reading(iter(WIDTHS).__next__, lambda n: None)


# ---- objects


class Plain:
    width = 0


class Methods:
    shared = (0,)

    def __init__(self):
        self.width = 0

    def __call__(self, b, h, q, kv):
        return self.read(kv)

    def mask_mod(self, b, h, q, kv):
        return kv < self.width

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


class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.width = 0
        # changing_tensors.py changes these two
        self.weight = torch.nn.Parameter(torch.zeros(LENGTH, 1))
        self.register_buffer("shown", hidden())

    def mask_mod(self, b, h, q, kv):
        return kv < self.width


class Descriptor:
    value = 0

    def __get__(self, instance, owner):
        return self.value


def fresh(*bases, **members):
    """Returns a new class."""
    return type("Fresh", bases, members)


def derived(base):
    return attribute(fresh(base)(), of=base)


def of_object(mask_mod_of, name="width", make=Methods):
    owner = make()
    return mask_mod_of(owner), call(setattr, owner, name)


CASES |= {
    "attribute": lambda: attribute(Plain()),
    "class_attribute": lambda: attribute(fresh(Plain)),
    "class_attribute_of_a_base": lambda: derived(fresh(Plain)),
    "slots": lambda: attribute(fresh(__slots__=("width",))()),
    "namespace": lambda: attribute(types.SimpleNamespace(width=0)),
    "python_module": lambda: attribute(types.ModuleType("settings")),
    "number_of_a_module": lambda: attribute(Layer()),
    "thread_local": lambda: attribute(threading.local()),
    "ctypes_structure": lambda: attribute(fresh(ctypes.Structure, _fields_=[("width", ctypes.c_int)])()),
    "method": lambda: of_object(lambda owner: owner.mask_mod),
    "method_of_a_module": lambda: of_object(lambda owner: owner.mask_mod, make=Layer),
    "callable_object": lambda: of_object(lambda owner: owner),
    "property_of_an_object": lambda: of_object(lambda owner: lambda b, h, q, kv: kv < owner.through_a_property),
    "getattr_of_an_object": lambda: of_object(lambda owner: lambda b, h, q, kv: kv < owner.made_up),
    "class_method": lambda: (Methods().of_class, lambda n: setattr(Methods, "shared", (n,))),
    "static_method": lambda: (Methods.of_none, lambda n: setattr(Methods, "shared", (n,))),
}


@case
def class_attribute_read_through_an_object():
    owner = fresh(Plain)
    return attribute(owner(), of=owner)


@case
def attribute_of_an_attribute():
    outer = types.SimpleNamespace(inner=Plain())
    return reading(lambda: outer.inner.width, call(setattr, outer.inner, "width"))


@case
def attribute_of_a_metaclass():
    meta = fresh(type, width=0)
    return attribute(meta("Fresh", (), {}), of=meta)


@case
def method_replaced_in_an_object():
    owner = Methods()
    return owner, lambda n: setattr(owner, "read", lambda kv: kv < n)


@case
def method_replaced_in_a_class():
    owner = fresh(Methods)
    return owner(), lambda n: setattr(owner, "read", lambda self, kv: kv < n)


@case
def descriptor():
    made = Descriptor()
    instance = fresh(width=made)()
    return reading(lambda: instance.width, call(setattr, made, "value"))


@case
def replaced_named_tuple():
    kind = collections.namedtuple("Options", "width")
    holder = types.SimpleNamespace(options=kind(0))
    return reading(lambda: holder.options.width, lambda n: setattr(holder, "options", kind(n)))


@case
def imported_module():
    module = sys.modules["volta_fa_test_settings"] = types.ModuleType("volta_fa_test_settings")

    def read():
        import volta_fa_test_settings

        return volta_fa_test_settings.width

    return reading(read, call(setattr, module, "width"))


@case
def weak_reference():
    owner = Plain()
    reference = weakref.ref(owner)
    return reading(lambda: reference().width, call(setattr, owner, "width"))


# ---- containers

CASES |= {
    "list": lambda: item([0]),
    "dict": lambda: item({}, "width"),
    "default_dict": lambda: item(collections.defaultdict(int), "width"),
    "chain_map": lambda: item(collections.ChainMap({}, {"width": 0}), "width"),
    "deque": lambda: item(collections.deque([0])),
    "array_of_python": lambda: item(array.array("i", [0])),
    "byte_array": lambda: item(bytearray(1)),
    "memory_map": lambda: item(mmap.mmap(-1, 16)),
    "ctypes_array": lambda: item((ctypes.c_int * 1)()),
}


def through(items, read, at=0):
    """Returns a case of what a function reads from a container."""
    return reading(lambda: read(items), call(items.__setitem__, at))


@case
def list_in_a_tuple():
    items = [0]
    held = ((items,),)
    return through(items, lambda _: held[0][0][0])


@case
def length_of_a_list():
    items = []
    return reading(lambda: len(items), lambda n: items.__setitem__(slice(None), [0] * n))


@case
def list_of_visible_keys():
    items = []
    mask_mod = lambda b, h, q, kv: functools.reduce(lambda a, n: a | (kv == n), items, kv < 0)  # noqa: E731
    return mask_mod, lambda n: items.__setitem__(slice(None), range(n))


@case
def mapping_proxy():
    items = {"width": 0}
    proxy = types.MappingProxyType(items)
    return through(items, lambda _: proxy["width"], "width")


@case
def set_():
    items = set()
    return reading(lambda: max(items), lambda n: (items.clear(), items.add(n)))


@case
def memory_view():
    memory = bytearray(1)
    view = memoryview(memory)
    return through(memory, lambda _: view[0])


# ---- the process

#: States of `random` before it draws a width.
SEEDS = {random.Random(seed).randrange(1, LENGTH): random.Random(seed).getstate() for seed in range(3000)}


@case
def environment_variable():
    return reading(lambda: int(os.environ["VOLTA_FA_TEST_WIDTH"]), lambda n: os.environ.__setitem__("VOLTA_FA_TEST_WIDTH", str(n)))


@case
def context_variable():
    variable = contextvars.ContextVar("width")
    return reading(variable.get, variable.set)


@case
def value_of_another_thread():
    pool, items = ThreadPoolExecutor(1), [0]
    return through(items, lambda _: pool.submit(lambda: items[0]).result())


@case
def clock():
    return reading(lambda: int(time.time()), lambda n: setattr(time, "time", lambda: n + 0.5))


@case
def random_number():
    return reading(lambda: random.randrange(1, LENGTH), lambda n: random.setstate(SEEDS[n]))


@case
def file():
    path = os.environ["VOLTA_FA_TEST_FILE"]

    def read():
        with open(path) as opened:
            return int(opened.read())

    def change(n):
        with open(path, "w") as opened:
            opened.write(str(n))

    return reading(read, change)


@case
def ctypes_number():
    number = ctypes.c_int(0)
    return reading(lambda: number.value, call(setattr, number, "value"))


@case
def ctypes_address():
    number = ctypes.c_int(0)
    return reading(lambda: ctypes.c_int.from_address(ctypes.addressof(number)).value, call(setattr, number, "value"))
