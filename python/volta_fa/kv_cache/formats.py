"""The formats of quantized KV caches: what their bytes mean, and how keys and values become bytes.

This is their one definition. The CPU backend and the kernels compute the same to the bit, and the tests compare them with it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import bad_argument, require_tensors

__all__ = ["KV_DTYPES", "QuantizedKV", "dequantize_kv", "hadamard", "quantize_kv"]


class QuantizedKV(NamedTuple):
    """Keys or values of a quantized cache."""

    data: Tensor
    scale: Tensor | None
    zero_point: Tensor | None


@dataclass(frozen=True)
class _Format:
    dtype: torch.dtype
    bits: int
    largest: float  # that a code stands for before it is scaled; int4: the last code
    has_scales: bool = False  # a scale, of each token and head
    has_zero_points: bool = False


_FORMATS = {
    "int8": _Format(torch.int8, 8, 127, has_scales=True),
    "int4": _Format(torch.uint8, 4, 15, has_scales=True, has_zero_points=True),
    "fp8_e5m2": _Format(torch.float8_e5m2, 8, 57344),
    "fp8_e4m3": _Format(torch.float8_e4m3fn, 8, 448),
}
#: What `kv_dtype` may be.
KV_DTYPES = tuple(_FORMATS)


def _format(kv_dtype: str) -> _Format:
    if kv_dtype not in _FORMATS:
        raise bad_argument("kv_dtype", repr(kv_dtype), f"one of {', '.join(KV_DTYPES)}")
    return _FORMATS[kv_dtype]


def _number(x: Tensor, value: float) -> Tensor:
    """On x's device: by a number of the host, CUDA's division multiplies by the reciprocal, which is rounded."""
    return x.new_full((), value)


def _scaled(x: Tensor, scale: Tensor | float | None) -> Tensor | None:
    """A scale that broadcasts over (..., nheads, headdim)."""
    if scale is None:
        return None
    if not isinstance(scale, Tensor):
        return _number(x, scale)
    return scale.to(x.device, x.dtype)[..., None] if scale.dim() else scale.to(x.device, x.dtype)


def hadamard(n: int) -> Tensor:
    """Sylvester's Hadamard matrix, (n, n) of 1 and -1 in float64, symmetric, n a power of two. Multiplied by n**-0.5 it is orthogonal:
    keys and queries that are both multiplied by it have the same scores, and a channel of keys that is larger than the others is spread
    over all of them before it is quantized.

    Raises ValueError for another n.
    """
    if n < 1 or n & (n - 1):
        raise bad_argument("n", n, "a power of two")
    h = torch.ones(1, 1, dtype=torch.float64)
    while len(h) < n:
        h = torch.cat((torch.cat((h, h), 1), torch.cat((h, -h), 1)))
    return h


def quantize_kv(x: Tensor, kv_dtype: str, *, scale: Tensor | float | None = None) -> QuantizedKV:
    """Keys or values as a quantized cache has them.

    x is (..., nheads, headdim), of any floating-point type. The result is (data, scale, zero_point):

        kv_dtype    data                                    a number is                     scale, zero_point
        int8        int8, x's shape                         code * scale                    float32 (..., nheads); None
        int4        uint8, (..., nheads, headdim / 2)       (code - zero_point) * scale     float32 (..., nheads), both
        fp8_e5m2    float8_e5m2, x's shape                  code * scale                    as given; None
        fp8_e4m3    float8_e4m3fn, x's shape                code * scale                    as given; None

    int8 and int4 have a scale for each token and head, so `scale` is for the other two: a float, or a tensor (1), (nheads) or any
    that broadcasts to (..., nheads); None is 1. fwd_kvcache calls it k_descale or v_descale.

    int8's scale is the largest magnitude divided by 127. int4's is the distance from the smallest number to the largest divided by
    15, and its zero_point, not rounded, is what the smallest becomes 0 by; where all are equal, the scale is their magnitude, so
    that nothing is lost. Column 2 i is in the low half of byte i, column 2 i + 1 in the high half. A token and head that has a
    NaN or an infinity has codes 0 and a scale of NaN, so all of it is NaN. All is computed in float32,
    rounded to nearest even. fp8 saturates; its NaN stays NaN.

    Raises ValueError for another kv_dtype, a type of x that is not a floating-point one, an odd headdim with int4, or a scale where
    there is one for each token.
    """
    require_tensors(x=x)
    f = _format(kv_dtype)
    if not x.is_floating_point() or x.element_size() == 1:
        raise bad_argument("x", f"dtype {x.dtype}", "torch.float16, torch.bfloat16, torch.float32 or torch.float64")
    if x.dim() < 2:
        raise bad_argument("x", f"a tensor of rank {x.dim()}", "(..., nheads, headdim)")
    if f.bits == 4 and x.shape[-1] % 2:
        raise bad_argument("x", f"headdim {x.shape[-1]}", "an even one: kv_dtype int4 has two columns in a byte")
    x = x.float()
    if not f.has_scales:
        given = _scaled(x, scale)
        y = x if given is None else x / given
        data = y.clamp(-f.largest, f.largest).to(f.dtype)
        return QuantizedKV(data, scale if scale is None or isinstance(scale, Tensor) else torch.tensor([scale]), None)
    if scale is not None:
        raise bad_argument("scale", "one", f"None: kv_dtype {kv_dtype} computes one for each token and head")
    if x.shape[-1] == 0:
        low = high = x.new_zeros(x.shape[:-1])
    else:
        low, high = x.amin(-1), x.amax(-1)
    if f.has_zero_points:
        spread = (high - low) / _number(x, f.largest)
        step = torch.where(spread == 0, low.abs(), spread)
        zero = torch.where(step == 0, torch.zeros_like(low), -low / step)
        origin = low
    else:
        step, zero = torch.maximum(-low, high) / _number(x, f.largest), None
        origin = torch.zeros_like(low)
    wrong = ~(torch.isfinite(low) & torch.isfinite(high))
    # (where the step is 0, all is: 0 / 0)
    codes = ((x - origin[..., None]) / step[..., None]).round().nan_to_num(0.0, 0.0, 0.0)
    codes = codes.clamp(0 if f.has_zero_points else -f.largest, f.largest).masked_fill(wrong[..., None], 0.0)
    scales = step.masked_fill(wrong, torch.nan)
    if not f.has_zero_points:
        return QuantizedKV(codes.to(f.dtype), scales, None)
    assert zero is not None
    codes = codes.to(torch.int32)
    data = (codes[..., 0::2] | codes[..., 1::2] << 4).to(f.dtype)
    return QuantizedKV(data, scales, zero.masked_fill(wrong, torch.nan))


def dequantize_kv(
    data: Tensor,
    kv_dtype: str,
    scale: Tensor | float | None = None,
    zero_point: Tensor | None = None,
    *,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """The numbers that a quantized cache stands for: `quantize_kv` has the formats. Computed in float64 if that is dtype, else in
    float32, and rounded to dtype.

    Raises ValueError where data is not of the format's type, or what it needs is missing.
    """
    require_tensors(data=data)
    f = _format(kv_dtype)
    if data.dtype != f.dtype:
        raise bad_argument("data", f"dtype {data.dtype}", f"{f.dtype} for kv_dtype {kv_dtype}")
    for name, given, wanted in (("scale", scale, f.has_scales), ("zero_point", zero_point, f.has_zero_points)):
        if wanted and given is None:
            raise bad_argument(name, "None", f"a tensor (..., nheads): kv_dtype {kv_dtype} has one for each token and head")
    if zero_point is not None and not f.has_zero_points:
        raise bad_argument("zero_point", "a tensor", f"None: kv_dtype {kv_dtype} has none")
    exact = torch.float64 if dtype == torch.float64 else torch.float32
    if f.bits == 4:
        codes = torch.stack((data % 16, data // 16), -1).flatten(-2).to(exact)
    else:
        codes = data.float().to(exact)
    if zero_point is not None:
        codes = codes - zero_point.to(codes.device, exact)[..., None]
    factor = _scaled(codes, scale)
    return (codes if factor is None else codes * factor).to(dtype)
