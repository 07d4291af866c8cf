"""Registers `attention` and `mask` with transformers, and makes it refuse them for models that would ignore them.
`import volta_fa.transformers` calls `register`."""

import functools
import inspect
import re
import sys
import warnings
from typing import Any

from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from ...version import __version__
from . import continuous_batching, releases  # releases.VERSION: major and minor number of transformers
from .attention_function import attention
from .mask_function import mask
from .releases import NAME, PAGED_NAME, transformers_version  # PAGED_NAME: what generate_batch sets in place of NAME up to 5.17


@functools.cache
def _has_table_of_names(module: str) -> bool:
    """Returns whether the module takes attention classes from a table of transformers' own names, such as SAM_VISION_ATTENTION_CLASSES."""
    return re.search(r"_CLASSES\[.*_attn_implementation", inspect.getsource(sys.modules[module])) is not None


def register() -> None:
    """Registers the functions, and makes transformers reject the name for models that would ignore it.
    Raises ImportError before transformers 4.57, and warns from 6.0 on."""
    if releases.VERSION < (4, 57):
        raise ImportError(f"volta_fa {__version__} needs transformers 4.57 or 5.x, and {transformers_version} is installed")
    if releases.VERSION >= (6, 0):
        warnings.warn(
            f"volta_fa {__version__} is tested with transformers 4.57 and 5.x, and {transformers_version} is installed", stacklevel=3
        )
    for name in (NAME, PAGED_NAME):
        AttentionInterface.register(name, attention)
        AttentionMaskInterface.register(name, mask)

    # transformers accepts any registered name for any model. A model without the attention interface would run its own attention.
    models: Any = PreTrainedModel  # untyped, because two of its methods are replaced
    original_get = models.get_correct_attn_implementation
    original_can_set = models._can_set_attn_implementation.__func__

    # transformers decides by the source of the class's module. A class from a notebook has none, and a program's module may have
    # attention classes that the model does not use. So the check is of the model in transformers that the class derives from.
    @functools.wraps(original_can_set)
    def can_set_attn_implementation(cls: type[PreTrainedModel]) -> bool:
        """Returns whether the model class uses the attention interface."""
        for base in cls.__mro__:
            if base is not PreTrainedModel and base.__module__.startswith("transformers.") and issubclass(base, PreTrainedModel):
                return original_can_set(base) and not _has_table_of_names(base.__module__)
        try:
            inspect.getsource(sys.modules[cls.__module__])
        except (KeyError, OSError, TypeError):
            return True
        return original_can_set(cls)

    @functools.wraps(original_get)
    def get_correct_attn_implementation(self: PreTrainedModel, requested_attention: str | None, *args: Any, **kwargs: Any) -> str:
        """Returns what transformers' method returns, after the check of our names."""
        if requested_attention in (NAME, PAGED_NAME) and not self._can_set_attn_implementation():
            raise ValueError(
                f"attn_implementation: got {requested_attention!r}, and {type(self).__name__} of transformers {transformers_version} does "
                "not use the attention interface: expected 'sdpa', which volta_fa.enable_sdpa() also runs, or 'eager'"
            )
        if requested_attention == PAGED_NAME:
            continuous_batching.check_release()
        return original_get(self, requested_attention, *args, **kwargs)

    models._can_set_attn_implementation = classmethod(can_set_attn_implementation)
    models.get_correct_attn_implementation = get_correct_attn_implementation
    continuous_batching.register()
