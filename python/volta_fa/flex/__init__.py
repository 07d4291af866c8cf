"""FlexAttention: torch's `flex_attention` on volta_fa.

- `attention`: `flex_attention`, with torch's signature, in eager mode, and the state of `switch`; `attend`: the call of `volta_fa::fwd`.
- `score_mod`: which score functions (`score_mod`) the operators compute; `tracing` turns one into a graph of operations.
- `compiled`: the same in torch.compile's programs, whose block masks an operator packs.
- `switch`: `enable_flex` and `disable_flex`, which make torch's own function run on volta_fa."""

from .attention import flex_attention
from .switch import disable_flex, enable_flex

__all__ = ["disable_flex", "enable_flex", "flex_attention"]
