"""Public name of `volta_fa.integrations.unsloth`: importing it, after unsloth, calls `enable_unsloth`. Without a suitable GPU it warns."""

import warnings

from .integrations.unsloth import __all__ as __all__
from .integrations.unsloth import disable_unsloth as disable_unsloth
from .integrations.unsloth import enable_unsloth
from .integrations.unsloth import unsloth_stats as unsloth_stats

try:
    enable_unsloth()
except RuntimeError as error:
    # a script may run on newer GPUs too, where unsloth has better kernels
    warnings.warn(f"{error}: nothing is replaced", stacklevel=2)
