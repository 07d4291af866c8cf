"""Masks that are kept, and found again by the values that they are made of.

Memory that a tensor shares can change without a trace. So each call compares the bytes of all tensors that decide about a mask, and
waits for the device once. A mask function with a Recording has run once, and its operations, constants and tensors are known. Any other
function is evaluated at each call.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..errors import bad_argument
from .mask import BlockMask
from .recording import Recording, has_plain_values
from .source import Source

#: Masks that are kept, at most: models have one for each kind of layer.
MAX_MASKS = 8
#: Memory of the kept masks in bytes, at most, but for the last one used.
MAX_BYTES = 256 << 20


@dataclass
class _Entry:
    key: tuple[Any, ...]
    values: Tensor
    mask: BlockMask
    is_causal: bool | None = None


_entries: list[_Entry] = []  # the last one used first
_lock = threading.Lock()


def block_mask_of(source: Source) -> BlockMask:
    """Returns the mask of a source. It belongs to this module: a caller that hands it out copies it."""
    if source.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        expected = "volta_fa.BlockMask in a CUDA graph, because torch's is compared at each call: BlockMask.from_torch makes one before"
        raise bad_argument("block_mask", "torch's BlockMask", expected, op="flex_attention", error=RuntimeError)
    # what is kept may take part in training later
    with torch.inference_mode(False), torch.no_grad():
        if not _is_known(source):
            return BlockMask._of(source)
        key, values = _key(source), _bytes(source.tensors)
        entry = next((e for e in list(_entries) if e.key == key and torch.equal(e.values, values)), None)
        if entry is None:
            entry = _Entry(key, values, BlockMask._of(source.with_tensors(_copies(source.tensors, values))))
    with _lock:
        _entries[:] = [entry, *(e for e in _entries if e is not entry)][:MAX_MASKS]
        while len(_entries) > 1 and sum(e.mask.nbytes for e in _entries) > MAX_BYTES:
            _entries.pop()
    return entry.mask


def is_causal(mask: BlockMask) -> bool:
    """Returns `mask.is_causal()`, at no cost for a mask that is kept."""
    entry = next((e for e in list(_entries) if e.mask is mask), None)
    if entry is None:
        return mask.is_causal()
    if entry.is_causal is None:
        entry.is_causal = mask.is_causal()
    return entry.is_causal


def forget() -> None:
    """Drops all kept masks."""
    with _lock:
        _entries.clear()


def _is_known(source: Source) -> bool:
    """Returns whether the values of tensors and the key decide about the mask."""
    is_known = source.mask_mod is None or isinstance(source.mask_mod, Recording)
    return is_known and all(has_plain_values(t, source.device) for t in source.tensors)


def _key(source: Source) -> tuple[Any, ...]:
    """Returns what decides about a mask, but for the values of tensors, and the stream that made it."""
    shapes = tuple((t.shape, t.dtype) for t in source.tensors)
    stream = torch.cuda.current_stream(source.device) if source.device.type == "cuda" else None
    function = source.mask_mod.key if isinstance(source.mask_mod, Recording) else None
    sizes = (source.seq_lengths, source.batch, source.heads, source.block_size)
    return (sizes, source.device, stream, function, tuple(t is None for t in source.lists), shapes)


def _order(tensors: tuple[Tensor, ...]) -> list[int]:
    """Returns the tensors' order in memory: with wide elements first, all elements are aligned."""
    return sorted(range(len(tensors)), key=lambda number: -tensors[number].itemsize)


def _bytes(tensors: tuple[Tensor, ...]) -> Tensor:
    """Returns the bytes of all tensors, uint8, as a copy."""
    if not tensors:
        return torch.empty(0, dtype=torch.uint8)
    return torch.cat([tensors[number].reshape(-1).view(torch.uint8) for number in _order(tensors)])


def _copies(tensors: tuple[Tensor, ...], values: Tensor) -> tuple[Tensor, ...]:
    """Returns the tensors that `_bytes` copied."""
    found = list(tensors)
    for number, part in zip(_order(tensors), values.split([tensors[number].nbytes for number in _order(tensors)]) if tensors else ()):
        found[number] = part.view(tensors[number].dtype).view(tensors[number].shape)
    return tuple(found)
