"""FlexAttention in torch.compile's programs.

Dynamo turns a call into torch's operator `flex_attention`, with graphs of the score and mask functions. Importing this module
replaces the operator's kernel for autograd. The new one calls the operators of volta_fa, which every backend of torch.compile then
traces. For other calls it runs torch's kernel.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..block_mask import BlockMask
from ..block_mask.torch_mask import NO_BLOCKS
from .attend import attend, check_arguments, check_operands, results
from .mask_op import INTERFACE, pack_mask
from .routing import log_fallback, original, replaced, serves
from .score_mod import Scores, Unrecognized, recognize

#: The option of torch's operator that marks calls of `volta_fa.flex_attention`. Its value is part of the key of torch.compile's caches.
_MARK = "VOLTA_FA"

_torch_kernel: Callable[..., Any] | None = None


def traced(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Any,
    block_mask: Any,
    scale: float | None,
    enable_gqa: bool,
    return_lse: bool,
    kernel_options: dict[str, Any] | None,
    return_aux: Any,
) -> Any:
    """Runs in place of `flex_attention` where dynamo traces it."""
    from torch._higher_order_ops.flex_attention import flex_attention as operator

    if not enable_gqa and query.shape[1] != key.shape[1]:
        raise ValueError("volta_fa.flex_attention: key: got fewer heads than query, expected as many: enable_gqa=True allows fewer")
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    if isinstance(block_mask, BlockMask):
        check_arguments(query, key, value, block_mask, enable_gqa)
        if score_mod is not None or (return_aux is not None and return_aux.max_scores):
            raise NotImplementedError("volta_fa.flex_attention: block_mask: got volta_fa.BlockMask, expected torch's in compiled code")
        out, lse = _without_functions(query, key, value, block_mask, scale)
        return results(out, lse, return_lse, return_aux)
    if score_mod is None:
        score_mod = _identity
    if block_mask is None:
        block_mask = _no_mask(query)
    wanted = return_lse or (return_aux is not None and return_aux.lse)
    max_scores = return_aux is not None and return_aux.max_scores
    options = {} if kernel_options is None else dict(kernel_options)
    options |= {_MARK: INTERFACE, "OUTPUT_LOGSUMEXP": True, "OUTPUT_MAX": max_scores}
    for name, default in (("PRESCALE_QK", False), ("ROWS_GUARANTEED_SAFE", False), ("BLOCKS_ARE_CONTIGUOUS", False), ("WRITE_DQ", True)):
        options.setdefault(name, default)
    result = operator(query, key, value, score_mod, block_mask.as_tuple(), scale, options)
    lse = result[1] * math.log(2.0) if wanted else result[1]
    if return_aux is not None:
        from torch.nn.attention.flex_attention import AuxOutput

        return result[0], AuxOutput(lse=lse if wanted else None, max_scores=result[2] * math.log(2.0) if max_scores else None)
    return (result[0], lse) if return_lse else result[0]


def _install() -> None:
    """Replaces the kernel for autograd of torch's operator. It runs torch's own unless a call is marked or its device is on."""
    global _torch_kernel
    from torch._C import DispatchKey
    from torch._higher_order_ops.flex_attention import flex_attention as operator

    _torch_kernel = operator.py_kernels[DispatchKey.Autograd]
    operator.py_kernels[DispatchKey.Autograd] = _kernel
    operator._dispatch_cache.clear()


def _kernel(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Callable[..., Any],
    block_mask: tuple[Any, ...],
    scale: float,
    kernel_options: dict[str, Any],
    score_mod_other_buffers: tuple[Any, ...] = (),
    mask_mod_other_buffers: tuple[Any, ...] = (),
) -> Any:
    options = dict(kernel_options)
    if options.pop(_MARK, False) or serves(query.device):
        try:
            if options.get("OUTPUT_MAX"):
                raise Unrecognized("max_scores")
            check_operands(query, key, value)
            # numbers become constants: the score function's scalars take no symbols
            captured = tuple(map(_constant, score_mod_other_buffers))
            scores, recognized = recognize(score_mod, captured, query.dtype, query.device)
            mask = None if _finds_shapes(query) else pack_mask(block_mask, mask_mod_other_buffers, query, key)
            out, lse = attend(query, key, value, recognized, captured, scores, mask, scale)
            # base 2, and in later releases the maxima
            return (out, lse / math.log(2.0), lse.new_empty(0))[: _results_of_torch()]
        except Unrecognized as unrecognized:
            log_fallback(str(unrecognized))
        if "_validate_device" in replaced:  # by enable_flex
            original("_validate_device")(query, key, value)
    assert _torch_kernel is not None
    arguments = (query, key, value, score_mod, block_mask, scale, options, score_mod_other_buffers, mask_mod_other_buffers)
    return _torch_kernel(*arguments)


def _constant(x: Any) -> Any:
    if not isinstance(x, torch.SymInt):
        return x
    try:
        return int(x)
    except RuntimeError as error:  # a number of a tensor, which no program knows before it runs
        raise Unrecognized("a number that only the running program knows") from error


def _finds_shapes(query: Tensor) -> bool:
    """Returns whether dynamo runs the operator for the shapes of its results alone, which no mask changes."""
    from torch._guards import detect_fake_mode
    from torch.fx.experimental.proxy_tensor import get_proxy_mode

    return detect_fake_mode((query,)) is not None and get_proxy_mode() is None


def _results_of_torch() -> int:
    """Returns how many tensors torch's operator returns: 3 from torch 2.9 on."""
    import torch.nn.attention.flex_attention as module

    return 3 if hasattr(module, "AuxOutput") else 2


def _without_functions(query: Tensor, key: Tensor, value: Tensor, mask: BlockMask, scale: float) -> tuple[Tensor, Tensor]:
    return attend(query, key, value, None, (), Scores(), mask, scale)


def _no_mask(query: Tensor) -> Any:
    from torch.nn.attention.flex_attention import BlockMask as TorchBlockMask

    counts = torch.ones([1, 1, 1], dtype=torch.int32, device=query.device)
    indices = torch.zeros([1, 1, 1, 1], dtype=torch.int32, device=query.device)
    return TorchBlockMask.from_kv_blocks(counts, indices, BLOCK_SIZE=NO_BLOCKS, seq_lengths=(1, 1))


def _identity(score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return score


# dynamo imports modules for real, where it only traces calls
_install()
