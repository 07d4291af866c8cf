"""SageAttention 2's package, made of volta_fa: for programs that import sageattention. See volta_fa's docs/guides/fast.md."""

from .core import *
from .core import __all__ as __all__
