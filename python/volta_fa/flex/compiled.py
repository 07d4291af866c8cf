"""FlexAttention in torch.compile's programs.

Dynamo, the front end of torch.compile, turns a call into torch's higher-order operator `flex_attention`, with graphs of the score and mask
functions. Importing this module replaces that operator's kernel for autograd. The new one calls volta_fa's operators, which every backend
of torch.compile then traces. It runs torch's kernel if volta_fa has none, and for calls of torch's own `flex_attention` on devices that
`enable_flex` has not turned on (`attention.devices`)."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, fx

from ..block_mask import BlockMask, kept  # kept: a cache of packed masks
from ..block_mask.cells import grid_shape  # rows and columns of cells, 64 queries by 64 keys
from ..block_mask.recording import recorded  # a mask function as a list of operations, if possible
from ..block_mask.source import NO_BLOCKS, Source, expanded, is_trivial  # Source: a mask before it is packed
from . import attention
from .attend import attend, check_arguments, check_operands, results  # attend: by volta_fa::fwd; checks; results: as torch returns them
from .score_mod import Scores, Unrecognized, recognize  # recognize: (Scores, function), attend's arguments, or raises Unrecognized

#: The kernel option of torch's operator that marks calls of `volta_fa.flex_attention`. Its value is INTERFACE: a hash of the operators'
#: signatures, defined below after the operator `pack_mask`. torch.compile's caches on disk have it in their keys.
_MARK = "VOLTA_FA"

#: torch's own kernel of the operator for autograd.
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
    """Runs in place of `flex_attention` while dynamo traces it: makes the call of torch's operator, marked. The arguments are the same."""
    from torch._higher_order_ops.flex_attention import flex_attention as operator

    if not enable_gqa and query.shape[1] != key.shape[1]:
        raise ValueError("volta_fa.flex_attention: key: got more or fewer heads than query, expected as many: enable_gqa=True allows fewer")
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    if isinstance(block_mask, BlockMask):
        check_arguments(query, key, value, block_mask, enable_gqa)
        if score_mod is not None or (return_aux is not None and return_aux.max_scores):
            raise NotImplementedError("volta_fa.flex_attention: block_mask: got volta_fa.BlockMask, expected torch's in compiled code")
        out, lse = attend(query, key, value, Scores(), score_mod=None, mask=block_mask, scale=scale)
        return results(out, lse, return_lse, return_aux)
    if score_mod is None:
        score_mod = _identity
    if block_mask is None:
        block_mask = _no_mask(query)
    wants_lse = return_lse or (return_aux is not None and return_aux.lse)
    wants_maxima = return_aux is not None and return_aux.max_scores
    options = {} if kernel_options is None else dict(kernel_options)
    options |= {_MARK: INTERFACE, "OUTPUT_LOGSUMEXP": True, "OUTPUT_MAX": wants_maxima}
    # the defaults that torch's function sets before it calls its operator
    for name, default in (("PRESCALE_QK", False), ("ROWS_GUARANTEED_SAFE", False), ("BLOCKS_ARE_CONTIGUOUS", False), ("WRITE_DQ", True)):
        options.setdefault(name, default)
    out, lse, *maxima = operator(query, key, value, score_mod, block_mask.as_tuple(), scale, options)
    # the operator returns lse and maxima to base 2
    lse = lse * math.log(2.0) if wants_lse else lse
    return results(out, lse, return_lse, return_aux, maxima[0] * math.log(2.0) if wants_maxima else None)


def _install() -> None:
    """Replaces the kernel for autograd of torch's operator by `_kernel`."""
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
    """Computes a call of torch's operator by volta_fa if it is marked or its device is on, else by torch's kernel. The last two arguments
    are what the graphs of score_mod and mask_mod capture. Returns out and lse (to base 2), in later releases maxima too."""
    options = dict(kernel_options)
    if options.pop(_MARK, False) or query.device in attention.devices:
        try:
            if options.get("OUTPUT_MAX"):
                raise Unrecognized("max_scores")
            check_operands(query, key, value)
            # symbolic ints become constants, because vmap takes none for the score function's scalars
            captured = tuple(map(_constant, score_mod_other_buffers))
            recognized = recognize(score_mod, captured, query.dtype, query.device)
            mask = None if _finds_shapes(query) else pack_mask(block_mask, mask_mod_other_buffers, query, key)
            out, lse = attend(query, key, value, *recognized, mask, scale)
            # to base 2 too, and in later releases with the maxima, which are not asked for
            return (out, lse / math.log(2.0), lse.new_empty(0))[: _results_of_torch()]
        except Unrecognized as unrecognized:
            attention.log_fallback(str(unrecognized))
        if "_validate_device" in attention.replaced:  # enable_flex has disabled torch's check of the device
            attention.original("_validate_device")(query, key, value)
    assert _torch_kernel is not None
    arguments = (query, key, value, score_mod, block_mask, scale, options, score_mod_other_buffers, mask_mod_other_buffers)
    return _torch_kernel(*arguments)


def _constant(x: Any) -> Any:
    """Returns the value of a symbolic int, and anything else itself. Raises Unrecognized for an int without a known value."""
    if not isinstance(x, torch.SymInt):
        return x
    try:
        return int(x)
    except RuntimeError as error:  # its value comes from a tensor, so it is unknown while tracing
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


def _no_mask(query: Tensor) -> Any:
    """Returns torch's BlockMask of one block for all lengths (block size NO_BLOCKS), which hides nothing."""
    from torch.nn.attention.flex_attention import BlockMask as TorchBlockMask

    counts = torch.ones([1, 1, 1], dtype=torch.int32, device=query.device)
    indices = torch.zeros([1, 1, 1, 1], dtype=torch.int32, device=query.device)
    return TorchBlockMask.from_kv_blocks(counts, indices, BLOCK_SIZE=NO_BLOCKS, seq_lengths=(1, 1))


def _identity(score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return score


# ---- block masks inside compiled programs --------------------------------------------------------------------------
#
# Packing is an operator, `volta_fa_flex::pack_mask`, because the number of tiles (128 by 64 elements, some of them hidden) is known only
# when the program runs. It gets the mask function as source text, so programs in torch.compile's caches on disk have it too.

#: torch's dispatcher state at import, outside of operators. Compiled programs run the operator in a state in which vmap fails.
_OUTSIDE = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()


def pack_mask(block_mask: tuple[Any, ...], buffers: tuple[Any, ...], query: Tensor, key: Tensor) -> BlockMask | None:
    """Returns the packed mask of torch's operator, or None if it hides nothing.

    Args:
        block_mask: torch's tuple: the lengths, four lists, others that differ between releases, two block sizes, and the graph of the
            mask function.
        buffers: what the mask function captures.
    """
    fields, mask_mod = block_mask[2:6], block_mask[-1]
    block_size = (int(block_mask[-3]), int(block_mask[-2]))
    program = _program(mask_mod, buffers)
    large = min(block_size) >= NO_BLOCKS  # one block for all lengths, as torch makes for calls without a mask
    if large and program == "":
        return None
    lengths = (query.shape[2], key.shape[2])
    # not int(): lengths may be symbolic, and int() would compile a program for each length
    if not large and (block_mask[0] != lengths[0] or block_mask[1] != lengths[1]):
        raise Unrecognized("a block mask of other lengths")
    # how often the graph uses its first two arguments, batch entry and head
    users = [len(node.users) for node in mask_mod.graph.nodes if node.op == "placeholder"][:2] if program else (0, 0)
    batch, heads = expanded(fields[0].shape, query.shape[0], query.shape[1], (users[0] > 0, users[1] > 0))
    _allow_unknown_sizes(query)
    tensors, numbers = ([b for b in buffers if isinstance(b, Tensor) == wanted] for wanted in (True, False))
    captured = tensors, numbers, [isinstance(b, Tensor) for b in buffers]
    lists = torch.ops.volta_fa_flex.pack_mask(*fields, *captured, program, list(block_size), list(lengths), batch, heads)
    return BlockMask(lengths, *lists)


def _allow_unknown_sizes(query: Tensor) -> None:
    """Lets the operator's number of tiles stay unknown while torch.compile traces. With fullgraph=True torch allows that itself; otherwise
    it would break the program into parts here."""
    mode = torch._guards.detect_fake_mode((query,))
    shapes = None if mode is None else mode.shape_env
    if shapes is not None:
        shapes.settings = replace(shapes.settings, allow_dynamic_output_shape_ops=True)


def _program(mask_mod: Any, buffers: tuple[Any, ...]) -> str:
    """Returns a mask function as source text, "" for one that hides nothing. Raises Unrecognized if it has none."""
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
    """Returns the mask function of a program of `_program`."""
    scope: dict[str, Any] = {"torch": torch, "device": torch.device, "inf": math.inf, "nan": math.nan}
    exec(program, scope)
    forward = scope["forward"]

    def mask_mod(*args: Any) -> Tensor:
        result = forward(None, *args)  # None: the program's parameter self
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
    `tensors`, `numbers`: what the mask function captures; are_tensors says in which order. `program`: of `_program`."""
    rest = {True: iter(tensors), False: iter(numbers)}
    captured = [next(rest[is_tensor]) for is_tensor in are_tensors]
    function = _function(program) if program else None

    def mask_mod(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        assert function is not None
        return function(b, h, q, kv, *captured)

    with torch._C._ForceDispatchKeyGuard(*_OUTSIDE):
        read = recorded(mask_mod, counts.device) if program else None
        lists, lengths = (counts, indices, full_counts, full_indices), (seq_lengths[0], seq_lengths[1])
        source = Source(read, lengths, batch, heads, counts.device, lists, (block_size[0], block_size[1]))
        mask = kept.block_mask_of(source)

    def copied(t: Tensor | None) -> Tensor:
        """Returns a copy, because compiled programs may reuse the memory of results, and the cache owns the mask's."""
        return torch.zeros(1, 256, dtype=torch.int32, device=counts.device) if t is None else t.clone()

    return copied(mask.block_lists), copied(mask.block_bits), copied(mask.block_lists_t), copied(mask.block_bits_t)


@_pack_mask.register_fake
def _(counts: Tensor, *others: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    *_rest, seq_lengths, batch, heads = others
    rows, columns = grid_shape(*seq_lengths)
    made = []
    # a list is for two rows of cells: four numbers, then room for an entry for each column of cells
    for of_rows, width in ((rows, columns), (columns, rows)):
        made.append(counts.new_empty((batch, heads, -(-of_rows // 2), 4 + width), dtype=torch.int32))
        made.append(counts.new_empty((torch.library.get_ctx().new_dynamic_size(), 256), dtype=torch.int32))  # 256 words of a tile
    lists, bits, lists_t, bits_t = made
    return lists, bits, lists_t, bits_t


#: A hash of the operators' signatures. As the value of `_MARK` it is part of the keys of torch.compile's caches on disk, so that programs
#: that call operators with other arguments are not found there.
INTERFACE = hashlib.sha256(
    f"{torch.ops.volta_fa_flex.pack_mask.default._schema}{torch.ops.volta_fa.fwd.default._schema}".encode()
).hexdigest()

# at import, because dynamo runs imports for real, while it would only trace a call
_install()
