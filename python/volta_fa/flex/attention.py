"""`volta_fa.flex_attention`: torch's FlexAttention, forward and backward, on `volta_fa::fwd` and `bwd`, or else by torch's own function."""

import functools
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..block_mask import BlockMask
from ..errors import bad_argument
from ..integrations.devices import NO_DEVICES  # of class Devices: a set of devices
from .attend import attend, block_mask_of, check_arguments, check_operands, results  # attend: by volta_fa::fwd; results: as torch's
from .score_mod import ScoreMod, Unrecognized, recognize  # recognize: (Scores, function), attend's next arguments, or raises Unrecognized

#: Devices whose calls of torch's `flex_attention` run on volta_fa. `switch` sets it.
devices = NO_DEVICES
#: torch's own functions that `switch` has replaced in torch's module, by name.
replaced: dict[str, Callable[..., Any]] = {}

_logger = logging.getLogger("volta_fa")
_logged: set[str] = set()  # operations that `log_fallback` has named


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
        query: (batch, heads, queries, headdim); key: (batch or 1, heads or fewer with enable_gqa, keys, headdim); value: as key, with
            its own headdim. float16, bfloat16 or float32; on the CPU also float64.
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
        return original()(
            query, key, value, score_mod, _for_torch(block_mask, unrecognized), scale, enable_gqa, return_lse,
            kernel_options, **({} if return_aux is None else {"return_aux": return_aux}),
        )  # fmt: skip
    return results(out, lse, return_lse, return_aux)


def _run(
    query: Tensor, key: Tensor, value: Tensor, score_mod: ScoreMod | None, block_mask: Any, scale: float | None
) -> tuple[Tensor, Tensor]:
    """Runs the operators. Eager score functions hold their tensors themselves, so nothing is captured: ()."""
    recognized = recognize(score_mod, (), query.dtype, query.device)
    return attend(query, key, value, *recognized, block_mask_of(block_mask, query, key), scale)


@functools.cache
def _untraced() -> Callable[..., tuple[Tensor, Tensor]]:
    """Returns `_run`, disabled for dynamo: where dynamo breaks a program into parts, it does not compile these frames."""
    return torch.compiler.disable(_run)


def original(name: str = "flex_attention") -> Callable[..., Any]:
    """Returns torch's own function of this name, also while `enable_flex` replaces it."""
    import torch.nn.attention.flex_attention as module

    return replaced[name] if name in replaced else getattr(module, name)


def log_fallback(operation: str) -> None:
    """Logs, once for each operation, that torch's own function runs."""
    if operation not in _logged:
        _logged.add(operation)
        _logger.warning("volta_fa.flex_attention: no kernel for %s: torch's own flex_attention runs", operation)


def _for_torch(block_mask: Any, reason: Exception) -> Any:
    """Returns the mask for torch's own function. Raises NotImplementedError for volta_fa.BlockMask, which torch cannot read."""
    if isinstance(block_mask, BlockMask):
        expected = f"torch's BlockMask, which torch's own flex_attention needs: volta_fa has no kernel for {reason}"
        raise bad_argument("block_mask", "volta_fa.BlockMask", expected, op="flex_attention", error=NotImplementedError)
    return block_mask
