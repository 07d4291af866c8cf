"""DTensor's rules for our operators, loaded when its first tensor meets one: importing torch.distributed.tensor takes longer than this
package."""

from __future__ import annotations

import sys

import torch
from torch import Tensor

_library = torch.library.Library("volta_fa", "IMPL")


def _has_rules(t: Tensor) -> bool:
    """What the native library asks about a tensor of a subclass (torch_ops/subclass.cpp)."""
    module = sys.modules.get("torch.distributed.tensor")
    if module is None or not isinstance(t, module.DTensor):
        return False
    try:
        from ..distributed import dtensor

        dtensor.register()
    except (ImportError, AttributeError):
        return False  # a PyTorch whose DTensor is another inside: it says itself that it has no rule
    return True


def register_dtensor_rules() -> None:
    """Once, as the package is imported."""
    _library.impl("_has_rules", _has_rules, "CompositeImplicitAutograd")
