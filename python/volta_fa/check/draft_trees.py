"""Trees of draft tokens: the `tree_mask` of `volta_fa::fwd_kvcache`, and the keys that it shows, by their depths.

A tree is the list of its tokens' parents. A parent comes before its children; -1: the token follows the cache.
"""

from __future__ import annotations

import random

import torch
from torch import Tensor

Tree = list[int]
#: Bit of an int64's sign.
_SIGN = 63


def random_tree(n: int, seed: int) -> Tree:
    """Returns a tree of n tokens with branches and chains."""
    source = random.Random(seed)
    return [source.randrange(-1, i) if source.random() < 0.5 else i - 1 for i in range(n)]


def paths(tree: Tree) -> list[list[int]]:
    """Returns the ancestors of each token and the token itself, the first one first."""
    found: list[list[int]] = []
    for i, parent in enumerate(tree):
        found.append([*(found[parent] if parent >= 0 else []), i])
    return found


def words(tree: Tree) -> list[int]:
    """Returns the number of each token in tree_mask."""
    return [sum(-(1 << _SIGN) if j == _SIGN else 1 << j for j in path) for path in paths(tree)]


def visible(tree: Tree, seqlen_k: int, window_left: int) -> Tensor:
    """Returns which keys each token sees, (tokens, seqlen_k) bool."""
    first = seqlen_k - len(tree)
    own = paths(tree)
    found = torch.zeros(len(tree), seqlen_k, dtype=torch.bool)
    for i, path in enumerate(own):
        for key in range(seqlen_k):
            position = first + len(own[key - first]) - 1 if key >= first else key
            is_near = window_left < 0 or first + len(path) - 1 - position <= window_left
            found[i, key] = is_near and (key < first or key - first in path)
    return found
