"""SageAttention's functions, and the stand-in for its package: public names of `volta_fa.integrations.sageattention`."""

from .integrations.sageattention.install import install_sageattention_shim
from .integrations.sageattention.interface import *
from .integrations.sageattention.interface import __all__ as _functions

__all__ = ["install_sageattention_shim", *_functions]
