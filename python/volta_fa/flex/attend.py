"""Computes FlexAttention by `volta_fa::fwd`, for `attention` (eager mode) and `compiled` (torch.compile). Tensors have heads before tokens.
A recognized score function (`Scores`) becomes options of the operator: scale, softcap, ALiBi slopes, a block mask or a bias in memory."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ..block_mask import BlockMask, kept  # kept: makes packed masks, and keeps them for later calls
from ..block_mask.recording import recorded  # a mask function as a list of operations, if possible
from ..block_mask.source import NO_BLOCKS, Source, is_empty, source_of  # Source: a mask before it is packed, also of torch's BlockMask
from ..errors import bad_argument
from ..integrations.devices import max_headdim
from ..operands import takes_dtype, with_unit_stride  # whether fwd takes q; copies a tensor if its last dimension has gaps

# Scores: what a score function does: factor, cap, an added term (bias; alibi: of "relative" or "absolute" distances), hidden elements
# (hides). bias and hides say of batch entry, head, query and key whether each matters, or are None. values: of a score function at score 0
from .score_mod import ScoreMod, Scores, Unrecognized, values

#: Maximum size in bytes (256 MiB) of the bias for score functions whose added terms are not ALiBi's. Larger ones run on torch's function.
MAX_BIAS_BYTES = 256 << 20


def results(out: Tensor, lse: Tensor, return_lse: bool, return_aux: Any, max_scores: Tensor | None = None) -> Any:
    """Returns out, or (out, lse), or (out, AuxOutput), as torch's function does for `return_lse` and `return_aux`."""
    if return_aux is not None:
        from torch.nn.attention.flex_attention import AuxOutput

        return out, AuxOutput(lse=lse if return_aux.lse else None, max_scores=max_scores)
    return (out, lse) if return_lse else out


def attend(
    query: Tensor, key: Tensor, value: Tensor, scores: Scores, score_mod: ScoreMod | None, mask: BlockMask | None, scale: float | None
) -> tuple[Tensor, Tensor]:
    """Returns out (batch, heads, queries, headdim) and lse (batch, heads, queries), -inf for a query without a visible key.

    Raises Unrecognized before anything runs if the operator does not compute the call.

    Args:
        scores, score_mod: what `recognize` returned; scores.options(scale) gives the operator's softmax_scale and softcap.
        mask: the packed block mask; None: it hides nothing.
        scale: of the products; None: headdim ** -0.5.
    """
    options: dict[str, Any] = scores.options(query.shape[-1] ** -0.5 if scale is None else scale)
    # a function that only hides elements becomes a block mask (beside another mask, or while tracing: a bias), one that adds a term ALiBi's
    # slopes or a bias
    if score_mod is not None and scores.bias is None and scores.hides is not None and mask is None and not tracing():
        mask = _hidden(query, key, score_mod, scores.hides)
    elif score_mod is not None and (scores.bias is not None or scores.hides is not None):
        slopes = _slopes(query, key, score_mod, scores, mask)
        if slopes is not None:
            options["alibi_slopes"] = slopes
        else:
            options["attn_bias"] = _bias(query, key, score_mod, scores, mask)
            mask = None
    if mask is not None:
        options |= mask.options()
    batch = query.shape[0]
    if key.shape[0] != batch:
        key, value = (t.expand(batch, *t.shape[1:]) for t in (key, value))
    operands = (with_unit_stride(t).transpose(1, 2) for t in (query, key, value))
    try:
        out, lse, _rng_state = torch.ops.volta_fa.fwd(*operands, **options)
    except NotImplementedError as error:
        raise Unrecognized(str(error)) from error
    return _in_order_of(query, out.transpose(1, 2)), torch.where(lse == math.inf, -math.inf, lse)


def _in_order_of(query: Tensor, out: Tensor) -> Tensor:
    """Returns out with batch, heads and queries in memory in the query's order, as torch's function does."""
    order = [*sorted(range(3), key=query.stride, reverse=True), 3]
    ordered = out.permute(order)
    return out if ordered.is_contiguous() else ordered.contiguous().permute([order.index(d) for d in range(4)])


def check_operands(query: Tensor, key: Tensor, value: Tensor) -> None:
    """Raises Unrecognized for tensors that the operators do not take."""
    if query.device.type not in ("cpu", "cuda"):
        raise Unrecognized(f"tensors on {query.device.type}")
    if not takes_dtype(query) or not query.dtype == key.dtype == value.dtype:
        names = ", ".join(sorted({str(t.dtype).removeprefix("torch.") for t in (query, key, value)}))
        raise Unrecognized(f"{names} on {query.device.type}")
    if max(query.shape[-1], value.shape[-1]) > max_headdim(query.device):
        raise Unrecognized(f"headdim {max(query.shape[-1], value.shape[-1])}")
    if 0 in query.shape or 0 in key.shape or value.shape[-1] == 0:
        raise Unrecognized("an empty tensor")


def block_mask_of(block_mask: Any, query: Tensor, key: Tensor) -> BlockMask | None:
    """Returns the packed mask of a call, or None if block_mask hides nothing."""
    if block_mask is None or isinstance(block_mask, BlockMask):
        return block_mask
    if is_empty(block_mask):
        return None
    return kept.block_mask_of(source_of(block_mask, query.shape[0], query.shape[1], (query.shape[2], key.shape[2])))


def tracing() -> bool:
    """Returns whether torch.compile is tracing, so that tensors have no values."""
    return torch.compiler.is_compiling() or torch._guards.detect_fake_mode() is not None


def _hidden(query: Tensor, key: Tensor, score_mod: ScoreMod, hides: tuple[bool, ...]) -> BlockMask:
    """Returns the block mask of a score function that only hides elements. `hides`: the indices that decide, as in `Scores`."""
    entries, heads = (n if used else 1 for n, used in zip(query.shape, hides[:2]))
    zero = torch.zeros((), device=query.device)

    def shown(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return score_mod(zero, b, h, q, kv) != -math.inf

    mask_mod = recorded(shown, query.device)
    return kept.block_mask_of(Source(mask_mod, (query.shape[2], key.shape[2]), entries, heads, query.device))


def _slopes(query: Tensor, key: Tensor, score_mod: ScoreMod, scores: Scores, mask: BlockMask | None) -> Tensor | None:
    """Returns ALiBi's slopes, (heads) or (batch, heads), or None if the added term is something else."""
    learned = torch.is_grad_enabled() and scores.needs_gradient
    if scores.alibi is None or learned or query.shape[2] != key.shape[2]:
        return None
    if scores.alibi == "relative" and (mask is None or tracing() or not kept.is_causal(mask)):
        return None  # the operators subtract slope * |distance|, which is a signed term only if no key comes after its query
    assert scores.bias is not None
    batch, heads = query.shape[:2]
    entries: Tensor | int = torch.arange(batch, device=query.device) if scores.bias[0] else 0
    with torch.no_grad():  # the slope is the added term of query 0 and key 1, whose distance is 1
        places = (entries, torch.arange(heads, device=query.device), 0, 1)
        step = values(score_mod, places, torch.float32, query.device)[..., 0, 0].float()
    slopes = step if scores.alibi == "relative" else -step  # the operators subtract slope * distance
    return slopes.contiguous() if scores.bias[0] else slopes[0].contiguous()


def _bias(query: Tensor, key: Tensor, score_mod: ScoreMod, scores: Scores, mask: BlockMask | None) -> Tensor:
    """Returns what score_mod adds, and -inf where it or the mask hides, as attn_bias. Dimensions that none depends on have size 1. Raises
    Unrecognized for a bias of more than MAX_BIAS_BYTES."""
    sizes = (*query.shape[:3], key.shape[2])
    none = (False,) * 4
    of_mask = none if mask is None else (mask.shape[0] > 1, mask.shape[1] > 1, True, True)
    used = [any(parts) for parts in zip(scores.bias or none, scores.hides or none, of_mask)]
    dtype = query.dtype if query.dtype == torch.float64 else torch.float32
    shape = [size if u else 1 for u, size in zip(used, sizes)]
    if math.prod(shape) * dtype.itemsize > MAX_BIAS_BYTES:
        raise Unrecognized(f"an added term of more than {MAX_BIAS_BYTES >> 20} MiB")
    places = tuple(torch.arange(size, device=query.device) if u else 0 for u, size in zip(used, sizes))
    bias = values(score_mod, places, dtype, query.device).to(dtype)
    if mask is not None:
        seen = mask.dense()
        entry, head = (torch.arange(size, device=query.device) % own for size, own in zip(shape[:2], seen.shape))
        bias = bias.masked_fill(~seen[entry[:, None], head], -math.inf)
    return bias


def check_arguments(query: Tensor, key: Tensor, value: Tensor, block_mask: Any, enable_gqa: bool) -> None:
    """Raises ValueError for arguments that torch rejects too."""

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
    if block_mask is not None and not isinstance(block_mask, BlockMask) and not hasattr(block_mask, "BLOCK_SIZE"):
        expected = "a block mask: torch's create_block_mask and volta_fa.BlockMask.from_mask_mod make one of a function"
        raise wrong("block_mask", f"a {type(block_mask).__name__}", expected)
    if block_mask is None or (not isinstance(block_mask, BlockMask) and is_empty(block_mask)):
        return
    lengths, given = (query.shape[2], key.shape[2]), tuple(block_mask.shape[-2:])
    # torch makes such blocks for "no mask": one block of NO_BLOCKS (2^30) or more tokens, for any lengths
    no_blocks = not isinstance(block_mask, BlockMask) and min(block_mask.BLOCK_SIZE) >= NO_BLOCKS
    if given != lengths and not no_blocks:
        raise wrong("block_mask", f"lengths {given}", f"{lengths}: make a block mask of these lengths")
    device = block_mask.device if isinstance(block_mask, BlockMask) else block_mask.kv_num_blocks.device
    if device != query.device:
        raise wrong("block_mask", f"it on {device}", f"query's device, {query.device}")
