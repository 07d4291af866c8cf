"""Public name of `volta_fa.kv_cache.formats`: the formats of quantized KV caches."""

from .kv_cache.formats import *
from .kv_cache.formats import __all__ as __all__
