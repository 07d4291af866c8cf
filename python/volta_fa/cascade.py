"""Public name of `volta_fa.kv_cache.cascade`: attention with a shared prefix."""

from .kv_cache.cascade import cascade_attention

__all__ = ["cascade_attention"]
