"""`flex_attention`: torch's function, forward and backward, on the operators."""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..block_mask import BlockMask
from ..block_mask.source import Source
from ..block_mask.torch_mask import NO_BLOCKS, is_empty, packed
from ..errors import bad_argument
from ..integrations.devices import max_headdim
from .score_mod import ScoreMod, Scores, Unrecognized, recognize, values

#: Largest tensor of added terms in bytes, for score functions whose added terms are not ALiBi's.
MAX_BIAS_BYTES = 256 << 20

_logger = logging.getLogger("volta_fa")
_logged: set[str] = set()


def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: ScoreMod | None = None,
    block_mask: Any = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: dict[str, Any] | None = None,
    *,
    return_aux: Any = None,
) -> Any:
    """Computes `torch.nn.attention.flex_attention.flex_attention`, whose arguments and results these are.

    Gradients of the result and of lse flow into query, key and value, and into tensors that an added term captures. What the operators
    do not compute runs on torch's own function, and the logger `volta_fa` gets one line that names the operation.

    Args:
        query: (batch, heads, queries, headdim); key: (batch or 1, heads or fewer with enable_gqa, keys, headdim); value likewise, with
            its own headdim. float16 or bfloat16 on CUDA, also float32 and float64 on the CPU.
        score_mod: the operators compute combinations, in this order, of: a positive constant factor; `cap * tanh(score / cap)`; and
            added terms of batch, head, query and key. ALiBi's terms cost nothing. Others become a bias in memory of up to 256 MiB.
            `torch.where(condition, score, -inf)` hides elements.
        block_mask: torch's BlockMask, or `volta_fa.BlockMask`.
        scale: of the products; headdim ** -0.5 unless given.
        return_lse: also return lse (batch, heads, queries): float32, the natural logarithm, -inf for a query without a visible key.
        return_aux: torch's AuxRequest, from torch 2.9 on: its lse as return_lse; max_scores runs on torch's own function.
        kernel_options: ignored, but for torch's own function.
    """
    if torch.compiler.is_dynamo_compiling():
        from . import compiled

        return compiled.traced(query, key, value, score_mod, block_mask, scale, enable_gqa, return_lse, kernel_options, return_aux)
    check_arguments(query, key, value, block_mask, enable_gqa)
    try:
        if getattr(return_aux, "max_scores", False):
            raise Unrecognized("max_scores")
        check_operands(query, key, value)
        out, lse = _untraced()(query, key, value, score_mod, block_mask, scale)
    except Unrecognized as unrecognized:
        log_fallback(str(unrecognized))
        return _torch_function()(
            query,
            key,
            value,
            score_mod,
            _for_torch(block_mask, unrecognized),
            scale,
            enable_gqa,
            return_lse,
            kernel_options,
            **({} if return_aux is None else {"return_aux": return_aux}),
        )
    return results(out, lse, return_lse, return_aux)


def _run(
    query: Tensor, key: Tensor, value: Tensor, score_mod: ScoreMod | None, block_mask: Any, scale: float | None
) -> tuple[Tensor, Tensor]:
    scores = recognize(score_mod)
    return attend(query, key, value, score_mod, (), scores, block_mask_of(block_mask, query, key), scale)


@functools.cache
def _untraced() -> Callable[..., tuple[Tensor, Tensor]]:
    """Returns `_run`, disabled for dynamo: where dynamo breaks a program into parts, it does not compile these frames."""
    function: Callable[..., tuple[Tensor, Tensor]] = torch.compiler.disable(_run)
    return function


def results(out: Tensor, lse: Tensor, return_lse: bool, return_aux: Any) -> Any:
    """Returns what torch's function returns."""
    if return_aux is not None:
        from torch.nn.attention.flex_attention import AuxOutput

        return out, AuxOutput(lse=lse if return_aux.lse else None)
    return (out, lse) if return_lse else out


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: ScoreMod | None,
    captured: tuple[Any, ...],
    scores: Scores,
    mask: BlockMask | None,
    scale: float | None,
) -> tuple[Tensor, Tensor]:
    """Returns out (batch, heads, queries, headdim) and lse (batch, heads, queries), by `volta_fa::fwd`.

    Raises Unrecognized before anything runs.

    Args:
        captured: arguments of score_mod after the first five.
    """
    options: dict[str, Any] = scores.options(query.shape[-1] ** -0.5 if scale is None else scale)
    if score_mod is not None and scores.bias is None and scores.hides is not None and mask is None and not tracing():
        mask = _hidden(query, key, score_mod, captured, scores.hides)
    elif score_mod is not None and (scores.bias is not None or scores.hides is not None):
        slopes = _slopes(query, key, score_mod, captured, scores, mask)
        if slopes is not None:
            options["alibi_slopes"] = slopes
        else:
            options["attn_bias"] = _bias(query, key, score_mod, captured, scores, mask)
            mask = None
    if mask is not None:
        options |= mask.options()
    batch = query.shape[0]
    if key.shape[0] != batch:
        key, value = (t.expand(batch, *t.shape[1:]) for t in (key, value))
    operands = ((t if t.stride(-1) == 1 else t.contiguous()).transpose(1, 2) for t in (query, key, value))
    try:
        out, lse, _rng_state = torch.ops.volta_fa.fwd(*operands, **options)
    except NotImplementedError as error:
        raise Unrecognized(str(error)) from error
    return out.transpose(1, 2), torch.where(lse == math.inf, -math.inf, lse)


def check_operands(query: Tensor, key: Tensor, value: Tensor) -> None:
    """Raises Unrecognized for tensors that the operators do not take."""
    dtypes = (torch.float16, torch.bfloat16) + ((torch.float32, torch.float64) if query.device.type == "cpu" else ())
    if query.device.type not in ("cpu", "cuda"):
        raise Unrecognized(f"tensors on {query.device.type}")
    if query.dtype not in dtypes or not query.dtype == key.dtype == value.dtype:
        names = ", ".join(sorted({str(t.dtype).removeprefix("torch.") for t in (query, key, value)}))
        raise Unrecognized(f"{names} on {query.device.type}")
    if max(query.shape[-1], value.shape[-1]) > max_headdim(query.device):
        raise Unrecognized(f"headdim {max(query.shape[-1], value.shape[-1])}")
    if 0 in query.shape or 0 in key.shape or value.shape[-1] == 0:
        raise Unrecognized("an empty tensor")


def block_mask_of(block_mask: Any, query: Tensor, key: Tensor) -> BlockMask | None:
    """Returns the mask of a call, packed, or None without one."""
    if block_mask is None or isinstance(block_mask, BlockMask):
        return block_mask
    if is_empty(block_mask):
        return None
    return packed(block_mask, query.shape[0], query.shape[1], (query.shape[2], key.shape[2]))


def log_fallback(operation: str) -> None:
    """Logs, once for each operation, that torch's own function runs."""
    if operation not in _logged:
        _logged.add(operation)
        _logger.warning("volta_fa.flex_attention: no kernel for %s: torch's own flex_attention runs", operation)


def tracing() -> bool:
    """Returns whether tensors have no values: torch.compile traces."""
    return torch.compiler.is_compiling() or torch._guards.detect_fake_mode() is not None


_masks: weakref.WeakKeyDictionary[ScoreMod, tuple[Source, BlockMask]] = weakref.WeakKeyDictionary()


def _hidden(query: Tensor, key: Tensor, score_mod: ScoreMod, captured: tuple[Any, ...], hides: tuple[bool, ...]) -> BlockMask:
    """Returns the mask of a score function that hides elements and adds nothing. Keeps it while the function is there.

    A function that has no hash or no weak references is evaluated at each call.
    """
    sizes = [n if used else 1 for n, used in zip(query.shape, hides[:2])]
    source = Source.of(score_mod, *captured, *sizes, query.shape[2], key.shape[2], str(query.device), keep_function=False)
    kept = None
    with contextlib.suppress(TypeError):
        kept = _masks.get(score_mod)
    if kept is None or kept[0] != source:
        zero = torch.zeros((), device=query.device)

        def shown(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
            return score_mod(zero, b, h, q, kv, *captured) != -math.inf

        kept = source, BlockMask.from_mask_mod(shown, sizes[0], sizes[1], query.shape[2], key.shape[2], query.device)
        with contextlib.suppress(TypeError):
            _masks[score_mod] = kept
    return kept[1]


def _slopes(
    query: Tensor, key: Tensor, score_mod: ScoreMod, captured: tuple[Any, ...], scores: Scores, mask: BlockMask | None
) -> Tensor | None:
    """Returns ALiBi's slopes, (heads) or (batch, heads), or None if the added term is something else."""
    learned = torch.is_grad_enabled() and scores.needs_gradient
    if scores.alibi is None or learned or query.shape[2] != key.shape[2]:
        return None
    if scores.alibi == "relative" and (mask is None or tracing() or not mask.is_causal()):
        return None  # the operators' distance has no sign
    assert scores.bias is not None
    batch, heads = query.shape[:2]
    entries: Tensor | int = torch.arange(batch, device=query.device) if scores.bias[0] else 0
    with torch.no_grad():
        places = (entries, torch.arange(heads, device=query.device), 0, 1)
        step = values(score_mod, captured, places, torch.float32, query.device)[..., 0, 0].float()
    slopes = step if scores.alibi == "relative" else -step
    return slopes.contiguous() if scores.bias[0] else slopes[0].contiguous()


def _bias(query: Tensor, key: Tensor, score_mod: ScoreMod, captured: tuple[Any, ...], scores: Scores, mask: BlockMask | None) -> Tensor:
    """Returns what score_mod adds and hides, and what the mask hides, as a bias."""
    sizes = (*query.shape[:3], key.shape[2])
    none = (False,) * 4
    of_mask = none if mask is None else (mask.shape[0] > 1, mask.shape[1] > 1, True, True)
    used = [any(parts) for parts in zip(scores.bias or none, scores.hides or none, of_mask)]
    dtype = query.dtype if query.dtype == torch.float64 else torch.float32
    shape = [size if u else 1 for u, size in zip(used, sizes)]
    if math.prod(shape) * dtype.itemsize > MAX_BIAS_BYTES:
        raise Unrecognized(f"an added term of more than {MAX_BIAS_BYTES >> 20} MiB")
    places = tuple(torch.arange(size, device=query.device) if u else 0 for u, size in zip(used, sizes))
    bias = values(score_mod, captured, places, dtype, query.device).to(dtype)
    if mask is not None:
        seen = mask.dense()
        entry, head = (torch.arange(size, device=query.device) % own for size, own in zip(shape[:2], seen.shape))
        bias = bias.masked_fill(~seen[entry[:, None], head], -math.inf)
    return bias


def check_arguments(query: Tensor, key: Tensor, value: Tensor, block_mask: Any, enable_gqa: bool) -> None:
    """Raises ValueError for arguments that torch refuses too."""

    def wrong(name: str, got: object, expected: object) -> Exception:
        return bad_argument(name, got, expected, op="flex_attention")

    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if tensor.dim() != 4:
            raise wrong(name, f"{tensor.dim()} dimensions", "(batch, heads, tokens, headdim)")
    if query.shape[-1] != key.shape[-1]:
        raise wrong("key", f"headdim {key.shape[-1]}", f"query's, {query.shape[-1]}")
    if key.shape[:3] != value.shape[:3]:
        raise wrong("value", f"shape {tuple(value.shape)}", f"key's batch, heads and tokens, {tuple(key.shape[:3])}")
    if enable_gqa and (key.shape[1] == 0 or query.shape[1] % key.shape[1]):
        raise wrong("query", f"{query.shape[1]} heads", f"a multiple of key's {key.shape[1]} heads")
    if not enable_gqa and query.shape[1] != key.shape[1]:
        raise wrong("key", f"{key.shape[1]} heads", f"query's {query.shape[1]}: enable_gqa=True allows fewer")
    if query.shape[0] != key.shape[0] and key.shape[0] != 1:
        raise wrong("key", f"batch {key.shape[0]}", f"query's {query.shape[0]}, or 1")
    if block_mask is None or (not isinstance(block_mask, BlockMask) and is_empty(block_mask)):
        return
    lengths, given = (query.shape[2], key.shape[2]), tuple(block_mask.shape[-2:])
    large = not isinstance(block_mask, BlockMask) and min(block_mask.BLOCK_SIZE) >= NO_BLOCKS
    if given != lengths and not large:
        expected = f"{lengths}: make a block mask of these lengths, or adjust it by its method _adjust"
        raise wrong("block_mask", f"lengths {given}", expected)
    device = block_mask.device if isinstance(block_mask, BlockMask) else block_mask.kv_num_blocks.device
    if device != query.device:
        raise wrong("block_mask", f"it on {device}", f"query's device, {query.device}")


def _for_torch(block_mask: Any, reason: Exception) -> Any:
    """Returns torch's form of a mask for torch's own function."""
    if isinstance(block_mask, BlockMask):
        expected = f"torch's BlockMask, which torch's own flex_attention needs: volta_fa has no kernel for {reason}"
        raise bad_argument("block_mask", "volta_fa.BlockMask", expected, op="flex_attention", error=NotImplementedError)
    return block_mask


def _torch_function() -> Callable[..., Any]:
    """Returns torch's own function, also while `enable_flex` replaces it."""
    from .switch import original

    return original()
