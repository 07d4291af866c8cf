"""Public name of `volta_fa.integrations.sdpa`: PyTorch's scaled_dot_product_attention."""

from .integrations.sdpa import disable_sdpa, enable_sdpa, sdpa_enabled, sdpa_stats

__all__ = ["disable_sdpa", "enable_sdpa", "sdpa_enabled", "sdpa_stats"]
