"""`BlockMask`: a block-sparse mask, packed into the tensors `block_lists` and `block_bits` of `torch.ops.volta_fa.fwd` and `bwd`. For each
block of 128 queries a list names the blocks of 64 keys with visible scores, fully visible ones (full) and others (partial). A partial block
has a tile of 256 words of 32 bits: one bit for each of its 128 * 64 scores."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..errors import bad_argument
from .cells import ABSENT, CELL, FULL  # a cell is 64 queries (half a block) by 64 keys; ABSENT and FULL: none or all are visible
from .recording import MaskMod, recorded  # recorded: a mask function as a list of operations, if possible
from .source import Source, pack_blocks, source_of  # a mask before packing; packs blocks; reads torch's BlockMask

#: Fields of a BlockMask, and arguments of the operators.
_NAMES = ("block_lists", "block_bits", "block_lists_t", "block_bits_t")


@dataclass(frozen=True, eq=False)
class BlockMask:
    """Which blocks of scores exist (have visible scores), and which elements of partial blocks are visible.

    `volta_fa.flex_attention` takes it as `block_mask`, and the operators take `**mask.options()`. Make one with `from_torch`,
    `from_mask_mod` or `from_blocks`, which raise ValueError for wrong arguments. Packing waits for the device once, or several times if
    it must evaluate more than 32,768 cells of 64 queries by 64 keys. Memory: the lists, and 1 KB of bits for each partial tile of 128 by
    64 scores, of the mask and of its transpose.

    Attributes:
        seq_lengths: number of queries and of keys.
        block_lists, block_bits: int32, the key blocks of each 128 queries. A list is (mask batch, mask heads, block rows, 4 + entries):
            numbers of partial and of full blocks, first tile of bits, launch order, then the blocks. Bits are (tiles, 256) or None.
        block_lists_t, block_bits_t: the same transposed, blocks of 64 queries of each 128 keys, for gradients.
    """

    seq_lengths: tuple[int, int]
    block_lists: Tensor
    block_bits: Tensor | None
    block_lists_t: Tensor
    block_bits_t: Tensor | None

    @classmethod
    def from_torch(cls, block_mask: Any, batch: int = 1, heads: int = 1) -> BlockMask:
        """Returns a `torch.nn.attention.flex_attention.BlockMask` of torch 2.7 or later in this form.

        The result does not follow later changes of torch's object, or of what its mask_mod reads.

        Args:
            batch, heads: sizes of the problem. A mask of fewer entries or heads is enlarged to them if its mask_mod depends on these.
        """
        if not hasattr(block_mask, "BLOCK_SIZE"):
            expected = "a BlockMask of torch: its create_block_mask makes one"
            raise bad_argument("block_mask", f"a {type(block_mask).__name__}", expected, op="BlockMask")
        with torch.no_grad():
            return cls._of(source_of(block_mask, batch, heads))

    @classmethod
    def from_mask_mod(
        cls, mask_mod: MaskMod, B: int | None, H: int | None, Q_LEN: int, KV_LEN: int, device: torch.device | str | None = None
    ) -> BlockMask:
        """Returns the mask of a function. The arguments are those of torch's `create_block_mask`, without its N^2 bytes of memory.

        Args:
            mask_mod: of scalar tensors, batch entry, query head, query and key: True where the query sees the key.
            B, H: batch entries and heads that differ; None: 1.
            device: unless given, the current CUDA device if there is one.
        """
        if not callable(mask_mod):
            raise bad_argument("mask_mod", f"a {type(mask_mod).__name__}", "a function of batch entry, head, query and key", op="BlockMask")
        B, H = (1 if n is None else n for n in (B, H))
        for name, n, least in (("B", B, 1), ("H", H, 1), ("Q_LEN", Q_LEN, 0), ("KV_LEN", KV_LEN, 0)):
            if not isinstance(n, int) or isinstance(n, bool) or n < least:
                raise bad_argument(name, n, f"an integer of at least {least}", op="BlockMask")
        if device is None:
            device = "cuda" if torch.cuda.is_available() else "cpu"
        device = torch.empty(0, device=device).device  # with its index
        return cls._of(Source(recorded(mask_mod, device), (Q_LEN, KV_LEN), B, H, device))

    @classmethod
    def from_blocks(cls, blocks: Tensor, block_size: int | tuple[int, int] = 128, seq_lengths: tuple[int, int] | None = None) -> BlockMask:
        """Returns the mask of blocks that exist entirely or not at all, without a mask function.

        Args:
            blocks: bool, up to four dimensions that end with blocks of queries and blocks of keys; (batch, heads) before them.
            block_size: queries and keys of a block, or one number for both: any of at least 1.
            seq_lengths: numbers of queries and keys, if the last blocks reach past them.
        """
        if blocks.dtype != torch.bool or not 2 <= blocks.dim() <= 4:
            raise bad_argument("blocks", f"{blocks.dtype} of shape {tuple(blocks.shape)}", "bool of 2 to 4 dimensions", op="BlockMask")
        size = (block_size, block_size) if isinstance(block_size, int) else block_size
        if not isinstance(size, tuple) or len(size) != 2 or any(not isinstance(n, int) or n < 1 for n in size):
            raise bad_argument("block_size", block_size, "an integer of at least 1, or two", op="BlockMask")
        lengths = (blocks.shape[-2] * size[0], blocks.shape[-1] * size[1])
        queries, keys = seq_lengths or lengths
        if not (lengths[0] - size[0] < queries <= lengths[0] and lengths[1] - size[1] < keys <= lengths[1]):
            raise bad_argument("seq_lengths", (queries, keys), f"lengths that end in the last blocks, at most {lengths}", op="BlockMask")
        states = blocks.view((1,) * (4 - blocks.dim()) + blocks.shape).to(torch.int8) * (FULL - ABSENT) + ABSENT
        forward, transposed = pack_blocks(states, size, mask_mod=None, seq_lengths=(queries, keys))
        return cls((queries, keys), *forward, *transposed)

    @classmethod
    def _of(cls, source: Source) -> BlockMask:
        forward, transposed = source.packed()
        return cls(source.seq_lengths, *forward, *transposed)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(batch, heads, queries, keys) of the mask. Entry b and head h of a problem use the mask of b % batch and h % heads."""
        batch, heads = self.block_lists.shape[:2]
        return (batch, heads, *self.seq_lengths)

    @property
    def device(self) -> torch.device:
        """The device of the tensors."""
        return self.block_lists.device

    @property
    def nbytes(self) -> int:
        """Memory of the tensors in bytes."""
        return sum(t.nbytes for t in self.options().values() if t is not None)

    def options(self) -> dict[str, Tensor | None]:
        """Returns the keyword arguments of `torch.ops.volta_fa.fwd` and `bwd`."""
        return {name: getattr(self, name) for name in _NAMES}

    def to(self, device: torch.device | str) -> BlockMask:
        """Returns the mask on a device."""
        moved: dict[str, Any] = {name: None if t is None else t.to(device) for name, t in self.options().items()}
        return replace(self, **moved)

    def sparsity(self) -> float:
        """Returns the share of blocks of 128 queries and 64 keys that do not exist, in percent, as torch's method does."""
        row_blocks = self.block_lists.shape[0] * self.block_lists.shape[1] * self.block_lists.shape[2]
        present = int(self.block_lists[..., :2].sum())
        return 100 * (1 - present / max(row_blocks * -(-self.seq_lengths[1] // CELL), 1))

    def dense(self) -> Tensor:
        """Returns the mask unpacked, bool (batch, heads, queries, keys), True where visible. For debugging: it takes N^2 bytes."""
        batch, heads, rows, width = self.block_lists.shape
        lists, device = self.block_lists.long(), self.device
        partial, full, first = (lists[..., i, None] for i in range(3))
        place = torch.arange(width - 4, device=device)  # position in a list, after its header of 4 numbers
        column = torch.where(place < partial + full, lists[..., 4:], width)  # entries that do not count: a last column, cut off below
        # two tiles before those of the mask: 0 for absent blocks, without bits, and 1 for full ones, with all bits
        tile = torch.where(place < partial, first + place + 2, (place < partial + full).long())
        bits = torch.zeros(2, 256, dtype=torch.int32, device=device)
        bits[1] = -1
        bits = bits if self.block_bits is None else torch.cat((bits, self.block_bits))
        grid = torch.zeros(batch, heads, rows, width + 1, dtype=torch.int64, device=device).scatter_(-1, column, tile)
        words = bits[grid].unflatten(-1, (2 * CELL, 2))
        seen = (words[..., None] >> torch.arange(32, device=device)) & 1
        seen = seen.flatten(-2).transpose(3, 4).flatten(4).flatten(2, 3)  # (..., rows, columns, 128, 64) to (..., queries, keys)
        return seen[..., : self.seq_lengths[0], : self.seq_lengths[1]].bool()

    def is_causal(self) -> bool:
        """Returns whether no query i sees a key j > i. It waits for the device."""
        lists = self.block_lists.long()
        place = torch.arange(lists.shape[-1] - 4, device=self.device)  # position in a list, after its header of 4 numbers
        partial, full, first_tile = (lists[..., i, None] for i in range(3))
        first_query = torch.arange(lists.shape[2], device=self.device)[:, None] * 2 * CELL
        first_key = lists[..., 4:] * CELL
        last_key = (first_key + CELL - 1).clamp(max=self.seq_lengths[1] - 1)
        # whether a query sees a later key, in any full block; then, below, in any partial one
        later = ((place >= partial) & (place < partial + full) & (first_query < last_key)).any()
        if self.block_bits is not None:
            chosen = place < partial
            tiles, distances = (first_tile + place).expand_as(chosen)[chosen], (first_query - first_key)[chosen]
            keys_left = self.seq_lengths[1] - first_key[chosen]  # a full cell has bits past the last key
            # of an element, query - key is its block's distance plus this shift, (queries, keys)
            shift = torch.arange(2 * CELL, device=self.device)[:, None] - torch.arange(CELL, device=self.device)
            for begin in range(0, len(tiles), 1024):  # unpacked to bool, 1024 tiles take 8 MiB
                words = self.block_bits[tiles[begin : begin + 1024]].view(-1, 2 * CELL, 2, 1)
                seen = ((words >> torch.arange(32, device=self.device)) & 1).flatten(2).bool()
                exists = torch.arange(CELL, device=self.device) < keys_left[begin : begin + 1024, None, None]
                later = later | (seen & exists & (distances[begin : begin + 1024, None, None] + shift < 0)).any()
        return not bool(later)
