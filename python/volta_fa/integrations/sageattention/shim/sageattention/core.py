"""The functions that programs import from `sageattention.core`."""

from volta_fa.integrations.sageattention.interface import *
from volta_fa.integrations.sageattention.interface import __all__ as __all__
