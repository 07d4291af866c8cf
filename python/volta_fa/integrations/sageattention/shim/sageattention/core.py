"""The functions that programs import from `sageattention.core`."""

from volta_fa.integrations.sageattention import *
from volta_fa.integrations.sageattention import __all__ as __all__
