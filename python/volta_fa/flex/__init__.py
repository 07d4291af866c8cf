"""FlexAttention on volta_fa."""
