"""FlexAttention: torch's `flex_attention` on volta_fa.

- `attention`: `flex_attention`, with torch's signature.
- `score_mod`, with `tracing`: which score functions the operators compute.
- `compiled`: torch.compile's programs.
- `switch`: `enable_flex` and `disable_flex`.
"""

from .attention import flex_attention
from .switch import disable_flex, enable_flex

__all__ = ["disable_flex", "enable_flex", "flex_attention"]
