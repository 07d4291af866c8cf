"""Block-sparse masks: which blocks of scores exist, and bits for blocks that exist in part.

- `mask`: `BlockMask`, what users make and the operators take.
- `source`: what a mask is made of: a mask function, lists of blocks.
- `torch_mask`: reads `torch.nn.attention.flex_attention.BlockMask` of torch 2.7 and later.
- `kept`: keeps masks for later calls, by the values that they are made of.
- `cells`: the states of cells of 64 queries and 64 keys: absent, unknown or full.
- `elements`: which elements of unknown cells are visible, by calls of the mask function.
- `recording`: what a mask function computes.
- `packing`: makes the operators' lists and bits from cells.
"""

from .mask import BlockMask

__all__ = ["BlockMask"]
