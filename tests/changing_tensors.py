"""Mask functions that read arrays of numpy and tensors: `CASES`, as those of `changing_state`."""

import ctypes
import types

import numpy
import torch

from changing_state import LENGTH, Layer, attribute, below, call, fresh, hidden, item, reading, registers

CASES = {}
case = registers(CASES)


def keys(shown, write):
    """Returns a case of a tensor with a bool for each key."""
    return lambda b, h, q, kv: shown[kv], lambda n: write(below(n))


# ---- numpy

CASES["numpy_scalar"] = lambda: item(numpy.zeros(3), 1)
CASES["numpy_integer"] = lambda: item(numpy.zeros(3, dtype=numpy.int64), 1)


@case
def numpy_array():
    numbers = numpy.zeros(3, dtype=numpy.int64)
    return reading(lambda: int(numbers[1]), call(numbers.__setitem__, 1))


@case
def numpy_shape():
    holder = types.SimpleNamespace()
    return reading(lambda: holder.numbers.shape[0], lambda n: setattr(holder, "numbers", numpy.zeros(n)))


@case
def numpy_generator():
    holder = types.SimpleNamespace()
    return reading(
        lambda: int(holder.made.integers(LENGTH)) + 1, lambda n: setattr(holder, "made", numpy.random.default_rng(NUMPY_SEEDS[n]))
    )


NUMPY_SEEDS = {int(numpy.random.default_rng(seed).integers(LENGTH)) + 1: seed for seed in range(3000)}


def numpy_keys(made_inside):
    numbers = numpy.zeros(LENGTH, dtype=bool)
    shown = torch.from_numpy(numbers)
    mask_mod = (lambda b, h, q, kv: torch.from_numpy(numbers)[kv]) if made_inside else (lambda b, h, q, kv: shown[kv])
    return mask_mod, lambda n: numbers.__setitem__(slice(None), numpy.arange(LENGTH) < n)


CASES["tensor_of_numpy_memory"] = lambda: numpy_keys(False)
CASES["tensor_made_of_numpy_inside"] = lambda: numpy_keys(True)


@case
def number_of_numpy_memory():
    numbers = numpy.zeros((), dtype=numpy.int32)
    width = torch.from_numpy(numbers)
    return lambda b, h, q, kv: kv < width, call(numbers.__setitem__, ())


# ---- tensors


def of_tensor(width, mask_mod_of):
    """Returns a case of a tensor whose elements all become the width."""
    return mask_mod_of(width), lambda n: width.data.fill_(n)


def integers(*shape):
    return torch.zeros(shape, dtype=torch.int32)


CASES |= {
    "number_in_a_tensor": lambda: of_tensor(integers(), lambda t: lambda b, h, q, kv: kv < t),
    "floating_point_number_in_a_tensor": lambda: of_tensor(torch.zeros(()), lambda t: lambda b, h, q, kv: kv + 0.5 < t + 0.25),
    "item_of_a_tensor": lambda: of_tensor(integers(1), lambda t: lambda b, h, q, kv: kv < t.item()),
    "maximum_of_a_tensor": lambda: of_tensor(integers(3), lambda t: lambda b, h, q, kv: kv < t.max()),
    "element_of_a_tensor": lambda: of_tensor(integers(3), lambda t: lambda b, h, q, kv: kv < t[1]),
    "element_for_each_head": lambda: of_tensor(integers(2), lambda t: lambda b, h, q, kv: kv < t[h]),
    "parameter": lambda: of_tensor(torch.nn.Parameter(torch.zeros(())), lambda t: lambda b, h, q, kv: kv < t),
}


def key_memory(make, write=None):
    """Returns a case of a tensor and of what writes into it."""
    shown = make()
    return keys(shown, lambda new: write(shown, new))


def in_inference_mode(shown, new):
    with torch.inference_mode():
        shown.copy_(new)


CASES |= {
    "tensor": lambda: key_memory(hidden, lambda shown, new: shown.copy_(new)),
    "data_of_a_tensor": lambda: key_memory(hidden, lambda shown, new: shown.data.copy_(new)),
    "storage_of_a_tensor": lambda: key_memory(hidden, lambda shown, new: shown.untyped_storage().copy_(new.untyped_storage())),
    "other_memory_for_a_tensor": lambda: key_memory(hidden, lambda shown, new: setattr(shown, "data", new)),
    "address_of_a_tensor": lambda: key_memory(hidden, lambda shown, new: ctypes.memmove(shown.data_ptr(), new.data_ptr(), LENGTH)),
    "base_of_a_view": lambda: key_memory(hidden, lambda shown, new: shown.view(2, -1).detach().copy_(new.view(2, -1))),
    "view_of_a_tensor": lambda: key_memory(lambda: hidden(2, LENGTH, 2)[1, :, 0], lambda shown, new: shown._base.data[1, :, 0].copy_(new)),
    "tensor_of_inference_mode": lambda: key_memory(torch.inference_mode()(hidden), in_inference_mode),
}


@case
def row_of_a_tensor():
    shown = hidden(LENGTH, LENGTH)
    return lambda b, h, q, kv: shown[q][kv], lambda n: shown.data.copy_(below(n))


@case
def reduction_of_a_row():
    shown = hidden(LENGTH, 3)
    return lambda b, h, q, kv: shown[kv].any(), lambda n: shown.data.copy_(below(n)[:, None])


@case
def expanded_tensor():
    base = hidden()
    shown = base.expand(LENGTH, LENGTH)
    return lambda b, h, q, kv: shown[q, kv], lambda n: base.data.copy_(below(n))


@case
def sum_of_a_tensor():
    shown = hidden()
    return lambda b, h, q, kv: kv < shown.sum(), lambda n: shown.data.copy_(below(n))


@case
def shape_of_a_tensor():
    shown = torch.zeros(1)
    return reading(lambda: shown.shape[0], shown.resize_)


@case
def attribute_of_a_tensor():
    return attribute(torch.zeros(1))


@case
def tensor_of_a_buffer():
    memory = bytearray(LENGTH)
    shown = torch.frombuffer(memory, dtype=torch.bool)
    return keys(shown, lambda new: memory.__setitem__(slice(None), bytes(new.tolist())))


@case
def tensor_of_dlpack():
    numbers = numpy.zeros(LENGTH, dtype=numpy.int8)
    shown = torch.from_dlpack(numbers)
    return lambda b, h, q, kv: shown[kv] > 0, lambda n: numbers.__setitem__(slice(None), numpy.arange(LENGTH) < n)


@case
def tensor_made_of_a_list_inside():
    items = [False] * LENGTH
    return lambda b, h, q, kv: torch.tensor(items)[kv], lambda n: items.__setitem__(slice(None), below(n).tolist())


@case
def tensor_in_a_list():
    held = [hidden()]
    return lambda b, h, q, kv: held[0][kv], lambda n: held.__setitem__(0, below(n))


@case
def parameter_of_a_module():
    layer = Layer()
    return lambda b, h, q, kv: layer.weight[kv, 0] > 0, lambda n: layer.weight.data.copy_(below(n)[:, None])


@case
def buffer_of_a_module():
    layer = Layer()
    return lambda b, h, q, kv: layer.shown[kv], lambda n: layer.load_state_dict({"shown": below(n), "weight": layer.weight})


@case
def gradient_of_a_parameter():
    width = torch.nn.Parameter(torch.zeros(()))
    return lambda b, h, q, kv: kv < width.grad, lambda n: setattr(width, "grad", torch.tensor(float(n)))


@case
def subclass_of_tensor():
    shown = hidden().as_subclass(fresh(torch.Tensor))
    return lambda b, h, q, kv: shown[kv].as_subclass(torch.Tensor), lambda n: shown.data.copy_(below(n))


@case
def version_of_a_tensor():
    counted = torch.zeros(1)

    def change(n):
        while counted._version % LENGTH != n:
            counted.zero_()

    return reading(lambda: counted._version % LENGTH, change)


@case
def default_dtype():
    """torch's own state decides what a quotient is: 2049 / 2 is 1024 in fp16."""

    def change(n):
        torch.set_default_dtype(torch.float16 if n == 17 else torch.float32)

    return lambda b, h, q, kv: (kv * 0 + 2049) / 2 > 1024 + kv * 0, change
