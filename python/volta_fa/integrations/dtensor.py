"""DTensor and PyTorch's `context_parallel` on volta_fa.

`import volta_fa` registers a hook, the operator `volta_fa::_has_rules`. When an operator of volta_fa first receives a DTensor, the hook
adds `volta_fa.distributed.dtensor`'s rules to DTensor's table of handlers. A rule computes `volta_fa::fwd` or `bwd` of sharded tensors.
The hook waits until then, because importing torch.distributed.tensor takes longer than importing volta_fa.

If DTensor's internals differ in a torch, no rule is added: DTensor raises its own error, and `enable_sdpa` falls back to PyTorch."""

import sys

import torch
from torch import Tensor

_library = torch.library.Library("volta_fa", "IMPL")
#: The dispatch key of kernels for all tensors.
_KEY = "CompositeImplicitAutograd"


def _has_rules(t: Tensor) -> bool:
    """Returns whether a tensor's subclass has rules: True for a DTensor, after adding them. torch_ops/operators.cpp calls it."""
    module = sys.modules.get("torch.distributed.tensor")
    if module is None or not isinstance(t, module.DTensor):
        return False
    try:
        from ..distributed import dtensor

        dtensor.register()
    except (ImportError, AttributeError):
        return False
    return True


def register_dtensor_rules() -> None:
    """Registers the hook, when the package is imported. A second copy of the package in a process keeps the first one's hook."""
    if not torch._C._dispatch_has_kernel_for_dispatch_key("volta_fa::_has_rules", _KEY):
        _library.impl("_has_rules", _has_rules, _KEY)
