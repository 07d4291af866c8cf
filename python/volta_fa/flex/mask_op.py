"""Packs torch's mask inside compiled programs, by an operator, because the number of tiles is known only when it runs.

The operator gets the mask function as source text, so programs in torch.compile's caches on disk have it too.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, fx

from ..block_mask import BlockMask, kept
from ..block_mask.cells import grid_shape
from ..block_mask.recording import recorded
from ..block_mask.torch_mask import NO_BLOCKS, expanded, is_trivial, made_of
from .score_mod import Unrecognized

#: The dispatcher's state outside of operators: with the state inside of one under a mode, as compiled programs run it, vmap fails.
_OUTSIDE = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()


def pack_mask(block_mask: tuple[Any, ...], buffers: tuple[Any, ...], query: Tensor, key: Tensor) -> BlockMask | None:
    """Returns the mask of torch's operator, or None where it hides nothing.

    Args:
        block_mask: torch's tuple: the lengths, the lists, the block sizes and the graph of the mask function. Releases differ between
            the lists.
        buffers: what the mask function captures.
    """
    fields, mask_mod = block_mask[2:6], block_mask[-1]
    block_size = (int(block_mask[-3]), int(block_mask[-2]))
    program = _program(mask_mod, buffers)
    large = min(block_size) >= NO_BLOCKS
    if large and program == "":
        return None
    lengths = (query.shape[2], key.shape[2])
    # not int(): lengths may be unknown here, and a program of one length would be compiled for each
    if not large and (block_mask[0] != lengths[0] or block_mask[1] != lengths[1]):
        raise Unrecognized("a block mask of other lengths")
    users = [len(node.users) for node in mask_mod.graph.nodes if node.op == "placeholder"][:2] if program else (0, 0)
    batch, heads = expanded(fields[0].shape, query.shape[0], query.shape[1], (users[0] > 0, users[1] > 0))
    _allow_unknown_sizes(query)
    tensors, numbers = ([b for b in buffers if isinstance(b, Tensor) == wanted] for wanted in (True, False))
    captured = tensors, numbers, [isinstance(b, Tensor) for b in buffers]
    lists = torch.ops.volta_fa_flex.pack_mask(*fields, *captured, program, list(block_size), list(lengths), batch, heads)
    return BlockMask(lengths, *lists)


def _allow_unknown_sizes(query: Tensor) -> None:
    """Lets the operator's number of tiles stay unknown in the program that torch.compile traces. With fullgraph=True torch allows that
    itself; else the program would break in parts here."""
    mode = torch._guards.detect_fake_mode((query,))
    shapes = None if mode is None else mode.shape_env
    if shapes is not None:
        shapes.settings = replace(shapes.settings, allow_dynamic_output_shape_ops=True)


def _program(mask_mod: Any, buffers: tuple[Any, ...]) -> str:
    """Returns a mask function as source text, "" for one that hides nothing."""
    if not isinstance(mask_mod, fx.GraphModule):
        if is_trivial(mask_mod):
            return ""
        raise Unrecognized("a mask_mod without a graph")
    if not all(isinstance(b, (Tensor, int, torch.SymInt)) for b in buffers):
        raise Unrecognized("a mask_mod that captures a fraction of unknown value")
    nodes = [node for node in mask_mod.graph.nodes if node.op not in ("placeholder", "output")]
    if any(node.op in ("get_attr", "call_module") for node in nodes):
        raise Unrecognized("a mask_mod with constants in memory")
    if len(nodes) == 1 and _is_all_true(nodes[0]):
        return ""
    return str(mask_mod.graph.python_code("self").src)


def _is_all_true(node: fx.Node) -> bool:
    """Returns whether a node makes a tensor of True, as torch's `noop_mask` does."""
    return "ones" in str(node.target) or ("full" in str(node.target) and len(node.args) > 1 and node.args[1] is True)


@cache
def _function(program: str) -> Callable[..., Tensor]:
    """Returns the function of a program."""
    scope: dict[str, Any] = {"torch": torch, "device": torch.device, "inf": math.inf, "nan": math.nan}
    exec(program, scope)
    forward = scope["forward"]

    def mask_mod(*args: Any) -> Tensor:
        result = forward(None, *args)
        return result[0] if isinstance(result, (tuple, list)) else result

    return mask_mod


@torch.library.custom_op("volta_fa_flex::pack_mask", mutates_args=())
def _pack_mask(
    counts: Tensor,
    indices: Tensor,
    full_counts: Tensor | None,
    full_indices: Tensor | None,
    tensors: list[Tensor],
    numbers: list[int],
    are_tensors: list[bool],
    program: str,
    block_size: list[int],
    seq_lengths: list[int],
    batch: int,
    heads: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns the tensors of a `BlockMask`: lists and bits, and both transposed.

    Args:
        tensors, numbers: what the mask function captures. are_tensors has their order.
    """
    rest = {True: iter(tensors), False: iter(numbers)}
    captured = [next(rest[is_tensor]) for is_tensor in are_tensors]
    function = _function(program) if program else None

    def mask_mod(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        assert function is not None
        return function(b, h, q, kv, *captured)

    with torch._C._ForceDispatchKeyGuard(*_OUTSIDE):
        read = recorded(mask_mod, counts.device) if program else None
        sizes = (block_size[0], block_size[1]), (seq_lengths[0], seq_lengths[1])
        mask = kept.block_mask_of(made_of((counts, indices, full_counts, full_indices), read, *sizes, batch, heads))
    # compiled programs may reuse the memory of what an operator returns
    none = torch.zeros(1, 256, dtype=torch.int32, device=counts.device)
    lists, bits, lists_t, bits_t = (
        none.clone() if t is None else t.clone() for t in (mask.block_lists, mask.block_bits, mask.block_lists_t, mask.block_bits_t)
    )
    return lists, bits, lists_t, bits_t


@_pack_mask.register_fake
def _(
    counts: Tensor,
    indices: Tensor,
    full_counts: Tensor | None,
    full_indices: Tensor | None,
    tensors: list[Tensor],
    numbers: list[int],
    are_tensors: list[bool],
    program: str,
    block_size: list[int],
    seq_lengths: list[int],
    batch: int,
    heads: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rows, columns = grid_shape(seq_lengths[0], seq_lengths[1])
    made = []
    for of_rows, width in ((rows, columns), (columns, rows)):
        made.append(counts.new_empty((batch, heads, -(-of_rows // 2), 4 + width), dtype=torch.int32))
        made.append(counts.new_empty((torch.library.get_ctx().new_dynamic_size(), 256), dtype=torch.int32))
    lists, bits, lists_t, bits_t = made
    return lists, bits, lists_t, bits_t


#: Changes with the operators' arguments. torch.compile's caches on disk hold programs that call the operators, under keys without them.
INTERFACE = hashlib.sha256(
    f"{torch.ops.volta_fa_flex.pack_mask.default._schema}{torch.ops.volta_fa.fwd.default._schema}".encode()
).hexdigest()
