"""Caches packed masks for `flex_attention`, which gets torch's BlockMask or a mask function at each call, and packs it only once.

Tensors that decide about a mask may be written in place, through aliases too. So each call compares the bytes of all of them with those at
packing, which waits for the device once. A mask function with a Recording (its operations, constants and tensors) can be compared without
running it. Any other function may depend on anything, so its mask is packed again at each call."""

import threading
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..errors import bad_argument
from .mask import BlockMask
from .recording import Recording, has_plain_values  # a mask function as operations; whether a tensor's bytes are its values
from .source import Source  # what a mask is packed from: mask function, lists of blocks, lengths

#: Maximum number of cached masks: models have one for each kind of layer, rarely more than two.
MAX_MASKS = 8
#: Maximum memory of the cached masks in bytes (256 MiB). The mask used last stays, whatever its size.
MAX_BYTES = 256 << 20


@dataclass
class _Entry:
    """A cached mask."""

    key: tuple[Any, ...]  # of `_key`: all that determines the mask, but for the values of tensors
    values: Tensor  # of `_bytes`: the bytes of these tensors when the mask was packed
    mask: BlockMask
    is_causal: bool | None = None  # None: not computed yet


_entries: list[_Entry] = []  # the last one used first
_lock = threading.Lock()  # for writing _entries; readers take a copy of the list


def block_mask_of(source: Source) -> BlockMask:
    """Returns the packed mask of a source. The cache owns its tensors: callers must not write them or return them to users."""
    if source.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        expected = "volta_fa.BlockMask in a CUDA graph, because torch's is compared at each call: BlockMask.from_torch makes one before"
        raise bad_argument("block_mask", "torch's BlockMask", expected, op="flex_attention", error=RuntimeError)
    # a mask cached under inference_mode could not take part in training later
    with torch.inference_mode(False), torch.no_grad():
        if not _is_known(source):
            return BlockMask._of(source)
        key, values = _key(source), _bytes(source.tensors)
        entry = next((e for e in list(_entries) if e.key == key and torch.equal(e.values, values)), None)
        if entry is None:
            # packs from the copies, so that the mask has the values in the key, even if another thread writes the tensors
            entry = _Entry(key, values, BlockMask._of(source.with_tensors(_copies(source.tensors, values))))
    with _lock:
        _entries[:] = [entry, *(e for e in _entries if e is not entry)][:MAX_MASKS]
        while len(_entries) > 1 and sum(e.mask.nbytes for e in _entries) > MAX_BYTES:
            _entries.pop()
    return entry.mask


def is_causal(mask: BlockMask) -> bool:
    """Returns `mask.is_causal()`, which waits for the device. Remembers the answer if the mask is cached."""
    entry = next((e for e in list(_entries) if e.mask is mask), None)
    if entry is None:
        return mask.is_causal()
    if entry.is_causal is None:
        entry.is_causal = mask.is_causal()
    return entry.is_causal


def forget() -> None:
    """Drops all cached masks. `disable_flex` calls it."""
    with _lock:
        _entries.clear()


def _is_known(source: Source) -> bool:
    """Returns whether the key and the values of the source's tensors determine the mask. If not, it cannot be cached."""
    is_known = source.mask_mod is None or isinstance(source.mask_mod, Recording)
    return is_known and all(has_plain_values(t, source.device) for t in source.tensors)


def _key(source: Source) -> tuple[Any, ...]:
    """Returns everything but the tensors' values that determines a mask. Includes the stream, because another stream would have to wait
    for the one that packed the mask."""
    shapes = tuple((t.shape, t.dtype) for t in source.tensors)
    stream = torch.cuda.current_stream(source.device) if source.device.type == "cuda" else None
    function = source.mask_mod.key if isinstance(source.mask_mod, Recording) else None
    sizes = (source.seq_lengths, source.batch, source.heads, source.block_size)
    return (sizes, source.device, stream, function, tuple(t is None for t in source.lists), shapes)


def _order(tensors: tuple[Tensor, ...]) -> list[int]:
    """Returns the indices of tensors in the order in which `_bytes` joins them: wide elements first, so that all stay aligned."""
    return sorted(range(len(tensors)), key=lambda number: -tensors[number].itemsize)


def _bytes(tensors: tuple[Tensor, ...]) -> Tensor:
    """Returns a copy of the bytes of all tensors, joined, uint8."""
    if not tensors:
        return torch.empty(0, dtype=torch.uint8)
    return torch.cat([tensors[number].reshape(-1).view(torch.uint8) for number in _order(tensors)])


def _copies(tensors: tuple[Tensor, ...], values: Tensor) -> tuple[Tensor, ...]:
    """Returns tensors like `tensors` that are views of `values`, the copy of their bytes that `_bytes` made."""
    found, order = list(tensors), _order(tensors)
    for number, part in zip(order, values.split([tensors[number].nbytes for number in order]) if tensors else ()):
        found[number] = part.view(tensors[number].dtype).view(tensors[number].shape)
    return tuple(found)
