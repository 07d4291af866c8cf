"""Public names of `volta_fa.integrations.sageattention`: SageAttention's functions, attention with int8 scores for inference, and
`install_sageattention_shim`, which makes `import sageattention` find them."""

from .integrations.sageattention import *
from .integrations.sageattention import __all__ as _functions
from .integrations.stand_in import install_sageattention_shim

__all__ = ["install_sageattention_shim", *_functions]
