"""SageAttention's functions, and the stand-in for its package: public names of `volta_fa.integrations.sageattention`."""

from .integrations.sageattention import *
from .integrations.sageattention import __all__ as _functions
from .integrations.stand_in import install_sageattention_shim

__all__ = ["install_sageattention_shim", *_functions]
