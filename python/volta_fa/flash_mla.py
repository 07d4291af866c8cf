"""Public name of `volta_fa.integrations.flash_mla`: FlashMLA's functions."""

from .integrations.flash_mla import *
from .integrations.flash_mla import __all__ as __all__
