"""The formats of quantized KV caches: the meaning of their bytes, and `quantize_kv` and `dequantize_kv`, which `volta_fa` exports. This
code is the definition of the formats. The CPU backend and the kernels give bitwise identical results, and tests compare them with it."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import bad_argument, require_tensors
from ..inspection import cache_formats


class QuantizedKV(NamedTuple):
    """Keys or values of a quantized cache; `quantize_kv` describes the fields."""

    data: Tensor
    scale: Tensor | None
    zero_point: Tensor | None


@dataclass(frozen=True)
class _Format:
    dtype: torch.dtype
    bits: int  # of a code
    largest: float  # maximum magnitude of a code (int8: 127; fp8: its largest number); int4: its maximum, 15
    has_scales: bool = False  # a scale for each token and head
    has_zero_points: bool = False


def _read(row: dict[str, Any]) -> _Format:
    """Returns the format of a row of `cache_formats`, the native library's table. Its "scale" says what has one: "token" is each token
    and head, "head" each head of the whole cache, "none" nothing."""
    dtype = getattr(torch, row["dtype"].removeprefix("torch."))
    return _Format(dtype, row["bits"], row["max_code"], row["scale"] == "token", row["zero_point"])


#: By kv_dtype of a cache: those of its keys and of its values. And by kv_dtype of keys or values: the format.
_PARTS = {row["name"]: (row["keys"], row["values"]) for row in cache_formats() if row["is_quantized"]}
_FORMATS = {row["name"]: _read(row) for row in cache_formats() if row["name"] in _PARTS and row["keys"] == row["values"]}
#: The values of `kv_dtype` for keys or values.
KV_DTYPES = tuple(_FORMATS)
#: The values of `kv_dtype` for a cache: KV_DTYPES, and int8k_int4v, whose keys are int8 and whose values are int4.
CACHE_KV_DTYPES = tuple(_PARTS)


def parts_of(kv_dtype: str) -> tuple[str, str]:
    """Returns the kv_dtype of a cache's keys and that of its values. Raises ValueError for another kv_dtype."""
    if kv_dtype not in _PARTS:
        raise bad_argument("kv_dtype", repr(kv_dtype), f"one of {', '.join(CACHE_KV_DTYPES)}")
    return _PARTS[kv_dtype]


def _format(kv_dtype: str) -> _Format:
    if kv_dtype not in _FORMATS:
        raise bad_argument("kv_dtype", repr(kv_dtype), f"one of {', '.join(KV_DTYPES)}")
    return _FORMATS[kv_dtype]


def cache_dtype(kv_dtype: str) -> torch.dtype:
    """Returns the dtype of a cache's tensor. Raises ValueError for another kv_dtype."""
    return _format(kv_dtype).dtype


def _number(x: Tensor, value: float) -> Tensor:
    """Returns a number as a tensor on x's device. Division by a Python number would multiply by its rounded reciprocal on CUDA."""
    return x.new_full((), value)


def _scaled(x: Tensor, scale: Tensor | float | None, name: str = "scale") -> Tensor | None:
    """Returns a scale, (..., nheads) or a number, as a tensor that broadcasts to x, (..., nheads, headdim); None for None. Raises
    ValueError for another shape of a scale, the argument `name`."""
    if scale is None:
        return None
    if not isinstance(scale, Tensor):
        return _number(x, scale)
    shape = x.shape[:-1]
    if scale.dim() > len(shape) or any(n not in (1, size) for n, size in zip(reversed(scale.shape), reversed(shape))):
        raise bad_argument(name, f"shape {tuple(scale.shape)}", f"one that broadcasts to (..., nheads), here {tuple(shape)}")
    return scale.to(x.device, x.dtype)[..., None]


def hadamard(n: int) -> Tensor:
    """Returns Sylvester's Hadamard matrix, (n, n) of 1 and -1 in float64, symmetric, for n a power of two.

    Multiplied by n**-0.5 it is orthogonal. So scores stay the same if keys and queries are both multiplied by it. A channel of keys with
    outliers then spreads over all channels before they are quantized.

    Raises ValueError for another n."""
    if n < 1 or n & (n - 1):
        raise bad_argument("n", n, "a power of two")
    h = torch.ones(1, 1, dtype=torch.float64)
    while len(h) < n:
        h = torch.cat((torch.cat((h, h), 1), torch.cat((h, -h), 1)))
    return h


def quantize_kv(x: Tensor, kv_dtype: str, *, scale: Tensor | float | None = None) -> QuantizedKV:
    """Quantizes keys or values x, (..., nheads, headdim) of float16, bfloat16, float32 or float64.

    Returns (data, scale, zero_point):

        kv_dtype    data                                    a number is                     scale, zero_point
        int8        int8, x's shape                         code * scale                    float32 (..., nheads); None
        int4        uint8, (..., nheads, headdim / 2)       (code - zero_point) * scale     float32 (..., nheads), both
        fp8_e5m2    float8_e5m2, x's shape                  code * scale                    as given; None
        fp8_e4m3    float8_e4m3fn, x's shape                code * scale                    as given; None

    The argument `scale` is for fp8 only: a float, or a tensor that broadcasts to (..., nheads), such as (1) or (nheads); None is 1.
    fwd_kvcache calls it k_descale or v_descale. int8 and int4 compute a scale for each token and head.

    int8: scale = max |x| / 127. int4: scale = (max x - min x) / 15, and zero_point = -(min x) / scale, not rounded. In int4, if all x of a
    token and head are equal, scale = |x|, which loses nothing. Column 2 i is in the low half of byte i, column 2 i + 1 in the high half. A
    token and head with a NaN or infinity has codes 0 and scale NaN, so it dequantizes to NaN. All is computed in float32, rounded to
    nearest even; max x - min x may exceed float32's largest number. fp8 saturates; NaN stays NaN.

    Raises ValueError for another kv_dtype, an x of another dtype, an odd headdim with int4, a scale with int8 or int4, and one of another
    shape."""
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
        return QuantizedKV(data, scale if scale is None or isinstance(scale, Tensor) else x.new_full((1,), scale), None)
    if scale is not None:
        raise bad_argument("scale", "one", f"None: kv_dtype {kv_dtype} computes one for each token and head")
    if x.shape[-1] == 0:
        low = high = x.new_zeros(x.shape[:-1])
    else:
        low, high = x.amin(-1), x.amax(-1)
    if f.has_zero_points:
        # The range of a row may overflow. Then its codes are computed from halves of its numbers, which are exact. Else `unit` is 1.
        unit = torch.ones_like(low).masked_fill(high - low == torch.inf, 0.5)
        x, low, high = x * unit[..., None], low * unit, high * unit
        spread = (high - low) / _number(x, f.largest)
        step = torch.where(spread == 0, low.abs(), spread)
        zero = torch.where(step == 0, torch.zeros_like(low), -low / step)
        origin, scales = low, step / unit
    else:
        step, zero = torch.maximum(-low, high) / _number(x, f.largest), None
        origin, scales = torch.zeros_like(low), step
    wrong = ~(torch.isfinite(low) & torch.isfinite(high))
    # nan_to_num: where step is 0, x is 0 too, and 0 / 0 becomes code 0
    codes = ((x - origin[..., None]) / step[..., None]).round().nan_to_num(0.0, 0.0, 0.0)
    codes = codes.clamp(0 if f.has_zero_points else -f.largest, f.largest).masked_fill(wrong[..., None], 0.0)
    scales = scales.masked_fill(wrong, torch.nan)
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
    """Dequantizes keys or values; `quantize_kv` describes the formats and arguments.

    Returns (..., nheads, headdim) in dtype. Computes in float64 if dtype is that, else in float32.

    Raises ValueError if data has another dtype than the format, or a scale or zero_point is missing, superfluous or of a shape that does
    not broadcast to (..., nheads)."""
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
    factor, zero = _scaled(codes, scale), _scaled(codes, zero_point, "zero_point")
    codes = codes if zero is None else codes - zero
    return (codes if factor is None else codes * factor).to(dtype)
