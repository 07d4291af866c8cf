"""ComfyUI's attention on volta_fa: an override for `transformer_options["optimized_attention_override"]`, and counts of its calls. node.py
sets the override. ComfyUI calls it as it calls its own attention functions, with the replaced function in front:

    func, q, k, v, heads, mask=None, attn_precision=None, skip_reshape=False, skip_output_reshape=False, **kwargs

q is (batch, seqlen, heads * headdim), with skip_reshape (batch, heads, seqlen, headdim). So are k and v, with fewer heads
under `enable_gqa`. The result is (batch, seqlen, heads * headdim), with skip_output_reshape (batch, heads, seqlen, headdim).
A mask is bool (False hides a key) or is added to the scores: (seqlen_q, seqlen_k), (batch, seqlen_q, seqlen_k), or of rank 4.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from volta_fa.integrations.devices import max_headdim, serves  # of a device's kernels; whether a GPU, by index, is a Volta or Turing

#: Served dtypes: ComfyUI chooses one of these on Volta and Turing. bf16 is not among them, because no model was compared in it.
_DTYPES = (torch.float16, torch.float32)

#: The key of calls that volta_fa ran, in `counts`. The other keys are reasons for which calls fell back.
RAN = "ran"
#: The key of those among them that called `fwd_fast`, which itself runs exact kernels for short sequences and on Volta.
FAST = "fast"

#: Calls since the process began, by outcome. Calls that torch.compile traces are not counted.
counts: Counter[str] = Counter()


def make_override(
    every_device: bool = False, previous: Callable[..., Tensor] | None = None, precision: str = "exact"
) -> Callable[..., Tensor]:
    """Returns an override. Calls that volta_fa does not serve run the function that ComfyUI chose.

    Args:
        every_device: serve GPUs newer than Turing, and the CPU, too. Volta and Turing only unless given.
        previous: the override that was in place, which then runs the other calls.
        precision: "exact", or "fast": scores in int8, with an error of about 1%, for fp16 where no mask is added and no gradient needed.
    """
    if getattr(previous, "of_volta_fa", False):  # of another node on the same model: this one takes its place
        previous = previous.previous  # type: ignore[union-attr]

    def override(
        func: Callable[..., Tensor],
        q: Tensor,
        k: Tensor,
        v: Tensor,
        heads: int,
        mask: Tensor | None = None,
        attn_precision: torch.dtype | None = None,
        skip_reshape: bool = False,
        skip_output_reshape: bool = False,
        **kwargs: Any,
    ) -> Tensor:
        views, reason = _views(q, k, v, heads, skip_reshape, bool(kwargs.get("enable_gqa")))
        bias = None if mask is None else _rank_4(mask)
        reason = reason or _reason(*views, bias, every_device)
        if reason:
            _count(reason)
            options = dict(mask=mask, attn_precision=attn_precision, skip_reshape=skip_reshape, skip_output_reshape=skip_output_reshape)
            run = functools.partial(previous, func) if previous else func
            return run(q, k, v, heads, **options, **kwargs)
        views = tuple(t if t.stride(-1) == 1 else t.contiguous() for t in views)  # type: ignore[assignment]
        if precision == "fast" and _has_fast_form(*views, bias):
            out = torch.ops.volta_fa.fwd_fast(*views, attn_mask=bias, softmax_scale=kwargs.get("scale"))[0]
            _count(FAST)
        else:
            # accumulates scores in fp32, which is what attn_precision may ask for
            out = torch.ops.volta_fa.fwd(*views, attn_bias=bias, softmax_scale=kwargs.get("scale"))[0]
        _count(RAN)
        return out.transpose(1, 2) if skip_output_reshape else out.flatten(2)

    override.of_volta_fa, override.previous = True, previous  # type: ignore[attr-defined]
    return override


def _has_fast_form(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> bool:
    """Returns whether `fwd_fast` computes this call. It is for fp16 without a gradient, and its masks are bool."""
    needs_gradient = torch.is_grad_enabled() and any(t.requires_grad for t in (q, k, v))
    return q.dtype == torch.float16 and not needs_gradient and (bias is None or bias.dtype == torch.bool)


def _count(outcome: str) -> None:
    if not torch.compiler.is_compiling():  # each new count would compile again
        counts[outcome] += 1


def describe(calls: Counter[str]) -> str:
    """Returns calls by outcome, as in `10 ran on volta_fa, 2 fell back (float32: 2)`."""
    fell_back = {reason: n for reason, n in sorted(calls.items()) if n and reason not in (RAN, FAST)}
    reasons = ", ".join(f"{reason}: {n}" for reason, n in fell_back.items())
    fast = f" ({calls[FAST]} by fwd_fast)" if calls[FAST] else ""
    return f"{calls[RAN]} ran on volta_fa{fast}, {sum(fell_back.values())} fell back" + (f" ({reasons})" if reasons else "")


def _views(q: Tensor, k: Tensor, v: Tensor, heads: int, skip_reshape: bool, gqa: bool) -> tuple[tuple[Tensor, Tensor, Tensor], str]:
    """Returns q, k and v as (batch, seqlen, heads, headdim), and "", or the reason why that is impossible. `gqa`: k and v may have fewer
    heads."""
    found = (q, k, v)
    if any(t.ndim != (4 if skip_reshape else 3) for t in found):
        return found, "shape"
    if skip_reshape:
        found = (q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
    else:
        headdim = q.shape[-1] // heads
        if headdim == 0 or any(t.shape[-1] % headdim for t in found):
            return found, "shape"
        found = (q.unflatten(-1, (-1, headdim)), k.unflatten(-1, (-1, headdim)), v.unflatten(-1, (-1, headdim)))
    q, k, v = found
    nheads_k = k.shape[2]
    grouped = gqa and nheads_k > 0 and heads % nheads_k == 0
    fits = q.shape[2] == heads and (nheads_k == heads or grouped)
    fits = fits and k.shape[:3] == v.shape[:3] and q.shape[0] == k.shape[0] and q.shape[-1] == k.shape[-1]
    return found, "" if fits else "shape"


def _rank_4(mask: Tensor) -> Tensor:
    """Returns a mask that broadcasts to (batch, heads, seqlen_q, seqlen_k)."""
    if mask.ndim == 2:
        return mask[None, None]
    return mask[:, None] if mask.ndim == 3 else mask


def _reason(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, every_device: bool) -> str:
    """Returns why volta_fa does not serve this call, "" if it does."""
    if not (every_device or _is_volta_or_turing(q.device)):
        return f"device {_name(q.device)}"
    if k.device != q.device or v.device != q.device:
        return "several devices"
    if not (q.dtype == k.dtype == v.dtype and q.dtype in _DTYPES):
        # the first dtype that is not fp16 names the reason
        return str(next((t.dtype for t in (q, k, v) if t.dtype != torch.float16), q.dtype)).removeprefix("torch.")
    for headdim in (q.shape[-1], v.shape[-1]):
        if not 1 <= headdim <= max_headdim(q.device):
            return f"headdim {headdim}"
    if bias is None:
        return ""
    if bias.dtype not in (torch.bool, q.dtype, torch.float32):
        return f"mask in {str(bias.dtype).removeprefix('torch.')}"
    full = (q.shape[0], q.shape[2], q.shape[1], k.shape[1])
    if bias.device != q.device or bias.ndim != 4 or any(n not in (1, size) for n, size in zip(bias.shape, full)):
        return "mask"
    return ""


# torch.compile does not trace questions about devices.
@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _is_volta_or_turing(device: torch.device) -> bool:
    return device.type == "cuda" and serves(device.index)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
