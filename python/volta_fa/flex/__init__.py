"""FlexAttention: torch's `flex_attention` on volta_fa.

- `attention`: `flex_attention`, with torch's signature; `attend`: the call of the operators.
- `score_mod`, with `tracing`: which score functions the operators compute.
- `compiled`: torch.compile's programs, with `mask_op` for their masks.
- `switch`: `enable_flex` and `disable_flex`, whose state is in `routing`.
"""

from .attention import flex_attention
from .switch import disable_flex, enable_flex

__all__ = ["disable_flex", "enable_flex", "flex_attention"]
