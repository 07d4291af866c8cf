"""Block-sparse masks: which blocks of the score matrix have visible elements, and one bit per element for partly visible blocks.

Users make a `BlockMask` and pass it to `volta_fa.flex_attention`, or its tensors to the operators. Modules, from the user's side inward:

- `mask`: `BlockMask`, the packed mask: for each block row a list of key blocks, and bits.
- `source`: `Source`, what a mask is made from: a mask function (`mask_mod`), torch's lists of blocks, or both. It also makes one from
  `torch.nn.attention.flex_attention.BlockMask` of torch 2.7 and later.
- `kept`: a cache of packed masks, for torch's masks that each call of `flex_attention` gets anew.
- `cells`: states of cells, squares of 64 queries by 64 keys: absent, unknown (not evaluated yet, or partly visible) or full.
- `elements`: evaluates the mask function for the elements of unknown cells.
- `recording`: records a mask function's operations, which run on whole cells and show whether two functions compute the same.
- `packing`: packs cells into the operators' lists and bits."""

from .mask import BlockMask

__all__ = ["BlockMask"]
